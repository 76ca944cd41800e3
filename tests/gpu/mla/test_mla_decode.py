# SPDX-License-Identifier: Apache-2.0
"""mla_decode over the grid and its corners, against float64, with poisoned memory all around."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cumla
from tests.gpu.tools import oracle
from tests.gpu.tools.cases import Case, covering_sample
from tests.gpu.tools.problem import (
    GARBAGE,
    HEAD_DIM,
    NAN_BITS,
    PAGE_SIZE,
    VALUE_DIM,
    Problem,
    make_problem,
    normal_bits,
    poison_unused,
    typed,
)

KERNELS = ("schedule", "mla_decode", "mla_decode_swapped")
cp: Any = pytest.importorskip("cupy")

Report = Callable[..., None]


def decode(problem: Problem, **options: Any) -> cumla.AttentionState:
    return cumla.mla_decode(
        *problem.arrays,
        softmax_scale=problem.softmax_scale,
        causal=problem.case.causal,
        **options,
    )


def poison_free_memory(*sizes: int) -> None:
    """Leave blocks full of NaN for CuPy's allocator to hand out again."""
    blocks = [cp.full(size, 0xFF, dtype=cp.uint8) for size in sizes]
    del blocks


def decode_and_check(problem: Problem, outputs: str = "given") -> dict[str, float]:
    """Run a case with its kind of outputs; every element must be written, and nothing else."""
    if outputs == "allocated":
        elements = int(np.prod(problem.out_shape))
        poison_free_memory(2 * elements, 4 * int(np.prod(problem.lse_shape)))
        result = decode(problem)
        assert str(result.out.dtype) == problem.case.dtype
        return problem.check(result.out, result.lse)
    out, lse = problem.outputs("float32" if outputs == "float32" else None)
    result = decode(problem, out=out.array, lse=lse.array)
    assert result.out is out.array
    assert result.lse is lse.array
    figures = problem.check(out.array, lse.array)
    out.check_guards()
    lse.check_guards()
    return figures


@pytest.mark.parametrize("case", covering_sample(), ids=lambda case: case.name)
def test_grid(case: Case, record_figures: Report) -> None:
    record_figures(decode_and_check(make_problem(cp, case), case.outputs))


