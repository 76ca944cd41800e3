# SPDX-License-Identifier: Apache-2.0
"""The argument table, and numbers and flags: what is needed, what came, the way out."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cumla.core.arguments import (
    Array,
    as_number,
    bind,
    check_lies,
    check_output,
    check_own_memory,
    check_workspace,
    check_written,
    checked_flag,
    checked_int,
    checked_scale,
    dtype_name,
)
from cumla.core.arrays import ArrayView
from tests.calls import refused

WAY_OUT = "give each its entry"
TABLE = {
    "q": Array("batch heads 4", ("bfloat16", "float16"), "rows"),
    "lens": Array("batch", ("int32",), way_out=WAY_OUT),
    "indptr": Array("batch+1", ("int32", "int64")),
    "weights": Array("rows*2 heads", ("float32",), "row"),
    "scale": Array("", ("float32",)),
}


def view(
    *shape: int, dtype: str = "int32", strides: tuple[int, ...] | None = None, ptr: int = 1 << 20
) -> ArrayView:
    size = 2 if dtype.endswith("16") else np.dtype(dtype).itemsize
    ends = tuple(int(n) for n in np.cumprod([size, *shape[:0:-1]])[::-1])[: len(shape)]
    return ArrayView(ptr, shape, ends if strides is None else strides, dtype, 0)


def test_sizes_are_bound_by_the_first_that_has_them() -> None:
    views = {
        "q": view(3, 8, 4, dtype="float16", strides=(128, 16, 2)),
        "lens": view(3),
        "indptr": view(4, dtype="int64"),
        "weights": view(6, 8, dtype="float32"),
        "scale": view(dtype="float32"),
        "unknown": view(99),
    }
    sizes = bind(TABLE, views, {"rows*2": 6})
    assert sizes == {"batch": 3, "heads": 8, "rows*2": 6}
    assert bind(TABLE, {"lens": None, "indptr": view(1)}, {}) == {"batch": 0}
    assert bind(TABLE, {}, {"batch": 5}) == {"batch": 5}


@pytest.mark.parametrize(
    ("name", "given", "error", "message"),
    [
        ("q", view(3, 8, 4), TypeError, "needs bfloat16 or float16, got int32; convert it first"),
        ("q", view(3, 8, 5, dtype="float16"), ValueError, "needs shape (batch, heads, 4) with bat"),
        (
            "q",
            view(3, 8, dtype="float16"),
            ValueError,
            "needs shape (batch, heads, 4) with batch 3",
        ),
        ("lens", view(4), ValueError, f"needs shape (batch,) with batch 3, got (4,); {WAY_OUT}"),
        ("lens", view(), ValueError, f"needs shape (batch,) with batch 3, got (); {WAY_OUT}"),
        ("indptr", view(3), ValueError, "needs shape (batch + 1,) with batch 3, got (3,); reshape"),
        ("indptr", view(0), ValueError, "needs shape (batch + 1,) with batch 3, got (0,); reshape"),
        (
            "weights",
            view(5, 8, dtype="float32"),
            ValueError,
            "needs shape (rows * 2, heads) with rows*2 6, got (5, 8); reshape it",
        ),
        ("scale", view(1, dtype="float32"), ValueError, "needs shape () ... got (1,)"),
        (
            "lens",
            view(3, ptr=2),
            ValueError,
            "needs an address and strides that are multiples of 4",
        ),
        (
            "lens",
            view(3, strides=(6,)),
            ValueError,
            "needs an address and strides ... (6,); copy it",
        ),
        (
            "weights",
            view(6, 8, dtype="float32", strides=(64, 8)),
            ValueError,
            "needs contiguous rows, got a stride of 8 bytes on the last axis; make",
        ),
        (
            "q",
            view(3, 8, 4, dtype="float16"),
            ValueError,
            "needs strides that are multiples of 16 bytes and not negative, got 8 on axis 1; pad",
        ),
        (
            "q",
            view(3, 8, 4, dtype="float16", strides=(-128, 16, 2)),
            ValueError,
            "needs strides that are multiples of 16 bytes and not negative, got -128 on axis 0",
        ),
        (
            "q",
            view(3, 8, 4, dtype="float16", strides=(128, 16, 4)),
            ValueError,
            "needs a contiguous last axis, got a stride of 4 bytes for 2-byte elements; make",
        ),
        (
            "q",
            view(3, 8, 4, dtype="float16", strides=(128, 16, 2), ptr=8),
            ValueError,
            "needs an address that is a multiple of 16 bytes, got 0x8; copy the array, or slice",
        ),
    ],
)
def test_rows_of_a_table(name: str, given: ArrayView, error: type[Exception], message: str) -> None:
    with refused(error, f"{name}: {message}"):
        bind(TABLE, {name: given}, {"batch": 3, "rows*2": 6})


def test_where_empty_and_single_axes_lie() -> None:
    """Nowhere: their strides mean nothing."""
    for lies in ("rows", "row", "elements"):
        check_lies("x", view(0, 8, dtype="float32", strides=(0, 0)), lies)
        check_lies("x", view(1, 8, dtype="float32", strides=(4, 4)), lies)
    check_output("x", view(2, 0, strides=(0, 4)), (2, 0), ("int32",), "row")
    with refused(ValueError, "x: needs memory of its own for each element, got a broadcast array"):
        check_output("x", view(2, 3, strides=(0, 4)), (2, 3), ("int32",), "row")
    with refused(ValueError, "x: needs memory of its own ... whose elements overlap ... copy it"):
        check_output("x", view(2, 3, strides=(8, 4)), (2, 3), ("int32",), "row")
    for strides in ((12, 4), (4, 8), (-12, 4), (400, -4)):
        check_own_memory("x", view(2, 3, strides=strides))
    with refused(TypeError, "x: needs int32 or int64, got float32; allocate it so or leave it out"):
        check_output("x", view(2, dtype="float32"), (2,), ("int32", "int64"), "row")


def test_memory_that_cannot_be_written_to() -> None:
    memory = ArrayView(1 << 20, (4096,), (1,), "uint8", 0, True)
    with refused(ValueError, "x: needs an array that can be written to, got a read-only one; pass"):
        check_written("x", memory)
    message = "workspace: needs memory that can be written to, got a read-only array, as JAX's all"
    with refused(TypeError, message):
        check_workspace(memory, 4096)


@pytest.mark.parametrize(
    ("check", "value", "expected"),
    [
        (lambda v: checked_int("n", v, "out"), 7, 7),
        (lambda v: checked_int("n", v, "out"), np.int32(7), 7),
        (lambda v: checked_int("n", v, "out"), 0, (ValueError, "a number from 1, got 0; out")),
        (lambda v: checked_int("n", v, "out", least=0), 0, 0),
        (lambda v: checked_int("n", v, "out"), 7.0, (TypeError, "an int, got float 7.0; conv")),
        (lambda v: checked_int("n", v, "out"), True, (TypeError, "an int, got bool True; conv")),
        (lambda v: checked_flag("n", v), True, True),
        (lambda v: checked_flag("n", v), np.False_, False),
        (lambda v: checked_flag("n", v), 1, (TypeError, "True or False, got int 1; pass one of")),
        (lambda v: as_number("n", v), np.float32(2), 2.0),
        (lambda v: as_number("n", v), 2, 2.0),
        (lambda v: as_number("n", v), np.ones(1), (TypeError, "a Python or NumPy number, got nda")),
        (lambda v: checked_scale(v, 0.25), None, 0.25),
        (lambda v: checked_scale(v, 0.25), 1e-20, 1e-20),
        (lambda v: checked_scale(v, 0.25), np.float64(1e6), 1e6),
    ],
)
def test_numbers_and_flags(check: Any, value: Any, expected: Any) -> None:
    if isinstance(expected, tuple):
        error, need = expected
        with refused(error, f"n: needs {need}"):
            check(value)
    else:
        got = check(value)
        assert (got, type(got)) == (expected, type(expected))


def test_only_an_array_is_told_of_a_gpu() -> None:
    with pytest.raises(TypeError, match=r"got str 'a'; pass float\(\.\.\.\) of it$"):
        as_number("n", "a")
    with pytest.raises(TypeError, match=r"got ndarray; .* once \(an array on a GPU"):
        as_number("n", np.ones(1))


def test_scales_at_the_ends_keep_scores_in_float32() -> None:
    """Ordinary 16-bit inputs, up to the outliers of 1e4 on every column, stay finite and normal."""
    for scale in (1e-20, 1e6):
        checked_scale(scale, 1.0)
        with refused(ValueError, "softmax_scale: needs a number from 1e-20 to 1000000.0, got"):
            checked_scale(scale * (1.1 if scale > 1 else 0.9), 1.0)
    assert 576 * 1e4**2 * 1e6 * np.log2(np.e) < np.finfo(np.float32).max
    assert 1e-17 * 1e-20 * np.log2(np.e) > np.finfo(np.float32).tiny


def test_dtypes_of_all_frameworks_have_names() -> None:
    """What is no dtype stays what it is, for the check that refuses it."""
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    given = ("bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), torch.bfloat16)
    assert {dtype_name(dtype) for dtype in (*given, jax.numpy.bfloat16)} == {"bfloat16"}
    assert (dtype_name(np.float16), dtype_name(torch.float8_e4m3fn)) == ("float16", "float8_e4m3fn")
    assert [dtype_name(other) for other in (None, 3, "half")] == [None, 3, "half"]
