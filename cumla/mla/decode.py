# SPDX-License-Identifier: Apache-2.0
"""Dense MLA attention over a paged cache: :func:`mla_decode` and its plan."""

from __future__ import annotations

from functools import lru_cache
from numbers import Real
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from cumla import reference
from cumla.core.arrays import ArrayView, Call, from_numpy, glance, open_call, reopen_call, to_numpy
from cumla.core.workspace import PlanMemory, check_plan_device, never_updated, open_plan
from cumla.launch.device import current_device, properties, require_hopper
from cumla.launch.mla.choice import decode_spec
from cumla.launch.mla.mla_decode import form_of, prepare_decode
from cumla.launch.mla.mla_decode_fp8 import fp8_specs, prepare_decode_fp8
from cumla.launch.mla.shape import CACHES, MLADecodeKey
from cumla.launch.split.plan import BLOCK_TOKENS
from cumla.launch.split.schedule import prepare_schedule, schedule_spec
from cumla.mla.call import Kernels, Outputs, load_for
from cumla.mla.checks import (
    DTYPES,
    Arguments,
    cache_of,
    check_data,
    check_device_number,
    check_lengths_of_plan,
    check_mode,
    check_number,
    check_parts,
    check_seqlens,
    check_shape_numbers,
    check_values,
    check_variant,
    checked_arguments,
    checked_cache_dtype,
    checked_flag,
    checked_max_blocks,
    checked_query_and_cache,
    checked_scale,
    named_parts,
    other_cache,
)
from cumla.mla.fp8_caches import number_of
from cumla.reference import MLADecodeResult

if TYPE_CHECKING:
    from cumla.launch.kernel import PreparedLaunch

__all__ = ["MLADecodePlan", "MLADecodeResult", "mla_decode"]


