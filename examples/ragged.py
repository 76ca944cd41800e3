# SPDX-License-Identifier: Apache-2.0
"""A small server: requests decode while the prompts of others are prefilled in chunks.

Every step is one plan update and one run per layer, with the same shapes: 32 query tokens and four
requests at most. On a GPU a CUDA graph could hold it (see cupy_plan_graph.py).
"""

import torch

import cumla

SCALE = 192**-0.5
HEADS, PAGE_SIZE, PAGES_EACH, CHUNK, TOTAL = 16, 64, 4, 16, 32


def main() -> None:
    """Prefill prompts of 40, 100, 7 and 64 tokens in chunks, and decode three tokens of each."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16
    prompts = [40, 100, 7, 64]
    ends = [prompt + 3 for prompt in prompts]
    batch = len(prompts)
    kv_cache = torch.zeros(batch * PAGES_EACH, PAGE_SIZE, 576, dtype=dtype, device=device)
    block_table = torch.arange(batch * PAGES_EACH, dtype=torch.int32, device=device).view(batch, -1)
    rows = [torch.randn(end, 576, dtype=dtype, device=device) for end in ends]
    queries = [torch.randn(end, HEADS, 576, dtype=dtype, device=device) for end in ends]
    outs = [torch.zeros(end, HEADS, 512, dtype=dtype, device=device) for end in ends]
    done = [0] * batch
    plan = cumla.MLAAttentionPlan(batch, TOTAL, HEADS, like=kv_cache)

    steps = 0
    while any(done[r] < ends[r] for r in range(batch)):
        # One token of every request that decodes, and chunks of prompts as far as there is room.
        counts, room = [0] * batch, TOTAL
        for r in sorted(range(batch), key=lambda r: done[r] < prompts[r]):
            left = prompts[r] - done[r] if done[r] < prompts[r] else min(1, ends[r] - done[r])
            counts[r] = min(left, CHUNK, room)
            room -= counts[r]
        offsets = [0]
        for count in counts:
            offsets.append(offsets[-1] + count)
        q = torch.zeros(TOTAL, HEADS, 576, dtype=dtype, device=device)
        new = torch.zeros(TOTAL, 576, dtype=dtype, device=device)
        slots = torch.full((TOTAL,), -1, dtype=torch.int64, device=device)
        for r, count in enumerate(counts):
            here, there = slice(offsets[r], offsets[r + 1]), slice(done[r], done[r] + count)
            q[here], new[here] = queries[r][there], rows[r][there]
            first = r * PAGES_EACH * PAGE_SIZE + done[r]
            slots[here] = torch.arange(first, first + count, device=device)
            done[r] += count
        qo_indptr = torch.tensor(offsets, dtype=torch.int32, device=device)
        kv_lens = torch.tensor(done, dtype=torch.int32, device=device)

        cumla.append_mla_cache(new, kv_cache, slots)
        plan.update(kv_lens, qo_indptr=qo_indptr)
        out, _ = plan.run(q, kv_cache, block_table=block_table, softmax_scale=SCALE)
        for r, count in enumerate(counts):
            outs[r][done[r] - count : done[r]] = out[offsets[r] : offsets[r + 1]]
        steps += 1

    # All tokens of each request in one call must give the same.
    whole, _ = cumla.mla_attention(
        torch.cat(queries),
        kv_cache,
        block_table=block_table,
        kv_lens=torch.tensor(ends, dtype=torch.int32, device=device),
        qo_indptr=torch.tensor([0, *ends], device=device).cumsum(0).to(torch.int32),
        softmax_scale=SCALE,
    )
    error = (torch.cat(outs).float() - whole.float()).norm() / whole.float().norm()
    print(f"{steps} steps, relative difference to one call: {float(error):.1e}")
    if error > 1e-2:
        raise SystemExit("the results differ")


if __name__ == "__main__":
    main()
