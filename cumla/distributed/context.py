# SPDX-License-Identifier: Apache-2.0
"""Attention over a cache that is cut among ranks: :class:`ContextParallel`."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import cumla
from cumla.core.arguments import checked_flag, checked_int
from cumla.distributed.groups import group_of
from cumla.distributed.shard import NO_END, Shard, arange, as_int32, check_shape, namespace
from cumla.mla.shape import WIDTH, width_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["ContextParallel"]

_NONE = (1 << 31) - 1  # behind all positions and blocks
_SPARSE = (cumla.mla_sparse_decode, cumla.mla_sparse_attention, cumla.MLASparsePlan.run)
_REFUSED = {
    "out": "results are merged into new memory: leave it out",
    "lse": "results are merged into new memory: leave it out",
    "stream": "the exchange runs on the framework's current stream: make this one current",
    "window": "call attention with ContextParallel.mask of AttentionMask.windows; or keep a cache "
    "that is no longer than the window whole on each rank",
    "kv_indices": "pages of a rank are told by a table: pass block_table",
    "kv_indptr": "pages of a rank are told by a table: pass block_table",
}


def _latent_columns(queries: Sequence[Any]) -> int:
    """Return the columns of values of MLA, by those of its queries: in one array, or in a pair."""
    columns: int = queries[0].shape[-1]
    return columns if len(queries) > 1 else (width_of(columns) or WIDTH)[0]


class ContextParallel(Shard):
    """A rank of a group over which a cache is cut along its tokens.

    Every rank calls :meth:`attend` with the queries of all heads and gets the result for its share
    of the heads: attention over its own tokens, one exchange, one merge. The result does not depend
    on how the ranks are timed: partial results are merged in the order of the ranks, so the same
    call gives the same bits.

    Parameters
    ----------
    group : process group, NCCL communicator or str
        A process group of `torch.distributed`, such as ``torch.distributed.group.WORLD``; a
        ``cupy.cuda.nccl.NcclCommunicator``; or the name of a mesh's axis, for use inside
        `jax.shard_map`. Timeouts and errors of a rank that fails are those of the group.
    page_size, block_size : int
        As in :class:`Shard`, whose methods return the pages and slots of a rank.
    symmetric_memory : bool
        Let the ranks of a process group read each other's results, through memory that PyTorch maps
        on all of them (`torch.distributed._symmetric_memory`), in place of an exchange by NCCL:
        faster for few query tokens. For GPUs of one host that reach each other. Calls of one
        object must follow each other on the device, and the first one of a size maps memory. As
        with any collective, a rank that raises alone is out of step with the others afterwards.

    Raises
    ------
    TypeError, ValueError
        An unknown kind of group, or one without this process; a number does not fit.

    Examples
    --------
    >>> import torch, cumla
    >>> from cumla.distributed import ContextParallel
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> parallel = ContextParallel(torch.distributed.group.WORLD)
    >>> q = torch.ones(2, 1, 16, 576, dtype=torch.float16)
    >>> kv_cache = torch.ones(4, 64, 576, dtype=torch.float16)
    >>> kv_lens = torch.tensor([100, 7], dtype=torch.int32)
    >>> block_table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    >>> pages = parallel.pages(kv_lens, block_table)
    >>> out, lse = parallel.attend(cumla.mla_decode, q, kv_cache, *pages)
    >>> out.shape, lse.shape
    (torch.Size([2, 1, 16, 512]), torch.Size([2, 1, 16]))
    >>> torch.distributed.destroy_process_group()
    """

    def __init__(
        self,
        group: Any,
        *,
        page_size: int = 64,
        block_size: int | None = None,
        symmetric_memory: bool = False,
    ) -> None:
        self._group = group_of(group, symmetric_memory)
        self._make(self._group, page_size, block_size)

    def attend(
        self,
        attention: Callable[..., Any],
        q: Any,
        *arrays: Any,
        gather: bool = False,
        **options: Any,
    ) -> cumla.AttentionState:
        """Attend to this rank's tokens, and merge with what the other ranks have found.

        Parameters
        ----------
        attention : callable
            :func:`cumla.mla_decode`, :func:`cumla.mla_attention`, :func:`cumla.attention`,
            :func:`cumla.block_sparse_attention` with this rank's :meth:`blocks`, or the ``run`` of
            one of their plans, updated with this rank's kv_lens. What a `functools.partial` of one
            binds by name is as if it were passed here.
        q : array or pair of arrays
            Queries, of all heads, the same on every rank: ``(batch, q_len, num_heads, columns)``
            or ``(total_tokens, num_heads, columns)``. Unless causal is False, every query token
            becomes a separate request: take the pages from :meth:`pages` with the q_len or the
            qo_indptr of the queries, and make a plan for total_tokens requests of q_len 1. With a
            :meth:`mask` they stay together, and so do the pages.
        *arrays, **options
            The rest as `attention` takes it, with the cache and the pages of this rank. sinks come
            to all ranks, and are counted once. With ``causal=False`` queries see all tokens of a
            request, as a chunk of a prefill sees those before it, and qo_indptr may divide them.
        gather : bool
            Return the result of all heads on every rank. It takes more time; num_heads may be any.

        Returns
        -------
        AttentionState
            out and lse in the shapes of `attention`, for heads
            ``[rank * num_heads / world, (rank + 1) * num_heads / world)``, or for all of them.

        Raises
        ------
        TypeError, ValueError
            num_heads is no multiple of the ranks; arrays of another framework than the group's;
            out, lse, stream, window, or a list of pages; or as `attention`.
        """
        while isinstance(attention, partial):
            if attention.args:
                raise TypeError(
                    f"attention: needs a functools.partial without positional arguments, which "
                    f"would come before q, got {len(attention.args)} of them; bind them by name, "
                    f"or pass them to attend"
                )
            options = {**attention.keywords, **options}
            attention = attention.func
        if type(getattr(attention, "__self__", None)).__module__.startswith("cumla.jax"):
            raise TypeError(
                "attention: needs a function, or the run of a plan of cumla, got one of cumla.jax, "
                "which returns the next plan, too; call it apart, and pass out and lse to "
                "ContextParallel.merge"
            )
        queries = q if isinstance(q, (tuple, list)) else (q,)
        for part in queries:
            self._group.check("q", part)
        self._check_heads(queries[0].shape[-2], gather)
        function = getattr(attention, "__func__", attention)
        if function in _SPARSE:
            raise TypeError(
                "attention: needs mla_decode, mla_attention, attention, or the run of one of their "
                "plans, got sparse attention; call it apart with the slots of this rank, which "
                "ContextParallel.slots finds for the lists, and pass out and lse to merge"
            )
        for name, way_out in _REFUSED.items():
            if options.get(name) is not None:
                raise ValueError(f"{name}: needs None over a cache that is cut; {way_out}")
        mask = options.get("mask")
        if mask is not None and getattr(mask, "end", None) is None:
            raise ValueError(f"mask: needs end over a cache that is cut, got None; {NO_END}")
        *axes, heads, _ = queries[0].shape
        called = tuple(axes)
        if mask is None and self._takes_tokens(attention, axes, options):
            called = (prod(axes), 1)
            queries = [part.reshape(*called, *part.shape[-2:]) for part in queries]
        sinks = options.get("sinks")
        if sinks is not None:
            self._group.check("sinks", sinks)
            if tuple(sinks.shape) != (heads,):  # or ranks would wait for the one that counts them
                raise ValueError(
                    f"sinks: needs shape (num_heads,) = ({heads},), those of all heads, got "
                    f"{tuple(sinks.shape)}; pass the same on every rank"
                )
            options["sinks"] = self._group.once(sinks)
        values = options.get("v")
        if values is None and len(arrays) > 1 and len(arrays[1].shape) > 2:  # no block table
            values = arrays[1]
        columns = _latent_columns(queries) if values is None else values.shape[-1]
        cache = arrays[0] if arrays else options.get("k", options.get("kv_cache"))
        self._check_pages(cache, 2 if options.get("kv_layout") == "HND" else 1)
        given = tuple(queries) if isinstance(q, (tuple, list)) else queries[0]

        def compute(**outputs: Any) -> Any:
            return attention(given, *arrays, **options, **outputs)

        buffer = self._group.computed(compute, (heads, *called, columns), queries[0])
        return self._exchanged(buffer, heads, tuple(axes), columns, queries[0], gather)

    def merge(self, out: Any, lse: Any, *, gather: bool = False) -> cumla.AttentionState:
        """Merge a partial result of this rank with those of the others: :meth:`attend` without it.

        For attention that is called apart, such as that of plans of `cumla.jax`, or sparse
        attention to the slots that :meth:`slots` finds for positions. Costs a copy.

        Parameters
        ----------
        out, lse : array
            Of all heads: ``(tokens, num_heads, columns)`` and ``(tokens, num_heads)``, or
            ``(batch, q_len, num_heads, columns)`` and ``(batch, q_len, num_heads)``. What only one
            rank may count, sinks and new tokens, is part of one rank's result.
        gather : bool
            As in :meth:`attend`.

        Returns
        -------
        AttentionState
            As :meth:`attend`.

        Raises
        ------
        TypeError, ValueError
            As :meth:`attend`.
        """
        for name, array in (("out", out), ("lse", lse)):
            self._group.check(name, array)
        *axes, heads, columns = out.shape
        self._check_heads(heads, gather)

        def copy(**outputs: Any) -> Any:
            return cumla.merge_attention_states([out], [lse], **outputs) if outputs else (out, lse)

        buffer = self._group.computed(copy, (heads, *axes, columns), out)
        return self._exchanged(buffer, heads, tuple(axes), columns, out, gather)

    def top_k(self, scores: Any, topk: int, *, row_starts: Any = None, row_lens: Any = None) -> Any:
        """Select the topk largest scores of each row over all ranks: :func:`cumla.top_k`'s list.

        Each rank selects among its own tokens, and the ranks exchange these candidates, 8 bytes
        each. The list is that of one GPU with all scores, equal ones and NaN included, and the same
        on every rank. :meth:`lists` returns those of its tokens that a rank holds.

        Parameters
        ----------
        scores : array
            ``(rows, local width)`` float32, bfloat16 or float16: column j is the score of the token
            that is number j among those of this rank, as the logits over ``pages(...)`` are
            (:func:`cumla.paged_mqa_logits`). Of the group's framework.
        topk : int
            How many to select, from 1; on all ranks alike.
        row_starts : array, optional
            ``(rows,)`` int32: the column of the first token of each row's request, 0 without it,
            where scores of several requests share columns (:func:`cumla.mqa_logits`).
        row_lens : array, optional
            ``(rows,)`` int32: how many columns count from there: the kv_lens of ``pages(...)``.

        Returns
        -------
        array
            ``(rows, topk)`` int32: ascending positions in the request, then -1.

        Raises
        ------
        TypeError, ValueError
            As :func:`cumla.top_k`; scores of another framework than the group's.

        Examples
        --------
        >>> import numpy as np, torch, cumla
        >>> from cumla.distributed import ContextParallel
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> parallel = ContextParallel(torch.distributed.group.WORLD)
        >>> parallel.top_k(torch.tensor([[3.0, 1, 4, 1, 5]]), 3).tolist()
        [[0, 2, 4]]
        >>> torch.distributed.destroy_process_group()
        """
        self._group.check("scores", scores)
        best = self._largest(scores, topk, row_lens, row_starts)
        return as_int32(namespace(scores).where(best == _NONE, -1, best))

    def select_blocks(
        self,
        scores: Any,
        topk: int,
        *,
        visible: Any,
        block_size: int,
        init_blocks: int = 0,
        local_blocks: int = 0,
    ) -> Any:
        """Select blocks of each row over all ranks: the lists of :func:`cumla.select_blocks`.

        Each rank selects among its own blocks, and the ranks exchange these candidates, 8 bytes
        each; forced blocks are known to all. The lists are those of one GPU with all scores, equal
        ones and NaN included, and the same on every rank. :meth:`blocks` returns those
        that a rank holds.

        Parameters
        ----------
        scores : array
            ``(tokens, groups, local width)`` float32, bfloat16 or float16: column j is the score of
            the block that is number j among those of this rank, as :func:`cumla.block_scores` finds
            it over ``pages(...)``. Of the group's framework.
        topk : int
            How many blocks to select, forced ones included; on all ranks alike, as all that
            follows.
        visible : array
            ``(tokens,)`` int32: the blocks that each query token sees, on all ranks together.
        block_size : int
            Tokens of a block, a divisor of this object's own block_size: a block is on one rank.
        init_blocks, local_blocks : int
            As in :func:`cumla.select_blocks`.

        Returns
        -------
        array
            ``(tokens, groups, topk)`` int32: ascending blocks of the requests, then -1.

        Raises
        ------
        TypeError, ValueError
            As :func:`cumla.select_blocks`; scores of another framework than the group's; a
            block_size that does not divide.

        Examples
        --------
        >>> import torch, cumla
        >>> from cumla.distributed import ContextParallel
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> parallel = ContextParallel(torch.distributed.group.WORLD)
        >>> scores, visible = torch.tensor([[[5.0, 1, 2, 2, 0, 9]]]), torch.tensor([5])
        >>> parallel.select_blocks(scores, 3, visible=visible, block_size=16, local_blocks=1)
        tensor([[[0, 2, 4]]], dtype=torch.int32)
        >>> torch.distributed.destroy_process_group()
        """
        self._group.check("scores", scores)
        shard, xp = self._of_blocks(block_size), namespace(scores)
        if len(scores.shape) != 3:
            raise ValueError(
                f"scores: needs shape (tokens, groups, width), got {tuple(scores.shape)}; pass "
                f"those of block_scores"
            )
        tokens, groups, width = scores.shape
        check_shape("visible", visible, "(tokens,)", (tokens,))
        topk = checked_int("topk", topk, "there is nothing to select")
        init_blocks = checked_int("init_blocks", init_blocks, "pass 0 for none", 0)
        local_blocks = checked_int("local_blocks", local_blocks, "pass 0 for none", 0)
        forced = init_blocks + local_blocks
        if forced > topk:
            raise ValueError(
                f"topk: needs at least the {forced} forced blocks, got {topk}; force fewer"
            )
        visible = visible.clip(0, min(width * self.world, _NONE - 1))
        first = visible.clip(0, init_blocks)
        last = xp.maximum(visible - local_blocks, first)

        def those(begin: Any, count: int, end: Any) -> Any:
            blocks = begin[:, None] + arange(count, scores)
            return xp.where(blocks < end[:, None], blocks, _NONE)

        found = [those(0 * first, init_blocks, first), those(last, local_blocks, visible)]
        found = [as_int32(xp.broadcast_to(x[:, None], (tokens, groups, x.shape[1]))) for x in found]
        if topk > forced:
            rows = xp.broadcast_to(arange(tokens, scores)[:, None], (tokens, groups)).reshape(-1)
            begin, end = (as_int32(shard._local(x)[rows]) for x in (first, last))
            each = scores.reshape(tokens * groups, width)
            best = shard._largest(each, topk - forced, end - begin, begin, begin)
            found.append(best.reshape(tokens, groups, topk - forced))
        blocks = xp.sort(xp.concatenate(found, -1))
        blocks = getattr(blocks, "values", blocks)  # PyTorch sorts into a pair
        return as_int32(xp.where(blocks == _NONE, -1, blocks))

    def _largest(
        self, scores: Any, topk: int, row_lens: Any, row_starts: Any, first: Any = None
    ) -> Any:
        """Select over all ranks: ascending positions of each row, then `_NONE`.

        `first` is the number among this rank's that the column of row_starts has, 0 without it.
        """
        xp = namespace(scores)
        options = {"row_lens": row_lens, "row_starts": row_starts}
        found = cumla.top_k(scores, topk, values=True, **options)
        local = found.indices if first is None else found.indices + first[:, None]
        positions = as_int32(xp.where(found.indices >= 0, self._position(local), _NONE))
        rows = scores.shape[0]

        def of_all(array: Any) -> Any:
            each = self._group.all_gather(array).reshape(self.world, rows, topk)
            return xp.moveaxis(each, 0, 1).reshape(rows, self.world * topk)

        positions, values = of_all(positions), of_all(found.values)
        # A list of a rank ascends; in the order of positions the lowest of equal scores are taken.
        order = xp.argsort(positions)
        row = arange(rows, scores)[:, None]
        positions, values = positions[row, order], values[row, order]
        lens = as_int32((positions != _NONE).sum(-1))
        best = cumla.top_k(values, topk, row_lens=lens).indices
        return as_int32(xp.where(best >= 0, positions[row, best.clip(0)], _NONE))

    def gather_heads(self, array: Any) -> Any:
        """Gather arrays of which each rank has a share of the heads, such as the queries.

        Parameters
        ----------
        array : array
            ``(..., num_heads / world, columns)`` on each rank.

        Returns
        -------
        array
            ``(..., num_heads, columns)``, with strides that attention takes as they are.

        Raises
        ------
        TypeError
            An array of another framework than the group's.
        """
        self._group.check("array", array)
        xp = namespace(array)
        return xp.moveaxis(self._group.all_gather(xp.moveaxis(array, -2, 0)), 0, -2)

    def _check_pages(self, cache: Any, axis: int) -> None:
        """Refuse a cache whose pages, along an axis, are not those that tables were made for."""
        whole = cache[0] if isinstance(cache, (tuple, list)) else cache
        shape = getattr(whole, "shape", ())
        if len(shape) > 2 and self.page_size != shape[axis]:
            raise ValueError(
                f"page_size: needs that of the cache, whose shape is {tuple(shape)}, got "
                f"{self.page_size}; make ContextParallel with page_size="
            )

    def _check_heads(self, heads: int, gather: bool) -> None:
        if heads % self.world and not checked_flag("gather", gather):
            raise ValueError(
                f"q: needs a number of heads that is a multiple of the {self.world} ranks, got "
                f"{heads}; pass gather=True for all heads on every rank, or pad them"
            )

    @staticmethod
    def _takes_tokens(attention: Any, axes: list[int], options: dict[str, Any]) -> bool:
        """Return whether query tokens become requests, of whose tokens each sees all."""
        plan = getattr(attention, "__self__", None)
        key = getattr(plan, "key", None)
        if isinstance(plan, cumla.BlockSparsePlan):  # its key tells of virtual requests
            q_len, causal = plan.key.query_len, plan.key.is_causal
        elif key is not None:
            q_len = 0 if isinstance(plan, cumla.MLAAttentionPlan) else key.q_len
            causal = key.causal
        else:
            q_len, causal = 0, options.get("causal", True)
        if q_len == 1:
            return True
        if not causal:
            return False
        if key is not None or "qo_indptr" in options or attention is cumla.mla_attention:
            raise ValueError(
                "causal: needs False for requests of several query tokens, got True; take the "
                "pages from ContextParallel.pages with q_len or qo_indptr, which makes a request "
                "of each query token, and call mla_decode, or attention without qo_indptr (a "
                "plan: of q_len 1, made from q.reshape(-1, 1, *q.shape[-2:]))"
            )
        return len(axes) == 1 or axes[1] != 1

    def _exchanged(
        self,
        buffer: Any,
        heads: int,
        axes: tuple[int, ...],
        columns: int,
        like: Any,
        gather: bool,
    ) -> cumla.AttentionState:
        """Exchange partial results, and merge them in the order of the ranks.

        Which collective moves how many bytes: docs/kernels/context-parallel.md.
        """
        world, group = self.world, self._group
        few = world <= 2 or heads % world != 0 or group.reads_others
        at_once = checked_flag("gather", gather) and few
        received = group.received(buffer.reshape(heads, *axes, buffer.shape[-1]), at_once)
        parts = [group.state(part, columns, like) for part in received]
        if at_once or not gather:
            return group.merged(parts)
        outs, lses = zip(*parts, strict=True)

        def merge(**outputs: Any) -> Any:
            return cumla.merge_attention_states(outs, lses, **outputs)

        own = group.computed(merge, (heads // world, *axes, columns), like)
        return group.merged([group.state(group.all_gather(own), columns, like)])
