# SPDX-License-Identifier: Apache-2.0
"""What records vLLM's steps: cumla's classes and a peer on a stub of vLLM, and the tables."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from bench import vllm_layers, vllm_steps
from bench.vllm_layers import BACKENDS, Case, case_rows, part_rows
from tests.selection import some
from tests.vllm.stub import stubbed

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("one_thread", "vllm")

MLA = Case("mla", 2, 1, "bfloat16", 3, 70, layers=2)
CASES = (MLA, replace(MLA, family="mha", heads=4, kv_heads=2))
CASES += tuple(replace(case, cache="fp8") for case in CASES)


@dataclass
class Common:
    """vLLM's description of a step."""

    query_start_loc: Any
    query_start_loc_cpu: Any
    seq_lens: Any
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Any
    slot_mapping: Any
    causal: bool = True
    mm_req_doc_ranges: Any = None


def config() -> SimpleNamespace:
    parts = ("cache_config", "scheduler_config", "parallel_config")
    compilation = SimpleNamespace(static_forward_context={}, max_cudagraph_capture_size=None)
    empty = {name: SimpleNamespace() for name in parts}
    return SimpleNamespace(compilation_config=compilation, **empty)


class MLABuilder:
    """The steps of the base class of vLLM's builders for MLA."""

    def __init__(self, spec: Any, names: list[str], config: Any, device: Any) -> None:
        self.kv_cache_spec, self.vllm_config, self.device = spec, config, device
        self.page_size, self.dcp_world_size = spec.block_size, 1
        self.model_config = config.model_config
        self.num_heads = self.model_config.get_num_attention_heads(None)

    def __class_getitem__(cls, of: Any) -> type:
        return cls

    def build(self, common_prefix_len: int, common: Common, fast_build: bool = False) -> Any:
        decode = self._build_decode(  # type: ignore[attr-defined]
            block_table_tensor=common.block_table_tensor,
            seq_lens_device=common.seq_lens,
            query_start_loc_cpu=common.query_start_loc_cpu,
            query_start_loc_device=common.query_start_loc,
            num_decode_tokens=common.num_actual_tokens,
            dcp_tot_seq_lens_device=None,
        )
        return SimpleNamespace(decode=decode, prefill=None)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stub, with what builders, layers and caches are made of."""
    with stubbed():
        modules, spec = sys.modules, SimpleNamespace
        named: Any = modules["vllm.config"]
        named.VllmConfig = config
        named.set_current_vllm_config = lambda config: torch.no_grad()
        backend: Any = modules["vllm.v1.attention.backend"]
        backend.CommonAttentionMetadata = Common
        backend.AttentionImpl.supports_quant_query_input = False
        backend.AttentionMetadataBuilder.build_for_cudagraph_capture = capture
        mla: Any = modules["vllm.model_executor.layers.attention.mla_attention"]
        mla.MLACommonMetadataBuilder = MLABuilder
        MLABuilder.build_for_cudagraph_capture = capture  # type: ignore[attr-defined]
        mla.MLACommonBackend.get_kv_cache_shape = staticmethod(
            lambda pages, page, heads, width, stored: (pages, page, width)
        )
        interface = SimpleNamespace(MLAAttentionSpec=spec, FullAttentionSpec=spec)
        monkeypatch.setitem(modules, "vllm.v1.kv_cache_interface", interface)  # type: ignore[arg-type]
        yield


def capture(builder: Any, common: Common) -> Any:
    return builder.build(0, common)


def peers(monkeypatch: pytest.MonkeyPatch, **named: str) -> None:
    """Let these run beside cumla."""
    for family, own in (("mla", "cumla.vllm.mla:Backend"), ("mha", "cumla.vllm.mha:Backend")):
        monkeypatch.setitem(BACKENDS, family, {"cumla": own} | named)


@pytest.mark.parametrize("case", some(CASES, 3), ids=lambda case: f"{case.family} {case.cache}")
def test_backends_compute_the_same(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer is cumla once more: with the same caches, checked against the same reference."""
    peers(monkeypatch, peer=BACKENDS[case.family]["cumla"], gone="no_such_module:Backend")
    own, peer, gone = case_rows(case, "cpu", 60, repeats=1)
    assert gone["failed"].startswith("ModuleNotFoundError")
    assert own["correct"]
    assert own["error"] < 1e-2
    assert (peer["error"], peer["differs"]) == (own["error"], 0)
    for row in (own, peer):
        assert row["us"] > 0
        assert row["graph_us"] > 0
        assert row["build_us"] < row["us"]


def test_replays_that_do_not_follow_the_lengths_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    peers(monkeypatch)

    def once(backend: vllm_layers.Backend) -> None:
        backend.outs = backend.outs or backend.attend(backend.begin())

    monkeypatch.setattr(vllm_layers.Backend, "_again", once)
    (row,) = case_rows(MLA, "cpu", 60, repeats=1)
    assert not row["correct"]


def test_cases_without_time_or_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    (late,) = part_rows([MLA], "cpu", 0)
    assert late["skipped"] == "no time was left"
    monkeypatch.setattr(vllm_layers, "case_rows", None)
    (failed,) = part_rows([MLA], "cpu", 9)
    assert failed["failed"].startswith("TypeError")


def test_tables_have_ratios_and_reasons() -> None:
    case = dict.fromkeys(vllm_steps._CASE, 1)
    own = case | {"backend": "cumla", "us": 10.0, "graph_us": 5.0, "error": 1e-3, "correct": True}
    peer = own | {"backend": "FA3", "us": 12.5, "error": 0.5, "correct": False}
    other = peer | {"batch": 2}
    rows = [own, peer, other, {"part": "mla", "failed": "killed"}]
    text = vllm_steps.to_markdown(vllm_steps.with_ratios({"rows": rows, "protocol": "How"}))
    assert (peer["us_x"], peer["graph_us_x"]) == (1.25, 1.0)
    assert "us_x" not in own | other
    assert "| FA3 | - | 12.5 | 1.25 | 5.0 | 1.00 |" in text
    assert "FA3, 1, 1, 1, 1, 1, 1, 1: error 5.0e-01" in text
    assert "mla: killed" in text


def test_a_record_shares_its_time_among_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: dict[str, float] = {}

    def printed(module: str, name: str, seconds: float) -> list[dict[str, Any]]:
        assert module == "bench.vllm_layers"
        shares[name] = seconds
        return [{"failed": "no GPU"}]

    named: dict[str, Any] = {"printed_rows": printed, "Gpu": SimpleNamespace}
    named |= {"environment": lambda gpu: {"machine": {}}, "refuse_slow_kernels": lambda: None}
    for name, value in named.items():
        monkeypatch.setattr(vllm_steps, name, value)
    monkeypatch.setattr(vllm_steps.metadata, "version", lambda package: f"{package} 1")
    monkeypatch.setattr(vllm_steps.time, "monotonic", lambda: 0.0)
    *_, results = vllm_steps.run(48)
    assert results["machine"] == {"vllm": "vllm 1"}
    assert [row["part"] for row in results["rows"]] == list(vllm_layers.PARTS)
    assert list(shares.values()) == [16.0, 12.0, 32.0, 48.0]  # of 16, 8, 16 and 8 cases
