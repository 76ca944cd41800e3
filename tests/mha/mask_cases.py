# SPDX-License-Identifier: Apache-2.0
"""Masks, each by its builder and by the rule for one query and one key: the tests of builders, on
the CPU, in the emulator and on a GPU, compare the two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from cumla.mha.mask import AttentionMask

MOST, LEAST = (1 << 31) - 1, -(1 << 31)


class Query(NamedTuple):
    """A query token of a request."""

    row: int
    request: int
    index: int
    q_len: int
    kv_len: int
    position: int
    begin: int  # row of the request's first query


class Batch(NamedTuple):
    """Requests, with rows of none before and after those of their queries."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    lead: int = 0
    tail: int = 0
    positions: np.ndarray | None = None

    @property
    def total(self) -> int:
        return self.lead + sum(self.q_lens) + self.tail

    @property
    def places(self) -> dict[str, Any]:
        """Return what builders take."""
        bounds = self.lead + np.cumsum([0, *self.q_lens])
        found = {"qo_indptr": bounds.astype(np.int32), "kv_lens": np.array(self.kv_lens, np.int32)}
        found["total_tokens"] = self.total
        return found if self.positions is None else found | {"positions": self.positions}

    def queries(self) -> Iterator[Query]:
        row = self.lead
        for request, (q_len, kv_len) in enumerate(zip(self.q_lens, self.kv_lens, strict=True)):
            begin = row
            for index in range(q_len):
                position = kv_len - q_len + index
                if self.positions is not None:
                    position = int(self.positions[row])
                yield Query(row, request, index, q_len, kv_len, position, begin)
                row += 1


class Case(NamedTuple):
    """A call of a builder, and whether a query sees a key."""

    builder: str
    batch: Batch
    given: dict[str, Any]
    sees: Callable[[Query, int], bool]

    def __repr__(self) -> str:
        options = [f"{n}={v}" for n, v in self.given.items() if not hasattr(v, "shape")]
        return "-".join([self.builder, *options])

    def build(self, put: Callable[[Any], Any] = lambda array: array, **more: Any) -> AttentionMask:
        given = {**self.given, **self.batch.places, **more}
        there = {n: put(v) if hasattr(v, "shape") else v for n, v in given.items()}
        builder: Callable[..., AttentionMask] = getattr(AttentionMask, self.builder)
        return builder(**there)

    def check(self, mask: AttentionMask, get: Callable[[Any], Any] = np.asarray) -> None:
        """Compare what the arrays show with the rule; rows of no request have to be empty."""
        arrays = {name: get(array) for name, array in mask.given.items()}
        seen = {}
        for query in self.batch.queries():
            seen[query.row] = {j for j in range(query.kv_len) if self.sees(query, j)}
            found = {j for j in range(query.kv_len) if shown(arrays, query, j)}
            assert found == seen[query.row], (self, query)
        for row in {*range(self.batch.total)} - seen.keys():
            if "end" in arrays:
                assert (arrays["start"][row], arrays["end"][row]) == (0, -1)
            if "tree" in arrays:
                assert not arrays["tree"][row].any()


def shown(arrays: dict[str, Any], query: Query, key: int) -> bool:
    """Tell whether the arrays of a mask show a key of a causal call."""
    row, request = query.row, query.request
    if "tree" in arrays:
        begin = query.kv_len - query.q_len
        if "tree_start" in arrays:
            begin = int(arrays["tree_start"][request])
        if key >= begin:
            word, bit = divmod(key - begin, 32)
            words = arrays["tree"][row]
            return word < len(words) and bool(int(words[word]) >> bit & 1)
    first = int(arrays["start"][row]) if "start" in arrays else 0
    last = query.kv_len - query.q_len + query.index
    if "end" in arrays:
        last = int(arrays["end"][row])
    in_prefix = "prefix_len" in arrays and key < int(arrays["prefix_len"][request])
    return first <= key <= last or in_prefix


# --- batches -------------------------------------------------------------------------------------


def batches() -> list[Batch]:
    rng = np.random.default_rng(5)
    many = rng.integers(0, 4, 70)
    found = [
        Batch((7,), (7,)),
        Batch((1, 0, 5, 40), (9, 4, 5, 70), lead=2, tail=3),
        Batch((3, 4), (2, 0)),  # fewer keys than queries
        Batch((0, 0), (5, 0), tail=4),
        Batch(tuple(many), tuple(many + rng.integers(0, 30, 70)), lead=1),
    ]
    ragged = found[1]
    depths = rng.integers(-3, 80, ragged.total)
    depths[:5] = MOST, LEAST, 0, -1, 69
    return [*found, ragged._replace(positions=depths.astype(np.int32))]


# --- intervals -----------------------------------------------------------------------------------


