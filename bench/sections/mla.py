# SPDX-License-Identifier: Apache-2.0
"""Sections of MLA: decoding, its schedule, ragged queries, page sizes and FP8 caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from bench.sections import calls
from bench.turns import time_by_name
from cumla.bench.cases import LOG_NORMAL_SIGMA, PAGE_SIZE, Case, vary
from cumla.bench.dense import SECTION, time_checked
from cumla.bench.gpu import DTYPES, Gpu
from cumla.bench.problem import Problem, check, decode, filled, lay_out
from cumla.bench.section import RATES, Bench, Call, CheckError, Column, Row, Section, columns
from cumla.launch.mla.shape import HEAD_DIM, VALUE_DIM
from cumla.mla.shape import PACKED_BYTES, SCALES

_US = RATES[0]
_FEW = columns("batch", "heads", "kv_len")

# --- the dense table ------------------------------------------------------------------------------


def against(row: Row, name: str | None, *, named: bool = False) -> str | None:
    """Print how many times cumla's time a library takes; how that was timed is a mark."""
    peer = row.get("peers", {}).get(name)
    if peer is None:
        return None
    mark = peer_mark(peer)
    return f"{peer['x']:.2f} ({name}{mark})" if named else f"{peer['x']:.2f}{mark}"


def peer_mark(peer: Row) -> str:
    """Mark a time that was not measured in turns with cumla: apart, or published and scaled."""
    if "measured" in peer:
        return "^" if "apart" in peer else ""
    return "*+" if "clock" in peer else "*"


_DENSE = replace(
    SECTION,
    figures=(
        *RATES,
        Column("x FlashMLA", lambda row: against(row, "FlashMLA"), usual=None),
        Column(
            "x best peer", lambda row: against(row, row.get("best_peer"), named=True), usual=None
        ),
        *SECTION.figures[len(RATES) :],
    ),
)

# --- the same with other lengths and modes --------------------------------------------------------


def _usual_us(bench: Bench, case: Case) -> float:
    """Find the time of a case of the table in this run, or measure it."""
    for row in bench.results.get("rows", ()):
        if Case.from_json(row) == case and "us" in row:
            return float(row["us"])
    return time_checked(bench, lay_out(bench.gpu, case))[0].us


@dataclass(frozen=True, slots=True)
class RaggedCase:
    """A case of the table with log-normal lengths, one seed after the other."""

    case: Case
    seeds: tuple[int, ...] = tuple(range(5))

    @property
    def name(self) -> str:
        return f"{self.case.name}-lognormal"

    def to_json(self) -> Row:
        return self.case.to_json() | {"lengths": "lognormal", "sigma": LOG_NORMAL_SIGMA}


def _measure_ragged(bench: Bench, ragged: RaggedCase) -> Row:
    equal = _usual_us(bench, ragged.case)
    seeds: list[Row] = []
    for case in vary((ragged.case,), (1,), (ragged.case.dtype,), ragged.seeds):
        timing, _ = time_checked(bench, lay_out(bench.gpu, case))
        seeds.append({"seed": case.seed, **timing.figures()})
    worst = max(seed["us"] for seed in seeds)
    return {"seeds": seeds, "worst_us": worst, "equal_us": equal, "ratio": worst / equal}


_RAGGED = Section(
    name="ragged",
    title="ragged: ",
    cases=tuple(
        RaggedCase(Case(128, 1, heads, mean)) for heads in (16, 128) for mean in (1024, 4096, 8192)
    ),
    measure=_measure_ragged,
    shape=(*SECTION.shape[:3], Column("mean kv_len", "kv_len")),
    figures=(
        Column("worst seed us", "worst_us", "us"),
        Column(
            "all seeds us",
            lambda row: ", ".join(_US.cell(seed) for seed in row.get("seeds", ())),
        ),
        Column("equal lengths us", "equal_us", "us"),
        Column("worst / equal", "ratio", ".3f"),
    ),
)


