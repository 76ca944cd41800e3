# SPDX-License-Identifier: Apache-2.0
"""Calls of sparse MLA over rows of 512 columns: in 16 bits, e4m3, or in a format of bytes.

Everything but columns and caches is as in sparse_problem.py. A case of V4 or V4.1 may have a second
cache; its rows are numbered after those of the first. Poison is NaN in columns, scales and
paddings.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from math import log2
from typing import Any

import numpy as np

import cumla
from tests.gpu.tools import oracle, sparse_problem
from tests.gpu.tools.fp8_problem import FACTOR, e4m3_bits, e4m3_numbers
from tests.gpu.tools.problem import INF_BITS, NAN_BITS, VALUE_DIM, normal_bits, typed
from tests.gpu.tools.sparse_problem import (
    FEW,
    LESS,
    QUERY,
    SIZE,
    WILD_SCALE,
    Seen,
    SparseCase,
    SparseProblem,
)

Array = Any
FP8_DIM, ROPE_DIM, SCALES = 448, 64, 7
ROW_BYTES, SCALE_BYTES, SLOT_BYTES = 576, 8, 584
TILE = 64  # columns that share a scale
WILD = 2.0**-8
CACHES = ("kv_cache", "extra_kv_cache")
FOLLOWED = {"v32_no_rope": 528, "v41": 528, "v41_fp4": 288}
"""Bytes of rows whose scales follow their columns, by the name of the format."""
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@dataclass(frozen=True)
class V4Case(SparseCase):
    """One call; `form` is "v4", one of FOLLOWED, "e4m3", "bfloat16" or "float16"."""

    heads: int = 64
    form: str = "v4"
    extra: int = 0  # entries of lists of a second cache
    extra_page_size: int = 2
    extra_form: str = ""  # of the second cache; "": as the first

    @property
    def name(self) -> str:
        """A short test id."""
        extra = f"-extra{self.extra}-page{self.extra_page_size}" if self.extra else ""
        extra += f"-{self.extra_form}" if self.extra_form else ""
        return super().name + extra

    @property
    def is_fp8(self) -> bool:
        """Return whether the cache has no numbers of 16 bits alone."""
        return "float" not in self.form

    @property
    def has_scales(self) -> bool:
        """Return whether rows have scales of their own."""
        return self.is_fp8 and self.form != "e4m3"

    @property
    def is_rounded(self) -> bool:
        """As of packed rows."""
        return self.form == "v32_no_rope"

    @property
    def formats(self) -> dict[str, str]:
        """Return what has to be named."""
        if self.form not in FOLLOWED:
            return {}
        extra = {"extra_cache_format": self.extra_form} if self.extra_form and self.extra else {}
        return {"cache_format": self.form, **extra}

    @property
    def softmax_scale(self) -> float:
        """Factor of the scores."""
        wild = self.has_scales and self.scales == "wild"
        if wild and self.form == "v32_no_rope":
            return self.steep * WILD_SCALE
        return self.steep * VALUE_DIM**-0.5 * (WILD if wild else 1)

    @property
    def second(self) -> V4Case:
        """Return what the lists of the second cache are made by."""
        return dataclasses.replace(
            self,
            form=self.extra_form or self.form,
            topk=self.extra,
            page_size=self.extra_page_size,
            places="slots",
            sinks="none",
            seed=self.seed + 5,
        )


@dataclass
class V4Problem(SparseProblem):
    """Arrays of one call; `memory` is what the caches are views of."""

    extra_slots: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    extra_pages: int = 0
    memory: dict[str, Array] = field(default_factory=dict)
    raw: dict[str, Array] = field(default_factory=dict)  # (rows, bytes) of caches of FOLLOWED

    def named(self) -> np.ndarray:
        """Numbers of the rows that both lists name, (tokens, topk + extra)."""
        case = self.case
        assert isinstance(case, V4Case)
        own = super().named()
        if not case.extra:
            return own
        prefix = "extra_"
        lists = {n.removeprefix(prefix): a for n, a in self.lists.items() if n.startswith(prefix)}
        other = sparse_problem.named_rows(case.second, lists, self.extra_slots, self.extra_pages)
        other = np.where(other >= 0, other + len(self.slots), -1)
        return np.concatenate([own, other], axis=1)

    def seen(self, *, rounded: bool) -> Seen:
        """The rows as they are: the kernel's bfloat16 holds them."""
        xp = self.xp
        assert isinstance(self.case, V4Case)
        if self.case.form == "v32_no_rope":
            latent = xp.asarray(e4m3_numbers())[self.latent.astype(np.int32)]
            whole = sparse_problem._host(self.scales).astype(np.float64)
            keys = values = latent * xp.asarray(np.repeat(whole, 128, axis=1))
            wide, is_wide = values, xp.zeros(len(keys), bool)
            if rounded:
                values, wide, is_wide = self._rounded(sparse_problem._host(latent))
            return Seen(keys, values, wide, is_wide)
        if self.raw:
            forms = (self.case.form, self.case.second.form)
            parts = [
                decoded(xp, self.raw[name], form)
                for name, form in zip(CACHES, forms, strict=True)
                if name in self.raw
            ]
            keys = xp.concatenate(parts)
        elif self.case.form == "e4m3":
            keys = xp.asarray(e4m3_numbers())[self.latent.astype(np.int32)] * FACTOR
        elif not self.case.is_fp8:
            keys = oracle.widen(xp, self.latent, self.case.dtype)
        else:
            assert self.scales is not None
            exponents = self.scales[:, :SCALES].astype(xp.float64) - 127
            factors = xp.where(self.scales[:, :SCALES] == 255, np.nan, xp.exp2(exponents))
            numbers = xp.asarray(e4m3_numbers())[self.latent.astype(np.int32)]
            rope = oracle.widen(xp, self.rope, "bfloat16")
            keys = xp.concatenate([numbers * xp.repeat(factors, TILE, axis=1), rope], axis=-1)
        return Seen(keys, keys, keys, xp.zeros(len(keys), bool))

    def view_of(self, name: str, memory: Array) -> Array:
        """The argument in memory of a cache that is not of 16 bits alone."""
        case = self.case
        assert isinstance(case, V4Case)
        page_size = case.page_size if name == "kv_cache" else case.extra_page_size
        if name not in self.raw and case.form != "e4m3":
            return as_slots(memory, page_size)
        width = self.raw.get(name, self.latent).shape[1]
        return memory[:, :page_size, :, :width]

    def plan(self, **options: Any) -> cumla.MLASparsePlan:
        """A plan for these arrays, updated."""
        names = ("q", "kv_cache", "indices", "extra_kv_cache", "extra_indices")
        made_of = {name: self.arguments[name] for name in names if name in self.arguments}
        assert isinstance(self.case, V4Case)
        plan = cumla.MLASparsePlan.from_arrays(**made_of, **self.case.formats, **options)
        plan.update(**self.lengths)
        return plan

    @property
    def lengths(self) -> dict[str, Any]:
        """Return what an update of a plan takes."""
        names = ("topk_lens", "extra_topk_lens")
        return {name: self.arguments[name] for name in names if name in self.arguments}

    @property
    def inputs(self) -> dict[str, Any]:
        """Return what a run of a plan takes, but for its outputs."""
        assert isinstance(self.case, V4Case)
        others = {*self.lengths, *self.case.formats}
        return {name: a for name, a in self.arguments.items() if name not in others}


