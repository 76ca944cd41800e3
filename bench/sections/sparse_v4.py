# SPDX-License-Identifier: Apache-2.0
"""Section of sparse MLA over DeepSeek-V4's slots: a window of tokens and a selection beside it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bench.sections import calls
from cumla import reference
from cumla.bench.cases import Ceilings
from cumla.bench.gpu import DTYPES
from cumla.bench.problem import filled
from cumla.bench.section import RATES, Bench, CheckError, Column, Row, Section, columns
from cumla.mla.shape import V4_BYTES, V4_FP8_DIM, V4_ROW_BYTES, VALUE_DIM

__all__ = ["SECTIONS", "V4Case"]

_TOLERANCE = 6e-3  # of a row, |error| / |row|: roundings of weights and output
_LSE_TOLERANCE = 8.01 / 65536
_SOME_PAGES = 8  # that are drawn; others hold the same
_PAGES = (256, 64)  # slots of a page of the window, and of the other cache


@dataclass(frozen=True, slots=True)
class V4Case:
    """Query tokens that see all of a window, and some slots of another cache."""

    batch: int
    q_len: int
    heads: int
    topk: int = 128
    extra_topk: int = 512
    kv_len: int = 8192  # slots of each request in the other cache

    @property
    def name(self) -> str:
        """For example ``sparse_v4-b128-s1-h64-k128+512``."""
        return f"sparse_v4-b{self.batch}-s{self.q_len}-h{self.heads}-k{self.topk}+{self.extra_topk}"

    @property
    def nbytes(self) -> int:
        """Bytes that must move: rows once for each list, q, out and lists."""
        entries = self.topk + self.extra_topk
        each = entries * (V4_BYTES + 4) + 2 * self.heads * VALUE_DIM * 2
        return self.batch * self.q_len * each

    @property
    def flops(self) -> int:
        """Operations on pairs of query and listed row."""
        pairs = self.batch * self.q_len * self.heads * (self.topk + self.extra_topk)
        return 4 * pairs * VALUE_DIM

    def floor_us(self, ceilings: Ceilings) -> float:
        """Time below which no kernel gets while the ceilings hold, in microseconds."""
        memory = self.nbytes / (ceilings.read_gbps * 1e3)
        return max(memory, self.flops / (ceilings.matmul_tflops * 1e6))

    def to_json(self) -> Row:
        figures = {"nbytes": self.nbytes, "flops": self.flops}
        return {"op": "sparse_v4", "dtype": "bfloat16"} | asdict(self) | figures


def _pages(page_size: int) -> np.ndarray[Any, Any]:
    """Draw some pages: numbers of e4m3 up to 28, factors from 2^-10 to 2^-6, RoPE columns."""
    rng = np.random.default_rng(page_size)
    rows = rng.integers(0, 96, (_SOME_PAGES, page_size, V4_ROW_BYTES), np.uint8)
    rows[..., :V4_FP8_DIM] |= rng.integers(0, 2, rows[..., :V4_FP8_DIM].shape, np.uint8) << 7
    rope = rng.normal(0, 0.1, (_SOME_PAGES, page_size, (V4_ROW_BYTES - V4_FP8_DIM) // 2))
    rows[..., V4_FP8_DIM:] = rope.astype(DTYPES["bfloat16"]).view(np.uint8)
    scales = rng.integers(117, 122, (_SOME_PAGES, page_size, V4_BYTES - V4_ROW_BYTES), np.uint8)
    parts = [part.reshape(_SOME_PAGES, -1) for part in (rows, scales)]
    return np.concatenate(parts, axis=1)


def _lists(case: V4Case, count: int, length: int) -> Any:
    """Draw a slot from each of `count` stretches of a request's `length`."""
    bounds = np.linspace(0, length, count + 1).astype(np.int32)
    rng = np.random.default_rng(case.batch)
    lists = rng.integers(bounds[:-1], bounds[1:], (case.batch, case.q_len, count), np.int32)
    return lists + (np.arange(case.batch, dtype=np.int32) * np.int32(length))[:, None, None]


def _measure(bench: Bench, case: V4Case) -> Row:
    gpu, dtype = bench.gpu, DTYPES["bfloat16"]
    known, caches, lists = [], [], []
    for page_size, count, least in zip(
        _PAGES, (case.topk, case.extra_topk), (_PAGES[0], case.kv_len), strict=True
    ):
        some, pages = _pages(page_size), case.batch * least // page_size
        cache = gpu.empty((-(-pages // _SOME_PAGES), *some.shape), "uint8")
        cache[...] = gpu.upload(some)
        caches.append(cache.reshape(-1, page_size, 1, V4_BYTES))
        known.append(some.reshape(_SOME_PAGES, page_size, 1, V4_BYTES))
        lists.append(_lists(case, count, least))
    shape = (case.batch, case.q_len, case.heads)
    q = filled(gpu, (*shape, VALUE_DIM), "bfloat16", seed=3).view(dtype)
    bits, lse = (
        gpu.empty(s, d)
        for s, d in (
            ((*shape, VALUE_DIM), "uint16"),
            ((case.batch, case.heads, case.q_len), "float32"),
        )
    )
    for output in (bits, lse):
        gpu.fill_bytes(output, 0xFF)
    own, extra = (gpu.upload(array) for array in lists)
    more = {"extra_kv_cache": caches[1], "extra_indices": extra}
    update, run = calls.sparse(q, caches[0], own, bits.view(dtype), lse, **more)
    update()
    run()
    for request in sorted({0, case.batch - 1}):
        named = [
            listed[request] % (_SOME_PAGES * size)
            for listed, size in zip(lists, _PAGES, strict=True)
        ]
        query = gpu.download(q.view(np.uint16)[request].copy()).view(dtype)
        exact, exact_lse = (np.empty(shape[1:] + more, np.float32) for more in ((VALUE_DIM,), ()))
        reference.mla_sparse_attention(
            *(query, known[0], named[0]),
            extra_kv_cache=known[1],
            extra_indices=named[1],
            out=exact,
            lse=exact_lse,
        )
        got = gpu.download(bits[request].copy()).view(dtype).astype(np.float32)
        errors = np.linalg.norm(got - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
        if not (errors <= _TOLERANCE).all():  # NaN is wrong
            raise CheckError(f"{case.name}: request {request} is off by {errors.max():.2e}")
        got_lse = gpu.download(lse[request].copy()).T
        if not (np.abs(got_lse - exact_lse) <= _LSE_TOLERANCE * np.abs(exact_lse).max()).all():
            raise CheckError(f"{case.name}: logarithms of request {request} are wrong")
    single, floor = bench.time(run), case.floor_us(bench.ceilings)
    rates = single.rates(case.flops, case.nbytes, floor)
    return rates | {"schedule_us": bench.time(update).us}


SECTIONS = (
    Section(
        name="sparse",
        title="sparse MLA, V4: ",
        ops=("sparse_v4",),
        cases=(
            *(V4Case(batch, 1, 64) for batch in (1, 8, 32, 128)),
            *(V4Case(batch, 1, 128, extra_topk=1024) for batch in (1, 128)),
            V4Case(128, 2, 64),
            V4Case(128, 1, 16),
        ),
        measure=_measure,
        shape=columns("batch", "q_len", "heads", "topk", "extra_topk"),
        figures=(*RATES, Column("schedule us", "schedule_us", "us")),
    ),
)
