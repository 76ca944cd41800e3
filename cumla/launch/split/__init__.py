# SPDX-License-Identifier: Apache-2.0
"""Split-KV plans and schedules, whatever attends with them."""
