# SPDX-License-Identifier: Apache-2.0
"""`cumla.append_mla_cache` away from a GPU: what it refuses and says, frameworks, what it launches.

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
from cumla.core import arrays
from cumla.launch.kernel import ReadyLaunches
from cumla.launch.mla import append_cache
from cumla.launch.mla.append_cache import AppendArguments
from cumla.launch.source import KernelSpec
from cumla.mla import cache, cache_checks
from tests.fake_cuda import FakeCuPy, FakeDriver

BF16 = np.dtype(ml_dtypes.bfloat16)


def aligned(shape: tuple[int, ...], dtype: Any = BF16, shift: int = 0) -> Any:
    """Zeros at `shift` bytes behind a multiple of 64."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(nbytes + 128, np.uint8)
    begin = -memory.ctypes.data % 64 + shift
    return memory[begin : begin + nbytes].view(dtype).reshape(shape)


def make(**changes: Any) -> dict[str, Any]:
    """Arguments of a call that works, with changes; None takes one away."""
    arguments = {
        "rows": aligned((5, 576)),
        "kv_cache": aligned((6, 16, 576)),
        "slot_mapping": np.array([3, -1, 95, 17, 0], np.int32),
    }
    changed = arguments | changes
    return {name: array for name, array in changed.items() if array is not None}


def by_request(**changes: Any) -> dict[str, Any]:
    """The same by requests and positions."""
    return make(
        slot_mapping=None,
        **{
            "batch_indices": np.array([0, 0, 1, 1, -1], np.int32),
            "positions": np.array([0, 20, 31, 1, 0], np.int64),
            "block_table": np.array([[0, 1], [5, 2]], np.int32),
        }
        | changes,
    )


def rotating(**changes: Any) -> dict[str, Any]:
    """The same with a rotation of rows and queries."""
    return make(
        **{
            "positions": np.arange(5),
            "cos_sin": aligned((9, 64), np.float32),
            "q_pe": aligned((5, 3, 64)),
        }
        | changes
    )


def refuse(error: type[Exception], *fragments: str, **arguments: Any) -> None:
    """The call fails; its message begins with the first fragment and has the others in turn."""
    with pytest.raises(error) as caught:
        cumla.append_mla_cache(**arguments)
    message, end = str(caught.value), 0
    assert message.startswith(fragments[0]), message
    for fragment in fragments:
        assert fragment in message[end:], message
        end = message.index(fragment, end) + len(fragment)


@pytest.mark.parametrize("arguments", [make(), by_request(), rotating()])
def test_the_unchanged_arguments_work(arguments: dict[str, Any]) -> None:
    assert cumla.append_mla_cache(**arguments) is None


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8"])
def test_dtype_of_the_cache(dtype: str) -> None:
    kv_cache = aligned((6, 16, 576), dtype)
    refuse(
        TypeError, "kv_cache: ", "bfloat16 or float16", f"got {dtype}", **make(kv_cache=kv_cache)
    )


def test_dtypes_of_a_split_cache_agree() -> None:
    kv_cache = (aligned((6, 16, 512)), aligned((6, 16, 64), np.float16))
    refuse(TypeError, "kv_cache[1]: ", "bfloat16", "got float16", **make(kv_cache=kv_cache))


@pytest.mark.parametrize("dtype", ["float16", "float64", "int16"])
def test_dtype_of_rows(dtype: str) -> None:
    rows = aligned((5, 576), dtype)
    refuse(TypeError, "rows: ", "bfloat16, or float32", f"got {dtype}", **make(rows=rows))


def test_dtypes_of_split_rows_agree() -> None:
    rows = (aligned((5, 512)), aligned((5, 64), np.float32))
    refuse(TypeError, "rows[1]: ", "bfloat16", "got float32", "; convert", **make(rows=rows))


@pytest.mark.parametrize("name", ["slot_mapping", "batch_indices", "positions"])
@pytest.mark.parametrize("dtype", ["uint32", "int16", "float32"])
def test_dtype_of_indices(name: str, dtype: str) -> None:
    arguments = make() if name == "slot_mapping" else by_request()
    changed = arguments | {name: np.zeros(5, dtype)}
    refuse(TypeError, f"{name}: needs int32 or int64, got {dtype}; convert", **changed)


