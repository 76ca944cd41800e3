# SPDX-License-Identifier: Apache-2.0
"""`cumla.DSAPlan` on the CPU, against the three references that it is made of; what it refuses; and
what it launches, allocates and keeps on a GPU that is not there."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import numpy as np
import pytest

import cumla
from cumla.core import _lifetime
from cumla.core.spec import SPECS
from tests.calls import BF16, E4M3, Refusal, all_of, int32, numbers, refused, wrong, wrong_type
from tests.emulator import emulated_gpu
from tests.fake_cuda import FakeBindings, FakeCuPy, FakeDriver
from tests.sparse.dsa_cases import ATTENDED, MADE_OF, SELECTED_FROM, Step, attended, window_of

STEP, STEP_2 = Step(), Step(q_len=2)
V4, V4_2 = (Step(q_len=q_len, v4=True, window=11) for q_len in (1, 2))
CAPACITY, TOPK = STEP.capacity, STEP.topk
LENS = int32(57, 9, 33)  # most of a table, fewer than topk, one after the end of a page


def plan_of(given: dict[str, Any], topk: int = TOPK, **options: Any) -> cumla.DSAPlan:
    options = window_of(given) | options
    return cumla.DSAPlan.from_arrays(
        **{name: given[name] for name in MADE_OF}, topk=topk, **options
    )


def select(plan: cumla.DSAPlan, given: dict[str, Any], **options: Any) -> Any:
    return plan.select(**{name: given[name] for name in SELECTED_FROM}, **options)


def run(plan: cumla.DSAPlan, given: dict[str, Any], **options: Any) -> Any:
    return plan.run(**{name: given[name] for name in ATTENDED}, **window_of(given) | options)


def step(plan: cumla.DSAPlan, given: dict[str, Any], kv_lens: Any, **lengths: Any) -> Any:
    """Indices, out and lse of a layer."""
    plan.update(kv_lens, **lengths)
    indices = select(plan, given)
    return np.array(indices), *run(plan, given)


def assert_same(got: Any, want: Any) -> None:
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, pickle.dumps])
def test_no_copies(again: Any) -> None:
    """Both would share the plans that it is made of."""
    plan = plan_of(STEP.arguments())
    with pytest.raises(TypeError, match=r"^DSAPlan: a plan cannot be copied or pickled, .* make"):
        again(plan)


def test_arguments_are_those_of_the_functions() -> None:
    """Their specs list what a call takes, and their plans what a plan is made of."""
    paged, attend = SPECS["paged_mqa_logits"], SPECS["mla_sparse_decode"]

    def names(function: Any) -> set[str]:
        return {*inspect.signature(function).parameters} - {"self", "misplaced"}

    def listed(spec: Any) -> set[str]:
        return {a.name for a in spec.arguments if a.name not in spec.planned} | {"stream"}

    index = {"q": "index_q", "kv_cache": "index_cache", "weights": "index_weights"}
    index |= {"num_heads": "index_heads", "head_dim": "index_dim"}
    index |= {"cache_format": "index_cache_format"}
    plan, of_logits, of_lists = cumla.DSAPlan, cumla.PagedMQALogitsPlan, cumla.MLASparsePlan
    chosen = {"max_kv_len", "logits_dtype", "clean", "cache_format", "out"}  # by the plan
    assert names(plan.select) == {index.get(n, n) for n in listed(paged) - chosen}
    decided = {"row_to_request", "batch_invariant", "indices_are"}  # by the plan
    decided |= {"cache_format", "extra_cache_format"}
    assert names(plan.run) == listed(attend) - decided
    lengths = {*paged.planned, *attend.planned} - {"topk_lens"}  # which follow
    assert names(plan.update) == lengths | {"stream"}
    for of in (lambda kind: kind, lambda kind: kind.workspace_bytes):
        numbers = {index.get(n, n) for n in names(of(of_logits))} | names(of(of_lists))
        assert names(of(plan)) == numbers | {"max_kv_len"}


@pytest.mark.parametrize("of", [STEP, V4_2], ids=["s1", "v4-s2"])
def test_batch_invariant_plans_cut_lists_at_fixed_positions(
    of: Step, cupy: FakeCuPy, bindings: FakeBindings
) -> None:
    """The attention of the step does, by numbers and by arrays; memory is told for it."""
    numbers, given = of.numbers(), of.arguments()
    made = cumla.DSAPlan(**numbers, batch_invariant=True)
    same = plan_of({n: cupy.like(a) for n, a in given.items()}, of.topk, batch_invariant=True)
    for plan in (made, same):
        assert plan._attend_plan.key.batch_invariant
    plan = cumla.DSAPlan(**numbers, batch_invariant=True, like=given["index_q"])
    assert_same(step(plan, given, LENS), of.expected(given, LENS))
    long = numbers | {"topk": 16_384, "max_pages": 16_384 // of.page, "num_heads": 16}
    size = [
        cumla.DSAPlan.workspace_bytes(**long, batch_invariant=i, sm_count=132)
        for i in (False, True)
    ]
    assert size[0] != size[1]


def test_arguments_in_the_wrong_place() -> None:
    given = STEP.arguments()
    plan = plan_of(given)
    plan.update(LENS)
    for name, method, where in (
        ("extra_topk_lens", "run", "to update"),
        ("index_weights", "run", "to select"),
        ("sinks", "select", "to run"),
        ("kv_cache", "update", "to run"),
        ("topk", "run", "when the plan is made"),
        ("max_kv_len", "select", "when the plan is made"),
    ):
        calls = {
            "run": run,
            "select": select,
            "update": lambda plan, _, **o: plan.update(LENS, **o),
        }
        with refused(TypeError, f"{name}: needs to be given {where}, got it in {method}; "):
            calls[method](plan, given, **{name: 1})
    with pytest.raises(TypeError, match=r"DSAPlan\.run\(\) got an unexpected .* 'colour'"):
        run(plan, given, colour=1)


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", ["0", "1"])
@pytest.mark.parametrize("q_len", [1, 2, 4])
def test_the_step_is_its_three_parts(
    q_len: int, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For lengths that change from step to step, below topk and across the borders of pages."""
    monkeypatch.setenv("CUMLA_CHECK", check)
    of = Step(q_len=q_len)
    given = of.arguments()
    plan = plan_of(given)
    for kv_lens in (LENS, LENS + 1, int32(4, 16, 17), int32(CAPACITY, 15, 20), int32(0, 2, 21)):
        indices, out, lse = step(plan, given, kv_lens)
        assert_same((indices, out, lse), of.expected(given, kv_lens))
        visible = of.visible(kv_lens)
        np.testing.assert_array_equal((indices >= 0).sum(axis=-1), np.minimum(visible, TOPK))
        assert (indices < visible[..., None]).all()


