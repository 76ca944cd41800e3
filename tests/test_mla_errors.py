# SPDX-License-Identifier: Apache-2.0
"""What `cumla.mla_decode` and its plan refuse, and what they say: argument, need, value, way out.

GPU arrays are those of a CuPy that has addresses and nothing behind them; nothing is launched.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla import arrays, mla
from cumla.launch import device as launch_device
from cumla.launch import module as launch_module
from cumla.launch import source as launch_source

BF16 = np.dtype(ml_dtypes.bfloat16)
INSTALL_LINES = ('pip install "cumla[cu12]"', 'pip install "cumla[cu13]"')


def make(**changes: Any) -> dict[str, Any]:
    """Arguments of a call that works, with changes."""
    rng = np.random.default_rng(0)
    arguments = {
        "q": rng.standard_normal((2, 2, 16, 576)).astype(BF16),
        "kv_cache": rng.standard_normal((6, 64, 1, 576)).astype(BF16),
        "block_table": np.arange(6, dtype=np.int32).reshape(2, 3),
        "cache_seqlens": np.array([5, 130], np.int32),
    }
    return arguments | changes


def refuse(error: type[Exception], *fragments: str, **changes: Any) -> None:
    """The call fails; its message begins with the first fragment and has the others in turn."""
    with pytest.raises(error) as caught:
        cumla.mla_decode(**make(**changes))
    message, end = str(caught.value), 0
    assert message.startswith(fragments[0])
    for fragment in fragments:
        assert fragment in message[end:], message
        end = message.index(fragment, end) + len(fragment)


def test_the_unchanged_arguments_work() -> None:
    out, lse = cumla.mla_decode(**make())
    assert out.shape == (2, 2, 16, 512)
    assert lse.shape == (2, 16, 2)


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64", "int16"])
def test_dtype_of_q(dtype: str) -> None:
    q = np.zeros((2, 2, 16, 576), dtype)
    refuse(TypeError, "q: ", "bfloat16 or float16", f"got {dtype}", "; convert", q=q)


def test_dtype_of_q_in_foreign_byte_order() -> None:
    refuse(TypeError, "q: ", "bfloat16 or float16", "got >f2", q=np.zeros((2, 2, 16, 576), ">f2"))


def test_dtype_of_kv_cache_is_that_of_q() -> None:
    kv_cache = np.zeros((6, 64, 1, 576), np.float16)
    refuse(TypeError, "kv_cache: ", "bfloat16", "got float16", "; convert", kv_cache=kv_cache)


@pytest.mark.parametrize("dtype", ["int64", "uint32", "float32"])
@pytest.mark.parametrize(("name", "shape"), [("block_table", (2, 3)), ("cache_seqlens", (2,))])
def test_tables_are_int32(name: str, shape: tuple[int, ...], dtype: str) -> None:
    refuse(
        TypeError,
        f"{name}: ",
        "int32",
        f"got {dtype}",
        "; convert",
        **{name: np.ones(shape, dtype)},
    )


def test_dtype_of_out() -> None:
    out = np.zeros((2, 2, 16, 512), np.float16)
    refuse(TypeError, "out: ", "bfloat16 or float32", "got float16", out=out)


def test_dtype_of_lse() -> None:
    refuse(TypeError, "lse: ", "float32", "got float64", lse=np.zeros((2, 16, 2)))


# --- ranks and shapes -----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(576,), (2, 16, 576), (1, 2, 2, 16, 576)])
def test_rank_of_q(shape: tuple[int, ...]) -> None:
    axes = "(batch, q_len, num_heads, 576)"
    refuse(ValueError, "q: ", axes, f"got shape {shape}", q=np.zeros(shape, BF16))


@pytest.mark.parametrize("shape", [(), (64, 576), (1, 6, 64, 1, 576)])
def test_rank_of_kv_cache(shape: tuple[int, ...]) -> None:
    axes = "(num_pages, page_size, num_kv_heads, 576)"
    refuse(ValueError, "kv_cache: ", axes, f"{shape}", kv_cache=np.zeros(shape, BF16))


@pytest.mark.parametrize("shape", [(2,), (3, 3), (2, 3, 1)])
def test_shape_of_block_table(shape: tuple[int, ...]) -> None:
    table = np.zeros(shape, np.int32)
    refuse(
        ValueError, "block_table: ", "(batch, max_pages)", "2", f"got {shape}", block_table=table
    )


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 1)])
def test_shape_of_cache_seqlens(shape: tuple[int, ...]) -> None:
    lengths = np.zeros(shape, np.int32)
    refuse(ValueError, "cache_seqlens: ", "(batch,)", "2", f"got {shape}", cache_seqlens=lengths)


@pytest.mark.parametrize("shape", [(2, 2, 16, 576), (2, 16, 2, 512), (2, 16, 512)])
def test_shape_of_out(shape: tuple[int, ...]) -> None:
    out = np.zeros(shape, BF16)
    refuse(ValueError, "out: ", "(2, 2, 16, 512)", f"got {shape}", out=out)


@pytest.mark.parametrize("shape", [(2, 2, 16), (2, 16), (2, 16, 1)])
def test_shape_of_lse(shape: tuple[int, ...]) -> None:
    lse = np.zeros(shape, np.float32)
    refuse(ValueError, "lse: ", "(2, 16, 2)", f"got {shape}", lse=lse)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("q", (2, 0, 16, 576)),
        ("q", (0, 2, 16, 576)),
        ("q", (2, 2, 0, 576)),
        ("kv_cache", (6, 64, 0, 576)),
        ("kv_cache", (0, 64, 1, 576)),
    ],
)
def test_empty_axes(name: str, shape: tuple[int, ...]) -> None:
    refuse(ValueError, f"{name}: ", "at least one", f"{shape}", **{name: np.zeros(shape, BF16)})


@pytest.mark.parametrize("head_dim", [512, 192, 577])
@pytest.mark.parametrize(("name", "shape"), [("q", (2, 2, 16)), ("kv_cache", (6, 64, 1))])
def test_head_dim(name: str, shape: tuple[int, ...], head_dim: int) -> None:
    array = np.zeros((*shape, head_dim), BF16)
    refuse(ValueError, f"{name}: ", "576", f"{(*shape, head_dim)}", **{name: array})


@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_page_size(page_size: int) -> None:
    kv_cache = np.zeros((6, page_size, 1, 576), BF16)
    refuse(ValueError, "kv_cache: ", "page size of 64", f"got {page_size}", kv_cache=kv_cache)


def test_kv_heads_divide_the_heads() -> None:
    kv_cache = np.zeros((6, 64, 3, 576), BF16)
    refuse(
        ValueError, "num_heads: ", "multiple of num_kv_heads", "16", "3", "; pad", kv_cache=kv_cache
    )


# --- memory layout --------------------------------------------------------------------------------


SHAPES = pytest.mark.parametrize(
    ("name", "shape"),
    [("q", (2, 2, 16, 576)), ("kv_cache", (6, 64, 1, 576)), ("out", (2, 2, 16, 512))],
)


@SHAPES
def test_last_axis_is_contiguous(name: str, shape: tuple[int, ...]) -> None:
    every_other = np.zeros((*shape[:-1], 2 * shape[-1]), BF16)[..., ::2]
    refuse(
        ValueError,
        f"{name}: ",
        "contiguous last axis",
        "got a stride of 4 bytes",
        "; make a contiguous copy",
        **{name: every_other},
    )


@SHAPES
def test_strides_are_multiples_of_16_bytes(name: str, shape: tuple[int, ...]) -> None:
    padded = np.zeros((*shape[:-1], shape[-1] + 1), BF16)[..., :-1]
    axis = 1 if name == "kv_cache" else 2  # the innermost with more than one element
    refuse(
        ValueError,
        f"{name}: ",
        "multiples of 16 bytes",
        f"got {padded.strides[axis]}",
        "; pad the rows",
        **{name: padded},
    )


@SHAPES
def test_strides_are_not_negative(name: str, shape: tuple[int, ...]) -> None:
    backwards = np.zeros(shape, BF16)[::-1]
    refuse(
        ValueError,
        f"{name}: ",
        "not negative",
        f"got {-backwards[0].nbytes}",
        "axis 0",
        "copy",
        **{name: backwards},
    )


@SHAPES
@pytest.mark.parametrize("shift", [4, 8])
def test_address_is_a_multiple_of_16_bytes(name: str, shape: tuple[int, ...], shift: int) -> None:
    memory = np.zeros(2 * int(np.prod(shape)) + 32, np.uint8)
    start = -memory.ctypes.data % 16 + shift
    shifted = memory[start : start + 2 * int(np.prod(shape))].view(BF16).reshape(shape)
    refuse(
        ValueError,
        f"{name}: ",
        "multiple of 16 bytes",
        f"got {shifted.ctypes.data:#x}",
        "; copy",
        **{name: shifted},
    )


def test_rows_of_the_block_table_are_contiguous() -> None:
    table = np.zeros((2, 6), np.int32)[:, ::2]
    refuse(
        ValueError, "block_table: ", "contiguous", "8 bytes", "contiguous copy", block_table=table
    )


@pytest.mark.parametrize(("name", "shape"), [("block_table", (2, 3)), ("cache_seqlens", (2,))])
def test_tables_are_aligned(name: str, shape: tuple[int, ...]) -> None:
    unaligned = np.zeros(4 * int(np.prod(shape)) + 1, np.uint8)[1:].view("<i4").reshape(shape)
    refuse(ValueError, f"{name}: ", "multiples of 4 bytes", "; copy", **{name: unaligned})


def test_lse_is_aligned() -> None:
    lse = np.zeros(4 * 64 + 1, np.uint8)[1:].view("<f4").reshape(2, 16, 2)
    refuse(ValueError, "lse: ", "aligned elements", f"got address {lse.ctypes.data:#x}", lse=lse)


@pytest.mark.parametrize(
    ("name", "row"), [("out", np.zeros(512, BF16)), ("lse", np.zeros(2, np.float32))]
)
def test_outputs_have_memory_for_every_element(name: str, row: Any) -> None:
    shape = {"out": (2, 2, 16, 512), "lse": (2, 16, 2)}[name]
    array = np.lib.stride_tricks.as_strided(row, shape, (*[0] * (len(shape) - 1), row.itemsize))
    refuse(ValueError, f"{name}: ", "memory for each element", "broadcast", **{name: array})


def test_layouts_that_are_fine() -> None:
    """Padded rows and pages, a repeated query, a cache without its head axis: none is refused."""
    arguments = make()
    expected = cumla.mla_decode(**arguments)
    padded = np.zeros((6, 80, 584), BF16)
    padded[:, :64, :576] = arguments["kv_cache"][:, :, 0]
    wide = np.zeros((2, 9), np.int32)
    wide[:, :3] = arguments["block_table"]
    got = cumla.mla_decode(
        **arguments | {"kv_cache": padded[:, :64, :576], "block_table": wide[:, :3]}
    )
    np.testing.assert_array_equal(got.out, expected.out)
    np.testing.assert_array_equal(got.lse, expected.lse)
    repeated = np.broadcast_to(arguments["q"][:1], arguments["q"].shape)
    cumla.mla_decode(**arguments | {"q": repeated})


def test_nothing_is_written_by_a_call_that_fails() -> None:
    out, lse = np.full((2, 2, 16, 512), 7, BF16), np.full((2, 2, 16), 7, np.float32)
    refuse(ValueError, "lse: ", out=out, lse=lse)
    assert (out == 7).all()
    assert (lse == 7).all()


# --- other arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q", "kv_cache", "block_table", "cache_seqlens"])
@pytest.mark.parametrize("value", [None, [[1, 2]], "text"])
def test_things_that_are_no_arrays(name: str, value: object) -> None:
    kind = type(value).__name__
    refuse(TypeError, f"{name}: ", "an array of CuPy", f"got builtins.{kind}", **{name: value})


@pytest.mark.parametrize("scale", ["1", np.ones(1), 1j])
def test_softmax_scale_is_a_number(scale: object) -> None:
    kind = type(scale).__name__
    refuse(TypeError, "softmax_scale: ", "number", f"got {kind}", softmax_scale=scale)


@pytest.mark.parametrize("scale", [0.0, -0.1, float("nan"), float("inf")])
def test_softmax_scale_is_positive(scale: float) -> None:
    refuse(ValueError, "softmax_scale: ", "a number from", f"got {scale}", softmax_scale=scale)


def test_plan_is_a_plan() -> None:
    refuse(TypeError, "plan: ", "cumla.MLADecodePlan", "got dict", plan={})


# --- plans ----------------------------------------------------------------------------------------


def plan_of(arguments: dict[str, Any], *, updated: bool = True, **kw: Any) -> cumla.MLADecodePlan:
    plan = cumla.MLADecodePlan.from_arrays(arguments["q"], arguments["kv_cache"], **kw)
    if updated:
        plan.update(arguments["cache_seqlens"])
    return plan


@pytest.mark.parametrize(
    "changes",
    [
        {"q": (2, 1, 16, 576)},
        {"q": (2, 2, 32, 576)},
        {"kv_cache": (6, 64, 2, 576)},
        {"q": (3, 2, 16, 576), "block_table": (3, 3), "cache_seqlens": (3,)},
    ],
)
def test_plan_of_another_shape(changes: dict[str, tuple[int, ...]]) -> None:
    plan = plan_of(make())
    new = {n: np.zeros(s, BF16 if len(s) == 4 else np.int32) for n, s in changes.items()}
    refuse(ValueError, "plan: made for ", "got ", "; make a plan for this shape", plan=plan, **new)


def test_plan_of_another_dtype() -> None:
    plan = plan_of(make())
    half = {n: make()[n].astype(np.float16) for n in ("q", "kv_cache")}
    refuse(ValueError, "plan: made for ", "bfloat16", "float16", "; make a plan", plan=plan, **half)


def test_plan_of_the_other_mask() -> None:
    plan = plan_of(make(), causal=False)
    refuse(ValueError, "plan: ", "causal=False", "got causal=True", "; make a plan", plan=plan)


def test_plan_that_was_never_updated() -> None:
    plan = plan_of(make(), updated=False)
    refuse(ValueError, "plan: never updated", "; call plan.update(cache_seqlens)", plan=plan)


def test_update_checks_the_lengths() -> None:
    plan = plan_of(make())
    with pytest.raises(TypeError, match=r"^cache_seqlens: needs int32, got int64"):
        plan.update(np.zeros(2, np.int64))
    with pytest.raises(ValueError, match=r"^cache_seqlens: .*batch 2.*got \(3,\)"):
        plan.update(np.zeros(3, np.int32))


@pytest.mark.parametrize("name", ["batch", "q_len", "num_heads", "num_kv_heads"])
@pytest.mark.parametrize("value", [0, -1, 2.0])
def test_numbers_of_a_plan(name: str, value: object) -> None:
    numbers: dict[str, Any] = {"batch": 2, "q_len": 1, "num_heads": 16, name: value}
    with pytest.raises((ValueError, TypeError), match=f"^{name}: .*got {value!r}"):
        cumla.MLADecodePlan(**numbers, like=make()["q"])
    with pytest.raises((ValueError, TypeError), match=f"^{name}: .*got {value!r}"):
        cumla.MLADecodePlan.workspace_bytes(**numbers, sm_count=132)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "^num_heads: .*16 query heads and 3 kv heads"),
        ({"page_size": 16}, "^page_size: .*64.*got 16"),
        ({"dtype": "float32"}, "^dtype: needs bfloat16 or float16, got float32"),
        ({"device": 0}, "^like: .*CUDA device 0"),
    ],
)
def test_other_arguments_of_a_plan(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        cumla.MLADecodePlan(2, 1, 16, like=make()["q"], **changes)


def test_prepare_names_an_unknown_dtype() -> None:
    with pytest.raises((ValueError, TypeError), match=r"^dtypes: .*got float8"):
        cumla.prepare(dtypes=("float8",))


# --- frameworks -----------------------------------------------------------------------------------


def test_jax_tracers_are_refused() -> None:
    jax = pytest.importorskip("jax")
    arguments = {name: jax.numpy.asarray(array) for name, array in make().items()}

    def attend(**changes: Any) -> Any:
        return cumla.mla_decode(**arguments | changes).out

    for name in ("q", "cache_seqlens"):
        with pytest.raises(TypeError, match=rf"^{name}: .*JAX tracer.*outside jax\.jit"):
            jax.jit(lambda array, n=name: attend(**{n: array}))(arguments[name])
    with pytest.raises(TypeError, match=r"^q: .*JAX tracer"):
        jax.grad(lambda q: attend(q=q).sum().astype("float32"))(arguments["q"])


def test_jax_outputs_are_refused() -> None:
    jnp = pytest.importorskip("jax").numpy
    given = {name: jnp.asarray(array) for name, array in make().items()}
    out, lse = jnp.zeros((2, 2, 16, 512), "bfloat16"), jnp.zeros((2, 16, 2))
    refuse(TypeError, "out: JAX arrays are immutable", "without out=", **given, out=out)
    refuse(TypeError, "lse: JAX arrays are immutable", "without lse=", **given, lse=lse)
    refuse(TypeError, "out: JAX arrays are immutable", out=out)  # NumPy inputs


def test_outputs_of_another_framework_are_refused() -> None:
    torch = pytest.importorskip("torch")
    out = torch.zeros(2, 2, 16, 512, dtype=torch.bfloat16)
    refuse(
        TypeError,
        "out: ",
        "framework of q",
        "got torch.Tensor",
        "; convert it, or call without out=",
        out=out,
    )


def test_fake_tensors_are_refused() -> None:
    torch = pytest.importorskip("torch")
    fake_tensor = pytest.importorskip("torch._subclasses.fake_tensor")
    with fake_tensor.FakeTensorMode():
        q = torch.zeros(2, 2, 16, 576, dtype=torch.bfloat16)
    refuse(TypeError, "q: ", "FakeTensor", "; call cumla outside", q=q)


def test_tensors_elsewhere_are_refused() -> None:
    torch = pytest.importorskip("torch")
    q = torch.zeros(2, 2, 16, 576, dtype=torch.bfloat16, device="meta")
    refuse(ValueError, "q: ", "CUDA device or on the CPU", "meta", q=q)


SHARDED = """
import jax, numpy as np
import cumla
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
q = jax.device_put(jax.numpy.zeros((2, 1, 16, 576), "bfloat16"), place)
kv_cache = jax.numpy.zeros((6, 64, 1, 576), "bfloat16")
table, lengths = jax.numpy.zeros((2, 3), "int32"), jax.numpy.zeros(2, "int32")
try:
    cumla.mla_decode(q, kv_cache, table, lengths)
