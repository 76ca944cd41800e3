# SPDX-License-Identifier: Apache-2.0
"""Faces of the libraries that people call today: their signatures, cumla's kernels."""
