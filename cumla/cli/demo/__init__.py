# SPDX-License-Identifier: Apache-2.0
"""``python -m cumla demo``: an MLA attention layer, or a small Llama, decodes real text.

The MLA layer has the shapes of DeepSeek-V2-Lite and seeded random weights. Tokens are the bytes of
a text. Prompts of several lengths are prefilled into one paged cache with shuffled pages. Then
every step appends the next byte of each text, attends by weight absorption to the latent rows, and
is compared with multi-head attention that computes keys and values from it in float32.

With ``--chunked-prefill`` the prompts attend, too (`serving`, `mla_serving`). With
``--model llama`` a whole model is served in this way, and compared with the same model without a
cache (`llama`, `llama_serving`).

The model's products run in NumPy on either backend: CuPy's own kernels and its matrix products need
CUDA headers and cuBLAS, which cumla does not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cumla.cli.demo.backends import choose_backend
from cumla.cli.demo.cache import PAGE_SIZE
from cumla.cli.demo.decoding import decode
from cumla.cli.demo.layer import LAYERS, LayerShape, MLALayer
from cumla.cli.demo.llama import MODELS, LlamaModel, ModelShape
from cumla.cli.demo.llama_serving import LlamaServer
from cumla.cli.demo.mla_serving import MLAServer
from cumla.cli.demo.serving import serve
from cumla.cli.demo.text import cut_requests, load_text

SEED = 0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to ``python -m cumla``."""
    parser = subparsers.add_parser(
        "demo",
        help="decode real text through an MLA layer or a small Llama and check every step",
        description="Decode real text through an MLA attention layer, or a small Llama, with "
        "random weights and compare every step with attention in float32, un-absorbed or without "
        "a cache. Runs on the GPU if it can, else on the CPU. The exit code is 1 if a step is off.",
    )
    parser.add_argument(
        "--model",
        choices=("mla", "llama"),
        default="mla",
        help="mla: an attention layer of DeepSeek's kind; llama: a model of a few layers with GQA, "
        "served with chunked prefill (default: %(default)s)",
    )
    parser.add_argument(
        "--file", type=Path, help="text whose bytes are the tokens (default: cumla's README)"
    )
    parser.add_argument(
        "--layer",
        choices=[*dict.fromkeys([*LAYERS, *MODELS])],
        help="shapes of the layer: deepseek-v2-lite (default) or tiny, with --model llama small "
        "(default) or tiny; tiny is for trying the demo out",
    )
    parser.add_argument(
        "--steps",
        type=_positive,
        default=32,
        help="decoding steps of each request (default: %(default)s)",
    )
    parser.add_argument(
        "--chunked-prefill",
        action="store_true",
        help="let requests decode while the prompts of others are prefilled in chunks, all in one "
        "call a step, on the GPU in one CUDA graph; prints a line a step",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 if every step is within tolerance, 1 if not, 2 for an unusable text."""
    shapes: dict[str, LayerShape | ModelShape]
    shapes = {**(LAYERS if args.model == "mla" else MODELS)}
    backend, reason = choose_backend()
    name = args.layer or next(iter(shapes))
    if name not in shapes:
        has = " or ".join(shapes)
        print(f"cumla demo: --model {args.model} has --layer {has}", file=sys.stderr)
        return 2
    shape = shapes[name]
    try:
        title, text = load_text(args.file)
        requests = cut_requests(text, args.steps)
    except (OSError, ValueError) as error:
        print(f"cumla demo: {error}", file=sys.stderr)
        return 2
    prompts = ", ".join(str(request.prompt) for request in requests)
    print(f"text      {title}, {len(text)} bytes")
    print(
        f"requests  {len(requests)}, prompts of {prompts} tokens in shuffled pages of {PAGE_SIZE}"
    )
    if isinstance(shape, ModelShape):
        print(f"model     {name}: {shape.layers} layers, {shape.heads} heads, random weights")
    else:
        print(f"layer     {name}: {shape.heads} heads, random weights")
    print(f"backend   {backend.name} ({reason})")
    if isinstance(shape, ModelShape):
        model = LlamaModel.random(shape, SEED)
        return serve(LlamaServer(model, requests, backend, SEED), backend)
    layer = MLALayer.random(shape, SEED)
    if args.chunked_prefill:
        return serve(MLAServer(layer, requests, backend, SEED), backend)
    return decode(layer, requests, args.steps, backend, SEED)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"needs at least 1, got {number}")
    return number