@pytest.mark.parametrize("heads", [8, 16, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_70000_tokens_at_batch_1(heads: int, dtype: str, record_figures: Report) -> None:
    case = Case(batch=1, kv_len=70_000, heads=heads, dtype=dtype, ragged=False, q_len=2)
    record_figures(decode_and_check(make_problem(cp, case)))


@pytest.mark.parametrize("heads", [16, 32, 80])
def test_cache_beyond_32_bit_offsets(heads: int, record_figures: Report) -> None:
    """More than 2^32 elements, 8.9 GB; the pages in use straddle 2^31 and lie at the far end."""
    num_pages = 120_000
    case = Case(batch=2, heads=heads)
    lengths = np.array([1000, 333], dtype=np.int32)
    used = [num_pages - 1, 58_254, 0, 116_509, 58_255, 119_000, 29_127, 116_508]
    used += list(range(num_pages - 20, num_pages - 1))
    table = np.full((2, 20), GARBAGE[0], dtype=np.int32)
    table[0, :16], table[1, :6] = used[:16], used[16:22]

    assert num_pages * PAGE_SIZE * HEAD_DIM > 1 << 32
    kv_bits = cp.full((num_pages, PAGE_SIZE, 1, HEAD_DIM), NAN_BITS[case.dtype], dtype=cp.uint16)
    # The same pages once more, one after the other: what the reference reads.
    compact_table = np.where(table == GARBAGE[0], GARBAGE[0], 0).astype(np.int32)
    compact_table[0, :16], compact_table[1, :6] = range(16), range(16, 22)
    compact = normal_bits(cp, (22, PAGE_SIZE, 1, HEAD_DIM), case.dtype, 0.1, 5)
    poison_unused(cp, compact, lengths, compact_table, case.dtype)
    for page, content in zip(used[:22], compact, strict=True):
        kv_bits[page] = content  # addressed on the host, with 64 bits

    q_bits = normal_bits(cp, (2, 1, heads, HEAD_DIM), case.dtype, 0.1, 11)
    result = cumla.mla_decode(
        typed(q_bits, case.dtype),
        typed(kv_bits, case.dtype),
        cp.asarray(table),
        cp.asarray(lengths),
    )
    expected = oracle.decode(
        cp,
        q_bits,
        compact,
        compact_table,
        lengths,
        dtype=case.dtype,
        softmax_scale=HEAD_DIM**-0.5,
        causal=True,
    )
    got = oracle.widen(cp, result.out.view(cp.uint16), case.dtype)
    figures = oracle.check_out(cp, got, expected.out, v_rms=expected.v_rms, outliers=False)
    oracle.check_lse(cp, result.lse.astype(cp.float64), expected.lse)
    record_figures(figures)


@pytest.mark.parametrize("kv_len", [300, 5000])
@pytest.mark.parametrize("heads", [8, 16, 128])
def test_batch_1024_ragged(kv_len: int, heads: int, record_figures: Report) -> None:
    lengths = np.random.default_rng(3).integers(0, 300, size=1024)
    lengths[::97] = kv_len  # a few long ones make cutting worth it
    problem = make_problem(cp, Case(batch=1024, kv_len=kv_len, heads=heads, q_len=2), lengths)
    record_figures(decode_and_check(problem))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("q_len", "heads", "kv_heads"), [(5, 128, 1), (9, 96, 2), (70, 3, 1)])
def test_several_hundred_query_rows(
    q_len: int, heads: int, kv_heads: int, causal: bool, record_figures: Report
) -> None:
    """Lengths below q_len too, so that causal rows see nothing."""
    case = Case(batch=5, q_len=q_len, heads=heads, kv_heads=kv_heads, causal=causal)
    lengths = np.array([2000, 3, 64, 0, q_len + 63])
    record_figures(decode_and_check(make_problem(cp, case, lengths)))


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("sm_share", [0.5, 1.0, 1.5, 2.0])
def test_batches_around_the_number_of_multiprocessors(
    sm_share: float, heads: int, record_figures: Report
) -> None:
    """Where a schedule turns from cut to whole requests."""
    count = cp.cuda.runtime.getDeviceProperties(0)["multiProcessorCount"]
    case = Case(batch=int(count * sm_share) + 1, kv_len=257, heads=heads, ragged=False)
    record_figures(decode_and_check(make_problem(cp, case)))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257])
@pytest.mark.parametrize("heads", [4, 9, 17])
def test_every_tail_of_a_few_pages(length: int, heads: int, record_figures: Report) -> None:
    case = Case(batch=3, q_len=4, heads=heads, ragged=False, kv_len=length)
    record_figures(decode_and_check(make_problem(cp, case)))


@pytest.mark.parametrize("heads", [8, 24, 40])
def test_lengths_are_clamped(heads: int) -> None:
    """Lengths that the table cannot hold, and negative ones; no memory but the cache is read."""
    true = np.array([256, 0, 200, 0, 256, 256])
    problem = make_problem(cp, Case(batch=6, heads=heads, q_len=2), true)
    problem.block_table = problem.block_table[:, :4]
    wrong = [2**31 - 1, -5, 200, -(2**31), 257, 1 << 30]
    problem.kv_lens = cp.asarray(np.array(wrong, dtype=np.int32))
    decode_and_check(problem)


