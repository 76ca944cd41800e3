# SPDX-License-Identifier: Apache-2.0
"""Which tokens a rank holds, against brute force, in every framework that is there."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from cumla.distributed import Shard

SHAPES = [  # world, page_size, block_size
    (1, 4, 4),
    (2, 4, 4),
    (3, 4, 4),
    (4, 2, 6),
    (2, 8, 2),
    (4, 8, 1),
    (8, 1, 1),
]
LENGTHS = (0, 1, 3, 4, 5, 17, 30, -1, -(2**31), 1000, 2**31 - 1)
COLUMNS = 7


def framework(name: str) -> Any:
    module = pytest.importorskip(name)
    if name == "torch":
        return lambda array: module.from_numpy(np.array(array))
    return module.numpy.asarray if name == "jax" else np.asarray


FEW = SHAPES[1], SHAPES[5]  # for JAX, which compiles for each rank of them
CASES = [(n, s) for n in ("numpy", "torch", "jax") for s in SHAPES if n != "jax" or s in FEW]


@pytest.fixture(params=["numpy", "torch", "jax"])
def make(request: pytest.FixtureRequest) -> Any:
    return framework(request.param)


@pytest.fixture(
    params=CASES, ids=lambda case: "{}-world{}-page{}-block{}".format(case[0], *case[1])
)
def case(request: pytest.FixtureRequest) -> tuple[Any, list[Shard]]:
    """Return what makes arrays, and a shard of each rank."""
    name, (world, page_size, block_size) = request.param
    shards = [Shard(r, world, page_size=page_size, block_size=block_size) for r in range(world)]
    return framework(name), shards


@cache
def counted(world: int, block: int, position: int) -> tuple[int, int]:
    """Owner of a token, and how many tokens before it are there as well."""
    owner = position // block % world
    return owner, sum(t // block % world == owner for t in range(position))


def place(shards: list[Shard], table: Any, position: int) -> tuple[int, int, int]:
    """Owner, page and offset of a token, by counting."""
    block, page = shards[0].block_size, shards[0].page_size
    owner, before = counted(shards[0].world, block, position)
    entry = position // page if block >= page else before // page
    return owner, int(table[entry]), before % page


def tables(batch: int) -> Any:
    return np.random.default_rng(0).permutation(batch * COLUMNS).reshape(batch, -1).astype(np.int32)


def held(shard: Shard, table: Any, length: int) -> list[tuple[int, int]]:
    """Pages and offsets that attention reads."""
    size = shard.page_size
    length = min(length, len(table) * size)
    return [(int(table[t // size]), t % size) for t in range(length)]


def expected(shards: list[Shard], rank: int, table: Any, seen: int) -> list[tuple[int, int]]:
    capacity = COLUMNS * shards[0]._entry_tokens
    places = [place(shards, table, t) for t in range(min(max(seen, 0), capacity))]
    return [(page, offset) for owner, page, offset in places if owner == rank]


@pytest.mark.parametrize("q_len", [1, 3])
def test_every_rank_reads_its_tokens_in_their_order(
    case: tuple[Any, list[Shard]], q_len: int
) -> None:
    make, shards = case
    table = tables(len(LENGTHS))
    capacity = COLUMNS * shards[0]._entry_tokens
    for rank, shard in enumerate(shards):
        lens = make(np.array(LENGTHS, np.int32))
        pages = shard.pages(lens, make(table), q_len=q_len)
        own_table, own_lens = map(np.asarray, pages)
        assert own_lens.dtype == own_table.dtype == np.int32
        assert own_table.flags.c_contiguous
        assert own_lens.shape == (len(LENGTHS) * q_len,)
        for i, length in enumerate(LENGTHS):
            for j in range(q_len):
                seen = min(max(length, 0), capacity) - (q_len - 1 - j)
                row = i * q_len + j
                read = held(shard, own_table[row], int(own_lens[row]))
                assert read == expected(shards, rank, table[i], seen)


def test_ragged_queries_see_what_the_mask_lets_them(case: tuple[Any, list[Shard]]) -> None:
    make, shards = case
    starts = [1, 3, 3, 7, 8]  # there are rows of no request at both ends
    lens = [min(9, COLUMNS), 7, 5, 0]
    table = tables(4)
    arrays = [make(np.array(a, np.int32)) for a in (lens, table, starts)]
    for rank, shard in enumerate(shards):
        pages = shard.pages(*arrays[:2], qo_indptr=arrays[2], total_tokens=10)
        own_table, own_lens = map(np.asarray, pages)
        assert own_table.shape[0] == 10 and own_lens.dtype == np.int32
        assert own_lens[[0, 8, 9]].tolist() == [0, 0, 0]
        for i in range(4):
            for t in range(starts[i], starts[i + 1]):
                read = held(shard, own_table[t], int(own_lens[t]))
                assert read == expected(shards, rank, table[i], lens[i] - (starts[i + 1] - 1 - t))


def test_a_new_token_has_one_slot_on_one_rank(case: tuple[Any, list[Shard]]) -> None:
    make, shards = case
    table = tables(2)
    capacity = COLUMNS * shards[0]._entry_tokens
    table[1, 0], table[1, -1] = -3, 2**31 - 1
    positions = np.array([*range(capacity), -1, capacity, 2**31 - 1, -(2**31)], np.int32)
    everywhere = np.tile(positions, 4)
    requests = np.repeat(np.array([0, 1, -1, 2], np.int32), len(positions))
    for rank, shard in enumerate(shards):
        found = np.asarray(shard.slots(*map(make, (table, requests, everywhere))))
        for request, position, slot in zip(requests, everywhere, found, strict=True):
            wanted = -1
            if 0 <= request < 2 and 0 <= position < capacity:
                owner, page, offset = place(shards, table[request], int(position))
                if owner == rank and 0 <= page < 2**16:
                    wanted = page * shard.page_size + offset
            assert slot == wanted


def test_written_tokens_are_those_that_are_read() -> None:
    shards = [Shard(r, 3, page_size=4) for r in range(3)]
    table = tables(1)
    positions = np.arange(COLUMNS * 4, dtype=np.int64)
    for shard in shards:
        slots = shard.slots(table, np.zeros_like(positions), positions)
        own_table, own_lens = shard.pages(np.array([COLUMNS * 4], np.int32), table)
        read = [page * 4 + offset for page, offset in held(shard, own_table[0], int(own_lens[0]))]
        assert read == [slot for slot in slots if slot >= 0]


def test_no_requests_and_no_pages(make: Any) -> None:
    shard = Shard(1, 2, page_size=4)
    none, empty = make(np.zeros(0, np.int32)), make(np.zeros((0, 3), np.int32))
    pages = shard.pages(none, empty)
    assert tuple(pages.kv_lens.shape) == (0,) and tuple(pages.block_table.shape) == (0, 2)
    assert tuple(shard.slots(empty, none, none).shape) == (0,)
    pages = shard.pages(make(np.array([9], np.int32)), make(np.zeros((1, 0), np.int32)))
    assert np.asarray(pages.kv_lens).tolist() == [0] and tuple(pages.block_table.shape) == (1, 0)
    two = make(np.zeros(2, np.int32))
    slots = shard.slots(make(np.zeros((1, 0), np.int32)), two, two)
    assert np.asarray(slots).tolist() == [-1, -1]


def test_a_rank_has_no_more_entries_than_the_table() -> None:
    """However large its blocks are."""
    table = np.arange(8, dtype=np.int32).reshape(1, 8)
    for rank, seen in ((0, 500), (1, 0)):
        pages = Shard(rank, 2, block_size=64 << 10).pages(np.array([500], np.int32), table)
        assert pages.block_table.shape == (1, 8)
        assert pages.kv_lens.tolist() == [seen]


TABLE, LENS = np.zeros((2, 3), np.int32), np.zeros(2, np.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Shard(2, 2), "rank: needs a number below the world of 2, got 2; ranks count"),
        (lambda: Shard(0, 0), "world: needs a number from 1, got 0"),
        (lambda: Shard(0, 2, page_size=64, block_size=48), "block_size: needs a multiple or a div"),
        (lambda: Shard(0, 2, block_size=1 << 30), "block_size: needs blocks and pages of at most"),
        (lambda: Shard(0, 2, page_size=0), "page_size: needs a number from 1, got 0"),
        (lambda: Shard(0, 2).pages(LENS, LENS), r"block_table: needs shape \(batch, max_pages\)"),
        (lambda: Shard(0, 2).pages(LENS[:1], TABLE), r"kv_lens: needs shape \(batch,\) = \(2,\)"),
        (
            lambda: Shard(0, 2).pages(LENS, TABLE, qo_indptr=LENS, total_tokens=2),
            r"qo_indptr: needs shape \(batch \+ 1,\) = \(3,\), got \(2,\)",
        ),
        (lambda: Shard(0, 2).pages(LENS, TABLE, total_tokens=2), "qo_indptr: needs total_tokens"),
        (lambda: Shard(0, 2).slots(TABLE, LENS, LENS[:1]), "positions: needs shape of batch_ind"),
    ],
)
def test_what_does_not_fit_is_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        call()
