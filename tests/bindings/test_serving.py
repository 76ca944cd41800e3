# SPDX-License-Identifier: Apache-2.0
"""What the plugins of servers share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cumla._serving import _MOST_PLANS, Plans, ShardedStep, Step, backend_of  # noqa: E402


class FakePlan:
    """Remembers its buffer, and its updates."""

    def __init__(self, nbytes: int, workspace: Any, like: Any) -> None:
        self.workspace = workspace
        self.updates: list[Any] = []

    @staticmethod
    def workspace_bytes(nbytes: int) -> int:
        return nbytes

    def update(self, kv_lens: Any, qo_indptr: Any) -> None:
        self.updates.append(kv_lens)

    def prepare(self) -> None: ...

    def run(self, q: Any, cache: Any, **options: Any) -> Any:
        assert self.updates
        return q, cache


def begun(plans: Plans, nbytes: int) -> Step:
    return plans.begin(FakePlan, (nbytes,), torch.ones(1), torch.zeros(1))


def ran(plans: Plans, nbytes: int) -> Any:
    """Return the plan of a step one of whose layers ran."""
    step = begun(plans, nbytes)
    step.run("q", torch.zeros(1))
    return step.plan


def test_plans_share_a_buffer_and_move_to_a_larger_one() -> None:
    plans = Plans(torch.device("meta"), {})
    first, small = ran(plans, 1000), ran(plans, 10)
    assert small.workspace is first.workspace
    large = ran(plans, 2000)
    assert large.workspace.numel() == 2000
    assert ran(plans, 20).workspace is large.workspace
    again = ran(plans, 10)
    assert again.workspace is large.workspace
    assert ran(plans, 10) is again
    for n in range(_MOST_PLANS):
        ran(plans, 100 + n)
    assert ran(plans, 10) is not again


def test_a_captured_step_keeps_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graph writes to the plan's buffer."""
    plans = Plans(torch.device("meta"), {})
    step = begun(plans, 1000)
    step.prepare()
    plan = step.plan
    monkeypatch.setattr("cumla._serving.current_capture", lambda on: (0, 1))
    step.run("q", torch.zeros(1))
    monkeypatch.undo()
    ran(plans, 2000)
    assert ran(plans, 1000) is not plan
    assert [kept.plan for kept in plans.captured] == [plan]


def test_a_captured_step_of_a_rank_keeps_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer updates it in the graph, which writes to its buffer."""

    class Sharded(FakePlan):
        def __init__(self, *sizes: Any, **place: Any) -> None:
            super().__init__(0, **place)

        @staticmethod
        def workspace_bytes(*sizes: int) -> int:
            return sizes[1]  # tokens

        def update(self, kv_lens: Any, qo_indptr: Any = None) -> None:
            super().update(kv_lens, qo_indptr)

        def run(self, q: Any, cache: Any, *lists: Any, **options: Any) -> Any:
            return torch.zeros(1, 1, 1, 1), None

    monkeypatch.setattr("cumla.MLASparsePlan", Sharded)
    plans = Plans(torch.device("meta"), {})
    lists = SimpleNamespace(topk_lens=None, indices=None)
    parallel = SimpleNamespace(lists=lambda *_: lists)

    def layers(tokens: int) -> Any:
        step = ShardedStep(plans, 16, 8, parallel, torch.zeros(tokens))
        step.prepare()
        for _ in range(2):
            step.run_sparse(torch.zeros(tokens, 16, 512), torch.zeros(1), None, None)
        return step.plan

    monkeypatch.setattr("cumla._serving.current_capture", lambda on: (7, 1))
    plan = layers(2)
    monkeypatch.setattr("cumla._serving.current_capture", lambda on: (0, 0))
    assert len(plan.updates) == 2
    larger = layers(1000)
    assert larger.workspace is not plan.workspace
    assert [kept.plan for kept in plans.captured] == [plan]


def test_memory_of_a_load_that_grows_is_bounded_by_the_largest_shape() -> None:
    plans = Plans(torch.device("meta"), {})
    for nbytes in range(1000, 50_000, 100):
        ran(plans, nbytes)
        buffers = {id(plan.workspace): plan.workspace.numel() for plan in plans._plans.values()}
        assert sum(buffers.values()) <= max(1.5 * nbytes, 1000)


def test_layers_of_a_step_update_once() -> None:
    plans, cache = Plans(torch.device("meta"), {}), torch.zeros(1)
    steps = begun(plans, 8), begun(plans, 8)
    for _ in range(3):
        steps[0].run("q", cache)
    assert len(steps[0].plan.updates) == 1
    for step in (*steps, *steps):  # take turns with one plan
        step.run("q", cache)
    assert len(steps[0].plan.updates) == 4


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
