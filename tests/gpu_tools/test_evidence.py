# SPDX-License-Identifier: Apache-2.0
"""The evidence of the kernels belongs to their present sources, or the CHANGELOG says otherwise."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from cumla.launch import all_specs
from cumla.launch.source import translation_unit
from tests.gpu import conftest
from tests.gpu.tools import cubins, digests, prove, record, sanitize
from tests.selection import some
from tests.sources import sources

CHANGELOG = record.ROOT / "CHANGELOG.md"
STEMS = (*digests.launchers(), record.RUNTIME)
ENTRIES = sorted(spec.entry for spec in all_specs())


@cache
def nvrtc() -> cubins.Nvrtc:
    """The one that is installed."""
    roots = [Path(root) for root in import_module("nvidia").__path__]
    return cubins.Nvrtc(next(path.parent for root in roots for path in root.rglob("libnvrtc.so.*")))


@pytest.mark.parametrize("stem", STEMS)
def test_evidence_belongs_to_the_present_sources(stem: str) -> None:
    """After a change of a kernel or its launcher: run tests/gpu again, or list it as unproven."""
    problems = record.problems(stem, record.FOLDER, sources())
    listed = stem in record.unproven(CHANGELOG.read_text("utf-8"))
    assert listed or not problems, f"{stem} is not proven, nor listed as unproven: {problems}"
    assert problems or not listed, f"{stem} is proven: take it off the CHANGELOG's unproven list"


def test_every_name_is_that_of_a_kernel() -> None:
    named = record.unproven(CHANGELOG.read_text("utf-8"))
    files = {path.stem for path in record.FOLDER.glob("*.json")} - {record.RUNS}
    tested = {stem for module in sources().modules.values() for stem in module.kernels}
    assert named | files <= set(STEMS)
    assert tested == set(sources().kernels) == {spec.stem for spec in all_specs()}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("# C\n\n## [New]\n### Unproven\n- `a`\n- `b.cu`: why\n\n## [0.1]\n`c`\n", {"a", "b"}),
        ("# C\n\n## 0.2\n### unproven\n\n## 0.1\n### unproven\n- `a`\n", set()),
        ("# C\n\n**Unproven** is `a`\n", set()),
    ],
)
def test_the_unproven_section(text: str, names: set[str]) -> None:
    assert record.unproven(text) == names


# --- digests -------------------------------------------------------------------------------------

TEXTS = digests.runtime_texts()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r"function\.max_dynamic_shared_size_bytes = ", "other = "),
        (r"\border_streams\(last, ", "print(last, "),
        (r"\.note_use\(", ".ignore("),
        (r"\.wait_event\(", ".ignore("),
        (r"raise CumlaError\(", "raise ValueError("),
        (r'"cumla\.jax"', '"cumla.torch"'),
    ],
)
def test_the_digest_of_the_runtime_sees_what_guards_every_launch(old: str, new: str) -> None:
    edited = {name: re.sub(old, new, text) for name, text in TEXTS.items()}
    assert edited != TEXTS
    assert digests.runtime_digest(edited) != sources().runtime


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r"must be a live ", "has to be a live "),
        (r"    # .*\n", "    # other words\n"),
        (r'    """(\w+) ', r'    """Really, \1 '),
        (r"-> bytes:", "-> object:"),
    ],
)
def test_the_digest_of_the_runtime_leaves_words_out(old: str, new: str) -> None:
    edited = {name: re.sub(old, new, text) for name, text in TEXTS.items()}
    assert edited != TEXTS
    assert digests.runtime_digest(edited) == sources().runtime


def launches_after(folder: Path, *edits: tuple[str, str, str]) -> dict[str, dict[str, str]]:
    """Launches of a part of the table, by a copy of the package with texts replaced."""
    copy = folder / "cumla"
    shutil.copytree(digests.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in edits:
        text = (copy / name).read_text("utf-8")
        assert old in text
        (copy / name).write_text(text.replace(old, new), "utf-8")
    command = [sys.executable, "-m", "tests.gpu.tools.launches", "caches", "small"]
    where = os.pathsep.join((str(folder), str(record.ROOT)))
    environment = os.environ | {"PYTHONPATH": where}
    told = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True)
    found: dict[str, dict[str, str]] = json.loads(told.stdout)
    return found


def test_names_and_messages_change_no_launch(tmp_path: Path) -> None:
    whole, helper = digests.launches(), "launch/mla/append_cache.py"
    edits = [
        ("core/arguments.py", "needs", "wants"),
        (helper, "append_values", "values_of_rows"),
        ("launch/mla/append_fp8_cache.py", "append_values", "values_of_rows"),
        ("launch/kernel.py", "@cache\ndef _offsets", "kept = cache\n\n\n@kept\ndef _offsets"),
    ]
    found = launches_after(tmp_path, *edits)
    assert {"append_cache_bfloat16", "merge_states_float16"} <= found.keys()
    for entry, groups in found.items():
        assert groups.items() <= whole[entry].items()


@pytest.mark.parametrize(
    ("edits", "changed"),
    [
        ([("launch/kernel.py", "SerializationAllowed = 1", "SerializationAllowed = 0")], ("",)),
        (
            [
                ("launch/_layouts.py", 'kMergeThreads": 64', 'kMergeThreads": 128'),
                ("launch/mha/append_kv_cache.py", "grid = (sum(chunks)", "grid = (1 + sum(chunks)"),
                ("launch/mla/append_fp8_cache.py", "arguments.scale_number", "2.0"),
            ],
            ("merge_states", "append_kv_cache", "append_fp8_cache"),
        ),
    ],
    ids=["an attribute", "threads, a grid, a parameter"],
)
def test_what_the_driver_is_asked_for_changes_launches(
    edits: list[tuple[str, str, str]], changed: tuple[str, ...], tmp_path: Path
) -> None:
    whole, found = digests.launches(), launches_after(tmp_path, *edits)
    differs = {e for e, groups in found.items() if not groups.items() <= whole[e].items()}
    assert differs == {entry for entry in found if entry.startswith(changed)}


def test_every_entry_point_is_launched_by_the_table() -> None:
    assert digests.launches().keys() == {spec.entry for spec in all_specs()}


SMALL = digests.specs("merge_states")[0]


def test_names_leave_machine_code_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """And comments, and constants of other names and places; an operation does not."""
    text = translation_unit(SMALL)
    made = []
    for old, new in (
        ("^", ""),
        ("//", "// Words:"),
        (r"\bmerge_row\b", "merged"),
        (r"\bkLn2\b", "kOfTwo"),
        (r"(namespace cumla \{\n)", r"\1constexpr float kMore = 4.0f;\n"),
        (r"\+=", "-="),
    ):
        edited = re.sub(old, new, text, count=0 if "namespace" not in old else 1)
        monkeypatch.setattr(cubins, "translation_unit", lambda spec, edited=edited: edited)
        assert (edited == text) is (old == "^")
        made.append(cubins.digest_of(nvrtc().cubin(SMALL)))
    *equal, other = made
    assert len(set(equal)) == 1 and other not in equal
    known = record.read(record.FOLDER, "merge_states")["entries"][SMALL.entry]
    is_recorded = known["source"] == sources().kernels["merge_states"]["entries"][SMALL.entry]
    assert not is_recorded or known.get("cubins", {}).get(nvrtc().version, made[0]) == made[0]


# --- the rules -----------------------------------------------------------------------------------

STEM = "schedule"
PASSED = {"tests": 3, "passed": 3, "failed": [], "skipped": {}, "figures": {}}
LAUNCHED = "".join(f"sanitize: {entry} launched 3 times\n" for entry in ENTRIES)
CLEAN_LOG = f"========= COMPUTE-SANITIZER\n{LAUNCHED}{sanitize.DONE}\n= ERROR SUMMARY: 0 errors\n"
RACE = f"""========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at mla_decode_bfloat16+0x5a40
=========     and Read access at mla_decode_bfloat16+0x6210 [128 hazards]
=========
========= Error: Race reported between Write access at mla_decode_bfloat16+0x5a80
=========     and Read access at mla_decode_bfloat16+0x6220 [64 hazards]
=========
sanitize: mla_decode_bfloat16 launched 2 times
sanitize: mla_decode_fp8_16 launched 7 times, edited: every lane arrives
{sanitize.DONE}
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)