@pytest.mark.parametrize("name", ["block_table", "kv_indices", "kv_indptr"])
def test_page_numbers_are_int32(name: str) -> None:
    pages = {"kv_indices": np.zeros(4, np.int32), "kv_indptr": np.zeros(3, np.int32)}
    arguments = by_request() if name == "block_table" else by_request(block_table=None, **pages)
    changed = arguments | {name: arguments[name].astype(np.int64)}
    refuse(TypeError, f"{name}: needs int32, got int64; convert", **changed)


def test_dtype_of_cos_sin() -> None:
    cos_sin = aligned((9, 64), np.float16)
    refuse(
        TypeError, "cos_sin: ", "float32", "bfloat16", "got float16", **rotating(cos_sin=cos_sin)
    )


def test_dtype_of_q_pe() -> None:
    q_pe = aligned((5, 3, 64), np.float32)
    refuse(TypeError, "q_pe: ", "bfloat16", "got float32", **rotating(q_pe=q_pe))


def test_dtype_of_q_pe_out() -> None:
    out = aligned((5, 3, 64), np.float32)
    refuse(TypeError, "q_pe_out: needs bfloat16, got float32", **rotating(q_pe_out=out))


# --- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(96, 576), (1, 6, 16, 1, 576)])
def test_rank_of_the_cache(shape: tuple[int, ...]) -> None:
    axes = "(num_pages, page_size, num_kv_heads, 576)"
    refuse(ValueError, "kv_cache: ", axes, f"{shape}", **make(kv_cache=aligned(shape)))


@pytest.mark.parametrize("shape", [(576,), (5, 1, 1, 576)])
def test_rank_of_rows(shape: tuple[int, ...]) -> None:
    axes = "(tokens, num_kv_heads, 576)"
    refuse(ValueError, "rows: ", axes, f"{shape}", **make(rows=aligned(shape)))


@pytest.mark.parametrize("columns", [512, 640])
@pytest.mark.parametrize(("name", "lead"), [("rows", (5,)), ("kv_cache", (6, 16))])
def test_columns(name: str, lead: tuple[int, ...], columns: int) -> None:
    array = aligned((*lead, columns))
    refuse(ValueError, f"{name}: ", "576", "pair", f"{array.shape}", **make(**{name: array}))
    refuse(ValueError, f"{name}: ", "576", "got shape ()", **make(**{name: np.zeros((), BF16)}))


@pytest.mark.parametrize(("name", "lead"), [("rows", (5,)), ("kv_cache", (6, 16))])
def test_columns_of_a_pair(name: str, lead: tuple[int, ...]) -> None:
    latent, rope = aligned((*lead, 512)), aligned((*lead, 64))
    refuse(ValueError, f"{name}[0]: ", "512", f"{rope.shape}", **make(**{name: (rope, latent)}))
    refuse(ValueError, f"{name}[1]: ", "64", f"{latent.shape}", **make(**{name: (latent, latent)}))
    refuse(ValueError, f"{name}: ", "a pair", "got 4", **make(**{name: (latent, rope) * 2}))


@pytest.mark.parametrize(
    ("name", "lead", "other"),
    [("rows", (5,), (4,)), ("kv_cache", (6, 16), (6, 15)), ("kv_cache", (6, 16), (6, 16, 2))],
)
def test_parts_of_a_pair_fit(name: str, lead: tuple[int, ...], other: tuple[int, ...]) -> None:
    pair = (aligned((*lead, 512)), aligned((*other, 64)))
    refuse(ValueError, f"{name}[1]: ", f"the axes of {name}[0]", **make(**{name: pair}))


@pytest.mark.parametrize("shape", [(0, 16, 576), (6, 0, 576), (6, 16, 0, 576)])
def test_empty_caches(shape: tuple[int, ...]) -> None:
    kv_cache = aligned(shape)
    refuse(
        ValueError, "kv_cache: ", "at least one", f"{shape[:2]}"[1:-1], **make(kv_cache=kv_cache)
    )


