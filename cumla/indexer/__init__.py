# SPDX-License-Identifier: Apache-2.0
"""The indexer of sparse attention: logits, its cache, and quantisation."""