[12.5 s]
"""
CLEAN = sanitize.read_log(CLEAN_LOG)


def of_kernels(*stems: str, of: record.Sources | None = None) -> record.Sources:
    """The sources of some kernels: a run writes the files of all that it is about."""
    of = sources() if of is None else of
    return of._replace(kernels={stem: of.kernels[stem] for stem in stems})


def evidence(
    folder: Path,
    parts: dict[str, Any] | None = None,
    tools: dict[str, Any] | None = None,
    of: record.Sources | None = None,
) -> list[str]:
    """The problems of STEM after runs in order, but for the changes (None: left out)."""
    of = of_kernels(STEM, of=of)
    tests = dict.fromkeys(of.modules_of(STEM), PASSED) | (parts or {})
    for kind, results in (
        ("cupy-cuda13x", tests),
        (record.SANITIZER, dict.fromkeys(record.TOOLS, CLEAN) | (tools or {})),
    ):
        run = record.Run(folder, kind, {}, of)
        for name, part in results.items():
            if part is not None:
                run.add(name, part)
    return record.problems(STEM, folder, sources())


def test_evidence_in_order(tmp_path: Path) -> None:
    assert evidence(tmp_path) == []
    assert evidence(tmp_path) == []  # a second time
    runs = record.read(tmp_path, record.RUNS)
    assert sorted(run["kind"] for run in runs.values()) == [record.SANITIZER, "cupy-cuda13x"]


ENTRY = digests.specs(STEM)[0].entry


def with_entry(source: str) -> record.Sources:
    """Sources in which the text of an entry point is another one."""
    kernel = sources().kernels[STEM]
    changed = kernel | {"entries": kernel["entries"] | {ENTRY: source}}
    return sources()._replace(kernels={**sources().kernels, STEM: changed})


def test_equal_machine_code_is_proven(tmp_path: Path) -> None:
    assert evidence(tmp_path) == []
    changed, same = with_entry("0" * 64), dict.fromkeys(record.PINNED, "cubin")
    cubins.restamp(STEM, {ENTRY: same}, tmp_path, sources())  # of the sources that ran
    for made in ({}, {ENTRY: same | {record.PINNED[0]: "another"}}):
        cubins.restamp(STEM, made, tmp_path, changed)
        assert any(
            f"{ENTRY} has changed" in one for one in record.problems(STEM, tmp_path, changed)
        )
    with pytest.raises(ValueError, match=record.PINNED[1]):
        cubins.restamp(STEM, {ENTRY: {record.PINNED[0]: "cubin"}}, tmp_path, changed)
    cubins.restamp(STEM, {ENTRY: same}, tmp_path, changed)
    assert record.problems(STEM, tmp_path, changed) == []
    assert record.problems(STEM, tmp_path, sources())  # nor without the other text


def test_other_launches_are_not_proven(tmp_path: Path) -> None:
    assert evidence(tmp_path) == []
    kernel = sources().kernels[STEM]
    groups = kernel["launches"][ENTRY]
    first = next(iter(groups))
    for there, problem in (
        (groups | {first: "0"}, f"otherwise than it was: {first}"),
        (groups | {"another call": "0"}, "otherwise than it was: another call"),
        ({}, f"no call of tests/gpu/tools/launches.py launches {ENTRY}"),
    ):
        changed = kernel | {"launches": kernel["launches"] | {ENTRY: there}}
        now = sources()._replace(kernels={**sources().kernels, STEM: changed})
        assert any(problem in one for one in record.problems(STEM, tmp_path, now))


def test_a_call_that_another_kernel_was_proven_for(tmp_path: Path) -> None:
    """It needs no run of its own, unless it is launched otherwise than it was there."""
    assert evidence(tmp_path) == []
    other = "mla_decode"
    of_other = sources().kernels[other]
    entry = next(iter(of_other["entries"]))

    def with_call(stem: str, entry: str, launch: str) -> dict[str, Any]:
        kernel = sources().kernels[stem]
        groups = kernel["launches"][entry] | {"another call": launch}
        return kernel | {"launches": kernel["launches"] | {entry: groups}}

    known = {"launches": with_call(other, entry, "0")["launches"]}
    record.write(tmp_path, other, known)
    for launch in ("0", "1"):
        more = {STEM: with_call(STEM, ENTRY, "2"), other: with_call(other, entry, launch)}
        now = sources()._replace(kernels={**sources().kernels, **more})
        assert bool(record.problems(STEM, tmp_path, now)) is (launch == "1")


def test_more_calls_in_the_table(tmp_path: Path) -> None:
    """Their launches are taken from the sources that ran, if these launch the others as before."""
    assert evidence(tmp_path) == []
    kernel = sources().kernels[STEM]
    groups = kernel["launches"][ENTRY]
    more = {"launches": kernel["launches"] | {ENTRY: groups | {"another call": "0"}}}
    other = {"launches": kernel["launches"] | {ENTRY: dict.fromkeys(groups, "0") | {"more": "0"}}}
    now = sources()._replace(kernels={**sources().kernels, STEM: kernel | more})
    for then in (kernel | other, with_entry("0" * 64).kernels[STEM] | more):
        cubins.adopt(STEM, then, tmp_path)
        assert record.problems(STEM, tmp_path, sources()) == []
    cubins.adopt(STEM, kernel | more, tmp_path)
    assert record.problems(STEM, tmp_path, now) == []


def test_the_code_around_a_launch(tmp_path: Path) -> None:
    run = record.Run(tmp_path, "cupy-cuda13x", {}, of_kernels(STEM))
    *most, last = sources().of_runtime
    for name in most:
        run.add(name, PASSED)
    assert record.problems(record.RUNTIME, tmp_path, sources()) == [f"without {last}"]
    run.add(last, PASSED | {"failed": ["a"]})
    assert len(record.problems(record.RUNTIME, tmp_path, sources())) == 2
    run.add(last, PASSED)
    assert record.problems(record.RUNTIME, tmp_path, sources()) == []
    changed = sources()._replace(runtime="0" * 64)
    assert record.problems(record.RUNTIME, tmp_path, changed) == ["it has changed since"]


OTHERS = sorted(set(ENTRIES) - {spec.entry for spec in digests.specs(STEM)})
WRONG = CLEAN | {"errors": 2, "kinds": {"a report": 2}}
EDITED = {"shipped": OTHERS, "edited": {"every lane": [ENTRY]}}


def planted(blind: str) -> dict[str, Any]:
    return {"planted": {"bug": {"found": False, "blind": blind}}}


@pytest.mark.parametrize(
    ("parts", "tools", "problem"),
    [
        ({"test_plan.py": None}, {}, "it has no evidence"),
        ({"test_plan.py": PASSED | {"failed": ["a"]}}, {}, "1 tests failed, a for one"),
        ({"test_plan.py": PASSED | {"tests": 9, "failed": ["a"]}}, {}, "5 of 9 tests did not run"),
        ({}, {"memcheck": None}, f"without memcheck of {record.SANITIZER}"),
        ({}, {"memcheck": CLEAN | {"complete": False}}, "the verdict is incomplete"),
        ({}, {"memcheck": WRONG | {"kernels": {ENTRY: 2}}}, "2 errors"),
        ({}, {"memcheck": WRONG | {"kernels": {OTHERS[0]: 2}}}, ""),
        ({}, {"memcheck": WRONG | {"errors": 9, "kernels": {OTHERS[0]: 2}}}, "9 errors"),
        ({}, {"racecheck": CLEAN | {"warnings": 1}}, "1 warnings"),
        ({}, {"memcheck": CLEAN | EDITED}, "the kernel ran with an edit only: every lane"),
        ({}, {"racecheck": CLEAN | EDITED}, ""),
        ({}, {"racecheck": CLEAN | {"shipped": OTHERS}}, "the kernel did not run"),
        ({}, {"initcheck": CLEAN | planted("")}, "the planted bug was not found"),
        ({}, {"initcheck": CLEAN | planted("why")}, ""),
    ],
)
def test_evidence_out_of_order(
    parts: dict[str, Any], tools: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    found = evidence(tmp_path, parts, tools)
    assert any(problem in one for one in found) if problem else not found


def test_what_other_sources_proved_is_dropped(tmp_path: Path) -> None:
    found = evidence(tmp_path, of=with_entry("0" * 64))
    assert any("changed since" in one for one in found)
    assert evidence(tmp_path) == []
    assert len(record.read(tmp_path, STEM)["runs"]) == 2


def test_a_run_may_be_finished_by_another(tmp_path: Path) -> None:
    modules = sources().modules_of(STEM)
    first, second = (record.Run(tmp_path, kind, {}, of_kernels(STEM)) for kind in ("a", "a"))
    first.name, second.name = "a 1", "a 2"
    for name in modules - {"test_plan.py"}:
        first.add(name, PASSED)
    assert not record.read(tmp_path, STEM)
    second.add("test_plan.py", PASSED)
    assert set(record.read(tmp_path, STEM)["runs"]) == {"a 1", "a 2"}


# --- the writer ----------------------------------------------------------------------------------

TESTS = {
    "one/test_a.py": """
        import pytest
        KERNELS = ("schedule", "mla_decode")

        @pytest.mark.parametrize("n", [1, 2])
        def test_a(n, record_figures): record_figures({"row": n / 1000})

        class TestB:
            def test_b(self): ...
        """,
    "two/test_b.py": """
        import os, pytest
        KERNELS = ("mla_decode",)
        MAY_SKIP = ("needs two GPUs",)

        def test_c():
            if "INTERRUPT" in os.environ: raise KeyboardInterrupt
            assert "FAIL" not in os.environ
            if "KILL" in os.environ: os._exit(1)
            pytest.skip(os.environ.get("SKIP", "needs two GPUs"))

        def test_d(): ...
        """,
}


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[int, str, dict[str, dict[str, Any]]]]:
    """Run pytest on the tests above, with a GPU that is not there; return what it wrote."""
    gpu, out = tmp_path / "suite", tmp_path / "out"
    for name, text in TESTS.items():
        path = gpu / name
        path.parent.mkdir(parents=True)
        path.write_text(textwrap.dedent(text))
    (gpu / "conftest.py").write_text(
        textwrap.dedent(f"""
            import sys, types
            from pathlib import Path
            sys.modules["cupy"] = types.SimpleNamespace(get_default_memory_pool=
                lambda: types.SimpleNamespace(total_bytes=lambda: 0))
            from tests.gpu.tools import digests, record
            digests.launchers = lambda: ("schedule", "mla_decode")
            one = {{"": "0"}}
            digests.subject = lambda s: {{"entries": {{s: "0"}}, "launches": {{s: one}}}}
            digests.runtime_digest = lambda: "0"
            record.GPU = Path({str(gpu)!r})
            record.machine = lambda: {{"gpu": "fake", "cupy": "cupy-cuda13x 14.2.0"}}
            from tests.gpu import conftest
            from tests.gpu.conftest import *
            from tests.gpu.conftest import _give_memory_back
            conftest.no_hopper = lambda: ""
            conftest.HERE = record.GPU
            """)
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")

    def run(
        *options: str, evidence: bool = True, **environment: str
    ) -> tuple[int, str, dict[str, dict[str, Any]]]:
        command = [sys.executable, "-m", "pytest", *(options or ["suite"])]
        command += ["--write-evidence", "--evidence-dir", str(out)] if evidence else []
        outer = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        outer["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # half of the time
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=outer | {"PYTHONPATH": str(record.ROOT)} | environment,
            capture_output=True,
            text=True,
        )
        files = {path.stem: json.loads(path.read_text("utf-8")) for path in out.glob("*.json")}
        return done.returncode, done.stdout + done.stderr, files

    return run


def test_a_whole_run_is_written(run: Any) -> None:
    status, text, files = run()
    assert status == 0, text
    assert set(files) == {"schedule", "mla_decode", record.RUNS}
    (written,) = files[record.RUNS].values()
    assert (written["kind"], written["complete"]) == ("cupy-cuda13x", True)
    part = written["parts"]["test_b.py"]
    assert (part["tests"], part["passed"]) == (2, 1)
    assert part["skipped"] == {"needs two GPUs": ["test_c"]}
    assert written["parts"]["test_a.py"]["figures"] == {"test_a": {"row": [0.002, "2"]}}
    assert files["mla_decode"]["worst"] == {"row": [0.002, "test_a.py::test_a[2]"]}
    (parts,) = files["mla_decode"]["runs"].values()
    assert sorted(parts) == ["test_a.py", "test_b.py"]


@pytest.mark.parametrize(
    ("options", "environment", "left"),
    some(
        [
            (["suite", "-k", "1 or b"], {}, {"test_b.py"}),
            (["suite/one/test_a.py::test_a", "suite/two"], {}, {"test_b.py"}),
            (["suite", "--deselect", "suite/one/test_a.py::test_a[1]"], {}, {"test_b.py"}),
            (["suite/two"], {}, {"test_b.py"}),
            (["suite"], {"INTERRUPT": "1"}, {"test_a.py"}),
            (["suite"], {"KILL": "1"}, {"test_a.py"}),
            (["suite"], {"SKIP": "needs another JAX"}, {"test_a.py"}),
            (["suite", "--maxfail=1"], {"FAIL": "1"}, {"test_a.py", "test_b.py"}),
        ],
        2,
    ),
)
def test_a_partial_run_proves_what_ran_whole(
    options: list[str], environment: dict[str, str], left: set[str], run: Any
) -> None:
    _, text, files = run(*options, **environment)
    assert files, text
    (written,) = files[record.RUNS].values()
    assert set(written["parts"]) == left
    failed = "FAIL" in environment
    assert written["complete"] is failed  # no module is left out, but this kernel's tests are
    assert ("mla_decode" in files) is failed
    assert ("schedule" in files) is ("test_a.py" in left)
    assert ("1 tests failed" in text) is failed


def test_the_last_failures_alone_prove_nothing(run: Any) -> None:
    run(FAIL="1", evidence=False)
    _, text, files = run("suite", "--lf")
    assert "1 of 2 tests did not run" in text
    assert not files


def test_processes_that_ran_beside_each_other_are_merged(tmp_path: Path) -> None:
    """Runs that began in one second have one name."""
    names = sorted(sources().modules_of(STEM))
    folders = []
    for kind, parts in (
        ("cupy-cuda13x", dict.fromkeys(names[::2], PASSED)),
        ("cupy-cuda13x", dict.fromkeys(names[1::2], PASSED)),
        (record.SANITIZER, dict.fromkeys(record.TOOLS, CLEAN)),
    ):
        folders.append(tmp_path / str(len(folders)))
        run = record.Run(folders[-1], kind, {}, of_kernels(STEM))
        run.name = kind
        for name, part in parts.items():
            run.add(name, part)
    together = tmp_path / "together"
    record.merge(together, folders[:1], of_kernels(STEM))
    assert record.problems(STEM, together, sources())
    record.merge(together, folders[1:], of_kernels(STEM))
    assert record.problems(STEM, together, sources()) == []


def test_one_process_writes(run: Any) -> None:
    status, text, files = run("suite", "-p", "xdist", "-n", "2")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "pass -n 0" in text
    assert not files


def test_one_process_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, reason in (("1", ""), ("2", "one process tests a GPU")):
        monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", count)
        found = conftest.several_processes()
        assert reason in found and bool(found) is bool(reason)


# --- compute-sanitizer's logs --------------------------------------------------------------------


def printing(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\necho Compute Sanitizer\necho '{text}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("printed", "got"),
    [
        ("Version 2025.3.1.0 (build 1)", r"2025\.3\.1\.0"),
        ("Version 2026.3.9.0", r"2026\.3\.9\.0"),
        ("no version", "none"),
    ],
)
def test_tools_that_miss_orders_are_refused(tmp_path: Path, printed: str, got: str) -> None:
    with pytest.raises(SystemExit, match=rf"needs 2026\.4 or later, got {got} .*pip install"):
        sanitize.version_of(printing(tmp_path / "compute-sanitizer", printed))


def test_the_tool_is_there_and_new_enough(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="got none"):
        sanitize.version_of(str(tmp_path / "absent"))
    new = printing(tmp_path / "compute-sanitizer", "Version 2026.4.0.0 (build 1)")
    assert sanitize.version_of(new) == "2026.4.0.0"


def test_a_log_with_hazards() -> None:
    found = sanitize.read_log(RACE)
    assert (found["complete"], found["errors"], found["warnings"]) == (True, 2, 0)
    assert found["kernels"] == {"mla_decode_bfloat16": 4}
    assert list(found["kinds"].values()) == [2]
    assert found["seconds"] == 12.5
    assert found["shipped"] == ["mla_decode_bfloat16"]
    assert found["edited"] == {"every lane arrives": ["mla_decode_fp8_16"]}


def test_every_kernel_is_found_in_a_log() -> None:
    places = [f"{e}{end}" for e in ENTRIES for end in ("+0x1f0", "(cumla::Params)+0x1f0")]
    found = sanitize.read_log("".join(f"=========     at {place}\n" for place in places))
    assert found["kernels"] == dict.fromkeys(ENTRIES, 2)


@pytest.mark.parametrize("text", ["", "========= ERROR SUMMARY: 0 errors\n", f"{sanitize.DONE}\n"])
def test_a_log_that_breaks_off_proves_nothing(text: str) -> None:
    assert not sanitize.read_log(text)["complete"]


def test_parts_of_the_grid_clear_what_no_whole_run_clears(tmp_path: Path) -> None:
    """A kernel that they do not launch keeps what is known of it, and so does one that is clear."""
    folder, of = tmp_path / "evidence", of_kernels("mla_decode", STEM)
    run = record.Run(folder, "cupy-cuda13x", {}, of)
    for name in sources().modules:
        run.add(name, PASSED)
    entries = {stem: sorted(of.kernels[stem]["entries"]) for stem in of.kernels}
    logs = {
        "dense": CLEAN_LOG,
        "lists": f"sanitize: {entries[STEM][0]} launched 3 times\n"
        f"{sanitize.DONE}\n========= ERROR SUMMARY: 0 errors\n",
    }

    def summarise(*parts: str) -> bool:
        content = {"about": {"version": "1"}, "sources": of._asdict(), "grid": sorted(parts)}
        record.write(tmp_path, "about", content)
        for tool, only in sanitize.RUNS:
            path = tmp_path / sanitize.log_name(tool, only)
            path.unlink(missing_ok=True)
            if only in (*parts, *sanitize.PLANTS):
                path.write_text(RACE if only in sanitize.PLANTS else logs[only])
        return sanitize.summarise(tmp_path, folder)

    assert summarise("lists")
    assert record.problems(STEM, folder, sources()) == []
    assert any("without" in found for found in record.problems("mla_decode", folder, sources()))
    clean, wrong = logs["lists"], logs["lists"].replace("SUMMARY: 0", "SUMMARY: 1")
    for logs["lists"] in (wrong, clean):
        assert summarise("lists") is (logs["lists"] == clean)
        found = record.problems(STEM, folder, sources())
        assert any("1 errors" in problem for problem in found) is (logs["lists"] == wrong)


def test_the_verdicts_reach_the_evidence(tmp_path: Path) -> None:
    of = of_kernels("mla_decode", STEM)
    run = record.Run(tmp_path / "evidence", "cupy-cuda13x", {}, of)
    for name in sources().modules:
        run.add(name, PASSED)
    record.write(tmp_path, "about", {"about": {"version": "1"}, "sources": of._asdict()})
    report = "========= Uninitialized read\n=========     at mla_decode_bfloat16+0x1f0\n"
    found = report + CLEAN_LOG.replace("SUMMARY: 0", "SUMMARY: 1")
    for tool, only in sanitize.RUNS:
        text = RACE if tool == "racecheck" else found
        text = text if only in sanitize.PLANTS else CLEAN_LOG
        (tmp_path / sanitize.log_name(tool, only)).write_text(text)
    assert sanitize.summarise(tmp_path, tmp_path / "evidence")
    assert record.problems("mla_decode", tmp_path / "evidence", sources()) == []
    (tmp_path / sanitize.log_name("synccheck", "lists")).write_text(found)
    assert not sanitize.summarise(tmp_path, tmp_path / "evidence")
    wrong = record.problems("mla_decode", tmp_path / "evidence", sources())
    assert any("1 errors" in problem for problem in wrong)
    assert record.problems("schedule", tmp_path / "evidence", sources()) == []
    (tmp_path / sanitize.log_name("racecheck", "rows")).unlink()  # a run that was cut
    assert not sanitize.summarise(tmp_path, tmp_path / "evidence")
    wrong = record.problems("schedule", tmp_path / "evidence", sources())
    assert any("the verdict is incomplete" in problem for problem in wrong)


# --- what is missing -----------------------------------------------------------------------------


def test_what_kernels_without_evidence_need(tmp_path: Path) -> None:
    of = of_kernels("mla_decode", STEM)
    assert set(prove.missing(of, tmp_path)) == {"mla_decode", STEM, record.RUNTIME}
    assert evidence(tmp_path) == []
    assert set(prove.missing(of, tmp_path)) == {"mla_decode", record.RUNTIME}
    for stem in ("mla_decode", record.RUNTIME):
        paths = prove.modules_for([stem], of, tmp_path)
        needed = of.of_runtime if stem == record.RUNTIME else of.modules_of(stem)
        assert {path.name for path in paths} == set(needed) and all(p.exists() for p in paths)
