# SPDX-License-Identifier: Apache-2.0
"""FP8 caches of a small call of mla_decode or mla_attention, in every form."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from cumla.mla.shape import WIDTH, Width
from cumla.reference import append_mla_cache

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FORMS: dict[str, tuple[tuple[int, Any], ...]] = {
    "one": ((576, FP8),),
    "bytes": ((576, np.uint8),),
    "pair": ((512, FP8), (64, FP8)),
    "pair of bytes": ((512, np.uint8), (64, np.uint8)),
    "16-bit rope": ((512, FP8), (64, BF16)),
    "scales": ((512, np.uint8), (64, BF16), (4, np.float32)),
    "scales, e4m3 rope": ((512, FP8), (64, FP8), (4, np.float32)),
    "packed": ((656, np.uint8),),
}
"""Columns and dtype of each part."""
SCALED = tuple(name for name in FORMS if name not in ("scales", "packed"))
"""Those that take a kv_scale."""


def aligned(shape: tuple[int, ...], dtype: Any, shift: int = 0) -> np.ndarray:
    """Zeros at `shift` bytes behind a multiple of 64."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(nbytes + 128, np.uint8)
    begin = -memory.ctypes.data % 64 + shift
    return memory[begin : begin + nbytes].view(dtype).reshape(shape)


@cache
def _normal(dtype: np.dtype[Any]) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(1 << 22, np.float32).astype(dtype)


def normal_rows(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Rows of normal numbers, each from a place of its own among the same many: drawn faster."""
    rows = sliding_window_view(_normal(np.dtype(dtype)), shape[-1])
    return rows[rng.integers(0, len(rows), shape[:-1])]


def make_cache(
    form: str, pages: int = 6, page_size: int = 64, heads: int = 1, width: Width = WIDTH
) -> Any:
    """A cache of normal numbers; where a factor is wanted it is 0.01."""
    columns = {576: sum(width), 512: width[0], 64: width[1]} if width != WIDTH else {}
    parts = tuple(
        aligned((pages, page_size, heads, columns.get(n, n)), dtype) for n, dtype in FORMS[form]
    )
    shape = pages * page_size, heads, sum(width)
    rows = normal_rows(np.random.default_rng(5), shape, np.float32)
    if form == "scales, e4m3 rope":  # the writer has no such form
        whole = aligned((pages, page_size, heads, 576), FP8)
        slots = np.arange(pages * page_size)
        append_mla_cache(rows, whole, slots, kv_scale=0.01)
        parts[0][...], parts[1][...] = whole[..., :512], whole[..., 512:]
        parts[2][...] = np.random.default_rng(6).uniform(0.001, 0.02, parts[2].shape)
        return parts
    cache = parts if len(parts) > 1 else parts[0]
    options: dict[str, Any] = {"kv_scale": 0.01} if form in SCALED else {}
    append_mla_cache(rows, cache, np.arange(pages * page_size), **options)
    return cache


def parts_of(cache: Any) -> tuple[Any, ...]:
    """The arrays of a cache."""
    return cache if isinstance(cache, tuple) else (cache,)
