# SPDX-License-Identifier: Apache-2.0
"""What L2 fetches ahead: each row of a block once, by whichever thread block."""

from __future__ import annotations

from collections import Counter

import pytest

from cumla.launch.mla_attention import MLAAttentionKey
from cumla.launch.mla_plan import BLOCK_TOKENS, MLADecodeKey
from tests.launch.kernel_text import assert_in_order


def decode_key(rows: int, page_size: int) -> MLADecodeKey:
    return MLADecodeKey(
        3, 1, rows, 1, page_size, "bfloat16", causal=True, device=0, sm_count=132,
        pinned="shared_blocks",
    )  # fmt: skip


def ragged_key(page_size: int) -> MLAAttentionKey:
    return MLAAttentionKey(
        3, 40, 128, 1, page_size, "bfloat16", causal=True, device=0, sm_count=132
    )


def rows_fetched(
    key: MLADecodeKey | MLAAttentionKey, form: str, row_tile: int
) -> tuple[list[int], list[int]]:
    """Rows of a block of which a row tile fetches its latent columns; RoPE columns, if apart.

    All boxes of a page begin at a multiple of `box_rows` in the block, so rows are counted there.
    """
    latent: list[int] = []
    rope: list[int] = []
    for i in range(row_tile, -(-BLOCK_TOKENS // key.wide_rows), key.row_tiles):
        whole = form == "pages" or key.box_rows == BLOCK_TOKENS
        box = 0 if whole else i
        first = box * key.box_rows + (i * key.wide_rows if whole else 0)
        assert first + key.wide_rows <= (box + 1) * key.box_rows, "a box leaves its page"
        latent += range(first, first + key.wide_rows)
        if form == "boxes" and (i == 0 or not whole):
            rope += range(box * key.box_rows, (box + 1) * key.box_rows)
    return latent, rope


@pytest.mark.parametrize("page_size", [8, 16, 24, 32, 48, 64, 128, 192])
@pytest.mark.parametrize("rows", [16, 64, 65, 128, 129, 192, 256, 640, None])
def test_every_row_of_a_block_is_fetched_once(page_size: int, rows: int | None) -> None:
    key = ragged_key(page_size) if rows is None else decode_key(rows, page_size)
    assert key.fetches_ahead
    for form in {key.form, "boxes"}:  # pages of two arrays come in boxes
        latent: Counter[int] = Counter()
        rope: Counter[int] = Counter()
        for row_tile in range(key.row_tiles):
            of_latent, of_rope = rows_fetched(key, form, row_tile)
            latent.update(of_latent)
            rope.update(of_rope)
        assert latent == Counter(range(BLOCK_TOKENS))
        assert not rope if form == "pages" else rope == latent


def test_two_row_tiles_share_a_whole_page() -> None:
    key = decode_key(128, 64)
    assert [len(rows_fetched(key, "pages", tile)[0]) for tile in (0, 1)] == [32, 32]
    assert key.wide_rows == 32
    assert ragged_key(64).wide_rows == 64


# --- the model is of this code -------------------------------------------------------------------

LINES = (
    "void prefetch_block(",
    "for (int i = blockIdx.x; i * p.wide_rows < kBlockTokens; i += gridDim.x) {",
    "tma_prefetch_4d(&p.wide_map, 0, from.row + i * p.wide_rows, blockIdx.z, from.page);",
    "const bool whole = p.box_rows == kBlockTokens;",
    "from.page, whole ? 0 : i);",
    "from.row, whole ? 0 : i);",
    "tma_prefetch_4d(&p.wide_map, 0, whole ? row + i * p.wide_rows : row, blockIdx.z, page);",
    "if (p.rope_is_apart && (i == 0 || !whole)) tma_prefetch_4d(&p.rope_map, 0, row, blockIdx.z,",
)


def test_the_steps_are_those_of_the_kernel() -> None:
    """In this order; after a change there, change the model, too."""
    assert_in_order("mla_decode_pages.cuh", LINES)
