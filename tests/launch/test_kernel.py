# SPDX-License-Identifier: Apache-2.0
"""Launches: the bytes of the parameter structs, what the driver is asked, and what it refuses."""

from __future__ import annotations

import ctypes
import math
import pkgutil
import re
import struct
import sys
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

import cumla.launch
from cumla.core.arrays import ArrayView
from cumla.core.operation import Address
from cumla.errors import CompilationError, CumlaError, MissingDependencyError
from cumla.launch import KernelSpec, all_specs, kernel, module
from cumla.launch import device as launch_device
from cumla.launch.kernel import Launch, Template
from cumla.launch.mla import mla_decode
from cumla.launch.mla.choice import attend_launch, decode_specs
from cumla.launch.mla.mla_decode import DecodeArguments
from cumla.launch.mla.shape import SWAPPED_ROWS, VARIANTS, MLADecodeKey
from cumla.launch.module import LoadedKernel
from cumla.launch.source import translation_unit
from cumla.launch.sparse import mla_sparse, mla_sparse_fp8, select_rows
from cumla.launch.split import plan as mla_plan
from cumla.launch.split.division import divisor_of
from cumla.launch.tensor_map import TensorMap, paged_kv_map
from tests.gpu.tools.parts import PART
from tests.launch.structs import compile_checks, members_of

each_struct = pytest.mark.parametrize(
    "spec",
    {(spec.stem, spec.params): spec for spec in all_specs()}.values(),
    ids=lambda spec: f"{spec.stem}-{spec.params}",
)


BY_NAME = {  # of launchers of several structs, or of another family's
    "BoundRowsParams": select_rows._BOUND_PARAMS,
    "SelectRowsParams": select_rows._SELECT_PARAMS,
    "MlaSparseFp8Params": mla_sparse_fp8._PACKED_PARAMS,
    "MlaDecodeParams": mla_decode._PARAMS,
    "MlaSparseMaxLogitsParams": mla_sparse._MAX_LOGITS_PARAMS,
}


def layout_of(spec: KernelSpec) -> struct.Struct:
    """The struct that launchers pack for it; kernels of a family may share one."""
    if spec.params in BY_NAME:
        return BY_NAME[spec.params]
    wanted = spec.package, spec.params
    for found in pkgutil.walk_packages(cumla.launch.__path__, "cumla.launch."):
        launcher = import_module(found.name)
        packs = {(each.package, each.params) for each in getattr(launcher, "SPECS", ())}
        layout = vars(launcher).get("_PARAMS") or vars(launcher).get("PARAMS")
        if wanted in packs and layout:
            assert isinstance(layout, struct.Struct)
            return layout
    raise AssertionError(f"no launcher of {spec.entry}")


def packed_in(layout: struct.Struct) -> list[tuple[str, int]]:
    """What a layout without gaps of its own packs: a letter, and where it lies."""
    values, offset = [], 0
    for count, letter in re.findall(r"(\d*)([a-zA-Z])", layout.format):
        if letter in "sx":
            size, repeats = int(count or 1), 1
        else:
            size, repeats = struct.calcsize(f"<{letter}"), int(count or 1)
        for _ in range(repeats):
            if letter != "x":
                values.append((letter.lower(), offset))
            offset += size
    assert layout.format.startswith("<")
    assert offset == layout.size
    return values


