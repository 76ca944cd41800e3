# SPDX-License-Identifier: Apache-2.0
"""What every function of the face does with tensors."""

from __future__ import annotations

from math import inf
from typing import Any

__all__ = ["as_int32", "check_axes", "mark_empty"]


def mark_empty(s: Any) -> None:
    """Write -inf where cumla says +inf, without waiting for the GPU."""
    s[s == inf] = -inf


def as_int32(numbers: Any) -> Any:
    """Convert a tensor, as FlashInfer does; one of int32 is returned as it is."""
    return numbers.int() if hasattr(numbers, "int") else numbers


def check_axes(name: str, array: Any, *axes: str) -> None:
    """Check the number of axes: cumla gives others a meaning, and views need them."""
    wanted = f"({', '.join(axes)})"
    if not hasattr(array, "shape"):
        raise TypeError(
            f"{name}: needs a tensor {wanted}, got {type(array).__module__}."
            f"{type(array).__qualname__}; convert it first"
        )
    if len(array.shape) != len(axes):
        raise ValueError(f"{name}: needs axes {wanted}, got shape {tuple(array.shape)}; reshape it")
