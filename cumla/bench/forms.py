# SPDX-License-Identifier: Apache-2.0
"""Dense decoding of the same work in several forms: each is checked, then timed in turns.

Forms of a group read as many bytes of cache and do as much arithmetic: with another dtype, in
arrays that lie in another way, with more kv heads, or with tokens in place of heads as query rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cumla import MLADecodePlan
from cumla.bench.cases import PAGE_SIZE, Case
from cumla.bench.ceilings import fill_normal
from cumla.bench.dense import CheckError, Inputs, check_some, inputs_of
from cumla.bench.gpu import DTYPES, Gpu
from cumla.bench.timing import GpuTimer, Timing, in_turns, time_cold
from cumla.launch.mla.shape import HEAD_DIM, VALUE_DIM

__all__ = ["FORMS", "Form", "FormGroup", "forms_row", "measure_forms"]

_WIDE = 640  # elements from one row to the next, where rows are slices of wider ones
# How a cache lies in memory, and how many elements of it a row takes.
_ROW_ELEMENTS = {
    "packed": HEAD_DIM,
    "wide rows": _WIDE,
    "pages apart": 2 * HEAD_DIM,
    "split": HEAD_DIM,
    "heads first": HEAD_DIM,
}
_DEVIATION = 0.1  # of queries and cache
_REPEATS = 10  # runs of a turn


@dataclass(frozen=True, slots=True)
class Form:
    """A way in which work comes.

    Attributes
    ----------
    name : str
        What the results call it.
    case : Case
        Its shape and dtype; requests of the same length.
    cache : str
        How the cache lies: ``"packed"``, (pages, 64, kv_heads, 576) without gaps; ``"wide rows"``,
        the first 576 columns of 640; ``"pages apart"``, every second page of an array;
        ``"split"``, latent and RoPE columns in two arrays; or ``"heads first"``, packed in the
        order (pages, kv_heads, 64, 576).
    wide_query : bool
        Whether the query is the first 576 columns of an array of 640.
    """

    name: str
    case: Case
    cache: str = "packed"
    wide_query: bool = False

    @property
    def cache_elements(self) -> int:
        """Elements of memory that the cache lies in, its gaps included."""
        rows = self.case.pages * PAGE_SIZE * self.case.kv_heads
        return rows * _ROW_ELEMENTS[self.cache]

    @property
    def query_shape(self) -> tuple[int, int, int, int]:
        """Of the array in which the query lies."""
        case = self.case
        return case.batch, case.q_len, case.heads, _WIDE if self.wide_query else HEAD_DIM


@dataclass(frozen=True, slots=True)
class FormGroup:
    """Forms of the same work.

    Attributes
    ----------
    varied : str
        What they differ in.
    forms : tuple of Form
        The first is the one by whose time the others' are divided.
    """

    varied: str
    forms: tuple[Form, ...]

    @property
    def name(self) -> str:
        """For example ``b128-s1-h16-kv4096 by kv heads``."""
        return f"{self.forms[0].case.name} by {self.varied}"

    def to_json(self) -> dict[str, Any]:
        """Name the first form's case as a row of the results file does."""
        return self.forms[0].case.to_json() | {"varied": self.varied}


def _by_layout(case: Case) -> FormGroup:
    """Vary the dtype, and how arrays lie in memory."""
    forms = (
        Form("packed bfloat16", case),
        Form("float16", replace(case, dtype="float16")),
        Form("cache: wide rows", case, cache="wide rows"),
        Form("cache: pages apart", case, cache="pages apart"),
        Form("cache: split", case, cache="split"),
        Form("query: wide rows", case, wide_query=True),
    )
    return FormGroup("dtype and layout", forms)


