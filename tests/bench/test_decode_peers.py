# SPDX-License-Identifier: Apache-2.0
"""Other libraries in the same run: PyTorch's attention on the CPU, the others in other words."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from bench import decode_peers
from bench.decode_peers import PEER_CASES, PEERS, run_peers
from bench.peers import Turns, load_peers
from cumla import reference
from cumla.bench.cases import DENSE, Case
from cumla.bench.timing import Timing
from tests.bench.conftest import Fakes
from tests.bench.fake_gpu import LAUNCH_US

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("one_thread")

CASE = Case(3, 2, 4, 100)
OWN_US, PEER_US = LAUNCH_US, 6.0
OWN, PEER = (Timing(us, us, us) for us in (OWN_US, PEER_US))


@pytest.fixture
def gpu(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU on which cumla takes 5 us and PyTorch's attention, the only peer installed, 6.

    It lists whose calls came, and the rests between them.
    """
    gpu: Any = fakes.gpu
    gpu.calls, gpu.bench, gpu.own_us = [], fakes.bench, OWN_US
    functions = torch.nn.functional
    attend = functions.scaled_dot_product_attention

    def timed(*args: Any, **kwargs: Any) -> Any:
        gpu.calls.append("sdpa")
        gpu.now += PEER_US
        return attend(*args, **kwargs)

    def own(*of: Any) -> None:
        gpu.calls.append("own")
        gpu.now += gpu.own_us - LAUNCH_US

    gpu.rest = lambda: gpu.calls.append("rest")
    fakes.cumla.spoil = own
    monkeypatch.setattr(functions, "scaled_dot_product_attention", timed)
    monkeypatch.setattr(decode_peers, "find_spec", lambda name: name if name == "torch" else None)
    return gpu


def run(gpu: Any, case: Case, *names: str) -> decode_peers.PeerRuns:
    return run_peers(gpu.bench, case, names)


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
def test_sdpa_computes_the_same(gpu: Any, case: Case):
    runs = run(gpu, case, "sdpa")
    assert runs == ({"torch SDPA": Turns(OWN, PEER)}, {}, [])


def test_they_run_in_turns(gpu: Any):
    run(gpu, CASE, "sdpa")
    times = "".join(call[0] for call in gpu.calls)  # rest, own, sdpa
    assert times == "s" + "rsss" + "rooo" + "rsss" + 3 * "rooorsss"


def test_what_is_much_slower_runs_apart(gpu: Any):
    gpu.own_us = PEER_US / 1.6
    assert run(gpu, CASE, "sdpa") == ({}, {"torch SDPA": PEER}, [])
    assert gpu.calls[-4:] == ["rest", *["sdpa"] * 3]


def take(gpu: Any, name: str, us: float, last: int = 10**6) -> tuple[str, tuple[str, ...], Any]:
    """A library that is right and takes some time, but raises in later calls than the last one."""

    def prepare(bench: Any, problem: Any, tensors: Any) -> tuple[Any, ...]:
        decode = problem.call()

        def call() -> Any:
            if gpu.calls.count(name) == last:
                raise RuntimeError("misaligned address")
            decode()
            del gpu.calls[-1]
            gpu.calls.append(name)
            gpu.now += us - gpu.own_us
            return tensors[4]

        return (call,)

    return name, (), prepare


def test_all_share_the_turns(gpu: Any, monkeypatch: pytest.MonkeyPatch):
    for name, us in (("triton", 13.0), ("flashmla", 4.0), ("fa3", 7.0)):
        monkeypatch.setitem(PEERS, name, take(gpu, name, us))
    turns, apart, notes = run(gpu, CASE, "triton", "flashmla", "fa3")
    assert {name: (own.us, peer.us) for name, (own, peer) in turns.items()} == {
        "flashmla": (5.0, 4.0),
        "fa3": (5.0, 7.0),
    }
    assert {name: time.us for name, time in apart.items()} == {"triton": 13.0}
    assert notes == []
    after = [gpu.calls[i + 1] for i, what in enumerate(gpu.calls) if what == "rest"]
    assert after[-10:] == ["triton", *["own", "flashmla", "fa3"] * 3]


