# SPDX-License-Identifier: Apache-2.0
"""Rows of 576 e4m3 columns under one factor, converted by the loading warps, on the CPU."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla.launch.mla.mla_decode_fp8 import fp8_specs
from cumla.launch.mla.mla_decode_fp8_converted import SPECS, converted_spec, sharing_of
from tests.emulator import emulated_gpu
from tests.gpu.tools.fp8_problem import Fp8Case, make_fp8
from tests.gpu.tools.sanitize import attend_fp8
from tests.launch.mla.test_mla_decode_fp8_64 import attention_key, decode_key
from tests.selection import some


@pytest.mark.parametrize(("heads", "sharing"), [(64, 1), (192, 1), (128, 2), (256, 2)])
def test_two_thread_blocks_share_rows_if_they_have_one_query_token(
    heads: int, sharing: int
) -> None:
    for kv_heads, q_len in ((1, 1), (2, 3)):
        key = decode_key(heads, kv_heads, q_len)
        spec = converted_spec(key)
        assert spec is not None
        assert sharing_of(spec) == sharing
        assert key.row_tiles % sharing == 0
        assert fp8_specs(key)[0] is spec  # the one that a server's log names


def test_other_keys_have_no_such_kernel() -> None:
    key = decode_key(128)
    assert converted_spec(dataclasses.replace(key, batch_invariant=True, max_blocks=9)) is None
    assert converted_spec(decode_key(96)) is None
    assert converted_spec(attention_key(128)) is None


# --- results --------------------------------------------------------------------------------------

CASES = (
    (Fp8Case(batch=2, heads=128, form="one", kv_scale="array"), [700, 70]),
    (Fp8Case(batch=3, heads=64, q_len=2, form="one", page_size=16), [300, 64, 3]),
    (Fp8Case(batch=3, heads=128, q_len=2, form="one", page_size=1), [130, 0, 65]),
    (Fp8Case(batch=6, heads=128, form="one"), [128, 64, 0, 65, 1, 192]),
)


@pytest.mark.parametrize(
    ("case", "lengths"), some(CASES, 2), ids=lambda value: getattr(value, "name", "")
)
def test_attention_to_pages(case: Fp8Case, lengths: list[int]) -> None:
    with emulated_gpu(4) as cupy:
        attend_fp8(cupy, make_fp8(np, case, np.array(lengths)))


@pytest.mark.parametrize("heads", [64, 128])
def test_large_scores(heads: int) -> None:
    """Exact and rounded products of scores differ by more than float16 holds."""
    rng = np.random.default_rng(heads)
    q = (2.0**29 * rng.normal(size=(1, 1, heads, 576))).astype(ml_dtypes.bfloat16)
    kv_cache = rng.normal(size=(1, 64, 576)).astype(ml_dtypes.float8_e4m3fn)
    table, lengths = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    with emulated_gpu() as cupy:
        given = [cupy.asarray(a.view(np.uint8) if a is kv_cache else a) for a in (q, kv_cache)]
        out, _ = cumla.mla_decode(*given, cupy.asarray(table), cupy.asarray(lengths))
        got = out.get().view(ml_dtypes.bfloat16).astype(np.float32)
        want = kv_cache[0, 0, :512].astype(np.float32)
        np.testing.assert_allclose(got[0, 0], np.broadcast_to(want, (heads, 512)), rtol=4e-3)


def test_entry_points_differ_in_what_thread_blocks_share() -> None:
    assert [sharing_of(spec) for spec in SPECS] == [1, 2]
