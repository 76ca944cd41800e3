# SPDX-License-Identifier: Apache-2.0
"""The definition of sparse MLA attention: each of its promises, against entry-by-entry sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cumla.reference import mla_attention, mla_decode, mla_sparse_attention, mla_sparse_decode
from cumla.reference.sparse.mla_sparse import largest_scores
from tests.mla.fp8_arrays import FORMS, SCALED, make_cache, parts_of
from tests.reference.sparse.problem import (
    BF16,
    INT_MAX,
    INT_MIN,
    Array,
    Case,
    float32_out,
    make_case,
    naive,
)


def attend(case: Case, **changes: Any) -> tuple[Array, Array]:
    """Attend into a float32 output."""
    out = float32_out(case)
    state = mla_sparse_attention(**case.arguments(**changes), out=out)
    assert state.out is out
    return out, state.lse


def assert_same(got: Any, want: Any) -> None:
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def assert_close(got: Any, want: Any) -> None:
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)


def with_lists(case: Case, lists: Any) -> Case:
    return case._replace(indices=np.array(lists, np.int32))


# --- what is computed -----------------------------------------------------------------------------


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize(
    ("heads", "topk", "page_size", "dtype"),
    [
        (1, 1, 1, BF16),
        (4, 63, 2, BF16),
        (8, 64, 53, "float16"),
        (17, 130, 64, BF16),
        (3, 9, 7, "f4"),
    ],
)
def test_the_formula(heads: int, topk: int, page_size: int, dtype: Any, table: bool) -> None:
    case = make_case(heads=heads, topk=topk, page_size=page_size, dtype=dtype, table=table)
    assert_close(attend(case), naive(case))
    assert_close(attend(case, softmax_scale=0.3), naive(case, 0.3))
    out, lse = mla_sparse_attention(**case.arguments())
    assert (out.dtype, lse.dtype) == (case.q.dtype, np.float32)
    np.testing.assert_allclose(out.astype("f4"), attend(case)[0], rtol=2**-8, atol=1e-6)


def test_one_entry_less_shows() -> None:
    """The comparison above would notice a token that was dropped."""
    case = make_case(topk=64)
    with pytest.raises(AssertionError):
        assert_close(attend(with_lists(case, case.indices[:, :-1])), naive(case))


def test_float32_is_close() -> None:
    case = make_case(topk=64, table=True)
    got, want = attend(case, accumulate="float32"), attend(case)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_all_forms_of_a_call() -> None:
    """Queries with and without a batch, in pairs, with lists of one kv head, rows without pages."""
    case = make_case(6)
    want = attend(case)
    latent, rope = np.split(case.q, [512], axis=-1)
    pair = np.split(case.kv_cache, [512], axis=-1)
    for changes in (
        {"q": (latent, rope)},
        {"kv_cache": tuple(pair)},
        {"kv_cache": case.kv_cache[:, :, None]},
        {"kv_cache": case.kv_cache.reshape(-1, 576)},
        {"kv_cache": tuple(part.reshape(40, -1) for part in pair)},
        {"indices": case.indices[:, None]},
    ):
        assert_same(attend(case, **changes), want)
    for batch, q_len in ((1, 6), (6, 1), (2, 3)):
        shape = (batch, q_len, 4, 576)
        out, lse = np.zeros((*shape[:3], 512), np.float32), np.zeros(shape[:3], np.float32)
        lists = case.indices.reshape(batch, q_len, -1)
        mla_sparse_decode(case.q.reshape(shape), case.kv_cache, lists, out=out, lse=lse)
        assert_same((out.reshape(6, 4, 512), lse.reshape(6, 4)), want)


@pytest.mark.parametrize("q_len", [1, 3])
def test_lists_of_all_tokens_are_dense_attention(q_len: int) -> None:
    """Of decoding that is not causal; of causal prefill by lengths."""
    rng = np.random.default_rng(1)
    q = rng.standard_normal((2, q_len, 4, 576)).astype(BF16)
    cache = rng.standard_normal((7, 4, 576)).astype(BF16)
    table, lens = np.array([[3, 1, 0], [6, 2, 5]], np.int32), np.array([10, 12], np.int32)
    lists = np.tile(np.arange(12, dtype=np.int32), (2, q_len, 1))
    options = {"topk_lens": lens, "block_table": table}
    assert_same(
        mla_sparse_decode(q, cache, lists, **options),
        mla_decode(q, cache, table, lens, causal=False),
    )
    visible = lens[:, None] - np.arange(q_len)[::-1]
    assert_same(
        mla_sparse_decode(q, cache, lists, **options | {"topk_lens": visible}),
        mla_decode(q, cache, table, lens),
    )
    indptr = np.array([0, q_len, 2 * q_len], np.int32)
    flat = {"topk_lens": visible.reshape(-1), "row_to_request": np.repeat([0, 1], q_len)}
    assert_same(
        mla_sparse_attention(
            q.reshape(-1, 4, 576), cache, lists.reshape(-1, 12), block_table=table, **flat
        ),
        mla_attention(
            q.reshape(-1, 4, 576), cache, block_table=table, kv_lens=lens, qo_indptr=indptr
        ),
    )


@pytest.mark.parametrize("form", FORMS)
def test_fp8_caches(form: str) -> None:
    """All forms; and nothing of a row that no list names, its scales included."""
    cache = make_cache(form, page_size=4)
    rng = np.random.default_rng(2)
    q = (rng.standard_normal((2, 2, 4, 576)) / 8).astype(BF16)
    options: dict[str, Any] = {"kv_scale": 0.01} if form in SCALED else {}
    table = np.array([[5, 1], [0, 3]], np.int32)
    want = mla_decode(q, cache, table, np.array([8, 8], np.int32), causal=False, **options)
    slots = (table[:, :, None] * 4 + np.arange(4)).reshape(2, 1, 8)
    slots = np.repeat(slots, 2, axis=1).astype(np.int32)
    assert np.isfinite(want.lse).all()
    poisoned = tuple(part.copy() for part in parts_of(cache))
    for part in poisoned:
        part.view(np.uint8)[[2, 4]] = 0xFF
    for parts in (parts_of(cache), poisoned):
        given = parts if len(parts) > 1 else parts[0]
        assert_same(mla_sparse_decode(q, given, slots, **options), want)
        rows = tuple(part.reshape(24, part.shape[-1]) for part in parts)
        given = rows if len(rows) > 1 else rows[0]
        assert_same(mla_sparse_decode(q, given, slots, **options), want)


# --- lists ----------------------------------------------------------------------------------------


ABSENT = (-1, INT_MIN, -40, 40, 41, INT_MAX)  # of 5 pages of 8 slots


@pytest.mark.parametrize("place", ["first", "middle", "last", "everywhere"])
@pytest.mark.parametrize("table", [False, True])
def test_indices_that_name_nothing(place: str, table: bool) -> None:
    case = make_case(table=table)
    at = {"first": [0] * 6, "middle": [4] * 6, "last": [9] * 6, "everywhere": [0, 2, 4, 5, 7, 9]}
    lists = np.insert(case.indices, at[place], ABSENT, axis=1)
    assert lists.shape == (3, 15)
    assert_same(attend(with_lists(case, lists)), attend(case))


def test_pages_that_are_not_there() -> None:
    """Page numbers of any value, and positions beyond the table's columns."""
    case = make_case(table=True)
    assert case.block_table is not None
    for number in (-1, 5, 2147480000, INT_MIN, INT_MAX):
        table = case.block_table.copy()
        table[:, 2] = number
        kept = case._replace(block_table=table)
        gone = np.where((case.indices >= 16) & (case.indices < 24), -1, case.indices)
        assert_same(attend(kept), attend(with_lists(case, gone)))
        assert_close(attend(kept), naive(kept))
    narrow = case._replace(block_table=case.block_table[:, :2])
    assert_same(
        attend(narrow), attend(with_lists(case, np.where(case.indices < 16, case.indices, -1)))
    )


