# SPDX-License-Identifier: Apache-2.0
"""Decoding layers of DeepSeek-V3.2 on one of eight tensor-parallel ranks, with PyTorch.

Each step writes the latent rows and index keys of its new tokens, one and a draft, and attends to
the 32 tokens that the indexer of the first layer selects; the second one shares the selection.
Outputs are compared with float32 attention to the selected tokens.
"""

import torch

import cumla

HEADS, INDEX_HEADS, INDEX_DIM, TOPK, Q_LEN, LAYERS = 16, 64, 128, 32, 2, 2
PAGE_SIZE, PAGES, STEPS, SCALE = 64, 8, 3, 192**-0.5  # of the head_dim before absorbing
DEVICE, DTYPE = "cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16


def numbers(*shape):
    """Make what a model computes."""
    return torch.randn(shape, dtype=DTYPE, device=DEVICE)


def plain(q, cached, selected):
    """Attend to the selected rows in float32: (heads, 576) to (heads, 512)."""
    rows = cached[selected]
    return ((q.float() @ rows.T) * SCALE).softmax(-1) @ rows[:, :512]


def main() -> None:
    """Decode two requests of 100 and 17 tokens."""
    torch.manual_seed(0)
    kv_lens = torch.tensor([100, 17], dtype=torch.int32, device=DEVICE)
    batch = len(kv_lens)
    block_table = torch.arange(PAGES, dtype=torch.int32, device=DEVICE).view(batch, -1)
    max_tokens = block_table.shape[1] * PAGE_SIZE
    packed = {"dtype": torch.uint8, "device": DEVICE}
    caches = [torch.zeros(PAGES, PAGE_SIZE, 1, 656, **packed) for _ in range(LAYERS)]
    index_cache = torch.zeros(PAGES, PAGE_SIZE, 1, INDEX_DIM + 4, **packed)
    # The caches' rows as float32: scales of 128 columns are powers of two.
    known = torch.zeros(LAYERS, batch, max_tokens, 576, device=DEVICE)

    def write(positions):
        """Append tokens (batch, n) to the caches of all layers."""
        slots = torch.arange(batch, device=DEVICE)[:, None] * max_tokens + positions
        for layer, cache in enumerate(caches):
            rows = numbers(slots.numel(), 576)
            rows[:, :512] = rows[:, :512].to(torch.float8_e4m3fn).to(DTYPE)
            cumla.append_mla_cache(rows, cache, slots.flatten())
            known[layer].view(-1, 576)[slots.flatten()] = rows.float()
        cumla.append_indexer_cache(numbers(slots.numel(), INDEX_DIM), index_cache, slots.flatten())

    write(torch.arange(100, device=DEVICE).expand(batch, -1))  # a prefill; a part is not seen
    q = numbers(batch, Q_LEN, HEADS, 576)
    index_q, q_scale = cumla.quantize_fp8(numbers(batch, Q_LEN, INDEX_HEADS, INDEX_DIM))
    plan = cumla.DSAPlan.from_arrays(
        q, caches[0], index_q, index_cache, block_table=block_table, topk=TOPK
    )

    worst = 0.0
    for _ in range(STEPS):
        write(kv_lens[:, None] + torch.arange(Q_LEN, device=DEVICE))
        kv_lens += Q_LEN  # the tokens that are written count
        plan.update(kv_lens)
        for layer in range(LAYERS):
            q = numbers(batch, Q_LEN, HEADS, 576)
            if layer == 0:
                index_q, q_scale = cumla.quantize_fp8(numbers(batch, Q_LEN, INDEX_HEADS, INDEX_DIM))
                weights = torch.rand(q_scale.shape, device=DEVICE) * q_scale
                plan.select(index_q, index_cache, weights.flatten(0, 1), block_table=block_table)
            out, _ = plan.run(q, caches[layer], block_table=block_table, softmax_scale=SCALE)
            for request, seen in enumerate(kv_lens.tolist()):
                for token in range(Q_LEN):
                    selected = plan.indices[request, token]
                    selected = selected[selected >= 0].long()
                    own = seen - (Q_LEN - 1 - token)  # a draft's later tokens are not seen
                    assert len(selected) == min(own, TOPK)
                    assert int(selected.max()) < own
                    exact = plain(q[request, token], known[layer, request], selected)
                    worst = max(worst, float((out[request, token].float() - exact).abs().max()))
        kv_lens -= 1  # the draft was refused
    assert worst < 0.03, worst
    print(f"{STEPS} steps of {LAYERS} layers, largest difference {worst:.4f}")


if __name__ == "__main__":
    main()
