# SPDX-License-Identifier: Apache-2.0
"""Dense MLA attention over queries of different lengths: :func:`mla_attention` and its plan."""

from __future__ import annotations

from functools import lru_cache
from numbers import Real
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from cumla import reference
from cumla.core.arrays import ArrayView, Call, from_numpy, glance, open_call, reopen_call, to_numpy
from cumla.core.workspace import PlanMemory, check_plan_device, never_updated, open_plan
from cumla.launch.device import current_device, properties, require_hopper
from cumla.launch.mla.mla_attention import attention_spec, prepare_attention
from cumla.launch.mla.mla_decode import form_of
from cumla.launch.mla.mla_decode_fp8 import fp8_specs
from cumla.launch.mla.shape import CACHES, MLAAttentionKey
from cumla.launch.split.plan import BLOCK_TOKENS
from cumla.launch.split.ragged_schedule import SPECS as SCHEDULE_SPECS
from cumla.launch.split.ragged_schedule import prepare_ragged_schedule
from cumla.mla.attention_checks import (
    QUERY_AXES,
    Lengths,
    check_length_values,
    check_one_form,
    check_page_values,
    check_planned_lengths,
    check_total_tokens,
    checked_batch,
    checked_lengths,
    checked_ragged,
    lengths_on_host,
)
from cumla.mla.call import Kernels, Outputs, load_for
from cumla.mla.checks import (
    DTYPES,
    Arguments,
    cache_of,
    check_device_number,
    check_mode,
    check_number,
    check_shape_numbers,
    checked_cache_dtype,
    checked_flag,
    checked_query_and_cache,
    checked_scale,
    copy_to_host,
    may_look,
    named_parts,
    other_cache,
)
from cumla.mla.fp8_caches import number_of
from cumla.reference import MLAAttentionResult

if TYPE_CHECKING:
    from cumla.launch.kernel import PreparedLaunch

__all__ = ["MLAAttentionPlan", "MLAAttentionResult", "mla_attention"]

_LENGTHS = "qo_indptr, kv_lens"  # arguments of an update, in messages


