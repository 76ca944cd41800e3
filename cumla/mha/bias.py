# SPDX-License-Identifier: Apache-2.0
"""A bias of the scores of :func:`cumla.attention`: :class:`AttentionBias`, and its checks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from cumla.core.arguments import INT32, Array, bind, check_dtype, check_lies
from cumla.core.names import arg
from cumla.launch.mha.attention import VARIANTS
from cumla.launch.mha.bias_arrays import NO_BIAS, BiasArrays

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cumla.core.arrays import ArrayView

__all__ = ["AttentionBias"]

FORMS = tuple([name for name in VARIANTS if name not in ("", "masked")])
MOST_COLUMNS = 256  # of keys, and of values, beside a bias
_MOST_ELEMENTS = 1 << 30  # of a row of a table
_DTYPES = ("float32", "bfloat16", "float16")  # of tables


@dataclass(frozen=True, eq=False)
class AttentionBias:
    """A number that is added to each score, by the distance between the query and the key.

    Query i of the n of a request with kv_len keys has position ``p = kv_len - n + i``. Beside key
    j, and for head h, the score is ``softmax_scale * q.k`` and

    ===================  ==================================================================
    arrays               bias
    ===================  ==================================================================
    slopes               ``slopes[h] * (j - p)``: ALiBi
    table of three axes  ``table[t, h, p - j]`` for row t of q, and 0 beyond the table's E
    table of two axes    ``table[h, clamp(p - j - first, 0, E - 1)]``
    ===================  ==================================================================

    Arrays have the framework and the device of `q`. Kernels read them, so their values may change
    between the replays of a CUDA graph. A bias below -2.4e38, such as -inf or the least number of
    float32 or bfloat16, hides its key; all others must be above -2e38. Slopes have magnitudes of at
    most 1e36. A NaN affects only the query rows that read it.

    Attributes
    ----------
    slopes : array, optional
        ``(num_heads,)`` float32, or ``(batch, num_heads)`` with block_table or q of four axes.
        Positive slopes lower the scores of keys before the query, as ALiBi does.
    table : array, optional
        ``(total_tokens, num_heads, E)``, a row for each query token and head, or ``(num_heads,
        E)``, a row for each head, such as T5's relative biases with an element for each distance.
        float32, bfloat16 or float16, the last axis contiguous.
    first : array, optional
        ``(1,)`` int32, beside a table of two axes: the distance ``p - j`` of its first element,
        negative for keys after the query. 0 by default.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> q, k = np.ones((1, 3, 2, 8), np.float32), np.ones((1, 3, 2, 8), np.float32)
    >>> bias = cumla.AttentionBias(slopes=np.float32([0.5, 0.25]))
    >>> lens, table = np.int32([3]), np.int32([[0]])
    >>> cumla.attention(q, k, k, kv_lens=lens, block_table=table, bias=bias).out.shape
    (1, 3, 2, 8)
    """

    slopes: Any = None
    table: Any = None
    first: Any = None

    @property
    def given(self) -> dict[str, Any]:
        """The arrays that are not None, by name."""
        return {name: array for name in FIELDS if (array := getattr(self, name)) is not None}


FIELDS = tuple([field.name for field in fields(AttentionBias)])


def checked_bias(
    given: Mapping[str, ArrayView], total_tokens: int, num_heads: int, batch: int | None
) -> BiasArrays:
    """Check the arrays of a bias; batch is None where the requests of rows are not told."""
    slopes, table = given.get("bias.slopes"), given.get("bias.table")
    first = given.get("bias.first")
    if slopes is None and table is None:
        if first is not None:
            raise ValueError(f"{arg('bias.first')}: needs {arg('bias.table')}, got None; pass it")
        return NO_BIAS
    if slopes is not None:
        if table is not None or first is not None:
            other = "bias.table" if table is not None else "bias.first"
            raise ValueError(
                f"{arg('bias.slopes')}: needs no {arg(other)} beside it, got both; pass one of them"
            )
        return _slopes(slopes, num_heads, batch)
    assert table is not None
    return _table(table, first, total_tokens, num_heads)


def _slopes(view: ArrayView, num_heads: int, batch: int | None) -> BiasArrays:
    check_dtype("bias.slopes", view.dtype, ("float32",))
    check_lies("bias.slopes", view, "elements")
    by_request = len(view.shape) == 2 and batch is not None and view.shape == (batch, num_heads)
    if not by_request and view.shape != (num_heads,):
        told = "with block_table or q of four axes" if batch is None else f"with batch {batch}"
        raise ValueError(
            f"{arg('bias.slopes')}: needs shape (num_heads,) or (batch, num_heads) with num_heads "
            f"{num_heads}, the latter {told}, got {view.shape}; give each head its slope"
        )
    outer = view.strides[0] if by_request else 0
    requests = max(view.shape[0], 1) if by_request else 1
    return BiasArrays("linear", view.ptr, outer, view.strides[-1], requests)


def _table(
    view: ArrayView, first: ArrayView | None, total_tokens: int, num_heads: int
) -> BiasArrays:
    check_dtype("bias.table", view.dtype, _DTYPES)
    axes = len(view.shape)
    if view.shape[:-1] not in ((num_heads,), (total_tokens, num_heads)):
        raise ValueError(
            f"{arg('bias.table')}: needs shape (num_heads, E) or (total_tokens, num_heads, E) with "
            f"total_tokens {total_tokens} and num_heads {num_heads}, got {view.shape}; give each "
            f"head, or each row of q and head, its biases"
        )
    if not 1 <= view.shape[-1] <= _MOST_ELEMENTS:
        raise ValueError(
            f"{arg('bias.table')}: needs 1 to {_MOST_ELEMENTS} elements a row, got shape "
            f"{view.shape}; pass a bias for distance 0 at least"
        )
    check_lies("bias.table", view, "row")
    if first is not None and axes == 3:
        raise ValueError(
            f"{arg('bias.first')}: needs {arg('bias.table')} of two axes, got shape {view.shape}, "
            f"whose first element is of distance 0; leave it out"
        )
    arrays = {} if first is None else {"bias.first": first}
    bind({"bias.first": Array("1", INT32, "row", "pass one distance")}, arrays, {})
    return BiasArrays(
        *("table", view.ptr, view.strides[0] if axes == 3 else 0, view.strides[-2]),
        length=view.shape[-1],
        dtype=view.dtype,
        first=0 if first is None else first.ptr,
        ends_extend=axes == 2,
    )


def checked_form(form: Any) -> str:
    """Check the form of a plan's biases; "" for none."""
    if form is None:
        return ""
    if form not in FORMS:
        raise ValueError(
            f"bias_form: needs {', '.join(map(repr, FORMS))} or None, got {form!r}; pass 'linear' "
            f"for slopes, 'table' for a table"
        )
    found: str = form
    return found


def check_beside(masked: bool, softcap: float | None, columns: int) -> None:
    """Refuse what no kernel computes beside a bias."""
    if masked:
        raise ValueError(
            f"{arg('mask')}: needs None beside {arg('bias')}, got one; pass a window, or write "
            f"-inf into a table for keys that are not visible"
        )
    if softcap:
        raise ValueError(
            f"{arg('softcap')}: needs None beside {arg('bias')}, got {softcap}; no order of the "
            f"two is defined"
        )
    if columns > MOST_COLUMNS:
        raise ValueError(
            f"{arg('bias')}: needs keys and values of at most {MOST_COLUMNS} columns, got "
            f"{columns}; leave it out"
        )
