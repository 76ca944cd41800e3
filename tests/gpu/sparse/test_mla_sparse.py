# SPDX-License-Identifier: Apache-2.0
"""mla_sparse_decode, mla_sparse_attention and their plan, against float64 over the listed rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cumla
from tests.gpu.tools import kernels, oracle, variants
from tests.gpu.tools.arrays import bits_of
from tests.gpu.tools.placements import check_random_batches
from tests.gpu.tools.problem import Guarded, typed
from tests.gpu.tools.sparse_problem import (
    FORMS,
    SparseCase,
    SparseProblem,
    cache_of,
    covering_sample,
    in_a_larger_cache,
    make_sparse,
)
from tests.gpu.tools.v4_problem import V4Case, make_v4

KERNELS = ("select_rows", "mla_sparse", "mla_sparse_fp8", "mla_sparse_packed")
cp: Any = pytest.importorskip("cupy")

Report = Callable[..., None]
EVERY_KERNEL = (  # form and heads
    ("bfloat16", 16),
    ("bfloat16", 128),
    ("float16", 64),
    ("16-bit rope", 8),
    ("one", 40),
    ("scales", 16),
    ("scales", 64),
    ("packed", 16),
    ("packed", 32),
    ("packed", 64),
    ("packed", 128),
)
every_kernel = pytest.mark.parametrize(("form", "heads"), EVERY_KERNEL)


def run(problem: SparseProblem, plan: Any = None, **options: Any) -> tuple[Guarded, Guarded]:
    """Run once into poisoned outputs, by a call or a plan."""
    out, lse = problem.outputs()
    if plan is None:
        problem.call(out=out.array, lse=lse.array, **options)
    else:
        plan.run(**problem.inputs, out=out.array, lse=lse.array, **options)
    out.check_guards()
    lse.check_guards()
    return out, lse


def check(
    problem: SparseProblem, result: tuple[Guarded, Guarded], **options: Any
) -> dict[str, float]:
    return problem.check(result[0].array, result[1].array, **options)


def attend_and_check(problem: SparseProblem) -> dict[str, float]:
    """Every element must be written, and nothing else."""
    if problem.case.outputs == "allocated":
        blocks = [cp.full(1 << 22, 0xFF, dtype=cp.uint8) for _ in range(2)]
        del blocks  # NaN for the allocator to hand out again
        result = problem.call()
        assert str(result.out.dtype) == problem.case.dtype
        return problem.check(*result)
    return check(problem, run(problem))


def same_bits(one: Any, other: Any) -> bool:
    return all(bool((bits_of(a) == bits_of(b)).all()) for a, b in zip(one, other, strict=True))


def arrays_of(result: tuple[Guarded, Guarded]) -> tuple[Any, Any]:
    return result[0].array, result[1].array


def with_lists(problem: SparseProblem, **lists: np.ndarray) -> SparseProblem:
    """The same with other lists, in arrays of their own."""
    there = {name: cp.asarray(array) for name, array in lists.items()}
    return dataclasses.replace(
        problem, lists=problem.lists | lists, arguments=problem.arguments | there
    )


# --- shapes, lists, lengths -----------------------------------------------------------------------


@pytest.mark.parametrize("case", covering_sample(), ids=lambda case: case.name)
def test_grid(case: SparseCase, record_figures: Report) -> None:
    record_figures(attend_and_check(make_sparse(cp, case)))


@pytest.mark.parametrize("scales", ["powers", "any", "wild", "zero"])
@pytest.mark.parametrize(("form", "heads"), [("packed", h) for h in (8, 17, 64, 128)])
def test_scales(form: str, heads: int, scales: str, record_figures: Report) -> None:
    """Lists of one row and of many, whole and cut."""
    for batch, topk in ((200, 1), (80, 70), (3, 2048)):
        case = SparseCase(
            batch=batch, heads=heads, topk=topk, form=form, scales=scales, outputs="float32"
        )
        record_figures(attend_and_check(make_sparse(cp, case)))


@pytest.mark.parametrize(("batch", "heads"), [(1, 64), (1, 128), (4, 128), (2, 40), (1, 17)])
@pytest.mark.parametrize("form", ["packed", "bfloat16", "float16"])
def test_few_lists_by_tiles_of_heads(
    form: str, batch: int, heads: int, record_figures: Report
) -> None:
    """Tiles of 16 and of 32 heads, the last of which may have fewer."""
    for scales, lists in (("any", "mixed"), ("wild", "random")):
        case = SparseCase(batch=batch, heads=heads, topk=2048, form=form, lists=lists)
        case = dataclasses.replace(case, scales=scales, sinks="mixed", outputs="float32")
        record_figures(attend_and_check(make_sparse(cp, case)))


@every_kernel
def test_every_tail(form: str, heads: int, record_figures: Report) -> None:
    ends = np.array([1, 2, 7, 15, 16, 17, 31, 33, 48, 63, 64, 65, 127, 128, 129, 191, 193, 255])
    case = SparseCase(batch=len(ends), q_len=2, heads=heads, topk=256, form=form)
    problem = make_sparse(cp, case)
    record_figures(attend_and_check(with_lists(problem, topk_lens=ends.astype(np.int32))))


@pytest.mark.parametrize(("form", "heads"), [("bfloat16", 64), ("packed", 16), ("packed", 128)])
def test_batches_around_the_number_of_multiprocessors(
    form: str, heads: int, record_figures: Report
) -> None:
    count = cp.cuda.runtime.getDeviceProperties(0)["multiProcessorCount"]
    for batch in (count // 2, count + 1, 2 * count):
        case = SparseCase(batch=batch, heads=heads, topk=640, form=form, lengths="requests")
        record_figures(attend_and_check(make_sparse(cp, case)))


@pytest.mark.parametrize(("form", "heads"), [("bfloat16", 128), ("packed", 16), ("packed", 64)])
def test_thousands_of_query_tokens(form: str, heads: int, record_figures: Report) -> None:
    """As a prefill has them."""
    case = SparseCase(
        batch=1, q_len=4001, heads=heads, topk=200, form=form, operation="tokens", lists="mixed"
    )
    record_figures(attend_and_check(make_sparse(cp, case)))


@pytest.mark.parametrize(("form", "heads"), [("packed", 16), ("packed", 64), ("one", 32)])
def test_scores_that_grow_along_a_list(form: str, heads: int, record_figures: Report) -> None:
    """References have to be raised again and again."""
    for steep in (5.0, 20.0):
        case = SparseCase(
            *(4, 1, heads, 2048), form=form, scales="powers", steep=steep, outputs="float32"
        )
        problem = make_sparse(cp, case)
        rows = problem.seen(rounded=False).keys.get()
        q = problem.q_bits.get()[:, 0].astype(np.uint32) << 16
        scores = np.einsum("tc,tkc->tk", q.view(np.float32), rows[problem.named()])
        order = scores.argsort(axis=1).reshape(4, 1, 2048)
        lists = np.take_along_axis(problem.lists["indices"], order, axis=-1)
        for indices in (lists, lists[..., ::-1]):
            grown = with_lists(problem, indices=np.ascontiguousarray(indices))
            record_figures(attend_and_check(grown))


@pytest.mark.parametrize("heads", [16, 64])
def test_every_e4m3_number(heads: int, record_figures: Report) -> None:
    case = SparseCase(heads=heads, topk=300, scales="powers", outputs="float32")
    problem = make_sparse(cp, case)
    codes = cp.arange(problem.latent.size, dtype=cp.uint32).reshape(problem.latent.shape) % 256
    problem.latent = cp.where(codes % 128 == 127, 0, codes).astype(cp.uint8)
    problem.arguments["kv_cache"] = cache_of(problem)
    record_figures(attend_and_check(problem))


@every_kernel
def test_the_highest_sinks(form: str, heads: int, record_figures: Report) -> None:
    """They take all of the weight, and the lowest ones none: in lists that are cut, and others."""
    for outputs in ("given", "float32"):
        case = SparseCase(heads=heads, form=form, sinks="mixed", outputs=outputs)
        for batch, topk in ((1, 2000), (200, 65)):
            case = dataclasses.replace(case, lengths="tokens", q_len=2, batch=batch, topk=topk)
            record_figures(attend_and_check(make_sparse(cp, case)))


@pytest.mark.parametrize("form", ["bfloat16", "packed"])
@pytest.mark.parametrize("topk", [2**31 - 2048, 2**31 - 64])
def test_lists_of_as_many_entries_as_32_bits_count(topk: int, form: str) -> None:
    """Of which two exist, near both ends."""
    problem = make_sparse(cp, SparseCase(batch=1, form=form, topk=2))
    few = cp.asarray(problem.arguments["indices"]).reshape(-1)
    expected = cumla.mla_sparse_decode(**problem.arguments)
    cp.get_default_memory_pool().free_all_blocks()
    indices = cp.full((1, 1, topk), -1, cp.int32)
    indices[0, 0, 5], indices[0, 0, topk - 1] = few[0], few[1]
    got = cumla.mla_sparse_decode(**problem.arguments | {"indices": indices})
    cp.testing.assert_allclose(got.lse, expected.lse, atol=1e-3)
    one, other = (cp.asarray(state.out).view(cp.uint16) for state in (got, expected))
    wide = [oracle.widen(cp, bits, "bfloat16") for bits in (one, other)]
    cp.testing.assert_allclose(*wide, atol=2e-2)
    del indices, got
    cp.get_default_memory_pool().free_all_blocks()


@pytest.mark.parametrize(("batch", "topk"), [(0, 64), (3, 0)])
@every_kernel
def test_nothing_to_attend_to(form: str, heads: int, batch: int, topk: int) -> None:
    problem = make_sparse(cp, SparseCase(heads=heads, form=form))
    indices = cp.zeros((batch, 1, topk), cp.int32)
    arguments = problem.arguments | {"q": problem.arguments["q"][:batch], "indices": indices}
    out, lse = cumla.mla_sparse_decode(**arguments)
    assert out.shape == (batch, 1, heads, 512)
    assert not bool(bits_of(out).any())
    assert bool((lse == -np.inf).all())


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "heads", "page_size"),
    # Of 128 heads two row tiles share rows that L2 fetches ahead, because the cache is large.
    [
        ("bfloat16", 64, 64),
        ("bfloat16", 128, 64),
        ("packed", 16, 1),
        ("packed", 64, 64),
        ("scales", 32, 53),
    ],
)
def test_slots_beyond_2_gigabytes(form: str, heads: int, page_size: int) -> None:
    cp.get_default_memory_pool().free_all_blocks()
    slots = 2_100_000 if form == "bfloat16" else 4_400_000
    case = SparseCase(heads=heads, topk=700, form=form, page_size=page_size, lists="mixed")
    problem = make_sparse(cp, case, num_pages=slots // page_size)
    cache = problem.arguments["kv_cache"]
    assert (cache[0] if isinstance(cache, tuple) else cache).nbytes > 1 << 31
    attend_and_check(problem)


@every_kernel
def test_a_nan_that_is_selected(form: str, heads: int) -> None:
    """It makes NaN of the results of queries that see it, and changes no bit of others."""
    case = SparseCase(batch=20, q_len=2, heads=heads, topk=130, form=form)
    problem = make_sparse(cp, case)
    before = run(problem)
    row = 77
    sees = (problem.named() == row).any(axis=1)
    assert 0 < sees.sum() < len(sees)
    if case.is_fp8:
        problem.latent[row, 300] = 0x7F
    else:
        problem.latent[row, 300] = 0x7E01 if case.dtype == "float16" else 0x7FC1
    problem.arguments["kv_cache"] = cache_of(problem)
    after = run(problem)
    for values in problem.by_token(*arrays_of(after)):
        is_nan = cp.isnan(values.reshape(case.tokens, -1)).all(axis=1)
        assert bool((is_nan == cp.asarray(sees)).all())
    others = cp.asarray(~sees)
    for one, other in zip(bits_by_token(after), bits_by_token(before), strict=True):
        assert bool((one[others] == other[others]).all())


def bits_by_token(result: tuple[Guarded, Guarded]) -> tuple[Any, Any]:
    """Bits of a batch's results, (tokens, ...)."""
    out, lse = (array.bits for array in result)
    tokens = out.shape[0] * out.shape[1]
    return out.reshape(tokens, -1), lse.reshape(tokens, -1)


