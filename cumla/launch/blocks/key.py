# SPDX-License-Identifier: Apache-2.0
"""The key of a plan for block-sparse attention: virtual requests, and how they are dealt out.

A virtual request is a query token of one kv head, whose pages are the blocks of its list.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd
from typing import TYPE_CHECKING

from cumla.launch.blocks.block_rows import ROW_BYTES, Tokens
from cumla.launch.blocks.choice import (
    RULES,
    few_form,
    gathered_cluster,
    gathered_ctas,
    is_whole,
    list_form,
    list_parts,
)
from cumla.launch.layouts import constant
from cumla.launch.mha.attention import LISTED, LISTED_TILES, WIDENED, WIDENED_TILES, tiles_spec
from cumla.launch.mha.attention_prefill import block_tokens, prefill_spec
from cumla.launch.mha.choice import RULES as MHA_RULES
from cumla.launch.mha.choice import Choice, choose
from cumla.launch.mha.key import MHAKey
from cumla.launch.mha.shape import E4M3
from cumla.launch.split.plan import BLOCK_TOKENS, ROW_GROUP, ROW_TILE, PlanLayout
from cumla.launch.split.plan import RULES as SPLIT_RULES

if TYPE_CHECKING:
    from typing import Any

    from cumla.launch.blocks.choice import FewForm, ListForm
    from cumla.launch.source import KernelSpec

__all__ = ["BlockKey", "TileKey"]

_ALIGNMENT = 256
_UNIT = constant("blocks/block_tiles", "mha::kUnit")  # keys of which a mask says how many are seen
_SLOT_BYTES = constant("blocks/block_places", "sizeof(Slot)")
_COUNTS_BYTES = constant("blocks/block_tiles", "sizeof(TileCounts)")
_TILE_TOKENS = constant("blocks/block_tiles", "mha::kTileTokens")  # at most
# Lists that block_attention reads: entries, and heads of a kv head; tokens of a block are whole
# chunks of e4m3 keys.
_ENTRIES, _HEADS, _CHUNK = (
    constant("blocks/block_attention", name)
    for name in ("kDecodeEntries", "kDecodeRows", "DecodeLayout<true, 4>::kChunk")
)

_GATHERED_ENTRIES = constant("blocks/block_attention_gathered", "kGatherEntries")
_GATHERED_COLUMNS = 128, 192, 256
_FEW_ENTRIES, _FEW_COLUMNS = (
    constant("blocks/block_attention_few", name) for name in ("kFewEntries", "kDecodeColumns")
)


@dataclass(frozen=True)
class _ListedKey(MHAKey):
    """A shape whose pages are blocks of lists."""

    @cached_property
    def form(self) -> str:
        """Return the form of loads: single rows for small blocks, boxes for others."""
        return "rows" if self.page_size <= RULES.row_tokens else super().form


@dataclass(frozen=True)
class BlockKey(_ListedKey):
    """The shape for which a plan of :func:`cumla.block_sparse_attention` is made.

    What kernels of attention see are virtual requests: `num_heads` are those of a kv head,
    `num_kv_heads` is 1, `page_size` the tokens of a block. `batch` are the query tokens, and
    `q_len` the kv heads.
    """

    topk: int = 1
    requests: int = 1
    is_causal: bool = True  # of the query tokens; virtual requests have one each
    query_len: int = 0  # tokens of each request, where q has an axis of requests
    rows_have_factors: bool = False  # rows of an e4m3 cache, each its own

    @classmethod
    def of(
        cls,
        tokens: int,
        kv_heads: int,
        heads_per_group: int,
        columns: tuple[int, int],
        block_size: int,
        dtypes: tuple[str, str],
        **more: Any,
    ) -> BlockKey:
        """Make a key from numbers of the call."""
        return cls(
            batch=tokens,
            total_tokens=tokens * kv_heads,
            num_heads=heads_per_group,
            num_kv_heads=1,
            head_dim=columns[0],
            head_dim_v=columns[1],
            page_size=block_size,
            dtype=dtypes[0],
            cache_dtype=dtypes[1],
            causal=False,
            q_len=kv_heads,
            **more,
        )

    @cached_property
    def choice(self) -> Choice:
        """The kernel for as many requests of one query token."""
        decode = _ListedKey(
            batch=self.total_tokens,
            total_tokens=self.total_tokens,
            num_heads=self.num_heads,
            num_kv_heads=1,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            page_size=self.page_size,
            dtype=self.dtype,
            cache_dtype=self.cache_dtype,
            causal=False,
            q_len=1,
            device=self.device,
            sm_count=self.sm_count,
            batch_invariant=self.batch_invariant,
        )
        return choose(decode)

    @cached_property
    def tile(self) -> TileKey | None:
        """The key of row tiles of several query tokens, where these have whole prompts."""
        heads, tile = self.num_heads, None
        if self.rows_have_factors:
            return None
        widens = self.is_short and self.cache_dtype == E4M3
        widened = RULES.widened_tokens * self.batch // self.page_size + self.requests
        if RULES.tile_heads >= heads >= RULES.tile_rows // _TILE_TOKENS:
            tile = TileKey(
                batch=self.requests,
                total_tokens=self.batch,
                num_heads=heads * self.q_len,
                num_kv_heads=self.q_len,
                head_dim=self.head_dim,
                head_dim_v=self.head_dim_v,
                page_size=self.page_size,
                dtype=self.dtype,
                cache_dtype=self.dtype if widens else self.cache_dtype,
                causal=False,
                q_len=self.query_len,
                device=self.device,
                sm_count=self.sm_count,
                topk=self.topk,
                widened=widened if widens else 0,
            )
        return tile if tile and tile.serves and not self.batch_invariant else None

    @property
    def is_short(self) -> bool:
        """Return whether block_attention has kernels for such lists."""
        return (
            self.kernel_tiles == (2, 2)
            and self.num_heads <= _HEADS
            and 0 < self.topk <= _ENTRIES
            and self.page_size % _CHUNK == 0
        )

    @cached_property
    def is_direct(self) -> bool:
        """Return whether block_attention serves these lists."""
        return self.is_short and self.tile is None

    @cached_property
    def gathered_columns(self) -> int:
        """Columns of the kernel of block_attention_gathered for these lists; 0: none."""
        serves = (
            self.page_size < RULES.gathered_tokens
            and self.num_heads <= _HEADS
            and 0 < self.topk <= _GATHERED_ENTRIES
            and not (self.is_short or self.tile or self.rows_have_factors)
        )
        columns = max(self.head_dim, self.head_dim_v)
        return next((n for n in _GATHERED_COLUMNS if serves and n >= columns), 0)

    @property
    def gathered_ctas(self) -> int:
        """Thread blocks of block_attention_gathered that a multiprocessor has at once."""
        size = self.num_places, self.cluster, self.sm_count
        return gathered_ctas(self.gathered_columns, *size)

    @cached_property
    def few(self) -> FewForm | None:
        """The form of block_attention_few for these lists; None: it does not serve them."""
        if (
            self.batch_invariant
            or self.rows_have_factors
            or self.topk > _FEW_ENTRIES
            or (self.head_dim, self.head_dim_v) != (_FEW_COLUMNS, _FEW_COLUMNS)
        ):
            return None
        size = self.num_places, self.topk * self.page_size
        return few_form(*size, self.cache_dtype == E4M3, self.sm_count)

    @property
    def cluster(self) -> int:
        """Thread blocks that share a list, if multiprocessors suffice."""
        if self.gathered_columns:
            if self.batch_invariant:
                return RULES.invariant_lists.ctas
            return gathered_cluster(self.num_places, self.topk * self.page_size, self.sm_count)
        if self.few is not None:
            return self.few.ctas
        return self.list_form.ctas

    @cached_property
    def list_form(self) -> ListForm:
        """The form of block_attention for these lists."""
        if self.batch_invariant:
            return RULES.invariant_lists
        return list_form(self.num_places, self.topk * self.page_size, self.sm_count)

    @property
    def list_blocks(self) -> int:
        """Blocks of 64 tokens of a full list."""
        return -(-self.topk * self.page_size // BLOCK_TOKENS)

    @property
    def list_cost(self) -> int:
        """Cost of a full list, in blocks."""
        return max(1, self.list_blocks) + SPLIT_RULES.fixed_cost

    @cached_property
    def num_places(self) -> int:
        """Virtual requests."""
        return self.total_tokens

    @property
    def pieces(self) -> int:
        """Parts of each batch-invariant virtual request."""
        return max(1, -(-self.list_blocks // self.piece_blocks))

    @cached_property
    def is_whole(self) -> bool:
        """Return whether no virtual request is split."""
        return is_whole(self.num_places, self.sm_count)

    @cached_property
    def parts(self) -> int:
        """Shares of the work of all lists."""
        if self.batch_invariant:
            return self.num_places * self.pieces
        return list_parts(self.num_places, self.list_blocks, self.sm_count)

    @cached_property
    def row_groups(self) -> int:
        """Groups of 16 rows in a tile."""
        if self.batch_invariant:
            return ROW_TILE // ROW_GROUP
        return 1 if self.choice.takes_few_rows else -(-self.num_heads // ROW_GROUP)

    @cached_property
    def cut_parts(self) -> int:
        """Parts that may have a piece of a virtual request."""
        is_cut = self.pieces > 1 if self.batch_invariant else self.parts > 1
        return self.parts if is_cut else 0

    @cached_property
    def num_tickets(self) -> int:
        """Places where thread blocks meet that share work."""
        return self.cut_parts

    @cached_property
    def layout(self) -> PlanLayout:
        """Offsets after the rows and pages of lists, and the size of all."""
        if self.tile:
            return replace(self.tile.layout, nbytes=self._rows + self.tile.nbytes)
        own = PlanLayout.of(self)
        nbytes = self._rows + self._pages + own.nbytes
        of_head = self.one_head.layout.nbytes if self.q_len > 1 else 0  # may have more parts
        return replace(own, nbytes=max(nbytes, of_head))

    @property
    def query_tokens(self) -> Tokens:
        """The query tokens."""
        return Tokens(self.batch, self.requests, self.is_causal)

    def rows_at(self, buffer: int) -> int:
        """Give the address of what each query token sees, the same for one of the kv heads."""
        return buffer

    def pages_at(self, buffer: int) -> int:
        """Give the address of the pages of virtual requests."""
        return buffer + self._rows

    def schedule_at(self, buffer: int) -> int:
        """Give the address of the schedule and the partial results."""
        return buffer + self._rows + self._pages

    @property
    def _rows(self) -> int:
        return _aligned(self.batch * ROW_BYTES)

    @property
    def _pages(self) -> int:
        return 0 if self.tile else _aligned(self.num_places * self.topk * 4)

    @cached_property
    def one_head(self) -> BlockKey:
        """The key of one of the kv heads, in the same buffer."""
        return replace(self, q_len=1, total_tokens=self.batch)


@dataclass(frozen=True)
class TileKey(MHAKey):
    """The shape of attention by row tiles of several query tokens, over the blocks of all of them.

    `batch` are the requests, and `page_size` the tokens of a block.
    """

    topk: int = 1
    widened: int = 0  # slots for widened blocks of e4m3 caches, if these are widened
    role: str = "full tiles"

    @property
    def variant(self) -> str:
        """The variant of the kernel: for lists of widened blocks, or of others."""
        return WIDENED if self.widened else LISTED

    @property
    def is_e4m3(self) -> bool:
        """Return whether keys and values are e4m3."""
        return self.cache_dtype == E4M3

    @property
    def row_tile(self) -> int:
        """Query rows of a row tile."""
        return RULES.e4m3_tile_rows if self.is_e4m3 else RULES.tile_rows

    @cached_property
    def _spec(self) -> KernelSpec | None:
        if self.kernel_tiles not in (WIDENED_TILES if self.widened else LISTED_TILES):
            return None
        if self.is_e4m3:
            return tiles_spec(self.dtype, self.kernel_tiles, "e4m3", LISTED)
        return prefill_spec(self.dtype, self.kernel_tiles, False, self.variant)

    @property
    def serves(self) -> bool:
        """Return whether a kernel has these columns and blocks, and tiles are worth it."""
        tiles = self.total_tokens // self.tile_tokens * self.num_kv_heads
        few, of = RULES.e4m3_tiles_of_sm if self.is_e4m3 else RULES.tiles_of_sm
        return (
            self._spec is not None
            and self.page_size % _UNIT == 0
            and self.total_tokens >= RULES.tiled_queries * self.batch
            and tiles * of >= self.sm_count * few
            and 0 < self.most_blocks * self.page_size <= RULES.most_tile_keys
            and self.num_places * self.num_kv_heads <= MHA_RULES.most_tiles
        )

    @cached_property
    def choice(self) -> Choice:
        """The kernel, and its row tiles."""
        assert self._spec is not None
        tiles = block_tokens(self.kernel_tiles)
        return Choice(self._spec, self.row_tile, gcd(self.page_size, tiles))

    @property
    def cut_parts(self) -> int:
        """Parts that may have a piece of a tile: none."""
        return 0

    @property
    def num_tickets(self) -> int:
        """Places where thread blocks meet: the counter of attention_prefill."""
        return 1

    @cached_property
    def parts(self) -> int:
        """Shares of the tiles of a kv head; attention_prefill has a counter instead."""
        return max(1, self.sm_count // self.num_kv_heads) if self.is_e4m3 else 1

    @property
    def grid(self) -> tuple[int, int, int]:
        """Thread blocks of attention."""
        return (1, self.parts, self.num_kv_heads) if self.is_e4m3 else (self.sm_count, 1, 1)

    @cached_property
    def tile_tokens(self) -> int:
        """Query tokens of a row tile."""
        return self.row_tile // self.heads_per_group

    @property
    def most_blocks(self) -> int:
        """Blocks of a row tile, at most."""
        return self.tile_tokens * self.topk

    @property
    def units(self) -> int:
        """Units of 64 keys of a block."""
        return self.page_size // _UNIT

    @cached_property
    def num_places(self) -> int:
        """Row tiles of a kv head: of requests, and of tokens before, between and after them."""
        return self.total_tokens // self.tile_tokens + 2 * self.batch + 1

    @property
    def lists(self) -> int:
        """Row tiles of all kv heads."""
        return self.num_places * self.num_kv_heads

    def pages_at(self, buffer: int) -> int:
        """Give the address of the pages of row tiles; `buffer` is where the schedule begins."""
        return buffer + self.layout.nbytes

    def seen_at(self, buffer: int) -> int:
        """Give the address of what query tokens see of each unit."""
        return self.pages_at(buffer) + _aligned(self.lists * self.most_blocks * 4)

    def units_at(self, buffer: int) -> int:
        """Give the address of the numbers of units."""
        return self.seen_at(buffer) + self.lists * self.most_blocks * self.units * _TILE_TOKENS

    def count_at(self, buffer: int) -> int:
        """Give the address of the number of row tiles of a kv head."""
        return self.units_at(buffer) + self.lists * 4

    def counts_at(self, buffer: int) -> int:
        """Give the address of struct TileCounts."""
        return self.count_at(buffer) + 4

    def left_at(self, buffer: int) -> int:
        """Give the address of the row tiles of kv heads that are left."""
        return self.counts_at(buffer) + _COUNTS_BYTES

    def bases_at(self, buffer: int) -> int:
        """Give the address of the first slots of requests."""
        return self.left_at(buffer) + 4 * self.lists

    def slots_at(self, buffer: int) -> int:
        """Give the address of the blocks that have slots."""
        return buffer + _aligned(self.bases_at(0) + 4 * self.batch)

    def keys_at(self, buffer: int) -> int:
        """Give the address of widened keys."""
        return buffer + _aligned(self.slots_at(0) + self.widened * _SLOT_BYTES)

    def values_at(self, buffer: int) -> int:
        """Give the address of widened values."""
        return self.keys_at(buffer) + self._widened_bytes(self.head_dim)

    def _widened_bytes(self, columns: int) -> int:
        return _aligned(2 * self.widened * self.num_kv_heads * self.page_size * columns)

    @property
    def nbytes(self) -> int:
        """Size of the schedule, of all that block_tiles writes, and of widened blocks."""
        if self.widened:
            return self.values_at(0) + self._widened_bytes(self.head_dim_v)
        return _aligned(self.count_at(0) + 4)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
