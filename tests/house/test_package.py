# SPDX-License-Identifier: Apache-2.0
"""The package as a whole: what importing it costs and gives, its files, lint and types."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import cumla
import cumla.compat.flash_mla
import cumla.reference

ROOT = Path(__file__).resolve().parents[2]
FRAMEWORKS = {"cupy", "cupy_backends", "cuda", "torch", "jax", "jaxlib"}


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, check=True, text=True, capture_output=True
    )


def import_times(*arguments: str) -> dict[str, int]:
    """The modules that a Python process imports -> microseconds with all that they import."""
    log = python("-X", "importtime", *arguments).stderr
    rows = re.findall(r"^import time:\s+\d+ \|\s+(\d+) \|\s+(\S+)$", log, re.MULTILINE)
    return {name: int(cumulative) for cumulative, name in rows}


@pytest.mark.parametrize(
    ("arguments", "numpy"),
    [
        (("-c", "import cumla"), False),
        (("-c", "from cumla import mla_decode"), True),
        (("-c", "import cumla.reference, cumla.compat.flash_mla, cumla.compat.flashinfer"), True),
        (("-m", "cumla", "--help"), True),
        (("-m", "cumla", "demo", "--help"), True),
    ],
    ids=["import", "a name", "submodules", "--help", "demo --help"],
)
def test_import_brings_no_framework(arguments: tuple[str, ...], numpy: bool) -> None:
    packages = {name.partition(".")[0] for name in import_times(*arguments)}
    assert ("numpy" in packages) == numpy
    assert not packages & FRAMEWORKS


def test_names_that_are_loaded_late() -> None:
    assert set(cumla.__all__) | {"mla", "reference"} <= set(dir(cumla))
    assert cumla.mla_decode is cumla.mla_decode
    with pytest.raises(AttributeError, match="module 'cumla' has no attribute 'mla_encode'"):
        cumla.mla_encode  # noqa: B018
    alone = python("-c", "import cumla; print(cumla.mla.__name__, cumla.reference.__name__)")
    assert alone.stdout.split() == ["cumla.mla", "cumla.reference"]
    lines = python("-c", "from cumla import *; print(mla_decode.__module__, prepare.__module__)")
    assert lines.stdout.split() == ["cumla.mla", "cumla.preparation"]


def test_import_costs_little_beside_numpy() -> None:
    """A share of NumPy's own time, in the same process: a slow machine slows both."""
    shares = []
    for _ in range(5):
        times = import_times("-c", "import numpy, cumla.mla")
        shares.append(times["cumla.mla"] / times["numpy"])
    assert min(shares) < 1.0


def test_type_checkers_know_the_names(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    file = tmp_path / "user.py"
    for text, status in (
        ("import cumla\ncumla.mla_decode\ncumla.reference.mla_decode\n", 0),
        ("import cumla\ncumla.mla_decod\n", 1),
    ):
        file.write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "mypy", "--follow-imports=silent", str(file)]
        done = subprocess.run(command, cwd=ROOT, check=False, text=True, capture_output=True)
        assert done.returncode == status, done.stdout + done.stderr


def test_public_names() -> None:
    assert list(cumla.__all__) == sorted(cumla.__all__)
    assert set(cumla.__all__) == {
        "AttentionState",
        "CompilationError",
        "CumlaError",
        "MLAAttentionPlan",
        "MLAAttentionResult",
        "MLADecodePlan",
        "MLADecodeResult",
        "MissingDependencyError",
        "NotPreparedError",
        "PagedMQALogitsPlan",
        "QuantizedRows",
        "UnsupportedDeviceError",
        "append_indexer_cache",
        "append_mla_cache",
        "merge_attention_states",
        "mla_attention",
        "mla_decode",
        "mqa_logits",
        "paged_mqa_logits",
        "prepare",
        "quantize_fp8",
    }
    for name in cumla.__all__:
        assert getattr(cumla, name).__doc__, name
    assert callable(cumla.reference.mla_decode)


def source_files() -> list[Path]:
    files = [ROOT / name for name in ("pyproject.toml", ".pre-commit-config.yaml", ".ci/run")]
    for folder in ("cumla", "tests"):
        files += (p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".cu", ".cuh"))
    return files


def test_every_source_file_names_its_licence() -> None:
    assert {path.suffix for path in source_files()} >= {".py", ".cu", ".cuh", ".toml"}
    without = []
    for path in source_files():
        first, _, rest = path.read_text(encoding="utf-8").partition("\n")
        header = rest.partition("\n")[0] if first.startswith("#!") else first
        mark = "//" if path.suffix in (".cu", ".cuh") else "#"
        if header != f"{mark} SPDX-License-Identifier: Apache-2.0":
            without.append(str(path.relative_to(ROOT)))
    assert not without


@pytest.mark.parametrize(
    "tool",
    [("ruff", "check"), ("ruff", "format", "--check"), ("mypy",)],
    ids=lambda tool: " ".join(tool),
)
def test_lint_and_types(tool: tuple[str, ...]) -> None:
    pytest.importorskip(tool[0])
    done = subprocess.run(
        [sys.executable, "-m", *tool], cwd=ROOT, check=False, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
