# SPDX-License-Identifier: Apache-2.0
"""The largest scores of each row: :func:`top_k`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cumla import reference
from cumla.core.arguments import INT32, Array, bind
from cumla.core.names import arg
from cumla.core.operation import Operation, Output
from cumla.core.paged import Host, Results, refuse_value
from cumla.core.spec import Option, Out, Spec, array, flag, integer, optional
from cumla.launch.device import require_hopper
from cumla.launch.sparse.top_k import MOST_COLUMNS, MOST_SORTED, TopKViews, top_k_launch
from cumla.reference import TopKResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cumla.core.arguments import Views
    from cumla.core.arrays import ArrayView
    from cumla.core.operation import Launchable

__all__ = ["TopKResult", "top_k"]

_OF_ROWS = Array("rows", INT32, way_out="give each row of scores its entry")
_TABLE = {
    "scores": Array("rows width", ("float32", "bfloat16", "float16"), "row"),
    "row_lens": _OF_ROWS,
    "row_starts": _OF_ROWS,
    "block_table": Array("requests max_pages", INT32, "row"),
    "row_to_request": _OF_ROWS,
    "offsets": _OF_ROWS,
}


def _checked_tie_break(name: str, value: Any) -> Any:
    if value != "lowest":
        raise ValueError(f'{name}: needs "lowest", got {value!r}; there is no other order')
    return value


TOP_K = Spec(
    "top_k",
    (
        array("scores"),
        integer("topk", "there is nothing to select"),
        optional("row_lens"),
        optional("row_starts"),
        optional("block_table"),
        integer("page_size", "pass the slots of a page", 1),
        optional("row_to_request"),
        optional("offsets"),
        Out("out"),
        Out("out_positions", only_given=True),
        Out("counts"),
        flag("values", False, asks=True),
        flag("sorted", False),
        Option("tie_break", "lowest", _checked_tie_break, "str"),
    ),
    positional=2,
    kernels=("top_k_",),
    returns=("out", "out_positions", "values", "counts"),
    result=TopKResult,
)


@TOP_K
def top_k(
    scores: Any,
    topk: int,
    *,
    row_lens: Any = None,
    row_starts: Any = None,
    block_table: Any = None,
    page_size: int = 1,
    row_to_request: Any = None,
    offsets: Any = None,
    out: Any = None,
    out_positions: Any = None,
    counts: Any = None,
    values: bool = False,
    sorted: bool = False,
    tie_break: str = "lowest",
    stream: Any = None,
) -> TopKResult:
    """Select the topk largest scores of each row: the tokens that sparse attention attends to.

    The selection is exact for any scores, and deterministic: ties go to the lowest position, NaN is
    larger than any number, and -0 equals 0. Positions count from the row's start and are ascending.
    Scores on the GPU are read once, or several times if a row is longer than some 400,000. Devices
    and streams are as in :func:`cumla.mla_decode`; arrays on the CPU are computed by
    :func:`cumla.reference.top_k`.

    Parameters
    ----------
    scores : array
        ``(rows, width)`` float32, bfloat16 or float16, of CuPy, PyTorch, JAX or NumPy, for example
        the logits of :func:`cumla.paged_mqa_logits`; up to 2 ** 30 columns. Rows are contiguous,
        with any stride between them, not only multiples of 16 bytes.
    topk : int
        How many to select, at least 1. If a row has fewer scores, its other places stay empty.
    row_lens, row_starts : array, optional
        ``(rows,)`` int32: row i has the scores
        ``row_starts[i] <= j < row_starts[i] + row_lens[i]``. No others are read, so they need not
        have been written. Starts are clamped to ``[0, width]``, lengths to ``[0, width - start]``.
        By default a row has all of its columns.
    block_table : array, optional
        ``(requests, max_pages)`` int32, rows contiguous: positions become slots of a paged cache.
        Place ``p``, which is the position plus the offset, has slot ``block_table[request, p //
        page_size] * page_size + p % page_size``. The index is -1 if the place is outside of
        the table or the entry is negative.
    page_size : int
        Slots of a page of block_table, any number from 1.
    row_to_request : array, optional
        ``(rows,)`` int32: the row of the block table of each row of scores. A request outside of
        the table has no slots. Without it the table has a row for each row of scores.
    offsets : array, optional
        ``(rows,)`` int32, added to the positions of each row, for example the first key of a
        request among the keys of all.
    out, out_positions : array, optional
        ``(rows, topk)`` int32, rows contiguous; written and returned. Positions are written only if
        an array for them is given. Of the framework of scores; JAX's arrays cannot be written to.
    counts : array, optional
        ``(rows,)`` int32; written and returned.
    values : bool
        Return the scores at the positions, too.
    sorted : bool
        Order each row by descending score, equal scores by position. topk or the number of columns
        is at most 8192.
    tie_break : str
        ``"lowest"``, the only order for ties.
    stream : optional
        As in :func:`cumla.mla_decode`.

    Returns
    -------
    TopKResult
        ``indices``, slots with a block table and positions plus offsets without one, ``positions``
        or None, ``values`` or None, and ``counts``, the number of used places of each row. Unused
        places have indices and positions -1 and values -inf. An index that does not fit int32 or is
        not in the table is -1. Arrays of the framework of scores.

    Raises
    ------
    TypeError, ValueError, CumlaError
        As :func:`cumla.mla_decode`; topk is too large to be sorted.

    Notes
    -----
    The same call gives the same bits. Places are taken by prefix sums over integer counts, and no
    list of candidates is ever too short: see docs/kernels/top_k.md.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> scores = np.array([[3, 1, 4, 1, 5], [2, 7, 1, 8, 2]], np.float32)
    >>> cumla.top_k(scores, 2).indices
    array([[2, 4],
           [1, 3]], dtype=int32)
    """
    result: TopKResult = _TOP_K.call(
        *(scores, topk, row_lens, row_starts, block_table, page_size, row_to_request, offsets, out),
        *(out_positions, counts, values, sorted, tie_break, stream),
    )
    return result


class _Arguments(NamedTuple):
    views: dict[str, ArrayView]
    options: Any
    has_positions: bool

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the indices."""
        return self.views["scores"].shape[0], self.options.topk


