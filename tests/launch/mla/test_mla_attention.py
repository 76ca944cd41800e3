# SPDX-License-Identifier: Apache-2.0
"""Attention over queries of different lengths: properties of its schedule, and its launches."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumla.core.arrays import ArrayView
from cumla.launch.mla import mla_decode
from cumla.launch.mla.mla_attention import attention_launch, attention_spec
from cumla.launch.mla.mla_decode import DecodeArguments
from cumla.launch.mla.shape import MLAAttentionKey
from cumla.launch.split import plan as mla_plan
from cumla.launch.split import ragged_schedule
from cumla.launch.split.division import divisor_of
from cumla.launch.split.plan import RULES, piece_cost
from cumla.launch.split.ragged_schedule import ragged_schedule_launch
from tests.gpu.tools.parts import TILE_PLACE, tile_parts_table, tile_places_table
from tests.launch.split.ragged_schedule_mirror import TileSchedule, schedule
from tests.launch.structs import compile_checks, parameters

thorough = settings(deadline=None)  # as many examples as tests/conftest.py says


def key_of(
    batch: int, total: int, heads: int = 16, kv_heads: int = 1, **changes: Any
) -> MLAAttentionKey:
    options: dict[str, Any] = {
        "page_size": 64,
        "dtype": "bfloat16",
        "causal": True,
        "device": 0,
        "sm_count": 132,
    }
    return MLAAttentionKey(batch, total, heads, kv_heads, **options | changes)


def visible_blocks(key: MLAAttentionKey, places: np.ndarray) -> list[int]:
    """KV blocks that some row of each tile sees, from the definition of what each row sees."""
    tokens, first_row, q_len, _, _ = places.T[:, :, None]
    group = key.heads_per_group
    rows = first_row + np.arange(64)
    hidden = q_len - 1 - rows // group if key.causal else 0
    seen = np.where(rows < q_len * group, tokens - hidden, 0)
    return (-(-np.maximum(seen, 0) // 64)).max(axis=1).tolist()


def segments(bounds: np.ndarray, blocks: list[int]) -> list[list[tuple[int, int, int]]]:
    """(tile, first block, last block) of all that each part does, as the kernel walks."""
    parts = []
    for (tile, block), (end_tile, end_block) in itertools.pairwise(bounds.tolist()):
        done = []
        while tile < end_tile or (tile == end_tile and end_block > 0):
            done.append(
                (tile, block, min(blocks[tile], end_block if tile == end_tile else 1 << 31))
            )
            if tile == end_tile:
                break
            tile, block = tile + 1, 0
        parts.append(done)
    return parts


@st.composite
def problems(draw: st.DrawFn) -> tuple[MLAAttentionKey, np.ndarray, np.ndarray, np.ndarray | None]:
    batch = draw(st.integers(1, 20))
    longest = draw(st.sampled_from((1, 11, 114, 700)))
    counts = draw(st.lists(st.integers(0, longest), min_size=batch, max_size=batch))
    most = draw(st.sampled_from((0, 17, 700, 9000, 200_000)))
    kv_lens = draw(st.lists(st.integers(0, most), min_size=batch, max_size=batch))
    before, behind = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    kv_heads = draw(st.sampled_from((1, 2, 4)))
    key = key_of(
        batch,
        max(1, before + sum(counts) + behind),
        draw(st.sampled_from((1, 3, 16, 48, 96, 128))) * kv_heads,
        kv_heads,
        page_size=draw(st.sampled_from((1, 16, 48, 64))),
        causal=draw(st.booleans()),
        sm_count=draw(st.sampled_from((1, 4, 78, 132))),
    )
    indptr = before + np.cumsum([0, *counts])
    kv_indptr = None
    if draw(st.booleans()):
        pages = [-(-n // key.page_size) for n in kv_lens]
        kv_indptr = draw(st.integers(0, 9)) + np.cumsum([0, *pages])
    return key, indptr, np.array(kv_lens), kv_indptr


@given(problems())
@thorough
def test_the_tiles_hold_every_row_once(
    problem: tuple[MLAAttentionKey, np.ndarray, np.ndarray, np.ndarray | None],
) -> None:
    key, indptr, kv_lens, kv_indptr = problem
    places = schedule(indptr, kv_lens, kv_indptr, key).places
    assert len(places) <= key.num_places
    group = key.heads_per_group
    stretches = zip(indptr[:-1].tolist(), np.diff(indptr).tolist(), strict=True)
    requests = {of: i for i, of in enumerate(stretches) if of[1]}
    rows = []
    for tokens, first_row, q_len, q_begin, pages in places.tolist():
        request = requests[q_begin, q_len]
        assert tokens == kv_lens[request]
        assert pages == (request if kv_indptr is None else kv_indptr[request])
        assert first_row % 64 == 0
        last = min(first_row + 64, q_len * group)
        rows.append(np.arange(q_begin * group + first_row, q_begin * group + last))
    found = np.sort(np.concatenate(rows)) if rows else []
    assert np.array_equal(found, np.arange(indptr[0] * group, indptr[-1] * group))


@given(problems())
@thorough
def test_every_block_is_in_one_part(
    problem: tuple[MLAAttentionKey, np.ndarray, np.ndarray, np.ndarray | None],
) -> None:
    key, *lengths = problem
    made = schedule(*lengths, key)
    blocks = visible_blocks(key, made.places)
    assert made.bounds.shape == (key.parts + 1, 2)
    bounds = made.bounds.tolist()
    assert bounds == sorted(bounds)
    assert bounds[0] == [0, 0]
    assert bounds[-1] == [len(blocks), 0]
    for tile, block in bounds:  # pieces are worth their cost
        assert block == 0 or RULES.min_blocks <= block <= blocks[tile] - RULES.min_blocks
    parts = segments(made.bounds, blocks)
    done = sorted((tile, a, b) for part in parts for tile, a, b in part)
    at: dict[int, int] = {}
    for tile, a, b in done:
        assert a == at.get(tile, 0)  # behind each other, with nothing between
        assert b > a or blocks[tile] == 0
        at[tile] = b
    assert at == dict(enumerate(blocks))  # tiles without blocks, too: somebody writes zeros


@given(problems())
@thorough
def test_no_part_costs_much_more_than_a_share(
    problem: tuple[MLAAttentionKey, np.ndarray, np.ndarray, np.ndarray | None],
) -> None:
    key, *lengths = problem
    made = schedule(*lengths, key)
    blocks = visible_blocks(key, made.places)
    share = max(-(-sum(n + RULES.fixed_cost for n in blocks) // key.parts), RULES.min_share)
    costs = [sum(b - a + RULES.fixed_cost for _, a, b in p) for p in segments(made.bounds, blocks)]
    pieces = 2 * max(RULES.min_blocks - 1, piece_cost(key.row_groups))
    assert max(costs) <= share + pieces + RULES.fixed_cost


@given(problems())
@thorough
def test_the_parts_of_a_tile_know_each_other(
    problem: tuple[MLAAttentionKey, np.ndarray, np.ndarray, np.ndarray | None],
) -> None:
    """What the GPU test holds the kernel's records against: a piece a slot, the same meeting."""
    key, *lengths = problem
    made = schedule(*lengths, key)
    blocks = visible_blocks(key, made.places)
    parts = segments(made.bounds, blocks)
    records = tile_parts_table(made)
    parts_of: dict[int, list[int]] = {tile: [] for tile in range(len(blocks))}
    for i, part in enumerate(parts):
        for tile in dict.fromkeys(tile for tile, _, _ in part):
            parts_of[tile].append(i)
    for tile, among in parts_of.items():
        assert among == [*range(among[0], among[-1] + 1)]
        for i in among:
            record = {name: int(records[name][i]) for name in records.dtype.names or ()}
            head, tail = record["place"] == tile, record["end_place"] == tile
            last = record["last_part"] if head else record["tail_last_part"] if tail else i
            assert last == among[-1]
            if head:
                assert record["first_part"] == among[0]
                assert record["first_slot"] == (
                    len(among) > 1 and records["place"][among[0]] != tile
                )


