# SPDX-License-Identifier: Apache-2.0
"""append_mla_cache into FP8 caches against its reference, bit for bit where nothing is rotated.

All memory around what may be written is poisoned and compared, too.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla.reference import append_mla_cache as reference
from tests.gpu.tools import kernels
from tests.gpu.tools.problem import GARBAGE, HEAD_DIM, NUMPY_DTYPES, VALUE_DIM

KERNELS = ("append_fp8_cache",)
cp: Any = pytest.importorskip("cupy")

Array = Any
BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
ROPE_DIM = HEAD_DIM - VALUE_DIM
PACKED = 656
POISON = 0xFF  # a NaN of every type here
V4_DIM = 512  # columns of a row of DeepSeek-V4
NAMED = {"v32_no_rope": 528, "v41": 528, "v41_fp4": 288}
"""Bytes of rows of formats that have to be named."""
FORMS = ("one", "pair", "16-bit rope", "scales", "packed", "v4", *NAMED)
FACTORS: dict[str, tuple[Any, ...]] = {
    "tokens": (1, 2, 15, 16, 17, 63, 300, 3000),
    "page_size": (1, 3, 16, 64, 128),
    "heads": (1, 1, 2, 3),
    "form": FORMS,
    "dtype": ("bfloat16", "float16"),
    "rows": ("plain", "padded", "pair", "float32", "float32 pair"),
    "places": ("slots", "table"),
    "scale": (None, 0.02, "array"),
}


@dataclass(frozen=True)
class Sample:
    """One point of the grid."""

    tokens: int = 300
    page_size: int = 64
    heads: int = 1
    form: str = "one"
    dtype: str = "bfloat16"
    rows: str = "plain"
    places: str = "slots"
    scale: Any = 0.02
    seed: int = 0

    @property
    def columns(self) -> int:
        return V4_DIM if self.form.startswith("v") else HEAD_DIM

    @property
    def name(self) -> str:
        return "-".join(str(value) for value in vars(self).values()).replace(" ", "_")


def samples(count: int) -> list[Sample]:
    """The same points of the grid every time."""
    rng = random.Random(20261122)
    found = []
    for seed in range(count):
        chosen = {name: rng.choice(values) for name, values in FACTORS.items()}
        if chosen["form"] in ("packed", "v4", *NAMED):
            chosen["dtype"] = "bfloat16"
        if chosen["form"] in ("packed", "scales", "v4", *NAMED):
            chosen["scale"] = None
        if chosen["form"].startswith("v"):
            chosen["heads"] = 1
        if chosen["form"] == "v32_no_rope":  # whose rows have one part
            chosen["rows"] = chosen["rows"].replace("float32 pair", "float32")
            chosen["rows"] = chosen["rows"].replace("pair", "plain")
        found.append(Sample(**chosen, seed=seed))
    return found


@pytest.fixture(autouse=True)
def _settled() -> None:
    cumla.prepare(cumla.append_mla_cache)
    cp.cuda.Device().synchronize()


def on_device(array: np.ndarray) -> Array:
    """A copy with the same strides; CuPy takes 16-bit numbers by their bits."""
    if array.dtype.itemsize == 2:
        return cp.asarray(array.view(np.uint16)).view(array.dtype)
    return cp.asarray(array)


def some_rows(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Normal numbers of several magnitudes, some of the latent ones special.

    Not those of the RoPE columns: nobody promises which NaN of 16 bits one of float32 becomes.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape, dtype=np.float32)
    x *= rng.choice(np.float32([1e-3, 1, 30]), (*shape[:-1], 1))
    flat = x.reshape(-1, shape[-1])
    for i, number in enumerate([0.0, np.nan, -np.nan, np.inf, -np.inf, 6e4, -0.0, 2.0**-127]):
        flat[5 + i :: 37, rng.integers(min(VALUE_DIM, shape[-1] - ROPE_DIM))] = number
    flat[3::41] = 0
    return x.astype(NUMPY_DTYPES[dtype])


class Cache:
    """A cache on both sides: poisoned memory, and what of it is the cache."""

    def __init__(self, form: str, lead: tuple[int, int, int], dtype: str) -> None:
        rope = NUMPY_DTYPES[dtype]
        parts: dict[str, list[tuple[int, Any]]] = {
            "one": [(HEAD_DIM, FP8)],
            "pair": [(VALUE_DIM, np.uint8), (ROPE_DIM, np.uint8)],
            "16-bit rope": [(VALUE_DIM, FP8), (ROPE_DIM, rope)],
            "scales": [(VALUE_DIM, np.uint8), (ROPE_DIM, rope), (4, np.float32)],
            "packed": [(PACKED, np.uint8)],
            "v4": [(584, np.uint8)],
            **{name: [(nbytes, np.uint8)] for name, nbytes in NAMED.items()},
        }
        self.kinds = parts[form]
        self.lead = lead
        self.host = [self._memory(columns, dtype) for columns, dtype in self.kinds]
        self.device = [cp.asarray(memory) for memory in self.host]

    def _memory(self, columns: int, dtype: Any) -> np.ndarray:
        pages, page_size, heads = self.lead
        nbytes = columns * np.dtype(dtype).itemsize
        if columns == 584:  # pages as they lie
            nbytes = page_size * nbytes + 16 + -page_size * nbytes % 16
            return np.full((pages + 2, 1, 1, nbytes), POISON, np.uint8)
        return np.full((pages + 2, page_size + 1, heads + 1, nbytes + 16), POISON, np.uint8)

    def view(self, memories: list[Any]) -> Any:
        pages, page_size, heads = self.lead
        if self.kinds == [(584, np.uint8)]:
            whole = memories[0][1:-1, 0, 0, : page_size * 584]
            return whole.reshape(pages, page_size, 1, 584)
        parts = tuple(
            memory[1:-1, :page_size, :heads, : columns * np.dtype(dtype).itemsize].view(dtype)
            for memory, (columns, dtype) in zip(memories, self.kinds, strict=True)
        )
        return parts if len(parts) > 1 else parts[0]

    def check(self) -> None:
        for there, here in zip(self.device, self.host, strict=True):
            assert (there.get() == here).all()


def make_rows(s: Sample) -> tuple[Any, Any]:
    """The new rows of both sides."""
    dtype = "float32" if "float32" in s.rows else s.dtype
    shape: tuple[int, ...] = (s.tokens, s.heads) if s.heads > 1 or s.seed % 2 else (s.tokens,)
    if s.rows == "padded":
        wide = some_rows((*shape, s.columns + 40), dtype, s.seed)
        return on_device(wide)[..., 16:-24], wide[..., 16:-24]
    rows = some_rows((*shape, s.columns), dtype, s.seed)
    if "pair" not in s.rows:
        return on_device(rows), rows
    halves = np.split(rows, [s.columns - ROPE_DIM], axis=-1)
    parts = tuple(np.ascontiguousarray(part) for part in halves)
    return tuple(map(on_device, parts)), parts


def make_places(s: Sample) -> tuple[dict[str, np.ndarray], int]:
    """Distinct places, some of which do not exist; and the number of pages."""
    rng = np.random.default_rng(s.seed)
    if s.places == "slots":
        pages = -(-s.tokens // s.page_size) + 2
        slots = rng.permutation(pages * s.page_size)[: s.tokens]
        slots[5::7] = np.resize([-1, pages * s.page_size, 2**62, -(2**62)], len(slots[5::7]))
        return {"slot_mapping": slots}, pages
    batch = 5
    longest = -(-s.tokens // batch)
    max_pages = -(-longest // s.page_size)
    pages = batch * max_pages + 3
    table = rng.permutation(pages)[: batch * max_pages].astype(np.int32)
    table[3::11] = np.resize([*GARBAGE, pages], len(table[3::11]))
    tokens = rng.permutation(s.tokens)
    return {
        "batch_indices": (tokens % batch).astype(np.int32),
        "positions": tokens // batch,
        "block_table": table.reshape(batch, max_pages),
    }, pages


@pytest.mark.parametrize("s", samples(180), ids=lambda s: s.name)
def test_grid(s: Sample) -> None:
    """Padding and all that is not named included."""
    places, pages = make_places(s)
    cache = Cache(s.form, (pages, s.page_size, s.heads), s.dtype)
    rows, host_rows = make_rows(s)
    scale: Any = np.array([0.037], np.float32) if s.scale == "array" else s.scale
    there = {name: cp.asarray(array) for name, array in places.items()}
    if scale is not None:
        places["kv_scale"] = scale
        there["kv_scale"] = cp.asarray(scale) if s.scale == "array" else scale
    if s.form in NAMED:
        places["cache_format"] = there["cache_format"] = s.form
    reference(host_rows, cache.view(cache.host), **places)
    cumla.append_mla_cache(rows, cache.view(cache.device), **there)
    cache.check()


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("form", ["one", "packed", "v4"])
@pytest.mark.parametrize("rows_dtype", ["bfloat16", "float32"])
def test_rotations(rows_dtype: str, form: str, interleaved: bool) -> None:
    """Within half a step of the type of the RoPE columns, and float32's own error."""
    tokens, heads = 600, 20
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((tokens, HEAD_DIM)).astype(NUMPY_DTYPES[rows_dtype])
    q_pe = rng.standard_normal((tokens, heads, ROPE_DIM)).astype(BF16)
    angles = 6.3 * rng.random((700, ROPE_DIM // 2))
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    positions, slots = rng.integers(-3, 703, tokens), rng.permutation(tokens)
    common: dict[str, Any] = {"positions": positions, "cos_sin": table, "interleaved": interleaved}
    exact, exact_q = np.full((tokens, 1, HEAD_DIM), np.nan), q_pe.astype(np.float64)
    reference(rows.astype(np.float64), exact, slots, q_pe=exact_q, **common)
    there_rows = on_device(rows)
    if form == "v4":
        rows, there_rows = (of[:, HEAD_DIM - V4_DIM :] for of in (rows, there_rows))
    cache = Cache(form, (tokens, 1, 1), "bfloat16")
    scale = 0.02 if form == "one" else None
    queries = on_device(q_pe)
    there = {name: cp.asarray(common[name]) for name in ("positions", "cos_sin")}
    cumla.append_mla_cache(
        there_rows,
        cache.view(cache.device),
        cp.asarray(slots),
        q_pe=queries,
        kv_scale=scale,
        interleaved=interleaved,
        **there,
    )
    with_scale = {} if scale is None else {"kv_scale": scale}
    reference(rows, cache.view(cache.host), slots, **common, **with_scale)
    begin = {"one": VALUE_DIM, "packed": VALUE_DIM + 16, "v4": V4_DIM - ROPE_DIM}[form]
    nbytes = (1 if form == "one" else 2) * ROPE_DIM
    for got, expected in zip(cache.device, cache.host, strict=True):
        column = np.arange(expected.shape[-1])
        others = (column < begin) | (column >= begin + nbytes)
        assert (got.get()[..., others] == expected[..., others]).all()
        rope = got.get()[1:-1, :1, :1, begin : begin + nbytes]
    turned = rope.copy().view(FP8 if form == "one" else BF16).astype(np.float64)[:, 0]
    written = ~np.isnan(exact[:, :, 0])
    wanted = exact[..., VALUE_DIM:] / (scale or 1)
    digits, least = (4, -6) if form == "one" else (8, -126)
    check_rounding(turned[written], wanted[written], digits, least)
    assert np.isnan(turned[~written]).all()
    known = (positions >= 0) & (positions < 700)
    got_q = queries.view(cp.uint16).get().view(BF16)
    check_rounding(got_q[known].astype(np.float64), exact_q[known], 8, -126)
    assert (got_q[~known] == q_pe[~known]).all()


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("form", ["v41", "v41_fp4"])
@pytest.mark.parametrize("rows_dtype", ["bfloat16", "float32"])
def test_rotations_before_scales(rows_dtype: str, form: str, interleaved: bool) -> None:
    """Scales are those of the rotated columns; numbers are within half a step of the exact ones."""
    tokens = 600
    rng = np.random.default_rng(6)
    rows = rng.standard_normal((tokens, V4_DIM)).astype(NUMPY_DTYPES[rows_dtype])
    angles = 6.3 * rng.random((700, ROPE_DIM // 2))
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    positions, slots = rng.integers(-3, 703, tokens), rng.permutation(tokens)
    exact = np.full((tokens, 1, HEAD_DIM), np.nan)
    wide = np.concatenate([np.zeros((tokens, ROPE_DIM)), rows.astype(np.float64)], axis=1)
    more: dict[str, Any] = {"positions": positions, "cos_sin": table}
    reference(wide, exact, slots, interleaved=interleaved, **more)
    cache = Cache(form, (tokens, 1, 1), "bfloat16")
    cumla.append_mla_cache(
        on_device(rows),
        cache.view(cache.device),
        cp.asarray(slots),
        interleaved=interleaved,
        cache_format=form,
        **{name: cp.asarray(array) for name, array in more.items()},
    )
    written = ~np.isnan(exact[:, 0, 0])
    got = cache.view(cache.device).get()[:, 0, 0][written]
    wanted = exact[written, 0, ROPE_DIM:]
    columns, each, most = (512, 32, 448) if form == "v41" else (256, 16, 6)
    groups = wanted.reshape(len(wanted), -1, each)
    largest = np.abs(groups).max(axis=-1)
    if form == "v41":
        scales = np.exp2(got[:, columns:].astype(np.float64) - 127)
        assert (largest <= scales * most * (1 + 1e-6)).all()
        assert (largest >= scales * most / 2 * (1 - 1e-6)).all()
        numbers = got[:, :columns].view(FP8).astype(np.float64).reshape(groups.shape)
        _, exponent = np.frexp(groups / scales[..., None])
        half_step = np.ldexp(1.0, np.maximum(exponent - 1, -6) - 4)
    else:
        scales = np.ascontiguousarray(got[:, columns:]).view(FP8).astype(np.float64)
        assert (np.abs(largest / 6 - scales) <= scales / 16 * (1 + 1e-6)).all()
        codes = np.stack([got[:, :columns] & 15, got[:, :columns] >> 4], axis=-1)
        numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * np.where(codes & 8, -1, 1)
        numbers = numbers.reshape(groups.shape)
        size = np.abs(groups / scales[..., None])
        half_step = np.select([size <= 2, size <= 4, size <= 6], [0.25, 0.5, 1.0], 1.0)
    error = np.abs(numbers - np.clip(groups / scales[..., None], -most, most))
    assert (error <= half_step * (1 + 1e-4)).all()
    rest = cache.device[0].get()[1:-1][~written]
    assert (rest == POISON).all()


def check_rounding(got: np.ndarray, exact: np.ndarray, digits: int, least: int) -> None:
    """Half the distance between neighbours of that many digits, and float32's own error."""
    _, exponent = np.frexp(exact)
    half_step = np.ldexp(1.0, np.maximum(exponent - 1, least) - digits)
    largest = float(np.abs(exact).max())
    assert (np.abs(got - exact) <= half_step + 2.0**-21 * largest).all()


def test_a_cache_beyond_32_bits() -> None:
    """Packed rows all over 4 GB, equal to those of a small cache; nothing else changes."""
    pages, tokens = 110_000, 40_000
    cp.get_default_memory_pool().free_all_blocks()
    if cp.cuda.runtime.memGetInfo()[0] < pages * 64 * PACKED + (4 << 30):
        pytest.skip("needs 9 GB of free memory")
    base = cp.full((pages * 64, PACKED // 4), 0xFFFFFFFF, dtype=cp.uint32)
    assert base.nbytes > 1 << 32
    small = cp.full((tokens, PACKED // 4), 0xFFFFFFFF, dtype=cp.uint32)
    rows = on_device(some_rows((tokens, HEAD_DIM), "bfloat16"))
    order = np.random.default_rng(0).permutation(pages)[:tokens]
    slots = cp.asarray(order * 64 + np.arange(tokens) % 64)
    cumla.append_mla_cache(rows, base.view(cp.uint8).reshape(pages, 64, PACKED), slots)
    cumla.append_mla_cache(rows, small.view(cp.uint8).reshape(-1, 1, PACKED), cp.arange(tokens))
    assert bool((base[slots] == small).all())
    base[slots] = 0xFFFFFFFF
    for begin in range(0, len(base), 1 << 20):
        assert bool((base[begin : begin + (1 << 20)] == 0xFFFFFFFF).all())


def test_pages_of_v4_beyond_32_bits() -> None:
    """A slot of each of some pages all over 4 GB, equal to those of a small cache."""
    pages, tokens, step = 115_000, 40_000, 64 * 584
    cp.get_default_memory_pool().free_all_blocks()
    if cp.cuda.runtime.memGetInfo()[0] < pages * step + (4 << 30):
        pytest.skip("needs 9 GB of free memory")
    base = cp.full((pages, step // 4), 0xFFFFFFFF, dtype=cp.uint32)
    assert base.nbytes > 1 << 32
    small = cp.full((tokens, 592 // 4), 0xFFFFFFFF, dtype=cp.uint32)  # pages of one slot
    rows = on_device(some_rows((tokens, V4_DIM), "bfloat16"))
    order = cp.asarray(np.random.default_rng(0).permutation(pages)[:tokens])
    slot = cp.arange(tokens) % 64
    cache = base.view(cp.uint8).reshape(pages, 64, 1, 584)
    cumla.append_mla_cache(rows, cache, order * 64 + slot)
    one = small.view(cp.uint8)[:, :584].reshape(tokens, 1, 1, 584)
    cumla.append_mla_cache(rows, one, cp.arange(tokens))
    for begin, words, first in ((0, 144, 0), (64 * 144, 2, 144)):
        at = begin + slot[:, None] * words + cp.arange(words)
        assert bool((base[order[:, None], at] == small[:, first : first + words]).all())
        base[order[:, None], at] = 0xFFFFFFFF
    for begin in range(0, pages, 1 << 14):
        assert bool((base[begin : begin + (1 << 14)] == 0xFFFFFFFF).all())


def test_a_side_stream() -> None:
    """A scale that is written there, and late, is seen; the call does not wait."""
    rows = some_rows((64, HEAD_DIM), "bfloat16")
    there, scale = on_device(rows), cp.ones((), dtype=cp.float32)
    wanted = cp.full((), 0.01, dtype=cp.float32)
    cache = Cache("one", (1, 64, 1), "bfloat16")
    slots = cp.arange(64)
    stream = cp.cuda.Stream(non_blocking=True)
    scale[...] = wanted  # CuPy compiles its copy now
    scale[...] = 1
    cp.cuda.Device().synchronize()
    with stream:
        kernels.spin(100_000_000)
        scale[...] = wanted
        cumla.append_mla_cache(there, cache.view(cache.device), slots, kv_scale=scale)
    assert not stream.done, "the call waited for the device"
    stream.synchronize()
    reference(rows, cache.view(cache.host), np.arange(64), kv_scale=np.float32(0.01))
    cache.check()


def test_a_graph_replayed_with_new_scales() -> None:
    rows = some_rows((50, HEAD_DIM), "float16")
    there, scale = on_device(rows), cp.ones(1, dtype=cp.float32)
    cache = Cache("pair", (4, 16, 1), "float16")
    slots = cp.arange(50)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        cumla.append_mla_cache(there, cache.view(cache.device), slots, kv_scale=scale)
        graph = stream.end_capture()
    for number in (0.5, 0.01, 3.0):
        scale[...] = number
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        reference(rows, cache.view(cache.host), np.arange(50), kv_scale=np.float32(number))
        cache.check()


def test_torch() -> None:
    """Tensors of every argument, e4m3 and bytes, and a captured call."""
    torch = pytest.importorskip("torch")
    rows = some_rows((40, HEAD_DIM), "bfloat16")
    tensor = torch.from_dlpack(cp.asarray(rows.view(np.int16))).view(torch.bfloat16)
    slots = torch.arange(40, device="cuda") + 3
    scale = torch.full((), 0.02, device="cuda")
    kv_cache = torch.zeros((3, 16, HEAD_DIM), device="cuda").to(torch.float8_e4m3fn)
    packed = torch.zeros((3, 16, 1, PACKED), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cumla.append_mla_cache(tensor, kv_cache, slots, kv_scale=scale)
        cumla.append_mla_cache(tensor, packed, slots)
    graph.replay()
    torch.cuda.synchronize()
    host = np.zeros((3, 16, HEAD_DIM), np.uint8)
    reference(rows, host, np.arange(40) + 3, kv_scale=np.float32(0.02))
    assert (kv_cache.view(torch.uint8).cpu().numpy() == host).all()
    host = np.zeros((3, 16, 1, PACKED), np.uint8)
    reference(rows, host, np.arange(40) + 3)
    assert (packed.cpu().numpy() == host).all()


def test_jax_rows_and_scale(jax: Any) -> None:
    rows = some_rows((40, HEAD_DIM), "bfloat16")
    cache = cp.full((3, 16, HEAD_DIM), POISON, dtype=cp.uint8)
    slots, scale = jax.numpy.arange(40, dtype="int32") + 3, jax.numpy.float32(0.02)
    cumla.append_mla_cache(jax.numpy.asarray(rows), cache, slots, kv_scale=scale)
    host = np.full((3, 16, HEAD_DIM), POISON, np.uint8)
    reference(rows, host, np.arange(40) + 3, kv_scale=np.float32(0.02))
    assert (cache.get() == host).all()
