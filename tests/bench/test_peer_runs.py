# SPDX-License-Identifier: Apache-2.0
"""Other libraries in the same run: PyTorch's attention on the CPU, FlashInfer in other words."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from cumla.bench import peer_runs
from cumla.bench.cases import Case
from cumla.bench.dense import Workbench
from cumla.bench.peer_runs import peer_cases, run_peers
from tests.bench.fake_gpu import FakeGpu

torch = pytest.importorskip("torch")

CASE = Case(3, 2, 4, 100)
PEER_US = 10.0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A GPU on which PyTorch's attention takes 10 us; PyTorch is the only library installed."""
    gpu = FakeGpu()
    original = torch.nn.functional.scaled_dot_product_attention

    def timed(*args: Any, **kwargs: Any) -> Any:
        gpu.now += PEER_US
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", timed)
    monkeypatch.setattr(peer_runs, "find_spec", lambda name: name if name == "torch" else None)
    return gpu


def run(gpu: FakeGpu, case: Case, *names: str) -> peer_runs.PeerRuns:
    return run_peers(Workbench(gpu, (case,)), case, names)


@pytest.mark.parametrize(
    "case",
    [
        Case(3, 1, 4, 64),
        CASE,
        Case(2, 2, 4, 130, kv_heads=2),
        Case(2, 3, 2, 70, dtype="float16"),
    ],
    ids=lambda case: case.name,
)
def test_sdpa_computes_the_same(gpu: FakeGpu, case: Case):
    runs = run(gpu, case, "sdpa")
    assert runs.notes == []
    assert runs.times["torch SDPA"].us == PEER_US


def test_wrong_peer_is_not_timed(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch):
    original = torch.nn.functional.scaled_dot_product_attention

    def blind(*args: Any, attn_mask: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)  # the first query sees the second one's token

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", blind)
    runs = run(gpu, CASE, "sdpa")
    assert runs.times == {}
    (note,) = runs.notes
    assert note.startswith("torch SDPA: b3-s2-h4-kv100: CheckError: ")
    assert "out is wrong in 12 of 24 rows" in note


def test_peer_that_raises_becomes_a_note(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch):
    def fail(*arguments: Any) -> Any:
        raise RuntimeError("no kernel image\nfor this device")

    monkeypatch.setitem(peer_runs.PEERS, "triton", ("Triton", (), fail))
    runs = run(gpu, CASE, "triton", "sdpa")
    assert runs.notes == ["Triton: b3-s2-h4-kv100: RuntimeError: no kernel image"]
    assert set(runs.times) == {"torch SDPA"}


@pytest.mark.parametrize(
    ("case", "name", "reason"),
    [
        (Case(2, 1, 4, 64, seed=0), "sdpa", "needs requests of the same length"),
        (Case(2, 1, 4, 64, kv_heads=2), "triton", "needs one kv head"),
        (Case(2, 1, 4, 64, kv_heads=2), "flashinfer", "needs one kv head"),
    ],
)
def test_what_a_peer_cannot_do_is_said(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, case: Case, name: str, reason: str
):
    monkeypatch.setattr(peer_runs, "find_spec", lambda name: name)
    assert run(gpu, case, name).notes[0].endswith(f"{case.name}: ValueError: {reason}")


def test_missing_libraries_are_named(gpu: FakeGpu):
    bench = Workbench(gpu, (CASE,))
    runs = run_peers(bench, CASE, None)
    assert set(runs.times) == {"torch SDPA"}
    assert runs.notes == ["Triton: triton not installed", "FlashInfer: flashinfer not installed"]


class Wrapper:
    """FlashInfer's interface, computed request by request in float32."""

    def __init__(self, workspace: Any) -> None:
        assert workspace.numel() >= 128 << 20

    def plan(self, *arguments: Any) -> None:
        self.arguments = arguments

    def run(self, q_nope: Any, q_pe: Any, ckv: Any, kpe: Any) -> Any:
        queries, pages, indices, lengths, heads, latent, rope, page_size = self.arguments[:8]
        causal, scale, q_dtype, kv_dtype = self.arguments[8:]
        assert (latent, rope, page_size) == (q_nope.shape[-1], q_pe.shape[-1], ckv.shape[1])
        assert (q_nope.shape[1], q_dtype, kv_dtype) == (heads, q_nope.dtype, ckv.dtype)
        out = torch.empty_like(q_nope)
        for i, length in enumerate(lengths.tolist()):
            own = indices[pages[i] : pages[i + 1]].long()
            keys = torch.cat([ckv[own], kpe[own]], -1).flatten(0, 1)[:length].float()
            rows = slice(int(queries[i]), int(queries[i + 1]))
            q = torch.cat([q_nope[rows], q_pe[rows]], -1).float()
            scores = torch.einsum("qhd,td->hqt", q, keys) * scale
            if causal:
                count = q.shape[0]
                hidden = torch.ones(count, length, dtype=torch.bool).triu(length - count + 1)
                scores = scores.masked_fill(hidden, float("-inf"))
            out[rows] = torch.einsum("hqt,td->qhd", scores.softmax(-1), keys[:, :latent]).to(
                out.dtype
            )
        return out


@pytest.mark.parametrize(
    "case", [CASE, Case(5, 1, 2, 130, dtype="float16", seed=1)], ids=lambda case: case.name
)
def test_flashinfer_gets_what_it_needs(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, case: Case):
    module = SimpleNamespace(BatchMLAPagedAttentionWrapper=Wrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(mla=module))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", module)
    monkeypatch.setattr(peer_runs, "find_spec", lambda name: name)
    runs = run(gpu, case, "flashinfer")
    assert runs.notes == []
    assert set(runs.times) == {"FlashInfer"}


def test_triton_gets_what_it_needs(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch):
    """The kernel itself is tested in test_triton_decode.py."""
    asked: dict[str, Any] = {}

    def prepare(*tensors: Any, **options: Any) -> Any:
        q, kv, table, seqlens, out = tensors
        asked.update(options, shapes=[tuple(tensor.shape) for tensor in tensors])
        assert seqlens.tolist() == [100] * 3
        numpy = [tensor.float().numpy() for tensor in (q, kv)]

        def decode() -> None:
            from cumla import reference

            half = [array.astype("float16") for array in numpy]  # bfloat16 numbers around 0.1 fit
            got = reference.mla_decode(*half, table.numpy(), seqlens.numpy())
            out.copy_(torch.from_numpy(got.out.astype("float32")))

        return decode

    module = SimpleNamespace(prepare=prepare)
    monkeypatch.setitem(sys.modules, "cumla.bench.triton_decode", module)
    monkeypatch.setattr(peer_runs, "find_spec", lambda name: name)
    runs = run(gpu, CASE, "triton")
    assert runs.notes == []
    assert set(runs.times) == {"Triton"}
    assert (asked["longest"], asked["sm_count"]) == (100, 4)
    assert asked["softmax_scale"] == 576**-0.5


def test_who_runs_where(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peer_runs, "PEER_CASES", (CASE,))
    cases = (Case(1, 1, 1, 64), CASE)
    assert peer_cases(cases, None) == (CASE,)
    assert peer_cases(cases, ("sdpa",)) == cases
    assert peer_cases(cases, ()) == ()
