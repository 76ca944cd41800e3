# SPDX-License-Identifier: Apache-2.0
"""Dense MLA attention over a paged cache: :func:`mla_decode` and its plan."""

from __future__ import annotations

import logging
import math
import os
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cumla import reference
from cumla.arrays import ArrayView, Call, from_numpy, open_call, open_device, to_numpy
from cumla.launch.device import import_cupy, properties, require_hopper
from cumla.launch.mla_decode import SPECS as DECODE_SPECS
from cumla.launch.mla_decode import launch_decode
from cumla.launch.mla_merge import SPECS as MERGE_SPECS
from cumla.launch.mla_merge import launch_merge
from cumla.launch.mla_plan import BLOCK_TOKENS, HEAD_DIM, VALUE_DIM, MLADecodeKey
from cumla.launch.mla_schedule import SPECS as SCHEDULE_SPECS
from cumla.launch.mla_schedule import launch_schedule
from cumla.launch.module import load
from cumla.reference import MLADecodeResult

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MLADecodePlan", "MLADecodeResult", "mla_decode", "prepare"]

_log = logging.getLogger(__name__)

_DTYPES = ("bfloat16", "float16")
_DECODE = dict(zip(_DTYPES, DECODE_SPECS, strict=True))
_MERGE = dict(zip(_DTYPES, MERGE_SPECS, strict=True))
_ALIGNMENT = 16  # bytes: of pointers and strides, what the copy engine moves
_SCALES = (1e-30, 1e30)  # of the scores; products with them stay normal float32 numbers


def mla_decode(
    q: Any,
    kv_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    plan: MLADecodePlan | None = None,
    out: Any = None,
    lse: Any = None,
    stream: Any = None,
) -> MLADecodeResult:
    """Attend to a paged cache of latent rows: MLA decoding after weight absorption.

    For every query row, with ``k`` the 576 and ``v`` the first 512 values of a visible token's cached row,
    ``out = softmax(softmax_scale * q @ k.T) @ v``. Token ``t`` of request ``i`` lies in page
    ``block_table[i, t // page_size]`` at row ``t % page_size``. Arrays on the GPU are computed by CUDA kernels
    (compute capability 9.0), on the caller's stream and without waiting for it; arrays on the CPU by
    :func:`cumla.reference.mla_decode`.

    Parameters
    ----------
    q : array
        ``(batch, q_len, num_heads, 576)`` bfloat16 or float16, of CuPy, PyTorch, JAX or NumPy. Any strides that are
        multiples of 16 bytes, the last axis contiguous.
    kv_cache : array
        ``(num_pages, page_size, num_kv_heads, 576)``, or ``(num_pages, page_size, 576)`` for one kv head, in q's
        dtype; strides as for q. num_kv_heads divides num_heads; page_size is 64. Slots that no request uses may
        hold anything, NaN included.
    block_table : array
        ``(batch, max_pages)`` int32, rows contiguous. Entries behind a request's last page are never read; a page
        number outside ``[0, num_pages)`` in a used entry reads as zeros.
    cache_seqlens : array
        ``(batch,)`` int32: cached tokens of each request, the q_len newest included. Clamped to
        ``[0, max_pages * page_size]``.
    softmax_scale : float, optional
        Factor of the scores; 576 ** -0.5 by default. A real model passes that of its un-absorbed head dimension.
    causal : bool
        Query i of q_len sees ``cache_seqlens - (q_len - 1 - i)`` tokens; all of them if False.
    plan : MLADecodePlan, optional
        A schedule and workspace made ready by :meth:`MLADecodePlan.update`; without it both are made in this call.
    out : array, optional
        ``(batch, q_len, num_heads, 512)`` in q's dtype or float32, written and returned. Of q's framework; JAX's
        arrays cannot be written to.
    lse : array, optional
        ``(batch, num_heads, q_len)`` float32, written and returned.
    stream : optional
        A CUDA stream: an integer handle, or a stream object of CuPy, PyTorch or cuda.core. By default the
        current stream of q's framework (CuPy's for JAX).

    Returns
    -------
    MLADecodeResult
        ``out``, and ``lse``: the natural logarithm of the sum of ``exp(softmax_scale * q.k)``. Where nothing is
        visible out is 0 and lse +inf. Arrays of q's framework.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it. Nothing has been launched or written.
    UnsupportedDeviceError
        The arrays are on a GPU that is not of compute capability 9.0.
    NotPreparedError
        The stream is being captured and a kernel is not loaded yet, or memory is needed that capture forbids.

    Notes
    -----
    Formula and conventions: DeepSeek-V2 (arXiv:2405.04434), section 2.1, with the absorbed weights of its appendix.
    """
    if plan is not None:
        if not isinstance(plan, MLADecodePlan):
            raise TypeError(f"plan: needs a cumla.MLADecodePlan, got {type(plan).__qualname__}")
        plan._check_causal(causal)
        return plan.run(
            q,
            kv_cache,
            block_table,
            cache_seqlens,
            softmax_scale=softmax_scale,
            out=out,
            lse=lse,
            stream=stream,
        )
    call = _open(q, kv_cache, block_table, cache_seqlens, out, lse, stream)
    scale = _checked_scale(softmax_scale)
    arguments = _checked_arguments(call)
    if call.device is None:
        return _decode_on_cpu(
            call, (q, kv_cache, block_table, cache_seqlens), out, lse, scale, causal
        )
    key = _key_of(arguments, causal, call.device)
    with call:
        _check_data(call, arguments)
        result = _Outputs.of(call, arguments, out, lse)
        buffer = call.workspace(key.layout.nbytes).ptr
        _schedule(call, key, buffer, arguments.cache_seqlens)
        _attend(call, key, buffer, arguments, result, scale)
        return result.export(call)