@every_kernel
def test_an_entry_that_is_left_out_shows(form: str, heads: int) -> None:
    """So much that the result is refused."""
    problem = make_sparse(cp, SparseCase(heads=heads, topk=640, form=form, scales="powers"))
    indices = problem.lists["indices"].copy()
    indices[1, 0, 333] = -1
    dropped = run(with_lists(problem, indices=indices))
    with pytest.raises(AssertionError, match=r"^(out|lse): "):
        check(problem, dropped)


# --- bits -----------------------------------------------------------------------------------------


@every_kernel
def test_50_repeats_give_the_same_bits(form: str, heads: int) -> None:
    for batch, topk in ((1, 2048), (5, 700), (150, 130)):
        problem = make_sparse(cp, SparseCase(batch=batch, heads=heads, topk=topk, form=form))
        results = [arrays_of(run(problem)) for _ in range(50)]
        assert all(same_bits(result, results[0]) for result in results[1:])


@pytest.mark.parametrize(
    "case",
    [
        SparseCase(heads=64, form="bfloat16"),
        SparseCase(heads=40, form="float16"),
        V4Case(heads=64, form="bfloat16"),
    ],
    ids=lambda case: case.name,
)
def test_a_large_cache_changes_no_bits(case: SparseCase) -> None:
    """There products of many lists have the order in which blocks come."""
    make = make_v4 if isinstance(case, V4Case) else make_sparse
    for batch, topk in ((600, 700), (1000, 200)):
        problem = make(cp, dataclasses.replace(case, batch=batch, topk=topk))
        expected = arrays_of(run(problem))
        large = in_a_larger_cache(problem)
        assert all(same_bits(arrays_of(run(large)), expected) for _ in range(10))


