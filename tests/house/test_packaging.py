# SPDX-License-Identifier: Apache-2.0
"""What users install: both wheels, the sdist, extras beside PyTorch. Files that a host shows."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from email.message import Message
from email.parser import Parser
from importlib.util import module_from_spec, spec_from_file_location
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

import cumla
from cumla.launch import all_specs
from cumla.launch.source import cubin_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
_SPEC = spec_from_file_location("cubins_wheel", ROOT / ".ci" / "cubins_wheel.py")
assert _SPEC is not None and _SPEC.loader is not None
cubins_wheel = module_from_spec(_SPEC)
_SPEC.loader.exec_module(cubins_wheel)


def build(target: str, project: Path, folder: Path) -> Path:
    """Build a wheel or an sdist into a new folder."""
    pytest.importorskip("hatchling")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)],
        cwd=project,
        check=True,
        capture_output=True,
    )
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build("wheel", ROOT, tmp_path_factory.mktemp("wheel")))


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


def test_sdist_builds_the_same_wheel(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """Byte for byte; the sdist has what its tests and documents need."""
    with tarfile.open(build("sdist", ROOT, tmp_path / "sdist")) as sdist:
        sdist.extractall(tmp_path, filter="data")
    source = tmp_path / f"cumla-{cumla.__version__}"
    again = build("wheel", source, tmp_path / "again")
    assert wheel.filename is not None
    assert again.name == f"cumla-{cumla.__version__}-py3-none-any.whl"
    assert again.read_bytes() == Path(wheel.filename).read_bytes()
    tracked = {path.name for path in ROOT.iterdir() if path.suffix in (".md", ".cff", ".yml")}
    assert tracked | {"LICENSE", "tests", "docs", ".ci"} <= {p.name for p in source.iterdir()}


def test_versions_agree() -> None:
    version = cumla.__version__
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {version}\n" in citation
    assert f"\nlicense: {PROJECT['project']['license']}\n" in citation


def test_wheel_of_cubins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any machine and this version alone; each cubin is as it was read."""
    pytest.importorskip("hatchling")
    specs = all_specs()[:3]
    monkeypatch.setattr(cubins_wheel, "all_specs", lambda: specs)
    names = [cubin_name(spec) for spec in specs]
    for name in names:
        (tmp_path / name).write_text(name)
    path = cubins_wheel.build(cubins_wheel.read(tmp_path), "12.9", tmp_path / "dist")
    assert path.name == f"cumla_cubins-{cumla.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(path) as wheel:
        held = {name for name in wheel.namelist() if name.endswith(".cubin")}
        assert held == {f"cumla_cubins/{name}" for name in names}
        assert all(wheel.read(name).decode() == Path(name).name for name in held)
        said = wheel.read(f"cumla_cubins-{cumla.__version__}.dist-info/METADATA").decode()
        assert f"Requires-Dist: cumla=={cumla.__version__}\n" in said
        assert any(name.endswith("/licenses/LICENSE") for name in wheel.namelist())
    (tmp_path / names[0]).unlink()
    with pytest.raises(FileNotFoundError, match=f"got none of 1, such as {names[0]}"):
        cubins_wheel.read(tmp_path)


def test_wheel_of_cubins_knows_its_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    name = cubin_name(all_specs()[0])
    compiled = SimpleNamespace(cubin=b"image")
    monkeypatch.setattr(cubins_wheel, "compile_to_cubin", lambda spec: compiled)
    monkeypatch.setattr(cubins_wheel, "bindings_nvrtc_version", lambda: (12, 9))
    assert cubins_wheel.nvrtc_of({name: b"image"}) == "12.9"
    with pytest.raises(ValueError, match=r"needs the machine code of NVRTC 12\.9"):
        cubins_wheel.nvrtc_of({name: b"image of another"})


GITHUB = sorted((ROOT / ".github").rglob("*.yml"))


@pytest.mark.parametrize("file", GITHUB, ids=lambda file: file.stem)
def test_files_of_github_are_read(file: Path) -> None:
    """Commands of CI run what exists; each field of a form has a label."""
    yaml = pytest.importorskip("yaml")
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    for job in content.get("jobs", {}).values():
        commands = [step["run"] for step in job["steps"] if "run" in step]
        assert commands
        for command in commands:
            match command.split():
                case "bash", path, *_:
                    assert (ROOT / path).is_file(), command
                case "python", "-m", module, *_:
                    assert importlib.util.find_spec(module), command
    for item in content.get("body", ()):
        assert item["attributes"]["label"]


def test_a_bug_report_asks_for_the_versions() -> None:
    text = (ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text(encoding="utf-8")
    assert "python -m cumla info" in text


@pytest.mark.parametrize("name", ["CONTRIBUTING", "SECURITY"])
def test_links_of_a_page_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / f"{name}.md").read_text(encoding="utf-8"))
    assert not [link for link in links if not (ROOT / link).exists()]


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
