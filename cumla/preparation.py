# SPDX-License-Identifier: Apache-2.0
"""All kernels ahead of time: the one module that needs every launcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cumla.core.arguments import check_device_number
from cumla.core.plan import Plan
from cumla.indexer import cache as indexer_cache
from cumla.indexer import logits, paged_logits, quantize
from cumla.launch import merge_states
from cumla.launch.device import current_device, require_hopper
from cumla.launch.indexer import (
    append_indexer_cache,
    mqa_logits,
    paged_mqa_logits,
    paged_mqa_schedule,
    quantize_fp8,
)
from cumla.launch.mha import (
    append_kv_cache,
    attention_decode,
    attention_prefill,
    attention_simt,
    invariant_parts,
)
from cumla.launch.mha import attention as mha_attention
from cumla.launch.mla import (
    append_cache,
    append_fp8_cache,
    mla_decode,
    mla_decode_fp8,
    mla_decode_fp8_64,
    mla_decode_swapped,
)
from cumla.launch.module import load
from cumla.launch.sparse import mla_sparse as mla_sparse_kernels
from cumla.launch.sparse import mla_sparse_fp8, mla_sparse_packed, mla_sparse_v4, select_rows, top_k
from cumla.launch.split import ragged_schedule, schedule
from cumla.merge import merge_attention_states
from cumla.mha import attention, rope
from cumla.mha import cache as mha_cache
from cumla.mla import attention as mla_attention
from cumla.mla import cache as mla_cache
from cumla.mla import decode
from cumla.sparse import mla_sparse
from cumla.sparse import top_k as sparse_top_k
from cumla.sparse.dsa import DSAPlan

if TYPE_CHECKING:
    from cumla.launch.source import KernelSpec

__all__ = ["prepare"]

_RAGGED = tuple(s for s in mla_decode.SPECS if s.entry.startswith("mla_attention"))
_FP8 = mla_decode_fp8.SPECS + mla_decode_fp8_64.SPECS
_RAGGED_FP8 = tuple(s for s in _FP8 if s.entry.startswith("mla_attention"))
_TO_16_BITS = tuple(s for s in append_kv_cache.SPECS if "fp8" not in s.entry)
_SPARSE = (
    *select_rows.SPECS,
    *schedule.SPECS,
    *mla_sparse_kernels.SPECS,
    *mla_sparse_fp8.SPECS,
    *mla_sparse_packed.SPECS,
    *mla_sparse_v4.SPECS,
    *merge_states.SPECS,  # of sinks
)
# By the public function itself: others have the same name, such as those of cumla.reference.
_KERNELS: dict[Callable[..., Any], tuple[KernelSpec, ...]] = {
    indexer_cache.append_indexer_cache: append_indexer_cache.SPECS,
    mha_cache.append_kv_cache: append_kv_cache.SPECS,
    mla_cache.append_mla_cache: append_cache.SPECS + append_fp8_cache.SPECS,
    rope.apply_rope: _TO_16_BITS,
    merge_attention_states: merge_states.SPECS,
    attention.attention: (
        *ragged_schedule.SPECS,
        *invariant_parts.SPECS,
        *mha_attention.SPECS,
        *attention_decode.SPECS,
        *attention_prefill.SPECS,
        *attention_simt.SPECS,
    ),
    mla_attention.mla_attention: ragged_schedule.SPECS + _RAGGED + _RAGGED_FP8,
    decode.mla_decode: (
        *schedule.SPECS,
        *mla_decode_swapped.SPECS,
        *(s for s in mla_decode.SPECS if s not in _RAGGED),
        *(s for s in _FP8 if s not in _RAGGED_FP8),
    ),
    mla_sparse.mla_sparse_attention: _SPARSE,
    mla_sparse.mla_sparse_decode: _SPARSE,
    logits.mqa_logits: mqa_logits.SPECS,
    paged_logits.paged_mqa_logits: paged_mqa_schedule.SPECS + paged_mqa_logits.SPECS,
    quantize.quantize_fp8: quantize_fp8.SPECS,
    sparse_top_k.top_k: top_k.SPECS,
}


def prepare(
    *plans_or_functions: Plan[Any] | DSAPlan | Callable[..., Any], device: int | None = None
) -> None:
    """Compile and load kernels: later calls do not wait for it, nor fail under stream capture.

    Parameters
    ----------
    *plans_or_functions : plan or function
        Plans, whose kernels are loaded on their GPU; and functions of cumla, such as
        ``cumla.append_mla_cache``, all of whose kernels are loaded: for any dtype, page size and
        cache. A function that is planned has many, so prefer the plan.
    device : int, optional
        CUDA ordinal for functions; CuPy's current device by default.

    Raises
    ------
    TypeError
        Something is neither a plan nor a function that has kernels, or nothing is given.
    UnsupportedDeviceError, CompilationError, MissingDependencyError
        The kernels cannot be had here.

    Examples
    --------
    >>> cumla.prepare(plan, cumla.append_mla_cache)  # doctest: +SKIP
    """
    check_device_number(device)
    names = ", ".join(f"cumla.{function.__name__}" for function in _KERNELS)
    if not plans_or_functions:
        raise TypeError(f"prepare: needs plans or functions, got nothing; pass some of {names}")
    specs: list[KernelSpec] = []
    for i, given in enumerate(plans_or_functions):
        if isinstance(given, (Plan, DSAPlan)):
            continue
        of = next((specs for function, specs in _KERNELS.items() if function is given), None)
        if of is None:
            raise TypeError(
                f"plans_or_functions[{i}]: needs a plan or a function that has kernels, got "
                f"{_name_of(given)}; pass a plan, or some of {names}"
            )
        specs += of
    if specs:
        device = current_device() if device is None else device
        require_hopper(device)
    for given in plans_or_functions:
        if isinstance(given, (Plan, DSAPlan)):
            given.prepare()
    for spec in specs:
        assert device is not None
        load(spec, device, capturing=lambda: False)


def _name_of(given: object) -> str:
    """Name a function or a class with its module, and show what has no name."""
    if hasattr(given, "__qualname__") and hasattr(given, "__module__"):
        return f"{given.__module__}.{given.__qualname__}"
    return repr(given)
