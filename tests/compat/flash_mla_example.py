# SPDX-License-Identifier: Apache-2.0
"""A decoding step written for FlashMLA, and its inputs: tests change its import line and run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SOURCE = '''\
import torch
from flash_mla import flash_mla_with_kvcache, get_mla_metadata


def decode_step(queries, caches, block_table, cache_seqlens, softmax_scale):
    """Attention of one decoding step: the schedule once, then layer by layer."""
    q_len, heads_q = queries[0].shape[1:3]
    heads_k = caches[0].shape[2]
    tile_scheduler_metadata, num_splits = get_mla_metadata(
        cache_seqlens, q_len * heads_q // heads_k, heads_k
    )
    outs, lses = [], []
    for q, k_cache in zip(queries, caches):
        out, lse = flash_mla_with_kvcache(
            q, k_cache, block_table, cache_seqlens, 512,
            tile_scheduler_metadata, num_splits,
            softmax_scale=softmax_scale, causal=True,
        )
        outs.append(out)
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)
'''

DecodeStep = Callable[..., tuple[Any, Any]]


def load_example() -> DecodeStep:
    """Run the example with its import line changed, and nothing else; give its function."""
    old, new = "from flash_mla import", "from cumla.compat.flash_mla import"
    assert SOURCE.count(old) == 1
    namespace: dict[str, Any] = {}
    exec(compile(SOURCE.replace(old, new), "flash_mla_example", "exec"), namespace)
    step: DecodeStep = namespace["decode_step"]
    return step


@dataclass(frozen=True)
class StepInputs:
    """Tensors of one decoding step; `arguments` are those of the example's function."""

    queries: list[Any]
    caches: list[Any]
    block_table: Any
    cache_seqlens: Any
    softmax_scale: float = 192**-0.5

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The example's positional arguments."""
        return (
            self.queries,
            self.caches,
            self.block_table,
            self.cache_seqlens,
            self.softmax_scale,
        )


def make_inputs(
    lengths: tuple[int, ...],
    *,
    max_pages: int,
    heads: int = 16,
    kv_heads: int = 1,
    q_len: int = 1,
    layers: int = 3,
    dtype: str = "bfloat16",
    device: str = "cpu",
) -> StepInputs:
    """Seeded inputs with shuffled pages: every request may grow to ``max_pages`` pages of 64."""
    import torch

    generator = torch.Generator().manual_seed(20261120)
    kind, batch = getattr(torch, dtype), len(lengths)
    num_pages = batch * max_pages

    def normal(*shape: int) -> Any:
        return (0.1 * torch.randn(*shape, generator=generator)).to(kind).to(device)

    pages = torch.randperm(num_pages, generator=generator, dtype=torch.int64)
    return StepInputs(
        queries=[normal(batch, q_len, heads, 576) for _ in range(layers)],
        caches=[normal(num_pages, 64, kv_heads, 576) for _ in range(layers)],
        block_table=pages.to(torch.int32).reshape(batch, max_pages).to(device),
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device=device),
    )