class MLADecodePlan:
    """Schedule and workspace of :func:`mla_decode`, to be used for every layer of a decoding step.

    ``update`` computes on the device, from the lengths there, who works on which part of the cache; ``run`` uses that
    for as many layers as you like. Neither waits for the device or copies to the host, and both can be captured into
    a CUDA graph, which then serves changing lengths. A plan belongs to one stream at a time: the one of its last
    ``update``. It owns one buffer and no other state on the device.

    Parameters
    ----------
    batch, q_len, num_heads : int
        As in ``q`` ``(batch, q_len, num_heads, 576)``.
    num_kv_heads : int
        Divides num_heads.
    page_size : int
        Tokens of a cache page: 64.
    dtype : str
        ``"bfloat16"`` or ``"float16"``: of q and kv_cache.
    causal : bool
        As in :func:`mla_decode`.
    device : int, optional
        CUDA ordinal; by default that of `like` or `workspace`, else CuPy's current device.
    workspace : array, optional
        uint8, contiguous, at least :meth:`workspace_bytes` long and 256-byte aligned, of any framework. Plans may
        share one as long as each is updated before it runs.
    like : array, optional
        An array whose framework and device own the buffer; CuPy without it.
    stream : optional
        Stream on which the buffer is allocated, as in :func:`mla_decode`.

    Raises
    ------
    TypeError, ValueError
        A number does not fit, or the workspace is too small.
    UnsupportedDeviceError
        The GPU is not of compute capability 9.0.

    Examples
    --------
    >>> plan = cumla.MLADecodePlan.from_arrays(q, layers[0].kv_cache)   # doctest: +SKIP
    >>> plan.update(cache_seqlens)                                      # doctest: +SKIP
    >>> for layer in layers:                                            # doctest: +SKIP
    ...     out, lse = plan.run(layer.q, layer.kv_cache, block_table, cache_seqlens)
    """

    def __init__(
        self,
        batch: int,
        q_len: int,
        num_heads: int,
        *,
        num_kv_heads: int = 1,
        page_size: int = BLOCK_TOKENS,
        dtype: str = "bfloat16",
        causal: bool = True,
        device: int | None = None,
        workspace: Any = None,
        like: Any = None,
        stream: Any = None,
    ) -> None:
        _check_plan_numbers(batch, q_len, num_heads, num_kv_heads, page_size, dtype)
        shape = (batch, q_len, num_heads, num_kv_heads, page_size, dtype)
        given = like if workspace is None else workspace
        name = "like" if workspace is None else "workspace"
        call = (
            open_device(device, stream=stream)
            if given is None
            else open_call(((name, given),), stream=stream)
        )
        if device is not None and call.device != device:
            raise ValueError(f"{name}: needs an array on CUDA device {device}, got {call.device}")
        self._key = _key(shape, causal, call.device)
        self._owner: object = workspace
        self._buffer = 0
        self._stream: int | None = None  # of the last update
        self._lengths: np.ndarray[Any, Any] | None = None  # of the last update, on the CPU
        self._checked: tuple[Any, ...] | None = None  # what run() found in order last time
        if call.device is None:
            return
        with call:
            if workspace is None:
                self._owner, view = call.empty((self._key.layout.nbytes,), "uint8")
            else:
                (view,) = call.views  # type: ignore[assignment]
                _check_workspace(view, self._key.layout.nbytes)
        self._buffer = view.ptr

    @classmethod
    def from_arrays(
        cls,
        q: Any,
        kv_cache: Any,
        *,
        causal: bool = True,
        workspace: Any = None,
        stream: Any = None,
    ) -> MLADecodePlan:
        """Make a plan for the shapes of q and kv_cache, with a buffer of q's framework.

        Parameters
        ----------
        q, kv_cache : array
            As in :func:`mla_decode`; only their shapes, dtype and device are looked at.
        causal, workspace, stream
            As for the class.

        Returns
        -------
        MLADecodePlan
        """
        call = open_call((("q", q), ("kv_cache", kv_cache)), stream=stream)
        q_view, kv_view = call.views
        assert q_view is not None
        assert kv_view is not None
        kv_view = _with_kv_head_axis(kv_view)
        _check_query_and_cache(q_view, kv_view)
        with call:
            return cls(
                *q_view.shape[:3],
                num_kv_heads=kv_view.shape[2],
                page_size=kv_view.shape[1],
                dtype=q_view.dtype,
                causal=causal,
                device=call.device,
                workspace=workspace,
                like=q,
                stream=stream,
            )

    @staticmethod
    def workspace_bytes(
        batch: int,
        q_len: int,
        num_heads: int,
        *,
        num_kv_heads: int = 1,
        sm_count: int | None = None,
    ) -> int:
        """Size of a plan's buffer; a pure function of its arguments.

        Parameters
        ----------
        batch, q_len, num_heads, num_kv_heads : int
            As for the class.
        sm_count : int, optional
            Multiprocessors of the GPU; by default those of CuPy's current device.

        Returns
        -------
        int
            Bytes.
        """
        _check_plan_numbers(batch, q_len, num_heads, num_kv_heads, BLOCK_TOKENS, _DTYPES[0])
        if sm_count is None:
            sm_count = properties(import_cupy().cuda.Device().id).sm_count
        shape = (batch, q_len, num_heads, num_kv_heads, BLOCK_TOKENS, _DTYPES[0])
        return MLADecodeKey(*shape, causal=False, device=0, sm_count=sm_count).layout.nbytes

    @property
    def key(self) -> MLADecodeKey:
        """The shape for which this plan was made."""
        return self._key

    def update(self, cache_seqlens: Any, *, stream: Any = None) -> None:
        """Compute the schedule for these lengths, on the device.

        Parameters
        ----------
        cache_seqlens : array
            ``(batch,)`` int32, as in :func:`mla_decode`. Read when the stream reaches this call.
        stream : optional
            As in :func:`mla_decode`; the runs that follow must be on the same one.

        Raises
        ------
        TypeError, ValueError
            cache_seqlens does not fit the plan.
        """
        call = open_call((("cache_seqlens", cache_seqlens),), stream=stream)
        (view,) = call.views
        assert view is not None
        _check_seqlens(view, self._key.batch)
        self._check_device(call)
        if call.device is None:
            self._lengths = np.array(to_numpy("cache_seqlens", cache_seqlens))
            return
        with call:
            _schedule(call, self._key, self._buffer, view)
        self._stream = call.stream

    def run(
        self,
        q: Any,
        kv_cache: Any,
        block_table: Any,
        cache_seqlens: Any,
        *,
        softmax_scale: float | None = None,
        out: Any = None,
        lse: Any = None,
        stream: Any = None,
    ) -> MLADecodeResult:
        """Attend with the schedule of the last update, and with the lengths it was given.

        Parameters
        ----------
        q, kv_cache, block_table, cache_seqlens, softmax_scale, out, lse, stream
            As in :func:`mla_decode`. The values of cache_seqlens are those of the last update; should they have
            changed since, those of the update count.

        Returns
        -------
        MLADecodeResult

        Raises
        ------
        TypeError, ValueError
            An argument does not fit; the plan is of another shape, device or stream, or was never updated.
        """
        call = _open(q, kv_cache, block_table, cache_seqlens, out, lse, stream)
        scale = _checked_scale(softmax_scale)
        arguments = self._checked_arguments(call)
        if call.device is None:
            assert self._lengths is not None
            return _decode_on_cpu(
                call, (q, kv_cache, block_table, self._lengths), out, lse, scale, self._key.causal
            )
        with call:
            _check_data(call, arguments)
            result = _Outputs.of(call, arguments, out, lse)
            _attend(call, self._key, self._buffer, arguments, result, scale)
            return result.export(call)

    def _checked_arguments(self, call: Call) -> _Arguments:
        """Check arguments against each other and the plan; layouts that passed last time pass quickly."""
        self._check_device(call)
        if (call.device is not None and call.stream != self._stream) or (
            call.device is None and self._lengths is None
        ):
            raise ValueError(self._stream_problem(call.stream))
        signature = tuple([view and view[1:] for view in call.views])
        if signature == self._checked and not _misaligned(call.views):
            q, kv_cache, block_table, cache_seqlens, out, lse = call.views
            assert q and kv_cache and block_table and cache_seqlens
            return _Arguments(q, _with_kv_head_axis(kv_cache), block_table, cache_seqlens, out, lse)
        arguments = _checked_arguments(call)
        self._check_shape(arguments)
        self._checked = signature
        return arguments

    def _check_device(self, call: Call) -> None:
        if call.device != self._key.device:
            raise ValueError(
                f"plan: made for {_device_name(self._key.device)}, got arrays on "
                f"{_device_name(call.device)}; make a plan for each device"
            )

    def _stream_problem(self, stream: int) -> str:
        if self._stream is None:
            return "plan: never updated; call plan.update(cache_seqlens) before the first run"
        return (
            f"plan: updated on stream {self._stream:#x}, got a run on stream {stream:#x}; a plan serves one stream "
            f"at a time: call plan.update on this stream first"
        )

    def _check_shape(self, arguments: _Arguments) -> None:
        key = self._key
        batch, q_len, num_heads, _ = arguments.q.shape
        _, page_size, num_kv_heads, _ = arguments.kv_cache.shape
        got = (batch, q_len, num_heads, num_kv_heads, page_size, arguments.q.dtype)
        made = (key.batch, key.q_len, key.num_heads, key.num_kv_heads, key.page_size, key.dtype)
        if got != made:
            names = "(batch, q_len, num_heads, num_kv_heads, page_size, dtype)"
            raise ValueError(
                f"plan: made for {names} {made}, got {got}; make a plan for this shape"
            )

    def _check_causal(self, causal: bool) -> None:
        if self._key.q_len > 1 and bool(causal) != self._key.causal:
            raise ValueError(
                f"plan: made with causal={self._key.causal}, got causal={causal}; make a plan for each"
            )


