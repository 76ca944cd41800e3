# SPDX-License-Identifier: Apache-2.0
"""Scripts that need a process of their own: a first call, a cold kernel, an interpreter's end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

__all__ = ["run_fresh"]

_ROOT = Path(__file__).resolve().parents[3]


def run_fresh(script: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a script in a new interpreter, from the repository's root; failures are the caller's.

    One that takes longer than so many seconds is killed: `subprocess.TimeoutExpired`.
    """
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
