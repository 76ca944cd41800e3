# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's cascade on torch's CUDA tensors: two levels give what whole requests give."""

from __future__ import annotations

from typing import Any

import pytest

import cumla
from cumla.compat import flashinfer

KERNELS = ("attention", "merge_states", "ragged_schedule")
MAY_SKIP = ()
torch = pytest.importorskip("torch")

DEVICE = "cuda"
HEADS, KV_HEADS, DIM, PAGE, PAGES, MOST = 16, 4, 128, 16, 400, 200
MEMBERS = 12


@pytest.fixture(autouse=True)
def prepared() -> None:
    cumla.prepare(cumla.attention, cumla.merge_attention_states)


def int32(numbers: Any) -> Any:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def offsets_of(counts: list[int]) -> Any:
    return int32([0, *torch.tensor(counts).cumsum(0).tolist()])


class Levels:
    """Two groups of requests with a prefix each, and pages of their own."""

    def __init__(self, seed: int) -> None:
        some = torch.Generator().manual_seed(seed)
        pages = torch.randperm(PAGES, generator=some).tolist()

        def numbers(low: int, high: int, count: int) -> list[int]:
            return torch.randint(low, high, (count,), generator=some).tolist()

        members = [5, MEMBERS - 5]
        self.prefixes = [[pages.pop() for _ in range(n)] for n in numbers(10, 60, 2)]
        self.rests = [[pages.pop() for _ in range(n)] for n in numbers(1, 8, MEMBERS)]
        self.last = numbers(1, PAGE + 1, MEMBERS)
        self.group = [0] * members[0] + [1] * members[1]
        self.arrays: list[list[Any]] = [
            [offsets_of(members), int32(list(range(MEMBERS + 1)))],
            [offsets_of([len(p) for p in part]) for part in (self.prefixes, self.rests)],
            [int32(sum(part, [])) for part in (self.prefixes, self.rests)],  # noqa: RUF017
            [int32([PAGE, PAGE]), int32(self.last)],
        ]

    def expected(self, q: Any, cache: Any) -> Any:
        rows = [self.prefixes[g] + rest for g, rest in zip(self.group, self.rests, strict=True)]
        lens = [(len(row) - 1) * PAGE + n for row, n in zip(rows, self.last, strict=True)]
        table = torch.zeros(MEMBERS, max(map(len, rows)), dtype=torch.int32)
        for own, row in zip(table, rows, strict=True):
            own[: len(row)] = torch.tensor(row)
        lengths = {"kv_lens": int32(lens), "block_table": table.to(DEVICE)}
        return cumla.attention(q[:, None], cache[:, 0], cache[:, 1], **lengths).out[:, 0]


def arrays_of(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    kind: dict[str, Any] = {"dtype": torch.float16, "device": DEVICE}
    q = torch.randn(MEMBERS, HEADS, DIM, **kind)
    return q, torch.randn(PAGES, 2, PAGE, KV_HEADS, DIM, **kind)


def plan(wrapper: Any, levels: Levels) -> None:
    options = {"causal": True, "q_data_type": torch.float16}
    wrapper.plan(*levels.arrays, HEADS, KV_HEADS, DIM, PAGE, **options)


def test_two_levels() -> None:
    workspace = torch.empty(16, dtype=torch.uint8, device=DEVICE)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace, "NHD")
    for seed in range(4):
        levels, (q, cache) = Levels(seed), arrays_of(seed)
        plan(wrapper, levels)
        got = wrapper.run(q, cache)
        torch.testing.assert_close(got, levels.expected(q, cache), atol=3e-3, rtol=3e-3)


def test_a_graph_serves_later_plans() -> None:
    workspace = torch.empty(16, dtype=torch.uint8, device=DEVICE)
    buffers = [
        [torch.zeros(n, dtype=torch.int32, device=DEVICE) for n in sizes]
        for sizes in ((3, MEMBERS + 1), (3, MEMBERS + 1), (MOST, MOST), (2, MEMBERS))
    ]
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace, "NHD", True, *buffers)
    q, cache = arrays_of(0)
    plan(wrapper, Levels(0))
    wrapper.run(q, cache)  # torch loads its kernels when they are first called
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = wrapper.run(q, cache)
    for seed in (1, 2, 0):
        levels = Levels(seed)
        plan(wrapper, levels)
        out.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(out, levels.expected(q, cache), atol=3e-3, rtol=3e-3)
