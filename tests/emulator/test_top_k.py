# SPDX-License-Identifier: Apache-2.0
"""All shapes of top_k's kernel on the CPU: every kind of scores, and rows that end where memory
does."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import cumla
from tests.emulator import Array, CuPy, emulated_gpu
from tests.emulator.fenced import Fenced
from tests.gpu.tools.sanitize import SELECTIONS
from tests.selection import some
from tests.sparse.top_k_cases import (
    KINDS,
    both_ends,
    expected,
    near_zero,
    same_bits,
    scores_of,
    shaped,
    steps_of_one_octave,
    values_at,
)


@pytest.fixture
def cupy() -> Iterator[CuPy]:
    with emulated_gpu() as cupy:
        yield cupy


CASES = [(*shape, kind) for kind in KINDS for shape in SELECTIONS]


@pytest.mark.parametrize(("name", "cluster", "kind"), some(CASES, 20))
def test_selection(name: str, cluster: int, kind: str, cupy: CuPy) -> None:
    """Longest rows, long ones, and those of little more than k."""
    width, k = 7001, 2048
    scores = scores_of(kind, 3, width)
    lengths = np.array([width, width // 2, k + 1], np.int32)
    for is_sorted in (False, True):
        want = expected(scores, k, lengths, is_sorted=is_sorted)
        with shaped(name, cluster):
            result = cumla.top_k(
                cupy.asarray(scores),
                k,
                row_lens=cupy.asarray(lengths),
                values=True,
                sorted=is_sorted,
            )
        np.testing.assert_array_equal(result.indices, want)
        assert same_bits(np.asarray(result.values), values_at(scores, want))


SAMPLED = (("scanned", 1), ("sampled", 2))
LONG = [(*shape, kind) for kind in (*KINDS, "near zero", "sampled ones") for shape in SAMPLED]


@pytest.mark.parametrize(("name", "cluster", "kind"), some(LONG, 8))
def test_a_limit_from_a_sample(name: str, cluster: int, kind: str, cupy: CuPy) -> None:
    """Rows longer than the list, for which the limit is good, too low, or too high."""
    width, k = 16400, 2048
    scores = scores_of(kind if kind in KINDS else "normal", 3, width)
    if kind == "near zero":
        scores = near_zero(0, 3, width)
    if kind == "sampled ones":  # the largest scores are those of the sample: too few for the list
        index = np.arange(1024, dtype=np.uint64)
        random = (index * 0x9E3779B1 & 0xFFFFFFFF) >> 16
        groups = ((index << 16 | random) * (width // 4) >> 26).astype(int)
        scores.reshape(3, -1, 4)[:, groups[:200]] += 10
    lengths = np.array([width, 8193, 8192], np.int32)
    for is_sorted in (False, True):
        want = expected(scores, k, lengths, is_sorted=is_sorted)
        with shaped(name, cluster):
            result = cumla.top_k(
                cupy.asarray(scores),
                k,
                row_lens=cupy.asarray(lengths),
                values=True,
                sorted=is_sorted,
            )
        np.testing.assert_array_equal(result.indices, want)
        assert same_bits(np.asarray(result.values), values_at(scores, want))


@pytest.mark.parametrize("steps", [1 << 5, 1 << 7, 1 << 20])
@pytest.mark.parametrize("keys", some([1000, 3500, 8192], 2))
def test_few_keys_in_the_last_bin(keys: int, steps: int, cupy: CuPy) -> None:
    """Of few steps, some keys of a bin are equal."""
    scores, k = steps_of_one_octave(keys, steps)
    with shaped("short", 1):
        got = cumla.top_k(cupy.asarray(scores), k)
    np.testing.assert_array_equal(got.indices, expected(scores, k))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_few_keys_at_both_ends_and_in_the_middle(dtype: str, cupy: CuPy) -> None:
    """NaN, inf, and numbers around 0."""
    scores, ks = both_ends(dtype)
    for k in ks:
        with shaped("short", 1):
            got = cumla.top_k(cupy.asarray(scores), k)
        np.testing.assert_array_equal(got.indices, expected(scores, k))


@pytest.mark.parametrize("dtype", some(["float32", "float16"], 2))
@pytest.mark.parametrize(("name", "cluster"), some(SELECTIONS, 5))
def test_nothing_after_a_length_is_read(name: str, cluster: int, dtype: str, cupy: CuPy) -> None:
    """Rows end before the width, where memory does that nobody may touch."""
    fenced = Fenced(at_end=True)
    for length in (2047, 4097, 4098, 4099):
        scores = fenced.copy(scores_of("normal", 1, length, dtype))
        wide = np.lib.stride_tricks.as_strided(scores, (1, 6000)).view(Array)
        lengths = cupy.asarray(np.array([length], np.int32))
        with shaped(name, cluster):
            result = cumla.top_k(wide, 100, row_lens=lengths)
        np.testing.assert_array_equal(result.indices, expected(scores, 100))


@pytest.mark.parametrize("dtype", some(["float32", "float16"], 2))
@pytest.mark.parametrize(("name", "cluster"), some(SELECTIONS, 5))
def test_nothing_after_a_row_is_read(name: str, cluster: int, dtype: str, cupy: CuPy) -> None:
    """Rows end where memory does that nobody may touch, and begin at any of four scores."""
    fenced = Fenced(at_end=True)
    for width in (4096, 4097, 4098, 4099):
        scores = scores_of("normal", 1, width, dtype)
        with shaped(name, cluster):
            result = cumla.top_k(fenced.copy(scores).view(Array), 100)
        np.testing.assert_array_equal(result.indices, expected(scores, 100))
