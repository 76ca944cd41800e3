# SPDX-License-Identifier: Apache-2.0
"""What `cumla.merge_attention_states` refuses, and what it says: argument, need, value, way out.

GPU arrays are those of a CuPy that has addresses and nothing behind them; nothing is launched.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla import arrays, merge, mla
from cumla.launch import KernelSpec
from cumla.launch import device as launch_device
from cumla.launch import module as launch_module
from tests.test_mla_errors import FakeCuPy, FakeDriver

BF16 = np.dtype(ml_dtypes.bfloat16)
OUT, LSE = (2, 5, 3, 16), (2, 3, 5)


def make(**changes: Any) -> dict[str, Any]:
    """Arguments of a call that works, with changes."""
    rng = np.random.default_rng(0)
    arguments = {
        "outs": [rng.standard_normal(OUT).astype(BF16) for _ in range(3)],
        "lses": [rng.standard_normal(LSE).astype(np.float32) for _ in range(3)],
    }
    return arguments | changes


def with_second(name: str, array: Any) -> dict[str, Any]:
    """The change of one of the arrays in a sequence."""
    return {name: [make()[name][0], array, make()[name][2]]}


def refuse(error: type[Exception], *fragments: str, **changes: Any) -> None:
    """The call fails; its message begins with the first fragment and has the others in turn."""
    with pytest.raises(error) as caught:
        cumla.merge_attention_states(**make(**changes))
    message, end = str(caught.value), 0
    assert message.startswith(fragments[0]), message
    for fragment in fragments:
        assert fragment in message[end:], message
        end = message.index(fragment, end) + len(fragment)


def test_the_unchanged_arguments_work() -> None:
    out, lse = cumla.merge_attention_states(**make())
    assert (out.shape, out.dtype) == (OUT, BF16)
    assert (lse.shape, lse.dtype) == (LSE, np.dtype(np.float32))


# --- how many, and what --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["outs", "lses"])
@pytest.mark.parametrize("empty", [[], ()])
def test_nothing_to_merge(name: str, empty: Any) -> None:
    refuse(ValueError, f"{name}: needs at least one", "empty sequence", "; skip", **{name: empty})


@pytest.mark.parametrize("name", ["outs", "lses"])
@pytest.mark.parametrize("shape", [(), (0, *OUT)])
def test_a_stack_of_nothing(name: str, shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, np.float32)
    refuse(ValueError, f"{name}: needs a leading axis", f"got shape {shape}", **{name: array})


@pytest.mark.parametrize("count", [1, 2, 4])
def test_as_many_lses_as_outs(count: int) -> None:
    message = ("lses: needs one array for each of the 3 outs", f"got {count}", "; pass both")
    refuse(ValueError, *message, lses=[np.zeros(LSE, np.float32)] * count)
    refuse(ValueError, *message, lses=np.zeros((count, *LSE), np.float32))


@pytest.mark.parametrize("name", ["outs", "lses"])
@pytest.mark.parametrize("value", [None, 3, [1.0], "text"])
def test_things_that_are_no_arrays(name: str, value: Any) -> None:
    kind = type(value).__name__
    changes = with_second(name, value)
    refuse(TypeError, f"{name}[1]: ", "an array of CuPy", f"got builtins.{kind}", **changes)


@pytest.mark.parametrize("name", ["outs", "lses"])
def test_neither_sequence_nor_array(name: str) -> None:
    refuse(TypeError, f"{name}: needs an array of CuPy", "builtins.NoneType", **{name: None})
    generator = (array for array in make()[name])
    refuse(TypeError, f"{name}: needs an array of CuPy", "builtins.generator", **{name: generator})


@pytest.mark.parametrize("dtype", ["float64", "int16", ">f4"])
def test_dtype_of_outs(dtype: str) -> None:
    outs = np.zeros((3, *OUT), dtype)
    needed = "float32 or bfloat16 or float16"
    refuse(TypeError, "outs[0]: ", needed, f"got {dtype}", "; convert", outs=outs)


def test_all_outs_have_one_dtype() -> None:
    changes = with_second("outs", np.zeros(OUT, np.float32))
    refuse(TypeError, "outs[1]: ", "of outs[0], bfloat16", "got float32", "; convert", **changes)


@pytest.mark.parametrize("dtype", ["float64", "float16", "int32"])
def test_dtype_of_lses(dtype: str) -> None:
    changes = with_second("lses", np.zeros(LSE, dtype))
    refuse(TypeError, "lses[1]: needs float32", f"got {dtype}", "; convert", **changes)


# --- shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (16,), (3, 16), (1, *OUT)])
def test_rank_of_outs(shape: tuple[int, ...]) -> None:
    axes = ("(tokens, heads, head_dim)", "(batch, q_len, heads, head_dim)")
    refuse(ValueError, "outs[0]: needs axes", *axes, f"got shape {shape}", outs=[np.zeros(shape)])
    stack = np.zeros((3, *shape), BF16)
    refuse(ValueError, "outs[0]: needs axes", f"got shape {shape}", "leading axis", outs=stack)


def test_all_outs_have_one_shape() -> None:
    changes = with_second("outs", np.zeros((2, 5, 4, 16), BF16))
    refuse(ValueError, "outs[1]: ", f"of outs[0], {OUT}", "got (2, 5, 4, 16)", "; all", **changes)


@pytest.mark.parametrize("shape", [(2, 5, 3), (2, 3), (2, 3, 5, 1), ()])
def test_shape_of_lses(shape: tuple[int, ...]) -> None:
    changes = with_second("lses", np.zeros(shape, np.float32))
    message = ("lses[1]: ", "(batch, heads, q_len) = (2, 3, 5)", f"got {shape}", "; transpose")
    refuse(ValueError, *message, **changes)


def test_shape_of_lses_for_three_axes() -> None:
    outs, lses = np.zeros((3, 5, 4, 16), BF16), np.zeros((3, 4, 5), np.float32)
    message = ("lses[0]: ", "(tokens, heads) = (5, 4)", "got (4, 5)", "; transpose")
    refuse(ValueError, *message, outs=outs, lses=lses)
    cumla.merge_attention_states(outs, lses.swapaxes(1, 2))


@pytest.mark.parametrize("shape", [(0, 5, 3, 16), (2, 0, 3, 16), (2, 5, 0, 16), (2, 5, 3, 0)])
def test_empty_axes(shape: tuple[int, ...]) -> None:
    outs = np.zeros((3, *shape), BF16)
    refuse(ValueError, "outs[0]: ", "at least one element", f"got shape {shape}", outs=outs)


@pytest.mark.parametrize("head_dim", [4, 12, 516])
def test_head_dim(head_dim: int) -> None:
    outs = np.zeros((3, *OUT[:3], head_dim), BF16)
    shape = str((*OUT[:3], head_dim))
    refuse(ValueError, "outs[0]: ", "multiple of 8", f"got shape {shape}", "; pad", outs=outs)


@pytest.mark.parametrize("shape", [OUT[1:], (2, 3, 5, 16), (*OUT[:3], 8)])
def test_shape_of_out(shape: tuple[int, ...]) -> None:
    refuse(ValueError, "out: ", f"{OUT}", f"got {shape}", "; allocate", out=np.zeros(shape, BF16))


@pytest.mark.parametrize("shape", [(2, 5, 3), (2, 3), (2, 3, 1)])
def test_shape_of_lse(shape: tuple[int, ...]) -> None:
    lse = np.zeros(shape, np.float32)
    refuse(ValueError, "lse: ", f"{LSE}", f"got {shape}", "; allocate", lse=lse)


def test_dtypes_of_outputs() -> None:
    refuse(TypeError, "out: ", "float32 or bfloat16 or float16", "got float64", out=np.zeros(OUT))
    refuse(TypeError, "lse: ", "float32", "got float64", lse=np.zeros(LSE))
    for dtype in (np.float32, BF16, np.float16):
        out = np.zeros(OUT, dtype)
        assert cumla.merge_attention_states(**make(), out=out).out is out


# --- memory layout -------------------------------------------------------------------------------


def shifted(shape: tuple[int, ...], dtype: Any, by: int) -> Any:
    """An array whose address is a multiple of 16 bytes and `by`."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(nbytes + 32, np.uint8)
    start = -memory.ctypes.data % 16 + by
    return memory[start : start + nbytes].view(dtype).reshape(shape)


