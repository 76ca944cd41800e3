# SPDX-License-Identifier: Apache-2.0
"""`cumla.mla_attention` and its plan on the CPU, what they refuse, and which kernels they launch.
What holds for every operation is in tests/core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cumla
from tests.calls import (
    BF16,
    PLANS,
    Arguments,
    Refusal,
    all_of,
    attention,
    badly_laid_out,
    every_other,
    int32,
    listed,
    refused,
    shifted,
    wrong,
    wrong_type,
)
from tests.fake_cuda import FakeBindings, FakeCuPy

Q, CACHE, OUT = (8, 16, 576), (6, 64, 1, 576), (8, 16, 512)
TABLE, LIST = PLANS["MLAAttentionPlan"], PLANS["MLAAttentionPlan of a list"]
TWO_FORMS = pytest.mark.parametrize(("make", "planned"), [(attention, TABLE), (listed, LIST)])


def split(array: Any) -> tuple[Any, Any]:
    return array[..., :512], array[..., 512:]


def zeros(*shape: int, dtype: Any = BF16) -> Any:
    return np.zeros(shape, dtype)


def i32(*shape: int) -> Any:
    return np.zeros(shape, np.int32)


def assert_same(got: Any, want: Any) -> None:
    """Rows of no request may hold anything."""
    np.testing.assert_array_equal(got.out[1:6], want.out[1:6])
    np.testing.assert_array_equal(got.lse[1:6], want.lse[1:6])


def ready(planned: Any, arguments: Arguments, **options: Any) -> Any:
    return planned.ready({n: v for n, v in arguments.items() if v is not None}, **options)


# --- an axis of requests --------------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("form", [lambda q: q, split], ids=["one", "pair"])
def test_queries_with_an_axis_of_requests(framework: str, form: Any) -> None:
    """They are those of mla_decode, with all of its options."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 3, 4, 576)).astype(np.float16)
    cache = rng.standard_normal((6, 64, 576)).astype(np.float16)
    given = {"block_table": int32([4, 1], [0, 9]), "kv_lens": int32(100, 5)}
    options = {"softmax_scale": 0.1, "window": 40, "sinks": np.float32([0.5, 1, -1, 0])}
    there: Any = np.asarray
    if framework != "numpy":
        module = pytest.importorskip({"torch": "torch", "jax": "jax.numpy"}[framework])
        there = module.asarray
    arrays = {name: there(array) for name, array in (given | {"sinks": options["sinks"]}).items()}
    options["sinks"] = arrays.pop("sinks")
    got, want = (
        function(form(there(q)), there(cache), **arrays, **options)
        for function in (cumla.mla_attention, cumla.mla_decode)
    )
    assert (got.out.shape, got.lse.shape) == ((2, 3, 4, 512), (2, 3, 4))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    exact = cumla.reference.mla_attention(form(q), cache, **given, softmax_scale=0.1)
    plain = cumla.reference.mla_decode(form(q), cache, **given, softmax_scale=0.1)
    np.testing.assert_array_equal(exact.out, plain.out)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"q": zeros(8, 16, 576)},
            "qo_indptr: needs offsets ... q of three axes, got None; pass it, or q as (",
        ),
        (
            {"kv_indptr": i32(3), "kv_indices": i32(6)},
            "kv_indptr: needs q of three axes ... got q of four; leave it out, and pass",
        ),
        (
            {"groups": cumla.PrefixGroups(i32(2), i32(2))},
            "groups: needs q of three axes with qo_indptr, got q of four; leave it out",
        ),
    ],
)
def test_what_an_axis_of_requests_excludes(changes: dict[str, Any], message: str) -> None:
    given = {"q": zeros(2, 4, 16, 576), "kv_cache": zeros(*CACHE), "kv_lens": i32(2)}
    with refused(ValueError, message):
        cumla.mla_attention(**given | {"block_table": i32(2, 3)} | changes)
    with refused(
        ValueError, "block_table: needs page numbers as block_table, or, with qo_indptr, as"
    ):
        cumla.mla_attention(**given)


# --- what is refused ------------------------------------------------------------------------------


