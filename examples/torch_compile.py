# SPDX-License-Identifier: Apache-2.0
"""torch.compile: a stack of attention layers in one graph, with CUDA graphs on a GPU."""

import torch

import cumla
import cumla.torch  # takes calls of cumla into graphs

BATCH, LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 3, 2, 256, 8, 2, 64
PAGE_SIZE, PAGES_EACH, STEPS = 16, 2, 4


class Layer(torch.nn.Module):
    """GQA with a cache of its own: rotate, write, attend, project."""

    def __init__(self, device: str) -> None:
        super().__init__()
        width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        options = {"device": device, "dtype": torch.bfloat16, "bias": False}
        self.qkv = torch.nn.Linear(HIDDEN, width, **options)
        self.project = torch.nn.Linear(HEADS * HEAD_DIM, HIDDEN, **options)
        shape = (BATCH * PAGES_EACH, PAGE_SIZE, KV_HEADS, HEAD_DIM)
        for name in ("k_cache", "v_cache"):  # buffers stay where CUDA graphs find them
            self.register_buffer(name, torch.zeros(shape, device=device, dtype=torch.bfloat16))

    def forward(
        self,
        x: torch.Tensor,
        block_table: torch.Tensor,
        kv_lens: torch.Tensor,
        cos_sin: torch.Tensor,
    ) -> torch.Tensor:
        """Decode one token of each request."""
        heads = self.qkv(x).view(BATCH, 1, -1, HEAD_DIM)
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=2)
        q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
        cumla.append_kv_cache(
            *(k, v, self.k_cache, self.v_cache),
            kv_lens=kv_lens,
            block_table=block_table,
            cos_sin=cos_sin,
            q=q,
            q_out=q_out,
        )
        out, _ = cumla.attention(
            q_out, self.k_cache, self.v_cache, kv_lens=kv_lens, block_table=block_table
        )
        return x + self.project(out.view(BATCH, -1))


class Stack(torch.nn.Module):
    """Layers, one after another."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(device) for _ in range(LAYERS))
        self.register_buffer(
            "block_table",
            torch.arange(BATCH * PAGES_EACH, dtype=torch.int32, device=device).view(BATCH, -1),
        )
        angles = torch.rand(PAGE_SIZE * PAGES_EACH, HEAD_DIM // 2, device=device)
        self.register_buffer("cos_sin", torch.cat([angles.cos(), angles.sin()], dim=1))

    def forward(self, x: torch.Tensor, kv_lens: torch.Tensor) -> torch.Tensor:
        """Decode one token of each request, whose lengths count it."""
        for layer in self.layers:
            x = layer(x, self.block_table, kv_lens, self.cos_sin)
        return x


def run(step: torch.nn.Module, stack: Stack, device: str) -> list[torch.Tensor]:
    """Decode some tokens from empty caches."""
    for layer in stack.layers:
        layer.k_cache.zero_()
        layer.v_cache.zero_()
    x = torch.linspace(-1, 1, BATCH * HIDDEN, device=device).view(BATCH, -1).bfloat16()
    kv_lens = torch.tensor([1, 8, 15], dtype=torch.int32, device=device)
    results = []
    for _ in range(STEPS):
        x = step(x, kv_lens).clone()
        results.append(x)
        kv_lens += 1
    return results


def main() -> None:
    """Compare the compiled stack with the eager one."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {"mode": "reduce-overhead"} if device == "cuda" else {"backend": "aot_eager"}
    stack = Stack(device)
    with torch.no_grad():
        expected = run(stack, stack, device)
        found = run(torch.compile(stack, fullgraph=True, **options), stack, device)
    worst = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    print(f"largest difference from eager layers: {worst:.1e}")
    if not worst <= 2e-2 * float(expected[-1].abs().max()):
        raise SystemExit("the results differ")


if __name__ == "__main__":
    main()
