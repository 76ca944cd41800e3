# SPDX-License-Identifier: Apache-2.0
"""``python -m cumla info --vllm CONFIG``: whether vLLM's plugin serves a model, and by what."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cumla.vllm._models import Model


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
    from cumla._choices import E4M3, Layers
    from cumla.core.check_mode import environment_flag
    from cumla.vllm._kernels import FP8

    count = model.windows[window]
    layers = Layers(model.num_heads, page, model.dtype, E4M3 if cache in FP8 else None)
    if model.use_mla:
        layers = layers._replace(fp8_products=environment_flag("CUMLA_VLLM_FP8_PRODUCTS"))
    else:
        layers = layers._replace(
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_size,
            window=None if window is None else window - 1,
        )
    title = f"{count} layer{'s' * (count > 1)}"
    yield title, "full attention" if window is None else f"a window of {window} tokens"
    for step, names in layers.steps().items():
        is_prefill = model.use_mla and step.startswith("prefill")
        yield f"  {step}", "vLLM's own backend" if is_prefill else ", ".join(names)
