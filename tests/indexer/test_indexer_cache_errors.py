# SPDX-License-Identifier: Apache-2.0
"""Quantising and the indexer's cache away from a GPU: refusals, frameworks, launches.

GPU arrays are those of a CuPy that has addresses and nothing behind them; nothing is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla import preparation
from cumla.core import arrays
from cumla.indexer import cache as indexer_cache
from cumla.launch.indexer import append_indexer_cache, quantize_fp8
from cumla.launch.kernel import ReadyLaunches
from tests.fake_cuda import FakeCuPy, FakeDriver

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


def aligned(shape: tuple[int, ...], dtype: Any = BF16, shift: int = 0) -> Any:
    """Zeros at `shift` bytes behind a multiple of 64."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(nbytes + 128, np.uint8)
    begin = -memory.ctypes.data % 64 + shift
    return memory[begin : begin + nbytes].view(dtype).reshape(shape)


def make(**changes: Any) -> dict[str, Any]:
    """Arguments of an append that works, with changes."""
    arguments = {
        "k": aligned((5, 64)),
        "kv_cache": aligned((6, 16, 68), np.uint8),
        "slot_mapping": np.array([3, -1, 95, 17, 0], np.int32),
    }
    return arguments | changes


def pair(**changes: Any) -> dict[str, Any]:
    """The same with values and scales apart."""
    parts = {"values": aligned((6, 16, 64), FP8), "scales": aligned((6, 16), np.float32)} | changes
    return make(kv_cache=(parts["values"], parts["scales"]))


def check_message(message: str, fragments: tuple[str, ...]) -> None:
    """It begins with the first fragment and has the others in turn."""
    assert message.startswith(fragments[0]), message
    end = 0
    for fragment in fragments:
        assert fragment in message[end:], message
        end = message.index(fragment, end) + len(fragment)


def refuse(error: type[Exception], *fragments: str, **arguments: Any) -> None:
    with pytest.raises(error) as caught:
        cumla.append_indexer_cache(**arguments)
    check_message(str(caught.value), fragments)


def refuse_rows(error: type[Exception], *fragments: str, x: Any, **outputs: Any) -> None:
    with pytest.raises(error) as caught:
        cumla.quantize_fp8(x, **outputs)
    check_message(str(caught.value), fragments)


@pytest.mark.parametrize("arguments", [make(), pair()])
def test_the_unchanged_arguments_work(arguments: dict[str, Any]) -> None:
    assert cumla.append_indexer_cache(**arguments) is None


# --- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "uint8", "float8_e4m3fn"])
def test_dtype_of_rows(dtype: str) -> None:
    x = aligned((4, 64), getattr(ml_dtypes, dtype, dtype))
    needed = "needs bfloat16 or float16 or float32"
    refuse_rows(TypeError, f"x: {needed}", f"got {dtype}", "; convert", x=x)
    refuse(TypeError, f"k: {needed}", f"got {dtype}", "; convert", **make(k=x))


@pytest.mark.parametrize("shape", [(), (0,), (4, 0), (4, 24), (4, 8208)])
def test_columns(shape: tuple[int, ...]) -> None:
    x = aligned(shape, np.float32)
    refuse_rows(ValueError, "x: ", "a multiple of 16", "8192", f"got shape {shape}", "; pad", x=x)


def test_widest_rows() -> None:
    assert cumla.quantize_fp8(aligned((2, 8192))).values.shape == (2, 8192)


@pytest.mark.parametrize("dtype", [BF16, np.float32])
def test_layout_of_rows(dtype: Any) -> None:
    for call, name, wide in ((refuse_rows, "x", {}), (refuse, "k", make())):
        bad = {
            "contiguous last axis": aligned((5, 128), dtype)[:, ::2],
            "multiples of 16 bytes": aligned((5, 65), dtype)[:, :-1],
            "a multiple of 16 bytes": aligned((5, 64), dtype, shift=8),
            "not negative": aligned((5, 64), dtype)[::-1],
        }
        for message, array in bad.items():
            call(ValueError, f"{name}: ", message, **wide | {name: array})
    padded = aligned((5, 72), dtype)[:, :64]
    cumla.append_indexer_cache(**make(k=padded))
    cumla.quantize_fp8(padded)
    cumla.quantize_fp8(np.broadcast_to(aligned((64,), dtype), (5, 64)))