def wrong_pair(name: str, latent: Any, rope: Any) -> list[Refusal]:
    lead = f"the first axes of {name}[0], {latent.shape[:-1]}, got ... ; pass both parts"
    return [
        wrong(name, (latent,), "one array, or a tuple or list of latent ... got 1 of them"),
        wrong(f"{name}[1]", (latent, latent), "a last axis of 64"),
        wrong(f"{name}[1]", (latent, rope[:1]), lead),
        wrong_type(f"{name}[1]", (latent, rope.astype("f2")), " ... bfloat16, got float16"),
        wrong_type(f"{name}[1]", (latent, None), "an array of CuPy"),
    ]


REFUSED = [
    wrong_type("q", zeros(*Q, dtype="f4"), "bfloat16 or float16, got float32; convert"),
    wrong_type("kv_cache", zeros(*CACHE, dtype="f2"), "q's dtype bfloat16, got float16; convert"),
    wrong_type("block_table", np.zeros((2, 3), int), "int32, got int64; convert"),
    wrong_type("qo_indptr", np.zeros(3, int), "int32, got int64; convert"),
    wrong_type("kv_lens", np.zeros(2, "u4"), "int32, got uint32; convert"),
    wrong_type("out", zeros(*OUT, dtype="f2"), "bfloat16 or float32, got float16; allocate"),
    wrong("q", zeros(8, 576), "3 axes (total_tokens, num_heads, 576), got shape (8, 576); reshape"),
    wrong(
        "q", zeros(1, *Q), "3 axes ... reshape it, or call cumla.mla_decode, whose q has a batch"
    ),
    wrong("q", zeros(8, 16, 192), "a last axis of 576 ... (8, 16, 192); pass a tuple"),
    wrong("q", zeros(8, 0, 576), "at least one head, got shape (8, 0, 576); skip"),
    wrong("kv_cache", zeros(64, 576), "axes (num_pages, page_size, num_kv_heads, 576), or"),
    wrong("kv_cache", zeros(6, 0, 1, 576), "at least one token, got shape (6, 0, 1, 576)"),
    *(
        wrong("block_table", i32(*shape), f"shape (batch, max_pages) ... got {shape}; give")
        for shape in ((2,), (3, 3))
    ),
    *(
        wrong("kv_lens", i32(*shape), f"shape (batch,) with batch 2, got {shape}; give")
        for shape in ((3,), (2, 1))
    ),
    *(
        wrong("qo_indptr", i32(*shape), f"shape (batch + 1,) ... got {shape}; give")
        for shape in ((0,), (3, 1), ())
    ),
    Refusal({"kv_cache": zeros(6, 64, 3, 576)}, ValueError, "num_heads: ... axes of kv_cache"),
    *badly_laid_out("q", zeros(*Q)),
    *badly_laid_out("kv_cache", zeros(*CACHE)),
    *badly_laid_out("out", zeros(*OUT)),
    wrong("block_table", every_other(i32(2, 3)), "contiguous rows, got a stride of 8 bytes"),
    wrong("block_table", i32(2, 3)[::-1], "rows in the order of memory, got a stride of -12 bytes"),
    *(
        wrong(name, shifted(i32(*shape), 2), "an address and strides that are multiples of 4 bytes")
        for name, shape in (("block_table", (2, 3)), ("qo_indptr", (3,)), ("kv_lens", (2,)))
    ),
    *wrong_pair("q", *split(zeros(*Q))),
    *wrong_pair("kv_cache", *split(zeros(*CACHE))),
    wrong_type("softmax_scale", "1", "a Python or NumPy number, got str"),
    wrong("softmax_scale", 0.0, "a number from 1e-20 to"),
    wrong("softmax_scale", float("nan"), "a number from 1e-20 to"),
]
REFUSED_LISTS = [
    wrong_type("kv_indptr", np.zeros(3, int), "int32, got int64"),
    wrong_type("kv_indices", np.zeros(4, int), "int32, got int64"),
    wrong_type("kv_indices", "text", "an array of CuPy"),
    wrong("kv_indptr", i32(2), "shape (batch + 1,) with batch 2, got (2,); give"),
    wrong("kv_indptr", i32(), "shape (batch + 1,) with batch 2, got (); give"),
    wrong("kv_indices", i32(2, 2), "shape ... got (2, 2); pass a table as block_table"),
    wrong("kv_indices", i32(8)[::2], " ... got a stride of 8 bytes ... ; make a contiguous copy"),
    wrong("kv_indices", shifted(i32(4), 2), "an address and strides that are multiples of 4"),
    wrong("kv_indptr", shifted(i32(3), 2), "an address and strides that are multiples of 4"),
]


