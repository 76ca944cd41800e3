# SPDX-License-Identifier: Apache-2.0
"""Dense MLA attention over a paged cache: :func:`mla_decode` and its plan."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Never

import numpy as np

from cumla import reference
from cumla.core.arguments import bind, checked_flag, checked_max_kv_len, checked_window
from cumla.core.check_mode import check_mode
from cumla.core.names import arg
from cumla.core.operation import Both, Scheduled
from cumla.core.paged import (
    BLOCK_TABLE,
    KV_LENS,
    Host,
    Schedule,
    check_block_table,
    check_table_lengths,
    refuse_value,
)
from cumla.core.spec import OUT_AND_LSE, Spec, array, flag
from cumla.core.state import AttentionState
from cumla.launch.device import checked_sm_count, sm_count_of
from cumla.launch.mla.choice import (
    attend_launch,
    decode_schedule_launch,
    decode_schedule_spec,
    decode_spec,
)
from cumla.launch.mla.mla_decode import LATENT_COLUMNS, DecodeArguments
from cumla.launch.mla.shape import TREE, MLADecodeKey
from cumla.launch.split.plan import BLOCK_TOKENS, MOST_PARTS
from cumla.mla.arguments import (
    NAMES_OF_PLANS,
    QUERY_AXES,
    Columns,
    cache_of,
    check_taken,
    checked_cache_dtype,
    checked_head_dim,
    checked_mask_form,
    checked_shape,
    named,
    named_width,
    row_width,
    window_of,
)
from cumla.mla.attend import HIDDEN, OPTIONS, Q_AND_CACHE, MLAAttend, MLAPlan, shape_of
from cumla.mla.shape import HEAD_DIM, TAKES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cumla.core.arguments import Views
    from cumla.core.arrays import ArrayView
    from cumla.launch.source import KernelSpec
    from cumla.mla.arguments import Shape
    from cumla.mla.shape import Width

__all__ = ["MLADecodePlan", "mla_decode"]


MLA_DECODE = Spec(
    "mla_decode",
    (
        *Q_AND_CACHE,
        array("block_table"),
        array("kv_lens"),
        *OPTIONS,
        flag("batch_invariant", False),
        *OUT_AND_LSE,
    ),
    positional=4,
    kernels=(
        *("mla_schedule", "mla_decode_", "mla_attention_schedule"),
        *(f"mla_attention_{kind}_" for kind in ("window", "tree", *LATENT_COLUMNS)),  # of windows
    ),
    returns=("out", "lse"),
    result=AttentionState,
    planned=("kv_lens",),
    hidden=HIDDEN,
)


@MLA_DECODE
def mla_decode(
    q: Any,
    kv_cache: Any,
    block_table: Any,
    kv_lens: Any,
    *,
    softmax_scale: float | None = None,
    kv_scale: Any = None,
    q_scale: Any = None,
    fp8_products: bool = False,
    causal: bool = True,
    window: int | Sequence[int | None] | None = None,
    sinks: Any = None,
    tree: Any = None,
    batch_invariant: bool = False,
    out: Any = None,
    lse: Any = None,
    stream: Any = None,
) -> AttentionState:
    """Attend to a paged cache of latent rows: MLA decoding after weight absorption.

    For every query row ``out = softmax(softmax_scale * q @ k.T) @ v``, where ``k`` has all columns
    of the cached rows of visible tokens, and ``v`` the latent ones (576 and 512 in most models).
    Token ``t`` of request ``i`` is in page ``block_table[i, t // page_size]`` at row
    ``t % page_size``. Arrays on the GPU are computed by CUDA kernels (compute capability 9.0), on
    the caller's stream and without waiting for it; arrays on the CPU by
    :func:`cumla.reference.mla_decode`.

    Parameters
    ----------
    q : array or pair of arrays
        ``(batch, q_len, num_heads, 576)`` bfloat16 or float16, of CuPy, PyTorch, JAX or NumPy. A
        tuple ``(q_nope, q_pe)`` holds the 512 latent columns and the 64 RoPE ones apart, in one
        dtype. Any strides that are multiples of 16 bytes, the last axis contiguous: slices of wider
        arrays are read in place. Other numbers of columns are 512 (all latent), 320 and 288 (256
        latent), and 1088 (1024 latent). q and kv_cache have the same number, and out has the latent
        columns. Beside a cache whose 576 columns are all e4m3 under one `kv_scale`, q may be
        float8_e4m3fn, or uint8 with its bits, times `q_scale`, without `sinks`; it is not rounded
        again, and out is bfloat16.
    kv_cache : array, or pair or triple of arrays
        ``(num_pages, page_size, num_kv_heads, 576)``, or ``(num_pages, page_size, 576)`` for one kv
        head, in q's dtype; strides as for q. A tuple ``(ckv, k_pe)`` holds the 512 and the 64
        columns in two arrays, each with its own strides; q may be one array or a tuple in either
        case. num_kv_heads divides num_heads; page_size may be any number. Slots that no request
        uses may hold anything, NaN included.

        FP8 caches, for q in bfloat16 or e4m3 and up to 512 latent columns: either of the above as
        float8_e4m3fn, or uint8 with its bits, under one `kv_scale`. The following forms are for 576
        columns only. A pair of e4m3 latent columns and bfloat16 RoPE columns. A triple
        ``(ckv, k_pe, scales)`` of e4m3, e4m3 or bfloat16, and float32, the last with 4 columns: a
        scale for each token and 128 latent columns. And uint8 with 656 columns, the packed format
        of DeepSeek-V3.2: 512 e4m3, 4 float32 scales, 64 bfloat16. :func:`cumla.append_mla_cache`
        writes all of these but triples with e4m3 RoPE columns. Arrays may be broadcast, such as
        scales that are the same for all tokens: strides of 0.
    block_table : array
        ``(batch, max_pages)`` int32, rows contiguous. Entries after a request's last page are not
        read. A used entry outside of ``[0, num_pages)`` reads as zeros.
    kv_lens : array
        ``(batch,)`` int32: cached tokens of each request, the q_len newest included. Clamped to
        ``[0, max_pages * page_size]``.
    softmax_scale : float, optional
        Factor of the scores. The default, columns ** -0.5 of q, is right for DeepSeek-V4 only. Pass
        the model's, from its un-absorbed head dimension: 192 ** -0.5 for DeepSeek-V3, times YaRN's
        factor.
    kv_scale : float or array, optional
        Factor of e4m3 columns without scales of their own: all of them, the latent ones beside RoPE
        columns in bfloat16, or the e4m3 RoPE columns of a triple. One float32 in an array is read
        by the kernel, and may change between the replays of a graph. 1 by default.
    q_scale : float or array, optional
        Factor of queries in float8_e4m3fn, as `kv_scale` for e4m3 columns. 1 by default.
    fp8_products : bool
        Permit FP8 tensor-core math over an FP8 cache: faster with many heads, less exact (see the
        notes). It has an effect with 576 columns, latent columns in e4m3 under one `kv_scale`, and
        a multiple of 64 query heads per kv head. Other FP8 caches, widths and numbers of heads give
        the same bits as without it. Refused with a 16-bit cache.
    causal : bool
        Query i of q_len sees ``kv_lens - (q_len - 1 - i)`` tokens; all of them if False.
    window : int or pair of int, optional
        left, or (left, right), both inclusive: the tokens that query i sees before and after its
        own, token ``kv_lens - q_len + i``. -1 or None is unbounded, and so is a side that is not
        given; with `causal`, right has no effect. A sliding window of W tokens is left = W - 1.
        Pages before all windows may be freed: their entries of block_table may hold anything. For
        16-bit caches; with `batch_invariant` by :func:`cumla.mla_attention`.
    sinks : array, optional
        ``(num_heads,)`` float32, contiguous: a score per head that takes part in every sum of
        weights and has no value. It is not multiplied by softmax_scale, and lse includes it.
    tree : array, optional
        ``(query tokens, words)`` uint32 or int32, contiguous, 1 to 8 words: for queries that are a
        tree of drafts, as ``AttentionMask.from_tree(...).tree`` has it. Draft j of the request is
        visible to a query if bit j of its words is set; all tokens before the drafts are visible.
        `causal` has no effect, and `window` is refused. Tokens that only some queries of a request
        see must be finite. For 16-bit caches.
    batch_invariant : bool
        Give a request the same bits in any batch, at any place of it. Requests are then split at
        fixed positions, which takes longer than splits that fill the GPU. The workspace is sized
        for the longest request that block_table can hold: pass no more columns than needed, or make
        a plan.
    out, lse : array, optional
        ``(batch, q_len, num_heads, 512)`` in q's dtype (bfloat16 for e4m3) or float32, and
        ``(batch, q_len, num_heads)`` float32, written and returned. Of q's framework; JAX's arrays
        cannot be written to.
    stream : optional
        A CUDA stream: an integer handle, or a stream object of CuPy, PyTorch or cuda.core. By
        default the current stream of q's framework (CuPy's for JAX). On another stream, keep arrays
        of CuPy and PyTorch alive until the work is done: their allocators do not track that stream.

    Returns
    -------
    AttentionState
        ``out`` ``(batch, q_len, num_heads, 512)`` and ``lse`` ``(batch, q_len, num_heads)``
        float32: the natural logarithm of the sum of ``exp(softmax_scale * q.k)`` and, with sinks,
        of ``exp(sink)``. Where nothing is visible out is 0 and lse -inf or, with sinks, the sink.
        Arrays of q's framework.

    Raises
    ------
    TypeError
        An argument is of the wrong kind: no array, an unknown dtype, or a flag that is neither
        True nor False. As with every error but the last, the message names it, and nothing
        has been launched or written.
    ValueError
        An argument does not fit: its shape, strides, alignment, place or value; an output shares
        memory with another array.
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

    Scales of an FP8 cache multiply scores and weights in float32, before weights are rounded to 16
    bits, so they need not be powers of two. An FP8 cache saves time with few query heads. With many
    it takes longer, because it is converted once for every 32 query rows.

    Products in FP8 round what is multiplied by e4m3 columns to e4m3 as well, with 3 bits of
    mantissa. A query row, the 576 columns of one head and token, is divided by a power of two
    first. Softmax weights are rounded relative to a number within 2 ** 9 of the largest so far;
    weights below 2 ** -14 of the largest of their row may become 0. Products are accumulated with
    some 14 bits within a block of 64 tokens, and in float32 over all blocks. The lse is that of the
    rounded weights. An infinity in a query row makes its results NaN. The definition,
    :func:`cumla.reference.mla_decode`, and calls on the CPU stay exact.

    There are no gradients: PyTorch's autograd does not record the call, and tensors that require
    gradients are refused.

    A CUDA graph holds the addresses of the inputs, the outputs and the plan's buffer, and keeps
    none of them alive: keep arrays and plan as long as the graph is replayed.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> q, kv_cache = np.ones((1, 1, 16, 576), np.float16), np.ones((4, 64, 576), np.float16)
    >>> block_table, kv_lens = np.array([[2, 0]], np.int32), np.array([100], np.int32)
    >>> cumla.mla_decode(q, kv_cache, block_table, kv_lens).out.shape
    (1, 1, 16, 512)
    """
    state: AttentionState = _DECODE.call(
        *(q, kv_cache, block_table, kv_lens, softmax_scale, kv_scale, q_scale, fp8_products),
        *(causal, window, sinks, tree, batch_invariant, out, lse, stream),
    )
    return state


class _Attend(MLAAttend[MLADecodeKey]):
    trusted = ("block_table",)

    def pages(self, views: Views, columns: Columns) -> ArrayView:
        bind({"block_table": BLOCK_TABLE}, views, {"batch": columns.q.shape[0]})
        table = views["block_table"]
        assert table is not None
        return table

    def check_values(self, host: Host, arguments: DecodeArguments) -> None:
        lengths, table = host["kv_lens"], host["block_table"]
        num_pages, page_size = arguments.kv_cache.shape[:2]
        check_table_lengths(lengths, table, page_size)
        first = self.first_seen(host, arguments)
        check_block_table(table, lengths, num_pages, page_size, first=first)


class _Decode(Scheduled[DecodeArguments, MLADecodeKey]):
    def batch(self, attend: DecodeArguments, views: Views) -> int:
        return attend.q.shape[0]

    def arguments(self, views: Views, options: Any) -> Both[DecodeArguments]:
        found = super().arguments(views, options)
        width = row_width(found.attend.q, found.attend.q_rope)
        _check_cuts(found.attend.window, options.batch_invariant, width)
        return found

    def key(self, arguments: Both[DecodeArguments], device: int) -> MLADecodeKey:
        _, attend, options = arguments
        blocks = 0
        if options.batch_invariant:  # of the longest request that the block table can name
            blocks = -(-attend.block_table.shape[1] * attend.kv_cache.shape[1] // BLOCK_TOKENS)
        cache, width = cache_of(attend.kv_cache), row_width(attend.q, attend.q_rope)
        modes = (options.batch_invariant, blocks, None, cache, attend.window, width)
        shape = shape_of(attend.q, attend.kv_cache)
        return _key(shape, attend.causal, device, sm_count_of(device), *modes)


_SCHEDULE = Schedule[MLADecodeKey]({"kv_lens": KV_LENS}, decode_schedule_launch)
_ATTEND = _Attend(QUERY_AXES, attend_launch, reference.mla_decode)
_DECODE = _Decode(_SCHEDULE, _ATTEND, MLA_DECODE)


class MLADecodePlan(MLAPlan[MLADecodeKey]):
    """Schedule and workspace of :func:`mla_decode`, to be used for every layer of a decoding step.

    ``update`` computes the schedule on the device, from the lengths there: which thread block reads
    which tokens. ``run`` uses it for any number of layers. Neither waits for the device or copies
    to the host. Both can be captured into a CUDA graph, which then serves changing lengths. The
    graph holds the address of the plan's buffer, so keep the plan as long as the graph. One update
    serves later runs on any stream, captured runs included. A plan belongs to one thread at a time.
    A captured update takes effect when the graph is replayed; before eager runs, call update
    eagerly. On the device a plan owns one buffer and no other state, on the CPU only the lengths.

    Parameters
    ----------
    batch, q_len, num_heads : int
        As in ``q`` ``(batch, q_len, num_heads, 576)``.
    num_kv_heads : int
        Divides num_heads.
    page_size : int
        Tokens of a cache page: any number from 1.
    head_dim : int
        Columns of q and of a cache row: 576, 512, 320, 288 or 1088, as in :func:`mla_decode`.
    dtype : str or dtype
        ``"bfloat16"`` or ``"float16"``, or any framework's dtype of that name: of q, and of
        kv_cache unless `cache_dtype` says otherwise.
    cache_dtype : str or dtype, optional
        ``"float8_e4m3fn"`` for FP8 caches in any form, with dtype bfloat16; dtype by default.
    causal, window
        As in :func:`mla_decode`.
    mask_form : str, optional
        ``"tree"`` for runs with a `tree`; None for runs without.
    batch_invariant : bool
        As in :func:`mla_decode`; it needs `max_kv_len`.
    max_kv_len : int, optional
        With `batch_invariant`, and only then: tokens of the longest request that the plan is to
        serve. The buffer grows with it, and slightly the time. Longer requests are truncated at the
        next multiple of 64 tokens. It does not change the bits of others.
    device : int, optional
        CUDA ordinal; by default that of `like` or `workspace`, else CuPy's current device.
    workspace : array, optional
        The buffer: uint8, contiguous, at least :meth:`workspace_bytes` long, 256-byte aligned, on
        the GPU, of CuPy or PyTorch. Plans may share a buffer: after an ``update`` of one plan, the
        others must be updated again before they run.
    like : array, optional
        An array of the framework and on the device for the buffer; CuPy by default. An array on the
        CPU makes a plan for the CPU. Its dtype is ignored; pass ``dtype``.
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
    >>> import numpy as np, cumla
    >>> q, kv_cache = np.ones((2, 1, 16, 576), np.float16), np.ones((4, 64, 576), np.float16)
    >>> block_table = np.array([[0, 1], [2, 3]], np.int32)
    >>> plan = cumla.MLADecodePlan.from_arrays(q, kv_cache)
    >>> plan.update(np.array([100, 7], np.int32))
    >>> for layer in range(3):
    ...     out, lse = plan.run(q, kv_cache, block_table=block_table)
    >>> out.shape, lse.shape
    ((2, 1, 16, 512), (2, 1, 16))
    """

    _operation = _DECODE
    _axes = QUERY_AXES
    _lengths = "kv_lens"
    _variant: str | None = None  # pins the kernel that attends, in tools that compare them

    def __init__(
        self,
        batch: int,
        q_len: int,
        num_heads: int,
        *,
        num_kv_heads: int = 1,
        page_size: int = BLOCK_TOKENS,
        head_dim: int = HEAD_DIM,
        dtype: Any = "bfloat16",
        cache_dtype: Any = None,
        causal: bool = True,
        window: int | Sequence[int | None] | None = None,
        mask_form: str | None = None,
        batch_invariant: bool = False,
        max_kv_len: int | None = None,
        device: int | None = None,
        workspace: Any = None,
        like: Any = None,
        stream: Any = None,
    ) -> None:
        numbers = {"batch": batch, "q_len": q_len}
        shape = checked_shape(numbers, num_heads, num_kv_heads, page_size, dtype)
        causal = checked_flag("causal", causal)
        batch_invariant = checked_flag("batch_invariant", batch_invariant)
        max_blocks = -(-checked_max_kv_len(batch_invariant, max_kv_len) // BLOCK_TOKENS)
        cache = checked_cache_dtype(cache_dtype, dtype)
        sides = window_of(checked_window("window", window), causal, cache)
        if checked_mask_form(mask_form, sides, cache):
            sides, causal = TREE, False
        width = checked_head_dim(head_dim)
        check_taken(width, cache, sides == TREE, NAMES_OF_PLANS)
        _check_cuts(sides, batch_invariant, width)
        modes = (batch_invariant, max_blocks, self._variant, cache, sides, width)
        place = (device, workspace, like, stream)
        self._make(lambda on: _key(shape, causal, on, sm_count_of(on), *modes), *place)

    @classmethod
    def from_arrays(
        cls,
        q: Any,
        kv_cache: Any,
        *,
        causal: bool = True,
        window: int | Sequence[int | None] | None = None,
        mask_form: str | None = None,
        batch_invariant: bool = False,
        max_kv_len: int | None = None,
        workspace: Any = None,
        stream: Any = None,
    ) -> MLADecodePlan:
        """Make a plan for the shapes of q and kv_cache, with a buffer of q's framework.

        Errors are those of the class, and of a q and a kv_cache that do not fit together.

        Parameters
        ----------
        q, kv_cache : array
            As in :func:`mla_decode`; only their shapes, dtype and device are looked at.
        causal, window, mask_form, batch_invariant, max_kv_len, workspace, stream
            As for the class.
        """
        options: dict[str, Any] = {"causal": causal, "window": window, "mask_form": mask_form}
        options |= {"workspace": workspace, "max_kv_len": max_kv_len}
        arrays = named(q, kv_cache, None)
        return cls._from(arrays, stream, batch_invariant=batch_invariant, **options)

    @staticmethod
    def workspace_bytes(
        batch: int,
        q_len: int,
        num_heads: int,
        *,
        num_kv_heads: int = 1,
        head_dim: int = HEAD_DIM,
        cache_dtype: Any = None,
        window: int | Sequence[int | None] | None = None,
        mask_form: str | None = None,
        batch_invariant: bool = False,
        max_kv_len: int | None = None,
        sm_count: int | None = None,
    ) -> int:
        """Size of a plan's buffer in bytes, from the shape and the GPU's multiprocessors alone.

        Parameters
        ----------
        batch, q_len, num_heads, num_kv_heads, head_dim, cache_dtype, window, mask_form, \
