# SPDX-License-Identifier: Apache-2.0
"""Masks of attention on the CPU: their builders, and attention against loops over all keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cumla.mha.mask import AttentionMask
from tests.calls import refused
from tests.mha.mask_cases import Case, interval_cases, tree_cases


@pytest.mark.parametrize("case", interval_cases(), ids=repr)
def test_intervals(case: Case) -> None:
    case.check(case.build())


@pytest.mark.parametrize("case", tree_cases(), ids=repr)
def test_trees(case: Case) -> None:
    case.check(case.build())


# --- what is refused ------------------------------------------------------------------------------

LENS = np.array([5, 9], np.int32)
BOUNDS = np.array([0, 2, 4], np.int32)
ROWS = np.zeros(4, np.int32)
TREE = np.zeros((2, 2, 2), bool)


@pytest.mark.parametrize(
    ("builder", "given", "error", "message"),
    [
        ("blocks", {"size": 0, "kv_lens": LENS, "q_len": 1}, ValueError, "size: needs a number fr"),
        ("blocks", {"size": 2.0, "kv_lens": LENS, "q_len": 1}, TypeError, "size: needs an int"),
        (
            "chunks",
            {"size": 2, "lookback": -1, "kv_lens": LENS},
            ValueError,
            "lookback: needs a nu",
        ),
        (
            "windows",
            {"left": -2, "kv_lens": LENS, "q_len": 1},
            ValueError,
            "left: needs a number f",
        ),
        ("windows", {"left": 2, "kv_lens": LENS}, ValueError, "qo_indptr: needed to tell the quer"),
        (
            "windows",
            {"left": 2, "kv_lens": LENS, "qo_indptr": BOUNDS},
            ValueError,
            "total_tokens: needs the number of rows of q beside qo_indptr, got None; pass it, or",
        ),
        (
            "windows",
            {"left": 2, "kv_lens": LENS, "qo_indptr": BOUNDS, "q_len": 2},
            ValueError,
            "q_len: needs no qo_indptr beside it, got both; pass one of them",
        ),
        (
            "windows",
            {"left": 2, "kv_lens": LENS, "q_len": 2, "positions": ROWS[:3]},
            ValueError,
            "total_tokens: needs batch * q_len = 4, got 3; pass arrays of as many rows",
        ),
        (
            "windows",
            {"left": 2, "kv_lens": LENS[:1], "qo_indptr": BOUNDS, "total_tokens": 4},
            ValueError,
            "kv_lens: needs shape (batch,) with batch 2, got (1,); give each request of the batch",
        ),
        (
            "windows",
            {"left": 2, "kv_lens": LENS.astype(np.int64), "q_len": 2},
            TypeError,
            "kv_lens: needs int32, got int64; convert it first",
        ),
        (
            "image_spans",
            {"spans": np.zeros((2, 3, 2), np.int32), "q_len": 2},
            ValueError,
            "kv_lens: needed, got None; pass the keys of each request",
        ),
        (
            "image_spans",
            {"spans": np.zeros((2, 3, 3), np.int32), "kv_lens": LENS, "q_len": 1},
            ValueError,
            "spans: needs shape (batch, spans, 2) with batch 2, spans 3, got (2, 3, 3)",
        ),
        (
            "image_spans",
            {"spans": np.zeros((3, 2), np.int32), "kv_lens": LENS, "q_len": 2},
            ValueError,
            "total_tokens: needs batch * q_len = 4, got 3",
        ),
        (
            "causal_flags",
            {"flags": ROWS, "kv_lens": LENS, "q_len": 2},
            TypeError,
            "flags: needs bool or uint8, got int32",
        ),
        (
            "from_tree",
            {"mask": np.zeros((2, 2, 3), bool)},
            ValueError,
            "mask: needs shape (batch, drafts, drafts), got (2, 2, 3); pass a column for each dra",
        ),
        (
            "from_tree",
            {"mask": np.zeros(9, bool), "kv_lens": LENS, "q_len": 2},
            ValueError,
            "mask: needs shape (batch, drafts, drafts) of bool, or rows of bits, got bool of shap",
        ),
        (
            "from_tree",
            {"mask": np.zeros(9, bool), "full": True, "q_len": 2},
            ValueError,
            "kv_lens: needed with full=True, got None",
        ),
        (
            "from_tree",
            {"mask": TREE, "full": True, "kv_lens": LENS, "q_len": 2},
            ValueError,
            "mask: needs one axis with full=True, got shape (2, 2, 2); flatten it",
        ),
        (
            "from_tree",
            {"mask": np.zeros((1, 257, 257), bool)},
            ValueError,
            "mask: needs at most 256 drafts a request, got 257; cut the tree",
        ),
        (
            "from_tree",
            {"mask": TREE[:1], "kv_lens": LENS},
            ValueError,
            "mask: needs a tree for each of 2 requests, got shape (1, 2, 2); pass one for each",
        ),
        (
            "from_tree",
            {"mask": TREE, "window": 3},
            ValueError,
            "kv_lens: needed with window, unless positions is passed, got None",
        ),
        (
            "from_tree",
            {"mask": TREE, "out": AttentionMask(start=ROWS)},
            ValueError,
            "out: needs tree, got tree None; allocate what this mask consists of",
        ),
        (
            "from_tree",
            {"mask": TREE, "out": AttentionMask(tree=np.zeros((4, 9), np.uint32))},
            ValueError,
            "out.tree: needs 1 to 8 words a row, got shape (4, 9); a tree has at most 256 keys",
        ),
        (
            "from_tree",
            {"mask": TREE, "out": AttentionMask(tree=np.zeros((4, 2), np.uint32)[:, :1])},
            ValueError,
            "out.tree: needs rows without gaps, got a stride of 8 bytes; make a contiguous copy",
        ),
        (
            "blocks",
            {"size": 2, "kv_lens": LENS, "q_len": 2, "out": AttentionMask(ROWS, ROWS[:3])},
            ValueError,
            "out.end: needs shape (total_tokens,) with total_tokens 4, got (3,); pass those of the",
        ),
        (
            "blocks",
            {"size": 2, "kv_lens": LENS, "q_len": 2, "out": AttentionMask(ROWS, ROWS)},
            ValueError,
            "out.end: needs memory of its own, got memory that out.start uses too",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_refusals(builder: str, given: Any, error: type[Exception], message: str) -> None:
    with refused(error, message):
        getattr(AttentionMask, builder)(**given)


def test_check_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    with refused(ValueError, "kv_lens[1]: needs ... got -3"):
        AttentionMask.blocks(4, kv_lens=np.array([3, -3], np.int32), q_len=1)
    with refused(ValueError, "qo_indptr[2]: needs ... got 1"):
        bounds = np.array([0, 2, 1], np.int32)
        AttentionMask.blocks(4, kv_lens=LENS, qo_indptr=bounds, total_tokens=4)


FULL = np.ones(2 * 5 + 2 * 9, bool)


@pytest.mark.parametrize(
    ("mask", "given", "message"),
    [
        (
            FULL[:-1],
            {"full": True},
            "mask: needs 2 x 9 elements of request 1, from 10 on, got (2",
        ),
        (
            np.where(np.arange(28) == 19 + 3, False, FULL),
            {"full": True},
            "mask: needs true for all keys before ... got false for request 1, draft 1, key 3; it",
        ),
        (
            np.uint8([255, 3, 255, 0b11110111, 3]),
            {"full": True},
            "mask: needs true for all keys before ... got false for request 1, draft 1, key 2; it",
        ),
        (np.ones((2, 2, 2), bool), {"q_len": 3}, "mask: needs at most 2 drafts a request, got 3 q"),
        (
            np.ones(2 * 300 * 9, bool),
            {"full": True, "qo_indptr": np.int32([0, 300, 300]), "total_tokens": 300},
            "mask: needs at most 256 drafts a request, got 300 query tokens of request 0; the ot",
        ),
    ],
    ids=range(5),
)
def test_trees_in_check_mode(
    mask: Any, given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden keys before the drafts would be seen, and drafts that no bit shows would not."""
    places = {"kv_lens": LENS, **given}
    if "qo_indptr" not in places:
        places.setdefault("q_len", 2)
    AttentionMask.from_tree(mask, **places)
    monkeypatch.setenv("CUMLA_CHECK", "1")
    with refused(ValueError, message):
        AttentionMask.from_tree(mask, **places)
    for good in (FULL, np.uint8([255, 3, 255, 255, 3])):
        AttentionMask.from_tree(good, full=True, kv_lens=LENS, q_len=2)


