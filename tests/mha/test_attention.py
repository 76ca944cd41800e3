# SPDX-License-Identifier: Apache-2.0
"""`cumla.attention` and its plan: what they refuse, what they take, and what they launch. What
holds for every operation is in tests/core, what is computed in tests/reference and tests/launch."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from tests.calls import (
    BF16,
    PLANS,
    Arguments,
    Refusal,
    aligned,
    badly_laid_out,
    equal_queries,
    frozen,
    int32,
    keys_in_listed_pages,
    keys_in_pages,
    keys_in_rows,
    numbers,
    padded,
    refused,
    wrong,
    wrong_type,
)
from tests.fake_cuda import FakeBindings, FakeCuPy

F16, F32, E4M3 = np.float16, np.float32, np.dtype(ml_dtypes.float8_e4m3fn)


def paged(**changes: Any) -> Arguments:
    return keys_in_pages() | changes


def rows(**changes: Any) -> Arguments:
    return keys_in_rows() | changes


def equal(**changes: Any) -> Arguments:
    return equal_queries() | changes


def paged_e4m3(**changes: Any) -> Arguments:
    given = keys_in_pages()
    return given | {name: given[name].astype(E4M3) for name in "kv"} | changes


# --- what is refused ------------------------------------------------------------------------------

PAGED = [
    wrong_type("q", aligned((8, 4, 64), np.float64), "bfloat16 or float16 or float32, got float64"),
    wrong_type("q", aligned((8, 4, 64), F32), "")._replace(
        message="k: needs float32, got bfloat16; convert it, or q"
    ),
    wrong_type(
        "k", aligned((6, 16, 2, 64), F16), "bfloat16 or float8_e4m3fn or uint8, got float16; conv"
    ),
    wrong_type("v", aligned((6, 16, 2, 32), np.uint8), "the kind of numbers of k, bfloat16, got u"),
    wrong_type("k", aligned((6, 16, 2, 64), E4M3), "")._replace(
        message="v: needs the kind of numbers of k, float8_e4m3fn, got bfloat16; pass both of"
    ),
    wrong("k_scale", 2.0, "an e4m3 cache, got bfloat16; leave it out"),
    wrong_type("v_scale", True, "a number, or a float32 array, got bool True; pass"),
    wrong_type("softcap", True, "a Python or NumPy number, got bool True; pass fl"),
    wrong_type("softmax_scale", np.bool_(1), "a Python or NumPy number, got bool True; pass"),
    wrong_type("batch_invariant", 1, "True or False, got int"),
    *(
        wrong("q", aligned(shape), f"shape (total_tokens, num_heads, head_dim) ... {shape}; {way}")
        for shape, way in (((8, 4, 60), "pad"), ((8, 4, 520), "more do"), ((8, 4, 0), "reshape"))
    ),
    *(
        wrong("q", aligned(shape), f"shape (total_tokens, num_heads, head_dim) or ... {shape}")
        for shape in ((8, 64), (1, 1, 8, 4, 64))
    ),
    wrong("q", aligned((8, 4, 32)), "")._replace(message="k: needs the 32 columns of q, got shape"),
    wrong("q", aligned((8, 3, 64)), "a multiple of the 2 kv heads of k, got 3 heads in shape"),
    wrong("q", aligned((8, 0, 64)), "a multiple of the 2 kv heads of k, got 0 heads in shape"),
    wrong("q", aligned((2, 4, 4, 64)), "")._replace(
        message="qo_indptr: needs q of three axes, got q of 4 axes; leave it out"
    ),
    *(
        wrong(
            "k", aligned(shape), f"shape (num_pages, page_size, num_kv_heads, head_dim) ... {shape}"
        )
        for shape in ((6, 64), (6, 16, 2, 68), (6, 1, 16, 2, 64))
    ),
    *(
        wrong("v", aligned(shape), "the pages, tokens and heads of k, (6, 16, 2), got shape ... ;")
        for shape in ((5, 16, 2, 32), (6, 8, 2, 32), (6, 16, 1, 32), (16, 2, 32))
    ),
    Refusal(
        {"k": aligned((6, 0, 2, 64)), "v": aligned((6, 0, 2, 32))},
        ValueError,
        "k: needs at least one token a page and one kv head, got shape (6, 0, 2, 64); skip",
    ),
    Refusal(
        {"k": aligned((6, 16, 0, 64)), "v": aligned((6, 16, 0, 32))},
        ValueError,
        "k: needs at least one token a page and one kv head, got shape (6, 16, 0, 64); skip",
    ),
    Refusal(
        {"kv_layout": "HND"},
        ValueError,
        "q: needs a multiple of the 16 kv heads of k, got 4 heads ... (kv_layout)",
    ),
    wrong("kv_layout", "HDN", "'NHD' or 'HND', got 'HDN'; pass one of them"),
    wrong("block_table", None, "page numbers as block_table ... got neither; pass one form, which"),
    wrong("kv_indices", int32(0, 3, 4, 5), "")._replace(
        message="kv_indptr: needs kv_indices beside it ... got one of them; pass both"
    ),
    wrong("kv_indptr", int32(0, 1, 4), "kv_indices beside it ... got one of them; pass both"),
    Refusal(
        {"kv_indptr": int32(0, 1, 4), "kv_indices": int32(0, 3, 4, 5)},
        ValueError,
        "block_table: needs page numbers as block_table ... got block_table and kv_indices and",
    ),
    wrong_type("block_table", np.zeros((2, 3), int), "int32, got int64; convert"),
    wrong("block_table", int32(0, 1), "shape (batch, max_pages), got (2,)"),
    wrong("block_table", int32([0, 1, 2]), "shape (batch, max_pages) with batch 2, got (1, 3);"),
    wrong("block_table", keys_in_pages()["block_table"][::-1], "rows in the order of memory, got"),
    wrong("kv_lens", None, "")._replace(
        message="kv_lens: needed for keys in pages, got None; pass it, or k and v as rows"
    ),
    wrong_type("kv_lens", np.zeros(2, int), "int32, got int64; convert"),
    wrong("kv_lens", int32(5), "shape (batch,) with batch 2, got (1,)"),
    wrong("qo_indptr", None, "offsets of the requests for q of three axes, got None; pass"),
    wrong("qo_indptr", int32(), "shape (batch + 1,)"),
    wrong_type("sinks", numbers(4), "float32, got bfloat16; convert"),
    wrong("sinks", numbers(2, dtype=F32), "shape (num_heads,) with num_heads 4, got (2,); pass a"),
    *(
        wrong("softcap", value, f"a number from 0.001 to 1000000.0, got {value}; leave it out")
        for value in (0, 0.0, -1.0, 1e-4, 1e7, float("inf"), float("nan"))
    ),
    wrong_type("softcap", "30", "a Python or NumPy number, got str"),
    *(
        wrong("softmax_scale", value, f"a number from ... got {value}")
        for value in (float("nan"), float("inf"))
    ),
    wrong_type("softmax_scale", "1", "a Python or NumPy number, got str"),
    *(
        wrong("window", value, "a number from -1, got -2; pass -1 or None for no bound")
        for value in (-2, (-2, 0), [3, -2])
    ),
    *(
        wrong_type("window", value, f"an int, a pair (left, right) of ints, or None, got {kind}")
        for value, kind in ((8.0, "float 8"), ((8, 1.0), "float 1"), (True, "bool T"), ("8", "str"))
    ),
    *(
        wrong(
            "window", value, f"one number or a pair (left, right), got {len(value)} of them; pass"
        )
        for value in ((), (1,), (1, 2, 3))
    ),
    *badly_laid_out("q", aligned((8, 4, 64))),
    *badly_laid_out("k", aligned((6, 16, 2, 64))),
    *badly_laid_out("v", aligned((6, 16, 2, 32))),
]
ROWS = [
    wrong("kv_indptr", None, "")._replace(message="kv_indptr: needed for k and v without pages"),
    wrong("kv_indptr", int32(0, 5), "shape (batch + 1,) with batch 2, got (2,)"),
    wrong("kv_lens", int32(5), "shape (batch,) with batch 2, got (1,)"),
    *(
        Refusal(
            changes,
            ValueError,
            "k: rows without pages ... take kv_indptr alone and kv_layout 'NHD'",
        )
        for changes in (
            {"block_table": int32([0], [1])},
            {"kv_indices": int32(0, 1)},
            {"kv_layout": "HND"},
        )
    ),
    wrong("v", aligned((49, 2, 32)), "the pages, tokens and heads of k, (50, 2), got shape (49, 2"),
]
EQUAL = [
    wrong("qo_indptr", int32(0, 2, 4), "q of three axes, got q of 4 axes; leave it out"),
    wrong("kv_lens", int32(5, 9, 1), "shape (batch,) with batch 2, got (3,)"),
    wrong("block_table", int32([0, 1]), "shape (batch, max_pages) with batch 2, got (1, 2)"),
]
E4M3_PAGED = [
    wrong("k_scale", numbers(3, dtype=F32), "shape (1,), (2,), or (batch, 2) with batch 2, got"),
    wrong("v_scale", numbers(3, 2, dtype=F32), "shape (1,), ... with batch 2, got (3, 2); pass as"),
    Refusal(
        {"block_table": None, "kv_indptr": int32(0, 1, 4), "kv_indices": int32(0, 3, 4, 5)}
        | {"k_scale": numbers(2, 2, dtype=F32)},
        ValueError,
        "k_scale: needs shape (1,), (2,), or (batch, 2) with block_table or q of four axes, got",
    ),
    wrong_type("k_scale", numbers(1), "float32, got bfloat16; convert"),
    wrong("k_scale", 1e-40, "a number from 2 ** -126 to 2 ** 126, got 1e-40"),
    wrong("k", aligned((6, 16, 2, 72), E4M3), "shape ... with a multiple of 16 columns up to 256"),
    wrong_type("q", aligned((8, 4, 64), F32), "")._replace(message="k: needs float32, got float8"),
]
REFUSED = [
    pytest.param(make, refusal, id=f"{next(iter(refusal.changes))}-{refusal.message[:60]}")
    for make, refusals in (
        (paged, PAGED),
        (rows, ROWS),
        (equal, EQUAL),
        (paged_e4m3, E4M3_PAGED),
    )
    for refusal in refusals
]


@pytest.mark.parametrize(("make", "refusal"), REFUSED)
def test_refusals(make: Any, refusal: Refusal) -> None:
    with refused(refusal.error, refusal.message):
        cumla.attention(**make() | refusal.changes)


# --- what works -----------------------------------------------------------------------------------


def swapped(array: Any) -> Any:
    """Tokens and heads of pages the other way round, in memory of their own."""
    return np.ascontiguousarray(array.swapaxes(1, 2))


def same(arguments: Arguments, other: Arguments) -> None:
    """Two calls give the same results in the rows of requests."""
    bounds = arguments.get("qo_indptr", int32(0, len(arguments["q"])))
    some = slice(bounds[0], bounds[-1])
    for one, another in zip(cumla.attention(**arguments), cumla.attention(**other), strict=True):
        np.testing.assert_array_equal(one[some], another[some])


PAIR = np.moveaxis(numbers(6, 2, 16, 2, 64), 1, 0)


@pytest.mark.parametrize(
    ("arguments", "other"),
    [
        (paged(), keys_in_listed_pages()),
        (paged(), paged(kv_layout="HND", **{n: swapped(paged()[n]) for n in "kv"})),
        (paged(k=PAIR[0], v=PAIR[1]), paged(k=PAIR[0].copy(), v=PAIR[1].copy())),
        (paged(), paged(k=padded(paged()["k"], 8), v=frozen(paged()["v"]))),
        (paged(), paged(kv_lens=int32(5, 40, 7)[:2], softmax_scale=64**-0.5)),
        (paged(window=3), paged(window=(3, 9))),  # causal: right is 0
        (paged(window=-1), paged(window=[None, -1])),
        (paged(window=np.int64(3)), paged(window=(np.int32(3), None))),
        (paged(causal=False, window=(None, 0)), paged()),
        (paged(window=2**40), paged()),
        (paged(softcap=1e6), paged(softcap=np.float32(1e6))),
        (paged(sinks=np.full(4, -np.inf, F32)), paged(sinks=None)),
        (rows(), rows(kv_lens=int32(5, 40))),
        (equal(), equal(window=(8, 0), softcap=None)),
        (equal(q=aligned((2, 3, 4, 64))), equal(q=np.zeros((2, 3, 4, 64), BF16))),
    ],
)
def test_calls_that_say_the_same(arguments: Arguments, other: Arguments) -> None:
    same(arguments, other)


def test_values_are_those_of_the_definition() -> None:
    """Windows, caps and sinks of one query over three keys, by hand."""
    q = np.ones((1, 1, 8), F16)
    k = np.array([1, 2, 4], F16)[:, None, None] * np.ones((1, 1, 8), F16)
    v = np.array([8, 16, 32], F16)[:, None, None] * np.ones((1, 1, 8), F16)
    offsets = {"qo_indptr": int32(0, 1), "kv_indptr": int32(0, 3), "softmax_scale": 0.125}
    scores = np.array([1.0, 2.0, 4.0])
    for options, seen, extra in (
        ({}, scores, []),
        ({"window": 1}, np.array([-np.inf, 2.0, 4.0]), []),
        ({"window": 0}, np.array([-np.inf, -np.inf, 4.0]), []),
        ({"softcap": 3.0}, 3 * np.tanh(scores / 3), []),
        ({"sinks": np.array([3.0], F32)}, scores, [3.0]),
    ):
        out, lse = cumla.attention(q, k, v, **offsets, **options)
        total = np.exp([*seen, *extra]).sum()
        assert lse == pytest.approx(np.log(total), rel=1e-6)
        assert out[0, 0] == pytest.approx(np.exp(seen) @ [8, 16, 32] / total, rel=1e-3)


def test_queries_that_see_nothing() -> None:
    """out is 0, and lse -inf or the sink."""
    call = paged(kv_lens=int32(1, 0), sinks=None)
    out, lse = cumla.attention(**call)
    assert np.isneginf(lse[1:3]).all()  # three queries, one key
    assert np.isneginf(lse[4:6]).all()
    assert not out[4:6].astype(F32).any()
    sinks = np.arange(4, dtype=F32)
    out, lse = cumla.attention(**call | {"sinks": sinks})
    assert (lse[4:6] == sinks).all()
    assert not out[4:6].astype(F32).any()


@pytest.mark.parametrize("length", [0, 5])
def test_the_highest_sinks(length: int) -> None:
    """They take all of the weight, an infinite one too, and the lowest ones none."""
    sinks = np.array([np.inf, 3e38, -3e38, 1e30], F32)
    lengths = int32(length, length)
    out, lse = (x[1:6] for x in cumla.attention(**paged(kv_lens=lengths, sinks=sinks)))
    plain, plain_lse = (x[1:6] for x in cumla.attention(**paged(kv_lens=lengths, sinks=None)))
    for head in (0, 1, 3):
        assert (lse[:, head] == sinks[head]).all()
        assert not out[:, head].astype(F32).any()
    assert (lse[:, 2] == np.maximum(plain_lse[:, 2], sinks[2])).all()
    assert (out[:, 2] == plain[:, 2]).all()


@pytest.mark.parametrize("causal", [True, False])
def test_no_keys_at_all(causal: bool) -> None:
    call = rows(k=numbers(0, 2, 64), v=numbers(0, 2, 32), kv_indptr=int32(0, 0, 0), causal=causal)
    out, lse = cumla.attention(**call)
    assert np.isneginf(lse[1:6]).all()
    assert not out[1:6].astype(F32).any()


# --- kernels --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "tiles"),
    [
        ((8, 8), "64_64"),
        ((64, 64), "64_64"),
        ((72, 64), "128_128"),
        ((64, 128), "128_128"),
        ((192, 128), "192_128"),
        ((192, 136), "256_256"),
        ((256, 8), "256_256"),
        ((264, 256), "512_512"),
        ((8, 512), "512_512"),
    ],
    ids=str,
)
@pytest.mark.parametrize("page_size", [1, 12, 16, 64, 128, 0])
def test_kernels(
    columns: tuple[int, int],
    tiles: str,
    page_size: int,
    cupy: FakeCuPy,
    bindings: FakeBindings,
) -> None:
    """The narrowest that holds both widths; rows are copied one by one where boxes do not fit."""
    axes = (page_size, 2) if page_size else (2,)
    given: Arguments = {"q": aligned((10, 4, columns[0]), F16), "qo_indptr": int32(0, 10)}
    given |= {n: aligned((7, *axes, c), F16) for n, c in zip("kv", columns, strict=True)}
    if page_size:
        given |= {"kv_lens": int32(5), "block_table": int32([0, 1, 2, 3, 4])}
    else:
        given |= {"kv_indptr": int32(0, 5)}
    cumla.attention(**{name: cupy.like(array) for name, array in given.items()})
    suffix = "_rows" if page_size % 8 else ""
    assert bindings.entries == ["mla_attention_schedule", f"attention_float16_{tiles}{suffix}"]


# --- the check mode -------------------------------------------------------------------------------


@pytest.fixture
def checking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")


@pytest.mark.usefixtures("checking")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lens": int32(5, 49)}, "kv_lens[1]: needs a length from 0 to 48, what the request's"),
        ({"kv_lens": int32(-1, 40)}, "kv_lens[0]: needs a length from 0 to 48, what the request's"),
        ({"block_table": int32([6, 1, 2], [3, 4, 5])}, "block_table[0, 0]: needs a page number"),
        ({"block_table": int32([0, 1, 2], [3, 4, -1])}, "block_table[1, 2]: needs a page number"),
        ({"qo_indptr": int32(1, 4, 9)}, "qo_indptr[2]: needs a number from qo_indptr[1] = 4 to"),
        ({"qo_indptr": int32(1, 4, 3)}, "qo_indptr[2]: needs a number from qo_indptr[1] = 4 to"),
        ({"qo_indptr": int32(-1, 4, 6)}, "qo_indptr[0]: needs a number from 0 to"),
    ],
)
def test_check_mode(changes: Arguments, message: str) -> None:
    with refused(ValueError, message):
        cumla.attention(**paged(**changes))


@pytest.mark.usefixtures("checking")
def test_check_mode_looks_at_factors() -> None:
    with refused(ValueError, "v_scale[1]: needs a number from 2 ** -126 to 2 ** 126, got -1.0"):
        cumla.attention(**paged_e4m3(v_scale=np.array([1, -1], F32)))


@pytest.mark.usefixtures("checking")
def test_check_mode_finds_nothing_in_what_is_not_used() -> None:
    cumla.attention(**paged(block_table=int32([0, -1, 99], [3, 4, 5])))
    cumla.attention(**keys_in_listed_pages() | {"kv_indices": int32(0, 3, 4, 5, 99)})


# --- plans ----------------------------------------------------------------------------------------

PLANNED = PLANS["AttentionPlan"]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"head_dim": 60}, ValueError, "head_dim: needs a multiple of 8 up to 512, got 60; pad"),
        ({"head_dim_v": 520}, ValueError, "head_dim_v: needs a multiple of 8 up to 512, got 520"),
        ({"num_kv_heads": 3}, ValueError, "num_heads: needs a multiple of num_kv_heads 3, got 4"),
        ({"dtype": "float64"}, ValueError, "dtype: needs bfloat16 or float16 or float32, got 'fl"),
        ({"cache_dtype": "float16"}, TypeError, "cache_dtype: needs bfloat16, or float8_e"),
        (
            {"dtype": "float32", "cache_dtype": "float8_e4m3fn"},
            TypeError,
            "cache_dtype: needs float32, or float8_e4m3fn beside 16-bit queries, got",
        ),
        (
            {"cache_dtype": "float8_e4m3fn", "head_dim": 72},
            ValueError,
            "head_dim: needs a multiple of 16 up to 256, got 72; pad with",
        ),
        (
            {"cache_dtype": "float8_e4m3fn", "head_dim": 512},
            ValueError,
            "head_dim: needs a multiple of 16 up to 256, got 512; keep caches in 16",
        ),
        ({"batch_invariant": True}, ValueError, "max_kv_len: needs the length of the longest req"),
        ({"max_kv_len": 5}, ValueError, "max_kv_len: needs batch_invariant=True, got 5 for a plan"),
        ({"q_len": 3}, ValueError, "total_tokens: needs batch * q_len = 6, got 8; pass"),
        ({"window": (1, 2, 3)}, ValueError, "window: needs one number or a pair (left, right)"),
        ({"window": -2}, ValueError, "window: needs a number from -1, got -2"),
    ],
)
def test_numbers_of_a_plan(changes: Arguments, error: type[Exception], message: str) -> None:
    with refused(error, message):
        cumla.AttentionPlan(**PLANNED.numbers | changes, like=np.zeros(1))


@pytest.mark.parametrize("window", [None, 3, (3, 1), (-1, 2)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_a_plan_has_the_window(causal: bool, window: Any) -> None:
    """And its runs have the sinks, the cap and the scale."""
    arguments = keys_in_pages()
    options: Arguments = {"softcap": 2.0, "softmax_scale": 0.3}
    plan = PLANNED.ready(arguments, causal=causal, window=window)
    got = plan.run(**PLANNED.inputs(arguments), **options)
    expected = cumla.attention(**arguments, **options, causal=causal, window=window)
    for one, other in zip(got, expected, strict=True):
        assert one[1:6].tobytes() == other[1:6].tobytes()


def test_a_plan_of_another_shape_names_what_differs() -> None:
    plan, given = PLANNED.ready(paged()), PLANNED.inputs(paged())
    with refused(ValueError, "plan: made for num_heads 4, got num_heads 2; make a plan for this"):
        plan.run(**given | {"q": given["q"][:, :2], "sinks": None})
    fewer, more = given["q"][:6], np.concatenate([given["q"]] * 2)
    with refused(
        ValueError,
        "plan: made for total_tokens 8, got total_tokens 6; pad q with rows to total_tokens, or m",
    ):
        plan.run(**given | {"q": fewer})
    with refused(ValueError, "plan: made for total_tokens 8, got total_tokens 16; make a plan"):
        plan.run(**given | {"q": more})
    with refused(
        ValueError, "plan: made for q_len 0, got q_len 1; make a plan for this shape (q_l"
    ):
        plan.run(**given | {"q": given["q"][:, None]})


def test_a_plan_for_hnd() -> None:
    arguments = keys_in_pages()
    turned = arguments | {name: swapped(arguments[name]) for name in "kv"}
    plan = PLANNED.ready(turned, kv_layout="HND")
    assert plan.key == PLANNED.make(arguments).key
    got = plan.run(**PLANNED.inputs(turned), kv_layout="HND")
    for one, other in zip(got, cumla.attention(**arguments), strict=True):
        assert one[1:6].tobytes() == other[1:6].tobytes()


def test_a_plan_tells_hnd_from_its_numbers() -> None:
    q, k = np.zeros((1, 1, 8, 64), np.float16), np.zeros((3, 4, 2, 64), np.float16)
    plan = cumla.AttentionPlan(
        1, 1, 8, 64, num_kv_heads=4, page_size=2, q_len=1, dtype="float16", like=q
    )
    plan.update(np.ones(1, np.int32))
    table = np.zeros((1, 1), np.int32)
    message = (
        "plan: made for num_kv_heads 4, page_size 2, got num_kv_heads 2, page_size 4; pass kv_"
    )
    with refused(ValueError, message):
        plan.run(q, k, k, block_table=table)
    plan.run(q, k, k, block_table=table, kv_layout="HND")


@pytest.mark.parametrize("scale", [2.0, (1,), (2,), (2, 2)], ids=str)
def test_a_plan_for_e4m3(scale: Any) -> None:
    """Its runs have the factors, as numbers or arrays."""
    arguments = paged_e4m3()
    factors = scale if isinstance(scale, float) else numbers(*scale, dtype=F32)
    options = {"k_scale": factors, "v_scale": factors}
    plan = PLANNED.ready(arguments)
    assert plan.key.cache_dtype == "float8_e4m3fn"
    made = cumla.AttentionPlan(**PLANNED.numbers, cache_dtype="float8_e4m3fn", like=arguments["q"])
    assert made.key == plan.key
    got = plan.run(**PLANNED.inputs(arguments), **options)
    expected = cumla.attention(**arguments, **options)
    plain = cumla.attention(**arguments)
    assert got[0][1:6].tobytes() == expected[0][1:6].tobytes() != plain[0][1:6].tobytes()
    with refused(ValueError, "plan: made for cache_dtype float8_e4m3fn, got cache_dtype "):
        plan.run(**PLANNED.inputs(paged()))


def test_bits_of_e4m3_as_uint8() -> None:
    arguments = paged_e4m3()
    as_bits = arguments | {name: arguments[name].view(np.uint8) for name in "kv"}
    for one, other in zip(cumla.attention(**as_bits), cumla.attention(**arguments), strict=True):
        assert one[1:6].tobytes() == other[1:6].tobytes()


def test_messages_of_a_plan_name_what_it_takes() -> None:
    equal_plan = cumla.AttentionPlan(2, 4, 4, 64, q_len=2, like=np.zeros(1))
    with refused(ValueError, "plan: never updated; call plan.update(kv_lens) before the first run"):
        equal_plan.run(**PLANS["AttentionPlan"].inputs(keys_in_pages()))
    with refused(ValueError, "qo_indptr: needs a plan without q_len, got one for 2 query tokens"):
        equal_plan.update(int32(3, 4), qo_indptr=int32(0, 2, 4))
    with refused(ValueError, "kv_lens: needed for a plan for pages, to tell the keys of each"):
        equal_plan.update()
    of_rows = cumla.AttentionPlan(2, 4, 4, 64, page_size=0, like=np.zeros(1))
    with refused(ValueError, "plan: never updated; call plan.update(kv_indptr=..., qo_indptr=..."):
        of_rows.run(**PLANS["AttentionPlan"].inputs(keys_in_pages()))
    with refused(ValueError, "kv_indptr: needed for a plan for rows without pages, to tell those"):
        of_rows.update(qo_indptr=int32(0, 2, 4))
    with refused(ValueError, "qo_indptr: needed for a plan without q_len, to tell the queries of"):
        of_rows.update(kv_indptr=int32(0, 2, 4))


def test_a_table_after_an_update_for_a_list() -> None:
    arguments = keys_in_pages()
    plan = PLANNED.ready(arguments)
    inputs = PLANNED.inputs(arguments)
    pages = {"block_table": None, "kv_indices": int32(0, 3, 4, 5)}
    with refused(ValueError, "kv_indices: needs a plan that was updated with kv_indptr, got one"):
        plan.run(**inputs | pages)
    plan.update(**PLANNED.lengths(arguments), kv_indptr=int32(0, 1, 4))
    plan.run(**inputs | pages)
    with refused(ValueError, "block_table: needs a plan that was updated without kv_indptr, got"):
        plan.run(**inputs)


@pytest.mark.parametrize("columns", [(40, 8), (96, 96), (80, 136), (264, 80)], ids=str)
def test_a_buffer_has_room_for_the_columns_of_the_kernel(columns: tuple[int, int]) -> None:
    """Widths that one kernel serves need the same buffer."""
    wide = next(tile for tile in (64, 128, 256, 512) if tile >= max(columns))
    narrow, whole = (
        cumla.AttentionPlan.workspace_bytes(1, 4, 4, d, head_dim_v=d_v, sm_count=132)
        for d, d_v in (columns, (wide, wide))
    )
    assert narrow == whole
