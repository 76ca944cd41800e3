# SPDX-License-Identifier: Apache-2.0
"""Dense MLA attention over queries of different lengths: :func:`mla_attention` and its plan."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cumla import reference
from cumla.core.arguments import (
    INT32,
    Array,
    bind,
    check_device_number,
    check_number,
    checked_flag,
    checked_scale,
    number_of,
)
from cumla.core.arrays import open_call
from cumla.core.operation import Operation, Output, Scheduled, parts_on_host, run
from cumla.core.plan import Plan
from cumla.core.state import AttentionState
from cumla.launch.device import current_device, properties, require_hopper
from cumla.launch.mla.mla_attention import attention_launch, attention_spec
from cumla.launch.mla.mla_decode import DecodeArguments
from cumla.launch.mla.mla_decode_fp8 import fp8_specs
from cumla.launch.mla.shape import HEAD_DIM, MLAAttentionKey
from cumla.launch.module import load
from cumla.launch.split.plan import BLOCK_TOKENS, MOST_TOKENS
from cumla.launch.split.ragged_schedule import SPECS as SCHEDULE_SPECS
from cumla.launch.split.ragged_schedule import ragged_schedule_launch
from cumla.mla.arguments import (
    BLOCK_TABLE,
    DTYPES,
    cache_of,
    check_shape_numbers,
    checked_cache_dtype,
    checked_kv_scale,
    checked_query_and_cache,
    named,
    other_cache,
    outputs_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cumla.core.arguments import Views
    from cumla.core.arrays import ArrayView
    from cumla.core.operation import Launchable

    Host = Mapping[str, np.ndarray[Any, Any]]

__all__ = ["MLAAttentionPlan", "mla_attention"]

_SCALE = float(HEAD_DIM**-0.5)  # of the scores, by default
_QUERY_AXES = ("total_tokens", "num_heads")  # of q, before its columns
_MOST_PLACES = (1 << 31) - 1  # row tiles that a schedule can number
_ENTRY = "give each request of the batch its entry"
_LENGTHS = {
    "qo_indptr": Array("batch+1", INT32, way_out="give each request a begin, and the last an end"),
    "kv_lens": Array("batch", INT32, way_out=_ENTRY),
    "kv_indptr": Array("batch+1", INT32, way_out=_ENTRY),
}
_PAGES = {
    "block_table": BLOCK_TABLE,
    "kv_indices": Array("pages", INT32, "row", "pass a table as block_table"),
}


def mla_attention(
    q: Any,
    kv_cache: Any,
    block_table: Any,
    kv_lens: Any,
    *,
    qo_indptr: Any,
    kv_indptr: Any = None,
    kv_indices: Any = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    kv_scale: Any = None,
    out: Any = None,
    lse: Any = None,
    stream: Any = None,
) -> AttentionState:
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
    block_table : array or None
        ``(batch, max_pages)`` int32, rows contiguous, as in :func:`cumla.mla_decode`; None where
        pages come as kv_indptr and kv_indices.
    kv_lens : array
        ``(batch,)`` int32: cached tokens of each request, those of its queries included. Clamped to
        what the pages of the request hold.
    qo_indptr : array
        ``(batch + 1,)`` int32: where the query tokens of each request begin in q, and where the
        last ones end. The numbers must be non-decreasing. Rows before the first and from the last
        on belong to no request: what they give is not written.
    kv_indptr, kv_indices : array, optional
        In place of block_table: the pages of request r are ``kv_indices[kv_indptr[r] :
        kv_indptr[r + 1]]``. ``(batch + 1,)`` int32, non-decreasing, and ``(pages,)``
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
    stream : optional
        As in :func:`cumla.mla_decode`.

    Returns
    -------
    AttentionState
        ``out`` ``(total_tokens, num_heads, 512)`` and ``lse`` ``(total_tokens, num_heads)``
        float32: the natural logarithm of the sum of ``exp(softmax_scale * q.k)``. Where a query
        sees nothing out is 0 and lse -inf. Arrays of q's framework; what is allocated here holds
        anything in the rows of no request.

    Raises
    ------
    TypeError, UnsupportedDeviceError, MissingDependencyError, CompilationError, CumlaError
        As :func:`cumla.mla_decode`.
    ValueError
        An argument does not fit: its shape, strides, alignment, place or value; pages in both forms
        or in none; an output shares memory with another array.
    NotPreparedError
        As :func:`cumla.mla_decode`.

    Notes
    -----
    Offsets and page numbers are taken on trust; the check mode, ``CUMLA_CHECK=1``, looks at them.

    A CUDA graph holds the addresses of the inputs, the outputs and the plan's buffer, and keeps
    none of them alive: keep arrays and plan as long as the graph is replayed.
    """
    causal = checked_flag("causal", causal)
    _check_one_form(block_table, kv_indptr, kv_indices)
    factor = None if kv_scale is None else number_of("kv_scale", kv_scale)
    pages = {"block_table": block_table}
    if block_table is None:
        pages = {"kv_indices": kv_indices, "kv_indptr": kv_indptr}
    lengths = {"qo_indptr": qo_indptr, "kv_lens": kv_lens}
    inputs = named(q, kv_cache, kv_scale, **pages, **lengths)
    options = (checked_scale(softmax_scale, _SCALE), factor, causal)
    return AttentionState(*run(_ATTENTION, inputs, {"out": out, "lse": lse}, options, stream))


