# SPDX-License-Identifier: Apache-2.0
"""Dense MLA attention over queries of different lengths: :func:`mla_attention` and its plan."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Never

from cumla import reference
from cumla.core.arguments import checked_flag, checked_max_kv_len, checked_window
from cumla.core.names import arg
from cumla.core.operation import Both, Scheduled
from cumla.core.paged import (
    RAGGED_LENGTHS,
    TableOrList,
    by_head,
    check_one_form,
    check_ragged_lengths,
    check_ragged_pages,
    check_rows,
    checked_pages,
)
from cumla.core.prefixes import (
    PrefixSchedule,
    check_groups_given,
    check_prefix_arrays,
    check_prefix_options,
    check_shared_pages,
    checked_max_pages,
    has_whole_groups,
)
from cumla.core.spec import OUT_AND_LSE, Spec, array, flag, in_parts, optional
from cumla.core.state import AttentionState
from cumla.launch.device import checked_sm_count, sm_count_of
from cumla.launch.mla.mla_attention import attention_launch, attention_spec
from cumla.launch.mla.mla_decode import DecodeArguments
from cumla.launch.mla.prefixes import (
    PREFIX_SPECS,
    prefix_attention_launches,
    prefix_schedule_launches,
)
from cumla.launch.mla.shape import TREE, MLAAttentionKey
from cumla.launch.split.invariant_parts import SPECS as INVARIANT_SPECS
from cumla.launch.split.invariant_parts import invariant_parts_launch
from cumla.launch.split.plan import BLOCK_TOKENS, MOST_PARTS, MOST_TOKENS
from cumla.launch.split.ragged_schedule import SPEC as SCHEDULE_SPEC
from cumla.launch.split.ragged_schedule import ragged_schedule_launch
from cumla.mla.arguments import (
    NAMES_OF_PLANS,
    Columns,
    cache_of,
    check_taken,
    checked_cache_dtype,
    checked_head_dim,
    checked_mask_form,
    checked_shape,
    named,
    row_width,
    window_of,
)
from cumla.mla.attend import HIDDEN, OPTIONS, Q_AND_CACHE, MLAAttend, MLAPlan, shape_of
from cumla.mla.decode import mla_decode
from cumla.mla.shape import HEAD_DIM, WIDTH

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from cumla.core.arguments import Views
    from cumla.core.arrays import ArrayView
    from cumla.core.operation import Launchable
    from cumla.core.paged import Host
    from cumla.launch.source import KernelSpec
    from cumla.mla.arguments import Shape
    from cumla.mla.shape import Width
    from cumla.prefix_groups import PrefixGroups

__all__ = ["MLAAttentionPlan", "mla_attention"]

_AXES = ("total_tokens", "num_heads")  # of q, before its columns
_MOST_PLACES = (1 << 31) - 1  # row tiles that a schedule can number


MLA_ATTENTION = Spec(
    "mla_attention",
    (
        *Q_AND_CACHE,
        array("kv_lens"),
        optional("qo_indptr"),
        optional("block_table"),
        optional("kv_indptr"),
        optional("kv_indices"),
        optional("groups", in_parts("groups", "prefix lengths")),
        *OPTIONS,
        flag("batch_invariant", False),
        *OUT_AND_LSE,
    ),
    positional=2,
    kernels=(
        "mla_attention_",
        "mla_decode_halves_",
        "invariant_parts",
        "prefix_requests",
        "combine_prefixes",
    ),
    returns=("out", "lse"),
    result=AttentionState,
    planned=("kv_lens", "qo_indptr", "kv_indptr", "groups"),
    hidden=HIDDEN,
)


@MLA_ATTENTION
def mla_attention(
    q: Any,
    kv_cache: Any,
    *,
    kv_lens: Any,
    qo_indptr: Any = None,
    block_table: Any = None,
    kv_indptr: Any = None,
    kv_indices: Any = None,
    groups: PrefixGroups | None = None,
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
    """Attend to a paged cache of latent rows from queries of different lengths.

    The formula is that of :func:`cumla.mla_decode`. The query tokens of request r are the rows of q
    from ``qo_indptr[r]`` to ``qo_indptr[r + 1]``, any number of them: one call may contain
    decoding, the verification of drafts and chunks of a prefill. Arrays on the GPU are computed as
    by :func:`cumla.mla_decode`, arrays on the CPU by :func:`cumla.reference.mla_attention`.

    Parameters
    ----------
    q : array or pair of arrays
        ``(total_tokens, num_heads, 576)`` bfloat16 or float16, of CuPy, PyTorch, JAX or NumPy. A
        tuple ``(q_nope, q_pe)``, strides, and other columns, as in :func:`cumla.mla_decode`. Or,
        without qo_indptr, ``(batch, q_len, num_heads, 576)`` with a block_table: that is
        :func:`cumla.mla_decode`, its shapes and its kernels, which ``cumla.prepare(mla_decode)``
        loads.
    kv_cache : array, or pair or triple of arrays
        ``(num_pages, page_size, num_kv_heads, 576)``, or without num_kv_heads, or a tuple
        ``(ckv, k_pe)``: as in :func:`cumla.mla_decode`, FP8 caches included.
    kv_lens : array
        ``(batch,)`` int32: cached tokens of each request, those of its queries included. Clamped to
        what the pages of the request hold.
    qo_indptr : array, optional
        ``(batch + 1,)`` int32, needed for q of three axes: where the query tokens of each request
        begin in q, and where the last ones end. The numbers must be non-decreasing. Rows before the
        first and from the last on belong to no request; no results are written for them.
    block_table : array, optional
        ``(batch, max_pages)`` int32, rows contiguous, as in :func:`cumla.mla_decode`.
    kv_indptr, kv_indices : array, optional
        In place of block_table: the pages of request r are ``kv_indices[kv_indptr[r] :
        kv_indptr[r + 1]]``. ``(batch + 1,)`` int32, non-decreasing, and ``(pages,)``
        int32, contiguous, as long as ``kv_indptr[-1]`` at least.
    groups : PrefixGroups, optional
        Neighbouring requests whose pages begin alike, as in :func:`cumla.attention`. They save time
        with up to 32 query heads; with more, the arithmetic takes as long as reading the cache.
    causal : bool
        Query i of n of a request sees ``kv_lens - (n - 1 - i)`` of its tokens; all of them if
        False.
    softmax_scale, kv_scale, q_scale, fp8_products, window, sinks, tree, stream : optional
        As in :func:`cumla.mla_decode`.
    batch_invariant : bool
        Give each request the same bits in any batch. Requests of up to 8 query tokens are split at
        fixed positions; longer ones are not split. Therefore a token may have other bits in a call
        with up to 8 tokens of its request than in a call with more.
    out, lse : array, optional
        ``(total_tokens, num_heads, 512)`` in q's dtype or float32, and ``(total_tokens,
        num_heads)`` float32, written and returned, as in :func:`cumla.mla_decode`.

    Returns
    -------
    AttentionState
        ``out`` and ``lse`` as :func:`cumla.mla_decode` returns them, in the shapes above. New
        arrays hold undefined values in rows of no request.

    Raises
    ------
    TypeError, ValueError, CumlaError
        As :func:`cumla.mla_decode`; pages in both forms or in none.

    Notes
    -----
    Offsets and page numbers are not checked, except with ``CUMLA_CHECK=1``.

    The notes of :func:`cumla.mla_decode` on CUDA graphs apply. A call without ``qo_indptr`` has the
    kernels of that function, so before a capture of one prepare ``cumla.mla_decode`` as well.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> q, kv_cache = np.ones((5, 16, 576), np.float16), np.ones((4, 64, 576), np.float16)
    >>> table, lens, qo_indptr = np.int32([[0, 1], [2, 3]]), np.int32([100, 7]), np.int32([0, 1, 5])
    >>> lengths = {"kv_lens": lens, "qo_indptr": qo_indptr}
    >>> cumla.mla_attention(q, kv_cache, **lengths, block_table=table).out.shape
    (5, 16, 512)
    """
    if qo_indptr is None:
        lists = {"kv_indptr": kv_indptr, "kv_indices": kv_indices, "groups": groups}
        _check_batch(q, block_table, lists)
        return mla_decode(
            *(q, kv_cache, block_table, kv_lens),
            softmax_scale=softmax_scale,
            kv_scale=kv_scale,
            q_scale=q_scale,
            fp8_products=fp8_products,
            causal=causal,
            window=window,
            sinks=sinks,
            tree=tree,
            batch_invariant=batch_invariant,
            out=out,
            lse=lse,
            stream=stream,
        )
    state: AttentionState = _ATTENTION.call(
        *(q, kv_cache, kv_lens, qo_indptr, block_table, kv_indptr, kv_indices, groups),
        *(softmax_scale, kv_scale, q_scale, fp8_products, causal, window, sinks, tree),
        *(batch_invariant, out, lse, stream),
    )
    return state


def _check_batch(q: Any, block_table: Any, given: dict[str, Any]) -> None:
    """Check what a call without offsets has: an axis of requests, and a block table."""
    parts = q if isinstance(q, tuple | list) else (q,)
    axes = {len(part.shape) for part in parts if hasattr(part, "shape")}
    if axes == {3}:
        raise ValueError(
            f"{arg('qo_indptr')}: needs offsets of the requests for {arg('q')} of three axes, got "
            f"None; pass it, or {arg('q')} as (batch, q_len, ...)"
        )
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{arg(name)}: needs {arg('q')} of three axes with {arg('qo_indptr')}, got "
                f"{arg('q')} of four; leave it out, and pass {arg('block_table')}"
            )
    if block_table is None:
        raise ValueError(
            f"{arg('block_table')}: needs page numbers as {arg('block_table')}, or, with "
            f"{arg('qo_indptr')}, as {arg('kv_indptr')} and {arg('kv_indices')}, got neither; pass "
            f"one form"
        )


class _Attend(MLAAttend[MLAAttentionKey]):
    trusted = ("block_table", "kv_indices")

    def pages(self, views: Views, columns: Columns) -> ArrayView:
        return checked_pages(views)

    def check_values(self, host: Host, arguments: DecodeArguments) -> None:
        num_pages, page_size = arguments.kv_cache.shape[:2]
        check_shared_pages(host, page_size, arguments.q.shape[0])
        check_ragged_lengths(host, arguments.q.shape[0], page_size, MOST_TOKENS)
        check_ragged_pages(host, num_pages, page_size, self.first_seen(host, arguments))

    def recipe(
        self, key: Any, arguments: DecodeArguments, outs: Sequence[ArrayView], buffer: int
    ) -> Sequence[Launchable]:
        """Describe one launch, or several for shared prefixes."""
        if key.max_pages and key.batch and 0 not in arguments.q.shape:
            out, lse = outs
            return prefix_attention_launches(key, buffer, arguments, out, by_head(lse))
        return super().recipe(key, arguments, outs, buffer)


class _Attention(Scheduled[DecodeArguments, MLAAttentionKey]):
    def batch(self, attend: DecodeArguments, views: Views) -> None:
        return None  # as qo_indptr says

    def arguments(self, views: Views, options: Any) -> Both[DecodeArguments]:
        check_one_form(views)
        found = super().arguments(views, options)
        kv_lens = found.lengths[1]
        check_rows(found.attend.block_table, kv_lens.shape[0])
        if has_whole_groups([name for name, view in views.items() if view is not None]):
            masked = found.attend.tree is not None
            check_prefix_options(options.window, masked, "tree")
            check_prefix_arrays(found.attend.q, found.attend.block_table, None)
        return found

    def key(self, arguments: Both[DecodeArguments], device: int) -> MLAAttentionKey:
        (_, kv_lens, _, groups, _), attend, options = arguments
        shape = (kv_lens.shape[0], *shape_of(attend.q, attend.kv_cache))
        cache, most, together = cache_of(attend.kv_cache), 0, None
        if options.batch_invariant:  # as many tokens as the pages hold
            pages = attend.block_table
            most = pages.shape[-1] * attend.kv_cache.shape[1]
            together = most if len(pages.shape) == 1 else None
        on = device, sm_count_of(device)
        is_shared = groups is not None and not options.batch_invariant
        columns = attend.block_table.shape[1] if is_shared else 0
        width = row_width(attend.q, attend.q_rope)
        modes = cache, attend.window, most, together, columns, width
        return _key(shape, attend.causal, *on, *modes)


_SCHEDULE = PrefixSchedule[MLAAttentionKey](
    RAGGED_LENGTHS, ragged_schedule_launch, invariant_parts_launch, prefix_schedule_launches
)
_ATTEND = _Attend(_AXES, attention_launch, reference.mla_attention)
_ATTENTION = _Attention(_SCHEDULE, _ATTEND, MLA_ATTENTION)


class MLAAttentionPlan(TableOrList[MLAAttentionKey], MLAPlan[MLAAttentionKey]):
    """Schedule and workspace of :func:`mla_attention`, to be used for every layer of a step.

    It works like :class:`cumla.MLADecodePlan`, with the same rules for buffers, streams, threads,
    CUDA graphs and errors. A graph serves any mix of up to `batch` requests and `total_tokens`
    query tokens: absent requests have equal offsets, and rows from the last offset on belong to no
    request.

    Parameters
    ----------
    batch : int
        Requests: entries of ``kv_lens``.
    total_tokens, num_heads : int
        As in ``q`` ``(total_tokens, num_heads, 576)``.
    num_kv_heads, page_size, head_dim, dtype, cache_dtype : optional
        As for :class:`cumla.MLADecodePlan`.
    causal, window, batch_invariant
        As in :func:`mla_attention`.
    mask_form : str, optional
        As for :class:`cumla.MLADecodePlan`.
    prefix_groups, max_pages
        As for :class:`cumla.AttentionPlan`.
    max_kv_len : int
        With batch_invariant, and only then: tokens of the longest request that the plan is to
        serve. Longer requests are computed correctly, but slowly.
    device, workspace, like, stream : optional
        As for :class:`cumla.MLADecodePlan`.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> q, kv_cache = np.ones((5, 16, 576), np.float16), np.ones((4, 64, 576), np.float16)
    >>> block_table, qo_indptr = np.int32([[0, 1], [2, 3]]), np.int32([0, 1, 5])
    >>> plan = cumla.MLAAttentionPlan.from_arrays(q, kv_cache, qo_indptr=qo_indptr)
    >>> plan.update(np.array([100, 7], np.int32), qo_indptr=qo_indptr)
    >>> for layer in range(3):
    ...     out, lse = plan.run(q, kv_cache, block_table=block_table)
    >>> out.shape, lse.shape
    ((5, 16, 512), (5, 16))
    """

    _operation = _ATTENTION
    _axes = _AXES

    def __init__(
        self,
        batch: int,
        total_tokens: int,
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
        prefix_groups: bool = False,
        max_pages: int | None = None,
        device: int | None = None,
        workspace: Any = None,
        like: Any = None,
        stream: Any = None,
    ) -> None:
        numbers = {"batch": batch, "total_tokens": total_tokens}
        shape = checked_shape(numbers, num_heads, num_kv_heads, page_size, dtype)
        causal = checked_flag("causal", causal)
        cache = checked_cache_dtype(cache_dtype, dtype)
        sides = window_of(checked_window("window", window), causal, cache)
        masked = checked_mask_form(mask_form, sides, cache)
        if masked:
            sides, causal = TREE, False
        columns = checked_max_pages(prefix_groups, max_pages, batch, page_size)
        if columns:
            check_prefix_options(window, masked, "mask_form")
            vars(self)["_lengths"] = f"{self._lengths}, groups=..."
        width = checked_head_dim(head_dim)
        check_taken(width, cache, masked, NAMES_OF_PLANS)
        most = _checked_most(batch_invariant, max_kv_len)
        self._max_pages = columns
        shared = 0 if batch_invariant else columns  # batch-invariant requests share nothing
        options = cache, sides, most, None, shared, width
        place = (device, workspace, like, stream)
        self._make(lambda on: _key(shape, causal, on, sm_count_of(on), *options), *place)

    @classmethod
    def from_arrays(
        cls,
        q: Any,
        kv_cache: Any,
        *,
        qo_indptr: Any,
        causal: bool = True,
        window: int | Sequence[int | None] | None = None,
        mask_form: str | None = None,
        batch_invariant: bool = False,
        max_kv_len: int | None = None,
        prefix_groups: bool = False,
        max_pages: int | None = None,
        workspace: Any = None,
        stream: Any = None,
    ) -> MLAAttentionPlan:
        """Make a plan for the shapes of these arrays, with a buffer of q's framework.

        Arrays are as in :func:`mla_attention`; only their shapes, dtypes and device are used. All
        other parameters are those of the class.
        """
        arrays = named(q, kv_cache, None, qo_indptr=qo_indptr)
        options: dict[str, Any] = {"causal": causal, "window": window, "mask_form": mask_form}
        options |= {"workspace": workspace, "max_kv_len": max_kv_len}
        options |= {"prefix_groups": prefix_groups, "max_pages": max_pages}
        return cls._from(arrays, stream, batch_invariant=batch_invariant, **options)

    @staticmethod
    def workspace_bytes(
        batch: int,
        total_tokens: int,
        num_heads: int,
        *,
        num_kv_heads: int = 1,
        head_dim: int = HEAD_DIM,
        cache_dtype: Any = None,
        batch_invariant: bool = False,
        max_kv_len: int | None = None,
        prefix_groups: bool = False,
        max_pages: int | None = None,
        sm_count: int | None = None,
    ) -> int:
        """Size of a plan's buffer in bytes, from numbers as for the class.

        `sm_count` and errors are as in :meth:`cumla.MLADecodePlan.workspace_bytes`.
        """
        numbers = {"batch": batch, "total_tokens": total_tokens}
        shape = checked_shape(numbers, num_heads, num_kv_heads)
        cache, width = checked_cache_dtype(cache_dtype), checked_head_dim(head_dim)
        check_taken(width, cache, False, NAMES_OF_PLANS)
        modes = cache, None, _checked_most(batch_invariant, max_kv_len)
        columns = checked_max_pages(prefix_groups, max_pages, batch, BLOCK_TOKENS)
        on = 0, checked_sm_count(sm_count)
        shared = 0 if batch_invariant else columns
        return _key(shape, False, *on, *modes, None, shared, width).layout.nbytes

    def update(
        self,
        kv_lens: Any,
        *,
        qo_indptr: Any,
        kv_indptr: Any = None,
        groups: PrefixGroups | None = None,
        stream: Any = None,
        **misplaced: Never,
    ) -> None:
        """Compute the schedule for these lengths, on the device.

        Lengths and groups are as in :func:`mla_attention`; stream, captures and errors as in
        :meth:`cumla.MLADecodePlan.update`. With kv_indptr the runs that follow take ``kv_indices``,
        without it they take ``block_table``. A plan with prefix_groups needs groups.
        """
        if misplaced:
            raise self._misplaced("update", misplaced)
        self._renew(kv_lens, qo_indptr, kv_indptr, groups, stream)

    def _update(self, inputs: dict[str, Any], stream: Any, key: Hashable = None) -> None:
        check_groups_given(inputs, self._max_pages)
        super()._update(inputs, stream, key)

    def run(
        self,
        q: Any,
        kv_cache: Any,
        *,
        block_table: Any = None,
        kv_indices: Any = None,
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
        """Attend with the schedule of the last update, as :meth:`cumla.MLADecodePlan.run` does.

        Parameters
        ----------
        q, kv_cache, block_table, kv_indices, softmax_scale, kv_scale, q_scale, fp8_products, \
