# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's logits in turns with cumla's, on the same arrays, where it is installed.

They differ by less than a GPU does from one minute to the next, so each is timed several times,
one behind the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from bench.peers import Turns
from bench.sections import calls
from bench.sections.host import as_tensor
from bench.sections.indexer import (
    DIM,
    HEADS,
    DecodeStep,
    LogitsCase,
    PagedLogitsCase,
    PrefillLogitsCase,
    PrefillStep,
)
from bench.turns import in_turns
from cumla.bench.cases import PAGE_SIZE
from cumla.bench.gpu import Gpu
from cumla.bench.section import Bench

__all__ = ["DEEP_GEMM", "LogitsPeerRuns", "run_deep_gemm"]

DEEP_GEMM = "DeepGEMM"
_MODULES = ("torch", "deep_gemm")

Call = Callable[[], Any]
Pairs = dict[str, tuple[Call, Call]]
"""Operation, as rows of the results name it, to cumla's call of it and DeepGEMM's."""


class LogitsPeerRuns(NamedTuple):
    """What DeepGEMM took for a case.

    Attributes
    ----------
    turns : dict
        Operation to its times: the logits, and for pages ``paged_schedule`` as well.
    notes : list of str
        Why there are none.
    """

    turns: dict[str, Turns]
    notes: list[str]


def run_deep_gemm(bench: Bench, case: LogitsCase) -> LogitsPeerRuns:
    """Check DeepGEMM's logits against float64, and time them in turns with cumla's.

    Those of a prefill are cleaned; paged ones are not by DeepGEMM, whose newer versions cannot.
    Whatever it raises becomes a note.
    """
    missing = [module for module in _MODULES if find_spec(module) is None]
    if missing:
        return LogitsPeerRuns({}, [f"{DEEP_GEMM}: {' and '.join(missing)} not installed"])
    try:
        torch, deep_gemm = (import_module(name) for name in _MODULES)
        gpu = bench.gpu
        with gpu.torch_stream(torch):
            if isinstance(case, PrefillLogitsCase):
                pairs = _prefill(gpu, case, torch, deep_gemm)
            else:
                pairs = _paged(gpu, case, torch, deep_gemm)
            turns = {name: Turns(*in_turns(bench.time, pair)) for name, pair in pairs.items()}
        return LogitsPeerRuns(turns, [])
    except Exception as error:  # of any kind, from code that is not ours
        reason = str(error).strip().partition("\n")[0]
        note = f"{DEEP_GEMM}: {case.name}: {type(error).__name__}: {reason}"
        return LogitsPeerRuns({}, [note])


def _prefill(gpu: Gpu, case: PrefillLogitsCase, torch: Any, deep_gemm: Any) -> Pairs:
    step = PrefillStep(gpu, case)
    step.run()
    step.check()
    q, (k, scale), weights, ks, ke = step.inputs
    call = partial(
        deep_gemm.fp8_mqa_logits,
        _as_fp8(torch, q),
        (_as_fp8(torch, k), as_tensor(torch, scale)),
        *(as_tensor(torch, array) for array in (weights, ks, ke)),
        clean_logits=True,
    )
    gpu.fill_bytes(step.out, 0xFF)
    as_tensor(torch, step.out).copy_(call())
    step.check()
    return {"mqa_logits": (step.run, call)}


def _paged(gpu: Gpu, case: PagedLogitsCase, torch: Any, deep_gemm: Any) -> Pairs:
    step = DecodeStep(gpu, case, caches=1)
    (own,) = step.calls
    own()
    step.check()
    # What each query sees: the one form of lengths that all versions take.
    lengths = as_tensor(torch, gpu.upload(np.array([case.seen] * case.batch, np.int32)))
    parts = deep_gemm.get_num_sms() // (2 if case.next_n == 4 else 1)  # as its own tests do
    schedule = partial(deep_gemm.get_paged_mqa_logits_metadata, lengths, PAGE_SIZE, parts)
    call = partial(
        deep_gemm.fp8_paged_mqa_logits,
        _as_fp8(torch, step.q),
        as_tensor(torch, step.cache),
        as_tensor(torch, step.weights),
        lengths,
        as_tensor(torch, step.tables[0]),
        schedule(),
        case.kv_len,
        clean_logits=False,
    )
    gpu.fill_bytes(step.out, 0xFF)
    as_tensor(torch, step.out).copy_(call())
    step.check(clean=False)
    shape = (case.batch, case.next_n, HEADS, DIM)
    update = calls.logits_schedule(shape, step.pages.shape[-1], step.kv_lens)
    return {"paged_mqa_logits": (own, call), "paged_schedule": (update, schedule)}


def _as_fp8(torch: Any, array: Any) -> Any:
    return as_tensor(torch, array).view(torch.float8_e4m3fn)
