# SPDX-License-Identifier: Apache-2.0
"""Calls over e4m3 caches of zeros, whose factor is as far as float32 goes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import cumla

__all__ = ["KERNELS", "attend_to_zeros"]

KERNELS = [  # form, heads and operation
    (form, heads, operation)
    for form in ("16-bit rope", "one")
    for heads, operation in (
        *((16, "decode"), (32, "decode"), (64, "decode"), (64, "e4m3 products")),
        *((8, "ragged"), (64, "ragged"), (16, "lists"), (40, "lists")),
    )
]
LENS = (70, 0, 200)


def attend_to_zeros(xp: Any, form: str, heads: int, operation: str) -> None:
    """Every score is 0 whatever it is multiplied by: rows of out are 0, and lse counts the rows."""
    q = np.ones((len(LENS), 1, heads, 576), ml_dtypes.bfloat16)
    latent = np.zeros((8, 64, 1, 576 if form == "one" else 512), np.uint8)
    rope = np.zeros((8, 64, 1, 64), ml_dtypes.bfloat16)
    caches = (latent,) if form == "one" else (latent, rope)
    there = [xp.asarray(a.view(f"u{a.itemsize}")).view(a.dtype) for a in (q, *caches)]
    cache = there[1] if form == "one" else tuple(there[1:])
    table = xp.asarray(np.arange(12, dtype=np.int32).reshape(3, 4) % 8)
    lens = xp.asarray(np.array(LENS, np.int32))
    for factor in (2.0**126, 2.0**-126):
        for scale in (0.1, 1e3):
            options: dict[str, Any] = {"kv_scale": factor, "softmax_scale": scale}
            if operation == "decode":
                out, lse = cumla.mla_decode(there[0], cache, table, lens, **options)
            elif operation == "e4m3 products":
                options["fp8_products"] = True
                out, lse = cumla.mla_decode(there[0], cache, table, lens, **options)
            elif operation == "ragged":
                options["qo_indptr"] = xp.asarray(np.arange(4, dtype=np.int32))
                tokens = there[0].reshape(3, heads, 576)
                out, lse = cumla.mla_attention(
                    tokens, cache, block_table=table, kv_lens=lens, **options
                )
            else:
                lists = np.tile(np.arange(256, dtype=np.int32), (3, 1, 1))
                options["topk_lens"] = lens
                out, lse = cumla.mla_sparse_decode(there[0], cache, xp.asarray(lists), **options)
            with np.errstate(divide="ignore"):
                expected = np.log(np.array(LENS, np.float64))
            assert not out.view(xp.uint16).any()
            got = lse.get().reshape(3, heads)
            np.testing.assert_allclose(got, np.tile(expected[:, None], heads), atol=2e-3)
