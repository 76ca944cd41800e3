# SPDX-License-Identifier: Apache-2.0
"""FP8 caches whose kv heads have whole tiles of 64 heads, on the CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla.core.arrays import ArrayView
from cumla.launch import KernelSpec
from cumla.launch.kernel import Launch
from cumla.launch.mla.mla_decode import DecodeArguments
from cumla.launch.mla.mla_decode_fp8 import decode_fp8_launch, fp8_specs
from cumla.launch.mla.mla_decode_fp8_64 import SPECS, fp8_64_spec
from cumla.launch.mla.shape import MLAAttentionKey, MLADecodeKey
from tests.emulator import emulated_gpu
from tests.gpu.tools.fp8_problem import Fp8Case, make_fp8
from tests.gpu.tools.sanitize import FP8_HEADS, attend_fp8
from tests.launch.sparse.keys import strided
from tests.launch.structs import compile_checks, leaves, parameters
from tests.selection import some

BUFFER = 9 << 40
STEMS = {"mla_decode_fp8_64", "mla_decode_fp8_products"}


def decode_key(heads: int, kv_heads: int = 1, q_len: int = 1) -> MLADecodeKey:
    return MLADecodeKey(
        3, q_len, heads * kv_heads, kv_heads, 16, "bfloat16", True, 0, 132, cache="e4m3"
    )


def attention_key(heads: int) -> MLAAttentionKey:
    return MLAAttentionKey(3, 100, heads, 1, 16, "bfloat16", True, 0, 132, cache="e4m3")


def launch_of(
    key: Any, rope: str, grouped: bool, factor: float | ArrayView, fp8_products: bool = False
) -> Launch:
    """A launch over views of 128 heads, of two kv heads, each with strides of its own."""
    arguments = DecodeArguments(
        strided(1, (3, 1, 128, 512), (8016, 8000, 1152, 2), "bfloat16"),
        strided(2, (3, 1, 128, 64), (8032, 8000, 1152, 2), "bfloat16"),
        strided(3, (70, 16, 2, 512), (90000, 1200, 608, 1), "float8_e4m3fn"),
        strided(4, (70, 16, 2, 64), (90016, 1216, 624, 2), rope),
        strided(5, (3, 11), (52, 4), "int32"),
        strided(6, (70, 16, 2, 4), (90032, 1232, 640, 4), "float32") if grouped else None,
        factor,
        softmax_scale=0.5,
        causal=True,
        fp8_products=fp8_products,
    )
    out = strided(7, (3, 1, 128, 512), (5008, 5024, 5040, 4), "float32")
    lse = strided(8, (3, 128, 1), (6004, 6008, 6012), "float32")
    return decode_fp8_launch(key, BUFFER, arguments, out, lse)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.entry)
def test_rows_are_as_wide_as_their_form_says(spec: KernelSpec, nvrtc: None) -> None:
    grouped, fp8_rope, tile = spec.function.partition("<")[2].split(", ", 2)
    has_rope = "WidthTile" not in tile
    rows = f"(RowForm<{grouped}, {fp8_rope}, false, {str(has_rope).lower()}>::kBytes)"
    of_rope = (64 if fp8_rope == "true" else 128) if has_rope else 0
    row_bytes = 512 + 16 * (grouped == "true") + of_rope
    compile_checks(spec, {rows: row_bytes})


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("heads", [64, 128, 192])
def test_whole_tiles_of_heads_have_this_kernel(heads: int, q_len: int) -> None:
    for kv_heads in (1, 2):
        key = decode_key(heads, kv_heads, q_len)
        assert (key.row_tile, key.row_groups) == (64, 4)
        assert key.row_tiles == q_len * heads // 64
        assert {spec.stem for spec in fp8_specs(key)} == STEMS
    assert attention_key(heads).row_tiles == 1
    assert {spec.stem for spec in fp8_specs(attention_key(heads))} == STEMS


@pytest.mark.parametrize("heads", [16, 32, 63, 65, 96])
def test_other_heads_have_another(heads: int) -> None:
    """Also where query tokens together have whole tiles of rows."""
    for key in (decode_key(heads, q_len=4), attention_key(heads)):
        assert {spec.stem for spec in fp8_specs(key)} == {"mla_decode_fp8"}


@pytest.mark.parametrize("key", [decode_key(64), attention_key(64)], ids=["decode", "ragged"])
def test_every_kind_of_rows_has_a_kernel(key: Any) -> None:
    kinds = [(grouped, fp8_rope) for grouped in (False, True) for fp8_rope in (False, True)]
    found = {fp8_64_spec(key, *kind) for kind in kinds}
    assert len(found) == 4
    assert found <= set(SPECS)
    prepared = [spec for spec in fp8_specs(key) if spec.stem == "mla_decode_fp8_64"]
    assert set(prepared) == found  # by a plan


@pytest.mark.parametrize("factor", [0.25, strided(12, (1,), (4,), "float32")])
@pytest.mark.parametrize("rope", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("grouped", [False, True])
def test_the_parameters_by_name(grouped: bool, rope: str, factor: float | ArrayView) -> None:
    """No tensor maps: rows that are not adjacent are copied one by one."""
    key = decode_key(64, kv_heads=2)
    launch = launch_of(key, rope, grouped, factor)
    assert launch.spec is fp8_64_spec(key, grouped, rope != "bfloat16")
    assert launch.grid == (1, key.parts, 2)
    got = parameters(launch)
    wanted = {
        "decode.latent_map": bytes(128),
        "decode.rope_map": bytes(128),
        "scales_map": bytes(128),
        "decode.latent.base": 3 << 40,
        "decode.latent.stride_row": 1200,
        "decode.rope.base": 4 << 40,
        "decode.partial_out": BUFFER + key.layout.partial_out,
        "decode.num_pages": 70,
        "decode.by_page_size.shift": 4,
        "decode.row_groups": 4,
        "scales.base": 6 << 40 if grouped else 0,
        "scales.stride_head": 640 if grouped else 0,
        "kv_scale": 0 if factor == 0.25 else 12 << 40,
        "kv_scale_value": 0.25 if factor == 0.25 else 0.0,
    }
    assert {name: got[name] for name in wanted} == wanted


# Type of RoPE columns, whether there are scales, bytes of a row that is whole.
ROWS = (("float8_e4m3fn", False, 576), ("bfloat16", True, 656), ("float8_e4m3fn", True, 592))


def launch_of_whole_rows(
    rows: tuple[str, bool, int], page_size: int, gap: int = 0, pages_apart: int = 1
) -> tuple[dict[str, Any], Launch]:
    """A launch over rows of adjacent columns, `gap` bytes before the last; its values by name."""
    rope, grouped, row_bytes = rows
    stride = row_bytes + 16
    key = dataclasses.replace(decode_key(64), page_size=page_size)
    apart = (page_size * stride * pages_apart, stride, stride)
    latent = strided(3, (7, page_size, 1, 512), (*apart, 1), "float8_e4m3fn")
    begin = latent.ptr + 512
    scales = None
    if grouped:
        scales = strided(3, (7, page_size, 1, 4), (*apart, 4), "float32")._replace(ptr=begin)
        begin += 16
    columns = strided(3, (7, page_size, 1, 64), (*apart, 1 if rope[0] == "f" else 2), rope)
    arguments = DecodeArguments(
        strided(1, (3, 1, 64, 512), (8016, 8000, 1152, 2), "bfloat16"),
        strided(2, (3, 1, 64, 64), (8032, 8000, 1152, 2), "bfloat16"),
        latent,
        columns._replace(ptr=begin + gap),
        strided(5, (3, 11), (52, 4), "int32"),
        scales,
        0.25,
        softmax_scale=0.5,
        causal=True,
    )
    out = strided(7, (3, 1, 64, 512), (5008, 5024, 5040, 4), "float32")
    lse = strided(8, (3, 64, 1), (6004, 6008, 6012), "float32")
    launch = decode_fp8_launch(key, BUFFER, arguments, out, lse)
    return dict(zip(leaves(launch.spec.params), launch.values, strict=True)), launch


@pytest.mark.parametrize("page_size", [1, 16, 40, 48, 64])
@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: str(rows[2]))
def test_whole_rows_come_in_boxes_of_a_granule(rows: tuple[str, bool, int], page_size: int) -> None:
    """They are as wide as the pitch in shared memory, if pages consist of granules."""
    got, launch = launch_of_whole_rows(rows, page_size)
    assert launch.spec is fp8_64_spec(decode_key(64), rows[1], rows[0] != "bfloat16")
    assert not got["decode.rope_is_apart"]
    if page_size % 16:
        assert (got["decode.box_rows"], got["decode.latent_map"]) == (0, bytes(128))
        return
    box = got["decode.latent_map"]
    stride = rows[2] + 16
    assert got["decode.box_rows"] == 16
    assert (box.ptr, box.kind, box.swizzle) == (3 << 40, "UINT32", 0)
    assert box.sizes == (rows[2] // 4, page_size, 1, 7)
    assert box.strides == (stride, stride, page_size * stride)
    assert box.box == (164, 16, 1, 1)


@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: str(rows[2]))
def test_rows_that_no_box_describes(rows: tuple[str, bool, int]) -> None:
    """Those with gaps come array by array; those that share memory row by row."""
    got, _ = launch_of_whole_rows(rows, 64, gap=16)
    assert (got["decode.rope_is_apart"], got["decode.box_rows"]) == (True, 0)
    got, _ = launch_of_whole_rows(rows, 64, pages_apart=0)
    assert (got["decode.rope_is_apart"], got["decode.box_rows"]) == (False, 0)


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "lengths"), some(FP8_HEADS, 5), ids=lambda value: getattr(value, "name", "")
)
def test_attention_to_pages(case: Fp8Case, lengths: list[int]) -> None:
    with emulated_gpu() as cupy:
        attend_fp8(cupy, make_fp8(np, case, np.array(lengths)))


@pytest.mark.parametrize("tokens", [250, 310])
@pytest.mark.parametrize("products", [False, True])
def test_few_blocks_of_a_thread_block_and_more(products: bool, tokens: int) -> None:
    """Four blocks come row by row, five in boxes."""
    case = Fp8Case(batch=1, heads=64, form="one", fp8_products=products)
    with emulated_gpu(1) as cupy:
        attend_fp8(cupy, make_fp8(np, case, np.array([tokens])))


@pytest.mark.exhaustive
@pytest.mark.parametrize("operation", ["decode", "table", "list"])
@pytest.mark.parametrize("form", ["one", "pair", "16-bit rope", "scales", "packed"])
def test_every_form_of_rows(form: str, operation: str) -> None:
    case = Fp8Case(batch=3, heads=64, q_len=2, form=form, page_size=48, operation=operation)
    with emulated_gpu() as cupy:
        attend_fp8(cupy, make_fp8(np, case, np.array([300, 0, 65])))


@pytest.mark.parametrize("exponent", [20, 28, 29, 30])
def test_the_score_of_a_single_token_may_have_any_size(exponent: int) -> None:
    """Exact and rounded products of scores differ by more than float16 holds."""
    rng = np.random.default_rng(exponent)
    q = rng.normal(size=(1, 1, 64, 576)).astype(ml_dtypes.bfloat16)
    kv_cache = rng.normal(size=(1, 4, 1, 576)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    table, lengths = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    given = {"q": q, "kv_cache": kv_cache, "block_table": table, "kv_lens": lengths}
    want = cumla.reference.mla_decode(**given, kv_scale=2.0**exponent)
    with emulated_gpu() as cupy:
        there = {
            name: cupy.asarray(array.view(f"u{array.itemsize}")).view(array.dtype)
            for name, array in given.items()
        }
        out, lse = cumla.mla_decode(**there, kv_scale=2.0**exponent)
    assert out.view(np.uint16).get().tobytes() == want.out.tobytes()
    np.testing.assert_allclose(lse.get(), want.lse, rtol=8.01 / 65536)
