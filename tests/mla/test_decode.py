# SPDX-License-Identifier: Apache-2.0
"""`cumla.mla_decode` and its plan on the CPU, what they refuse, and which kernels they launch.
What holds for every operation is in tests/core."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cumla
from tests.calls import (
    BF16,
    PLANS,
    aligned,
    decode,
    every_other,
    int32,
    padded,
    refused,
    shifted,
)
from tests.fake_cuda import FakeBindings, FakeCuPy
from tests.gpu.tools.cases import Case
from tests.gpu.tools.problem import make_problem
from tests.gpu.tools.refusals import REFUSALS
from tests.gpu.tools.refusals import refused as changed

Q, CACHE, OUT = (2, 2, 16, 576), (6, 64, 1, 576), (2, 2, 16, 512)
PLAN = PLANS["MLADecodePlan"]


def split(array: Any) -> tuple[Any, Any]:
    """Latent and RoPE columns as slices of one array."""
    return array[..., :512], array[..., 512:]


def plan_of(arguments: Any, **options: Any) -> cumla.MLADecodePlan:
    plan: cumla.MLADecodePlan = PLAN.ready(arguments, **options)
    return plan


def assert_same(got: Any, want: Any) -> None:
    np.testing.assert_array_equal(got.out, want.out)
    np.testing.assert_array_equal(got.lse, want.lse)


# --- what is refused ------------------------------------------------------------------------------

LATENT, ROPE = split(decode()["q"])
KV, KV_ROPE = split(decode()["kv_cache"])
APART = {
    **{f"q of {d}": ("q", np.zeros(Q, d), TypeError, f"q: needs bfloat16 or float16, got {d}; conv")
       for d in ("float32", "float64", "int16", ">f2")},
    "cache of another dtype": ("kv_cache", np.zeros(CACHE, "f2"), TypeError, "kv_cache: needs q's dtype bfloat16, got float16; convert"),
    **{f"{n} of {d}": (n, np.ones(s, d), TypeError, f"{n}: needs int32, got {d}; convert it first")
       for d in ("int64", "uint32", "float32") for n, s in (("block_table", (2, 3)), ("kv_lens", (2,)))},
    **{f"q {s}": ("q", np.zeros(s, BF16), ValueError, f"q: needs 4 axes (batch, q_len, num_heads, 576), got shape {s}; reshape")
       for s in ((576,), (2, 16, 576), (1, *Q))},
    **{f"cache {s}": ("kv_cache", np.zeros(s, BF16), ValueError, f"kv_cache: needs axes (num_pages, page_size, num_kv_heads, 576), or ... got shape {s}; reshape")
       for s in ((), (64, 576), (1, *CACHE))},
    **{f"table {s}": ("block_table", np.zeros(s, "i4"), ValueError, f"block_table: needs shape (batch, max_pages) with batch 2, got {s}; give each request")
       for s in ((2,), (3, 3), (2, 3, 1))},
    **{f"lengths {s}": ("kv_lens", np.zeros(s, "i4"), ValueError, f"kv_lens: needs shape (batch,) with batch 2, got {s}; give each request")
       for s in ((), (1,), (3,), (2, 1))},
    "no heads": ("q", np.zeros((2, 2, 0, 576), BF16), ValueError, "q: needs at least one head, got shape (2, 2, 0, 576); skip"),
    **{f"empty cache {s}": ("kv_cache", np.zeros(s, BF16), ValueError, f"kv_cache: needs at least one token, got shape {s}")
       for s in ((6, 64, 0, 576), (0, 64, 1, 576), (6, 0, 1, 576))},
    **{f"{n} of {c} columns": (n, np.zeros((*s, c), BF16), ValueError, f"{n}: needs a last axis of 576 (512 latent + 64 RoPE), got shape {(*s, c)}; pass a tuple")
       for c in (512, 192, 577) for n, s in (("q", Q[:3]), ("kv_cache", CACHE[:3]))},
    "kv heads": ("kv_cache", np.zeros((6, 64, 3, 576), BF16), ValueError, "num_heads: needs a multiple of num_kv_heads, got 16 query heads and 3 kv heads; pad"),
    **{f"gaps in {n}": (n, every_other(np.zeros(s, BF16)), ValueError, f"{n}: needs a contiguous last axis, got a stride of 4 bytes ... ; make a contiguous copy")
       for n, s in (("q", Q), ("kv_cache", CACHE), ("out", OUT))},
    **{f"odd rows of {n}": (n, padded(np.zeros(s, BF16), 1), ValueError, f"{n}: needs strides that are multiples of 16 bytes ... ; pad the rows")
       for n, s in (("q", Q), ("kv_cache", CACHE), ("out", OUT))},
    **{f"{n} backwards": (n, np.zeros(s, BF16)[::-1], ValueError, f"{n}: needs strides ... not negative, got -{np.zeros(s, BF16)[0].nbytes} on axis 0")
       for n, s in (("q", Q), ("kv_cache", CACHE), ("out", OUT))},
    **{f"{n} at {by}": (n, shifted(np.zeros(s, BF16), by), ValueError, f"{n}: needs an address that is a multiple of 16 bytes, got 0x ... ; copy")
       for n, s in (("q", Q), ("kv_cache", CACHE), ("out", OUT)) for by in (4, 8)},
    "gaps in the table": ("block_table", every_other(int32([0, 1, 2], [3, 4, 5])), ValueError, "block_table: needs contiguous rows, got a stride of 8 bytes on the last axis; make a contiguous copy"),
    **{f"{n} at 2": (n, shifted(np.zeros(s, "i4"), 2), ValueError, f"{n}: needs an address and strides that are multiples of 4 bytes ... ; copy")
       for n, s in (("block_table", (2, 3)), ("kv_lens", (2,)))},
    "lse at 2": ("lse", shifted(np.zeros((2, 16, 2), "f4"), 2), ValueError, "lse: needs an address and strides that are multiples of 4 bytes, got address ... and strides (128, 8, 4); copy it"),
    "odd lse": ("lse", np.lib.stride_tricks.as_strided(np.zeros(99, "f4"), (2, 16, 2), (128, 10, 4)), ValueError, "lse: needs an address and ... strides (128, 10, 4); copy it"),
    "out of float16": ("out", np.zeros(OUT, "f2"), TypeError, "out: needs bfloat16 or float32, got float16"),
    **{f"{n} of {c}": (n, (decode()[n],) * c, ValueError, f"{n}: needs one array, or a tuple or list of latent columns and RoPE columns ... got {c} of them; pass each")
       for c in (0, 1, 4) for n in ("q", "kv_cache")},
    **{f"{n} {what}": (n, pair, error, f"{n}{message}")
       for n, one, two in (("q", LATENT, ROPE), ("kv_cache", KV, KV_ROPE))
       for what, pair, error, message in (
        ("wide", (np.zeros((*one.shape[:3], 576), BF16), two), ValueError, "[0]: needs a last axis of 512, got shape"),
        ("latent twice", (one, one), ValueError, f"[1]: needs a last axis of 64, got shape {one.shape}; a pair"),
        ("of other rows", (one, two[:1]), ValueError, f"[1]: needs the first axes of {n}[0], {one.shape[:3]}, got {(1, *one.shape[1:3])}; pass both parts"),
        ("of another rank", (one, two[0, 0, 0]), ValueError, "[1]: needs ... axes ... got shape (64,)"),
        ("of two dtypes", (one, two.astype("f2")), TypeError, "[1]: needs ... bfloat16, got float16"),
        ("with gaps", (one, every_other(two)), ValueError, "[1]: needs a contiguous last axis"),
        ("at 8", (one, shifted(two, 8)), ValueError, "[1]: needs an address that is a multiple of 16"),
        ("of half", (one, None), TypeError, "[1]: needs an array of CuPy ... got builtins.NoneType"))},
    "kv heads of a pair": ("kv_cache", split(np.zeros((6, 64, 3, 576), BF16)), ValueError, "num_heads: needs a multiple of num_kv_heads"),
    **{f"scale {v}": ("softmax_scale", v, TypeError, f"softmax_scale: needs a Python or NumPy number, got {type(v).__name__};")
       for v in ("1", np.ones(1), 1j)},
    **{f"scale {v}": ("softmax_scale", v, ValueError, f"softmax_scale: needs a number from 1e-20 to 1000000.0, got {v}; put any other factor into q")
       for v in (0.0, -0.1, 9e-21, 1.1e6, float("nan"), float("inf"))},
}  # fmt: skip


@pytest.mark.parametrize(("name", "value", "error", "message"), APART.values(), ids=APART)
def test_refusals(name: str, value: Any, error: type[Exception], message: str) -> None:
    """By the function; and by a plan, if it has the argument."""
    arguments = decode() | {name: value}
    with refused(error, message):
        cumla.mla_decode(**arguments)
    plan = plan_of(decode())
    with refused(error, message):
        if name == "kv_lens":
            plan.update(value)
        else:
            plan.run(**PLAN.inputs(arguments))


@pytest.mark.parametrize(("change", "error", "message"), REFUSALS)
def test_what_the_gpu_tests_expect(change: str, error: type[Exception], message: str) -> None:
    """The same calls with NumPy arrays: an expectation that is out of date shows here first."""
    problem = make_problem(np, Case(batch=4, q_len=2, kv_len=70))
    arrays, options = changed(np, problem, change)
    with pytest.raises(error, match=message):
        cumla.mla_decode(*arrays, **options)


def test_what_is_checked_first() -> None:
    """What an array is, then where it lies; inputs, then out, then lse."""
    out, lse = every_other(np.zeros(OUT, BF16)), shifted(np.zeros((2, 16, 2), np.float32), 2)
    for changes, message in (
        ({"out": out}, "out: needs a contiguous last axis"),
        ({"out": out.view(np.int16)}, "out: needs bfloat16 or float32"),
        ({"out": out[:1]}, "out: needs shape"),
        ({"out": out, "q": every_other(decode()["q"])}, "q: needs a contiguous last axis"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            cumla.mla_decode(**decode() | {"lse": lse} | changes)


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 2, 16, 48, 128])
def test_every_page_size(page_size: int) -> None:
    """The same tokens in other pages give the same result."""
    arguments = decode()
    tokens = arguments["kv_cache"][arguments["block_table"]].reshape(2, 192, 1, 576)
    count = -(-192 // page_size)
    whole = np.full((2, count * page_size, 1, 576), np.nan, BF16)
    whole[:, :192] = tokens
    pages = {
        "kv_cache": whole.reshape(-1, page_size, 1, 576),
        "block_table": np.arange(2 * count, dtype=np.int32).reshape(2, count),
    }
    assert_same(cumla.mla_decode(**arguments | pages), cumla.mla_decode(**arguments))


def test_layouts_that_are_fine() -> None:
    """Pairs, as tuples or lists, slices or copies; padded rows and pages; a repeated query; a cache
    without its head axis; a table in a wider one."""
    arguments = decode()
    want = cumla.mla_decode(**arguments)
    q, kv_cache = arguments["q"], arguments["kv_cache"]
    copies = tuple(np.ascontiguousarray(part) for part in split(kv_cache))
    wide = np.full((2, 9), -1, np.int32)
    wide[:, :3] = arguments["block_table"]
    rows = np.zeros((6, 80, 584), BF16)
    rows[:, :64, :576] = kv_cache[:, :, 0]
    for changes in (
        {"q": split(q)},
        {"kv_cache": list(split(kv_cache))},
        {"q": list(split(q)), "kv_cache": copies},
        {"kv_cache": tuple(part[:, :, 0] for part in copies)},
        {"kv_cache": rows[:, :64, :576], "block_table": wide[:, :3]},
        {"kv_lens": np.repeat(arguments["kv_lens"], 2)[::2]},
    ):
        given = arguments | changes
        assert_same(cumla.mla_decode(**given), want)
        assert_same(plan_of(given).run(**PLAN.inputs(given)), want)
    cumla.mla_decode(**arguments | {"q": np.broadcast_to(q[:1], q.shape)})


def test_nothing_is_visible() -> None:
    arguments = decode() | {"kv_lens": int32(0, 1)}
    for state in (cumla.mla_decode(**arguments), plan_of(arguments).run(**PLAN.inputs(arguments))):
        assert isinstance(state, cumla.AttentionState)
        assert not state.out[0].astype(bool).any()
        assert np.isneginf(state.lse[0]).all()
        assert np.isneginf(state.lse[1]).tolist() == [[True, False]] * 16  # the first query of two
    every = cumla.mla_decode(**arguments, causal=False)
    assert np.isfinite(every.lse[1]).all()


# --- plans ----------------------------------------------------------------------------------------

NOT_PLANNED = {
    "kv heads": ({"num_kv_heads": 3}, ValueError, "num_heads: ... 16 query heads and 3 kv heads"),
    "no page": ({"page_size": 0}, ValueError, "page_size: needs a number from 1, got 0"),
    "page of 16.0": ({"page_size": 16.0}, TypeError, "page_size: needs an int, got float"),
    "dtype": ({"dtype": "float32"}, TypeError, "dtype: needs bfloat16 or float16, got float32"),
    "device": ({"device": 0}, ValueError, "like: ... CUDA device 0"),
    "no longest": ({"batch_invariant": True}, ValueError, "max_kv_len: needs the length of the longest request ... got None; pass it"),
    "a longest": ({"max_kv_len": 4096}, ValueError, "max_kv_len: needs batch_invariant=True, got 4096 ... ; leave it out"),
    "longest of 0": ({"batch_invariant": True, "max_kv_len": 0}, ValueError, "max_kv_len: needs a number from 1, got 0; nothing to plan for"),
    "longest of 4096.0": ({"batch_invariant": True, "max_kv_len": 4096.0}, TypeError, "max_kv_len: needs an int, got float; convert it"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), NOT_PLANNED.values(), ids=NOT_PLANNED)
def test_plans_that_are_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with refused(error, message):
        cumla.MLADecodePlan(2, 1, 16, **{"like": decode()["q"]} | changes)
    if not set(changes) - {"batch_invariant", "max_kv_len"}:
        with refused(error, message):
            plan_of(decode(), **changes)
        with refused(error, message):
            cumla.MLADecodePlan.workspace_bytes(2, 1, 16, sm_count=132, **changes)


def test_a_plan_of_another_dtype_or_cache() -> None:
    plan = plan_of(decode())
    half = {name: decode()[name].astype(np.float16) for name in ("q", "kv_cache")}
    for changes in (half, {"kv_cache": np.zeros((6, 64, 2, 576), BF16)}):
        with refused(ValueError, "plan: made for ( ... got ( ... ; make a plan for this shape"):
            plan.run(**PLAN.inputs(decode() | changes))


def test_the_options_of_from_arrays() -> None:
    q, kv_cache = decode()["q"], decode()["kv_cache"]
    for arrays in ((q, kv_cache), (split(q), list(split(kv_cache)))):
        key = cumla.MLADecodePlan.from_arrays(*arrays, causal=False).key
        assert (key.batch, key.q_len, key.num_heads, key.num_kv_heads) == (2, 2, 16, 1)
        assert (key.page_size, key.dtype, key.causal, key.device) == (64, "bfloat16", False, None)
    arguments = decode()
    plan = plan_of(arguments, causal=False)
    assert_same(plan.run(**PLAN.inputs(arguments)), cumla.mla_decode(**arguments, causal=False))
    with refused(ValueError, "q: needs 4 axes"):
        cumla.MLADecodePlan.from_arrays(q[0], kv_cache)


# --- batch-invariant calls ------------------------------------------------------------------------


def test_batch_invariant_plans_have_room_for_their_longest_request(cupy: FakeCuPy) -> None:
    q = cupy.like(decode()["q"])
    for longest, max_blocks, parts in ((1, 1, 2), (1024, 16, 2), (1025, 17, 4), (4096, 64, 8)):
        mode: dict[str, Any] = {"batch_invariant": True, "max_kv_len": longest}
        sizes = {
            cumla.MLADecodePlan.workspace_bytes(2, 2, 16, **mode, sm_count=n) for n in (1, 78, 132)
        }
        plan = cumla.MLADecodePlan(2, 2, 16, like=q, **mode)
        assert (plan.key.max_blocks, plan.key.parts) == (max_blocks, parts)
        assert sizes == {plan.key.layout.nbytes} == {cupy.allocated[-1]}
    longest = np.array([17, 4096], np.int32).max()
    mode = {"batch_invariant": True, "max_kv_len": longest}
    assert cumla.MLADecodePlan(2, 2, 16, like=q, **mode).key.max_blocks == 64


def test_more_pieces_than_a_grid_has_thread_blocks(
    cupy: FakeCuPy, bindings: FakeBindings
) -> None:
    """65535 along y: with 32 rows, 65535 * 1024 tokens of one request, or half of two."""
    most = 65535 // 2 * 1024
    message = (
        "batch_invariant: needs at most 65535 pieces of requests, got 65536: 2 requests of up to "
        "33553472 tokens, cut every 1024; lower a plan's max_kv_len, pass fewer columns of"
    )
    given = {name: cupy.like(array) for name, array in decode().items()}
    for arguments in (decode(), given):
        PLAN.make(arguments, batch_invariant=True, max_kv_len=most)
        with refused(ValueError, message):
            PLAN.make(arguments, batch_invariant=True, max_kv_len=most + 1)
    given["block_table"] = cupy.ndarray((2, most // 64 + 1), "int32")
    with refused(ValueError, message):
        cumla.mla_decode(**given, batch_invariant=True)
    assert bindings.entries == []


def test_batch_invariant_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers; longer requests are cut off at the next 64 tokens, as on the GPU."""
    arguments = decode()
    want = cumla.mla_decode(**arguments)
    assert_same(cumla.mla_decode(**arguments, batch_invariant=True), want)
    plan = plan_of(arguments, batch_invariant=True, max_kv_len=130)
    assert_same(plan.run(**PLAN.inputs(arguments)), want)
    short = plan_of(arguments, batch_invariant=True, max_kv_len=65)
    cut = cumla.mla_decode(**arguments | {"kv_lens": int32(5, 128)})
    assert_same(short.run(**PLAN.inputs(arguments)), cut)
    monkeypatch.setenv("CUMLA_CHECK", "1")
    with refused(ValueError, "kv_lens[1]: needs a length up to 128 ... got 130; ... max_kv_len"):
        plan_of(arguments, batch_invariant=True, max_kv_len=65)


