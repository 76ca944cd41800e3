# SPDX-License-Identifier: Apache-2.0
"""What L2 fetches ahead: each row of a block once, by whichever thread block."""

from __future__ import annotations

from dataclasses import replace

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


def boxes_fetched(
    key: MLADecodeKey | MLAAttentionKey, form: str, row_tile: int
) -> tuple[list[tuple[int, int]], list[int]]:
    """What a row tile fetches: (box, row in it) of latent columns; boxes of RoPE columns."""
    latent: list[tuple[int, int]] = []
    rope: list[int] = []
    whole = form == "pages" or key.box_rows == BLOCK_TOKENS
    i = key.row_tiles - 1 - row_tile
    while i * key.wide_rows < BLOCK_TOKENS:
        latent.append((0, i * key.wide_rows) if whole else (i, 0))
        if form == "boxes" and (i == 0 or not whole):
            rope.append(0 if whole else i)
        i += key.row_tiles
    return latent, rope


@pytest.mark.parametrize("page_size", [8, 16, 24, 32, 48, 64, 128, 192])
@pytest.mark.parametrize("rows", [16, 64, 65, 128, 129, 192, 256, 640, None])
def test_every_row_of_a_block_is_fetched_once(page_size: int, rows: int | None) -> None:
    """Each box, which lies in a page of its own, covered by wide boxes without a gap."""
    key = ragged_key(page_size) if rows is None else decode_key(rows, page_size)
    assert key.fetches_ahead
    for form in {key.form, "boxes"}:  # pages of two arrays come in boxes
        latent: list[tuple[int, int]] = []
        rope: list[int] = []
        for row_tile in range(key.row_tiles):
            of_latent, of_rope = boxes_fetched(key, form, row_tile)
            latent += of_latent
            rope += of_rope
        boxes = range(BLOCK_TOKENS // key.box_rows)
        assert sorted(latent) == [
            (box, row) for box in boxes for row in range(0, key.box_rows, key.wide_rows)
        ]
        assert key.box_rows % key.wide_rows == 0
        assert sorted(rope) == (list(boxes) if form == "boxes" else [])


@pytest.mark.parametrize("row_tiles", [1, 2, 3, 10, 16, 17, 40])
def test_every_single_row_is_fetched_once(row_tiles: int) -> None:
    """By the warp that copies it, of one row tile."""
    share, lanes = 16, 32  # kShare of RowCopier with four warps: lanes i and i + 16 know one row
    fetched = [
        warp * share + lane
        for row_tile in range(row_tiles)
        for warp in range(BLOCK_TOKENS // share)
        for lane in range(lanes)
        if not (lane >= share or lane % row_tiles != row_tiles - 1 - row_tile)
    ]
    assert sorted(fetched) == list(range(BLOCK_TOKENS))


def test_two_row_tiles_share_a_whole_page() -> None:
    key = decode_key(128, 64)
    assert [boxes_fetched(key, "pages", tile)[0] for tile in (0, 1)] == [[(0, 32)], [(0, 0)]]
    assert (key.wide_rows, ragged_key(64).wide_rows) == (32, 64)


def test_a_causal_prefill_is_fetched_by_the_tiles_that_see_most() -> None:
    key = decode_key(640, 64)
    work = [len(boxes_fetched(key, "pages", tile)[0]) for tile in range(key.row_tiles)]
    assert work == [0] * 8 + [1, 1]


def test_nothing_is_fetched_ahead_for_few_rows_or_of_fp8_caches() -> None:
    key = decode_key(128, 64)
    assert not replace(key, pinned="one_tile").fetches_ahead
    assert not replace(key, cache="e4m3").fetches_ahead
    assert not replace(ragged_key(64), cache="e4m3").fetches_ahead


# --- the model is of this code -------------------------------------------------------------------

LINES = {
    "mla_decode_pages.cuh": (
        "void prefetch_block(",
        "const bool whole = kForm == kPages || p.box_rows == kBlockTokens;",
        "for (int i = gridDim.x - 1 - blockIdx.x; i * p.wide_rows < kBlockTokens; i += gridDim.x)",
        "from.page, whole ? 0 : i);",
        "from.row, whole ? 0 : i);",
        "if (elect_one()) {",
        "&p.wide_map, 0, whole ? row + i * p.wide_rows : row, blockIdx.z, page);",
        "if (kForm == kBoxes && p.rope_is_apart && (i == 0 || !whole))",
        "tma_prefetch_4d(&p.rope_map, 0, row, blockIdx.z, page);",
        "lane >= kShare || lane % gridDim.x != gridDim.x - 1 - blockIdx.x || latent < 0) return;",
        "(p.rope_is_apart ? kRopeTile : kTiles) * 128);",
        "if (p.rope_is_apart) prefetch_bulk_l2(p.rope.base + offset_of(p.rope, later), 128);",
    ),
    # by all lanes of a warp
    "mla_decode.cu": (
        "if (now.valid()) prefetch_block<kForm>(p, next);",
        "if (kSharedBlocks && threadIdx.x / 32 == 1) prefetch_first_block(p);",
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_the_steps_are_those_of_the_kernel(name: str) -> None:
    """In this order; after a change there, change the model, too."""
    assert_in_order(name, LINES[name])
