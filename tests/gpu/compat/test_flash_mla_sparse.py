# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's sparse functions on tensors of a GPU: steps of several layers, eager and captured."""

from __future__ import annotations

import math
from typing import Any

import pytest

import cumla
from cumla.compat import flash_mla
from tests.compat.test_flash_mla_sparse import SCALE, Decode, naive, prefill
from tests.compat.test_flash_mla_v4 import V4Decode, assert_decoded, options_of

KERNELS = ("select_rows", "mla_sparse", "mla_sparse_fp8", "mla_sparse_packed", "mla_sparse_v4")
torch = pytest.importorskip("torch")

SHAPES = pytest.mark.parametrize(
    ("batch", "seq_q", "heads", "kv_len", "topk", "page_size"),
    [
        (4, 1, 64, 512, 64, 64),
        (4, 3, 64, 512, 64, 69),
        (2, 1, 128, 1024, 576, 61),
        (1, 1, 64, 2046, 2048, 576),
        (3, 2, 16, 100, 65, 2),  # neither heads nor topk are FlashMLA's
        (2, 1, 5, 7, 1, 1),
    ],
)


class OnGpu(Decode):
    """The same tensors on the GPU; what they stand for stays on the host."""

    def call(self, metadata: Any = None, **changes: Any) -> Any:
        moved = {"q": self.q, "k_cache": self.cache, "indices": self.indices} | changes
        there = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in moved.items()}
        there["k_cache"] = with_gaps(moved["k_cache"])
        return super().call(metadata, **there)


def with_gaps(cache: Any) -> Any:
    """A cache on the GPU, a row of garbage after each of its pages."""
    pages, rows, *rest = cache.shape
    memory = torch.full((pages, rows + 1, *rest[:-1], rest[-1] * cache.element_size()), 255)
    there = memory.to(torch.uint8).cuda()[:, :rows]
    there[...] = cache.contiguous().view(torch.uint8).cuda()
    return there.view(cache.dtype)


@SHAPES
def test_shapes_of_flash_mlas_tests(
    batch: int, seq_q: int, heads: int, kv_len: int, topk: int, page_size: int
) -> None:
    problem = OnGpu(batch, seq_q, heads, kv_len, topk, page_size)
    assert_close(problem.call(), problem)


def assert_close(got: Any, problem: Decode, lengths: Any = None, **more: Any) -> None:
    """As the tests on the CPU do, a row at a time: the kernels round probabilities."""
    batch, seq_q, heads, _ = problem.q.shape
    each = None if lengths is None else lengths.repeat_interleave(seq_q)
    lists = more.pop("indices", problem.indices).flatten(0, 1)
    out, _, lse = naive(problem.q.flatten(0, 1), problem.rows, lists, each, **more)
    close_rows(got[0].cpu().flatten(0, 1), out, twice="sink" in more)
    close_lse(got[1].cpu().transpose(1, 2).flatten(0, 1), lse)
    assert tuple(got[1].shape) == (batch, heads, seq_q)


def close_rows(got: Any, want: Any, *, twice: bool) -> None:
    """`twice`: rounded to 16 bits without and with sinks."""
    assert torch.isfinite(got).all()
    error, size = ((x**2).sum(-1).sqrt() for x in (got.double() - want, want))
    limit = 8e-3 if twice else 4e-3
    assert (error <= limit * size).all(), f"a row is off by {float((error / size).max())}"


def close_lse(got: Any, want: Any) -> None:
    torch.testing.assert_close(got.double(), want, rtol=8.01 / 65536, atol=1e-6)


def test_sinks_and_lengths() -> None:
    """Sinks of +-inf among them; out alone has them."""
    problem = OnGpu(heads=24)
    some = torch.tensor([0.0, 3.0, -2.0, 8.0, -math.inf, math.inf, -1e30, 1e30])
    sink, lengths = some.repeat(3), torch.tensor([64, 7, 0], dtype=torch.int32)
    for options in ({}, {"topk_length": lengths}):
        plain = problem.call(**options)
        got = problem.call(**options, attn_sink=sink)
        assert torch.equal(got[1], plain[1])
        assert_close(got, problem, options.get("topk_length"), sink=sink)
    assert torch.isposinf(got[1][2]).all()
    assert not got[0][2].any()


