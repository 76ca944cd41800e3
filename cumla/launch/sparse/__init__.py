# SPDX-License-Identifier: Apache-2.0
"""Launchers of cuda/sparse: attention to lists of cache rows."""
