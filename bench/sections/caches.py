# SPDX-License-Identifier: Apache-2.0
"""Operations that move bytes, beside plain copies: writing into caches, quantising, merging."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import cumla
from bench.case import Case, Section, Variant, shapes
from bench.lab import Lab
from bench.oracle import row_error

_MLA, _ROPE, _INDEXER = 576, 64, 128  # columns
_POSITIONS = 8192
_EXACT, _ROUNDED, _QUANTIZED = 0.0, 4e-3, 4e-2  # limits of errors


def _copy(lab: Lab, nbytes: int) -> dict[str, list[Variant]]:
    """A plain copy that reads and writes as many bytes in all."""
    source, target = (lab.empty(nbytes // 2, dtype="uint8") for _ in range(2))
    source.zero_()
    return {"a copy": [Variant("", partial(target.copy_, source))]}


def _beside_copy(
    lab: Lab, run: Callable[[], Any], error: Callable[[], float], limit: float, nbytes: int
) -> Case:
    """A case whose error is that of what `run` wrote; a copy has none."""
    written = run().data_ptr()
    return Case(
        run,
        lambda got: error() if got.data_ptr() == written else 0.0,
        limit,
        nbytes=nbytes,
        peers=_copy(lab, nbytes),
    )


def _slots(lab: Lab, tokens: int, page: int) -> Any:
    """Slots of tokens in shuffled pages, all pages full."""
    pages = lab.shuffled(tokens // page)
    places = pages[:, None] * page + lab.ints(range(page))
    return lab.ints(places.flatten())


def _rotation(lab: Lab, tokens: int, columns: int) -> tuple[Any, Any]:
    """Positions of tokens, and a table of cosines and sines."""
    angles = 6.28 * lab.torch.rand(_POSITIONS, columns // 2, device=lab.device)
    table = lab.torch.cat([angles.cos(), angles.sin()], 1)
    return lab.ints(lab.torch.arange(tokens) % _POSITIONS), table


def _rotated(x: Any, table: Any, positions: Any, interleaved: bool) -> Any:
    """The rotated columns, float64; x (tokens, ..., columns)."""
    cos, sin = table[positions.long()].double().chunk(2, -1)
    shape = (len(x), *[1] * (x.dim() - 2), -1)
    cos, sin, x = cos.view(shape), sin.view(shape), x.double()
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        pairs = (a * cos - b * sin, b * cos + a * sin)
        return _stacked(*pairs).flatten(-2)
    a, b = x.chunk(2, -1)
    found = x.new_empty(x.shape)
    found[..., : a.shape[-1]], found[..., a.shape[-1] :] = a * cos - b * sin, b * cos + a * sin
    return found


def _stacked(a: Any, b: Any) -> Any:
    made = a.new_empty(*a.shape, 2)
    made[..., 0], made[..., 1] = a, b
    return made


# --- writes ---------------------------------------------------------------------------------------


def write_mla(lab: Lab, tokens: int, page: int, rotated: bool) -> Case:
    rows = lab.normal(tokens, _MLA)
    cache = lab.empty(tokens // page, page, _MLA)
    slots = _slots(lab, tokens, page)
    given = {}
    if rotated:
        given["positions"], given["cos_sin"] = _rotation(lab, tokens, _ROPE)

    def run() -> Any:
        cumla.append_mla_cache(rows, cache, slots, **given)
        return cache

    def error() -> float:
        some = slice(0, 4096)
        want = rows[some].double()
        if rotated:
            rope = want[:, -_ROPE:]
            turned = _rotated(rope, given["cos_sin"], given["positions"][some], interleaved=True)
            want[:, -_ROPE:] = turned
        return row_error(cache.view(-1, _MLA)[slots[some].long()], want)

    nbytes = 2 * tokens * 2 * _MLA
    return _beside_copy(lab, run, error, _ROUNDED if rotated else _EXACT, nbytes)


def write_heads(lab: Lab, tokens: int, page: int, rotated: bool) -> Case:
    heads, kv_heads, columns = 32, 8, 128
    q, k, v = (lab.normal(tokens, count, columns) for count in (heads, kv_heads, kv_heads))
    caches = [lab.empty(tokens // page, page, kv_heads, columns) for _ in range(2)]
    slots = _slots(lab, tokens, page)
    q_out = lab.empty(tokens, heads, columns)
    positions, table = _rotation(lab, tokens, columns)
    given = {"positions": positions, "cos_sin": table, "q": q, "q_out": q_out} if rotated else {}

    def run() -> Any:
        cumla.append_kv_cache(k, v, caches[0], caches[1], slots, **given)
        return caches[0]

    def error() -> float:
        some = slice(0, 1024)
        written = [cache.view(-1, kv_heads, columns)[slots[some].long()] for cache in caches]
        turn = partial(_rotated, table=table, positions=positions[some], interleaved=False)
        want = turn(k[some]) if rotated else k[some]
        worst = max(row_error(written[0], want), row_error(written[1], v[some]))
        return max(worst, row_error(q_out[some], turn(q[some]))) if rotated else worst

    moved = 2 * kv_heads + (heads if rotated else 0)
    nbytes = 2 * tokens * 2 * moved * columns
    return _beside_copy(lab, run, error, _ROUNDED if rotated else _EXACT, nbytes)


def write_indexer(lab: Lab, tokens: int, page: int, rotated: bool) -> Case:
    keys = lab.normal(tokens, _INDEXER)
    cache = lab.empty(tokens // page, page, 1, _INDEXER + 4, dtype="uint8")
    slots = _slots(lab, tokens, page)

    def run() -> Any:
        cumla.append_indexer_cache(keys, cache, slots)
        return cache

    def error() -> float:
        pages = cache.view(tokens // page, -1)
        values = pages[:, : page * _INDEXER].contiguous().view(lab.dtype("float8_e4m3fn"))
        scales = pages[:, page * _INDEXER :].contiguous().view(lab.torch.float32)
        stored = values.view(tokens, _INDEXER).double() * scales.view(tokens, 1).double()
        return row_error(stored[slots.long()], keys)

    return _beside_copy(lab, run, error, _QUANTIZED, tokens * (3 * _INDEXER + 4))


def quantize(lab: Lab, tokens: int, page: int, rotated: bool) -> Case:
    rows = lab.normal(tokens, _INDEXER)
    out = lab.empty(tokens, _INDEXER, dtype="float8_e4m3fn")
    scale = lab.empty(tokens, dtype="float32")

    def run() -> Any:
        cumla.quantize_fp8(rows, out=out, scale_out=scale)
        return out.view(lab.torch.uint8)

    def error() -> float:
        return row_error(out.double() * scale.double()[:, None], rows)

    return _beside_copy(lab, run, error, _QUANTIZED, tokens * (3 * _INDEXER + 4))


_WRITES: dict[str, Callable[..., Case]] = {
    "append_mla_cache": write_mla,
    "append_kv_cache": write_heads,
    "append_indexer_cache": write_indexer,
    "quantize_fp8": quantize,
}


def writes(lab: Lab, function: str, tokens: int, page: int, rotated: bool) -> Case:
    (tokens,) = lab.at_most(tokens=(tokens, 128))
    return _WRITES[function](lab, tokens, page, rotated)


WRITES = Section(
    name="writes",
    title="Writing into caches",
    about="New rows of bfloat16 written to shuffled pages, rotated or quantised on their way: "
    "latent rows of 576 columns, keys and values of 8 heads of 128 (with 32 heads of queries "
    "where they are rotated), keys of the indexer of 128. Beside each, a plain copy that reads "
    "and writes as many bytes.",
    columns={
        "function": "function",
        "tokens": "tokens",
        "page": "tokens of a page",
        "rotated": "rotated",
    },
    shapes=shapes(
        "function tokens page rotated",
        *(
            ("append_mla_cache", 55552, page, rotated)
            for page, rotated in ((64, False), (1, False))
        ),
        *(("append_mla_cache", tokens, 64, True) for tokens in (55552, 868032)),
        *(("append_kv_cache", 8192, page, rotated) for page in (64, 16) for rotated in (True,)),
        ("append_kv_cache", 32768, 64, False),
        ("append_indexer_cache", 329856, 64, False),
        ("quantize_fp8", 329856, 64, False),
    ),
    build=writes,
    baseline={"a copy": "a copy"},
)

# --- merges ---------------------------------------------------------------------------------------


def merges(lab: Lab, parts: int, tokens: int, dtype: str) -> Case:
    heads, columns = 128, 512
    (tokens,) = lab.at_most(tokens=(tokens, 3))
    outs = [lab.normal(tokens, heads, columns, dtype=dtype) for _ in range(parts)]
    lses = [lab.normal(tokens, heads, dtype="float32") for _ in range(parts)]
    out, lse = lab.empty(*outs[0].shape, dtype=dtype), lab.empty(tokens, heads, dtype="float32")

    def run() -> Any:
        cumla.merge_attention_states(outs, lses, out=out, lse=lse)
        return out

    def error() -> float:
        some = slice(0, 64)
        weights = lab.torch.stack([part[some].double() for part in lses]).softmax(0)
        states = lab.torch.stack([part[some].double() for part in outs])
        return row_error(out[some], (states * weights[..., None]).sum(0))

    nbytes = (parts + 1) * tokens * heads * (columns * out.element_size() + 4)
    return _beside_copy(lab, run, error, _ROUNDED, nbytes)


MERGES = Section(
    name="merges",
    title="Merging partial results",
    about="`cumla.merge_attention_states` of 128 heads of 512 columns. Beside each, a plain copy "
    "that reads and writes as many bytes.",
    columns={"parts": "partial results", "tokens": "tokens", "dtype": "dtype"},
    shapes=shapes(
        "parts tokens dtype",
        *((2, 170, "bfloat16"), (8, 57, "bfloat16"), (2, 85, "float32")),
        *((2, 2720, "bfloat16"), (8, 907, "bfloat16"), (2, 1363, "float32")),
    ),
    build=merges,
    baseline={"a copy": "a copy"},
)
