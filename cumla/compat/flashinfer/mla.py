# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's wrapper of MLA attention over `cumla.mla_attention`.

A server's loop runs as it is::

    wrapper = BatchMLAPagedAttentionWrapper(workspace, use_cuda_graph=True, qo_indptr=..., ...)
    wrapper.plan(qo_indptr, kv_indptr, kv_indices, kv_len_arr, heads, 512, 64, page_size,
                 causal, sm_scale, torch.bfloat16, torch.bfloat16)
    out = wrapper.run(q_nope, q_pe, ckv_cache, kpe_cache)   # eagerly, then while capturing
    ...
    wrapper.plan(...)     # other lengths and pages
    graph.replay()

What carries over from FlashInfer:

* One `plan` serves the `run` of every layer of a step.
* With ``use_cuda_graph=True``, `plan` copies lengths and pages to where the graph reads them, and
  computes the schedule anew: call it before a replay, on the stream of the replay.
* The lse is a logarithm to base 2, or a natural one on request, and -inf where nothing was
  attended, where the output is 0.

What differs:

* `plan` does not wait for the GPU: lengths stay there, and the schedule is computed there. It reads
  them later, so leave tensors that were given to it alone until the runs of the step are done.
* How many query tokens there are the first `run` tells, by its shape: it makes a `cumla` plan,
  which is kept as long as shapes stay. That has a buffer of its own, of
  `cumla.MLAAttentionPlan.workspace_bytes`; the workspace that is passed in tells the device only.
* With ``use_cuda_graph=True`` the number of query tokens must stay, like the batch. Rows of the
  query behind the last offset belong to nobody; what they give in ``out`` is not written.
* Any page size, any number of heads, and causal masks of them all.

FP8 caches are as in FlashInfer (0.6.18, its backends fa2 and fa3): a `plan` with
``kv_data_type=torch.float8_e4m3fn`` beside queries in bfloat16, ``scale_mode`` left alone or
``"kv-per-tensor"``; and with each `run` ``kpe_scale``, and ``ckv_scale`` or ``ckv_scale_arr``, by
which the numbers of the cache are multiplied. Where both are given, the array counts. Scales act in
float32 here; FlashInfer rounds what they make of the cache to 16 bits. Two numbers that differ cost
more than two that are equal: an array of scales is made for the run.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import e, log2
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

from cumla.compat.flashinfer._tensors import as_int32, check_axes, mark_empty
from cumla.core.arrays import open_call
from cumla.launch.mla.shape import HEAD_DIM, VALUE_DIM
from cumla.mla.attention import MLAAttentionPlan
from cumla.mla.fp8_caches import FP8, SCALES, number_of

if TYPE_CHECKING:
    import torch

__all__ = ["BatchMLAPagedAttentionWrapper", "MLAPlanMetadata"]

_BACKENDS = ("auto", "fa2", "fa3")
_WIDTHS = (VALUE_DIM, HEAD_DIM - VALUE_DIM)  # of a row: ckv and kpe
_LOG2_E = log2(e)
# cumla's names -> FlashInfer's, of what a plan is made of; and the axes
_CSR = {
    "qo_indptr": "qo_indptr",
    "kv_lens": "kv_len_arr",
    "kv_indptr": "kv_indptr",
    "kv_indices": "kv_indices",
}
_DENSE = {"qo_indptr": "cum_seq_lens_q", "kv_lens": "seq_lens", "block_table": "block_tables"}
_AXES = {
    "qo_indptr": ("batch + 1",),
    "kv_lens": ("batch",),
    "kv_indptr": ("batch + 1",),
    "kv_indices": ("pages",),
    "block_table": ("batch", "max_pages"),
}


