# SPDX-License-Identifier: Apache-2.0
"""FP8 caches in `cumla.mla_decode`, `cumla.mla_attention` and their plans: results on the CPU,
what is refused, and which kernels are launched. What the caches stand for is tested in
tests/reference/mla/test_fp8_decode.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cumla
from cumla import reference
from tests.calls import BF16, E4M3, NO_FACTORS, Refusal, aligned, int32, refused, wrong, wrong_type
from tests.fake_cuda import FakeBindings, FakeCuPy
from tests.mla.fp8_arrays import FORMS, SCALED, make_cache, parts_of

Call = Callable[..., Any]
TABLE, LENGTHS, INDPTR = int32([0, 1, 2], [3, 4, 5]), int32(5, 130), int32(0, 2, 4)
GROUPED = ("scales", "scales, e4m3 rope", "packed")
F16, F32, U8 = np.float16, np.float32, np.uint8


def make(form: str, **changes: Any) -> dict[str, Any]:
    """Arguments of both operations, but for lengths and the axes of q."""
    q = np.random.default_rng(0).standard_normal((2, 2, 16, 576)).astype(BF16)
    arguments: dict[str, Any] = {"q": q, "kv_cache": make_cache(form)}
    if form in SCALED:
        arguments["kv_scale"] = 0.01
    return arguments | changes


def decode(q: Any, kv_cache: Any, **options: Any) -> Any:
    return cumla.mla_decode(q, kv_cache, TABLE, LENGTHS, **options)


def planned(q: Any, kv_cache: Any, **options: Any) -> Any:
    plan = cumla.MLADecodePlan.from_arrays(q, kv_cache)
    plan.update(LENGTHS)
    return plan.run(q, kv_cache, block_table=TABLE, **options)


def flat(q: Any) -> Any:
    parts = tuple(part.reshape(4, *part.shape[2:]) for part in parts_of(q))
    return parts if len(parts) > 1 else parts[0]


def attend(q: Any, kv_cache: Any, **options: Any) -> Any:
    """The same as a ragged call."""
    return cumla.mla_attention(
        flat(q), kv_cache, block_table=TABLE, kv_lens=LENGTHS, qo_indptr=INDPTR, **options
    )


def planned_ragged(q: Any, kv_cache: Any, **options: Any) -> Any:
    plan = cumla.MLAAttentionPlan.from_arrays(flat(q), kv_cache, qo_indptr=INDPTR)
    plan.update(LENGTHS, qo_indptr=INDPTR)
    return plan.run(flat(q), kv_cache, block_table=TABLE, **options)


both = pytest.mark.parametrize("call", [decode, attend])
every_way = pytest.mark.parametrize("call", [decode, attend, planned, planned_ragged])


# --- results --------------------------------------------------------------------------------------


@every_way
@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str, call: Call) -> None:
    arguments = make(form)
    want = reference.mla_decode(block_table=TABLE, kv_lens=LENGTHS, **arguments)
    assert 0.05 < np.abs(want.out.astype(float)).max() < 10
    got = call(**arguments)
    np.testing.assert_array_equal(got.out.reshape(want.out.shape), want.out)
    assert got.out.dtype == BF16
    np.testing.assert_array_equal(got.lse.reshape(want.lse.shape), want.lse)


@both
@pytest.mark.parametrize("form", SCALED)
def test_kinds_of_factors(form: str, call: Call) -> None:
    want = call(**make(form))
    for factor in (np.float64(0.01), np.array(0.01, F32), np.full((1, 1), 0.01, F32)):
        got = call(**make(form, kv_scale=factor))
        np.testing.assert_array_equal(got.out, want.out)
    assert not np.array_equal(call(**make(form, kv_scale=0.02)).lse, want.lse)


@every_way
@pytest.mark.parametrize("form", FORMS)
def test_products_in_fp8_are_exact_on_the_cpu(form: str, call: Call) -> None:
    want, got = call(**make(form)), call(**make(form), fp8_products=True)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


@both
def test_pairs_of_queries_and_float32_outputs(call: Call) -> None:
    arguments = make("packed")
    want = call(**arguments)
    out = np.empty(want.out.shape, F32)
    halves = aligned((2, 2, 16, 512)), aligned((2, 2, 16, 64))
    halves[0][...], halves[1][...] = arguments["q"][..., :512], arguments["q"][..., 512:]
    assert call(**arguments | {"q": halves}, out=out).out is out
    np.testing.assert_array_equal(out.astype(BF16), want.out)


@both
def test_parts_lie_anywhere(call: Call) -> None:
    """Padded rows, rows beside each other's, heads between: strides of 16 bytes; or of 0."""
    arguments = make("scales")
    want = call(**arguments)
    latent, rope, scales = arguments["kv_cache"]
    wide = aligned((6, 65, 2, 704), U8, shift=16)
    places = wide[:, :64, :1, 16:528], wide[:, :64, :1, 544:672], wide[:, :64, :1, 688:]
    parts = [places[0], places[1].view(BF16), places[2].view(F32)]
    for part, values in zip(parts, (latent, rope, scales), strict=True):
        part[...] = values
    got = call(**arguments | {"kv_cache": parts})
    np.testing.assert_array_equal(got.out, want.out)
    one_row = aligned((4,), F32)
    one_row[:] = scales[...] = 0.25
    same = (latent, rope, np.broadcast_to(one_row, scales.shape))
    got = call(**arguments | {"kv_cache": same})
    np.testing.assert_array_equal(got.out, call(**arguments).out)


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("form", FORMS)
def test_other_frameworks(form: str, framework: str) -> None:
    """Their e4m3, bytes and factors."""
    module = pytest.importorskip(framework)

    def convert(array: Any) -> Any:
        if framework == "jax":
            return module.numpy.asarray(array)
        if array.dtype not in (E4M3, BF16):
            return module.from_numpy(array)
        bits = U8 if array.dtype == E4M3 else np.int16
        dtype = module.float8_e4m3fn if array.dtype == E4M3 else module.bfloat16
        return module.from_numpy(array.view(bits)).view(dtype)

    arguments = make(form)
    want = decode(**arguments)
    got = cumla.mla_decode(
        convert(arguments["q"]),
        [convert(part) for part in parts_of(arguments["kv_cache"])]
        if isinstance(arguments["kv_cache"], tuple)
        else convert(arguments["kv_cache"]),
        convert(TABLE),
        convert(LENGTHS),
        kv_scale=convert(np.array(0.01, F32)) if form in SCALED else None,
    )
    assert isinstance(got.out, module.Tensor if framework == "torch" else module.Array)
    assert str(got.out.dtype).endswith("bfloat16")
    out = got.out.float().numpy() if framework == "torch" else np.asarray(got.out)
    np.testing.assert_array_equal(out.astype(F32), want.out.astype(F32))


