# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's FP8 logits of the sparse attention's indexer, over cumla's operations.

Logits are cleaned, to -inf where nothing is visible, by default in `fp8_mqa_logits` and not in
`fp8_paged_mqa_logits`; without cleaning those columns are undefined. The schedule of paged logits
is computed on the device, into the tensor that `get_paged_mqa_logits_metadata` returns: one for all
layers of a decoding step, which may be copied into a tensor that a CUDA graph reads. Rows of the
logits begin at multiples of 1024 bytes. Calls can be captured into a CUDA graph, once the kernels
are loaded.

Differences from DeepGEMM:

* Inference only: no gradients flow. FP4 queries, and arguments for other GPUs, are refused with
  `NotImplementedError`.
* More shapes are taken, and compressed and paged logits can be cleaned, too. DeepGEMM in vLLM 0.33
  and SGLang has no clean_logits and logits_dtype: there pass max_seqlen_k and indices by name.
* Paged logits are computed by as many multiprocessors as the metadata has parts, also for 4 queries
  of a request: pass ``get_num_sms()`` there, too, undivided. With other lengths than it was
  computed for, calls stay inside the cache, but their results are undefined.
* Graphs of torch.compile take the logits, after ``import cumla.torch``: there rows are not padded,
  and paged logits compute their schedule in the call, so that the metadata may be any.
* Tensors on the CPU are computed by `cumla.reference`; `get_num_sms` needs a GPU, or `set_num_sms`
  before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cumla.compat._arguments import check_axes, check_tensors, missing_from
from cumla.compat._table import Interface
from cumla.compat._torch import is_traced
from cumla.core.arguments import INT32, Array, bind, checked_int
from cumla.core.frameworks import eager_only
from cumla.core.operation import Operation, Output, run
from cumla.errors import CumlaError, UnsupportedDeviceError
from cumla.indexer.arguments import checked_logits_dtype, checked_pair
from cumla.indexer.logits import mqa_logits
from cumla.indexer.paged_logits import (
    _ATTEND,
    PagedArguments,
    checked_kv_lens,
    checked_paged,
    named,
    paged_mqa_logits,
)
from cumla.launch.device import current_device, properties, require_hopper
from cumla.launch.indexer.paged_mqa_logits import paged_mqa_logits_launch
from cumla.launch.indexer.paged_mqa_schedule import PagedMQAKey, paged_mqa_schedule_launch
from cumla.launch.indexer.shape import MOST_TOKENS, PagedMQAArguments

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from cumla.core.arguments import Views
    from cumla.core.arrays import ArrayView
    from cumla.core.operation import Launchable
    from cumla.core.paged import Host

__all__ = [
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_num_sms",
    "get_paged_mqa_logits_metadata",
    "set_num_sms",
]
__getattr__ = missing_from(__name__, "deep_gemm")

_ROW_BYTES = 1024  # rows of logits begin at multiples of it
_OTHER_GPUS = (
    "belongs to kernels for GPUs of another generation, which cumla does not have; leave it out"
)
_LOGITS = Interface(
    {"ks": "cu_seq_len_k_start", "ke": "cu_seq_len_k_end", "kv_lens": "context_lens"}
    | {"max_kv_len": "max_context_len", "q_len": "next_n", "batch*q_len": "batch*next_n"},
    refused=dict.fromkeys(("schedule_meta", "indices", "q[1]"), _OTHER_GPUS),
)

_num_sms: int | None = None  # the number that set_num_sms got


def get_num_sms() -> int:
    """Return the number that `set_num_sms` got, or the current GPU's multiprocessors."""
    if _num_sms is not None:
        return _num_sms
    try:
        return properties(current_device()).sm_count
    except CumlaError as error:
        raise UnsupportedDeviceError(
            f"{error}; without a GPU call set_num_sms(number) first"
        ) from error


