# SPDX-License-Identifier: Apache-2.0
"""Decoding steps of models of Transformers with cumla and with Transformers' own attention.

    python -m bench.transformers_steps FILE [--small] [--models NAME...] [--peers NAME...]

Models of random weights; the implementations take turns. Each gets the same prompts and the same
tokens, one a step. FILE holds, for each model and batch, the milliseconds of a prefill and a step
in each turn, and how far the log probabilities of the 20 best tokens are apart. --peers are other
names of Transformers than a model's usual ones, such as flash_attention_3 where the package
flash-attn-3 is installed. --small runs tiny models, on a CPU as well (cumla.reference computes
then).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

import cumla.transformers  # noqa: F401  registers "cumla"

MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    },
    "gemma2": {  # layers with windows beside full ones, soft caps
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "vocab_size": 65536,
        "query_pre_attn_scalar": 256,
        "sliding_window": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": None,
    },
    "gpt_oss": {  # windows and sinks
        "hidden_size": 2880,
        "intermediate_size": 720,
        "num_hidden_layers": 6,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 65536,
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
    },
}
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}
PEERS = {"llama": ("sdpa", "eager"), "gemma2": ("eager",), "gpt_oss": ("eager",)}
TURNS, STEPS = 3, 24


def build(name: str, small: bool, device: str) -> Any:
    settings = MODELS[name] | (
        {k: v for k, v in SMALL.items() if k in MODELS[name]} if small else {}
    )
    config = AutoConfig.for_model(
        name, max_position_embeddings=16384, eos_token_id=None, pad_token_id=2, **settings
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for key, weight in model.named_parameters():
                if weight.ndim > 1:
                    fan_in = weight.shape[-2] if weight.ndim == 3 else weight.shape[-1]
                    weight.normal_(0.0, 1.0 if "embed" in key else 1.5 * fan_in**-0.5)
                elif "sinks" in key:
                    weight.normal_()
    torch.set_default_dtype(torch.float32)
    return model


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def run(
    model: Any, name: str, prompt: Any, mask: Any, tokens: Any
) -> tuple[float, list[float], Any]:
    """Milliseconds of the prefill and of each step, and the logits of all steps."""
    model.set_attn_implementation(name)
    device = prompt.device.type
    settle(device)
    start = time.perf_counter()
    out = model(prompt, attention_mask=mask, use_cache=True, logits_to_keep=1)
    settle(device)
    prefill, steps, logits = (time.perf_counter() - start) * 1e3, [], [out.logits[:, -1].float()]
    for i in range(tokens.shape[1]):
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        start = time.perf_counter()
        out = model(
            tokens[:, i : i + 1],
            attention_mask=mask,
            past_key_values=out.past_key_values,
            use_cache=True,
        )
        settle(device)
        steps.append((time.perf_counter() - start) * 1e3)
        logits.append(out.logits[:, -1].float())
    return prefill, steps, torch.stack(logits, 1)


def apart(one: Any, other: Any) -> dict[str, float]:
    a, b = one.log_softmax(-1), other.log_softmax(-1)
    best = a.topk(20, -1).indices
    difference = (a.gather(-1, best) - b.gather(-1, best)).abs()
    same = (one.argmax(-1) == other.argmax(-1)).float().mean()
    return {
        "max": float(difference.max()),
        "mean": float(difference.mean()),
        "same_best": float(same),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file")
    parser.add_argument("--small", action="store_true", help="tiny models")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--peers", nargs="+", help="implementations beside cumla")
    parser.add_argument("--turns", type=int, default=TURNS)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rows": [],
    }
    for name in args.models:
        model = build(name, args.small, device)
        shapes = (
            [(1, 40, 0), (3, 40, 7)]
            if args.small
            else [(1, 2048, 0), (8, 4096, 0), (8, 2048, 500), (32, 2048, 0)]
        )
        for batch, length, padding in shapes:
            generator = torch.Generator().manual_seed(length)
            ids = torch.randint(5, 1000, (batch, length + STEPS), generator=generator).to(device)
            prompt, tokens = ids[:, :length], ids[:, length:]
            mask = None
            if padding:  # on the left, of every second request
                mask = torch.ones_like(prompt)
                mask[::2, :padding] = 0
            names = ("cumla", *(args.peers or PEERS[name]))
            row: dict[str, Any] = {
                "model": name,
                "batch": batch,
                "prompt": length,
                "padding": padding,
            }
            logits: dict[str, Any] = {}
            for turn in range(1 + args.turns):  # the first turn compiles and warms up
                for each in names:
                    prefill, steps, of = run(model, each, prompt, mask, tokens)
                    logits[each] = of
                    if turn:
                        row.setdefault("prefill_ms", {}).setdefault(each, []).append(
                            round(prefill, 3)
                        )
                        row.setdefault("step_ms", {}).setdefault(each, []).append(
                            round(statistics.median(steps), 3)
                        )
            row["apart"] = {each: apart(logits[each], logits["cumla"]) for each in names[1:]}
            if len(names) > 2:
                row["peers_apart"] = apart(logits[names[1]], logits[names[2]])
            found["rows"].append(row)
            print(json.dumps(row), flush=True)
            with open(args.file, "w") as file:
                json.dump(found, file, indent=1)
        del model
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
