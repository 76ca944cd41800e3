# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's FP8 logits of the sparse attention's indexer, over cumla's operations.

Code written for DeepGEMM runs by changing its import line::

    import cumla.compat.deep_gemm as deep_gemm

    schedule_meta = deep_gemm.get_paged_mqa_logits_metadata(
        context_lens, 64, deep_gemm.get_num_sms())
    for layer in layers:
        logits = deep_gemm.fp8_paged_mqa_logits(
            layer.q, layer.kv_cache, layer.weights, context_lens, block_table, schedule_meta,
            max_context_len)

What carries over from DeepGEMM:

* Logits are cleaned, to -inf where nothing is visible, by default in `fp8_mqa_logits` and not in
  `fp8_paged_mqa_logits`. Without cleaning those columns are undefined.
* The schedule of paged logits is computed on the device, into the tensor that
  `get_paged_mqa_logits_metadata` returns: one for all layers of a decoding step. It may be copied
  into a tensor that a CUDA graph reads. With other lengths than it was computed for, calls stay
  inside the cache, but their results are undefined.
* The rows of the logits begin at multiples of 1024 bytes: ``logits.stride(0)`` is larger than the
  number of columns.
* Calls can be captured into a CUDA graph, once the kernels are loaded.
* It is for inference: no gradients flow.

What differs: more shapes are taken (8, 16, 32 or 64 heads, pages of 16, 32, 64 or 128 tokens, up to
8 queries of a request, lengths of requests or of queries), and compressed and paged logits can be
cleaned, too, by the kernel itself. Paged logits are computed by as many multiprocessors as the
metadata has parts, also for 4 queries of a request: pass ``get_num_sms()`` there, too, undivided.

Tensors on the CPU are computed by `cumla.reference`; `get_num_sms` needs a GPU, or `set_num_sms`
before it. Errors of the operation behind a function call
arguments by its names: ``ks`` and ``ke`` are ``cu_seq_len_k_start`` and ``cu_seq_len_k_end``,
``schedule`` is ``schedule_meta``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cumla.indexer.checks import checked_logits_dtype, checked_number
from cumla.indexer.logits import checked_pair, mqa_logits, score_with_schedule, write_schedule
from cumla.launch.device import current_device, properties
from cumla.mla.checks import check_number

if TYPE_CHECKING:
    import torch

__all__ = [
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_num_sms",
    "get_paged_mqa_logits_metadata",
    "set_num_sms",
]

_ROW_BYTES = 1024  # rows of logits begin at multiples of it

_num_sms: int | None = None  # what set_num_sms was told


def get_num_sms() -> int:
    """Return the number that `set_num_sms` was told, or the current GPU's multiprocessors.

    Returns
    -------
    int

    Raises
    ------
    UnsupportedDeviceError, MissingDependencyError
        There is no GPU, or CuPy is missing.
    """
    return properties(current_device()).sm_count if _num_sms is None else _num_sms


def set_num_sms(new_num_sms: int) -> None:
    """Choose for how many multiprocessors paged logits are scheduled, through `get_num_sms`.

    Parameters
    ----------
    new_num_sms : int
        From 1, or 0 for those of the current GPU again. What is not paged uses all multiprocessors,
        whatever it is.

    Raises
    ------
    TypeError, ValueError
        It is no such number.
    """
    global _num_sms
    if new_num_sms == 0 and type(new_num_sms) is int:
        _num_sms = None
        return
    check_number("new_num_sms", new_num_sms, "pass the number of multiprocessors, or 0 for all")
    _num_sms = new_num_sms


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> torch.Tensor:
    """Score the tokens of a sequence for each query, with DeepGEMM's arguments and result.

    Parameters
    ----------
    q : torch.Tensor
        ``(seq_len, num_heads, head_dim)``, float8_e4m3fn.
    kv : pair of torch.Tensor
        Keys ``(seq_len_kv, head_dim)``, float8_e4m3fn, and scales ``(seq_len_kv,)``, float32.
    weights : torch.Tensor
        ``(seq_len, num_heads)``, float32.
    cu_seq_len_k_start, cu_seq_len_k_end : torch.Tensor
        ``(seq_len,)``, int32: the first token of each query and the one behind its last.
    clean_logits : bool
        Write -inf where nothing is visible.
    max_seqlen_k : int
        If not 0, columns of a compressed result, which begins with each query's first token.

    Returns
    -------
    torch.Tensor
        ``(seq_len, seq_len_kv)`` or ``(seq_len, max_seqlen_k)``, float32, rows padded.

    Raises
    ------
    TypeError, ValueError, CumlaError
        As `cumla.mqa_logits`.
    """
    return fp8_fp4_mqa_logits(
        (q, None), kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k
    )


