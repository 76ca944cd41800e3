# SPDX-License-Identifier: Apache-2.0
"""A whole decoding step of DeepSeek Sparse Attention: :class:`DSAPlan`."""

from __future__ import annotations

from math import ceil
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Never, Self

import numpy as np

from cumla.core.arguments import INT32, checked_int
from cumla.core.arrays import open_call
from cumla.core.names import Naming, arg
from cumla.core.operation import Output, run, unplaced
from cumla.core.paged import refuse_value
from cumla.core.plan import Joint, Step, new_array, open_plan, part_bytes
from cumla.core.state import AttentionState
from cumla.indexer.arguments import CACHE_FORMAT
from cumla.indexer.paged_logits import (
    PagedMQALogitsPlan,
    checked_kv_lens,
    checked_paged,
    checked_shape,
)
from cumla.indexer.paged_logits import named as named_index
from cumla.launch.device import checked_sm_count, require_hopper, sm_count_of
from cumla.launch.kernel import Unplanned
from cumla.launch.module import load
from cumla.launch.sparse import top_k as top_k_kernel
from cumla.launch.sparse.select_rows import visible_tokens_launch
from cumla.mla.arguments import named as named_latent
from cumla.sparse.mla_sparse import MLASparsePlan
from cumla.sparse.top_k import top_k

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cumla.core.arguments import Views
    from cumla.core.arrays import ArrayView
    from cumla.core.paged import Host, Results
    from cumla.launch.kernel import Launch
    from cumla.sparse.arguments import Attended

__all__ = ["DSAPlan"]


class _Seen(NamedTuple):
    """Checked lengths, and what they are to be cut to."""

    kv_lens: ArrayView
    q_len: int  # query tokens of each length
    most: tuple[int, int]  # tokens that are seen, tokens that are selected


class _Visible(Unplanned[_Seen]):
    """Counts the tokens that each query token sees, and those that will be selected of them."""

    trusted = ("kv_lens",)

    def arguments(self, views: Views, options: tuple[int, tuple[int, int]]) -> _Seen:
        kv_lens = views["kv_lens"]  # the indexer's plan has checked its shape and dtype
        assert kv_lens is not None
        if len(kv_lens.shape) == 2:
            return _Seen(_in_one_row(kv_lens), 1, options[1])
        return _Seen(kv_lens, *options)

    def outputs(self, arguments: _Seen) -> tuple[Output, ...]:
        shape = (*arguments.kv_lens.shape, arguments.q_len)
        return tuple([Output(name, shape, INT32, "elements") for name in ("visible", "counts")])

    def launches(self, arguments: _Seen, outs: Sequence[ArrayView]) -> Sequence[Launch]:
        kv_lens, _, most = arguments
        pairs = zip(outs, most, strict=True)
        return [visible_tokens_launch(kv_lens, *pair) for pair in pairs if 0 not in pair[0].shape]

    def check_values(self, host: Host, arguments: _Seen) -> None:
        kv_lens, most = host["kv_lens"], arguments.most[0]
        need = f"a length from 0 to max_kv_len = {most}"
        wrong = (kv_lens < 0) | (kv_lens > most)
        refuse_value("kv_lens", kv_lens, wrong, need, "the kernels would clamp it")

    def reference(self, host: Host, arguments: _Seen) -> Results:
        _, q_len, most = arguments
        hidden = np.arange(q_len - 1, -1, -1)
        visible = host["kv_lens"].astype(np.int64).reshape(-1, 1) - hidden
        cut = [np.clip(visible, 0, number).astype(np.int32) for number in most]
        for name, numbers in zip(("visible", "counts"), cut, strict=True):
            if name in host:
                host[name][...] = numbers
        return cut


