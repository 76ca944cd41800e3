# SPDX-License-Identifier: Apache-2.0
"""What records a run: start times, published times of others, libraries in turns, variants."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import record, start, variants
from bench.decode_peers import PeerRuns
from bench.logits_peers import LogitsPeerRuns
from bench.peers import Turns, add_published, load_peers
from bench.sections.indexer import PagedLogitsCase, PrefillLogitsCase, floor_us
from bench.sections.sparse import SparseCase
from cumla.bench.cases import DENSE, Case
from cumla.bench.explain import key_of
from cumla.bench.timing import Timing
from tests.bench.conftest import DENSE as SMALL_DENSE
from tests.bench.conftest import Fakes, small

RECORDS = Path(__file__).resolve().parents[2] / "records"
H200 = load_peers().ceilings


def timing(us: float) -> Timing:
    return Timing(us, us, us)


# --- published times ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["h200.json", "h100.json"])
def test_published_times_are_those_of_recorded_runs(name: str) -> None:
    """Whatever `add_published` puts beside bare rows is what the record has."""
    recorded = json.loads((RECORDS / name).read_text())
    bare = json.loads(json.dumps(recorded))
    for section in ("rows", "schedule", "indexer"):
        for row in bare[section]:
            for key in ("peers", "best_peer", "flash_mla_us", "deep_gemm_us"):
                row.pop(key, None)
    assert add_published(bare) == recorded


def test_peers_of_every_row() -> None:
    peers = load_peers()
    for case in DENSE:
        found = peers.dense(case, H200)
        assert {"FlashMLA", "FA3-MLA"} <= set(found)
        for time in found.values():
            assert time.scaled_us == pytest.approx(time.us)  # the same GPU
    assert "back-to-back" in peers.dense(Case(128, 1, 128, 4096), H200)["FlashInfer"].clock


def test_peers_are_scaled_by_what_bounds_the_case() -> None:
    slow_memory = replace(H200, read_gbps=H200.read_gbps / 2)
    few, many = Case(128, 1, 16, 4096), Case(128, 2, 128, 4096)
    of_few, of_many = (load_peers().dense(case, slow_memory)["FlashMLA"] for case in (few, many))
    assert of_few.scaled_us == pytest.approx(2 * of_few.us)
    assert of_many.scaled_us == pytest.approx(of_many.us)


@pytest.mark.parametrize("slow", ["read_gbps", "fp8_tflops"])
@pytest.mark.parametrize("case", [PagedLogitsCase(128, 1, 32768), PrefillLogitsCase(4096, 8192)])
def test_peers_of_logits_are_scaled_by_the_ceiling_that_binds(case: Any, slow: str) -> None:
    limits = replace(H200, **{slow: getattr(H200, slow) / 2})
    row = case.to_json() | {"us": 100.0}
    results = {"ceilings": limits.to_json(), "rows": [], "indexer": [row]}
    scaled = add_published(results)["indexer"][0]["peers"]["DeepGEMM"]["scaled_us"]
    peers = load_peers()
    (kernel,) = peers.times(case.to_json(), floor_us(case, limits) / floor_us(case, H200)).values()
    cleaning = peers.times(case.to_json() | {"op": "clean_logits"}, 1.0).values()
    written = sum(time.us for time in cleaning) * (2 if slow == "read_gbps" else 1)
    assert scaled == pytest.approx(kernel.scaled_us + written)


def test_peers_of_sparse_attention() -> None:
    """Scaled by what bounds the case, whatever the length of a decoding context."""
    limits = replace(H200, matmul_tflops=H200.matmul_tflops / 2)
    cases = (
        *(SparseCase(128, 1, 128, kv_len=length) for length in (8192, 32768)),
        SparseCase(1, 4096, 128, "bfloat16", 8192, prefill=True),
        SparseCase(1, 4096, 128, "bfloat16", 131072, prefill=True),
        SparseCase(64, 1, 128),
    )
    rows = [case.to_json() | {"us": 100.0} for case in cases]
    rows += [{"op": "top_k", "us": 1.0}, {"op": "sparse_decode", "failed": "so"}]
    add_published({"ceilings": limits.to_json(), "rows": [], "sparse": rows})
    scaled = [row.get("peers", {}).get("FlashMLA", {}).get("scaled_us") for row in rows]
    known = pytest.approx(2 * 188.32), pytest.approx(2 * 188.32), pytest.approx(2 * 3604.32)
    assert scaled == [*known, None, None, None, None]


@pytest.mark.parametrize(
    "other", [{"dtype": "float16"}, {"kv_heads": 2}, {"seed": 0}, {"batch_invariant": True}]
)
def test_peers_of_variants_are_unknown(other: dict[str, Any]) -> None:
    assert load_peers().dense(Case(128, 1, 128, 4096), H200)
    assert load_peers().dense(Case(128, 1, 128, 4096, **other), H200) == {}


# --- a recorded run -------------------------------------------------------------------------------


@pytest.fixture
def recorded(fakes: Fakes, monkeypatch: pytest.MonkeyPatch, results: dict[str, Any]) -> Any:
    """Names what ran; a run has small rows, and every library 6 us beside cumla's 5."""
    ran: list[Any] = []

    def run(note: Any) -> Any:
        ran.append("all")
        yield results | {"protocol": "Events"}

    def run_peers(bench: Any, case: Case, names: Any) -> PeerRuns:
        ran.append((case, names))
        turns = {"FlashInfer": Turns(timing(5.0), timing(6.0))}
        return PeerRuns(turns, {"Triton": timing(9.0)}, ["torch SDPA: no"])

    def run_deep_gemm(bench: Any, case: Any) -> LogitsPeerRuns:
        ran.append(case)
        turns = Turns(timing(5.0), timing(6.0))
        return LogitsPeerRuns({case.to_json()["op"]: turns, "paged_schedule": turns}, [])

    logits = small("indexer: ")
    monkeypatch.setattr(record, "measure_start", lambda: {"import_s": 0.1})
    monkeypatch.setattr(record, "run", run)
    monkeypatch.setattr(record, "Gpu", lambda: fakes.gpu)
    monkeypatch.setattr(record, "run_peers", run_peers)
    monkeypatch.setattr(record, "run_deep_gemm", run_deep_gemm)
    monkeypatch.setattr(record.indexer, "SECTIONS", (logits,))
    return SimpleNamespace(ran=ran, logits=logits)


