# SPDX-License-Identifier: Apache-2.0
"""Sections of sparse attention: MLA over lists, and whole decoding steps with indexer and top-k."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bench.sections import calls
from bench.sections.indexer import DecodeStep, PagedLogitsCase, floor_us
from bench.sections.mla import against
from cumla import reference
from cumla.bench.cases import PAGE_SIZE, Ceilings
from cumla.bench.gpu import DTYPES, Gpu
from cumla.bench.problem import filled
from cumla.bench.section import RATES, Bench, CheckError, Column, Row, Section, columns
from cumla.launch.mla.shape import HEAD_DIM, VALUE_DIM
from cumla.mla.shape import PACKED_BYTES

__all__ = ["SECTIONS", "SparseCase", "StepCase"]

_ITEM = 2  # bytes of a bfloat16
_TOLERANCE = 6e-3  # of a row, |error| / |row|: roundings of weights and output
_LSE_TOLERANCE = 8.01 / 65536
_CONTEXT = 32768
_LONG = 1000  # microseconds: from so many on a few repeats do


@dataclass(frozen=True, slots=True)
class SparseCase:
    """Query tokens with full lists of random rows, ascending as top-k leaves them."""

    batch: int
    q_len: int
    heads: int
    cache: str = "packed"  # or "bfloat16"
    kv_len: int = _CONTEXT  # of each request, whose tokens alone are listed
    topk: int = 2048
    prefill: bool = False  # tokens of one request, without a batch

    @property
    def name(self) -> str:
        """For example ``sparse_decode_fp8-b128-s1-h128-kv32768-k2048``."""
        shape = f"b{self.batch}-s{self.q_len}-h{self.heads}"
        return f"{self.op}-{shape}-kv{self.kv_len}-k{self.topk}"

    @property
    def op(self) -> str:
        """Name the operation as files of peers do."""
        return f"sparse_{'prefill' if self.prefill else 'decode'}" + "_fp8" * self.is_packed

    @property
    def is_packed(self) -> bool:
        """Whether rows are those of 656 bytes."""
        return self.cache == "packed"

    @property
    def lead(self) -> tuple[int, ...]:
        """Axes of the query tokens."""
        return (self.q_len,) if self.prefill else (self.batch, self.q_len)

    @property
    def row_bytes(self) -> int:
        """Bytes of a cached row."""
        return PACKED_BYTES if self.is_packed else HEAD_DIM * _ITEM

    @property
    def nbytes(self) -> int:
        """Bytes that must move: rows once for each list, of a prefill once; q, out and lists."""
        tokens = self.batch * self.q_len
        rows = self.kv_len if self.prefill else tokens * self.topk
        each = self.heads * (HEAD_DIM + VALUE_DIM) * _ITEM + self.topk * 4
        return rows * self.row_bytes + tokens * each

    @property
    def flops(self) -> int:
        """Operations on pairs of query and listed row."""
        return 2 * self.batch * self.q_len * self.heads * self.topk * (HEAD_DIM + VALUE_DIM)

    def floor_us(self, ceilings: Ceilings) -> float:
        """Time below which no kernel gets while the ceilings hold, in microseconds."""
        memory = self.nbytes / (ceilings.read_gbps * 1e3)
        return max(memory, self.flops / (ceilings.matmul_tflops * 1e6))

    def to_json(self) -> Row:
        figures = {"nbytes": self.nbytes, "flops": self.flops}
        return {"op": self.op, "dtype": "bfloat16"} | asdict(self) | figures


@dataclass(frozen=True, slots=True)
class StepCase:
    """A layer of a decoding step: logits of 64 heads, top-k, attention to packed rows."""

    batch: int
    kv_len: int
    heads: int
    topk: int = 2048

    @property
    def name(self) -> str:
        """For example ``dsa_step-b64-h128-kv32768-k2048``."""
        return f"dsa_step-b{self.batch}-h{self.heads}-kv{self.kv_len}-k{self.topk}"

    @property
    def logits(self) -> PagedLogitsCase:
        """The part of the indexer."""
        return PagedLogitsCase(self.batch, 1, self.kv_len)

    @property
    def attention(self) -> SparseCase:
        """The part of attention."""
        return SparseCase(self.batch, 1, self.heads, kv_len=self.kv_len, topk=self.topk)

    def floor_us(self, ceilings: Ceilings) -> float:
        """Add up the floors of both parts, and the time to read the logits."""
        reading = self.batch * self.kv_len * 4 / (ceilings.read_gbps * 1e3)
        parts = floor_us(self.logits, ceilings), self.attention.floor_us(ceilings)
        return sum(parts) + reading

    def to_json(self) -> Row:
        return {"op": "dsa_step", "cache": "packed"} | asdict(self)


class _Arrays:
    """Query, cache and outputs of a case on the device."""

    def __init__(self, gpu: Gpu, case: SparseCase) -> None:
        self.gpu, self.case = gpu, case
        dtype = DTYPES["bfloat16"]
        count = case.batch * case.kv_len
        rows = filled(gpu, (count, HEAD_DIM), "bfloat16", seed=2).view(dtype)
        self.cache = rows.reshape(-1, PAGE_SIZE, 1, HEAD_DIM)
        if case.is_packed:
            self.cache = gpu.empty((count // PAGE_SIZE, PAGE_SIZE, 1, PACKED_BYTES), "uint8")
            calls.append(rows, self.cache, gpu.upload(np.arange(count)))()
        shape = (*case.lead, case.heads)
        self.q = filled(gpu, (*shape, HEAD_DIM), "bfloat16", seed=3).view(dtype)
        bits = gpu.empty((*shape, VALUE_DIM), "uint16")
        self.lse = gpu.empty((*shape[:-2], *shape[-2:][:: 1 if case.prefill else -1]), "float32")
        for output in (bits, self.lse):
            gpu.fill_bytes(output, 0xFF)
        self.out = bits.view(dtype)

    def check(self, place: tuple[int, ...], listed: Any) -> None:
        """Compare all heads of a query token with float64, over the rows that its list names."""
        cached = self.cache.reshape(-1, self.cache.shape[-1]).view(np.uint8)
        rows = self.gpu.download(cached[self.gpu.upload(listed)])
        if not self.case.is_packed:
            rows = rows.view(DTYPES["bfloat16"])
        q, out = (
            self.gpu.download(a.view(np.uint16)[place].copy()).view(DTYPES["bfloat16"])
            for a in (self.q, self.out)
        )
        by_token = self.lse if self.case.prefill else self.lse.transpose(0, 2, 1)
        got_lse = self.gpu.download(by_token[place].copy())
        exact, lse = (np.empty(shape, np.float32) for shape in (out.shape, got_lse.shape))
        everything = np.arange(len(rows), dtype=np.int32)
        reference.mla_sparse_attention(
            q[None], rows, everything[None], out=exact[None], lse=lse[None]
        )
        lengths = np.linalg.norm(exact, axis=-1)
        errors = np.linalg.norm(out.astype(np.float32) - exact, axis=-1) / lengths
        if not (errors <= _TOLERANCE).all():  # NaN is wrong
            raise CheckError(f"{self.case.name}: token {place} is off by {errors.max():.2e}")
        if not (np.abs(got_lse - lse) <= _LSE_TOLERANCE * np.maximum(np.abs(lse), 1.0)).all():
            raise CheckError(f"{self.case.name}: logarithms of token {place} are wrong")


def _lists(case: SparseCase) -> Any:
    """Draw a row from each of topk stretches of equal length: a list for each query token."""
    bounds = np.linspace(0, case.kv_len, case.topk + 1).astype(np.int32)
    rng = np.random.default_rng(case.batch)
    lists = rng.integers(bounds[:-1], bounds[1:], (*case.lead, case.topk), np.int32)
    if not case.prefill:
        lists += (np.arange(case.batch, dtype=np.int32) * np.int32(case.kv_len))[:, None, None]
    return lists


def _measure(bench: Bench, case: SparseCase) -> Row:
    gpu, arrays, lists = bench.gpu, _Arrays(bench.gpu, case), _lists(case)
    given = arrays.q, arrays.cache, gpu.upload(lists)
    update, run = calls.sparse(*given, out=arrays.out, lse=arrays.lse)
    update()
    run()
    count = int(np.prod(case.lead))
    for token in sorted({0, count // 2, count - 1}):
        place = tuple(int(i) for i in np.unravel_index(token, case.lead))
        arrays.check(place, lists[place])
    floor = case.floor_us(bench.ceilings)
    single = bench.time(run, **({"repeats": 5, "warmup": 1} if floor > _LONG else {}))
    rates = single.rates(case.flops, case.nbytes, floor)
    return rates | {"schedule_us": bench.time(update).us}


def _measure_step(bench: Bench, case: StepCase) -> Row:
    gpu, arrays = bench.gpu, _Arrays(bench.gpu, case.attention)
    scored = DecodeStep(gpu, case.logits, caches=1)
    table, index = scored.tables[0], (scored.q, scored.cache, scored.weights)
    update, select, attend = calls.dsa(
        *(arrays.q, arrays.cache, *index, table, scored.kv_lens, case.topk),
        out=arrays.out,
        lse=arrays.lse,
    )

    def step() -> None:
        select()
        attend()

    update()
    indices = gpu.download(select())
    attend()
    scored.calls[0]()  # the same logits, for the check
    scored.check()
    for request in sorted({0, case.batch // 2, case.batch - 1}):
        logits = gpu.download(scored.out[request : request + 1])
        chosen = reference.top_k(logits, case.topk).indices[0]
        if not np.array_equal(indices[request, 0], chosen):
            raise CheckError(f"{case.name}: the selection of request {request} is wrong")
        pages = scored.pages[0, request].astype(np.int64)[chosen // PAGE_SIZE]
        arrays.check((request, 0), pages * PAGE_SIZE + chosen % PAGE_SIZE)
    single = bench.time(step)
    floor = case.floor_us(bench.ceilings)
    return single.figures() | {
        "select_us": bench.time(select).us,
        "attend_us": bench.time(attend).us,
        "schedule_us": bench.time(update).us,
        "floor_us": floor,
        "efficiency": floor / single.us,
    }


_SCHEDULE = Column("schedule us", "schedule_us", "us")
_LISTS = Section(
    name="sparse",
    title="sparse MLA: ",
    ops=("sparse_decode", "sparse_decode_fp8", "sparse_prefill", "sparse_prefill_fp8"),
    cases=(
        *(SparseCase(128, 1, heads) for heads in (128, 64, 32, 16)),
        *(SparseCase(128, 2, heads) for heads in (128, 64)),
        *(SparseCase(batch, 1, heads) for batch in (64, 8) for heads in (128, 64, 16)),
        *(SparseCase(1, 1, heads) for heads in (128, 16)),
        *(SparseCase(128, 1, heads, "bfloat16") for heads in (128, 64, 16)),
        SparseCase(8, 1, 128, "bfloat16"),
        *(SparseCase(1, 4096, heads, "bfloat16", 8192, prefill=True) for heads in (128, 64)),
        SparseCase(1, 4096, 64, "bfloat16", 131072, prefill=True),
        SparseCase(1, 4096, 128, "packed", 8192, prefill=True),
    ),
    measure=_measure,
    shape=(
        Column("queries", lambda row: "prefill" if row["prefill"] else "decode"),
        *columns("cache", "batch", "q_len", "heads", "kv_len", "topk"),
    ),
    figures=(
        *RATES,
        Column("x FlashMLA", lambda row: against(row, "FlashMLA"), usual=None),
        _SCHEDULE,
    ),
)
_STEPS = Section(
    name="sparse",
    title="step of a layer: ",
    ops=("dsa_step",),
    cases=(StepCase(64, 32768, 128), StepCase(8, 131072, 16)),
    measure=_measure_step,
    shape=columns("batch", "heads", "kv_len", "topk"),
    figures=(
        RATES[0],
        Column("logits and top-k", "select_us", "us"),
        Column("attention", "attend_us", "us"),
        Column("floor us", "floor_us", "us"),
        RATES[-1],
        _SCHEDULE,
    ),
)
SECTIONS = (_LISTS, _STEPS)
