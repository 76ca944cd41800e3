# SPDX-License-Identifier: Apache-2.0
"""Which kernel attends to which shape."""

from __future__ import annotations

import dataclasses

import pytest

from cumla.launch.mla_decode import SPECS, decode_spec, decode_specs
from cumla.launch.mla_plan import ROW_TILE, SWAPPED_ROWS, VARIANTS, MLADecodeKey


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
        ("swapped", "mla_decode_swapped", "_swapped", "mla_decode_swapped<{}>"),
        ("one_tile", "mla_decode", "", "mla_decode<{}, false>"),
        ("shared_blocks", "mla_decode", "_shared_blocks", "mla_decode<{}, true>"),
    ],
)
def test_the_kernel_of_a_variant(
    dtype: str, variant: str, stem: str, entry: str, function: str
) -> None:
    spec = decode_spec(key_of(1, 16, dtype=dtype, pinned=variant))
    assert spec in decode_specs(dtype)
    assert (spec.stem, spec.entry) == (stem, f"mla_decode_{dtype}{entry}")
    assert spec.function == function.format({"bfloat16": "Bf16", "float16": "Fp16"}[dtype])


def test_every_dtype_has_every_kernel() -> None:
    both = [*decode_specs("bfloat16"), *decode_specs("float16")]
    assert len(both) == len(set(both)) == 2 * len(VARIANTS)
    assert set(both) == set(SPECS)
