# SPDX-License-Identifier: Apache-2.0
"""All sections, in the order in which they are measured and shown."""

from __future__ import annotations

from bench.case import Section
from bench.sections import block_sums, blocks, caches, groups, heads, indexer, lists, mla, widths

SECTIONS: tuple[Section, ...] = (
    mla.DENSE,
    mla.SHORT,
    mla.FP8,
    widths.WIDTHS,
    widths.WINDOWS,
    widths.SHORT_WINDOWS,
    mla.CHUNKS,
    heads.DECODE,
    heads.SHORT,
    heads.PREFILL,
    lists.DECODE,
    lists.OTHER_ROWS,
    lists.V4,
    lists.V41,
    lists.PREFILL,
    indexer.LOGITS,
    indexer.TOP_K,
    blocks.DECODE,
    blocks.PREFILL,
    groups.GROUPS,
    blocks.SCORES,
    block_sums.SUMS,
    blocks.SELECT,
    blocks.STEP,
    mla.SCHEDULES,
    mla.INVARIANT,
    mla.PAGES,
    caches.WRITES,
    caches.MERGES,
)
