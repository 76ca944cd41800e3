# SPDX-License-Identifier: Apache-2.0
"""Rows of other widths than 512 + 64 without a GPU: the definition, plans, what is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla.launch.mla.choice import decode_spec
from cumla.launch.mla.mla_attention import attention_spec
from cumla.mla.attention import MLA_ATTENTION
from cumla.mla.decode import MLA_DECODE
from cumla.mla.shape import WIDE, WIDTHS
from cumla.reference.rows import as_e4m3
from tests.mla import masked_cases as cases
from tests.mla.fp8_arrays import parts_of
from tests.mla.masked_cases import Sample

BF16 = np.dtype(ml_dtypes.bfloat16)
ONE = np.zeros(1)
OTHERS = WIDTHS[1:]
OF_E4M3 = [width for width in OTHERS if width != WIDE]


def of_e4m3(width: tuple[int, int]) -> list[Sample]:
    forms = ("one", "bytes", "pair", "pair of bytes")[: 4 if width[1] else 2]
    fixed: dict[str, Any] = {"dtype": "bfloat16", "is_fp8": True, "width": width, "window": None}
    return [s._replace(form=forms[i % len(forms)], **fixed) for i, s in enumerate(cases.samples(8))]


def samples() -> list[Sample]:
    return [
        sample._replace(width=width, form=sample.form if width[1] else "one")
        for i, width in enumerate(OTHERS)
        for sample in cases.samples(8 * len(OTHERS))[i :: len(OTHERS)]
    ]


@pytest.mark.parametrize("sample", samples(), ids=lambda sample: sample.name)
def test_the_definition_is_that_of_attention(sample: Sample) -> None:
    """MLA is attention with one row as key and value; what nobody sees is NaN."""
    problem = cases.make(sample)
    given = dict(problem.given)
    cache = given.pop("kv_cache")
    cache = np.concatenate([*cache], axis=-1) if isinstance(cache, tuple) else cache
    latent, rope = sample.width
    q, k = (x.astype(np.float64) for x in (given.pop("q"), cache))
    scale = (latent + rope) ** -0.5
    want = cumla.reference.attention(q, k, k[..., :latent], **given, softmax_scale=scale)
    got = cases.in_float64(problem)
    np.testing.assert_allclose(got.out, want.out, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(got.lse, want.lse, rtol=1e-6)
    state = problem.call(**problem.given)
    assert state.out.shape == (*q.shape[:-1], latent)


@pytest.mark.parametrize("width", OF_E4M3)
def test_e4m3_caches(width: tuple[int, int]) -> None:
    """Under one factor they stand for the numbers times it: the function as of those."""
    for sample in of_e4m3(width):
        problem = cases.make(sample)
        parts = parts_of(problem.given["kv_cache"])
        rows = np.concatenate([as_e4m3(part) for part in parts], axis=-1).astype(np.float64)
        given = problem.given | {"q": problem.given["q"].astype(float)}
        given["kv_cache"] = rows * float(np.float32(given.pop("kv_scale")))
        want, got = problem.reference(**given), cases.in_float64(problem)
        np.testing.assert_allclose(got.out, want.out, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(got.lse, want.lse, rtol=1e-6)
        state = problem.call(**problem.given)
        cases.check(problem, state.out, state.lse)


@pytest.mark.parametrize("width", WIDTHS)
def test_plans(width: tuple[int, int]) -> None:
    """By numbers and from arrays, for the width that the columns tell; for no other."""
    columns = sum(width)
    q, cache = np.ones((2, 1, 16, columns), BF16), np.ones((4, 64, columns), BF16)
    table, lens = np.int32([[0, 1], [2, 3]]), np.int32([100, 7])
    made = cumla.MLADecodePlan(2, 1, 16, head_dim=columns, like=q)
    plan = cumla.MLADecodePlan.from_arrays(q, cache)
    assert plan.key == made.key
    assert plan.key.width == width
    plan.update(lens)
    assert plan.run(q, cache, block_table=table).out.shape == (2, 1, 16, width[0])
    indptr = np.int32([0, 1, 2])
    ragged = cumla.MLAAttentionPlan.from_arrays(q[:, 0], cache, qo_indptr=indptr)
    assert ragged.key.width == width
    ragged.update(lens, qo_indptr=indptr)
    assert ragged.run(q[:, 0], cache, block_table=table).out.shape == (2, 16, width[0])
    for other in WIDTHS:
        if other != width:
            wrong = np.ones((2, 1, 16, sum(other)), BF16), np.ones((4, 64, sum(other)), BF16)
            with pytest.raises(ValueError, match=f"^plan: made for rows of {columns} .* got "):
                plan.run(*wrong, block_table=table)


@pytest.mark.parametrize("width", WIDTHS)
def test_what_prepare_loads_for_a_function(width: tuple[int, int]) -> None:
    for window, heads in itertools.product((None, 3), (16, 64, 128)):
        plan = cumla.MLADecodePlan(2, 1, heads, head_dim=sum(width), window=window, like=ONE)
        assert decode_spec(plan.key).entry.startswith(MLA_DECODE.kernels)
        ragged = cumla.MLAAttentionPlan(2, 9, heads, head_dim=sum(width), window=window, like=ONE)
        assert attention_spec(ragged.key).entry.startswith(MLA_ATTENTION.kernels)


def test_the_size_of_a_buffer() -> None:
    """Partial results have the latent columns."""
    for name, kind in (("decode", cumla.MLADecodePlan), ("attention", cumla.MLAAttentionPlan)):
        shape = 3, 3, 16
        for width in WIDTHS:
            nbytes = kind.workspace_bytes(*shape, head_dim=sum(width), sm_count=132)
            key = kind(*shape, head_dim=sum(width), like=np.zeros(1)).key
            assert nbytes == replace(key, device=0, sm_count=132).layout.nbytes, name
    wide, narrow = (
        cumla.MLADecodePlan.workspace_bytes(1, 1, 128, head_dim=n, sm_count=132) for n in (512, 320)
    )
    assert wide > 1.9 * narrow


def small(columns: int = 320, **changes: Any) -> dict[str, Any]:
    q, kv_cache = np.ones((2, 1, 4, columns), BF16), np.ones((4, 64, columns), BF16)
    table, lens = np.int32([[0, 1], [2, 3]]), np.int32([100, 7])
    return {"q": q, "kv_cache": kv_cache, "block_table": table, "kv_lens": lens} | changes


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"q": np.ones((2, 1, 4, 544), BF16)},
            ValueError,
            r"q: needs a last axis of 576 \(512 latent \+ 64 RoPE\), 512 \(no RoPE\), 320 \(256 la",
        ),
        (
            {"kv_cache": np.ones((4, 64, 288), BF16)},
            ValueError,
            r"kv_cache: needs a last axis of 320 \(256 latent \+ 64 RoPE\), got shape",
        ),
        (
            {"q": (np.ones((2, 1, 4, 256), BF16), np.ones((2, 1, 4, 16), BF16))},
            ValueError,
            r"q\[1\]: needs a last axis of 64 or 32, got shape .* 256 latent .* or 256 and 32",
        ),
        (
            {"q": np.ones((2, 1, 4, 320), "f2"), "kv_cache": np.ones((4, 64, 320), np.uint8)},
            TypeError,
            r"q: needs bfloat16 with kv_cache of uint8, got float16",
        ),
        (
            {"kv_cache": (np.ones((4, 64, 256), np.uint8), np.ones((4, 64, 64), BF16))},
            TypeError,
            r"kv_cache\[1\]: needs kv_cache\[0\]'s dtype uint8 in rows of 320 .* got bfloat16",
        ),
        (
            {
                "kv_cache": (
                    *(np.ones((4, 64, n), np.uint8) for n in (256, 64)),
                    np.ones((4, 64, 4)),
                )
            },
            ValueError,
            r"kv_cache\[2\]: needs a last axis of 4, .* beside 576 \(512 latent \+ 64 RoPE\) colu",
        ),
    ],
)
def test_refusals(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        cumla.mla_decode(**small(**changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"kv_cache": np.ones((4, 64, 1088), np.uint8)},
            TypeError,
            r"kv_cache: needs the dtype of q in rows of 1088 \(1024 latent .* got float8_e4m3fn",
        ),
        (
            {"tree": np.ones((2, 1), np.uint32)},
            ValueError,
            r"tree: needs rows of at most 512 latent columns, got 1088 \(1024 .*merge_attention",
        ),
        (
            {"batch_invariant": True},
            ValueError,
            r"batch_invariant: needs rows of at most 512 latent .* got 1088 .*call mla_attention",
        ),
    ],
)
def test_what_rows_of_1024_latent_columns_lack(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}"):
        cumla.mla_decode(**small(1088, **changes))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cache_dtype": "float8_e4m3fn"}, TypeError, "cache_dtype: needs the dtype of q"),
        ({"mask_form": "tree"}, ValueError, "mask_form: needs rows of at most 512 latent"),
    ],
)
def test_what_plans_of_rows_of_1024_latent_columns_lack(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    fixed: dict[str, Any] = {"head_dim": 1088, **options}
    for kind in (cumla.MLADecodePlan, cumla.MLAAttentionPlan):
        with pytest.raises(error, match=f"^{message}"):
            kind(2, 2, 16, like=np.zeros(1), **fixed)
    with pytest.raises(error, match=f"^{message}"):
        cumla.MLADecodePlan.workspace_bytes(2, 2, 16, sm_count=132, **fixed)
    with pytest.raises(ValueError, match=r"^batch_invariant: needs rows of at most 512 latent"):
        cumla.MLADecodePlan(
            2, 2, 16, head_dim=1088, batch_invariant=True, max_kv_len=900, like=np.zeros(1)
        )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"head_dim": 544},
            ValueError,
            r"head_dim: needs 576 \(512 latent \+ 64 RoPE\), 512 .*544",
        ),
        ({"head_dim": True}, TypeError, "head_dim: needs"),
    ],
)
def test_refusals_of_plans(options: dict[str, Any], error: type[Exception], message: str) -> None:
    for kind in (cumla.MLADecodePlan, cumla.MLAAttentionPlan):
        with pytest.raises(error, match=f"^{message}"):
            kind(2, 2, 16, like=np.zeros(1), **options)
    with pytest.raises(error, match=f"^{message}"):
        cumla.MLADecodePlan.workspace_bytes(2, 2, 16, sm_count=132, **options)
