# SPDX-License-Identifier: Apache-2.0
"""Dense decoding of the same work in several forms: each is checked, then timed in turns.

Forms of a group read as many bytes of cache and do as much arithmetic: with another dtype, in
arrays that lie in another way, with more kv heads, or with tokens in place of heads as query rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.sections.mla import check_some
from bench.turns import time_by_name
from cumla.bench.cases import PAGE_SIZE, Case
from cumla.bench.gpu import DTYPES
from cumla.bench.problem import Problem, decode, filled
from cumla.bench.section import Bench, Call, Column, Row, Section, columns
from cumla.launch.mla.shape import HEAD_DIM, VALUE_DIM

__all__ = ["SECTION", "Form", "FormGroup"]

_WIDE = 640  # elements from one row to the next, where rows are slices of wider ones
# How a cache lies in memory, and how many elements of it a row takes.
_ROW_ELEMENTS = {
    "packed": HEAD_DIM,
    "wide rows": _WIDE,
    "pages apart": 2 * HEAD_DIM,
    "split": HEAD_DIM,
    "heads first": HEAD_DIM,
}


@dataclass(frozen=True, slots=True)
class Form:
    """One form of the work."""

    name: str  # its name in the results
    case: Case  # its shape and dtype; requests of the same length
    # How the cache lies: ``"packed"``, (pages, 64, kv_heads, 576) without gaps; ``"wide rows"``,
    # the first 576 columns of 640; ``"pages apart"``, every second page of an array; ``"split"``,
    # latent and RoPE columns in two arrays; or ``"heads first"``, packed in the order (pages,
    # kv_heads, 64, 576).
    cache: str = "packed"
    wide_query: bool = False  # whether the query is the first 576 columns of an array of 640

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
    """Forms of the same work."""

    varied: str  # what they differ in
    forms: tuple[Form, ...]  # the first is the one by whose time the others' are divided

    @property
    def name(self) -> str:
        """For example ``b128-s1-h16-kv4096 by kv heads``."""
        return f"{self.forms[0].case.name} by {self.varied}"

    def to_json(self) -> dict[str, Any]:
        """Name the first form's case as a row of the results file does."""
        return self.forms[0].case.to_json() | {"varied": self.varied}


def by_layout(case: Case) -> FormGroup:
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


def by_kv_heads(case: Case, *counts: int) -> FormGroup:
    """Turn requests into kv heads: as many query rows for each of them, in as many bytes."""
    forms = [Form("1 kv head", case)]
    for count in counts:
        heads = case.heads * count
        several = replace(case, batch=case.batch // count, heads=heads, kv_heads=count)
        forms.append(Form(f"{count} kv heads, tokens first", several))
        forms.append(Form(f"{count} kv heads, heads first", several, cache="heads first"))
    return FormGroup("kv heads", tuple(forms))


def by_q_len(case: Case, *q_lens: int) -> FormGroup:
    """Turn heads into tokens: as many query rows, of which the first see a little less."""
    shapes = (replace(case, q_len=q_len, heads=case.heads // q_len) for q_len in (1, *q_lens))
    return FormGroup("q_len", tuple(Form(f"q_len {shape.q_len}", shape) for shape in shapes))


def _measure(bench: Bench, group: FormGroup) -> Row:
    """Check every form of a group, then time all of them in turns, over the same memory."""
    memory = {}
    for dtype in dict.fromkeys(form.case.dtype for form in group.forms):
        forms = [form for form in group.forms if form.case.dtype == dtype]
        cached = max(form.cache_elements for form in forms)
        queries = max(prod(form.query_shape) for form in forms)
        memory[dtype] = (
            filled(bench.gpu, (cached,), dtype, seed=2),
            filled(bench.gpu, (queries,), dtype, seed=3),
        )
    checked = {form.name: _checked(bench, form, *memory[form.case.dtype]) for form in group.forms}
    times = time_by_name(bench, checked)
    usual = times[group.forms[0].name].us
    return {
        "forms": [
            {"form": name, **time.figures(), "ratio": time.us / usual}
            for name, time in times.items()
        ]
    }


def _checked(bench: Bench, form: Form, cached: Any, queries: Any) -> Call:
    """Make a call with shuffled pages, its schedule ready, and check what it gives."""
    gpu, case = bench.gpu, form.case
    pages = np.random.default_rng(case.pages).permutation(case.pages).astype(np.int32)
    pages = pages.reshape(case.batch, -1)
    parts = cache_parts(form, cached)
    q = _array(queries, *form.query_shape)[..., :HEAD_DIM]
    problem = Problem.of(gpu, case, q, parts[0], pages[None])
    columns = tuple(part.view(DTYPES[case.dtype]) for part in parts)
    q, _, *others = problem.arguments()
    call = decode(q, columns if len(columns) > 1 else columns[0], *others)
    call()

    def gather(requests: NDArray[np.int64]) -> Any:
        """Bring the pages of some requests together, packed."""
        own = gpu.upload(pages[requests].ravel())
        gathered = gpu.empty((own.size, *parts[0].shape[1:3], HEAD_DIM), "uint16")
        begin = 0
        for part in parts:
            end = begin + part.shape[-1]
            gathered[..., begin:end] = part[own]
            begin = end
        return gathered

    check_some(gpu, form.name, problem, gather)
    return call


def cache_parts(form: Form, memory: Any) -> tuple[Any, ...]:
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


SECTION = Section(
    name="forms",
    title="forms: ",
    # all forms of a group should take the same time, within the noise
    cases=(
        *(by_layout(Case(128, 1, heads, 4096)) for heads in (16, 128)),
        by_kv_heads(Case(128, 1, 16, 4096), 2, 4),
        by_kv_heads(Case(128, 1, 128, 4096), 2),
        *(by_q_len(Case(128, 1, rows, 4096), 2, 4, 8) for rows in (16, 32, 64, 128)),
    ),
    measure=_measure,
    shape=(*columns("batch", "heads", "kv_len"), Column("by", "varied")),
    each="forms",
    figures=(
        Column("form", "form"),
        Column("us", "us", "us"),
        Column("ratio to the first", "ratio", ".3f"),
    ),
)
