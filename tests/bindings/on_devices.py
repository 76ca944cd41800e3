# SPDX-License-Identifier: Apache-2.0
"""Calls that several devices of JAX share: each has its part of the batch, or of the heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.bindings.test_jax import Arguments, of_jax
from tests.calls import OPERATIONS

jax = pytest.importorskip("jax")

P = jax.sharding.PartitionSpec


class Shares(NamedTuple):
    """How a call is divided: axes of arguments, all others whole on each device, and of results."""

    operation: str
    axes: dict[str, int]
    results: tuple[int, ...]


_REQUESTS = dict.fromkeys(("q", "block_table", "kv_lens"), 0)
SHARES = {
    "mla_decode, batch": Shares("mla_decode", _REQUESTS, (0, 0)),
    "mla_decode, heads": Shares("mla_decode", {"q": 2}, (2, 1)),
    "mla_attention, heads": Shares("mla_attention", {"q": 1}, (1, 1)),
    "mla_sparse_decode, batch": Shares(
        "mla_sparse_decode", dict.fromkeys(("q", "indices", "topk_lens"), 0), (0, 0)
    ),
    "attention, heads": Shares("attention", {"q": 1, "k": 2, "v": 2, "sinks": 0}, (1, 1)),
    "attention, batch": Shares("attention of equal queries", _REQUESTS, (0, 0)),
    "paged_mqa_logits, batch": Shares("paged_mqa_logits", _REQUESTS | {"weights": 0}, (0,)),
    "merge_attention_states, batch": Shares(
        "merge_attention_states", {"outs": 0, "lses": 0}, (0, 0)
    ),
    "quantize_fp8, tokens": Shares("quantize_fp8", {"x": 0}, (0, 0)),
}


def mesh(count: int) -> Any:
    return jax.sharding.Mesh(np.array(jax.devices()[:count]), ("x",))


def along(axis: int | None) -> Any:
    """Say that an array is cut along an axis, or is whole on each device."""
    return P() if axis is None else P(*[None] * axis, "x")


def divided_call(
    shares: Shares, count: int
) -> tuple[Callable[[Arguments], tuple[Any, ...]], Arguments]:
    """A compiled call of which each device computes its share, and the whole arrays."""
    function, arrays = of_jax(OPERATIONS[shares.operation])
    each = jax.shard_map(
        lambda given: tuple(jax.tree.leaves(function(**given))),
        mesh=mesh(count),
        in_specs=({name: along(shares.axes.get(name)) for name in arrays},),
        out_specs=tuple(map(along, shares.results)),
    )
    return jax.jit(each), arrays


def one_by_one(shares: Shares, count: int) -> list[np.ndarray]:
    """The same shares, each by an eager call on the first device, put together."""
    function, arrays = of_jax(OPERATIONS[shares.operation])

    def share(name: str, array: Any, i: int) -> Any:
        axis = shares.axes.get(name)
        return array if axis is None else np.split(np.asarray(array), count, axis)[i]

    found = []
    for i in range(count):
        given = {n: jax.tree.map(lambda a, n=n, i=i: share(n, a, i), v) for n, v in arrays.items()}
        results = function(**jax.tree.map(jax.numpy.asarray, given))
        found.append([np.asarray(leaf) for leaf in jax.tree.leaves(results)])
    return [
        np.concatenate(parts, axis) for axis, *parts in zip(shares.results, *found, strict=True)
    ]
