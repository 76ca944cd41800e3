# SPDX-License-Identifier: Apache-2.0
"""FP8 caches in `cumla.mla_decode` and `cumla.mla_attention` on the CPU: results and errors.

What the caches stand for is tested in tests/reference/mla/test_fp8_decode.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cumla
from cumla import reference
from tests.mla.fp8_arrays import BF16, FORMS, FP8, SCALED, aligned, make_cache, parts_of

Call = Callable[..., Any]
TABLE = np.arange(6, dtype=np.int32).reshape(2, 3)
LENGTHS = np.array([5, 130], np.int32)


def make(form: str, **changes: Any) -> dict[str, Any]:
    """Arguments of both operations, but for lengths and the axes of q."""
    q = np.random.default_rng(0).standard_normal((2, 2, 16, 576)).astype(BF16)
    arguments: dict[str, Any] = {"q": q, "kv_cache": make_cache(form)}
    if form in SCALED:
        arguments["kv_scale"] = 0.01
    return arguments | changes


def decode(q: Any, kv_cache: Any, **options: Any) -> Any:
    return cumla.mla_decode(q, kv_cache, TABLE, LENGTHS, **options)


def attend(q: Any, kv_cache: Any, **options: Any) -> Any:
    """The same as a ragged call."""
    parts = tuple(part.reshape(4, *part.shape[2:]) for part in parts_of(q))
    lengths = {"qo_indptr": np.array([0, 2, 4], np.int32), "kv_lens": LENGTHS}
    rows = parts if len(parts) > 1 else parts[0]
    return cumla.mla_attention(rows, kv_cache, **lengths, block_table=TABLE, **options)


def planned(q: Any, kv_cache: Any, **options: Any) -> Any:
    plan = cumla.MLADecodePlan.from_arrays(q, kv_cache)
    plan.update(LENGTHS)
    return plan.run(q, kv_cache, TABLE, LENGTHS, **options)


def planned_ragged(q: Any, kv_cache: Any, **options: Any) -> Any:
    q, indptr = q.reshape(4, *q.shape[2:]), np.array([0, 2, 4], np.int32)
    plan = cumla.MLAAttentionPlan.from_arrays(q, kv_cache, indptr)
    plan.update(indptr, LENGTHS)
    return plan.run(q, kv_cache, TABLE, **options)


BOTH = pytest.mark.parametrize("call", [decode, attend])


def refuse(call: Call, error: type[Exception], *fragments: str, **arguments: Any) -> None:
    """The call fails; its message begins with the first fragment and has the others in turn."""
    with pytest.raises(error) as caught:
        call(**arguments)
    message, end = str(caught.value), 0
    assert message.startswith(fragments[0]), message
    for fragment in fragments:
        assert fragment in message[end:], message
        end = message.index(fragment, end) + len(fragment)


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [decode, attend, planned, planned_ragged])
@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str, call: Call) -> None:
    arguments = make(form)
    want = reference.mla_decode(block_table=TABLE, kv_lens=LENGTHS, **arguments)
    assert 0.05 < np.abs(want.out.astype(float)).max() < 10
    got = call(**arguments)
    np.testing.assert_array_equal(got.out.reshape(want.out.shape), want.out)
    assert got.out.dtype == BF16
    lse = got.lse if got.lse.ndim == 3 else got.lse.reshape(2, 2, 16).transpose(0, 2, 1)
    np.testing.assert_array_equal(lse, want.lse)


@BOTH
@pytest.mark.parametrize(
    "kv_scale",
    [np.float64(0.01), np.array(0.01, np.float32), np.full((1, 1), 0.01, np.float32)],
    ids=["number", "0-d", "2-d"],
)
@pytest.mark.parametrize("form", SCALED)
def test_kinds_of_factors(form: str, kv_scale: Any, call: Call) -> None:
    want, got = call(**make(form)), call(**make(form, kv_scale=kv_scale))
    np.testing.assert_array_equal(got.out, want.out)
    other = call(**make(form, kv_scale=0.02))
    assert not np.array_equal(other.lse, want.lse)


@BOTH
@pytest.mark.parametrize("form", FORMS)
def test_pairs_of_queries_and_float32_outputs(form: str, call: Call) -> None:
    arguments = make(form)
    want = call(**arguments)
    q = arguments["q"]
    out = np.empty(want.out.shape, np.float32)
    halves = aligned((2, 2, 16, 512), BF16), aligned((2, 2, 16, 64), BF16)
    halves[0][...], halves[1][...] = q[..., :512], q[..., 512:]
    got = call(**arguments | {"q": halves}, out=out)
    assert got.out is out
    np.testing.assert_array_equal(out.astype(BF16), want.out)


@BOTH
def test_parts_lie_anywhere(call: Call) -> None:
    """Padded rows, rows beside each other's, heads between: strides of 16 bytes."""
    arguments = make("scales")
    want = call(**arguments)
    latent, rope, scales = arguments["kv_cache"]
    wide = aligned((6, 65, 2, 704), np.uint8, shift=16)
    places = wide[:, :64, :1, 16:528], wide[:, :64, :1, 544:672], wide[:, :64, :1, 688:]
    parts = places[0], places[1].view(BF16), places[2].view(np.float32)
    for part, values in zip(parts, (latent, rope, scales), strict=True):
        part[...] = values
    got = call(**arguments | {"kv_cache": parts})
    np.testing.assert_array_equal(got.out, want.out)
    one_row = aligned((4,), np.float32)
    one_row[:] = 0.25
    broadcast = np.broadcast_to(one_row, scales.shape)
    scales[...] = 0.25
    np.testing.assert_array_equal(
        call(**arguments | {"kv_cache": (latent, rope, broadcast)}).out, call(**arguments).out
    )


