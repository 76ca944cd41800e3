# SPDX-License-Identifier: Apache-2.0
"""Rows of bench.prefixes on the CPU, with FlashInfer's cascade as cumla has it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from bench import masks, prefixes
from tests.bench.fake_libraries import FakeLibraries


@pytest.mark.parametrize("shape", prefixes.SHAPES, ids=lambda shape: shape.name)
def test_rows(monkeypatch: pytest.MonkeyPatch, shape: prefixes.Shape) -> None:
    monkeypatch.setattr(prefixes, "DEVICE", "cpu")
    monkeypatch.setattr(prefixes, "timed", lambda calls, flush: dict.fromkeys(calls, 1.0))
    heads = {"heads": shape.heads // (shape.kv_heads or shape.heads) * 2}
    heads["kv_heads"] = 2 if shape.kv_heads else 0
    groups, members = min(shape.groups, 2), min(shape.members, 3)
    few = shape._replace(prefix=min(shape.prefix, 1024), rest=128, **heads)
    libraries: Any = FakeLibraries()
    row = prefixes.measured(None, few._replace(groups=groups, members=members), libraries)
    assert "without FlashInfer" not in row
    has_peer = shape.kv_heads and shape.columns == 128 and shape.prefix
    assert ("FlashInfer" in row["us"]) == bool(has_peer)
    assert {"plain", "groups", "find", "update"} <= set(row["us"])
    assert max(row["errors"].values()) < masks.LIMIT
