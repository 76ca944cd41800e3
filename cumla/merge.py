# SPDX-License-Identifier: Apache-2.0
"""Merging partial attention results: :func:`merge_attention_states`."""

from __future__ import annotations

from collections.abc import Sequence
from math import e, log2, prod
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

from cumla import reference
from cumla.core.arguments import check_dtype, check_layout, check_lies, check_shape
from cumla.core.names import arg
from cumla.core.operation import Operation, Output
from cumla.core.paged import lse_output
from cumla.core.spec import OUT_AND_LSE, Option, Spec, array
from cumla.core.state import AttentionState
from cumla.launch.device import require_hopper
from cumla.launch.merge_states import MOST_PARTIALS, StateViews, merge_launch

if TYPE_CHECKING:
    from cumla.core.arguments import Views
    from cumla.core.arrays import ArrayView
    from cumla.core.operation import Launchable
    from cumla.core.paged import Host, Results
    from cumla.launch.merge_states import Meeting

__all__ = ["AttentionState", "merge_attention_states"]

_DTYPES = ("float32", "bfloat16", "float16")  # of outs and out


def checked_base(name: str, value: Any) -> float:
    """Return the base of logarithms."""
    if not isinstance(value, Real):
        raise TypeError(
            f"{arg(name)}: needs a number, math.e or 2, got {type(value).__qualname__}; pass one "
            f"of them"
        )
    if value not in (e, 2):
        raise ValueError(f"{arg(name)}: needs math.e or 2, got {value}; convert the logarithms")
    return float(value)


def named(name: str, arrays: Any) -> dict[str, Any]:
    """Name the arrays of a sequence, or the one that holds all partial results."""
    if not isinstance(arrays, Sequence):
        return {name: arrays}
    if isinstance(arrays, AttentionState):
        raise TypeError(
            f"{arg(name)}: needs one array of each partial result, got one AttentionState; pass "
            f"[a.out, b.out], [a.lse, b.lse] of a and b"
        )
    if not arrays:
        raise ValueError(
            f"{arg(name)}: needs at least one partial result, got an empty sequence; skip the call "
            f"where there is nothing to merge"
        )
    return {f"{name}[{i}]": array for i, array in enumerate(arrays)}


MERGE = Spec(
    "merge_attention_states",
    (
        array("outs", named, is_stack=True, must_split=True),
        array("lses", named, is_stack=True, must_split=True),
        *OUT_AND_LSE,
        Option("lse_base", e, checked_base, "float"),
    ),
    positional=2,
    kernels=("merge_states_",),
    returns=("out", "lse"),
    result=AttentionState,
)


