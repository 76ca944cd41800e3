# SPDX-License-Identifier: Apache-2.0
"""A bench on a GPU made of NumPy, and a small case of every section."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from bench.run import SECTIONS
from bench.sections import calls, forms, mla
from bench.sections.append import AppendCase, AppendHeadsCase
from bench.sections.indexer import CacheCase, LogitsScheduleCase, PagedLogitsCase, PrefillLogitsCase
from bench.sections.merge import MergeCase
from bench.sections.mha import MHACase
from bench.sections.sparse import SparseCase, StepCase
from bench.sections.sparse_v4 import V4Case
from bench.sections.topk import TopKCase
from cumla.bench import problem, run
from cumla.bench.cases import Case
from cumla.bench.section import Section
from tests.bench.fake_gpu import FakeCumla, FakeGpu, fake_bench

DENSE = (Case(17, 1, 3, 64), Case(2, 2, 3, 128))  # the first is no small batch
DECODE = Case(2, 1, 2, 70)
SMALL: dict[str, tuple[Any, ...]] = {  # by the first heading of the table
    "": DENSE,
    "ragged: ": (mla.RaggedCase(DENSE[0], (0, 1)),),
    "batch-invariant: ": (replace(DENSE[1], batch_invariant=True),),
    "schedule: ": mla.schedule_cases((1, 2, 64), (3, 2, 64)),
    "ragged queries: ": (
        mla.AttentionCase(2, 2, 3, 70, causal=False),
        mla.AttentionCase(3, 2, 4, 80, causal=True, decodes=2),
    ),
    "page sizes: ": (mla.WaysCase(DECODE, "page size"),),
    "FP8 caches: ": (mla.WaysCase(DECODE, "format"),),
    "forms: ": (forms.by_layout(DECODE), forms.by_kv_heads(DECODE, 2)),
    "many heads: ": (
        MHACase(2, 4, 2, 64, 70, q_len=2, page=16),
        MHACase(1, 2, 1, 64, 70, value_columns=16, window=20, sinks=True),
        MHACase(1, 2, 1, 64, 70, page=16, cache="e4m3"),
        MHACase(2, 2, 1, 64, 70, q_len=5, decodes=2),
        MHACase(3, 2, 1, 64, 70, lengths="lognormal"),
    ),
    "merge: ": (MergeCase(2, 5), MergeCase(3, 4, "float32")),
    "append: ": (AppendCase(1, 64), AppendCase(1, 16, rotated=True)),
    "append keys and values: ": (AppendHeadsCase(40, 4, 2, 64, 16),),
    "indexer: ": (PagedLogitsCase(3, 2, 70), PagedLogitsCase(2, 1, 66), PrefillLogitsCase(5, 9)),
    "indexer schedule: ": (LogitsScheduleCase(64, 1, 8192), LogitsScheduleCase(3, 2, 70)),
    "top-k: ": (TopKCase(3, 90, 8), TopKCase(5, 40, 16, ragged=True, scores="narrow")),
    "sparse MLA: ": (
        SparseCase(2, 2, 3, kv_len=128, topk=20),
        SparseCase(2, 1, 2, "bfloat16", 64, topk=64),
        SparseCase(1, 5, 2, "bfloat16", 128, topk=9, prefill=True),
    ),
    "step of a layer: ": (StepCase(2, 128, 3, 40),),
    "sparse MLA, V4: ": (V4Case(2, 2, 3, 20, 30, kv_len=64), V4Case(1, 1, 2, 1, 9, kv_len=64)),
    "quantize_fp8: ": (CacheCase("quantize_fp8", 1),),
    "append_indexer_cache: ": (CacheCase("append_indexer_cache", 1),),
}


def small_sections() -> tuple[Section, ...]:
    """All sections with small cases."""
    return tuple(replace(section, cases=SMALL[section.title]) for section in SECTIONS)


def small(title: str, *cases: Any) -> Section:
    """One of them, with other cases if any are given."""
    (section,) = (section for section in small_sections() if section.title == title)
    return replace(section, cases=cases) if cases else section


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
    return use_fakes(monkeypatch)


def use_fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    fakes = Fakes()
    for module in (calls, problem):
        monkeypatch.setattr(module, "cumla", fakes.cumla)
    for name in ("CUMLA_CHECK", "CUMLA_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return fakes


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch's threads wait for each other longer than such arrays take."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def measured() -> Iterator[str]:
    """The rows of every small section, as JSON."""
    with pytest.MonkeyPatch.context() as patch:
        yield json.dumps(use_fakes(patch).measure(*small_sections()))


@pytest.fixture
def results(measured: str) -> dict[str, Any]:
    """The same with what a run adds, read anew for every test."""
    machine = dict.fromkeys(("gpu", "sm_count", "driver", "cupy", "nvrtc", "cumla"), "1")
    rest = {"machine": machine, "date": "2026-11-23T00:00", "l2": "cold", "notes": []}
    return rest | {"ceilings": fake_bench(FakeGpu()).ceilings.to_json()} | json.loads(measured)
