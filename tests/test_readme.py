# SPDX-License-Identifier: Apache-2.0
"""The README says what is so: its commands, examples, messages, table of variables and links."""

from __future__ import annotations

import ast
import doctest
import json
import re
from pathlib import Path
from typing import Any

import pytest

import cumla
from cumla.bench.report import to_markdown

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def section(title: str) -> str:
    """The text under a heading of level 2 or 3, up to the next one."""
    _, _, rest = README.partition(f"## {title}\n")
    return re.split(r"^##+ ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def run_example(title: str) -> dict[str, Any]:
    """What an example leaves behind; NumPy stands for CuPy, which knows no arrays but the GPU's."""
    (code,) = blocks("python", section(title))
    names: dict[str, Any] = {}
    code = code.replace("import cupy\n", "import numpy as cupy\n")
    exec(compile(code, f"README.md: {title}", "exec"), names)
    return names


def test_the_performance_tables_are_those_of_the_recorded_run() -> None:
    recorded = json.loads((ROOT / "cumla/bench/results/h200.json").read_text(encoding="utf-8"))
    assert to_markdown(recorded).strip() in section("Performance")


def test_the_peers_are_those_of_the_run_in_turns() -> None:
    name = "cumla/bench/results/h200-peers.json"
    recorded = json.loads((ROOT / name).read_text(encoding="utf-8"))
    tables = to_markdown(recorded).split("\n\n")
    (peers,) = (table for table in tables if table.startswith("| peers of this run: "))
    _, _, rest = section("Performance").partition(f"]({name})):\n\n")
    assert rest.startswith(peers.replace("peers of this run", "in turns with an earlier version"))


def test_there_are_two_commands_each_one_line() -> None:
    demo, tests = blocks("bash")
    assert demo.count("\n") == tests.count("\n") == 1
    assert demo.endswith("cumla demo\n")
    assert tests.endswith("pytest\n")


@pytest.mark.parametrize(
    ("title", "framework"),
    [
        ("PyTorch", "torch"),
        ("CuPy", "numpy"),
        ("JAX", "jax"),
        ("Partial results", "torch"),
        ("FlashMLA", "torch"),
    ],
)
def test_example_runs(title: str, framework: str) -> None:
    pytest.importorskip(framework)
    names = run_example(title)
    out, lse = names["out"], names["lse"]
    assert type(out).__module__.partition(".")[0].removesuffix("lib") == framework
    assert out.shape == (4, 1, 16, 512)
    assert [bool(row == float("inf")) for row in lse[:, 0, 0]] == [False, False, False, True]


def test_the_example_of_queries_of_different_lengths() -> None:
    torch = pytest.importorskip("torch")
    names = run_example("Queries of different lengths")
    out, lse = names["out"], names["lse"]
    assert (out.shape, lse.shape) == ((105, 16, 512), (105, 16))
    assert bool(out.isfinite().all())
    assert bool(lse.isfinite().all())
    arguments = {name: names[name] for name in ("qo_indptr", "kv_lens", "block_table")}
    expected = cumla.mla_attention(names["q"], names["kv_cache"], **arguments)
    assert torch.equal(out, expected.out)


def test_the_example_that_writes_a_cache() -> None:
    pytest.importorskip("torch")
    names = run_example("Writing the cache")
    rows = names["kv_cache"].view(-1, 576)
    assert rows.any(dim=1).nonzero().ravel().tolist() == [7, 64, 65, 130]


def test_the_example_of_fp8_caches() -> None:
    torch = pytest.importorskip("torch")
    names = run_example("FP8 caches")
    whole = torch.zeros(4, 64, 576, dtype=torch.bfloat16)
    cumla.append_mla_cache(names["rows"], whole, names["slot_mapping"])
    places = names["block_table"], names["cache_seqlens"]
    exact = cumla.mla_decode(names["q"], whole, *places).out.float()
    packed = cumla.mla_decode(names["q"], names["packed"], *places).out.float()
    for out in (names["out"].float(), packed):
        assert 0 < float((out - exact).norm() / exact.norm()) < 0.1


@pytest.mark.parametrize(
    ("title", "seen"),
    [("The indexer of sparse attention", [128, 70]), ("The indexer in a prefill", range(1, 97))],
)
def test_the_examples_of_the_indexer(title: str, seen: Any) -> None:
    torch = pytest.importorskip("torch")
    names = run_example(title)
    logits, columns = names["logits"], names["logits"].shape[1]
    assert logits.shape == (len(seen), columns)
    assert columns == max(seen)
    visible = torch.arange(columns)[None, :] < torch.tensor(list(seen))[:, None]
    assert torch.equal(logits.isneginf(), ~visible)
    values = logits[visible]  # of positive weights
    assert bool(values.isfinite().all())
    assert bool((values >= 0).all())
    assert float(values.max()) > 0
    assert torch.equal(names.get("again", logits), logits)


def test_messages_are_the_real_ones() -> None:
    pytest.importorskip("torch")
    names = run_example("PyTorch")
    (session,) = blocks("pycon", section("When something is wrong"))
    test = doctest.DocTestParser().get_doctest(session, names, "README.md", "README.md", 0)
    assert len(test.examples) == 2
    assert doctest.DocTestRunner().run(test).failed == 0


def variables_in_the_code() -> set[str]:
    """The environment variables of the package: string constants that are nothing else."""
    found = set()
    for path in (ROOT / "cumla").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.update(re.findall(r"\ACUMLA_[A-Z0-9_]+\Z", node.value))
    return found


def test_environment_table_is_complete_and_short() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", section("Environment variables"), re.MULTILINE)
    assert set(rows) == variables_in_the_code()
    assert len(rows) == len(set(rows)) <= 6


def test_errors_that_the_text_names_exist() -> None:
    named = re.findall(r"`(?:cumla\.)?(\w+Error)`", section("When something is wrong"))
    assert len(named) == 5
    assert all(issubclass(getattr(cumla, name), cumla.CumlaError) for name in named)


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#:]+)\)", README))
def test_link_leads_somewhere(link: str) -> None:
    assert (ROOT / link).exists()
