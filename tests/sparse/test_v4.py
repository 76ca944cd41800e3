# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA of DeepSeek-V4 on the CPU: rows of 512 columns, slots of 584 bytes, one softmax over
two caches; against numbers that this file makes of the bytes itself."""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest

import cumla
from tests.calls import (
    BF16,
    E4M3,
    Refusal,
    all_of,
    badly_laid_out,
    every_other,
    int32,
    numbers,
    refused,
    shifted,
    wrong,
    wrong_type,
)

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
BATCH, Q_LEN, HEADS = 2, 2, 3
TOKENS = BATCH * Q_LEN
LENGTHS = ("topk_lens", "extra_topk_lens")


def value_of_code(code: int) -> float:
    """What a byte stands for: a sign, four bits of exponent, three of mantissa; no infinity."""
    sign, exponent, mantissa = -1 if code & 0x80 else 1, code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


VALUES = np.array([value_of_code(code) for code in range(256)])
FACTORS = np.array([2.0 ** (exponent - 127) for exponent in range(255)] + [math.nan])


class Slots(NamedTuple):
    """Pages of a cache, and memory that they lie in."""

    cache: Any  # (num_pages, page_size, 1, 584), uint8 or float8_e4m3fn
    memory: Any  # (num_pages, bytes of a page) uint8

    @property
    def page_size(self) -> int:
        return int(self.cache.shape[1])

    @property
    def count(self) -> int:
        return int(self.cache.shape[0]) * self.page_size

    def columns(self) -> Any:
        """The 576 bytes of each slot, (num_pages, page_size, 576), to look at and to change."""
        return self.memory[:, : self.page_size * 576].reshape(-1, self.page_size, 576)

    def exponents(self) -> Any:
        """The 8 bytes of each slot, after all rows of its page."""
        after = self.memory[:, self.page_size * 576 : self.page_size * 584]
        return after.reshape(-1, self.page_size, 8)

    def rows(self) -> Any:
        """Return what the slots stand for, (slots, 512) float64."""
        columns = self.columns().reshape(self.count, 576)
        factors = FACTORS[self.exponents().reshape(self.count, 8)[:, :7]]
        latent = VALUES[columns[:, :448]] * np.repeat(factors, 64, axis=1)
        bits = columns[:, 448:].copy().view(np.uint16).astype(np.uint32) << 16
        return np.concatenate([latent, bits.view(np.float32).astype(np.float64)], axis=1)

    def poison(self, kept: Any) -> None:
        """Make NaN of every slot but some, in columns and factors."""
        for pages in (self.columns(), self.exponents()):
            others = np.setdiff1d(np.arange(self.count), kept)
            pages[others // self.page_size, others % self.page_size] = 0xFF


def make_slots(pages: int = 5, page_size: int = 8, dtype: Any = np.uint8, seed: int = 0) -> Slots:
    """Random bytes but NaN; pages take a multiple of 576 bytes, and end in garbage."""
    rng = np.random.default_rng(seed)
    nbytes = -(-page_size * 584 // 576) * 576
    memory = np.full((pages, nbytes), 0xFF, np.uint8)
    whole = memory[:, : page_size * 584]
    strides = (nbytes, 584, 584, 1)
    cache = np.lib.stride_tricks.as_strided(whole, (pages, page_size, 1, 584), strides)
    slots = Slots(cache.view(dtype), memory)
    codes = rng.integers(0, 127, (pages, page_size, 448)) | rng.integers(0, 2) << 7
    slots.columns()[..., :448] = codes
    slots.columns()[..., 448:] = (
        (rng.standard_normal((pages, page_size, 64)) / 4).astype(BF16).view(np.uint8)
    )
    slots.exponents()[...] = rng.integers(116, 121, (pages, page_size, 8))  # 2^-11 to 2^-7
    slots.exponents()[..., 7] = rng.integers(0, 256, (pages, page_size))
    return slots


def queries(dtype: Any = BF16) -> Any:
    return (numbers(BATCH, Q_LEN, HEADS, 512, dtype="f4") / 4).astype(dtype)


def lists(count: int, topk: int, seed: int = 1) -> Any:
    """Lists of slots, some of them twice."""
    drawn = np.random.default_rng(seed).integers(0, count, (BATCH, Q_LEN, topk))
    return drawn.astype(np.int32)


def decode(page_size: int = 8, **changes: Any) -> dict[str, Any]:
    slots = make_slots(page_size=page_size)
    given = {"q": queries(), "kv_cache": slots.cache, "indices": lists(slots.count, 9)}
    return given | changes


def narrow(dtype: Any = BF16, **changes: Any) -> dict[str, Any]:
    """The same over rows of 512 columns in 16 bits."""
    return decode(q=queries(dtype), kv_cache=numbers(5, 8, 1, 512, dtype=dtype)) | changes


def twice(extra_topk: int = 5, page_size: int = 2, **changes: Any) -> dict[str, Any]:
    """Over two caches."""
    extra = make_slots(7, page_size, seed=3)
    given = {
        "extra_kv_cache": extra.cache,
        "extra_indices": lists(extra.count, extra_topk, seed=4),
        "topk_lens": int32(9, 3),
        "extra_topk_lens": int32(2, extra_topk),
    }
    return decode(**given) | changes


def slots_of(cache: Any) -> Slots:
    """View the memory of a cache again."""
    pages, strides = cache.shape[0], (cache.strides[0], 1)
    memory = np.lib.stride_tricks.as_strided(
        cache.view(np.uint8), (pages, cache.strides[0] if pages > 1 else cache.nbytes), strides
    )
    return Slots(cache, memory)


def rows_of(cache: Any) -> Any:
    """Return what the slots of a cache in either format stand for."""
    if cache.shape[-1] == 584:
        return slots_of(cache if cache.ndim == 4 else cache[:, :, None]).rows()
    return cache.astype(np.float64).reshape(-1, 512)


def each(numbers: Any, topk: int) -> list[int]:
    """A length for each query token, clamped."""
    if numbers is None:
        return [topk] * TOKENS
    given = numbers if numbers.ndim == 2 else numbers[:, None]
    return np.clip(np.broadcast_to(given, (BATCH, Q_LEN)), 0, topk).reshape(-1).tolist()


def found(given: dict[str, Any], prefix: str = "") -> list[Any]:
    """The rows that the lists of each query token name in one cache."""
    rows, indices = rows_of(given[f"{prefix}kv_cache"]), given[f"{prefix}indices"]
    pages, page_size = given[f"{prefix}kv_cache"].shape[:2]
    table = None if prefix else given.get("block_table")
    requests = np.repeat(np.arange(BATCH), Q_LEN)
    if table is not None and "row_to_request" in given:
        requests = np.broadcast_to(
            given["row_to_request"].reshape(BATCH, -1), (BATCH, Q_LEN)
        ).reshape(-1)
    topk = indices.shape[-1]
    named = []
    for token, length in enumerate(each(given.get(f"{prefix}topk_lens"), topk)):
        slots = []
        for index in indices.reshape(TOKENS, topk)[token, :length].tolist():
            page = index // page_size
            if table is not None and index >= 0:
                there = 0 <= requests[token] < len(table) and page < table.shape[1]
                page = int(table[requests[token], page]) if there else -1
            if index >= 0 and 0 <= page < pages:
                slots.append(page * page_size + index % page_size)
        named.append(rows[slots])
    return named


def naive(given: dict[str, Any]) -> tuple[Any, Any]:
    """Attend in float64: out as (batch, q_len, heads, 512), and lse as (batch, q_len, heads)."""
    sources = [found(given)]
    if "extra_kv_cache" in given:
        sources.append(found(given, "extra_"))
    out, lse = np.zeros((TOKENS, HEADS, 512)), np.full((TOKENS, HEADS), -np.inf)
    sinks = given.get("sinks", np.full(HEADS, -np.inf)).astype(np.float64)
    scale = given.get("softmax_scale", 512**-0.5)
    for token, query in enumerate(given["q"].reshape(TOKENS, HEADS, 512).astype(np.float64)):
        rows = np.concatenate([source[token] for source in sources])
        scores = np.concatenate([scale * query @ rows.T, sinks[:, None]], axis=1)
        top = scores.max(axis=1)
        some = top > -np.inf
        weights = np.exp(scores[some] - top[some, None])
        total = weights.sum(axis=1)
        lse[token, some] = top[some] + np.log(total)
        out[token, some] = weights[:, :-1] @ rows / total[:, None]
    return out.reshape(BATCH, Q_LEN, HEADS, 512), lse.reshape(BATCH, Q_LEN, HEADS)


def flat(given: dict[str, Any]) -> dict[str, Any]:
    """The same query tokens without a batch."""
    tokens = dict(given)
    for name in {"q", "indices", "extra_indices"} & set(given):
        tokens[name] = given[name].reshape(TOKENS, *given[name].shape[2:])
    for name in {*LENGTHS, "row_to_request"} & set(given):
        array = given[name] if given[name].ndim == 2 else np.repeat(given[name], Q_LEN)
        tokens[name] = array.reshape(TOKENS)
    if "block_table" in given and "row_to_request" not in given:
        tokens["row_to_request"] = np.repeat(np.arange(BATCH, dtype=np.int32), Q_LEN)
    return tokens


def inputs(given: dict[str, Any]) -> dict[str, Any]:
    """Return what a plan's run takes."""
    return {name: array for name, array in given.items() if name not in LENGTHS}


