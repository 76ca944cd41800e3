# SPDX-License-Identifier: Apache-2.0
"""Promises of every operation and every plan: empty batches, overlap, captured updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import cumla
from cumla.launch import tensor_map
from cumla.launch.tensor_map import paged_kv_map
from tests.gpu.tools.cases import Case
from tests.gpu.tools.indexer_problem import Paged, Rows
from tests.gpu.tools.problem import Guarded, make_problem
from tests.gpu.tools.process import run_fresh
from tests.gpu.tools.ragged_problem import Ragged, make_ragged
from tests.gpu.tools.refusals import launches
from tests.gpu.tools.repeats import plan_of

cp: Any = pytest.importorskip("cupy")

KERNELS = (
    "append_cache",
    "append_indexer_cache",
    "merge_states",
    "ragged_schedule",
    "mla_decode",
    "mla_decode_swapped",
    "schedule",
    "mqa_logits",
    "paged_mqa_logits",
    "paged_mqa_schedule",
    "quantize_fp8",
    "top_k",
)

Array = Any
BF16 = np.dtype(ml_dtypes.bfloat16)


# --- a small call of every operation -------------------------------------------------------------


def b16(*shape: int) -> np.ndarray:
    return np.zeros(shape, BF16)


def f32(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def u8(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.uint8)


def i32(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)


class Small(NamedTuple):
    """Arguments of a call, on the host, and the arrays that it returns."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    outputs: dict[str, np.ndarray]


def small_calls(n: int) -> dict[str, Small]:
    """A call of every operation, for that many tokens or requests."""
    query, cache = b16(n, 16, 576), b16(4, 64, 576)
    attended = {"out": b16(n, 16, 512), "lse": f32(n, 16)}
    requests = {"block_table": i32(n, 2), "kv_lens": i32(n) + 70}
    decode = {"q": query[:, None], "kv_cache": cache, **requests}
    ragged = {"q": query, "kv_cache": cache, "block_table": i32(2, 2), "kv_lens": i32(2) + 70}
    ragged["qo_indptr"] = np.array([0, n, n], np.int32)
    scored = {"q": u8(n, 16, 64), "weights": f32(n, 16)}
    sequence = {"kv": (u8(128, 64), f32(128)), "ks": i32(n), "ke": i32(n) + 100}
    paged = {"q": u8(n, 1, 16, 64), "kv_cache": u8(4, 64, 1, 68), "weights": f32(n, 16)}
    logits = {"out": f32(n, 128)}
    slots = np.arange(n)
    partials = {"outs": [f32(n, 16, 512)] * 2, "lses": [f32(n, 16)] * 2}
    return {
        "mla_decode": Small(
            cumla.mla_decode, decode, {"out": b16(n, 1, 16, 512), "lse": f32(n, 1, 16)}
        ),
        "mla_attention": Small(cumla.mla_attention, ragged, attended),
        "mqa_logits": Small(cumla.mqa_logits, scored | sequence, logits),
        "paged_mqa_logits": Small(
            cumla.paged_mqa_logits, paged | requests | {"max_kv_len": 128}, logits
        ),
        "append_mla_cache": Small(
            cumla.append_mla_cache,
            {"rows": b16(n, 576), "kv_cache": cache, "slot_mapping": slots},
            {},
        ),
        "append_indexer_cache": Small(
            cumla.append_indexer_cache,
            {"k": b16(n, 128), "kv_cache": u8(4, 64, 132), "slot_mapping": slots},
            {},
        ),
        "quantize_fp8": Small(
            cumla.quantize_fp8, {"x": f32(n, 128)}, {"out": u8(n, 128), "scale_out": f32(n)}
        ),
        "top_k": Small(
            cumla.top_k,
            {"scores": f32(n, 5000), "topk": 64},
            {"out": np.empty((n, 64), np.int32), "counts": np.empty(n, np.int32)},
        ),
        "merge_attention_states": Small(
            cumla.merge_attention_states, partials, {"out": f32(n, 16, 512), "lse": f32(n, 16)}
        ),
    }


