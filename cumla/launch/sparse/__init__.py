# SPDX-License-Identifier: Apache-2.0
"""Launchers of cuda/sparse: selection, and attention to lists of cache rows."""
