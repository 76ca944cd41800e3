# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA: :func:`mla_sparse_decode`, :func:`mla_sparse_attention`, and the plan of both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Never, Self

from cumla.core.arguments import (
    check_dtype,
    checked_flag,
    checked_int,
    dtype_name,
)
from cumla.core.names import arg
from cumla.core.operation import run
from cumla.core.paged import check_made_for
from cumla.core.plan import Plan
from cumla.core.spec import OUT_AND_LSE, SOFTMAX_SCALE, Factor, Spec, array, flag, optional
from cumla.core.state import AttentionState
from cumla.launch.device import checked_sm_count, sm_count_of
from cumla.launch.module import load
from cumla.launch.sparse.key import MLASparseKey
from cumla.launch.sparse.mla_sparse import sparse_specs
from cumla.mla.arguments import DTYPES, QUERY_AXES, named
from cumla.mla.attend import Q_AND_CACHE
from cumla.mla.fp8_caches import checked_format
from cumla.mla.shape import FORMATS, FP8, HEAD_DIM, UNNAMED
from cumla.sparse.arguments import (
    BESIDE,
    CACHE_FORMATS,
    INDICES_ARE,
    TOKEN_AXES,
    Attended,
    check_cache,
    check_entries,
    check_lengths,
    checked_beside,
    checked_cache,
)
from cumla.sparse.attend import (
    HIDDEN,
    SparseAttend,
    SparseAttention,
    SparseSchedule,
    key_of,
    shape_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from cumla.core.arrays import ArrayView
    from cumla.core.paged import Host

__all__ = ["MLASparsePlan", "mla_sparse_attention", "mla_sparse_decode"]

_FORMATS_BESIDE = " or ".join(map(repr, BESIDE))
_SIZES = ("batch", "q_len", "num_heads", "topk", "extra_topk", "dtype")
_SPARSE: dict[str, Any] = {
    "arguments": (
        *Q_AND_CACHE,
        array("indices"),
        optional("topk_lens"),
        optional("block_table"),
        optional("row_to_request"),
        optional("extra_kv_cache"),
        optional("extra_indices"),
        optional("extra_topk_lens"),
        optional("sinks"),
        SOFTMAX_SCALE,
        Factor("kv_scale"),
        INDICES_ARE,
        *CACHE_FORMATS,
        flag("batch_invariant", False),
        *OUT_AND_LSE,
    ),
    "positional": 3,
    "kernels": ("bound_rows", "select_rows", "mla_schedule", "mla_sparse_", "merge_states_"),
    "returns": ("out", "lse"),
    "result": AttentionState,
    "planned": ("topk_lens", "extra_topk_lens"),
    "hidden": HIDDEN,
}
MLA_SPARSE_DECODE = Spec("mla_sparse_decode", **_SPARSE)
MLA_SPARSE_ATTENTION = Spec("mla_sparse_attention", **_SPARSE)
_SCHEDULE = SparseSchedule()
_ATTEND = SparseAttend(None)  # of plans, which take both forms of q
_DECODE = SparseAttention(_SCHEDULE, SparseAttend(QUERY_AXES), MLA_SPARSE_DECODE)
_ATTENTION = SparseAttention(_SCHEDULE, SparseAttend(TOKEN_AXES), MLA_SPARSE_ATTENTION)
_PLANNED = SparseAttention(_SCHEDULE, _ATTEND, MLA_SPARSE_DECODE)


@MLA_SPARSE_DECODE
def mla_sparse_decode(
    q: Any,
    kv_cache: Any,
    indices: Any,
    *,
    topk_lens: Any = None,
    block_table: Any = None,
    row_to_request: Any = None,
    extra_kv_cache: Any = None,
    extra_indices: Any = None,
    extra_topk_lens: Any = None,
    sinks: Any = None,
    softmax_scale: float | None = None,
    kv_scale: Any = None,
    indices_are: str | None = None,
    cache_format: str | None = None,
    extra_cache_format: str | None = None,
    batch_invariant: bool = False,
    out: Any = None,
    lse: Any = None,
    stream: Any = None,
) -> AttentionState:
    """Attend to the rows of a paged cache that lists name: DeepSeek Sparse Attention, decoding.

    Every query token has a list of indices. With ``k`` the 576 or 512 and ``v`` the first 512
    values of the cached row that an index names, over all indices of the list that name one,
    ``out = softmax(softmax_scale * q @ k.T) @ v``. Devices and streams are as in
    :func:`cumla.mla_decode`; arrays on the CPU are computed by
    :func:`cumla.reference.mla_sparse_decode`.

    Parameters
    ----------
    q : array or pair of arrays
        ``(batch, q_len, num_heads, 576)`` bfloat16 or float16, or a tuple ``(q_nope, q_pe)``, as in
        :func:`cumla.mla_decode`. Any number of heads, without padding. q of 512 columns needs a
        cache of 512 columns, whose rows are key and value (DeepSeek-V4, GLM-5.3).
    kv_cache : array, or pair or triple of arrays
        ``(num_pages, page_size, 1, 576)`` or ``(num_pages, page_size, 576)`` in any of the forms of
        :func:`cumla.mla_decode`, FP8 caches included, such as the packed rows of 656 bytes of
        DeepSeek-V3.2; with one kv head. Rows without pages, ``(n, 576)`` and so on, are pages of
        one slot. Rows that no list names may hold anything, NaN included.

        Beside queries of 512 columns the last axis is 512, of q's dtype or, with bfloat16 queries,
        float8_e4m3fn under kv_scale; or the bytes (uint8 or float8_e4m3fn) of `cache_format`; or
        the 584 bytes of DeepSeek-V4's slots, again with bfloat16 queries. A page of those holds
        ``page_size`` rows of 576 bytes, 448 e4m3 columns and 64 bfloat16 ones, then 8 bytes for
        each row: the exponents of the scales of 64 columns each, biased by 127, and one that is not
        read. An exponent of 0 counts as a scale of 0 on the GPU, and one of 255 as NaN. Pages are
        contiguous, and begin at multiples of 16 bytes.
    indices : array
        ``(batch, q_len, topk)`` int32, the last axis contiguous; topk is any number, 0 included.
        Without block_table an index is a slot of the cache: it names row ``i % page_size`` of page
        ``i // page_size``. With block_table it is a position of the query token's request: row
        ``i % page_size`` of page ``block_table[request, i // page_size]``. An index that is
        negative, or names no slot of the cache (a position outside of the table, or a page outside
        of the cache), is absent; it may be at any place of the list. A row that is listed twice
        counts twice. The order of a list changes results by rounding only.
    topk_lens : array, optional
        ``(batch,)`` or ``(batch, q_len)`` int32: entries of each list. Entries from there on are
        not read. Clamped to ``[0, topk]``; topk by default.
    block_table : array, optional
        ``(requests, max_pages)`` int32, rows contiguous: page numbers of each request. Without
        `row_to_request` request b is that of ``q[b]``.
    row_to_request : array, optional
        ``(batch,)`` or ``(batch, q_len)`` int32, with block_table only: the request of each query
        token. One outside of the table has an empty list; that of a second cache remains.
    extra_kv_cache, extra_indices : array, optional
        A second cache, with pages of any size, and ``(batch, q_len, extra_topk)`` int32: slots of
        it. One softmax goes over both lists. Formats: ``"v4"`` beside a kv_cache in ``"v4"``;
        ``"v41"`` or ``"v41_fp4"`` beside either of these two.
    extra_topk_lens : array, optional
        As topk_lens, of extra_indices.
    sinks : array, optional
        ``(num_heads,)`` float32, contiguous: one extra score per head, without a value. It is not
        multiplied by softmax_scale, and lse includes it. -inf has no effect, and +inf gives 0.
    softmax_scale : float, optional
        Factor of the scores, as in :func:`cumla.mla_decode`: the default, columns ** -0.5 of q, is
        right for DeepSeek-V4 only.
    kv_scale : float or array, optional
        Factor of e4m3 columns without scales of their own, as in :func:`cumla.mla_decode`.
    indices_are : str, optional
        ``"slots"`` or ``"positions"``: the meaning of the indices. It must agree with block_table:
        positions need one, slots need none. By default block_table decides.
    cache_format : str, optional
        The format of a kv_cache of bytes. ``"v32"`` and ``"v4"``, above, are recognised by their
        widths. The other formats must be named, because other caches have the same widths. Their
        rows have 512 columns, and any stride:

        - ``"v32_no_rope"``, 528 bytes: 512 e4m3 columns, then 4 float32 scales, each of 128.
        - ``"v41"`` of DeepSeek-V4.1, 528 bytes: 512 e4m3 columns, then 16 exponents, each of 32.
        - ``"v41_fp4"``, 288 bytes: 512 e2m1 columns, of two in a byte the first in the low half,
          then 32 e4m3 scales, each of 16.

        A plan from numbers takes ``"e4m3_512"`` as well, for rows of 512 e4m3 columns under
        kv_scale. Elsewhere dtype and width determine it.

        Exponents are as in V4's slots. Products of columns and scales are exact, but for scales
        of ``"v32_no_rope"`` that are no powers of two.
    extra_cache_format : str, optional
        The same of extra_kv_cache; that of kv_cache by default.
    batch_invariant : bool
        Give a query token the same bits whatever else is in the call: other query tokens, their
        number, its place among them, and what comes after `topk_lens` entries of its list.
    out, lse : array, optional
        ``(batch, q_len, num_heads, 512)`` in q's dtype or float32, and ``(batch, q_len,
        num_heads)`` float32, written and returned, as in :func:`cumla.mla_decode`.
    stream : optional
        As in :func:`cumla.mla_decode`.

    Returns
    -------
    AttentionState
        ``out`` ``(batch, q_len, num_heads, 512)`` and ``lse`` ``(batch, q_len, num_heads)``
        float32: the natural logarithm of the sum of ``exp(softmax_scale * q.k)`` and, with sinks,
        ``exp(sink)``. Where a list names no row out is 0 and lse -inf, or the sink.

    Raises
    ------
    TypeError, ValueError, CumlaError
        As :func:`cumla.mla_decode`; a cache of several kv heads, row_to_request without
        block_table.

    Notes
    -----
    Source: DeepSeek-V3.2-Exp, section 2.1, whose lists come from :func:`cumla.paged_mqa_logits` and
    a selection of the highest 2048 logits.

    Indices may have any values; none causes an access outside of the arrays. The check mode,
    ``CUMLA_CHECK=1``, checks lengths, requests, and the page numbers that indices lead to.

    CUDA graphs and gradients are as in :func:`cumla.mla_decode`.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> q = np.ones((1, 2, 16, 576), np.float16)  # two tokens of one request
    >>> kv_cache = np.ones((4, 64, 576), np.float16)
    >>> indices = np.array([[[200, 3, -1, 70], [201, 3, 0, 70]]], np.int32)
    >>> cumla.mla_sparse_decode(q, kv_cache, indices).out.shape
    (1, 2, 16, 512)
    """
    state: AttentionState = _DECODE.call(
        *(q, kv_cache, indices, topk_lens, block_table, row_to_request, extra_kv_cache),
        *(extra_indices, extra_topk_lens, sinks, softmax_scale, kv_scale, indices_are),
        *(cache_format, extra_cache_format, batch_invariant, out, lse, stream),
    )
    return state


@MLA_SPARSE_ATTENTION
def mla_sparse_attention(
    q: Any,
    kv_cache: Any,
    indices: Any,
    *,
    topk_lens: Any = None,
    block_table: Any = None,
    row_to_request: Any = None,
    extra_kv_cache: Any = None,
    extra_indices: Any = None,
    extra_topk_lens: Any = None,
    sinks: Any = None,
    softmax_scale: float | None = None,
    kv_scale: Any = None,
    indices_are: str | None = None,
    cache_format: str | None = None,
    extra_cache_format: str | None = None,
    batch_invariant: bool = False,
    out: Any = None,
    lse: Any = None,
    stream: Any = None,
) -> AttentionState:
    """Attend to the rows of a cache that lists name, from query tokens without a batch: prefill.

    It is :func:`cumla.mla_sparse_decode` for query tokens of any requests, one after another, such
    as those of a prefill or of a mixed step. With q of four axes, all shapes are those of
    :func:`cumla.mla_sparse_decode`.

    Parameters
    ----------
    q : array or pair of arrays
        ``(total_tokens, num_heads, 576)``, a tuple ``(q_nope, q_pe)``, or ``(total_tokens,
        num_heads, 512)`` beside rows of 512 columns.
    kv_cache : array, or pair or triple of arrays
        As in :func:`cumla.mla_sparse_decode`: pages, or rows ``(n, 576)``.
    indices : array
        ``(total_tokens, topk)`` or ``(total_tokens, 1, topk)`` int32: the list of each query token,
        as in :func:`cumla.mla_sparse_decode`.
    topk_lens : array, optional
        ``(total_tokens,)`` int32: entries of each list; topk by default.
    block_table : array, optional
        ``(requests, max_pages)`` int32: page numbers of each request. The indices are then
        positions in the requests.
    row_to_request : array, optional
        ``(total_tokens,)`` int32, with block_table and only then: the request of each query token.
    extra_kv_cache, extra_indices, extra_topk_lens : array, optional
        As in :func:`cumla.mla_sparse_decode`: lists ``(total_tokens, extra_topk)``.
    sinks, softmax_scale, kv_scale, indices_are, cache_format, extra_cache_format, \
batch_invariant, stream
        As in :func:`cumla.mla_sparse_decode`.
    out, lse : array, optional
        ``(total_tokens, num_heads, 512)`` in q's dtype or float32, and ``(total_tokens,
        num_heads)`` float32, written and returned.

    Returns
    -------
    AttentionState
        ``out`` and ``lse`` as :func:`cumla.mla_sparse_decode` returns them, in the shapes above.

    Raises
    ------
    TypeError, ValueError, CumlaError
        As :func:`cumla.mla_sparse_decode`.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> q, kv = np.ones((3, 16, 576), np.float16), np.ones((100, 576), np.float16)
    >>> indices = np.array([[0, -1], [1, 0], [2, 1]], np.int32)
    >>> cumla.mla_sparse_attention(q, kv, indices).out.shape
    (3, 16, 512)
    """
    state: AttentionState = _ATTENTION.call(
        *(q, kv_cache, indices, topk_lens, block_table, row_to_request, extra_kv_cache),
        *(extra_indices, extra_topk_lens, sinks, softmax_scale, kv_scale, indices_are),
        *(cache_format, extra_cache_format, batch_invariant, out, lse, stream),
    )
    return state


def attend_as_flash_mla(
    q: Any, kv_cache: Any, indices: Any, topk_lens: Any, sinks: Any, softmax_scale: Any
) -> tuple[Any, Any, Any]:
    """Attend as `mla_sparse_attention`, with FlashMLA's log-sum-exp: out, lse and max_logits."""
    spec = MLA_SPARSE_ATTENTION
    inputs, outputs, options = spec.sorted(
        {a.name: a.default for a in spec.arguments}
        | {"q": q, "kv_cache": kv_cache, "indices": indices, "topk_lens": topk_lens}
        | {"sinks": sinks, "softmax_scale": softmax_scale}
    )
    outputs["max_logits"] = None
    options = options._replace(as_flash_mla=True, has_max_logits=True)
    out, lse, max_logits = run(_ATTENTION, inputs, outputs, options)
    return out, lse, max_logits


class MLASparsePlan(Plan[MLASparseKey]):
    """Schedule and workspace of both functions of sparse MLA, for every layer of a step.

    It works like :class:`cumla.MLADecodePlan`, with the same rules for buffers, streams, threads,
    CUDA graphs and errors. The schedule depends only on the lengths of the lists, so it can be
    computed before the lists exist: a selection has min(visible tokens, topk) entries per query
    token.

    Parameters
    ----------
    batch, q_len, num_heads : int
        As in ``q`` ``(batch, q_len, num_heads, 576)``. For :func:`mla_sparse_attention` 1 and
        total_tokens: ``run`` takes q without its first axis then, too.
    topk : int
        As in ``indices`` ``(batch, q_len, topk)``.
    dtype : str or dtype
        ``"bfloat16"`` or ``"float16"``, or any framework's dtype of that name: of q, and of
        kv_cache unless `cache_dtype` or `cache_format` says otherwise.
    cache_dtype : str or dtype, optional
        ``"float8_e4m3fn"`` for FP8 caches without a format, with dtype bfloat16; dtype by default.
    cache_format : str, optional
        The format of caches of bytes, by its name, as in :func:`mla_sparse_decode`; with dtype
        bfloat16. ``run`` does not need it.
    extra_topk : int
        As in ``extra_indices`` ``(batch, q_len, extra_topk)``, with a cache_format that may have a
        second cache beside it.
    extra_cache_format : str, optional
        As in :func:`mla_sparse_decode`, with extra_topk; cache_format by default.
    batch_invariant : bool
        As in :func:`mla_sparse_decode`.
    device, workspace, like, stream : optional
        As for :class:`cumla.MLADecodePlan`.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> q, kv_cache = np.ones((2, 1, 16, 576), np.float16), np.ones((4, 64, 576), np.float16)
    >>> indices = np.array([[[200, 3, -1, 70]], [[7, 0, 0, 0]]], np.int32)
    >>> plan = cumla.MLASparsePlan.from_arrays(q, kv_cache, indices)
    >>> plan.update(np.array([4, 1], np.int32))
    >>> for layer in range(3):
    ...     out, lse = plan.run(q, kv_cache, indices)
    >>> out.shape, lse.shape
    ((2, 1, 16, 512), (2, 1, 16))
    """

    _operation = _PLANNED
    _lengths = "topk_lens"
    _columns: int | None = None  # of q, where arrays told them: which kernel prepare loads

    def __init__(
        self,
        batch: int,
        q_len: int,
        num_heads: int,
        topk: int,
        *,
        extra_topk: int = 0,
        dtype: Any = "bfloat16",
        cache_dtype: Any = None,
        cache_format: str | None = None,
        extra_cache_format: str | None = None,
        batch_invariant: bool = False,
        device: int | None = None,
        workspace: Any = None,
        like: Any = None,
        stream: Any = None,
    ) -> None:
        dtype = dtype_name(dtype)
        check_dtype("dtype", dtype, DTYPES)
        cache = checked_cache(cache_dtype, cache_format, dtype)
        sizes = _checked_sizes(batch, q_len, num_heads, topk, extra_topk, cache)
        extra = _checked_extra(cache, extra_topk, extra_cache_format)
        invariant = checked_flag("batch_invariant", batch_invariant)

        def key_on(on: int | None) -> MLASparseKey:
            modes = dtype, cache, on, sm_count_of(on), invariant
            return key_of(*sizes, *modes, extra_cache=extra)

        self._make(key_on, device, workspace, like, stream)

    @classmethod
    def from_arrays(
        cls,
        q: Any,
        kv_cache: Any,
        indices: Any,
        *,
        extra_kv_cache: Any = None,
        extra_indices: Any = None,
        cache_format: str | None = None,
        extra_cache_format: str | None = None,
        batch_invariant: bool = False,
        workspace: Any = None,
        stream: Any = None,
    ) -> Self:
        """Make a plan for the shapes of these arrays, with a buffer of q's framework.

        Arrays and formats are as in :func:`mla_sparse_decode` or :func:`mla_sparse_attention`; only
        shapes, dtypes and device of the arrays are used. All other parameters are those of the
        class.
        """
        extra = {"extra_kv_cache": extra_kv_cache, "extra_indices": extra_indices}
        given = {name: array for name, array in extra.items() if array is not None}
        arrays = named(q, kv_cache, None, indices=indices, **given)
        formats = {"cache_format": cache_format, "extra_cache_format": extra_cache_format}
        given_formats = {name: value for name, value in formats.items() if value is not None}
        options = {"batch_invariant": batch_invariant, "workspace": workspace, **given_formats}
        plan = cls._from(arrays, stream, **options)
        plan._note_columns(q)
        return plan

    def _note_columns(self, q: Any) -> None:
        self._columns = HEAD_DIM if isinstance(q, (tuple, list)) else q.shape[-1]

    @classmethod
    def _numbers(cls, views: dict[str, ArrayView | None], options: Any) -> dict[str, Any]:
        formats = {option.name: options.pop(option.name, None) for option in CACHE_FORMATS}
        checked = {o.name: o.check(o.name, formats[o.name]) for o in CACHE_FORMATS}
        attended = _ATTEND.arguments(views, MLA_SPARSE_DECODE.defaults._replace(**checked))
        numbers = dict(zip(_SIZES, shape_of(attended.launched), strict=True))
        if attended.extra_cache:
            numbers["extra_cache_format"] = attended.extra_cache
        if attended.cache in FORMATS:
            return numbers | {"cache_format": attended.cache}
        return numbers | {"cache_dtype": FP8 if attended.cache == "e4m3" else None}

    @staticmethod
    def workspace_bytes(
        batch: int,
        q_len: int,
        num_heads: int,
        topk: int,
        *,
        extra_topk: int = 0,
        cache_dtype: Any = None,
        cache_format: str | None = None,
        extra_cache_format: str | None = None,
        batch_invariant: bool = False,
        sm_count: int | None = None,
    ) -> int:
        """Size of a plan's buffer in bytes, from numbers as for the class.

        `sm_count` and errors are as in :meth:`cumla.MLADecodePlan.workspace_bytes`.
        """
        cache = checked_cache(cache_dtype, cache_format)
        sizes = _checked_sizes(batch, q_len, num_heads, topk, extra_topk, cache)
        extra = _checked_extra(cache, extra_topk, extra_cache_format)
        invariant = checked_flag("batch_invariant", batch_invariant)
        modes = DTYPES[0], cache, 0, checked_sm_count(sm_count), invariant
        return _ATTEND.workspace_bytes(key_of(*sizes, *modes, extra_cache=extra))

    def update(
        self,
        topk_lens: Any = None,
        *,
        extra_topk_lens: Any = None,
        stream: Any = None,
        **misplaced: Never,
    ) -> None:
        """Compute the schedule for these lengths of the lists, on the device.

        Parameters
        ----------
        topk_lens : array, optional
            ``(batch,)`` or ``(batch, q_len)`` int32, or ``(q_len,)`` where batch is 1, as in
            :func:`mla_sparse_decode`; None for full lists. The following runs read no later
            entries.
        extra_topk_lens : array, optional
            The same of the lists of a second cache, also where extra_topk is 0 and they are empty.
        stream : optional
            As in :meth:`cumla.MLADecodePlan.update`; without lengths the current stream of the
            framework that the plan's buffer is of.

        Raises
        ------
        TypeError, ValueError, CumlaError
            As :meth:`cumla.MLADecodePlan.update`.
        """
        if misplaced:
            raise self._misplaced("update", misplaced)
        if extra_topk_lens is not None and self.key.cache not in BESIDE:
            raise ValueError(
                f"{arg('extra_topk_lens')}: needs a plan with cache_format {_FORMATS_BESIDE}, the "
                f"formats that may have a second cache, got another; leave it out"
            )
        self._renew(topk_lens, extra_topk_lens, stream)

    def run(
        self,
        q: Any,
        kv_cache: Any,
        indices: Any,
        *,
        block_table: Any = None,
        row_to_request: Any = None,
        extra_kv_cache: Any = None,
        extra_indices: Any = None,
        sinks: Any = None,
        softmax_scale: float | None = None,
        kv_scale: Any = None,
        indices_are: str | None = None,
        out: Any = None,
        lse: Any = None,
        stream: Any = None,
        **misplaced: Never,
    ) -> AttentionState:
        """Attend with the schedule of the last update, and with the lengths it was given.

        Parameters
        ----------
        q, kv_cache, indices, block_table, row_to_request, extra_kv_cache, extra_indices, sinks, \
softmax_scale, kv_scale, indices_are, out, lse, stream
            As in :func:`mla_sparse_decode`; for a plan of one request also as in
            :func:`mla_sparse_attention`. Indices may differ from run to run.

        Raises
        ------
        TypeError, ValueError, NotPreparedError, CumlaError
            As :meth:`cumla.MLADecodePlan.run`.
        """
        if misplaced:
            raise self._misplaced("run", misplaced)
        state: AttentionState = self._call(
            *(q, kv_cache, indices, block_table, row_to_request, extra_kv_cache, extra_indices),
            *(sinks, softmax_scale, kv_scale, indices_are, out, lse, stream),
        )
        return state

    @property
    def _batch(self) -> tuple[int, int]:
        return self.key.batch, self.key.q_len

    def _fixed(self) -> dict[str, Any]:
        key = self.key
        named = key.cache in FORMATS and key.cache not in UNNAMED
        return {
            "batch_invariant": key.batch_invariant,
            "cache_format": key.cache if named else None,
            "extra_cache_format": (key.extra_cache or None) if named else None,
        }

    def _load(self, device: int, capturing: Callable[[], bool]) -> None:
        for spec in sparse_specs(self.key, self._columns):
            load(spec, device, capturing=capturing)

    def _check_lengths(self, host: Host) -> None:
        check_lengths(host, *self.key.topks)

    def _check_shape(self, arguments: Attended) -> None:
        made = tuple([getattr(self.key, name) for name in _SIZES])
        check_made_for(_SIZES, made, shape_of(arguments.launched))
        check_cache(arguments, self.key)


def _checked_sizes(
    batch: Any, q_len: Any, num_heads: Any, topk: Any, extra_topk: Any, cache: str
) -> tuple[int, int, int, int, int]:
    counts = {"batch": batch, "q_len": q_len, "topk": topk, "extra_topk": extra_topk}
    for name, value in counts.items():
        checked_int(name, value, "pass the size of a call", least=0)
    checked_int("num_heads", num_heads, "pass the size of a call")
    check_entries(topk, extra_topk)
    if extra_topk and cache not in BESIDE:
        raise ValueError(
            f"{arg('extra_topk')}: needs cache_format {_FORMATS_BESIDE}, the formats that may have "
            f"a second cache, got another; leave it out"
        )
    return batch, q_len, num_heads, topk, extra_topk


def _checked_extra(cache: str, extra_topk: int, form: Any) -> str:
    """Check the format of a second cache, and name it as a key does: "" if there is none."""
    form = checked_format("extra_cache_format", form)
    if form is not None:
        checked_beside(cache, form)
    return form or (cache if extra_topk else "")
