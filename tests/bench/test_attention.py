# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of ragged queries and of page sizes, on a GPU made of NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cumla.bench import attention, dense
from cumla.bench.attention import (
    ATTENTION,
    AttentionCase,
    AttentionTiming,
    attention_row,
    measure_attention,
)
from cumla.bench.cases import Case, Ceilings
from cumla.bench.dense import CheckError
from cumla.bench.pages import PAGE_SIZES, PAGES, measure_pages, pages_row
from cumla.bench.peers import load_peers
from cumla.bench.report import failures, to_markdown, to_text
from cumla.bench.timing import Timing
from tests.bench.fake_gpu import LAUNCH_US, FakeGpu

H200 = load_peers().ceilings
SMALL = (
    AttentionCase(2, 3, 5, 130, causal=False),
    AttentionCase(1, 2, 70, 70, causal=True),
    AttentionCase(3, 2, 4, 100, causal=True, decodes=2),
)
PAGED = Case(5, 1, 2, 130)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU whose calls note their page size, and may spoil what they wrote."""
    gpu: Any = FakeGpu()
    gpu.spoil, gpu.page_sizes = lambda page_size, out, lse: None, []
    for plan in (attention.MLAAttentionPlan, dense.MLADecodePlan):
        monkeypatch.setattr(plan, "run", noted(gpu, plan.run))
    return gpu


def noted(gpu: Any, original: Any) -> Any:
    def run(self: Any, q: Any, kv_cache: Any, *others: Any, out: Any, lse: Any) -> None:
        original(self, q, kv_cache, *others, out=out, lse=lse)
        gpu.spoil(kv_cache.shape[1], out, lse)
        gpu.page_sizes.append(kv_cache.shape[1])
        gpu.now += LAUNCH_US

    return run


# --- ragged queries -------------------------------------------------------------------------------


def test_cases_of_ragged_queries() -> None:
    *chunks, whole, mixed = ATTENTION
    assert len({(c.batch, c.heads, c.q_len, c.causal) for c in chunks}) == len(chunks) == 16
    assert {c.batch for c in chunks} == {1, 8}
    assert {c.heads for c in chunks} == {64, 128}
    assert {c.q_len for c in chunks} == {512, 2048}
    assert {c.kv_len for c in chunks} == {8192}
    assert whole == AttentionCase(1, 128, 4096, 4096, causal=True)
    assert (mixed.tokens, mixed.name) == (
        60 + 4 * 512,
        "attention-b64-h128-q512-kv4096-causal-60decodes",
    )
    assert np.diff(mixed.indptr).tolist() == [1] * 60 + [512] * 4


def test_visible_pairs_count() -> None:
    per_pair = 2 * 128 * (576 + 512)
    counts = [case.flops // per_pair for case in ATTENTION[-2:]]
    chunk = 512 * 4096 - 512 * 511 // 2
    assert counts == [4096 * 4097 // 2, 60 * 4096 + 4 * chunk]
    assert ATTENTION[0].flops == 2 * 512 * 8192 * 64 * (576 + 512)
    mixed = SMALL[2]
    assert mixed.visible.tolist() == [100, 100, 97, 98, 99, 100]
    assert mixed.requests.tolist() == [0, 1, 2, 2, 2, 2]
    assert AttentionCase(1, 1, 4, 2, causal=True).visible.tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize("case", ATTENTION, ids=lambda case: case.name)
def test_sampled_tokens_see_a_page_at_least(case: AttentionCase) -> None:
    tokens = attention._sample(case)
    assert 16 <= len(tokens) <= 200
    assert (np.diff(tokens) > 0).all()
    assert case.visible[tokens].min() >= 64
    assert set(case.requests[tokens]) == set(range(case.batch))
    assert tokens[-1] == case.tokens - 1


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_ragged_queries_are_checked_and_timed(gpu: Any, case: AttentionCase) -> None:
    timing = measure_attention(gpu, case)
    assert timing.single == Timing(LAUNCH_US, LAUNCH_US, LAUNCH_US)
    assert timing.schedule.us == 0.0  # on the CPU nothing is computed
    assert 0 < timing.row_error <= 4e-3
    assert timing.lse_error <= 1e-5
    assert len(gpu.page_sizes) == 1 + 1 + 3
    row = attention_row(case, timing, H200)
    assert row["tflops"] == pytest.approx(case.flops / LAUNCH_US / 1e6)
    assert row["efficiency"] == pytest.approx(row["tflops"] / H200.matmul_tflops)
    assert row["sustained_share"] is None  # published ceilings have no such product
    row = attention_row(case, timing, replace(H200, sustained_tflops=640.0))
    assert row["sustained_share"] == pytest.approx(row["tflops"] / 640.0)
    assert (row["batch"], row["q_len"], row["decodes"]) == (case.batch, case.q_len, case.decodes)


@pytest.mark.parametrize("what", ["out", "lse", "unwritten"])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_a_wrong_token_is_found(gpu: Any, case: AttentionCase, what: str) -> None:
    def spoil(page_size: int, out: Any, lse: Any) -> None:
        if what == "out":
            out[-1, 1] *= 1.02
        elif what == "lse":
            lse[-1, 1] *= 1.001
        else:
            out[-1] = np.nan

    gpu.spoil = spoil
    with pytest.raises(CheckError, match=f"^{case.name}: some tokens, each a request: b"):
        measure_attention(gpu, case)
    assert len(gpu.page_sizes) == 1  # nothing was timed


# --- page sizes -----------------------------------------------------------------------------------


def test_cases_of_page_sizes() -> None:
    assert PAGE_SIZES == (64, 1, 16, 32, 48, 128)
    assert [(case.batch, case.heads, case.kv_len) for case in PAGES] == [
        (128, 16, 4096),
        (128, 128, 4096),
        (16, 128, 8192),
    ]


def test_page_sizes_are_timed_in_turns(gpu: Any) -> None:
    times = measure_pages(gpu, PAGED)
    assert tuple(times) == PAGE_SIZES
    assert all(time == (LAUNCH_US, LAUNCH_US, LAUNCH_US) for time in times.values())
    timed = gpu.page_sizes[len(PAGE_SIZES) :]
    assert gpu.page_sizes[: len(PAGE_SIZES)] == list(PAGE_SIZES)  # what is checked
    turns = [size for i, size in enumerate(timed) if i == 0 or timed[i - 1] != size]
    assert turns == [*PAGE_SIZES] * 3


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("request_", [0, 2, 4])
def test_a_wrong_page_size_is_found(gpu: Any, page_size: int, request_: int) -> None:
    def spoil(size: int, out: Any, lse: Any) -> None:
        if size == page_size:
            out[request_, 0, 1] *= 1.02

    gpu.spoil = spoil
    with pytest.raises(CheckError, match=f"^pages of {page_size}: some requests of b5-s1-h2-kv130"):
        measure_pages(gpu, PAGED)


def test_turns_are_summarised() -> None:
    turns = [Timing(7.0, 6.0, 9.0), Timing(5.0, 4.0, 8.0), Timing(6.0, 5.0, 7.0)]
    assert Timing.of_turns(turns) == Timing(6.0, 4.0, 9.0)


# --- tables ---------------------------------------------------------------------------------------


def results(**sections: list[dict[str, Any]]) -> dict[str, Any]:
    """Results with these sections and no rows of the table."""
    machine = dict.fromkeys(("gpu", "sm_count", "driver", "cupy", "nvrtc", "cumla"), "1")
    return {
        "machine": machine,
        "date": "2026-11-21T00:00",
        "ceilings": H200.to_json(),
        "peers": load_peers().source,
        "rows": [],
        **sections,
    }


def test_table_of_ragged_queries() -> None:
    *_, chunk, _, mixed = ATTENTION
    timing = AttentionTiming(Timing(1000.0, 990.0, 1010.0), Timing(7.25, 7.0, 7.5), 1e-3, 1e-7)
    done = chunk.flops / 1e9
    ceilings = replace(H200, matmul_tflops=done / 0.5, sustained_tflops=done / 0.75)
    rows = [attention_row(case, timing, ceilings) for case in (chunk, mixed)]
    rows.append(chunk.to_json() | {"failed": "rows are off"})
    found = results(attention=rows, ceilings=ceilings.to_json())
    lines = to_markdown(found).splitlines()
    (at,) = (i for i, line in enumerate(lines) if line.startswith("| ragged queries: batch |"))
    assert lines[at].endswith(
        "| causal | us | TFLOP/s | efficiency | share of the sustained product | schedule us |"
    )
    assert (
        lines[at + 2] == f"| 8 | 128 | 2048 | 8192 | True | 1000 | {done:.0f} | 0.50 | 0.75 | 7.2 |"
    )
    assert lines[at + 3].startswith("| 64 | 128 | 60 x 1, 4 x 512 | 4096 | True | 1000 | ")
    assert lines[at + 4] == "| 8 | 128 | 2048 | 8192 | True | failed |  |  |  |  |"
    assert failures(found) == ["rows are off"]
    assert "60 x 1, 4 x 512" in to_text(found)
    said = f"TFLOP/s (sustained, repeated for 1.5 s: {done / 0.75:.0f}), float8_e4m3fn "
    assert said in to_markdown(found)


def test_results_from_before_the_sustained_product() -> None:
    chunk = ATTENTION[-3]
    timing = AttentionTiming(Timing(1000.0, 990.0, 1010.0), Timing(7.25, 7.0, 7.5), 1e-3, 1e-7)
    row = attention_row(chunk, timing, H200)
    del row["sustained_share"]
    found = results(attention=[row])
    del found["ceilings"]["bf16_sustained_TFLOPs"]
    text = to_markdown(found)
    assert "sustained" not in text
    assert f"| {row['efficiency']:.2f} | 7.2 |" in text
    assert Ceilings.from_json(found["ceilings"]) == H200


def test_table_of_page_sizes() -> None:
    times = {size: Timing(100.0 + size, 90.0, 190.0) for size in PAGE_SIZES}
    failed = PAGED.to_json() | {"failed": "pages of 1 are off"}
    found = results(pages=[pages_row(PAGES[0], times), failed])
    lines = to_markdown(found).splitlines()
    (at,) = (i for i, line in enumerate(lines) if line.startswith("| page sizes: batch |"))
    assert lines[at].startswith("| page sizes: batch | heads | kv_len | 64: us (ratio) | 1: us ")
    assert lines[at + 2].startswith("| 128 | 16 | 4096 | 164 (1.000) | 101 (0.616) | 116 (0.707) |")
    assert lines[at + 3] == "| 5 | 2 | 130 | failed |  |  |  |  |  |"
    assert failures(found) == ["pages of 1 are off"]
    assert "| 5 | 2 | 130 | failed |" in to_markdown(results(pages=[failed]))
    assert "page" not in pages_row(PAGES[0], times)