def prepare(device: int | None = None, *, dtypes: Sequence[str] = _DTYPES) -> None:
    """Compile and load all kernels, so that later calls neither wait for a compiler nor fail under stream capture.

    Parameters
    ----------
    device : int, optional
        CUDA ordinal; CuPy's current device by default.
    dtypes : sequence of str
        Of q: ``"bfloat16"``, ``"float16"``.

    Raises
    ------
    ValueError
        An unknown dtype.
    UnsupportedDeviceError, CompilationError, MissingDependencyError
        The kernels cannot be had here.
    """
    for dtype in dtypes:
        _check_dtype("dtypes", dtype)
    if device is None:
        device = import_cupy().cuda.Device().id
    require_hopper(device)
    for spec in SCHEDULE_SPECS:
        load(spec, device, capturing=lambda: False)
    for dtype in dtypes:
        load(_DECODE[dtype], device, capturing=lambda: False)
        load(_MERGE[dtype], device, capturing=lambda: False)


class _Arguments(NamedTuple):
    """Checked views of one call; kv_cache with its head axis."""

    q: ArrayView
    kv_cache: ArrayView
    block_table: ArrayView
    cache_seqlens: ArrayView
    out: ArrayView | None
    lse: ArrayView | None


class _Outputs(NamedTuple):
    """Where the results go: the caller's arrays, or new ones of the caller's framework."""

    out: Any
    out_view: ArrayView
    lse: Any
    lse_view: ArrayView
    given: tuple[bool, bool]

    @classmethod
    def of(cls, call: Call, arguments: _Arguments, out: Any, lse: Any) -> _Outputs:
        batch, q_len, num_heads, _ = arguments.q.shape
        out_view, lse_view = arguments.out, arguments.lse
        given = (out_view is not None, lse_view is not None)
        if out_view is None:
            out, out_view = call.empty((batch, q_len, num_heads, VALUE_DIM), arguments.q.dtype)
        if lse_view is None:
            lse, lse_view = call.empty((batch, num_heads, q_len), "float32")
        return cls(out, out_view, lse, lse_view, given)

    def export(self, call: Call) -> MLADecodeResult:
        out = self.out if self.given[0] else call.export(self.out)
        lse = self.lse if self.given[1] else call.export(self.lse)
        return MLADecodeResult(out, lse)


