# SPDX-License-Identifier: Apache-2.0
"""top_k against one sort: every shape of the kernel, every kind of scores, any row.

Memory around what may be read is NaN, and around what may be written a sentinel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cumla
from cumla.launch.sparse import top_k
from tests.gpu.tools import kernels
from tests.gpu.tools.sanitize import SELECTIONS
from tests.sparse.top_k_cases import (
    DTYPES,
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

KERNELS = ("top_k",)
cp: Any = pytest.importorskip("cupy")

Array = Any
SENTINEL = -7
SHAPES = (
    *SELECTIONS,
    *(("cluster", 4), ("wide", 4), ("wide", 8), ("sampled", 8), ("streamed", 8)),
)


@pytest.fixture(autouse=True)
def _settled() -> None:
    cumla.prepare(cumla.top_k)
    cp.cuda.Device().synchronize()


def on_device(scores: np.ndarray, begin: int = 0, gap: int = 8) -> Array:
    """A copy whose rows begin at any element and have NaN around them."""
    rows, width = scores.shape
    wide = np.full((rows, begin + width + gap), np.nan, scores.dtype)
    wide[:, begin : begin + width] = scores
    bits = cp.asarray(wide.view(f"u{scores.itemsize}"))
    return bits.view(scores.dtype)[:, begin : begin + width]


def widest(name: str, cluster: int) -> int:
    """The most columns that a shape holds, or many."""
    many = 300_003
    shape = top_k._SHAPES[name]
    held = shape.held + shape.stored * (32 if shape.is_sampled else 1)
    return min(held * 4 * shape.threads * cluster or many, many) - 3


class Guarded:
    """Indices in memory whose other elements must stay."""

    def __init__(self, rows: int, k: int) -> None:
        self.whole = cp.full((rows + 2, k + 5), SENTINEL, np.int32)
        self.array = self.whole[1:-1, 3:-2]

    def taken(self) -> np.ndarray:
        found = self.array.get()
        self.array[...] = SENTINEL
        assert bool((self.whole == SENTINEL).all())
        return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "cluster"), SHAPES)
def test_shapes(name: str, cluster: int, kind: str) -> None:
    """Each at its limit, and with rows of little more than k."""
    rng = np.random.default_rng(len(kind) + cluster)
    width = widest(name, cluster)
    scores = scores_of(kind, 5, width)
    lengths = np.array([width, width - 5, width // 2 + 3, 2049, 17], np.int32)
    for is_sorted in (False, True):
        k, out = int(rng.choice([1, 512, 2048])), None
        out = Guarded(5, k)
        want = expected(scores, k, lengths, is_sorted=is_sorted)
        with shaped(name, cluster):
            result = cumla.top_k(
                on_device(scores, begin=int(rng.integers(4))),
                k,
                row_lens=cp.asarray(lengths),
                out=out.array,
                values=True,
                sorted=is_sorted,
            )
        np.testing.assert_array_equal(out.taken(), want)
        np.testing.assert_array_equal(result.counts.get(), np.minimum(lengths, k))
        assert same_bits(result.values.get(), values_at(scores, want))


@pytest.mark.parametrize(("name", "cluster"), SHAPES)
def test_no_score_outside_of_a_row_is_seen(name: str, cluster: int) -> None:
    """NaN, the largest of all, is before the starts and behind the lengths."""
    width, k = min(widest(name, cluster), 20_000), 2048
    scores = scores_of("normal", 5, width)
    starts = np.array([0, 1, 2, 7, 4], np.int32)
    lengths = np.array([width - 1, width - 9, width // 2, 2049, 17], np.int32)
    want = expected(scores, k, lengths, starts)
    columns = np.arange(width)
    inside = (columns >= starts[:, None]) & (columns < (starts + lengths)[:, None])
    scores[~inside] = np.nan
    with shaped(name, cluster):
        given = {"row_lens": cp.asarray(lengths), "row_starts": cp.asarray(starts)}
        got = cumla.top_k(on_device(scores), k, **given)
    np.testing.assert_array_equal(got.indices.get(), want)


@pytest.mark.parametrize("steps", [1 << 5, 1 << 7, 1 << 20])
@pytest.mark.parametrize("keys", [1000, 3500, 8192])
@pytest.mark.parametrize(("name", "cluster"), SHAPES)
def test_few_keys_in_the_last_bin(name: str, cluster: int, keys: int, steps: int) -> None:
    """Of few steps, some keys of a bin are equal."""
    scores, k = steps_of_one_octave(keys, steps)
    with shaped(name, cluster):
        got = cumla.top_k(on_device(scores), k)
    np.testing.assert_array_equal(got.indices.get(), expected(scores, k))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "cluster"), SHAPES)
def test_few_keys_at_both_ends_and_in_the_middle(name: str, cluster: int, dtype: str) -> None:
    """NaN, inf, and numbers around 0."""
    scores, ks = both_ends(dtype)
    for k in ks:
        with shaped(name, cluster):
            got = cumla.top_k(on_device(scores), k)
        np.testing.assert_array_equal(got.indices.get(), expected(scores, k))


@pytest.mark.parametrize(("name", "cluster"), [("scanned", 1), ("sampled", 2)])
def test_a_limit_among_scores_that_compare_equal(name: str, cluster: int) -> None:
    """Subnormal numbers are told apart where the sample's limit is one of them."""
    scores = near_zero(0, 4, 20_000)
    with shaped(name, cluster):
        result = cumla.top_k(on_device(scores), 2048)
    np.testing.assert_array_equal(result.indices.get(), expected(scores, 2048))