def updated(plan: Any, given: dict[str, Any]) -> Any:
    """Update a plan, also one whose second lists are empty."""
    plan.update(given.get("topk_lens"), extra_topk_lens=given.get("extra_topk_lens"))
    return plan


def plan_of(given: dict[str, Any], **options: Any) -> Any:
    """Make a plan, and update it."""
    names = ("extra_kv_cache", "extra_indices")
    extra = {name: given[name] for name in names if name in given}
    made_of = [given[name] for name in ("q", "kv_cache", "indices")]
    return updated(cumla.MLASparsePlan.from_arrays(*made_of, **extra, **options), given)


def every_way(given: dict[str, Any]) -> Any:
    """Attend by functions and plans, with a batch and without: equal bits; give one result."""
    tokens = flat(given)
    out = lambda: np.full((BATCH, Q_LEN, HEADS, 512), np.nan, np.float32)  # noqa: E731
    of_tokens = lambda: out().reshape(TOKENS, HEADS, 512)  # noqa: E731
    state = cumla.mla_sparse_decode(**given, out=out())
    others = [
        plan_of(given).run(**inputs(given), out=out()),
        cumla.mla_sparse_decode(**given, batch_invariant=True, out=out()),
        cumla.reference.mla_sparse_decode(**given, out=out()),
    ]
    for one in (
        cumla.mla_sparse_attention(**tokens, out=of_tokens()),
        plan_of(tokens).run(**inputs(tokens), out=of_tokens()),
    ):
        lse = one.lse.reshape(BATCH, Q_LEN, HEADS)
        others.append(cumla.AttentionState(one.out.reshape(state.out.shape), lse))
    for other in others:
        np.testing.assert_array_equal(other.out, state.out)
        np.testing.assert_array_equal(other.lse, state.lse)
    return state