def _open(
    q: Any, kv_cache: Any, block_table: Any, cache_seqlens: Any, out: Any, lse: Any, stream: Any
) -> Call:
    return open_call(
        (
            ("q", q),
            ("kv_cache", kv_cache),
            ("block_table", block_table),
            ("cache_seqlens", cache_seqlens),
        ),
        (("out", out), ("lse", lse)),
        stream=stream,
    )


def _key(
    shape: tuple[int, int, int, int, int, str], causal: bool, device: int | None
) -> MLADecodeKey:
    sm_count = 0 if device is None else require_hopper(device).sm_count
    return MLADecodeKey(
        *shape, causal=bool(causal) and shape[1] > 1, device=device, sm_count=sm_count
    )


def _key_of(arguments: _Arguments, causal: bool, device: int) -> MLADecodeKey:
    batch, q_len, num_heads, _ = arguments.q.shape
    _, page_size, num_kv_heads, _ = arguments.kv_cache.shape
    return _key(
        (batch, q_len, num_heads, num_kv_heads, page_size, arguments.q.dtype), causal, device
    )


def _schedule(call: Call, key: MLADecodeKey, buffer: int, cache_seqlens: ArrayView) -> None:
    assert key.device is not None
    (spec,) = SCHEDULE_SPECS
    kernel = load(spec, key.device, capturing=lambda: call.capturing)
    launch_schedule(kernel, key, buffer, cache_seqlens, call.stream)


