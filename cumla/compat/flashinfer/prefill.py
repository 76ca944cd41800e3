# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's prefill over `cumla.AttentionPlan`: any numbers of query tokens.

Keys and values come in pages, or as rows without them. ``causal`` is aligned to the last key of
each request.

Differences from FlashInfer, beside those of :mod:`cumla.compat.flashinfer.decode`:

* custom_mask and packed_custom_mask are fast if they show, in each row, one interval of keys and
  any of the last 256 of the request: causal prefixes with trees of drafts, images, chunks. With
  other masks each query token is a request of its own, with a list of its keys, and `run` copies
  the listed pages. Wrappers for graphs refuse these with `ValueError`. `plan` reads the mask, and
  waits for the GPU. The query then has no further rows.
* With ``use_cuda_graph=True`` and a mask the wrapper needs custom_mask_buf. Graphs read
  other arrays, to which `plan` copies the mask: call it for each mask. The first plan has the
  most query tokens. mask_indptr_buf is ignored.
* With ``use_cuda_graph=True`` the number of rows of the query must stay, as well as the batch. Rows
  of no request hold anything; those after the last offset of qo_indptr are not written in ``out``.
* With fixed_split_size or disable_split_kv a ragged wrapper needs kv_indptr on the CPU,
  kv_indptr_cpu or max_sequence_kv. With ``use_cuda_graph=True`` the first plan fixes the longest
  request: pass max_sequence_kv there. FlashInfer serves longer ones later with disable_split_kv,
  but does not promise it with fixed_split_size.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from cumla.compat._arguments import check_axes, check_tensors, missing_from
from cumla.compat.flashinfer._attention import (
    ATTENTION,
    AttentionWrapper,
    Names,
    Options,
    PagedWrapper,
    attend_once,
    longest_of,
    splits_alike,
)
from cumla.compat.flashinfer._wrapper import checked_batch
from cumla.core.frameworks import eager_only

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]
__getattr__ = missing_from(__name__, "flashinfer.prefill")


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """Attention of any numbers of query tokens over a paged cache, planned once a step."""

    _names = Names(
        arrays={
            "qo_indptr": "qo_indptr",
            "kv_indptr": "paged_kv_indptr",
            "kv_indices": "paged_kv_indices",
            "last_page_len": "paged_kv_last_page_len",
            "kv_lens": "seq_lens",
        },
        buffers={
            "qo_indptr": "qo_indptr_buf",
            "kv_indptr": "paged_kv_indptr_buf",
            "kv_indices": "paged_kv_indices_buf",
            "last_page_len": "paged_kv_last_page_len_buf",
        },
    )

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
        self._init_with(locals())

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
        """Take lengths, pages and options for the runs that follow.

        Waits for the GPU only to look at a mask.
        """
        self._plan_with(locals(), causal)

    begin_forward = plan
    _refused_by_plan = ATTENTION.refused_by(plan)

    @eager_only
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
        """Attend, with the lengths and pages of the last plan."""
        return self._run_on_pages_with(locals())

    run_return_lse = functools.partialmethod(run, return_lse=True)
    _refused_by_run = ATTENTION.refused_by(run)

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
        return self._forward_with(locals(), q, paged_kv_cache, causal=causal)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)


class BatchPrefillWithRaggedKVCacheWrapper(AttentionWrapper):
    """Attention over keys and values in rows, one request after the other, planned once a step.

    Differences from FlashInfer: with kv_layout "HND" keys and values are ``(num_kv_heads, rows,
    head_dim)``.
    """

    _names = Names(
        arrays={"qo_indptr": "qo_indptr", "kv_indptr": "kv_indptr"},
        buffers={"qo_indptr": "qo_indptr_buf", "kv_indptr": "kv_indptr_buf"},
    )

    def _lengths_of(
        self, given: Mapping[str, Any], arrays: dict[str, Any], page_size: int
    ) -> tuple[int, int | None]:
        batch = checked_batch(self._theirs, arrays)
        if not splits_alike(given):
            return batch, None
        on_host = given["kv_indptr_cpu"]
        known = given["kv_indptr"] if on_host is None else on_host
        longest = longest_of(known, given["max_sequence_kv"])
        first = self._said.get("max_sequence_kv")  # for which a graph's plan has memory
        if first is not None and longest > first:
            raise ValueError(
                f"kv_indptr: needs requests of at most {first} keys, for which the first plan of "
                f"this wrapper was made, got {longest}; pass max_sequence_kv to the first plan"
            )
        return batch, first or longest

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
        self._init_with(locals())

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
        """Take offsets and options for the runs that follow; waits only to look at a mask."""
        self._plan_with(locals(), causal)

    begin_forward = plan
    _refused_by_plan = ATTENTION.refused_by(plan)

    @eager_only
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
        """Attend, with the offsets of the last plan."""
        given = locals()
        ATTENTION.refuse(given, self._refused_by_run)
        with ATTENTION:
            check_tensors(k=k, v=v)
            for name, rows in (("k", k), ("v", v)):
                check_axes(name, rows, "rows, num_kv_heads, head_dim")
                self._check_heads(name, rows)
        if self._kv_layout == "HND":
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        return self._run_with(ATTENTION, given, k, v)

    run_return_lse = functools.partialmethod(run, return_lse=True)
    _refused_by_run = ATTENTION.refused_by(run)

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
        return self._forward_with(locals(), q, k, v, causal=causal)

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
    """Attend from the query tokens of one request to its keys.

    Differences from FlashInfer: backend is ignored; scale_q, scale_k, scale_v, o_dtype and
    kv_cache_sf are refused; masks as above.
    """
    ATTENTION.refuse(
        {
            "scale_q": scale_q,
            "scale_k": scale_k,
            "scale_v": scale_v,
            "o_dtype": o_dtype,
            "kv_cache_sf": kv_cache_sf,
        }
    )
    return attend_once(
        q,
        k,
        v,
        kv_layout,
        Options.of(
            {
                "pos_encoding_mode": pos_encoding_mode,
                "window_left": window_left,
                "logits_soft_cap": logits_soft_cap,
                "sm_scale": sm_scale,
                "rope_scale": rope_scale,
                "rope_theta": rope_theta,
            }
        ),
        causal=causal,
        scales=(None, k_scale, v_scale),
        return_lse=return_lse,
        masks={"custom_mask": custom_mask, "packed_custom_mask": packed_custom_mask},
    )


single_prefill_with_kv_cache_return_lse = functools.partial(
    single_prefill_with_kv_cache, return_lse=True
)