def test_random_delays_at_every_barrier() -> None:
    """Delays shift who waits for whom; the results keep the bits of the kernels without them."""
    cases = [
        SparseCase(batch=batch, heads=heads, topk=topk, form=form, lists="mixed")
        for form, heads in (("packed", 16), ("packed", 128), ("packed", 64), ("scales", 24))
        for batch, topk in ((3, 4096), (400, 150))
    ]
    problems = [make_sparse(cp, case) for case in cases]
    problems.append(make_sparse(cp, SparseCase(batch=40, heads=64, topk=700, scales="wild")))
    many = SparseCase(batch=600, heads=64, topk=700, form="bfloat16")
    problems.append(in_a_larger_cache(make_sparse(cp, many)))
    expected = [arrays_of(run(problem)) for problem in problems]
    with variants.installed(*variants.SPARSE_DELAYS):
        for problem, result in zip(problems, expected, strict=True):
            for _ in range(25):
                assert same_bits(arrays_of(run(problem)), result), problem.case.name


@every_kernel
@pytest.mark.parametrize("invariant", [False, True])
def test_query_tokens_of_one_request_or_of_many(form: str, heads: int, invariant: bool) -> None:
    """(T, 1), (1, T) and T without a batch are the same lists."""
    tokens = 37
    case = SparseCase(batch=tokens, heads=heads, topk=300, form=form, lists="mixed")
    problem = make_sparse(cp, case)
    first = run(problem, batch_invariant=invariant)
    q, indices = problem.arguments["q"], problem.arguments["indices"]
    wide = problem.arguments | {
        "q": q.reshape(1, tokens, heads, 576),
        "indices": indices.reshape(1, tokens, -1),
    }
    flat = {"q": q.reshape(tokens, heads, 576), "indices": indices.reshape(tokens, -1)}
    out, lse = cumla.mla_sparse_decode(**wide, batch_invariant=invariant)
    flat_out, flat_lse = cumla.mla_sparse_attention(
        **problem.arguments | flat, batch_invariant=invariant
    )
    for one, other in ((out, lse), (flat_out, flat_lse)):
        results = one.reshape(first[0].array.shape), other.reshape(tokens, 1, heads)
        assert same_bits((results[0], cp.ascontiguousarray(results[1])), arrays_of(first))


