# SPDX-License-Identifier: Apache-2.0
"""Measuring, recording and comparing: development tools, no part of the package. See README.md."""
