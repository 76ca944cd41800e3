# SPDX-License-Identifier: Apache-2.0
"""`cumla.append_mla_cache` into caches of 16 bits and of e4m3: what it refuses, and what it
launches. What holds for every operation is in tests/core, what is written in tests/reference."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla.mla.shape import FORMATS, WRITTEN
from tests.calls import (
    BF16,
    E4M3,
    NO_FACTORS,
    Arguments,
    Refusal,
    aligned,
    all_of,
    badly_laid_out,
    broadcast,
    frozen,
    int32,
    refused,
    rows_by_request,
    wrong,
    wrong_type,
)
from tests.calls import rows as rotating
from tests.fake_cuda import FakeBindings, FakeCuPy

F16, F32, U8 = np.float16, np.float32, np.uint8


def slots(**changes: Any) -> Arguments:
    """Rows into slots, with changes."""
    arguments = {
        "rows": aligned((5, 576)),
        "kv_cache": aligned((6, 16, 576)),
        "slot_mapping": int32(3, -1, 95, 17, 0),
    }
    return arguments | changes


def by_list(**changes: Any) -> Arguments:
    pages = {"kv_indices": int32(0, 1, 5, 2), "kv_indptr": int32(0, 2, 4)}
    return rows_by_request() | {"block_table": None} | pages | changes


def one(dtype: Any = E4M3) -> Any:
    return aligned((6, 16, 576), dtype)


def pair(latent: Any = E4M3, rope: Any = BF16) -> Any:
    return aligned((6, 16, 512), latent), aligned((6, 16, 64), rope)


def triple(latent: Any = E4M3, rope: Any = BF16, scales: Any = F32) -> Any:
    return (*pair(latent, rope), aligned((6, 16, 4), scales))


def packed() -> Any:
    return aligned((6, 16, 656), U8)


def v4(dtype: Any = U8) -> Any:
    return aligned((6, 16, 1, 584), dtype)


def v4_pages(*strides: int, pages: int = 6, shift: int = 0) -> Any:
    """Pages of 16 of V4's slots, with these strides."""
    memory = aligned((1 << 17,), U8, shift)
    return np.lib.stride_tricks.as_strided(memory, (pages, 16, 1, 584), strides)


def narrow(dtype: Any = BF16, columns: int = 512) -> Any:
    return aligned((5, columns), dtype)


def halves(latent: Any = BF16, rope: Any = BF16) -> Any:
    return aligned((5, 512), latent), aligned((5, 64), rope)


@pytest.mark.parametrize(
    "kv_cache",
    [
        aligned((6, 16, 1, 576)),
        pair(BF16),
        list(pair(F16, F16)),
        one(),
        one(U8),
        pair(),
        pair(U8, F16),
        pair(E4M3, E4M3),
        triple(),
        list(triple(U8, F16)),
        packed(),
        aligned((6, 16, 672), U8)[..., :656],
    ],
)
def test_caches_that_work(kv_cache: Any) -> None:
    assert cumla.append_mla_cache(**slots(kv_cache=kv_cache, rows=aligned((5, 576), F32))) is None