def test_caches_of_16_bits() -> None:
    problem = Decode()
    whole = torch.randn(problem.slots // 2, 2, 1, 576).bfloat16()
    got = OnGpu().call(q=problem.q, k_cache=whole, is_fp8_kvcache=False)
    state = cumla.mla_sparse_decode(
        problem.q.cuda(), whole.cuda(), problem.indices.cuda(), softmax_scale=SCALE
    )
    assert torch.equal(got[0], state.out)
    assert torch.equal(got[1], state.lse.mT)


@pytest.mark.parametrize("heads", [16, 64])
def test_a_step_that_is_captured_and_replayed(heads: int) -> None:
    """Of three layers and one metadata object; lists and lengths change between replays."""
    problem = OnGpu(heads=heads)
    lengths = torch.tensor([64, 7, 30], dtype=torch.int32)
    q, cache = problem.q.cuda(), with_gaps(problem.cache)
    lists, there = problem.indices.cuda(), lengths.cuda()
    given = {"q": q, "k_cache": cache, "indices": lists, "topk_length": there}

    def step() -> list[Any]:
        metadata, _ = flash_mla.get_mla_metadata()
        return [Decode.call(problem, metadata, **given) for _ in range(3)]

    cumla.MLASparsePlan.from_arrays(q, cache.view(torch.uint8), lists).prepare()
    eager = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for later, order in (([64, 7, 30], 1), ([0, 64, 1], -1), ([63, 65, -3], -1)):
        lists.copy_(problem.indices if order > 0 else problem.indices.flip(-1))
        there.copy_(torch.tensor(later, dtype=torch.int32))
        for result in results:
            for tensor in result:
                tensor.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        for result in results:
            listed = lists.cpu()
            assert_close(result, problem, torch.tensor(later), indices=listed)
        if order > 0:
            assert all(torch.equal(a, b) for a, b in zip(results[2], eager[0], strict=True))


@pytest.mark.parametrize(
    ("s_q", "s_kv", "heads", "topk"),
    [
        (1, 128, 64, 128),
        (62, 592, 128, 128),
        (113, 1592, 128, 384),
        (13, 95, 64, 128),
        (2, 32, 64, 2048),
        (5, 153, 3, 57),
    ],
)
@pytest.mark.parametrize("more", [False, True], ids=["plain", "sinks and lengths"])
@pytest.mark.parametrize("d_qk", [512, 576])
def test_prefill(d_qk: int, s_q: int, s_kv: int, heads: int, topk: int, more: bool) -> None:
    q, kv, lists = prefill(s_q, s_kv, heads, topk, d_qk=d_qk)
    options: dict[str, Any] = {}
    if more:
        options["attn_sink"] = torch.linspace(-5, 5, heads)
        options["topk_length"] = torch.arange(s_q, dtype=torch.int32) * 37 % (topk + 1)
    there = {name: tensor.cuda() for name, tensor in options.items()}
    got = flash_mla.flash_mla_sparse_fwd(q.cuda(), kv.cuda(), lists.cuda(), SCALE, **there)
    out, max_logits, lse = (tensor.cpu() for tensor in got)
    wanted = naive(
        *(q, kv[:, 0].double(), lists[:, 0]), options.get("topk_length"), options.get("attn_sink")
    )
    close_rows(out, wanted[0], twice=more)
    close_lse(lse, wanted[2])
    close_max_logits(max_logits, wanted[1])
    assert torch.isposinf(lse[-1]).all()
    assert torch.isneginf(max_logits[-1]).all()


def close_max_logits(got: Any, want: Any) -> None:
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=2.01 / 65536, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("s_q", "heads"), [(1, 16), (3, 128), (600, 64)])
@pytest.mark.parametrize("d_qk", [512, 576])
def test_a_prefill_that_is_captured_and_replayed(
    d_qk: int, s_q: int, heads: int, dtype: Any
) -> None:
    """Lists that are cut and lists that are whole. out has the bits of the kernel without
    max_logits, and lse, too; but few lists of at most 16 heads without have one of their own."""
    q, kv, lists = prefill(s_q, 3000, heads, 2048, s_q > 1, d_qk)
    q, kv = q.to(dtype), kv.to(dtype)
    there = [tensor.cuda() for tensor in (q, kv, lists)]
    lengths = torch.full((s_q,), 2048, dtype=torch.int32, device="cuda")

    def call() -> Any:
        return flash_mla.flash_mla_sparse_fwd(*there, SCALE, topk_length=lengths)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    rows, each = kv[:, 0].double(), torch.full((s_q,), 2048, dtype=torch.int32)
    for first in (2048, 65, 0):
        each[0] = first
        lengths.copy_(each)
        for tensor in got:
            tensor.fill_(math.nan)
        graph.replay()
        state = cumla.mla_sparse_attention(*there, topk_lens=lengths, softmax_scale=SCALE)
        lse = got[2].masked_fill(got[2] == math.inf, -math.inf)
        if heads > 16:
            assert torch.equal(got[0], state.out)
            assert torch.equal(lse, state.lse)
        torch.testing.assert_close(got[0], state.out, rtol=2**-7, atol=2e-4)
        torch.testing.assert_close(lse, state.lse, rtol=1e-5, atol=1e-6)
        _, wanted, _ = naive(q[:8], rows, lists[:8, 0], each)
        close_max_logits(got[1][:8].cpu(), wanted)


