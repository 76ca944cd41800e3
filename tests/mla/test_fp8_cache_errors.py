# SPDX-License-Identifier: Apache-2.0
"""`cumla.append_mla_cache` into FP8 caches away from a GPU: refusals, frameworks, launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla import preparation
from cumla.core import arrays
from cumla.launch.kernel import ReadyLaunches
from cumla.launch.mla import append_fp8_cache
from cumla.mla import cache, cache_checks
from tests.fake_cuda import FakeCuPy

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


def aligned(shape: tuple[int, ...], dtype: Any = BF16, shift: int = 0) -> Any:
    """Zeros at `shift` bytes behind a multiple of 64."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(nbytes + 128, np.uint8)
    begin = -memory.ctypes.data % 64 + shift
    return memory[begin : begin + nbytes].view(dtype).reshape(shape)


def make(kv_cache: Any, **changes: Any) -> dict[str, Any]:
    arguments = {
        "rows": aligned((5, 576)),
        "kv_cache": kv_cache,
        "slot_mapping": np.array([3, -1, 95, 17, 0], np.int32),
    }
    return arguments | changes


def one(dtype: Any = FP8) -> Any:
    return aligned((6, 16, 576), dtype)


def pair(latent: Any = FP8, rope: Any = BF16) -> Any:
    return aligned((6, 16, 512), latent), aligned((6, 16, 64), rope)


def triple(latent: Any = FP8, rope: Any = BF16, scales: Any = np.float32) -> Any:
    return *pair(latent, rope), aligned((6, 16, 4), scales)


def packed() -> Any:
    return aligned((6, 16, 656), np.uint8)


def refuse(error: type[Exception], *fragments: str, **arguments: Any) -> None:
    """The call fails; its message begins with the first fragment and has the others in turn."""
    with pytest.raises(error) as caught:
        cumla.append_mla_cache(**arguments)
    message, end = str(caught.value), 0
    assert message.startswith(fragments[0]), message
    for fragment in fragments:
        assert fragment in message[end:], message
        end = message.index(fragment, end) + len(fragment)


@pytest.mark.parametrize(
    "kv_cache",
    [
        one(),
        one(np.uint8),
        pair(),
        pair(np.uint8, np.float16),
        pair(FP8, FP8),
        triple(),
        triple(np.uint8, np.float16),
        packed(),
    ],
)
def test_caches_that_work(kv_cache: Any) -> None:
    assert cumla.append_mla_cache(**make(kv_cache, rows=aligned((5, 576), np.float32))) is None


# --- caches ---------------------------------------------------------------------------------------


def test_dtypes_of_parts() -> None:
    refuse(TypeError, "kv_cache: needs bfloat16", "got int8", **make(one(np.int8)))
    refuse(TypeError, "kv_cache[1]: ", "got float32", **make(pair(rope=np.float32)))
    refuse(TypeError, "kv_cache[1]: ", "bfloat16", "got float8", **make(pair(BF16, FP8)))
    refuse(TypeError, "kv_cache[1]: ", "float8_e4m3fn", "got uint8", **make(pair(FP8, np.uint8)))


def test_what_scales_need() -> None:
    message = "kv_cache[2]: needs kv_cache[0] of float8_e4m3fn or uint8"
    refuse(TypeError, message, "got bfloat16 and bfloat16; leave", **make(triple(BF16)))
    refuse(TypeError, message, "got float8_e4m3fn and float8", **make(triple(FP8, FP8)))
    refuse(TypeError, "kv_cache[2]: needs float32, got bfloat16", **make(triple(scales=BF16)))
    wrong = (*pair(), aligned((6, 15, 4), np.float32))
    refuse(ValueError, "kv_cache[2]: ", "the axes of kv_cache[0]", "(6, 15, 4)", **make(wrong))
    wide = (*pair(), aligned((6, 16, 8), np.float32))
    refuse(ValueError, "kv_cache[2]: ", "4 scales", "(6, 16, 8)", **make(wide))
    single = (*pair(), aligned((6, 16, 1), np.float32))
    refuse(ValueError, "kv_cache[2]: ", "4 scales, got shape (6, 16, 1)", **make(single))
    row_rows = (*pair(), aligned((6, 16, 6), np.float32)[..., :4])
    refuse(ValueError, "kv_cache[2]: ", "multiples of 16 bytes", **make(row_rows))