@pytest.mark.parametrize(
    "kv_cache",
    [
        v4(),
        v4(E4M3),
        v4()[:, :, 0],
        aligned((6, 1, 1, 592), U8)[..., :584],  # pages of one slot
        aligned((1, 7, 1, 584), U8),
        v4_pages(16 * 584 + 16, 584, 584, 1),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_slots_of_v4_that_work(dtype: Any, kv_cache: Any) -> None:
    parts = aligned((5, 448), dtype), aligned((5, 64), dtype)
    for rows in (narrow(dtype), narrow(dtype)[:, None], narrow(dtype, 520)[:, :512], parts):
        assert cumla.append_mla_cache(**slots(kv_cache=kv_cache, rows=rows)) is None


# --- what is refused ------------------------------------------------------------------------------

CACHE_AXES = "axes (num_pages, page_size, num_kv_heads, 576), or the same without num_kv_heads"
SLOTS = [
    *(
        wrong_type("kv_cache", one(dtype), f"bfloat16 or float16 ... got {dtype}; convert it")
        for dtype in ("float32", "float64", "int8")
    ),
    wrong_type("kv_cache[1]", pair(BF16, F16), "the dtype of kv_cache[0], bfloat16, got float16"),
    wrong_type("kv_cache[1]", pair(rope=F32), " ... got float32"),
    wrong_type("kv_cache[1]", pair(BF16, E4M3), "the dtype of kv_cache[0], bfloat16, got float8"),
    wrong_type("kv_cache[1]", pair(E4M3, U8), "the dtype of kv_cache[0], float8_e4m3fn, got uint8"),
    wrong_type("kv_cache[2]", triple(BF16), "kv_cache[0] of ... got bfloat16 and bfloat16; leave"),
    wrong_type(
        "kv_cache[2]", triple(E4M3, E4M3), "kv_cache[0] of ... got float8_e4m3fn and float8"
    ),
    wrong_type("kv_cache[2]", triple(scales=BF16), "float32, got bfloat16; convert"),
    *(
        wrong(
            "kv_cache[2]",
            (*pair(), aligned(shape, F32)),
            f"the axes of kv_cache[0], (6, 16, 1), and 4 scales, got shape {shape}; pass three",
        )
        for shape in ((6, 15, 4), (6, 16, 8), (6, 16, 1))
    ),
    wrong(
        "kv_cache[2]",
        (*pair(), aligned((6, 16, 6), F32)[..., :4]),
        "strides that are multiples of 16 bytes",
    ),
    wrong("kv_cache", aligned((6, 16, 656), E4M3), "a last axis of 576 ... got shape (6, 16, 656)"),
    wrong("kv_cache", aligned((6, 16, 664), U8)[..., :656], "strides that are multiples of 16"),
    wrong("kv_cache", aligned((6, 16, 656), U8, 8), "an address that is a multiple of 16 bytes"),
    *(
        wrong("kv_cache", aligned(shape), f"{CACHE_AXES}, got shape {shape}; reshape")
        for shape in ((96, 576), (1, 6, 16, 1, 576))
    ),
    *(
        wrong("kv_cache", aligned(shape), f"at least one element ... got shape {shape}; skip")
        for shape in ((0, 16, 576), (6, 0, 576), (6, 16, 0, 576))
    ),
    *(
        wrong(
            "kv_cache[1]",
            (aligned((6, 16, 512)), aligned((*lead, 64))),
            "the axes of kv_cache[0], (6, 16, 1), and 64 columns, got shape",
        )
        for lead in ((6, 15), (6, 16, 2))
    ),
    wrong_type("rows", aligned((5, 576), F16), "kv_cache's dtype bfloat16, or float32, got float1"),
    wrong_type("rows", aligned((5, 576), "i2"), "kv_cache's dtype bfloat16, or float32, got int16"),
    wrong_type("rows[1]", halves(rope=F32), "the dtype of rows[0], bfloat16, got float32; convert"),
    *(
        wrong("rows", aligned(shape), f"axes (tokens, num_kv_heads, 576) ... got shape {shape}; re")
        for shape in ((576,), (5, 1, 1, 576))
    ),
    wrong("rows", aligned((5, 2, 576)), "the 1 kv heads of kv_cache, got shape (5, 2, 576); pass"),
    *(
        wrong(name, value[::-1], "a last axis of 512 (of a pair of 512 ... ; these look swapped: p")
        for name, value in (("kv_cache[0]", pair()), ("rows[0]", halves()))
    ),
    wrong("rows[1]", (halves()[0], halves()[1][:4]), "the axes of rows[0]"),
    *(
        refusal
        for name, lead in (("rows", (5,)), ("kv_cache", (6, 16)))
        for refusal in (
            wrong(
                name, aligned((*lead, 448)), f"a last axis of 576 ... pair ... {(*lead, 448)}; join"
            ),
            wrong(name, np.zeros((), BF16), "a last axis of 576 ... got shape ()"),
            wrong(f"{name}[0]", (aligned((*lead, 64)),) * 2, "a last axis of 512 ... pair"),
            wrong(f"{name}[1]", (aligned((*lead, 512)),) * 2, "a last axis of 64 ... pair"),
            wrong(name, (aligned((*lead, 512)),) * 4, "one array, or a tuple or list ... got 4 of"),
        )
    ),
    *(
        wrong_type("slot_mapping", np.zeros(5, d), f"int32 or int64, got {d}; convert it first")
        for d in ("uint32", "int16", "float32")
    ),
    *(
        wrong("slot_mapping", np.zeros(shape, int), f"shape (tokens,) with tokens 5, got {shape}")
        for shape in ((4,), (5, 1), ())
    ),
    *(
        wrong(
            "slot_mapping", aligned((5,), d, 2), f"an address and strides that are multiples of {n}"
        )
        for d, n in (("i4", 4), ("i8", 8))
    ),
    *(
        Refusal(
            {name: np.zeros(5, np.int32)}, ValueError, f"{name}: needs a call without slot_mapp"
        )
        for name in ("batch_indices", "block_table", "kv_indices", "kv_indptr")
    ),
    wrong("positions", np.arange(5), "batch_indices ... or cos_sin ... got neither; leave it out"),
    *(
        wrong("kv_scale", scale, "an e4m3 cache with one scale for all of it, got bfloat16; leave")
        for scale in (1.0, np.float32(2), np.ones((), F32))
    ),
    *badly_laid_out("rows", aligned((5, 576))),
    *badly_laid_out("rows", aligned((5, 576), F32)),
    *badly_laid_out("kv_cache", one(BF16)),
    wrong("kv_cache", broadcast(one(BF16)), "memory of its own for each element ... ; copy"),
    wrong("kv_cache", frozen(one(BF16)), "an array that can be written to, got a read-only one"),
]
BY_REQUEST = [
    *(
        wrong_type(name, np.zeros(5, "f4"), "int32 or int64, got float32; convert")
        for name in ("batch_indices", "positions")
    ),
    *(
        wrong(name, np.zeros(4, int), "shape (tokens,) with tokens 5, got (4,); reshape it")
        for name in ("batch_indices", "positions")
    ),
    *(
        Refusal({name: None}, ValueError, f"{name}: needed where there is no slot_mapping")
        for name in ("batch_indices", "positions")
    ),
    wrong_type("block_table", np.zeros((2, 2), int), "int32, got int64; convert"),
    wrong("block_table", int32(0, 1, 2, 3), "shape (batch, max_pages), got (4,)"),
    *(
        Refusal(
            dict.fromkeys(("block_table",)) | pages, ValueError, f"block_table: needs either {got}"
        )
        for pages, got in (
            ({}, " ... got none of them; pass one form"),
            ({"kv_indices": int32(0)}, " ... got kv_indices; pass one"),
            ({"kv_indptr": int32(0)}, " ... got kv_indptr; pass one"),
            (
                {"block_table": int32([0]), "kv_indptr": int32(0)},
                " ... got block_table and kv_indptr; pass one",
            ),
        )
    ),
]
BY_LIST = [
    wrong_type("kv_indices", np.zeros(4, int), "int32, got int64"),
    wrong_type("kv_indptr", np.zeros(3, int), "int32, got int64"),
    wrong("kv_indices", np.zeros((2, 2), np.int32), "shape (entries,), got (2, 2)"),
    wrong("kv_indptr", np.zeros((3, 1), np.int32), "shape (batch + 1,), got (3, 1)"),
    wrong(
        "kv_indptr", int32(), "shape (batch + 1,), got (0,); pass where each request's list ends"
    ),
]
ROTATING = [
    wrong_type("cos_sin", aligned((9, 64), F16), "float32 or bfloat16, got float16; convert"),
    *(
        wrong(
            "cos_sin", aligned(s, F32), f"shape (max_position, 64) ... got {s}; join the two tables"
        )
        for s in ((9, 32), (64,), (9, 2, 32))
    ),
    wrong_type("q_pe", aligned((5, 3, 64), F32), "bfloat16, got float32; convert"),
    *(
        wrong(
            "q_pe", aligned(s), f"shape (tokens, num_heads, 64) with tokens 5 ... got {s}; reshape"
        )
        for s in ((5, 64), (4, 3, 64), (5, 3, 576))
    ),
    wrong_type("q_pe_out", aligned((5, 3, 64), F32), "bfloat16, got float32; allocate it so"),
    wrong("q_pe_out", aligned((5, 4, 64)), "shape (5, 3, 64), got (5, 4, 64); allocate it so"),
    *(
        Refusal(
            {name: None, "q_pe_out": aligned((5, 3, 64))}, ValueError, f"{name}: needed with {by}"
        )
        for name, by in (("positions", "cos_sin"), ("cos_sin", "q_pe"), ("q_pe", "q_pe_out"))
    ),
    *badly_laid_out("cos_sin", aligned((9, 64), F32)),
    *badly_laid_out("cos_sin", aligned((9, 64))),
    wrong_type("cos_sin", (aligned((9, 32)),) * 2, "one array, got 2 of them; join the two along"),
    *(
        refusal
        for name in ("q_pe", "q_pe_out")
        for refusal in (
            *badly_laid_out(name, aligned((5, 3, 64))),
            wrong(name, broadcast(aligned((5, 3, 64))), "memory of its own for each element"),
            wrong(name, frozen(aligned((5, 3, 64))), "an array that can be written to"),
        )
    ),
]
EIGHT_BITS = "bfloat16, float16 or float32 for an e4m3 cache, got float8_e4m3fn; convert it first"
FP8 = [  # into `one()`, unless they say otherwise
    wrong_type("rows", aligned((5, 576), E4M3), EIGHT_BITS),
    wrong_type("rows[1]", halves(rope=E4M3), EIGHT_BITS),
    wrong_type("rows[1]", halves(rope=F16), "the dtype of rows[0], bfloat16, got float16"),
    *(
        Refusal(
            {"kv_cache": kv_cache, "rows": aligned((5, 576), dtype)},
            TypeError,
            f"rows: needs kv_cache's dtype {of}, or float32, got ... ; convert",
        )
        for kv_cache, dtype, of in (
            (packed(), F16, "bfloat16"),
            (triple(rope=F16), BF16, "float16"),
        )
    ),
    Refusal(
        {
            "positions": np.arange(5),
            "cos_sin": aligned((9, 64)),
            "q_pe": aligned((5, 3, 64), F16),
        },
        TypeError,
        "q_pe: needs bfloat16, got float16",
    ),
    *(
        wrong(
            "kv_scale", scale, f"a number from 2 ** -126 ... got {scale}; pass the factor by which"
        )
        for scale in (0, -1.0, float("nan"), float("inf"), 1e-40, 1e39)
    ),
    *NO_FACTORS,
    wrong_type("kv_scale", np.ones(1), "float32, got float64"),
    wrong("kv_scale", np.ones(2, F32), "one element, got shape (2,)"),
    wrong("kv_scale", aligned((1,), F32, 2), "an address that is a multiple of 4 bytes"),
    *(
        Refusal(
            {"kv_cache": kv_cache, "kv_scale": scale},
            ValueError,
            "kv_scale: needs an e4m3 cache with one scale for all of it, got scales for each row",
        )
        for kv_cache in (triple(), packed())
        for scale in (1.0, np.ones((), F32))
    ),
]
NO_PLACE = "contiguous pages, at multiples of 16 bytes, got address 0x ... and strides ( ... ); all"
V4 = [
    wrong_type("rows", narrow(F16), "kv_cache's dtype bfloat16, or float32, got float16; convert"),
    wrong_type("rows", narrow(E4M3), "kv_cache's dtype bfloat16, or float32, got float8_e4m3fn"),
    wrong("rows", aligned((5, 576)), "a last axis of 512 (448 latent + 64 RoPE, or a pair that"),
    wrong("rows[0]", halves(), "a last axis of 448 (of a pair of 448 latent and 64 RoPE columns"),
    wrong("rows", aligned((5, 2, 512)), "the 1 kv heads of kv_cache, got shape (5, 2, 512); pass"),
    wrong("rows", aligned((512,)), "axes (tokens, num_kv_heads, 512) ... got shape (512,); reshap"),
    *(
        wrong("kv_cache", aligned(shape, U8), "axes (num_pages, page_size, num_kv_heads, 584), or")
        for shape in ((96, 584), (1, 6, 16, 1, 584))
    ),
    wrong(
        "kv_cache", aligned((6, 16, 2, 584), U8), "one kv head, got 2; pass the heads one by one"
    ),
    *(
        wrong("kv_cache", aligned(shape, U8), "at least one token, got shape ( ... ); skip it")
        for shape in ((0, 16, 1, 584), (6, 0, 584))
    ),
    *(
        wrong("kv_cache", cache, NO_PLACE)
        for cache in (
            v4_pages(16 * 592, 592, 592, 1),
            v4_pages(16 * 584 + 8, 584, 584, 1),
            v4_pages(15 * 584 + 8, 584, 584, 1),
            v4_pages(0, 584, 584, 1),
            v4_pages(16 * 584, 584, 584, 1, shift=8),
            v4_pages(16 * 584, 0, 584, 1, pages=1),
            v4()[::-1],
            aligned((6, 7, 1, 584), U8),
        )
    ),
    wrong("kv_cache", frozen(v4()), "an array that can be written to, got a read-only one"),
    *(
        wrong("kv_scale", scale, "an e4m3 cache with one scale for all of it, got scales for each")
        for scale in (1.0, np.ones((), F32))
    ),
    wrong_type("kv_cache", v4(np.int8), "bfloat16 or float16 ... got int8; convert it"),
    wrong("kv_cache", v4(BF16), "a last axis of 576 (512 latent + 64 RoPE, or a pair that holds"),
]
REFUSED = [
    pytest.param(make, refusal, id=f"{refusal.message[:60]}")
    for make, refusals in (
        (slots, SLOTS),
        (rows_by_request, BY_REQUEST),
        (by_list, BY_LIST),
        (rotating, ROTATING),
        (lambda: slots(kv_cache=one()), FP8),
        (lambda: slots(kv_cache=v4(), rows=narrow()), V4),
    )
    for refusal in refusals
]


@pytest.mark.parametrize(("make", "refusal"), REFUSED)
def test_refusals(make: Any, refusal: Refusal) -> None:
    with refused(refusal.error, refusal.message):
        cumla.append_mla_cache(**make() | refusal.changes)


@all_of([Refusal({"slot_mapping": None}, ValueError, "batch_indices: needed where there is no")])
def test_no_way_at_all(refusal: Refusal) -> None:
    with refused(refusal.error, refusal.message):
        cumla.append_mla_cache(**slots(**refusal.changes))


def test_what_is_fine() -> None:
    """Kv heads; what is only read may be read-only or broadcast; padding that keeps to 16 bytes;
    queries of the dtype of rows where the cache is e4m3 throughout, or rows of float32."""
    two = {"kv_cache": aligned((6, 16, 2, 576)), "rows": aligned((5, 2, 576))}
    cumla.append_mla_cache(**slots(**two))
    changed = rotating() | {"q_pe_out": aligned((5, 3, 64))}
    for name in ("rows", "slot_mapping", "positions", "cos_sin", "q_pe"):
        changed[name].flags.writeable = False
    cumla.append_mla_cache(**changed)
    cumla.append_mla_cache(**slots(rows=np.broadcast_to(aligned((576,)), (5, 576))))
    wide = {"kv_cache": aligned((6, 16, 584))[..., :576], "rows": aligned((5, 584))[:, :576]}
    cumla.append_mla_cache(**slots(**wide))
    for dtype in (BF16, F16):
        rotation = {"positions": np.arange(5), "cos_sin": aligned((9, 64), dtype)}
        queries = {"q_pe": aligned((5, 3, 64), dtype), "kv_cache": one()}
        for of_rows in (dtype, F32):
            arguments = slots(rows=aligned((5, 576), of_rows), **rotation, **queries)
            cumla.append_mla_cache(**arguments)
    with refused(ValueError, "rows: needs the 2 kv heads of kv_cache, got shape (5, 576); pass"):
        cumla.append_mla_cache(**slots(kv_cache=two["kv_cache"]))


@pytest.mark.parametrize("scale", [0.5, np.float32(0.5), np.full((), 0.5, F32)])
def test_a_factor_is_a_number_or_an_array(scale: Any) -> None:
    rows = aligned((5, 576)) + BF16.type(3)
    kv_cache = one()
    cumla.append_mla_cache(**slots(kv_cache=kv_cache, rows=rows), kv_scale=scale)
    assert (kv_cache.reshape(96, 576)[[3, 95, 17, 0]].astype(F32) == 6).all()


# --- check mode -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "name", "place", "value", "message"),
    [
        (slots, "slot_mapping", 2, 96, "[2]: needs a slot up to 95, or below 0 ... got 96"),
        (rows_by_request, "batch_indices", 3, 2, "[3]: needs a request up to 1, ... got 2"),
        (rows_by_request, "positions", 1, 32, "[1]: needs a position in the pages ... got 32"),
        (rows_by_request, "block_table", (1, 0), 6, "[1, 0]: ... from 0 to 5, got 6"),
        (rows_by_request, "block_table", (0, 1), -1, "[0, 1]: ... from 0 to 5, got -1"),
        (by_list, "kv_indices", 3, 6, "[3]: needs a page number from 0 to 5, got 6"),
        (by_list, "kv_indptr", 2, 5, "[2]: needs a number from 0 to 4, the entries, got 5"),
        (rotating, "positions", 3, 9, "[3]: needs a row of cos_sin, up to 8, or below 0, got 9"),
        (rotating, "positions", 3, -9, None),
        (slots, "slot_mapping", 3, -9, None),
    ],
)
def test_check_mode(
    make: Any,
    name: str,
    place: Any,
    value: int,
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = make()
    arguments[name][place] = value
    cumla.append_mla_cache(**arguments)
    monkeypatch.setenv("CUMLA_CHECK", "1")
    cumla.append_mla_cache(**make())
    if message is None:
        cumla.append_mla_cache(**arguments)
        return
    with refused(ValueError, f"{name}{message}; its rows would be skipped"):
        cumla.append_mla_cache(**arguments)


def test_check_mode_leaves_alone_what_nobody_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    table = int32([0, 1, -1], [5, 2, 2147480000])
    cumla.append_mla_cache(**rows_by_request() | {"block_table": table})


# --- what is launched -----------------------------------------------------------------------------

TOKENS = [
    (1, 1, 0, (1, 1, 1)),
    (16, 1, 0, (1, 1, 1)),
    (17, 1, 0, (2, 1, 1)),
    (5, 3, 0, (1, 3, 1)),
    (9, 1, 16, (1 + 1, 1, 1)),  # a warp a token
    (9, 1, 17, (1 + 2, 1, 1)),  # two
    (9, 2, 17, (1 + 1, 2, 1)),  # dealt out to the kv heads
    (10, 2, 17, (1 + 2, 2, 1)),
]


@pytest.mark.parametrize(("tokens", "kv_heads", "heads", "grid"), TOKENS)
def test_grids(
    tokens: int,
    kv_heads: int,
    heads: int,
    grid: tuple[int, int, int],
    cupy: FakeCuPy,
    bindings: FakeBindings,
) -> None:
    arguments = {
        "kv_cache": aligned((2, 4, kv_heads, 576)),
        "rows": aligned((tokens, kv_heads, 576)),
        "slot_mapping": np.zeros(tokens, np.int32),
    }
    if heads:
        arguments |= {
            "positions": np.zeros(tokens, np.int64),
            "cos_sin": aligned((1, 64), F32),
            "q_pe": aligned((tokens, heads, 64)),
        }
    cumla.append_mla_cache(**{name: cupy.like(array) for name, array in arguments.items()})
    (launch,) = bindings.launched
    assert launch.grid == grid


@pytest.mark.parametrize(
    ("changes", "entry"),
    [
        ({}, "append_cache_bfloat16"),
        ({"rows": aligned((5, 576), F32)}, "append_cache_bfloat16_from_float32"),
        ({"kv_cache": packed()}, "append_fp8_cache_bfloat16"),
        (
            {"kv_cache": triple(rope=F16), "rows": aligned((5, 576), F16)},
            "append_fp8_cache_float16",
        ),
        (
            {"kv_cache": one(), "rows": aligned((5, 576), F32), "kv_scale": 0.5},
            "append_fp8_cache_bfloat16_from_float32",
        ),
        ({"kv_cache": pair(), "kv_scale": np.ones(1, F32)}, "append_fp8_cache_bfloat16"),
        ({"kv_cache": v4(), "rows": narrow()}, "append_fp8_cache_v4"),
        ({"kv_cache": v4(E4M3), "rows": narrow(F32)}, "append_fp8_cache_v4_from_float32"),
        (
            {"kv_cache": aligned((6, 16, 1088), F16), "rows": aligned((5, 1088), F16)},
            "append_cache_widths_float16",
        ),
        (
            {"kv_cache": aligned((6, 16, 320), E4M3), "rows": aligned((5, 320), F32)},
            "append_fp8_cache_widths_bfloat16_from_float32",
        ),
    ],
)
def test_kernels(
    changes: dict[str, Any], entry: str, cupy: FakeCuPy, bindings: FakeBindings
) -> None:
    arguments = {name: cupy.like(value) for name, value in slots(**changes).items()}
    for _ in range(3):
        cumla.append_mla_cache(**arguments)
    assert bindings.entries == [entry] * 3


def test_other_options_have_launches_of_their_own(cupy: FakeCuPy, bindings: FakeBindings) -> None:
    """And the same arrays under other names are another call."""
    given = {name: cupy.like(value) for name, value in slots(kv_cache=one()).items()}
    scales = (None, 0.5, 0.25, 1.0)
    for _ in range(3):
        bindings.launched.clear()
        for scale in scales:
            cumla.append_mla_cache(**given, kv_scale=scale)
        cumla.append_mla_cache(**given, interleaved=False)
    parameters = [launch.parameters for launch in bindings.launched]
    assert len(set(parameters)) >= len(scales)
    mapping = given.pop("slot_mapping")
    with refused(ValueError, "batch_indices: needed where there is no slot_mapping"):
        cumla.append_mla_cache(**given, positions=mapping)
    with refused(ValueError, "kv_scale: ... where kv_cache is, on CUDA device 0 ... the CPU"):
        cumla.append_mla_cache(**given, slot_mapping=mapping, kv_scale=np.ones((), F32))


# --- other widths ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, F16, E4M3])
@pytest.mark.parametrize("interleaved", [None, False, True])
@pytest.mark.parametrize("width", WRITTEN[1:])
def test_rows_of_other_widths(
    width: tuple[int, int], interleaved: bool | None, dtype: np.dtype[Any]
) -> None:
    """The columns of the cache tell the width; RoPE columns turn in as many pairs as there are.

    Numbers of e4m3 are those under a factor.
    """
    latent, rope = width
    if interleaved is not None and not rope:
        pytest.skip("nothing to rotate")
    rng = np.random.default_rng(2)
    rows = rng.standard_normal((5, 1, latent + rope), dtype=np.float32)
    rows = rows.astype(BF16 if dtype == E4M3 else dtype)
    cache, slots = np.zeros((3, 4, 1, latent + rope), dtype), np.array([7, -1, 0, 11, 12])
    turned = rows[..., latent:].astype(np.float64)
    given: dict[str, Any] = {"kv_scale": 0.25} if dtype == E4M3 else {}
    if dtype == E4M3 and sum(width) == FORMATS["v41_fp4"]:
        with refused(ValueError, "cache_format: needed ... pass 'v41_fp4' or 'e4m3_288'"):
            cumla.append_mla_cache(rows, cache, slots)
        given["cache_format"] = "e4m3_288"
    if interleaved is not None:
        given |= {"positions": np.arange(5), "interleaved": interleaved}
        given["cos_sin"] = angles = rng.standard_normal((5, rope), dtype=np.float32)
        cos, sin = (half[:, None] for half in np.split(angles.astype(np.float64), 2, axis=1))
        pairs = (slice(0, None, 2), slice(1, None, 2))
        first, second = pairs if interleaved else (slice(rope // 2), slice(rope // 2, None))
        x, y = turned[..., first].copy(), turned[..., second].copy()
        turned[..., first], turned[..., second] = cos * x - sin * y, sin * x + cos * y
    cumla.append_mla_cache(rows, cache, slots, **given)
    flat, factor = cache.reshape(12, -1), given.get("kv_scale", 1)
    for i, slot in ((0, 7), (2, 0), (3, 11)):
        latents = (rows[i, 0, :latent].astype(np.float32) / factor).astype(dtype)
        np.testing.assert_array_equal(flat[slot, :latent], latents)
        got = flat[slot, latent:].astype(np.float64) * factor
        step = ml_dtypes.finfo(dtype).eps
        np.testing.assert_allclose(got, turned[i, 0], rtol=float(step), atol=1e-3)
    assert not flat[[1, 2, 3, 4, 5, 6, 8, 9, 10]].astype(np.float32).any()


def test_slices_of_latent_columns(cupy: FakeCuPy, bindings: FakeBindings) -> None:
    """A thread block has 512 latent columns at most."""
    for columns, slices in ((1088, 2), (544, 1), (256, 1)):
        given = {"rows": aligned((17, 3, columns)), "kv_cache": aligned((2, 9, 3, columns))}
        given["slot_mapping"] = np.zeros(17, np.int32)
        cumla.append_mla_cache(**{name: cupy.like(array) for name, array in given.items()})
        assert bindings.launched[-1].grid == (2, 3, slices)


def test_refusals_of_other_widths() -> None:
    rows, slots = np.zeros((2, 320), BF16), np.array([0, 1])
    cache, latents = np.zeros((3, 4, 320), BF16), np.zeros((3, 4, 256), np.uint8)
    for changes, error, message in (
        (
            {"kv_cache": cache.astype(np.float16)},
            TypeError,
            "rows: needs kv_cache's dtype float16, or float32, got bfloat16; convert it",
        ),
        (
            {"kv_cache": (latents.view(E4M3), cache[..., 256:].copy())},
            TypeError,
            r"kv_cache\[1\]: needs the dtype float8_e4m3fn of kv_cache\[0\] of 320 ",
        ),
        (
            {"kv_cache": (latents, np.zeros((3, 4, 64), np.uint8), np.zeros((3, 4, 4), F32))},
            ValueError,
            r"kv_cache\[2\]: needs rows of 576 .* got kv_cache\[0\] of 320 ",
        ),
        ({"kv_cache": cache, "kv_scale": 0.5}, ValueError, "kv_scale: needs an e4m3 cache"),
        ({"rows": rows[:, :288]}, ValueError, "rows: needs a last axis of 320"),
        ({"rows": np.zeros((2, 576), BF16)}, ValueError, "rows: needs a last axis of 320"),
    ):
        given = {"rows": rows, "kv_cache": cache, "slot_mapping": slots} | changes
        with pytest.raises(error, match=f"^{message}"):
            cumla.append_mla_cache(**given)
    table = {"positions": slots, "cos_sin": np.zeros((4, 64), np.float32)}
    with pytest.raises(
        ValueError, match=r"^cos_sin: needs rows with RoPE columns, got those of 512"
    ):
        cumla.append_mla_cache(
            np.zeros((2, 512), BF16), np.zeros((3, 4, 512), BF16), slots, **table
        )
