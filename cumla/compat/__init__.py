# SPDX-License-Identifier: Apache-2.0
"""Compatibility modules: the Python interfaces of other libraries over cumla's kernels."""
