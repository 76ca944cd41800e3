# SPDX-License-Identifier: Apache-2.0
"""Sections that users do not need, each in a module of its family."""
