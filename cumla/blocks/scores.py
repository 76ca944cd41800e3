# SPDX-License-Identifier: Apache-2.0
"""Scores of blocks: :func:`block_scores`."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cumla import reference
from cumla.blocks.attention import (
    LENGTHS,
    check_columns,
    check_lengths,
    check_offsets_given,
)
from cumla.core.arguments import WIDE, Array, bind, check_dtype, check_layout
from cumla.core.names import arg
from cumla.core.operation import Operation, Output
from cumla.core.paged import check_rows, check_table_lengths, checked_pages
from cumla.core.spec import Option, Out, Spec, array, flag, integer, optional
from cumla.launch.blocks.block_rows import ROW_BYTES, Tokens, block_rows_launch
from cumla.launch.blocks.block_scores import (
    COLUMNS,
    KEYS_AT_ONCE,
    MOST_HEADS,
    BlockScoresArguments,
    block_scores_launch,
)
from cumla.launch.blocks.block_scores_few import block_scores_few_launch, has_few_rows
from cumla.launch.blocks.block_scores_pooled import block_scores_pooled_launch, has_few_pooled
from cumla.launch.blocks.block_scores_prompts import block_scores_prompts_launch, has_prompts
from cumla.launch.blocks.block_scores_sums import (
    MOST_GROUP_HEADS,
    BlockScoresSumsArguments,
    block_scores_sums_launch,
)
from cumla.launch.device import require_hopper
from cumla.mha.arguments import E4M3

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cumla.core.arguments import Views
    from cumla.core.arrays import ArrayView
    from cumla.core.operation import Launchable
    from cumla.core.paged import Host, Results
    from cumla.launch.kernel import Launch

__all__ = ["block_scores"]

Scored = BlockScoresArguments | BlockScoresSumsArguments
_ACTIVATIONS = ("none", "relu")
_TABLE = {
    "weights": Array("total_tokens num_heads", ("float32",)),
    "block_indices": Array(
        "total_tokens lists topk", WIDE, way_out="give each query token its lists"
    ),
}


def checked_activation(name: str, value: Any) -> str:
    """Check how a product counts."""
    if value not in _ACTIVATIONS:
        raise ValueError(
            f"{arg(name)}: needs {' or '.join(map(repr, _ACTIVATIONS))}, got {value!r}; pass one "
            f"of them"
        )
    return _ACTIVATIONS[_ACTIVATIONS.index(value)]


BLOCK_SCORES = Spec(
    "block_scores",
    (
        array("q"),
        array("keys"),
        integer("block_size", "pass the tokens of a block"),
        array("kv_lens"),
        array("block_table"),
        optional("qo_indptr"),
        flag("causal", True),
        optional("weights"),
        Option("activation", _ACTIVATIONS[0], checked_activation, "str"),
        integer("num_groups", "leave it out for a score of each head", None),
        integer("stride", "pass the tokens of a row of keys", 1),
        optional("block_indices"),
        Out("out"),
    ),
    positional=2,
    kernels=("block_rows", "block_scores_"),
    returns=("out",),
)


@BLOCK_SCORES
def block_scores(
    q: Any,
    keys: Any,
    *,
    block_size: int,
    kv_lens: Any,
    block_table: Any,
    qo_indptr: Any = None,
    causal: bool = True,
    weights: Any = None,
    activation: str = "none",
    num_groups: int | None = None,
    stride: int = 1,
    block_indices: Any = None,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """Score the blocks of each request: the largest product of a query row with keys of the block.

    With the keys of block b that a query token sees, up to its own position, and for each head of
    the indexer, ``score[b] = max(q @ keys.T)``. With num_groups, heads are divided into so many
    groups of neighbours, and a key counts with ``sum(weights[h] * f(q[h] @ key))`` over the heads
    of a group, where f is the activation. Blocks of which it sees no key have score -inf. A NaN
    product makes the score NaN. Devices and streams are as in :func:`cumla.attention`; arrays
    on the CPU are computed by :func:`cumla.reference.block_scores`.

    Parameters
    ----------
    q : array
        ``(total_tokens, heads, columns)`` with qo_indptr, or ``(batch, q_len, heads, columns)``
        without: query rows of the indexer, bfloat16, float16 or float8_e4m3fn (or uint8 with its
        bits). Up to 32 heads, with num_groups 32 of a group; 64, 128 or 256 columns. Last axis
        contiguous, other strides multiples of 16 bytes.
    keys : array
        Pages ``(num_pages, page_size // stride, columns)`` of q's dtype, of one key head that all
        heads use. A page has whole blocks. Strides as for q.
    block_size : int
        Tokens of a block: stride, or a multiple of 16 * stride.
    kv_lens, block_table, qo_indptr, causal
        As in :func:`cumla.block_sparse_attention`.
    weights : array, optional
        ``(total_tokens, heads)`` float32 factors, any strides; 1 by default. They may be negative.
    activation : str
        ``"relu"``: negative products count as 0. ``"none"``: as they are.
    num_groups : int, optional
        The groups of heads, of which each has one score; by default each head has its own.
    stride : int
        The tokens of which a row of keys is made: 1, or more where keys are pooled. A query token
        sees a pooled key if it sees all of its tokens.
    block_indices : array, optional
        ``(total_tokens, groups or 1, topk)`` int32 or int64, any strides: the blocks to score, for
        each group or for all. By default all blocks. Entries that are negative or name a block of
        which the query token sees no key have score -inf.
    out : array, optional
        ``(total_tokens, groups, width)`` float32, rows contiguous, any other strides; written and
        returned. The width is ``max_pages * page_size // block_size``, or topk; the groups are
        heads without num_groups. With q of four axes, total_tokens is ``batch * q_len``.
    stream : optional
        As in :func:`cumla.mla_decode`.

    Returns
    -------
    array
        The scores, as out, for :func:`cumla.select_blocks`.

    Raises
    ------
    TypeError, ValueError, CumlaError
        As :func:`cumla.mla_decode`.

    Notes
    -----
    Products are added up in float32. Page numbers outside of the cache give -inf. The same call
    gives the same bits, whatever else is in the batch.

    Source: the indexers of MiniMax M3 (MSA), Qwen (QSA: ``num_groups=1, activation="relu"`` over
    pooled keys) and Step 5 (a group for each kv head, and weights).

    Examples
    --------
    >>> import numpy as np, cumla
    >>> q = np.ones((1, 1, 2, 64), np.float16)
    >>> keys = np.arange(4, dtype=np.float16)[:, None, None] * np.ones((4, 16, 64), np.float16)
    >>> cumla.block_scores(
    ...     q, keys, block_size=16, kv_lens=np.int32([40]), block_table=np.int32([[3, 1, 2, 0]]))
    array([[[192.,  64., 128., -inf],
            [192.,  64., 128., -inf]]], dtype=float32)

    Keys of 4 tokens each, and the sum over both heads:

    >>> cumla.block_scores(
    ...     q, keys[:, :4], block_size=4, stride=4, num_groups=1, activation="relu",
    ...     kv_lens=np.int32([23]), block_table=np.int32([[3, 1]]))
    array([[[384., 384., 384., 384., 128., -inf, -inf, -inf]]], dtype=float32)
    """
    return _BLOCK_SCORES.call(
        *(q, keys, block_size, kv_lens, block_table, qo_indptr, causal, weights, activation),
        *(num_groups, stride, block_indices, out, stream),
    )


class _Arguments(NamedTuple):
    launched: Scored
    qo_indptr: ArrayView | None
    kv_lens: ArrayView

    @property
    def rows(self) -> int:
        return prod(self.launched.q.shape[:-2])


class _BlockScores(Operation[_Arguments, int]):
    """Scores; its key is the number of query tokens of which rows are to be found first."""

    trusted = tuple(LENGTHS)

    def arguments(self, views: Views, options: Any) -> _Arguments:
        given = {name: view for name, view in views.items() if view is not None}
        q = given["q"]
        launched = checked_index(given, options)
        check_offsets_given("qo_indptr" in given, len(q.shape))
        sizes = bind(LENGTHS, views, {"batch": q.shape[0]} if len(q.shape) == 4 else {})
        check_rows(launched.block_table, sizes["batch"])
        return _Arguments(launched, given.get("qo_indptr"), given["kv_lens"])

    def outputs(self, arguments: _Arguments) -> tuple[Output, ...]:
        a = arguments.launched
        groups = a.groups if isinstance(a, BlockScoresSumsArguments) else a.q.shape[-2]
        shape = arguments.rows, groups, a.width
        return (Output("out", shape, ("float32",), "row"),)

    def key(self, arguments: _Arguments, device: int) -> int:
        require_hopper(device)
        return 0 if has_few(arguments.launched) else arguments.rows

    def workspace_bytes(self, key: int) -> int:
        return ROW_BYTES * key

    def recipe(
        self, key: int, arguments: _Arguments, outs: Sequence[ArrayView], buffer: int
    ) -> Sequence[Launchable]:
        a = arguments.launched
        if 0 in outs[0].shape:
            return ()
        if not key:
            lengths = arguments.kv_lens.ptr, arguments.kv_lens.strides[0]
            return (launch_of_few(lengths, a, outs[0]),)
        tokens = Tokens(arguments.rows, a.block_table.shape[0], a.causal)
        rows = block_rows_launch(tokens, buffer, arguments.qo_indptr, arguments.kv_lens)
        return rows, launch_of_rows(buffer, a, outs[0])

    def check_values(self, host: Host, arguments: _Arguments) -> None:
        a = arguments.launched
        check_lengths(host, arguments.rows)
        table = np.broadcast_to(np.int32(0), a.block_table.shape)
        stride = a.stride if isinstance(a, BlockScoresSumsArguments) else 1
        check_table_lengths(host["kv_lens"], table, a.keys.shape[1] * stride)

    def reference(self, host: Host, arguments: _Arguments) -> Results:
        a = arguments.launched
        given: dict[str, Any] = {**host, "block_size": a.block_size, "causal": a.causal}
        if isinstance(a, BlockScoresSumsArguments):
            given |= {"num_groups": a.groups, "stride": a.stride}
            given["activation"] = _ACTIVATIONS[a.is_relu]
        return (reference.block_scores(**given),)


def has_few(arguments: Scored) -> bool:
    """Whether a kernel for few query rows serves a call whose requests have as many of them."""
    a = arguments
    return has_few_rows(a) if isinstance(a, BlockScoresArguments) else has_few_pooled(a)


def launch_of_few(kv_lens: tuple[int, int], arguments: Scored, out: ArrayView) -> Launch:
    """Describe how to score by such a kernel; `kv_lens` are an address of lengths, their stride."""
    if isinstance(arguments, BlockScoresSumsArguments):
        return block_scores_pooled_launch(kv_lens, arguments, out)
    return block_scores_few_launch(kv_lens, arguments, out)


def launch_of_rows(rows: int, arguments: Scored, out: ArrayView) -> Launch:
    """Describe how to score; `rows` is the address of what each query token sees."""
    if isinstance(arguments, BlockScoresSumsArguments):
        sums = block_scores_prompts_launch if has_prompts(arguments) else block_scores_sums_launch
        return sums(rows, arguments, out)
    return block_scores_launch(rows, arguments, out)


def has_maxima(heads: int, options: Any) -> bool:
    """Whether each head has a score of its own, the largest product."""
    return (
        (options.activation, options.stride) == ("none", 1)
        and options.num_groups in (None, heads)
        and options.block_size != options.stride
    )


def checked_index(given: dict[str, ArrayView], options: Any) -> Scored:
    """Check all but the lengths."""
    q, keys, stride = given["q"], given["keys"], options.stride
    heads = q.shape[-2] if len(q.shape) > 2 else 0
    groups = options.num_groups
    if not {"weights", "block_indices"} & given.keys() and has_maxima(heads, options):
        return checked_scores(given, options.block_size, options.causal)
    _check_rows(q, keys)
    if not heads:
        raise ValueError(f"{arg('q')}: needs heads, got shape {q.shape}; reshape it")
    if groups is None:
        groups = heads
    check_groups(heads, groups)
    rows = checked_block_rows(keys.shape[1], options.block_size, stride)
    table = checked_pages({"block_table": given["block_table"]})
    check_columns(table.shape[1], keys.shape[1] * stride)
    sizes = bind(_TABLE, given, {"total_tokens": prod(q.shape[:-2]), "num_heads": heads})
    if sizes.get("lists", 1) not in (1, groups):
        raise ValueError(
            f"{arg('block_indices')}: needs lists for each of the {groups} groups of heads, or one "
            f"for all, got shape {given['block_indices'].shape}; transpose it, or pass num_groups"
        )
    return BlockScoresSumsArguments(
        *(q, keys, table, rows, stride, groups, given.get("weights")),
        *(options.activation == "relu", given.get("block_indices"), options.causal),
    )


def check_groups(heads: int, groups: int) -> None:
    """Check the groups of heads."""
    if heads % groups or heads // groups > MOST_GROUP_HEADS:
        raise ValueError(
            f"{arg('num_groups')}: needs a divisor of the {heads} heads of {arg('q')}, and up to "
            f"{MOST_GROUP_HEADS} heads of a group, got {groups}; pad groups with zero queries"
        )


def checked_block_rows(page_rows: int, block_size: int, stride: int) -> int:
    """Check the size of a block, and return its rows of keys."""
    rows = block_size // stride
    if block_size % stride or (rows > 1 and rows % KEYS_AT_ONCE) or page_rows % max(rows, 1):
        raise ValueError(
            f"{arg('block_size')}: needs the stride {stride}, or a multiple of "
            f"{KEYS_AT_ONCE * stride} that divides the {page_rows * stride} tokens of a page, "
            f"got {block_size}; pass the tokens of a pooled key as both"
        )
    return rows


def checked_scores(
    given: dict[str, ArrayView], block_size: int, causal: bool = True
) -> BlockScoresArguments:
    """Check all but the lengths."""
    q, keys = given["q"], given["keys"]
    _check_rows(q, keys)
    if not 1 <= q.shape[-2] <= MOST_HEADS:
        raise ValueError(
            f"{arg('q')}: needs 1 to {MOST_HEADS} heads, got {q.shape[-2]}; cut them into several "
            f"calls"
        )
    if block_size % KEYS_AT_ONCE or keys.shape[1] % block_size:
        raise ValueError(
            f"{arg('block_size')}: needs a multiple of {KEYS_AT_ONCE} that divides the page size "
            f"{keys.shape[1]}, got {block_size}; use pages of whole blocks"
        )
    table = checked_pages({"block_table": given["block_table"]})
    check_columns(table.shape[1], keys.shape[1])
    return BlockScoresArguments(q, keys, table, block_size, causal)


def _check_rows(q: ArrayView, keys: ArrayView) -> None:
    """Check query rows and keys."""
    for name, view, axes in (
        ("q", q, "(total_tokens, heads, columns) or (batch, q_len, heads, columns)"),
        ("keys", keys, "(num_pages, page_size, columns)"),
    ):
        check_dtype(name, view.dtype, ("bfloat16", "float16", *E4M3))
        if len(view.shape) not in ((3, 4) if name == "q" else (3,)) or (
            view.shape[-1] not in COLUMNS
        ):
            raise ValueError(
                f"{arg(name)}: needs shape {axes} with {', '.join(map(str, COLUMNS))} columns, got "
                f"{view.shape}; reshape it, or pad the columns with zeros"
            )
        check_layout(name, view)
    if (q.dtype in E4M3) != (keys.dtype in E4M3) or (q.dtype not in E4M3 and q.dtype != keys.dtype):
        raise TypeError(
            f"{arg('keys')}: needs the dtype of {arg('q')}, {q.dtype}, got {keys.dtype}; convert "
            f"the query rows"
        )
    if q.shape[-1] != keys.shape[-1]:
        raise ValueError(
            f"{arg('keys')}: needs the {q.shape[-1]} columns of {arg('q')}, got shape "
            f"{keys.shape}; pass the cache of this layer"
        )
    if not keys.shape[1]:
        raise ValueError(f"{arg('keys')}: needs pages of tokens, got shape {keys.shape}; fill them")


_BLOCK_SCORES = _BlockScores(BLOCK_SCORES)