def assert_right(given: dict[str, Any]) -> Any:
    state = every_way(given)
    for got, want in zip(state, naive(given), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)
    return state


# --- rows of 512 columns in 16 bits ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, np.dtype("f2")], ids=str)
def test_rows_of_512_columns(dtype: Any) -> None:
    """By slots and by positions, in pages and without, with sinks; results in q's dtype."""
    given = narrow(dtype, topk_lens=int32(9, 4))
    assert_right(given)
    assert_right(given | {"sinks": np.array([0.5, -np.inf, 3], np.float32)})
    assert_right(given | {"softmax_scale": 0.1})
    cache = given["kv_cache"]
    for same in (cache[:, :, 0], cache.reshape(40, 512)):
        other = given | {"kv_cache": same}
        np.testing.assert_array_equal(every_way(other).out, every_way(given).out)
    state = cumla.mla_sparse_decode(**given)
    assert state.out.dtype == dtype
    np.testing.assert_allclose(state.out.astype("f4"), every_way(given).out, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("make", [narrow, decode])
def test_positions_of_requests(make: Any) -> None:
    table = int32([0, 3, 5], [4, 4, -1], [2, 1, 0])
    for places in (
        {"block_table": table[:BATCH]},
        {"block_table": table, "row_to_request": int32(2, 0)},
        {"block_table": table, "row_to_request": int32([2, -1], [1, 3])},
    ):
        given = make(**places)
        given["indices"] = given["indices"] % 26 - 1  # some of them outside of the tables
        assert_right(given | {"topk_lens": int32([9, 3], [0, 5])})


def test_a_plan_of_16_bits_serves_both_widths() -> None:
    given = narrow()
    plan = plan_of(given)
    wide = {"q": numbers(BATCH, Q_LEN, HEADS, 576), "kv_cache": numbers(5, 8, 576)}
    for one in (given, given | wide):
        np.testing.assert_array_equal(
            plan.run(**inputs(one)).out, cumla.mla_sparse_decode(**one).out
        )


# --- slots of 584 bytes ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.dtype("u1"), E4M3], ids=str)
@pytest.mark.parametrize("page_size", [1, 2, 53, 64, 256])
def test_slots_of_v4(page_size: int, dtype: Any) -> None:
    """Lists with anything in them, in any place, over slots of which most are NaN."""
    slots = make_slots(3, page_size, dtype)
    indices = lists(slots.count, 12)
    slots.poison(indices)
    indices[0, 0] = -1
    indices[0, 1, ::2] = [INT_MIN, -1, slots.count, INT_MAX, INT_MIN + 1, slots.count + 1]
    indices[1, :, 7:] = [2147480000, -7, 0, INT_MAX, INT_MIN]  # 0 is a slot, maybe of NaN
    given = decode(kv_cache=slots.cache, indices=indices, topk_lens=int32([12, 12], [7, 7]))
    state = assert_right(given)
    assert np.isfinite(state.out).all()
    assert not state.out[0, 0].any() and np.isneginf(state.lse[0, 0]).all()
    without_axis = given | {"kv_cache": slots.cache[:, :, 0]}
    np.testing.assert_array_equal(every_way(without_axis).out, state.out)


def test_pages_without_padding_and_of_one_slot() -> None:
    """Contiguous pages of an even number of slots; rows without pages, 592 bytes apart."""
    given = decode()
    want = cumla.mla_sparse_decode(**given)
    for cache in (
        np.ascontiguousarray(given["kv_cache"]),
        np.ascontiguousarray(given["kv_cache"])[:, :, 0],
    ):
        assert cache.strides[0] == 8 * 584
        state = cumla.mla_sparse_decode(**given | {"kv_cache": cache})
        np.testing.assert_array_equal(state.out, want.out)
    one = make_slots(30, 1)
    paged = decode(kv_cache=one.cache, indices=lists(30, 9))
    rows = np.zeros((30, 592), np.uint8)[:, :584]
    rows[...] = one.cache[:, 0, 0]
    state = cumla.mla_sparse_decode(**paged | {"kv_cache": rows})
    np.testing.assert_array_equal(state.out, assert_right(paged).out.astype(BF16))


def test_sinks() -> None:
    for make in (decode, twice):
        state = assert_right(make(sinks=np.array([-np.inf, -3, 1], np.float32)))
        nothing = make(indices=np.full((BATCH, Q_LEN, 9), -1, np.int32), topk_lens=int32(9, 0))
        nothing |= {"sinks": np.array([-np.inf, -2, 1], np.float32)}
        if make is twice:
            nothing["extra_topk_lens"] = int32(0, 0)
        state = assert_right(nothing)
        np.testing.assert_array_equal(state.lse, np.broadcast_to(nothing["sinks"], state.lse.shape))
    given = decode(sinks=np.full(HEADS, np.inf, np.float32))
    state = cumla.mla_sparse_decode(**given)
    assert not state.out.any() and np.isposinf(state.lse).all()


def one_slot() -> tuple[dict[str, Any], Slots]:
    """A call whose result is a slot's row: all lists name slot 3 alone."""
    slots = make_slots(1, 8)
    given = decode(kv_cache=slots.cache, indices=np.full((BATCH, Q_LEN, 1), 3, np.int32))
    return given | {"q": np.zeros((BATCH, Q_LEN, HEADS, 512), BF16)}, slots


def test_every_code() -> None:
    """To the bit, and with it the signs of zeros; a selected NaN makes NaN."""
    given, slots = one_slot()
    finite = np.array([code for code in range(256) if code & 0x7F != 0x7F])
    slots.columns()[0, 3, :448] = np.resize(finite, 448)
    slots.exponents()[0, 3, :7] = [127, 127, 127, 127, 120, 134, 1]
    row = every_way(given).out[1, 1, 2]
    want = slots.rows()[3].astype(np.float32)
    np.testing.assert_array_equal(row, want)
    assert np.array_equal(row[:254], VALUES[finite].astype(np.float32)[:254])
    for code in (0x7F, 0xFF):
        slots.columns()[0, 3, 70] = code
        state = every_way(given)
        assert np.isnan(state.out).all() and np.isnan(state.lse).all()


@pytest.mark.parametrize("accumulate", ["float64", "float32"])
@pytest.mark.parametrize("exponent", [0, 1, 127, 254, 255])
def test_exponents(exponent: int, accumulate: Any) -> None:
    """From 2^-127 to 2^127; 255 is NaN, and the eighth byte of a slot is nothing."""
    given, slots = one_slot()
    slots.columns()[0, 3, :448] = np.resize([0x01, 0x38, 0xBF, 0x00, 0x30], 448)  # up to 1.875
    out = np.zeros((BATCH, Q_LEN, HEADS, 512), np.float32)
    for tile in range(8):
        slots.exponents()[0, 3] = 127
        slots.exponents()[0, 3, tile] = exponent
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            state = cumla.reference.mla_sparse_decode(**given, out=out, accumulate=accumulate)
        if exponent == 255 and tile < 7:
            assert np.isnan(state.out).all() and np.isnan(state.lse).all()
        else:
            want = np.broadcast_to(slots.rows()[3].astype(np.float32), out.shape)
            np.testing.assert_array_equal(state.out, want)


def test_an_entry_less_shows() -> None:
    """The comparison would notice one."""
    for name in ("indices", "extra_indices"):
        given = twice(topk_lens=None, extra_topk_lens=None)
        given = {name: array for name, array in given.items() if array is not None}
        shorter = given | {name: given[name][..., :-1]}
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(every_way(given).out, naive(shorter)[0], rtol=2e-6)


@pytest.mark.parametrize("dtype", [BF16, np.float32])
def test_rows_that_were_appended(dtype: Any) -> None:
    """A list of one slot gives its row: half a step of e4m3 from it, RoPE columns rounded once."""
    slots, mapping = make_slots(), int32(3, 17, 39, 8)
    untouched = np.setdiff1d(np.arange(slots.count), mapping)
    before = slots.rows()[untouched]
    rows = numbers(TOKENS + 2, 512, dtype=np.float32)
    rows[:, :64] *= 1000
    rows = rows.astype(dtype)
    cumla.append_mla_cache(rows, slots.cache, np.append(mapping, [-1, slots.count]))
    np.testing.assert_array_equal(slots.rows()[untouched], before)

    out = np.zeros((BATCH, Q_LEN, HEADS, 512), np.float32)
    indices = mapping.reshape(BATCH, Q_LEN, 1)
    cumla.mla_sparse_decode(**decode(kv_cache=slots.cache, indices=indices), out=out)
    found = out.reshape(TOKENS, HEADS, 512)
    np.testing.assert_array_equal(found, np.repeat(slots.rows()[mapping][:, None], HEADS, 1))
    exact = rows[:TOKENS, None].astype(np.float32)
    rope = exact[..., 448:].astype(BF16).astype(np.float32)
    np.testing.assert_array_equal(found[..., 448:], np.repeat(rope, HEADS, 1))
    latent = np.abs(exact[..., :448])
    scales = 2.0 ** np.ceil(np.log2(latent.reshape(TOKENS, 1, 7, 64).max(axis=-1) / 448))
    most = np.maximum(latent / 16, np.repeat(scales, 64, axis=-1) / 1024)
    assert (np.abs(found - exact)[..., :448] <= most).all()
    assert_right(decode(kv_cache=slots.cache))


# --- two caches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 2, 64])
@pytest.mark.parametrize("extra_topk", [0, 1, 5, 9, 40], ids="extra {}".format)
def test_one_softmax_over_two_lists(extra_topk: int, page_size: int) -> None:
    """Shorter, longer and empty ones; lengths of requests, of query tokens, and none."""
    given = twice(extra_topk, page_size)
    assert_right(given)
    lengths = (
        {"extra_topk_lens": int32([0, 100], [3, -1])},
        {"topk_lens": int32([9, 0], [1, 12]), "extra_topk_lens": int32([0, 0], [1, 2])},
        {"topk_lens": int32(0, 0)},
    )
    for changes in lengths:
        assert_right(given | changes)
    for names in (LENGTHS, LENGTHS[:1], LENGTHS[1:]):
        assert_right({name: array for name, array in given.items() if name not in names})


def test_positions_beside_slots() -> None:
    """The table is that of the first cache."""
    given = twice(block_table=int32([0, 3, 9], [4, 4, -1]))
    given["indices"] = given["indices"] % 26 - 1
    given["extra_indices"][1, 0] = [13, 0, 14, -1, INT_MAX]  # there are 14 slots
    assert_right(given | {"sinks": numbers(HEADS, dtype=np.float32)})


def test_nothing_of_the_other_cache_is_read() -> None:
    """Slots of one that only the other's lists name are NaN."""
    first, second = make_slots(5, 8), make_slots(20, 2, seed=5)
    indices, extra = lists(20, 6), 20 + lists(20, 6, seed=2)
    first.poison(indices)
    second.poison(extra)
    caches = {"kv_cache": first.cache, "extra_kv_cache": second.cache}
    state = assert_right(decode(**caches, indices=indices, extra_indices=extra))
    assert np.isfinite(state.out).all()


def test_both_lists_are_as_merged_results() -> None:
    given = twice()
    one = {name: array for name, array in given.items() if not name.startswith("extra_")}
    other = given | {name[6:]: given[name] for name in given if name.startswith("extra_")}
    other = {name: array for name, array in other.items() if not name.startswith("extra_")}
    parts = [every_way(part) for part in (one, other)]
    merged = cumla.merge_attention_states(*map(list, zip(*parts, strict=True)))
    np.testing.assert_allclose(merged.out, every_way(given).out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(merged.lse, every_way(given).lse, rtol=1e-6, atol=1e-6)


def test_lists_of_one_kv_head() -> None:
    tokens = flat(twice())
    want = cumla.mla_sparse_attention(**tokens)
    axis = {name: tokens[name][:, None] for name in ("indices", "extra_indices")}
    given = tokens | axis
    np.testing.assert_array_equal(cumla.mla_sparse_attention(**given).out, want.out)
    np.testing.assert_array_equal(plan_of(given).run(**inputs(given)).out, want.out)


def test_empty_calls() -> None:
    """No query tokens; no entries in both lists."""
    for shape in ((0, 2), (2, 0)):
        nothing = {
            "q": np.zeros((*shape, HEADS, 512), BF16),
            "indices": np.zeros((*shape, 9), np.int32),
            "extra_indices": np.zeros((*shape, 5), np.int32),
        }
        lengths = {name: np.zeros(shape[0], np.int32) for name in LENGTHS}
        given = twice(**nothing, **lengths)
        for state in (cumla.mla_sparse_decode(**given), plan_of(given).run(**inputs(given))):
            assert state.out.shape == (*shape, HEADS, 512)
            assert state.lse.shape == (*shape, HEADS)
    empty = np.zeros((BATCH, Q_LEN, 0), np.int32)
    state = assert_right(twice(indices=empty, extra_indices=empty))
    assert not state.out.any() and np.isneginf(state.lse).all()


def test_tensors_of_pytorch() -> None:
    torch = pytest.importorskip("torch")

    def tensor(array: Any) -> Any:
        if array.dtype == BF16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    for given in (twice(), narrow(), decode(page_size=53)):
        want = cumla.mla_sparse_decode(**given)
        tensors = {name: tensor(array) for name, array in given.items()}
        names = [name for name in given if name.endswith("kv_cache")]
        fp8 = {name: tensors[name].view(torch.float8_e4m3fn) for name in names}
        for form in (tensors, tensors | fp8) if given["kv_cache"].dtype == np.uint8 else (tensors,):
            for got in (cumla.mla_sparse_decode(**form), plan_of(form).run(**inputs(form))):
                assert isinstance(got.out, torch.Tensor)
                assert torch.equal(got.out, tensor(want.out))
                assert torch.equal(got.lse, tensor(want.lse))


# --- plans ----------------------------------------------------------------------------------------


def test_what_plans_are_made_for() -> None:
    for given in (twice(), flat(twice())):
        key = plan_of(given).key
        assert (key.cache, key.topk, key.extra_topk) == ("v4", 9, 5)
        assert key.batch * key.q_len == TOKENS
    assert plan_of(decode()).key.extra_topk == 0
    assert plan_of(narrow()).key.cache == "same"
    by_numbers = cumla.MLASparsePlan(
        BATCH, Q_LEN, HEADS, 9, extra_topk=5, cache_format="v4", like=np.zeros(1)
    )
    assert by_numbers.key == plan_of(twice()).key


def test_updates() -> None:
    """A run has both lengths of the last one; lists and caches may differ from run to run."""
    given = twice()
    plan = plan_of(given)
    for lengths in (
        {},
        {"topk_lens": int32(1, 2)},
        {"extra_topk_lens": int32([1, 0], [9, -1])},
        {"topk_lens": int32([0, 3], [3, 0]), "extra_topk_lens": int32(4, 0)},
    ):
        plan.update(**lengths)
        want = cumla.mla_sparse_decode(**inputs(given), **lengths)
        np.testing.assert_array_equal(plan.run(**inputs(given)).out, want.out)
    other = inputs(twice(page_size=64)) | {"extra_indices": lists(7 * 64, 5, seed=9)}
    want = cumla.mla_sparse_decode(**other, **lengths)
    np.testing.assert_array_equal(plan.run(**other).out, want.out)


def test_the_size_of_a_buffer() -> None:
    """It has room for the lengths of both lists of each query token, and not for the lists."""
    shape = {"batch": 1024, "q_len": 2, "num_heads": 64, "topk": 128}
    bytes_of = cumla.MLASparsePlan.workspace_bytes
    sizes = [
        bytes_of(**shape, cache_format="v4", extra_topk=extra, sm_count=132)
        for extra in (0, 512, 1024)
    ]
    assert sizes[1] - sizes[0] == 2 * 2048 * 4
    assert sizes[2] == sizes[1]


def without_extra(given: dict[str, Any]) -> dict[str, Any]:
    return {name: array for name, array in given.items() if not name.startswith("extra_")}


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (twice, {"extra_indices": lists(14, 4)}, "extra_topk 5, got extra_topk 4; make a plan"),
        (decode, twice(), "extra_topk 0, got extra_topk 5; make a plan"),
        (decode, narrow(), "a cache of V4's slots of 584 bytes, got one of bfloat16; make a plan"),
        (narrow, decode(), "a cache of bfloat16, got one of V4's slots of 584 bytes; make a plan"),
    ],
)
def test_a_plan_of_another_shape(make: Any, changes: dict[str, Any], message: str) -> None:
    given = make()
    with refused(ValueError, f"plan: made for {message}"):
        plan_of(given).run(**inputs(given | changes))


