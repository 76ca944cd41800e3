# SPDX-License-Identifier: Apache-2.0
"""The reference of ragged queries against plain loops over rows, and corners of its contract."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cumla.reference import mla_attention

Array = Any
BF16 = np.dtype(ml_dtypes.bfloat16)


def make(
    q_lens: tuple[int, ...] = (3, 0, 1, 9),
    kv_lens: tuple[int, ...] = (40, 7, 17, 5),
    *,
    heads: int = 4,
    kv_heads: int = 1,
    page_size: int = 16,
    before: int = 2,
    behind: int = 1,
) -> dict[str, Any]:
    """Arguments with both forms of pages; everything unused is poison."""
    rng = np.random.default_rng(0)
    counts = [-(-n // page_size) for n in kv_lens]
    pages = np.split(rng.permutation(sum(counts) + 2), np.cumsum(counts))[: len(counts)]
    cache = np.full((sum(counts) + 2, page_size, kv_heads, 576), np.nan)
    table = np.full((len(counts), max(counts) + 1), 2147480000, np.int32)
    for row, used, length in zip(table, pages, kv_lens, strict=True):
        row[: len(used)] = used
        for t in range(length):
            values = rng.standard_normal((kv_heads, 576))
            cache[used[t // page_size], t % page_size] = values
    indptr = before + np.cumsum([0, *q_lens])
    q = np.full((indptr[-1] + behind, heads, 576), np.nan)
    q[before : indptr[-1]] = rng.standard_normal((sum(q_lens), heads, 576))
    return {
        "q": q,
        "kv_cache": cache,
        "qo_indptr": indptr.astype(np.int32),
        "kv_lens": np.array(kv_lens, np.int32),
        "block_table": table,
        "kv_indptr": (1 + np.cumsum([0, *counts])).astype(np.int32),
        "kv_indices": np.concatenate([[-1], *pages, [-1]]).astype(np.int32),
    }


def with_table(arguments: dict[str, Any]) -> dict[str, Any]:
    return {n: a for n, a in arguments.items() if n not in ("kv_indptr", "kv_indices")}


def with_list(arguments: dict[str, Any]) -> dict[str, Any]:
    return arguments | {"block_table": None}


def attend_by_loops(arguments: dict[str, Any], scale: float, causal: bool) -> tuple[Array, Array]:
    """The definition, one number at a time but for the sums over columns."""
    q, cache, table = (arguments[n] for n in ("q", "kv_cache", "block_table"))
    indptr, kv_lens = arguments["qo_indptr"].tolist(), arguments["kv_lens"].tolist()
    page_size, group = cache.shape[1], q.shape[1] // cache.shape[2]
    out = np.full((*q.shape[:2], 512), 7.0)
    lse = np.full(q.shape[:2], 7.0)
    for r, length in enumerate(kv_lens):
        for row in range(indptr[r], indptr[r + 1]):
            behind = indptr[r + 1] - 1 - row
            visible = length - behind if causal else length
            for head in range(q.shape[1]):
                total, sums = 0.0, np.zeros(512)
                for t in range(visible):
                    k = cache[table[r, t // page_size], t % page_size, head // group]
                    weight = math.exp(scale * float(np.dot(q[row, head], k)))
                    total += weight
                    sums += weight * k[:512]
                out[row, head] = sums / total if total else 0.0
                lse[row, head] = math.log(total) if total else -math.inf
    return out, lse


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (6, 2), (3, 3)])
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_it_is_the_definition(page_size: int, heads: int, kv_heads: int, causal: bool) -> None:
    arguments = make(heads=heads, kv_heads=kv_heads, page_size=page_size)
    expected = attend_by_loops(arguments, 0.05, causal)
    for some in (with_table(arguments), with_list(arguments)):
        out, lse = np.full(expected[0].shape, 7.0), np.full(expected[1].shape, 7, np.float32)
        result = mla_attention(**some, softmax_scale=0.05, causal=causal, out=out, lse=lse)
        assert result.out is out
        assert result.lse is lse
        np.testing.assert_allclose(out, expected[0], rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(lse, expected[1], rtol=1e-6)


def test_rows_that_see_nothing() -> None:
    out, lse = mla_attention(**with_table(make((5, 2), (2, 0), before=0, behind=0)))
    blind = np.array([True, True, True, False, False, True, True])
    assert (~out.any(axis=(1, 2)) == blind).all()
    assert (np.isneginf(lse) == blind[:, None]).all()


def test_new_outputs_have_qs_dtype() -> None:
    arguments = with_table(make(before=0, behind=0))
    for name in ("q", "kv_cache"):
        arguments[name] = arguments[name].astype(BF16)
    out, lse = mla_attention(**arguments)
    assert (out.dtype, lse.dtype) == (BF16, np.float32)
    assert (out.shape, lse.shape) == ((13, 4, 512), (13, 4))


@pytest.mark.parametrize("kind", [tuple, list])
def test_pairs_are_the_same_call(kind: Any) -> None:
    arguments = with_list(make(before=0, behind=0))
    pairs = {n: kind(np.split(arguments[n], [512], axis=-1)) for n in ("q", "kv_cache")}
    whole, apart = mla_attention(**arguments), mla_attention(**arguments | pairs)
    for one, other in zip(whole, apart, strict=True):
        np.testing.assert_array_equal(one, other)


def test_lengths_are_clamped_to_the_pages() -> None:
    arguments = make((2, 1), (32, 16), before=0, behind=0)
    arguments["block_table"] = arguments["block_table"][:, :2].copy()
    arguments["block_table"][1, 1] = -1  # a page of zeros
    expected = mla_attention(**with_list(arguments))
    arguments["kv_lens"] = np.array([33, 100], np.int32)
    got = mla_attention(**with_list(arguments))
    np.testing.assert_array_equal(got.out, expected.out)
    table = mla_attention(**with_table(arguments))
    np.testing.assert_array_equal(table.out[:2], expected.out[:2])
    assert (table.lse[2] > expected.lse[2]).all()  # 16 scores of 0 more


@pytest.mark.parametrize("least", [-1, -(2**31) + 1, -(2**31)])
def test_offsets_are_clamped_before_they_are_subtracted(least: int) -> None:
    """Request 0 keeps its tokens and pages, and request 1 gets none of those before it."""
    arguments = make((2, 3), (20, 5), before=0, behind=0)
    exact = mla_attention(**with_table(arguments))
    indptr, pages = arguments["qo_indptr"].copy(), arguments["kv_indptr"] - np.int32(1)
    indptr[0] = pages[0] = least
    some = {"qo_indptr": indptr, "kv_indptr": pages, "kv_indices": arguments["kv_indices"][1:]}
    got = mla_attention(**with_list(arguments | some))
    np.testing.assert_array_equal(got.out, exact.out)

    out, lse = np.full((5, 4, 512), 7.0), np.full((5, 4), 7, np.float32)
    for ends in ([least] * 3, [2, least, least], [5, 2**31 - 1, least]):
        indptr = np.array(ends, np.int32)
        mla_attention(**with_table(arguments | {"qo_indptr": indptr}), out=out, lse=lse)
    assert (out == 7).all()
    assert (lse == 7).all()


def test_pages_come_in_one_form() -> None:
    arguments = make()
    for pages in (arguments, with_table(arguments) | {"block_table": None}):
        with pytest.raises(ValueError, match=r"^block_table: needs a table, or kv_indptr and"):
            mla_attention(**pages)


def test_no_requests_and_no_tokens() -> None:
    arguments = with_table(make())
    empty = {"qo_indptr": np.zeros(1, np.int32), "kv_lens": np.zeros(0, np.int32)}
    some = arguments | empty | {"block_table": arguments["block_table"][:0]}
    assert mla_attention(**some | {"q": arguments["q"][:0]}).out.shape == (0, 4, 512)