def mla_attention(
    q: Any,
    kv_cache: Any,
    *,
    qo_indptr: Any,
    kv_lens: Any,
    block_table: Any = None,
    kv_indptr: Any = None,
    kv_indices: Any = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    kv_scale: Any = None,
    out: Any = None,
    lse: Any = None,
    plan: MLAAttentionPlan | None = None,
    stream: Any = None,
) -> MLAAttentionResult:
    """Attend to a paged cache of latent rows from queries of different lengths.

    The formula is that of :func:`cumla.mla_decode`. The query tokens of request r are the rows of q
    from ``qo_indptr[r]`` to ``qo_indptr[r + 1]``, any number of them: decoding, the verification of
    several tokens and chunks of a prefill go together in one call. Arrays on the GPU are computed
    by CUDA kernels (compute capability 9.0), on the caller's stream and without waiting for it;
    arrays on the CPU by :func:`cumla.reference.mla_attention`.

    Parameters
    ----------
    q : array or pair of arrays
        ``(total_tokens, num_heads, 576)`` bfloat16 or float16, of CuPy, PyTorch, JAX or NumPy. A
        tuple ``(q_nope, q_pe)``, and strides, as in :func:`cumla.mla_decode`.
    kv_cache : array, or pair or triple of arrays
        ``(num_pages, page_size, num_kv_heads, 576)``, or without num_kv_heads, or a tuple
        ``(ckv, kpe)``: as in :func:`cumla.mla_decode`, FP8 caches included.
    qo_indptr : array
        ``(batch + 1,)`` int32: where the query tokens of each request begin in q, and where the
        last ones end. The numbers must not fall. Rows before the first and from the last on belong
        to no request: what they give is not written.
    kv_lens : array
        ``(batch,)`` int32: cached tokens of each request, those of its queries included. Clamped to
        what the pages of the request hold.
    block_table : array, optional
        ``(batch, max_pages)`` int32, rows contiguous, as in :func:`cumla.mla_decode`.
    kv_indptr, kv_indices : array, optional
        In place of block_table: the pages of request r are ``kv_indices[kv_indptr[r] :
        kv_indptr[r + 1]]``. ``(batch + 1,)`` int32, of numbers that do not fall, and ``(pages,)``
        int32, contiguous, as long as ``kv_indptr[-1]`` at least.
    causal : bool
        Query i of n of a request sees ``kv_lens - (n - 1 - i)`` of its tokens; all of them if
        False.
    softmax_scale : float, optional
        Factor of the scores, as in :func:`cumla.mla_decode`.
    kv_scale : float or array, optional
        Factor of an FP8 cache, as in :func:`cumla.mla_decode`.
    out : array, optional
        ``(total_tokens, num_heads, 512)`` in q's dtype or float32, written and returned. Of q's
        framework; JAX's arrays cannot be written to.
    lse : array, optional
        ``(total_tokens, num_heads)`` float32, written and returned.
    plan : MLAAttentionPlan, optional
        A schedule and workspace made ready by :meth:`MLAAttentionPlan.update`; without it both are
        made in this call.
    stream : optional
        As in :func:`cumla.mla_decode`.

    Returns
    -------
    MLAAttentionResult
        ``out``, and ``lse``: the natural logarithm of the sum of ``exp(softmax_scale * q.k)``.
        Where a query sees nothing out is 0 and lse +inf. Arrays of q's framework; what is allocated
        here holds anything in the rows of no request.

    Raises
    ------
    TypeError, UnsupportedDeviceError, MissingDependencyError, CompilationError, CumlaError
        As :func:`cumla.mla_decode`.
    ValueError
        An argument does not fit: its shape, strides, alignment, place or value; pages in both forms
        or in none; a plan that was made for something else or is not ready.
    NotPreparedError
        As :func:`cumla.mla_decode`.

    Notes
    -----
    Offsets and page numbers are taken on trust; the check mode, ``CUMLA_CHECK=1``, looks at them.

    A CUDA graph holds the addresses of the inputs, the outputs and the plan's buffer, and keeps
    none of them alive: keep arrays and plan as long as the graph is replayed.
    """
    causal = checked_flag("causal", causal)
    check_one_form(block_table, kv_indptr, kv_indices)
    if plan is not None:
        if not isinstance(plan, MLAAttentionPlan):
            raise TypeError(f"plan: needs a cumla.MLAAttentionPlan, got {type(plan).__qualname__}")
        plan._check_call(causal, _present(qo_indptr, kv_lens, kv_indptr), stream)
        return plan.run(
            q,
            kv_cache,
            block_table,
            kv_indices=kv_indices,
            softmax_scale=softmax_scale,
            kv_scale=kv_scale,
            out=out,
            lse=lse,
            stream=stream,
        )
    scale = checked_scale(softmax_scale)
    factor = None if kv_scale is None else number_of("kv_scale", kv_scale)
    given = _present(qo_indptr, kv_lens, kv_indptr)
    inputs = _named(q, kv_cache, block_table, kv_indices, kv_scale)
    arrays = inputs | given
    call, views = _open(arrays, out, lse, stream)
    lengths = checked_lengths(views)
    batch = lengths.kv_lens.shape[0]
    arguments = checked_ragged(views, batch, factor)
    key = _key_of(arguments.q, arguments.kv_cache, batch, causal)
    if call.device is None:
        host = _on_host(given)
        if check_mode():
            _check_lengths(host, key)
        return _attend_on_cpu(call, inputs, factor, host, out, lse, scale, causal)
    with call:
        if may_look(call):
            host = lengths_on_host(lengths, call.stream)
            _check_lengths(host, key)
            _check_pages(call, arguments, host)
        kernels = _kernels(call, key)
        result = Outputs.of(call, arguments, (key.total_tokens, key.num_heads), out, lse)
        buffer = call.workspace(key.layout.nbytes).ptr
        schedule = prepare_ragged_schedule(
            kernels.schedule, key, buffer, *lengths, stream=call.stream
        )
        attend = _attention(call, kernels, key, buffer, arguments, result, scale)
        schedule()
        attend()
        return MLAAttentionResult(*result.export(call))


