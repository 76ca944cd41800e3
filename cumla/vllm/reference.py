# SPDX-License-Identifier: Apache-2.0
"""Reference windows (R-SWA): generated tokens see the prompt, and a window of generated ones."""

from __future__ import annotations

from typing import Any

import torch

import cumla

__all__ = ["ReferenceWindows"]


class ReferenceWindows:
    """Describes steps with reference windows to the kernels.

    A request is two there: its tokens of the prompt, which see all before them, and the generated
    ones, which see the prompt as a prefix, and a window. A step may have both kinds: a request that
    was preempted computes its keys once more. Either may have no token. What CUDA graphs read stays
    where it is; each step fills it in before a replay.
    """

    def __init__(self, window: int, config: Any, device: torch.device) -> None:
        self._window = window - 1  # to the left
        self._parts = 2 * config.scheduler_config.max_num_seqs
        tokens = config.scheduler_config.max_num_batched_tokens
        self._kv_lens, self._prefixes, self._start, self._end, self._offsets = (
            torch.zeros(size, dtype=torch.int32, device=device)
            for size in (self._parts, self._parts, tokens, tokens, self._parts + 1)
        )
        self._table = torch.zeros((self._parts, 0), dtype=torch.int32, device=device)

    def fill(
        self, common: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, cumla.AttentionMask]:
        """Return lengths, offsets, block table and mask of a step of vLLM's, of both parts."""
        starts, kv_lens, table = (
            common.query_start_loc,
            common.seq_lens,
            common.block_table_tensor,
        )
        requests, tokens = len(kv_lens), common.num_actual_tokens
        parts = 2 * requests
        lens, prefixes = (each[:parts].view(-1, 2) for each in (self._kv_lens, self._prefixes))
        offsets = self._offsets[: parts + 1]
        told = common.rswa_prefix_lens  # None in a capture without requests
        prefixes.zero_()
        if told is not None:
            prefixes[: len(told), 1].copy_(told[:requests], non_blocking=True)
        new = starts[1:] - starts[:-1]
        before = kv_lens - new
        of_prompt = torch.minimum((prefixes[:, 1] - before).clamp(min=0), new)
        torch.add(before, of_prompt, out=lens[:, 0])
        lens[:, 1].copy_(kv_lens)
        of_parts = offsets[:parts].view(-1, 2)
        of_parts[:, 0].copy_(starts[:-1])
        torch.add(starts[:-1], of_prompt, out=of_parts[:, 1])
        offsets[parts:].copy_(starts[-1:])
        if table.shape[1] > self._table.shape[1]:
            self._table = table.new_zeros((self._parts, table.shape[1]))
        pages = self._table[:parts, : table.shape[1]]
        pages.view(requests, 2, -1).copy_(table[:requests, None])
        kept = cumla.AttentionMask(self._start[:tokens], self._end[:tokens])
        length = lens.view(-1)
        cumla.AttentionMask.windows(self._window, kv_lens=length, qo_indptr=offsets, out=kept)
        rows = torch.arange(tokens, dtype=torch.int32, device=starts.device)
        part = torch.bucketize(rows, offsets[1:], right=True)
        kept.start.masked_fill_(part % 2 == 0, 0)
        mask = cumla.AttentionMask(kept.start, kept.end, prefixes.view(-1))
        return length, offsets, pages, mask
