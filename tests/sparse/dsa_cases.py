# SPDX-License-Identifier: Apache-2.0
"""Steps of DeepSeek Sparse Attention, and what they give: the three references one by one.

The indexer's numbers are small whole ones, whose products and sums float32 holds exactly, whoever
adds them up: selections are the same everywhere, and many scores are equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cumla import reference
from tests.calls import BF16, E4M3

MADE_OF = ("q", "kv_cache", "index_q", "index_cache", "block_table")
SELECTED_FROM = ("index_q", "index_cache", "index_weights", "block_table")
ATTENDED = ("q", "kv_cache", "block_table")
WINDOW = ("extra_kv_cache", "extra_indices")


@dataclass(frozen=True)
class Step:
    """Sizes of a step."""

    batch: int = 3
    q_len: int = 1
    heads: int = 4
    index_heads: int = 8
    dim: int = 32
    page: int = 16
    pages: int = 4  # of a request
    topk: int = 20
    packed: bool = False
    v4: bool = False
    window: int = 0  # entries of the lists of a second cache, beside v4
    dtype: Any = BF16

    @property
    def capacity(self) -> int:
        """Tokens of a request."""
        return self.page * self.pages

    @property
    def columns(self) -> int:
        """Those of queries."""
        return 512 if self.v4 else 576

    def numbers(self, each: bool = False) -> dict[str, Any]:
        """Return what a plan is made of; with a length of each query token."""
        found = {"batch": self.batch, "q_len": self.q_len, "num_heads": self.heads}
        found |= {"topk": self.topk, "extra_topk": self.window}
        found |= {"index_heads": self.index_heads, "index_dim": self.dim}
        found |= {"max_pages": self.pages, "page_size": self.page}
        cache = "v4" if self.v4 else "v32" if self.packed else None
        shape = {"kv_lens_shape": (self.batch, self.q_len)} if each else {}
        return found | {"cache_format": cache} | shape

    def arguments(self, seed: int = 0) -> dict[str, Any]:
        """The arrays of a layer. The page of no request is NaN in both caches."""
        rng = np.random.default_rng(seed)
        count = self.batch * self.pages
        pages = rng.permutation(count).astype(np.int32)
        slots = (pages[:, None] * self.page + np.arange(self.page)).ravel()
        kv_cache = np.full((count + 1, self.page, 1, 576), np.nan, self.dtype)
        if self.packed or self.v4:
            slot_bytes = 584 if self.v4 else 656
            kv_cache = np.full((count + 1, self.page, 1, slot_bytes), 0x7F, np.uint8)
        rows = rng.standard_normal((len(slots), self.columns), np.float32).astype(self.dtype)
        reference.append_mla_cache(rows, kv_cache, slots)
        index_cache = np.full((count + 1, self.page * (self.dim + 4)), 0x7F, np.uint8)
        keys, scales = np.split(index_cache[:-1], [self.page * self.dim], axis=1)
        keys[...] = self._small(rng, keys.shape).view(np.uint8)
        scales[...] = rng.choice([0.5, 1, 2], (count, self.page)).astype("f4").view(np.uint8)
        lead = self.batch, self.q_len
        weights = rng.integers(-8, 9, (self.batch * self.q_len, self.index_heads)) / 8
        q = rng.standard_normal((*lead, self.heads, self.columns), np.float32)
        return {
            "q": q.astype(self.dtype),
            "kv_cache": kv_cache,
            "index_q": self._small(rng, (*lead, self.index_heads, self.dim)),
            "index_cache": index_cache.reshape(count + 1, self.page, 1, self.dim + 4),
            "index_weights": weights.astype(np.float32),
            "block_table": pages.reshape(self.batch, self.pages),
            **(self._window(rng) if self.window else {}),
        }

    def _window(self, rng: np.random.Generator) -> dict[str, Any]:
        """A second cache, whose slots are NaN where no list names them, with its lists."""
        lists = self.batch, self.q_len, self.window
        slots = rng.permutation(2 * np.prod(lists))[: np.prod(lists)]
        cache = np.full((-(-2 * len(slots) // 8), 8, 1, 584), 0x7F, np.uint8)
        rows = rng.standard_normal((len(slots), 512), np.float32).astype(self.dtype)
        reference.append_mla_cache(rows, cache, slots)
        lists_of = slots.astype(np.int32).reshape(lists)
        return {"extra_kv_cache": cache, "extra_indices": lists_of}

    def visible(self, kv_lens: Any, most: int | None = None) -> Any:
        """How many tokens each query token sees, ``(batch, q_len)``; by its own length, if any."""
        seen = kv_lens.astype(np.int64)
        if seen.ndim == 1:
            seen = seen[:, None] - np.arange(self.q_len - 1, -1, -1)
        return np.clip(seen, 0, self.capacity if most is None else most).astype(np.int32)

    def selected(self, given: dict[str, Any], kv_lens: Any, most: int | None = None) -> Any:
        """The positions that a layer selects."""
        visible = self.visible(kv_lens, most)
        arrays = (given[name] for name in SELECTED_FROM)
        logits = reference.paged_mqa_logits(*arrays, visible, max_kv_len=self.capacity)
        found = reference.top_k(logits, self.topk, row_lens=visible.ravel())
        return found.indices.reshape(self.batch, self.q_len, self.topk)

    def expected(
        self, given: dict[str, Any], kv_lens: Any, most: int | None = None, **options: Any
    ) -> Any:
        """Indices, out and lse of a layer."""
        indices = self.selected(given, kv_lens, most)
        return indices, *attended(given, indices, **options)

    @staticmethod
    def _small(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
        return rng.integers(-2, 3, shape).astype(np.float32).astype(E4M3)


def attended(given: dict[str, Any], indices: Any, **options: Any) -> Any:
    """Attention of a layer to the tokens of a selection, and to its window."""
    q, kv_cache, block_table = (given[name] for name in ATTENDED)
    options |= {"block_table": block_table, **window_of(given)}
    return reference.mla_sparse_decode(q, kv_cache, indices, **options)


def window_of(given: dict[str, Any]) -> dict[str, Any]:
    """The second cache of a layer and its lists, if it has them."""
    return {name: given[name] for name in WINDOW if name in given}
