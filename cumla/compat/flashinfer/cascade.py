# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's merging of attention states over `cumla.merge_attention_states`, and its cascade."""

from __future__ import annotations

from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Any

from cumla.compat._arguments import check_axes, check_tensors, missing_from
from cumla.compat._table import Interface
from cumla.compat.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from cumla.core.arguments import checked_int
from cumla.core.frameworks import eager_only
from cumla.merge import merge_attention_states

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = [
    "MultiLevelCascadeAttentionWrapper",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]
__getattr__ = missing_from(__name__, "flashinfer.cascade")

_V, _S = "seq_len, num_heads, head_dim", "seq_len, num_heads"
_TWO = Interface(
    {
        "outs[0]": "v_a",
        "outs[1]": "v_b",
        "lses[0]": "s_a",
        "lses[1]": "s_b",
        "all of outs": "v_a and v_b",
    },
    RuntimeError,
)
_IN_PLACE = Interface(
    {
        "outs[0]": "v",
        "outs[1]": "v_other",
        "out": "v",
        "lses[0]": "s",
        "lses[1]": "s_other",
        "lse": "s",
        "all of outs": "v and v_other",
    },
    RuntimeError,
)
_MANY = Interface({"outs[0]": "v", "outs": "v", "all of outs": "v", "lses": "s"}, RuntimeError)


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the attention states of two sets of keys into that of their union.

    Differences from FlashInfer: v_a and v_b are both bfloat16, float16 or float32, with a multiple
    of 8 columns. Where both states are empty v is 0 and s -inf.
    """
    check_tensors(v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)
    with _TWO():
        check_axes("v_a", v_a, _V)
        return tuple(merge_attention_states((v_a, v_b), (s_a.float(), s_b.float()), lse_base=2))


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """Merge another attention state into ``(v, s)``, which is overwritten.

    Differences from FlashInfer: s is float32. Where mask is 0 the other state counts as empty: v
    and s keep their values, but a state that is empty itself becomes v = 0 and s = -inf, and one
    with s = NaN gets v = NaN. A mask costs a copy of s_other.
    """
    check_tensors(v=v, s=s, v_other=v_other, s_other=s_other)
    with _IN_PLACE():
        check_axes("v", v, _V)
        other = s_other.float()
        if mask is not None:
            check_tensors(mask=mask)
            check_axes("mask", mask, "seq_len")
            check_axes("s_other", other, _S)
            if mask.shape[0] != other.shape[0]:
                raise ValueError(
                    f"mask: needs an entry for each of the {other.shape[0]} rows of s_other, got "
                    f"{mask.shape[0]}; pass one flag for each row"
                )
            other = other.masked_fill(mask.logical_not()[:, None], -inf)
        merge_attention_states((v, v_other), (s, other), out=v, lse=s, lse_base=2)


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the attention states of any number of sets of keys into that of their union.

    Differences from FlashInfer: there is at least one state. Shapes in messages have num_states in
    front.
    """
    check_tensors(v=v, s=s)
    with _MANY():
        check_axes("v", v, "seq_len, num_states, num_heads, head_dim")
        check_axes("s", s, "seq_len, num_states, num_heads")
        return tuple(merge_attention_states(v.swapaxes(0, 1), s.float().swapaxes(0, 1), lse_base=2))


