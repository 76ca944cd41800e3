# SPDX-License-Identifier: Apache-2.0
"""``python -m cumla info --vllm CONFIG``: whether vLLM's plugin serves a model, and by what."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cumla.vllm._models import Model

_PREFILL = 8192  # tokens of a step


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of vLLM that decide, under vLLM's names."""
    group = parser.add_argument_group(
        "vLLM", "whether its plugin would serve a model; the exit status is 1 if it would not"
    )
    group.add_argument(
        "--vllm",
        nargs="?",
        const="",
        metavar="CONFIG",
        help="a config.json of Hugging Face, or a folder with one; without it the versions alone",
    )
    group.add_argument("--dtype", default="auto", help="as the model's by default")
    group.add_argument("--kv-cache-dtype", default="auto", help="auto by default")
    group.add_argument("--block-size", type=int, help="tokens of a page; 64 by default")
    group.add_argument("--tensor-parallel-size", type=int, default=1, help="1 by default")


def vllm_rows(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Tell of vLLM, and of the model; the row `served` begins with yes or no."""
    reason = ""
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        yield "vLLM", "not installed here: versions are not checked"
    else:
        answer, reason = _version(version)
        yield "vLLM", answer
        yield "plugin", _entry_point()
    if args.vllm:
        yield from _model_rows(args, reason)


def _version(version: str) -> tuple[str, str]:
    """Tell how the plugin takes a version, and why it refuses it."""
    from cumla._serving import is_tested
    from cumla.vllm import TESTED

    try:
        known = is_tested("vllm", version, TESTED, "CUSTOM")
    except RuntimeError as error:
        return f"{version}: refused", str(error)
    way = "tested" if known else "not tested; served if it has the interfaces, after a warning"
    return f"{version}: {way}", ""


def _entry_point() -> str:
    allowed = os.environ.get("VLLM_PLUGINS")
    found = metadata.entry_points(group="vllm.general_plugins", name="cumla")
    if not found:
        return "not found: install cumla into this environment"
    if allowed is not None and "cumla" not in allowed.split(","):
        return f"not loaded: VLLM_PLUGINS is {allowed!r}; add cumla"
    return "found"


def _model_rows(args: argparse.Namespace, reason: str) -> Iterator[tuple[str, str]]:
    from cumla.vllm._models import read_model

    if min(args.tensor_parallel_size, args.block_size or 1) < 1:
        raise OSError("--tensor-parallel-size, --block-size: need numbers of 1 or more")
    model = read_model(args.vllm, args.dtype, args.tensor_parallel_size)
    cache = args.kv_cache_dtype
    page = args.block_size or model.kernels.get_preferred_block_size(16)
    heads = f"{model.num_heads} heads of {model.head_size}"
    if not model.use_mla:
        heads = f"{model.num_heads} heads over {model.num_kv_heads} of {model.head_size}"
    sinks = ", sinks" if model.has_sink else ""
    yield "model", f"{model.kind}, {'MLA' if model.use_mla else 'no MLA'}, {model.dtype}"
    yield "each GPU", f"{heads}{sinks}; cache {cache}, pages of {page} tokens"
    reasons = [*([reason] if reason else []), *model.refusals(cache)]
    kernels: list[tuple[str, str]] = []
    if not reasons:
        try:
            kernels = [
                row for window in model.windows for row in _kernels(model, window, page, cache)
            ]
        except ValueError as error:
            reasons.append(str(error))
    if reasons:
        yield "served", "no, leave out --attention-backend CUSTOM\n" + "\n".join(reasons)
        return
    untried = "".join(f"\nnot tried: {what}" for what in model.untried)
    yield "served", f"yes, with --attention-backend CUSTOM{untried}"
    yield from kernels


def _kernels(model: Model, window: int | None, page: int, cache: str) -> Iterator[tuple[str, str]]:
    """Name the kernels that attend in the layers of a window, by steps."""
    count = model.windows[window]
    layers = f"{count} layer{'s' * (count > 1)}"
    yield layers, "full attention" if window is None else f"a window of {window} tokens"
    names = _of_mla if model.use_mla else _of_mha
    for step, shape in {
        "decoding, 1 request": (1, 1),
        "decoding, 128 requests": (128, 128),
        "3 drafts, 128 requests": (128, 512),
        "mixed, 128 requests": (128, _PREFILL),
        "prefill, 1 request": (1, _PREFILL),
    }.items():
        yield f"  {step}", names(model, *shape, window, page, cache)


def _of_mla(model: Model, batch: int, tokens: int, _: int | None, page: int, cache: str) -> str:
    import numpy as np

    from cumla import MLAAttentionPlan, MLADecodePlan
    from cumla.core.check_mode import environment_flag
    from cumla.launch.mla.choice import decode_spec
    from cumla.launch.mla.mla_attention import attention_spec
    from cumla.launch.mla.mla_decode_fp8 import fp8_specs
    from cumla.launch.mla.mla_decode_fp8_products import fp8_products_spec
    from cumla.vllm._kernels import FP8

    if batch == 1 and tokens > 1:
        return "vLLM's own backend of MLA prefills"
    make = partial(
        MLAAttentionPlan if tokens == _PREFILL else MLADecodePlan,
        page_size=page,
        dtype=model.dtype,
        cache_dtype="float8_e4m3fn" if cache in FP8 else None,
        like=np.zeros(0),
    )
    key: Any = make(batch, tokens if tokens == _PREFILL else tokens // batch, model.num_heads).key
    if cache not in FP8:
        return (attention_spec if tokens == _PREFILL else decode_spec)(key).entry
    if key.has_whole_tiles and environment_flag("CUMLA_VLLM_FP8_PRODUCTS"):
        return fp8_products_spec(key, True).entry
    return fp8_specs(key)[0].entry


def _of_mha(
    model: Model, batch: int, tokens: int, window: int | None, page: int, cache: str
) -> str:
    import numpy as np

    from cumla import AttentionPlan
    from cumla.bench.explain import find_sm_count
    from cumla.launch.mha.attention import attention_spec
    from cumla.vllm._kernels import FP8

    plan = AttentionPlan(
        *(batch, tokens, model.num_heads, model.head_size),
        num_kv_heads=model.num_kv_heads,
        page_size=page,
        dtype=model.dtype,
        cache_dtype="float8_e4m3fn" if cache in FP8 else None,
        window=None if window is None else window - 1,
        like=np.zeros(0),
    )
    key = replace(plan.key, sm_count=find_sm_count()[0])
    beside = f", {attention_spec(key.beside).entry}" if key.beside else ""
    return attention_spec(key).entry + beside