def _attend(
    call: Call,
    key: MLADecodeKey,
    buffer: int,
    arguments: _Arguments,
    result: _Outputs,
    softmax_scale: float,
) -> None:
    """Launch attention, and the merge where requests can be split."""
    assert key.device is not None
    decode = load(_DECODE[key.dtype], key.device, capturing=lambda: call.capturing)
    launch_decode(
        decode,
        key,
        buffer,
        arguments.q,
        arguments.kv_cache,
        arguments.block_table,
        result.out_view,
        result.lse_view,
        softmax_scale,
        call.stream,
    )
    if key.parts > 1:
        merge = load(_MERGE[key.dtype], key.device, capturing=lambda: call.capturing)
        launch_merge(merge, key, buffer, result.out_view, result.lse_view, call.stream)


def _decode_on_cpu(
    call: Call, arrays: tuple[Any, ...], out: Any, lse: Any, softmax_scale: float, causal: bool
) -> MLADecodeResult:
    names = ("q", "kv_cache", "block_table", "cache_seqlens")
    result = reference.mla_decode(
        *(to_numpy(name, array) for name, array in zip(names, arrays, strict=True)),
        softmax_scale=softmax_scale,
        causal=causal,
        out=None if out is None else to_numpy("out", out),
        lse=None if lse is None else to_numpy("lse", lse),
    )
    return MLADecodeResult(
        from_numpy(call.framework, result.out) if out is None else out,
        from_numpy(call.framework, result.lse) if lse is None else lse,
    )


