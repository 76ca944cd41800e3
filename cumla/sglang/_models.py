# SPDX-License-Identifier: Apache-2.0
"""The models that the plugin serves in SGLang, by a model's config.json: without torch or a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cumla.mla.shape import NO_ROPE as PACKED_512
from cumla.mla.shape import PACKED, VALUE_DIM
from cumla.vllm._models import DTYPES, FP8

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cumla.vllm._models import Model

CACHES = ("auto", "bfloat16", "bf16", "fp8_e4m3")  # SGLang's names of those that are served
BLOCK = 128  # tokens, of a layer that chooses blocks


def is_fp8(cache: str) -> bool:
    """Return whether a cache of SGLang's name has e4m3 columns."""
    return cache in FP8


def row_format(model: Model, cache: str) -> str | None:
    """Return the format of sparse MLA's rows: SGLang packs those of FP8 on Hopper."""
    if not (model.topk and is_fp8(cache)):
        return None
    return PACKED_512 if model.head_size == VALUE_DIM else PACKED


def refusals(model: Model, cache: str) -> Iterator[str]:
    """Tell why SGLang would not start with the backend, or the backend refuse a layer."""
    kernels = model.kernels
    yield from model.refused
    if model.is_v4:
        yield "layers: SGLang serves those of DeepSeek-V4 by a backend of its own"
        return
    if model.by_groups:
        yield "layers: SGLang serves those that choose groups of tokens by a backend of its own"
    if not model.windows and not model.by_blocks:
        yield "layers: needs attention, got none"
    if not kernels.supports_head_size(model.head_size):
        yield f"head size: needs {kernels.widths}, got {model.head_size}"
    if model.dtype not in DTYPES:
        yield f"--dtype: needs {' or '.join(DTYPES)}, got {model.dtype}"
    if cache not in CACHES or (cache.startswith("bf") and model.dtype != "bfloat16"):
        names = "auto or fp8_e4m3" if model.dtype != "bfloat16" else ", ".join(CACHES)
        yield f"--kv-cache-dtype: needs one of {names}, got {cache}"
    elif is_fp8(cache):
        combined = kernels.supports_combination(model.head_size, model.dtype, FP8[0])
        if combined is not None:
            yield f"--kv-cache-dtype: {combined}"
    if model.has_sink and model.use_mla and not model.topk:
        yield "sinks: not with dense MLA"
    if model.use_mla and set(model.windows) != {None}:
        yield "sliding_window: not with MLA"


def ways(model: Model, page: int) -> Iterator[str]:
    """Tell which options a served model needs beside ``--attention-backend cumla``."""
    if model.chunks:
        yield (
            "SGLang lists no --attention-backend cumla for chunks: pass --prefill-attention-backend"
            " cumla --decode-attention-backend cumla"
        )
    if any(window is not None for window in model.windows) or model.chunks:
        yield "pass --disable-hybrid-swa-memory if SGLang gives layers with windows a pool"
    if model.by_blocks and page % BLOCK:
        yield f"pass --page-size {BLOCK}; with {page} SGLang's kernels attend in layers with blocks"