def test_axes_that_do_not_merge() -> None:
    shape = (2, 3, 2, 3, 2)
    steps = [aligned((*[2 * size for size in shape], 16))[(slice(None, None, 2),) * 5]]
    refuse_rows(ValueError, "x: needs at most 4 axes", "got 5", "; make contiguous", x=steps[0])
    cumla.quantize_fp8(aligned((*shape, 16)))
    cumla.quantize_fp8(steps[0][:, :, :, :, :1])
    cumla.quantize_fp8(steps[0][:0])
    scale_out = np.zeros(tuple(2 * size for size in shape), np.float32)[::2, ::2, ::2, ::2, ::2]
    message = ("x: needs at most 4 axes", "got 5")
    refuse_rows(ValueError, *message, x=aligned((*shape, 16)), scale_out=scale_out)


@pytest.mark.parametrize(
    ("name", "needed", "shape"),
    [("out", "float8_e4m3fn or uint8", (4, 3, 64)), ("scale_out", "float32", (4, 3))],
)
def test_outputs(name: str, needed: str, shape: tuple[int, ...]) -> None:
    x = aligned((4, 3, 64))
    dtype = FP8 if name == "out" else np.float32
    good = aligned(shape, dtype)
    wrong = aligned(shape, np.int32)
    refuse_rows(TypeError, f"{name}: needs {needed}, got int32", x=x, **{name: wrong})
    flat = aligned((12, *shape[2:]), dtype)
    refuse_rows(ValueError, f"{name}: needs shape {shape}", "got (12", x=x, **{name: flat})
    broadcast = np.lib.stride_tricks.as_strided(good, shape, (0, 0, 1)[-len(shape) :])
    refuse_rows(ValueError, f"{name}: needs memory of its own", x=x, **{name: broadcast})
    shifted = aligned(shape, dtype, shift=2)
    refuse_rows(ValueError, f"{name}: needs an address", "multiple", x=x, **{name: shifted})
    locked = good.copy()
    locked.flags.writeable = False
    refuse_rows(ValueError, f"{name}: ", "can be written to", x=x, **{name: locked})
    result = cumla.quantize_fp8(x, **{name: good})
    assert result[name == "scale_out"] is good


# --- the cache ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5,), (5, 1, 64), (5, 48), (5, 256)])
def test_shape_of_keys(shape: tuple[int, ...]) -> None:
    message = ("k: needs shape (tokens, head_dim) with head_dim 32, 64 or 128", f"got {shape}")
    refuse(ValueError, *message, "; reshape", **make(k=aligned(shape)))


@pytest.mark.parametrize("dtype", [FP8, np.int8, np.float32])
def test_dtype_of_a_fused_cache(dtype: Any) -> None:
    kv_cache = aligned((6, 16, 68), dtype)
    refuse(TypeError, "kv_cache: needs uint8, got", "; view", **make(kv_cache=kv_cache))


def test_dtypes_of_a_pair() -> None:
    message = (
        "kv_cache[0]: needs float8_e4m3fn, or uint8 with its bits, got float16",
        "; quantise",
    )
    refuse(TypeError, *message, **pair(values=aligned((6, 16, 64), np.float16)))
    refuse(TypeError, "kv_cache[1]: needs float32, got", **pair(scales=aligned((6, 16), BF16)))


@pytest.mark.parametrize(
    "shape", [(96, 68), (6, 16, 2, 68), (6, 16, 64), (6, 16, 132), (1, 6, 16, 1, 68)]
)
def test_shape_of_a_fused_cache(shape: tuple[int, ...]) -> None:
    message = ("kv_cache: needs shape (num_pages, page_size, 68)", "64 values and the scale")
    refuse(ValueError, *message, f"got {shape}", **make(kv_cache=aligned(shape, np.uint8)))


@pytest.mark.parametrize("size", [0, 1, 48, 256])
def test_page_sizes(size: int) -> None:
    message = f"kv_cache: needs a page size of 16, 32, 64 or 128 tokens, got {size}"
    refuse(ValueError, message, **make(kv_cache=aligned((6, size, 68), np.uint8)))


