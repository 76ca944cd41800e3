# SPDX-License-Identifier: Apache-2.0
"""What the plugins of servers share."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cumla._serving import _MOST_PLANS, Plans, Step, check_version  # noqa: E402


class FakePlan:
    """Remembers its buffer, and its updates."""

    def __init__(self, nbytes: int, workspace: Any, like: Any) -> None:
        self.workspace = workspace
        self.serving: set[int] = set()
        self.updates: list[Any] = []

    @staticmethod
    def workspace_bytes(nbytes: int) -> int:
        return nbytes

    def update(self, kv_lens: Any) -> None:
        self.updates.append(kv_lens)
        self.serving = {0}

    def serves(self, stream: int) -> bool:
        return stream in self.serving

    def run(self, q: Any, cache: Any, **options: Any) -> Any:
        assert self.serving
        return q, cache


def test_plans_share_a_buffer_and_a_shape_keeps_its_own() -> None:
    plans = Plans(torch.device("meta"), {})

    def of(nbytes: int) -> FakePlan:
        plan: FakePlan = plans.begin(FakePlan, (nbytes,), torch.zeros(1)).plan
        return plan

    first, small = of(1000), of(10)
    assert small.workspace is first.workspace
    large = of(2000)
    assert large.workspace.numel() == 2000
    assert of(20).workspace is large.workspace
    assert of(10) is small
    for n in range(_MOST_PLANS):
        of(100 + n)
    again = of(10)
    assert again is not small
    assert again.workspace is small.workspace  # where a graph looks for its schedule


def test_a_run_on_another_stream_updates_there_first() -> None:
    lengths, cache = torch.ones(1), torch.zeros(1)
    step: Step = Plans(torch.device("meta"), {}).begin(FakePlan, (8,), lengths)
    step.run("q", cache)
    assert len(step.plan.updates) == 1
    step.plan.serving = {7}
    step.run("q", cache)
    assert all(given is lengths for given in step.plan.updates)
    assert len(step.plan.updates) == 2


@pytest.mark.parametrize("version", ["0.5.20", "0.5.23.post1", "0.5.21rc0"])
def test_tested_versions_are_taken(version: str) -> None:
    check_version("sglang", version, ((0, 5, 20), (0, 5, 23)), "cumla")


@pytest.mark.parametrize("version", ["0.5.19", "0.5.24", "0.6.0", "0.5", "dev"])
def test_other_versions_are_refused_with_the_way_out(version: str) -> None:
    match = rf'^sglang: .* from 0.5.20 to 0.5.23, got {version}; install .*"sglang>=0.5.20,<0.5.24"'
    with pytest.raises(RuntimeError, match=match):
        check_version("sglang", version, ((0, 5, 20), (0, 5, 23)), "cumla")
