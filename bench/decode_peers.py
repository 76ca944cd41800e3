# SPDX-License-Identifier: Apache-2.0
"""Other libraries on the same inputs in the same run, where they are installed.

Each result is held against float64 before it is timed. Libraries that are about as fast as cumla
differ from it by less than a GPU does from one minute to the next, so they are timed in turns with
it. Whatever a library raises becomes a note: it is its matter, and none of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from bench.peers import Turns
from bench.sections.host import as_tensor
from bench.turns import in_turns
from cumla.bench.cases import PAGE_SIZE, Case
from cumla.bench.problem import Problem, check, lay_out
from cumla.bench.section import Bench
from cumla.bench.timing import Timing
from cumla.launch.mla.shape import HEAD_DIM, VALUE_DIM

__all__ = ["PEERS", "PEER_CASES", "PeerRuns", "run_peers"]

PEER_CASES: tuple[Case, ...] = (
    Case(128, 1, 128, 4096),
    Case(128, 1, 16, 4096),
    Case(128, 2, 128, 1024),
    Case(16, 1, 128, 8192),
    Case(1, 1, 16, 8192),
    Case(1, 1, 128, 131072),
)
"""Rows of the table on which other libraries run if nobody says where."""

_REPEATS = 15  # of each turn
_CLOSE = 1.5  # times as slow as cumla: beyond that the drift of a GPU does not matter
_TOLERANCE = 2e-2  # of a row: that the same thing was computed, however precisely
_FLASHINFER_WORKSPACE = 128 << 20
_FA3_SPLITS = (0, 1, 32)  # 0: its own choice, which is not always its best
_LATENT_AND_ROPE = (VALUE_DIM, HEAD_DIM - VALUE_DIM)

Call = Callable[[], Any]
"""Enqueues attention on PyTorch's current stream, returns out; its axes may be split further."""
Prepare = Callable[[Bench, Problem, tuple[Any, ...]], tuple[Call, ...]]
"""Makes calls from inputs, and their arguments as tensors; of several the fastest counts."""


class PeerRuns(NamedTuple):
    """What libraries took for a case.

    Attributes
    ----------
    turns : dict
        Library to its time and cumla's, in turns.
    apart : dict
        Those that are much slower, to their time.
    notes : list of str
        Why others have none.
    """

    turns: dict[str, Turns]
    apart: dict[str, Timing]
    notes: list[str]


def run_peers(bench: Bench, case: Case, names: tuple[str, ...] = ()) -> PeerRuns:
    """Check and time other libraries: those named, keys of `PEERS`, or all."""
    runs = PeerRuns({}, {}, [])
    calls: dict[str, Call] = {}
    problem = lay_out(bench.gpu, case)
    for name in names or PEERS:
        title, modules, prepare = PEERS[name]
        missing = [module for module in modules if find_spec(module) is None]
        if missing:
            runs.notes.append(f"{title}: {' and '.join(missing)} not installed")
            continue
        with _noting(runs.notes, f"{title}: {case.name}"):
            calls[title] = _fastest(bench, problem, prepare)
    if calls:
        with _noting(runs.notes, f"times of peers: {case.name}"):
            _time(bench, problem, calls, runs)
    return runs


