# SPDX-License-Identifier: Apache-2.0
"""Sparse attention: selecting the tokens to attend to."""
