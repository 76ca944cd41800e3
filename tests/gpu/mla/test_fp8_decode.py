# SPDX-License-Identifier: Apache-2.0
"""mla_decode and mla_attention over FP8 caches, against float64 over what the caches stand for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from tests.gpu.tools import kernels, oracle, variants
from tests.gpu.tools.arrays import bits_of, from_jax, from_torch, to_torch
from tests.gpu.tools.fp8_problem import (
    FACTOR,
    PARTS,
    Fp8Case,
    Fp8Problem,
    cache_in,
    check_batch_invariance,
    check_out,
    covering_sample,
    group_sizes,
    make_fp8,
    run,
)
from tests.gpu.tools.problem import Guarded, typed
from tests.mla import extreme_cases
from tests.mla.fp8_arrays import FORMS, FP8, SCALED

KERNELS = (
    "schedule",
    "ragged_schedule",
    "mla_decode_fp8",
    "mla_decode_fp8_64",
    "mla_decode_fp8_converted",
)
cp: Any = pytest.importorskip("cupy")

Report = Callable[..., None]
OPERATIONS = ("decode", "table", "list")
every_operation = pytest.mark.parametrize("operation", OPERATIONS)
some_forms = pytest.mark.parametrize("form", ["one", "16-bit rope", "scales", "packed"])


def check(problem: Fp8Problem, result: tuple[Guarded, Guarded], **options: Any) -> dict[str, float]:
    return problem.check(result[0].array, result[1].array, **options)


def attend_and_check(problem: Fp8Problem, outputs: str = "given") -> dict[str, float]:
    """Every element must be written, and nothing else."""
    if outputs == "allocated":
        blocks = [cp.full(1 << 22, 0xFF, dtype=cp.uint8) for _ in range(2)]
        del blocks  # NaN for the allocator to hand out again
        result = problem.call()
        assert str(result.out.dtype) == "bfloat16"
        return problem.check(*result)
    out, lse = problem.outputs("float32" if outputs == "float32" else "bfloat16")
    result = problem.call(out=out.array, lse=lse.array)
    assert result.out is out.array
    assert result.lse is lse.array
    out.check_guards()
    lse.check_guards()
    return problem.check(*result)


def same_bits(one: Any, other: Any) -> bool:
    return all(bool((bits_of(a) == bits_of(b)).all()) for a, b in zip(one, other, strict=True))


def arrays_of(result: tuple[Guarded, Guarded]) -> tuple[Any, Any]:
    return result[0].array, result[1].array


class CapturedRun:
    """A graph of a plan's update and run. It keeps the arrays whose addresses the graph has."""

    def __init__(self, problem: Fp8Problem, plan: Any) -> None:
        self.plan, self.lengths, self.inputs = plan, problem.lengths_of_plan, problem.inputs
        self.outputs = out, lse = problem.outputs()
        self.stream = cp.cuda.Stream(non_blocking=True)
        cp.cuda.Device().synchronize()
        with self.stream:
            self.stream.begin_capture()
            plan.update(**self.lengths)
            plan.run(**self.inputs, out=out.array, lse=lse.array)
            self.graph = self.stream.end_capture()

    def replay(self) -> tuple[Guarded, Guarded]:
        """Run once into poisoned outputs."""
        for output in self.outputs:
            output.repoison()
        cp.cuda.Device().synchronize()
        self.graph.launch(self.stream)
        self.stream.synchronize()
        for output in self.outputs:
            output.check_guards()
        return self.outputs


# --- lengths, shapes, pages -----------------------------------------------------------------------


@pytest.mark.parametrize("case", covering_sample(), ids=lambda case: case.name)
def test_grid(case: Fp8Case, record_figures: Report) -> None:
    record_figures(attend_and_check(make_fp8(cp, case), case.outputs))


@pytest.mark.parametrize("form", FORMS)
@every_operation
def test_every_form_with_split_requests(form: str, operation: str, record_figures: Report) -> None:
    case = Fp8Case(batch=3, form=form, operation=operation, heads=16, page_size=16)
    problem = make_fp8(cp, case, np.array([20_000, 3001, 5]))
    record_figures(attend_and_check(problem))


