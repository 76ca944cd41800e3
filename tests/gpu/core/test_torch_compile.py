# SPDX-License-Identifier: Apache-2.0
"""torch.compile on a GPU: bits of the eager call, CUDA graphs, order of writes, workspaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import cumla
from tests.calls import OPERATIONS, Operation, Planned, every_operation, every_plan

KERNELS = ()  # it is about the binding
MAY_SKIP = ("needs Triton", "needs PyTorch", "needs two GPUs")
torch: Any = pytest.importorskip("torch", reason="needs PyTorch")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

import cumla.torch as binding  # noqa: E402
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

LENGTHS = ([1, 64, 200], [256, 0, 65], [0, 0, 0], [256, 256, 256], [7, 128, 100])
HEADS, PAGE, PAGES = 32, 64, 12


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()  # graphs give their memory back


@pytest.fixture
def _triton() -> None:
    pytest.importorskip("triton", reason="needs Triton")


needs_triton = pytest.mark.usefixtures("_triton")


def on_gpu(value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda a: a.cuda(), tensors(value))


def workspace_of(planned: Planned) -> Any:
    nbytes = planned.kind.workspace_bytes(**planned.sizes())
    return torch.zeros(nbytes, dtype=torch.uint8, device="cuda")


class Step(torch.nn.Module):  # type: ignore[misc]
    """Layers that write a token of each request into their caches, and attend.

    With a workspace they share one schedule.
    """

    def __init__(self, layers: int = 3, has_workspace: bool = False) -> None:
        super().__init__()
        random = torch.Generator("cuda").manual_seed(0)

        def normal(*shape: int) -> Any:
            return torch.randn(shape, generator=random, device="cuda", dtype=torch.bfloat16)

        self.register_buffer("caches", normal(layers, PAGES, PAGE, 576) / 8)
        self.register_buffer(
            "table", torch.randperm(PAGES, generator=random, device="cuda").int().view(3, -1)
        )
        self.q, self.rows = normal(3, 1, HEADS, 576) / 8, normal(layers, 3, 576) / 8
        nbytes = cumla.MLADecodePlan.workspace_bytes(3, 1, HEADS) if has_workspace else 0
        self.register_buffer("workspace", torch.zeros(nbytes, dtype=torch.uint8, device="cuda"))
        self.has_workspace = has_workspace

    def forward(self, kv_lens: Any, slots: Any) -> list[Any]:
        q, results = self.q, []
        for layer, rows in enumerate(self.rows):
            cache = self.caches[layer]
            cumla.append_mla_cache(rows, cache, slots)
            arguments = [q], [cache], self.table, kv_lens
            if not self.has_workspace:
                out, lse = cumla.mla_decode(q, cache, self.table, kv_lens)
            else:
                if layer == 0:
                    torch.ops.cumla.mla_decode_schedule(*arguments, workspace=self.workspace)
                out, lse = torch.ops.cumla.mla_decode_attend(*arguments, workspace=self.workspace)
            cumla.append_mla_cache(rows * 2, cache, slots)  # after it was read
            q = q.clone()
            q[..., :512] = out * 0.5
            results += [out, lse]
        return results


def eager_results(lengths: list[int]) -> tuple[Any, Any, Any, Any]:
    """Lengths, slots, and results and caches of an eager step."""
    step = Step()
    kv_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    last = (kv_lens.long() - 1).clamp(min=0)
    pages = step.table.gather(1, last[:, None] // PAGE)[:, 0]
    slots = torch.where(kv_lens > 0, pages * PAGE + last % PAGE, -1)
    return kv_lens, slots, step(kv_lens, slots), step.caches


def check_step(step: Step, call: Callable[..., Any], lengths: list[int]) -> None:
    kv_lens, slots, expected, caches = eager_results(lengths)
    step.caches.copy_(Step().caches)
    found = [array.clone() for array in call(kv_lens, slots)]
    torch.cuda.synchronize()
    assert_equal(found, expected)
    assert_equal(step.caches, caches)


# --- graphs without a compiler -------------------------------------------------------------------


@every_operation
def test_compiled_call_is_the_eager_one(operation: Operation) -> None:
    check_compiled(operation, on_gpu)


@every_plan
def test_halves_are_the_whole(planned: Planned) -> None:
    """A schedule in the graph, or one of a plan beside it."""
    operation = OPERATIONS[planned.operation]
    given = on_gpu(operation.make())
    expected = flat(operation.function(**given))
    attend, both = halves(operation, given)
    workspace = workspace_of(planned)
    for found in compiled(both)(workspace):
        assert_equal(flat(found), expected)
    workspace = workspace_of(planned)
    planned.ready(given, workspace=workspace)
    for found in compiled(attend)(workspace):
        assert_equal(flat(found), expected)


def test_a_workspace_that_is_too_small() -> None:
    given: Arguments = on_gpu(OPERATIONS["mla_decode"].make())
    positional, named = in_graph(OPERATIONS["mla_decode"], given)
    small = torch.zeros(256, dtype=torch.uint8, device="cuda")
    with pytest.raises(ValueError, match=r"^workspace: needs \d+ bytes, got 256; ask workspace_by"):
        torch.ops.cumla.mla_decode_schedule(*positional, **named, workspace=small)


def test_export() -> None:
    kv_lens, slots, expected, _ = eager_results(LENGTHS[0])
    program = torch.export.export(Step(), (kv_lens, slots)).module()
    assert_equal(list(program(kv_lens, slots)), expected)


# --- Inductor ------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("has_workspace", [False, True])
def test_inductor(has_workspace: bool) -> None:
    step = Step(has_workspace=has_workspace)
    for lengths in LENGTHS:
        check_step(step, compiled(step, backend="inductor"), lengths)


@needs_triton
@pytest.mark.parametrize("has_workspace", [False, True])
def test_cuda_graphs(has_workspace: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once they are captured no Python of cumla runs, and other lengths serve."""
    step, calls = Step(has_workspace=has_workspace), []
    arguments_of = binding._arguments

    def noted(*arguments: Any) -> Any:
        calls.append(None)  # no tensors: PyTorch refuses a capture whose memory somebody keeps
        return arguments_of(*arguments)

    monkeypatch.setattr(binding, "_arguments", noted)
    before = counters["inductor"]["cudagraph_skips"]
    replayed = compiled(step, backend="inductor", mode="reduce-overhead")
    for _ in range(3):  # compiled and warmed up, captured, replayed
        check_step(step, replayed, LENGTHS[0])
    assert calls
    assert counters["inductor"]["cudagraph_skips"] == before
    for lengths in LENGTHS:
        calls.clear()
        check_step(step, replayed, lengths)
        assert not calls


