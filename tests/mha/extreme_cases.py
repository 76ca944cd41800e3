# SPDX-License-Identifier: Apache-2.0
"""Calls of attention whose numbers lie where 16 or 32 bits end, for each form of the kernels."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from cumla import reference

__all__ = ["CAPS", "E4M3_FORMS", "FACTORS", "FORMS", "SINKS", "check", "make", "make_factors"]

BF16, F16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)

# Columns, page size, query tokens of each request, dtype of queries and cache, batch_invariant.
FORMS: dict[str, tuple[int, int, int, Any, Any, bool]] = {
    "attention": (64, 64, 16, F16, F16, False),
    "attention, bfloat16": (64, 64, 16, BF16, BF16, False),
    "attention, rows": (128, 3, 20, F16, F16, False),
    "attention, e4m3": (128, 64, 20, BF16, E4M3, False),
    "attention, e4m3, invariant": (256, 16, 1, F16, E4M3, True),
    "attention, 512 columns": (512, 64, 1, F16, F16, False),
    "attention_decode": (128, 16, 1, F16, F16, False),
    "attention_decode, e4m3": (128, 64, 1, BF16, E4M3, False),
    "attention_decode, 16 rows": (64, 64, 3, F16, E4M3, False),
    "attention_prefill": (64, 64, 300, F16, F16, False),
    "attention_prefill, split": (64, 64, 20, F16, F16, False),
    "attention_simt": (64, 64, 1, np.dtype(np.float32), np.dtype(np.float32), False),
}
"""On a few multiprocessors: their requests are cut, or fill whole row tiles."""
E4M3_FORMS = [name for name, form in FORMS.items() if form[4] == E4M3]

LENS = (300, 0, 130)
SINKS = {
    "highest": (0.5, np.inf, 3e38, -3e38, 2.2e38, -np.inf, 1e30, -1e30),
    "high": (8.0, 12.0, 15.0, 18.0, 24.0, 30.0, 60.0, 3.0),
}
CAPS = (30.0, 1e3, 1e6)
FACTORS = (2.0**126, 2.0**100, 2.0**-126)


def make(form: str, *, scale: float = 1.0) -> dict[str, Any]:
    """Give the arguments of a call, `scale` times the usual queries; out is float32."""
    columns, page_size, q_len, dtype, cache, invariant = FORMS[form]
    rng = np.random.default_rng(len(form))
    pages = [-(-n // page_size) for n in LENS]
    q = (scale * rng.standard_normal((len(LENS), q_len, 8, columns))).astype(dtype)
    cached = [
        rng.standard_normal((sum(pages), page_size, 2, columns)).astype(cache) for _ in range(2)
    ]
    table = np.zeros((len(LENS), max(pages)), np.int32)
    for row, count, end in zip(table, pages, np.cumsum(pages), strict=True):
        row[:count] = np.arange(end - count, end)
    return {
        "q": q,
        "k": cached[0],
        "v": cached[1],
        "kv_lens": np.array(LENS, np.int32),
        "block_table": table,
        "batch_invariant": invariant,
        "out": np.full(q.shape, np.nan, np.float32),
        "lse": np.full((len(LENS), q_len, 8), np.nan, np.float32),
    }


def make_factors(form: str, factor: float, softmax_scale: float) -> dict[str, Any]:
    """Keys of 0, the only ones whose scores are numbers whatever they are multiplied by."""
    given = make(form)
    given["k"] = np.zeros_like(given["k"])
    return given | {"k_scale": factor, "softmax_scale": softmax_scale}


def check(given: dict[str, Any], got: Any, rounding: float = 1e-2) -> None:
    """Hold the rows of out against the reference, each as a share of itself, and lse."""
    options = {name: value for name, value in given.items() if name != "batch_invariant"}
    blank = {name: np.full_like(given[name], np.nan) for name in ("out", "lse")}
    expected = reference.attention(**options | blank)
    out, lse = (np.asarray(array, np.float64) for array in got)
    wanted = expected.out.astype(np.float64)
    error, size = (np.linalg.norm(x, axis=-1) for x in (out - wanted, wanted))
    assert np.isfinite(out).all()
    assert (error <= rounding * size).all(), (
        f"out: a row is off by {(error / size).max()} of itself"
    )
    np.testing.assert_allclose(lse, expected.lse, rtol=1e-6, atol=2e-3)