sinks, tree, out, lse, stream
            As in :func:`mla_attention`. Pass block_table or kv_indices, as the last update
            requires; the other one raises ValueError.
        """
        if misplaced:
            raise self._misplaced("run", misplaced)
        state: AttentionState = self._call(
            *(q, kv_cache, block_table, kv_indices, softmax_scale, kv_scale, q_scale),
            *(fp8_products, sinks, tree, out, lse, stream),
        )
        return state

    def _check_lengths(self, host: Host) -> None:
        check_ragged_lengths(host, self.key.total_tokens, self.key.page_size, MOST_TOKENS)

    def _specs(self) -> tuple[KernelSpec, ...]:
        cuts = INVARIANT_SPECS if self.key.batch_invariant else ()
        shares = PREFIX_SPECS if self.key.max_pages else ()
        return SCHEDULE_SPEC, *cuts, *shares, attention_spec(self.key)

    def _check_shape(self, arguments: DecodeArguments) -> None:
        super()._check_shape(arguments)
        check_rows(arguments.block_table, self.key.batch)
        if self._max_pages:
            check_prefix_arrays(arguments.q, arguments.block_table, self._max_pages)


@lru_cache(maxsize=1024)
def _key(
    shape: Shape,
    causal: bool,
    device: int | None,
    sm_count: int,
    cache: str,
    window: tuple[int, int] | None,
    most: int,
    together: int | None = None,
    max_pages: int = 0,
    width: Width = WIDTH,
) -> MLAAttentionKey:
    """Make a key, the same object each time: it keeps what follows from it.

    `most` is the length of the longest request of a batch-invariant plan, and 0 of others;
    `together` is that of all requests, unless each may be the longest.
    """
    modes = cache, most > 0
    key = MLAAttentionKey(*shape, causal, device, sm_count, *modes, window=window, width=width)
    if max_pages:
        key = replace(key, max_pages=max_pages)
    if most:
        size = key.piece_blocks * BLOCK_TOKENS
        pieces = -(-most // size)
        more = key.batch * (pieces - 1) if together is None else together // size
        key = replace(key, max_pieces=pieces, more_pieces=more)
    if key.num_places > _MOST_PLACES or (max_pages and key.q_len * key.num_heads > _MOST_PLACES):
        raise ValueError(
            f"{arg('total_tokens')}: needs fewer query tokens, or heads, than a schedule can "
            f"hold, got {key.total_tokens}; cut the call in two"
        )
    if most and key.parts > MOST_PARTS:
        raise ValueError(
            f"{arg('batch_invariant')}: needs at most {MOST_PARTS} pieces of requests, got "
            f"{key.parts}, of which {key.num_places} are of {key.total_tokens} query tokens; cut "
            f"the call in two, lower a plan's max_kv_len, or pass fewer pages"
        )
    return key


def _checked_most(batch_invariant: Any, max_kv_len: Any) -> int:
    return checked_max_kv_len(checked_flag("batch_invariant", batch_invariant), max_kv_len)
