# SPDX-License-Identifier: Apache-2.0
"""A whole step of block-sparse attention: :class:`BlockSparseStep`."""

from __future__ import annotations

from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Never, Self

import numpy as np

from cumla.blocks.attention import BlockSparsePlan, check_columns
from cumla.blocks.scores import (
    check_groups,
    checked_activation,
    checked_block_rows,
    checked_index,
    has_few,
    has_maxima,
    launch_of_few,
    launch_of_rows,
)
from cumla.blocks.select import select_blocks
from cumla.core.arguments import INT32, checked_flag, checked_int, dtype_name
from cumla.core.arrays import open_call, reopen_call
from cumla.core.names import Naming, arg
from cumla.core.operation import Output, run, unplaced
from cumla.core.plan import Joint, Step, new_array, open_plan, part_bytes
from cumla.launch.blocks.block_rows import SPECS as ROW_SPECS
from cumla.launch.blocks.block_rows import Tokens, Visible, block_rows_launch, lengths_in
from cumla.launch.blocks.block_scores import KEYS_AT_ONCE, scores_spec
from cumla.launch.blocks.block_scores_few import scores_few_specs
from cumla.launch.blocks.block_scores_pooled import scores_pooled_specs
from cumla.launch.blocks.block_scores_prompts import scores_prompts_specs
from cumla.launch.blocks.block_scores_sums import scores_sums_specs
from cumla.launch.blocks.select_blocks import SelectArguments, select_launches
from cumla.launch.device import checked_sm_count, sm_count_of
from cumla.launch.kernel import Unplanned
from cumla.launch.module import load
from cumla.launch.split.plan import MOST_TOKENS
from cumla.mha.arguments import checked_layout
from cumla.reference.blocks.rows import tokens_seen
from cumla.reference.blocks.scores import Sums, scores_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cumla.blocks.scores import Scored
    from cumla.core.arguments import Views
    from cumla.core.arrays import ArrayView
    from cumla.core.paged import Host, Results
    from cumla.core.state import AttentionState
    from cumla.launch.kernel import Launch

__all__ = ["BlockSparseStep"]

_ROW = 4  # numbers of a row of what a query token sees: its request, tokens, and two others
_INDEX = Naming({"q": "index_q", "keys": "index_keys"})
_LISTS = Naming({"block_indices": "blocks"})


# --- what query tokens see ------------------------------------------------------------------------


class _Seen(NamedTuple):
    """Lengths, which the attention's plan has checked, and what they are looked at for."""

    kv_lens: ArrayView
    qo_indptr: ArrayView | None
    tokens: Tokens
    most: int  # tokens that the pages of the index hold
    block_size: int
    open_block: bool = False


class _SeenBy(Unplanned[_Seen]):
    """Finds the request and the visible tokens of each query token, and its visible blocks."""

    def arguments(
        self, views: Views, options: tuple[Tokens, int, int] | tuple[Tokens, int, int, bool]
    ) -> _Seen:
        kv_lens = views["kv_lens"]
        assert kv_lens is not None
        return _Seen(kv_lens, views.get("qo_indptr"), *options)

    def outputs(self, arguments: _Seen) -> tuple[Output, ...]:
        tokens = arguments.tokens.tokens
        return Output("rows", (tokens, _ROW), INT32, "row"), Output("visible", (tokens,), INT32)

    def launches(self, arguments: _Seen, outs: Sequence[ArrayView]) -> Sequence[Launch]:
        a, (rows, visible) = arguments, outs
        if not a.tokens.tokens:
            return ()
        where = Visible(visible.ptr, *a[3:])
        return (block_rows_launch(a.tokens, rows.ptr, a.qo_indptr, a.kv_lens, where),)

    def reference(self, host: Host, arguments: _Seen) -> Results:
        (tokens, _, causal), most, block_size, open_block = arguments[2:]
        seen = tokens_seen(tokens, host["kv_lens"], host.get("qo_indptr"), MOST_TOKENS, causal)
        rows = host.get("rows", np.empty((tokens, _ROW), np.int32))
        rows[...] = np.array([(*of, 0, 0) for of in seen], np.int32).reshape(tokens, _ROW)
        visible = host.get("visible", np.empty(tokens, np.int32))
        ends = np.minimum(rows[:, 1], most) + (block_size - (not open_block))
        visible[...] = np.minimum(ends, most) // block_size
        return rows, visible


