# SPDX-License-Identifier: Apache-2.0
"""The indexer: which cached tokens each query should attend to, with PyTorch.

Logits of all cached tokens by cumla.PagedMQALogitsPlan, the best of them by cumla.top_k.
"""

import torch

import cumla


def main() -> None:
    """Score all cached tokens of two requests and choose the best 16."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch, heads, head_dim, pages, tokens = 2, 64, 128, 8, 512
    kv_lens = torch.tensor([256, 100], dtype=torch.int32, device=device)
    block_table = torch.arange(pages, dtype=torch.int32, device=device).view(batch, -1)

    keys = torch.randn(tokens, head_dim, dtype=torch.bfloat16, device=device)
    kv_cache = torch.zeros(pages, 64, 1, head_dim + 4, dtype=torch.uint8, device=device)
    cumla.append_indexer_cache(keys, kv_cache, torch.arange(tokens, device=device))

    raw = torch.randn(batch, 1, heads, head_dim, dtype=torch.bfloat16, device=device)
    raw_weights = torch.rand(batch, heads, device=device)
    q, q_scale = cumla.quantize_fp8(raw)
    weights = raw_weights * q_scale.view(batch, heads)  # the scale of q is folded into them

    plan = cumla.PagedMQALogitsPlan.from_arrays(q, kv_cache, block_table, kv_lens)
    plan.update(kv_lens)  # once per step, then a run per layer
    logits = plan.run(q, kv_cache, weights, block_table=block_table, max_kv_len=256)
    chosen = cumla.top_k(logits, 16, row_lens=kv_lens).indices
    print("best tokens of request 1:", chosen[1].tolist())

    own = keys.view(batch, 256, head_dim).float()
    products = torch.einsum("bhd,btd->bht", raw[:, 0].float(), own).clamp(min=0)
    expected = torch.einsum("bh,bht->bt", raw_weights, products)
    visible = torch.arange(256, device=device)[None, :] < kv_lens[:, None]
    error = (logits - expected)[visible].norm() / expected[visible].norm()
    print(f"relative difference to float32: {float(error):.1e}")
    best = logits.topk(16, dim=1).indices.sort().values
    if (
        error > 0.05
        or not torch.equal(chosen, best.int())
        or not torch.isneginf(logits[~visible]).all()
    ):
        raise SystemExit("the logits differ")


if __name__ == "__main__":
    main()