def _measure_invariant(bench: Bench, case: Case) -> Row:
    usual = _usual_us(bench, replace(case, batch_invariant=False))
    timing, _ = time_checked(bench, lay_out(bench.gpu, case))
    return timing.figures() | {"usual_us": usual, "ratio": timing.us / usual}


_INVARIANT = Section(
    name="invariant",
    title="batch-invariant: ",
    cases=tuple(
        Case(*shape, batch_invariant=True)
        for shape in ((128, 1, 128, 4096), (128, 1, 16, 4096), (16, 1, 128, 8192))
        + ((1, 1, 16, 131072),)
    ),
    measure=_measure_invariant,
    shape=SECTION.shape[:4],
    figures=(
        Column("invariant us", "us", "us"),
        Column("usual us", "usual_us", "us"),
        Column("invariant / usual", "ratio", ".3f"),
    ),
)


@dataclass(frozen=True, slots=True)
class ScheduleCase:
    """The schedule of a decoding step; ragged lengths lie between 1 and twice the case's."""

    batch: int
    heads: int
    kv_len: int
    ragged: bool = False

    @property
    def name(self) -> str:
        """For example ``schedule-b16-h128-kv8192-ragged``."""
        ragged = "-ragged" if self.ragged else ""
        return f"schedule-b{self.batch}-h{self.heads}-kv{self.kv_len}{ragged}"

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each request."""
        if not self.ragged:
            return np.full(self.batch, self.kv_len, np.int32)
        rng = np.random.default_rng(self.batch)
        return rng.integers(1, 2 * self.kv_len, self.batch, dtype=np.int32)

    def to_json(self) -> Row:
        shape = {"batch": self.batch, "heads": self.heads, "kv_len": self.kv_len}
        return shape | {"lengths": "ragged" if self.ragged else "equal"}


def schedule_cases(*shapes: tuple[int, int, int]) -> tuple[ScheduleCase, ...]:
    """Make equal lengths of each shape, and ragged ones of each with several requests."""
    return tuple(
        ScheduleCase(*shape, ragged)
        for shape in shapes
        for ragged in (False, True)[: 2 if shape[0] > 1 else 1]
    )


def _measure_schedule(bench: Bench, case: ScheduleCase) -> Row:
    kv_lens = bench.gpu.upload(case.lengths)
    return bench.time(calls.decode_schedule((case.batch, 1, case.heads), kv_lens)).figures()


_SCHEDULE = Section(
    name="schedule",
    title="schedule: ",
    cases=schedule_cases((1, 128, 8192), (16, 128, 8192), (128, 128, 4096), (1024, 128, 4096)),
    measure=_measure_schedule,
    shape=columns("batch", "kv_len", "lengths"),
    figures=(
        _US,
        Column("over empty", lambda row: row["us"] - row["empty_us"], "us"),
        Column("FlashMLA, published", "flash_mla_us", "us", usual=None),
    ),
)

# --- queries of different lengths -----------------------------------------------------------------

_CHECKED_TOKENS = 48  # beside the first and the last of each request


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """A call of `cumla.mla_attention` in bfloat16, with one kv head."""

    # Requests and query heads.
    batch: int
    heads: int
    q_len: int  # query tokens of each request, but of those that decode
    kv_len: int  # cached tokens of each request
    causal: bool  # as in `cumla.mla_attention`
    decodes: int = 0  # this many requests, the first ones, have a single query token

    @property
    def name(self) -> str:
        """For example ``attention-b8-h128-q512-kv8192-causal``, or ``...-60decodes``."""
        return (
            f"attention-b{self.batch}-h{self.heads}-q{self.q_len}-kv{self.kv_len}"
            + ("-causal" if self.causal else "")
            + (f"-{self.decodes}decodes" if self.decodes else "")
        )

    @property
    def indptr(self) -> NDArray[np.int64]:
        """Where the query tokens of each request begin, and where the last end, (batch + 1,)."""
        counts = np.full(self.batch, self.q_len)
        counts[: self.decodes] = 1
        return np.concatenate([[0], np.cumsum(counts)])

    @property
    def tokens(self) -> int:
        """Query tokens of all requests."""
        return int(self.indptr[-1])

    @property
    def requests(self) -> NDArray[np.int64]:
        """Request of each query token, (tokens,)."""
        return np.repeat(np.arange(self.batch), np.diff(self.indptr))

    @property
    def visible(self) -> NDArray[np.int64]:
        """How many cached tokens each query token sees, (tokens,)."""
        if not self.causal:
            return np.full(self.tokens, self.kv_len)
        after = self.indptr[1:][self.requests] - 1 - np.arange(self.tokens)
        visible: NDArray[np.int64] = np.maximum(self.kv_len - after, 0)
        return visible

    @property
    def flops(self) -> int:
        """Operations on visible pairs of query and token."""
        return 2 * int(self.visible.sum()) * self.heads * (HEAD_DIM + VALUE_DIM)

    @property
    def checked(self) -> NDArray[np.int64]:
        """Query tokens to check, the first and the last of each request among them.

        The log-sum-exp of a token that sees few is near 0, where a relative error says nothing.
        """
        indptr = self.indptr
        some = np.random.default_rng(self.tokens).integers(0, self.tokens, _CHECKED_TOKENS)
        tokens: NDArray[np.int64] = np.unique(np.concatenate([indptr[:-1], indptr[1:] - 1, some]))
        return tokens[self.visible[tokens] >= PAGE_SIZE]

    def to_json(self) -> Row:
        return {"op": "mla_attention"} | asdict(self) | {"page": PAGE_SIZE, "dtype": "bfloat16"}


def _measure_attention(bench: Bench, case: AttentionCase) -> Row:
    problem, indptr = _attention_problem(bench, case)
    q, kv, table, kv_lens, out, lse = problem.arguments()
    update, attend = calls.attention(q, kv, table, kv_lens, indptr, out, lse, causal=case.causal)
    update()
    attend()
    row_error, lse_error = _check_attention(bench, case, problem)
    single = bench.time(attend, repeats=3, warmup=1)  # a call takes up to 60 ms
    tflops = case.flops / (single.us * 1e6)
    sustained = bench.ceilings.sustained_tflops
    return single.figures() | {
        "tflops": tflops,
        "efficiency": tflops / bench.ceilings.matmul_tflops,
        "sustained_share": tflops / sustained if sustained else None,
        "schedule_us": bench.time(update).us,
        "row_error": row_error,
        "lse_error": lse_error,
    }


def _attention_problem(bench: Bench, case: AttentionCase) -> tuple[Problem, Any]:
    """Lay out queries (tokens, heads, 576) over shuffled pages; and where the requests begin."""
    gpu = bench.gpu
    of_kv = Case(case.batch, 1, case.heads, case.kv_len)
    count = of_kv.pages
    pages = np.random.default_rng(count).permutation(count).astype(np.int32)
    kv = filled(gpu, (count, PAGE_SIZE, 1, HEAD_DIM), "bfloat16", seed=2)
    rows = (case.tokens, case.heads)
    q = filled(gpu, (*rows, HEAD_DIM), "bfloat16", seed=3)
    problem = Problem.of(gpu, of_kv, q, kv, pages.reshape(1, case.batch, -1), *rows)
    return problem, gpu.upload(case.indptr.astype(np.int32))


def _check_attention(bench: Bench, case: AttentionCase, problem: Problem) -> tuple[float, float]:
    """Compare rows of some tokens with float64, each token a request that decodes."""
    gpu, tokens = bench.gpu, case.checked
    chosen = gpu.upload(tokens)
    decoding = Problem(
        case=Case(len(tokens), 1, case.heads, case.kv_len),
        q=problem.q[chosen],
        kv=problem.kv,
        tables=[problem.tables[0][gpu.upload(case.requests[tokens])]],
        kv_lens=gpu.upload(case.visible[tokens].astype(np.int32)),
        out=problem.out[chosen].reshape(len(tokens), 1, case.heads, VALUE_DIM),
        lse=problem.lse[chosen].reshape(len(tokens), case.heads, 1),
    )
    try:
        return check(gpu, decoding)
    except CheckError as error:
        raise CheckError(f"{case.name}: some tokens, each a request: {error}") from error


def _q_lens(row: Row) -> str:
    decodes = row["decodes"]
    if not decodes:
        return str(row["q_len"])
    return f"{decodes} x 1, {row['batch'] - decodes} x {row['q_len']}"


_ATTENTION = Section(
    name="attention",
    title="ragged queries: ",
    cases=(
        *(
            AttentionCase(batch, heads, q_len, 8192, causal)
            for batch in (1, 8)
            for heads in (64, 128)
            for q_len in (512, 2048)
            for causal in (False, True)
        ),
        AttentionCase(1, 128, 4096, 4096, causal=True),
        AttentionCase(64, 128, 512, 4096, causal=True, decodes=60),
    ),
    measure=_measure_attention,
    shape=(*_FEW[:2], Column("q_len", _q_lens), _FEW[2], Column("causal", "causal")),
    figures=(
        *RATES[:2],
        RATES[-1],
        Column("share of the sustained product", "sustained_share", ".2f", usual=None),
        Column("schedule us", "schedule_us", "us"),
    ),
)

# --- page sizes -----------------------------------------------------------------------------------

_PAGE_SIZES = (PAGE_SIZE, 1, 16, 32, 48, 128)


@dataclass(frozen=True, slots=True)
class WaysCase:
    """A case that is measured in several ways: bfloat16, requests of the same length."""

    case: Case
    by: str

    @property
    def name(self) -> str:
        """For example ``b128-s1-h16-kv4096 by page size``."""
        return f"{self.case.name} by {self.by}"

    def to_json(self) -> Row:
        row = self.case.to_json()
        return row if self.by != "page size" else {key: row[key] for key in row if key != "page"}


def check_some(
    gpu: Gpu, name: str, problem: Problem, gather: Callable[[NDArray[np.int64]], Any]
) -> None:
    """Compare rows of some requests with float64, over a cache that is gathered for that.

    So neither the cache nor the query of the call need lie as `check` reads them. Given requests,
    all of one length, `gather` returns their pages in order: (pages, 64, kv_heads, 576) uint16,
    contiguous. Errors begin with `name` and number the requests among those that are checked.
    """
    case = problem.case
    requests = np.unique([0, case.batch // 2, case.batch - 1])
    each = -(-case.kv_len // PAGE_SIZE)
    table = np.arange(len(requests) * each, dtype=np.int32).reshape(-1, each)
    chosen = gpu.upload(requests)
    some = Problem(
        case=replace(case, batch=len(requests), batch_invariant=False),
        q=problem.q[chosen],
        kv=gather(requests),
        tables=[gpu.upload(table)],
        kv_lens=gpu.upload(case.lengths[requests]),
        out=problem.out[chosen],
        lse=problem.lse[chosen],
    )
    try:
        check(gpu, some)
    except CheckError as error:
        raise CheckError(f"{name}: some requests of {case.name}: {error}") from error


def _measure_pages(bench: Bench, paged: WaysCase) -> Row:
    gpu, case = bench.gpu, paged.case
    slots = case.batch * max(-(-case.kv_len // size) * size for size in _PAGE_SIZES)
    cached = filled(gpu, (slots, HEAD_DIM), case.dtype, seed=2)
    q = filled(gpu, (case.batch, case.q_len, case.heads, HEAD_DIM), case.dtype, seed=3)
    checked = {str(size): _checked_pages(bench, case, q, cached, size) for size in _PAGE_SIZES}
    times = time_by_name(bench, checked)
    usual = times[str(PAGE_SIZE)].us
    return {
        "pages": [
            {"page": int(size), **time.figures(), "ratio": time.us / usual}
            for size, time in times.items()
        ]
    }


def _checked_pages(bench: Bench, case: Case, q: Any, cached: Any, page_size: int) -> Call:
    """Make a call with shuffled pages of a size, its schedule ready, and check what it gives."""
    gpu = bench.gpu
    count = case.batch * -(-case.kv_len // page_size)
    pages = np.random.default_rng(count).permutation(count).astype(np.int32)
    pages = pages.reshape(case.batch, -1)
    kv = cached[: count * page_size].reshape(count, page_size, 1, HEAD_DIM)
    problem = Problem.of(gpu, case, q, kv, pages[None])
    call = problem.call()
    call()

    def gather(requests: NDArray[np.int64]) -> Any:
        """Gather the tokens of some requests into pages of 64."""
        each = -(-case.kv_len // PAGE_SIZE)
        tokens = np.minimum(np.arange(each * PAGE_SIZE), case.kv_len - 1)
        slots = pages[requests][:, tokens // page_size].astype(np.int64) * page_size
        gathered = cached[gpu.upload((slots + tokens % page_size).ravel())]
        return gathered.reshape(-1, PAGE_SIZE, 1, HEAD_DIM)

    check_some(gpu, f"pages of {page_size}", problem, gather)
    return call


def _of_page_size(size: int) -> Callable[[Row], str | None]:
    """Print the time with pages of a size, and its ratio to that with pages of 64."""

    def cell(row: Row) -> str | None:
        found = [of for of in row.get("pages", ()) if of["page"] == size]
        return f"{_US.cell(found[0])} ({found[0]['ratio']:.3f})" if found else None

    return cell


_PAGES = Section(
    name="pages",
    title="page sizes: ",
    cases=(
        WaysCase(Case(128, 1, 16, 4096), "page size"),
        WaysCase(Case(128, 1, 128, 4096), "page size"),
        WaysCase(Case(16, 1, 128, 8192), "page size"),
    ),
    measure=_measure_pages,
    shape=_FEW,
    figures=tuple(Column(f"{size}: us (ratio)", _of_page_size(size)) for size in _PAGE_SIZES),
)

# --- FP8 caches -----------------------------------------------------------------------------------

_FORMATS = {
    "bfloat16": 2 * HEAD_DIM,
    "e4m3": HEAD_DIM,
    "e4m3 and scales": PACKED_BYTES,
    "packed": PACKED_BYTES,
}
"""From each format to the bytes of its rows: 16 bits; one array under one scale; latent columns,
RoPE ones of bfloat16 and scales of 128 columns in three arrays; these in one."""
_KV_SCALE = 2.0**-9  # of the tensor: 448 times it is above the largest number


@dataclass(frozen=True)
class _Cache:
    """A cache as it is called with, a factor, and its parts as the check reads them."""

    argument: Any
    kv_scale: float | None
    latent: Any  # bytes, or 16 bits
    rope: Any
    scales: Any = None


def _measure_fp8(bench: Bench, quantised: WaysCase) -> Row:
    gpu, case = bench.gpu, quantised.case
    problem = lay_out(gpu, case)
    q, _, *others = problem.arguments()
    checked = {}
    for name, cache in _caches(bench, problem).items():
        call = decode(q, cache.argument, *others, kv_scale=cache.kv_scale)
        problem.poison(gpu)
        call()
        check_some(gpu, name, problem, partial(_stands_for, bench, problem, cache))
        checked[name] = call
    times = time_by_name(bench, checked)
    formats = []
    for name, time in times.items():
        nbytes = case.nbytes + case.batch * case.kv_len * (_FORMATS[name] - _FORMATS["bfloat16"])
        gbps = nbytes / (time.us * 1e3)
        share = {"gbps": gbps, "read_share": gbps / bench.ceilings.read_gbps}
        x = {"x_bfloat16": times["bfloat16"].us / time.us}
        formats.append({"format": name, **time.figures(), **share, **x})
    return {"formats": formats}


def _caches(bench: Bench, problem: Problem) -> dict[str, _Cache]:
    """Quantise the cache into every format."""
    gpu, kv = bench.gpu, problem.kv
    lead = kv.shape[:3]
    whole = problem.arguments()[1]
    rows = whole.reshape(-1, HEAD_DIM)
    slots = gpu.upload(np.arange(len(rows)))
    one = gpu.empty((*lead, HEAD_DIM), "uint8")
    packed = gpu.empty((*lead, PACKED_BYTES), "uint8")
    calls.append(rows, one, slots, kv_scale=_KV_SCALE)()
    calls.append(rows, packed, slots)()
    begin = VALUE_DIM + 4 * SCALES
    latent, scales, rope = (
        packed[..., columns].copy()
        for columns in (slice(VALUE_DIM), slice(VALUE_DIM, begin), slice(begin, None))
    )
    scales, rope = scales.view("float32"), rope.view("uint16")
    parts = (latent, rope, scales)
    return {
        "bfloat16": _Cache(whole, None, kv[..., :VALUE_DIM], kv[..., VALUE_DIM:]),
        "e4m3": _Cache(one, _KV_SCALE, one[..., :VALUE_DIM], one[..., VALUE_DIM:]),
        "e4m3 and scales": _Cache((latent, rope.view(DTYPES["bfloat16"]), scales), None, *parts),
        "packed": _Cache(packed, None, *parts),
    }


def _stands_for(bench: Bench, problem: Problem, cache: _Cache, requests: NDArray[np.int64]) -> Any:
    """Gather what the cache stands for in some requests.

    All scales are powers of two, so bfloat16 holds that exactly.
    """
    gpu = bench.gpu
    some = problem.tables[0][gpu.upload(requests)].ravel()
    latent, rope = (
        _known(gpu.download(part[some]), cache.kv_scale) for part in (cache.latent, cache.rope)
    )
    if cache.scales is not None:
        latent *= np.repeat(gpu.download(cache.scales[some]), VALUE_DIM // SCALES, axis=-1)
    rows = np.concatenate([latent, rope], axis=-1).astype(DTYPES["bfloat16"])
    return gpu.upload(rows.view(np.uint16))


def _known(bits: NDArray[Any], kv_scale: float | None) -> NDArray[np.float32]:
    """Give the numbers that bits stand for: e4m3 or bfloat16, by their size."""
    known: NDArray[np.float32]
    if bits.itemsize == 2:
        known = bits.view(DTYPES["bfloat16"]).astype(np.float32)
    else:
        numbers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        known = numbers[bits] * np.float32(kv_scale or 1.0)
    return known


_FP8 = Section(
    name="fp8",
    title="FP8 caches: ",
    cases=(
        WaysCase(Case(128, 1, 16, 8192), "format"),
        WaysCase(Case(128, 1, 16, 16384), "format"),
        WaysCase(Case(128, 1, 64, 4096), "format"),
        WaysCase(Case(128, 1, 128, 4096), "format"),
    ),
    measure=_measure_fp8,
    shape=_FEW,
    each="formats",
    figures=(
        Column("format", "format"),
        _US,
        Column("GB/s", "gbps", ".0f"),
        Column("share of the read ceiling", "read_share", ".2f"),
        Column("x bfloat16", "x_bfloat16", ".2f"),
    ),
)

SECTIONS = (_DENSE, _RAGGED, _INVARIANT, _SCHEDULE, _ATTENTION, _PAGES, _FP8)
