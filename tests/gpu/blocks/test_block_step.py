# SPDX-License-Identifier: Apache-2.0
"""A step of block-sparse attention against the functions that it consists of: bits, graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cumla
from tests.blocks.step_cases import SUMS, Case
from tests.gpu.tools.memory import Memory

KERNELS = ("block_attention", "block_lists", "block_rows", "block_scores", "select_blocks")
cp: Any = pytest.importorskip("cupy")

CASES = (
    *(Case(), Case(q_len=3), Case(q_len=0), Case(index_heads=1)),
    Case(q_len=2, block_size=32, init_blocks=1, local_blocks=2),
    *(Case(index_dim=128), Case(q_len=2, index_dim=128, causal=False)),
    *SUMS,
)


def uploaded(case: Case, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    host = case.arguments(seed)
    return host, {name: Memory(cp).upload(value) for name, value in host.items()}


def of(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: given[name] for name in names if name in given}


def parts(case: Case, there: dict[str, Any], visible: Any) -> tuple[Any, ...]:
    """Lists, out and lse, by the three functions on the GPU."""
    scores = case.scores(there)
    lists = cumla.select_blocks(scores, 4, visible=cp.asarray(visible), **case.forced)
    return lists, *case.attend(there, lists)


def same(got: Any, want: Any) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.get().tobytes() == other.get().tobytes()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_step_is_its_three_parts(case: Case) -> None:
    host, there = uploaded(case)
    step = case.step(there)
    for lens in (case.lens, case.lens + 1, np.maximum(case.lens - 31, 0)):
        there["kv_lens"] = cp.asarray(lens)
        want = parts(case, there, case.visible(host | {"kv_lens": lens}))
        case.update(step, there)
        for _ in range(2):
            case.select(step, there)
            same((step.blocks, *case.run(step, there)), want)
        lists, out, _ = case.expected(host | {"kv_lens": lens})
        np.testing.assert_array_equal(step.blocks.get(), lists)
        np.testing.assert_allclose(want[1].get(), out, atol=4e-3)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_graphs(case: Case) -> None:
    """Two layers, the second of which shares the choice; lengths change between replays."""
    host, there = uploaded(case)
    _, other = uploaded(case, seed=1)
    other |= of(there, "block_table", "kv_lens", "qo_indptr")
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.get_current_stream().synchronize()  # the arrays are there

    def layers(step: cumla.BlockSparseStep, outs: Any) -> None:
        case.update(step, there)
        case.select(step, there)
        for given, (out, lse) in zip((there, other), outs, strict=True):
            case.run(step, given, out=out, lse=lse)

    with stream:
        shape = there["q"].shape
        outs = [(cp.empty(shape, np.float16), cp.empty(shape[:-1], np.float32)) for _ in "ab"]
        step = case.step(there)
        step.prepare()
        layers(step, outs)
        stream.begin_capture()
        layers(step, outs)
        graph = stream.end_capture()
    for lens in (np.int32([0, 17, 256]), np.int32([31, 32, 33]), case.lens):
        with stream:
            there["kv_lens"].set(lens)
            graph.launch(stream)
        stream.synchronize()
        want = parts(case, there, case.visible(host | {"kv_lens": lens}))
        same(outs[0], want[1:])
        same(outs[1], case.attend(other, want[0]))
