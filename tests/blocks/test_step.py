# SPDX-License-Identifier: Apache-2.0
"""`cumla.BlockSparseStep` on the CPU, against the three functions that it consists of; what it
refuses; and what it launches, allocates and keeps on a GPU that is not there."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import numpy as np
import pytest

import cumla
from cumla.core.spec import SPECS
from tests.blocks.step_cases import SUMS, Case
from tests.calls import Refusal, all_of, refused, wrong, wrong_type
from tests.emulator import emulated_gpu
from tests.fake_cuda import FakeBindings, FakeCuPy, FakeDriver

ONE, DRAFTS, RAGGED = Case(), Case(q_len=3), Case(q_len=0)
SHARED, WIDE = Case(index_heads=1), Case(q_len=2, block_size=32, init_blocks=1)
FEW = Case(q_len=2, index_dim=128, causal=False)  # block_scores_few
CASES = pytest.mark.parametrize(
    "case",
    [ONE, DRAFTS, RAGGED, SHARED, WIDE, FEW, *SUMS],
    ids=[
        *("one", "drafts", "ragged", "shared", "wide", "few", "sums-few"),
        *("sums-prompts", "sums-ragged", "sums-drafts", "sums-of-all-heads", "sums-of-blocks"),
    ],
)


def assert_same(got: Any, want: Any) -> None:
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", ["0", "1"])
@CASES
def test_the_step_is_its_three_parts(
    case: Case, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUMLA_CHECK", check)
    given = case.arguments()
    step = case.step(given)
    for lens in (case.lens, case.lens + 1, np.maximum(case.lens - 31, 0), case.lens):
        lengths = given | {"kv_lens": lens}
        want = case.expected(lengths)
        case.update(step, lengths)
        assert step.blocks is None
        for _ in range(2):
            assert case.select(step, given) is step.blocks
            got = case.run(step, given)
            assert_same((step.blocks, *got), want)


def test_layers_that_share_a_choice() -> None:
    given, other = ONE.arguments(), ONE.arguments(seed=1)
    step = ONE.step(given)
    ONE.update(step, given)
    lists = ONE.select(step, given).copy()
    want = ONE.attend(other, lists)
    assert_same(ONE.run(step, other), want)
    ONE.select(step, other)
    assert not np.array_equal(step.blocks, lists)
    assert_same(ONE.run(step, other, blocks=lists), want)


def test_a_step_keeps_the_lengths() -> None:
    given = RAGGED.arguments()
    step, want = RAGGED.step(given), RAGGED.expected(given)
    RAGGED.update(step, given)
    for name in ("kv_lens", "qo_indptr"):
        given[name][:] = 0
    RAGGED.select(step, given)
    assert_same((step.blocks, *RAGGED.run(step, given)), want)


def test_no_tokens() -> None:
    given = RAGGED.arguments()
    given |= {name: given[name][:0] for name in ("q", "index_q")}
    given["qo_indptr"] = np.zeros(4, np.int32)
    step = RAGGED.step(given)
    RAGGED.update(step, given)
    assert RAGGED.select(step, given).shape == (0, 2, 4)
    assert RAGGED.run(step, given).out.shape == (0, 8, 64)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_frameworks(framework: str) -> None:
    module = pytest.importorskip(framework)
    convert = module.from_numpy if framework == "torch" else module.numpy.asarray
    for case in (ONE, RAGGED):
        host = case.arguments()
        given = {n: convert(v) if isinstance(v, np.ndarray) else v for n, v in host.items()}
        step = case.step(given)
        case.update(step, given)
        blocks = case.select(step, given)
        state = case.run(step, given)
        assert type(blocks) is type(state.out) is type(given["q"])
        assert_same((blocks, *state), case.expected(host))


@pytest.mark.exhaustive
@CASES
def test_the_kernels_make_the_step(case: Case) -> None:
    """Their own text, on the CPU."""
    host = case.arguments()
    with emulated_gpu() as cupy:
        given = {n: cupy.like(v) for n, v in host.items()}
        step = case.step(given)
        for lens in (case.lens, np.maximum(case.lens - 40, 0)):
            given["kv_lens"] = cupy.like(lens)
            case.update(step, given)
            blocks, out, lse = case.expected(host | {"kv_lens": lens})
            np.testing.assert_array_equal(case.select(step, given), blocks)
            state = case.run(step, given)
            np.testing.assert_allclose(state.out.astype("f4"), out.astype("f4"), atol=2**-9)
            np.testing.assert_allclose(state.lse, lse, rtol=1e-5, atol=1e-5)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, pickle.dumps])
def test_no_copies(again: Any) -> None:
    step = ONE.step(ONE.arguments())
    with pytest.raises(TypeError, match=r"^BlockSparseStep: a plan cannot be copied or pickled"):
        again(step)


def test_arguments_are_those_of_the_functions() -> None:
    """Their specs list what a call takes, and the attention's plan what a step is made of."""
    scores, attend = SPECS["block_scores"], SPECS["block_sparse_attention"]
    step, plan = cumla.BlockSparseStep, cumla.BlockSparsePlan

    def names(function: Any) -> set[str]:
        return {*inspect.signature(function).parameters} - {"self", "misplaced"}

    def listed(spec: Any) -> set[str]:
        return {a.name for a in spec.arguments} | {"stream"}

    lengths = {"kv_lens", "qo_indptr"}
    of_plan = {"block_size", "causal", "batch_invariant"}
    index = {"q": "index_q", "keys": "index_keys"}
    sums = {"activation", "num_groups", "stride"}
    assert names(step.select) == {
        index.get(n, n)
        for n in listed(scores) - lengths - of_plan - sums - {"block_indices", "out"}
    }
    chosen = {"topk_lens", "indices_are"}  # by the step
    lists = {"block_indices": "blocks"}
    assert names(step.run) == {lists.get(n, n) for n in listed(attend) - lengths - of_plan - chosen}
    assert names(step.update) == names(plan.update)
    own = {"max_pages", "page_size", "index_heads", "num_groups", "stride"}
    forced = {"init_blocks", "local_blocks", "open_block"}
    assert names(step) == names(plan) | own | forced | {"index_dim", "index_dtype", "activation"}
    assert names(step.workspace_bytes) == names(plan.workspace_bytes) | own


