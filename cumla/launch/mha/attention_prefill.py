# SPDX-License-Identifier: Apache-2.0
"""Entry points of cuda/mha/attention_prefill.cu, which attention.py launches: whole row tiles."""

from __future__ import annotations

from itertools import product

from cumla.launch.source import KernelSpec

__all__ = ["SPECS", "block_tokens", "prefill_spec"]

_TAGS = {"bfloat16": "Bf16", "float16": "Fp16"}
_BLOCKS = {(1, 1): 128, (2, 2): 128, (3, 2): 128, (4, 4): 80}


def block_tokens(tiles: tuple[int, int]) -> int:
    """Tell how many keys a block has."""
    return _BLOCKS[tiles]


def _smem(tiles: tuple[int, int]) -> int:
    """Count the bytes of PrefillLayout."""
    keys, values = tiles
    return 2 * keys * 64 * 128 + 2 * (keys + values) * _BLOCKS[tiles] * 128 + 2 * 64 + 256


def _spec(dtype: str, tiles: tuple[int, int], rows: bool) -> KernelSpec:
    names = (str(64 * tiles[0]), str(64 * tiles[1]))
    sizes = ", ".join(map(str, (*tiles, _BLOCKS[tiles])))
    return KernelSpec(
        stem="attention_prefill",
        package="cumla.cuda.mha",
        entry="_".join(("attention_prefill", dtype, *names, *(["rows"] if rows else []))),
        function=f"attention_prefill<{_TAGS[dtype]}, {sizes}, {str(rows).lower()}>",
        params="AttentionParams",
        threads=384,
        smem_bytes=_smem(tiles),
    )


_SPECS = {names: _spec(*names) for names in product(_TAGS, _BLOCKS, (False, True))}
SPECS = tuple(_SPECS.values())


def prefill_spec(dtype: str, tiles: tuple[int, int], rows: bool) -> KernelSpec:
    """Look up the kernel of these tiles of 64 columns; `rows`: of pages that are copied by rows."""
    return _SPECS[dtype, tiles, rows]
