# SPDX-License-Identifier: Apache-2.0
"""Launches of attention whose requests share prefixes: see docs/kernels/prefixes.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cumla.launch.mha.launch import MHAArguments, attention_launch
from cumla.launch.mha.mask_arrays import NO_MASK
from cumla.launch.split.combine_prefixes import SPECS as COMBINE_SPECS
from cumla.launch.split.combine_prefixes import combine_prefixes_launch
from cumla.launch.split.prefix_requests import SPECS as REQUESTS_SPECS
from cumla.launch.split.prefix_requests import PrefixViews, prefix_requests_launch
from cumla.launch.split.ragged_schedule import ragged_schedule_launch

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch
    from cumla.launch.mha.key import MHAKey

PREFIX_SPECS = (*REQUESTS_SPECS, *COMBINE_SPECS)


def prefix_schedule_launches(
    key: MHAKey,
    buffer: int,
    qo_indptr: ArrayView | None,
    kv_lens: ArrayView,
    group: ArrayView,
    prefix_len: ArrayView,
) -> tuple[Launch, ...]:
    """Describe how to schedule prefixes and rests into the plan's buffer."""
    both, views = key.both, _views(key, buffer)
    assert both is not None
    arrays = kv_lens, qo_indptr, group, prefix_len
    return (
        prefix_requests_launch(key.prefix_shape, key.prefix_layout, buffer, *arrays),
        ragged_schedule_launch(both, buffer, *views.requests),
    )


def prefix_attention_launches(
    key: MHAKey, buffer: int, arguments: MHAArguments, out: ArrayView, lse: ArrayView
) -> tuple[Launch, ...]:
    """Describe how to attend to prefixes and rests at once, and how to combine the two.

    Parameters are as for :func:`cumla.launch.mha.launch.attention_launch`.
    """
    both, shape, layout = key.both, key.prefix_shape, key.prefix_layout
    assert both is not None
    pages = arguments.pages
    assert pages is not None
    views = _views(key, buffer)
    mask = NO_MASK
    if shape.needs_ends:
        mask = NO_MASK._replace(end=buffer + layout.ends, form="rows")
    twice = arguments._replace(
        q=_twice(arguments.q, shape.total_tokens),
        pages=pages._replace(shape=(pages.shape[0] * pages.shape[1],), strides=(4,)),
        sinks=None,  # which count once, when the two are combined
        window=(-1, -1),
        mask=mask,
    )
    return (
        attention_launch(both, buffer, twice, views.out, views.lse),
        combine_prefixes_launch(shape, layout, buffer, out, lse, arguments.sinks),
    )


def _views(key: MHAKey, buffer: int) -> PrefixViews:
    return PrefixViews.of(key.prefix_shape, key.prefix_layout, buffer, key.device)


def _twice(q: ArrayView, tokens: int) -> ArrayView:
    """View query rows twice, along an axis that steps over nothing."""
    *lead, of_token, of_head, of_column = q.strides
    if lead and q.shape[1] == 1:
        (of_token,) = lead
    strides = (0, of_token, of_head, of_column)
    return q._replace(shape=(2, tokens, *q.shape[-2:]), strides=strides)
