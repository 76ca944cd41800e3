# SPDX-License-Identifier: Apache-2.0
"""How close a kernel's result must be to the float64 reference.

An element of an output passes if its absolute or its relative error does. The whole array must also
have a cosine difference ``1 - 2 <x, y> / (|x|^2 + |y|^2)`` of at most 5e-6, and every row of 512 a
relative error ``|x - y| / |y|`` of at most 4e-3. The last is what notices one wrong row among
thousands: over long contexts of random values the outputs shrink below the absolute bound.

Rounding to bfloat16 costs a number up to 3.9e-3 of itself and a row of many numbers 1.7e-3. The
output is rounded once, and so are the probabilities, but for the largest of a row: together 2.4e-3
a row, and 2.7e-3 at most for the NumPy emulation of the kernel's arithmetic in
`tests/reference/mla/test_tolerance.py`: that passes, and fails with one dropped token.

Inputs with outliers must keep to rows that can pass. Where one outlier among the values makes up a
row's norm while its token shares the weight with others, both roundings fall on one number and even
perfect arithmetic can be off by 7.8e-3: let the token's score take all of the weight or none of it.
Where an outlier of q meets one of the cache, float32 scores of 4e6 no longer tell tokens apart.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

OUT_ABS = 8e-4  # for values of rms 0.1 or less
OUT_REL = 2.01 / 128
OUT_COS = 5e-6
OUT_ROW = 4e-3
LSE_ABS = 1e-6
LSE_REL = 8.01 / 65536


def rms_of_visible_values(kv_cache: Array, block_table: Array, cache_seqlens: Array) -> float:
    """Root mean square of the first 512 numbers of every cached row in use."""
    page_size, squares, count = kv_cache.shape[1], 0.0, 0
    for table, kv_len in zip(block_table, cache_seqlens, strict=True):
        pages = kv_cache[table[: -(-int(kv_len) // page_size)]]
        values = pages.reshape(-1, *kv_cache.shape[2:])[: int(kv_len), ..., :512]
        squares += float(np.sum(np.square(values, dtype=np.float32), dtype=np.float64))
        count += values.size
    return float(np.sqrt(squares / max(count, 1)))


def assert_close_out(
    got: Array,
    ref: Array,
    *,
    visible_v_rms: float | None = None,
    kind: Literal["normal", "outlier"] = "normal",
) -> dict[str, float]:
    """Compare an attention output (..., 512) with its reference.

    Parameters
    ----------
    got, ref : ndarray, shape (..., 512)
        Any float dtype; pass the reference in float32 or float64, not rounded to the output's.
    visible_v_rms : float, optional
        Root mean square of the visible values; the absolute bound grows with it above 0.1.
    kind : {"normal", "outlier"}
        ``"outlier"`` (inputs with outliers, one-hot or constant rows) leaves the bound of single
        elements out.

    Returns
    -------
    dict
        Worst figures: ``max_abs``; ``element``, the worst element's share of its tolerance (the
        smaller of the absolute and the relative one); ``cos``; ``row``.
    """
    x, y = _comparable("out", got, ref)
    abs_tol = OUT_ABS * max(1.0, (visible_v_rms or 0.0) / 0.1)
    error = np.abs(x - y)
    share = _share_of_tolerance(error, y, abs_tol, OUT_REL)
    of_error, of_x, of_y = (np.einsum("...i,...i", a, a) for a in (error, x, y))
    rows = _relative_norms(of_error, of_y)
    norms = float(np.sum(of_x) + np.sum(of_y))
    figures = {
        "max_abs": float(error.max(initial=0.0)),
        "element": float(share.max(initial=0.0)),
        # 1 - 2 <x, y> / (|x|^2 + |y|^2), without its cancellation
        "cos": float(np.sum(of_error)) / norms if norms else 0.0,
        "row": float(rows.max(initial=0.0)),
    }
    if kind == "normal":
        _refuse("out", "element", share, 1.0, x, y, figures)
    _refuse("out", "row", rows, OUT_ROW, x, y, figures)
    assert figures["cos"] <= OUT_COS, f"out: cosine difference above {OUT_COS}: {figures}"
    return figures


def assert_close_lse(got: Array, ref: Array) -> dict[str, float]:
    """Compare log-sum-exp values with their reference.

    Returns
    -------
    dict
        Worst figures ``max_abs`` and ``element``, as of `assert_close_out`.
    """
    x, y = _comparable("lse", got, ref)
    error = np.abs(x - y)
    share = _share_of_tolerance(error, y, LSE_ABS, LSE_REL)
    figures = {
        "max_abs": float(error.max(initial=0.0)),
        "element": float(share.max(initial=0.0)),
    }
    _refuse("lse", "element", share, 1.0, x, y, figures)
    return figures


def _comparable(name: str, got: Array, ref: Array) -> tuple[Array, Array]:
    """Both in float64, after shapes and the places of NaN and infinities agree; those become 0."""
    assert got.shape == ref.shape, f"{name}: shape {got.shape}, reference {ref.shape}"
    x, y = (a.astype(np.float64, copy=False) for a in (got, ref))
    special = ~(np.isfinite(x) & np.isfinite(y))
    if not special.any():
        return x, y
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    wrong = np.argwhere(special & ~same)
    assert not len(wrong), (
        f"{name}: {len(wrong)} NaN or infinities differ, first at {tuple(wrong[0].tolist())}: "
        f"got {x[tuple(wrong[0])]}, reference {y[tuple(wrong[0])]}"
    )
    return np.where(special, 0.0, x), np.where(special, 0.0, y)


def _share_of_tolerance(error: Array, y: Array, abs_tol: float, rel_tol: float) -> Array:
    tolerance = np.abs(y)
    tolerance *= rel_tol
    np.maximum(tolerance, abs_tol, out=tolerance)
    share: Array = np.divide(error, tolerance, out=tolerance)
    return share


def _relative_norms(of_error: Array, of_y: Array) -> Array:
    """|x - y| / |y| a row, of their squares; a row of zeros must be met exactly."""
    relative = np.where(of_error > 0, np.inf, 0.0)
    np.divide(of_error, of_y, out=relative, where=of_y > 0)
    return np.sqrt(relative)


def _refuse(
    name: str, what: str, values: Array, limit: float, x: Array, y: Array, figures: dict[str, float]
) -> None:
    """Fail with the worst place if any of the values exceeds the limit."""
    if not values.size or values.max() <= limit:
        return
    worst = np.unravel_index(int(values.argmax()), values.shape)
    place = tuple(int(k) for k in worst)
    raise AssertionError(
        f"{name}: {int((values > limit).sum())} of {values.size} {what}s off, worst at {place}: "
        f"got {x[place]}, reference {y[place]}; {figures}"
    )
