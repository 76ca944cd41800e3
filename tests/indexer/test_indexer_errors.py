# SPDX-License-Identifier: Apache-2.0
"""The indexer's logits before a launch: what is refused, what is launched, and plans.

GPU arrays are those of a CuPy that has addresses and nothing behind them; nothing is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla import preparation
from cumla.indexer import logits as indexer
from cumla.launch import KernelSpec
from cumla.launch import module as launch_module
from cumla.launch.indexer.mqa_logits import mqa_logits_spec
from cumla.launch.indexer.paged_mqa_logits import paged_mqa_logits_spec
from cumla.launch.indexer.paged_mqa_schedule import SPECS as SCHEDULE_SPECS
from tests.fake_cuda import FakeCuPy, FakeDriver

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)


def prefill(**changes: Any) -> dict[str, Any]:
    """Arguments of a prefill that works, with changes."""
    rng = np.random.default_rng(0)
    arguments = {
        "q": rng.standard_normal((5, 8, 32)).astype(E4M3),
        "kv": (rng.standard_normal((20, 32)).astype(E4M3), rng.random(20, np.float32)),
        "weights": rng.standard_normal((5, 8)).astype(np.float32),
        "ks": np.array([0, 1, 2, 3, 20], np.int32),
        "ke": np.array([20, 5, 2, 9, 20], np.int32),
    }
    return arguments | changes


def paged(**changes: Any) -> dict[str, Any]:
    """Arguments of a decoding step that works, with changes."""
    rng = np.random.default_rng(1)
    cache = np.zeros((6, 16, 1, 36), np.uint8)
    cache.reshape(6, -1)[:, : 16 * 32] = rng.integers(0, 0x60, (6, 16 * 32))
    cache.reshape(6, -1)[:, 16 * 32 :].view(np.float32)[...] = rng.random((6, 16))
    arguments = {
        "q": rng.standard_normal((2, 3, 8, 32)).astype(E4M3),
        "kv_cache": cache,
        "weights": rng.standard_normal((6, 8)).astype(np.float32),
        "context_lens": np.array([5, 40], np.int32),
        "block_table": np.arange(6, dtype=np.int32).reshape(2, 3),
        "max_context_len": 50,
    }
    return arguments | changes


def pair(**changes: Any) -> tuple[Any, Any]:
    """Keys and scales of a cache as arrays of their own."""
    parts = {"k": np.zeros((6, 16, 32), E4M3), "scale": np.zeros((6, 16), np.float32)} | changes
    return parts["k"], parts["scale"]


def refuse(
    make: Callable[..., dict[str, Any]],
    error: type[Exception],
    *fragments: str,
    **changes: Any,
) -> None:
    """The call fails; its message begins with the first fragment and has the others in turn."""
    function = cumla.mqa_logits if make is prefill else cumla.paged_mqa_logits
    with pytest.raises(error) as caught:
        function(**make(**changes))
    message, end = str(caught.value), 0
    assert message.startswith(fragments[0]), message
    for fragment in fragments:
        assert fragment in message[end:], message
        end = message.index(fragment, end) + len(fragment)


def test_the_unchanged_arguments_work() -> None:
    assert cumla.mqa_logits(**prefill()).shape == (5, 20)
    assert cumla.paged_mqa_logits(**paged()).shape == (6, 50)
    assert cumla.paged_mqa_logits(**paged(kv_cache=pair())).shape == (6, 50)


# --- dtypes and shapes ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", "float16", "float8_e5m2", "float8_e4m3fnuz"])
@pytest.mark.parametrize("make", [prefill, paged])
def test_queries_are_e4m3(make: Any, dtype: str) -> None:
    q = np.zeros(make()["q"].shape, dtype)
    needs = "needs float8_e4m3fn, or uint8 with its bits"
    refuse(make, TypeError, "q: ", needs, f"got {dtype}", "; quantise", q=q)


def test_keys_are_e4m3() -> None:
    kv = (np.zeros((20, 32), np.int8), np.zeros(20, np.float32))
    refuse(prefill, TypeError, "kv[0]: needs float8_e4m3fn", "got int8", "; quantise", kv=kv)
    cache = pair(k=np.zeros((6, 16, 32), np.int8))
    refuse(paged, TypeError, "kv_cache[0]: needs float8_e4m3fn", "got int8", kv_cache=cache)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_fused_pages_are_bytes(dtype: str) -> None:
    cache = np.zeros((6, 16, 1, 36), dtype)
    refuse(paged, TypeError, "kv_cache: needs uint8", f"got {dtype}", "; view it", kv_cache=cache)


@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16", ">f4"])
def test_scales_and_weights_are_float32(dtype: str) -> None:
    def zeros(*shape: int) -> Any:
        return np.zeros(shape, BF16 if dtype == "bfloat16" else dtype)

    ends = ("needs float32", f"got {dtype}", "; convert it first")
    for make, rows in ((prefill, 5), (paged, 6)):
        refuse(make, TypeError, "weights: ", *ends, weights=zeros(rows, 8))
    refuse(prefill, TypeError, "kv[1]: ", *ends, kv=(np.zeros((20, 32), E4M3), zeros(20)))
    refuse(paged, TypeError, "kv_cache[1]: ", *ends, kv_cache=pair(scale=zeros(6, 16)))


@pytest.mark.parametrize("dtype", ["int64", "uint32", "float32"])
@pytest.mark.parametrize(
    ("make", "name", "shape"),
    [
        (prefill, "ks", (5,)),
        (prefill, "ke", (5,)),
        (paged, "context_lens", (2,)),
        (paged, "context_lens", (2, 3)),
        (paged, "block_table", (2, 3)),
    ],
)
def test_tables_are_int32(make: Any, name: str, shape: tuple[int, ...], dtype: str) -> None:
    refuse(
        make,
        TypeError,
        f"{name}: needs int32, got {dtype}; convert it first",
        **{name: np.zeros(shape, dtype)},
    )


@pytest.mark.parametrize(
    ("make", "changes", "fragments"),
    [
        (prefill, {"q": np.zeros((5, 256), E4M3)}, ("q: ", "(seq_len, num_heads, head_dim)")),
        (paged, {"q": np.zeros((6, 8, 32), E4M3)}, ("q: ", "(batch, next_n, num_heads, head_")),
        (prefill, {"q": np.zeros((0, 8, 32), E4M3)}, ("q: ", "at least one", "; skip the call")),
        (prefill, {"q": np.zeros((5, 12, 32), E4M3)}, ("q: needs 8, 16, 32 or 64 heads, got 12",)),
        (prefill, {"q": np.zeros((5, 8, 48), E4M3)}, ("q: ", "32, 64 or 128, got 48", "; pad")),
        (paged, {"q": np.zeros((2, 9, 8, 32), E4M3)}, ("q: needs at most 8 ", "got next_n 9")),
        (prefill, {"weights": np.zeros((5, 9), np.float32)}, ("weights: ", "= (5, 8), got (5, 9)")),
        (
            paged,
            {"weights": np.zeros((2, 8), np.float32)},
            ("weights: ", "batch * next_n", "(6, 8"),
        ),
        (prefill, {"ks": np.zeros(4, np.int32)}, ("ks: needs shape (seq_len,) = (5,), got (4,)",)),
        (prefill, {"ke": np.zeros((5, 1), np.int32)}, ("ke: needs shape (seq_len,)", "(5, 1)")),
        (paged, {"context_lens": np.zeros((2, 2), np.int32)}, ("context_lens: ", "(2, 2)")),
        (paged, {"context_lens": np.zeros(6, np.int32)}, ("context_lens: ", "batch 2", "got (6,)")),
        (paged, {"context_lens": np.zeros((2, 3, 1), np.int32)}, ("context_lens: ", "(2, 3, 1)")),
        (paged, {"block_table": np.zeros((3, 3), np.int32)}, ("block_table: ", "batch 2")),
        (paged, {"block_table": np.zeros((2, 0), np.int32)}, ("block_table: ", "one column")),
        (paged, {"kv_cache": np.zeros((6, 16, 40), np.uint8)}, ("kv_cache: ", "36", "(6, 16, 40)")),
        (paged, {"kv_cache": np.zeros((6, 16, 2, 36), np.uint8)}, ("kv_cache: ", "1, 36")),
        (paged, {"kv_cache": np.zeros((6, 16 * 36), np.uint8)}, ("kv_cache: ", "1, 36")),
        (paged, {"kv_cache": np.zeros((6, 48, 36), np.uint8)}, ("kv_cache: ", "64 or 128", "48")),
        (paged, {"kv_cache": np.zeros((0, 16, 36), np.uint8)}, ("kv_cache: ", "one page", "skip")),
        (
            paged,
            {"kv_cache": pair(k=np.zeros((6, 16, 64), E4M3))},
            ("kv_cache[0]: ", "32 values of"),
        ),
        (paged, {"kv_cache": pair(k=np.zeros((6, 8, 32), E4M3))}, ("kv_cache[0]: ", "got 8")),
        (
            paged,
            {"kv_cache": pair(scale=np.zeros((6, 64), np.float32))},
            ("kv_cache[1]: needs shape (num_pages, page_size) = (6, 16), got (6, 64)",),
        ),
    ],
)
def test_shapes(make: Any, changes: dict[str, Any], fragments: tuple[str, ...]) -> None:
    refuse(make, ValueError, *fragments, **changes)


def test_keys_of_another_width_or_number() -> None:
    scale = np.zeros(20, np.float32)
    wide = (np.zeros((20, 64), E4M3), scale)
    refuse(prefill, ValueError, "kv[0]: needs q's head_dim 32", "got shape (20, 64)", kv=wide)
    refuse(prefill, ValueError, "kv[0]: needs axes", kv=(np.zeros((20, 1, 32), E4M3), scale))
    refuse(prefill, ValueError, "kv[0]: needs at least", kv=(np.zeros((0, 32), E4M3), scale))
    few = (np.zeros((20, 32), E4M3), scale[:19])
    refuse(prefill, ValueError, "kv[1]: needs shape (seq_len_kv,) = (20,), got (19,)", kv=few)


@pytest.mark.parametrize("value", [None, np.zeros((20, 32), E4M3), "kv"])
def test_keys_and_scales_are_a_pair(value: object) -> None:
    kind = type(value).__qualname__
    refuse(prefill, TypeError, "kv: needs a pair of arrays", kind, "; pass (k, scale)", kv=value)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_pairs_are_of_two(count: int) -> None:
    arrays = [np.zeros((20, 32), E4M3)] * count
    refuse(prefill, ValueError, "kv: needs a pair of arrays", f"got {count};", kv=arrays)
    refuse(paged, ValueError, "kv_cache: needs a pair of arrays", f"got {count};", kv_cache=arrays)


# --- memory layout --------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [prefill, paged])
def test_the_last_axis_of_queries_is_contiguous(make: Any) -> None:
    every_other = np.repeat(make()["q"], 2, axis=-1)[..., ::2]
    refuse(make, ValueError, "q: needs a contiguous last axis", "stride of 2 bytes", q=every_other)


@pytest.mark.parametrize("make", [prefill, paged])
def test_queries_lie_at_multiples_of_16_bytes(make: Any) -> None:
    array = make()["q"]
    padded = np.concatenate([array, np.zeros((*array.shape[:-1], 1), E4M3)], axis=-1)[..., :-1]
    refuse(make, ValueError, "q: needs strides", "16 bytes", "; pad", q=padded)
    memory = np.zeros(array.nbytes + 32, np.uint8)
    start = -memory.ctypes.data % 16 + 8
    shifted = memory[start : start + array.nbytes].view(E4M3).reshape(array.shape)
    refuse(make, ValueError, "q: needs an address", "16 bytes", "; copy", q=shifted)


def test_keys_lie_at_multiples_of_16_bytes() -> None:
    _, scale = prefill()["kv"]
    wide = np.zeros((20, 33), E4M3)[:, :32]
    refuse(prefill, ValueError, "kv[0]: needs strides", "got 33", kv=(wide, scale))
    every_other = np.zeros((20, 64), E4M3)[:, ::2]
    refuse(prefill, ValueError, "kv[0]: needs a contiguous last axis", kv=(every_other, scale))


@pytest.mark.parametrize("make", [prefill, paged])
def test_weights_and_scales_lie_at_multiples_of_4_bytes(make: Any) -> None:
    def shifted(array: Any) -> Any:
        return np.zeros(array.nbytes + 1, np.uint8)[1:].view("<f4").reshape(array.shape)

    needs = "multiples of 4 bytes"
    refuse(make, ValueError, "weights: ", needs, "; copy", weights=shifted(make()["weights"]))
    if make is prefill:
        k, scale = make()["kv"]
        refuse(make, ValueError, "kv[1]: ", needs, "; copy", kv=(k, shifted(scale)))


def test_pages_are_contiguous_inside() -> None:
    wide = np.zeros((6, 16, 48), np.uint8)[..., :36]
    refuse(paged, ValueError, "kv_cache: ", "bytes are contiguous", "only the pages", kv_cache=wide)
    keys = pair(k=np.zeros((6, 16, 48), E4M3)[..., :32])
    refuse(paged, ValueError, "kv_cache[0]: ", "keys are contiguous", kv_cache=keys)


def test_pages_lie_at_multiples_of_16_bytes() -> None:
    def apart(pitch: int, dtype: Any, *shape: int) -> Any:
        rows = shape[1] * np.dtype(dtype).itemsize
        base = np.zeros(6 * pitch, np.uint8).view(dtype)
        return np.lib.stride_tricks.as_strided(base, (6, *shape), (pitch, rows, base.itemsize))

    cumla.paged_mqa_logits(**paged(kv_cache=apart(16 * 36 + 16, np.uint8, 16, 36)))
    cumla.paged_mqa_logits(**paged(kv_cache=pair(k=apart(16 * 32 + 16, E4M3, 16, 32))))
    odd = apart(16 * 36 + 8, np.uint8, 16, 36)
    refuse(paged, ValueError, "kv_cache: needs strides", "16 bytes", "got 584", kv_cache=odd)
    odd = apart(16 * 32 + 8, E4M3, 16, 32)
    refuse(paged, ValueError, "kv_cache[0]: needs strides", "got 520", kv_cache=pair(k=odd))
    refuse(
        paged,
        ValueError,
        "kv_cache[1]: needs strides",
        "got 68",
        kv_cache=pair(scale=np.zeros((6, 17), np.float32)[:, :16]),
    )


@pytest.mark.parametrize("name", ["ks", "ke"])
def test_bounds_are_aligned(name: str) -> None:
    unaligned = np.zeros(21, np.uint8)[1:].view("<i4")
    refuse(prefill, ValueError, f"{name}: ", "multiples of 4 bytes", "; copy", **{name: unaligned})


def test_layouts_that_are_fine() -> None:
    """Padded rows, every second bound, a table inside a wider one: the results are the same."""
    given = prefill()
    wanted = cumla.mqa_logits(**given)
    wide_q = np.zeros((5, 9, 48), E4M3)
    wide_q[:, :8, :32] = given["q"]
    wide_k = np.zeros((20, 64), E4M3)
    wide_k[:, :32] = given["kv"][0]
    changes = {
        "q": wide_q[:, :8, :32],
        "kv": [wide_k[:, :32], given["kv"][1]],
        "weights": np.asfortranarray(given["weights"]),
        "ks": np.repeat(given["ks"], 2)[::2],
    }
    np.testing.assert_array_equal(cumla.mqa_logits(**given | changes), wanted)
    scale = np.repeat(given["kv"][1], 3)[1::3]
    kv = (given["kv"][0], scale)
    np.testing.assert_array_equal(cumla.mqa_logits(**given | {"kv": kv}), wanted)
    steps = paged()
    table = np.full((2, 9), -1, np.int32)
    table[:, :3] = steps["block_table"]
    np.testing.assert_array_equal(
        cumla.paged_mqa_logits(**steps | {"block_table": table[:, :3]}),
        cumla.paged_mqa_logits(**steps),
    )


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [prefill, paged])
def test_dtypes_of_the_logits(make: Any) -> None:
    function = cumla.mqa_logits if make is prefill else cumla.paged_mqa_logits
    shape = (5, 20) if make is prefill else (6, 50)
    assert function(**make()).dtype == np.float32
    for name in ("bfloat16", BF16, ml_dtypes.bfloat16):
        assert function(**make(logits_dtype=name)).dtype == BF16
    out = np.zeros(shape, BF16)
    assert function(**make(out=out)) is out
    message = "logits_dtype: needs float32 or bfloat16, got "
    for name in ("float16", np.float64, "nonsense", 7):
        refuse(make, TypeError, message, "; convert", logits_dtype=name)
    refuse(make, TypeError, f"{message}float64; convert", logits_dtype=np.float64)
    for value in ([1], {}, ([1],)):
        kind = type(value).__qualname__
        refuse(make, TypeError, f"{message}{kind}; pass its name", logits_dtype=value)
    refuse(make, TypeError, "out: needs float32, got bfloat16", out=out, logits_dtype="float32")
    wrong = np.zeros(shape)
    refuse(make, TypeError, "out: needs float32 or bfloat16, got float64", out=wrong)


def test_dtypes_of_other_frameworks() -> None:
    torch, jnp = pytest.importorskip("torch"), pytest.importorskip("jax").numpy
    for dtype in (torch.bfloat16, jnp.bfloat16, jnp.dtype("bfloat16")):
        assert cumla.mqa_logits(**prefill(logits_dtype=dtype)).dtype == BF16
    assert cumla.mqa_logits(**prefill(logits_dtype=torch.float32)).dtype == np.float32
    refuse(prefill, TypeError, "logits_dtype: ", "torch.float16", logits_dtype=torch.float16)


@pytest.mark.parametrize("make", [prefill, paged])
def test_layouts_of_out(make: Any) -> None:
    rows, columns = (5, 20) if make is prefill else (6, 50)
    function = cumla.mqa_logits if make is prefill else cumla.paged_mqa_logits
    wanted = function(**make())
    odd = np.zeros((rows, columns + 3), np.float32)[:, 1 : columns + 1]
    np.testing.assert_array_equal(function(**make(out=odd)), wanted)
    for fragment, out in (
        (f"({rows}, {columns})", np.zeros((rows, columns + 1), np.float32)),
        ("contiguous rows", np.zeros((rows, 2 * columns), np.float32)[:, ::2]),
        ("multiples of 4 bytes", np.zeros(4 * rows * columns + 1, np.uint8)[1:].view("<f4")),
        ("memory of its own", np.broadcast_to(np.zeros(columns, np.float32), (rows, columns))),
        ("do not overlap", np.zeros((rows, columns), np.float32)[::-1]),
        (
            "do not overlap",
            np.lib.stride_tricks.as_strided(np.zeros(999, np.float32), (rows, columns), (8, 4)),
        ),
    ):
        shaped = out.reshape(rows, columns) if out.ndim == 1 else out
        if not shaped.flags.writeable:
            shaped = np.lib.stride_tricks.as_strided(np.zeros(99, "f4"), shaped.shape, (0, 4))
        refuse(make, ValueError, "out: ", fragment, out=shaped)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (-1, ValueError, "needs a number from {least}, got -1; {way_out}"),
        (2.0, TypeError, "needs an int, got float"),
        (True, TypeError, "needs an int, got bool"),
        (False, TypeError, "needs an int, got bool"),
        (None, TypeError, "needs an int, got NoneType"),
    ],
)
def test_widths(value: object, error: type[Exception], message: str) -> None:
    prefills = message.format(least=0, way_out="pass 0 for all columns")
    refuse(prefill, error, f"max_seqlen_k: {prefills}", max_seqlen_k=value)
    steps = message.format(least=1, way_out="there is nothing to write")
    refuse(paged, error, f"max_context_len: {steps}", max_context_len=value)


def test_widths_of_numpy() -> None:
    given = prefill()
    width = (given["ke"] - given["ks"]).max()
    assert cumla.mqa_logits(**given, max_seqlen_k=width).shape == (5, 20)
    assert cumla.paged_mqa_logits(**paged(max_context_len=np.int64(7))).shape == (6, 7)
    refuse(paged, ValueError, "max_context_len: needs a number from 1, got 0", max_context_len=0)


# --- frameworks -----------------------------------------------------------------------------------


def as_torch(torch: Any, array: Any) -> Any:
    if isinstance(array, tuple):
        return tuple(as_torch(torch, part) for part in array)
    if not isinstance(array, np.ndarray):
        return array
    if array.dtype == E4M3:
        return torch.from_numpy(array.view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(array)


@pytest.mark.parametrize("make", [prefill, paged])
def test_torch(make: Any) -> None:
    torch = pytest.importorskip("torch")
    function = cumla.mqa_logits if make is prefill else cumla.paged_mqa_logits
    given = {name: as_torch(torch, array) for name, array in make().items()}
    logits = function(**given, logits_dtype=torch.bfloat16)
    assert logits.dtype == torch.bfloat16
    wanted = function(**make(logits_dtype="bfloat16")).astype(np.float32)
    np.testing.assert_array_equal(logits.float().numpy(), wanted)
    given["q"] = given["q"].view(torch.uint8)
    out = torch.zeros(logits.shape)
    assert function(**given, out=out) is out
    np.testing.assert_array_equal(out.numpy(), function(**make()))


@pytest.mark.parametrize("make", [prefill, paged])
def test_jax(make: Any) -> None:
    jax = pytest.importorskip("jax")
    function = cumla.mqa_logits if make is prefill else cumla.paged_mqa_logits

    def convert(array: Any) -> Any:
        return jax.tree.map(lambda x: x if isinstance(x, int) else jax.numpy.asarray(x), array)

    given = {name: convert(array) for name, array in make().items()}
    assert str(given["q"].dtype) == "float8_e4m3fn"
    logits = function(**given)
    assert isinstance(logits, jax.Array)
    np.testing.assert_array_equal(np.asarray(logits), function(**make()))
    refuse(make, TypeError, "out: JAX arrays are immutable", **given, out=logits)


# --- plans ----------------------------------------------------------------------------------------

PLANNED = ("q", "kv_cache", "context_lens", "block_table")


def plan_of(arguments: dict[str, Any], **options: Any) -> cumla.PagedMQALogitsPlan:
    arrays = [arguments[name] for name in PLANNED]
    plan = cumla.PagedMQALogitsPlan.from_arrays(*arrays, **options)
    plan.update(arguments["context_lens"])
    return plan


@pytest.mark.parametrize("per_row", [False, True])
def test_a_plan_gives_what_a_call_gives(per_row: bool) -> None:
    given = paged()
    if per_row:
        given["context_lens"] = np.array([[1, 5, 9], [0, 48, 3]], np.int32)
    plan = plan_of(given)
    wanted = cumla.paged_mqa_logits(**given)
    np.testing.assert_array_equal(cumla.paged_mqa_logits(**given, plan=plan), wanted)
    np.testing.assert_array_equal(plan.run(**given), wanted)


def test_a_plan_on_the_cpu_keeps_the_lengths_of_its_update() -> None:
    given = paged()
    plan, wanted = plan_of(given), cumla.paged_mqa_logits(**given)
    given["context_lens"][:] = 3
    np.testing.assert_array_equal(plan.run(**given), wanted)
    plan.update(given["context_lens"])
    np.testing.assert_array_equal(plan.run(**given), cumla.paged_mqa_logits(**given))


def test_plan_is_a_plan() -> None:
    refuse(paged, TypeError, "plan: needs a cumla.PagedMQALogitsPlan, got dict", plan={})


def test_plan_that_was_never_updated() -> None:
    given = paged()
    plan = cumla.PagedMQALogitsPlan.from_arrays(*(given[name] for name in PLANNED))
    refuse(paged, ValueError, "plan: never updated; call plan.update(context_lens)", plan=plan)


@pytest.mark.parametrize(
    "changes",
    [
        {"q": np.zeros((2, 3, 16, 32), E4M3), "weights": np.zeros((6, 16), np.float32)},
        {"q": np.zeros((2, 2, 8, 32), E4M3), "weights": np.zeros((4, 8), np.float32)},
        {"kv_cache": np.zeros((6, 32, 36), np.uint8)},
        {"block_table": np.zeros((2, 4), np.int32)},
        {"context_lens": np.zeros((2, 3), np.int32)},
    ],
)
def test_plan_of_another_shape(changes: dict[str, Any]) -> None:
    plan = plan_of(paged())
    made = "plan: made for (batch, next_n, num_heads, head_dim, page_size, max_pages, per_row_lens)"
    refuse(paged, ValueError, made, "got ", "; make a plan", plan=plan, **changes)


def test_update_checks_the_lengths() -> None:
    plan = plan_of(paged())
    with pytest.raises(TypeError, match=r"^context_lens: needs int32, got int64"):
        plan.update(np.zeros(2, np.int64))
    with pytest.raises(ValueError, match=r"^context_lens: .*\(batch,\) with batch 2, got \(2, 3\)"):
        plan.update(np.zeros((2, 3), np.int32))


@pytest.mark.parametrize("shape", [(2,), (2, 2), (3, 3)])
def test_lengths_of_queries(shape: tuple[int, ...]) -> None:
    plan = plan_of(paged(context_lens=np.zeros((2, 3), np.int32)))
    with pytest.raises(TypeError, match=r"^context_lens: needs int32, got int64"):
        plan.update(np.zeros((2, 3), np.int64))
    with pytest.raises(ValueError) as caught:
        plan.update(np.zeros(shape, np.int32))
    needed = "context_lens: needs shape (batch, next_n) = (2, 3)"
    assert str(caught.value) == f"{needed}, got {shape}; give each query its length"


SIZES: dict[str, Any] = {"batch": 2, "next_n": 1, "num_heads": 8, "head_dim": 32, "max_pages": 3}


@pytest.mark.parametrize("name", [*SIZES, "page_size"])
@pytest.mark.parametrize(
    ("value", "error", "need"),
    [
        (0, ValueError, "a number from 1, got 0; nothing to plan for"),
        (2.0, TypeError, "an int, got float; convert it"),
        (True, TypeError, "an int, got bool; convert it"),
    ],
)
def test_numbers_of_a_plan(name: str, value: object, error: type[Exception], need: str) -> None:
    numbers = SIZES | {name: value}
    with pytest.raises(error, match=f"^{name}: needs {need}$"):
        cumla.PagedMQALogitsPlan(**numbers, like=np.zeros(1))
    with pytest.raises(error, match=f"^{name}: needs {need}$"):
        cumla.PagedMQALogitsPlan.workspace_bytes(**numbers, sm_count=132)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 24}, "^num_heads: needs 8, 16, 32 or 64 heads, got 24; pad"),
        ({"head_dim": 256}, "^head_dim: needs a head_dim of 32, 64 or 128, got 256"),
        ({"next_n": 9}, "^next_n: needs at most 8 queries"),
        ({"page_size": 1}, "^page_size: needs a page size of 16, 32, 64 or 128 tokens, got 1"),
        ({"device": 0}, "^like: .*CUDA device 0"),
    ],
)
def test_other_arguments_of_a_plan(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cumla.PagedMQALogitsPlan(**SIZES | changes, like=np.zeros(1))


# --- check mode -----------------------------------------------------------------------------------


@pytest.fixture
def checking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")


@pytest.mark.usefixtures("checking")
def test_check_mode_of_the_ranges() -> None:
    cumla.mqa_logits(**prefill())
    for name, position, value in (("ks", 2, -1), ("ke", 4, 21)):
        bounds = prefill()[name]
        bounds[position] = value
        message = f"{name}[{position}]: needs a number from 0 to seq_len_kv = 20, got {value}"
        refuse(prefill, ValueError, message, "would clamp", **{name: bounds})


@pytest.mark.usefixtures("checking")
def test_check_mode_of_pages() -> None:
    cumla.paged_mqa_logits(**paged())
    lengths = np.array([[3, 3, 3], [0, 49, 1]], np.int32)
    message = "context_lens[1, 1]: needs a length from 0 to max_pages * page_size = 48, got 49"
    refuse(paged, ValueError, message, context_lens=lengths)
    message = "context_lens[0]: needs a length from 0"
    refuse(paged, ValueError, message, "got -1", context_lens=np.array([-1, 3], np.int32))
    message = (
        "context_lens[1]: needs a length up to max_context_len = 39, got 40; the logits behind"
    )
    refuse(paged, ValueError, message, max_context_len=39)
    table = paged()["block_table"]
    table[0, 1:] = -1  # not used by 5 tokens
    cumla.paged_mqa_logits(**paged(block_table=table))
    table[1, 2] = 6
    message = "block_table[1, 2]: needs a page number from 0 to 5, got 6; the kernels would take"
    refuse(paged, ValueError, message, block_table=table)
    given = paged()
    plan = plan_of(given)
    given["context_lens"] = np.array([5, 39], np.int32)
    message = "context_lens[1]: needs the length that the plan was updated with, 40, got 39"
    refuse(paged, ValueError, message, "; call plan.update", **given, plan=plan)


# --- GPU arrays -----------------------------------------------------------------------------------


def on_gpu(cupy: FakeCuPy, arguments: dict[str, Any]) -> dict[str, Any]:
    def move(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(move(part) for part in value)
        return cupy.like(value) if isinstance(value, np.ndarray) else value

    return {name: move(value) for name, value in arguments.items()}


class Launches(list[tuple[str, Any]]):
    """What would be launched: the kernel's stem, and what it was prepared with."""

    @property
    def stems(self) -> list[str]:
        return [stem for stem, _ in self]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Kernels that would be launched; none is loaded."""
    launches = Launches()
    monkeypatch.setattr(indexer, "_ready", type(indexer._ready)())
    monkeypatch.setattr(indexer, "load", lambda spec, device, *, capturing: spec)

    def prepare(spec: KernelSpec, *given: Any, **options: Any) -> Callable[[], None]:
        return lambda: launches.append((spec.stem, (given, options)))

    for name in ("mqa_logits", "paged_mqa_schedule", "paged_mqa_logits"):
        monkeypatch.setattr(indexer, f"prepare_{name}", prepare)
    return launches


def test_what_a_prefill_launches(cupy: FakeCuPy, launched: Launches) -> None:
    logits = cumla.mqa_logits(**on_gpu(cupy, prefill()), max_seqlen_k=7, clean=False)
    assert (logits.shape, logits.dtype) == ((5, 7), np.float32)
    ((stem, ((arguments,), options)),) = launched
    assert stem == "mqa_logits"
    assert options == {"compressed": True, "clean": False, "stream": 0}
    shapes = [view.shape for view in arguments]
    assert shapes == [(5, 8, 32), (20, 32), (20,), (5, 8), (5,), (5,), (5, 7)]


def test_what_a_step_launches(cupy: FakeCuPy, launched: Launches) -> None:
    given = on_gpu(cupy, paged())
    given["kv_cache"].data.ptr = 0x40000
    logits = cumla.paged_mqa_logits(**given, logits_dtype="bfloat16")
    assert (logits.shape, logits.dtype) == ((6, 50), BF16)
    assert launched.stems == ["paged_mqa_schedule", "paged_mqa_logits"]
    (key, lengths, buffer, stream), _ = launched[0][1]
    assert tuple(key) == (2, 3, 8, 32, 16, 3, False, 132)
    assert (lengths.shape, buffer.dtype, stream) == ((2,), "uint8", 0)
    (same_key, arguments), options = launched[1][1]
    assert same_key == key
    assert options == {"clean": True, "stream": 0}
    assert arguments.k_cache[:4] == (0x40000, (6, 16, 32), (576, 32, 1), "float8_e4m3fn")
    assert arguments.scale_cache[:4] == (0x40000 + 512, (6, 16), (576, 4), "float32")
    assert arguments.buffer == buffer


def test_a_launch_is_repeated_for_the_same_arrays(
    cupy: FakeCuPy, launched: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = on_gpu(cupy, prefill())
    out = cupy.ndarray((5, 20), "float32")
    prepared: list[object] = []
    prepare = indexer.prepare_mqa_logits

    def counting(*arguments: Any, **options: Any) -> Any:
        prepared.append(options)
        return prepare(*arguments, **options)

    monkeypatch.setattr(indexer, "prepare_mqa_logits", counting)
    for _ in range(3):
        assert cumla.mqa_logits(**given, out=out) is out
    assert (len(launched), len(prepared)) == (3, 1)
    cumla.mqa_logits(**given, out=out, clean=False)
    cumla.mqa_logits(**given, out=out, stream=5)
    cumla.mqa_logits(**given)
    cumla.mqa_logits(**given)
    assert (len(launched), len(prepared)) == (7, 5)
    refuse(prefill, TypeError, "out: needs bfloat16", **given, out=out, logits_dtype="bfloat16")
    refuse(prefill, ValueError, "out: needs shape (5, 4)", **given, out=out, max_seqlen_k=4)
    given["q"].data.ptr += 8
    refuse(prefill, ValueError, "q: needs an address", "got 0x1008", **given, out=out)


def test_a_plan_launches_its_schedule_once(
    cupy: FakeCuPy, driver: FakeDriver, launched: Launches
) -> None:
    given = on_gpu(cupy, paged())
    plan = plan_of(given)
    out = cupy.ndarray((6, 50), "float32")
    for _ in range(3):
        assert cumla.paged_mqa_logits(**given, plan=plan, out=out) is out
    assert plan.run(**given).shape == (6, 50)
    assert launched.stems == ["paged_mqa_schedule", *["paged_mqa_logits"] * 4]
    assert launched[0][1][0][2] == launched[1][1][0][1].buffer
    refuse(paged, ValueError, "plan: updated on stream 0x0", **given, plan=plan, stream=5)
    refuse(paged, ValueError, "out: needs shape", **given | {"max_context_len": 51}, out=out)
    assert driver.recorded == []
    plan.update(given["context_lens"], stream=5)
    for _ in range(2):
        plan.run(**given, out=out, stream=5)
    assert driver.recorded == [5, 5, 5]  # each use away from where the buffer was allocated
    refuse(paged, ValueError, "plan: updated on stream 0x5", **given, plan=plan)


def test_plans_that_share_a_workspace(cupy: FakeCuPy, launched: Launches) -> None:
    given = on_gpu(cupy, paged())
    nbytes = cumla.PagedMQALogitsPlan.workspace_bytes(2, 3, 8, 32, max_pages=3, page_size=16)
    workspace = cupy.ndarray((nbytes,), "uint8")
    first, second = (plan_of(given, workspace=workspace) for _ in range(2))
    second.run(**given)
    message = "plan: its workspace has been taken by another plan"
    refuse(paged, ValueError, message, "call plan.update", **given, plan=first)
    first.update(given["context_lens"])
    first.run(**given)
    small = cupy.ndarray((nbytes - 1,), "uint8")
    with pytest.raises(ValueError, match=rf"^workspace: needs {nbytes} bytes, got {nbytes - 1}"):
        plan_of(given, workspace=small)


def test_plan_of_another_device(cupy: FakeCuPy, launched: Launches) -> None:
    plan = plan_of(on_gpu(cupy, paged()))
    refuse(paged, ValueError, "plan: made for CUDA device 0", "the CPU", plan=plan)
    with pytest.raises(ValueError, match=r"^plan: made for CUDA device 0, got .* the CPU"):
        plan.update(paged()["context_lens"])


@pytest.mark.parametrize("make", [prefill, paged])
def test_cpu_and_gpu_mixed(cupy: FakeCuPy, make: Any) -> None:
    given = on_gpu(cupy, make())
    for name in set(make()) - {"q", "kv", "max_context_len"}:
        changed = given | {name: make()[name]}
        refuse(make, ValueError, f"{name}: ", "q is, on CUDA device 0", "the CPU", **changed)


@pytest.mark.parametrize("make", [prefill, paged])
def test_unsupported_gpus(cupy: FakeCuPy, make: Any) -> None:
    cupy.capability = (10, 0)
    message = ("device 0 is", "NVIDIA Imaginary", "compute capability 9.0")
    refuse(make, cumla.UnsupportedDeviceError, *message, **on_gpu(cupy, make()))


@pytest.mark.parametrize(("make", "stem"), [(prefill, "mqa_logits"), (paged, "paged_mqa_schedule")])
def test_under_capture(
    cupy: FakeCuPy,
    driver: FakeDriver,
    launched: Launches,
    make: Any,
    stem: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = on_gpu(cupy, make())
    driver.capturing.add(0)
    refuse(make, cumla.NotPreparedError, "the stream is being captured", "out=", **given)
    out = cupy.ndarray((5, 20) if make is prefill else (6, 50), "float32")
    with monkeypatch.context() as patch:
        patch.setattr(indexer, "load", launch_module.load)
        refuse(make, cumla.NotPreparedError, f"kernel {stem}", "cumla.prepare(", **given, out=out)
    assert launched == []


def test_a_plan_and_out_serve_a_capture(
    cupy: FakeCuPy, driver: FakeDriver, launched: Launches
) -> None:
    given = on_gpu(cupy, paged())
    plan, out = plan_of(given), cupy.ndarray((6, 50), "float32")
    driver.capturing.add(0)
    plan.update(given["context_lens"])
    plan.run(**given, out=out)
    assert launched.stems == ["paged_mqa_schedule"] * 2 + ["paged_mqa_logits"]


def test_a_cold_kernel_is_named_with_its_shape(
    cupy: FakeCuPy, driver: FakeDriver, launched: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.capturing.add(0)
    (schedule,) = SCHEDULE_SPECS
    launch_module._loaded[schedule, 0] = launch_module.LoadedKernel(1, schedule, 0, None)
    monkeypatch.setattr(indexer, "load", launch_module.load)
    way_out = ("captured", "call cumla.prepare(indexer=[(8, 32)]) before the capture")
    message = "kernel mqa_logits_h8_d32 is not loaded on device 0"
    refuse(prefill, cumla.NotPreparedError, message, *way_out, **on_gpu(cupy, prefill()))
    message = f"kernel {paged_mqa_logits_spec(8, 32, 3).entry} is not loaded"
    refuse(paged, cumla.NotPreparedError, message, *way_out, **on_gpu(cupy, paged()))
    assert launched == []


def test_prepare_loads_what_an_indexer_needs(
    cupy: FakeCuPy, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: set[KernelSpec] = set()
    monkeypatch.setattr(preparation, "load", lambda spec, *_, **__: loaded.add(spec))
    cumla.prepare()
    assert set(SCHEDULE_SPECS) <= loaded
    assert not {spec for spec in loaded if "mqa_logits" in spec.stem}
    cumla.prepare(indexer=[(64, 128)])
    wanted = {paged_mqa_logits_spec(64, 128, next_n) for next_n in range(1, 9)}
    wanted.add(mqa_logits_spec(64, 128))
    assert {spec for spec in loaded if "mqa_logits" in spec.stem} == wanted
    with pytest.raises(ValueError, match=r"^num_heads: needs 8, 16, 32 or 64 heads, got 128"):
        cumla.prepare(indexer=[(128, 128)])


@pytest.mark.parametrize(
    ("value", "got"),
    [
        ((64, 128), "64"),
        ([(64, 128, 1)], "(64, 128, 1)"),
        (None, "None"),
        (["64"], "'64'"),
        ("", "''"),
        ([(64, 128), 5], "5"),
    ],
)
def test_prepare_needs_pairs(cupy: FakeCuPy, value: Any, got: str) -> None:
    with pytest.raises(TypeError) as caught:
        cumla.prepare(indexer=value)
    needed = "indexer: needs pairs (num_heads, head_dim)"
    assert str(caught.value) == f"{needed}, got {got}; pass [(64, 128)]"


# --- schedules that callers keep ------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2,), (2, 3)])
def test_a_schedule_in_an_array_of_the_callers(
    cupy: FakeCuPy, launched: Launches, shape: tuple[int, ...]
) -> None:
    """As many thread blocks as it has parts, and lengths as long as any table holds."""
    given = on_gpu(cupy, paged(context_lens=np.zeros(shape, np.int32)))
    schedule, out = cupy.ndarray((78, 2), "int32"), cupy.ndarray((6, 50), "float32")
    schedule.data.ptr = 0x77000
    indexer.write_schedule(given["context_lens"], schedule)
    result = indexer.score_with_schedule(**given, schedule=schedule, clean=False, out=out)
    assert result is out
    assert launched.stems == ["paged_mqa_schedule", "paged_mqa_logits"]
    (key, lengths, buffer, _), _ = launched[0][1]
    per_row = len(shape) == 2
    assert (key.batch, key.next_n) == (2, 3 if per_row else 1)
    assert (key.per_row_lens, key.num_sms) == (per_row, 77)
    assert (lengths.shape, buffer.ptr) == (shape, 0x77000)
    assert key.most_tokens >= 2**31 - 64
    (key, arguments), options = launched[1][1]
    assert tuple(key) == (2, 3, 8, 32, 16, 3, per_row, 77)
    assert (arguments.buffer.ptr, options["clean"]) == (0x77000, False)


def test_schedules_lie_at_multiples_of_8_bytes_on_one_device(cupy: FakeCuPy) -> None:
    lengths = cupy.like(paged()["context_lens"])
    schedule = cupy.ndarray((133, 2), "int32")
    schedule.data.ptr += 4
    with pytest.raises(ValueError, match=r"^schedule: needs contiguous .* 8 bytes, got .*0x1004"):
        indexer.write_schedule(lengths, schedule)
    elsewhere = cupy.ndarray((133, 2), "int32", device=1)
    with pytest.raises(ValueError, match=r"^schedule: needs to be where context_lens is"):
        indexer.write_schedule(lengths, elsewhere)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((0,), "needs at least one length, got shape (0,); skip"),
        ((2, 0), "needs at least one length, got shape (2, 0); skip"),
        ((0, 2), "needs at least one length, got shape (0, 2); skip"),
        ((), "needs shape (batch,) or (batch, next_n), got (); reshape"),
        ((2, 1, 1), "needs shape (batch,) or (batch, next_n), got (2, 1, 1); reshape"),
    ],
)
def test_lengths_of_a_schedule(
    cupy: FakeCuPy, launched: Launches, shape: tuple[int, ...], message: str
) -> None:
    schedule = cupy.ndarray((133, 2), "int32")
    with pytest.raises(ValueError) as caught:
        indexer.write_schedule(cupy.ndarray(shape, "int32"), schedule)
    assert str(caught.value).startswith(f"context_lens: {message}")
    assert launched == []