def test_kv_heads() -> None:
    rows = aligned((5, 2, 576))
    refuse(ValueError, "rows: ", "the 1 kv heads", "(5, 2, 576)", **make(rows=rows))
    kv_cache = aligned((6, 16, 2, 576))
    refuse(ValueError, "rows: ", "the 2 kv heads", "(5, 576)", **make(kv_cache=kv_cache))
    cumla.append_mla_cache(**make(kv_cache=kv_cache, rows=rows))


@pytest.mark.parametrize("shape", [(4,), (5, 1), ()])
@pytest.mark.parametrize("name", ["slot_mapping", "batch_indices", "positions"])
def test_shape_of_indices(name: str, shape: tuple[int, ...]) -> None:
    arguments = make() if name == "slot_mapping" else by_request()
    changed = arguments | {name: np.zeros(shape, np.int32)}
    refuse(ValueError, f"{name}: ", "(tokens,) with 5 tokens", f"got {shape}", **changed)


@pytest.mark.parametrize(
    ("name", "shape", "axes"),
    [
        ("block_table", (4,), "(batch, max_pages)"),
        ("kv_indices", (2, 2), "(entries,)"),
        ("kv_indptr", (3, 1), "(batch + 1,)"),
        ("kv_indptr", (0,), "batch + 1 entries"),
    ],
)
def test_shape_of_page_numbers(name: str, shape: tuple[int, ...], axes: str) -> None:
    pages = {"kv_indices": np.zeros(4, np.int32), "kv_indptr": np.zeros(3, np.int32)}
    arguments = by_request() if name == "block_table" else by_request(block_table=None, **pages)
    changed = arguments | {name: np.zeros(shape, np.int32)}
    refuse(ValueError, f"{name}: needs", axes, **changed)


@pytest.mark.parametrize("shape", [(9, 32), (64,), (9, 2, 32)])
def test_shape_of_cos_sin(shape: tuple[int, ...]) -> None:
    changed = rotating(cos_sin=aligned(shape, np.float32))
    refuse(ValueError, "cos_sin: ", "(max_position, 64)", f"got {shape}", **changed)


@pytest.mark.parametrize("shape", [(5, 64), (4, 3, 64), (5, 3, 576)])
def test_shape_of_q_pe(shape: tuple[int, ...]) -> None:
    axes = "(tokens, num_heads, 64) with 5 tokens"
    refuse(ValueError, "q_pe: ", axes, f"got {shape}", **rotating(q_pe=aligned(shape)))


def test_shape_of_q_pe_out() -> None:
    changed = rotating(q_pe_out=aligned((5, 4, 64)))
    refuse(ValueError, "q_pe_out: needs shape (5, 3, 64), got (5, 4, 64)", **changed)


# --- arguments that go together -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["batch_indices", "block_table", "kv_indices", "kv_indptr"])
def test_slots_and_another_way(name: str) -> None:
    changed = make(**{name: np.zeros(5, np.int32)})
    refuse(ValueError, f"{name}: needs a call without slot_mapping", "; leave one", **changed)


@pytest.mark.parametrize("name", ["batch_indices", "positions"])
def test_no_way_at_all(name: str) -> None:
    changed = by_request()
    del changed[name]
    refuse(ValueError, f"{name}: needed where there is no slot_mapping", "; pass it", **changed)
    refuse(ValueError, "batch_indices: needed", **make(slot_mapping=None))


@pytest.mark.parametrize(
    "names", [(), ("kv_indices",), ("kv_indptr",), ("block_table", "kv_indptr")]
)
def test_page_numbers_in_one_form(names: tuple[str, ...]) -> None:
    changed = by_request()
    table = changed.pop("block_table")
    pages = {name: table if name == "block_table" else table[0] for name in names}
    got = " and ".join(names) or "none of them"
    refuse(ValueError, "block_table: needs either", f"got {got}; pass one", **changed, **pages)


