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

ROOT = Path(__file__).resolve().parents[1]
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
    "arguments",
    [
        ("-c", "import cumla, cumla.reference, cumla.compat.flash_mla"),
        ("-m", "cumla", "--help"),
        ("-m", "cumla", "demo", "--help"),
    ],
    ids=["import", "--help", "demo --help"],
)
def test_import_brings_no_framework(arguments: tuple[str, ...]) -> None:
    packages = {name.partition(".")[0] for name in import_times(*arguments)}
    assert "numpy" in packages
    assert not packages & FRAMEWORKS


def test_import_costs_little_beside_numpy() -> None:
    """A share of NumPy's own time, in the same process: a slow machine slows both."""
    shares = []
    for _ in range(3):
        times = import_times("-c", "import numpy, cumla")
        shares.append(times["cumla"] / times["numpy"])
    assert min(shares) < 1.0


def test_public_names() -> None:
    assert list(cumla.__all__) == sorted(cumla.__all__)
    assert set(cumla.__all__) == {
        "CompilationError",
        "CumlaError",
        "MLADecodePlan",
        "MLADecodeResult",
        "MissingDependencyError",
        "NotPreparedError",
        "UnsupportedDeviceError",
        "mla_decode",
        "prepare",
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
