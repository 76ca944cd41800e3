# SPDX-License-Identifier: Apache-2.0
"""The indexer's logits against a formula in plain Python, and the corners of their contract."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cumla.reference import mqa_logits
from tests.reference.indexer.plain_logits import E4M3, NAN_BYTE, logit, some_bytes, value_of

Array = NDArray[Any]


def test_bytes_are_decoded_as_ml_dtypes_does() -> None:
    every = np.arange(256, dtype=np.uint8)
    ours = [value_of(byte) for byte in every.tolist()]
    np.testing.assert_array_equal(ours, every.view(E4M3).astype(np.float64))


def prefill_inputs(heads: int = 3, dim: int = 5) -> dict[str, Any]:
    rng = np.random.default_rng(heads)
    return {
        "q": some_bytes(rng, 6, heads, dim),
        "kv": (some_bytes(rng, 11, dim), rng.random(11, np.float32) + 0.1),
        "weights": rng.standard_normal((6, heads)).astype(np.float32),
        "ks": np.array([0, 3, 5, 11, -4, 9], np.int32),
        "ke": np.array([11, 7, 5, 11, 30, 2], np.int32),
    }


def expected_prefill(inputs: dict[str, Any], width: int | None = None) -> Array:
    k, scale = inputs["kv"]
    wanted = np.full((len(inputs["q"]), len(k) if width is None else width), -np.inf)
    for i, j in np.ndindex(len(inputs["q"]), len(k)):
        if inputs["ks"][i] <= j < inputs["ke"][i]:
            column = j if width is None else j - max(inputs["ks"][i], 0)
            if column < wanted.shape[1]:
                wanted[i, column] = logit(
                    inputs["q"][i], k[j], float(scale[j]), inputs["weights"][i]
                )
    return wanted


@pytest.mark.parametrize("width", [None, 0, 1, 4, 11, 20])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prefill(width: int | None, dtype: str) -> None:
    inputs = prefill_inputs()
    got = mqa_logits(**inputs, max_kv_len=width, logits_dtype=dtype)
    wanted = expected_prefill(inputs, width)
    assert got.dtype.name == dtype
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(wanted))
    # float64 rounded once
    np.testing.assert_allclose(
        got.astype(np.float64), wanted, rtol=2.0 ** (-8 if dtype == "bfloat16" else -24) * 1.001
    )


def test_prefill_takes_bytes_and_numbers_alike() -> None:
    inputs = prefill_inputs()
    k, scale = inputs["kv"]
    typed = inputs | {"q": inputs["q"].view(E4M3), "kv": (k.view(E4M3), scale)}
    np.testing.assert_array_equal(mqa_logits(**typed), mqa_logits(**inputs))


@pytest.mark.parametrize("width", [None, 4])
def test_prefill_without_cleaning_writes_what_is_visible_only(width: int | None) -> None:
    inputs = prefill_inputs()
    out = np.full((6, width or 11), 7, np.float32)
    assert mqa_logits(**inputs, max_kv_len=width, clean=False, out=out) is out
    wanted = expected_prefill(inputs, width).astype(np.float32)
    np.testing.assert_array_equal(out, np.where(np.isneginf(wanted), 7, wanted))


def test_a_product_that_is_nan_counts_as_0() -> None:
    inputs = prefill_inputs()
    k, scale = inputs["kv"]
    bits = k.view(np.uint8).copy()
    bits[0] = 0x7F  # NaN
    out = mqa_logits(**inputs | {"kv": (bits, scale), "ks": np.zeros(len(inputs["ks"]), np.int32)})
    seen = inputs["ke"] > 0
    assert seen.any()
    assert (out[seen, 0] == 0.0).all()


def test_prefill_looks_at_no_token_that_nobody_sees() -> None:
    inputs = prefill_inputs()
    inputs["ks"], inputs["ke"] = np.full(6, 2, np.int32), np.full(6, 8, np.int32)
    wanted = mqa_logits(**inputs)
    k, scale = (part.copy() for part in inputs["kv"])
    k[[0, 1, 8, 9, 10]], scale[[0, 1, 8, 9, 10]] = NAN_BYTE, np.nan
    np.testing.assert_array_equal(mqa_logits(**inputs | {"kv": (k, scale)}), wanted)
    scale[7] = np.nan
    assert np.isnan(mqa_logits(**inputs | {"kv": (k, scale)})[:, 7]).all()
