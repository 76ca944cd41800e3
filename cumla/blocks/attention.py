# SPDX-License-Identifier: Apache-2.0
"""Attention of GQA to lists of blocks: :func:`block_sparse_attention` and its plan."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Never

import numpy as np

from cumla import reference
from cumla.core.arguments import (
    INT32,
    SINKS,
    WIDE,
    Array,
    bind,
    check_dtype,
    check_lies,
    checked_flag,
    checked_int,
    dtype_name,
)
from cumla.core.names import arg
from cumla.core.operation import Both, Output, Scheduled
from cumla.core.paged import (
    KV_LENS,
    QO_INDPTR,
    Schedule,
    Stated,
    check_made_for,
    check_ragged_lengths,
    check_rows,
    check_table_lengths,
    checked_pages,
)
from cumla.core.plan import Plan
from cumla.core.spec import (
    OUT_AND_LSE,
    SOFTMAX_SCALE,
    Factor,
    Option,
    Spec,
    array,
    flag,
    integer,
    optional,
)
from cumla.core.state import AttentionState
from cumla.launch.blocks.block_attention import block_attention_spec
from cumla.launch.blocks.block_attention_few import block_attention_few_spec
from cumla.launch.blocks.block_attention_gathered import block_attention_gathered_spec
from cumla.launch.blocks.block_attention_rest import rest_spec
from cumla.launch.blocks.block_lists import (
    BlockArguments,
    block_sparse_launches,
    lists_spec,
    virtual_pages,
)
from cumla.launch.blocks.block_places import block_places_launch, places_spec
from cumla.launch.blocks.block_rows import SPECS as ROW_SPECS
from cumla.launch.blocks.block_rows import block_rows_launch
from cumla.launch.blocks.block_tiles import tiles_spec
from cumla.launch.blocks.key import BlockKey
from cumla.launch.blocks.widen_blocks import widen_spec
from cumla.launch.device import checked_sm_count, sm_count_of
from cumla.launch.mha.append_kv_cache import Scale
from cumla.launch.mha.attention import E4M3_COLUMNS
from cumla.launch.module import load
from cumla.launch.split.plan import MOST_PARTS, MOST_TOKENS, ROW_TILE
from cumla.mha.arguments import E4M3, KV_LAYOUT, checked_layout, checked_scales, swapped
from cumla.mha.attention import check_heads, checked_rows, checked_shape, checked_softcap

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cumla.core.arguments import Views
    from cumla.core.arrays import ArrayView
    from cumla.core.operation import Launchable
    from cumla.core.paged import Host, Results
    from cumla.launch.kernel import Launch
    from cumla.launch.source import KernelSpec

__all__ = ["BlockSparsePlan", "block_sparse_attention"]

_E4M3 = "float8_e4m3fn"
_HALVES = ("bfloat16", "float16")
_ENTRIES = ("blocks", "tokens")
_MOST_TABLE = (1 << 31) - (1 << 16)  # tokens
_MOST_ROWS = (1 << 31) - 128  # virtual requests, that the kernels can number
LENGTHS = {"qo_indptr": QO_INDPTR, "kv_lens": KV_LENS}
_SIZES = (
    *("total_tokens", "num_heads", "num_kv_heads", "head_dim", "head_dim_v", "block_size"),
    *("topk", "dtype", "cache_dtype", "q_len", "batch"),
)


def _checked_entries(name: str, value: Any) -> str:
    if value not in _ENTRIES:
        raise ValueError(
            f"{arg(name)}: needs {' or '.join(map(repr, _ENTRIES))}, got {value!r}; pass one of "
            f"them"
        )
    return _ENTRIES[_ENTRIES.index(value)]


BLOCK_SPARSE_ATTENTION = Spec(
    "block_sparse_attention",
    (
        array("q"),
        array("k"),
        array("v"),
        array("block_indices"),
        integer("block_size", "pass the tokens of a block"),
        array("kv_lens"),
        array("block_table"),
        optional("qo_indptr"),
        optional("topk_lens"),
        flag("causal", True),
        Option("softcap", None, checked_softcap, "float?"),
        optional("sinks"),
        SOFTMAX_SCALE,
        Factor("k_scale"),
        Factor("v_scale"),
        KV_LAYOUT,
        Option("indices_are", _ENTRIES[0], _checked_entries, "str"),
        *OUT_AND_LSE,
        flag("batch_invariant", False),
    ),
    positional=4,
    kernels=(
        *("block_rows", "block_places", "block_attention", "block_lists", "block_tiles"),
        "widen_blocks",
        "attention_",
    ),
    returns=("out", "lse"),
    result=AttentionState,
    planned=("kv_lens", "qo_indptr"),
)


@BLOCK_SPARSE_ATTENTION
def block_sparse_attention(
    q: Any,
    k: Any,
    v: Any,
    block_indices: Any,
    *,
    block_size: int,
    kv_lens: Any,
    block_table: Any,
    qo_indptr: Any = None,
    topk_lens: Any = None,
    causal: bool = True,
    softcap: float | None = None,
    sinks: Any = None,
    softmax_scale: float | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_layout: str = "NHD",
    indices_are: str = "blocks",
    out: Any = None,
    lse: Any = None,
    batch_invariant: bool = False,
    stream: Any = None,
) -> AttentionState:
    """Attend to chosen blocks of keys and values: sparse attention of GQA, decoding and drafts.

    Block b of a request holds its tokens from ``b * block_size`` to ``(b + 1) * block_size - 1``.
    Each query token has a list of blocks for each kv head, or one for all, and attends to the
    tokens of these blocks up to its own position as in :func:`cumla.attention`. A list is a set:
    the order of entries and repeated entries do not change any bit. Entries that name no visible
    block are skipped. The block of the query token itself, which is visible in part, must be listed
    like any other. Devices and streams are as in :func:`cumla.attention`; arrays on the CPU are
    computed by :func:`cumla.reference.block_sparse_attention`.

    Parameters
    ----------
    q : array
        ``(total_tokens, num_heads, head_dim)`` with qo_indptr, or ``(batch, q_len, num_heads,
        head_dim)`` without, bfloat16 or float16, as in :func:`cumla.attention`; of CuPy, PyTorch,
        JAX or NumPy. At most 64 heads per kv head.
    k, v : array
        Pages ``(num_pages, page_size, num_kv_heads, head_dim)``, of a page size that is a multiple
        of block_size; v may have another head_dim_v. Of q's dtype, or both float8_e4m3fn, or uint8
        with its bits. Strides as in :func:`cumla.attention`, those of v in proportion to those of
        k; for a packed cache pass its two parts.
    block_indices : array
        ``(total_tokens, num_kv_heads, topk)``, or ``(total_tokens, 1, topk)`` for lists that all kv
        heads share, int32 or int64, of any strides. total_tokens is ``batch * q_len`` where q has
        four axes. Entries are ignored, at any place of a list, if they are negative, name a block
        after the query token, or name a page outside of the cache.
    block_size : int
        Tokens of a block. Multiples of 8 are fast, of 64 fastest.
    kv_lens : array
        ``(batch,)`` int32: keys of each request, those of its queries included. Clamped to what the
        pages of the request hold.
    block_table : array
        ``(batch, max_pages)`` int32, rows contiguous: page numbers of each request.
    qo_indptr : array, optional
        ``(batch + 1,)`` int32: where the query tokens of each request begin in q, and where the
        last ones end. Rows of q before the first and from the last on have out 0 and lse -inf.
    topk_lens : array, optional
        ``(total_tokens,)`` or ``(total_tokens, num_kv_heads)`` int32: entries of each list. Later
        ones are not read. Clamped to ``[0, topk]``; topk by default.
    causal : bool
        No query sees a key after its own position.
    softcap, sinks, softmax_scale : optional
        As in :func:`cumla.attention`. With sinks and several kv heads, each kv head takes two
        launches.
    k_scale, v_scale : float or array, optional
        Factors of e4m3 keys and values, as in :func:`cumla.attention`: numbers, or float32 ``(1,)``
        or ``(num_kv_heads,)``. With ``(num_kv_heads,)`` each kv head takes two
        launches. Or both float32 ``(num_kv_heads, rows)``: a factor for each kv head and row of the
        cache, row ``page * page_size + i`` being token i of a page. rows is at least ``num_pages *
        page_size``; factors of rows that no query sees may be NaN. On a GPU these need head_dim and
        head_dim_v of 80 to 128, at most 16 heads per kv head, blocks of a multiple of 32 tokens and
        topk up to 128.
    kv_layout : str
        ``"NHD"``, or ``"HND"`` for pages ``(num_pages, num_kv_heads, page_size, head_dim)``.
    indices_are : str
        ``"blocks"``, or ``"tokens"`` for entries that are positions of tokens: each names the block
        of its token.
    out, lse : array, optional
        Where to write: q's shape with head_dim_v columns, in q's dtype or float32, and float32 of
        q's shape without its columns.
    batch_invariant : bool
        Give a query token the same bits in any batch. Lists are then split every 1024 tokens.
    stream : optional
        As in :func:`cumla.mla_decode`.

    Returns
    -------
    AttentionState
        ``out`` and ``lse``. A query that sees no key has out 0 and lse -inf or, with sinks, the
        sink.

    Raises
    ------
    TypeError, ValueError, CumlaError
        As :func:`cumla.mla_decode`.

    Notes
    -----
    Lengths, offsets, page numbers and lists may have any values; none causes an access outside of
    the arrays. Only visible tokens of listed blocks affect results, NaN included. With 8 or more
    query tokens per request on average, up to 16 neighbouring tokens are computed together. If one
    of them sees a value that is not finite, results of the others may be NaN.

    Sources: MiniMax M3 (MSA), InfLLM v2, and NSA (arXiv:2502.11089), whose chosen branch this is.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> q = np.ones((2, 1, 4, 64), np.float16)  # one new token of two requests
    >>> k = v = np.ones((6, 32, 2, 64), np.float16)
    >>> lens, table = np.int32([90, 33]), np.int32([[0, 4, 5], [2, 1, -1]])
    >>> blocks = np.int32([[[0, 5], [4, 5]], [[2, -1], [2, 0]]])  # (tokens, kv heads, topk)
    >>> cumla.block_sparse_attention(
    ...     q, k, v, blocks, block_size=16, kv_lens=lens, block_table=table).out.shape
    (2, 1, 4, 64)
    """
    state: AttentionState = _OPERATION.call(
        *(q, k, v, block_indices, block_size, kv_lens, block_table, qo_indptr, topk_lens),
        *(causal, softcap, sinks, softmax_scale, k_scale, v_scale, kv_layout, indices_are),
        *(out, lse, batch_invariant, stream),
    )
    return state


class _Attend(Stated[Any, BlockKey]):
    """Builds the pages of virtual requests, and attends to them."""

    factor_axes = 1  # those of rows have two

    def arguments(self, views: Views, options: Any) -> BlockArguments:
        """Check all but the lengths."""
        given = {name: view for name, view in views.items() if view is not None}
        q, k, v = (checked_rows(name, given) for name in ("q", "k", "v"))
        _check_forms(q, k)
        if options.kv_layout == "HND":
            k, v = swapped(k), swapped(v)
        check_heads(q, k, v)
        _check_blocks(q, k, options.block_size)
        tokens, heads = prod(q.shape[:-2]), (1, k.shape[2])
        table = checked_pages({"block_table": given["block_table"]})
        check_columns(table.shape[1], k.shape[1])
        bind(SINKS, views, {"num_heads": q.shape[-2]})
        entries = _checked_entries_of(given["block_indices"], tokens, heads)
        lengths = _checked_counts(given.get("topk_lens"), tokens, heads)
        if virtual_pages(k, v, options.block_size) is None:
            raise ValueError(
                f"{arg('v')}: needs strides in proportion to those of {arg('k')}, and fewer than "
                f"2 ** 31 blocks of heads, got strides {v.strides} beside {k.strides}; pass two "
                f"parts of one cache, or two caches with the same layout"
            )
        factors = _checked_factors(given, k, v, options.block_size)
        scales = [
            Scale()
            if factors
            else checked_scales(name, given.get(name), number, cache, None, _TOLD)
            for name, number, cache in zip(
                ("k_scale", "v_scale"), (options.k_scale, options.v_scale), (k, v), strict=True
            )
        ]
        scale = q.shape[-1] ** -0.5 if options.softmax_scale is None else options.softmax_scale
        return BlockArguments(
            *(q, k, v, entries, lengths, table, given.get("sinks"), options.block_size),
            *(options.indices_are == "tokens", scale, options.softcap or 0.0),
            k_scale=scales[0],
            v_scale=scales[1],
            layout=options.kv_layout,
            causal=options.causal,
            factors=factors,
        )

    def value_dim(self, arguments: BlockArguments) -> int:
        """Tell the columns of values."""
        return arguments.v.shape[3]

    def outputs(self, arguments: BlockArguments) -> tuple[Output, ...]:
        """Tell the shapes of out and lse; in memory both have the order of q."""
        out, lse = super().outputs(arguments)
        return out, lse._replace(swapped=False)

    def recipe(
        self, key: BlockKey, arguments: Any, outs: Sequence[ArrayView], buffer: int
    ) -> Sequence[Launchable]:
        """Describe the launches, or none without query tokens."""
        if not key.batch:
            return ()
        if arguments.factors is not None:
            _check_serves_factors(key)
        return block_sparse_launches(key, buffer, arguments, *outs)

    def check_values(self, host: Host, arguments: BlockArguments) -> None:
        """Look at lengths and offsets; lists and page numbers may have any values."""
        tokens, page_size = prod(arguments.q.shape[:-2]), arguments.k.shape[1]
        check_lengths(host, tokens)
        if "kv_lens" in host:
            table = np.broadcast_to(np.int32(0), arguments.block_table.shape)
            check_table_lengths(host["kv_lens"], table, page_size)

    def reference(self, host: Host, arguments: BlockArguments) -> Results:
        """Compute on the CPU."""
        a = arguments
        options: dict[str, Any] = {**host, "causal": a.causal, "softcap": a.softcap or None}
        options |= {"block_size": a.block_size, "kv_layout": a.layout}
        options |= {"softmax_scale": a.softmax_scale}
        options |= {"indices_are": _ENTRIES[a.entries_are_tokens]}
        if a.k.dtype in E4M3:
            options.setdefault("k_scale", a.k_scale.number)
            options.setdefault("v_scale", a.v_scale.number)
        return reference.block_sparse_attention(**options)


class _Operation(Scheduled[Any, BlockKey]):
    def batch(self, attend: BlockArguments, views: Views) -> int | None:
        return attend.q.shape[0] if len(attend.q.shape) == 4 else None

    def arguments(self, views: Views, options: Any) -> Both[Any]:
        found = super().arguments(views, options)
        given = {name for name, view in views.items() if view is not None}
        check_offsets_given("qo_indptr" in given, len(found.attend.q.shape))
        check_rows(found.attend.block_table, _requests_of(found))
        return found

    def key(self, arguments: Both[Any], device: int) -> BlockKey:
        _, attend, options = arguments
        shape = _shape_of(attend, _requests_of(arguments))
        of_device = device, sm_count_of(device)
        factors = attend.factors is not None
        return _key(shape, options.causal, options.batch_invariant, *of_device, factors)


def _requests_of(arguments: Both[Any]) -> int:
    requests: int = arguments.lengths[1].shape[0]
    return requests


def _shape_of(a: BlockArguments, requests: int) -> tuple[Any, ...]:
    """Read off what a key holds of the arrays, as _SIZES lists it."""
    *tokens, num_heads, head_dim = a.q.shape
    heads = num_heads, a.k.shape[2], head_dim, a.v.shape[3]
    cache_dtype = _E4M3 if a.k.dtype in E4M3 else a.k.dtype
    q_len = tokens[1] if len(tokens) == 2 else 0
    lists = a.block_size, a.entries.shape[2]
    return prod(tokens), *heads, *lists, a.q.dtype, cache_dtype, q_len, requests


@lru_cache(maxsize=1024)
def _key(
    shape: tuple[Any, ...],
    causal: bool,
    batch_invariant: bool,
    device: int | None,
    sm_count: int,
    rows_have_factors: bool = False,
) -> BlockKey:
    """Make a key, the same object each time: it keeps what follows from it."""
    tokens, num_heads, kv_heads, *columns, block_size, topk, dtype, cache, q_len, requests = shape
    key = BlockKey.of(
        *(tokens, kv_heads, num_heads // kv_heads, (columns[0], columns[1]), block_size),
        (dtype, cache),
        device=device,
        sm_count=sm_count,
        batch_invariant=batch_invariant,
        topk=topk,
        requests=requests,
        is_causal=causal,
        query_len=q_len,
        rows_have_factors=rows_have_factors,
    )
    if max(key.num_places, topk * block_size) > _MOST_ROWS:
        raise ValueError(
            f"{arg('q')}: needs fewer query tokens and kv heads, or shorter lists, than a schedule "
            f"can hold, got {tokens} tokens, {kv_heads} kv heads and lists of {topk} blocks; cut "
            f"the call in two"
        )
    if batch_invariant and key.parts > MOST_PARTS:
        raise ValueError(
            f"{arg('batch_invariant')}: needs at most {MOST_PARTS} pieces of lists, got "
            f"{key.parts}; pass fewer query tokens at once, or shorter lists"
        )
    return key


# --- checks --------------------------------------------------------------------------------------


def _check_forms(q: ArrayView, k: ArrayView) -> None:
    if q.dtype not in _HALVES:
        raise TypeError(f"{arg('q')}: needs {' or '.join(_HALVES)}, got {q.dtype}; convert it")
    if len(k.shape) != 4:
        raise ValueError(
            f"{arg('k')}: needs pages, of four axes, got shape {k.shape}; a contiguous cache "
            f"(slots, max_len, ...) has pages of max_len tokens, and a block table of one column"
        )


def check_columns(max_pages: int, page_size: int) -> None:
    """Refuse tables of more tokens than the kernels number, which look at 65,536 blocks at once."""
    if max_pages * page_size > _MOST_TABLE:
        raise ValueError(
            f"{arg('block_table')}: needs max_pages * page_size up to {_MOST_TABLE}, got "
            f"{max_pages} pages of {page_size}; pass fewer columns"
        )


def _check_blocks(q: ArrayView, k: ArrayView, block_size: int) -> None:
    if k.shape[1] % block_size:
        raise ValueError(
            f"{arg('block_size')}: needs a divisor of the page size {k.shape[1]}, got "
            f"{block_size}; use pages of whole blocks"
        )
    group = q.shape[-2] // k.shape[2]
    if group > ROW_TILE:
        raise ValueError(
            f"{arg('q')}: needs at most {ROW_TILE} heads per kv head, got {group}; cut the heads "
            f"into several calls"
        )


def _checked_entries_of(view: ArrayView, tokens: int, heads: tuple[int, int]) -> ArrayView:
    """Check the lists."""
    way_out = "give each query token its lists"
    sizes = {"total_tokens": tokens}
    bind(
        {"block_indices": Array("total_tokens lists topk", WIDE, "elements", way_out)},
        {"block_indices": view},
        sizes,
    )
    if view.shape[1] not in heads:
        raise ValueError(
            f"{arg('block_indices')}: needs lists for each of the {heads[1]} kv heads of "
            f"{arg('k')}, or one for all, got shape {view.shape}; transpose it, or take the lists "
            f"of these heads"
        )
    return view


def _checked_counts(
    view: ArrayView | None, tokens: int, heads: tuple[int, int]
) -> ArrayView | None:
    """Check the lengths of lists, and give them two axes."""
    if view is None:
        return None
    if len(view.shape) == 1:
        view = view._replace(shape=(*view.shape, 1), strides=(*view.strides, 0))
    if view.dtype not in INT32:
        raise TypeError(f"{arg('topk_lens')}: needs int32, got {view.dtype}; convert it first")
    if len(view.shape) != 2 or view.shape[0] != tokens or view.shape[1] not in heads:
        raise ValueError(
            f"{arg('topk_lens')}: needs shape ({tokens},) or ({tokens}, {heads[1]}), got "
            f"{view.shape}; give each list its length"
        )
    check_lies("topk_lens", view, "elements")
    return view


_TOLD = "here, not by request"


def _checked_factors(
    given: Mapping[str, ArrayView], k: ArrayView, v: ArrayView, block_size: int
) -> tuple[ArrayView, ArrayView] | None:
    """Check the factors of rows of an e4m3 cache, (num_kv_heads, rows); None: there are none."""
    names = [n for n in ("k_scale", "v_scale") if n in given and len(given[n].shape) == 2]
    if not names:
        return None
    if len(names) == 1:
        other = "v_scale" if names == ["k_scale"] else "k_scale"
        raise ValueError(
            f"{arg(other)}: needs factors of rows, as {arg(names[0])} has, got others; broadcast "
            f"them to that shape"
        )
    num_pages, page_size, kv_heads, _ = k.shape
    rows = num_pages * page_size
    for name in names:
        view, cache = given[name], k if name == "k_scale" else v
        if cache.dtype not in E4M3:
            raise ValueError(f"{arg(name)}: needs an e4m3 cache, got {cache.dtype}; leave it out")
        check_dtype(name, view.dtype, ("float32",))
        check_lies(name, view, "elements")
        if view.shape[0] != kv_heads or view.shape[1] < rows:
            raise ValueError(
                f"{arg(name)}: needs shape ({kv_heads}, {rows}), or more columns, got "
                f"{view.shape}; give each kv head and row of the cache its factor"
            )
    if rows // block_size >= 1 << 31:
        raise ValueError(
            f"{arg('k')}: needs fewer than 2 ** 31 blocks beside factors of rows, got "
            f"{rows // block_size}; use larger blocks"
        )
    return given["k_scale"], given["v_scale"]


def _check_serves_factors(key: BlockKey) -> None:
    """Refuse factors of rows where block_attention does not serve the lists."""
    if key.topk and not key.is_short:
        raise ValueError(
            f"{arg('k_scale')}: needs, with factors of rows, head_dim and head_dim_v of 80 to 128, "
            f"up to 16 heads per kv head, blocks of a multiple of 32 tokens and up to 128 of them "
            f"a list, got head_dim {key.head_dim}, head_dim_v {key.head_dim_v}, {key.num_heads} "
            f"heads, blocks of {key.page_size} and {key.topk} of them; pass a factor for each kv "
            f"head, or a cache of 16 bits"
        )


def check_offsets_given(has_offsets: bool, q_axes: int) -> None:
    if has_offsets == (q_axes == 3):
        return
    if has_offsets:
        raise ValueError(
            f"{arg('qo_indptr')}: needs {arg('q')} of three axes, got {q_axes}; leave it out"
        )
    raise ValueError(
        f"{arg('qo_indptr')}: needs offsets of the requests for {arg('q')} of three axes, got "
        f"None; pass it, or {arg('q')} as (batch, q_len, ...)"
    )


def check_lengths(host: Host, total_tokens: int) -> None:
    """Check mode: raise for the first offset or length out of range."""
    absent = {"qo_indptr": np.zeros(1, np.int32), "kv_lens": np.zeros(0, np.int32)}
    check_ragged_lengths(absent | dict(host), total_tokens, 1, MOST_TOKENS)


def _rows_launch(key: BlockKey, buffer: int, *lengths: Any) -> Launch:
    return block_rows_launch(key.query_tokens, key.rows_at(buffer), *lengths)


class _Schedule(Schedule[BlockKey]):
    """Finds what query tokens see, and divides them into row tiles where a key has these."""

    def recipe(
        self, key: Any, arguments: tuple[Any, ...], outs: Sequence[ArrayView], buffer: int
    ) -> Sequence[Launchable]:
        """Describe one launch, or two."""
        rows = super().recipe(key, arguments, outs, buffer)
        return (*rows, block_places_launch(key, buffer)) if rows and key.tile else rows


_SCHEDULE = _Schedule(LENGTHS, _rows_launch)
_ATTEND = _Attend()
_OPERATION = _Operation(_SCHEDULE, _ATTEND, BLOCK_SPARSE_ATTENTION)


class BlockSparsePlan(Plan[BlockKey]):
    """Visible tokens and workspace of :func:`block_sparse_attention`, for all layers of a step.

    It works like :class:`cumla.MLADecodePlan`, with the same rules for buffers, streams, threads,
    CUDA graphs and errors. An update takes the lengths. Each run takes lists and assigns them to
    thread blocks.

    Parameters
    ----------
    batch : int
        Requests.
    total_tokens, num_heads, head_dim : int
        As in ``q`` ``(total_tokens, num_heads, head_dim)``.
    topk, block_size : int
        Entries of a list, and tokens of a block.
    num_kv_heads, head_dim_v : int, optional
        Of ``k`` and ``v``; num_heads and head_dim by default.
    q_len : int, optional
        Query tokens of each request, where q is ``(batch, q_len, num_heads, head_dim)``: then
        total_tokens is ``batch * q_len``.
    dtype : str or dtype
        ``"bfloat16"`` or ``"float16"``, or any framework's dtype of that name: of q, and of k and v
        unless `cache_dtype` says otherwise.
    cache_dtype : str or dtype, optional
        ``"float8_e4m3fn"`` for e4m3 keys and values; dtype by default.
    causal, batch_invariant : bool
        As in :func:`block_sparse_attention`.
    device, workspace, like, stream : optional
        As for :class:`cumla.MLADecodePlan`.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> q = np.ones((2, 1, 4, 64), np.float16)  # one new token of two requests
    >>> k = v = np.ones((6, 32, 2, 64), np.float16)
    >>> table = np.int32([[0, 4, 5], [2, 1, -1]])
    >>> blocks = np.int32([[[0, 5], [4, 5]], [[2, -1], [2, 0]]])  # (tokens, kv heads, topk)
    >>> plan = cumla.BlockSparsePlan.from_arrays(q, k, v, blocks, block_size=16)
    >>> plan.update(np.int32([90, 33]))
    >>> for layer in range(3):
    ...     out, lse = plan.run(q, k, v, blocks, block_table=table)
    >>> out.shape, lse.shape
    ((2, 1, 4, 64), (2, 1, 4))
    """

    _operation = _OPERATION
    _lengths = "kv_lens, qo_indptr=..."

    def __init__(
        self,
        batch: int,
        total_tokens: int,
        num_heads: int,
        head_dim: int,
        topk: int,
        block_size: int,
        *,
        num_kv_heads: int | None = None,
        head_dim_v: int | None = None,
        q_len: int | None = None,
        dtype: str = "bfloat16",
        cache_dtype: str | None = None,
        causal: bool = True,
        batch_invariant: bool = False,
        device: int | None = None,
        workspace: Any = None,
        like: Any = None,
        stream: Any = None,
    ) -> None:
        causal = checked_flag("causal", causal)
        heads = num_heads, num_kv_heads, head_dim, head_dim_v
        tokens = batch, total_tokens, q_len
        shape = _checked_shape(tokens, heads, (topk, block_size), (dtype, cache_dtype))
        invariant = checked_flag("batch_invariant", batch_invariant)

        def key_on(on: int | None) -> BlockKey:
            return _key(shape, causal, invariant, on, sm_count_of(on))

        self._shape = shape
        self._make(key_on, device, workspace, like, stream)
        if q_len:
            vars(self)["_lengths"] = "kv_lens"

    @classmethod
    def from_arrays(
        cls,
        q: Any,
        k: Any,
        v: Any,
        block_indices: Any,
        *,
        block_size: int,
        qo_indptr: Any = None,
        kv_layout: str = "NHD",
        causal: bool = True,
        batch_invariant: bool = False,
        workspace: Any = None,
        stream: Any = None,
    ) -> BlockSparsePlan:
        """Make a plan for the shapes of these arrays, with a buffer of q's framework.

        Arrays are as in :func:`block_sparse_attention`; only their shapes, dtypes and device are
        used. All other parameters are those of the class.
        """
        arrays = {"q": q, "k": k, "v": v, "block_indices": block_indices}
        if qo_indptr is not None:
            arrays["qo_indptr"] = qo_indptr
        options: dict[str, Any] = {"causal": causal, "batch_invariant": batch_invariant}
        options |= {"kv_layout": checked_layout(kv_layout), "workspace": workspace}
        options["block_size"] = checked_int("block_size", block_size, "pass the tokens of a block")
        return cls._from(arrays, stream, **options)

    @classmethod
    def _numbers(
        cls, views: dict[str, ArrayView | None], options: dict[str, Any]
    ) -> dict[str, Any]:
        q, k, v = (checked_rows(name, views) for name in ("q", "k", "v"))
        _check_forms(q, k)
        if options.pop("kv_layout") == "HND":
            k, v = swapped(k), swapped(v)
        check_heads(q, k, v)
        _check_blocks(q, k, options["block_size"])
        entries = views["block_indices"]
        assert entries is not None
        _checked_entries_of(entries, prod(q.shape[:-2]), (1, k.shape[2]))
        *lead, num_heads, head_dim = q.shape
        batch, q_len = lead[0], lead[1] if len(lead) == 2 else None
        check_offsets_given("qo_indptr" in views, len(q.shape))
        if q_len is None:
            batch = bind({"qo_indptr": QO_INDPTR}, views, {})["batch"]
        return {
            "batch": batch,
            "total_tokens": prod(lead),
            "num_heads": num_heads,
            "head_dim": head_dim,
            "topk": entries.shape[2],
            "num_kv_heads": k.shape[2],
            "head_dim_v": v.shape[3],
            "q_len": q_len,
            "dtype": q.dtype,
            "cache_dtype": _E4M3 if k.dtype in E4M3 else None,
        }

    @staticmethod
    def workspace_bytes(
        batch: int,
        total_tokens: int,
        num_heads: int,
        head_dim: int,
        topk: int,
        block_size: int,
        *,
        num_kv_heads: int | None = None,
        head_dim_v: int | None = None,
        batch_invariant: bool = False,
        sm_count: int | None = None,
    ) -> int:
        """Size of a plan's buffer in bytes, for any dtypes; numbers as for the class.

        `sm_count` and errors are as in :meth:`cumla.MLADecodePlan.workspace_bytes`.
        """
        heads = num_heads, num_kv_heads, head_dim, head_dim_v
        tokens, lists = (batch, total_tokens, None), (topk, block_size)
        invariant, count = (
            checked_flag("batch_invariant", batch_invariant),
            checked_sm_count(sm_count),
        )
        sizes = [
            _key(
                _checked_shape(tokens, heads, lists, ("bfloat16", cache)), True, invariant, 0, count
            )
            for cache in (None, _E4M3)
            if cache is None or {head_dim, head_dim_v or head_dim} <= {*E4M3_COLUMNS}
        ]
        return max(key.layout.nbytes for key in sizes)

    def update(
        self, kv_lens: Any, *, qo_indptr: Any = None, stream: Any = None, **misplaced: Never
    ) -> None:
        """Compute what each query token sees, on the device.

        Lengths are as in :func:`block_sparse_attention`; stream, captures and errors as in
        :meth:`cumla.MLADecodePlan.update`.
        """
        if misplaced:
            raise self._misplaced("update", misplaced)
        check_offsets_given(qo_indptr is not None, 4 if self.key.query_len else 3)
        self._renew(kv_lens, qo_indptr, stream)

    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        block_indices: Any,
        *,
        block_table: Any,
        topk_lens: Any = None,
        softcap: float | None = None,
        sinks: Any = None,
        softmax_scale: float | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
        kv_layout: str = "NHD",
        indices_are: str = "blocks",
        out: Any = None,
        lse: Any = None,
        stream: Any = None,
        **misplaced: Never,
    ) -> AttentionState:
        """Attend to lists with the lengths of the last update.

        Parameters
        ----------
        q, k, v, block_indices, block_table, topk_lens, softcap, sinks, softmax_scale, k_scale, \
