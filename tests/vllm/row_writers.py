# SPDX-License-Identifier: Apache-2.0
"""Compare the bytes that `cumla.append_mla_cache` writes with those of vLLM's Triton kernels.

``TRITON_INTERPRET=1 python row_writers.py FOLDER``: FOLDER holds vLLM's package (an unpacked
wheel). The kernels run in Triton's interpreter, on the CPU. It converts numbers to e4m3 otherwise
than GPUs, and not to e2m1: `convert` and `nearest_e2m1` take its place there. An AssertionError
says which bytes differ; the last line printed is how many rows of each format were compared.
"""

from __future__ import annotations

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

import cumla

OPS = "vllm/models/deepseek_v41/common/ops"
PAGE, PAGES = 64, 3


_convert = interpreter._convert_float


def convert(data: Any, given: Any, wanted: Any, mode: Any) -> Any:
    """Convert between float32 and e4m3 as GPUs do, to the nearest, of two as near the even one."""
    dtypes = {
        tl.float8e4nv: ml_dtypes.float8_e4m3fn,
        tl.bfloat16: ml_dtypes.bfloat16,
        tl.float32: np.float32,
    }
    if tl.float8e4nv in (given, wanted):
        numbers = np.ascontiguousarray(data).view(dtypes[given]).astype(dtypes[wanted])
        return numbers.view(np.uint8) if wanted == tl.float8e4nv else numbers
    return _convert(data, given, wanted, mode)


class _Any(ModuleType):
    """A module whose every name is a class that takes anything."""

    def __getattr__(self, name: str) -> Any:
        takes = {"__init__": lambda self, *_, **__: None, "__call__": lambda self, it: it}
        return type(name, (), takes | {"__class_getitem__": classmethod(lambda cls, _: cls)})


def load(folder: str, path: str, **given: Any) -> ModuleType:
    """Load one of vLLM's files; `given` are what modules that it imports have."""
    file = Path(folder, path)
    named = re.findall(r"^(?:from|import) (vllm[.\w]*)", file.read_text("utf-8"), re.M)
    modules: dict[str, Any] = {name: _Any(name) for name in ("vllm", *named)}
    platform = SimpleNamespace(
        is_rocm=lambda: False, is_cuda=lambda: True, is_fp8_fnuz=lambda: False
    )
    modules["vllm.platforms"] = SimpleNamespace(current_platform=platform)
    modules["vllm.triton_utils"] = SimpleNamespace(triton=triton, tl=tl)
    modules |= {name: SimpleNamespace(**names) for name, names in given.items()}
    spec = spec_from_file_location(f"vllm_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    with mock.patch.dict(sys.modules, modules):
        spec.loader.exec_module(module)
    return module


def rows(seed: int = 0) -> Any:
    """(n, 512) bfloat16: magnitudes from 2^-30 to 2^20, zeros, ties, and powers of two times 448
    and 6, where scales step."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal((96, 512)) * np.exp2(rng.integers(-30, 21, (96, 1)))
    groups = rng.standard_normal((24, 32, 16)) * np.exp2(rng.integers(-12, 8, (24, 32, 1)))
    steps = np.sign(rng.standard_normal((24, 512))) * np.exp2(rng.integers(-14, 9, (24, 512)))
    steps[::2] *= rng.choice([448.0, 6.0, 447.0, 449.0, 5.0, 0.25, 1.25], (12, 512))
    few = np.zeros((4, 512))
    few[1, 100], few[2, 511], few[3] = 1.0, -1e-5, 2.0**-133
    found = np.concatenate([normal, groups.reshape(24, 512), steps, few])
    return torch.from_numpy(found.astype(np.float32)).bfloat16()


def slots(count: int) -> Any:
    """A slot for each row, one of them none."""
    found = torch.randperm(PAGE * PAGES, generator=torch.Generator().manual_seed(1))[:count]
    found[3] = -1
    return found


def written(form: str | None, given: Any, places: Any, nbytes: int) -> Any:
    cache = torch.full((PAGES, PAGE, 1, nbytes), 0xAA, dtype=torch.uint8)
    cumla.append_mla_cache(given, cache, places, cache_format=form)
    return cache.view(PAGES, -1)


def compare(form: str | None, got: Any, want: Any) -> None:
    wrong = (got != want).nonzero()
    assert not len(wrong), f"{form}: {len(wrong)} bytes, first at {wrong[0].tolist()}"
    assert bool((got == 0xAA).any())  # of slots of nobody


def compare_e4m3(folder: str, form: str | None, nbytes: int) -> int:
    """V4's slots, whose scales are behind all rows of a page, or V4.1's rows."""
    ops = load(folder, f"{OPS}/cache_utils.py")
    given = rows()
    places = slots(len(given))
    cache = torch.full((PAGES, PAGE * nbytes), 0xAA, dtype=torch.uint8)
    ops.quantize_and_insert_k_cache(given, cache, places, PAGE, bytes_per_token=nbytes)
    compare(form, written(form, given, places, nbytes), cache)
    return len(given)


def nearest_e2m1(lo: Any, hi: Any) -> Any:
    """In the place of an instruction: two numbers as e2m1, of ties the even code, in a byte."""
    found = []
    for values in (lo, hi):
        size = tl.abs(values)
        code = tl.zeros_like(size).to(tl.uint8)
        code += (size > 0.25).to(tl.uint8)
        code += (size >= 0.75).to(tl.uint8)
        code += (size > 1.25).to(tl.uint8)
        code += (size >= 1.75).to(tl.uint8)
        code += (size > 2.5).to(tl.uint8)
        code += (size >= 3.5).to(tl.uint8)
        code += (size > 5.0).to(tl.uint8)
        sign = (values.to(tl.int32, bitcast=True) < 0).to(tl.uint8)
        found += [code | sign << 3]
    return found[0] | found[1] << 4


def compare_fp4(folder: str) -> int:
    """V4.1's rows of 288 bytes."""
    converts = {"_fp32x2_to_fp4x2": triton.jit(nearest_e2m1)}
    given_names = {"vllm.models.deepseek_v4.common.ops.fused_indexer_q": converts}
    ops = load(folder, f"{OPS}/fused_compress_quant_cache.py", **given_names)
    given = rows(1)
    places = slots(len(given))
    angles = torch.cat([torch.ones(8, 32), torch.zeros(8, 32)], 1)
    positions = torch.full((len(given),), 7)
    cache = torch.full((PAGES, PAGE * 288), 0xAA, dtype=torch.uint8)
    ops._rope_quant_insert_nvfp4_kernel[(len(given),)](
        *(given, positions, angles, cache, places),
        COS_STRIDE=64,
        CACHE_STRIDE=PAGE * 288,
        CACHE_BLOCK=PAGE,
        COMPRESS_RATIO=1,
        SANITIZE_CACHE_NANS=False,
    )
    compare("v41_fp4", written("v41_fp4", given, places, 288), cache)
    return len(given)


def main(folder: str) -> None:
    interpreter._convert_float = convert
    counts = [compare_e4m3(folder, None, 584), compare_e4m3(folder, "v41", 528)]
    print(*counts, compare_fp4(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
