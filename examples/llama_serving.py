# SPDX-License-Identifier: Apache-2.0
"""A small Llama, served: requests decode while the prompts of others are prefilled in chunks.

The model (RMSNorm, GQA with rotary embedding, SwiGLU) is served/llama.py, its server
served/llama_server.py. A step is, for each layer, one call of cumla.append_kv_cache, which rotates
keys and queries, and one of a cumla.AttentionPlan. On a GPU, with CuPy, one CUDA graph holds them
for all layers and steps; without, they run on NumPy arrays. Every step is compared with the same
model in float32 without a cache.

    python examples/llama_serving.py [--file TEXT] [--steps N] [--layer small | tiny]
"""

from served.llama import MODELS, LlamaModel
from served.llama_server import LlamaServer
from served.server import serve_text


def main(argv: list[str] | None = None) -> int:
    """Serve four requests; 0 if every step is right."""
    return serve_text(
        argv,
        __file__,
        MODELS,
        lambda shape, requests, backend: LlamaServer(
            LlamaModel.random(shape, seed=0), requests, backend, seed=0
        ),
    )


if __name__ == "__main__":
    if main():
        raise SystemExit("the results differ")
