# SPDX-License-Identifier: Apache-2.0
"""What the arguments of attention over queries of different lengths must look like.

As :mod:`cumla.mla.checks`: messages name the argument, what was needed, what came and the way out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

import numpy as np

from cumla.launch.mla.shape import VALUE_DIM
from cumla.launch.split.plan import MOST_TOKENS
from cumla.mla.checks import (
    Arguments,
    check_block_table,
    check_elements,
    check_layout,
    check_output,
    checked_kv_scale,
    checked_query_and_cache,
    columns_of,
    copy_to_host,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cumla.core.arrays import ArrayView

__all__ = [
    "QUERY_AXES",
    "Lengths",
    "check_length_values",
    "check_one_form",
    "check_page_values",
    "check_planned_lengths",
    "check_total_tokens",
    "checked_batch",
    "checked_lengths",
    "checked_ragged",
    "lengths_on_host",
]

QUERY_AXES = ("total_tokens", "num_heads")  # of q, before its columns

Array = np.ndarray[Any, Any]
_MOST_PLACES = (1 << 31) - 1  # row tiles that a schedule can number
T = TypeVar("T")


class Lengths(NamedTuple, Generic[T]):
    """What a schedule is made of: views, or arrays on the host."""

    qo_indptr: T
    kv_lens: T
    kv_indptr: T | None

    def named(self) -> dict[str, T]:
        """By name, what there is."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def check_one_form(block_table: Any, kv_indptr: Any, kv_indices: Any) -> None:
    """Check that pages come as a table, or as a list with its offsets."""
    given = {"block_table": block_table, "kv_indptr": kv_indptr, "kv_indices": kv_indices}
    names = [name for name, value in given.items() if value is not None]
    if names in (["block_table"], ["kv_indptr", "kv_indices"]):
        return
    wrong = names[-1] if names else "block_table"
    raise ValueError(
        f"{wrong}: pages need to come as block_table, or as kv_indptr and kv_indices, got "
        f"{' and '.join(names) or 'neither'}; pass one form"
    )


def checked_batch(qo_indptr: ArrayView) -> int:
    """Return the number of requests that the offsets of the queries tell."""
    if len(qo_indptr.shape) != 1 or qo_indptr.shape[0] < 2:
        raise ValueError(
            f"qo_indptr: needs shape (batch + 1,) with batch 1 at least, got {qo_indptr.shape}; "
            f"give each request a begin, and the last one an end"
        )
    return qo_indptr.shape[0] - 1


def checked_lengths(
    views: Mapping[str, ArrayView | None], batch: int | None = None
) -> Lengths[ArrayView]:
    """Check ``qo_indptr``, ``kv_lens`` and, where there is one, ``kv_indptr``.

    Parameters
    ----------
    views : mapping
        By name; others are not looked at.
    batch : int, optional
        Requests; by default qo_indptr tells.

    Returns
    -------
    Lengths of ArrayView
    """
    lengths = cast("Lengths[ArrayView]", Lengths(*(views.get(n) for n in Lengths._fields)))
    for name, view in lengths.named().items():
        _check_int32(name, view)
    if batch is None:
        batch = checked_batch(lengths.qo_indptr)
    for name, view in lengths.named().items():
        axes, size = ("(batch,)", batch) if name == "kv_lens" else ("(batch + 1,)", batch + 1)
        if view.shape != (size,):
            raise ValueError(
                f"{name}: needs shape {axes} with batch {batch}, got {view.shape}; give each "
                f"request of the batch its entry"
            )
    return lengths


def _check_int32(name: str, view: ArrayView) -> None:
    if view.dtype != "int32":
        raise TypeError(f"{name}: needs int32, got {view.dtype}; convert it first")
    check_elements(name, view)


def checked_ragged(
    views: Mapping[str, ArrayView | None], batch: int, kv_scale: float | None = None
) -> Arguments:
    """Check the views of one call, by name, but for its lengths.

    Parameters
    ----------
    views : mapping
        ``q``, or ``q[0]`` and ``q[1]``; ``kv_cache``, or ``kv_cache[0]``, ``kv_cache[1]`` and maybe
        ``kv_cache[2]``; ``block_table`` or ``kv_indices``; ``out`` and ``lse``, which may be None;
        ``kv_scale`` if it is an array. Others are not looked at.
    batch : int
        Requests.
    kv_scale : float, optional
        If it is a number.

    Returns
    -------
    Arguments
        With the table, or the list of pages, as block_table.
    """
    columns = checked_query_and_cache(views, QUERY_AXES)
    for name, view in columns_of(views).items():
        check_layout(name, view)
    factor: ArrayView | float = 1.0
    if kv_scale is not None or "kv_scale" in views:
        factor = checked_kv_scale(columns, views, kv_scale)
    pages = views.get("block_table")
    if pages is not None:
        check_block_table(pages, batch)
        if batch > 1 and pages.strides[0] < 0:  # entries are counted from the first row's
            raise ValueError(
                f"block_table: needs rows in the order of memory, got a stride of "
                f"{pages.strides[0]} bytes between them; make a contiguous copy"
            )
    else:
        pages = cast("ArrayView", views["kv_indices"])
        _check_list(pages)
    out, lse = views["out"], views["lse"]
    tokens, num_heads, _ = columns.q.shape
    if out is not None:
        check_output("out", out, (tokens, num_heads, VALUE_DIM), (columns.q.dtype, "float32"))
        check_layout("out", out)
    if lse is not None:
        check_output("lse", lse, (tokens, num_heads), ("float32",))
        check_elements("lse", lse)
    return Arguments(*columns[:4], pages, None, out, lse, columns.kv_scales, factor)


