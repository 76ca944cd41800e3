# SPDX-License-Identifier: Apache-2.0
"""The comparison of kernels, but for its times."""

from __future__ import annotations

from typing import Any

import pytest

from cumla.bench import variants
from cumla.bench.cases import Case
from cumla.bench.explain import key_of
from cumla.cli import main
from cumla.errors import CumlaError


def test_at_least_60_different_shapes_are_compared() -> None:
    assert len(set(variants.SHAPES)) == len(variants.SHAPES) >= 60
    chosen = {key_of(case, 132).variant for case in variants.SHAPES}
    assert chosen == {"swapped", "one_tile", "shared_blocks"}


@pytest.mark.parametrize(
    ("case", "names"),
    [
        (Case(4, 1, 16, 1024), ("swapped", "one_tile", "shared_blocks")),
        (Case(4, 2, 8, 1024), ("swapped", "one_tile", "shared_blocks")),
        (Case(4, 2, 16, 1024), ("one_tile", "shared_blocks")),
        (Case(4, 2, 16, 1024, kv_heads=2), ("swapped", "one_tile", "shared_blocks")),
        (Case(4, 1, 128, 1024), ("one_tile", "shared_blocks")),
    ],
)
def test_kernels_that_can_serve(case: Case, names: tuple[str, ...]) -> None:
    key = key_of(case, 132)
    assert variants.admissible(key) == names
    assert key.variant in names


def row(chosen: str, **times: float) -> dict[str, Any]:
    return Case(4, 1, 16, 1024).to_json() | {"chosen": chosen, "us": times}


def test_the_worst_choice() -> None:
    good = row("one_tile", one_tile=10.0, shared_blocks=12.0)
    bad = row("shared_blocks", one_tile=10.0, shared_blocks=12.0)
    wrong = {key: value for key, value in bad.items() if key != "us"} | {"failed": "out is wrong"}
    assert variants.worst([good, wrong]) == 1.0
    assert variants.worst([good, bad]) == pytest.approx(1.2)
    text = variants.to_text({"variants": [good, bad, wrong], "worst": 1.2})
    assert "shared_blocks is chosen, 1.20 x the best" in text
    assert "out is wrong" in text
    assert text.endswith("3 shapes; worst choice: 1.200 x the best")


@pytest.mark.parametrize("name", ["CUMLA_CHECK", "CUMLA_DEBUG"])
def test_slow_kernels_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(CumlaError, match=f"{name}=1: unset it"):
        next(variants.run_variants(variants.SHAPES, lambda line: None))


def test_the_command_runs_the_cases_it_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    asked: list[tuple[Case, ...]] = []

    def run_variants(cases: tuple[Case, ...], note: Any) -> Any:
        asked.append(cases)
        results: dict[str, Any] = {"variants": [], "worst": 1.0}
        for case in cases:
            results["variants"].append(
                case.to_json() | {"chosen": "one_tile", "us": {"one_tile": 1.0}}
            )
            note(case.name)
            yield results

    monkeypatch.setattr(variants, "run_variants", run_variants)
    file = tmp_path / "new" / "variants.json"
    assert main(["bench", "--variants", "--batch", "2", "--heads", "32", "--json", str(file)]) == 0
    assert asked == [(Case(2, 1, 32, 4096),)]
    assert "1 shapes; worst choice: 1.000 x the best" in capsys.readouterr().out
    assert '"worst": 1.0' in file.read_text(encoding="utf-8")
    assert main(["bench", "--variants"]) == 0
    assert asked[-1] == variants.SHAPES
