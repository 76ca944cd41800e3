# SPDX-License-Identifier: Apache-2.0
"""Which kernel attends to which shape: the one place that knows both files of kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cumla.launch.mla.mla_decode import ragged_spec, variant_spec
from cumla.launch.mla.mla_decode_swapped import swapped_spec
from cumla.launch.mla.shape import VARIANTS
from cumla.launch.split.plan import page_form

if TYPE_CHECKING:
    from cumla.launch.mla.shape import MLADecodeKey
    from cumla.launch.source import KernelSpec

__all__ = ["decode_spec", "decode_specs", "form_specs"]


def decode_spec(key: MLADecodeKey, form: str | None = None) -> KernelSpec:
    """Look up the kernel of a shape's variant, for caches of a form; by default in one array."""
    return _spec(key.dtype, key.variant, form or key.form)


def decode_specs(dtype: str, page_size: int) -> tuple[KernelSpec, ...]:
    """List the kernels of one dtype and page size, for caches in one array."""
    return tuple(_spec(dtype, variant, page_form(page_size)) for variant in VARIANTS)


def form_specs(dtype: str, form: str) -> tuple[KernelSpec, ...]:
    """List the kernels of one dtype and form, that for ragged queries included."""
    return (*(_spec(dtype, variant, form) for variant in VARIANTS), ragged_spec(dtype, form))


def _spec(dtype: str, variant: str, form: str) -> KernelSpec:
    if variant == "swapped":
        return swapped_spec(dtype, form)
    return variant_spec(dtype, variant, form)