@pytest.mark.parametrize(
    ("name", "needed"), [("positions", "cos_sin"), ("cos_sin", "q_pe"), ("q_pe", "q_pe_out")]
)
def test_what_a_rotation_needs(name: str, needed: str) -> None:
    changed = rotating(q_pe_out=aligned((5, 3, 64)))
    del changed[name]
    refuse(ValueError, f"{name}: needed with {needed}, got None; pass it", **changed)


def test_positions_for_nothing() -> None:
    changed = make(positions=np.arange(5))
    refuse(ValueError, "positions: needs batch_indices", "or cos_sin", "; leave it out", **changed)


# --- memory layout --------------------------------------------------------------------------------


LAYOUTS = pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("rows", (5, 576), BF16),
        ("rows", (5, 576), np.float32),
        ("kv_cache", (6, 16, 576), BF16),
        ("cos_sin", (9, 64), np.float32),
        ("cos_sin", (9, 64), BF16),
        ("q_pe", (5, 3, 64), BF16),
        ("q_pe_out", (5, 3, 64), BF16),
    ],
)


@LAYOUTS
def test_layouts(name: str, shape: tuple[int, ...], dtype: Any) -> None:
    """Address, strides and last axis; padding that keeps to 16 bytes is fine."""
    lead, columns = shape[:-1], shape[-1]
    every_other = aligned((*lead, 2 * columns), dtype)[..., ::2]
    refuse(ValueError, f"{name}: ", "contiguous last axis", **rotating(**{name: every_other}))
    narrow = aligned((*lead, columns + 1), dtype)[..., :-1]
    refuse(ValueError, f"{name}: ", "multiples of 16 bytes", **rotating(**{name: narrow}))
    shifted = aligned(shape, dtype, shift=8)
    refuse(ValueError, f"{name}: ", "a multiple of 16 bytes", **rotating(**{name: shifted}))
    backwards = aligned(shape, dtype)[::-1]
    refuse(ValueError, f"{name}: ", "not negative", **rotating(**{name: backwards}))
    padded = aligned((*lead, columns + 8), dtype)[..., :-8]
    cumla.append_mla_cache(**rotating(**{name: padded}))


@pytest.mark.parametrize("name", ["kv_cache", "q_pe", "q_pe_out"])
def test_what_is_written_has_memory_for_every_element(name: str) -> None:
    shape = {"kv_cache": (6, 16, 576)}.get(name, (5, 3, 64))
    row = aligned(shape[-1:])
    array = np.lib.stride_tricks.as_strided(row, shape, (*[0] * (len(shape) - 1), 2))
    refuse(ValueError, f"{name}: needs memory of its own", "; copy", **rotating(**{name: array}))


@pytest.mark.parametrize("name", ["kv_cache", "q_pe", "q_pe_out"])
def test_what_is_written_is_no_read_only_array(name: str) -> None:
    array = aligned((6, 16, 576) if name == "kv_cache" else (5, 3, 64))
    array.flags.writeable = False
    changed = rotating(**{name: array})
    refuse(ValueError, f"{name}: needs an array that can be written to, got a read-only", **changed)


def test_what_is_only_read_may_be_read_only_or_broadcast() -> None:
    changed = rotating(q_pe_out=aligned((5, 3, 64)))
    for name in ("rows", "slot_mapping", "positions", "cos_sin", "q_pe"):
        changed[name].flags.writeable = False
    cumla.append_mla_cache(**changed)
    row = np.broadcast_to(aligned((576,)), (5, 576))
    cumla.append_mla_cache(**make(rows=row))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_indices_are_aligned(dtype: Any) -> None:
    slots = aligned((5,), dtype, shift=2)
    itemsize = np.dtype(dtype).itemsize
    message = f"multiples of {itemsize} bytes"
    refuse(ValueError, "slot_mapping: ", message, "; copy", **make(slot_mapping=slots))


