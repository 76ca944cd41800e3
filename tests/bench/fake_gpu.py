# SPDX-License-Identifier: Apache-2.0
"""A GPU made of NumPy: the benchmark's own kernels in other words, and a clock that work advances.

The public functions of cumla compute NumPy arrays through the reference, so a benchmark can run
from end to end on it. Parameter structs are packed as for a real launch and read from the bytes.
`FakeCumla` takes the place of the package in `cumla.bench.problem`, which holds all calls of it.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np

import cumla
from cumla import reference
from cumla.bench.cases import Ceilings
from cumla.bench.ceilings import EMPTY, FILL_NORMAL, STREAM_KV
from cumla.bench.gpu import DTYPES, SPIN
from cumla.bench.problem import ATTEND_ROWS
from cumla.bench.section import Bench, Limits
from cumla.bench.timing import time_cold
from cumla.launch.source import KernelSpec
from cumla.launch.tensor_map import TensorMap

LAUNCH_US = 5.0
FLUSH_US = 1000.0
HOLD_US = 100.0


class FakeGpu:
    """Stands in for `cumla.bench.gpu.Gpu`."""

    ordinal = 0
    properties = SimpleNamespace(name="Fake GPU", sm_count=4)

    def __init__(self) -> None:
        self.now = 0.0
        self.launched: list[str] = []
        self.streamed = np.zeros(1 << 16, np.uint16)

    def __enter__(self) -> FakeGpu:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        array = np.empty(shape, dtype)
        array.view(np.uint8).fill(0x7F)  # a NaN as bfloat16
        return array

    def upload(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def download(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def address(self, array: np.ndarray) -> int:
        assert array.flags.c_contiguous
        return array.ctypes.data

    def fill_bytes(self, array: np.ndarray, value: int) -> None:
        array.view(np.uint8).fill(value)

    def copy(self, destination: np.ndarray, source: np.ndarray) -> None:
        destination[...] = source
        self.now += LAUNCH_US

    def read(self, array: np.ndarray) -> None:
        assert array.nbytes % 16 == 0
        self.now += LAUNCH_US

    def flush_l2(self) -> None:
        self.now += FLUSH_US

    def hold(self) -> None:
        self.now += HOLD_US

    def release(self) -> None:
        pass

    def free_bytes(self) -> int:
        return 1 << 30

    def torch_stream(self, torch: Any) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self) -> float:
        return self.now

    def elapsed_us(self, begin: float, end: float) -> float:
        return end - begin

    def rest(self) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        pass

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return work

    def launch(
        self, spec: KernelSpec, blocks: int, layout: struct.Struct, values: Sequence[Any]
    ) -> None:
        self.launched.append(spec.function)
        self.now += LAUNCH_US
        fields = (bytes(128) if isinstance(value, TensorMap) else value for value in values)
        _KERNELS[spec](blocks, *layout.unpack(layout.pack(*fields)))


class FakeCumla:
    """The public functions, each of which takes LAUNCH_US of a fake GPU.

    `spoil(name, arguments, options)` is called after each, and `calls` lists their names.
    """

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.calls: list[str] = []
        self.spoil: Callable[..., None] = lambda *of: None

    def __getattr__(self, name: str) -> Any:
        public = getattr(cumla, name)
        if not isinstance(public, type):
            return self._timed(name, public)
        timed = self._timed(name, public.run)

        def run(plan: Any, *arguments: Any, **options: Any) -> Any:
            return timed(plan, *arguments, **options)

        return type(name, (public,), {"run": run})

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            self.gpu.now += LAUNCH_US
            self.calls.append(name)
            self.spoil(name, arguments, options)
            return result

        return call


CEILINGS = Ceilings(4468.0, 4191.0, 754.0, 3.7, fp8_tflops=1356.0, sustained_tflops=650.0)
LIMITS = Limits(2, 2, 3, 2 * 10**6)


def fake_bench(gpu: FakeGpu) -> Bench:
    """A bench whose graphs are short, and whose clock is exact: two runs say what thirty do."""

    def timer(gpu: Any, work: Any, *, repeats: int = 2, warmup: int = 1) -> Any:
        return time_cold(gpu, work, repeats=2, warmup=1)

    return Bench(gpu, CEILINGS, timer, limits=LIMITS)  # type: ignore[arg-type]


def _fill_normal(
    dtype: Any, blocks: int, destination: int, words: int, seed: int, deviation: float
) -> None:
    memory(destination, (2 * words,), "uint16")[...] = _normal(dtype, words, seed, deviation)


@lru_cache(maxsize=64)  # the kinds that one benchmark asks for
def _normal(dtype: Any, words: int, seed: int, deviation: float) -> np.ndarray:
    numbers = np.random.default_rng(seed).standard_normal(2 * words) * deviation
    return numbers.astype(dtype).view(np.uint16)


def _attend_rows(
    dtype: Any,
    blocks: int,
    q: int,
    kv: int,
    table: int,
    table_stride: int,
    seqlens: int,
    rows: int,
    out: int,
    lse: int,
    scale: float,
    q_len: int,
    heads: int,
    kv_heads: int,
    causal: int,
) -> None:
    chosen = memory(rows, (blocks, 3), "int32")
    batch = int(chosen[:, 0].max()) + 1
    tables = memory(table, (batch, table_stride), "int32")
    got = reference.mla_decode(
        memory(q, (batch, q_len, heads, 576), "uint16").view(dtype),
        memory(kv, (int(tables.max()) + 1, 64, kv_heads, 576), "uint16").view(dtype),
        tables,
        memory(seqlens, (batch,), "int32"),
        softmax_scale=scale,
        causal=bool(causal),
        out=np.empty((batch, q_len, heads, 512), np.float32),
    )
    request, token, head = chosen.T
    memory(out, (blocks, 512), "float64")[...] = got.out[request, token, head]
    memory(lse, (blocks,), "float64")[...] = got.lse[request, token, head]


def _nothing(blocks: int, *values: object) -> None:
    assert blocks >= 1


_KERNELS: dict[KernelSpec, Callable[..., None]] = {
    EMPTY: _nothing,
    STREAM_KV: _nothing,
    SPIN: _nothing,
    **{FILL_NORMAL[name]: partial(_fill_normal, dtype) for name, dtype in DTYPES.items()},
    **{ATTEND_ROWS[name]: partial(_attend_rows, dtype) for name, dtype in DTYPES.items()},
}


def memory(address: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """The array that lies at an address."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = (ctypes.c_char * nbytes).from_address(address)
    return np.frombuffer(raw, dtype=dtype).reshape(shape)
