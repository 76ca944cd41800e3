# SPDX-License-Identifier: Apache-2.0
"""A bench on a GPU made of NumPy."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from bench import step_case
from cumla.bench import problem, run
from cumla.bench.section import Section
from tests.bench.fake_gpu import FakeCumla, FakeGpu, fake_bench


class Fakes:
    """A GPU, the public functions and a bench on them; a call takes LAUNCH_US."""

    def __init__(self) -> None:
        self.gpu = FakeGpu()
        self.cumla = FakeCumla(self.gpu)
        self.bench = fake_bench(self.gpu)
        self.told: list[str] = []

    def measure(self, *sections: Section) -> dict[str, Any]:
        for _ in run.measure(self.bench, sections, self.told.append):
            pass
        return self.bench.results


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    fakes = Fakes()
    monkeypatch.setattr(problem, "cumla", fakes.cumla)
    for name in ("CUMLA_CHECK", "CUMLA_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return fakes


@pytest.fixture(autouse=True)
def _short_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps without a wait between them show what many do."""
    monkeypatch.setattr(step_case, "_BURST", 2)
    vllm_layers = sys.modules.get("bench.vllm_layers")  # which imports PyTorch
    if vllm_layers is not None:
        monkeypatch.setattr(vllm_layers, "_BURST", 2)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch's threads wait for each other longer than such arrays take."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
