# SPDX-License-Identifier: Apache-2.0
"""The ceilings that `cumla.bench` measures, and that of products of float8_e4m3fn."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from cumla.bench import ceilings as base
from cumla.bench.cases import Ceilings
from cumla.bench.gpu import Gpu
from cumla.bench.timing import time_cold

__all__ = ["measure"]

_FP8_RATIO = 1356 / 754  # of the products of the two dtypes, on an H200


def measure(gpu: Gpu) -> Ceilings:
    """Measure all ceilings; without PyTorch's FP8 product, scale that of bfloat16.

    CuPy has no binding of cuBLASLt, where such products are.
    """
    made = _fp8_matmul(gpu, gpu.streamed)
    if made is None:
        found = base.measure(gpu)
        return replace(found, fp8_tflops=found.matmul_tflops * _FP8_RATIO, fp8_scaled=True)
    product, stream = made
    with stream:  # before the others, the last of which heats the GPU
        us = time_cold(gpu, product, repeats=15).us
    return replace(base.measure(gpu), fp8_tflops=base.product_tflops(us))


def _fp8_matmul(
    gpu: Gpu, large: Any
) -> tuple[Callable[[], object], AbstractContextManager[object]] | None:
    """Make a product of normal numbers as float8_e4m3fn, if PyTorch has it."""
    if find_spec("torch") is None:
        return None
    torch = import_module("torch")
    if not hasattr(torch, "_scaled_mm"):
        return None
    n = base.MATMUL_SIZE
    base.fill_normal(gpu, large, "bfloat16", seed=1, deviation=1.0)
    with gpu.torch_stream(torch):
        a, b = (
            torch.from_dlpack(large[i * n * n : (i + 1) * n * n].view("int16"))
            .view(torch.bfloat16)
            .reshape(n, n)
            .to(torch.float8_e4m3fn)
            for i in range(2)
        )
        one = torch.ones((), dtype=torch.float32, device=a.device)

    def product() -> object:
        return torch._scaled_mm(
            a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return product, gpu.torch_stream(torch)
