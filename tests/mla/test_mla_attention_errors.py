# SPDX-License-Identifier: Apache-2.0
"""What `cumla.mla_attention` and its plan refuse: argument, need, value and way out are named.

GPU arrays are those of a CuPy that has addresses and nothing behind them; nothing is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla.launch import KernelSpec, all_specs
from cumla.launch import module as launch_module
from cumla.mla import attention as ragged
from cumla.mla import call as mla_call
from tests.fake_cuda import FakeCuPy, FakeDriver

BF16 = np.dtype(ml_dtypes.bfloat16)


def make(**changes: Any) -> dict[str, Any]:
    """Arguments of a call that works, with changes: rows 1 to 6 of 8 have a request."""
    rng = np.random.default_rng(0)
    arguments = {
        "q": rng.standard_normal((8, 16, 576)).astype(BF16),
        "kv_cache": rng.standard_normal((6, 64, 1, 576)).astype(BF16),
        "qo_indptr": np.array([1, 4, 6], np.int32),
        "kv_lens": np.array([5, 130], np.int32),
        "block_table": np.arange(6, dtype=np.int32).reshape(2, 3),
    }
    return arguments | changes


def make_listed(**changes: Any) -> dict[str, Any]:
    """The same with a list of pages."""
    arguments = make(
        kv_indptr=np.array([0, 1, 4], np.int32), kv_indices=np.array([0, 3, 4, 5], np.int32)
    )
    del arguments["block_table"]
    return arguments | changes


def refuse(
    error: type[Exception],
    *fragments: str,
    to: Callable[..., dict[str, Any]] = make,
    **changes: Any,
) -> None:
    """The call fails; its message begins with the first fragment and has the others in turn."""
    with pytest.raises(error) as caught:
        cumla.mla_attention(**to(**changes))
    message, end = str(caught.value), 0
    assert message.startswith(fragments[0]), message
    for fragment in fragments:
        assert fragment in message[end:], message
        end = message.index(fragment, end) + len(fragment)


def test_the_unchanged_arguments_work() -> None:
    out, lse = cumla.mla_attention(**make())
    assert (out.shape, out.dtype) == ((8, 16, 512), BF16)
    assert (lse.shape, lse.dtype) == ((8, 16), np.float32)
    listed = cumla.mla_attention(**make_listed())
    np.testing.assert_array_equal(listed.out[1:6], out[1:6])
    np.testing.assert_array_equal(listed.lse[1:6], lse[1:6])


def test_rows_of_no_request_are_not_written() -> None:
    out, lse = np.full((8, 16, 512), 7, BF16), np.full((8, 16), 7, np.float32)
    cumla.mla_attention(**make(), out=out, lse=lse)
    for array in (out, lse):
        untouched = (array == 7).reshape(8, -1).all(axis=1)
        assert untouched.tolist() == [True] + 5 * [False] + 2 * [True]


# --- dtypes and shapes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "need"),
    [
        ("q", np.zeros((8, 16, 576), np.float32), "bfloat16 or float16, got float32"),
        ("kv_cache", np.zeros((6, 64, 1, 576), np.float16), "q's dtype bfloat16, got float16"),
        ("block_table", np.zeros((2, 3), np.int64), "int32, got int64"),
        ("qo_indptr", np.zeros(3, np.int64), "int32, got int64"),
        ("kv_lens", np.zeros(2, np.uint32), "int32, got uint32"),
        ("out", np.zeros((8, 16, 512), np.float16), "bfloat16 or float32, got float16"),
        ("lse", np.zeros((8, 16), np.float64), "float32, got float64"),
    ],
)
def test_dtypes(name: str, value: Any, need: str) -> None:
    refuse(TypeError, f"{name}: needs {need}; ", **{name: value})


@pytest.mark.parametrize("name", ["kv_indptr", "kv_indices"])
def test_dtypes_of_a_list(name: str) -> None:
    refuse(TypeError, f"{name}: needs int32, got int64", to=make_listed, **{name: np.zeros(3, int)})


@pytest.mark.parametrize(
    ("name", "shape", "fragments"),
    [
        ("q", (8, 576), ("3 axes (total_tokens, num_heads, 576)", "(8, 576)", "; reshape it")),
        ("q", (1, 8, 16, 576), ("3 axes (total_tokens, num_heads, 576)", "; reshape it")),
        ("q", (8, 16, 512), ("a last axis of 576", "(8, 16, 512)", "; pass a tuple")),
        ("q", (0, 16, 576), ("at least one element", "(0, 16, 576)", "; skip")),
        ("q", (8, 0, 576), ("at least one element", "(8, 0, 576)", "; skip")),
        ("kv_cache", (64, 576), ("(num_pages, page_size, num_kv_heads, 576)", "(64, 576)")),
        ("kv_cache", (6, 0, 1, 576), ("at least one element", "(6, 0, 1, 576)")),
        ("block_table", (3, 3), ("(batch, max_pages) with batch 2", "(3, 3)")),
        ("block_table", (6,), ("(batch, max_pages) with batch 2", "(6,)")),
        ("qo_indptr", (1,), ("(batch + 1,) with batch 1 at least", "(1,)", "; give")),
        ("qo_indptr", (3, 1), ("(batch + 1,)", "(3, 1)", "; give")),
        ("kv_lens", (3,), ("(batch,) with batch 2", "(3,)", "; give")),
        ("kv_lens", (2, 1), ("(batch,) with batch 2", "(2, 1)", "; give")),
    ],
)
def test_shapes(name: str, shape: tuple[int, ...], fragments: tuple[str, ...]) -> None:
    array = np.zeros(shape, BF16 if name in ("q", "kv_cache") else np.int32)
    refuse(ValueError, f"{name}: needs", *fragments, **{name: array})


@pytest.mark.parametrize(
    ("name", "shape", "fragments"),
    [
        ("kv_indptr", (2,), ("(batch + 1,) with batch 2", "(2,)", "; give")),
        ("kv_indptr", (), ("(batch + 1,) with batch 2", "()", "; give")),
        ("kv_indices", (2, 2), ("(pages,)", "(2, 2)", "; pass a table as block_table")),
    ],
)
def test_shapes_of_a_list(name: str, shape: tuple[int, ...], fragments: tuple[str, ...]) -> None:
    array = np.zeros(shape, np.int32)
    refuse(ValueError, f"{name}: needs shape", *fragments, to=make_listed, **{name: array})


@pytest.mark.parametrize(
    ("name", "shape", "need"),
    [
        ("out", (1, 8, 16, 512), "(8, 16, 512)"),
        ("out", (6, 16, 512), "(8, 16, 512)"),
        ("lse", (16, 8), "(8, 16)"),
    ],
)
def test_shapes_of_outputs(name: str, shape: tuple[int, ...], need: str) -> None:
    array = np.zeros(shape, BF16 if name == "out" else np.float32)
    refuse(ValueError, f"{name}: needs shape {need}, got {shape}; allocate", **{name: array})


def test_kv_heads_divide_the_heads() -> None:
    kv_cache = np.zeros((6, 64, 3, 576), BF16)
    refuse(ValueError, "num_heads: ", "multiple of num_kv_heads", "16", "3", kv_cache=kv_cache)


# --- pages in one form ----------------------------------------------------------------------------

TABLE, INDPTR, INDICES = (
    make_listed(**make())[n] for n in ("block_table", "kv_indptr", "kv_indices")
)


@pytest.mark.parametrize(
    ("table", "indptr", "indices", "wrong", "got"),
    [
        (None, None, None, "block_table", "neither"),
        (TABLE, INDPTR, INDICES, "kv_indices", "block_table and kv_indptr and kv_indices"),
        (TABLE, INDPTR, None, "kv_indptr", "block_table and kv_indptr"),
        (TABLE, None, INDICES, "kv_indices", "block_table and kv_indices"),
        (None, INDPTR, None, "kv_indptr", "kv_indptr"),
        (None, None, INDICES, "kv_indices", "kv_indices"),
    ],
)
def test_pages_come_in_one_form(
    table: Any, indptr: Any, indices: Any, wrong: str, got: str
) -> None:
    refuse(
        ValueError,
        f"{wrong}: pages need to come as block_table, or as kv_indptr and kv_indices, got {got}; ",
        "pass one form",
        block_table=table,
        kv_indptr=indptr,
        kv_indices=indices,
    )


# --- memory layout --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape"),
    [("q", (8, 16, 576)), ("kv_cache", (6, 64, 1, 576)), ("out", (8, 16, 512))],
)
def test_layouts(name: str, shape: tuple[int, ...]) -> None:
    every_other = np.zeros((*shape[:-1], 2 * shape[-1]), BF16)[..., ::2]
    refuse(ValueError, f"{name}: needs a contiguous last axis", "; make", **{name: every_other})
    padded = np.zeros((*shape[:-1], shape[-1] + 1), BF16)[..., :-1]
    refuse(ValueError, f"{name}: needs strides that are multiples of 16", **{name: padded})
    memory = np.zeros(2 * int(np.prod(shape)) + 32, np.uint8)
    start = -memory.ctypes.data % 16 + 8
    shifted = memory[start : start + 2 * int(np.prod(shape))].view(BF16).reshape(shape)
    refuse(ValueError, f"{name}: needs an address", "16 bytes", "; copy", **{name: shifted})


def test_layouts_of_integers() -> None:
    table = np.zeros((2, 6), np.int32)[:, ::2]
    refuse(ValueError, "block_table: needs contiguous rows", "8 bytes", block_table=table)
    table = np.zeros((2, 3), np.int32)[::-1]
    refuse(ValueError, "block_table: needs rows in the order of", "-12 bytes", block_table=table)
    indices = np.zeros(8, np.int32)[::2]
    refuse(
        ValueError,
        "kv_indices: needs a contiguous array, got a stride of 8 bytes; make a contiguous copy",
        to=make_listed,
        kv_indices=indices,
    )
    for name, size in (("qo_indptr", 3), ("kv_lens", 2), ("kv_indptr", 3), ("kv_indices", 4)):
        unaligned = np.zeros(4 * size + 1, np.uint8)[1:].view("<i4")
        message = f"{name}: needs an address and strides that are multiples of 4 bytes"
        refuse(ValueError, message, "; copy", to=make_listed, **{name: unaligned})
    spread = np.zeros(6, np.int32)
    spread[::2] = make()["qo_indptr"]
    expected = cumla.mla_attention(**make())
    got = cumla.mla_attention(**make(qo_indptr=spread[::2]))
    np.testing.assert_array_equal(got.out[1:6], expected.out[1:6])


@pytest.mark.parametrize(
    ("name", "row"), [("out", np.zeros(512, BF16)), ("lse", np.zeros(16, np.float32))]
)
def test_outputs_have_memory_for_every_element(name: str, row: Any) -> None:
    shape = {"out": (8, 16, 512), "lse": (8, 16)}[name]
    array = np.broadcast_to(row, shape).view()
    array = np.lib.stride_tricks.as_strided(row, shape, (*[0] * (len(shape) - 1), row.itemsize))
    refuse(ValueError, f"{name}: needs memory of its own", "; copy it", **{name: array})


def split(array: Any) -> tuple[Any, Any]:
    return array[..., :512], array[..., 512:]


def test_pairs_are_the_same_call() -> None:
    arguments = make()
    expected = cumla.mla_attention(**arguments)
    q, kv_cache = arguments["q"], arguments["kv_cache"]
    copies = tuple(np.ascontiguousarray(part) for part in split(kv_cache))
    for pair in (
        {"q": split(q)},
        {"kv_cache": split(kv_cache)},
        {"q": split(q), "kv_cache": copies},
        {"kv_cache": tuple(part[:, :, 0] for part in copies)},
    ):
        for plan in (None, plan_of(arguments | pair)):
            got = cumla.mla_attention(**arguments | pair, plan=plan)
            np.testing.assert_array_equal(got.out[1:6], expected.out[1:6])
            np.testing.assert_array_equal(got.lse[1:6], expected.lse[1:6])


@pytest.mark.parametrize("name", ["q", "kv_cache"])
def test_parts_of_a_pair(name: str) -> None:
    latent, rope = split(make()[name])
    message = ("needs one array, or a tuple of latent and RoPE columns", "got 1 arrays")
    refuse(ValueError, f"{name}: ", *message, **{name: (latent,)})
    refuse(ValueError, f"{name}[1]: ", "64", "; a pair", **{name: (latent, latent)})
    first = f"{name}[1]: needs the first axes of {name}[0], {latent.shape[:-1]}, got "
    refuse(ValueError, first, "; pass both parts", **{name: (latent, rope[:1])})
    half = rope.astype(np.float16)
    refuse(TypeError, f"{name}[1]: ", "bfloat16", "got float16", **{name: (latent, half)})
    refuse(TypeError, f"{name}[1]: ", "an array of CuPy", **{name: (latent, None)})


def test_nothing_is_written_by_a_call_that_fails() -> None:
    out, lse = np.full((8, 16, 512), 7, BF16), np.full((8, 2), 7, np.float32)
    refuse(ValueError, "lse: ", out=out, lse=lse)
    refuse(ValueError, "plan: ", out=out, plan=plan_of(make(), updated=False))
    assert (out == 7).all()
    assert (lse == 7).all()


# --- other arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [[[1, 2]], "text", 3])
@pytest.mark.parametrize(
    "name", ["q", "kv_cache", "qo_indptr", "kv_lens", "kv_indptr", "kv_indices", "out"]
)
def test_things_that_are_no_arrays(name: str, value: object) -> None:
    kind = f"builtins.{type(value).__name__}"
    refuse(TypeError, f"{name}: ", "needs an array", kind, to=make_listed, **{name: value})


@pytest.mark.parametrize("name", ["q", "kv_cache", "qo_indptr", "kv_lens"])
def test_arrays_that_are_not_there(name: str) -> None:
    refuse(TypeError, f"{name}: ", "an array of CuPy", "builtins.NoneType", **{name: None})


@pytest.mark.parametrize(
    ("scale", "error"), [("1", TypeError), (0.0, ValueError), (float("nan"), ValueError)]
)
def test_softmax_scale(scale: Any, error: type[Exception]) -> None:
    refuse(error, "softmax_scale: needs", softmax_scale=scale)
    with pytest.raises(error, match=r"^softmax_scale: needs"):
        plan_of(make()).run(**inputs_of(make()), softmax_scale=scale)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_other_frameworks_on_the_cpu(framework: str) -> None:
    """Their own arrays come back, from a call and from a plan."""
    if framework == "torch":
        torch = pytest.importorskip("torch")
        kind: type = torch.Tensor

        def convert(array: Any) -> Any:
            if array.dtype == BF16:
                return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
            return torch.from_numpy(array)

    else:
        jax = pytest.importorskip("jax")
        kind, convert = jax.Array, jax.numpy.asarray
    for arguments in (make(), make_listed()):
        expected = cumla.mla_attention(**arguments)
        given = {name: convert(array) for name, array in arguments.items()}
        for plan in (None, plan_of(given)):
            out, lse = cumla.mla_attention(**given, plan=plan)
            assert isinstance(out, kind)
            assert str(out.dtype).endswith("bfloat16")
            got = np.asarray(out[1:6].float() if framework == "torch" else out[1:6])
            np.testing.assert_array_equal(
                got.astype(np.float32), expected.out[1:6].astype(np.float32)
            )
            np.testing.assert_array_equal(np.asarray(lse)[1:6], expected.lse[1:6])


def test_jax_outputs_are_refused() -> None:
    jnp = pytest.importorskip("jax").numpy
    given = {name: jnp.asarray(array) for name, array in make().items()}
    refuse(TypeError, "out: JAX arrays are immutable", **given, out=jnp.zeros((8, 16, 512)))
    refuse(TypeError, "lse: JAX arrays are immutable", **given, lse=jnp.zeros((8, 16)))


# --- plans ----------------------------------------------------------------------------------------


def plan_of(
    arguments: dict[str, Any], *, updated: bool = True, **options: Any
) -> cumla.MLAAttentionPlan:
    plan = cumla.MLAAttentionPlan.from_arrays(
        arguments["q"], arguments["kv_cache"], arguments["qo_indptr"], **options
    )
    if updated:
        plan.update(**lengths_of(arguments))
    return plan


def lengths_of(arguments: dict[str, Any]) -> dict[str, Any]:
    return {n: arguments[n] for n in ("qo_indptr", "kv_lens", "kv_indptr") if n in arguments}


def inputs_of(arguments: dict[str, Any]) -> dict[str, Any]:
    names = ("q", "kv_cache", "block_table", "kv_indices")
    return {n: arguments[n] for n in names if n in arguments}


@pytest.mark.parametrize("to", [make, make_listed])
def test_a_plan_gives_what_a_call_gives(to: Callable[..., dict[str, Any]]) -> None:
    """With the lengths of its update, whatever the arrays hold later."""
    arguments = to()
    expected = cumla.mla_attention(**arguments)
    plan = plan_of(arguments)
    for array in lengths_of(arguments).values():
        array[...] = 0
    for got in (plan.run(**inputs_of(arguments)), cumla.mla_attention(**arguments, plan=plan)):
        np.testing.assert_array_equal(got.out[1:6], expected.out[1:6])
        np.testing.assert_array_equal(got.lse[1:6], expected.lse[1:6])


def test_a_plan_is_a_plan() -> None:
    refuse(TypeError, "plan: needs a cumla.MLAAttentionPlan, got dict", plan={})


@pytest.mark.parametrize(
    "changes",
    [
        {"q": np.zeros((7, 16, 576), BF16)},
        {"q": np.zeros((8, 32, 576), BF16)},
        {"kv_cache": np.zeros((6, 64, 2, 576), BF16)},
        {"kv_cache": np.zeros((6, 32, 1, 576), BF16)},
        {"q": np.zeros((8, 16, 576), "f2"), "kv_cache": np.zeros((6, 64, 1, 576), "f2")},
    ],
)
def test_a_plan_of_another_shape(changes: dict[str, Any]) -> None:
    message = ("plan: made for (total_tokens, num_heads, ", "got (", "; make a plan for this shape")
    refuse(ValueError, *message, plan=plan_of(make()), **changes)


@pytest.mark.parametrize(("name", "size"), [("qo_indptr", 4), ("kv_lens", 3), ("kv_indptr", 2)])
def test_a_plan_of_another_batch(name: str, size: int) -> None:
    plan = plan_of(make_listed())
    array = np.zeros(size, np.int32)
    message = rf"^{name}: needs shape .* with batch 2, got \({size},\); give"
    with pytest.raises(ValueError, match=message):
        plan.update(**lengths_of(make_listed(**{name: array})))
    with pytest.raises(ValueError, match=message):
        cumla.mla_attention(**make_listed(**{name: array}), plan=plan)


def test_a_plan_of_the_other_mask() -> None:
    plan = plan_of(make(), causal=False)
    refuse(ValueError, "plan: made with causal=False, got causal=True; make a plan", plan=plan)


def test_a_plan_that_was_never_updated() -> None:
    plan = plan_of(make(), updated=False)
    message = "plan: never updated; call plan.update(qo_indptr, kv_lens) before the first run"
    for to in (make, make_listed):
        refuse(ValueError, message, to=to, plan=plan)


def test_a_plan_that_was_updated_for_the_other_form() -> None:
    """It says what to pass, or how to update; and an update of the other kind is enough."""
    plan = plan_of(make())
    listed = (
        "kv_indices: needs a plan that was updated with kv_indptr, got one updated without it; "
        "pass block_table, or call plan.update(qo_indptr, kv_lens, kv_indptr)"
    )
    table = (
        "block_table: needs a plan that was updated without kv_indptr, got one updated with it; "
        "pass kv_indices, or call plan.update(qo_indptr, kv_lens)"
    )
    with pytest.raises(ValueError) as caught:
        plan.run(**inputs_of(make_listed()))
    assert str(caught.value) == listed
    refuse(ValueError, listed, to=make_listed, plan=plan)
    plan.update(**lengths_of(make_listed()))
    plan.run(**inputs_of(make_listed()))
    with pytest.raises(ValueError) as caught:
        plan.run(**inputs_of(make()))
    assert str(caught.value) == table
    refuse(ValueError, table, plan=plan)


@pytest.mark.parametrize("both", [True, False])
def test_a_run_takes_pages_in_one_form(both: bool) -> None:
    plan = plan_of(make())
    pages = {"block_table": TABLE, "kv_indices": INDICES} if both else {}
    got = "both" if both else "neither"
    message = f"^block_table: needs pages as block_table, or as kv_indices .*, got {got}; pass one"
    with pytest.raises(ValueError, match=message):
        plan.run(make()["q"], make()["kv_cache"], **pages)


@pytest.mark.parametrize("name", ["batch", "total_tokens", "num_heads", "num_kv_heads"])
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
    numbers: dict[str, Any] = {"batch": 2, "total_tokens": 8, "num_heads": 16, name: value}
    with pytest.raises(error, match=f"^{name}: needs {need}$"):
        cumla.MLAAttentionPlan(**numbers, like=make()["q"])
    with pytest.raises(error, match=f"^{name}: needs {need}$"):
        cumla.MLAAttentionPlan.workspace_bytes(**numbers, sm_count=132)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "^num_heads: .*16 query heads and 3 kv heads"),
        ({"page_size": 0}, "^page_size: needs a number from 1, got 0"),
        ({"dtype": "float32"}, "^dtype: needs bfloat16 or float16, got float32"),
        ({"device": 0}, "^like: .*CUDA device 0"),
        ({"total_tokens": 1 << 34}, f"^total_tokens: needs fewer .*, got {1 << 34}; cut the call"),
    ],
)
def test_other_arguments_of_a_plan(changes: dict[str, Any], message: str) -> None:
    shape = {"batch": 2, "total_tokens": 8, "num_heads": 16}
    with pytest.raises((ValueError, TypeError), match=message):
        cumla.MLAAttentionPlan(**shape | {"like": make()["q"]} | changes)


def test_arrays_of_a_plan() -> None:
    q, kv_cache, indptr = (make()[name] for name in ("q", "kv_cache", "qo_indptr"))
    plan = cumla.MLAAttentionPlan.from_arrays(split(q), split(kv_cache), indptr, causal=False)
    key = plan.key
    assert (key.batch, key.total_tokens, key.num_heads, key.num_kv_heads) == (2, 8, 16, 1)
    assert (key.page_size, key.dtype, key.causal, key.device) == (64, "bfloat16", False, None)
    with pytest.raises(ValueError, match=r"^q: needs 3 axes"):
        cumla.MLAAttentionPlan.from_arrays(q[None], kv_cache, indptr)
    with pytest.raises(ValueError, match=r"^qo_indptr: needs shape \(batch \+ 1,\)"):
        cumla.MLAAttentionPlan.from_arrays(q, kv_cache, indptr[:1])


# --- check mode -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("qo_indptr", [-1, 4, 6], "[0]: needs a number from 0 to total_tokens = 8, got -1"),
        ("qo_indptr", [1, 4, 9], "[2]: needs a number from qo_indptr[1] = 4 to total_tokens = 8"),
        ("qo_indptr", [5, 4, 3], "[1]: needs a number from qo_indptr[0] = 5 to total_tokens = 8"),
        ("kv_lens", [5, -1], "[1]: needs a length from 0 to 192, what the request's pages"),
        ("kv_lens", [65, 130], "[0]: needs a length from 0 to 64, what the request's pages"),
        ("kv_lens", [5, 2**31 - 1], "[1]: needs a length from 0 to 192, what the request's pages"),
        ("kv_indptr", [-1, 1, 4], "[0]: needs a number from 0 to the largest int32"),
        ("kv_indptr", [0, 5, 4], "[2]: needs a number from kv_indptr[1] = 5"),
        ("kv_indices", [0, 3, 4], ": needs kv_indptr[-1] = 4 pages, got 3; pass the whole list"),
        ("kv_indices", [6, 3, 4, 5], "[0]: needs a page number from 0 to 5, got 6; the kernels"),
        ("kv_indices", [0, 3, 4, -1], "[3]: needs a page number from 0 to 5, got -1; the kernels"),
    ],
)
def test_check_mode_of_lists(
    name: str, value: list[int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a call, and by the update or the run of a plan; without it nothing is said."""
    changed = make_listed(**{name: np.array(value, np.int32)})
    cumla.mla_attention(**changed)
    monkeypatch.setenv("CUMLA_CHECK", "1")
    cumla.mla_attention(**make_listed())
    refuse(ValueError, f"{name}{message}", to=make_listed, **{name: changed[name]})
    with pytest.raises(ValueError) as caught:
        plan_of(changed).run(**inputs_of(changed))
    assert str(caught.value).startswith(f"{name}{message}")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("kv_lens", [5, 193], "[1]: needs a length from 0 to 192"),
        ("kv_lens", [-5, 0], "[0]: needs a length from 0 to"),
        ("block_table", [[0, -1, -1], [3, 4, 6]], "[1, 2]: needs a page number from 0 to 5, got 6"),
        ("block_table", [[-7, 1, 2], [3, 4, 5]], "[0, 0]: needs a page number from 0 to 5, got -7"),
    ],
)
def test_check_mode_of_tables(
    name: str, value: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    changed = make(**{name: np.array(value, np.int32)})
    refuse(ValueError, f"{name}{message}", **{name: changed[name]})
    with pytest.raises(ValueError) as caught:
        plan_of(changed).run(**inputs_of(changed))
    assert str(caught.value).startswith(f"{name}{message}")


def test_check_mode_lets_through_what_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    table = np.array([[0, -1, 2147480000], [3, 4, 5]], np.int32)
    cumla.mla_attention(**make(block_table=table))
    cumla.mla_attention(**make(kv_lens=np.array([0, 0], np.int32), block_table=-table))
    indices = np.array([-9, 0, 3, 4, 5, 2147480000], np.int32)
    indptr = np.array([1, 2, 5], np.int32)
    cumla.mla_attention(**make_listed(kv_indptr=indptr, kv_indices=indices))


@pytest.mark.parametrize("name", ["qo_indptr", "kv_lens"])
def test_check_mode_finds_a_forgotten_update(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(make())
    changed = make()
    changed[name][1] -= 1
    cumla.mla_attention(**changed, plan=plan)
    monkeypatch.setenv("CUMLA_CHECK", "1")
    message = (f"{name}[1]: needs what the plan was updated with, ", "; call plan.update after")
    refuse(ValueError, *message, **{name: changed[name]}, plan=plan)


# --- GPU arrays -----------------------------------------------------------------------------------


def on(cupy: FakeCuPy, arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: cupy.like(array) for name, array in arguments.items()}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels that would be launched; none is loaded."""
    names: list[str] = []
    monkeypatch.setattr(mla_call, "load", lambda spec, device, *, capturing: spec)

    def prepare(spec: KernelSpec, *_: object, **__: object) -> Callable[[], None]:
        return lambda: names.append(spec.entry)

    monkeypatch.setattr(ragged, "prepare_ragged_schedule", prepare)
    monkeypatch.setattr(ragged, "prepare_attention", prepare)
    return names


KERNELS = ["mla_attention_schedule", "mla_attention_bfloat16"]


def test_the_fake_gpu_is_called(cupy: FakeCuPy, launched: list[str]) -> None:
    for arguments in (make(), make_listed()):
        given = on(cupy, arguments)
        cumla.mla_attention(**given)
        plan = plan_of(given)
        plan.run(**inputs_of(given))
        cumla.mla_attention(**given, plan=plan)
        assert launched == KERNELS + KERNELS + KERNELS[1:]
        launched.clear()


@pytest.mark.parametrize(
    ("page_size", "split_cache", "entry"),
    [(1, False, "_rows"), (16, False, "_boxes"), (128, False, ""), (64, True, "_boxes")],
)
def test_the_pages_choose_the_kernel(
    cupy: FakeCuPy, launched: list[str], page_size: int, split_cache: bool, entry: str
) -> None:
    given = on(cupy, make(kv_cache=np.zeros((6, page_size, 1, 576), BF16)))
    if split_cache:
        shape = (6, page_size, 1)
        given["kv_cache"] = cupy.ndarray((*shape, 512), BF16), cupy.ndarray((*shape, 64), BF16)
    cumla.mla_attention(**given)
    assert launched == [KERNELS[0], f"{KERNELS[1]}{entry}"]


@pytest.mark.parametrize("name", ["kv_cache", "qo_indptr", "kv_lens", "block_table"])
def test_cpu_and_gpu_mixed(cupy: FakeCuPy, launched: list[str], name: str) -> None:
    given = on(cupy, make())
    refuse(ValueError, f"{name}: ", "on the CPU", "; copy", **given | {name: make()[name]})
    refuse(ValueError, f"{name}: ", "CUDA device 0", **{name: given[name]})
    assert launched == []


def test_a_plan_of_another_place(cupy: FakeCuPy, launched: list[str]) -> None:
    given = on(cupy, make())
    plan = plan_of(given)
    elsewhere = {name: cupy.like(array, device=1) for name, array in given.items()}
    for others, place in ((elsewhere, "CUDA device 1"), (make(), "the CPU")):
        message = f"plan: made for CUDA device 0, got arrays on {place}; make a plan for each"
        refuse(ValueError, message, **others, plan=plan)
        with pytest.raises(ValueError) as caught:
            plan.run(**inputs_of(others))
        assert str(caught.value).startswith(message)


def test_a_plan_on_another_stream(cupy: FakeCuPy, launched: list[str]) -> None:
    given = on(cupy, make())
    plan = plan_of(given)
    with pytest.raises(ValueError, match=r"^plan: updated on stream 0x0, got a run on stream 0x5"):
        plan.run(**inputs_of(given), stream=5)
    plan.update(**lengths_of(given), stream=5)
    plan.run(**inputs_of(given), stream=5)
    with pytest.raises(ValueError, match=r"^plan: updated on stream 0x5, got a run on stream 0x0"):
        plan.run(**inputs_of(given))


@pytest.mark.parametrize(
    ("shape", "dtype", "shift", "message"),
    [
        ((1 << 30,), "int8", 0, "^workspace: .*uint8.*got int8"),
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
        cumla.MLAAttentionPlan(2, 8, 16, workspace=workspace)


def test_unsupported_gpus(cupy: FakeCuPy) -> None:
    cupy.capability = (10, 0)
    given = on(cupy, make())
    refuse(cumla.UnsupportedDeviceError, "device 0 is", "compute capability 9.0", **given)
    with pytest.raises(cumla.UnsupportedDeviceError, match="NVIDIA Imaginary"):
        cumla.MLAAttentionPlan(2, 8, 16)


@pytest.mark.parametrize("cold", KERNELS)
def test_a_cold_kernel_under_capture(
    cupy: FakeCuPy, driver: FakeDriver, launched: list[str], cold: str
) -> None:
    """Named before the other is launched."""
    given = on(cupy, make())
    plan = plan_of(given, updated=False)
    for spec in all_specs():
        if spec.entry != cold:
            launch_module._loaded[spec, 0] = launch_module.LoadedKernel(1, spec, 0, None)
    driver.capturing.add(0)
    message = f"kernel {cold} is not loaded on device 0"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mla_call, "load", launch_module.load)
        refuse(cumla.NotPreparedError, message, "call cumla.prepare()", **given)
        with pytest.raises(cumla.NotPreparedError, match=f"^{message}"):
            plan.update(**lengths_of(given))
    assert launched == []


def test_cupy_allocations_under_capture(
    cupy: FakeCuPy, driver: FakeDriver, launched: list[str]
) -> None:
    given = on(cupy, make())
    driver.capturing.add(0)
    message = ("the stream is being captured", "CuPy", "out=, lse= and plan=")
    refuse(cumla.NotPreparedError, *message, **given)
    assert launched == []