def test_packed_rows_are_bytes() -> None:
    refuse(ValueError, "kv_cache: ", "576", "(6, 16, 656)", **make(aligned((6, 16, 656), FP8)))
    narrow = aligned((6, 16, 664), np.uint8)[..., :656]
    refuse(ValueError, "kv_cache: ", "multiples of 16 bytes", **make(narrow))
    shifted = aligned((6, 16, 656), np.uint8, shift=8)
    refuse(ValueError, "kv_cache: ", "a multiple of 16 bytes", **make(shifted))
    cumla.append_mla_cache(**make(aligned((6, 16, 672), np.uint8)[..., :656]))


@pytest.mark.parametrize(
    ("kv_cache", "rows", "got"),
    [(packed(), np.float16, "bfloat16"), (triple(rope=np.float16), BF16, "float16")],
)
def test_dtype_of_rows(kv_cache: Any, rows: Any, got: str) -> None:
    message = (f"rows: needs kv_cache's dtype {got}, or float32", "; convert")
    refuse(TypeError, *message, **make(kv_cache, rows=aligned((5, 576), rows)))


@pytest.mark.parametrize("kv_cache", [one(), one(np.uint8), pair(FP8, FP8)])
@pytest.mark.parametrize("changes", [{}, {"q_pe": aligned((5, 3, 64), np.float16)}])
def test_rows_are_not_e4m3(kv_cache: Any, changes: dict[str, Any]) -> None:
    if changes:
        changes = changes | {"positions": np.arange(5), "cos_sin": aligned((9, 64), np.float32)}
    needed = "needs bfloat16, float16 or float32 for an e4m3 cache"
    message = f"rows: {needed}, got float8_e4m3fn; convert it first"
    refuse(TypeError, message, **make(kv_cache, rows=aligned((5, 576), FP8), **changes))
    message = f"rows[1]: {needed}, got float8_e4m3fn; convert it first"
    halves = aligned((5, 512)), aligned((5, 64), FP8)
    refuse(TypeError, message, **make(kv_cache, rows=halves, **changes))


def test_both_parts_of_rows_are_of_one_dtype() -> None:
    halves = aligned((5, 512)), aligned((5, 64), np.float16)
    message = "rows[1]: needs the dtype of rows[0], bfloat16, got float16"
    refuse(TypeError, message, **make(one(), rows=halves))


@pytest.mark.parametrize("dtype", [BF16, np.float16])
def test_queries_have_the_dtype_of_rows(dtype: Any) -> None:
    """Where the cache is e4m3 throughout; the table's, or float32, too."""
    rotation = {"positions": np.arange(5), "cos_sin": aligned((9, 64), dtype)}
    good = make(one(), rows=aligned((5, 576), dtype), **rotation, q_pe=aligned((5, 3, 64), dtype))
    cumla.append_mla_cache(**good)
    cumla.append_mla_cache(**good | {"rows": aligned((5, 576), np.float32)})
    other = np.float16 if dtype == BF16 else BF16
    refuse(TypeError, "q_pe: ", **good | {"q_pe": aligned((5, 3, 64), other)})


# --- the scale ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0, -1.0, float("nan"), float("inf"), 1e-40, 1e39])
def test_numbers_that_are_no_scale(scale: float) -> None:
    message = ("scale: needs a number from 2 ** -126", f"got {scale}; pass the factor by which")
    refuse(ValueError, *message, **make(one(), scale=scale))


@pytest.mark.parametrize("scale", [True, False])
def test_a_scale_is_no_bool(scale: bool) -> None:
    message = "scale: needs a number, or an array of one float32, got bool; convert it"
    kv_cache = one()
    refuse(TypeError, message, **make(kv_cache, rows=aligned((5, 576)) + BF16.type(1), scale=scale))
    assert not kv_cache.view(np.uint8).any()