batch_invariant, max_kv_len
            As for the class. bfloat16 and float16 need the same size.
        sm_count : int, optional
            Multiprocessors of the GPU that the plan is for; with it no GPU is needed. By default
            CuPy's current device is asked.

        Raises
        ------
        TypeError, ValueError
            A number does not fit, or batch_invariant is neither True nor False.
        UnsupportedDeviceError, MissingDependencyError
            Without `sm_count`: there is no GPU, or CuPy is missing.
        """
        shape = checked_shape({"batch": batch, "q_len": q_len}, num_heads, num_kv_heads)
        cache = checked_cache_dtype(cache_dtype)
        batch_invariant = checked_flag("batch_invariant", batch_invariant)
        max_blocks = -(-checked_max_kv_len(batch_invariant, max_kv_len) // BLOCK_TOKENS)
        sm_count, given = checked_sm_count(sm_count), checked_window("window", window)
        width = checked_head_dim(head_dim)

        def nbytes(causal: bool) -> int:
            sides = window_of(given, causal, cache)
            if checked_mask_form(mask_form, sides, cache):
                sides = TREE
            check_taken(width, cache, sides == TREE, NAMES_OF_PLANS)
            _check_cuts(sides, batch_invariant, width)
            modes = (batch_invariant, max_blocks, None, cache, sides, width)
            return _key(shape, False, 0, sm_count, *modes).layout.nbytes

        return max(nbytes(causal) for causal in (True, False))

    def update(self, kv_lens: Any, *, stream: Any = None, **misplaced: Never) -> None:
        """Compute the schedule for these lengths, on the device.

        On another stream than before, the new stream first waits for the old one, on the device. A
        stream that is being captured does not wait: begin the capture when earlier work with the
        plan is done, as ``torch.cuda.graph`` does.

        Parameters
        ----------
        kv_lens : array
            ``(batch,)`` int32, as in :func:`mla_decode`. Read when the stream reaches this call.
        stream : optional
            As in :func:`mla_decode`, the current stream of the framework of kv_lens by default.

        Raises
        ------
        TypeError, ValueError
            kv_lens does not fit the plan.
        CumlaError
            As :func:`mla_decode`. All kernels of the plan are loaded here, except these, which the
            first run loads: kernels with sinks, those for e4m3 queries and, if pages are whole
            64-token blocks, those for a 16-bit cache in two arrays and for a broadcast FP8 cache.
        """
        if misplaced:
            raise self._misplaced("update", misplaced)
        self._renew(kv_lens, stream)
        if self._values is not None and self.key.batch_invariant:
            lengths, most = self._values["kv_lens"], self.key.max_blocks * BLOCK_TOKENS
            if check_mode():
                held = f"the plan's max_kv_len in whole blocks of {BLOCK_TOKENS}"
                need = f"a length up to {most}, {held}"
                way_out = "make a plan with a larger max_kv_len"
                refuse_value("kv_lens", lengths, lengths > most, need, way_out)
            self._values["kv_lens"] = np.minimum(lengths, most)

    def run(
        self,
        q: Any,
        kv_cache: Any,
        *,
        block_table: Any,
        softmax_scale: float | None = None,
        kv_scale: Any = None,
        q_scale: Any = None,
        fp8_products: bool = False,
        sinks: Any = None,
        tree: Any = None,
        out: Any = None,
        lse: Any = None,
        stream: Any = None,
        **misplaced: Never,
    ) -> AttentionState:
        """Attend with the schedule of the last update, and with the lengths it was given.

        Parameters
        ----------
        q, kv_cache, block_table, softmax_scale, kv_scale, q_scale, fp8_products, sinks, tree, \
