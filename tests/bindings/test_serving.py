# SPDX-License-Identifier: Apache-2.0
"""What the plugins of servers share."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cumla._serving import _MOST_PLANS, Plans, Step, backend_of  # noqa: E402


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


def test_plans_share_a_buffer_and_a_shape_in_a_graph_keeps_its_own() -> None:
    plans = Plans(torch.device("meta"), {})

    def step_of(nbytes: int) -> Step:
        return plans.begin(FakePlan, (nbytes,), torch.zeros(1))

    def of(nbytes: int) -> FakePlan:
        plan: FakePlan = step_of(nbytes).plan
        return plan

    first, captured = of(1000), step_of(10)
    assert captured.plan.workspace is first.workspace
    captured.note_capture()
    large = of(2000)
    assert large.workspace.numel() == 2000
    assert of(20).workspace is large.workspace
    assert of(1000).workspace is large.workspace
    assert of(10) is captured.plan
    for n in range(_MOST_PLANS):
        of(100 + n)
    again = of(10)
    assert again is not captured.plan
    assert again.workspace is captured.plan.workspace  # where a graph looks for its schedule


def test_buffers_of_a_load_that_grows_are_bounded_by_the_largest_shape() -> None:
    plans = Plans(torch.device("meta"), {})
    for nbytes in range(1000, 50_000, 100):
        plans.begin(FakePlan, (nbytes,), torch.zeros(1))
    buffers = {id(buffer): buffer.numel() for buffer in plans._buffers.values()}
    assert sum(buffers.values()) <= 1.5 * 50_000


def test_a_run_whose_plan_was_lost_updates_first() -> None:
    lengths, cache = torch.ones(1), torch.zeros(1)
    step: Step = Plans(torch.device("meta"), {}).begin(FakePlan, (8,), lengths)
    step.run("q", cache)
    assert len(step.plan.updates) == 1
    step.plan.serving = {7}
    step.run("q", cache)
    assert all(given is lengths for given in step.plan.updates)
    assert len(step.plan.updates) == 2


TESTED = (0, 5, 20), (0, 5, 23)


def served(version: str, module: str = "cumla.errors", kind: str = "CumlaError") -> Any:
    return backend_of("sglang", version, TESTED, "cumla", module, (kind,))


@pytest.mark.parametrize("version", ["0.5.20", "0.5.23.post1", "0.5.21rc0"])
def test_tested_versions_are_taken(version: str, caplog: pytest.LogCaptureFixture) -> None:
    assert served(version).CumlaError
    assert not caplog.records


@pytest.mark.parametrize("version", ["0.5.24", "0.6.0", "dev"])
def test_newer_versions_are_taken_with_a_warning(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert served(version).CumlaError
    assert f"not with {version}:" in caplog.text


@pytest.mark.parametrize(
    ("version", "module", "kind"),
    [
        ("0.5.19", "cumla.errors", "CumlaError"),
        ("0.6.0", "cumla.no_such_module", "Backend"),
        ("0.6.0", "collections.abc", "Sized"),  # has an abstract method
    ],
)
def test_other_versions_are_refused_with_the_way_out(version: str, module: str, kind: str) -> None:
    match = rf'^sglang: .* from 0.5.20 to 0.5.23, .* got {version}.*"sglang>=0.5.20,<0.5.24"'
    with pytest.raises(RuntimeError, match=match):
        served(version, module, kind)
