# SPDX-License-Identifier: Apache-2.0
"""Entry points of cuda/mha/attention.cu: tiles of 64 query rows, blocks of 64 keys."""

from __future__ import annotations

from itertools import product

from cumla.launch.layouts import constant
from cumla.launch.source import HALVES, KernelSpec, in_cuda

_FILE = "mha/attention"
COLUMNS = 64  # of a tile
E4M3_COLUMNS = range(16, 257, 16)  # that rows of e4m3 keys and values may have
TILES = ((1, 1), (2, 2), (3, 2), (4, 4), (8, 8))  # of keys and of values
_FORMS = {"boxes": "false", "rows": "true", "e4m3": "true, true"}  # how tiles are loaded
# A kernel's arguments beside keys and values, and its parameter struct; "masked": arrays that say
# which keys a query sees; the others are forms of a bias.
VARIANTS = {
    "": "AttentionParams",
    "masked": "MaskedParams",
    "linear": "LinearParams",
    "table": "TableParams",
}
LISTED = "listed"  # query tokens have lists of blocks: e4m3 keys, and attention_prefill
WIDENED = "widened"  # the same of attention_prefill over widened e4m3 blocks, which have scales
PAIRED = "paired"  # each consumer has one of two neighbouring kv heads
PAIRED_MASKED = "paired_masked"
CAPPED = "capped"  # the plain kernel with a softcap and float32 results, where that has none
FEW = "few"  # the plain kernel of tiles of FEW_ROWS rows
FEW_CAPPED = "few_capped"
FEW_OF = {"": FEW, "linear": "few_linear", "table": "few_table"}  # of few rows, by VARIANTS
FEW_ROWS = constant(_FILE, "kFewRows")
PARAMS = {
    **VARIANTS,
    LISTED: "ListedParams",
    WIDENED: "WidenedParams",
    PAIRED: "PairedParams",
    PAIRED_MASKED: "MaskedPairedParams",
    **dict.fromkeys((CAPPED, FEW_CAPPED), "AttentionParams"),
    **{few: VARIANTS[of] for of, few in FEW_OF.items()},
}
WIDENED_TILES = ((2, 2),)
PAIRED_TILES = ((2, 2),)  # shared memory has room for three stages of them
FEW_TILES = ((1, 1), (2, 2), (3, 2), (4, 4))
LISTED_TILES = ((2, 2), (3, 2))  # of models whose query tokens choose blocks
BIASED_TILES = ((1, 1), (2, 2), (4, 4))  # with a bias narrower keys or values are padded


def tiles_of(variant: str) -> tuple[tuple[int, int], ...]:
    """List the widths that kernels with this variant have, the narrowest first."""
    return TILES if variant in ("", "masked", LISTED) else BIASED_TILES


def named(stem: str, variant: str) -> str | None:
    """Name the entry points of a variant."""
    return f"{stem}_{variant}" if variant else None


E4M3 = "float8_e4m3fn"


def _spec(dtype: str, tiles: tuple[int, int], form: str, variant: str) -> KernelSpec:
    names = (str(64 * tiles[0]), str(64 * tiles[1]))
    is_few = variant in (*FEW_OF.values(), FEW_CAPPED)
    is_lean = form == "boxes" and variant in ("", FEW)
    more = ["false", in_cuda(not is_lean), in_cuda(is_few)] if is_lean or is_few else []
    paired = ", true" if variant in (PAIRED, PAIRED_MASKED) else ""
    layout = f"SharedLayout<{tiles[0]}, {tiles[1]}, {in_cuda(form == 'e4m3')}{paired}>"
    return KernelSpec.of(
        *("mha", "attention", PARAMS[variant]),
        *(dtype, *tiles, _FORMS[form], *more),
        name=named("attention", variant),
        tags=[dtype, *names, *([form] if form != "boxes" else [])],
        threads=constant(_FILE, f"(2 + {layout}::kLoaders) * kWarpgroup"),
        smem_bytes=constant(
            _FILE, f"{layout}::{'kMaskedBytes' if 'masked' in variant else 'kBytes'}"
        ),
    )


_SPECS = {
    names: _spec(*names)
    for names in product(HALVES, TILES, _FORMS, VARIANTS)
    if names[1] in tiles_of(names[3])
    and (names[2] != "e4m3" or max(names[1]) * COLUMNS <= E4M3_COLUMNS[-1])
} | {names: _spec(*names) for names in product(HALVES, LISTED_TILES, ("e4m3",), (LISTED,))}
_SPECS |= {
    names: _spec(*names)
    for names in product(HALVES, PAIRED_TILES, ("boxes",), (PAIRED, PAIRED_MASKED))
}
_SPECS |= {names: _spec(*names) for names in product(HALVES, TILES, ("boxes",), (CAPPED,))}
_SPECS |= {
    names: _spec(*names)
    for names in product(HALVES, FEW_TILES, ("boxes",), (*FEW_OF.values(), FEW_CAPPED))
    if names[1] in BIASED_TILES or names[3] in (FEW, FEW_CAPPED)
}
SPECS = tuple(_SPECS.values())
WITH_CAPS = {
    spec: _SPECS[*names[:3], {"": CAPPED, FEW: FEW_CAPPED}[names[3]]]
    for names, spec in _SPECS.items()
    if names[2] == "boxes" and names[3] in ("", FEW)
}


def tiles_spec(dtype: str, tiles: tuple[int, int], form: str, variant: str = "") -> KernelSpec:
    """Look up the kernel of these tiles of 64 columns; `form` is "boxes", "rows" or "e4m3"."""
    return _SPECS[dtype, tiles, form, variant]