out, lse, stream
            As in :func:`mla_decode`. Lengths that have changed since the update are ignored; with
            ``CUMLA_CHECK=1`` the call is refused.

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
        if misplaced:
            raise self._misplaced("run", misplaced)
        state: AttentionState = self._call(
            *(q, kv_cache, block_table, softmax_scale, kv_scale, q_scale, fp8_products, sinks),
            *(tree, out, lse, stream),
        )
        return state

    def _specs(self) -> tuple[KernelSpec, ...]:
        return decode_schedule_spec(self.key), decode_spec(self.key)


def _check_cuts(window: tuple[int, int] | None, batch_invariant: bool, width: Width) -> None:
    """Refuse cuts at fixed positions beside a window, or of rows that no kernel cuts so."""
    if batch_invariant and not TAKES[width[0]].fixed_cuts:
        most = max(latent for latent, takes in TAKES.items() if takes.fixed_cuts)
        raise ValueError(
            f"{arg('batch_invariant')}: needs rows of at most {most} latent columns, got "
            f"{named_width(width)}; leave it out, or call mla_attention, which takes both"
        )
    if window == TREE and batch_invariant:
        raise ValueError(
            f"{arg('batch_invariant')}: needs no {arg('tree')}, got one; leave one of them out, or "
            f"call mla_attention, which takes both"
        )
    if window is not None and batch_invariant:
        raise ValueError(
            f"{arg('batch_invariant')}: needs {arg('window')} None, got {window}; leave one of "
            f"them out, or call mla_attention, which takes both"
        )


@lru_cache(maxsize=1024)
def _key(
    shape: Shape, causal: bool, device: int | None, sm_count: int, *modes: Any
) -> MLADecodeKey:
    """Make a key, the same object each time: it keeps what follows from it."""
    key = MLADecodeKey(*shape, causal and shape[1] > 1, device, sm_count, *modes)
    if key.batch_invariant and key.parts > MOST_PARTS:
        raise ValueError(
            f"{arg('batch_invariant')}: needs at most {MOST_PARTS} pieces of requests, got "
            f"{key.parts}: {key.batch} requests of up to {key.max_blocks * BLOCK_TOKENS} tokens, "
            f"cut every {key.piece_blocks * BLOCK_TOKENS}; lower a plan's max_kv_len, "
            f"pass fewer columns of {arg('block_table')}, or fewer requests at once"
        )
    return key