def test_a_plan_of_two_caches_needs_both() -> None:
    plan = plan_of(twice())
    with refused(ValueError, "plan: made for extra_topk 5, got extra_topk 0; make"):
        plan.run(**without_extra(inputs(twice())))
    with refused(ValueError, "extra_indices: needed with extra_kv_cache, got None; pass a list"):
        plan.run(**{n: a for n, a in inputs(twice()).items() if n != "extra_indices"})
    with refused(ValueError, "extra_topk_lens: needs a plan with cache_format 'v4' or 'v41'"):
        plan_of(narrow()).update(int32(1, 2), extra_topk_lens=int32(1, 2))
    for lengths, error, message in (
        (int32(1, 2, 3), ValueError, "shape (batch,) or (batch, q_len) ... got (3,); pass a num"),
        (np.ones(2, np.int64), TypeError, "int32, got int64; convert it first"),
        (shifted(int32(1, 2), 2), ValueError, "an address and strides that are multiples of 4"),
    ):
        with refused(error, f"extra_topk_lens: needs {message}"):
            plan.update(extra_topk_lens=lengths)


NUMBERS = {"batch": 2, "q_len": 1, "num_heads": 64, "topk": 64, "cache_format": "v4"}
NOT_PLANNED = [
    wrong("extra_topk", -1, "a number from 0, got -1; pass the size of a call"),
    wrong_type("extra_topk", 5.0, "an int, got float 5.0; convert it"),
    *(
        Refusal(
            {"extra_topk": 5, "cache_format": None, **cache},
            ValueError,
            "extra_topk: needs cache_format 'v4' or 'v41' or 'v41_fp4', the formats that may",
        )
        for cache in ({}, {"cache_format": "v32"}, {"cache_dtype": "float8_e4m3fn"})
    ),
]


