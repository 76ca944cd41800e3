# SPDX-License-Identifier: Apache-2.0
"""Generate with a tiny model in SGLang; the tests run this in an environment that has it.

``python generate.py MODEL FOLDER [--options JSON]``: MODEL is a key of the models of tests/vllm,
the options are those of sglang.Engine; PYTHONPATH has the folder standins. The last line printed is
JSON: the tokens, their logprobs, those that transformers computes for the same tokens in float32,
and how often cumla's plans ran.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "vllm"))
os.environ["HF_HUB_OFFLINE"] = "1"

from serve import COMMON, MODELS, PROMPTS

# What SGLang asks for beside what vLLM does.
MORE: dict[str, dict[str, Any]] = {
    "deepseek": {
        "moe_layer_freq": 1,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "rope_theta": 10000.0,
    },
    "gemma2": {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
}
# SGLang's name, on the CPU, of a rope without scaling.
ROPE = {
    "type": "yarn",
    "rope_type": "deepseek_yarn",
    "factor": 1.0,
    "original_max_position_embeddings": 2048,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}


def make_model(name: str, folder: Path) -> Any:
    """Write a model with weights as large as trained ones; return that of transformers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(exist_ok=True)
    config = COMMON | MODELS[name] | MORE.get(name, {})
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    loaded = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(loaded, attn_implementation="eager").float()
    for key, weight in sorted(model.named_parameters()):
        generator = torch.Generator().manual_seed(sum(key.encode()))
        if weight.ndim == 1:  # Gemma adds 1
            weight.data.fill_(0.0 if name == "gemma2" else 1.0)
        else:
            size = 1.5 * weight.shape[-1] ** -0.5
            if MODELS[name]["model_type"] == "gemma2" and "embed" in key:
                size *= 0.3  # it is the head as well, and each token would follow itself
            weight.data.copy_(torch.randn(weight.shape, generator=generator) * size)
    model.save_pretrained(folder)
    path.write_text(json.dumps(config | ({"rope_scaling": ROPE} if name == "deepseek" else {})))
    return model.eval()


def logprobs_of(model: Any, prompt: list[int], tokens: list[int]) -> list[float]:
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    chosen: list[float] = logits.float().log_softmax(-1)[range(len(tokens)), tokens].tolist()
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--options", type=json.loads, default={})
    asked = parser.parse_args()
    model = make_model(asked.model, asked.folder)
    counted = asked.folder / "calls"
    counted.write_text("")
    os.environ["CUMLA_TEST_CALLS"] = str(counted)

    import sglang

    options = {
        "attention_backend": "cumla",
        "context_length": 512,
        "device": "cpu",
        "dtype": "bfloat16",
        "log_level": "error",
        "max_running_requests": 4,
        "max_total_tokens": 4096,
        "random_seed": 0,
        "skip_tokenizer_init": True,
    }
    engine = sglang.Engine(model_path=str(asked.folder), **(options | asked.options))
    prompts = [[(7 * i * i + n) % 1000 + 5 for i in range(n)] for n in PROMPTS]
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    found = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
    engine.shutdown()
    tokens = [list(one["output_ids"]) for one in found]
    result = {
        "tokens": tokens,
        "logprobs": [
            [float(step[0]) for step in one["meta_info"]["output_token_logprobs"]] for one in found
        ],
        "expected": [logprobs_of(model, *pair) for pair in zip(prompts, tokens, strict=True)],
        "calls": Counter(counted.read_text().split()),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
