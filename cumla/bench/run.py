# SPDX-License-Identifier: Apache-2.0
"""A benchmark, from the machine's description to the results as one JSON object."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import metadata

import cumla
from cumla.bench import ceilings
from cumla.bench.cases import LOG_NORMAL_SIGMA, Ceilings
from cumla.bench.gpu import Gpu
from cumla.bench.section import Bench, Note, Row, Section
from cumla.bench.timing import time_cold, time_warm
from cumla.errors import CumlaError
from cumla.launch import all_specs
from cumla.launch.device import current_device, installed_cupy
from cumla.launch.module import cupy_nvrtc_version
from cumla.launch.source import digest

PROTOCOL = (
    "CUDA events, median of 30 after 0.1 s of rest, 512 MiB read through L2 before each run (with "
    "a warm L2: none, the GPU only kept busy); inputs normal(0, 0.1), shuffled pages of 64 tokens; "
    "attention with the schedule ready; 512 output rows of each case checked against float64 "
    "first. graph_us: mean of a call among 20 to 32 in a CUDA graph that goes round several "
    "caches, median of 10 replays. Bytes: each cached row once, queries, output; operations of "
    "visible pairs only; efficiency: the larger of bytes / read ceiling and operations / "
    "matrix-product "
    f"ceiling, divided by the time. Ragged lengths: log-normal, sigma {LOG_NORMAL_SIGMA}, scaled "
    "to the tokens of the equal-length case"
)

_REFUSED = ("CUMLA_CHECK", "CUMLA_DEBUG")  # they make everything slower
# The last one's version ends with its commit where it was built from a checkout.
_OTHERS = ("torch", "triton", "flashinfer-python", "jax", "deep_gemm")


def run(
    sections: tuple[Section, ...],
    note: Note,
    *,
    warm: bool = False,
    limits: Callable[[Gpu], Ceilings] | None = None,
) -> Iterator[Row]:
    """Run a benchmark on the current GPU; yield the results so far, fuller each time.

    `note` is told what has been done: a line for the ceilings, and one a case. With `warm` the L2
    cache stays as it is before a timed call. `limits` measures the ceilings, `ceilings.measure` by
    default. A case whose result is wrong has ``failed`` instead of times.
    """
    refuse_slow_kernels()
    current_device()  # where there is none, or no CuPy, that is said before anything takes time
    with Gpu() as gpu:
        found = (limits or ceilings.measure)(gpu)
        results = environment(gpu) | {
            "protocol": PROTOCOL,
            "ceilings": found.to_json(),
            "l2": "warm" if warm else "cold",
            "notes": [],
            "rows": [],
        }
        note(
            f"{gpu.properties.name}: reads {found.read_gbps:.0f} GB/s, multiplies "
            f"{found.matmul_tflops:.0f} TFLOP/s ({found.sustained_tflops:.0f} sustained), "
            f"empty kernel {found.empty_us:.1f} us"
        )
        bench = Bench(gpu, found, time_warm if warm else time_cold, results)
        yield results
        yield from measure(bench, sections, note)


def measure(bench: Bench, sections: tuple[Section, ...], note: Note) -> Iterator[Row]:
    """Measure sections one after the other; yield the results after each case."""
    for section in sections:
        rows = bench.results.setdefault(section.name, [])
        for row in section.run(bench, note):
            rows.append(row)
            yield bench.results


def refuse_slow_kernels() -> None:
    """Refuse to time kernels that a variable makes slower."""
    for name in _REFUSED:
        if os.environ.get(name, "0") not in ("", "0"):
            raise CumlaError(f"{name}={os.environ[name]}: unset it, it makes the kernels slower")


def environment(gpu: Gpu) -> Row:
    """Say what runs where and when."""
    return {
        "format": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(gpu),
        "digests": {spec.entry: digest(spec) for spec in all_specs()},
    }


def _machine(gpu: Gpu) -> Row:
    major, minor = cupy_nvrtc_version()
    return {
        "gpu": gpu.properties.name,
        "sm_count": gpu.properties.sm_count,
        "driver": _driver_version(gpu.ordinal),
        "cumla": cumla.__version__,
        "cupy": ", ".join(installed_cupy()),
        "nvrtc": f"{major}.{minor}",
        "cuda_bindings": _version("cuda-bindings"),
        **{name: _version(name) for name in _OTHERS},
        "python": platform.python_version(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver_version(ordinal: int) -> str | None:
    """Ask nvidia-smi, which alone knows the driver's own version."""
    query = ["nvidia-smi", f"--id={ordinal}", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