# --- frameworks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_torch(form: str) -> None:
    torch = pytest.importorskip("torch")

    def tensor(array: np.ndarray) -> Any:
        if array.dtype == FP8:
            return torch.from_numpy(array.view(np.uint8)).view(torch.float8_e4m3fn)
        if array.dtype == BF16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    arguments = make(form)
    want = decode(**arguments)
    cache = tuple(map(tensor, parts_of(arguments["kv_cache"])))
    kv_scale = torch.tensor(0.01) if form in SCALED else None
    got = cumla.mla_decode(
        tensor(arguments["q"]),
        cache if len(cache) > 1 else cache[0],
        *map(torch.from_numpy, (TABLE, LENGTHS)),
        kv_scale=kv_scale,
    )
    assert got.out.dtype == torch.bfloat16
    assert (got.out.view(torch.int16).numpy() == want.out.view(np.int16)).all()


@pytest.mark.parametrize("form", FORMS)
def test_jax(form: str) -> None:
    """Its arrays may be read: e4m3, bytes, and the factor."""
    jax = pytest.importorskip("jax")
    arguments = make(form)
    want = decode(**arguments)
    cache = tuple(map(jax.numpy.asarray, parts_of(arguments["kv_cache"])))
    got = cumla.mla_decode(
        jax.numpy.asarray(arguments["q"]),
        cache if len(cache) > 1 else cache[0],
        *map(jax.numpy.asarray, (TABLE, LENGTHS)),
        kv_scale=jax.numpy.float32(0.01) if form in SCALED else None,
    )
    assert isinstance(got.out, jax.Array)
    np.testing.assert_array_equal(np.asarray(got.out), want.out)


