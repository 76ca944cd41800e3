# SPDX-License-Identifier: Apache-2.0
"""Makes the page of models, GPUs and features by asking the code which kernels serve each model.

    python docs/scripts/support.py            # prints the page
    python docs/scripts/support.py README.md  # writes the README's table

`MODELS` holds what a model's config.json says about its attention. All else comes from what
chooses the kernels, from the plugin of vLLM, and from recorded runs.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

import cumla  # noqa: E402
from cumla._choices import E4M3, Layers  # noqa: E402
from cumla.launch import all_specs  # noqa: E402
from cumla.launch.sparse.mla_sparse import sparse_specs  # noqa: E402
from cumla.vllm._models import Model, read_model  # noqa: E402

_SM_COUNT = 132  # of an H200
_FIXED = {"num_hidden_layers": 2, "dtype": "bfloat16"}
_MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
_SMALL_4 = {"kv_lora_rank": 256, "qk_nope_head_dim": 64}


class Entry(NamedTuple):
    """A model, or several of one shape."""

    name: str
    config: dict[str, Any]
    softcap: bool = False
    in_readme: bool = False


def _mla(kind: str, heads: int) -> dict[str, Any]:
    return {"model_type": kind, "num_attention_heads": heads, **_MLA}


def _gqa(kind: str, heads: int, kv_heads: int, head_dim: int, **more: Any) -> dict[str, Any]:
    numbers = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    return {"model_type": kind, **numbers, **more}


def _alternating(window: int) -> dict[str, Any]:
    return {"sliding_window": window, "layer_types": ["sliding_attention", "full_attention"]}


MODELS = (
    Entry("DeepSeek-V2-Lite", _mla("deepseek_v2", 16), in_readme=True),
    Entry("DeepSeek-V2, V3, R1", _mla("deepseek_v3", 128), in_readme=True),
    Entry("Kimi K2", _mla("kimi_k2", 64)),
    Entry("Mistral Small 4", {**_mla("mistral4", 32), **_SMALL_4}, in_readme=True),
    Entry("Llama 3.1 8B, Mistral 7B v0.3, Qwen3 8B", _gqa("llama", 32, 8, 128), in_readme=True),
    Entry("Llama 3.1 70B", _gqa("llama", 64, 8, 128)),
    Entry("Qwen2.5 7B", _gqa("qwen2", 28, 4, 128)),
    Entry("Phi-3 mini", _gqa("phi3", 32, 32, 96)),
    Entry("Gemma 2 9B", _gqa("gemma2", 16, 8, 256, **_alternating(4096)), True, True),
    Entry("Gemma 3 4B, text", _gqa("gemma3_text", 8, 4, 256, **_alternating(1024))),
    Entry("Gemma 3 27B, text", _gqa("gemma3_text", 32, 16, 128, **_alternating(1024))),
    Entry("gpt-oss 20B, 120B", _gqa("gpt_oss", 64, 8, 64, **_alternating(128)), in_readme=True),
)


class SparseEntry(NamedTuple):
    """A model with sparse MLA: its cache and its lists, for all heads."""

    name: str
    num_heads: int
    cache: str
    format: str  # in words
    topk: int
    config: dict[str, Any]
    extra_topk: int = 0


_V3 = {**_mla("deepseek_v32", 128), "index_topk": 2048}
_V4 = {**_mla("deepseek_v4", 128), "compress_ratios": [4], "index_topk": 512}
SPARSE = (
    SparseEntry("DeepSeek-V3.2", 128, "v32", "packed rows of 656 bytes", 2048, _V3),
    SparseEntry("DeepSeek-V4, 64 heads", 64, "v4", "slots of 584 bytes", 128, _V4, 512),
    SparseEntry("DeepSeek-V4, 128 heads", 128, "v4", "slots of 584 bytes", 128, _V4, 1024),
)
# Compute capability 9.0; multiprocessors as NVIDIA lists them.
GPUS = (
    ("H200", 132),
    ("H100", 132),
    ("H800", 132),
    ("GH200", 132),
    ("H20", 78),
)

_TOP = """\
# Models, GPUs and features