@all_of(NOT_PLANNED)
def test_plans_that_are_refused(refusal: Refusal) -> None:
    with refused(refusal.error, refusal.message):
        cumla.MLASparsePlan(**NUMBERS | refusal.changes, like=np.zeros(1))
    with refused(refusal.error, refusal.message):
        cumla.MLASparsePlan.workspace_bytes(**NUMBERS | refusal.changes, sm_count=132)


def test_dtypes_of_plans() -> None:
    with refused(TypeError, "dtype: needs bfloat16 with cache_dtype ... got float16"):
        cumla.MLASparsePlan(**NUMBERS, dtype="float16", like=np.zeros(1))


# --- what is refused ------------------------------------------------------------------------------


def zeros(*shape: int, dtype: Any = np.uint8) -> Any:
    return np.zeros(shape, dtype)


def strided(strides: tuple[int, ...], shift: int = 0) -> Any:
    """Pages of 8 slots of zeros with these strides."""
    memory = zeros(1 << 17)
    begin = -memory.ctypes.data % 16 + shift
    return np.lib.stride_tricks.as_strided(memory[begin:], (5, 8, 1, 584), strides)


NO_PLACE = "contiguous pages, at multiples of 16 bytes, got address 0x ... and strides ( ... ); all"
WRONG_PAGES = {
    "rows further apart": strided((8 * 592, 592, 592, 1)),
    "every other byte": strided((16 * 1168, 1168, 1168, 2)),
    "pages off 16 bytes": strided((8 * 584 + 8, 584, 584, 1)),
    "pages that overlap": strided((7 * 584 + 8, 584, 584, 1)),
    "one page for all": strided((0, 584, 584, 1)),
    "pages backwards": decode()["kv_cache"][::-1],
    "an odd address": strided((8 * 584, 584, 584, 1), 8),
    "an odd number of slots": zeros(5, 7, 1, 584),
    "rows without pages": zeros(40, 584),
}
ONE_HEAD = "one kv head, got 2; pass the heads one by one"
NARROW_COLUMNS = "a last axis of 512, or of the 584 bytes of V4's slots, beside queries of 512"
NOT_SCALED = "a cache with e4m3 columns that have no scales of their own, got rows of 512 columns"

