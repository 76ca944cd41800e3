# SPDX-License-Identifier: Apache-2.0
"""What the GPU tests compare with: the definition again, in float64, for NumPy or CuPy arrays.

`cumla.reference` defines the operation but takes minutes over the grid. This module says the same
in other words, with matrix products over whole groups of requests, for whichever array module it is
given, so that its references are made on the GPU; tests/gpu_tools/test_oracle.py holds it against
`cumla.reference` and against `tests.mla.tolerance` on the CPU. bfloat16 arrays come and go as their
uint16 bits, which every array library handles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests.mla import tolerance

VALUE_DIM = 512
CHUNK_BYTES = 4 << 30
"""Most memory that one group of requests takes in float64, roughly."""

Array = Any


class Expected(NamedTuple):
    """The float64 results, and the root mean square of the values that they were made from."""

    out: Array
    lse: Array
    v_rms: float


def widen(xp: Any, bits: Array, dtype: str) -> Array:
    """Return the float64 values of numbers given by their 16 (or, for float32, 32) bits."""
    if dtype == "bfloat16":
        return (bits.astype(xp.uint32) << xp.uint32(16)).view(xp.float32).astype(xp.float64)
    return bits.view({"float16": xp.float16, "float32": xp.float32}[dtype]).astype(xp.float64)


def decode(
    xp: Any,
    q: Array,
    kv_cache: Array,
    block_table: np.ndarray,
    kv_lens: np.ndarray,
    *,
    dtype: str,
    softmax_scale: float,
    causal: bool,
) -> Expected:
    """Compute paged MLA decode attention.

    Parameters
    ----------
    xp : module
        numpy or cupy.
    q, kv_cache : array of uint16
        Bits of ``dtype`` numbers: (batch, q_len, num_heads, 576) and
        (num_pages, page_size, num_kv_heads, 576).
    block_table, kv_lens : ndarray
        On the host, whatever ``xp`` is. Used entries must be right.

    Returns
    -------
    Expected
        out (batch, q_len, num_heads, 512), lse (batch, q_len, num_heads), both float64 arrays of
        ``xp``.
    """

    def rows(requests: np.ndarray, length: int) -> Array:
        return _rows(xp, kv_cache, block_table[requests], length, dtype)

    return attend(
        xp,
        q,
        rows,
        kv_cache.shape[2],
        kv_lens,
        dtype=dtype,
        softmax_scale=softmax_scale,
        causal=causal,
    )


def attend(
    xp: Any,
    q: Array,
    rows_of: Callable[[np.ndarray, int], Array],
    kv_heads: int,
    kv_lens: np.ndarray,
    *,
    dtype: str,
    softmax_scale: float,
    causal: bool,
) -> Expected:
    """Compute the same over rows that lie anywhere.

    Parameters
    ----------
    rows_of : callable
        Of requests of one length, and that length: their rows in float64, (requests, kv_heads,
        length, 576).
    kv_heads : int
        How many there are.
    xp, q, kv_lens, dtype, softmax_scale, causal
        As of :func:`decode`.

    Returns
    -------
    Expected
    """
    batch, q_len, num_heads, head_dim = q.shape
    group = num_heads // kv_heads
    rows = q_len * group
    out = xp.zeros((batch, q_len, num_heads, VALUE_DIM), dtype=xp.float64)
    lse = xp.full((batch, q_len, num_heads), -np.inf, dtype=xp.float64)
    squares = xp.zeros((), dtype=xp.float64)
    count = 0

    for length, members in _equal_lengths(kv_lens):
        each = 8 * kv_heads * (length * (2 * head_dim + 4 * rows) + rows * 2048)
        step = max(1, CHUNK_BYTES // each)
        for start in range(0, len(members), step):
            chunk = members[start : start + step]
            k = rows_of(chunk, length)
            v = k[..., :VALUE_DIM]
            squares += (v * v).sum(axis=-1).sum()
            count += v.size
            index = xp.asarray(chunk)
            queries = widen(xp, q[index], dtype)  # (m, q_len, heads, 576)
            queries = queries.reshape(-1, q_len, kv_heads, group, head_dim)
            queries = queries.transpose(0, 2, 1, 3, 4).reshape(-1, kv_heads, rows, head_dim)
            limit = xp.full(q_len, length)
            if causal:
                limit = xp.maximum(limit - (q_len - 1) + xp.arange(q_len), 0)
            o, s = _attend(xp, queries, k, v, xp.repeat(limit, group), softmax_scale)
            o = o.reshape(-1, kv_heads, q_len, group, VALUE_DIM).transpose(0, 2, 1, 3, 4)
            s = s.reshape(-1, kv_heads, q_len, group).transpose(0, 2, 1, 3)
            out[index] = o.reshape(-1, q_len, num_heads, VALUE_DIM)
            lse[index] = s.reshape(-1, q_len, num_heads)
    return Expected(out, lse, float(squares / max(count, 1)) ** 0.5)


def _equal_lengths(kv_lens: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Group the requests that have tokens by their length."""
    lengths = [int(length) for length in np.unique(kv_lens) if length > 0]
    return [(length, np.flatnonzero(kv_lens == length)) for length in lengths]