def test_arguments_in_the_wrong_place() -> None:
    given = ONE.arguments()
    step = ONE.step(given)
    ONE.update(step, given)
    for name, method, where in (
        ("qo_indptr", "run", "to update"),
        ("index_keys", "run", "to select"),
        ("sinks", "select", "to run"),
        ("v", "update", "to run"),
        ("topk", "run", "when the plan is made"),
        ("local_blocks", "select", "when the plan is made"),
    ):
        with refused(TypeError, f"{name}: needs to be given {where}, got it in {method}; "):
            getattr(ONE, method)(step, given, **{name: 1})


MADE = [
    wrong("block_size", 24, "a multiple of 16 that divides the page size 64, got 24; use pages of"),
    Refusal({"page_size": 40}, ValueError, "block_size: needs a multiple of 16 that divides"),
    wrong("topk", 0, "a number from 1, got 0; there is nothing to select"),
    Refusal(
        {"init_blocks": 2, "local_blocks": 3},
        ValueError,
        "topk: needs at least the 5 forced blocks, got 4; force fewer",
    ),
    wrong("init_blocks", -1, "a number from 0, got -1; pass 0 for none"),
    wrong_type("local_blocks", None, "an int, got NoneType"),
    wrong("index_heads", 4, "2, one for each kv head, or 1 for all, got 4; add heads up by"),
    Refusal({"index_heads": 6, "num_groups": 3}, ValueError, "num_groups: needs 2, one for each"),
    Refusal(
        {"index_heads": 3, "num_groups": 2},
        ValueError,
        "num_groups: needs a divisor of the 3 heads of index_q, and up to",
    ),
    wrong("num_groups", 0, "a number from 1, got 0; leave it out for a score of each head"),
    wrong("stride", 0, "a number from 1, got 0; pass the tokens of a row of keys"),
    wrong("activation", "gelu", "'none' or 'relu', got 'gelu'; pass one of them"),
    Refusal({"stride": 8}, ValueError, "block_size: needs the stride 8, or a multiple of 128"),
    Refusal({"stride": 24, "block_size": 24}, ValueError, "page_size: needs a multiple of the 24"),
    wrong("max_pages", 0, "a number from 1, got 0; pass those of the index's keys"),
    Refusal({"max_pages": 1 << 26}, ValueError, "block_table: needs max_pages * page_size up to"),
    wrong("dtype", "float32", "bfloat16 or float16, got 'float32'"),
    wrong("num_heads", 3, "a multiple of num_kv_heads"),
]


@all_of(MADE)
def test_steps_that_are_refused(refusal: Refusal) -> None:
    with refused(refusal.error, refusal.message):
        cumla.BlockSparseStep(**{**ONE.numbers(), **refusal.changes}, like=np.zeros(1))