@pytest.mark.parametrize("request_", [-1, 2, INT_MIN, INT_MAX])
def test_requests_that_are_not_there(request_: int) -> None:
    case = make_case(table=True)
    assert case.row_to_request is not None
    requests = case.row_to_request.copy()
    requests[1] = request_
    out, lse = attend(case, row_to_request=requests)
    assert not out[1].any()
    assert np.isneginf(lse[1]).all()
    want = attend(case)
    assert_same((out[::2], lse[::2]), (want[0][::2], want[1][::2]))


def test_a_request_of_each_query_token() -> None:
    case = make_case(6, table=True)
    want = attend(case)
    assert case.row_to_request is not None
    shape = (3, 2)
    out = np.empty((3, 2, 4, 512), np.float32)
    mla_sparse_decode(
        case.q.reshape(*shape, 4, 576),
        case.kv_cache,
        case.indices.reshape(*shape, -1),
        block_table=case.block_table,
        row_to_request=case.row_to_request.reshape(shape),
        out=out,
    )
    np.testing.assert_array_equal(out.reshape(6, 4, 512), want[0])


@pytest.mark.parametrize("lengths", [(0, 1, 9), (9, 8, 5), (-5, 99, INT_MIN), (INT_MAX, -1, 3)])
def test_lengths(lengths: tuple[int, ...]) -> None:
    """Clamped; what lies at and beyond a length may be anything, rows of NaN included."""
    case = make_case(topk=9)
    clamped = np.clip(lengths, 0, 9)
    want = attend(with_lists(case, np.where(np.arange(9) < clamped[:, None], case.indices, -1)))
    assert_close(want, naive(case, lengths=clamped))
    free = int(np.flatnonzero(np.isnan(case.kv_cache[..., 0].astype("f4")))[0])
    for rest in (free, 7, INT_MAX, INT_MIN):
        lists = np.where(np.arange(9) < clamped[:, None], case.indices, rest)
        assert_same(attend(with_lists(case, lists), topk_lens=np.array(lengths, np.int32)), want)


