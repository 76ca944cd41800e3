# SPDX-License-Identifier: Apache-2.0
"""`cumla.attention` and its plan with masks: what they compute on the CPU, against the rule of each
mask for a query and a key, what they refuse, and masks in the frameworks' programs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla.core.frameworks import framework_of_type
from cumla.core.spec import SPECS
from tests.calls import BF16, aligned, int32, keys_in_pages, refused
from tests.fake_cuda import FakeBindings, FakeCuPy
from tests.mha.attention_cases import ROUNDING
from tests.mha.mask_cases import (
    Batch,
    Case,
    Query,
    chunk_cases,
    depths,
    flag_cases,
    shown,
    span_cases,
    tree_case,
    trees,
    window_cases,
)
from tests.selection import some

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
KINDS: dict[str, Any] = {"bfloat16": BF16, "float16": np.dtype(np.float16)}
KINDS |= {"float32": np.dtype(np.float32)}

# --- the grid -------------------------------------------------------------------------------------

FACTORS: dict[str, tuple[Any, ...]] = {
    "mask": ("windows", "chunks", "flags", "spans", "tree", "tree by depth", "prefix"),
    "columns": ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512)),
    "dtype": ("bfloat16", "float16", "float32"),
    "cache": ("same", "same", "e4m3"),
    "page_size": (1, 16, 64, 0),
    "q_lens": ((1, 1, 1), (4, 4, 4), (16, 16, 16), (64, 64, 64), (0, 8, 3, 0, 1), "equal"),
    "heads": ((2, 2), (4, 1), (8, 1), (16, 1), (6, 3)),
    "sinks": (False, False, True),
    "softcap": (None, None, 4.0),
    "pages": ("table", "list"),
}


class Sample(NamedTuple):
    """One point of the grid."""

    mask: str
    columns: tuple[int, int]
    dtype: str
    cache: str
    page_size: int
    q_lens: Any
    heads: tuple[int, int]
    sinks: bool
    softcap: float | None
    pages: str
    seed: int


def samples(count: int) -> list[Sample]:
    """List the same points every time; each mask comes equally often."""
    rng = random.Random(20261129)
    found = []
    for seed in range(count):
        chosen = {name: rng.choice(values) for name, values in FACTORS.items()}
        chosen["mask"] = FACTORS["mask"][seed % len(FACTORS["mask"])]
        found.append(Sample(**chosen, seed=seed))
    return found


class Problem(NamedTuple):
    """A call, its keys and values by request, and its mask."""

    given: dict[str, Any]
    keys: list[Any]
    values: list[Any]
    case: Case
    mask: cumla.AttentionMask


def case_of(sample: Sample, batch: Batch) -> Case:
    """Choose one of the masks of the sample's kind."""
    rng = random.Random(sample.seed)
    drafts = max(1, *batch.q_lens)
    tree = trees(len(batch.q_lens), drafts)
    if sample.mask == "tree":
        forms = ("square", "uint8", "uint32", "full", "full bits")
        return tree_case(batch, tree, rng.choice(forms))
    if sample.mask == "tree by depth":
        positions = np.zeros(batch.total, np.int32)
        for q in batch.queries():
            positions[q.row] = q.kv_len - q.q_len + depths(tree)[q.request, q.index]
        return tree_case(batch._replace(positions=positions), tree, "square", 3)
    makers = {"windows": window_cases, "chunks": chunk_cases, "flags": flag_cases}
    if sample.mask == "prefix":
        return rng.choice([*window_cases(batch)])
    return rng.choice([*(makers | {"spans": span_cases})[sample.mask](batch)])


