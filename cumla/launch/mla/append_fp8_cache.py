# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mla/append_fp8_cache.cu: rows into a paged e4m3 cache, queries beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cumla.launch.layouts import launch_of
from cumla.launch.mla.append_cache import THREADS, append_values
from cumla.launch.slots import pages
from cumla.launch.source import HALVES, KernelSpec
from cumla.mla.shape import NO_ROPE, V4, V41, V41_FP4

if TYPE_CHECKING:
    from cumla.launch.kernel import Launch
    from cumla.launch.mla.append_cache import AppendArguments


_FORMATS = {NO_ROPE: "kNoRope", V4: "kV4", V41: "kV41", V41_FP4: "kV41Fp4"}  # in CUDA


def _spec(form: str, float_rows: bool) -> KernelSpec:
    dtype, flags = ("bfloat16", [_FORMATS[form]]) if form in _FORMATS else (form, [])
    rows, tags = ("float32", [form, "from_float32"]) if float_rows else (dtype, [form])
    names = "mla", "append_fp8_cache", "AppendFp8CacheParams"
    return KernelSpec.of(*names, dtype, rows, *flags, tags=tags, threads=THREADS, min_blocks=3)


_SPECS = {
    (form, floats): _spec(form, floats) for form in (*HALVES, *_FORMATS) for floats in (False, True)
}
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
    spec = _SPECS[arguments.form or arguments.dtype, arguments.latent_rows.dtype == "float32"]
    return launch_of(spec, grid, params)
