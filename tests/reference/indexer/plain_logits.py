# SPDX-License-Identifier: Apache-2.0
"""The indexer's formula in plain Python."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
NAN_BYTE = 0x7F


def value_of(byte: int) -> float:
    """An e4m3 number from its bits: a sign, 4 bits of exponent with bias 7, 3 of fraction."""
    sign, exponent, fraction = byte >> 7, (byte >> 3) & 15, byte & 7
    if byte & 0x7F == NAN_BYTE:
        return math.nan
    size = fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


def logit(q: Array, k: Array, scale: float, weights: Array) -> float:
    """One logit of bytes q (num_heads, head_dim) and k (head_dim,), in Python's own numbers."""
    key = [value_of(byte) for byte in k.tolist()]
    total = 0.0
    for head, weight in zip(q.tolist(), weights.tolist(), strict=True):
        product = math.fsum(value_of(a) * b for a, b in zip(head, key, strict=True))
        total += weight * max(product, 0.0)
    return scale * total


def some_bytes(rng: np.random.Generator, *shape: int) -> Array:
    """Bits of normal numbers; every other one is small, some subnormal."""
    values = rng.standard_normal(shape) * np.where(rng.random(shape) < 0.5, 1.0, 0.01)
    return values.astype(E4M3).view(np.uint8)
