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
from bench.sections.mla import COLUMNS, SCALE, VALUES, Decode
from bench.sections.widths import flash_infer

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

# --- rows of other formats ------------------------------------------------------------------------


class Listed:
    """A list for each request, of rows of a cache; other libraries take it as pages of one row."""

    q_len, window, page = 1, None, 1
    flash_attention: Any = Decode.flash_attention

    def __init__(self, lab: Lab, rows: str, sizes: tuple[int, int, int], rope: int) -> None:
        torch = lab.torch
        self.lab, self.values, self.columns = lab, VALUES, VALUES + rope
        self.batch, self.heads, self.pages = batch, heads, top = sizes
        self.scale = self.columns**-0.5
        kv_len = 16384 if not lab.tiny else 256
        count = batch * kv_len
        self.form = {"528": "v32_no_rope", "656": "v32"}.get(rows.partition(" ")[0])
        nbytes = {"v32_no_rope": 528, "v32": _PACKED}.get(self.form or "")
        dtype = "uint8" if nbytes else "float8_e4m3fn" if "e4m3" in rows else "bfloat16"
        self.cache = lab.empty(count, 1, 1, nbytes or self.columns, dtype=dtype)
        flat = self.cache.view(count, -1)
        for begin in range(0, count, 1 << 18):
            part = flat[begin : begin + (1 << 18)]
            if self.form is None:
                part[:] = lab.normal(len(part), self.columns).to(part.dtype)
            else:
                whole = packed_rows(lab, len(part))
                part[:] = whole if rope else whole[:, : VALUES + 16]
        tokens = lab.distinct(batch, kv_len, top).long()
        begins = torch.arange(batch, device=lab.device)[:, None] * kv_len
        self.table = lab.ints(tokens + begins).contiguous()
        self.lens = lab.full(batch, top)
        self.q = lab.normal(batch, 1, heads, self.columns)
        self.sinks = torch.linspace(-2, 2, heads, device=lab.device) if "sinks" in rows else None
        self.out = lab.empty(batch, 1, heads, VALUES)
        self.lse = lab.empty(batch, 1, heads, dtype="float32")
        named: Any = {"cache_format": self.form} if self.form == "v32_no_rope" else {}
        self.given = self.q, self.cache, self.table[:, None]
        self.plan = cumla.MLASparsePlan.from_arrays(*self.given, **named)
        self.plan.update()
        self.nbytes = batch * (top * (flat.shape[1] * flat.element_size() + 4))
        self.nbytes += batch * heads * 2 * (self.columns + VALUES)
        self.flops = 2 * batch * heads * top * (self.columns + VALUES)

    def run(self) -> Any:
        options = {} if self.sinks is None else {"sinks": self.sinks}
        options |= {"softmax_scale": self.scale, "out": self.out, "lse": self.lse}
        self.plan.run(*self.given, **options)
        return self.out

    def error(self, got: Any) -> float:
        got, worst = got.reshape(self.batch, self.heads, VALUES), 0.0
        for request in sampled(self.batch):
            listed = self.cache.view(len(self.cache), -1)[self.table[request].long()]
            if self.form == "v32_no_rope":
                listed = self.lab.torch.nn.functional.pad(listed, (0, _PACKED - listed.shape[1]))
            rows = unpacked_rows(self.lab, listed)[:, : self.columns] if self.form else listed
            rows = rows.float()
            want = attend(self.q[request, 0], rows, rows[:, :VALUES], self.scale, self.sinks)
            worst = max(worst, row_error(got[request], want))
        return worst


def other_rows(lab: Lab, cache: str, batch: int, heads: int, top: int) -> Case:
    rope = COLUMNS - VALUES if cache.startswith(("576", "656")) else 0
    sizes: Any = lab.at_most(batch=(batch, 2), heads=(heads, 4), top=(top, 64))
    work, peers = Listed(lab, cache, sizes, rope), {}
    if work.form is None and work.sinks is None:
        peers = flash_infer(work, rope)
    if work.cache.element_size() == 2:
        peers["FlashAttention-3"] = work.flash_attention()
    run, limit = work.run, 6e-3 if work.cache.element_size() == 1 else 4e-3
    limit = 8e-3 if work.sinks is not None else limit
    return Case(run, work.error, limit, nbytes=work.nbytes, flops=work.flops, peers=peers)