def fp8_fp4_mqa_logits(
    q: tuple[torch.Tensor, torch.Tensor | None],
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype | None = None,
    schedule_meta: None = None,
) -> torch.Tensor:
    """Do the same as `fp8_mqa_logits`, under the name that newer versions have for it.

    Parameters
    ----------
    q : pair
        The queries of `fp8_mqa_logits`, and None: scales of q belong to other GPUs.
    kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k
        As in `fp8_mqa_logits`.
    logits_dtype : torch.dtype, optional
        float32 (the default) or bfloat16.
    schedule_meta : None
        Belongs to other GPUs.

    Returns
    -------
    torch.Tensor
        As `fp8_mqa_logits`.

    Raises
    ------
    NotImplementedError
        FP4 queries, or an argument for other GPUs.
    TypeError, ValueError, CumlaError
        As `cumla.mqa_logits`.
    """
    queries = _queries("fp8_fp4_mqa_logits", q)
    _refuse("fp8_fp4_mqa_logits", "schedule_meta", schedule_meta)
    _check_axes("q", queries, 3)
    keys, _ = checked_pair("kv", kv)
    _check_axes("kv[0]", keys, 2)
    dtype = checked_logits_dtype(logits_dtype)
    width = checked_number("max_seqlen_k", max_seqlen_k, "pass 0 for all columns", least=0)
    return mqa_logits(
        queries,
        kv,
        weights,
        cu_seq_len_k_start,
        cu_seq_len_k_end,
        max_seqlen_k=width,
        clean=bool(clean_logits),
        out=_padded_rows(queries, queries.shape[0], width or keys.shape[0], dtype),
    )


def get_paged_mqa_logits_metadata(
    context_lens: torch.Tensor, block_kv: int, num_sms: int, indices: None = None
) -> torch.Tensor:
    """Compute the schedule of paged logits, on the device, for all layers of a decoding step.

    Parameters
    ----------
    context_lens : torch.Tensor
        ``(batch,)`` or ``(batch, next_n)``, int32.
    block_kv : int
        Tokens of a page; not looked at, because the cache tells.
    num_sms : int
        What `get_num_sms` returned.
    indices : None
        Belongs to other GPUs.

    Returns
    -------
    torch.Tensor
        ``(num_sms + 1, 2)``, int32, on the device of context_lens. On the CPU it holds nothing.

    Raises
    ------
    NotImplementedError
        An argument for other GPUs is given.
    TypeError, ValueError, CumlaError
        num_sms is no number from 1, context_lens no such tensor; the rest as
        `cumla.PagedMQALogitsPlan.update`.
    """
    _refuse("get_paged_mqa_logits_metadata", "indices", indices)
    check_number("num_sms", num_sms, "pass get_num_sms()")
    _check_axes("context_lens", context_lens, 1, 2)
    schedule = context_lens.new_empty((num_sms + 1, 2))
    write_schedule(context_lens, schedule)
    return schedule


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor,
    max_context_len: int,
    clean_logits: bool = False,
    indices: None = None,
) -> torch.Tensor:
    """Score the cached tokens of each request, with DeepGEMM's arguments and result.

    Parameters
    ----------
    q : torch.Tensor
        ``(batch, next_n, num_heads, head_dim)``, float8_e4m3fn.
    kv_cache : torch.Tensor
        ``(num_blocks, block_kv, 1, head_dim + 4)``, uint8: keys, then scales, of each block.
    weights : torch.Tensor
        ``(batch * next_n, num_heads)``, float32.
    context_lens : torch.Tensor
        ``(batch,)`` or ``(batch, next_n)``, int32.
    block_table : torch.Tensor
        ``(batch, max_blocks)``, int32.
    schedule_meta : torch.Tensor
        What `get_paged_mqa_logits_metadata` returned, or a copy.
    max_context_len : int
        Columns of the logits.
    clean_logits : bool
        Write -inf where nothing is visible.
    indices : None
        Belongs to other GPUs.

    Returns
    -------
    torch.Tensor
        ``(batch * next_n, max_context_len)``, float32, rows padded.

    Raises
    ------
    NotImplementedError
        An argument for other GPUs is given.
    TypeError, ValueError, CumlaError
        As `cumla.paged_mqa_logits`.
    """
    _refuse("fp8_paged_mqa_logits", "indices", indices)
    return fp8_fp4_paged_mqa_logits(
        (q, None),
        kv_cache,
        weights,
        context_lens,
        block_table,
        schedule_meta,
        max_context_len,
        clean_logits,
    )