def make(sample: Sample) -> Problem:
    rng = np.random.default_rng(sample.seed)
    equal = sample.q_lens == "equal"
    q_lens = (3, 3) if equal else sample.q_lens
    kv_lens = tuple(int(n + rng.integers(0, 70)) for n in q_lens)
    batch = Batch(q_lens, kv_lens, *((0, 0) if equal else (1, 2)))
    (heads, kv_heads), (columns, of_values) = sample.heads, sample.columns
    kind = KINDS[sample.dtype]
    fits = sample.dtype != "float32" and max(sample.columns) <= 256
    stored = E4M3 if sample.cache == "e4m3" and fits else kind

    def numbers(*shape: int, to: Any = kind) -> Any:
        return rng.standard_normal(shape).clip(-3, 3).astype(to)

    given: dict[str, Any] = {"q": numbers(batch.total, heads, columns)}
    places = batch.places
    given |= {n: places[n] for n in ("qo_indptr", "kv_lens")}
    size = sample.page_size or 1
    counts = [-(-n // size) for n in kv_lens]
    pages = rng.permutation(sum(counts) + 2).astype(np.int32)
    listed = np.split(pages[: sum(counts)], np.cumsum(counts)[:-1])
    caches = [numbers(len(pages), size, kv_heads, n, to=stored) for n in (columns, of_values)]
    keys, values = (
        [cache[p].reshape(-1, *cache.shape[2:])[:n] for p, n in zip(listed, kv_lens, strict=True)]
        for cache in caches
    )
    bounds = np.cumsum([0, *counts]).astype(np.int32)
    if not sample.page_size:  # rows, without pages
        caches = [np.concatenate(rows) for rows in (keys, values)]
        given["kv_indptr"] = bounds
        del given["kv_lens"]
    elif sample.pages == "list":
        given |= {"kv_indptr": bounds, "kv_indices": np.concatenate(listed)}
    else:
        table = np.full((len(counts), max(1, *counts)), -1, np.int32)
        for row, some in zip(table, listed, strict=True):
            row[: len(some)] = some
        given["block_table"] = table
    given |= {"k": caches[0], "v": caches[1], "softcap": sample.softcap}
    if stored == E4M3:
        given |= {"k_scale": 0.5, "v_scale": 2.0}
    if sample.sinks:
        given["sinks"] = rng.standard_normal(heads).astype(np.float32)
    if equal:
        given["q"] = given["q"].reshape(2, 3, heads, columns)
        del given["qo_indptr"]
    case = case_of(sample, batch)
    mask = case.build()
    if sample.mask == "prefix":
        lens = rng.integers(-3, 30, len(q_lens)).astype(np.int32)
        mask, case = replace(mask, prefix_len=lens), with_prefix(case, lens)
    return Problem(given, keys, values, case, mask)


def with_prefix(case: Case, lens: Any) -> Case:
    def sees(q: Query, j: int) -> bool:
        return case.sees(q, j) or j < lens[q.request]

    return case._replace(sees=sees)


def attend(
    problem: Problem, query: Query, q: Any, sees: Callable[[Query, int], bool] | None = None
) -> Any:
    """Attend from one query row to the keys that the rule of the mask shows, by the formula.

    out, lse, and what out would be of the sizes of all values.
    """
    given, sees = problem.given, sees or problem.case.sees
    seen = [j for j in range(query.kv_len) if sees(query, j)]
    scale = given.get("k_scale", 1.0), given.get("v_scale", 1.0)
    k, v = (
        rows[query.request][seen].astype(np.float64) * factor
        for rows, factor in zip((problem.keys, problem.values), scale, strict=True)
    )
    group = len(q) // k.shape[1]
    scores = np.einsum("hc,khc->hk", q.astype(np.float64), k.repeat(group, axis=1))
    scores *= q.shape[-1] ** -0.5
    if cap := given.get("softcap"):
        scores = cap * np.tanh(scores / cap)
    weights = np.exp(scores)
    total = weights.sum(axis=1) + np.exp(given.get("sinks", np.full(len(q), -np.inf)))
    weights /= np.where(total, total, 1)[:, None]
    values = v.repeat(group, axis=1)
    out, sizes = (np.einsum("hk,khc->hc", weights, rows) for rows in (values, np.abs(values)))
    with np.errstate(divide="ignore"):
        return out, np.log(total), sizes


def reads_pairs(problem: Problem, put: Callable[[Any], Any]) -> bool:
    """Return whether a thread block of attention reads two kv heads."""
    given = {n: put(problem.given[n]) for n in ("q", "k", "v", "qo_indptr") if n in problem.given}
    form = "rows" if problem.mask.tree is None else "tree"
    plan = cumla.AttentionPlan.from_arrays(**given, mask_form=form)
    return plan.key.choice.box_heads > 1


PAIRS = (  # q_lens, heads, columns; multiprocessors
    ((1, 1, 1), (8, 4), (128, 128), 2),
    ("equal", (4, 2), (96, 96), 1),
    ((3, 1, 0), (12, 6), (128, 72), 3),
)
"""Requests for each multiprocessor whose kv heads thread blocks read in pairs."""


def of_pairs(mask: str, which: int) -> Problem:
    q_lens, heads, columns, _ = PAIRS[which]
    fixed: tuple[Any, ...] = (columns, "bfloat16", "same", 64, q_lens, heads, True, None, "table")
    return make(Sample(mask, *fixed, seed=which))


def check(problem: Problem, got: Any, dtype: str) -> None:
    """Compare the rows of requests, of the reference or of a kernel."""
    q, out, lse = problem.given["q"], got.out, got.lse
    if q.ndim == 4:
        q, out = (rows.reshape(-1, *rows.shape[2:]) for rows in (q, out))
        lse = lse.reshape(len(q), -1)
    for query in problem.case.batch.queries():
        expected, of_lse, sizes = attend(problem, query, q[query.row])
        # As of attention without a mask: weights, their sum and the output are rounded.
        errors = np.linalg.norm(out[query.row].astype(np.float64) - expected, axis=-1)
        tolerance = 3 * ROUNDING[dtype] * np.linalg.norm(sizes, axis=-1) + 1e-6
        assert (errors <= tolerance).all(), (query, errors, tolerance)
        np.testing.assert_allclose(lse[query.row], of_lse, rtol=1.2e-5, atol=1.2e-5)


@pytest.mark.parametrize("sample", some(samples(84), 2), ids=lambda s: f"{s.mask}-{s.seed}")
def test_grid(sample: Sample) -> None:
    problem = make(sample)
    check(problem, cumla.attention(**problem.given, mask=problem.mask), sample.dtype)


@pytest.mark.parametrize("sample", samples(84)[::5], ids=lambda s: f"{s.mask}-{s.seed}")
def test_plans(sample: Sample) -> None:
    """The bits of a call."""
    problem = make(sample)
    given, mask = problem.given, problem.mask
    expected = cumla.attention(**given, mask=mask)
    form = "rows" if mask.tree is None else "tree"
    lengths = {n: given[n] for n in ("kv_lens", "qo_indptr", "kv_indptr") if n in given}
    arrays = {n: given[n] for n in ("q", "k", "v", "qo_indptr") if n in given}
    plan = cumla.AttentionPlan.from_arrays(**arrays, mask_form=form)
    plan.update(**lengths)
    rest = {n: value for n, value in given.items() if n not in lengths}
    got = plan.run(**rest, mask=mask)
    rows = [query.row for query in problem.case.batch.queries()]
    for one, other in zip(got, expected, strict=True):
        if given["q"].ndim == 3:
            one, other = one[rows], other[rows]
        assert one.tobytes() == other.tobytes()


def test_one_key_more_or_less_shows() -> None:
    """The oracle is no weaker than a key: of a rule that differs in one, results differ."""
    problem = make(samples(84)[0])
    got = cumla.attention(**problem.given, mask=problem.mask)
    query = next(q for q in problem.case.batch.queries() if q.kv_len > 3)
    row = problem.given["q"][query.row]
    exact = attend(problem, query, row)[1]
    np.testing.assert_allclose(got.lse[query.row], exact, rtol=1e-5)
    for key in (0, query.kv_len - 1):

        def other(q: Query, j: int, key: int = key) -> bool:
            return problem.case.sees(q, j) != (j == key)

        assert (abs(attend(problem, query, row, other)[1] - exact) > 1e-3).any()


# --- what is refused ------------------------------------------------------------------------------

ROWS = np.zeros(8, np.int32)
BITS = np.zeros((8, 2), np.uint32)
MASK = cumla.AttentionMask


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"mask": ROWS}, TypeError, "mask: needs cumla.AttentionMask, got ndarray; pass the arr"),
        ({"mask": MASK()}, ValueError, "mask: needs at least one array, got none; leave it out"),
        (
            {"mask": MASK(ROWS), "window": 3},
            ValueError,
            "window: needs None beside mask, got (3, -1); pass it to the builder of the mask, or",
        ),
        (
            {"mask": MASK(ROWS[:5])},
            ValueError,
            "mask.start: needs shape (total_tokens,) with total_tokens 8, got (5,); give each row",
        ),
        ({"mask": MASK(ROWS.astype(np.int64))}, TypeError, "mask.start: needs int32, got int64;"),
        (
            {"mask": MASK(end=np.zeros(16, np.int32)[::2])},
            ValueError,
            "mask.end: needs contiguous rows, got a stride of 8 bytes on the last axis; make a co",
        ),
        (
            {"mask": MASK(prefix_len=int32(1, 2, 3))},
            ValueError,
            "mask.prefix_len: needs shape (batch,) with batch 2",
        ),
        (
            {"mask": MASK(tree=BITS, tree_start=int32(1))},
            ValueError,
            "mask.prefix_len: needs shape (batch,) with batch 2",
        ),
        (
            {"mask": MASK(prefix_len=int32(1, 2), tree=BITS, tree_start=int32(1))},
            ValueError,
            "mask.tree_start: needs shape (batch,) with batch 2, got (1,)",
        ),
        (
            {"mask": MASK(tree_start=int32(1, 2))},
            ValueError,
            "mask.tree_start: needs mask.tree, got None; pass it, or no mask.tree_start",
        ),
        (
            {"mask": MASK(tree=np.zeros((8, 9), np.uint32))},
            ValueError,
            "mask.tree: needs 1 to 8 words a row, got shape (8, 9); a tree has at most 256 keys",
        ),
        (
            {"mask": MASK(tree=np.zeros((8, 4), np.uint32)[:, :2])},
            ValueError,
            "mask.tree: needs rows without gaps, got a stride of 16 bytes; make a contiguous copy",
        ),
        (
            {"mask": MASK(tree=BITS.astype(np.int64))},
            TypeError,
            "mask.tree: needs uint32 or int32, got int64; build the mask with",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_refusals(
    changes: dict[str, Any], error: type[Exception], message: str, cupy: FakeCuPy
) -> None:
    """The same on both kinds of devices."""
    for put in (lambda value: value, cupy.like):
        given = {name: put(value) for name, value in keys_in_pages().items()}
        there = dict(changes)
        arrays = there["mask"].given.values() if isinstance(there["mask"], MASK) else ()
        if put == cupy.like and not all(array.flags.c_contiguous for array in arrays):
            continue  # which makes arrays without gaps
        if arrays:
            fields = {name: put(array) for name, array in there["mask"].given.items()}
            there["mask"] = MASK(**fields)
        with refused(error, message):
            cumla.attention(**given, **there)


@pytest.mark.parametrize(
    ("form", "mask", "message"),
    [
        (None, MASK(ROWS), "mask: needs no mask for a plan of mask_form None, got a mask without"),
        ("rows", None, "mask: needs a mask without tree for a plan of mask_form 'rows', got no m"),
        ("rows", MASK(tree=BITS), "mask: needs a mask without tree for ... got one with a tree; m"),
        ("tree", MASK(ROWS), "mask: needs one with a tree for a plan of mask_form 'tree', got a "),
        ("tree", MASK(prefix_len=int32(1), tree=BITS), "mask.prefix_len: needs shape (batch,) wi"),
    ],
    ids=str,
)
def test_runs_of_plans_that_are_refused(form: Any, mask: Any, message: str) -> None:
    given = keys_in_pages()
    lengths = {name: given.pop(name) for name in ("kv_lens", "qo_indptr")}
    arrays = {name: given[name] for name in ("q", "k", "v")}
    plan = cumla.AttentionPlan.from_arrays(**arrays, qo_indptr=lengths["qo_indptr"], mask_form=form)
    plan.update(**lengths)
    with refused(ValueError, message):
        plan.run(**given, mask=mask)


def test_plans_that_are_refused() -> None:
    with refused(ValueError, "mask_form: needs 'rows', 'tree' or None, got 'bits'; pass 'tree'"):
        cumla.AttentionPlan(2, 8, 4, 64, mask_form="bits", like=ROWS)
    with refused(ValueError, "window: needs None beside mask, got (3, -1); pass it to the build"):
        cumla.AttentionPlan(2, 8, 4, 64, window=3, mask_form="rows", like=ROWS)


# --- calls that are known again -------------------------------------------------------------------


def test_what_was_sorted_is_found_again() -> None:
    spec = SPECS["attention"]
    mask = MASK(start=ROWS, tree=BITS)
    given = {a.name: a.default for a in spec.arguments} | keys_in_pages() | {"mask": mask}
    found = spec.given(*spec.sorted(given))
    assert found is not None
    assert isinstance(found["mask"], MASK)
    assert found["mask"].given.keys() == {"start", "tree"}
    assert found["mask"].start is ROWS


def test_a_call_is_known_by_the_arrays_of_its_mask(cupy: FakeCuPy, bindings: FakeBindings) -> None:
    """Which there are, and where they lie; the mask itself may be another."""
    given = {name: cupy.like(value) for name, value in keys_in_pages().items()}
    one, other = cupy.like(ROWS), cupy.like(ROWS)
    framework_of_type.clear()
    cumla.attention(**given)
    operation = cumla.mha.attention._ATTENTION

    def key(mask: Any) -> Any:
        values = [
            (given | {"mask": mask}).get(name, getattr(SPECS["attention"].defaults, name, None))
            for name in operation.spec.sorted.names
        ]
        return operation.ready.find(operation.spec.sorted, tuple(values))[0]

    keys = [key(MASK(one)), key(MASK(end=one)), key(MASK(other)), key(MASK(one, other)), key(None)]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert key(MASK(one)) == keys[0]


# --- frameworks -----------------------------------------------------------------------------------


def torch_call() -> tuple[Any, dict[str, Any], Any, Any]:
    torch = pytest.importorskip("torch")
    pytest.importorskip("cumla.torch")
    given = {
        name: value.view(np.int16) if value.dtype == BF16 else value
        for name, value in keys_in_pages().items()
    }
    there = {name: torch.from_numpy(value) for name, value in given.items()}
    there |= {name: there[name].view(torch.bfloat16) for name in ("q", "k", "v")}
    host = MASK(
        start=np.arange(8, dtype=np.int32),
        tree=BITS.view(np.int32) + np.int32(5),
        prefix_len=int32(1, 0),
    )
    mask = MASK(**{name: torch.from_numpy(array) for name, array in host.given.items()})
    expected = cumla.attention(**keys_in_pages(), mask=host)
    return torch, there, mask, expected


def same_as(torch: Any, got: Any, expected: Any) -> None:
    """In the rows that have a request."""
    out = got[0].view(torch.int16).numpy()[1:6]
    assert out.tobytes() == expected.out[1:6].tobytes()
    assert got[1].numpy()[1:6].tobytes() == expected.lse[1:6].tobytes()


def test_torch_compile() -> None:
    """A mask comes in, or is made in the graph of its arrays."""
    torch, given, mask, expected = torch_call()

    def attend_by(given: Any, mask: Any) -> Any:
        return cumla.attention(**given, mask=mask)

    def attend_by_arrays(given: Any, arrays: Any) -> Any:
        return cumla.attention(**given, mask=cumla.AttentionMask(**arrays))

    same_as(torch, attend_by(given, mask), expected)
    for function, what in ((attend_by, mask), (attend_by_arrays, mask.given)):
        compiled = torch.compile(function, fullgraph=True, backend="eager")
        same_as(torch, compiled(given, what), expected)


def test_torch_operations() -> None:
    torch, given, mask, expected = torch_call()
    arrays = {f"mask_{name}": array for name, array in mask.given.items()}
    call = torch.ops.cumla
    same_as(torch, call.attention(**given, **arrays), expected)
    workspace = torch.empty(0, dtype=torch.uint8)
    call.attention_schedule(**given, **arrays, workspace=workspace)
    same_as(torch, call.attention_attend(**given, **arrays, workspace=workspace), expected)
    with refused(ValueError, "mask.start: needs shape (total_tokens,) with total_tokens 8, got (3"):
        call.attention(**given, mask_start=arrays["mask_start"][:3].clone())
    needs = {name: a.float().requires_grad_() for name, a in arrays.items()}
    with refused(RuntimeError, "mask_start: needs a tensor that requires no gradient"):
        call.attention(**given, mask_start=needs["mask_start"])


def test_torch_export() -> None:
    torch, given, mask, expected = torch_call()

    class Layer(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, given: Any, mask: Any) -> Any:
            return tuple(cumla.attention(**given, mask=mask))

    program = torch.export.export(Layer(), (given, mask))
    same_as(torch, program.module()(given, mask), expected)


def test_jax() -> None:
    """Masks are pytrees; plans take them, too."""
    jax = pytest.importorskip("jax")
    pytest.importorskip("cumla.jax")
    given = {name: jax.device_put(value) for name, value in keys_in_pages().items()}
    host = MASK(start=np.arange(8, dtype=np.int32), tree=BITS + np.uint32(5))
    mask = MASK(**{name: jax.device_put(array) for name, array in host.given.items()})
    expected = cumla.attention(**keys_in_pages(), mask=host)

    def attend_by(given: Any, mask: Any) -> Any:
        return cumla.attention(**given, mask=mask)

    def planned(given: Any, mask: Any) -> Any:
        arrays = {name: given[name] for name in ("q", "k", "v", "qo_indptr")}
        plan = cumla.jax.AttentionPlan.from_arrays(**arrays, mask_form="tree")
        plan = plan.update(given["kv_lens"], qo_indptr=given["qo_indptr"])
        rest = {n: v for n, v in given.items() if n not in ("kv_lens", "qo_indptr")}
        return plan.run(**rest, mask=mask)[0]

    for function in (attend_by, jax.jit(attend_by), jax.jit(planned)):
        got = function(given, mask)
        for one, other in zip(got, expected, strict=True):
            assert np.asarray(one)[1:6].tobytes() == other[1:6].tobytes()
    leaves, tree = jax.tree.flatten(mask)
    assert len(leaves) == 2
    assert jax.tree.unflatten(tree, leaves).given.keys() == host.given.keys()
    grown = jax.tree.map(lambda array: array + 1, mask)
    assert isinstance(grown, MASK)
    assert (np.asarray(grown.start) == np.arange(1, 9)).all()


def test_other_frameworks_beside_each_other() -> None:
    """A mask of NumPy beside tensors on the CPU."""
    torch, given, mask, expected = torch_call()
    host = MASK(**{name: array.numpy() for name, array in mask.given.items()})
    same_as(torch, cumla.attention(**given, mask=host), expected)


def test_any_int32_is_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a mask the check mode has nothing to refuse."""
    monkeypatch.setenv("CUMLA_CHECK", "1")
    extremes = np.array([-(1 << 31), (1 << 31) - 1] * 4, np.int32)
    mask = MASK(extremes, extremes[::-1].copy(), extremes[:2], BITS, extremes[1:3])
    given = keys_in_pages()
    out, _ = cumla.attention(**given, mask=mask, out=aligned((8, 4, 32)))
    queries = Batch((3, 2), (5, 40), 1, 2).queries()
    for query in queries:
        if not any(shown(mask.given, query, j) for j in range(query.kv_len)):
            assert not out[query.row].any()
