# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: :func:`apply_rope`."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from cumla import reference
from cumla.core.arguments import WIDE, Array, bind
from cumla.core.names import arg
from cumla.core.operation import Output, parts_on_host
from cumla.core.paged import refuse_positions
from cumla.core.spec import REQUIRED, Input, Out, Spec, array, flag
from cumla.launch.kernel import Unplanned
from cumla.launch.mha.append_kv_cache import AppendKVArguments, append_kv_launch
from cumla.mha.arguments import (
    ANGLES,
    DTYPES,
    ROTARY_OFFSET,
    batched,
    check_rotation,
    checked_rows,
    tables_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cumla.core.arguments import Views
    from cumla.core.arrays import ArrayView
    from cumla.core.paged import Host, Results
    from cumla.launch.kernel import Launch

__all__ = ["apply_rope"]


def _queries(name: str, value: Any) -> dict[str, Any]:
    if value is None:
        raise TypeError(
            f"{arg(name)}: needs an array, got None; pass keys alone as {arg('q')}, with k=None"
        )
    return {name: value}


APPLY_ROPE = Spec(
    "apply_rope",
    (
        Input("q", REQUIRED, _queries, must_split=True),
        array("k", is_nullable=True),
        array("positions"),
        array("cos_sin", ANGLES),
        flag("interleaved", False),
        ROTARY_OFFSET,
        Out("q_out"),
        Out("k_out", of="k"),
    ),
    positional=4,
    kernels=("append_kv_cache_bfloat16", "append_kv_cache_float"),  # none of e4m3
    returns=("q_out", "k_out"),
    result=lambda *both: both,
)


@APPLY_ROPE
def apply_rope(
    q: Any,
    k: Any,
    positions: Any,
    cos_sin: Any,
    *,
    interleaved: bool = False,
    rotary_offset: int = 0,
    q_out: Any = None,
    k_out: Any = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Rotate pairs of columns of queries and keys by the positions of their tokens.

    If the keys are written to a cache, :func:`append_kv_cache` rotates keys and queries in the same
    kernel. Devices and streams are as in :func:`cumla.mla_decode`; arrays on the CPU are rotated by
    :func:`cumla.reference.apply_rope`.

    Parameters
    ----------
    q : array
        ``(tokens, num_heads, head_dim)`` bfloat16, float16 or float32, head_dim a multiple of 8 up
        to 512; of CuPy, PyTorch, JAX or NumPy. Strides are any multiples of 16 bytes, the last axis
        is contiguous.
    k : array or None
        ``(tokens, num_kv_heads, head_dim)`` of q's dtype. None rotates q alone.
    positions : array
        ``(tokens,)`` int32 or int64. Rows whose position is negative, or beyond the table,
        are copied as they are.
    cos_sin : array or pair of arrays
        ``(max_position, rotary_dim)`` float32, bfloat16 or float16: the cosines of all pairs of
        columns, then their sines; or ``(cos, sin)``, each ``(max_position, rotary_dim / 2)``, any
        strides. A table freqs_cis ``(max_position, rotary_dim / 2, 2)`` is passed as
        ``(freqs_cis[..., 0], freqs_cis[..., 1])``. rotary_dim is a multiple of 16, at most
        head_dim. With c and s the j-th of them, pair j becomes
        ``(c * x0 - s * x1, s * x0 + c * x1)``, computed in float32.
    interleaved : bool
        Pair j is columns 2 j and 2 j + 1 (GPT-J); if False, j and ``j + rotary_dim / 2`` (GPT-NeoX,
        Llama, Qwen). :func:`append_mla_cache` has the other default, as DeepSeek's models do.
    rotary_offset : int
        The first column that is rotated, a multiple of 8; the others are copied.
    q_out, k_out : array, optional
        Of the shapes and dtype of q and k. Pass q and k themselves to rotate them in place. New
        arrays by default.
    stream : optional
        A CUDA stream, as in :func:`cumla.mla_decode`. By default the current stream of q's
        framework.

    Returns
    -------
    q, k : array
        Rotated, in the framework of q; k is None where none was given.

    Raises
    ------
    TypeError, ValueError, CumlaError
        As :func:`append_kv_cache`. During a capture, NotPreparedError is also raised if an output
        is missing and CuPy would have to allocate it.

    Notes
    -----
    The rotation is that of RoFormer (arXiv:2104.09864), section 3.4.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> quarter = np.repeat(np.float32([[1, 0], [0, 1]]), 8, axis=1)  # cosines, then sines
    >>> q = np.arange(16, dtype=np.float16).reshape(1, 1, 16)
    >>> turned, _ = cumla.apply_rope(q, None, np.array([1]), quarter)
    >>> turned[0, 0, [0, 1, 8, 9]].tolist()
    [-8.0, -9.0, 0.0, 1.0]
    """
    rotated: tuple[Any, Any] = _ROTATE.call(
        q, k, positions, cos_sin, interleaved, rotary_offset, q_out, k_out, stream
    )
    return rotated


class _Arguments(NamedTuple):
    q: ArrayView
    k: ArrayView | None
    positions: ArrayView
    cos: ArrayView
    sin: ArrayView
    interleaved: bool
    rotary_offset: int


class _Rotate(Unplanned[_Arguments]):
    """Rotates rows; keys are written as into a cache of one token a page."""

    trusted = ("positions",)
    in_place = MappingProxyType({"q_out": "q", "k_out": "k"})

    def arguments(self, views: Views, options: Any) -> _Arguments:
        given = {name: view for name, view in views.items() if view is not None}
        q = _checked("q", given["q"], DTYPES)
        k = _checked("k", given["k"], (q.dtype,)) if "k" in given else None
        tokens, _, columns = q.shape
        if k is not None and (k.shape[0], k.shape[2]) != (tokens, columns):
            raise ValueError(
                f"{arg('k')}: needs tokens and columns of {arg('q')}, whose shape is {q.shape}, "
                f"got {k.shape}; pass the keys of the same tokens"
            )
        bind({"positions": Array("tokens", WIDE)}, views, {"tokens": tokens})
        cos, sin = tables_of(given)
        assert cos is not None and sin is not None
        check_rotation(cos, columns, options.rotary_offset)
        return _Arguments(q, k, given["positions"], cos, sin, *options)

    def outputs(self, arguments: _Arguments) -> tuple[Output, ...]:
        rows = {"q_out": arguments.q, "k_out": arguments.k}
        return tuple(
            Output(name, view.shape, (view.dtype,))
            for name, view in rows.items()
            if view is not None
        )

    def launches(self, arguments: _Arguments, outs: Sequence[ArrayView]) -> Sequence[Launch]:
        a = arguments
        if not a.q.shape[0]:
            return ()
        q_out, k_out = outs[0], _as_pages(outs[1]) if a.k is not None else None
        return (
            append_kv_launch(
                AppendKVArguments(
                    q=batched(a.q),
                    q_out=batched(q_out),
                    k=None if a.k is None else batched(a.k),
                    k_cache=k_out,
                    positions=a.positions,
                    cos=a.cos,
                    sin=a.sin,
                    interleaved=a.interleaved,
                    rotary_offset=a.rotary_offset,
                )
            ),
        )

    def check_values(self, host: Host, arguments: _Arguments) -> None:
        count = arguments.cos.shape[0]
        refuse_positions(host["positions"], count, "its rows would not be rotated")

    def reference(self, host: Host, arguments: _Arguments) -> Results:
        results = reference.apply_rope(
            host["q"],
            host.get("k"),
            host["positions"],
            parts_on_host(host, "cos_sin"),
            interleaved=arguments.interleaved,
            rotary_offset=arguments.rotary_offset,
            q_out=host.get("q_out"),
            k_out=host.get("k_out"),
        )
        return [result for result in results if result is not None]


_ROTATE = _Rotate(APPLY_ROPE)


def _checked(name: str, view: ArrayView, dtypes: tuple[str, ...]) -> ArrayView:
    if len(view.shape) != 3:
        raise ValueError(
            f"{arg(name)}: needs shape (tokens, heads, head_dim), got {view.shape}; reshape it"
        )
    checked_rows(name, view, dtypes, "(tokens, heads, head_dim)")
    return view


def _as_pages(view: ArrayView) -> ArrayView:
    """See the rows of each token as a page of one token."""
    (tokens, heads, columns), (token, head, column) = view.shape, view.strides
    return view._replace(shape=(tokens, 1, heads, columns), strides=(token, token, head, column))