def test_below_topk_it_is_dense_attention() -> None:
    given, kv_lens = STEP_2.arguments(), int32(20, 16, 3)
    _, out, lse = step(plan_of(given), given, kv_lens)
    dense = cumla.mla_decode(given["q"], given["kv_cache"], given["block_table"], kv_lens)
    np.testing.assert_allclose(out.astype("f4"), dense.out.astype("f4"), rtol=2**-8, atol=1e-6)
    np.testing.assert_allclose(lse, dense.lse, rtol=1e-6)


@pytest.mark.parametrize("check", ["0", "1"])
@pytest.mark.parametrize("of", [V4, V4_2], ids=["s1", "s2"])
def test_the_step_of_v4(of: Step, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Selected tokens and a window in one softmax, for lengths of both that change."""
    monkeypatch.setenv("CUMLA_CHECK", check)
    given, sinks = of.arguments(), numbers(4, dtype=np.float32)
    plan = plan_of(given)
    for kv_lens, recent in (
        (LENS, int32(11, 7, 11)),
        (int32(CAPACITY, 0, 21), int32(11, 3, 0)),
        (int32(4, 16, 0), np.arange(of.batch * of.q_len, dtype=np.int32).reshape(3, -1)),
    ):
        options = {"extra_topk_lens": recent}
        plan.update(kv_lens, **options)
        for layer in (given, of.arguments(seed=1)):
            indices = np.array(select(plan, layer))
            want = of.expected(layer, kv_lens, sinks=sinks, **options)
            assert_same((indices, *run(plan, layer, sinks=sinks)), want)
    assert_same(step(plan, given, LENS), of.expected(given, LENS))  # windows that are full


def test_one_cache_of_v4() -> None:
    of = Step(v4=True)
    given = of.arguments()
    assert_same(step(plan_of(given), given, LENS), of.expected(given, LENS))


@pytest.mark.parametrize("of", [STEP_2, V4_2, V4], ids=["v32", "v4", "s1"])
def test_lengths_of_query_tokens(of: Step) -> None:
    """As compressed tokens have them, of which a draft may see as many as the token before."""
    given, most = of.arguments(), 40
    plan = plan_of(given, kv_lens=int32(*[[0] * of.q_len] * 3), max_kv_len=most)
    some = int32([7, 8], [33, 33], [CAPACITY, 0]), int32([2**31 - 1, 20], [-5, 1], [16, 41])
    for kv_lens in (lengths[:, : of.q_len] for lengths in some):
        got = step(plan, given, kv_lens.copy())
        assert_same(got, of.expected(given, kv_lens, most))
        np.testing.assert_array_equal(
            (got[0] >= 0).sum(axis=-1), np.clip(kv_lens, 0, min(most, TOPK))
        )


def test_layers_that_share_a_selection() -> None:
    """They have the last one, or one that is passed."""
    first, second, other = (STEP_2.arguments(seed) for seed in range(3))
    plan = plan_of(first)
    want, *state = step(plan, first, LENS)
    assert_same(run(plan, second), attended(second, want))
    kept = plan.indices.copy()
    changed = select(plan, other)
    assert changed is plan.indices
    assert (changed != want).any()
    assert_same(run(plan, other), STEP_2.expected(other, LENS)[1:])
    assert_same(run(plan, first, indices=kept), state)
    np.testing.assert_array_equal(plan.indices, changed)


def test_a_plan_keeps_the_lengths() -> None:
    given, kv_lens = STEP_2.arguments(), LENS.copy()
    plan = plan_of(given)
    plan.update(kv_lens)
    kv_lens[...] = 1
    assert_same((select(plan, given), *run(plan, given)), STEP_2.expected(given, LENS))


@pytest.mark.parametrize(("most", "topk"), [(40, TOPK), (16, TOPK), (5, TOPK), (1000, 1)])
def test_the_longest_request_of_a_plan(
    most: int, topk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of longer ones the first tokens are seen; the check mode refuses them."""
    of = Step(q_len=2, topk=topk)
    given, seen = of.arguments(), min(most, CAPACITY)
    plan = plan_of(given, topk, max_kv_len=most)
    assert_same(step(plan, given, LENS), of.expected(given, LENS, seen))
    monkeypatch.setenv("CUMLA_CHECK", "1")
    need = f"a length from 0 to max_kv_len = {seen}"
    with refused(ValueError, f"kv_lens[1]: needs {need}, got {seen + 1}; the kernels"):
        plan.update(int32(1, seen + 1, 0))
    with refused(ValueError, f"kv_lens[2]: needs {need}, got -1; the kernels"):
        plan.update(int32(1, 0, -1))


def test_lengths_of_any_number() -> None:
    of = Step(q_len=4)
    given = of.arguments()
    for kv_lens in (int32(-1, -(2**31), 2**31 - 1), int32(2, CAPACITY + 2, 0)):
        assert_same(step(plan_of(given), given, kv_lens), of.expected(given, kv_lens))


def test_no_requests() -> None:
    for of in (STEP_2, V4_2):
        given = of.arguments()
        for name in ("q", "index_q", "index_weights", "block_table", "extra_indices"):
            given |= {name: given[name][:0]} if name in given else {}
        results = step(plan_of(given), given, int32())
        shapes = [array.shape for array in results]
        assert shapes == [(0, 2, TOPK), (0, 2, STEP.heads, 512), (0, 2, STEP.heads)]


def test_caches_and_outputs_and_options_are_those_of_attention() -> None:
    given = Step(packed=True).arguments()
    plan = plan_of(given)
    indices, *state = step(plan, given, LENS)
    assert_same(state, attended(given, indices))
    out, lse = np.empty((3, 1, 4, 512), "f4"), np.empty((3, 1, 4), "f4")
    options = {"sinks": numbers(4, dtype=np.float32), "softmax_scale": 0.1}
    state = run(plan, given, out=out, lse=lse, **options)
    assert (state.out is out, state.lse is lse) == (True, True)
    assert_same(state, attended(given, indices, out=np.empty_like(out), **options))


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_frameworks(framework: str) -> None:
    """Their arrays on the CPU, lengths of another one among them; results are theirs."""
    library = pytest.importorskip(framework)

    def there(array: Any) -> Any:
        if framework == "jax":
            return library.numpy.asarray(array)
        bits = {BF16: (np.int16, "bfloat16"), E4M3: (np.uint8, "float8_e4m3fn")}
        if array.dtype not in bits:
            return library.from_numpy(array)
        as_bits, name = bits[array.dtype]
        return library.from_numpy(array.view(as_bits)).view(getattr(library, name))

    for of in (STEP, STEP_2, V4_2):
        host = of.arguments()
        given = {name: there(array) for name, array in host.items()}
        plan = plan_of(given)
        for kv_lens, lengths in ((LENS, there(LENS)), (LENS + 1, LENS + 1)):
            plan.update(lengths)
            results = (select(plan, given), *run(plan, given))
            for got, want in zip(results, of.expected(host, kv_lens), strict=True):
                assert type(got) is type(given["q"])
                same = there(want)
                assert bool((got == same).all())
                assert got.dtype == same.dtype


# --- what is refused ------------------------------------------------------------------------------

REFUSED = [
    *(wrong("topk", n, f"a number from 1, got {n}; there is nothing to select") for n in (0, -1)),
    *(wrong_type("topk", n, "an int, got") for n in (True, 2.0, "20", None)),
    wrong("max_kv_len", 0, "a number from 1, got 0; leave it out"),
    wrong_type("max_kv_len", 10.5, "an int, got float"),
    wrong("kv_lens", int32(1, 2), "shape (batch,) with batch 3, got (2,); give each request of"),
    *(
        wrong(
            "q",
            np.zeros((*lead, 4, 576), BF16),
            f"shape (batch, q_len, num_heads, 576 or 512) with batch 3 and q_len 1, as index_q "
            f"has, got {(*lead, 4)}"[:-1],
        )
        for lead in ((2, 1), (3, 2), (3,))
    ),
    wrong_type("q", np.zeros((3, 1, 4, 576), "f4"), "bfloat16 or float16, got float32"),
    wrong("kv_cache", np.zeros((4, 16, 2, 576), BF16), "one kv head, got 2; pass the heads"),
    Refusal({"index_q": None}, TypeError, "index_q: needs an array"),
    wrong_type("index_q", np.zeros((3, 1, 8, 32), "f2"), "float8_e4m3fn, or"),
    wrong_type("index_cache", np.zeros((4, 16, 36), "f2"), "uint8, got float16; view its bytes"),
    Refusal({"block_table": int32([0, 1])}, ValueError, "block_table: needs shape (batch, max"),
]


@all_of(REFUSED)
def test_plans_that_are_refused(refusal: Refusal) -> None:
    options = {"topk": TOPK, "max_kv_len": None, "kv_lens": None}
    changed = {name: refusal.changes.get(name, value) for name, value in options.items()}
    with refused(refusal.error, refusal.message):
        plan_of(STEP.arguments() | refusal.changes, **changed)


def test_a_plan_without_an_update_or_a_selection() -> None:
    given = STEP.arguments()
    plan = plan_of(given)
    never = "plan: needs an update, got none; call plan.update(kv_lens)"
    with refused(ValueError, never):
        select(plan, given)
    with refused(ValueError, never):
        run(plan, given)
    with refused(ValueError, never):
        run(plan, given, indices=np.zeros((3, 1, TOPK), np.int32))
    step(plan, given, LENS)
    plan.update(LENS + 1)  # the lists are of the step before
    with refused(ValueError, "indices: needs a selection of this step, got none since plan.upd"):
        run(plan, given)


def test_arrays_of_another_shape() -> None:
    given = STEP.arguments()
    plan = plan_of(given)
    for kv_lens in (int32(1, 2), int32([1], [2], [3])):
        with refused(ValueError, "kv_lens: needs shape (batch,) with batch 3, got"):
            plan.update(kv_lens)
    with refused(TypeError, "kv_lens: needs int32, got int64"):
        plan.update(LENS.astype(np.int64))
    step(plan, given, LENS)
    two = STEP_2.arguments()
    with refused(ValueError, "plan: made for q_len 1, got q_len 2; make"):
        select(plan, two)
    with refused(TypeError, "index_weights: needs float32, got float64; convert it"):
        select(plan, given | {"index_weights": np.zeros((3, 8))})
    with refused(ValueError, "q: needs shape (batch, q_len, num_heads, 576 or 512) with batch 3"):
        run(plan, two)
    with refused(ValueError, "plan: made for q_len 1, got q_len 2; make"):
        run(plan, two, indices=np.zeros((3, 2, TOPK), np.int32))
    with refused(ValueError, f"plan: made for topk {TOPK}, got topk 7; make"):
        run(plan, given, indices=plan.indices[..., :7])
    with refused(ValueError, "plan: made for a cache of bfloat16, got one of packed rows"):
        run(plan, given | {"kv_cache": np.zeros((13, 16, 656), np.uint8)})
    few = f"block_table: needs pages for max_kv_len = {CAPACITY} tokens, got"
    with refused(ValueError, f"{few} 3 of 16, kv_cache's page size; pass the table of kv_cache"):
        run(plan, given | {"block_table": given["block_table"][:, :3]})
    with refused(ValueError, f"{few} 4 of 1, "):  # rows without pages, beside a table of pages
        run(plan, given | {"kv_cache": given["kv_cache"].reshape(-1, 576)})
    with refused(ValueError, "block_table: needs the pages of each request ... got None; pass"):
        run(plan, given | {"block_table": None})


def test_windows_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the words of the plan that attends."""
    given, packed = V4_2.arguments(), Step(q_len=2, packed=True).arguments()
    window = window_of(given)
    with refused(ValueError, "extra_kv_cache: needs a kv_cache in one of the formats 'v4', "):
        plan_of(packed, **window)
    with refused(ValueError, "extra_indices: needed with extra_kv_cache, got None; pass a list"):
        plan_of(given, extra_indices=None)
    with refused(ValueError, "extra_indices: needs shape (batch, q_len, extra_topk) with batch 3"):
        plan_of(given, extra_indices=window["extra_indices"][:2])
    with refused(ValueError, "extra_topk_lens: needs a plan with cache_format 'v4' or"):
        plan_of(packed).update(LENS, extra_topk_lens=LENS)
    plan = plan_of(given)
    with refused(ValueError, "extra_topk_lens: needs shape (batch,) or (batch, q_len) with bat"):
        plan.update(LENS, extra_topk_lens=LENS[:2])
    with refused(ValueError, "plan: needs an update, got none"):
        select(plan, given)  # the indexer's schedule was computed, that of attention was not
    step(plan, given, LENS)
    with refused(ValueError, "plan: made for extra_topk "):
        run(plan, given, extra_kv_cache=None, extra_indices=None)
    monkeypatch.setenv("CUMLA_CHECK", "1")
    with refused(ValueError, "extra_topk_lens[1]: needs a length from 0 to extra_topk = 11, got"):
        plan.update(LENS, extra_topk_lens=int32(11, 12, 0))


def test_lengths_of_query_tokens_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    both = np.stack([LENS, LENS], axis=1)
    plan = plan_of(STEP_2.arguments(), kv_lens=both)
    got = "got (3,); give each query its length, or make a plan for lengths of this shape"
    with refused(ValueError, f"kv_lens: needs shape (batch, q_len) with batch 3, q_len 2, {got}"):
        plan.update(LENS)
    with refused(ValueError, "kv_lens: needs lengths in equal steps of memory, got strides (4, "):
        plan.update(np.asfortranarray(both))
    monkeypatch.setenv("CUMLA_CHECK", "1")
    both[2, 1] = CAPACITY + 1
    with refused(ValueError, f"kv_lens[2, 1]: needs a length from 0 to max_kv_len = {CAPACITY}"):
        plan.update(both)


# --- on a GPU -------------------------------------------------------------------------------------


class OnGpu:
    """A plan, and the arrays of its calls."""

    def __init__(
        self, cupy: FakeCuPy, of: Step = STEP_2, each: bool = False, **options: Any
    ) -> None:
        q_len = of.q_len
        self.given = {n: cupy.like(array) for n, array in of.arguments().items()}
        self.kv_lens = cupy.ndarray((3, q_len), "int32") if each else cupy.like(LENS)
        self.lengths = {"extra_topk_lens": cupy.like(LENS)} if of.window else {}
        self.results = {
            "out": cupy.ndarray((3, q_len, 4, 512), BF16),
            "lse": cupy.ndarray((3, q_len, 4), "float32"),
        }
        self.plan = plan_of(self.given, kv_lens=self.kv_lens, **options)

    def step(self, layers: int = 1, **options: Any) -> None:
        self.plan.update(self.kv_lens, **self.lengths, **options)
        for _ in range(layers):
            select(self.plan, self.given, **options)
            run(self.plan, self.given, **self.results, **options)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("of", [STEP, STEP_2, V4, V4_2], ids=["s1", "s2", "v4-s1", "v4-s2"])
def test_a_captured_step_allocates_nothing(
    of: Step, each: bool, cupy: FakeCuPy, bindings: FakeBindings, driver: FakeDriver
) -> None:
    """And prepare() has loaded all that it launches; a ready step launches the same."""
    gpu = OnGpu(cupy, of, each)
    cumla.prepare(gpu.plan)
    loaded, allocated = list(cupy.compiled), list(cupy.allocated)
    driver.capturing.add(0)
    gpu.step(layers=2)
    launched = bindings.entries
    driver.capturing.clear()
    bounds = 2 if of.window else 1  # of the lists, after what is seen and what is selected
    assert launched.count("bound_rows") == 2 + bounds
    per_layer = 3 if of.window else 4  # V4's kernel looks at the lists itself
    assert launched[-2 * per_layer : -per_layer] == launched[-per_layer:]
    for _ in range(2):
        gpu.step(layers=2)
        assert bindings.entries == launched
    assert (cupy.compiled, cupy.allocated) == (loaded, allocated)


def test_another_stream(cupy: FakeCuPy, bindings: FakeBindings, driver: FakeDriver) -> None:
    """Each call comes after all work of the plan on the stream before, whichever call that was."""
    gpu = OnGpu(cupy)
    gpu.step()
    driver.waits.clear()
    bindings.launched.clear()
    gpu.plan.update(gpu.kv_lens, stream=5)
    assert set(driver.waits) == {(5, 0)}
    driver.waits.clear()
    select(gpu.plan, gpu.given, stream=5)
    run(gpu.plan, gpu.given, **gpu.results, stream=5)
    assert {launch.stream for launch in bindings.launched} == {5}
    assert driver.waits == []
    for stream, before in ((7, 5), (9, 7)):
        bindings.launched.clear()
        select(gpu.plan, gpu.given, stream=stream)
        assert (stream, before) in driver.waits
        run(gpu.plan, gpu.given, **gpu.results, stream=before)  # reads what was selected there
        assert (before, stream) in driver.waits
        run(gpu.plan, gpu.given, **gpu.results, stream=stream)
        assert {launch.stream for launch in bindings.launched} == {before, stream}


@pytest.mark.parametrize("last", ["update", "select", "run"])
def test_a_plan_that_is_dropped_keeps_its_arrays_for_a_side_stream(
    last: str, cupy: FakeCuPy, bindings: FakeBindings, driver: FakeDriver
) -> None:
    """Until an event after the last use has passed, not one before it."""
    gpu = OnGpu(cupy)
    uses = {
        "update": lambda: gpu.plan.update(gpu.kv_lens, stream=5),
        "select": lambda: select(gpu.plan, gpu.given, stream=5),
        "run": lambda: run(gpu.plan, gpu.given, **gpu.results, stream=5),
    }
    for name, use in uses.items():
        before = len(driver.recorded)
        use()
        if name == last:
            break
    driver.event_passed = lambda event: (  # type: ignore[method-assign]
        driver.passed or driver.events[event - 1] < before
    )
    driver.passed = False
    logits = 3 * 2 * CAPACITY * 4
    del gpu.plan
    _lifetime.release_finished()
    assert logits not in cupy.freed
    driver.passed = True
    _lifetime.release_finished()
    assert logits in cupy.freed


def test_a_plan_serves_one_device(cupy: FakeCuPy, bindings: FakeBindings) -> None:
    gpu = OnGpu(cupy)
    with refused(ValueError, "plan: made for CUDA device 0, got arrays on the CPU; copy them"):
        gpu.plan.update(LENS)
    assert bindings.entries == []


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("of", [STEP, V4_2], ids=["s1", "v4-s2"])
def test_numbers_make_the_plan_of_arrays(
    of: Step, each: bool, cupy: FakeCuPy, bindings: FakeBindings
) -> None:
    """On the CPU it gives the same, and on a GPU it launches and allocates the same."""
    given = of.arguments()
    kv_lens = of.visible(LENS) if each else LENS
    plan = cumla.DSAPlan(**of.numbers(each), like=given["index_q"])
    assert_same(step(plan, given, kv_lens), of.expected(given, kv_lens))
    gpu = OnGpu(cupy, of, each)
    gpu.step()
    launched, allocated = bindings.entries, list(cupy.allocated)
    cupy.allocated.clear()
    gpu.plan = cumla.DSAPlan(**of.numbers(each))
    gpu.step()
    assert (bindings.entries, cupy.allocated) == (launched, allocated)
    assert sum(allocated) <= cumla.DSAPlan.workspace_bytes(**of.numbers(each), sm_count=132)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("of", [STEP, STEP_2, V4_2], ids=["s1", "s2", "v4-s2"])
def test_a_workspace_holds_all(
    of: Step, each: bool, cupy: FakeCuPy, bindings: FakeBindings, driver: FakeDriver
) -> None:
    size = cumla.DSAPlan.workspace_bytes(**of.numbers(each), sm_count=132)
    assert cumla.DSAPlan.workspace_bytes(**of.numbers(each)) == size
    memory = cupy.ndarray((size,), "uint8")
    gpu = OnGpu(cupy, of, each)
    gpu.step()
    launched = bindings.entries
    cupy.allocated.clear()
    with refused(ValueError, f"workspace: needs {size} bytes, got {size - 1}; ask workspace_bytes"):
        OnGpu(cupy, of, each, workspace=cupy.ndarray((size - 1,), "uint8"))
    plans = [OnGpu(cupy, of, each, workspace=memory)]
    plans.append(OnGpu(cupy, of, each, workspace=memory))
    plans[1].plan = cumla.DSAPlan(**of.numbers(each), workspace=memory)
    for one in plans:
        one.step()
        assert bindings.entries == launched
        indices = one.plan.indices.data.ptr
        assert memory.data.ptr <= indices < memory.data.ptr + size
        assert indices % 256 == 0
    assert cupy.allocated == []
    assert (plans[0].plan.serves(0), plans[1].plan.serves(0)) == (False, True)
    for use in (select, run):
        with refused(ValueError, "plan: its workspace has been taken by another plan"):
            use(plans[0].plan, plans[0].given)
    plans[0].step(stream=5)  # after all work of the other one
    assert (5, 0) in driver.waits
    assert [one.plan.serves(7) for one in plans] == [True, False]


def test_plans_of_different_shapes_share_a_workspace(
    cupy: FakeCuPy, bindings: FakeBindings
) -> None:
    """They and other plans take turns, although their parts lie elsewhere."""
    steps = STEP, STEP_2, V4
    size = max(cumla.DSAPlan.workspace_bytes(**of.numbers(), sm_count=132) for of in steps)
    memory = cupy.ndarray((size,), "uint8")
    plans = [OnGpu(cupy, of, workspace=memory) for of in steps]
    decode = cumla.MLADecodePlan(3, 1, 16, workspace=memory)
    for _ in range(2):
        for one in plans:
            one.step()
        assert not plans[0].plan.serves(0)
        decode.update(cupy.like(LENS))
        assert not plans[-1].plan.serves(0)


def test_the_framework_of_a_plan() -> None:
    torch = pytest.importorskip("torch")
    given = STEP.arguments()
    plan = cumla.DSAPlan(**STEP.numbers(), like=torch.zeros(1))
    plan.update(LENS)
    with refused(TypeError, "index_q: needs an array of torch, as the plan's own ... got numpy"):
        select(plan, given)


@pytest.mark.exhaustive
@pytest.mark.parametrize("given_memory", [False, True])
@pytest.mark.parametrize("of", [STEP, STEP_2, V4, V4_2], ids=["s1", "s2", "v4-s1", "v4-s2"])
def test_the_kernels_make_the_step(of: Step, given_memory: bool) -> None:
    """Their own text, on the CPU; of V4 with lengths of each query token."""
    host = of.arguments()
    with emulated_gpu() as cupy:
        given = {name: cupy.like(array) for name, array in host.items()}
        options: dict[str, Any] = {"kv_lens": cupy.like(of.visible(LENS) if of.v4 else LENS)}
        if given_memory:
            size = cumla.DSAPlan.workspace_bytes(**of.numbers(each=of.v4), sm_count=132)
            memory = cupy.like(np.zeros(size + 256, np.uint8))
            begin = -memory.ctypes.data % 256
            options["workspace"] = memory[begin : begin + size]
        plan = plan_of(given, **options)
        for kv_lens in (LENS, int32(0, CAPACITY, 21)):
            seen, recent = of.visible(kv_lens) if of.v4 else kv_lens, int32(11, 0, 4)
            there = {"extra_topk_lens": cupy.like(recent)} if of.v4 else {}
            plan.update(cupy.like(seen), **there)
            lengths = {"extra_topk_lens": recent} if of.v4 else {}
            indices, out, lse = of.expected(host, seen, **lengths)
            np.testing.assert_array_equal(select(plan, given), indices)
            state = run(plan, given)
            np.testing.assert_allclose(state.out.astype("f4"), out.astype("f4"), atol=2**-6)
            np.testing.assert_allclose(state.lse, lse, rtol=1e-6)
