# SPDX-License-Identifier: Apache-2.0
"""cumla inside torch.compile and torch.export, against the eager call."""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pytest

import cumla
from tests.calls import (
    E4M3,
    OPERATIONS,
    PLANS,
    Operation,
    Planned,
    arrays_of,
    decode,
    every_operation,
    every_plan,
    numbers,
    refused,
    rows,
    turned,
    with_array,
)

torch = pytest.importorskip("torch")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils._pytree import tree_leaves as flatten  # noqa: E402

import cumla.torch as binding  # noqa: E402
from cumla.compat import deep_gemm  # noqa: E402
from cumla.core.spec import SPECS, Instead  # noqa: E402
from tests.bindings.in_torch import (  # noqa: E402
    Arguments,
    assert_equal,
    check_compiled,
    compiled,
    flat,
    halves,
    in_graph,
    tensors,
)
from tests.bindings.two_caches import TWO_CACHES  # noqa: E402
from tests.compat.torch_gpu import torch_gpu  # noqa: E402


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch logs what it raises, too."""
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)


def some_of(names: Iterable[str], *shown: str) -> list[Any]:
    """All but those that are shown are exhaustive."""
    return [
        pytest.param(name, marks=[] if name in shown else pytest.mark.exhaustive) for name in names
    ]


def test_every_function_has_an_operation() -> None:
    planned = {OPERATIONS[plan.operation].function.__name__ for plan in PLANS.values()}
    for name in SPECS:
        assert hasattr(torch.ops.cumla, name)
        assert hasattr(torch.ops.cumla, f"{name}_attend") == (name in planned)


# --- functions in graphs -------------------------------------------------------------------------


@every_operation
def test_compiled_call_is_the_eager_one(operation: Operation) -> None:
    check_compiled(operation, tensors)


@pytest.mark.parametrize("name", TWO_CACHES)
def test_two_caches_of_v4(name: str) -> None:
    """In a graph; and by a schedule that two layers share."""
    operation = TWO_CACHES[name]
    check_compiled(operation, tensors)
    given = tensors(operation.make())
    expected = operation.function(**given)
    for found in compiled(halves(operation, given)[1])(torch.empty(0, dtype=torch.uint8)):
        assert_equal(flat(found), flat(expected))


@every_operation
def test_schema_tells_what_is_written(operation: Operation) -> None:
    name = operation.function.__name__
    (whole,) = [getattr(torch.ops.cumla, name).default]
    spec = SPECS[name]
    in_place = {instead.of: instead.name for instead in spec.rows(Instead)}
    written = {in_place.get(array, array) for array in operation.in_place}
    marked = {a.name for a in whole._schema.arguments if a.alias_info}
    assert written <= marked <= written | set(in_place.values())
    if operation.outputs():
        given = [output.name for output in spec.outputs if output.name in operation.outputs()]
        overload = "default" if len(given) == len(spec.outputs) else "_".join(given)
        out = getattr(getattr(torch.ops.cumla, f"{name}_out"), overload)
        marked = {a.name for a in out._schema.arguments if a.alias_info}
        assert marked == set(operation.outputs())
        assert len(out._schema.returns) == len(spec.returns) - len(given)


def test_one_output_of_two() -> None:
    given = tensors(decode())
    expected = cumla.mla_decode(**given)
    for name, array in expected._asdict().items():
        into = torch.zeros_like(array)
        found = compiled(lambda into: cumla.mla_decode(**given, **{name: into}))(into)  # noqa: B023
        assert_equal(found, expected)
        assert getattr(found, name) is into


@pytest.mark.parametrize(
    ("backend", "turns"),
    [
        ("aot_eager", True),
        ("inductor", False),  # nothing that a C++ compiler would have to compile
        pytest.param("inductor", True, marks=pytest.mark.exhaustive),
    ],
)
def test_order_of_writes(backend: str, turns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of a step that write into one cache and read it, and queries turned in place.

    No operation gets a copy of the cache.
    """
    given, new = tensors(decode()), tensors(rows())
    arguments_of, caches = binding._arguments, []

    def noted(function: Any, given: Arguments, take: Any) -> Arguments:
        if take is None:
            caches.append(given["kv_cache"][0].data_ptr())
        return arguments_of(function, given, take)

    monkeypatch.setattr(binding, "_arguments", noted)

    def step(q: Any, kv_cache: Any, rows: Any, slots: Any) -> tuple[Any, ...]:
        states = []
        for layer in range(2):
            written, at, options = rows[layer:], slots[layer:], {}
            if turns:
                q, written, at = q * 1.5, rows * (layer + 1), slots
                options = {"q_pe": q[:, 0, :, 512:]}
            cumla.append_mla_cache(
                written, kv_cache, at, positions=at, cos_sin=new["cos_sin"], **options
            )
            states.append(
                cumla.mla_decode(q, kv_cache, given["block_table"], given["kv_lens"], causal=False)
            )
        return *states, q

    results = []
    for function in (step, compiled(step, backend=backend)):
        kv_cache = given["kv_cache"].clone()
        address = kv_cache.data_ptr()
        slots = torch.tensor([4, 195])
        results.append((function(given["q"], kv_cache, new["rows"][:2], slots), kv_cache))
    assert_equal(results[1], results[0])
    if backend == "inductor":
        assert caches == [address] * 4


