# SPDX-License-Identifier: Apache-2.0
"""An MLA layer, served: requests decode while the prompts of others are prefilled in chunks.

The layer has random weights; its server is served/mla_server.py. A step is one call of
cumla.append_mla_cache and one of a cumla.MLAAttentionPlan. On a GPU, with CuPy, one CUDA graph
holds them for all steps; without, they run on NumPy arrays. Every step is compared with multi-head
attention in float32, without a cache.

    python examples/mla_serving.py [--file TEXT] [--steps N] [--layer deepseek-v2-lite | tiny]
"""

from served.mla_server import MLAServer
from served.server import serve_text

from cumla.cli.demo import DEEPSEEK_V2_LITE, LayerShape, MLALayer

LAYERS = {"deepseek-v2-lite": DEEPSEEK_V2_LITE, "tiny": LayerShape(64, 2, 16, 16)}


def main(argv: list[str] | None = None) -> int:
    """Serve four requests; 0 if every step is right."""
    return serve_text(
        argv,
        __file__,
        LAYERS,
        lambda shape, requests, backend: MLAServer(
            MLALayer(shape, seed=0), requests, backend, seed=0
        ),
    )


if __name__ == "__main__":
    if main():
        raise SystemExit("the results differ")
