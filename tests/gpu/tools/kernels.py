# SPDX-License-Identifier: Apache-2.0
"""Small kernels of the tests' own: delays, and comparison without a look from the host."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

SOURCE = r"""
extern "C" __global__ void spin(long long clocks) {
  const long long start = clock64();
  while (clock64() - start < clocks) {}
}

// Every block occupies its multiprocessor for another time, up to `most` clocks.
extern "C" __global__ void noise(unsigned seed, unsigned most) {
  unsigned h = (seed * 7919u + blockIdx.x) * 2654435761u;
  h ^= h >> 15;
  h *= 2246822519u;
  h ^= h >> 13;
  const long long start = clock64();
  while (clock64() - start < h % most) {}
}

// Counts the words that differ, and leaves NaN behind for the next run to overwrite.
extern "C" __global__ void compare_and_poison(unsigned* got, const unsigned* want, long long count,
                                              unsigned* wrong) {
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
    if (got[i] != want[i]) atomicAdd(wrong, 1u);
    got[i] = 0xffffffffu;
  }
}
"""


@functools.cache
def _kernel(name: str) -> Any:
    import cupy

    return cupy.RawKernel(SOURCE, name)


def spin(clocks: int = 20_000_000) -> None:
    """Keep CuPy's current stream busy, for some 10 ms by default."""
    _kernel("spin")((1,), (1,), (np.int64(clocks),))


def noise(seed: int, blocks: int = 48, most: int = 60_000) -> None:
    """Occupy some multiprocessors for random times, on CuPy's current stream."""
    _kernel("noise")((blocks,), (1024,), (np.uint32(seed), np.uint32(most)))


def compare_and_poison(got: Any, want: Any, wrong: Any) -> None:
    """Add the number of 32-bit words in which got and want differ to ``wrong``; got becomes NaN."""
    words = got.nbytes // 4
    assert got.nbytes == want.nbytes == 4 * words
    _kernel("compare_and_poison")((64,), (256,), (got, want, np.int64(words), wrong))
