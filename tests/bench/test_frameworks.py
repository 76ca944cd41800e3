# SPDX-License-Identifier: Apache-2.0
"""What records a decoding step in each framework: rows, what did not run, and what is asked."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from bench import framework_steps, frameworks
from bench.step_case import Budget, StepCase, row_of
from tests.bench.fake_gpu import FakeGpu

STEPS = (StepCase("mla", 4, 1, 2, 70, layers=2), StepCase("mha", 4, 2, 2, 70, layers=2))
CALL = replace(STEPS[0], layers=1)
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def of_cupy() -> Rows:
    return list(framework_steps.cupy_rows(Budget(100, 1), STEPS, CALL, FakeGpu()))


def of_jax(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    pytest.importorskip("jax.ffi")
    from cumla.jax import execute

    monkeypatch.setattr(execute, "_ready", execute._ready)
    return framework_steps.jax_rows(Budget(100, 1), STEPS, CALL)


def of_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    pytest.importorskip("torch")
    return framework_steps.torch_rows(Budget(100, 1), STEPS[1:], CALL)


@pytest.mark.parametrize("make", [of_jax, of_torch])
def test_frameworks_compute_the_same(
    of_cupy: Rows, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [*of_cupy, *make(monkeypatch)]
    assert [
        row["failed"] for row in frameworks.with_limits({"rows": rows})["rows"] if "failed" in row
    ] == []
    assert all(row["us"] >= row["host_us"] > 0 for row in rows)
    steps = [row for row in rows if row["op"] == "step"]
    assert len({row["bits"] for row in steps}) == len(STEPS)


def jax_step(us: float, callbacks: list[int]) -> dict[str, Any]:
    made = row_of("step", STEPS[0], "JAX", "jit")
    return made | {"us": us, "host_us": 1.0, "burst_us": 1.0, "bits": "0", "callbacks": callbacks}


@pytest.mark.parametrize(
    ("us", "callbacks", "holds"),
    [(170.0, [5, 5, 0, 0], True), (170.2, [5, 5, 0, 0], False), (9.0, [5, 5, 0, 1], False)],
)
def test_what_is_asked_of_a_step(us: float, callbacks: list[int], holds: bool) -> None:
    graph = jax_step(100.0, []) | {"framework": "CuPy", "mode": "graph"}
    floor = {"op": "floor", "framework": "JAX", "mode": "jit", "us": 50.1}
    rows = [floor, graph, jax_step(us, callbacks)]
    (limit,) = frameworks.limits(rows)
    assert (limit["limit_us"], limit["holds"]) == (pytest.approx(170.1), holds)
    assert frameworks.limits(rows[1:]) == frameworks.limits(rows[::2]) == []
    own = row_of("floor", STEPS[0], "JAX", "jit") | {"us": 60.0}
    (limit,) = frameworks.limits([*rows, own])
    assert limit["floor_us"] == 60.0


def test_other_bits_are_said_in_the_tables() -> None:
    graph = jax_step(100.0, []) | {"framework": "CuPy", "mode": "graph"}
    wrong = jax_step(90.0, [5, 5]) | {"bits": "1"}
    results = frameworks.with_limits({"rows": [graph, wrong], "protocol": "Times"})
    text = frameworks.to_markdown(results)
    assert "JAX, jit, mla, 4, 1, 2, 70, 2: other bits than CuPy, graph" in text
    assert "| mla | 4 | 1 | 2 | 70 | 2 | JAX | jit | 90.0 | 45.0 | 1.0 | 1.0 | 5, 5 |" in text


def test_rows_that_do_not_run() -> None:
    def fail() -> Any:
        raise ValueError("no such luck\nat all")

    assert Budget(9, 1).row({"op": "call"}, fail) == {
        "op": "call",
        "failed": "ValueError: no such luck",
    }
    assert Budget(-1, 1).row({}, fail) == {"skipped": "no time was left"}


def test_processes_that_do_not_end_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they have printed stands."""
    assert frameworks.part("no_framework", 100)[0]["skipped"] == "no_framework is not installed"
    assert frameworks.part("json", 1) == [{"framework": "json", "skipped": "no time was left"}]
    (failed,) = frameworks.part("json", 60)
    assert failed == {"framework": "json", "failed": "KeyError: 'json'"}

    def late(*_: Any, **named: Any) -> Any:
        raise subprocess.TimeoutExpired("python", named["timeout"], output=b'{"us": 1.0}\nnoise\n')

    monkeypatch.setattr(subprocess, "run", late)
    told = [{"us": 1.0}, {"failed": "not done after 60 s"}]
    assert frameworks.part("json", 60) == [{"framework": "json"} | row for row in told]
