# SPDX-License-Identifier: Apache-2.0
"""A whole benchmark, from the machine's description to the results as one JSON object."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import cumla
from cumla.bench.cases import DENSE, Case, Ceilings
from cumla.bench.ceilings import measure, time_stream_only
from cumla.bench.dense import CheckError, DenseTiming, Workbench, run_case
from cumla.bench.gpu import Gpu
from cumla.bench.host import HOST_CASE, SCHEDULES, host_times, time_schedule
from cumla.bench.peers import Peers, load_peers
from cumla.bench.start import StartError
from cumla.bench.start import measure as measure_start
from cumla.bench.timing import Timing
from cumla.errors import CumlaError
from cumla.launch import all_specs
from cumla.launch.device import installed_cupy
from cumla.launch.module import cupy_nvrtc_version
from cumla.launch.source import digest

__all__ = ["PROTOCOL", "dense_row", "run", "steps"]

PROTOCOL = (
    "CUDA events, median of 30, 512 MiB read through L2 before each run; inputs normal(0, 0.1), "
    "shuffled pages of 64 tokens; attention and merge with the schedule ready; 512 output rows of "
    "each case checked against float64 first. graph_us: mean of a call among 20 to 32 in a CUDA "
    "graph that goes round several caches, median of 10 replays. Bytes: each cached row once, "
    "queries, output; operations of visible pairs only; efficiency: the larger of bytes / read "
    "ceiling and operations / matrix-product ceiling, divided by the time. Peers were measured on "
    "the GPU that `peers` names and are scaled by the ratio of the two GPUs' ceilings"
)

_REFUSED = ("CUMLA_CHECK", "CUMLA_DEBUG")  # they make everything slower

Note = Callable[[str], None]


def steps(cases: tuple[Case, ...]) -> int:
    """Count how often `run` calls its `note`."""
    return 1 + len(cases) + (2 if cases == DENSE else 0)


def run(cases: tuple[Case, ...], note: Note) -> Iterator[dict[str, Any]]:
    """Run a benchmark on the current GPU.

    Parameters
    ----------
    cases : tuple of Case
        Which rows of the table. Schedule, host and start times are measured with the whole table
        only.
    note : callable
        Told what has been done, a line a step.

    Yields
    ------
    dict
        The results so far, ready for JSON: the same object, fuller each time. A case whose result
        is wrong has ``failed`` instead of times.

    Raises
    ------
    CumlaError
        There is no GPU to run on, or a variable that makes the kernels slower is set.
    """
    for name in _REFUSED:
        if os.environ.get(name, "0") not in ("", "0"):
            raise CumlaError(f"{name}={os.environ[name]}: unset it, it makes the kernels slower")
    peers = load_peers()
    with Gpu() as gpu:
        ceilings = measure(gpu)
        results: dict[str, Any] = {
            "format": 1,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": _machine(gpu),
            "digests": {spec.entry: digest(spec) for spec in all_specs()},
            "protocol": PROTOCOL,
            "peers": peers.source,
            "ceilings": ceilings.to_json(),
            "rows": [],
        }
        note(
            f"{gpu.properties.name}: reads {ceilings.read_gbps:.0f} GB/s, multiplies "
            f"{ceilings.matmul_tflops:.0f} TFLOP/s, empty kernel {ceilings.empty_us:.1f} us"
        )
        bench = Workbench(gpu, (*cases, HOST_CASE))
        for row in _dense_rows(bench, cases, ceilings, peers, note):
            results["rows"].append(row)
            yield results
        if cases != DENSE:
            return
        results["schedule"] = _schedule_rows(gpu, peers)
        yield results
        results["host"] = {name: _figures(time) for name, time in host_times(bench).items()}
        note("schedule and host")
        yield results
    results["start"] = _start()
    note("import and first calls")
    yield results


def _dense_rows(
    bench: Workbench, cases: tuple[Case, ...], ceilings: Ceilings, peers: Peers, note: Note
) -> Iterator[dict[str, Any]]:
    streams: dict[tuple[int, int], Timing] = {}
    for case in cases:
        if (case.batch, case.kv_len) not in streams:
            inputs = bench.inputs(case)
            stream = time_stream_only(bench.gpu, inputs.kv, inputs.tables[0], case)
            streams[case.batch, case.kv_len] = stream
            del inputs
        stream = streams[case.batch, case.kv_len]
        try:
            row = dense_row(case, run_case(bench, case), stream, ceilings, peers)
            note(f"{case.name}: {row['us']:.1f} us, efficiency {row['efficiency']:.2f}")
        except CheckError as error:
            row = _shape(case) | {"failed": str(error)}
            note(f"FAILED: {error}")
        yield row


def _shape(case: Case) -> dict[str, Any]:
    return {
        "op": "dense_decode",
        "batch": case.batch,
        "q_len": case.q_len,
        "heads": case.heads,
        "kv_len": case.kv_len,
        "page": 64,
    }


def _figures(timing: Timing) -> dict[str, float]:
    """Name the median, and the times between which four fifths of the runs lie."""
    return {"us": timing.us, "us_low": timing.low, "us_high": timing.high}


def dense_row(
    case: Case, timing: DenseTiming, stream: Timing, ceilings: Ceilings, peers: Peers
) -> dict[str, Any]:
    """Put a case's times beside its floor and its peers.

    Parameters
    ----------
    case : Case
        What ran.
    timing : DenseTiming
        How long it took.
    stream : Timing
        How long bringing its pages into shared memory takes.
    ceilings : Ceilings
        Of the GPU.
    peers : Peers
        Who else ran it.

    Returns
    -------
    dict
        A row of the results.
    """
    us = timing.single.us
    floor = case.floor_us(ceilings)
    found = {
        name: {"us": time.us, "scaled_us": time.scaled_us, "x": time.scaled_us / us}
        | ({"clock": time.clock} if time.clock else {})
        for name, time in peers.dense(case, ceilings).items()
    }
    return (
        _shape(case)
        | _figures(timing.single)
        | {
            "tflops": case.flops / (us * 1e6),
            "gbps": case.nbytes / (us * 1e3),
            "floor_us": floor,
            "efficiency": floor / us,
            "stream_only_us": stream.us,
            "graph_us": None if timing.graph is None else timing.graph.us,
            "peers": found,
            "best_peer": min(found, key=lambda name: found[name]["scaled_us"], default=None),
            "row_error": timing.row_error,
            "lse_error": timing.lse_error,
        }
    )


def _schedule_rows(gpu: Gpu, peers: Peers) -> list[dict[str, Any]]:
    return [
        {
            "batch": case.batch,
            "heads": case.heads,
            "kv_len": case.kv_len,
            "lengths": "ragged" if ragged else "equal",
            **_figures(time_schedule(gpu, case, ragged=ragged)),
            "flash_mla_us": None if ragged else peers.schedule_us(case),
        }
        for case in SCHEDULES
        for ragged in ((False, True) if case.batch > 1 else (False,))
    ]


def _start() -> dict[str, Any]:
    """Start times; a process that cannot be timed does not make the rest worthless."""
    try:
        return dict(measure_start())
    except StartError as error:
        return {"failed": str(error)}


def _machine(gpu: Gpu) -> dict[str, Any]:
    major, minor = cupy_nvrtc_version()
    return {
        "gpu": gpu.properties.name,
        "sm_count": gpu.properties.sm_count,
        "driver": _driver_version(gpu.ordinal),
        "cumla": cumla.__version__,
        "cupy": ", ".join(installed_cupy()),
        "nvrtc": f"{major}.{minor}",
        "cuda_bindings": _version("cuda-bindings"),
        "torch": _version("torch"),
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
