# SPDX-License-Identifier: Apache-2.0
"""Attention layers of a Llama, served from a paged cache with PyTorch; copy it and put a model in.

A step has the same shapes always: one token of every request that decodes, chunks of the prompts of
others, and padding. The plan is updated once a step and runs in all layers. Every step is compared
with the same layers in float32 over whole requests, without a cache and by PyTorch alone.
"""

from itertools import accumulate

import torch
from torch.nn.functional import pad, rms_norm

import cumla

LAYERS, HEADS, KV_HEADS, DIM, HIDDEN, VOCAB = 2, 32, 8, 128, 64, 50
PAGE_SIZE, PAGES, TOTAL, CHUNK = 16, 40, 24, 11
DEVICE, DTYPE = "cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16


def turned(x, angles):
    """Rotate columns j and j + DIM / 2 of each head, as Llama does."""
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def plain(tokens, layers, embedding, angles):
    """Compute logits of a whole request in float32."""
    h, n = embedding[tokens], len(tokens)
    for layer in layers:
        q, k, v = ((rms_norm(h, [HIDDEN]) @ layer[name]).view(n, -1, DIM) for name in "qkv")
        q, k = turned(q, angles[:n]), turned(k, angles[:n])
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * DIM**-0.5
        weights = scores.masked_fill(torch.ones(n, n).triu(1) > 0, float("-inf")).softmax(-1)
        h = h + torch.einsum("hqk,khd->qhd", weights, v).reshape(n, -1) @ layer["o"]
    return rms_norm(h, [HIDDEN]) @ embedding.T


def main() -> None:
    """Prefill prompts of 70, 33, 5 and 1 tokens, and decode until each request has its length."""
    torch.manual_seed(0)
    kv_size = HIDDEN, KV_HEADS * DIM
    sizes = {"q": (HIDDEN, HEADS * DIM), "k": kv_size, "v": kv_size, "o": (HEADS * DIM, HIDDEN)}
    layers = [{n: torch.randn(s) / s[0] ** 0.5 for n, s in sizes.items()} for _ in range(LAYERS)]
    embedding = torch.randn(VOCAB, HIDDEN)
    angles = torch.arange(256)[:, None] * 10000.0 ** (-torch.arange(DIM // 2) / (DIM // 2))
    cos_sin, batch = (angles.cos(), angles.sin()), 4
    prompts, lengths = [70, 33, 5, 1], [74, 40, 11, 9]
    requests = [torch.randint(VOCAB, (length,)) for length in lengths]
    want = [plain(tokens, layers, embedding, angles) for tokens in requests]
    caches = torch.zeros(LAYERS, 2, PAGES, PAGE_SIZE, KV_HEADS, DIM, dtype=DTYPE)
    block_table = torch.zeros(batch, 8, dtype=torch.int32)
    free, owned, done, worst = list(range(PAGES)), [0] * batch, [0] * batch, 0.0
    shape = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "page_size": PAGE_SIZE}
    plan = cumla.AttentionPlan(batch=batch, total_tokens=TOTAL, **shape, dtype=DTYPE, like=caches)

    while done != lengths:
        ends, room = list(done), TOTAL
        for i in sorted(range(batch), key=lambda i: done[i] < prompts[i]):  # decoding comes first
            end = prompts[i] if done[i] < prompts[i] else min(done[i] + 1, lengths[i])
            ends[i] = min(end, done[i] + CHUNK, done[i] + room)
            room -= ends[i] - done[i]
            while owned[i] * PAGE_SIZE < ends[i]:
                block_table[i, owned[i]], owned[i] = free.pop(), owned[i] + 1
        starts = [0, *accumulate(end - begin for begin, end in zip(done, ends, strict=True))]
        kv_lens, qo_indptr = (torch.tensor(x, dtype=torch.int32) for x in (ends, starts))
        places = {"kv_lens": kv_lens, "qo_indptr": qo_indptr, "block_table": block_table}
        plan.update(kv_lens, qo_indptr=qo_indptr)
        new = torch.cat([requests[i][done[i] : ends[i]] for i in range(batch)])
        h = pad(embedding[new], (0, 0, 0, room))
        for layer, (k_cache, v_cache) in zip(layers, caches, strict=True):
            x = rms_norm(h, [HIDDEN]).to(DTYPE)
            q, k, v = ((x @ layer[name].to(DTYPE)).view(TOTAL, -1, DIM) for name in "qkv")
            cumla.append_kv_cache(k, v, k_cache, v_cache, **places, cos_sin=cos_sin, q=q)
            out = plan.run(q, k_cache, v_cache, block_table=block_table).out
            out[len(new) :] = 0  # padding holds anything
            h = h + out.view(TOTAL, -1).float() @ layer["o"]
        logits = rms_norm(h, [HIDDEN]) @ embedding.T
        for i in range(batch):
            right, got = want[i][done[i] : ends[i]], logits[starts[i] : starts[i + 1]]
            worst = max([worst, *((got - right).norm(dim=1) / right.norm(dim=1)).tolist()])
        done = ends
    assert worst < 0.02, f"logits differ by {worst} of their norm"
    print(f"logits differ by at most {worst:.1e} of their norm")


if __name__ == "__main__":
    with torch.device(DEVICE):
        main()
