# SPDX-License-Identifier: Apache-2.0
"""`cumla.mqa_logits`, `cumla.paged_mqa_logits` and its plan on the CPU, what they refuse, and what
they launch. What holds for every operation is in tests/core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from tests.calls import (
    BF16,
    E4M3,
    PLANS,
    Arguments,
    Refusal,
    aligned,
    broadcast,
    every_other,
    frozen,
    int32,
    padded,
    pages,
    prefill,
    refused,
    shifted,
    spread,
    wrong,
    wrong_type,
)
from tests.fake_cuda import FakeBindings, FakeCuPy

F32, U8 = np.float32, np.uint8
PLAN = PLANS["PagedMQALogitsPlan"]
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    prefill: cumla.mqa_logits,
    pages: cumla.paged_mqa_logits,
}
SHAPES = {prefill: (5, 20), pages: (6, 50)}
either = pytest.mark.parametrize("make", FUNCTIONS)


def i32(*shape: int) -> Any:
    return np.zeros(shape, np.int32)


def pair(keys: Any = None, scales: Any = None) -> tuple[Any, Any]:
    """Keys and scales of a cache as arrays of their own."""
    return (
        aligned((6, 16, 32), E4M3) if keys is None else keys,
        aligned((6, 16), F32) if scales is None else scales,
    )


def kv(keys: Any = None, scales: Any = None) -> tuple[Any, Any]:
    k, scale = prefill()["kv"]
    return (k if keys is None else keys, scale if scales is None else scales)


# --- what is refused ------------------------------------------------------------------------------

NEEDED = "float8_e4m3fn, or uint8 with its bits, got"


def of_both(make: Callable[[], Arguments]) -> list[Refusal]:
    """List what either function refuses."""
    arguments = make()
    q, weights = arguments["q"], arguments["weights"]
    rows, columns = SHAPES[make]
    out = np.zeros((rows, columns), F32)
    return [
        *(
            wrong_type("q", np.zeros(q.shape, dtype), f"{NEEDED} {dtype}; quantise it")
            for dtype in ("int8", "float16", "float8_e5m2", "float8_e4m3fnuz")
        ),
        wrong("q", every_other(q), "a contiguous last axis, got a stride of 2 bytes"),
        wrong("q", padded(q, 1), "strides that are multiples of 16 bytes ... ; pad"),
        wrong("q", shifted(q, 8), "an address that is a multiple of 16 bytes ... ; copy"),
        wrong("q", np.zeros((*q.shape[:-2], 12, 32), E4M3), "8, 16, 32 or 64 heads, got 12; pad"),
        wrong("q", np.zeros((*q.shape[:-1], 48), E4M3), "a head_dim of 32, 64 or 128, got 48; pad"),
        *(
            wrong_type("weights", weights.astype(dtype), f"float32, got {dtype}; convert it first")
            for dtype in ("float16", "float64", "bfloat16", ">f4")
        ),
        wrong("weights", weights[:, :7], "shape ( ... got ("),
        wrong(
            "weights", shifted(weights, 2), "an address and strides that are multiples of 4 byte"
        ),
        *(
            wrong_type("logits_dtype", dtype, f"float32 or bfloat16, got {got}; convert the result")
            for dtype, got in (
                ("float16", "float16"),
                (np.float64, "float64"),
                ("no", "no"),
                (7, 7),
            )
        ),
        *(
            wrong_type("logits_dtype", value, f"float32 or bfloat16, got {kind}; pass its name")
            for value, kind in (([1], "list"), ({}, "dict"), (([1],), "tuple"))
        ),
        Refusal(
            {"out": out.astype(BF16), "logits_dtype": "float32"},
            TypeError,
            "out: needs float32, got bfloat16; allocate it so",
        ),
        wrong_type("out", np.zeros((rows, columns)), "float32 or bfloat16, got float64; allocate"),
        wrong("out", np.zeros((rows, columns + 1), F32), f"shape ({rows}, {columns}), got"),
        wrong("out", every_other(out), "contiguous rows, got a stride of 8 bytes"),
        wrong("out", shifted(out, 2), "an address and strides that are multiples of 4 bytes"),
        wrong("out", broadcast(out), "memory of its own for each element ... ; copy it"),
        wrong("out", frozen(out), "an array that can be written to"),
    ]


PREFILL = [
    wrong("q", np.zeros((5, 256), E4M3), "axes (seq_len, num_heads, head_dim), got shape (5, 256)"),
    wrong_type("kv[0]", kv(np.zeros((20, 32), np.int8)), f"{NEEDED} int8; quantise"),
    wrong("kv[0]", kv(np.zeros((20, 64), E4M3)), "q's head_dim 32 ... shape (20, 64)"),
    Refusal(
        {"kv": (np.zeros((0, 32), E4M3), np.zeros(0, F32)), "max_kv_len": 4},
        ValueError,
        "kv[0]: needs at least one token, got shape (0, 32); skip the call",
    ),
    wrong(
        "kv[0]",
        kv(np.broadcast_to(np.zeros(32, E4M3), (2**31, 32)), np.broadcast_to(F32(1), 2**31)),
        "at most 2147483647 keys, got 2147483648; score them in parts",
    ),
    wrong("kv[0]", kv(np.zeros((20, 1, 32), E4M3)), "axes (seq_len_kv, head_dim), got"),
    wrong("kv[0]", kv(np.zeros((20, 33), E4M3)[:, :32]), "strides ... got 33"),
    wrong("kv[0]", kv(np.zeros((20, 64), E4M3)[:, ::2]), "a contiguous last axis"),
    wrong("kv[1]", kv(None, np.zeros(19, F32)), "shape (seq_len_kv,) ... 20, got (19,)"),
    wrong("kv[1]", kv(None, shifted(np.zeros(20, F32), 2)), "an address and strides"),
    wrong_type("kv[1]", kv(None, np.zeros(20)), "float32, got float64; convert"),
    *(
        wrong_type("kv", value, f"a pair of arrays ... {kind}; pass (k, scale)")
        for value, kind in ((None, "NoneType"), (np.zeros(2), "ndarray"), ("kv", "str"))
    ),
    *(wrong("kv", [np.zeros(2)] * n, f"a pair of arrays ... got {n}; pass") for n in (0, 1, 3)),
    *(
        refusal
        for name in ("ks", "ke")
        for refusal in (
            *(
                wrong_type(name, np.zeros(5, dtype), f"int32, got {dtype}; convert it first")
                for dtype in ("int64", "uint32", "float32")
            ),
            wrong(name, i32(4), "shape (seq_len,) with seq_len 5, got (4,)"),
            wrong(name, i32(5, 1), "shape (seq_len,) with seq_len 5, got (5, 1)"),
            wrong(name, shifted(i32(5), 2), "an address and strides that are multiples of 4 bytes"),
        )
    ),
    *(
        wrong("max_kv_len", value, f"a number from 1, got {value}; leave it out for all columns")
        for value in (0, -1)
    ),
]
ALL_PAGES = "shape (num_pages, page_size, 36), or (num_pages, page_size, 1, 36), for the 32 values"
PAGED = [
    wrong("q", np.zeros((6, 8, 32), E4M3), "axes (batch, q_len, num_heads, head_dim), got shape"),
    wrong("q", np.zeros((2, 9, 8, 32), E4M3), "at most 8 queries of a request, got q_len 9; pass"),
    wrong(
        "weights", np.zeros((2, 8), F32), "shape (batch * q_len, num_heads) ... 6 ... got (2, 8)"
    ),
    *(
        wrong_type("kv_cache", aligned((6, 16, 36), dtype), f"uint8, got {dtype}; view its bytes")
        for dtype in ("int8", "float8_e4m3fn")
    ),
    *(
        wrong("kv_cache", aligned(shape, U8), f"{ALL_PAGES} ... got {shape}; allocate it so")
        for shape in ((6, 16, 40), (6, 16, 2, 36), (6, 576))
    ),
    wrong("kv_cache", aligned((6, 48, 36), U8), "a page size of 16, 32, 64 or 128 tokens, got 48"),
    wrong("kv_cache", aligned((0, 16, 36), U8), "at least one page, got shape (0, 16, 36); skip"),
    wrong("kv_cache", aligned((6, 16, 48), U8)[..., :36], "pages whose bytes are contiguous"),
    wrong("kv_cache", spread((6, 16, 36), U8, (584, 36, 1)), "strides ... 16 bytes ... got 584"),
    wrong_type("kv_cache[0]", pair(np.zeros((6, 16, 32), np.int8)), f"{NEEDED} int8; quantise"),
    wrong(
        "kv_cache[0]", pair(aligned((6, 16, 64), E4M3)), "shape ... for the 32 values of a token"
    ),
    wrong("kv_cache[0]", pair(aligned((6, 8, 32), E4M3)), "a page size of ... tokens, got 8"),
    wrong(
        "kv_cache[0]", pair(aligned((6, 16, 48), E4M3)[..., :32]), "pages whose keys are contigu"
    ),
    wrong("kv_cache[0]", pair(spread((6, 16, 32), E4M3, (520, 32, 1))), "strides ... got 520"),
    wrong_type("kv_cache[1]", pair(None, np.zeros((6, 16))), "float32, got float64; convert it"),
    wrong("kv_cache[1]", pair(None, np.zeros((6, 64), F32)), "shape ... = (6, 16), got (6, 64)"),
    wrong("kv_cache[1]", pair(None, np.zeros((6, 17), F32)[:, :16]), "strides ... got 68"),
    *(
        wrong("kv_cache", [np.zeros(2)] * n, f"a pair of arrays ... got {n}; pass")
        for n in (0, 1, 3)
    ),
    *(
        wrong_type(name, np.zeros(shape, dtype), f"int32, got {dtype}; convert it first")
        for dtype in ("int64", "uint32", "float32")
        for name, shape in (("kv_lens", (2,)), ("kv_lens", (2, 3)), ("block_table", (2, 3)))
    ),
    *(
        wrong("kv_lens", i32(*shape), f"shape (batch ... got {shape}; give each")
        for shape in ((2, 2), (6,), (2, 3, 1))
    ),
    wrong("block_table", i32(3, 3), "shape (batch, max_pages) with batch 2, got (3, 3)"),
    wrong("block_table", i32(2, 0), "at least one column, got shape (2, 0); skip the call"),
    wrong("max_kv_len", 0, "a number from 1, got 0; there is nothing to write"),
    wrong("max_kv_len", -1, "a number from 1, got -1; there is nothing to write"),
    wrong_type("max_kv_len", None, "an int, got NoneType"),
]
WIDTHS = [
    wrong_type("max_kv_len", 2.0, "an int, got float 2.0; convert it"),
    wrong_type("max_kv_len", True, "an int, got bool True; convert it"),
    wrong_type("max_kv_len", False, "an int, got bool False; convert it"),
]
REFUSED = [
    pytest.param(make, refusal, id=f"{FUNCTIONS[make].__name__}-{refusal.message[:50]}")
    for make, refusals in ((prefill, PREFILL), (pages, PAGED))
    for refusal in of_both(make) + refusals + WIDTHS
]


@pytest.mark.parametrize(("make", "refusal"), REFUSED)
def test_refusals(make: Any, refusal: Refusal) -> None:
    """By the function; and by the update or the run of a plan."""
    arguments = make() | refusal.changes
    with refused(refusal.error, refusal.message):
        FUNCTIONS[make](**arguments)
    if make is pages:
        plan = PLAN.ready(pages())
        if "kv_lens" not in refusal.changes:
            with refused(refusal.error, refusal.message):
                plan.run(**PLAN.inputs(arguments))
        elif arguments["kv_lens"].ndim != 2 or arguments["kv_lens"].dtype != np.int32:
            with refused(refusal.error, refusal.message):
                plan.update(arguments["kv_lens"])


# --- results --------------------------------------------------------------------------------------


@either
def test_dtypes_of_the_logits(make: Any) -> None:
    """As asked for, in the words of any framework; as `out` has it; else float32."""
    torch, jnp = pytest.importorskip("torch"), pytest.importorskip("jax").numpy
    function = FUNCTIONS[make]
    assert function(**make()).dtype == F32
    for dtype in ("bfloat16", BF16, ml_dtypes.bfloat16, torch.bfloat16, jnp.bfloat16):
        assert function(**make(), logits_dtype=dtype).dtype == BF16
    assert function(**make(), logits_dtype=torch.float32).dtype == F32
    with refused(TypeError, "logits_dtype: needs float32 or bfloat16, got torch.float16"):
        function(**make(), logits_dtype=torch.float16)
    out = np.zeros(SHAPES[make], BF16)
    assert function(**make(), out=out) is out
    wanted = function(**make()).astype(BF16)
    np.testing.assert_array_equal(out, wanted)


@either
def test_rows_of_out_lie_anywhere(make: Any) -> None:
    rows, columns = SHAPES[make]
    odd = np.zeros((rows, columns + 3), F32)[:, 1 : columns + 1]
    np.testing.assert_array_equal(FUNCTIONS[make](**make(), out=odd), FUNCTIONS[make](**make()))
    untouched = np.full((rows, columns), 7, F32)
    FUNCTIONS[make](**make(), out=untouched, clean=False)
    hidden = np.isneginf(FUNCTIONS[make](**make()))
    assert hidden.any() and not hidden.all()
    assert (untouched[hidden] == 7).all()


def test_layouts_that_are_fine() -> None:
    """Padded rows, every second bound, uint8 for e4m3, a list for a pair, a table in a wider one,
    pages that lie apart: the results are the same."""
    given = prefill()
    wanted = cumla.mqa_logits(**given)
    keys, scale = given["kv"]
    for changes in (
        {"q": padded(given["q"], 16).view(U8), "kv": [padded(keys, 32), scale]},
        {"weights": np.asfortranarray(given["weights"]), "ks": np.repeat(given["ks"], 2)[::2]},
        {"kv": (keys.view(U8), np.repeat(scale, 3)[1::3])},
    ):
        np.testing.assert_array_equal(cumla.mqa_logits(**given | changes), wanted)
    steps = pages()
    wanted = cumla.paged_mqa_logits(**steps)
    assert wanted.shape == (6, 50)
    table = np.full((2, 9), -1, np.int32)
    table[:, :3] = steps["block_table"]
    apart = spread((6, 16, 36), U8, (16 * 36 + 16, 36, 1))
    apart[...] = steps["kv_cache"][:, :, 0]
    memory = steps["kv_cache"].reshape(6, -1)
    keys = aligned((6, 16, 32), U8)
    keys[...] = memory[:, :512].reshape(6, 16, 32)
    scale = aligned((6, 16), F32)
    scale[...] = memory[:, 512:].copy().view(F32)
    for changes in (
        {"block_table": table[:, :3]},
        {"kv_cache": apart},
        {"kv_cache": (keys.view(E4M3), scale)},
        {"kv_cache": [keys[:, :, None], scale]},
    ):
        np.testing.assert_array_equal(cumla.paged_mqa_logits(**steps | changes), wanted)


def test_widths_of_numpy() -> None:
    given = prefill()
    whole = cumla.mqa_logits(**given)
    width = np.int64(7)
    some = cumla.mqa_logits(**given, max_kv_len=width)
    assert some.shape == (5, 7)
    np.testing.assert_array_equal(some[1], whole[1, 1:8])  # compressed: from ks[1] on
    assert cumla.paged_mqa_logits(**pages() | {"max_kv_len": width}).shape == (6, 7)


# --- plans ----------------------------------------------------------------------------------------


def test_a_plan_for_the_length_of_each_query() -> None:
    lengths = int32([1, 5, 9], [0, 48, 3])
    given = pages() | {"kv_lens": lengths}
    wanted = cumla.paged_mqa_logits(**given)
    plan = PLAN.ready(given)
    assert plan.key.per_row_lens
    like = given["q"]
    assert PLAN.kind(**PLAN.numbers, kv_lens_shape=(2, 3), like=like).key == plan.key
    for shape in ((3,), [2, 2], 2):
        with refused(ValueError, "kv_lens_shape: needs (2,), or (2, 3) with a length of each qu"):
            PLAN.kind(**PLAN.numbers, kv_lens_shape=shape, like=like)
    np.testing.assert_array_equal(plan.run(**PLAN.inputs(given)), wanted)
    with refused(TypeError, "kv_lens: needs int32, got int64"):
        plan.update(lengths.astype(np.int64))
    for shape in ((2,), (2, 2), (3, 3)):
        message = f"kv_lens: needs shape (batch, q_len) ... got {shape}; give each query its len"
        with refused(ValueError, message):
            plan.update(i32(*shape))
    with refused(ValueError, "kv_lens: needs shape (batch,) with batch 2, got (2, 3); give each"):
        PLAN.ready(pages()).update(i32(2, 3))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_heads", 24, "8, 16, 32 or 64 heads, got 24; pad"),
        ("head_dim", 256, "a head_dim of 32, 64 or 128, got 256"),
        ("q_len", 9, "at most 8 queries of a request, got q_len 9"),
        ("page_size", 1, "a page size of 16, 32, 64 or 128 tokens, got 1"),
    ],
)
def test_plans_that_are_refused(name: str, value: int, message: str) -> None:
    for make in (
        lambda **numbers: cumla.PagedMQALogitsPlan(**numbers, like=np.zeros(1)),
        lambda **numbers: cumla.PagedMQALogitsPlan.workspace_bytes(**numbers, sm_count=132),
    ):
        with refused(ValueError, f"{name}: needs {message}"):
            make(**PLAN.numbers | {name: value})


# --- what is launched -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "head_dim", "q_len"), [(8, 32, 1), (16, 64, 2), (64, 128, 1), (64, 128, 4)]
)
def test_the_shape_chooses_the_kernels(
    heads: int, head_dim: int, q_len: int, cupy: FakeCuPy, bindings: FakeBindings
) -> None:
    """Of one shape the call and the plan have the same."""
    steps = pages() | {
        "q": aligned((2, q_len, heads, head_dim), E4M3),
        "weights": aligned((2 * q_len, heads), F32),
        "kv_cache": aligned((6, 16, 1, head_dim + 4), U8),
    }
    given = {name: cupy.like(value) for name, value in steps.items()}
    cumla.paged_mqa_logits(**given)
    schedule, logits = bindings.entries
    assert schedule == "paged_mqa_schedule_256"
    assert f"_d{head_dim}_" in logits
    PLAN.ready(given).run(**PLAN.inputs(given))
    assert bindings.entries == [schedule, logits]


def test_options_have_launches_of_their_own(cupy: FakeCuPy, bindings: FakeBindings) -> None:
    given = {name: cupy.like(value) for name, value in prefill().items()}
    outs = [cupy.ndarray((5, 20), dtype) for dtype in (F32, BF16)]
    options: list[dict[str, Any]] = [{"out": o, "clean": on} for o in outs for on in (True, False)]
    options += [{"out": cupy.ndarray((5, 7), F32), "max_kv_len": 7}]
    for _ in range(3):
        bindings.launched.clear()
        for some in options:
            assert cumla.mqa_logits(**given, **some) is some["out"]
        parameters = [launch.parameters for launch in bindings.launched]
        assert len(set(parameters)) == len(options)
    with refused(TypeError, "out: needs bfloat16, got float32"):
        cumla.mqa_logits(**given, out=outs[0], logits_dtype="bfloat16")
    with refused(ValueError, "out: needs shape (5, 4), got (5, 20)"):
        cumla.mqa_logits(**given, out=outs[0], max_kv_len=4)


# --- check mode -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (
            prefill,
            {"ks": int32(0, 1, -1, 3, 20)},
            "ks[2]: needs a number from 0 to seq_len",
        ),
        (
            prefill,
            {"ke": int32(0, 1, 2, 3, 21)},
            "ke[4]: needs a number ... got 21; the",
        ),
        (
            pages,
            {"kv_lens": int32([3, 3, 3], [0, 49, 1])},
            "kv_lens[1, 1]: needs a length from 0 to max_pages * page_size = 48, got 49; the k",
        ),
        (pages, {"kv_lens": int32(-1, 3)}, "kv_lens[0]: needs a length from 0 ... got -1"),
        (
            pages,
            {"max_kv_len": 39},
            "kv_lens[1]: needs a length up to max_kv_len = 39, got 40; the logits after it would",
        ),
        (
            pages,
            {"block_table": int32([0, -1, -1], [3, 4, 6])},
            "block_table[1, 2]: needs a page number from 0 to 5, got 6; the kernels would take",
        ),
        (pages, {"block_table": int32([0, -1, 99], [3, 4, 5])}, None),  # not used by 5 tokens
    ],
)
def test_check_mode(
    make: Any, changes: dict[str, Any], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    arguments = make() | changes
    calls = [lambda: FUNCTIONS[make](**arguments)]
    if make is pages:
        calls.append(lambda: PLAN.ready(arguments).run(**PLAN.inputs(arguments)))
    for call in calls:
        if message is None:
            call()
        else:
            with refused(ValueError, message):
                call()


@pytest.mark.parametrize("lead", [(0,), (0, 3)])
def test_check_mode_of_no_requests(lead: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    none = {name: pages()[name][:0] for name in ("q", "weights", "block_table")}
    given = pages() | none | {"kv_lens": np.zeros(lead, np.int32)}
    assert cumla.paged_mqa_logits(**given).shape[0] == 0
