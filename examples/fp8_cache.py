# SPDX-License-Identifier: Apache-2.0
"""FP8 caches: the same rows in bfloat16, packed, and under one scale."""

import torch

import cumla

SCALE = 192**-0.5


def main() -> None:
    """Compare attention over the FP8 caches with attention over bfloat16."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch, tokens, pages, heads = 2, 200, 4, 16
    rows = torch.randn(tokens, 576, dtype=torch.bfloat16, device=device)
    q = torch.randn(batch, 1, heads, 576, dtype=torch.bfloat16, device=device)
    block_table = torch.arange(pages, dtype=torch.int32, device=device).view(batch, -1)
    kv_lens = torch.tensor([128, 72], dtype=torch.int32, device=device)
    slots = torch.arange(tokens, device=device)

    kv_scale = 0.01
    plain = torch.zeros(pages, 64, 576, dtype=torch.bfloat16, device=device)
    packed = torch.zeros(pages, 64, 656, dtype=torch.uint8, device=device)
    scaled = torch.zeros(pages, 64, 576, device=device).to(torch.float8_e4m3fn)
    cumla.append_mla_cache(rows, plain, slots)
    cumla.append_mla_cache(rows, packed, slots)
    cumla.append_mla_cache(rows, scaled, slots, kv_scale=kv_scale)

    exact = cumla.mla_decode(q, plain, block_table, kv_lens, softmax_scale=SCALE).out.float()
    for name, cache, factor in (("packed", packed, None), ("one scale", scaled, kv_scale)):
        out, _ = cumla.mla_decode(
            q, cache, block_table, kv_lens, softmax_scale=SCALE, kv_scale=factor
        )
        error = float((out.float() - exact).norm() / exact.norm())
        nbytes = cache[0, 0].numel() * cache.element_size()
        print(f"{name}: {nbytes} bytes per token, relative difference {error:.1e}")
        if not 0 < error < 0.1:
            raise SystemExit("the results differ more than e4m3 explains")


if __name__ == "__main__":
    main()
