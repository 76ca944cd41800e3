# SPDX-License-Identifier: Apache-2.0
"""The models that the plugin serves: by vLLM's questions, and by a model's config.json.

Without torch, vLLM or a GPU; a dtype is torch's, or its name.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from cumla.compat._engine import refusal
from cumla.core.check_mode import environment_flag
from cumla.launch.mha.attention import E4M3_COLUMNS
from cumla.mha.arguments import MAX_HEAD_DIM
from cumla.mla.shape import HEAD_DIM, TAKES, VALUE_DIM, WIDTHS, width_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

    from cumla.mla.shape import Width

DTYPES = ("float16", "bfloat16")
FP8 = ("fp8", "fp8_e4m3")  # vLLM's names of the caches that the kernels read
PACKED = "fp8_ds_mla"  # vLLM's name of rows of 656 bytes: e4m3 columns, four scales, RoPE columns
V4_DIM = 512  # columns of a row of DeepSeek-V4
LOGGER = "vllm.cumla"  # vLLM shows what its own loggers, and those below, say
_FLAGS = (None, True, False)


class Kernels:
    """The part of a backend that both kinds of attention share: comes before its own base class."""

    impl: ClassVar[type]
    builder: ClassVar[type]
    has_windows_and_sinks: ClassVar = True
    supported_kv_cache_dtypes: ClassVar = ["auto", "float16", "bfloat16", *FP8]
    widths: ClassVar = "a multiple of 8, up to 512"
    pages_of: ClassVar = 1  # tokens: vLLM's indexers need multiples of more

    @staticmethod
    def get_name() -> str:
        """Return the name in vLLM's registry, where vLLM looks it up."""
        return "CUSTOM"

    @classmethod
    def get_impl_cls(cls) -> type:
        """Return the class of the layers."""
        return cls.impl

    @classmethod
    def get_builder_cls(cls) -> type:
        """Return the class that prepares a step."""
        return cls.builder

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Prefer pages of whole 64-token blocks; any others work as well."""
        return default_block_size if default_block_size % 64 == 0 else 64

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Tell that plans exist for it."""
        return True

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype | str) -> bool:
        """Return whether the kernels take a model of this dtype."""
        return dtype_name(dtype) in DTYPES

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Return whether layers may have windows."""
        return cls.has_windows_and_sinks

    @classmethod
    def supports_sink(cls) -> bool:
        """Return whether layers may have a sink per head."""
        return cls.has_windows_and_sinks

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Return whether the kernels run there."""
        return (capability.major, capability.minor) == (9, 0)


class MLAKernels(Kernels):
    """Those of models with MLA."""

    has_windows_and_sinks = False
    widths: ClassVar = f"rows of {', '.join(str(sum(width)) for width in WIDTHS)} columns"

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Return which widths of a cached row the kernels take."""
        return width_of(head_size) is not None

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype | str,
        kv_cache_dtype: str | None,
        *_: Any,
        **__: Any,
    ) -> str | None:
        """Refuse FP8 caches beside float16 queries, or of a width that has none."""
        if dtype_name(dtype) == "float16" and kv_cache_dtype in FP8:
            return "an FP8 cache needs a model in bfloat16"
        width = width_of(head_size)
        if width is not None and not TAKES[width[0]].e4m3 and kv_cache_dtype in FP8:
            return f"rows of {head_size} columns need a cache of 16 bits"
        return None


class MHAKernels(Kernels):
    """Those of models with MHA, GQA or MQA."""

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Return which numbers of columns the kernels take."""
        return head_size % 8 == 0 and 0 < head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype | str,
        kv_cache_dtype: str | None,
        *_: Any,
        **__: Any,
    ) -> str | None:
        """Refuse FP8 caches of columns that the kernels do not take."""
        if kv_cache_dtype in FP8 and head_size not in E4M3_COLUMNS:
            return f"an FP8 cache needs a head size of 16, 32, ... or {E4M3_COLUMNS[-1]}"
        return None


SPARSE_WIDTHS = WIDTHS[:2]
"""Widths of rows with lists: with RoPE columns and without."""


