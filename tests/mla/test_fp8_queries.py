# SPDX-License-Identifier: Apache-2.0
"""e4m3 queries of `cumla.mla_decode`, `cumla.mla_attention` and their plans: results on the CPU,
what is refused, and which kernels are launched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cumla
from tests.calls import BF16, E4M3, aligned, refused
from tests.fake_cuda import FakeBindings, FakeCuPy
from tests.mla.fp8_arrays import make_cache
from tests.mla.test_fp8_caches import INDPTR, LENGTHS, TABLE, attend, every_way, planned_ragged

WHOLE = ("one", "bytes", "pair", "pair of bytes")  # caches that are e4m3 throughout
U8 = np.uint8


def queries(heads: int = 16, *, q_len: int = 2) -> np.ndarray:
    """(2, q_len, heads, 576) e4m3, rows of all magnitudes, codes of the least ones among them."""
    rng = np.random.default_rng(1)
    numbers = rng.standard_normal((2, q_len, heads, 576), np.float32)
    numbers *= np.exp2(rng.integers(-9, 7, (2, q_len, heads, 1)))
    found = aligned(numbers.shape, E4M3)
    found[...] = np.clip(numbers, -448, 448)
    return found


@every_way
@pytest.mark.parametrize("form", WHOLE)
@pytest.mark.parametrize("kind", ["number", "array", "none"])
def test_results_are_those_of_the_numbers(form: str, kind: str, call: Any) -> None:
    """Queries times their factor, in one array or a pair, as e4m3 or as bytes."""
    q, cache, value = queries(), make_cache(form), 0.37
    factor = {"number": value, "array": np.full(1, value, np.float32), "none": None}[kind]
    scale = (value if factor is not None else 1.0) * 576**-0.5
    want = call(q=q.astype(BF16), kv_cache=cache, kv_scale=0.01, softmax_scale=scale)
    given: dict[str, Any] = {"kv_scale": 0.01, "q_scale": factor, "softmax_scale": 576**-0.5}
    forms = q, (q[..., :512], q[..., 512:]), q.view(U8)
    for numbers in forms:
        got = call(q=numbers, kv_cache=cache, **given)
        assert got.out.dtype == BF16
        np.testing.assert_array_equal(got.out, want.out)
        np.testing.assert_allclose(got.lse, want.lse, rtol=1e-6)
    out = np.empty(want.out.shape, np.float32)
    assert call(q=q, kv_cache=cache, **given, out=out).out is out


@every_way
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"kv_cache": make_cache("packed"), "kv_scale": None},
            TypeError,
            "q: needs bfloat16, or float8_e4m3fn beside a kv_cache ... beside one with scales of",
        ),
        (
            {"kv_cache": make_cache("16-bit rope")},
            TypeError,
            "q: needs bfloat16, ... beside columns in bfloat16; convert it",
        ),
        (
            {"q": queries()[..., :512], "kv_cache": make_cache("one", width=(512, 0))},
            TypeError,
            "q: needs bfloat16, ... beside rows of 512 (no RoPE) columns; convert it",
        ),
        (
            {"kv_cache": aligned((6, 64, 1, 576), BF16)},
            TypeError,
            "kv_cache: needs q's dtype float8_e4m3fn, got bfloat16",
        ),
        (
            {"q": queries().astype(BF16)},
            ValueError,
            "q_scale: needs q of float8_e4m3fn, or of its bits as uint8, got bfloat16; leave it",
        ),
        (
            {"q_scale": np.ones(2, np.float32)},
            ValueError,
            "q_scale: needs one element, got shape (2,); pass one number",
        ),
        ({"q_scale": "1"}, TypeError, "q_scale: needs a number, or a float32 array, got str"),
        (
            {"sinks": np.zeros(16, np.float32)},
            ValueError,
            "sinks: needs None beside q of float8_e4m3fn, got an array; convert q to bfloat16",
        ),
        ({"out": aligned((2, 2, 16, 512), E4M3)}, TypeError, "out: needs bfloat16 or float32"),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else None,
)
def test_refusals(changes: Any, error: Any, message: str, call: Any) -> None:
    if "out" in changes and call in (attend, planned_ragged):
        changes = {"out": changes["out"].reshape(4, 16, 512)}
    given = {"q": queries(), "kv_cache": make_cache("one"), "kv_scale": 0.01, "q_scale": 0.5}
    with refused(error, message):
        call(**given | changes)


def test_sparse_attention_takes_no_such_queries() -> None:
    lists = np.zeros((2, 1, 4), np.int32)
    q = queries(q_len=1)
    with refused(TypeError, "q: needs bfloat16 or float16, got float8_e4m3fn"):
        cumla.mla_sparse_decode(q, make_cache("one"), lists, kv_scale=0.01)


@pytest.mark.parametrize(
    ("heads", "fp8_products", "name"),
    [
        (8, False, "fp8_16_query"),
        (16, True, "fp8_32_query"),
        (64, False, "fp8_64_fp8_rope_query"),
        (128, True, "fp8_products_fp8_rope_query"),
    ],
)
def test_kernels(
    heads: int, fp8_products: bool, name: str, cupy: FakeCuPy, bindings: FakeBindings
) -> None:
    """A plan of bfloat16 serves both kinds of queries; the factor may be an array."""
    cache, table, lengths = map(cupy.like, (aligned((6, 64, 1, 576), E4M3), TABLE, LENGTHS))
    q = cupy.like(aligned((2, 2, heads, 576), U8))
    plan = cumla.MLADecodePlan.from_arrays(q, cache)
    assert plan.key.dtype == "bfloat16"
    plan.update(lengths)
    factor = cupy.like(np.ones(1, np.float32))
    given = {"block_table": table, "fp8_products": fp8_products}
    seen = set()
    for q_scale in (None, 0.5, factor):
        bindings.launched.clear()
        plan.run(q, cache, q_scale=q_scale, **given)
        (launch,) = bindings.launched
        assert bindings.entries[-1] == f"mla_decode_{name}"
        seen.add(launch.parameters)
    assert len(seen) == 3
    plan.run(cupy.like(aligned((2, 2, heads, 576), BF16)), cache, **given)
    assert bindings.entries[-1] == f"mla_decode_{name.removesuffix('_query')}"
    rows = cupy.like(aligned((4, heads, 576), U8))
    lens = {"block_table": table, "kv_lens": lengths, "qo_indptr": cupy.like(INDPTR)}
    cumla.mla_attention(rows, cache, **lens, q_scale=factor, fp8_products=fp8_products)
    ragged = name if heads % 64 == 0 else "fp8_query"
    assert bindings.entries[-1] == f"mla_attention_{ragged}"