def of_batch(batch: int) -> dict[str, Arguments]:
    """Calls for so many requests, or tokens, from which all first axes follow."""
    tokens, pages = 3 * batch, 5 * batch
    slots, each = np.arange(batch), np.arange(2 * batch, dtype=np.int32).reshape(batch, 2)
    lengths = {"kv_lens": np.arange(batch, dtype=np.int32) + 9, "block_table": each}
    offsets = {"qo_indptr": np.arange(0, tokens + 1, 3, dtype=np.int32)}
    cache, keys = numbers(pages, 16, 576), numbers(pages, 16, 2, 64)
    e4m3 = numbers(tokens, 8, 32, dtype=E4M3)
    bounds = {"ks": np.zeros(tokens, np.int32), "ke": np.full(tokens, 5, np.int32)}
    table = {"cos_sin": numbers(99, 64, dtype=np.float32)}
    by_request = {"batch_indices": slots, "positions": slots, "block_table": each}
    states = [numbers(tokens, 4, 64) for _ in range(3)]
    lists = np.arange(tokens * 6, dtype=np.int32).reshape(tokens, 6) % 30
    numbered = {"topk_lens": lists[:, 3], "row_to_request": lists[:, 0] % batch}
    return {
        "mla_decode": {"q": numbers(batch, 2, 4, 576), "kv_cache": cache, **lengths},
        "mla_attention": {"q": numbers(tokens, 4, 576), "kv_cache": cache, **lengths, **offsets},
        "mla_sparse_decode": {
            "q": numbers(batch, 3, 4, 576),
            "kv_cache": cache,
            "indices": lists.reshape(batch, 3, 6),
            "topk_lens": lists[:batch, 3],
            "block_table": each,
        },
        "mla_sparse_attention": {
            "q": numbers(tokens, 4, 576),
            "kv_cache": cache,
            "indices": lists,
            "block_table": each,
            **numbered,
        },
        "attention": {"q": numbers(tokens, 4, 64), "k": keys, "v": keys, **lengths, **offsets},
        "append_mla_cache": {"rows": numbers(batch, 576), "kv_cache": cache, **by_request, **table},
        "append_kv_cache": {
            "k": keys[:tokens, 0],
            "v": keys[:tokens, 1],
            "q": numbers(tokens, 4, 64),
            "k_cache": keys,
            "v_cache": keys,
            **lengths,
            **offsets,
            **table,
        },
        "append_indexer_cache": {
            "k": numbers(batch, 64),
            "kv_cache": np.zeros((pages, 16, 68), np.uint8),
            "slot_mapping": slots,
        },
        "apply_rope": {
            "q": numbers(batch, 4, 64),
            "k": numbers(batch, 2, 64),
            "positions": slots,
            **table,
        },
        "mqa_logits": {
            "q": e4m3,
            "kv": (e4m3[:pages, 0], numbers(tokens, dtype=np.float32)),
            "weights": numbers(tokens, 8, dtype=np.float32),
            **bounds,
        },
        "paged_mqa_logits": {
            "q": e4m3[:batch, None],
            "kv_cache": np.zeros((pages, 16, 36), np.uint8),
            "weights": numbers(batch, 8, dtype=np.float32),
            **lengths,
        },
        "quantize_fp8": {"x": numbers(tokens, 64)},
        "merge_attention_states": {
            "outs": states,
            "lses": [numbers(tokens, 4, dtype=np.float32) for _ in states],
        },
        "top_k": {"scores": numbers(batch, 40, dtype=np.float32)},
    }