# --- DeepSeek-V4 ----------------------------------------------------------------------------------


def on_gpu(tensor: Any) -> Any:
    """A tensor on the GPU, pages with what lies between them."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    if tensor.shape[-1] != 584:
        return tensor.cuda()
    blocks, step = tensor.shape[0], tensor.stride(0)
    memory = torch.full((blocks, step), 255, dtype=torch.uint8, device="cuda")
    cache = memory[:, : tensor.shape[1] * 584].view(tensor.shape)
    cache.copy_(tensor)
    return cache


class V4OnGpu(V4Decode):
    """The same tensors on the GPU."""

    def arguments(self, metadata: Any = None, **changes: Any) -> dict[str, Any]:
        given = super().arguments(metadata, **changes)
        return {name: on_gpu(tensor) for name, tensor in given.items()}


def check_v4(problem: V4Decode) -> None:
    """Without and with sinks and lengths."""
    assert_decoded(problem.call(), problem)
    options = options_of(problem)
    wanted = {"sink" if n == "attn_sink" else n: tensor for n, tensor in options.items()}
    assert_decoded(problem.call(**options), problem, **wanted)


@pytest.mark.parametrize(
    ("batch", "seq_q", "heads", "kv_len", "topk", "page_size", "extra"),
    [
        (4, 1, 64, 512, 64, 64, None),
        (2, 3, 128, 1024, 576, 61, (64, 2)),
        (1, 1, 64, 2046, 2048, 576, (512, 64)),
        (3, 2, 16, 100, 65, 2, (1, 1)),  # neither heads nor topk are FlashMLA's
        (2, 1, 5, 7, 1, 1, None),
    ],
)
def test_v4_shapes_of_flash_mlas_tests(
    batch: int,
    seq_q: int,
    heads: int,
    kv_len: int,
    topk: int,
    page_size: int,
    extra: tuple[int, int] | None,
) -> None:
    check_v4(V4OnGpu(batch, seq_q, heads, kv_len, topk, page_size, extra))


@pytest.mark.parametrize("extra", [None, (512, 2)])
@pytest.mark.parametrize(("batch", "seq_q"), [(74, 1), (321, 3)])
def test_v4_batches_of_flash_mlas_tests(
    batch: int, seq_q: int, extra: tuple[int, int] | None
) -> None:
    """With the bits of cumla's own function, which other tests compare with float64."""
    problem = V4OnGpu(batch, seq_q, 64, 100, 128, 64, extra)
    given = problem.arguments()
    second = {}
    if extra is not None:
        second["extra_kv_cache"] = given["extra_k_cache"]
        second["extra_indices"] = given["extra_indices_in_kvcache"]
    state = cumla.mla_sparse_decode(
        given["q"], given["k_cache"], given["indices"], **second, softmax_scale=SCALE
    )
    out, lse = problem.call()
    assert torch.equal(out, state.out)
    assert torch.equal(lse.nan_to_num(posinf=-math.inf), state.lse.mT)