REFUSED = [
    wrong("q", zeros(3, 512, dtype=BF16), "4 axes (batch, q_len, num_heads, 512), got shape (3"),
    wrong("q", zeros(2, 3, 512, dtype=BF16), "4 axes (batch, q_len, num_heads, 512), got shape"),
    wrong("q", zeros(512, dtype=BF16), "4 axes (batch, q_len, num_heads, 512), got shape (512,);"),
    wrong("q", zeros(2, 2, 0, 512, dtype=BF16), "at least one head, got shape (2, 2, 0, 512); s"),
    wrong_type("q", queries("f4"), "bfloat16 or float16, got float32; convert it first"),
    wrong_type("q", queries("f2"), "bfloat16 with kv_cache of 584 bytes per slot, got float16; c"),
    *badly_laid_out("q", queries()),
    wrong("kv_cache", (zeros(5, 8, 448), zeros(5, 8, 64)), "one array beside queries of 512 colum"),
    *(
        wrong("kv_cache", zeros(*shape), "axes (num_pages, page_size, num_kv_heads, 512), or the")
        for shape in ((584,), (2, 5, 8, 1, 584))
    ),
    *(
        wrong_type("kv_cache", zeros(5, 8, 584, dtype=dtype), "float8_e4m3fn or uint8, got ")
        for dtype in (BF16, np.int8)
    ),
    *(
        wrong("kv_cache", zeros(*shape, dtype=dtype), f"{NARROW_COLUMNS} columns, got shape (5,")
        for shape, dtype in (
            ((5, 8, 1, 576), BF16),
            ((5, 8, 656), np.uint8),
        )
    ),
    wrong("kv_cache", zeros(5, 8, 2, 584), ONE_HEAD),
    *(
        wrong("kv_cache", zeros(*shape), "at least one token, got shape ( ... ); skip it")
        for shape in ((0, 8, 1, 584), (5, 0, 584), (0, 584))
    ),
    *(wrong("kv_cache", cache, NO_PLACE) for cache in WRONG_PAGES.values()),
    wrong("kv_scale", 0.5, NOT_SCALED),
    wrong("kv_scale", np.ones(1, np.float32), NOT_SCALED),
    wrong_type("sinks", zeros(HEADS), "float32, got uint8; convert it first"),
]