ENDS = np.array([2048, 130, 1500, 64, 2000, 0], np.int32)


def invariant_problem(form: str, heads: int) -> SparseProblem:
    problem = make_sparse(cp, SparseCase(batch=6, heads=heads, topk=2048, form=form))
    return with_lists(problem, topk_lens=ENDS)


def with_room(problem: SparseProblem, topk: int) -> cumla.AttentionState:
    """The same lists, with room for up to topk entries."""
    longer = np.full((6, 1, topk), -1, np.int32)
    longer[..., :2048] = problem.lists["indices"]
    arguments = problem.arguments | {"indices": cp.asarray(longer)}
    return cumla.mla_sparse_decode(**arguments, batch_invariant=True)


@every_kernel
def test_batch_invariant(form: str, heads: int, record_figures: Report) -> None:
    """A list alone, or in another place among others."""
    problem = invariant_problem(form, heads)
    whole = run(problem, batch_invariant=True)
    record_figures(check(problem, whole))
    for requests in ([4], [5, 1, 4, 3]):
        index = cp.asarray(np.array(requests))
        given = {name: problem.arguments[name][index] for name in ("indices", "topk_lens")}
        given["q"] = typed(problem.q_bits[index][:, None], problem.case.dtype)
        got = cumla.mla_sparse_decode(**problem.arguments | given, batch_invariant=True)
        for a, b in zip(got, whole, strict=True):
            assert bool((bits_of(a) == b.bits[index].ravel()).all()), requests


@every_kernel
def test_batch_invariant_with_more_room(form: str, heads: int) -> None:
    """After the end of lists."""
    problem = invariant_problem(form, heads)
    whole = arrays_of(run(problem, batch_invariant=True))
    for topk in (2100, 2900, 5000):
        assert same_bits(with_room(problem, topk), whole), topk


