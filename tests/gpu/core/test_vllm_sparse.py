# SPDX-License-Identifier: Apache-2.0
"""The plugin of vLLM for sparse MLA on torch's CUDA tensors, in graphs as vLLM captures them.

These tests stand on a stub of vLLM; the kernels are proven by other modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import cumla
from tests.gpu.tools.waiting import no_waiting
from tests.vllm.layers import INDEX_HEADS, PAGE, SCALE, TOPK, SparseMLA, int32, queries, tables
from tests.vllm.stub import stubbed
from tests.vllm.test_sparse import STEPS, visible

KERNELS = ()
torch = pytest.importorskip("torch")

CACHES = ["auto", "fp8", "fp8_ds_mla"]


@pytest.fixture(autouse=True)
def stub() -> Iterator[None]:
    with stubbed(index_topk=TOPK):
        yield


def on_gpu(*values: int) -> Any:
    return int32(*values, device="cuda")


def eager(sparse: SparseMLA, q: Any, table: Any, starts: Any) -> Any:
    """Attend by one call, every entry of a list looked at."""
    counts = torch.tensor(starts).diff()
    requests = torch.repeat_interleave(torch.arange(len(counts)), counts).int().cuda()
    last, is_scaled = starts[-1], sparse.cache.dtype == torch.float8_e4m3fn
    return cumla.mla_sparse_attention(
        tuple(part[:last] for part in q),
        sparse.cache,
        sparse.buffer[:last],
        block_table=table,
        row_to_request=requests,
        softmax_scale=SCALE,
        kv_scale=sparse.layer._k_scale.view(1) if is_scaled else None,
    ).out


def assert_close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("cache_dtype", CACHES)
@pytest.mark.parametrize("name", STEPS)
def test_sparse_mla_attends_as_the_eager_call(name: str, cache_dtype: str) -> None:
    lens, starts, tokens, _ = STEPS[name]
    sparse, kv_lens, offsets = SparseMLA(cache_dtype, device="cuda"), on_gpu(*lens), on_gpu(*starts)
    sparse.lists(visible(lens, starts))
    q, host = queries(tokens, "cuda"), int32(*starts)
    sparse.attend(sparse.step(kv_lens, offsets, tokens, host), q)  # compiles
    step = sparse.step(kv_lens, offsets, tokens, host)
    with no_waiting():
        out, _ = sparse.attend(step, q)
    assert_close(out[: starts[-1]], eager(sparse, q, tables(kv_lens), starts))
    assert bool(out[starts[-1] :].eq(0).all())


def test_the_indexer_selects_as_on_the_cpu() -> None:
    """Scores differ by rounding, so the lists may at their ends."""
    lens, starts = (90, 45), (0, 3, 8)
    here, there = SparseMLA(), SparseMLA(device="cuda")
    there.keys.copy_(here.keys)
    lists = []
    for one in (here, there):
        table = tables(int32(*lens, device=one.device))
        seen = int32(90, 45, device=one.device).view(2, 1)
        inputs = one.index_inputs(2)
        one.index(one.decoding(seen, table, torch.arange(3, device=one.device)), *inputs)
        lists.append(one.buffer[:2].tolist())
        inputs = one.index_inputs(8)
        one.index(one.prefilling(int32(*lens, device=one.device), starts, table), *inputs)
        lists[-1] += one.buffer[:8].tolist()
    for a, b in zip(*lists, strict=True):
        assert len(set(a) & set(b)) >= TOPK - 1
        assert b == sorted(b)


@pytest.mark.parametrize("cache_dtype", CACHES)
@pytest.mark.parametrize("q_len", [1, 2, 4])
def test_a_graph_serves_later_steps(q_len: int, cache_dtype: str) -> None:
    """Layers select and attend; each replay has the bits of eager steps, padded requests too."""
    sparse, batch = SparseMLA(cache_dtype, device="cuda"), 4
    tokens, host = batch * q_len, torch.arange(batch + 1, dtype=torch.int32) * q_len
    kv_lens, offsets = on_gpu(*[90] * batch), host.cuda()
    hidden = torch.arange(1 - q_len, 1, dtype=torch.int32, device="cuda")
    seen, table = (kv_lens[:, None] + hidden).contiguous(), tables(kv_lens)
    q, inputs = queries(tokens, "cuda"), sparse.index_inputs(tokens)
    assert inputs[0].shape[1] == INDEX_HEADS

    def layers(step: Any, index: Any) -> list[Any]:
        found = []
        for _ in range(3):
            sparse.index(index, *inputs)
            found.append(sparse.attend(step, q)[0])
        return found

    def begin(captured: bool = False) -> tuple[Any, Any]:
        step = sparse.step(kv_lens, offsets, tokens, host, captured, table)
        return step, sparse.decoding(seen, table, offsets)

    layers(*begin())
    held = begin(captured=True)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        outs = layers(*held)
    for lens in ((96, 33, 5, 80), (7, 64, 0, 0), (0, 0, 0, 0)):
        kv_lens.copy_(int32(*lens))
        seen.copy_(kv_lens[:, None] + hidden)
        graph.replay()
        chosen, found = sparse.buffer[:tokens].clone(), [out.clone() for out in outs]
        later = begin()  # the stub waits
        with no_waiting():
            wanted = layers(*later)
        assert torch.equal(chosen, sparse.buffer[:tokens])
        for out, other in zip(found, wanted, strict=True):
            assert torch.equal(out, other)
        real = [i * q_len + j for i, n in enumerate(lens) if n >= q_len for j in range(q_len)]
        expected = eager(sparse, q, table, host.tolist())
        for row in real:
            assert_close(found[0][row], expected[row])
    assert PAGE * table.shape[1] >= 96
