# SPDX-License-Identifier: Apache-2.0
"""combine_prefixes on the CPU, against float64: dtypes, strides, sinks, rows of no request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cumla.core._dlpack import ArrayView
from cumla.launch.split.combine_prefixes import combine_prefixes_launch
from cumla.launch.split.prefix_requests import PrefixLayout, PrefixShape
from tests.emulator import emulate, emulated_gpu
from tests.launch.split.combine_prefixes_mirror import combine_prefixes

TOKENS, HEADS = 7, 3
ATOL = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}


def view(array: Any, dtype: str | None = None) -> ArrayView:
    return ArrayView(array.ctypes.data, array.shape, array.strides, dtype or array.dtype.name, 0)


@pytest.mark.parametrize("columns", [8, 64, 128, 200, 512])
@pytest.mark.parametrize("dtype", ATOL)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_rows(columns: int, dtype: str, has_sinks: bool) -> None:
    rng = np.random.default_rng(columns)
    shape = PrefixShape(1, TOKENS, HEADS, columns, 16, 1, False)
    layout = PrefixLayout.of(shape, 1000)
    states = np.array([2, 1, 0, 2, 1, 2, 0], np.int32)
    with emulated_gpu() as cupy:
        buffer = cupy.empty(layout.nbytes, np.uint8)  # NaN

        def part(at: int, sizes: tuple[int, ...], kind: Any = np.float32) -> Any:
            count = int(np.prod(sizes)) * 4
            return buffer[at : at + count].view(kind).reshape(sizes)

        outs = part(layout.out, (2, TOKENS, HEADS, columns))
        lses = part(layout.lse, (2, TOKENS, HEADS))
        part(layout.states, (TOKENS,), np.int32)[...] = states
        outs[1], lses[1] = (
            rng.standard_normal(outs[1].shape),
            9 * rng.standard_normal((TOKENS, HEADS)),
        )
        both = states == 2
        outs[0][both] = rng.standard_normal(outs[0][both].shape)
        lses[0][both] = 9 * rng.standard_normal(lses[0][both].shape)
        lses[1][0, 0], outs[1][0, 0] = -np.inf, np.nan  # no key in the rest: its row is not read
        lses[0][3, 1] = -np.inf
        lses[1][3, 1] = -np.inf
        sinks = cupy.asarray(np.float32([3, -np.inf, -40])) if has_sinks else None
        kind = np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
        out = cupy.empty((TOKENS, HEADS, columns + 8), kind)[..., :columns]
        lse = cupy.empty((HEADS, TOKENS)).T
        by_head = view(lse.T[None])
        there = (shape, layout, buffer.ctypes.data)
        emulate(
            combine_prefixes_launch(
                *there, view(out, dtype), by_head, None if sinks is None else view(sinks)
            )
        )
    known = np.array(outs, np.float64)
    of_lse = np.array(lses, np.float64)
    known[0][~both], of_lse[0][~both] = 0, -np.inf
    known[1][0, 0] = 0
    want, want_lse = combine_prefixes(known, of_lse, None if sinks is None else np.asarray(sinks))
    got = np.asarray(out)
    if dtype == "bfloat16":
        got = (got.astype(np.uint32) << 16).view(np.float32)
    rows = states > 0
    np.testing.assert_allclose(got[rows].astype(np.float64), want[rows], atol=ATOL[dtype] * 3)
    np.testing.assert_allclose(np.asarray(lse)[rows], want_lse[rows], rtol=1e-5, atol=1e-5)
    assert (np.asarray(out)[~rows].view(np.uint8) == 0xFF).all()  # of no request: as they were
    assert np.isnan(np.asarray(lse)[~rows]).all()