# --- what is refused ------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("form", FORMS)
def test_queries_are_bfloat16(form: str, call: Call) -> None:
    q = np.zeros((2, 2, 16, 576), np.float16)
    name = "kv_cache" if len(FORMS[form]) == 1 else "kv_cache[0]"
    dtype = np.dtype(FORMS[form][0][1]).name
    message = f"q: needs bfloat16 with {name} of {dtype}, got float16; convert it first"
    refuse(call, TypeError, message, **make(form, q=q))
    pair = aligned((2, 2, 16, 512), np.float16), aligned((2, 2, 16, 64), np.float16)
    refuse(call, TypeError, f"q[0]: {message[3:]}", **make(form, q=pair))
    refuse(call, TypeError, "q: needs bfloat16 or float16", **make(form, q=q.astype(FP8)))


@BOTH
def test_dtypes_of_parts(call: Call) -> None:
    def parts(*dtypes: Any) -> dict[str, Any]:
        widths = (512, 64, 4)
        cache = tuple(aligned((6, 64, 1, n), d) for n, d in zip(widths, dtypes, strict=False))
        return make("pair", kv_cache=cache)

    message = "kv_cache[1]: needs bfloat16 or float8_e4m3fn, got "
    refuse(call, TypeError, message, "float16; convert", **parts(FP8, np.float16))
    refuse(call, TypeError, message, "uint8; convert it first", **parts(FP8, np.uint8))
    refuse(call, TypeError, "kv_cache[1]: needs bfloat16 or uint8", **parts(np.uint8, FP8))
    refuse(call, TypeError, "kv_cache[1]: needs q's dtype bfloat16", **parts(BF16, FP8))
    refuse(call, TypeError, "kv_cache[2]: needs float32, got bfloat16", **parts(FP8, BF16, BF16))
    message = "kv_cache[2]: needs kv_cache[0] of float8_e4m3fn or uint8, got bfloat16; leave"
    refuse(call, TypeError, message, **parts(BF16, BF16, np.float32))
    whole = aligned((6, 64, 1, 576), np.int8)
    refuse(call, TypeError, "kv_cache: needs q's", "got int8", **make("one", kv_cache=whole))


@BOTH
def test_shapes_of_parts(call: Call) -> None:
    latent, rope, scales = make_cache("scales")
    narrow = rope.view(np.uint8)[..., :64]
    for cache, fragments in (
        ((latent, rope[:5], scales), ("kv_cache[1]: ", "(6, 64, 1)", "(5, 64, 1)", "; pass both")),
        ((latent, rope, scales[:5]), ("kv_cache[2]: ", "(6, 64, 1)", "(5, 64, 1)", "; pass both")),
        ((latent, rope, scales[:, :63]), ("kv_cache[2]: ", "first axes of kv_cache[0]")),
        ((latent, rope, scales[..., :1]), ("kv_cache[2]: ", "a last axis of 4", "(6, 64, 1, 1)")),
        ((latent, rope, scales[0, 0]), ("kv_cache[2]: ", "num_kv_heads, 4), or", "(1, 4)")),
        ((latent, rope, scales, scales), ("kv_cache: ", "the scales of an e4m3", "got 4 arrays")),
        ((narrow, rope, scales), ("kv_cache[0]: ", "a last axis of 512", "(6, 64, 1, 64)")),
    ):
        refuse(call, ValueError, *fragments, **make("scales", kv_cache=cache))
    for columns in (512, 640, 655):
        cache = np.zeros((6, 64, 1, columns), np.uint8)
        message = ("kv_cache: needs a last axis of 576 e4m3", "656 bytes", f"1, {columns}); pass")
        refuse(call, ValueError, *message, **make("bytes", kv_cache=cache))
    wide = np.zeros((6, 64, 1, 656), FP8)
    refuse(call, ValueError, "kv_cache: needs a last axis of 576", **make("one", kv_cache=wide))
    none = np.zeros((0, 64, 1, 656), np.uint8)
    refuse(call, ValueError, "kv_cache: needs at least", **make("packed", kv_cache=none))
    heads = make_cache("packed", heads=3)
    refuse(call, ValueError, "num_heads: needs", "3 kv", **make("packed", kv_cache=heads))


