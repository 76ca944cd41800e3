# SPDX-License-Identifier: Apache-2.0
"""Which models the plugin serves, told from a config.json: without vLLM, torch or a GPU."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cumla.vllm._kernels import DTYPES, NO_ALIBI, MHAKernels, MLAKernels

if TYPE_CHECKING:
    from collections.abc import Iterator

# Of these vLLM passes latent rows, where they have a kv_lora_rank.
_WITH_MLA = (
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_mtp", "kimi_k2"),
    *("kimi_linear", "glm4_moe_lite", "glm_moe_dsa", "longcat_flash", "longcat_flash_ngram"),
    *("pangu_ultra_moe", "bailing_hybrid", "axk1"),
)
_IMAGES_SEE_EACH_OTHER = ("bagel", "gemma3", "molmo2", "moondream3", "paligemma", "umm")
_WITH_ALIBI = ("bloom", "mpt", "step1")
_OTHER_LAYERS = ("linear_attn", "linear_num", "mamba", "ssm_", "lru_", "rwkv")
# What published files leave out, since transformers has it as a default.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "gpt_oss": {"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2},
    "cohere2": {"sliding_window_pattern": 4},
}


class Model(NamedTuple):
    """Attention of a model on each GPU."""

    kind: str
    dtype: str
    use_mla: bool
    head_size: int  # with MLA the width of a cached row
    num_heads: int
    num_kv_heads: int
    windows: dict[int | None, int]  # numbers of layers: those of a window, and those without one
    has_sink: bool
    is_sparse: bool
    refused: tuple[str, ...]  # what else the plugin or vLLM refuses
    untried: tuple[str, ...]

    @property
    def kernels(self) -> type[MLAKernels | MHAKernels]:
        """What vLLM asks about this model."""
        return MLAKernels if self.use_mla else MHAKernels

    def refusals(self, kv_cache_dtype: str) -> list[str]:
        """Tell why vLLM would not take the backend, by the answers that vLLM gets."""
        kernels, found = self.kernels, list(self.refused)
        if self.is_sparse:
            found.append("layers: needs dense attention, got sparse MLA")
        if not kernels.supports_head_size(self.head_size):
            need = f"rows of {MLAKernels.get_supported_head_sizes()[0]} columns"
            need = need if self.use_mla else "a multiple of 8, up to 512"
            found.append(f"head size: needs {need}, got {self.head_size}")
        if not kernels.supports_dtype(self.dtype):
            found.append(f"--dtype: needs {' or '.join(DTYPES)}, got {self.dtype}")
        if kv_cache_dtype not in kernels.supported_kv_cache_dtypes:
            names = ", ".join(kernels.supported_kv_cache_dtypes)
            found.append(f"--kv-cache-dtype: needs one of {names}, got {kv_cache_dtype}")
        if self.has_sink and not kernels.supports_sink():
            found.append("sinks: not with MLA")
        if set(self.windows) != {None} and not kernels.supports_sliding_window():
            found.append("sliding_window: not with MLA")
        combined = kernels.supports_combination(self.head_size, self.dtype, kv_cache_dtype)
        return found if combined is None else [*found, f"--kv-cache-dtype: {combined}"]


def read_model(path: str, dtype: str = "auto", tensor_parallel_size: int = 1) -> Model:
    """Read a config.json, or that of a folder."""
    file = Path(path)
    if file.is_dir():
        file /= "config.json"
    try:
        whole = json.loads(file.read_text(encoding="utf-8"))
        text = next((whole[key] for key in ("text_config", "llm_config") if key in whole), whole)
        config = _DEFAULTS.get(text.get("model_type", ""), {}) | text
    except (ValueError, AttributeError, TypeError) as error:
        raise OSError(f"{file}: needs the config.json of a model, got {error}") from error
    kind = str(config.get("model_type", whole.get("model_type", "")))
    heads = _number(file, config, "num_attention_heads", "n_head", "n_heads")
    use_mla = kind in _WITH_MLA and bool(config.get("kv_lora_rank"))
    kv_heads = heads
    if any(config.get(name) for name in _KV_HEADS):
        kv_heads = _number(file, config, *_KV_HEADS)
    refused = list(_refused(whole, config, kind))
    if heads % tensor_parallel_size:
        refused.append(
            f"--tensor-parallel-size: needs a divisor of {heads} heads, got {tensor_parallel_size}"
        )
    return Model(
        kind,
        _dtype(whole, config, dtype),
        use_mla,
        _head_size(file, config, heads, use_mla),
        max(1, heads // tensor_parallel_size),
        1 if use_mla else max(1, kv_heads // tensor_parallel_size),
        dict(Counter(_windows(file, config))),
        kind == "gpt_oss" or any("sink" in name and value for name, value in config.items()),
        "index_topk" in config or "compress_ratios" in config,
        tuple(refused),
        tuple(_untried(config)),
    )


_KV_HEADS = (
    *("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "num_attention_groups",
)


def _number(file: Path, config: dict[str, Any], *names: str) -> int:
    found = next((config[name] for name in names if config.get(name)), None)
    if not isinstance(found, int) or found < 1:
        raise OSError(
            f"{file}: needs {names[0]}, got {found}; add what transformers takes as its default"
        )
    return found


def _head_size(file: Path, config: dict[str, Any], heads: int, use_mla: bool) -> int:
    if config.get("kv_lora_rank"):
        first = "kv_lora_rank" if use_mla else "qk_nope_head_dim"
        return _number(file, config, first) + _number(file, config, "qk_rope_head_dim")
    sizes = [_number(file, config, n) for n in ("head_dim", "global_head_dim") if config.get(n)]
    if sizes:
        return max(sizes)
    return _number(file, config, "hidden_size", "n_embd", "d_model") // heads


def _windows(file: Path, config: dict[str, Any]) -> list[int | None]:
    """Tell the window of each layer with attention; None is a layer that sees everything."""
    count = _number(file, config, "num_hidden_layers", "n_layer", "n_layers")
    width = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    kinds, pattern = config.get("layer_types"), config.get("sliding_window_pattern")
    if kinds:
        kinds = [kind for kind in kinds if kind.endswith("attention") and "linear" not in kind]
    elif pattern:
        kinds = ["full" if (i + 1) % pattern == 0 else "sliding" for i in range(count)]
    else:
        kinds = ["sliding"] * count
    return [(width or None) if "sliding" in kind else None for kind in kinds]


def _dtype(whole: dict[str, Any], config: dict[str, Any], asked: str) -> str:
    """Tell what vLLM makes of --dtype."""
    if asked != "auto":
        return {"half": "float16", "float": "float32"}.get(asked, asked)
    names = ("dtype", "torch_dtype")
    stored = next((c[name] for c in (config, whole) for name in names if c.get(name)), "float32")
    return "bfloat16" if stored == "float32" else str(stored)


def _refused(whole: dict[str, Any], config: dict[str, Any], kind: str) -> Iterator[str]:
    attn = config.get("attn_config")
    if (
        (kind in _WITH_ALIBI if not isinstance(attn, dict) else attn.get("alibi"))
        or config.get("alibi")
        or config.get("position_embedding_type") == "alibi"
    ):
        yield NO_ALIBI
    if (
        whole.get("is_encoder_decoder")
        or "bert" in kind
        or config.get("use_bidirectional_attention") is True
        or config.get("is_causal") is False
    ):
        yield "layers: needs causal self-attention, got an encoder"
    sees = whole.get("is_mm_prefix_lm", whole.get("model_type") in _IMAGES_SEE_EACH_OTHER)
    if sees or config.get("use_bidirectional_attention") == "vision":
        yield "layers: needs causal attention, got image tokens that see each other"


def _untried(config: dict[str, Any]) -> Iterator[str]:
    if config.get("attention_chunk_size") or "chunked_attention" in (
        config.get("layer_types") or ()
    ):
        yield "chunked local attention"
    if any(part in name for name, value in config.items() if value for part in _OTHER_LAYERS):
        yield "layers that are no attention beside those"
