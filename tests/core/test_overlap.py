# SPDX-License-Identifier: Apache-2.0
"""Arrays that share memory, against a set of their bytes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumla.core.arrays import ArrayView
from cumla.core.overlap import refuse_overlap, share_memory

DTYPES = {"uint8": 1, "bfloat16": 2, "float32": 4, "int64": 8}


def view(array: np.ndarray) -> ArrayView:
    return ArrayView(array.ctypes.data, array.shape, array.strides, array.dtype.name, 0)


def bytes_of(view: ArrayView) -> set[int]:
    itemsize = DTYPES[view.dtype]
    starts = (
        view.ptr + sum(i * stride for i, stride in zip(index, view.strides, strict=True))
        for index in itertools.product(*map(range, view.shape))
    )
    return {start + i for start in starts for i in range(itemsize)}


@st.composite
def views(draw: st.DrawFn) -> ArrayView:
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    strides = st.one_of(st.integers(-24, 24), st.sampled_from([0, 1, 2, 8, 16, 32, 64]))
    steps = tuple(draw(st.lists(strides, min_size=len(shape), max_size=len(shape))))
    return ArrayView(draw(st.integers(1000, 1100)), shape, steps, dtype, 0)


@st.composite
def slices(draw: st.DrawFn) -> tuple[ArrayView, ArrayView]:
    """Two slices of one array."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    memory = np.zeros(shape, np.float32)
    if draw(st.booleans()):
        memory = memory.transpose(draw(st.permutations(range(len(shape)))))
    pair = []
    for _ in range(2):
        cuts = []
        for length in memory.shape:
            start = draw(st.integers(0, length - 1))
            step = draw(st.sampled_from([1, 1, 2]))
            stop = draw(st.integers(start + 1, length))
            cuts.append(slice(start, stop, step))
        part = memory[tuple(cuts)]
        pair.append(view(part[::-1] if draw(st.booleans()) else part))
    return pair[0], pair[1]


@settings(deadline=None)
@given(views(), views())
def test_no_overlap_is_missed(one: ArrayView, two: ArrayView) -> None:
    if bytes_of(one) & bytes_of(two):
        assert share_memory(one, two)
        with pytest.raises(ValueError, match=r"^out: needs memory of its own, .* that x uses too"):
            refuse_overlap({"out": one}, {"x": two})
        with pytest.raises(ValueError, match=r"^lse: needs memory of its own, .* out uses too"):
            refuse_overlap({"out": one, "lse": two}, {})


@settings(deadline=None)
@given(slices())
def test_no_overlap_of_slices_is_missed(pair: tuple[ArrayView, ArrayView]) -> None:
    assert share_memory(*pair) >= bool(bytes_of(pair[0]) & bytes_of(pair[1]))


@settings(deadline=None)
@given(views(), views())
def test_arrays_beside_each_other_are_accepted(one: ArrayView, two: ArrayView) -> None:
    low, high = bytes_of(one), bytes_of(two)
    apart = not low or not high or max(low) < min(high) or max(high) < min(low)
    if apart:
        assert not share_memory(one, two)
        refuse_overlap({"out": one}, {"x": two})


WIDE = np.zeros((3, 2, 8, 576), np.int16)  # a query: requests, positions, heads, columns
CACHE = np.zeros((16, 4, 64), np.float32)
APART = {
    "columns": (WIDE[..., :512], WIDE[..., 512:]),
    "columns of some heads": (WIDE[:, :, 1:5, :512], WIDE[:, :, 2:, 512:]),
    "heads": (WIDE[:, :, :4], WIDE[:, :, 4:]),
    "every other head": (WIDE[:, :, ::2], WIDE[:, :, 1::2]),
    "positions": (WIDE[:, 0], WIDE[:, 1]),
    "positions of other heads": (WIDE[:, 0, :3], WIDE[:, 1, 2:]),
    "requests": (WIDE[:2], WIDE[2:]),
    "columns of padded rows": (WIDE[:, :, :7, :64], WIDE[:, :, :7, 64:128]),
    "every other page": (CACHE[::2], CACHE[1::2]),
    "rows of pages": (CACHE[:, :2], CACHE[:, 2:]),
    "turned": (WIDE[..., :512].transpose(2, 0, 1, 3), WIDE[:, 0, :, 512:]),
    "upside down": (CACHE[::-1, :2], CACHE[:, 3]),
    "nothing": (WIDE[:0], WIDE),
    "one element": (WIDE[0, 0, 0, 0, ...], WIDE[0, 0, 0, 1:]),
}


@pytest.mark.parametrize("name", APART)
def test_parts_of_one_array_are_told_apart(name: str) -> None:
    one, two = map(view, APART[name])
    assert not bytes_of_array(APART[name][0]) & bytes_of_array(APART[name][1])
    assert not share_memory(one, two)
    assert not share_memory(two, one)
    refuse_overlap({"out": one}, {"x": two})
    refuse_overlap({"out": one, "lse": two}, {})


def bytes_of_array(array: np.ndarray) -> set[int]:
    names = {"int16": "bfloat16"}
    seen = view(array)
    return bytes_of(seen._replace(dtype=names.get(seen.dtype, seen.dtype)))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (WIDE, WIDE),
        (WIDE[..., :512], WIDE[..., 511:]),
        (WIDE[:, :, :4], WIDE[:, :, 3:]),
        (WIDE[:2], WIDE[1:]),
        (WIDE[0, 0, 0, 5:6], WIDE[:, 0, 0, 5]),
        (CACHE[::-1], CACHE[3, 1, 7:8]),
    ],
)
def test_parts_that_share(one: np.ndarray, two: np.ndarray) -> None:
    assert share_memory(view(one), view(two))
    assert share_memory(view(two), view(one))


def test_in_place() -> None:
    """The very same elements, and no others, of the input that is named."""
    q_pe = WIDE[..., 512:]
    given = {"rows": view(CACHE), "q_pe": view(q_pe), "positions": None}
    refuse_overlap({"q_pe_out": view(q_pe)}, given, {"q_pe_out": "q_pe"})
    for other in (q_pe[1:], WIDE[..., 510:574], q_pe[::-1]):
        with pytest.raises(ValueError, match=r"^q_pe_out: .* q_pe uses too"):
            refuse_overlap({"q_pe_out": view(other)}, given, {"q_pe_out": "q_pe"})
    for allowed in (None, {"q_pe_out": "rows"}, {"kv_cache": "q_pe"}):
        with pytest.raises(ValueError, match=r"^q_pe_out: .* q_pe uses too"):
            refuse_overlap({"q_pe_out": view(q_pe)}, given, allowed)


def test_several_outputs() -> None:
    rows = np.zeros((4, 8), np.float32)
    outputs = {"out": view(rows[0]), "lse": view(rows[1]), "scale": view(rows[3]), "absent": None}
    refuse_overlap(outputs, {"q": view(rows[2])})
    refuse_overlap({"out": None}, {"q": view(rows)})
    with pytest.raises(
        ValueError, match=r"^scale: .* that lse uses too; pass another array, or a copy"
    ):
        refuse_overlap(outputs | {"scale": view(rows[1])}, {"q": view(rows[2])})
    with pytest.raises(ValueError, match=r"^lse: .* that q uses too"):
        refuse_overlap(outputs, {"q": view(rows[1:3])})