def test_v4_slots_that_no_list_names() -> None:
    """They are NaN, of both caches; and one that is named is seen."""
    problem = V4OnGpu(heads=24, kv_len=200, extra=(64, 256))
    want = problem.call()
    for cache, lists in (("k_cache", "indices"), ("extra_k_cache", "extra_indices_in_kvcache")):
        pages, entries = problem.given[cache], problem.given[lists].flatten().long()
        blocks, size = pages.shape[:2]
        others = torch.ones(blocks * size, dtype=torch.bool)
        others[entries[entries >= 0]] = False
        whole = pages.view(blocks, -1)
        whole[:, : size * 576].view(blocks, size, 576)[others.view(blocks, size)] = 255
        whole[:, size * 576 :].view(blocks, size, 8)[others.view(blocks, size)] = 255
    got = problem.call()
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    lists = problem.given["extra_indices_in_kvcache"]
    lists[0, 0, -1] = int(others.nonzero()[0])
    got = problem.call()
    assert got[0][0, 0].isnan().all() and got[1][0, :, 0].isnan().all()
    assert torch.equal(got[0][0, 1], want[0][0, 1]) and torch.equal(got[0][1:], want[0][1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_v4_rows_of_16_bits(dtype: Any) -> None:
    problem = V4Decode(heads=24)
    q, whole = problem.q.to(dtype).cuda(), torch.randn(90, 2, 1, 512).to(dtype).cuda()
    lists = problem.given["indices"].cuda()
    got = V4OnGpu().call(q=q, k_cache=whole, indices=lists, is_fp8_kvcache=False)
    state = cumla.mla_sparse_decode(q, whole, lists, softmax_scale=SCALE)
    assert torch.equal(got[0], state.out)
    assert torch.equal(got[1], state.lse.mT)


@pytest.mark.parametrize("extra", [None, (40, 64)])
def test_v4_a_step_that_is_captured_and_replayed(extra: tuple[int, int] | None) -> None:
    """Of three layers and one metadata object; lists and both lengths change between replays."""
    problem = V4OnGpu(heads=64, extra=extra)
    lengths = {"topk_length": torch.tensor([64, 7, 30], dtype=torch.int32)}
    if extra is not None:
        lengths["extra_topk_length"] = torch.tensor([0, 40, 3], dtype=torch.int32)
    given = problem.arguments(**lengths)
    del given["tile_scheduler_metadata"]

    def step() -> list[Any]:
        metadata, _ = flash_mla.get_mla_metadata()
        call = flash_mla.flash_mla_with_kvcache
        return [call(**given, tile_scheduler_metadata=metadata) for _ in range(3)]

    second = {}
    if extra is not None:
        names = ("extra_k_cache", "extra_indices_in_kvcache")
        second = dict(zip(("extra_kv_cache", "extra_indices"), map(given.get, names), strict=True))
    made_of = [given[name] for name in ("q", "k_cache", "indices")]
    cumla.MLASparsePlan.from_arrays(*made_of, **second).prepare()
    eager = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    names = [name for name in problem.given if "indices" in name]
    for turned in (False, True):
        lists = {n: problem.given[n].flip(-1) if turned else problem.given[n] for n in names}
        later = {n: tensor.flip(0) if turned else tensor for n, tensor in lengths.items()}
        for name, tensor in (lists | later).items():
            given[name].copy_(tensor)
        for result in results:
            for tensor in result:
                tensor.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        for result in results:
            assert_decoded(result, problem, **lists, **later)
        if not turned:
            assert all(torch.equal(a, b) for a, b in zip(results[2], eager[0], strict=True))
