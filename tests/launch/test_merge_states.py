# SPDX-License-Identifier: Apache-2.0
"""What is packed for merge_states, read back from the bytes by a stand-in for the kernel.

The stand-in finds every array by the addresses and strides of the struct, and merges with the
reference; whatever the struct does not name is NaN.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cumla import merge, reference
from cumla.core.arrays import ArrayView
from cumla.distributed.merge import MergeOfRanks
from cumla.launch.kernel import Launch
from cumla.launch.merge_states import MOST_PARTIALS, MOST_RANKS, SPECS, Meeting, StateViews
from tests.selection import some

OUT_DTYPES = {0: np.float32, 1: ml_dtypes.bfloat16, 2: np.float16}  # of enum OutType


def at(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> np.ndarray:
    """The array that lies at an address."""
    dtype = np.dtype(dtype)
    reach = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + dtype.itemsize
    memory = (ctypes.c_char * reach).from_address(address)
    return np.ndarray(shape, dtype, memory, strides=strides)


class StandIn:
    """A kernel that works on NumPy's memory, by the packed struct of a launch."""

    def __init__(self, launch: Launch) -> None:
        self.fields = launch.layout.unpack(launch.layout.pack(*launch.values))
        self.grid, self.dtype = launch.grid, launch.spec.entry.removeprefix("merge_states_")
        rows, tokens, heads, columns, lanes_log2, count, out_type = self.fields[16:23]
        self.out_type, self.lanes, self.count = out_type, 1 << lanes_log2, count
        self.shape = (rows // (tokens * heads), tokens, heads)
        self.head_dim = columns * 16 // np.dtype(merge_numpy(self.dtype)).itemsize

    def state(self, first: int, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
        """The output and the logarithms whose fields begin there."""
        out, *steps = self.fields[first : first + 4]
        lse, *lse_steps = self.fields[first + 4 : first + 8]
        shape = (*self.shape, self.head_dim)
        strides = (*steps, np.dtype(dtype).itemsize)
        return at(out, shape, strides, dtype), at(lse, self.shape, tuple(lse_steps), np.float32)

    def __call__(self) -> None:
        dtype = merge_numpy(self.dtype)
        states = [self.state(27 + 8 * i, dtype) for i in range(self.count)]
        if self.fields[8]:
            states.insert(0, self.state(8, np.float32))
        out, lse = self.state(0, OUT_DTYPES[self.out_type])
        to_log2, from_log2 = self.fields[23:25]
        assert to_log2 * from_log2 == pytest.approx(1.0)
        merged = reference.merge_attention_states(
            [out.astype(np.float32) for out, _ in states],
            [lse for _, lse in states],
            lse_base=2 if to_log2 == 1 else math.e,
        )
        out[...], lse[...] = merged.out, merged.lse


def merge_numpy(dtype: str) -> Any:
    return {"bfloat16": ml_dtypes.bfloat16}.get(dtype, dtype)


def view(array: np.ndarray) -> ArrayView:
    return ArrayView(array.ctypes.data, array.shape, array.strides, array.dtype.name, 0)


@pytest.fixture
def launches() -> Callable[..., list[StandIn]]:
    """Merge arrays as on a GPU, by stand-ins, which come back."""

    def run(
        outs: Any, lses: Any, out: np.ndarray, lse: np.ndarray, base: float = math.e
    ) -> list[StandIn]:
        named = {**merge.named("outs", outs), **merge.named("lses", lses)}
        views = {name: view(array) for name, array in named.items()}
        arguments = merge._MERGE.arguments(views, merge.MERGE.Options(base))
        memory = np.full(4 * (out.size + lse.size), 0xFF, np.uint8)
        results = view(out), view(lse)
        recipe = merge._MERGE.recipe(memory.nbytes, arguments, results, memory.ctypes.data)
        made = [StandIn(launch) for launch in recipe]
        for launch in made:
            launch()
        return made

    return run


def states(
    count: int, shape: tuple[int, ...], dtype: Any, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Stacked partial results in padded memory, their logarithms in the other order of axes."""
    rng = np.random.default_rng(seed)
    wide = np.full((*shape[:-1], count, shape[-1] + 16), np.nan, dtype)
    outs = np.moveaxis(wide, -2, 0)[..., : shape[-1]]
    outs[...] = rng.standard_normal(outs.shape)
    lses = rng.standard_normal((count, *shape[-2::-1])).astype(np.float32)
    return outs, lses.transpose(0, *range(len(shape) - 1, 0, -1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(7, 3, 8), (5, 96, 72), (2, 3, 4, 512), (3, 1, 1, 2048)])
@pytest.mark.parametrize("stacked", [False, True])
def test_every_row_of_every_state_is_found(
    launches: Callable[..., list[StandIn]], dtype: str, shape: tuple[int, ...], stacked: bool
) -> None:
    outs, lses = states(5, shape, merge_numpy(dtype))
    arguments = (outs, lses) if stacked else (list(outs), list(lses))
    for kind in OUT_DTYPES.values():
        out = np.full((*shape[:-1], shape[-1] + 8), np.nan, kind)[..., : shape[-1]]
        lse = np.full(lses.shape[1:], np.nan, np.float32)
        (launch,) = launches(*arguments, out, lse, base=2)
        expected = reference.merge_attention_states(outs, lses, out=np.empty(shape), lse_base=2)
        np.testing.assert_allclose(out.astype(float), expected.out, rtol=5e-3, atol=1e-6)
        np.testing.assert_allclose(lse, expected.lse, rtol=1e-6)
        assert launch.count == 5


@pytest.mark.parametrize("count", [1, MOST_PARTIALS, MOST_PARTIALS + 1, 2 * MOST_PARTIALS + 5])
@pytest.mark.parametrize("shape", [(7, 3, 8), (2, 3, 4, 16)])
def test_any_number_of_partial_results(
    launches: Callable[..., list[StandIn]], count: int, shape: tuple[int, ...]
) -> None:
    """What is handed from launch to launch is float32: nothing is rounded to 16 bits between."""
    outs, lses = states(count, shape, ml_dtypes.bfloat16)
    lses[:MOST_PARTIALS, 1] = np.inf  # a row of which the first launch finds nothing
    expected = reference.merge_attention_states(outs, lses, out=np.empty(shape))
    out, lse = np.full(shape, np.nan, np.float32), np.full(lses.shape[1:], np.nan, np.float32)
    made = launches(list(outs), list(lses), out, lse)
    assert sum(launch.count for launch in made) == count
    assert len(made) == -(-count // MOST_PARTIALS)
    np.testing.assert_allclose(out, expected.out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, expected.lse, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", some([8, 16, 24, 64, 128, 520, 4096], 2))
@pytest.mark.parametrize(("count", "at_once"), [(1, 4), (2, 4), (3, 2), (8, 2)])
def test_lanes_and_blocks_cover_every_row(
    launches: Callable[..., list[StandIn]], dtype: str, head_dim: int, count: int, at_once: int
) -> None:
    kind = np.dtype(merge_numpy(dtype))
    for rows in (1, 31, 32, 33, 300):
        outs, lses = states(count, (rows, 1, head_dim), kind)
        out, lse = np.empty((rows, 1, head_dim), kind), np.empty((rows, 1), np.float32)
        (launch,) = launches(list(outs), list(lses), out, lse)
        columns = head_dim * kind.itemsize // 16
        in_block = SPECS[0].threads // launch.lanes
        assert launch.lanes in (1, 2, 4, 8, 16, 32)
        assert (launch.grid[0] - 1) * in_block < rows <= launch.grid[0] * in_block
        assert launch.lanes == 32 or at_once * launch.lanes >= columns
        assert launch.lanes == 1 or launch.lanes < columns  # none of the lanes idles


def test_ranks_that_wait_for_one_another() -> None:
    outs, lses = states(2, (2, 3, 4, 16), np.float32)
    named = {**merge.named("outs", list(outs)), **merge.named("lses", list(lses))}
    views = {name: view(array) for name, array in named.items()}
    for operation, packed in (
        (merge._MERGE, (0, 0, *[0] * MOST_RANKS, 0)),
        (MergeOfRanks(Meeting(1, (64, 128), 7)), (2, 1, 64, 128, 0, 0, 0, 0, 0, 0, 7)),
    ):
        arguments = operation.arguments(views, merge.MERGE.Options(2.0))
        (launch,) = operation.recipe(0, arguments, (view(outs[0]), view(lses[0])), 0)
        stand_in = StandIn(launch)
        assert (*stand_in.fields[25:27], *stand_in.fields[507:]) == packed
        assert stand_in.count == 2 and stand_in.fields[27 + 8] == outs[1].ctypes.data


def test_views_have_as_many_fields_as_the_struct() -> None:
    out, lse = np.zeros((2, 3, 4, 8), np.float32), np.zeros((2, 3, 4), np.float32)
    state = merge._state(view(out), view(lse))
    assert isinstance(state, StateViews)
    names = "out", "out_strides", "lse", "lse_strides"
    assert tuple(state.named) == names
    assert (*state.named.values(),) == (
        out.ctypes.data,
        (384, 128, 32),
        lse.ctypes.data,
        (48, 16, 4),
    )
