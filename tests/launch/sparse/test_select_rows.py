# SPDX-License-Identifier: Apache-2.0
"""How long lists are, which of their entries exist, and how rows are numbered; on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cumla.core.arrays import ArrayView
from cumla.launch.sparse.select_rows import (
    RowSteps,
    bound_rows_launch,
    lists_values,
    row_steps,
    select_rows_launch,
)
from tests.calls import refused
from tests.emulator import emulate
from tests.emulator.fenced import Fenced
from tests.launch.sparse.keys import arguments_of, key_of, strided
from tests.launch.sparse.select_rows_mirror import bound_rows, select_rows
from tests.launch.structs import parameters

Array = np.ndarray[Any, Any]
BUFFER = 9 << 40
LOWEST, HIGHEST = -(2**31), 2**31 - 1
HOSTILE = (-1, LOWEST, HIGHEST, -2, 1 << 30)


# --- how rows are numbered ------------------------------------------------------------------------


def part(shape: tuple[int, int], strides: tuple[int, int], width: int = 512) -> ArrayView:
    return strided(3, (*shape, 1, width), (*strides, strides[1], 2), "bfloat16")


@pytest.mark.parametrize(
    ("shape", "strides", "steps"),
    [
        ((90, 16), (16 * 1152, 1152), RowSteps(16, 1, 1440, (1152,))),
        ((90, 16), (20 * 1152, 1152), RowSteps(20, 1, 89 * 20 + 16, (1152,))),
        ((90, 1), (1168, 1152), RowSteps(1, 1, 90, (1168,))),
        ((1, 16), (7, 1152), RowSteps(16, 1, 16, (1152,))),
        ((1, 1), (0, 1152), RowSteps(1, 1, 1, (1152,))),
        # gaps that are no whole rows, and pages within one another
        ((90, 16), (16 * 1152 + 16, 1152), RowSteps(1153, 72, 89 * 1153 + 15 * 72 + 1, (16,))),
        ((90, 16), (1152, 90 * 1152), RowSteps(1, 90, 89 + 15 * 90 + 1, (1152,))),
        ((0, 16), (16 * 1152, 1152), RowSteps(16, 1, 0, (1152,))),
    ],
)
def test_rows_are_numbered_in_equal_steps(
    shape: tuple[int, int], strides: tuple[int, int], steps: RowSteps
) -> None:
    """Each row's number times the step is where it lies."""
    found = row_steps((part(shape, strides),))
    assert found == steps
    pages, rows = (np.arange(n)[-1:] for n in shape)
    numbers = pages * found.page + rows * found.row
    (step,) = found.strides
    page, row = (s if n > 1 else 0 for s, n in zip(strides, shape, strict=True))
    np.testing.assert_array_equal(numbers * step, pages * page + rows * row)
    assert (numbers < found.total).all()


def test_parts_have_steps_of_their_own() -> None:
    latent, rope = part((90, 16), (20 * 1024, 1024)), part((90, 16), (20 * 144, 144), 64)
    assert row_steps((latent, rope)) == RowSteps(20, 1, 89 * 20 + 16, (1024, 144))


def test_parts_that_lie_differently_are_refused() -> None:
    latent, rope = part((90, 16), (20 * 1024, 1024)), part((90, 16), (16 * 144, 144), 64)
    message = "kv_cache: needs pages as many rows apart in each of its arrays, got (20, 1) and (16"
    with refused(ValueError, message):
        row_steps((latent, rope))


@pytest.mark.parametrize("strides", [(0, 0), (-16 * 1152, 1152), (16 * 1152, -1152)])
def test_rows_without_an_address_of_their_own_are_refused(strides: tuple[int, int]) -> None:
    with refused(ValueError, "kv_cache: needs rows at addresses of their own, in the order of"):
        row_steps((part((90, 16), strides),))


def test_numbers_of_rows_fit_32_bits() -> None:
    pages = 1 << 27
    assert row_steps((part((pages - 1, 16), (16 * 1152, 1152)),)).total == HIGHEST - 15
    with refused(ValueError, "kv_cache: needs rows that 32 bits can number, got 2147483648 steps"):
        row_steps((part((pages, 16), (16 * 1152, 1152)),))


# --- what the kernels are told --------------------------------------------------------------------


