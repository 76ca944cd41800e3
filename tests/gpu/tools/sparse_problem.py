# SPDX-License-Identifier: Apache-2.0
"""Calls of sparse MLA: inputs, poisoned memory and guarded outputs, for NumPy or CuPy.

Lists name some slots of a cache, with absent entries of all kinds among them. All other slots, gaps
between rows and pages, and what entries after the end of a list name, are NaN or infinite.

The reference is float64. Where the kernel for packed rows takes values for
something else (`Seen`) it is attention with those: an element of V is then off by 2^-10 of itself
at most, and not at all where scales are powers of two. Scores are exact, but for rows whose scales
are all 0: the power of two that stands for those is 2^-60, near which exponents have fewer bits.
Blocks in which the scales of a row are more than 2^18 apart have V and probabilities in bfloat16: a
probability is off by up to 2^-8, all of which a list of one row shows. Sinks change an output that
is there already: in 16 bits it is rounded twice.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import cumla
from tests.gpu.tools import oracle
from tests.gpu.tools.fp8_problem import FACTOR, PARTS, e4m3_bits, e4m3_numbers
from tests.gpu.tools.pages import lay_out
from tests.gpu.tools.problem import (
    HEAD_DIM,
    INF_BITS,
    NAN_BITS,
    VALUE_DIM,
    Guarded,
    normal_bits,
    typed,
)
from tests.gpu.tools.ragged_problem import cover
from tests.mla.fp8_arrays import FORMS as FP8_FORMS
from tests.mla.fp8_arrays import SCALED

Array = Any
LOWEST, HIGHEST = -(2**31), 2**31 - 1
SIZE = 0.25  # root mean square of a row's numbers
QUERY = 2.0  # of the query's: scores of deviation 0.5
FEW, LESS = 16, 1 / 16  # lists of fewer rows have smaller queries: log-sum-exps near 0 are rounding
BLOCK = 64
BF16 = 2.0**-8  # most that rounding to bfloat16 changes a number, of itself
OTHERS = 3e-4  # the same of all else that a row is off by
HEADROOM = 6  # by so many powers of two scales are higher in the kernel, relative to their highest
WILD_SCALE = 4e-6  # softmax_scale of scales up to 1e3
FORMS = {
    "bfloat16": (("latent", "rope"),),
    "float16": (("latent", "rope"),),
    "bfloat16 pair": (("latent",), ("rope",)),
    **{name: PARTS[name] for name in ("one", "pair", "16-bit rope", "scales")},
    **{name: PARTS[name] for name in ("scales, e4m3 rope", "packed")},
}
"""What lies in each array of a cache."""


@dataclass(frozen=True)
class SparseCase:
    """One call, and how everything lies; see FACTORS for what the fields may be."""

    batch: int = 3
    q_len: int = 1
    heads: int = 16
    topk: int = 128
    page_size: int = 64
    form: str = "packed"
    scales: str = "any"  # of forms that have scales of their own
    lists: str = "random"
    lengths: str = "full"
    places: str = "slots"
    sinks: str = "none"
    query_form: str = "one"
    gaps: bool = False
    outputs: str = "given"
    operation: str = "decode"
    steep: float = 1.0  # what the softmax scale is multiplied by
    seed: int = 0

    @property
    def name(self) -> str:
        """A short test id."""
        words = (
            f"b{self.batch}-s{self.q_len}-h{self.heads}-k{self.topk}-page{self.page_size}",
            *(self.form, self.scales, self.lists, self.lengths, self.places, f"sinks {self.sinks}"),
            *(f"q {self.query_form}", *(["gaps"] if self.gaps else []), self.outputs),
            self.operation,
        )
        return "-".join(words).replace(", ", "+").replace(" ", "_")

    @property
    def tokens(self) -> int:
        """Query tokens, and lists."""
        return self.batch * self.q_len

    @property
    def dtype(self) -> str:
        """Of the query."""
        return "float16" if self.form == "float16" else "bfloat16"

    @property
    def is_fp8(self) -> bool:
        """Return whether latent columns are e4m3."""
        return self.form in FP8_FORMS

    @property
    def has_scales(self) -> bool:
        """Return whether they have scales of their own."""
        return "scales" in FORMS[self.form][-1] or self.form == "packed"

    @property
    def is_rounded(self) -> bool:
        """Return whether the kernel multiplies scales as float16."""
        return self.form == "packed"

    @property
    def softmax_scale(self) -> float:
        """Factor of the scores."""
        wild = self.has_scales and self.scales == "wild"
        return self.steep * (WILD_SCALE if wild else HEAD_DIM**-0.5)


class Seen(NamedTuple):
    """Rows as a kernel takes them, in float64: (rows, 576), and twice (rows, 512)."""

    keys: Array
    values: Array
    wide_values: Array  # of blocks in which a row is wide
    is_wide: Array  # (rows,)


@dataclass
class SparseProblem:
    """Arrays of one call. Rows that lists may name are numbered, and lie in `slots`."""

    xp: Any
    case: SparseCase
    slots: np.ndarray
    num_pages: int
    latent: Array  # (rows, 512) uint8, or the bits of 16
    rope: Array
    scales: Array | None  # (rows, 4)
    q_bits: Array  # (tokens, heads, 576)
    lists: dict[str, np.ndarray]  # indices, and what else tells what they name
    arguments: dict[str, Any]

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Of the operation."""
        case = self.case
        lead = (case.batch, case.q_len) if case.operation == "decode" else (case.tokens,)
        return (*lead, case.heads, VALUE_DIM)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Of the operation."""
        return self.out_shape[:-1]

    def outputs(self, dtype: str | None = None) -> tuple[Guarded, Guarded]:
        """Poisoned ``out`` and ``lse``."""
        chosen = "float32" if self.case.outputs == "float32" else self.case.dtype
        out = Guarded(self.xp, self.out_shape, dtype or chosen)
        return out, Guarded(self.xp, self.lse_shape, "float32")

    def call(self, **options: Any) -> Any:
        """The operation on these arrays."""
        decodes = self.case.operation == "decode"
        operation = cumla.mla_sparse_decode if decodes else cumla.mla_sparse_attention
        return operation(**self.arguments, **options)

    def plan(self, **options: Any) -> cumla.MLASparsePlan:
        """A plan for these arrays, updated."""
        made_of = [self.arguments[name] for name in ("q", "kv_cache", "indices")]
        plan = cumla.MLASparsePlan.from_arrays(*made_of, **options)
        plan.update(self.arguments.get("topk_lens"))
        return plan

    @property
    def inputs(self) -> dict[str, Any]:
        """Return what a run of a plan takes, but for its outputs."""
        return {name: a for name, a in self.arguments.items() if name != "topk_lens"}

    def named(self) -> np.ndarray:
        """Numbers of the rows that lists name, (tokens, topk); -1 where an entry is absent."""
        return named_rows(self.case, self.lists, self.slots, self.num_pages)

    def seen(self, *, rounded: bool) -> Seen:
        """The rows as they are, or with values as the kernel for packed rows takes them."""
        xp, case = self.xp, self.case
        if not case.is_fp8:
            rows = xp.concatenate([self.latent, self.rope], axis=-1)
            keys = oracle.widen(xp, rows, case.dtype)
            return Seen(keys, keys[:, :VALUE_DIM], keys[:, :VALUE_DIM], xp.zeros(len(keys), bool))
        numbers = xp.asarray(e4m3_numbers())
        latent = numbers[self.latent.astype(np.int32)]
        if self.rope.dtype == np.uint8:
            rope = numbers[self.rope.astype(np.int32)] * FACTOR
        else:
            rope = oracle.widen(xp, self.rope, "bfloat16")
        is_wide = xp.zeros(len(latent), bool)
        if self.scales is None:
            values = wide_values = latent * FACTOR
        else:
            whole = xp.asarray(np.repeat(_host(self.scales).astype(np.float64), 128, axis=1))
            values = wide_values = latent * whole
        keys = xp.concatenate([values, rope], axis=-1)
        if rounded and self.scales is not None:
            values, wide_values, is_wide = self._rounded(_host(latent))
        return Seen(keys, values, wide_values, is_wide)

    def _rounded(self, latent: np.ndarray) -> tuple[Array, Array, Array]:
        """Latent columns times scales in float16 or bfloat16, and which rows need the latter."""
        scales = _host(self.scales)
        highest = np.clip(scales.view(np.uint32).max(axis=1) >> 23, 127 - 60, 127 + 60)
        power = np.ldexp(1.0, highest.astype(int) - 127 - HEADROOM)[:, None]
        relative = scales / power
        halves = relative.astype(np.float16).repeat(128, axis=1)
        values = (halves.astype(np.float64) * latent).astype(np.float16) * power
        wide = relative.astype(np.float64).repeat(128, axis=1) * latent
        wide_values = wide.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64) * power
        is_wide = ((relative != 0) & (relative < 2.0 ** (HEADROOM - 18))).any(axis=1)
        return tuple(self.xp.asarray(a) for a in (values, wide_values, is_wide))

    def expected(self, *, rounded: bool = True) -> oracle.Expected:
        """The float64 result: out (tokens, heads, 512) and lse (tokens, heads)."""
        xp, case = self.xp, self.case
        seen = self.seen(rounded=rounded and case.is_rounded)
        named = self.named()
        out = xp.zeros((case.tokens, case.heads, VALUE_DIM))
        lse = xp.full((case.tokens, case.heads), -np.inf)
        each = 8 * case.topk * (4 * HEAD_DIM + 4 * case.heads)
        step = max(1, oracle.CHUNK_BYTES // each)
        for begin in range(0, case.tokens, step):
            some = slice(begin, begin + step)
            q = oracle.widen(xp, self.q_bits[some], case.dtype)
            out[some], lse[some] = self._attend(seen, q, xp.asarray(named[some]))
        if "sinks" in self.lists:
            out, lse = _with_sinks(xp, out, lse, self.lists["sinks"])
        used = seen.values[xp.asarray(np.unique(named[named >= 0]))]
        return oracle.Expected(out, lse, float((used * used).mean()) ** 0.5 if len(used) else 0.0)

    def _attend(self, seen: Seen, q: Array, named: Array) -> tuple[Array, Array]:
        xp = self.xp
        there = named >= 0
        index = xp.where(there, named, 0)
        keys = xp.where(there[..., None], seen.keys[index], 0.0)
        values = xp.where(there[..., None], seen.values[index], 0.0)
        if bool(seen.is_wide.any()):
            blocks = -(-named.shape[1] // BLOCK)
            wide = xp.zeros((len(named), blocks * BLOCK), bool)
            wide[:, : named.shape[1]] = seen.is_wide[index] & there
            wide = xp.repeat(wide.reshape(len(named), blocks, BLOCK).any(axis=-1), BLOCK, axis=1)
            wide_values = xp.where(there[..., None], seen.wide_values[index], 0.0)
            values = xp.where(wide[:, : named.shape[1], None], wide_values, values)
        scores = oracle.matmul(xp, q, keys.transpose(0, 2, 1)) * self.case.softmax_scale
        scores = xp.where(there[:, None], scores, -np.inf)
        top = scores.max(axis=-1, keepdims=True)
        top = xp.where(xp.isfinite(top), top, 0.0)
        weights = xp.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        some = total > 0
        safe = xp.where(some, total, 1.0)
        lse = xp.where(some, top + xp.log(safe), -np.inf)
        return oracle.matmul(xp, weights, values) / safe, lse[..., 0]

    def by_token(self, out: Array, lse: Array) -> tuple[Array, Array]:
        """Results as (tokens, heads, 512) and (tokens, heads), float64."""
        xp, case = self.xp, self.case
        assert tuple(out.shape) == self.out_shape
        assert tuple(lse.shape) == self.lse_shape
        dtype = str(out.dtype)
        bits = out.view(xp.uint32 if dtype == "float32" else xp.uint16)
        got = oracle.widen(xp, bits, dtype).reshape(case.tokens, case.heads, VALUE_DIM)
        return got, lse.reshape(case.tokens, case.heads).astype(xp.float64)

    def check(
        self, out: Array, lse: Array, expected: oracle.Expected | None = None
    ) -> dict[str, float]:
        """Hold results against the reference; the worst figures, lse's with a prefix."""
        expected = expected or self.expected()
        got, got_lse = self.by_token(out, lse)
        case, xp = self.case, self.xp
        is_wide = case.is_rounded and case.scales == "wild"
        roundings = 0 if str(out.dtype) == "float32" else 1 + (case.sinks != "none")
        if is_wide or roundings == 2:
            limit = BF16 * (is_wide + roundings) + OTHERS
            figures = _check_rows(xp, got, expected.out, limit)
        else:
            figures = oracle.check_out(xp, got, expected.out, v_rms=expected.v_rms, outliers=False)
        lse_figures = oracle.check_lse(xp, got_lse, expected.lse)
        return figures | {f"lse_{name}": value for name, value in lse_figures.items()}