def test_lengths_of_requests_and_of_their_query_tokens() -> None:
    case = make_case(6)
    q, lists = case.q.reshape(3, 2, 4, 576), case.indices.reshape(3, 2, -1)
    each = np.array([[4, 4], [9, 9], [0, 0]], np.int32)
    want = mla_sparse_decode(q, case.kv_cache, lists, topk_lens=each)
    assert_same(mla_sparse_decode(q, case.kv_cache, lists, topk_lens=each[:, 0]), want)
    each[0, 1] = 7
    assert not np.array_equal(
        mla_sparse_decode(q, case.kv_cache, lists, topk_lens=each).lse, want.lse
    )


def test_rows_that_are_named_twice_count_twice() -> None:
    case = make_case(topk=5)
    out, lse = attend(case)
    twice = attend(with_lists(case, np.repeat(case.indices, 2, axis=1)))
    assert_close(twice, (out, lse + np.log(2)))
    more = with_lists(case, np.concatenate([case.indices, case.indices[:, :1]], axis=1))
    assert_close(attend(more), naive(more))
    assert np.abs(attend(more)[0] - out).max() > 1e-3


def test_the_order_of_a_list() -> None:
    """It changes rounding alone; equal lists give equal bits."""
    case = make_case(topk=40)
    rng = np.random.default_rng(3)
    mixed = with_lists(case, rng.permuted(case.indices, axis=1))
    assert_close(attend(mixed), attend(case))
    same = case._replace(q=np.repeat(case.q[:1], 3, axis=0))
    out, lse = attend(with_lists(same, np.repeat(case.indices[:1], 3, axis=0)))
    assert_same((out[1:], lse[1:]), (out[:-1], lse[:-1]))


def test_a_row_of_nan_shows_where_it_is_named() -> None:
    case = make_case(topk=9)
    free = int(np.flatnonzero(np.isnan(case.kv_cache[..., 0].astype("f4")))[0])
    lists = case.indices.copy()
    lists[1, 4] = free
    out, lse = attend(with_lists(case, lists))
    assert np.isnan(out[1]).all()
    assert np.isnan(lse[1]).all()
    assert np.isfinite(out[::2]).all()
    assert np.isfinite(lse[::2]).all()


# --- nothing, and sinks ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "empty",
    [
        {"indices": np.full((3, 9), -1, np.int32)},
        {"indices": np.full((3, 9), INT_MAX, np.int32)},
        {"indices": np.zeros((3, 0), np.int32)},
        {"topk_lens": np.zeros(3, np.int32)},
    ],
    ids=["negative", "outside", "no entries", "length 0"],
)
def test_empty_lists(empty: dict[str, Any]) -> None:
    case = make_case()
    out, lse = attend(case, **empty)
    assert not out.any()
    assert np.isneginf(lse).all()
    sinks = np.array([0, -3, np.inf, -np.inf], np.float32)
    out, lse = attend(case, sinks=sinks, **empty)
    assert not out.any()
    assert_same(lse, np.tile(sinks, (3, 1)))


def test_sinks() -> None:
    """A score without a value."""
    case = make_case(heads=4)
    out, lse = attend(case)
    sinks = np.array([0.5, -2, np.inf, -np.inf], np.float32)
    got = attend(case, sinks=sinks)
    assert_close([x[:, :2] for x in got], [x[:, :2] for x in naive(case, sinks=sinks)])
    share = np.exp(lse) / (np.exp(lse) + np.exp(sinks))
    assert_close((got[0][:, :2],), ((out * share[..., None])[:, :2],))
    assert not got[0][:, 2].any()
    assert np.isposinf(got[1][:, 2]).all()
    assert_same([x[:, 3] for x in got], [x[:, 3] for x in (out, lse)])


def test_scores_of_any_size_with_sinks() -> None:
    case = make_case(heads=2)
    for sink in (1e30, -1e30):
        with np.errstate(all="raise", under="ignore"):
            out, lse = attend(case, sinks=np.full(2, sink, np.float32), softmax_scale=1e4)
        assert np.isfinite(out).all()
        if sink > 0:
            assert not out.any()
            np.testing.assert_array_equal(lse, np.float32(sink))


# --- the largest score, and what is refused -------------------------------------------------------


def test_the_largest_score() -> None:
    case = make_case(topk=20)
    lengths = np.array([20, 1, 0], np.int32)
    got = largest_scores(
        case.q, case.kv_cache, case.indices[:, None], topk_lens=lengths, softmax_scale=0.3
    )
    assert np.isneginf(got[2]).all()
    for i, length in ((0, 20), (1, 1)):
        rows = case.kv_cache.reshape(-1, 576)[case.indices[i, :length]].astype(np.float64)
        want = 0.3 * (case.q[i].astype(np.float64) @ rows.T).max(axis=1)
        np.testing.assert_allclose(got[i], want, rtol=1e-6)


def test_what_is_refused() -> None:
    case = make_case(table=True)
    with pytest.raises(ValueError, match=r"^row_to_request: needed with block_table"):
        attend(case, row_to_request=None)
    with pytest.raises(ValueError, match=r"^kv_scale: no e4m3 columns"):
        attend(case, kv_scale=1.0)