class Attention(MLASparsePlan):
    """Attention of a step, whose lists are as long as the requests' lengths make them."""

    _lengths = "kv_lens"
    most = 0  # tokens that a request may have, all of which a table must be able to name

    def _check_shape(self, arguments: Attended) -> None:
        super()._check_shape(arguments)
        table, kv_cache = arguments.launched.block_table, arguments.launched.kv_cache
        assert table is not None
        columns, page_size = table.shape[1], kv_cache.shape[1]
        if columns * page_size < self.most:
            raise ValueError(
                f"{arg('block_table')}: needs pages for max_kv_len = {self.most} tokens, got "
                f"{columns} of {page_size}, {arg('kv_cache')}'s page size; pass the table of "
                f"{arg('kv_cache')}, or make the plan with the max_kv_len that it holds"
            )


_VISIBLE = _Visible()
_INDEX = Naming(
    {
        "q": "index_q",
        "kv_cache": "index_cache",
        "weights": "index_weights",
        "num_heads": "index_heads",
        "head_dim": "index_dim",
        "cache_format": "index_cache_format",
    }
)


class DSAPlan(Step):
    """Scores, selection and attention of a decoding step, for every layer of a model.

    The step of DeepSeek-V3.2: in each layer the indexer scores all tokens that a query token sees,
    the best `topk` of them are selected, and attention reads the rows of these alone. In
    DeepSeek-V4 these are compressed tokens, and one softmax covers them and a sliding window, which
    is in a second cache, `extra_kv_cache`. ``update`` computes both schedules once per step, from
    lengths on the device; ``select`` is the indexer and the selection of one layer, and ``run`` its
    attention. Layers that share a selection call ``run`` without a ``select`` before, or pass
    `indices`. Nothing waits for the device, and all of it can be captured into a CUDA graph, which
    then serves changing lengths.

    It contains a :class:`cumla.PagedMQALogitsPlan` and a :class:`cumla.MLASparsePlan`, whose rules
    apply, and calls :func:`cumla.top_k` between them. The arrays between the three belong to it:
    logits ``(batch * q_len, max_kv_len)`` float32, indices and lengths. With out= and lse= nothing
    is allocated after the plan is made, except with JAX, where each call returns new arrays. CPU
    arrays are computed by :mod:`cumla.reference`.

    Parameters
    ----------
    batch, q_len, num_heads : int
        As in ``q`` ``(batch, q_len, num_heads, 576)``.
    topk : int
        How many tokens are selected: 2048 in DeepSeek-V3.2, 512 or 1024 in DeepSeek-V4.
    index_heads, index_dim : int
        As in ``index_q`` ``(batch, q_len, index_heads, index_dim)``.
    max_pages : int
        Columns of the block table.
    page_size : int
        Tokens of a page of the index cache: 16, 32, 64 or 128.
    kv_lens_shape : tuple of int, optional
        ``(batch,)``, or ``(batch, q_len)`` where each query token has a length of its own.
    index_cache_format : str, optional
        ``"mxfp4"`` for index keys of 68 bytes, as `cache_format` of :func:`paged_mqa_logits`.
    max_kv_len : int, optional
        Tokens of the longest request that the plan is to serve; what the index cache's pages hold
        by default, and at most. Only the first max_kv_len tokens of longer requests are used.
    extra_topk, dtype, cache_dtype, cache_format, extra_cache_format : optional
        As for :class:`cumla.MLASparsePlan`.
    batch_invariant : bool
        Give a query token the same bits in any batch, with any number of query tokens in its
        request. Scores and selection always have them; attention as in
        :func:`cumla.mla_sparse_decode`.
    device, stream : optional
        As for :class:`cumla.MLADecodePlan`.
    workspace : array, optional
        Memory of all buffers and arrays of the plan, as for :class:`cumla.MLADecodePlan`, of the
        framework of ``index_q``.
    like : array, optional
        An array of the framework and on the device of ``index_q``; CuPy without it.

    Attributes
    ----------
    indices : array or None
        ``(batch, q_len, topk)`` int32: positions from the last ``select``, ascending, then -1. None
        from ``update`` to ``select``.

    Raises
    ------
    TypeError, ValueError, CumlaError
        As the two plans.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> q, kv_cache = np.ones((2, 1, 16, 576), np.float16), np.ones((4, 64, 576), np.float16)
    >>> index_q = cumla.quantize_fp8(np.ones((2, 1, 8, 128), np.float32)).values
    >>> index_cache, weights = np.zeros((4, 64, 132), np.uint8), np.ones((2, 8), np.float32)
    >>> table = {"block_table": np.array([[0, 1], [2, 3]], np.int32)}
    >>> plan = cumla.DSAPlan.from_arrays(q, kv_cache, index_q, index_cache, **table, topk=32)
    >>> plan.update(np.array([100, 7], np.int32))
    >>> for layer in range(3):
    ...     indices = plan.select(index_q, index_cache, weights, **table)
    ...     out, lse = plan.run(q, kv_cache, **table)
    >>> indices.shape, out.shape
    ((2, 1, 32), (2, 1, 16, 512))

    DeepSeek-V4: 32 of the compressed tokens, and a window of up to 128 raw ones.

    >>> q, compressed = q[..., :512].astype("bfloat16"), np.zeros((4, 64, 584), np.uint8)
    >>> window = {"extra_kv_cache": np.zeros((2, 256, 584), np.uint8)}
    >>> window["extra_indices"] = np.arange(256, dtype=np.int32).reshape(2, 1, 128)
    >>> made_of = (q, compressed, index_q, index_cache)
    >>> plan = cumla.DSAPlan.from_arrays(*made_of, **table, topk=32, **window)
    >>> plan.update(np.array([100, 7], np.int32), extra_topk_lens=np.array([128, 31], np.int32))
    >>> indices = plan.select(index_q, index_cache, weights, **table)
    >>> plan.run(q, compressed, **table, **window, sinks=np.zeros(16, np.float32)).out.shape
    (2, 1, 16, 512)
    """

    _Logits: ClassVar[Any] = PagedMQALogitsPlan
    _Attend: ClassVar[Any] = Attention
    _count: ClassVar[Any] = staticmethod(run)
    _calls: ClassVar[tuple[str, str]] = "plan.update", "plan.select(...)"  # in messages
    _own: Mapping[str, Any] = MappingProxyType(dict.fromkeys(("visible", "counts", "logits")))
    _lists: Mapping[str, Any] = MappingProxyType({})  # outputs of the selection
    _counted: tuple[Any, Any] | None = None  # tokens that rows see, and that they select
    _row_lens: Any = None  # of the rows of logits
    indices: Any = None

    def __init__(
        self,
        batch: int,
        q_len: int,
        num_heads: int,
        topk: int,
        *,
        index_heads: int,
        index_dim: int = 128,
        max_pages: int,
        page_size: int = 64,
        kv_lens_shape: Sequence[int] | None = None,
        index_cache_format: str | None = None,
        max_kv_len: int | None = None,
        extra_topk: int = 0,
        dtype: Any = "bfloat16",
        cache_dtype: Any = None,
        cache_format: str | None = None,
        extra_cache_format: str | None = None,
        batch_invariant: bool = False,
        device: int | None = None,
        workspace: Any = None,
        like: Any = None,
        stream: Any = None,
    ) -> None:
        pages: dict[str, Any] = {"max_pages": max_pages, "page_size": page_size}
        pages |= {"kv_lens_shape": kv_lens_shape, "cache_format": index_cache_format}
        index = _Sizes((batch, q_len, index_heads, index_dim), pages)
        cache: dict[str, Any] = {"cache_dtype": cache_dtype, "cache_format": cache_format}
        cache |= {"extra_cache_format": extra_cache_format, "batch_invariant": batch_invariant}
        attend = _Sizes((batch, q_len, num_heads, topk), {"extra_topk": extra_topk, **cache})
        own = _checked_own(index, topk, max_kv_len)
        self._shape, self._width, self._seen = (batch, q_len, topk), own.width, own.seen
        place = self._place(own, index, attend, device, workspace, like, stream)
        with _INDEX:
            self._logits_plan = self._Logits(*index.numbers, **index.named, **place)
        place["dtype"] = dtype
        self._attend_plan = self._Attend(*attend.numbers, **{**attend.named, **place})
        self._attend_plan.most = own.seen[1][0]

    def _place(
        self,
        own: _Own,
        index: _Sizes,
        attend: _Sizes,
        device: int | None,
        workspace: Any,
        like: Any,
        stream: Any,
    ) -> dict[str, Any]:
        """Make the plan's own arrays; tell where the plans that it consists of have theirs."""
        call = open_plan(device, like, workspace, stream)
        self._device, self._framework = call.device, call.framework
        writes = call.framework != "jax"  # JAX's arrays cannot be written to
        joint: Joint | None = None
        with call:
            if call.device is not None:
                nbytes = 0
                if workspace is not None:
                    nbytes = _bytes(own, index, attend, sm_count_of(call.device))
                joint = Joint(call, nbytes, workspace)
            self._chosen = new_array(call, joint, *own.arrays["indices"])
            if writes:
                self._own = {name: new_array(call, joint, *own.arrays[name]) for name in self._own}
                batch, q_len, topk = self._shape
                rows, counts = (batch * q_len, topk), self._own["counts"].reshape(batch * q_len)
                self._lists = {"out": self._chosen.reshape(*rows), "counts": counts}
        self._memory = joint.workspace if joint is not None and writes else None
        return {"device": call.device, "workspace": joint, "like": like, "stream": stream}

    @classmethod
    def from_arrays(
        cls,
        q: Any,
        kv_cache: Any,
        index_q: Any,
        index_cache: Any,
        *,
        block_table: Any,
        topk: int,
        max_kv_len: int | None = None,
        kv_lens: Any = None,
        extra_kv_cache: Any = None,
        extra_indices: Any = None,
        cache_format: str | None = None,
        extra_cache_format: str | None = None,
        index_cache_format: str | None = None,
        batch_invariant: bool = False,
        workspace: Any = None,
        stream: Any = None,
    ) -> Self:
        """Make a plan for the shapes of these arrays, with arrays of index_q's framework.

        Only shapes, dtypes and device are looked at; the rest is as for the class.

        Parameters
        ----------
        q, kv_cache, extra_kv_cache, extra_indices, cache_format, extra_cache_format
            As in :func:`cumla.mla_sparse_decode`.
        index_q, index_cache, block_table, index_cache_format
            As `q`, `kv_cache`, `block_table` and `cache_format` of :func:`cumla.paged_mqa_logits`.
        kv_lens : array, optional
            As of ``update``; ``(batch,)`` by default.
        topk, max_kv_len, batch_invariant, workspace, stream
            As for the class.
        """
        topk = checked_int("topk", topk, "there is nothing to select")
        arrays = named_index(index_q, index_cache, None, block_table)
        if kv_lens is not None:
            arrays["kv_lens"] = kv_lens
        with _INDEX:
            call = open_call(tuple(arrays.items()), stream=stream)
            views = dict(zip(arrays, call.views, strict=True))
            form = CACHE_FORMAT.check("cache_format", index_cache_format)
            sizes = checked_paged(views, (0, None, True, form)).shape
            batch, q_len, index_heads, index_dim, page_size, max_pages = sizes
            shape = None if kv_lens is None else checked_kv_lens(views, batch, q_len).shape
        _check_query(q, kv_cache, (batch, q_len), stream)
        extra = {"extra_kv_cache": extra_kv_cache, "extra_indices": extra_indices}
        arrays = named_latent(q, kv_cache, None)
        arrays |= {name: array for name, array in extra.items() if array is not None}
        found = open_call(tuple(arrays.items()), stream=stream)
        views = dict(zip(arrays, found.views, strict=True))
        views["indices"] = unplaced(Output("indices", (batch, q_len, topk), INT32), call.device)
        formats = {"cache_format": cache_format, "extra_cache_format": extra_cache_format}
        numbers = Attention._numbers(views, formats)
        with call:
            plan = cls(
                **numbers,
                index_heads=index_heads,
                index_dim=index_dim,
                max_pages=max_pages,
                page_size=page_size,
                kv_lens_shape=shape,
                index_cache_format=index_cache_format,
                max_kv_len=max_kv_len,
                batch_invariant=batch_invariant,
                workspace=workspace,
                like=index_q,
                stream=stream,
            )
        plan._attend_plan._note_columns(q)
        return plan

    @staticmethod
    def workspace_bytes(
        batch: int,
        q_len: int,
        num_heads: int,
        topk: int,
        *,
        index_heads: int,
        index_dim: int = 128,
        max_pages: int,
        page_size: int = 64,
        kv_lens_shape: Sequence[int] | None = None,
        index_cache_format: str | None = None,
        max_kv_len: int | None = None,
        extra_topk: int = 0,
        cache_dtype: Any = None,
        cache_format: str | None = None,
        extra_cache_format: str | None = None,
        batch_invariant: bool = False,
        sm_count: int | None = None,
    ) -> int:
        """Size of a plan's workspace in bytes, from numbers as for the class.

        `sm_count` and errors are as in :meth:`cumla.MLADecodePlan.workspace_bytes`.
        """
        pages: dict[str, Any] = {"max_pages": max_pages, "page_size": page_size}
        pages |= {"kv_lens_shape": kv_lens_shape, "cache_format": index_cache_format}
        index = _Sizes((batch, q_len, index_heads, index_dim), pages)
        cache: dict[str, Any] = {"cache_dtype": cache_dtype, "cache_format": cache_format}
        cache |= {"extra_cache_format": extra_cache_format, "batch_invariant": batch_invariant}
        attend = _Sizes((batch, q_len, num_heads, topk), {"extra_topk": extra_topk, **cache})
        own = _checked_own(index, topk, max_kv_len)
        return _bytes(own, index, attend, checked_sm_count(sm_count))

    def prepare(self) -> None:
        """Compile and load all kernels of a step, as :func:`cumla.prepare` does."""
        self._logits_plan.prepare()
        self._attend_plan.prepare()
        if self._device is not None:
            batch, q_len, topk = self._shape
            sm_count = require_hopper(self._device).sm_count
            wanted = batch * q_len, self._width, min(topk, self._width), False
            name, _ = top_k_kernel.choose(*wanted, sm_count)
            for spec in top_k_kernel.SPECS:
                if spec.entry == f"top_k_{name}_float32":
                    load(spec, self._device, capturing=lambda: False)

    def serves(self, stream: int) -> bool:
        """Return whether runs on a stream need no update, as for other plans."""
        plans = self._logits_plan, self._attend_plan
        return self._row_lens is not None and all(plan.serves(stream) for plan in plans)

    def update(
        self,
        kv_lens: Any,
        *,
        extra_topk_lens: Any = None,
        stream: Any = None,
        **misplaced: Never,
    ) -> None:
        """Compute both schedules for these lengths, on the device, and keep the lengths there.

        Parameters
        ----------
        kv_lens : array
            ``(batch,)`` int32: cached tokens of each request, the q_len newest included. Query
            token i sees ``kv_lens - (q_len - 1 - i)`` of them. Or contiguous ``(batch, q_len)``
            of a plan made for that: how many each query token sees, as compressed tokens need it.
        extra_topk_lens : array, optional
            As in :meth:`cumla.MLASparsePlan.update`: entries of the lists of `extra_indices`.
        stream : optional
            As in :meth:`cumla.MLADecodePlan.update`.
        """
        if misplaced:
            raise self._misplaced("update", misplaced)
        self.indices = self._row_lens = None  # and so it stays if a check below raises
        self._follow(stream)
        with _INDEX:
            self._logits_plan.update(kv_lens, stream=stream)
        inputs = {"kv_lens": kv_lens}
        if self._chosen is not None:  # whose framework and device the results have
            inputs = {"plan": self._chosen, **inputs}
        outputs = {name: self._own[name] for name in ("visible", "counts")}
        visible, counts = self._count(_VISIBLE, inputs, outputs, self._seen, stream)
        counted = self._counted or (visible.reshape(-1), counts.reshape(*self._shape[:2]))
        if self._lists:
            self._counted = counted  # the same arrays each time
        lengths, counts = counted
        self._attend_plan.update(counts, extra_topk_lens=extra_topk_lens, stream=stream)
        self._row_lens = lengths
        self._note_use(stream)

    def select(
        self,
        index_q: Any,
        index_cache: Any,
        index_weights: Any,
        *,
        block_table: Any,
        stream: Any = None,
        **misplaced: Never,
    ) -> Any:
        """Select the tokens of one layer: the indexer's logits, and the best `topk` of each row.

        Parameters
        ----------
        index_q, index_cache, index_weights, block_table, stream
            As `q`, `kv_cache`, `weights`, `block_table` and `stream` of
            :func:`cumla.paged_mqa_logits`.

        Returns
        -------
        array
            ``(batch, q_len, topk)`` int32 positions, as :attr:`indices`; the next ``select`` writes
            to the same memory, but with JAX.
        """
        if misplaced:
            raise self._misplaced("select", misplaced)
        self._check_updated()
        if self._own["logits"] is not None:
            self._check_framework("index_q", index_q)
        self._follow(stream)
        arrays = index_q, index_cache, index_weights
        options = {"max_kv_len": self._width, "clean": False, "out": self._own["logits"]}
        options["block_table"] = block_table
        with _INDEX:
            logits = self._logits_plan.run(*arrays, **options, stream=stream)
        found = top_k(logits, self._shape[2], row_lens=self._row_lens, stream=stream, **self._lists)
        self.indices = self._chosen if self._lists else found.indices.reshape(self._shape)
        self._note_use(stream)
        return self.indices

    def run(
        self,
        q: Any,
        kv_cache: Any,
        *,
        block_table: Any,
        indices: Any = None,
        extra_kv_cache: Any = None,
        extra_indices: Any = None,
        sinks: Any = None,
        softmax_scale: float | None = None,
        kv_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        stream: Any = None,
        **misplaced: Never,
    ) -> AttentionState:
        """Attend to the tokens of the last ``select``, or to those of `indices`.

        Parameters
        ----------
        q, kv_cache, block_table, extra_kv_cache, extra_indices, sinks, softmax_scale, kv_scale, \
out, lse, stream
            As in :func:`cumla.mla_sparse_decode`.
        indices : array, optional
            ``(batch, q_len, topk)`` int32 positions of another selection, of the same lengths.
        """
        if misplaced:
            raise self._misplaced("run", misplaced)
        self._check_updated()
        self._follow(stream)
        chosen = self.indices if indices is None else indices
        if chosen is None:
            raise ValueError(
                f"{arg('indices')}: needs a selection of this step, got none since plan.update; "
                f"call {self._calls[1]} before, or pass indices="
            )
        if block_table is None:
            raise ValueError(
                f"{arg('block_table')}: needs the pages of each request, of which indices are "
                f"positions, got None; pass the table of {arg('kv_cache')}"
            )
        options = {"softmax_scale": softmax_scale, "kv_scale": kv_scale, "sinks": sinks}
        extra = {"extra_kv_cache": extra_kv_cache, "extra_indices": extra_indices}
        given = {"out": out, "lse": lse, "stream": stream, "block_table": block_table}
        try:
            options |= extra | given
            state: AttentionState = self._attend_plan.run(q, kv_cache, chosen, **options)
        except ValueError:
            # q may not fit a selection that the caller did not pass.
            if indices is None and self._chosen is not None:
                _check_query(q, kv_cache, self._shape[:2], stream)
            raise
        self._note_use(stream)
        return state

    def _check_updated(self) -> None:
        if self._row_lens is None:
            raise ValueError(
                f"plan: needs an update, got none; call {self._calls[0]}({arg('kv_lens')}) before "
                f"plan.select and plan.run"
            )