def _rows(xp: Any, kv_cache: Array, table: np.ndarray, length: int, dtype: str) -> Array:
    """Gather the rows of requests of one length: float64 (m, kv_heads, length, 576)."""
    page_size = kv_cache.shape[1]
    pages = np.ascontiguousarray(table[:, : -(-length // page_size)])
    bits = kv_cache[xp.asarray(pages)]  # (m, pages, page_size, kv_heads, 576)
    bits = bits.reshape(len(pages), -1, *bits.shape[3:])[:, :length]
    return widen(xp, xp.ascontiguousarray(bits.transpose(0, 2, 1, 3)), dtype)


def matmul(xp: Any, a: Array, b: Array) -> Array:
    """Multiply matrices; where CuPy has no cuBLAS, which its wheel lacks, in torch on that GPU."""
    try:
        return xp.matmul(a, b)
    except ImportError:
        import torch

        return xp.from_dlpack(torch.from_dlpack(a) @ torch.from_dlpack(b))


def _attend(
    xp: Any, q: Array, k: Array, v: Array, limit: Array, scale: float
) -> tuple[Array, Array]:
    """Attend from q (m, kv_heads, rows, 576); row r sees the first limit[r] tokens."""
    scores = matmul(xp, q, k.transpose(0, 1, 3, 2)) * scale
    visible = xp.arange(k.shape[2])[None, :] < limit[:, None]
    scores = xp.where(visible, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    top = xp.where(xp.isfinite(top), top, 0.0)
    weights = xp.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    some = total > 0
    safe = xp.where(some, total, 1.0)
    out = matmul(xp, weights, v) / safe
    lse = xp.where(some, top + xp.log(safe), -np.inf)
    return out, lse[..., 0]


def check_out(
    xp: Any, got: Array, expected: Array, *, v_rms: float, outliers: bool
) -> dict[str, float]:
    """Hold an output against its reference, by the rules of `assert_close_out`.

    Both arrays are float64 (..., 512). The figures are those of `tests.mla.tolerance`; the
    comparison runs where the arrays live.
    """
    assert got.shape == expected.shape, f"out: shape {got.shape}, reference {expected.shape}"
    finite = xp.isfinite(got)
    if not bool(finite.all()):
        place = _first(xp, ~finite)
        raise AssertionError(
            f"out: {int((~finite).sum())} NaN or infinities of {got.size}, first at {place}"
        )
    error = xp.abs(got - expected)
    bound = tolerance.OUT_REL * xp.abs(expected)
    share = error / xp.maximum(bound, tolerance.OUT_ABS * max(1.0, v_rms / 0.1))
    error_squares = (error * error).sum(axis=-1)
    squares = (expected * expected).sum(axis=-1)
    positive = squares > 0
    rows = xp.where(
        positive,
        xp.sqrt(error_squares / xp.where(positive, squares, 1.0)),
        xp.where(error_squares > 0, xp.full_like(squares, np.inf), xp.zeros_like(squares)),
    )
    norms = float((got * got).sum(axis=-1).sum() + squares.sum())
    figures = {
        "max_abs": float(error.max(axis=-1).max()),
        "element": float(share.max(axis=-1).max()),
        "cos": float(error_squares.sum()) / norms if norms else 0.0,
        "row": float(rows.max()),
    }
    if not outliers and figures["element"] > 1.0:
        place = _worst(xp, share)
        raise AssertionError(
            f"out: {int((share > 1.0).sum())} of {share.size} elements off, worst at {place}: "
            f"got {float(got[place])}, reference {float(expected[place])}; {figures}"
        )
    if figures["row"] > tolerance.OUT_ROW:
        wrong = int((rows > tolerance.OUT_ROW).sum())
        raise AssertionError(
            f"out: {wrong} of {rows.size} rows off, worst at {_worst(xp, rows)}; {figures}"
        )
    assert figures["cos"] <= tolerance.OUT_COS, f"out: cosine difference too large: {figures}"
    return figures


def check_lse(xp: Any, got: Array, expected: Array) -> dict[str, float]:
    """Hold log-sum-exp values against their reference, as `assert_close_lse` does."""
    assert got.shape == expected.shape, f"lse: shape {got.shape}, reference {expected.shape}"
    finite = xp.isfinite(expected)
    agree = xp.where(finite, xp.isfinite(got), got == expected)
    if not bool(agree.all()):
        place = _first(xp, ~agree)
        raise AssertionError(
            f"lse: {int((~agree).sum())} NaN or infinities differ, first at {place}: "
            f"got {float(got[place])}, reference {float(expected[place])}"
        )
    x, y = xp.where(finite, got, 0.0), xp.where(finite, expected, 0.0)
    error = xp.abs(x - y)
    share = error / xp.maximum(tolerance.LSE_ABS, tolerance.LSE_REL * xp.abs(y))
    figures = {"max_abs": float(error.max()), "element": float(share.max())}
    if figures["element"] > 1.0:
        place = _worst(xp, share)
        raise AssertionError(
            f"lse: {int((share > 1.0).sum())} of {share.size} off, worst at {place}: "
            f"got {float(got[place])}, reference {float(expected[place])}; {figures}"
        )
    return figures


def _worst(xp: Any, values: Array) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(values.argmax()), values.shape))


def _first(xp: Any, mask: Array) -> tuple[int, ...]:
    """Index of the first true element."""
    return _worst(xp, mask.astype(xp.uint8))
