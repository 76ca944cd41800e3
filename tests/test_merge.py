# SPDX-License-Identifier: Apache-2.0
"""`cumla.merge_attention_states` on the CPU, what it refuses, and what it launches. What holds for
every operation is in tests/core, what merging means in tests/reference/test_merge.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import cumla
from tests.calls import (
    BF16,
    Refusal,
    aligned,
    all_of,
    badly_laid_out,
    every_other,
    partials,
    refused,
    shifted,
    wrong,
    wrong_type,
)
from tests.fake_cuda import FakeBindings, FakeCuPy, FakeDriver

OUT, LSE = (2, 5, 3, 16), (2, 5, 3)
F32 = np.float32
OUTS, LSES = partials().values()


def second(name: str, array: Any) -> dict[str, Any]:
    """Change one of the arrays in a sequence."""
    return {name: [partials()[name][0], array, partials()[name][2]]}


def of_second(name: str, array: Any, error: type[Exception], need: str) -> Refusal:
    return Refusal(second(name, array), error, f"{name}[1]: needs {need}")


REFUSED = [
    *(
        wrong(name, empty, "at least one partial result, got an empty sequence; skip the call")
        for name in ("outs", "lses")
        for empty in ([], ())
    ),
    wrong_type(
        "outs",
        cumla.AttentionState(OUTS[0], LSES[0]),
        "one array of each partial result, got one AttentionState; pass [a.out, b.out], [a.lse,",
    ),
    *(
        wrong(
            name, np.zeros(s, F32), f"a leading axis of at least one ... got shape {s}; stack them"
        )
        for name in ("outs", "lses")
        for s in ((), (0, *OUT))
    ),
    *(
        wrong("lses", lses, f"one array for each of the 3 outs, got {len(lses)}; pass both")
        for n in (1, 2, 4)
        for lses in ([np.zeros(LSE, F32)] * n, np.zeros((n, *LSE), F32))
    ),
    *(
        of_second(
            name, value, TypeError, f"an array of CuPy ... got builtins.{type(value).__name__}"
        )
        for name in ("outs", "lses")
        for value in (None, 3, [1.0], "text")
    ),
    *(
        wrong_type(name, value, f"an array of CuPy ... got builtins.{type(value).__name__}")
        for name in ("outs", "lses")
        for value in (None, (array for array in OUTS))
    ),
    *(
        Refusal(
            {"outs": np.zeros((3, *OUT), d)}, TypeError, f"outs[0]: needs float32 or ... got {d}"
        )
        for d in ("float64", "int16", ">f4")
    ),
    of_second("outs", np.zeros(OUT, F32), TypeError, "the dtype of outs[0], bfloat16, got float32"),
    *(
        of_second("lses", np.zeros(LSE, d), TypeError, f"float32, got {d}; convert it first")
        for d in ("float64", "float16", "int32")
    ),
    *(
        Refusal({"outs": outs}, ValueError, f"outs[0]: needs axes ( ... got shape {s}; reshape it")
        for s in ((), (16,), (3, 16), (1, *OUT))
        for outs in ([np.zeros(s)], np.zeros((3, *s), BF16))
    ),
    of_second(
        "outs", aligned((2, 5, 4, 16)), ValueError, f"the shape of outs[0], {OUT}, got (2, 5, 4"
    ),
    *(
        of_second(
            "lses",
            np.zeros(s, F32),
            ValueError,
            f"shape (batch, q_len, heads) = (2, 5, 3), got {s}; transpose or reshape it",
        )
        for s in ((2, 3, 5), (2, 5), (2, 5, 3, 1), ())
    ),
    *(
        Refusal(
            {"outs": np.zeros((3, *OUT[:3], n), BF16)},
            ValueError,
            f"outs[0]: needs a head_dim that is a multiple of 8, got shape {(*OUT[:3], n)}; pad",
        )
        for n in (0, 4, 12, 516)
    ),
    *(
        wrong("out", aligned(s), f"shape {OUT}, got {s}; allocate it so or leave it out")
        for s in (OUT[1:], (2, 3, 5, 16), (*OUT[:3], 8))
    ),
    *(
        wrong("lse", np.zeros(s, F32), f"shape {LSE}, got {s}; allocate it so or leave it out")
        for s in ((2, 3, 5), (2, 5), (2, 5, 1))
    ),
    wrong_type("out", np.zeros(OUT), "bfloat16 or float32 or float16, got float64"),
    *badly_laid_out("out", aligned(OUT)),
    *(
        Refusal(second("outs", r.changes["x"]), r.error, r.message.replace("x: ", "outs[1]: ", 1))
        for r in badly_laid_out("x", aligned(OUT))
    ),
    Refusal(
        {"outs": aligned((3, 484))[:, :-4].reshape(3, *OUT, copy=False)},
        ValueError,
        "outs[1]: needs an address that is a multiple of 16 bytes",
    ),
    of_second("lses", shifted(LSES[1], 2), ValueError, "an address and strides that are multiples"),
    wrong("lse", shifted(LSES[1], 2), "an address and strides that are multiples of 4 bytes"),
    *(
        wrong_type("lse_base", base, f"a number, math.e or 2, got {type(base).__name__}; pass one")
        for base in ("e", None, 2j, np.ones(1))
    ),
    *(
        wrong("lse_base", base, f"math.e or 2, got {base}; convert the logarithms")
        for base in (10, 2.718, 1, 0, -2, float("nan"))
    ),
]


@all_of(REFUSED)
def test_refusals(refusal: Refusal) -> None:
    with refused(refusal.error, refusal.message):
        cumla.merge_attention_states(**partials() | refusal.changes)


def test_results() -> None:
    """A sequence or a stack; lses with gaps or turned round; out in another dtype, or in place."""
    want = cumla.merge_attention_states(**partials())
    assert isinstance(want, cumla.AttentionState)
    assert (want.out.shape, want.out.dtype) == (OUT, BF16)
    assert (want.lse.shape, want.lse.dtype) == (LSE, F32)
    stacked = {name: np.stack(arrays) for name, arrays in partials().items()}
    spread = {"outs": tuple(OUTS), "lses": [every_other(lse) for lse in LSES]}
    three = (
        [out.reshape(10, 3, 16) for out in OUTS],
        [lse.reshape(10, 3) for lse in LSES],
    )
    for got in (
        cumla.merge_attention_states(**stacked),
        cumla.merge_attention_states(**spread),
        cumla.merge_attention_states(**stacked, out=stacked["outs"][1], lse=stacked["lses"][2]),
    ):
        np.testing.assert_array_equal(got.out, want.out)
        np.testing.assert_array_equal(got.lse, want.lse)
    flat = cumla.merge_attention_states(*three)
    np.testing.assert_array_equal(flat.out.reshape(OUT), want.out)
    with refused(ValueError, "lses[0]: needs shape (tokens, heads) = (10, 3), got (3, 10); transp"):
        cumla.merge_attention_states(three[0], [lse.T for lse in three[1]])
    for dtype in (F32, np.float16):
        out = np.zeros(OUT, dtype)
        assert cumla.merge_attention_states(**partials(), out=out).out is out
        np.testing.assert_allclose(out.astype(F32), want.out.astype(F32), rtol=2**-8)


@pytest.mark.parametrize("empty", [math.inf, -math.inf])
def test_partial_results_of_nothing(empty: float) -> None:
    """Of either sign, whatever their outs hold; where all are, out is 0 and lse -inf."""
    given = partials()
    given["lses"][1][:] = empty
    given["outs"][1][:] = np.nan
    want = cumla.merge_attention_states(given["outs"][::2], given["lses"][::2])
    got = cumla.merge_attention_states(**given)
    np.testing.assert_array_equal(got.out, want.out)
    np.testing.assert_array_equal(got.lse, want.lse)
    nothing = cumla.merge_attention_states(given["outs"][1:2], given["lses"][1:2])
    assert not nothing.out.astype(F32).any()
    assert np.isneginf(nothing.lse).all()


def test_the_base_of_the_logarithms() -> None:
    natural = cumla.merge_attention_states(**partials(), lse_base=math.e)
    lses = [lse / F32(math.log(2)) for lse in LSES]
    binary = cumla.merge_attention_states(OUTS, lses, lse_base=2)
    np.testing.assert_allclose(binary.lse * math.log(2), natural.lse, rtol=1e-6)
    np.testing.assert_allclose(binary.out.astype(F32), natural.out.astype(F32), rtol=2**-7)


# --- what is launched -----------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "launches"), [(1, 1), (60, 1), (61, 2), (150, 3)])
@pytest.mark.parametrize("dtype", [BF16, np.float16, F32])
def test_many_partial_results_take_several_launches(
    count: int, launches: int, dtype: Any, cupy: FakeCuPy, bindings: FakeBindings
) -> None:
    """The float32 result of all but the last of them is handed on, in one workspace."""
    outs, lses = cupy.ndarray((count, *OUT), dtype), cupy.ndarray((count, *LSE), F32)
    result = cumla.merge_attention_states(outs, lses)
    assert (result.out.dtype, result.lse.dtype) == (dtype, F32)
    assert bindings.entries == [f"merge_states_{np.dtype(dtype).name}"] * launches
    rows = math.prod(OUT[:3])
    workspace = [4 * rows * (OUT[3] + 1)] if launches > 1 else []
    size = rows * OUT[3] * np.dtype(dtype).itemsize
    assert sorted(cupy.allocated) == sorted([size, 4 * rows, *workspace])


def test_more_than_one_launch_takes_under_capture(
    cupy: FakeCuPy, bindings: FakeBindings, driver: FakeDriver
) -> None:
    given = {name: cupy.like(arrays) for name, arrays in partials().items()}
    outputs = {"out": cupy.ndarray(OUT, BF16), "lse": cupy.ndarray(LSE, F32)}
    cumla.merge_attention_states(**given, **outputs)
    driver.capturing.add(0)
    cumla.merge_attention_states(**given, **outputs)
    bindings.launched.clear()
    many = {name: arrays * 21 for name, arrays in given.items()}
    with refused(cumla.NotPreparedError, "the stream is being captured"):
        cumla.merge_attention_states(**many, **outputs)
    assert bindings.entries == []


def test_other_bases_and_numbers_have_launches_of_their_own(
    cupy: FakeCuPy, bindings: FakeBindings
) -> None:
    given = {name: cupy.like(arrays) for name, arrays in partials().items()}
    outputs = {"out": cupy.ndarray(OUT, BF16), "lse": cupy.ndarray(LSE, F32)}
    cumla.merge_attention_states(**given, **outputs)
    bindings.launched.clear()
    for _ in range(2):
        cumla.merge_attention_states(**given, **outputs)
        cumla.merge_attention_states(**given, **outputs, lse_base=2)
        some = {name: arrays[:2] for name, arrays in given.items()}
        cumla.merge_attention_states(**some, **outputs)
    parameters = [launch.parameters for launch in bindings.launched]
    assert parameters[:3] == parameters[3:]
    assert len(set(parameters)) == 3
