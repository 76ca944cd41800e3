# SPDX-License-Identifier: Apache-2.0
"""A whole benchmark on a fake GPU, and what becomes of its results."""

from __future__ import annotations

import csv
import inspect
import io
import json
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cumla import cli
from cumla.bench import (
    append,
    attention,
    ceilings,
    dense,
    forms,
    host,
    indexer,
    indexer_cache,
    logits_peers,
    merge,
    operations,
    peer_runs,
    run,
    start,
    timing,
)
from cumla.bench.append import AppendCase
from cumla.bench.attention import AttentionCase
from cumla.bench.cases import Case
from cumla.bench.dense import CheckError, Workbench, check
from cumla.bench.fp8 import FORMATS
from cumla.bench.gpu import Gpu
from cumla.bench.indexer import PagedLogitsCase, PrefillLogitsCase
from cumla.bench.indexer_cache import IndexerCacheCase
from cumla.bench.logits_peers import LogitsPeerRuns
from cumla.bench.merge import MergeCase
from cumla.bench.peers import PeerTime
from cumla.bench.report import to_csv, to_markdown, to_text
from cumla.bench.timing import Turns
from cumla.errors import CumlaError
from cumla.launch import all_specs
from cumla.launch.source import digest
from tests.bench.fake_gpu import LAUNCH_US, FakeGpu, memory

CASES = (Case(17, 1, 3, 64), Case(2, 2, 3, 128))  # the first is no small batch
MERGE = (MergeCase(2, 5), MergeCase(3, 4, "float32"))
APPEND = (AppendCase(1, 64), AppendCase(1, 16, rotated=True))
LOGITS = (PagedLogitsCase(3, 2, 70), PagedLogitsCase(2, 1, 66), PrefillLogitsCase(5, 9))
INDEXER_CACHE = (IndexerCacheCase("quantize_fp8", 1), IndexerCacheCase("append_indexer_cache", 1))
ATTENTION = (
    AttentionCase(2, 2, 3, 70, causal=False),
    AttentionCase(3, 2, 4, 80, causal=True, decodes=2),
)
PAGES = (Case(2, 1, 2, 70),)
FP8 = (Case(2, 1, 2, 70),)
FORMS = (forms._by_layout(Case(2, 1, 2, 70)), forms._by_kv_heads(Case(2, 1, 2, 70), 2))
START = {
    "import_s": 0.01,
    "names_s": 0.21,
    "dependencies_s": 0.16,
    "first_call_cold_s": 3.4,
    "first_call_warm_s": 0.1,
}
_digest = cache(digest)  # of sources that stay as they are


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return use_fake(monkeypatch)


