# SPDX-License-Identifier: Apache-2.0
"""Sizes of a call and formats of caches, for the launchers of attention to lists."""

from __future__ import annotations

from dataclasses import dataclass

from cumla.launch.mla.shape import LatentKey
from cumla.launch.split.plan import BLOCK_TOKENS
from cumla.mla.shape import E4M3_512, FORMATS, NO_ROPE, PACKED, V4, V41, V41_FP4

__all__ = ["WHOLE_ROWS", "WIDENED", "MLASparseShape"]

WHOLE_ROWS = (PACKED, NO_ROPE, E4M3_512)
"""Caches of whole rows: e4m3 latent columns, perhaps four scales, perhaps RoPE columns."""
WIDENED = (V4, V41, V41_FP4)
"""Caches whose rows of 512 columns become bfloat16 in shared memory."""


@dataclass(frozen=True)
class MLASparseShape(LatentKey):
    """The shape of attention to lists of rows: each query token has a list."""

    batch: int  # q is (batch, q_len, num_heads, 576)
    q_len: int
    num_heads: int
    topk: int  # entries of a list
    dtype: str  # "bfloat16" or "float16"
    cache: str  # one of CACHES of cumla.launch.mla.shape, or of FORMATS
    device: int | None  # CUDA ordinal; None for arrays on the CPU, which need no plan
    sm_count: int  # multiprocessors of that device, 0 for the CPU
    batch_invariant: bool = False
    extra_topk: int = 0  # entries of a list that name rows of a second cache
    has_max_logits: bool = False  # the largest score of each row is an output, too; cache "same"
    extra_cache: str = ""  # the format of that second cache, beside one of WIDENED

    num_kv_heads = 1
    page_size = 1  # what a list names is one row
    causal = False

    @property
    def has_whole_rows(self) -> bool:
        """Return whether the kernel computes from whole packed rows."""
        return self.cache in WHOLE_ROWS

    @property
    def reads_lists(self) -> bool:
        """Return whether the kernel reads the caller's lists, which then are not made compact."""
        return self.cache in FORMATS

    @property
    def is_widened(self) -> bool:
        """Return whether a kernel for one or two caches of WIDENED computes."""
        return self.cache in WIDENED

    @property
    def num_places(self) -> int:
        """Lists: one for each query token."""
        return self.batch * self.q_len

    @property
    def topks(self) -> tuple[int, int]:
        """Entries of a list, by the cache whose rows they name."""
        return self.topk, self.extra_topk

    @property
    def entries(self) -> int:
        """Entries of a list."""
        return self.topk + self.extra_topk

    @property
    def max_blocks(self) -> int:  # type: ignore[override]
        """Most blocks of 64 entries of a list."""
        return -(-self.entries // BLOCK_TOKENS)
