# SPDX-License-Identifier: Apache-2.0
"""`cumla.mla_sparse_decode`, `cumla.mla_sparse_attention` and their plan on the CPU, and what they
refuse. What the numbers mean is in tests/reference/sparse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cumla
from tests.calls import (
    BF16,
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
from tests.mla.fp8_arrays import FORMS, SCALED, make_cache

Q, CACHE, OUT, LISTS = (2, 2, 16, 576), (6, 8, 1, 576), (2, 2, 16, 512), (2, 2, 5)
LISTED = [[[0, 47, -1, 3, 3], [9, 1, 8, 4, 7]], [[5, 5, 6, 48, 2], [11, 40, 33, 1, 0]]]


def decode(**changes: Any) -> dict[str, Any]:
    return {
        "q": numbers(*Q),
        "kv_cache": numbers(*CACHE),
        "indices": int32(*LISTED),
        "topk_lens": int32(5, 3),
        **changes,
    }


def placed(**changes: Any) -> dict[str, Any]:
    """The same with positions in pages of three requests."""
    places = {
        "block_table": int32([0, 1, 5], [2, 2, 2], [3, 4, 0]),
        "row_to_request": int32([0, 2], [2, 1]),
    }
    return decode(indices=int32(*LISTED) // 2, **places) | changes


def flat(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same query tokens without a batch."""
    tokens = dict(arguments)
    for name in ("q", "indices"):
        tokens[name] = arguments[name].reshape(4, *arguments[name].shape[2:])
    for name in {"topk_lens", "row_to_request"} & set(tokens):
        array = arguments[name]
        tokens[name] = (array if array.ndim == 2 else np.repeat(array, 2)).reshape(4)
    return tokens


def inputs(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return what a plan's run takes."""
    return {name: array for name, array in arguments.items() if name != "topk_lens"}


def plan_of(arguments: dict[str, Any], **options: Any) -> cumla.MLASparsePlan:
    """Make a plan, and update it."""
    made_of = [arguments[name] for name in ("q", "kv_cache", "indices")]
    plan = cumla.MLASparsePlan.from_arrays(*made_of, **options)
    plan.update(arguments.get("topk_lens"))
    return plan


def assert_same(got: Any, want: Any) -> None:
    np.testing.assert_array_equal(got.out, want.out)
    np.testing.assert_array_equal(got.lse, want.lse)


def as_decoded(state: cumla.AttentionState) -> cumla.AttentionState:
    """The result of query tokens without a batch in the shape of one with a batch."""
    return cumla.AttentionState(state.out.reshape(OUT), state.lse.reshape(2, 2, 16))


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [decode, placed])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_all_ways_give_the_same(make: Any, batch_invariant: bool) -> None:
    """The functions, with a batch and without, plans of both, and the reference."""
    arguments, mode = (
        make(sinks=numbers(16, dtype=np.float32)),
        {"batch_invariant": batch_invariant},
    )
    want = cumla.reference.mla_sparse_decode(**arguments)
    assert_same(cumla.mla_sparse_decode(**arguments, **mode), want)
    assert_same(plan_of(arguments, **mode).run(**inputs(arguments)), want)
    tokens = flat(arguments)
    assert_same(as_decoded(cumla.mla_sparse_attention(**tokens, **mode)), want)
    assert_same(as_decoded(plan_of(tokens, **mode).run(**inputs(tokens))), want)
    one_head = tokens | {"indices": tokens["indices"][:, None]}
    assert_same(as_decoded(cumla.mla_sparse_attention(**one_head, **mode)), want)
    assert_same(cumla.mla_sparse_attention(**arguments, **mode), want)
    assert_same(as_decoded(plan_of(one_head, **mode).run(**inputs(one_head))), want)


@pytest.mark.parametrize("form", FORMS)
def test_fp8_caches(form: str) -> None:
    """By the function and by a plan; a kv_scale as a number and as an array."""
    arguments = decode(kv_cache=make_cache(form, page_size=8))
    factors = (0.01, np.float32(0.01), np.full(1, 0.01, np.float32)) if form in SCALED else (None,)
    plan = plan_of(arguments)
    for kv_scale in factors:
        given = arguments | ({} if kv_scale is None else {"kv_scale": kv_scale})
        want = cumla.reference.mla_sparse_decode(**given)
        assert_same(cumla.mla_sparse_decode(**given), want)
        assert_same(plan.run(**inputs(given)), want)