@pytest.mark.parametrize(
    ("indptr", "kv_lens", "tiles"),
    [
        ([-5, 3, 3, 2**31 - 1], [300, 9, 129], 1 + 11),  # 3 and 41 tokens of 16 heads
        ([10, 4, 2, 30], [300, 9, 129], 7),
        ([20, 20, 10, 5], [300, 9, 129], 0),
        ([0, 2**31 - 1, 50, 60], [2**31 - 1, -1, -(2**31)], 11),
        ([0, 44, 0, 44], [1, 1, 1], 14),  # no more than there is room for
    ],
)
def test_garbage_stays_in_the_arrays(indptr: list[int], kv_lens: list[int], tiles: int) -> None:
    key = key_of(3, 44)
    made = schedule(np.array(indptr), np.array(kv_lens), None, key)
    tokens, first_row, q_len, q_begin, _ = made.places.T
    assert len(made.places) == tiles
    assert key.num_places == 14
    assert ((tokens >= 0) & (tokens <= mla_plan.MOST_TOKENS)).all()
    assert ((first_row >= 0) & (first_row < q_len * 16)).all()
    assert ((q_begin >= 0) & (q_begin + q_len <= 44)).all()


def test_a_list_holds_no_more_than_its_pages() -> None:
    key = key_of(3, 3, page_size=16)
    lengths = np.array([0, 1, 2, 3]), np.array([100, 100, 100]), np.array([5, 7, 7, 100])
    assert schedule(*lengths, key).places[:, 0].tolist() == [32, 0, 100]


