# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's Python interface over `cumla.mla_decode`.

Code written for FlashMLA runs by changing its import line::

    from cumla.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata

    tile_scheduler_metadata, num_splits = get_mla_metadata()
    for layer in layers:
        out, lse = flash_mla_with_kvcache(
            layer.q, layer.k_cache, block_table, cache_seqlens, 512,
            tile_scheduler_metadata, num_splits, causal=True,
        )

What carries over from FlashMLA:

* The schedule is computed on the device by the first call with a metadata object and serves every
  later call with it: one object for one decoding step, all layers. Calls that follow a change of
  ``cache_seqlens`` need a new object; with the old one they stay inside the cache, but their
  results are undefined.
* If that first call is captured into a CUDA graph, the schedule is part of the graph: each replay
  computes it anew from what ``cache_seqlens`` then holds.
* A graph that captured only later calls reads the schedule of the metadata object that they were
  given: keep the object as long as the graph.
* A metadata object belongs to the shapes, dtype, device and mask of its first call.
* It is for inference: no gradients flow.

Where it changes to another stream the schedule is computed again, because a `cumla.MLADecodePlan`
serves one stream. Tensors on the CPU are computed by `cumla.reference`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from cumla.core.arrays import open_call
from cumla.launch.mla.shape import VALUE_DIM, MLADecodeKey
from cumla.mla.checks import checked_query_and_cache
from cumla.mla.decode import MLADecodePlan, decode_key

if TYPE_CHECKING:
    import torch

__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]

_PAGE_SIZE = 64  # tokens


class FlashMLASchedMeta:
    """What `get_mla_metadata` returns: empty at first, the schedule from the first call on.

    Nothing in it is for users to read or to change.
    """

    __slots__ = ("_plan",)

    def __init__(self) -> None:
        self._plan: MLADecodePlan | None = None


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """Make the metadata object of one decoding step.

    Parameters
    ----------
    *args, **kwargs
        Accepted and ignored, so that calls written for any version of FlashMLA work: lengths and
        shapes are taken from the first `flash_mla_with_kvcache` call.

    Returns
    -------
    tile_scheduler_metadata : FlashMLASchedMeta
        Pass it to every `flash_mla_with_kvcache` call of the step.
    num_splits : None
        A placeholder for the second result of older versions.
    """
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode over a paged latent cache, with FlashMLA's arguments and results.

    Parameters
    ----------
    q : torch.Tensor
        ``(batch, seq_q, heads_q, 576)``, bfloat16 or float16.
    k_cache : torch.Tensor
        ``(num_blocks, 64, heads_k, 576)``, q's dtype.
    block_table : torch.Tensor
        ``(batch, max_blocks)``, int32: the pages of each request, in order.
    cache_seqlens : torch.Tensor
        ``(batch,)``, int32: tokens of each request in the cache.
    head_dim_v : int
        512: the values are the first 512 elements of a cache row.
    tile_scheduler_metadata : FlashMLASchedMeta
        The first element of what `get_mla_metadata` returned.
    num_splits : None
        The second element.
    softmax_scale : float, optional
        Factor on q.k before the softmax; ``q.shape[-1] ** -0.5`` if omitted.
    causal : bool
        Bottom-right causal mask: the last query sees the whole request.
    is_fp8_kvcache, indices, attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, \