def check_refusal(refusal: Refusal, make: Callable[[], Arguments], planned: Any) -> None:
    """By the function; and by the update or the run of a plan."""
    arguments = make() | refusal.changes
    with refused(refusal.error, refusal.message):
        cumla.mla_attention(**arguments)
    plan = ready(planned, make())
    given = {name: value for name, value in arguments.items() if value is not None}
    with refused(refusal.error, refusal.message):
        if set(refusal.changes) & set(planned.updated_with):
            plan.update(**planned.lengths(given))
        else:
            plan.run(**planned.inputs(given))


@all_of(REFUSED)
def test_refusals(refusal: Refusal) -> None:
    check_refusal(refusal, attention, TABLE)


@all_of(REFUSED_LISTS)
def test_refusals_of_lists(refusal: Refusal) -> None:
    check_refusal(refusal, listed, LIST)


PAGES = {name: (attention() | {"kv_indptr": int32(0, 1, 4), "kv_indices": int32(0, 3, 4, 5)})[name]
         for name in ("block_table", "kv_indptr", "kv_indices")}  # fmt: skip


@pytest.mark.parametrize(
    ("names", "wrong_one"),
    [
        ("", "block_table"),
        ("block_table kv_indptr kv_indices", "kv_indices"),
        ("block_table kv_indptr", "kv_indptr"),
        ("block_table kv_indices", "kv_indices"),
        ("kv_indptr", "kv_indptr"),
        ("kv_indices", "kv_indices"),
    ],
)
def test_pages_come_in_one_form(names: str, wrong_one: str) -> None:
    pages = dict.fromkeys(PAGES) | {name: PAGES[name] for name in names.split()}
    got = " and ".join(names.split()) or "neither"
    message = (
        f"{wrong_one}: needs page numbers as block_table, or as kv_indptr and kv_indices, got "
        f"{got}; pass one form"
    )
    with refused(ValueError, message):
        cumla.mla_attention(**attention() | pages)


def test_positional_arguments() -> None:
    """Query and cache alone; all else has names."""
    a = attention()
    want = cumla.mla_attention(**a)
    lengths = {"kv_lens": a["kv_lens"], "qo_indptr": a["qo_indptr"]}
    got = cumla.mla_attention(a["q"], a["kv_cache"], **lengths, block_table=a["block_table"])
    assert_same(got, want)
    with pytest.raises(TypeError):
        cumla.mla_attention(*[a[name] for name in ("q", "kv_cache", "block_table")], **lengths)


# --- results --------------------------------------------------------------------------------------


def test_layouts_that_are_fine() -> None:
    """A list of pages, pairs, offsets with gaps; a call and a plan."""
    arguments = attention()
    want = cumla.mla_attention(**arguments)
    assert (want.out.shape, want.out.dtype) == (OUT, BF16)
    assert (want.lse.shape, want.lse.dtype) == ((8, 16), np.float32)
    q, kv_cache = arguments["q"], arguments["kv_cache"]
    copies = tuple(np.ascontiguousarray(part) for part in split(kv_cache))
    for changes in (
        {"q": split(q)},
        {"kv_cache": list(split(kv_cache))},
        {"q": list(split(q)), "kv_cache": copies},
        {"kv_cache": tuple(part[:, :, 0] for part in copies)},
        {"qo_indptr": np.repeat(arguments["qo_indptr"], 2)[::2]},
    ):
        given = arguments | changes
        assert_same(cumla.mla_attention(**given), want)
        assert_same(ready(TABLE, given).run(**TABLE.inputs(given)), want)
    assert_same(cumla.mla_attention(**listed()), want)


def test_it_is_decoding_where_all_have_as_many_queries() -> None:
    """Also where nothing is visible: out is 0 and lse -inf."""
    arguments = attention() | {"qo_indptr": int32(0, 4, 8), "kv_lens": int32(2, 130)}
    got = cumla.mla_attention(**arguments)
    q = arguments["q"].reshape(2, 4, 16, 576)
    want = cumla.mla_decode(
        q, arguments["kv_cache"], arguments["block_table"], arguments["kv_lens"]
    )
    np.testing.assert_array_equal(got.out.reshape(want.out.shape), want.out)
    np.testing.assert_array_equal(got.lse.reshape(2, 4, 16), want.lse)
    assert np.isneginf(got.lse[:2]).all()
    assert not got.out[:2].astype(bool).any()


