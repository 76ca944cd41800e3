# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's writing into paged caches, over `cumla.append_kv_cache` and `append_mla_cache`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from cumla.compat._arguments import check_integers, check_new_rows, check_tensors, missing_from
from cumla.compat._table import Interface
from cumla.compat.flashinfer._cache import is_pair, names_of_parts, split_cache
from cumla.core.names import arg
from cumla.mha.cache import append_kv_cache
from cumla.mla.cache import append_mla_cache

if TYPE_CHECKING:
    import torch

__all__ = [
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
]
__getattr__ = missing_from(__name__, "flashinfer.page")

_PARTS = {
    pair: Interface(
        dict(zip(("k_cache", "v_cache"), names_of_parts(pair), strict=True))
        | {"k": "append_key", "v": "append_value"},
        RuntimeError,
    )
    for pair in (False, True)
}
_MLA = Interface(
    {
        "rows[0]": "append_ckv",
        "rows[1]": "append_kpe",
        "kv_cache[0]": "ckv_cache",
        "kv_cache[1]": "kpe_cache",
        "kv_cache": "ckv_cache",
    },
    RuntimeError,
)


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Write new keys and values into a paged cache, whose page lists have room for them already.

    Differences from FlashInfer:

    * A row whose request or position is negative, or whose position is after its request's pages,
      is skipped. The numbers of kv_last_page_len are not used.
    * Caches have the dtype of append_key, or are float8_e4m3fn, to which rows are rounded. They may
      lack the axis of tokens if pages have one. Values may have another head_dim in a pair.
    * Lists may be int64, which is copied.
    """
    check_tensors(kv_indices=kv_indices, kv_indptr=kv_indptr)
    check_tensors(append_key=append_key, append_value=append_value)
    with _PARTS[is_pair(paged_kv_cache)]():
        _check_offsets(kv_indptr, kv_last_page_len)
        caches = split_cache(paged_kv_cache, kv_layout)
        check_new_rows(append_key=(append_key, caches[0]), append_value=(append_value, caches[1]))
        append_kv_cache(
            append_key,
            append_value,
            *caches,
            batch_indices=batch_indices,
            positions=positions,
            **_lists(kv_indices, kv_indptr),
            kv_layout=kv_layout,
        )


def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    """Write new rows into a paged MLA cache, whose page lists have room for them already.

    Differences from FlashInfer: rows have the cache's dtype, bfloat16 or float16, or are float32,
    which is rounded. Both caches may be columns of one tensor. Lists, and the rows that are
    skipped, are as in `append_paged_kv_cache`.
    """
    check_tensors(kv_indices=kv_indices, kv_indptr=kv_indptr)
    with _MLA():
        _check_offsets(kv_indptr, kv_last_page_len)
        append_mla_cache(
            (append_ckv, append_kpe),
            (ckv_cache, kpe_cache),
            batch_indices=batch_indices,
            positions=positions,
            **_lists(kv_indices, kv_indptr),
        )


def _lists(kv_indices: torch.Tensor, kv_indptr: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return page lists as int32 without gaps."""
    given = {"kv_indices": kv_indices, "kv_indptr": kv_indptr}
    check_integers(**given)
    return {name: array.int().contiguous() for name, array in given.items()}


def _check_offsets(kv_indptr: torch.Tensor, last: torch.Tensor) -> None:
    """Check that offsets are not page numbers, with which nothing would be written."""
    check_tensors(kv_last_page_len=last)
    if kv_indptr.shape[0] != last.shape[0] + 1:
        raise ValueError(
            f"kv_indptr: needs {last.shape[0] + 1} entries with the {last.shape[0]} requests of "
            f"kv_last_page_len, got {kv_indptr.shape[0]}; pass kv_indices, the page numbers, "
            f"before kv_indptr"
        )


def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the request of each new token, and its position there, without waiting for the GPU.

    Differences from FlashInfer: tokens of no request get the request -1, which an append skips, and
    the position 0. seq_lens may be longer.
    """
    outputs = {"batch_indices": batch_indices, "positions": positions}
    given = {name: output for name, output in outputs.items() if output is not None}
    check_tensors(append_indptr=append_indptr, seq_lens=seq_lens, **given)
    with _MLA:
        check_integers(append_indptr=append_indptr, seq_lens=seq_lens)
    append_indptr = append_indptr.contiguous()
    batch = append_indptr.shape[0] - 1
    if not 0 <= batch <= seq_lens.shape[0]:
        raise RuntimeError(
            f"append_indptr: needs an entry more than requests, at most {seq_lens.shape[0] + 1} "
            f"with this seq_lens, got {batch + 1}; describe the same requests"
        )
    for name, output in given.items():
        if tuple(output.shape) != (nnz,):
            raise RuntimeError(
                f"{arg(name)}: needs shape ({nnz},), an entry for each token, got "
                f"{tuple(output.shape)}; pass another"
            )
    torch = sys.modules["torch"]
    tokens = torch.arange(nnz, dtype=append_indptr.dtype, device=append_indptr.device)
    requests = torch.searchsorted(append_indptr, tokens, right=True) - 1
    behind = seq_lens[:batch].to(append_indptr.device) - append_indptr[1:]
    # One entry more for tokens of no request, to which -1 and batch both lead.
    behind = torch.cat([behind, behind.new_zeros(1)])
    of_nobody = (requests < 0) | (requests == batch)
    found = {
        "batch_indices": requests.masked_fill(of_nobody, -1).int(),
        "positions": (tokens + behind[requests]).masked_fill(of_nobody, 0).int(),
    }
    found |= {name: output.copy_(found[name]) for name, output in given.items()}
    return found["batch_indices"], found["positions"]


def get_seq_lens(
    kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Count the tokens of each request from its pages, and those in its last page."""
    with _MLA:
        check_tensors(kv_indptr=kv_indptr, kv_last_page_len=kv_last_page_len)
        check_integers(kv_indptr=kv_indptr, kv_last_page_len=kv_last_page_len)
    full = (kv_indptr[1:] - kv_indptr[:-1] - 1).clamp(min=0)
    return full * page_size + kv_last_page_len