def test_a_cache_has_pages() -> None:
    message = ("kv_cache: needs at least one page", "got shape (0, 16, 68)", "; skip")
    refuse(ValueError, *message, **make(kv_cache=aligned((0, 16, 68), np.uint8)))


def test_shapes_of_a_pair() -> None:
    values = aligned((6, 16, 128), FP8)
    refuse(ValueError, "kv_cache[0]: ", "64 values of a token", **pair(values=values))
    scales = aligned((6, 32), np.float32)
    refuse(
        ValueError,
        "kv_cache[1]: needs shape (num_pages",
        "(6, 16), got (6, 32)",
        **pair(scales=scales),
    )
    refuse(ValueError, "kv_cache: ", "a pair", "got 3", **make(kv_cache=(values, scales, scales)))


def test_layout_of_a_fused_cache() -> None:
    padded_rows = aligned((6, 16, 84), np.uint8)[..., :68]
    refuse(ValueError, "kv_cache: needs pages whose bytes are", **make(kv_cache=padded_rows))
    swapped = aligned((16, 6, 68), np.uint8).swapaxes(0, 1)
    refuse(ValueError, "kv_cache: needs pages whose bytes are", **make(kv_cache=swapped))
    shifted = aligned((6, 16, 68), np.uint8, shift=8)
    refuse(ValueError, "kv_cache: needs an address", "of 16 bytes", **make(kv_cache=shifted))
    odd = aligned((6, 17, 68), np.uint8)[:, :16]
    refuse(ValueError, "kv_cache: needs strides", "got 1156", **make(kv_cache=odd))
    backwards = aligned((6, 16, 68), np.uint8)[::-1]
    refuse(ValueError, "kv_cache: ", "not negative", **make(kv_cache=backwards))
    one_page = aligned((6, 16, 68), np.uint8)
    same = np.lib.stride_tricks.as_strided(one_page, one_page.shape, (0, 68, 1))
    refuse(ValueError, "kv_cache: needs memory of its own", **make(kv_cache=same))
    cumla.append_indexer_cache(**make(kv_cache=aligned((6, 20, 68), np.uint8)[:, :16]))


def test_layout_of_a_pair() -> None:
    narrow = aligned((6, 16, 72), FP8)[..., :64]
    refuse(ValueError, "kv_cache[0]: ", "multiples of 16 bytes", **pair(values=narrow))
    shifted = aligned((6, 16), np.float32, shift=2)
    refuse(ValueError, "kv_cache[1]: ", "multiples of 4 bytes", **pair(scales=shifted))
    cumla.append_indexer_cache(**pair(values=aligned((6, 16, 80), FP8)[..., :64]))


@pytest.mark.parametrize("name", ["kv_cache", "kv_cache[0]", "kv_cache[1]"])
def test_what_is_written_is_no_read_only_array(name: str) -> None:
    arguments = make() if name == "kv_cache" else pair()
    cache = arguments["kv_cache"]
    array = cache if name == "kv_cache" else cache[name == "kv_cache[1]"]
    array.flags.writeable = False
    refuse(ValueError, f"{name}: needs an array that can be written to, got a read-", **arguments)


@pytest.mark.parametrize("shape", [(4,), (5, 1), ()])
def test_shape_of_slots(shape: tuple[int, ...]) -> None:
    slots = np.zeros(shape, np.int64)
    message = ("slot_mapping: ", "(tokens,) with 5 tokens", f"got {shape}")
    refuse(ValueError, *message, **make(slot_mapping=slots))


@pytest.mark.parametrize("dtype", ["uint32", "int16", "float32"])
def test_dtype_of_slots(dtype: str) -> None:
    slots = np.zeros(5, dtype)
    message = f"slot_mapping: needs int32 or int64, got {dtype}; convert"
    refuse(TypeError, message, **make(slot_mapping=slots))


def test_check_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    cumla.append_indexer_cache(**make())
    arguments = make(slot_mapping=np.array([3, -1, 95, 96, 0]))
    refuse(ValueError, "slot_mapping[3]: needs a slot up to 95, or below 0", "got 96", **arguments)
    monkeypatch.delenv("CUMLA_CHECK")
    cumla.append_indexer_cache(**arguments)