def mla_decode(
    q: Any,
    kv_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    *,
    softmax_scale: float | None = None,
    kv_scale: Any = None,
    causal: bool = True,
    batch_invariant: bool = False,
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
    q : array or pair of arrays
        ``(batch, q_len, num_heads, 576)`` bfloat16 or float16, of CuPy, PyTorch, JAX or NumPy. A
        tuple ``(q_nope, q_pe)`` holds the 512 latent columns and the 64 RoPE ones apart, in one
        dtype. Any strides that are multiples of 16 bytes, the last axis contiguous: slices of wider
        arrays are read where they are.
    kv_cache : array, or pair or triple of arrays
        ``(num_pages, page_size, num_kv_heads, 576)``, or ``(num_pages, page_size, 576)`` for one kv
        head, in q's dtype; strides as for q. A tuple ``(ckv, kpe)`` holds the columns apart, 512
        and 64, each with strides of its own, whether or not q does. num_kv_heads divides num_heads;
        page_size is any. Slots that no request uses may hold anything, NaN included.

        FP8 caches, for q in bfloat16: either of the above as float8_e4m3fn, or uint8 with its bits,
        under one `kv_scale`; of a pair also the first alone, beside RoPE columns in bfloat16. A
        triple ``(ckv, kpe, scales)`` of e4m3, e4m3 or bfloat16, and float32, the last with 4
        columns: a scale for each token and 128 latent columns. And uint8 with 656 columns, the
        packed format of DeepSeek-V3.2: 512 e4m3, 4 float32 scales, 64 bfloat16.
        :func:`cumla.append_mla_cache` writes all of these but triples with e4m3 RoPE columns.
        Arrays may be broadcast, such as scales that are the same for all tokens: strides of 0.
    block_table : array
        ``(batch, max_pages)`` int32, rows contiguous. Entries behind a request's last page are
        never read; a page number outside ``[0, num_pages)`` in a used entry reads as zeros.
    cache_seqlens : array
        ``(batch,)`` int32: cached tokens of each request, the q_len newest included. Clamped to
        ``[0, max_pages * page_size]``.
    softmax_scale : float, optional
        Factor of the scores; 576 ** -0.5 by default. A real model passes that of its un-absorbed
        head dimension.
    kv_scale : float or array, optional
        Factor of e4m3 columns without scales of their own: all of them, the latent ones beside RoPE
        columns in bfloat16, or the e4m3 RoPE columns of a triple. One float32 in an array is read
        by the kernel, and may change between the replays of a graph. 1 by default.
    causal : bool
        Query i of q_len sees ``cache_seqlens - (q_len - 1 - i)`` tokens; all of them if False.
    batch_invariant : bool
        Give a request the same bits whatever else is in the batch: other requests, their number,
        its place among them. Requests are then cut at fixed positions, which takes longer than
        cutting them to fill the GPU, and the workspace is that of the longest requests that
        block_table can hold: pass no more columns than needed, or a plan.
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
        default the current stream of q's framework (CuPy's for JAX). On another one than that,
        CuPy's and PyTorch's arrays must stay alive until the work is done: their allocators do not
        know of it.

    Returns
    -------
    MLADecodeResult
        ``out``, and ``lse``: the natural logarithm of the sum of ``exp(softmax_scale * q.k)``.
        Where nothing is visible out is 0 and lse +inf. Arrays of q's framework.

    Raises
    ------
    TypeError
        An argument is of the wrong kind: no array, a tracer, an unknown dtype, or a flag that is
        neither True nor False. As with every error but the last, the message names it, and nothing
        has been launched or written.
    ValueError
        An argument does not fit: its shape, strides, alignment, place or value, or a plan that was
        made for something else or is not ready.
    UnsupportedDeviceError
        The arrays are on a GPU that is not of compute capability 9.0.
    MissingDependencyError
        The arrays are on a GPU, and CuPy, NVRTC or cuda.bindings is missing.
    CompilationError
        A kernel does not compile with the NVRTC that is installed.
    NotPreparedError
        The stream is being captured and a kernel is not loaded yet, or memory is needed that
        capture forbids.
    CumlaError
        The driver refuses a launch; base class of the four above.

    Notes
    -----
    Formula and conventions: DeepSeek-V2 (arXiv:2405.04434), section 2.1, with the absorbed weights
    of its appendix.

    Scales of an FP8 cache act in float32 on the scores, and on the weights before these are rounded
    to 16 bits: they need not be powers of two. Few query heads gain time by such a cache, many lose
    it, because its numbers are converted for each 32 query rows anew.

    This is for inference: no gradients flow, and PyTorch's autograd does not record the call,
    whatever its tensors require.

    A CUDA graph holds the addresses of the inputs, the outputs and the plan's buffer, and keeps
    none of them alive: keep arrays and plan as long as the graph is replayed.
    """
    causal = checked_flag("causal", causal)
    batch_invariant = checked_flag("batch_invariant", batch_invariant)
    if plan is not None:
        if not isinstance(plan, MLADecodePlan):
            raise TypeError(f"plan: needs a cumla.MLADecodePlan, got {type(plan).__qualname__}")
        plan._check_options(causal, batch_invariant)
        return plan.run(
            q,
            kv_cache,
            block_table,
            cache_seqlens,
            softmax_scale=softmax_scale,
            kv_scale=kv_scale,
            out=out,
            lse=lse,
            stream=stream,
        )
    inputs = _inputs(q, kv_cache, block_table, cache_seqlens, kv_scale)
    call = _open(inputs, out, lse, stream)
    scale = checked_scale(softmax_scale)
    factor = None if kv_scale is None else number_of("kv_scale", kv_scale)
    arguments = checked_arguments(_named(call, inputs), factor)
    max_blocks = _blocks_of_table(arguments) if batch_invariant else 0
    key = decode_key(
        arguments.q,
        arguments.kv_cache,
        causal=causal,
        batch_invariant=batch_invariant,
        max_blocks=max_blocks,
    )
    if call.device is None:
        return _decode_on_cpu(call, inputs, factor, out, lse, scale, causal)
    with call:
        check_data(call, arguments)
        kernels = _kernels(call, key)
        result = Outputs.of(call, arguments, _lse_shape(key), out, lse)
        buffer = call.workspace(key.layout.nbytes).ptr
        lengths = arguments.cache_seqlens
        assert lengths is not None
        schedule = prepare_schedule(kernels.schedule, key, buffer, lengths, call.stream)
        attend = _attention(call, kernels, key, buffer, arguments, result, scale)
        schedule()
        attend()
        return MLADecodeResult(*result.export(call))


class MLADecodePlan:
    """Schedule and workspace of :func:`mla_decode`, to be used for every layer of a decoding step.

    ``update`` computes on the device, from the lengths there, who works on which part of the cache;
    ``run`` uses that for as many layers as you like. Neither waits for the device or copies to the
    host, and both can be captured into a CUDA graph, which then serves changing lengths; the graph
    holds the address of the plan's buffer, so keep the plan as long as the graph. A plan belongs to
    one stream at a time: the one of its last ``update``. It owns one buffer and no other state on
    the device, and on the CPU nothing but the lengths.

    Parameters
    ----------
    batch, q_len, num_heads : int
        As in ``q`` ``(batch, q_len, num_heads, 576)``.
    num_kv_heads : int
        Divides num_heads.
    page_size : int
        Tokens of a cache page: any number from 1.
    dtype : str
        ``"bfloat16"`` or ``"float16"``: of q, and of kv_cache unless `cache_dtype` says otherwise.
    cache_dtype : str, optional
        ``"float8_e4m3fn"`` for FP8 caches in any form, with dtype bfloat16; dtype by default.
    causal : bool
        As in :func:`mla_decode`.
    batch_invariant : bool
        As in :func:`mla_decode`; it needs `max_seqlen`.
    max_seqlen : int, optional
        With `batch_invariant`, and only then: tokens of the longest request that the plan is to
        serve. The buffer grows with it, and a little the time. Longer requests are cut off at the
        next multiple of 64 tokens. It changes no bits.
    variant : str, optional
        Kernel that attends, to compare them: ``"swapped"`` (up to 16 query rows of a kv head),
        ``"one_tile"`` or ``"shared_blocks"``. By default the query rows of a kv head decide. Not
        for FP8 caches, which have kernels of their own.
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
        Stream on which the buffer is allocated, as in :func:`mla_decode`.

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
        cache_dtype: str | None = None,
        causal: bool = True,
        batch_invariant: bool = False,
        max_seqlen: int | None = None,
        variant: str | None = None,
        device: int | None = None,
        workspace: Any = None,
        like: Any = None,
        stream: Any = None,
    ) -> None:
        numbers = {"batch": batch, "q_len": q_len}
        check_shape_numbers(numbers, num_heads, num_kv_heads, page_size, dtype)
        causal = checked_flag("causal", causal)
        batch_invariant = checked_flag("batch_invariant", batch_invariant)
        max_blocks = checked_max_blocks(batch_invariant, max_seqlen)
        cache = checked_cache_dtype(cache_dtype, dtype)
        check_variant(variant, num_heads, q_len, num_kv_heads, cache)
        check_device_number(device)
        call = open_plan(device, like, workspace, stream)
        shape = (batch, q_len, num_heads, num_kv_heads, page_size, dtype)
        self._key = _key(shape, causal, call.device, batch_invariant, max_blocks, variant, cache)
        self._lengths: np.ndarray[Any, Any] | None = None  # of the last update, on the CPU
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
        *,
        causal: bool = True,
        batch_invariant: bool = False,
        max_seqlen: int | None = None,
        variant: str | None = None,
        workspace: Any = None,
        stream: Any = None,
    ) -> MLADecodePlan:
        """Make a plan for the shapes of q and kv_cache, with a buffer of q's framework.

        Parameters
        ----------
        q, kv_cache : array
            As in :func:`mla_decode`; only their shapes, dtype and device are looked at.
        causal, batch_invariant, max_seqlen, variant, workspace, stream
            As for the class.

        Returns
        -------
        MLADecodePlan

        Raises
        ------
        TypeError, ValueError
            As the class, and where q and kv_cache do not fit together.
        UnsupportedDeviceError, MissingDependencyError, NotPreparedError
            As the class.
        """
        arrays = (*named_parts("q", q), *named_parts("kv_cache", kv_cache))
        call = open_call(arrays, stream=stream)
        names = (name for name, _ in arrays)
        columns = checked_query_and_cache(dict(zip(names, call.views, strict=True)))
        key = decode_key(columns.q, columns.kv_cache, causal=True)  # for its shape alone
        with call:
            return cls(
                key.batch,
                key.q_len,
                key.num_heads,
                num_kv_heads=key.num_kv_heads,
                page_size=key.page_size,
                dtype=key.dtype,
                cache_dtype=columns.kv_cache.dtype,
                causal=causal,
                batch_invariant=batch_invariant,
                max_seqlen=max_seqlen,
                variant=variant,
                workspace=workspace,
                like=arrays[0][1],
                stream=stream,
            )

    @staticmethod
    def workspace_bytes(
        batch: int,
        q_len: int,
        num_heads: int,
        *,
        num_kv_heads: int = 1,
        cache_dtype: str | None = None,
        batch_invariant: bool = False,
        max_seqlen: int | None = None,
        sm_count: int | None = None,
    ) -> int:
        """Size of a plan's buffer: a pure function of the shape and the GPU's multiprocessors.

        Parameters
        ----------
        batch, q_len, num_heads, num_kv_heads, cache_dtype, batch_invariant, max_seqlen
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
            A number does not fit, or batch_invariant is neither True nor False.
        UnsupportedDeviceError, MissingDependencyError
            Without `sm_count`: there is no GPU, or CuPy is missing.
        """
        numbers = {"batch": batch, "q_len": q_len}
        check_shape_numbers(numbers, num_heads, num_kv_heads, BLOCK_TOKENS, DTYPES[0])
        dtype = cache_dtype if cache_dtype in DTYPES else DTYPES[0]
        cache = checked_cache_dtype(cache_dtype, dtype)
        batch_invariant = checked_flag("batch_invariant", batch_invariant)
        max_blocks = checked_max_blocks(batch_invariant, max_seqlen)
        if sm_count is None:
            sm_count = properties(current_device()).sm_count
        check_number("sm_count", sm_count, "leave it out to ask the current GPU")
        shape = (batch, q_len, num_heads, num_kv_heads, BLOCK_TOKENS, DTYPES[0])
        mode = (batch_invariant, max_blocks, None, cache)
        return _key_on_device(shape, False, 0, sm_count, *mode).layout.nbytes

    @property
    def key(self) -> MLADecodeKey:
        """The shape for which this plan was made."""
        return self._key

    def update(self, cache_seqlens: Any, *, stream: Any = None) -> None:
        """Compute the schedule for these lengths, on the device.

        On another stream than before, that one's work goes first: the new stream waits for it, on
        the device. Only a stream that is being captured does not; let the capture begin when
        earlier work with the plan is done, as ``torch.cuda.graph`` does.

        Parameters
        ----------
        cache_seqlens : array
            ``(batch,)`` int32, as in :func:`mla_decode`. Read when the stream reaches this call.
        stream : optional
            As in :func:`mla_decode`, the current stream of the framework of cache_seqlens by
            default. The runs that follow must be on the same one.

        Raises
        ------
        TypeError, ValueError
            cache_seqlens does not fit the plan.
        MissingDependencyError, CompilationError, NotPreparedError, CumlaError
            As :func:`mla_decode`; every kernel of the plan is loaded here.
        """
        call = open_call((("cache_seqlens", cache_seqlens),), stream=stream)
        (view,) = cast("tuple[ArrayView]", call.views)
        check_seqlens(view, self._key.batch)
        check_plan_device(self._key.device, call)
        memory = self._memory
        if memory is None:
            self._lengths = np.array(to_numpy("cache_seqlens", cache_seqlens))
            if self._key.batch_invariant:
                np.minimum(self._lengths, self._key.max_blocks * BLOCK_TOKENS, out=self._lengths)
            return
        with call:
            if self._kernels is None:
                self._kernels = _kernels(call, self._key)
            launch = prepare_schedule(
                self._kernels.schedule, self._key, memory.buffer.ptr, view, call.stream
            )
            memory.update(call, launch)

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
        block_table: Any,
        cache_seqlens: Any,
        *,
        softmax_scale: float | None = None,
        kv_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        stream: Any = None,
    ) -> MLADecodeResult:
        """Attend with the schedule of the last update, and with the lengths it was given.

        Parameters
        ----------
        q, kv_cache, block_table, cache_seqlens, softmax_scale, kv_scale, out, lse, stream
            As in :func:`mla_decode`. The values of cache_seqlens are those of the last update;
            should they have changed since, those of the update count (and the check mode,
            ``CUMLA_CHECK=1``, refuses the call).

        Returns
        -------
        MLADecodeResult

        Raises
        ------
        TypeError, ValueError
            An argument does not fit; the plan is of another shape, device or stream, was never
            updated, or has lost its workspace to another plan.
        NotPreparedError
            The stream is being captured, and CuPy would have to allocate ``out=`` or ``lse=``.
        CumlaError
            The driver refuses a launch.
        """
        scale = checked_scale(softmax_scale)
        arrays: tuple[Any, ...] = (q, kv_cache, block_table, cache_seqlens, out, lse)
        factor = None
        if kv_scale is not None:
            factor = number_of("kv_scale", kv_scale)
            if factor is None:
                arrays = (*arrays, kv_scale)
        call, seen = None, glance(arrays)
        if seen is None:
            inputs = _inputs(q, kv_cache, block_table, cache_seqlens, kv_scale)
            call = _open(inputs, out, lse, stream)
            seen = call.views
        memory = self._memory
        ready = None if memory is None else memory.ready.get((seen, scale, factor))
        if memory is not None and ready is not None and not check_mode():
            again = call or reopen_call(out, self._key.device, stream)
            if again.stream == memory.stream:
                with again:
                    memory.run(again, ready)
                return MLADecodeResult(out, lse)
        if call is None:
            inputs = _inputs(q, kv_cache, block_table, cache_seqlens, kv_scale)
            call = _open(inputs, out, lse, stream)
        arguments = self._checked_arguments(call, inputs, factor)
        key = self._key
        if memory is None:
            assert self._lengths is not None  # or the plan would have been refused
            if check_mode():
                check_lengths_of_plan(to_numpy("cache_seqlens", cache_seqlens), self._lengths)
            inputs["cache_seqlens"] = self._lengths
            return _decode_on_cpu(call, inputs, factor, out, lse, scale, key.causal)
        assert self._kernels is not None  # they come with the first update
        with call:
            buffer = memory.buffer.ptr
            check_data(call, arguments, buffer + key.layout.places)
            result = Outputs.of(call, arguments, _lse_shape(key), out, lse)
            attend = _attention(call, self._kernels, key, buffer, arguments, result, scale)
            memory.run(call, attend)
            if all(result.given):
                memory.ready.keep((seen, scale, factor), attend)
            return MLADecodeResult(*result.export(call))

    def _checked_arguments(
        self, call: Call, inputs: dict[str, Any], factor: float | None
    ) -> Arguments:
        """Check the arguments against each other and the plan."""
        check_plan_device(self._key.device, call)
        if self._memory is not None:
            self._memory.check_serves(call.stream, "cache_seqlens")
        elif self._lengths is None:
            raise never_updated("cache_seqlens")
        arguments = checked_arguments(_named(call, inputs), factor)
        self._check_shape(arguments)
        return arguments

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
        if cache_of(arguments.kv_cache) != key.cache:
            raise other_cache(arguments)

    def _check_options(self, causal: bool, batch_invariant: bool) -> None:
        if self._key.q_len > 1 and causal != self._key.causal:
            raise ValueError(
                f"plan: made with causal={self._key.causal}, got causal={causal}; make a plan for "
                f"each"
            )
        if batch_invariant != self._key.batch_invariant:
            raise ValueError(
                f"plan: made with batch_invariant={self._key.batch_invariant}, got "
                f"batch_invariant={batch_invariant}; make a plan for each"
            )


