# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA: attention over lists of rows, of DeepSeek-V3.2's and V4's caches and of prefills."""

from __future__ import annotations

from functools import partial
from typing import Any

import cumla
from bench.case import Case, Section, Variant, shapes
from bench.lab import Lab
from bench.libraries import Schedule
from bench.oracle import attend, row_error, sampled
from bench.sections.mla import COLUMNS, SCALE, VALUES

_PAGE, _TOP = 64, 2048
_PACKED, _PACKED_V4 = 656, 584  # bytes of a row
_CACHE_PADDING = 576  # a V4 page begins at a multiple of it
_FEWEST_HEADS = 64  # of FlashMLA's kernels


def _power_of_two_scales(lab: Lab, x: Any) -> tuple[Any, Any]:
    """Quantise the last axis: (float8_e4m3fn, scales)."""
    scale = (x.abs().amax(-1) / 448.0).clamp_min(1e-4).log2().ceil().exp2()
    return (x / scale[..., None]).to(lab.dtype("float8_e4m3fn")), scale


def packed_rows(lab: Lab, count: int) -> Any:
    """(count, 656) uint8: rows as V3.2 stores them, 4 blocks of 128 values and scales, RoPE."""
    torch = lab.torch
    rows = lab.normal(count, COLUMNS)
    values, scales = _power_of_two_scales(lab, rows[:, :VALUES].float().view(count, 4, 128))
    made = torch.empty(count, _PACKED, dtype=torch.uint8, device=lab.device)
    made[:, :VALUES] = values.view(count, VALUES).view(torch.uint8)
    made[:, VALUES : VALUES + 16] = scales.contiguous().view(torch.uint8).view(count, 16)
    made[:, VALUES + 16 :] = rows[:, VALUES:].contiguous().view(torch.uint8)
    return made


def unpacked_rows(lab: Lab, rows: Any) -> Any:
    """The float32 values of such rows."""
    torch = lab.torch
    values = rows[:, :VALUES].contiguous().view(lab.dtype("float8_e4m3fn")).float()
    scales = rows[:, VALUES : VALUES + 16].contiguous().view(torch.float32)
    latent = (values.view(-1, 4, 128) * scales[..., None]).view(-1, VALUES)
    rope = rows[:, VALUES + 16 :].contiguous().view(torch.bfloat16).float()
    return torch.cat([latent, rope], 1)