def use_fake(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """The GPU on which a benchmark of `CASES` runs, as the whole table; a call takes 5 us."""
    gpu = FakeGpu()
    monkeypatch.setattr(run, "Gpu", lambda: gpu)
    monkeypatch.setattr(run, "DENSE", CASES)
    monkeypatch.setattr("cumla.bench.cases.DENSE", CASES)
    monkeypatch.setattr(run, "RAGGED", CASES[:1])
    monkeypatch.setattr(run, "RAGGED_SEEDS", range(2))
    monkeypatch.setattr(run, "INVARIANT", CASES[1:])
    monkeypatch.setattr(run, "MERGE", MERGE)
    monkeypatch.setattr(run, "APPEND", APPEND)
    monkeypatch.setattr(run, "LOGITS", LOGITS)
    monkeypatch.setattr(run, "LOGITS_SCHEDULES", (PagedLogitsCase(64, 1, 8192), LOGITS[0]))
    monkeypatch.setattr(run, "INDEXER_CACHE", INDEXER_CACHE)
    monkeypatch.setattr(run, "ATTENTION", ATTENTION)
    monkeypatch.setattr(run, "PAGES", PAGES)
    monkeypatch.setattr(run, "FP8", FP8)
    monkeypatch.setattr(run, "FORMS", FORMS)
    monkeypatch.setattr(indexer, "_SMALL_BATCH", 2)
    monkeypatch.setattr(indexer, "_GRAPH_CALLS", 2)
    monkeypatch.setattr(indexer, "_ROTATED_BYTES", 2 * LOGITS[1].cache_bytes)
    monkeypatch.setattr(operations, "_GRAPH_BYTES", 2 * 10**6)  # less than the second merge
    for name in ("_ROTATED_BYTES", "_REPLAY_BYTES"):
        monkeypatch.setattr(operations, name, 2 * 10**6)
    monkeypatch.setattr(peer_runs, "PEER_CASES", CASES[1:])
    for module in (peer_runs, logits_peers):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.setattr(run, "current_device", lambda: 0)
    for module in (run, host):
        monkeypatch.setattr(module, "HOST_CASE", Case(2, 1, 2, 64))
    monkeypatch.setattr(host, "SCHEDULES", (Case(1, 1, 2, 64), Case(3, 1, 2, 64)))
    monkeypatch.setattr(run, "SCHEDULES", host.SCHEDULES)
    monkeypatch.setattr(host, "find_spec", lambda name: None)
    monkeypatch.setattr(dense, "_ROTATED_BYTES", 3 * CASES[1].cache_bytes)
    monkeypatch.setattr(ceilings, "paged_kv_map", lambda *arguments: bytes(128))
    monkeypatch.setattr(ceilings, "_matmul", lambda gpu, large: (_ticks(gpu), nullcontext()))
    monkeypatch.setattr(ceilings, "_fp8_matmul", lambda gpu, large: (_ticks(gpu), nullcontext()))
    # The clock of the fake is exact: two runs say what thirty do.
    behind = timing._time_behind
    monkeypatch.setattr(timing, "_time_behind", lambda *of, **options: behind(*of[:3], 2, 1))
    monkeypatch.setattr(host, "time_host", partial(timing.time_host, repeats=4, warmup=1))
    monkeypatch.setattr(run, "digest", _digest)
    monkeypatch.setattr(run, "cupy_nvrtc_version", lambda: (12, 9))
    monkeypatch.setattr(run, "measure_start", lambda: START)
    for name in ("CUMLA_CHECK", "CUMLA_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    for owner, name in (
        (dense.MLADecodePlan, "run"),
        (attention.MLAAttentionPlan, "run"),
        (merge, "merge_attention_states"),
        (append, "append_mla_cache"),
        (indexer, "mqa_logits"),
        (indexer.PagedMQALogitsPlan, "run"),
        (indexer_cache, "quantize_fp8"),
        (indexer_cache, "append_indexer_cache"),
    ):
        monkeypatch.setattr(owner, name, _timed(gpu, getattr(owner, name)))
    return gpu


def _timed(gpu: FakeGpu, original: Any) -> Any:
    def timed(*args: Any, **kwargs: Any) -> Any:
        gpu.now += LAUNCH_US
        return original(*args, **kwargs)

    return timed


def _ticks(gpu: FakeGpu) -> Any:
    def work() -> None:
        gpu.now += 1400.0

    return work


@pytest.fixture(scope="module")
def measured() -> str:
    """What a benchmark of `CASES` gives, as JSON."""
    with pytest.MonkeyPatch.context() as patch:
        use_fake(patch)
        *_, last = run.run(CASES, lambda line: None)
    return json.dumps(last)


@pytest.fixture
def results(fake: FakeGpu, measured: str) -> dict[str, Any]:
    """The same, read anew for every test, beside a GPU on which nothing has run yet."""
    return json.loads(measured)


def test_rows_are_checked_and_timed(results):
    first, second = results["rows"]
    assert [first["batch"], first["q_len"], first["heads"], first["kv_len"]] == [17, 1, 3, 64]
    for row in (first, second):
        assert row["us"] == row["us_low"] == row["us_high"] == row["stream_only_us"] == LAUNCH_US
        assert 0 < row["row_error"] <= 4e-3
        assert 0 <= row["lse_error"] <= 1e-5
        assert row["efficiency"] == pytest.approx(row["floor_us"] / LAUNCH_US)
        assert row["peers"] == {}
        assert row["best_peer"] is None
        assert (row["kv_heads"], row["dtype"], row["lengths"]) == (1, "bfloat16", "equal")
    assert second["tflops"] == pytest.approx(CASES[1].flops / LAUNCH_US / 1e6)
    assert second["gbps"] == pytest.approx(CASES[1].nbytes / LAUNCH_US / 1e3)
    assert first["graph_us"] is None
    assert second["graph_us"] == pytest.approx(LAUNCH_US)


def test_everything_else_is_recorded(results):
    assert results["machine"]["gpu"] == "Fake GPU"
    assert set(results["digests"]) == {spec.entry for spec in all_specs()}
    assert results["ceilings"]["bf16_matmul_TFLOPs"] == pytest.approx(2 * 8192**3 / 1400.0 / 1e6)
    assert results["ceilings"]["fp8_matmul_TFLOPs"] == pytest.approx(2 * 8192**3 / 1400.0 / 1e6)
    assert results["ceilings"]["fp8_scaled"] is False
    assert results["ceilings"]["bf16_sustained_TFLOPs"] == pytest.approx(2 * 8192**3 / 1400.0 / 1e6)
    assert results["ceilings"]["empty_kernel_us"] == LAUNCH_US
    shapes = [(row["batch"], row["lengths"]) for row in results["schedule"]]
    assert shapes == [(1, "equal"), (3, "equal"), (3, "ragged")]
    assert results["host"]["CuPy"]["us"] > 0
    assert set(results["host_stages"]) == {"arguments"}  # nothing is launched on the CPU
    assert "us read the arguments" in to_text(results)
    assert results["start"] == START
    assert results["l2"] == "cold"
    assert results["notes"] == [
        "torch SDPA: torch not installed",
        "Triton: torch and triton not installed",
        "FlashInfer: torch and flashinfer not installed",
        "FlashMLA: torch and flash_mla not installed",
        "FA3-MLA: torch and flash_attn_interface not installed",
        "DeepGEMM: torch and deep_gemm not installed",
    ]


def test_ragged_times_stand_beside_the_equal_one(results):
    (row,) = results["ragged"]
    assert [row[key] for key in ("batch", "heads", "kv_len")] == [17, 3, 64]
    assert [seed["seed"] for seed in row["seeds"]] == [0, 1]
    assert row["worst_us"] == row["equal_us"] == row["seeds"][1]["us"] == LAUNCH_US
    assert row["ratio"] == 1.0


def test_batch_invariant_times_stand_beside_the_usual_ones(results):
    (row,) = results["invariant"]
    assert Case.from_json(row) == replace(CASES[1], batch_invariant=True)
    assert row["us"] == row["usual_us"] == LAUNCH_US
    assert row["ratio"] == 1.0


def test_operations_stand_beside_the_copy_ceiling(results):
    copy_gbps = results["ceilings"]["copy_GBps"]
    for section, cases in (("merge", MERGE), ("append", APPEND)):
        assert [row["nbytes"] for row in results[section]] == [case.nbytes for case in cases]
        for row in results[section]:
            assert row["us"] == LAUNCH_US
            assert row["gbps"] == pytest.approx(row["nbytes"] / LAUNCH_US / 1e3)
            assert row["efficiency"] == pytest.approx(row["gbps"] / copy_gbps)
    in_graphs = [row["graph_us"] for row in results["merge"] + results["append"]]
    assert in_graphs == [pytest.approx(LAUNCH_US), None, *[pytest.approx(LAUNCH_US)] * 2]
    assert [row["count"] for row in results["merge"]] == [2, 3]
    assert [row["rotated"] for row in results["append"]] == [False, True]


def test_the_indexer_is_a_section(results):
    rows = results["indexer"]
    ops = ["paged_mqa_logits"] * 2 + ["mqa_logits"] + ["paged_schedule"] * 2
    assert [row["op"] for row in rows] == [*ops, "quantize_fp8", "append_indexer_cache"]
    for row in rows[:3]:
        assert row["us"] == LAUNCH_US
        assert row["efficiency"] == pytest.approx(row["floor_us"] / LAUNCH_US)
        assert 0 < row["row_error"] < 1e-6
    assert [row["graph_us"] for row in rows[:3]] == [None, pytest.approx(LAUNCH_US), None]
    assert [row["deep_gemm_us"] for row in rows[3:5]] == [6.08, None]
    assert [row["gbps"] for row in rows[5:]] == [case.nbytes / 5e3 for case in INDEXER_CACHE]
    assert "| paged_mqa_logits | 3 | 2 | 70 | 5.0 | " in to_markdown(results)


def test_wrong_logits_fail_their_row(fake, monkeypatch, capsys):
    monkeypatch.setattr(indexer, "mqa_logits", lambda *args, **kwargs: None)
    told: list[str] = []
    *_, results = run.run(CASES, told.append)
    assert len(told) == run.steps(CASES)
    (failed,) = [row for row in results["indexer"] if "failed" in row]
    assert (failed["op"], failed["q_len"], failed["kv_len"]) == ("mqa_logits", 5, 9)
    assert f"FAILED: {failed['failed']}" in told
    assert "| mqa_logits | 1 | 5 | 9 | wrong result |" in to_markdown(results)
    assert cli.main(["bench"]) == 1
    assert failed["failed"] in capsys.readouterr().out


def test_ragged_queries_and_page_sizes_are_sections(results):
    rows = results["attention"]
    assert [(row["op"], row["decodes"], row["us"]) for row in rows] == [
        ("mla_attention", 0, LAUNCH_US),
        ("mla_attention", 2, LAUNCH_US),
    ]
    for row, case in zip(rows, ATTENTION, strict=True):
        assert row["tflops"] == pytest.approx(case.flops / LAUNCH_US / 1e6)
        ceiling = results["ceilings"]["bf16_matmul_TFLOPs"]
        assert row["efficiency"] == pytest.approx(row["tflops"] / ceiling)
    (row,) = results["pages"]
    assert [of["page"] for of in row["pages"]] == [64, 1, 16, 32, 48, 128]
    assert {(of["us"], of["ratio"]) for of in row["pages"]} == {(LAUNCH_US, 1.0)}
    assert "| 3 | 2 | 2 x 1, 1 x 4 | 80 | True | 5.0 | " in to_markdown(results)
    assert "| 2 | 2 | 70 | 5.0 (1.000) | 5.0 (1.000) |" in to_markdown(results)


def test_fp8_caches_are_a_section(results):
    (row,) = results["fp8"]
    assert [of["format"] for of in row["formats"]] == [*FORMATS]
    assert {(of["us"], of["x_bfloat16"]) for of in row["formats"]} == {(LAUNCH_US, 1.0)}
    for of in row["formats"]:
        ceiling = results["ceilings"]["read_GBps"]
        assert of["read_share"] == pytest.approx(of["gbps"] / ceiling)
    assert "| 2 | 2 | 70 | e4m3 and scales | 5.0 | " in to_markdown(results)


def test_forms_are_a_section(results):
    for row, group in zip(results["forms"], FORMS, strict=True):
        assert (row["varied"], row["batch"]) == (group.varied, 2)
        assert [of["form"] for of in row["forms"]] == [form.name for form in group.forms]
        assert {(of["us"], of["ratio"]) for of in row["forms"]} == {(LAUNCH_US, 1.0)}
    assert "| 2 | 2 | 70 | dtype and layout | cache: split | 5.0 | 1.000 |" in to_markdown(results)


@pytest.mark.parametrize("section", run.SECTIONS)
def test_a_section_can_be_measured_alone(fake, monkeypatch, section):
    monkeypatch.setattr(run, "measure_start", pytest.fail)
    told: list[str] = []
    *_, results = run.run((), told.append, only=section)
    assert len(told) == run.steps((), only=section)
    names = {"merge", "append"} if section == "operations" else {section}
    others = {"ragged", "invariant", "schedule", "host", "merge", "append", *run.SECTIONS} - names
    assert names <= set(results)
    assert others.isdisjoint(results)
    assert results["ceilings"]["read_GBps"] > 0
    assert (results["rows"], results["notes"]) == ([], [])
    text = to_markdown(results)
    assert "| TFLOP/s | GB/s | efficiency | x FlashMLA |" not in text
    tables = {"operations": "append: tokens", "indexer": "indexer: op", "fp8": "FP8 caches: batch"}
    tables |= {"attention": "ragged queries: batch", "pages": "page sizes: batch"}
    assert f"| {tables.get(section, 'forms: batch')} |" in text
    assert "Ceilings of this run" in to_text(results)


def test_the_command_measures_a_section_alone(fake, tmp_path, capsys):
    file = tmp_path / "forms.json"
    assert cli.main(["bench", "--only", "forms", "--json", str(file)]) == 0
    results = json.loads(file.read_text())
    assert [row["varied"] for row in results["forms"]] == ["dtype and layout", "kv heads"]
    assert results["rows"] == []
    assert capsys.readouterr().out == to_text(results) + "\n"


@pytest.mark.parametrize("section", ["attention", "pages", "fp8", "forms"])
def test_what_breaks_a_new_section_leaves_the_others(fake, monkeypatch, section):
    def broken(*arguments: object) -> None:
        raise TypeError("no such\nargument")

    monkeypatch.setattr(run, f"measure_{section}", broken)
    told: list[str] = []
    *_, results = run.run(CASES, told.append)
    assert len(told) == run.steps(CASES)
    cases = {"attention": ATTENTION, "pages": PAGES, "fp8": FP8, "forms": FORMS}[section]
    failures = [f"{case.name}: TypeError: no such" for case in cases]
    assert [row["failed"] for row in results[section]] == failures
    assert f"FAILED: {failures[0]}" in told
    others = {"attention": "pages", "pages": "fp8", "fp8": "forms", "forms": "attention"}
    for name in ("rows", "indexer", "merge", others[section]):
        assert all("failed" not in row for row in results[name])
    assert results["notes"]  # peers came to their turn
    assert failures[0] in to_text(results)
    assert " | failed |" in to_markdown(results)


def test_tables_of_operations(results):
    results["merge"][0] |= {"us": 123.4, "gbps": 3900.4, "efficiency": 0.914, "copy_us": 115.6}
    in_graph = {"us": 17.26, "gbps": 3998.5, "efficiency": 0.934}
    of_copy = {"us": 16.75, "gbps": 4099.5, "efficiency": 0.966}
    for of, row in (("graph", in_graph), ("graph_copy", of_copy)):
        results["merge"][0] |= {f"{of}_{key}": value for key, value in row.items()}
    lines = to_markdown(results).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("| merge: partial results |"))
    figures = "| MB read and written | us | GB/s | share of the copy ceiling |"
    graphs = "graph us | graph GB/s | graph share"
    graphs = f" {graphs} | {graphs.replace('graph', 'graph copy')} |"
    assert lines[at].endswith(f"{figures} us of a plain copy |{graphs}")
    assert lines[at + 2] == (
        "| 2 | 5 | bfloat16 | 2 | 123 | 3900 | 0.91 | 116 "
        "| 17.3 | 3998 | 0.93 | 16.8 | 4100 | 0.97 |"
    )
    assert lines[at + 3].startswith("| 3 | 4 | float32 | 4 | 5.0 | ")
    assert lines[at + 3].endswith(" | 5.0 | - | - | - | - | - | - |")
    assert "; graph copy: plain copies of as many bytes in such a graph." in lines[-1]
    at = next(i for i, line in enumerate(lines) if line.startswith("| append: tokens | page |"))
    assert lines[at + 2].startswith("| 832 | 64 | False | bfloat16 | 2 | 5.0 | ")
    assert lines[at + 3].startswith("| 864 | 16 | True | bfloat16 | 2 | 5.0 | ")
    assert lines[at + 4] == ""
    for section in ("merge", "append"):
        for row in results[section]:
            for key in [key for key in row if key.startswith("graph_")]:
                del row[key]
    earlier = to_markdown(results).splitlines()  # of files that have no such times
    assert sum(line.endswith(f"{figures} us of a plain copy |") for line in earlier) == 4
    assert not any("graph share" in line or "graph copy" in line for line in earlier)  # nor a note
    for section in ("merge", "append", "indexer"):
        for row in results[section]:
            row.pop("copy_us", None)
    earliest = to_markdown(results).splitlines()  # nor those of copies
    assert sum(line.endswith(figures) for line in earliest) == 4
    assert not any("plain copy" in line for line in earliest)


