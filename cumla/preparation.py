# SPDX-License-Identifier: Apache-2.0
"""All kernels ahead of time: the one module that needs every launcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cumla.indexer.checks import checked_logits_specs
from cumla.launch.device import current_device, require_hopper
from cumla.launch.indexer import paged_mqa_schedule
from cumla.launch.indexer.append_indexer_cache import append_indexer_spec
from cumla.launch.indexer.quantize_fp8 import quantize_spec
from cumla.launch.merge_states import merge_spec
from cumla.launch.mla import mla_decode_fp8
from cumla.launch.mla.append_cache import append_specs
from cumla.launch.mla.append_fp8_cache import append_fp8_specs
from cumla.launch.mla.choice import form_specs
from cumla.launch.module import load
from cumla.launch.split import ragged_schedule, schedule
from cumla.launch.split.plan import BLOCK_TOKENS, page_form
from cumla.mla.checks import DTYPES, check_device_number, check_dtype, check_number, checked_flag

__all__ = ["prepare"]

_SCHEDULES = (*schedule.SPECS, *ragged_schedule.SPECS, *paged_mqa_schedule.SPECS)


def prepare(
    device: int | None = None,
    *,
    dtypes: Sequence[str] = DTYPES,
    page_sizes: Sequence[int] = (BLOCK_TOKENS,),
    split_caches: bool = False,
    fp8_caches: bool = False,
    indexer: Sequence[tuple[int, int]] = (),
) -> None:
    """Compile and load the kernels: later calls do not wait, nor fail under stream capture.

    Parameters
    ----------
    device : int, optional
        CUDA ordinal; CuPy's current device by default.
    dtypes : sequence of str
        Of q: ``"bfloat16"``, ``"float16"``. Partial results to merge and rows to
        quantise may be float32 as well.
    page_sizes : sequence of int
        Of the caches that are to be attended to, such as ``(1, 64)``.
    split_caches : bool
        Whether some of them have their latent and RoPE columns in two arrays.
    fp8_caches : bool
        Whether some are FP8, in any form and with pages of any size.
    indexer : sequence of (num_heads, head_dim)
        The indexers whose logits are to be computed, such as ``[(64, 128)]``.

    Raises
    ------
    TypeError
        An unknown dtype, a lone string or number instead of a sequence, a device or page size that
        is no number, an indexer that is no pair in a sequence, such as ``(64, 128)`` for
        ``[(64, 128)]``, or a flag that is neither True nor False.
    ValueError
        A page size below 1, or an indexer of another shape than there are kernels for.
    UnsupportedDeviceError, CompilationError, MissingDependencyError
        The kernels cannot be had here.
    """
    if isinstance(dtypes, str):
        raise TypeError(
            f"dtypes: needs a sequence of names, got the string {dtypes!r}; pass ({dtypes!r},)"
        )
    for dtype in dtypes:
        check_dtype("dtypes", dtype)
    if isinstance(page_sizes, int):
        raise TypeError(
            f"page_sizes: needs a sequence of ints, got {page_sizes}; pass ({page_sizes},)"
        )
    for page_size in page_sizes:
        check_number("page_sizes", page_size, "name those of the caches")
    split_caches = checked_flag("split_caches", split_caches)
    fp8_caches = checked_flag("fp8_caches", fp8_caches)
    check_device_number(device)
    logits = [spec for shape in _pairs(indexer) for spec in checked_logits_specs(*shape)]
    forms = dict.fromkeys(page_form(page_size) for page_size in page_sizes)
    if split_caches and "pages" in forms:
        forms |= {"boxes": None}
    if device is None:
        device = current_device()
    require_hopper(device)
    for spec in (*_SCHEDULES, *(mla_decode_fp8.SPECS if fp8_caches else ()), *logits):
        load(spec, device, capturing=lambda: False)
    for dtype in dtypes:
        decode = (spec for form in forms for spec in form_specs(dtype, form))
        for spec in (*decode, *append_specs(dtype), *append_fp8_specs(dtype)):
            load(spec, device, capturing=lambda: False)
    for dtype in (*dtypes, "float32"):
        for spec in (merge_spec(dtype), quantize_spec(dtype), append_indexer_spec(dtype)):
            load(spec, device, capturing=lambda: False)


def _pairs(indexer: Any) -> Sequence[tuple[int, int]]:
    """Check that it is a sequence of pairs."""
    is_sequence = isinstance(indexer, Sequence) and not isinstance(indexer, str)
    shapes: Sequence[Any] = indexer if is_sequence else (indexer,)
    for shape in shapes:
        if not is_sequence or not isinstance(shape, (tuple, list)) or len(shape) != 2:
            raise TypeError(
                f"indexer: needs pairs (num_heads, head_dim), got {shape!r}; pass [(64, 128)]"
            )
    return shapes
