# SPDX-License-Identifier: Apache-2.0
"""Choice of the kernel for a shape: the one place that knows all kernels of MLA."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cumla.launch.mla.mla_decode import (
    decode_launch,
    form_of,
    variant_spec,
    width_launch,
    width_spec,
    window_launch,
    window_spec,
)
from cumla.launch.mla.mla_decode_fp8 import decode_fp8_launch
from cumla.launch.mla.mla_decode_invariant import invariant_spec
from cumla.launch.mla.mla_decode_swapped import swapped_spec, swapped_width_spec
from cumla.launch.mla.shape import VARIANTS
from cumla.launch.split import ragged_schedule as ragged
from cumla.launch.split.plan import page_form
from cumla.launch.split.schedule import schedule_launch, schedule_spec
from cumla.mla.shape import WIDTH

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch
    from cumla.launch.mla.mla_decode import DecodeArguments
    from cumla.launch.mla.shape import MLADecodeKey
    from cumla.launch.source import KernelSpec


def decode_spec(key: MLADecodeKey, form: str | None = None, sinks: bool = False) -> KernelSpec:
    """Look up the kernel of a shape's variant, for caches of a form; by default in one array."""
    form = form or form_of(key)
    if key.by_tiles:
        return window_spec(key.by_tiles, form, key.window)
    if key.width != WIDTH:
        swapped = key.variant == "swapped"
        return swapped_width_spec(key, form) if swapped else width_spec(key, form, key.variant)
    if key.takes_pieces:
        return invariant_spec(key.dtype, key.variant, form, sinks)
    return _spec(key.dtype, key.variant, form, sinks)


def decode_schedule_spec(key: MLADecodeKey) -> KernelSpec:
    """Look up the kernel that makes the schedule of a shape."""
    return ragged.schedule_spec(key.by_tiles) if key.by_tiles else schedule_spec(key)


def decode_schedule_launch(key: MLADecodeKey, buffer: int, kv_lens: ArrayView) -> Launch:
    """Describe how to compute the schedule for ``(batch,)`` int32 lengths into a plan's buffer."""
    if key.by_tiles:
        return ragged.ragged_schedule_launch(key.by_tiles, buffer, None, kv_lens, None)
    return schedule_launch(key, buffer, kv_lens)


def decode_specs(dtype: str, page_size: int, sinks: bool = False) -> tuple[KernelSpec, ...]:
    """List the kernels of one dtype and page size, for caches in one array."""
    return tuple(_spec(dtype, variant, page_form(page_size), sinks) for variant in VARIANTS)


def _spec(dtype: str, variant: str, form: str, sinks: bool) -> KernelSpec:
    if variant == "swapped":
        return swapped_spec(dtype, form, sinks)
    return variant_spec(dtype, variant, form, sinks)


def attend_launch(
    key: MLADecodeKey, buffer: int, arguments: DecodeArguments, out: ArrayView, lse: ArrayView
) -> Launch:
    """Describe how to attend, by the kernel for the key and for the layout of the arrays.

    `buffer` is the address of the plan's buffer, which holds a schedule; `out` and `lse` are as
    :func:`cumla.mla_decode` describes them.
    """
    if key.cache == "e4m3":
        return decode_fp8_launch(key, buffer, arguments, out, lse)
    if key.by_tiles:
        return window_launch(key.by_tiles, buffer, arguments, out, lse)
    form = form_of(key, arguments)
    spec = decode_spec(key, form, arguments.sinks is not None)
    if key.width != WIDTH:
        return width_launch(spec, key, buffer, arguments, out, lse)
    return decode_launch(spec, key, buffer, arguments, out, lse)