def test_arrays_that_do_not_fit() -> None:
    given = ONE.arguments()
    step = ONE.step(given)
    ONE.update(step, given)
    for name, array, message in (
        ("index_q", np.ones((2, 1, 2, 64), np.float16), "index_q: needs the 3 query tokens that"),
        ("index_q", np.ones((3, 1, 1, 64), np.float16), "index_q: needs the 2 heads that the step"),
        ("index_q", np.ones((3, 1, 2, 128), np.float16), "index_keys: needs the 128 columns of"),
        ("index_keys", np.ones((9, 16, 64), np.float16), "index_keys: needs the 64 tokens a page"),
        ("block_table", np.zeros((2, 4), np.int32), "block_table: needs the 3 rows that the step"),
        ("block_table", np.zeros((3, 5), np.int32), "block_table: needs the 4 columns that the"),
    ):
        with refused(ValueError, message):
            ONE.select(step, given | {name: array})
    ONE.select(step, given)
    with refused(ValueError, "weights: needs a step that adds heads up, got one without; make it"):
        ONE.select(step, given, weights=np.ones((3, 2), np.float32))
    with refused(ValueError, "blocks: needs lists for each of the 2 kv heads of k, or one for all"):
        ONE.run(step, given, blocks=np.zeros((3, 3, 4), np.int32))
    with refused(ValueError, "plan: made for topk 4, got topk 5"):
        ONE.run(step, given, blocks=np.zeros((3, 2, 5), np.int32))
    with refused(ValueError, "q: needs the query tokens of index_q, (3, 1), got shape (2, 1, 8"):
        ONE.step(given | {"q": given["q"][:2]})
    heads = np.ones((*given["index_q"].shape[:-2], 6, given["index_q"].shape[-1]), np.float16)
    with refused(ValueError, "index_q: needs 2, one for each kv head, or 1 for all, got 6; add"):
        ONE.step(given | {"index_q": heads})


def test_what_a_step_refuses_before_it_is_made() -> None:
    given = ONE.arguments()
    sizes = {"topk": 4, "block_size": 16}
    arrays = {name: given[name] for name in ("q", "k", "v", "index_q", "index_keys", "block_table")}
    with refused(ValueError, "kv_layout: needs 'NHD' or 'HND', got 'hnd'"):
        cumla.BlockSparseStep.from_arrays(**arrays, **sizes, kv_layout="hnd")
    with refused(ValueError, "local_blocks: needs at least 1 with open_block, whose block has no"):
        cumla.BlockSparseStep.from_arrays(**arrays, **sizes, open_block=True)


def test_a_step_without_an_update_or_a_choice() -> None:
    given = ONE.arguments()
    step = ONE.step(given)
    message = "step: needs an update, got none; call step.update(kv_lens) before"
    for call in (ONE.select, ONE.run):
        with refused(ValueError, message):
            call(step, given)
    ONE.update(step, given)
    with refused(ValueError, "blocks: needs a selection of this step, got none since step.update"):
        ONE.run(step, given)
    with refused(TypeError, "kv_lens: needs int32"):
        ONE.update(step, given | {"kv_lens": given["kv_lens"].astype(np.int64)})
    with refused(ValueError, message):
        ONE.run(step, given)


def test_the_framework_of_a_step() -> None:
    torch = pytest.importorskip("torch")
    given = ONE.arguments()
    step = cumla.BlockSparseStep(**ONE.numbers(), like=torch.zeros(1))
    ONE.update(step, given)
    with refused(TypeError, "index_q: needs an array of torch, as the plan's own ... got numpy"):
        ONE.select(step, given)


# --- on a GPU that is not there -------------------------------------------------------------------


class OnGpu:
    """A step, and the arrays of its calls."""

    def __init__(self, cupy: FakeCuPy, case: Case, **options: Any) -> None:
        self.case = case
        self.given = {n: cupy.like(v) for n, v in case.arguments().items()}
        q = self.given["q"]
        self.results = {"out": cupy.like(np.zeros(q.shape, np.float16))}
        self.results["lse"] = cupy.like(np.zeros(q.shape[:-1], np.float32))
        self.step = case.step(self.given, **options)

    def go(self, layers: int = 1, **options: Any) -> None:
        self.case.update(self.step, self.given, **options)
        for _ in range(layers):
            self.case.select(self.step, self.given, **options)
            self.case.run(self.step, self.given, **self.results, **options)


