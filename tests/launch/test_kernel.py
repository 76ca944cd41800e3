# SPDX-License-Identifier: Apache-2.0
"""Launches: the bytes of the parameter structs, what the driver is asked, and what it refuses."""

from __future__ import annotations

import ctypes
import math
import struct
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cumla.core.arrays import ArrayView
from cumla.core.operation import Address
from cumla.errors import CumlaError, MissingDependencyError
from cumla.launch import KernelSpec, all_specs, kernel
from cumla.launch import device as launch_device
from cumla.launch._layouts import STRUCTS
from cumla.launch.kernel import Launch, Template
from cumla.launch.layouts import struct_of
from cumla.launch.mla import mla_decode
from cumla.launch.mla.choice import attend_launch
from cumla.launch.mla.mla_decode import DecodeArguments
from cumla.launch.mla.mla_decode_swapped import swapped_spec
from cumla.launch.mla.shape import MLADecodeKey
from cumla.launch.module import LoadedKernel
from cumla.launch.source import translation_unit
from cumla.launch.split.division import divisor_of
from cumla.launch.tensor_map import TensorMap, paged_kv_map
from tests.emulator import passed_on_a_gpu
from tests.gpu.tools.parts import FIELDS, PART
from tests.launch import layouts
from tests.launch.structs import compile_checks, leaves
from tests.sources import sources