def set_num_sms(new_num_sms: int) -> None:
    """Set the number of multiprocessors that paged logits are scheduled for, by `get_num_sms`.

    Differences from DeepGEMM: 0 stands for those of the current GPU again. Logits that are not
    paged use all multiprocessors.
    """
    global _num_sms
    if new_num_sms == 0 and type(new_num_sms) is int:
        _num_sms = None
        return
    checked_int("new_num_sms", new_num_sms, "pass the number of multiprocessors, or 0 for all")
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
    """Score the tokens of a sequence: `fp8_fp4_mqa_logits` of ``(q, None)``, in float32."""
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
    """Score the tokens of a sequence for each query.

    Differences from DeepGEMM: logits_dtype is float32 or bfloat16, and None is float32.
    """
    queries = _queries(q)
    _LOGITS.refuse({"schedule_meta": schedule_meta})
    pair = checked_pair("kv", kv)
    check_tensors(**pair)
    keys = pair["kv[0]"]
    check_axes("q", queries, "seq_len, num_heads, head_dim")
    check_axes("kv[0]", keys, "seq_len_kv, head_dim")
    dtype = checked_logits_dtype(logits_dtype)
    width = checked_int("max_seqlen_k", max_seqlen_k, "pass 0 for all columns", least=0)
    clean = clean_logits if type(clean_logits) is bool else _flag(clean_logits)
    out = None
    if not is_traced():  # a graph makes it without padding
        out = _padded_rows(queries, queries.shape[0], width or keys.shape[0], dtype)
    with _LOGITS():
        logits: torch.Tensor = mqa_logits(
            queries,
            kv,
            weights,
            cu_seq_len_k_start,
            cu_seq_len_k_end,
            max_kv_len=width or None,
            clean=clean,
            logits_dtype=dtype,
            out=out,
        )
    return logits


