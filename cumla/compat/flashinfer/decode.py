# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's decoding over `cumla.AttentionPlan`: one query token of each request, or a few.

One `plan` serves the `run` of every layer of a step, with the same window. With
``use_cuda_graph=True``, `plan` copies lengths and pages into the given buffers, and computes the
schedule anew: call it before a replay, on the stream of the replay. The first `plan` loads the
kernels, so the first `run` may be captured.

Differences from FlashInfer, of these wrappers and of those for prefill:

* `plan` waits for nothing, wherever its tensors are: the schedule is computed on the GPU. Lists are
  int32 or int64, on the GPU or the CPU. `plan` reads them later, so leave a tensor that only the
  wrapper holds unchanged until the runs of the step are done.
* Nothing is written to the workspace, which tells the device only. A plan of cumla is made for the
  shape of the first `run`, kept as long as shapes stay, and has memory of its own, of
  `cumla.AttentionPlan.workspace_bytes`.
* backend is "auto", "fa2" or "fa3", which all mean cumla's kernels.
* With ``use_cuda_graph=True`` all buffers are needed, and a plan for another batch, window, scale
  or dtype than the first one raises `ValueError`.
* Queries and outputs are bfloat16 or float16, keys and values the same or float8_e4m3fn. Pages have
  any size, kv heads any number of query heads, and head_dim is a multiple of 8 up to 512, of 16 up
  to 256 for e4m3. Caches of pages of one token may lack the axis of tokens.
* pos_encoding_mode is "NONE"; "ALIBI" without a soft cap, a custom mask or lse; or "ROPE_LLAMA" for
  keys of 16 bits: each run rotates a copy of all listed pages, so it is slow.
* fixed_split_size and disable_split_kv give a request the same bits in any batch, whatever the size
  is. The memory of such a plan grows with the longest request, which max_sequence_kv says; with
  lists on the GPU, or use_cuda_graph, that is all pages of indices.
* Scales are numbers, or tensors of one on the CPU; of e4m3 keys and values also float32 tensors on
  the device, ``(1,)``, ``(num_kv_heads,)`` or, for decoding, ``(batch, num_kv_heads)``, which the
  kernel reads, so that they may change between the replays of a graph.
* window_left of `run` is that of the plan. The lse includes the sinks.
* Speed hints, and what only other backends use, are ignored. Masks by element, the scoring of
  several items, and what belongs to other kernels are refused with `ValueError`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from cumla.compat._arguments import check_axes, check_tensors, missing_from
from cumla.compat.flashinfer._attention import (
    ATTENTION,
    Names,
    Options,
    PagedWrapper,
    attend_once,
)
from cumla.core.frameworks import eager_only

if TYPE_CHECKING:
    import torch

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "single_decode_with_kv_cache",
]
__getattr__ = missing_from(
    __name__,
    "flashinfer.decode",
    BatchDecodeMlaWithPagedKVCacheWrapper="BatchMLAPagedAttentionWrapper of cumla's mla",
)


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """Decoding over a paged cache, planned once a step."""

    _names = Names(
        arrays={
            "kv_indptr": "indptr",
            "kv_indices": "indices",
            "last_page_len": "last_page_len",
            "kv_lens": "seq_lens",
        },
        buffers={
            "kv_indptr": "paged_kv_indptr_buffer",
            "kv_indices": "paged_kv_indices_buffer",
            "last_page_len": "paged_kv_last_page_len_buffer",
        },
        sizes=("num_qo_heads", "num_kv_heads", "head_dim", "head_dim", "page_size"),
    )

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
    ) -> None:
        self._init_with(locals())
        self._use_tensor_cores = use_tensor_cores

    @property
    def resolved_backend(self) -> str:
        """The backend of the constructor, and "fa3" for "auto"; cumla's kernels serve all."""
        return "fa3" if self._backend == "auto" else self._backend

    @property
    def use_tensor_cores(self) -> bool:
        """The flag of the constructor; cumla's kernels always use tensor cores."""
        return self._use_tensor_cores

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype | str | None = "float16",
        kv_data_type: torch.dtype | str | None = None,
        o_data_type: torch.dtype | str | None = None,
        data_type: torch.dtype | str | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        window_right: int = 0,
        is_causal: bool | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Take lengths, pages and options for the runs that follow, without waiting for the GPU."""
        if not isinstance(q_len_per_req, int) or q_len_per_req < 1:
            raise ValueError(
                f"q_len_per_req: needs a number from 1, got {q_len_per_req}; pass the query tokens "
                f"of each request"
            )
        if is_causal not in (None, q_len_per_req > 1):
            raise ValueError(
                f"is_causal: needs what q_len_per_req {q_len_per_req} says, got {is_causal}; leave "
                f"it out"
            )
        # With one query the mask hides nothing.
        self._plan_with(locals(), causal=True, q_len=q_len_per_req)

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
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """Attend, with the lengths and pages of the last plan."""
        planned = self._planned_shape().q_len
        if q_len_per_req not in (None, planned):
            raise ValueError(
                f"q_len_per_req: needs that of the plan, {planned}, got {q_len_per_req}; leave it "
                f"out, or plan for it"
            )
        return self._run_on_pages_with(locals())

    run_return_lse = functools.partialmethod(run, return_lse=True)
    _refused_by_run = ATTENTION.refused_by(run)

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
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
        return self._forward_with(locals(), q, paged_kv_cache, causal=True)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """`BatchDecodeWithPagedKVCacheWrapper` with ``use_cuda_graph=True``."""

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer,
            kv_layout,
            True,
            use_tensor_cores,
            indptr_buffer,
            indices_buffer,
            last_page_len_buffer,
        )


def single_decode_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Attend from one query token to the keys of one request."""
    check_tensors(q=q)
    check_axes("q", q, "num_qo_heads, head_dim")
    state = attend_once(
        q[None],
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
        causal=False,
        scales=(q_scale, k_scale, v_scale),
        return_lse=return_lse,
    )
    return (state[0][0], state[1][0]) if return_lse else state[0]