def test_given_arrays_come_back() -> None:
    out = AttentionMask(start=ROWS.copy(), end=ROWS.copy(), prefix_len=LENS)
    assert AttentionMask.blocks(4, kv_lens=LENS, q_len=2, out=out) is out
    assert out.end.tolist() == [3, 4, 7, 8]
    assert out.prefix_len is LENS


def test_rows_of_bits_of_any_dtype_need_q_len_alone() -> None:
    """The numbers of rows and of queries tell that of requests."""
    rows = np.array([1, 3, 5, 1, 2, 7])
    wants = AttentionMask.from_tree(rows.astype(np.uint8), kv_lens=LENS, q_len=3).tree
    assert wants.ravel().tolist() == rows.tolist()
    for dtype in (np.uint8, np.uint16, np.uint32, np.int32):
        found = AttentionMask.from_tree(rows.astype(dtype), q_len=3).tree
        assert (found == wants).all()
    all_seen = AttentionMask.from_tree(np.full(64, -1, np.int32), q_len=32).tree
    assert (all_seen == 2**32 - 1).all()
    with pytest.raises(ValueError, match="kv_lens: needed to tell the number of requests"):
        AttentionMask.from_tree(rows.astype(np.uint8), q_len=4)


def test_arrays_of_pytorch_and_jax() -> None:
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    for make in (torch.tensor, jax.numpy.asarray):
        flags = make(np.array([True, False]))
        mask = AttentionMask.causal_flags(flags, kv_lens=make(LENS), q_len=2)
        assert type(mask.end) is type(flags)
        assert mask.end.tolist() == [3, 4, 8, 8]
        bits = AttentionMask.from_tree(make(TREE | np.eye(2, dtype=bool))).tree
        assert bits.tolist() == [[1], [2], [1], [2]]


def test_in_a_program_of_jax() -> None:
    jax = pytest.importorskip("jax")
    import cumla.jax  # noqa: F401

    @jax.jit
    def built(spans: Any, lens: Any) -> Any:
        mask = AttentionMask.image_spans(spans, kv_lens=lens, q_len=4)
        return mask.start, mask.end

    spans = jax.numpy.asarray(np.array([[[3, 6]], [[0, 0]]], np.int32))
    start, end = built(spans, jax.numpy.asarray(LENS))
    assert start.tolist() == [0] * 8
    assert end.tolist() == [1, 2, 4, 4, 5, 6, 7, 8]