except ValueError as error:
    print(error)
print(cumla.mla_decode(q.addressable_shards[0].data, kv_cache, table[:1], lengths[:1]).out.shape)
"""


def test_sharded_jax_arrays_are_refused() -> None:
    pytest.importorskip("jax")
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
    }
    result = subprocess.run(
        [sys.executable, "-c", SHARDED],
        cwd=Path(__file__).parents[1],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    message, shape = result.stdout.splitlines()
    assert message.startswith("q: needs an array on one device, got one that is sharded over 2; ")
    assert "q.addressable_shards[i].data" in message
    assert shape == "(1, 1, 16, 512)"


# --- GPU arrays -----------------------------------------------------------------------------------


class FakeDriver:
    """The driver's part in a call: nothing happens, and some streams are being captured."""

    def __init__(self) -> None:
        self.capturing: set[int] = set()

    def enter_device(self, device: int) -> bool:
        return False

    def is_capturing(self, stream: int) -> bool:
        return stream in self.capturing


class FakeCuPy(types.ModuleType):
    """A CuPy with one GPU model; its arrays have addresses and nothing behind them."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.capability = (9, 0)
        self.stream = 0
        self.nvrtc = (12, 8)

        class ndarray:
            def __init__(self, shape: tuple[int, ...], dtype: Any, device: int = 0) -> None:
                shadow = np.lib.stride_tricks.as_strided(np.zeros(1, dtype), shape)
                self.shape, self.dtype = shape, shadow.dtype
                ends = np.cumprod([self.dtype.itemsize, *shape[:0:-1]])
                self.strides = tuple(int(end) for end in ends[::-1])
                self.data = types.SimpleNamespace(ptr=0x1000, device_id=device)

        self.ndarray = ndarray
        streams = types.SimpleNamespace(from_external=lambda _: contextlib.nullcontext())
        runtime = types.SimpleNamespace(
            getDevice=lambda: 0,
            getDeviceProperties=self._properties,
            CUDARuntimeError=RuntimeError,
        )
        self.cuda = types.SimpleNamespace(
            Device=FakeDevice,
            Stream=streams,
            get_current_stream=lambda device: types.SimpleNamespace(ptr=self.stream),
            nvrtc=types.SimpleNamespace(getVersion=self._nvrtc_version),
            runtime=runtime,
        )

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self.ndarray(shape, dtype)

    def like(self, array: Any, device: int = 0) -> Any:
        return self.ndarray(array.shape, array.dtype, device)

    def _properties(self, device: int) -> dict[str, Any]:
        return {
            "name": b"NVIDIA Imaginary",
            "major": self.capability[0],
            "minor": self.capability[1],
            "multiProcessorCount": 132,
            "sharedMemPerBlockOptin": 232448,
            "l2CacheSize": 50 << 20,
        }

    def _nvrtc_version(self) -> tuple[int, int]:
        if self.nvrtc == (0, 0):
            raise RuntimeError("CuPy failed to load libnvrtc.so.12\nsome more")
        return self.nvrtc


class FakeDevice:
    id = 0

    def __init__(self, device: int = 0) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(arrays, "driver", lambda: fake)
    monkeypatch.setattr(arrays, "_framework_of_type", {np.ndarray: arrays._NUMPY})
    return fake


@pytest.fixture
def no_cupy_yet() -> Iterator[None]:
    """Forget which CuPy is installed, and which GPU is there, before and after a test."""
    caches = (arrays._cupy, launch_device.import_cupy, launch_device.properties)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def cupy(no_cupy_yet: None, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> FakeCuPy:
    fake = FakeCuPy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(launch_device, "installed_cupy", lambda: ("cupy-cuda12x 14.2.0",))
    monkeypatch.setattr(launch_module, "_loaded", {})
    monkeypatch.delenv("CUMLA_CUBIN_DIR", raising=False)
    return fake


@pytest.fixture
def on_gpu(cupy: FakeCuPy) -> dict[str, Any]:
    """The arguments of `make` on the GPU."""
    return {name: cupy.like(array) for name, array in make().items()}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels that would be launched; none is loaded."""
    names: list[str] = []
    monkeypatch.setattr(mla, "load", lambda spec, device, *, capturing: spec)
    monkeypatch.setattr(mla, "launch_schedule", lambda spec, *_: names.append(spec.stem))
    monkeypatch.setattr(mla, "launch_decode", lambda spec, *_: names.append(spec.stem))
    monkeypatch.setattr(mla, "launch_merge", lambda spec, *_: names.append(spec.stem))
    return names


