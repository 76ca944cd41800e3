# SPDX-License-Identifier: Apache-2.0
"""append_mla_cache against its reference, all memory around what it may write compared bit for bit.

Plain copies must agree to the bit; rotated columns lie within the rounding of the float64 result.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import cumla
from cumla.reference import append_mla_cache as reference
from tests.gpu.tools import kernels
from tests.gpu.tools.arrays import to_torch
from tests.gpu.tools.cases import Case
from tests.gpu.tools.problem import (
    GARBAGE,
    HEAD_DIM,
    NAN_BITS,
    NUMPY_DTYPES,
    PAGE_SIZE,
    VALUE_DIM,
    Problem,
    make_problem,
    normal_bits,
    typed,
)

KERNELS = ("append_cache",)
cp: Any = pytest.importorskip("cupy")

Array = Any
Report = Callable[..., None]

ROPE_DIM = HEAD_DIM - VALUE_DIM
MAX_POSITION = 700
FLOAT32_ERROR = 2.0**-22  # of two products and a sum, relative to the larger factor
LARGEST = 8.0  # no number of the pools is larger
FACTORS: dict[str, tuple[Any, ...]] = {
    "tokens": (1, 2, 15, 16, 17, 63, 300, 5000),
    "page_size": (1, 3, 16, 48, 64, 128),
    "kv_heads": (1, 1, 2, 3),
    "dtype": ("bfloat16", "float16"),
    "cache": ("plain", "3d", "padded", "heads first", "pair"),
    "rows": ("plain", "padded", "pair", "float32", "float32 pair"),
    "places": ("slots", "table", "list"),
    "index": ("int32", "int64"),
    "table": ("none", "none", "float32", "16-bit"),
    "interleaved": (True, False),
    "heads": (0, 1, 3, 16, 17, 128),
    "queries": ("in place", "slice of a wider array", "output"),
}


@dataclass(frozen=True)
class Sample:
    """One point of the grid."""

    tokens: int = 300
    page_size: int = 64
    kv_heads: int = 1
    dtype: str = "bfloat16"
    cache: str = "plain"
    rows: str = "plain"
    places: str = "slots"
    index: str = "int64"
    table: str = "none"
    interleaved: bool = True
    heads: int = 0
    queries: str = "in place"
    seed: int = 0

    @property
    def name(self) -> str:
        return "-".join(str(value) for value in vars(self).values()).replace(" ", "_")


def samples(count: int) -> list[Sample]:
    """The same points of the grid every time; many heads only for few tokens."""
    rng = random.Random(20261121)
    found = []
    for seed in range(count):
        chosen = {name: rng.choice(values) for name, values in FACTORS.items()}
        chosen["heads"] = min(chosen["heads"], 50_000 // chosen["tokens"])
        found.append(Sample(**chosen, seed=seed))
    return found


class Memory:
    """Poisoned arrays on the GPU, each with a copy on the host; views of both are made alike."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.pairs: list[tuple[Array, np.ndarray]] = []

    def array(
        self, shape: tuple[int, ...], view: Callable[[Array], Array] | None = None, fill: Any = None
    ) -> tuple[Array, np.ndarray]:
        """An array of 16-bit elements, or of what `fill` is, seen through `view`."""
        if fill is None:
            there = cp.full(shape, NAN_BITS[self.dtype], dtype=cp.uint16)
            here = np.full(shape, NAN_BITS[self.dtype], np.uint16)
        else:
            there, here = cp.asarray(fill.reshape(shape)), fill.reshape(shape).copy()
        self.pairs.append((there, here))
        if there.dtype == cp.uint16:
            there, here = typed(there, self.dtype), here.view(NUMPY_DTYPES[self.dtype])
        return (there, here) if view is None else (view(there), view(here))

    def normal(
        self, shape: tuple[int, ...], view: Callable[[Array], Array] | None = None, seed: int = 0
    ) -> tuple[Array, np.ndarray]:
        """The same, of normal numbers."""
        return self.array(shape, view, normal_bits(np, shape, self.dtype, 1.0, 1000 * seed + 7))

    def check(self, *, rotated: bool) -> None:
        """Compare the two sides to the bit.

        What is rotated in float32 may round to the neighbour of what float64 rounds to.
        """
        for there, here in self.pairs:
            got = there.get()
            differs = got != here
            if not rotated or here.dtype != np.uint16:
                assert not differs.any()
            elif differs.any():
                one, other = (a[differs].view(NUMPY_DTYPES[self.dtype]) for a in (got, here))
                exact = other.astype(np.float64)
                error = np.abs(one.astype(np.float64) - exact)
                assert (error <= 2 * half_step(exact, self.dtype) + FLOAT32_ERROR * LARGEST).all()