@pytest.mark.parametrize("name", some_of(sorted(SPECS), "attention", "append_kv_cache"))
def test_batches_share_a_graph(name: str) -> None:
    function, graphs = getattr(cumla, name), CompileCounterWithBackend("aot_eager")
    constants = {"paged_mqa_logits": {"max_kv_len": 32}, "top_k": {"topk": 8}}.get(name, {})
    call = compiled(lambda given: function(**given, **constants), backend=graphs)
    for batch in (2, 3, 7):
        eager, traced = (tensors(of_batch(batch)[name]) for _ in range(2))
        for array, tensor in arrays_of(traced):
            if array != "cos_sin":
                torch._dynamo.mark_dynamic(tensor, 0)
        expected = function(**eager, **constants)
        assert_equal(call(traced), expected)
        assert_equal(traced, eager)
    assert graphs.frame_count == 1


@pytest.mark.parametrize(
    "name", some_of(OPERATIONS, "mla_decode", "append_mla_cache", "mla_sparse_decode", "top_k")
)
def test_export(name: str) -> None:
    check_export(name, strict=False)


@pytest.mark.parametrize("name", some_of(OPERATIONS, "mla_decode"))
def test_strict_export(name: str) -> None:
    """By the tracer of torch.compile."""
    check_export(name, strict=True)


def check_export(name: str, strict: bool) -> None:
    operation = OPERATIONS[name]
    numbers_too, traced, eager = (tensors(operation.make()) for _ in range(3))
    others = {n: v for n, v in numbers_too.items() if not flat(v)}
    arrays = {n: v for n, v in traced.items() if n not in others}

    class Layer(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, arrays: Any) -> Any:
            return operation.function(**arrays, **others)

    saved = io.BytesIO()
    torch.export.save(torch.export.export(Layer(), (arrays,), strict=strict), saved)
    program = torch.export.load(io.BytesIO(saved.getvalue()))
    expected = operation.function(**eager)
    assert_equal(program.module()(arrays), expected)
    assert_equal(arrays, {name: eager[name] for name in arrays})


def test_tensors_without_memory() -> None:
    with torch._subclasses.FakeTensorMode():
        q = torch.empty(2, 3, 16, 576, dtype=torch.bfloat16, device="cuda:0")
        kv_cache = q.new_empty(4, 64, 576)
        table, lens = (q.new_empty(shape, dtype=torch.int32) for shape in ((2, 2), (2,)))
        out, lse = cumla.mla_decode(q, kv_cache, table, lens)
    assert (out.shape, out.dtype, out.device) == ((2, 3, 16, 512), q.dtype, q.device)
    assert (lse.shape, lse.dtype, lse.device) == ((2, 3, 16), torch.float32, q.device)
    assert lse.stride() == (48, 1, 3)  # as that of an eager call


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "causal"),
    [(3, True), ((3, 2), False), ([3, None], False), ((None, None), True), (-1, True)],
)
def test_windows(window: Any, causal: bool) -> None:
    given = tensors(OPERATIONS["attention of equal queries"].make())
    given |= {"window": window, "causal": causal, "softcap": 20.0, "softmax_scale": 0.1}
    assert_equal(compiled(lambda: cumla.attention(**given))(), cumla.attention(**given))


@pytest.mark.parametrize("scale", [2, 0.5, torch.tensor([0.25])])
def test_factors(scale: Any) -> None:
    given = tensors(decode())
    given["kv_cache"] = given["kv_cache"].to(torch.float8_e4m3fn)
    assert_equal(
        compiled(lambda: cumla.mla_decode(**given, kv_scale=scale))(),
        cumla.mla_decode(**given, kv_scale=scale),
    )