@pytest.mark.parametrize("heads", [16, 32, 80])
def test_page_numbers_out_of_range_read_as_zeros(heads: int) -> None:
    problem = make_problem(cp, Case(batch=4, heads=heads), np.array([700, 300, 64, 1000]))
    num_pages = problem.kv_bits.shape[0]
    bad = problem.table.copy()
    bad[0, 3], bad[1, 0], bad[1, 1], bad[3, 15] = -1, 2147480000, num_pages, -(2**31)
    zeros = cp.zeros((1, *problem.kv_bits.shape[1:]), dtype=cp.uint16)
    problem.kv_bits = cp.concatenate([problem.kv_bits, zeros])
    out, lse = problem.outputs()
    problem.block_table = cp.asarray(bad)
    decode(problem, out=out.array, lse=lse.array)
    problem.table[[0, 1, 1, 3], [3, 0, 1, 15]] = num_pages  # the reference's page of zeros
    problem.check(out.array, lse.array)
    out.check_guards()
    lse.check_guards()


@pytest.mark.parametrize("heads", [16, 32, 80])
def test_no_table_columns_and_no_tokens(heads: int) -> None:
    """A table without columns has room for nothing: every length is clamped to 0."""
    problem = make_problem(cp, Case(batch=2, heads=heads), np.array([64, 64]))
    problem.block_table = cp.empty((2, 0), dtype=cp.int32)
    out, lse = problem.outputs()
    decode(problem, out=out.array, lse=lse.array)
    problem.check(out.array, lse.array, problem.expected(np.zeros(2, dtype=np.int32)))


@pytest.mark.parametrize("heads", [5, 20, 30])
def test_strided_outputs_and_lengths(heads: int, record_figures: Report) -> None:
    """Padding between the rows of out stays as it was; lse may have its axes swapped."""
    case = Case(batch=3, q_len=3, heads=heads, kv_len=900)
    problem = make_problem(cp, case)
    base = cp.full((3, 4, heads + 2, VALUE_DIM + 8), 0xFFFF, dtype=cp.uint16)
    out = typed(base[:, :3, :heads, :VALUE_DIM], case.dtype)
    lse = cp.full((3, heads, 3), np.nan, dtype=cp.float32).transpose(0, 2, 1)
    spread = cp.full(6, -7, dtype=cp.int32)
    spread[::2] = problem.kv_lens
    problem.kv_lens = spread[::2]
    decode(problem, out=out, lse=lse)
    record_figures(problem.check(cp.ascontiguousarray(out), cp.ascontiguousarray(lse)))
    base[:, :3, :heads, :VALUE_DIM] = 0xFFFF
    assert bool((base == 0xFFFF).all())


@pytest.mark.parametrize("given", ["out", "lse"])
def test_one_output_given(given: str) -> None:
    problem = make_problem(cp, Case())
    out, lse = problem.outputs()
    array = (out if given == "out" else lse).array
    result = decode(problem, **{given: array})
    assert getattr(result, given) is array
    problem.check(*result)


@pytest.mark.parametrize("heads", [7, 9, 40])
def test_inputs_are_left_alone(heads: int) -> None:
    problem = make_problem(cp, Case(batch=3, kv_len=500, heads=heads, q_len=2))
    arrays = (problem.q_bits, problem.kv_bits, problem.block_table, problem.kv_lens)
    before = [array.copy() for array in arrays]
    decode(problem)
    for array, copy in zip(arrays, before, strict=True):
        assert bool((array == copy).all())


@pytest.mark.parametrize("heads", [8, 24, 72])
@pytest.mark.parametrize("inputs", ["one-hot", "constant"])
def test_one_hot_and_constant_rows(inputs: str, heads: int) -> None:
    """One token that takes all the weight, wherever it lies; and all weights equal."""
    case = Case(batch=8, kv_len=1000, heads=heads, ragged=False, inputs="outliers")
    problem = make_problem(cp, case)
    if inputs == "constant":
        problem.q_bits[...] = 0
    else:
        one = int(np.array(30, dtype=problem.q.dtype).view(np.uint16))
        problem.q_bits[...] = 0
        problem.q_bits[..., 575] = one
        for b, token in enumerate([0, 63, 64, 127, 500, 511, 998, 999]):
            page = int(problem.table[b, token // PAGE_SIZE])
            problem.kv_bits[page, token % PAGE_SIZE, 0, 575] = one
    decode_and_check(problem)