def test_outputs_that_are_given() -> None:
    want = cumla.mla_sparse_decode(**decode())
    out, lse = np.zeros(OUT, np.float32), np.zeros((2, 2, 16), np.float32)
    tokens = {"out": out.reshape(4, 16, 512), "lse": lse.reshape(4, 16)}
    for call in (
        lambda: cumla.mla_sparse_decode(**decode(), out=out, lse=lse),
        lambda: cumla.mla_sparse_attention(**flat(decode()), **tokens),
    ):
        out[...], lse[...] = 0, 0
        assert np.shares_memory(call().out, out)
        np.testing.assert_allclose(out, want.out.astype("f4"), rtol=2**-8, atol=1e-6)
        np.testing.assert_array_equal(lse, want.lse)


def test_layouts_that_are_fine() -> None:
    """Pairs, rows without pages, gaps between pages, slices of longer lists, broadcast lists."""
    arguments = placed()
    want = cumla.mla_sparse_decode(**arguments)
    latent, rope = np.split(arguments["q"], [512], axis=-1)
    gaps = np.zeros((6, 9, 584), BF16)[:, :8, :576]
    gaps[...] = arguments["kv_cache"][:, :, 0]
    wide = np.full((2, 2, 9), 2147480000, np.int32)
    wide[..., 2:7] = arguments["indices"]
    pair = tuple(np.split(arguments["kv_cache"][:, :, 0], [512], axis=-1))
    for changes in (
        {"q": (np.ascontiguousarray(latent), np.ascontiguousarray(rope))},
        {"kv_cache": gaps},
        {"kv_cache": [np.ascontiguousarray(part) for part in pair]},
        {"indices": wide[..., 2:7]},
        {"topk_lens": int32([5, 5], [3, 3])},
    ):
        given = arguments | changes
        assert_same(cumla.mla_sparse_decode(**given), want)
        assert_same(plan_of(given).run(**inputs(given)), want)
    rows = decode(kv_cache=decode()["kv_cache"].reshape(48, 576))
    assert_same(cumla.mla_sparse_decode(**rows), cumla.mla_sparse_decode(**decode()))
    assert_same(plan_of(rows).run(**inputs(rows)), cumla.mla_sparse_decode(**decode()))
    one = np.broadcast_to(arguments["indices"][:1, :1], LISTS)
    cumla.mla_sparse_decode(**arguments | {"indices": one})


def test_empty_calls() -> None:
    """No query tokens, and no entries."""
    for shape in ((0, 2), (2, 0)):
        given = {"q": numbers(*shape, 16, 576), "indices": np.zeros((*shape, 5), np.int32)}
        arguments = decode(topk_lens=np.zeros(shape[0], np.int32)) | given
        for state in (
            cumla.mla_sparse_decode(**arguments),
            plan_of(arguments).run(**inputs(arguments)),
        ):
            assert state.out.shape == (*shape, 16, 512)
            assert state.lse.shape == (*shape, 16)
    tokens = {"q": numbers(0, 16, 576), "indices": np.zeros((0, 5), np.int32)}
    state = cumla.mla_sparse_attention(kv_cache=numbers(*CACHE), **tokens)
    assert (state.out.shape, state.lse.shape) == ((0, 16, 512), (0, 16))
    arguments = decode(indices=np.zeros((2, 2, 0), np.int32))
    for state in (
        cumla.mla_sparse_decode(**arguments),
        plan_of(arguments).run(**inputs(arguments)),
    ):
        assert not state.out.any()
        assert np.isneginf(state.lse).all()


def test_tensors_of_pytorch() -> None:
    torch = pytest.importorskip("torch")

    def tensor(array: Any) -> Any:
        if array.dtype == BF16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    for arguments in (decode(), placed(sinks=numbers(16, dtype=np.float32))):
        want = cumla.mla_sparse_decode(**arguments)
        given = {name: tensor(array) for name, array in arguments.items()}
        for got in (cumla.mla_sparse_decode(**given), plan_of(given).run(**inputs(given))):
            assert isinstance(got.out, torch.Tensor)
            assert torch.equal(got.out, tensor(want.out))
            assert torch.equal(got.lse, tensor(want.lse))


# --- what is refused ------------------------------------------------------------------------------


def zeros(*shape: int, dtype: Any = BF16) -> Any:
    return np.zeros(shape, dtype)