@pytest.mark.parametrize("section", ["merge", "append"])
def test_wrong_result_of_an_operation_fails_its_rows(fake, monkeypatch, section, capsys):
    owner, name = {
        "merge": (merge, "merge_attention_states"),
        "append": (append, "append_mla_cache"),
    }[section]
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: None)
    told: list[str] = []
    *_, results = run.run(CASES, told.append)
    assert len(told) == run.steps(CASES)
    other = ({"merge", "append"} - {section}).pop()
    assert all("failed" not in row for row in results["rows"] + results[other])
    failures = [row["failed"] for row in results[section]]
    assert len(failures) == 2
    for failure in failures:
        assert failure.startswith(f"{section} {section.title()}Case(")
        assert f"FAILED: {failure}" in told
        assert failure in to_text(results)
    assert to_markdown(results).count(" | wrong result |  |  |") == 2
    assert cli.main(["bench"]) == 1
    assert failures[0] in capsys.readouterr().out


def test_warm_operations_are_timed_warm(fake, monkeypatch):
    monkeypatch.setattr(run, "measure", lambda gpu: ceilings.Ceilings(4000.0, 4000.0, 700.0, 4.0))
    monkeypatch.setattr(run, "_whole", lambda *arguments: iter(()))
    for others in ("_indexer", "_attention", "_pages", "_fp8", "_forms"):
        monkeypatch.setattr(run, others, lambda *arguments: iter(()))
    monkeypatch.setattr(run, "DENSE", CASES[:1])
    monkeypatch.setattr(operations, "_GRAPH_BYTES", 0)
    fake.flush_l2 = pytest.fail
    *_, results = run.run(CASES[:1], lambda line: None, peers=(), warm=True)
    assert [row["us"] for row in results["merge"] + results["append"]] == [LAUNCH_US] * 4