# Checks. They come before any allocation or launch.


def _checked_scale(softmax_scale: Any) -> float:
    if softmax_scale is None:
        return float(HEAD_DIM**-0.5)
    if not isinstance(softmax_scale, Real):
        raise TypeError(
            f"softmax_scale: needs a Python or NumPy number, got {type(softmax_scale).__qualname__}"
        )
    scale = float(softmax_scale)
    low, high = _SCALES
    if not low <= scale <= high:
        raise ValueError(
            f"softmax_scale: needs a number from {low} to {high}, got {scale}; negate q for a negative factor"
        )
    return scale


def _checked_arguments(call: Call) -> _Arguments:
    q, kv_cache, block_table, cache_seqlens, out, lse = call.views
    assert q is not None
    assert kv_cache is not None
    assert block_table is not None
    assert cache_seqlens is not None
    kv_cache = _with_kv_head_axis(kv_cache)
    _check_query_and_cache(q, kv_cache)
    batch, q_len, num_heads, _ = q.shape
    _check_layout("q", q)
    _check_layout("kv_cache", kv_cache)
    _check_block_table(block_table, batch)
    _check_seqlens(cache_seqlens, batch)
    if out is not None:
        _check_output("out", out, (batch, q_len, num_heads, VALUE_DIM), (q.dtype, "float32"))
        _check_layout("out", out)
    if lse is not None:
        _check_output("lse", lse, (batch, num_heads, q_len), ("float32",))
    return _Arguments(q, kv_cache, block_table, cache_seqlens, out, lse)


def _with_kv_head_axis(kv_cache: ArrayView) -> ArrayView:
    """(num_pages, page_size, 576) is a cache of one kv head."""
    if len(kv_cache.shape) != 3:
        return kv_cache
    pages, rows, columns = kv_cache.shape
    page_stride, row_stride, stride = kv_cache.strides
    return kv_cache._replace(
        shape=(pages, rows, 1, columns), strides=(page_stride, row_stride, row_stride, stride)
    )


def _check_query_and_cache(q: ArrayView, kv_cache: ArrayView) -> None:
    if len(q.shape) != 4:
        raise ValueError(
            f"q: needs 4 axes (batch, q_len, num_heads, {HEAD_DIM}), got shape {q.shape}"
        )
    if len(kv_cache.shape) != 4:
        raise ValueError(
            f"kv_cache: needs axes (num_pages, page_size, num_kv_heads, {HEAD_DIM}), or without num_kv_heads, "
            f"got shape {kv_cache.shape}"
        )
    _check_dtype("q", q.dtype)
    if kv_cache.dtype != q.dtype:
        raise TypeError(
            f"kv_cache: needs q's dtype {q.dtype}, got {kv_cache.dtype}; convert one of them"
        )
    for name, view in (("q", q), ("kv_cache", kv_cache)):
        if view.shape[3] != HEAD_DIM:
            raise ValueError(
                f"{name}: needs a last axis of {HEAD_DIM} ({VALUE_DIM} latent + {HEAD_DIM - VALUE_DIM} RoPE), "
                f"got shape {view.shape}"
            )
        if 0 in view.shape:
            raise ValueError(
                f"{name}: needs at least one element on every axis, got shape {view.shape}"
            )
    _check_heads(q.shape[2], kv_cache.shape[2])
    _check_page_size("kv_cache", kv_cache.shape[1])