@pytest.mark.parametrize("heads", [3, 9, 17, 63, 126])
@pytest.mark.parametrize("form", ["one", "packed"])
@every_operation
def test_odd_heads_and_every_tail(
    operation: str, form: str, heads: int, record_figures: Report
) -> None:
    lengths = np.array([1, 2, 7, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 191, 193, 255, 257])
    case = Fp8Case(
        batch=len(lengths), q_len=2, heads=heads, form=form, operation=operation, page_size=16
    )
    record_figures(attend_and_check(make_fp8(cp, case, lengths)))


@pytest.mark.parametrize("page_size", [2, 8, 24, 32, 48, 100, 128, 256])
@some_forms
def test_other_page_sizes(form: str, page_size: int, record_figures: Report) -> None:
    case = Fp8Case(batch=4, q_len=3, heads=32, form=form, page_size=page_size, padded=True)
    problem = make_fp8(cp, case, np.array([700, 255, 33, 1024]))
    record_figures(attend_and_check(problem))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("q_len", "heads", "kv_heads"), [(5, 128, 1), (9, 96, 2), (70, 3, 1)])
@pytest.mark.parametrize("form", ["pair", "packed"])
@every_operation
def test_several_hundred_query_rows(
    operation: str,
    form: str,
    q_len: int,
    heads: int,
    kv_heads: int,
    causal: bool,
    record_figures: Report,
) -> None:
    """Lengths below q_len too, so that causal rows see nothing."""
    case = Fp8Case(
        batch=5,
        q_len=q_len,
        heads=heads,
        kv_heads=kv_heads,
        causal=causal,
        form=form,
        operation=operation,
    )
    lengths = np.array([2000, 3, 64, 0, q_len + 63])
    record_figures(attend_and_check(make_fp8(cp, case, lengths)))


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("form", ["one", "packed"])
def test_batches_around_the_number_of_multiprocessors(
    form: str, heads: int, record_figures: Report
) -> None:
    count = cp.cuda.runtime.getDeviceProperties(0)["multiProcessorCount"]
    for batch in (count // 2, count + 1, 2 * count):
        case = Fp8Case(batch=batch, kv_len=257, heads=heads, form=form)
        record_figures(attend_and_check(make_fp8(cp, case)))


@pytest.mark.parametrize("page_size", [1, 16, 64])
@some_forms
@every_operation
def test_shared_pages(operation: str, form: str, page_size: int, record_figures: Report) -> None:
    """A prefix of 768 tokens lies in the same pages for all."""
    case = Fp8Case(
        batch=5,
        q_len=3,
        heads=64,
        form=form,
        page_size=page_size,
        operation=operation,
        shared=768,
    )
    problem = make_fp8(cp, case, np.array([2000, 769, 768, 1300, 900]))
    record_figures(attend_and_check(problem))


@pytest.mark.parametrize("heads", [8, 40, 64])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("form", FORMS)
def test_page_numbers_out_of_range_read_as_zeros(form: str, page_size: int, heads: int) -> None:
    case = Fp8Case(batch=3, q_len=2, heads=heads, form=form, page_size=page_size)
    problem = make_fp8(cp, case, np.array([700, 300, 1000]))
    num_pages = len(parts_of(problem.kv_cache)[0])
    wrong = {(0, 1): -1, (1, 0): 2147480000, (2, 2): num_pages, (2, 5): -(2**31)}
    for (request, entry), number in wrong.items():
        begin = entry * page_size
        end = min(begin + page_size, int(problem.lengths[request]))
        if begin < end:
            problem.table[request, entry] = number
            own = slice(int(problem.begins[request]) + begin, int(problem.begins[request]) + end)
            problem.latent[own] = 0
            problem.rope[own] = 0
    problem.block_table = cp.asarray(problem.table)
    for operation in OPERATIONS:
        out_of_range = dataclasses.replace(
            problem, case=dataclasses.replace(case, operation=operation)
        )
        out_of_range.q = problem.q if operation == "decode" else problem.q.reshape(6, heads, 576)
        attend_and_check(out_of_range)


@pytest.mark.parametrize(
    ("page_size", "heads"), [(1, 16), (16, 40), (48, 16), (64, 80), (64, 8), (48, 64), (64, 128)]
)
@some_forms
def test_lengths_are_clamped(form: str, page_size: int, heads: int) -> None:
    """To what the columns of the table hold, and to 0; no memory but the cache is read."""
    columns = -(-300 // page_size)
    longest = columns * page_size
    lengths = np.array([longest, 0, 200, longest])
    case = Fp8Case(batch=4, q_len=2, heads=heads, form=form, page_size=page_size)
    problem = make_fp8(cp, case, lengths)
    wrong = np.array([2**31 - 1, -5, 200, longest + 1], dtype=np.int32)
    problem.kv_lens = cp.asarray(wrong)
    problem.block_table = cp.ascontiguousarray(problem.block_table[:, :columns])
    attend_and_check(problem)


@pytest.mark.parametrize(
    ("form", "page_size", "heads"),
    [("one", 1, 16), ("packed", 64, 16), ("scales", 16, 16), ("packed", 64, 64), ("scales", 1, 64)],
)
def test_a_cache_beyond_32_bit_offsets(form: str, page_size: int, heads: int) -> None:
    """More than 2^32 bytes in its largest part; the pages in use lie at both ends."""
    cp.get_default_memory_pool().free_all_blocks()
    case = Fp8Case(batch=2, heads=heads, form=form, page_size=page_size)
    problem = make_fp8(cp, case, np.array([333, 1000]))
    parts = problem.kv_cache if isinstance(problem.kv_cache, tuple) else (problem.kv_cache,)
    count = parts[0].shape[0]
    num_pages = 9_000_000 // page_size
    assert num_pages * parts[0][0].nbytes > 1 << 32
    places = np.r_[: count // 2, num_pages - (count - count // 2) : num_pages]
    wide = []
    for part in parts:
        base = cp.full((num_pages, *part.shape[1:-1], part[0, 0, 0].nbytes), 0xFF, dtype=cp.uint8)
        base[cp.asarray(places)] = part.view(cp.uint8)
        wide.append(base.view(part.dtype))
    problem.kv_cache = tuple(wide) if len(wide) > 1 else wide[0]
    used = (problem.table >= 0) & (problem.table < count)
    problem.table[used] = places[problem.table[used]]
    problem.block_table = cp.asarray(problem.table)
    attend_and_check(problem)


# --- bits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("q_len", "heads", "kv_heads"), [(1, 1, 1), (1, 16, 1), (2, 8, 1), (5, 3, 1), (2, 16, 2)]
)
def test_packed_rows_have_the_bits_of_other_forms(
    q_len: int, heads: int, kv_heads: int, record_figures: Report
) -> None:
    """With so few query rows whole pages have a kernel that brings the rows as they lie."""
    lengths = np.array([1500, 64, 0, 333, 1, 63, 65, 191, 20_000])
    shape = {"batch": len(lengths), "q_len": q_len, "heads": heads, "kv_heads": kv_heads}
    expected: Any = None
    for form, page_size, padded in (
        *(("packed", page_size, padded) for page_size in (64, 128) for padded in (False, True)),
        ("packed", 16, False),
        ("scales", 64, False),
    ):
        case = Fp8Case(**shape, form=form, page_size=page_size, padded=padded)
        problem = make_fp8(cp, case, lengths)
        got = run(problem)
        record_figures(check(problem, got))
        expected = expected or arrays_of(got)
        assert same_bits(arrays_of(got), expected), case.name


def test_parts_of_packed_rows_have_their_bits() -> None:
    """A tuple of views of them is the same cache."""
    case = Fp8Case(batch=3, heads=16, kv_heads=2)
    problem = make_fp8(cp, case)
    expected = arrays_of(run(problem))
    rows = problem.kv_cache
    problem.kv_cache = (
        rows[..., :512],
        rows[..., 528:].view(ml_dtypes.bfloat16),
        rows[..., 512:528].view(np.float32),
    )
    assert same_bits(arrays_of(run(problem)), expected)


@every_operation
@pytest.mark.parametrize("heads", [24, 64])
def test_bits_depend_on_no_form_and_no_page_size(operation: str, heads: int) -> None:
    """Of the same numbers."""
    lengths = np.array([1500, 64, 0, 333])
    for forms in (("one", "bytes", "pair", "pair of bytes"), ("scales", "packed")):
        expected: Any = None
        for form in forms:
            for page_size in (1, 16, 64):
                for padded in (False, True):
                    case = Fp8Case(
                        batch=4,
                        q_len=2,
                        heads=heads,
                        form=form,
                        page_size=page_size,
                        padded=padded,
                        operation=operation,
                    )
                    got = arrays_of(run(make_fp8(cp, case, lengths)))
                    expected = expected or got
                    assert same_bits(got, expected), case.name


@some_forms
@every_operation
def test_20_repeats_give_the_same_bits(operation: str, form: str) -> None:
    for case, lengths in (
        (Fp8Case(batch=1, heads=16), [20_000]),
        (Fp8Case(batch=6, heads=128, q_len=2), [4096, 65, 3000, 0, 700, 1]),
        (Fp8Case(batch=200, heads=9), [300] * 200),
    ):
        case = dataclasses.replace(case, form=form, operation=operation)
        problem = make_fp8(cp, case, np.array(lengths))
        results = [arrays_of(run(problem)) for _ in range(20)]
        problem.check(*results[0])
        assert all(same_bits(result, results[0]) for result in results[1:])


@pytest.mark.parametrize("heads", [16, 40, 128])
@pytest.mark.parametrize(
    ("form", "page_size"), [("one", 64), ("scales", 64), ("packed", 64), ("one", 1), ("packed", 16)]
)
def test_random_delays_at_every_barrier(form: str, page_size: int, heads: int) -> None:
    """Delays shift who waits for whom; the results keep the bits of the kernel without them."""
    case = Fp8Case(batch=3, heads=heads, form=form, page_size=page_size)
    problem = make_fp8(cp, case, np.array([100_003, 65, 3000]))
    expected = arrays_of(run(problem))
    delays = variants.FP8_64_DELAYS if heads % 64 == 0 else variants.FP8_DELAYS
    with variants.installed(*delays):
        for _ in range(50):
            assert same_bits(arrays_of(run(problem)), expected)


@pytest.mark.parametrize("form", ["one", "packed"])
def test_random_delays_between_short_segments_of_many_heads(form: str) -> None:
    """Both consumers have every segment, of some no block."""
    lengths = np.array([128, 64, 0, 65, 192, 1, 130] * 30)
    problem = make_fp8(cp, Fp8Case(batch=len(lengths), heads=64, form=form), lengths)
    expected = arrays_of(run(problem))
    with variants.installed(*variants.FP8_64_DELAYS):
        assert all(same_bits(arrays_of(run(problem)), expected) for _ in range(40))


@pytest.mark.parametrize("form", ["one", "scales", "packed"])
@pytest.mark.parametrize("wait", [True, False], ids=["as it is", "a planted race"])
def test_random_delays_between_short_segments(form: str, wait: bool) -> None:
    """Several requests a part, some of which one consumer has no block of, or none has."""
    lengths = np.array([128, 64, 0, 65, 192, 1, 130] * 90)
    problem = make_fp8(cp, Fp8Case(batch=len(lengths), heads=16, form=form), lengths)
    expected = arrays_of(run(problem))
    edits = [*variants.FP8_DELAYS, *([] if wait else [variants.FP8_MISSING_END_WAIT])]
    with variants.installed(*edits):
        same = [same_bits(arrays_of(run(problem)), expected) for _ in range(40)]
    assert all(same) is wait


@pytest.mark.parametrize("heads", [8, 48, 128])
@some_forms
def test_batch_invariant(form: str, heads: int, record_figures: Report) -> None:
    record_figures(check_batch_invariance(cp, Fp8Case(heads=heads, form=form)))


@every_operation
def test_strided_queries_and_forms_of_them(operation: str) -> None:
    expected: Any = None
    for query_form in ("one", "pair", "slices", "padded"):
        case = Fp8Case(
            batch=2, q_len=3, heads=40, operation=operation, query_form=query_form, kv_heads=2
        )
        got = arrays_of(run(make_fp8(cp, case)))
        expected = expected or got
        assert same_bits(got, expected), query_form


# --- factors --------------------------------------------------------------------------------------


ANY = [(form, factor) for form in SCALED for factor in (1.0, 0.5, 1e-4, 3e5, 1e-30)]


@pytest.mark.parametrize(("form", "factor"), [x for x in ANY if x[0] != "scales, e4m3 rope"])
@pytest.mark.parametrize(("operation", "heads"), [("decode", 16), ("table", 16), ("decode", 64)])
def test_any_factor(
    form: str, factor: float, operation: str, heads: int, record_figures: Report
) -> None:
    """Of the tensor; the query makes up for it, so that the scores stay as they are."""
    problem = make_fp8(cp, Fp8Case(batch=3, heads=heads, form=form, operation=operation))
    relative = factor / FACTOR
    scaled = slice(None) if problem.case.has_e4m3_rope else slice(512)
    divide_query(problem, scaled, relative)
    problem.kv_scale = problem.factor = float(np.float32(factor))
    expected = problem.expected()
    out, lse = problem.outputs("float32")
    problem.call(out=out.array, lse=lse.array)
    got = out.array.astype(cp.float64).reshape(expected.out.shape)
    figures = check_out(cp, got / relative, expected.out / relative)
    oracle.check_lse(cp, lse.array.astype(cp.float64).reshape(3, 1, heads), expected.lse)
    record_figures(figures)


@pytest.mark.parametrize(("form", "heads", "operation"), extreme_cases.KERNELS)
def test_factors_at_the_ends_of_float32(form: str, heads: int, operation: str) -> None:
    extreme_cases.attend_to_zeros(cp, form, heads, operation)


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("factor", [1.0, 0.5, 1e-4])
def test_any_factor_of_rope_columns(factor: float, heads: int, record_figures: Report) -> None:
    """Beside latent ones with scales."""
    problem = make_fp8(cp, Fp8Case(batch=3, heads=heads, form="scales, e4m3 rope"))
    divide_query(problem, slice(512, None), factor / FACTOR)
    problem.kv_scale = problem.factor = float(np.float32(factor))
    record_figures(attend_and_check(problem))


def divide_query(problem: Fp8Problem, columns: slice, number: float) -> None:
    """Divide columns of a query of one token a request, in one array."""
    q = oracle.widen(cp, problem.q_bits, "bfloat16").astype(cp.float32)
    q[..., columns] /= np.float32(number)
    problem.q_bits = (q.view(cp.uint32) >> cp.uint32(16)).astype(cp.uint16)
    problem.q = typed(problem.q_bits, "bfloat16").reshape(problem.q.shape)


def with_one_row_of_scales(problem: Fp8Problem, kv_heads: int = 1) -> Fp8Problem:
    """Give all tokens the scales of one row, or of one a kv head, without memory of their own."""
    latent, rope, _ = problem.kv_cache
    rows = cp.asarray((group_sizes(problem.case)[:kv_heads] * 0.0107).astype(np.float32))
    assert problem.scales is not None
    problem.scales[...] = rows
    scales = cp.broadcast_to(rows if kv_heads > 1 else rows[0], (*latent.shape[:3], 4))
    assert scales.strides == (0, 0, 16 * (kv_heads > 1), 4)
    problem.kv_cache = latent, rope, scales
    return problem


@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize("form", ["scales", "scales, e4m3 rope"])
@every_operation
def test_scales_of_one_row_for_all(operation: str, form: str, page_size: int) -> None:
    """Strides of 0, which threads read and the copy engine may not."""
    case = Fp8Case(form=form, batch=2, page_size=page_size, operation=operation)
    attend_and_check(with_one_row_of_scales(make_fp8(cp, case)))


@pytest.mark.parametrize("heads", [32, 128])
@pytest.mark.parametrize("page_size", [1, 64])
def test_scales_of_one_row_a_kv_head(page_size: int, heads: int) -> None:
    """With split requests, and with the bits of scales that have memory."""
    case = Fp8Case(form="scales", batch=2, kv_heads=2, heads=heads, page_size=page_size)
    problem = with_one_row_of_scales(make_fp8(cp, case, np.array([9000, 70])), 2)
    got = run(problem)
    check(problem, got)
    latent, rope, scales = problem.kv_cache
    problem.kv_cache = latent, rope, cp.ascontiguousarray(scales)
    assert same_bits(arrays_of(run(problem)), arrays_of(got))


@every_operation
def test_columns_of_one_page_for_all(operation: str) -> None:
    """A cache whose pages are one and the same, too."""
    case = Fp8Case(form="bytes", batch=2, kv_len=64, operation=operation)
    problem = make_fp8(cp, case)
    page = problem.kv_cache[int(problem.table[0, 0])]
    problem.latent[64:], problem.rope[64:] = problem.latent[:64], problem.rope[:64]
    problem.kv_cache = cp.broadcast_to(page, problem.kv_cache.shape)
    assert problem.kv_cache.strides[0] == 0
    attend_and_check(problem)


@pytest.mark.parametrize("page_size", [16, 64])
@every_operation
def test_a_plan_and_a_graph_of_broadcast_scales(operation: str, page_size: int) -> None:
    """Their kernel, not that of other caches with such pages, is among those made ready."""
    case = Fp8Case(form="scales", batch=2, page_size=page_size, operation=operation)
    problem = with_one_row_of_scales(make_fp8(cp, case))
    plan = problem.plan()
    expected = arrays_of(run(problem, plan))
    problem.check(*expected)
    assert same_bits(arrays_of(CapturedRun(problem, plan).replay()), expected)


@pytest.mark.parametrize("form", SCALED)
@every_operation
def test_a_graph_replayed_with_new_factors(operation: str, form: str) -> None:
    """They are read when the kernel runs: nothing on the host looks at them."""
    case = Fp8Case(batch=3, form=form, operation=operation, kv_scale="array")
    problem = make_fp8(cp, case)
    captured = CapturedRun(problem, problem.plan())
    for factor in (FACTOR, 0.3 * FACTOR, 1.7 * FACTOR):
        problem.kv_scale[...] = factor
        problem.factor = float(np.float32(factor))
        check(problem, captured.replay())


# --- plans, graphs, streams -----------------------------------------------------------------------


@every_operation
def test_a_plan_serves_every_form(operation: str) -> None:
    """And gives the bits of calls, also as launches that are ready; with garbage in its buffer."""
    lengths = np.array([5000, 64, 333, 0])
    shape = {"batch": 4, "q_len": 2, "heads": 48, "operation": operation}
    first = make_fp8(cp, Fp8Case(**shape), lengths)
    sizes = {"cache_dtype": "float8_e4m3fn"}
    size = (
        cumla.MLADecodePlan.workspace_bytes(4, 2, 48, **sizes)
        if operation == "decode"
        else cumla.MLAAttentionPlan.workspace_bytes(4, 8, 48, **sizes)
    )
    buffer = cp.empty(size + 4096, cp.uint8)
    buffer[...] = 0xFF
    plan = first.plan(workspace=buffer[:size])
    for byte in (0xFF, 0x00, 0x7F):
        buffer[...] = byte
        plan.update(**first.lengths_of_plan)
        for form in FORMS:
            problem = make_fp8(cp, Fp8Case(**shape, form=form), lengths)
            expected = arrays_of(run(problem))
            problem.check(*expected)
            out, lse = problem.outputs()
            for _ in range(2):
                plan.run(**problem.inputs, out=out.array, lse=lse.array)
                assert same_bits((out.array, lse.array), expected), form
        assert bool((buffer[size:] == byte).all()), "memory behind the workspace was written"


@some_forms
@pytest.mark.parametrize("heads", [8, 128])
@every_operation
def test_a_graph_serves_changing_lengths(operation: str, heads: int, form: str) -> None:
    case = Fp8Case(batch=4, q_len=2, heads=heads, form=form, operation=operation)
    problem = make_fp8(cp, case, np.full(4, 3000))
    captured = CapturedRun(problem, problem.plan())
    for later in ([3000] * 4, [1, 3000, 64, 0], [0] * 4, [2999, 65, 3000, 700]):
        problem.kv_lens[...] = cp.asarray(np.array(later, np.int32))
        check(problem, captured.replay(), expected=problem.expected(np.array(later)))


@some_forms
@every_operation
def test_a_side_stream(operation: str, form: str) -> None:
    """What that stream does before, and late, is seen; the calls do not wait."""
    case = Fp8Case(batch=3, heads=64, form=form, operation=operation, kv_scale="array")
    problem = make_fp8(cp, case)
    expected = arrays_of(run(problem))
    plan = problem.plan()
    parts = problem.kv_cache if isinstance(problem.kv_cache, tuple) else (problem.kv_cache,)
    parts = (*parts, problem.kv_scale)
    late = tuple(cp.zeros_like(as_bytes(part)) for part in parts)
    stream = cp.cuda.Stream(non_blocking=True)
    moved = dataclasses.replace(
        problem,
        kv_cache=tuple(copy.view(part.dtype) for copy, part in zip(late, parts[:-1], strict=False)),
        kv_scale=late[-1].view(np.float32).reshape(problem.kv_scale.shape),
    )
    if len(moved.kv_cache) == 1:
        moved.kv_cache = moved.kv_cache[0]
    outputs = [moved.outputs() for _ in range(2)]
    cp.cuda.Device().synchronize()
    with stream:
        kernels.spin(100_000_000)
        for copy, part in zip(late, parts, strict=True):
            copy[...] = as_bytes(part)
    moved.call(out=outputs[0][0].array, lse=outputs[0][1].array, stream=stream)
    plan.update(**problem.lengths_of_plan, stream=stream)
    plan.run(**moved.inputs, out=outputs[1][0].array, lse=outputs[1][1].array, stream=stream)
    assert not stream.done, "a call waited for the device"
    stream.synchronize()
    for result in outputs:
        assert same_bits(arrays_of(result), expected)


def as_bytes(array: Any) -> Any:
    """Contiguous bytes of an array; CuPy copies no numbers of few bits as such."""
    return cp.ascontiguousarray(cp.atleast_1d(array).view(cp.uint8))


def test_plans_of_other_caches_are_refused() -> None:
    problem = make_fp8(cp, Fp8Case())
    plan = problem.plan()
    whole = typed(cp.zeros((8, 64, 1, 576), cp.uint16), "bfloat16")
    with pytest.raises(ValueError, match=r"^plan: made for a cache of float8_e4m3fn, got one of b"):
        plan.run(**problem.inputs | {"kv_cache": whole})


# --- what is written is read ----------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("form", [form for form in FORMS if form != "scales, e4m3 rope"])
def test_rows_that_were_appended_are_attended_to(
    form: str, page_size: int, record_figures: Report
) -> None:
    """On one stream, without a wait between; held against the reference over the bytes written."""
    case = Fp8Case(batch=3, q_len=2, heads=16, form=form, page_size=page_size)
    lengths = np.array([300, 65, 7])
    problem = make_fp8(cp, case, lengths)
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((int(lengths.sum()), 576), dtype=np.float32) * 0.25
    requests = np.repeat(np.arange(3), lengths)
    tokens = np.arange(len(rows)) - problem.begins[requests]
    slots = problem.table[requests, tokens // page_size].astype(np.int64) * page_size
    arguments = {"kv_scale": FACTOR} if form in SCALED else {}
    bits = cp.asarray(rows.astype(ml_dtypes.bfloat16).view(np.uint16))
    cumla.append_mla_cache(
        bits.view(ml_dtypes.bfloat16),
        problem.kv_cache,
        cp.asarray(slots + tokens % page_size),
        **arguments,
    )
    q = normal_query(problem)
    out, lse = problem.outputs("float32")
    problem.q = q
    problem.call(out=out.array, lse=lse.array)
    host = tuple(as_host(part) for part in parts_of(problem.kv_cache))
    expected = cumla.reference.mla_decode(
        as_host(q),
        host if len(host) > 1 else host[0],
        problem.table,
        lengths,
        kv_scale=FACTOR if form in SCALED else None,
        out=np.empty(problem.out_shape, np.float32),
    )
    record_figures(check_out(np, cp.asnumpy(out.array).astype(float), expected.out.astype(float)))
    np.testing.assert_allclose(cp.asnumpy(lse.array), expected.lse, rtol=8.01 / 65536, atol=1e-6)


def normal_query(problem: Fp8Problem) -> Any:
    """A query without regard to scales."""
    rng = np.random.default_rng(2)
    q = (rng.standard_normal(problem.q_bits.shape) / 2).astype(ml_dtypes.bfloat16)
    return cp.asarray(q.view(np.uint16)).view(ml_dtypes.bfloat16)


def parts_of(cache: Any) -> tuple[Any, ...]:
    return cache if isinstance(cache, tuple) else (cache,)


def as_host(array: Any) -> np.ndarray:
    """A copy on the host."""
    copied: np.ndarray = cp.asnumpy(as_bytes(array))
    return copied.view(array.dtype)


# --- frameworks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@every_operation
def test_torch(operation: str, form: str) -> None:
    """Tensors of every argument: eagerly, and captured into a graph."""
    torch = pytest.importorskip("torch")
    case = Fp8Case(batch=3, q_len=2, form=form, operation=operation, kv_scale="array")
    problem = make_fp8(cp, case)
    expected = arrays_of(run(problem))
    tensors = {
        name: tuple(to_torch(torch, part) for part in value)
        if isinstance(value, tuple)
        else None
        if value is None
        else to_torch(torch, value)
        for name, value in (problem.lengths_of_plan | problem.inputs).items()
    }
    cache = tensors["kv_cache"]
    if form in ("one", "pair"):
        assert parts_of(cache)[0].dtype == torch.float8_e4m3fn
    operation_of = cumla.mla_decode if operation == "decode" else cumla.mla_attention
    result = operation_of(**tensors)
    torch.cuda.synchronize()
    assert same_bits([from_torch(torch, tensor) for tensor in result], expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = operation_of(**tensors)
    for tensor in result:
        tensor.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits([from_torch(torch, tensor) for tensor in result], expected)


@pytest.mark.parametrize("form", FORMS)
def test_jax(form: str) -> None:
    """Its arrays of e4m3, of bytes and of the factor."""
    jax = pytest.importorskip("jax")
    if jax.default_backend() not in ("gpu", "cuda"):
        pytest.skip("needs JAX on the GPU")
    problem = make_fp8(cp, Fp8Case(batch=3, q_len=2, form=form, kv_scale="array"))
    expected = arrays_of(run(problem))
    cache = tuple(jax.numpy.asarray(as_host(part)) for part in parts_of(problem.kv_cache))
    if form in ("one", "pair"):
        assert cache[0].dtype == FP8
    q, table, lengths = (
        jax.numpy.asarray(as_host(array))
        for array in (problem.q, problem.block_table, problem.kv_lens)
    )
    result = cumla.mla_decode(
        q,
        cache if len(cache) > 1 else cache[0],
        table,
        lengths,
        kv_scale=jax.numpy.asarray(np.float32(FACTOR)) if form in SCALED else None,
    )
    assert isinstance(result.out, jax.Array)
    assert same_bits([from_jax(array) for array in result], expected)


def test_parts_of_several_frameworks() -> None:
    """A query of CuPy's, columns of PyTorch's, scales and factor of JAX's."""
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    if jax.default_backend() not in ("gpu", "cuda"):
        pytest.skip("needs JAX on the GPU")
    problem = make_fp8(cp, Fp8Case(form="scales, e4m3 rope", kv_scale="array"))
    expected = arrays_of(run(problem))
    latent, rope, scales = problem.kv_cache
    problem.kv_cache = (
        to_torch(torch, latent),
        to_torch(torch, rope),
        jax.numpy.asarray(as_host(scales)),
    )
    problem.kv_scale = jax.numpy.asarray(np.float32(FACTOR))
    assert same_bits(arrays_of(run(problem)), expected)


def test_forms_of_one_problem_hold_the_same_numbers() -> None:
    """What the tests of bits rely on."""
    problem = make_fp8(cp, Fp8Case(form="packed"))
    scales = cache_in(problem, "scales", len(problem.kv_cache))
    assert {part for parts in PARTS["scales"] for part in parts} == set(PARTS["packed"][0])
    moved = dataclasses.replace(problem, kv_cache=scales)
    assert same_bits(arrays_of(run(moved)), arrays_of(run(problem)))


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("exponent", [20, 28, 30])
def test_the_score_of_a_single_token_may_have_any_size(exponent: int, heads: int) -> None:
    problem = make_fp8(cp, Fp8Case(batch=3, heads=heads, form="one"), np.ones(3, np.int64))
    expected = problem.expected()
    divide_query(problem, slice(None), 2.0**-exponent)
    out, _ = run(problem)
    check_out(cp, out.array.astype(cp.float64).reshape(expected.out.shape), expected.out)