class _Own(NamedTuple):
    """The arrays between indexer, selection and attention."""

    arrays: dict[str, tuple[tuple[int, ...], str]]  # shapes and dtypes
    width: int  # columns of logits
    seen: tuple[int, tuple[int, int]]  # query tokens of a length; what a token sees, and selects


class _Sizes(NamedTuple):
    """Numbers of one of the two plans."""

    numbers: tuple[int, int, int, int]
    named: dict[str, Any]


def _checked_own(index: _Sizes, topk: Any, max_kv_len: Any) -> _Own:
    topk = checked_int("topk", topk, "there is nothing to select")
    (batch, q_len, *heads), pages = index
    max_pages, page_size, kv_lens_shape, _ = pages.values()
    with _INDEX:
        *_, per_row = checked_shape((batch, q_len, *heads, page_size, max_pages), kv_lens_shape)
    most = max_pages * page_size
    if max_kv_len is not None:
        most = min(most, checked_int("max_kv_len", max_kv_len, "leave it out"))
    width = ceil(most / page_size) * page_size  # rows of logits that begin at 16 bytes
    rows = batch * q_len
    arrays: dict[str, tuple[tuple[int, ...], str]]
    arrays = {"indices": ((batch, q_len, topk), "int32"), "logits": ((rows, width), "float32")}
    arrays |= dict.fromkeys(
        ("visible", "counts"), ((rows, 1) if per_row else (batch, q_len), "int32")
    )
    return _Own(arrays, width, (q_len, (most, min(most, topk))))