def test_rows_of_no_request_are_not_written() -> None:
    out, lse = np.full(OUT, 7, BF16), np.full((8, 16), 7, np.float32)
    cumla.mla_attention(**attention(), out=out, lse=lse)
    for array in (out, lse):
        untouched = (array == 7).reshape(8, -1).all(axis=1)
        assert untouched.tolist() == [True] + 5 * [False] + 2 * [True]


# --- plans ----------------------------------------------------------------------------------------


@all_of(
    [
        Refusal({"num_kv_heads": 3}, ValueError, "num_heads: ... 16 query heads and 3 kv heads"),
        wrong("page_size", 0, "a number from 1, got 0"),
        wrong_type("dtype", "float32", "bfloat16 or float16, got float32"),
        Refusal({"device": 0}, ValueError, "like: needs an array on CUDA device 0"),
        wrong("total_tokens", 1 << 34, f"fewer ... , got {1 << 34}; cut the call"),
    ]
)
def test_plans_that_are_refused(refusal: Refusal) -> None:
    with refused(refusal.error, refusal.message):
        cumla.MLAAttentionPlan(**TABLE.numbers | {"like": zeros(1)} | refusal.changes)


def test_a_plan_of_another_table_or_cache() -> None:
    plan = ready(TABLE, attention())
    for changes, message in (
        ({"kv_cache": zeros(6, 64, 2, 576)}, "num_kv_heads 1, got num_kv_heads 2; make a plan"),
        ({"kv_cache": zeros(6, 32, 1, 576)}, "page_size 64, got page_size 32; make a plan for"),
    ):
        with refused(ValueError, f"plan: made for {message}"):
            plan.run(**TABLE.inputs(attention() | changes))
    with refused(ValueError, "block_table: needs shape (batch, max_pages) with batch 2, got (3, 3"):
        plan.run(**TABLE.inputs(attention() | {"block_table": i32(3, 3)}))


def test_the_options_of_from_arrays() -> None:
    a = attention()
    q, kv_cache, indptr = a["q"], a["kv_cache"], a["qo_indptr"]
    plan = cumla.MLAAttentionPlan.from_arrays(
        split(q), list(split(kv_cache)), qo_indptr=indptr, causal=False
    )
    key = plan.key
    assert (key.batch, key.total_tokens, key.num_heads, key.num_kv_heads) == (2, 8, 16, 1)
    assert (key.page_size, key.dtype, key.causal, key.device) == (64, "bfloat16", False, None)
    plan.update(**TABLE.lengths(a))
    assert_same(plan.run(**TABLE.inputs(a)), cumla.mla_attention(**a, causal=False))
    with refused(ValueError, "q: needs 3 axes"):
        cumla.MLAAttentionPlan.from_arrays(q[None], kv_cache, qo_indptr=indptr)
    with refused(ValueError, "qo_indptr: needs shape (batch + 1,)"):
        cumla.MLAAttentionPlan.from_arrays(q, kv_cache, qo_indptr=indptr[:0])


@pytest.mark.parametrize("place", ["cpu", "gpu"])
def test_a_plan_that_was_updated_for_the_other_form(
    place: str, cupy: FakeCuPy, bindings: FakeBindings
) -> None:
    """It says what to pass, or how to update; an update of the other kind is enough."""

    def put(arguments: Arguments) -> Arguments:
        given = {name: value for name, value in arguments.items() if value is not None}
        return given if place == "cpu" else {n: cupy.like(v) for n, v in given.items()}

    tabled, in_list = put(attention()), put(listed())
    plan = TABLE.ready(tabled)
    for _ in range(3):
        plan.run(**TABLE.inputs(tabled))
    message = (
        "kv_indices: needs a plan that was updated with kv_indptr, got one updated without it; "
        "pass block_table, or call plan.update(kv_lens, qo_indptr=..., kv_indptr=...)"
    )
    with refused(ValueError, message):
        plan.run(**LIST.inputs(in_list))
    plan.update(**LIST.lengths(in_list))
    for _ in range(3):
        plan.run(**LIST.inputs(in_list))
    message = (
        "block_table: needs a plan that was updated without kv_indptr, got one updated with it; "
        "pass kv_indices, or call plan.update(kv_lens, qo_indptr=...)"
    )
    with refused(ValueError, message):
        plan.run(**TABLE.inputs(tabled))
    message = "block_table: needs pages as block_table, or as kv_indices after ... , got {}; pass"
    pages = {"block_table": tabled["block_table"], "kv_indices": in_list["kv_indices"]}
    for given, got in ((pages, "both"), ({}, "neither")):
        with refused(ValueError, message.format(got)):
            plan.run(tabled["q"], tabled["kv_cache"], **given)