def _check_list(view: ArrayView) -> None:
    """Check the page numbers of all requests."""
    _check_int32("kv_indices", view)
    if len(view.shape) != 1:
        raise ValueError(
            f"kv_indices: needs shape (pages,), got {view.shape}; pass a table as block_table"
        )
    if view.shape[0] > 1 and view.strides[0] != 4:
        raise ValueError(
            f"kv_indices: needs a contiguous array, got a stride of {view.strides[0]} bytes; make "
            f"a contiguous copy"
        )


def check_total_tokens(total_tokens: int, places: int) -> None:
    """Check that a schedule can number the row tiles of so many query tokens."""
    if places > _MOST_PLACES:
        raise ValueError(
            f"total_tokens: needs fewer query tokens, or heads, than a schedule can hold, got "
            f"{total_tokens}; cut the call in two"
        )


# --- check mode -----------------------------------------------------------------------------------


def lengths_on_host(lengths: Lengths[ArrayView], stream: int) -> Lengths[Array]:
    """Copy lengths from the GPU, and wait for it."""
    host = {name: copy_to_host(view, stream) for name, view in lengths.named().items()}
    return Lengths(host["qo_indptr"], host["kv_lens"], host.get("kv_indptr"))


def check_length_values(lengths: Lengths[Array], total_tokens: int, page_size: int) -> None:
    """Raise for the first offset or length that is out of range.

    Parameters
    ----------
    lengths : Lengths of ndarray
        On the host.
    total_tokens : int
        Rows of q.
    page_size : int
        Tokens of a page.
    """
    _check_offsets("qo_indptr", lengths.qo_indptr, total_tokens, "total_tokens")
    most = np.full(len(lengths.kv_lens), MOST_TOKENS)
    if lengths.kv_indptr is not None:
        _check_offsets("kv_indptr", lengths.kv_indptr, (1 << 31) - 1, "the largest int32")
        most = np.minimum(most, np.diff(lengths.kv_indptr.astype(np.int64)) * page_size)
    _check_most(lengths.kv_lens, most)


def _check_offsets(name: str, offsets: Array, most: int, what: str) -> None:
    before = np.concatenate([np.zeros(1, offsets.dtype), offsets[:-1]])
    wrong = np.flatnonzero((offsets < before) | (offsets > most))
    if wrong.size:
        i = wrong[0]
        least = f"{name}[{i - 1}] = {before[i]}" if i else "0"
        raise ValueError(
            f"{name}[{i}]: needs a number from {least} to {what} = {most}, got {offsets[i]}; the "
            f"kernels would cut requests, or skip them"
        )


def _check_most(kv_lens: Array, most: Array) -> None:
    wrong = np.flatnonzero((kv_lens < 0) | (kv_lens > most))
    if wrong.size:
        i = wrong[0]
        raise ValueError(
            f"kv_lens[{i}]: needs a length from 0 to {most[i]}, what the request's pages "
            f"hold, got {kv_lens[i]}; the kernels would clamp it"
        )


def check_page_values(
    lengths: Lengths[Array], pages: Array, num_pages: int, page_size: int
) -> None:
    """Raise for the first length that the pages do not hold, or used page number out of range.

    Parameters
    ----------
    lengths : Lengths of ndarray
        On the host, and in range.
    pages : ndarray
        The table, or the list, on the host.
    num_pages, page_size : int
        Of the cache.
    """
    counts = -(-lengths.kv_lens.astype(np.int64) // page_size)
    if lengths.kv_indptr is None:
        most = np.full(len(counts), pages.shape[1] * page_size)
        _check_most(lengths.kv_lens, most)
        used = [(f"block_table[{r}, ", 0, pages[r, :n]) for r, n in enumerate(counts.tolist())]
    else:
        if lengths.kv_indptr[-1] > len(pages):
            raise ValueError(
                f"kv_indices: needs kv_indptr[-1] = {lengths.kv_indptr[-1]} pages, got "
                f"{len(pages)}; pass the whole list"
            )
        begins = lengths.kv_indptr[:-1]
        used = [("kv_indices[", a, pages[a : a + n]) for a, n in zip(begins, counts, strict=True)]
    for name, begin, entries in used:
        bad = np.flatnonzero((entries < 0) | (entries >= num_pages))
        if bad.size:
            raise ValueError(
                f"{name}{begin + bad[0]}]: needs a page number from 0 to {num_pages - 1}, got "
                f"{entries[bad[0]]}; the kernels would read zeros for that page"
            )


def check_planned_lengths(lengths: Lengths[Array], planned: Lengths[Array]) -> None:
    """Raise for the first offset or length that is not the one a plan was updated with."""
    for name, values in lengths.named().items():
        wanted = planned.named()[name]
        changed = np.flatnonzero(values != wanted)
        if changed.size:
            i = changed[0]
            raise ValueError(
                f"{name}[{i}]: needs what the plan was updated with, {wanted[i]}, got {values[i]}; "
                f"call plan.update after each change of the lengths"
            )