def test_what_breaks_in_turns_becomes_a_note(gpu: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(PEERS, "triton", take(gpu, "triton", 13.0))
    monkeypatch.setitem(PEERS, "fa3", take(gpu, "fa3", 6.0, last=10))
    runs = run(gpu, CASE, "triton", "fa3")
    assert (runs.turns, set(runs.apart)) == ({}, {"triton"})
    assert runs.notes == ["times of peers: b3-s2-h4-kv100: RuntimeError: misaligned address"]


def test_wrong_peer_is_not_timed(gpu: Any, monkeypatch: pytest.MonkeyPatch):
    original = torch.nn.functional.scaled_dot_product_attention

    def blind(*args: Any, attn_mask: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)  # the first query sees the second one's token

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", blind)
    runs = run(gpu, CASE, "sdpa")
    assert (runs.turns, runs.apart) == ({}, {})
    (note,) = runs.notes
    assert note.startswith("torch SDPA: b3-s2-h4-kv100: CheckError: ")
    assert "out is wrong in 12 of 24 rows" in note


def test_peer_that_raises_becomes_a_note(gpu: Any, monkeypatch: pytest.MonkeyPatch):
    def fail(*arguments: Any) -> Any:
        raise RuntimeError("no kernel image\nfor this device")

    monkeypatch.setitem(decode_peers.PEERS, "triton", ("Triton", (), fail))
    runs = run(gpu, CASE, "triton", "sdpa")
    assert runs.notes == ["Triton: b3-s2-h4-kv100: RuntimeError: no kernel image"]
    assert set(runs.turns) == {"torch SDPA"}


@pytest.mark.parametrize(
    ("case", "name", "reason"),
    [
        (Case(2, 1, 4, 64, seed=0), "sdpa", "needs requests of the same length"),
        (Case(2, 1, 4, 64, kv_heads=2), "triton", "needs one kv head"),
        (Case(2, 1, 4, 64, kv_heads=2), "flashinfer", "needs one kv head"),
        (Case(2, 1, 4, 64, kv_heads=2), "flashmla", "needs one kv head"),
        (Case(2, 1, 4, 64, kv_heads=2), "fa3", "needs one kv head"),
    ],
)
def test_what_a_peer_cannot_do_is_said(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, case: Case, name: str, reason: str
):
    monkeypatch.setattr(decode_peers, "find_spec", lambda name: name)
    assert run(gpu, case, name).notes[0].endswith(f"{case.name}: ValueError: {reason}")


def test_missing_libraries_are_named(gpu: Any):
    runs = run_peers(gpu.bench, CASE)
    assert set(runs.turns) == {"torch SDPA"}
    assert runs.notes == [
        "Triton: triton not installed",
        "FlashInfer: flashinfer not installed",
        "FlashMLA: flash_mla not installed",
        "FA3-MLA: flash_attn_interface not installed",
    ]


def attend(q: Any, keys: Any, scale: float, causal: bool) -> Any:
    """A request in float32: q (q_len, heads, 576) and its tokens' keys (tokens, 576)."""
    scores = torch.einsum("qhd,td->hqt", q.float(), keys.float()) * scale
    if causal:
        count, length = len(q), len(keys)
        hidden = torch.ones(count, length, dtype=torch.bool).triu(length - count + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("hqt,td->qhd", scores.softmax(-1), keys[:, :512].float()).to(q.dtype)


def attend_paged(q: Any, kv: Any, table: Any, seqlens: Any, scale: float, causal: bool) -> Any:
    """All requests, from pages (pages, 64, 1, 576); what the table has beyond them is not read."""
    return torch.stack(
        [
            attend(
                q[i], kv[table[i, : -(-length // 64)].long()].flatten(0, 2)[:length], scale, causal
            )
            for i, length in enumerate(seqlens.tolist())
        ]
    )


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
            keys = torch.cat([ckv[own], kpe[own]], -1).flatten(0, 1)[:length]
            rows = slice(int(queries[i]), int(queries[i + 1]))
            out[rows] = attend(torch.cat([q_nope[rows], q_pe[rows]], -1), keys, scale, causal)
        return out


both_lengths = pytest.mark.parametrize(
    "case", [CASE, Case(5, 1, 2, 130, dtype="float16", seed=1)], ids=lambda case: case.name
)


@both_lengths
def test_flashinfer_gets_what_it_needs(gpu: Any, monkeypatch: pytest.MonkeyPatch, case: Case):
    module = SimpleNamespace(BatchMLAPagedAttentionWrapper=Wrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(mla=module))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", module)
    monkeypatch.setattr(decode_peers, "find_spec", lambda name: name)
    runs = run(gpu, case, "flashinfer")
    assert runs.notes == []
    assert set(runs.turns) == {"FlashInfer"}


@both_lengths
def test_flashmla_gets_what_it_needs(gpu: Any, monkeypatch: pytest.MonkeyPatch, case: Case):
    schedule = torch.zeros(4, 8), torch.zeros(case.batch + 1)

    def get_mla_metadata(cache_seqlens: Any, rows: int, kv_heads: int) -> Any:
        gpu.now += 1000.0  # if it were timed, that would show
        assert cache_seqlens.tolist() == case.lengths.tolist()
        assert (rows, kv_heads) == (case.q_len * case.heads, 1)
        return schedule

    def flash_mla_with_kvcache(
        *arguments: Any, softmax_scale: float | None = None, causal: bool = False
    ) -> Any:
        q, k_cache, block_table, cache_seqlens, head_dim_v, *scheduled = arguments
        assert head_dim_v == 512
        assert all(got is made for got, made in zip(scheduled, schedule, strict=True))
        gpu.now += PEER_US
        out = attend_paged(q, k_cache, block_table, cache_seqlens, softmax_scale, causal)
        return out, torch.zeros(case.batch, case.heads, case.q_len)

    module = SimpleNamespace(
        get_mla_metadata=get_mla_metadata, flash_mla_with_kvcache=flash_mla_with_kvcache
    )
    monkeypatch.setitem(sys.modules, "flash_mla", module)
    monkeypatch.setattr(decode_peers, "find_spec", lambda name: name)
    runs = run(gpu, case, "flashmla")
    assert runs.notes == []
    assert runs.turns == {"FlashMLA": Turns(OWN, PEER)}


class FlashAttention3:
    """Its interface, with a time for each number of splits and one that may be wrong."""

    def __init__(self, gpu: Any, wrong: int | None = None) -> None:
        self.gpu = gpu
        self.times = {0: 6.5, 1: 6.0, 32: 7.0}
        self.wrong = wrong

    def get_scheduler_metadata(
        self,
        batch_size: int,
        max_seqlen_q: int,
        max_seqlen_k: int,
        num_heads_q: int,
        num_heads_kv: int,
        headdim: int,
        cache_seqlens: Any,
        **options: Any,
    ) -> Any:
        self.gpu.now += 1000.0  # if it were timed, that would show
        shape = (batch_size, max_seqlen_q, num_heads_q, num_heads_kv, headdim)
        return options | {"shape": shape, "longest": max_seqlen_k, "seqlens": cache_seqlens}

    def flash_attn_with_kvcache(
        self,
        q: Any,
        k_cache: Any,
        v_cache: Any,
        *,
        qv: Any,
        cache_seqlens: Any,
        page_table: Any,
        softmax_scale: float,
        causal: bool,
        num_splits: int,
        scheduler_metadata: Any,
    ) -> Any:
        assert scheduler_metadata == {
            "shape": (*q.shape[:3], 1, q.shape[3]),
            "longest": page_table.shape[1] * k_cache.shape[1],
            "seqlens": cache_seqlens,
            "qkv_dtype": q.dtype,
            "headdim_v": v_cache.shape[3],
            "page_size": k_cache.shape[1],
            "causal": causal,
            "num_splits": num_splits,
        }
        assert k_cache.data_ptr() == v_cache.data_ptr() + 2 * 512  # nothing has been copied
        assert q.data_ptr() == qv.data_ptr() + 2 * 512
        self.gpu.now += self.times[num_splits]
        kv = torch.cat([v_cache, k_cache], -1)
        q = torch.cat([qv, q], -1)
        out = attend_paged(q, kv, page_table, cache_seqlens, softmax_scale, causal)
        return out * 2 if num_splits == self.wrong else out


@both_lengths
def test_fa3_counts_with_its_best_number_of_splits(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, case: Case
):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", FlashAttention3(gpu))
    monkeypatch.setattr(decode_peers, "find_spec", lambda name: name)
    runs = run(gpu, case, "fa3")
    assert runs.notes == []
    assert runs.turns == {"FA3-MLA": Turns(OWN, PEER)}


@pytest.mark.parametrize("wrong", [0, 1, 32])
def test_fa3_is_checked_with_each_number_of_splits(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, wrong: int
):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", FlashAttention3(gpu, wrong))
    monkeypatch.setattr(decode_peers, "find_spec", lambda name: name)
    runs = run(gpu, CASE, "fa3")
    assert (runs.turns, runs.apart) == ({}, {})
    assert "out is wrong in 24 of 24 rows" in runs.notes[0]


def test_triton_gets_what_it_needs(gpu: Any, monkeypatch: pytest.MonkeyPatch):
    """The kernel itself is tested in test_triton_decode.py."""
    asked: dict[str, Any] = {}

    def prepare(*tensors: Any, **options: Any) -> Any:
        q, kv, table, seqlens, out = tensors
        asked.update(options, shapes=[tuple(tensor.shape) for tensor in tensors])
        assert seqlens.tolist() == [100] * 3
        numpy = [tensor.float().numpy() for tensor in (q, kv)]

        def decode() -> None:
            half = [array.astype("float16") for array in numpy]  # bfloat16 numbers around 0.1 fit
            got = reference.mla_decode(*half, table.numpy(), seqlens.numpy())
            out.copy_(torch.from_numpy(got.out.astype("float32")))

        return decode

    module = SimpleNamespace(prepare=prepare)
    monkeypatch.setitem(sys.modules, "bench.triton_decode", module)
    monkeypatch.setattr(decode_peers, "find_spec", lambda name: name)
    runs = run(gpu, CASE, "triton")
    assert runs.notes == []
    assert set(runs.turns) == {"Triton"}
    assert (asked["longest"], asked["sm_count"]) == (100, 4)
    assert asked["softmax_scale"] == 576**-0.5


def test_peers_run_on_rows_of_the_table():
    """Where times are published, a title supersedes them."""
    assert set(PEER_CASES) < set(DENSE)
    published = {row["peer"] for row in load_peers().rows}
    assert {PEERS[name][0] for name in ("flashinfer", "flashmla", "fa3")} <= published