# --- what is refused ------------------------------------------------------------------------------


def cache_of(*dtypes: Any) -> Any:
    widths = zip((512, 64, 4), dtypes, strict=False)
    return tuple(aligned((6, 64, 1, n), dtype) for n, dtype in widths)


LATENT, ROPE, SCALES = make_cache("scales")
NO_SCALES = "a cache with e4m3 columns that have no scales of their own, got "
CACHES = [
    wrong_type("kv_cache[1]", cache_of(E4M3, F16), "bfloat16 or float8_e4m3fn, got float16; conv"),
    wrong_type("kv_cache[1]", cache_of(E4M3, U8), "bfloat16 or float8_e4m3fn, got uint8; convert"),
    wrong_type("kv_cache[1]", cache_of(U8, E4M3), "bfloat16 or uint8, got float8_e4m3fn"),
    wrong_type("kv_cache[1]", cache_of(BF16, E4M3), "q's dtype bfloat16, got float8_e4m3fn"),
    wrong_type("kv_cache[2]", cache_of(E4M3, BF16, BF16), "float32, got bfloat16; convert"),
    wrong_type("kv_cache[2]", cache_of(BF16, BF16, F32), "kv_cache[0] of ... got bfloat16; leave"),
    wrong_type(
        *("kv_cache", aligned((6, 64, 1, 576), np.int8)),
        "q's dtype bfloat16, or float8_e4m3fn or uint8, got int8; convert it, or pass .view(uint8)",
    ),
    *(
        wrong(name, cache, f"the first axes of kv_cache[0], (6, 64, 1), got {got}; pass both parts")
        for name, cache, got in (
            ("kv_cache[1]", (LATENT, ROPE[:5], SCALES), (5, 64, 1)),
            ("kv_cache[2]", (LATENT, ROPE, SCALES[:5]), (5, 64, 1)),
            ("kv_cache[2]", (LATENT, ROPE, SCALES[:, :63]), (6, 63, 1)),
        )
    ),
    wrong("kv_cache[2]", (LATENT, ROPE, SCALES[..., :1]), "a last axis of 4 ... (6, 64, 1, 1)"),
    wrong("kv_cache[2]", (LATENT, ROPE, SCALES[0, 0]), "axes ... num_kv_heads, 4), or ... (1, 4)"),
    wrong(
        "kv_cache", (LATENT, ROPE, SCALES, SCALES), " ... scales of an e4m3 cache, got 4 of them"
    ),
    wrong("kv_cache[0]", (ROPE, LATENT), "a last axis of 512 ... 64 RoPE ones: these look swapped"),
    wrong("kv_cache[0]", (ROPE.view(U8)[..., :64], ROPE, SCALES), "a last axis of 512, got shape"),
    *(
        wrong(
            "kv_cache", np.zeros((6, 64, 1, n), U8), "a last axis of 576 e4m3 ... 656 bytes ... got"
        )
        for n in (512, 640, 655)
    ),
    wrong("kv_cache", np.zeros((6, 64, 1, 656), E4M3), "packed rows as uint8, got float8_e4m3fn"),
    wrong("kv_cache", np.zeros((6, 64, 1, 328), F16), "packed rows as uint8, got float16; pass a"),
    wrong("kv_cache", np.zeros((6, 64, 1, 656), F16), "a last axis of 576 ... got ... 656); pass"),
    *(
        Refusal(
            {"q": aligned((2, 2, 16, columns)), "kv_cache": np.zeros((6, 64, 584), dtype)},
            ValueError,
            "kv_cache: needs ... got V4's slots of 584; pass them to mla_sparse_decode or mla_spar",
        )
        for columns, dtype in ((576, U8), (512, E4M3))
    ),
    wrong("kv_cache", np.zeros((0, 64, 1, 656), U8), "at least one token, got shape (0, 64"),
    Refusal(
        {"kv_cache": make_cache("packed", heads=3)}, ValueError, "num_heads: ... and 3 kv heads"
    ),
    wrong("kv_cache", aligned((6, 64, 1, 584), U8)[..., :576], "strides ... 16 bytes ... got 584"),
    wrong("kv_cache", aligned((6, 64, 1, 656), U8, shift=8), "an address that is a multiple of 16"),
    *(
        wrong("kv_cache[2]", (LATENT, ROPE, scales), need)
        for scales, need in (
            (aligned((6, 64, 1, 6), F32)[..., :4], "strides that are multiples of 16 bytes"),
            (aligned((6, 64, 1, 4), F32, shift=4), "an address that is a multiple of 16 bytes"),
            (aligned((6, 64, 1, 8), F32)[..., ::2], "a contiguous last axis"),
        )
    ),
]
FACTORS = [
    *NO_FACTORS,
    *(
        wrong("kv_scale", value, f"a number from 2 ** -126 to 2 ** 126, got {value}; pass")
        for value in (0.0, -1.0, float("nan"), float("inf"))
    ),
    wrong_type("kv_scale", np.ones((), np.float64), "float32, got float64; convert"),
    wrong("kv_scale", np.ones(2, F32), "one element, got shape (2,)"),
    wrong("kv_scale", np.ones(0, F32), "one element, got shape (0,)"),
    wrong("kv_scale", aligned((1,), F32, shift=1), "an address that is a multiple of 4 bytes"),
    *(
        Refusal(
            {"kv_cache": cache, "kv_scale": scale}, ValueError, f"kv_scale: needs {NO_SCALES}{got}"
        )
        for scale in (1.0, np.ones((), F32))
        for cache, got in (
            (make_cache("scales"), "scales for each row beside RoPE columns of bfloat16; leave it"),
            (make_cache("packed"), "scales for each row beside RoPE columns of bfloat16; leave it"),
            (aligned((6, 64, 1, 576)), "bfloat16; leave it out"),
        )
    ),
]
QUERIES = [
    Refusal({"q": q} | ({} if c is None else {"kv_cache": c}), TypeError, f"{name}: needs {need}")
    for q, name in (
        (aligned((2, 2, 16, 576), F16), "q"),
        ((aligned((2, 2, 16, 512), F16), aligned((2, 2, 16, 64), F16)), "q[0]"),
    )
    for c, need in (
        (None, "bfloat16 with kv_cache of float8_e4m3fn, got float16; convert it first"),
        (make_cache("pair of bytes"), "bfloat16 with kv_cache[0] of uint8, got float16; convert"),
    )
]
REFUSED = [
    pytest.param({"kv_scale": None} | r.changes, *r[1:], id=r.message[:60])
    for r in CACHES + QUERIES
] + [pytest.param(*r, id=r.message[:60]) for r in FACTORS]


