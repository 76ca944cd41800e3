# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3's interface on torch's CUDA tensors, against the same calls on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import cumla
from cumla.compat.flash_attn import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)
from tests.gpu.tools.waiting import no_waiting

KERNELS = ("append_kv_cache", "attention", "attention_decode", "attention_prefill", "merge_states")
torch = pytest.importorskip("torch")

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(autouse=True)
def prepared() -> None:
    cumla.prepare(cumla.attention, cumla.append_kv_cache, cumla.merge_attention_states)


def on_gpu(arguments: dict[str, Any]) -> dict[str, Any]:
    return {n: a.cuda() if isinstance(a, torch.Tensor) else a for n, a in arguments.items()}


def agree(call: Callable[..., Any], host: dict[str, Any], *written: str) -> None:
    """The results agree, and the arguments that the call writes; nothing is waited for."""
    there = on_gpu(host)
    with no_waiting():
        found = call(**there)
    expected = call(**host)
    found, expected = ([r] if isinstance(r, torch.Tensor) else list(r) for r in (found, expected))
    found += [there[name] for name in written]
    expected += [host[name] for name in written]
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        step = 1e-4 if one.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(one.cpu().float(), other.float(), rtol=step, atol=step)


def rows(*shape: int, dtype: Any) -> Any:
    return torch.randn(shape).to(dtype)


def int32(*numbers: int) -> Any:
    return torch.tensor(numbers, dtype=torch.int32)


def cache(dtype: Any, columns: int, page: int, q_len: int) -> dict[str, Any]:
    """Three requests over pages, or, page 0, over rows of a cache."""
    torch.manual_seed(columns + page)
    shape = (40, page, 2, columns) if page else (5, 640, 2, columns)
    given = {
        "q": rows(3, q_len, 8, columns, dtype=dtype),
        "k_cache": rows(*shape, dtype=dtype),
        "v_cache": rows(*shape, dtype=dtype),
        "cache_seqlens": int32(600, 33, 1),
        "causal": True,
        "return_softmax_lse": True,
    }
    if page:
        most = 640 // page
        given["page_table"] = torch.randperm(40)[torch.arange(3 * most) % 40].view(3, most).int()
    else:
        given["cache_batch_idx"] = int32(4, 0, 2)
    return given


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [64, 128, 256])
@pytest.mark.parametrize("page", [0, 16, 64])
@pytest.mark.parametrize("q_len", [1, 5])
def test_a_cache(dtype: str, columns: int, page: int, q_len: int) -> None:
    given = cache(DTYPES[dtype], columns, page, q_len)
    agree(flash_attn_with_kvcache, given)
    agree(flash_attn_with_kvcache, given | {"window_size": (100, 0), "softcap": 20.0})


@pytest.mark.parametrize("page", [0, 64])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rotary", [0, 32, 128])
def test_new_rows(page: int, interleaved: bool, rotary: int) -> None:
    """Each request's pages are its own: rows of two requests must not go to the same place."""
    given = cache(torch.bfloat16, 128, page, 3)
    if page:
        given["page_table"] = torch.arange(30).view(3, 10).int()
    given |= {n: rows(3, 3, 2, 128, dtype=torch.bfloat16) for n in ("k", "v")}
    if rotary:
        angles = torch.arange(640)[:, None] * 0.1 ** torch.arange(rotary // 2)
        given |= {"rotary_cos": angles.cos().bfloat16(), "rotary_sin": angles.sin().bfloat16()}
        given["rotary_interleaved"] = interleaved
    agree(flash_attn_with_kvcache, given, "k_cache", "v_cache")


def test_an_e4m3_cache() -> None:
    given = cache(torch.bfloat16, 128, 64, 1)
    given |= {n: given[n].to(torch.float8_e4m3fn) for n in ("k_cache", "v_cache")}
    given |= {n: torch.rand(3, 2) + 0.5 for n in ("k_descale", "v_descale")}
    agree(flash_attn_with_kvcache, given)


@pytest.mark.parametrize("columns", [(64, 64), (128, 128), (192, 128)])
def test_rows_without_a_cache(columns: tuple[int, int]) -> None:
    torch.manual_seed(1)
    bounds = int32(0, 300, 301, 700)
    given = {
        "q": rows(700, 6, columns[0], dtype=torch.bfloat16),
        "k": rows(700, 2, columns[0], dtype=torch.bfloat16),
        "v": rows(700, 2, columns[1], dtype=torch.bfloat16),
        "causal": True,
    }
    lists = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": 399}
    agree(flash_attn_varlen_func, given | lists | {"max_seqlen_k": 399})
    agree(
        flash_attn_func, given | {n: given[n].view(2, 350, -1, given[n].shape[-1]) for n in "qkv"}
    )


def test_parts_are_merged() -> None:
    torch.manual_seed(2)
    given = {"out_partial": torch.randn(4, 2, 3, 8, 128), "lse_partial": torch.randn(4, 2, 3, 8)}
    agree(flash_attn_combine, given | {"out_dtype": torch.bfloat16})


def test_captured() -> None:
    """A decoding step that writes its rows, replayed with other lengths."""
    given = cache(torch.bfloat16, 128, 64, 1)
    given["page_table"] = torch.arange(30).view(3, 10).int()
    given |= {n: rows(3, 1, 2, 128, dtype=torch.bfloat16) for n in ("k", "v")}
    there = on_gpu(given)
    sizes = {"batch_size": 3, "max_seqlen_q": 1, "max_seqlen_k": 640}
    heads = {"num_heads_q": 8, "num_heads_kv": 2, "headdim": 128}
    there["scheduler_metadata"] = get_scheduler_metadata(
        **sizes, **heads, cache_seqlens=there["cache_seqlens"], page_size=64
    )
    flash_attn_with_kvcache(**there)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_attn_with_kvcache(**there)
    for lengths in ((600, 33, 1), (2, 500, 63)):
        there["cache_seqlens"].copy_(int32(*lengths))
        graph.replay()
        host = {n: a.cpu() if isinstance(a, torch.Tensor) else a for n, a in there.items()}
        expected = flash_attn_with_kvcache(**host | {"scheduler_metadata": None})
        torch.testing.assert_close(out.cpu().float(), expected[0].float(), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse.cpu(), expected[1], rtol=1e-4, atol=1e-4)
