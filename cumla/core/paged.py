# SPDX-License-Identifier: Apache-2.0
"""Lengths, offsets and page numbers of requests: what every family with a paged cache needs.

Argument tables, the schedule that is computed from lengths, plans whose pages come as a table or as
a list, and what the check mode looks at.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from cumla.core.arguments import INT32, Array, bind
from cumla.core.names import arg
from cumla.core.operation import Operation, Output
from cumla.core.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from cumla.core.arguments import Views
    from cumla.core.arrays import ArrayView
    from cumla.core.operation import Launchable

Host = Mapping[str, np.ndarray[Any, Any]]
"""Arrays in CPU memory, by the names of their arguments."""
Results = Sequence[np.ndarray[Any, Any]]
"""Results of an operation on the CPU."""

K = TypeVar("K")


class Attended(Protocol):
    """Checked arguments of attention."""

    @property
    def q(self) -> ArrayView:
        """The queries."""


A = TypeVar("A", bound=Attended)

ENTRY = "give each request of the batch its entry"
BLOCK_TABLE = Array("batch max_pages", INT32, "row", ENTRY)
KV_LENS = Array("batch", INT32, way_out=ENTRY)
QO_INDPTR = Array("batch+1", INT32, way_out="give each request a begin, and the last an end")
RAGGED_LENGTHS = {
    "qo_indptr": QO_INDPTR,
    "kv_lens": KV_LENS,
    "kv_indptr": Array("batch+1", INT32, way_out=ENTRY),
}
_PAGES = {
    "block_table": BLOCK_TABLE,
    "kv_indices": Array("pages", INT32, "row", "pass a table as block_table"),
}
_MOST_INT32 = (1 << 31) - 1
_SKIPPED = "its rows would be skipped"
_ZEROS = "the kernels would read zeros for that page"


class Schedule(Operation[tuple[Any, ...], K], Generic[K]):
    """Deals the KV blocks of all requests out, from lengths, into a plan's buffer.

    Its arguments are the views of `table`, in that order, and its options are the batch, or None
    where the arrays tell it. `launch` takes a key, the buffer's address and the arguments. On the
    CPU there is no schedule.
    """

    def __init__(self, table: Mapping[str, Array], launch: Callable[..., Launchable]) -> None:
        super().__init__()
        self.trusted = tuple(table)
        self._table = table
        self._launch = launch

    def arguments(self, views: Views, options: Any) -> tuple[Any, ...]:
        """Check the lengths."""
        bind(self._table, views, {} if options is None else {"batch": options})
        return tuple([views.get(name) for name in self._table])

    def recipe(
        self, key: Any, arguments: tuple[Any, ...], outs: Sequence[ArrayView], buffer: int
    ) -> Sequence[Launchable]:
        """Describe the one launch, or none for an empty batch."""
        return (self._launch(key, buffer, *arguments),) if key.batch else ()

    def reference(self, host: Host, arguments: Any) -> Results:
        """Do nothing."""
        return ()


class RaggedSchedule(Schedule[K]):
    """Deals KV blocks out, or cuts requests at fixed positions.

    `cut` takes a key and the buffer's address, after a schedule in one part.
    """

    def __init__(
        self,
        table: Mapping[str, Array],
        launch: Callable[..., Launchable],
        cut: Callable[..., Launchable],
    ) -> None:
        super().__init__(table, launch)
        self._cut = cut

    def recipe(
        self, key: Any, arguments: tuple[Any, ...], outs: Sequence[ArrayView], buffer: int
    ) -> Sequence[Launchable]:
        """Describe one launch, or two where requests are cut at fixed positions."""
        if not key.batch_invariant or key.is_uncut or not key.batch:
            return super().recipe(key, arguments, outs, buffer)
        tiles = super().recipe(key.without_cuts, arguments, outs, buffer)
        return (*tiles, self._cut(key, buffer))


class Stated(Operation[A, K], Generic[A, K]):
    """Returns out and lse; a plan's buffer may be its workspace.

    Its arguments hold ``q``, ``(..., tokens, num_heads, columns)``.
    """

    @abstractmethod
    def value_dim(self, arguments: A) -> int:
        """Return how many columns out has."""

    def outputs(self, arguments: A) -> tuple[Output, ...]:
        """Return the shapes of out, in q's dtype or float32, and lse."""
        q = arguments.q
        rows = q.shape[:-1]
        out = Output("out", (*rows, self.value_dim(arguments)), (q.dtype, "float32"))
        return out, lse_output(rows)

    def workspace_bytes(self, key: Any) -> int:
        """Return the size of a plan's buffer."""
        nbytes: int = key.layout.nbytes
        return nbytes


