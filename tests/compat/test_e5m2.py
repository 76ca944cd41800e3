# SPDX-License-Identifier: Apache-2.0
"""Caches of e5m2, which no kernel reads: every face refuses them, and says which argument it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cumla.compat import flash_attn, flash_mla, flashinfer, vllm_flash_attn
from tests.compat.oracle import int32

torch = pytest.importorskip("torch")

E5M2 = torch.float8_e5m2
Q = torch.zeros(2, 4, 16).half()
CACHE, ROWS = torch.zeros(2, 16, 2, 16).to(E5M2), torch.zeros(2, 2, 16).half()
LENS, TABLE, STARTS = int32(3, 4), int32(0, 1)[:, None], int32(0, 1, 2)
ONE = torch.ones(())
LATENT = torch.zeros(2, 64, 1, 576)
LISTS = int32(0, 1), int32(0), int32(1)


def workspace() -> Any:
    return torch.empty(1)


def attend_in_vllm() -> Any:
    options = {"seqused_k": LENS, "block_table": TABLE}
    return vllm_flash_attn.flash_attn_varlen_func(Q, CACHE, CACHE, 1, STARTS, 16, **options)


def write_in_vllm(name: str) -> Any:
    arguments = ROWS, ROWS, CACHE, CACHE, torch.tensor([0, 1]), name, ONE, ONE
    return vllm_flash_attn.reshape_and_cache_flash(*arguments)


def decode_mla(**options: Any) -> Any:
    q, metadata = torch.zeros(2, 1, 4, 576).bfloat16(), flash_mla.get_mla_metadata()[0]
    arguments = q, LATENT.to(E5M2), TABLE, LENS, 512, metadata
    return flash_mla.flash_mla_with_kvcache(*arguments, **options)


def plan_mla() -> Any:
    metadata = flashinfer.MLAPlanMetadata.csr(int32(0, 1), *LISTS)
    sizes = {"num_heads": 4, "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": 16}
    dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": E5M2}
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace())
    return wrapper.plan(metadata=metadata, causal=True, sm_scale=1.0, **sizes, **dtypes)


def append_mla() -> Any:
    rows = torch.zeros(2, 512).bfloat16(), torch.zeros(2, 64).bfloat16()
    caches = torch.zeros(2, 16, 512).to(E5M2), torch.zeros(2, 16, 64).to(E5M2)
    lists = int32(0), int32(0, 1), int32(2)
    return flashinfer.append_paged_mla_kv_cache(*rows, int32(0, 0), int32(0, 1), *caches, *lists)


def append() -> Any:
    lists = int32(0), int32(0, 1), int32(2)
    places = int32(0, 0), int32(0, 1)
    return flashinfer.append_paged_kv_cache(ROWS, ROWS, *places, (CACHE, CACHE), *lists)


def plan_decode() -> Any:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    return wrapper.plan(*LISTS, 4, 2, 16, 16, kv_data_type=E5M2)


CALLS: list[tuple[Callable[[], Any], str, str]] = [
    (
        lambda: flash_attn.flash_attn_with_kvcache(Q[:, None], CACHE, CACHE, cache_seqlens=LENS),
        "k_cache",
        "float8_e4m3fn",
    ),
    (
        lambda: flash_attn.flash_attn_func(Q[:, None], ROWS[:, None], CACHE[:, :1]),
        "v",
        "float8_e4m3fn",
    ),
    (attend_in_vllm, "k", "float8_e4m3fn"),
    (lambda: write_in_vllm("fp8_e5m2"), "kv_cache_dtype", "fp8_e4m3"),
    (lambda: write_in_vllm("fp8"), "key_cache", "float8_e4m3fn"),
    (plan_decode, "kv_data_type", "float8_e4m3fn"),
    (append, r"paged_kv_cache\[0\]", "float8_e4m3fn"),
    (lambda: flashinfer.single_decode_with_kv_cache(Q[0], CACHE[0], CACHE[0]), "k", "float8_e4m3"),
    (plan_mla, "kv_data_type", "float8_e4m3fn"),
    (append_mla, "ckv_cache", "float8_e4m3fn"),
    (decode_mla, "k_cache", "bfloat16"),
]


@pytest.mark.parametrize(("call", "name", "need"), CALLS)
def test_e5m2_is_refused_by_name(call: Callable[[], Any], name: str, need: str) -> None:
    with pytest.raises(Exception, match=f"^{name}: needs .*{need}.*got .*e5m2.*; ") as caught:
        call()
    assert isinstance(caught.value, (TypeError, ValueError, RuntimeError))
