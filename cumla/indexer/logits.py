# SPDX-License-Identifier: Apache-2.0
"""The indexer of sparse attention: FP8 logits that tell which tokens to attend to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from cumla import reference
from cumla.core.arrays import ArrayView, Call, from_numpy, open_call, to_numpy
from cumla.core.workspace import PlanMemory, check_plan_device, never_updated, open_plan
from cumla.errors import NotPreparedError
from cumla.indexer.checks import (
    PagedShape,
    PagedViews,
    check_context_lens,
    check_paged_data,
    check_paged_values,
    check_planned_lens,
    check_range_data,
    check_range_values,
    check_shape_numbers,
    checked_logits_dtype,
    checked_number,
    checked_out,
    checked_paged,
    checked_paged_shape,
    checked_prefill,
)
from cumla.launch.device import current_device, properties, require_hopper
from cumla.launch.indexer.mqa_logits import MQALogitsArguments, mqa_logits_spec, prepare_mqa_logits
from cumla.launch.indexer.paged_mqa_logits import (
    PagedMQAArguments,
    paged_mqa_logits_spec,
    prepare_paged_mqa_logits,
)
from cumla.launch.indexer.paged_mqa_schedule import SPECS as SCHEDULE_SPECS
from cumla.launch.indexer.paged_mqa_schedule import (
    PagedMQAKey,
    prepare_paged_mqa_schedule,
    schedule_bytes,
)
from cumla.launch.kernel import ReadyLaunches
from cumla.launch.module import load
from cumla.mla.checks import check_device_number, check_mode, check_number, checked_flag

if TYPE_CHECKING:
    from cumla.launch.kernel import PreparedLaunch
    from cumla.launch.module import LoadedKernel
    from cumla.launch.source import KernelSpec

__all__ = ["PagedMQALogitsPlan", "mqa_logits", "paged_mqa_logits"]

_ready = ReadyLaunches()


def mqa_logits(
    q: Any,
    kv: Any,
    weights: Any,
    ks: Any,
    ke: Any,
    *,
    max_seqlen_k: int = 0,
    logits_dtype: Any = None,
    clean: bool = True,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """Score the tokens of a sequence for each query: the FP8 indexer's logits of a prefill.

    With ``k, scale = kv`` and the sum over the heads h, ``logit[i, j] = scale[j] *
    sum(weights[i, h] * max(q[i, h] @ k[j], 0))`` for the tokens ``ks[i] <= j < ke[i]``, and -inf
    for all others; a product that is NaN counts as 0. Arrays on the GPU are computed by a CUDA
    kernel (compute capability 9.0), which also writes the -inf, on the caller's stream and without
    waiting for it; arrays on the CPU by :func:`cumla.reference.mqa_logits`.

    Parameters
    ----------
    q : array
        ``(seq_len, num_heads, head_dim)`` float8_e4m3fn, or uint8 with its bits, of CuPy, PyTorch,
        JAX or NumPy (ml_dtypes). num_heads is 8, 16, 32 or 64, head_dim 32, 64 or 128. Any strides
        that are multiples of 16 bytes, the last axis contiguous.
    kv : pair of arrays
        The keys ``(seq_len_kv, head_dim)``, as q, and their scales ``(seq_len_kv,)`` float32, of
        any strides. Tokens that no query sees may hold anything, NaN included.
    weights : array
        ``(seq_len, num_heads)`` float32, with q's scale folded in. Any strides.
    ks, ke : array
        ``(seq_len,)`` int32: the first token of each query and the one behind its last, clamped to
        ``[0, seq_len_kv]``. Where ke is not above ks, nothing is visible.
    max_seqlen_k : int
        If not 0, the result is compressed to so many columns: column c of row i is token
        ``ks[i] + c``. What does not fit is left out.
    logits_dtype : optional
        Of the result: ``"float32"`` or ``"bfloat16"``, or a framework's own object for one of them.
        By default that of `out`, or else float32.
    clean : bool
        Write -inf where nothing is visible; otherwise these columns are left as they are, and those
        of a result that is allocated here are undefined.
    out : array, optional
        ``(seq_len, seq_len_kv)`` or ``(seq_len, max_seqlen_k)``, written and returned. The rows
        contiguous, and any distance apart. Of q's framework; JAX's arrays cannot be written to.
    stream : optional
        As in :func:`cumla.mla_decode`.

    Returns
    -------
    array
        The logits, an array of q's framework.

    Raises
    ------
    TypeError
        An argument is of the wrong kind: no array, a tracer, an unknown dtype, or a flag that is
        neither True nor False. As with every error but the last, the message names it, and nothing
        has been launched or written.
    ValueError
        An argument does not fit: its shape, strides, alignment, place or value.
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
    Formula: DeepSeek-V3.2-Exp, "Boosting Long-Context Efficiency with DeepSeek Sparse Attention",
    section 1. The products are summed by the tensor cores, all else in float32: the same call gives
    the same bits.
    """
    dtype = checked_logits_dtype(logits_dtype)
    width = checked_number("max_seqlen_k", max_seqlen_k, "pass 0 for all columns", least=0)
    clean = checked_flag("clean", clean)
    k, k_scale = checked_pair("kv", kv)
    arrays = {"q": q, "kv[0]": k, "kv[1]": k_scale, "weights": weights, "ks": ks, "ke": ke}
    call = open_call(tuple(arrays.items()), (("out", out),), stream=stream)
    key = (call.views, width, dtype, clean, call.stream)
    ready = None if check_mode() else _ready.get(key)
    if ready is not None:
        with call:
            ready()
        return out
    *inputs, out_view = call.views
    views = checked_prefill(cast("list[ArrayView]", inputs))
    seq_len, num_heads, head_dim = views.q.shape
    seq_len_kv = views.k.shape[0]
    shape = (seq_len, width or seq_len_kv)
    dtype = checked_out(out_view, shape, dtype)
    if call.device is None:
        host = _on_host(arrays)
        if check_mode():
            check_range_values({name: host[name] for name in ("ks", "ke")}, seq_len_kv)
        hq, hk, scale, *rest = host.values()
        options = {"max_seqlen_k": width, "logits_dtype": dtype, "clean": clean}
        return _on_cpu(call, reference.mqa_logits, (hq, (hk, scale), *rest), out, options)
    require_hopper(call.device)
    with call:
        check_range_data(call, views)
        kernel = _load(call, mqa_logits_spec(num_heads, head_dim), num_heads, head_dim)
        result = _Output.of(call, shape, dtype, out, out_view)
        launch = prepare_mqa_logits(
            kernel,
            MQALogitsArguments(*views, result.view),
            compressed=width > 0,
            clean=clean,
            stream=call.stream,
        )
        launch()
        if result.given:
            _ready.keep(key, launch)
        return result.export(call)


def paged_mqa_logits(
    q: Any,
    kv_cache: Any,
    weights: Any,
    context_lens: Any,
    block_table: Any,
    *,
    max_context_len: int,
    plan: PagedMQALogitsPlan | None = None,
    logits_dtype: Any = None,
    clean: bool = True,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """Score the cached tokens of each request: the FP8 indexer's logits of a decoding step.

    The formula is that of :func:`mqa_logits`; token ``t`` of request ``b`` lies in page
    ``block_table[b, t // page_size]`` at row ``t % page_size``. Arrays on the GPU are computed by
    CUDA kernels (compute capability 9.0), on the caller's stream and without waiting for it; arrays
    on the CPU by :func:`cumla.reference.paged_mqa_logits`.

    Parameters
    ----------
    q : array
        ``(batch, next_n, num_heads, head_dim)`` float8_e4m3fn, or uint8 with its bits, of CuPy,
        PyTorch, JAX or NumPy (ml_dtypes): the newest tokens of each request, up to 8. num_heads is
        8, 16, 32 or 64, head_dim 32, 64 or 128. Any strides that are multiples of 16 bytes, the
        last axis contiguous.
    kv_cache : array or pair of arrays
        ``(num_pages, page_size, 1, head_dim + 4)`` uint8, or the same without the 1: the bytes of
        a page, which are contiguous, are first the e4m3 keys of its tokens, one behind the other,
        then their float32 scales, as :func:`cumla.append_indexer_cache` writes them. Or keys
        ``(num_pages, page_size, head_dim)``, in a dtype of q's, and scales
        ``(num_pages, page_size)`` float32 as a pair. page_size is 16, 32, 64 or 128; pages may lie
        any multiple of 16 bytes apart. Slots that no query sees may hold anything, NaN included.
    weights : array
        ``(batch * next_n, num_heads)`` float32, with q's scale folded in. Any strides.
    context_lens : array
        ``(batch,)`` int32: cached tokens of each request, the next_n newest included; query i sees
        ``context_lens - (next_n - 1 - i)`` of them. Or ``(batch, next_n)`` int32: how many each
        query sees. What a query sees by that is clamped to ``[0, max_pages * page_size]`` and to
        max_context_len.
    block_table : array
        ``(batch, max_pages)`` int32, rows contiguous. Entries behind a request's last page are
        never used; a page number outside ``[0, num_pages)`` in a used entry counts as the nearest
        that there is.
    max_context_len : int
        Columns of the result.
    plan : PagedMQALogitsPlan, optional
        A schedule made ready by :meth:`PagedMQALogitsPlan.update`; without it one is made in this
        call.
    logits_dtype, clean : optional
        As in :func:`mqa_logits`.
    out : array, optional
        ``(batch * next_n, max_context_len)``, as in :func:`mqa_logits`.
    stream : optional
        As in :func:`cumla.mla_decode`.

    Returns
    -------
    array
        The logits, an array of q's framework: row ``b * next_n + i`` is query i of request b.

    Raises
    ------
    TypeError, UnsupportedDeviceError, MissingDependencyError, CompilationError, CumlaError
        As :func:`mqa_logits`.
    ValueError
        An argument does not fit: its shape, strides, alignment, place or value, or a plan that was
        made for something else or is not ready.
    NotPreparedError
        As :func:`mqa_logits`; without a plan, CuPy would have to allocate its memory, too.

    Notes
    -----
    A CUDA graph holds the addresses of the inputs, of `out` and of the plan's buffer, and keeps
    none of them alive: keep arrays and plan as long as the graph is replayed.
    """
    if plan is not None:
        if not isinstance(plan, PagedMQALogitsPlan):
            raise TypeError(
                f"plan: needs a cumla.PagedMQALogitsPlan, got {type(plan).__qualname__}; make one"
            )
        return plan.run(
            q,
            kv_cache,
            weights,
            context_lens,
            block_table,
            max_context_len=max_context_len,
            logits_dtype=logits_dtype,
            clean=clean,
            out=out,
            stream=stream,
        )
    dtype = checked_logits_dtype(logits_dtype)
    width = checked_number("max_context_len", max_context_len, "there is nothing to write")
    clean = checked_flag("clean", clean)
    arrays = _paged_arrays(q, kv_cache, weights, context_lens, block_table)
    call = open_call(tuple(arrays.items()), (("out", out),), stream=stream)
    *inputs, out_view = call.views
    views = checked_paged(cast("list[ArrayView]", inputs))
    shape = (views.weights.shape[0], width)
    dtype = checked_out(out_view, shape, dtype)
    if call.device is None:
        return _paged_on_cpu(call, arrays, views, None, out, dtype, clean, width)
    key = _key(views.shape, require_hopper(call.device).sm_count)
    with call:
        check_paged_data(call, views, width)
        schedule_kernel = _load_schedule(call)
        kernel = _load_logits(call, views.shape)
        result = _Output.of(call, shape, dtype, out, out_view)
        buffer = call.workspace(schedule_bytes(key))
        schedule = prepare_paged_mqa_schedule(
            schedule_kernel, key, views.context_lens, buffer, call.stream
        )
        launch = _prepare_logits(call, kernel, key, views, buffer, result, clean)
        schedule()
        launch()
        return result.export(call)


class PagedMQALogitsPlan:
    """Schedule of :func:`paged_mqa_logits`, to be used for every layer of a decoding step.

    ``update`` computes on the device, from the lengths there, who works on which part of the cache;
    ``run`` uses that for as many layers as you like. Neither waits for the device or copies to the
    host, and both can be captured into a CUDA graph, which then serves changing lengths; the graph
    holds the address of the plan's buffer, so keep the plan as long as the graph. A plan belongs to
    one stream at a time: the one of its last ``update``. It owns one buffer and no other state on
    the device, and on the CPU nothing but the lengths.

    Parameters
    ----------
    batch, next_n, num_heads, head_dim : int
        As in ``q`` ``(batch, next_n, num_heads, head_dim)``.
    max_pages : int
        Columns of the block table.
    page_size : int
        Tokens of a cache page: 16, 32, 64 or 128.
    per_row_lens : bool
        Whether lengths come as ``(batch, next_n)`` instead of ``(batch,)``.
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
        An argument is of the wrong kind, memory that cannot be written to, or a flag that is
        neither True nor False.
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
    >>> plan = cumla.PagedMQALogitsPlan.from_arrays(                     # doctest: +SKIP
    ...     q, kv_cache, context_lens, block_table)
    >>> plan.update(context_lens)                                        # doctest: +SKIP
    >>> for layer in layers:                                             # doctest: +SKIP
    ...     logits = plan.run(layer.q, layer.kv_cache, layer.weights, context_lens,
    ...                       block_table, max_context_len=32768)
    """

    def __init__(
        self,
        batch: int,
        next_n: int,
        num_heads: int,
        head_dim: int,
        *,
        max_pages: int,
        page_size: int = 64,
        per_row_lens: bool = False,
        device: int | None = None,
        workspace: Any = None,
        like: Any = None,
        stream: Any = None,
    ) -> None:
        sizes = (batch, next_n, num_heads, head_dim, page_size, max_pages)
        self._shape = PagedShape(*sizes, checked_flag("per_row_lens", per_row_lens))
        check_shape_numbers(self._shape)
        check_device_number(device)
        call = open_plan(device, like, workspace, stream)
        self._device = call.device
        self._lengths: np.ndarray[Any, Any] | None = None  # of the last update, on the CPU
        self._memory: PlanMemory | None = None
        if call.device is None:
            return
        self._key = _key(self._shape, require_hopper(call.device).sm_count)
        with call:
            self._memory = PlanMemory(call, schedule_bytes(self._key), workspace)

    @classmethod
    def from_arrays(
        cls,
        q: Any,
        kv_cache: Any,
        context_lens: Any,
        block_table: Any,
        *,
        workspace: Any = None,
        stream: Any = None,
    ) -> PagedMQALogitsPlan:
        """Make a plan for the shapes of these arrays, with a buffer of q's framework.

        Parameters
        ----------
        q, kv_cache, context_lens, block_table : array
            As in :func:`paged_mqa_logits`; only their shapes, dtype and device are looked at.
        workspace, stream
            As for the class.

        Returns
        -------
        PagedMQALogitsPlan

        Raises
        ------
        TypeError, ValueError
            As the class, and where the arrays do not fit together.
        UnsupportedDeviceError, MissingDependencyError, NotPreparedError
            As the class.
        """
        arrays = _paged_arrays(q, kv_cache, None, context_lens, block_table)
        del arrays["weights"]
        call = open_call(tuple(arrays.items()), stream=stream)
        shape = checked_paged_shape(cast("tuple[ArrayView, ...]", call.views))
        with call:
            return cls(
                shape.batch,
                shape.next_n,
                shape.num_heads,
                shape.head_dim,
                max_pages=shape.max_pages,
                page_size=shape.page_size,
                per_row_lens=shape.per_row_lens,
                workspace=workspace,
                like=q,
                stream=stream,
            )

    @staticmethod
    def workspace_bytes(
        batch: int,
        next_n: int,
        num_heads: int,
        head_dim: int,
        *,
        max_pages: int,
        page_size: int = 64,
        per_row_lens: bool = False,
        sm_count: int | None = None,
    ) -> int:
        """Size of a plan's buffer: a pure function of the shape and the GPU's multiprocessors.

        Parameters
        ----------
        batch, next_n, num_heads, head_dim, max_pages, page_size, per_row_lens
            As for the class.
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
            A number does not fit, or per_row_lens is neither True nor False.
        UnsupportedDeviceError, MissingDependencyError
            Without `sm_count`: there is no GPU, or CuPy is missing.
        """
        sizes = (batch, next_n, num_heads, head_dim, page_size, max_pages)
        shape = PagedShape(*sizes, checked_flag("per_row_lens", per_row_lens))
        check_shape_numbers(shape)
        if sm_count is None:
            sm_count = properties(current_device()).sm_count
        check_number("sm_count", sm_count, "leave it out to ask the current GPU")
        return schedule_bytes(_key(shape, sm_count))

    def update(self, context_lens: Any, *, stream: Any = None) -> None:
        """Compute the schedule for these lengths, on the device.

        On another stream than before, that one's work goes first: the new stream waits for it, on
        the device. Only a stream that is being captured does not; let the capture begin when
        earlier work with the plan is done, as ``torch.cuda.graph`` does.

        Parameters
        ----------
        context_lens : array
            As in :func:`paged_mqa_logits`. Read when the stream reaches this call.
        stream : optional
            As in :func:`cumla.mla_decode`, the current stream of the framework of context_lens by
            default. The runs that follow must be on the same one.

        Raises
        ------
        TypeError, ValueError
            context_lens does not fit the plan.
        MissingDependencyError, CompilationError, NotPreparedError, CumlaError
            As :func:`paged_mqa_logits`.
        """
        call = open_call((("context_lens", context_lens),), stream=stream)
        (view,) = cast("tuple[ArrayView]", call.views)
        shape = self._shape
        check_context_lens(view, shape.batch, shape.next_n, shape.per_row_lens)
        check_plan_device(self._device, call)
        memory = self._memory
        if memory is None:
            self._lengths = np.array(to_numpy("context_lens", context_lens))
            return
        with call:
            kernel = _load_schedule(call)
            launch = prepare_paged_mqa_schedule(kernel, self._key, view, memory.buffer, call.stream)
            memory.update(call, launch)

    def run(
        self,
        q: Any,
        kv_cache: Any,
        weights: Any,
        context_lens: Any,
        block_table: Any,
        *,
        max_context_len: int,
        logits_dtype: Any = None,
        clean: bool = True,
        out: Any = None,
        stream: Any = None,
    ) -> Any:
        """Score with the schedule of the last update.

        Parameters
        ----------
        q, kv_cache, weights, context_lens, block_table
            As in :func:`paged_mqa_logits`. context_lens must hold what the plan was last updated
            with: should it have changed since, nothing outside of the arrays is touched, but the
            result is undefined.
        max_context_len, logits_dtype, clean, out, stream
            As in :func:`paged_mqa_logits`.

        Returns
        -------
        array
            The logits.

        Raises
        ------
        TypeError, ValueError
            An argument does not fit; the plan is of another shape, device or stream, was never
            updated, or has lost its workspace to another plan.
        NotPreparedError
            The stream is being captured, and the kernel is not loaded yet or CuPy would have to
            allocate ``out=``.
        CumlaError
            The driver refuses a launch.
        """
        dtype = checked_logits_dtype(logits_dtype)
        width = checked_number("max_context_len", max_context_len, "there is nothing to write")
        clean = checked_flag("clean", clean)
        arrays = _paged_arrays(q, kv_cache, weights, context_lens, block_table)
        call = open_call(tuple(arrays.items()), (("out", out),), stream=stream)
        key = (call.views, width, dtype, clean)
        memory = self._memory
        if memory is not None and call.stream == memory.stream and not check_mode():
            ready = memory.ready.get(key)
            if ready is not None:
                with call:
                    memory.run(call, ready)
                return out
        *inputs, out_view = call.views
        self._check_ready(call)
        views = checked_paged(cast("list[ArrayView]", inputs))
        self._check_shape(views.shape)
        shape = (views.weights.shape[0], width)
        dtype = checked_out(out_view, shape, dtype)
        if memory is None:
            return _paged_on_cpu(call, arrays, views, self._lengths, out, dtype, clean, width)
        with call:
            check_paged_data(call, views, width)
            kernel = _load_logits(call, views.shape)
            result = _Output.of(call, shape, dtype, out, out_view)
            launch = _prepare_logits(call, kernel, self._key, views, memory.buffer, result, clean)
            memory.run(call, launch)
            if result.given:
                memory.ready.keep(key, launch)
            return result.export(call)

    def _check_ready(self, call: Call) -> None:
        """Check that the last update serves a run on the call's stream."""
        check_plan_device(self._device, call)
        if self._memory is not None:
            self._memory.check_serves(call.stream, "context_lens")
        elif self._lengths is None:
            raise never_updated("context_lens")

    def _check_shape(self, shape: PagedShape) -> None:
        if shape != self._shape:
            names = f"({', '.join(PagedShape._fields)})"
            raise ValueError(
                f"plan: made for {names} {tuple(self._shape)}, got {tuple(shape)}; make a plan for "
                f"this shape"
            )


# --- on the GPU -----------------------------------------------------------------------------------


class _Output(NamedTuple):
    """Where the logits go: the caller's array, or a new one of the caller's framework."""

    array: Any
    view: ArrayView
    given: bool

    @classmethod
    def of(
        cls, call: Call, shape: tuple[int, int], dtype: str, out: Any, view: ArrayView | None
    ) -> _Output:
        if view is not None:
            return cls(out, view, True)
        return cls(*call.empty(shape, dtype), False)

    def export(self, call: Call) -> Any:
        return self.array if self.given else call.export(self.array)


def _key(shape: PagedShape, sm_count: int) -> PagedMQAKey:
    return PagedMQAKey(
        shape.batch,
        shape.next_n,
        shape.num_heads,
        shape.head_dim,
        shape.page_size,
        shape.max_pages,
        shape.per_row_lens,
        sm_count,
    )


def _load_schedule(call: Call) -> LoadedKernel:
    assert call.device is not None
    return load(SCHEDULE_SPECS[0], call.device, capturing=lambda: call.capturing)


def _load_logits(call: Call, shape: PagedShape) -> LoadedKernel:
    heads, dim = shape.num_heads, shape.head_dim
    spec = paged_mqa_logits_spec(heads, dim, shape.next_n)
    return _load(call, spec, heads, dim)


def _load(call: Call, spec: KernelSpec, num_heads: int, head_dim: int) -> LoadedKernel:
    assert call.device is not None
    try:
        return load(spec, call.device, capturing=lambda: call.capturing)
    except NotPreparedError as error:
        raise NotPreparedError(
            f"kernel {spec.entry} is not loaded on device {call.device}, and nothing can be "
            f"compiled or loaded while a stream is being captured; call "
            f"cumla.prepare(indexer=[({num_heads}, {head_dim})]) before the capture"
        ) from error


def _prepare_logits(
    call: Call,
    kernel: LoadedKernel,
    key: PagedMQAKey,
    views: PagedViews,
    buffer: ArrayView,
    result: _Output,
    clean: bool,
) -> PreparedLaunch:
    arguments = PagedMQAArguments(*views, buffer, result.view)
    return prepare_paged_mqa_logits(kernel, key, arguments, clean=clean, stream=call.stream)


# --- arguments ------------------------------------------------------------------------------------


def checked_pair(name: str, value: Any) -> tuple[Any, Any]:
    """Return the two of a pair of keys and scales."""
    if not isinstance(value, (tuple, list)):
        raise TypeError(
            f"{name}: needs a pair of arrays, keys and their scales, got "
            f"{type(value).__module__}.{type(value).__qualname__}; pass (k, scale)"
        )
    if len(value) != 2:
        raise ValueError(
            f"{name}: needs a pair of arrays, keys and their scales, got {len(value)}; pass "
            f"(k, scale)"
        )
    return value[0], value[1]


def _paged_arrays(
    q: Any, kv_cache: Any, weights: Any, context_lens: Any, block_table: Any
) -> dict[str, Any]:
    """Name the arrays of a call, in the order of `checked_paged`."""
    cache = {"kv_cache": kv_cache}
    if isinstance(kv_cache, (tuple, list)):
        keys, scales = checked_pair("kv_cache", kv_cache)
        cache = {"kv_cache[0]": keys, "kv_cache[1]": scales}
    rest = {"weights": weights, "context_lens": context_lens, "block_table": block_table}
    return {"q": q, **cache, **rest}


# --- on the CPU -----------------------------------------------------------------------------------


def _paged_on_cpu(
    call: Call,
    arrays: dict[str, Any],
    views: PagedViews,
    planned: np.ndarray[Any, Any] | None,
    out: Any,
    dtype: str,
    clean: bool,
    width: int,
) -> Any:
    """Compute with the lengths of a plan, if there is one."""
    q, *cache, weights, lengths, table = _on_host(arrays).values()
    if check_mode():
        check_paged_values(lengths, table, views.k_cache.shape, width)
        if planned is not None:
            check_planned_lens(lengths, planned)
    kv_cache = tuple(cache) if len(cache) == 2 else cache[0]
    lengths = lengths if planned is None else planned
    options = {"max_context_len": width, "logits_dtype": dtype, "clean": clean}
    inputs = (q, kv_cache, weights, lengths, table)
    return _on_cpu(call, reference.paged_mqa_logits, inputs, out, options)


def _on_host(arrays: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    return {name: to_numpy(name, array) for name, array in arrays.items()}


def _on_cpu(
    call: Call, compute: Any, inputs: tuple[Any, ...], out: Any, options: dict[str, Any]
) -> Any:
    result = compute(*inputs, out=None if out is None else to_numpy("out", out), **options)
    return from_numpy(call.framework, result) if out is None else out