def _check_heads(num_heads: int, num_kv_heads: int) -> None:
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads: needs a multiple of num_kv_heads, got {num_heads} query heads and {num_kv_heads} kv heads; "
            f"pad the query heads"
        )


def _check_page_size(name: str, page_size: int) -> None:
    if page_size != BLOCK_TOKENS:
        raise ValueError(
            f"{name}: needs a page size of {BLOCK_TOKENS} tokens in this release, got {page_size}"
        )


def _check_dtype(name: str, dtype: str) -> None:
    if dtype not in _DTYPES:
        raise TypeError(f"{name}: needs {' or '.join(_DTYPES)}, got {dtype}; convert it first")


def _check_layout(name: str, view: ArrayView) -> None:
    """Last axis contiguous, everything else at multiples of 16 bytes."""
    itemsize = 4 if view.dtype == "float32" else 2
    if view.strides[-1] != itemsize:
        raise ValueError(
            f"{name}: needs a contiguous last axis, got a stride of {view.strides[-1]} bytes for {itemsize}-byte "
            f"elements; make a contiguous copy"
        )
    if view.ptr % _ALIGNMENT:
        raise ValueError(
            f"{name}: needs an address that is a multiple of {_ALIGNMENT} bytes, got {view.ptr:#x}; copy the array, "
            f"or slice it at a multiple of {_ALIGNMENT} bytes"
        )
    for axis, (size, stride) in enumerate(zip(view.shape[:-1], view.strides, strict=False)):
        if size > 1 and (stride % _ALIGNMENT or stride < 0):
            raise ValueError(
                f"{name}: needs strides that are multiples of {_ALIGNMENT} bytes and not negative, got {stride} on "
                f"axis {axis}; pad the rows, or make a contiguous copy"
            )


def _misaligned(views: Sequence[ArrayView | None]) -> bool:
    q, kv_cache, _, _, out, _ = views
    assert q is not None
    assert kv_cache is not None
    return bool((q.ptr | kv_cache.ptr | (out.ptr if out else 0)) % _ALIGNMENT)


def _check_int32(name: str, view: ArrayView, axes: str, shape: tuple[int | None, ...]) -> None:
    if view.dtype != "int32":
        raise TypeError(f"{name}: needs int32, got {view.dtype}; convert it first")
    if len(view.shape) != len(shape) or any(
        wanted not in (None, got) for wanted, got in zip(shape, view.shape, strict=True)
    ):
        raise ValueError(
            f"{name}: needs shape {axes} with batch {shape[0]} as in q, got {view.shape}"
        )
    if view.ptr % 4 or any(stride % 4 for stride in view.strides):
        raise ValueError(
            f"{name}: needs address and strides that are multiples of 4 bytes, got address {view.ptr:#x} and "
            f"strides {view.strides}; copy it"
        )


def _check_block_table(view: ArrayView, batch: int) -> None:
    _check_int32("block_table", view, "(batch, max_pages)", (batch, None))
    if view.shape[1] > 1 and view.strides[1] != 4:
        raise ValueError(
            f"block_table: needs contiguous rows, got a stride of {view.strides[1]} bytes on the last axis; make a "
            f"contiguous copy"
        )


def _check_seqlens(view: ArrayView, batch: int) -> None:
    _check_int32("cache_seqlens", view, "(batch,)", (batch,))


