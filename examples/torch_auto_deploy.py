# SPDX-License-Identifier: Apache-2.0
"""PyTorch: a small Llama served through TensorRT-LLM AutoDeploy's interface of attention.

The model computes with the operations that the descriptor "cumla_paged" gives. Chunks of prompts go
beside requests that decode; steps in which all requests decode are padded to one shape and, on a
GPU, are the replays of one CUDA graph. Weights, requests and the float32 results without a cache
are those of llama_serving.py.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from served.llama import EPSILON, MODELS, LlamaModel
from served.server import deal
from torch.nn import functional

from cumla.cli.demo import PAGE_SIZE, TOLERANCE, cut_requests, shuffled_pages
from cumla.compat import auto_deploy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.float16


class TorchLlama:
    """The model as tensors, and its caches."""

    def __init__(self, model: LlamaModel, info: auto_deploy.SequenceInfo) -> None:
        """Ask the descriptor for all that attention needs."""
        shape, self.info = model.shape, info
        sizes = shape.heads, shape.kv_heads, shape.head_dim, DTYPE
        rope = auto_deploy.PositionalEmbeddingConfig("rope")
        attention = auto_deploy.AttentionInfo(*sizes, auto_deploy.CacheConfig(), rope)
        descriptor = auto_deploy.AttentionRegistry.get("cumla_paged")
        self.attend, _ = descriptor.get_attention_op()
        self.prepare, _ = descriptor.get_prepare_metadata_op()
        caches = descriptor.get_cache_initializers(lambda: attention).values()
        self.caches = [[make(info) for make in caches] for _ in model.layers]
        buffers = descriptor.get_global_buffer_initializers(lambda: attention).values()
        self.buffers = [make(info) for make in buffers]
        self.embedding, self.norm, self.w_logits = self.tensors(
            model.embedding, model.norm, model.w_logits
        )
        self.layers = [type(layer)(*self.tensors(*layer)) for layer in model.layers]

    def tensors(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """Move weights to where the model computes."""
        return [torch.from_numpy(array).to(DEVICE) for array in arrays]

    def rms_norm(self, hidden: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Divide rows by the root of their mean square."""
        return functional.rms_norm(hidden, factors.shape, factors, float(EPSILON))

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Compute the logits of all new tokens; input_ids are (batch, 1) or (1, total_tokens)."""
        metadata = self.prepare(input_ids, *self.info.args[1:], self.info.page_size)
        hidden = self.embedding[input_ids]
        for layer, caches in zip(self.layers, self.caches, strict=True):
            x = self.rms_norm(hidden, layer.attention_norm)
            qkv = [(x @ weight).to(DTYPE) for weight in (layer.w_q, layer.w_k, layer.w_v)]
            attended = self.attend(*qkv, *metadata, *caches, *self.buffers)
            hidden = hidden + attended.float() @ layer.w_o
            x = self.rms_norm(hidden, layer.mlp_norm)
            hidden = hidden + (functional.silu(x @ layer.w_gate) * (x @ layer.w_up) @ layer.w_down)
        return self.rms_norm(hidden, self.norm) @ self.w_logits


class Decoder:
    """Steps of one token per request, all in one shape: requests that are missing have 0 tokens."""

    def __init__(self, model: TorchLlama) -> None:
        """Make the tokens that a graph reads; the rest is in the model's SequenceInfo."""
        self.model, self.graph, self.logits = model, None, None
        self.input_ids = torch.zeros(model.info.max_batch_size, 1, dtype=torch.int32, device=DEVICE)

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Compute the logits, (batch, 1, columns)."""
        self.input_ids[: len(input_ids)] = input_ids
        if self.graph is not None:
            self.graph.replay()
        else:
            self.logits = self.model(self.input_ids)
            if DEVICE == "cuda":
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph):
                    logits = self.model(self.input_ids)
                self.graph.replay()  # writes the same rows once more
                self.logits = logits
        return self.logits[: len(input_ids)]


def main() -> None:
    """Serve four requests, whose tokens are bytes of this file."""
    requests = cut_requests(Path(__file__).read_bytes()[:400], steps=8)
    model = LlamaModel.random(MODELS["tiny"], seed=0)
    expected = [model.forward_plainly(request.tokens).logits for request in requests]
    table, num_pages = shuffled_pages(requests, seed=0)
    info = auto_deploy.SequenceInfo(4096, len(requests), PAGE_SIZE)
    info.num_pages = num_pages
    info.to(DEVICE)
    llama: Any = TorchLlama(model, info)
    decode = Decoder(llama)

    prompts = np.array([request.prompt for request in requests])
    ends = np.array([len(request.tokens) for request in requests])
    done = np.zeros_like(ends)
    worst, steps = 0.0, 0
    while np.any(done < ends):
        counts = deal(prompts - done, (prompts <= done) & (done < ends))
        active = np.flatnonzero(counts)
        info.nest_sequences([requests[r].tokens[done[r] : done[r] + counts[r]] for r in active])
        info.update_pos(done[active].tolist(), reset=True)
        info.assign_cache_loc([table[r][table[r] >= 0].tolist() for r in active])
        logits = decode(info.input_ids) if info.is_generate else llama(info.input_ids)
        for r, found in zip(active, info.unnest_sequences(logits), strict=True):
            wanted = expected[r][done[r] : done[r] + counts[r]]
            errors = np.linalg.norm(found.cpu().numpy() - wanted, axis=1)
            worst = float(np.max([worst, *(errors / np.linalg.norm(wanted, axis=1))]))
        done, steps = done + counts, steps + 1

    print(f"{steps} steps on {DEVICE}, worst error against no cache: {worst:.1e}")
    if not worst <= TOLERANCE:
        raise SystemExit("the results differ")


if __name__ == "__main__":
    main()
