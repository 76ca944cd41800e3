# SPDX-License-Identifier: Apache-2.0
"""What attention, scores and choice of blocks refuse, and how."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cumla
from tests.calls import Refusal, all_of, every_other, int32, refused, wrong, wrong_type
from tests.emulator import emulated_gpu

F16, E4M3 = np.float16, "float8_e4m3fn"


def attending(**changes: Any) -> dict[str, Any]:
    """Two requests, of two query tokens each."""
    given: dict[str, Any] = {
        "q": np.ones((2, 2, 4, 64), F16),
        "k": np.ones((6, 32, 2, 64), F16),
        "v": np.ones((6, 32, 2, 64), F16),
        "block_indices": np.zeros((4, 2, 3), np.int32),
        "block_size": 16,
        "kv_lens": int32(50, 7),
        "block_table": int32([0, 1], [2, 3]),
    }
    return {name: value for name, value in (given | changes).items() if value is not None}


def scoring(**changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "q": np.ones((2, 2, 4, 64), F16),
        "keys": np.ones((6, 32, 64), F16),
        "block_size": 16,
        "kv_lens": int32(50, 7),
        "block_table": int32([0, 1], [2, 3]),
    }
    return {name: value for name, value in (given | changes).items() if value is not None}


def selecting(**changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "scores": np.ones((4, 2, 9), np.float32),
        "topk": 3,
        "visible": int32(9, 9, 0, 2),
    }
    return given | changes


RAGGED = {"q": np.ones((4, 4, 64), F16)}

LENGTHS = [
    wrong("qo_indptr", int32(0, 2, 4), "q of three axes, got 4; leave it out"),
    Refusal(RAGGED, ValueError, "qo_indptr: needs offsets of the requests ... got None; pass it"),
    wrong("kv_lens", int32(5, 6, 7), "shape (batch,) ... got (3,)"),
    wrong_type("kv_lens", np.array([5, 6]), "int32, got int64"),
    wrong("block_table", int32([0], [1], [2]), "shape (batch, max_pages) with batch 2, got (3, 1)"),
    wrong_type("block_size", 16.0, "an int, got float"),
    wrong("block_size", 0, "a number from 1, got 0; pass the tokens of a block"),
    wrong_type("causal", 1, "True or False, got int"),
]

ATTENTION = [
    *LENGTHS,
    wrong_type(
        "q", np.ones((2, 2, 4, 64), np.float64), "bfloat16 or float16 or float32, got float64"
    ),
    Refusal(
        {name: np.ones((2, 32, 2, 64), np.float32) for name in "qkv"},
        TypeError,
        "q: needs bfloat16 or float16, got float32; convert it",
    ),
    wrong("q", np.ones((2, 2, 3, 64), F16), "a multiple of the 2 kv heads of k, got 3 heads"),
    wrong("q", np.ones((2, 2, 130, 64), F16), "at most 64 heads per kv head, got 65; cut the"),
    Refusal(
        {name: np.ones((96, 2, 64), F16) for name in "kv"},
        ValueError,
        "k: needs pages, of four axes, got shape (96, 2, 64); a contiguous cache ... has pages",
    ),
    wrong("k", np.ones((6, 32, 2, 128), F16), "the 64 columns of q, got shape"),
    wrong("v", np.ones((6, 16, 2, 64), F16), "the pages, tokens and heads of k"),
    wrong(
        "v",
        np.ones((6, 32, 3, 64), F16)[:, :, :2],
        "strides in proportion to those of k ... got strides ... beside ... ; pass two parts of",
    ),
    wrong("block_size", 24, "a divisor of the page size 32, got 24; use pages of whole blocks"),
    wrong_type("block_indices", np.zeros((4, 2, 3), F16), "int32 or int64, got float16"),
    wrong("block_indices", np.zeros((4, 3), np.int32), "shape (total_tokens, lists, topk)"),
    wrong("block_indices", np.zeros((3, 2, 3), np.int32), "shape (total_tokens, lists, topk)"),
    wrong(
        "block_indices",
        np.zeros((4, 4, 3), np.int32),
        "lists for each of the 2 kv heads of k, or one for all, got shape (4, 4, 3); transpose it",
    ),
    wrong_type("topk_lens", np.zeros(4, np.int64), "int32, got int64; convert it first"),
    wrong("topk_lens", int32(1, 2, 3), "shape (4,) or (4, 2), got (3, 1); give each list its"),
    wrong("topk_lens", np.zeros((4, 3), np.int32), "shape (4,) or (4, 2), got (4, 3); give"),
    wrong("indices_are", "pages", "'blocks' or 'tokens', got 'pages'; pass one of them"),
    wrong("kv_layout", "DHN", "'NHD' or 'HND', got 'DHN'"),
    wrong("softcap", -1.0, "a number from 0.001 to 1000000.0, got -1.0; leave it out for none"),
    wrong("sinks", np.zeros(3, np.float32), "shape (num_heads,) with num_heads 4, got (3,)"),
    wrong("k_scale", 2.0, "an e4m3 cache, got float16; leave it out"),
    wrong("out", np.ones((2, 2, 4, 128), F16), "shape (2, 2, 4, 64), got"),
    wrong("lse", np.ones((2, 4, 2), np.float32), "shape (2, 2, 4), got"),
]

SCORES = [
    *LENGTHS,
    wrong_type(
        "q",
        np.ones((2, 2, 4, 64), np.float32),
        "bfloat16 or float16 or float8_e4m3fn or uint8, got",
    ),
    wrong("q", np.ones((2, 2, 4, 96), F16), "shape (total_tokens, heads, columns) or ... columns"),
    wrong("q", np.ones((2, 2, 33, 64), F16), "1 to 32 heads, got 33; cut them into several"),
    wrong("q", np.ones((2, 2, 0, 64), F16), "1 to 32 heads, got 0"),
    wrong("keys", np.ones((6, 32, 1, 64), F16), "shape (num_pages, page_size, columns) with"),
    wrong("keys", np.ones((6, 32, 128), F16), "the 64 columns of q, got shape (6, 32, 128); pass"),
    wrong("keys", np.ones((6, 0, 64), F16), "pages of tokens, got shape (6, 0, 64)"),
    wrong_type("keys", np.ones((6, 32, 64), np.uint8), "the dtype of q, float16, got uint8"),
    wrong("keys", every_other(np.ones((6, 32, 64), F16)), "a contiguous last axis"),
    wrong("block_size", 8, "a multiple of 16 that divides the page size 32, got 8; use pages of"),
    wrong("block_size", 64, "a multiple of 16 that divides the page size 32, got 64"),
    wrong("out", np.ones((4, 4, 5), np.float32), "shape (4, 4, 4), got (4, 4, 5)"),
    wrong("activation", "gelu", "'none' or 'relu', got 'gelu'; pass one of them"),
    wrong("num_groups", 3, "a divisor of the 4 heads of q, and up to 32 heads of a group, got 3"),
    wrong("num_groups", 0, "a number from 1, got 0; leave it out for a score of each head"),
    wrong_type("num_groups", 2.0, "an int, got float"),
    wrong("stride", 0, "a number from 1, got 0; pass the tokens of a row of keys"),
    Refusal(
        {"stride": 3},
        ValueError,
        "block_size: needs the stride 3, or a multiple of 48 that divides the 96 tokens of a page",
    ),
    Refusal({"stride": 2}, ValueError, "block_size: needs the stride 2, or a multiple of 32 that"),
    Refusal(
        {"stride": 4, "block_size": 256},
        ValueError,
        "block_size: needs the stride 4, or a multiple of 64 that divides the 128 tokens of a page",
    ),
    wrong("weights", np.ones((2, 2, 4), np.float32), "shape (total_tokens, num_heads) with"),
    wrong(
        "weights",
        np.ones((4, 3), np.float32),
        "shape (total_tokens, num_heads) with total_tokens 4, num_heads 4, got",
    ),
    wrong_type("weights", np.ones((4, 4)), "float32, got float64"),
    wrong(
        "block_indices",
        np.zeros((4, 2, 3), np.int32),
        "lists for each of the 4 groups of heads, or one",
    ),
    wrong(
        "block_indices",
        np.zeros((3, 1, 3), np.int32),
        "shape (total_tokens, lists, topk) with total_tokens 4",
    ),
    wrong_type("block_indices", np.zeros((4, 1, 3), np.float32), "int32 or int64, got float32"),
    Refusal(
        {"q": np.ones((2, 2, 33, 64), F16), "num_groups": 1},
        ValueError,
        "num_groups: needs a divisor of the 33 heads of q, and up to 32 heads of a group, got 1",
    ),
    Refusal(
        {"q": np.ones((2, 2, 0, 64), F16), "stride": 16}, ValueError, "q: needs heads, got shape"
    ),
    Refusal(
        {"num_groups": 1, "out": np.ones((4, 4, 4), np.float32)},
        ValueError,
        "out: needs shape (4, 1, 4), got",
    ),
]

SELECTION = [
    wrong_type("scores", np.ones((4, 2, 9)), "float32 or bfloat16 or float16, got float64"),
    wrong("scores", np.ones((4, 9), np.float32), "shape (tokens, groups, width), got"),
    wrong("scores", every_other(np.ones((4, 2, 9), np.float32)), "contiguous rows, got a stride"),
    wrong(
        "scores",
        np.ones((4, 3, 9), np.float32)[:, ::2],
        "rows evenly spaced over tokens and groups, got strides ... ; make a contiguous copy",
    ),
    Refusal(
        {"topk": 2, "init_blocks": 1, "local_blocks": 2},
        ValueError,
        "topk: needs at least the 3 forced blocks, got 2; force fewer",
    ),
    wrong("topk", 0, "a number from 1, got 0; there is nothing to select"),
    wrong_type("topk", "3", "an int, got str"),
    Refusal(
        {"topk": 2**30 + 1}, ValueError, "scores: needs at most 1073741824 columns, and topk as"
    ),
    wrong("init_blocks", -1, "a number from 0, got -1; pass 0 for none"),
    wrong("local_blocks", -1, "a number from 0, got -1; pass 0 for none"),
    wrong("visible", int32(1, 2, 3), "shape (tokens,) with tokens 4, got (3,); give each query"),
    wrong_type("visible", np.ones(4), "int32, got float64"),
    wrong("out", np.ones((4, 2, 4), np.int32), "shape (4, 2, 3), got"),
]


@all_of(ATTENTION)
def test_attention(refusal: Refusal) -> None:
    with refused(refusal.error, refusal.message):
        cumla.block_sparse_attention(**attending(**refusal.changes))


@all_of(SCORES)
def test_scores(refusal: Refusal) -> None:
    with refused(refusal.error, refusal.message):
        cumla.block_scores(**scoring(**refusal.changes))


@all_of(SELECTION)
def test_selection(refusal: Refusal) -> None:
    with refused(refusal.error, refusal.message):
        cumla.select_blocks(**selecting(**refusal.changes))


def test_what_is_changed_above_is_served() -> None:
    assert cumla.block_sparse_attention(**attending()).out.shape == (2, 2, 4, 64)
    assert cumla.block_scores(**scoring()).shape == (4, 4, 4)
    assert cumla.block_scores(**scoring(stride=16, num_groups=2)).shape == (4, 2, 64)
    assert cumla.select_blocks(**selecting()).shape == (4, 2, 3)


def test_more_rows_than_a_schedule_numbers() -> None:
    """Arrays of one row's memory."""
    tokens = 1 << 27
    q = np.broadcast_to(np.ones((1, 1, 16, 64), F16), (tokens, 1, 16, 64))
    k = np.broadcast_to(np.ones((1, 16, 16, 64), F16), (1, 16, 16, 64))
    lists = np.broadcast_to(np.zeros((1, 1, 1), np.int32), (tokens, 1, 1))
    with refused(ValueError, "q: needs fewer query tokens and kv heads, or shorter lists"):
        cumla.BlockSparsePlan.from_arrays(q, k, k, lists, block_size=16)
    many = 1 << 17, 1 << 17, 1, 64, 16, 64
    with refused(ValueError, "batch_invariant: needs at most 65535 pieces of lists, got 131072"):
        cumla.BlockSparsePlan(*many, batch_invariant=True, like=np.zeros(1))