# --- which kernels --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("q_len", "page_size", "options", "names"),
    [
        (1, 64, {}, ["mla_schedule", "mla_decode_bfloat16_swapped"]),
        (2, 64, {}, ["mla_schedule", "mla_decode_bfloat16"]),
        (5, 64, {}, ["mla_schedule", "mla_decode_bfloat16_shared_blocks"]),
        (1, 16, {}, ["mla_schedule", "mla_decode_bfloat16_swapped_boxes"]),
        (2, 1, {}, ["mla_schedule", "mla_decode_bfloat16_rows"]),
        (2, 64, {"batch_invariant": True}, ["mla_schedule_invariant", "mla_decode_bfloat16"]),
    ],
)
def test_the_shape_chooses_the_kernels(
    q_len: int,
    page_size: int,
    options: dict[str, Any],
    names: list[str],
    cupy: FakeCuPy,
    bindings: FakeBindings,
) -> None:
    host = decode() | {
        "q": aligned((2, q_len, 16, 576)),
        "kv_cache": aligned((6, page_size, 1, 576)),
    }
    given = {name: cupy.like(array) for name, array in host.items()}
    cumla.mla_decode(**given, **options)
    assert bindings.entries == names
    if options:
        options = options | {"max_kv_len": 192}
    plan = plan_of(given, **options)
    plan.run(**PLAN.inputs(given))
    assert bindings.entries == names


