# SPDX-License-Identifier: Apache-2.0
"""Random batches, on the CPU: all rows run, and other bits are found."""

from __future__ import annotations

from typing import Any

import pytest

import cumla

pytest.importorskip("torch")
from bench import invariance


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    small: dict[str, Any] = {"DEVICE": "cpu", "POOL": 8, "MOST_BATCH": 4, "MOST_TOKENS": 300}
    for name, value in (small | {"CUT": 16}).items():
        monkeypatch.setattr(invariance, name, value)


@pytest.mark.parametrize("row", invariance.ROWS, ids=lambda row: row.name)
def test_rows(row: invariance.Row) -> None:
    found = invariance.placed(row, 12)
    assert found["several"] == []
    assert found["requests"] >= 12


def test_other_bits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the last request of a batch, wherever others have it."""
    real = cumla.mla_decode

    def wrong(*arrays: Any, **options: Any) -> Any:
        state = real(*arrays, **options)
        state.lse[-1] *= 1 + 2**-20
        return state

    monkeypatch.setattr(cumla, "mla_decode", wrong)
    assert invariance.placed(invariance.ROWS[0], 60)["several"]
