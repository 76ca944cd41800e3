# SPDX-License-Identifier: Apache-2.0
"""Choice of kernel and row tiles for a shape: the only place where that is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, NamedTuple

from cumla.launch.mha import attention, attention_decode, attention_prefill
from cumla.launch.mha.attention import (
    FEW_OF,
    FEW_ROWS,
    FEW_TILES,
    PAIRED,
    PAIRED_MASKED,
    PAIRED_TILES,
    tiles_spec,
)
from cumla.launch.mha.attention_decode import CHUNK_TOKENS, decode_spec
from cumla.launch.mha.attention_prefill import (
    SPLIT_ROWS,
    block_tokens,
    prefill_spec,
    split_spec,
    tile_rows,
)
from cumla.launch.mha.attention_simt import BY_VARIANT as SIMT_SPECS
from cumla.launch.mha.shape import E4M3
from cumla.launch.split.plan import BLOCK_TOKENS, ROW_TILE

if TYPE_CHECKING:
    from cumla.launch.mha.shape import MHAShape
    from cumla.launch.source import KernelSpec

__all__ = ["RULES", "Choice", "Rules", "choose", "with_caps"]

_WITH_CAPS = attention.WITH_CAPS | attention_decode.WITH_CAPS


@dataclass(frozen=True)
class Rules:
    """The numbers of all choices, each with its reason; docs/kernels has what was measured."""

    # Query rows that are worth a thread block of attention_prefill: half of its smallest tile.
    full_rows: int = 128
    # Share of the multiprocessors that have a row tile of 128 rows, as a fraction, from which on
    # attention_prefill splits keys; and rows of a request from which on it always does. With fewer,
    # of requests of 1,024 to 4,096 tokens, it takes 6 to 9 us more than attention.
    split_share: tuple[int, int] = (3, 4)
    split_rows: int = 512
    # Waves of whole row tiles, as a share of those that the last one ends, from which on keys are
    # split: 1.03 waves over 32,768 tokens take 713 us, split 414; 2.5 over 8,192 take 274 and 255.
    most_waste: tuple[int, int] = (5, 4)
    # Pairs of kv heads of requests for each multiprocessor from which on a thread block reads both:
    # 64 requests of 8 kv heads take 1 to 3 % less, 16 of them 4 % more; between was not measured.
    paired_waves: float = 1.9
    # Their parts, as a fraction of those that fill the multiprocessors, at least, that divide the
    # requests: those of equal lengths are not cut then. 25 parts of 100 requests took 11 % longer.
    least_whole_share: tuple[int, int] = (15, 16)
    # Query rows of a request that are drafts, at most, and row tiles for each multiprocessor, up to
    # which keys are split though whole tiles would fill it: 20 requests 195 us for 240.
    most_draft_rows: int = 256
    few_waves: int = 4
    # Query tokens of a request, on average, up to which a batch is taken to decode with drafts;
    # with more, some requests may be chunks of prompts, whose full tiles attention_prefill takes.
    most_drafts: int = 4
    # The same of a batch whose keys are split for the sake of its chunks: 32 requests of 12 tokens
    # over 4,096 take 139 us for 134; 32 of one token beside 480 over 8,192 take 233 for 300.
    split_tokens: int = 8
    # Share of a thread block's work that a short tile beside full tiles may take, as a fraction,
    # before it is split: the short tiles end with the full ones.
    short_share: tuple[int, int] = (3, 4)
    # Multiprocessors for each thread block, at most, where rows of 64 columns keep loads waiting:
    # attention_decode, whose warps each load for themselves, is faster.
    waiting_share: int = 2
    # KV blocks that storing and combining a piece costs, beside one for each 16 query rows: about
    # a microsecond, in which two blocks are read.
    piece_cost: int = 2
    # KV blocks that a row tile costs beside its own, where short rests are beside long prefixes.
    # With 2, of 14 shapes two take 8 and 11 % less, one 12 % more, the others -4 to +2 %.
    fixed_cost_of_prefixes: int = 6
    # KV blocks between a cut and the ends of its row tile, at least.
    min_blocks: int = 2
    # Batch-invariant requests are split at multiples of this number of KV blocks. With half as
    # many, 128 requests of 4,096 tokens take 9 % longer, and one of 131,072 has twice as many
    # pieces, which one thread block combines; one of 8,192 takes 6 us less.
    piece_blocks: int = 32
    # Row tiles that a counter of 32 bits numbers.
    most_tiles: int = 1 << 30


RULES = Rules()


class Choice(NamedTuple):
    """A kernel, and how it divides the work."""

    spec: KernelSpec
    row_tile: int = ROW_TILE  # query rows of a thread block
    box_rows: int = 1  # rows of a KV block that one load brings
    is_split: bool = False  # attention_prefill divides the keys of a row tile, too
    is_mixed: bool = False  # the full tiles of a mixed batch have a schedule of their own, beside
    box_heads: int = 1  # kv heads that one load brings: those of a thread block

    @property
    def takes_full_tiles(self) -> bool:
        """Return whether attention_prefill takes whole row tiles from a list."""
        return self.spec.stem == "attention_prefill" and not self.is_split

    @property
    def takes_few_rows(self) -> bool:
        """Return whether attention_decode takes tiles of 8 or 16 query rows."""
        return self.spec.stem == "attention_decode"

    @property
    def takes_single_rows(self) -> bool:
        """Return whether each warp of attention_simt takes a row, without tensor cores."""
        return self.spec.stem == SIMT_SPECS[""].stem


def choose(key: MHAShape) -> Choice:
    """Choose by dtype, query rows and pages."""
    boxes = gcd(key.page_size, BLOCK_TOKENS)
    if key.dtype == "float32":
        return Choice(SIMT_SPECS[key.variant], box_rows=boxes)
    if key.role == "prefixes":  # few rows of rests beside many of prefixes, all of them split
        return Choice(_tiles(key), box_rows=boxes)
    rows = key.total_tokens * key.heads_per_group
    is_full = rows >= RULES.full_rows * key.batch
    is_uniform = key.q_len > 0 or key.batch == 1
    full = _full_tiles(key)
    split = _split_tiles(key, rows) if key.role == "batch" else None
    fills = (is_full or not is_uniform) and _fill(key, rows)
    if split and (not fills or (is_uniform and _are_drafts(key, rows)) or _waste(key, rows)):
        return split
    if full and (key.role == "full tiles" or (is_uniform and is_full and _fill(key, rows))):
        return full
    few = _few_rows(key)
    if few:
        return few
    has_chunks = _has_chunks(key, RULES.most_drafts)
    is_mixed = bool(full) and not is_uniform and (has_chunks or is_full) and _fill(key, rows)
    if _pairs(key) and not is_mixed:
        variant = PAIRED_MASKED if key.masked else PAIRED
        spec = tiles_spec(key.dtype, key.kernel_tiles, "boxes", variant)
        return Choice(spec, box_rows=boxes, box_heads=2)
    if _has_few(key):
        spec = tiles_spec(key.dtype, key.kernel_tiles, "boxes", FEW_OF[key.variant])
        return Choice(spec, FEW_ROWS, boxes)
    return Choice(_tiles(key), box_rows=boxes, is_mixed=is_mixed)


def with_caps(spec: KernelSpec) -> KernelSpec:
    """Look up the kernel that takes a softcap and writes float32, if `spec` does not."""
    return _WITH_CAPS.get(spec, attention_prefill.with_caps(spec))


def _split_tiles(key: MHAShape, rows: int) -> Choice | None:
    """Row tiles of attention_prefill with split keys, if they gain: few tiles only if all are full.

    Fewer, of short requests, end later than those of attention: they leave larger pieces.
    """
    of_request = rows // max(key.batch, 1)
    tiles = key.batch * -(-of_request // SPLIT_ROWS) * key.num_kv_heads
    most_of, whole = RULES.split_share
    gains = tiles * whole >= most_of * key.sm_count or of_request >= RULES.split_rows
    gains &= of_request > ROW_TILE
    gains |= _has_chunks(key, RULES.split_tokens) and _rows_of_chunks(key) >= RULES.split_rows
    if not gains or key.cache_dtype != key.dtype or key.form == "rows":
        return None
    spec = None if key.batch_invariant else split_spec(key.dtype, key.kernel_tiles, key.variant)
    boxes = gcd(key.page_size, block_tokens(key.kernel_tiles))
    return None if spec is None else Choice(spec, SPLIT_ROWS, boxes, is_split=True)


def _pairs(key: MHAShape) -> bool:
    """Return whether a thread block reads two kv heads: many whole requests keep memory busy."""
    pages = key.form == "pages" and key.page_size > 0 and key.cache_dtype == key.dtype
    plain = not (key.batch_invariant or key.has_window or key.bias) and key.num_kv_heads % 2 == 0
    few = key.total_tokens * key.heads_per_group <= ROW_TILE * key.batch
    return (
        pages
        and plain
        and key.role == "batch"
        and key.kernel_tiles in PAIRED_TILES
        and few
        and key.batch * key.num_kv_heads >= RULES.paired_waves * 2 * key.sm_count
    )


def _has_few(key: MHAShape) -> bool:
    """Return whether row tiles have so few rows that each thread of attention has one of them."""
    tokens = key.q_len or (1 if key.total_tokens <= key.batch else key.total_tokens)
    return (
        tokens * key.heads_per_group <= FEW_ROWS
        and key.kernel_tiles in FEW_TILES
        and key.cache_dtype == key.dtype
        and key.form != "rows"
        and not (key.masked or key.batch_invariant)
    )


def _tiles(key: MHAShape) -> KernelSpec:
    """Look up the kernel that serves all shapes of 16-bit queries."""
    form = "e4m3" if key.cache_dtype == E4M3 else "rows" if key.form == "rows" else "boxes"
    return tiles_spec(key.dtype, key.kernel_tiles, form, key.variant)


def _full_tiles(key: MHAShape) -> Choice | None:
    """Full row tiles, if a kernel serves these pages."""
    if key.cache_dtype != key.dtype:
        return None
    spec = prefill_spec(key.dtype, key.kernel_tiles, key.form == "rows", key.variant)
    if spec is None:
        return None
    boxes = gcd(key.page_size, block_tokens(key.kernel_tiles))
    return Choice(spec, tile_rows(key.kernel_tiles, key.form), boxes)


def _fill(key: MHAShape, rows: int) -> bool:
    """Return whether row tiles can fill the multiprocessors without being split."""
    return (
        rows * key.num_kv_heads >= RULES.full_rows * key.sm_count
        and (rows // ROW_TILE + key.batch) * key.num_kv_heads <= RULES.most_tiles
        and not key.batch_invariant
    )


def _has_chunks(key: MHAShape, drafts: int) -> bool:
    """Return whether chunks of prompts may be among requests that have so many drafts at most."""
    is_mixture = key.q_len == 0 and key.batch > 1 and not key.has_window
    return is_mixture and key.total_tokens > drafts * key.batch


def _rows_of_chunks(key: MHAShape) -> int:
    """Count query rows of a kv head beyond those of one token of each request."""
    return (key.total_tokens - key.batch) * key.heads_per_group


def _waste(key: MHAShape, rows: int) -> bool:
    """Return whether the last wave of whole row tiles leaves many multiprocessors without one.

    All requests are taken to have equally many rows, or, with few, one to have most of them.
    """
    size, of_request = tile_rows(key.kernel_tiles, key.form), rows // max(key.batch, 1)
    if of_request >= RULES.full_rows:
        tiles = key.batch * -(-of_request // size)
    else:
        tiles = -(-_rows_of_chunks(key) // size)
    tiles *= key.num_kv_heads
    most, of = RULES.most_waste
    waves = -(-tiles // max(key.sm_count, 1))
    return not key.has_window and waves * key.sm_count * of >= tiles * most


def _are_drafts(key: MHAShape, rows: int) -> bool:
    """Return whether whole row tiles would end as late as the longest request, or with few CTAs."""
    few = rows <= RULES.most_draft_rows * key.batch and key.batch > 1
    return few and rows * key.num_kv_heads <= RULES.few_waves * SPLIT_ROWS * key.sm_count


def _few_rows(key: MHAShape) -> Choice | None:
    """Tiles of few rows: of e4m3 keys, or where a load brings little."""
    is_e4m3 = key.cache_dtype == E4M3
    waits = key.batch * key.num_kv_heads >= key.sm_count // RULES.waiting_share
    is_narrow = key.kernel_tiles == (1, 1) and waits
    more = 0 if key.q_len else (key.total_tokens - key.batch) * key.heads_per_group
    gains = not key.has_window and (key.form != "pages" or is_narrow) and more <= ROW_TILE
    if key.batch_invariant or key.masked or not (is_e4m3 or gains):
        return None
    tokens = key.q_len or -(-key.total_tokens // max(key.batch, 1))
    found = decode_spec(
        key.dtype, key.kernel_tiles, tokens * key.heads_per_group, is_e4m3, key.variant
    )
    if found is None:
        return None
    return Choice(found[1], found[0], gcd(key.page_size, CHUNK_TOKENS))
