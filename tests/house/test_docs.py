# SPDX-License-Identifier: Apache-2.0
"""The documents say what is so: their code runs, their figures are recorded ones."""

from __future__ import annotations

import doctest
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import cumla
from bench import page as performance
from cumla.launch import all_specs

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if DOCS / "history" not in path.parents)
WITH_CODE = [page for page in PAGES if "\n```python\n" in page.read_text("utf-8")]
FRAMEWORKS = {"jax": ("jax",), "first-call": ("torch", "jax", "cupy")}  # others: PyTorch
SOURCES = [path for path in (ROOT / "cumla").rglob("*.py") if ">>> " in path.read_text("utf-8")]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TESTED_ELSEWHERE = ("context_parallel_jax",)
RECORD = ROOT / "records/performance.json"


def load(name: str) -> ModuleType:
    """Import one of docs/scripts."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"scripts/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def made_pages() -> set[Path]:
    return {DOCS / path for path in load("pages").generated()}


def blocks(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.filterwarnings("error:FlashInfer deprecates:DeprecationWarning")
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_code_of_a_page_runs(page: Path) -> None:
    """The blocks of a page are one program, from the top to the end."""
    for framework in FRAMEWORKS.get(page.stem, ("torch",)):
        pytest.importorskip(framework)
    names: dict[str, Any] = {}
    for number, code in enumerate(blocks(page), 1):
        exec(compile(code, f"{page.name}: block {number}", "exec"), names)


def test_the_check_mode_finds_what_its_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    test_code_of_a_page_runs(DOCS / "guide/errors-checking.md")
    assert re.match(r"block_table\b.*\b7\b", capsys.readouterr().out)
    assert "CUMLA_CHECK" not in os.environ


@pytest.mark.parametrize(
    "example",
    [
        # tests/distributed/test_jax.py makes the same calls
        pytest.param(path, marks=pytest.mark.exhaustive if path.stem in TESTED_ELSEWHERE else ())
        for path in EXAMPLES
    ],
    ids=lambda example: example.stem,
)
def test_example_runs(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax" if "jax" in example.stem else "torch")
    monkeypatch.setattr("sys.argv", [str(example)])  # the arguments of a command of its own,
    monkeypatch.syspath_prepend(example.parent)  # and its path
    runpy.run_path(str(example), run_name="__main__")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_examples_of_docstrings_run(path: Path) -> None:
    """As in help(): an example imports what it uses."""
    if path.parent.name == "cli":
        pytest.skip("nothing public")
    for framework in re.findall(r">>> import.*\b(jax|torch)\b", path.read_text("utf-8")):
        pytest.importorskip(framework)
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    module = importlib.import_module(name)
    for test in doctest.DocTestFinder().find(module, extraglobs={}):
        test.globs = {}
        assert doctest.DocTestRunner().run(test).failed == 0, test.name


def test_public_functions_and_plans_have_examples() -> None:
    for name in cumla.__all__:
        if not name.endswith(("Error", "State", "Rows", "Result")):
            assert ">>> " in getattr(cumla, name).__doc__, name


def test_pages_of_the_api_hold_every_public_name() -> None:
    pages = load("pages")
    made = "\n".join(pages.api_pages().values())
    shown = set(re.findall(r"^::: (\S+)$", made, re.MULTILINE))
    assert {f"cumla.{name}" for name in cumla.__all__} <= shown
    for group in pages.GROUPS:
        assert (DOCS / group.guide).is_file()
        module = importlib.import_module(group.module)
        for name in group.names:
            assert hasattr(module, name) or importlib.util.find_spec(f"{group.module}.{name}")


def test_a_public_name_without_a_page_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = load("pages")
    monkeypatch.setattr(pages, "public_names", lambda: ["mla_decode", "mla_encode"])
    with pytest.raises(ValueError, match=r"GROUPS lacks cumla\.mla_encode"):
        pages.api_pages()


def test_the_models_of_the_support_page_are_served() -> None:
    support = load("support")
    table = "\n".join(support.models())
    for entry in support.MODELS:
        assert f"| {entry.name} |" in table
    assert "| gpt-oss 20B, 120B | 64/8 of 64 | GQA, window 128, sinks |" in table
    assert {row.split("|")[-2].strip() for row in support.models()[2:]} == {"yes"}
    assert "| 16 | MLA |" in table
    assert "`mla_decode_swapped`" in table
    packed, *of_v4 = support.sparse_models()[2:]
    assert packed.endswith("| `mla_sparse_packed` | yes |")
    assert len(of_v4) == 2
    assert all(row.endswith("| `mla_sparse_v4` | yes |") for row in of_v4)


def test_every_page_is_in_the_navigation() -> None:
    """But for the history, and with those that are made."""
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r" (\S+\.md)(?:  #.*)?$", config, re.MULTILINE))
    written = {path.relative_to(DOCS).as_posix() for path in PAGES}
    assert listed == written | {"support/index.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    """To a file, or to a page that is made."""
    made = made_pages()
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    targets = [Path(os.path.normpath(page.parent / link)) for link in links]
    assert not [target for target in targets if not target.exists() and target not in made]


def test_the_performance_page_is_about_todays_kernels() -> None:
    made = performance.fill((DOCS / "performance.md").read_text("utf-8"), performance.read(RECORD))
    assert "{{" not in made


def test_the_summary_of_models_in_vllm_is_of_its_tables() -> None:
    """The fastest turns of the other backends by those of cumla, least and most of the cells."""
    text = (DOCS / "integrations/vllm-models.md").read_text("utf-8")
    rows = re.findall(r"^\| (\S.*?); cumla / (.*?), fastest \| (.*) \|$", text, re.MULTILINE)
    made: dict[str, str] = {}
    for label, names, times in rows:
        cells = [cell.split(" / ") for cell in times.split(" | ") if cell.strip() != "-"]
        ratios = {
            name: [float(cell[i]) / float(cell[0]) for cell in cells]
            for i, name in enumerate(names.split(" / "), 1)
        }
        each = [f"{name} {min(found):.2f} to {max(found):.2f}" for name, found in ratios.items()]
        made[label] = ", ".join(each)
    summary = re.findall(r"^\| [^|]+ \| ([^|]+) \| ([^|]+ to [^|]+) \|$", text, re.MULTILINE)
    assert len(summary) >= 9
    assert summary == [(label, made[label]) for label, _ in summary]


def test_the_readme_has_rows_of_the_record() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    assert performance.with_readme_parts(readme, performance.read(RECORD)) == readme


def test_the_readme_has_models_of_the_support_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    support = load("support")
    assert support.with_models(readme) == readme
    assert set(support.models(readme=True)) < set(support.models())


def test_the_figure_is_of_the_record() -> None:
    title = performance.overview_title(performance.read(RECORD))
    assert title in (DOCS / "figures/peers.svg").read_text("utf-8")


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Whatever its theme is: that of the published site takes long to install.."""
    for name in ("mkdocs", "mkdocstrings_handlers"):
        pytest.importorskip(name)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--theme", "mkdocs"]
    command += ["--site-dir", str(tmp_path)]
    env = os.environ | {"MKDOCS_WHOLE": "false"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in cumla.__all__:
        page = tmp_path / "api" / name / "index.html"
        assert f'id="cumla.{name}"' in page.read_text("utf-8")
    for script in EXAMPLES:
        assert (tmp_path / "examples" / script.stem / "index.html").is_file()


def test_parameters_of_a_group_have_types_and_defaults_of_their_own() -> None:
    pytest.importorskip("griffe")
    text = "\n".join(
        (
            *("Do.", "", "Parameters", "----------"),
            *("a, b : int, optional", "    Both.", "", "    More.", "c", "    One.", ""),
            *("Raises", "------", "TypeError, ValueError", "    Why."),
        )
    )
    both = ["    Both.", "", "    More."]
    split = load("docstrings").split_groups(text).split("\n")
    assert split[4:12] == ["a : int, optional", *both, "b : int, optional", *both]
    assert split[12:] == text.split("\n")[8:]


def test_every_kernel_is_explained() -> None:
    pages = "\n".join(page.read_text("utf-8") for page in (DOCS / "kernels").glob("*.md"))
    kernels = {path.stem for path in (ROOT / "cumla/cuda").rglob("*.cu")}
    assert kernels
    assert not kernels - set(re.findall(r"\w+", pages))


def test_the_code_is_where_the_overview_of_kernels_says() -> None:
    """Names of the last column are in files of the one before, or in their folder."""
    text = (DOCS / "kernels/index.md").read_text("utf-8")
    section = text.partition("## Where to look")[2].partition("\n## ")[0]
    rows = [row.split("|")[2:4] for row in re.findall(r"^\| (?!-).*", section, re.MULTILINE)[1:]]
    for where, what in rows:
        paths = [ROOT / "cumla" / name for name in re.findall(r"`([\w/.]+/[\w/.]+)`", where)]
        assert all(path.exists() for path in paths), where
        files = [f for path in paths for f in ([path] if path.is_file() else path.glob("*"))]
        found = "".join(file.read_text("utf-8") for file in files)
        for name in re.findall(r"`(\w[\w.]*)`", what) if files else ():
            assert all(part in found for part in name.split(".")), (where, name)


def test_pages_of_kernels_show_how_their_files_open() -> None:
    pages = load("pages")
    texts = [page.read_text("utf-8") for page in (DOCS / "kernels").glob("*.md")]
    made = [pages.on_page_markdown(text) for text in texts]
    assert not [text for text in made if "{{" in text]
    (text,) = [text for text in made if text.startswith("# MLA: mla_decode")]
    assert text.count("who arrives (count)") == text.count("\n## mla_decode")


@pytest.mark.parametrize("name", ["masks", "prefixes"])
def test_tables_of_records_have_their_times(name: str) -> None:
    """A row for each of the record's, a dash where it lacks a time, and its target."""
    rows = json.loads((ROOT / f"records/{name}.json").read_text("utf-8"))["rows"]
    first, _, *lines = load("pages").table_of_record(name).splitlines()
    *columns, last = (column.strip(" |") for column in first.split(" | ")[1:])
    assert last == "target"
    assert {name for row in rows for name in row["us"]} == set(columns)
    for row, line in zip(rows, lines, strict=True):
        assert row["name"] in line
        assert line.endswith(f"| {row['target']} |")
        assert line.count(" - ") == len(columns) - len(row["us"])
        assert all(f" {us:,.1f} " in line for us in row["us"].values())


def test_tables_of_kernels_have_their_shared_memory() -> None:
    """A row names entry points, with * for a dtype, and the bytes of each."""
    rows = [
        line
        for page in (DOCS / "kernels").glob("*.md")
        for line in re.findall(r"^\| `\w+_\*_.*", page.read_text("utf-8"), re.MULTILINE)
    ]
    assert len(rows) > 10
    for row in rows:
        name = re.escape(re.findall(r"`(\S+)`", row)[0]).replace(r"\*", "b?float16")
        entry = re.compile(f"{name}(_rows)?(_8|_16)?")
        bytes_of = {spec.smem_bytes for spec in all_specs() if entry.fullmatch(spec.entry)}
        told = {int(found.replace(",", "")) for found in re.findall(r"([\d,]+) B\b", row)}
        assert told == bytes_of, row


def test_every_function_is_used_in_code_that_runs() -> None:
    """Errors and results are not called."""
    code = "\n".join(block for page in WITH_CODE for block in blocks(page))
    called = [
        name for name in cumla.__all__ if not name.endswith(("Error", "State", "Rows", "Result"))
    ]
    assert not set(called) - set(re.findall(r"cumla\.(\w+)", code))


def test_the_description_on_an_index_has_no_link_that_leads_nowhere() -> None:
    pytest.importorskip("hatchling")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    description = load("description").description
    assert "](" not in description(readme, None)
    linked = description(readme, "https://host/cumla/")
    links = re.findall(r"\]\(([^)]+)\)", linked)
    assert len(links) == len(re.findall(r"\]\(([^)]+)\)", readme))
    for link in links:
        path = re.sub(r"^https://host/cumla/(blob|raw)/main/", "", link)
        assert path != link
        assert (ROOT / path.partition("#")[0]).exists()


def test_the_urls_of_the_project_are_those_of_the_site() -> None:
    pytest.importorskip("hatchling")
    urls = load("description").project_urls
    assert not urls({})
    found = urls({"REPO_URL": "https://host/cumla/", "SITE_URL": "https://site/"})
    assert found.pop("Documentation") == "https://site/"
    assert found["Repository"] == "https://host/cumla"
    assert all(url.startswith("https://host/cumla") for url in found.values())
    assert (ROOT / found["Changelog"].partition("/main/")[2]).exists()