class _TopK(Operation[_Arguments, int]):
    """Selects; its key is the number of multiprocessors."""

    trusted = ("row_lens", "row_starts", "row_to_request")

    def arguments(self, views: Views, options: Any) -> _Arguments:
        sizes = bind(_TABLE, views, {})
        width, most = sizes["width"], MOST_COLUMNS
        if max(width, options.topk) > most:
            name, number = ("scores", width) if width > most else ("topk", options.topk)
            raise ValueError(
                f"{arg(name)}: needs at most {most} columns, got {number}; cut the rows"
            )
        if options.sorted and min(options.topk, width) > MOST_SORTED:
            raise ValueError(
                f"{arg('sorted')}: needs {arg('topk')}, or the columns of scores, up to "
                f"{MOST_SORTED}, got {arg('topk')} {options.topk} and {width} columns; sort the "
                f"values that come back"
            )
        _check_places(views, sizes, options.page_size)
        given = {name: view for name in _TABLE if (view := views.get(name)) is not None}
        return _Arguments(given, options, views.get("out_positions") is not None)

    def outputs(self, arguments: _Arguments) -> tuple[Output, ...]:
        shape, scores = arguments.shape, arguments.views["scores"]
        outputs = [Output("out", shape, INT32, "row")]
        if arguments.has_positions:
            outputs.append(Output("out_positions", shape, INT32, "row"))
        outputs.append(Output("counts", shape[:1], INT32, "elements"))
        if arguments.options.values:
            outputs.append(Output("values", shape, (scores.dtype,), "row"))
        return tuple(outputs)

    def key(self, arguments: _Arguments, device: int) -> int:
        return require_hopper(device).sm_count

    def recipe(
        self, key: int, arguments: _Arguments, outs: Sequence[ArrayView], buffer: int
    ) -> Sequence[Launchable]:
        given, options = arguments.views, arguments.options
        if given["scores"].shape[0] == 0:
            return ()
        named = {out.name: view for out, view in zip(self.outputs(arguments), outs, strict=True)}
        inputs: dict[str, Any] = {name: given.get(name) for name in _TABLE}
        views = TopKViews(
            **inputs,
            out=named["out"],
            positions=named.get("out_positions"),
            values=named.get("values"),
            counts=named["counts"],
        )
        return (top_k_launch(views, options.topk, options.page_size, options.sorted, key),)

    def check_values(self, host: Host, arguments: _Arguments) -> None:
        width = arguments.views["scores"].shape[1]
        starts, lengths, requests = (
            host.get(name) for name in ("row_starts", "row_lens", "row_to_request")
        )
        if starts is not None:
            wrong = (starts < 0) | (starts > width)
            refuse_value("row_starts", starts, wrong, f"a column from 0 to {width}", _CLAMPED)
        if lengths is not None:
            most = width - (0 if starts is None else starts)
            wrong = (lengths < 0) | (lengths > most)
            need = f"a length from 0 to the end of the row, at {width}"
            refuse_value("row_lens", lengths, wrong, need, _CLAMPED)
        if requests is not None:
            last = arguments.views["block_table"].shape[0] - 1
            wrong, need = (
                requests > last,
                f"a row of {arg('block_table')} up to {last}, or below 0 for none",
            )
            refuse_value("row_to_request", requests, wrong, need, "it would have no slots")

    def reference(self, host: Host, arguments: _Arguments) -> Results:
        given: dict[str, Any] = {**host, **arguments.options._asdict()}
        del given["tie_break"]
        indices, positions, values, counts = reference.top_k(**given)
        found = indices, positions, counts, values
        return [array for array in found if array is not None]


_TOP_K = _TopK(TOP_K)
_CLAMPED = "the kernels would clamp it"


def _check_places(views: Views, sizes: dict[str, int], page_size: int) -> None:
    table, requests = views.get("block_table"), views.get("row_to_request")
    if table is None:
        for name, is_given in (
            ("row_to_request", requests is not None),
            ("page_size", page_size > 1),
        ):
            if is_given:
                raise ValueError(
                    f"{arg(name)}: needs {arg('block_table')}, got none; pass the table, or leave "
                    f"it out"
                )
    elif requests is None and sizes["requests"] != sizes["rows"]:
        raise ValueError(
            f"{arg('block_table')}: needs a row for each of the {sizes['rows']} rows of scores, "
            f"got shape {table.shape}; pass {arg('row_to_request')}"
        )