@needs_triton
def test_a_cache_that_is_no_buffer_in_cuda_graphs() -> None:
    """Where it is marked as one that stays at its address."""
    step = Step(1)
    cache = step.caches[0].clone()
    torch._dynamo.mark_static_address(cache)

    def write_and_read(cache: Any, rows: Any, slots: Any, kv_lens: Any) -> Any:
        cumla.append_mla_cache(rows, cache, slots)
        return cumla.mla_decode(step.q, cache, step.table, kv_lens).out

    kv_lens = torch.tensor([5, 9, 64], dtype=torch.int32, device="cuda")
    slots = step.table[:, 0].long() * PAGE + kv_lens - 1
    before = counters["inductor"]["cudagraph_skips"]
    replayed = compiled(write_and_read, backend="inductor", mode="reduce-overhead")
    for factor in (1, 2, 3, 4):
        rows = step.rows[0] * factor
        expected = cache.clone()
        found = replayed(cache, rows, slots, kv_lens).clone()
        assert_equal(found, write_and_read(expected, rows, slots, kv_lens))
        assert_equal(cache, expected)
    assert counters["inductor"]["cudagraph_skips"] == before


@needs_triton
def test_batches_share_a_graph() -> None:
    graphs = CompileCounterWithBackend("inductor")
    decode = compiled(lambda *arrays: cumla.mla_decode(*arrays), backend=graphs)
    for batch in (2, 3, 5, 64):
        q = torch.randn(batch, 1, HEADS, 576, device="cuda", dtype=torch.bfloat16)
        cache = torch.randn(batch * 2, PAGE, 576, device="cuda", dtype=torch.bfloat16)
        table = torch.arange(batch * 2, dtype=torch.int32, device="cuda").view(batch, 2)
        kv_lens = torch.arange(batch, dtype=torch.int32, device="cuda") + 30
        for array in (q, cache, table, kv_lens):
            torch._dynamo.mark_dynamic(array, 0)
        assert_equal(decode(q, cache, table, kv_lens), cumla.mla_decode(q, cache, table, kv_lens))
    assert graphs.frame_count == 1


# --- another GPU ---------------------------------------------------------------------------------


@pytest.fixture(params=["the first is current", "it is current"])
def second(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The second GPU, whichever is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(1 if request.param == "it is current" else 0):
        yield torch.device("cuda", 1)


@every_operation
def test_compiled_call_on_the_second_gpu(operation: Operation, second: Any) -> None:
    def there(value: Any) -> Any:
        return torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda a: a.to(second), on_gpu(value)
        )

    current = torch.cuda.current_device()
    check_compiled(operation, there)
    found = flat(compiled(lambda given: operation.function(**given))(there(operation.make())))
    assert all(array.device == second for array in found)
    expected = [a.cpu() for a in flat(operation(**on_first(operation)))]
    assert_equal(
        [a.cpu() for a in found] or None, expected or None
    )  # what is written is compared above
    assert torch.cuda.current_device() == current


def on_first(operation: Operation) -> Arguments:
    with torch.cuda.device(0):
        return dict(on_gpu(operation.make()))


@needs_triton
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_steps_on_the_second_gpu(mode: str, second: Any) -> None:
    """The results, caches and lengths are those of the first GPU."""
    with torch.cuda.device(0):
        steps = [eager_results(lengths) for lengths in LENGTHS]
        fresh = Step().caches
    step = Step(has_workspace=True).to(second)
    step.q, step.rows = step.q.to(second), step.rows.to(second)
    replayed = compiled(step, backend="inductor", mode=mode)
    for _ in range(2):
        for kv_lens, slots, expected, caches in steps:
            step.caches.copy_(fresh)
            found = replayed(kv_lens.to(second), slots.to(second))
            assert all(array.device == second for array in found)
            assert_equal([array.cpu() for array in found], [array.cpu() for array in expected])
            assert_equal(step.caches.cpu(), caches.cpu())
