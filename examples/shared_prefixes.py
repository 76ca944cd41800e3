# SPDX-License-Identifier: Apache-2.0
"""Decode samples of two prompts: the pages of each prompt are read once for all its samples.

Needs PyTorch; runs on the CPU as well.
"""

import torch

import cumla

PAGE, HEADS, KV_HEADS, DIM, SAMPLES, STEPS = 16, 8, 2, 64, 4, 3
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

prompts = (160, 96)  # tokens, of which the last page may be shared only in part
batch = SAMPLES * len(prompts)
pages_of_sample = 2
table, used = [], 0
for tokens in prompts:
    shared = list(range(used, used + tokens // PAGE))
    used += len(shared)
    for _ in range(SAMPLES):
        own = list(range(used, used + pages_of_sample))
        used += pages_of_sample
        table.append(shared + own)
columns = max(map(len, table))
block_table = torch.tensor(
    [row + [0] * (columns - len(row)) for row in table], dtype=torch.int32, device=device
)
kv_lens = torch.tensor(
    [tokens for tokens in prompts for _ in range(SAMPLES)], dtype=torch.int32, device=device
)
k, v = torch.randn(2, used, PAGE, KV_HEADS, DIM, dtype=torch.bfloat16, device=device)

like = torch.empty(batch, 1, HEADS, DIM, dtype=torch.bfloat16, device=device)
plan = cumla.AttentionPlan.from_arrays(like, k, v, prefix_groups=True, max_pages=columns)

for step in range(STEPS):
    new = torch.randn(2, batch, KV_HEADS, DIM, dtype=torch.bfloat16, device=device)
    pages = block_table.gather(1, (kv_lens // PAGE).long()[:, None])[:, 0]
    slots = pages * PAGE + kv_lens % PAGE
    cumla.append_kv_cache(*new, k, v, slot_mapping=slots)
    kv_lens += 1

    groups = cumla.find_prefix_groups(block_table, kv_lens, page_size=PAGE, min_tokens=64)
    plan.update(kv_lens, groups=groups)
    q = torch.randn_like(like)
    out, lse = plan.run(q, k, v, block_table=block_table)

    without = cumla.attention(q, k, v, kv_lens=kv_lens, block_table=block_table)
    torch.testing.assert_close(out, without.out, atol=2e-2, rtol=2e-2)
    print(f"step {step}: prefixes {groups.prefix_len.tolist()}, lse of sample 0 {lse[0, 0, 0]:.4f}")
