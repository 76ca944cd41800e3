# SPDX-License-Identifier: Apache-2.0
"""Dense MLA attention over a paged cache: :func:`mla_decode` and its plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cumla import reference
from cumla.arrays import ArrayView, Call, from_numpy, open_call, open_device, to_numpy
from cumla.checks import (
    DTYPES,
    Arguments,
    check_data,
    check_dtype,
    check_mode,
    check_query_and_cache,
    check_seqlens,
    check_shape_numbers,
    check_workspace,
    checked_arguments,
    checked_scale,
    with_kv_head_axis,
)
from cumla.launch.device import current_device, properties, require_hopper
from cumla.launch.mla_decode import decode_spec, decode_specs, prepare_decode
from cumla.launch.mla_merge import SPECS as MERGE_SPECS
from cumla.launch.mla_merge import prepare_merge
from cumla.launch.mla_plan import BLOCK_TOKENS, VALUE_DIM, MLADecodeKey
from cumla.launch.mla_schedule import SPECS as SCHEDULE_SPECS
from cumla.launch.mla_schedule import prepare_schedule
from cumla.launch.module import load
from cumla.reference import MLADecodeResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cumla.launch.kernel import PreparedLaunch

__all__ = ["MLADecodePlan", "MLADecodeResult", "mla_decode", "prepare"]

_MERGE = dict(zip(DTYPES, MERGE_SPECS, strict=True))
_MOST_READY = 1024  # prepared runs that a plan keeps


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

    For every query row, with ``k`` the 576 and ``v`` the first 512 values of a visible token's
    cached row, ``out = softmax(softmax_scale * q @ k.T) @ v``. Token ``t`` of request ``i`` lies in
    page ``block_table[i, t // page_size]`` at row ``t % page_size``. Arrays on the GPU are computed
    by CUDA kernels (compute capability 9.0), on the caller's stream and without waiting for it;
    arrays on the CPU by :func:`cumla.reference.mla_decode`.

    Parameters
    ----------
    q : array
        ``(batch, q_len, num_heads, 576)`` bfloat16 or float16, of CuPy, PyTorch, JAX or NumPy. Any
        strides that are multiples of 16 bytes, the last axis contiguous.
    kv_cache : array
        ``(num_pages, page_size, num_kv_heads, 576)``, or ``(num_pages, page_size, 576)`` for one kv
        head, in q's dtype; strides as for q. num_kv_heads divides num_heads; page_size is 64. Slots
        that no request uses may hold anything, NaN included.
    block_table : array
        ``(batch, max_pages)`` int32, rows contiguous. Entries behind a request's last page are
        never read; a page number outside ``[0, num_pages)`` in a used entry reads as zeros.
    cache_seqlens : array
        ``(batch,)`` int32: cached tokens of each request, the q_len newest included. Clamped to
        ``[0, max_pages * page_size]``.
    softmax_scale : float, optional
        Factor of the scores; 576 ** -0.5 by default. A real model passes that of its un-absorbed
        head dimension.
    causal : bool
        Query i of q_len sees ``cache_seqlens - (q_len - 1 - i)`` tokens; all of them if False.
    plan : MLADecodePlan, optional
        A schedule and workspace made ready by :meth:`MLADecodePlan.update`; without it both are
        made in this call.
    out : array, optional
        ``(batch, q_len, num_heads, 512)`` in q's dtype or float32, written and returned. Of q's
        framework; JAX's arrays cannot be written to.
    lse : array, optional
        ``(batch, num_heads, q_len)`` float32, written and returned.
    stream : optional
        A CUDA stream: an integer handle, or a stream object of CuPy, PyTorch or cuda.core. By
        default the current stream of q's framework (CuPy's for JAX).

    Returns
    -------
    MLADecodeResult
        ``out``, and ``lse``: the natural logarithm of the sum of ``exp(softmax_scale * q.k)``.
        Where nothing is visible out is 0 and lse +inf. Arrays of q's framework.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it. Nothing has been launched or written.
    UnsupportedDeviceError
        The arrays are on a GPU that is not of compute capability 9.0.
    NotPreparedError
        The stream is being captured and a kernel is not loaded yet, or memory is needed that
        capture forbids.

    Notes
    -----
    Formula and conventions: DeepSeek-V2 (arXiv:2405.04434), section 2.1, with the absorbed weights
    of its appendix.
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
    scale = checked_scale(softmax_scale)
    arguments = checked_arguments(call)
    if call.device is None:
        return _decode_on_cpu(
            call, (q, kv_cache, block_table, cache_seqlens), out, lse, scale, causal
        )
    key = _key_of(arguments, causal, call.device)
    with call:
        check_data(call, arguments)
        result = _Outputs.of(call, arguments, out, lse)
        buffer = call.workspace(key.layout.nbytes).ptr
        _schedule(call, key, buffer, arguments.cache_seqlens)
        for launch in _attention(call, key, buffer, arguments, result, scale):
            launch()
        return result.export(call)


class MLADecodePlan:
    """Schedule and workspace of :func:`mla_decode`, to be used for every layer of a decoding step.

    ``update`` computes on the device, from the lengths there, who works on which part of the cache;
    ``run`` uses that for as many layers as you like. Neither waits for the device or copies to the
    host, and both can be captured into a CUDA graph, which then serves changing lengths. A plan
    belongs to one stream at a time: the one of its last ``update``. It owns one buffer and no other
    state on the device.

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
        uint8, contiguous, at least :meth:`workspace_bytes` long and 256-byte aligned, of any
        framework. Plans may share one as long as each is updated before it runs.
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
        check_shape_numbers(batch, q_len, num_heads, num_kv_heads, page_size, dtype)
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
        # Launches of runs that were found in order, on the stream of the last update.
        self._ready: dict[tuple[Any, ...], tuple[PreparedLaunch, ...]] = {}
        if call.device is None:
            return
        with call:
            if workspace is None:
                self._owner, view = call.empty((self._key.layout.nbytes,), "uint8")
            else:
                (view,) = call.views  # type: ignore[assignment]
                check_workspace(view, self._key.layout.nbytes)
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
        kv_view = with_kv_head_axis(kv_view)
        check_query_and_cache(q_view, kv_view)
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
        check_shape_numbers(batch, q_len, num_heads, num_kv_heads, BLOCK_TOKENS, DTYPES[0])
        if sm_count is None:
            sm_count = properties(current_device()).sm_count
        shape = (batch, q_len, num_heads, num_kv_heads, BLOCK_TOKENS, DTYPES[0])
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
        check_seqlens(view, self._key.batch)
        self._check_device(call)
        if call.device is None:
            self._lengths = np.array(to_numpy("cache_seqlens", cache_seqlens))
            return
        with call:
            _schedule(call, self._key, self._buffer, view)
        if call.stream != self._stream:
            self._ready.clear()
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
            As in :func:`mla_decode`. The values of cache_seqlens are those of the last update;
            should they have changed since, those of the update count.

        Returns
        -------
        MLADecodeResult

        Raises
        ------
        TypeError, ValueError
            An argument does not fit; the plan is of another shape, device or stream, or was never
            updated.
        """
        call = _open(q, kv_cache, block_table, cache_seqlens, out, lse, stream)
        scale = checked_scale(softmax_scale)
        ready = self._ready.get((call.views, scale)) if call.stream == self._stream else None
        if ready is not None and not check_mode():
            with call:
                for launch in ready:
                    launch()
            return MLADecodeResult(out, lse)
        arguments = self._checked_arguments(call)
        if call.device is None:
            assert self._lengths is not None
            return _decode_on_cpu(
                call, (q, kv_cache, block_table, self._lengths), out, lse, scale, self._key.causal
            )
        with call:
            check_data(call, arguments)
            result = _Outputs.of(call, arguments, out, lse)
            launches = _attention(call, self._key, self._buffer, arguments, result, scale)
            for launch in launches:
                launch()
            if all(result.given):
                self._keep_ready(call, scale, launches)
            return result.export(call)

    def _keep_ready(self, call: Call, scale: float, launches: tuple[PreparedLaunch, ...]) -> None:
        """Keep checked and prepared launches: a call on the same arrays only has to repeat them."""
        if len(self._ready) >= _MOST_READY:
            self._ready.clear()
        self._ready[call.views, scale] = launches

    def _checked_arguments(self, call: Call) -> Arguments:
        """Check the arguments against each other and the plan."""
        self._check_device(call)
        if (call.device is not None and call.stream != self._stream) or (
            call.device is None and self._lengths is None
        ):
            raise ValueError(self._stream_problem(call.stream))
        arguments = checked_arguments(call)
        self._check_shape(arguments)
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
            f"plan: updated on stream {self._stream:#x}, got a run on stream {stream:#x}; a "
            f"plan serves one stream at a time: call plan.update on this stream first"
        )

    def _check_shape(self, arguments: Arguments) -> None:
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
                f"plan: made with causal={self._key.causal}, got causal={causal}; make a plan for "
                f"each"
            )


def prepare(device: int | None = None, *, dtypes: Sequence[str] = DTYPES) -> None:
    """Compile and load all kernels: later calls do not wait, nor fail under stream capture.

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
        check_dtype("dtypes", dtype)
    if device is None:
        device = current_device()
    require_hopper(device)
    for spec in SCHEDULE_SPECS:
        load(spec, device, capturing=lambda: False)
    for dtype in dtypes:
        for spec in decode_specs(dtype):
            load(spec, device, capturing=lambda: False)
        load(_MERGE[dtype], device, capturing=lambda: False)


