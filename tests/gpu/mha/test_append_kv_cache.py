# SPDX-License-Identifier: Apache-2.0
"""append_kv_cache and apply_rope against their references; all memory that may be written to is
compared, poisoned padding included.

Plain copies and quantised rows must agree to the bit; rotated numbers lie within the rounding of
the float64 result.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from tests.gpu.tools import kernels
from tests.gpu.tools.arrays import to_torch
from tests.gpu.tools.memory import Memory
from tests.mha.append_cases import E4M3, LARGEST, Sample, check, make, poisoned, samples

KERNELS = ("append_kv_cache",)
cp: Any = pytest.importorskip("cupy")

Array = Any
BF16 = np.dtype(ml_dtypes.bfloat16)
FP16 = np.dtype(np.float16)
SAMPLES = [*samples(240), *(replace(s, dtype="float32") for s in samples(60))]
every_sample = pytest.mark.parametrize("s", SAMPLES, ids=lambda s: f"{s.dtype}-{s.seed}")


@pytest.fixture(autouse=True)
def _settled() -> None:
    cumla.prepare(cumla.append_kv_cache)
    cp.cuda.Device().synchronize()


def run_on_gpu(s: Sample) -> tuple[Memory, dict[str, np.ndarray]]:
    """Write a sample on the GPU; what may have been written to, as it was before."""
    given, owners = make(s)
    memory = Memory(cp)
    cumla.append_kv_cache(**{name: memory.upload(value) for name, value in given.items()})
    return memory, owners


@every_sample
def test_grid(s: Sample) -> None:
    """Padding and all that is not named included."""
    memory, owners = run_on_gpu(s)
    expected, expected_owners = make(s)
    cumla.reference.append_kv_cache(**expected)
    for name, owner in owners.items():
        check(memory.download(owner), expected_owners[name], rotated=s.table != "none")


@pytest.mark.parametrize("s", SAMPLES[::8], ids=lambda s: str(s.seed))
def test_repeats_are_the_same_to_the_bit(s: Sample) -> None:
    runs = [run_on_gpu(s) for _ in range(3)]
    for name in runs[0][1]:
        found = {memory.download(owners[name]).tobytes() for memory, owners in runs}
        assert len(found) == 1, name


# --- apply_rope -----------------------------------------------------------------------------------


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return rng.standard_normal(shape).clip(-LARGEST, LARGEST).astype(dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "columns", "rotary_dim", "offset"),
    [
        (1, 1, 0, 64, 64, 0),
        (300, 32, 8, 128, 128, 0),
        (301, 16, 2, 256, 64, 0),
        (77, 9, 3, 192, 64, 128),
        (5000, 5, 1, 96, 32, 8),
    ],
)
def test_apply_rope(
    tokens: int,
    heads: int,
    kv_heads: int,
    columns: int,
    rotary_dim: int,
    offset: int,
    dtype: Any,
    interleaved: bool,
) -> None:
    """New outputs, and in place in rows of wider arrays; some positions have no angles."""
    rng = np.random.default_rng(tokens)
    wide = {"q": numbers(rng, (tokens, heads, columns + 8), dtype)}
    if kv_heads:
        wide["k"] = numbers(rng, (tokens, kv_heads, columns + 8), dtype)
    rows = {name: array[..., :columns] for name, array in wide.items()}
    angles = rng.uniform(0, 6.3, (700, rotary_dim // 2))
    positions = rng.integers(-3, 703, tokens)
    positions[::50] = np.resize([2**62, -(2**62), 1 << 32], len(positions[::50]))
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    options = {"interleaved": interleaved, "rotary_offset": offset}
    memory = Memory(cp)
    there = {name: memory.upload(array) for name, array in rows.items()}
    k = there.get("k")
    at = cp.asarray(positions), cp.asarray(table)
    new = cumla.apply_rope(there["q"], k, *at, **options)
    outs = {f"{name}_out": array for name, array in there.items()}
    cumla.apply_rope(there["q"], k, *at, **options, **outs)
    host = {f"{name}_out": array for name, array in rows.items()}
    cumla.reference.apply_rope(rows["q"], rows.get("k"), positions, table, **options, **host)
    for array, result in zip(wide.values(), new, strict=False):
        check(memory.download(array), array, rotated=True)
        found = result.view(np.uint16).get().view(dtype)
        check(found, np.ascontiguousarray(array[..., :columns]), rotated=True)


# --- what does not exist --------------------------------------------------------------------------


def bf16(bits: Array) -> Array:
    return bits.view(BF16)


def some_rows(tokens: int, heads: int = 2, columns: int = 64, seed: int = 0) -> np.ndarray:
    return numbers(np.random.default_rng(seed), (tokens, heads, columns), BF16)


def on_device(array: np.ndarray) -> Array:
    if array.dtype == BF16:
        return bf16(cp.asarray(array.view(np.uint16)))
    return cp.asarray(array)


def garbage(rng: np.random.Generator, shape: Any, dtype: str, small: int) -> np.ndarray:
    limits = np.iinfo(dtype)
    wild = rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    wild = np.where(rng.random(shape) < 0.3, rng.choice([limits.min, limits.max], shape), wild)
    return np.where(rng.random(shape) < 0.7, rng.integers(-1, small, shape), wild).astype(dtype)


@pytest.mark.parametrize("pages", ["table", "list"])
@pytest.mark.parametrize("form", ["slots", "requests", "lengths", "lengths and offsets"])
def test_garbage_everywhere(form: str, pages: str) -> None:
    """Random bits for all integers: rows go where the reference writes some, guards stay."""
    rng = np.random.default_rng(3)
    tokens, batch, num_pages = 4000, 7, 10
    arguments: dict[str, np.ndarray] = {}
    if form == "slots":
        arguments["slot_mapping"] = garbage(rng, tokens, "int64", 16 * num_pages + 2)
    elif form == "requests":
        arguments["batch_indices"] = garbage(rng, tokens, "int32", batch + 1)
        arguments["positions"] = garbage(rng, tokens, "int64", 90)
    else:
        arguments["kv_lens"] = garbage(rng, batch, "int32", 900)
        bounds = np.sort(rng.integers(0, tokens + 9, batch + 1)).astype(np.int32)
        is_garbage = form == "lengths and offsets"
        anything = garbage(rng, batch + 1, "int32", tokens)
        arguments["qo_indptr"] = anything if is_garbage else bounds
    if form != "slots" and pages == "table":
        arguments["block_table"] = garbage(rng, (batch, 5), "int32", num_pages + 1)
    elif form != "slots":
        arguments["kv_indices"] = garbage(rng, 40, "int32", num_pages + 1)
        arguments["kv_indptr"] = garbage(rng, batch + 1, "int32", 41)
    rows = some_rows(tokens)
    bases = [cp.full((num_pages + 4, 16, 2, 64), 0xFFFF, dtype=cp.uint16) for _ in range(2)]
    caches = [bf16(base)[2:-2] for base in bases]
    there = {name: cp.asarray(array) for name, array in arguments.items()}
    cumla.append_kv_cache(on_device(rows), on_device(rows), *caches, **there)
    host = [poisoned((num_pages, 16, 2, 64), BF16) for _ in range(2)]
    cumla.reference.append_kv_cache(rows, rows, *host, **arguments)
    for base, expected in zip(bases, host, strict=True):
        got = base.get()
        assert (got[:2] == 0xFFFF).all()
        assert (got[-2:] == 0xFFFF).all()
        if form != "lengths and offsets":  # several requests may claim a token
            written = (expected.view(np.uint16) != 0xFFFF).any(axis=(2, 3))
            assert ((got[2:-2] != 0xFFFF).any(axis=(2, 3)) == written).all()


# --- sizes ----------------------------------------------------------------------------------------


def test_offsets_beyond_32_bits() -> None:
    """Pages all over 2^32 elements; nothing else changes."""
    num_pages, page_size, columns = 270_000, 16, 1024  # 8 heads of 128
    nbytes = 2 * num_pages * page_size * columns
    cp.get_default_memory_pool().free_all_blocks()
    if cp.cuda.runtime.memGetInfo()[0] < nbytes + (4 << 30):
        pytest.skip("needs 13 GB of free memory")
    base = cp.zeros((num_pages, page_size, columns), dtype=cp.uint16)
    assert base.size > 1 << 32
    cache = bf16(base.reshape(num_pages, page_size, 8, 128))
    tokens = num_pages // 2
    pages = cp.arange(tokens, dtype=cp.uint32)
    bits = (pages[:, None] * 40503 + cp.arange(columns, dtype=cp.uint32) * 77 + 1) & 0x7F7F
    k = bits.astype(cp.uint16)
    v = (k + 1).astype(cp.uint16)
    order = tokens - 1 - cp.arange(tokens, dtype=cp.int64)
    rows = (bf16(part.reshape(tokens, 8, 128)) for part in (k, v))
    # Keys go to the odd pages, values to the even ones: two caches of every other page.
    cumla.append_kv_cache(*rows, cache[1::2], cache[::2], order * page_size + 7)
    assert bool((base[1::2][order, 7] == k).all())
    assert bool((base[::2][order, 7] == v).all())
    for row in (0, 6, 8, 15):
        assert not bool(base[:, row].any())


# --- streams, graphs and frameworks ---------------------------------------------------------------


def test_a_side_stream() -> None:
    """Slots that are written there, and late, are seen; the call does not wait."""
    rows = on_device(some_rows(64))
    base = cp.zeros((2, 1, 64, 2, 64), dtype=cp.uint16)
    stream = cp.cuda.Stream(non_blocking=True)
    late, slots = cp.full(64, -1, dtype=cp.int64), cp.arange(64)[::-1].copy()
    cp.cuda.Device().synchronize()
    with stream:
        kernels.spin(100_000_000)
        late[...] = slots
        cumla.append_kv_cache(rows, rows, bf16(base[0]), bf16(base[1]), late)
    assert not stream.done, "the call waited for the device"
    stream.synchronize()
    for cache in base:
        assert bool((cache[0, ::-1] == rows.view(cp.uint16)).all())


def test_a_graph_replayed_with_other_lengths() -> None:
    """As a step of decoding: lengths grow, offsets end before the rows do, rows are new."""
    batch, tokens, columns = 3, 8, 64
    angles = np.random.default_rng(0).uniform(0, 6, (200, columns // 2))
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    pages = np.random.default_rng(1).permutation(30)[: batch * 8].reshape(batch, 8).astype("i4")
    there = {
        "k": on_device(some_rows(tokens)),
        "v": on_device(some_rows(tokens)),
        "q": on_device(some_rows(tokens, 6)),
        "q_out": on_device(some_rows(tokens, 6)),
        "kv_lens": cp.zeros(batch, dtype=cp.int32),
        "qo_indptr": cp.zeros(batch + 1, dtype=cp.int32),
        "block_table": cp.asarray(pages),
        "cos_sin": cp.asarray(table),
    }
    bits = cp.zeros((2, 30, 16, 2, columns), dtype=cp.uint16)
    caches = {"k_cache": bf16(bits[0]), "v_cache": bf16(bits[1])}
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        cumla.append_kv_cache(**there, **caches)
        graph = stream.end_capture()
    expected = np.zeros((2, 30, 16, 2, columns), BF16)
    for step, (lens, bounds) in enumerate(
        (([4, 1, 3], [0, 4, 5, 8]), ([5, 2, 4], [0, 1, 2, 3]), ([0, 4, 100], [0, 1, 3, 7]))
    ):
        fresh = {name: some_rows(tokens, 2, seed=10 * step + i) for i, name in enumerate("kv")}
        fresh["q"] = some_rows(tokens, 6, seed=10 * step + 5)
        for name, array in fresh.items():
            there[name].view(cp.uint16)[...] = cp.asarray(array.view(np.uint16))
        host = {"kv_lens": np.array(lens, np.int32), "qo_indptr": np.array(bounds, np.int32)}
        for name, array in host.items():
            there[name][...] = cp.asarray(array)
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        out = np.zeros_like(fresh["q"])
        cumla.reference.append_kv_cache(
            **fresh, **host, k_cache=expected[0], v_cache=expected[1], q_out=out,
            block_table=pages, cos_sin=table,
        )  # fmt: skip
        check(bits.get().view(BF16), expected, rotated=True)
        check(there["q_out"].view(cp.uint16).get().view(BF16), out, rotated=True)


def test_writing_in_turns() -> None:
    """Each kernel may start before the one ahead of it has ended: none may read or write early."""
    tokens = 4096
    one, other = (on_device(some_rows(tokens, 8, 128, seed)) for seed in (1, 2))
    bits = cp.zeros((2, tokens // 64, 64, 8, 128), dtype=cp.uint16)
    caches = bf16(bits[0]), bf16(bits[1])
    slots = cp.arange(tokens)
    copies = []
    for i in range(20):
        cumla.append_kv_cache(*((one, other) if i % 2 else (other, one)), *caches, slots)
        copies.append(bits.copy())
    for i, copy in enumerate(copies):
        k, v = (one, other) if i % 2 else (other, one)
        for cache, rows in zip(copy, (k, v), strict=True):
            assert bool((cache.reshape(tokens, 8, 128) == rows.view(cp.uint16)).all()), i


@pytest.mark.parametrize("cache", ["16 bits", "e4m3"])
def test_torch(cache: str) -> None:
    torch = pytest.importorskip("torch")
    rows = some_rows(40)
    dtype = E4M3 if cache == "e4m3" else BF16
    host = [np.zeros((3, 16, 2, 64), dtype) for _ in range(2)]
    slots = np.random.default_rng(0).permutation(48)[:40]
    bits = [cp.zeros((3, 16, 2, 64), dtype=f"u{dtype.itemsize}") for _ in range(2)]
    given = {"k": on_device(rows), "v": on_device(rows), "slot_mapping": cp.asarray(slots)}
    given |= {
        name: part.view(dtype) for name, part in zip(("k_cache", "v_cache"), bits, strict=True)
    }
    cp.cuda.Device().synchronize()
    cumla.append_kv_cache(**{name: to_torch(torch, array) for name, array in given.items()})
    torch.cuda.synchronize()
    cumla.reference.append_kv_cache(rows, rows, *host, slots)
    for part, expected in zip(bits, host, strict=True):
        assert part.get().tobytes() == expected.tobytes()


def test_jax_rows_and_slots(jax: Any) -> None:
    rows = some_rows(40)
    theirs = jax.numpy.asarray(rows)
    bits = cp.zeros((2, 3, 16, 2, 64), dtype=cp.uint16)
    caches = bf16(bits[0]), bf16(bits[1])
    cumla.append_kv_cache(theirs, theirs, *caches, jax.numpy.arange(40, dtype="int32") + 3)
    for cache in bits:
        got = cache.reshape(48, 2, 64)[3:43].get()
        assert (got == rows.view(np.uint16)).all()
    with pytest.raises(TypeError, match="k_cache: JAX arrays are immutable"):
        cumla.append_kv_cache(theirs, theirs, theirs[None], theirs[None], cp.arange(40))


def test_check_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    rows = on_device(some_rows(4))
    bits = cp.zeros((2, 2, 16, 2, 64), dtype=cp.uint16)
    places = {
        "kv_lens": cp.asarray(np.array([3, 17], np.int32)),
        "qo_indptr": cp.asarray(np.array([0, 2, 4], np.int32)),
        "block_table": cp.asarray(np.array([[1], [0]], np.int32)),
    }
    with pytest.raises(ValueError, match=r"kv_lens\[1\]: needs no more tokens .* got 17"):
        cumla.append_kv_cache(rows, rows, bf16(bits[0]), bf16(bits[1]), **places)
    assert not bool(bits.any())
