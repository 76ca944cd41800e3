# SPDX-License-Identifier: Apache-2.0
"""Cached attention of many heads, decoding and prefill: a section."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes
import numpy as np

from bench.sections import calls
from cumla.bench.cases import PAGE_SIZE, log_normal_lengths
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
    """Requests over shuffled pages, bfloat16 queries, causal."""

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
    decodes: int = 0  # more requests, of one query each
    lengths: str = "equal"  # or "lognormal", of which kv_len is the mean

    @property
    def name(self) -> str:
        """For example ``mha-b16-32/8-d128-s1-kv8192``."""
        more = f"-page{self.page}" if self.page != PAGE_SIZE else ""
        more += f"-window{self.window}" if self.window >= 0 else ""
        more += "-e4m3" * self.is_e4m3 + f"-decodes{self.decodes}" * bool(self.decodes)
        more += f"-{self.lengths}" * (self.lengths != "equal")
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
    def q_lens(self) -> Any:
        """Query tokens of each request."""
        return np.array([self.q_len] * self.batch + [1] * self.decodes, np.int32)

    @property
    def kv_lens(self) -> Any:
        """Keys of each request, those of its queries included."""
        count = self.batch + self.decodes
        if self.lengths == "lognormal":
            return log_normal_lengths(count, self.kv_len, seed=count)
        return np.full(count, self.kv_len, np.int32)

    def visible(self, request: int) -> Any:
        """How many keys each query of a request sees."""
        q_len, kv_len = int(self.q_lens[request]), int(self.kv_lens[request])
        seen = np.arange(kv_len - q_len, kv_len) + 1
        return seen if self.window < 0 else np.minimum(seen, self.window + 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values that are seen, of queries and output."""
        keys = self.kv_lens
        if self.window >= 0:
            keys = np.minimum(keys, self.window + self.q_lens)
        cached = int(keys.sum()) * self.kv_heads * (1 if self.is_e4m3 else 2)
        return (cached + 2 * int(self.q_lens.sum()) * self.heads) * sum(self.widths)

    @property
    def flops(self) -> int:
        """Operations on visible pairs of query and key."""
        pairs = sum(int(self.visible(request).sum()) for request in range(len(self.q_lens)))
        return 2 * pairs * self.heads * sum(self.widths)

    def to_json(self) -> Row:
        figures = {"dtype": "bfloat16", "nbytes": self.nbytes, "flops": self.flops}
        return {"op": "attention"} | asdict(self) | figures


class _Step:
    """Arrays of a case on the device."""

    def __init__(self, gpu: Gpu, case: MHACase) -> None:
        self.gpu, self.case = gpu, case
        counts = -(-case.kv_lens // case.page)
        pages = np.random.default_rng(len(counts)).permutation(int(counts.sum())).astype(np.int32)
        self.pages = np.split(pages, np.cumsum(counts)[:-1])  # of each request
        self.starts = np.concatenate([[0], np.cumsum(case.q_lens)]).astype(np.int32)
        table = np.zeros((len(counts), counts.max()), np.int32)
        for row, own in zip(table, self.pages, strict=True):
            row[: len(own)] = own
        cache = (len(pages), case.page, case.kv_heads)
        lead = (int(self.starts[-1]), case.heads)
        share = 2 if case.is_e4m3 else 1  # numbers of a word of 16 bits
        shapes = [(*lead, case.widths[0]), *((*cache, width // share) for width in case.widths)]
        self.rows = [gpu.empty(shape, "uint16") for shape in shapes]
        for seed, rows in enumerate(self.rows):
            fill_normal(gpu, rows, "bfloat16", seed=3 + seed, deviation=1.0)
        if case.is_e4m3:
            for rows in self.rows[1:]:
                rows &= _SMALL_E4M3
        self.out = gpu.empty((*lead, case.widths[1]), "uint16")
        self.lse = gpu.empty(lead, "float32")
        for output in (self.out, self.lse):
            gpu.fill_bytes(output, 0xFF)
        self.sinks = np.linspace(-2, 2, case.heads, dtype=np.float32)
        options: dict[str, Any] = {"out": self.out.view(DTYPES["bfloat16"]), "lse": self.lse}
        if case.sinks:
            options["sinks"] = gpu.upload(self.sinks)
        lengths = {"kv_lens": case.kv_lens, "qo_indptr": self.starts}
        options["window"] = None if case.window < 0 else case.window
        if case.is_e4m3:
            options |= _FACTORS
        kinds = (DTYPES["bfloat16"], *[np.uint8 if case.is_e4m3 else DTYPES["bfloat16"]] * 2)
        q, k, v = (rows.view(kind) for rows, kind in zip(self.rows, kinds, strict=True))
        if not case.decodes:  # queries have an axis of requests, too
            del lengths["qo_indptr"]
            apart = (case.batch, case.q_len)
            q, options["out"] = (a.reshape(*apart, *a.shape[1:]) for a in (q, options["out"]))
            options["lse"] = self.lse.reshape(*apart, case.heads).transpose(0, 2, 1)
        there = {name: gpu.upload(numbers) for name, numbers in lengths.items()}
        self.update, self.run = calls.many_heads(q, k, v, gpu.upload(table), there, **options)

    def check(self) -> None:
        """Compare some rows of the first and the last request with float64."""
        case, group = self.case, self.case.heads // self.case.kv_heads
        for request in sorted({0, case.batch - 1, len(self.pages) - 1}):
            pages, kv_len = self.gpu.upload(self.pages[request]), int(case.kv_lens[request])
            queries = slice(*self.starts[request : request + 2])
            visible = case.visible(request)
            for head in sorted({0, case.heads - 1}):
                k, v = (
                    self._cached(rows[pages][:, :, head // group]).reshape(-1, width)[:kv_len]
                    for rows, width in zip(self.rows[1:], case.widths, strict=True)
                )
                if case.is_e4m3:
                    k, v = k * _FACTORS["k_scale"], v * _FACTORS["v_scale"]
                q, out = (_numbers(self.gpu, a[queries, head]) for a in (self.rows[0], self.out))
                lse = self.gpu.download(self.lse[queries, head].copy())
                for token in sorted({0, len(visible) - 1}):
                    end = kv_len - len(visible) + token + 1
                    seen = slice(end - int(visible[token]), end)
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
        MHACase(32, 8, 4, 512, 4096),
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
        MHACase(2, *_GEMMA, 8192, 8192, window=1023),
        *(MHACase(1, *_WIDE, 16384, 2048, page=page) for page in (16, 64)),
        MHACase(4, *_LLAMA, 4096, 512, decodes=60),
        MHACase(1, *_LLAMA, 4096, 2048, decodes=128),
        MHACase(1, *_WIDE, 4096, 512, decodes=128),
        *(MHACase(128, *_LLAMA, mean, lengths="lognormal") for mean in (1024, 4096)),
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
        Column("decodes", "decodes", usual=0),
        Column("lengths", "lengths", usual="equal"),
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
