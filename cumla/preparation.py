# SPDX-License-Identifier: Apache-2.0
"""All kernels ahead of time: the one module that needs every launcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cumla.core.arguments import check_device_number
from cumla.core.plan import Plan
from cumla.launch import merge_states
from cumla.launch.device import current_device, require_hopper
from cumla.launch.indexer import (
    append_indexer_cache,
    mqa_logits,
    paged_mqa_logits,
    paged_mqa_schedule,
    quantize_fp8,
)
from cumla.launch.mha import append_kv_cache
from cumla.launch.mla import (
    append_cache,
    append_fp8_cache,
    mla_decode,
    mla_decode_fp8,
    mla_decode_swapped,
)
from cumla.launch.module import load
from cumla.launch.split import ragged_schedule, schedule

if TYPE_CHECKING:
    from cumla.launch.source import KernelSpec

__all__ = ["prepare"]

_RAGGED = tuple(s for s in mla_decode.SPECS if s.entry.startswith("mla_attention"))
_RAGGED_FP8 = tuple(s for s in mla_decode_fp8.SPECS if s.entry.startswith("mla_attention"))
_TO_16_BITS = tuple(s for s in append_kv_cache.SPECS if "fp8" not in s.entry)
_KERNELS: dict[str, tuple[KernelSpec, ...]] = {
    "append_indexer_cache": append_indexer_cache.SPECS,
    "append_kv_cache": append_kv_cache.SPECS,
    "append_mla_cache": append_cache.SPECS + append_fp8_cache.SPECS,
    "apply_rope": _TO_16_BITS,
    "merge_attention_states": merge_states.SPECS,
    "mla_attention": ragged_schedule.SPECS + _RAGGED + _RAGGED_FP8,
    "mla_decode": (
        *schedule.SPECS,
        *mla_decode_swapped.SPECS,
        *(s for s in mla_decode.SPECS if s not in _RAGGED),
        *(s for s in mla_decode_fp8.SPECS if s not in _RAGGED_FP8),
    ),
    "mqa_logits": mqa_logits.SPECS,
    "paged_mqa_logits": paged_mqa_schedule.SPECS + paged_mqa_logits.SPECS,
    "quantize_fp8": quantize_fp8.SPECS,
}


def prepare(*plans_or_functions: Plan[Any] | Callable[..., Any], device: int | None = None) -> None:
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
    names = ", ".join(f"cumla.{name}" for name in _KERNELS)
    if not plans_or_functions:
        raise TypeError(f"prepare: needs plans or functions, got nothing; pass some of {names}")
    specs: list[KernelSpec] = []
    for i, given in enumerate(plans_or_functions):
        if isinstance(given, Plan):
            continue
        of = _KERNELS.get(getattr(given, "__name__", ""))
        if of is None or not getattr(given, "__module__", "").startswith("cumla."):
            raise TypeError(
                f"plans_or_functions[{i}]: needs a plan or a function that has kernels, got "
                f"{given!r}; pass a plan, or some of {names}"
            )
        specs += of
    if specs:
        device = current_device() if device is None else device
        require_hopper(device)
    for given in plans_or_functions:
        if isinstance(given, Plan):
            given.prepare()
    for spec in specs:
        assert device is not None
        load(spec, device, capturing=lambda: False)