@contextmanager
def _noting(notes: list[str], what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of any kind, from code that is not ours
        reason = str(error).strip().partition("\n")[0]
        notes.append(f"{what}: {type(error).__name__}: {reason}")


def time_roughly(bench: Bench, call: Call) -> float:
    """Time a call in a few runs: to choose by, not to report."""
    return bench.time(call, repeats=5, warmup=2).us


def _fastest(bench: Bench, problem: Problem, prepare: Prepare) -> Call:
    """Check all calls of one library, and choose."""
    torch = import_module("torch")
    with bench.gpu.torch_stream(torch):
        tensors = tuple(as_tensor(torch, array) for array in problem.arguments())
        times = {}
        for call in prepare(bench, problem, tensors):
            problem.poison(bench.gpu)
            result = call()
            tensors[4].view(result.shape).copy_(result)
            check(bench.gpu, problem, tolerance=_TOLERANCE)
            times[call] = time_roughly(bench, call)
        return min(times, key=lambda call: times[call])


def _time(bench: Bench, problem: Problem, calls: dict[str, Call], runs: PeerRuns) -> None:
    """Time what is right, in turns with cumla unless it is much slower."""
    torch = import_module("torch")
    time = partial(bench.time, repeats=_REPEATS)
    with bench.gpu.torch_stream(torch):
        own = problem.call()
        limit = _CLOSE * time_roughly(bench, own)
        rough = {name: time_roughly(bench, call) for name, call in calls.items()}
        close = [name for name, us in rough.items() if us <= limit]
        runs.apart.update((name, time(call)) for name, call in calls.items() if name not in close)
        if close:
            own_time, *times = in_turns(time, (own, *(calls[name] for name in close)))
            turns = (Turns(own_time, peer) for peer in times)
            runs.turns.update(zip(close, turns, strict=True))


def _sdpa(bench: Bench, problem: Problem, tensors: tuple[Any, ...]) -> tuple[Call, ...]:
    """PyTorch's attention over keys that have been gathered into one tensor.

    The query heads of a kv head are rows of one head, so that nothing has to be expanded.
    """
    case = problem.case
    if case.seed is not None:
        raise ValueError("needs requests of the same length")
    torch = import_module("torch")
    q, kv, table, *_ = tensors
    pages = kv[table.flatten().long()]
    tokens = pages.view(case.batch, -1, case.kv_heads, HEAD_DIM)[:, : case.kv_len]
    keys = tokens.transpose(1, 2)
    split = (case.batch, case.q_len, case.kv_heads, -1, HEAD_DIM)
    queries = q.view(split).transpose(1, 2).flatten(2, 3)
    mask = None
    if case.q_len > 1:
        row = torch.arange(queries.shape[2], device=q.device)
        hidden = case.q_len - 1 - row // (case.heads // case.kv_heads)
        token = torch.arange(case.kv_len, device=q.device)
        mask = token[None, :] < case.kv_len - hidden[:, None]
    attend = torch.nn.functional.scaled_dot_product_attention

    def call() -> Any:
        values = keys[..., :VALUE_DIM]
        out = attend(queries, keys, values, attn_mask=mask, scale=HEAD_DIM**-0.5)
        return out.unflatten(2, (case.q_len, -1)).transpose(1, 2)

    return (call,)


def _triton(bench: Bench, problem: Problem, tensors: tuple[Any, ...]) -> tuple[Call, ...]:
    """Make a call of the split-KV decoding of `bench.triton_decode`."""
    case = problem.case
    _require_one_kv_head(case)
    decode = import_module("bench.triton_decode").prepare(
        *tensors[:5],
        softmax_scale=HEAD_DIM**-0.5,
        longest=int(case.lengths.max()),
        sm_count=bench.gpu.properties.sm_count,
    )

    def call() -> Any:
        decode()
        return tensors[4]

    return (call,)


def _flashinfer(bench: Bench, problem: Problem, tensors: tuple[Any, ...]) -> tuple[Call, ...]:
    """FlashInfer's paged MLA, planned beforehand."""
    case = problem.case
    _require_one_kv_head(case)
    torch = import_module("torch")
    q, kv, _, seqlens, *_ = tensors
    workspace = torch.empty(_FLASHINFER_WORKSPACE, dtype=torch.uint8, device=q.device)
    wrapper = import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper(workspace)
    ends = np.cumsum(case.pages_of_requests, dtype=np.int32)
    order = bench.gpu.download(problem.tables[0])
    indptr, pages = (
        torch.from_numpy(array).to(q.device)
        for array in (np.append(np.int32(0), ends), order[order >= 0])
    )
    wrapper.plan(
        torch.arange(case.batch + 1, dtype=torch.int32, device=q.device) * case.q_len,
        *(indptr, pages, seqlens, case.heads, *_LATENT_AND_ROPE, PAGE_SIZE),
        *(case.q_len > 1, HEAD_DIM**-0.5, q.dtype, kv.dtype),
    )
    queries = q.flatten(0, 1).split(_LATENT_AND_ROPE, dim=-1)
    cache = kv.squeeze(2).split(_LATENT_AND_ROPE, dim=-1)

    def call() -> Any:
        return wrapper.run(*queries, *cache).unflatten(0, (case.batch, case.q_len))

    return (call,)


def _flashmla(bench: Bench, problem: Problem, tensors: tuple[Any, ...]) -> tuple[Call, ...]:
    """FlashMLA's dense decoding, with its schedule made beforehand.

    Newer versions make the schedule in the first call, which is the one that is checked.
    """
    case = problem.case
    _require_one_kv_head(case)
    flash_mla = import_module("flash_mla")
    q, kv, table, seqlens, *_ = tensors
    schedule = flash_mla.get_mla_metadata(seqlens, case.q_len * case.heads, 1)

    def call() -> Any:
        out, _ = flash_mla.flash_mla_with_kvcache(
            *(q, kv, table, seqlens, VALUE_DIM, *schedule),
            softmax_scale=HEAD_DIM**-0.5,
            causal=True,
        )
        return out

    return (call,)


def _fa3(bench: Bench, problem: Problem, tensors: tuple[Any, ...]) -> tuple[Call, ...]:
    """FlashAttention-3 with the latent part as its values, a call for each number of splits.

    Published times are its best over these numbers, so that is what counts here as well.
    """
    case = problem.case
    _require_one_kv_head(case)
    interface = import_module("flash_attn_interface")
    q, kv, table, seqlens, *_ = tensors
    q_latent, q_rope = q.split(_LATENT_AND_ROPE, dim=-1)
    latent, rope = kv.split(_LATENT_AND_ROPE, dim=-1)
    longest = table.shape[1] * PAGE_SIZE  # as the call reads it off the table: both split alike

    def call_with(splits: int) -> Call:
        schedule = interface.get_scheduler_metadata(
            *(case.batch, case.q_len, longest, case.heads, 1, HEAD_DIM - VALUE_DIM, seqlens),
            qkv_dtype=q.dtype,
            headdim_v=VALUE_DIM,
            page_size=PAGE_SIZE,
            causal=True,
            num_splits=splits,
        )
        return partial(
            interface.flash_attn_with_kvcache,
            *(q_rope, rope, latent),
            qv=q_latent,
            cache_seqlens=seqlens,
            page_table=table,
            softmax_scale=HEAD_DIM**-0.5,
            causal=True,
            scheduler_metadata=schedule,
            num_splits=splits,
        )

    return tuple(call_with(splits) for splits in _FA3_SPLITS)


def _require_one_kv_head(case: Case) -> None:
    if case.kv_heads > 1:
        raise ValueError("needs one kv head")


PEERS: dict[str, tuple[str, tuple[str, ...], Prepare]] = {
    "sdpa": ("torch SDPA", ("torch",), _sdpa),
    "triton": ("Triton", ("torch", "triton"), _triton),
    "flashinfer": ("FlashInfer", ("torch", "flashinfer"), _flashinfer),
    "flashmla": ("FlashMLA", ("torch", "flash_mla"), _flashmla),
    "fa3": ("FA3-MLA", ("torch", "flash_attn_interface"), _fa3),
}
"""What ``--peers`` calls a library, to its title, the modules it needs, and how calls are made.

A title is that of the library in ``peers.json``, where its published times are.
"""
