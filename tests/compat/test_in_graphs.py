# SPDX-License-Identifier: Apache-2.0
"""Faces inside torch.compile: the graph is whole, and gives the bits of the eager call."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest

import cumla
import cumla.compat.flashinfer as flashinfer
from cumla.compat import deep_gemm, flash_attn, flash_mla
from tests.bindings.in_torch import compiled, flat

torch = pytest.importorskip("torch")

BATCH, HEADS = 2, 16
TABLE = torch.arange(8, dtype=torch.int32).view(BATCH, 4)
LENS = torch.tensor([0, 200], dtype=torch.int32)
LISTS = torch.arange(16, dtype=torch.int32).view(BATCH, 1, 8)
SINKS = torch.zeros(HEADS)


def numbers(*shape: int) -> Any:
    """Numbers that a graph can compute, too."""
    return (torch.arange(prod(shape)) * 0.7).sin().view(shape).bfloat16()


def cache_of(columns: int, nbytes: int) -> Any:
    cache = torch.zeros(8, 64, 1, nbytes, dtype=torch.uint8)
    cumla.append_mla_cache(numbers(512, columns), cache, torch.arange(512))
    return cache


def decode(columns: int, cache: Any, **options: Any) -> Callable[[Any], Any]:
    def step(q: Any) -> Any:
        metadata, none = flash_mla.get_mla_metadata()
        return flash_mla.flash_mla_with_kvcache(
            q.expand(BATCH, 1, HEADS, columns), cache, TABLE, LENS, 512, metadata, none, **options
        )

    return step


def prefill(q: Any) -> Any:
    """Without max_logits, which graphs do not have."""
    rows, lists = numbers(50, 1, 576), LISTS.view(16, 1, 1)
    return flash_mla.flash_mla_sparse_fwd(q.expand(16, HEADS, 576), rows, lists, 1.0)[::2]


def indexer(paged: bool) -> Callable[[Any], Any]:
    cache = torch.zeros(8, 64, 1, 132, dtype=torch.uint8)
    cumla.append_indexer_cache(numbers(512, 128), cache, torch.arange(512))
    weights, lens = torch.ones(BATCH, 8), LENS + 1
    keys = cumla.quantize_fp8(numbers(96, 128))
    q, _ = cumla.quantize_fp8(numbers(BATCH, 1, 8, 128))
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lens, 64, 132)

    def score(_: Any) -> Any:
        if not paged:
            return deep_gemm.fp8_mqa_logits(q[:, 0], keys, weights, LENS * 0, lens // 3)
        return deep_gemm.fp8_paged_mqa_logits(q, cache, weights, lens, TABLE, schedule, 201, True)

    return score


def in_place(v: Any) -> Any:
    v, s = v.expand(4, 3, 576).clone(), torch.ones(4, 3)
    flashinfer.merge_state_in_place(v, s, v * 2, s)
    return v, s


def append(v: Any) -> Any:
    cache, rows = torch.zeros(2, 2, 16, 3, 64).bfloat16(), v[:384].view(2, 3, 64)
    lists = torch.arange(3, dtype=torch.int32)
    flashinfer.append_paged_kv_cache(
        rows, rows, lists[:2], lists[1:], cache, lists[:2], lists, lists[1:]
    )
    return cache


CALLS = {
    "dense": decode(576, numbers(8, 64, 1, 576), causal=True),
    "sparse": decode(576, numbers(8, 64, 1, 576), indices=LISTS - 8),
    "V32": decode(576, cache_of(576, 656), indices=LISTS, is_fp8_kvcache=True, attn_sink=SINKS),
    "MODEL1": decode(
        *(512, cache_of(512, 584)),
        indices=LISTS,
        is_fp8_kvcache=True,
        topk_length=LENS,
        extra_k_cache=cache_of(512, 584),
        extra_indices_in_kvcache=LISTS,
    ),
    "sparse_fwd": prefill,
    "logits": indexer(False),
    "paged logits": indexer(True),
    "top_k": lambda v: flashinfer.top_k(v.view(4, -1).float(), 5, sorted=True),
    "top_k_page_table_transform": lambda v: flashinfer.top_k_page_table_transform(
        v.view(2, -1), TABLE, LENS, 5, page_size=128
    ),
    "top_k_ragged_transform": lambda v: flashinfer.top_k_ragged_transform(
        v.view(2, -1), LENS, LENS, 5
    ),
    "merge_state": lambda v: flashinfer.merge_state(
        v.view(4, 2, 72), torch.ones(4, 2), v.view(4, 2, 72), torch.zeros(4, 2)
    ),
    "merge_state_in_place": in_place,
    "merge_states": lambda v: flashinfer.merge_states(v.view(2, 2, 2, 72), torch.ones(2, 2, 2)),
    "flash_attn_combine": lambda v: flash_attn.flash_attn_combine(
        v.view(2, 2, 1, 2, 72), torch.ones(2, 2, 1, 2)
    ),
    "flash_attn_with_kvcache": lambda v: flash_attn.flash_attn_with_kvcache(
        *(v[:128].view(2, 1, 1, 64), numbers(2, 256, 1, 64), numbers(2, 256, 1, 64)),
        *(v[:128].view(2, 1, 1, 64), v[:128].view(2, 1, 1, 64)),
        cache_seqlens=LENS,
    ),
    "single_decode": lambda v: flashinfer.single_decode_with_kv_cache(
        v[:128].view(2, 64), numbers(9, 2, 64), numbers(9, 2, 64), k_scale=2.0, return_lse=True
    ),
    "append_paged_kv_cache": append,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_compiled_call_is_the_eager_one(name: str) -> None:
    v, call = numbers(576), CALLS[name]
    v = v[:512] if name == "MODEL1" else v
    with torch.no_grad():
        pairs = zip(flat(compiled(call)(v)), flat(call(v)), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_what_has_a_plan_names_the_way_out() -> None:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(16, dtype=torch.uint8))
    lists = torch.arange(3, dtype=torch.int32)
    options = {"q_data_type": torch.bfloat16}
    wrapper.plan(lists, lists[:2], lists[:2] + 1, 2, 2, 64, 16, **options)
    q, cache = numbers(2, 2, 64), numbers(2, 2, 16, 2, 64)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("q", lambda: wrapper.run(q, cache)),
        ("context_lens", lambda: deep_gemm.get_paged_mqa_logits_metadata(LENS, 64, 132)),
    ]
    for name, call in calls:
        for fullgraph, begin in ((True, "cumla runs eagerly"), (False, f"^{name}: cumla runs eag")):
            with pytest.raises(Exception, match=f"{begin}.* own under @torch.compiler.disable"):
                torch.compile(call, backend="eager", fullgraph=fullgraph)()
    apart = torch.compiler.disable(wrapper.run)
    found = torch.compile(lambda: apart(q, cache) + 0, backend="eager")()
    assert torch.equal(found, wrapper.run(q, cache))
