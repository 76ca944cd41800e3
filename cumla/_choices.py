# SPDX-License-Identifier: Apache-2.0
"""Kernels of the layers of a server, for its log and for ``python -m cumla info``."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import cumla
from cumla.errors import CumlaError
from cumla.launch.device import current_device, properties
from cumla.launch.mla.choice import decode_spec
from cumla.launch.mla.mla_attention import attention_spec as mla_attention_spec
from cumla.launch.mla.mla_decode_fp8 import fp8_specs
from cumla.launch.mla.mla_decode_fp8_products import fp8_products_spec
from cumla.launch.sparse.mla_sparse import sparse_specs
from cumla.mla.shape import HEAD_DIM

if TYPE_CHECKING:
    from collections.abc import Mapping

E4M3 = "float8_e4m3fn"
_PREFILL = 8192  # tokens of a step
_SM_COUNT = 132  # of an H200
_said: set[str] = set()


def invariance(is_asked_for: bool) -> dict[str, Any]:
    """Return the options of plans whose bits depend on no other request, and are a prefill's.

    A plan for requests of one token cuts none, so all steps add up the keys in the same order.
    """
    return {"batch_invariant": True, "max_kv_len": 1} if is_asked_for else {}


class Layers(NamedTuple):
    """Sizes that layers with a common plan share, on each GPU."""

    num_heads: int
    page_size: int
    dtype: str
    cache_dtype: str | None = None
    num_kv_heads: int = 0  # 0: MLA
    head_dim: int = HEAD_DIM
    head_dim_v: int | None = None
    window: int | None = None  # to the left
    fp8_products: bool = False
    topk: int = 0  # of sparse MLA
    cache_format: str | None = None
    is_invariant: bool = False

    def kernels(self, batch: int, tokens: int, q_len: int = 0) -> list[str]:
        """Name those of a step: `q_len` tokens of each request, 0 where they differ."""
        options: dict[str, Any] = {"page_size": self.page_size, "dtype": self.dtype}
        options |= {"cache_dtype": self.cache_dtype, "like": np.zeros(0)}
        options |= invariance(self.is_invariant)
        if not self.num_kv_heads:
            return [self._of_mla(batch, tokens, q_len, options)]
        options |= {"num_kv_heads": self.num_kv_heads, "head_dim_v": self.head_dim_v}
        shape = batch, tokens, self.num_heads, self.head_dim
        plan = cumla.AttentionPlan(*shape, window=self.window, **options)
        key = replace(plan.key, sm_count=_sm_count())
        return [k.choice.spec.entry for k in (key, key.beside) if k is not None]

    def _of_mla(self, batch: int, tokens: int, q_len: int, options: dict[str, Any]) -> str:
        if self.topk:
            options |= {"cache_format": self.cache_format}
            del options["page_size"]
            options.pop("max_kv_len", None)
            sparse = cumla.MLASparsePlan(1, tokens, self.num_heads, self.topk, **options).key
            return sparse_specs(replace(sparse, sm_count=_sm_count()), self.head_dim)[-1].entry
        q_len = 0 if self.is_invariant else q_len
        kind: Any = cumla.MLADecodePlan if q_len else cumla.MLAAttentionPlan
        options["head_dim"] = self.head_dim
        key = kind(batch, q_len or tokens, self.num_heads, **options).key
        if self.cache_dtype is None:
            spec = decode_spec(key) if q_len else mla_attention_spec(key)
        elif self.fp8_products and key.has_fp8_products:
            spec = fp8_products_spec(key, True)
        else:
            spec = fp8_specs(key)[0]
        return spec.entry

    def steps(self) -> dict[str, list[str]]:
        """Name the kernels of a server's steps."""
        return {
            "decoding, 1 request": self.kernels(1, 1, 1),
            "decoding, 128 requests": self.kernels(128, 128, 1),
            "3 drafts, 128 requests": self.kernels(128, 512, 4),
            "mixed, 128 requests": self.kernels(128, _PREFILL),
            "prefill, 1 request": self.kernels(1, _PREFILL),
        }


def log_layers(logger: str, layers: Mapping[str, Layers]) -> None:
    """Log, once in a process, which kernels serve which layers of a model."""
    line = "; ".join(
        f"{what}: {', '.join(dict.fromkeys(chain(*each.steps().values())))}"
        for what, each in layers.items()
    )
    if line not in _said:
        _said.add(line)
        logging.getLogger(logger).info("cumla attends in %s", line)


def _sm_count() -> int:
    try:
        return properties(current_device()).sm_count
    except CumlaError:  # no GPU
        return _SM_COUNT
