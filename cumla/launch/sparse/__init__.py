# SPDX-License-Identifier: Apache-2.0
"""Launchers of the kernels in cuda/sparse."""
