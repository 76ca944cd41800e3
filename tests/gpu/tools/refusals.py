# SPDX-License-Identifier: Apache-2.0
"""Calls of mla_decode that are refused, for NumPy or CuPy; and what is launched in spite of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np

from cumla.launch.kernel import PreparedLaunch
from tests.gpu.tools.problem import Problem, typed

REFUSALS = (
    ("q float32", TypeError, "q: needs bfloat16 or float16, got float32"),
    ("cache float16", TypeError, "kv_cache: needs q's dtype bfloat16, got float16"),
    ("q 3-d", ValueError, "q: needs 4 axes"),
    ("q 512 wide", ValueError, r"kv_cache: needs a last axis of 512.*got shape \(.*, 576\)"),
    ("q every second", ValueError, "q: needs a contiguous last axis.*stride of 4 bytes"),
    ("q off by 2 bytes", ValueError, "q: needs an address.*multiple of 16 bytes"),
    ("cache pitch 1154", ValueError, "kv_cache: needs strides.*16 bytes.*got 1154"),
    ("3 kv heads", ValueError, "num_heads: needs a multiple of num_kv_heads, got 16.*3"),
    ("table int64", TypeError, "block_table: needs int32, got int64"),
    ("table of 5", ValueError, r"block_table: needs shape \(batch, max_pages\).*batch 4"),
    ("table column-major", ValueError, "block_table: needs contiguous rows"),
    ("lengths int64", TypeError, "kv_lens: needs int32, got int64"),
    ("lengths 2-d", ValueError, r"kv_lens: needs shape \(batch,\)"),
    ("out float16", TypeError, "out: needs bfloat16 or float32, got float16"),
    ("out 576 wide", ValueError, r"out: needs shape \(4, 2, 16, 512\), got"),
    ("lse transposed", ValueError, r"lse: needs shape \(4, 2, 16\), got \(4, 16, 2\)"),
    ("lse float64", TypeError, "lse: needs float32, got float64"),
    ("causal yes", TypeError, "causal: needs True or False, got str 'yes'; pass one of the two"),
    ("invariant 1", TypeError, "batch_invariant: needs True or False, got int 1; pass one of"),
)
"""What is wrong, the error, and its message."""


@contextlib.contextmanager
def launches(*, forbidden: bool = False) -> Iterator[list[str]]:
    """Names of the kernels that are launched; forbidden ones fail instead, and leave the GPU be."""
    found: list[str] = []
    launch_it = PreparedLaunch.__call__

    def launch(self: PreparedLaunch) -> None:
        found.append(self._kernel.spec.entry)
        assert not forbidden, f"{found[-1]} was launched"
        launch_it(self)

    with mock.patch.object(PreparedLaunch, "__call__", launch):
        yield found


def refused(xp: Any, problem: Problem, change: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Spoil a call with 4 requests of 2 queries of 16 heads: its arrays and options."""
    q, kv, table, lengths = problem.arrays
    options: dict[str, Any] = {}

    def bits(*shape: int) -> Any:
        return xp.zeros(shape, dtype=xp.uint16)

    def bf16(array: Any) -> Any:
        return typed(array, "bfloat16")

    pages = kv.shape[0]
    match change:
        case "q float32":
            q = xp.zeros(q.shape, dtype=xp.float32)
        case "cache float16":
            kv = kv.view(np.float16)
        case "q 3-d":
            q = q[:, 0]
        case "q 512 wide":
            q = q[..., :512]
        case "q every second":
            q = bf16(bits(4, 2, 16, 1152)[..., ::2])
        case "q off by 2 bytes":
            q = bf16(bits(4 * 2 * 16 * 576 + 1)[1:].reshape(4, 2, 16, 576))
        case "cache pitch 1154":
            kv = bf16(bits(pages, 64, 1, 577)[..., :576])
        case "3 kv heads":
            kv = bf16(bits(pages, 64, 3, 576))
        case "table int64":
            table = table.astype(xp.int64)
        case "table of 5":
            table = xp.zeros((5, 9), dtype=xp.int32)
        case "table column-major":
            table = table.T.copy().T  # column-major, without cuBLAS
        case "lengths int64":
            lengths = lengths.astype(xp.int64)
        case "lengths 2-d":
            lengths = lengths[:, None]
        case "out float16":
            options["out"] = xp.zeros(problem.out_shape, dtype=xp.float16)
        case "out 576 wide":
            options["out"] = bf16(bits(4, 2, 16, 576))
        case "lse transposed":
            options["lse"] = xp.zeros((4, 16, 2), dtype=xp.float32)
        case "lse float64":
            options["lse"] = xp.zeros(problem.lse_shape, dtype=xp.float64)
        case "causal yes":
            options["causal"] = "yes"
        case "invariant 1":
            options["batch_invariant"] = 1
    return (q, kv, table, lengths), options