@all_of(REFUSED)
def test_refusals(refusal: Refusal) -> None:
    with refused(refusal.error, refusal.message):
        cumla.mla_sparse_decode(**decode() | refusal.changes)
    if "kv_scale" not in refusal.changes and "sinks" not in refusal.changes:
        plan = plan_of(decode())
        message = refusal.message
        if refusal.changes.get("q", queries()).shape == (2, 3, 512):
            message = "indices: needs shape (total_tokens, topk)"  # to a plan it has no batch
        with refused(refusal.error, message):
            plan.run(**inputs(decode() | refusal.changes))


NARROW = [
    wrong_type("kv_cache", zeros(5, 8, 512, dtype="f2"), "q's dtype bfloat16, got float16; conv"),
    wrong("kv_cache", zeros(0, 8, 512, dtype=BF16), "at least one token, got shape (0, 8, 1, 512)"),
    wrong("kv_cache", zeros(5, 8, 2, 512, dtype=BF16), ONE_HEAD),
    *badly_laid_out("kv_cache", zeros(5, 8, 1, 512, dtype=BF16)),
    wrong("kv_scale", 0.5, NOT_SCALED),
]


@all_of(NARROW)
def test_refusals_of_16_bits(refusal: Refusal) -> None:
    with refused(refusal.error, refusal.message):
        cumla.mla_sparse_decode(**narrow() | refusal.changes)


def test_queries_are_one_array_of_512_columns() -> None:
    need = "needs one array of 512 columns with kv_cache of 584 bytes per slot, got shape"
    pair = (numbers(2, 2, 3, 448), numbers(2, 2, 3, 64))
    with refused(ValueError, f"q[0]: {need} (2, 2, 3, 448); join or slice the columns"):
        cumla.mla_sparse_decode(**decode(q=pair))
    wide = numbers(BATCH, Q_LEN, HEADS, 576)
    with refused(ValueError, f"q: {need} {wide.shape}; join or slice the columns"):
        cumla.mla_sparse_decode(**decode(q=wide))


