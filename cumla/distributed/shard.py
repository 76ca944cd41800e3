# SPDX-License-Identifier: Apache-2.0
"""Tokens and places of a rank: index maps, as arithmetic in the arrays' own framework."""

from __future__ import annotations

import sys
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from cumla.core.arguments import checked_int

if TYPE_CHECKING:
    from cumla.mha.mask import AttentionMask

__all__ = ["LocalLists", "LocalPages", "Shard"]

_MOST = (1 << 31) - 1  # of lengths and slots
_MOST_TOGETHER = 1 << 20  # times the ranks this is below 2 ** 31
NO_END = "take AttentionMask.windows, with left=None for a causal mask"
_FIT = "give each request its entry"


class Place(Protocol):
    """A member of a group of ranks."""

    @property
    def rank(self) -> Any:
        """Its number, an int, or a traced one inside `jax.shard_map`."""

    @property
    def world(self) -> int:
        """The number of ranks."""


class _Numbers(NamedTuple):
    rank: int
    world: int


class LocalPages(NamedTuple):
    """Pages and tokens of each request on one rank, in the order of `cumla.mla_decode`'s arguments.

    Attributes
    ----------
    block_table : array of int32, shape (requests, max_local_pages)
        Page numbers in this rank's cache.
    kv_lens : array of int32, shape (requests,)
        Tokens there that are visible.
    """

    block_table: Any
    kv_lens: Any


class LocalLists(NamedTuple):
    """The listed tokens that one rank holds, as sparse attention takes them.

    Attributes
    ----------
    indices : array of int32, in the shape of the positions
        Slots of this rank's cache, in descending order, then -1.
    topk_lens : array of int32, in their shape without the last axis
        How many slots there are.
    """

    indices: Any
    topk_lens: Any