def make_v4(xp: Any, case: V4Case, num_pages: int | None = None) -> V4Problem:
    """Build the arrays of a case on the device of ``xp``, the same ones every time."""
    rng = np.random.default_rng(7000 + case.seed)
    slots, pages = _some_slots(rng, case, num_pages)
    lists = sparse_problem.lists_of(case, rng, slots, pages)
    extra_slots, extra_pages = np.empty(0, np.int64), 0
    if case.extra:
        extra_slots, extra_pages = _some_slots(rng, case.second, None)
        extra = sparse_problem.lists_of(case.second, rng, extra_slots, extra_pages)
        lists |= {f"extra_{name}": array for name, array in extra.items()}
    rows, offset = len(slots) + len(extra_slots), 66666 * (case.seed + 1)
    scales, rope, raw = None, None, {}
    if case.form in FOLLOWED:
        counts = len(slots), len(extra_slots)
        latent = np.empty(0)
        for name, form, count in zip(CACHES, (case.form, case.second.form), counts, strict=True):
            if count:
                raw[name] = _raw_rows(xp, case, form, rng, count, offset)
        if case.form == "v32_no_rope":
            latent = raw["kv_cache"][:, :VALUE_DIM]
            scales = xp.ascontiguousarray(raw["kv_cache"][:, VALUE_DIM:]).view(xp.float32)
    elif case.form == "e4m3":
        latent = e4m3_bits(xp, (rows, VALUE_DIM), offset)
    elif case.is_fp8:
        latent = e4m3_bits(xp, (rows, FP8_DIM), offset)
        rope = normal_bits(xp, (rows, ROPE_DIM), "bfloat16", SIZE, 5 * offset)
        scales = xp.asarray(_exponents(case, rng, rows))
    else:
        latent = normal_bits(xp, (rows, VALUE_DIM), case.dtype, SIZE, offset)
    problem = V4Problem(
        *(xp, case, slots, pages, latent, rope, scales, None, lists),
        {name: xp.asarray(array) for name, array in lists.items()},
        extra_slots,
        extra_pages,
        raw=raw,
    )
    problem.arguments |= case.formats
    if case.form == "e4m3":
        problem.arguments["kv_scale"] = FACTOR
    problem.arguments["q"] = _query(problem, offset)
    if case.softmax_scale != VALUE_DIM**-0.5:
        problem.arguments["softmax_scale"] = case.softmax_scale
    place_caches(problem)
    return problem