# --- scores ---------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """Sizes that the arrays of the index must have in a step."""

    tokens: int
    heads: int
    requests: int
    max_pages: int
    page_size: int
    block_size: int
    causal: bool = True
    is_even: bool = True  # each request has as many query tokens
    num_groups: int | None = None
    activation: str = "none"
    stride: int = 1

    @property
    def groups(self) -> int:
        return self.heads if self.num_groups is None else self.num_groups

    @property
    def width(self) -> int:
        return self.max_pages * (self.page_size // self.block_size)


class _Scored(NamedTuple):
    launched: Scored
    rows: ArrayView
    sizes: Sizes


class _Scores(Unplanned[_Scored]):
    """Scores blocks for query tokens of which the rows are known."""

    def arguments(self, views: Views, options: Sizes) -> _Scored:
        given = {name: view for name, view in views.items() if view is not None}
        launched = checked_index(given, options)
        tokens, (requests, max_pages) = prod(launched.q.shape[:-2]), launched.block_table.shape
        page_size = launched.keys.shape[1] * options.stride
        got = (tokens, launched.q.shape[-2], requests, max_pages, page_size)
        names = {
            "q": ("query tokens", "heads"),
            "block_table": ("rows", "columns"),
            "keys": ("tokens a page",),
        }
        at = 0
        for name, parts in names.items():
            for part in parts:
                if got[at] != options[at]:
                    raise ValueError(
                        f"{arg(name)}: needs the {options[at]} {part} that the step was made for, "
                        f"got shape {given[name].shape}; make a step for this shape"
                    )
                at += 1
        return _Scored(launched, given["rows"], options)

    def outputs(self, arguments: _Scored) -> tuple[Output, ...]:
        sizes = arguments.sizes
        return (Output("out", (sizes.tokens, sizes.groups, sizes.width), ("float32",), "row"),)

    def launches(self, arguments: _Scored, outs: Sequence[ArrayView]) -> Sequence[Launch]:
        if 0 in outs[0].shape:
            return ()
        a, rows, sizes = arguments.launched, arguments.rows.ptr, arguments.sizes
        if sizes.is_even and a.q.shape[0] == sizes.requests and has_few(a):
            return (launch_of_few(lengths_in(rows, a.q.shape[1]), a, outs[0]),)
        return (launch_of_rows(rows, a, outs[0]),)

    def reference(self, host: Host, arguments: _Scored) -> Results:
        sizes, most = arguments.sizes, arguments.sizes.max_pages * arguments.sizes.page_size
        seen = [
            (request, max(min(tokens, most) - behind, 0))
            for request, tokens, behind, _ in host["rows"].tolist()
        ]
        arrays = host["q"], host["keys"], sizes.block_size, host["block_table"]
        sums = Sums(host.get("weights"), sizes.activation == "relu", sizes.num_groups)
        return (scores_of(*arrays, seen, host.get("out"), sums, sizes.stride),)


SEEN, SCORES = _SeenBy(), _Scores()


# --- the step -------------------------------------------------------------------------------------


class BlockSparseStep(Step):
    """Scores, choice and attention of a step with block-sparse attention, for all its layers.

    The step of MiniMax M3, QSA and Step 5: in each layer the indexer scores the blocks that a query
    token sees, the best `topk` are chosen, forced ones among them, and attention reads these alone.
    ``update`` finds once per step what query tokens see, from lengths on the device; ``select``
    scores and chooses for one layer, and ``run`` attends. Layers that share a choice call ``run``
    without a ``select`` before, or pass `blocks`. Nothing waits for the device, and all of it can
    be captured into a CUDA graph, which then serves changing lengths.

    It contains a :class:`cumla.BlockSparsePlan`, whose rules apply. The arrays between the parts
    belong to the step: scores ``(total_tokens, lists, blocks)`` float32, lists and what query
    tokens see. With out= and lse= runs allocate nothing; choosing among more than 4,096 blocks
    allocates memory. CPU arrays are computed by :mod:`cumla.reference`.

    Parameters
    ----------
    batch, total_tokens, num_heads, head_dim, topk, block_size
        As for :class:`cumla.BlockSparsePlan`; forced blocks count in topk, and block_size is the
        stride, or a multiple of 16 of them.
    max_pages, page_size : int
        Columns of the block table and tokens of a page, of the indexer's keys.
    index_heads : int, optional
        Heads of the indexer: num_kv_heads, the default, where each head chooses for one kv head; or
        1, which chooses for all. With num_groups, a multiple of it.
    index_dim, index_dtype : optional
        Columns and dtype of the indexer's queries and keys, for ``prepare``: 128, and dtype, by
        default.
    num_groups, activation, stride : optional
        As for :func:`cumla.block_scores`; the groups are num_kv_heads, or 1 that chooses for all.
    init_blocks, local_blocks : int
        Forced blocks, as in :func:`cumla.select_blocks`.
    open_block : bool
        Visible are the blocks that a query token sees whole, and the one after them, even if it
        sees no token of that: QSA's rule, with ``local_blocks=1``. Needs ``max_pages`` with room
        for one more token. A query token that sees nothing has block 0 in its list then, of which
        attention reads nothing. By default visible are the blocks of which it sees a token.
    num_kv_heads, head_dim_v, q_len, dtype, cache_dtype, causal, batch_invariant : optional
        As for :class:`cumla.BlockSparsePlan`.
    device, stream : optional
        As for :class:`cumla.MLADecodePlan`.
    workspace : array, optional
        Memory of all buffers and arrays of the step, as for :class:`cumla.MLADecodePlan`, of the
        framework of ``index_q``.
    like : array, optional
        An array of the framework and on the device of ``index_q``; CuPy without it.

    Attributes
    ----------
    blocks : array or None
        ``(total_tokens, index_heads or num_groups, topk)`` int32: the lists of the last
        ``select``, ascending, -1 behind them. None from ``update`` to ``select``.

    Raises
    ------
    TypeError, ValueError, CumlaError
        As its parts.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> q = np.ones((2, 1, 4, 64), np.float16)  # one new token of two requests
    >>> k = v = np.ones((6, 32, 2, 64), np.float16)
    >>> index_q, index_keys = np.ones((2, 1, 2, 64), np.float16), np.ones((6, 32, 64), np.float16)
    >>> table = {"block_table": np.int32([[0, 4, 5], [2, 1, -1]])}
    >>> step = cumla.BlockSparseStep.from_arrays(
    ...     q, k, v, index_q, index_keys, **table, topk=3, block_size=16, local_blocks=1)
    >>> step.update(np.int32([90, 33]))
    >>> for layer in range(3):
    ...     blocks = step.select(index_q, index_keys, **table)
    ...     out, lse = step.run(q, k, v, **table)
    >>> blocks[0].tolist(), out.shape
    ([[0, 1, 5], [0, 1, 5]], (2, 1, 4, 64))
    """

    _own: Mapping[str, Any] = MappingProxyType(dict.fromkeys(("rows", "visible", "scores")))
    _seen: tuple[Any, Any] | None = None  # rows, and visible blocks, of the last update
    blocks: Any = None

    def __init__(
        self,
        batch: int,
        total_tokens: int,
        num_heads: int,
        head_dim: int,
        topk: int,
        block_size: int,
        *,
        max_pages: int,
        page_size: int,
        index_heads: int | None = None,
        index_dim: int = 128,
        index_dtype: Any = None,
        num_groups: int | None = None,
        activation: str = "none",
        stride: int = 1,
        init_blocks: int = 0,
        local_blocks: int = 0,
        open_block: bool = False,
        num_kv_heads: int | None = None,
        head_dim_v: int | None = None,
        q_len: int | None = None,
        dtype: Any = "bfloat16",
        cache_dtype: Any = None,
        causal: bool = True,
        batch_invariant: bool = False,
        device: int | None = None,
        workspace: Any = None,
        like: Any = None,
        stream: Any = None,
    ) -> None:
        numbers = batch, total_tokens, num_heads, head_dim, topk, block_size
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        forced = init_blocks, local_blocks
        pages = max_pages, page_size
        sums = num_groups, checked_activation("activation", activation), stride
        sizes = _checked_sizes(numbers, kv_heads, index_heads, pages, forced, sums)
        self._sizes, self._topk = sizes._replace(causal=bool(causal)), int(topk)
        self._forced, self._open_block = forced, checked_flag("open_block", open_block)
        if self._open_block and not local_blocks:
            raise ValueError(
                "local_blocks: needs at least 1 with open_block, whose block has no score, got 0; "
                "pass local_blocks=1"
            )
        self._index = dtype_name(dtype if index_dtype is None else index_dtype), index_dim
        arrays = _arrays(sizes, self._topk)
        attend: dict[str, Any] = {"num_kv_heads": num_kv_heads, "head_dim_v": head_dim_v}
        attend["batch_invariant"] = batch_invariant
        call = open_plan(device, like, workspace, stream)
        self._device, self._framework = call.device, call.framework
        joint: Joint | None = None
        with call:
            if call.device is not None:
                nbytes = 0
                if workspace is not None:
                    nbytes = _bytes(numbers, attend, arrays, sm_count_of(call.device))
                joint = Joint(call, nbytes, workspace)
            self._chosen = new_array(call, joint, *arrays["blocks"])
            if call.framework != "jax":  # JAX's arrays cannot be written to
                self._own = {name: new_array(call, joint, *arrays[name]) for name in self._own}
                self._memory = None if joint is None else joint.workspace
        self._plan = BlockSparsePlan(
            *numbers,
            **attend,
            q_len=q_len,
            dtype=dtype,
            cache_dtype=cache_dtype,
            causal=causal,
            device=call.device,
            workspace=joint,
            like=like,
            stream=stream,
        )

    @classmethod
    def from_arrays(
        cls,
        q: Any,
        k: Any,
        v: Any,
        index_q: Any,
        index_keys: Any,
        *,
        block_table: Any,
        topk: int,
        block_size: int,
        num_groups: int | None = None,
        activation: str = "none",
        stride: int = 1,
        init_blocks: int = 0,
        local_blocks: int = 0,
        open_block: bool = False,
        qo_indptr: Any = None,
        kv_layout: str = "NHD",
        causal: bool = True,
        batch_invariant: bool = False,
        workspace: Any = None,
        stream: Any = None,
    ) -> Self:
        """Make a step for the shapes of these arrays, with arrays of index_q's framework.

        Only shapes, dtypes and device are looked at; the rest is as for the class.

        Parameters
        ----------
        q, k, v, qo_indptr, kv_layout, causal, batch_invariant
            As in :func:`cumla.block_sparse_attention`.
        index_q, index_keys, block_table
            As q, keys and block_table of :func:`cumla.block_scores`.
        topk, block_size, num_groups, activation, stride, init_blocks, local_blocks, open_block, \
workspace, stream
            As for the class.
        """
        topk = checked_int("topk", topk, "there is nothing to select")
        block_size = checked_int("block_size", block_size, "pass the tokens of a block")
        layout = checked_layout(kv_layout)
        sums = _checked_sums((num_groups, checked_activation("activation", activation), stride))
        scored = Sizes(0, 0, 0, 0, 0, block_size, bool(causal), True, *sums)
        arrays = {"q": index_q, "keys": index_keys, "block_table": block_table}
        with _INDEX:
            call = open_call(tuple(arrays.items()), stream=stream)
            views = dict(zip(arrays, call.views, strict=True))
            index = checked_index({n: v for n, v in views.items() if v is not None}, scored)
        arrays = {"q": q, "k": k, "v": v}
        if qo_indptr is not None:
            arrays["qo_indptr"] = qo_indptr
        found = open_call(tuple(arrays.items()), stream=stream)
        views = dict(zip(arrays, found.views, strict=True))
        *lead, heads, index_dim = index.q.shape
        view = views["q"]
        assert view is not None
        if view.shape[:-2] != tuple(lead):
            raise ValueError(
                f"{arg('q')}: needs the query tokens of index_q, {tuple(lead)}, got shape "
                f"{view.shape}; reshape one of them"
            )
        groups = scored._replace(heads=heads).groups
        keys = views["k"]
        if keys is not None and len(keys.shape) >= 3:
            place = 1 if layout == "HND" and len(keys.shape) == 4 else -2
            _check_lists(groups, keys.shape[place], num_groups, str(arg("index_q")))
        lists = Output("block_indices", (prod(lead), groups, topk), INT32)
        views["block_indices"] = unplaced(lists, call.device)
        options = {"kv_layout": layout, "block_size": block_size}
        with call:
            return cls(
                **BlockSparsePlan._numbers(views, options),
                block_size=block_size,
                max_pages=index.block_table.shape[1],
                page_size=index.keys.shape[1] * scored.stride,
                index_heads=heads,
                index_dim=index_dim,
                index_dtype=index.q.dtype,
                num_groups=num_groups,
                activation=activation,
                stride=stride,
                init_blocks=init_blocks,
                local_blocks=local_blocks,
                open_block=open_block,
                causal=causal,
                batch_invariant=batch_invariant,
                workspace=workspace,
                like=index_q,
                stream=stream,
            )

    @staticmethod
    def workspace_bytes(
        batch: int,
        total_tokens: int,
        num_heads: int,
        head_dim: int,
        topk: int,
        block_size: int,
        *,
        max_pages: int,
        page_size: int,
        index_heads: int | None = None,
        num_groups: int | None = None,
        stride: int = 1,
        num_kv_heads: int | None = None,
        head_dim_v: int | None = None,
        batch_invariant: bool = False,
        sm_count: int | None = None,
    ) -> int:
        """Size of a step's workspace in bytes, for any dtypes; numbers as for the class.

        `sm_count` and errors are as in :meth:`cumla.MLADecodePlan.workspace_bytes`.
        """
        numbers = batch, total_tokens, num_heads, head_dim, topk, block_size
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        pages, sums = (max_pages, page_size), (num_groups, "none", stride)
        sizes = _checked_sizes(numbers, kv_heads, index_heads, pages, (0, 0), sums)
        attend: dict[str, Any] = {"num_kv_heads": num_kv_heads, "head_dim_v": head_dim_v}
        attend["batch_invariant"] = batch_invariant
        return _bytes(numbers, attend, _arrays(sizes, topk), checked_sm_count(sm_count))

    def prepare(self) -> None:
        """Compile and load all kernels of a step, as :func:`cumla.prepare` does."""
        self._plan.prepare()
        if self._device is None:
            return
        arrays = _arrays(self._sizes, self._topk)
        scores, blocks, visible = (
            unplaced(Output(name, arrays[name][0], (arrays[name][1],)), self._device)
            for name in ("scores", "blocks", "visible")
        )
        given = SelectArguments(scores, visible, self._topk, *self._forced)
        launches = select_launches(given, blocks, 0, sm_count_of(self._device))
        of_selection = [launch.spec for launch in launches] if given.rows else []
        sizes = self._sizes
        if has_maxima(sizes.heads, sizes):
            of_scores = scores_spec(*self._index), *scores_few_specs(*self._index)
        else:
            keys = *self._index, sizes.block_size // sizes.stride
            of_scores = (
                *(*scores_sums_specs(*keys), *scores_pooled_specs(*keys)),
                *scores_prompts_specs(*keys),
            )
        for spec in (*ROW_SPECS, *of_scores, *of_selection):
            load(spec, self._device, capturing=lambda: False)

    def serves(self, stream: int) -> bool:
        """Tell whether runs on a stream can do without an update, as other plans do."""
        return self._seen is not None and self._plan.serves(stream)

    def update(
        self, kv_lens: Any, *, qo_indptr: Any = None, stream: Any = None, **misplaced: Never
    ) -> None:
        """Compute what each query token sees, on the device, and keep it there.

        Lengths are as in :func:`cumla.block_sparse_attention`; stream, captures and errors as in
        :meth:`cumla.MLADecodePlan.update`.
        """
        if misplaced:
            raise self._misplaced("update", misplaced)
        self.blocks = self._seen = None  # and so it stays if a check below raises
        self._follow(stream)
        self._plan.update(kv_lens, qo_indptr=qo_indptr, stream=stream)
        # The first one is of the framework and device that the results have.
        inputs = {"step": self._chosen, "kv_lens": kv_lens}
        if qo_indptr is not None:
            inputs["qo_indptr"] = qo_indptr
        key, sizes = self._plan.key, self._sizes
        most = sizes.max_pages * sizes.page_size
        of = key.query_tokens, most, sizes.block_size, self._open_block
        outputs = {name: self._own[name] for name in ("rows", "visible")}
        rows, visible = run(SEEN, inputs, outputs, of, stream)
        self._sizes = sizes._replace(is_even=qo_indptr is None)
        self._seen = rows, visible
        self._note_use(stream)

    def select(
        self,
        index_q: Any,
        index_keys: Any,
        *,
        block_table: Any,
        weights: Any = None,
        stream: Any = None,
        **misplaced: Never,
    ) -> Any:
        """Choose the blocks of one layer: the indexer's scores, and the best `topk` of each row.

        Parameters
        ----------
        index_q, index_keys, block_table, stream
            As q, keys, block_table and stream of :func:`cumla.block_scores`.
        weights : array, optional
            ``(total_tokens, index_heads)`` float32, as there, for a step that adds heads up.

        Returns
        -------
        array
            ``(total_tokens, index_heads or num_groups, topk)`` int32, as :attr:`blocks`; the next
            ``select`` writes to the same memory, but with JAX.
        """
        if misplaced:
            raise self._misplaced("select", misplaced)
        rows, visible = self._checked_seen()
        scores = self._own["scores"]
        if scores is not None:
            self._check_framework("index_q", index_q)
        self._follow(stream)
        inputs = {"q": index_q, "keys": index_keys, "block_table": block_table, "rows": rows}
        if weights is not None:
            if has_maxima(self._sizes.heads, self._sizes):
                raise ValueError(
                    f"{arg('weights')}: needs a step that adds heads up, got one without; make it "
                    f"with num_groups= fewer than index_heads, or with an activation"
                )
            inputs["weights"] = weights
        with _INDEX:
            (scores,) = run(SCORES, inputs, {"out": scores}, self._sizes, stream)
        init, local = self._forced
        forced = {"init_blocks": init, "local_blocks": local, "stream": stream}
        chosen = self._chosen if self._own["scores"] is not None else None
        self.blocks = select_blocks(scores, self._topk, visible=visible, out=chosen, **forced)
        self._note_use(stream)
        return self.blocks

    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        block_table: Any,
        blocks: Any = None,
        softcap: float | None = None,
        sinks: Any = None,
        softmax_scale: float | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
        kv_layout: str = "NHD",
        out: Any = None,
        lse: Any = None,
        stream: Any = None,
        **misplaced: Never,
    ) -> AttentionState:
        """Attend to the blocks of the last ``select``, or to those of `blocks`.

        Parameters
        ----------
        q, k, v, block_table, softcap, sinks, softmax_scale, k_scale, v_scale, kv_layout, out, \
lse, stream
            As in :func:`cumla.block_sparse_attention`.
        blocks : array, optional
            ``(total_tokens, num_kv_heads, topk)``, or with one list for all kv heads: those of
            another selection, of the same lengths.
        """
        if misplaced:
            raise self._misplaced("run", misplaced)
        self._checked_seen()
        self._follow(stream)
        chosen = self.blocks if blocks is None else blocks
        if chosen is None:
            raise ValueError(
                f"{arg('blocks')}: needs a selection of this step, got none since step.update; "
                f"call step.select(...) before, or pass blocks="
            )
        options = {"block_table": block_table, "softcap": softcap, "sinks": sinks}
        options |= {"softmax_scale": softmax_scale, "k_scale": k_scale, "v_scale": v_scale}
        options |= {"kv_layout": kv_layout, "out": out, "lse": lse, "stream": stream}
        with _LISTS:
            state = self._plan.run(q, k, v, chosen, **options)
        self._note_use(stream)
        return state

    def _checked_seen(self) -> tuple[Any, Any]:
        if self._seen is None:
            raise ValueError(
                "step: needs an update, got none; call step.update(kv_lens) before step.select and "
                "step.run"
            )
        return self._seen

    def _follow(self, stream: Any) -> None:
        """Order a call behind the last one; refuse it where only a graph computes the update."""
        super()._follow(stream)
        memory = self._plan._memory
        if memory is not None and self._seen is not None:
            with reopen_call(self._chosen, self._device, stream) as call:
                memory.take_to(call, "kv_lens")