def _by_kv_heads(case: Case, *counts: int) -> FormGroup:
    """Turn requests into kv heads: as many query rows for each of them, in as many bytes."""
    forms = [Form("1 kv head", case)]
    for count in counts:
        heads = case.heads * count
        several = replace(case, batch=case.batch // count, heads=heads, kv_heads=count)
        forms.append(Form(f"{count} kv heads, tokens first", several))
        forms.append(Form(f"{count} kv heads, heads first", several, cache="heads first"))
    return FormGroup("kv heads", tuple(forms))


def _by_q_len(case: Case, *q_lens: int) -> FormGroup:
    """Turn heads into tokens: as many query rows, of which the first see a little less."""
    shapes = (replace(case, q_len=q_len, heads=case.heads // q_len) for q_len in (1, *q_lens))
    return FormGroup("q_len", tuple(Form(f"q_len {shape.q_len}", shape) for shape in shapes))


FORMS: tuple[FormGroup, ...] = (
    *(_by_layout(Case(128, 1, heads, 4096)) for heads in (16, 128)),
    _by_kv_heads(Case(128, 1, 16, 4096), 2, 4),
    _by_kv_heads(Case(128, 1, 128, 4096), 2),
    *(_by_q_len(Case(128, 1, rows, 4096), 2, 4, 8) for rows in (16, 32, 64, 128)),
)
"""What should take the same time, within the noise, in every form."""


class _Memory(NamedTuple):
    """Numbers of one dtype, as uint16: what all forms of a group lay their arrays out in."""

    cached: Any
    queries: Any


def measure_forms(gpu: Gpu, group: FormGroup, timer: GpuTimer = time_cold) -> dict[str, Timing]:
    """Check every form of a group, then time all of them in turns.

    Parameters
    ----------
    gpu : Gpu
        Entered.
    group : FormGroup
        What to run.
    timer : GpuTimer
        How to time a call.

    Returns
    -------
    dict
        From the name of each form to its time: the median of the turns, and their extremes.

    Raises
    ------
    CheckError
        A result is wrong.
    """
    dtypes = dict.fromkeys(form.case.dtype for form in group.forms)
    memory = {dtype: _filled(gpu, group, dtype) for dtype in dtypes}
    calls = {form.name: _checked_call(gpu, form, memory[form.case.dtype]) for form in group.forms}
    times = in_turns(partial(timer, gpu, repeats=_REPEATS), tuple(calls.values()))
    return dict(zip(calls, times, strict=True))


def _filled(gpu: Gpu, group: FormGroup, dtype: str) -> _Memory:
    """Allocate what the largest form of a dtype needs, and fill it."""
    forms = [form for form in group.forms if form.case.dtype == dtype]
    cached = gpu.empty((max(form.cache_elements for form in forms),), "uint16")
    queries = gpu.empty((max(prod(form.query_shape) for form in forms),), "uint16")
    fill_normal(gpu, cached, dtype, seed=2, deviation=_DEVIATION)
    fill_normal(gpu, queries, dtype, seed=3, deviation=_DEVIATION)
    return _Memory(cached, queries)


def _checked_call(gpu: Gpu, form: Form, memory: _Memory) -> partial[Any]:
    """Make a call with shuffled pages, its schedule ready, and check what it gives."""
    case = form.case
    shuffled = np.random.default_rng(case.pages).permutation(case.pages).astype(np.int32)
    pages = shuffled.reshape(case.batch, -1)
    parts = _cache_parts(form, memory.cached)
    q = _array(memory.queries, *form.query_shape)[..., :HEAD_DIM]
    inputs = inputs_of(gpu, case, q, parts[0], pages)
    call = _call(inputs, parts)
    call()
    try:
        check_some(gpu, inputs, case, partial(_gathered, gpu, pages, parts))
    except CheckError as error:
        raise CheckError(f"{form.name}: some requests of {case.name}: {error}") from error
    return call


def _cache_parts(form: Form, memory: Any) -> tuple[Any, ...]:
    """Lay a form's cache out: the arrays, one or two, whose columns are its 576."""
    pages, heads = form.case.pages, form.case.kv_heads
    if form.cache == "wide rows":
        return (_array(memory, pages, PAGE_SIZE, heads, _WIDE)[..., :HEAD_DIM],)
    if form.cache == "pages apart":
        return (_array(memory, 2 * pages, PAGE_SIZE, heads, HEAD_DIM)[::2],)
    if form.cache == "split":
        latent = _array(memory, pages, PAGE_SIZE, heads, VALUE_DIM)
        return latent, _array(memory[latent.size :], pages, PAGE_SIZE, heads, HEAD_DIM - VALUE_DIM)
    if form.cache == "heads first":
        return (_array(memory, pages, heads, PAGE_SIZE, HEAD_DIM).transpose(0, 2, 1, 3),)
    return (_array(memory, pages, PAGE_SIZE, heads, HEAD_DIM),)


def _array(memory: Any, *shape: int) -> Any:
    """Take an array without gaps from the beginning of memory."""
    return memory[: prod(shape)].reshape(shape)


def _call(inputs: Inputs, parts: tuple[Any, ...]) -> partial[Any]:
    """Make a call with its schedule ready."""
    q, _, table, seqlens, out, lse = inputs.arguments()
    columns = tuple(part.view(DTYPES[inputs.dtype]) for part in parts)
    cache = columns if len(columns) > 1 else columns[0]
    plan = MLADecodePlan.from_arrays(q, cache)
    plan.update(seqlens)
    return partial(plan.run, q, cache, table, seqlens, out=out, lse=lse)


def _gathered(
    gpu: Gpu, pages: NDArray[np.int32], parts: tuple[Any, ...], requests: NDArray[np.int64]
) -> Any:
    """Bring the pages of some requests together, packed; row i of `pages` is of request i."""
    own = gpu.upload(pages[requests].ravel())
    gathered = gpu.empty((own.size, *parts[0].shape[1:3], HEAD_DIM), "uint16")
    begin = 0
    for part in parts:
        end = begin + part.shape[-1]
        gathered[..., begin:end] = part[own]
        begin = end
    return gathered


def forms_row(group: FormGroup, times: dict[str, Timing]) -> dict[str, Any]:
    """Put the times of a group's forms beside that of its first.

    Parameters
    ----------
    group : FormGroup
        What ran.
    times : dict
        What `measure_forms` gave.

    Returns
    -------
    dict
        A row of the results: the first form's case, what the forms differ in, and a list ``forms``.
    """
    usual = times[group.forms[0].name].us
    return group.to_json() | {
        "forms": [
            {"form": name, **time.figures(), "ratio": time.us / usual}
            for name, time in times.items()
        ]
    }
