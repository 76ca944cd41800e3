# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled for sm_90a without a GPU: resources, errors, and both ways of compiling."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from cumla.errors import CompilationError
from cumla.launch import all_specs, module
from cumla.launch.module import bindings_nvrtc_version, compile_to_cubin
from cumla.launch.source import KernelSpec, translation_unit
from tests.gpu.tools import record
from tests.gpu.tools.cubins import sections
from tests.launch.compiling import FIRST_OF_FILES, SOME, asked_by_cupy, is_twin
from tests.launch.conftest import Compiler
from tests.launch.operands import written_early
from tests.sources import sources

pytestmark = pytest.mark.usefixtures("nvrtc")

REGISTER_FILE = 65536  # registers of a multiprocessor
_SETMAXNREG = 0x9C8  # the instruction of machine code, USETMAXREG
_GIVES, _TAKES = 5, 6  # its forms
SHARES = 24  # of the kernels: processes compile beside each other


@cache
def recorded(stem: str) -> dict[str, dict[str, Any]]:
    """What the evidence says of a file's kernels: digests of their texts and machine code."""
    found: dict[str, dict[str, Any]] = record.read(record.FOLDER, stem).get("entries", {})
    return found


def run_on_a_gpu(spec: KernelSpec) -> bool:
    """Return whether a run of this text was recorded."""
    known = recorded(spec.stem).get(spec.entry, {})
    return known.get("source") == sources().kernels[spec.stem]["entries"][spec.entry]


def asked_registers(code: bytes, form: int) -> set[int]:
    """Registers of a thread that a kernel's warpgroups have after setmaxnreg.dec, or .inc."""
    instructions = struct.iter_unpack("<QQ", code)
    return {
        low >> 32
        for low, high in instructions
        if low & 0xFFF == _SETMAXNREG and high >> 8 & 7 == form
    }


