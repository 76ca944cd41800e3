# SPDX-License-Identifier: Apache-2.0
"""What makes a release; not in the wheel."""
