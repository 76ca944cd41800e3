# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from cumla.launch import source
from cumla.launch.module import CompiledKernel, compile_to_cubin, compiles_with_cupy
from cumla.launch.source import KernelSpec
from tests.launch.compiling import compile_debug_build, compile_once, compile_through_cupy

Compiler = Callable[[KernelSpec], CompiledKernel]

SMALL = KernelSpec("small", "small_f32", "scale<float>", "ScaleParams", 128, 2, smem_bytes=512)

SMALL_CU = """\
// SPDX-License-Identifier: Apache-2.0
#include "ptx/types.cuh"
#include "scale.cuh"

namespace cumla {

struct ScaleParams {
  float* x;
  float by;
};

template <typename T>
__device__ __forceinline__ void scale(const ScaleParams& params) {
  extern __shared__ float staged[];
  staged[threadIdx.x] = params.x[threadIdx.x];
  __syncthreads();
  params.x[threadIdx.x] = times(staged[127 - threadIdx.x], T(params.by));
}

}  // namespace cumla
"""
SCALE_CUH = """\
#pragma once
#include "ptx/types.cuh"

namespace cumla {
__device__ __forceinline__ f32 times(f32 x, f32 y) { return x * y; }
}
"""
TYPES_CUH = """\
#pragma once
namespace cumla {
using f32 = float;
}
"""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for cumla/cuda, with one small kernel in it: `SMALL`."""
    root = tmp_path / "cuda"
    (root / "ptx").mkdir(parents=True)
    (root / "small.cu").write_text(SMALL_CU)
    (root / "scale.cuh").write_text(SCALE_CUH)
    (root / "ptx" / "types.cuh").write_text(TYPES_CUH)
    monkeypatch.setattr(source, "_sources", lambda package: root)
    monkeypatch.delenv("CUMLA_DEBUG", raising=False)
    monkeypatch.delenv("CUMLA_CUBIN_DIR", raising=False)
    return root


@pytest.fixture
def small() -> KernelSpec:
    return SMALL


@pytest.fixture
def edit(sources: Path) -> Callable[[str, str, str], None]:
    """Replace text in one of the small kernel's files; fails if the text is not there."""

    def replace(name: str, old: str, new: str) -> None:
        text = (sources / name).read_text()
        assert old in text
        (sources / name).write_text(text.replace(old, new))

    return replace


@pytest.fixture
def nvrtc() -> None:
    """Skip where NVRTC or cuda.bindings is not installed."""
    from cumla.errors import MissingDependencyError
    from cumla.launch.module import bindings_nvrtc_version

    try:
        bindings_nvrtc_version()
    except MissingDependencyError as error:
        pytest.skip(str(error).split("\n")[0])


@pytest.fixture(scope="session")
def compilations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which this session's processes keep what they compiled."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compilations"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def compiled(nvrtc: None, compilations: Path) -> Compiler:
    """Compile a kernel of the package, once a session."""
    return partial(compile_once, compilations, compile_to_cubin)


@pytest.fixture
def compiled_for_debugging(nvrtc: None, compilations: Path) -> Compiler:
    """Compile a kernel's debug build, once a session."""
    return partial(compile_once, compilations, compile_debug_build)


@pytest.fixture
def cupy_compiles(nvrtc: None) -> None:
    """Skip where CuPy is not installed or does not compile."""
    cupy = pytest.importorskip("cupy")
    if not compiles_with_cupy(cupy.cuda.nvrtc.getVersion()):
        pytest.skip("this NVRTC refuses CuPy's options, so CuPy does not compile with it")


@pytest.fixture
def compiled_by_cupy(cupy_compiles: None, compilations: Path) -> Callable[[KernelSpec], bytes]:
    """Compile a kernel as CuPy does on a GPU, once a session."""
    return partial(compile_once, compilations, compile_through_cupy)