@eager_only
def get_paged_mqa_logits_metadata(
    context_lens: torch.Tensor, block_kv: int, num_sms: int, indices: None = None
) -> torch.Tensor:
    """Compute the schedule of paged logits, on the device, for all layers of a decoding step.

    Differences from DeepGEMM: block_kv is ignored; on the CPU the result holds zeros.
    """
    _LOGITS.refuse({"indices": indices})
    checked_int("num_sms", num_sms, "pass get_num_sms()")
    check_tensors(context_lens=context_lens)
    check_axes("context_lens", context_lens, "batch", "batch, next_n")
    with _LOGITS:
        (schedule,) = run(
            _METADATA, {"context_lens": context_lens}, {"schedule_meta": None}, num_sms
        )
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
    """Score cached tokens: `fp8_fp4_paged_mqa_logits` of ``(q, None)``, in float32."""
    return fp8_fp4_paged_mqa_logits(
        (q, None),
        kv_cache,
        weights,
        context_lens,
        block_table,
        schedule_meta,
        max_context_len,
        clean_logits,
        indices=indices,
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
    """Score the cached tokens of each request.

    Differences from DeepGEMM: logits_dtype is float32 or bfloat16, and None is float32.
    """
    queries = _queries(q)
    _LOGITS.refuse({"indices": indices})
    if schedule_meta is None:
        raise TypeError(
            "schedule_meta: needs a PyTorch tensor, got None; call get_paged_mqa_logits_metadata "
            "first"
        )
    check_tensors(schedule_meta=schedule_meta)
    check_axes("q", queries, "batch, next_n, num_heads, head_dim")
    dtype = checked_logits_dtype(logits_dtype)
    width = checked_int("max_context_len", max_context_len, "there is nothing to write")
    clean = clean_logits if type(clean_logits) is bool else _flag(clean_logits)
    if is_traced():  # graphs compute the schedule in the call
        arrays = queries, kv_cache, weights, block_table, context_lens
        traced: torch.Tensor = paged_mqa_logits(
            *arrays, max_kv_len=width, clean=clean, logits_dtype=dtype
        )
        return traced
    out = _padded_rows(queries, queries.shape[0] * queries.shape[1], width, dtype)
    with _LOGITS():
        inputs = named(queries, kv_cache, weights, block_table)
        inputs |= {"kv_lens": context_lens, "schedule_meta": schedule_meta}
        run(_SCORES, inputs, {"out": out}, (width, dtype, clean))
    return out


class _Metadata(Operation[tuple["ArrayView", int], PagedMQAKey]):
    """Deals the blocks of all requests out, into a tensor that the caller keeps."""

    def arguments(self, views: Views, options: int) -> tuple[ArrayView, int]:
        lens = views["context_lens"]
        assert lens is not None
        checked_kv_lens({"kv_lens": lens}, *_rows(lens))
        return lens, options

    def outputs(self, arguments: tuple[ArrayView, int]) -> tuple[Output, ...]:
        return (Output("schedule_meta", (arguments[1] + 1, 2), INT32),)

    def key(self, arguments: tuple[ArrayView, int], device: int) -> PagedMQAKey:
        require_hopper(device)
        lens, num_sms = arguments
        # Lengths that a table cannot hold are not known here; nothing else of the shape counts.
        most = MOST_TOKENS // 64
        return PagedMQAKey(*_rows(lens), 64, 128, 64, most, len(lens.shape) == 2, num_sms)

    def recipe(
        self,
        key: PagedMQAKey,
        arguments: tuple[ArrayView, int],
        outs: Sequence[ArrayView],
        buffer: int,
    ) -> Sequence[Launchable]:
        if 0 in arguments[0].shape:
            return ()
        return (paged_mqa_schedule_launch(key, arguments[0], outs[0].ptr, keeps_lens=False),)

    def reference(self, host: Host, arguments: tuple[ArrayView, int]) -> Sequence[Any]:
        return (np.zeros((arguments[1] + 1, 2), np.int32),)


_Scored = tuple[PagedArguments, "ArrayView", "ArrayView"]


class _Scores(Operation[_Scored, PagedMQAKey]):
    """Scores with the lengths of the call, by a schedule that the caller keeps."""

    trusted = ("kv_lens", "block_table")

    def arguments(self, views: Views, options: tuple[int, str | None, bool]) -> _Scored:
        attend = checked_paged(views, (*options, None))
        schedule = views["schedule_meta"]
        assert schedule is not None
        lens = checked_kv_lens(views, *attend.shape[:2])
        way_out = "pass what get_paged_mqa_logits_metadata returned"
        bind({"schedule_meta": Array("parts+1 2", INT32, "row", way_out)}, views, {})
        if schedule.shape[0] < 2 or schedule.strides[0] != 8 or schedule.ptr % 8:
            raise ValueError(
                f"schedule_meta: needs parts in contiguous memory at a multiple of 8 bytes, got "
                f"shape {schedule.shape}, strides {schedule.strides} and address "
                f"{schedule.ptr:#x}; {way_out}"
            )
        return attend, lens, schedule

    def outputs(self, arguments: _Scored) -> tuple[Output, ...]:
        return _ATTEND.outputs(arguments[0])

    def key(self, arguments: _Scored, device: int) -> PagedMQAKey:
        require_hopper(device)
        attend, lens, schedule = arguments
        return PagedMQAKey(*attend.shape, len(lens.shape) == 2, schedule.shape[0] - 1)

    def recipe(
        self, key: PagedMQAKey, arguments: _Scored, outs: Sequence[ArrayView], buffer: int
    ) -> Sequence[Launchable]:
        attend, lens, schedule = arguments
        q, k_cache, scales, weights, table, *_ = attend
        if 0 in q.shape:
            return ()
        assert weights is not None
        views = PagedMQAArguments(q, k_cache, scales, weights, lens, table, schedule.ptr, *outs)
        return (paged_mqa_logits_launch(key, views, clean=attend.clean),)

    def check_values(self, host: Host, arguments: _Scored) -> None:
        _ATTEND.check_values(host, arguments[0])

    def reference(self, host: Host, arguments: _Scored) -> Sequence[Any]:
        return _ATTEND.reference(host, arguments[0])


_METADATA = _Metadata()
_SCORES = _Scores()


def _rows(lens: ArrayView) -> tuple[int, int]:
    """Read batch and next_n off lengths, which may be without the latter."""
    batch, next_n = (*lens.shape, 1)[:2]
    return batch, next_n


def _padded_rows(
    like: torch.Tensor, rows: int, columns: int, dtype_name: str | None
) -> torch.Tensor:
    """Allocate logits whose rows begin at multiples of 1024 bytes."""
    import torch

    dtype = torch.bfloat16 if dtype_name == "bfloat16" else torch.float32
    step = _ROW_BYTES // dtype.itemsize
    return like.new_empty((rows, -(-columns // step) * step), dtype=dtype)[:, :columns]


def _flag(clean_logits: Any) -> bool:
    """Check clean_logits, in whose place vLLM's and SGLang's copies have the next argument."""
    is_count = type(clean_logits) is int and clean_logits not in (0, 1)
    if is_count or getattr(clean_logits, "ndim", None):
        raise TypeError(
            f"clean_logits: needs True or False, got {type(clean_logits).__qualname__}; pass the "
            f"arguments after it by name: copies of DeepGEMM without clean_logits have them there"
        )
    return bool(clean_logits)


def _queries(q: Any) -> Any:
    if not isinstance(q, (tuple, list)) or len(q) != 2:
        raise TypeError(
            f"q: needs a pair of queries and their scales, the latter None for FP8, got "
            f"{type(q).__qualname__}; pass (q, None)"
        )
    queries, scales = q
    _LOGITS.refuse({"q[1]": scales})
    check_tensors(q=queries)
    return queries