class Attend(Stated[A, K], Generic[A, K]):
    """Attends by the schedule in a plan's buffer.

    `launch` takes a key, the buffer's address, the arguments, out and lse.
    """

    def __init__(self, launch: Callable[..., Launchable]) -> None:
        super().__init__()
        self._launch = launch

    def recipe(
        self, key: Any, arguments: A, outs: Sequence[ArrayView], buffer: int
    ) -> Sequence[Launchable]:
        """Describe the one launch, or none without requests or query tokens."""
        if not key.batch or 0 in arguments.q.shape:
            return ()
        out, lse = outs
        return (self._launch(key, buffer, arguments, out, by_head(lse)),)


def lse_output(shape: tuple[int, ...]) -> Output:
    """Describe an lse of the axes of out before its columns; any strides will do.

    In a new one of a batch the tokens of a head are together in memory, as kernels go through them.
    """
    return Output("lse", shape, ("float32",), "elements", len(shape) == 3 and shape[1] > 1)


def by_head(lse: ArrayView) -> ArrayView:
    """View an lse as launches take it: (batch, num_heads, tokens), a batch of one where none is."""
    *batch, tokens, heads = lse.shape
    *of_batch, of_token, of_head = lse.strides
    if batch and tokens == 1:  # whose stride is never used: as in contiguous memory
        of_token = of_head
    strides = (*(of_batch or (0,)), of_head, of_token)
    return lse._replace(shape=(*(batch or (1,)), heads, tokens), strides=strides)


class TableOrList(Plan[K], Generic[K]):
    """A plan for queries of different lengths, whose pages come as a table or as a list.

    The last update decides which: with ``kv_indptr`` runs take ``kv_indices``, without it they take
    ``block_table``.
    """

    _lengths = "kv_lens, qo_indptr=..."
    _has_pages = True
    _has_list: bool | None = None  # whether the last update was for a list of pages

    def _update(self, inputs: dict[str, Any], stream: Any, key: Hashable = None) -> None:
        """Note the form of the lengths; runs and updates in the other one are forgotten."""
        has_list = "kv_indptr" in inputs and self._has_pages
        is_other = self._memory is not None and has_list != self._has_list
        if is_other:
            self._updates.clear()
        super()._update(inputs, stream, key)
        if is_other and self._memory is not None:
            self._memory.ready.clear()
            self._memory.near.clear()
        self._has_list = has_list

    def _run(self, inputs: Mapping[str, Any], *rest: Any) -> tuple[Any, ...]:
        """Refuse pages in two forms, or in another one than that of the last update."""
        forms = [name for name in ("block_table", "kv_indices") if name in inputs]
        if self._has_pages and len(forms) != 1:
            raise ValueError(
                f"{arg('block_table')}: needs pages as {arg('block_table')}, or as "
                f"{arg('kv_indices')} after an update with {arg('kv_indptr')}, got "
                f"{'both' if forms else 'neither'}; pass one form"
            )
        has_list = "kv_indices" in inputs
        if self._has_list not in (None, has_list):
            name, had, other = (
                ("kv_indices", "without it", "block_table")
                if has_list
                else ("block_table", "with it", "kv_indices")
            )
            update = f"{self._lengths}, kv_indptr=..." if has_list else self._lengths
            raise ValueError(
                f"{arg(name)}: needs a plan that was updated {'with' if has_list else 'without'} "
                f"{arg('kv_indptr')}, got one updated {had}; pass {arg(other)}, or call "
                f"plan.update({update})"
            )
        return super()._run(inputs, *rest)


# --- checks --------------------------------------------------------------------------------------


def check_one_form(given: Mapping[str, Any]) -> None:
    """Check that pages come as a table, or as a list with its offsets."""
    pages = ("block_table", "kv_indptr", "kv_indices")
    names = [name for name in pages if given.get(name) is not None]
    if names in (["block_table"], ["kv_indptr", "kv_indices"]):
        return
    wrong = names[-1] if names else "block_table"
    raise ValueError(
        f"{arg(wrong)}: needs page numbers as {arg('block_table')}, or as {arg('kv_indptr')} and "
        f"{arg('kv_indices')}, got {' and '.join(names) or 'neither'}; pass one form"
    )