class SparseMLAKernels(MLAKernels):
    """Those of models with sparse MLA."""

    supported_kv_cache_dtypes: ClassVar = [*Kernels.supported_kv_cache_dtypes, PACKED]
    widths: ClassVar = f"rows of {HEAD_DIM} or {VALUE_DIM} latent columns with sparse MLA"
    pages_of: ClassVar = 64

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Return which widths of a cached row the kernels take."""
        return width_of(head_size, SPARSE_WIDTHS) is not None

    @classmethod
    def supports_sink(cls) -> bool:
        """Return whether layers may have a sink per head."""
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype | str,
        kv_cache_dtype: str | None,
        *_: Any,
        **__: Any,
    ) -> str | None:
        """Refuse float16 queries over an FP8 cache, and packed rows without RoPE columns."""
        if kv_cache_dtype == PACKED and head_size != HEAD_DIM:
            return f"{PACKED} has rows of {HEAD_DIM} columns, got {head_size}; pass fp8"
        asked = FP8[0] if kv_cache_dtype == PACKED else kv_cache_dtype
        return super().supports_combination(head_size, dtype, asked)


class V4Kernels(SparseMLAKernels):
    """Those of DeepSeek-V4, which has a window and compressed tokens in caches of bytes."""

    supported_kv_cache_dtypes: ClassVar = [*FP8, PACKED]
    widths: ClassVar = f"rows of {V4_DIM} columns"
    pages_of: ClassVar = 256

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Take the pages of vLLM's own classes."""
        return cls.pages_of

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Return the width of a row, whose last 64 columns hold the rotation."""
        return head_size == V4_DIM

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype | str,
        kv_cache_dtype: str | None,
        *_: Any,
        **__: Any,
    ) -> str | None:
        """Refuse float16."""
        return None if dtype_name(dtype) == "bfloat16" else "DeepSeek-V4 needs a model in bfloat16"


def refuse_width(model: Any, dims: dict[str, Any], widths: Iterable[Width]) -> None:
    """Refuse rows whose columns are divided otherwise: vLLM asks for their number alone."""
    found = dims.get("kv_lora_rank"), dims.get("qk_rope_head_dim")
    if None not in found and found not in tuple(widths):
        needed = " or ".join(f"{latent} + {rope}" for latent, rope in widths)
        raise refusal(
            model,
            f"kv_lora_rank + qk_rope_head_dim: cumla's backend needs {needed}, got {found[0]} + "
            f"{found[1]}; leave out --attention-backend CUSTOM",
        )


def is_invariant() -> bool:
    """Return whether bits are not to depend on what else is in a step."""
    return environment_flag("VLLM_BATCH_INVARIANT")


def fp8_products(config: Any) -> bool:
    """Return whether layers may multiply in FP8: by an option of vLLM."""
    given = getattr(config, "additional_config", None)
    options = given.get("cumla", {}) if isinstance(given, dict) else {}
    name = "fp8_products"
    if not isinstance(options, dict) or options.keys() - {name} or options.get(name) not in _FLAGS:
        raise ValueError(
            f'additional_config: needs {{"cumla": {{"{name}": true}}}}, or false, got '
            f"{{'cumla': {options!r}}}; leave out what cumla's backend does not know"
        )
    return bool(options.get(name))


def divides_steps(config: Any) -> bool:
    """Return whether vLLM may make micro-batches of a step.

    A graph would read the copies of lengths and offsets of its capture, which hold for other steps
    only where each request has one token.
    """
    return bool(getattr(config.parallel_config, "use_ubatching", False))


def dtype_name(dtype: torch.dtype | str) -> str:
    """Return the name of a dtype of torch, or of a name."""
    return str(dtype).removeprefix("torch.")


def factor(scale: torch.Tensor, cache: torch.Tensor) -> torch.Tensor | None:
    """Return a scale as the kernels of an FP8 cache take it, None for other caches."""
    return scale.view(1) if cache.dtype.itemsize == 1 else None


# vLLM passes latent rows for those that have a kv_lora_rank.
_WITH_MLA = (
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_mtp", "kimi_k2"),
    *("kimi_linear", "glm4_moe_lite", "glm_moe_dsa", "longcat_flash", "longcat_flash_ngram"),
    *("pangu_ultra_moe", "bailing_hybrid", "axk1", "mistral4", "hy_v4", "glm5_next_text"),
    "dots3_note",
)
_V41 = "deepseek_v41"
_BY_BLOCKS = "minimax_m3_sparse"  # transformers' name of these layers
_BY_GROUPS = ("indexer_n_heads", "sparse_config")  # of QSA, and of Step 5
_COMPRESSED = {"compress_ratios", "compress_rates"}  # as DeepSeek, and as transformers names them
_IMAGES_SEE_EACH_OTHER = ("bagel", "gemma3", "molmo2", "moondream3", "paligemma", "umm")
_WITH_ALIBI_BY_ROOTS = ("step1",)
_WITH_INDEXER = (  # vLLM's names of Hy4's layers that are not dense
    *("deepseek_sparse_attention", "indexed_attention", "sparse", "sparse_attention"),
)
_RSWA = {"unlimited-ocr": 128}  # windows that files leave out
# Parts of names in a config.json.
_UNTRIED = {
    "layers of other sizes than these": ("block_configs", "other_setting", "num_global", "swa_num"),
    "layers that are no attention beside those": (
        *("linear_attn", "linear_num", "mamba", "ssm_", "lru_", "rwkv"),
    ),
}
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = (
    *("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    *("num_attention_groups", "kv_n_heads"),
)
# Defaults of transformers, which published files leave out.
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
    "deepseek_v4": {"head_dim": V4_DIM},
    "qwen3_next": {"full_attention_interval": 4},
    "hy_v4": {"index_topk": 2048, "learnable_sink": True},
    "llama4_text": {"attention_chunk_size": 8192, "no_rope_layer_interval": 4},
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
    chunks: str  # which of those without one see chunks only
    has_sink: bool
    topk: int  # tokens that an indexer chooses, 0 where there is none
    refused: tuple[str, ...]  # what else the plugin or vLLM refuses
    untried: tuple[str, ...]
    is_v4: bool = False  # compressed tokens beside a window
    pool: int = 1  # neighbouring tokens that an indexer chooses together
    by_blocks: int = 0  # layers that choose blocks: vLLM gives them classes of its own
    by_groups: bool = False  # these choose groups of few tokens, by functions of vLLM

    @property
    def kernels(self) -> type[MLAKernels | MHAKernels]:
        """The class that answers vLLM's questions about this model."""
        if self.is_v4:
            return V4Kernels
        if self.topk:
            return SparseMLAKernels
        return MLAKernels if self.use_mla else MHAKernels

    def refusals(self, kv_cache_dtype: str, block_size: int | None = None) -> list[str]:
        """Tell why vLLM would not take the backend, by the answers that vLLM gets."""
        kernels, found = self.kernels, list(self.refused)
        if not kernels.supports_head_size(self.head_size):
            found.append(f"head size: needs {kernels.widths}, got {self.head_size}")
        if block_size is not None and block_size % kernels.pages_of:
            need = f"a multiple of {kernels.pages_of}, because of vLLM's indexer"
            found.append(f"--block-size: needs {need}, got {block_size}; leave it out")
        if not kernels.supports_dtype(self.dtype):
            found.append(f"--dtype: needs {' or '.join(DTYPES)}, got {self.dtype}")
        if kv_cache_dtype not in kernels.supported_kv_cache_dtypes:
            names = ", ".join(kernels.supported_kv_cache_dtypes)
            found.append(f"--kv-cache-dtype: needs one of {names}, got {kv_cache_dtype}")
        if self.has_sink and not kernels.supports_sink():
            found.append("sinks: not with dense MLA")
        if set(self.windows) != {None} and not kernels.supports_sliding_window():
            found.append("sliding_window: not with MLA")
        combined = kernels.supports_combination(self.head_size, self.dtype, kv_cache_dtype)
        return found if combined is None else [*found, f"--kv-cache-dtype: {combined}"]


