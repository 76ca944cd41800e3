# SPDX-License-Identifier: Apache-2.0
"""Launcher of cuda/mla/mla_decode_fp8.cu: split-KV MLA attention over caches of e4m3 numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cumla.launch.layouts import constant, launch_of, strided
from cumla.launch.mla import mla_decode_fp8_64, mla_decode_fp8_products
from cumla.launch.mla.mla_decode import CACHE, NO_MAP, Maps, decode_values, width_tile
from cumla.launch.mla.mla_decode_fp8_64 import fp8_64_spec, fp8_params, masked_tile
from cumla.launch.mla.mla_decode_fp8_products import fp8_products_spec
from cumla.launch.mla.shape import NARROW_ROWS, VALUE_DIM, MLADecodeKey
from cumla.launch.source import KernelSpec, in_cuda
from cumla.launch.tensor_map import TensorMap, paged_kv_map
from cumla.mla.shape import FP8, TAKES, WIDTH, WIDTHS

if TYPE_CHECKING:
    from cumla.core.arrays import ArrayView
    from cumla.launch.kernel import Launch
    from cumla.launch.mla.mla_decode import DecodeArguments
    from cumla.launch.mla.shape import LatentKey

LIES = ("plain", "packed", "broadcast")
"""Layouts of a cache: see `how_it_lies`."""
_RAGGED = "ragged"
# Query rows of a tile; halves of the tiles of ragged queries.
_SHAPES: tuple[int | str, ...] = (*NARROW_ROWS, _RAGGED)
# The second serves whatever is no whole block, the last packed rows.
_FORM_TAGS = {"pages": "kPages", "rows": "kRows", "packed": "kPacked"}
_FILE = "mla/mla_decode_fp8"
# Words of a packed row; where in a row scales and RoPE columns begin, in bytes.
_PACKED_WORDS, _PACKED_SCALES, _PACKED_ROPE = (
    constant(_FILE, what) for what in ("kPackedBytes / 4", "kPackedScales", "kPackedRope")
)
# Rows of a granule of the kernels of many heads.
_GRANULE_ROWS = constant("mla/mla_decode_fp8_64", "kGranuleRows")
_WHOLE_TILES = frozenset((*mla_decode_fp8_64.SPECS, *mla_decode_fp8_products.SPECS))


def smem_bytes(rows: int, grouped: bool, form: str, latent: int = VALUE_DIM) -> int:
    """Tell the shared memory of a thread block; `form` is that of struct Fp8Layout."""
    tiles = "" if latent == VALUE_DIM else f", {latent // 64}"
    return constant(_FILE, f"Fp8Layout<{rows}, {in_cuda(grouped)}, {form}{tiles}>::kBytes")


def _width_spec(shape: int | str, form: str, latent: int) -> KernelSpec:
    """Describe a kernel for e4m3 rows of another width, under one factor."""
    rows = NARROW_ROWS[-1] if isinstance(shape, str) else shape
    ragged = shape == _RAGGED
    return KernelSpec.of(
        *("mla", "mla_decode_fp8", "MlaWidthFp8Params", rows, False, _FORM_TAGS[form]),
        width_tile(latent, "RowHalfTile" if ragged else f"QueryTile<{rows}>"),
        name=f"mla_attention_fp8_{latent}" if ragged else f"mla_decode_fp8_{latent}_{shape}",
        tags=[form] if form != "pages" else [],
        threads=384,
        smem_bytes=smem_bytes(rows, False, _FORM_TAGS[form], latent),
    )


def _spec(
    shape: int | str, grouped: bool, form: str, sinks: bool = False, query: bool = False
) -> KernelSpec:
    rows = NARROW_ROWS[-1] if isinstance(shape, str) else shape
    name = "mla_attention_fp8" if shape == _RAGGED else f"mla_decode_fp8_{shape}"
    tile = "RowHalfTile" if shape == _RAGGED else f"QueryTile<{rows}>"
    is_default = not (sinks or query or shape == _RAGGED)
    tiles = [] if is_default else [masked_tile(tile, sinks, query)]
    tags = (
        *(["sinks"] if sinks else []),
        *(["query"] if query else []),
        *(["grouped"] if grouped and form != "packed" else []),
        *([form] if form != "pages" else []),
    )
    return KernelSpec.of(
        *("mla", "mla_decode_fp8", fp8_params(query)),
        *(rows, grouped, _FORM_TAGS[form], *tiles),
        name=name,
        tags=tags,
        threads=384,
        smem_bytes=smem_bytes(rows, grouped, _FORM_TAGS[form]),
    )


# Ragged queries with scales have only the form for any pages: the other needs too many registers.
# Packed rows are read as they are for few query rows: with more, the probabilities do not fit.
_SPECS = {
    (shape, grouped, form, sinks): _spec(shape, grouped, form, sinks)
    for sinks in (False, True)
    for shape in _SHAPES
    for grouped in (False, True)
    for form in _FORM_TAGS
    if (shape, grouped, form) != (_RAGGED, True, "pages")
    and (form != "packed" or (shape == NARROW_ROWS[0] and grouped))
}
_WIDTH_SPECS = {
    (shape, form, latent): _width_spec(shape, form, latent)
    for latent in dict.fromkeys(width[0] for width in WIDTHS if width != WIDTH)
    if TAKES[latent].e4m3
    for shape in _SHAPES
    for form in ("pages", "rows")
}
_QUERY_SPECS = {
    (shape, form): _spec(shape, False, form, query=True)
    for shape in _SHAPES
    for form in ("pages", "rows")
}
SPECS = (*_SPECS.values(), *_WIDTH_SPECS.values(), *_QUERY_SPECS.values())
_NARROW_WIDTHS = frozenset(_WIDTH_SPECS.values())
_FORMS = {
    **{spec: form for (_, _, form, _), spec in _SPECS.items()},
    **{spec: form for (_, form, _), spec in _WIDTH_SPECS.items()},
    **{spec: form for (_, form), spec in _QUERY_SPECS.items()},
}


def fp8_spec(
    key: LatentKey,
    grouped: bool,
    lies: str = "plain",
    sinks: bool = False,
    query: bool = False,
) -> KernelSpec:
    """Look up the kernel of a shape whose cache holds e4m3 numbers, without sinks or with them.

    Where `grouped`, each token has a scale for each 128 of its latent columns. `lies` is one of
    LIES, as :func:`how_it_lies` tells. `query`: the queries are e4m3, and the cache throughout.
    """
    shape = key.row_tile if isinstance(key, MLADecodeKey) else _RAGGED
    form = _form_of(key, grouped, lies)
    if query:
        return _QUERY_SPECS[shape, form]
    if key.width != WIDTH:
        return _WIDTH_SPECS[shape, form, key.value_dim]
    return _SPECS[shape, grouped, form, sinks]


def _form_of(key: LatentKey, grouped: bool, lies: str) -> str:
    """Tell in which form blocks come from the pages of a key: the only place that chooses it."""
    ragged = not isinstance(key, MLADecodeKey)
    if key.form != "pages" or lies == "broadcast" or (ragged and grouped):
        return "rows"
    return "packed" if lies == "packed" and key.row_groups == 1 else "pages"


def fp8_specs(key: LatentKey) -> tuple[KernelSpec, ...]:
    """List the kernels of a shape: of one factor, of scales, of packed rows if there is one.

    Of many heads those of one factor throughout, of packed rows, and of caches in several arrays,
    then those with products in e4m3.
    """
    if key.width != WIDTH:
        whole = key.has_whole_tiles
        return (fp8_64_spec(key, False, False) if whole else fp8_spec(key, False),)
    if key.has_whole_tiles:
        kinds = ((False, True), (True, False), (False, False), (True, True))
        specs = [fp8_64_spec(key, grouped, fp8_rope) for grouped, fp8_rope in kinds]
        return *specs, fp8_products_spec(key, True), fp8_products_spec(key, False)
    all_three = (fp8_spec(key, False), fp8_spec(key, True), fp8_spec(key, True, "packed"))
    return tuple(dict.fromkeys(all_three))


def how_it_lies(arguments: DecodeArguments) -> str:
    """Tell which of LIES a cache's addresses and strides amount to.

    ``"packed"`` is for rows of 656 bytes, in one array or in views of it; ``"broadcast"`` is where
    tokens share memory by strides of 0, which a tensor map need not take; ``"plain"`` is the rest.
    """
    latent, rope, scales = arguments.kv_cache, arguments.kv_rope, arguments.kv_scales
    if any(
        length > 1 and stride == 0
        for part in (latent, rope, scales)
        if part is not None
        for length, stride in zip(part.shape, part.strides, strict=True)
    ):
        return "broadcast"
    if scales is None or rope.dtype != "bfloat16":
        return "plain"
    begins = scales.ptr - latent.ptr, rope.ptr - latent.ptr
    together = latent.strides[:3] == scales.strides[:3] == rope.strides[:3]
    return "packed" if together and begins == (_PACKED_SCALES, _PACKED_ROPE) else "plain"


def decode_fp8_launch(
    key: LatentKey, buffer: int, arguments: DecodeArguments, out: ArrayView, lse: ArrayView
) -> Launch:
    """Describe how to attend to the blocks of every part; split requests go to the plan's buffer.

    Arguments of ragged queries are those of one request, as
    :func:`cumla.launch.mla.mla_attention.attention_launch` makes them. The rest is as for
    :func:`cumla.launch.mla.choice.attend_launch`.
    """
    grouped, sinks = arguments.kv_scales is not None, arguments.sinks is not None
    query = arguments.q.dtype == FP8
    if key.has_whole_tiles:
        fp8_rope = arguments.kv_rope.dtype != "bfloat16"
        if arguments.fp8_products and not grouped and key.has_fp8_products:
            spec = fp8_products_spec(key, fp8_rope, sinks, query)
        else:
            spec = fp8_64_spec(key, grouped, fp8_rope, sinks, query)
    else:
        spec = fp8_spec(key, grouped, how_it_lies(arguments), sinks, query)
    return launch_with(spec, key, buffer, arguments, out, lse)


def launch_with(
    spec: KernelSpec,
    key: LatentKey,
    buffer: int,
    a: DecodeArguments,
    out: ArrayView,
    lse: ArrayView,
    **more: Any,
) -> Launch:
    """Describe the same with a kernel of this file, or with another one that copies rows.

    It may take `more` than those of this file.
    """
    scales = a.kv_scales
    pointer, value = _factor(a.kv_scale)
    latent_map, rope_map, scales_map = _maps(_FORMS.get(spec, "rows"), key, a)
    decode = decode_values(key, buffer, a, out, lse, (latent_map, rope_map, NO_MAP))
    if spec in _WHOLE_TILES:
        decode |= _whole_rows(key, a)
    values = {
        "decode": decode,
        "scales": None if scales is None else strided(scales, *CACHE),
        "kv_scale": pointer,
        "kv_scale_value": value,
        "rope_is_fp8": a.kv_rope.dtype != "bfloat16",
        "scales_map": scales_map,
    }
    if spec in _NARROW_WIDTHS:
        more |= {"rope_columns": a.kv_rope.shape[3]}
    if a.q.dtype == FP8:
        more |= dict(zip(("q_scale", "q_scale_value"), _factor(a.q_scale), strict=True))
    grid = key.row_tiles, key.parts, key.num_kv_heads
    return launch_of(spec, grid, values | more)


def _factor(factor: ArrayView | float) -> tuple[int, float]:
    """Tell where a factor is, or what it is."""
    return (0, factor) if isinstance(factor, (int, float)) else (factor.ptr, 0.0)


def _maps(form: str, key: LatentKey, arguments: DecodeArguments) -> Maps:
    """Describe latent columns, RoPE columns and scales, or whole rows, as a kernel's form asks."""
    latent, rope, scales = arguments.kv_cache, arguments.kv_rope, arguments.kv_scales
    if form == "packed":
        rows = latent._replace(shape=(*latent.shape[:3], _PACKED_WORDS), dtype="uint32")
        return _map(key, rows), NO_MAP, NO_MAP
    if form == "pages":
        return _map(key, latent), _map(key, rope if rope.shape[3] else None), _map(key, scales)
    return NO_MAP, NO_MAP, NO_MAP


