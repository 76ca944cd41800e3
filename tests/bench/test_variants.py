# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace

import pytest

from bench import variants
from cumla.bench.cases import Case
from cumla.bench.explain import key_of
from tests.bench.conftest import Fakes


@pytest.mark.parametrize(
    ("case", "names"),
    [
        (Case(4, 1, 16, 1024), ("swapped", "one_tile", "shared_blocks")),
        (Case(4, 2, 16, 1024), ("one_tile", "shared_blocks")),
        (Case(4, 2, 16, 1024, kv_heads=2), ("swapped", "one_tile", "shared_blocks")),
        (Case(4, 1, 128, 1024), ("one_tile", "shared_blocks")),
    ],
)
def test_kernels_that_can_serve(case: Case, names: tuple[str, ...]) -> None:
    key = key_of(case, 132)
    assert variants.admissible(key) == names
    assert key.variant in names


def test_every_kernel_is_compared_somewhere() -> None:
    keys = [key_of(case, 132) for case in variants.SECTION.cases]
    assert {key.variant for key in keys} == {"swapped", "one_tile", "shared_blocks"}


def test_kernels_take_turns(fakes: Fakes) -> None:
    section = replace(variants.SECTION, cases=(Case(2, 1, 2, 70),))
    (row,) = fakes.measure(section)["variants"]
    assert row["chosen"] in row["us"]
    assert set(row["us"]) == set(variants.admissible(key_of(Case(2, 1, 2, 70), 132)))
    slower = row | {"us": dict.fromkeys(row["us"], 12.0) | {row["chosen"]: 15.0}}
    failed = {"failed": "out is wrong"}
    assert variants.worst([failed]) == 1.0
    assert variants.worst([slower, failed]) == pytest.approx(1.25)