def _bytes(own: _Own, index: _Sizes, attend: _Sizes, sm_count: int) -> int:
    """Add up the arrays and the buffers of a plan."""
    buffers = (
        PagedMQALogitsPlan.workspace_bytes(*index.numbers, **index.named, sm_count=sm_count),
        MLASparsePlan.workspace_bytes(*attend.numbers, **attend.named, sm_count=sm_count),
    )
    arrays = (*own.arrays.values(), *[((nbytes,), "uint8") for nbytes in buffers])
    return sum(part_bytes(*array) for array in arrays)


def _check_query(q: Any, kv_cache: Any, lead: tuple[int, int], stream: Any) -> None:
    query, *_ = open_call(tuple(named_latent(q, kv_cache, None).items()), stream=stream).views
    assert query is not None
    if query.shape[:-2] != lead:
        raise ValueError(
            f"{arg('q')}: needs shape (batch, q_len, num_heads, 576 or 512) with batch {lead[0]} "
            f"and q_len {lead[1]}, as index_q has, got {query.shape}; reshape one of them"
        )


def _in_one_row(lengths: ArrayView) -> ArrayView:
    """See the lengths of all query tokens, ``(batch, q_len)``, as those of requests of one each."""
    (batch, q_len), (step, inner) = lengths.shape, lengths.strides
    if batch > 1 and q_len > 1 and step != q_len * inner:
        raise ValueError(
            f"{arg('kv_lens')}: needs lengths in equal steps of memory, got strides "
            f"{lengths.strides} of shape {lengths.shape}; make a contiguous copy"
        )
    return lengths._replace(shape=(batch * q_len,), strides=(inner if q_len > 1 else step,))