class MultiLevelCascadeAttentionWrapper:
    """Attention to prefixes that groups of requests share, in levels, planned once a step.

    Level l has groups of query tokens, each with pages of its own. A token attends to the pages of
    its group at every level; the last level is that of single requests.

    Differences from FlashInfer: every level has all query tokens. `window_left` is refused, because
    a window has no meaning over parts of a request. The states of all levels are merged by one
    kernel. Where groups are to be found on the GPU, or one level is shared, `cumla.attention` with
    groups is faster.
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_indptr_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_indices_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: list[torch.Tensor] | None = None,
    ) -> None:
        checked_int("num_levels", num_levels, "pass the number of levels")
        self._use_cuda_graph = bool(use_cuda_graph)
        buffers: dict[str, Any] = {
            "qo_indptr_buf": qo_indptr_buf_arr,
            "paged_kv_indptr_buf": paged_kv_indptr_buf_arr,
            "paged_kv_indices_buf": paged_kv_indices_buf_arr,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf_arr,
        }
        if self._use_cuda_graph:
            for name, listed in buffers.items():
                _check_levels(f"{name}_arr", listed, num_levels)
        self._levels = []
        for level in range(num_levels):
            own = (
                {name: listed[level] for name, listed in buffers.items()} if use_cuda_graph else {}
            )
            with _naming(level):
                wrapper = BatchPrefillWithPagedKVCacheWrapper(
                    float_workspace_buffer, kv_layout, self._use_cuda_graph, **own
                )
            self._levels.append(wrapper)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Return whether lengths and pages stay at the addresses that CUDA graphs read."""
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: list[torch.Tensor]
    ) -> None:
        """Do nothing: cumla's plans have memory of their own."""

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Do nothing: cumla's kernels take any strides of keys and values."""

    def plan(
        self,
        qo_indptr_arr: list[torch.Tensor],
        paged_kv_indptr_arr: list[torch.Tensor],
        paged_kv_indices_arr: list[torch.Tensor],
        paged_kv_last_page_len: list[torch.Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
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
    ) -> None:
        """Take lengths, pages and options for the runs that follow; `causal` is for the last level.

        Waits for nothing.
        """
        if window_left is not None and window_left >= 0:
            raise ValueError(
                f"window_left: needs -1 for levels, over which a window has no meaning, got "
                f"{window_left}; use a wrapper without levels for layers with windows"
            )
        if pos_encoding_mode != "NONE":
            raise ValueError(
                f"pos_encoding_mode: needs 'NONE' for levels, whose positions are not known, got "
                f"{pos_encoding_mode!r}; rotate by apply_rope_pos_ids before"
            )
        count = len(self._levels)
        listed: dict[str, Any] = {
            "qo_indptr_arr": qo_indptr_arr,
            "paged_kv_indptr_arr": paged_kv_indptr_arr,
            "paged_kv_indices_arr": paged_kv_indices_arr,
            "paged_kv_last_page_len": paged_kv_last_page_len,
        }
        for name, arrays in listed.items():
            _check_levels(name, arrays, count)
        for level, (wrapper, *arrays) in enumerate(
            zip(self._levels, *listed.values(), strict=True)
        ):
            with _naming(level):
                wrapper.plan(
                    *arrays,
                    *(num_qo_heads, num_kv_heads, head_dim, page_size),
                    causal=causal and level == count - 1,
                    use_fp16_qk_reduction=use_fp16_qk_reduction,
                    sm_scale=sm_scale,
                    logits_soft_cap=logits_soft_cap,
                    rope_scale=rope_scale,
                    rope_theta=rope_theta,
                    q_data_type=q_data_type,
                    kv_data_type=kv_data_type,
                )

    begin_forward = plan

    @eager_only
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Attend, with the lengths and pages of the last plan."""
        outs, lses = [], []
        for level, wrapper in enumerate(self._levels):
            with _naming(level):
                out, lse = wrapper.run(q, paged_kv_cache, return_lse=True)
            outs.append(out)
            lses.append(lse)
        if len(outs) > 1:
            merge_attention_states(outs, lses, out=outs[0], lse=lses[0], lse_base=2)
        merged: torch.Tensor = outs[0]
        return merged

    forward = run


def _check_levels(name: str, listed: Any, count: int) -> None:
    """Check that there is a tensor for each level."""
    if not isinstance(listed, (list, tuple)) or len(listed) != count:
        got = f"{len(listed)}" if isinstance(listed, (list, tuple)) else type(listed).__qualname__
        raise ValueError(
            f"{name}: needs a list of {count} tensors, one for each level, got {got}; pass one for "
            f"each"
        )


@contextmanager
def _naming(level: int) -> Iterator[None]:
    """Say in errors which level they are about."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError) as error:
        if type(error) not in (ValueError, TypeError, RuntimeError):
            raise
        raise type(error)(f"level {level}: {error}") from error
