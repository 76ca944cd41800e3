# SPDX-License-Identifier: Apache-2.0
"""What records context parallelism: its rows, by one rank on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from bench import context_parallel as bench


def test_a_case_is_compared_and_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_POOL_BYTES", 1 << 20)
    monkeypatch.setattr(bench, "_LINKS", (64,))
    ranks = bench.Ranks(0, 1, str(tmp_path))
    if ranks.device.type != "cpu":
        pytest.skip("for machines without a GPU")
    try:
        row = bench.measure(ranks, bench.Case(2, 4, 200))
        links = bench.links(ranks)
    finally:
        ranks.dist.destroy_process_group()
    assert "failed" not in row
    assert row["ratio"] == row["one_us"] / row["all_us"] and row["exchanged_bytes"] == 0
    assert all(row[f"{name}_us"] > 0 for name in ("share", "exchange", "merge", "maps"))
    text = bench.to_markdown({"rows": [row], "links": links, "protocol": "P"})
    assert "| 2 | 4 | 200 |" in text and "| 64 |" in text
