# SPDX-License-Identifier: Apache-2.0
"""Calls of sparse MLA over two caches in DeepSeek-V4's formats, for both bindings."""

from __future__ import annotations

from typing import Any

import numpy as np

import cumla
from tests.calls import Arguments, Operation, aligned, int32, numbers


def _slots(pages: int, page_size: int, seed: int) -> Any:
    """Pages of finite numbers, each in place: columns below 2, factors of 1/16 to 1."""
    rng = np.random.default_rng(seed)
    cache = aligned((pages, page_size, 1, 584), np.uint8)
    whole = cache.reshape(pages, -1)
    whole[...] = rng.integers(0, 0x40, whole.shape)
    whole[:, page_size * 576 :] = rng.integers(123, 128, (pages, page_size * 8))
    return cache


def _decode() -> Arguments:
    return {
        "q": numbers(2, 2, 16, 512),
        "kv_cache": _slots(3, 64, 0),
        "indices": int32(
            [[0, 150, -1, 3, 3], [9, 1, 8, 4, 7]], [[5, 192, 6, 48, 2], [1, 2, 3, 4, 0]]
        ),
        "topk_lens": int32(5, 3),
        "extra_kv_cache": _slots(20, 2, 1),
        "extra_indices": int32([[0, 39, -1], [3, 3, 40]], [[5, 6, 7], [8, 9, 10]]),
        "extra_topk_lens": int32([3, 0], [2, 1]),
    }


def _tokens() -> Arguments:
    """The same without a batch, with positions in the first cache, and sinks."""
    given = _decode()
    for name in ("q", "indices", "extra_indices"):
        given[name] = given[name].reshape(4, *given[name].shape[2:])
    places = {"block_table": int32([2, 0], [1, 1]), "row_to_request": int32(0, 1, 1, 0)}
    lengths = {"topk_lens": int32(5, 3, 0, 4), "extra_topk_lens": int32(3, 0, 2, 1)}
    return given | places | lengths | {"sinks": numbers(16, dtype=np.float32)}


def _formats() -> Arguments:
    """Rows of V4.1, in two formats; e4m3 scales and exponents are of small numbers."""
    rng = np.random.default_rng(2)
    caches = aligned((3, 64, 1, 528), np.uint8), aligned((20, 2, 1, 288), np.uint8)
    for cache, columns, low in zip(caches, (512, 256), (123, 0x20), strict=True):
        cache[...] = rng.integers(0, 0x40, cache.shape)
        cache[..., columns:] = rng.integers(low, low + 5, cache[..., columns:].shape)
    formats = {"cache_format": "v41", "extra_cache_format": "v41_fp4"}
    return _decode() | {"kv_cache": caches[0], "extra_kv_cache": caches[1], **formats}


TWO_CACHES = {
    "mla_sparse_decode": Operation(
        cumla.mla_sparse_decode,
        _decode,
        lambda: {"out": aligned((2, 2, 16, 512)), "lse": aligned((2, 2, 16), np.float32)},
        (*2 * ("bound_rows",), "mla_schedule", "mla_sparse_v4"),
    ),
    "mla_sparse_attention": Operation(
        cumla.mla_sparse_attention,
        _tokens,
        lambda: {"out": aligned((4, 16, 512)), "lse": aligned((4, 16), np.float32)},
        (*2 * ("bound_rows",), "mla_schedule", "mla_sparse_v4"),
    ),
    "mla_sparse_decode of two formats": Operation(
        cumla.mla_sparse_decode,
        _formats,
        lambda: {"out": aligned((2, 2, 16, 512)), "lse": aligned((2, 2, 16), np.float32)},
        (*2 * ("bound_rows",), "mla_schedule", "mla_sparse_v41_fp4"),
    ),
}