def checked_pages(views: Views) -> ArrayView:
    """Return the table, or the list, of pages: what was given of the two."""
    bind(_PAGES, views, {})
    pages = views.get("block_table")
    if pages is None:
        pages = views["kv_indices"]
    elif pages.shape[0] > 1 and pages.strides[0] < 0:  # entries count from the first row's
        raise ValueError(
            f"{arg('block_table')}: needs rows in the order of memory, got a stride of "
            f"{pages.strides[0]} bytes between them; make a contiguous copy"
        )
    assert pages is not None
    return pages


def check_rows(pages: ArrayView, batch: int) -> None:
    """Check that a table has a row for each request; a list of pages has none."""
    if len(pages.shape) == 2 and pages.shape[0] != batch:
        raise ValueError(
            f"{arg('block_table')}: needs shape (batch, max_pages) with batch {batch}, got "
            f"{pages.shape}; {ENTRY}"
        )


def check_made_for(names: Sequence[str], made: tuple[Any, ...], got: tuple[Any, ...]) -> None:
    """Refuse arrays of another shape than that of a plan; `names` are those of the numbers."""
    other = {n: (m, g) for n, m, g in zip(names, made, got, strict=True) if m != g}
    if other:
        rows = other.get("total_tokens", (0, 0))
        pad = f"pad {arg('q')} with rows to total_tokens, or " if rows[1] < rows[0] else ""
        need, found = [
            ", ".join(f"{arg(name)} {pair[i]}" for name, pair in other.items()) for i in (0, 1)
        ]
        is_swapped = "head_dim_v" in names and "num_kv_heads" in other
        layout = f"pass {arg('kv_layout')}, or " if is_swapped else ""
        raise ValueError(
            f"plan: made for {need}, got {found}; {pad}"
            f"{layout}"
            f"make a plan for this shape{' (q_len 0: q of three axes)' if 'q_len' in other else ''}"
        )


# --- check mode ----------------------------------------------------------------------------------


def refuse_value(
    name: str,
    values: np.ndarray[Any, Any],
    wrong: np.ndarray[Any, Any],
    need: str | Callable[..., str],
    otherwise: str = _SKIPPED,
) -> None:
    """Raise for the first value that is wrong; `need` may be a function of its indices."""
    places = np.argwhere(wrong)
    if places.size:
        place = tuple(places[0].tolist())
        needed = need if isinstance(need, str) else need(*place)
        raise ValueError(
            f"{arg(name)}[{', '.join(map(str, place))}]: needs {needed}, got {values[place]}; "
            f"{otherwise}"
        )


def refuse_slots(slots: np.ndarray[Any, Any], count: int) -> None:
    """Raise for the first new row whose slot is not one of `count` in the cache."""
    need = f"a slot up to {count - 1}, or below 0 to skip"
    refuse_value("slot_mapping", slots, slots >= count, need)


def refuse_positions(
    positions: np.ndarray[Any, Any], count: int, otherwise: str = _SKIPPED
) -> None:
    """Raise for the first position that is not one of `count` in the table of angles."""
    need = f"a row of {arg('cos_sin')}, up to {count - 1}, or below 0"
    refuse_value("positions", positions, positions >= count, need, otherwise)


def check_table_lengths(
    lengths: np.ndarray[Any, Any], table: np.ndarray[Any, Any], page_size: int
) -> None:
    """Raise for the first length that the columns of a table do not hold."""
    longest = table.shape[1] * page_size
    need = f"a length from 0 to max_pages * page_size = {longest}"
    wrong = (lengths < 0) | (lengths > longest)
    refuse_value("kv_lens", lengths, wrong, need, "the kernels would clamp it")


def check_block_table(
    table: np.ndarray[Any, Any],
    lengths: np.ndarray[Any, Any],
    num_pages: int,
    page_size: int,
    otherwise: str = _ZEROS,
    first: np.ndarray[Any, Any] | None = None,
) -> None:
    """Raise for the first page number out of range that a request of these lengths uses.

    `first` are the tokens before which a request sees none: pages that end there may be gone.
    """
    begin = np.arange(table.shape[1]) * page_size
    used = begin < lengths[:, None]
    if first is not None:
        used &= begin + page_size > first[:, None]
    bad = used & ((table < 0) | (table >= num_pages))
    refuse_value("block_table", table, bad, f"a page number from 0 to {num_pages - 1}", otherwise)