@BOTH
def test_layouts(call: Call) -> None:
    narrow = aligned((6, 64, 1, 584), np.uint8)[..., :576]
    message = ("kv_cache: needs strides that are multiples of 16 bytes", "got 584")
    refuse(call, ValueError, *message, **make("bytes", kv_cache=narrow))
    shifted = aligned((6, 64, 1, 656), np.uint8, shift=8)
    message = ("kv_cache: needs an address that is a multiple of 16 bytes",)
    refuse(call, ValueError, *message, **make("packed", kv_cache=shifted))
    latent, rope, _ = make_cache("scales")
    for scales, need in (
        (aligned((6, 64, 1, 6), np.float32)[..., :4], "strides that are multiples of 16 bytes"),
        (aligned((6, 64, 1, 4), np.float32, shift=4), "an address that is a multiple of 16 bytes"),
        (aligned((6, 64, 1, 8), np.float32)[..., ::2], "a contiguous last axis"),
    ):
        arguments = make("scales", kv_cache=(latent, rope, scales))
        refuse(call, ValueError, f"kv_cache[2]: needs {need}", **arguments)


@BOTH
def test_factors_that_do_not_fit(call: Call) -> None:
    for wrong, error, message in (
        (True, TypeError, "kv_scale: needs a number, or an array of one float32, got bool"),
        ("1", TypeError, "kv_scale: needs an array of CuPy, PyTorch, JAX or NumPy"),
        (0.0, ValueError, "kv_scale: needs a number from 2 ** -126 to 2 ** 126, got 0.0; pass"),
        (-1.0, ValueError, "kv_scale: needs a number from"),
        (float("nan"), ValueError, "kv_scale: needs a number from"),
        (float("inf"), ValueError, "kv_scale: needs a number from"),
        (np.ones((), np.float64), TypeError, "kv_scale: needs float32, got float64; convert"),
        (np.ones(2, np.float32), ValueError, "kv_scale: needs one element, got shape (2,)"),
        (np.ones(0, np.float32), ValueError, "kv_scale: needs one element, got shape (0,)"),
        (
            aligned((5,), np.uint8, shift=1)[:4].view(np.float32),
            ValueError,
            "kv_scale: needs an address that is a multiple of 4 bytes",
        ),
    ):
        refuse(call, error, message, **make("one", kv_scale=wrong))


@BOTH
@pytest.mark.parametrize("kv_scale", [1.0, np.ones((), np.float32)])
def test_factors_that_nothing_needs(kv_scale: Any, call: Call) -> None:
    need = "kv_scale: needs a cache with e4m3 columns that have no scales of their own, got "
    for form in ("scales", "packed"):
        got = "scales for each row beside RoPE columns of bfloat16; leave it out"
        refuse(call, ValueError, need + got, **make(form, kv_scale=kv_scale))
    cache = aligned((6, 64, 1, 576), BF16)
    refuse(call, ValueError, f"{need}bfloat16", **make("one", kv_cache=cache, kv_scale=kv_scale))


# --- plans ----------------------------------------------------------------------------------------


def test_dtypes_of_plans() -> None:
    shape = {"like": np.zeros(1)}
    for make_plan in (
        lambda **options: cumla.MLADecodePlan(2, 2, 16, **shape, **options),
        lambda **options: cumla.MLAAttentionPlan(2, 4, 16, **shape, **options),
    ):
        assert make_plan().key.cache == "same"
        assert make_plan(cache_dtype="bfloat16").key.cache == "same"
        assert make_plan(cache_dtype="float16", dtype="float16").key.cache == "same"
        assert make_plan(cache_dtype="float8_e4m3fn").key.cache == "e4m3"
        message = "cache_dtype: needs dtype's bfloat16, or float8_e4m3fn, got "
        for wrong in ("float16", "uint8", "fp8", 8):
            refuse(make_plan, TypeError, f"{message}{wrong}; leave it out", cache_dtype=wrong)
        refuse(
            make_plan,
            TypeError,
            "dtype: needs bfloat16 with cache_dtype float8_e4m3fn, got float16; convert",
            cache_dtype="float8_e4m3fn",
            dtype="float16",
        )


