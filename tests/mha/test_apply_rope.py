# SPDX-License-Identifier: Apache-2.0
"""`cumla.apply_rope`: what it refuses, and what it gives back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cumla
from tests.calls import (
    Refusal,
    aligned,
    all_of,
    badly_laid_out,
    refused,
    turned,
    wrong,
    wrong_type,
)
from tests.fake_cuda import FakeBindings, FakeCuPy

F16, F32 = np.float16, np.float32


@all_of(
    [
        wrong_type("q", aligned((5, 4, 64), np.float64), "bfloat16 or float16 or float32, got fl"),
        *(
            wrong("q", aligned(shape), f"shape (tokens, heads, head_dim) ... got {shape}; reshape")
            for shape in ((5, 64), (1, 5, 4, 64), (5, 4, 60), (5, 0, 64), (5, 4, 1024))
        ),
        wrong_type("k", aligned((5, 2, 64), F16), "bfloat16, got float16; convert"),
        *(
            wrong("k", aligned(s), f"tokens and columns of q, whose shape is (5, 4, 64), got {s}")
            for s in ((4, 2, 64), (5, 2, 32))
        ),
        *badly_laid_out("q", aligned((5, 4, 64))),
        *badly_laid_out("k", aligned((5, 2, 64))),
        *badly_laid_out("q_out", aligned((5, 4, 64))),
        Refusal({"k": None, "k_out": aligned((5, 2, 64))}, ValueError, "k: needed with k_out"),
        wrong_type("q", None, "an array, got None; pass keys alone as q, with k=None"),
        wrong_type("positions", None, "an array of"),
        wrong_type("positions", np.zeros(5, F32), "int32 or int64, got float32; convert"),
        wrong("positions", np.zeros(4, int), "shape (tokens,) with tokens 5, got (4,); reshape"),
        wrong_type("cos_sin", None, "an array of"),
        wrong_type("cos_sin", aligned((9, 64), "f8"), "float32 or bfloat16 or float16, got float"),
        wrong_type("cos_sin", np.ones((9, 32), "c8"), "float32 ... pass the pair (table.real"),
        wrong("cos_sin", aligned((9, 32, 2), F32), "shape ... pass the pair (table[..., 0]"),
        wrong("cos_sin", aligned((9, 128), F32), "rotary_dim ... rotary_dim 128 ... angle once"),
        wrong("cos_sin", aligned((9, 80), F32), "rotary_dim a multiple of 16 ... the 64 columns"),
        wrong("cos_sin", aligned((9, 24), F32), "rotary_dim a multiple of 16 ... rotary_dim 24"),
        wrong("cos_sin", (aligned((9, 32), F32),), "one array, or a tuple or list ... got 1 of"),
        wrong(
            "cos_sin", aligned((9, 64), F32, 2), "an address and strides that are multiples of 4"
        ),
        wrong("rotary_offset", -1, "a number from 0, got -1; pass the first column"),
    ]
)
def test_refusals(refusal: Refusal) -> None:
    with refused(refusal.error, refusal.message):
        cumla.apply_rope(**turned() | refusal.changes)


def test_what_comes_back() -> None:
    """New arrays, or in place; rows without a position stay as they are."""
    given = turned()
    q, k = cumla.apply_rope(**given)
    assert (q.shape, k.shape) == (given["q"].shape, given["k"].shape)
    assert (q[3] == given["q"][3]).all()
    assert not (q[0] == given["q"][0]).all()
    alone, none = cumla.apply_rope(**given | {"k": None})
    assert none is None
    assert (alone == q).all()
    rotated = cumla.apply_rope(**given, q_out=given["q"], k_out=given["k"])
    assert rotated[0] is given["q"]
    assert (given["q"] == q).all()
    assert (given["k"] == k).all()


def test_check_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    positions = np.array([0, 9, 8, -1, 3])
    with refused(ValueError, "positions[1]: needs a row of cos_sin, up to 8 ... would not be rot"):
        cumla.apply_rope(**turned() | {"positions": positions})


@pytest.mark.parametrize(
    ("tokens", "kv_heads", "grid"), [(1, 0, (2, 1, 1)), (64, 2, (3, 2, 1)), (65, 5, (5, 3, 1))]
)
def test_grids(
    tokens: int,
    kv_heads: int,
    grid: tuple[int, int, int],
    cupy: FakeCuPy,
    bindings: FakeBindings,
) -> None:
    given: dict[str, Any] = {
        "q": aligned((tokens, 4, 64)),
        "k": aligned((tokens, kv_heads, 64)) if kv_heads else None,
        "positions": np.zeros(tokens, np.int32),
        "cos_sin": aligned((9, 64), F32),
    }
    cumla.apply_rope(**{name: cupy.like(array) for name, array in given.items()})
    assert bindings.launched[0].grid == grid
