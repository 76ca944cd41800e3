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
    Refusal,
    aligned,
    all_of,
    badly_laid_out,
    decode,
    every_other,
    int32,
    refused,
    shifted,
    wrong,
    wrong_type,
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


def zeros(*shape: int, dtype: Any = BF16) -> Any:
    return np.zeros(shape, dtype)


def wrong_parts(name: str) -> list[Refusal]:
    """List pairs that are none."""
    latent, rope = split(decode()[name])
    first, second = f"{name}[0]", f"{name}[1]"
    lead, other = latent.shape[:3], (1, *latent.shape[1:3])
    need = f"the first axes of {first}, {lead}, got {other}; pass both parts"
    return [
        *(
            wrong(
                name, (latent,) * n, f"one array, or a tuple or list of latent ... got {n} of them"
            )
            for n in (0, 1, 4)
        ),
        wrong(
            first, (zeros(*lead, 576), rope), "a last axis of 512 ... got shape ... ; a pair holds"
        ),
        wrong(
            first, (rope, latent), "a ... 512 latent columns, then 64 RoPE ones ... : these look sw"
        ),
        wrong(second, (latent, latent), f"a last axis of 64, got shape {latent.shape}; a pair"),
        wrong(second, (latent, rope[:1]), need),
        wrong(second, (latent, rope[0, 0, 0]), " ... axes ... got shape (64,)"),
        wrong_type(second, (latent, rope.astype("f2")), " ... bfloat16, got float16; convert"),
        wrong(second, (latent, every_other(rope)), "a contiguous last axis"),
        wrong(second, (latent, shifted(rope, 8)), "an address that is a multiple of 16 bytes"),
        wrong_type(second, (latent, None), "an array of CuPy ... got builtins.NoneType"),
    ]


CACHE_AXES = "axes (num_pages, page_size, num_kv_heads, 576), or the same without num_kv_heads"
MANY_HEADS = (
    "a multiple of num_kv_heads, got 16 query heads and 3 kv heads; check the axes of kv_cache"
)
REFUSED = [
    *(
        wrong_type("q", zeros(*Q, dtype=dtype), f"bfloat16 or float16, got {dtype}; convert")
        for dtype in ("float32", "float64", "int16", ">f2")
    ),
    wrong_type("kv_cache", zeros(*CACHE, dtype="f2"), "q's dtype bfloat16, got float16; convert"),
    *(
        wrong_type(name, np.ones(shape, dtype), f"int32, got {dtype}; convert it first")
        for dtype in ("int64", "uint32", "float32")
        for name, shape in (("block_table", (2, 3)), ("kv_lens", (2,)))
    ),
    *(
        wrong("q", zeros(*s), f"4 axes (batch, q_len, num_heads, 576), got shape {s}; reshape it")
        for s in ((576,), (2, 16, 576), (1, *Q))
    ),
    *(
        wrong("kv_cache", zeros(*s), f"{CACHE_AXES}, got shape {s}; reshape it")
        for s in ((), (64, 576), (1, *CACHE))
    ),
    *(
        wrong(
            "block_table", zeros(*s, dtype="i4"), f"shape (batch, max_pages) with batch 2, got {s}"
        )
        for s in ((2,), (3, 3), (2, 3, 1))
    ),
    *(
        wrong("kv_lens", zeros(*s, dtype="i4"), f"shape (batch,) with batch 2, got {s}; give each")
        for s in ((), (1,), (3,), (2, 1))
    ),
    wrong("q", zeros(2, 2, 0, 576), "at least one head, got shape (2, 2, 0, 576); skip the call"),
    *(
        wrong("kv_cache", zeros(*shape), f"at least one token, got shape {shape}; skip the call")
        for shape in ((6, 64, 0, 576), (0, 64, 1, 576), (6, 0, 1, 576))
    ),
    *(
        wrong(
            name, zeros(*lead, columns), "a last axis of 576 (512 latent + 64 RoPE) ... got shape"
        )
        for columns in (1056, 192, 577)
        for name, lead in (("q", Q[:3]), ("kv_cache", CACHE[:3]))
    ),
    *(
        Refusal({"kv_cache": cache}, ValueError, f"num_heads: needs {MANY_HEADS}")
        for cache in (zeros(6, 64, 3, 576), split(zeros(6, 64, 3, 576)))
    ),
    *(
        refusal
        for name, shape in (("q", Q), ("kv_cache", CACHE), ("out", OUT))
        for refusal in badly_laid_out(name, zeros(*shape))
    ),
    wrong("q", shifted(zeros(*Q), 4), "an address that is a multiple of 16 bytes"),
    wrong(
        "block_table",
        every_other(decode()["block_table"]),
        "contiguous rows, got a stride of 8 bytes on the last axis; make a contiguous copy",
    ),
    *(
        wrong(name, shifted(array, 2), "an address and strides that are multiples of 4 bytes")
        for name, array in (
            ("block_table", decode()["block_table"]),
            ("kv_lens", decode()["kv_lens"]),
            ("lse", zeros(2, 2, 16, dtype=np.float32)),
        )
    ),
    wrong(
        "lse",
        np.lib.stride_tricks.as_strided(np.zeros(999, np.float32), (2, 2, 16), (330, 4, 10)),
        "an address and ... strides (330, 4, 10); copy it",
    ),
    wrong_type("out", zeros(*OUT, dtype="f2"), "bfloat16 or float32, got float16; allocate it"),
    *wrong_parts("q"),
    *wrong_parts("kv_cache"),
    *(
        wrong_type("softmax_scale", v, f"a Python or NumPy number, got {got}; pass float")
        for v, got in (
            ("1", "str '1'"),
            (np.ones(1), "ndarray"),
            (1j, "complex"),
            (True, "bool True"),
        )
    ),
    *(
        wrong(
            "softmax_scale", v, f"a number from 1e-20 to 1000000.0, got {v}; put any other factor"
        )
        for v in (0.0, -0.1, 9e-21, 1.1e6, float("nan"), float("inf"))
    ),
]


