# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumla.bench.cases import (
    DENSE,
    Case,
    Ceilings,
    grid,
    seed_of,
    select,
    vary,
)

RAGGED_SEEDS = range(5)
H200 = Ceilings(read_gbps=4468, copy_gbps=4191, matmul_tflops=754, empty_us=3.7, fp8_tflops=1356)


@pytest.mark.parametrize(
    ("case", "floor"),
    [
        (Case(128, 1, 128, 1024), 48.4),
        (Case(128, 1, 128, 16384), 774.7),
        (Case(128, 2, 128, 1024), 96.8),
        (Case(128, 1, 64, 4096), 139.2),
        (Case(128, 1, 16, 8192), 271.4),
        (Case(16, 1, 16, 8192), 33.9),
        (Case(1, 1, 128, 8192), 3.0),
        (Case(4, 1, 16, 131072), 135.2),
    ],
)
def test_floors_of_an_h200(case: Case, floor: float):
    assert case.floor_us(H200) == pytest.approx(floor, abs=0.06)


def test_masked_pairs_do_not_count():
    assert Case(1, 2, 1, 64).flops == 2 * (63 + 64) * (576 + 512)


def test_ragged_pairs_count_request_by_request():
    case = Case(3, 2, 4, 2, seed=0)
    visible = sum(max(int(n) - 1, 0) + int(n) for n in case.lengths)
    assert case.flops == 2 * 4 * visible * (576 + 512)


def test_kv_heads_are_bytes():
    assert Case(2, 1, 4, 64, kv_heads=2).cache_bytes == 2 * Case(2, 1, 4, 64).cache_bytes


@given(
    batch=st.integers(1, 300),
    mean=st.integers(1, 20000),
    seed=st.integers(0, 1000),
)
def test_ragged_batch_has_the_tokens_of_the_equal_one(batch: int, mean: int, seed: int):
    lengths = Case(batch, 1, 16, mean, seed=seed).lengths
    assert lengths.shape == (batch,)
    assert lengths.dtype == np.int32
    assert lengths.min() >= 1
    assert int(lengths.sum()) == batch * mean


@pytest.mark.parametrize("seed", RAGGED_SEEDS)
def test_ragged_lengths_are_log_normal(seed: int):
    logarithms = np.log(Case(20000, 1, 16, 8192, seed=seed).lengths)
    assert logarithms.std() == pytest.approx(0.8, abs=0.02)
    skew = np.mean(((logarithms - logarithms.mean()) / logarithms.std()) ** 3)
    assert abs(skew) < 0.1
    assert Case(128, 1, 16, 8192, seed=seed) != Case(128, 1, 128, 8192, seed=seed)


def test_ragged_lengths_differ_by_seed_and_not_by_heads():
    lengths = [tuple(Case(128, 1, 16, 1024, seed=seed).lengths) for seed in RAGGED_SEEDS]
    assert len(set(lengths)) == 5
    assert tuple(Case(128, 1, 128, 1024, seed=0).lengths) == lengths[0]


def test_names_tell_variants_apart():
    cases = vary(DENSE, (1, 2), ("bfloat16", "float16"), (None, 0, 1))
    assert len({case.name for case in cases}) == len(set(cases)) == 24 * 12
    assert Case(128, 1, 16, 4096).name == "b128-s1-h16-kv4096"
    assert Case(1, 1, 16, 64, batch_invariant=True).name == "b1-s1-h16-kv64-invariant"
    assert Case(1, 2, 16, 64, 4, "float16", 7).name == "b1-s2-h16-kv64-kvheads4-float16-lognormal7"


def test_cases_survive_json():
    for case in vary(DENSE[:2], (1, 2), ("bfloat16", "float16"), (None, 3)):
        assert Case.from_json(case.to_json()) == case
        invariant = replace(case, batch_invariant=True)
        assert Case.from_json(invariant.to_json()) == invariant
    old = {"op": "dense_decode", "batch": 4, "q_len": 1, "heads": 16, "kv_len": 8192, "page": 64}
    assert Case.from_json(old) == Case(4, 1, 16, 8192)


def test_grid_combines_everything():
    cases = grid((1, 2), (1,), (16, 128), (100, 200))
    assert [case.name for case in cases[:3]] == [
        *("b1-s1-h16-kv100", "b1-s1-h16-kv200", "b1-s1-h128-kv100")
    ]
    assert len(cases) == len(set(cases)) == 8


def test_variants_of_a_dtype_are_neighbours():
    dtypes = [case.dtype for case in vary(DENSE, (1, 2), ("bfloat16", "float16"), (None, 0))]
    assert dtypes == sorted(dtypes)


def test_kv_heads_must_divide():
    with pytest.raises(ValueError, match="kv heads: 3 does not divide 16 heads"):
        vary((Case(1, 1, 16, 64),), (1, 3), ("bfloat16",), (None,))


@pytest.mark.parametrize("text", ["ragged", "lognormal", "lognormal:", "lognormal:-1", "12"])
def test_unknown_lengths_are_refused(text: str):
    with pytest.raises(ValueError, match="lengths: needs 'equal' or 'lognormal:SEED', got"):
        seed_of(text)
    assert seed_of("equal") is None
    assert seed_of("lognormal:12") == 12


def test_select_by_pattern_keeps_the_order():
    names = [case.name for case in select(["b1-*-h16-*", "b128-s1-h128-kv1024"])]
    assert names == ["b128-s1-h128-kv1024", "b1-s1-h16-kv8192", "b1-s1-h16-kv131072"]
    assert select([]) == DENSE


def test_select_refuses_a_pattern_without_match():
    with pytest.raises(ValueError, match=r"rows: 'b3-\*' matches none of b128-s1-h128-kv1024, "):
        select(["b1-*", "b3-*"])


def test_ceilings_survive_json():
    assert Ceilings.from_json(H200.to_json()) == H200