def v4_pages(lab: Lab, pages: int, page: int) -> tuple[Any, Any]:
    """(uint8 (pages, page, 1, 584), float32 (pages * page, 512)): V4's pages and their values.

    A page holds 448 values of e4m3 and 64 of bfloat16 for each row, and behind them the exponents
    of 7 scales a row.
    """
    torch = lab.torch
    stride = -(-page * _PACKED_V4 // _CACHE_PADDING) * _CACHE_PADDING
    memory = torch.zeros(pages, stride, dtype=torch.uint8, device=lab.device)
    rows = lab.normal(pages, page, VALUES)
    values, scales = _power_of_two_scales(lab, rows[..., :448].float().view(pages, page, 7, 64))
    stored = memory[:, : page * 576].view(pages, page, 576)
    stored[..., :448] = values.view(pages, page, 448).view(torch.uint8)
    stored[..., 448:] = rows[..., 448:].contiguous().view(torch.uint8)
    exponents = memory[:, page * 576 : page * _PACKED_V4].view(pages, page, 8)
    exponents[..., :7] = (scales.log2().round() + 127).to(torch.uint8)
    latent = (values.float() * scales[..., None]).view(pages, page, 448)
    meant = torch.cat([latent, rows[..., 448:].float()], -1).view(-1, VALUES)
    strides = (stride, _PACKED_V4, _PACKED_V4, 1)
    return torch.as_strided(memory, (pages, page, 1, _PACKED_V4), strides), meant


def _places(batch: int, queries: int) -> set[tuple[int, int]]:
    return {(request, queries - 1 if request else 0) for request in sampled(batch)}


# --- V3.2 -----------------------------------------------------------------------------------------


def decode(lab: Lab, batch: int, queries: int, heads: int) -> Case:
    kv_len = 32768 if batch <= 64 else 16384
    batch, heads, kv_len, top = lab.at_most(
        batch=(batch, 2), heads=(heads, 4), kv_len=(kv_len, 256), top=(_TOP, 64)
    )
    pages = kv_len // _PAGE
    cache = lab.empty(batch * pages, _PAGE, 1, _PACKED, dtype="uint8")
    flat = cache.view(-1, _PACKED)
    for begin in range(0, len(flat), 1 << 18):
        part = flat[begin : begin + (1 << 18)]
        part[:] = packed_rows(lab, len(part))
    table = lab.table(batch, pages)
    tokens = lab.distinct(batch * queries, kv_len, top).view(batch, queries * top).long()
    rows = table.gather(1, tokens // _PAGE) * _PAGE + tokens % _PAGE
    indices = lab.ints(rows).view(batch, queries, top).contiguous()
    q = lab.normal(batch, queries, heads, COLUMNS)
    out = lab.empty(batch, queries, heads, VALUES)
    lse = lab.empty(batch, queries, heads, dtype="float32")
    plan = cumla.MLASparsePlan.from_arrays(q, cache, indices)
    plan.update()

    def run() -> Any:
        plan.run(q, cache, indices, out=out, lse=lse)
        return out

    def error(got: Any) -> float:
        got, worst = got.reshape(batch, queries, -1, VALUES)[:, :, :heads], 0.0
        for request, token in _places(batch, queries):
            listed = unpacked_rows(lab, flat[indices[request, token].long()])
            want = attend(q[request, token], listed, listed[:, :VALUES], SCALE)
            worst = max(worst, row_error(got[request, token], want))
        return worst

    return Case(
        run,
        error,
        limit=6e-3,
        nbytes=batch * queries * (top * (_PACKED + 4) + heads * 2 * (COLUMNS + VALUES)),
        flops=2 * batch * queries * heads * top * (COLUMNS + VALUES),
        peers={"FlashMLA": _flash_mla_decode(lab, q, cache, indices)},
    )


def _flash_mla_decode(lab: Lab, q: Any, cache: Any, indices: Any) -> list[Variant]:
    """FlashMLA with as many heads as its kernels have, the others zero, as servers do it."""
    found = []
    batch, queries, heads, _ = q.shape
    held = max(heads, _FEWEST_HEADS)
    for name, build in lab.libraries.flash_mla.items():
        padded = lab.torch.zeros(batch, queries, held, COLUMNS, dtype=q.dtype, device=lab.device)
        padded[:, :, :heads] = q
        out = lab.empty(batch, queries, held, VALUES)
        stored = cache.view(lab.dtype("float8_e4m3fn"))
        call = partial(build.lists, padded, stored, indices, SCALE, Schedule(), out)
        found.append(Variant(name if held == heads else f"{name}, 64 heads", call))
    return found


_SIZES = {"batch": "requests", "queries": "query tokens", "heads": "heads"}

DECODE = Section(
    name="sparse",
    title="Sparse decoding, DeepSeek-V3.2",
    about="`cumla.MLASparsePlan.run`: each query token attends to its own list of 2,048 rows of "
    "the packed FP8 cache (656 bytes). FlashMLA's kernels have 64 or 128 heads: with 16, the "
    "others are zeros, as in servers.",
    columns=_SIZES,
    shapes=shapes(
        "batch queries heads",
        *(
            (batch, queries, heads)
            for batch, queries in ((128, 1), (128, 2), (64, 1), (16, 1), (8, 1), (4, 1), (1, 1))
            for heads in (128, 64)
        ),
        *((batch, 1, 16) for batch in (128, 16, 1)),
    ),
    build=decode,
)

# --- V4 -------------------------------------------------------------------------------------------


def v4(lab: Lab, batch: int, queries: int, heads: int, own: int, extra: int) -> Case:
    kv_len = 8192
    batch, heads, own, extra, kv_len = lab.at_most(
        batch=(batch, 2), heads=(heads, 4), own=(own, 64), extra=(extra, 64), kv_len=(kv_len, 256)
    )
    cache, meant = v4_pages(lab, batch, 256)
    other, other_meant = v4_pages(lab, batch * kv_len // _PAGE, _PAGE)
    requests = lab.ints(range(batch))[:, None, None]
    indices = lab.distinct(batch * queries, 256, own).view(batch, queries, own) + requests * 256
    more = lab.distinct(batch * queries, kv_len, extra).view(batch, queries, extra)
    more = more + requests * kv_len
    q = lab.normal(batch, queries, heads, VALUES)
    sinks = lab.torch.linspace(-2, 2, heads, device=lab.device)
    out = lab.empty(batch, queries, heads, VALUES)
    lse = lab.empty(batch, queries, heads, dtype="float32")
    second = {"extra_kv_cache": other, "extra_indices": more}
    plan = cumla.MLASparsePlan.from_arrays(q, cache, indices, **second)
    plan.update()
    scale = VALUES**-0.5

    def run() -> Any:
        options = {"sinks": sinks, "softmax_scale": scale, "out": out, "lse": lse}
        plan.run(q, cache, indices, **second, **options)
        return out

    def error(got: Any) -> float:
        got, worst = got.reshape(out.shape), 0.0
        for request, token in _places(batch, queries):
            lists = ((meant, indices), (other_meant, more))
            rows = lab.torch.cat([values[at[request, token].long()] for values, at in lists])
            want = attend(q[request, token], rows, rows, scale, sinks)
            worst = max(worst, row_error(got[request, token], want))
        return worst

    found = []
    e4m3 = lab.dtype("float8_e4m3fn")
    for name, build in lab.libraries.flash_mla.items():
        given = (q, cache.view(e4m3), indices, scale, Schedule(), lab.torch.empty_like(out))
        pair = (other.view(e4m3), more)
        found.append(Variant(name, partial(build.lists, *given, sinks=sinks, extra=pair)))
    rows = own + extra
    return Case(
        run,
        error,
        limit=6e-3,
        nbytes=batch * queries * (rows * (_PACKED_V4 + 4) + heads * 2 * 2 * VALUES),
        flops=2 * batch * queries * heads * rows * 2 * VALUES,
        peers={"FlashMLA": found},
    )


V4 = Section(
    name="sparse-v4",
    title="Sparse decoding, DeepSeek-V4",
    about="`cumla.MLASparsePlan.run` over two caches of packed rows (584 bytes), a list of each, "
    "with sinks.",
    columns=_SIZES | {"own": "rows of the first cache", "extra": "of the second"},
    shapes=shapes(
        "batch queries heads own extra",
        *((batch, 1, 64, 128, 512) for batch in (1, 4, 8, 16, 32, 128)),
        *((batch, 1, 128, 128, 1024) for batch in (1, 4, 16, 128)),
        (128, 2, 64, 128, 512),
    ),
    build=v4,
)

# --- prefill --------------------------------------------------------------------------------------


def prefill(lab: Lab, queries: int, heads: int, kv_len: int) -> Case:
    queries, heads, kv_len, top = lab.at_most(
        queries=(queries, 3), heads=(heads, 4), kv_len=(kv_len, 256), top=(_TOP, 64)
    )
    q, rows = lab.normal(queries, heads, COLUMNS), lab.normal(kv_len, COLUMNS)
    indices = lab.distinct(queries, kv_len, top)
    out = lab.empty(queries, heads, VALUES)
    lse = lab.empty(queries, heads, dtype="float32")
    plan = cumla.MLASparsePlan.from_arrays(q, rows, indices)
    plan.update()

    def run() -> Any:
        plan.run(q, rows, indices, out=out, lse=lse)
        return out

    def error(got: Any) -> float:
        worst = 0.0
        for token in sampled(queries):
            listed = rows[indices[token].long()]
            want = attend(q[token], listed, listed[:, :VALUES], SCALE)
            worst = max(worst, row_error(got[token, :heads], want))
        return worst

    found = []
    for name, build in lab.libraries.flash_mla.items():
        held = heads if build.takes_out else max(heads, _FEWEST_HEADS)
        padded = lab.torch.zeros(queries, held, COLUMNS, dtype=q.dtype, device=lab.device)
        padded[:, :heads] = q
        given = (padded, rows[:, None], indices[:, None], SCALE, lab.torch.empty_like(out))
        found.append(
            Variant(name if held == heads else f"{name}, 64 heads", partial(build.prefill, *given))
        )
    return Case(
        run,
        error,
        limit=6e-3,
        nbytes=kv_len * 2 * COLUMNS + queries * (heads * 2 * (COLUMNS + VALUES) + top * 4),
        flops=2 * queries * heads * top * (COLUMNS + VALUES),
        peers={"FlashMLA": found},
    )


PREFILL = Section(
    name="sparse-prefill",
    title="Sparse prefill",
    about="`cumla.MLASparsePlan.run`: each query token attends to its own list of 2,048 rows of "
    "bfloat16. One of FlashMLA's builds has no kernel for 16 heads: the others are zeros there.",
    columns={"queries": "query tokens", "heads": "heads", "kv_len": "rows"},
    shapes=shapes(
        "queries heads kv_len",
        *((4096, heads, kv_len) for kv_len in (8192, 131072) for heads in (128, 64)),
        *((4096, 16, 8192), (1024, 128, 8192), (256, 128, 8192)),
    ),
    build=prefill,
)
