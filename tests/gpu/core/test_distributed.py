# SPDX-License-Identifier: Apache-2.0
"""A cache that is cut among two GPUs: NCCL through PyTorch and CuPy, against one GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.tools.ranks import launch

KERNELS = ("merge_states",)  # what attends and appends is tested alone elsewhere
MAY_SKIP = (
    "needs two GPUs",
    "needs PyTorch with NCCL",
    "needs libnccl for CuPy",
)
cp: Any = pytest.importorskip("cupy")


@pytest.fixture(autouse=True)
def _two_gpus() -> None:
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")


def needs_torch() -> None:
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_nccl_available():
        pytest.skip("needs PyTorch with NCCL")


def check(what: str, folder: Path, least: int) -> None:
    """Run both ranks; all of their cases pass."""
    for rank, done in enumerate(launch(what, folder)):
        print(done.stdout)
        assert done.returncode == 0, f"rank {rank}:\n{done.stdout[-6000:]}"
        found = json.loads((folder / f"{rank}.json").read_text())
        wrong = {name: problem for name, problem in found.items() if problem}
        assert not wrong, "\n".join(f"rank {rank}, {n}\n{p}" for n, p in wrong.items())
        assert len(found) >= least


def test_torch(tmp_path: Path) -> None:
    """All forms of calls, graphs for changing lengths, 100 repeats with a rank that is late."""
    needs_torch()
    check("torch", tmp_path, 70)


def test_cupy(tmp_path: Path) -> None:
    from cupy.cuda import nccl

    if not nccl.available:
        pytest.skip("needs libnccl for CuPy")
    check("cupy", tmp_path, 10)


@pytest.mark.parametrize(("what", "error"), [("failing", "NCCL"), ("failing-mapped", "CUDA error")])
def test_a_rank_that_dies(tmp_path: Path, what: str, error: str) -> None:
    """NCCL's error, or a barrier's, ends the exchange of the other rank."""
    needs_torch()
    first, second = launch(what, tmp_path)
    assert (tmp_path / "0.json").exists(), first.stdout
    assert second.returncode == 0, second.stdout
    assert first.returncode not in (0, -999), first.stdout
    assert error in first.stdout
