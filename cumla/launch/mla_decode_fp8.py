# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mla_decode_fp8.cu: split-KV MLA attention over an e4m3 cache.

STAND-IN: the whole file is replaced by the kernel's own launcher.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from cumla.launch.kernel import PreparedLaunch
from cumla.launch.source import KernelSpec

if TYPE_CHECKING:
    from cumla.arrays import ArrayView
    from cumla.checks import Arguments
    from cumla.launch.mla_attention import MLAAttentionKey
    from cumla.launch.mla_plan import MLADecodeKey
    from cumla.launch.module import LoadedKernel

__all__ = ["SPECS", "fp8_spec", "prepare_decode_fp8"]

_SPECS = {
    (ragged, grouped): KernelSpec(
        stem="mla_decode_fp8",
        entry=f"mla_{'attention' if ragged else 'decode'}_fp8" + ("_grouped" if grouped else ""),
        function="mla_decode_fp8",
        params="MlaDecodeFp8Params",
        threads=384,
    )
    for ragged in (False, True)
    for grouped in (False, True)
}
SPECS = tuple(_SPECS.values())


def fp8_spec(key: MLADecodeKey | MLAAttentionKey, grouped: bool) -> KernelSpec:
    """Look up the kernel of a shape, for caches with or without scales of their own."""
    return _SPECS[hasattr(key, "total_tokens"), grouped]


_PARAMS = struct.Struct("<q")


def prepare_decode_fp8(
    kernel: LoadedKernel,
    key: MLADecodeKey | MLAAttentionKey,
    buffer: int,
    arguments: Arguments,
    out: ArrayView,
    lse: ArrayView,
    softmax_scale: float,
    stream: int,
) -> PreparedLaunch:
    """Prepare to attend to the blocks of every part."""
    return PreparedLaunch(kernel, (1, 1, 1), _PARAMS, (buffer,), stream)