# --- check mode -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("slot_mapping", 2, 96, r"slot_mapping\[2\]: needs a slot up to 95, or below 0 .* got 96;"),
        ("batch_indices", 3, 2, r"batch_indices\[3\]: needs a request up to 1, .* got 2;"),
        ("positions", 1, 32, r"positions\[1\]: needs a position in the pages .* got 32;"),
        ("block_table", (1, 0), 6, r"block_table\[1, 0\]: .* from 0 to 5, got 6;"),
        ("block_table", (0, 1), -1, r"block_table\[0, 1\]: .* from 0 to 5, got -1;"),
        ("kv_indices", 3, 6, r"kv_indices\[3\]: .* from 0 to 5, got 6;"),
        ("kv_indptr", 2, 5, r"kv_indptr\[2\]: needs a number from 0 to 4, the entries, got 5;"),
    ],
)
def test_check_mode_names_the_first_bad_number(
    name: str, place: Any, value: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = make() if name == "slot_mapping" else by_request()
    if name in ("kv_indices", "kv_indptr"):
        del arguments["block_table"]
        arguments["kv_indices"] = np.array([0, 1, 5, 2], np.int32)
        arguments["kv_indptr"] = np.array([0, 2, 4], np.int32)
    monkeypatch.setenv("CUMLA_CHECK", "1")
    cumla.append_mla_cache(**arguments)
    arguments[name][place] = value
    with pytest.raises(ValueError, match=f"^{message} its rows would be skipped"):
        cumla.append_mla_cache(**arguments)
    monkeypatch.delenv("CUMLA_CHECK")
    cumla.append_mla_cache(**arguments)


def test_check_mode_leaves_alone_what_nobody_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    table = np.array([[0, 1, -1], [5, 2, 2147480000]], np.int32)
    cumla.append_mla_cache(**by_request(block_table=table))


def test_check_mode_looks_at_the_rotations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    changed = rotating(positions=np.array([0, -1, 8, 9, 10]))
    refuse(ValueError, "positions[3]: needs a row of cos_sin, up to 8", "got 9", **changed)


# --- frameworks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_torch_tensors_are_written_in_place(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype)
    kv_cache = torch.zeros(6, 16, 576, dtype=kind)
    rows = torch.randn(5, 576, dtype=kind)
    slots = torch.tensor([3, -1, 95, 17, 0])
    q_pe = torch.randn(5, 3, 64, dtype=kind)
    before = q_pe.clone()
    quarter = torch.zeros(5, 64)
    quarter[:, 32:] = 1  # sines of a quarter turn
    assert cumla.append_mla_cache(rows, kv_cache, slots) is None
    expected = torch.zeros(96, 576, dtype=kind)
    expected[slots[slots >= 0]] = rows[slots >= 0]
    assert torch.equal(kv_cache.view(96, 576), expected)
    cumla.append_mla_cache(
        rows, kv_cache, slots, positions=torch.arange(5), cos_sin=quarter, q_pe=q_pe
    )
    assert torch.equal(q_pe[..., ::2], -before[..., 1::2])
    assert torch.equal(kv_cache.view(96, 576)[95, 512::2], -rows[2, 513::2])


def test_jax_rows_go_into_a_numpy_cache() -> None:
    jnp = pytest.importorskip("jax.numpy")
    rows = jnp.ones((5, 576), jnp.bfloat16)
    arguments = make(rows=rows, slot_mapping=jnp.array([3, -1, 95, 17, 0]))
    cumla.append_mla_cache(**arguments)
    assert np.flatnonzero(arguments["kv_cache"].reshape(96, 576)[:, 0]).tolist() == [0, 3, 17, 95]


@pytest.mark.parametrize("name", ["kv_cache", "kv_cache[1]", "q_pe", "q_pe_out"])
def test_jax_arrays_are_not_written_to(name: str) -> None:
    jnp = pytest.importorskip("jax.numpy")
    array = jnp.zeros({"kv_cache": (6, 16, 576), "kv_cache[1]": (6, 16, 64)}.get(name, (5, 3, 64)))
    array = array.astype(jnp.bfloat16)
    change = {name: array}
    if name == "kv_cache[1]":
        change = {"kv_cache": (aligned((6, 16, 512)), array)}
    refuse(TypeError, f"{name}: JAX arrays are immutable", "; keep", **rotating(**change))


@pytest.mark.parametrize("name", ["rows", "kv_cache", "slot_mapping"])
def test_no_array(name: str) -> None:
    arguments = make() | {name: "no array"}
    refuse(TypeError, f"{name}: needs an array", "got builtins.str", **arguments)


# --- on a GPU that is not there -------------------------------------------------------------------


class Launched(list[tuple[KernelSpec, AppendArguments, bool, int]]):
    """What would be launched: kernel, arguments, kind of rotation, stream."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    calls = Launched()
    monkeypatch.setattr(cache, "load", lambda spec, device, *, capturing: spec)

    def prepare(*call: Any) -> Callable[[], None]:
        return lambda: calls.append(call)

    monkeypatch.setattr(cache, "prepare_append", prepare)
    monkeypatch.setattr(cache, "_ready", ReadyLaunches())
    return calls


def on_gpu(cupy: FakeCuPy, arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments on the GPU."""
    return {
        name: tuple(cupy.like(part) for part in array)
        if isinstance(array, tuple)
        else cupy.like(array)
        for name, array in arguments.items()
    }


@pytest.mark.parametrize("rows", [BF16, np.float32])
def test_what_is_launched(cupy: FakeCuPy, launched: Launched, rows: Any) -> None:
    arguments = rotating(rows=aligned((5, 576), rows))
    cumla.append_mla_cache(**on_gpu(cupy, arguments), interleaved=False, stream=7)
    ((spec, views, interleaved, stream),) = launched
    suffix = "_from_float32" if rows == np.float32 else ""
    assert spec.entry == f"append_cache_bfloat16{suffix}"
    assert (interleaved, stream) == (False, 7)
    itemsize = np.dtype(rows).itemsize
    assert views.latent_rows.shape == (5, 1, 512)
    assert views.rope_rows.shape == (5, 1, 64)
    assert views.rope_rows.ptr - views.latent_rows.ptr == 512 * itemsize
    assert views.latent_cache.shape == (6, 16, 1, 512)
    assert views.rope_cache.shape == (6, 16, 1, 64)
    assert views.rope_cache.ptr - views.latent_cache.ptr == 1024
    assert views.q_pe is views.q_pe_out is not None


def test_a_call_on_the_same_arrays_is_not_prepared_again(
    cupy: FakeCuPy, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[object] = []
    prepare = cache.prepare_append

    def note(*arguments: Any) -> Any:
        prepared.append(arguments)
        return prepare(*arguments)

    monkeypatch.setattr(cache, "prepare_append", note)
    given = on_gpu(cupy, rotating())
    for count in (1, 2):
        cumla.append_mla_cache(**given)
        assert (len(prepared), len(launched)) == (1, count)
    cumla.append_mla_cache(**given, interleaved=False)
    cumla.append_mla_cache(**given, stream=7)
    slots = given["slot_mapping"]
    del given["slot_mapping"], given["positions"]  # the same views would mean something else
    refuse(ValueError, "", **given, positions=slots)
    assert (len(prepared), len(launched)) == (3, 4)


def test_nothing_is_launched_for_no_tokens(cupy: FakeCuPy, launched: Launched) -> None:
    none = make(rows=aligned((0, 576)), slot_mapping=np.zeros(0, np.int32))
    cumla.append_mla_cache(**on_gpu(cupy, none))
    assert launched == []


def test_places_that_differ(cupy: FakeCuPy, launched: Launched) -> None:
    arguments = rotating(q_pe_out=aligned((5, 3, 64)))
    there = on_gpu(cupy, arguments)
    for name in sorted(there.keys() - {"kv_cache"}):
        message = (f"{name}: ", "where kv_cache is, on CUDA device 0", "CPU")
        error = TypeError if name == "q_pe_out" else ValueError  # NumPy's, for a CuPy cache
        refuse(
            error, *message[: 3 if error is ValueError else 1], **there | {name: arguments[name]}
        )
        elsewhere = cupy.like(arguments[name], device=1)
        refuse(
            ValueError, f"{name}: ", "CUDA device 0", "CUDA device 1", **there | {name: elsewhere}
        )
    assert launched == []


def test_a_cold_kernel_under_capture(cupy: FakeCuPy, driver: FakeDriver) -> None:
    driver.capturing.add(0)
    message = "kernel append_cache_bfloat16 is not loaded on device 0"
    refuse(cumla.NotPreparedError, message, "cumla.prepare()", **on_gpu(cupy, make()))


def test_prepare_loads_the_kernels(cupy: FakeCuPy, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    monkeypatch.setattr(preparation, "load", lambda spec, *_, **__: loaded.append(spec))
    cumla.prepare(dtypes=("float16",))
    ours = [spec for spec in loaded if spec.stem == "append_cache"]
    assert [spec.entry for spec in ours] == [
        "append_cache_float16",
        "append_cache_float16_from_float32",
    ]


def test_an_unsupported_gpu(cupy: FakeCuPy) -> None:
    cupy.capability = (10, 0)
    refuse(cumla.UnsupportedDeviceError, "device 0 is NVIDIA Imaginary", **on_gpu(cupy, make()))


def test_check_mode_copies_from_the_gpu(
    cupy: FakeCuPy, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = by_request()
    names = ("batch_indices", "positions", "block_table")
    copies = {(arguments[name].shape, arguments[name].dtype.name): name for name in names}
    asked = []

    def copy(view: Any, stream: int) -> Any:
        asked.append(copies[view.shape, view.dtype])
        return arguments[asked[-1]]

    monkeypatch.setattr(cache, "copy_to_host", copy)
    there = on_gpu(cupy, arguments)
    cumla.append_mla_cache(**there)
    assert asked == []
    monkeypatch.setenv("CUMLA_CHECK", "1")
    cumla.append_mla_cache(**there)
    assert asked == list(names)
    assert len(launched) == 2
    arguments["positions"][0] = 99
    refuse(ValueError, "positions[0]: ", "got 99", **there)
    assert len(launched) == 2


def test_check_mode_under_capture(
    cupy: FakeCuPy,
    driver: FakeDriver,
    launched: Launched,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CUMLA_CHECK", "1")
    driver.capturing.add(0)
    cumla.append_mla_cache(**on_gpu(cupy, make()))
    assert "CUMLA_CHECK: nothing can be checked" in caplog.text
    assert len(launched) == 1


# --- the launch -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "kv_heads", "heads", "grid"),
    [
        (1, 1, 0, (1, 1, 1)),
        (16, 1, 0, (1, 1, 1)),
        (17, 1, 0, (2, 1, 1)),
        (5, 3, 0, (1, 3, 1)),
        (9, 1, 16, (1 + 1, 1, 1)),  # a warp a token
        (9, 1, 17, (1 + 2, 1, 1)),  # two
        (9, 2, 17, (1 + 1, 2, 1)),  # dealt out to the kv heads
        (10, 2, 17, (1 + 2, 2, 1)),
    ],
)
def test_grid(
    tokens: int,
    kv_heads: int,
    heads: int,
    grid: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    views = {
        "kv_cache": aligned((2, 4, kv_heads, 576)),
        "rows": aligned((tokens, kv_heads, 576)),
        "slot_mapping": np.zeros(tokens, np.int32),
    }
    if heads:
        views |= {
            "positions": np.zeros(tokens, np.int64),
            "cos_sin": aligned((1, 64), np.float32),
            "q_pe": aligned((tokens, heads, 64)),
        }
    opened = arrays.open_call(tuple(views.items()))
    named = dict(zip(views, opened.views, strict=True))
    arguments = cache_checks.checked_append_arguments(named)  # type: ignore[arg-type]
    seen = []
    monkeypatch.setattr(append_cache, "PreparedLaunch", lambda *launch: seen.append(launch))
    append_cache.prepare_append("kernel", arguments, True, 5)  # type: ignore[arg-type]
    ((kernel, got, layout, values, stream),) = seen
    assert (kernel, got, stream) == ("kernel", grid, 5)
    packed = layout.unpack(layout.pack(*values))
    assert packed == tuple(values)
