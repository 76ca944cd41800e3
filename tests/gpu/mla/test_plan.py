# SPDX-License-Identifier: Apache-2.0
"""MLADecodePlan: schedules and their NumPy mirror, several layers, shared buffers, misuse."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

import cumla
from cumla.launch.mla.shape import MLADecodeKey
from cumla.launch.split.plan import BLOCK_TOKENS, TICKET_BYTES
from tests.gpu.tools import pages
from tests.gpu.tools.arrays import bits_of, to_torch
from tests.gpu.tools.cases import Case, by_every_kernel
from tests.gpu.tools.parts import LENGTHS as PARTS_LENGTHS
from tests.gpu.tools.parts import (
    PART,
    PLACE,
    invariant_parts_table,
    invariant_places_table,
    parts_table,
    places_table,
)
from tests.gpu.tools.problem import Problem, make_problem
from tests.gpu.tools.repeats import plan_of

KERNELS = ("schedule", "mla_decode", "mla_decode_swapped")
cp: Any = pytest.importorskip("cupy")


def run_and_check(plan: cumla.MLADecodePlan, problem: Problem) -> None:
    """Run once into poisoned outputs and compare."""
    out, lse = problem.outputs()
    result = plan.run(
        **problem.inputs, softmax_scale=problem.softmax_scale, out=out.array, lse=lse.array
    )
    assert result.out is out.array
    problem.check(out.array, lse.array)
    out.check_guards()
    lse.check_guards()


def bytes_of_ones(nbytes: int) -> Any:
    return cp.full(nbytes, 0xFF, dtype=cp.uint8)


# --- the schedule --------------------------------------------------------------------------------


class OnDevice(NamedTuple):
    """What a plan's buffer holds of its schedule."""

    places: np.ndarray  # (batch,) of PLACE
    parts: np.ndarray  # (parts,) of PART
    tickets: np.ndarray  # their words

    @classmethod
    def of(cls, plan: cumla.MLADecodePlan, buffer: Any) -> OnDevice:
        key, layout = plan.key, plan.key.layout
        host = buffer[: layout.partial_rows].get()
        parts = host[layout.parts : layout.parts + key.parts * PART.itemsize]
        tickets = host[layout.tickets : layout.tickets + key.num_tickets * TICKET_BYTES]
        places = host[layout.places : layout.places + key.batch * PLACE.itemsize]
        return cls(places.view(PLACE), parts.view(PART), tickets.view(np.uint32))

    def check(self, lengths: np.ndarray, key: MLADecodeKey, name: str = "") -> None:
        """Compare with what follows from the NumPy mirror."""
        if key.batch_invariant:
            shape = lengths, key.max_blocks, key.row_groups, key.tiles
            whole = {"most_pieces": key.most_pieces, "at_once": max(key.sm_count // key.tiles, 1)}
            places, parts = invariant_places_table(*shape), invariant_parts_table(*shape, **whole)
        else:
            shape = lengths, key.parts, key.row_groups, key.tiles
            places, parts = places_table(*shape), parts_table(*shape)
        for found, wanted in ((self.places, places), (self.parts, parts)):
            for field in wanted.dtype.names or ():
                np.testing.assert_array_equal(
                    found[field], wanted[field], err_msg=f"{name}: {field}"
                )
        assert not self.tickets.any(), name


LENGTHS = {
    "equal": lambda rng, batch: np.full(batch, 4096),
    "empty": lambda rng, batch: np.zeros(batch),
    "ragged": lambda rng, batch: rng.integers(0, 9000, size=batch),
    "short": lambda rng, batch: rng.integers(0, 70, size=batch),
    "log-normal": lambda rng, batch: rng.lognormal(np.log(6000), 0.8, size=batch),
    "one long": lambda rng, batch: np.where(np.arange(batch) == batch // 2, 131_072, 3),
    "many empty": lambda rng, batch: rng.integers(0, 3, size=batch) // 2 * 5000,
    "empty at the ends": lambda rng, batch: np.where(
        abs(np.arange(batch) - batch // 2) < batch / 4 + 1, 9000, 0
    ),
    "garbage": lambda rng, batch: rng.integers(-(2**31), 2**31 - 1, size=batch),
    "largest": lambda rng, batch: np.full(batch, 2**31 - 1),
}


def update_and_check(
    plan: cumla.MLADecodePlan, buffer: Any, lengths: np.ndarray, name: str
) -> None:
    """Compute a schedule into a buffer that holds no value which could be meant."""
    lengths = np.asarray(lengths).astype(np.int32)
    buffer[: plan.key.layout.partial_rows] = 0x77
    plan.update(cp.asarray(lengths))
    OnDevice.of(plan, buffer).check(lengths, plan.key, name)


@pytest.mark.parametrize("batch", [1, 2, 66, 128, 200, 256, 257, 1000, 1024, 2000, 5000])
@pytest.mark.parametrize(
    ("q_len", "heads", "kv_heads"),
    [(1, 16, 1), (2, 16, 1), (3, 16, 1), (1, 64, 1), (2, 128, 1), (1, 64, 8), (4, 128, 128)],
)
def test_the_schedule_equals_its_mirror(batch: int, q_len: int, heads: int, kv_heads: int) -> None:
    nbytes = cumla.MLADecodePlan.workspace_bytes(batch, q_len, heads, num_kv_heads=kv_heads)
    buffer = bytes_of_ones(nbytes)
    plan = cumla.MLADecodePlan(batch, q_len, heads, num_kv_heads=kv_heads, workspace=buffer)
    rng = np.random.default_rng(batch)
    for name, make in LENGTHS.items():
        update_and_check(plan, buffer, make(rng, batch), name)


@pytest.mark.parametrize("name", PARTS_LENGTHS)
def test_the_records_of_schedules_of_every_kind(name: str) -> None:
    """The parts are those of this GPU with one row tile, with two, and with many."""
    lengths, parts, row_groups = PARTS_LENGTHS[name]
    batch = len(lengths)
    for q_len, heads in ((1, 16 * row_groups), (1, 128), (66 // min(parts, 66) + 1, 128)):
        nbytes = cumla.MLADecodePlan.workspace_bytes(batch, q_len, heads)
        buffer = bytes_of_ones(nbytes)
        plan = cumla.MLADecodePlan(batch, q_len, heads, workspace=buffer)
        update_and_check(plan, buffer, lengths, name)


def test_strided_lengths_are_read_with_their_stride() -> None:
    spread = cp.full(14, -1, dtype=cp.int32)
    lengths = np.array([5, 70_000, 0, 64, 65, 9, 12_345], dtype=np.int32)
    spread[::2] = cp.asarray(lengths)
    buffer = bytes_of_ones(cumla.MLADecodePlan.workspace_bytes(7, 1, 16))
    plan = cumla.MLADecodePlan(7, 1, 16, workspace=buffer)
    plan.update(spread[::2])
    OnDevice.of(plan, buffer).check(lengths, plan.key)


@pytest.mark.parametrize("batch", [1, 3, 128, 1025, 1500])
@pytest.mark.parametrize(
    ("q_len", "heads", "kv_heads", "max_kv_len"),
    [(1, 16, 1, 9000), (3, 16, 1, 4097), (1, 128, 1, 20_000), (1, 64, 8, 1)],
)
def test_a_batch_invariant_schedule_equals_its_mirror(
    batch: int, q_len: int, heads: int, kv_heads: int, max_kv_len: int
) -> None:
    """Of one thread block and of many, with lengths that are clamped."""
    options = {"num_kv_heads": kv_heads, "batch_invariant": True, "max_kv_len": max_kv_len}
    nbytes = cumla.MLADecodePlan.workspace_bytes(batch, q_len, heads, **options)
    buffer = cp.empty(nbytes, dtype=cp.uint8)
    plan = cumla.MLADecodePlan(batch, q_len, heads, workspace=buffer, **options)
    rng = np.random.default_rng(batch)
    for name, make in LENGTHS.items():
        update_and_check(plan, buffer, make(rng, batch), name)


# --- update and run ------------------------------------------------------------------------------


def test_a_step_of_several_layers_and_then_longer_steps() -> None:
    """One update a step serves all layers; lengths grow over page ends, and jump."""
    case = Case(batch=5, q_len=2, heads=32, kv_len=5000)
    start = np.array([63, 64, 4999, 0, 700])
    layers = [
        make_problem(cp, Case(**{**vars(case), "seed": seed}), start + 200) for seed in range(3)
    ]
    plan = plan_of(layers[0])
    for step in (0, 1, 2, 65, 200):
        lengths = (start + step).astype(np.int32)
        shared = cp.asarray(lengths)
        plan.update(shared)
        for layer in layers:
            layer.lengths, layer.kv_lens = lengths, shared
            run_and_check(plan, layer)


def test_the_lengths_of_the_last_update_count() -> None:
    problem = make_problem(cp, Case(batch=3), np.array([500, 20, 3000]))
    updated = np.array([130, 20, 2500], dtype=np.int32)
    lengths = cp.array(updated)
    plan = plan_of(problem)
    plan.update(lengths)
    lengths[...] = problem.kv_lens  # changed since: not what this run attends to
    out, lse = problem.outputs()
    plan.run(**problem.inputs, out=out.array, lse=lse.array)
    problem.check(out.array, lse.array, problem.expected(updated))


@pytest.mark.parametrize("page_size", [64, 1, 16, 128])
@pytest.mark.parametrize("heads", [16, 32, 80])
def test_lengths_that_the_table_cannot_hold_are_safe(heads: int, page_size: int) -> None:
    """A table too small for the lengths of the update."""
    problem = make_problem(cp, Case(batch=3, heads=heads), np.array([256, 256, 256]))
    if page_size != BLOCK_TOKENS:
        problem = pages.moved(problem, page_size)
    plan = plan_of(problem)
    plan.update(cp.asarray(np.array([100_000, 2**31 - 1, -3], dtype=np.int32)))
    problem.block_table = problem.block_table[:, : 256 // page_size]
    out, lse = problem.outputs()
    plan.run(**problem.inputs, out=out.array, lse=lse.array)
    problem.check(out.array, lse.array, problem.expected(np.array([256, 256, 0])))
    out.check_guards()
    lse.check_guards()


@pytest.mark.parametrize("heads", [5, 20, 40])
@pytest.mark.parametrize("causal", [True, False])
def test_a_plan_gives_the_bits_of_a_call(causal: bool, heads: int) -> None:
    """And so does a plan that is pinned to the kernel of the shape."""
    problem = make_problem(cp, Case(batch=4, q_len=3, heads=heads, kv_len=3000, causal=causal))
    plan = plan_of(problem)
    pinned = plan_of(problem, plan.key.variant)
    without = cumla.mla_decode(*problem.arrays, causal=causal)
    for planned in (plan, pinned):
        planned.update(problem.kv_lens)
        for one, other in zip(planned.run(**problem.inputs), without, strict=True):
            assert bool((bits_of(one) == bits_of(other)).all())
    problem.check(*without)


def test_plans_share_a_workspace_full_of_garbage() -> None:
    """Each is updated before it runs; what another plan left there does not matter."""
    problems = [
        make_problem(cp, Case(batch=2, heads=128, kv_len=9000)),
        make_problem(cp, Case(batch=7, heads=16, q_len=2, kv_len=1000, dtype="float16")),
        make_problem(cp, Case(batch=1, heads=8, kv_heads=8, kv_len=4096, ragged=False)),
    ]
    sizes = [
        cumla.MLADecodePlan.workspace_bytes(
            p.case.batch, p.case.q_len, p.case.heads, num_kv_heads=p.case.kv_heads
        )
        for p in problems
    ]
    guard = 4096
    buffer = bytes_of_ones(max(sizes) + guard)
    workspace = buffer[: max(sizes)]
    plans = [plan_of(problem, workspace=workspace) for problem in problems]
    for _ in range(2):
        for plan, problem in zip(plans, problems, strict=True):
            plan.update(problem.kv_lens)
            run_and_check(plan, problem)
    assert bool((buffer[-guard:] == 0xFF).all()), "memory behind the workspace was written"


GARBAGE_WORDS = (
    lambda rng, size, batch, parts: rng.integers(0, batch + 1, size),
    lambda rng, size, batch, parts: rng.integers(0, parts, size),  # meetings of anybody with all
    lambda rng, size, batch, parts: rng.integers(-3, 50, size) & 0xFFFFFFFF,
    lambda rng, size, batch, parts: rng.integers(0, 1 << 32, size),
    # counters just before they turn, notes of those that have left
    lambda rng, size, batch, parts: rng.choice(
        np.array([0, 1, 2, 1 << 31, (1 << 31) - 1, (1 << 31) - 2, (1 << 32) - 1]), size
    ),
)


GARBAGE_CASES = {
    "several requests": Case(batch=3, heads=32, kv_len=3000),
    "several requests, few rows": Case(batch=3, heads=5, q_len=3, kv_len=3000),
    "one request": Case(batch=1, heads=16, kv_len=40_000, ragged=False),
    "row tiles": Case(batch=4, heads=128, q_len=2, kv_len=1000, dtype="float16"),
    # one part, no partial results
    "one part": Case(batch=2, heads=128, kv_heads=128, q_len=4, kv_len=300),
    "batch-invariant": Case(batch=5, heads=16, kv_len=3000),
    "pages of 1": Case(batch=3, heads=5, q_len=3, kv_len=3000),
    "pages of 16": Case(batch=3, heads=5, q_len=3, kv_len=3000),
}
GARBAGE_PAGES = {"pages of 1": 1, "pages of 16": 16}


@pytest.mark.parametrize(("name", "variant"), by_every_kernel(GARBAGE_CASES))
def test_garbage_in_the_buffer_leads_nowhere(name: str, variant: str) -> None:
    """As if another plan had written there since the update: nothing but the outputs suffers."""
    case = GARBAGE_CASES[name]
    mode: dict[str, Any] = {}
    if name == "batch-invariant":
        mode = {"batch_invariant": True, "max_kv_len": 3000}
    problem = make_problem(cp, case)
    if name in GARBAGE_PAGES:
        problem = pages.moved(problem, GARBAGE_PAGES[name])
    nbytes = cumla.MLADecodePlan.workspace_bytes(
        case.batch, case.q_len, case.heads, num_kv_heads=case.kv_heads, **mode
    )
    guard = 4 << 20
    buffer = bytes_of_ones(nbytes + guard)
    plan = plan_of(problem, variant, workspace=buffer[:nbytes], **mode)
    layout = plan.key.layout
    pieces = buffer[layout.partial_rows : nbytes].view(np.uint32)
    before = [problem.q_bits.copy(), problem.kv_bits.copy()]
    out, lse = problem.outputs()
    rng = np.random.default_rng(1)
    for garbage in GARBAGE_WORDS * 2:
        for begin, end in (
            (0, layout.partial_rows),
            (layout.places, layout.parts),
            (layout.parts, layout.tickets),
            (layout.tickets, layout.partial_rows),
        ):
            plan.update(problem.kv_lens)
            words = buffer[begin:end].view(np.uint32)
            words.set(garbage(rng, words.size, case.batch, plan.key.parts).astype(np.uint32))
            pieces[...] = 0x7FC00001  # NaN, or lengths and counters beyond all bounds
            plan.run(**problem.inputs, out=out.array, lse=lse.array)
            plan.run(**problem.inputs, out=out.array, lse=lse.array)  # with what the first one left
            cp.cuda.Device().synchronize()
            out.check_guards()
            lse.check_guards()
            assert bool((buffer[nbytes:] == 0xFF).all()), "memory behind the workspace was written"
    for bits, copy in zip((problem.q_bits, problem.kv_bits), before, strict=True):
        assert bool((bits == copy).all())
    plan.update(problem.kv_lens)
    run_and_check(plan, problem)


def test_workspace_bytes_is_what_a_plan_allocates() -> None:
    plan = cumla.MLADecodePlan(3, 2, 48, num_kv_heads=3)
    nbytes = cumla.MLADecodePlan.workspace_bytes(3, 2, 48, num_kv_heads=3)
    assert nbytes == plan.key.layout.nbytes
    with pytest.raises(ValueError, match=r"workspace: needs \d+ bytes.*workspace_bytes"):
        cumla.MLADecodePlan(3, 2, 48, num_kv_heads=3, workspace=bytes_of_ones(nbytes - 1))


def test_a_torch_plan_lives_in_torch_memory() -> None:
    torch = pytest.importorskip("torch")
    problem = make_problem(cp, Case(batch=2, kv_len=2000))
    cp.cuda.Device().synchronize()
    q, kv, table, lengths = (to_torch(torch, array) for array in problem.arrays)

    def allocated() -> int:
        """All bytes so far, given back or not: buffers of other tests may go meanwhile."""
        return int(torch.cuda.memory_stats()["allocated_bytes.all.allocated"])

    before = allocated()
    plan = cumla.MLADecodePlan.from_arrays(q, kv)
    assert allocated() - before >= plan.key.layout.nbytes
    plan.update(lengths)
    out, lse = plan.run(q, kv, block_table=table)
    torch.cuda.synchronize()
    problem.check(cp.from_dlpack(out.view(torch.int16)).view(problem.q.dtype), cp.from_dlpack(lse))


# --- misuse --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 3}, "plan: made for batch 2, got batch 3; make a plan"),
        ({"q_len": 2}, "plan: made for"),
        ({"heads": 32}, "plan: made for"),
        ({"kv_heads": 2}, "plan: made for"),
        ({"dtype": "float16"}, "plan: made for dtype bfloat16, got dtype float16; make"),
    ],
)
def test_a_plan_of_another_shape(change: dict[str, Any], message: str) -> None:
    problem = make_problem(cp, Case())
    plan = plan_of(problem)
    plan.update(problem.kv_lens)
    other = make_problem(cp, Case(**change))
    with pytest.raises(ValueError, match=message):
        plan.run(**other.inputs)
    run_and_check(plan, problem)


def test_a_plan_that_was_never_updated() -> None:
    problem = make_problem(cp, Case())
    with pytest.raises(ValueError, match=r"never updated; call plan\.update"):
        plan_of(problem).run(**problem.inputs)


def test_a_plan_on_another_stream_than_its_update() -> None:
    problem = make_problem(cp, Case())
    plan = plan_of(problem)
    plan.update(problem.kv_lens)
    stream = cp.cuda.Stream(non_blocking=True)
    out, lse = problem.outputs()
    plan.run(**problem.inputs, out=out.array, lse=lse.array, stream=stream)
    stream.synchronize()
    problem.check(out.array, lse.array)


def test_arrays_on_the_cpu_with_a_plan_of_the_gpu() -> None:
    problem, host = make_problem(cp, Case()), make_problem(np, Case())
    plan = plan_of(problem)
    plan.update(problem.kv_lens)
    with pytest.raises(ValueError, match="plan: made for CUDA device 0, got arrays on the CPU"):
        plan.run(**host.inputs)
    with pytest.raises(ValueError, match="plan: made for CUDA device 0, got arrays on the CPU"):
        plan.update(host.kv_lens)
