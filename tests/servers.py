# SPDX-License-Identifier: Apache-2.0
"""Scripts that run with a server's own Python, beside cumla as it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def installed(folder: Path) -> Path:
    """Install cumla's wheel, with its entry points, under a folder that a path can name."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def last_line(python: str, path: str, script: str, *arguments: str) -> str:
    """Run a script of the tests with this PYTHONPATH; return the last line that it prints."""
    done = subprocess.run(
        [python, str(ROOT / "tests" / script), *arguments],
        env=os.environ | {"PYTHONPATH": path},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]