@pytest.mark.parametrize("name", ["outs[1]", "out"])
@pytest.mark.parametrize(
    ("array", "need"),
    [
        (np.zeros((*OUT[:3], 32), BF16)[..., ::2], "contiguous last axis, got a stride of 4"),
        (
            np.zeros((*OUT[:3], 17), BF16)[..., :16],
            "multiples of 16 bytes and not negative, got 510",
        ),
        (np.zeros(OUT, BF16)[:, ::-1], "not negative, got -96 on axis 1"),
        (shifted(OUT, BF16, 8), "an address that is a multiple of 16 bytes"),
    ],
    ids=["last axis", "pitch", "negative", "address"],
)
def test_layout_of_rows(name: str, array: Any, need: str) -> None:
    changes = {"out": array} if name == "out" else with_second("outs", array)
    refuse(ValueError, f"{name}: ", need, "copy", **changes)


def test_layout_of_a_stack() -> None:
    """Where the leading stride moves the partial results off their boundaries, the second is."""
    memory = np.zeros((3, int(np.prod(OUT)) + 4), BF16)
    outs = memory[:, :-4].reshape(3, *OUT, copy=False)
    refuse(ValueError, "outs[1]: needs an address that is a multiple of 16 bytes", outs=outs)


@pytest.mark.parametrize("name", ["lses[1]", "lse"])
def test_lses_are_aligned(name: str) -> None:
    array = shifted(LSE, np.float32, 2)
    changes = {"lse": array} if name == "lse" else with_second("lses", array)
    refuse(ValueError, f"{name}: ", "multiples of 4 bytes", "; copy", **changes)