@MERGE
def merge_attention_states(
    outs: Any,
    lses: Any,
    *,
    out: Any = None,
    lse: Any = None,
    lse_base: float = e,
    stream: Any = None,
) -> AttentionState:
    """Merge the results of attention over parts of the keys into that of attention over all.

    The parts may be a shared prefix and the rest, or the tokens of several ranks. With ``b`` the
    base of the logarithms, and sums over the partial results, ``lse = log_b(sum(b ** lses[i]))``
    and ``out = sum(b ** (lses[i] - lse) * outs[i])``. An infinite ``lses[i]``, of either sign,
    marks an empty part: its weight is 0, and its ``outs[i]`` may hold anything, NaN included.
    Devices and streams are as in :func:`cumla.mla_decode`; arrays on the CPU are merged by
    :func:`cumla.reference.merge_attention_states`.

    Parameters
    ----------
    outs : sequence of arrays, or one array with a leading axis of partial results
        Any number of outputs, each ``(tokens, heads, head_dim)`` or
        ``(batch, q_len, heads, head_dim)``, in one shape and dtype: float32, bfloat16 or float16,
        of CuPy, PyTorch, JAX or NumPy. Any heads; head_dim a multiple of 8. Each with strides of
        its own that are multiples of 16 bytes, the last axis contiguous.
    lses : sequence of arrays, or one array with a leading axis of partial results
        Their log-sum-exps, float32, with any strides: the shape of outs without their last axis, as
        :func:`cumla.mla_decode` returns them. If heads come before tokens in your arrays, pass a
        transposed view; nothing is copied.
    out, lse : array, optional
        Arrays of the framework of outs, written and returned: the shape of one of outs in float32,
        bfloat16 or float16, and the shape of one of lses in float32. Each may be one of outs or
        lses; any other overlap is refused. JAX arrays cannot be written to.
    lse_base : float
        Base of the logarithms, of lses and of the result: ``math.e`` (the default) or 2.
    stream : optional
        As in :func:`cumla.mla_decode`.

    Returns
    -------
    AttentionState
        ``out``, in the dtype of outs unless ``out=`` is given, and ``lse``, of the shape of lses.
        Where all partial results have weight 0, out is 0 and lse -inf. Arrays of the framework of
        outs.

    Raises
    ------
    TypeError, ValueError, CumlaError
        As :func:`cumla.mla_decode`; there is no partial result.

    Notes
    -----
    Formula: FlashAttention (arXiv:2205.14135), section 3.1, applied to whole partial results. All
    arithmetic is float32, in the order of outs: the same call gives the same bits.

    One launch merges 60 partial results and reads each once. More need further launches and a
    float32 intermediate result from the caller's allocator. CuPy's allocator cannot be used during
    a capture.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> out, lse = np.ones((1, 1, 8), np.float32), np.zeros((1, 1), np.float32)
    >>> cumla.merge_attention_states([out, 3 * out], [lse, lse]).out[0, 0].tolist()
    [2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    """
    state: AttentionState = _MERGE.call(outs, lses, out, lse, lse_base, stream)
    return state


class Arguments(NamedTuple):
    """Checked views of one call, a stacked array as one view of each partial result."""

    outs: tuple[ArrayView, ...]
    lses: tuple[ArrayView, ...]
    base: float


class Merge(Operation[Arguments, int]):
    """Merges partial results; its key is the bytes that one launch hands on to the next."""

    meeting: Meeting | None = None  # of ranks that wait for one another

    def arguments(self, views: Views, options: Any) -> Arguments:
        outs, lses = _apart("outs", views), _apart("lses", views)
        _check_outs(outs)
        _check_lses(lses, outs)
        return Arguments(tuple(outs), tuple(lses), options.lse_base)

    def outputs(self, arguments: Arguments) -> tuple[Output, ...]:
        first, lse = arguments.outs[0], arguments.lses[0]
        dtypes = (first.dtype, *[dtype for dtype in _DTYPES if dtype != first.dtype])
        out = Output("out", first.shape, dtypes)
        return out, lse_output(lse.shape)

    def check_overlap(self, views: Views, written: Sequence[str]) -> None:
        """Let out be one of outs, and lse one of lses."""
        given = {name: views[name] for name in written}
        for name in ("outs", "lses"):
            for i, view in enumerate(_apart(name, views)):
                if view != given.get(name[:-1]):
                    given[f"{name}[{i}]"] = view
        super().check_overlap(given, written)

    def key(self, arguments: Arguments, device: int) -> int:
        require_hopper(device)
        first = arguments.outs[0]
        nbytes = 4 * prod(first.shape)
        return nbytes + nbytes // first.shape[-1] if len(arguments.outs) > MOST_PARTIALS else 0

    def workspace_bytes(self, key: int) -> int:
        return key

    def recipe(
        self, key: int, arguments: Arguments, outs: Sequence[ArrayView], buffer: int
    ) -> Sequence[Launchable]:
        """Describe as many launches as it takes; each but the last hands its result on."""
        if 0 in arguments.outs[0].shape:
            return ()
        partials = [_state(*views) for views in zip(arguments.outs, arguments.lses, strict=True)]
        handed_on = _contiguous(arguments.outs[0], buffer, partials[0].out.shape)
        launches, carried = [], None
        for first in range(0, len(partials), MOST_PARTIALS):
            after = first + MOST_PARTIALS
            result = handed_on if after < len(partials) else _state(*outs)
            some = partials[first:after]
            base = log2(arguments.base)
            launches.append(merge_launch(some, carried, result, base, self.meeting))
            carried = result
        return launches

    def reference(self, host: Host, arguments: Arguments) -> Results:
        outs, lses = (
            host[name] if name in host else [a for n, a in host.items() if n.startswith(f"{name}[")]
            for name in ("outs", "lses")
        )
        return reference.merge_attention_states(
            outs, lses, out=host.get("out"), lse=host.get("lse"), lse_base=arguments.base
        )