def fp8_fp4_paged_mqa_logits(
    q: tuple[torch.Tensor, torch.Tensor | None],
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype | None = None,
    indices: None = None,
) -> torch.Tensor:
    """Do the same as `fp8_paged_mqa_logits`, under the name that newer versions have for it.

    Parameters
    ----------
    q : pair
        The queries of `fp8_paged_mqa_logits`, and None: scales of q belong to other GPUs.
    kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits
        As in `fp8_paged_mqa_logits`.
    logits_dtype : torch.dtype, optional
        float32 (the default) or bfloat16.
    indices : None
        Belongs to other GPUs.

    Returns
    -------
    torch.Tensor
        As `fp8_paged_mqa_logits`.

    Raises
    ------
    NotImplementedError
        FP4 queries, or an argument for other GPUs.
    TypeError, ValueError, CumlaError
        As `cumla.paged_mqa_logits`.
    """
    queries = _queries("fp8_fp4_paged_mqa_logits", q)
    _refuse("fp8_fp4_paged_mqa_logits", "indices", indices)
    if schedule_meta is None:
        raise TypeError(
            "schedule_meta: needs a PyTorch tensor, got None; call get_paged_mqa_logits_metadata "
            "first"
        )
    _check_axes("schedule_meta", schedule_meta, 2)
    _check_axes("q", queries, 4)
    dtype = checked_logits_dtype(logits_dtype)
    width = checked_number("max_context_len", max_context_len, "there is nothing to write")
    rows = queries.shape[0] * queries.shape[1]
    return score_with_schedule(
        queries,
        kv_cache,
        weights,
        context_lens,
        block_table,
        schedule_meta,
        max_context_len=width,
        clean=bool(clean_logits),
        out=_padded_rows(queries, rows, width, dtype),
    )


def _padded_rows(
    like: torch.Tensor, rows: int, columns: int, dtype_name: str | None
) -> torch.Tensor:
    """Allocate logits whose rows begin at multiples of 1024 bytes."""
    import torch

    dtype = torch.bfloat16 if dtype_name == "bfloat16" else torch.float32
    step = _ROW_BYTES // dtype.itemsize
    return like.new_empty((rows, -(-columns // step) * step), dtype=dtype)[:, :columns]


def _queries(function: str, q: Any) -> Any:
    """Take the queries out of a pair with their scales, which must not be there."""
    if not isinstance(q, (tuple, list)) or len(q) != 2:
        raise TypeError(
            f"q: needs a pair of queries and their scales, the latter None for FP8, got "
            f"{type(q).__qualname__}; pass (q, None)"
        )
    queries, scales = q
    _refuse(function, "q[1]", scales)
    return queries


def _refuse(function: str, name: str, value: object) -> None:
    if value is not None:
        raise NotImplementedError(
            f"{function}: {name} belongs to kernels for GPUs of another generation, which cumla "
            f"does not have; leave it None, or call deep_gemm"
        )


def _check_axes(name: str, tensor: Any, *counts: int) -> None:
    """Check what is looked at here; the operations check the rest."""
    if not hasattr(tensor, "new_empty"):
        raise TypeError(
            f"{name}: needs a PyTorch tensor, got {type(tensor).__module__}."
            f"{type(tensor).__qualname__}; call cumla's own functions for arrays of others"
        )
    if len(tensor.shape) not in counts:
        wanted = " or ".join(str(count) for count in counts)
        raise ValueError(
            f"{name}: needs {wanted} axes, got shape {tuple(tensor.shape)}; reshape it"
        )