REFUSED = [
    wrong_type("q", zeros(*Q, dtype="f4"), "bfloat16 or float16, got float32; convert"),
    wrong_type("kv_cache", zeros(*CACHE, dtype="f2"), "q's dtype bfloat16, got float16; convert"),
    *(
        wrong_type(name, np.ones(shape, dtype), f"int32, got {dtype}; convert it first")
        for dtype in ("int64", "uint32", "float32")
        for name, shape in (
            ("indices", LISTS),
            ("topk_lens", (2,)),
            ("block_table", (3, 3)),
            ("row_to_request", (2, 2)),
        )
    ),
    wrong_type("indices", None, "an array of CuPy ... got builtins.NoneType"),
    wrong("q", zeros(3, 576), "4 axes (batch, q_len, num_heads, 576), got shape (3, 576)"),
    *(
        wrong(
            "kv_cache",
            cache,
            f"one kv head, got {heads}; pass the heads one by one",
        )
        for heads in (2, 4)
        for cache in (
            zeros(6, 8, heads, 576),
            (zeros(6, 8, heads, 512), zeros(6, 8, heads, 64)),
        )
    ),
    wrong("kv_cache", zeros(6, 8, 1, 512), "a last axis of 576 (512 latent + 64 RoPE), got"),
    wrong("kv_cache", zeros(6, 8, 1, 584), "a last axis of 576 (512 latent + 64 RoPE), got"),
    wrong("kv_cache", zeros(48, 512), "a last axis of 576 (512 latent + 64 RoPE), got"),
    wrong("kv_cache", zeros(0, 576), "at least one token, got"),
    wrong("kv_cache", zeros(2, 6, 8, 1, 576), "axes (num_pages, page_size, num_kv_heads, 576)"),
    *(
        wrong(
            "indices", zeros(*s, dtype="i4"), f"shape (batch, q_len, topk) with ... got {s}; pass"
        )
        for s in ((5,), (2, 5), (2, 1, 5), (4, 2, 5), (2, 2, 5, 1))
    ),
    wrong("indices", every_other(int32(*LISTED)), "contiguous rows, got a stride of 8 bytes"),
    *(
        wrong(
            name,
            zeros(*s, dtype="i4"),
            f"shape (batch,) or (batch, q_len) with batch 2 and q_len 2, got {s}; pass a number",
        )
        for name in ("topk_lens", "row_to_request")
        for s in ((), (1,), (3,), (2, 1), (1, 2), (2, 2, 1))
    ),
    *(
        wrong(
            "block_table", zeros(*s, dtype="i4"), f"shape (requests, max_pages), got {s}; reshape"
        )
        for s in ((3,), (1, 3, 3))
    ),
    wrong(
        "block_table", every_other(zeros(3, 3, dtype="i4")), "contiguous rows, got a stride of 8"
    ),
    Refusal({"block_table": None}, ValueError, "row_to_request: needs a block_table ... got None"),
    Refusal(
        {"row_to_request": None},
        ValueError,
        "block_table: needs shape (batch, max_pages) with batch 2, got (3, 3); give each",
    ),
    wrong_type("sinks", zeros(16), "float32, got bfloat16; convert it first"),
    *(
        wrong(
            "sinks", zeros(*s, dtype="f4"), f"shape (num_heads,) with num_heads 16, got {s}; pass"
        )
        for s in ((15,), (1, 16), ())
    ),
    wrong("sinks", zeros(32, dtype="f4")[::2], "contiguous rows, got a stride of 8 bytes"),
    wrong("kv_scale", 0.5, "a cache with e4m3 columns that have no scales ... got bfloat16; leave"),
    wrong_type("kv_scale", True, "a number, or a float32 array, got bool True; pass"),
    wrong_type("softmax_scale", "1", "a Python or NumPy number, got str"),
    wrong("softmax_scale", 0.0, "a number from 1e-20 to 1000000.0, got 0.0"),
    *(
        wrong(name, shifted(array, 2), "an address and strides that are multiples of 4 bytes")
        for name, array in (
            ("indices", int32(*LISTED)),
            ("topk_lens", int32(5, 3)),
            ("row_to_request", int32([0, 2], [2, 1])),
            ("lse", zeros(2, 2, 16, dtype="f4")),
        )
    ),
    *badly_laid_out("q", zeros(*Q)),
    *badly_laid_out("kv_cache", zeros(*CACHE)),
    *badly_laid_out("out", zeros(*OUT)),
    wrong_type("out", zeros(*OUT, dtype="f2"), "bfloat16 or float32, got float16; allocate it"),
    wrong("out", zeros(4, 16, 512), f"shape {OUT}, got (4, 16, 512); allocate it"),
    wrong("lse", zeros(2, 16, 2, dtype="f4"), "shape (2, 2, 16), got (2, 16, 2); allocate it"),
]


