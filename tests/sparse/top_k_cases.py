# SPDX-License-Identifier: Apache-2.0
"""Scores of all kinds, and the definition of what is selected of them: one sort by three keys."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

from cumla.core import operation
from cumla.launch.sparse import top_k
from cumla.sparse import top_k as top_k_operation

Array = np.ndarray[Any, Any]

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
SPECIAL = np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-45], np.float32)


def _crowded(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Nine tenths in one bin of the first pass, and of the second; they differ below."""
    near = 1 + rng.random(shape) * 2.0**-20
    return np.where(rng.random(shape) < 0.9, near, rng.standard_normal(shape))


def near_zero(seed: int, rows: int, width: int) -> Array:
    """A fifth around 0, which comparisons on a GPU take for 0, and few above: some of them win."""
    rng = np.random.default_rng(seed)
    around = rng.integers(-(1 << 20), 1 << 20, (rows, width)) * 2.0**-149
    share, large = rng.random((rows, width)), rng.standard_normal((rows, width))
    scores = np.where(share < 0.04, abs(large), np.where(share < 0.8, -1 - abs(large), around))
    return scores.astype(np.float32)


def both_ends(dtype: str) -> tuple[Array, tuple[int, ...]]:
    """One row with few scores in the bins that have what is larger or smaller, and k's for each."""
    rng = np.random.default_rng(0)
    large = np.array([np.nan, np.inf, 1e30, 7e4, 65535], np.float32)
    small = np.array([0, -0.0, 1e-5, -1e-5, 1.6e-5, -1.6e-5, 1e-39, -1e-39], np.float32)
    parts = (
        rng.choice(large, 30),
        1 + rng.random(1000),
        rng.choice(small, 60),
        -1 - rng.random(1000),
        -rng.choice(large[1:], 30),
    )
    scores = rng.permutation(np.concatenate(parts).astype(np.float32))[None]
    with np.errstate(over="ignore", invalid="ignore"):
        return scores.astype(DTYPES[dtype]), (15, 500, *range(1031, 1090, 7), 1500, 2105)


def steps_of_one_octave(keys: int, steps: int) -> tuple[Array, int]:
    """Rows of 8,192 scores, of which `keys` have `steps` values, in 64 bins alike."""
    rng = np.random.default_rng(keys)
    scores = rng.integers(steps, 2 * steps, (3, 8192)).astype(np.float32) / np.float32(steps)
    scores[:, keys:] = -1.0
    return rng.permuted(scores, axis=1), keys // 3


KINDS: dict[str, Callable[[np.random.Generator, tuple[int, int]], Array]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "narrow": lambda rng, shape: 1 + rng.random(shape) * 2.0**-9,
    "equal": lambda rng, shape: np.full(shape, 1.5),
    "two": lambda rng, shape: np.where(rng.random(shape) < 0.05, 2.0, -1.0),
    "crowded": _crowded,
    "special": lambda rng, shape: rng.choice(SPECIAL, shape),
    "subnormal": lambda rng, shape: rng.integers(-(1 << 20), 1 << 20, shape) * 2.0**-149,
    "ascending": lambda rng, shape: np.sort(rng.standard_normal(shape)),
    "descending": lambda rng, shape: -np.sort(rng.standard_normal(shape)),
}


def scores_of(kind: str, rows: int, width: int, dtype: str = "float32", seed: int = 0) -> Array:
    """Make scores of a kind."""
    scores = KINDS[kind](np.random.default_rng(seed), (rows, width))
    with np.errstate(over="ignore", invalid="ignore"):
        return scores.astype(np.float32).astype(DTYPES[dtype])


def selected(scores: Array, k: int, is_sorted: bool = False) -> Array:
    """Positions of the k largest scores of one row: NaN, then by value, then by position."""
    numbers = scores.astype(np.float64)
    is_nan = np.isnan(numbers)
    order = np.lexsort((np.arange(len(numbers)), np.where(is_nan, 0, -numbers), ~is_nan))
    return order[:k] if is_sorted else np.sort(order[:k])


def expected(
    scores: Array,
    k: int,
    lengths: Array | None = None,
    row_starts: Array | None = None,
    is_sorted: bool = False,
) -> Array:
    """Positions of all rows, from their starts; -1 where a row has no more."""
    rows, width = scores.shape
    positions = np.full((rows, k), -1, np.int32)
    for row in range(rows):
        start = 0 if row_starts is None else row_starts[row]
        end = width if lengths is None else start + lengths[row]
        best = selected(scores[row, start:end], k, is_sorted)
        positions[row, : len(best)] = best
    return positions


def values_at(scores: Array, positions: Array) -> Array:
    """The scores at positions, -inf where there are none."""
    return np.where(
        positions < 0, scores.dtype.type(-np.inf), np.take_along_axis(scores, positions, 1)
    )


@contextlib.contextmanager
def shaped(name: str, cluster: int) -> Iterator[None]:
    """Let one shape of the kernel take all rows, with that many blocks each."""
    _forget()
    with mock.patch.object(top_k, "choose", return_value=(name, cluster)):
        yield
    _forget()


def _forget() -> None:
    """Forget what earlier calls launched, also for other arrays of the same form."""
    top_k_operation._TOP_K.ready.clear()
    operation.forms.clear()


def same_bits(got: Array, want: Array) -> bool:
    """Return whether two arrays are equal to the bit, NaN and zeros of either sign included."""
    whole = (np.ascontiguousarray(got), np.ascontiguousarray(want))
    return all(a.shape == got.shape and a.dtype == got.dtype for a in whole) and np.array_equal(
        *(a.view(np.uint8) for a in whole)
    )
