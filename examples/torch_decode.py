# SPDX-License-Identifier: Apache-2.0
"""PyTorch: one decoding step through absorbed attention, against plain attention per head."""

import torch

import cumla

LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128
SCALE = (NOPE + ROPE) ** -0.5  # of the un-absorbed heads, not of the 576 columns of a row


def main() -> None:
    """Decode one token of each request and compare with attention over expanded keys."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16
    batch, heads, pages, page_size = 2, 16, 8, 64
    lengths = [200, 37]

    # The weights that expand a latent row to keys and values of each head.
    w_key = torch.randn(heads, NOPE, LATENT, device=device) * LATENT**-0.5
    w_value = torch.randn(heads, VALUE, LATENT, device=device) * LATENT**-0.5
    q_nope = torch.randn(batch, heads, NOPE, device=device)
    q_pe = torch.randn(batch, heads, ROPE, device=device, dtype=dtype)
    kv_cache = torch.randn(pages, page_size, LATENT + ROPE, device=device, dtype=dtype)
    block_table = torch.randperm(pages, device=device).to(torch.int32).view(batch, -1)
    kv_lens = torch.tensor(lengths, dtype=torch.int32, device=device)

    absorbed = torch.einsum("bhd,hdl->bhl", q_nope, w_key).to(dtype)
    out, _ = cumla.mla_decode(
        (absorbed[:, None], q_pe[:, None]), kv_cache, block_table, kv_lens, softmax_scale=SCALE
    )
    result = torch.einsum("bhl,hvl->bhv", out[:, 0].float(), w_value)

    worst = 0.0
    for request, length in enumerate(lengths):
        rows = kv_cache[block_table[request].long()].reshape(-1, LATENT + ROPE)[:length].float()
        keys = torch.einsum("tl,hdl->htd", rows[:, :LATENT], w_key)
        values = torch.einsum("tl,hvl->htv", rows[:, :LATENT], w_value)
        scores = torch.einsum("hd,htd->ht", q_nope[request], keys)
        scores = scores + torch.einsum("hd,td->ht", q_pe[request].float(), rows[:, LATENT:])
        expected = torch.einsum("ht,htv->hv", torch.softmax(SCALE * scores, dim=-1), values)
        error = (result[request] - expected).norm() / expected.norm()
        worst = max(worst, float(error))
    print(f"relative error against un-absorbed attention: {worst:.1e}")
    if worst > 2e-2:
        raise SystemExit("the results differ")


if __name__ == "__main__":
    main()
