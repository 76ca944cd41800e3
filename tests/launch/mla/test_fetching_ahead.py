# SPDX-License-Identifier: Apache-2.0
"""What L2 fetches ahead: each row of a block once, by whichever thread block."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest

from cumla.launch.mla.shape import MLAAttentionKey, MLADecodeKey
from cumla.launch.split.plan import BLOCK_TOKENS, ROW_TILE
from tests.launch.kernel_text import modelled


def decode_key(rows: int, page_size: int) -> MLADecodeKey:
    return MLADecodeKey(
        3, 1, rows, 1, page_size, "bfloat16", causal=True, device=0, sm_count=132,
        pinned="shared_blocks",
    )  # fmt: skip


def ragged_key(page_size: int) -> MLAAttentionKey:
    return MLAAttentionKey(
        3, 40, 128, 1, page_size, "bfloat16", causal=True, device=0, sm_count=132
    )


class Share(NamedTuple):
    """FetchShare: every step-th box from `first` on, or row."""

    first: int
    step: int

    @classmethod
    def of_tile(cls, behind: int, tiles: int) -> Share:
        return cls(behind if behind < 2 else BLOCK_TOKENS, min(tiles, 2))

    @classmethod
    def of_grid(cls, row_tile: int, row_tiles: int) -> Share:
        return cls.of_tile(row_tiles - 1 - row_tile, row_tiles)

    @classmethod
    def of_request(cls, first_row: int, rows: int) -> Share:
        """Of the tile of a request of so many rows that begins there: where lengths differ."""
        return cls.of_tile((rows - 1 - first_row) // ROW_TILE if rows > ROW_TILE else 2, 2)


def shares_of(key: MLADecodeKey) -> list[Share]:
    return [Share.of_grid(row_tile, key.row_tiles) for row_tile in range(key.row_tiles)]


def shares_of_request(rows: int) -> list[Share]:
    return [Share.of_request(first_row, rows) for first_row in range(0, rows, ROW_TILE)]


def boxes_fetched(
    key: MLADecodeKey | MLAAttentionKey, form: str, share: Share
) -> tuple[list[tuple[int, int]], list[int]]:
    """Return what a row tile fetches: (box, row in it) of latent columns; boxes of RoPE columns."""
    latent: list[tuple[int, int]] = []
    rope: list[int] = []
    whole = form == "pages" or key.box_rows == BLOCK_TOKENS
    i = share.first
    while i * key.wide_rows < BLOCK_TOKENS:
        latent.append((0, i * key.wide_rows) if whole else (i, 0))
        if form == "boxes" and (i == 0 or not whole):
            rope.append(0 if whole else i)
        i += share.step
    return latent, rope


def rows_fetched(share: Share) -> list[int]:
    """Return which single rows of a block a row tile fetches: each by the warp that copies it."""
    known, lanes = 16, 32  # kShare of RowCopier with four warps: lanes i and i + 16 know one row
    return [
        warp * known + lane
        for warp in range(BLOCK_TOKENS // known)
        for lane in range(lanes)
        if not (lane >= known or lane & (share.step - 1) != share.first)
    ]


ROWS = (16, 64, 65, 127, 128, 129, 192, 256, 640, 4096)


@pytest.mark.parametrize("page_size", [8, 16, 24, 32, 48, 64, 128, 192])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_every_row_of_a_block_is_fetched_once(page_size: int, rows: int, ragged: bool) -> None:
    """Each box, which lies in a page of its own, covered by wide boxes without a gap."""
    key = ragged_key(page_size) if ragged else decode_key(rows, page_size)
    shares = shares_of_request(rows) if ragged else shares_of(decode_key(rows, page_size))
    assert key.fetches_ahead
    assert key.box_rows % key.wide_rows == 0
    alone = ragged and rows <= ROW_TILE
    for form in {key.form, "boxes"}:  # pages of two arrays come in boxes
        latent: list[tuple[int, int]] = []
        rope: list[int] = []
        for share in shares:
            of_latent, of_rope = boxes_fetched(key, form, share)
            latent += of_latent
            rope += of_rope
        boxes = range(0 if alone else BLOCK_TOKENS // key.box_rows)
        assert sorted(latent) == [
            (box, row) for box in boxes for row in range(0, key.box_rows, key.wide_rows)
        ]
        assert sorted(rope) == (list(boxes) if form == "boxes" else [])


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_every_single_row_is_fetched_once(rows: int, ragged: bool) -> None:
    shares = shares_of_request(rows) if ragged else shares_of(decode_key(rows, 1))
    fetched = sorted(row for share in shares for row in rows_fetched(share))
    alone = ragged and rows <= ROW_TILE
    assert fetched == ([] if alone else list(range(BLOCK_TOKENS)))


def test_two_row_tiles_share_a_whole_page() -> None:
    decode = decode_key(128, 64)
    for key, shares in (
        (decode, shares_of(decode)),
        (ragged_key(64), shares_of_request(128)),
    ):
        assert [boxes_fetched(key, "pages", share)[0] for share in shares] == [[(0, 32)], [(0, 0)]]


@pytest.mark.parametrize("ragged", [False, True])
def test_a_causal_prefill_is_fetched_by_the_tiles_that_see_most(ragged: bool) -> None:
    key = ragged_key(64) if ragged else decode_key(640, 64)
    shares = shares_of_request(640) if ragged else shares_of(decode_key(640, 64))
    assert [len(boxes_fetched(key, "pages", share)[0]) for share in shares] == [0] * 8 + [1, 1]


def test_nothing_is_fetched_ahead_for_few_rows_or_of_fp8_caches() -> None:
    key = decode_key(128, 64)
    assert not replace(key, pinned="one_tile").fetches_ahead
    assert not replace(key, cache="e4m3").fetches_ahead
    assert not replace(ragged_key(64), cache="e4m3").fetches_ahead


# --- the model is of this code -------------------------------------------------------------------

MODELLED = {  # but for rings of half blocks, and lists that the kernel reads
    "mla/mla_decode/pages.cuh": "9c935466",
    "mla/mla_decode/kernel.cuh": "8dc8d26e",
}


@pytest.mark.parametrize("file", MODELLED)
def test_the_model_follows_the_kernel(file: str) -> None:
    """After a change of what is marked there, change the model, too; then the digest here."""
    assert modelled(file, "fetching_ahead") == MODELLED[file]
