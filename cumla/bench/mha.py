# SPDX-License-Identifier: Apache-2.0
"""Cached attention of many heads, decoding and prefill: a section."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cumla.bench import calls
from cumla.bench.cases import PAGE_SIZE
from cumla.bench.ceilings import fill_normal
from cumla.bench.gpu import DTYPES, Gpu
from cumla.bench.section import Bench, CheckError, Column, Row, Section, columns

__all__ = ["SECTION", "MHACase"]

_TOLERANCE = 6e-3  # of a row, |error| / |row|: roundings of weights and output
_LSE_TOLERANCE = 8.01 / 65536
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_SMALL_E4M3 = 0xBFBF  # two numbers without the first bit of their exponents: below 2, and no NaN
_FACTORS = {"k_scale": 0.5, "v_scale": 2.0}  # of e4m3
_LONG = 1000  # microseconds: from so many on a few repeats do


@dataclass(frozen=True)
class MHACase:
    """Requests of one length over shuffled pages, bfloat16 queries, causal."""

    batch: int
    heads: int
    kv_heads: int
    columns: int
    kv_len: int
    q_len: int = 1
    value_columns: int = 0  # 0: as many as `columns`
    window: int = -1  # keys before a query that it sees; -1: all
    sinks: bool = False
    page: int = PAGE_SIZE
    cache: str = "bfloat16"  # or "e4m3"

    @property
    def name(self) -> str:
        """For example ``mha-b16-32/8-d128-s1-kv8192``."""
        more = f"-page{self.page}" if self.page != PAGE_SIZE else ""
        more += f"-window{self.window}" if self.window >= 0 else ""
        more += "-e4m3" * self.is_e4m3
        shape = f"b{self.batch}-{self.heads}/{self.kv_heads}-d{self.columns}"
        return f"mha-{shape}-s{self.q_len}-kv{self.kv_len}{more}{'-sinks' * self.sinks}"

    @property
    def is_e4m3(self) -> bool:
        """Whether keys and values are numbers of one byte."""
        return self.cache == "e4m3"

    @property
    def widths(self) -> tuple[int, int]:
        """Columns of keys and of values."""
        return self.columns, self.value_columns or self.columns

    @property
    def visible(self) -> Any:
        """How many keys each query of a request sees, (q_len,)."""
        positions = np.arange(self.kv_len - self.q_len, self.kv_len)
        seen = positions + 1
        return seen if self.window < 0 else np.minimum(seen, self.window + 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values that are seen, of queries and output."""
        keys = min(self.kv_len, self.window + self.q_len if self.window >= 0 else self.kv_len)
        cached = keys * self.kv_heads * (1 if self.is_e4m3 else 2)
        return self.batch * (cached + 2 * self.q_len * self.heads) * sum(self.widths)

    @property
    def flops(self) -> int:
        """Operations on visible pairs of query and key."""
        return 2 * self.batch * int(self.visible.sum()) * self.heads * sum(self.widths)

    def to_json(self) -> Row:
        """Name the case as a row of the results file does."""
        figures = {"dtype": "bfloat16", "nbytes": self.nbytes, "flops": self.flops}
        return {"op": "attention"} | asdict(self) | figures


