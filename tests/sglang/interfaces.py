# SPDX-License-Identifier: Apache-2.0
"""Compare the plugin with the SGLang that can be imported; its Python files suffice.

``PYTHONPATH=SGLANG:CUMLA:standins python interfaces.py``: SGLANG holds SGLang's package (an
unpacked wheel, if another version than the installed one is asked about), CUMLA an installed cumla.
An AssertionError says what does not fit; the last line printed is the version.
"""

from __future__ import annotations

import ast
from importlib.util import find_spec
from inspect import Parameter, getsource, signature
from pathlib import Path
from typing import Any

import sglang
from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
from sglang.srt.plugins import load_plugins

import cumla.sglang

VARIABLE = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)


def takes(ours: Any, theirs: Any) -> bool:
    """Whether a method takes what SGLang passes to the one that it overrides, and needs no more."""
    own, base = (signature(method).parameters for method in (ours, theirs))
    named = [name for name, p in base.items() if p.kind not in VARIABLE]
    needed = {name for name, p in own.items() if p.default is p.empty}
    return needed <= set(named) and list(own)[: len(named)] == named


def check_graphs_and_lists() -> None:
    """Return what is called in a capture, and what a layer of sparse MLA calls."""
    from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    # A capture lets the backend record what fills in a step, from arrays that stay.
    capture = getsource(DecodeCudaGraphRunner)
    assert "attn_backend.init_forward_metadata_in_graph(forward_batch)" in capture
    assert "attn_backend.init_forward_metadata_out_graph(forward_batch, in_capture=True)" in capture

    # Sparse MLA: what is called with queries in two parts.
    sparse = getsource(DeepseekSparseAttnBackend)
    for phase in ("forward_extend", "forward_decode"):
        assert "attn_sink" in signature(getattr(DeepseekSparseAttnBackend, phase)).parameters
    assert sparse.count("return self._forward_fa3(") == 2
    given = signature(DeepseekSparseAttnBackend._forward_fa3).parameters
    assert {"q_rope", "kv_cache", "q_nope", "page_table", "cache_seqlens", "sm_scale"} <= set(given)


def check_indexer() -> None:
    """Return what the indexer of sparse MLA calls, and when it is made."""
    from sglang.srt.layers.attention.dsa import dsa_indexer, utils

    theirs = dsa_indexer.Indexer
    steps = getsource(theirs._get_topk_paged)
    assert "self.sm_count = resolve_num_sms()" in getsource(theirs.__init__)
    assert "metadata = get_attn_backend().get_indexer_metadata(" in getsource(theirs.forward_cuda)
    assert "get_token_to_kv_pool().index_page_size" in steps
    assert "self._get_index_k_read_buffer(get_token_to_kv_pool(), layer_id)" in steps
    assert "self._mask_init_and_local_tokens(logits, seqlens_32)" in steps
    assert "q_offset = sum(metadata.get_dsa_extend_len_cpu())" in steps
    prefill = getsource(theirs._get_topk_ragged)
    assert "resolve_fp8_mqa_logits_fn()(" in prefill
    assert prefill.count("metadata.topk_transform(") == 2
    given = list(signature(theirs._get_topk_paged).parameters)

    from cumla.sglang import indexer

    assert takes(indexer.Metadata.topk_transform, indexer.Metadata.__bases__[0].topk_transform)
    assert list(signature(indexer.select).parameters) == given
    indexer.take_over()
    assert theirs._get_topk_paged is indexer.select
    for name in indexer._FUNCTIONS:
        assert getattr(dsa_indexer, name) is getattr(utils, name) is indexer._FUNCTIONS[name]


def check_blocks() -> None:
    """Return what the layers of MiniMax M3 call that choose blocks: all arguments are named."""
    from cumla.sglang.minimax_m3 import _FUNCTIONS, _HOME

    spec = find_spec(_HOME)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text("utf-8"))
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in _FUNCTIONS
    ]
    assert {node.func.id for node in calls if isinstance(node.func, ast.Name)} == {*_FUNCTIONS}
    shared = {"q", "k_cache", "v_cache", "sink", "req_to_token", "slot_ids", "seq_lens"}
    for node in calls:
        assert not node.args
        assert shared | {"sm_scale", "k_scale", "v_scale"} <= {of.arg for of in node.keywords}


def main() -> None:
    load_plugins()
    load_plugins()
    assert ATTENTION_BACKEND_CHOICES.count("cumla") == 1

    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.models.deepseek_common import attention_backend_handler, utils
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla
    from sglang.srt.speculative import eagle_worker_common
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from cumla.sglang.backend import Backend

    assert ATTENTION_BACKENDS["cumla"] is cumla.sglang._make
    (base,) = Backend.__bases__
    for name, method in vars(Backend).items():
        theirs = vars(base).get(name)
        if callable(method) and theirs is not None and not name.startswith("__"):
            assert takes(method, theirs), (name, signature(method), signature(theirs))

    # MLA: absorbed queries, in two parts, always.
    cumla.sglang._teach_deepseek(is_sparse=False)
    handler = attention_backend_handler.AttentionBackendRegistry.get_handler("cumla")
    assert handler(None, None).name == "MLA"
    assert utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.count("cumla") == 1
    core = getsource(forward_mla)
    assert "in FORWARD_ABSORB_CORE_ATTENTION_BACKENDS" in core
    assert "q_rope=q_pe" in core
    assert "k_rope=k_pe" in core

    # No step waits for lengths on the host.
    assert base.needs_cpu_seq_lens and not Backend.needs_cpu_seq_lens

    # What the backend reads.
    assert ForwardMode.IDLE.is_decode_or_idle()
    assert ForwardMode.TARGET_VERIFY.is_target_verify()
    layer = vars(RadixAttention(4, 64, 0.1, 2, 0))
    layer_reads = {"tp_q_head_num", "tp_k_head_num", "qk_head_dim", "v_head_dim", "scaling"}
    layer_reads |= {"layer_id", "logit_cap", "sliding_window_size", "k_scale", "v_scale"}
    layer_reads |= {"is_cross_attention", "attn_type", "xai_temperature_len", "pos_encoding_mode"}
    layer_reads |= {"use_irope"}
    assert layer_reads <= layer.keys()
    assert AttentionType.DECODER.value == "decoder"
    runner = getsource(ModelRunner)
    for name in ("use_mla_backend", "page_size", "dtype", "kv_cache_dtype", "token_to_kv_pool"):
        assert f"self.{name}" in runner, name
    # Trees of drafts.
    assert "self.spec_algorithm = " in runner
    assert callable(SpeculativeAlgorithm.is_ngram)
    worker = getsource(eagle_worker_common)
    assert "mask_mode, fill_mask = verify_mask.mode, verify_mask.is_read" in worker
    assert "verify_mask.buffer if verify_mask.fits(bs) else None" in worker
    check_graphs_and_lists()
    check_indexer()
    check_blocks()
    print(sglang.__version__)


if __name__ == "__main__":
    main()
