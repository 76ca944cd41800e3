# SPDX-License-Identifier: Apache-2.0
"""Two ranks of a NCCL communicator that is none: threads, and arrays of NumPy in CuPy's place."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import cumla
from cumla.core import frameworks
from cumla.distributed import ContextParallel

WORLD, HEADS, PAGE, COLUMNS = 2, 4, 4, 6
LENGTHS = np.array([17, 3, 0], np.int32)


class Array(np.ndarray):  # type: ignore[type-arg]
    """An array that tells its address as CuPy's do."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


def array(values: Any) -> Array:
    return np.ascontiguousarray(values).view(Array)


class Communicator:
    """A rank; what it sends goes through a queue for each pair of ranks."""

    queues: dict[tuple[int, int], Queue[bytes]]

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank_id(self) -> int:
        return self._rank

    def size(self) -> int:
        return WORLD

    def send(self, ptr: int, count: int, kind: int, peer: int, stream: int) -> None:
        assert (kind, stream) == (1, 7)
        self.queues[self._rank, peer].put(ctypes.string_at(ptr, count))

    def recv(self, ptr: int, count: int, kind: int, peer: int, stream: int) -> None:
        received = self.queues[peer, self._rank].get(timeout=20)
        assert len(received) == count
        ctypes.memmove(ptr, received, count)

    def allGather(self, ptr: int, to: int, count: int, kind: int, stream: int) -> None:
        for peer in range(WORLD):
            self.send(ptr, count, kind, peer, stream)
        for peer in range(WORLD):
            self.recv(to + peer * count, count, kind, peer, stream)


CAPTURING: set[int] = set()  # streams


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    CAPTURING.clear()
    driver = SimpleNamespace(is_capturing=lambda stream: stream in CAPTURING)
    monkeypatch.setattr("cumla.distributed.groups.driver", lambda: driver)
    Communicator.queues = {(a, b): Queue() for a in range(WORLD) for b in range(WORLD)}
    groups = threading.local()
    nccl = SimpleNamespace(
        NcclCommunicator=Communicator,
        NCCL_UINT8=1,
        groupStart=lambda: setattr(groups, "open", True),
        groupEnd=lambda: setattr(groups, "open", False),
    )
    cupy = SimpleNamespace(
        ndarray=Array,
        float32=np.float32,
        moveaxis=np.moveaxis,
        empty=lambda shape, dtype: np.empty(shape, dtype).view(Array),
        ascontiguousarray=lambda a: np.ascontiguousarray(a).view(Array),
        cuda=SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=7)),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", nccl)
    known = {np.ndarray: frameworks.NUMPY, Array: frameworks.NUMPY}
    with mock.patch.dict(frameworks.framework_of_type, known, clear=True):
        yield


@pytest.mark.parametrize("gather", [False, True])
def test_ranks_compute_what_one_rank_does(gather: bool) -> None:
    random = np.random.default_rng(0)
    batch = len(LENGTHS)
    table = random.permutation(batch * COLUMNS).reshape(batch, -1).astype(np.int32)
    cache = random.standard_normal((table.size, PAGE, 576)).astype(np.float16)
    q = random.standard_normal((batch, 1, HEADS, 576)).astype(np.float16)
    whole = cumla.mla_decode(q, cache, table, LENGTHS)

    def work(rank: int) -> Any:
        parallel = ContextParallel(Communicator(rank), page_size=PAGE)
        assert (parallel.rank, parallel.world) == (rank, WORLD)
        pages = parallel.pages(LENGTHS, table)
        state = parallel.attend(cumla.mla_decode, array(q), cache, *pages, gather=gather)
        partial = cumla.mla_decode(q, cache, *pages)
        merged = parallel.merge(array(partial.out), array(partial.lse), gather=gather)
        np.testing.assert_array_equal(merged.out, state.out)
        np.testing.assert_array_equal(merged.lse, state.lse)
        share = array(q)[:, :, rank * 2 : rank * 2 + 2]
        np.testing.assert_array_equal(parallel.gather_heads(share), q)
        return state

    with ThreadPoolExecutor(WORLD) as pool:
        states = list(pool.map(work, range(WORLD)))
    for rank, state in enumerate(states):
        own = slice(None) if gather else slice(rank * 2, rank * 2 + 2)
        np.testing.assert_allclose(state.lse, whole.lse[..., own], rtol=1e-5)
        np.testing.assert_allclose(state.out, whole.out[:, :, own], atol=1e-2, rtol=1e-2)


def test_memory_of_graphs_is_kept() -> None:
    """All that is written in a capture, and nothing else."""
    states = [np.ones((2, HEADS, 16), np.float16), np.zeros((2, HEADS), np.float32)]

    def work(rank: int) -> Any:
        parallel = ContextParallel(Communicator(rank), page_size=PAGE)
        kept = parallel._group._of_graphs
        counts, found = [], []
        for capturing in (False, True):
            if capturing:
                CAPTURING.add(7)
            barrier.wait(20)
            found.append(parallel.merge(*map(array, states)))
            counts.append(len(kept))
            barrier.wait(20)
        out, lse = found[1]
        np.testing.assert_array_equal(out, found[0].out)
        np.testing.assert_array_equal(lse, found[0].lse)
        return counts, any(it is out for it in kept), any(it is lse for it in kept)

    barrier = threading.Barrier(WORLD)
    with ThreadPoolExecutor(WORLD) as pool:
        for found in pool.map(work, range(WORLD)):
            assert found == ([0, 4], True, True)  # sent, received, out, lse


def test_a_group_of_no_kind_that_is_known() -> None:
    message = r"^group: needs a process group of torch\.distributed, .*, got builtins\.int; pass"
    with pytest.raises(TypeError, match=message):
        ContextParallel(3)


def test_arrays_of_another_framework() -> None:
    parallel = ContextParallel(Communicator(0), page_size=PAGE)
    state = np.zeros((2, HEADS, 16), np.float32), np.zeros((2, HEADS), np.float32)
    with pytest.raises(TypeError, match=r"^out: needs a cupy\.ndarray, as the group moves them"):
        parallel.merge(*state)