def test_the_fake_gpu_is_called(on_gpu: dict[str, Any], launched: list[str]) -> None:
    cumla.mla_decode(**on_gpu)
    assert launched == ["mla_schedule", "mla_decode", "mla_merge"]


@pytest.mark.parametrize("name", ["kv_cache", "block_table", "cache_seqlens"])
def test_cpu_and_gpu_mixed(on_gpu: dict[str, Any], name: str) -> None:
    changed = on_gpu | {name: make()[name]}
    refuse(ValueError, f"{name}: ", "q is, on CUDA device 0", "on the CPU", "; copy", **changed)
    refuse(ValueError, f"{name}: ", "q is, on the CPU", "CUDA device 0", **{name: on_gpu[name]})


@pytest.mark.parametrize("name", ["kv_cache", "block_table", "cache_seqlens"])
def test_devices_that_differ(on_gpu: dict[str, Any], cupy: FakeCuPy, name: str) -> None:
    changed = on_gpu | {name: cupy.like(on_gpu[name], device=1)}
    refuse(ValueError, f"{name}: ", "CUDA device 0", "CUDA device 1", "; copy", **changed)


def test_outputs_on_another_device(on_gpu: dict[str, Any], cupy: FakeCuPy) -> None:
    out = cupy.ndarray((2, 2, 16, 512), BF16, device=1)
    refuse(ValueError, "out: ", "CUDA device 0", "CUDA device 1", **on_gpu, out=out)


