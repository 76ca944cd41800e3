# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mla/mla_attention_schedule.cu, and of the decode kernels over ragged queries.

:func:`schedule` is the schedule's arithmetic in NumPy: the kernel's oracle.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cumla.launch.kernel import Launch
from cumla.launch.mla.mla_decode import decode_launch, ragged_spec
from cumla.launch.mla.mla_decode_fp8 import decode_fp8_launch
from cumla.launch.source import KernelSpec
from cumla.launch.split.mla_schedule import FIXED_COST, MIN_BLOCKS, MIN_SHARE, piece_cost
from cumla.launch.split.plan import (
    BLOCK_TOKENS,
    MOST_TOKENS,
    NARROW_ROWS,
    ROW_GROUP,
    ROW_TILE,
    TILE_PLACE_BYTES,
    PlanKey,
)

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.mla.mla_decode import DecodeArguments

__all__ = [
    "SPECS",
    "MLAAttentionKey",
    "TileSchedule",
    "attention_launch",
    "attention_schedule_launch",
    "attention_spec",
    "schedule",
]

SPECS = (
    KernelSpec(
        stem="mla_attention_schedule",
        package="cumla.cuda.mla",
        entry="mla_attention_schedule",
        function="mla_attention_schedule",
        params="MlaAttentionScheduleParams",
        threads=1024,
    ),
)