# --- plans ----------------------------------------------------------------------------------------

NUMBERS: dict[str, Any] = {
    "batch": 2,
    "total_tokens": 4,
    "num_heads": 4,
    "head_dim": 64,
    "topk": 3,
    "block_size": 16,
    "num_kv_heads": 2,
    "q_len": 2,
    "dtype": "float16",
}

PLANS = [
    wrong("dtype", "float32", "bfloat16 or float16, got 'float32'; pass one of them"),
    wrong("topk", -1, "a number from 0, got -1"),
    wrong("block_size", 0, "a number from 1, got 0; pass the tokens of a block"),
    Refusal(
        {"num_heads": 130}, ValueError, "num_heads: needs at most 64 heads per kv head, got 130"
    ),
    wrong("num_heads", 3, "a multiple of num_kv_heads"),
    wrong("total_tokens", 5, "batch * q_len"),
    wrong_type("causal", None, "True or False, got None"),
    wrong_type("batch_invariant", 1, "True or False, got int"),
]


@all_of(PLANS)
def test_plans(refusal: Refusal) -> None:
    with refused(refusal.error, refusal.message):
        cumla.BlockSparsePlan(**{**NUMBERS, **refusal.changes}, like=np.zeros(1))


def of_rows(name: str, shape: tuple[int, ...], **changes: Any) -> dict[str, Any]:
    """Factors for each row of an e4m3 cache of 6 pages of 32 tokens, one array of this shape."""
    given = {n: np.ones((6, 32, 2, 64), np.uint8) for n in "kv"}
    given |= {n: np.ones((2, 192), np.float32) for n in ("k_scale", "v_scale")}
    return attending(**given | {name: np.ones(shape, np.float32)} | changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            of_rows("v_scale", (2, 191)),
            ValueError,
            "v_scale: needs shape (2, 192), or more columns, got (2, 191); give each kv head and",
        ),
        (of_rows("k_scale", (3, 192)), ValueError, "k_scale: needs shape (2, 192), or more col"),
        (
            of_rows("k_scale", (2,)),
            ValueError,
            "k_scale: needs factors of rows, as v_scale has, got others; broadcast them to that",
        ),
        (
            of_rows(
                "k_scale", (2, 192), k=np.ones((6, 32, 2, 64), F16), v=np.ones((6, 32, 2, 64), F16)
            ),
            ValueError,
            "k_scale: needs an e4m3 cache, got float16; leave it out",
        ),
        (
            of_rows("k_scale", (2, 192), v_scale=np.ones((2, 192))),
            TypeError,
            "v_scale: needs float32, got float64",
        ),
        (of_rows("k_scale", (1, 2, 192)), ValueError, "k_scale: needs factors of rows, as v_scale"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_factors_of_rows(changes: Any, error: type[Exception], message: str) -> None:
    with refused(error, message):
        cumla.block_sparse_attention(**changes)


def test_factors_of_rows_that_no_kernel_takes() -> None:
    """The CPU takes all."""
    given = of_rows("k_scale", (2, 200))
    cumla.block_sparse_attention(**given)
    message = (
        "k_scale: needs, with factors of rows, head_dim and head_dim_v of 80 to 128, up to 16 "
        "heads per kv head, blocks ... got head_dim 64, head_dim_v 64, 2 heads, blocks of 16 and"
    )
    with emulated_gpu(2) as cupy, refused(ValueError, message):
        cumla.block_sparse_attention(**{n: cupy.like(v) for n, v in given.items()})


def test_check_mode_looks_at_no_factors_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of rows that no query sees may be anything."""
    monkeypatch.setenv("CUMLA_CHECK", "1")
    given = of_rows("k_scale", (2, 192))
    given["k_scale"][:, -32:] = np.nan
    assert np.isfinite(cumla.block_sparse_attention(**given).lse).all()


def test_updates_and_runs() -> None:
    given = attending()
    lens = given.pop("kv_lens")
    arrays = {name: given[name] for name in ("q", "k", "v", "block_indices")}
    plan = cumla.BlockSparsePlan.from_arrays(**arrays, block_size=given.pop("block_size"))
    with refused(ValueError, "plan: never updated; call plan.update(kv_lens) before the first run"):
        plan.run(**given)
    with refused(ValueError, "qo_indptr: needs q of three axes, got 4; leave it out"):
        plan.update(lens, qo_indptr=int32(0, 2, 4))
    with refused(TypeError, "block_size: needs to be given when the plan is made, got it in"):
        plan.update(lens, block_size=16)
    plan.update(lens)
    with refused(ValueError, "plan: made for topk 3, got topk 2; make a plan for this shape"):
        plan.run(**given | {"block_indices": given["block_indices"][..., :2]})
    with refused(TypeError, "kv_lens: needs to be given to update, got it in run"):
        plan.run(**given, kv_lens=lens)
    with refused(ValueError, "qo_indptr: needs offsets of the requests"):
        ragged = arrays | {"q": arrays["q"].reshape(4, 4, 64)}
        cumla.BlockSparsePlan.from_arrays(**ragged, block_size=16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lens": int32(50, 65)}, "kv_lens[1]: needs a length from 0 to ... 64, got 65"),
        ({"kv_lens": int32(-1, 7)}, "kv_lens[0]: needs a length from 0"),
        (RAGGED | {"qo_indptr": int32(0, 3, 2)}, "qo_indptr[2]: needs a number from qo_indptr[1]"),
        (RAGGED | {"qo_indptr": int32(0, 3, 9)}, "qo_indptr[2]: needs a number from qo_indptr[1]"),
    ],
    ids=str,
)
def test_check_mode(changes: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    with refused(ValueError, message):
        cumla.block_sparse_attention(**attending(**changes))
    with refused(ValueError, message):
        cumla.block_scores(**scoring(**changes))


@pytest.mark.parametrize(("at", "value"), [(1, 65), (3, -1)])
def test_check_mode_of_a_choice(at: int, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of tokens in place of blocks, among others: forced blocks would be others."""
    monkeypatch.setenv("CUMLA_CHECK", "1")
    given = selecting()
    cumla.select_blocks(**given)
    given["visible"] = given["visible"].copy()
    given["visible"][at] = value
    width = given["scores"].shape[-1]
    need = f"visible[{at}]: needs a number of blocks from 0 to {width}, got {value}; the kernels"
    with refused(ValueError, need):
        cumla.select_blocks(**given)
