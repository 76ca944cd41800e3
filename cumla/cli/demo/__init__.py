# SPDX-License-Identifier: Apache-2.0
"""``python -m cumla demo``: an MLA attention layer decodes real text.

The layer has the shapes of DeepSeek-V2-Lite and seeded random weights. Tokens are the bytes of a
text. Prompts of several lengths are prefilled into one paged cache with shuffled pages. Then every
step appends the next byte of each text, attends by weight absorption to the latent rows, and is
compared with multi-head attention that computes keys and values from it in float32.

The layer's products run in NumPy on either backend: CuPy's own kernels and its matrix products need
CUDA headers and cuBLAS, which cumla does not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cumla.cli.demo.backends import choose_backend
from cumla.cli.demo.cache import PAGE_SIZE
from cumla.cli.demo.decoding import decode
from cumla.cli.demo.layer import LAYERS, MLALayer
from cumla.cli.demo.text import cut_requests, load_text

SEED = 0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to ``python -m cumla``."""
    parser = subparsers.add_parser(
        "demo",
        help="decode real text through an MLA layer and check every step",
        description="Decode real text through an MLA attention layer with random weights and "
        "compare every step with un-absorbed attention in float32. Runs on the GPU if it can, else "
        "on the CPU. The exit code is 1 if a step is off. More: examples/ in the repository.",
    )
    parser.add_argument(
        "--file", type=Path, help="text whose bytes are the tokens (default: cumla's README)"
    )
    parser.add_argument(
        "--layer",
        choices=LAYERS,
        default=next(iter(LAYERS)),
        help="shapes of the layer; tiny is for trying the demo out (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=_positive,
        default=32,
        help="decoding steps of each request (default: %(default)s)",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 if every step is within tolerance, 1 if not, 2 for an unusable text."""
    backend, reason = choose_backend()
    shape = LAYERS[args.layer]
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
    print(f"layer     {args.layer}: {shape.heads} heads, random weights")
    print(f"backend   {backend.name} ({reason})")
    return decode(MLALayer.random(shape, SEED), requests, args.steps, backend, SEED)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"needs at least 1, got {number}")
    return number
