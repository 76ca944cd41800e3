# SPDX-License-Identifier: Apache-2.0
"""Biases of scores by distance: ALiBi, and a table of each query token as Inkling has it.

A prompt is prefilled and a token decoded, over the pages of a cache. Results are compared with
dense attention by the rule.
"""

import torch

import cumla

HEADS, KV_HEADS, COLUMNS, PAGE_SIZE, PROMPT, EXTENT = 8, 2, 64, 16, 150, 64


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Attend from the last len(q) tokens, with biases (heads, queries, keys), in float32."""
    k, v = (rows.float().repeat_interleave(HEADS // KV_HEADS, dim=1) for rows in (k, v))
    scores = torch.einsum("qhc,khc->hqk", q.float(), k) * COLUMNS**-0.5 + bias
    hidden = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device)
    hidden = hidden.triu(len(k) - len(q) + 1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khc->qhc", weights, v)


def main() -> None:
    """Prefill, decode and compare."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    total = PROMPT + 1
    pages = -(-total // PAGE_SIZE)
    table = torch.randperm(pages, device=device).to(torch.int32)[None]

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(torch.bfloat16)

    q = rows(total, HEADS, COLUMNS)
    k, v = (rows(total, KV_HEADS, COLUMNS) for _ in range(2))
    caches = torch.zeros(2, pages, PAGE_SIZE, KV_HEADS, COLUMNS, device=device).to(torch.bfloat16)
    at = torch.arange(total, device=device)
    for cache, new in zip(caches, (k, v), strict=True):
        cache[table[0, at // PAGE_SIZE].long(), at % PAGE_SIZE] = new

    distance = at[:, None] - at  # p - j
    slopes = 2.0 ** -torch.arange(1, HEADS + 1, device=device, dtype=torch.float32)
    relative = rows(total, HEADS, EXTENT)
    of_table = relative.float().gather(
        2, distance.clamp(0, EXTENT - 1)[:, None].expand(-1, HEADS, -1)
    )
    of_table = of_table.masked_fill((distance >= EXTENT)[:, None], 0).transpose(0, 1)
    whole = {"ALiBi": -slopes[:, None, None] * distance, "table": of_table}

    for name, of_scores in whole.items():
        for some in (slice(0, PROMPT), slice(PROMPT, total)):
            if name == "ALiBi":
                bias = cumla.AttentionBias(slopes=slopes)
            else:
                bias = cumla.AttentionBias(table=relative[some])
            lens = torch.tensor([some.stop], dtype=torch.int32, device=device)
            state = cumla.attention(
                q[None, some], *caches, kv_lens=lens, block_table=table, bias=bias
            )
            expected = dense(
                q[some], k[: some.stop], v[: some.stop], of_scores[:, some, : some.stop]
            )
            torch.testing.assert_close(state.out[0].float(), expected, atol=2e-2, rtol=2e-2)
        print(f"{name}: {PROMPT} tokens of a prompt and a decoded one agree with dense attention")


if __name__ == "__main__":
    main()