def _kernels(call: Call, key: MLADecodeKey) -> Kernels:
    """Load the kernels of a shape."""
    if key.cache == "same":
        return Kernels.of(call, schedule_spec(key), decode_spec(key))
    return Kernels.of(call, schedule_spec(key), *fp8_specs(key))


def _inputs(
    q: Any, kv_cache: Any, block_table: Any, cache_seqlens: Any, kv_scale: Any
) -> dict[str, Any]:
    """Name the arrays that are read; a kv_scale that is a number is none."""
    columns = named_parts("q", q) + named_parts("kv_cache", kv_cache)
    named = dict(columns, block_table=block_table, cache_seqlens=cache_seqlens)
    if kv_scale is not None and not isinstance(kv_scale, Real):
        named["kv_scale"] = kv_scale
    return named


def _open(inputs: dict[str, Any], out: Any, lse: Any, stream: Any) -> Call:
    return open_call(tuple(inputs.items()), (("out", out), ("lse", lse)), stream=stream)


def _named(call: Call, inputs: dict[str, Any]) -> dict[str, ArrayView | None]:
    """Give the views of a call of :func:`_open` their names."""
    return dict(zip((*inputs, "out", "lse"), call.views, strict=True))


@lru_cache(maxsize=1024)
def _key_on_device(
    shape: tuple[int, int, int, int, int, str],
    causal: bool,
    device: int | None,
    sm_count: int,
    batch_invariant: bool,
    max_blocks: int,
    variant: str | None = None,
    cache: str = CACHES[0],
) -> MLADecodeKey:
    """Make a key, the same object each time: it keeps what follows from it."""
    modes = (batch_invariant, max_blocks, variant, cache)
    key = MLADecodeKey(*shape, causal, device, sm_count, *modes)
    check_parts(key)
    return key