@pytest.mark.parametrize("scale", [2, torch.tensor([0.25])])
@pytest.mark.parametrize("name", ["mla_decode", "mla_attention"])
def test_e4m3_queries(name: str, scale: Any) -> None:
    operation = OPERATIONS[name]
    given = tensors(operation.make()) | {"kv_scale": 0.5, "q_scale": scale}
    for array in ("q", "kv_cache"):
        given[array] = given[array].to(torch.float8_e4m3fn)
    expected = operation.function(**given)
    assert expected.out.dtype == torch.bfloat16
    assert_equal(compiled(lambda: operation.function(**given))(), expected)
    usual = given | {"q": given["q"].bfloat16(), "q_scale": None}
    usual["softmax_scale"] = 576**-0.5 * float(scale)
    torch.testing.assert_close(operation.function(**usual).out, expected.out)


@pytest.mark.parametrize("name", ["mla_decode", "mla_attention"])
def test_products_in_fp8(name: str) -> None:
    operation = OPERATIONS[name]
    given = tensors(operation.make()) | {"fp8_products": True}
    with pytest.raises(Exception, match=r"fp8_products: needs a kv_cache of float8_e4m3fn, or"):
        compiled(lambda: operation.function(**given))()
    given["kv_cache"] = given["kv_cache"].to(torch.float8_e4m3fn)
    given["kv_scale"] = torch.ones(1)
    expected = operation.function(**given)
    assert_equal(compiled(lambda: operation.function(**given))(), expected)
    for found in compiled(halves(operation, given)[1])(torch.empty(0, dtype=torch.uint8)):
        assert_equal(flat(found), flat(expected))
    as_bytes = {"kv_cache": given["kv_cache"].view(torch.uint8)}  # as in `check`
    positional, named = in_graph(operation, given | as_bytes)
    torch.library.opcheck(getattr(torch.ops.cumla, name).default, positional, named)
    given["fp8_products"] = 1  # for which a schema takes any number
    with pytest.raises(Exception, match="fp8_products: needs True or False, got int"):
        compiled(lambda: operation.function(**given))()


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, None])
def test_dtypes_by_name(dtype: Any) -> None:
    given = tensors(OPERATIONS["mqa_logits"].make()) | {"logits_dtype": dtype, "max_kv_len": 7}
    assert_equal(compiled(lambda: cumla.mqa_logits(**given))(), cumla.mqa_logits(**given))


def test_parts_and_stacks() -> None:
    given = tensors(decode())
    for name in ("q", "kv_cache"):
        given[name] = tuple([a.contiguous() for a in given[name].split((512, 64), -1)])
    assert_equal(compiled(lambda: cumla.mla_decode(**given))(), cumla.mla_decode(**given))
    partial = {
        n: torch.stack(a) for n, a in tensors(OPERATIONS["merge_attention_states"].make()).items()
    }
    found = compiled(lambda: cumla.merge_attention_states(**partial, lse_base=2))()
    assert_equal(found, cumla.merge_attention_states(**partial, lse_base=2))


