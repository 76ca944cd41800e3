# SPDX-License-Identifier: Apache-2.0
"""The visible keys of :func:`cumla.attention`: :class:`AttentionMask` and its builders."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cumla.core.arguments import (
    INT32,
    WIDE,
    Array,
    Views,
    bind,
    check_dtype,
    check_lies,
    checked_flag,
    checked_int,
)
from cumla.core.names import arg
from cumla.core.operation import Output, run
from cumla.core.paged import check_ragged_lengths
from cumla.core.tree import MOST_DRAFTS, MOST_WORDS, TREE_DTYPES, WORD, check_words
from cumla.launch.kernel import Unplanned
from cumla.launch.mha.mask_rows import MaskRowsArguments, Rules, mask_rows_launch
from cumla.launch.split.plan import MOST_TOKENS
from cumla.reference.mha.mask import intervals, queries_of, tree_words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cumla.core.arrays import ArrayView
    from cumla.core.paged import Host, Results
    from cumla.launch.kernel import Launch

__all__ = ["AttentionMask"]

_BIT_DTYPES = ("uint8", "uint16", "uint32", "int32")  # of rows of bits
_INTERVAL = ("start", "end")


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """The visible keys of each query of :func:`cumla.attention`, as arrays; all are optional.

    Query i of a request sees key j, which counts from 0 in the request, if
    ``start <= j <= end`` or ``j < prefix_len``. With `tree` that holds for the keys before
    tree_start, and a later key is visible if its bit is set: bit b of word w is key
    ``tree_start + 32 * w + b``. Keys beyond the last word are not visible.

    The static methods build masks, with one kernel on the GPU. Arrays have the framework and the
    device of `q`. Kernels read them, so a mask may change between the replays of a CUDA graph. Any
    value is allowed: keys that do not exist are ignored. A query that sees no key has out 0 and lse
    -inf or, with sinks, the sink.

    Attributes
    ----------
    start, end : array, optional
        ``(total_tokens,)`` int32, contiguous: the first and the last visible key of each query, in
        the order of the rows of q; ``total_tokens`` is ``batch * q_len`` for q of four axes. By
        default start is 0, and end is the query's own key, ``kv_len - q_len + i``, or ``kv_len -
        1`` with ``causal=False``. Where end is given `causal` has no effect.
    prefix_len : array, optional
        ``(batch,)`` int32, contiguous: keys below it are visible, too.
    tree : array, optional
        ``(total_tokens, words)`` uint32, or int32 with the same bits, contiguous, 1 to 8 words.
    tree_start : array, optional
        ``(batch,)`` int32, contiguous: the key of the first bit; ``kv_len - q_len`` by default.

    Examples
    --------
    >>> import numpy as np
    >>> from cumla import AttentionMask
    >>> lens, qo_indptr = np.int32([6]), np.int32([0, 4])
    >>> mask = AttentionMask.chunks(4, qo_indptr=qo_indptr, kv_lens=lens, total_tokens=4)
    >>> mask.start.tolist(), mask.end.tolist()
    ([0, 0, 4, 4], [2, 3, 4, 5])
    """

    start: Any = None
    end: Any = None
    prefix_len: Any = None
    tree: Any = None
    tree_start: Any = None

    @property
    def given(self) -> dict[str, Any]:
        """The arrays that are not None, by name."""
        return {name: array for name in FIELDS if (array := getattr(self, name)) is not None}

    @staticmethod
    def windows(
        left: int | None,
        right: int | None = 0,
        *,
        kv_lens: Any,
        qo_indptr: Any = None,
        q_len: int | None = None,
        total_tokens: int | None = None,
        positions: Any = None,
        out: AttentionMask | None = None,
        stream: Any = None,
    ) -> AttentionMask:
        """Show the keys from ``p - left`` to ``p + right``, where p is the position of a query.

        Parameters
        ----------
        left, right : int or None
            Tokens before and after the position; -1 or None for all. A sliding window of W tokens
            is ``left = W - 1``.
        kv_lens : array
            ``(batch,)`` int32: keys of each request.
        qo_indptr : array, optional
            ``(batch + 1,)`` int32: where the query tokens of each request begin and end.
        q_len : int, optional
            Query tokens of each request, in place of qo_indptr.
        total_tokens : int, optional
            Rows of q. Needed with qo_indptr, unless positions or `out` are given.
        positions : array, optional
            ``(total_tokens,)`` int32 or int64: the position of each query where that is not
            ``kv_len - q_len + i``, such as kv_len - q_len and the depth of the node in a tree.
        out : AttentionMask, optional
            A mask whose `start` and `end` are overwritten and which is returned, for CUDA graphs.
        stream : optional
            As in :func:`cumla.attention`.

        Returns
        -------
        AttentionMask
            With `start` and `end`. The rows of no request see nothing.

        Examples
        --------
        >>> import numpy as np
        >>> from cumla import AttentionMask
        >>> mask = AttentionMask.windows(2, kv_lens=np.int32([6]), q_len=3)
        >>> mask.start.tolist(), mask.end.tolist()
        ([1, 2, 3], [3, 4, 5])
        """
        rules = Rules(_side("left", left), _side("right", right))
        tokens = _Tokens(qo_indptr, kv_lens, positions, q_len, total_tokens)
        return _built(rules, tokens, {}, out, _INTERVAL, stream)

    @staticmethod
    def image_spans(
        spans: Any,
        qo_indptr: Any = None,
        kv_lens: Any = None,
        *,
        window: int | None = None,
        clamp: bool = False,
        q_len: int | None = None,
        total_tokens: int | None = None,
        positions: Any = None,
        out: AttentionMask | None = None,
        stream: Any = None,
    ) -> AttentionMask:
        """Show the keys up to a query's own, and all of the span of tokens that it is part of.

        The tokens of an image see each other, as in Gemma 3 and 4 and PaliGemma.

        Parameters
        ----------
        spans : array
            ``(batch, n, 2)`` int32: first and last position, inclusive, of each span of each
            request. A pair is ignored unless its first number is less than the second: pad with
            ``(0, 0)``. Or ``(total_tokens, 2)``: the span of each query token, ``(-1, -1)`` for
            none.
        window : int, optional
            Tokens before its own that a query sees, as the left side of `window` in
            :func:`cumla.attention`.
        clamp : bool
            The window also limits spans (Gemma 4). If False, the whole span is visible (Gemma 3).
        qo_indptr, kv_lens, q_len, total_tokens, positions, out, stream
            As in :meth:`windows`. Tokens of a span that are not cached yet are not visible.

        Returns
        -------
        AttentionMask
            With `start` and `end`.

        Examples
        --------
        >>> import numpy as np
        >>> from cumla import AttentionMask
        >>> spans = np.int32([[[1, 3]]])
        >>> AttentionMask.image_spans(spans, kv_lens=np.int32([6]), q_len=6).end.tolist()
        [0, 3, 3, 3, 4, 5]
        """
        clamp = checked_flag("clamp", clamp)
        rules = Rules(_side("window", window), 0, clamp=clamp)
        tokens = _Tokens(qo_indptr, _needed("kv_lens", kv_lens), positions, q_len, total_tokens)
        return _built(rules, tokens, {"spans": spans}, out, _INTERVAL, stream)

    @staticmethod
    def chunks(
        size: int,
        lookback: int = 0,
        *,
        kv_lens: Any,
        qo_indptr: Any = None,
        q_len: int | None = None,
        total_tokens: int | None = None,
        positions: Any = None,
        out: AttentionMask | None = None,
        stream: Any = None,
    ) -> AttentionMask:
        """Show the keys of a query's chunk up to its own: chunked local attention, as in Llama 4.

        Parameters
        ----------
        size : int
            Tokens of a chunk; chunks begin at multiples of it.
        lookback : int
            Chunks before it that are visible as well.
        kv_lens, qo_indptr, q_len, total_tokens, positions, out, stream
            As in :meth:`windows`.

        Returns
        -------
        AttentionMask
            With `start` and `end`.

        Examples
        --------
        >>> import numpy as np
        >>> from cumla import AttentionMask
        >>> AttentionMask.chunks(2, kv_lens=np.int32([5]), q_len=5).start.tolist()
        [0, 0, 2, 2, 4]
        """
        rules = Rules(-1, 0, _size(size), _count("lookback", lookback))
        tokens = _Tokens(qo_indptr, kv_lens, positions, q_len, total_tokens)
        return _built(rules, tokens, {}, out, _INTERVAL, stream)

    @staticmethod
    def blocks(
        size: int,
        *,
        kv_lens: Any,
        qo_indptr: Any = None,
        q_len: int | None = None,
        total_tokens: int | None = None,
        positions: Any = None,
        out: AttentionMask | None = None,
        stream: Any = None,
    ) -> AttentionMask:
        """Show the keys up to the end of a query's block: block-causal models, such as LLaDA2.

        Parameters
        ----------
        size : int
            Tokens of a block; blocks begin at multiples of it.
        kv_lens, qo_indptr, q_len, total_tokens, positions, out, stream
            As in :meth:`windows`.

        Returns
        -------
        AttentionMask
            With `start` and `end`.

        Examples
        --------
        >>> import numpy as np
        >>> from cumla import AttentionMask
        >>> AttentionMask.blocks(2, kv_lens=np.int32([5]), q_len=5).end.tolist()
        [1, 1, 3, 3, 4]
        """
        tokens = _Tokens(qo_indptr, kv_lens, positions, q_len, total_tokens)
        return _built(Rules(-1, 0, block=_size(size)), tokens, {}, out, _INTERVAL, stream)

    @staticmethod
    def causal_flags(
        flags: Any,
        *,
        kv_lens: Any,
        window: int | None = None,
        qo_indptr: Any = None,
        q_len: int | None = None,
        total_tokens: int | None = None,
        positions: Any = None,
        out: AttentionMask | None = None,
        stream: Any = None,
    ) -> AttentionMask:
        """Let each request be causal or not.

        Parameters
        ----------
        flags : array
            ``(batch,)`` bool or uint8: true for causal requests. In other requests, queries see all
            keys.
        window : int, optional
            Tokens before its own that a query sees. In requests that are not causal it sees as many
            after its own.
        kv_lens, qo_indptr, q_len, total_tokens, positions, out, stream
            As in :meth:`windows`.

        Returns
        -------
        AttentionMask
            With `start` and `end`.

        Examples
        --------
        >>> import numpy as np
        >>> from cumla import AttentionMask
        >>> flags, kv_lens = np.array([True, False]), np.int32([3, 3])
        >>> AttentionMask.causal_flags(flags, kv_lens=kv_lens, q_len=3).end.tolist()
        [0, 1, 2, 2, 2, 2]
        """
        tokens = _Tokens(qo_indptr, kv_lens, positions, q_len, total_tokens)
        rules = Rules(_side("window", window), 0)
        return _built(rules, tokens, {"flags": flags}, out, _INTERVAL, stream)

    @staticmethod
    def from_tree(
        mask: Any,
        *,
        full: bool = False,
        window: int | None = None,
        kv_lens: Any = None,
        qo_indptr: Any = None,
        q_len: int | None = None,
        total_tokens: int | None = None,
        positions: Any = None,
        out: AttentionMask | None = None,
        stream: Any = None,
    ) -> AttentionMask:
        """Show all keys before the drafts of a request, and those drafts that a tree shows.

        The drafts are the queries of the request and its last keys. A request has at most 256.

        Parameters
        ----------
        mask : array
            What each draft sees. One of

            * ``(batch, drafts, drafts)`` bool: row i, column j is true if draft i sees draft j;
              entries of more requests are ignored (SGLang's QLEN_ONLY, reshaped);
            * ``(total_tokens,)`` or ``(total_tokens, n)`` uint8, uint16, uint32 or int32: a row of
              bits for each draft, the lowest first (QLEN_ONLY_BITPACKING);
            * with ``full=True`` ``(elements,)`` bool: the rows of all requests one after another,
              each ``(q_len, kv_len)`` (SGLang's FULL_MASK, FlashInfer's custom_mask). Only the
              columns of the drafts are read; all others count as true;
            * with ``full=True`` ``(bytes,)`` uint8: the same as bits, the lowest first, those of
              each request from a whole byte on (FlashInfer's packed_custom_mask).
        full : bool
            The mask has a column for each key of a request.
        window : int, optional
            Tokens before its own position that a draft sees, among the drafts as well. Positions
            are those of nodes by their depth, so pass `positions`.
        kv_lens : array, optional
            As in :meth:`windows`. Needed with ``full=True``, and for a window without positions.
        q_len : int, optional
            As in :meth:`windows`; that of a mask ``(batch, drafts, drafts)`` by default.
        qo_indptr, total_tokens, positions, stream
            As in :meth:`windows`.
        out : AttentionMask, optional
            A mask whose `tree` and, with a window, `start` are overwritten. Drafts beyond its words
            are not visible.

        Returns
        -------
        AttentionMask
            With `tree` and, with a window, `start`. The drafts determine the number of words;
            a full mask without q_len has 8.

        Examples
        --------
        >>> import numpy as np
        >>> from cumla import AttentionMask
        >>> tree = np.array([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], bool)  # two children of draft 0
        >>> AttentionMask.from_tree(tree).tree.tolist()
        [[1], [3], [5]]
        """
        full = checked_flag("full", full)
        left = _side("window", window)
        if full:
            _needed("kv_lens", kv_lens, f" with {arg('full')}=True")
        elif left >= 0 and positions is None:
            why = f" with {arg('window')}, unless {arg('positions')} is passed"
            _needed("kv_lens", kv_lens, why)
        rules = Rules(left, 0, tree_form="all keys" if full else "drafts")
        tokens = _Tokens(qo_indptr, kv_lens, positions, q_len, total_tokens)
        written = ("start", "tree") if left >= 0 else ("tree",)
        return _built(rules, tokens, {"mask": mask}, out, written, stream)


FIELDS = tuple([field.name for field in fields(AttentionMask)])


# --- options -------------------------------------------------------------------------------------


def _side(name: str, value: int | None) -> int:
    """Check tokens on one side of a position; -1 for all."""
    if value is None:
        return -1
    return min(checked_int(name, value, "pass -1 or None for no bound", -1), MOST_TOKENS)


def _size(size: int) -> int:
    return min(checked_int("size", size, "pass its tokens"), MOST_TOKENS)


def _count(name: str, value: int) -> int:
    return min(checked_int(name, value, "pass 0 for none", 0), MOST_TOKENS)


def _needed(name: str, array: Any, why: str = "") -> Any:
    if array is None:
        raise ValueError(f"{arg(name)}: needed{why}, got None; pass the keys of each request")
    return array


@dataclass(frozen=True)
class _Tokens:
    """The query tokens of each request: an axis of requests, or offsets."""

    qo_indptr: Any
    kv_lens: Any
    positions: Any
    q_len: int | None
    total_tokens: int | None

    @property
    def arrays(self) -> dict[str, Any]:
        named = {"qo_indptr": self.qo_indptr, "kv_lens": self.kv_lens, "positions": self.positions}
        return {name: array for name, array in named.items() if array is not None}


def _built(
    rules: Rules,
    tokens: _Tokens,
    arrays: Mapping[str, Any],
    out: AttentionMask | None,
    written: Sequence[str],
    stream: Any,
) -> AttentionMask:
    """Build the arrays of a mask that are to be written."""
    q_len, total = tokens.q_len, tokens.total_tokens
    if q_len is not None and tokens.qo_indptr is not None:
        raise ValueError(
            f"{arg('q_len')}: needs no {arg('qo_indptr')} beside it, got both; pass one of them"
        )
    if out is not None:
        absent = [name for name in written if getattr(out, name) is None]
        if absent:
            raise ValueError(
                f"{arg('out')}: needs {' and '.join(written)}, got {' and '.join(absent)} None; "
                f"allocate what this mask consists of"
            )
    q_len = -1 if q_len is None else _count("q_len", q_len)
    total = -1 if total is None else _count("total_tokens", total)
    inputs = {**tokens.arrays, **arrays}
    outputs = {f"out.{name}": None if out is None else getattr(out, name) for name in written}
    options = _Options(rules, tuple(written), q_len, total, rules.tree_form == "all keys")
    results = run(_BUILD, inputs, outputs, options, stream)
    if out is not None:
        return out
    return replace(_NOTHING, **dict(zip(written, results, strict=True)))


_NOTHING = AttentionMask()


# --- the operation -------------------------------------------------------------------------------

_ROWS = "pass those of the mask that a call returned, or allocate them so"
_TABLE = {
    "qo_indptr": Array("batch+1", INT32, way_out="give each request a begin, and the last an end"),
    "kv_lens": Array("batch", INT32, way_out="give each request of the batch its entry"),
    "flags": Array("batch", ("bool", "uint8"), way_out="give each request its flag"),
    "positions": Array("total_tokens", WIDE, way_out="give each row of q its position"),
    "out.start": Array("total_tokens", INT32, "row", _ROWS),
    "out.end": Array("total_tokens", INT32, "row", _ROWS),
    "out.tree": Array("total_tokens words", TREE_DTYPES, "row", _ROWS),
}
_SHAPES_OF_SPANS = "pass the spans of each request, (batch, n, 2), or one a row, (total_tokens, 2)"
_SPANS = {
    2: Array("total_tokens 2", INT32, "row", _SHAPES_OF_SPANS),
    3: Array("batch spans 2", INT32, "row", _SHAPES_OF_SPANS),
}
_BITS = {n: Array(f"total_tokens{' n' * (n - 1)}", _BIT_DTYPES, "row") for n in (1, 2)}


class _Options(NamedTuple):
    """Options of a call; q_len and total_tokens are -1 where they are not given."""

    rules: Rules
    written: tuple[str, ...]
    q_len: int
    total_tokens: int
    full: bool


class _Call(NamedTuple):
    """A checked call."""

    built: MaskRowsArguments
    written: tuple[str, ...]


class _Build(Unplanned[_Call]):
    """Writes what is asked for of start, end and tree."""

    trusted = ("qo_indptr", "kv_lens", "mask")

    def arguments(self, views: Views, options: _Options) -> _Call:
        given = {name: view for name, view in views.items() if view is not None}
        table = dict(_TABLE)
        spans, tree, rules = given.get("spans"), given.get("mask"), options.rules
        if spans is not None:
            table["spans"] = _SPANS[3 if len(spans.shape) == 3 else 2]
        if tree is not None:
            rules = rules._replace(tree_form=_form_of_tree(tree, options.full))
            if rules.tree_form == "bits":
                table["mask"] = _BITS[len(tree.shape)]
        known = {} if options.total_tokens < 0 else {"total_tokens": options.total_tokens}
        sizes = bind(table, views, known)
        q_len = options.q_len
        if tree is not None and rules.tree_form == "drafts":
            if sizes.setdefault("batch", tree.shape[0]) > tree.shape[0]:
                raise ValueError(
                    f"{arg('mask')}: needs a tree for each of {sizes['batch']} requests, got shape "
                    f"{tree.shape}; pass one for each"
                )
            if "qo_indptr" not in given and q_len < 0:
                q_len = tree.shape[1]
        total = _total(sizes, "qo_indptr" in given, q_len)
        words = 0
        if tree is not None:
            tree = _as_bytes(tree) if rules.tree_form == "bits" else tree
            words = sizes.get("words") or _words_of(tree, rules.tree_form, q_len)
        rules = rules._replace(q_len=max(q_len, 0), total_tokens=total, words=words)
        rules = rules._replace(batch=sizes["batch"])
        if "out.tree" in given:
            check_words("out.tree", given["out.tree"])
        of_rows = {name: given.get(name) for name in (*_PLACES, "flags")}
        built = MaskRowsArguments(rules, **of_rows, spans=spans, tree=tree)
        return _Call(built, options.written)

    def check_values(self, host: Host, arguments: _Call) -> None:
        absent = {"qo_indptr": np.zeros(1, np.int32), "kv_lens": np.zeros(0, np.int32)}
        total = arguments.built.rules.total_tokens
        check_ragged_lengths(absent | dict(host), total, 1, MOST_TOKENS)
        if "mask" in host:
            _check_tree(host, arguments.built.rules)

    def outputs(self, arguments: _Call) -> tuple[Output, ...]:
        rules = arguments.built.rules
        total = (rules.total_tokens,)
        made = {
            "start": Output("out.start", total, INT32, "row"),
            "end": Output("out.end", total, INT32, "row"),
            "tree": Output("out.tree", (*total, rules.words), TREE_DTYPES, "row"),
        }
        return tuple([made[name] for name in arguments.written])

    def launches(self, arguments: _Call, outs: Sequence[ArrayView]) -> Sequence[Launch]:
        if not arguments.built.rules.total_tokens:
            return ()
        named = dict(zip(arguments.written, outs, strict=True))
        rows = [named.get(name) for name in ("start", "end", "tree")]
        return (mask_rows_launch(arguments.built, *rows),)

    def reference(self, host: Host, arguments: _Call) -> Results:
        rules = arguments.built.rules
        places = [host.get(name) for name in _PLACES]
        queries = queries_of(rules.total_tokens, rules.batch, rules.q_len, *places)
        found: dict[str, np.ndarray[Any, Any]] = {}
        if "start" in arguments.written:
            named: dict[str, Any] = {name: getattr(rules, name) for name in _SIDES}
            named |= {name: host.get(name) for name in ("spans", "flags")}
            found["start"], found["end"] = intervals(queries, **named)
        if "tree" in arguments.written:
            tree, form = host["mask"], rules.tree_form
            if form == "bits":
                tree = np.ascontiguousarray(tree.reshape(len(tree), -1)).view(np.uint8)
            found["tree"] = tree_words(queries, tree, form, rules.words, rules.left)
        results = []
        for name in arguments.written:
            out = host.get(f"out.{name}")
            if out is not None:
                out[...] = found[name].view(out.dtype)
            results.append(found[name] if out is None else out)
        return results


_BUILD = _Build()
_PLACES = ("qo_indptr", "kv_lens", "positions")
_SIDES = ("left", "right", "chunk", "lookback", "block", "clamp")


def _total(sizes: dict[str, int], has_offsets: bool, q_len: int) -> int:
    """Tell the number of query tokens, and add that of requests to the sizes."""
    rows = sizes.get("total_tokens")
    if rows is not None and q_len > 0 and rows % q_len == 0:
        sizes.setdefault("batch", rows // q_len)
    if "batch" not in sizes:
        raise ValueError(
            f"{arg('kv_lens')}: needed to tell the number of requests, got None; pass it, or "
            f"{arg('qo_indptr')}"
        )
    if not has_offsets and q_len < 0:
        raise ValueError(
            f"{arg('qo_indptr')}: needed to tell the queries of each request, got None; pass it, "
            f"or {arg('q_len')}"
        )
    if has_offsets and "total_tokens" not in sizes:
        raise ValueError(
            f"{arg('total_tokens')}: needs the number of rows of q beside {arg('qo_indptr')}, got "
            f"None; pass it, or {arg('positions')}, or {arg('out')}"
        )
    total = sizes["total_tokens"] if has_offsets else sizes["batch"] * q_len
    if sizes.get("total_tokens", total) != total:
        raise ValueError(
            f"{arg('total_tokens')}: needs batch * q_len = {total}, got {sizes['total_tokens']}; "
            f"pass arrays of as many rows"
        )
    return total


def _form_of_tree(tree: ArrayView, full: bool) -> str:
    """Check the axes of a tree mask, and tell its form."""
    axes = len(tree.shape)
    if full:
        check_dtype("mask", tree.dtype, ("bool", "uint8"), f"pass {arg('full')}=False for drafts")
        if axes != 1:
            raise ValueError(
                f"{arg('mask')}: needs one axis with {arg('full')}=True, got shape {tree.shape}; "
                f"flatten it"
            )
        check_lies("mask", tree, "row")
        return "all keys" if tree.dtype == "bool" else "bits of keys"
    if axes == 3:
        check_dtype("mask", tree.dtype, ("bool",), "compare it with 0")
        if tree.shape[1] != tree.shape[2]:
            raise ValueError(
                f"{arg('mask')}: needs shape (batch, drafts, drafts), got {tree.shape}; pass a "
                f"column for each draft, or {arg('full')}=True and a flat mask of all keys"
            )
        check_lies("mask", tree, "row")
        return "drafts"
    if axes not in _BITS or tree.dtype == "bool":
        raise ValueError(
            f"{arg('mask')}: needs shape (batch, drafts, drafts) of bool, or rows of bits, got "
            f"{tree.dtype} of shape {tree.shape}; reshape it, or pass {arg('full')}=True for a "
            f"mask of all keys"
        )
    return "bits"


def _check_tree(host: Host, rules: Rules) -> None:
    """Check mode: raise for drafts that a tree does not show, and hidden keys before drafts."""
    tree, form = host["mask"], rules.tree_form
    places = [host.get(name) for name in _PLACES[:2]] + [None]
    lengths = queries_of(rules.total_tokens, rules.batch, rules.q_len, *places).lengths
    most = tree.shape[1] if form == "drafts" else WORD * rules.words
    begin = 0  # of a request, in a mask of all keys
    for request, (q_len, kv_len) in enumerate(lengths):
        if q_len > most:
            raise ValueError(
                f"{arg('mask')}: needs at most {most} drafts a request, got {q_len} query tokens "
                f"of request {request}; the others would not be seen"
            )
        if not rules.tree_form.endswith("keys"):
            continue
        of_bits = form == "bits of keys"
        size = q_len * kv_len
        end = begin + (-(-size // 8) if of_bits else size)
        if end > len(tree):
            raise ValueError(
                f"{arg('mask')}: needs {q_len} x {kv_len} elements of request {request}, from "
                f"{begin} on, got {tree.shape}; what is missing would hide drafts"
            )
        own = tree[begin:end]
        seen = np.unpackbits(own, bitorder="little")[:size] if of_bits else own
        before = seen.reshape(q_len, kv_len)[:, : max(kv_len - q_len, 0)]
        hidden = np.argwhere(before == 0)
        if hidden.size:
            row, key = hidden[0].tolist()
            raise ValueError(
                f"{arg('mask')}: needs true for all keys before the drafts of a request, got false "
                f"for request {request}, draft {row}, key {key}; it would be seen: pass a window, "
                f"or arrays of AttentionMask"
            )
        begin = end


def _as_bytes(tree: ArrayView) -> ArrayView:
    """See rows of bits as bytes."""
    size = np.dtype(tree.dtype).itemsize
    columns = tree.shape[1] if len(tree.shape) == 2 else 1
    shape, strides = (tree.shape[0], columns * size), (tree.strides[0], 1)
    return tree._replace(shape=shape, strides=strides, dtype="uint8")


def _words_of(tree: ArrayView, form: str, q_len: int) -> int:
    """Tell the words that the drafts of a request need."""
    drafts = {"drafts": tree.shape[-1], "bits": 8 * tree.shape[-1]}.get(form, q_len)
    if drafts < 0:
        return MOST_WORDS
    if drafts > MOST_DRAFTS:
        raise ValueError(
            f"{arg('mask')}: needs at most {MOST_DRAFTS} drafts a request, got {drafts}; cut the "
            f"tree"
        )
    return max(1, -(-drafts // WORD))