def _host(array: Array) -> np.ndarray:
    return array.get() if hasattr(array, "get") else array


def _with_sinks(xp: Any, out: Array, lse: Array, sinks: np.ndarray) -> tuple[Array, Array]:
    """Let scores of heads take part that have no value."""
    sink = xp.broadcast_to(xp.asarray(sinks.astype(np.float64)), lse.shape)
    top = xp.maximum(lse, sink)
    known = xp.isfinite(top)
    base = xp.where(known, top, 0.0)
    total = xp.where(known, xp.exp(lse - base) + xp.exp(sink - base), 1.0)
    both = xp.where(known, base + xp.log(total), top)
    share = xp.where(known, xp.exp(lse - base) / total, 0.0)
    return out * share[..., None], both


def _check_rows(xp: Any, got: Array, expected: Array, limit: float) -> dict[str, float]:
    """Hold each row of an output against the reference."""
    assert bool(xp.isfinite(got).all()), "out: NaN or infinities"
    error, size = (xp.sqrt((x * x).sum(axis=-1)) for x in (got - expected, expected))
    zero = xp.where(error > 0, xp.full_like(error, np.inf), xp.zeros_like(error))
    worst = float(xp.where(size > 0, error / xp.where(size > 0, size, 1.0), zero).max())
    assert worst <= limit, f"out: a row is off by {worst}"
    return {"rounded_row": worst}