# --- frameworks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_torch_tensors(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    x = torch.randn(5, 64, dtype=getattr(torch, dtype))
    values, scale = cumla.quantize_fp8(x)
    assert (values.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    error = (values.float() * scale[:, None] - x.float()).abs()
    most = 16 * (1 + 2**-20)  # half a step of the largest numbers; the division rounds, too
    assert (error <= most * scale[:, None]).all()
    out, scale_out = torch.empty_like(values), torch.empty_like(scale)
    result = cumla.quantize_fp8(x, out=out, scale_out=scale_out)
    assert result.values is out
    assert result.scale is scale_out
    assert torch.equal(out.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(scale_out, scale)
    cache = torch.zeros(2, 16, 1, 68, dtype=torch.uint8)
    cumla.append_indexer_cache(x, cache, torch.tensor([16, 1, -1, 31, 0]))
    pages = cache.view(2, -1)
    assert torch.equal(pages[1, :64], values[0].view(torch.uint8))
    assert torch.equal(pages[:, 1024:].contiguous().view(torch.float32)[1, 15], scale[3])
    split = (torch.zeros(2, 16, 64, dtype=torch.float8_e4m3fn), torch.zeros(2, 16))
    cumla.append_indexer_cache(x, split, torch.tensor([16, 1, -1, 31, 0]))
    assert torch.equal(split[0].view(torch.uint8), pages[:, :1024].reshape(2, 16, 64))


def test_jax_arrays() -> None:
    jnp = pytest.importorskip("jax.numpy")
    x = jnp.arange(320, dtype=jnp.bfloat16).reshape(5, 64)
    values, scale = cumla.quantize_fp8(x)
    assert (values.dtype, scale.dtype) == (jnp.float8_e4m3fn, jnp.float32)
    assert np.asarray(scale)[4] == np.float32(320) / np.float32(448)  # 319 in bfloat16
    arguments = make(k=x, slot_mapping=jnp.array([3, -1, 95, 17, 0]))
    cumla.append_indexer_cache(**arguments)
    assert arguments["kv_cache"].reshape(6, -1)[0, :64].tobytes() == np.asarray(values)[4].tobytes()
    refuse_rows(TypeError, "out: JAX arrays are immutable", x=x, out=values)
    message = ("kv_cache: JAX arrays are immutable", "; keep")
    refuse(TypeError, *message, **make(kv_cache=jnp.zeros((6, 16, 68), jnp.uint8)))


@pytest.mark.parametrize("name", ["k", "kv_cache", "slot_mapping"])
def test_no_array(name: str) -> None:
    arguments = make() | {name: "no array"}
    refuse(TypeError, f"{name}: needs an array", "got builtins.str", **arguments)


# --- on a GPU that is not there -------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would be launched: kernel, and the rest of what a launch is prepared from."""
    calls: list[Any] = []

    def prepare(*call: Any) -> Callable[[], None]:
        return lambda: calls.append(call)

    monkeypatch.setattr(indexer_cache, "load", lambda spec, device, *, capturing: spec)
    monkeypatch.setattr(indexer_cache, "prepare_quantize", prepare)
    monkeypatch.setattr(indexer_cache, "prepare_append_indexer", prepare)
    monkeypatch.setattr(indexer_cache, "_ready_quantize", ReadyLaunches())
    monkeypatch.setattr(indexer_cache, "_ready_append", ReadyLaunches())
    return calls


def on_gpu(cupy: FakeCuPy, arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments on the GPU."""
    return {
        name: tuple(cupy.like(part) for part in array)
        if isinstance(array, tuple)
        else cupy.like(array)
        for name, array in arguments.items()
    }


def test_what_quantizing_launches(cupy: FakeCuPy, launched: list[Any]) -> None:
    x = cupy.ndarray((4, 3, 64), BF16)
    values, scale = cumla.quantize_fp8(x, power_of_two_scales=True, stream=7)
    ((spec, rows, value_view, scale_view, power, stream),) = launched
    assert spec.entry == "quantize_fp8_bfloat16"
    assert (power, stream) == (True, 7)
    assert (rows.shape, value_view.shape, scale_view.shape) == ((4, 3, 64), (4, 3, 64), (4, 3))
    assert (values.dtype, scale.dtype) == (np.uint8, np.float32)
    assert cumla.quantize_fp8(cupy.ndarray((0, 64), BF16)).values.shape == (0, 64)
    assert len(launched) == 1


def test_calls_on_the_same_arrays_are_not_prepared_again(
    cupy: FakeCuPy, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, out = cupy.ndarray((4, 64), BF16), cupy.ndarray((4, 64), FP8)
    scale_out = cupy.ndarray((4,), np.float32)
    given = on_gpu(cupy, make())
    calls = (
        lambda **more: cumla.quantize_fp8(x, out=out, scale_out=scale_out, **more),
        lambda **more: cumla.append_indexer_cache(**given, **more),
    )
    prepared: list[object] = []
    for name in ("prepare_quantize", "prepare_append_indexer"):
        prepare = getattr(indexer_cache, name)
        monkeypatch.setattr(
            indexer_cache, name, lambda *a, prepare=prepare: (prepared.append(a), prepare(*a))[1]
        )
    for i, call in enumerate(calls):
        result = [call(), call()]
        assert (len(prepared), len(launched)) == (3 * i + 1, 4 * i + 2)
        call(power_of_two_scales=True)
        call(stream=7)
        assert (len(prepared), len(launched)) == (3 * i + 3, 4 * i + 4)
        if i == 0:
            assert all(r.values is out and r.scale is scale_out for r in result)


def test_what_appending_launches(cupy: FakeCuPy, launched: list[Any]) -> None:
    cumla.append_indexer_cache(**on_gpu(cupy, make()), stream=7)
    cumla.append_indexer_cache(**on_gpu(cupy, pair()), power_of_two_scales=True)
    (spec, fused, power, stream), (_, split, other_power, _) = launched
    assert spec.entry == "append_indexer_cache_bfloat16"
    assert (power, other_power, stream) == (False, True, 7)
    assert (fused.values.shape, fused.values.strides) == ((6, 16, 64), (16 * 68, 64, 1))
    assert (fused.scales.shape, fused.scales.strides) == ((6, 16), (16 * 68, 4))
    assert fused.scales.ptr - fused.values.ptr == 16 * 64
    assert (split.values.strides, split.scales.strides) == ((16 * 64, 64, 1), (64, 4))
    none = make(k=aligned((0, 64)), slot_mapping=np.zeros(0, np.int32))
    cumla.append_indexer_cache(**on_gpu(cupy, none))
    assert len(launched) == 2


def test_places_that_differ(cupy: FakeCuPy, launched: list[Any]) -> None:
    there = on_gpu(cupy, make())
    for name in ("k", "slot_mapping"):
        message = (f"{name}: ", "where kv_cache is, on CUDA device 0", "the CPU")
        refuse(ValueError, *message, **there | {name: make()[name]})
    assert launched == []


def test_cold_kernels_under_capture(cupy: FakeCuPy, driver: FakeDriver) -> None:
    driver.capturing.add(0)
    message = "kernel append_indexer_cache_bfloat16 is not loaded on device 0"
    refuse(cumla.NotPreparedError, message, "cumla.prepare()", **on_gpu(cupy, make()))
    x = cupy.ndarray((4, 64), np.float32)
    message = "kernel quantize_fp8_float32 is not loaded on device 0"
    refuse_rows(cumla.NotPreparedError, message, "cumla.prepare()", x=x)


def test_prepare_loads_the_kernels(cupy: FakeCuPy, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    monkeypatch.setattr(preparation, "load", lambda spec, *_, **__: loaded.append(spec))
    cumla.prepare(dtypes=("float16",))
    stems = ("quantize_fp8", "append_indexer_cache")
    found = {spec.entry for spec in loaded if spec.stem in stems}
    assert found == {f"{stem}_{dtype}" for stem in stems for dtype in ("float16", "float32")}


def test_an_unsupported_gpu(cupy: FakeCuPy) -> None:
    cupy.capability = (10, 0)
    message = "device 0 is NVIDIA Imaginary"
    refuse(cumla.UnsupportedDeviceError, message, **on_gpu(cupy, make()))
    refuse_rows(cumla.UnsupportedDeviceError, message, x=cupy.ndarray((4, 64), BF16))


def test_check_mode_copies_from_the_gpu(
    cupy: FakeCuPy, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = make()
    monkeypatch.setattr(
        indexer_cache, "copy_to_host", lambda view, stream: arguments["slot_mapping"]
    )
    monkeypatch.setenv("CUMLA_CHECK", "1")
    cumla.append_indexer_cache(**on_gpu(cupy, arguments))
    assert len(launched) == 1
    arguments["slot_mapping"][0] = 99
    refuse(ValueError, "slot_mapping[0]: ", "got 99", **on_gpu(cupy, make()))
    assert len(launched) == 1


# --- the launches ---------------------------------------------------------------------------------


def views(**given: Any) -> dict[str, Any]:
    opened = arrays.open_call(tuple(given.items()))
    return dict(zip(given, opened.views, strict=True))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Kernel, grid, layout, values and stream of what is prepared."""
    seen: list[Any] = []
    for module in (quantize_fp8, append_indexer_cache):
        monkeypatch.setattr(module, "PreparedLaunch", lambda *launch: seen.append(launch))
    return seen


@pytest.mark.parametrize(
    ("rows", "columns", "team_log2", "blocks"),
    [
        (1, 16, 0, 1),  # a thread a row
        (256, 32, 0, 1),
        (257, 32, 0, 2),
        (129, 64, 1, 2),
        (65, 128, 2, 2),
        (9, 1024, 5, 2),  # a warp a row
        (9, 1040, 6, 3),
        (3, 8192, 8, 3),  # a block a row
    ],
)
def test_grid_of_rows(
    rows: int, columns: int, team_log2: int, blocks: int, launches: list[Any]
) -> None:
    v = views(
        x=aligned((rows, columns)),
        out=aligned((rows, columns), FP8),
        scale=aligned((rows,), np.float32),
    )
    quantize_fp8.prepare_quantize("kernel", *v.values(), True, 5)  # type: ignore[arg-type]
    ((kernel, grid, layout, values, stream),) = launches
    assert (kernel, grid, stream) == ("kernel", (blocks, 1, 1), 5)
    packed = layout.unpack(layout.pack(*values))
    assert packed == tuple(values)
    assert packed[-5:] == (rows, columns // 8, team_log2, 1, 0)
    assert (columns // 8 - 1) >> team_log2 < 4


def test_merged_axes() -> None:
    merge = quantize_fp8.merge_axes
    assert merge((), (), ()) == []
    assert merge((1, 1), (5, 7)) == []
    assert merge((2, 3, 4), (120, 40, 10)) == [(24, (10,))]
    assert merge((2, 3, 4), (120, 40, 10), (12, 4, 1)) == [(24, (10, 1))]
    assert merge((2, 3, 4), (120, 40, 10), (24, 8, 1)) == [(6, (40, 8)), (4, (10, 1))]
    assert merge((2, 1, 4), (40, 999, 10)) == [(8, (10,))]
    assert merge((2, 3), (0, 0)) == [(6, (0,))]


@pytest.mark.parametrize(
    ("tokens", "head_dim", "team_log2", "blocks"),
    [(1, 32, 1, 1), (64, 32, 1, 1), (65, 32, 1, 2), (33, 64, 2, 2), (17, 128, 3, 2)],
)
def test_grid_of_keys(
    tokens: int, head_dim: int, team_log2: int, blocks: int, launches: list[Any]
) -> None:
    v = views(
        k=aligned((tokens, head_dim)),
        values=aligned((3, 32, head_dim), FP8),
        scales=aligned((3, 32), np.float32),
        slots=np.zeros(tokens, np.int64),
    )
    arguments = append_indexer_cache.AppendIndexerArguments(*v.values())
    append_indexer_cache.prepare_append_indexer("kernel", arguments, False, 5)  # type: ignore[arg-type]
    ((_, grid, layout, values, _),) = launches
    assert grid == (blocks, 1, 1)
    packed = layout.unpack(layout.pack(*values))
    assert packed == tuple(values)
    assert packed[-6:] == (tokens, 96, 1, 5, team_log2, 0)
