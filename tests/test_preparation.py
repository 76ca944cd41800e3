# SPDX-License-Identifier: Apache-2.0
"""`cumla.prepare`: what it compiles and loads, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cumla
from cumla.compat import deep_gemm
from cumla.launch import all_specs
from tests.calls import OPERATIONS, PLANS, Operation, every_operation, refused
from tests.fake_cuda import FakeBindings, FakeCuPy, FakeDriver


@every_operation
def test_functions(
    operation: Operation, cupy: FakeCuPy, bindings: FakeBindings, driver: FakeDriver
) -> None:
    """All that a call may need is loaded, and no cold kernel is met under capture."""
    cumla.prepare(operation.function)
    assert set(operation.kernels) <= set(cupy.compiled)
    assert len(cupy.compiled) == len(set(cupy.compiled))
    loaded = list(cupy.compiled)
    cumla.prepare(operation.function, device=0)
    assert cupy.compiled == loaded
    assert bindings.entries == []
    if len(operation.kernels) == 1:
        driver.capturing.add(0)
        arguments = operation.make() | operation.outputs()
        operation.function(**{name: cupy.like(value) for name, value in arguments.items()})
        assert tuple(bindings.entries) == operation.kernels


def test_all_functions_have_all_kernels(cupy: FakeCuPy) -> None:
    cumla.prepare(*(operation.function for operation in OPERATIONS.values()))
    entries = [spec.entry for spec in all_specs()]
    assert sorted(cupy.compiled) == sorted(entries)


def test_plans_and_functions(cupy: FakeCuPy, driver: FakeDriver) -> None:
    """A plan has its own kernels on its own GPU; one for the CPU has none."""
    numbers = PLANS["MLADecodePlan"].numbers
    like = cupy.ndarray((1,), np.float32, device=1)
    plan = cumla.MLADecodePlan(**numbers, like=like)
    on_cpu = cumla.MLADecodePlan(**numbers, like=np.zeros(1))
    cumla.prepare(on_cpu)
    assert cupy.compiled == []
    cumla.prepare(plan, cumla.merge_attention_states, on_cpu)
    merging = [spec.entry for spec in all_specs() if spec.stem == "merge_states"]
    assert cupy.compiled == ["mla_schedule", "mla_decode_bfloat16", *merging]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "prepare: needs plans or functions, got nothing; pass plans, or functions of cumla"),
        (
            ("mla_decode",),
            "plans_or_functions[0]: needs a plan or a function that has kernels, got",
        ),
        (
            (cumla.mla_decode, 64),
            "plans_or_functions[1]: needs ... got 64; pass a plan, or a function",
        ),
        ((cumla.prepare,), "plans_or_functions[0]: ... got cumla.preparation.prepare; pass"),
        ((cumla.MLADecodePlan,), "plans_or_functions[0]: ... got cumla.mla.decode.MLADecodePlan"),
        ((np.zeros,), "plans_or_functions[0]: needs a plan or a function that has kernels, got"),
        (
            (cumla.reference.mla_decode,),  # by the same name, and without kernels
            "plans_or_functions[0]: needs a plan ... got cumla.reference.mla.decode.mla_decode;",
        ),
        ((deep_gemm.get_num_sms,), "plans_or_functions[0]: ... got cumla.compat.deep_gemm.get_num"),
        (([1],), "plans_or_functions[0]: needs a plan ... got [1]; pass"),
    ],
)
def test_refusals(given: tuple[Any, ...], message: str, cupy: FakeCuPy) -> None:
    """Before anything is compiled."""
    with refused(TypeError, message):
        cumla.prepare(*given)
    assert cupy.compiled == []


def test_unsupported_gpus(cupy: FakeCuPy) -> None:
    cupy.capability = (12, 0)
    with refused(
        cumla.UnsupportedDeviceError, "device 0 is NVIDIA Imaginary of compute capability"
    ):
        cumla.prepare(cumla.mla_decode)
    assert cupy.compiled == []