def _some_slots(
    rng: np.random.Generator, case: V4Case, num_pages: int | None
) -> tuple[np.ndarray, int]:
    """Choose which slots of a cache hold rows, and how many pages it has."""
    rows = max(min(case.topk, 1500), 300)
    if num_pages is None:
        num_pages = -(-2 * rows // case.page_size) + 3
    count = num_pages * case.page_size
    slots = rng.permutation(count)[:rows]
    slots[-1] = count - 1 if count - 1 not in slots else slots[-1]
    return slots, num_pages


def decoded(xp: Any, rows: Array, form: str) -> Array:
    """The numbers that rows of V4.1 stand for, float64."""
    if form == "v41_fp4":
        codes = xp.stack([rows[:, :256] & 15, rows[:, :256] >> 4], axis=-1).reshape(len(rows), -1)
        numbers = xp.asarray(E2M1)[codes & 7] * xp.where(codes & 8, -1.0, 1.0)
        factors = xp.asarray(e4m3_numbers())[rows[:, 256:].astype(np.int32)]
        return numbers * xp.repeat(factors, 16, axis=1)
    exponents = rows[:, VALUE_DIM:].astype(xp.float64) - 127
    factors = xp.where(rows[:, VALUE_DIM:] == 255, np.nan, xp.exp2(exponents))
    numbers = xp.asarray(e4m3_numbers())[rows[:, :VALUE_DIM].astype(np.int32)]
    return numbers * xp.repeat(factors, 32, axis=1)


def _raw_rows(
    xp: Any, case: V4Case, form: str, rng: np.random.Generator, rows: int, offset: int
) -> Array:
    """Columns, and the scales that follow them."""
    if form == "v41_fp4":
        low, high = (8, 60) if case.scales == "wild" else (24, 40)  # codes of e4m3
        scales = rng.integers(low, high, (rows, 32)).astype(np.uint8)
        columns = xp.asarray(rng.integers(0, 256, (rows, 256)).astype(np.uint8))
    elif form == "v41":
        usual = 127 + round(log2(FACTOR))
        low, high = (-12, 7) if case.scales == "wild" else (-2, 3)
        scales = rng.integers(usual + low, usual + high, (rows, 16)).astype(np.uint8)
        columns = e4m3_bits(xp, (rows, VALUE_DIM), offset)
    else:
        scales = sparse_problem._scales(case, rng, rows).view(np.uint8)
        columns = e4m3_bits(xp, (rows, VALUE_DIM), offset)
    if case.scales == "zero" and form != "v32_no_rope":
        scales[rng.random(scales.shape) < 0.3] = 0
    return xp.concatenate([columns, xp.asarray(scales)], axis=1)


def _exponents(case: V4Case, rng: np.random.Generator, rows: int) -> np.ndarray:
    """Exponents of scales, biased by 127, and a byte that nobody reads."""
    usual = 127 + round(log2(FACTOR))
    low, high = (-12, 7) if case.scales == "wild" else (-2, 3)
    exponents = rng.integers(usual + low, usual + high, (rows, SCALE_BYTES))
    if case.scales == "zero":
        exponents[rng.random(exponents.shape) < 0.3] = 0
    exponents[:, SCALES] = rng.integers(0, 256, rows)
    return exponents.astype(np.uint8)


def _query(problem: V4Problem, offset: int) -> Any:
    """The argument; its bits are the problem's."""
    xp, case = problem.xp, problem.case
    shape = (case.tokens, case.heads, VALUE_DIM)
    bits = normal_bits(xp, shape, case.dtype, QUERY, 3 * offset)
    few = (problem.named() >= 0).sum(axis=1) < FEW
    if few.any():
        small = normal_bits(xp, shape, case.dtype, QUERY * LESS, 3 * offset)
        bits = xp.where(xp.asarray(few)[:, None, None], small, bits)
    problem.q_bits = bits
    room = 16 if case.query_form == "padded" else 0
    lead = problem.out_shape[:-1]
    whole = xp.full((*lead, VALUE_DIM + room), NAN_BITS[case.dtype], dtype=xp.uint16)
    whole[..., :VALUE_DIM] = bits.reshape(*lead, VALUE_DIM)
    return typed(whole[..., :VALUE_DIM], case.dtype)


def place_caches(problem: V4Problem) -> None:
    """Lay the rows out in caches, which become arguments."""
    xp, case = problem.xp, problem.case
    assert isinstance(case, V4Case)
    sizes = (case.page_size, case.extra_page_size)
    layouts = ((problem.slots, problem.num_pages), (problem.extra_slots, problem.extra_pages))
    begin = 0
    for name, page_size, (slots, pages) in zip(CACHES, sizes, layouts, strict=True):
        some = slice(begin, begin + len(slots))
        begin += len(slots)
        if not len(slots):
            continue
        at = [xp.asarray(i) for i in np.divmod(slots, page_size)]
        if name in problem.raw or case.form == "e4m3":
            rows = problem.raw.get(name, problem.latent)
            width = rows.shape[1] + 16 * case.gaps
            memory = xp.full((pages, page_size + case.gaps, 1, width), 0x7F, "u1")
            memory[..., ::3] = 0xFF
            memory[at[0], at[1], 0, : rows.shape[1]] = rows
            problem.memory[name] = memory
            problem.arguments[name] = problem.view_of(name, memory)
            continue
        if not case.is_fp8:
            width = VALUE_DIM + 8 * case.gaps
            memory = xp.full((pages, page_size + case.gaps, 1, width), NAN_BITS[case.dtype], "u2")
            memory[:, 1::2] = INF_BITS[case.dtype]
            memory[at[0], at[1], 0, :VALUE_DIM] = problem.latent[some]
            problem.memory[name] = memory
            problem.arguments[name] = typed(memory[:, :page_size, :, :VALUE_DIM], case.dtype)
            continue
        step = -(-page_size * SLOT_BYTES // ROW_BYTES) * ROW_BYTES + ROW_BYTES * case.gaps
        memory = xp.full((pages, step), 0x7F, "u1")
        memory[:, ::3] = 0xFF
        assert problem.scales is not None
        bytes_of = xp.ascontiguousarray(problem.rope[some]).view(xp.uint8)
        rows = xp.concatenate([problem.latent[some], bytes_of], axis=1)
        flat, page = memory.reshape(-1), at[0] * step
        row_at = page + at[1] * ROW_BYTES
        flat[row_at[:, None] + xp.arange(ROW_BYTES)] = rows
        scale_at = page + page_size * ROW_BYTES + at[1] * SCALE_BYTES
        flat[scale_at[:, None] + xp.arange(SCALE_BYTES)] = problem.scales[some]
        problem.memory[name] = memory
        problem.arguments[name] = problem.view_of(name, memory)


def as_slots(memory: Array, page_size: int) -> Array:
    """See pages of bytes as (num_pages, page_size, 1, 584); what is behind them stays apart."""
    pages = memory[:, : page_size * SLOT_BYTES]
    return pages.reshape(len(memory), page_size, 1, SLOT_BYTES)


CASES = (
    V4Case(batch=2, q_len=2, topk=700, lists="mixed", lengths="tokens", gaps=True),
    V4Case(batch=2, topk=128, extra=512, page_size=256, lengths="requests", sinks="finite"),
    V4Case(heads=128, topk=300, extra=70, places="rows", lists="blocks", lengths="tokens"),
    V4Case(heads=17, topk=130, scales="wild", page_size=53, query_form="padded", extra=1),
    V4Case(heads=8, topk=64, scales="zero", page_size=1, operation="tokens", places="requests"),
    V4Case(batch=1, topk=2049, extra=640, extra_page_size=64, lists="first", outputs="float32"),
    V4Case(batch=74, topk=63, extra=64, lists="absent", lengths="requests"),
    V4Case(batch=200, heads=128, topk=128, extra=512, extra_page_size=64, page_size=256),
    V4Case(batch=3, heads=96, topk=576, extra=200, lists="same", outputs="allocated"),
    V4Case(batch=5, q_len=4, heads=64, topk=1, extra=1, operation="tokens", sinks="0"),
    V4Case(batch=3, heads=1, topk=4096, extra=65, lists="sorted", lengths="tokens"),
    V4Case(form="v41", batch=2, topk=128, extra=512, page_size=256, sinks="finite", gaps=True),
    V4Case(form="v41", heads=17, topk=130, scales="wild", page_size=53, query_form="padded"),
    V4Case(form="v41", batch=2, q_len=2, topk=700, lists="mixed", lengths="tokens", places="rows"),
    V4Case(form="v41", batch=200, heads=128, topk=128, extra=512, extra_form="v41_fp4"),
    V4Case(form="v41", topk=70, extra=130, lists="mixed", gaps=True, extra_form="v41_fp4"),
    V4Case(form="v41", heads=8, topk=1, extra=640, scales="zero", extra_form="v41_fp4"),
    V4Case(form="v41_fp4", batch=1, topk=2049, extra=300, extra_form="v41", outputs="float32"),
    V4Case(form="v41_fp4", batch=5, q_len=4, topk=130, operation="tokens", lengths="requests"),
    V4Case(form="v32_no_rope", heads=16, topk=300, page_size=1, gaps=True, lists="mixed"),
    V4Case(form="v32_no_rope", heads=8, batch=1, topk=2176, scales="zero", lengths="tokens"),
    V4Case(form="v32_no_rope", heads=64, topk=700, places="rows", lists="blocks", sinks="finite"),
    V4Case(form="v32_no_rope", heads=24, topk=300, scales="wild", lists="blocks", page_size=1),
    V4Case(form="v32_no_rope", heads=128, batch=70, topk=130, outputs="float32", scales="powers"),
    V4Case(form="e4m3", heads=16, topk=300, lists="mixed", gaps=True, lengths="tokens"),
    V4Case(form="e4m3", heads=64, batch=1, topk=2176, sinks="finite", query_form="padded"),
    V4Case(form="e4m3", heads=128, topk=640, operation="tokens", batch=40, q_len=2, page_size=1),
    V4Case(form="bfloat16", heads=64, topk=512, lists="mixed", gaps=True, lengths="tokens"),
    V4Case(form="bfloat16", heads=128, topk=640, operation="tokens", batch=40, q_len=2),
    V4Case(form="bfloat16", heads=16, topk=300, places="rows", sinks="finite", page_size=16),
    V4Case(form="float16", heads=24, topk=200, outputs="float32", query_form="padded"),
    V4Case(form="float16", heads=128, topk=130, batch=200, page_size=1, lengths="requests"),
)
"""Every form and mode at least once."""
