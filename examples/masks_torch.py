# SPDX-License-Identifier: Apache-2.0
"""A prompt with images and a tree of drafts, in a local and a global layer as Gemma 3 has them.

The prompt is prefilled in chunks that cut no image. Tokens of an image see each other. Then a tree
of drafts is verified: each draft sees its ancestors, and the window of the local layer counts the
depth of a draft, not its row. Both layers are compared with dense attention by the rule.
"""

import torch

import cumla

HEADS, KV_HEADS, COLUMNS, PAGE_SIZE, WINDOW = 4, 2, 64, 16, 31  # a token and 31 before it
IMAGES, CHUNKS, PROMPT = [(20, 83), (120, 183)], [100, 104], 204
PARENTS = [-1, 0, 0, 1, 1, 2, 3]  # of the drafts; the first is the token that was sampled


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Attend from each query to the keys that it sees, in float32."""
    k, v = (rows.float().repeat_interleave(HEADS // KV_HEADS, dim=1) for rows in (k, v))
    scores = torch.einsum("qhc,khc->hqk", q.float(), k) * COLUMNS**-0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khc->qhc", weights, v)


def main() -> None:
    """Prefill, verify and compare."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    total, drafts = PROMPT + len(PARENTS), len(PARENTS)
    pages = -(-total // PAGE_SIZE)
    table = torch.randperm(pages, device=device).to(torch.int32)[None]

    def rows(heads: int) -> torch.Tensor:
        return torch.randn(total, heads, COLUMNS, device=device).to(torch.bfloat16)

    layers = [(rows(HEADS), rows(KV_HEADS), rows(KV_HEADS)) for _ in range(2)]  # local, global
    caches = [torch.zeros(2, pages, PAGE_SIZE, KV_HEADS, COLUMNS, device=device) for _ in range(2)]
    caches = [cache.to(torch.bfloat16) for cache in caches]
    outs = [torch.zeros(total, HEADS, COLUMNS, device=device) for _ in range(2)]

    # The keys that each token sees, by the rule. Positions of drafts are those of their depth.
    tree = torch.zeros(drafts, drafts, dtype=torch.bool, device=device)
    for i, parent in enumerate(PARENTS):
        if i:
            tree[i] = tree[parent]
        tree[i, i] = True
    depths = tree.sum(dim=1) - 1
    places = torch.cat([torch.arange(PROMPT, device=device), PROMPT + depths])
    seen = torch.ones(total, total, dtype=torch.bool, device=device).tril()
    seen[PROMPT:, PROMPT:] = tree
    near = places[:, None] - places[None] <= WINDOW
    same_image = torch.zeros_like(seen)
    for first, last in IMAGES:
        same_image[first : last + 1, first : last + 1] = True

    spans = torch.tensor([IMAGES], dtype=torch.int32, device=device)
    done = 0
    for count in (*CHUNKS, drafts):
        here = slice(done, done + count)
        kv_lens = torch.tensor([done + count], dtype=torch.int32, device=device)
        step = {"kv_lens": kv_lens, "q_len": count}
        if done < PROMPT:  # one mask for all local layers, and one for all global ones
            masks = [
                cumla.AttentionMask.image_spans(spans, window=WINDOW, **step),
                cumla.AttentionMask.image_spans(spans, **step),
            ]
        else:
            positions = PROMPT + depths
            masks = [
                cumla.AttentionMask.from_tree(
                    tree[None], window=WINDOW, kv_lens=kv_lens, positions=positions
                ),
                cumla.AttentionMask.from_tree(tree[None]),
            ]
        for (q, k, v), cache, mask, out in zip(layers, caches, masks, outs, strict=True):
            paged = {"kv_lens": kv_lens, "block_table": table}
            cumla.append_kv_cache(k[None, here], v[None, here], *cache, **paged)
            out[here] = cumla.attention(q[None, here], *cache, **paged, mask=mask).out[0].float()
        done += count

    for name, layer, out, visible in zip(
        ("local", "global"), layers, outs, (seen & near, seen), strict=True
    ):
        expected = dense(*layer, visible | same_image)
        error = (out - expected).norm() / expected.norm()
        print(f"{name} layer: relative error {float(error):.1e}")
        if error > 1e-2:
            raise SystemExit("the results differ")


if __name__ == "__main__":
    main()
