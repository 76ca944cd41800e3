# SPDX-License-Identifier: Apache-2.0
"""Sparse attention as in MiniMax M3: layers with an indexer, decoded step by step.

    python examples/minimax_m3.py

A small model with random weights writes its caches, scores blocks, chooses some, and attends to
them. Each step is compared with dense attention that is restricted to the chosen blocks. On a GPU
it runs there, else on the CPU.
"""

import torch

import cumla

HIDDEN, HEADS, KV_HEADS, COLUMNS, INDEX_COLUMNS = 256, 8, 2, 64, 64
BLOCK, TOPK, LAYERS, BATCH, PAGES, STEPS = 16, 4, 2, 3, 16, 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KIND = {"dtype": torch.bfloat16, "device": DEVICE}


class Layer:
    """Attention of one layer: projections, and caches in pages of one block."""

    def __init__(self, generator: torch.Generator) -> None:
        sizes = (HEADS + 2 * KV_HEADS) * COLUMNS + (KV_HEADS + 1) * INDEX_COLUMNS
        weights = torch.randn(HIDDEN, sizes, generator=generator) * HIDDEN**-0.5
        self.weights = weights.to(**KIND)
        output = torch.randn(HEADS * COLUMNS, HIDDEN, generator=generator)
        self.output = (output * (HEADS * COLUMNS) ** -0.5).to(**KIND)
        shape = BATCH * PAGES, BLOCK, KV_HEADS, COLUMNS
        self.k, self.v = (torch.zeros(shape, **KIND) for _ in range(2))
        self.index_keys = torch.zeros(BATCH * PAGES, BLOCK, INDEX_COLUMNS, **KIND)

    def project(self, x: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Give queries of attention and of the indexer, and write what is cached."""
        parts = [
            HEADS * COLUMNS,
            *[KV_HEADS * COLUMNS] * 2,
            KV_HEADS * INDEX_COLUMNS,
            INDEX_COLUMNS,
        ]
        q, k, v, index_q, index_key = (x @ self.weights).split(parts, dim=-1)
        page, row = slots // BLOCK, slots % BLOCK
        self.k[page, row] = k.view(-1, KV_HEADS, COLUMNS)
        self.v[page, row] = v.view(-1, KV_HEADS, COLUMNS)
        self.index_keys[page, row] = index_key
        return q.view(-1, 1, HEADS, COLUMNS), index_q.view(-1, 1, KV_HEADS, INDEX_COLUMNS)


def dense(
    layer: Layer, q: torch.Tensor, blocks: torch.Tensor, table: torch.Tensor, lens: list[int]
) -> torch.Tensor:
    """Attend to all keys of a request, those outside of the chosen blocks hidden."""
    rows = []
    for r, length in enumerate(lens):
        at = torch.arange(length, device=q.device)
        page, row = table[r, at // BLOCK].long(), at % BLOCK
        for head in range(KV_HEADS):
            keys, values = (c[page, row, head].float() for c in (layer.k, layer.v))
            hidden = ~torch.isin(at // BLOCK, blocks[r, head])
            group = q[r, 0].view(KV_HEADS, -1, COLUMNS)[head].float()
            scores = (group @ keys.T * COLUMNS**-0.5).masked_fill(hidden, -torch.inf)
            rows.append(scores.softmax(-1) @ values)
    return torch.cat(rows).view(len(lens), 1, HEADS, COLUMNS)


def main() -> None:
    """Fill the caches with prompts, then decode a few tokens with checks."""
    generator = torch.Generator().manual_seed(0)
    layers = [Layer(generator) for _ in range(LAYERS)]
    table = torch.randperm(BATCH * PAGES, generator=generator).view(BATCH, PAGES)
    table = table.to(torch.int32).to(DEVICE)
    lens = torch.tensor([150, 97, 20], dtype=torch.int32, device=DEVICE)

    def slots(request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return table[request, position // BLOCK] * BLOCK + position % BLOCK

    request = torch.repeat_interleave(torch.arange(BATCH, device=DEVICE), lens)
    position = torch.cat([torch.arange(n, device=DEVICE) for n in lens.tolist()])
    for layer in layers:  # as if a prefill had been here
        prompts = torch.randn(len(position), HIDDEN, generator=generator).to(**KIND)
        layer.project(prompts, slots(request, position))

    x, plan = torch.randn(BATCH, HIDDEN, generator=generator).to(**KIND), None
    for step in range(STEPS):
        place = slots(torch.arange(BATCH, device=DEVICE), lens)
        lens, worst = lens + 1, 0.0
        for layer in layers:
            q, index_q = layer.project(x, place)
            index, cache = (index_q, layer.index_keys), (q, layer.k, layer.v)
            if plan is None:
                chosen = {"topk": TOPK, "block_size": BLOCK, "local_blocks": 1}
                plan = cumla.BlockSparseStep.from_arrays(
                    *cache, *index, block_table=table, **chosen
                )
            if layer is layers[0]:  # one update a step, for all layers
                plan.update(lens)
            blocks = plan.select(*index, block_table=table)
            out, _ = plan.run(*cache, block_table=table)
            want = dense(layer, q, blocks, table, lens.tolist())
            worst = max(worst, (out.float() - want).abs().max().item())
            x = x + out.reshape(BATCH, -1) @ layer.output
        print(f"step {step}: blocks {blocks[0].tolist()}, largest difference {worst:.4f}")
        assert worst < 0.05


if __name__ == "__main__":
    main()
