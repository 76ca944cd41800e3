# SPDX-License-Identifier: Apache-2.0
"""Definitions of the operations of cumla.mla."""
