# SPDX-License-Identifier: Apache-2.0
"""Merging partial attention results, as a definition."""

from __future__ import annotations

from collections.abc import Sequence
from math import e, log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_FLOATS = ("bfloat16", "float16", "float32", "float64")


class AttentionState(NamedTuple):
    """An attention output and what is needed to merge it with others.

    Attributes
    ----------
    out : array, shape (tokens, heads, head_dim) or (batch, q_len, heads, head_dim)
        Attention output.
    lse : array of float32, shape (tokens, heads) or (batch, heads, q_len)
        Logarithm of the sum of the exponentials of the scores; +inf where nothing was attended.
    """

    out: Any
    lse: Any


def merge_attention_states(
    outs: Sequence[Array] | Array,
    lses: Sequence[Array] | Array,
    *,
    out: Array | None = None,
    lse: Array | None = None,
    lse_base: float = e,
) -> AttentionState:
    """Merge the results of attention over parts of the keys into that of attention over all.

    With ``b`` the base of the logarithms and the sums over the partial results::

        lse = log_b(sum(b ** lses[i]))
        out = sum(b ** (lses[i] - lse) * outs[i])

    An infinite ``lses[i]``, of either sign, says that nothing was attended: its weight is 0, and
    its ``outs[i]`` may hold anything, NaN included.

    Parameters
    ----------
    outs : sequence of ndarray, or one ndarray with a leading axis of partial results
        Each bfloat16, float16, float32 or float64, ``(tokens, heads, head_dim)`` or
        ``(batch, q_len, heads, head_dim)``. Any strides.
    lses : sequence of ndarray, or one ndarray with a leading axis of partial results
        Each ``(tokens, heads)``, or ``(batch, heads, q_len)`` for outs with four axes.
    out : ndarray of bfloat16, float16, float32 or float64, shape of one of outs, optional
        Where to write the output; may be one of outs.
    lse : ndarray of float32, shape of one of lses, optional
        Where to write the logarithms; may be one of lses.
    lse_base : float
        Base of the logarithms, of lses and of the result: e, or 2.

    Returns
    -------
    AttentionState
        ``out``, in the dtype of outs without ``out``, and ``lse``, float32. Where all partial
        results have weight 0, out is 0 and lse +inf. All arithmetic is float64.

    Raises
    ------
    ValueError
        If there is no partial result, if shapes disagree, or for another base.
    TypeError
        If something is no NumPy array, or of another dtype than the above.
    """
    if lse_base not in (2, e):
        raise ValueError(f"lse_base: needs math.e or 2, got {lse_base}; convert the logarithms")
    outs, lses = list(outs), list(lses)
    _check(outs, lses)
    heads_first = outs[0].ndim == 4
    # Natural logarithms, of the shape of outs without its last axis.
    scaled = [_tokens_first(x.astype(np.float64), heads_first) * log(lse_base) for x in lses]
    top = np.full(scaled[0].shape, -np.inf)
    for x in scaled:
        top = np.fmax(top, np.where(np.isinf(x), -np.inf, x))
    shift = np.where(np.isinf(top), 0.0, top)
    total, merged = np.zeros(top.shape), np.zeros(outs[0].shape)
    for partial, x in zip(outs, scaled, strict=True):
        empty = np.isinf(x)
        weight = np.where(empty, 0.0, np.exp(np.where(empty, 0.0, x - shift)))
        total += weight
        merged += weight[..., None] * np.where(empty[..., None], 0.0, partial.astype(np.float64))
    nothing = total == 0
    total[nothing] = 1.0
    merged /= total[..., None]
    logarithm = np.where(nothing, np.inf, (shift + np.log(total)) / log(lse_base))
    out = np.empty(merged.shape, outs[0].dtype) if out is None else out
    lse = np.empty(lses[0].shape, np.float32) if lse is None else lse
    _check_output("out", out, merged.shape, _FLOATS)
    _check_output("lse", lse, lses[0].shape, ("float32",))
    out[...] = merged
    lse[...] = _tokens_first(logarithm, heads_first)
    return AttentionState(out, lse)


def _tokens_first(lse: Array, heads_first: bool) -> Array:
    """Turn (batch, heads, q_len) into (batch, q_len, heads), or back."""
    return lse.swapaxes(1, 2) if heads_first else lse


def _check(outs: list[Array], lses: list[Array]) -> None:
    """Refuse partial results that do not fit together."""
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"lses: needs one array for each of outs, and at least one, got {len(lses)} for "
            f"{len(outs)}; pass both of each partial result"
        )
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        _check_dtype(f"outs[{i}]", out, _FLOATS)
        _check_dtype(f"lses[{i}]", lse, ("float32", "float64"))
        if out.ndim not in (3, 4) or out.shape != outs[0].shape:
            raise ValueError(
                f"outs[{i}]: needs shape (tokens, heads, head_dim) or (batch, q_len, heads, "
                f"head_dim), as outs[0] {outs[0].shape}, got {out.shape}; reshape it"
            )
        *tokens, heads, _ = out.shape
        shape = (*tokens[:-1], heads, tokens[-1]) if out.ndim == 4 else (*tokens, heads)
        if lse.shape != shape:
            raise ValueError(f"lses[{i}]: needs shape {shape}, got {lse.shape}; transpose it")


def _check_dtype(name: str, array: Any, dtypes: tuple[str, ...]) -> None:
    """Refuse what is no NumPy array, or one of another dtype."""
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"{name}: needs a NumPy array, got {type(array).__module__}."
            f"{type(array).__qualname__}; cumla.merge_attention_states takes those of other "
            f"frameworks"
        )
    if array.dtype.name not in dtypes:
        raise TypeError(f"{name}: needs {' or '.join(dtypes)}, got {array.dtype}; convert it first")


def _check_output(name: str, array: Array, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    """Refuse an array into which the result does not fit."""
    _check_dtype(name, array, dtypes)
    if array.shape != shape:
        raise ValueError(
            f"{name}: needs shape {shape}, got {array.shape}; allocate it so or leave it out"
        )