This page is made by asking the code: which kernels serve a model's layers, and what vLLM's plugin
answers. Heads are those of the whole model, on one GPU; under tensor parallelism pass what a GPU
has. [What works](limits.md) lists each function.
"""
_AFTER_MODELS = """\
*FP8* is an e4m3 cache: [of MLA](../guide/fp8-caches.md), [of
MHA](../guide/attention.md#e4m3-keys-and-values). *Decoding* is 128 requests with one new token,
*prefill* one prompt of 8,192 tokens, both over a 16-bit cache with pages of 64. Kernels of small
batches and of FP8 caches can differ: `python -m cumla info --vllm CONFIG` prints them for your
model. SGLang's [plugin](../integrations/sglang.md) serves the same layers. The sparse GQA of
MiniMax M3 has [functions and a step of its own](../guide/block-sparse.md). [MLA on
Hopper](../guide/mla-on-hopper.md) has more models with MLA.
"""
_AFTER_SPARSE = """\
V4's lists are those of the window and of the selected tokens. In vLLM V4 has run with [vLLM's own
classes on the CPU](../integrations/vllm.md#deepseek-v4) alone. SGLang's plugin serves V3.2.
"""
_AFTER_GPUS = """\
All GPUs of compute capability 9.0 run the same kernels with the same features. The number of SMs
decides how requests are split. *GPU tests recorded* tells where [the
evidence](../contributing/evidence.md) of the present kernels comes from. Any other GPU is refused;
arrays in CPU memory work on every machine.
"""
_FEATURES = """\
## Features

| | MLA | sparse MLA | MHA, GQA, MQA |
|---|---|---|---|
| function | `mla_decode`, `mla_attention` | `mla_sparse_decode`, `DSAPlan` | `attention` |
| plan for all layers, CUDA graphs with changing lengths | yes | yes | yes |
| variable query lengths: decoding, drafts and chunks in one call | yes | yes | yes |
| any page size | yes | yes | yes |
| e4m3 cache | yes | yes | yes |
| sliding windows | over 16-bit caches | by lists | yes |
| attention sinks | yes | yes | yes |
| soft-capping | no | no | yes |
| `batch_invariant` | yes | yes | yes |
| `jax.jit`, `torch.compile` | yes | yes | yes |
| context parallelism | yes | by four calls | yes |
| gradients | no | no | no |
"""


def models(readme: bool = False) -> list[str]:
    """Make the table of models, a row each; the README has some of them."""
    rows = [
        "| model | heads | layers | function | decoding | prefill | FP8 | vLLM |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for entry in MODELS:
        if readme and not entry.in_readme:
            continue
        model = _read(entry.config)
        cells = [entry.name, _heads(model), _layers(model, entry), _function(model)]
        cells += [_kernels(model, 128, 128, 1), _kernels(model, 1, 8192)]
        rows.append(f"| {' | '.join([*cells, _fp8(model), _served(model)])} |")
    return rows


def sparse_models() -> list[str]:
    """Make the table of models with sparse MLA."""
    rows = ["| model | heads | cache | function | attention | vLLM |", "|---|---|---|---|---|---|"]
    for entry in SPARSE:
        more: dict[str, Any] = {"extra_topk": entry.extra_topk, "cache_format": entry.cache}
        plan = cumla.MLASparsePlan(128, 1, entry.num_heads, entry.topk, **more, like=np.zeros(0))
        last = sparse_specs(replace(plan.key, sm_count=_SM_COUNT))[-1]
        names = "`mla_sparse_decode`, `DSAPlan`"
        cells = [entry.name, str(entry.num_heads), entry.format, names, f"`{last.stem}`"]
        rows.append(f"| {' | '.join([*cells, _served(_read(entry.config))])} |")
    return rows


def gpus() -> list[str]:
    """Make the table of GPUs: what has run on each."""
    runs = json.loads((ROOT / "tests/gpu/evidence/runs.json").read_text("utf-8")).values()
    tested = {run["gpu"] for run in runs}
    rows = [
        "| GPU | SMs | features | GPU tests recorded | benchmark records |",
        "|---|---:|---|---|---:|",
    ]
    for name, sms in GPUS:
        passed = "yes" if any(_is(name, gpu) for gpu in tested) else "no"
        count = sum(bool(re.search(rf"(?i){name}(?![0-9])", text)) for text in _records())
        rows.append(f"| {name} | {sms} | all | {passed} | {count} |")
    return rows


def page() -> str:
    """Make the whole page."""
    parts = [
        _TOP,
        "## Your model\n",
        "\n".join(models()) + "\n",
        _AFTER_MODELS,
        "### Sparse MLA\n",
        "\n".join(sparse_models()) + "\n",
        _AFTER_SPARSE,
        "## Your GPU\n",
        "\n".join(gpus()) + "\n",
        _AFTER_GPUS,
        _FEATURES,
    ]
    return "\n".join(parts)


def _read(config: dict[str, Any]) -> Model:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**_FIXED, **config}), "utf-8")
        return read_model(folder)


def _heads(model: Model) -> str:
    if model.use_mla:
        return str(model.num_heads)
    return f"{model.num_heads}/{model.num_kv_heads} of {model.head_size}"


def _layers(model: Model, entry: Entry) -> str:
    if model.use_mla:
        return "MLA"
    windows = [f"window {window:,}" for window in model.windows if window]
    more = [*windows, *(["sinks"] if model.has_sink else [])]
    kind = "MHA" if model.num_heads == model.num_kv_heads else "GQA"
    return ", ".join([kind, *more, *(["soft-capping"] if entry.softcap else [])])


def _function(model: Model) -> str:
    return "`mla_decode`, `mla_attention`" if model.use_mla else "`attention`"


def _each(model: Model, cache: str | None = None) -> Iterator[Layers]:
    """Yield what the layers of each window have in common."""
    for window in model.windows:
        size = model.head_size
        more: dict[str, Any] = {"head_dim": size}
        if not model.use_mla:
            more |= {"num_kv_heads": model.num_kv_heads, "head_dim_v": size}
        left = None if window is None else window - 1
        yield Layers(model.num_heads, 64, model.dtype, cache, window=left, **more)


def _kernels(model: Model, batch: int, tokens: int, q_len: int = 0) -> str:
    stems = {spec.entry: spec.stem for spec in all_specs()}
    found = [name for each in _each(model) for name in each.kernels(batch, tokens, q_len)]
    return ", ".join(f"`{stem}`" for stem in dict.fromkeys(stems[name] for name in found))


def _fp8(model: Model) -> str:
    try:
        for each in _each(model, E4M3):
            each.kernels(128, 128, 1)
    except (TypeError, ValueError):
        return "no"
    return "yes"


def _served(model: Model) -> str:
    return "; ".join(model.refusals("fp8_ds_mla" if model.is_v4 else "auto")) or "yes"


def _records() -> list[str]:
    return [path.name + path.read_text("utf-8") for path in (ROOT / "records").glob("*.json")]


def _is(name: str, gpu: str) -> bool:
    return name in gpu.replace("-", " ").split()


def with_models(readme: str) -> str:
    """Put the table into the README, in place of the one that is there."""
    table = "\n".join(models(readme=True)) + "\n"
    found, count = re.subn(r"^\| model \|.*\n(?:\|.*\n)+", table, readme, count=1, flags=re.M)
    if not count:
        raise ValueError("README.md has no table of models")
    return found


def main(arguments: list[str]) -> None:
    """Print the page, or write the README's table."""
    if not arguments:
        print(page())
    for name in arguments:
        path = Path(name)
        path.write_text(with_models(path.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