_MERGE = Merge(MERGE)


def _state(out: ArrayView, lse: ArrayView) -> StateViews:
    """Reshape both to the axes (batch, tokens, heads)."""
    if len(out.shape) == 4:
        return StateViews(out, lse)
    return StateViews(
        *[v._replace(shape=(1, *v.shape), strides=(0, *v.strides)) for v in (out, lse)]
    )


def _contiguous(like: ArrayView, buffer: int, shape: tuple[int, ...]) -> StateViews:
    """Lay a float32 state out in a buffer."""
    views = []
    for axes, address in ((shape, buffer), (shape[:-1], buffer + 4 * prod(shape))):
        strides = tuple([4 * prod(axes[axis + 1 :]) for axis in range(len(axes))])
        views.append(like._replace(ptr=address, shape=axes, strides=strides, dtype="float32"))
    return StateViews(*views)


# --- checks --------------------------------------------------------------------------------------


def _apart(name: str, views: Views) -> list[ArrayView]:
    """List the partial results; a stacked array is taken apart."""
    view = views.get(name)
    if view is None:
        return [v for n, v in views.items() if v is not None and n.startswith(f"{name}[")]
    if not view.shape or view.shape[0] == 0:
        raise ValueError(
            f"{arg(name)}: needs a leading axis of at least one partial result, got shape "
            f"{view.shape}; stack them, or pass a sequence of arrays"
        )
    shape, strides = view.shape[1:], view.strides[1:]
    return [
        view._replace(ptr=view.ptr + i * view.strides[0], shape=shape, strides=strides)
        for i in range(view.shape[0])
    ]


def _check_outs(views: list[ArrayView]) -> None:
    first = views[0]
    if len(first.shape) not in (3, 4):
        raise ValueError(
            f"{arg('outs[0]')}: needs axes (tokens, heads, head_dim) or (batch, q_len, heads, "
            f"head_dim), got shape {first.shape}; reshape it (an array that is no sequence of "
            f"arrays needs a leading axis of partial results)"
        )
    check_dtype("outs[0]", first.dtype, _DTYPES, f"convert {arg('all of outs')}")
    if first.shape[-1] % 8 or not first.shape[-1]:
        raise ValueError(
            f"{arg('outs[0]')}: needs a head_dim that is a multiple of 8, got shape "
            f"{first.shape}; pad the last axis"
        )
    for i, view in enumerate(views):
        name = f"outs[{i}]"
        if view.dtype != first.dtype:
            raise TypeError(
                f"{arg(name)}: needs the dtype of {arg('outs[0]')}, {first.dtype}, got "
                f"{view.dtype}; convert it"
            )
        if view.shape != first.shape:
            raise ValueError(
                f"{arg(name)}: needs the shape of {arg('outs[0]')}, {first.shape}, got "
                f"{view.shape}; all are results for the same queries and heads"
            )
        check_layout(name, view)


def _check_lses(views: list[ArrayView], outs: list[ArrayView]) -> None:
    if len(views) != len(outs):
        raise ValueError(
            f"{arg('lses')}: needs one array for each of the {len(outs)} {arg('outs')}, got "
            f"{len(views)}; pass both of each partial result"
        )
    shape = outs[0].shape[:-1]
    axes = "(batch, q_len, heads)" if len(shape) == 3 else "(tokens, heads)"
    for i, view in enumerate(views):
        name = f"lses[{i}]"
        check_dtype(name, view.dtype, ("float32",))
        check_shape(name, view, axes, shape, "transpose or reshape it")
        check_lies(name, view, "elements")