# --- check mode -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "table", "message"),
    [
        ([5, 130], [[0, -1, -1], [3, 4, 5]], None),  # unused: anything
        ([0, 0], [[-1] * 3] * 2, None),
        ([192, 192], [[3, 3, 3]] * 2, None),  # pages may be shared
        ([5, 193], [[-1] * 3] * 2, "kv_lens[1]: needs a length from 0 to max_pages * page_size = 192, got 193; the kernels would clamp it"),
        ([2**31 - 1, -(2**31)], [[0] * 3] * 2, "kv_lens[0]: ... got 2147483647"),
        ([5, -1], [[0] * 3] * 2, "kv_lens[1]: ... got -1"),
        ([64, 129], [[0, 9, 9], [0, 5, 6]], "block_table[1, 2]: needs a page number from 0 to 5, got 6; the kernels would read zeros for that page"),
        ([65, 129], [[0, -1, 9], [0, 5, 6]], "block_table[0, 1]: ... got -1"),
        ([1, 0], [[-(2**31), 0, 0], [0, 5, 6]], "block_table[0, 0]: ... got -2147483648"),
    ],
)  # fmt: skip
def test_check_mode(
    lengths: list[int], table: list[list[int]], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = decode() | {"kv_lens": int32(*lengths), "block_table": int32(*table)}
    cumla.mla_decode(**arguments)
    monkeypatch.setenv("CUMLA_CHECK", "1")
    for call in (
        lambda: cumla.mla_decode(**arguments),
        lambda: plan_of(arguments).run(**PLAN.inputs(arguments)),
    ):
        if message is None:
            call()
        else:
            with refused(ValueError, message):
                call()