@all_of(REFUSED)
def test_refusals(refusal: Refusal) -> None:
    """By the function; and by a plan, if it has the argument."""
    arguments = decode() | refusal.changes
    with refused(refusal.error, refusal.message):
        cumla.mla_decode(**arguments)
    plan = plan_of(decode())
    with refused(refusal.error, refusal.message):
        if "kv_lens" in refusal.changes:
            plan.update(arguments["kv_lens"])
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
    out, lse = every_other(np.zeros(OUT, BF16)), shifted(np.zeros((2, 2, 16), np.float32), 2)
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
        assert np.isneginf(state.lse[1]).tolist() == [[True] * 16, [False] * 16]
    every = cumla.mla_decode(**arguments, causal=False)
    assert np.isfinite(every.lse[1]).all()


# --- plans ----------------------------------------------------------------------------------------

INVARIANT = {"batch_invariant": True}
NOT_PLANNED = [
    Refusal({"num_kv_heads": 3}, ValueError, "num_heads: ... 16 query heads and 3 kv heads"),
    wrong("page_size", 0, "a number from 1, got 0"),
    wrong_type("page_size", 16.0, "an int, got float"),
    wrong_type("dtype", "float32", "bfloat16 or float16, got float32"),
    Refusal({"device": 0}, ValueError, "like: needs an array on CUDA device 0"),
    Refusal(INVARIANT, ValueError, "max_kv_len: needs the length of the longest ... ; pass it"),
    wrong("max_kv_len", 4096, "batch_invariant=True, got 4096 ... ; leave it out"),
    Refusal(INVARIANT | {"max_kv_len": 0}, ValueError, "max_kv_len: needs a number from 1, got 0"),
    Refusal(INVARIANT | {"max_kv_len": 9.0}, TypeError, "max_kv_len: needs an int, got float"),
]


@all_of(NOT_PLANNED)
def test_plans_that_are_refused(refusal: Refusal) -> None:
    changes, *rest = refusal
    with refused(*rest):
        cumla.MLADecodePlan(2, 1, 16, **{"like": decode()["q"]} | changes)
    if not set(changes) - {"batch_invariant", "max_kv_len"}:
        with refused(*rest):
            plan_of(decode(), **changes)
        with refused(*rest):
            cumla.MLADecodePlan.workspace_bytes(2, 1, 16, sm_count=132, **changes)


def test_a_plan_of_another_dtype_or_cache() -> None:
    plan = plan_of(decode())
    half = {name: decode()[name].astype(np.float16) for name in ("q", "kv_cache")}
    heads = {"kv_cache": np.zeros((6, 64, 2, 576), BF16)}
    for changes, message in (
        (half, "dtype bfloat16, got dtype float16"),
        (heads, "num_kv_heads 1, got num_kv_heads 2"),
    ):
        with refused(ValueError, f"plan: made for {message}; make a plan for this shape"):
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
    for longest, max_blocks, parts in ((1, 1, 2), (2304, 36, 2), (2305, 37, 4), (4096, 64, 4)):
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


def test_more_pieces_than_a_grid_has_thread_blocks(cupy: FakeCuPy, bindings: FakeBindings) -> None:
    """65535 along y: 65535 * 2048 tokens of a request of 32 rows and what no cut saves, or half."""
    most = 65535 // 2 * 2048 + 4 * 64
    message = (
        "batch_invariant: needs at most 65535 pieces of requests, got 65536: 2 requests of up to "
        "67107136 tokens, cut every 2048; lower a plan's max_kv_len, pass fewer columns of"
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
        (
            2,
            64,
            {"batch_invariant": True},
            ["mla_schedule_invariant", "mla_decode_invariant_bfloat16"],
        ),
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
        (
            [5, 193],
            [[-1] * 3] * 2,
            "kv_lens[1]: needs a length from 0 to max_pages * page_size = 192",
        ),
        ([2**31 - 1, -(2**31)], [[0] * 3] * 2, "kv_lens[0]: ... got 2147483647"),
        ([5, -1], [[0] * 3] * 2, "kv_lens[1]: ... got -1"),
        (
            [64, 129],
            [[0, 9, 9], [0, 5, 6]],
            "block_table[1, 2]: needs a page number from 0 to 5, got 6",
        ),
        ([65, 129], [[0, -1, 9], [0, 5, 6]], "block_table[0, 1]: ... got -1"),
        ([1, 0], [[-(2**31), 0, 0], [0, 5, 6]], "block_table[0, 0]: ... got -2147483648"),
    ],
)
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