def test_no_keys_to_turn() -> None:
    given = tensors(turned()) | {"k": None}
    for more in ({}, {"q_out": torch.zeros_like(given["q"])}):
        found = compiled(lambda: cumla.apply_rope(**given, **more))()  # noqa: B023
        assert found[1] is None
        assert_equal(found[0], cumla.apply_rope(**given)[0])


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_table": torch.zeros(3, 3, dtype=torch.int32)}, r"block_table: needs shape"),
        ({"out": torch.zeros(2, 2, 16, 511).bfloat16()}, r"out: needs shape \(2, 2, 16, 512\)"),
        ({"kv_lens": torch.zeros(2)}, "kv_lens: needs int32, got float32; convert it first"),
        ({"kv_scale": (1.0,)}, "kv_scale: needs a number, or a float32 array, got tuple; pass one"),
        ({"causal": 2}, "causal: needs True or False, got int"),
        ({"stream": 7}, "stream: needs None in a graph, got a stream; leave it out"),
        ({"scale": 7}, "mla_decode: got an argument scale that is unknown or came before"),
        (
            {"q": torch.zeros(2, 2, 16, 576, requires_grad=True)},
            r"q: needs a tensor that requires no gradient.* under torch\.no_grad\(\) or torch\.inf",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_while_tracing(changes: Arguments, message: str) -> None:
    given = tensors(decode()) | changes
    with pytest.raises(Exception, match=message), torch.enable_grad():
        compiled(lambda: cumla.mla_decode(**given))()


def test_too_many_positions() -> None:
    given = tensors(decode())
    with pytest.raises(Exception, match="mla_decode: needs at most 4 positional arguments"):
        compiled(lambda: cumla.mla_decode(*given.values(), 1.0))()


def test_plans_stay_outside() -> None:
    plan = cumla.MLADecodePlan.from_arrays(*(tensors(decode())[n] for n in ("q", "kv_cache")))
    lens = torch.tensor([1, 2], dtype=torch.int32)
    message = "in place of plans call torch.ops.cumla.<function>_schedule and _attend; or put"
    with pytest.raises(Exception, match=message):
        compiled(lambda: plan.update(lens))()
    with (
        torch._subclasses.FakeTensorMode() as mode,
        pytest.raises(TypeError, match=r"not its plans: .*; in place of DSAPlan call paged_"),
    ):
        plan.update(mode.from_tensor(lens))


def test_arguments_of_operations() -> None:
    new = tensors(rows())
    positional = [new.pop("rows")], [new.pop("kv_cache")]
    with pytest.raises(ValueError, match=r"^q_pe_out: needed beside q_pe, got None; pass q_pe as"):
        torch.ops.cumla.append_mla_cache(*positional, **new)
    given = tensors(decode())
    q, kv_cache = given.pop("q"), given.pop("kv_cache")
    factors = {"kv_scale": torch.ones(1), "kv_scale_number": 1.0}
    with pytest.raises(
        ValueError, match=r"^kv_scale_number: needs no kv_scale beside it, got both"
    ):
        torch.ops.cumla.mla_decode([q], [kv_cache], **given, **factors)
    with torch.enable_grad(), pytest.raises(RuntimeError, match=r"^q: .* requires no gradient"):
        torch.ops.cumla.mla_decode([q.requires_grad_()], [kv_cache], **given)


# --- traces of tensors with memory ---------------------------------------------------------------


def changed(given: Arguments) -> Arguments:
    """Other numbers where any numbers do, in the arguments that `given` starts with."""
    for _, tensor in arrays_of(given):
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
            tensor.mul_(0.5)
    return given


@every_operation
@pytest.mark.parametrize("options", [{}, {"pre_dispatch": True}], ids=["plain", "pre_dispatch"])
def test_make_fx(operation: Operation, options: Arguments) -> None:
    """No result becomes a constant of the graph, also after an eager call with the same arrays."""
    given = tensors(operation.make())
    operation.function(**given)
    names = [name for name, value in given.items() if any(map(torch.is_tensor, flatten(value)))]
    rest = {name: value for name, value in given.items() if name not in names}
    some = {name: given[name] for name in names}
    graph = make_fx(lambda some: operation.function(**some, **rest), **options)(some)
    assert any(str(node.target).startswith("cumla.") for node in graph.graph.nodes)
    traced, eager = (changed(tensors(operation.make())) for _ in range(2))
    found = graph({name: traced[name] for name in names})
    assert_equal(found, operation.function(**eager))
    assert_equal(traced, eager)


@every_plan
def test_make_fx_of_plans(planned: Planned) -> None:
    given = tensors(OPERATIONS[planned.operation].make())
    plan = planned.ready(given)
    inputs, lengths = planned.inputs(given), planned.lengths(given)
    for call in (lambda: plan.run(**inputs), lambda: plan.update(**lengths)):
        call()
        with refused(
            TypeError, " ... cumla runs eagerly, got a call under make_fx ... not its plans"
        ):
            make_fx(call)()


def test_other_functions_of_an_operation_stay_outside() -> None:
    """A call that is of no public function, and of which PyTorch has no operation."""
    lens = torch.tensor([3, 4], dtype=torch.int32)
    with refused(TypeError, "context_lens: cumla runs eagerly, got a call under make_fx"):
        make_fx(lambda: deep_gemm.get_paged_mqa_logits_metadata(lens, 64, 4))()


def test_fake_mode_beside_tensors_with_memory() -> None:
    given = tensors(decode())
    expected = cumla.mla_decode(**given)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        found = cumla.mla_decode(**given)
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, torch._subclasses.FakeTensor)
        assert (one.shape, one.dtype) == (other.shape, other.dtype)