def _whole_rows(key: LatentKey, arguments: DecodeArguments) -> dict[str, Any]:
    """Tell a kernel of many heads whether rows have its layout in shared memory, and its boxes.

    A box has the rows of a granule. If pages do not consist of granules, rows come one by one.
    """
    row_bytes = _bytes_of_whole_rows(arguments)
    values: dict[str, Any] = {"rope_is_apart": row_bytes is None, "box_rows": 0}
    latent = arguments.kv_cache
    boxes = how_it_lies(arguments) != "broadcast" and key.page_size % _GRANULE_ROWS == 0
    if row_bytes is not None and boxes:
        shape = (*latent.shape[:3], row_bytes // 4)
        box = paged_kv_map(latent.ptr, "uint32", shape, latent.strides, _GRANULE_ROWS)
        values |= {"latent_map": box, "box_rows": _GRANULE_ROWS}
    return values


def _bytes_of_whole_rows(arguments: DecodeArguments) -> int | None:
    """Tell how long rows are, if their columns and scales are adjacent, in the kernels' order."""
    latent, rope, scales = arguments.kv_cache, arguments.kv_rope, arguments.kv_scales
    is_fp8 = rope.dtype != "bfloat16"
    if scales is None and not is_fp8:
        return None
    begin = VALUE_DIM if scales is None else _PACKED_ROPE
    others = [(rope, begin)] if scales is None else [(scales, _PACKED_SCALES), (rope, begin)]
    if any(
        part.ptr - latent.ptr != at or part.strides[:3] != latent.strides[:3] for part, at in others
    ):
        return None
    return begin + rope.shape[3] * (1 if is_fp8 else 2)


def _map(key: LatentKey, cache: ArrayView | None) -> TensorMap | bytes:
    """Describe columns of the cache, or its scales, to the copy engine."""
    if cache is None:
        return NO_MAP
    return paged_kv_map(cache.ptr, cache.dtype, cache.shape, cache.strides, key.box_rows)