@dataclass(frozen=True)
class MLAPlanMetadata:
    """Lengths and pages of a batch, in one of FlashInfer's two forms, or in both.

    Make it with `csr`, `dense` or `dual`. FlashInfer's own objects will do as well.
    """

    qo_indptr: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    kv_len_arr: torch.Tensor | None = None
    cum_seq_lens_q: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    max_q_len: int | None = None

    @classmethod
    def csr(
        cls,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
    ) -> MLAPlanMetadata:
        """Describe a batch by lists of pages; the tensors are those of `plan`."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    @classmethod
    def dense(
        cls,
        cum_seq_lens_q: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:
        """Describe a batch by a table of pages.

        Parameters
        ----------
        cum_seq_lens_q : torch.Tensor
            ``(batch + 1,)``, as ``qo_indptr`` of `plan`.
        block_tables : torch.Tensor
            ``(batch, max_pages)``: the pages of each request, in order.
        seq_lens : torch.Tensor
            ``(batch,)``, as ``kv_len_arr`` of `plan`.
        max_q_len : int, optional
            Not looked at.

        Returns
        -------
        MLAPlanMetadata
        """
        return cls(
            cum_seq_lens_q=cum_seq_lens_q,
            block_tables=block_tables,
            seq_lens=seq_lens,
            max_q_len=max_q_len,
        )

    @classmethod
    def dual(
        cls,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        *,
        cum_seq_lens_q: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:
        """Describe a batch in both forms; of them the lists are used."""
        return cls(
            *(qo_indptr, kv_indptr, kv_indices, kv_len_arr),
            *(cum_seq_lens_q, block_tables, seq_lens, max_q_len),
        )


class _Shape(NamedTuple):
    """What a plan says of the calls that it serves, in the order of `MLAAttentionPlan`."""

    batch: int
    num_heads: int
    page_size: int
    dtype: str
    cache_dtype: str
    causal: bool

    def make(self, total_tokens: int, like: Any) -> MLAAttentionPlan:
        return MLAAttentionPlan(
            self.batch,
            total_tokens,
            self.num_heads,
            page_size=self.page_size,
            dtype=self.dtype,
            cache_dtype=self.cache_dtype,
            causal=self.causal,
            like=like,
        )


class BatchMLAPagedAttentionWrapper:
    """Attention over a paged MLA cache, planned once a step.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        Any tensor on the device of the calls; nothing is written to it.
    use_cuda_graph : bool
        Whether runs are captured into CUDA graphs: lengths and pages then keep their places.
    qo_indptr, kv_indptr, kv_indices, kv_len_arr : torch.Tensor, optional
        With use_cuda_graph: int32 tensors that hold those of each `plan`; kv_indices with room for
        the most pages. What is not given is kept as a copy from the first plan.
    backend : str
        ``"auto"``, ``"fa2"`` or ``"fa3"``, which all mean cumla's kernels.

    Raises
    ------
    NotImplementedError
        For other backends.
    TypeError, ValueError
        The buffers do not fit.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        if backend not in _BACKENDS:
            raise NotImplementedError(
                f"backend: needs one of {', '.join(_BACKENDS)}, got {backend!r}; cumla has kernels "
                f"of its own, so leave it out and give the block table in "
                f"plan(metadata=MLAPlanMetadata.dense(...))"
            )
        _check_tensor("float_workspace_buffer", float_workspace_buffer)
        self.device = float_workspace_buffer.device
        self._use_cuda_graph = use_cuda_graph
        buffers = {
            "qo_indptr": qo_indptr,
            "kv_lens": kv_len_arr,
            "kv_indptr": kv_indptr,
            "kv_indices": kv_indices,
        }
        self._kept = {n: b for n, b in buffers.items() if use_cuda_graph and b is not None}
        for name, buffer in self._kept.items():
            _check_tensor(_CSR[name], buffer)
            check_axes(_CSR[name], buffer, *_AXES[name])
            if buffer.device != self.device:
                raise ValueError(
                    f"{_CSR[name]}: needs a tensor on {self.device}, where "
                    f"float_workspace_buffer is, got one on {buffer.device}; move it there"
                )
        self._arrays: dict[str, Any] = {}  # of the last plan, by cumla's names
        self._shape: _Shape | None = None
        self._sm_scale: float | None = None
        self._plan: MLAAttentionPlan | None = None
        self._made_for: tuple[_Shape, int] | None = None
        # Whether the last update of _plan was captured into a graph; None before any with _arrays.
        self._captured: bool | None = None

    def plan(
        self,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: torch.dtype | None = None,
        kv_data_type: torch.dtype | None = None,
        use_profiler: bool = False,
        *,
        metadata: Any = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str = "none",
        output_dtype: torch.dtype | None = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
    ) -> None:
        """Say what the runs that follow are about, without waiting for the GPU.

        Parameters
        ----------
        qo_indptr : torch.Tensor
            ``(batch + 1,)``: where the query tokens of each request begin, and the last ones end.
            This and the next three are int32, or are converted, and lie on the GPU or the CPU.
        kv_indptr : torch.Tensor
            ``(batch + 1,)``: where the pages of each request begin in kv_indices.
        kv_indices : torch.Tensor
            ``(pages,)``: page numbers of all requests; it may be longer.
        kv_len_arr : torch.Tensor
            ``(batch,)``: cached tokens of each request, those of its queries included.
        num_heads : int
            Query heads.
        head_dim_ckv, head_dim_kpe : int
            512 and 64.
        page_size : int
            Tokens of a page, any number from 1.
        causal : bool
            Bottom-right causal mask: the last query of a request sees all of it.
        sm_scale : float
            Factor of the scores.
        q_data_type, kv_data_type : torch.dtype
            bfloat16 or float16, both the same; with bfloat16 the cache may be float8_e4m3fn.
        use_profiler : bool
            False.
        metadata : MLAPlanMetadata
            In place of the first four arguments.
        query_layout, kv_cache_layout, lse_mode
            Not looked at: every run takes packed tensors or pairs, with or without an lse.
        output_dtype : torch.dtype, optional
            q_data_type.
        scale_mode : str
            ``"default"``, or with an FP8 cache ``"kv-per-tensor"``: they mean the same.
        output_scale, skip_softmax
            Of FP8 outputs and of other GPUs: leave them at their defaults.

        Raises
        ------
        NotImplementedError
            For what cumla does not have; the message names the argument.
        TypeError, ValueError
            An argument is missing or does not fit; a change that a CUDA graph would not see.
        """
        modes = ("default", "kv-per-tensor") if _name(kv_data_type) == FP8 else ("default",)
        _refuse(
            use_profiler=use_profiler or None,
            output_scale=None if output_scale == "none" else output_scale,
            scale_mode=None if scale_mode in modes else scale_mode,
            skip_softmax=skip_softmax or None,
        )
        numbers = {"num_heads": num_heads, "head_dim_ckv": head_dim_ckv}
        numbers |= {"head_dim_kpe": head_dim_kpe, "page_size": page_size, "causal": causal}
        needed = numbers | {
            "sm_scale": sm_scale,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
        }
        for name, value in needed.items():
            if value is None:
                raise TypeError(f"{name}: needs a value, got None; pass it to plan()")
        if (head_dim_ckv, head_dim_kpe) != _WIDTHS:
            raise ValueError(
                f"head_dim_ckv: needs rows of {_WIDTHS[0]} and {_WIDTHS[1]} columns (head_dim_kpe),"
                f" got {head_dim_ckv} and {head_dim_kpe}; import the wrapper from flashinfer for "
                f"others"
            )
        dtypes = _checked_dtypes(q_data_type, kv_data_type, output_dtype)
        flat = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        if metadata is None:
            metadata = MLAPlanMetadata(*flat)
        elif any(array is not None for array in flat):
            raise ValueError(
                "metadata: needs the other tensors left out, got both; pass lengths and pages once"
            )
        arrays = _lengths_and_pages(metadata)
        assert num_heads is not None and page_size is not None  # checked above
        shape = _Shape(arrays["kv_lens"].shape[0], num_heads, page_size, *dtypes, bool(causal))
        if self._use_cuda_graph:
            self._keep(arrays, shape)
        else:
            self._arrays = {
                name: self._staged(array).to(self.device, non_blocking=self._on_gpu)
                for name, array in arrays.items()
            }
        self._shape, self._sm_scale, self._captured = shape, sm_scale, None
        if self._use_cuda_graph and self._plan is not None:
            self._update()  # for graphs that hold runs without an update

    def run(
        self,
        q_nope: torch.Tensor | None = None,
        q_pe: torch.Tensor | None = None,
        ckv_cache: torch.Tensor | None = None,
        kpe_cache: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        query: Any = None,
        kv_cache: Any = None,
        ckv_scale: float | None = None,
        ckv_scale_arr: torch.Tensor | None = None,
        kpe_scale: float | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend, with the lengths and pages of the last plan.

        Parameters
        ----------
        q_nope, q_pe : torch.Tensor
            ``(tokens, num_heads, 512)`` and ``(tokens, num_heads, 64)``.
        ckv_cache, kpe_cache : torch.Tensor
            ``(num_pages, page_size, 512)`` and ``(num_pages, page_size, 64)``. They may lie beside
            each other in one tensor.
        out : torch.Tensor, optional
            ``(tokens, num_heads, 512)``, written and returned.
        lse : torch.Tensor, optional
            ``(tokens, num_heads)`` float32, written, and returned with return_lse.
        return_lse : bool
            Whether to return the lse, too.
        profiler_buffer, kv_len, page_table : None
            Of FlashInfer's profiler, and of a backend that is not planned.
        return_lse_base_on_e : bool
            Whether the lse is a natural logarithm, and not one to base 2.
        query : torch.Tensor or pair of torch.Tensor
            In place of q_nope and q_pe: both, or one tensor ``(tokens, num_heads, 576)``.
        kv_cache : torch.Tensor or pair of torch.Tensor
            In place of ckv_cache and kpe_cache: both, or ``(num_pages, page_size, 576)``.
        ckv_scale : float, optional
            Factor of the latent columns of an FP8 cache.
        ckv_scale_arr : torch.Tensor, optional
            In place of it ``(num_pages, page_size, 4)`` float32, of 128 columns of a token each.
        kpe_scale : float, optional
            Factor of the RoPE columns of an FP8 cache.
        o_scale : None
            Of FP8 outputs, which cumla does not have.

        Returns
        -------
        out : torch.Tensor
            ``(tokens, num_heads, 512)``, the dtype of the query. 0 where a query sees nothing.
        lse : torch.Tensor
            With return_lse: ``(tokens, num_heads)``, float32. -inf where a query sees nothing. Rows
            of no request hold anything.

        Raises
        ------
        NotImplementedError
            For what cumla does not have; the message names the argument.
        RuntimeError
            There was no plan.
        TypeError, ValueError, CumlaError
            As `cumla.mla_attention`, in whose messages ``q`` is the query, ``kv_lens`` is
            kv_len_arr or seq_lens, ``block_table`` is block_tables, ``kv_scale`` is kpe_scale, or
            both scales, and ``kv_cache[2]`` is ckv_scale_arr, or what stands for ckv_scale.
        """
        _refuse(
            profiler_buffer=profiler_buffer,
            kv_len=kv_len,
            page_table=page_table,
            o_scale=o_scale,
        )
        q = _one_form("query", query, q_nope=q_nope, q_pe=q_pe)
        cache = _one_form("kv_cache", kv_cache, ckv_cache=ckv_cache, kpe_cache=kpe_cache)
        if self._shape is None:
            raise RuntimeError("run: needs a plan, got none; call plan() first")
        kv_scale = None
        if self._shape.cache_dtype == FP8:
            cache, kv_scale = _with_scales(cache, ckv_scale, ckv_scale_arr, kpe_scale)
        else:
            _refuse_scales(ckv_scale=ckv_scale, ckv_scale_arr=ckv_scale_arr, kpe_scale=kpe_scale)
        plan = self._ready_plan(q, self._shape)
        result = plan.run(
            q,
            cache,
            self._arrays.get("block_table"),
            kv_indices=self._arrays.get("kv_indices"),
            softmax_scale=self._sm_scale,
            kv_scale=kv_scale,
            out=out,
            lse=lse,
        )
        if return_lse or lse is not None:
            if not return_lse_base_on_e:
                result.lse.mul_(_LOG2_E)
            mark_empty(result.lse)
        return (result.out, result.lse) if return_lse else result.out

    @property
    def _on_gpu(self) -> bool:
        return bool(self.device.type == "cuda")

    def _staged(self, array: Any) -> Any:
        """Return it as int32, and where a copy to the GPU waits for nothing."""
        array = as_int32(array)
        return array.pin_memory() if self._on_gpu and array.device.type == "cpu" else array

    def _keep(self, arrays: dict[str, Any], shape: _Shape) -> None:
        """Copy lengths and pages to where graphs read them, once they are known to fit there."""
        if self._shape is not None:
            had, got = (*self._shape, *sorted(self._arrays)), (*shape, *sorted(arrays))
            if had != got:
                raise ValueError(
                    f"use_cuda_graph: needs every plan to say what the first one said, {had}, got "
                    f"{got}; make a wrapper for each"
                )
        for name, array in arrays.items():
            kept = self._kept.get(name)
            if kept is not None:
                _check_room(name, tuple(kept.shape), tuple(array.shape))
        for name, array in arrays.items():
            staged = self._staged(array)
            kept = self._kept.get(name)
            if kept is None:
                self._kept[name] = staged.to(self.device, non_blocking=self._on_gpu, copy=True)
            else:
                corner = tuple(slice(size) for size in staged.shape)
                kept[corner].copy_(staged, non_blocking=self._on_gpu)
        self._arrays = {name: self._kept[name] for name in arrays}

    def _ready_plan(self, q: Any, shape: _Shape) -> MLAAttentionPlan:
        """Return a plan whose schedule serves a run with this query, on the current stream."""
        part = q[0] if isinstance(q, tuple) else q
        call = open_call((("query", part),))
        made_for = (shape, part.shape[0])
        if self._plan is None or made_for != self._made_for:
            if self._plan is not None and self._use_cuda_graph:
                raise ValueError(
                    f"query: needs {self._plan.key.total_tokens} query tokens, as in the first run "
                    f"of this wrapper, got {part.shape[0]}; with use_cuda_graph make a wrapper for "
                    f"each number"
                )
            self._plan = shape.make(part.shape[0], part)
            self._made_for = made_for
            self._captured = None
        if self._captured != call.capturing or not self._plan.serves(call.stream):
            self._update()
        return self._plan

    def _update(self) -> None:
        """Have the schedule computed, on the current stream; a capture gets it into the graph.

        What was only captured has not been computed, so it counts for that capture alone.
        """
        assert self._plan is not None
        arrays = self._arrays
        self._plan.update(arrays["qo_indptr"], arrays["kv_lens"], arrays.get("kv_indptr"))
        self._captured = open_call((("qo_indptr", arrays["qo_indptr"]),)).capturing


def _refuse(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(
                f"{name}: belongs to what cumla does not have under this name, FP8 outputs, "
                f"profiling or other backends; leave it out, or import the wrapper from flashinfer"
            )


def _refuse_scales(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(
                f"{name}: needs a plan with kv_data_type {FP8}, got one for 16-bit numbers; leave "
                f"it out"
            )


def _with_scales(cache: Any, ckv_scale: Any, ckv_scale_arr: Any, kpe_scale: Any) -> tuple[Any, Any]:
    """Return an FP8 cache as cumla takes it, and the factor of what has no scales in it."""
    missing = "kpe_scale" if kpe_scale is None else "ckv_scale"
    if kpe_scale is None or (ckv_scale is None and ckv_scale_arr is None):
        raise ValueError(
            f"{missing}: needs the factor of the FP8 cache, got None; pass kpe_scale, and "
            f"ckv_scale or ckv_scale_arr (1.0 if the rows were not scaled)"
        )
    for name, scale in (("ckv_scale", ckv_scale), ("kpe_scale", kpe_scale)):
        if scale is not None and (isinstance(scale, bool) or not isinstance(scale, Real)):
            raise TypeError(
                f"{name}: needs a number, got {type(scale).__qualname__}; a tensor on a GPU would "
                f"have to be waited for, so pass float(...) of it once"
            )
        number_of(name, scale)
    if ckv_scale_arr is None:
        if ckv_scale == kpe_scale:
            return cache, kpe_scale
        first = cache[0] if isinstance(cache, tuple) else cache
        torch = sys.modules["torch"]
        shape, number = (*first.shape[:-1], SCALES), float(ckv_scale)
        ckv_scale_arr = torch.full(shape, number, dtype=torch.float32, device=first.device)
    if not isinstance(cache, tuple):
        cache = cache[..., :VALUE_DIM], cache[..., VALUE_DIM:]
    return (*cache, ckv_scale_arr), kpe_scale


def _check_tensor(name: str, array: Any) -> None:
    if not hasattr(array, "pin_memory"):
        raise TypeError(
            f"{name}: needs a tensor of PyTorch, got {type(array).__module__}."
            f"{type(array).__qualname__}; convert it, or call cumla.mla_attention, which takes "
            f"arrays of any framework"
        )


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _checked_dtypes(query: Any, cache: Any, output: Any) -> tuple[str, str]:
    """Return the names of the dtype of query and output, and of that of the cache."""
    name = _name(query)
    if name not in ("bfloat16", "float16"):
        raise TypeError(
            f"q_data_type: needs bfloat16 or float16, got {query}; import the wrapper from "
            f"flashinfer for others"
        )
    if cache != query and (name, _name(cache)) != ("bfloat16", FP8):
        raise TypeError(
            f"kv_data_type: needs q_data_type, {query}, or {FP8} beside bfloat16, got {cache}; "
            f"keep the cache in that, or import the wrapper from flashinfer"
        )
    if output not in (None, query):
        raise TypeError(
            f"output_dtype: needs q_data_type, {query}, got {output}; leave it out, and pass out= "
            f"of float32 to run() for an output that is not rounded"
        )
    return name, _name(cache)


def _lengths_and_pages(metadata: Any) -> dict[str, Any]:
    """Take the tensors of one form, by cumla's names, and check their kinds and batch."""
    for theirs in (_CSR, _DENSE):
        arrays: dict[str, Any] = {n: getattr(metadata, theirs[n], None) for n in theirs}
        if any(array is None for array in arrays.values()):
            continue
        for name, array in arrays.items():
            _check_tensor(theirs[name], array)
            check_axes(theirs[name], array, *_AXES[name])
        batch = arrays["kv_lens"].shape[0]
        for name, array in arrays.items():
            wanted = {"batch": batch, "batch + 1": batch + 1}.get(_AXES[name][0])
            if wanted not in (None, array.shape[0]):
                raise ValueError(
                    f"{theirs[name]}: needs {wanted} entries with the {batch} requests of "
                    f"{theirs['kv_lens']}, got {array.shape[0]}; describe the same requests"
                )
        return arrays
    raise TypeError(
        f"metadata: needs all of {', '.join(_CSR.values())}, or all of "
        f"{', '.join(_DENSE.values())}, got neither; make it with MLAPlanMetadata.csr or .dense"
    )


def _check_room(name: str, room: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Check that an array fits where graphs read it: lengths exactly, pages with room to spare."""
    fixed = 0 if name == "kv_indices" else 1
    if room[:fixed] != shape[:fixed] or room[fixed:] < shape[fixed:]:
        raise ValueError(
            f"{_CSR.get(name) or _DENSE[name]}: needs to fit the buffer of shape {room} that CUDA "
            f"graphs read, got {shape}; make the wrapper with larger buffers, and one for each "
            f"batch"
        )


def _one_form(name: str, whole: Any, **parts: Any) -> Any:
    """Return a packed tensor or a pair, however it was passed."""
    given = tuple(part for part in parts.values() if part is not None)
    if whole is not None and not given:
        return whole
    if whole is None and len(given) == len(parts):
        return given
    raise TypeError(
        f"{name}: needs {name}= alone, or {' and '.join(parts)} together, got "
        f"{len(given) + (whole is not None)} of the three; pass one form"
    )