class MLAAttentionPlan:
    """Schedule and workspace of :func:`mla_attention`, to be used for every layer of a step.

    ``update`` computes on the device, from the lengths there, who works on which part of the cache;
    ``run`` uses that for as many layers as you like. Neither waits for the device or copies to the
    host, and both can be captured into a CUDA graph, which then serves whatever mix of requests the
    arrays hold at each replay, up to `batch` requests (those without queries have equal offsets)
    and `total_tokens` query tokens (rows behind the last offset belong to nobody). The graph holds
    the address of the plan's buffer, so keep the plan as long as the graph. A plan belongs to one
    stream at a time: the one of its last ``update``. It owns one buffer and no other state on the
    device, and on the CPU nothing but the lengths.

    Parameters
    ----------
    batch : int
        Requests: entries of ``kv_lens``.
    total_tokens, num_heads : int
        As in ``q`` ``(total_tokens, num_heads, 576)``.
    num_kv_heads : int
        Divides num_heads.
    page_size : int
        Tokens of a cache page: any number from 1.
    dtype : str
        ``"bfloat16"`` or ``"float16"``: of q, and of kv_cache unless `cache_dtype` says otherwise.
    cache_dtype : str, optional
        ``"float8_e4m3fn"`` for FP8 caches in any form, with dtype bfloat16; dtype by default.
    causal : bool
        As in :func:`mla_attention`.
    device : int, optional
        CUDA ordinal; by default that of `like` or `workspace`, else CuPy's current device.
    workspace : array, optional
        The buffer: uint8, contiguous, at least :meth:`workspace_bytes` long, 256-byte aligned, on
        the GPU, of CuPy or PyTorch. Plans may share one, in turn: ``update`` makes it this plan's,
        and the plan that had it before must be updated again before it runs.
    like : array, optional
        An array whose framework and device own the buffer; CuPy without it. For an array on the CPU
        the plan is one for the CPU.
    stream : optional
        Stream on which the buffer is allocated, as in :func:`cumla.mla_decode`.

    Raises
    ------
    TypeError
        An argument is of the wrong kind, an unknown dtype, memory that cannot be written to, or a
        flag that is neither True nor False.
    ValueError
        A number does not fit, the workspace is too small, or `device`, `like` and `workspace`
        are not in the same place.
    UnsupportedDeviceError
        There is no GPU, or it is not of compute capability 9.0.
    MissingDependencyError
        CuPy is missing.
    NotPreparedError
        The stream is being captured, and CuPy would have to allocate the buffer.

    Examples
    --------
    >>> plan = cumla.MLAAttentionPlan.from_arrays(q, kv_cache, qo_indptr)  # doctest: +SKIP
    >>> plan.update(qo_indptr, kv_lens)                                    # doctest: +SKIP
    >>> for layer in layers:                                               # doctest: +SKIP
    ...     out, lse = plan.run(layer.q, layer.kv_cache, block_table)
    """

    def __init__(
        self,
        batch: int,
        total_tokens: int,
        num_heads: int,
        *,
        num_kv_heads: int = 1,
        page_size: int = BLOCK_TOKENS,
        dtype: str = "bfloat16",
        cache_dtype: str | None = None,
        causal: bool = True,
        device: int | None = None,
        workspace: Any = None,
        like: Any = None,
        stream: Any = None,
    ) -> None:
        numbers = {"batch": batch, "total_tokens": total_tokens}
        check_shape_numbers(numbers, num_heads, num_kv_heads, page_size, dtype)
        causal = checked_flag("causal", causal)
        cache = checked_cache_dtype(cache_dtype, dtype)
        check_device_number(device)
        call = open_plan(device, like, workspace, stream)
        shape = (batch, total_tokens, num_heads, num_kv_heads, page_size, dtype)
        self._key = _key(shape, causal, call.device, cache)
        self._lengths: Lengths[np.ndarray[Any, Any]] | None = None  # on the CPU, or in check mode
        self._has_list: bool | None = None  # whether the last update was for a list of pages
        self._kernels: Kernels | None = None
        self._memory: PlanMemory | None = None
        if call.device is not None:
            with call:
                self._memory = PlanMemory(call, self._key.layout.nbytes, workspace)

    @classmethod
    def from_arrays(
        cls,
        q: Any,
        kv_cache: Any,
        qo_indptr: Any,
        *,
        causal: bool = True,
        workspace: Any = None,
        stream: Any = None,
    ) -> MLAAttentionPlan:
        """Make a plan for the shapes of these arrays, with a buffer of q's framework.

        Parameters
        ----------
        q, kv_cache, qo_indptr : array
            As in :func:`mla_attention`; only their shapes, dtype and device are looked at.
        causal, workspace, stream
            As for the class.

        Returns
        -------
        MLAAttentionPlan

        Raises
        ------
        TypeError, ValueError
            As the class, and where q and kv_cache do not fit together.
        UnsupportedDeviceError, MissingDependencyError, NotPreparedError
            As the class.
        """
        arrays = _named(q, kv_cache, None, None) | {"qo_indptr": qo_indptr}
        call = open_call(tuple(arrays.items()), stream=stream)
        views = dict(zip(arrays, call.views, strict=True))
        columns = checked_query_and_cache(views, QUERY_AXES)
        batch = checked_batch(cast("ArrayView", views["qo_indptr"]))
        with call:
            return cls(
                batch,
                *columns.q.shape[:2],
                num_kv_heads=columns.kv_cache.shape[2],
                page_size=columns.kv_cache.shape[1],
                dtype=columns.q.dtype,
                cache_dtype=columns.kv_cache.dtype,
                causal=causal,
                workspace=workspace,
                like=next(iter(arrays.values())),
                stream=stream,
            )

    @staticmethod
    def workspace_bytes(
        batch: int,
        total_tokens: int,
        num_heads: int,
        *,
        num_kv_heads: int = 1,
        cache_dtype: str | None = None,
        sm_count: int | None = None,
    ) -> int:
        """Size of a plan's buffer: a pure function of the shape and the GPU's multiprocessors.

        Parameters
        ----------
        batch, total_tokens, num_heads, num_kv_heads, cache_dtype
            As for the class; of 16-bit numbers it is no matter which.
        sm_count : int, optional
            Multiprocessors of the GPU that the plan is for; with it no GPU is needed. By default
            CuPy's current device is asked.

        Returns
        -------
        int
            Bytes.

        Raises
        ------
        TypeError, ValueError
            A number does not fit.
        UnsupportedDeviceError, MissingDependencyError
            Without `sm_count`: there is no GPU, or CuPy is missing.
        """
        numbers = {"batch": batch, "total_tokens": total_tokens}
        check_shape_numbers(numbers, num_heads, num_kv_heads, BLOCK_TOKENS, DTYPES[0])
        dtype = cache_dtype if cache_dtype in DTYPES else DTYPES[0]
        cache = checked_cache_dtype(cache_dtype, dtype)
        if sm_count is None:
            sm_count = properties(current_device()).sm_count
        check_number("sm_count", sm_count, "leave it out to ask the current GPU")
        shape = (batch, total_tokens, num_heads, num_kv_heads, BLOCK_TOKENS, DTYPES[0])
        return _key_on_device(shape, False, 0, sm_count, cache).layout.nbytes

    @property
    def key(self) -> MLAAttentionKey:
        """The shape for which this plan was made."""
        return self._key

    def update(
        self, qo_indptr: Any, kv_lens: Any, kv_indptr: Any = None, *, stream: Any = None
    ) -> None:
        """Compute the schedule for these lengths, on the device.

        On another stream than before, that one's work goes first: the new stream waits for it, on
        the device. Only a stream that is being captured does not; let the capture begin when
        earlier work with the plan is done, as ``torch.cuda.graph`` does.

        Parameters
        ----------
        qo_indptr, kv_lens : array
            As in :func:`mla_attention`. Read when the stream reaches this call.
        kv_indptr : array, optional
            As in :func:`mla_attention`: with it the runs that follow take ``kv_indices``, without
            it they take ``block_table``.
        stream : optional
            As in :func:`cumla.mla_decode`, the current stream of the framework of qo_indptr by
            default. The runs that follow must be on the same one.

        Raises
        ------
        TypeError, ValueError
            An array does not fit the plan.
        MissingDependencyError, CompilationError, NotPreparedError, CumlaError
            As :func:`mla_attention`; every kernel of the plan is loaded here, but for that of a
            cache in two arrays of whole 64-token blocks a page, which the first run loads.
        """
        arrays = _present(qo_indptr, kv_lens, kv_indptr)
        call, lengths = self._open_lengths(arrays, stream)
        memory = self._memory
        host = None
        if memory is None:
            host = _on_host(arrays)
            if check_mode():
                _check_lengths(host, self._key)
        else:
            with call:
                if may_look(call):
                    host = lengths_on_host(lengths, call.stream)
                    _check_lengths(host, self._key)
                if self._kernels is None:
                    self._kernels = _kernels(call, self._key)
                launch = prepare_ragged_schedule(
                    self._kernels.schedule,
                    self._key,
                    memory.buffer.ptr,
                    *lengths,
                    stream=call.stream,
                )
                memory.update(call, launch)
        self._lengths = host
        self._has_list = kv_indptr is not None

    def serves(self, stream: int) -> bool:
        """Tell whether a run on a stream can do without an update before it.

        Parameters
        ----------
        stream : int
            CUstream handle. For a plan on the CPU any.

        Returns
        -------
        bool
        """
        if self._memory is None:
            return self._lengths is not None
        return stream == self._memory.stream

    def run(
        self,
        q: Any,
        kv_cache: Any,
        block_table: Any = None,
        *,
        kv_indices: Any = None,
        softmax_scale: float | None = None,
        kv_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        stream: Any = None,
    ) -> MLAAttentionResult:
        """Attend with the schedule of the last update, and with the lengths it was given.

        Parameters
        ----------
        q, kv_cache, block_table, kv_indices, softmax_scale, kv_scale, out, lse, stream
            As in :func:`mla_attention`. Of block_table and kv_indices the one that the last update
            asks for.

        Returns
        -------
        MLAAttentionResult

        Raises
        ------
        TypeError, ValueError
            An argument does not fit; the plan is of another shape, device or stream, was never
            updated, was updated for pages in the other form, or has lost its workspace to another
            plan.
        NotPreparedError
            The stream is being captured, and CuPy would have to allocate ``out=`` or ``lse=``.
        CumlaError
            The driver refuses a launch.
        """
        scale = checked_scale(softmax_scale)
        factor = None if kv_scale is None else number_of("kv_scale", kv_scale)
        memory = self._memory
        pages = block_table if kv_indices is None else kv_indices
        seen = None
        if memory is not None and (block_table is None or kv_indices is None):
            looked: tuple[Any, ...] = (q, kv_cache, pages, out, lse)
            if factor is None and kv_scale is not None:
                looked = (*looked, kv_scale)
            seen = glance(looked)
            ready = memory.ready.get((seen, scale, factor, self._has_list))
            if ready is not None and not check_mode():
                again = reopen_call(out, self._key.device, stream)
                if again.stream == memory.stream:
                    with again:
                        memory.run(again, ready)
                    return MLAAttentionResult(out, lse)
        self._check_form(block_table, kv_indices)
        arrays = _named(q, kv_cache, block_table, kv_indices, kv_scale)
        call, views = _open(arrays, out, lse, stream)
        self._check_ready(call)
        arguments = checked_ragged(views, self._key.batch, factor)
        self._check_shape(arguments)
        if memory is None:
            assert self._lengths is not None  # or the plan would have been refused
            causal = self._key.causal
            return _attend_on_cpu(call, arrays, factor, self._lengths, out, lse, scale, causal)
        assert self._kernels is not None  # they come with the first update
        with call:
            if self._lengths is not None and may_look(call):
                _check_pages(call, arguments, self._lengths)
            shape = (self._key.total_tokens, self._key.num_heads)
            result = Outputs.of(call, arguments, shape, out, lse)
            attend = _attention(
                call, self._kernels, self._key, memory.buffer.ptr, arguments, result, scale
            )
            memory.run(call, attend)
            if seen is not None:
                memory.ready.keep((seen, scale, factor, self._has_list), attend)
            return MLAAttentionResult(*result.export(call))

    def _open_lengths(self, arrays: dict[str, Any], stream: Any) -> tuple[Call, Lengths[ArrayView]]:
        """Open a call with the lengths, and check them against the plan."""
        call = open_call(tuple(arrays.items()), stream=stream)
        views = dict(zip(arrays, call.views, strict=True))
        lengths = checked_lengths(views, self._key.batch)
        check_plan_device(self._key.device, call)
        return call, lengths

    def _check_call(self, causal: bool, arrays: dict[str, Any], stream: Any) -> None:
        """Check what a call with this plan says beside what a run takes."""
        if causal != self._key.causal:
            raise ValueError(
                f"plan: made with causal={self._key.causal}, got causal={causal}; make a plan for "
                f"each"
            )
        call, lengths = self._open_lengths(arrays, stream)
        self._check_updated_for(has_list="kv_indptr" in arrays)
        if self._lengths is None or not check_mode():
            return
        if call.device is None:
            check_planned_lengths(_on_host(arrays), self._lengths)
            return
        with call:
            if may_look(call):
                check_planned_lengths(lengths_on_host(lengths, call.stream), self._lengths)

    def _check_form(self, block_table: Any, kv_indices: Any) -> None:
        """Check that pages come once, in the form of the last update."""
        if (block_table is None) == (kv_indices is None):
            got = "neither" if block_table is None else "both"
            raise ValueError(
                f"block_table: needs pages as block_table, or as kv_indices after an update with "
                f"kv_indptr, got {got}; pass one form"
            )
        self._check_updated_for(has_list=kv_indices is not None)

    def _check_updated_for(self, *, has_list: bool) -> None:
        if self._has_list is None or has_list == self._has_list:
            return
        name, had, other = (
            ("kv_indices", "without it", "block_table")
            if has_list
            else ("block_table", "with it", "kv_indices")
        )
        update = f"{_LENGTHS}, kv_indptr" if has_list else _LENGTHS
        raise ValueError(
            f"{name}: needs a plan that was updated {'with' if has_list else 'without'} kv_indptr, "
            f"got one updated {had}; pass {other}, or call plan.update({update})"
        )

    def _check_ready(self, call: Call) -> None:
        """Check that the last update serves a run on the call's stream."""
        check_plan_device(self._key.device, call)
        if self._memory is not None:
            self._memory.check_serves(call.stream, _LENGTHS)
        elif self._lengths is None:
            raise never_updated(_LENGTHS)

    def _check_shape(self, arguments: Arguments) -> None:
        key = self._key
        _, page_size, num_kv_heads, _ = arguments.kv_cache.shape
        got = (*arguments.q.shape[:2], num_kv_heads, page_size, arguments.q.dtype)
        made = (key.total_tokens, key.num_heads, key.num_kv_heads, key.page_size, key.dtype)
        if got != made:
            names = "(total_tokens, num_heads, num_kv_heads, page_size, dtype)"
            raise ValueError(
                f"plan: made for {names} {made}, got {got}; make a plan for this shape"
            )
        if cache_of(arguments.kv_cache) != key.cache:
            raise other_cache(arguments)