@CASES
def test_a_captured_step_allocates_nothing(
    case: Case, cupy: FakeCuPy, bindings: FakeBindings, driver: FakeDriver
) -> None:
    """And prepare() has loaded all that it launches: two launches an update, three a layer."""
    gpu = OnGpu(cupy, case)
    cumla.prepare(gpu.step)
    loaded, allocated = list(cupy.compiled), list(cupy.allocated)
    driver.capturing.add(0)
    gpu.go(layers=2)
    launched = bindings.entries
    driver.capturing.clear()
    assert launched[:2] == ["block_rows"] * 2
    assert launched[2:5] == launched[5:]
    scores = {FEW: "few_float16", SUMS[0]: "pooled_float16_128", SUMS[1]: "prompts_few_float16"}
    scores |= dict.fromkeys(SUMS[2:], "sums_float16_64")
    assert launched[2:5] == [
        f"block_scores_{scores.get(case, 'float16_64')}",
        "select_blocks_float32_256",
        "block_attention_gathered_float16_128x2",
    ]
    for _ in range(2):
        gpu.go(layers=2)
        assert bindings.entries == launched
    assert (cupy.compiled, cupy.allocated) == (loaded, allocated)


def test_another_stream(cupy: FakeCuPy, bindings: FakeBindings, driver: FakeDriver) -> None:
    """Each call comes after all work of the step on the stream before, whichever that was."""
    gpu = OnGpu(cupy, ONE)
    gpu.go()
    for stream, before in ((5, 0), (7, 5)):
        driver.waits.clear()
        bindings.launched.clear()
        ONE.select(gpu.step, gpu.given, stream=stream)
        assert (stream, before) in driver.waits
        ONE.run(gpu.step, gpu.given, **gpu.results, stream=stream)
        assert {launch.stream for launch in bindings.launched} == {stream}
    driver.waits.clear()
    gpu.go(stream=9)
    assert set(driver.waits) == {(9, 7)}


def test_only_a_graph_has_computed_an_update(
    cupy: FakeCuPy, bindings: FakeBindings, driver: FakeDriver
) -> None:
    gpu = OnGpu(cupy, ONE)
    cumla.prepare(gpu.step)
    driver.capturing.add(0)
    gpu.go()
    driver.capturing.clear()
    count = len(bindings.launched)
    with refused(ValueError, "plan: its last update was captured into a CUDA graph"):
        ONE.select(gpu.step, gpu.given)
    assert len(bindings.launched) == count
    assert not gpu.step.serves(0)


@CASES
def test_a_workspace_holds_all(case: Case, cupy: FakeCuPy, bindings: FakeBindings) -> None:
    sizes = {n: v for n, v in case.numbers().items() if n in case.SIZES}
    size = cumla.BlockSparseStep.workspace_bytes(**sizes, sm_count=132)
    memory = cupy.ndarray((size,), "uint8")
    with refused(ValueError, f"workspace: needs {size} bytes, got {size - 1}; ask workspace_bytes"):
        OnGpu(cupy, case, workspace=cupy.ndarray((size - 1,), "uint8"))
    steps = [OnGpu(cupy, case, workspace=memory) for _ in range(2)]
    cupy.allocated.clear()
    for one in steps:
        one.go()
        blocks = one.step.blocks.data.ptr
        assert memory.data.ptr <= blocks < memory.data.ptr + size
    assert cupy.allocated == []
    assert (steps[0].step.serves(0), steps[1].step.serves(0)) == (False, True)
    for use in (case.select, case.run):
        with refused(ValueError, "plan: its workspace has been taken by another plan"):
            use(steps[0].step, steps[0].given)


@CASES
def test_numbers_make_the_step_of_arrays(
    case: Case, cupy: FakeCuPy, bindings: FakeBindings
) -> None:
    gpu = OnGpu(cupy, case)
    gpu.go()
    launched, allocated = bindings.entries, list(cupy.allocated)
    cupy.allocated.clear()
    gpu.step = cumla.BlockSparseStep(**case.numbers())
    gpu.go()
    assert (bindings.entries, cupy.allocated) == (launched, allocated)


def test_a_step_serves_one_device(cupy: FakeCuPy, bindings: FakeBindings) -> None:
    gpu = OnGpu(cupy, ONE)
    with refused(ValueError, "plan: made for CUDA device 0, got arrays on the CPU; copy them"):
        gpu.step.update(ONE.lens)
    assert bindings.entries == []