def window_cases(batch: Batch) -> Iterator[Case]:
    for left, right in ((0, 0), (3, 0), (None, 2), (4, -1), (MOST, 1), (-1, None)):

        def sees(q: Query, j: int, left: Any = left, right: Any = right) -> bool:
            near = left in (None, -1) or j >= q.position - left
            return near and (right in (None, -1) or j <= q.position + right)

        yield Case("windows", batch, {"left": left, "right": right}, sees)


def chunk_cases(batch: Batch) -> Iterator[Case]:
    for size, lookback in ((1, 0), (4, 0), (3, 2), (64, 1), (MOST, 0)):

        def sees(q: Query, j: int, size: int = size, back: int = lookback) -> bool:
            return j <= q.position and j // size >= q.position // size - back

        yield Case("chunks", batch, {"size": size, "lookback": lookback}, sees)
    for size in (1, 4, 32):

        def in_block(q: Query, j: int, size: int = size) -> bool:
            return j // size <= q.position // size

        yield Case("blocks", batch, {"size": size}, in_block)


def flag_cases(batch: Batch) -> Iterator[Case]:
    flags = np.arange(len(batch.q_lens)) % 3 != 1
    for kind in (bool, np.uint8):
        for window in (None, 5):

            def sees(q: Query, j: int, window: Any = window) -> bool:
                if window is not None and abs(q.position - j) > window:
                    return False
                return j <= q.position or not flags[q.request]

            yield Case("causal_flags", batch, {"flags": flags.astype(kind), "window": window}, sees)


def span_cases(batch: Batch) -> Iterator[Case]:
    rng = np.random.default_rng(len(batch.q_lens))
    count = len(batch.q_lens)
    begin = rng.integers(-2, 60, (count, 40))
    spans = np.stack([begin, begin + rng.integers(0, 9, begin.shape)], axis=-1).astype(np.int32)
    spans[:, 3:] = 0, 0  # which is none
    if count > 2:
        spans[2, :4] = (0, 2), (3, 4), (LEAST, -1), (5, 2)  # at position 0, and two beside
    many = spans.copy()
    many[:, 35] = 1, 50  # beyond the spans that a warp looks at together
    of_rows = np.full((batch.total, 2), -1, np.int32)
    for q in batch.queries():
        holding = [s for s in spans[q.request] if s[0] < s[1] and s[0] <= q.position <= s[1]]
        if holding:
            of_rows[q.row] = holding[0]
    for given in (spans, many, spans[:, :0], of_rows):
        for window, clamp in ((None, False), (2, False), (2, True), (0, True), (90, False)):

            def sees(
                q: Query, j: int, given: Any = given, window: Any = window, clamp: Any = clamp
            ) -> bool:
                listed = given[q.request].tolist() if given.ndim == 3 else [given[q.row].tolist()]
                in_span = any(s < e and s <= q.position <= e and s <= j <= e for s, e in listed)
                near = window is None or q.position - j <= window
                causal = j <= q.position
                if clamp:
                    return (causal or in_span) and near
                return (causal and near) or in_span

            options = {"spans": given, "window": window, "clamp": clamp}
            yield Case("image_spans", batch, options, sees)


def interval_cases() -> list[Case]:
    makers = (window_cases, chunk_cases, flag_cases, span_cases)
    return [case for batch in batches() for make in makers for case in make(batch)]


# --- trees ---------------------------------------------------------------------------------------


def trees(batch: int, drafts: int) -> np.ndarray:
    """Random trees: each draft sees itself and its ancestors."""
    rng = np.random.default_rng(drafts)
    found = np.zeros((batch, drafts, drafts), bool)
    for tree in found:
        for i in range(drafts):
            if i:
                tree[i] = tree[rng.integers(0, i)]
            tree[i, i] = True
    return found


def depths(tree: np.ndarray) -> np.ndarray:
    return tree.sum(axis=-1) - 1


def packed(rows: np.ndarray, kind: Any = np.uint8) -> np.ndarray:
    """Rows of bits, the lowest first."""
    size = np.dtype(kind).itemsize
    found = np.packbits(rows, axis=-1, bitorder="little")
    short = -found.shape[-1] % size
    return np.pad(found, [*[(0, 0)] * (found.ndim - 1), (0, short)]).view(kind)


