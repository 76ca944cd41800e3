# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel cumla-cubins: every kernel of cumla as machine code for sm_90a.

    python .ci/cubins_wheel.py [--output DIR] [--cubins DIR] [--jobs N]

The wheel holds the cubins of one NVRTC and no code for the CPU. It requires the version of cumla
that it was built from. Each file is named by the digest of the text and options that it was
compiled from, so a changed kernel is never loaded from it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import cumla
from cumla.launch import all_specs
from cumla.launch.module import bindings_nvrtc_version, compile_to_cubin
from cumla.launch.source import cubin_name

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "cumla_cubins"
_PROJECT = """\
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "cumla-cubins"
version = "{version}"
description = "The kernels of cumla {version} as machine code for NVIDIA Hopper GPUs (sm_90a)"
readme = "README.md"
requires-python = ">=3.11"
license = "Apache-2.0"
license-files = ["LICENSE"]
authors = [{{ name = "The cumla authors" }}]
classifiers = [
    "Development Status :: 3 - Alpha",
    "Environment :: GPU :: NVIDIA CUDA",
    "Operating System :: POSIX :: Linux",
]
dependencies = ["cumla=={version}"]

[tool.hatch.build]
ignore-vcs = true

[tool.hatch.build.targets.wheel]
packages = ["{package}"]
"""
_README = """\
# cumla-cubins

{count} kernels of cumla {version}, compiled for sm_90a by NVRTC {nvrtc}. cumla finds them without a
variable. Without this package it compiles each kernel when it is first used.
"""
_INIT = '''\
# SPDX-License-Identifier: Apache-2.0
"""The kernels of cumla {version} for sm_90a; cumla looks here before it compiles."""

__version__ = "{version}"
NVRTC = "{nvrtc}"
'''


def nvrtc_of(cubins: dict[str, bytes]) -> str:
    """Return the version of this environment's NVRTC; raise `ValueError` if another one ran.

    One kernel is compiled again and compared.
    """
    spec = all_specs()[0]
    version = "{}.{}".format(*bindings_nvrtc_version())
    if compile_to_cubin(spec).cubin != cubins[cubin_name(spec)]:
        raise ValueError(
            f"--cubins: needs the machine code of NVRTC {version}, which is installed here, got "
            f"other code for {spec.entry}; leave out --cubins"
        )
    return version


def read(folder: Path) -> dict[str, bytes]:
    """Read the cubins of all kernels as the sources are now, by file name.

    Raise `FileNotFoundError` if one is not there.
    """
    names = [cubin_name(spec) for spec in all_specs()]
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise FileNotFoundError(
            f"--cubins {folder}: needs the {len(names)} kernels of these sources, got none of "
            f"{len(absent)}, such as {absent[0]}; write it with `python -m cumla compile --output`"
        )
    return {name: (folder / name).read_bytes() for name in names}


def build(cubins: dict[str, bytes], nvrtc: str, output: Path) -> Path:
    """Build the wheel from cubins, by file name; return its path."""
    facts = {
        "version": cumla.__version__,
        "package": PACKAGE,
        "count": len(cubins),
        "nvrtc": nvrtc,
    }
    output = output.resolve()
    with tempfile.TemporaryDirectory() as temporary:
        project = Path(temporary)
        package = project / PACKAGE
        package.mkdir()
        (project / "pyproject.toml").write_text(_PROJECT.format(**facts), "utf-8")
        (project / "README.md").write_text(_README.format(**facts), "utf-8")
        (package / "__init__.py").write_text(_INIT.format(**facts), "utf-8")
        shutil.copy(ROOT / "LICENSE", project)
        for name, cubin in cubins.items():
            (package / name).write_bytes(cubin)
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(output)]
        subprocess.run(command, cwd=project, check=True)
    return output / f"{PACKAGE}-{cumla.__version__}-py3-none-any.whl"


def main(arguments: list[str] | None = None) -> None:
    """Compile unless --cubins names a folder, then build."""
    parser = argparse.ArgumentParser(description="Build the wheel cumla-cubins.")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", metavar="DIR")
    parser.add_argument("--cubins", type=Path, metavar="DIR", help="of `cumla compile --output`")
    parser.add_argument("--jobs", metavar="N", help="processes that compile")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.cubins
        if folder is None:
            folder = Path(temporary)
            command = [sys.executable, "-m", "cumla", "compile", "--output", temporary]
            command += ["--jobs", args.jobs] if args.jobs else []
            subprocess.run(command, cwd=ROOT, check=True)
        cubins = read(folder)
    wheel = build(cubins, nvrtc_of(cubins), args.output)
    inside = sum(map(len, cubins.values()))
    print(json.dumps({"wheel": str(wheel), "bytes": wheel.stat().st_size, "cubins": inside}))


if __name__ == "__main__":
    main()