def _key(
    shape: tuple[int, int, int, int, int, str],
    causal: bool,
    device: int | None,
    batch_invariant: bool,
    max_blocks: int,
    variant: str | None = None,
    cache: str = CACHES[0],
) -> MLADecodeKey:
    sm_count = 0 if device is None else require_hopper(device).sm_count
    modes = (batch_invariant, max_blocks, variant, cache)
    return _key_on_device(shape, causal and shape[1] > 1, device, sm_count, *modes)


def _blocks_of_table(arguments: Arguments) -> int:
    """Count the KV blocks of the longest request that a block table can name."""
    return -(-arguments.block_table.shape[1] * arguments.kv_cache.shape[1] // BLOCK_TOKENS)


def decode_key(
    q: ArrayView,
    kv_cache: ArrayView,
    *,
    causal: bool,
    batch_invariant: bool = False,
    max_blocks: int = 0,
) -> MLADecodeKey:
    """Return the key of a call with these arrays, as their checks have left them."""
    batch, q_len, num_heads, _ = q.shape
    _, page_size, num_kv_heads, _ = kv_cache.shape
    shape = (batch, q_len, num_heads, num_kv_heads, page_size, q.dtype)
    cache = cache_of(kv_cache)
    return _key(shape, causal, q.device, batch_invariant, max_blocks, cache=cache)


def _lse_shape(key: MLADecodeKey) -> tuple[int, int, int]:
    return key.batch, key.num_heads, key.q_len


def _attention(
    call: Call,
    kernels: Kernels,
    key: MLADecodeKey,
    buffer: int,
    arguments: Arguments,
    result: Outputs,
    softmax_scale: float,
) -> PreparedLaunch:
    """Prepare attention of checked arguments into these outputs."""
    kernel, prepare = kernels.attention, prepare_decode
    if key.cache != "same":
        kernel, prepare = kernels.of_fp8(call, key, arguments), prepare_decode_fp8
    elif (form := form_of(key, arguments)) != key.form:
        kernel = load_for(call, decode_spec(key, form))
    return prepare(
        kernel,
        key,
        buffer,
        arguments,
        result.out_view,
        result.lse_view,
        softmax_scale,
        call.stream,
    )


def _decode_on_cpu(
    call: Call,
    inputs: dict[str, Any],
    factor: float | None,
    out: Any,
    lse: Any,
    softmax_scale: float,
    causal: bool,
) -> MLADecodeResult:
    host = {name: to_numpy(name, array) for name, array in inputs.items()}
    queries, caches = (
        tuple(array for part, array in host.items() if part.partition("[")[0] == name)
        for name in ("q", "kv_cache")
    )
    table, lengths = host["block_table"], host["cache_seqlens"]
    if check_mode():
        check_values(lengths, table, *caches[0].shape[:2])
    result = reference.mla_decode(
        queries if len(queries) > 1 else queries[0],
        caches if len(caches) > 1 else caches[0],
        table,
        lengths,
        softmax_scale=softmax_scale,
        kv_scale=host.get("kv_scale", factor),
        causal=causal,
        out=None if out is None else to_numpy("out", out),
        lse=None if lse is None else to_numpy("lse", lse),
    )
    return MLADecodeResult(
        from_numpy(call.framework, result.out) if out is None else out,
        from_numpy(call.framework, result.lse) if lse is None else lse,
    )
