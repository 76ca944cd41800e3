# SPDX-License-Identifier: Apache-2.0
"""The operations behind :func:`cumla.mla_sparse_decode` and its relatives: schedule, attention."""

from __future__ import annotations

from functools import lru_cache
from math import inf
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from cumla import reference
from cumla.core.operation import Both, Operation, Output, Scheduled, parts_on_host
from cumla.core.paged import Host, Results, Stated, by_head
from cumla.launch.device import sm_count_of
from cumla.launch.sparse.key import MLASparseKey
from cumla.launch.sparse.mla_sparse import Lengths, attend_launches, lengths_launches
from cumla.mla.shape import FORMATS, VALUE_DIM
from cumla.reference.sparse.mla_sparse import largest_scores
from cumla.sparse.arguments import (
    Attended,
    Rows,
    as_batch,
    check_lengths,
    check_places,
    checked_arguments,
    on_rows,
    spread,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cumla.core.arguments import Views
    from cumla.core.arrays import ArrayView
    from cumla.core.operation import Launchable


HIDDEN = {
    "as_flash_mla": False,  # its log-sum-exp is without sinks, and inf for no rows
    "has_max_logits": False,  # for query tokens without a batch, over whole rows of q's dtype
}


class SparseSchedule(Operation["Lengths", MLASparseKey]):
    """Bounds of the lists, and shares of the work, from lengths, into a plan's buffer.

    Its arguments are views of the lengths, None for full lists; options are the query tokens' axes.
    """

    trusted = ("topk_lens", "extra_topk_lens")

    def arguments(self, views: Views, options: Rows) -> Lengths:
        """Check the lengths."""
        own, extra = (
            None
            if views.get(name) is None
            else spread(name, cast("ArrayView", views[name]), options)
            for name in self.trusted
        )
        return own, extra

    def recipe(
        self,
        key: MLASparseKey,
        arguments: Lengths,
        outs: Sequence[ArrayView],
        buffer: int,
    ) -> Sequence[Launchable]:
        """Describe the launches, or none without query tokens."""
        return lengths_launches(key, buffer, arguments) if key.batch and key.q_len else ()

    def reference(self, host: Host, arguments: Lengths) -> Results:
        """Do nothing."""
        return ()


class SparseAttend(Stated[Attended, MLASparseKey]):
    """Attends to the rows that lists name.

    `axes` are those of q before its columns, None for either.
    """

    # The indices tell which page numbers are used; they may have any values themselves.
    trusted = ("row_to_request", "block_table", "indices")

    def __init__(self, axes: tuple[str, ...] | None) -> None:
        super().__init__()
        self._axes = axes

    def arguments(self, views: Views, options: Any) -> Attended:
        """Check all but the lengths."""
        return checked_arguments(views, self._axes, options)

    def value_dim(self, arguments: Attended) -> int:
        """Return the latent columns."""
        return VALUE_DIM

    def outputs(self, arguments: Attended) -> tuple[Output, ...]:
        """Return the shapes of out and lse; that of max_logits is lse's."""
        out, lse = super().outputs(arguments)
        more = [lse._replace(name="max_logits")] if arguments.launched.has_max_logits else []
        return out, lse, *more

    def recipe(
        self, key: Any, arguments: Attended, outs: Sequence[ArrayView], buffer: int
    ) -> Sequence[Launchable]:
        """Describe the launches, or none without query tokens."""
        if 0 in arguments.rows:
            return ()
        out, lse, *max_logits = outs
        views = arguments.launched, as_batch(out, 4), by_head(lse)
        return attend_launches(key, buffer, *views, *max_logits)

    def check_values(self, host: Host, arguments: Attended) -> None:
        """Look at lengths, requests and page numbers."""
        check_lengths(host, *shape_of(arguments.launched)[3:5])
        check_places(host, arguments)

    def reference(self, host: Host, arguments: Attended) -> Results:
        """Compute with the lengths that came."""
        a, rows = arguments.launched, arguments.rows
        is_batch = len(rows) == 2
        definition = reference.mla_sparse_decode if is_batch else reference.mla_sparse_attention
        named = ("topk_lens", "extra_topk_lens", "row_to_request")
        sinks = host.get("sinks") if a.as_flash_mla else None  # which its lse is without
        others = ["block_table", "extra_kv_cache", "extra_indices", "out", "lse"]
        others += [] if a.as_flash_mla else ["sinks"]
        given: dict[str, Any] = {name: host[name] for name in others if name in host}
        given |= {name: on_rows(host[name], rows) for name in named if name in host}
        factor: Any = a.kv_scale  # a view, if it is an array
        state = definition(
            parts_on_host(host, "q"),
            parts_on_host(host, "kv_cache"),
            host["indices"],
            softmax_scale=a.softmax_scale,
            kv_scale=host.get("kv_scale", None if factor == 1.0 else factor),
            cache_format=arguments.cache if arguments.cache in FORMATS else None,
            extra_cache_format=arguments.extra_cache or None,
            **given,
        )
        if a.as_flash_mla:
            out, lse = state
            if sinks is not None:
                with np.errstate(over="ignore", invalid="ignore"):
                    share = np.where(lse == -inf, 0, 1 / (1 + np.exp(sinks - lse)))
                out[...] = (out.astype(np.float32) * share[..., None]).astype(out.dtype)
            lse[lse == -inf] = inf
        if not a.has_max_logits:
            return state
        lengths = given.get("topk_lens")
        return *state, largest_scores(
            *(host[name] for name in ("q", "kv_cache", "indices")),
            topk_lens=lengths,
            softmax_scale=a.softmax_scale,
        )


class SparseAttention(Scheduled[Attended, MLASparseKey]):
    """Both, in one call."""

    def batch(self, attend: Attended, views: Views) -> Rows:
        """Return the axes of the query tokens."""
        return attend.rows

    def key(self, arguments: Both[Attended], device: int) -> MLASparseKey:
        """Return the shape to plan for."""
        _, attended, options = arguments
        modes = attended.cache, device, sm_count_of(device), options.batch_invariant
        a = attended.launched
        return key_of(*shape_of(a), *modes, a.has_max_logits, attended.extra_cache)


def shape_of(arguments: Any) -> tuple[int, int, int, int, int, str]:
    """Read off what a key is made of: batch, q_len, num_heads, topk, extra_topk, dtype."""
    q, extra = arguments.q, arguments.extra_indices
    return (
        *q.shape[:3],
        arguments.indices.shape[2],
        0 if extra is None else extra.shape[2],
        q.dtype,
    )


@lru_cache(maxsize=1024)
def key_of(
    batch: int,
    q_len: int,
    num_heads: int,
    topk: int,
    extra_topk: int,
    dtype: str,
    cache: str,
    device: int | None,
    sm_count: int,
    batch_invariant: bool = False,
    has_max_logits: bool = False,
    extra_cache: str = "",
) -> MLASparseKey:
    """Make a key, the same object each time: it keeps what follows from it."""
    modes = dtype, cache, device, sm_count, batch_invariant, extra_topk, has_max_logits
    return MLASparseKey(batch, q_len, num_heads, topk, *modes, extra_cache)
