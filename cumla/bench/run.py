# SPDX-License-Identifier: Apache-2.0
"""A whole benchmark, from the machine's description to the results as one JSON object."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from typing import Any, TypeVar

import cumla
from cumla.bench.append import APPEND, measure_append
from cumla.bench.attention import ATTENTION, AttentionCase, attention_row, measure_attention
from cumla.bench.cases import (
    DENSE,
    INVARIANT,
    LOG_NORMAL_SIGMA,
    RAGGED,
    RAGGED_SEEDS,
    Case,
    Ceilings,
    vary,
)
from cumla.bench.ceilings import measure
from cumla.bench.dense import CheckError, DenseTiming, Workbench, run_case
from cumla.bench.forms import FORMS, FormGroup, forms_row, measure_forms
from cumla.bench.fp8 import FP8, fp8_row, measure_fp8
from cumla.bench.gpu import Gpu
from cumla.bench.host import HOST_CASE, SCHEDULES, host_times, time_schedule
from cumla.bench.indexer import (
    LOGITS,
    LOGITS_SCHEDULES,
    LogitsCase,
    logits_row,
    logits_schedule_row,
    measure_logits,
    time_logits_schedule,
)
from cumla.bench.indexer_cache import INDEXER_CACHE, measure_indexer_cache
from cumla.bench.logits_peers import DEEP_GEMM, run_deep_gemm
from cumla.bench.merge import MERGE, measure_merge
from cumla.bench.operations import Measure, OperationCase, operation_row
from cumla.bench.pages import PAGES, measure_pages, pages_row
from cumla.bench.peer_runs import peer_cases, run_peers
from cumla.bench.peers import Peers, beside, load_peers
from cumla.bench.start import StartError
from cumla.bench.start import measure as measure_start
from cumla.bench.timing import GpuTimer, Timing, time_cold, time_warm
from cumla.errors import CumlaError
from cumla.launch import all_specs
from cumla.launch.device import current_device, installed_cupy
from cumla.launch.module import cupy_nvrtc_version
from cumla.launch.source import digest

__all__ = [
    "PROTOCOL",
    "SECTIONS",
    "dense_row",
    "environment",
    "refuse_slow_kernels",
    "run",
    "steps",
]

PROTOCOL = (
    "CUDA events, median of 30 after 0.1 s of rest, 512 MiB read through L2 before each run (with "
    "a warm L2: none, the GPU only kept busy); inputs normal(0, 0.1), shuffled pages of 64 tokens; "
    "attention with the schedule ready; 512 output rows of each case checked against float64 "
    "first. graph_us: mean of a call among 20 to 32 in a CUDA graph that goes round several "
    "caches, median of 10 replays. Bytes: each cached row once, queries, output; operations of "
    "visible pairs only; efficiency: the larger of bytes / read ceiling and operations / "
    "matrix-product "
    f"ceiling, divided by the time. Ragged lengths: log-normal, sigma {LOG_NORMAL_SIGMA}, scaled "
    "to the tokens of the equal-length case. Batch-invariant: with the plan's max_seqlen at the "
    "longest request. Ragged queries: median of 3 behind one warm-up; efficiency: operations of "
    "visible pairs a second as a share of the matrix-product ceiling. Page sizes: all of them in "
    "turns, median of 3 turns of 10. FP8 caches: every format and bfloat16 in such turns, checked "
    "against float64 over what the quantised rows stand for; bytes: those of the format. Forms of "
    "the same work: those of a group in such turns, ratio: time / time of its first. Merging and "
    "writing into caches: some of what was written is checked against float64 first; bytes read "
    "and written, efficiency as a share of the copy ceiling; copy_us: a plain copy that reads and "
    "writes as many bytes, timed likewise; up to 256 MB graph_us: mean of the calls of a CUDA "
    "graph that moves 4 GiB and goes round 512 MiB of inputs and outputs, every set of which is "
    "checked afterwards, graph_copy_us: of plain copies, likewise. The indexer's logits: 64 heads "
    "of 128, float32, cleaned, inputs normal(0, 1) quantised, some rows checked against float64 "
    "first; bytes: each visible token's 132 once, the logits; the matrix-product ceiling is that "
    "of float8_e4m3fn. "
    "Peers that are marked as measured ran in this run, on the same inputs, planned or gathered "
    "beforehand, in turns with cumla, whose time in them is own_us: median of 3 turns of 15, of "
    "DeepGEMM of 30 (FA3-MLA: with the best of three numbers of splits; DeepGEMM: paged logits not "
    "cleaned). Those marked as apart are much slower, by a quick timing: median of 15, beside a "
    "time of cumla that is minutes older. The others were measured on the GPU that `peers` names "
    "and are scaled by the ratio of the two GPUs' ceilings (DeepGEMM's prefill with its kernel "
    "that writes -inf)"
)

SECTIONS = ("operations", "indexer", "attention", "pages", "fp8", "forms")
"""Parts of the whole table that need nothing else of it, and may be measured alone."""

_REFUSED = ("CUMLA_CHECK", "CUMLA_DEBUG")  # they make everything slower
# The last one's version ends with its commit where it was built from a checkout.
_OTHERS = ("torch", "triton", "flashinfer-python", "jax", "deep_gemm")

Note = Callable[[str], None]
Results = dict[str, Any]
_AnyCase = TypeVar("_AnyCase", AttentionCase, Case, FormGroup)


def steps(
    cases: tuple[Case, ...], peers: tuple[str, ...] | None = None, only: str | None = None
) -> int:
    """Count how often `run` calls its `note`."""
    of_sections = {
        "operations": len(MERGE) + len(APPEND),
        "indexer": len(LOGITS) + 1 + len(INDEXER_CACHE),
        "attention": len(ATTENTION),
        "pages": len(PAGES),
        "fp8": len(FP8),
        "forms": len(FORMS),
    }
    whole = 2 + len(RAGGED) + len(INVARIANT) if cases == DENSE else 0
    of_peers = len(peer_cases(cases, peers)) + len(_deep_gemm_cases(cases, peers))
    chosen = sum(of_sections[name] for name in _chosen_sections(cases, only))
    return 1 + len(cases) + whole + chosen + of_peers


def _chosen_sections(cases: tuple[Case, ...], only: str | None) -> tuple[str, ...]:
    """Choose what is measured beside the cases: everything with the whole table, or one part."""
    if only is not None:
        return (only,)
    return SECTIONS if cases == DENSE else ()


def run(
    cases: tuple[Case, ...],
    note: Note,
    *,
    peers: tuple[str, ...] | None = None,
    warm: bool = False,
    only: str | None = None,
) -> Iterator[Results]:
    """Run a benchmark on the current GPU.

    Parameters
    ----------
    cases : tuple of Case
        What to run. Ragged lengths, the batch-invariant mode, schedule, host and start times,
        merging, writing into caches, the indexer, ragged queries, page sizes, FP8 caches and
        forms of the same work are measured with the whole table only.
    note : callable
        Told what has been done, a line a step.
    peers : tuple of str, optional
        Keys of `cumla.bench.peer_runs.PEERS` that run on all cases, and ``"deepgemm"``, which
        runs on the indexer's; by default all run, on a few rows of the table and on the indexer's.
    warm : bool
        Leave the L2 cache as it is before a timed call.
    only : str, optional
        One of `SECTIONS`, which is measured without the table: `cases` is empty then.

    Yields
    ------
    dict
        The results so far, ready for JSON: the same object, fuller each time. A case whose result
        is wrong has ``failed`` instead of times.

    Raises
    ------
    CumlaError
        There is no GPU to run on, a case does not fit into its memory, or a variable that makes
        the kernels slower is set.
    """
    refuse_slow_kernels()
    current_device()  # where there is none, or no CuPy, that is said before anything takes time
    start = _start(note) if cases == DENSE else {}  # before this process uses the GPU
    published = load_peers()
    with Gpu() as gpu:
        ceilings = measure(gpu)
        results = _describe(gpu, ceilings, published, warm) | start
        note(
            f"{gpu.properties.name}: reads {ceilings.read_gbps:.0f} GB/s, multiplies "
            f"{ceilings.matmul_tflops:.0f} TFLOP/s ({ceilings.sustained_tflops:.0f} sustained), "
            f"empty kernel {ceilings.empty_us:.1f} us"
        )
        ragged = vary(RAGGED, (1,), ("bfloat16",), RAGGED_SEEDS) if cases == DENSE else ()
        timer = time_warm if warm else time_cold
        bench = Workbench(gpu, (*cases, *ragged, HOST_CASE), timer)
        for row in _dense_rows(bench, cases, ceilings, published, note):
            results["rows"].append(row)
            yield results
        if cases == DENSE:
            yield from _whole(bench, results, published, note)
        sections = _sections(gpu, results, ceilings, published, timer, note)
        for name in _chosen_sections(cases, only):
            yield from sections[name]
        yield from _add_peers(bench, cases, peers, results, note)
        for case in _deep_gemm_cases(cases, peers):
            yield _add_deep_gemm(gpu, case, results, timer, note)


def refuse_slow_kernels() -> None:
    """Refuse to time kernels that a variable makes slower.

    Raises
    ------
    CumlaError
        Such a variable is set.
    """
    for name in _REFUSED:
        if os.environ.get(name, "0") not in ("", "0"):
            raise CumlaError(f"{name}={os.environ[name]}: unset it, it makes the kernels slower")


def environment(gpu: Gpu) -> Results:
    """Say what runs where and when.

    Parameters
    ----------
    gpu : Gpu
        Entered.

    Returns
    -------
    dict
        Ready for JSON: format, date, machine, and a digest of each kernel.
    """
    return {
        "format": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(gpu),
        "digests": {spec.entry: digest(spec) for spec in all_specs()},
    }


def _describe(gpu: Gpu, ceilings: Ceilings, published: Peers, warm: bool) -> Results:
    """Begin the results: what ran where."""
    return environment(gpu) | {
        "protocol": PROTOCOL,
        "peers": published.source,
        "ceilings": ceilings.to_json(),
        "l2": "warm" if warm else "cold",
        "notes": [],
        "rows": [],
    }


def _whole(bench: Workbench, results: Results, published: Peers, note: Note) -> Iterator[Results]:
    """Measure what else there is to say of attention, with the whole table only."""
    results["ragged"] = []
    for case in RAGGED:
        results["ragged"].append(_ragged_row(bench, case, results["rows"], note))
        yield results
    results["invariant"] = []
    for case in INVARIANT:
        results["invariant"].append(_invariant_row(bench, case, results["rows"], note))
        yield results
    results["schedule"] = _schedule_rows(bench, published)
    yield results
    host = host_times(bench)
    results["host"] = {name: time.figures() for name, time in host.times.items()}
    results["host_stages"] = {name: time.figures() for name, time in host.stages.items()}
    results["notes"] += host.notes
    note("schedule and host")
    yield results


def _sections(
    gpu: Gpu,
    results: Results,
    ceilings: Ceilings,
    published: Peers,
    timer: GpuTimer,
    note: Note,
) -> dict[str, Iterator[Results]]:
    """Get each of `SECTIONS` ready; it is measured when it is gone through."""
    return {
        "operations": _operations(gpu, results, ceilings, timer, note),
        "indexer": _indexer(gpu, results, ceilings, published, timer, note),
        "attention": _attention(gpu, results, ceilings, timer, note),
        "pages": _pages(gpu, results, timer, note),
        "fp8": _fp8(gpu, results, ceilings, timer, note),
        "forms": _forms(gpu, results, timer, note),
    }


def _operations(
    gpu: Gpu, results: Results, ceilings: Ceilings, timer: GpuTimer, note: Note
) -> Iterator[Results]:
    """Measure the operations beside attention, which move bytes and do little else."""
    measures: dict[str, list[tuple[OperationCase, Measure]]] = {
        "merge": [(case, partial(measure_merge, gpu, case, timer)) for case in MERGE],
        "append": [(case, partial(measure_append, gpu, case, timer)) for case in APPEND],
    }
    for name, cases in measures.items():
        results[name] = []
        for case, measure_one in cases:
            row = operation_row(case, ceilings.copy_gbps, measure_one)
            results[name].append(row)
            note(_operation_line(name, row))
            yield results


def _operation_line(name: str, row: Results) -> str:
    if "failed" in row:
        return f"FAILED: {row['failed']}"
    return f"{name}, {row['nbytes'] / 1e6:.0f} MB: {row['us']:.1f} us"


def _indexer(
    gpu: Gpu,
    results: Results,
    ceilings: Ceilings,
    published: Peers,
    timer: GpuTimer,
    note: Note,
) -> Iterator[Results]:
    """Measure the indexer: its logits, their schedule, and what quantises."""
    rows: list[Results] = []
    results["indexer"] = rows
    for case in LOGITS:
        try:
            row = logits_row(case, measure_logits(gpu, case, timer), ceilings, published)
            note(f"{case.name}: {row['us']:.1f} us, efficiency {row['efficiency']:.2f}")
        except CheckError as error:
            row = case.to_json() | {"failed": str(error)}
            note(f"FAILED: {error}")
        rows.append(row)
        yield results
    for shape in LOGITS_SCHEDULES:
        timing = time_logits_schedule(gpu, shape, timer)
        rows.append(logits_schedule_row(shape, timing, published))
    note("schedule of the logits")
    yield results
    for cache_case in INDEXER_CACHE:
        measure_one = partial(measure_indexer_cache, gpu, cache_case, timer)
        row = operation_row(cache_case, ceilings.copy_gbps, measure_one)
        rows.append(row)
        note(_operation_line(cache_case.op, row))
        yield results


def _attention(
    gpu: Gpu, results: Results, ceilings: Ceilings, timer: GpuTimer, note: Note
) -> Iterator[Results]:
    """Measure attention over queries of different lengths."""

    def measured(case: AttentionCase) -> tuple[Results, str]:
        row = attention_row(case, measure_attention(gpu, case, timer), ceilings)
        return row, f": {row['us']:.1f} us, {row['tflops']:.0f} TFLOP/s"

    return _section(results, "attention", ATTENTION, measured, note)


def _pages(gpu: Gpu, results: Results, timer: GpuTimer, note: Note) -> Iterator[Results]:
    """Measure decoding with pages of several sizes."""

    def measured(case: Case) -> tuple[Results, str]:
        row = pages_row(case, measure_pages(gpu, case, timer))
        ratios = ", ".join(f"{of['page']}: {of['ratio']:.3f}" for of in row["pages"])
        return row, f", times by page size: {ratios}"

    return _section(results, "pages", PAGES, measured, note)


def _fp8(
    gpu: Gpu, results: Results, ceilings: Ceilings, timer: GpuTimer, note: Note
) -> Iterator[Results]:
    """Measure decoding over FP8 caches."""

    def measured(case: Case) -> tuple[Results, str]:
        row = fp8_row(case, measure_fp8(gpu, case, timer), ceilings)
        times = ", ".join(f"{of['format']}: {of['us']:.1f} us" for of in row["formats"])
        return row, f" by format, {times}"

    return _section(results, "fp8", FP8, measured, note)


def _forms(gpu: Gpu, results: Results, timer: GpuTimer, note: Note) -> Iterator[Results]:
    """Measure decoding of the same work in several forms."""

    def measured(group: FormGroup) -> tuple[Results, str]:
        row = forms_row(group, measure_forms(gpu, group, timer))
        ratios = ", ".join(f"{of['form']}: {of['ratio']:.3f}" for of in row["forms"])
        return row, f", times by form: {ratios}"

    return _section(results, "forms", FORMS, measured, note)


def _section(
    results: Results,
    name: str,
    cases: tuple[_AnyCase, ...],
    measured: Callable[[_AnyCase], tuple[Results, str]],
    note: Note,
) -> Iterator[Results]:
    """Measure one case of a section after the other: its row, and what to say behind its name."""
    results[name] = []
    for case in cases:
        try:
            row, said = measured(case)
            note(f"{case.name}{said}")
        except Exception as error:  # of any kind: what is measured later stands
            row = _failed(case, error, note)
        results[name].append(row)
        yield results


def _failed(case: AttentionCase | Case | FormGroup, error: Exception, note: Note) -> Results:
    """Make the row of a case that went wrong, in whatever way."""
    failed = str(error)
    if not isinstance(error, CheckError):
        reason = failed.strip().partition("\n")[0]
        failed = f"{case.name}: {type(error).__name__}: {reason}"
    note(f"FAILED: {failed}")
    return case.to_json() | {"failed": failed}


def _dense_rows(
    bench: Workbench, cases: tuple[Case, ...], ceilings: Ceilings, published: Peers, note: Note
) -> Iterator[Results]:
    streams: dict[tuple[int, int, int, int | None], Timing] = {}
    for case in cases:
        cache = (case.batch, case.kv_len, case.kv_heads, case.seed)
        if cache not in streams:
            streams[cache] = bench.stream_only(case)
        try:
            row = dense_row(case, run_case(bench, case), streams[cache], ceilings, published)
            note(f"{case.name}: {row['us']:.1f} us, efficiency {row['efficiency']:.2f}")
        except CheckError as error:
            row = case.to_json() | {"failed": str(error)}
            note(f"FAILED: {error}")
        yield row


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
    found = beside(us, peers.dense(case, ceilings))
    return (
        case.to_json()
        | timing.single.figures()
        | {
            "tflops": case.flops / (us * 1e6),
            "gbps": case.nbytes / (us * 1e3),
            "floor_us": floor,
            "efficiency": floor / us,
            "stream_only_us": stream.us,
            "graph_us": None if timing.graph is None else timing.graph.us,
            "peers": found,
            "best_peer": _best_peer(found),
            "row_error": timing.row_error,
            "lse_error": timing.lse_error,
        }
    )


def _best_peer(found: dict[str, dict[str, Any]]) -> str | None:
    return min(found, key=lambda name: found[name]["x"], default=None)


def _ragged_row(bench: Workbench, case: Case, rows: list[Results], note: Note) -> Results:
    """Run a case of the table with ragged lengths, a seed after the other."""
    row = case.to_json() | {"lengths": "lognormal", "sigma": LOG_NORMAL_SIGMA}
    equal = _row_of(case, rows).get("us")
    seeds: list[Results] = []
    try:
        for ragged in vary((case,), (1,), (case.dtype,), RAGGED_SEEDS):
            timing = run_case(bench, ragged)
            seeds.append({"seed": ragged.seed, **timing.single.figures()})
    except CheckError as error:
        note(f"FAILED: {error}")
        return row | {"failed": str(error)}
    worst = max(seed["us"] for seed in seeds)
    ratio = None if equal is None else worst / equal
    note(f"{case.name} ragged: {worst:.1f} us")
    return row | {"seeds": seeds, "worst_us": worst, "equal_us": equal, "ratio": ratio}


def _invariant_row(bench: Workbench, case: Case, rows: list[Results], note: Note) -> Results:
    """Run a case of the table batch-invariant."""
    invariant = replace(case, batch_invariant=True)
    usual = _row_of(case, rows).get("us")
    try:
        timing = run_case(bench, invariant).single
    except CheckError as error:
        note(f"FAILED: {error}")
        return invariant.to_json() | {"failed": str(error)}
    ratio = None if usual is None else timing.us / usual
    note(f"{invariant.name}: {timing.us:.1f} us")
    return invariant.to_json() | timing.figures() | {"usual_us": usual, "ratio": ratio}


def _row_of(case: Case, rows: list[Results]) -> Results:
    """Find what was measured of a case."""
    (found,) = (row for row in rows if Case.from_json(row) == case)
    return found


def _add_peers(
    bench: Workbench,
    cases: tuple[Case, ...],
    names: tuple[str, ...] | None,
    results: Results,
    note: Note,
) -> Iterator[Results]:
    """Run other libraries last: whatever they break, our own figures stand."""
    for case in peer_cases(cases, names):
        runs = run_peers(bench, case, names)
        results["notes"] += [line for line in runs.notes if line not in results["notes"]]
        row = _row_of(case, results["rows"])
        if "failed" not in row:
            for name, turns in runs.turns.items():
                row["peers"][name] = turns.to_json()
            for name, time in runs.apart.items():
                figures = {"us": time.us, "scaled_us": time.us, "x": time.us / row["us"]}
                row["peers"][name] = figures | {"measured": True, "apart": True}
            row["best_peer"] = _best_peer(row["peers"])
        ran = {name: turns.peer for name, turns in runs.turns.items()} | runs.apart
        times = ", ".join(f"{name} {time.us:.1f} us" for name, time in ran.items())
        note(f"{case.name}: {times or 'no peer ran'}")
        yield results


def _deep_gemm_cases(
    cases: tuple[Case, ...], names: tuple[str, ...] | None
) -> tuple[LogitsCase, ...]:
    """Choose the cases on which DeepGEMM runs: all, if the indexer was measured."""
    return LOGITS if cases == DENSE and (names is None or "deepgemm" in names) else ()


def _add_deep_gemm(
    gpu: Gpu, case: LogitsCase, results: Results, timer: GpuTimer, note: Note
) -> Results:
    """Run DeepGEMM on a case of the indexer, and put it beside the rows of that shape."""
    runs = run_deep_gemm(gpu, case, timer)
    results["notes"] += [line for line in runs.notes if line not in results["notes"]]
    wanted = case.to_json()
    for row in results["indexer"]:
        same = all(
            row.get(key) == wanted.get(key) for key in ("batch", "next_n", "q_len", "kv_len")
        )
        if same and row["op"] in runs.turns and "failed" not in row:
            row.setdefault("peers", {})[DEEP_GEMM] = runs.turns[row["op"]].to_json()
    times = ", ".join(f"{op} {turns.peer.us:.1f} us" for op, turns in runs.turns.items())
    note(f"{case.name}: {f'{DEEP_GEMM}, {times}' if times else 'no peer ran'}")
    return results


def _schedule_rows(bench: Workbench, published: Peers) -> list[Results]:
    return [
        {
            "batch": case.batch,
            "heads": case.heads,
            "kv_len": case.kv_len,
            "lengths": "ragged" if ragged else "equal",
            **time_schedule(bench, case, ragged=ragged).figures(),
            "flash_mla_us": None if ragged else published.schedule_us(case),
        }
        for case in SCHEDULES
        for ragged in ((False, True) if case.batch > 1 else (False,))
    ]


def _start(note: Note) -> Results:
    """Start times; a process that cannot be timed does not make the rest worthless."""
    try:
        start: Results = dict(measure_start())
    except StartError as error:
        start = {"failed": str(error)}
    note("import and first calls")
    return {"start": start}


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
