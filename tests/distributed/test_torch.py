# SPDX-License-Identifier: Apache-2.0
"""Ranks of a gloo group against one rank, as `ranks.py` runs them in four processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict]:
    """Each rank's cases, with what went wrong in them."""
    options = ["--exhaustive"] if request.config.getoption("exhaustive") else []
    return found_by(4, tmp_path_factory.mktemp("ranks"), *options)


def found_by(ranks: int, folder: Path, *options: str) -> list[dict]:
    command = [sys.executable, "-m", "tests.distributed.ranks", str(folder), *options]
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | threads, timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def wrong_in(found: list[dict]) -> str:
    """Return what went wrong in the cases of all ranks, but those whose names tell of one rank."""
    return "\n".join(
        f"rank {rank}, {name}\n{problem}"
        for rank, cases in enumerate(found)
        for name, problem in cases.items()
        if problem and "that" not in name
    )


def test_eight_ranks_have_the_lists_of_one(tmp_path: Path) -> None:
    found = found_by(8, tmp_path, "--eight")
    assert not wrong_in(found), wrong_in(found)
    assert {len(cases) for cases in found} == {8}


def test_ranks_compute_what_one_rank_does(found: list[dict]) -> None:
    assert not wrong_in(found), wrong_in(found)
    assert {len(cases) for cases in found[:2]} == {len(found[0])} and len(found[0]) > 30


@pytest.mark.parametrize("case", ["a rank that lags", "a rank that dies"])
def test_the_backend_tells_of(found: list[dict], case: str) -> None:
    assert found[2][case] == ""


def test_a_group_that_is_not_initialised_yet_says_so() -> None:
    import torch

    from cumla.distributed import ContextParallel

    assert not torch.distributed.is_initialized()
    with pytest.raises(
        TypeError, match=r"^group: .* got None, .*; call .*init_process_group first$"
    ):
        ContextParallel(torch.distributed.group.WORLD)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    group = torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()
    with pytest.raises(
        ValueError, match=r"^group: .* not initialised; call .* make the group again$"
    ):
        ContextParallel(group)
