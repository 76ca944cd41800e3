# SPDX-License-Identifier: Apache-2.0
"""A plain split-KV flash decoding in Triton, to compare with: what a short kernel gets.

Importing this module imports Triton. Two kernels: one attends to a share of the tokens for a tile
of query rows, the other merges the shares. With a single share the first one writes the result.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["ATTEND", "prepare", "tile_options"]

triton: Any = import_module("triton")
tl: Any = import_module("triton.language")
if TYPE_CHECKING:
    constexpr = Any
else:
    constexpr = tl.constexpr

_FEWEST_TOKENS = 128  # of a share


def _attend(  # type: ignore[no-untyped-def]  # pointers and integers, in Triton's own language
    q,
    kv,
    block_table,
    seqlens,
    out,
    partial_out,
    partial_lse,
    scale,
    q_len,
    heads,
    table_stride,
    splits,
    TILE_ROWS: constexpr,
    TILE_TOKENS: constexpr,
    SINGLE: constexpr,
):
    request = tl.program_id(0)
    split = tl.program_id(2)
    rows = q_len * heads
    row = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    exists = row < rows
    latent = tl.arange(0, 512)
    rope = 512 + tl.arange(0, 64)
    q_row = q + (request * rows + row)[:, None] * 576
    q_latent = tl.load(q_row + latent[None, :], mask=exists[:, None], other=0.0)
    q_rope = tl.load(q_row + rope[None, :], mask=exists[:, None], other=0.0)

    length = tl.load(seqlens + request)
    visible = length - (q_len - 1 - row // heads)
    share = tl.cdiv(tl.cdiv(length, TILE_TOKENS), splits) * TILE_TOKENS
    end = tl.minimum((split + 1) * share, length)
    highest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    sums = tl.zeros([TILE_ROWS, 512], tl.float32)
    for start in range(split * share, end, TILE_TOKENS):
        token = start + tl.arange(0, TILE_TOKENS)
        inside = token < end
        entry = block_table + request * table_stride + token // 64
        page = tl.load(entry, mask=inside, other=0).to(tl.int64)
        kv_row = kv + (page * 64 + token % 64)[:, None] * 576
        k_latent = tl.load(kv_row + latent[None, :], mask=inside[:, None], other=0.0)
        k_rope = tl.load(kv_row + rope[None, :], mask=inside[:, None], other=0.0)
        scores = tl.dot(q_latent, tl.trans(k_latent))
        scores = tl.dot(q_rope, tl.trans(k_rope), scores) * scale
        seen = inside[None, :] & (token[None, :] < visible[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        raised = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(raised == float("-inf"), 0.0, raised)
        kept = tl.exp2(highest - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * kept + tl.sum(weights, 1)
        sums = tl.dot(weights.to(k_latent.dtype), k_latent, sums * kept[:, None])
        highest = raised

    sums = sums / tl.where(total > 0.0, total, 1.0)[:, None]
    if SINGLE:
        target = out + (request * rows + row)[:, None] * 512 + latent[None, :]
        tl.store(target, sums.to(out.dtype.element_ty), mask=exists[:, None])
    else:
        place = (request * splits + split) * rows + row
        tl.store(partial_out + place[:, None] * 512 + latent[None, :], sums, mask=exists[:, None])
        tl.store(partial_lse + place, highest + tl.log2(total), mask=exists)


def _merge(out, partial_out, partial_lse, splits):  # type: ignore[no-untyped-def]
    request = tl.program_id(0)
    row = tl.program_id(1)
    rows = tl.num_programs(1)
    column = tl.arange(0, 512)
    highest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    sums = tl.zeros([512], tl.float32)
    for split in range(splits):
        place = (request * splits + split) * rows + row
        lse = tl.load(partial_lse + place)
        raised = tl.maximum(highest, lse)
        base = tl.where(raised == float("-inf"), 0.0, raised)
        kept = tl.exp2(highest - base)
        weight = tl.exp2(lse - base)
        sums = sums * kept + tl.load(partial_out + place * 512 + column) * weight
        total = total * kept + weight
        highest = raised
    sums = sums / tl.where(total > 0.0, total, 1.0)
    target = out + (request * rows + row) * 512 + column
    tl.store(target, sums.to(out.dtype.element_ty))


# Compiled once for tiles and dtypes, not again for a number that happens to be 1 or even.
_ANY = ("q_len", "heads", "table_stride", "splits")
ATTEND = triton.jit(do_not_specialize=_ANY)(_attend)
"""The kernel that attends."""
_MERGE = triton.jit(do_not_specialize=("splits",))(_merge)


def tile_options(rows: int) -> dict[str, int]:
    """Choose tiles and warps for the query rows of a request.

    They keep the kernel within the registers of 16 rows, and close to it with 64; shared memory is
    95 kB and 148 kB.
    """
    if rows <= 16:
        return {"TILE_ROWS": 16, "TILE_TOKENS": 64, "num_warps": 8, "num_stages": 3}
    return {"TILE_ROWS": 64, "TILE_TOKENS": 32, "num_warps": 8, "num_stages": 2}


def prepare(
    q: Any,
    kv_cache: Any,
    block_table: Any,
    kv_lens: Any,
    out: Any,
    *,
    softmax_scale: float,
    longest: int,
    sm_count: int,
) -> Callable[[], object]:
    """Make a call that attends, causally, to a cache of one kv head in pages of 64 tokens.

    Tensors are contiguous, as `cumla.mla_decode` has them. `longest` is the largest length, and as
    many shares of the tokens are made as fill `sm_count` multiprocessors.
    """
    torch = import_module("torch")
    batch, q_len, heads, _ = q.shape
    rows = q_len * heads
    options = tile_options(rows)
    tiles = -(-rows // options["TILE_ROWS"])
    splits = max(1, min(sm_count // (batch * tiles), longest // _FEWEST_TOKENS))
    single = splits == 1
    shape = (1,) if single else (batch, splits, rows, 512)
    partial_out = q.new_empty(shape, dtype=torch.float32)
    partial_lse = q.new_empty(shape[:3], dtype=torch.float32)
    scale = softmax_scale * 1.4426950408889634  # scores in powers of 2

    def decode() -> None:
        ATTEND[batch, tiles, splits](
            *(q, kv_cache, block_table, kv_lens, out, partial_out, partial_lse),
            *(scale, q_len, heads, block_table.stride(0), splits),
            SINGLE=single,
            **options,
        )
        if not single:
            _MERGE[batch, rows](out, partial_out, partial_lse, splits)

    return decode
