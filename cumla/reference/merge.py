# SPDX-License-Identifier: Apache-2.0
"""Merging partial attention results, as a definition."""

from __future__ import annotations

from collections.abc import Sequence
from math import e, log

import numpy as np

from cumla.core.state import AttentionState
from cumla.reference.rows import Array


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
        Each of the shape of outs without their last axis.
    out, lse : ndarray, shapes of one of outs, of any floating dtype, and one of lses, optional
        Where to write the results; may be one of outs, or of lses.
    lse_base : float
        Base of the logarithms, of lses and of the result: e, or 2.

    Returns
    -------
    AttentionState
        ``out``, in the dtype of outs without ``out``, and ``lse``, float32. Where all partial
        results have weight 0, out is 0 and lse -inf. All arithmetic is float64.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> out, lse = np.ones((1, 1, 2)), np.zeros((1, 1))
    >>> cumla.reference.merge_attention_states([out, 3 * out], [lse, lse]).out
    array([[[2., 2.]]])
    """
    outs, lses = list(outs), list(lses)
    # Natural logarithms; -inf where nothing was seen.
    natural = [x.astype(np.float64) * log(lse_base) for x in lses]
    natural = [np.where(np.isinf(x), -np.inf, x) for x in natural]
    top = np.fmax.reduce(natural)
    shift = np.where(np.isinf(top), 0.0, top)  # keeps exp() in range and cancels in both results
    total, merged = np.zeros(top.shape), np.zeros(outs[0].shape)
    for partial, x in zip(outs, natural, strict=True):
        weight = np.exp(x - shift)
        total += weight
        seen = ~np.isneginf(x)[..., None]
        merged += weight[..., None] * np.where(seen, partial.astype(np.float64), 0.0)
    nothing = total == 0
    total[nothing] = 1.0
    logarithm = np.where(nothing, -np.inf, (shift + np.log(total)) / log(lse_base))
    out = np.empty(merged.shape, outs[0].dtype) if out is None else out
    lse = np.empty(lses[0].shape, np.float32) if lse is None else lse
    out[...] = merged / total[..., None]
    lse[...] = logarithm
    return AttentionState(out, lse)