WIDTHS = (1, 2047, 2048, 2049, 4097, 8192, 16384, 32768, 65537, 131072, 262144, 1 << 20)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_widths(width: int, dtype: str) -> None:
    """As the launcher chooses, for any k: ragged rows, in an array that begins at any element."""
    rows = 130 if width < 40000 else 9
    rng = np.random.default_rng(width)
    scores = scores_of("normal", rows, width, dtype)
    starts = rng.integers(0, width // 3 + 1, rows).astype(np.int32)
    lengths = np.array([rng.integers(0, width - start + 1) for start in starts], np.int32)
    for k in sorted({1, 64, 512, 1024, 2048, min(width, 20_000)}):
        out = Guarded(rows, k)
        cumla.top_k(
            on_device(scores, begin=1, gap=2),
            k,
            row_lens=cp.asarray(lengths),
            row_starts=cp.asarray(starts),
            out=out.array,
        )
        np.testing.assert_array_equal(out.taken(), expected(scores, k, lengths, starts))


def test_many_rows() -> None:
    rng = np.random.default_rng(0)
    scores = scores_of("normal", 4096, 4000)
    lengths = rng.integers(0, 4001, 4096).astype(np.int32)
    result = cumla.top_k(on_device(scores), 512, row_lens=cp.asarray(lengths))
    np.testing.assert_array_equal(result.indices.get(), expected(scores, 512, lengths))


@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_slots(page_size: int) -> None:
    """Any page number, request and offset: -1 where there is no slot."""
    rng = np.random.default_rng(page_size)
    host: dict[str, Any] = {
        "block_table": rng.integers(-3, 2**31 - 1, (5, 9000 // page_size)).astype(np.int32),
        "row_to_request": np.array([0, 4, 5, -1, 2, 2**31 - 1, 1, 3], np.int32),
        "offsets": np.array([0, 5, 0, 0, -500, 0, 2**31 - 1, 0], np.int32),
        "row_lens": np.array([9000, 9000, 9000, 700, 9000, 9000, 9000, 0], np.int32),
    }
    host["block_table"][:, ::2] //= 1 << 20
    scores = scores_of("narrow", 8, 9000)
    want_positions = np.empty((8, 2048), np.int32)
    want = cumla.reference.top_k(
        scores, 2048, page_size=page_size, out_positions=want_positions, **host
    )
    given = {name: cp.asarray(array) for name, array in host.items()}
    out, positions = Guarded(8, 2048), Guarded(8, 2048)
    cumla.top_k(
        on_device(scores),
        2048,
        page_size=page_size,
        out=out.array,
        out_positions=positions.array,
        **given,
    )
    np.testing.assert_array_equal(out.taken(), want.indices)
    np.testing.assert_array_equal(positions.taken(), want_positions)


def test_lengths_and_starts_of_any_number() -> None:
    extremes = np.array([-(2**31), -1, 0, 2049, 2**31 - 1], np.int32)
    lengths, starts = (part.ravel() for part in np.meshgrid(extremes, extremes))
    scores = scores_of("normal", len(lengths), 5000)
    result = cumla.top_k(
        on_device(scores), 2048, row_lens=cp.asarray(lengths), row_starts=cp.asarray(starts)
    )
    want = cumla.reference.top_k(scores, 2048, row_lens=lengths, row_starts=starts)
    for got, expected_part in ((result.indices, want[0]), (result.counts, want[3])):
        np.testing.assert_array_equal(got.get(), expected_part)


def test_rows_beyond_4_gib() -> None:
    """Strides and rows in 64 bits."""
    rows, width = 3, 40000
    far = cp.empty((rows, 1 << 30), np.float32)
    scores = scores_of("normal", rows, width)
    far[:, -width:] = cp.asarray(scores)
    got = cumla.top_k(far[:, -width:], 2048).indices.get()
    np.testing.assert_array_equal(got, expected(scores, 2048))
    starts = cp.full(rows, (1 << 30) - width, np.int32)
    got = cumla.top_k(far, 2048, row_starts=starts).indices.get()
    np.testing.assert_array_equal(got, expected(scores, 2048))


@pytest.mark.parametrize(("rows", "width"), [(64, 8192), (64, 131072), (8, 131072), (2, 1 << 20)])
def test_repeats(rows: int, width: int) -> None:
    """The same bits while other kernels take multiprocessors at random."""
    scores = on_device(scores_of("two", rows, width))
    want = cumla.top_k(scores, 2048).indices
    for seed in range(100):
        kernels.noise(seed)
        assert bool((cumla.top_k(scores, 2048).indices == want).all())


def test_a_graph_with_new_scores_and_lengths() -> None:
    """Lengths change between replays, up to the captured width."""
    rng = np.random.default_rng(0)
    scores, lengths = cp.empty((16, 70000), np.float32), cp.empty(16, np.int32)
    out, counts = cp.empty((16, 2048), np.int32), cp.empty(16, np.int32)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        cumla.top_k(scores, 2048, row_lens=lengths, out=out, counts=counts)
        graph = stream.end_capture()
    for seed, most in enumerate((70000, 3000, 2048)):
        host = scores_of("normal", 16, 70000, seed=seed)
        new = rng.integers(0, most + 1, 16).astype(np.int32)
        scores[...], lengths[...] = cp.asarray(host), cp.asarray(new)
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        np.testing.assert_array_equal(out.get(), expected(host, 2048, new))
        np.testing.assert_array_equal(counts.get(), np.minimum(new, 2048))


def test_it_waits_for_the_kernel_before() -> None:
    """Its launch may overlap that kernel's end: it reads nothing before."""
    host = scores_of("normal", 8, 32768)
    late, scores = cp.asarray(host), cp.zeros((8, 32768), np.float32)
    for _ in range(5):
        scores[...] = 0
        kernels.spin()
        scores[...] = late
        got = cumla.top_k(scores, 2048).indices
        np.testing.assert_array_equal(got.get(), expected(host, 2048))