def _checked_sizes(
    numbers: tuple[Any, ...],
    kv_heads: Any,
    index_heads: Any,
    pages: Any,
    forced: Any,
    sums: tuple[Any, str, Any],
) -> Sizes:
    """Check the numbers that the attention's plan does not."""
    batch, tokens, _, _, topk, block_size = numbers
    max_pages, page_size = (
        checked_int(name, value, "pass those of the index's keys")
        for name, value in zip(("max_pages", "page_size"), pages, strict=True)
    )
    block_size = checked_int("block_size", block_size, "pass the tokens of a block")
    num_groups, _, stride = sums = _checked_sums(sums)
    check_columns(max_pages, page_size)
    kv_heads = checked_int("num_kv_heads", kv_heads, "leave it out for as many as num_heads")
    heads = kv_heads if index_heads is None else index_heads
    heads = checked_int("index_heads", heads, "leave it out for as many as num_kv_heads")
    groups = heads if num_groups is None else num_groups
    _check_lists(groups, kv_heads, num_groups, "index_heads")
    topk = checked_int("topk", topk, "there is nothing to select")
    least = sum(
        checked_int(name, value, "pass 0 for none", 0)
        for name, value in zip(("init_blocks", "local_blocks"), forced, strict=True)
    )
    if topk < least:
        raise ValueError(f"topk: needs at least the {least} forced blocks, got {topk}; force fewer")
    batch = checked_int("batch", batch, "a step without requests has none", 0)
    tokens = checked_int("total_tokens", tokens, "a step without tokens has none", 0)
    sizes = Sizes(tokens, heads, batch, max_pages, page_size, block_size, True, True, *sums)
    if has_maxima(heads, sizes):
        if block_size % KEYS_AT_ONCE or page_size % block_size:
            raise ValueError(
                f"block_size: needs a multiple of {KEYS_AT_ONCE} that divides the page size "
                f"{page_size}, got {block_size}; use pages of whole blocks"
            )
        return sizes
    if page_size % stride:
        raise ValueError(
            f"page_size: needs a multiple of the {stride} tokens of a pooled key, got {page_size}; "
            f"use pages of whole keys"
        )
    with _INDEX:
        check_groups(heads, groups)
    checked_block_rows(page_size // stride, block_size, stride)
    return sizes


def _check_lists(groups: int, kv_heads: int, num_groups: int | None, heads_of: str) -> None:
    """Compare the lists of a query token with kv heads; `heads_of` names where heads come from."""
    if groups in (1, kv_heads):
        return
    name, way_out = heads_of, "add heads up by num_groups="
    if num_groups is not None:
        name, way_out = "num_groups", "give each list a group"
    raise ValueError(
        f"{name}: needs {kv_heads}, one for each kv head, or 1 for all, got {groups}; {way_out}"
    )


def _checked_sums(sums: tuple[Any, str, Any]) -> tuple[int | None, str, int]:
    """Check the groups of heads, and the tokens of a row of keys."""
    groups, activation, stride = sums
    if groups is not None:
        groups = checked_int("num_groups", groups, "leave it out for a score of each head")
    return groups, activation, checked_int("stride", stride, "pass the tokens of a row of keys")


def _arrays(sizes: Sizes, topk: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Tell shapes and dtypes of the arrays between scores, choice and attention."""
    tokens, groups = sizes.tokens, sizes.groups
    return {
        "blocks": ((tokens, groups, topk), "int32"),
        "rows": ((tokens, _ROW), "int32"),
        "visible": ((tokens,), "int32"),
        "scores": ((tokens, groups, sizes.width), "float32"),
    }


def _bytes(
    numbers: tuple[Any, ...],
    attend: dict[str, Any],
    arrays: dict[str, tuple[tuple[int, ...], str]],
    sm_count: int,
) -> int:
    """Add up the arrays and the buffer of a step."""
    buffer = BlockSparsePlan.workspace_bytes(*numbers, **attend, sm_count=sm_count)
    return sum(part_bytes(*array) for array in (*arrays.values(), ((buffer,), "uint8")))