@pytest.mark.parametrize(
    ("page_size", "apart", "form"),
    [(1, False, "_rows"), (16, False, "_boxes"), (128, False, ""), (64, True, "_boxes")],
)
def test_the_pages_choose_the_kernel(
    page_size: int, apart: bool, form: str, cupy: FakeCuPy, bindings: FakeBindings
) -> None:
    cache = zeros(6, page_size, 1, 576)
    parts = zeros(6, page_size, 1, 512), zeros(6, page_size, 1, 64)
    host = attention() | {"kv_cache": parts if apart else cache}
    given = {name: cupy.like(value) for name, value in host.items()}
    names = ["mla_attention_schedule", f"mla_attention_bfloat16{form}"]
    cumla.mla_attention(**given)
    assert bindings.entries == names
    TABLE.ready(given).run(**TABLE.inputs(given))
    assert bindings.entries == names


# --- check mode -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "name", "value", "message"),
    [
        (listed, "qo_indptr", [-1, 4, 6], "[0]: needs a number from 0 to total_tokens = 8, got -1"),
        (listed, "qo_indptr", [1, 4, 9], "[2]: needs a number from qo_indptr[1] = 4 to total_tok"),
        (listed, "qo_indptr", [5, 4, 3], "[1]: needs a number from qo_indptr[0] = 5 to total_tok"),
        (listed, "kv_lens", [5, -1], "[1]: needs a length from 0 to 192, what the request's pages"),
        (listed, "kv_lens", [65, 130], "[0]: needs a length from 0 to 64, what the request's page"),
        (listed, "kv_lens", [5, 2**31 - 1], "[1]: needs a length from 0 to 192, what the request"),
        (listed, "kv_indptr", [-1, 1, 4], "[0]: needs a number from 0 to the largest int32"),
        (listed, "kv_indptr", [0, 5, 4], "[2]: needs a number from kv_indptr[1] = 5"),
        (listed, "kv_indices", [0, 3, 4], ": needs kv_indptr[-1] = 4 pages, got 3; pass the whole"),
        (listed, "kv_indices", [6, 3, 4, 5], "[0]: needs a page number from 0 to 5, got 6; the k"),
        (listed, "kv_indices", [0, 3, 4, -1], "[3]: needs a page number from 0 to 5, got -1; the"),
        (listed, "kv_indices", [0, 3, 4, 5, -9], None),  # nobody reads the last
        (attention, "kv_lens", [5, 193], "[1]: needs a length from 0 to 192"),
        (attention, "kv_lens", [-5, 0], "[0]: needs a length from 0 to"),
        (attention, "block_table", [[0, -1, -1], [3, 4, 6]], "[1, 2]: needs a page number from 0 "),
        (
            attention,
            "block_table",
            [[-7, 1, 2], [3, 4, 5]],
            "[0, 0]: needs a page number from 0 to",
        ),
        (attention, "block_table", [[0, -1, 2147480000], [3, 4, 5]], None),
    ],
)
def test_check_mode(
    make: Callable[[], Arguments],
    name: str,
    value: Any,
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a call, and by the update or the run of a plan; without it nothing is said."""
    planned = TABLE if make is attention else LIST
    changed = make() | {name: int32(*value)}
    cumla.mla_attention(**changed)
    monkeypatch.setenv("CUMLA_CHECK", "1")
    cumla.mla_attention(**make())
    for call in (
        lambda: cumla.mla_attention(**changed),
        lambda: ready(planned, changed).run(**planned.inputs(changed)),
    ):
        if message is None:
            call()
        else:
            with refused(ValueError, f"{name}{message}"):
                call()
