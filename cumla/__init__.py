# SPDX-License-Identifier: Apache-2.0
"""Raw CUDA kernels for Multi-head Latent Attention on NVIDIA Hopper.

Arrays of CuPy, PyTorch, JAX and NumPy go in and come out; kernels are compiled when first used.
Importing this package touches no GPU.
"""

from __future__ import annotations

from cumla.errors import (
    CompilationError,
    CumlaError,
    MissingDependencyError,
    NotPreparedError,
    UnsupportedDeviceError,
)
from cumla.mla import MLADecodePlan, MLADecodeResult, mla_decode, prepare

__version__ = "0.1.0"

__all__ = [
    "CompilationError",
    "CumlaError",
    "MLADecodePlan",
    "MLADecodeResult",
    "MissingDependencyError",
    "NotPreparedError",
    "UnsupportedDeviceError",
    "mla_decode",
    "prepare",
]
