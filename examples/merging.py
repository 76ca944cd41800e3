# SPDX-License-Identifier: Apache-2.0
"""Merging: requests share a prefix; attention over it and over the rest becomes one result.

All requests attend to the prefix as if they were queries of one request, so each page of it is read
once for all of them.
"""

import torch

import cumla

SCALE = 192**-0.5


def main() -> None:
    """Attend to the prefix and to each rest, merge, and compare with one call."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch, heads, shared_pages, own_pages = 4, 16, 2, 1
    pages = shared_pages + batch * own_pages
    q = torch.randn(batch, 1, heads, 576, dtype=torch.bfloat16, device=device)
    kv_cache = torch.randn(pages, 64, 576, dtype=torch.bfloat16, device=device)
    prefix = torch.arange(shared_pages, dtype=torch.int32, device=device)[None]
    rest = torch.arange(shared_pages, pages, dtype=torch.int32, device=device)[:, None]
    rest_lens = torch.tensor([10, 64, 1, 0], dtype=torch.int32, device=device)

    # (1, batch, heads, ...): one request whose query tokens are those of all requests
    prefix_len = torch.tensor([64 * shared_pages], dtype=torch.int32, device=device)
    of_prefix = cumla.mla_decode(
        q.view(1, batch, heads, 576),
        kv_cache,
        prefix,
        prefix_len,
        softmax_scale=SCALE,
        causal=False,
    )
    of_rest = cumla.mla_decode(q, kv_cache, rest, rest_lens, softmax_scale=SCALE)
    out, lse = cumla.merge_attention_states(
        [of_prefix.out.view(batch, 1, heads, 512), of_rest.out],
        [of_prefix.lse.transpose(0, 1), of_rest.lse],  # (batch, 1, heads)
    )

    table = torch.cat([prefix.expand(batch, -1), rest], dim=1)
    whole = cumla.mla_decode(q, kv_cache, table, rest_lens + 64 * shared_pages, softmax_scale=SCALE)
    error = float((out.float() - whole.out.float()).norm() / whole.out.float().norm())
    print(f"relative difference to one call: {error:.1e}")
    if error > 1e-2 or not torch.allclose(lse, whole.lse, atol=1e-4):
        raise SystemExit("the results differ")


if __name__ == "__main__":
    main()
