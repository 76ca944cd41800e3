# SPDX-License-Identifier: Apache-2.0
"""Sparse attention: each query reads the cached rows that a list names."""