def _kernels(call: Call, key: MLAAttentionKey) -> Kernels:
    """Load the kernels of a shape."""
    (schedule,) = SCHEDULE_SPECS
    if key.cache == "same":
        return Kernels.of(call, schedule, attention_spec(key))
    return Kernels.of(call, schedule, *fp8_specs(key))


def _present(qo_indptr: Any, kv_lens: Any, kv_indptr: Any) -> dict[str, Any]:
    """Name the lengths that there are."""
    arrays = {"qo_indptr": qo_indptr, "kv_lens": kv_lens}
    return arrays if kv_indptr is None else arrays | {"kv_indptr": kv_indptr}


def _named(
    q: Any, kv_cache: Any, block_table: Any, kv_indices: Any, kv_scale: Any = None
) -> dict[str, Any]:
    """Name query, cache and what else there is; a kv_scale that is a number is no array."""
    factor = None if isinstance(kv_scale, Real) else kv_scale
    others = {"block_table": block_table, "kv_indices": kv_indices, "kv_scale": factor}
    columns = dict((*named_parts("q", q), *named_parts("kv_cache", kv_cache)))
    return columns | {name: array for name, array in others.items() if array is not None}


def _open(
    arrays: dict[str, Any], out: Any, lse: Any, stream: Any
) -> tuple[Call, dict[str, ArrayView | None]]:
    """Open a call with these arrays, and give its views their names."""
    call = open_call(tuple(arrays.items()), (("out", out), ("lse", lse)), stream=stream)
    return call, dict(zip((*arrays, "out", "lse"), call.views, strict=True))