v_scale, kv_layout, indices_are, out, lse, stream
            As in :func:`block_sparse_attention`. Lists may differ from run to run.
        """
        if misplaced:
            raise self._misplaced("run", misplaced)
        state: AttentionState = self._call(
            *(q, k, v, block_indices, block_table, topk_lens, softcap, sinks, softmax_scale),
            *(k_scale, v_scale, kv_layout, indices_are, out, lse, stream),
        )
        return state

    @property
    def _batch(self) -> int | None:
        return self.key.requests

    def _fixed(self) -> dict[str, Any]:
        key = self.key
        modes = {"causal": key.is_causal, "batch_invariant": key.batch_invariant}
        return {"block_size": key.page_size, **modes}

    def _load(self, device: int, capturing: Callable[[], bool]) -> None:
        key = self.key
        if key.tile:
            tile = key.tile
            specs: tuple[KernelSpec, ...] = places_spec(tile), tiles_spec(tile), tile.choice.spec
            if tile.widened:
                specs += widen_spec(tile), rest_spec(key)
        elif key.gathered_columns:
            specs = (block_attention_gathered_spec(key),)
        elif key.is_direct:
            few = key.few is not None
            specs = (block_attention_few_spec(key) if few else block_attention_spec(key),)
        else:
            specs = lists_spec(key.topk), key.choice.spec, key.one_head.choice.spec
        for spec in (*ROW_SPECS, *specs):
            load(spec, device, capturing=capturing)

    def _check_lengths(self, host: Host) -> None:
        check_lengths(host, self.key.batch)

    def _check_shape(self, arguments: BlockArguments) -> None:
        got = _shape_of(arguments, arguments.block_table.shape[0])
        check_made_for(_SIZES, self._shape, got)


def _checked_shape(
    tokens: tuple[Any, ...], heads: tuple[Any, ...], lists: tuple[Any, ...], dtypes: tuple[Any, Any]
) -> tuple[Any, ...]:
    """Check the numbers of a plan, and give them as _SIZES lists them."""
    batch, total_tokens, q_len = tokens
    topk, block_size = lists
    checked_int("topk", topk, "pass the size of a call", 0)
    checked_int("block_size", block_size, "pass the tokens of a block")
    if dtype_name(dtypes[0]) not in _HALVES:
        raise ValueError(
            f"dtype: needs {' or '.join(_HALVES)}, got {dtypes[0]!r}; pass one of them"
        )
    of_mha = checked_shape(batch, total_tokens, heads, block_size, q_len, dtypes)
    total, num_heads, kv_heads, *columns, _, dtype, cache_dtype, q_len = of_mha
    if num_heads // kv_heads > ROW_TILE:
        raise ValueError(
            f"num_heads: needs at most {ROW_TILE} heads per kv head, got {num_heads} for "
            f"{kv_heads}; cut the heads into several plans"
        )
    lists_and_dtypes = block_size, topk, dtype, cache_dtype
    return total, num_heads, kv_heads, *columns, *lists_and_dtypes, q_len, batch