def test_outputs_have_memory_for_every_element() -> None:
    strided = np.lib.stride_tricks.as_strided
    out = strided(np.zeros(16, BF16), OUT, (0, 0, 0, 2))
    lse = strided(np.zeros(5, np.float32), LSE, (0, 0, 4))
    for name, array in (("out", out), ("lse", lse)):
        refuse(ValueError, f"{name}: needs memory of its own", "; copy it", **{name: array})


def test_nothing_is_written_by_a_call_that_fails() -> None:
    out, lse = np.full(OUT, 7, BF16), np.full((2, 5, 3), 7, np.float32)
    refuse(ValueError, "lse: ", out=out, lse=lse)
    assert (out == 7).all() and (lse == 7).all()


# --- other arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["e", None, 2j, np.ones(1)])
def test_lse_base_is_a_number(base: object) -> None:
    kind = type(base).__name__
    refuse(TypeError, "lse_base: needs a number, math.e or 2", f"got {kind}", lse_base=base)


@pytest.mark.parametrize("base", [10, 2.718, 1, 0, -2, float("nan")])
def test_lse_base_is_one_of_two(base: float) -> None:
    refuse(ValueError, "lse_base: needs math.e or 2", f"got {base}", "; convert", lse_base=base)


def test_lse_base_scales_the_logarithms() -> None:
    natural = cumla.merge_attention_states(**make(), lse_base=math.e)
    lses = [lse / np.float32(math.log(2)) for lse in make()["lses"]]
    binary = cumla.merge_attention_states(make()["outs"], lses, lse_base=2.0)
    np.testing.assert_allclose(binary.lse * math.log(2), natural.lse, rtol=1e-6)
    np.testing.assert_array_equal(binary.out, natural.out)


# --- frameworks ----------------------------------------------------------------------------------


def test_jax_arrays() -> None:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    given = {name: [jnp.asarray(array) for array in make()[name]] for name in ("outs", "lses")}
    expected = cumla.merge_attention_states(**make())
    for change in ({}, {"outs": jnp.stack(given["outs"]), "lses": jnp.stack(given["lses"])}):
        merged = cumla.merge_attention_states(**given | change)
        assert isinstance(merged.out, jax.Array) and isinstance(merged.lse, jax.Array)
        np.testing.assert_array_equal(np.asarray(merged.out), expected.out)
    refuse(TypeError, "out: JAX arrays are immutable", **given, out=given["outs"][0])
    refuse(TypeError, "lse: JAX arrays are immutable", **given, lse=given["lses"][0])
    with pytest.raises(TypeError, match=r"^outs\[0\]: .*JAX tracer"):
        jax.jit(lambda x: cumla.merge_attention_states([x], given["lses"][:1]).out)(
            given["outs"][0]
        )


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    outs = torch.from_numpy(np.stack([out.astype(np.float32) for out in make()["outs"]])).bfloat16()
    lses = torch.from_numpy(np.stack(make()["lses"]))
    expected = cumla.merge_attention_states(**make())
    merged = cumla.merge_attention_states(outs, lses)
    assert (merged.out.dtype, merged.lse.dtype) == (torch.bfloat16, torch.float32)
    np.testing.assert_array_equal(merged.out.float().numpy(), expected.out.astype(np.float32))
    cumla.merge_attention_states(outs, lses, out=outs[0], lse=lses[0])
    assert bool((outs[0] == merged.out).all()) and bool((lses[0] == merged.lse).all())
    refuse(TypeError, "out: ", "framework of outs[0]", "torch.Tensor", out=outs[0])


# --- GPU arrays ----------------------------------------------------------------------------------


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    for module in (arrays, launch_module):
        monkeypatch.setattr(module, "driver", lambda: fake)
    monkeypatch.setattr(arrays, "_framework_of_type", {np.ndarray: arrays._NUMPY})
    return fake