def half_step(exact: np.ndarray, dtype: str) -> np.ndarray:
    """Half of the distance between neighbours, of 16 bits, at these numbers."""
    digits, least = {"bfloat16": (8, -126), "float16": (11, -14)}[dtype]
    _, exponent = np.frexp(exact)
    return np.ldexp(1.0, np.maximum(exponent - 1, least) - digits)


def make_cache(memory: Memory, s: Sample, num_pages: int) -> tuple[Any, Any]:
    """The cache of both sides."""

    def one(columns: int) -> tuple[Array, np.ndarray]:
        shape = (num_pages, s.page_size, s.kv_heads, columns)
        if s.cache == "padded":
            wide = (num_pages + 1, s.page_size + 1, s.kv_heads + 1, columns + 24)
            return memory.array(wide, lambda a: a[1:, : s.page_size, : s.kv_heads, 8 : columns + 8])
        if s.cache == "heads first":
            swapped = (num_pages, s.kv_heads, s.page_size, columns)
            return memory.array(swapped, lambda a: a.transpose(0, 2, 1, 3))
        if s.cache == "3d" and s.kv_heads == 1:
            return memory.array(shape[:2] + shape[3:])
        return memory.array(shape)

    if s.cache != "pair":
        return one(HEAD_DIM)
    (latent, host_latent), (rope, host_rope) = one(VALUE_DIM), one(ROPE_DIM)
    return (latent, rope), (host_latent, host_rope)


def make_rows(memory: Memory, s: Sample) -> tuple[Any, Any]:
    """The new rows of both sides."""

    def one(columns: int) -> tuple[Array, np.ndarray]:
        shape: tuple[int, ...] = (s.tokens, s.kv_heads, columns)
        if s.kv_heads == 1 and s.seed % 2:
            shape = (s.tokens, columns)
        if "float32" in s.rows:
            rng = np.random.default_rng(s.seed)
            return memory.array(shape, fill=rng.standard_normal(shape, dtype=np.float32))
        if s.rows == "padded":
            wide = (*shape[:-1], columns + 40)
            return memory.normal(wide, lambda a: a[..., 16 : columns + 16], s.seed)
        return memory.normal(shape, seed=s.seed + columns)

    if "pair" not in s.rows:
        return one(HEAD_DIM)
    (latent, host_latent), (rope, host_rope) = one(VALUE_DIM), one(ROPE_DIM)
    return (latent, rope), (host_latent, host_rope)


