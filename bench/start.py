# SPDX-License-Identifier: Apache-2.0
"""Times the import of the package, and the first call of a process.

python -m bench.start
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import cumla

__all__ = ["StartError", "measure"]

_TIMED = "from time import perf_counter; begin = perf_counter(); {}; print(perf_counter() - begin)"
_IMPORTS = {
    "import_s": "import cumla",
    "names_s": "from cumla import mla_decode",
    "dependencies_s": "import numpy, ml_dtypes",
}
_ROUNDS = 9
_WARM_STARTS = 3
_TIME_LIMIT = 120.0


class StartError(Exception):
    """A process that was to be timed failed."""


def measure() -> dict[str, float]:
    """Time imports and first calls, each in a process of its own; in seconds.

    ``import_s`` is the median of several imports, ``names_s`` that of a name that computes, and
    ``dependencies_s`` that of NumPy and ml_dtypes alone, which that loads, all measured in turns;
    ``first_call_cold_s`` has nothing in CuPy's kernel cache, ``first_call_warm_s`` its kernels.
    """
    with tempfile.TemporaryDirectory() as cache:
        imports = _imports(cache)
        first = (str(Path(__file__).with_name("first_call.py")),)
        cold = _seconds(first, cache)
        warm = [_seconds(first, cache) for _ in range(_WARM_STARTS)]
    return imports | {"first_call_cold_s": cold, "first_call_warm_s": median(warm)}


def _imports(cache: str) -> dict[str, float]:
    """Time imports in turns; the first round, which reads the files from the disk, is dropped."""
    measured: dict[str, list[float]] = {name: [] for name in _IMPORTS}
    for _ in range(1 + _ROUNDS):
        for name, statement in _IMPORTS.items():
            measured[name].append(_seconds(("-c", _TIMED.format(statement)), cache))
    return {name: median(times[1:]) for name, times in measured.items()}


def _seconds(arguments: tuple[str, ...], cache: str) -> float:
    """Run Python, return the number that it prints."""
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=_environment(os.environ, cache),
            capture_output=True,
            text=True,
            timeout=_TIME_LIMIT,
            check=True,
        )
        return float(done.stdout)
    except subprocess.CalledProcessError as error:
        raise StartError(f"{' '.join(arguments)} failed:\n{error.stderr.strip()}") from error
    except (subprocess.TimeoutExpired, ValueError) as error:
        raise StartError(f"{' '.join(arguments)}: {error}") from error


def _environment(current: Mapping[str, str], cache: str) -> dict[str, str]:
    """Build an environment in which this cumla is found, and no kernel but in `cache`."""
    found = [str(Path(cumla.__file__).resolve().parent.parent), current.get("PYTHONPATH", "")]
    path = os.pathsep.join(entry for entry in found if entry)
    kept = {key: value for key, value in current.items() if not key.startswith("CUMLA_")}
    return kept | {"PYTHONPATH": path, "CUPY_CACHE_DIR": cache}


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
