# SPDX-License-Identifier: Apache-2.0
"""The decode kernels over queries of different lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cumla.launch.mla.mla_decode import (
    decode_launch,
    form_of,
    ragged_spec,
    window_launch,
    window_spec,
)
from cumla.launch.mla.mla_decode_fp8 import decode_fp8_launch
from cumla.mla.shape import WIDTH

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch
    from cumla.launch.mla.mla_decode import DecodeArguments
    from cumla.launch.mla.shape import MLAAttentionKey
    from cumla.launch.source import KernelSpec


def attention_spec(key: MLAAttentionKey, form: str | None = None) -> KernelSpec:
    """Look up the kernel of a shape's dtype, for caches of a form; by default in one array."""
    form = form or form_of(key)
    if key.window or key.width != WIDTH:
        return window_spec(key, form, key.window)
    return ragged_spec(key.dtype, form)


def attention_launch(
    key: MLAAttentionKey, buffer: int, arguments: DecodeArguments, out: ArrayView, lse: ArrayView
) -> Launch:
    """Describe how to attend to the blocks of every part; split tiles go to the plan's buffer.

    `buffer` is its address; it holds a schedule. q and q_rope are ``(total_tokens, num_heads,
    columns)``, block_table is ``(batch, max_pages)`` or the list of pages ``(pages,)``; `out` is
    ``(total_tokens, num_heads, 512)`` and `lse` ``(1, num_heads, total_tokens)``.
    """
    pages = arguments.block_table
    if len(pages.shape) == 1:  # a row of a table whose rows are a page apart
        pages = pages._replace(shape=(1, *pages.shape), strides=(4, 4))
    one_request = arguments._replace(
        q=_with_batch(arguments.q), q_rope=_with_batch(arguments.q_rope), block_table=pages
    )
    out = _with_batch(out)
    if key.cache == "e4m3":
        return decode_fp8_launch(key, buffer, one_request, out, lse)
    if key.window or arguments.sinks is not None or key.width != WIDTH:
        return window_launch(key, buffer, one_request, out, lse)
    spec = attention_spec(key, form_of(key, arguments))
    return decode_launch(spec, key, buffer, one_request, out, lse)


def _with_batch(view: ArrayView) -> ArrayView:
    return view._replace(shape=(1, *view.shape), strides=(0, *view.strides))