@all_of(REFUSED)
def test_refusals(refusal: Refusal) -> None:
    """By the function; and by a plan."""
    arguments = placed() | refusal.changes
    with refused(refusal.error, refusal.message):
        cumla.mla_sparse_decode(**arguments)
    if refusal.changes.get("topk_lens", 0) is None:
        return
    plan = plan_of(placed())
    with refused(refusal.error, refusal.message):
        if "topk_lens" in refusal.changes:
            plan.update(arguments["topk_lens"])
        else:
            plan.run(**inputs(arguments))


OF_TOKENS = [
    wrong("q", zeros(16, 576), "3 axes (total_tokens, num_heads, 576), got shape (16, 576)"),
    *(
        wrong("indices", zeros(*s, dtype="i4"), f"shape (total_tokens, topk) ... got {s}; pass a")
        for s in ((5,), (3, 5), (4, 2, 5))
    ),
    *(
        wrong(
            name,
            zeros(*s, dtype="i4"),
            f"shape (total_tokens,) with total_tokens 4, got {s}; pass a number for each",
        )
        for name in ("topk_lens", "row_to_request")
        for s in ((1,), (2,), (2, 2), (4, 1), (1, 4))
    ),
    Refusal(
        {"row_to_request": None},
        ValueError,
        "row_to_request: needed with block_table ... of each query token, got None; pass it",
    ),
    Refusal({"block_table": None}, ValueError, "row_to_request: needs a block_table ... got None"),
    wrong("out", zeros(*OUT), f"shape (4, 16, 512), got {OUT}"),
    wrong("lse", zeros(16, 4, dtype="f4"), "shape (4, 16), got (16, 4)"),
]


@all_of(OF_TOKENS)
def test_refusals_without_a_batch(refusal: Refusal) -> None:
    with refused(refusal.error, refusal.message):
        cumla.mla_sparse_attention(**flat(placed()) | refusal.changes)


@pytest.mark.parametrize("make", [decode, placed])
def test_indices_are_what_the_table_says(make: Any) -> None:
    arguments = make()
    right, wrong = ("positions", "slots") if make is placed else ("slots", "positions")
    message = "needs None with indices_are 'slots'" if make is placed else "needed with indices_are"
    plan, want = plan_of(arguments), cumla.mla_sparse_decode(**arguments)
    for call in (
        lambda **more: cumla.mla_sparse_decode(**arguments, **more),
        lambda **more: cumla.mla_sparse_attention(**arguments, **more),
        lambda **more: plan.run(**inputs(arguments), **more),
    ):
        assert_same(call(indices_are=right), want)
        with refused(ValueError, f"block_table: {message}"):
            call(indices_are=wrong)
        with refused(ValueError, "indices_are: needs 'slots' or 'positions', got 'blocks'"):
            call(indices_are="blocks")


@pytest.mark.parametrize("name", ["q", "kv_cache", "indices", "block_table", "sinks"])
def test_outputs_share_no_memory(name: str) -> None:
    arguments = placed(sinks=numbers(16, dtype=np.float32))
    memory, whole = arguments[name], np.zeros(1 << 20, np.uint8)
    begin = -whole.ctypes.data % 64
    there = whole[begin : begin + memory.nbytes].view(memory.dtype)
    arguments[name] = there.reshape(memory.shape)
    lse = whole[begin : begin + 256].view(np.float32).reshape(2, 2, 16)
    with refused(ValueError, f"lse: needs memory of its own, got memory that {name} uses too"):
        cumla.mla_sparse_decode(**arguments, lse=lse)


# --- plans ----------------------------------------------------------------------------------------


def test_the_options_of_from_arrays() -> None:
    arguments = decode()
    for given in (arguments, flat(arguments)):
        key = plan_of(given, batch_invariant=True).key
        tokens = (2, 2) if given is arguments else (1, 4)
        assert (key.batch, key.q_len, key.num_heads, key.topk) == (*tokens, 16, 5)
        assert (key.dtype, key.cache, key.device, key.batch_invariant) == (
            *("bfloat16", "same", None),
            True,
        )
    packed = decode(kv_cache=np.zeros((6, 8, 656), np.uint8))
    assert plan_of(packed).key.cache == "v32"
    bits = np.zeros((6, 8, 576), np.uint8)
    for cache in (bits, (bits[..., :512], bits[..., 512:])):
        assert plan_of(decode(kv_cache=cache)).key.cache == "e4m3"
    with refused(ValueError, "indices: needs shape (batch, q_len, topk)"):
        plan_of(decode(indices=int32([1, 2])))


