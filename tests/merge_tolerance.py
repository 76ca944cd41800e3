# SPDX-License-Identifier: Apache-2.0
"""How close merged results must be to the float64 reference.

An element of the output may be off by half a unit in the last place of its dtype, and by 4e-6 of
the weighted mean of the partial results' magnitudes: float32 weights and sums cost less than 1e-6
of that, and the float32 logarithm that is handed on behind 60 partial results up to 2e-6 where it
is as large as 30. A logarithm may be off by 5e-7 of 1 + itself. The emulation in
`tests/reference/test_merge.py` passes, and fails when one partial result is dropped.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cumla.reference import merge_attention_states

Array = NDArray[Any]

HALF_ULP = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
SMALLEST = {"float32": 0.0, "bfloat16": 0.0, "float16": 2.0**-25}  # half of the smallest number
FLOAT32 = 4e-6
LSE = 5e-7


def assert_merged(
    out: Array, lse: Array, outs: Any, lses: Any, *, lse_base: float
) -> dict[str, float]:
    """Compare a merged result with the float64 reference; rows of no weight must be exact.

    Returns
    -------
    dict
        The worst error of an element and of a logarithm, as shares of their tolerances.
    """
    wide = [np.asarray(x, np.float64) for x in outs]
    exact = merge_attention_states(wide, lses, lse_base=lse_base)
    size = merge_attention_states([np.abs(x) for x in wide], lses, lse_base=lse_base).out
    assert (out.shape, lse.shape) == (exact.out.shape, exact.lse.shape)
    dtype = out.dtype.name
    allowed = HALF_ULP[dtype] * np.abs(exact.out) + FLOAT32 * size + SMALLEST[dtype]
    error = np.abs(out.astype(np.float64) - exact.out)
    assert not np.isnan(error).any(), f"out: {np.isnan(error).sum()} NaN"
    empty = np.isneginf(exact.lse)
    assert np.array_equal(np.isneginf(lse), empty), "lse: -inf at other places"
    lse_error = np.abs(lse[~empty] - exact.lse[~empty]) / (LSE * (1 + np.abs(exact.lse[~empty])))
    nothing = np.broadcast_to(empty[..., None], out.shape)
    assert not out[nothing].astype(bool).any(), "out: not 0 where nothing was attended"
    shares = np.where(error > 0, error, 0)[~nothing] / np.where(error > 0, allowed, 1)[~nothing]
    figures = {
        "element": float(shares.max(initial=0.0)),
        "lse": float(lse_error.max(initial=0.0)),
    }
    assert max(figures.values()) <= 1.0, f"errors as shares of their tolerances: {figures}"
    return figures