@dataclass(frozen=True)
class MLAAttentionKey(PlanKey):
    """The shape for which a plan of :func:`cumla.mla_attention` is made.

    Attributes
    ----------
    batch : int
        Requests.
    total_tokens : int
        Rows of ``q`` (total_tokens, num_heads, 576): the most query tokens of all requests.
    num_heads, num_kv_heads : int
        num_kv_heads divides num_heads.
    page_size : int
        Tokens of a cache page.
    dtype : str
        ``"bfloat16"`` or ``"float16"``.
    causal : bool
        Bottom-right causal mask.
    device : int or None
        CUDA ordinal; None for arrays on the CPU, which need no plan.
    sm_count : int
        Multiprocessors of that device, 0 for the CPU.
    cache : str
        One of CACHES of :mod:`cumla.launch.split.plan`.
    """

    batch: int
    total_tokens: int
    num_heads: int
    num_kv_heads: int
    page_size: int
    dtype: str
    causal: bool
    device: int | None
    sm_count: int
    cache: str = "same"

    @cached_property
    def tiles(self) -> int:
        """Thread blocks that work on the same part: those of each kv head."""
        return self.num_kv_heads * self.row_tiles

    @property
    def q_len(self) -> int:
        """Query tokens that the kernel may look at."""
        return self.total_tokens

    @property
    def row_tiles(self) -> int:
        """Thread blocks that share the row tile at each place of the schedule."""
        return 1 if self.cache == "same" else ROW_TILE // NARROW_ROWS[-1]

    @property
    def fetches_ahead(self) -> bool:
        """Whether the kernel has L2 fetch blocks before it loads them."""
        return self.cache == "same"

    @cached_property
    def num_places(self) -> int:
        """Row tiles of a kv head that all requests may have together, however long each is."""
        return self.total_tokens * self.heads_per_group // ROW_TILE + self.batch

    @cached_property
    def places_bytes(self) -> int:
        """Size of the schedule's list of row tiles."""
        return self.num_places * TILE_PLACE_BYTES

    @property
    def row_groups(self) -> int:
        """Groups of 16 rows of a thread block: what it stores of its partial results."""
        return ROW_TILE // self.row_tiles // ROW_GROUP

    @cached_property
    def parts(self) -> int:
        """Shares into which the KV blocks of all tiles are dealt: as many as fill the GPU once."""
        return max(1, self.sm_count // self.tiles)


def attention_spec(key: MLAAttentionKey, form: str | None = None) -> KernelSpec:
    """Look up the kernel of a shape's dtype, for caches of a form; by default in one array."""
    return ragged_spec(key.dtype, form or key.form)


_PARAMS = struct.Struct("<QqQqQqQQQ12i")


def attention_schedule_launch(
    key: MLAAttentionKey,
    buffer: int,
    qo_indptr: ArrayView,
    kv_lens: ArrayView,
    kv_indptr: ArrayView | None,
) -> Launch:
    """Describe how to compute the schedule for these lengths into the plan's buffer.

    Parameters
    ----------
    key : MLAAttentionKey
        The plan's shape.
    buffer : int
        Address of the plan's buffer.
    qo_indptr, kv_lens : ArrayView
        ``(batch + 1,)`` and ``(batch,)`` int32.
    kv_indptr : ArrayView or None
        ``(batch + 1,)`` int32 where pages come as a list, None where as a block table.

    Returns
    -------
    Launch
    """
    layout = key.layout
    values = (
        qo_indptr.ptr,
        qo_indptr.strides[0] // 4,
        kv_lens.ptr,
        kv_lens.strides[0] // 4,
        0 if kv_indptr is None else kv_indptr.ptr,
        0 if kv_indptr is None else kv_indptr.strides[0] // 4,
        buffer + layout.places,
        buffer + layout.parts,
        buffer + layout.tickets,
        key.batch,
        key.total_tokens,
        key.num_places,
        key.parts,
        key.num_tickets,
        key.heads_per_group,
        key.page_size,
        key.causal,
        FIXED_COST,
        piece_cost(key.row_groups),
        MIN_BLOCKS,
        MIN_SHARE,
    )
    return Launch(SPECS[0], (1, 1, 1), _PARAMS, values)


def attention_launch(
    key: MLAAttentionKey,
    buffer: int,
    arguments: DecodeArguments,
    out: ArrayView,
    lse: ArrayView,
) -> Launch:
    """Describe how to attend to the blocks of every part; split tiles go to the plan's buffer.

    Parameters
    ----------
    key : MLAAttentionKey
        The plan's shape.
    buffer : int
        Address of the plan's buffer, which holds a schedule.
    arguments : Arguments
        Checked: q and q_rope ``(total_tokens, num_heads, columns)``, block_table ``(batch,
        max_pages)`` or the list of pages ``(pages,)``.
    out, lse : ArrayView
        ``(total_tokens, num_heads, 512)`` and ``(total_tokens, num_heads)``.

    Returns
    -------
    Launch
    """
    pages = arguments.block_table
    if len(pages.shape) == 1:  # a row of a table whose rows are a page apart
        pages = pages._replace(shape=(1, *pages.shape), strides=(4, 4))
    one_request = arguments._replace(
        q=_with_batch(arguments.q), q_rope=_with_batch(arguments.q_rope), block_table=pages
    )
    tokens, heads = lse.shape
    per_head = lse._replace(shape=(1, heads, tokens), strides=(0, *lse.strides[::-1]))
    describe = decode_launch if key.cache == "same" else decode_fp8_launch
    return describe(key, buffer, one_request, _with_batch(out), per_head)


def _with_batch(view: ArrayView) -> ArrayView:
    """Put an axis of length 1 in front."""
    return view._replace(shape=(1, *view.shape), strides=(0, *view.strides))


class TileSchedule(NamedTuple):
    """Who works on which KV blocks.

    Attributes
    ----------
    places : numpy.ndarray
        ``(tiles, 5)`` int64: tokens, first_row, q_len, q_begin and pages of the row tile at each
        place.
    bounds : numpy.ndarray
        ``(parts + 1, 2)`` int32: (place, block) where each part begins; part i ends where i + 1
        begins.
    """

    places: np.ndarray
    bounds: np.ndarray


def schedule(
    qo_indptr: np.ndarray,
    kv_lens: np.ndarray,
    kv_indptr: np.ndarray | None,
    key: MLAAttentionKey,
) -> TileSchedule:
    """Deal the KV blocks of all row tiles out to the parts; the mirror of the kernel.

    Parameters
    ----------
    qo_indptr, kv_lens, kv_indptr : numpy.ndarray
        As of :func:`attention_schedule_launch`.
    key : MLAAttentionKey
        The plan's shape.

    Returns
    -------
    TileSchedule
        The tiles dealt out like cards; where that leaves a part too dear, equal shares of the
        summed cost, which cut a tile where one ends.
    """
    group = key.heads_per_group
    indptr = np.asarray(qo_indptr, np.int64)
    begins = np.clip(indptr[:-1], 0, key.total_tokens)
    counts = np.maximum(np.minimum(indptr[1:], key.total_tokens) - begins, 0)
    tokens = np.maximum(np.asarray(kv_lens, np.int64), 0)
    pages = np.arange(key.batch)
    if kv_indptr is not None:
        pages = np.asarray(kv_indptr, np.int64)[:-1]
        tokens = np.minimum(tokens, np.maximum(np.diff(kv_indptr), 0) * key.page_size)
    tokens = np.minimum(tokens, MOST_TOKENS)

    tiles_of = -(-counts * group // ROW_TILE)
    request = np.repeat(np.arange(key.batch), tiles_of)
    index = np.arange(len(request)) - np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of)
    request, index = request[: key.num_places], index[: key.num_places]
    columns = (tokens[request], index * ROW_TILE, counts[request], begins[request], pages[request])
    dealt = [np.arange(part, len(request), key.parts) for part in range(key.parts)]
    places = np.stack(columns, axis=1)[np.concatenate(dealt)]

    last_row = np.minimum(places[:, 1] + ROW_TILE, places[:, 2] * group) - 1
    hidden = places[:, 2] - 1 - last_row // group if key.causal else 0
    blocks = -(-np.maximum(places[:, 0] - hidden, 0) // BLOCK_TOKENS)
    ends = np.cumsum(blocks + FIXED_COST)
    total = int(ends[-1]) if len(ends) else 0
    share = max(-(-total // key.parts), MIN_SHARE)
    bounds = np.zeros((key.parts + 1, 2), np.int32)
    bounds[:, 0] = np.cumsum([0, *map(len, dealt)])
    prices = np.diff(np.append(0, ends)[bounds[:, 0]])
    if prices.max() <= share + FIXED_COST + 2 * piece_cost(key.row_groups):
        return TileSchedule(places, bounds)
    bounds[:, 0] = len(places)
    for part, at in enumerate(range(0, min(key.parts * share, total), share)):
        place = int(np.searchsorted(ends, at, side="right"))
        block = at - int(ends[place] - blocks[place] - FIXED_COST)
        if block < MIN_BLOCKS:
            bounds[part] = place, 0
        elif blocks[place] - block < MIN_BLOCKS:
            bounds[part] = place + 1, 0
        else:
            bounds[part] = place, block
    return TileSchedule(places, bounds)
