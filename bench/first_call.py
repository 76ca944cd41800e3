# SPDX-License-Identifier: Apache-2.0
"""Prints how many seconds the first call of a process takes: ``python bench/first_call.py``.

CuPy is imported and the GPU's context made before the clock starts. What is timed: every kernel of
one dtype is compiled or found in the cache, loaded, and a small case computed.
"""

from __future__ import annotations

from time import perf_counter

import ml_dtypes
import numpy as np

import cumla
from cumla.launch.device import import_cupy


def main() -> None:
    """Time the call and print it."""
    cupy = import_cupy()
    q = cupy.empty((1, 1, 16, 576), dtype=ml_dtypes.bfloat16)
    kv_cache = cupy.empty((64, 64, 1, 576), dtype=ml_dtypes.bfloat16)
    for array in (q, kv_cache):
        array.data.memset(0, array.nbytes)
    block_table = cupy.asarray(np.arange(64, dtype=np.int32)[None])
    kv_lens = cupy.asarray(np.full(1, 4096, np.int32))
    cupy.cuda.Device().synchronize()

    begin = perf_counter()
    cumla.mla_decode(q, kv_cache, block_table, kv_lens)
    cupy.cuda.Device().synchronize()
    print(perf_counter() - begin)


if __name__ == "__main__":
    main()
