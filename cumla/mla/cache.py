# SPDX-License-Identifier: Apache-2.0
"""Writing into paged caches: :func:`append_mla_cache`."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from cumla import reference
from cumla.core.names import arg
from cumla.core.operation import parts_on_host
from cumla.core.paged import refuse_pages, refuse_positions, refuse_slots
from cumla.core.spec import (
    Factor,
    Input,
    Instead,
    Option,
    Spec,
    array,
    cache,
    flag,
    in_parts,
    optional,
)
from cumla.launch.kernel import Unplanned
from cumla.launch.mla.append_cache import AppendArguments, append_launch
from cumla.launch.mla.append_fp8_cache import append_fp8_launch
from cumla.mla.arguments import CACHE_PARTS, DTYPES, ROW_PARTS
from cumla.mla.cache_arguments import NUMBERS, checked_append_arguments
from cumla.mla.fp8_caches import checked_format
from cumla.mla.shape import WRITTEN_FORMATS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cumla.core.arguments import Views
    from cumla.core.arrays import ArrayView
    from cumla.core.paged import Host, Results
    from cumla.launch.kernel import Launch

__all__ = ["append_mla_cache"]


def _one_table(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, (tuple, list)):
        got = f"{len(value)} of them"
        raise TypeError(
            f"{arg(name)}: needs one array, got {got}; join the two along the last axis"
        )
    return {name: value}


def _checked_format(name: str, value: object) -> str | None:
    return checked_format(name, value, WRITTEN_FORMATS)


APPEND_MLA_CACHE = Spec(
    "append_mla_cache",
    (
        array("rows", in_parts(*ROW_PARTS)),
        cache("kv_cache", in_parts(*CACHE_PARTS)),
        optional("slot_mapping"),
        optional("batch_indices"),
        optional("positions"),
        optional("block_table"),
        optional("kv_indices"),
        optional("kv_indptr"),
        Input("cos_sin", split=_one_table),
        flag("interleaved", True),
        optional("q_pe"),
        Instead("q_pe_out", of="q_pe"),
        Factor("kv_scale"),
        Option("cache_format", None, _checked_format, "str?"),
    ),
    positional=3,
    kernels=("append_cache_", "append_fp8_cache_"),
)


@APPEND_MLA_CACHE
def append_mla_cache(
    rows: Any,
    kv_cache: Any,
    slot_mapping: Any = None,
    *,
    batch_indices: Any = None,
    positions: Any = None,
    block_table: Any = None,
    kv_indices: Any = None,
    kv_indptr: Any = None,
    cos_sin: Any = None,
    interleaved: bool = True,
    q_pe: Any = None,
    q_pe_out: Any = None,
    kv_scale: Any = None,
    cache_format: str | None = None,
    stream: Any = None,
) -> None:
    """Write the latent rows of new tokens into the pages of an MLA cache, in place.

    `slot_mapping` gives the place of each row, or `batch_indices`, `positions` and the page numbers
    of each request do: `block_table`, or `kv_indices` and `kv_indptr`. With `cos_sin` the same
    kernel rotates the RoPE columns of the rows and of the queries `q_pe`. Devices and streams are
    as in :func:`cumla.mla_decode`; arrays on the CPU are written by
    :func:`cumla.reference.append_mla_cache`.

    A row is skipped if its slot, request or position is negative, or if its place is outside of the
    cache, of the request's pages or of `cos_sin`. If several rows have the same place, the result
    there is undefined and may be a mixture of them.

    Parameters
    ----------
    rows : array or pair of arrays
        ``(tokens, num_kv_heads, 576)``, or ``(tokens, 576)`` for one kv head: 512 latent columns,
        then 64 RoPE ones; or 512, 256 or 1024 with 64, 32 or none, as the cache has. A tuple
        ``(ckv, k_pe)`` holds the two in separate arrays. Rows of DeepSeek-V4 have 512 columns in
        all, a tuple 448 and 64. Rows have the cache's 16-bit dtype (bfloat16 or float16 if all of
        the cache is e4m3), or float32, which is rounded; of CuPy, PyTorch, JAX or NumPy. Any
        strides that are multiples of 16 bytes, the last axis contiguous.
    kv_cache : array, or pair or triple of arrays
        ``(num_pages, page_size, num_kv_heads, 576)``, or ``(num_pages, page_size, 576)`` for one kv
        head, bfloat16 or float16, of any page size; strides as for rows. Other widths are those of
        rows; the number of columns determines the width. A tuple ``(ckv, k_pe)`` holds the columns
        in separate arrays. JAX arrays are immutable and refused here: the function of that name in
        `cumla.jax` returns the new cache.

        FP8 caches as in :func:`cumla.mla_decode`, of all these widths, except triples with e4m3
        RoPE columns. Also slots of DeepSeek-V4, ``(num_pages, page_size, 1, 584)`` uint8 or
        float8_e4m3fn, and other formats as in :func:`cumla.mla_sparse_decode`.
    slot_mapping : array, optional
        ``(tokens,)`` int32 or int64: page * page_size + offset.
    batch_indices : array, optional
        ``(tokens,)`` int32 or int64: the request of each row.
    positions : array, optional
        ``(tokens,)`` int32 or int64: the position of each token in its request. It determines the
        rotation and, without slot_mapping, the place.
    block_table : array, optional
        ``(batch, max_pages)`` int32: page numbers of each request.
    kv_indices, kv_indptr : array, optional
        ``(entries,)`` and ``(batch + 1,)`` int32, instead of block_table: the page numbers of
        request i are ``kv_indices[kv_indptr[i]:kv_indptr[i + 1]]``.
    cos_sin : array, optional
        ``(max_position, 64)`` float32 or in the cache's dtype: 32 cosines, then 32 sines, of each
        position; ``(max_position, 32)`` for rows with 32 RoPE columns. With c and s the j-th of
        them, pair j of columns becomes ``(c * x0 - s * x1, s * x0 + c * x1)``, in float32.
    interleaved : bool
        Pair j is columns 2 j and 2 j + 1 (GPT-J, DeepSeek); if False, j and j + 32 (GPT-NeoX).
    q_pe : array, optional
        ``(tokens, num_heads, 64)`` in the cache's dtype: queries to rotate by the same positions,
        also those of skipped rows. In place, unless there is `q_pe_out`.
    q_pe_out : array, optional
        ``(tokens, num_heads, 64)``, written in place of q_pe. Rows whose position is outside of
        cos_sin are not written.
    kv_scale : float or array, optional
        For an e4m3 cache without scales of its own: rows are divided by it. An array holds one
        float32, which the kernel reads, so it may change between the replays of a graph. 1 by
        default.
    cache_format : str, optional
        The format of a kv_cache of bytes, as in :func:`cumla.mla_sparse_decode`. Rows have 512
        columns in all. With ``"v32_no_rope"`` none of them is a RoPE column; with ``"v41"`` and
        ``"v41_fp4"`` the last 64 are, a tuple holds 448 and 64, and rows are bfloat16 or float32.
        ``"e4m3_288"`` means 256 + 32 columns of e4m3 in one array, which has the width of
        ``"v41_fp4"``. Other caches of 16-bit or e4m3 numbers need no name.
    stream : optional
        A CUDA stream, as in :func:`cumla.mla_decode`. By default the current stream of kv_cache's
        framework.

    Raises
    ------
    TypeError, ValueError, CumlaError
        As :func:`cumla.mla_decode`; an array of JAX's that would have to be written to.

    Notes
    -----
    An output may be a slice of an array that also holds inputs, such as a wider query, but must not
    overlap them. q_pe_out may be q_pe itself.

    Rows in e4m3 are rounded to nearest even and saturate at 448; they are
    ``row * (1 / kv_scale)`` in float32. Scales of 128 columns are as in
    :func:`cumla.quantize_fp8`, in the packed format with `power_of_two_scales`. After the exponents
    of V4's slots is a byte of 0.

    Scales of V4's slots and of ``"v41"`` are ``2 ** ceil(log2(max(largest, 1e-4) / 448))``, those
    of ``"v41_fp4"`` ``max(largest, 6 / 512) / 6``, rounded to e4m3; largest is the largest
    magnitude of the columns that share a scale, after the rotation. e2m1 values are rounded to
    nearest even and saturate at 6; NaN becomes 6.

    The rotation is that of RoFormer (arXiv:2104.09864), section 3.4.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> kv_cache = np.zeros((4, 64, 576), np.float16)
    >>> cumla.append_mla_cache(np.ones((2, 576), np.float16), kv_cache, np.array([5, 64]))
    >>> np.argwhere(kv_cache[..., 0]).tolist()
    [[0, 5], [1, 0]]

    Slots of DeepSeek-V4, written and read:

    >>> import ml_dtypes
    >>> kv_cache = np.zeros((4, 64, 1, 584), np.uint8)
    >>> cumla.append_mla_cache(np.ones((2, 512), np.float32), kv_cache, np.array([0, 5]))
    >>> q = np.ones((1, 1, 16, 512), ml_dtypes.bfloat16)
    >>> out, _ = cumla.mla_sparse_decode(q, kv_cache, np.array([[[5, 0, -1]]], np.int32))
    >>> bool((out == 1).all())
    True
    """
    _APPEND.call(
        *(rows, kv_cache, slot_mapping, batch_indices, positions, block_table, kv_indices),
        *(kv_indptr, cos_sin, interleaved, q_pe, q_pe_out, kv_scale, cache_format, stream),
    )


class _Append(Unplanned[AppendArguments]):
    trusted = tuple(NUMBERS)
    in_place = MappingProxyType({"q_pe_out": "q_pe"})

    def arguments(self, views: Views, options: Any) -> AppendArguments:
        options = options.kv_scale, options.interleaved, options.cache_format
        return checked_append_arguments(views, *options)

    def check_overlap(self, views: Views, written: Sequence[str]) -> None:
        """Let rows be views of the cache, in slots that only the caller knows."""
        rotated = "q_pe_out" if "q_pe_out" in views else "q_pe"
        super().check_overlap(views, [rotated])
        others = {name: view for name, view in views.items() if not name.startswith("rows")}
        super().check_overlap(others, [name for name in others if name.startswith("kv_cache")])

    def launches(self, arguments: AppendArguments, outs: Sequence[ArrayView]) -> Sequence[Launch]:
        if not arguments.latent_rows.shape[0]:
            return ()
        is_fp8 = arguments.latent_cache.dtype not in DTYPES
        return ((append_fp8_launch if is_fp8 else append_launch)(arguments),)

    def check_values(self, host: Host, arguments: AppendArguments) -> None:
        num_pages, page_size = arguments.latent_cache.shape[:2]
        if "slot_mapping" in host:
            refuse_slots(host["slot_mapping"], num_pages * page_size)
        else:
            refuse_pages(host, host["batch_indices"], host["positions"], num_pages, page_size)
        if arguments.cos_sin is not None:
            refuse_positions(host["positions"], arguments.cos_sin.shape[0])

    def reference(self, host: Host, arguments: AppendArguments) -> Results:
        others = {n: a for n, a in host.items() if not n.startswith(("rows", "kv_cache"))}
        is_fp8 = arguments.latent_cache.dtype not in DTYPES and arguments.scales is None
        if is_fp8 and "kv_scale" not in others:
            others["kv_scale"] = np.array(arguments.scale_number, np.float32)
        reference.append_mla_cache(
            parts_on_host(host, "rows"),
            parts_on_host(host, "kv_cache"),
            interleaved=arguments.interleaved,
            cache_format=arguments.form,
            **others,
        )
        return ()


_APPEND = _Append(APPEND_MLA_CACHE)
