# SPDX-License-Identifier: Apache-2.0
"""Calls of attention, drawn at random from all that it can be asked; NumPy arrays."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import cumla
from cumla import reference

__all__ = [
    *("DRAFTS", "FEW_ROWS", "MANY", "NO_KEYS", "RAGGED_COUNTS", "RAGGED_DRAFTS"),
    *(
        "Sample",
        "check",
        "has_few_rows",
        "make",
        "reads_pairs",
        "samples",
        "splits_keys",
        "without_keys",
    ),
]

DTYPES: dict[str, Any] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),  # of no sample but those that ask for it
}
ROUNDING = {"bfloat16": 2.0**-9, "float16": 2.0**-12, "float32": 2.0**-19}
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FACTORS: dict[str, tuple[Any, ...]] = {
    "lens": ((1,), (200, 70, 0), (64, 65), (130, 3), (700,), (3000, 5)),  # the longest is cut
    "queries": ("one", "few", "many", "uniform", "more than keys"),
    "page_size": (1, 3, 8, 16, 48, 64, 128, 0),
    "heads": ((1, 1), (4, 1), (8, 2), (6, 2), (5, 5), (16, 1)),
    "columns": ((64, 64), (128, 128), (192, 128), (256, 256), (96, 96), (40, 8), (80, 136)),
    "dtype": ("bfloat16", "float16"),
    "layout": ("NHD", "HND", "packed", "padded"),
    "pages": ("table", "list"),
    "causal": (True, True, False),
    "window": (None, None, 0, 17, (40, 9), (-1, 3)),
    "softcap": (None, None, 4.0),
    "sinks": (False, False, True),
    "scale": (None, 0.3),
    "outputs": ("new", "given", "float32"),
    "cache": ("same", "same", "e4m3"),  # where columns are multiples of 16
    "factors": ("none", "numbers", "one", "heads", "requests"),  # of e4m3
}

MANY: dict[str, Any] = {"queries": "many", "cache": "same", "heads": (8, 2), "lens": (200, 70, 0)}
"""Fixes what makes row tiles full, so that few multiprocessors take whole ones."""

DRAFTS: dict[str, Any] = MANY | {"queries": "drafts", "heads": (8, 1), "lens": (200, 470, 30)}
"""The same of requests with equally many queries, whose keys are split."""

RAGGED_DRAFTS: list[dict[str, Any]] = [
    DRAFTS
    | {"queries": "ragged drafts", "lens": (200, 470, 0, 30)}
    | {"page_size": page_size, "window": window}
    for page_size in (64, 16, 0)
    for window in (0, 17, 150, (40, 9), (-1, 3))
]
"""The same of requests with different numbers of queries, behind windows."""

PAIRS = tuple(
    {"lens": lens, "queries": queries, "heads": heads, "cache": "same", "window": None}
    | {"columns": columns, "page_size": page_size}
    for lens, queries, heads, columns, page_size in (
        ((200, 70, 0, 64, 130, 1), "uniform", (8, 4), (128, 128), 64),
        ((700, 5, 3, 300, 65, 2000), "one", (8, 4), (96, 96), 128),
        ((64, 65, 128, 3, 900, 2, 1, 1, 77, 400), "few", (16, 2), (128, 72), 64),
    )
)
"""Requests for each multiprocessor whose kv heads thread blocks of attention read in pairs."""

FEW_ROWS = tuple(
    {"lens": lens, "queries": "uniform", "heads": heads, "cache": "same", "columns": columns}
    | {"page_size": page_size, "window": window, "softcap": softcap, "outputs": outputs}
    for (lens, heads, columns, page_size), (window, softcap, outputs) in zip(
        (
            ((700, 5, 3, 300), (8, 2), (128, 128), 64),
            ((200, 70, 0, 64, 130, 2), (4, 1), (192, 128), 16),
            ((64, 65, 128, 900, 2), (4, 4), (256, 256), 64),
            ((2000,), (6, 2), (64, 64), 64),
        )
        * 3,
        (
            *((None, None, "new"), (17, None, "given"), (0, None, "new"), (None, 4.0, "given")),
            *((None, None, "float32"), (None, None, "given"), (17, None, "new")),
            *((17, None, "new"), (0, 4.0, "float32"), (150, None, "new"), (None, None, "new")),
            (None, None, "given"),
        ),
        strict=True,
    )
)
"""Fixes what makes row tiles of attention so small that a thread has one row."""

PAIRED_COUNTS = (2, 3, 5)
"""Multiprocessors among which parts of PAIRS are whole requests, or not."""

RAGGED_COUNTS = (5, 7, 10)
"""Multiprocessors among which keys of RAGGED_DRAFTS are split."""


@dataclass(frozen=True)
class Sample:
    """One point of the grid."""

    lens: tuple[int, ...]
    queries: str
    page_size: int
    heads: tuple[int, int]
    columns: tuple[int, int]
    dtype: str
    layout: str
    pages: str
    causal: bool
    window: Any
    softcap: float | None
    sinks: bool
    scale: float | None
    outputs: str
    cache: str
    factors: str
    seed: int

    @property
    def is_uniform(self) -> bool:
        """Return whether q has an axis of requests."""
        return self.queries in ("uniform", "drafts")

    @property
    def cache_dtype(self) -> Any:
        """Of keys and values."""
        fits = self.dtype != "float32" and all(columns % 16 == 0 for columns in self.columns)
        return E4M3 if self.cache == "e4m3" and fits else DTYPES[self.dtype]


def samples(count: int, **fixed: Any) -> list[Sample]:
    """List the same points every time."""
    rng = random.Random(20261123)
    return [
        Sample(**{name: rng.choice(values) for name, values in FACTORS.items()} | fixed, seed=seed)
        for seed in range(count)
    ]


def make(s: Sample) -> dict[str, Any]:
    """Give the arguments of a call; what is not to be looked at is NaN, or any number."""
    rng = np.random.default_rng(s.seed)
    dtype, (num_heads, _), (head_dim, head_dim_v) = DTYPES[s.dtype], s.heads, s.columns
    q_lens = _q_lens(s)

    def rows(*shape: int, dtype: Any = dtype) -> Any:
        return rng.standard_normal(shape).astype(dtype)

    lead = (len(s.lens), q_lens[0]) if s.is_uniform else (sum(q_lens) + 2,)
    given: dict[str, Any] = {"q": rows(*lead, num_heads, head_dim)}
    if not s.is_uniform:
        given["qo_indptr"] = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    given |= _rows(s, rows) if s.page_size == 0 else _pages(s, rng, rows)
    given |= {"causal": s.causal, "window": s.window, "softcap": s.softcap}
    given["softmax_scale"] = s.scale
    if s.sinks:
        given["sinks"] = (3 * rng.standard_normal(num_heads)).astype(np.float32)
        given["sinks"][0] = -np.inf
    if s.cache_dtype == E4M3:
        given |= _factors(s, rng)
    if s.outputs != "new":
        given["out"] = _poisoned(
            (*lead, num_heads, head_dim_v), np.float32 if s.outputs == "float32" else dtype
        )
        given["lse"] = _poisoned((*lead, num_heads), np.float32)
    return given


def splits_keys(given: dict[str, Any]) -> bool:
    """Return whether several thread blocks of attention_prefill share the keys of a row tile."""
    names = given.keys() & {"q", "k", "v", "qo_indptr", "kv_layout", "causal", "window"}
    plan = cumla.AttentionPlan.from_arrays(**{name: given[name] for name in names})
    return plan.key.choice.is_split and plan.key.parts > 1


def has_few_rows(given: dict[str, Any]) -> bool:
    """Return whether row tiles of attention have a row for a thread."""
    names = given.keys() & {"q", "k", "v", "qo_indptr", "kv_layout", "causal", "window"}
    plan = cumla.AttentionPlan.from_arrays(**{name: given[name] for name in names})
    return plan.key.choice.spec.entry.startswith("attention_few_")


def reads_pairs(given: dict[str, Any]) -> bool:
    """Return whether a thread block of attention reads two kv heads."""
    names = given.keys() & {"q", "k", "v", "qo_indptr", "kv_layout", "causal", "window"}
    plan = cumla.AttentionPlan.from_arrays(**{name: given[name] for name in names})
    return plan.key.choice.box_heads > 1


def _q_lens(s: Sample) -> list[int]:
    return {
        "one": [1 for _ in s.lens],
        "few": [3 * (i + 1) % 7 for i in range(len(s.lens))],
        "many": [min(n, 90) for n in s.lens],
        "uniform": [2 for _ in s.lens],
        "drafts": [20 for _ in s.lens],
        "ragged drafts": [n // 10 for n in s.lens],
        "more than keys": [n % 60 + 5 for n in s.lens],
    }[s.queries]


def _hidden(s: Sample) -> list[int]:
    """Return how many tokens of each request lie before all windows."""
    left = s.window[0] if isinstance(s.window, tuple) else s.window
    if left is None or left < 0:
        return [0 for _ in s.lens]
    return [min(max(n - q - left, 0), n) for n, q in zip(s.lens, _q_lens(s), strict=True)]


def _factors(s: Sample, rng: Any) -> dict[str, Any]:
    """Factors of keys, near 1, and of values, in one form."""
    heads = s.heads[1]
    if s.factors == "none":
        return {}
    if s.factors == "numbers":
        return {"k_scale": 0.75, "v_scale": 3.0}
    has_rows = "block_table" if s.page_size and s.pages == "table" else None
    shape = {"one": (1,), "heads": (heads,), "requests": (len(s.lens), heads)}[s.factors]
    if s.factors == "requests" and has_rows is None and not s.is_uniform:
        shape = (heads,)
    return {
        "k_scale": rng.uniform(0.5, 1.5, shape).astype(np.float32),
        "v_scale": rng.uniform(0.01, 40, shape).astype(np.float32),
    }


def _poisoned(shape: tuple[int, ...], dtype: Any) -> Any:
    array = np.empty(shape, dtype)
    array.view(np.uint8).fill(0xFF)
    return array


def _rows(s: Sample, rows: Any) -> dict[str, Any]:
    """Keys and values one request after the other."""
    kv_indptr = np.concatenate([[0], np.cumsum(s.lens)]).astype(np.int32)
    k = rows(sum(s.lens) + 1, s.heads[1], s.columns[0], dtype=s.cache_dtype)
    v = rows(sum(s.lens) + 1, s.heads[1], s.columns[1], dtype=s.cache_dtype)
    k[sum(s.lens) :] = v[sum(s.lens) :] = np.nan
    for begin, hidden in zip(kv_indptr[:-1], _hidden(s), strict=True):
        k[begin : begin + hidden] = v[begin : begin + hidden] = np.nan
    return {"k": k, "v": v, "kv_indptr": kv_indptr}


def _pages(s: Sample, rng: Any, rows: Any) -> dict[str, Any]:
    """Keys and values in shuffled pages."""
    counts = [-(-n // s.page_size) for n in s.lens]
    total, most = sum(counts) + 2, max(counts) + 1
    table = np.full((len(s.lens), most), 2**31 - 1, np.int32)
    caches: dict[str, Any] = {}
    dtype = s.cache_dtype
    step = 16 // dtype.itemsize
    widths = [columns + (step if s.layout == "padded" else 0) for columns in s.columns]
    if s.layout == "packed":
        both = _poisoned((total, 2, s.page_size, s.heads[1], max(widths)), dtype)
        caches = {name: both[:, i, ..., : s.columns[i]] for i, name in enumerate("kv")}
    else:
        for name, width, columns in zip("kv", widths, s.columns, strict=True):
            axes = (s.page_size, s.heads[1])
            shape = (total, *(axes[::-1] if s.layout == "HND" else axes), width)
            caches[name] = _poisoned(shape, dtype)[..., :columns]
    order, used = rng.permutation(total), 0
    for request, n in enumerate(s.lens):
        for index in range(counts[request]):
            page = table[request, index] = order[used]
            used += 1
            tokens = min(s.page_size, n - index * s.page_size)
            for cache in caches.values():
                one = cache[page].swapaxes(0, 1) if s.layout == "HND" else cache[page]
                one[:tokens] = rows(tokens, *one.shape[1:], dtype=dtype)
                one[: max(_hidden(s)[request] - index * s.page_size, 0)] = np.nan
    given = {**caches, "kv_lens": np.array(s.lens, np.int32)}
    if s.layout == "HND":
        given["kv_layout"] = "HND"
    if s.pages == "table":
        return given | {"block_table": table}
    pages = np.concatenate([table[i, :count] for i, count in enumerate(counts)])
    if not pages.size:
        pages = np.zeros(1, np.int32)
    return given | {
        "kv_indices": np.ascontiguousarray(pages),
        "kv_indptr": np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
    }


def _sums_of_sizes(s: Sample) -> Any:
    """The output for the magnitudes of all values: what errors of weights are multiplied with."""
    given = {name: value for name, value in make(s).items() if name not in ("out", "lse")}
    out, _ = reference.attention(**given | {"v": np.abs(given["v"])})
    return out.astype(np.float64)


def check(s: Sample, got: Any, expected: Any) -> dict[str, float]:
    """Compare the rows of requests; those of no request, where arrays were given, are poison.

    Gives the largest errors, those of out as a share of what is tolerated.
    """
    rows = sum(_q_lens(s))
    (out, lse), (want, want_lse) = ([np.asarray(a) for a in state] for state in (got, expected))
    if not s.is_uniform:
        if s.outputs != "new":
            assert (np.ascontiguousarray(out[rows:]).view(np.uint8) == 0xFF).all()
            assert (np.ascontiguousarray(lse[rows:]).view(np.uint8) == 0xFF).all()
        out, lse, want, want_lse = out[:rows], lse[:rows], want[:rows], want_lse[:rows]
    assert (np.isneginf(lse) == np.isneginf(want_lse)).all()
    seen = np.isfinite(want_lse)
    differences = np.abs(lse[seen] - want_lse[seen])
    assert (differences <= 1.2e-5 * np.maximum(1, np.abs(want_lse[seen]))).all()
    numbers, exact = out.astype(np.float64), want.astype(np.float64)
    errors = np.linalg.norm(numbers - exact, axis=-1)
    # Weights and their sum are rounded, and the output: by a quarter of a last digit on average. Of
    # float32 the scores are, and what the hardware approximates.
    tolerance = 3 * ROUNDING[s.dtype]
    shares = errors / (tolerance * np.linalg.norm(_sums_of_sizes(s)[: len(errors)], axis=-1) + 1e-6)
    assert (shares <= 1).all()
    return {"out": float(shares.max(initial=0)), "lse": float(differences.max(initial=0))}


RISING: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "every block": lambda position: 40 - position / 25,
    "the first key": lambda position: 6.0 * (position == 0),
    "once": lambda position: 5.0 * (position < 400),
}
"""How a score grows from the last key to the first, in which order prefills read them."""


def rising(name: str, columns: tuple[int, int], dtype: Any) -> dict[str, Any]:
    """Queries whose maximum grows while a prefill goes on: 300 of a request of 1,000 tokens."""
    rng = np.random.default_rng(0)
    tokens = 1000

    def rows(*shape: int) -> Any:
        return rng.standard_normal(shape) / 4

    along = np.where(np.arange(columns[0]) < 16, 1.0, 0.0)  # 8 columns are scores of 2
    sizes = RISING[name](np.arange(tokens))[:, None, None]
    return {
        "q": (rows(300, 2, columns[0]) + along).astype(dtype),
        "k": (rows(tokens, 1, columns[0]) + along * sizes).astype(dtype),
        "v": rows(tokens, 1, columns[1]).astype(dtype),
        "kv_lens": np.array([tokens], np.int32),
        "qo_indptr": np.array([0, 300], np.int32),
        "kv_indptr": np.array([0, tokens], np.int32),
        "softmax_scale": 0.5,
    }


def check_rising(got: Any, arguments: dict[str, Any]) -> None:
    """Compare with the reference, row by row."""
    out, lse = (np.asarray(array, np.float64) for array in got)
    want, want_lse = (np.asarray(a, np.float64) for a in reference.attention(**arguments))
    np.testing.assert_allclose(lse, want_lse, rtol=1.2e-5)
    sizes = np.abs(arguments["v"].astype(np.float64)).max()
    np.testing.assert_allclose(out, want, atol=3 * ROUNDING[arguments["q"].dtype.name] * sizes)


NO_KEYS = ("rows", "rows, wild offsets", "no columns", "no pages", "an empty list")
"""How keys and values can have no rows."""


def without_keys(
    form: str, queries: int, dtype: str, page_size: int, columns: tuple[int, int] = (128, 128)
) -> dict[str, Any]:
    """Two requests of so many queries each, over keys and values of zero bytes."""
    rng = np.random.default_rng(queries)
    kept = E4M3 if dtype == "e4m3" else DTYPES[dtype]
    q = rng.standard_normal((2 * queries, 8, columns[0]))
    axes = (0, 2) if form.startswith("rows") else (0, page_size, 2)
    given: dict[str, Any] = {"q": q.astype(DTYPES["bfloat16"] if dtype == "e4m3" else kept)}
    given |= {n: np.empty((*axes, c), kept) for n, c in zip("kv", columns, strict=True)}
    given["qo_indptr"] = np.array([0, queries, 2 * queries], np.int32)
    if not form.startswith("rows"):
        given["kv_lens"] = np.array([70, 0], np.int32)
    return (
        given
        | {
            "rows": {"kv_indptr": np.zeros(3, np.int32)},
            "rows, wild offsets": {"kv_indptr": np.array([0, 500, 2**31 - 1], np.int32)},
            "no columns": {"block_table": np.empty((2, 0), np.int32)},
            "no pages": {"block_table": np.full((2, 3), 5, np.int32)},
            "an empty list": {
                "kv_indptr": np.zeros(3, np.int32),
                "kv_indices": np.empty(0, np.int32),
            },
        }[form]
    )
