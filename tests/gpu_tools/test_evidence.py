# SPDX-License-Identifier: Apache-2.0
"""The evidence of the kernels belongs to their present sources, or the CHANGELOG says otherwise."""

from __future__ import annotations

import copy
import inspect
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cumla.launch import all_specs
from tests.gpu import conftest as gpu_conftest
from tests.gpu.tools import record, sanitize

CHANGELOG = record.ROOT / "CHANGELOG.md"
RUN = {"passed": 3, "failed": 0, "skipped": 1, "cupy": "cupy-cuda13x 14.2.0"}


@pytest.mark.parametrize("stem", record.stems())
def test_evidence_belongs_to_the_present_sources(stem: str) -> None:
    """After a change of a kernel or its launcher: run tests/gpu again, or list it as unproven."""
    problems = record.problems(record.read(stem), stem)
    listed = stem in record.unproven(CHANGELOG.read_text("utf-8"))
    assert listed or not problems, f"{stem} is not proven, nor listed as unproven: {problems}"
    assert problems or not listed, f"{stem} is proven: take it off the CHANGELOG's unproven list"


def test_every_unproven_kernel_and_every_evidence_file_is_of_a_kernel() -> None:
    named = record.unproven(CHANGELOG.read_text("utf-8"))
    files = {path.stem for path in record.FOLDER.glob("*.json")}
    assert named | files <= set(record.stems())


# --- the rules -----------------------------------------------------------------------------------

STEM = record.stems()[0]


def evidence(**change: Any) -> dict[str, Any]:
    """Evidence that is in order, but for the changes."""
    return copy.deepcopy(
        record.subject(STEM) | {"runs": {"cupy-cuda13x": RUN}, "sanitizer": {}} | change
    )


def test_evidence_in_order() -> None:
    assert record.problems(evidence(), STEM) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"entries": {}}, "has changed since the run"),
        ({"launcher": "0" * 64}, "launcher is not that of the present sources"),
        ({"options": ["-arch=sm_90"]}, "options is not that"),
        ({"kernel": "another"}, "kernel is not that"),
        ({"runs": {}}, "it holds no run"),
        ({"runs": {"cupy-cuda13x": RUN | {"failed": 1}}}, "1 tests failed with cupy-cuda13x"),
        ({"runs": {"cupy-cuda13x": RUN | {"passed": 0}}}, "no test passed"),
    ],
)
def test_evidence_out_of_order(change: dict[str, Any], problem: str) -> None:
    assert any(problem in found for found in record.problems(evidence(**change), STEM))


def test_no_evidence_at_all() -> None:
    assert record.problems({}, STEM)


def test_a_kernel_has_all_its_entry_points_in_its_evidence() -> None:
    names = {f"mla_decode_{dtype}" for dtype in ("bfloat16", "float16")}
    forms = ("", "_boxes", "_rows")
    floats = ("bfloat16", "float16", "float32")
    wanted = {
        "mla_schedule": {"mla_schedule", "mla_schedule_invariant"},
        "mla_attention_schedule": {"mla_attention_schedule"},
        "mla_decode": {
            f"{name}{form}"
            for dtype in ("bfloat16", "float16")
            for name in (
                f"mla_decode_{dtype}",
                f"mla_decode_{dtype}_shared_blocks",
                f"mla_attention_{dtype}",
            )
            for form in forms
        },
        "mla_decode_swapped": {f"{name}_swapped{form}" for name in names for form in forms},
        "mla_decode_fp8": {
            f"{name}{scales}{form}"
            for name in ("mla_decode_fp8_16", "mla_decode_fp8_32", "mla_attention_fp8")
            for scales in ("", "_grouped")
            for form in ("", "_rows")
        }
        - {"mla_attention_fp8_grouped"}
        | {"mla_decode_fp8_16_packed"},
        "merge_states": {f"merge_states_{dtype}" for dtype in floats},
        "append_cache": {
            f"append_cache_{dtype}{source}"
            for dtype in ("bfloat16", "float16")
            for source in ("", "_from_float32")
        },
        "append_fp8_cache": {
            f"append_fp8_cache_{dtype}{source}"
            for dtype in ("bfloat16", "float16")
            for source in ("", "_from_float32")
        },
        "append_indexer_cache": {f"append_indexer_cache_{dtype}" for dtype in floats},
        "quantize_fp8": {f"quantize_fp8_{dtype}" for dtype in floats},
        "mqa_logits": {f"mqa_logits_h{h}_d{d}" for h in (8, 16, 32, 64) for d in (32, 64, 128)},
        "paged_mqa_schedule": {"paged_mqa_schedule"},
        "paged_mqa_logits": {
            f"paged_mqa_logits_h{heads}_d{dim}_n{columns}"
            for heads, most in ((32, 256), (64, 512))
            for dim in (32, 64, 128)
            for columns in (64, 128, 256, 512)
            if columns <= most
        },
    }
    assert set(record.stems()) == set(wanted)
    for stem, names in wanted.items():
        entries = record.subject(stem)["entries"]
        assert set(entries) == names
        assert all(len(digest) == 64 for digest in entries.values())


