# SPDX-License-Identifier: Apache-2.0
"""A whole decoding step of DeepSeek Sparse Attention: :class:`DSAPlan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cumla.core.arguments import INT32, bind, checked_int
from cumla.core.arrays import from_numpy, open_call
from cumla.core.operation import Operation, Output, run
from cumla.core.paged import KV_LENS
from cumla.core.state import AttentionState
from cumla.indexer.paged_logits import PagedMQALogitsPlan, checked_paged
from cumla.indexer.paged_logits import named as named_index
from cumla.launch.device import require_hopper
from cumla.launch.sparse.select_rows import visible_tokens_launch
from cumla.sparse.mla_sparse import MLASparsePlan
from cumla.sparse.top_k import top_k

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cumla.core.arguments import Views
    from cumla.core.arrays import ArrayView, Call
    from cumla.core.operation import Launchable
    from cumla.core.paged import Host, Results

__all__ = ["DSAPlan"]


class _Visible(Operation["tuple[ArrayView, int]", int]):
    """Counts the tokens that each query token sees; its option is q_len."""

    integers = ("kv_lens",)

    def arguments(self, views: Views, options: int) -> tuple[ArrayView, int]:
        bind({"kv_lens": KV_LENS}, views, {})
        kv_lens = views["kv_lens"]
        assert kv_lens is not None
        return kv_lens, options

    def outputs(self, arguments: tuple[ArrayView, int]) -> tuple[Output, ...]:
        kv_lens, q_len = arguments
        return (Output("out", (*kv_lens.shape, q_len), INT32),)

    def key(self, arguments: tuple[ArrayView, int], device: int) -> int:
        return require_hopper(device).sm_count

    def recipe(
        self,
        key: int,
        arguments: tuple[ArrayView, int],
        outs: Sequence[ArrayView],
        buffer: int,
    ) -> Sequence[Launchable]:
        return (visible_tokens_launch(arguments[0], outs[0]),) if 0 not in outs[0].shape else ()

    def reference(self, host: Host, arguments: tuple[ArrayView, int]) -> Results:
        _, q_len = arguments
        lengths = np.maximum(host["kv_lens"].astype(np.int64), 0)
        visible = lengths[:, None] - np.arange(q_len - 1, -1, -1)
        out = host.get("out", np.empty(visible.shape, np.int32))
        out[:] = np.maximum(visible, 0)
        return (out,)


_VISIBLE = _Visible()


class DSAPlan:
    """Scores, selection and attention of a decoding step, for every layer of a model.

    The step of DeepSeek-V3.2: in each layer the indexer scores all tokens that a query token sees,
    the best `topk` of them are selected, and attention reads the rows of these alone. ``update``
    computes both schedules once per step, from lengths on the device; ``select`` is the indexer and
    the selection of one layer, and ``run`` its attention. Layers that share a selection call
    ``run`` without a ``select`` before, or pass `indices`. Nothing waits for the device, and all of
    it can be captured into a CUDA graph, which then serves changing lengths.

    It holds a :class:`cumla.PagedMQALogitsPlan`, a :class:`cumla.MLASparsePlan`, and between them
    :func:`cumla.top_k`: what is said of plans there holds here. The arrays between the three belong
    to it: logits ``(batch * q_len, max_kv_len)`` float32, indices and lengths. CPU arrays are
    computed by :mod:`cumla.reference`.

    Parameters
    ----------
    q, kv_cache : array, or pair or triple of arrays
        As in :func:`cumla.mla_sparse_decode`. Of all arrays here only shapes, dtypes and device are
        looked at.
    index_q, index_cache : array, or a pair of arrays for the latter
        ``(batch, q_len, index_heads, 128)`` and pages, as `q` and `kv_cache` of
        :func:`cumla.paged_mqa_logits`.
    block_table : array
        ``(batch, max_pages)`` int32, of both caches.
    topk : int
        How many tokens a query token attends to: 2048 in DeepSeek-V3.2.
    max_kv_len : int, optional
        Tokens of the longest request that the plan is to serve; what the index cache's pages hold
        by default. Longer requests see that many.
    stream : optional
        As in :class:`cumla.MLADecodePlan`.

    Attributes
    ----------
    indices : array or None
        ``(batch, q_len, topk)`` int32: positions that the last ``select`` left, ascending, -1 after
        the last one.

    Raises
    ------
    TypeError, ValueError, CumlaError
        As the two plans.

    Examples
    --------
    >>> import numpy as np
    >>> import cumla
    >>> q = np.ones((2, 1, 16, 576), np.float16)
    >>> kv_cache = np.ones((4, 64, 576), np.float16)
    >>> index_q = cumla.quantize_fp8(np.ones((2, 1, 8, 128), np.float32)).values
    >>> index_cache = np.zeros((4, 64, 1, 132), np.uint8)
    >>> weights = np.ones((2, 8), np.float32)
    >>> block_table = np.array([[0, 1], [2, 3]], np.int32)
    >>> plan = cumla.DSAPlan(q, kv_cache, index_q, index_cache, block_table, topk=32)
    >>> plan.update(np.array([100, 7], np.int32))
    >>> for layer in range(3):
    ...     indices = plan.select(index_q, index_cache, weights, block_table)
    ...     out, lse = plan.run(q, kv_cache, block_table)
    >>> indices.shape, out.shape
    ((2, 1, 32), (2, 1, 16, 512))
    """

    def __init__(
        self,
        q: Any,
        kv_cache: Any,
        index_q: Any,
        index_cache: Any,
        block_table: Any,
        *,
        topk: int,
        max_kv_len: int | None = None,
        stream: Any = None,
    ) -> None:
        checked_int("topk", topk, "there is nothing to select")
        arrays = named_index(index_q, index_cache, None, block_table)
        call = open_call(tuple(arrays.items()), stream=stream)
        shape = checked_paged(dict(zip(arrays, call.views, strict=True))).shape
        batch, q_len, _, _, page_size, max_pages = shape
        width = max_pages * page_size
        if max_kv_len is not None:
            width = min(width, checked_int("max_kv_len", max_kv_len, "leave it out"))
        self._q_len, rows = q_len, batch * q_len
        with call:
            self._chosen = _new(call, (batch, q_len, topk), "int32")
            self._counts = _new(call, (rows,), "int32")
            self._logits = _new(call, (rows, width), "float32")
            self._visible = _new(call, (batch, q_len), "int32")
        self._writes = call.framework != "jax"  # JAX's arrays cannot be written to
        self._logits_plan = PagedMQALogitsPlan(
            *shape[:4],
            max_pages=max_pages,
            page_size=page_size,
            per_row_lens=q_len > 1,
            like=index_q,
            stream=stream,
        )
        self._attend_plan = MLASparsePlan.from_arrays(q, kv_cache, self._chosen, stream=stream)
        self._updated = False
        self.indices: Any = None

    def prepare(self) -> None:
        """Compile and load the kernels of both plans, as :func:`cumla.prepare` does."""
        self._logits_plan.prepare()
        self._attend_plan.prepare()

    def update(self, kv_lens: Any, *, stream: Any = None) -> None:
        """Compute both schedules for these lengths, on the device.

        Parameters
        ----------
        kv_lens : array
            ``(batch,)`` int32: cached tokens of each request, the q_len newest included. Query
            token i sees ``kv_lens - (q_len - 1 - i)`` of them. Must not change before the step is
            done.
        stream : optional
            As in :meth:`cumla.MLADecodePlan.update`.
        """
        visible = kv_lens
        if self._q_len > 1:
            out = self._visible if self._writes else None
            (visible,) = run(_VISIBLE, {"kv_lens": kv_lens}, {"out": out}, self._q_len, stream)
        self._lengths = visible.reshape(-1)
        self._logits_plan.update(visible, stream=stream)
        self._attend_plan.update(visible, stream=stream)
        self._updated = True

    def select(
        self,
        index_q: Any,
        index_cache: Any,
        index_weights: Any,
        block_table: Any,
        *,
        stream: Any = None,
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
        if not self._updated:
            raise ValueError("plan: never updated; call plan.update(kv_lens) before plan.select")
        shape, (rows, width) = self._chosen.shape, self._logits.shape
        given: dict[str, Any] = {}
        if self._writes:
            given = {"out": self._chosen.reshape(rows, -1), "valid_counts": self._counts}
        logits = self._logits_plan.run(
            *(index_q, index_cache, index_weights, block_table),
            max_kv_len=width,
            clean=False,
            out=self._logits if self._writes else None,
            stream=stream,
        )
        found = top_k(logits, shape[-1], lengths=self._lengths, stream=stream, **given)
        self.indices = self._chosen if self._writes else found.indices.reshape(shape)
        return self.indices

    def run(
        self,
        q: Any,
        kv_cache: Any,
        block_table: Any,
        *,
        indices: Any = None,
        sinks: Any = None,
        softmax_scale: float | None = None,
        kv_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        stream: Any = None,
    ) -> AttentionState:
        """Attend to the tokens of the last ``select``, or to those of `indices`.

        Parameters
        ----------
        q, kv_cache, block_table, sinks, softmax_scale, kv_scale, out, lse, stream
            As in :func:`cumla.mla_sparse_decode`.
        indices : array, optional
            ``(batch, q_len, topk)`` int32 positions of another selection, of the same lengths.
        """
        chosen = self.indices if indices is None else indices
        if chosen is None:
            raise ValueError(
                "indices: needs a selection, got none; call plan.select before, or pass indices="
            )
        options = {"softmax_scale": softmax_scale, "kv_scale": kv_scale, "sinks": sinks}
        given = {"out": out, "lse": lse, "stream": stream, "block_table": block_table}
        return self._attend_plan.run(q, kv_cache, chosen, **options, **given)


def _new(call: Call, shape: tuple[int, ...], dtype: str) -> Any:
    """Allocate an array of the call's framework."""
    if call.device is None:
        return from_numpy(call.framework, np.zeros(shape, dtype))
    owner, _ = call.empty(shape, dtype)
    return call.export(owner) if call.exports else owner
