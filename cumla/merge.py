# SPDX-License-Identifier: Apache-2.0
"""Merging partial attention results: :func:`merge_attention_states`."""

from __future__ import annotations

from collections.abc import Sequence
from math import e, log2, prod
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from cumla import reference
from cumla.core.arrays import ArrayView, Call, from_numpy, open_call, to_numpy
from cumla.errors import NotPreparedError
from cumla.launch.device import require_hopper
from cumla.launch.kernel import ReadyLaunches
from cumla.launch.merge_states import MOST_PARTIALS, StateViews, merge_spec, prepare_merge
from cumla.launch.module import load
from cumla.mla.checks import check_elements, check_layout, check_output
from cumla.reference import AttentionState

if TYPE_CHECKING:
    from cumla.launch.kernel import PreparedLaunch
    from cumla.launch.module import LoadedKernel

__all__ = ["AttentionState", "merge_attention_states"]

_ready = ReadyLaunches()

_DTYPES = ("float32", "bfloat16", "float16")  # of outs and out


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

    For example over a shared prefix and the rest, or over the ranks among which a context is cut.
    With ``b`` the base of the logarithms and the sums over the partial results,
    ``lse = log_b(sum(b ** lses[i]))`` and ``out = sum(b ** (lses[i] - lse) * outs[i])``.
    An infinite ``lses[i]``, of either sign, says that nothing was attended there: its weight is 0,
    and its ``outs[i]`` may hold anything, NaN included. Arrays on the GPU are merged by a CUDA
    kernel (compute capability 9.0), on the caller's stream and without waiting for it; arrays on
    the CPU by :func:`cumla.reference.merge_attention_states`.

    Parameters
    ----------
    outs : sequence of arrays, or one array with a leading axis of partial results
        Any number of outputs, each ``(tokens, heads, head_dim)`` or
        ``(batch, q_len, heads, head_dim)``, in one shape and dtype: float32, bfloat16 or float16,
        of CuPy, PyTorch, JAX or NumPy. Any heads; head_dim a multiple of 8. Each with strides of
        its own that are multiples of 16 bytes, the last axis contiguous.
    lses : sequence of arrays, or one array with a leading axis of partial results
        Their log-sum-exps, float32, with any strides: ``(tokens, heads)`` for outs with three
        axes, ``(batch, heads, q_len)`` for outs with four, as :func:`cumla.mla_decode` returns
        them. Where yours are the other way round, pass a transposed view: nothing is copied.
    out : array, optional
        Of the shape of one of outs; float32, bfloat16 or float16, whatever the dtype of outs.
        Written and returned. May be one of outs, but must not overlap them in another way. Of the
        framework of outs; JAX's arrays cannot be written to.
    lse : array, optional
        Of the shape of one of lses, float32, written and returned. May be one of lses, but must not
        overlap them in another way.
    lse_base : float
        Base of the logarithms, of lses and of the result: ``math.e`` (the default) or 2.
    stream : optional
        As in :func:`cumla.mla_decode`.

    Returns
    -------
    AttentionState
        ``out``, in the dtype of outs unless ``out=`` is given, and ``lse``, in the layout of lses.
        Where all partial results have weight 0, out is 0 and lse +inf. Arrays of the framework of
        outs.

    Raises
    ------
    TypeError
        An argument is of the wrong kind: no array, a tracer, an unknown dtype. As with every error
        but the last, the message names it, and nothing has been launched or written.
    ValueError
        An argument does not fit: its number, shape, strides, alignment, place or value.
    UnsupportedDeviceError
        The arrays are on a GPU that is not of compute capability 9.0.
    MissingDependencyError
        The arrays are on a GPU, and CuPy, NVRTC or cuda.bindings is missing.
    CompilationError
        The kernel does not compile with the NVRTC that is installed.
    NotPreparedError
        The stream is being captured and the kernel is not loaded yet, or memory is needed that
        capture forbids.
    CumlaError
        The driver refuses a launch; base class of the four above.

    Notes
    -----
    Formula: FlashAttention (arXiv:2205.14135), section 3.1, applied to whole partial results. All
    arithmetic is float32, in the order of outs: the same call gives the same bits.

    One launch merges 60 partial results and reads each once. More are merged by further launches,
    which hand a float32 result on in memory of the caller's allocator; CuPy's serves no stream that
    is being captured.
    """
    log2_of_base = _checked_log2(lse_base)
    call = open_call(
        (*_named("outs", outs), *_named("lses", lses)), (("out", out), ("lse", lse)), stream=stream
    )
    counts = tuple(len(arrays) if isinstance(arrays, Sequence) else 0 for arrays in (outs, lses))
    key = (call.views, counts, log2_of_base, call.stream)
    ready = _ready.get(key)
    if ready is not None:
        with call:
            ready()
        return AttentionState(out, lse)
    arguments = _checked_arguments(call, outs, lses)
    if call.device is None:
        return _merge_on_cpu(call, outs, lses, out, lse, lse_base)
    require_hopper(call.device)
    with call:
        new_out = new_lse = None
        out_view, lse_view = arguments.out, arguments.lse
        spec = merge_spec(arguments.outs[0].dtype)
        kernel = load(spec, call.device, capturing=lambda: call.capturing)
        if out_view is None:
            new_out, out_view = call.empty(arguments.outs[0].shape, arguments.outs[0].dtype)
        if lse_view is None:
            new_lse, lse_view = call.empty(arguments.lses[0].shape, "float32")
        partials = [_state(*views) for views in zip(arguments.outs, arguments.lses, strict=True)]
        result = _state(out_view, lse_view)
        launches = _launches(call, kernel, partials, result, log2_of_base)
        for launch in launches:
            launch()
        if out is not None and lse is not None and len(launches) == 1:  # no memory of this call's
            _ready.keep(key, launches[0])
        return AttentionState(
            out if new_out is None else call.export(new_out),
            lse if new_lse is None else call.export(new_lse),
        )


class _Arguments(NamedTuple):
    """Checked views of one call, a stacked array as one view of each partial result."""

    outs: list[ArrayView]
    lses: list[ArrayView]
    out: ArrayView | None
    lse: ArrayView | None


def _launches(
    call: Call,
    kernel: LoadedKernel,
    partials: list[StateViews],
    result: StateViews,
    log2_of_base: float,
) -> list[PreparedLaunch]:
    """Prepare as many launches as it takes; each but the last hands its result on."""
    *earlier, last = range(0, len(partials), MOST_PARTIALS)
    carried = None
    launches = []
    for first in earlier:
        some = partials[first : first + MOST_PARTIALS]
        to = carried or _workspace(call, some[0].out.shape)
        launches.append(prepare_merge(kernel, some, carried, to, log2_of_base, call.stream))
        carried = to
    some = partials[last:]
    launches.append(prepare_merge(kernel, some, carried, result, log2_of_base, call.stream))
    return launches


def _state(out: ArrayView, lse: ArrayView) -> StateViews:
    """Give both the axes (batch, tokens, heads), which is a change of strides."""
    if len(out.shape) == 3:
        return StateViews(_with_batch_axis(out), _with_batch_axis(lse))
    (batch, heads, q_len), (of_batch, of_head, of_token) = lse.shape, lse.strides
    return StateViews(
        out, lse._replace(shape=(batch, q_len, heads), strides=(of_batch, of_token, of_head))
    )


def _with_batch_axis(view: ArrayView) -> ArrayView:
    return view._replace(shape=(1, *view.shape), strides=(0, *view.strides))


def _workspace(call: Call, shape: tuple[int, ...]) -> StateViews:
    """Allocate a float32 state: what one launch hands on to the next."""
    nbytes = 4 * prod(shape)
    try:
        memory = call.workspace(nbytes + nbytes // shape[-1])
    except NotPreparedError as error:
        raise NotPreparedError(
            f"outs: more than {MOST_PARTIALS} partial results need memory between launches, which "
            f"CuPy's allocator does not give while the stream is being captured; merge at most "
            f"{MOST_PARTIALS} in a call"
        ) from error
    out, lse = (_contiguous(memory, axes) for axes in (shape, shape[:-1]))
    return StateViews(out, lse._replace(ptr=memory.ptr + nbytes))


def _contiguous(memory: ArrayView, shape: tuple[int, ...]) -> ArrayView:
    strides = tuple([4 * prod(shape[axis + 1 :]) for axis in range(len(shape))])
    return memory._replace(shape=shape, strides=strides, dtype="float32")


def _merge_on_cpu(
    call: Call, outs: Any, lses: Any, out: Any, lse: Any, lse_base: float
) -> AttentionState:
    result = reference.merge_attention_states(
        _to_numpy("outs", outs),
        _to_numpy("lses", lses),
        out=None if out is None else to_numpy("out", out),
        lse=None if lse is None else to_numpy("lse", lse),
        lse_base=lse_base,
    )
    return AttentionState(
        from_numpy(call.framework, result.out) if out is None else out,
        from_numpy(call.framework, result.lse) if lse is None else lse,
    )


def _to_numpy(name: str, arrays: Any) -> Any:
    if isinstance(arrays, Sequence):
        return [to_numpy(name, array) for array in arrays]
    return to_numpy(name, arrays)


# --- checks --------------------------------------------------------------------------------------


def _checked_log2(lse_base: Any) -> float:
    """Return the binary logarithm of the base."""
    if not isinstance(lse_base, Real):
        raise TypeError(
            f"lse_base: needs a number, math.e or 2, got {type(lse_base).__qualname__}; pass one "
            f"of them"
        )
    if lse_base not in (e, 2):
        raise ValueError(f"lse_base: needs math.e or 2, got {lse_base}; convert the logarithms")
    return log2(lse_base)


def _named(name: str, arrays: Any) -> tuple[tuple[str, object], ...]:
    """Name the arrays of a sequence, or the one that holds all partial results."""
    if not isinstance(arrays, Sequence):
        return ((name, arrays),)
    if not arrays:
        raise ValueError(
            f"{name}: needs at least one partial result, got an empty sequence; skip the call "
            f"where there is nothing to merge"
        )
    return tuple((f"{name}[{i}]", array) for i, array in enumerate(arrays))


def _checked_arguments(call: Call, outs: Any, lses: Any) -> _Arguments:
    """Check the views of one call against each other."""
    *views, out, lse = call.views
    count = len(outs) if isinstance(outs, Sequence) else 1
    out_views = _split("outs", outs, cast("list[ArrayView]", views[:count]))
    lse_views = _split("lses", lses, cast("list[ArrayView]", views[count:]))
    _check_outs(out_views)
    if len(lse_views) != len(out_views):
        raise ValueError(
            f"lses: needs one array for each of the {len(out_views)} outs, got {len(lse_views)}; "
            f"pass both of each partial result"
        )
    lse_shape = _lse_shape(out_views[0].shape)
    for i, view in enumerate(lse_views):
        _check_lse(f"lses[{i}]", view, lse_shape)
    if out is not None:
        check_output("out", out, out_views[0].shape, _DTYPES)
        check_layout("out", out)
    if lse is not None:
        check_output("lse", lse, lse_shape, ("float32",))
        check_elements("lse", lse)
    return _Arguments(out_views, lse_views, out, lse)


def _split(name: str, arrays: Any, views: list[ArrayView]) -> list[ArrayView]:
    """Take a stacked array apart, a view of each partial result."""
    if isinstance(arrays, Sequence):
        return views
    (view,) = views
    if not view.shape or view.shape[0] == 0:
        raise ValueError(
            f"{name}: needs a leading axis of at least one partial result, got shape {view.shape}; "
            f"stack them, or pass a sequence of arrays"
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
            f"outs[0]: needs axes (tokens, heads, head_dim) or (batch, q_len, heads, head_dim), "
            f"got shape {first.shape}; reshape it (an array that is no sequence of arrays needs a "
            f"leading axis of partial results)"
        )
    if first.dtype not in _DTYPES:
        raise TypeError(
            f"outs[0]: needs {' or '.join(_DTYPES)}, got {first.dtype}; convert all of outs"
        )
    if 0 in first.shape:
        raise ValueError(
            f"outs[0]: needs at least one element on every axis, got shape {first.shape}; skip "
            f"the call where there is nothing to merge"
        )
    if first.shape[-1] % 8:
        raise ValueError(
            f"outs[0]: needs a head_dim that is a multiple of 8, got shape {first.shape}; pad the "
            f"last axis"
        )
    for i, view in enumerate(views):
        name = f"outs[{i}]"
        if view.dtype != first.dtype:
            raise TypeError(
                f"{name}: needs the dtype of outs[0], {first.dtype}, got {view.dtype}; convert it"
            )
        if view.shape != first.shape:
            raise ValueError(
                f"{name}: needs the shape of outs[0], {first.shape}, got {view.shape}; all are "
                f"results for the same queries and heads"
            )
        check_layout(name, view)


def _lse_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the log-sum-exps for that of an output."""
    *batch, tokens, heads, _ = shape
    return (*batch, heads, tokens) if batch else (tokens, heads)


def _check_lse(name: str, view: ArrayView, shape: tuple[int, ...]) -> None:
    if view.dtype != "float32":
        raise TypeError(f"{name}: needs float32, got {view.dtype}; convert it first")
    if view.shape != shape:
        axes = "(tokens, heads)" if len(shape) == 2 else "(batch, heads, q_len)"
        raise ValueError(
            f"{name}: needs shape {axes} = {shape}, got {view.shape}; transpose or reshape it"
        )
    check_elements(name, view)
