# SPDX-License-Identifier: Apache-2.0
"""The benchmark's kernels compile for sm_90a, and their parameter structs have the size that
Python packs."""

from __future__ import annotations

import struct
from importlib import resources

import pytest

from cumla.bench import ceilings, gpu, problem
from cumla.errors import CompilationError, MissingDependencyError
from cumla.launch import module
from cumla.launch.source import KernelSpec, translation_unit

KERNELS = [
    (gpu.READ_STREAM, gpu._READ_STREAM_PARAMS),
    (gpu.SPIN, gpu._SPIN_PARAMS),
    (ceilings.EMPTY, ceilings._EMPTY_PARAMS),
    *((spec, ceilings._FILL_NORMAL_PARAMS) for spec in ceilings.FILL_NORMAL.values()),
    (ceilings.STREAM_KV, ceilings._STREAM_KV_PARAMS),
    *((spec, problem._ATTEND_ROWS_PARAMS) for spec in problem.ATTEND_ROWS.values()),
]
each_kernel = pytest.mark.parametrize(
    ("spec", "layout"), KERNELS, ids=[spec.entry for spec, _ in KERNELS]
)


@pytest.fixture(autouse=True)
def nvrtc() -> None:
    try:
        module.bindings_nvrtc_version()
    except MissingDependencyError as error:
        pytest.skip(f"no NVRTC: {error}")


@each_kernel
def test_compiles_cleanly(spec: KernelSpec, layout: struct.Struct):
    module.compile_to_cubin(spec)


@each_kernel
def test_params_are_as_large_as_packed(spec: KernelSpec, layout: struct.Struct):
    def compile_with(size: int) -> None:
        check = f"static_assert(sizeof(cumla::{spec.params}) == {size});\n"
        module._compile(spec, translation_unit(spec) + check, module.OPTIONS)

    compile_with(layout.size)
    with pytest.raises(CompilationError):
        compile_with(layout.size + 4)


def test_every_source_is_a_kernel_that_is_tested():
    folder = resources.files("cumla.bench").joinpath("cuda")
    sources = {path.name for path in folder.iterdir()}
    assert sources == {f"{spec.stem}.cu" for spec, _ in KERNELS}
