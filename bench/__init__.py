# SPDX-License-Identifier: Apache-2.0
"""Recording and comparing: development tools, no part of the package. See README.md."""