# --- plans, graphs, streams -----------------------------------------------------------------------


@every_kernel
def test_a_plan_over_layers(form: str, heads: int, record_figures: Report) -> None:
    """With other lists in each, and garbage in its buffer before the update."""
    case = SparseCase(batch=5, q_len=2, heads=heads, topk=600, form=form, lengths="tokens")
    first = make_sparse(cp, case)
    kinds: dict[str, str] = {"cache_dtype": "float8_e4m3fn"} if case.is_fp8 else {}
    kinds = {"cache_format": "v32"} if form == "packed" else kinds
    size = cumla.MLASparsePlan.workspace_bytes(5, 2, heads, 600, **kinds)
    buffer = cp.full(size + 4096, 0xFF, cp.uint8)
    plan = first.plan(workspace=buffer[:size])
    for layer in range(3):
        problem = make_sparse(cp, dataclasses.replace(case, seed=11 * layer, lists="mixed"))
        assert (problem.lists["topk_lens"] == first.lists["topk_lens"]).all()
        expected = arrays_of(run(problem))
        for _ in range(2):
            got = run(problem, plan)
            assert same_bits(arrays_of(got), expected)
        record_figures(check(problem, got))
    assert bool((buffer[size:] == 0xFF).all()), "memory behind the workspace was written"


@every_kernel
def test_a_graph_serves_new_lists_and_lengths(form: str, heads: int) -> None:
    case = SparseCase(
        batch=4, q_len=2, heads=heads, topk=500, form=form, lengths="requests", sinks="finite"
    )
    problem = make_sparse(cp, case)
    plan = problem.plan()
    out, lse = problem.outputs()
    run(problem, plan)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        plan.update(problem.arguments["topk_lens"])
        plan.run(**problem.inputs, out=out.array, lse=lse.array)
        graph = stream.end_capture()
    rng = np.random.default_rng(0)
    for lengths in ([500] * 4, [1, 500, 64, 0], [0] * 4, [499, 65, 2**31 - 1, -7]):
        indices = problem.slots[rng.integers(0, len(problem.slots), (4, 2, 500))]
        indices[rng.random(indices.shape) < 0.2] = -1
        problem.lists["indices"] = indices.astype(np.int32)
        problem.lists["topk_lens"] = np.array(lengths, np.int32)
        for name in ("indices", "topk_lens"):
            problem.arguments[name][...] = cp.asarray(problem.lists[name])
        for output in (out, lse):
            output.repoison()
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        for output in (out, lse):
            output.check_guards()
        check(problem, (out, lse))


@pytest.mark.parametrize(("form", "heads"), [("bfloat16", 16), ("one", 16), ("packed", 64)])
def test_a_side_stream(form: str, heads: int) -> None:
    """What that stream does before, and late, is seen; the calls do not wait."""
    case = SparseCase(heads=heads, form=form, lengths="requests")
    problem = make_sparse(cp, case)
    expected = arrays_of(run(problem))
    plan = problem.plan()
    names = ("indices", "topk_lens")
    late = {name: cp.full_like(problem.arguments[name], -1) for name in names}
    moved = dataclasses.replace(problem, arguments=problem.arguments | late)
    outputs = [moved.outputs() for _ in range(2)]
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        kernels.spin(100_000_000)
        for name in names:
            late[name][...] = problem.arguments[name]
    moved.call(out=outputs[0][0].array, lse=outputs[0][1].array, stream=stream)
    plan.update(late["topk_lens"], stream=stream)
    plan.run(**moved.inputs, out=outputs[1][0].array, lse=outputs[1][1].array, stream=stream)
    assert not stream.done, "a call waited for the device"
    stream.synchronize()
    for result in outputs:
        assert same_bits(arrays_of(result), expected)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "packed"])
def test_plans_of_packed_rows_take_no_other_cache(form: str) -> None:
    packed, other = (make_sparse(cp, SparseCase(form=it)) for it in ("packed", form))
    if other.case.dtype == packed.case.dtype:
        with pytest.raises(ValueError, match=r"^plan: made for a cache of packed rows"):
            packed.plan().run(**packed.arguments | {"kv_cache": other.arguments["kv_cache"]})


@pytest.mark.parametrize("heads", [16, 128])
def test_random_batches(heads: int) -> None:
    """Each query token has one set of bits, in calls and by plans."""
    check_random_batches(f"mla_sparse_decode, {heads} heads")