def test_a_launchers_digest_sees_code_and_no_comments() -> None:
    text = 'x = f"{1}#"  # why\n\n\n# because\ny = """#\n\n"""\n'
    assert record.without_comments(text) == 'x = f"{1}#"\ny = """#\n"""'
    assert record.without_comments("x = 1\n") != record.without_comments("x = 2\n")


def test_every_kernel_has_one_launcher() -> None:
    launchers = {stem: record.launcher_of(stem).__name__ for stem in record.stems()}
    shared = {"mla_decode_swapped": "cumla.launch.mla.mla_decode"}
    renamed = {"mla_attention_schedule": "cumla.launch.mla.mla_attention"}
    others = {stem: f"cumla.launch.{stem}" for stem in launchers if stem not in shared} | renamed
    assert launchers == others | shared
    digests = {name: record.launcher_digest(stem) for stem, name in launchers.items()}
    assert len(set(digests.values())) == len(others)


@pytest.mark.parametrize(
    ("module", "stems"),
    [
        (
            "mla_decode",
            {"mla_decode", "mla_decode_swapped", "mla_decode_fp8", "mla_attention_schedule"},
        ),
        ("mla_decode_fp8", {"mla_decode_fp8", "mla_attention_schedule"}),
        ("mla_attention", {"mla_attention_schedule"}),
        ("append_cache", {"append_cache", "append_fp8_cache"}),
        ("indexer_shape", {"mqa_logits", "paged_mqa_logits", "paged_mqa_schedule"}),
        ("kernel", set()),
    ],
)
def test_a_launchers_digest_covers_what_it_imports(
    module: str, stems: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {stem: record.launcher_digest(stem) for stem in record.stems()}
    source = inspect.getsource

    def edited(of: ModuleType) -> str:
        return source(of) + "\nedited = True\n" * (of.__name__ == f"cumla.launch.{module}")

    monkeypatch.setattr(inspect, "getsource", edited)
    assert {stem for stem in before if record.launcher_digest(stem) != before[stem]} == stems


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (
            "# C\n\n## [Unreleased]\n### Unproven\n- `a`\n- `b.cu`: why\n\n## [0.1]\n`c`\n",
            {"a", "b"},
        ),
        ("# C\n\n## Unproven kernels\n\n`a`", {"a"}),
        ("# C\n\n## 0.2\n### unproven\n\n## 0.1\n### unproven\n- `a`\n", set()),
        ("# C\n\n**Unproven** is `a`\n", set()),
    ],
)
def test_the_unproven_section(text: str, names: set[str]) -> None:
    assert record.unproven(text) == names


def test_runs_of_the_same_sources_stand_side_by_side() -> None:
    old = evidence(sanitizer={"memcheck": {"verdict": "clean"}})
    new = record.merge(old, STEM, runs={"cupy-cuda12x": RUN | {"passed": 4}})
    assert set(new["runs"]) == {"cupy-cuda12x", "cupy-cuda13x"}
    assert new["sanitizer"] == {"memcheck": {"verdict": "clean"}}
    assert record.problems(new, STEM) == []


