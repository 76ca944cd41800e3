# SPDX-License-Identifier: Apache-2.0
"""Products in e4m3 over FP8 caches, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cumla
from cumla.launch.mla.mla_decode_fp8 import fp8_specs
from cumla.launch.mla.mla_decode_fp8_products import SPECS, fp8_products_spec
from tests.emulator import emulated_gpu
from tests.gpu.tools.fp8_problem import Fp8Case, growing_scores, make_fp8
from tests.gpu.tools.sanitize import FP8_PRODUCTS, attend_fp8, there, typed
from tests.launch.mla.test_mla_decode_fp8_64 import attention_key, decode_key, launch_of
from tests.selection import some


@pytest.mark.parametrize(
    "key", [decode_key(64, kv_heads=2), attention_key(64)], ids=["decode", "ragged"]
)
@pytest.mark.parametrize("rope", ["bfloat16", "float8_e4m3fn"])
def test_which_calls_have_this_kernel(rope: str, key: Any) -> None:
    """Those that allow it, of a cache under one factor; a plan prepares it for all."""
    assert {fp8_products_spec(key, rope != "bfloat16")} <= set(SPECS) & set(fp8_specs(key))
    for grouped in (False, True):
        for allowed in (False, True):
            launch = launch_of(key, rope, grouped, 0.25, allowed)
            assert (launch.spec in SPECS) is (allowed and not grouped)


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "lengths"), some(FP8_PRODUCTS, 2), ids=lambda value: getattr(value, "name", "")
)
def test_attention_to_pages(case: Fp8Case, lengths: list[int]) -> None:
    with emulated_gpu() as cupy:
        attend_fp8(cupy, make_fp8(np, case, np.array(lengths)))


def test_references_are_raised_with_every_block() -> None:
    host = growing_scores(blocks=4)
    want = cumla.reference.mla_decode(**host)
    with emulated_gpu() as cupy:
        given = {name: there(cupy, value) for name, value in host.items()}
        out, lse = cumla.mla_decode(**given, fp8_products=True)
        got = typed(out.view(np.uint16).get(), "bfloat16").astype(np.float64)
        error = np.linalg.norm(got - want.out, axis=-1) / np.linalg.norm(want.out, axis=-1)
        assert error.max() < 2**-4
        assert np.abs(lse.get() - want.lse).max() < 2**-4
