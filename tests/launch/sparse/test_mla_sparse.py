# SPDX-License-Identifier: Apache-2.0
"""Which kernels attend to lists, what they are told, what a plan's buffer holds; on the CPU."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np
import pytest

import cumla
from cumla.core.arrays import ArrayView
from cumla.launch.sparse import mla_sparse, mla_sparse_fp8, mla_sparse_packed, select_rows
from cumla.launch.sparse.mla_sparse import attend_launches, lengths_launches, sparse_specs
from tests.emulator import emulated_gpu
from tests.gpu.tools.sanitize import (
    MAX_LOGITS,
    OF_A_LARGE_CACHE,
    attend_sparse,
    attend_with_max_logits,
    multiprocessors,
    there,
)
from tests.gpu.tools.sparse_problem import SparseCase, make_sparse
from tests.launch.sparse.keys import arguments_of, key_of, outputs_of, strided
from tests.launch.structs import parameters
from tests.selection import some

BUFFER = 9 << 40
CACHES = ("same", "e4m3", "v32", "v32_no_rope")


def entries(key: Any, **changes: Any) -> list[str]:
    """The kernels that a plan of this shape launches for an update and a run."""
    updates = lengths_launches(key, BUFFER, (None, None))
    runs = attend_launches(key, BUFFER, arguments_of(key, **changes), *outputs_of(key))
    return [launch.spec.entry for launch in (*updates, *runs)]


# --- the kernels of a shape -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_cache_of_the_querys_dtype(dtype: str) -> None:
    """Two row tiles, and many lists, share rows in L2; few heads are the N side of products."""
    for heads, lists, form in (
        (16, 15, "_swapped"),
        (16, 659, "_swapped"),
        (16, 660, "_shared_blocks"),
        (17, 2, "_swapped"),
        (17, 3, ""),
        (17, 89, ""),
        (17, 90, "_shared_blocks"),
        (64, 1, "_swapped"),
        (64, 2, ""),
        (64, 89, ""),
        (65, 1, "_shared_blocks"),
        (64, 90, "_shared_blocks"),
    ):
        key = key_of(heads, dtype=dtype, batch=lists, q_len=1)
        attend = f"mla_sparse_{dtype}{form}"
        assert entries(key) == ["bound_rows", "mla_schedule", "select_rows", attend]
        is_split = form == "_swapped" and heads > 16
        assert (key.row_tile, key.row_tiles) == (
            16 if is_split else 64,
            -(-heads // (16 if is_split else 64)),
        )


def test_rows_of_512_columns_in_16_bits() -> None:
    """Kernels read few lists themselves; batch-invariant lists have one set of bits."""
    for heads, lists, form in (
        (16, 66, "_swapped_lists"),
        (16, 67, "_swapped"),
        (16, 989, "_swapped"),
        (16, 990, "_shared_blocks"),
        (64, 1, "_swapped_lists"),
        (64, 66, "_lists"),
        (64, 67, "_shared_blocks"),
        (65, 1, "_shared_blocks"),
    ):
        parts = {"q_rope": None, "kv_rope": None}
        key = key_of(heads, batch=lists, q_len=1)
        *others, attend = entries(key, **parts)
        assert attend == f"mla_sparse_bfloat16_512{form}"
        assert ("select_rows" in others) == (not form.endswith("_lists"))
        key = key_of(heads, batch=lists, q_len=1, batch_invariant=True)
        *others, attend = entries(key, **parts)
        assert "swapped" not in attend
        assert "select_rows" in others


@pytest.mark.parametrize("heads", [1, 16, 17, 32, 33, 128])
def test_an_e4m3_cache(heads: int) -> None:
    key = key_of(heads, "e4m3")
    width = 16 if heads <= 16 else 32
    assert (key.row_tile, key.row_tiles) == (width, -(-heads // width))
    scales = strided(6, (90, 16, 1, 4), (16 * 32, 32, 32, 4), "float32")
    for given, tag in ((None, ""), (scales, "_grouped")):
        *others, attend = entries(key, kv_scales=given)
        assert others == ["bound_rows", "mla_schedule", "select_rows"]
        assert attend == f"mla_sparse_fp8_{width}{tag}"


@pytest.mark.parametrize("heads", [1, 16, 17, 64, 65, 128])
def test_e4m3_rows_of_512_columns(heads: int) -> None:
    """The kernel looks at the lists itself."""
    key = key_of(heads, "e4m3_512", batch=50)
    assert key.row_tile == (16 if heads <= 16 else 32 if heads <= 32 else 64)
    factor = strided(12, (1,), (4,), "float32")
    changes = {"q_rope": None, "kv_rope": None, "kv_scale": factor}
    (attend,) = attend_launches(key, BUFFER, arguments_of(key, **changes), *outputs_of(key))
    tag = "" if heads > 32 else f"_{key.row_tile}"
    assert attend.spec.entry == f"mla_sparse_packed_e4m3{tag}"
    assert attend.spec in sparse_specs(key)
    got = parameters(attend)
    assert (got["kv_scale"], got["kv_scale_value"]) == (12 << 40, 0)


@pytest.mark.parametrize("heads", [1, 16, 17, 64, 65, 128])
def test_packed_rows(heads: int) -> None:
    """Their kernels look at the lists themselves."""
    key = key_of(heads, "v32", batch=50)
    assert key.row_tiles == (1 if heads <= 64 else 2)
    tag = "" if heads > 32 else f"_{16 if heads <= 16 else 32}"
    assert entries(key) == ["bound_rows", "mla_schedule", f"mla_sparse_packed{tag}"]


@pytest.mark.parametrize(
    ("cache", "lists", "heads", "topk", "row_tile"),
    [
        ("v32", 1, 128, 2048, 16),  # 16 pieces of two blocks
        ("v32", 1, 64, 2048, 16),
        ("v32", 4, 64, 2048, 32),
        ("v32", 6, 64, 2048, 32),
        ("v32", 12, 64, 2048, 64),  # 5 pieces of seven blocks take longer than 11 of three
        ("v32", 6, 128, 2048, 64),
        ("v32", 8, 128, 512, 32),  # 4 pieces of two blocks
        ("v32", 16, 64, 512, 32),
        ("v32", 32, 64, 512, 64),  # only two pieces
        ("v32", 1, 128, 0, 16),
        ("same", 1, 128, 2048, 64),
        ("v4", 1, 64, 640, 16),  # 10 pieces of a block
        ("v4", 1, 128, 1152, 32),  # 18 pieces of a block; 16 heads would have pieces of two
        ("v4", 4, 64, 640, 32),
        ("v4", 2, 128, 1152, 48),  # three tiles of 18 pieces
        ("v4", 4, 128, 1152, 48),  # of 9 pieces of two blocks
        ("v4", 8, 128, 1152, 64),  # two tiles, which fetch rows for each other
        ("v4", 10, 128, 1152, 64),
        ("v4", 16, 64, 640, 32),
        ("v4", 24, 64, 640, 64),
    ],
)
def test_few_lists_are_cut_by_heads(
    cache: str, lists: int, heads: int, topk: int, row_tile: int
) -> None:
    """As a piece costs as much as a block for each 16 heads; batch-invariant ones are not."""
    key = key_of(heads, cache, batch=lists, q_len=1, topk=topk)
    assert (key.row_tile, key.row_groups) == (row_tile, row_tile // 16)
    assert key.may_wait
    assert replace(key, batch_invariant=True).row_tile == 64
    assert replace(key, device=None, sm_count=0).row_tile == 64


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("heads", [8, 40, 128])
def test_whatever_is_launched_is_among_the_kernels_of_a_shape(heads: int, cache: str) -> None:
    """They are what a plan makes ready."""
    key = key_of(heads, cache)
    known = {spec.entry for spec in sparse_specs(key)}
    assert {*entries(key)} <= known
    assert entries(key, sinks=strided(11, (heads,), (4,), "float32")) == entries(key)


def test_every_kernel_serves_a_shape() -> None:
    made = (mla_sparse, mla_sparse_fp8, mla_sparse_packed, select_rows)
    every = {spec for module in made for spec in module.SPECS}
    keys = [key_of(h, cache) for h in (8, 24, 128) for cache in CACHES]
    few = [(cache, n) for cache in (*CACHES, "e4m3_512") for n in (1, 4)]
    keys += [key_of(128, cache, batch=n, q_len=1, topk=2048) for cache, n in few]
    keys += [
        key_of(h, dtype=dtype, has_max_logits=has)
        for h in (8, 24, 128)
        for dtype in ("bfloat16", "float16")
        for has in (False, True)
    ]
    keys += [key_of(h, "e4m3_512") for h in (8, 24, 128)]
    keys += [
        key_of(heads, dtype=dtype, batch=batch)
        for heads, batch in ((8, 20), (24, 20), (8, 80), (24, 80))
        for dtype in ("bfloat16", "float16")
    ]
    assert every == {spec for key in keys for spec in sparse_specs(key)} & every


# --- plans ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("heads", "topk"), [(1, 1), (16, 63), (16, 2049), (40, 64), (128, 2049)])
@pytest.mark.parametrize("invariant", [False, True])
def test_nothing_in_the_buffer_overlaps(cache: str, heads: int, topk: int, invariant: bool) -> None:
    key = key_of(heads, cache, topk=topk, batch_invariant=invariant)
    assert key.num_places == 15
    layout = key.layout
    pieces = key.tiles * key.cut_parts * 2 * key.row_groups * 16
    listed = 0 if cache.startswith("v32") else key.num_places * topk
    extents = [
        (layout.places, key.num_places * 8),
        (layout.parts, key.parts * 48),
        (layout.tickets, key.num_tickets * 16),
        (layout.partial_rows, pieces * 8),
        (layout.partial_out, pieces * 512 * 3),
        (key.selected, listed * 4),
        (key.counts, key.num_places * 4),
        (key.bounds, key.num_places * 4),
        (key.zeros, 512 * 4),
    ]
    assert all(begin + size <= after for (begin, size), (after, _) in pairwise(extents))
    begin, size = extents[-1]
    assert begin + size <= layout.nbytes
    assert all(begin % 16 == 0 for begin, _ in extents if begin != key.counts)
    assert key.zeros + 656 <= layout.nbytes  # read in place of a packed row
    named: dict[str, Any] = {
        "v32": {"cache_format": "v32"},
        "v32_no_rope": {"cache_format": "v32_no_rope"},
        "e4m3": {"cache_dtype": "float8_e4m3fn"},
    }.get(cache, {})
    sizes = named | {"batch_invariant": invariant, "sm_count": 132}
    assert cumla.MLASparsePlan.workspace_bytes(5, 3, heads, topk, **sizes) == layout.nbytes


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("heads", [16, 128])
def test_batch_invariant_lists_are_cut_at_fixed_places(heads: int, cache: str) -> None:
    """However many there are, each has parts for all its pieces."""
    for batch, topk in ((1, 2048), (7, 2048), (7, 64), (1, 0)):
        key = key_of(heads, cache, batch=batch, topk=topk, batch_invariant=True)
        pieces = max(1, -(-key.max_blocks // key.piece_blocks))
        assert key.parts == key.num_places * pieces


# --- what the kernel is told ----------------------------------------------------------------------


@pytest.mark.parametrize("heads", [40, 128])
def test_the_parameters_by_name(heads: int) -> None:
    """Rows are pages of one token; the table is what select_rows leaves, and the counts follow."""
    key = key_of(heads)
    _, launch = attend_launches(key, BUFFER, arguments_of(key), *outputs_of(key))
    assert launch.grid == (key.row_tiles, key.parts, 1)
    got = parameters(launch)
    wanted = {
        "latent.base": 3 << 40,
        "latent.stride_page": 1168,
        "rope.base": 4 << 40,
        "rope.stride_page": 1168,
        "q_latent.base": 1 << 40,
        "q_latent.stride_batch": 300_016,
        "q_latent.stride_token": 100_000,
        "q_rope.stride_head": 1184,
        "out": 7 << 40,
        "out_stride_batch": 900_000,
        "out_stride_token": 300_000,
        "out_stride_head": 2064,
        "out_is_float": 1,
        "lse": 8 << 40,
        "lse_stride_batch": 1501,
        "lse_stride_head": 3,
        "lse_stride_token": 1,
        "block_table": BUFFER + key.selected,
        "block_table_stride": 700,
        "max_tokens": 700,
        "max_pages": 700,
        "batch": 15,
        "parts": key.parts,
        "num_pages": 90 * 16,
        "page_size": 1,
        "q_len": 3,
        "heads_per_group": heads,
        "row_groups": 4 if heads > 64 else 3,
        "causal": 0,
        "batch_invariant": 0,
        "empty_lse": -math.inf,
    }
    assert {name: got[name] for name in wanted} == wanted
    assert got["scale_log2"] == pytest.approx(0.25 / math.log(2), rel=1e-6)
    # the counts that the kernel finds after batch * block_table_stride numbers
    assert key.counts == key.selected + 15 * 700 * 4


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("heads", [8, 24, 128])
def test_kernels_get_sinks_and_whose_logarithm_is_wanted(heads: int, cache: str) -> None:
    key = key_of(heads, cache)
    sinks = strided(11, (2 * heads,), (8,), "float32")._replace(shape=(heads,))
    for as_flash_mla, given, wanted in (
        (False, sinks, (-inf, True, sinks.ptr, 2)),
        (True, sinks, (inf, False, sinks.ptr, 2)),
        (True, None, (inf, False, 0, 0)),
    ):
        arguments = arguments_of(key, sinks=given)._replace(as_flash_mla=as_flash_mla)
        launch = attend_launches(key, BUFFER, arguments, *outputs_of(key))[-1]
        got = {name.removeprefix("decode."): value for name, value in parameters(launch).items()}
        names = "empty_lse", "sink_in_lse", "sinks", "sinks_stride"
        assert tuple([got[name] for name in names]) == wanted


@pytest.mark.parametrize("heads", [40, 128])
@pytest.mark.parametrize("columns", [576, 512])
def test_kernels_with_max_logits(heads: int, columns: int) -> None:
    """One of its own; where it writes them, and those of pieces, which overlap nothing."""
    key, plain = key_of(heads, has_max_logits=True, batch=40), key_of(heads, batch=40)
    narrow = {} if columns == 576 else {"q_rope": None, "kv_rope": None}
    out, lse = outputs_of(key)
    max_logits = lse._replace(ptr=12 << 40)
    arguments = arguments_of(key, **narrow)
    without = attend_launches(plain, BUFFER, arguments, out, lse)[-1]
    select, launch = attend_launches(key, BUFFER, arguments, out, lse, max_logits)
    assert select.spec.entry == "select_rows"
    assert launch.spec.entry == f"{without.spec.entry}_max_logits"
    assert launch.spec in sparse_specs(key, columns)
    got, those = parameters(launch), parameters(without)
    at = got.pop("partial_max_logits") - BUFFER
    assert got == those | {"max_logits": 12 << 40}
    assert at == plain.layout.nbytes
    pieces = key.row_tiles * key.parts * 2
    assert key.layout.nbytes - at >= pieces * key.row_groups * 16 * 4


# --- results --------------------------------------------------------------------------------------

FEW = (
    SparseCase(batch=2, q_len=2, heads=24, topk=150, form="bfloat16", lists="mixed", page_size=2),
    SparseCase(batch=1, heads=96, topk=70, form="bfloat16 pair", places="requests", gaps=True),
    SparseCase(batch=3, heads=3, topk=640, form="bfloat16", lengths="requests", sinks="finite"),
)


@pytest.mark.parametrize("case", some(FEW, 3), ids=lambda case: case.name)
def test_attention_to_lists(case: SparseCase) -> None:
    with emulated_gpu() as cupy:
        attend_sparse(cupy, case)


@pytest.mark.parametrize(
    "case", some((*MAX_LOGITS[1:], MAX_LOGITS[0]), 4), ids=lambda case: case.name
)
def test_attention_with_max_logits(case: SparseCase) -> None:
    with emulated_gpu() as cupy:
        attend_with_max_logits(cupy, case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("heads", [8, 64, 128])
@pytest.mark.parametrize("lists", ["random", "absent", "mixed", "first", "blocks"])
def test_float16(heads: int, lists: str) -> None:
    case = SparseCase(heads=heads, topk=200, form="float16", lists=lists, lengths="tokens")
    with emulated_gpu() as cupy:
        attend_sparse(cupy, case)


@pytest.mark.parametrize("case", OF_A_LARGE_CACHE, ids=lambda case: case.name)
def test_a_large_cache(case: SparseCase) -> None:
    """With many lists of one row tile for each multiprocessor."""
    with emulated_gpu() as cupy, multiprocessors(2):
        attend_with_max_logits(cupy, case, is_large=True)


def test_a_sink_of_infinity_takes_all() -> None:
    with emulated_gpu() as cupy:
        attend_sparse(cupy, SparseCase(heads=3, form="bfloat16", sinks="inf"))


def test_room_after_the_end_of_a_list_changes_no_bits() -> None:
    """Of a batch-invariant call, however much there is."""
    problem = make_sparse(np, SparseCase(batch=1, heads=8, topk=2048, form="bfloat16"))
    with emulated_gpu() as cupy:
        given = {name: there(cupy, array) for name, array in problem.arguments.items()}
        seen = set()
        for topk in (2048, 2900):
            lists = np.full((1, 1, topk), -1, np.int32)
            lists[..., :2048] = problem.lists["indices"]
            given["indices"] = cupy.asarray(lists)
            given["topk_lens"] = cupy.asarray(np.array([2048], np.int32))
            seen.add(cumla.mla_sparse_decode(**given, batch_invariant=True).out.tobytes())
    assert len(seen) == 1


def test_rows_of_a_view_lie_in_its_arrays() -> None:
    """What the kernels see of a cache with gaps has its last row where the cache has it."""
    key = key_of(16)
    latent = strided(3, (90, 16, 1, 512), (20 * 1168, 1168, 1168, 2), "bfloat16")
    rope: ArrayView = strided(4, (90, 16, 1, 64), (20 * 144, 144, 144, 2), "bfloat16")
    arguments = arguments_of(key, kv_cache=latent, kv_rope=rope)
    _, launch = attend_launches(key, BUFFER, arguments, *outputs_of(key))
    got = parameters(launch)
    assert got["num_pages"] == 89 * 20 + 16
    assert (got["latent.stride_page"], got["rope.stride_page"]) == (1168, 144)
