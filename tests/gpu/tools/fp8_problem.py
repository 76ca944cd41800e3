# SPDX-License-Identifier: Apache-2.0
"""Calls over FP8 caches: inputs, poisoned memory and guarded outputs, for NumPy or CuPy.

Latent columns are e4m3 numbers of a normal distribution. Where they have scales, those of the four
groups of 128 columns are orders of magnitude apart, and so are those of some tokens; the columns of
the query make up for the former, so that all groups have a say in the scores. The reference is that
of :mod:`tests.gpu.tools.oracle` over what the cache stands for.

What no call may read is NaN, infinite or huge: slots past a request's length, pages of nobody,
padding. Page numbers that nobody uses are garbage.

Inputs must keep to rows that can pass: weights times scales are rounded to 16 bits, by up to
3.9e-3, and where one token makes up a row, nothing averages that. So scales lie within 1e-3 of a
number of 16 bits, tokens that weigh next to nothing come behind the first ones of a request, and
scores are steep only where there is one scale for all of the cache.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import cumla
from tests.gpu.tools import oracle
from tests.gpu.tools.pages import lay_out
from tests.gpu.tools.problem import GARBAGE, HEAD_DIM, VALUE_DIM, Guarded, normal_bits, typed
from tests.gpu.tools.ragged_problem import cover
from tests.mla.fp8_arrays import FORMS, SCALED

ROPE_DIM = HEAD_DIM - VALUE_DIM
# Of an element; relative, of a row of 512; of each 128 columns of it, which scatter more.
LIMITS = {"max_abs": 1.5e-2, "row": 4e-3, "group": 5e-3}
# With products in e4m3, the query rounded in the reference as well: weights are off by up to 2^-4,
# and scores by some 2^-13 of their terms, since such products add up with 14 bits or so.
E4M3_LIMITS = {"max_abs": 8e-2, "row": 7e-2, "group": 9e-2}
E4M3_LSE = 7e-2
POOL = 4194319  # a prime: no two cached rows repeat each other
DEVIATION = 24.0  # of the e4m3 numbers
SIZE = 0.25  # root mean square of what the largest group of columns stands for
GROUPS = (1.0, 0.7, 1e-3, 7e-6)  # of the scales, in an order of each kv head's own
LIGHT = 1e-4  # of the scales of every eighth token or so
FIRST_LIGHT = 8  # token of a request
FACTOR = float(np.float32(1.0137 * SIZE / DEVIATION))  # kv_scale: no power of two
SPREADS = {"even": 0.2, "peaked": 2.0, "steep": 8.0}
"""Of the queries: scores of deviation 0.05, 0.5 and 2."""

Array = Any


@dataclass(frozen=True)
class Fp8Case:
    """One call, and how everything lies."""

    batch: int = 3
    q_len: int = 1
    kv_len: int = 300
    heads: int = 16
    kv_heads: int = 1
    ragged: bool = False
    causal: bool = True
    page_size: int = 64
    form: str = "packed"  # of tests.mla.fp8_arrays.FORMS
    padded: bool = False
    query_form: str = "one"  # of tests.gpu.tools.pages.FORMS
    operation: str = "decode"  # or "table" or "list": queries of different lengths
    kv_scale: str = "number"  # or "array"
    spread: str = "even"  # of SPREADS
    outputs: str = "given"
    shared: int = 0  # tokens of request 0, whole pages, that lie in the same pages for all
    fp8_products: bool = False  # of forms under one factor
    fp8_query: bool = False  # of forms that are e4m3 throughout; as bytes
    seed: int = 0

    @property
    def name(self) -> str:
        """A short test id."""
        words = (
            f"b{self.batch}-s{self.q_len}-l{self.kv_len}-h{self.heads}x{self.kv_heads}",
            f"page{self.page_size}",
            self.form.replace(", ", "+").replace(" ", "_"),
            *(word for word in ("ragged", "causal", "padded") if getattr(self, word)),
            f"q_{self.query_form}",
            self.operation,
            self.kv_scale,
            self.spread,
            self.outputs,
            *(["fp8_products"] if self.fp8_products else []),
            *(["fp8_query"] if self.fp8_query else []),
        )
        return "-".join(words)

    @property
    def is_grouped(self) -> bool:
        """Return whether the latent columns have scales of their own."""
        return self.form in ("scales", "scales, e4m3 rope", "packed")

    @property
    def has_e4m3_rope(self) -> bool:
        """Return whether the RoPE columns are e4m3, too."""
        return self.form not in ("16-bit rope", "scales", "packed")

    @property
    def query_factor(self) -> float:
        """The factor of e4m3 queries, no power of two; 1 of others."""
        size = SPREADS[self.spread] / DEVIATION
        return float(np.float32(1.0137 * size)) if self.fp8_query else 1.0


@functools.cache
def e4m3_numbers() -> np.ndarray:
    """Return what each byte stands for."""
    return np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


@functools.cache
def _pool(xp: Any) -> Array:
    """Bytes of POOL normal numbers."""
    numbers = np.random.default_rng(11).standard_normal(POOL, dtype=np.float32)
    return xp.asarray((numbers * DEVIATION).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def e4m3_bits(xp: Any, shape: tuple[int, ...], offset: int) -> Array:
    """Bytes of normal numbers, a copy of the pool from ``offset`` on, over and over."""
    size = int(np.prod(shape))
    repeats = -(-(offset % POOL + size) // POOL)
    wide = xp.concatenate([_pool(xp)] * repeats) if repeats else _pool(xp)
    return wide[offset % POOL : offset % POOL + size].reshape(shape).copy()


def _scales(case: Fp8Case, lengths: np.ndarray) -> np.ndarray:
    """Scales of all tokens, request by request: (tokens, kv_heads, 4)."""
    rng = np.random.default_rng(4000 + case.seed)
    tokens = np.concatenate([np.arange(length) for length in lengths]).astype(np.int64)
    of_token = rng.uniform(0.95, 1.05, (len(tokens), case.kv_heads, 1))
    light = (rng.random(len(tokens)) < 1 / 8) & (tokens >= FIRST_LIGHT)
    of_token[light] *= LIGHT
    jitter = rng.uniform(0.95, 1.05, (len(tokens), case.kv_heads, 4))
    scales = group_sizes(case) * of_token * jitter * SIZE / DEVIATION
    in_16_bits = scales.astype(ml_dtypes.bfloat16).astype(np.float64)
    nearly = in_16_bits * rng.uniform(1 - 1e-3, 1 + 1e-3, scales.shape)
    return nearly.astype(np.float32)


def group_sizes(case: Fp8Case) -> np.ndarray:
    """Sizes of the groups of columns of each kv head, (kv_heads, 4)."""
    rng = np.random.default_rng(case.seed)
    return np.stack([rng.permutation(GROUPS) for _ in range(case.kv_heads)])


@dataclass
class Fp8Problem:
    """Arrays of one call. Rows of the cache are listed request by request, each from ``begins``."""

    xp: Any
    case: Fp8Case
    lengths: np.ndarray
    table: np.ndarray
    begins: np.ndarray
    latent: Array  # (tokens, kv_heads, 512) uint8
    rope: Array  # (tokens, kv_heads, 64) uint8 or the bits of bfloat16
    scales: Array | None  # (tokens, kv_heads, 4)
    q_bits: Array
    q: Any
    kv_cache: Any
    block_table: Array
    kv_lens: Array
    kv_scale: Any
    factor: float = FACTOR

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Of the operation: tokens and heads, or batch, q_len and heads, and 512."""
        case = self.case
        if case.operation == "decode":
            return (case.batch, case.q_len, case.heads, VALUE_DIM)
        return (case.batch * case.q_len, case.heads, VALUE_DIM)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Of the operation."""
        return self.out_shape[:-1]

    @property
    def lengths_of_plan(self) -> dict[str, Array]:
        """Return what a plan of the operation is updated with."""
        if self.case.operation == "decode":
            return {"kv_lens": self.kv_lens}
        lengths = {"kv_lens": self.kv_lens, "qo_indptr": self._qo_indptr}
        return lengths | ({"kv_indptr": self._list[0]} if self.case.operation == "list" else {})

    # Made once: a call on another stream needs them for longer than it takes.
    @functools.cached_property
    def _q_scale(self) -> Any:
        factor = self.case.query_factor
        if self.case.kv_scale != "array":
            return factor
        return self.xp.asarray(np.full(1, factor, np.float32))

    @functools.cached_property
    def _qo_indptr(self) -> Array:
        ends = np.arange(self.case.batch + 1, dtype=np.int32) * self.case.q_len
        return self.xp.asarray(ends)

    @functools.cached_property
    def _list(self) -> tuple[Array, Array]:
        """Return where each request's pages begin in a list of all, and the list."""
        counts = [-(-length // self.case.page_size) for length in self.lengths.tolist()]
        used = [row[:count] for row, count in zip(self.table, counts, strict=True)]
        begins = np.cumsum([0, *counts]).astype(np.int32)
        listed = np.concatenate([*used, np.array(GARBAGE, np.int32)])
        return self.xp.asarray(begins), self.xp.asarray(listed)

    @property
    def inputs(self) -> dict[str, Any]:
        """Return what a run of a plan takes, but for its outputs."""
        is_list = self.case.operation == "list"
        table = None if is_list else self.block_table
        inputs = {"q": self.q, "kv_cache": self.kv_cache, "block_table": table}
        if is_list:
            inputs["kv_indices"] = self._list[1]
        if self.case.form in SCALED:
            inputs["kv_scale"] = self.kv_scale
        if self.case.fp8_query:
            inputs["q_scale"] = self._q_scale
        return inputs | ({"fp8_products": True} if self.case.fp8_products else {})

    def call(self, **options: Any) -> Any:
        """The operation on these arrays."""
        operation = cumla.mla_decode if self.case.operation == "decode" else cumla.mla_attention
        arguments = self.lengths_of_plan | self.inputs
        return operation(**arguments, causal=self.case.causal, **options)

    def plan(self, **options: Any) -> Any:
        """A plan for these arrays, updated."""
        if self.case.operation == "decode":
            made: Any = cumla.MLADecodePlan.from_arrays(
                self.q, self.kv_cache, causal=self.case.causal, **options
            )
        else:
            indptr = self.lengths_of_plan["qo_indptr"]
            made = cumla.MLAAttentionPlan.from_arrays(
                self.q, self.kv_cache, qo_indptr=indptr, causal=self.case.causal, **options
            )
        made.update(**self.lengths_of_plan)
        return made

    def outputs(self, dtype: str = "bfloat16") -> tuple[Guarded, Guarded]:
        """Poisoned ``out`` and ``lse``."""
        out = Guarded(self.xp, self.out_shape, dtype)
        return out, Guarded(self.xp, self.lse_shape, "float32")

    def rows(self, requests: np.ndarray, length: int) -> Array:
        """What the cache stands for, of requests of a length: (requests, kv_heads, length, 576)."""
        tokens = np.arange(length)
        own = self.begins[requests][:, None] + tokens
        index = self.xp.asarray(np.where(tokens < self.case.shared, tokens, own))
        numbers = self.xp.asarray(e4m3_numbers())
        latent = numbers[self.latent[index].astype(np.int32)]
        if self.scales is None:
            latent *= self.factor
        else:
            scales = self.scales[index].astype(np.float64)
            shape = latent.shape
            latent = (latent.reshape(*shape[:-1], 4, -1) * scales[..., None]).reshape(shape)
        rope = self.rope[index]
        if self.case.has_e4m3_rope:
            known = numbers[rope.astype(np.int32)] * self.factor
        else:
            known = oracle.widen(self.xp, rope, "bfloat16")
        rows = self.xp.concatenate([latent, known], axis=-1)
        return self.xp.ascontiguousarray(rows.transpose(0, 2, 1, 3))

    def expected(self, lengths: np.ndarray | None = None) -> oracle.Expected:
        """The float64 result as of mla_decode, for other lengths if given."""
        case = self.case
        return oracle.attend(
            self.xp,
            self._query_in_e4m3() if case.fp8_products and not case.fp8_query else self.q_bits,
            self.rows,
            case.kv_heads,
            self.lengths if lengths is None else lengths,
            dtype="bfloat16",
            softmax_scale=HEAD_DIM**-0.5 * case.query_factor,
            causal=case.causal,
        )

    def _query_in_e4m3(self) -> Array:
        """Bits of the query as the kernel rounds it: each row relative to a power of two."""
        xp, count = self.xp, HEAD_DIM if self.case.has_e4m3_rope else VALUE_DIM
        q = oracle.widen(xp, self.q_bits, "bfloat16")
        q = np.asarray(q.get() if hasattr(q, "get") else q)
        _, exponents = np.frexp(np.abs(q).max(axis=-1, keepdims=True))
        factors = 2.0 ** (8 - exponents)  # the highest is below 2^8 then
        q[..., :count] = (q[..., :count] * factors).astype(ml_dtypes.float8_e4m3fn) / factors
        return xp.asarray(q.astype(ml_dtypes.bfloat16).view(np.uint16))

    def check(
        self, out: Array, lse: Array, expected: oracle.Expected | None = None
    ) -> dict[str, float]:
        """Hold results against the reference; the worst figures, lse's with a prefix."""
        expected = expected or self.expected()
        xp, case = self.xp, self.case
        assert tuple(out.shape) == self.out_shape
        assert tuple(lse.shape) == self.lse_shape
        dtype = str(out.dtype)
        bits = out.view(xp.uint32 if dtype == "float32" else xp.uint16)
        got = oracle.widen(xp, bits, dtype).reshape(expected.out.shape)
        lse = lse.reshape(expected.lse.shape)
        if case.fp8_products:
            figures = check_out(xp, got, expected.out, E4M3_LIMITS)
            finite = xp.isfinite(expected.lse)
            assert bool((lse[~finite] == expected.lse[~finite]).all())
            error = float(xp.abs(lse[finite] - expected.lse[finite]).max()) if finite.any() else 0.0
            assert error <= E4M3_LSE, f"lse: {error}"
            return figures | {"lse_max_abs": error}
        figures = check_out(xp, got, expected.out)
        lse_figures = oracle.check_lse(xp, lse.astype(xp.float64), expected.lse)
        return figures | {f"lse_{name}": value for name, value in lse_figures.items()}


def check_out(
    xp: Any, got: Array, expected: Array, limits: Mapping[str, float] = LIMITS
) -> dict[str, float]:
    """Hold an output against its reference: elements, rows, and groups of 128 columns of rows."""
    assert bool(xp.isfinite(got).all()), "out: NaN or infinities"
    error = got - expected
    figures = {"max_abs": float(xp.abs(error).max())}
    for name, columns in (("row", VALUE_DIM), ("group", VALUE_DIM // 4)):
        errors, sizes = (
            xp.sqrt((x * x).reshape(-1, columns).sum(axis=-1)) for x in (error, expected)
        )
        safe = xp.where(sizes > 0, sizes, 1.0)
        blank = xp.where(errors > 0, xp.full_like(errors, np.inf), xp.zeros_like(errors))
        figures[name] = float(xp.where(sizes > 0, errors / safe, blank).max())
    for name, limit in limits.items():
        assert figures[name] <= limit, f"out: {name} above {limit}: {figures}"
    return figures


def make_fp8(xp: Any, case: Fp8Case, lengths: np.ndarray | None = None) -> Fp8Problem:
    """Build the arrays of a case on the device of ``xp``, the same ones every time."""
    rng = np.random.default_rng(3000 + case.seed)
    if lengths is None:
        lengths = np.full(case.batch, case.kv_len)
        if case.ragged:
            lengths = rng.integers(0, case.kv_len + 1, case.batch)
            lengths[0] = case.kv_len
    lengths = lengths.astype(np.int32)
    table, num_pages = _deal(case, lengths, rng)
    total = int(lengths.sum())
    offset = 77777 * (case.seed + 1)
    lead = (total, case.kv_heads)
    latent = e4m3_bits(xp, (*lead, VALUE_DIM), offset)
    if case.has_e4m3_rope:
        rope = e4m3_bits(xp, (*lead, ROPE_DIM), 5 * offset)
    else:
        rope = normal_bits(xp, (*lead, ROPE_DIM), "bfloat16", SIZE, 5 * offset)
    scales = xp.asarray(_scales(case, lengths)) if case.is_grouped else None
    q_bits, q = _query(xp, case, offset)
    begins = np.cumsum(lengths) - lengths
    factor: Any = FACTOR
    if case.kv_scale == "array":
        factor = xp.asarray(np.full((1,) * (case.seed % 3), FACTOR, np.float32))
    problem = Fp8Problem(
        xp=xp,
        case=case,
        lengths=lengths,
        table=table,
        begins=begins,
        latent=latent,
        rope=rope,
        scales=scales,
        q_bits=q_bits,
        q=q,
        kv_cache=None,
        block_table=xp.asarray(table),
        kv_lens=xp.asarray(lengths),
        kv_scale=factor,
    )
    problem.kv_cache = cache_in(problem, case.form, num_pages)
    return problem


def _deal(case: Fp8Case, lengths: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Deal shuffled pages to the requests; some stay nobody's."""
    counts = -(-lengths // case.page_size)
    num_pages = int(counts.sum()) + 3
    pages = rng.permutation(num_pages).astype(np.int32)
    table = np.empty((len(lengths), int(counts.max(initial=0)) + 2), np.int32)
    table[...] = np.resize(np.array(GARBAGE, np.int32), table.shape[1])
    begin = 0
    for row, count in zip(table, counts.tolist(), strict=True):
        row[:count] = pages[begin : begin + count]
        shared = min(case.shared // case.page_size, count)
        row[:shared] = table[0, :shared]
        begin += count
    return table, num_pages


def _query(xp: Any, case: Fp8Case, offset: int) -> tuple[Array, Any]:
    """Bits of the query (batch, q_len, heads, 576), and the argument."""
    shape = (case.batch, case.q_len, case.heads)
    if case.fp8_query:
        return _fp8_query(xp, case, shape, offset)
    size = SPREADS[case.spread]
    bits = normal_bits(xp, (*shape, HEAD_DIM), "bfloat16", size, 3 * offset)
    if case.is_grouped:
        sizes = np.repeat(group_sizes(case), case.heads // case.kv_heads, axis=0)  # (heads, 4)
        inverse = np.repeat(1 / sizes, VALUE_DIM // 4, axis=-1)
        latent = oracle.widen(xp, bits[..., :VALUE_DIM], "bfloat16") * xp.asarray(inverse)
        bits[..., :VALUE_DIM] = _bits_of_16(xp, latent)
    lead = shape if case.operation == "decode" else (case.batch * case.q_len, case.heads)
    columns = lay_out(xp, lead, case.query_form, "bfloat16")
    columns.latent[...] = bits[..., :VALUE_DIM].reshape(*lead, VALUE_DIM)
    columns.rope[...] = bits[..., VALUE_DIM:].reshape(*lead, ROPE_DIM)
    return bits, columns.argument


def _fp8_query(xp: Any, case: Fp8Case, shape: tuple[int, ...], offset: int) -> tuple[Array, Any]:
    """Bits of what the e4m3 query stands for but for its factor, and the bytes of the query.

    Bytes beside them are NaN.
    """
    numbers = e4m3_bits(xp, (*shape, HEAD_DIM), 3 * offset)
    values = xp.asarray(e4m3_numbers())[numbers.astype(np.int32)]
    lead = shape if case.operation == "decode" else (case.batch * case.q_len, case.heads)
    numbers = numbers.reshape(*lead, HEAD_DIM)
    wide = xp.full((*lead, HEAD_DIM + 128), 0xFF, dtype=xp.uint8)
    if case.query_form in ("pair", "slices"):
        latent, rope = wide[..., 160 : 160 + VALUE_DIM], wide[..., 16 : 16 + ROPE_DIM]
        latent[...], rope[...] = numbers[..., :VALUE_DIM], numbers[..., VALUE_DIM:]
        return _bits_of_16(xp, values), (latent, rope)
    whole = wide[..., :HEAD_DIM] if case.query_form == "padded" else numbers
    whole[...] = numbers
    return _bits_of_16(xp, values), whole


def _bits_of_16(xp: Any, values: Array) -> Array:
    """Bits of finite numbers as bfloat16, cut off: which number it is does not matter."""
    return (values.astype(xp.float32).view(xp.uint32) >> xp.uint32(16)).astype(xp.uint16)


def cache_in(problem: Fp8Problem, form: str, num_pages: int) -> Any:
    """The problem's cache in its own form, or one that has the same parts.

    Slots of nobody are of bytes 0x7F (even ones) and 0xFF: NaN of e4m3, of wider floats numbers so
    large that their products are infinite, and NaN.
    """
    xp, case = problem.xp, problem.case
    lead = (num_pages, case.page_size, case.kv_heads)
    requests = np.repeat(np.arange(len(problem.lengths)), problem.lengths)
    tokens = np.arange(len(requests)) - problem.begins[requests]
    own = (tokens >= case.shared) | (requests == 0)
    places = problem.table[requests, tokens // case.page_size], tokens % case.page_size
    index = tuple(xp.asarray(place[own].astype(np.int64)) for place in places)
    rope = problem.rope if case.has_e4m3_rope else problem.rope.view(xp.uint8)
    columns = {"latent": problem.latent, "rope": rope}
    if problem.scales is not None:
        columns["scales"] = problem.scales.view(xp.uint8)
    arrays = []
    for order, (width, dtype) in zip(PARTS[form], FORMS[form], strict=True):
        nbytes = width * np.dtype(dtype).itemsize
        base = xp.full((*lead, nbytes + 16 * case.padded), 0xFF, dtype=xp.uint8)
        base[:, ::2] = 0x7F
        part = base[..., :nbytes]
        begin = 0
        for name in order:
            values = columns[name][xp.asarray(np.flatnonzero(own))]
            end = begin + values.shape[-1]
            part[(*index, slice(None), slice(begin, end))] = values
            begin = end
        assert begin == nbytes
        arrays.append(part.view(dtype) if dtype != np.uint8 else part)
    return tuple(arrays) if len(arrays) > 1 else arrays[0]


# What lies in each array of a form, column by column.
PARTS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "one": (("latent", "rope"),),
    "bytes": (("latent", "rope"),),
    "pair": (("latent",), ("rope",)),
    "pair of bytes": (("latent",), ("rope",)),
    "16-bit rope": (("latent",), ("rope",)),
    "scales": (("latent",), ("rope",), ("scales",)),
    "scales, e4m3 rope": (("latent",), ("rope",), ("scales",)),
    "packed": (("latent", "scales", "rope"),),
}


def run(problem: Fp8Problem, plan: Any = None, **options: Any) -> tuple[Guarded, Guarded]:
    """Run once into poisoned outputs, by a call or a plan."""
    out, lse = problem.outputs()
    if plan is None:
        problem.call(out=out.array, lse=lse.array, **options)
    else:
        plan.run(**problem.inputs | options, out=out.array, lse=lse.array)
    out.check_guards()
    lse.check_guards()
    return out, lse


def check_batch_invariance(xp: Any, case: Fp8Case) -> dict[str, float]:
    """A request of two tokens alone, or in another place among others, has its bits."""
    lengths = np.array([5000, 130, 2500, 64, 9000, 0])
    case = dataclasses.replace(case, batch=len(lengths), q_len=2)
    problem = make_fp8(xp, case, lengths)
    out, lse = run(problem, batch_invariant=True)
    for requests in ([4], [2, 0], [5, 1, 4, 3]):
        index = xp.asarray(np.array(requests))
        some = dataclasses.replace(
            problem,
            case=dataclasses.replace(case, batch=len(requests)),
            q=problem.q[index] if case.fp8_query else typed(problem.q_bits[index], "bfloat16"),
            block_table=problem.block_table[index],
            kv_lens=problem.kv_lens[index],
        )
        for got, whole in zip(run(some, batch_invariant=True), (out, lse), strict=True):
            assert bool((got.bits == whole.bits[index]).all()), requests
    return problem.check(out.array, lse.array)


def growing_scores(blocks: int = 16) -> dict[str, np.ndarray]:
    """A request whose blocks of 64 tokens weigh 2^12 times as much as the ones before.

    Its query is exact in e4m3: so are scores, whatever the products.
    """
    rng = np.random.default_rng(12)
    numbers = rng.normal(size=(blocks, 64, 1, HEAD_DIM)) * 8
    numbers[..., 0] = 16 * np.arange(1, blocks + 1)[:, None, None]
    q = np.zeros((1, 1, 64, HEAD_DIM), ml_dtypes.bfloat16)
    q[..., 0] = 12 / 16 / 1.5  # to the base 2, see softmax_scale
    q[..., 1:3] = 2.0 ** -np.arange(5, 9).repeat(16)[:, None]  # heads differ
    return {
        "q": q,
        "kv_cache": numbers.astype(ml_dtypes.float8_e4m3fn),
        "block_table": np.arange(blocks, dtype=np.int32)[None],
        "kv_lens": np.array([blocks * 64 - 5], np.int32),
        "softmax_scale": 1.5 * np.log(2.0),
    }


# --- the grid -------------------------------------------------------------------------------------

FACTORS: dict[str, tuple[Any, ...]] = {
    "batch": (1, 3, 5, 7, 157),
    "kv_len": (0, 17, 33, 96, 97, 114, 514, 1024),
    "q_len": (1, 3, 7, 16, 17),
    "heads": (16, 48, 64, 96, 128),
    "causal": (True, False),
    "page_size": (1, 16, 64),
    "form": tuple(FORMS),
    "operation": ("decode", "table", "list"),
    "kv_heads": (1, 2),
    "ragged": (False, True),
    "padded": (False, True),
    "query_form": ("one", "pair", "slices", "padded"),
    "kv_scale": ("number", "array"),
    "spread": tuple(SPREADS),
    "outputs": ("given", "float32", "allocated"),
}
TRIPLES = (("q_len", "heads", "causal"), ("form", "page_size", "operation"))
"""Covered completely, beyond all pairs."""
LEAST_PEAKED = 96  # tokens: with fewer, one may have most of the weight


@functools.cache
def covering_sample() -> tuple[Fp8Case, ...]:
    """Cases that together hold TRIPLES and every pair of FACTORS, but for impossible spreads."""
    cases = []
    for number, values in enumerate(cover(FACTORS, TRIPLES)):
        case = Fp8Case(**values, seed=number)
        if case.is_grouped:
            few = case.kv_len < LEAST_PEAKED or case.ragged
            spread = "even" if few else "peaked" if case.spread == "steep" else case.spread
            case = dataclasses.replace(case, spread=spread)
        cases.append(case)
    return tuple(cases)