class _Lengths(NamedTuple):
    """What a schedule is made of."""

    qo_indptr: ArrayView
    kv_lens: ArrayView
    kv_indptr: ArrayView | None


class _Schedule(Operation[_Lengths, MLAAttentionKey]):
    """Deals the KV blocks of all row tiles out, from lengths, into a plan's buffer."""

    integers = ("qo_indptr", "kv_lens", "kv_indptr")

    def arguments(self, views: Views, options: int | None) -> _Lengths:
        sizes = {} if options is None else {"batch": options}
        bind(_LENGTHS, views, sizes)
        qo_indptr, kv_lens = views["qo_indptr"], views["kv_lens"]
        assert qo_indptr is not None and kv_lens is not None
        return _Lengths(qo_indptr, kv_lens, views.get("kv_indptr"))

    def recipe(
        self, key: MLAAttentionKey, arguments: _Lengths, outs: Sequence[ArrayView], buffer: int
    ) -> Sequence[Launchable]:
        return (ragged_schedule_launch(key, buffer, *arguments),) if key.batch else ()

    def reference(self, host: Host, arguments: _Lengths) -> Sequence[np.ndarray[Any, Any]]:
        return ()


class _Attend(Operation[DecodeArguments, MLAAttentionKey]):
    """Attends by the schedule in a plan's buffer."""

    integers = ("block_table", "kv_indices")

    def arguments(self, views: Views, options: tuple[float, float | None, bool]) -> DecodeArguments:
        softmax_scale, factor, causal = options
        columns = checked_query_and_cache(views, _QUERY_AXES)
        kv_scale = checked_kv_scale(columns, views, factor)
        bind(_PAGES, views, {})
        pages = views.get("block_table")
        if pages is None:
            pages = views["kv_indices"]
        elif pages.shape[0] > 1 and pages.strides[0] < 0:  # entries count from the first row's
            raise ValueError(
                f"block_table: needs rows in the order of memory, got a stride of "
                f"{pages.strides[0]} bytes between them; make a contiguous copy"
            )
        assert pages is not None
        return DecodeArguments(
            *columns[:4], pages, columns.kv_scales, kv_scale, softmax_scale, causal
        )

    def outputs(self, arguments: DecodeArguments) -> tuple[Output, ...]:
        return outputs_of(arguments.q, arguments.q.shape[:2])

    def workspace_bytes(self, key: MLAAttentionKey) -> int:
        return key.layout.nbytes

    def recipe(
        self,
        key: MLAAttentionKey,
        arguments: DecodeArguments,
        outs: Sequence[ArrayView],
        buffer: int,
    ) -> Sequence[Launchable]:
        if not key.batch or 0 in arguments.q.shape:
            return ()
        out, lse = outs
        return (attention_launch(key, buffer, arguments, out, lse),)

    def check_values(self, host: Host, arguments: DecodeArguments) -> None:
        num_pages, page_size = arguments.kv_cache.shape[:2]
        _check_lengths(host, arguments.q.shape[0], page_size)
        _check_pages(host, num_pages, page_size)

    def reference(self, host: Host, arguments: DecodeArguments) -> Sequence[np.ndarray[Any, Any]]:
        factor: Any = arguments.kv_scale  # a view, if it is an array
        return reference.mla_attention(
            parts_on_host(host, "q"),
            parts_on_host(host, "kv_cache"),
            host.get("block_table"),
            host["kv_lens"],
            qo_indptr=host["qo_indptr"],
            kv_indptr=host.get("kv_indptr"),
            kv_indices=host.get("kv_indices"),
            softmax_scale=arguments.softmax_scale,
            kv_scale=host.get("kv_scale", None if factor == 1.0 else factor),
            causal=arguments.causal,
            out=host.get("out"),
            lse=host.get("lse"),
        )