extra_topk_length
        Arguments of FlashMLA's sparse attention, which cumla does not have yet: leave them at
        their defaults.

    Returns
    -------
    out : torch.Tensor
        ``(batch, seq_q, heads_q, 512)``, q's dtype. 0 where there is nothing to attend.
    lse : torch.Tensor
        ``(batch, heads_q, seq_q)``, float32, natural logarithm. +inf where out is 0.

    Raises
    ------
    NotImplementedError
        If an argument of the sparse attention is given; the message names it.
    TypeError, ValueError
        If an argument is none that `cumla.mla_decode` takes (messages call ``k_cache`` by its name
        there, ``kv_cache``), or the metadata object was first used with other shapes.
    CumlaError
        As `cumla.mla_decode`.
    """
    _refuse(
        is_fp8_kvcache=is_fp8_kvcache or None,
        indices=indices,
        attn_sink=attn_sink,
        extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache,
        topk_length=topk_length,
        extra_topk_length=extra_topk_length,
    )
    _check_metadata(head_dim_v, tile_scheduler_metadata, num_splits)
    call = open_call((("q", q), ("k_cache", k_cache)))
    views = dict(zip(("q", "kv_cache"), call.views, strict=True))
    columns = checked_query_and_cache(views)
    _check_page_size(columns.kv_cache.shape[1])
    causal = bool(causal)  # FlashMLA takes what is merely true or false
    key = decode_key(columns.q, columns.kv_cache, causal=causal)
    if key.cache != "same":
        raise TypeError(
            f"k_cache: needs q's dtype {key.dtype}, got {columns.kv_cache.dtype}; call "
            f"cumla.mla_decode, which takes FP8 caches and their scales"
        )
    plan = tile_scheduler_metadata._plan
    if plan is not None and plan.key != key:
        raise ValueError(
            f"tile_scheduler_metadata: needs what it was first used with, {_describe(plan.key)}, "
            f"got {_describe(key)}; call get_mla_metadata() for each combination"
        )
    if plan is None or not plan.serves(call.stream):
        plan = MLADecodePlan.from_arrays(q, k_cache, causal=causal)
        plan.update(cache_seqlens)
    result = plan.run(q, k_cache, block_table, cache_seqlens, softmax_scale=softmax_scale)
    tile_scheduler_metadata._plan = plan
    return result.out, result.lse


def flash_mla_sparse_fwd(*args: Any, **kwargs: Any) -> NoReturn:
    """Sparse prefill attention: not in cumla yet, raises NotImplementedError."""
    _not_implemented("flash_mla_sparse_fwd")


def flash_attn_varlen_func(*args: Any, **kwargs: Any) -> NoReturn:
    """Dense prefill attention: not in cumla yet, raises NotImplementedError."""
    _not_implemented("flash_attn_varlen_func")


def flash_attn_varlen_qkvpacked_func(*args: Any, **kwargs: Any) -> NoReturn:
    """Dense prefill attention of packed qkv: not in cumla yet, raises NotImplementedError."""
    _not_implemented("flash_attn_varlen_qkvpacked_func")


def flash_attn_varlen_kvpacked_func(*args: Any, **kwargs: Any) -> NoReturn:
    """Dense prefill attention of packed kv: not in cumla yet, raises NotImplementedError."""
    _not_implemented("flash_attn_varlen_kvpacked_func")


def _not_implemented(name: str) -> NoReturn:
    raise NotImplementedError(
        f"{name}: cumla implements only the dense decoding of FlashMLA so far; "
        "import this function from flash_mla"
    )


def _refuse(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(
                f"flash_mla_with_kvcache: {name}= belongs to sparse attention, and cumla has only "
                f"dense decoding so far; leave {name} at its default, or call flash_mla"
            )


def _check_metadata(head_dim_v: int, metadata: object, num_splits: object) -> None:
    if not isinstance(metadata, FlashMLASchedMeta):
        raise TypeError(
            "tile_scheduler_metadata: needs the first element of what "
            f"cumla.compat.flash_mla.get_mla_metadata() returned, got {type(metadata).__name__}; "
            "import get_mla_metadata from there, too"
        )
    if num_splits is not None:
        raise TypeError(
            "num_splits: needs None, the second element of what get_mla_metadata() returned, "
            f"got {type(num_splits).__name__}; cumla schedules on its own"
        )
    if head_dim_v != VALUE_DIM:
        raise ValueError(
            f"head_dim_v: needs {VALUE_DIM}, the width of the values in a cache row, got "
            f"{head_dim_v}; pass {VALUE_DIM}, and slice the output where you need fewer columns"
        )


def _check_page_size(page_size: int) -> None:
    if page_size != _PAGE_SIZE:
        raise ValueError(
            f"k_cache: needs a page size of {_PAGE_SIZE} tokens, FlashMLA's, got {page_size}; call "
            f"cumla.mla_decode, which takes any"
        )


def _describe(key: MLADecodeKey) -> str:
    return (
        f"batch={key.batch} seq_q={key.q_len} heads_q={key.num_heads} page_size={key.page_size} "
        f"heads_k={key.num_kv_heads} dtype={key.dtype} causal={key.causal} device={key.device}"
    )