def read_model(
    path: str, dtype: str = "auto", tensor_parallel_size: int = 1, server: str = "vLLM"
) -> Model:
    """Read a config.json, or that of a folder; a ValueError or TypeError says what it lacks."""
    file = Path(path)
    if file.is_dir():
        file /= "config.json"
    try:
        whole = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # no UTF-8, or no JSON
        raise ValueError(f"no JSON ({error})") from error
    whole = _mapping(whole, "the file")
    name = next((key for key in ("text_config", "llm_config") if whole.get(key)), None)
    text = whole if name is None else _mapping(whole[name], name)
    inner = _mapping(text.get("attn_config") or {}, "attn_config")
    config = _DEFAULTS.get(str(text.get("model_type")), {}) | inner | text
    kind = str(config.get("model_type", whole.get("model_type", "")))
    kind = _V41 if whole.get("model_type") == _V41 else kind  # whatever its text is called
    heads = _number(config, *_HEADS)
    has_one = config.get("multi_query") and not config.get("new_decoder_architecture")
    kv_heads = 1 if has_one else _number(config, *_KV_HEADS, *_HEADS)
    is_v4 = kind in ("deepseek_v4", _V41)
    use_mla = is_v4 or (kind in _WITH_MLA and bool(config.get("kv_lora_rank")))
    kinds = ["full"] * _layers(config) if is_v4 else _kinds(config)
    by_groups = any(config.get(name) for name in _BY_GROUPS)
    if by_groups:
        kinds = [_BY_BLOCKS if each == "full_attention" else each for each in kinds]
    by_blocks = kinds.count(_BY_BLOCKS)
    kinds = [each for each in kinds if each != _BY_BLOCKS]
    width = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if not isinstance(width, int | None):
        raise TypeError(f"sliding_window {width!r:.60}; write one number of tokens, or null")
    chunked = kinds.count("chunked_attention")
    refused = list(_refused(whole, config, kind))
    if server == "vLLM":
        refused += _refused_by_vllm(whole, config, kind)
    ranks = tensor_parallel_size
    if heads % ranks or (not use_mla and kv_heads % ranks and ranks % kv_heads):
        divided = f"{heads} heads" if use_mla else f"{heads} heads, {kv_heads} KV heads"
        refused.append(
            f"--tensor-parallel-size: needs a divisor of {divided}, got {ranks}; {server} "
            f"needs one with any backend"
        )
    return Model(
        kind,
        _dtype(whole, config, dtype),
        use_mla,
        _number(config, "head_dim") if is_v4 else _head_size(config, heads, use_mla),
        max(1, heads // ranks),
        1 if use_mla else max(1, kv_heads // ranks),
        dict(Counter((width or None) if "sliding" in each else None for each in kinds)),
        f"; {chunked} in chunks of {config.get('attention_chunk_size')} tokens" if chunked else "",
        is_v4
        or kind == "gpt_oss"
        or any("sink" in name and value for name, value in config.items()),
        _number(config, "index_topk") if use_mla and "index_topk" in config else 0,
        tuple(refused),
        (
            *_untried(whole, config, chunked),
            *["DeepSeek-V4 in vLLM's engine"] * is_v4,
            *["layers that choose blocks, in vLLM's engine"]
            * (bool(by_blocks) and server == "vLLM"),
        ),
        is_v4,
        _number(config, "index_kpool") if config.get("index_kpool") else 1,
        by_blocks,
        by_groups,
    )


def _mapping(found: Any, what: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise TypeError(f"{what} {found!r:.60}; it has to be an object, {{...}}")
    return found


def _number(config: dict[str, Any], *names: str) -> int:
    name = next((name for name in names if config.get(name)), names[0])
    found = config.get(name)
    if found is None:
        what = " or ".join(names)
        raise ValueError(
            f"none with {what}; write the number that transformers has by default, or, where the "
            "model has no causal self-attention (Mamba, Whisper), leave out --attention-backend"
        )
    if not isinstance(found, int) or found < 1:
        raise ValueError(f"{name} {found!r:.60}; write one number, that of transformers by default")
    return found


def _head_size(config: dict[str, Any], heads: int, use_mla: bool) -> int:
    if config.get("kv_lora_rank"):
        first = "kv_lora_rank" if use_mla else "qk_nope_head_dim"
        has_rope = config.get("qk_rope_head_dim") != 0
        return _number(config, first) + (_number(config, "qk_rope_head_dim") if has_rope else 0)
    sizes = [_number(config, n) for n in ("head_dim", "global_head_dim") if config.get(n)]
    if sizes:
        return max(sizes)
    return _number(config, "hidden_size", "n_embd", "d_model") // heads


def _layers(config: dict[str, Any]) -> int:
    return _number(config, "num_hidden_layers", "n_layer", "n_layers")


def _kinds(config: dict[str, Any]) -> list[str]:
    """Name the kind of each layer with attention."""
    count = _layers(config)
    if config.get("no_rope_layer_interval") and config.get("attention_chunk_size"):  # Llama 4
        interval = _number(config, "no_rope_layer_interval")
        by_interval = [(i + 1) % interval for i in range(count)]
        rotated = _each(config, "no_rope_layers", count) or by_interval
        return ["chunked_attention" if each else "full_attention" for each in rotated]
    if kinds := _each(config, "layer_types", count):
        return [
            kind
            for kind in kinds
            if (kind.endswith("attention") and "linear" not in kind) or kind == _BY_BLOCKS
        ]
    sparse = _mapping(config.get("sparse_attention_config") or {}, "sparse_attention_config")
    if chosen := _each(sparse, "sparse_attention_freq", count):  # MiniMax M3
        return [_BY_BLOCKS if each else "full_attention" for each in chosen]
    if config.get("full_attention_interval"):  # Qwen3-Next: the other layers are linear
        return ["full"] * (count // _number(config, "full_attention_interval"))
    if config.get("sliding_window_pattern"):
        pattern = _number(config, "sliding_window_pattern")
        return ["full" if (i + 1) % pattern == 0 else "sliding" for i in range(count)]
    return ["sliding"] * count


def _each(config: dict[str, Any], name: str, count: int) -> list[Any]:
    """Return what a list has of each layer."""
    found = config.get(name) or []
    if found and not (isinstance(found, list) and len(found) >= count and None not in found):
        raise ValueError(f"{name} {found!r:.60}; write a list, with an entry for each of {count}")
    return found[:count]


def _dtype(whole: dict[str, Any], config: dict[str, Any], asked: str) -> str:
    """Return what vLLM makes of --dtype."""
    if asked != "auto":
        return {"half": "float16", "float": "float32"}.get(asked, asked)
    names = ("dtype", "torch_dtype")
    stored = next((c[name] for c in (config, whole) for name in names if c.get(name)), "float32")
    return "bfloat16" if stored == "float32" else str(stored)


def _refused_by_vllm(whole: dict[str, Any], config: dict[str, Any], kind: str) -> Iterator[str]:
    window = whole.get("rswa_window", _RSWA.get(str(whole.get("model_type"))))
    if window is not None:
        yield (
            f"rswa_window: vLLM refuses --attention-backend CUSTOM with reference windows (R-SWA), "
            f"here of {window} tokens; pass "
            f"""--attention-config '{{"backend_per_kind": {{"full_attention": "CUSTOM"}}}}'"""
        )
    if kind == "hy_v4":
        count = _layers(config)
        sparse = sum(each in _WITH_INDEXER for each in _each(config, "layer_types", count))
        if sparse < count:
            yield (
                f"layer_types: needs sparse attention in all {count} layers, because CUSTOM is "
                f"one class for all of them, got {sparse}"
            )


def _refused(whole: dict[str, Any], config: dict[str, Any], kind: str) -> Iterator[str]:
    if kind in _WITH_ALIBI_BY_ROOTS:
        yield "alibi_sqrt: cumla's backend has no ALiBi by square roots of distances"
    if (
        whole.get("is_encoder_decoder")
        or "bert" in kind
        or config.get("use_bidirectional_attention") is True
        or config.get("is_causal") is False
    ):
        yield "layers: needs causal self-attention, got an encoder"
    if "index_topk" in config and config.get("kv_lora_rank") not in (None, VALUE_DIM):
        need = f"needs {VALUE_DIM} with sparse MLA"
        yield f"kv_lora_rank: {need}, got {config['kv_lora_rank']}"
    is_compressed = kind == _V41 or not _COMPRESSED.isdisjoint(config)
    if is_compressed and kind != "deepseek_v4":
        yield f"layers: {kind} has compressed caches, which cumla reads for deepseek_v4 alone"


def _untried(whole: dict[str, Any], config: dict[str, Any], chunked: int) -> Iterator[str]:
    if chunked:
        yield "chunked local attention"
    sees = whole.get("is_mm_prefix_lm", whole.get("model_type") in _IMAGES_SEE_EACH_OTHER)
    if sees or config.get("use_bidirectional_attention") == "vision":
        yield "image tokens that see each other"
    for what, parts in _UNTRIED.items():
        if any(part in name for name, value in config.items() if value for part in parts):
            yield what
