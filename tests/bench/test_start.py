# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import start


def test_start_times_come_from_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMLA_CUBIN_DIR", "/somewhere")
    ran: list[tuple[tuple[str, ...], dict[str, str]]] = []

    def fake_run(command: list[str], *, env: dict[str, str], **options: object) -> Any:
        ran.append((tuple(command[1:]), env))
        return SimpleNamespace(stdout=f"{len(ran)}.0\n")

    monkeypatch.setattr(start.subprocess, "run", fake_run)
    found = start.measure()
    # 1 to 3 are dropped; then 4, 7, ... 28 and so on; a cold call and three warm ones
    assert list(found.values()) == [16.0, 17.0, 18.0, 31.0, 33.0]
    assert ["import cumla" in command[1] for command, _ in ran[:4]] == [True, False, False, True]
    assert Path(ran[-1][0][0]).name == "first_call.py"
    assert len({env["CUPY_CACHE_DIR"] for _, env in ran}) == 1
    assert all("CUMLA_CUBIN_DIR" not in env for _, env in ran)


def test_an_import_is_timed_and_a_failing_process_told(tmp_path: Path) -> None:
    assert 0 < start._seconds(("-c", start._TIMED.format("import cumla")), str(tmp_path)) < 60
    with pytest.raises(start.StartError, match="no such luck"):
        start._seconds(("-c", "raise RuntimeError('no such luck')"), str(tmp_path))
