# SPDX-License-Identifier: Apache-2.0
"""Which kernels serve lists, scores and choices of blocks, and how they divide the work."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

__all__ = [
    "RULES",
    "EachForm",
    "FewForm",
    "ListForm",
    "Rules",
    "each_form",
    "each_forms",
    "few_form",
    "gathered_cluster",
    "gathered_ctas",
    "is_whole",
    "list_ctas",
    "list_form",
    "list_parts",
    "pooled_units",
    "prompts_steps",
    "scores_ctas",
    "select_threads",
    "warp_blocks",
]


class EachForm(NamedTuple):
    """A form of block_scores_each."""

    warps: int  # of a thread block
    ctas: int  # thread blocks on a multiprocessor, at least
    blocks: int  # of all requests, visible or not, for each multiprocessor, at most


class FewForm(NamedTuple):
    """A form of block_attention_few."""

    warps: int  # of a thread block
    ctas: int  # thread blocks of a list, which are a cluster
    chunk: int  # tokens that a warp takes at once
    chunks: int = 1  # that a warp takes, at most

    @property
    def tokens(self) -> int:
        """Tokens of a list, at most."""
        return self.warps * self.ctas * self.chunk * self.chunks


class ListForm(NamedTuple):
    """A form of block_attention."""

    warps: int  # of a thread block
    ctas: int  # thread blocks of a list, which are a cluster
    fill: float  # share of multiprocessors that all thread blocks are, at most
    least: int = 0  # tokens of a list, at least


_INVARIANT_LISTS = ListForm(4, 2, inf)


@dataclass(frozen=True)
class Rules:
    """The numbers of all choices for blocks, each with its reason and its file in records/.

    Those that name no file were set in development, and no figures were kept.
    """

    # Query rows of a row tile of 16-bit keys, and of e4m3 keys: tiles of the kernels that attend.
    tile_rows: int = 128
    e4m3_tile_rows: int = 64
    # Heads of a kv head, at most: with more, a tile has so few query tokens that they share little.
    tile_heads: int = 32
    # Query tokens of a request, on average, from which on neighbours are united: decoding and
    # drafts have none.
    tiled_queries: int = 8
    # Row tiles of all kv heads for each multiprocessor, at least, as a fraction: with fewer, lists
    # that are split among all multiprocessors end earlier (block-prompts.json). Tiles of e4m3 keys
    # have half the rows.
    tiles_of_sm: tuple[int, int] = (1, 2)
    e4m3_tiles_of_sm: tuple[int, int] = (1, 1)
    # Blocks of e4m3 lists by themselves, and blocks of a row tile, that take as long: lists that
    # share less are left by block_tiles (block-prompts.json: 5.0 and 12.7 ns a block).
    left: tuple[int, int] = (5, 2)
    # Cached tokens that are widened, for each query token: their copies take less memory than q.
    widened_tokens: int = 4
    # Keys of a tile, at most: their numbers have 32 bits, and the last block may go past the end.
    most_tile_keys: int = (1 << 31) - 128
    # Forms of block_attention: the first that suffices. A thread block of eight warps has a
    # multiprocessor for itself; clusters of more than two such, or of four thread blocks, that
    # ask for more multiprocessors take two turns, as some parts of the GPU have no place for them.
    # Of two warps each, more lists run at once. Clusters of 6 serve long lists faster than of 3
    # with eight warps, and 2,048 tokens of e4m3 slower (block-decode.json).
    lists: tuple[ListForm, ...] = (
        ListForm(8, 8, 0.775),
        ListForm(4, 8, 1),
        ListForm(4, 4, 0.775),
        ListForm(4, 6, 1.5, 6144),
        ListForm(8, 3, 0.775),
        ListForm(4, 2, 1),
        ListForm(4, 1, 1.25),
        ListForm(2, 1, inf),
    )
    # The form for batch-invariant lists: a compromise, as it may not depend on the batch.
    invariant_lists: ListForm = _INVARIANT_LISTS
    # Tokens of a block below which block_attention_gathered serves lists: row tiles and TMA need
    # longer runs of rows.
    gathered_tokens: int = 64
    # Thread blocks that may share a list of block_attention_gathered. With more of them than
    # multiprocessors, all take longer; of 16 they may be a half at most (block-gathered.json).
    gathered_clusters: tuple[int, ...] = (16, 8, 4, 3, 2, 1)
    # Thread blocks of a list of 256 columns, of which each has a multiprocessor and three chunks of
    # a warp there, if multiprocessors suffice, or half of them for 8 and 16. Else two share one,
    # with a chunk of a warp each (block-gathered.json).
    alone: tuple[int, ...] = (1, 2, 8, 16)
    large_fill: float = 0.5
    # Forms of block_attention_few: the first that suffices. Few lists of many thread blocks with a
    # chunk of 16 tokens each are fastest; clusters of 16 thread blocks are slower with 8 lists.
    few: tuple[FewForm, ...] = (
        *(FewForm(8, ctas, 16) for ctas in (2, 4, 8, 16)),
        FewForm(8, 8, 16, chunks=2),
    )
    few_e4m3: tuple[FewForm, ...] = (
        *(FewForm(8, ctas, 16) for ctas in (2, 4, 8, 16)),
        FewForm(8, 16, 32),
    )
    # Share of multiprocessors that these may have, at most. Clusters of 8 on all of them take two
    # turns, as some parts of the GPU have no place for two (block-decode.json).
    few_fill: float = 0.5
    # Tokens of a thread block that shares a list, at least.
    least_tokens: int = 64
    # Tokens of a block, at most, that attention copies by rows: lists of 512 blocks of 8 tokens
    # take a third less than by boxes, which one thread queues; of 16 as long (block-groups.json).
    row_tokens: int = 8
    # Warps of block_attention on a multiprocessor.
    sm_warps: int = 8
    # Blocks of 64 tokens of a part, at least, where there are fewer virtual requests than
    # multiprocessors: as few as the kernel splits.
    least_part: int = 2
    # Share of busy multiprocessors from which on no virtual request is split.
    good_fill: float = 0.85
    # Thread blocks of block_scores on a multiprocessor. A row of e4m3 with up to so many columns
    # has half the bytes, so more rows must be on the way (block-prompts.json).
    scores_ctas: int = 2
    e4m3_scores_ctas: int = 3
    e4m3_scores_columns: int = 128
    # Keys of a warp of block_scores, about, where thread blocks take turns.
    warp_keys: int = 256
    # Turns, below which all thread blocks of block_scores are on the GPU at once, as the last turn
    # would be short (block-prompts.json).
    turns: int = 2
    # Warps of block_scores_few, keys of a stage of a warp's ring, and its stages. More warps, more
    # stages, and copies of fewer keys take longer where there are many keys (block-prompts.json).
    scores_rings: tuple[int, int, int] = (8, 32, 2)
    e4m3_scores_rings: tuple[int, int, int] = (16, 32, 2)
    # Blocks of a warp of block_scores_few from which on half of the warps score all of them: memory
    # delivers fewer streams faster (block-prompts.json).
    many_blocks: int = 24
    # Forms of block_scores_each, the first that serves. More blocks have shares of a warp, and wide
    # tables of which little is visible would have thread blocks without work (block-scores.json).
    each: tuple[EachForm, ...] = (EachForm(8, 1, 1),)
    each_e4m3: tuple[EachForm, ...] = EachForm(8, 1, 1), EachForm(4, 8, 8)
    # Keys of a block for block_scores_each, at least, so that all warps have some.
    each_keys: int = 128
    # Steps of 64 keys of a thread block of block_scores_prompts, at least: it loads up to 64 KB of
    # query rows first. With two turns of thread blocks all take longer.
    prompts_least: int = 8
    # At most, whatever the table's width: what is visible is its beginning, and thread blocks
    # behind that have no work.
    prompts_most: int = 64
    # Units of 64 keys of all requests, visible or not, up to which a thread block of
    # block_scores_pooled takes so many; those that nobody sees take as long as their thread blocks.
    pooled: tuple[tuple[float, int], ...] = (1056, 1), (8192, 2), (inf, 4)
    # Threads of select_blocks that hold the candidates of a row: the fewest that can.
    select_threads: tuple[int, ...] = (32, 128, 512)


RULES = Rules()
_MOST_RANGES = 65535  # thread blocks along y of a grid


def list_form(lists: int, tokens: int, sm_count: int) -> ListForm:
    """Choose the form of block_attention for lists of so many tokens."""
    most = max(1, tokens // RULES.least_tokens)
    return next(
        form
        for form in RULES.lists
        if form.ctas <= most and tokens >= form.least and lists * form.ctas <= form.fill * sm_count
    )


def list_ctas(warps: int) -> int:
    """Choose the thread blocks of block_attention, of so many warps, on a multiprocessor."""
    return RULES.sm_warps // warps


def gathered_cluster(lists: int, tokens: int, sm_count: int) -> int:
    """Choose the thread blocks that share a list of block_attention_gathered."""
    most = max(min(tokens // RULES.least_tokens, sm_count // max(lists, 1)), 1)
    first, *others = RULES.gathered_clusters
    is_few = first <= most and lists * first <= RULES.large_fill * sm_count
    return first if is_few else next(n for n in others if n <= most)


def gathered_ctas(columns: int, lists: int, cluster: int, sm_count: int) -> int:
    """Choose the thread blocks of block_attention_gathered that a multiprocessor has at once."""
    fill = 1 if cluster < 8 else RULES.large_fill
    alone = columns > 192 and cluster in RULES.alone and lists * cluster <= fill * sm_count
    return 1 if alone else 2


def few_form(lists: int, tokens: int, is_e4m3: bool, sm_count: int) -> FewForm | None:
    """Choose the form for lists of so many tokens; None: too many."""
    forms = RULES.few_e4m3 if is_e4m3 else RULES.few
    return next(
        (
            form
            for form in forms
            if form.tokens >= tokens and lists * form.ctas <= RULES.few_fill * sm_count
        ),
        None,
    )


def is_whole(requests: int, sm_count: int) -> bool:
    """Whether no virtual request is split: so many fill the multiprocessors evenly."""
    waves = -(-requests // sm_count)
    return requests >= RULES.good_fill * waves * sm_count


def list_parts(requests: int, list_blocks: int, sm_count: int) -> int:
    """Choose the shares of the work of all lists, of so many blocks of 64 tokens each."""
    if is_whole(requests, sm_count):
        return min(requests, sm_count)
    equal = sm_count // requests * requests if requests else 1
    most = max(1, list_blocks // RULES.least_part) * max(1, requests)
    return min(equal if equal >= RULES.good_fill * sm_count else sm_count, most)


def scores_ctas(is_e4m3: bool, columns: int) -> int:
    """Choose the thread blocks of block_scores that a multiprocessor has at once."""
    has_more = is_e4m3 and columns <= RULES.e4m3_scores_columns
    return RULES.e4m3_scores_ctas if has_more else RULES.scores_ctas


def each_forms(is_e4m3: bool) -> tuple[EachForm, ...]:
    """List the forms of block_scores_each."""
    return RULES.each_e4m3 if is_e4m3 else RULES.each


def each_form(is_e4m3: bool, blocks: int, block_size: int, sm_count: int) -> EachForm | None:
    """Choose the form for so many blocks, visible or not; None: block_scores_few is to serve."""
    if block_size < RULES.each_keys:
        return None
    return next((f for f in each_forms(is_e4m3) if blocks <= f.blocks * sm_count), None)


def warp_blocks(width: int, block_size: int, tiles: int, warps: int, at_once: int) -> int:
    """Choose the blocks of a warp of block_scores, of `width` for each tile of query tokens.

    `warps` are those of a thread block, and `at_once` the thread blocks on the GPU.
    """
    each = max(1, RULES.warp_keys // block_size)
    if tiles * -(-width // (warps * each)) < RULES.turns * at_once:
        each = -(-width // (warps * max(at_once // tiles, 1)))
    return max(each, -(-width // (warps * _MOST_RANGES)))


def prompts_steps(steps: int, tiles: int, at_once: int) -> int:
    """Choose the steps of a thread block of block_scores_prompts, of `steps` for each tile."""
    ranges = max(1, at_once // tiles)
    each = min(max(RULES.prompts_least, -(-steps // ranges)), RULES.prompts_most)
    return max(each, -(-steps // _MOST_RANGES))


def pooled_units(units: int) -> int:
    """Choose how many of all units of 64 keys a thread block of block_scores_pooled takes."""
    return next(each for most, each in RULES.pooled if units <= most)


def select_threads(width: int, keys: int) -> int | None:
    """Choose the threads, of so many keys each, that hold a row; None: top_k is to select."""
    return next((n for n in RULES.select_threads if keys * n >= width), None)