@pytest.mark.parametrize("scale", [1.0, np.float32(2), np.ones((), np.float32)])
@pytest.mark.parametrize(
    ("kv_cache", "got"),
    [(aligned((6, 16, 576)), "bfloat16"), (triple(), "scales for each row"), (packed(), "scales")],
)
def test_a_scale_in_vain(kv_cache: Any, got: str, scale: Any) -> None:
    message = ("scale: needs an e4m3 cache with one scale", f"got {got}", "; leave it out")
    refuse(ValueError, *message, **make(kv_cache, scale=scale))


def test_arrays_that_are_no_scale() -> None:
    refuse(TypeError, "scale: needs float32, got float64", **make(one(), scale=np.ones(1)))
    two = np.ones(2, np.float32)
    refuse(ValueError, "scale: needs one element, got shape (2,)", **make(one(), scale=two))
    shifted = aligned((1,), np.float32, shift=2)
    refuse(ValueError, "scale: needs an address", **make(one(), scale=shifted))
    refuse(TypeError, "scale: needs an array of CuPy", **make(one(), scale="1"))


# --- frameworks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.5, np.float32(0.5), np.full((), 0.5, np.float32)])
def test_a_number_or_an_array(scale: Any) -> None:
    rows = aligned((5, 576))
    rows[...] = 3
    kv_cache = one()
    cumla.append_mla_cache(**make(kv_cache, rows=rows), scale=scale)
    assert (kv_cache.reshape(96, 576)[[3, 95, 17, 0]].astype(np.float32) == 6).all()


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    rows = torch.randn(5, 576, dtype=torch.bfloat16)
    slots = torch.tensor([3, -1, 95, 17, 0])
    kv_cache = torch.zeros(6, 16, 576).to(torch.float8_e4m3fn)
    cumla.append_mla_cache(rows, kv_cache, slots, scale=torch.tensor(0.5))
    expected = (rows[slots >= 0].float() * 2).to(torch.float8_e4m3fn).float()
    assert torch.equal(kv_cache.view(96, 576).float()[slots[slots >= 0]], expected)
    bytes_of_rows = torch.zeros(6, 16, 1, 656, dtype=torch.uint8)
    cumla.append_mla_cache(rows, bytes_of_rows, slots)
    row = bytes_of_rows.view(96, 656)[95]
    assert torch.equal(row[528:].view(torch.bfloat16), rows[2, 512:])
    values = row[:512].view(torch.float8_e4m3fn).float().view(4, 128)
    scales = row[512:528].view(torch.float32)[:, None]
    error = (values * scales - rows[2, :512].float().view(4, 128)).abs()
    assert (error <= 16 * scales).all()


# --- on a GPU that is not there -------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Kernel, arguments, scale, kind of rotation and stream of what would be launched."""
    calls: list[Any] = []

    def prepare(*call: Any) -> Callable[[], None]:
        return lambda: calls.append(call)

    monkeypatch.setattr(cache, "load", lambda spec, device, *, capturing: spec)
    monkeypatch.setattr(cache, "prepare_append_fp8", prepare)
    monkeypatch.setattr(cache, "_ready", ReadyLaunches())
    return calls


