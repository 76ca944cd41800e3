# SPDX-License-Identifier: Apache-2.0
"""Launches of MLA whose requests share prefixes: see docs/kernels/prefixes.md."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from cumla.launch.mla.mla_attention import attention_launch
from cumla.launch.split.combine_prefixes import SPECS as COMBINE_SPECS
from cumla.launch.split.combine_prefixes import combine_prefixes_launch
from cumla.launch.split.prefix_requests import SPECS as REQUESTS_SPECS
from cumla.launch.split.prefix_requests import PrefixViews, prefix_requests_launch
from cumla.launch.split.ragged_schedule import ragged_schedule_launch

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch
    from cumla.launch.mla.mla_decode import DecodeArguments
    from cumla.launch.mla.shape import MLAAttentionKey

PREFIX_SPECS = (*REQUESTS_SPECS, *COMBINE_SPECS)


def prefix_schedule_launches(
    key: MLAAttentionKey,
    buffer: int,
    qo_indptr: ArrayView,
    kv_lens: ArrayView,
    group: ArrayView,
    prefix_len: ArrayView,
) -> tuple[Launch, ...]:
    """Describe how to schedule prefixes, and rests, into the plan's buffer."""
    (prefixes, rests), shape = key.prefix_keys, key.prefix_shape
    requests, end = _views(key, buffer).requests, shape.end_of_rests
    arrays = kv_lens, qo_indptr, group, prefix_len
    return (
        prefix_requests_launch(shape, key.prefix_layout, buffer, *arrays),
        ragged_schedule_launch(prefixes, buffer, *requests.part(end + 1, shape.entries - 1)),
        ragged_schedule_launch(rests, buffer + prefixes.layout.nbytes, *requests.part(0, end)),
    )


def prefix_attention_launches(
    key: MLAAttentionKey,
    buffer: int,
    arguments: DecodeArguments,
    out: ArrayView,
    lse: ArrayView,
) -> tuple[Launch, ...]:
    """Describe how to attend to prefixes, then to rests, and how to combine the two.

    Parameters are as for :func:`cumla.launch.mla.mla_attention.attention_launch`.
    """
    (prefixes, rests), table = key.prefix_keys, arguments.block_table
    views = _views(key, buffer)
    pages = table._replace(shape=(table.shape[0] * table.shape[1],), strides=(4,))
    listed = arguments._replace(block_table=pages, empty_lse=-inf, sinks=None)
    launches = []
    for part, of, at in ((0, prefixes, buffer), (1, rests, buffer + prefixes.layout.nbytes)):
        part_out, part_lse = (
            view._replace(ptr=view.ptr + part * view.strides[0]) for view in views[1:]
        )
        part_out = part_out._replace(shape=part_out.shape[1:], strides=part_out.strides[1:])
        part_lse = part_lse._replace(shape=(1, *part_lse.shape[1:]))
        launches.append(attention_launch(of, at, listed, part_out, part_lse))
    shape, layout, sinks = key.prefix_shape, key.prefix_layout, arguments.sinks
    return (*launches, combine_prefixes_launch(shape, layout, buffer, out, lse, sinks))


def _views(key: MLAAttentionKey, buffer: int) -> PrefixViews:
    return PrefixViews.of(key.prefix_shape, key.prefix_layout, buffer, key.device)