def named_rows(
    case: SparseCase, lists: dict[str, np.ndarray], slots: np.ndarray, num_pages: int
) -> np.ndarray:
    """What the definition of lists makes of them; rows as `SparseProblem.named` numbers them."""
    index = lists["indices"].reshape(case.tokens, case.topk).astype(np.int64)
    there = index >= 0
    if "topk_lens" in lists:
        lengths = np.broadcast_to(
            lists["topk_lens"].reshape(case.batch, -1), (case.batch, case.q_len)
        )
        there &= np.arange(case.topk) < lengths.reshape(-1, 1)
    if "block_table" in lists:
        table = lists["block_table"]
        request = lists.get("row_to_request", np.arange(case.batch)[:, None])
        request = np.broadcast_to(request.reshape(case.batch, -1), (case.batch, case.q_len))
        request = request.reshape(-1, 1).astype(np.int64)
        column = index // case.page_size
        there &= (request >= 0) & (request < len(table)) & (column < table.shape[1])
        page = table[np.where(there, request, 0), np.where(there, column, 0)].astype(np.int64)
    else:
        page = index // case.page_size
    there &= (page >= 0) & (page < num_pages)
    slot = np.where(there, page * case.page_size + index % case.page_size, 0)
    numbers = np.full(num_pages * case.page_size, -1)
    numbers[slots] = np.arange(len(slots))
    found = np.where(there, numbers[slot], -1)
    assert (found >= 0)[there].all(), "a list names a slot of poison"
    return found