@lru_cache(maxsize=1024)
def _key_on_device(
    shape: tuple[int, int, int, int, int, str],
    causal: bool,
    device: int | None,
    sm_count: int,
    cache: str = CACHES[0],
) -> MLAAttentionKey:
    """Make a key, the same object each time: it keeps what follows from it."""
    key = MLAAttentionKey(*shape, causal, device, sm_count, cache)
    check_total_tokens(key.total_tokens, key.num_places)
    return key


def _key(
    shape: tuple[int, int, int, int, int, str], causal: bool, device: int | None, cache: str
) -> MLAAttentionKey:
    sm_count = 0 if device is None else require_hopper(device).sm_count
    return _key_on_device(shape, causal, device, sm_count, cache)


def _key_of(q: ArrayView, kv_cache: ArrayView, batch: int, causal: bool) -> MLAAttentionKey:
    """Return the key of a call with these arrays, as their checks have left them."""
    _, page_size, num_kv_heads, _ = kv_cache.shape
    tokens, num_heads, _ = q.shape
    shape = (batch, tokens, num_heads, num_kv_heads, page_size, q.dtype)
    return _key(shape, causal, q.device, cache_of(kv_cache))


def _attention(
    call: Call,
    kernels: Kernels,
    key: MLAAttentionKey,
    buffer: int,
    arguments: Arguments,
    result: Outputs,
    softmax_scale: float,
) -> PreparedLaunch:
    """Prepare attention of checked arguments into these outputs."""
    kernel = kernels.attention
    if key.cache != "same":
        kernel = kernels.of_fp8(call, key, arguments)
    elif (form := form_of(key, arguments)) != key.form:
        kernel = load_for(call, attention_spec(key, form))
    return prepare_attention(
        kernel,
        key,
        buffer,
        arguments,
        result.out_view,
        result.lse_view,
        softmax_scale,
        call.stream,
    )