OTHER_ROWS = Section(
    name="sparse-rows",
    title="Sparse decoding over other rows",
    about="`cumla.MLASparsePlan.run` over lists of GLM-5.3 (2,176 rows of 512 columns without "
    "RoPE: in bfloat16, in e4m3 under one factor, or 528 bytes with factors of 128 columns) and of "
    "Hy4 (2,048 rows, with sinks). FlashAttention-3 and FlashInfer take lists as pages of one row; "
    "neither reads packed rows.",
    columns={"cache": "rows", "batch": "requests", "heads": "heads", "top": "rows of a list"},
    shapes=shapes(
        "cache batch heads top",
        *(("512 bf16", batch, heads, 2176) for heads in (64, 8) for batch in (1, 8, 64, 128)),
        *(("512 e4m3", *sizes, 2176) for sizes in ((64, 64), (128, 64), (128, 8))),
        *(("528 bytes", 128, heads, 2176) for heads in (64, 8)),
        ("576 bf16, sinks", 128, 32, 2048),
        ("656 bytes, sinks", 128, 8, 2048),
    ),
    build=other_rows,
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


def v41_rows(lab: Lab, count: int, form: str) -> tuple[Any, Any]:
    """(uint8 (count, 528 or 288), float32 (count, 512)): V4.1's rows, written by cumla, and their
    values."""
    torch, nbytes = lab.torch, {"v41": 528, "v41_fp4": 288}[form]
    rows = torch.zeros(count, 1, 1, nbytes, dtype=torch.uint8, device=lab.device)
    slots = torch.arange(count, device=lab.device)
    cumla.append_mla_cache(lab.normal(count, VALUES), rows, slots, cache_format=form)
    flat = rows.view(count, nbytes)
    if form == "v41":
        numbers = flat[:, :VALUES].contiguous().view(lab.dtype("float8_e4m3fn")).float()
        scales = (flat[:, VALUES:].float() - 127).exp2()
    else:
        steps = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
        codes = torch.tensor(steps + [-x for x in steps], device=lab.device)
        pairs = flat[:, : VALUES // 2].long()
        numbers = codes[torch.stack([pairs & 15, pairs >> 4], -1)].view(count, VALUES)
        scales = flat[:, VALUES // 2 :].contiguous().view(lab.dtype("float8_e4m3fn")).float()
    values = numbers.view(count, scales.shape[1], -1) * scales[..., None]
    return rows, values.view(count, VALUES)


def v41(lab: Lab, extra: str, batch: int, heads: int) -> Case:
    kv_len, own, top = lab.at_most(kv_len=(8192, 256), own=(128, 64), top=(512, 64))
    batch, heads = lab.at_most(batch=(batch, 2), heads=(heads, 4))
    form = {"528 bytes": "v41", "288 bytes": "v41_fp4"}[extra]
    cache, meant = v41_rows(lab, batch * 256, "v41")
    other, other_meant = v41_rows(lab, batch * kv_len, form)
    requests = lab.ints(range(batch))[:, None, None]
    indices = lab.distinct(batch, 256, own).view(batch, 1, own) + requests * 256
    more = lab.distinct(batch, kv_len, top).view(batch, 1, top) + requests * kv_len
    q = lab.normal(batch, 1, heads, VALUES)
    sinks = lab.torch.linspace(-2, 2, heads, device=lab.device)
    out = lab.empty(batch, 1, heads, VALUES)
    lse = lab.empty(batch, 1, heads, dtype="float32")
    second = {"extra_kv_cache": other, "extra_indices": more}
    forms: Any = {"cache_format": "v41", "extra_cache_format": form}
    plan = cumla.MLASparsePlan.from_arrays(q, cache, indices, **second, **forms)
    plan.update()
    scale = VALUES**-0.5

    def run() -> Any:
        options = {"sinks": sinks, "softmax_scale": scale, "out": out, "lse": lse}
        plan.run(q, cache, indices, **second, **options)
        return out

    def error(got: Any) -> float:
        got, worst = got.reshape(out.shape), 0.0
        for request in sampled(batch):
            lists = ((meant, indices), (other_meant, more))
            rows = lab.torch.cat([values[at[request, 0].long()] for values, at in lists])
            want = attend(q[request, 0], rows, rows, scale, sinks)
            worst = max(worst, row_error(got[request, 0], want))
        return worst

    nbytes = own * 532 + top * (4 + other.shape[-1]) + heads * 2 * 2 * VALUES
    flops = 2 * batch * heads * (own + top) * 2 * VALUES
    return Case(run, error, limit=6e-3, nbytes=batch * nbytes, flops=flops)


V41 = Section(
    name="sparse-v41",
    title="Sparse decoding, DeepSeek-V4.1",
    about="`cumla.MLASparsePlan.run` over two caches, 128 rows of the first (528 bytes) and 512 of "
    "the second, of 528 bytes in e4m3 or of 288 in FP4, with sinks. No other library reads these "
    "rows on Hopper.",
    columns={"extra": "rows of the second cache", "batch": "requests", "heads": "heads"},
    shapes=shapes(
        "extra batch heads",
        *((extra, batch, 64) for extra in ("528 bytes", "288 bytes") for batch in (1, 16, 128)),
    ),
    build=v41,
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