def test_layouts_are_checked_on_the_gpu_too(
    on_gpu: dict[str, Any], cupy: FakeCuPy, launched: list[str]
) -> None:
    on_gpu["q"].data.ptr += 8
    refuse(ValueError, "q: ", "multiple of 16 bytes", "got 0x1008", "; copy", **on_gpu)
    assert launched == []


def test_a_ready_plan_still_sees_misaligned_arrays(
    on_gpu: dict[str, Any], launched: list[str]
) -> None:
    plan = plan_of(on_gpu)
    cumla.mla_decode(**on_gpu, plan=plan)
    launched.clear()
    on_gpu["kv_cache"].data.ptr += 8
    refuse(ValueError, "kv_cache: ", "multiple of 16 bytes", "got 0x1008", **on_gpu, plan=plan)
    assert launched == []


def test_plan_of_another_device(
    on_gpu: dict[str, Any], cupy: FakeCuPy, launched: list[str]
) -> None:
    plan = plan_of(on_gpu)
    elsewhere = {name: cupy.like(array, device=1) for name, array in on_gpu.items()}
    message = ("plan: made for CUDA device 0", "CUDA device 1", "; make a plan for each device")
    refuse(ValueError, *message, **elsewhere, plan=plan)
    refuse(ValueError, "plan: made for CUDA device 0", "the CPU", plan=plan)
    with pytest.raises(ValueError, match=r"^plan: made for CUDA device 0, got .* CUDA device 1"):
        plan.update(elsewhere["cache_seqlens"])