def test_updates() -> None:
    """For full lists, for requests, for query tokens; a run has the lengths of the last one."""
    arguments = decode()
    given = inputs(arguments)
    plan = cumla.MLASparsePlan(2, 2, 16, 5, like=arguments["q"])
    with refused(ValueError, "plan: never updated; call plan.update(topk_lens) before the first"):
        plan.run(**given)
    lengths = int32(5, 3)
    for topk_lens in (None, lengths, int32([1, 2], [0, 9]), None):
        plan.update(topk_lens)
        want = cumla.mla_sparse_decode(**given, topk_lens=topk_lens)
        assert_same(plan.run(**given), want)
    plan.update(lengths)
    lengths[...] = 0
    assert_same(plan.run(**given), cumla.mla_sparse_decode(**arguments))
    other = given | {"indices": given["indices"][:, ::-1].copy()}
    assert_same(plan.run(**other), cumla.mla_sparse_decode(**other, topk_lens=int32(5, 3)))


def test_a_plan_of_one_request_takes_both_forms() -> None:
    tokens = flat(decode())
    given = inputs(tokens)
    batched = {name: array[None] for name, array in given.items() if name != "kv_cache"}
    plan = cumla.MLASparsePlan(1, 4, 16, 5, like=tokens["q"])
    for lengths in (int32(5, 1, 0, 4), int32(3), int32([5, 1, 0, 4])):
        plan.update(lengths)
        one, other = plan.run(**given), plan.run(**given | batched)
        assert_same(one, cumla.AttentionState(other.out[0], other.lse[0]))
        each = np.broadcast_to(lengths.reshape(-1), 4).copy()
        assert_same(one, cumla.mla_sparse_attention(**given, topk_lens=each))
    with refused(ValueError, "topk_lens: needs shape (batch,) or (batch, q_len) ... got (3,)"):
        plan.update(int32(1, 2, 3))
    wide = plan_of(decode())
    with refused(ValueError, "plan: made for batch 2, q_len 2, got batch 1, q_len 4; make a plan"):
        wide.run(**given)


@pytest.mark.parametrize("changed", ["q_len", "heads", "topk", "dtype", "cache"])
def test_a_plan_of_another_shape(changed: str) -> None:
    plan, given = plan_of(decode()), inputs(decode())
    if changed == "q_len":
        given |= {"q": given["q"][:, :1], "indices": given["indices"][:, :1]}
        message = "plan: made for q_len 2, got q_len 1; make a plan for this shape"
    elif changed == "heads":
        given["q"] = given["q"][:, :, :8]
        message = "plan: made for num_heads 16, got num_heads 8; make"
    elif changed == "topk":
        given["indices"] = given["indices"][..., :4]
        message = "plan: made for topk 5, got topk 4; make"
    elif changed == "dtype":
        given |= {name: given[name].astype(np.float16) for name in ("q", "kv_cache")}
        message = "plan: made for dtype bfloat16, got dtype float16; make"
    else:
        given["kv_cache"] = np.zeros((6, 8, 656), np.uint8)
        message = "plan: made for a cache of bfloat16, got one of packed rows of 656 bytes; make"
    with refused(ValueError, message):
        plan.run(**given)


NUMBERS = {"batch": 2, "q_len": 1, "num_heads": 16, "topk": 64}
NOT_PLANNED = [
    *(
        wrong(name, least - 1, f"a number from {least}, got {least - 1}; pass the size of a call")
        for name, least in (("batch", 0), ("q_len", 0), ("num_heads", 1), ("topk", 0))
    ),
    *(wrong_type(name, 2.0, "an int, got float 2.0; convert it") for name in NUMBERS),
    wrong_type("batch_invariant", 1, "True or False, got int"),
    *(
        wrong_type(
            "cache_dtype",
            name,
            f"bfloat16, float16 or float8_e4m3fn, got {name}; pass cache_format='v32' or 'v4' for "
            f"rows of a byte format",
        )
        for name in ("float32", "packed")
    ),
    wrong(
        "cache_format",
        "packed",
        "one of 'v32', 'v32_no_rope', 'v4', 'v41', 'v41_fp4', 'e4m3_512', got 'p",
    ),
    Refusal(
        {"cache_dtype": "bfloat16", "cache_format": "v32"},
        ValueError,
        "cache_dtype: needs float8_e4m3fn with cache_format 'v32', got bfloat16; leave it out",
    ),
]


