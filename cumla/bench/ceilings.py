# SPDX-License-Identifier: Apache-2.0
"""The ceilings of the GPU at hand, measured in the run whose results are held against them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cumla.bench.cases import PAGE_SIZE, Ceilings
from cumla.bench.gpu import DTYPES, Gpu, bench_spec
from cumla.bench.timing import time_cold, time_sustained
from cumla.launch.mla.shape import HEAD_DIM
from cumla.launch.tensor_map import paged_kv_map

EMPTY = bench_spec("empty", "EmptyParams", 32)
FILL_NORMAL = {
    dtype: bench_spec("fill_normal", "FillNormalParams", 256, dtype=dtype) for dtype in DTYPES
}
STREAM_KV = bench_spec("stream_kv", "StreamKvParams", 1, smem_bytes=148480)

_EMPTY_PARAMS = struct.Struct("<i")
_FILL_NORMAL_PARAMS = struct.Struct("<QqQf4x")
_STREAM_KV_PARAMS = struct.Struct("<128sQi52x")  # the tensor map aligns the struct to 64 bytes

MATMUL_SIZE = 8192
_ROW_BYTES = 2 * HEAD_DIM
_NO_TRANSPOSE, _BFLOAT16, _COMPUTE_FLOAT32, _DEFAULT_ALGORITHM = 0, 14, 68, -1  # of cuBLAS


def fill_normal(gpu: Gpu, array: Any, dtype: str, *, seed: int, deviation: float) -> None:
    """Fill a contiguous uint16 array with the bits of normal numbers."""
    values = (gpu.address(array), array.size // 2, seed, deviation)
    gpu.launch(FILL_NORMAL[dtype], 8 * gpu.properties.sm_count, _FILL_NORMAL_PARAMS, values)


def measure(gpu: Gpu) -> Ceilings:
    """Measure what memory, tensor cores and launches of this GPU can do at best."""
    large = gpu.streamed
    fill_normal(gpu, large, "bfloat16", seed=1, deviation=1.0)
    half = large.size // 2
    read = time_cold(gpu, lambda: gpu.read(large), repeats=15)
    copy = time_cold(gpu, lambda: gpu.copy(large[half:], large[:half]), repeats=15)
    product, stream = _matmul(gpu, large)
    with stream:
        matmul = time_cold(gpu, product, repeats=15)
    empty = time_cold(gpu, lambda: gpu.launch(EMPTY, 1, _EMPTY_PARAMS, (0,)))
    with stream:  # last, because it heats the GPU
        sustained_us = time_sustained(gpu, product, matmul.us)
    return Ceilings(
        read_gbps=large.nbytes / (read.us * 1e3),
        copy_gbps=large.nbytes / (copy.us * 1e3),  # half of it read, half of it written
        matmul_tflops=product_tflops(matmul.us),
        empty_us=empty.us,
        sustained_tflops=product_tflops(sustained_us),
    )


def product_tflops(us: float) -> float:
    """Rate of a product of matrices of `MATMUL_SIZE` rows and columns."""
    return 2 * MATMUL_SIZE**3 / (us * 1e6)


def _matmul(gpu: Gpu, large: Any) -> tuple[Callable[[], None], AbstractContextManager[object]]:
    """Make a product of bfloat16 matrices in the memory of `large`, and what to run it inside."""
    size = MATMUL_SIZE**2
    matrices = [large[i * size : (i + 1) * size] for i in range(3)]
    if find_spec("torch") is None:
        return _cublas_product(gpu, *(gpu.address(matrix) for matrix in matrices)), nullcontext()
    torch = import_module("torch")
    shape = (MATMUL_SIZE, MATMUL_SIZE)
    a, b, c = (
        torch.from_dlpack(matrix.view("int16")).view(torch.bfloat16).reshape(shape)
        for matrix in matrices
    )

    def product() -> None:
        torch.matmul(a, b, out=c)

    return product, gpu.torch_stream(torch)


def _cublas_product(gpu: Gpu, a: int, b: int, c: int) -> Callable[[], None]:
    """Do the same through CuPy's cuBLAS where PyTorch is not installed."""
    cublas = import_module("cupy_backends.cuda.libs.cublas")
    handle = import_module("cupy.cuda.device").get_cublas_handle()
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    n = MATMUL_SIZE

    def product() -> None:
        cublas.setStream(handle, gpu.stream.ptr)
        cublas.gemmEx(
            *(handle, _NO_TRANSPOSE, _NO_TRANSPOSE, n, n, n),
            *(one.ctypes.data, a, _BFLOAT16, n, b, _BFLOAT16, n),
            *(zero.ctypes.data, c, _BFLOAT16, n, _COMPUTE_FLOAT32, _DEFAULT_ALGORITHM),
        )

    return product


def stream_only(gpu: Gpu, kv: Any, pages: NDArray[np.int32]) -> Callable[[], None]:
    """Make a call of a kernel that brings pages into shared memory and does nothing else."""
    heads = kv.shape[2]  # a page of several kv heads is as many pages of one in a row
    shape = (kv.shape[0] * heads, PAGE_SIZE, 1, HEAD_DIM)
    strides = (PAGE_SIZE * _ROW_BYTES, _ROW_BYTES, _ROW_BYTES)
    descriptor = paged_kv_map(gpu.address(kv), "bfloat16", shape, strides, PAGE_SIZE)
    order = gpu.upload((pages[:, None] * heads + np.arange(heads, dtype=np.int32)).ravel())
    blocks = gpu.properties.sm_count

    def stream() -> None:
        values = (descriptor, gpu.address(order), order.size)
        gpu.launch(STREAM_KV, blocks, _STREAM_KV_PARAMS, values)

    return stream