def test_results_of_before_the_operations_still_print(results, tmp_path, capsys):
    later = ("merge", "append", "indexer", "attention", "pages", "fp8", "forms")
    without = {key: value for key, value in results.items() if key not in later}
    without["ceilings"] = {k: v for k, v in results["ceilings"].items() if "fp8" not in k}
    file = tmp_path / "old.json"
    file.write_text(json.dumps(without))
    assert cli.main(["bench", "--from", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "batch-invariant: batch" in printed
    assert "merge:" not in printed
    assert "append:" not in printed
    assert "indexer" not in printed
    assert "ragged queries" not in printed
    assert "page sizes" not in printed
    assert "FP8 caches" not in printed
    assert "forms:" not in printed
    assert "float8" not in printed


def test_price_of_batch_invariance(fake, monkeypatch):
    planned = []
    original = dense.MLADecodePlan.from_arrays.__func__

    def slow(cls: Any, *args: Any, **options: Any) -> Any:
        planned.append(options)
        return original(cls, *args, **options)

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        fake.now += 2.0 if self.key.batch_invariant else 0.0
        return launched(self, *args, **kwargs)

    launched = dense.MLADecodePlan.run
    monkeypatch.setattr(dense.MLADecodePlan, "from_arrays", classmethod(slow))
    monkeypatch.setattr(dense.MLADecodePlan, "run", timed)
    *_, results = run.run(CASES, lambda line: None)
    (row,) = results["invariant"]
    assert (row["us"], row["usual_us"], row["ratio"]) == (LAUNCH_US + 2, LAUNCH_US, 1.4)
    lines = to_markdown(results).splitlines()
    at = next(i for i, line in enumerate(lines) if "invariant us" in line)
    assert lines[at + 2] == "| 2 | 2 | 3 | 128 | 7.0 | 5.0 | 1.400 |"
    modes = [(mode["batch_invariant"], mode["max_seqlen"]) for mode in planned if mode]
    assert set(modes) == {(False, None), (True, 128)}


def test_wrong_batch_invariant_result_fails_its_row(fake, monkeypatch):
    original = dense.MLADecodePlan.run

    def wrong(self: Any, *args: Any, **others: Any) -> Any:
        result = original(self, *args, **others)
        if self.key.batch_invariant:
            others["out"][1] = 0
        return result

    monkeypatch.setattr(dense.MLADecodePlan, "run", wrong)
    *_, results = run.run(CASES, lambda line: None)
    assert all("failed" not in row for row in results["rows"])
    (row,) = results["invariant"]
    assert row["failed"].startswith("b2-s2-h3-kv128-invariant: out is wrong")
    assert row["failed"] in to_text(results)
    assert "wrong result" in to_markdown(results)
    assert cli.main(["bench"]) == 1


def test_worst_seed_counts(fake, monkeypatch):
    times = iter([LAUNCH_US, LAUNCH_US, 6.0, 8.0, LAUNCH_US])

    def timed(bench: Workbench, case: Case) -> Any:
        return dense.DenseTiming(dense.Timing(*[next(times)] * 3), None, 1e-3, 0.0)

    monkeypatch.setattr(run, "run_case", timed)
    *_, results = run.run(CASES, lambda line: None)
    (row,) = results["ragged"]
    assert (row["worst_us"], row["equal_us"], row["ratio"]) == (8.0, LAUNCH_US, 1.6)
    (cells,) = [line for line in to_markdown(results).splitlines() if "6.0, 8.0" in line]
    assert cells == "| 17 | 1 | 3 | 64 | 8.0 | 6.0, 8.0 | 5.0 | 1.600 |"


def test_wrong_ragged_result_fails_its_row(fake, monkeypatch):
    original = dense.MLADecodePlan.run

    def wrong(self: Any, q: Any, kv: Any, table: Any, lengths: Any, **others: Any) -> Any:
        result = original(self, q, kv, table, lengths, **others)
        if len(set(lengths.tolist())) > 1:
            others["out"][0] = 0
        return result

    monkeypatch.setattr(dense.MLADecodePlan, "run", wrong)
    *_, results = run.run(CASES, lambda line: None)
    assert all("failed" not in row for row in results["rows"])
    (row,) = results["ragged"]
    assert row["failed"].startswith("b17-s1-h3-kv64-lognormal0: out is wrong")
    assert row["failed"] in to_text(results)
    assert cli.main(["bench"]) == 1


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 1, 4, 100, dtype="float16"),
        Case(3, 2, 4, 70, kv_heads=2),
        Case(5, 2, 2, 64, seed=3),
        Case(17, 1, 2, 40, dtype="float16", kv_heads=2, seed=0),
        Case(3, 1, 2, 100, seed=1, batch_invariant=True),
    ],
    ids=lambda case: case.name,
)
def test_variants_are_checked_and_timed(fake, case):
    *_, results = run.run((case,), lambda line: None)
    (row,) = results["rows"]
    assert "failed" not in row
    assert row["us"] == LAUNCH_US
    assert row["row_error"] < (1e-3 if case.dtype == "float16" else 4e-3)
    assert Case.from_json(json.loads(json.dumps(row))) == case
    assert "ragged" not in results
    columns = to_text(results).splitlines()[4].split()
    unusual = {
        "dtype": case.dtype != "bfloat16",
        "kv_heads": case.kv_heads > 1,
        "lengths": case.seed is not None,
        "batch_invariant": case.batch_invariant,
    }
    assert {name: name in columns for name in unusual} == unusual