@each_struct
def test_params_are_packed_as_the_kernel_reads_them(spec: KernelSpec, nvrtc: None) -> None:
    """To the byte, as the compiler places the members (NVRTC has offsetof under this name only).

    Their size alone does not tell: padding at the end hides a member of another size.
    """
    text, _, _ = translation_unit(spec).partition('extern "C"')
    layout = layout_of(spec)
    members, packed = members_of(text, spec.params), packed_in(layout)
    assert [letter for letter, _ in packed] == [*members.values()]
    checks = {f"sizeof({spec.params})": layout.size}
    for name, (_, offset) in zip(members, packed, strict=True):
        checks[f"__INTADDR__(&(({spec.params}*)0)->{name})"] = offset
    compile_checks(spec, checks)
    if spec.stem == "mla_decode":  # each kind of check finds another number
        for what in (next(iter(checks)), next(reversed(checks))):
            with pytest.raises(CompilationError, match="differs"):
                compile_checks(spec, {what: checks[what] + 8})


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
    text, _, _ = translation_unit(launch.spec).partition('extern "C"')
    got = dict(zip(members_of(text, launch.spec.params), launch.values, strict=True))

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
        "by_page_size.magic": divisor_of(page_size)[0],
        "by_page_size.shift": divisor_of(page_size)[1],
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


def test_what_a_plans_buffer_holds_is_as_the_kernels_see_it(nvrtc: None) -> None:
    """Sizes and places of both sides: the launcher's layout, and the tests' reading of it."""
    checks = {
        "sizeof(Place)": mla_plan.PLACE_BYTES,
        "sizeof(Part)": mla_plan.PART_BYTES,
        "sizeof(Ticket)": mla_plan.TICKET_BYTES,
        "kBlockTokens": mla_plan.BLOCK_TOKENS,
        "kRowTile": mla_plan.ROW_TILE,
        "kRowGroup": mla_plan.ROW_GROUP,
    }
    words = "constexpr Part kWords = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, {10, 11}};"
    for name in PART.names or ():
        assert PART.fields is not None
        checks[f"4 * kWords.{name}"] = PART.fields[name][1]
    seen = {"mla_schedule", "mla_decode_bfloat16", "mla_decode_bfloat16_swapped"}
    for spec in all_specs():
        if spec.entry in seen:
            compile_checks(spec, checks, words)
            seen.remove(spec.entry)
    assert not seen


@pytest.mark.parametrize(
    ("dtype", "variant", "nbytes", "checks"),
    [
        ("bfloat16", "one_tile", 232160, {"layout.pacer(2 * kWarpgroup)": 232160}),
        (
            "float16",
            "swapped",
            24 * 8192 + 32768 + 8 * 16 * 4 + (16 + 2) * 16 * 4 + 16 + (2 * 24 + 4) * 8,
            {
                "kSwappedRows": SWAPPED_ROWS,
                "layout.query_free() + 8": 231472,
                "layout.probabilities - layout.query": 9 * 16 * 128,
                # what the joining is given: 8,192 and 1,024 bytes, before the next segment
                "layout.probabilities + 8192 <= layout.maxima": True,
                "layout.sums + 1024 <= layout.words": True,
                "layout.words + 2 * 4 <= layout.full(0)": True,
            },
        ),
    ],
    ids=["tiles", "swapped"],
)
def test_shared_memory_holds_its_layout(
    dtype: str, variant: str, nbytes: int, checks: dict[str, int], nvrtc: None
) -> None:
    """To the byte: the layout's own functions, made constant expressions, give its end."""
    spec = decode_specs(dtype, 64)[VARIANTS.index(variant)]
    assert spec.smem_bytes == nbytes
    name = "SwappedLayout" if variant == "swapped" else "SharedLayout"
    whole, _, _ = translation_unit(spec).partition('extern "C"')
    functions = "full|free|begun|probabilities_full|query_full|query_free|pacer"
    constant, found = re.subn(
        rf"__device__ __forceinline__ (explicit {name}\(|u32 (?:{functions})\()",
        r"__device__ constexpr \1",
        whole,
    )
    assert found >= 5

    def compile_with(checks: dict[str, int]) -> None:
        lines = [f'static_assert(({it}) == {int(n)}, "differs");' for it, n in checks.items()]
        text = "\n".join([constant, f"constexpr {name} layout(0);", *lines, ""])
        module._compile(spec, text, module.OPTIONS)

    compile_with(checks)
    with pytest.raises(CompilationError, match="differs"):
        compile_with({"layout.query_free()": 0})


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
