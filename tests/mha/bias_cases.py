# SPDX-License-Identifier: Apache-2.0
"""Calls of attention with a bias, and the rule of each bias for a query, a head and a key: the
tests of the CPU, of the emulator and of a GPU compare the two."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np

import cumla
from tests.mha.attention_cases import ROUNDING
from tests.mha.mask_cases import Query
from tests.mha.test_attention_mask import KINDS, Problem, Sample
from tests.mha.test_attention_mask import make as make_masked

BIASES = ("slopes", "slopes of requests", "rows", "long rows", "heads", "heads from")
WINDOWS = (None, None, (0, 0), (3, 0), (20, 5), (-1, 2), (70, -1))
_FACTORS: dict[str, tuple[Any, ...]] = {
    "columns": ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (80, 48)),
    "dtype": ("bfloat16", "float16", "float32"),
    "cache": ("same", "same", "e4m3"),
    "page_size": (1, 16, 64, 0),
    "q_lens": ((1, 1, 1), (4, 4, 4), (16, 16, 16), (64, 64, 64), (0, 8, 3, 0, 1), "equal"),
    "heads": ((2, 2), (4, 1), (8, 1), (16, 1), (6, 3)),
    "sinks": (False, False, True),
    "pages": ("table", "list"),
}


class Biased(NamedTuple):
    """A call, its bias, and what it consists of."""

    problem: Problem
    arrays: dict[str, np.ndarray]
    window: tuple[int, int] | None
    causal: bool

    @property
    def options(self) -> dict[str, Any]:
        return {"window": self.window, "causal": self.causal}

    def bias(self, put: Any = lambda array: array) -> cumla.AttentionBias:
        return cumla.AttentionBias(**{name: put(array) for name, array in self.arrays.items()})

    def sees(self, q: Query, j: int) -> bool:
        left, right = self.window or (-1, -1)
        right = 0 if self.causal else right
        return (left < 0 or j >= q.position - left) and (right < 0 or j <= q.position + right)

    def of(self, q: Query, j: int) -> np.ndarray:
        """Return what the scores of all heads get."""
        if "slopes" in self.arrays:
            slopes = self.arrays["slopes"].astype(np.float64)
            return (slopes[q.request] if slopes.ndim == 2 else slopes) * (j - q.position)
        table, distance = self.arrays["table"].astype(np.float64), q.position - j
        if table.ndim == 2:
            first = int(self.arrays["first"][0]) if "first" in self.arrays else 0
            return table[:, min(max(distance - first, 0), table.shape[1] - 1)]
        known = 0 <= distance < table.shape[2]
        return table[q.row, :, distance] if known else np.zeros(table.shape[1])


def samples(count: int) -> list[tuple[str, Sample]]:
    """List the same points every time; each bias comes equally often."""
    rng = random.Random(20261130)
    found = []
    for seed in range(count):
        chosen = {name: rng.choice(values) for name, values in _FACTORS.items()}
        found.append(
            (BIASES[seed % len(BIASES)], Sample("windows", softcap=None, seed=seed, **chosen))
        )
    return found


def make(kind: str, sample: Sample) -> Biased:
    problem, rng = make_masked(sample), np.random.default_rng(sample.seed)
    batch, heads = problem.case.batch, sample.heads[0]
    given = problem.given
    by_request = "block_table" in given or given["q"].ndim == 4
    some = random.Random(sample.seed)
    arrays: dict[str, np.ndarray]
    if kind.startswith("slopes"):
        shape = (len(batch.q_lens), heads) if by_request and "requests" in kind else (heads,)
        arrays = {"slopes": rng.normal(0.1, 0.3, shape).astype(np.float32)}
    elif "rows" in kind:
        length = some.choice((1, 2, 31, 64)) if kind == "rows" else 300
        dtype = some.choice([*KINDS.values()])
        arrays = {"table": rng.normal(size=(batch.total, heads, length)).astype(dtype)}
        hidden = rng.random(arrays["table"].shape) < 0.1
        arrays["table"][hidden] = -np.inf
    else:
        arrays = {"table": rng.normal(size=(heads, some.choice((1, 2, 40)))).astype(np.float32)}
        if "from" in kind:
            arrays["first"] = np.int32([some.choice((-20, -1, 3))])
    return Biased(problem, arrays, some.choice(WINDOWS), bool(some.randrange(2)))


def attend(biased: Biased, query: Query, q: Any) -> Any:
    """Attend from one query row by the formula: out, lse, and out of the sizes of all values."""
    problem = biased.problem
    given = problem.given
    seen = [j for j in range(query.kv_len) if biased.sees(query, j)]
    scale = given.get("k_scale", 1.0), given.get("v_scale", 1.0)
    k, v = (
        rows[query.request][seen].astype(np.float64) * factor
        for rows, factor in zip((problem.keys, problem.values), scale, strict=True)
    )
    group = len(q) // k.shape[1]
    scores = np.einsum("hc,khc->hk", q.astype(np.float64), k.repeat(group, axis=1))
    scores *= q.shape[-1] ** -0.5
    for i, j in enumerate(seen):
        scores[:, i] += biased.of(query, j)
    weights = np.exp(scores)
    total = weights.sum(axis=1) + np.exp(given.get("sinks", np.full(len(q), -np.inf)))
    weights /= np.where(total, total, 1)[:, None]
    values = v.repeat(group, axis=1)
    out, sizes = (np.einsum("hk,khc->hc", weights, rows) for rows in (values, np.abs(values)))
    with np.errstate(divide="ignore"):
        return out, np.log(total), sizes


def check(biased: Biased, got: Any, dtype: str) -> None:
    """Compare the rows of requests, of the reference or of a kernel."""
    q, out, lse = biased.problem.given["q"], got.out, got.lse
    if q.ndim == 4:
        q, out = (rows.reshape(-1, *rows.shape[2:]) for rows in (q, out))
        lse = lse.reshape(len(q), -1)
    for query in biased.problem.case.batch.queries():
        expected, of_lse, sizes = attend(biased, query, q[query.row])
        errors = np.linalg.norm(out[query.row].astype(np.float64) - expected, axis=-1)
        tolerance = 3 * ROUNDING[dtype] * np.linalg.norm(sizes, axis=-1) + 1e-6
        assert (errors <= tolerance).all(), (query, errors, tolerance)
        np.testing.assert_allclose(lse[query.row], of_lse, rtol=1.2e-5, atol=1.2e-5)


def poisoned(biased: Biased) -> Biased:
    """Put NaN into the elements of a table whose keys no query sees."""
    arrays = dict(biased.arrays)
    table = arrays.get("table")
    if table is None:
        return biased
    used = np.zeros(table.shape, bool)
    for query in biased.problem.case.batch.queries():
        for j in range(query.kv_len):
            distance = query.position - j
            if not biased.sees(query, j):
                continue
            if table.ndim == 3 and 0 <= distance < table.shape[2]:
                used[query.row, :, distance] = True
            elif table.ndim == 2:
                first = int(arrays["first"][0]) if "first" in arrays else 0
                used[:, min(max(distance - first, 0), table.shape[1] - 1)] = True
    arrays["table"] = np.where(used, table, np.nan).astype(table.dtype)
    return biased._replace(arrays=arrays)


def hiding(dtype: Any, least: float, columns: int = 64) -> tuple[dict[str, Any], Any]:
    """A call and the bias of its heads: least where a key is to be hidden, all keys of head 1."""
    rng, lens = np.random.default_rng(3), np.int32([300, 70])
    q = rng.standard_normal((2, 2, 4, columns)).astype(dtype)
    k, v = (rng.standard_normal((6, 64, 2, columns)).astype(dtype) for _ in "kv")
    table = rng.standard_normal((4, 400)).astype(np.float32)
    table[:, 20:70] = table[1] = table[2, 1:] = least
    pages = rng.permutation(6)[:5].astype(np.int32)
    given = {"q": q, "k": k, "v": v, "kv_lens": lens}
    return given | {"block_table": np.stack([pages, pages[::-1]])}, table
