# SPDX-License-Identifier: Apache-2.0
"""`cumla.quantize_fp8` and `cumla.append_indexer_cache` on the CPU, what they refuse, and what
they launch. What holds for every operation is in tests/core."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cumla
from cumla.launch.indexer.quantize_fp8 import merge_axes
from tests.calls import (
    BF16,
    E4M3,
    Refusal,
    aligned,
    all_of,
    badly_laid_out,
    broadcast,
    frozen,
    int32,
    keys,
    padded,
    refused,
    shifted,
    wrong,
    wrong_type,
)
from tests.fake_cuda import FakeBindings, FakeCuPy

F32, U8 = np.float32, np.uint8


def pair(values: Any = None, scales: Any = None) -> tuple[Any, Any]:
    """A cache with values and scales apart."""
    return (
        aligned((6, 16, 64), E4M3) if values is None else values,
        aligned((6, 16), F32) if scales is None else scales,
    )


# --- rows -----------------------------------------------------------------------------------------

FLOATS = "bfloat16 or float16 or float32, got"
STEPS = aligned((4, 6, 4, 6, 4, 16))[::2, ::2, ::2, ::2, ::2]
APART = np.zeros((4, 6, 4, 6, 4), F32)[::2, ::2, ::2, ::2, ::2]
COLUMNS = "a last axis of a multiple of 16 columns, up to 8192, got shape"
ROWS = [
    *(
        wrong_type("x", aligned((4, 64), dtype), f"{FLOATS} {dtype}; convert it first")
        for dtype in ("float64", "uint8", "float8_e4m3fn")
    ),
    *(
        wrong("x", aligned(s, F32), f"{COLUMNS} {s}; pad it with zeros")
        for s in ((), (0,), (4, 0), (4, 24), (4, 8208))
    ),
    *badly_laid_out("x", aligned((5, 64))),
    *badly_laid_out("x", aligned((5, 64), F32)),
    wrong("x", STEPS, "at most 4 axes before the last ... got 5 in shape ... ; make contiguous"),
    Refusal(
        {"x": aligned((2, 3, 2, 3, 2, 16)), "scale_out": APART},
        ValueError,
        "x: needs at most 4 axes before the last ... got 5 in shape",
    ),
    wrong_type("out", aligned((4, 3, 64), np.int32), "float8_e4m3fn or uint8, got int32; allocate"),
    wrong("out", shifted(aligned((4, 3, 64), E4M3), 2), "an address that is a multiple of 16 byte"),
    wrong("scale_out", shifted(aligned((4, 3), F32), 2), "an address and strides that are multip"),
    wrong("out", aligned((12, 64), E4M3), "shape (4, 3, 64), got (12, 64); allocate it so"),
    wrong("scale_out", aligned((12,), F32), "shape (4, 3), got (12,); allocate it so"),
]


@all_of(ROWS)
def test_refusals_of_rows(refusal: Refusal) -> None:
    with refused(refusal.error, refusal.message):
        cumla.quantize_fp8(**{"x": aligned((4, 3, 64))} | refusal.changes)


def test_rows_that_are_fine() -> None:
    """The widest; padded, broadcast, with axes that merge; none at all."""
    assert cumla.quantize_fp8(aligned((2, 8192))).values.shape == (2, 8192)
    for x in (
        padded(aligned((5, 64)), 8),
        np.broadcast_to(aligned((64,), F32), (5, 64)),
        aligned((2, 3, 2, 3, 2, 16)),
        STEPS[:, :, :, :, :1],
        STEPS[:0],
    ):
        values, scales = cumla.quantize_fp8(x)
        assert (values.shape, values.dtype) == (x.shape, E4M3)
        assert (scales.shape, scales.dtype) == (x.shape[:-1], F32)


def test_values_times_scales_are_the_rows() -> None:
    x = np.random.default_rng(0).standard_normal((5, 64)).astype(F32)
    for on in (False, True):
        values, scales = cumla.quantize_fp8(x, power_of_two_scales=on)
        error = np.abs(values.astype(F32) * scales[:, None] - x)
        # Half a step of the largest numbers; the division rounds, too.
        assert (error <= 16 * (1 + 2**-20) * scales[:, None]).all()
        assert np.array_equal(np.frexp(scales)[0], np.full(5, 0.5, F32)) == on


# --- the cache ------------------------------------------------------------------------------------

BYTES = "shape (num_pages, page_size, 68), or (num_pages, page_size, 1, 68), for the 64 values and"
DIMS = "shape (tokens, head_dim) with head_dim 32, 64 or 128, got"
KEYS = [
    *(
        wrong_type("k", aligned((5, 64), dtype), f"{FLOATS} {dtype}; convert it first")
        for dtype in ("float64", "uint8", "float8_e4m3fn")
    ),
    *(
        wrong("k", aligned(shape), f"{DIMS} {shape}; reshape it")
        for shape in ((5,), (5, 1, 64), (5, 48), (5, 256))
    ),
    *badly_laid_out("k", aligned((5, 64))),
    *badly_laid_out("k", aligned((5, 64), F32)),
    *(
        wrong_type("kv_cache", aligned((6, 16, 68), d), f"uint8, got {d}; view its bytes, or pass")
        for d in ("float8_e4m3fn", "int8", "float32")
    ),
    wrong_type(
        "kv_cache[0]",
        pair(aligned((6, 16, 64), np.float16)),
        "float8_e4m3fn, or uint8 with its bits, got float16; quantise",
    ),
    wrong_type("kv_cache[1]", pair(None, aligned((6, 16))), "float32, got bfloat16; convert"),
    *(
        wrong("kv_cache", aligned(s, U8), f"{BYTES} the scale of a token, got {s}; allocate it so")
        for s in ((96, 68), (6, 16, 2, 68), (6, 16, 64), (6, 16, 132), (1, 6, 16, 1, 68))
    ),
    *(
        wrong("kv_cache", aligned((6, n, 68), U8), f"a page size of 16, 32, 64 or 128 ... got {n};")
        for n in (0, 1, 48, 256)
    ),
    wrong("kv_cache", aligned((0, 16, 68), U8), "at least one page, got shape (0, 16, 68); skip"),
    wrong("kv_cache[0]", pair(aligned((6, 16, 128), E4M3)), "shape ... for the 64 values of a tok"),
    wrong("kv_cache[1]", pair(None, aligned((6, 32), F32)), "shape ... (6, 16), got (6, 32)"),
    wrong("kv_cache", (*pair(), pair()[1]), "one array, or a tuple or list ... got 3 of them"),
    wrong("kv_cache", aligned((6, 16, 84), U8)[..., :68], "pages whose bytes are contiguous"),
    wrong("kv_cache", aligned((16, 6, 68), U8).swapaxes(0, 1), "pages whose bytes are contiguous"),
    wrong("kv_cache", aligned((6, 16, 68), U8, 8), "an address that is a multiple of 16 bytes"),
    wrong("kv_cache", aligned((6, 17, 68), U8)[:, :16], "strides ... 16 bytes ... got 1156"),
    wrong("kv_cache", aligned((6, 16, 68), U8)[::-1], "strides ... not negative"),
    wrong(
        "kv_cache",
        np.lib.stride_tricks.as_strided(aligned((16, 68), U8), (6, 16, 68), (0, 68, 1)),
        "memory of its own for each element",
    ),
    wrong("kv_cache[0]", pair(padded(aligned((6, 16, 64), E4M3), 8)), "strides that are multiples"),
    wrong("kv_cache[1]", pair(None, aligned((6, 16), F32, 2)), "an address and strides that are"),
    wrong("kv_cache[1]", pair(None, broadcast(pair()[1])), "memory of its own for each element"),
    wrong("kv_cache", frozen(aligned((6, 16, 68), U8)), "an array that can be written to, got a r"),
    wrong("kv_cache[0]", pair(frozen(pair()[0])), "an array that can be written to, got a read-on"),
    wrong("kv_cache[1]", pair(None, frozen(pair()[1])), "an array that can be written to, got a r"),
    *(
        wrong("slot_mapping", np.zeros(shape, int), f"shape (tokens,) with tokens 5, got {shape}")
        for shape in ((4,), (5, 1), ())
    ),
    *(
        wrong_type("slot_mapping", np.zeros(5, d), f"int32 or int64, got {d}; convert it first")
        for d in ("uint32", "int16", "float32")
    ),
]


@all_of(KEYS)
def test_refusals_of_keys(refusal: Refusal) -> None:
    with refused(refusal.error, refusal.message):
        cumla.append_indexer_cache(**keys() | refusal.changes)


def test_every_cache_holds_what_quantizing_gives() -> None:
    """Padded pages, values and scales apart, a list for a pair, e4m3 or its bits."""
    given = keys()
    values, scales = cumla.quantize_fp8(given["k"])
    fused = aligned((6, 20, 68), U8)[:, :16]
    apart = pair(padded(aligned((6, 16, 64), E4M3), 16))
    caches = [given["kv_cache"], fused, apart, list(pair(aligned((6, 16, 64), U8)))]
    for cache in caches:
        cumla.append_indexer_cache(**given | {"kv_cache": cache})
        for token, slot in ((0, 3), (2, 95), (3, 17), (4, 0)):
            page, row = divmod(slot, 16)
            if isinstance(cache, np.ndarray):
                memory = cache[page].reshape(-1)
                found = memory[64 * row : 64 * (row + 1)].tobytes()
                scale = memory[1024 + 4 * row : 1028 + 4 * row].view(F32)[0]
            else:
                found, scale = cache[0][page, row].tobytes(), cache[1][page, row]
            assert found == values[token].tobytes()
            assert scale == scales[token]


def test_check_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = keys() | {"slot_mapping": int32(3, -1, 95, 96, 0)}
    cumla.append_indexer_cache(**arguments)
    monkeypatch.setenv("CUMLA_CHECK", "1")
    cumla.append_indexer_cache(**keys())
    with refused(ValueError, "slot_mapping[3]: needs a slot up to 95, or below 0 ... got 96; its"):
        cumla.append_indexer_cache(**arguments)


# --- what is launched -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "columns", "blocks"),
    [
        (1, 16, 1),  # a thread a row
        (256, 32, 1),
        (257, 32, 2),
        (129, 64, 2),
        (65, 128, 2),
        (9, 1024, 2),  # a warp a row
        (9, 1040, 3),
        (3, 8192, 3),  # a block a row
    ],
)
def test_grid_of_rows(
    rows: int, columns: int, blocks: int, cupy: FakeCuPy, bindings: FakeBindings
) -> None:
    for dtype in (BF16, np.float16, F32):
        values, scales = cumla.quantize_fp8(cupy.ndarray((rows, columns), dtype))
        assert (values.dtype, scales.dtype) == (U8, F32)  # CuPy computes nothing with e4m3
    assert [launch.grid for launch in bindings.launched] == [(blocks, 1, 1)] * 3
    names = [f"quantize_fp8_{name}" for name in ("bfloat16", "float16", "float32")]
    assert bindings.entries == names


@pytest.mark.parametrize(
    ("tokens", "head_dim", "blocks"),
    [(1, 32, 1), (64, 32, 1), (65, 32, 2), (33, 64, 2), (17, 128, 2)],
)
def test_grid_of_keys(
    tokens: int, head_dim: int, blocks: int, cupy: FakeCuPy, bindings: FakeBindings
) -> None:
    shape = (tokens, head_dim)
    cache = cupy.like((aligned((3, 32, head_dim), E4M3), aligned((3, 32), F32)))
    slots = cupy.like(np.zeros(tokens, np.int64))
    for dtype in (BF16, F32):
        cumla.append_indexer_cache(cupy.ndarray(shape, dtype), cache, slots)
    assert [launch.grid for launch in bindings.launched] == [(blocks, 1, 1)] * 2
    assert bindings.entries == [f"append_indexer_cache_{name}" for name in ("bfloat16", "float32")]


def test_scales_of_another_kind_have_launches_of_their_own(
    cupy: FakeCuPy, bindings: FakeBindings
) -> None:
    given = {name: cupy.like(array) for name, array in keys().items()}
    outputs = {"out": cupy.ndarray((5, 64), E4M3), "scale_out": cupy.ndarray((5,), F32)}
    for call in (
        lambda **more: cumla.append_indexer_cache(**given, **more),
        lambda **more: cumla.quantize_fp8(given["k"], **outputs, **more),
    ):
        call()
        bindings.launched.clear()
        for on in (False, True) * 2:
            call(power_of_two_scales=on)
        one, other, *again = [launch.parameters for launch in bindings.launched]
        assert one != other
        assert again == [one, other]


def test_axes_that_merge() -> None:
    assert merge_axes((), (), ()) == []
    assert merge_axes((1, 1), (5, 7)) == []
    assert merge_axes((2, 3, 4), (120, 40, 10)) == [(24, (10,))]
    assert merge_axes((2, 3, 4), (120, 40, 10), (12, 4, 1)) == [(24, (10, 1))]
    assert merge_axes((2, 3, 4), (120, 40, 10), (24, 8, 1)) == [(6, (40, 8)), (4, (10, 1))]
    assert merge_axes((2, 1, 4), (40, 999, 10)) == [(8, (10,))]
    assert merge_axes((2, 3), (0, 0)) == [(6, (0,))]
