# SPDX-License-Identifier: Apache-2.0
"""`cumla.append_kv_cache`: what it refuses, what it takes, and what it launches. What holds for
every operation is in tests/core, what is written in tests/reference and tests/launch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cumla
from tests.calls import (
    BF16,
    E4M3,
    Arguments,
    Refusal,
    aligned,
    badly_laid_out,
    broadcast,
    frozen,
    int32,
    keys_and_values,
    last_tokens,
    padded,
    refused,
    wrong,
    wrong_type,
)
from tests.fake_cuda import FakeBindings, FakeCuPy

F16, F32, U8 = np.float16, np.float32, np.uint8


def slots(**changes: Any) -> Arguments:
    return keys_and_values() | changes


def by_request(**changes: Any) -> Arguments:
    places = {
        "slot_mapping": None,
        "batch_indices": int32(0, 0, 1, 1, -1),
        "positions": np.array([0, 20, 31, 1, 0], np.int64),
        "block_table": int32([0, 1], [5, 2]),
    }
    return slots(**places) | changes


def by_list(**changes: Any) -> Arguments:
    pages = {"kv_indices": int32(0, 1, 5, 2), "kv_indptr": int32(0, 2, 4)}
    return by_request(block_table=None) | pages | changes


def rotating(**changes: Any) -> Arguments:
    """Rows into slots, with a rotation of all columns of keys and queries."""
    rotation = {
        "positions": np.arange(5),
        "cos_sin": aligned((9, 64), F32),
        "q": aligned((5, 4, 64)),
    }
    return slots(**rotation) | changes


def uniform(**changes: Any) -> Arguments:
    """The last 3 tokens of each of two requests."""
    arguments = {
        "k": aligned((2, 3, 2, 64)),
        "v": aligned((2, 3, 2, 32)),
        "k_cache": aligned((6, 16, 2, 64)),
        "v_cache": aligned((6, 16, 2, 32)),
        "kv_lens": int32(3, 20),
        "block_table": int32([0, 1], [5, 2]),
    }
    return arguments | changes


def fp8(**changes: Any) -> Arguments:
    caches = {"k_cache": aligned((6, 16, 2, 64), E4M3), "v_cache": aligned((6, 16, 2, 32), E4M3)}
    return slots(**caches) | changes


# --- what is refused ------------------------------------------------------------------------------

SLOTS = [
    wrong_type("k", aligned((5, 2, 64), np.float64), " ... got float64; convert"),
    wrong_type("v", aligned((5, 2, 64), F32), "bfloat16, got float32; convert"),
    wrong_type("v", aligned((5, 2, 32), F16), "bfloat16, got float16; convert it, or k"),
    *(
        wrong("k", aligned(shape), f"shape (tokens, num_kv_heads, columns) or ... got {shape}; re")
        for shape in ((5, 64), (5, 2, 60), (5, 2, 520), (5, 2, 0), (5, 0, 64), (1, 1, 5, 2, 64))
    ),
    wrong("v", aligned((4, 2, 32)), "the tokens and heads of k, (5, 2), got shape (4, 2, 32)"),
    wrong("v", aligned((5, 1, 32)), "the tokens and heads of k, (5, 2), got shape (5, 1, 32)"),
    wrong("v", aligned((1, 5, 2, 32)), "the tokens and heads of k, (5, 2), got shape (1, 5, 2,"),
    *(
        wrong_type(
            "k_cache", aligned((6, 16, 2, 64), d), f"bfloat16 or float8_e4m3fn or uint8 ... {d}"
        )
        for d in ("float16", "float32", "int8")
    ),
    *(
        wrong(
            "k_cache",
            aligned(shape),
            f"shape (num_pages, page_size, 2, 64) for kv_layout 'NHD' ... got {shape}; pass the",
        )
        for shape in ((6, 16, 64), (6, 2, 16, 64), (6, 16, 2, 32), (0, 16, 2, 64), (6, 0, 2, 64))
    ),
    wrong("v_cache", aligned((6, 16, 2, 64)), "shape (num_pages, page_size, 2, 32) ... got"),
    wrong(
        "v_cache", aligned((5, 16, 2, 32)), "as many pages of as many tokens as k_cache, (6, 16)"
    ),
    wrong("v_cache", aligned((6, 8, 2, 32)), "as many pages of as many tokens as k_cache, (6, 16)"),
    wrong(
        "v_cache", aligned((6, 16, 2, 32), U8), "as many pages ... of bfloat16, got ... of uint8"
    ),
    wrong_type("v_cache", None, "an array of"),
    wrong("kv_layout", "HDN", "'NHD' or 'HND', got 'HDN'; pass one of them"),
    wrong("kv_layout", None, "'NHD' or 'HND', got None; pass one of them"),
    Refusal(
        {"kv_layout": "HND"},
        ValueError,
        "k_cache: needs shape (num_pages, 2, page_size, 64) for kv_layout 'HND' ... ; pass",
    ),
    *(
        wrong("slot_mapping", np.zeros(shape, int), f"shape (tokens,) with tokens 5, got {shape}")
        for shape in ((4,), (5, 1), ())
    ),
    wrong_type("slot_mapping", np.zeros(5, "uint32"), "int32 or int64, got uint32; convert"),
    wrong("slot_mapping", aligned((5,), "i8", 4), "an address and strides that are multiples of 8"),
    *(
        wrong(name, np.zeros(5, np.int32), "a call without slot_mapping, which tells where the")
        for name in ("batch_indices", "block_table", "kv_indices", "kv_indptr")
    ),
    wrong("positions", np.arange(5), "batch_indices ... or cos_sin ... got neither; leave it out"),
    Refusal(
        {"kv_lens": int32(5), "qo_indptr": int32(0, 5)},
        ValueError,
        "kv_lens: needs a call without slot_mapping, which tells where the rows go, got both; lea",
    ),
    wrong("kv_lens", int32(5), "a call without slot_mapping, which tells where the rows go, got"),
    wrong("rotary_offset", 8, "")._replace(message="cos_sin: needed with rotary_offset, got None;"),
    Refusal({"qo_indptr": int32(0, 5)}, ValueError, "kv_lens: needs lengths beside qo_indptr"),
    *(wrong(n, 1.0, "an e4m3 cache, got bfloat16; leave it out") for n in ("k_scale", "v_scale")),
    wrong("k_scale", np.ones(1, F32), "an e4m3 cache, got bfloat16; leave it out"),
    wrong("q", aligned((5, 4, 64)), "")._replace(message="cos_sin: needed with q, got None; pass"),
    *badly_laid_out("k", aligned((5, 2, 64))),
    *badly_laid_out("v", aligned((5, 2, 32))),
    *(
        refusal
        for name, array in (
            ("k_cache", aligned((6, 16, 2, 64))),
            ("v_cache", aligned((6, 16, 2, 32))),
        )
        for refusal in (
            *badly_laid_out(name, array),
            wrong(name, broadcast(array), "memory of its own for each element ... ; copy"),
            wrong(name, frozen(array), "an array that can be written to, got a read-only one"),
        )
    ),
]
BY_REQUEST = [
    *(
        Refusal(
            {name: None}, ValueError, f"slot_mapping: needs slots, or ... got {other}; pass one"
        )
        for name, other in (("batch_indices", "positions"), ("positions", "batch_indices"))
    ),
    Refusal(
        {"batch_indices": None, "positions": None},
        ValueError,
        "slot_mapping: needs slots, or kv_lens, or batch_indices and positions ... none of them",
    ),
    wrong_type("batch_indices", np.zeros(5, "f4"), "int32 or int64, got float32; convert"),
    wrong("positions", np.zeros(4, int), "shape (tokens,) with tokens 5, got (4,); reshape it"),
    wrong_type("block_table", np.zeros((2, 2), int), "int32, got int64; convert"),
    wrong("block_table", int32(0, 1, 2, 3), "shape (batch, max_pages), got (4,)"),
    wrong("block_table", None, "block_table, or both kv_indices and kv_indptr ... got none of"),
    wrong("kv_indptr", int32(0), "")._replace(
        message="block_table: needs block_table, or both ... got block_table and kv_indptr; pass"
    ),
    Refusal(
        {"kv_lens": int32(5, 20), "qo_indptr": int32(0, 1, 5)},
        ValueError,
        "batch_indices: needs a call without kv_lens, which tells the requests, got both; leave",
    ),
]
BY_LIST = [
    wrong_type("kv_indices", np.zeros(4, int), "int32, got int64"),
    wrong(
        "kv_indptr", int32(), "shape (batch + 1,), got (0,); pass where each request's list ends"
    ),
    wrong("kv_indptr", None, "")._replace(
        message="block_table: needs block_table, or both ... got kv_indices; pass one form"
    ),
]
LAST = [
    wrong_type("kv_lens", np.zeros(2, int), "int32, got int64; convert"),
    wrong("kv_lens", None, "lengths beside qo_indptr, got None; pass both or none"),
    wrong("qo_indptr", int32(0, 1), "shape (batch + 1,) with batch 2, got (2,); pass where each"),
    wrong("qo_indptr", None, "offsets of the requests, beside kv_lens, got k of shape (5, 2, 64);"),
    wrong(
        "qo_indptr", int32(), "shape (batch + 1,) ... got (0,); pass where each request's tokens"
    ),
    wrong("block_table", int32([0, 1]), "shape (batch, max_pages) with batch 2, got (1, 2)"),
    *(
        wrong(
            "k_scale", scale, f"a number from 2 ** -126 to 2 ** 126, got {scale}; pass the factor"
        )
        for scale in (0, -1.0, float("nan"), float("inf"), 1e-40, 1e39)
    ),
    wrong_type("v_scale", True, "a number, or a float32 array, got bool True; pass"),
    wrong_type("v_scale", "1", "a number, or a float32 array, got str '1'; pass"),
    wrong_type("v_scale", np.ones(1), "float32, got float64; convert"),
    *(
        wrong(
            "v_scale", np.ones(shape, F32), f"shape (1,), (2,), ... with batch 2, got {shape}; pass"
        )
        for shape in ((3,), (3, 2), (2, 1), (1, 1, 1))
    ),
    wrong("v_scale", aligned((2,), F32, 2), "an address and strides that are multiples of 4 bytes"),
]
UNIFORM = [
    wrong(
        "qo_indptr", int32(0, 3, 6), "a call without it for k of four axes, beside kv_lens ... ; l"
    ),
    wrong("kv_lens", int32(3, 20, 1), "shape (batch,) with batch 2, got (3,)"),
]
ROTATING = [
    wrong("positions", None, "")._replace(message="positions: needed with cos_sin, unless kv_lens"),
    wrong("cos_sin", None, "")._replace(
        message="cos_sin: needed with q, got None; pass it, or no q"
    ),
    wrong_type("cos_sin", aligned((9, 64), "f8"), "float32 or bfloat16 or float16, got float64"),
    *(
        wrong("cos_sin", aligned(s, F32), f"shape (max_position, rotary_dim) ... got {s}; reshape")
        for s in ((64,), (9, 2, 32), (0, 64), (9, 0))
    ),
    wrong("cos_sin", aligned((9, 63), F32), "as many sines as cosines in a row, got shape (9, 63)"),
    wrong("cos_sin", (aligned((9, 32), F32),) * 3, "one array, or a tuple or list ... got 3 of"),
    wrong(
        "cos_sin[0]", (aligned((9, 2, 16), F32),) * 2, "shape (max_position, rotary_dim / 2) ... "
    ),
    wrong(
        "cos_sin[1]",
        (aligned((9, 32), F32), aligned((9, 16), F32)),
        "shape and dtype of cos_sin[0], (9, 32) float32, got (9, 16) float32; pass",
    ),
    wrong("cos_sin[1]", (aligned((9, 32), F32), aligned((9, 32))), "shape and dtype of cos_sin[0]"),
    wrong("cos_sin", aligned((9, 64), F32, 2), "an address and strides that are multiples of 4"),
    *(
        wrong(
            "cos_sin", aligned((9, n), F32), f"rotary_dim a multiple of 16 ... got rotary_dim {n}"
        )
        for n in (24, 72, 80)
    ),
    wrong("rotary_offset", -8, "a number from 0, got -8; pass the first column"),
    wrong_type("rotary_offset", 8.0, "an int, got float 8.0; convert it"),
    *(
        wrong("rotary_offset", offset, "")._replace(
            message=f"cos_sin: needs rotary_dim ... the 64 columns ... and rotary_offset {offset};"
        )
        for offset in (4, 8)
    ),
    wrong_type("q", aligned((5, 4, 64), F16), "bfloat16, got float16; convert it, or k"),
    *(
        wrong("q", aligned(s), f"tokens and columns of k, whose shape is (5, 2, 64), got {s}; pass")
        for s in ((4, 4, 64), (5, 4, 32), (1, 5, 4, 64))
    ),
    wrong(
        "q", aligned((5, 64)), "shape of k with num_heads in place of num_kv_heads ... got (5, 64"
    ),
    Refusal(
        {"q": None, "q_out": aligned((5, 4, 64))}, ValueError, "q: needed with q_out, got None"
    ),
    wrong_type("q_out", aligned((5, 4, 64), F32), "bfloat16, got float32; allocate it so"),
    wrong("q_out", aligned((5, 2, 64)), "shape (5, 4, 64), got (5, 2, 64); allocate it so"),
    *(
        refusal
        for name in ("q", "q_out")
        for refusal in (
            *badly_laid_out(name, aligned((5, 4, 64))),
            wrong(name, broadcast(aligned((5, 4, 64))), "memory of its own for each element"),
            wrong(name, frozen(aligned((5, 4, 64))), "an array that can be written to"),
        )
    ),
]
REFUSED = [
    pytest.param(make, refusal, id=f"{next(iter(refusal.changes))}-{refusal.message[:60]}")
    for make, refusals in (
        (slots, SLOTS),
        (by_request, BY_REQUEST),
        (by_list, BY_LIST),
        (last_tokens, LAST),
        (uniform, UNIFORM),
        (rotating, ROTATING),
        (
            fp8,
            [wrong("k_scale", np.ones((5, 2), F32), "shape (1,), (2,), or (batch, 2) where ... ")],
        ),
    )
    for refusal in refusals
]


@pytest.mark.parametrize(("make", "refusal"), REFUSED)
def test_refusals(make: Any, refusal: Refusal) -> None:
    with refused(refusal.error, refusal.message):
        cumla.append_kv_cache(**make() | refusal.changes)


# --- what works -----------------------------------------------------------------------------------

NARROW = {
    "k": aligned((5, 3, 8)),
    "v": aligned((5, 3, 8)),
    "k_cache": aligned((6, 16, 3, 8)),
    "v_cache": aligned((6, 16, 3, 8)),
}


@pytest.mark.parametrize(
    "arguments",
    [
        slots(),
        slots(k=frozen(aligned((5, 2, 64))), v=np.broadcast_to(aligned((32,)), (5, 2, 32))),
        slots(k=padded(aligned((5, 2, 64)), 8), k_cache=padded(aligned((6, 16, 2, 64)), 8)),
        slots(**NARROW),
        slots(**{name: array.astype(F16) for name, array in NARROW.items()}),
        slots(kv_layout="HND", k_cache=aligned((6, 2, 16, 64)), v_cache=aligned((6, 2, 16, 32))),
        slots(
            **dict(
                zip(
                    ("k_cache", "v_cache"),
                    np.moveaxis(aligned((6, 2, 16, 2, 64)), 1, 0),
                    strict=True,
                )
            )
        )
        | {"v": aligned((5, 2, 64))},
        slots(k=aligned((1, 5, 2, 64)), v=aligned((1, 5, 2, 32))),
        slots(cos_sin=aligned((9, 64)), kv_lens=int32(5), qo_indptr=int32(0, 5)),
        by_request(),
        by_request(k=aligned((1, 5, 2, 64)), v=aligned((1, 5, 2, 32))),  # table of more requests
        by_request(cos_sin=aligned((9, 32)), rotary_offset=32),
        by_list(),
        rotating(q_out=aligned((5, 4, 64))),
        rotating(q=None),
        uniform(),
        uniform(kv_indices=int32(0, 1, 5, 2), kv_indptr=int32(0, 2, 4), block_table=None),
        uniform(cos_sin=aligned((9, 64)), positions=np.arange(6), q=aligned((2, 3, 4, 64))),
        uniform(block_table=int32([4], [0])),  # a contiguous cache
        last_tokens() | {"positions": np.arange(5)},
        fp8(),
        fp8(k_cache=aligned((6, 16, 2, 64), U8)),
        *(fp8(k_scale=s, v_scale=s) for s in (0.5, F32(2), 3, np.ones((), F32), np.ones(2, F32))),
        by_request(**{n: a.astype(E4M3) for n, a in slots().items() if "cache" in n})
        | {"k_scale": np.ones((2, 2), F32)},
    ],
)
def test_combinations_that_work(arguments: Arguments) -> None:
    assert cumla.append_kv_cache(**arguments) is None


def test_q_out_may_be_q() -> None:
    """And parts of one projection may be rotated, or written, where they lie."""
    one, other = rotating(), rotating()
    for arguments in (one, other):
        arguments["q"][...] = np.arange(5 * 4 * 64).reshape(5, 4, 64) % 7
        arguments["cos_sin"][...] = 0.5
    cumla.append_kv_cache(**one)
    cumla.append_kv_cache(**other, q_out=other["q"])
    assert one["q"].any()
    assert one["q"].tobytes() == other["q"].tobytes()
    fused = aligned((5, 8, 64))
    parts = {"q": fused[:, :4], "k": fused[:, 4:6], "v": fused[:, 6:, :32]}
    cumla.append_kv_cache(**rotating(**parts))
    with refused(ValueError, "q: needs memory of its own, got memory that k uses too"):
        cumla.append_kv_cache(**rotating(q=fused[:, :4], k=fused[:, 3:5]))
    with refused(ValueError, "v_cache: needs memory of its own, got memory that k_cache uses too"):
        cache = aligned((6, 16, 2, 64))
        cumla.append_kv_cache(**slots(k_cache=cache, v_cache=cache[..., :32]))


# --- check mode -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "name", "place", "value", "message"),
    [
        (slots, "slot_mapping", 2, 96, "[2]: needs a slot up to 95, or below 0 ... got 96"),
        (slots, "slot_mapping", 3, -9, None),
        (by_request, "batch_indices", 3, 2, "[3]: needs a request up to 1, ... got 2"),
        (by_request, "positions", 1, 32, "[1]: needs a position in the pages ... got 32"),
        (by_request, "block_table", (1, 0), 6, "[1, 0]: ... from 0 to 5, got 6"),
        (by_list, "kv_indices", 3, 6, "[3]: needs a page number from 0 to 5, got 6"),
        (by_list, "kv_indptr", 2, 5, "[2]: needs a number from 0 to 4, the entries, got 5"),
        (rotating, "positions", 3, 9, "[3]: needs a row of cos_sin, up to 8, or below 0, got 9"),
        (rotating, "positions", 3, -9, None),
        (last_tokens, "kv_lens", 1, 33, "[1]: needs no more tokens than the pages ... got 33"),
        (last_tokens, "kv_lens", 1, 0, None),  # as padded requests of a graph
        (last_tokens, "kv_lens", 1, 2, None),  # rows before position 0 are skipped
        (last_tokens, "qo_indptr", 2, 6, "[2]: needs non-decreasing offsets from 0 to 5 ... got 6"),
        (last_tokens, "qo_indptr", 1, 5, "[2]: needs non-decreasing offsets from 0 to 5 ... got 4"),
        (last_tokens, "qo_indptr", 0, -1, "[0]: needs non-decreasing offsets ... got -1"),
        (last_tokens, "block_table", (1, 1), 6, "[1, 1]: ... from 0 to 5, got 6"),
        (last_tokens, "block_table", (0, 1), 6, None),  # which no new token needs
        (uniform, "kv_lens", 0, 33, "[0]: needs no more tokens than the pages ... got 33"),
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
    cumla.append_kv_cache(**arguments)
    monkeypatch.setenv("CUMLA_CHECK", "1")
    cumla.append_kv_cache(**make())
    if message is None:
        cumla.append_kv_cache(**arguments)
        return
    with refused(ValueError, f"{name}{message}; its rows would be skipped"):
        cumla.append_kv_cache(**arguments)


def test_check_mode_knows_the_rows_of_cos_sin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    with refused(ValueError, "kv_lens[1]: needs at most 9 tokens, the rows of cos_sin, got 20;"):
        cumla.append_kv_cache(**last_tokens() | {"cos_sin": aligned((9, 32))})


@pytest.mark.parametrize("name", ["slot_mapping", "positions"])
@pytest.mark.parametrize("is_uniform", [True, False])
@pytest.mark.parametrize("old", [0, 1])
def test_check_mode_finds_lengths_without_the_new_tokens(
    name: str, is_uniform: bool, old: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where slots or positions have all new tokens of a request later by so many."""
    monkeypatch.setenv("CUMLA_CHECK", "1")
    lens = int32(20, 18)
    arguments = uniform(cos_sin=aligned((40, 64)), block_table=int32([4, 1], [2, 0]), kv_lens=lens)
    at = np.array([17, 18, 19, 15, 16, 17])
    pages = np.repeat(arguments["block_table"], 3, axis=0)[np.arange(6), at // 16]
    slot_mapping = pages * 16 + at % 16
    if name == "slot_mapping":
        del arguments["block_table"]
    arguments[name] = at if name == "positions" else slot_mapping
    if not is_uniform:
        arguments |= {n: arguments[n].reshape(6, *arguments[n].shape[2:]) for n in ("k", "v")}
        arguments |= {"qo_indptr": int32(0, 3, 6)}
    cumla.append_kv_cache(**arguments)
    before = {n: arguments[n].tobytes() for n in ("k_cache", "v_cache")}
    lens[old] -= 3
    need = f"kv_lens[{old}]: needs the new tokens included, as {name} has them, got {lens[old]}"
    with refused(ValueError, f"{need}; their positions would be too small"):
        cumla.append_kv_cache(**arguments)
    assert {n: arguments[n].tobytes() for n in before} == before
    lens[old] += 1  # nothing that leaving them out explains, such as positions of images
    cumla.append_kv_cache(**arguments)


def test_check_mode_looks_at_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those of requests without tokens."""
    monkeypatch.setenv("CUMLA_CHECK", "1")
    for name, place in (("k_scale", (1, 0)), ("v_scale", (1,))):
        for value in (0.0, -1.0, float("nan")):
            arguments = last_tokens()
            arguments[name][place] = value
            with refused(ValueError, f"{name}[1 ... ]: needs a number from ... got {value}; pass"):
                cumla.append_kv_cache(**arguments)
    arguments = last_tokens() | {"kv_lens": int32(5, 0)}
    arguments["k_scale"][1] = 0
    cumla.append_kv_cache(**arguments)


# --- what is launched -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "kv_heads", "columns", "heads", "grid"),
    [
        (1, 1, 128, 0, (2, 1, 1)),  # a team of 8 threads has a token and 2 or 4 heads
        (32, 4, 128, 0, (4, 2, 1)),
        (33, 8, 128, 32, (24, 3, 1)),
        (600, 8, 128, 32, (12, 38, 1)),
        (1025, 8, 128, 32, (12, 65, 1)),
        (9, 5, 512, 0, (6, 3, 1)),
        (257, 1, 8, 0, (2, 3, 1)),
    ],
)
def test_grids(
    tokens: int,
    kv_heads: int,
    columns: int,
    heads: int,
    grid: tuple[int, int, int],
    cupy: FakeCuPy,
    bindings: FakeBindings,
) -> None:
    arguments = {name: aligned((tokens, kv_heads, columns)) for name in ("k", "v")}
    arguments |= {name: aligned((2, 4, kv_heads, columns)) for name in ("k_cache", "v_cache")}
    arguments["slot_mapping"] = np.zeros(tokens, np.int32)
    if heads:
        arguments |= {
            "positions": np.zeros(tokens, np.int64),
            "cos_sin": aligned((1, columns), F32),
            "q": aligned((tokens, heads, columns)),
        }
    cumla.append_kv_cache(**{name: cupy.like(array) for name, array in arguments.items()})
    (launch,) = bindings.launched
    assert launch.grid == grid


def test_other_options_have_launches_of_their_own(cupy: FakeCuPy, bindings: FakeBindings) -> None:
    given = {name: cupy.like(value) for name, value in last_tokens().items()}
    del given["k_scale"]
    variants: list[Arguments] = [
        {"k_scale": 0.5},
        {"k_scale": 0.25},
        {},
        {"interleaved": True},
        {"rotary_offset": 32},
    ]
    for variant in variants:
        cumla.append_kv_cache(**given, **variant)
    assert len({launch.parameters for launch in bindings.launched}) == len(variants)
    assert set(bindings.entries) == {"append_kv_cache_fp8_bfloat16"}
    halves = slots(**{n: a.astype(F16) for n, a in slots().items() if a.dtype == BF16})
    cumla.append_kv_cache(**{name: cupy.like(value) for name, value in halves.items()})
    assert bindings.entries[-1] == "append_kv_cache_float16"
    with refused(ValueError, "k_scale: ... where k_cache is, on CUDA device 0 ... the CPU"):
        cumla.append_kv_cache(**given, k_scale=np.ones((), F32))