@pytest.mark.parametrize("kv_head", [0, 1])
def test_every_kv_head_is_checked(fake, monkeypatch, kv_head):
    original = dense.MLADecodePlan.run

    def wrong(self: Any, *args: Any, out: Any, **others: Any) -> None:
        original(self, *args, out=out, **others)
        out[:, :, 2 * kv_head] *= 1.02

    monkeypatch.setattr(dense.MLADecodePlan, "run", wrong)
    *_, results = run.run((Case(2, 1, 4, 64, kv_heads=2),), lambda line: None)
    assert "out is wrong in 2 of 8 rows" in results["rows"][0]["failed"]


def test_warm_runs_do_not_empty_the_cache(fake, monkeypatch):
    monkeypatch.setattr(run, "measure", lambda gpu: ceilings.Ceilings(4000.0, 4000.0, 700.0, 4.0))
    fake.flush_l2 = pytest.fail
    *_, results = run.run(CASES[:1], lambda line: None, warm=True)
    assert results["rows"][0]["us"] == LAUNCH_US
    assert results["l2"] == "warm"
    assert "L2 cache as the call before has left it" in to_text(results)


def test_case_that_does_not_fit_is_named(fake):
    with pytest.raises(CumlaError, match=r"^b64-s1-h1-kv16384: needs 1\.2 GB for its cache, and "):
        next(run.run((CASES[0], Case(64, 1, 1, 16384)), lambda line: None))


def test_stream_of_several_kv_heads_brings_all_of_them(fake, monkeypatch):
    sent = []
    monkeypatch.setattr(fake, "launch", lambda *arguments: sent.append(arguments))
    kv = np.zeros((3, 64, 2, 576), np.uint16)
    ceilings.stream_only(fake, kv, np.array([2, 0], np.int32))()
    ((spec, _, _, (_, address, count)),) = sent
    assert spec == ceilings.STREAM_KV
    assert memory(address, (count,), "int32").tolist() == [4, 5, 0, 1]


