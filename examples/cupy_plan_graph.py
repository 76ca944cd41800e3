# SPDX-License-Identifier: Apache-2.0
"""CuPy: one plan for all layers, captured into a CUDA graph that serves growing lengths.

Without a GPU the same steps run on NumPy arrays, without the graph.
"""

from contextlib import nullcontext
from typing import Any

import numpy as np

import cumla

SCALE = 192**-0.5


def find_cupy() -> Any:
    """Find CuPy with a GPU; None without."""
    try:
        import cupy

        return cupy if cupy.cuda.runtime.getDeviceCount() else None
    except Exception:  # CuPy or the driver is missing
        return None


def decode(cupy: Any, stream: Any) -> None:
    """Decode three steps on the current stream."""
    xp = cupy or np
    batch, heads, pages, layers = 4, 16, 32, 3
    rng = np.random.default_rng(0)
    queries = xp.asarray(rng.standard_normal((layers, batch, 1, heads, 576)).astype(np.float16))
    caches = xp.asarray(rng.standard_normal((layers, pages, 64, 576)).astype(np.float16))
    block_table = xp.asarray(rng.permutation(pages).astype(np.int32).reshape(batch, -1))
    kv_lens = xp.asarray(np.array([500, 64, 1, 0], dtype=np.int32))
    outs = xp.empty((layers, batch, 1, heads, 512), np.float16)  # CuPy cannot allocate in a capture
    lses = xp.empty((layers, batch, 1, heads), np.float32)
    plan = cumla.MLADecodePlan.from_arrays(queries[0], caches[0])

    def step() -> None:
        plan.update(kv_lens)
        for layer in range(layers):
            plan.run(
                queries[layer],
                caches[layer],
                block_table=block_table,
                softmax_scale=SCALE,
                out=outs[layer],
                lse=lses[layer],
            )

    graph = None
    if stream is not None:
        plan.prepare()  # nothing compiles during a capture
        stream.synchronize()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
    for _ in range(3):
        kv_lens += 1
        if graph is None:
            step()
        else:
            graph.launch(stream)
        print("lse of request 0, layer 0:", float(lses[0, 0, 0, 0]))

    fresh = cumla.mla_decode(queries[0], caches[0], block_table, kv_lens, softmax_scale=SCALE)
    if not bool((fresh.lse == lses[0]).all()):
        raise SystemExit("the plan and a call without one differ")


def main() -> None:
    """Decode on a stream of CuPy's, or on the CPU."""
    cupy = find_cupy()
    stream = None if cupy is None else cupy.cuda.Stream(non_blocking=True)
    with stream or nullcontext():
        decode(cupy, stream)


if __name__ == "__main__":
    main()
