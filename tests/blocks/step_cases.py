# SPDX-License-Identifier: Apache-2.0
"""Calls of BlockSparseStep, and the functions that make the same step; NumPy arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

import cumla
from cumla.reference.blocks.rows import tokens_seen

HEADS, KV_HEADS, COLUMNS, PAGE, MAX_PAGES, TOPK = 8, 2, 64, 64, 4, 4
MADE_OF = ("q", "k", "v", "index_q", "index_keys", "block_table")


@dataclass(frozen=True)
class Case:
    """Three requests; q_len 0: of different numbers of query tokens."""

    q_len: int = 1
    index_heads: int = KV_HEADS
    block_size: int = 16
    init_blocks: int = 0
    local_blocks: int = 1
    index_dim: int = COLUMNS
    causal: bool = True
    num_groups: int | None = None
    activation: str = "none"
    stride: int = 1
    has_weights: bool = False
    open_block: bool = False

    SIZES: ClassVar = (
        *("batch", "total_tokens", "num_heads", "head_dim", "topk", "block_size", "max_pages"),
        *("page_size", "index_heads", "num_groups", "stride", "num_kv_heads"),
    )

    @property
    def lens(self) -> np.ndarray:
        return np.array([200, 5, 97], np.int32)

    @property
    def lead(self) -> tuple[int, ...]:
        return (3, self.q_len) if self.q_len else (7,)

    def arguments(self, seed: int = 0) -> dict[str, Any]:
        rng = np.random.default_rng(seed)

        def numbers(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float16)

        pages = 3 * MAX_PAGES + 1
        given: dict[str, Any] = {
            "q": numbers(*self.lead, HEADS, COLUMNS),
            "k": numbers(pages, PAGE, KV_HEADS, COLUMNS),
            "v": numbers(pages, PAGE, KV_HEADS, COLUMNS),
            "index_q": numbers(*self.lead, self.index_heads, self.index_dim),
            "index_keys": numbers(pages, PAGE // self.stride, self.index_dim),
            "block_table": rng.permutation(pages - 1).reshape(3, MAX_PAGES).astype(np.int32),
            "kv_lens": self.lens,
        }
        if not self.q_len:  # a row before and one after those of requests
            given["qo_indptr"] = np.array([1, 3, 3, 6], np.int32)
        if self.has_weights:
            tokens = int(np.prod(self.lead))
            given["weights"] = rng.standard_normal((tokens, self.index_heads)).astype(np.float32)
        return given

    @property
    def forced(self) -> dict[str, int]:
        return {"init_blocks": self.init_blocks, "local_blocks": self.local_blocks}

    @property
    def scored(self) -> dict[str, Any]:
        sums = {"num_groups": self.num_groups, "activation": self.activation}
        return {"block_size": self.block_size, "causal": self.causal, "stride": self.stride, **sums}

    @property
    def options(self) -> dict[str, Any]:
        return {"topk": TOPK, **self.scored, **self.forced, "open_block": self.open_block}

    def numbers(self) -> dict[str, Any]:
        """What the class takes in the place of arrays."""
        return {
            "batch": 3,
            "total_tokens": int(np.prod(self.lead)),
            "num_heads": HEADS,
            "head_dim": COLUMNS,
            "max_pages": MAX_PAGES,
            "page_size": PAGE,
            "index_heads": self.index_heads,
            "index_dim": self.index_dim,
            "num_kv_heads": KV_HEADS,
            "q_len": self.q_len or None,
            "dtype": "float16",
            **self.options,
        }

    def step(self, given: dict[str, Any], **more: Any) -> cumla.BlockSparseStep:
        names = (*MADE_OF, "qo_indptr")
        arrays = {name: given[name] for name in names if name in given}
        return cumla.BlockSparseStep.from_arrays(**arrays, **self.options, **more)

    def update(self, step: cumla.BlockSparseStep, given: dict[str, Any], **more: Any) -> None:
        lengths = {name: given[name] for name in ("kv_lens", "qo_indptr") if name in given}
        step.update(**lengths, **more)

    def select(self, step: cumla.BlockSparseStep, given: dict[str, Any], **more: Any) -> Any:
        names = ("index_q", "index_keys", "block_table", "weights")
        return step.select(**{name: given[name] for name in names if name in given}, **more)

    def run(self, step: cumla.BlockSparseStep, given: dict[str, Any], **more: Any) -> Any:
        names = ("q", "k", "v", "block_table")
        return step.run(**{name: given[name] for name in names}, **more)

    def attend(self, given: dict[str, Any], lists: Any) -> Any:
        names = ("q", "k", "v", "block_table", "kv_lens", "qo_indptr")
        arrays = {name: given[name] for name in names if name in given}
        return cumla.block_sparse_attention(
            **arrays, block_indices=lists, block_size=self.block_size, causal=self.causal
        )

    def scores(self, given: dict[str, Any]) -> Any:
        names = ("block_table", "kv_lens", "qo_indptr", "weights")
        arrays = {name: given[name] for name in names if name in given}
        return cumla.block_scores(given["index_q"], given["index_keys"], **self.scored, **arrays)

    def visible(self, given: dict[str, Any]) -> np.ndarray:
        """Blocks that query tokens see; NumPy arrays."""
        most, tokens = MAX_PAGES * PAGE, int(np.prod(self.lead))
        lengths = given["kv_lens"], given.get("qo_indptr"), most, self.causal
        seen = np.array([n for _, n in tokens_seen(tokens, *lengths)], np.int32)
        if self.open_block:
            return np.minimum(seen // self.block_size + 1, most // self.block_size)
        return -(-seen // self.block_size)

    def expected(self, given: dict[str, Any]) -> tuple[Any, ...]:
        """Lists, out and lse, by the three functions."""
        scores = self.scores(given)
        visible = self.visible(given)
        lists = cumla.select_blocks(scores, TOPK, visible=visible, **self.forced)
        return lists, *self.attend(given, lists)


STEP_5 = Case(block_size=8, stride=8, index_heads=8, num_groups=2, activation="relu")
QSA = replace(STEP_5, block_size=4, stride=4, index_heads=4, num_groups=1, open_block=True)
SUMS = (
    *(replace(STEP_5, q_len=q_len, index_dim=128, has_weights=True) for q_len in (1, 0)),
    *(replace(STEP_5, q_len=q_len, has_weights=True) for q_len in (0, 3)),
    replace(QSA, q_len=2),
    Case(index_heads=4, num_groups=1, has_weights=True),
)