def test_the_parameters_of_bounds_by_name() -> None:
    key = key_of(16)
    lengths = strided(2, (5, 3), (64, 12), "int32")
    launch = bound_rows_launch(key, BUFFER, lengths)
    assert launch.grid == (1, 1, 1)
    got = parameters(launch)
    assert got["topk_lens"] == 2 << 40
    assert (got["topk_lens_stride_batch"], got["topk_lens_stride_token"]) == (16, 3)
    assert (got["bounds"], got["zeros"]) == (BUFFER + key.bounds, BUFFER + key.zeros)
    assert (got["rows"], got["entries"], got["q_len"]) == (15, 700, 3)
    assert got["num_zeros"] * 16 == 2048
    assert parameters(bound_rows_launch(key, BUFFER, None))["topk_lens"] == 0
    many = key_of(16, batch=1, q_len=1000)
    assert bound_rows_launch(many, BUFFER, None).grid == (4, 1, 1)


def test_the_parameters_of_selecting_by_name() -> None:
    key = key_of(16)
    table = strided(10, (7, 11), (52, 4), "int32")
    requests = strided(11, (5, 3), (32, 8), "int32")
    steps = RowSteps(20, 1, 1796, (1168,))
    lists = lists_values(arguments_of(key).indices, (90, 16), steps, table, requests)
    launch = select_rows_launch(key, BUFFER, lists)
    assert launch.grid == (15, 1, 1)
    got = parameters(launch)
    wanted = {
        "lists.indices": 5 << 40,
        "lists.indices_stride_batch": 3000,
        "lists.indices_stride_token": 800,
        "lists.block_table": 10 << 40,
        "lists.block_table_stride": 13,
        "lists.requests": 11 << 40,
        "lists.requests_stride_batch": 8,
        "lists.requests_stride_token": 2,
        "lists.num_requests": 7,
        "lists.max_pages": 11,
        "lists.num_pages": 90,
        "lists.page_step": 20,
        "lists.row_step": 1,
        "lists.page_size": 16,
        "lists.by_page_size.shift": 4,
        "bounds": BUFFER + key.bounds,
        "selected": BUFFER + key.selected,
        "counts": BUFFER + key.counts,
        "entries": 700,
        "q_len": 3,
    }
    assert {name: got[name] for name in wanted} == wanted


# --- results --------------------------------------------------------------------------------------


def view(array: Array) -> ArrayView:
    return ArrayView(array.ctypes.data, array.shape, array.strides, str(array.dtype), 0)


class Problem:
    """Arrays that end, or begin, where nobody may touch memory, and the buffer of a plan."""

    def __init__(
        self, topk: int, *, at_end: bool = True, batch: int = 3, q_len: int = 2, **more: Any
    ) -> None:
        self.memory = Fenced(at_end=at_end)
        self.key = key_of(16, batch=batch, q_len=q_len, topk=topk, **more)
        self.buffer = self.memory.empty(self.key.layout.nbytes, np.uint8)
        self.rng = np.random.default_rng(topk)

    @property
    def lead(self) -> tuple[int, int]:
        return self.key.batch, self.key.q_len

    def words(self, offset: int, count: int) -> Array:
        """Numbers of the buffer."""
        return self.buffer[offset:].view(np.int32)[:count]

    def bound(self, lengths: Array | None) -> None:
        held = None if lengths is None else view(self.memory.copy(lengths))
        emulate(bound_rows_launch(self.key, self.buffer.ctypes.data, held))

    def select(
        self,
        indices: Array,
        pages: tuple[int, int],
        steps: RowSteps,
        table: Array | None = None,
        requests: Array | None = None,
    ) -> list[list[int]]:
        """Return what is selected of each list."""
        places = (table, requests)
        held = [None if a is None else view(self.memory.copy(a)) for a in places]
        lists = lists_values(view(self.memory.copy(indices)), pages, steps, *held)
        emulate(select_rows_launch(self.key, self.buffer.ctypes.data, lists))
        count, topk = self.key.num_places, self.key.entries
        selected = self.words(self.key.selected, count * topk).reshape(count, topk)
        counts = self.words(self.key.counts, count).tolist()
        assert all((row[n:] == -1).all() for row, n in zip(selected, counts, strict=True)), (
            "numbers after the last one were written"
        )
        return [row[:n].tolist() for row, n in zip(selected, counts, strict=True)]


def steps_of(num_pages: int, page_size: int, gap: int = 3) -> RowSteps:
    return RowSteps(page_size + gap, 1, num_pages * (page_size + gap), (1152,))


def hostile(rng: Any, array: Array, share: float, *more: int) -> Array:
    """The same with garbage here and there."""
    garbage = np.array((*HOSTILE, *more))
    there = rng.random(array.shape) < share
    chosen = garbage[rng.integers(0, len(garbage), array.shape)]
    return np.where(there, chosen, array).astype(np.int32)