def make_places(s: Sample, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], int]:
    """Distinct places, some of which do not exist; and the number of pages."""
    index = np.dtype(s.index)
    if s.places == "slots":
        num_pages = -(-s.tokens // s.page_size) + 2
        slots = rng.permutation(num_pages * s.page_size)[: s.tokens].astype(index)
        none = np.array([-1, num_pages * s.page_size, np.iinfo(index).max, np.iinfo(index).min])
        slots[5::7] = np.resize(none, len(slots[5::7]))
        return {"slot_mapping": slots}, num_pages
    batch = 5
    each = -(-s.tokens // batch)
    max_pages = -(-each // s.page_size)
    num_pages = batch * max_pages + 3
    pages = rng.permutation(num_pages)[: batch * max_pages].astype(np.int32)
    pages[3::11] = np.resize([*GARBAGE, num_pages, -(2**31)], len(pages[3::11]))
    tokens = rng.permutation(s.tokens)
    requests, positions = (tokens % batch).astype(index), (tokens // batch).astype(index)
    requests[7::13] = np.resize([-1, batch, np.iinfo(index).max], len(requests[7::13]))
    wrong = [-1, max_pages * s.page_size, np.iinfo(index).max, np.iinfo(index).min]
    positions[2::17] = np.resize(wrong, len(positions[2::17]))
    places = {"batch_indices": requests, "positions": positions}
    if s.places == "table":
        return places | {"block_table": pages.reshape(batch, max_pages)}, num_pages
    bounds = np.arange(batch + 1, dtype=np.int32) * max_pages
    return places | {"kv_indices": pages, "kv_indptr": bounds}, num_pages


def cos_sin_of(dtype: str, rng: np.random.Generator, rows: int = MAX_POSITION) -> np.ndarray:
    angles = 6.3 * rng.random((rows, ROPE_DIM // 2))
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    return table.astype(NUMPY_DTYPES[dtype])


def on_device(array: np.ndarray) -> Array:
    """A copy; CuPy takes 16-bit numbers by their bits."""
    if array.dtype.name in ("bfloat16", "float16"):
        return typed(cp.asarray(array.view(np.uint16)), array.dtype.name)
    return cp.asarray(array)


def run_both(s: Sample) -> tuple[Memory, dict[str, Any]]:
    """Write on both sides; what was given on the GPU."""
    rng = np.random.default_rng(s.seed)
    memory = Memory(s.dtype)
    places, num_pages = make_places(s, rng)
    kv_cache, rows = make_cache(memory, s, num_pages), make_rows(memory, s)
    given, host = {"kv_cache": kv_cache[0], "rows": rows[0]}, {"kv_cache": kv_cache[1]}
    host["rows"] = rows[1]
    if s.table != "none":
        if "positions" not in places:
            places["positions"] = rng.integers(-3, MAX_POSITION + 3, s.tokens).astype(s.index)
        kind = "float32" if s.table == "float32" else s.dtype
        places["cos_sin"] = cos_sin_of(kind, rng)
        if s.heads:
            add_queries(memory, s, given, host)
    given |= {name: on_device(array) for name, array in places.items()}
    host |= places
    if "block_table" in given:  # rows of a wider table, garbage behind them
        batch, max_pages = host["block_table"].shape
        wide = cp.full((batch, max_pages + 2), GARBAGE[0], dtype=cp.int32)
        wide[:, :max_pages] = given["block_table"]
        given["block_table"] = wide[:, :max_pages]
    cumla.append_mla_cache(**given, interleaved=s.interleaved)
    reference(**host, interleaved=s.interleaved)
    return memory, given


def add_queries(memory: Memory, s: Sample, given: dict[str, Any], host: dict[str, Any]) -> None:
    shape = (s.tokens, s.heads, ROPE_DIM)
    if s.queries == "slice of a wider array":
        wide = (s.tokens, s.heads, HEAD_DIM)
        queries = memory.normal(wide, lambda a: a[..., VALUE_DIM:], s.seed + 1)
    else:
        queries = memory.normal(shape, seed=s.seed + 1)
    given["q_pe"], host["q_pe"] = queries
    if s.queries == "output":
        given["q_pe_out"], host["q_pe_out"] = memory.array(shape)


@pytest.mark.parametrize("s", samples(160), ids=lambda s: s.name)
def test_grid(s: Sample) -> None:
    """Padding and all that is not named included."""
    memory, _ = run_both(s)
    memory.check(rotated=s.table != "none")


# --- rotation -------------------------------------------------------------------------------------


def check_rounding(got: np.ndarray, exact: np.ndarray, largest: float) -> float:
    """Hold 16-bit numbers against float64: half a step, and float32's own error."""
    error = np.abs(got.astype(np.float64) - exact)
    allowed = half_step(exact, got.dtype.name) + FLOAT32_ERROR * largest
    assert (error <= allowed).all()
    return float((error / allowed).max())


@pytest.mark.parametrize("kind", ["float32", "16-bit"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rows_dtype", ["16-bit", "float32"])
def test_rotations_lie_within_rounding(
    rows_dtype: str, dtype: str, interleaved: bool, kind: str, record_figures: Report
) -> None:
    tokens, heads = 600, 20
    rng = np.random.default_rng(5)
    numbers = rng.standard_normal((tokens, HEAD_DIM))
    rows = numbers.astype(NUMPY_DTYPES["float32" if rows_dtype == "float32" else dtype])
    q_pe = rng.standard_normal((tokens, heads, ROPE_DIM)).astype(NUMPY_DTYPES[dtype])
    table = cos_sin_of("float32" if kind == "float32" else dtype, rng)
    positions = rng.integers(0, MAX_POSITION, tokens)
    slots = rng.permutation(tokens)
    exact = np.full((tokens, 1, HEAD_DIM), np.nan)
    exact_q = np.full(q_pe.shape, np.nan)
    common: dict[str, Any] = {"interleaved": interleaved}
    reference(
        rows.astype(np.float64),
        exact,
        slots,
        positions=positions,
        cos_sin=table,
        q_pe=q_pe.astype(np.float64),
        q_pe_out=exact_q,
        **common,
    )
    cache = typed(cp.full((tokens, 1, HEAD_DIM), NAN_BITS[dtype], dtype=cp.uint16), dtype)
    queries = on_device(q_pe)
    cumla.append_mla_cache(
        on_device(rows),
        cache,
        cp.asarray(slots),
        positions=cp.asarray(positions),
        cos_sin=on_device(table),
        q_pe=queries,
        **common,
    )
    largest = float(np.abs(rows.astype(np.float64)).max())
    rope, turned = (
        array.view(cp.uint16).get().view(NUMPY_DTYPES[dtype]) for array in (cache, queries)
    )
    worst = check_rounding(rope[..., VALUE_DIM:], exact[..., VALUE_DIM:], largest)
    worst_q = check_rounding(turned, exact_q, float(np.abs(q_pe.astype(np.float64)).max()))
    record_figures({"of_allowed": worst, "of_allowed_q": worst_q})


# --- what does not exist --------------------------------------------------------------------------


def poisoned(*shape: int) -> Array:
    return cp.full(shape, NAN_BITS["bfloat16"], dtype=cp.uint16)


def bf16(bits: Array) -> Array:
    return typed(bits, "bfloat16")


def some_rows(tokens: int, seed: int = 0) -> Array:
    return normal_bits(cp, (tokens, HEAD_DIM), "bfloat16", 1.0, 10_007 * seed + 3)


@pytest.mark.parametrize("index", ["int32", "int64"])
def test_slots_that_do_not_exist(index: str) -> None:
    """Between guard bands: not one byte of the cache or around it is written."""
    limits = np.iinfo(index)
    slots = [-1, -2, limits.min, limits.max, 128, 129, 1 << 20]
    if index == "int64":
        slots += [1 << 31, 1 << 32, (1 << 32) + 5, -(1 << 32) + 5, 1 << 62]
    base = poisoned(6, 64, HEAD_DIM)
    rows = some_rows(len(slots))
    cumla.append_mla_cache(bf16(rows), bf16(base)[2:4], cp.asarray(np.array(slots, index)))
    assert bool((base == poisoned(1)).all())


def test_garbage_everywhere() -> None:
    """Random bits for requests, positions, pages and bounds: as the reference, and in the cache."""
    rng = np.random.default_rng(3)
    tokens, batch = 4000, 7

    def garbage(shape: Any, dtype: str, small: int) -> np.ndarray:
        limits = np.iinfo(dtype)
        wild = rng.integers(limits.min, limits.max, shape, dtype)
        return np.where(rng.random(shape) < 0.7, rng.integers(-1, small, shape), wild).astype(dtype)

    for form in ("table", "list"):
        base, rows = poisoned(14, 16, HEAD_DIM), some_rows(tokens)
        numbers = {
            "batch_indices": garbage(tokens, "int32", batch + 1),
            "positions": garbage(tokens, "int64", 90),
        }
        if form == "table":
            numbers["block_table"] = garbage((batch, 5), "int32", 11)
        else:
            numbers["kv_indices"] = garbage(40, "int32", 11)
            numbers["kv_indptr"] = garbage(batch + 1, "int32", 41)
        host = base.get()[2:12].copy()
        reference(
            rows.get().view(NUMPY_DTYPES["bfloat16"]),
            host.view(NUMPY_DTYPES["bfloat16"]),
            **numbers,
        )
        there = {name: cp.asarray(array) for name, array in numbers.items()}
        cumla.append_mla_cache(bf16(rows), bf16(base)[2:12], **there)
        got = base.get()
        assert (got[:2] == NAN_BITS["bfloat16"]).all()
        assert (got[12:] == NAN_BITS["bfloat16"]).all()
        written = (host != NAN_BITS["bfloat16"]).any(axis=2)
        assert ((got[2:12] != NAN_BITS["bfloat16"]).any(axis=2) == written).all()
        assert written.any()
        assert not written.all()


@pytest.mark.parametrize("tokens", [1, 700])
def test_no_token_has_a_place(tokens: int) -> None:
    base, rows = poisoned(4, 16, HEAD_DIM), some_rows(tokens)
    cumla.append_mla_cache(bf16(rows), bf16(base), cp.full(tokens, -1, dtype=cp.int32))
    empty = cp.zeros((3, 0), dtype=cp.int32)
    zeros = cp.zeros(tokens, dtype=cp.int32)
    cumla.append_mla_cache(
        bf16(rows), bf16(base), batch_indices=zeros, positions=zeros, block_table=empty
    )
    no_list: Mapping[str, Any] = {"kv_indices": empty[0], "kv_indptr": zeros[:1]}
    cumla.append_mla_cache(bf16(rows), bf16(base), batch_indices=zeros, positions=zeros, **no_list)
    cumla.append_mla_cache(bf16(rows[:0]), bf16(base), zeros[:0])
    assert bool((base == poisoned(1)).all())


def test_duplicates_leave_nothing_that_nobody_wrote() -> None:
    rows, base = some_rows(1000), poisoned(1, 4, HEAD_DIM)
    cumla.append_mla_cache(bf16(rows), bf16(base), cp.arange(1000, dtype=cp.int32) % 4)
    for slot in range(4):
        same = (rows[slot::4] == base[0, slot]).reshape(-1, HEAD_DIM // 8, 8).all(axis=2)
        assert bool(same.any(axis=0).all())


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 64])
def test_half_a_million_rows(page_size: int) -> None:
    tokens = 500_000
    rows = some_rows(tokens)
    base = poisoned(-(-tokens // page_size), page_size, HEAD_DIM)
    order = np.random.default_rng(0).permutation(tokens)
    slots = cp.asarray(order)
    cumla.append_mla_cache(bf16(rows), bf16(base), slots)
    assert bool((base.reshape(-1, HEAD_DIM)[slots] == rows).all())
    assert bool((base.reshape(-1, HEAD_DIM)[tokens:] == poisoned(1)).all())


def test_offsets_beyond_32_bits() -> None:
    """Rows read from, and written to, the whole of 2^32 elements; nothing else changes."""
    num_pages = 120_000
    nbytes = 2 * num_pages * 64 * HEAD_DIM
    cp.get_default_memory_pool().free_all_blocks()
    if cp.cuda.runtime.memGetInfo()[0] < nbytes + (4 << 30):
        pytest.skip("needs 13 GB of free memory")
    base = cp.zeros((num_pages, 64, HEAD_DIM), dtype=cp.uint16)
    assert base.size > 1 << 32
    rows = base[:, 0]  # a row of each page, 73,728 bytes apart
    pages = cp.arange(num_pages, dtype=cp.uint32)
    rows[...] = (pages[:, None] * 40503 + cp.arange(HEAD_DIM, dtype=cp.uint32) * 77 + 1).astype(
        cp.uint16
    )
    slots = (num_pages - 1 - cp.arange(num_pages, dtype=cp.int64)) * 64 + 63
    cumla.append_mla_cache(bf16(rows), bf16(base), slots)
    assert bool((base[::-1, 63] == base[:, 0]).all())
    for row in range(1, 63):
        assert not bool(base[:, row].any())


# --- streams and graphs ---------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _settled() -> None:
    cumla.prepare(cumla.append_mla_cache)
    cp.cuda.Device().synchronize()


@pytest.mark.parametrize("how", ["current", "object", "handle"])
def test_a_side_stream(how: str) -> None:
    """Slots that are written there, and late, are seen; the call does not wait."""
    rows, base = some_rows(64), poisoned(1, 64, HEAD_DIM)
    stream = cp.cuda.Stream(non_blocking=True)
    late, slots = cp.full(64, -1, dtype=cp.int64), cp.arange(64)[::-1].copy()
    cp.cuda.Device().synchronize()
    with stream:
        kernels.spin(100_000_000)
        late[...] = slots
    if how == "current":
        with stream:
            cumla.append_mla_cache(bf16(rows), bf16(base), late)
    else:
        given = stream if how == "object" else stream.ptr
        cumla.append_mla_cache(bf16(rows), bf16(base), late, stream=given)
    assert not stream.done, "the call waited for the device"
    stream.synchronize()
    assert bool((base[0, ::-1] == rows).all())


def test_a_graph_replayed_with_new_rows_and_slots() -> None:
    rows, base = some_rows(50), poisoned(4, 16, HEAD_DIM)
    slots = cp.full(50, -1, dtype=cp.int32)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        cumla.append_mla_cache(bf16(rows), bf16(base), slots)
        graph = stream.end_capture()
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(64)[:50]
        rows[...] = some_rows(50, seed)
        slots[...] = cp.asarray(order)
        base[...] = NAN_BITS["bfloat16"]
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        expected = np.full((64, HEAD_DIM), NAN_BITS["bfloat16"], np.uint16)
        expected[order] = rows.get()
        assert (base.get().reshape(64, HEAD_DIM) == expected).all()


def rows_of(problem: Problem, requests: np.ndarray, positions: np.ndarray) -> Array:
    """A copy of what the cache holds for tokens: (tokens, kv_heads, 576)."""
    pages = problem.table[requests, positions // PAGE_SIZE].astype(np.int64)
    return problem.kv_bits[cp.asarray(pages), cp.asarray(positions % PAGE_SIZE)]


def test_writing_and_attending_in_turns() -> None:
    """Each kernel may start before the one ahead of it has ended: none may read or write early."""
    problem = make_problem(cp, Case(batch=8, kv_len=640, ragged=False))
    requests = np.repeat(np.arange(8), 640)
    positions = np.tile(np.arange(640), 8)
    contents = [rows_of(problem, requests, positions)[:, 0].copy(), some_rows(8 * 640, 9)]
    arguments = {
        "batch_indices": cp.asarray(requests),
        "positions": cp.asarray(positions),
        "block_table": problem.block_table,
    }
    expected = []
    for rows in contents:
        cumla.append_mla_cache(bf16(rows), problem.kv_cache, **arguments)
        cp.cuda.Device().synchronize()
        expected.append(cumla.mla_decode(*problem.arrays))
        cp.cuda.Device().synchronize()
    plan = cumla.MLADecodePlan.from_arrays(problem.q, problem.kv_cache)
    plan.update(problem.kv_lens)
    outs = [cp.empty_like(expected[0].out) for _ in range(40)]
    lse = cp.empty_like(expected[0].lse)
    for i, out in enumerate(outs):
        cumla.append_mla_cache(bf16(contents[i % 2]), problem.kv_cache, **arguments)
        plan.run(**problem.inputs, out=out, lse=lse)
    for i, out in enumerate(outs):
        assert bool((out.view(cp.uint16) == expected[i % 2].out.view(cp.uint16)).all()), i


# --- attention and frameworks ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_round_trip_through_attention(dtype: str, record_figures: Report) -> None:
    """A cache filled row by row, its rest NaN, gives what the full one gives."""
    problem = make_problem(cp, Case(batch=5, q_len=2, kv_len=700, kv_heads=2, dtype=dtype))
    expected, lengths = problem.expected(), problem.lengths
    requests = np.repeat(np.arange(5), lengths)
    positions = np.concatenate([np.arange(n) for n in lengths])
    rows = rows_of(problem, requests, positions)
    problem.kv_bits[...] = NAN_BITS[dtype]
    order = np.random.default_rng(0).permutation(len(rows))
    for part in np.array_split(order, 3):
        cumla.append_mla_cache(
            typed(rows[cp.asarray(part)], dtype),
            problem.kv_cache,
            batch_indices=cp.asarray(requests[part].astype(np.int32)),
            positions=cp.asarray(positions[part]),
            block_table=problem.block_table,
        )
    record_figures(problem.check(*cumla.mla_decode(*problem.arrays), expected))


def test_torch() -> None:
    """Tensors of every argument, and a captured call."""
    torch = pytest.importorskip("torch")
    s = Sample(rows="pair", table="float32", heads=16, places="slots", tokens=200)
    memory, given = run_both(s)
    memory.check(rotated=True)
    fresh = {
        "kv_cache": to_torch(torch, bf16(poisoned(*given["kv_cache"].shape))),
        "q_pe": to_torch(torch, bf16(normal_bits(cp, given["q_pe"].shape, s.dtype, 1.0, 1007))),
    }
    tensors = {
        name: tuple(to_torch(torch, part) for part in array)
        if isinstance(array, tuple)
        else to_torch(torch, array)
        for name, array in given.items()
    }
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cumla.append_mla_cache(**tensors | fresh)
    graph.replay()
    torch.cuda.synchronize()
    for name, tensor in fresh.items():
        assert torch.equal(tensor.view(torch.int16), tensors[name].view(torch.int16)), name


def test_jax_rows_and_slots(jax: Any) -> None:
    rows, base = some_rows(40), poisoned(3, 16, HEAD_DIM)
    theirs = jax.numpy.asarray(rows.get().view(NUMPY_DTYPES["bfloat16"]))
    cumla.append_mla_cache(theirs, bf16(base), jax.numpy.arange(40, dtype="int32") + 3)
    assert bool((base.reshape(48, HEAD_DIM)[3:43] == rows).all())
    with pytest.raises(TypeError, match="kv_cache: JAX arrays are immutable"):
        cumla.append_mla_cache(bf16(rows), theirs[:, None], cp.arange(40))


def test_check_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    rows, base = some_rows(5), poisoned(2, 16, HEAD_DIM)
    slots = cp.asarray(np.array([3, -1, 31, 32, 7]))
    with pytest.raises(ValueError, match=r"slot_mapping\[3\]: .*up to 31.*got 32"):
        cumla.append_mla_cache(bf16(rows), bf16(base), slots)
    assert bool((base == poisoned(1)).all())
    slots[3] = 30
    cumla.append_mla_cache(bf16(rows), bf16(base), slots)
    assert bool((base.reshape(32, HEAD_DIM)[30] == rows[3]).all())
