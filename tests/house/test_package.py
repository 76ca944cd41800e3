# SPDX-License-Identifier: Apache-2.0
"""The package as a whole: what importing it costs and gives, its files, lint and types."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cumla
import cumla.reference

ROOT = Path(__file__).resolve().parents[2]
FRAMEWORKS = {"cupy", "cupy_backends", "cuda", "torch", "jax", "jaxlib"}
FACES = [
    f"cumla.compat.{name}"
    for name in ("flash_mla", "flashinfer", "flash_attn", "vllm_flash_attn", "auto_deploy")
]


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python as users do, whose NumPy starts threads when it is imported."""
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment | variables, check=True, text=True, capture_output=True
    )


def import_times(*arguments: str, **variables: str) -> dict[str, int]:
    """The modules that a Python process imports -> microseconds with all that they import."""
    log = python("-X", "importtime", *arguments, **variables).stderr
    rows = re.findall(r"^import time:\s+\d+ \|\s+(\d+) \|\s+(\S+)$", log, re.MULTILINE)
    return {name: int(cumulative) for cumulative, name in rows}


@pytest.mark.parametrize(
    ("arguments", "numpy"),
    [
        (("-c", "import cumla"), False),
        (("-c", "from cumla import mla_decode"), True),
        (("-c", f"import cumla.reference, {', '.join(FACES)}"), True),
        (("-m", "cumla", "--help"), True),
        (("-m", "cumla", "demo", "--help"), True),
    ],
    ids=["import", "a name", "submodules", "--help", "demo --help"],
)
def test_import_brings_no_framework(arguments: tuple[str, ...], numpy: bool) -> None:
    packages = {name.partition(".")[0] for name in import_times(*arguments)}
    assert ("numpy" in packages) == numpy
    assert not packages & FRAMEWORKS


@pytest.mark.parametrize("name", ["jax", "torch"])
def test_a_binding_without_its_framework(name: str) -> None:
    code = f"""
import sys, cumla
sys.modules[{name!r}] = None
try:
    import cumla.{name}
except cumla.MissingDependencyError as error:
    print(error)
"""
    said = python("-c", code).stdout
    assert re.match(rf"{name}: .*; pip install {name}, or cumla\[{name}\]$", said)


def test_names_that_are_loaded_late() -> None:
    assert set(cumla.__all__) | {"reference"} <= set(dir(cumla))
    with pytest.raises(AttributeError, match="module 'cumla' has no attribute 'mla_encode'"):
        cumla.mla_encode  # noqa: B018
    program = """
import cumla
print(cumla.reference.__name__)  # the first one
before = {*vars(cumla)}
cumla.mla_decode
print("mla_decode" in {*vars(cumla)} - before)  # kept: looked up once
from cumla import *
print(len({*cumla.__all__} - {*dir()}))
"""
    assert python("-c", program).stdout.split() == ["cumla.reference", "True", "0"]


def test_import_costs_little_beside_numpy(tmp_path: Path) -> None:
    """A share of NumPy's own time, in the same process: a slow machine slows both.

    The first process compiles both to bytecode; without it cumla would be compiled each time, and
    an installed NumPy never.
    """
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    for _ in range(5):
        times = import_times("-c", "import numpy, cumla.mla.decode", **compiled)
        if times["cumla.mla.decode"] < times["numpy"]:
            return
    pytest.fail(f"cumla takes longer than NumPy, five times: {times['cumla.mla.decode']} us")


def test_public_names_are_those_of_the_table() -> None:
    """And of the errors; each is documented and lies where the table says."""
    errors = {name for name in vars(cumla.errors) if name.endswith("Error")}
    assert list(cumla.__all__) == sorted({*cumla._HOMES, *errors})
    for name in cumla.__all__:
        public = getattr(cumla, name)
        assert public.__doc__, name
        home = f"cumla.{cumla._HOMES.get(name, 'errors')}"
        assert getattr(sys.modules[home], name) is public


def test_no_module_hides_a_public_name() -> None:
    """Importing ``cumla.prepare``, were it a module, would put it in the function's place."""
    modules = {path.stem for path in (ROOT / "cumla").iterdir()}
    assert not modules & set(cumla.__all__)


def source_files() -> list[Path]:
    files = [ROOT / name for name in ("pyproject.toml", ".pre-commit-config.yaml", ".ci/run")]
    for folder in ("bench", "cumla", "tests"):
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


def lint(*command: str) -> None:
    pytest.importorskip(command[0])
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, check=False, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("check", [("check",), ("format", "--check")], ids="-".join)
def test_lint(check: tuple[str, ...]) -> None:
    lint("ruff", *check)


def test_types_also_of_the_public_names(tmp_path: Path) -> None:
    """One run for all and for a user: an error that is not there would be one, too."""
    user = tmp_path / "user.py"
    lines = [f"cumla.{name}" for name in [*cumla.__all__, "reference.mla_decode"]]
    wrong = "cumla.mla_decod  # type: ignore[attr-defined]"
    user.write_text("\n".join(["import cumla", *lines, wrong, ""]), encoding="utf-8")
    lint("mypy", "cumla", "bench", ".ci", str(user))
