# SPDX-License-Identifier: Apache-2.0
"""Rows of 512 columns, V4's slots and second caches, on the CPU."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla.core.arrays import ArrayView
from cumla.launch.sparse.mla_sparse import attend_launches, lengths_launches, sparse_specs
from cumla.launch.sparse.mla_sparse_v4 import SPECS
from cumla.mla.shape import FORMATS, V4_ROW_BYTES, V4_SCALE_BYTES, V4_SCALES
from tests.emulator import emulated_gpu
from tests.gpu.tools.sanitize import V4, attend_v4
from tests.gpu.tools.v4_problem import CASES, V4Case
from tests.launch.sparse.keys import arguments_of, key_of, outputs_of, strided
from tests.launch.structs import compile_checks, parameters
from tests.selection import some

Array = np.ndarray[Any, Any]
BUFFER = 9 << 40
PAGE = 18 * 576  # bytes of a page of 16 slots, and some more


def v4_arguments(key: Any, **changes: Any) -> Any:
    """Views of a call; the second cache has 50 pages of 2 slots."""
    cache = strided(3, (90, 16, 1, 584), (PAGE, 584, 584, 1), "uint8")
    extra: dict[str, ArrayView] = {}
    if key.extra_topk:
        extra["extra_kv_cache"] = strided(13, (50, 2, 1, 584), (3 * 576, 584, 584, 1), "uint8")
        shape = (key.batch, key.q_len, key.extra_topk)
        extra["extra_indices"] = strided(14, shape, (8_000, 2_000, 4), "int32")
    narrow = {"q_rope": None, "kv_rope": None, "kv_scales": None, "kv_cache": cache}
    return arguments_of(key, **narrow | extra | changes)


def test_the_kernels_constants(nvrtc: None) -> None:
    widths = {"kRowBytes": V4_ROW_BYTES, "kScaleBytes": V4_SCALE_BYTES, "kTiles": V4_SCALES}
    widths = {f"V4Format::{name}": value for name, value in widths.items()}
    compile_checks(SPECS[0], widths | {"(V4Layout::kStageBytes % 1024)": 0})
    widths = {"kRowBytes": FORMATS["v41"], "kFp4Bytes": FORMATS["v41_fp4"]}
    compile_checks(SPECS[1], {f"V41Format<true>::{name}": value for name, value in widths.items()})


@pytest.mark.parametrize("heads", [8, 64, 100])
def test_the_parameters_by_name(heads: int) -> None:
    key = key_of(heads, "v4", batch=50, extra_topk=200)
    (launch,) = attend_launches(key, BUFFER, v4_arguments(key), *outputs_of(key))
    assert launch.grid == (-(-heads // 64), key.parts, 1)
    got = parameters(launch)
    wanted = {
        "decode.latent.base": BUFFER + key.zeros,
        "decode.block_table": BUFFER + key.list_bounds[0],
        "decode.block_table_stride": 1,
        "decode.max_tokens": 900,
        "decode.heads_per_group": heads,
        "caches[0].base": 3 << 40,
        "caches[0].stride_page": PAGE,
        "caches[0].lists.indices": 5 << 40,
        "caches[0].lists.num_pages": 90,
        "caches[0].lists.page_size": 16,
        "caches[0].entries": 700,
        "caches[1].base": 13 << 40,
        "caches[1].stride_page": 3 * 576,
        "caches[1].lists.indices": 14 << 40,
        "caches[1].lists.indices_stride_batch": 2_000,
        "caches[1].lists.indices_stride_token": 500,
        "caches[1].lists.block_table": 0,
        "caches[1].lists.num_pages": 50,
        "caches[1].lists.page_size": 2,
        "caches[1].entries": 200,
    }
    assert {name: got[name] for name in wanted} == wanted


def test_lists_are_as_long_as_both_together() -> None:
    key = key_of(64, "v4", extra_topk=200)
    lengths = strided(2, (5, 3), (64, 12), "int32")
    own, extra, schedule = lengths_launches(key, BUFFER, (lengths, None))
    first, second = parameters(own), parameters(extra)
    assert (first["entries"], second["entries"]) == (700, 200)
    assert (first["other_bounds"], first["sums"]) == (0, 0)
    assert second["other_bounds"] == first["bounds"] == BUFFER + key.list_bounds[0]
    assert second["sums"] == BUFFER + key.bounds
    assert len({key.bounds, *key.list_bounds}) == 3
    assert key.max_blocks == 15
    assert parameters(schedule)["min_saving"] == 3


@pytest.mark.parametrize(
    ("first", "second", "entry"),
    [
        ("v41", "", "mla_sparse_v41"),
        ("v41", "v41", "mla_sparse_v41"),
        ("v41", "v41_fp4", "mla_sparse_v41_fp4"),
        ("v41_fp4", "", "mla_sparse_v41_fp4"),
        ("v41_fp4", "v41", "mla_sparse_v41_fp4"),
    ],
)
def test_rows_of_v41(first: str, second: str, entry: str) -> None:
    """The kernel is told how far apart rows are, and which cache is e2m1."""
    key = key_of(64, first, extra_topk=200 if second else 0, extra_cache=second)
    rows = strided(3, (90, 16, 1, FORMATS[first]), (PAGE, 544, 544, 1), "uint8")
    changes = {"kv_cache": rows}
    if second:
        step = FORMATS[second] + 32
        shape, steps = (50, 2, 1, FORMATS[second]), (3 * step, step, step, 1)
        changes["extra_kv_cache"] = strided(13, shape, steps, "uint8")
    (launch,) = attend_launches(key, BUFFER, v4_arguments(key, **changes), *outputs_of(key))
    assert launch.spec.entry == entry
    assert (launch.spec,) == sparse_specs(key)[-1:]
    got = parameters(launch)
    for i, form in enumerate(filter(None, (first, second))):
        step = 544 if i == 0 else FORMATS[form] + 32
        assert got[f"caches[{i}].lists.row_step"] == step
        assert got[f"caches[{i}].is_fp4"] == (form == "v41_fp4")


def test_one_cache() -> None:
    key = key_of(64, "v4")
    (launch,) = attend_launches(key, BUFFER, v4_arguments(key), *outputs_of(key))
    assert launch.spec in sparse_specs(key)
    got = parameters(launch)
    assert (got["caches[1].entries"], got["caches[1].lists.num_pages"]) == (0, 0)
    assert len(lengths_launches(key, BUFFER, (None, None))) == 2


@pytest.mark.parametrize("heads", [16, 128])
def test_16_bit_rows_without_rope_columns_read_zeros_there(heads: int) -> None:
    key = key_of(heads)
    rows = strided(3, (90, 16, 1, 512), (16 * 1040, 1040, 1040, 2), "bfloat16")
    arguments = arguments_of(key, q_rope=None, kv_rope=None, kv_cache=rows)
    *_, launch = attend_launches(key, BUFFER, arguments, *outputs_of(key))
    got = parameters(launch)
    for name in ("rope", "q_rope"):
        assert got[f"{name}.base"] == BUFFER + key.zeros
        strides = [value for field, value in got.items() if re.match(rf"{name}\.stride", field)]
        assert strides == [0, 0, 0]
    assert (got["rope_is_apart"], got["latent.stride_page"]) == (1, 1040)
    assert key.layout.nbytes >= key.zeros + 128


# --- results --------------------------------------------------------------------------------------

SMALL = [c for c in CASES if c.tokens * (c.topk + c.extra) * c.heads < 300_000]


@pytest.mark.parametrize("case", some((*V4, *SMALL), 4), ids=lambda case: case.name)
def test_attention_to_lists(case: V4Case) -> None:
    with emulated_gpu() as cupy:
        attend_v4(cupy, case)


def test_few_lists_are_cut_by_heads() -> None:
    """Into three tiles, of two pieces each."""
    case = V4Case(batch=1, heads=40, topk=70, extra=50, sinks="finite", lists="mixed")
    with emulated_gpu(8) as cupy:
        attend_v4(cupy, case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("lists", ["random", "same", "absent", "mixed", "first", "blocks"])
@pytest.mark.parametrize("extra", [0, 1, 64, 130])
def test_lists_in_two_caches(extra: int, lists: str) -> None:
    case = V4Case(batch=2, heads=24, topk=130, extra=extra, lists=lists, lengths="tokens")
    with emulated_gpu() as cupy:
        attend_v4(cupy, case)


def test_a_thread_block_of_many_blocks() -> None:
    """What tells which rows there are is used again after eight of them."""
    case = V4Case(batch=1, heads=8, topk=700, extra=300, lists="mixed", page_size=16)
    with emulated_gpu(1) as cupy:
        attend_v4(cupy, case)


@pytest.mark.parametrize("request_of", [-2, -1, 5])
def test_a_request_outside_of_the_table_has_no_entries(request_of: int) -> None:
    """Of the first cache; those of the second one need none."""
    rng = np.random.default_rng(1)
    lists = rng.integers(0, 32, (3, 70)).astype(np.int32)
    given = {
        "q": rng.standard_normal((3, 8, 512)).astype(ml_dtypes.bfloat16),
        "kv_cache": v4_cache(rng, 2, 16),
        "indices": lists,
        "block_table": np.array([[0, 1]], np.int32),
        "row_to_request": np.array([0, request_of, 0], np.int32),
        "extra_kv_cache": v4_cache(rng, 4, 8),
        "extra_indices": lists[:, :30],
    }
    want = cumla.mla_sparse_attention(**given)
    with emulated_gpu() as cupy:
        got = cumla.mla_sparse_attention(**{name: cupy.asarray(a) for name, a in given.items()})
    np.testing.assert_allclose(got.lse.get(), want.lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("form", ["v4", "v41", "v41_fp4"])
def test_few_lists_are_cut_into_tiles_of_48_heads(form: str) -> None:
    """The second tile has fewer."""
    case = V4Case(form=form, batch=1, heads=80, topk=300, lists="mixed", sinks="finite", gaps=True)
    key = key_of(80, form, batch=1, q_len=1, topk=300, sm_count=10)
    assert (key.row_tile, key.parts) == (48, 5)
    with emulated_gpu(10) as cupy:
        attend_v4(cupy, case)


def v4_cache(rng: np.random.Generator, pages: int, page_size: int) -> Array:
    """Slots of random rows."""
    cache = np.zeros((pages, page_size, 1, 584), np.uint8)
    rows = rng.standard_normal((pages * page_size, 512)).astype(ml_dtypes.bfloat16)
    cumla.append_mla_cache(rows, cache, np.arange(pages * page_size, dtype=np.int32))
    return cache