def test_plan_of_another_stream(on_gpu: dict[str, Any], launched: list[str]) -> None:
    plan = plan_of(on_gpu)
    message = ("plan: updated on stream 0x0", "got a run on stream 0x5", "call plan.update")
    refuse(ValueError, *message, **on_gpu, plan=plan, stream=5)
    plan.update(on_gpu["cache_seqlens"], stream=5)
    cumla.mla_decode(**on_gpu, plan=plan, stream=5)
    refuse(ValueError, "plan: updated on stream 0x5", "stream 0x0", **on_gpu, plan=plan)


def test_plan_on_the_gpu_that_was_never_updated(
    on_gpu: dict[str, Any], launched: list[str]
) -> None:
    plan = plan_of(on_gpu, updated=False)
    refuse(ValueError, "plan: never updated", "; call plan.update", **on_gpu, plan=plan)


@pytest.mark.parametrize(
    ("shape", "dtype", "shift", "message"),
    [
        ((1 << 30,), "int8", 0, "^workspace: .*uint8.*got int8"),
        ((1 << 15, 1 << 15), "uint8", 0, "^workspace: .*one-dimensional"),
        ((100,), "uint8", 0, r"^workspace: needs \d+ bytes .*workspace_bytes.*got 100"),
        ((1 << 30,), "uint8", 128, "^workspace: .*multiple of 256.*got 0x1080"),
    ],
)
def test_workspaces(
    cupy: FakeCuPy, shape: tuple[int, ...], dtype: str, shift: int, message: str
) -> None:
    workspace = cupy.ndarray(shape, dtype)
    workspace.data.ptr += shift
    with pytest.raises(ValueError, match=message):
        cumla.MLADecodePlan(2, 2, 16, workspace=workspace)