def test_no_request_is_too_long_for_a_shape() -> None:
    """Of 2**20 query tokens and 2**21 row tiles: the sum of their costs takes more than 32 bits."""
    tokens = 1 << 20
    key = key_of(1, tokens, 128)
    made = schedule(np.array([0, tokens]), np.array([10 * tokens]), None, key)
    assert (made.places[:, 0] == 10 * tokens).all()
    assert len(made.places) == 2 * tokens
    begins = made.bounds[:, 0]
    assert (np.diff(begins) > 0).all() and begins[-1] == len(made.places)


# --- the buffer and the launches ------------------------------------------------------------------


def test_the_buffer_holds_what_the_key_says() -> None:
    for key in (key_of(3, 44), key_of(7, 4096, 128, 2), key_of(1, 1, sm_count=1)):
        layout = key.layout
        assert layout.places == 0
        assert layout.parts >= key.num_places * mla_plan.TILE_PLACE_BYTES
        assert layout.tickets - layout.parts >= key.parts * mla_plan.PART_BYTES
        pieces = key.num_kv_heads * key.parts * 2 * 64 if key.parts > 1 else 0
        assert layout.partial_out - layout.partial_rows >= pieces * 8
        assert layout.nbytes - layout.partial_out >= pieces * 512 * 3
        assert key.may_wait == (key.parts * key.num_kv_heads <= key.sm_count)


def test_a_place_is_as_the_kernels_see_it(nvrtc: None) -> None:
    checks = {}
    words = "constexpr TilePlace kPlace = {0, 1, 2, 3, 2, 3};"
    assert TILE_PLACE.fields is not None
    for name in TILE_PLACE.names or ():
        place = TILE_PLACE.fields[name][1]
        checks[f"kPlace.{name} * {8 if name == 'pages' else 4}"] = place
    spec = ragged_schedule.SPECS[0]
    compile_checks(spec, checks, words)
    for entry in (attention_spec(key_of(1, 1)), attention_spec(key_of(1, 1, page_size=1))):
        compile_checks(entry, checks, words)


