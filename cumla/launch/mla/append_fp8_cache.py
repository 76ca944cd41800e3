# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mla/append_fp8_cache.cu: rows into a paged e4m3 cache, queries beside them."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from cumla.launch.layouts import launch_of
from cumla.launch.mla.append_cache import THREADS, append_values, octets_of
from cumla.launch.slots import pages
from cumla.launch.source import HALVES, KernelSpec
from cumla.mla.shape import NO_ROPE, V4, V41, V41_FP4

if TYPE_CHECKING:
    from cumla.launch.kernel import Launch
    from cumla.launch.mla.append_cache import AppendArguments


_FORMATS = {NO_ROPE: "kNoRope", V4: "kV4", V41: "kV41", V41_FP4: "kV41Fp4"}  # in CUDA


def _spec(form: str, float_rows: bool, any_width: bool = False) -> KernelSpec:
    dtype, flags = ("bfloat16", [_FORMATS[form]]) if form in _FORMATS else (form, [])
    rows, tags = ("float32", [form, "from_float32"]) if float_rows else (dtype, [form])
    params, tags = ("AppendWidthFp8Params", ["widths", *tags]) if any_width else (_PARAMS, tags)
    names = "mla", "append_fp8_cache", params
    return KernelSpec.of(*names, dtype, rows, *flags, tags=tags, threads=THREADS, min_blocks=3)


_PARAMS = "AppendFp8CacheParams"
_SPECS = {names: _spec(*names) for names in product((*HALVES, *_FORMATS), (False, True), (False,))}
_SPECS |= {names: _spec(*names) for names in product(HALVES, (False, True), (True,))}
SPECS = tuple(_SPECS.values())


def append_fp8_launch(arguments: AppendArguments) -> Launch:
    """Describe how to quantise and write rows, and to rotate the queries if there are any.

    There is at least one row, and the latent cache is of one byte.
    """
    grid, values = append_values(arguments)
    scales = arguments.scales
    params = {
        "to": values,
        "scales": pages(scales),
        "scale": 0 if arguments.kv_scale is None else arguments.kv_scale.ptr,
        "scale_value": arguments.scale_number,
        "rope_is_e4m3": arguments.rope_cache.dtype not in HALVES,
        "power_of_two": arguments.power_of_two_scales,
    }
    of_width = octets_of(arguments)
    form, floats = arguments.form or arguments.dtype, arguments.latent_rows.dtype == "float32"
    spec = _SPECS[form, floats, of_width is not None]
    return launch_of(spec, grid, params | (of_width or {}))