def test_what_older_sources_proved_is_dropped() -> None:
    old = evidence(launcher="0" * 64, sanitizer={"memcheck": {"verdict": "clean"}})
    new = record.merge(old, STEM, runs={"cupy-cuda12x": RUN})
    assert set(new["runs"]) == {"cupy-cuda12x"}
    assert new["sanitizer"] == {}
    new = record.merge(old, STEM, sanitizer={"memcheck": {"verdict": "clean"}})
    assert new["runs"] == {}


# --- the writer ----------------------------------------------------------------------------------


def report(test: str, outcome: str, when: str = "call", **figures: float) -> Any:
    properties = [(gpu_conftest.FIGURES, figures)] if figures else []
    return SimpleNamespace(
        nodeid=f"tests/gpu/{test}", outcome=outcome, when=when, user_properties=properties
    )


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> gpu_conftest.EvidenceWriter:
    """A writer that has seen every module of tests/gpu, on a machine with a GPU."""
    machine = {"gpu": "a GPU", "cupy": "cupy-cuda13x 14.2.0"}
    monkeypatch.setattr(record, "machine", lambda: machine)
    monkeypatch.setattr(gpu_conftest, "no_hopper", lambda: "")
    monkeypatch.setattr(record, "FOLDER", tmp_path / "none")
    writer = gpu_conftest.EvidenceWriter(SimpleNamespace(getoption=lambda name: tmp_path))  # type: ignore[arg-type]
    items = [SimpleNamespace(path=path) for path in gpu_conftest.HERE.glob("test_*.py")]
    assert len(items) >= 6
    writer.pytest_collection_finish(SimpleNamespace(items=items))  # type: ignore[arg-type]
    return writer


SESSION: Any = SimpleNamespace(shouldstop=False, shouldfail=False)


def test_a_run_is_written_with_its_worst_figures(
    writer: gpu_conftest.EvidenceWriter, tmp_path: Path
) -> None:
    for when in ("setup", "teardown"):
        writer.pytest_runtest_logreport(report("test_x.py::test_a[one]", "passed", when))
    writer.pytest_runtest_logreport(report("test_x.py::test_a[one]", "passed", row=1e-3, cos=2e-6))
    writer.pytest_runtest_logreport(report("test_x.py::test_a[two]", "passed", row=2e-3, cos=1e-6))
    writer.pytest_runtest_logreport(report("test_x.py::test_b", "failed"))
    writer.pytest_runtest_logreport(report("test_x.py::test_c", "failed", "setup"))
    writer.pytest_runtest_logreport(report("test_x.py::test_d", "skipped", "setup"))
    other = SimpleNamespace(nodeid="tests/test_y.py::test_e", outcome="passed", when="call")
    writer.pytest_runtest_logreport(other)  # type: ignore[arg-type]
    writer.pytest_sessionfinish(SESSION)
    assert writer.note.startswith("evidence written to")
    for stem in record.stems():
        found = json.loads((tmp_path / f"{stem}.json").read_text("utf-8"))
        assert found["kernel"] == stem
        run = found["runs"]["cupy-cuda13x"]
        assert (run["passed"], run["failed"], run["skipped"]) == (2, 2, 1)
        assert run["skipped_tests"] == ["tests/gpu/test_x.py::test_d"]
        group = run["groups"]["test_x.py::test_a"]
        assert group["tests"] == 2
        assert group["worst"] == {"row": 2e-3, "cos": 2e-6}
        assert group["worst_case"] == {"row": "two", "cos": "one"}
        assert record.problems(found, stem) == ["2 tests failed with cupy-cuda13x"]


