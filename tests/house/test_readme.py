# SPDX-License-Identifier: Apache-2.0
"""The README says what is so: its commands, examples, messages, links; the table of variables."""

from __future__ import annotations

import ast
import doctest
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import cumla

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
VARIABLES = (ROOT / "docs/guide/environment.md").read_text(encoding="utf-8")


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def section(title: str) -> str:
    """The text under a heading of level 2 or 3, up to the next one."""
    _, _, rest = README.partition(f"## {title}\n")
    return re.split(r"^##+ ", rest, maxsplit=1, flags=re.MULTILINE)[0]


@cache
def run(code: str) -> dict[str, Any]:
    """Return what a block leaves behind."""
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    return names


def run_example(title: str) -> dict[str, Any]:
    return run(blocks("python", section(title))[0])


def test_there_are_two_commands_each_one_line() -> None:
    demo, tests = blocks("bash")
    assert demo.count("\n") == tests.count("\n") == 1
    assert demo.endswith("cumla demo\n")
    assert "-m pytest" in tests


@pytest.mark.parametrize("code", blocks("python"), ids=range(len(blocks("python"))))
def test_code_runs(code: str) -> None:
    pytest.importorskip("torch")
    run(code)


def test_sections_of_a_newcomer_come_first() -> None:
    titles = re.findall(r"^## (.*)$", README, re.MULTILINE)
    assert titles[:5] == [
        *("Example", "Install and verify", "Functions", "A plan in a CUDA graph", "Integrations"),
    ]
    assert {"Support", "Performance", "Errors"} <= set(titles)


def test_the_example() -> None:
    torch = pytest.importorskip("torch")
    names = run_example("Example")
    out, lse = names["out"], names["lse"]
    assert out.shape == (4, 1, 16, 512)
    assert isinstance(out, torch.Tensor)
    assert lse[:, 0, 0].isneginf().tolist() == [False, False, False, True]
    assert not out[3].any()


def test_the_example_of_a_plan() -> None:
    torch = pytest.importorskip("torch")
    names = run_example("A plan in a CUDA graph")
    places = names["block_table"], names["kv_lens"]
    for q, kv, state in zip(names["queries"], names["caches"], names["states"], strict=True):
        assert torch.equal(state.out, cumla.mla_decode(q, kv, *places, softmax_scale=192**-0.5).out)


def test_messages_are_the_real_ones() -> None:
    pytest.importorskip("torch")
    names = run_example("Example")
    (session,) = blocks("pycon", section("Errors"))
    test = doctest.DocTestParser().get_doctest(session, names, "README.md", "README.md", 0)
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0


def variables_in_the_code() -> set[str]:
    """The environment variables of the package: string constants that are nothing else."""
    found = set()
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "cumla").rglob("*.py")]
    for text in texts:
        if not re.search("CUMLA_[A-Z0-9_]", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.update(re.findall(r"\ACUMLA_[A-Z0-9_]+\Z", node.value))
    return found


def test_environment_table_is_complete() -> None:
    rows = re.findall(r"^\| `(CUMLA_\w+)` \|", VARIABLES, re.MULTILINE)
    assert set(rows) == variables_in_the_code()
    assert len(rows) == len(set(rows))


def test_errors_that_the_text_names_exist() -> None:
    named = re.findall(r"`(?:cumla\.)?(\w+Error)`", section("Errors"))
    assert named
    assert all(issubclass(getattr(cumla, name), cumla.CumlaError) for name in named)


def test_functions_that_the_table_names_exist() -> None:
    named = re.findall(r"`cumla\.(\w+)`", section("Functions"))
    no_function = ("Error", "State", "Rows", "Result")
    functions = [name for name in cumla.__all__ if not name.endswith(no_function)]
    assert sorted({*named} - {"distributed"}) == sorted(functions)


@pytest.mark.parametrize("link", re.findall(r"\]\(([^):]+)\)", README))
def test_link_leads_somewhere(link: str) -> None:
    path, _, anchor = link.partition("#")
    assert (ROOT / path).exists()
    if anchor:
        titles = re.findall(r"^#+ (.*)$", (ROOT / path).read_text("utf-8"), re.MULTILINE)
        assert anchor in {
            re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles
        }