NAMES = list(small_calls(1))


def on_device(value: Any) -> Any:
    """CuPy arrays of host arrays, which may be in tuples, lists and dictionaries."""
    if isinstance(value, dict):
        return {name: on_device(part) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(map(on_device, value))
    if not isinstance(value, np.ndarray):
        return value
    bits = value.view(np.uint16) if value.dtype == BF16 else value
    return cp.asarray(bits).view(value.dtype)


def in_torch(torch: Any, value: Any) -> Any:
    """The same as tensors."""
    if isinstance(value, dict):
        return {name: in_torch(torch, part) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(in_torch(torch, part) for part in value)
    if not isinstance(value, np.ndarray):
        return value
    bits = value.view(np.int16) if value.dtype == BF16 else value
    tensor = torch.from_numpy(bits.copy()).cuda()
    return tensor.view(torch.bfloat16) if value.dtype == BF16 else tensor


def results_of(result: Any) -> list[Any]:
    """The arrays that an operation returned."""
    if result is None:
        return []
    results = list(result) if isinstance(result, tuple) else [result]
    return [one for one in results if one is not None]


# --- empty batches -------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["cupy", "torch", "jax"])
@pytest.mark.parametrize("name", NAMES)
def test_empty_batches_launch_nothing(name: str, framework: str) -> None:
    module = pytest.importorskip(framework)
    if framework == "jax" and module.default_backend() not in ("gpu", "cuda"):
        pytest.skip("needs JAX on the GPU")

    def there(name: str, value: Any) -> Any:
        if framework == "torch":
            return in_torch(module, value)
        if framework == "cupy" or isinstance(value, int) or (in_place and name == "kv_cache"):
            return on_device(value)
        return module.tree.map(module.numpy.asarray, value)

    in_place = name.startswith("append")  # into no array of JAX's: they are immutable

    def call(n: int) -> tuple[list[Any], list[tuple[int, ...]]]:
        function, arguments, outputs = small_calls(n)[name]
        result = function(**{key: there(key, value) for key, value in arguments.items()})
        return results_of(result), [array.shape for array in outputs.values()]

    with launches() as launched:
        arrays, shapes = call(0)
    assert launched == []
    assert [tuple(array.shape) for array in arrays] == shapes
    assert all(framework in type(array).__module__ for array in arrays)
    with launches() as launched:
        call(3)
    assert launched


def test_no_request_and_rows_of_nobody() -> None:
    """Queries that no request has, and requests of no query: outputs stay as they are."""
    query, cache = on_device(b16(5, 16, 576)), on_device(b16(4, 64, 576))
    table, lengths = on_device(i32(0, 2)), on_device(i32(0))
    plan = cumla.MLAAttentionPlan(0, 5, 16)
    out, lse = Guarded(cp, (5, 16, 512), "bfloat16"), Guarded(cp, (5, 16), "float32")
    given = {"out": out.array, "lse": lse.array}
    with launches() as launched:
        qo_indptr = on_device(i32(1))
        cumla.mla_attention(
            query, cache, block_table=table, kv_lens=lengths, qo_indptr=qo_indptr, **given
        )
        plan.update(lengths, qo_indptr=qo_indptr)
        plan.run(query, cache, block_table=table, **given)
        none = cumla.mla_decode(
            query[:2, None][:, :0], cache, on_device(i32(2, 2)), on_device(i32(2))
        )
    assert launched == []
    assert none.out.shape == (2, 0, 16, 512)
    assert none.lse.shape == (2, 0, 16)
    for output in (out, lse):
        assert bool((output.bits == output.ones).all())


def test_plans_of_empty_batches() -> None:
    for name, plan in (
        ("mla_decode", cumla.MLADecodePlan(0, 1, 16)),
        ("mla_attention", cumla.MLAAttentionPlan(2, 0, 16)),
        ("paged_mqa_logits", cumla.PagedMQALogitsPlan(0, 1, 16, 64, max_pages=2)),
    ):
        small = small_calls(0)[name]
        given = on_device(small.arguments)
        lengths = {key: given.pop(key) for key in ("kv_lens", "qo_indptr") if key in given}
        plan.prepare()
        plan.update(**lengths)
        with launches() as launched:
            arrays = results_of(plan.run(**given))
        assert launched == []
        assert [array.shape for array in arrays] == [
            array.shape for array in small.outputs.values()
        ]


# --- overlap -------------------------------------------------------------------------------------


def leaves(value: Any) -> list[Array]:
    """The arrays among arguments."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [leaf for part in value for leaf in leaves(part)]
    return [value] if isinstance(value, cp.ndarray) else []


def in_memory_of(array: Array, like: np.ndarray) -> Array:
    """An array like another one, in whose memory it begins, or a bit behind."""
    begin = array.data + (16 if array.nbytes > 64 else 0)
    kind = np.uint16 if like.dtype == BF16 else like.dtype
    return cp.ndarray(like.shape, kind, begin).view(like.dtype)


def parts_that_overlap(name: str) -> tuple[Array, Array]:
    """A cache in two arrays, one in the memory of the other."""
    if name == "append_mla_cache":
        latent = on_device(b16(4, 64, 512))
        return latent, in_memory_of(latent, b16(4, 64, 64))
    values = on_device(u8(4, 64, 128))
    return values, in_memory_of(values, f32(4, 64))


@pytest.mark.parametrize("name", NAMES)
def test_outputs_that_overlap_are_refused(name: str) -> None:
    """With each input, and with each other, before anything is launched."""
    function, arguments, outputs = small_calls(3)[name]
    given = on_device(arguments)
    calls: list[dict[str, Any]] = []
    for output, like in outputs.items():
        calls += [{output: in_memory_of(leaf, like)} for leaf in leaves(given)]
    if len(outputs) == 2:
        (first, one), (second, other) = outputs.items()
        memory = on_device(one)
        calls.append({first: memory, second: in_memory_of(memory, other)})
    if name.startswith("append"):  # rows may lie in other slots of the cache: its parts may not
        calls.append({"kv_cache": parts_that_overlap(name)})
    assert calls
    with launches(forbidden=True):
        for call in calls:
            with pytest.raises(ValueError, match="needs memory of its own"):
                function(**given | call)
    with launches() as launched:
        function(**given | on_device(outputs))
    assert launched


# --- plans ---------------------------------------------------------------------------------------


class Planned:
    """A plan of some kind, and what it is updated with and run on.

    Parameters
    ----------
    kind : str
        One of KINDS.
    """

    def __init__(self, kind: str) -> None:
        self.problem: Any
        if kind == "decode":
            self.problem = problem = make_problem(cp, Case(batch=3, heads=32, kv_len=3000))
            self.plan: Any = plan_of(problem)
            self.lengths = {"kv_lens": problem.kv_lens}
            self.inputs = problem.inputs
        elif kind == "attention":
            self.problem = ragged = make_ragged(cp, Ragged(kv_lens=(3000, 64, 17, 65)))
            self.lengths, self.inputs = ragged.lengths, ragged.inputs
            self.plan = cumla.MLAAttentionPlan.from_arrays(
                ragged.q, ragged.kv_cache, qo_indptr=ragged.qo_indptr
            )
        else:
            self.problem = paged = Paged(cp, 5, 2, 2000)
            q, cache, weights, table, lengths = paged.arrays
            self.lengths = {"kv_lens": lengths}
            self.inputs = {"q": q, "kv_cache": cache, "weights": weights, "block_table": table}
            self.inputs["max_kv_len"] = 3000
            self.plan = cumla.PagedMQALogitsPlan.from_arrays(q, cache, table, lengths)

    def outputs(self) -> list[Any]:
        """Poisoned ones."""
        if isinstance(self.problem, Paged):
            return [Rows(cp, 10, 3000, "float32")]
        return list(self.problem.outputs())

    def update(self) -> None:
        self.plan.update(**self.lengths)

    def step(self, outputs: list[Any]) -> None:
        self.update()
        self.run(outputs)

    def run(self, outputs: list[Any]) -> None:
        given = {name: output.array for name, output in zip(("out", "lse"), outputs, strict=False)}
        self.plan.run(**self.inputs, **given)

    def check(self, outputs: list[Any]) -> None:
        self.problem.check(*(output.array for output in outputs))
        for output in outputs:
            output.check_guards()


KINDS = ("decode", "attention", "paged")


def captured(stream: Any, work: Callable[[], None]) -> Any:
    """A graph of what is launched on the stream, which is the current one."""
    stream.begin_capture()
    try:
        work()
    finally:
        graph = stream.end_capture()
    return graph


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_that_was_only_captured_is_none_for_eager_runs(kind: str) -> None:
    """It is one for runs that are captured behind it."""
    planned = Planned(kind)
    plan = planned.plan
    plan.prepare()
    stream = cp.cuda.Stream(non_blocking=True)
    first, second, third = (planned.outputs() for _ in range(3))
    cp.cuda.Device().synchronize()

    def refuse() -> None:
        assert not plan.serves(stream.ptr)
        with launches(forbidden=True), pytest.raises(ValueError, match="captured into a CUDA gr"):
            planned.run(third)

    with stream:
        update_and_run = captured(stream, lambda: planned.step(first))
        refuse()
        run_alone = captured(stream, lambda: planned.run(second))
        update_and_run.launch(stream)
        run_alone.launch(stream)
        stream.synchronize()
        refuse()
        planned.check(first)
        planned.check(second)
        planned.update()
        assert plan.serves(stream.ptr)
        planned.run(third)
        stream.synchronize()
        planned.check(third)


def test_a_cold_plan_under_capture() -> None:
    """Nothing is compiled or loaded in a capture; once it is prepared the same capture works."""
    script = f"""
import cupy as cp
import cumla
from tests.gpu.core.test_operations import Planned, captured
stream = cp.cuda.Stream(non_blocking=True)
for kind in {KINDS}:
    planned = Planned(kind)
    outputs = planned.outputs()
    cp.cuda.Device().synchronize()
    with stream:
        try:
            captured(stream, lambda: planned.step(outputs))
        except cumla.NotPreparedError as error:
            print("cold:", error)
        planned.plan.prepare()
        captured(stream, lambda: planned.step(outputs)).launch(stream)
        stream.synchronize()
    planned.check(outputs)
    print(kind, "agrees")
"""
    result = run_fresh(script)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    for line, kind in zip(lines[::2], KINDS, strict=True):
        assert line.startswith("cold: kernel "), kind
        assert "prepare(" in line, kind
    assert lines[1::2] == [f"{kind} agrees" for kind in KINDS]


@pytest.mark.parametrize(
    ("dtype", "columns"),
    [("bfloat16", 576), ("float16", 64), ("float8_e4m3fn", 512), ("uint32", 164), ("uint64", 128)],
)
def test_tensor_maps_of_other_addresses_are_those_of_the_driver(dtype: str, columns: int) -> None:
    for pages, gap in ((70, 0), (1, 0), (100_000, 4096)):
        strides = (64 * 2048 + gap, 2048, 2048)
        for address in (16, 7 << 40, 0x7FFF_FFFF_FFF0, cp.empty(1 << 20, cp.uint8).data.ptr):
            wanted = paged_kv_map(address, dtype, (pages, 64, 1, columns), strides, 64)
            assert wanted.encode() == tensor_map._encoded(wanted)
    assert tensor_map._around_address(wanted._replace(ptr=0)) is not None