def _check_output(
    name: str, view: ArrayView, shape: tuple[int, ...], dtypes: tuple[str, ...]
) -> None:
    if view.dtype not in dtypes:
        raise TypeError(f"{name}: needs {' or '.join(dtypes)}, got {view.dtype}")
    if view.shape != shape:
        raise ValueError(f"{name}: needs shape {shape}, got {view.shape}")
    if any(size > 1 and stride == 0 for size, stride in zip(shape, view.strides, strict=True)):
        raise ValueError(
            f"{name}: needs an element of memory for each element, got a broadcast array with strides {view.strides}"
        )
    if view.ptr % 4 or any(stride % 2 for stride in view.strides):
        raise ValueError(
            f"{name}: needs aligned elements, got address {view.ptr:#x} and strides {view.strides}"
        )


def _check_plan_numbers(
    batch: int, q_len: int, num_heads: int, num_kv_heads: int, page_size: int, dtype: str
) -> None:
    numbers = {
        "batch": batch,
        "q_len": q_len,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
    }
    for name, value in numbers.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: needs a whole number from 1, got {value!r}")
    _check_heads(num_heads, num_kv_heads)
    _check_page_size("page_size", page_size)
    _check_dtype("dtype", dtype)


def _check_workspace(view: ArrayView, nbytes: int) -> None:
    if view.dtype != "uint8" or len(view.shape) != 1 or view.strides[0] != 1:
        raise ValueError(
            f"workspace: needs a contiguous one-dimensional uint8 array, got {view.dtype} of shape {view.shape} and "
            f"strides {view.strides}"
        )
    if view.shape[0] < nbytes:
        raise ValueError(
            f"workspace: needs {nbytes} bytes (MLADecodePlan.workspace_bytes), got {view.shape[0]}"
        )
    if view.ptr % 256:
        raise ValueError(
            f"workspace: needs an address that is a multiple of 256, got {view.ptr:#x}"
        )


def _device_name(device: int | None) -> str:
    return "the CPU" if device is None else f"CUDA device {device}"


# Check mode: CUMLA_CHECK=1 looks at what the kernels take on trust.


def _check_data(call: Call, arguments: _Arguments) -> None:
    """Copy lengths and page numbers to the host and name the first that is out of range."""
    if os.environ.get("CUMLA_CHECK", "0") in ("", "0"):
        return
    if call.capturing:
        _log.warning("CUMLA_CHECK: nothing can be checked while the stream is being captured")
        return
    lengths = _to_host(arguments.cache_seqlens, call.stream)
    table = _to_host(arguments.block_table, call.stream)
    num_pages, page_size = arguments.kv_cache.shape[:2]
    longest = table.shape[1] * page_size
    wrong = np.flatnonzero((lengths < 0) | (lengths > longest))
    if wrong.size:
        i = wrong[0]
        raise ValueError(
            f"cache_seqlens[{i}]: needs a length from 0 to max_pages * page_size = {longest}, got {lengths[i]}"
        )
    used = np.arange(table.shape[1]) * page_size < lengths[:, None]
    bad = np.argwhere(used & ((table < 0) | (table >= num_pages)))
    if bad.size:
        i, j = bad[0]
        raise ValueError(
            f"block_table[{i}, {j}]: needs a page number from 0 to {num_pages - 1}, got {table[i, j]}"
        )


def _to_host(view: ArrayView, stream: int) -> np.ndarray[Any, Any]:
    cupy = import_cupy()
    reach = sum(
        (size - 1) * abs(stride) for size, stride in zip(view.shape, view.strides, strict=True)
    )
    memory = cupy.cuda.UnownedMemory(view.ptr, reach + 4, None)
    array = cupy.ndarray(
        view.shape, np.int32, cupy.cuda.MemoryPointer(memory, 0), strides=view.strides
    )
    host = np.empty(view.shape, np.int32)
    with cupy.cuda.ExternalStream(stream):
        host[...] = array.get()
    return host