# --- making them ----------------------------------------------------------------------------------


def make_sparse(xp: Any, case: SparseCase, num_pages: int | None = None) -> SparseProblem:
    """Build the arrays of a case on the device of ``xp``, the same ones every time."""
    rng = np.random.default_rng(6000 + case.seed)
    rows = max(min(case.topk, 1500), 300)
    if num_pages is None:
        num_pages = -(-2 * rows // case.page_size) + 3
    count = num_pages * case.page_size
    slots = rng.permutation(count)[:rows]
    slots[-1] = count - 1 if count - 1 not in slots else slots[-1]
    offset = 77777 * (case.seed + 1)
    scales = None
    if case.is_fp8:
        latent = e4m3_bits(xp, (rows, VALUE_DIM), offset)
        if case.has_scales:
            scales = xp.asarray(_scales(case, rng, rows))
        if case.form in ("one", "pair", "scales, e4m3 rope"):
            rope = e4m3_bits(xp, (rows, HEAD_DIM - VALUE_DIM), 5 * offset)
        else:
            rope = normal_bits(xp, (rows, HEAD_DIM - VALUE_DIM), "bfloat16", SIZE, 5 * offset)
    else:
        whole = normal_bits(xp, (rows, HEAD_DIM), case.dtype, SIZE, offset)
        latent, rope = whole[:, :VALUE_DIM], whole[:, VALUE_DIM:]
    lists = lists_of(case, rng, slots, num_pages)
    problem = SparseProblem(
        *(xp, case, slots, num_pages, latent, rope, scales, None, lists),
        {name: xp.asarray(array) for name, array in lists.items()},
    )
    problem.arguments["q"] = _query(problem, offset)
    problem.arguments["kv_cache"] = cache_of(problem)
    if case.softmax_scale != HEAD_DIM**-0.5:
        problem.arguments["softmax_scale"] = case.softmax_scale
    if case.form in SCALED:
        problem.arguments["kv_scale"] = FACTOR
    return problem


def in_a_larger_cache(problem: SparseProblem) -> SparseProblem:
    """The same, whose cache in 16 bits, one array, goes on with more than 36,864 rows of NaN.

    Lists must name nothing there.
    """
    cache = problem.arguments["kv_cache"].view(np.uint16)
    pages = (36 << 10) // problem.case.page_size + 1
    more = problem.xp.full((pages, *cache.shape[1:]), NAN_BITS[problem.case.dtype], np.uint16)
    large = typed(problem.xp.concatenate((cache, more)), problem.case.dtype)
    return replace(problem, arguments=problem.arguments | {"kv_cache": large})


def _scales(case: SparseCase, rng: np.random.Generator, rows: int) -> np.ndarray:
    shape = (rows, 4)
    if case.scales == "powers":
        return np.ldexp(np.float32(1), rng.integers(-9, -4, shape)).astype(np.float32)
    if case.scales == "wild":
        return (10 ** rng.uniform(-6, 3, shape)).astype(np.float32)
    scales = rng.uniform(0.5, 2, shape) * FACTOR
    if case.scales == "zero":
        scales[rng.random(shape) < 0.3] = 0
        scales[rng.random(rows) < 0.1] = 0
    return scales.astype(np.float32)


def lists_of(
    case: SparseCase, rng: np.random.Generator, slots: np.ndarray, num_pages: int
) -> dict[str, np.ndarray]:
    """Indices, lengths, tables and sinks."""
    tokens, topk, page_size = case.tokens, case.topk, case.page_size
    chosen = slots[rng.integers(0, len(slots), (tokens, topk))]
    if case.lists == "sorted":
        chosen.sort(axis=1)
    if case.lists == "same":
        chosen[:] = chosen[:, :1]
    place, token = np.arange(topk), np.arange(tokens)[:, None]
    absent = {
        "absent": np.ones((tokens, topk), bool),
        "mixed": rng.random((tokens, topk)) < 0.3,
        "first": place < 1 + token * 7 % 70,
        "blocks": place // BLOCK % 3 == token % 3,
    }.get(case.lists, np.zeros((tokens, topk), bool))
    lists: dict[str, np.ndarray] = {}
    if case.lengths != "full":
        ends = np.array([65, 0, 1, topk, 63, HIGHEST, 64, topk - 1, -5, topk + 9, LOWEST])
        columns = case.q_len if case.lengths == "tokens" else 1
        lengths = np.resize(np.roll(ends, -case.seed), (case.batch, columns)).astype(np.int32)
        of_token = np.broadcast_to(lengths, (case.batch, case.q_len)).reshape(-1)
        poisoned = np.setdiff1d(np.arange(min(num_pages * page_size, 100_000)), slots)
        poisoned = poisoned[rng.integers(0, len(poisoned), chosen.shape)]
        chosen = np.where(place >= of_token[:, None], poisoned, chosen)
        if case.operation == "tokens":
            lengths = np.ascontiguousarray(of_token)
        lists["topk_lens"] = lengths if lengths.shape[-1] > 1 else lengths.reshape(-1)
    capacity = num_pages * page_size
    if case.places != "slots":
        table, requests, chosen = _positions(case, rng, chosen, num_pages)
        lists["block_table"] = table
        capacity = table.shape[1] * page_size
        if requests is not None:
            lists["row_to_request"] = requests
    wrong = np.array([-1, LOWEST, capacity, -1, HIGHEST, -2, capacity + 5])
    indices = np.where(absent, wrong[rng.integers(0, len(wrong), absent.shape)], chosen)
    lead = (case.batch, case.q_len) if case.operation == "decode" else (tokens,)
    lists["indices"] = indices.astype(np.int32).reshape(*lead, topk)
    if case.sinks != "none":
        highest = [np.inf, 3e38, -3e38]  # more than float32 has in base 2
        some = [0.5, -1, -np.inf, 3, 0, *(highest if case.sinks == "mixed" else [])]
        numbers = some if case.sinks in ("mixed", "finite") else [float(case.sinks)]
        sinks = np.resize(np.array(numbers), case.heads)
        lists["sinks"] = sinks.astype(np.float32)
    return lists


def _positions(
    case: SparseCase, rng: np.random.Generator, slots: np.ndarray, num_pages: int
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """A table with all pages in each row, and garbage; whose row each list has; its positions."""
    by_row = case.places == "rows"
    count = 3 if by_row else case.batch
    garbage = [-1, num_pages, HIGHEST, LOWEST]
    table = np.stack([rng.permutation([*range(num_pages), *garbage]) for _ in range(count)])
    columns = np.argsort(table, axis=1, kind="stable")[:, 2:-2]  # of each page
    owner = rng.integers(0, 3, (case.batch, case.q_len)) if by_row else np.arange(case.batch)
    of_list = np.broadcast_to(owner.reshape(case.batch, -1), (case.batch, case.q_len)).reshape(
        -1, 1
    )
    page = slots // case.page_size
    positions = columns[of_list, page] * case.page_size + slots % case.page_size
    lead = (case.batch, case.q_len) if case.operation == "decode" else (case.tokens,)
    requests = None
    if by_row or case.operation == "tokens":
        requests = of_list.reshape(lead).astype(np.int32)
    if by_row:
        hostile = np.array([-1, -2, 3, HIGHEST, LOWEST])
        every = rng.random(lead) < 0.1
        requests = np.where(every, hostile[rng.integers(0, len(hostile), lead)], requests).astype(
            np.int32
        )
    return table.astype(np.int32), requests, positions


def _query(problem: SparseProblem, offset: int) -> Any:
    """The argument; its bits are the problem's."""
    xp, case = problem.xp, problem.case
    shape = (case.tokens, case.heads)
    bits = normal_bits(xp, (*shape, HEAD_DIM), case.dtype, QUERY, 3 * offset)
    few = (problem.named() >= 0).sum(axis=1) < FEW
    if few.any():
        small = normal_bits(xp, (*shape, HEAD_DIM), case.dtype, QUERY * LESS, 3 * offset)
        bits = xp.where(xp.asarray(few)[:, None, None], small, bits)
    problem.q_bits = bits
    lead = problem.out_shape[:-1]
    columns = lay_out(xp, lead, case.query_form, case.dtype)
    columns.latent[...] = bits[..., :VALUE_DIM].reshape(*lead, VALUE_DIM)
    columns.rope[...] = bits[..., VALUE_DIM:].reshape(*lead, HEAD_DIM - VALUE_DIM)
    return columns.argument


def cache_of(problem: SparseProblem) -> Any:
    """The cache: an array, a pair or a triple; with gaps behind rows and pages."""
    xp, case = problem.xp, problem.case
    lead = (problem.num_pages, case.page_size + 3 * case.gaps, 1)
    columns = {"latent": problem.latent, "rope": problem.rope}
    if problem.scales is not None:
        columns["scales"] = problem.scales
    bits = {name: _as_bytes(xp, array) for name, array in columns.items()}
    at = tuple(xp.asarray(i) for i in np.divmod(problem.slots, case.page_size))
    arrays = []
    for number, order in enumerate(FORMS[case.form]):
        nbytes = sum(bits[name].shape[-1] for name in order)
        base = xp.empty((*lead, nbytes + 16 * case.gaps), dtype=xp.uint8)
        if case.is_fp8:
            base[...] = 0xFF
            base[:, ::2] = 0x7F
        else:
            base.view(xp.uint16)[...] = NAN_BITS[case.dtype]
            base.view(xp.uint16)[:, 1::2] = INF_BITS[case.dtype]
        part = base[:, : case.page_size, :, :nbytes]
        part[(*at, 0)] = xp.concatenate([bits[name] for name in order], axis=-1)
        if case.is_fp8:
            dtype = FP8_FORMS[case.form][number][1]
            arrays.append(part.view(dtype) if np.dtype(dtype) != np.uint8 else part)
        else:
            arrays.append(typed(part, case.dtype))
    return tuple(arrays) if len(arrays) > 1 else arrays[0]


def _as_bytes(xp: Any, array: Array) -> Array:
    return xp.ascontiguousarray(array).view(xp.uint8)


# --- the grid -------------------------------------------------------------------------------------

FACTORS: dict[str, tuple[Any, ...]] = {
    "heads": (1, 8, 16, 17, 32, 64, 96, 128),
    "topk": (1, 63, 64, 128, 576, 640, 2048, 2049, 4096),
    "form": tuple(FORMS),
    "batch": (1, 3, 74, 200),
    "page_size": (1, 2, 53, 64, 256),
    "lists": ("random", "sorted", "same", "absent", "mixed", "first", "blocks"),
    "lengths": ("full", "requests", "tokens"),
    "q_len": (1, 2, 4),
    "places": ("slots", "requests", "rows"),
    "scales": ("powers", "any", "wild", "zero"),
    "sinks": ("none", "0", "-inf", "finite"),
    "query_form": ("one", "pair", "slices", "padded"),
    "gaps": (False, True),
    "outputs": ("given", "float32", "allocated"),
    "operation": ("decode", "tokens"),
}
TRIPLES = (("form", "scales", "outputs"),)
"""Covered completely, beyond all pairs."""
MOST_ENTRIES = 1 << 20  # of all lists of a case: more are left to fewer query tokens


@functools.cache
def covering_sample() -> tuple[SparseCase, ...]:
    """Cases that together hold TRIPLES and every pair of FACTORS, but where lists are too large."""
    cases = []
    for number, values in enumerate(cover(FACTORS, TRIPLES)):
        if values["batch"] * values["q_len"] * values["topk"] > MOST_ENTRIES:
            values["q_len"] = 1
        cases.append(SparseCase(**values, seed=number))
    return tuple(cases)