@pytest.mark.parametrize("variant", ["swapped", "one_tile", "shared_blocks"])
def test_a_plan_of_fp8_caches_is_pinned_to_no_kernel(variant: str) -> None:
    message = ("variant: needs a cache of 16-bit numbers", f"got '{variant}'", "; leave it out")
    arguments = make("one")
    refuse(
        cumla.MLADecodePlan.from_arrays,
        ValueError,
        *message,
        q=arguments["q"][:, :1],
        kv_cache=arguments["kv_cache"],
        variant=variant,
    )


@pytest.mark.parametrize("form", FORMS)
def test_a_plan_serves_every_form_and_no_other_cache(form: str) -> None:
    """Made for one, it runs all; one for 16 bits runs none."""
    q, table = make(form)["q"], (TABLE, LENGTHS)
    plan = cumla.MLADecodePlan.from_arrays(q, make_cache(form))
    assert plan.key.cache == "e4m3"
    plan.update(LENGTHS)
    for other in FORMS:
        arguments = make(other)
        got = plan.run(q, arguments["kv_cache"], *table, kv_scale=arguments.get("kv_scale"))
        np.testing.assert_array_equal(got.out, decode(**arguments).out)
    whole = aligned((6, 64, 1, 576), BF16)
    message = "plan: made for a cache of float8_e4m3fn, got one of bfloat16; make a plan with"
    with pytest.raises(ValueError, match=f"^{message} the cache_dtype of each"):
        plan.run(q, whole, *table)
    usual = cumla.MLADecodePlan.from_arrays(q, whole)
    usual.update(LENGTHS)
    with pytest.raises(ValueError, match=r"^plan: made for a cache of bfloat16, got one of float8"):
        usual.run(q, make_cache(form), *table)


def test_a_plan_of_ragged_queries_tells_caches_apart() -> None:
    q, indptr = make("one")["q"].reshape(4, 16, 576), np.array([0, 2, 4], np.int32)
    plan = cumla.MLAAttentionPlan.from_arrays(q, make_cache("packed"), indptr)
    plan.update(indptr, LENGTHS)
    for form in FORMS:
        arguments = make(form)
        options = {n: v for n, v in arguments.items() if n == "kv_scale"}
        got = plan.run(q, arguments["kv_cache"], TABLE, **options)
        np.testing.assert_array_equal(got.out, attend(**arguments).out)
    with pytest.raises(ValueError, match=r"^plan: made for a cache of float8_e4m3fn, got one of b"):
        plan.run(q, aligned((6, 64, 1, 576), BF16), TABLE)


def test_sizes_of_buffers() -> None:
    """Of FP8 caches they may differ; of 16 bits they are one."""
    for make_size in (
        lambda **options: cumla.MLADecodePlan.workspace_bytes(3, 7, 16, sm_count=132, **options),
        lambda **options: cumla.MLAAttentionPlan.workspace_bytes(3, 7, 16, sm_count=132, **options),
    ):
        assert make_size() == make_size(cache_dtype="bfloat16") == make_size(cache_dtype="float16")
        assert make_size(cache_dtype="float8_e4m3fn") > 0
        message = "cache_dtype: needs dtype's bfloat16, or float8_e4m3fn, got uint8"
        refuse(make_size, TypeError, message, cache_dtype="uint8")


def test_check_mode_looks_at_lengths_and_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    arguments = make("packed")
    decode(**arguments)
    with pytest.raises(ValueError, match=r"^block_table\[1, 2\]: needs a page number from 0 to 5"):
        cumla.mla_decode(**arguments, block_table=TABLE + np.int32(1), cache_seqlens=LENGTHS)
