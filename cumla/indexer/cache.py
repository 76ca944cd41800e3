# SPDX-License-Identifier: Apache-2.0
"""Keys of the indexer into a paged cache: :func:`append_indexer_cache`."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from cumla import reference
from cumla.core.arguments import (
    WIDE,
    Array,
    bind,
    check_dtype,
    check_layout,
    check_written,
)
from cumla.core.names import arg
from cumla.core.operation import parts_on_host
from cumla.core.paged import Host, Results, refuse_slots
from cumla.core.spec import Spec, array, cache, flag, in_parts
from cumla.indexer.arguments import CACHE_FORMAT, FLOATS, HEAD_DIMS, one_of, pages_of
from cumla.launch.indexer.append_indexer_cache import AppendIndexerArguments, append_indexer_launch
from cumla.launch.kernel import Unplanned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cumla.core.arguments import Views
    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch

__all__ = ["append_indexer_cache"]


APPEND_INDEXER_CACHE = Spec(
    "append_indexer_cache",
    (
        array("k"),
        cache("kv_cache", in_parts("values", "scales")),
        array("slot_mapping"),
        flag("power_of_two_scales", False),
        CACHE_FORMAT,
    ),
    positional=3,
    kernels=("append_indexer_cache_",),
)


@APPEND_INDEXER_CACHE
def append_indexer_cache(
    k: Any,
    kv_cache: Any,
    slot_mapping: Any,
    *,
    power_of_two_scales: bool = False,
    cache_format: str | None = None,
    stream: Any = None,
) -> None:
    """Quantise the indexer keys of new tokens, and write them into the pages of a cache, in place.

    One kernel quantises the keys, as :func:`quantize_fp8` does, and writes them. Devices and
    streams are as in :func:`cumla.mla_decode`; arrays on the CPU are written by
    :func:`cumla.reference.append_indexer_cache`, with the same bits.

    A row is skipped if its slot is negative or after the last page. If several rows have the same
    slot, the result in it is undefined and may be a mixture of them.

    Parameters
    ----------
    k : array
        ``(tokens, head_dim)`` bfloat16, float16 or float32, head_dim 32, 64 or 128; of CuPy,
        PyTorch, JAX or NumPy. Any row stride that is a multiple of 16 bytes, the last axis
        contiguous.
    kv_cache : array or pair of arrays
        ``(num_pages, page_size, 1, head_dim + 4)`` uint8, or the same without the axis of 1, with
        pages of 16, 32, 64 or 128 tokens: the bytes of a page are ``page_size * head_dim`` e4m3
        values, then ``page_size`` float32 scales. Pages are contiguous, their address and stride
        multiples of 16 bytes. A tuple ``(values, scales)`` holds the two apart:
        ``(num_pages, page_size, head_dim)`` float8_e4m3fn or uint8, or the same with an axis of 1
        before the last, strides as for k; and ``(num_pages, page_size)`` float32, any strides. JAX
        arrays are immutable and refused here: the function of that name in `cumla.jax` returns the
        new cache.
    slot_mapping : array
        ``(tokens,)`` int32 or int64: page * page_size + offset.
    power_of_two_scales : bool
        Round each scale up to a power of two.
    cache_format : str, optional
        ``"mxfp4"``: write keys of 64 bytes and four exponents, with head_dim 128, into one array of
        ``(num_pages, page_size, 1, 68)``, as :func:`paged_mqa_logits` reads it. The scale of 32
        columns is the smallest power of two, at least 2^-126, that is not below a sixth of their
        largest magnitude. Values are rounded to nearest even. NaN becomes 6 times the scale.
    stream : optional
        As in :func:`cumla.append_mla_cache`.

    Raises
    ------
    TypeError, ValueError, CumlaError
        As :func:`cumla.mla_decode`; a cache of JAX's.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> kv_cache = np.zeros((4, 64, 132), np.uint8)
    >>> cumla.append_indexer_cache(np.ones((2, 128), np.float16), kv_cache, np.array([5, 64]))
    """
    _APPEND.call(k, kv_cache, slot_mapping, power_of_two_scales, cache_format, stream)


_Arguments = tuple[AppendIndexerArguments, bool, str | None]  # scales are powers of two; format


class _Append(Unplanned[_Arguments]):
    trusted = ("slot_mapping",)

    def arguments(self, views: Views, options: Any) -> _Arguments:
        given = {name: view for name, view in views.items() if view is not None}
        k = given["k"]
        check_dtype("k", k.dtype, FLOATS)
        if len(k.shape) != 2 or k.shape[1] not in HEAD_DIMS:
            raise ValueError(
                f"{arg('k')}: needs shape (tokens, head_dim) with head_dim {one_of(HEAD_DIMS)}, "
                f"got {k.shape}; reshape it, or pad its rows and the cache's with zeros"
            )
        check_layout("k", k)
        for name, view in given.items():
            if name.startswith("kv_cache"):
                check_written(name, view)
        values, scales = pages_of(given, k.shape[1], options.cache_format)
        if "kv_cache" not in given:
            check_layout("kv_cache[0]", values)
        bind({"slot_mapping": Array("tokens", WIDE)}, views, {"tokens": k.shape[0]})
        written = AppendIndexerArguments(k, values, scales, given["slot_mapping"])
        return written, options.power_of_two_scales, options.cache_format

    def check_overlap(self, views: Views, written: Sequence[str]) -> None:
        """Let keys be views of the cache, in slots that only the caller knows."""
        others = {name: view for name, view in views.items() if name != "k"}
        super().check_overlap(others, [name for name in others if name.startswith("kv_cache")])

    def launches(self, arguments: _Arguments, outs: Sequence[ArrayView]) -> Sequence[Launch]:
        views, power_of_two_scales, form = arguments
        if not views.k.shape[0]:
            return ()
        return (append_indexer_launch(views, power_of_two_scales, mxfp4=form is not None),)

    def check_values(self, host: Host, arguments: _Arguments) -> None:
        refuse_slots(host["slot_mapping"], prod(arguments[0].scales.shape))

    def reference(self, host: Host, arguments: _Arguments) -> Results:
        rows = host["k"], parts_on_host(host, "kv_cache"), host["slot_mapping"]
        _, power_of_two_scales, form = arguments
        options: dict[str, Any] = {"power_of_two_scales": power_of_two_scales, "cache_format": form}
        reference.append_indexer_cache(*rows, **options)
        return ()


_APPEND = _Append(APPEND_INDEXER_CACHE)
