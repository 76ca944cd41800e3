# SPDX-License-Identifier: Apache-2.0
"""The arrays of a problem in other frameworks, and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.gpu.tools.problem import NUMPY_DTYPES, Problem

Array = Any


def to_host(bits: Array, dtype: str) -> np.ndarray:
    """NumPy copy of a CuPy array of bits, as ``dtype``."""
    return np.ascontiguousarray(bits.get()).view(NUMPY_DTYPES[dtype])


def to_torch(torch: Any, array: Array) -> Any:
    """The same memory as a torch tensor; bfloat16 travels as int16, e4m3 as bytes."""
    name = str(array.dtype)
    if name == "float8_e4m3fn":
        return torch.from_dlpack(array.view(np.uint8)).view(torch.float8_e4m3fn)
    if name in ("bfloat16", "float16"):
        return torch.from_dlpack(array.view(np.int16)).view(getattr(torch, name))
    return torch.from_dlpack(array)


def from_torch(torch: Any, tensor: Any) -> Array:
    """The same memory as a CuPy array."""
    import cupy

    name = str(tensor.dtype).removeprefix("torch.")
    if name in ("bfloat16", "float16"):
        return cupy.from_dlpack(tensor.view(torch.int16)).view(NUMPY_DTYPES[name])
    return cupy.from_dlpack(tensor)


def jax_arguments(jnp: Any, problem: Problem) -> tuple[Any, ...]:
    """Copies of the four arguments as JAX arrays on the GPU."""
    dtype = problem.case.dtype
    return (
        jnp.asarray(to_host(problem.q_bits, dtype)),
        jnp.asarray(to_host(problem.kv_bits, dtype)),
        jnp.asarray(problem.table),
        jnp.asarray(problem.lengths),
    )


def from_jax(array: Any) -> Array:
    """A copy as a CuPy array, by way of the host."""
    import cupy

    host = np.asarray(array)
    if host.dtype == np.float32:
        return cupy.asarray(host)
    return cupy.asarray(host.view(np.uint16)).view(host.dtype)


def bits_of(array: Array) -> Array:
    """A flat CuPy copy of an array's bits."""
    import cupy

    kind = cupy.uint32 if array.dtype.itemsize == 4 else cupy.uint16
    return cupy.ascontiguousarray(array.view(kind)).ravel().copy()