def test_steps_are_counted_and_results_grow(fake):
    told: list[str] = []
    seen = [(len(results["rows"]), "start" in results) for results in run.run(CASES, told.append)]
    assert seen[0] == (1, True)
    assert seen[-1] == (2, True)
    assert told[0] == "import and first calls"
    assert len(told) == run.steps(CASES) == 27
    told.clear()
    *_, results = run.run(CASES[:1], told.append)
    assert len(told) == run.steps(CASES[:1]) == 2
    whole = {"start", "ragged", "invariant", "schedule", "host", "merge", "append", "indexer"}
    whole |= {"attention", "pages", "fp8"}
    assert not whole & set(results)


@pytest.mark.parametrize("what", ["out", "lse"])
def test_wrong_result_fails_the_row_and_no_other(fake, monkeypatch, what):
    original = dense.MLADecodePlan.run

    def wrong(self: Any, *args: Any, out: Any, lse: Any, **others: Any) -> None:
        original(self, *args, out=out, lse=lse, **others)
        if out.shape[1] == 2 and what == "out":
            out[1, 1, 2] *= 1.01
        if out.shape[1] == 2 and what == "lse":
            lse[1, 2, 1] *= 1.001

    monkeypatch.setattr(dense.MLADecodePlan, "run", wrong)
    *_, results = run.run(CASES, lambda line: None)
    first, second = results["rows"]
    assert "failed" not in first
    assert "us" not in second
    assert second["failed"].startswith(f"b2-s2-h3-kv128: {what} is wrong in 1 of 12 rows, most at ")
    assert "(1, 1, 2)" in second["failed"]
    assert "wrong result" in to_text(results)
    assert second["failed"] in to_text(results)
    assert "wrong result" in to_markdown(results)
    others = sum(len(results[section]) for section in ("indexer", "merge", "append"))
    assert len(to_csv(results).splitlines()) == 3 + others


def test_unwritten_output_is_wrong(fake):
    bench = Workbench(fake, CASES)
    inputs = bench.inputs(CASES[1])
    with pytest.raises(CheckError, match="out is wrong in 12 of 12 rows"):
        check(fake, inputs, CASES[1])


def test_peers_of_this_run_stand_beside_the_published_ones(fake, monkeypatch):
    def ran(bench: Workbench, case: Case, names: Any) -> peer_runs.PeerRuns:
        assert (case, names) == (CASES[1], None)
        own, peer, slow = (dense.Timing(us, us, us) for us in (4.8, 6.0, 9.0))
        return peer_runs.PeerRuns(
            {"FlashInfer": Turns(own, peer)}, {"Triton": slow}, ["torch SDPA: no"]
        )

    def published(self: Any, case: Case, limits: Any) -> dict[str, PeerTime]:
        return {"FlashMLA": PeerTime(7.0, 7.0), "FlashInfer": PeerTime(5.0, 4.0, "graph")}

    monkeypatch.setattr(run, "run_peers", ran)
    monkeypatch.setattr(run.Peers, "dense", published)
    *_, results = run.run(CASES, lambda line: None)
    first, second = results["rows"]
    assert first["best_peer"] == "FlashInfer"
    assert first["peers"]["FlashInfer"]["scaled_us"] == 4.0
    assert second["best_peer"] == "FlashInfer"
    assert second["peers"]["FlashInfer"] == {
        "us": 6.0,
        "scaled_us": 6.0,
        "own_us": 4.8,
        "x": 1.25,
        "measured": True,
    }
    assert second["peers"]["Triton"] == {
        "us": 9.0,
        "scaled_us": 9.0,
        "x": 1.8,
        "measured": True,
        "apart": True,
    }
    assert set(second["peers"]) == {"FlashMLA", "FlashInfer", "Triton"}
    assert results["notes"] == ["torch SDPA: no", "DeepGEMM: torch and deep_gemm not installed"]
    assert "\n\ntorch SDPA: no\n" in to_text(results)
    lines = to_markdown(results).splitlines()
    at = next(i for i, line in enumerate(lines) if "peers of this run" in line)
    assert lines[at].endswith("| kv_len | us | us in turns | FlashInfer us | x | Triton us | x |")
    assert lines[at + 2] == "| 2 | 2 | 3 | 128 | 5.0 | 4.8 | 6.0 | 1.25 | 9.0 | 1.80^ |"
    assert any("| 1.25 (FlashInfer) |" in line for line in lines)
    assert any(r"| 1.40\* | 0.80 (FlashInfer\*+) |" in line for line in lines)
    assert any(r"\*: scaled: that peer was measured on" in line for line in lines)
    assert "us in turns: ours in turns with the peers of this run" in lines[-1]
    assert "^: a much slower peer, which ran apart" in lines[-1]
    del results["rows"][0]
    peers = results["rows"][0]["peers"]
    peers.pop("FlashMLA")
    assert "scaled" not in to_text(results)
    peers.pop("FlashInfer")
    assert "us in turns" not in to_text(results)
    assert "^: a much slower peer" in to_text(results)


def test_peers_of_older_files_ran_apart_without_a_mark(results):
    peer = {"us": 6.0, "scaled_us": 6.0, "x": 1.2, "measured": True}
    results["rows"][1] |= {"peers": {"FlashInfer": peer}, "best_peer": "FlashInfer"}
    lines = to_markdown(results).splitlines()
    at = next(i for i, line in enumerate(lines) if "peers of this run" in line)
    assert lines[at].endswith("| kv_len | us | FlashInfer us | x |")
    assert lines[at + 2] == "| 2 | 2 | 3 | 128 | 5.0 | 6.0 | 1.20 |"
    assert any("| 1.20 (FlashInfer) |" in line for line in lines)
    assert "in turns" not in lines[-1]
    assert "apart" not in lines[-1]