@pytest.mark.parametrize("stream", ["0", 1.5, object()])
def test_streams_of_another_kind(on_gpu: dict[str, Any], stream: object) -> None:
    kind = type(stream).__name__
    refuse(TypeError, "stream: ", "integer handle", f"got builtins.{kind}", **on_gpu, stream=stream)


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
def test_unsupported_gpus(
    on_gpu: dict[str, Any], cupy: FakeCuPy, capability: tuple[int, int]
) -> None:
    cupy.capability = capability
    found = "NVIDIA Imaginary of compute capability {}.{}".format(*capability)
    message = ("device 0 is", found, "compute capability 9.0", "CPU memory")
    refuse(cumla.UnsupportedDeviceError, *message, **on_gpu)
    with pytest.raises(cumla.UnsupportedDeviceError, match="NVIDIA Imaginary"):
        cumla.prepare()


def test_a_cold_kernel_under_capture(
    on_gpu: dict[str, Any], driver: FakeDriver, launched: Any
) -> None:
    cupy_outputs = {
        "out": type(on_gpu["q"])((2, 2, 16, 512), BF16),
        "lse": type(on_gpu["q"])((2, 16, 2), "float32"),
    }
    plan = plan_of(on_gpu, updated=False)
    driver.capturing.add(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mla, "load", launch_module.load)
        with pytest.raises(cumla.NotPreparedError) as caught:
            plan.update(on_gpu["cache_seqlens"])
        assert "kernel mla_schedule" in str(caught.value)
        assert "captured" in str(caught.value)
        assert "call cumla.prepare()" in str(caught.value)
    plan.update(on_gpu["cache_seqlens"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mla, "load", launch_module.load)
        message = ("kernel mla_decode_bfloat16 is not loaded", "call cumla.prepare()")
        refuse(cumla.NotPreparedError, *message, **on_gpu, **cupy_outputs, plan=plan)


def test_cupy_allocations_under_capture(
    on_gpu: dict[str, Any], driver: FakeDriver, launched: list[str]
) -> None:
    driver.capturing.add(0)
    message = ("the stream is being captured", "CuPy", "out=, lse= and plan=")
    refuse(cumla.NotPreparedError, *message, **on_gpu)
    assert launched == []


# --- installation ---------------------------------------------------------------------------------


def test_cupy_missing(monkeypatch: pytest.MonkeyPatch, no_cupy_yet: None) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(launch_device, "installed_cupy", lambda: ())
    for call in (cumla.prepare, lambda: cumla.MLADecodePlan(2, 1, 16)):
        with pytest.raises(cumla.MissingDependencyError, match=r"^CuPy") as caught:
            call()
        assert all(line in str(caught.value) for line in INSTALL_LINES)
        assert isinstance(caught.value, ImportError)


def test_cupy_missing_when_another_framework_has_gpu_arrays(
    monkeypatch: pytest.MonkeyPatch, no_cupy_yet: None
) -> None:
    class Foreign:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

        def __dlpack__(self, **_: Any) -> object:
            raise AssertionError("not to be asked")

    monkeypatch.setitem(sys.modules, "cupy", None)
    arguments = dict.fromkeys(make(), Foreign())
    refuse(cumla.MissingDependencyError, "CuPy is needed", *INSTALL_LINES, **arguments)


def test_cupy_installed_twice(monkeypatch: pytest.MonkeyPatch, no_cupy_yet: None) -> None:
    versions = {"cupy-cuda12x": "14.2.0", "cupy-cuda13x": "14.2.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(cumla.MissingDependencyError) as caught:
        cumla.prepare()
    message = str(caught.value)
    assert message.startswith(
        "CuPy is installed 2 times (cupy-cuda12x 14.2.0, cupy-cuda13x 14.2.0)"
    )
    assert "uninstall" in message
    assert all(line in message for line in INSTALL_LINES)


def test_nvrtc_missing(on_gpu: dict[str, Any], cupy: FakeCuPy) -> None:
    cupy.nvrtc = (0, 0)
    message = ("CuPy found no NVRTC (CuPy failed to load libnvrtc.so.12)", *INSTALL_LINES)
    refuse(cumla.MissingDependencyError, *message, **on_gpu)


def test_nvrtc_of_cuda_bindings_missing(
    on_gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    refuse(cumla.MissingDependencyError, "cuda.bindings", *INSTALL_LINES, **on_gpu)


def test_a_compile_failure_shows_numbered_source(
    on_gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    try:
        launch_module.bindings_nvrtc_version()
    except cumla.MissingDependencyError as error:
        pytest.skip(str(error).split("\n")[0])
    whole = launch_source.translation_unit

    def broken(spec: Any, *, debug: bool = False) -> str:
        first, rest = whole(spec, debug=debug).split("\n", 1)
        return f"{first}\nint good;\nint bad = undeclared;\n{rest}"

    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launch_module, "translation_unit", broken)
    refuse(
        cumla.CompilationError,
        "kernel mla_schedule",
        "does not compile",
        "undeclared",
        "cumla/cuda/mla_schedule.cu:\n",
        "     1 | int good;\n>    2 | int bad = undeclared;\n",
        **on_gpu,
    )
    assert list(tmp_path.iterdir()) == []
