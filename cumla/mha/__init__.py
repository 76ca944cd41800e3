# SPDX-License-Identifier: Apache-2.0
"""Multi-head and grouped-query attention: writing caches, rotary position embedding."""
