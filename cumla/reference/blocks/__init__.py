# SPDX-License-Identifier: Apache-2.0
"""What the operations of cumla.blocks mean."""