def test_eager_calls_pass_no_dispatcher() -> None:
    seen = []

    class Look(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(op.namespace)
            return op(*args, **kwargs or {})

    given = tensors(decode())
    with Look():
        cumla.mla_decode(**given)
    assert "cumla" not in seen


# --- gradients -----------------------------------------------------------------------------------


def each_with_gradient(given: Arguments) -> Iterator[tuple[str, Arguments]]:
    """Arguments, one floating tensor of which requires a gradient, with its name."""
    for name, tensor in [*arrays_of(given)]:
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
            yield name, with_array(given, name, tensor.detach().clone().requires_grad_())


@every_operation
def test_eager_calls_refuse_gradients(operation: Operation) -> None:
    """Also where the same arrays were let through before."""
    given = tensors(operation.make() | operation.outputs())
    for name, changed in each_with_gradient(given):
        operation.function(**changed)
        with torch.enable_grad(), refused(RuntimeError, f"{name}: needs a tensor that requires no"):
            operation.function(**changed)
    with torch.enable_grad():
        operation.function(**given)


def check_counts(call: Callable[[], Any], given: Arguments, written: list[str]) -> None:
    """Autograd refuses a backward pass through what calls have written to since, each of them."""
    named = dict(arrays_of(given))
    for _ in range(3):
        before = {name: tensor._version for name, tensor in named.items()}
        call()
        assert [n for n, tensor in named.items() if tensor._version > before[n]] == written


@every_operation
def test_eager_calls_count_their_writes(operation: Operation) -> None:
    given = tensors(operation.make())
    written = [n for n, _ in arrays_of(given) if n.partition("[")[0] in operation.in_place]
    check_counts(lambda: operation.function(**given), given, written)
    if outputs := tensors(operation.outputs()):
        given |= outputs
        check_counts(lambda: operation.function(**given), given, list(outputs))


@every_plan
def test_plans_count_their_writes(planned: Planned) -> None:
    operation = OPERATIONS[planned.operation]
    given, outputs = tensors(operation.make()), tensors(operation.outputs())
    plan = planned.ready(given)
    given = planned.inputs(given) | outputs
    check_counts(lambda: plan.run(**given), given, list(outputs))


@every_plan
def test_plans_refuse_gradients(planned: Planned) -> None:
    given = tensors(OPERATIONS[planned.operation].make())
    plan = planned.ready(given)
    for name, changed in each_with_gradient(planned.inputs(given)):
        plan.run(**changed)
        with torch.enable_grad(), refused(RuntimeError, f"{name}: needs a tensor that requires no"):
            plan.run(**changed)
    with torch.enable_grad():
        plan.run(**planned.inputs(given))


def test_a_function_with_a_backward_pass_of_its_own() -> None:
    """PyTorch turns recording off there."""

    class Doubled(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return cumla.merge_attention_states([x, x], [torch.zeros(x.shape[:2])] * 2).out

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient

    with torch.enable_grad():
        x = torch.ones(1, 2, 8, requires_grad=True)
        Doubled.apply(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(1, 2, 8))


# --- halves --------------------------------------------------------------------------------------


@every_plan
def test_halves_on_the_cpu(planned: Planned) -> None:
    operation = OPERATIONS[planned.operation]
    given = tensors(operation.make())
    _, both = halves(operation, given)
    expected = operation.function(**given)
    for found in compiled(both)(torch.empty(0, dtype=torch.uint8)):
        assert_equal(flat(found), flat(expected))


def gpu_workspace(nbytes: int) -> Any:
    memory = torch.zeros(nbytes + 256, dtype=torch.uint8)
    return memory[-memory.data_ptr() % 256 :][:nbytes]


def test_halves_on_a_gpu() -> None:
    """By launches: they are those of the function, and of a plan with the same workspace."""
    operation = OPERATIONS["attention of equal queries"]
    given, longer = tensors(operation.make()), torch.tensor([2, 7], dtype=torch.int32)
    positional, named = in_graph(operation, given)
    ops = torch.ops.cumla
    with torch_gpu():
        expected = cumla.attention(**given)
        workspace = gpu_workspace(1 << 16)
        ops.attention_schedule(*positional, **named, workspace=workspace)
        for _ in range(2):
            found = ops.attention_attend(*positional, **named, workspace=workspace)
            assert_equal(found, tuple(expected))
        into = torch.zeros_like(expected.out)
        lse = ops.attention_attend_out.out(*positional, **named, out=into, workspace=workspace)
        assert_equal((into, lse), tuple(expected))
        plan = cumla.AttentionPlan.from_arrays(*positional, workspace=workspace)
        plan.update(longer)
        found = ops.attention_attend(
            *positional, **named | {"kv_lens": longer}, workspace=workspace
        )
        assert_equal(found, tuple(cumla.attention(**given | {"kv_lens": longer})))
        for wrong, message in (
            (workspace[:256], r"^workspace: needs \d+ bytes, got 256"),
            (torch.zeros(8), "^workspace: needs a contiguous one-dimensional uint8 array"),
        ):
            with pytest.raises(ValueError, match=message):
                ops.attention_attend(*positional, **named, workspace=wrong)


@every_plan
@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
def test_halves_in_check_mode(
    planned: Planned, on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schedule looks at lengths, attention at everything, also where arrays were seen before."""

    def copied(view: Any, stream: int) -> Any:
        size = sum((n - 1) * step for n, step in zip(view.shape, view.strides, strict=True)) + 8
        memory = (ctypes.c_char * size).from_address(view.ptr)
        return np.ndarray(view.shape, view.dtype, memory, strides=view.strides).copy()

    monkeypatch.setattr(binding, "copy_to_host", copied)
    operation = OPERATIONS[planned.operation]
    given = tensors(operation.make())
    positional, named = in_graph(operation, given)
    first, second = (
        getattr(torch.ops.cumla, f"{operation.function.__name__}_{half}")
        for half in ("schedule", "attend")
    )
    with torch_gpu() if on_gpu else contextlib.nullcontext():
        named["workspace"] = gpu_workspace(1 << 20)
        for half in (first, second):
            half(*positional, **named)
        monkeypatch.setenv("CUMLA_CHECK", "1")
        for half in (first, second):
            half(*positional, **named)
        for name in set(operation.integers) - set(operation.any_values):
            array = dict(arrays_of(given))[name]
            place = tuple(np.argwhere(array.numpy() > 0)[-1])
            kept = array[place].clone()
            array[place] = 10**6 if not array.is_floating_point() else float("inf")
            message = r"^\w+(\[.*\])?: needs .*(1000000|inf)"
            with pytest.raises(ValueError, match=message):
                second(*positional, **named)
            if name in planned.updated_with:
                with pytest.raises(ValueError, match=message):
                    first(*positional, **named)
            else:
                first(*positional, **named)
            array[place] = kept


# --- what PyTorch asks of operations -------------------------------------------------------------


def check(operation: Operation, half: str = "") -> None:
    outputs = {} if half == "_schedule" else tensors(operation.outputs())
    arguments = tensors(operation.make())
    positional, named = in_graph(operation, arguments)
    if half:
        named["workspace"] = torch.empty(0, dtype=torch.uint8)
    for count in range(len(outputs) + 1):
        for some in combinations(outputs, count):
            name = f"{operation.function.__name__}{half}{'_out' if some else ''}"
            given = named | {n: outputs[n] for n in some}
            packet = getattr(torch.ops.cumla, name)
            overload = "_".join(some)
            op = getattr(packet, overload if overload in packet.overloads() else "default")
            # It multiplies by 0 to see what is written, which PyTorch does not do with e4m3.
            bytes_of = lambda a: a.view(torch.uint8) if a.dtype == torch.float8_e4m3fn else a  # noqa: E731
            args, kwargs = torch.utils._pytree.tree_map_only(
                torch.Tensor, bytes_of, (positional, given)
            )
            torch.library.opcheck(op, args, kwargs)


@pytest.mark.parametrize("name", some_of(OPERATIONS, "mqa_logits", "append_mla_cache"))
def test_operation(name: str) -> None:
    check(OPERATIONS[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("half", ["_schedule", "_attend"])
@every_plan
def test_half(planned: Planned, half: str) -> None:
    check(OPERATIONS[planned.operation], half)
