# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM beside cumla in the same run: its interface, computed on the CPU in other words."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from bench import logits_peers
from bench.logits_peers import run_deep_gemm
from bench.sections.indexer import LogitsCase, PagedLogitsCase, PrefillLogitsCase
from tests.bench.conftest import Fakes
from tests.bench.fake_gpu import LAUNCH_US, FakeGpu

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("one_thread")

PAGED = PagedLogitsCase(3, 2, 70)
CASES = (PAGED, PagedLogitsCase(2, 1, 130), PagedLogitsCase(1, 4, 3), PrefillLogitsCase(5, 90))
PREFILL = CASES[-1]
PEER_US, SCHEDULE_US = 10.0, 3.0


class DeepGemm:
    """Its functions for the indexer, with the arguments that a Hopper GPU's newest version takes.

    Whatever ``spoil`` does to the result is done at each call.
    """

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.spoil: Any = lambda logits: None
        self.calls: list[str] = []

    def get_num_sms(self) -> int:
        return 12

    def fp8_mqa_logits(
        self, q: Any, kv: Any, weights: Any, starts: Any, ends: Any, clean_logits: bool = True
    ) -> Any:
        assert clean_logits
        self.check(q, kv[0], kv[1], weights, starts, ends)
        logits = self.score(q, kv[0], kv[1], weights)
        token = torch.arange(len(kv[0]))
        hidden = (token < starts[:, None]) | (token >= ends[:, None])
        return self.done("mqa_logits", logits.masked_fill(hidden, float("-inf")), PEER_US)

    def get_paged_mqa_logits_metadata(self, lengths: Any, block_kv: int, num_sms: int) -> Any:
        assert (lengths.dim(), lengths.dtype, block_kv) == (2, torch.int32, 64)
        self.gpu.now += SCHEDULE_US
        self.calls.append("schedule")
        return torch.full((num_sms + 1, 2), int(lengths.sum()), dtype=torch.int32)

    def fp8_paged_mqa_logits(
        self,
        q: Any,
        cache: Any,
        weights: Any,
        lengths: Any,
        table: Any,
        schedule: Any,
        columns: int,
        clean_logits: bool = False,
    ) -> Any:
        assert not clean_logits
        self.check(q, cache, weights, lengths, table, schedule)
        batch, next_n = q.shape[:2]
        assert lengths.shape == (batch, next_n)
        assert schedule.shape == (12 // (2 if next_n == 4 else 1) + 1, 2)
        assert bool((schedule == lengths.sum()).all())
        logits = torch.full((batch * next_n, columns), 7e7)  # what is not seen may be anything
        for i in range(batch):
            pages = cache[table[i].long()].reshape(table.shape[1], -1)
            k = pages[:, : 64 * 128].reshape(-1, 128).view(torch.float8_e4m3fn)
            scale = pages[:, 64 * 128 :].contiguous().view(torch.float32).reshape(-1)
            rows = slice(i * next_n, (i + 1) * next_n)
            some = self.score(q[i], k, scale, weights[rows])
            for row, length, values in zip(logits[rows], lengths[i].tolist(), some, strict=True):
                row[:length] = values[:length]
        return self.done("paged_mqa_logits", logits, PEER_US)

    def score(self, q: Any, k: Any, scale: Any, weights: Any) -> Any:
        products = torch.einsum("mhd,nd->mhn", q.double(), k.double()).relu()
        return (torch.einsum("mhn,mh->mn", products, weights.double()) * scale).float()

    def check(self, q: Any, *others: Any) -> None:
        assert q.dtype == torch.float8_e4m3fn
        assert all(tensor.is_contiguous() for tensor in (q, *others))

    def done(self, name: str, logits: Any, us: float) -> Any:
        self.gpu.now += us
        self.calls.append(name)
        self.spoil(logits)
        return logits


@pytest.fixture
def deep_gemm(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> DeepGemm:
    """DeepGEMM's logits take 10 us and cumla's 5."""
    module = DeepGemm(fakes.gpu)
    fakes.cumla.spoil = lambda name, *of: "ogits" in name and module.calls.append("own")
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    monkeypatch.setattr(logits_peers, "find_spec", lambda name: name)
    return module


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_deep_gemm_gets_what_it_needs(fakes: Fakes, deep_gemm: DeepGemm, case: LogitsCase) -> None:
    runs = run_deep_gemm(fakes.bench, case)
    assert runs.notes == []
    own = {name: turns.own.us for name, turns in runs.turns.items()}
    peer = {name: turns.peer.us for name, turns in runs.turns.items()}
    if case == PREFILL:
        assert (own, peer) == ({"mqa_logits": LAUNCH_US}, {"mqa_logits": PEER_US})
    else:
        assert own == {"paged_mqa_logits": LAUNCH_US, "paged_schedule": 0.0}  # nothing on the CPU
        assert peer == {"paged_mqa_logits": PEER_US, "paged_schedule": SCHEDULE_US}


def test_they_run_in_turns(fakes: Fakes, deep_gemm: DeepGemm) -> None:
    turns = run_deep_gemm(fakes.bench, PREFILL).turns["mqa_logits"]
    calls = deep_gemm.calls[2:]  # behind those that are checked
    assert calls == [name for _ in range(3) for name in ["own"] * 3 + ["mqa_logits"] * 3]
    assert turns.to_json() == {
        "us": PEER_US,
        "scaled_us": PEER_US,
        "own_us": LAUNCH_US,
        "x": 2.0,
        "measured": True,
    }


@pytest.mark.parametrize(
    ("case", "row", "column", "message"),
    [
        (PAGED, 5, 69, "the logits of query 1 of request 2 are off by"),
        (PAGED, 0, 0, "the logits of query 0 of request 0 are off by"),
        (PREFILL, 4, 89, "the logits of query 4 are off by"),
        (PREFILL, 0, 86, "the logits of query 0: not -inf after the 86 tokens"),
    ],
)
def test_wrong_logits_are_not_timed(
    fakes: Fakes, deep_gemm: DeepGemm, case: LogitsCase, row: int, column: int, message: str
) -> None:
    deep_gemm.spoil = lambda logits: logits.__setitem__((row, column), 1e6)
    runs = run_deep_gemm(fakes.bench, case)
    assert runs.turns == {}
    assert runs.notes[0].startswith(f"DeepGEMM: {case.name}: CheckError: {case.name}: {message}")


def test_what_deep_gemm_raises_becomes_a_note(fakes: Fakes, deep_gemm: DeepGemm) -> None:
    def fail(logits: Any) -> None:
        raise RuntimeError("Assertion error\nand more")

    deep_gemm.spoil = fail
    runs = run_deep_gemm(fakes.bench, PAGED)
    assert runs == ({}, [f"DeepGEMM: {PAGED.name}: RuntimeError: Assertion error"])


def test_missing_libraries_are_named(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits_peers, "find_spec", lambda name: None)
    assert run_deep_gemm(fakes.bench, PAGED) == (
        {},
        ["DeepGEMM: torch and deep_gemm not installed"],
    )
