# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's prefill over `cumla.AttentionPlan`: any numbers of query tokens.

Keys and values come in pages, or as rows without them. The contract is that of
:mod:`cumla.compat.flashinfer.decode`, with these additions:

* With ``use_cuda_graph=True`` the number of rows of the query must stay, as well as the batch. Rows
  after the last offset of `qo_indptr` belong to nobody; what they give in ``out`` is not written.
* ``causal`` is False unless told otherwise, and aligned to the last key of each request. A window
  without it has no bound after the query's own position.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from cumla.compat._arguments import check_axes, check_tensors, missing_from, refuse
from cumla.compat.flashinfer._attention import (
    NAMES,
    AttentionWrapper,
    Numbers,
    Options,
    PagedWrapper,
    attend_once,
    longest_of,
    refuse_masks,
    splits_alike,
)
from cumla.compat.flashinfer._wrapper import NO_KERNELS

if TYPE_CHECKING:
    import torch

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]
__getattr__ = missing_from(__name__, "flashinfer.prefill")

_PAGED = {
    "qo_indptr": "qo_indptr",
    "kv_indptr": "paged_kv_indptr",
    "kv_indices": "paged_kv_indices",
    "last_page_len": "paged_kv_last_page_len",
    "kv_lens": "seq_lens",
}
_RAGGED = {"qo_indptr": "qo_indptr", "kv_indptr": "kv_indptr"}


