# SPDX-License-Identifier: Apache-2.0
"""Calls: arrays of any framework, checks, plans and operations; knows no family."""
