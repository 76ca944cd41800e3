# SPDX-License-Identifier: Apache-2.0
"""Which kernel attends to which shape."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from cumla.launch.mla import mla_decode, mla_decode_swapped
from cumla.launch.mla.choice import decode_spec, decode_specs
from cumla.launch.mla.mla_decode import ragged_spec, window_spec
from cumla.launch.mla.shape import SWAPPED_ROWS, TREE, VARIANTS, MLADecodeKey
from cumla.launch.split.plan import PAGE_FORMS, ROW_TILE, page_form
from cumla.mla.shape import WIDE, WIDTHS


def key_of(
    q_len: int, heads: int, kv_heads: int = 1, dtype: str = "bfloat16", pinned: str | None = None
) -> MLADecodeKey:
    return MLADecodeKey(
        2, q_len, heads, kv_heads, 64, dtype, causal=True, device=0, sm_count=132, pinned=pinned
    )


def test_the_limits() -> None:
    assert (SWAPPED_ROWS, ROW_TILE) == (16, 64)
    assert VARIANTS == ("swapped", "one_tile", "shared_blocks")


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8, 128])
def test_the_rows_of_a_kv_head_choose_the_kernel(kv_heads: int) -> None:
    """However they come about: by heads alone, or by heads and queries."""
    for rows in range(1, 201):
        wanted = "swapped" if rows <= 16 else "one_tile" if rows <= 64 else "shared_blocks"
        for q_len in (1, 2, 3, 4, rows):
            if rows % q_len == 0:
                key = key_of(q_len, rows // q_len * kv_heads, kv_heads)
                assert key.group_rows == rows
                assert key.variant == wanted, (rows, q_len)


@pytest.mark.parametrize("pinned", VARIANTS)
def test_a_pinned_kernel_changes_nothing_else(pinned: str) -> None:
    """Neither parts nor the buffer: plans that differ in it are otherwise the same."""
    for q_len, heads, kv_heads in ((1, 1, 1), (2, 8, 1), (1, 48, 3)):
        usual, key = key_of(q_len, heads, kv_heads), key_of(q_len, heads, kv_heads, pinned=pinned)
        assert (usual.variant, key.variant) == ("swapped", pinned)
        assert key != usual
        assert dataclasses.replace(key, pinned=None) == usual
        for name in ("row_tiles", "tiles", "row_groups", "parts", "num_tickets", "layout"):
            assert getattr(key, name) == getattr(usual, name), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("variant", "stem", "entry", "function"),
    [
        ("swapped", "mla_decode_swapped", "_swapped", "mla_decode_swapped<{}, {}>"),
        ("one_tile", "mla_decode", "", "mla_decode<{}, false, {}>"),
        ("shared_blocks", "mla_decode", "_shared_blocks", "mla_decode<{}, true, {}>"),
    ],
)
def test_the_kernel_of_a_variant(
    dtype: str, variant: str, stem: str, entry: str, function: str
) -> None:
    tag = {"bfloat16": "Bf16", "float16": "Fp16"}[dtype]
    for page_size, suffix, form in (
        (64, "", "kPages"),
        (16, "_boxes", "kBoxes"),
        (1, "_rows", "kRows"),
    ):
        key = dataclasses.replace(key_of(1, 16, dtype=dtype, pinned=variant), page_size=page_size)
        spec = decode_spec(key)
        assert spec in decode_specs(dtype, page_size)
        assert (spec.stem, spec.entry) == (stem, f"mla_decode_{dtype}{entry}{suffix}")
        assert spec.function == function.format(tag, form)


def test_every_dtype_has_every_kernel() -> None:
    every = [
        spec
        for dtype in ("bfloat16", "float16")
        for page_size in (64, 16, 1)
        for spec in decode_specs(dtype, page_size)
    ]
    assert len(every) == len(set(every)) == 2 * len(VARIANTS) * len(PAGE_FORMS)
    ragged = {ragged_spec(dtype, form) for dtype in ("bfloat16", "float16") for form in PAGE_FORMS}
    assert len(ragged) == 2 * len(PAGE_FORMS)
    with_sinks = {
        spec
        for dtype in ("bfloat16", "float16")
        for page_size in (64, 16, 1)
        for spec in decode_specs(dtype, page_size, sinks=True)
    }
    kinds = [MLADecodeKey(2, 1, 16, 1, 64, d, False, 0, 132) for d in ("bfloat16", "float16")]
    windows, trees = (
        {window_spec(key, form, window) for key in kinds for form in PAGE_FORMS}
        for window in ((3, 0), TREE)
    )
    assert (len(with_sinks), len(windows)) == (len(every), len(ragged))
    assert len(trees) == len(windows | trees) - len(windows) == len(ragged)
    keys = [
        MLADecodeKey(2, 1, heads, 1, page_size, dtype, False, 0, 132, width=width)
        for dtype in ("bfloat16", "float16")
        for width in WIDTHS[1:]
        if width != WIDE  # test_mla_decode_wide.py
        for heads in (16, 64, 128)
        for page_size in (64, 16, 1)
    ]
    widths = {decode_spec(key) for key in keys}
    widths |= {decode_spec(replace(key, window=side)) for key in keys for side in ((3, 0), TREE)}
    assert len(widths) == 2 * (2 * len(VARIANTS) + 3) * len(PAGE_FORMS[1:])  # 256: no one_tile
    assert set(every) | ragged | with_sinks | windows | trees | widths == {
        *mla_decode.SPECS,
        *mla_decode_swapped.SPECS,
    }


def test_the_page_size_chooses_the_form() -> None:
    """Wherever a block begins in its pages, the rows of a box lie in one of them."""
    for page_size in range(1, 400):
        key = dataclasses.replace(key_of(1, 16), page_size=page_size)
        rows = key.box_rows
        assert key.form == page_form(page_size)
        assert page_size % rows == 64 % rows == 0
        if key.form == "pages":
            assert rows == 64
        elif key.form == "boxes":
            assert rows in (8, 16, 32)
        else:
            assert rows < 8


@pytest.mark.parametrize(
    ("page_size", "form"),
    [(1, "rows"), (2, "rows"), (4, "rows"), (7, "rows"), (100, "rows"), (8, "boxes")]
    + [(16, "boxes"), (24, "boxes"), (32, "boxes"), (48, "boxes"), (96, "boxes")]
    + [(64, "pages"), (128, "pages"), (192, "pages"), (256, "pages")],
)
def test_forms(page_size: int, form: str) -> None:
    assert page_form(page_size) == form