def strided(ptr: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> ArrayView:
    return ArrayView(ptr=ptr, shape=shape, strides=strides, dtype=dtype, device=0)


@pytest.mark.parametrize(("page_size", "box_rows"), [(1, 1), (48, 16), (128, 64)])
def test_the_decode_kernels_parameters_by_name(page_size: int, box_rows: int) -> None:
    """Letters agree also where two members of a size have changed places: values that differ."""
    key = MLADecodeKey(5, 3, 44, 2, page_size, "bfloat16", causal=True, device=0, sm_count=132)
    arguments = DecodeArguments(
        q=strided(1 << 40, (5, 3, 44, 512), (4016, 3008, 2000, 2), "bfloat16"),
        q_rope=strided(2 << 40, (5, 3, 44, 64), (4032, 3024, 2016, 2), "bfloat16"),
        kv_cache=strided(3 << 40, (70, page_size, 2, 512), (9008, 8000, 7008, 2), "bfloat16"),
        kv_rope=strided(4 << 40, (70, page_size, 2, 64), (9024, 8016, 7024, 2), "bfloat16"),
        block_table=strided(5 << 40, (5, 11), (52, 4), "int32"),
        kv_scales=None,
        kv_scale=1.0,
        softmax_scale=0.25,
        causal=True,
    )
    out = strided(7 << 40, (5, 3, 44, 512), (5008, 5024, 5040, 4), "float32")
    lse = strided(8 << 40, (5, 44, 3), (6004, 6008, 6012), "float32")
    launch = attend_launch(key, 9 << 40, arguments, out, lse)
    got = dict(zip(leaves(launch.spec.params), launch.values, strict=True))

    expected: dict[str, Any] = {
        "out": 7 << 40,
        "out_stride_batch": 5008,
        "out_stride_token": 5024,
        "out_stride_head": 5040,
        "lse": 8 << 40,
        "lse_stride_batch": 1501,
        "lse_stride_head": 1502,
        "lse_stride_token": 1503,
        "block_table": 5 << 40,
        "block_table_stride": 13,
        "max_tokens": 11 * page_size,
        "page_entries": 4 * 13 + 11,
        "batch": 5,
        "parts": key.parts,
        "max_pages": 11,
        "num_pages": 70,
        "page_size": page_size,
        "box_rows": box_rows,
        "wide_rows": min(box_rows, 32),
        "rope_is_apart": 1,
        "q_len": 3,
        "heads_per_group": 22,
        "by_heads_per_group.magic": 3123612579,  # ceil(2^36 / 22)
        "by_heads_per_group.shift": 5,
        **{f"by_page_size.{name}": value for name, value in divisor_of(page_size).items()},
        "by_num_heads.magic": 3123612579,
        "by_num_heads.shift": 6,
        "by_q_len.magic": 2863311531,  # ceil(2^33 / 3)
        "by_q_len.shift": 2,
        "batch_invariant": 0,
        "empty_lse": -math.inf,
        "sink_in_lse": 1,
        "sinks": 0,
        "sinks_stride": 0,
        "row_groups": key.row_groups,
        "may_wait": key.may_wait,
        "causal": 1,
        "out_is_float": 1,
        "scale_log2": pytest.approx(0.25 * math.log2(math.e)),
    }
    for member, view, axes in (
        ("latent", arguments.kv_cache, ("page", "row", "head")),
        ("rope", arguments.kv_rope, ("page", "row", "head")),
        ("q_latent", arguments.q, ("batch", "token", "head")),
        ("q_rope", arguments.q_rope, ("batch", "token", "head")),
    ):
        expected[f"{member}.base"] = view.ptr
        for axis, stride in zip(axes, view.strides[:3], strict=True):
            expected[f"{member}.stride_{axis}"] = stride
    names = ("places", "parts", "tickets", "partial_out", "partial_rows")
    for member, name in zip(("places", "parts_in", *names[2:]), names, strict=True):
        expected[member] = (9 << 40) + getattr(key.layout, name)
    latent, rope = arguments.kv_cache, arguments.kv_rope
    words = latent._replace(shape=(*latent.shape[:3], 128), dtype="uint64")
    for member, view, rows in (
        ("wide_map", words, min(box_rows, 32)),
        ("latent_map", latent, box_rows),
        ("rope_map", rope, box_rows),
    ):
        described = paged_kv_map(view.ptr, view.dtype, view.shape, view.strides, rows)
        expected[member] = mla_decode.NO_MAP if key.form == "rows" else described
    assert got == expected
    assert launch.grid == (key.row_tiles, key.parts, 2)


@pytest.mark.parametrize(
    ("page_size", "form", "columns"),
    [(64, "pages", [576]), (192, "pages", [576]), (32, "boxes", [512, 64]), (3, "rows", [])],
)
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_maps_of_each_form(page_size: int, form: str, columns: list[int], heads: int) -> None:
    """Whole pages of one array have one map; two arrays take the boxes' kernel, with a map each.

    Where several row tiles read a block there is one more, of whole rows, unless each is copied
    for itself.
    """
    key = MLADecodeKey(1, 1, heads, 1, page_size, "bfloat16", causal=True, device=0, sm_count=132)
    strides = (page_size * 1152, 1152, 1152, 2)
    latent = strided(3 << 40, (70, page_size, 1, 512), strides, "bfloat16")
    q = strided(1 << 40, (1, 1, heads, 512), (147456, 147456, 1152, 2), "bfloat16")
    table = strided(5 << 40, (1, 11), (44, 4), "int32")
    lse = strided(6 << 40, (1, heads, 1), (4 * heads, 4, 4), "float32")

    def columns_of_maps(rope: int) -> tuple[str, list[int]]:
        kv_rope = strided(rope, (70, page_size, 1, 64), strides, "bfloat16")
        q_rope = q._replace(ptr=q.ptr + 1024, shape=(1, 1, heads, 64))
        arguments = DecodeArguments(q, q_rope, latent, kv_rope, table, None, 1.0, 0.1, True)
        launch = attend_launch(key, 9 << 40, arguments, q, lse)
        maps = [value for value in launch.values if isinstance(value, TensorMap)]
        return mla_decode.form_of(key, arguments), [one.sizes[0] for one in maps]

    is_wide = heads == 128 and form != "rows"
    assert columns_of_maps((3 << 40) + 1024) == (form, columns + [144] * is_wide)
    apart = {"pages": "boxes"}.get(form, form)
    both = [] if form == "rows" else [512, 64]
    assert columns_of_maps(4 << 40) == (apart, both + [128] * is_wide)


def test_launchers_know_the_kernels_as_they_are(nvrtc: None, pytestconfig: pytest.Config) -> None:
    """The file that says so is what the compiler says today (python -m tests.launch.layouts)."""
    if not pytestconfig.getoption("exhaustive") and all(map(passed_on_a_gpu, sources().kernels)):
        pytest.skip("all kernels ran on a GPU with these parameters: --exhaustive compiles them")
    command = [sys.executable, "-m", "tests.launch.layouts", "--show"]
    told = subprocess.run(command, cwd=layouts.ROOT, capture_output=True, text=True, check=True)
    assert told.stdout == layouts.FILE.read_text("utf-8")


def test_a_struct_has_a_value_for_each_member_and_no_other() -> None:
    params = struct_of("AppendFp8CacheParams")
    names = ("to", "scales", "scale", "scale_value", "rope_is_e4m3", "power_of_two")
    given: dict[str, Any] = dict.fromkeys(names, 0) | {"to": None, "scales": None}
    scales = {"data": 1, "stride_page": 2, "stride_row": 3, "stride_head": 4}
    packed = params.layout.pack(*params.values(given | {"scales": scales, "scale": 5}))
    assert not any(packed[:-56]) and not any(packed[-16:])
    assert struct.unpack("<5q", packed[-56:-16]) == (1, 2, 3, 4, 5)
    for wrong in (
        {name: value for name, value in given.items() if name != "scale"},
        given | {"scale_": 0},
        {("scale_" if name == "scale" else name): value for name, value in given.items()},
        given | {"scales": {}},
    ):
        with pytest.raises(TypeError, match="needs a value for each of its members, got none for"):
            params.values(wrong)
    with pytest.raises(TypeError, match=r"Params\.arrivals: needs at most 8 values, got 9"):
        members = dict.fromkeys(STRUCTS["MergeStatesParams"])
        struct_of("MergeStatesParams").values(members | {"partials": (), "arrivals": [0] * 9})


def test_the_tests_read_a_plans_buffer_as_the_kernels_do(nvrtc: None) -> None:
    checks = {}
    words = "constexpr Part kWords = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, {10, 11}};"
    for name in FIELDS:
        assert PART.fields is not None
        checks[f"4 * kWords.{name}"] = PART.fields[name][1]
    seen = {"mla_schedule", "mla_decode_bfloat16", "mla_decode_bfloat16_swapped"}
    for spec in all_specs():
        if spec.entry in seen:
            compile_checks(spec, checks, words)
            seen.remove(spec.entry)
    assert not seen


def test_shared_memory_of_few_rows_has_room_for_joining(nvrtc: None) -> None:
    """8,192 and 1,024 bytes, which the next segment does not use yet."""
    spec = swapped_spec("float16", "pages")
    text, _, _ = translation_unit(spec).partition('extern "C"')
    ends = ["probabilities", "maxima", "sums", "words"]
    wanted = [f"SwappedLayout(0).{name}" for name in (*ends, "full(0)")]
    found = layouts.evaluate(text, spec.namespace, wanted)
    probabilities, maxima, sums, words, barriers = found.values()
    assert probabilities + 8192 <= maxima
    assert sums + 1024 <= words
    assert words + 2 * 4 <= barriers


@pytest.fixture
def no_driver_yet() -> Iterator[None]:
    launch_device.import_driver.cache_clear()
    yield
    launch_device.import_driver.cache_clear()


@pytest.mark.usefixtures("no_driver_yet")
def test_missing_cuda_bindings_name_both_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    layout = struct.Struct("<i")
    described = paged_kv_map(4096, "bfloat16", (6, 64, 1, 576), (73728, 1152, 1152, 2), 63)
    loaded = LoadedKernel(handle=1, spec=all_specs()[0], device=0, owner=None)
    launch = Launch(loaded.spec, (1, 1, 1), layout, (1,))
    for call in (described.encode, lambda: Template(loaded, launch).at({}, 0)):
        with pytest.raises(MissingDependencyError, match=r"^cuda\.bindings, .*imported") as missing:
            call()
        assert 'pip install "cumla[cu12]"' in str(missing.value)
        assert 'pip install "cumla[cu13]"' in str(missing.value)


class FakeDriver:
    """A driver whose launch call copies what it is shown; the rest is cuda.bindings itself."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.size = 0
        self.status: Any = 0
        self.seen: list[tuple[Any, int, bytes]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def cuLaunchKernelEx(self, config: Any, handle: int, pointers: int, extra: int) -> tuple[Any]:
        assert extra == 0
        parameters = ctypes.c_void_p.from_address(pointers).value
        assert parameters is not None
        self.seen.append((config, handle, ctypes.string_at(parameters, self.size)))
        return (self.status,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver(pytest.importorskip("cuda.bindings.driver"))
    monkeypatch.setattr(kernel, "import_driver", lambda: fake)
    kernel._config.cache_clear()
    yield fake
    kernel._config.cache_clear()


@pytest.fixture
def loaded(small: KernelSpec) -> LoadedKernel:
    return LoadedKernel(handle=0xABC, spec=small, device=3, owner=None)


def test_a_launch_shows_the_driver_what_was_prepared(
    driver: FakeDriver, loaded: LoadedKernel
) -> None:
    layout = struct.Struct("<qi4xfq")
    driver.size = layout.size
    values = (-5, 6, 0.5, Address.of("q", 0, 48))
    launch = Template(loaded, Launch(loaded.spec, (7, 2, 3), layout, values)).at({"q": 1000}, 0x20)
    launch()
    launch()
    (config, handle, parameters), again = driver.seen
    assert again[1:] == (handle, parameters)
    assert handle == 0xABC
    assert layout.unpack(parameters) == (-5, 6, 0.5, 1048)
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (7, 2, 3)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (128, 1, 1)
    assert config.sharedMemBytes == 512
    assert int(config.hStream) == 0x20
    (attribute,) = config.attrs
    assert attribute.value.programmaticStreamSerializationAllowed == 1


def test_blocks_of_a_cluster_are_launched_together(
    driver: FakeDriver, loaded: LoadedKernel
) -> None:
    layout = struct.Struct("<i")
    driver.size = layout.size
    Template(loaded, Launch(loaded.spec, (12, 1, 1), layout, (1,), 4)).at({}, 0)()
    ((config, _, _),) = driver.seen
    overlap, together = config.attrs
    assert overlap.value.programmaticStreamSerializationAllowed == 1
    dimensions = together.value.clusterDim
    assert (dimensions.x, dimensions.y, dimensions.z) == (4, 1, 1)


def test_a_refused_launch_names_kernel_stream_and_device(
    driver: FakeDriver, loaded: LoadedKernel
) -> None:
    driver.status = SimpleNamespace(name="CUDA_ERROR_INVALID_HANDLE")
    launch = Template(loaded, Launch(loaded.spec, (1, 1, 1), struct.Struct("<i"), (0,))).at(
        {}, 0x20
    )
    with pytest.raises(
        CumlaError,
        match=r"^kernel small_f32: the launch on stream 0x20 of CUDA device 3 failed with "
        r"CUDA_ERROR_INVALID_HANDLE; stream= must be a live stream of that device.*CUMLA_CHECK=1",
    ):
        launch()