class _Outputs(NamedTuple):
    """Where the results go: the caller's arrays, or new ones of the caller's framework."""

    out: Any
    out_view: ArrayView
    lse: Any
    lse_view: ArrayView
    given: tuple[bool, bool]

    @classmethod
    def of(cls, call: Call, arguments: Arguments, out: Any, lse: Any) -> _Outputs:
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


def _key_of(arguments: Arguments, causal: bool, device: int) -> MLADecodeKey:
    batch, q_len, num_heads, _ = arguments.q.shape
    _, page_size, num_kv_heads, _ = arguments.kv_cache.shape
    return _key(
        (batch, q_len, num_heads, num_kv_heads, page_size, arguments.q.dtype), causal, device
    )


def _schedule(call: Call, key: MLADecodeKey, buffer: int, cache_seqlens: ArrayView) -> None:
    assert key.device is not None
    (spec,) = SCHEDULE_SPECS
    kernel = load(spec, key.device, capturing=lambda: call.capturing)
    prepare_schedule(kernel, key, buffer, cache_seqlens, call.stream)()


def _attention(
    call: Call,
    key: MLADecodeKey,
    buffer: int,
    arguments: Arguments,
    result: _Outputs,
    softmax_scale: float,
) -> tuple[PreparedLaunch, ...]:
    """Prepare attention, and the merge where requests can be split."""
    assert key.device is not None
    decode = load(decode_spec(key), key.device, capturing=lambda: call.capturing)
    attend = prepare_decode(
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
    if key.parts == 1:
        return (attend,)
    merge = load(_MERGE[key.dtype], key.device, capturing=lambda: call.capturing)
    return attend, prepare_merge(merge, key, buffer, result.out_view, result.lse_view, call.stream)


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


def _device_name(device: int | None) -> str:
    return "the CPU" if device is None else f"CUDA device {device}"