@pytest.mark.parametrize("lack", ["deselected", "module", "stopped", "GPU"])
def test_a_partial_run_writes_nothing(
    writer: gpu_conftest.EvidenceWriter,
    tmp_path: Path,
    lack: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer.pytest_runtest_logreport(report("test_x.py::test_a", "passed"))
    session = SESSION
    if lack == "deselected":
        writer.pytest_deselected([SESSION])
    elif lack == "module":
        writer.modules.discard("test_plan.py")
    elif lack == "stopped":
        session = SimpleNamespace(shouldstop=False, shouldfail="stopping after 1 failures")
    else:
        monkeypatch.setattr(gpu_conftest, "no_hopper", lambda: "no GPU")
    writer.pytest_sessionfinish(session)
    assert writer.note.startswith("no evidence written")
    assert not list(tmp_path.glob("*.json"))


# --- compute-sanitizer's logs --------------------------------------------------------------------

CLEAN = f"========= COMPUTE-SANITIZER\n{sanitize.DONE}\n========= ERROR SUMMARY: 0 errors\n"
CLEAN_RACE = CLEAN.replace(
    "ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
)
RACE = f"""========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at mla_decode_bfloat16+0x5a40
=========     and Read access at mla_decode_bfloat16+0x6210 [128 hazards]
=========
========= Error: Race reported between Write access at mla_decode_bfloat16+0x5a80
=========     and Read access at mla_decode_bfloat16+0x6220 [64 hazards]
=========
{sanitize.DONE}
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)

[12.5 s]
"""
UNINITIALISED = f"""========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at mla_decode_bfloat16+0x1f0
=========     by thread (5,0,0) in block (0,1,0)
=========     Address 0x7f2a3f000010
=========
{sanitize.DONE}
========= ERROR SUMMARY: 1 error
"""


def test_a_log_with_hazards() -> None:
    found = sanitize.read_log(RACE)
    assert (found["complete"], found["errors"], found["warnings"]) == (True, 2, 0)
    assert found["kernels"] == {"mla_decode_bfloat16": 4}
    assert list(found["kinds"].values()) == [2]
    assert found["seconds"] == 12.5


def test_every_kernel_is_found_in_a_log() -> None:
    for spec in all_specs():
        for place in (f"{spec.entry}+0x1f0", f"{spec.entry}(cumla::Params)+0x1f0"):
            assert sanitize.read_log(f"=========     at {place}\n")["kernels"] == {spec.entry: 1}


def test_a_log_with_an_uninitialised_read() -> None:
    found = sanitize.read_log(UNINITIALISED)
    assert (found["complete"], found["errors"]) == (True, 1)
    assert found["kernels"] == {"mla_decode_bfloat16": 1}
    assert found["kinds"] == {"Uninitialized __global__ memory read of size # bytes": 1}


@pytest.mark.parametrize("text", ["", "========= ERROR SUMMARY: 0 errors\n", f"{sanitize.DONE}\n"])
def test_a_log_that_breaks_off_proves_nothing(text: str) -> None:
    assert not sanitize.read_log(text)["complete"]


def test_verdicts_and_calibration_reach_the_evidence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "FOLDER", tmp_path / "none")
    logs = {
        "memcheck.log": CLEAN,
        "synccheck.log": "",
        "racecheck.log": CLEAN_RACE,
        "initcheck.log": UNINITIALISED,
        "racecheck-missing-wait.log": RACE,
        "racecheck-missing-tile-wait.log": CLEAN_RACE,
        "racecheck-missing-gather-sync.log": RACE,
        "initcheck-unwritten-partial.log": UNINITIALISED,
        "racecheck-swapped-missing-exchange-sync.log": RACE,
        "initcheck-swapped-unwritten-partial.log": UNINITIALISED,
    }
    assert set(logs) == {sanitize.log_name(tool, plant) for tool, plant in sanitize.RUNS}
    for name, text in logs.items():
        (tmp_path / name).write_text(text)
    sanitize.summarise(tmp_path, tmp_path / "evidence")
    found = record.read("mla_decode", tmp_path / "evidence")["sanitizer"]
    assert {tool: entry["verdict"] for tool, entry in found.items()} == {
        "memcheck": "clean",
        "synccheck": "incomplete",
        "racecheck": "clean",
        "initcheck": "findings",
    }
    planted = found["racecheck"]["planted"]
    assert planted["missing-wait"]["found"]
    assert not planted["missing-tile-wait"]["found"]
    assert not found["initcheck"]["planted"]["unwritten-partial"]["found"]
    assert "planted missing-wait: found (2 errors)" in capsys.readouterr().out