class Shard:
    """One rank's part of a cache whose blocks of tokens are assigned to the ranks in turn.

    Tokens ``[j * block_size, (j + 1) * block_size)`` of a request belong to rank ``j % world``. All
    methods are a few operations of the framework that the arrays are of (NumPy, CuPy, PyTorch,
    JAX), on their device: nothing waits, and CUDA graphs capture them. Call them once a step.

    Parameters
    ----------
    rank, world : int
        This rank, and how many there are.
    page_size : int
        Tokens of a page in the cache of a rank, at most 2 ** 20.
    block_size : int, optional
        Tokens that stay together on a rank, page_size by default. A multiple of page_size: entry p
        of a request's block table is the page of its tokens from ``p * page_size`` on, a number in
        the cache of the rank that holds them. Or a smaller divisor of it: entry p is one page
        number for all ranks, whose pages together hold the tokens from ``p * world * page_size``
        on.

    Raises
    ------
    TypeError, ValueError
        A number does not fit.

    Examples
    --------
    >>> import numpy as np
    >>> from cumla.distributed import Shard
    >>> kv_lens, block_table = np.int32([130, 5]), np.int32([[0, 0, 1], [2, 1, 3]])
    >>> for rank in range(2):
    ...     pages = Shard(rank, 2, page_size=64).pages(kv_lens, block_table)
    ...     print(pages.block_table.tolist(), pages.kv_lens.tolist())
    [[0, 1], [2, 3]] [66, 5]
    [[0, 1], [1, 3]] [64, 0]
    """

    def __init__(
        self, rank: int, world: int, *, page_size: int = 64, block_size: int | None = None
    ) -> None:
        world = checked_int("world", world, "count the ranks of the group")
        rank = checked_int("rank", rank, "ranks count from 0", 0)
        if rank >= world:
            raise ValueError(
                f"rank: needs a number below the world of {world}, got {rank}; ranks count from 0"
            )
        self._make(_Numbers(rank, world), page_size, block_size)

    def _make(self, place: Place, page_size: int, block_size: int | None) -> None:
        self._place = place
        self.page_size = checked_int("page_size", page_size, "pass that of the cache")
        if block_size is None:
            block_size = self.page_size
        self.block_size = checked_int("block_size", block_size, "leave it out for one page")
        if self.block_size % self.page_size and self.page_size % self.block_size:
            raise ValueError(
                f"block_size: needs a multiple or a divisor of page_size {page_size}, got "
                f"{block_size}; leave it out for blocks of one page"
            )
        if max(self.block_size, self.page_size) > _MOST_TOGETHER:
            raise ValueError(
                f"block_size: needs blocks and pages of at most {_MOST_TOGETHER} tokens, got "
                f"{block_size} and {page_size}; leave it out for blocks of one page"
            )

    @property
    def rank(self) -> Any:
        """Number of this rank: an int, or a traced one inside `jax.shard_map`."""
        return self._place.rank

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self._place.world

    def pages(
        self,
        kv_lens: Any,
        block_table: Any,
        *,
        q_len: int = 1,
        qo_indptr: Any = None,
        total_tokens: int | None = None,
    ) -> LocalPages:
        """Return what this rank holds of each request that `kv_lens` and `block_table` describe.

        Causal masks reach the ranks as lengths. With q_len or qo_indptr every query token becomes a
        request of its own with the tokens that it sees: call the attention with one query per
        request, ``batch * q_len`` or total_tokens of them, as `ContextParallel.attend` does.

        Parameters
        ----------
        kv_lens : array
            ``(batch,)`` int32: tokens of each request on all ranks, those of its queries included.
            Clamped to ``[0, what a row of block_table holds]``.
        block_table : array
            ``(batch, max_pages)`` int32, as the class says.
        q_len : int
            Query tokens of each request: number i sees ``kv_lens - (q_len - 1 - i)`` tokens.
        qo_indptr : array, optional
            ``(batch + 1,)`` int32: where the query tokens of each request begin, in place of q_len.
            Tokens of no request see nothing.
        total_tokens : int, optional
            With qo_indptr, and only then: how many query tokens there are.

        Returns
        -------
        LocalPages
            For batch requests, ``batch * q_len`` or total_tokens.

        Raises
        ------
        TypeError, ValueError
            Shapes or numbers do not fit.
        """
        batch, columns = _table_shape(block_table)
        check_shape("kv_lens", kv_lens, "(batch,)", (batch,))
        q_len = checked_int("q_len", q_len, "count the query tokens of a request")
        seen = kv_lens.clip(0, min(columns * self._entry_tokens, _MOST))
        if (qo_indptr is None) != (total_tokens is None) or (q_len > 1 and qo_indptr is not None):
            raise ValueError(
                "qo_indptr: needs total_tokens beside it, and no q_len; pass both of them, or q_len"
            )
        if qo_indptr is not None:
            check_shape("qo_indptr", qo_indptr, "(batch + 1,)", (batch + 1,))
            total = checked_int("total_tokens", total_tokens, "count the rows of q", 0)
            rows, seen = _seen_by_tokens(seen, qo_indptr, total)
        elif q_len > 1:
            tokens = arange(batch * q_len, kv_lens)
            rows = tokens // q_len
            seen = seen[rows] - (q_len - 1 - tokens % q_len)
        else:
            rows = None
        return LocalPages(self._own_table(block_table, rows), self._local(seen.clip(0, _MOST)))

    def slots(self, block_table: Any, batch_indices: Any, positions: Any) -> Any:
        """Return the slots to which this rank writes new tokens; -1 for tokens of other ranks.

        Pass the result to :func:`cumla.append_mla_cache` or :func:`cumla.append_kv_cache` as
        slot_mapping, and the positions beside it where they are needed for the rotation.

        Parameters
        ----------
        block_table : array
            ``(batch, max_pages)`` int32, as for :meth:`pages`.
        batch_indices, positions : array
            ``(tokens,)`` int32 or int64: the request of each token, and its position there. A token
            whose request, position or page does not exist has slot -1.

        Returns
        -------
        array
            ``(tokens,)``: ``page * page_size + offset``, below 2 ** 31.

        Raises
        ------
        ValueError
            Shapes do not fit.
        """
        batch, columns = _table_shape(block_table)
        check_shape("positions", positions, "of batch_indices", tuple(batch_indices.shape))
        xp = namespace(block_table)
        capacity = min(columns * self._entry_tokens, _MOST)
        own = (positions // self.block_size) % self.world == self.rank
        known = (positions >= 0) & (positions < capacity)
        known = known & (batch_indices >= 0) & (batch_indices < batch)
        if not batch or not columns:
            return xp.where(own & known, positions, -1)
        at = positions.clip(0, capacity - 1)
        page = block_table[batch_indices.clip(0, batch - 1), at // self._entry_tokens]
        exists = (page >= 0) & (page < _MOST // self.page_size)
        slot = page * self.page_size + self._local_position(at) % self.page_size
        return xp.where(own & known & exists, slot, -1)

    def mask(self, mask: AttentionMask) -> AttentionMask:
        """Take this rank's part of a mask: windows, chunks, prefixes, and causal queries together.

        Pass it to :meth:`ContextParallel.attend` with :func:`cumla.attention`, with the rank's
        ``pages(kv_lens, block_table)`` without q_len: the cache of a
        request is then read once for all of its queries.

        Parameters
        ----------
        mask : cumla.AttentionMask
            ``end``, and where they are needed ``start`` and ``prefix_len``, in positions of the
            requests. :meth:`cumla.AttentionMask.windows` with ``left=None`` is a causal one.

        Returns
        -------
        cumla.AttentionMask
            The same for the tokens of this rank.

        Raises
        ------
        ValueError
            A tree, whose keys are on several ranks; no end.

        Examples
        --------
        >>> import numpy as np
        >>> from cumla import AttentionMask
        >>> from cumla.distributed import Shard
        >>> mask = AttentionMask.windows(99, kv_lens=np.int32([300]), q_len=2)
        >>> mask.start.tolist(), mask.end.tolist()
        ([199, 200], [298, 299])
        >>> own = Shard(1, 2, page_size=64).mask(mask)
        >>> own.start.tolist(), own.end.tolist()
        ([71, 72], [127, 127])
        """
        for name in ("tree", "tree_start"):
            if getattr(mask, name) is not None:
                raise ValueError(
                    f"mask: needs no {name}, whose keys are on several ranks; attend to the "
                    f"tree's own keys in a call of their own, and merge with ContextParallel.merge"
                )
        if mask.end is None:
            raise ValueError(f"mask: needs end over a cache that is cut, got None; {NO_END}")

        def before(ends: Any) -> Any:
            return None if ends is None else as_int32(self._local(ends.clip(0, _MOST)))

        end = as_int32(self._local(mask.end.clip(-1, _MOST - 1) + 1) - 1)
        return replace(mask, start=before(mask.start), end=end, prefix_len=before(mask.prefix_len))

    def lists(self, positions: Any, block_table: Any, row_to_request: Any = None) -> LocalLists:
        """Return which of the listed tokens this rank holds, for sparse attention.

        Parameters
        ----------
        positions : array
            ``(rows, topk)`` or ``(batch, q_len, topk)`` int32: positions in the requests, as
            :meth:`ContextParallel.top_k` returns them. Those that do not exist are left out.
        block_table : array
            ``(batch, max_pages)`` int32, as for :meth:`pages`.
        row_to_request : array, optional
            ``(rows,)`` int32: the request of each row of positions. Row i is of request i without
            it.

        Returns
        -------
        LocalLists
            In the shape of positions: pass both to :func:`cumla.mla_sparse_decode` or
            :func:`cumla.mla_sparse_attention`, and the result to :meth:`ContextParallel.merge`.

        Raises
        ------
        ValueError
            Shapes do not fit.
        """
        shape = tuple(positions.shape)
        batch, _ = _table_shape(block_table)
        rows = batch if row_to_request is None else shape[0]
        if len(shape) not in (2, 3) or shape[0] != rows:
            axes = "(batch, topk) or (batch, q_len, topk)"
            raise ValueError(
                f"positions: needs shape {axes} for {batch} rows of block_table, got {shape}; pass "
                f"row_to_request for rows of other requests"
            )
        if row_to_request is None:
            row_to_request = arange(rows, positions)
        else:
            check_shape("row_to_request", row_to_request, "(rows,)", (rows,))
        xp = namespace(positions)
        requests = row_to_request.reshape(-1, *(1,) * (len(shape) - 1))
        requests = xp.broadcast_to(requests, shape).reshape(-1)
        slots = self.slots(block_table, requests, positions.reshape(-1)).reshape(shape)
        ordered = xp.sort(-slots)
        ordered = -getattr(ordered, "values", ordered)  # PyTorch sorts into a pair
        held = (slots >= 0).sum(-1)
        return LocalLists(*(as_int32(array) for array in (ordered, held)))

    def blocks(self, block_indices: Any, block_size: int) -> Any:
        """Return which of the listed blocks this rank holds, for block-sparse attention.

        Parameters
        ----------
        block_indices : array
            Of any shape, int32 or int64: blocks of the requests, as
            :meth:`ContextParallel.select_blocks` returns them.
        block_size : int
            Tokens of a block, a divisor of this object's own block_size: a block is on one rank.

        Returns
        -------
        array
            int32 of the same shape: numbers of blocks among those of this rank, and -1, which
            stands for nothing, in place of the others. For :func:`cumla.block_sparse_attention`
            over ``pages(...)``.

        Raises
        ------
        TypeError, ValueError
            A block_size that does not divide.

        Examples
        --------
        >>> import numpy as np
        >>> from cumla.distributed import Shard
        >>> lists = np.int32([[[0, 3, 4, 9]]])
        >>> for rank in range(2):
        ...     print(Shard(rank, 2, page_size=64).blocks(lists, 32).tolist())
        [[[0, -1, 2, 5]]]
        [[[-1, 1, -1, -1]]]
        """
        shard, xp = self._of_blocks(block_size), namespace(block_indices)
        own = (block_indices >= 0) & (block_indices // shard.block_size % self.world == self.rank)
        return as_int32(xp.where(own, shard._local_position(block_indices), -1))

    def _of_blocks(self, block_size: int) -> Any:
        """Deal out blocks of tokens as this object does tokens."""
        size = checked_int("block_size", block_size, "pass the tokens of a block")
        if self.block_size % size:
            raise ValueError(
                f"block_size: needs a divisor of {self.block_size}, the tokens that are together "
                f"on a rank, got {block_size}; make {type(self).__name__} with a block_size that "
                f"is a multiple"
            )
        dealt = copy(self)
        dealt.block_size = self.block_size // size
        return dealt

    @property
    def _entry_tokens(self) -> int:
        """Tokens that an entry of a block table stands for, on all ranks together."""
        shared = self.block_size < self.page_size
        return self.page_size * self.world if shared else self.page_size

    def _local(self, lengths: Any) -> Any:
        """Count the tokens of this rank among the first ones of a request."""
        size, period = self.block_size, self.block_size * self.world
        return lengths // period * size + (lengths % period - self.rank * size).clip(0, size)

    def _local_position(self, positions: Any) -> Any:
        """Place of a token among those of its rank."""
        size, period = self.block_size, self.block_size * self.world
        return positions // period * size + positions % size

    def _position(self, local: Any) -> Any:
        """Position of a token in its request, from its place among those of this rank."""
        size, period = self.block_size, self.block_size * self.world
        return local // size * period + self.rank * size + local % size

    def _own_table(self, block_table: Any, rows: Any) -> Any:
        """Take this rank's entries of some rows of a block table, or of all.

        There are as many on each rank: where a rank has fewer, the last of the table repeats.
        """
        if self.block_size < self.page_size:
            return block_table if rows is None else block_table[rows]
        batch, columns = block_table.shape
        pages = self.block_size // self.page_size
        period = pages * self.world
        local = arange(min(-(-columns // period) * pages, columns), block_table)
        there = local // pages * period + self.rank * pages + local % pages
        rows = arange(batch, block_table) if rows is None else rows
        return block_table[rows[:, None], there.clip(0, max(columns - 1, 0))[None]]


def namespace(array: Any) -> Any:
    """Find the module of array functions for an array; nothing is imported."""
    for name, kind in (("torch", "Tensor"), ("cupy", "ndarray"), ("jax", "Array")):
        module = sys.modules.get(name)
        if isinstance(array, getattr(module, kind, ())):
            return sys.modules["jax.numpy"] if name == "jax" else module
    return np


def arange(size: int, like: Any) -> Any:
    """Count in int32, on the device of another array."""
    xp = namespace(like)
    place = {"device": like.device} if xp is sys.modules.get("torch") else {}
    return xp.arange(size, dtype=xp.int32, **place)


def as_int32(array: Any) -> Any:
    if namespace(array) is sys.modules.get("torch"):
        return array.int()
    return array.astype(np.int32)


def _seen_by_tokens(seen: Any, qo_indptr: Any, total: int) -> tuple[Any, Any]:
    """Find the request of each query token, and what it sees there if it belongs to any."""
    batch = seen.shape[0]
    tokens = arange(total, seen)
    if not batch:
        raise ValueError("qo_indptr: needs at least one request, got none; skip the call")
    rows = namespace(seen).searchsorted(qo_indptr, tokens, side="right") - 1
    rows = rows.clip(0, batch - 1)
    begin, end = qo_indptr[rows], qo_indptr[rows + 1]
    return rows, (seen[rows] - (end - 1 - tokens)) * ((tokens >= begin) & (tokens < end))


def _table_shape(block_table: Any) -> tuple[int, int]:
    shape = tuple(block_table.shape)
    if len(shape) != 2:
        raise ValueError(
            f"block_table: needs shape (batch, max_pages), got {shape}; give each request a row"
        )
    return shape


def check_shape(name: str, array: Any, axes: str, shape: tuple[int, ...]) -> None:
    if tuple(array.shape) != shape:
        raise ValueError(f"{name}: needs shape {axes} = {shape}, got {tuple(array.shape)}; {_FIT}")