@pytest.mark.parametrize("at_end", [True, False])
def test_lengths_are_bounded_and_zeros_are_zero(at_end: bool) -> None:
    problem = Problem(700, at_end=at_end, batch=150)
    lengths = problem.rng.integers(-3, 800, problem.lead).astype(np.int32)
    lengths[:4] = [[0, 1], [700, 701], [LOWEST, HIGHEST], [699, -1]]
    key = problem.key
    for given in (lengths, None):
        problem.bound(given)
        got = problem.words(key.bounds, key.num_places).tolist()
        assert got == bound_rows(given, problem.lead, 700)
        assert not problem.words(key.zeros, 512).any()
        assert (problem.buffer[: key.counts] == 0xFF).all()


def test_a_length_for_all_tokens_of_a_request() -> None:
    """Views of strides of 0, and with gaps."""
    problem = Problem(50, q_len=4)
    spread = np.broadcast_to(np.array([[7], [0], [99]], np.int32), (3, 4))
    emulate(bound_rows_launch(problem.key, problem.buffer.ctypes.data, view(spread)))
    got = problem.words(problem.key.bounds, 12).reshape(3, 4)
    np.testing.assert_array_equal(got, [[7] * 4, [0] * 4, [50] * 4])


@pytest.mark.parametrize("topk", [1, 31, 256, 2047, 2048, 2049, 5000])
@pytest.mark.parametrize("placed", [False, True])
def test_what_exists_is_selected_in_its_order(topk: int, placed: bool) -> None:
    """One after the other, as often as it is named; also of lists of several turns."""
    problem = Problem(topk, at_end=topk % 2 == 0)
    rng, pages = problem.rng, (40, 7)
    capacity = 12 * 7 if placed else 40 * 7
    indices = rng.integers(0, capacity, (*problem.lead, topk))
    indices = hostile(rng, indices, 0.3, capacity, capacity - 1)
    table = requests = None
    if placed:
        table = hostile(rng, rng.integers(0, 40, (5, 12)), 0.2, 40, 39)
        requests = np.array([[4, 0], [5, 2], [-1, 3]], np.int32)
    ends = np.array([[topk, topk - 1], [topk // 2, topk], [HIGHEST, 3]], np.int32)
    problem.bound(ends)
    cache = pages, steps_of(*pages), table, requests
    bounds = bound_rows(ends, problem.lead, topk)
    assert problem.select(indices, *cache) == select_rows(indices, bounds, *cache)


@pytest.mark.parametrize("request_of", [HIGHEST, LOWEST, -1, -2, 5])
def test_a_request_outside_of_the_table_has_no_entries(request_of: int) -> None:
    problem = Problem(100)
    indices = np.arange(600, dtype=np.int32).reshape(3, 2, 100) % 50
    table = np.zeros((5, 8), np.int32)
    requests = np.full((3, 2), request_of, np.int32)
    problem.bound(None)
    assert problem.select(indices, (9, 7), steps_of(9, 7), table, requests) == [[]] * 6


def test_without_row_to_request_lists_are_of_their_batch_index() -> None:
    """More lists than the table has rows: none of those that are left has an entry."""
    problem = Problem(3)
    indices = np.tile(np.array([0, 5, 2], np.int32), (3, 2, 1))
    table = np.array([[4], [6]], np.int32)
    problem.bound(None)
    got = problem.select(indices, (9, 7), RowSteps(7, 1, 63, (1,)), table)
    assert got == [[28, 33, 30]] * 2 + [[42, 47, 44]] * 2 + [[]] * 2


def test_bounds_that_were_never_written_lead_nowhere() -> None:
    """As in a run before the first update."""
    problem = Problem(300)
    indices = np.zeros((3, 2, 300), np.int32)
    for garbage in (0xFF, 0x7F):
        problem.words(problem.key.bounds, 6).view(np.uint8)[...] = garbage
        got = problem.select(indices, (9, 7), steps_of(9, 7))
        assert got == ([[]] * 6 if garbage == 0xFF else [[0] * 300] * 6)


def test_entries_after_a_length_are_not_looked_at() -> None:
    """They name rows, and are not selected."""
    problem = Problem(500)
    indices = np.tile(np.arange(500, dtype=np.int32), (3, 2, 1))
    ends = np.array([[0, 1], [63, 64], [257, -9]], np.int32)
    problem.bound(ends)
    got = problem.select(indices, (500, 1), RowSteps(1, 1, 500, (1,)))
    assert got == [list(range(max(n, 0))) for n in ends.reshape(-1).tolist()]