def on_gpu(cupy: FakeCuPy, arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments on the GPU."""
    return {
        name: tuple(cupy.like(part) for part in array)
        if isinstance(array, tuple)
        else cupy.like(array)
        for name, array in arguments.items()
    }


def test_what_is_launched(cupy: FakeCuPy, launched: list[Any]) -> None:
    cumla.append_mla_cache(**on_gpu(cupy, make(packed())), stream=7)
    halves = make(triple(rope=np.float16), rows=aligned((5, 576), np.float16))
    cumla.append_mla_cache(**on_gpu(cupy, halves))
    cumla.append_mla_cache(
        **on_gpu(cupy, make(one(), rows=aligned((5, 576), np.float32))), scale=0.5
    )
    cumla.append_mla_cache(**on_gpu(cupy, make(pair(), scale=np.ones(1, np.float32))))
    (spec, views, number, interleaved, stream), *others = launched
    assert spec.entry == "append_fp8_cache_bfloat16"
    assert (number, interleaved, stream, views.power_of_two_scales) == (1.0, True, 7, True)
    assert views.scales.ptr - views.latent_cache.ptr == 512
    assert views.rope_cache.ptr - views.latent_cache.ptr == 528
    assert views.rope_cache.strides == (16 * 656, 656, 656, 2)
    assert views.scales.strides == (16 * 656, 656, 656, 4)
    entries = [call[0].entry for call in others]
    assert entries == [
        "append_fp8_cache_float16",
        "append_fp8_cache_bfloat16_from_float32",
        "append_fp8_cache_bfloat16",
    ]
    assert [call[1].scales is None for call in others] == [False, True, True]
    assert [call[1].scale is None for call in others] == [True, True, False]
    assert [call[2] for call in others] == [1.0, 0.5, 1.0]
    assert not any(call[1].power_of_two_scales for call in others)


def test_another_scale_is_prepared_anew(cupy: FakeCuPy, launched: list[Any]) -> None:
    given = on_gpu(cupy, make(one()))
    for scale in (None, 0.5, 0.5, 0.25, 1.0):
        cumla.append_mla_cache(**given, scale=scale)
    assert [call[2] for call in launched] == [1.0, 0.5, 0.5, 0.25, 1.0]
    cumla.append_mla_cache(**given)
    refuse(ValueError, "scale: ", **given | {"kv_cache": cupy.like(packed())}, scale=1.0)


def test_a_scale_elsewhere(cupy: FakeCuPy, launched: list[Any]) -> None:
    message = ("scale: ", "where kv_cache is, on CUDA device 0", "the CPU")
    refuse(ValueError, *message, **on_gpu(cupy, make(one())), scale=np.ones((), np.float32))
    assert launched == []


def test_prepare_loads_the_kernels(cupy: FakeCuPy, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    monkeypatch.setattr(preparation, "load", lambda spec, *_, **__: loaded.append(spec))
    cumla.prepare(dtypes=("float16",))
    assert [spec.entry for spec in loaded if spec.stem == "append_fp8_cache"] == [
        "append_fp8_cache_float16",
        "append_fp8_cache_float16_from_float32",
    ]


@pytest.mark.parametrize("kv_cache", [one(), pair(), triple(), packed()])
def test_parameters(kv_cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = kv_cache if isinstance(kv_cache, tuple) else (kv_cache,)
    names = [f"kv_cache[{i}]" for i in range(len(parts))] if len(parts) > 1 else ["kv_cache"]
    given = dict(zip(names, parts, strict=True)) | {
        "rows": aligned((17, 576)),
        "slot_mapping": np.zeros(17, np.int32),
    }
    opened = arrays.open_call(tuple(given.items()))
    named = dict(zip(given, opened.views, strict=True))
    arguments = cache_checks.checked_append_arguments(named)  # type: ignore[arg-type]
    seen: list[Any] = []
    monkeypatch.setattr(append_fp8_cache, "PreparedLaunch", lambda *launch: seen.append(launch))
    append_fp8_cache.prepare_append_fp8("kernel", arguments, 0.5, True, 5)  # type: ignore[arg-type]
    ((kernel, grid, layout, values, stream),) = seen
    assert (kernel, grid, stream) == ("kernel", (2, 1, 1), 5)
    *_, scales, page, row, head, pointer, number, rope_is_e4m3, power, _ = layout.unpack(
        layout.pack(*values)
    )
    steps = {1: (16 * 656, 656, 656), 3: (256, 16, 16)}
    has_scales = arguments.scales is not None
    assert bool(scales) == has_scales
    assert (page, row, head) == (steps[len(parts)] if has_scales else (0, 0, 0))
    assert (pointer, number) == (0, 0.5)
    is_packed = has_scales and len(parts) == 1
    assert (rope_is_e4m3, power) == (len(parts) == 1 and not is_packed, is_packed)
