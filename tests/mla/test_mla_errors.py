# SPDX-License-Identifier: Apache-2.0
"""What `cumla.mla_decode` and its plan refuse, and what they say: argument, need, value, way out.

GPU arrays are those of a CuPy that has addresses and nothing behind them; nothing is launched.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import types
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla import preparation
from cumla.core.arrays import ArrayView
from cumla.launch import KernelSpec, all_specs
from cumla.launch import device as launch_device
from cumla.launch import module as launch_module
from cumla.launch import source as launch_source
from cumla.mla import call as mla_call
from cumla.mla import checks
from cumla.mla import decode as mla
from tests.fake_cuda import FakeCuPy, FakeDriver
from tests.gpu.tools.cases import Case
from tests.gpu.tools.problem import make_problem
from tests.gpu.tools.refusals import REFUSALS, refused

BF16 = np.dtype(ml_dtypes.bfloat16)
INSTALL_LINES = ('pip install "cumla[cu12]"', 'pip install "cumla[cu13]"')


def make(**changes: Any) -> dict[str, Any]:
    """Arguments of a call that works, with changes."""
    rng = np.random.default_rng(0)
    arguments = {
        "q": rng.standard_normal((2, 2, 16, 576)).astype(BF16),
        "kv_cache": rng.standard_normal((6, 64, 1, 576)).astype(BF16),
        "block_table": np.arange(6, dtype=np.int32).reshape(2, 3),
        "cache_seqlens": np.array([5, 130], np.int32),
    }
    return arguments | changes


def refuse(error: type[Exception], *fragments: str, **changes: Any) -> None:
    """The call fails; its message begins with the first fragment and has the others in turn."""
    with pytest.raises(error) as caught:
        cumla.mla_decode(**make(**changes))
    message, end = str(caught.value), 0
    assert message.startswith(fragments[0])
    for fragment in fragments:
        assert fragment in message[end:], message
        end = message.index(fragment, end) + len(fragment)


@pytest.mark.parametrize(("change", "error", "message"), REFUSALS)
def test_what_the_gpu_tests_expect(change: str, error: type[Exception], message: str) -> None:
    """The same calls with NumPy arrays: an expectation that is out of date shows here first."""
    problem = make_problem(np, Case(batch=4, q_len=2, kv_len=70))
    arrays, options = refused(np, problem, change)
    with pytest.raises(error, match=message):
        cumla.mla_decode(*arrays, **options)


def test_the_unchanged_arguments_work() -> None:
    out, lse = cumla.mla_decode(**make())
    assert out.shape == (2, 2, 16, 512)
    assert lse.shape == (2, 16, 2)


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64", "int16"])
def test_dtype_of_q(dtype: str) -> None:
    q = np.zeros((2, 2, 16, 576), dtype)
    refuse(TypeError, "q: ", "bfloat16 or float16", f"got {dtype}", "; convert", q=q)


def test_dtype_of_q_in_foreign_byte_order() -> None:
    refuse(TypeError, "q: ", "bfloat16 or float16", "got >f2", q=np.zeros((2, 2, 16, 576), ">f2"))


def test_dtype_of_kv_cache_is_that_of_q() -> None:
    kv_cache = np.zeros((6, 64, 1, 576), np.float16)
    refuse(TypeError, "kv_cache: ", "bfloat16", "got float16", "; convert", kv_cache=kv_cache)


@pytest.mark.parametrize("dtype", ["int64", "uint32", "float32"])
@pytest.mark.parametrize(("name", "shape"), [("block_table", (2, 3)), ("cache_seqlens", (2,))])
def test_tables_are_int32(name: str, shape: tuple[int, ...], dtype: str) -> None:
    refuse(
        TypeError,
        f"{name}: ",
        "int32",
        f"got {dtype}",
        "; convert",
        **{name: np.ones(shape, dtype)},
    )


def test_dtype_of_out() -> None:
    out = np.zeros((2, 2, 16, 512), np.float16)
    refuse(TypeError, "out: ", "bfloat16 or float32", "got float16", out=out)


def test_dtype_of_lse() -> None:
    refuse(TypeError, "lse: ", "float32", "got float64", lse=np.zeros((2, 16, 2)))


# --- ranks and shapes -----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(576,), (2, 16, 576), (1, 2, 2, 16, 576)])
def test_rank_of_q(shape: tuple[int, ...]) -> None:
    axes = "(batch, q_len, num_heads, 576)"
    refuse(ValueError, "q: ", axes, f"got shape {shape}", q=np.zeros(shape, BF16))


@pytest.mark.parametrize("shape", [(), (64, 576), (1, 6, 64, 1, 576)])
def test_rank_of_kv_cache(shape: tuple[int, ...]) -> None:
    axes = "(num_pages, page_size, num_kv_heads, 576)"
    refuse(ValueError, "kv_cache: ", axes, f"{shape}", kv_cache=np.zeros(shape, BF16))


@pytest.mark.parametrize("shape", [(2,), (3, 3), (2, 3, 1)])
def test_shape_of_block_table(shape: tuple[int, ...]) -> None:
    table = np.zeros(shape, np.int32)
    refuse(
        ValueError, "block_table: ", "(batch, max_pages)", "2", f"got {shape}", block_table=table
    )


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 1)])
def test_shape_of_cache_seqlens(shape: tuple[int, ...]) -> None:
    lengths = np.zeros(shape, np.int32)
    refuse(ValueError, "cache_seqlens: ", "(batch,)", "2", f"got {shape}", cache_seqlens=lengths)


@pytest.mark.parametrize("shape", [(2, 2, 16, 576), (2, 16, 2, 512), (2, 16, 512)])
def test_shape_of_out(shape: tuple[int, ...]) -> None:
    out = np.zeros(shape, BF16)
    refuse(ValueError, "out: ", "(2, 2, 16, 512)", f"got {shape}", out=out)


@pytest.mark.parametrize("shape", [(2, 2, 16), (2, 16), (2, 16, 1)])
def test_shape_of_lse(shape: tuple[int, ...]) -> None:
    lse = np.zeros(shape, np.float32)
    refuse(ValueError, "lse: ", "(2, 16, 2)", f"got {shape}", lse=lse)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("q", (2, 0, 16, 576)),
        ("q", (0, 2, 16, 576)),
        ("q", (2, 2, 0, 576)),
        ("kv_cache", (6, 64, 0, 576)),
        ("kv_cache", (0, 64, 1, 576)),
    ],
)
def test_empty_axes(name: str, shape: tuple[int, ...]) -> None:
    refuse(ValueError, f"{name}: ", "at least one", f"{shape}", **{name: np.zeros(shape, BF16)})


@pytest.mark.parametrize("head_dim", [512, 192, 577])
@pytest.mark.parametrize(("name", "shape"), [("q", (2, 2, 16)), ("kv_cache", (6, 64, 1))])
def test_head_dim(name: str, shape: tuple[int, ...], head_dim: int) -> None:
    array = np.zeros((*shape, head_dim), BF16)
    refuse(ValueError, f"{name}: ", "576", f"{(*shape, head_dim)}", **{name: array})


@pytest.mark.parametrize("page_size", [1, 2, 16, 48, 128])
def test_every_page_size_works(page_size: int) -> None:
    """The same tokens in other pages give the same result."""
    arguments = make()
    rows = arguments["kv_cache"][arguments["block_table"]].reshape(2, 192, 1, 576)
    count = -(-192 // page_size)
    padded = np.full((2, count * page_size, 1, 576), np.nan, BF16)
    padded[:, :192] = rows
    table = np.arange(2 * count, dtype=np.int32).reshape(2, count)
    kv_cache = padded.reshape(-1, page_size, 1, 576)
    got = cumla.mla_decode(**arguments | {"kv_cache": kv_cache, "block_table": table})
    np.testing.assert_array_equal(got.out, cumla.mla_decode(**arguments).out)


def test_empty_pages() -> None:
    kv_cache = np.zeros((6, 0, 1, 576), BF16)
    refuse(ValueError, "kv_cache: ", "at least one", "(6, 0, 1, 576)", kv_cache=kv_cache)


def test_kv_heads_divide_the_heads() -> None:
    kv_cache = np.zeros((6, 64, 3, 576), BF16)
    refuse(
        ValueError, "num_heads: ", "multiple of num_kv_heads", "16", "3", "; pad", kv_cache=kv_cache
    )


# --- memory layout --------------------------------------------------------------------------------


SHAPES = pytest.mark.parametrize(
    ("name", "shape"),
    [("q", (2, 2, 16, 576)), ("kv_cache", (6, 64, 1, 576)), ("out", (2, 2, 16, 512))],
)


@SHAPES
def test_last_axis_is_contiguous(name: str, shape: tuple[int, ...]) -> None:
    every_other = np.zeros((*shape[:-1], 2 * shape[-1]), BF16)[..., ::2]
    refuse(
        ValueError,
        f"{name}: ",
        "contiguous last axis",
        "got a stride of 4 bytes",
        "; make a contiguous copy",
        **{name: every_other},
    )


@SHAPES
def test_strides_are_multiples_of_16_bytes(name: str, shape: tuple[int, ...]) -> None:
    padded = np.zeros((*shape[:-1], shape[-1] + 1), BF16)[..., :-1]
    axis = 1 if name == "kv_cache" else 2  # the innermost with more than one element
    refuse(
        ValueError,
        f"{name}: ",
        "multiples of 16 bytes",
        f"got {padded.strides[axis]}",
        "; pad the rows",
        **{name: padded},
    )


@SHAPES
def test_strides_are_not_negative(name: str, shape: tuple[int, ...]) -> None:
    backwards = np.zeros(shape, BF16)[::-1]
    refuse(
        ValueError,
        f"{name}: ",
        "not negative",
        f"got {-backwards[0].nbytes}",
        "axis 0",
        "copy",
        **{name: backwards},
    )


@SHAPES
@pytest.mark.parametrize("shift", [4, 8])
def test_address_is_a_multiple_of_16_bytes(name: str, shape: tuple[int, ...], shift: int) -> None:
    memory = np.zeros(2 * int(np.prod(shape)) + 32, np.uint8)
    start = -memory.ctypes.data % 16 + shift
    shifted = memory[start : start + 2 * int(np.prod(shape))].view(BF16).reshape(shape)
    refuse(
        ValueError,
        f"{name}: ",
        "multiple of 16 bytes",
        f"got {shifted.ctypes.data:#x}",
        "; copy",
        **{name: shifted},
    )


def test_rows_of_the_block_table_are_contiguous() -> None:
    table = np.zeros((2, 6), np.int32)[:, ::2]
    refuse(
        ValueError, "block_table: ", "contiguous", "8 bytes", "contiguous copy", block_table=table
    )


@pytest.mark.parametrize(("name", "shape"), [("block_table", (2, 3)), ("cache_seqlens", (2,))])
def test_tables_are_aligned(name: str, shape: tuple[int, ...]) -> None:
    unaligned = np.zeros(4 * int(np.prod(shape)) + 1, np.uint8)[1:].view("<i4").reshape(shape)
    refuse(ValueError, f"{name}: ", "multiples of 4 bytes", "; copy", **{name: unaligned})


def test_lse_is_aligned() -> None:
    lse = np.zeros(4 * 64 + 1, np.uint8)[1:].view("<f4").reshape(2, 16, 2)
    refuse(
        ValueError,
        "lse: needs an address and strides that are multiples of 4 bytes",
        f"got address {lse.ctypes.data:#x} and strides (128, 8, 4)",
        "; copy it",
        lse=lse,
    )
    odd = np.lib.stride_tricks.as_strided(np.zeros(99, np.float32), (2, 16, 2), (128, 10, 4))
    refuse(ValueError, "lse: needs an address", "strides (128, 10, 4); copy it", lse=odd)


@pytest.mark.parametrize(
    ("name", "row"), [("out", np.zeros(512, BF16)), ("lse", np.zeros(2, np.float32))]
)
def test_outputs_have_memory_for_every_element(name: str, row: Any) -> None:
    shape = {"out": (2, 2, 16, 512), "lse": (2, 16, 2)}[name]
    array = np.lib.stride_tricks.as_strided(row, shape, (*[0] * (len(shape) - 1), row.itemsize))
    refuse(
        ValueError,
        f"{name}: needs memory of its own for each element",
        f"got a broadcast array with strides {array.strides}",
        "; copy it",
        **{name: array},
    )


def test_out_is_checked_before_lse() -> None:
    """First what it is, then where it lies; lse after out."""
    out = np.zeros((2, 2, 16, 1024), BF16)[..., ::2]
    lse = np.zeros(4 * 64 + 1, np.uint8)[1:].view("<f4").reshape(2, 16, 2)
    refuse(ValueError, "out: needs a contiguous last axis", out=out, lse=lse)
    refuse(TypeError, "out: needs bfloat16 or float32", out=out.view(np.int16), lse=lse)
    refuse(ValueError, "out: needs shape", out=out[:1], lse=lse)
    refuse(ValueError, "q: needs a contiguous last axis", q=make()["q"].repeat(2, 3)[..., ::2])


def split(array: Any) -> tuple[Any, Any]:
    """Latent and RoPE columns as slices of one array."""
    return array[..., :512], array[..., 512:]


def test_pairs_are_the_same_call() -> None:
    """Query and cache each as one array or two, slices or copies."""
    arguments = make()
    expected = cumla.mla_decode(**arguments)
    q, kv_cache = arguments["q"], arguments["kv_cache"]
    copies = tuple(np.ascontiguousarray(part) for part in split(kv_cache))
    without_heads = tuple(part[:, :, 0] for part in copies)
    for pair in (
        {"q": split(q)},
        {"kv_cache": split(kv_cache)},
        {"q": split(q), "kv_cache": copies},
        {"kv_cache": without_heads},
    ):
        for plan in (None, plan_of(arguments | pair)):
            got = cumla.mla_decode(**arguments | pair, plan=plan)
            np.testing.assert_array_equal(got.out, expected.out)
            np.testing.assert_array_equal(got.lse, expected.lse)


@pytest.mark.parametrize("name", ["q", "kv_cache"])
@pytest.mark.parametrize("count", [0, 1, 4])
def test_tuples_are_pairs(name: str, count: int) -> None:
    arrays = (make()[name],) * count
    message = ("needs one array, or a tuple of latent and RoPE columns", f"got {count} arrays")
    refuse(ValueError, f"{name}: ", *message, "; join them", **{name: arrays})


@pytest.mark.parametrize("name", ["q", "kv_cache"])
def test_parts_of_a_pair(name: str) -> None:
    """Each is named where it does not fit, by itself or with the other."""
    latent, rope = split(make()[name])

    def refuse_pair(error: type[Exception], *fragments: str, pair: tuple[Any, Any]) -> None:
        refuse(error, *fragments, **{name: pair})

    wide = np.zeros((*latent.shape[:3], 576), BF16)
    refuse_pair(ValueError, f"{name}[0]: ", "512", f"{wide.shape}", "; a pair", pair=(wide, rope))
    refuse_pair(
        ValueError, f"{name}[1]: ", "64", f"{latent.shape}", "; a pair", pair=(latent, latent)
    )
    refuse_pair(
        ValueError,
        f"{name}[1]: needs the first axes of {name}[0]",
        f"{latent.shape[:3]}, got {rope[:1].shape[:3]}",
        "; pass both parts",
        pair=(latent, rope[:1]),
    )
    refuse_pair(ValueError, f"{name}[1]: needs", "axes", "(64,)", pair=(latent, rope[0, 0, 0]))
    half = rope.astype(np.float16)
    refuse_pair(TypeError, f"{name}[1]: ", "bfloat16", "got float16", pair=(latent, half))
    every_other = np.zeros((*rope.shape[:3], 128), BF16)[..., ::2]
    refuse_pair(ValueError, f"{name}[1]: ", "contiguous last axis", pair=(latent, every_other))
    shifted = np.zeros((*rope.shape[:3], 80), BF16)[..., 4:68]
    refuse_pair(ValueError, f"{name}[1]: ", "multiple of 16 bytes", pair=(latent, shifted))
    refuse_pair(TypeError, f"{name}[1]: ", "an array of CuPy", pair=(latent, None))


def test_heads_of_a_pair() -> None:
    caches = split(np.zeros((6, 64, 3, 576), BF16))
    refuse(ValueError, "num_heads: ", "multiple of num_kv_heads", "16", "3", kv_cache=caches)


def test_layouts_that_are_fine() -> None:
    """Padded rows and pages, a repeated query, a cache without its head axis: none is refused."""
    arguments = make()
    expected = cumla.mla_decode(**arguments)
    padded = np.zeros((6, 80, 584), BF16)
    padded[:, :64, :576] = arguments["kv_cache"][:, :, 0]
    wide = np.zeros((2, 9), np.int32)
    wide[:, :3] = arguments["block_table"]
    got = cumla.mla_decode(
        **arguments | {"kv_cache": padded[:, :64, :576], "block_table": wide[:, :3]}
    )
    np.testing.assert_array_equal(got.out, expected.out)
    np.testing.assert_array_equal(got.lse, expected.lse)
    repeated = np.broadcast_to(arguments["q"][:1], arguments["q"].shape)
    cumla.mla_decode(**arguments | {"q": repeated})


def test_nothing_is_written_by_a_call_that_fails() -> None:
    out, lse = np.full((2, 2, 16, 512), 7, BF16), np.full((2, 2, 16), 7, np.float32)
    refuse(ValueError, "lse: ", out=out, lse=lse)
    assert (out == 7).all()
    assert (lse == 7).all()


# --- other arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q", "kv_cache", "block_table", "cache_seqlens"])
@pytest.mark.parametrize("value", [None, [[1, 2]], "text"])
def test_things_that_are_no_arrays(name: str, value: object) -> None:
    kind = type(value).__name__
    refuse(TypeError, f"{name}: ", "an array of CuPy", f"got builtins.{kind}", **{name: value})


@pytest.mark.parametrize("scale", ["1", np.ones(1), 1j])
def test_softmax_scale_is_a_number(scale: object) -> None:
    kind = type(scale).__name__
    refuse(TypeError, "softmax_scale: ", "number", f"got {kind}", softmax_scale=scale)


@pytest.mark.parametrize("scale", [0.0, -0.1, 9e-21, 1.1e6, float("nan"), float("inf")])
def test_softmax_scale_is_positive_and_not_extreme(scale: float) -> None:
    refuse(
        ValueError,
        "softmax_scale: needs a number from 1e-20 to 1000000.0",
        f"got {scale}",
        "; put any other factor into q",
        softmax_scale=scale,
    )


def test_plan_is_a_plan() -> None:
    refuse(TypeError, "plan: ", "cumla.MLADecodePlan", "got dict", plan={})


# --- plans ----------------------------------------------------------------------------------------


def plan_of(arguments: dict[str, Any], *, updated: bool = True, **kw: Any) -> cumla.MLADecodePlan:
    plan = cumla.MLADecodePlan.from_arrays(arguments["q"], arguments["kv_cache"], **kw)
    if updated:
        plan.update(arguments["cache_seqlens"])
    return plan


@pytest.mark.parametrize(
    "changes",
    [
        {"q": (2, 1, 16, 576)},
        {"q": (2, 2, 32, 576)},
        {"kv_cache": (6, 64, 2, 576)},
        {"q": (3, 2, 16, 576), "block_table": (3, 3), "cache_seqlens": (3,)},
    ],
)
def test_plan_of_another_shape(changes: dict[str, tuple[int, ...]]) -> None:
    plan = plan_of(make())
    new = {n: np.zeros(s, BF16 if len(s) == 4 else np.int32) for n, s in changes.items()}
    refuse(ValueError, "plan: made for ", "got ", "; make a plan for this shape", plan=plan, **new)


def test_plan_of_another_dtype() -> None:
    plan = plan_of(make())
    half = {n: make()[n].astype(np.float16) for n in ("q", "kv_cache")}
    refuse(ValueError, "plan: made for ", "bfloat16", "float16", "; make a plan", plan=plan, **half)


def test_plan_of_the_other_mask() -> None:
    plan = plan_of(make(), causal=False)
    refuse(ValueError, "plan: ", "causal=False", "got causal=True", "; make a plan", plan=plan)


@pytest.mark.parametrize("invariant", [True, False])
def test_plan_of_the_other_way_to_cut(invariant: bool) -> None:
    plan = plan_of(make(), batch_invariant=invariant, max_seqlen=192 if invariant else None)
    got = f"got batch_invariant={not invariant}; make a plan for each"
    made = f"plan: made with batch_invariant={invariant}, "
    refuse(ValueError, made, got, plan=plan, batch_invariant=not invariant)
    cumla.mla_decode(**make(), plan=plan, batch_invariant=invariant)


def test_plan_that_was_never_updated() -> None:
    plan = plan_of(make(), updated=False)
    refuse(ValueError, "plan: never updated", "; call plan.update(cache_seqlens)", plan=plan)


def test_update_checks_the_lengths() -> None:
    plan = plan_of(make())
    with pytest.raises(TypeError, match=r"^cache_seqlens: needs int32, got int64"):
        plan.update(np.zeros(2, np.int64))
    with pytest.raises(ValueError, match=r"^cache_seqlens: .*batch 2.*got \(3,\)"):
        plan.update(np.zeros(3, np.int32))


@pytest.mark.parametrize("name", ["batch", "q_len", "num_heads", "num_kv_heads"])
@pytest.mark.parametrize(
    ("value", "error", "need"),
    [
        (0, ValueError, "a number from 1, got 0; nothing to plan for"),
        (-1, ValueError, "a number from 1, got -1; nothing to plan for"),
        (2.0, TypeError, "an int, got float; convert it"),
        (True, TypeError, "an int, got bool; convert it"),
        (None, TypeError, "an int, got NoneType; convert it"),
    ],
)
def test_numbers_of_a_plan(name: str, value: object, error: type[Exception], need: str) -> None:
    numbers: dict[str, Any] = {"batch": 2, "q_len": 1, "num_heads": 16, name: value}
    with pytest.raises(error, match=f"^{name}: needs {need}$"):
        cumla.MLADecodePlan(**numbers, like=make()["q"])
    with pytest.raises(error, match=f"^{name}: needs {need}$"):
        cumla.MLADecodePlan.workspace_bytes(**numbers, sm_count=132)


@pytest.mark.parametrize(
    ("mode", "error", "message"),
    [
        (
            {"batch_invariant": True},
            ValueError,
            "needs the length of the longest request .*, got None; pass it",
        ),
        (
            {"max_seqlen": 4096},
            ValueError,
            "needs batch_invariant=True, got 4096 .*; leave it out",
        ),
        (
            {"batch_invariant": True, "max_seqlen": 0},
            ValueError,
            "needs a number from 1, got 0; nothing to plan for",
        ),
        (
            {"batch_invariant": True, "max_seqlen": 4096.0},
            TypeError,
            "needs an int, got float; convert it",
        ),
    ],
)
def test_the_longest_request_of_a_plan(
    mode: dict[str, Any], error: type[Exception], message: str
) -> None:
    make_plans: list[Callable[[], object]] = [
        lambda: cumla.MLADecodePlan(2, 1, 16, like=make()["q"], **mode),
        lambda: plan_of(make(), **mode),
        lambda: cumla.MLADecodePlan.workspace_bytes(2, 1, 16, sm_count=132, **mode),
    ]
    for make_plan in make_plans:
        with pytest.raises(error, match=f"^max_seqlen: {message}"):
            make_plan()


def test_the_longest_request_may_be_a_number_of_numpys() -> None:
    def workspace(longest: Any) -> int:
        return cumla.MLADecodePlan.workspace_bytes(
            2, 1, 16, sm_count=132, batch_invariant=True, max_seqlen=longest
        )

    lengths = np.array([17, 4096], np.int32)
    assert workspace(lengths.max()) == workspace(4096)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "^num_heads: .*16 query heads and 3 kv heads"),
        ({"page_size": 0}, "^page_size: needs a number from 1, got 0"),
        ({"page_size": 16.0}, "^page_size: needs an int, got float"),
        ({"dtype": "float32"}, "^dtype: needs bfloat16 or float16, got float32"),
        ({"device": 0}, "^like: .*CUDA device 0"),
    ],
)
def test_other_arguments_of_a_plan(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        cumla.MLADecodePlan(2, 1, 16, like=make()["q"], **changes)


@pytest.mark.parametrize("variant", [0, True, ["swapped"], np.zeros(2)], ids=repr)
def test_the_kernel_of_a_plan_is_a_string(variant: object) -> None:
    message = f"^variant: needs a string or None, got {type(variant).__name__}; leave it out"
    with pytest.raises(TypeError, match=message):
        cumla.MLADecodePlan(2, 1, 16, like=make()["q"], variant=variant)


@pytest.mark.parametrize(
    ("variant", "shape", "message"),
    [
        ("fast", (1, 16, 1), "needs one of 'swapped', 'one_tile', 'shared_blocks' or None, got 'f"),
        ("", (1, 16, 1), "needs one of .* or None, got ''; leave it out"),
        ("Swapped", (1, 16, 1), "needs one of .* or None, got 'Swapped'"),
        ("swapped", (1, 17, 1), "'swapped' needs at most 16 query rows of a kv head, got 17; leav"),
        ("swapped", (2, 16, 1), "'swapped' needs at most 16 query rows of a kv head, got 32; leav"),
        ("swapped", (3, 48, 8), "'swapped' needs at most 16 query rows of a kv head, got 18; leav"),
    ],
)
def test_the_kernel_of_a_plan(variant: object, shape: tuple[int, int, int], message: str) -> None:
    q_len, heads, kv_heads = shape
    arguments = make(
        q=np.zeros((2, q_len, heads, 576), BF16), kv_cache=np.zeros((6, 64, kv_heads, 576), BF16)
    )
    with pytest.raises(ValueError, match=f"^variant: {message}"):
        checks.check_variant(variant, heads, q_len, kv_heads)
    with pytest.raises(ValueError, match=f"^variant: {message}"):
        cumla.MLADecodePlan(
            2,
            q_len,
            heads,
            num_kv_heads=kv_heads,
            variant=variant,  # type: ignore[arg-type]
            like=arguments["q"],
        )
    with pytest.raises(ValueError, match=f"^variant: {message}"):
        plan_of(arguments, updated=False, variant=variant)


@pytest.mark.parametrize(
    ("variant", "shape"),
    [
        (None, (1, 128, 1)),
        ("swapped", (4, 4, 1)),
        ("swapped", (2, 64, 8)),
        ("one_tile", (1, 1, 1)),
        ("one_tile", (4, 128, 1)),
        ("shared_blocks", (1, 1, 1)),
        ("shared_blocks", (4, 128, 1)),
    ],
)
def test_kernels_that_a_plan_can_have(variant: str | None, shape: tuple[int, int, int]) -> None:
    q_len, heads, kv_heads = shape
    checks.check_variant(variant, heads, q_len, kv_heads)


def test_prepare_names_an_unknown_dtype() -> None:
    with pytest.raises((ValueError, TypeError), match=r"^dtypes: .*got float8"):
        cumla.prepare(dtypes=("float8",))


# --- check mode -----------------------------------------------------------------------------------


def check_values(lengths: list[int], table: list[list[int]], num_pages: int = 10) -> None:
    """Check values for pages of 64 tokens; every row of the table has as many columns."""
    rows = np.array(table, np.int32).reshape(len(lengths), -1)
    checks.check_values(np.array(lengths, np.int32), rows, num_pages, 64)


@pytest.mark.parametrize(
    ("lengths", "table"),
    [
        ([0, 128, 65, 64], [[-1, -1], [0, 9], [8, 1], [2, 10]]),  # unused: anything
        ([0, 0], [[], []]),
        ([64], [[0]]),
        ([128, 128], [[3, 3], [3, 3]]),  # pages may be shared
    ],
)
def test_values_that_are_fine(lengths: list[int], table: list[list[int]]) -> None:
    check_values(lengths, table)


@pytest.mark.parametrize(
    ("lengths", "position", "longest"),
    [
        ([5, -1, 7], 1, 128),
        ([128, 128, 129], 2, 128),
        ([2**31 - 1, -(2**31), 0], 0, 128),  # the first of several
        ([0, 0, 1], 2, 0),
    ],
)
def test_lengths_out_of_range(lengths: list[int], position: int, longest: int) -> None:
    """Named before any page number, wrong as they are here, too."""
    table = [[-1] * (longest // 64)] * len(lengths)
    message = (
        rf"^cache_seqlens\[{position}\]: needs a length from 0 to max_pages \* page_size = "
        rf"{longest}, got {lengths[position]}; the kernels would clamp it$"
    )
    with pytest.raises(ValueError, match=message):
        check_values(lengths, table)


@pytest.mark.parametrize("page", [-1, 10, 2147480000, -(2**31)])
@pytest.mark.parametrize(
    ("lengths", "position"),
    [
        ([1, 0, 0], (0, 0)),
        ([64, 64, 65], (2, 1)),  # one token of the last page
        ([64, 192, 129], (1, 1)),
        ([0, 129, 192], (1, 2)),
    ],
)
def test_page_numbers_out_of_range(
    lengths: list[int], position: tuple[int, int], page: int
) -> None:
    table = np.tile(np.arange(3), (3, 1))
    table[2, 2] = 10 if lengths[2] == 192 else 0  # the second of two is not named
    i, j = position
    table[i, j] = page
    message = (
        rf"^block_table\[{i}, {j}\]: needs a page number from 0 to 9, got {page}; the kernels "
        rf"would read zeros for that page$"
    )
    with pytest.raises(ValueError, match=message):
        check_values(lengths, table.tolist())
    table[2, 2] = 0
    shorter = [64 * j if b == i else length for b, length in enumerate(lengths)]
    check_values(shorter, table.tolist())  # now nobody reads that page


def test_lengths_that_are_not_those_of_the_plan() -> None:
    planned = np.array([5, 0, 128, 7], np.int32)
    checks.check_lengths_of_plan(planned.copy(), planned)
    message = (
        r"^cache_seqlens\[2\]: needs the length that the plan was updated with, 128, got 129; call "
        r"plan\.update\(cache_seqlens\) after each change of the lengths, and give a "
        r"batch_invariant plan the max_seqlen that they need$"
    )
    with pytest.raises(ValueError, match=message):
        checks.check_lengths_of_plan(np.array([5, 0, 129, 8], np.int32), planned)


@pytest.mark.parametrize(
    "make_array",
    [
        lambda base: base[0, 0],
        lambda base: base[0, 0, ::3],
        lambda base: base[0, 0, ::-2],
        lambda base: base[:, 2, :3],
        lambda base: base[::-1, 1],
        lambda base: base[0, 0, :1],
        lambda base: np.broadcast_to(base[0, 0, :1], (5,)),
        lambda base: base[0, 0, :0],
    ],
)
def test_check_mode_copies_strided_arrays(make_array: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a copy engine that stays in the memory of the array."""
    base = np.arange(2 * 3 * 7, dtype=np.int32).reshape(2, 3, 7)
    array, waited = make_array(base), []

    def copy(target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        assert base.ctypes.data <= source
        assert source + nbytes <= base.ctypes.data + base.nbytes
        assert (kind, stream) == (2, 0x77)
        ctypes.memmove(target, source, nbytes)

    runtime = types.SimpleNamespace(
        memcpyAsync=copy, memcpyDeviceToHost=2, streamSynchronize=waited.append
    )
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(checks, "import_cupy", lambda: cupy)
    view = ArrayView(array.ctypes.data, array.shape, array.strides, "int32", 0)
    copied = checks.copy_to_host(view, 0x77)
    np.testing.assert_array_equal(copied, array)
    assert waited == ([0x77] if array.size else [])


# --- frameworks -----------------------------------------------------------------------------------


def test_jax_tracers_are_refused() -> None:
    jax = pytest.importorskip("jax")
    arguments = {name: jax.numpy.asarray(array) for name, array in make().items()}

    def attend(**changes: Any) -> Any:
        return cumla.mla_decode(**arguments | changes).out

    for name in ("q", "cache_seqlens"):
        with pytest.raises(TypeError, match=rf"^{name}: .*JAX tracer.*outside jax\.jit"):
            jax.jit(lambda array, n=name: attend(**{n: array}))(arguments[name])
    with pytest.raises(TypeError, match=r"^q: .*JAX tracer"):
        jax.grad(lambda q: attend(q=q).sum().astype("float32"))(arguments["q"])


def test_jax_outputs_are_refused() -> None:
    jnp = pytest.importorskip("jax").numpy
    given = {name: jnp.asarray(array) for name, array in make().items()}
    out, lse = jnp.zeros((2, 2, 16, 512), "bfloat16"), jnp.zeros((2, 16, 2))
    refuse(TypeError, "out: JAX arrays are immutable", "without out=", **given, out=out)
    refuse(TypeError, "lse: JAX arrays are immutable", "without lse=", **given, lse=lse)
    refuse(TypeError, "out: JAX arrays are immutable", out=out)  # NumPy inputs


def test_outputs_of_another_framework_are_refused() -> None:
    torch = pytest.importorskip("torch")
    out = torch.zeros(2, 2, 16, 512, dtype=torch.bfloat16)
    refuse(
        TypeError,
        "out: ",
        "framework of q",
        "got torch.Tensor",
        "; convert it, or call without out=",
        out=out,
    )


def test_fake_tensors_are_refused() -> None:
    torch = pytest.importorskip("torch")
    fake_tensor = pytest.importorskip("torch._subclasses.fake_tensor")
    with fake_tensor.FakeTensorMode():
        q = torch.zeros(2, 2, 16, 576, dtype=torch.bfloat16)
    refuse(TypeError, "q: ", "FakeTensor", "; call cumla outside", q=q)


def test_tensors_elsewhere_are_refused() -> None:
    torch = pytest.importorskip("torch")
    q = torch.zeros(2, 2, 16, 576, dtype=torch.bfloat16, device="meta")
    refuse(ValueError, "q: ", "CUDA device or on the CPU", "meta", q=q)


SHARDED = """
import jax, numpy as np
import cumla
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
q = jax.device_put(jax.numpy.zeros((2, 1, 16, 576), "bfloat16"), place)
kv_cache = jax.numpy.zeros((6, 64, 1, 576), "bfloat16")
table, lengths = jax.numpy.zeros((2, 3), "int32"), jax.numpy.zeros(2, "int32")
try:
    cumla.mla_decode(q, kv_cache, table, lengths)
except ValueError as error:
    print(error)
print(cumla.mla_decode(q.addressable_shards[0].data, kv_cache, table[:1], lengths[:1]).out.shape)
"""


def test_sharded_jax_arrays_are_refused() -> None:
    pytest.importorskip("jax")
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
    }
    result = subprocess.run(
        [sys.executable, "-c", SHARDED],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    message, shape = result.stdout.splitlines()
    assert message.startswith("q: needs an array on one device, got one that is sharded over 2; ")
    assert "q.addressable_shards[i].data" in message
    assert shape == "(1, 1, 16, 512)"


# --- GPU arrays -----------------------------------------------------------------------------------


@pytest.fixture
def on_gpu(cupy: FakeCuPy) -> dict[str, Any]:
    """The arguments of `make` on the GPU."""
    return {name: cupy.like(array) for name, array in make().items()}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels that would be launched; none is loaded."""
    names: list[str] = []
    monkeypatch.setattr(mla_call, "load", lambda spec, device, *, capturing: spec)

    def prepare(spec: KernelSpec, *_: object) -> Callable[[], None]:
        return lambda: names.append(spec.stem)

    monkeypatch.setattr(mla, "prepare_schedule", prepare)
    monkeypatch.setattr(mla, "prepare_decode", prepare)
    return names


def test_the_fake_gpu_is_called(on_gpu: dict[str, Any], launched: list[str]) -> None:
    cumla.mla_decode(**on_gpu)
    assert launched == ["mla_schedule", "mla_decode"]


@pytest.mark.parametrize("name", ["kv_cache", "block_table", "cache_seqlens"])
def test_cpu_and_gpu_mixed(on_gpu: dict[str, Any], name: str) -> None:
    changed = on_gpu | {name: make()[name]}
    refuse(ValueError, f"{name}: ", "q is, on CUDA device 0", "on the CPU", "; copy", **changed)
    refuse(ValueError, f"{name}: ", "q is, on the CPU", "CUDA device 0", **{name: on_gpu[name]})


@pytest.mark.parametrize("name", ["kv_cache", "block_table", "cache_seqlens"])
def test_devices_that_differ(on_gpu: dict[str, Any], cupy: FakeCuPy, name: str) -> None:
    changed = on_gpu | {name: cupy.like(on_gpu[name], device=1)}
    refuse(ValueError, f"{name}: ", "CUDA device 0", "CUDA device 1", "; copy", **changed)


def test_outputs_on_another_device(on_gpu: dict[str, Any], cupy: FakeCuPy) -> None:
    out = cupy.ndarray((2, 2, 16, 512), BF16, device=1)
    refuse(ValueError, "out: ", "CUDA device 0", "CUDA device 1", **on_gpu, out=out)


def test_layouts_are_checked_on_the_gpu_too(
    on_gpu: dict[str, Any], cupy: FakeCuPy, launched: list[str]
) -> None:
    on_gpu["q"].data.ptr += 8
    refuse(ValueError, "q: ", "multiple of 16 bytes", "got 0x1008", "; copy", **on_gpu)
    assert launched == []


def test_a_ready_plan_still_sees_misaligned_arrays(
    on_gpu: dict[str, Any], launched: list[str]
) -> None:
    plan = plan_of(on_gpu)
    cumla.mla_decode(**on_gpu, plan=plan)
    launched.clear()
    on_gpu["kv_cache"].data.ptr += 8
    refuse(ValueError, "kv_cache: ", "multiple of 16 bytes", "got 0x1008", **on_gpu, plan=plan)
    assert launched == []


def test_plan_of_another_device(
    on_gpu: dict[str, Any], cupy: FakeCuPy, launched: list[str]
) -> None:
    plan = plan_of(on_gpu)
    elsewhere = {name: cupy.like(array, device=1) for name, array in on_gpu.items()}
    message = ("plan: made for CUDA device 0", "CUDA device 1", "; make a plan for each device")
    refuse(ValueError, *message, **elsewhere, plan=plan)
    refuse(ValueError, "plan: made for CUDA device 0", "the CPU", plan=plan)
    with pytest.raises(ValueError, match=r"^plan: made for CUDA device 0, got .* CUDA device 1"):
        plan.update(elsewhere["cache_seqlens"])


def test_plan_of_another_stream(on_gpu: dict[str, Any], launched: list[str]) -> None:
    plan = plan_of(on_gpu)
    message = ("plan: updated on stream 0x0", "got a run on stream 0x5", "call plan.update")
    refuse(ValueError, *message, **on_gpu, plan=plan, stream=5)
    plan.update(on_gpu["cache_seqlens"], stream=5)
    cumla.mla_decode(**on_gpu, plan=plan, stream=5)
    refuse(ValueError, "plan: updated on stream 0x5", "stream 0x0", **on_gpu, plan=plan)


def test_plan_on_the_gpu_that_was_never_updated(
    on_gpu: dict[str, Any], launched: list[str]
) -> None:
    plan = plan_of(on_gpu, updated=False)
    refuse(ValueError, "plan: never updated", "; call plan.update", **on_gpu, plan=plan)


@pytest.mark.parametrize(
    ("shape", "dtype", "shift", "message"),
    [
        ((1 << 30,), "int8", 0, "^workspace: .*uint8.*got int8"),
        ((1 << 15, 1 << 15), "uint8", 0, "^workspace: .*one-dimensional"),
        ((100,), "uint8", 0, r"^workspace: needs \d+ bytes, got 100; ask .*workspace_bytes"),
        ((1 << 30,), "uint8", 128, "^workspace: .*multiple of 256.*got 0x1080"),
    ],
)
def test_workspaces(
    cupy: FakeCuPy, shape: tuple[int, ...], dtype: str, shift: int, message: str
) -> None:
    workspace = cupy.ndarray(shape, dtype)
    workspace.data.ptr += shift
    with pytest.raises(ValueError, match=message):
        cumla.MLADecodePlan(2, 2, 16, workspace=workspace)


@pytest.mark.parametrize("stream", ["0", 1.5, object()])
def test_streams_of_another_kind(on_gpu: dict[str, Any], stream: object) -> None:
    kind = type(stream).__name__
    refuse(TypeError, "stream: ", "integer handle", f"got builtins.{kind}", **on_gpu, stream=stream)


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
def test_unsupported_gpus(
    on_gpu: dict[str, Any], cupy: FakeCuPy, capability: tuple[int, int]
) -> None:
    cupy.capability = capability
    found = "NVIDIA Imaginary of compute capability {}.{}".format(*capability)
    message = ("device 0 is", found, "compute capability 9.0", "CPU memory")
    refuse(cumla.UnsupportedDeviceError, *message, **on_gpu)
    with pytest.raises(cumla.UnsupportedDeviceError, match="NVIDIA Imaginary"):
        cumla.prepare()


def test_a_cold_kernel_under_capture(
    on_gpu: dict[str, Any], driver: FakeDriver, launched: Any
) -> None:
    cupy_outputs = {
        "out": type(on_gpu["q"])((2, 2, 16, 512), BF16),
        "lse": type(on_gpu["q"])((2, 16, 2), "float32"),
    }
    plan = plan_of(on_gpu, updated=False)
    driver.capturing.add(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mla_call, "load", launch_module.load)
        with pytest.raises(cumla.NotPreparedError) as caught:
            plan.update(on_gpu["cache_seqlens"])
        assert "kernel mla_schedule" in str(caught.value)
        assert "captured" in str(caught.value)
        assert "call cumla.prepare()" in str(caught.value)
    plan.update(on_gpu["cache_seqlens"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mla_call, "load", launch_module.load)
        cumla.mla_decode(**on_gpu, **cupy_outputs, plan=plan)  # update has loaded all
        refuse(cumla.NotPreparedError, "kernel mla_schedule is not loaded", **on_gpu)


@pytest.mark.parametrize("cold", ["mla_schedule", "mla_decode_bfloat16"])
def test_one_cold_kernel_of_several_under_capture(
    on_gpu: dict[str, Any], driver: FakeDriver, launched: list[str], cold: str
) -> None:
    """Named before any of the others is launched."""
    plan = plan_of(on_gpu, updated=False)
    for spec in all_specs():
        if spec.entry != cold:
            launch_module._loaded[spec, 0] = launch_module.LoadedKernel(1, spec, 0, None)
    driver.capturing.add(0)
    message = f"kernel {cold} is not loaded on device 0"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mla_call, "load", launch_module.load)
        refuse(cumla.NotPreparedError, message, "call cumla.prepare()", **on_gpu)
        with pytest.raises(cumla.NotPreparedError, match=f"^{message}"):
            plan.update(on_gpu["cache_seqlens"])
    assert launched == []


def test_cupy_allocations_under_capture(
    on_gpu: dict[str, Any], driver: FakeDriver, launched: list[str]
) -> None:
    driver.capturing.add(0)
    message = ("the stream is being captured", "CuPy", "out=, lse= and plan=")
    refuse(cumla.NotPreparedError, *message, **on_gpu)
    assert launched == []


@pytest.mark.parametrize(
    ("page_sizes", "error", "message"),
    [
        (64, TypeError, r"^page_sizes: needs a sequence of ints, got 64; pass \(64,\)"),
        ((16, 0), ValueError, "^page_sizes: needs a number from 1, got 0; name those"),
        ((1.0,), TypeError, "^page_sizes: needs an int, got float"),
    ],
)
def test_page_sizes_to_prepare(page_sizes: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cumla.prepare(page_sizes=page_sizes)


def test_only_the_forms_of_these_page_sizes_are_prepared(
    cupy: FakeCuPy, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(preparation, "load", lambda spec, *_, **__: loaded.append(spec.entry))
    for page_sizes, wanted in (((64, 128), {""}), ((1, 48), {"_rows", "_boxes"})):
        loaded.clear()
        cumla.prepare(dtypes=("bfloat16",), page_sizes=page_sizes)
        found = {entry for entry in loaded if entry.startswith("mla_decode_")}
        variants = ("", "_swapped", "_shared_blocks")
        assert found == {f"mla_decode_bfloat16{v}{form}" for v in variants for form in wanted}


# --- installation ---------------------------------------------------------------------------------


def test_cupy_missing(monkeypatch: pytest.MonkeyPatch, no_cupy_yet: None) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(launch_device, "installed_cupy", lambda: ())
    for call in (cumla.prepare, lambda: cumla.MLADecodePlan(2, 1, 16)):
        with pytest.raises(cumla.MissingDependencyError, match=r"^CuPy") as caught:
            call()
        assert all(line in str(caught.value) for line in INSTALL_LINES)
        assert isinstance(caught.value, ImportError)


def test_cupy_missing_when_another_framework_has_gpu_arrays(
    monkeypatch: pytest.MonkeyPatch, no_cupy_yet: None
) -> None:
    class Foreign:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

        def __dlpack__(self, **_: Any) -> object:
            raise AssertionError("not to be asked")

    monkeypatch.setitem(sys.modules, "cupy", None)
    arguments = dict.fromkeys(make(), Foreign())
    refuse(cumla.MissingDependencyError, "CuPy", *INSTALL_LINES, **arguments)


def test_cupy_installed_twice(monkeypatch: pytest.MonkeyPatch, no_cupy_yet: None) -> None:
    versions = {"cupy-cuda12x": "14.2.0", "cupy-cuda13x": "14.2.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(cumla.MissingDependencyError) as caught:
        cumla.prepare()
    message = str(caught.value)
    assert message.startswith(
        "CuPy is installed 2 times (cupy-cuda12x 14.2.0, cupy-cuda13x 14.2.0)"
    )
    assert "uninstall" in message
    assert all(line in message for line in INSTALL_LINES)


def test_nvrtc_missing(on_gpu: dict[str, Any], cupy: FakeCuPy) -> None:
    cupy.nvrtc = (0, 0)
    message = ("CuPy found no NVRTC (CuPy failed to load libnvrtc.so.12)", *INSTALL_LINES)
    refuse(cumla.MissingDependencyError, *message, **on_gpu)


def test_nvrtc_of_cuda_bindings_missing(
    on_gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    refuse(cumla.MissingDependencyError, "cuda.bindings", *INSTALL_LINES, **on_gpu)


def test_a_compile_failure_shows_numbered_source(
    on_gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    try:
        launch_module.bindings_nvrtc_version()
    except cumla.MissingDependencyError as error:
        pytest.skip(str(error).split("\n")[0])
    whole = launch_source.translation_unit

    def broken(spec: Any, *, debug: bool = False) -> str:
        first, rest = whole(spec, debug=debug).split("\n", 1)
        return f"{first}\nint good;\nint bad = undeclared;\n{rest}"

    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launch_module, "translation_unit", broken)
    refuse(
        cumla.CompilationError,
        "kernel mla_schedule",
        "does not compile",
        "undeclared",
        "cumla/cuda/split/mla_schedule.cu:\n",
        "     1 | int good;\n>    2 | int bad = undeclared;\n",
        **on_gpu,
    )
    assert list(tmp_path.iterdir()) == []