class _Attention(Scheduled[DecodeArguments, MLAAttentionKey]):
    """Both, in one call."""

    def batch(self, attend: DecodeArguments, views: Views) -> None:
        return None  # as qo_indptr says

    def arguments(
        self, views: Views, options: tuple[float, float | None, bool]
    ) -> tuple[_Lengths, DecodeArguments]:
        lengths, attend = super().arguments(views, options)
        _check_batch(attend.block_table, lengths.kv_lens.shape[0])
        return lengths, attend

    def key(self, arguments: tuple[Any, DecodeArguments], device: int) -> MLAAttentionKey:
        lengths, attend = arguments
        tokens, num_heads, _ = attend.q.shape
        _, page_size, num_kv_heads, _ = attend.kv_cache.shape
        batch = lengths.kv_lens.shape[0]
        shape = (batch, tokens, num_heads, num_kv_heads, page_size, attend.q.dtype)
        return _key(shape, attend.causal, device, cache_of(attend.kv_cache))


_SCHEDULE = _Schedule()
_ATTEND = _Attend()
_ATTENTION = _Attention(_SCHEDULE, _ATTEND)


class MLAAttentionPlan(Plan[MLAAttentionKey]):
    """Schedule and workspace of :func:`mla_attention`, to be used for every layer of a step.

    ``update`` computes on the device, from the lengths there, who works on which part of the cache;
    ``run`` uses that for as many layers as you like. Neither waits for the device or copies to the
    host, and both can be captured into a CUDA graph, which then serves whatever mix of requests the
    arrays hold at each replay, up to `batch` requests (those without queries have equal offsets)
    and `total_tokens` query tokens (rows behind the last offset belong to nobody). The graph holds
    the address of the plan's buffer, so keep the plan as long as the graph. A plan belongs to one
    stream at a time, the one of its last ``update``, and to one thread. An update that was only
    captured is computed when the graph is replayed: eager runs need one of their own. A plan owns
    one buffer and no other state on the device, and on the CPU nothing but the lengths.

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
    >>> import numpy as np
    >>> import cumla
    >>> q = np.ones((5, 16, 576), np.float16)  # 1 and 4 query tokens
    >>> kv_cache = np.ones((4, 64, 576), np.float16)
    >>> block_table = np.array([[0, 1], [2, 3]], np.int32)
    >>> qo_indptr = np.array([0, 1, 5], np.int32)
    >>> plan = cumla.MLAAttentionPlan.from_arrays(q, kv_cache, qo_indptr=qo_indptr)
    >>> plan.update(np.array([100, 7], np.int32), qo_indptr=qo_indptr)
    >>> for layer in range(3):
    ...     out, lse = plan.run(q, kv_cache, block_table)
    >>> out.shape, lse.shape
    ((5, 16, 512), (5, 16))
    """

    _schedule = _SCHEDULE
    _attend = _ATTEND
    _lengths = "kv_lens, qo_indptr=..."

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
        shape = (batch, total_tokens, num_heads, num_kv_heads, page_size, dtype)
        self._has_list: bool | None = None  # whether the last update was for a list of pages
        self._make(lambda on: _key(shape, causal, on, cache), device, workspace, like, stream)

    @classmethod
    def from_arrays(
        cls,
        q: Any,
        kv_cache: Any,
        *,
        qo_indptr: Any,
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
        arrays = named(q, kv_cache, None, qo_indptr=qo_indptr)
        call = open_call(tuple(arrays.items()), stream=stream)
        views = dict(zip(arrays, call.views, strict=True))
        columns = checked_query_and_cache(views, _QUERY_AXES)
        batch = bind({"qo_indptr": _LENGTHS["qo_indptr"]}, views, {})["batch"]
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

    def update(
        self, kv_lens: Any, *, qo_indptr: Any, kv_indptr: Any = None, stream: Any = None
    ) -> None:
        """Compute the schedule for these lengths, on the device.

        On another stream than before, that one's work goes first: the new stream waits for it, on
        the device. Only a stream that is being captured does not; let the capture begin when
        earlier work with the plan is done, as ``torch.cuda.graph`` does.

        Parameters
        ----------
        kv_lens, qo_indptr : array
            As in :func:`mla_attention`. Read when the stream reaches this call.
        kv_indptr : array, optional
            As in :func:`mla_attention`: with it the runs that follow take ``kv_indices``, without
            it they take ``block_table``.
        stream : optional
            As in :func:`cumla.mla_decode`, the current stream of the framework of kv_lens by
            default. The runs that follow must be on the same one.

        Raises
        ------
        TypeError, ValueError
            An array does not fit the plan.
        MissingDependencyError, CompilationError, NotPreparedError, CumlaError
            As :func:`mla_attention`; every kernel of the plan is loaded here, but for that of a
            cache in two arrays of whole 64-token blocks a page, which the first run loads.
        """
        has_list = kv_indptr is not None
        lengths = {"kv_lens": kv_lens, "qo_indptr": qo_indptr}
        if has_list:
            lengths["kv_indptr"] = kv_indptr
        self._update(lengths, self.key.batch, stream)
        if has_list != self._has_list and self._memory is not None:
            self._memory.ready.clear()
        self._has_list = has_list

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
    ) -> AttentionState:
        """Attend with the schedule of the last update, and with the lengths it was given.

        Parameters
        ----------
        q, kv_cache, block_table, kv_indices, softmax_scale, kv_scale, out, lse, stream
            As in :func:`mla_attention`. Of block_table and kv_indices the one that the last update
            asks for.

        Returns
        -------
        AttentionState

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
        factor = None if kv_scale is None else number_of("kv_scale", kv_scale)
        scale = _SCALE if softmax_scale is None else checked_scale(softmax_scale, _SCALE)
        options = (scale, factor, self.key.causal)
        outputs = {"out": out, "lse": lse}
        if out is None:
            given: tuple[Any, ...] = () if lse is None else (lse,)
        else:
            given = (out,) if lse is None else (out, lse)
        if (block_table is None) == (kv_indices is None):
            self._check_form(block_table, kv_indices)
        factors = () if kv_scale is None or factor is not None else (kv_scale,)
        arrays = (q, kv_cache, *factors, block_table if kv_indices is None else kv_indices)
        seen, results = self._known(arrays, given, outputs, options, stream)
        if results is None:
            self._check_form(block_table, kv_indices)
            listed = kv_indices is not None
            pages = {"kv_indices": kv_indices} if listed else {"block_table": block_table}
            inputs = named(q, kv_cache, kv_scale, **pages)
            results = self._run(inputs, outputs, options, stream, seen)
        return AttentionState(*results)

    def _check_lengths(self, host: Host) -> None:
        _check_lengths(host, self.key.total_tokens, self.key.page_size)

    def _check_form(self, block_table: Any, kv_indices: Any) -> None:
        """Check that pages come once, in the form of the last update."""
        if (block_table is None) == (kv_indices is None):
            got = "neither" if block_table is None else "both"
            raise ValueError(
                f"block_table: needs pages as block_table, or as kv_indices after an update with "
                f"kv_indptr, got {got}; pass one form"
            )
        has_list = kv_indices is not None
        if self._has_list is None or has_list == self._has_list:
            return
        name, had, other = (
            ("kv_indices", "without it", "block_table")
            if has_list
            else ("block_table", "with it", "kv_indices")
        )
        update = f"{self._lengths}, kv_indptr=..." if has_list else self._lengths
        raise ValueError(
            f"{name}: needs a plan that was updated {'with' if has_list else 'without'} kv_indptr, "
            f"got one updated {had}; pass {other}, or call plan.update({update})"
        )

    def _load(self, device: int, capturing: Callable[[], bool]) -> None:
        key = self.key
        attend = (attention_spec(key),) if key.cache == "same" else fp8_specs(key)
        for spec in (*SCHEDULE_SPECS, *attend):
            load(spec, device, capturing=capturing)

    def _check_shape(self, arguments: DecodeArguments) -> None:
        key = self.key
        _, page_size, num_kv_heads, _ = arguments.kv_cache.shape
        got = (*arguments.q.shape[:2], num_kv_heads, page_size, arguments.q.dtype)
        made = (key.total_tokens, key.num_heads, key.num_kv_heads, key.page_size, key.dtype)
        if got != made:
            names = "(total_tokens, num_heads, num_kv_heads, page_size, dtype)"
            raise ValueError(
                f"plan: made for {names} {made}, got {got}; make a plan for this shape"
            )
        if cache_of(arguments.kv_cache) != key.cache:
            raise other_cache(arguments.q, arguments.kv_cache)
        _check_batch(arguments.block_table, key.batch)


Shape = tuple[int, int, int, int, int, str]


@lru_cache(maxsize=1024)
def _key_on_device(
    shape: Shape, causal: bool, device: int | None, sm_count: int, cache: str
) -> MLAAttentionKey:
    """Make a key, the same object each time: it keeps what follows from it."""
    key = MLAAttentionKey(*shape, causal, device, sm_count, cache)
    if key.num_places > _MOST_PLACES:
        raise ValueError(
            f"total_tokens: needs fewer query tokens, or heads, than a schedule can hold, got "
            f"{key.total_tokens}; cut the call in two"
        )
    return key


def _key(shape: Shape, causal: bool, device: int | None, cache: str) -> MLAAttentionKey:
    sm_count = 0 if device is None else require_hopper(device).sm_count
    return _key_on_device(shape, causal, device, sm_count, cache)


def _check_batch(pages: ArrayView, batch: int) -> None:
    """Check that a table has a row for each request; a list of pages has none."""
    if len(pages.shape) == 2 and pages.shape[0] != batch:
        raise ValueError(
            f"block_table: needs shape (batch, max_pages) with batch {batch}, got {pages.shape}; "
            f"{_ENTRY}"
        )


def _check_one_form(block_table: Any, kv_indptr: Any, kv_indices: Any) -> None:
    """Check that pages come as a table, or as a list with its offsets."""
    given = {"block_table": block_table, "kv_indptr": kv_indptr, "kv_indices": kv_indices}
    names = [name for name, value in given.items() if value is not None]
    if names in (["block_table"], ["kv_indptr", "kv_indices"]):
        return
    wrong = names[-1] if names else "block_table"
    raise ValueError(
        f"{wrong}: pages need to come as block_table, or as kv_indptr and kv_indices, got "
        f"{' and '.join(names) or 'neither'}; pass one form"
    )


# --- check mode ----------------------------------------------------------------------------------


def _check_lengths(host: Host, total_tokens: int, page_size: int) -> None:
    """Raise for the first offset or length that is out of range."""
    _check_offsets("qo_indptr", host["qo_indptr"], total_tokens, "total_tokens")
    most = np.full(len(host["kv_lens"]), MOST_TOKENS)
    if "kv_indptr" in host:
        _check_offsets("kv_indptr", host["kv_indptr"], (1 << 31) - 1, "the largest int32")
        most = np.minimum(most, np.diff(host["kv_indptr"].astype(np.int64)) * page_size)
    _check_most(host["kv_lens"], most)


def _check_offsets(name: str, offsets: np.ndarray[Any, Any], most: int, what: str) -> None:
    before = np.concatenate([np.zeros(1, offsets.dtype), offsets[:-1]])
    wrong = np.flatnonzero((offsets < before) | (offsets > most))
    if wrong.size:
        i = wrong[0]
        least = f"{name}[{i - 1}] = {before[i]}" if i else "0"
        raise ValueError(
            f"{name}[{i}]: needs a number from {least} to {what} = {most}, got {offsets[i]}; the "
            f"kernels would cut requests, or skip them"
        )


def _check_most(kv_lens: np.ndarray[Any, Any], most: np.ndarray[Any, Any]) -> None:
    wrong = np.flatnonzero((kv_lens < 0) | (kv_lens > most))
    if wrong.size:
        i = wrong[0]
        raise ValueError(
            f"kv_lens[{i}]: needs a length from 0 to {most[i]}, what the request's pages "
            f"hold, got {kv_lens[i]}; the kernels would clamp it"
        )


def _check_pages(host: Host, num_pages: int, page_size: int) -> None:
    """Raise for the first length that the pages do not hold, or used page number out of range."""
    lengths = host["kv_lens"]
    counts = -(-lengths.astype(np.int64) // page_size)
    if "block_table" in host:
        pages = host["block_table"]
        _check_most(lengths, np.full(len(counts), pages.shape[1] * page_size))
        used = [(f"block_table[{r}, ", 0, pages[r, :n]) for r, n in enumerate(counts.tolist())]
    else:
        pages, indptr = host["kv_indices"], host["kv_indptr"]
        if indptr[-1] > len(pages):
            raise ValueError(
                f"kv_indices: needs kv_indptr[-1] = {indptr[-1]} pages, got {len(pages)}; pass the "
                f"whole list"
            )
        begins = indptr[:-1]
        used = [("kv_indices[", a, pages[a : a + n]) for a, n in zip(begins, counts, strict=True)]
    for name, begin, entries in used:
        bad = np.flatnonzero((entries < 0) | (entries >= num_pages))
        if bad.size:
            raise ValueError(
                f"{name}{begin + bad[0]}]: needs a page number from 0 to {num_pages - 1}, got "
                f"{entries[bad[0]]}; the kernels would read zeros for that page"
            )