def check_ragged_lengths(host: Host, total_tokens: int, page_size: int, most_tokens: int) -> None:
    """Raise for the first offset or length out of range, of those in RAGGED_LENGTHS."""
    _check_offsets("qo_indptr", host["qo_indptr"], total_tokens, "total_tokens")
    most = np.full(len(host["kv_lens"]), most_tokens)
    if "kv_indptr" in host:
        _check_offsets("kv_indptr", host["kv_indptr"], _MOST_INT32, "the largest int32")
        most = np.minimum(most, np.diff(host["kv_indptr"].astype(np.int64)) * page_size)
    _check_held(host["kv_lens"], most)


def check_ragged_pages(
    host: Host, num_pages: int, page_size: int, first: np.ndarray[Any, Any] | None = None
) -> None:
    """Raise for the first length that the pages do not hold, or used page number out of range.

    `first` is as in `check_block_table`.
    """
    lengths = host["kv_lens"]
    if "block_table" in host:
        table = host["block_table"]
        _check_held(lengths, np.full(len(lengths), table.shape[1] * page_size))
        check_block_table(table, lengths, num_pages, page_size, first=first)
        return
    pages, indptr = host["kv_indices"], host["kv_indptr"]
    if indptr[-1] > len(pages):
        raise ValueError(
            f"{arg('kv_indices')}: needs kv_indptr[-1] = {indptr[-1]} pages, got {len(pages)}; "
            f"pass the whole list"
        )
    used = np.zeros(len(pages), bool)
    counts = -(-lengths.astype(np.int64) // page_size)
    skipped = np.zeros(len(counts), np.int64) if first is None else first // page_size
    for begin, count, skip in zip(indptr[:-1], counts, skipped, strict=True):
        used[begin + skip : begin + count] = True
    bad = used & ((pages < 0) | (pages >= num_pages))
    refuse_value("kv_indices", pages, bad, f"a page number from 0 to {num_pages - 1}", _ZEROS)


def _check_offsets(name: str, offsets: np.ndarray[Any, Any], most: int, what: str) -> None:
    before = np.concatenate([np.zeros(1, offsets.dtype), offsets[:-1]])
    wrong = (offsets < before) | (offsets > most)

    def need(i: int) -> str:
        least = f"{name}[{i - 1}] = {before[i]}" if i else "0"
        return f"a number from {least} to {what} = {most}"

    refuse_value(name, offsets, wrong, need, "the kernels would cut requests, or skip them")


def _check_held(lengths: np.ndarray[Any, Any], most: np.ndarray[Any, Any]) -> None:
    wrong = (lengths < 0) | (lengths > most)

    def need(i: int) -> str:
        return f"a length from 0 to {most[i]}, what the request's pages hold"

    refuse_value("kv_lens", lengths, wrong, need, "the kernels would clamp it")


def page_lists(
    host: Host,
) -> tuple[str, np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the name of the page numbers, these, and where those of each request begin and end."""
    if "block_table" in host:
        pages = host["block_table"]
        begin = np.zeros(len(pages), np.int64)
        return "block_table", pages, begin, begin + pages.shape[1]
    pages, bounds = host["kv_indices"], host["kv_indptr"]
    wrong = (bounds < 0) | (bounds > len(pages))
    refuse_value("kv_indptr", bounds, wrong, f"a number from 0 to {len(pages)}, the entries")
    return "kv_indices", pages, bounds[:-1].astype(np.int64), bounds[1:].astype(np.int64)


def refuse_pages(
    host: Host,
    requests: np.ndarray[Any, Any],
    positions: np.ndarray[Any, Any],
    num_pages: int,
    page_size: int,
) -> None:
    """Raise for the first new row whose request, position or page number is out of range."""
    name, pages, begin, end = page_lists(host)
    last = len(begin) - 1
    refuse_value(
        "batch_indices", requests, requests > last, f"a request up to {last}, or below 0 to skip"
    )
    used = np.flatnonzero((requests >= 0) & (positions >= 0))
    request, column = requests[used], positions[used] // page_size
    outside = np.zeros(len(positions), bool)
    outside[used] = column >= (end - begin)[request]
    refuse_value("positions", positions, outside, "a position in the pages of its request")
    entry = begin[request] + column
    read = np.zeros(pages.shape, bool)
    read[(request, entry) if pages.ndim == 2 else entry] = True
    wrong = read & ((pages < 0) | (pages >= num_pages))
    refuse_value(name, pages, wrong, f"a page number from 0 to {num_pages - 1}")