def test_everything_is_recorded(recorded: Any) -> None:
    told: list[str] = []
    *_, results = record.record(told.append, SMALL_DENSE[1:])
    assert recorded.ran == ["all", (SMALL_DENSE[1], ()), *recorded.logits.cases]
    assert (results["start"], results["notes"]) == ({"import_s": 0.1}, ["torch SDPA: no"])
    assert results["protocol"].startswith("Events. Peers that are marked")
    first, second = results["rows"]
    assert first["peers"] == {}
    entry = {"us": 6.0, "scaled_us": 6.0, "own_us": 5.0, "x": 1.2, "measured": True}
    apart = {"us": 9.0, "scaled_us": 9.0, "x": 1.8, "measured": True, "apart": True}
    assert second["peers"] == {"FlashInfer": entry, "Triton": apart}
    assert second["best_peer"] == "FlashInfer"
    with_peer = [row for row in results["indexer"] if row.get("peers", {}).get("DeepGEMM")]
    assert [row["op"] for row in with_peer] == [
        *("paged_mqa_logits", "paged_mqa_logits", "mqa_logits", "paged_schedule")
    ]
    assert "b2-s2-h3-kv128: FlashInfer 6.0 us, Triton 9.0 us" in told


def test_libraries_can_be_chosen(recorded: Any) -> None:
    *_, _ = record.record(lambda line: None, SMALL_DENSE, ("sdpa",))
    assert recorded.ran[1:] == [(case, ("sdpa",)) for case in SMALL_DENSE]


def test_start_times_that_cannot_be_measured_leave_the_rest(
    recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise start.StartError("no such luck")

    monkeypatch.setattr(record, "measure_start", fail)
    *_, results = record.record(lambda line: None, ())
    assert results["start"] == {"failed": "no such luck"}


def test_the_script_writes_what_was_measured(recorded: Any, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    record.main([str(file), "--peers", "none"])
    assert json.loads(file.read_text())["start"] == {"import_s": 0.1}
    assert len(recorded.ran) == 1


# --- start times ----------------------------------------------------------------------------------


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


# --- variants -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "names"),
    [
        (Case(4, 1, 16, 1024), ("swapped", "one_tile", "shared_blocks")),
        (Case(4, 2, 16, 1024), ("one_tile", "shared_blocks")),
        (Case(4, 2, 16, 1024, kv_heads=2), ("swapped", "one_tile", "shared_blocks")),
        (Case(4, 1, 128, 1024), ("one_tile", "shared_blocks")),
    ],
)
def test_kernels_that_can_serve(case: Case, names: tuple[str, ...]) -> None:
    key = key_of(case, 132)
    assert variants.admissible(key) == names
    assert key.variant in names


def test_every_kernel_is_compared_somewhere() -> None:
    keys = [key_of(case, 132) for case in variants.SECTION.cases]
    assert {key.variant for key in keys} == {"swapped", "one_tile", "shared_blocks"}


def test_kernels_take_turns(fakes: Fakes) -> None:
    section = replace(variants.SECTION, cases=(Case(2, 1, 2, 70),))
    (row,) = fakes.measure(section)["variants"]
    assert row["chosen"] in row["us"]
    assert set(row["us"]) == set(variants.admissible(key_of(Case(2, 1, 2, 70), 132)))
    slower = row | {"us": dict.fromkeys(row["us"], 12.0) | {row["chosen"]: 15.0}}
    failed = {"failed": "out is wrong"}
    assert variants.worst([failed]) == 1.0
    assert variants.worst([slower, failed]) == pytest.approx(1.25)
