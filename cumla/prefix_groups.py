# SPDX-License-Identifier: Apache-2.0
"""Requests that share the pages of a prefix: :class:`PrefixGroups`, found in block tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cumla import reference
from cumla.core.arguments import INT32, bind
from cumla.core.names import arg
from cumla.core.operation import Output
from cumla.core.paged import (
    BLOCK_TABLE,
    KV_LENS,
    QO_INDPTR,
    check_ragged_lengths,
    check_table_lengths,
)
from cumla.core.spec import Out, Spec, array, integer, optional
from cumla.launch.kernel import Unplanned
from cumla.launch.split.find_prefix_groups import FindArguments, find_prefix_groups_launch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cumla.core.arguments import Views
    from cumla.core.arrays import ArrayView
    from cumla.core.paged import Host, Results
    from cumla.launch.kernel import Launch

__all__ = ["PrefixGroups", "find_prefix_groups"]

_MOST_INT32 = (1 << 31) - 1


class PrefixGroups(NamedTuple):
    """Groups of neighbouring requests that share a prefix, as arrays on the device.

    :func:`cumla.find_prefix_groups` finds them; a caller that knows its groups may make the arrays.
    The requests of a group are neighbours, and their rows of block_table begin with the same page
    numbers, for `prefix_len` tokens. This is not checked: the page numbers of the first request
    serve the whole group. Any values are allowed. A prefix is shortened to the shortest one of its
    group, to whole pages, and to tokens that all queries see.

    Attributes
    ----------
    group : array
        ``(batch,)`` int32: neighbours with equal numbers are a group.
    prefix_len : array
        ``(batch,)`` int32: tokens that each request shares with all others of its group; 0 for a
        request that shares none.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> groups = cumla.PrefixGroups(np.int32([0, 0, 2]), np.int32([128, 128, 0]))
    """

    group: Any
    prefix_len: Any


FIND = Spec(
    "find_prefix_groups",
    (
        array("block_table"),
        array("kv_lens"),
        optional("qo_indptr"),
        integer("page_size", "pass the tokens of a page"),
        integer("q_len", "pass the query tokens of each request", None),
        integer("min_tokens", "pass 1 for any prefix of a page", 1024),
        Out("group"),
        Out("prefix_len"),
    ),
    positional=3,
    kernels=("find_prefix_groups",),
    returns=("group", "prefix_len"),
    result=PrefixGroups,
)


@FIND
def find_prefix_groups(
    block_table: Any,
    kv_lens: Any,
    qo_indptr: Any = None,
    *,
    page_size: int,
    q_len: int | None = None,
    min_tokens: int = 1024,
    group: Any = None,
    prefix_len: Any = None,
    stream: Any = None,
) -> PrefixGroups:
    """Find neighbouring requests whose rows of a block table begin with the same page numbers.

    Neighbours that each share at least `min_tokens` with the one before form a group. Such a run is
    divided into several groups if that saves more reading: eight prompts with a common system
    prompt and eight samples each form eight groups. One kernel finds them, without waiting for the
    device. Groups do not extend over multiples of 1024 requests. Arrays on the CPU are read by
    :func:`cumla.reference.find_prefix_groups`.

    Parameters
    ----------
    block_table : array
        ``(batch, max_pages)`` int32, rows contiguous: page numbers of each request.
    kv_lens : array
        ``(batch,)`` int32: keys of each request, those of its queries included. A prefix ends
        before the queries of its requests.
    qo_indptr : array, optional
        ``(batch + 1,)`` int32: where the query tokens of each request begin and end.
    page_size : int
        Tokens of a page.
    q_len : int, optional
        Query tokens of each request, in place of qo_indptr; 1 by default.
    min_tokens : int
        Least number of tokens of a prefix that is shared.
    group, prefix_len : array, optional
        Where to write: ``(batch,)`` int32, contiguous.
    stream : optional
        As in :func:`cumla.mla_decode`.

    Returns
    -------
    PrefixGroups
        ``group`` holds the first request of each request's group. Arrays of block_table's
        framework.

    Raises
    ------
    TypeError, ValueError, CumlaError
        As :func:`cumla.mla_decode`.

    Notes
    -----
    Page numbers are compared, not used as addresses. Entries after a request's pages may hold
    anything.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> table, lens = np.int32([[3, 7, 1], [3, 7, 2], [5, 0, 0]]), np.int32([190, 150, 64])
    >>> groups = cumla.find_prefix_groups(table, lens, page_size=64, min_tokens=64)
    >>> groups.group.tolist(), groups.prefix_len.tolist()
    ([0, 0, 2], [128, 128, 0])
    """
    groups: PrefixGroups = _FIND.call(
        *(block_table, kv_lens, qo_indptr, page_size, q_len, min_tokens, group, prefix_len, stream)
    )
    return groups


_TABLE = {
    "block_table": BLOCK_TABLE,
    "kv_lens": KV_LENS,
    "qo_indptr": QO_INDPTR,
}


class _Find(Unplanned[FindArguments]):
    """Writes groups and prefixes."""

    trusted = ("kv_lens", "qo_indptr")

    def arguments(self, views: Views, options: Any) -> FindArguments:
        bind(_TABLE, views, {})
        table, kv_lens, qo_indptr = views["block_table"], views["kv_lens"], views.get("qo_indptr")
        assert table is not None
        assert kv_lens is not None
        page_size, q_len = options.page_size, options.q_len
        if q_len is not None and qo_indptr is not None:
            raise ValueError(
                f"{arg('q_len')}: needs no {arg('qo_indptr')} beside it, got both; pass one of them"
            )
        if table.shape[1] * page_size > _MOST_INT32:
            raise ValueError(
                f"{arg('page_size')}: needs max_pages * page_size up to {_MOST_INT32}, got "
                f"{table.shape[1]} pages of {page_size}; pass fewer columns"
            )
        least = min(-(-options.min_tokens // page_size), _MOST_INT32)
        q_len = min(1 if q_len is None else q_len, _MOST_INT32)
        return FindArguments(table, kv_lens, qo_indptr, page_size, least, q_len)

    def outputs(self, arguments: FindArguments) -> tuple[Output, ...]:
        batch = (arguments.block_table.shape[0],)
        return tuple([Output(name, batch, INT32, "row") for name in ("group", "prefix_len")])

    def check_values(self, host: Host, arguments: FindArguments) -> None:
        table = np.zeros(arguments.block_table.shape, np.int8)
        check_table_lengths(host["kv_lens"], table, arguments.page_size)
        if "qo_indptr" in host:
            check_ragged_lengths(host, _MOST_INT32, arguments.page_size, _MOST_INT32)

    def launches(self, arguments: FindArguments, outs: Sequence[ArrayView]) -> Sequence[Launch]:
        if not arguments.block_table.shape[0]:
            return ()
        group, prefix_len = outs
        return (find_prefix_groups_launch(arguments, group, prefix_len),)

    def reference(self, host: Host, arguments: FindArguments) -> Results:
        a = arguments
        found = reference.find_prefix_groups(
            *(host["block_table"], host["kv_lens"], host.get("qo_indptr")),
            page_size=a.page_size,
            q_len=a.q_len,
            min_tokens=a.min_pages * a.page_size,
        )
        results = []
        for name, array_found in zip(("group", "prefix_len"), found, strict=True):
            out = host.get(name)
            if out is not None:
                out[...] = array_found
            results.append(array_found if out is None else out)
        return results


_FIND = _Find(FIND)