def test_deep_gemm_stands_beside_the_rows_of_its_shapes(fake, monkeypatch):
    asked = []

    def ran(gpu: Any, case: Any, timer: Any) -> LogitsPeerRuns:
        asked.append((case, timer))
        if case == LOGITS[1]:
            return LogitsPeerRuns({}, ["DeepGEMM: no"])
        times = [dense.Timing(us, us, us) for us in (5.0, 6.0, 2.0, 3.0)]
        turns = {case.to_json()["op"]: Turns(*times[:2]), "paged_schedule": Turns(*times[2:])}
        return LogitsPeerRuns(turns, [])

    monkeypatch.setattr(run, "run_deep_gemm", ran)
    told: list[str] = []
    *_, results = run.run(CASES, told.append, peers=("deepgemm",))
    assert asked == [(case, timing.time_cold) for case in LOGITS]
    assert len(told) == run.steps(CASES, ("deepgemm",))
    assert results["notes"] == ["DeepGEMM: no"]
    entry = {"us": 6.0, "scaled_us": 6.0, "own_us": 5.0, "x": 1.2, "measured": True}
    shapes = [(row["op"], row.get("batch"), row["kv_len"]) for row in results["indexer"][:5]]
    found = [row.get("peers", {}).get("DeepGEMM", {}) for row in results["indexer"][:5]]
    with_peer = dict(zip(shapes, found, strict=True))
    for case in LOGITS:
        row = case.to_json()
        expected = {} if case == LOGITS[1] else entry
        assert with_peer[row["op"], row.get("batch"), row["kv_len"]] == expected
    of_schedule = with_peer["paged_schedule", LOGITS[0].batch, LOGITS[0].kv_len]
    assert of_schedule == entry | {"us": 3.0, "scaled_us": 3.0, "own_us": 2.0, "x": 1.5}
    lines = to_markdown(results).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("| indexer in turns: op |"))
    assert lines[at + 2].endswith("| 5.0 | 6.0 | 1.200 |")
    assert any(" | 1.20 | - |" in line for line in lines)
    *_, results = run.run(CASES, told.append, peers=("sdpa",))
    *_, results = run.run(CASES[:1], told.append, peers=("deepgemm",))
    assert len(asked) == len(LOGITS)
    *_, results = run.run(CASES, told.append)
    assert len(asked) == 2 * len(LOGITS)


def test_peers_can_be_chosen_for_all_rows(fake, monkeypatch):
    asked = []

    def ran(bench: Workbench, case: Case, names: Any) -> peer_runs.PeerRuns:
        asked.append((case, names))
        return peer_runs.PeerRuns({}, {}, [])

    monkeypatch.setattr(run, "run_peers", ran)
    told: list[str] = []
    *_, _ = run.run(CASES[:1], told.append, peers=("sdpa",))
    assert asked == [(CASES[0], ("sdpa",))]
    assert len(told) == run.steps(CASES[:1], ("sdpa",)) == 3
    *_, results = run.run(CASES, told.append, peers=("sdpa",))
    assert asked[1:] == [(case, ("sdpa",)) for case in CASES]
    assert {"ragged", "invariant", "schedule", "host", "start"} <= set(results)
    assert len(told) == 3 + run.steps(CASES, ("sdpa",))
    *_, _ = run.run(CASES, told.append, peers=())
    assert len(asked) == 3


def test_host_time_of_jax_is_a_note_without_a_gpu(fake, monkeypatch):
    jax = pytest.importorskip("jax")
    monkeypatch.setattr(host, "find_spec", lambda name: name == "jax" or None)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

    def none(backend: str) -> None:
        raise RuntimeError(f"Unknown backend: '{backend}'\nand more")

    monkeypatch.setattr(jax, "devices", none)
    times, notes, _ = host.host_times(Workbench(fake, (host.HOST_CASE,)))
    assert set(times) == {"CuPy"}
    assert notes == ["JAX: no host time (RuntimeError: Unknown backend: 'gpu')"]


def test_host_time_of_jax(fake, monkeypatch):
    jax = pytest.importorskip("jax")
    monkeypatch.setattr(host, "find_spec", lambda name: name == "jax" or None)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    cpus = jax.devices("cpu")
    monkeypatch.setattr(jax, "devices", lambda backend: cpus)
    times, notes, _ = host.host_times(Workbench(fake, (host.HOST_CASE,)))
    assert notes == []
    assert times["JAX"].us > 0


def test_graph_goes_round_caches_of_their_own(fake):
    case = CASES[1]
    inputs = Workbench(fake, CASES).inputs(case, dense.caches_of(case))
    pages = np.concatenate([table.ravel() for table in inputs.tables])
    assert len(inputs.tables) == 3
    assert sorted(pages.tolist()) == list(range(3 * case.pages))
    assert sorted(pages.tolist()) != pages.tolist()
    tables = [call.args[2] for call in inputs.calls(5)]
    assert [next(i for i, t in enumerate(inputs.tables) if t is table) for table in tables] == [
        *(0, 1, 2, 0, 1)
    ]


def test_fake_gpu_has_the_methods_of_the_real_one():
    for name, method in vars(Gpu).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            real, fake = (inspect.signature(kind.__dict__[name]) for kind in (Gpu, FakeGpu))
            assert list(real.parameters) == list(fake.parameters), name


def test_sampled_rows_hold_the_corners():
    rows = dense._sample(Case(128, 2, 128, 1024))
    assert 510 <= len(rows) <= 512
    assert len(np.unique(rows, axis=0)) == len(rows)
    assert rows[0].tolist() == [0, 0, 0]
    assert rows[-1].tolist() == [127, 1, 127]
    assert dense._sample(Case(1, 1, 1, 64)).tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("name", ["CUMLA_CHECK", "CUMLA_DEBUG"])
