# SPDX-License-Identifier: Apache-2.0
"""Every row of every section, tiny on the CPU, beside libraries that are made of the reference."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from bench.case import Section
from bench.lab import Lab
from bench.sections import SECTIONS
from tests.bench.fake_libraries import FakeLibraries

EVERY = [
    pytest.param(
        section, shape, id=f"{section.name} {section.label(shape)}",
        marks=() if place in (0, len(section.shapes) - 1) else pytest.mark.exhaustive,
    )
    for section in SECTIONS
    for place, shape in enumerate(section.shapes)
]  # fmt: skip


@pytest.fixture
def lab() -> Lab:
    lab = Lab(tiny=True)
    lab.libraries = FakeLibraries()  # type: ignore[assignment]
    return lab


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("section", "shape"), EVERY)
def test_a_row_is_right_and_so_are_the_libraries(lab: Lab, section: Section, shape: Any) -> None:
    case = section.build(lab, **shape)
    assert case.error(case.run()) <= case.limit
    assert set(shape) == set(section.columns)
    for name, variants in case.peers.items():
        assert len({variant.name for variant in variants}) == len(variants)
        for variant in variants:
            assert case.error(variant.call()) <= case.peer_limit, (name, variant.name)
    assert case.nbytes > 0 or section.name == "schedules"


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_labels_tell_rows_apart(section: Section) -> None:
    labels = [section.label(shape) for shape in section.shapes]
    assert len(set(labels)) == len(labels)
    assert all(set(shape) == set(section.columns) for shape in section.shapes)


def test_sections_have_names_of_their_own() -> None:
    assert len({section.name for section in SECTIONS}) == len(SECTIONS)


@pytest.mark.usefixtures("one_thread")
def test_a_wrong_result_is_seen(lab: Lab) -> None:
    for section in SECTIONS:
        case = section.build(lab, **section.shapes[0])
        out = case.run()
        if out is None:  # a schedule: what it is good for is checked
            continue
        if out.dtype.itemsize == 1:
            out.bitwise_xor_(0x40)
        else:
            out.add_(1)
        assert not case.error(out) <= case.limit, section.name