def most_registers(spec: KernelSpec, code: bytes) -> int:
    """Registers that the warpgroups of a block hold after setmaxnreg; 0 if it has none.

    Each setmaxnreg.dec is that of one warpgroup, and the others execute setmaxnreg.inc; two
    warpgroups load in the kernels of `attention` that have four.
    """
    gives, takes = (sorted(asked_registers(code, form)) for form in (_GIVES, _TAKES))
    if not gives and not takes:
        return 0
    (taken,) = takes
    loaders = gives * 2 if (spec.stem, spec.threads) == ("attention", 512) else gives
    return 128 * (sum(loaders) + taken * (spec.threads // 128 - len(loaders)))


two_files = pytest.mark.parametrize(
    "spec",
    [
        pytest.param(
            spec,
            id=spec.entry,
            marks=() if stem in ("paged_mqa_logits", "quantize_fp8") else pytest.mark.exhaustive,
        )
        for stem, spec in FIRST_OF_FILES.items()
    ],
)
"""One kernel of a file with waits and of one without, soon compiled; of all with --exhaustive."""


@pytest.mark.parametrize("share", range(SHARES))
def test_every_kernel_compiles_within_its_budget(
    share: int, compiled: Compiler, pytestconfig: pytest.Config
):
    """Some, and all whose text has not been compiled and run on a GPU yet."""
    exhaustive = pytestconfig.getoption("exhaustive")
    for spec in all_specs()[share::SHARES]:
        if exhaustive or spec in SOME or not (is_twin(spec) or run_on_a_gpu(spec)):
            kernel = compiled(spec)
            code = sections(kernel.cubin)[f".text.{spec.entry}"]
            assert len(code) > 0
            found = kernel.spills, kernel.stack, kernel.remarks
            assert found == (0, 0, ()), spec.entry
            given = kernel.registers * spec.threads
            assert given * spec.min_blocks <= REGISTER_FILE, spec.entry
            held = most_registers(spec, code)
            assert held <= given, f"{spec.entry} waits for registers that no warpgroup gives up"
            if held:  # what tests/emulator/runtime.cpp takes for granted
                assert kernel.registers == REGISTER_FILE // spec.threads // 8 * 8, spec.entry
            assert spec.smem_bytes <= kernel.smem <= 227 * 1024, spec.entry
            assert written_early(code) == [], spec.entry


def test_operands_of_products_that_are_written_early_are_found(monkeypatch: pytest.MonkeyPatch):
    """Without an operation on the keys that are loaded, ptxas loads the next ones into operands."""
    spec = next(s for s in all_specs() if s.entry == "block_scores_prompts_bfloat16")
    text, made = translation_unit(spec), []
    assert " ^ zero" in text
    for of_spec in (text, text.replace(" ^ zero", "")):
        monkeypatch.setattr(module, "translation_unit", lambda *_, of_spec=of_spec, **__: of_spec)
        code = sections(compile_to_cubin(spec).cubin)[f".text.{spec.entry}"]
        made.append(len(written_early(code)))
    assert made[0] == 0
    assert made[1] > 0


@two_files
def test_debug_build_compiles_and_is_another(
    spec: KernelSpec, compiled: Compiler, compiled_for_debugging: Compiler
):
    name = f".text.{spec.entry}"
    debug = sections(compiled_for_debugging(spec).cubin)[name]
    waits = "mbarrier_wait(" in translation_unit(spec)
    assert (debug != sections(compiled(spec).cubin)[name]) == waits


@two_files
def test_cupy_and_nvrtc_make_the_same_code(
    spec: KernelSpec, compiled: Compiler, compiled_by_cupy: Callable[[KernelSpec], bytes]
):
    theirs = sections(compiled_by_cupy(spec))
    import cupy

    assert tuple(cupy.cuda.nvrtc.getVersion()) == bindings_nvrtc_version()
    name = f".text.{spec.entry}"
    assert sections(compiled(spec).cubin)[name] == theirs[name]


@pytest.mark.parametrize("stem", FIRST_OF_FILES)
@pytest.mark.usefixtures("cupy_compiles")
def test_cupy_asks_nvrtc_for_every_kernel_alike(stem: str):
    """For its source, and else for what makes the same code of the first kernel of its file."""
    asked = {spec: asked_by_cupy(spec) for spec in all_specs() if spec.stem == stem}
    first = asked[FIRST_OF_FILES[stem]]
    for spec, of_spec in asked.items():
        assert of_spec.source == translation_unit(spec)
        assert of_spec.headers == ()
        assert (of_spec.options, of_spec.method) == (first.options, first.method)


def test_resources_are_those_of_the_kernel(sources, small, edit):
    kernel = compile_to_cubin(small)
    assert kernel.smem == 512
    assert 0 < kernel.registers <= 64
    edit("small.cu", "extern __shared__ float staged[];", "__shared__ float staged[300];")
    assert compile_to_cubin(replace(small, smem_bytes=100)).smem == 1300


def test_a_cubin_from_the_cache_of_the_driver_is_compiled_again(sources, small, monkeypatch):
    """NVRTC takes it from there where there is a GPU, and then ptxas reports nothing."""
    compiled, asked = module._compile, []

    def cached(spec, text, options):
        asked.append(options)
        cubin, log = compiled(spec, text, options)
        return cubin, log if "--no-cache" in options else ""

    monkeypatch.setattr(module, "_compile", cached)
    assert compile_to_cubin(small).smem == 512
    assert ["--no-cache" in options for options in asked] == [False, True]


def test_spill_or_stack_frame_fails(sources, small, edit):
    edit(
        "small.cu",
        "params.x[threadIdx.x] = times",
        "float kept[64];\n"
        "  for (int i = 0; i < 64; ++i) kept[i] = params.x[i];\n"
        "  for (int i = 0; i < int(params.by); ++i) kept[i & 63] += kept[int(kept[i & 31]) & 63];\n"
        "  params.x[threadIdx.x] = kept[int(params.by) & 63] + times",
    )
    version = "{}.{}".format(*bindings_nvrtc_version())
    message = (
        rf"small_f32 compiles, but with NVRTC {version} .*stack frame of \d+ bytes; "
        r"NVRTC 12\.9 and 13\.0 fit all kernels: pip install "
    )
    with pytest.raises(CompilationError, match=message):
        compile_to_cubin(small)
    assert compile_to_cubin(small, debug=True).stack > 0


def test_registers_that_setmaxnreg_asks_for_are_found(sources, small, edit):
    """As the disassembler shows them: 40 are given up, 232 taken."""
    edit(
        "small.cu",
        "__syncthreads();",
        "__syncthreads();\n"
        '  if (threadIdx.x < 128) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");\n'
        '  else asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");\n',
    )
    wide = replace(small, threads=384, min_blocks=1)
    kernel = compile_to_cubin(wide)
    code = sections(kernel.cubin)[f".text.{wide.entry}"]
    assert (asked_registers(code, _GIVES), asked_registers(code, _TAKES)) == ({40}, {232})
    assert most_registers(wide, code) == 128 * (40 + 2 * 232) == kernel.registers * 384
    edit("small.cu", "u32 232;", "u32 240;")
    kernel = compile_to_cubin(wide)
    code = sections(kernel.cubin)[f".text.{wide.entry}"]
    assert most_registers(wide, code) > kernel.registers * 384  # such a kernel would hang


def test_ptxas_remark_fails(sources, small, edit):
    edit(
        "small.cu",
        "__syncthreads();",
        '__syncthreads();\n  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");',
    )
    loose = replace(small, entry="loose")
    text = translation_unit(loose).replace("__launch_bounds__(128, 2)", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cumla.launch.module.translation_unit", lambda spec, debug: text)
        with pytest.raises(CompilationError, match=r"ptxas remarks: .*\(C7508\).*setmaxnreg"):
            compile_to_cubin(loose)


def test_too_much_shared_memory_fails(sources, small):
    with pytest.raises(CompilationError, match="needs 232449 bytes of shared memory, of 232448"):
        compile_to_cubin(replace(small, smem_bytes=227 * 1024 + 1))


def test_failure_shows_the_log_and_the_numbered_source(sources, small, edit):
    edit("scale.cuh", "return x * y;", "return x * z;")
    with pytest.raises(CompilationError) as failure:
        compile_to_cubin(small)
    message = str(failure.value)
    assert "kernel small_f32 (cumla/cuda/small.cu) does not compile" in message
    assert 'cumla/cuda/scale.cuh(5): error: identifier "z" is undefined' in message
    assert (
        ">    5 | __device__ __forceinline__ f32 times(f32 x, f32 y) { return x * z; }" in message
    )


def test_no_nvrtc_is_a_missing_dependency(sources, small, monkeypatch):
    from cuda.bindings import nvrtc

    from cumla.errors import MissingDependencyError

    def absent() -> None:
        raise RuntimeError('"nvrtc" was not found\nsearched: everywhere')

    monkeypatch.setattr(nvrtc, "nvrtcVersion", absent)
    with pytest.raises(MissingDependencyError, match=r'found no NVRTC \("nvrtc" was not found\)'):
        compile_to_cubin(small)
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    with pytest.raises(MissingDependencyError, match=r"cuda\.bindings, which compiles"):
        compile_to_cubin(small)