OF_TWO = [
    *(
        wrong("extra_kv_cache", zeros(*s), "axes (num_pages, page_size, num_kv_heads, 584), or th")
        for s in ((584,), (2, 7, 2, 1, 584))
    ),
    *(
        wrong("extra_kv_cache", zeros(*s), f"slots of 584 bytes, as kv_cache has, got shape {s}; w")
        for s in ((7, 2, 1, 576), (7, 2, 512))
    ),
    *(
        wrong_type("extra_kv_cache", zeros(7, 2, 584, dtype=dtype), "float8_e4m3fn or uint8, g")
        for dtype in (np.int8, BF16)
    ),
    wrong("extra_kv_cache", zeros(7, 2, 2, 584), ONE_HEAD),
    wrong("extra_kv_cache", zeros(7, 0, 1, 584), "at least one token, got shape (7, 0, 1, 584);"),
    *(wrong("extra_kv_cache", cache, NO_PLACE) for cache in WRONG_PAGES.values()),
    wrong_type("extra_kv_cache", (zeros(7, 2, 584),), "an array ... got builtins.tuple"),
    Refusal(
        {"extra_indices": None},
        ValueError,
        "extra_indices: needed with extra_kv_cache, got None; pass a list for each query token",
    ),
    Refusal(
        {"extra_kv_cache": None},
        ValueError,
        "extra_indices: needs an extra_kv_cache, whose slots it is about, got None; pass it",
    ),
    Refusal(
        {"extra_kv_cache": None, "extra_indices": None},
        ValueError,
        "extra_topk_lens: needs an extra_kv_cache, whose slots it is about, got None; pass it",
    ),
    Refusal(
        {"kv_cache": narrow()["kv_cache"]},
        ValueError,
        "extra_kv_cache: needs a kv_cache in one of the formats 'v4', 'v41', 'v41_fp4' beside it",
    ),
    Refusal(
        {"kv_cache": numbers(5, 8, 576), "q": numbers(2, 2, 3, 576)},
        ValueError,
        "extra_kv_cache: needs a kv_cache in one of the formats 'v4', 'v41', 'v41_fp4' beside it",
    ),
    *(
        wrong(
            "extra_indices", zeros(*s, dtype="i4"), "shape (batch, q_len, extra_topk) with batch 2"
        )
        for s in ((5,), (2, 5), (2, 1, 5), (4, 2, 5), (2, 2, 5, 1))
    ),
    wrong_type("extra_indices", zeros(2, 2, 5, dtype="i8"), "int32, got int64; convert it first"),
    wrong("extra_indices", every_other(lists(14, 5)), "contiguous rows, got a stride of 8 bytes"),
    wrong("extra_indices", shifted(lists(14, 5), 2), "an address and strides that are multiples"),
    wrong_type("extra_topk_lens", zeros(2, dtype="i8"), "int32, got int64; convert it first"),
    *(
        wrong("extra_topk_lens", zeros(*s, dtype="i4"), "shape (batch,) or (batch, q_len) with")
        for s in ((), (1,), (3,), (2, 1), (2, 2, 1))
    ),
]


@all_of(OF_TWO)
def test_refusals_of_two_caches(refusal: Refusal) -> None:
    with refused(refusal.error, refusal.message):
        cumla.mla_sparse_decode(**twice(**refusal.changes))


@pytest.mark.parametrize("name", ["kv_cache", "extra_kv_cache", "extra_indices"])
def test_outputs_share_no_memory(name: str) -> None:
    given = twice(page_size=2)
    memory = slots_of(given[name]).memory if "cache" in name else given[name]
    lse = memory.reshape(-1).view(np.uint8)[:48].view(np.float32).reshape(BATCH, Q_LEN, HEADS)
    with refused(ValueError, f"lse: needs memory of its own, got memory that {name} uses too"):
        cumla.mla_sparse_decode(**given, lse=lse)


# --- check mode -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"extra_indices": lists(14, 5) * 1000 - 5000}, None),  # they may have any values
        ({"extra_topk_lens": int32([0, 5], [5, 0])}, None),
        (
            {"extra_topk_lens": int32(5, 6)},
            "extra_topk_lens[1]: needs a length from 0 to extra_topk = 5, got 6; the kernels",
        ),
        (
            {"extra_topk_lens": int32([5, 0], [-1, 3])},
            "extra_topk_lens[1, 0]: needs a length from 0 to extra_topk = 5, got -1; the kernels",
        ),
        ({"topk_lens": int32(10, 0)}, "topk_lens[0]: needs a length from 0 to topk = 9, got 1"),
    ],
)
def test_check_mode(
    changes: dict[str, Any], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = twice(**changes)
    cumla.mla_sparse_decode(**given)
    monkeypatch.setenv("CUMLA_CHECK", "1")
    for at, call in (
        (message, lambda: cumla.mla_sparse_decode(**given)),
        (message, lambda: plan_of(given).run(**inputs(given))),
        # Without a batch a length has another place.
        (message and message.partition("[")[0], lambda: cumla.mla_sparse_attention(**flat(given))),
    ):
        if at is None:
            call()
        else:
            with refused(ValueError, at):
                call()


def test_check_mode_finds_lengths_that_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    given = twice()
    plan = plan_of(given)
    plan.run(**inputs(given))
    given["extra_topk_lens"][1] = 1
    with refused(ValueError, "extra_topk_lens[1]: needs the value that the plan was updated wi"):
        plan.run(**inputs(given))
