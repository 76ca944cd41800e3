# SPDX-License-Identifier: Apache-2.0
"""The shape for which a plan of attention is made, and what follows from it alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from cumla.launch.mha.attention import COLUMNS, E4M3, tiles_of
from cumla.launch.split.plan import RaggedKey, page_form

__all__ = ["COLUMNS", "E4M3", "MHAShape"]


@dataclass(frozen=True)
class MHAShape(RaggedKey):
    """The shape for which a plan of :func:`cumla.attention` is made."""

    batch: int
    total_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    page_size: int  # 0: rows without pages
    dtype: str
    cache_dtype: str  # of keys and values: dtype, or float8_e4m3fn
    causal: bool
    q_len: int  # of each request, where q has an axis of requests; else 0
    device: int | None
    sm_count: int
    window_left: int = -1  # visible keys before a query's own; -1: all
    batch_invariant: bool = False
    max_pieces: int = 1  # of a batch-invariant request
    more_pieces: int = 0  # of all batch-invariant requests, beyond one for each row tile
    masked: bool = False  # arrays say which keys a query sees; `causal` is then False
    # As RaggedKey says, or "full tiles": those of a mixed batch that has a schedule beside; or
    # "prefixes": those of shared prefixes and of the rests of requests.
    role: str = "batch"
    max_pages: int = 0  # columns of the block table of requests that share prefixes; 0: none do
    bias: str = ""  # form of the bias of scores; "": none

    @property
    def variant(self) -> str:
        """The one of VARIANTS that a kernel must have."""
        return "masked" if self.masked else self.bias

    @cached_property
    def kernel_tiles(self) -> tuple[int, int]:
        """Tiles of 64 columns, of keys and of values, in the kernel that serves these widths."""
        keys, values = -(-self.head_dim // COLUMNS), -(-self.head_dim_v // COLUMNS)
        fitting = (
            tiles for tiles in tiles_of(self.variant) if tiles[0] >= keys and tiles[1] >= values
        )
        return next(fitting, (keys, values))

    @property
    def numbers_requests(self) -> bool:
        """Return whether the schedule has the numbers of requests, of which masks have arrays."""
        return self.masked

    @property
    def has_window(self) -> bool:
        """Return whether a query sees only some of the keys before its own."""
        return self.window_left >= 0

    @property
    def schedule_page_size(self) -> int:
        """Tokens for each entry that kv_indptr counts: of rows without pages one."""
        return self.page_size or 1

    @cached_property
    def form(self) -> str:
        """The one of PAGE_FORMS that serves these pages of 16-bit numbers."""
        return page_form(self.page_size) if self.page_size else "pages"