def _check_lengths(lengths: Lengths[np.ndarray[Any, Any]], key: MLAAttentionKey) -> None:
    check_length_values(lengths, key.total_tokens, key.page_size)


def _check_pages(call: Call, arguments: Arguments, lengths: Lengths[np.ndarray[Any, Any]]) -> None:
    pages = copy_to_host(arguments.block_table, call.stream)
    check_page_values(lengths, pages, *arguments.kv_cache.shape[:2])


def _on_host(arrays: dict[str, Any]) -> Lengths[np.ndarray[Any, Any]]:
    """Copy lengths that lie on the CPU."""
    host = {name: np.array(to_numpy(name, array)) for name, array in arrays.items()}
    return Lengths(host["qo_indptr"], host["kv_lens"], host.get("kv_indptr"))


def _attend_on_cpu(
    call: Call,
    arrays: dict[str, Any],
    factor: float | None,
    lengths: Lengths[np.ndarray[Any, Any]],
    out: Any,
    lse: Any,
    softmax_scale: float,
    causal: bool,
) -> MLAAttentionResult:
    host = {name: to_numpy(name, array) for name, array in arrays.items()}
    table, indices = host.get("block_table"), host.get("kv_indices")
    queries, caches = (
        tuple(array for part, array in host.items() if part.partition("[")[0] == name)
        for name in ("q", "kv_cache")
    )
    if check_mode():
        pages = cast("np.ndarray[Any, Any]", indices if table is None else table)
        check_page_values(lengths, pages, *caches[0].shape[:2])
    result = reference.mla_attention(
        queries if len(queries) > 1 else queries[0],
        caches if len(caches) > 1 else caches[0],
        **lengths._asdict(),
        block_table=table,
        kv_indices=indices,
        causal=causal,
        softmax_scale=softmax_scale,
        kv_scale=host.get("kv_scale", factor),
        out=None if out is None else to_numpy("out", out),
        lse=None if lse is None else to_numpy("lse", lse),
    )
    return MLAAttentionResult(
        from_numpy(call.framework, result.out) if out is None else out,
        from_numpy(call.framework, result.lse) if lse is None else lse,
    )
