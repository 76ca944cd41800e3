# SPDX-License-Identifier: Apache-2.0
"""Generate with a tiny model in vLLM; the tests run this in an environment that has it.

``python serve.py MODEL BACKEND FOLDER [--options JSON]``: MODEL is a key of MODELS, BACKEND "own"
or "cumla", the options are those of vllm.LLM. The last line printed is JSON: tokens, logprobs, and
how often cumla's plans ran. vLLM's CPU platform asks for names of its own, never for CUSTOM.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # or the counts are another process's
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}

COMMON = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "deepseek": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "first_k_dense_replace": 2,
        "moe_intermediate_size": 128,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    # Windows beside full attention; Gemma 2 has soft caps, too.
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": None,
    },
}
PROMPTS = (3, 40, 70, 150)


def count_calls() -> Counter[str]:
    """Count what cumla is asked for."""
    import cumla

    calls: Counter[str] = Counter()
    for name in ("MLADecodePlan", "MLAAttentionPlan", "AttentionPlan"):
        plan = getattr(cumla, name)

        def run(self: Any, *args: Any, _run: Any = plan.run, _name: str = name, **kw: Any) -> Any:
            calls[_name] += 1
            return _run(self, *args, **kw)

        plan.run = run
    return calls


def use_cumla() -> None:
    """Let the names that vLLM's CPU platform asks for be what the plugin has registered."""
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    load_general_plugins()
    for name in ("CPU_MLA", "CPU_ATTN"):
        if name in AttentionBackendEnum.__members__:
            register_backend(AttentionBackendEnum[name], AttentionBackendEnum.CUSTOM.get_path())


def fill_weights() -> None:
    """Let random weights be as large as trained ones: vLLM's own leave all logits at 0."""
    import torch
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    def load_weights(self: Any, model: torch.nn.Module, model_config: Any) -> None:
        for name, weight in sorted(model.named_parameters()):
            generator = torch.Generator().manual_seed(sum(name.encode()))
            if weight.ndim == 1:
                weight.data.fill_(1.0)
            else:
                size = 1.5 * weight.shape[-1] ** -0.5
                values = torch.randn(weight.shape, generator=generator) * size
                weight.data.copy_(values)

    DummyModelLoader.load_weights = load_weights  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("backend", choices=("own", "cumla"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--options", type=json.loads, default={})
    asked = parser.parse_args()

    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    asked.folder.mkdir(exist_ok=True)
    (asked.folder / "config.json").write_text(json.dumps(COMMON | MODELS[asked.model]))
    calls: Counter[str] = Counter()
    if asked.backend == "cumla":
        calls = count_calls()
        if on_cpu:
            use_cumla()

    fill_weights()
    from vllm import LLM, SamplingParams

    options = {
        "dtype": "bfloat16",
        "enforce_eager": True,
        "load_format": "dummy",
        "max_model_len": 512,
        "max_num_seqs": 4,
        "seed": 0,
        "skip_tokenizer_init": True,
    }
    if on_cpu:
        options["attention_backend"] = "CPU_MLA" if asked.model == "deepseek" else "CPU_ATTN"
    elif asked.backend == "cumla":
        options["attention_backend"] = "CUSTOM"
    llm = LLM(str(asked.folder), **(options | asked.options))
    prompts = [
        {"prompt_token_ids": [(7 * i * i + n) % 1000 + 5 for i in range(n)]} for n in PROMPTS
    ]
    sampling = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, detokenize=False, logprobs=5
    )
    found = [one.outputs[0] for one in llm.generate(prompts, sampling, use_tqdm=False)]
    tokens = [list(one.token_ids) for one in found]
    logprobs = [
        [{str(t): lp.logprob for t, lp in step.items()} for step in one.logprobs] for one in found
    ]
    print(json.dumps({"tokens": tokens, "logprobs": logprobs, "calls": calls}))


if __name__ == "__main__":
    main()