def test_the_places_as_bytes() -> None:
    made = TileSchedule(np.array([[1, 2, 3, 4, 5]]), np.zeros((2, 2), np.int32))
    words = tile_places_table(made).tobytes()
    assert np.frombuffer(words, "<i4").tolist() == [1, 2, 3, 4, 5, 0, 0, 0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_page_size_chooses_the_kernel(dtype: str) -> None:
    for page_size, suffix in ((64, ""), (128, ""), (16, "_boxes"), (48, "_boxes"), (1, "_rows")):
        spec = attention_spec(key_of(1, 1, dtype=dtype, page_size=page_size))
        assert spec.entry == f"mla_attention_{dtype}{suffix}"
        assert spec in mla_decode.SPECS


def strided(ptr: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> ArrayView:
    return ArrayView(ptr=ptr, shape=shape, strides=strides, dtype=dtype, device=0)


@pytest.mark.parametrize("listed", [True, False])
def test_the_schedules_parameters_by_name(listed: bool) -> None:
    key = key_of(5, 33, 44, 2, page_size=16)
    launch = ragged_schedule_launch(
        key,
        9 << 40,
        strided(1 << 40, (6,), (8,), "int32"),
        strided(2 << 40, (5,), (-12,), "int32"),
        strided(3 << 40, (6,), (16,), "int32") if listed else None,
    )
    assert launch.grid == (1, 1, 1)
    given = parameters(launch)
    assert {given.pop(name) for name in tuple(given) if name.startswith("whole.")} == {0}
    assert given == {
        "qo_indptr": 1 << 40,
        "qo_indptr_stride": 2,
        "kv_lens": 2 << 40,
        "kv_lens_stride": -3,
        "kv_indptr": 3 << 40 if listed else 0,
        "kv_indptr_stride": 4 if listed else 0,
        "places": (9 << 40) + key.layout.places,
        "parts_out": (9 << 40) + key.layout.parts,
        "tickets": (9 << 40) + key.layout.tickets,
        "batch": 5,
        "total_tokens": 33,
        "max_places": key.num_places,
        "parts": 66,
        "num_tickets": 132,
        "heads_per_group": 22,
        "page_size": 16,
        "causal": 1,
        "fixed_cost": RULES.fixed_cost,
        "piece_cost": piece_cost(4),
        "min_blocks": RULES.min_blocks,
        "min_share": RULES.min_share,
        "q_len": 0,
        "row_tile": 64,
        **{f"by_parts.{name}": value for name, value in divisor_of(66).items()},
        "by_heads_per_group.magic": 3123612579,
        "by_heads_per_group.shift": 5,
        "by_row_tile.magic": 1 << 31,
        "by_row_tile.shift": 6,
        "shares": 1,
        "window_left": -1,
        "is_small": 1,
        "blocks": 0,
    }


@pytest.mark.parametrize("listed", [True, False])
def test_the_attentions_parameters_by_name(listed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_decode, "paged_kv_map", lambda *_: bytes(128))
    key = key_of(5, 33, 44, 2, page_size=16)
    pages = ((70,), (4,)) if listed else ((5, 11), (52, 4))
    arguments = DecodeArguments(
        q=strided(1 << 40, (33, 44, 512), (3008, 2000, 2), "bfloat16"),
        q_rope=strided(2 << 40, (33, 44, 64), (3024, 2016, 2), "bfloat16"),
        kv_cache=strided(3 << 40, (90, 16, 2, 512), (9008, 8000, 7008, 2), "bfloat16"),
        kv_rope=strided(4 << 40, (90, 16, 2, 64), (9024, 8016, 7024, 2), "bfloat16"),
        block_table=strided(5 << 40, *pages, "int32"),
        kv_scales=None,
        kv_scale=1.0,
        softmax_scale=0.25,
        causal=True,
    )
    out = strided(7 << 40, (33, 44, 512), (5024, 5040, 4), "float32")
    lse = strided(8 << 40, (1, 44, 33), (0, 6008, 6012), "float32")
    launch = attention_launch(key, 9 << 40, arguments, out, lse)
    assert launch.spec is attention_spec(key)
    assert launch.grid == (1, 66, 2)
    got = parameters(launch)
    wanted = {
        "q_latent.base": 1 << 40,
        "q_latent.stride_token": 3008,
        "q_latent.stride_head": 2000,
        "q_rope.base": 2 << 40,
        "q_rope.stride_token": 3024,
        "q_rope.stride_head": 2016,
        "latent.stride_page": 9008,
        "rope.stride_row": 8016,
        "out": 7 << 40,
        "out_stride_token": 5024,
        "out_stride_head": 5040,
        "lse": 8 << 40,
        "lse_stride_token": 1503,
        "lse_stride_head": 1502,
        "block_table": 5 << 40,
        "block_table_stride": 1 if listed else 13,
        "max_tokens": (70 if listed else 11) * 16,
        "max_pages": 70 if listed else 11,
        "batch": key.num_places,
        "parts": 66,
        "num_pages": 90,
        "page_size": 16,
        "q_len": 33,
        "heads_per_group": 22,
        "by_heads_per_group.magic": 3123612579,
        "by_heads_per_group.shift": 5,
        "by_page_size.magic": 1 << 31,
        "by_page_size.shift": 4,
        "by_num_heads.shift": 6,
        "by_q_len.shift": 6,
        "batch_invariant": 0,
        "row_groups": 4,
        "may_wait": 1,
        "causal": 1,
        "out_is_float": 1,
    }
    assert {name: got[name] for name in wanted} == wanted
    for name, offset in (("places", key.layout.places), ("parts_in", key.layout.parts)):
        assert got[name] == (9 << 40) + offset
    for name in ("tickets", "partial_out", "partial_rows"):
        assert got[name] == (9 << 40) + getattr(key.layout, name)
    assert not re.search("nan", str(got))
