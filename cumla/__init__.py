# SPDX-License-Identifier: Apache-2.0
"""Raw CUDA kernels for Multi-head Latent Attention on NVIDIA Hopper.

Arrays of CuPy, PyTorch, JAX and NumPy go in and come out; kernels are compiled when first used.
Importing this package touches no GPU; NumPy is loaded with the first name that computes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cumla.errors import (
    CompilationError,
    CumlaError,
    MissingDependencyError,
    NotPreparedError,
    UnsupportedDeviceError,
)

if TYPE_CHECKING:
    from cumla import cache as cache
    from cumla import merge as merge
    from cumla import mla as mla
    from cumla import reference as reference
    from cumla.cache import append_mla_cache
    from cumla.merge import AttentionState, merge_attention_states
    from cumla.mla import MLADecodePlan, MLADecodeResult, mla_decode, prepare

__version__ = "0.1.0"

__all__ = [
    "AttentionState",
    "CompilationError",
    "CumlaError",
    "MLADecodePlan",
    "MLADecodeResult",
    "MissingDependencyError",
    "NotPreparedError",
    "UnsupportedDeviceError",
    "append_mla_cache",
    "merge_attention_states",
    "mla_decode",
    "prepare",
]

_MODULES = ("cache", "merge", "mla", "reference")  # that are there without an import of their own
_HOMES = {  # the rest is in mla
    "AttentionState": "merge",
    "append_mla_cache": "cache",
    "merge_attention_states": "merge",
}


if not TYPE_CHECKING:  # or every name would pass

    def __getattr__(name: str) -> Any:
        """Load what computes when it is first asked for: NumPy takes most of an import's time."""
        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = import_module(f"{__name__}.{_HOMES.get(name, 'mla')}")
        value = globals()[name] = getattr(home, name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