def tree_case(batch: Batch, tree: np.ndarray, form: str, window: int | None = None) -> Case:
    """Make a case of trees (batch, drafts, drafts) in one of the forms."""
    rng = np.random.default_rng(3)
    given: dict[str, Any] = {"window": window, "full": form.startswith("full")}
    rows = np.zeros((batch.total, tree.shape[2]), bool)
    flat: list[np.ndarray] = []
    for q in batch.queries():
        rows[q.row] = tree[q.request, q.index]
    for request, (q_len, kv_len) in enumerate(zip(batch.q_lens, batch.kv_lens, strict=True)):
        whole = rng.random((q_len, kv_len)) < 0.5  # columns before the drafts are not looked at
        first = max(kv_len - q_len, 0)
        whole[:, first:] = tree[request, :q_len, first - (kv_len - q_len) : q_len]
        flat.append(whole.ravel())
    if form == "square":
        given["mask"] = tree
    elif form == "full":
        given["mask"] = np.concatenate([*flat, [True] * 9])
    elif form == "full bits":
        given["mask"] = np.concatenate([*map(packed, flat), np.uint8([255])])
    else:
        given["mask"] = packed(rows, form)
        if form == "uint16":
            given["mask"] = given["mask"][:, 0] if given["mask"].shape[1] == 1 else given["mask"]

    def sees(q: Query, j: int) -> bool:
        draft = j - (q.kv_len - q.q_len)
        near = window is None or j >= q.position - window
        if draft < 0:
            return near
        if window is not None:
            positions = batch.positions
            at = j if positions is None else int(positions[q.begin + draft])
            near = at >= q.position - window
        return near and bool(tree[q.request, q.index, draft])

    return Case("from_tree", batch, given, sees)


def tree_cases() -> list[Case]:
    found = []
    forms = ("square", "uint8", "uint16", "uint32", "full", "full bits")
    for q_lens, kv_lens, drafts in (
        ((1,), (1,), 1),
        ((7, 7, 7), (30, 7, 91), 7),
        ((16,) * 40, tuple(range(16, 136, 3)), 16),
        ((33, 0, 5), (50, 9, 5), 40),
        ((64, 256), (64, 300), 256),
        ((4,), (2,), 4),  # fewer keys than queries
    ):
        batch = Batch(q_lens, kv_lens, tail=2)
        tree = trees(len(q_lens) + 2, drafts)
        found += [tree_case(batch, tree, form) for form in forms]
        positions = np.zeros(batch.total, np.int64)
        for q in batch.queries():
            positions[q.row] = q.kv_len - q.q_len + depths(tree)[q.request, q.index]
        by_depth = batch._replace(positions=positions)
        found += [tree_case(by_depth, tree, form, 2) for form in ("square", "full")]
        found += [tree_case(batch, tree, "uint32", 5)]
    return found


# --- any values ----------------------------------------------------------------------------------


def hostile(seed: int) -> tuple[str, dict[str, Any], bool]:
    """Make a call whose integers mean nothing; and whether its offsets do not decrease."""
    rng = np.random.default_rng(seed)
    extremes = np.array([LEAST, LEAST + 1, -1, 0, 1, 5, 40, 1 << 20, MOST - 1, MOST])

    def garbage(*shape: int) -> np.ndarray:
        some = rng.integers(-9, 60, shape)
        return np.where(rng.random(shape) < 0.3, rng.choice(extremes, shape), some).astype(np.int32)

    batch, total = int(rng.integers(1, 70)), int(rng.integers(1, 90))
    bounds, is_ordered = garbage(batch + 1), bool(rng.integers(2))
    if is_ordered:
        bounds.sort()
    places = {"kv_lens": garbage(batch), "qo_indptr": bounds, "total_tokens": total}
    if rng.integers(2):
        wide = rng.choice([-(1 << 62), -1, 0, 7, 1 << 40], total)
        places["positions"] = garbage(total) if rng.integers(2) else wide
    window = int(rng.choice([-1, 0, 3, MOST]))
    bits = rng.integers(0, 256, (total, 5)).astype(np.uint8)
    calls: list[tuple[str, dict[str, Any]]] = [
        ("windows", {"left": window, "right": int(rng.choice([-1, 0, 3, MOST]))}),
        ("chunks", {"size": int(rng.choice([1, 7, MOST])), "lookback": int(rng.choice([0, MOST]))}),
        ("blocks", {"size": int(rng.choice([1, 7, MOST]))}),
        ("causal_flags", {"flags": bits[:1, :1].repeat(batch), "window": window}),
        ("image_spans", {"spans": garbage(batch, 33, 2), "window": window}),
        ("image_spans", {"spans": garbage(total, 2), "window": window, "clamp": True}),
        ("from_tree", {"mask": bits, "window": window}),
        ("from_tree", {"mask": rng.random((batch + 1, 9, 9)) < 0.5, "window": window}),
        ("from_tree", {"mask": rng.random(700) < 0.5, "full": True, "window": window}),
        ("from_tree", {"mask": bits.ravel(), "full": True, "window": window}),
    ]
    builder, given = calls[seed % len(calls)]
    return builder, given | places, is_ordered