def _refuse_items(prefix: Any, positions: Any, length: int, most: Any) -> None:
    refuse(
        "belongs to the scoring of several items, which cumla does not have",
        ValueError,
        prefix_len_ptr=prefix,
        token_pos_in_items_ptr=positions,
        token_pos_in_items_len=length or None,
        max_item_len_ptr=most,
    )


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """Attention of any numbers of query tokens over a paged cache, planned once a step.

    As `BatchDecodeWithPagedKVCacheWrapper`. custom_mask_buf, mask_indptr_buf and max_total_num_rows
    are ignored; variant_owns_mask is refused.
    """

    _names = _PAGED

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
        variant_owns_mask: bool = False,
        max_total_num_rows: int | None = None,
    ) -> None:
        buffers = {
            "qo_indptr": ("qo_indptr_buf", qo_indptr_buf),
            "kv_indptr": ("paged_kv_indptr_buf", paged_kv_indptr_buf),
            "kv_indices": ("paged_kv_indices_buf", paged_kv_indices_buf),
            "last_page_len": ("paged_kv_last_page_len_buf", paged_kv_last_page_len_buf),
        }
        jit = {"jit_args": jit_args, "jit_kwargs": jit_kwargs}
        jit["variant_owns_mask"] = variant_owns_mask or None
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, buffers, backend, **jit)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: torch.dtype | str | None = None,
        o_data_type: torch.dtype | str | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Say what the runs that follow are about, without waiting for the GPU.

        As `BatchDecodeWithPagedKVCacheWrapper.plan`. With fixed_split_size or disable_split_kv,
        max_sequence_kv says the longest request, if it is given. use_fp16_qk_reduction, seq_lens_q,
        max_token_per_sequence and uniform_q_len are ignored; masks by element and the scoring of
        several items are refused.
        """
        refuse_masks(custom_mask, packed_custom_mask)
        refuse(NO_KERNELS, ValueError, use_token_head_sf=use_token_head_sf or None)
        _refuse_items(
            prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr
        )
        columns = head_dim_qk, head_dim_qk if head_dim_vo is None else head_dim_vo
        self._say_pages(
            {
                "qo_indptr": qo_indptr,
                "kv_indptr": paged_kv_indptr,
                "kv_indices": paged_kv_indices,
                "last_page_len": paged_kv_last_page_len,
            },
            seq_lens,
            Numbers(num_qo_heads, num_kv_heads, *columns, page_size),
            (q_data_type, kv_data_type, o_data_type),
            Options(window_left, logits_soft_cap, sm_scale).checked(
                pos_encoding_mode, rope_scale, rope_theta
            ),
            fixed_split_size,
            disable_split_kv,
            max_sequence_kv,
            causal=causal,
        )

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Any:
        """Attend, with the lengths and pages of the last plan.

        As `BatchDecodeWithPagedKVCacheWrapper.run`, but for scales per request. Values may have
        another head_dim in a pair. lse_base is "log2" or "ln"; with lse_layout "HN" lse is
        ``(num_qo_heads, tokens)``. Rows of no request hold anything.
        """
        elsewhere = {
            "args": args or None,
            "skip_softmax_threshold_scale_factor": skip_softmax_threshold_scale_factor,
            "kv_cache_sf": kv_cache_sf,
            "use_fp16_softmax": use_fp16_softmax or None,
            "uses_spcompress": uses_spcompress or None,
        }
        return self._attend_to_pages(
            q,
            paged_kv_cache,
            elsewhere,
            scales=(q_scale, k_scale, v_scale),
            sinks=sinks,
            out=out,
            lse=lse,
            return_lse=return_lse,
            window_left=window_left,
            lse_base=lse_base,
            lse_layout=lse_layout,
        )

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> Any:
        """Attend as `run` does, with options that take the place of the plan's.

        FlashInfer deprecates it, and `forward_return_lse`.
        """
        options = Options(window_left, logits_soft_cap, sm_scale).checked(
            pos_encoding_mode, rope_scale, rope_theta
        )
        self._override(causal, options)
        scales: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale}
        return self.run(q, paged_kv_cache, **scales, return_lse=return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)


class BatchPrefillWithRaggedKVCacheWrapper(AttentionWrapper):
    """Attention over keys and values in rows, one request after the other, planned once a step.

    As `BatchPrefillWithPagedKVCacheWrapper`. With kv_layout "HND" keys and values are
    ``(num_kv_heads, rows, head_dim)``.
    """

    _names = _RAGGED

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
        variant_owns_mask: bool = False,
    ) -> None:
        buffers = {
            "qo_indptr": ("qo_indptr_buf", qo_indptr_buf),
            "kv_indptr": ("kv_indptr_buf", kv_indptr_buf),
        }
        jit = {"jit_args": jit_args, "jit_kwargs": jit_kwargs}
        jit["variant_owns_mask"] = variant_owns_mask or None
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, buffers, backend, **jit)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: torch.dtype | str | None = None,
        o_data_type: torch.dtype | str | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None,
        qo_indptr_cpu: torch.Tensor | None = None,
        kv_indptr_cpu: torch.Tensor | None = None,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Say what the runs that follow are about, without waiting for the GPU.

        As `BatchPrefillWithPagedKVCacheWrapper.plan`. With fixed_split_size or disable_split_kv,
        and kv_indptr on the GPU, kv_indptr_cpu or max_sequence_kv is needed. seq_lens and
        qo_indptr_cpu are ignored; v_indptr and o_indptr are refused.
        """
        refuse_masks(custom_mask, packed_custom_mask)
        refuse(NO_KERNELS, ValueError, use_token_head_sf=use_token_head_sf or None)
        _refuse_items(
            prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr
        )
        refuse(
            "cumla has the rows of values where those of keys are, and those of the output where "
            "the queries are",
            ValueError,
            v_indptr=v_indptr,
            o_indptr=o_indptr,
        )
        longest = None
        if splits_alike(fixed_split_size, disable_split_kv):
            check_tensors(kv_indptr=kv_indptr)
            known = kv_indptr if kv_indptr_cpu is None else kv_indptr_cpu
            longest = longest_of(known, max_sequence_kv)
        columns = head_dim_qk, head_dim_qk if head_dim_vo is None else head_dim_vo
        self._say(
            {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr},
            Numbers(num_qo_heads, num_kv_heads, *columns, 0),
            (q_data_type, kv_data_type, o_data_type),
            Options(window_left, logits_soft_cap, sm_scale).checked(
                pos_encoding_mode, rope_scale, rope_theta
            ),
            causal=causal,
            max_kv_len=longest,
        )

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        o_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """Attend, with the offsets of the last plan.

        As `BatchPrefillWithPagedKVCacheWrapper.run`; o_scale is refused.
        """
        refuse(NO_KERNELS, ValueError, args=args or None, o_scale=o_scale, kv_cache_sf=kv_cache_sf)
        with NAMES:
            check_tensors(k=k, v=v)
            for name, rows in (("k", k), ("v", v)):
                check_axes(name, rows, "rows, num_kv_heads, head_dim")
                self._check_heads(name, rows)
        if self._kv_layout == "HND":
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        return self._attend(
            NAMES,
            q,
            k,
            v,
            scales=(q_scale, k_scale, v_scale),
            out=out,
            lse=lse,
            return_lse=return_lse,
            lse_base=lse_base,
            lse_layout=lse_layout,
        )

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> Any:
        """Attend as `run` does, with options that take the place of the plan's.

        FlashInfer deprecates it, and `forward_return_lse`.
        """
        options = Options(window_left, logits_soft_cap, sm_scale).checked(
            pos_encoding_mode, rope_scale, rope_theta
        )
        self._override(causal, options)
        return self.run(q, k, v, return_lse=return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)


def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: Any = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> Any:
    """Attend from the query tokens of one request to its keys, of one or more.

    Arguments, results and errors are those of `BatchPrefillWithPagedKVCacheWrapper`. backend is
    ignored; scale_q, scale_k, scale_v and o_dtype are refused.
    """
    refuse_masks(custom_mask, packed_custom_mask)
    refuse(
        NO_KERNELS,
        ValueError,
        scale_q=scale_q,
        scale_k=scale_k,
        scale_v=scale_v,
        o_dtype=o_dtype,
        kv_cache_sf=kv_cache_sf,
    )
    options = Options(window_left, logits_soft_cap, sm_scale).checked(
        pos_encoding_mode, rope_scale, rope_theta
    )
    return attend_once(
        q,
        k,
        v,
        kv_layout,
        options,
        causal=causal,
        scales=(None, k_scale, v_scale),
        return_lse=return_lse,
    )


single_prefill_with_kv_cache_return_lse = functools.partial(
    single_prefill_with_kv_cache, return_lse=True
)
