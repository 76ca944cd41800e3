# SPDX-License-Identifier: Apache-2.0
"""DSAPlan on a GPU against the three references one by one: selections exactly, whose scores are
exact everywhere, and attention within its tolerance."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumla
from tests.calls import E4M3, int32
from tests.gpu.tools import kernels
from tests.gpu.tools.arrays import bits_of, from_torch, to_torch
from tests.gpu.tools.problem import Guarded
from tests.mla.tolerance import assert_close_lse, assert_close_out
from tests.sparse.dsa_cases import ATTENDED, MADE_OF, SELECTED_FROM, Step, attended, window_of

KERNELS = (
    "select_rows",
    "top_k",
    "mla_sparse",
    "mla_sparse_fp8",
    "mla_sparse_packed",
    "mla_sparse_v4",
)
cp: Any = pytest.importorskip("cupy")

SMALL = Step(topk=100, heads=16, page=64, pages=8, index_heads=64, dim=128, packed=True, q_len=2)
WIDE: dict[str, Any] = {"page": 64, "index_heads": 64, "dim": 128, "v4": True, "window": 128}
SMALL_V4 = Step(topk=100, heads=16, pages=8, q_len=2, **WIDE)
LONG = Step(topk=2048, heads=16, page=64, pages=300, index_heads=64, dim=128, packed=True, q_len=2)
LENS = int32(500, 65, 256)


def on_gpu(array: np.ndarray) -> Any:
    """A copy; CuPy has no e4m3."""
    if array.dtype == ml_dtypes.float8_e4m3fn:
        return cp.asarray(array.view(np.uint8))
    return cp.asarray(array.view(f"u{array.itemsize}")).view(array.dtype)


class Layers:
    """Layers of a model on the GPU, with outputs in NaN between guards."""

    def __init__(self, of: Step, count: int = 1) -> None:
        self.of = of
        self.host = [of.arguments(seed) for seed in range(count)]
        self.given = [{n: on_gpu(a) for n, a in host.items()} for host in self.host]
        lead = of.batch, of.q_len
        dtype = str(self.host[0]["q"].dtype)
        self.outs = [Guarded(cp, (*lead, of.heads, 512), dtype) for _ in self.host]
        self.lses = [Guarded(cp, (*lead, of.heads), "float32") for _ in self.host]
        self.indices = [cp.full((*lead, of.topk), -7, np.int32) for _ in self.host]

    def plan(self, **options: Any) -> cumla.DSAPlan:
        options |= {"topk": self.of.topk, **window_of(self.given[0])}
        return cumla.DSAPlan.from_arrays(**{n: self.given[0][n] for n in MADE_OF}, **options)

    def run(
        self,
        plan: cumla.DSAPlan,
        kv_lens: Any,
        shared: int = -1,
        sinks: Any = None,
        recent: Any = None,
        **options: Any,
    ) -> None:
        """A step, with windows of `recent` tokens; the layer `shared` selects as the one before."""
        plan.update(kv_lens, extra_topk_lens=recent, **options)
        for layer, given in enumerate(self.given):
            if layer != shared:
                plan.select(**{name: given[name] for name in SELECTED_FROM}, **options)
            out, lse = self.outs[layer].array, self.lses[layer].array
            more = {"sinks": sinks, **window_of(given), **options}
            plan.run(**{name: given[name] for name in ATTENDED}, out=out, lse=lse, **more)
            self.indices[layer][...] = plan.indices

    def check(self, kv_lens: np.ndarray, shared: int = -1, **options: Any) -> None:
        """Compare all layers, and make their outputs NaN again."""
        for layer, host in enumerate(self.host):
            source = self.host[layer - (layer == shared)]
            indices = self.of.selected(source, kv_lens)
            np.testing.assert_array_equal(self.indices[layer].get(), indices)
            out, lse = self.outs[layer], self.lses[layer]
            self.compare(host, indices, out.array, lse.array, **options)
            for guarded in (out, lse):
                guarded.check_guards()
                guarded.repoison()

    def compare(
        self, host: dict[str, Any], indices: np.ndarray, out: Any, lse: Any, **options: Any
    ) -> None:
        exact = np.empty(out.shape, np.float32)
        want = attended(host, indices, out=exact, **options)
        bits = out.view(np.uint16).get().view(out.dtype)
        assert_close_out(bits, want.out, visible_v_rms=1.0)
        assert_close_lse(lse.get(), want.lse)


STEPS = (
    Step(topk=2048, heads=128, page=64, pages=80, index_heads=64, dim=128, packed=True),
    Step(topk=2048, heads=16, page=64, pages=80, index_heads=64, dim=128, packed=True, q_len=2),
    Step(topk=512, heads=64, page=64, pages=20, index_heads=32, dim=128, q_len=4),
    Step(topk=77, heads=8, page=16, pages=30, index_heads=8, dim=32, dtype=np.dtype("f2")),
    Step(topk=300, heads=16, page=64, pages=20, index_heads=64, dim=128, v4=True),
)
V4_STEPS = (
    Step(topk=512, heads=64, pages=80, **WIDE),
    Step(topk=1024, heads=128, pages=40, q_len=2, **WIDE),
    Step(topk=512, heads=16, pages=20, q_len=4, **WIDE),
    Step(topk=77, heads=8, page=16, pages=30, v4=True, window=70),
)


@pytest.mark.parametrize("of", STEPS, ids=lambda of: f"h{of.heads}-s{of.q_len}-k{of.topk}")
def test_steps(of: Step) -> None:
    """Contexts around topk and the ends of pages, and lengths of any number."""
    layers = Layers(of)
    plan = layers.plan()
    most, k = of.capacity, of.topk
    for lengths in ((most, k, k + 1), (k - 1, most - 63, 3), (-(2**31), 2**31 - 1, of.page)):
        kv_lens = int32(*lengths)
        layers.run(plan, cp.asarray(kv_lens))
        layers.check(kv_lens)


@pytest.mark.parametrize("of", V4_STEPS, ids=lambda of: f"h{of.heads}-s{of.q_len}-k{of.topk}")
def test_steps_of_v4(of: Step) -> None:
    """Selected tokens, a window and sinks in one softmax; lengths of each query token."""
    layers, most, k = Layers(of), of.capacity, of.topk
    plan = layers.plan(kv_lens=cp.zeros((len(layers.given[0]["block_table"]), of.q_len), np.int32))
    rng = np.random.default_rng(0)
    sinks = rng.standard_normal(of.heads, np.float32)
    for lengths in ((most, k, k + 1), (k - 1, most - 63, 3), (-9, 2**31 - 1, of.page)):
        kv_lens = int32(*lengths)[:, None] - np.arange(of.q_len, dtype=np.int32)[::-1] // 2
        recent = rng.integers(-1, of.window + 2, kv_lens.shape, np.int32)
        given = {"sinks": cp.asarray(sinks), "recent": cp.asarray(recent)}
        layers.run(plan, cp.asarray(kv_lens), **given)
        layers.check(kv_lens, sinks=sinks, extra_topk_lens=recent)


def test_below_topk_it_is_dense_attention() -> None:
    of = Step(topk=600, heads=16, page=64, pages=8, index_heads=64, dim=128)
    layers = Layers(of)
    kv_lens = cp.asarray(LENS)
    layers.run(layers.plan(), kv_lens)
    given = layers.given[0]
    dense = cumla.mla_decode(given["q"], given["kv_cache"], given["block_table"], kv_lens)
    got = layers.outs[0].bits.get().view(dense.out.dtype)
    want = dense.out.view(np.uint16).get().view(dense.out.dtype)
    assert_close_out(got, want.astype(np.float32), visible_v_rms=1.0)
    assert_close_lse(layers.lses[0].array.get(), dense.lse.get())


@pytest.mark.parametrize("of", [SMALL, SMALL_V4], ids=["v32", "v4"])
def test_a_graph_of_three_layers_with_changing_lengths(of: Step) -> None:
    """The second layer shares the selection of the first; windows change, too. Nothing is allocated
    in the capture, where CuPy would refuse; prepare() suffices before it."""
    layers = Layers(of, 3)
    kv_lens = cp.asarray(LENS)
    recent = cp.asarray(int32(128, 65, 0)) if of.window else None
    plan = layers.plan()
    cumla.prepare(plan)
    layers.indices[0][...] = layers.indices[1]  # CuPy's kernel is loaded before the capture
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        layers.run(plan, kv_lens, shared=1, recent=recent)
        graph = stream.end_capture()
    for i, lengths in enumerate((LENS, LENS + 1, int32(512, 100, 101), int32(0, 1, 64))):
        kv_lens.set(lengths)
        window = {"extra_topk_lens": int32(128, i, 127 - i)} if recent is not None else {}
        for new in window.values():
            recent.set(new)
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        layers.check(lengths, shared=1, **window)


@pytest.mark.parametrize("of", [SMALL, SMALL_V4], ids=["v32", "v4"])
def test_plans_that_share_a_workspace(of: Step) -> None:
    """One of numbers and one of arrays take turns in memory that they do not allocate."""
    memory = cp.zeros(cumla.DSAPlan.workspace_bytes(**of.numbers()), np.uint8)
    layers = Layers(of)
    plans = layers.plan(workspace=memory), cumla.DSAPlan(**of.numbers(), workspace=memory)
    recent = cp.asarray(int32(128, 65, 0)) if of.window else None
    window = {"extra_topk_lens": recent.get()} if of.window else {}
    for lengths in (LENS, LENS + 1):
        for plan in plans:
            layers.run(plan, cp.asarray(lengths), recent=recent)
            layers.check(lengths, **window)
    with pytest.raises(ValueError, match="taken by another plan"):
        plans[0].select(**{name: layers.given[0][name] for name in SELECTED_FROM})


@pytest.mark.parametrize("of", [SMALL, SMALL_V4, LONG], ids=["packed", "v4", "long"])
def test_a_token_has_one_set_of_bits_in_any_batch(of: Step) -> None:
    """Among other requests and alone, with the other tokens of its request and without them."""
    rng = np.random.default_rng(1)
    given = of.arguments() | {
        "index_q": rng.standard_normal((of.batch, of.q_len, of.index_heads, of.dim)).astype(E4M3),
        "index_weights": rng.standard_normal((of.batch * of.q_len, of.index_heads), np.float32),
    }
    there = {name: on_gpu(array) for name, array in given.items()}
    lens = np.minimum(LENS, of.capacity) if of.pages < 20 else int32(19_000, 700, 8192)

    def bits(some: dict[str, Any], kv_lens: np.ndarray) -> list[Any]:
        made_of = {name: some[name] for name in MADE_OF}
        options = {"topk": of.topk, "batch_invariant": True, **window_of(some)}
        plan = cumla.DSAPlan.from_arrays(**made_of, **options)
        plan.update(cp.asarray(kv_lens))
        indices = plan.select(**{name: some[name] for name in SELECTED_FROM})
        state = plan.run(**{name: some[name] for name in ATTENDED}, **window_of(some))
        return [bits_of(array).reshape(array.shape) for array in (indices, *state)]

    whole = bits(there, lens)
    for r in range(of.batch):
        for tokens in (slice(0, of.q_len), *(slice(j, j + 1) for j in range(of.q_len))):
            some = dict(there)
            for name in ("q", "index_q", "extra_indices"):
                if name in some:
                    some[name] = cp.ascontiguousarray(some[name][r : r + 1, tokens])
            weights = there["index_weights"].reshape(of.batch, of.q_len, of.index_heads)
            some["index_weights"] = cp.ascontiguousarray(weights[r, tokens])
            some["block_table"] = there["block_table"][r : r + 1]
            alone = bits(some, lens[r : r + 1] - (of.q_len - tokens.stop))
            for one, all_ in zip(alone, whole, strict=True):
                assert bool((one[0] == all_[r, tokens]).all()), (r, tokens)


def test_tensors_of_pytorch() -> None:
    """Captured by its graphs, too, where results may be allocated."""
    torch = pytest.importorskip("torch")
    layers = Layers(SMALL)
    host = layers.host[0]
    given = {name: to_torch(torch, array) for name, array in layers.given[0].items()}
    kv_lens = torch.from_dlpack(cp.asarray(LENS)).clone()
    plan = cumla.DSAPlan.from_arrays(**{name: given[name] for name in MADE_OF}, topk=SMALL.topk)

    def step() -> Any:
        plan.update(kv_lens)
        indices = plan.select(**{name: given[name] for name in SELECTED_FROM})
        return indices, *plan.run(**{name: given[name] for name in ATTENDED})

    def check(results: Any, lengths: np.ndarray) -> None:
        torch.cuda.synchronize()
        assert all(isinstance(result, torch.Tensor) for result in results)
        indices = SMALL.selected(host, lengths)
        np.testing.assert_array_equal(results[0].cpu().numpy(), indices)
        layers.compare(host, indices, from_torch(torch, results[1]), from_torch(torch, results[2]))

    check(step(), LENS)
    own = plan
    memory = torch.zeros(
        cumla.DSAPlan.workspace_bytes(**SMALL.numbers()), dtype=torch.uint8, device="cuda"
    )
    plan = cumla.DSAPlan(**SMALL.numbers(), workspace=memory)
    kv_lens.add_(1)
    check(step(), LENS + 1)
    plan = own
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for lengths in (LENS + 3, int32(99, 512, 0)):
        kv_lens.copy_(torch.from_numpy(lengths))
        graph.replay()
        check(captured, lengths)


@pytest.mark.parametrize("heads", [16, 128])
def test_repeats(heads: int) -> None:
    """The same bits while other kernels take multiprocessors at random."""
    of = Step(topk=512, heads=heads, page=64, pages=64, index_heads=64, dim=128, packed=True)
    layers = Layers(of)
    plan, kv_lens = layers.plan(), cp.asarray(int32(4096, 3000, 700))
    layers.run(plan, kv_lens)
    want = [bits_of(a.array) for a in (layers.outs[0], layers.lses[0])]
    chosen = layers.indices[0].copy()
    for seed in range(50):
        for guarded in (layers.outs[0], layers.lses[0]):
            guarded.repoison()
        kernels.noise(seed)
        layers.run(plan, kv_lens)
        got = [bits_of(a.array) for a in (layers.outs[0], layers.lses[0])]
        assert all(bool((a == b).all()) for a, b in zip(got, want, strict=True))
        assert bool((layers.indices[0] == chosen).all())


def test_the_arrays_of_a_plan_outlive_it_on_another_stream() -> None:
    """Allocated on one stream, used on another: the pool must not hand them out meanwhile."""
    layers = Layers(SMALL)
    kv_lens = cp.asarray(LENS)
    plan = layers.plan()
    layers.run(plan, kv_lens)
    sizes = [4 * 6 * n for n in (1, SMALL.topk, SMALL.capacity)]
    cp.full(1, 0x7F, np.uint8)  # compiling it would take longer than the stream is busy
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        kernels.spin(200_000_000)
        layers.run(plan, kv_lens)
    del plan
    spoilt = [cp.full(size, 0x7F, np.uint8) for size in sizes for _ in range(3)]
    assert not stream.done
    cp.cuda.Device().synchronize()
    layers.check(LENS)
    del spoilt