def test_slow_kernels_are_refused(fake, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    with pytest.raises(CumlaError, match=f"{name}=1: unset it"):
        next(run.run(CASES, lambda line: None))


def with_peers(results: dict[str, Any]) -> dict[str, Any]:
    """The same results, one row with peers, times as if from a GPU."""
    row = results["rows"][0]
    row |= {
        "us": 200.0,
        "tflops": 600.4,
        "gbps": 3000.4,
        "efficiency": 0.914,
        "best_peer": "FlashInfer",
        "peers": {
            "FlashMLA": {"us": 240.0, "scaled_us": 250.0, "x": 1.25},
            "FlashInfer": {"us": 200.0, "scaled_us": 210.0, "x": 1.05, "clock": "graph"},
        },
    }
    return results


def test_text(results):
    text = to_text(with_peers(results))
    lines = text.splitlines()
    row, _ = [line for line in lines if line.split()[:4] == ["17", "1", "3", "64"]]
    assert row.split()[4:] == [
        *("200", "600", "3000", "0.91", "1.25*", "1.05", "(FlashInfer*+)", "5.0", "-")
    ]
    assert lines[0].startswith("Fake GPU (4 SMs), driver ")
    assert (
        "import cumla 0.010 s, with a name that computes 0.21 s (numpy and ml_dtypes alone "
        "0.16 s); first call of a process "
    ) in text
    assert "first call of a process 3.40 s with a cold kernel cache, 0.10 s with a warm one" in text
    assert "*: scaled: that peer was measured on NVIDIA H200" in text
    assert "+: as the mean of back-to-back graph replays" in text


def test_markdown(results):
    lines = to_markdown(with_peers(results)).splitlines()
    row, _ = [line for line in lines if line.startswith("| 17 | 1 | 3 | 64 |")]
    assert row.endswith("| 200 | 600 | 3000 | 0.91 | 1.25\\* | 1.05 (FlashInfer\\*+) | 5.0 | - |")
    at = lines.index(row)
    assert "| x FlashMLA | x best peer |" in lines[at - 2]
    assert lines[at - 1].count("---:") == lines[at - 2].count(" | ") + 1
    for table_line in (line for line in lines if line.startswith("|")):
        assert table_line.endswith("|")
    assert any("\\*: scaled: that peer was measured on NVIDIA H200" in line for line in lines)


def test_csv(results):
    first, second, *others = csv.DictReader(io.StringIO(to_csv(with_peers(results))))
    of_indexer, of_operations = others[:-4], others[-4:]
    assert [row["op"] for row in of_indexer] == [row["op"] for row in results["indexer"]]
    assert [row["op"] for row in of_operations] == ["merge"] * 2 + ["append"] * 2
    for row, of in zip(of_operations, results["merge"] + results["append"], strict=True):
        assert (row["us"], row["nbytes"]) == (str(LAUNCH_US), str(of["nbytes"]))
        graph = ["graph_us", "graph_gbps", "graph_efficiency", "graph_copy_us", "graph_copy_gbps"]
        for key in graph:
            assert row[key] == ("" if of.get(key) is None else str(of[key]))
    assert {row["us"] for row in of_indexer if row["op"] != "paged_schedule"} == {str(LAUNCH_US)}
    assert first["us"] == "200.0"
    assert first["FlashMLA_scaled_us"] == "250.0"
    assert second["FlashMLA_scaled_us"] == ""
    assert second["kv_len"] == "128"
    assert "peers" not in first


def test_start_times_come_from_processes_of_their_own(monkeypatch):
    monkeypatch.setenv("CUMLA_CUBIN_DIR", "/somewhere")
    ran: list[tuple[tuple[str, ...], dict[str, str]]] = []

    def fake_run(command: list[str], *, env: dict[str, str], **options: object) -> Any:
        ran.append((tuple(command[1:]), env))
        return SimpleNamespace(stdout=f"{len(ran)}.0\n")

    monkeypatch.setattr(start.subprocess, "run", fake_run)
    # 1 to 3 are dropped; then 4, 7, ... 28 and so on; a cold call and three warm ones
    assert start.measure() == {
        "import_s": 16.0,
        "names_s": 17.0,
        "dependencies_s": 18.0,
        "first_call_cold_s": 31.0,
        "first_call_warm_s": 33.0,
    }
    assert ["import cumla" in command[1] for command, _ in ran[:4]] == [True, False, False, True]
    assert len({env["CUPY_CACHE_DIR"] for _, env in ran}) == 1
    assert all("CUMLA_CUBIN_DIR" not in env for _, env in ran)


def test_import_is_timed(tmp_path):
    assert 0 < start._seconds(("-c", start._TIMED.format("import cumla")), str(tmp_path)) < 60


def test_failing_process_is_told(tmp_path):
    with pytest.raises(start.StartError, match="no such luck"):
        start._seconds(("-c", "raise RuntimeError('no such luck')"), str(tmp_path))


def test_failing_process_leaves_the_other_results(fake, monkeypatch):
    def fail() -> None:
        raise start.StartError("no such luck")

    monkeypatch.setattr(run, "measure_start", fail)
    *_, results = run.run(CASES, lambda line: None)
    assert "Start times: not measured (no such luck)" in to_text(results)


def test_command_writes_what_was_measured(fake, tmp_path, capsys):
    file = tmp_path / "results.json"
    assert cli.main(["bench", "--json", str(file)]) == 0
    said = capsys.readouterr()
    assert "b2-s2-h3-kv128: " in said.err
    assert said.out == to_text(json.loads(file.read_text())) + "\n"


def test_command_keeps_what_was_measured_before_a_failure(fake, tmp_path, monkeypatch):
    def fail(*arguments: object) -> None:
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr(run, "host_times", fail)
    file = tmp_path / "results.json"
    with pytest.raises(RuntimeError, match="the GPU is gone"):
        cli.main(["bench", "--json", str(file)])
    written = json.loads(file.read_text())
    assert len(written["rows"]) == 2
    assert "schedule" in written


def test_command_runs_chosen_rows_only(fake, capsys):
    assert cli.main(["bench", "--rows", "b2-*"]) == 0
    assert "b17" not in capsys.readouterr().err


def test_command_fails_when_a_result_is_wrong(fake, monkeypatch, capsys):
    monkeypatch.setattr(dense.MLADecodePlan, "run", lambda self, *args, **kwargs: None)
    assert cli.main(["bench"]) == 1
    assert "out is wrong in" in capsys.readouterr().out