@pytest.fixture
def cupy(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuPy]:
    caches = (arrays._cupy, launch_device.import_cupy, launch_device.properties)
    for cache in caches:
        cache.cache_clear()
    fake = FakeCuPy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(launch_device, "installed_cupy", lambda: ("cupy-cuda12x 14.2.0",))
    monkeypatch.setattr(launch_module, "_loaded", {})
    yield fake
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def on_gpu(cupy: FakeCuPy) -> dict[str, Any]:
    """The arguments of `make` on the GPU."""
    return {name: [cupy.like(array) for array in some] for name, some in make().items()}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Kernels that would be launched, and how many partial results they take; none is loaded."""
    found: list[tuple[str, int]] = []
    monkeypatch.setattr(merge, "load", lambda spec, device, *, capturing: spec)

    def prepare(spec: KernelSpec, partials: list[Any], *_: object) -> Callable[[], None]:
        return lambda: found.append((spec.entry, len(partials)))

    monkeypatch.setattr(merge, "prepare_merge", prepare)
    return found


def test_the_fake_gpu_is_called(
    on_gpu: dict[str, Any], cupy: FakeCuPy, launched: list[tuple[str, int]]
) -> None:
    merged = cumla.merge_attention_states(**on_gpu)
    assert (merged.out.shape, merged.out.dtype, merged.lse.shape) == (OUT, BF16, LSE)
    half = cupy.ndarray((7, *OUT), np.dtype(np.float16))
    cumla.merge_attention_states(half, cupy.ndarray((7, *LSE), np.float32))
    assert launched == [("merge_states_bfloat16", 3), ("merge_states_float16", 7)]


def test_many_partial_results_take_several_launches(
    cupy: FakeCuPy, launched: list[tuple[str, int]]
) -> None:
    for count, counts in ((60, [60]), (61, [60, 1]), (150, [60, 60, 30])):
        launched.clear()
        outs, lses = cupy.ndarray((count, *OUT), BF16), cupy.ndarray((count, *LSE), np.float32)
        cumla.merge_attention_states(outs, lses)
        assert [number for _, number in launched] == counts


@pytest.mark.parametrize("name", ["outs", "lses"])
def test_cpu_and_gpu_mixed(on_gpu: dict[str, Any], name: str) -> None:
    changed = on_gpu | {name: [on_gpu[name][0], make()[name][1], on_gpu[name][2]]}
    refuse(ValueError, f"{name}[1]: ", "CUDA device 0", "on the CPU", "; copy", **changed)


def test_layouts_are_checked_on_the_gpu_too(
    on_gpu: dict[str, Any], launched: list[tuple[str, int]]
) -> None:
    on_gpu["outs"][1].data.ptr += 8
    refuse(ValueError, "outs[1]: ", "multiple of 16 bytes", "got 0x1008", "; copy", **on_gpu)
    assert launched == []


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_unsupported_gpus(
    on_gpu: dict[str, Any], cupy: FakeCuPy, capability: tuple[int, int]
) -> None:
    cupy.capability = capability
    refuse(cumla.UnsupportedDeviceError, "device 0 is", "capability 9.0", **on_gpu)


def test_prepare_loads_the_kernels(cupy: FakeCuPy, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(mla, "load", lambda spec, *_, **__: names.append(spec.entry))
    cumla.prepare(dtypes=("float16",))
    found = [name for name in names if name.startswith("merge_states")]
    assert found == ["merge_states_float16", "merge_states_float32"]


def test_a_cold_kernel_under_capture(on_gpu: dict[str, Any], driver: FakeDriver) -> None:
    driver.capturing.add(0)
    message = ("kernel merge_states_bfloat16 is not loaded", "captured", "call cumla.prepare()")
    refuse(cumla.NotPreparedError, *message, **on_gpu)


def test_cupy_allocations_under_capture(
    on_gpu: dict[str, Any], cupy: FakeCuPy, driver: FakeDriver, launched: list[tuple[str, int]]
) -> None:
    driver.capturing.add(0)
    refuse(cumla.NotPreparedError, "the stream is being captured", "out=, lse=", **on_gpu)
    outputs = {"out": cupy.ndarray(OUT, BF16), "lse": cupy.ndarray(LSE, np.float32)}
    cumla.merge_attention_states(**on_gpu, **outputs)
    launched.clear()
    many = {"outs": on_gpu["outs"] * 21, "lses": on_gpu["lses"] * 21}
    message = ("outs: more than 60 partial results", "captured", "; merge at most 60 in a call")
    refuse(cumla.NotPreparedError, *message, **many, **outputs)
    assert launched == []
