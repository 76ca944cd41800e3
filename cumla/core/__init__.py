# SPDX-License-Identifier: Apache-2.0
"""What a call is: arrays of any framework, checks, plans and operations; knows no family."""
