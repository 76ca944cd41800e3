# SPDX-License-Identifier: Apache-2.0
"""Kernels of attention with a bias on the CPU, against the rule of each bias."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

import cumla
from tests.emulator import emulated_gpu
from tests.mha.bias_cases import BIASES, Biased, check, make, poisoned, samples
from tests.mha.test_attention_mask import Sample


def run(biased: Biased, cupy: Any, **more: Any) -> Any:
    given = {name: cupy.like(value) for name, value in biased.problem.given.items()}
    return cumla.attention(**given, **biased.options, bias=biased.bias(cupy.like), **more)


@pytest.mark.parametrize("sample", samples(72)[::2], ids=lambda s: f"{s[0]}-{s[1].seed}")
def test_grid(sample: tuple[str, Sample]) -> None:
    """Elements of tables that no query has any use for are NaN."""
    biased = poisoned(make(*sample))
    with emulated_gpu(3) as cupy:
        check(biased, run(biased, cupy), sample[1].dtype)


FULL = [
    (bias, columns, dtype, q_lens)
    for i, (bias, q_lens) in enumerate(product(BIASES, ((70,), (40, 0, 90))))
    for columns, dtype in [
        (((64, 64), (128, 128), (256, 256), (96, 96))[i % 4], ("bfloat16", "float16")[i % 2])
    ]
]


@pytest.mark.parametrize(("bias", "columns", "dtype", "q_lens"), FULL, ids=str)
def test_full_tiles(bias: str, columns: Any, dtype: str, q_lens: Any) -> None:
    """Many query rows, alone and beside requests of few."""
    sample = Sample(
        *("windows", columns, dtype, "same", 64, q_lens, (8, 1), False, None, "table"),
        seed=sum(q_lens),
    )
    biased = poisoned(make(bias, sample))
    with emulated_gpu(1) as cupy:
        check(biased, run(biased, cupy), dtype)


def entry_of(given: dict[str, Any], form: str) -> str:
    """Name the kernel of a call with a bias of this form."""
    names = given.keys() & {"q", "k", "v", "qo_indptr"}
    arrays = {name: given[name] for name in names}
    return cumla.AttentionPlan.from_arrays(**arrays, bias_form=form).key.choice.spec.entry


@pytest.mark.parametrize("columns", [64, 128, 256])
def test_few_rows(columns: int) -> None:
    """Tiles of up to eight rows of three query tokens; elements that no query uses are NaN."""
    for i, kind in enumerate(BIASES):
        sample = Sample(
            *("windows", (columns, columns), ("bfloat16", "float16")[i % 2], "same", 64, "equal"),
            *(((2, 2), (4, 2), (6, 3))[i % 3], i % 2 == 0, None, "table"),
            seed=i,
        )
        biased = poisoned(make(kind, sample))
        form = "linear" if "slopes" in kind else "table"
        with emulated_gpu(40 if i % 2 or columns == 64 else 3) as cupy:
            given = {name: cupy.like(value) for name, value in biased.problem.given.items()}
            assert entry_of(given, form).startswith(f"attention_few_{form}_")
            check(biased, run(biased, cupy), sample.dtype)


ONE_OF_EACH = [  # boxes, rows, e4m3, float32, and full tiles with slopes and with a table
    Sample(
        *("windows", (columns, columns), dtype, cache, size, q_lens, (4, 1), False, None, "table"),
        seed=1,
    )
    for columns, dtype, cache, size, q_lens in (
        *((64, "bfloat16", "same", 16, (4, 1)), (64, "float16", "same", 1, (4, 1))),
        *((64, "bfloat16", "e4m3", 16, (4, 1)), (64, "float32", "same", 16, (4, 1))),
        *((64, "bfloat16", "same", 64, (70,)), (128, "bfloat16", "same", 64, (70,))),
    )
]


@pytest.mark.parametrize(
    "sample", ONE_OF_EACH, ids=lambda s: f"{s.columns[0]}-{s.dtype}-{s.cache}-{s.page_size}"
)
def test_nan_shows_in_the_rows_that_read_it(sample: Sample) -> None:
    """And infinite numbers do no harm to other rows."""
    for kind, name, at in (
        ("slopes", "slopes", 1),
        ("rows", "table", (0, 1)),
        ("heads", "table", 1),
    ):
        biased = make(kind, sample)._replace(window=None, causal=True)
        good = biased.arrays[name]
        for value in (np.nan, np.inf, -np.inf):
            arrays = dict(biased.arrays)
            arrays[name] = good.copy()
            row = biased.problem.case.batch.lead
            arrays[name][(row, 1) if kind == "rows" else at] = value
            with emulated_gpu(1) as cupy:
                got = run(biased._replace(arrays=arrays), cupy)
            heads = [0, 2, 3]
            one = got._replace(out=np.asarray(got.out)[:, heads], lse=np.asarray(got.lse)[:, heads])
            expected = cumla.attention(**biased.problem.given, **biased.options, bias=biased.bias())
            rows = [query.row for query in biased.problem.case.batch.queries()]
            np.testing.assert_allclose(
                one.lse[rows], expected.lse[rows][:, heads], rtol=1e-4, atol=1e-4
            )
            assert np.isfinite(one.out[rows].astype(np.float32)).all()


@pytest.mark.parametrize("first", [-(2**31), -1, 2**31 - 1])
def test_any_first_distance(first: int) -> None:
    for sample in ONE_OF_EACH:
        biased = make("heads from", sample)
        arrays = biased.arrays | {"first": np.int32([first])}
        biased = biased._replace(arrays=arrays)
        with emulated_gpu(1) as cupy:
            check(biased, run(biased, cupy), sample.dtype)


def test_zero_slopes_change_nothing() -> None:
    """The scores are those of a call without a bias, in tolerance; kernels round otherwise."""
    biased = make("slopes", ONE_OF_EACH[0])
    biased = biased._replace(arrays={"slopes": np.zeros_like(biased.arrays["slopes"])})
    with emulated_gpu(1) as cupy:
        got = run(biased, cupy)
    plain = cumla.attention(**biased.problem.given, **biased.options)
    rows = [query.row for query in biased.problem.case.batch.queries()]
    np.testing.assert_allclose(np.asarray(got.lse)[rows], plain.lse[rows], atol=1.2e-5)


def test_split_requests() -> None:
    """Parts of a request count distances from the same position."""
    for kind in BIASES:
        sample = ONE_OF_EACH[0]._replace(q_lens=(1,), seed=3)
        biased = make(kind, sample)._replace(window=None)
        long = {"kv_lens": np.int32([700])}
        rng = np.random.default_rng(0)
        heads = biased.problem.given["k"].shape[2]
        pages = [rng.standard_normal((11, 64, heads, 64)).astype(np.float16) for _ in "kv"]
        table = rng.permutation(11).astype(np.int32)[None]
        q = rng.standard_normal((1, 4, 64)).astype(np.float16)
        given = {"q": q, "k": pages[0], "v": pages[1], "block_table": table, **long}
        given["qo_indptr"] = np.int32([0, 1])
        arrays = dict(biased.arrays)
        if arrays.get("table") is not None and arrays["table"].ndim == 3:
            arrays["table"] = arrays["table"][:1]
        expected = cumla.attention(**given, bias=cumla.AttentionBias(**arrays))
        with emulated_gpu(5) as cupy:
            there = {name: cupy.like(value) for name, value in given.items()}
            bias = cumla.AttentionBias(**{name: cupy.like(a) for name, a in arrays.items()})
            form = "linear" if "slopes" in kind else "table"
            assert entry_of(there, form).startswith(f"attention_few_{form}_")
            got = cumla.attention(**there, bias=bias)
        np.testing.assert_allclose(np.asarray(got.lse), expected.lse, rtol=1e-5, atol=1e-5)
        out = np.asarray(got.out).astype(np.float64)
        np.testing.assert_allclose(out, expected.out.astype(np.float64), atol=4e-3)
