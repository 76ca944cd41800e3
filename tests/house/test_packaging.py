# SPDX-License-Identifier: Apache-2.0
"""What users install: the wheel's contents, and extras that fit beside PyTorch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from email.message import Message
from email.parser import Parser
from itertools import product
from pathlib import Path

import pytest

import cumla

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def test_wheel_holds_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "cumla").rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".cubin")
    }
    assert {Path(name).suffix for name in wanted} >= {".py", ".cu", ".cuh", ".typed"}
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == wanted


def test_wheel_holds_no_records(wheel: zipfile.ZipFile) -> None:
    assert not [name for name in wheel.namelist() if name.endswith(".json")]


def test_wheel_has_licence_version_and_script(wheel: zipfile.ZipFile, metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Version"] == cumla.__version__
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel.namelist())
    (entry_points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    said = wheel.read(entry_points).decode()
    assert "cumla = cumla.cli:main" in said
    assert "[vllm.general_plugins]\ncumla = cumla.vllm:register" in said


def test_base_dependencies_are_two(metadata: Message) -> None:
    required = metadata.get_all("Requires-Dist") or []
    base = {entry.split(">")[0] for entry in required if "extra ==" not in entry}
    assert {name.replace("_", "-") for name in base} == {"ml-dtypes", "numpy"}
    assert set(metadata.get_all("Provides-Extra") or []) == set(EXTRAS)


def test_changelog_has_the_version() -> None:
    assert f"## [{cumla.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def resolve(*requirements: str) -> dict[str, str]:
    """Name -> version of what pip would install, from nothing; only metadata is fetched."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        + ["--report", "-", *requirements],
        check=False,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    packages = [item["metadata"] for item in json.loads(done.stdout)["install"]]
    return {package["name"].lower().replace("_", "-"): package["version"] for package in packages}


TORCHES = ("torch==2.10.0", "torch==2.11.0", "torch")
CUPYS = {"cu12": "cupy-cuda12x", "cu13": "cupy-cuda13x"}


@pytest.mark.parametrize(("extra", "cupy"), CUPYS.items())
def test_extra_brings_one_cupy_and_leaves_torch_alone(extra: str, cupy: str) -> None:
    names = re.findall(r"^[\w-]+", "\n".join(EXTRAS[extra]), re.MULTILINE)
    assert [name for name in names if name.startswith(("cupy", "torch"))] == [cupy]


@pytest.fixture(scope="module")
def resolved() -> Iterator[dict[tuple[str, str], Future[dict[str, str]]]]:
    """Every extra beside every torch, resolved at the same time: pip takes half a minute each."""
    base = PROJECT["project"]["dependencies"]
    pool = ThreadPoolExecutor(os.cpu_count())
    yield {
        (extra, torch): pool.submit(resolve, *base, *EXTRAS[extra], torch)
        for extra, torch in product(CUPYS, TORCHES)
    }
    pool.shutdown(cancel_futures=True)


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="CuPy's wheels and torch's CUDA are for Linux")
@pytest.mark.parametrize("torch", TORCHES)
@pytest.mark.parametrize(("extra", "cupy"), CUPYS.items())
def test_extra_resolves_beside_torch(
    extra: str,
    cupy: str,
    torch: str,
    resolved: dict[tuple[str, str], Future[dict[str, str]]],
) -> None:
    found = resolved[extra, torch].result()
    assert found["torch"].startswith(torch.partition("==")[2])
    assert [name for name in found if name.startswith("cupy")] == [cupy]
    nvrtc = found["nvidia-cuda-nvrtc-cu12" if extra == "cu12" else "nvidia-cuda-nvrtc"]
    assert nvrtc.split(".")[0] == extra.removeprefix("cu")
