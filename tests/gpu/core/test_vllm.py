# SPDX-License-Identifier: Apache-2.0
"""The plugin of vLLM on torch's CUDA tensors, in graphs as vLLM captures them, and in its engine.

All but the last test stand on a stub of vLLM; the kernels are proven by other modules.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

import cumla
from tests.gpu.tools.waiting import no_waiting
from tests.vllm.layers import HEADS, MHA, MLA, SCALE, STEPS, int32, queries, tables
from tests.vllm.stub import stubbed
from tests.vllm.test_engine import differences
from tests.vllm.test_plugin import RSWA, WINDOWED, attend_in_windows

KERNELS = ()
MAY_SKIP = ("needs vLLM",)
torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def stub() -> Iterator[None]:
    with stubbed():
        yield


def on_gpu(*values: int) -> Any:
    return int32(*values, device="cuda")


def eager(mla: MLA, q: Any, kv_lens: Any, offsets: Any) -> Any:
    table = tables(kv_lens)
    options = {"softmax_scale": SCALE, "kv_scale": None}
    if mla.cache.dtype != torch.bfloat16:
        options["kv_scale"] = mla.k_scale.view(1)
    return cumla.mla_attention(
        q, mla.cache, block_table=table, kv_lens=kv_lens, qo_indptr=offsets, **options
    )


def assert_close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_mla_attends_as_the_eager_call(stub: None, name: str, cache_dtype: Any) -> None:
    lens, starts, tokens, _ = STEPS[name]
    mla, kv_lens, offsets = MLA(cache_dtype, 2, "cuda"), on_gpu(*lens), on_gpu(*starts)
    q, host = queries(tokens, "cuda"), int32(*starts)
    mla.attend(mla.step(kv_lens, offsets, tokens), q)  # compiles
    with no_waiting():
        out, lse = mla.attend(mla.step(kv_lens, offsets, tokens, host), q)
    wanted, last = eager(mla, q, kv_lens, offsets), starts[-1]
    assert_close(out[:last], wanted.out[:last])
    assert_close(lse[:last], wanted.lse[:last])


def test_mla_writes_the_cache_as_on_the_cpu(stub: None) -> None:
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        here, there = MLA(dtype), MLA(dtype, device="cuda")
        assert bool(here.cache.view(torch.uint8).eq(there.cache.cpu().view(torch.uint8)).all())


@pytest.mark.parametrize("shares_stream", [True, False])
def test_graphs_of_all_shapes_serve_later_steps(stub: None, shares_stream: bool) -> None:
    """As vLLM: the largest shape is captured first, eager steps go between the replays."""
    mla = MLA(device="cuda")
    graphs: dict[int, Any] = {}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for batch in (8, 4, 2):
            q = queries(2 * batch, "cuda")
            kv_lens, offsets = on_gpu(*[40] * batch), on_gpu(*range(0, 2 * batch + 1, 2))
            for _ in range(2):
                mla.attend(mla.step(kv_lens, offsets, 2 * batch), q)
            step = mla.step(kv_lens, offsets, 2 * batch, captured=True)
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=side if shares_stream else None):
                outs = [mla.attend(step, q)[0] for _ in range(2)]  # layers
            graphs[batch] = graph, q, kv_lens, offsets, outs, step
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    for batch, real in ((2, 1), (8, 8), (4, 3), (8, 5), (2, 2)):
        mixed = on_gpu(33, 20, 48), on_gpu(0, 1, 9, 30)  # takes the buffer
        found = mla.attend(mla.step(*mixed, 30), queries(30, "cuda"))[0]
        assert_close(found, eager(mla, queries(30, "cuda"), *mixed).out)
        graph, q, kv_lens, offsets, outs, _ = graphs[batch]
        lens = [(7 * i * real) % (384 // batch - 2) + 2 for i in range(real)]
        kv_lens.copy_(int32(*lens, *[0] * (batch - real)))
        offsets.copy_(int32(*[min(2 * i, 2 * real) for i in range(batch + 1)]))
        mla.step(kv_lens, offsets, 2 * batch)
        graph.replay()
        wanted = eager(mla, q, kv_lens, offsets).out[: 2 * real]
        for out in outs:
            assert_close(out[: 2 * real], wanted)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_a_graph_serves_drafts_that_are_cut_on_the_device(stub: None, cache_dtype: Any) -> None:
    """The host's lengths are those of the capture, or of an even cut."""
    mla, q = MLA(cache_dtype, device="cuda", cuts_drafts=True), queries(8, "cuda")
    kv_lens, offsets = on_gpu(*[40] * 8), on_gpu(*range(9))
    mla.attend(mla.step(kv_lens, offsets, 8), q)
    step = mla.step(kv_lens, offsets, 8, captured=True)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        outs = [mla.attend(step, q)[0] for _ in range(2)]  # layers
    even = int32(0, 2, 4, 6, 8, 8, 8, 8, 8)
    for starts in ((0, 1, 5, 6, 8, 8, 8, 8, 8), (0, 4, 5, 6, 7, 7, 7, 7, 7), tuple(even)):
        kv_lens.copy_(int32(33, 7, 40, 2, 0, 0, 0, 0))
        offsets.copy_(int32(*starts))
        last = int(starts[-1])
        wanted = eager(mla, q, kv_lens, offsets).out[:last]
        graph.replay()
        for out in outs:
            assert_close(out[:last], wanted)
        with no_waiting():
            found, _ = mla.attend(mla.step(kv_lens, offsets, 8, even), q)
        assert_close(found[:last], wanted)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_mha_attends_as_on_the_cpu_in_a_graph_too(stub: None, cache_dtype: Any) -> None:
    found: dict[str, list[Any]] = {}
    steps = (((90, 5, 33), (0, 1, 6, 8)), ((20, 80, 3), (0, 6, 7, 8)), ((20, 7, 0), (0, 6, 7, 7)))
    for device in ("cpu", "cuda"):
        sinks = torch.linspace(-1, 1, HEADS, device=device).bfloat16()
        mha = MHA(cache_dtype, device, sinks=sinks, logits_soft_cap=20.0)
        for impl in mha.impls.values():
            impl.process_weights_after_loading(torch.bfloat16)
        q = torch.randn(8, HEADS, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
        q = q.to(device)
        kv_lens, offsets = int32(*steps[0][0], device=device), int32(*steps[0][1], device=device)
        outs = found[device] = []

        def attend(step: Any, mha: MHA = mha, q: Any = q) -> list[Any]:
            return [mha.attend(name, step, q) for name in mha.impls]

        outs += attend(mha.step(kv_lens, offsets, 8))
        if device == "cuda":
            torch.cuda.synchronize()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                first = mha.step(kv_lens, offsets, 8)  # whose block_table the graph reads
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    captured = attend(first)
            torch.cuda.synchronize()
        for lens, starts in steps:
            kv_lens.copy_(int32(*lens))
            offsets.copy_(int32(*starts))
            step = mha.step(kv_lens, offsets, 8)
            if device == "cuda":
                graph.replay()
                outs += [out[: starts[-1]].clone() for out in captured]
            else:
                outs += [out[: starts[-1]] for out in attend(step)]
    for one, other in zip(found["cpu"], found["cuda"], strict=True):
        assert_close(other.cpu(), one)


def test_reference_windows_in_a_graph_too(stub: None) -> None:
    on_host, mha = (MHA(device=on, model=RSWA) for on in ("cpu", "cuda"))
    stream = torch.cuda.Stream()

    def step(case: str) -> Any:
        lens, starts, prefixes = WINDOWED[case]
        return mha.step(on_gpu(*lens), on_gpu(*starts), starts[-1], prefixes=int32(*prefixes))

    def check(out: Any, case: str, q: Any) -> None:
        assert_close(out.cpu().view(-1, HEADS, 64), attend_in_windows(on_host, *WINDOWED[case], q))

    for case, (_, starts, _) in WINDOWED.items():
        q = torch.randn(starts[-1], HEADS, 64).bfloat16()
        check(mha.attend("full", step(case), q.cuda()), case, q)
    q = torch.randn(9, HEADS, 64).bfloat16()
    mine = q.cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        first = mha.step(on_gpu(90, 90, 90), on_gpu(0, 3, 6, 9), 9, captured=True)
        mha.attend("full", first, mine)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = mha.attend("full", first, mine)
    torch.cuda.synchronize()
    step("drafts")
    graph.replay()
    check(out, "drafts", q)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
@pytest.mark.parametrize("eagerly", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("model", ["deepseek", "llama", "gemma2"])
def test_the_engine_generates_as_with_vllms_own(tmp_path: Path, model: str, eagerly: bool) -> None:
    """With vLLM installed, and cumla beside it (`pip install --no-deps .`): the entry point."""
    found = []
    for backend in ("own", "cumla"):
        command = [sys.executable, str(ROOT / "tests/vllm/serve.py"), model, backend]
        options = {"enforce_eager": eagerly, "gpu_memory_utilization": 0.3}
        done = subprocess.run(
            [*command, str(tmp_path / model), "--options", json.dumps(options)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert sum(found[1]["calls"].values())
    close = differences(*found)
    assert max(close) < 0.15
    assert mean(close) < 0.07
