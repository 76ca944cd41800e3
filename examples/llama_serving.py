# SPDX-License-Identifier: Apache-2.0
"""A small Llama, served: requests decode while the prompts of others are prefilled in chunks.

The model (RMSNorm, GQA with rotary embedding, SwiGLU) and its server are those of ``python -m cumla
demo --model llama``: cumla/cli/demo/llama.py and llama_serving.py. A step is, for each layer, one
call of cumla.append_kv_cache, which rotates keys and queries, and one of a cumla.AttentionPlan. On
a GPU, with CuPy, one CUDA graph holds them for all layers and steps; without, they run on NumPy
arrays. Every step is compared with the same model in float32 without a cache.
"""

from pathlib import Path

from cumla.cli.demo.backends import choose_backend
from cumla.cli.demo.llama import MODELS, LlamaModel
from cumla.cli.demo.llama_serving import LlamaServer
from cumla.cli.demo.serving import serve
from cumla.cli.demo.text import cut_requests


def main() -> None:
    """Serve four requests, whose tokens are the bytes of this file."""
    requests = cut_requests(Path(__file__).read_bytes(), steps=8)
    model = LlamaModel.random(MODELS["tiny"], seed=0)
    backend, reason = choose_backend()
    print(f"{backend.name} ({reason})")
    if serve(LlamaServer(model, requests, backend, seed=0), backend):
        raise SystemExit("the results differ")


if __name__ == "__main__":
    main()