class _Step:
    """Arrays of a case on the device."""

    def __init__(self, gpu: Gpu, case: MHACase) -> None:
        self.gpu, self.case = gpu, case
        each = -(-case.kv_len // case.page)
        pages = np.random.default_rng(each).permutation(case.batch * each).astype(np.int32)
        self.table = pages.reshape(case.batch, each)
        cache = (case.batch * each, case.page, case.kv_heads)
        lead = (case.batch, case.q_len, case.heads)
        share = 2 if case.is_e4m3 else 1  # numbers of a word of 16 bits
        shapes = [(*lead, case.widths[0]), *((*cache, width // share) for width in case.widths)]
        self.rows = [gpu.empty(shape, "uint16") for shape in shapes]
        for seed, rows in enumerate(self.rows):
            fill_normal(gpu, rows, "bfloat16", seed=3 + seed, deviation=1.0)
        if case.is_e4m3:
            for rows in self.rows[1:]:
                rows &= _SMALL_E4M3
        self.out = gpu.empty((*lead, case.widths[1]), "uint16")
        self.lse = gpu.empty((case.batch, case.heads, case.q_len), "float32")
        for output in (self.out, self.lse):
            gpu.fill_bytes(output, 0xFF)
        self.sinks = np.linspace(-2, 2, case.heads, dtype=np.float32)
        options: dict[str, Any] = {"out": self.out.view(DTYPES["bfloat16"]), "lse": self.lse}
        if case.sinks:
            options["sinks"] = gpu.upload(self.sinks)
        lens = gpu.upload(np.full(case.batch, case.kv_len, np.int32))
        options["window"] = None if case.window < 0 else case.window
        if case.is_e4m3:
            options |= _FACTORS
        kinds = (DTYPES["bfloat16"], *[np.uint8 if case.is_e4m3 else DTYPES["bfloat16"]] * 2)
        q, k, v = (rows.view(kind) for rows, kind in zip(self.rows, kinds, strict=True))
        table = gpu.upload(self.table)
        self.update, self.run = calls.many_heads(q, k, v, table, lens, **options)

    def check(self) -> None:
        """Compare some rows of the first and the last request with float64."""
        case, group = self.case, self.case.heads // self.case.kv_heads
        for request in sorted({0, case.batch - 1}):
            pages = self.gpu.upload(self.table[request])
            for head in sorted({0, case.heads - 1}):
                k, v = (
                    self._cached(rows[pages][:, :, head // group]).reshape(-1, width)[: case.kv_len]
                    for rows, width in zip(self.rows[1:], case.widths, strict=True)
                )
                if case.is_e4m3:
                    k, v = k * _FACTORS["k_scale"], v * _FACTORS["v_scale"]
                q, out = (_numbers(self.gpu, a[request, :, head]) for a in (self.rows[0], self.out))
                lse = self.gpu.download(self.lse[request, head])
                for token in sorted({0, case.q_len - 1}):
                    end = case.kv_len - case.q_len + token + 1
                    seen = slice(end - int(case.visible[token]), end)
                    scores = k[seen] @ q[token] * case.columns**-0.5
                    sink = [float(self.sinks[head])] if case.sinks else []
                    self._compare(scores, sink, v[seen], out[token], float(lse[token]))

    def _cached(self, bits: Any) -> Any:
        """Bring keys or values to the host."""
        if not self.case.is_e4m3:
            return _numbers(self.gpu, bits)
        return self.gpu.download(bits.copy()).view(_E4M3).astype(np.float64)

    def _compare(
        self, scores: Any, sink: list[float], values: Any, out: Any, got_lse: float
    ) -> None:
        highest = max([float(scores.max()), *sink])
        weights = np.exp(scores - highest)
        total = weights.sum() + sum(np.exp(np.array(sink) - highest))
        exact, lse = weights @ values / total, highest + np.log(total)
        error = np.linalg.norm(out - exact) / np.linalg.norm(exact)
        wrong_lse = not abs(got_lse - lse) <= _LSE_TOLERANCE * max(abs(lse), 1.0)
        if wrong_lse or not error <= _TOLERANCE:  # NaN is wrong
            raise CheckError(
                f"{self.case.name}: a row is off by {error:.2e}, its logarithm is {got_lse}, not "
                f"{lse}"
            )


def _numbers(gpu: Gpu, bits: Any) -> Any:
    """Bring bfloat16 numbers to the host."""
    return gpu.download(bits.copy()).view(DTYPES["bfloat16"]).astype(np.float64)


def _measure(bench: Bench, case: MHACase) -> Row:
    step = _Step(bench.gpu, case)
    step.update()
    step.run()
    step.check()
    floor = max(
        case.nbytes / (bench.ceilings.read_gbps * 1e3),
        case.flops / (bench.ceilings.matmul_tflops * 1e6),
    )
    few = {"repeats": 5, "warmup": 1} if floor > _LONG else {}
    single = bench.time(step.run, **few)
    return single.figures() | {
        "floor_us": floor,
        "share": floor / single.us,
        "gbps": case.nbytes / (single.us * 1e3),
        "tflops": case.flops / (single.us * 1e6),
        "schedule_us": bench.time(step.update).us,
    }


_LLAMA, _WIDE, _NARROW, _GEMMA = (32, 8, 128), (64, 8, 128), (64, 8, 64), (16, 8, 256)

SECTION = Section(
    name="mha",
    title="many heads: ",
    cases=(
        *(
            MHACase(batch, *_LLAMA, kv_len)
            for batch, kv_lens in (
                (1, (1024, 8192, 32768, 131072)),
                (16, (1024, 8192)),
                (128, (1024, 8192, 32768)),
            )
            for kv_len in kv_lens
        ),
        MHACase(16, *_WIDE, 8192),
        MHACase(64, *_WIDE, 8192),
        *(
            MHACase(batch, *_NARROW, kv_len)
            for batch, kv_len in ((1, 8192), (16, 8192), (128, 1024))
        ),
        *(
            MHACase(batch, *_GEMMA, kv_len)
            for batch, kv_len in ((1, 8192), (16, 1024), (128, 1024))
        ),
        MHACase(128, *_NARROW, 4096, window=127, sinks=True),
        MHACase(64, 8, 4, 256, 8192, window=1023),
        *(MHACase(64, *_WIDE, 4096, q_len) for q_len in (2, 4, 8)),
        *(MHACase(16, *_LLAMA, 8192, page=page) for page in (1, 16)),
        *(
            MHACase(batch, *_LLAMA, kv_len, cache="e4m3")
            for batch, kv_len in ((1, 8192), (16, 1024), (16, 8192), (128, 8192))
        ),
        *(MHACase(1, *_LLAMA, length, length) for length in (2048, 4096, 8192)),
        *(MHACase(1, 16, 16, 192, length, length, 128) for length in (2048, 8192)),
        MHACase(2, *_GEMMA, 8192, 8192),
        MHACase(2, *_NARROW, 8192, 8192),
        MHACase(2, *_NARROW, 8192, 8192, window=1023),
        MHACase(1, *_WIDE, 16384, 2048),
    ),
    measure=_measure,
    shape=(
        *columns("batch", "heads", "kv_heads"),
        Column("d", "columns"),
        Column("d_v", "value_columns", usual=0),
        *columns("kv_len", "q_len"),
        Column("window", "window", usual=-1),
        Column("page", "page", usual=PAGE_SIZE),
        Column("cache", "cache", usual="bfloat16"),
    ),
    figures=(
        Column("us", "us", "us"),
        Column("floor us", "floor_us", "us"),
        Column("share", "share", ".2f"),
        Column("GB/s", "gbps", ".0f"),
        Column("TFLOP/s", "tflops", ".0f"),
        Column("schedule us", "schedule_us", "us"),
    ),
)
