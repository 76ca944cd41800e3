# SPDX-License-Identifier: Apache-2.0
"""quantize_fp8 and append_indexer_cache against their reference, bit for bit.

All memory around what they may write is poisoned and compared, too.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla import reference
from tests.gpu.tools import kernels
from tests.gpu.tools.problem import NUMPY_DTYPES

KERNELS = ("append_indexer_cache", "quantize_fp8")
cp: Any = pytest.importorskip("cupy")

Array = Any
FLOATS = ("bfloat16", "float16", "float32")
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
POISON = 0xFF  # a NaN of every type here


@pytest.fixture(autouse=True)
def _settled() -> None:
    cumla.prepare(cumla.append_indexer_cache, cumla.quantize_fp8)
    cp.cuda.Device().synchronize()


def on_device(array: np.ndarray) -> Array:
    """A copy; CuPy takes 16-bit numbers by their bits."""
    if array.dtype.itemsize == 2:
        return cp.asarray(array.view(np.uint16)).view(array.dtype)
    return cp.asarray(array)


def some_rows(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Normal numbers of several magnitudes; some rows have what is special."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape, dtype=np.float32)
    x *= rng.choice(np.float32([1e-3, 1, 1, 30]), (*shape[:-1], 1))
    rows = x.reshape(-1, shape[-1])
    special = [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 6e4, 1e-7, 2.0**-127]
    for i, number in enumerate(special):
        rows[5 + i :: 37, rng.integers(shape[-1])] = number
    rows[3::41] = 0
    rows[4::41] = np.nan
    return x.astype(NUMPY_DTYPES[dtype])


def check_rows(result: Any, expected: Any) -> None:
    values, scale = (cp.ascontiguousarray(part).get() for part in result)
    assert (values.view(np.uint8) == expected.values.view(np.uint8)).all()
    assert (scale.view(np.uint32) == expected.scale.view(np.uint32)).all()


# --- rows -----------------------------------------------------------------------------------------

SHAPES = [
    (16,),
    (1, 16),
    (1000, 32),
    (77, 48),
    (3, 111, 64),
    (2, 1000, 128),
    (257, 576),
    (33, 1024),
    (33, 1040),
    (19, 2064),
    (9, 4112),
    (70, 8192),
]


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows(shape: tuple[int, ...], dtype: str, power: bool) -> None:
    x = some_rows(shape, dtype)
    result = cumla.quantize_fp8(on_device(x), power_of_two_scales=power)
    assert (result.values.dtype, result.scale.dtype) == (np.uint8, np.float32)
    check_rows(result, reference.quantize_fp8(x, power_of_two_scales=power))


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_random_bits(dtype: str, power: bool) -> None:
    """All numbers of 16 bits, in rows of like magnitude and shuffled; any bits of float32."""
    rng = np.random.default_rng(1)
    if dtype == "float32":
        bits = rng.integers(0, 1 << 32, 1 << 18, np.uint32)
    else:
        bits = np.arange(1 << 16, dtype=np.uint16)
        bits = np.concatenate([bits, rng.permutation(bits)])
    x = bits.view(NUMPY_DTYPES[dtype]).reshape(-1, 16)
    with np.errstate(invalid="ignore"):
        expected = reference.quantize_fp8(x, power_of_two_scales=power)
    check_rows(cumla.quantize_fp8(on_device(x), power_of_two_scales=power), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_rounding_to_nearest_even(dtype: str) -> None:
    """Numbers in the middle between two of e4m3, and next to it, under a scale of 1."""
    numbers = np.arange(0x7F, dtype=np.uint8).view(FP8).astype(np.float32)
    middles = (numbers[1:] + numbers[:-1]) / 2
    near = [np.nextafter(middles, np.float32(side)) for side in (-np.inf, np.inf)]
    some = np.concatenate([numbers, middles, *near, -numbers, -middles, *[-x for x in near]])
    x = np.resize(some, (80, 16))
    x[:, 0] = 448
    x = x.astype(NUMPY_DTYPES[dtype])
    expected = reference.quantize_fp8(x)
    assert (expected.scale == 1).all()
    check_rows(cumla.quantize_fp8(on_device(x)), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_strides(dtype: str) -> None:
    """Four axes that do not merge, in what is read and in what is written; nothing else changes."""
    shape = (3, 4, 5, 6, 64)
    x = some_rows((*[2 * size for size in shape[:-1]], 80), dtype)
    there, slices = on_device(x), (slice(1, None, 2),) * 4 + (slice(16, None),)
    out = cp.full((*shape[:3], 7, 96), POISON, dtype=cp.uint8)
    scale_out = cp.full((6, 5, 4, 3, 2), np.nan, dtype=cp.float32)
    out_view, scale_view = out[:, :, :, :6, 16:80], scale_out[..., 0].T
    result = cumla.quantize_fp8(there[slices], out=out_view.view(FP8), scale_out=scale_view)
    expected = reference.quantize_fp8(x[slices])
    assert result.scale is scale_view
    assert result.values.data.ptr == out_view.data.ptr
    check_rows((out_view, scale_view), expected)
    out_view[...] = POISON
    assert bool((out == POISON).all())
    assert bool(cp.isnan(scale_out[..., 1]).all())


def test_a_broadcast_input_and_no_rows() -> None:
    x = some_rows((1, 128), "bfloat16")
    result = cumla.quantize_fp8(cp.broadcast_to(on_device(x), (300, 128)))
    check_rows(result, reference.quantize_fp8(np.broadcast_to(x, (300, 128))))
    assert cumla.quantize_fp8(on_device(x)[:0]).values.shape == (0, 128)


def needs_memory(nbytes: int) -> None:
    cp.get_default_memory_pool().free_all_blocks()
    if cp.cuda.runtime.memGetInfo()[0] < nbytes + (2 << 30):
        pytest.skip(f"needs {nbytes >> 30} GB of free memory")


def test_rows_beyond_32_bits() -> None:
    """Rows read from 5 GB, and 2^32 values written."""
    needs_memory(10 << 30)
    rows = 1 << 25
    base = cp.zeros(5 << 29, dtype=cp.uint16)
    x = some_rows((4096, 128), "bfloat16")
    far = cp.lib.stride_tricks.as_strided(base, (4096, 128), (5 << 18, 2))
    far[...] = cp.asarray(x.view(np.uint16))
    check_rows(cumla.quantize_fp8(far.view(x.dtype)), reference.quantize_fp8(x))
    shape = (rows // 4096, 4096, 128)
    again = cp.lib.stride_tricks.as_strided(far.view(x.dtype), shape, (0, 5 << 18, 2))
    values, scale = cumla.quantize_fp8(again)
    assert values.size == 1 << 32
    check_rows((values[-1], scale[-1]), reference.quantize_fp8(x))
    assert bool((values.view(cp.uint64) == values[-1].view(cp.uint64)).all())
    assert bool((scale.view(cp.uint32) == scale[-1].view(cp.uint32)).all())


# --- the cache ------------------------------------------------------------------------------------


def slots_of(tokens: int, num_slots: int, index: str, seed: int = 0) -> np.ndarray:
    """Distinct slots, some of which do not exist."""
    rng = np.random.default_rng(seed)
    slots = rng.permutation(num_slots)[:tokens].astype(index)
    limits = np.iinfo(index)
    wrong = [-1, num_slots, limits.max, limits.min]
    if index == "int64":
        wrong += [1 << 31, (1 << 32) + 5, 5 - (1 << 32)]
    slots[2::7] = np.resize(wrong, len(slots[2::7]))
    return slots


def make_cache(layout: str, pages: int, page_size: int, head_dim: int) -> tuple[Any, Any]:
    """The memory that holds a cache, poisoned, and a function from memory to cache."""
    nbytes = page_size * (head_dim + 4)
    if layout == "pair":
        wide = np.full((pages + 2, page_size + 2, head_dim + 16), POISON, np.uint8)
        scales = np.full((page_size + 2, pages + 2), np.nan, np.float32)

        def parts(memory: Any) -> Any:
            values, scales = memory
            return values[1:-1, 1:-1, :head_dim], scales[1:-1, 1:-1].T

        return (wide, scales), parts
    padded = nbytes + (48 if layout == "padded" else 0)
    wide = np.full((pages + 2, padded), POISON, np.uint8)
    axes = () if layout == "3d" else (1,)
    shape = (pages, page_size, *axes, head_dim + 4)
    return (wide,), lambda memory: memory[0][1:-1, :nbytes].reshape(shape)


@pytest.mark.parametrize("layout", ["3d", "4d", "padded", "pair"])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_cache(head_dim: int, page_size: int, layout: str) -> None:
    """Every dtype, kind of index and of scale; padding and all that is not named included."""
    for seed, tokens in enumerate((1, 2, 17, 300, 701, 33)):
        dtype, power = FLOATS[seed % 3], seed % 2 == 0
        pages = -(-tokens // page_size) + 2
        k = some_rows((tokens, head_dim), dtype, seed)
        slots = slots_of(tokens, pages * page_size, ("int32", "int64")[seed // 3], seed)
        host, of = make_cache(layout, pages, page_size, head_dim)
        there = tuple(cp.asarray(array) for array in host)
        wide = cp.full((tokens, 2), -1, dtype=slots.dtype)
        wide[:, 0] = cp.asarray(slots)
        cumla.append_indexer_cache(on_device(k), of(there), wide[:, 0], power_of_two_scales=power)
        reference.append_indexer_cache(k, of(host), slots, power_of_two_scales=power)
        for got, expected in zip(there, host, strict=True):
            assert (got.get().view(np.uint8) == expected.view(np.uint8)).all()


def test_no_token_has_a_place() -> None:
    k = on_device(some_rows((700, 128), "bfloat16"))
    cache = cp.full((4, 64, 132), POISON, dtype=cp.uint8)
    cumla.append_indexer_cache(k, cache[1:3], cp.full(700, -1, dtype=cp.int32))
    cumla.append_indexer_cache(k, cache[1:3], cp.arange(128, 828))
    cumla.append_indexer_cache(k[:0], cache[1:3], cp.arange(0))
    assert bool((cache == POISON).all())


def test_as_quantize_fp8_and_keys_of_a_wider_array() -> None:
    wide = on_device(some_rows((500, 576), "bfloat16"))
    k = wide[:, 448:]
    cache = cp.full((8, 64, 132), POISON, dtype=cp.uint8)
    cumla.append_indexer_cache(k, cache, cp.arange(500))
    values, scale = cumla.quantize_fp8(k)
    pages = cache.reshape(8, -1)
    assert bool((pages[:, :8192].reshape(-1, 128)[:500] == values).all())
    there = cp.ascontiguousarray(pages[:, 8192:]).view(cp.float32).ravel()
    assert bool((there[:500] == scale).all())


def test_a_cache_beyond_32_bits() -> None:
    """Rows all over 2^32 bytes, equal to those of a small cache; nothing else changes."""
    pages, tokens = 600_000, 200_000
    needs_memory(pages * 8448 + (4 << 30))
    base = cp.full((pages, 2112), 0xFFFFFFFF, dtype=cp.uint32)
    small = cp.full((tokens // 64, 2112), 0xFFFFFFFF, dtype=cp.uint32)
    strides = cp.lib.stride_tricks.as_strided

    def parts(words: Array) -> tuple[Array, Array]:
        shape = (len(words), 64, 32)
        return strides(words, shape, (8448, 128, 4)), words[:, 2048:]

    k = on_device(some_rows((tokens, 128), "bfloat16"))
    order = np.random.default_rng(0).permutation(pages)[:tokens]
    slots = cp.asarray(order * 64 + np.arange(tokens) % 64)
    cache = base.view(cp.uint8).reshape(pages, 64, 1, 132)
    cumla.append_indexer_cache(k, cache, slots)
    cumla.append_indexer_cache(k, small.view(cp.uint8).reshape(-1, 64, 132), cp.arange(tokens))
    for far, near in zip(parts(base), parts(small), strict=True):
        assert bool((far[slots // 64, slots % 64] == near.reshape(tokens, *near.shape[2:])).all())
        far[slots // 64, slots % 64] = 0xFFFFFFFF
    for begin in range(0, pages, 100_000):
        assert bool((base[begin : begin + 100_000] == 0xFFFFFFFF).all())


# --- streams and graphs ---------------------------------------------------------------------------


def test_a_side_stream() -> None:
    """Rows and slots that are written there, and late, are seen; the calls do not wait."""
    k = some_rows((64, 128), "bfloat16")
    late_k, late_slots = on_device(np.zeros_like(k)), cp.full(64, -1, dtype=cp.int64)
    now_k, now_slots = on_device(k), cp.arange(64)[::-1].copy()
    cache = np.full((1, 64, 132), POISON, np.uint8)
    there = cp.asarray(cache)
    stream = cp.cuda.Stream(non_blocking=True)

    def write() -> None:
        late_k.view(cp.uint16)[...] = now_k.view(cp.uint16)
        late_slots[...] = now_slots

    write()  # CuPy compiles its copies now
    late_k.view(cp.uint16)[...] = 0
    late_slots[...] = -1
    cp.cuda.Device().synchronize()
    with stream:
        kernels.spin(100_000_000)
        write()
        result = cumla.quantize_fp8(late_k)
    cumla.append_indexer_cache(late_k, there, late_slots, stream=stream)
    assert not stream.done, "a call waited for the device"
    stream.synchronize()
    check_rows(result, reference.quantize_fp8(k))
    reference.append_indexer_cache(k, cache, now_slots.get())
    assert (there.get() == cache).all()


def test_a_graph_replayed_with_new_rows_and_slots() -> None:
    k = on_device(some_rows((50, 64), "float16"))
    slots = cp.full(50, -1, dtype=cp.int32)
    cache = cp.full((4, 16, 68), POISON, dtype=cp.uint8)
    out, scale_out = cp.zeros((50, 64), dtype=cp.uint8), cp.zeros(50, dtype=cp.float32)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        cumla.append_indexer_cache(k, cache, slots, power_of_two_scales=True)
        cumla.quantize_fp8(k, out=out, scale_out=scale_out)
        with pytest.raises(cumla.NotPreparedError, match="out="):
            cumla.quantize_fp8(k)
        graph = stream.end_capture()
    for seed in range(4):
        rows = some_rows((50, 64), "float16", seed)
        k[...] = on_device(rows)
        order = np.random.default_rng(seed).permutation(64)[:50]
        slots[...] = cp.asarray(order)
        cache[...] = POISON
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        expected = np.full(cache.shape, POISON, np.uint8)
        reference.append_indexer_cache(rows, expected, order, power_of_two_scales=True)
        assert (cache.get() == expected).all()
        check_rows((out, scale_out), reference.quantize_fp8(rows))


def test_launches_keep_their_order() -> None:
    """Each may start before the one ahead of it has ended; the last one's rows stay."""
    tokens = 50_000
    both = [on_device(some_rows((tokens, 128), "bfloat16", seed)) for seed in (0, 1)]
    slots = cp.arange(tokens)
    cache = cp.zeros((-(-tokens // 64), 64, 132), dtype=cp.uint8)
    out, scale_out = cp.empty((tokens, 128), dtype=cp.uint8), cp.empty(tokens, dtype=cp.float32)
    alone = []
    for k in both:
        cumla.append_indexer_cache(k, cache, slots)
        alone.append((cache.copy(), *cumla.quantize_fp8(k)))
    for i in range(20):
        for k in (*both, *both)[: 3 + i % 2]:
            cumla.append_indexer_cache(k, cache, slots)
            cumla.quantize_fp8(k, out=out, scale_out=scale_out)
        expected = alone[i % 2]
        assert bool((cache == expected[0]).all())
        assert bool((out == expected[1]).all())
        assert bool((scale_out.view(cp.uint32) == expected[2].view(cp.uint32)).all())


# --- frameworks -----------------------------------------------------------------------------------


def test_torch() -> None:
    """Results of its own types, and a captured call that allocates."""
    torch = pytest.importorskip("torch")
    rows = some_rows((40, 128), "bfloat16")
    k = torch.from_dlpack(cp.asarray(rows.view(np.int16))).view(torch.bfloat16)
    cache = torch.full((3, 16, 1, 132), POISON, dtype=torch.uint8, device="cuda")
    split = (
        torch.zeros((3, 16, 128), dtype=torch.float8_e4m3fn, device="cuda"),
        torch.zeros((3, 16), device="cuda"),
    )
    slots = torch.arange(40, device="cuda") + 3
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values, scale = cumla.quantize_fp8(k)
        cumla.append_indexer_cache(k, cache, slots)
        cumla.append_indexer_cache(k, split, slots)
    graph.replay()
    torch.cuda.synchronize()
    assert (values.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    bits = [part.view(torch.uint8).cpu().numpy() for part in (values, split[0])]
    expected = reference.quantize_fp8(rows)
    assert (bits[0] == expected.values.view(np.uint8)).all()
    assert (bits[1].reshape(48, 128)[3:43] == expected.values.view(np.uint8)).all()
    for got in (scale, split[1].ravel()[3:43]):
        assert (got.cpu().numpy().view(np.uint32) == expected.scale.view(np.uint32)).all()
    host = np.full(cache.shape, POISON, np.uint8)
    reference.append_indexer_cache(rows, host, np.arange(40) + 3)
    assert (cache.cpu().numpy() == host).all()
    # A second call writes where it is told to.
    out = torch.zeros_like(values)
    assert cumla.quantize_fp8(k, out=out).values is out
    assert torch.equal(out.view(torch.uint8), values.view(torch.uint8))


def test_jax(jax: Any) -> None:
    rows = some_rows((40, 64), "bfloat16")
    k = jax.numpy.asarray(rows)
    values, scale = cumla.quantize_fp8(k)
    assert (values.dtype, scale.dtype) == (FP8, np.float32)
    expected = reference.quantize_fp8(rows)
    assert (np.asarray(values).view(np.uint8) == expected.values.view(np.uint8)).all()
    assert (np.asarray(scale).view(np.uint32) == expected.scale.view(np.uint32)).all()
    cache = cp.full((3, 16, 68), POISON, dtype=cp.uint8)
    cumla.append_indexer_cache(k, cache, jax.numpy.arange(40, dtype="int32") + 3)
    host = np.full((3, 16, 68), POISON, np.uint8)
    reference.append_indexer_cache(rows, host, np.arange(40) + 3)
    assert (cache.get() == host).all()


def test_check_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    k = on_device(some_rows((5, 64), "float32"))
    cache = cp.full((2, 16, 68), POISON, dtype=cp.uint8)
    slots = cp.asarray(np.array([3, -1, 31, 32, 7]))
    with pytest.raises(ValueError, match=r"slot_mapping\[3\]: .*up to 31.*got 32"):
        cumla.append_indexer_cache(k, cache, slots)
    assert bool((cache == POISON).all())
    slots[3] = 30
    cumla.append_indexer_cache(k, cache, slots)
    assert not bool((cache == POISON).all())


@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("dtype", FLOATS)
def test_keys_of_68_bytes(dtype: str, page_size: int) -> None:
    for tokens in (1, 7, 300, 3000):
        rng = np.random.default_rng(tokens)
        pages = -(-tokens // page_size) + 2
        host = np.full((pages + 2, page_size * 68 + 16), POISON, np.uint8)
        there = cp.asarray(host)
        slots = rng.permutation(pages * page_size)[:tokens]
        slots[5::7] = np.resize([-1, pages * page_size, 2**40], len(slots[5::7]))
        rows = some_rows((tokens, 128), dtype, tokens)
        written, cache = (
            xp.lib.stride_tricks.as_strided(
                memory[1:], (pages, page_size, 68), (memory.strides[0], 68, 1)
            )
            for xp, memory in ((np, host), (cp, there))
        )
        reference.append_indexer_cache(rows, written, slots, cache_format="mxfp4")
        cumla.append_indexer_cache(on_device(rows), cache, cp.asarray(slots), cache_format="mxfp4")
        assert (there.get() == host).all()