@all_of(NOT_PLANNED)
def test_plans_that_are_refused(refusal: Refusal) -> None:
    with refused(refusal.error, refusal.message):
        cumla.MLASparsePlan(**NUMBERS | refusal.changes, like=np.zeros(1))
    with refused(refusal.error, refusal.message):
        cumla.MLASparsePlan.workspace_bytes(**NUMBERS | refusal.changes, sm_count=132)


def test_dtypes_of_plans() -> None:
    with refused(TypeError, "dtype: needs bfloat16 or float16, got float32"):
        cumla.MLASparsePlan(**NUMBERS, dtype="float32", like=np.zeros(1))
    with refused(TypeError, "dtype: needs bfloat16 with cache_dtype float8_e4m3fn, got float16"):
        cumla.MLASparsePlan(
            **NUMBERS, dtype="float16", cache_dtype="float8_e4m3fn", like=np.zeros(1)
        )
    packed = {**NUMBERS, "cache_format": "v32"}
    with refused(TypeError, "dtype: needs bfloat16 with cache_dtype float8_e4m3fn, got float16"):
        cumla.MLASparsePlan(**packed, dtype="float16", like=np.zeros(1))
    plan = cumla.MLASparsePlan(**packed, like=np.zeros(1))
    plan.update()
    one = decode(kv_cache=np.zeros((6, 8, 576), np.uint8))
    given = inputs(one) | {"q": one["q"][:, :1], "indices": np.zeros((2, 1, 64), np.int32)}
    with refused(
        ValueError, "plan: made for a cache of packed rows of 656 bytes, got one of float"
    ):
        plan.run(**given)
    plan.run(**given | {"kv_cache": np.zeros((6, 8, 656), np.uint8)})
    assert cumla.MLASparsePlan.workspace_bytes(**packed, sm_count=132) > 0


# --- check mode -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"indices": int32(*LISTED) * 1000}, None),  # they may have any values
        ({"topk_lens": int32(0, 5)}, None),
        ({"row_to_request": int32([0, -1], [-7, 1])}, None),
        ({"topk_lens": int32(5, 6)}, "topk_lens[1]: needs a length from 0 to topk = 5, got 6"),
        ({"topk_lens": int32([5, 0], [-1, 3])}, "topk_lens[1, 0]: needs ... got -1; the kern"),
        (
            {"row_to_request": int32([0, 3], [0, 0])},
            "row_to_request[0, 1]: needs a row of block_table up to 2, or below 0 ... got 3",
        ),
        (
            {"block_table": int32([0, 1, 6], [2, 2, 2], [3, 4, 0])},
            "block_table[0, 2]: needs a page number from 0 to 5, got 6",
        ),
        ({"block_table": int32([0, 1, 5], [2, -1, 2], [3, 4, 0])}, None),  # to which nothing leads
    ],
)
def test_check_mode(
    changes: dict[str, Any], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = placed(indices=int32(*LISTED) // 2, topk_lens=int32(5, 3)) | changes
    cumla.mla_sparse_decode(**arguments)
    monkeypatch.setenv("CUMLA_CHECK", "1")
    tokens = flat(arguments)
    calls = [
        (message, lambda: cumla.mla_sparse_decode(**arguments)),
        (message, lambda: plan_of(arguments).run(**inputs(arguments))),
        # Where the message names a query token, it has another place without a batch.
        (message and message.partition("[")[0], lambda: cumla.mla_sparse_attention(**tokens)),
    ]
    for expected, call in calls:
        if expected is None:
            call()
        else:
            with refused(ValueError, expected):
                call()


def test_check_mode_finds_lengths_that_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    arguments = decode()
    plan = plan_of(arguments)
    plan.run(**inputs(arguments))
    arguments["topk_lens"][1] = 1
    with refused(ValueError, "topk_lens[1]: needs the value that the plan was updated with, 3"):
        plan.run(**inputs(arguments))
    plan.update()
    plan.run(**inputs(arguments))