@both
@pytest.mark.parametrize(("changes", "error", "message"), REFUSED)
def test_refusals(
    changes: dict[str, Any], error: type[Exception], message: str, call: Call
) -> None:
    with refused(error, message):
        call(**make("one") | changes)


@every_way
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_products_in_fp8_of_16_bits(dtype: Any, call: Call) -> None:
    arguments = {"q": aligned((2, 2, 16, 576), dtype), "kv_cache": aligned((6, 64, 1, 576), dtype)}
    name = np.dtype(dtype).name
    need = "needs a kv_cache of float8_e4m3fn, or of its bits as uint8"
    message = f"fp8_products: {need}, got {name}; leave it out"
    with refused(ValueError, message):
        call(**arguments, fp8_products=True)
    call(**arguments, fp8_products=False)


def test_check_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    arguments = make("packed")
    decode(**arguments)
    with refused(ValueError, "block_table[1, 2]: needs a page number from 0 to 5"):
        cumla.mla_decode(**arguments, block_table=TABLE + np.int32(1), kv_lens=LENGTHS)


@every_way
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_check_mode_looks_at_factors(
    value: float, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    need = f"a number from 2 ** -126 to 2 ** 126, got {value}; pass"
    for shape, place in (((), ""), ((1,), "[0]"), ((1, 1), "[0, 0]")):
        with refused(ValueError, f"kv_scale{place}: needs {need}"):
            call(**make("one", kv_scale=np.full(shape, value, F32)))


@pytest.mark.parametrize("lengths", [[], [0, 3]])
def test_check_mode_looks_at_the_factor_of_any_batch(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of no requests, and where the first one has no tokens."""
    monkeypatch.setenv("CUMLA_CHECK", "1")
    count = len(lengths)
    arrays = {
        "q": aligned((count, 1, 16, 576)),
        "kv_cache": aligned((6, 64, 1, 576), E4M3),
        "block_table": np.zeros((count, 1), np.int32),
        "kv_lens": np.array(lengths, np.int32),
    }
    cumla.mla_decode(**arrays, kv_scale=np.full((1, 1), 2, F32))
    with refused(ValueError, "kv_scale[0, 0]: needs a number from 2 ** -126 to 2 ** 126, got nan;"):
        cumla.mla_decode(**arrays, kv_scale=np.full((1, 1), np.nan, F32))


# --- plans ----------------------------------------------------------------------------------------


def test_dtypes_of_plans() -> None:
    """And sizes of buffers: of 16 bits they are one."""
    for kind, numbers in ((cumla.MLADecodePlan, (3, 7, 16)), (cumla.MLAAttentionPlan, (3, 7, 16))):

        def plan(kind: Any = kind, numbers: Any = numbers, **options: Any) -> Any:
            return kind(*numbers, like=np.zeros(1), **options).key.cache

        def size(kind: Any = kind, numbers: Any = numbers, **options: Any) -> Any:
            return kind.workspace_bytes(*numbers, sm_count=132, **options)

        assert plan() == plan(cache_dtype="bfloat16") == "same"
        assert plan(cache_dtype="float16", dtype="float16") == "same"
        assert plan(cache_dtype="float8_e4m3fn") == "e4m3"
        assert size() == size(cache_dtype="bfloat16") == size(cache_dtype="float16")
        assert size(cache_dtype="float8_e4m3fn") > 0
        message = "cache_dtype: needs dtype's bfloat16, or float8_e4m3fn, got "
        for value in ("float16", "uint8", "fp8", 8):
            with refused(TypeError, f"{message}{value}; leave it out"):
                plan(cache_dtype=value)
        with refused(TypeError, f"{message}uint8"):
            size(cache_dtype="uint8")
        message = "dtype: needs bfloat16 with cache_dtype float8_e4m3fn, got float16; convert"
        with refused(TypeError, message):
            plan(cache_dtype="float8_e4m3fn", dtype="float16")


@pytest.mark.parametrize("ragged", [False, True])
def test_a_plan_serves_every_form_and_no_other_cache(ragged: bool) -> None:
    def make_plan(cache: Any) -> Any:
        if ragged:
            plan: Any = cumla.MLAAttentionPlan.from_arrays(q, cache, qo_indptr=INDPTR)
            plan.update(LENGTHS, qo_indptr=INDPTR)
        else:
            plan = cumla.MLADecodePlan.from_arrays(q, cache)
            plan.update(LENGTHS)
        return plan

    q = flat(make("one")["q"]) if ragged else make("one")["q"]
    plan = make_plan(make_cache("packed"))
    for form in FORMS:
        arguments = make(form)
        factor = arguments.get("kv_scale")
        got = plan.run(q, arguments["kv_cache"], block_table=TABLE, kv_scale=factor)
        want = (attend if ragged else decode)(**arguments)
        np.testing.assert_array_equal(got.out, want.out)
    whole = aligned((6, 64, 1, 576))
    message = "plan: made for a cache of float8_e4m3fn, got one of bfloat16; make a plan with the"
    with refused(ValueError, f"{message} cache_dtype of each"):
        plan.run(q, whole, block_table=TABLE)
    with refused(ValueError, "plan: made for a cache of bfloat16, got one of float8_e4m3fn"):
        make_plan(whole).run(q, make_cache("one"), block_table=TABLE)


# --- which kernels --------------------------------------------------------------------------------


def on_gpu(cupy: FakeCuPy, form: str, heads: int = 16, **options: Any) -> list[Callable[[], Any]]:
    """Calls of both operations and their plans on the GPU."""
    parts = tuple(aligned((6, 64, 1, n), d) for n, d in FORMS.get(form, ((576, BF16),)))
    cache = cupy.like(parts if len(parts) > 1 else parts[0])
    q, rows = cupy.like(aligned((2, 2, heads, 576))), cupy.like(aligned((4, heads, 576)))
    table, lengths, indptr = map(cupy.like, (TABLE, LENGTHS, INDPTR))
    options = {n: v if isinstance(v, bool) else cupy.like(v) for n, v in options.items()}

    def planned() -> Any:
        plan = cumla.MLADecodePlan.from_arrays(q, cache)
        plan.update(lengths)
        return plan.run(q, cache, block_table=table, **options)

    def planned_ragged() -> Any:
        plan = cumla.MLAAttentionPlan.from_arrays(rows, cache, qo_indptr=indptr)
        plan.update(lengths, qo_indptr=indptr)
        return plan.run(rows, cache, block_table=table, **options)

    return [
        lambda: cumla.mla_decode(q, cache, table, lengths, **options),
        planned,
        lambda: cumla.mla_attention(
            rows, cache, block_table=table, kv_lens=lengths, qo_indptr=indptr, **options
        ),
        planned_ragged,
    ]


@pytest.mark.parametrize("form", ["16 bits", *FORMS])
def test_kernels(form: str, cupy: FakeCuPy, bindings: FakeBindings) -> None:
    """The cache that comes decides; a plan loads what any of its caches needs, and no more."""
    tail = "_grouped" if form in GROUPED else ""
    names = [f"mla_decode_fp8_32{tail}", f"mla_attention_fp8{tail and tail + '_rows'}"]
    if form == "16 bits":
        names = ["mla_decode_bfloat16", "mla_attention_bfloat16"]
    for call, name in zip(on_gpu(cupy, form), np.repeat(names, 2), strict=True):
        call()
        schedule, attend = bindings.entries
        assert "schedule" in schedule
        assert attend == name
    fp8 = {
        "mla_decode_fp8_32",
        "mla_decode_fp8_32_grouped",
        "mla_attention_fp8",
        "mla_attention_fp8_grouped_rows",
    }
    loaded = {entry for entry in cupy.compiled if "fp8" in entry}
    assert loaded == (set() if form == "16 bits" else fp8)


@pytest.mark.parametrize("form", GROUPED)
def test_packed_rows_have_a_kernel_for_few_query_rows(
    form: str, cupy: FakeCuPy, bindings: FakeBindings
) -> None:
    name = "mla_decode_fp8_16_packed" if form == "packed" else "mla_decode_fp8_16_grouped"
    for call in on_gpu(cupy, form, heads=8)[:2]:
        call()
        assert bindings.entries[-1] == name
    assert {f"mla_decode_fp8_16{tag}" for tag in ("", "_grouped", "_packed")} <= set(cupy.compiled)


@pytest.mark.parametrize("form", ["pair", "scales"])
def test_broadcast_arrays_have_the_kernel_of_any_pages(
    form: str, cupy: FakeCuPy, bindings: FakeBindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver might refuse to describe strides of 0 to the copy engine."""
    whole = cupy.like

    def like(value: Any, device: int = 0) -> Any:
        there = whole(value, device)
        if isinstance(value, tuple):
            there[-1].strides = (0, 0, 0, there[-1].strides[3])
        return there

    monkeypatch.setattr(cupy, "like", like)
    tail = "_grouped_rows" if form == "scales" else "_rows"
    for call, name in zip(
        on_gpu(cupy, form), np.repeat(["mla_decode_fp8_32", "mla_attention_fp8"], 2), strict=True
    ):
        call()
        assert bindings.entries[-1] == name + tail


@pytest.mark.parametrize(
    ("form", "heads", "tail"),
    [
        ("one", 64, "_fp8_products_fp8_rope"),
        ("bytes", 128, "_fp8_products_fp8_rope"),
        ("pair", 64, "_fp8_products_fp8_rope"),
        ("16-bit rope", 64, "_fp8_products"),
        *((form, 64, None) for form in GROUPED),
        ("one", 16, None),
        ("16-bit rope", 96, None),
    ],
)
def test_kernels_for_products_in_fp8(
    form: str, heads: int, tail: str | None, cupy: FakeCuPy, bindings: FakeBindings
) -> None:
    """Where there are none, the kernel is that of the call without the option."""
    kinds = np.repeat(["mla_decode", "mla_attention"], 2)
    both = on_gpu(cupy, form, heads), on_gpu(cupy, form, heads, fp8_products=True)
    for call, allowed, kind in zip(*both, kinds, strict=True):
        call()
        plain = bindings.entries[-1]
        allowed()
        assert bindings.entries[-1] == (plain if tail is None else f"{kind}{tail}") != ""
        assert "fp8_products" not in plain


@pytest.mark.parametrize("operation", [0, 2])
def test_launches_see_factors_and_parts(
    operation: int, cupy: FakeCuPy, bindings: FakeBindings
) -> None:
    """Each number has a launch; none is 1.0; an array is none of them."""
    q, rows = cupy.like(aligned((2, 2, 16, 576))), cupy.like(aligned((4, 16, 576)))
    cache = cupy.like(tuple(aligned((6, 64, 1, n), d) for n, d in FORMS["scales, e4m3 rope"]))
    table, lengths, indptr = map(cupy.like, (TABLE, LENGTHS, INDPTR))
    out = cupy.like(aligned((4, 16, 512) if operation else (2, 2, 16, 512)))
    lse = cupy.like(aligned((4, 16) if operation else (2, 2, 16), F32))
    plan: Any
    if operation:
        plan = cumla.MLAAttentionPlan.from_arrays(rows, cache, qo_indptr=indptr)
        plan.update(lengths, qo_indptr=indptr)
    else:
        plan = cumla.MLADecodePlan.from_arrays(q, cache)
        plan.update(lengths)

    def run(factor: Any) -> int:
        bindings.launched.clear()
        queries = rows if operation else q
        plan.run(queries, cache, block_table=table, kv_scale=factor, out=out, lse=lse)
        (launch,) = bindings.launched
        return launch.parameters

    factor = cupy.like(np.ones((), F32))
    run(None)  # arrays of a kind that is known from now on
    first = [run(value) for value in (None, 0.5, factor)]
    assert len(set(first)) == 3
    assert [run(value) for value in (None, 0.5, factor)] == first
    for part in (*cache, factor):
        part.data.ptr += 1 << 20
        moved = run(factor)
        assert moved not in first
        assert run(factor) == moved
        part.data.ptr -= 1 << 20
        assert run(factor) == first[2]
    factor.dtype = np.dtype(np.float64)
    with refused(TypeError, "kv_scale: needs float32, got float64"):
        run(factor)


@pytest.mark.parametrize("operation", [0, 2])
def test_runs_that_are_known_tell_products_in_fp8_apart(
    operation: int, cupy: FakeCuPy, bindings: FakeBindings
) -> None:
    """One plan, one schedule, the same arrays: layers with the option and without it in turns."""
    q = cupy.like(aligned((4, 64, 576) if operation else (2, 2, 64, 576)))
    cache = cupy.like(aligned((6, 64, 1, 576), E4M3))
    table, lengths, indptr = map(cupy.like, (TABLE, LENGTHS, INDPTR))
    out = cupy.like(aligned((*q.shape[:-1], 512)))
    plan: Any
    if operation:
        plan = cumla.MLAAttentionPlan.from_arrays(q, cache, qo_indptr=indptr)
        plan.update(lengths, qo_indptr=indptr)
    else:
        plan = cumla.MLADecodePlan.from_arrays(q, cache)
        plan.update(lengths)

    def run(**option: Any) -> str:
        bindings.launched.clear()
        plan.run(q, cache, block_table=table, out=out, **option)
        (entry,) = bindings.entries
        return entry

    for _ in range(3):
        assert "fp8_products" not in run()
        assert "fp8_products" in run(fp8_products=True)
        assert "fp8_products" not in run(fp8_products=np.False_)
        for value in (1, 0, None):
            with refused(TypeError, "fp8_products: needs True or False, got"):
                run(fp8_products=value)
