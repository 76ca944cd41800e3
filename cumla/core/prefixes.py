# SPDX-License-Identifier: Apache-2.0
"""Requests that share prefixes: their schedule, and checks that all families have in common."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from cumla.core.arguments import INT32, Array, checked_flag, checked_int
from cumla.core.names import arg
from cumla.core.paged import ENTRY, K, RaggedSchedule, refuse_value

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from cumla.core.arrays import ArrayView
    from cumla.core.operation import Launchable
    from cumla.core.paged import Host

GROUPS = {
    "groups[0]": Array("batch", INT32, way_out=ENTRY),
    "groups[1]": Array("batch", INT32, way_out=ENTRY),
}
_MOST_ENTRIES = (1 << 31) - 1


class PrefixSchedule(RaggedSchedule[K]):
    """A ragged schedule, or that of rests and of shared prefixes.

    `share` takes a key, the buffer's address, qo_indptr, kv_lens and the two arrays of groups.
    """

    def __init__(
        self,
        table: Mapping[str, Array],
        launch: Callable[..., Launchable],
        cut: Callable[..., Launchable],
        share: Callable[..., Sequence[Launchable]],
    ) -> None:
        super().__init__({**table, **GROUPS}, launch, cut)
        self._share = share

    def recipe(
        self, key: Any, arguments: tuple[Any, ...], outs: Sequence[ArrayView], buffer: int
    ) -> Sequence[Launchable]:
        """Describe the launches."""
        *lengths, group, prefix_len = arguments
        if key.max_pages and key.batch:
            qo_indptr, kv_lens, _ = lengths
            return self._share(key, buffer, qo_indptr, kv_lens, group, prefix_len)
        return super().recipe(key, tuple(lengths), outs, buffer)


def checked_max_pages(prefix_groups: Any, max_pages: Any, batch: Any, page_size: Any) -> int:
    """Return the columns of the block table of a plan whose requests share prefixes; else 0."""
    if not checked_flag("prefix_groups", prefix_groups):
        if max_pages is not None:
            raise ValueError(
                f"{arg('max_pages')}: needs prefix_groups=True, got {max_pages} for a plan that "
                f"serves any block_table; leave it out"
            )
        return 0
    if not page_size:
        raise ValueError(
            f"{arg('prefix_groups')}: needs keys in pages, got page_size 0; make a plan for pages"
        )
    if max_pages is None:
        raise ValueError(
            f"{arg('max_pages')}: needs the columns of {arg('block_table')} with prefix_groups, "
            f"got None; pass them"
        )
    columns = checked_int("max_pages", max_pages, "pass the columns of block_table")
    _check_entries(batch, columns)
    return columns


def check_prefix_options(window: Any, masked: bool, mask: str = "mask") -> None:
    """Refuse options that no shared prefixes go with; `mask` is the argument of masks."""
    for name, is_given in {"window": window is not None, mask: masked}.items():
        if is_given:
            got = f"window {window}" if name == "window" else f"a call with {name}"
            raise ValueError(
                f"{arg(name)}: needs none beside groups of shared prefixes, got {got}; leave out "
                f"the groups"
            )


def check_prefix_arrays(q: ArrayView, pages: ArrayView | None, max_pages: int | None) -> None:
    """Check the arrays of a call whose requests share prefixes; of a plan for so many columns."""
    if pages is None or len(pages.shape) != 2:
        raise ValueError(
            f"{arg('groups')}: needs {arg('block_table')}, got pages in another form, or none; "
            f"pass a table, or leave out the groups"
        )
    rows, columns = pages.shape
    if max_pages not in (None, columns):
        raise ValueError(
            f"{arg('block_table')}: needs the {max_pages} columns of a plan with prefix_groups, "
            f"got {columns}; pass max_pages={columns} to the plan"
        )
    if rows > 1 and pages.strides[0] != 4 * columns:
        raise ValueError(
            f"{arg('block_table')}: needs contiguous rows beside groups, got a stride of "
            f"{pages.strides[0]} bytes for {columns} columns; make a contiguous copy"
        )
    _check_entries(rows, columns)
    if len(q.shape) == 4 and min(q.shape[:2]) > 1 and q.strides[0] != q.shape[1] * q.strides[1]:
        raise ValueError(
            f"{arg('q')}: needs requests one after the other beside groups, got strides "
            f"{q.strides} for shape {q.shape}; make a contiguous copy"
        )


def has_whole_groups(given: Collection[str]) -> bool:
    """Return whether a call has groups, and check that they are a pair."""
    if "groups" in given:
        raise TypeError(
            f"{arg('groups')}: needs PrefixGroups, or a pair (group, prefix_len), got one array; "
            f"pass what find_prefix_groups returns"
        )
    return "groups[0]" in given


def check_groups_given(given: Collection[str], max_pages: int) -> None:
    """Check that an update has groups if, and only if, its plan was made for them."""
    has_groups = has_whole_groups(given)
    if has_groups and not max_pages:
        raise ValueError(
            f"{arg('groups')}: needs a plan with prefix_groups=True, got one without; make another "
            f"plan, or leave them out"
        )
    if max_pages and not has_groups:
        raise ValueError(
            f"{arg('groups')}: needed for a plan with prefix_groups, got None; pass what "
            f"find_prefix_groups returns"
        )
    if max_pages and "kv_indptr" in given:
        raise ValueError(
            f"{arg('kv_indptr')}: needs None for a plan with prefix_groups, whose runs take "
            f"{arg('block_table')}; leave it out"
        )


def check_shared_pages(host: Host, page_size: int, total_tokens: int) -> None:
    """Check mode: raise for the first request that has other pages than the first of its group.

    Looked at are the pages that the group would share, which prefix_len may exceed: see
    :class:`cumla.PrefixGroups`.
    """
    if "groups[0]" not in host or "block_table" not in host:
        return
    group, prefix_len, table = (host[name] for name in ("groups[0]", "groups[1]", "block_table"))
    batch, held = len(group), table.shape[1] * page_size
    keys = np.clip(host.get("kv_lens", np.full(batch, held)), 0, held)
    bounds = host.get("qo_indptr", np.arange(batch + 1) * (total_tokens // max(batch, 1)))
    queries = np.diff(bounds.astype(np.int64).clip(0, total_tokens))
    pages = np.clip(prefix_len, 0, np.maximum(keys - queries, 0)) // page_size
    ends = [*(np.flatnonzero(group[1:] != group[:-1]) + 1), batch]
    wrong, first = np.zeros(batch, bool), np.zeros(batch, int)
    for begin, end in pairwise([0, *ends] if batch else []):
        shared, first[begin:end] = pages[begin:end].min(), begin
        wrong[begin:end] = (table[begin:end, :shared] != table[begin, :shared]).any(axis=1)
    refuse_value(
        "groups[0]",
        group,
        wrong,
        lambda i: f"another number than request {first[i]}'s, which has other pages",
        "pages of another request would be read",
    )


def _check_entries(rows: int, columns: int) -> None:
    if rows * columns > _MOST_ENTRIES:
        raise ValueError(
            f"{arg('block_table')}: needs at most {_MOST_ENTRIES} entries beside groups, got "
            f"{rows} rows of {columns}; pass fewer columns"
        )
