# SPDX-License-Identifier: Apache-2.0
"""All kernels ahead of time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cumla.core.arguments import check_device_number
from cumla.core.plan import Plan
from cumla.indexer import cache as indexer_cache
from cumla.indexer import logits, paged_logits, quantize
from cumla.launch import all_specs
from cumla.launch.device import current_device, require_hopper
from cumla.launch.module import load
from cumla.merge import merge_attention_states
from cumla.mha import attention, rope
from cumla.mha import cache as mha_cache
from cumla.mla import attention as mla_attention
from cumla.mla import cache as mla_cache
from cumla.mla import decode
from cumla.sparse import mla_sparse
from cumla.sparse import top_k as sparse_top_k
from cumla.sparse.dsa import DSAPlan

__all__ = ["prepare"]

_SPARSE = ("bound_rows", "select_rows", "mla_schedule", "mla_sparse_", "merge_states_")
# How the names of a function's kernels begin. By the public function itself: others have the same
# name, such as those of cumla.reference.
_KERNELS: dict[Callable[..., Any], tuple[str, ...]] = {
    indexer_cache.append_indexer_cache: ("append_indexer_cache_",),
    mha_cache.append_kv_cache: ("append_kv_cache_",),
    mla_cache.append_mla_cache: ("append_cache_", "append_fp8_cache_"),
    rope.apply_rope: ("append_kv_cache_bfloat16", "append_kv_cache_float"),  # none of e4m3
    merge_attention_states: ("merge_states_",),
    attention.attention: ("mla_attention_schedule", "invariant_parts", "attention_"),
    mla_attention.mla_attention: ("mla_attention_",),
    decode.mla_decode: ("mla_schedule", "mla_decode_"),
    mla_sparse.mla_sparse_attention: _SPARSE,
    mla_sparse.mla_sparse_decode: _SPARSE,
    logits.mqa_logits: ("mqa_logits_",),
    paged_logits.paged_mqa_logits: ("paged_mqa_",),
    quantize.quantize_fp8: ("quantize_fp8_",),
    sparse_top_k.top_k: ("top_k_",),
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
    >>> import numpy as np, cumla
    >>> cumla.prepare(cumla.MLADecodePlan(4, 1, 16, like=np.zeros(1)))
    """
    check_device_number(device)
    names = ", ".join(f"cumla.{function.__name__}" for function in _KERNELS)
    if not plans_or_functions:
        raise TypeError(f"prepare: needs plans or functions, got nothing; pass some of {names}")
    begins: list[str] = []
    for i, given in enumerate(plans_or_functions):
        if isinstance(given, (Plan, DSAPlan)):
            continue
        of = next((kernels for function, kernels in _KERNELS.items() if function is given), None)
        if of is None:
            raise TypeError(
                f"plans_or_functions[{i}]: needs a plan or a function that has kernels, got "
                f"{_name_of(given)}; pass a plan, or some of {names}"
            )
        begins += of
    if begins:
        device = current_device() if device is None else device
        require_hopper(device)
    for given in plans_or_functions:
        if isinstance(given, (Plan, DSAPlan)):
            given.prepare()
    for spec in all_specs() if begins else ():
        if spec.entry.startswith(tuple(begins)):
            assert device is not None
            load(spec, device, capturing=lambda: False)


def _name_of(given: object) -> str:
    """Name a function or a class with its module, and show what has no name."""
    if hasattr(given, "__qualname__") and hasattr(given, "__module__"):
        return f"{given.__module__}.{given.__qualname__}"
    return repr(given)
