# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's paged caches of keys and values: one packed tensor, or a pair."""

from __future__ import annotations

from typing import Any

from cumla.compat._arguments import check_axes, check_tensors

__all__ = ["is_pair", "names_of_parts", "split_cache"]


def is_pair(paged_kv_cache: Any) -> bool:
    """Return whether keys and values are two tensors."""
    return isinstance(paged_kv_cache, (tuple, list))


def names_of_parts(pair: bool) -> tuple[str, str]:
    """Name keys and values in messages."""
    keys, values = ("0", "1") if pair else (":, 0", ":, 1")
    return f"paged_kv_cache[{keys}]", f"paged_kv_cache[{values}]"


def split_cache(paged_kv_cache: Any, kv_layout: str) -> tuple[Any, Any]:
    """Return the caches of keys and of values, of a packed cache or of a pair.

    Caches without the axis of tokens in a page have one token in each.
    """
    tokens, whole = (-2 if kv_layout == "HND" else -3), 4
    if is_pair(paged_kv_cache):
        if len(paged_kv_cache) != 2:
            raise ValueError(
                f"paged_kv_cache: needs one tensor or a pair, got {len(paged_kv_cache)}; pass keys "
                f"and values"
            )
        check_tensors(**dict(zip(names_of_parts(True), paged_kv_cache, strict=True)))
        k_cache, v_cache = (p.unsqueeze(tokens) if p.ndim < whole else p for p in paged_kv_cache)
        return k_cache, v_cache
    check_tensors(paged_kv_cache=paged_kv_cache)
    axes = "num_pages, 2, page_size, num_kv_heads, head_dim"
    check_axes("paged_kv_cache", paged_kv_cache, axes, "num_pages, 2, num_kv_heads, head_dim")
    if paged_kv_cache.shape[1] != 2:
        raise ValueError(
            f"paged_kv_cache: needs keys and values along its second axis, got shape "
            f"{tuple(paged_kv_cache.shape)}; stack them there, or pass a pair"
        )
    if paged_kv_cache.ndim == whole:
        paged_kv_cache = paged_kv_cache.unsqueeze(tokens)
    return paged_kv_cache[:, 0], paged_kv_cache[:, 1]
