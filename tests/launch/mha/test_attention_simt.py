# SPDX-License-Identifier: Apache-2.0
"""The text of the kernel without tensor cores, run by the CPU, against the reference."""

from __future__ import annotations

import numpy as np
import pytest

import cumla
from tests.calls import int32
from tests.emulator import emulated_gpu
from tests.launch.mha.test_attention import bits, call, check_sample, launches
from tests.mha.attention_cases import Sample, make, samples

FEW = (
    *samples(4, dtype="float32", lens=(200, 70, 0), heads=(4, 1)),
    *samples(1, dtype="float32", columns=(12, 252), lens=(130, 3)),
    *samples(1, dtype="float32", columns=(512, 512), lens=(130, 3), heads=(4, 1)),
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sample", samples(20, dtype="float32"), ids=lambda s: str(s.seed))
def test_all_kinds_of_calls(sample: Sample) -> None:
    check_sample(sample)


@pytest.mark.parametrize("sample", FEW, ids=lambda s: f"{s.columns[0]}-{s.seed}")
def test_attention_without_tensor_cores(sample: Sample) -> None:
    check_sample(sample)


@pytest.mark.parametrize("invariant", [False, True])
def test_repeats_and_plans_have_the_same_bits(invariant: bool) -> None:
    """A row's sums follow from its keys alone."""
    (sample,) = samples(1, dtype="float32", columns=(64, 64), lens=(200, 70, 0), queries="uniform")
    given = make(sample) | {"out": None, "lse": None}
    with emulated_gpu(8) as cupy:
        first = bits(call(cupy, given))
    with emulated_gpu(5) as cupy:
        assert bits(call(cupy, given | {"batch_invariant": invariant})) == first


def test_one_kernel_and_a_schedule_of_one_part() -> None:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((70, 2, 4)).astype(np.float32)
    k = rng.standard_normal((90, 1, 4)).astype(np.float32)
    given = {"q": q, "k": k, "v": k, "qo_indptr": int32(0, 70), "kv_indptr": int32(0, 90)}
    schedule, attend = launches(given)
    assert schedule.spec.entry == "mla_attention_schedule"
    assert attend.spec.entry == "attention_simt_float32"
    assert attend.grid == ((70 * 2 // 64 + 1) * 8, 1, 1)
    out, _ = cumla.reference.attention(**given)
    with emulated_gpu() as cupy:
        found, _ = call(cupy, given)
    np.testing.assert_allclose(found, out, rtol=1e-5, atol=1e-6)
