# SPDX-License-Identifier: Apache-2.0
"""Code written for DeepGEMM's indexer logits: tests change its import line and run it."""

from __future__ import annotations

from types import SimpleNamespace

SOURCE = '''\
import torch
import deep_gemm


def prefill(q, kv, weights, ks, ke):
    """Logits of all tokens, and the same compressed to the longest range."""
    logits = deep_gemm.fp8_mqa_logits(q, kv, weights, ks, ke)
    longest = int((ke - ks).max().item())
    compressed = deep_gemm.fp8_mqa_logits(
        q, kv, weights, ks, ke, clean_logits=False, max_seqlen_k=longest
    )
    return logits, compressed


class DecodeStep:
    """A schedule in a buffer that stays where it is, as CUDA graphs need it, for all layers."""

    def __init__(self, device):
        self.num_sms = deep_gemm.get_num_sms()
        self.schedule = torch.zeros((self.num_sms + 1, 2), dtype=torch.int32, device=device)

    def update(self, context_lens, block_kv):
        self.schedule[:] = deep_gemm.get_paged_mqa_logits_metadata(
            context_lens, block_kv, self.num_sms
        )

    def run(self, q, kv_cache, weights, context_lens, block_table, max_context_len, clean):
        return deep_gemm.fp8_paged_mqa_logits(
            q, kv_cache, weights, context_lens, block_table, self.schedule,
            max_context_len, clean_logits=clean,
        )
'''


def load_example() -> SimpleNamespace:
    """Run the example with its import line changed, and nothing else; give its names."""
    old, new = "import deep_gemm\n", "import cumla.compat.deep_gemm as deep_gemm\n"
    assert SOURCE.count(old) == 1
    names: dict[str, object] = {}
    exec(compile(SOURCE.replace(old, new), "deep_gemm_example", "exec"), names)
    return SimpleNamespace(**names)
