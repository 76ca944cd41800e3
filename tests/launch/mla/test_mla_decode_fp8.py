# SPDX-License-Identifier: Apache-2.0
"""The paths of mla_decode_fp8's numbers through shared memory and fragments, in a model of a block.

The model moves bytes as the kernel's threads do: copies into a slot of the ring, of rows or by the
copy engine, fragments of K and V, the query's columns, accumulators, pieces and output. Products
are those of the manual's fragment layouts. What comes out must be attention over the dequantised
block.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cumla.core.arrays import ArrayView
from cumla.launch import KernelSpec
from cumla.launch.mla import mla_decode_fp8
from cumla.launch.mla.mla_decode import DecodeArguments
from cumla.launch.mla.mla_decode_fp8 import (
    SPECS,
    decode_fp8_launch,
    fp8_spec,
    fp8_specs,
    how_it_lies,
)
from cumla.launch.mla.shape import MLAAttentionKey, MLADecodeKey
from cumla.mla.shape import WIDE, WIDTHS
from tests.launch.kernel_text import modelled
from tests.launch.structs import compile_checks, parameters

Array = NDArray[Any]

TOKENS, LATENT, ROPE, TILE = 64, 512, 64, 8192
PACKED = 656  # bytes of a row: latent columns, scales from 512 on, RoPE columns from 528 on
E4M3 = ml_dtypes.float8_e4m3fn
KV_SCALE = 0.37


# --- shared memory -------------------------------------------------------------------------------


def token_at(place: int) -> int:
    return (place & ~7) | (place & 1) << 2 | (place >> 1 & 3)


class Layout(NamedTuple):
    """How a block lies in a slot: tiles of 128 bytes a row, or packed rows (Fp8Layout)."""

    whole: bool
    tiles: int = 8  # of 64 latent columns

    @property
    def row_bytes(self) -> int:
        return PACKED if self.whole else 128

    @property
    def rope(self) -> int:
        return 528 if self.whole else self.tiles // 2 * TILE

    @property
    def slot_bytes(self) -> int:
        return TOKENS * PACKED if self.whole else self.rope + TILE

    def chunk_of(self, token: int, chunk: int) -> int:
        return token * self.row_bytes + (chunk * 16 if self.whole else (chunk ^ token & 7) << 4)

    def chunk_of_tile(self, chunk: int, tile: int) -> int:
        if self.whole:
            return chunk + tile * 64
        return (chunk ^ (tile & 1) << 6) + (tile >> 1) * TILE


TILES, WHOLE, NARROW = Layout(False), Layout(True), Layout(False, 4)


def copy_rows(
    columns: Array, begin: int, slot: Array, tiles: list[int], wrote: Array
) -> list[list[int]]:
    """Copy 128 bytes of 64 rows into each tile as two warps do (RowCopier::copy)."""
    instructions = []
    for warp in range(2):
        for i in range(8):
            for k, tile in enumerate(tiles):
                places = []
                for lane in range(32):
                    chunk, row = lane % 8, warp * 32 + 4 * i + lane // 8
                    source = begin + chunk * 16 + k * 128
                    to = tile + row * 128 + ((chunk ^ (row & 7)) << 4)
                    assert not wrote[to : to + 16].any()
                    wrote[to : to + 16] = True
                    slot[to : to + 16] = columns[row, source : source + 16]
                    places.append(to)
                instructions.append(places)
    return instructions


def load_latent(cache: Array, slot: Array) -> list[list[int]]:
    """Copy (64, columns) bytes as load_kv_fp8's two warps do; where each instruction writes."""
    columns = cache.shape[1]
    wrote = np.zeros(columns // 128 * TILE, bool)
    instructions = []
    for half in range(columns // 256):
        tiles = [half * 2 * TILE, (half * 2 + 1) * TILE]
        instructions += copy_rows(cache, half * 2 * 128, slot, tiles, wrote)
    assert wrote.all()
    return instructions


def load_rope_16(cache: Array, tile: Array) -> list[list[int]]:
    """Copy (64, 64) numbers of 16 bits in the same way."""
    return copy_rows(cache.view(np.uint8), 0, tile, [0], np.zeros(TILE, bool))


def load_rope_raw(cache: Array, tile: Array) -> list[list[int]]:
    """Copy (64, 64) bytes as copy_half_tile's two warps do."""
    instructions = []
    wrote = np.zeros(TILE, bool)
    for warp in range(2):
        for i in range(4):
            places = []
            for lane in range(32):
                row, chunk = warp * 32 + token_at(8 * i + lane // 4), lane % 4
                to = TILES.chunk_of(row, chunk)
                assert not wrote[to : to + 16].any()
                wrote[to : to + 16] = True
                tile[to : to + 16] = cache[row, chunk * 16 : chunk * 16 + 16]
                places.append(to)
            instructions.append(places)
    assert wrote.sum() == TOKENS * ROPE
    return instructions


def swizzled_128(place: int) -> int:
    """Return where the copy engine's 128-byte swizzle puts a byte: bits 4 to 6 xor bits 7 to 9."""
    return place ^ (place >> 7 & 7) << 4


def load_box(rows: Array, slot: Array, at: int) -> None:
    """Copy rows of up to 128 bytes as the copy engine does.

    It swizzles addresses, not offsets, and has zeros where the array has no columns.
    """
    box = np.zeros((TOKENS, 128), np.uint8)
    box[:, : rows.shape[1]] = rows
    for place, value in enumerate(box.reshape(-1), start=at):
        slot[swizzled_128(place)] = value


def load_boxes(cache: Array, slot: Array) -> None:
    """Copy (64, columns) bytes as load_kv_fp8_pages has the copy engine do it."""
    for k in range(cache.shape[1] // 128):
        load_box(cache[:, k * 128 : k * 128 + 128], slot, k * TILE)


def clear_past(slot: Array, scales: Array, valid: int, layout: Layout) -> None:
    """Clear the tokens past the end as a consumer's 128 threads do."""
    next_scales = PACKED if layout.whole else 16
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        own = token_at(warp * 16 + lane // 4)
        for eight in range(2):
            if own + 8 * eight < valid:
                continue
            for k in range(layout.tiles):
                at = layout.chunk_of_tile(layout.chunk_of(own, lane % 4), k)
                at += eight * 8 * layout.row_bytes
                slot[at : at + 16] = 0
            if lane % 4 == 0:
                at = (own + 8 * eight) * next_scales
                scales[at : at + 16] = 0


def conflict_free(places: list[int]) -> bool:
    """Return whether each eight lanes' 16 bytes lie in different banks."""
    groups = np.array(places).reshape(-1, 8) // 16 % 8
    return all(len(set(group)) == 8 for group in groups.tolist())


def load_query(q: Array, rows: int, rope_is_fp8: bool) -> tuple[Array, Array]:
    """Write (rows, columns) of bfloat16 as load_query_fp8 does: bytes of tiles, divisors."""
    count = q.shape[1] // 64
    tiles = np.zeros((count, rows * 128), np.uint8)
    divisors = np.zeros(rows, np.float32)
    words = q.view(np.uint32).reshape(rows, count, 32)
    for row in range(rows):
        seen = q[row] if rope_is_fp8 else q[row, :-64]
        highest = int((seen.view(np.uint16) & 0x7FFF).max()) << 16
        exponent = max(highest >> 23, 16)
        factor = np.uint32((127 + 14 + 127 - exponent) << 23).view(np.float32)
        divisors[row] = np.uint32((exponent - 14) << 23).view(np.float32)
        for k in range(count):
            for chunk in range(8):
                for j in range(4):
                    word = words[row, k, chunk * 4 + j : chunk * 4 + j + 1]
                    if k < count - 1 or rope_is_fp8:
                        u = chunk % 2 * 4 + j
                        to = row * 128 + ((u ^ (row & 7)) << 4) + chunk // 2 * 4
                        pair = word.view(ml_dtypes.bfloat16).astype(np.float32) * factor
                        word = pair.astype(np.float16).view(np.uint32)
                    else:
                        to = row * 128 + ((chunk ^ (row & 7)) << 4) + j * 4
                    tiles[k, to : to + 4] = word.view(np.uint8)
    return tiles, divisors


def rows_of_tile(tile: Array, dtype: Any) -> Array:
    """A tile as a product sees it: rows of 128 bytes whose chunks are swizzled."""
    rows = len(tile) // 128
    chunks = tile.reshape(rows, 8, 16)
    straight = [chunks[row, np.arange(8) ^ (row & 7)] for row in range(rows)]
    return np.stack(straight).reshape(rows, 128).view(dtype).astype(np.float64)


# --- fragments -----------------------------------------------------------------------------------


def fragment_a(registers: Array) -> Array:
    """A (64, 16) of the four registers, (128 threads, 4, 2 numbers), that hold it."""
    a = np.full((64, 16), np.nan)
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for i in range(4):
            row = 16 * warp + lane // 4 + 8 * (i % 2)
            column = 2 * (lane % 4) + 8 * (i // 2)
            a[row, column : column + 2] = registers[thread, i]
    return a


def expand_halves(word: Array) -> tuple[Array, Array]:
    numbers = word.view(E4M3).astype(np.float64)
    return numbers[:2], numbers[2:]


def key_steps(slot: Array, tile: int, layout: Layout) -> tuple[list[Array], list[list[int]]]:
    """Four fragments of K (64, 16) from the bytes of 64 columns: KeyTile::load and expand."""
    registers = np.zeros((4, 128, 4, 2))
    places: list[list[int]] = [[], []]
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        own = layout.chunk_of(token_at(warp * 16 + lane // 4), lane % 4)
        at = layout.chunk_of_tile(own, tile)
        behind = at + 8 * layout.row_bytes
        low, high = slot[at : at + 16].reshape(4, 4), slot[behind : behind + 16].reshape(4, 4)
        places[0].append(at)
        places[1].append(behind)
        for k in range(4):
            registers[k, thread, 0], registers[k, thread, 2] = expand_halves(low[k].copy())
            registers[k, thread, 1], registers[k, thread, 3] = expand_halves(high[k].copy())
    return [fragment_a(registers[k]) for k in range(4)], places


def value_steps(slot: Array, tile: int, layout: Layout) -> tuple[list[Array], list[list[int]]]:
    """Four fragments of V^T (64 columns, 16 tokens): ldmatrix .trans, and expand_values."""
    registers = np.zeros((4, 128, 4, 2))
    instructions = []
    for warp in range(4):
        for half in range(2):
            rows_of_half = half * 32 * layout.row_bytes
            places = [
                layout.chunk_of_tile(layout.chunk_of(token_at(lane), warp), tile) + rows_of_half
                for lane in range(32)
            ]
            instructions.append(places)
            units = np.stack([slot[at : at + 16].view(np.uint16) for at in places])  # (32 rows, 8)
            for lane in range(32):
                for i in range(4):
                    rows = units[8 * i + 2 * (lane % 4) : 8 * i + 2 * (lane % 4) + 2, lane // 4]
                    word = np.ascontiguousarray(rows).view(np.uint8)
                    even, odd = expand_halves(word[[0, 2, 1, 3]])
                    thread, k = warp * 32 + lane, 2 * half + i // 2
                    registers[k, thread, i % 2 * 2] = even
                    registers[k, thread, i % 2 * 2 + 1] = odd
    # a[2 i], a[2 i + 1] of word i; of a product four registers
    return [fragment_a(registers[k]) for k in range(4)], instructions


def rope_steps(columns: Array, layout: Layout) -> tuple[list[Array], list[list[int]]]:
    """Four fragments (64, 16) of bfloat16 columns, from where the first row has them: ldmatrix."""
    registers = np.zeros((4, 128, 4, 2))
    instructions = []
    for warp in range(4):
        for k in range(4):
            places = [
                layout.chunk_of(token_at(warp * 16 + lane % 16), 2 * k + lane // 16)
                for lane in range(32)
            ]
            instructions.append(places)
            rows = np.stack([columns[at : at + 16].view(ml_dtypes.bfloat16) for at in places])
            for lane in range(32):
                for i in range(4):
                    pair = rows[8 * i + lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2]
                    registers[k, warp * 32 + lane, i] = pair
    return [fragment_a(registers[k]) for k in range(4)], instructions


# --- a block -------------------------------------------------------------------------------------


def accumulators(d: Array) -> Array:
    """Return what each of 128 threads holds of a product (64, columns): (128, columns / 2)."""
    held = np.zeros((128, d.shape[1] // 2))
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for i in range(held.shape[1]):
            row = 16 * warp + lane // 4 + 8 * (i % 4 // 2)
            held[thread, i] = d[row, 8 * (i // 4) + 2 * (lane % 4) + i % 2]
    return held


def store_probabilities(p: Array, rows: int) -> Array:
    """The bytes of P^T, of what the threads hold of it."""
    tile = np.zeros(rows * 128, np.uint8)
    for warp in range(4):
        for first in range(0, 2 * (rows // 4), 8):
            for lane in range(32):  # whose address is that of a row of matrix lane / 8
                tokens = 2 * warp + lane // 8 % 2
                row = lane // 16 * 8 + lane % 8
                to = row * 128 + ((tokens ^ (row & 7)) << 4) + first // 8 * 16 * 128
                # row lane % 8 of the transposed matrix: of each of eight lanes of one quad's place
                column = lane % 8
                holders = [warp * 32 + 4 * unit + column // 2 for unit in range(8)]
                value = first + 2 * (lane // 8) + column % 2
                tile[to : to + 16] = p[holders, value].astype(np.float16).view(np.uint8)
    return tile


def filled_slot(latent: Array, rope: Array, scales: Array | None, layout: Layout) -> Array:
    """A slot with the latent and RoPE columns of a block; of packed rows with all they hold."""
    if layout.whole:
        assert scales is not None
        return packed_rows(latent, rope, scales).reshape(-1)
    slot = np.full(layout.slot_bytes, 0x7F, np.uint8)
    load_latent(latent, slot)
    (load_rope_raw if rope.dtype == np.uint8 else load_rope_16)(rope, slot[layout.rope :])
    return slot


class Block:
    """A block of 64 tokens as one consumer computes it, and what a segment of it alone leaves."""

    def __init__(
        self,
        latent: Array,
        rope: Array,
        scales: Array | None,
        kv_scale: float,
        q: Array,
        rows: int,
        consumer: int,
        layout: Layout = TILES,
    ) -> None:
        slot = filled_slot(latent, rope, scales, layout)
        if layout.whole:
            scales = slot.reshape(TOKENS, PACKED)[:, 512:528].copy().view(np.float32)
        rope_is_fp8 = rope.dtype == np.uint8
        query, divisors = load_query(q, rows, rope_is_fp8)
        columns = q.shape[1]
        factors = divisors * np.float32(columns**-0.5 * np.log2(np.e))  # as stored
        self.layout = layout
        lanes = np.arange(128)
        tokens = np.array([token_at(t // 32 * 16 + t % 32 // 4) for t in range(128)])
        own = np.arange(rows // 2)
        held_rows = (own // 4 * 8 + own % 2)[None] + 2 * (lanes % 4)[:, None]
        low = own[None] % 4 < 2

        def of_tokens(factors: Array) -> Array:
            return np.where(low, factors[tokens][:, None], factors[tokens + 8][:, None])

        scores = np.zeros((128, rows // 2))
        if rope_is_fp8:
            raw = self.keys(slot[layout.rope :], 0, query[-1])
            scores += accumulators(raw) * kv_scale * factors[held_rows]
        else:
            keys = np.hstack(rope_steps(slot[layout.rope :], layout)[0])
            raw = accumulators(keys @ rows_of_tile(query[8], ml_dtypes.bfloat16).T)
            scores += raw * 576**-0.5 * np.log2(np.e)
        for group in range(layout.tiles // 2):
            pair = (2 * group, 2 * group + 1)
            d = accumulators(sum(self.keys(slot, k, query[k]) for k in pair))
            scale = kv_scale if scales is None else of_tokens(scales[:, group])
            scores += d * factors[held_rows] * scale
        self.scores = scores

        maximum = np.full(rows, -np.inf)
        np.maximum.at(maximum, held_rows, scores)
        self.reference = maximum - 7
        p = np.exp2(scores - self.reference[held_rows])
        self.sum = np.zeros(rows)
        np.add.at(self.sum, held_rows, p)

        self.output = []
        self.consumer, self.rows = consumer, rows
        self.half = layout.tiles // 2
        for d in range(layout.tiles):
            tile = d ^ consumer * self.half
            steps, _ = value_steps(slot, tile, layout)
            weighed, factor = p, np.ones(rows)
            if scales is not None:
                weighed = p * of_tokens(scales[:, tile // 2])
                highest = np.zeros(rows)
                np.maximum.at(highest, held_rows, weighed)
                factor = np.exp2(7 - np.ceil(np.log2(highest)))
            stored = rows_of_tile(
                store_probabilities(weighed * factor[held_rows], rows), np.dtype(np.float16)
            )
            product = sum(steps[k] @ stored[:, 16 * k : 16 * k + 16].T for k in range(4))
            normal = (kv_scale if scales is None else 1.0) / (self.sum * factor)[held_rows]
            self.output.append(accumulators(product) * normal)

    def keys(self, slot: Array, tile: int, query: Array) -> Array:
        steps, _ = key_steps(slot, tile, self.layout)
        columns = rows_of_tile(query, np.float16)
        return sum(steps[k] @ columns[:, 16 * k : 16 * k + 16].T for k in range(4))  # type: ignore

    def written(self) -> Array:
        """This consumer's half of the output, as write_rows stores 16-bit numbers."""
        out = np.full((self.rows, 64 * self.half), np.nan)
        for thread in range(128):
            warp, lane = divmod(thread, 32)
            odd = lane // 4 % 2
            for i in range(self.rows // 8):
                row = 8 * i + 2 * (lane % 4) + odd
                for d in range(self.half):
                    v = self.output[d][:, 4 * i : 4 * i + 4]
                    first, second = v[thread, [0, 2]], v[thread, [1, 3]]
                    theirs = v[thread ^ 4]
                    received = theirs[[1, 3]] if odd else theirs[[0, 2]]
                    four = (received, second) if odd else (first, received)
                    column = warp * 16 + lane // 4 * 2 - 2 * odd + d * 64
                    assert np.isnan(out[row, column : column + 4]).all()
                    out[row, column : column + 4] = np.concatenate(four)
        return out

    def written_as_float(self) -> Array:
        """The same as write_rows stores it in float32."""
        out = np.full((self.rows, 64 * self.half), np.nan)
        for thread in range(128):
            warp, lane = divmod(thread, 32)
            column = warp * 16 + lane // 4 * 2
            for i in range(self.rows // 8):
                for j in range(2):
                    for d in range(self.half):
                        v = self.output[d][thread]
                        row = 8 * i + 2 * (lane % 4) + j
                        out[row, d * 64 + column : d * 64 + column + 2] = v[
                            [4 * i + j, 4 * i + j + 2]
                        ]
        return out

    def piece(self) -> Array:
        """The same as write_piece leaves it, in bytes: (row groups, units x 3 x 32 lanes, 16)."""
        if self.half == 2:
            return self.piece_of_pairs()
        piece = np.full((self.rows // 16, 8 * 3 * 32, 16), 255, np.uint8)
        for thread in range(128):
            warp, lane = divmod(thread, 32)
            pair, row = lane // 4, 2 * (lane % 4)
            for group in range(self.rows // 16):
                to = (2 * warp + pair // 4) * 3 * 32 + row * 4 + pair % 4
                for j in range(2):
                    of_row = [group * 8 + j + k for k in (0, 2, 4, 6)]
                    v = np.array([self.output[d][thread, of_row] for d in range(4)], np.float32)
                    store_short_unit(piece[group], to + j * 4, v)
        return piece

    def piece_of_pairs(self) -> Array:
        """The same of two tiles: lanes 16 apart exchange halves of units."""
        piece = np.full((self.rows // 16, 4 * 3 * 32, 16), 255, np.uint8)
        for thread in range(128):
            warp, lane = divmod(thread, 32)
            pair, eight = lane // 4, lane // 16
            for group in range(self.rows // 16):
                of_row = [group * 8 + eight + k for k in (0, 2, 4, 6)]
                both = [thread & ~16, thread | 16]  # who has the lower eight columns, and the upper
                v = [self.output[d][one, of_row] for d in range(2) for one in both]
                to = warp * 3 * 32 + (2 * (lane % 4) + eight) * 4 + pair % 4
                store_short_unit(piece[group], to, np.array(v, np.float32))
        return piece


def store_short_unit(piece: Array, to: int, v: Array) -> None:
    """Write four times eight columns of a lane, (4, 4), in three lines."""
    first, second, third, last = v.view(np.uint8).reshape(4, 4, 4)
    for i, number in enumerate((first, second, third)):
        assert (piece[to + 32 * i] == 255).all()
        number[:, 0] = last[:, i + 1]
        piece[to + 32 * i] = number.reshape(16)


def rows_of_piece(piece: Array) -> Array:
    """What the joining CTAs take a piece for (split/join.cuh): (rows, half of the columns)."""
    count = piece.shape[1] // 96  # of units; of 4 those are of pairs of eights
    rows = np.zeros((len(piece), 2, 8, 4 * count, 4, 2))  # eight rows, row, eights, pair
    for group, units in enumerate(piece.reshape(-1, count, 3, 8, 4, 4, 4)):
        # The lowest byte is lost; it may be any.
        last = np.concatenate([units[:, :1, ..., 0], units[..., 0]], axis=1)
        numbers = np.concatenate([units, np.moveaxis(last, 1, -1)[:, None]], axis=1)
        for unit, d, row, pair in itertools.product(range(count), range(4), range(8), range(4)):
            v = np.ascontiguousarray(numbers[unit, d, row, pair]).view(np.float32).reshape(2, 2)
            eights = 8 * d + unit if count == 8 else d // 2 * 8 + 2 * unit + d % 2
            rows[group, :, row, eights, pair] = v
    return rows.reshape(len(piece) * 16, 32 * count)


def attention(k: Array, q: Array) -> tuple[Array, Array]:
    scores = q.astype(np.float64) @ k.T * q.shape[1] ** -0.5
    weights = np.exp(scores - scores.max(1, keepdims=True))
    total = weights.sum(1, keepdims=True)
    return weights / total @ k[:, :-64], np.log(total[:, 0]) + scores.max(1)


def packed_rows(latent: Array, rope: Array, scales: Array) -> Array:
    """A block of packed rows, which the copy engine brings as it lies: (64, 656) bytes."""
    parts = latent, scales.astype(np.float32).view(np.uint8), rope.view(np.uint8)
    return np.concatenate(parts, axis=1)


FORMS = ("e4m3", "bfloat16 rope", "scales", "scales and e4m3 rope")


def cache_of(form: str, rng: np.random.Generator) -> tuple[Array, Array, Array | None, Array]:
    """A block of the cache: latent bytes, RoPE, scales or None, and all its values."""
    latent = rng.standard_normal((TOKENS, LATENT)).astype(E4M3)
    latent.reshape(-1)[:256] = (
        np.delete(np.arange(256), [0x7F, 0xFF])[np.arange(256) % 254].astype(np.uint8).view(E4M3)
    )
    rope = rng.standard_normal((TOKENS, ROPE)).astype(np.float32)
    scales = np.exp(rng.uniform(-9, 0, (TOKENS, 4))) if form.startswith("scales") else None
    factors = np.full((TOKENS, 4), KV_SCALE) if scales is None else scales
    values = np.zeros((TOKENS, 576))
    values[:, :LATENT] = latent.astype(np.float64) * factors.repeat(128, axis=1)
    if form in ("bfloat16 rope", "scales"):
        stored = rope.astype(ml_dtypes.bfloat16)
        values[:, LATENT:] = stored.astype(np.float64)
        return latent.view(np.uint8), stored, scales, values
    bits = rope.astype(E4M3)
    values[:, LATENT:] = bits.astype(np.float64) * KV_SCALE
    return latent.view(np.uint8), bits.view(np.uint8), scales, values


@pytest.mark.parametrize(
    ("form", "rows", "consumer"),
    [(form, 16 << i, (n + i) % 2) for n, form in enumerate(FORMS) for i in (0, 1)],
)
def test_a_block_through_shared_memory(form: str, rows: int, consumer: int) -> None:
    """Rows of the query as small and as large as their exponents go, and all that e4m3 has."""
    rng = np.random.default_rng([len(form), rows, consumer])
    latent, rope, scales, values = cache_of(form, rng)
    q = (rng.standard_normal((rows, 576)) * np.exp2(-rng.integers(0, 20, (rows, 1)))).astype(
        ml_dtypes.bfloat16
    )
    hold_against(attention(values, q), Block(latent, rope, scales, KV_SCALE, q, rows, consumer))


@pytest.mark.parametrize("rope", [32, 64])
@pytest.mark.parametrize(("rows", "consumer"), [(16, 0), (16, 1), (32, 0), (32, 1)])
def test_a_block_of_256_latent_columns(rows: int, consumer: int, rope: int) -> None:
    """RoPE columns that do not exist are zeros."""
    rng = np.random.default_rng([rows, consumer, rope])
    bits = rng.standard_normal((TOKENS, 320)).astype(E4M3)
    q = rng.standard_normal((rows, 320)).astype(ml_dtypes.bfloat16)
    bits[:, 256 + rope :] = 0
    q[:, 256 + rope :] = 0
    latent, of_rope = np.ascontiguousarray(bits[:, :256]), np.ascontiguousarray(bits[:, 256:])
    parts = latent.view(np.uint8), of_rope.view(np.uint8), None
    block = Block(*parts, KV_SCALE, q, rows, consumer, NARROW)
    hold_against(attention(bits.astype(np.float64) * KV_SCALE, q), block)


@pytest.mark.parametrize("consumer", [0, 1])
def test_a_block_of_packed_rows(consumer: int) -> None:
    """Each thread has the scores of the same numbers in tiles, and their output."""
    rng = np.random.default_rng(consumer)
    latent, rope, scales, values = cache_of("scales", rng)
    assert scales is not None
    scales = scales.astype(np.float32)
    q = rng.standard_normal((16, 576)).astype(ml_dtypes.bfloat16)
    block, tiled = (
        Block(latent, rope, scales, KV_SCALE, q, 16, consumer, layout) for layout in (WHOLE, TILES)
    )
    hold_against(attention(values, q), block)
    np.testing.assert_array_equal(block.scores, tiled.scores)
    np.testing.assert_array_equal(block.written(), tiled.written())


def hold_against(expected: tuple[Array, Array], block: Block) -> None:
    """Compare a consumer's half of the output, however it is stored, and the log-sum-exp."""
    (out, lse), consumer = expected, block.consumer
    columns = out.shape[1] // 2
    half = out[:, consumer * columns : (consumer + 1) * columns]
    piece = rows_of_piece(block.piece())
    # What is left of a zero the kernel flushes.
    np.testing.assert_allclose(piece, block.written_as_float(), rtol=2.0**-15, atol=1e-42)
    for got in (block.written(), block.written_as_float(), piece):
        errors = np.linalg.norm(got - half, axis=1) / np.linalg.norm(half, axis=1)
        assert errors.max() <= 5e-4  # of float16 probabilities
    got_lse = (block.reference + np.log2(block.sum)) * np.log(2)
    np.testing.assert_allclose(got_lse, lse, rtol=0, atol=1e-4)


def test_every_number_is_one_of_float16() -> None:
    numbers = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float64)
    halves = numbers.astype(np.float16).astype(np.float64)
    np.testing.assert_array_equal(halves, numbers)
    assert np.nanmin(np.abs(halves[halves != 0])) >= 2.0**-14  # a normal one


def fragment_loads(slot: Array, layout: Layout) -> list[list[int]]:
    """Return where each instruction that loads fragments of a block reads."""
    instructions = []
    for tile in range(layout.tiles):
        keys = key_steps(slot, tile, layout)[1]
        instructions += [at[32 * w : 32 * w + 32] for at in keys for w in range(4)]
        instructions += value_steps(slot, tile, layout)[1]
    return instructions + rope_steps(slot[layout.rope :], layout)[1]


@pytest.mark.parametrize("layout", [TILES, WHOLE, NARROW], ids=["tiles", "packed", "narrow"])
def test_no_two_lanes_meet_in_a_bank(layout: Layout) -> None:
    """Of the eight lanes whose 16 bytes a load or ldmatrix moves at once."""
    instructions = fragment_loads(np.zeros(layout.slot_bytes, np.uint8), layout)
    assert len(instructions) == layout.tiles * (8 + 8) + 16
    assert all(conflict_free(places) for places in instructions)
    in_order = [layout.chunk_of(lane // 4, lane % 4) for lane in range(8)]
    assert not conflict_free(in_order)  # why neighbours in a fragment are four tokens apart


def test_no_two_lanes_that_copy_meet_in_a_bank() -> None:
    slot = np.zeros(TILES.slot_bytes, np.uint8)
    cache = np.zeros((TOKENS, LATENT), np.uint8)
    instructions = load_latent(cache, slot)
    instructions += load_rope_16(cache[:, : 2 * ROPE], slot[TILES.rope :])
    instructions += load_rope_raw(cache[:, :ROPE], slot[TILES.rope :])
    assert len(instructions) == 64 + 16 + 8
    assert all(conflict_free(places) for places in instructions)
    assert not conflict_free([128 * row for row in range(8)])


@pytest.mark.parametrize("next_scales", [16, PACKED])
def test_scales_of_eight_tokens_lie_in_different_banks(next_scales: int) -> None:
    """Four bytes each, which four lanes read."""
    banks = {token_at(place) * next_scales // 4 % 32 for place in range(8)}
    assert len(banks) == 8


def test_the_copy_engine_swizzles_as_the_consumers_read() -> None:
    """Its 128-byte swizzle is that of chunk_of, of tiles that begin where its pattern does."""
    places = [[row * 128 + chunk * 16 for chunk in range(8)] for row in range(TOKENS)]
    for row in range(TOKENS):
        for chunk in range(8):
            at = TILES.chunk_of(row, chunk)
            assert swizzled_128(places[row][chunk]) == at
            assert swizzled_128(TILE + places[row][chunk]) == TILE + at
            if chunk < 4:  # of the first 64 columns; the same one of the others
                for tile in range(8):
                    place = tile // 2 * TILE + places[row][chunk + tile % 2 * 4]
                    assert TILES.chunk_of_tile(at, tile) == swizzled_128(place)
    assert any(swizzled_128(place) != place for row in places for place in row)


def test_both_forms_of_loading_fill_a_slot_alike() -> None:
    rng = np.random.default_rng(4)
    cache = rng.integers(0, 256, (TOKENS, LATENT), np.uint8)
    by_rows, by_boxes = (np.full(4 * TILE, 0x7F, np.uint8) for _ in range(2))
    load_latent(cache, by_rows)
    load_boxes(cache, by_boxes)
    np.testing.assert_array_equal(by_boxes, by_rows)
    for rope, load in ((cache[:, :ROPE], load_rope_raw), (cache[:, : 2 * ROPE], load_rope_16)):
        rope_by_rows, rope_by_boxes = np.zeros(TILE, np.uint8), np.full(TILE, 0x7F, np.uint8)
        load(rope, rope_by_rows)
        load_box(rope, rope_by_boxes, 0)
        np.testing.assert_array_equal(rope_by_boxes, rope_by_rows)


PAST_THE_END = pytest.mark.parametrize("valid", [1, 2, 31, 32, 33, 63])


@PAST_THE_END
def test_tokens_past_the_end_are_cleared_and_no_others(valid: int) -> None:
    """Whole pages bring what lies behind the end, NaN too; rows copied one by one bring zeros."""
    cache = np.full((TOKENS, LATENT), 0x7F, np.uint8)
    cache[:valid] = np.random.default_rng(valid).integers(1, 127, (valid, LATENT), np.uint8)
    scales = np.full((TOKENS, 4), np.nan, np.float32)
    scales[:valid] = 2.0
    slot, wanted = np.zeros(4 * TILE, np.uint8), np.zeros(4 * TILE, np.uint8)
    load_boxes(cache, slot)
    clear_past(slot, scales.view(np.uint8).reshape(-1), valid, TILES)
    load_latent(np.where(np.arange(TOKENS)[:, None] < valid, cache, 0).astype(np.uint8), wanted)
    np.testing.assert_array_equal(slot, wanted)
    assert (scales[:valid] == 2).all()
    assert (scales[valid:] == 0).all()


@PAST_THE_END
def test_packed_rows_past_the_end_are_cleared_and_no_others(valid: int) -> None:
    """But for RoPE columns: of those nothing is left once scores are masked."""
    rows = np.full((TOKENS, PACKED), 0x7F, np.uint8)
    wanted = rows.copy()
    wanted[valid:, :528] = 0
    slot = rows.reshape(-1)
    clear_past(slot, slot[512:], valid, WHOLE)
    np.testing.assert_array_equal(rows, wanted)


def test_a_query_of_any_size_keeps_its_bits() -> None:
    """What is divided by a power of two and made float16 comes back, from 2**-110 to 2**127."""
    rng = np.random.default_rng(3)
    for size in (-110, -60, 0, 60, 126):
        q = (rng.uniform(1, 2, (16, 576)) * 2.0**size * np.exp2(-rng.integers(0, 30, 576))).astype(
            ml_dtypes.bfloat16
        )
        tiles, divisors = load_query(q, 16, rope_is_fp8=True)
        halves = np.stack([rows_of_tile(tile, np.float16) for tile in tiles])
        assert np.abs(halves).max() < 2.0**15
        back = np.sort(halves * divisors[:, None].astype(np.float64), axis=2)
        wanted = np.sort(q.astype(np.float64).reshape(16, 9, 64).swapaxes(0, 1), axis=2)
        assert (back == wanted).all()


# --- references ------------------------------------------------------------------------------


LOWEST, BELOW, SLACK, LEAST = -3e38, 7.0, 15.0, -100.0


class Stream:
    """A query row over many blocks, as weigh and raise_references treat it, in float32."""

    def __init__(self) -> None:
        self.reference = np.float32(LOWEST)
        self.group_reference, self.factor = np.float32(LOWEST), np.float32(1)
        self.sum, self.output = np.float32(0), 0.0
        self.raised = 0

    def add(self, scores: Array, scales: Array, values: Array) -> None:
        for again in (False, True):
            p = np.exp2(scores - self.reference)
            stored = (p * scales * self.factor).astype(np.float16)
            if again or not (np.isinf(stored).any() or (p > np.float32(1e15)).any()):
                break
            self.raise_references(scores, scales)
            self.raised += 1
        assert np.isfinite(stored).all()
        self.sum += p.sum(dtype=np.float32)
        self.output += float(stored.astype(np.float64) @ values)

    def raise_references(self, scores: Array, scales: Array) -> None:
        before, self.reference = self.reference, self.above(self.reference, scores.max())
        self.sum *= np.exp2(before - self.reference)
        with np.errstate(divide="ignore"):
            highest = np.log2((np.exp2(scores - self.reference) * scales).max())
        before = self.group_reference
        raised = self.above(before, self.reference + highest)
        self.group_reference = max(raised, self.reference + np.float32(LEAST))
        self.output *= float(np.exp2(before - self.group_reference))
        self.factor = np.exp2(self.reference - self.group_reference)

    @staticmethod
    def above(reference: Any, highest: Any) -> Any:
        if highest > reference + np.float32(SLACK):
            return np.float32(np.ceil(highest) - BELOW)
        return reference

    def result(self) -> float:
        if self.sum == 0:
            return 0.0
        return self.output * 2.0 ** float(self.group_reference - self.reference) / float(self.sum)


@np.errstate(over="ignore", under="ignore", invalid="ignore")
@pytest.mark.parametrize("spread", [0.0, 10.0, 300.0])
@pytest.mark.parametrize("octaves", [0, 30, 90])
def test_probabilities_times_scales_keep_their_bits(spread: float, octaves: int) -> None:
    """Whatever the scores and scales, even where the tokens that count have the lowest scales."""
    rng = np.random.default_rng([int(spread), octaves])
    for case in range(40):
        count = int(rng.integers(1, 12))
        scores = rng.normal(0, spread, (count, 64)).astype(np.float32)
        scales = np.exp2(rng.uniform(-octaves / 2, octaves / 2, (count, 64))).astype(np.float32)
        if case % 4 == 1:  # nearly all of the weight on what has the lowest scale
            scores.reshape(-1)[scales.argmin()] = scores.max() + 20
        if case % 4 == 2:
            scales[0] = 0
            scores[0, ::2] = -np.inf
        if case % 4 == 3:
            scores[0] = -np.inf
        values = rng.choice(np.array([-3.5, 0.25, 2.0, 448.0]), (count, 64))
        row = Stream()
        for block in range(count):
            row.add(scores[block], scales[block], values[block])
        s = scores.astype(np.float64)
        top = s.max()
        weights = np.exp2(s - top) if np.isfinite(top) else np.zeros_like(s)
        terms = weights * scales * values
        wanted = terms.sum() / weights.sum() if weights.any() else 0.0
        size = np.abs(terms).sum() / weights.sum() if weights.any() else 0.0
        assert abs(row.result() - wanted) <= 5e-4 * size + 2.0**-90  # a scale of 0 sets none
        assert row.raised <= count


# --- the model is of this code -------------------------------------------------------------------

MODELLED = {
    "mla/mla_decode_fp8/load.cuh": "1f9d6976",
    "mla/mla_decode_fp8/compute.cuh": "19081f49",
    "mla/mla_decode_fp8/softmax.cuh": "870c8419",
    "mla/mla_decode_fp8/finish.cuh": "f9670bfb",
    "mla/mla_decode_fp8/products.cuh": "ba315247",
    "mla/mla_decode_fp8/layout.cuh": "93656274",
    "mla/mla_decode/pages.cuh": "57dc5781",
    "split/join.cuh": "4943034d",
    "split/output.cuh": "87862f93",
}


@pytest.mark.parametrize("file", MODELLED)
def test_the_model_follows_the_kernel(file: str) -> None:
    """After a change of what is marked there, change the model, too; then the digest here."""
    assert modelled(file, "fp8_data") == MODELLED[file]


# --- shapes and launches -------------------------------------------------------------------------


def decode_key(rows: int, kv_heads: int = 1, page_size: int = 64) -> MLADecodeKey:
    return MLADecodeKey(
        3, 1, rows * kv_heads, kv_heads, page_size, "bfloat16", True, 0, 132, cache="e4m3"
    )


def attention_key(page_size: int = 64) -> MLAAttentionKey:
    return MLAAttentionKey(3, 100, 80, 2, page_size, "bfloat16", True, 0, 132, cache="e4m3")


ATTENTION_KEY = attention_key()


@pytest.mark.parametrize("page_size", [1, 16, 48, 64, 96, 128, 192])
@pytest.mark.parametrize("grouped", [False, True])
def test_the_kernel_of_a_shape(grouped: bool, page_size: int) -> None:
    whole = page_size in (64, 128, 192)
    flag, tag, form = str(grouped).lower(), "_grouped" if grouped else "", "" if whole else "_rows"
    for rows in (1, 16, 17, 32, 33, 127):
        width = 16 if rows <= 16 else 32
        spec = fp8_spec(decode_key(rows, page_size=page_size), grouped)
        assert spec.entry == f"mla_decode_fp8_{width}{tag}{form}"
        assert spec.function == (
            f"mla_decode_fp8<{width}, {flag}, {'kPages' if whole else 'kRows'}>"
        )
        if not grouped:
            continue
        packed = fp8_spec(decode_key(rows, page_size=page_size), grouped, "packed")
        if whole and width == 16:
            assert packed.entry == "mla_decode_fp8_16_packed"
            assert packed.function == "mla_decode_fp8<16, true, kPacked>"
        else:
            assert packed is spec
    whole = whole and not grouped  # ragged queries with scales have the other form only
    spec = fp8_spec(attention_key(page_size), grouped)
    assert spec.entry == f"mla_attention_fp8{tag}{'' if whole else '_rows'}"
    assert spec.function == (
        f"mla_decode_fp8<32, {flag}, {'kPages' if whole else 'kRows'}, RowHalfTile>"
    )
    if grouped:
        assert fp8_spec(attention_key(page_size), grouped, "packed") is spec


def test_every_kernel_serves_a_shape() -> None:
    keys = [
        key
        for size in (64, 16)
        for key in (decode_key(16, 1, size), decode_key(32, 1, size), attention_key(size))
    ]
    others = [replace(key, width=width) for key in keys for width in WIDTHS[1:] if width != WIDE]
    of_widths = {spec for key in others for spec in fp8_specs(key)}
    assert len(of_widths) == 12  # with sinks and without
    assert of_widths == {fp8_spec(key, False, sinks=True) for key in others}
    plain = {spec for key in keys for spec in fp8_specs(key)}
    with_sinks = {
        fp8_spec(key, *kind, sinks=True)
        for key in keys
        for kind in ((False,), (True,), (True, "packed"))
    }
    of_queries = {fp8_spec(key, False, query=True) for key in keys}
    assert plain | with_sinks | of_widths | of_queries == set(SPECS)
    assert (len(plain), len(with_sinks), len(of_queries)) == (12, 12, 6)
    assert len({spec.entry for spec in SPECS}) == 24 + 12 + 6


def test_row_tiles_are_those_of_the_kernel() -> None:
    for rows, tiles, groups in (
        (1, 1, 1),
        (16, 1, 1),
        (17, 1, 2),
        (32, 1, 2),
        (33, 2, 2),
        (127, 4, 2),
    ):
        key = decode_key(rows, kv_heads=3)
        assert (key.row_tiles, key.row_groups, key.tiles) == (tiles, groups, 3 * tiles)
        assert key.row_groups * 16 == key.row_tile
        pieces = key.tiles * key.parts * 2
        assert key.layout.nbytes - key.layout.partial_out == pieces * key.row_tile * 512 * 3
    assert (ATTENTION_KEY.row_tiles, ATTENTION_KEY.row_groups, ATTENTION_KEY.tiles) == (2, 2, 4)
    assert ATTENTION_KEY.parts == 33


def test_other_caches_have_the_plans_that_they_had() -> None:
    same = replace(decode_key(100), cache="same")
    assert (same.row_tile, same.row_tiles, same.row_groups) == (64, 2, 4)
    ragged = replace(ATTENTION_KEY, cache="same")
    assert (ragged.row_tiles, ragged.row_groups, ragged.tiles, ragged.parts) == (1, 4, 2, 66)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.entry)
def test_tiles_lie_where_the_swizzle_begins_anew(spec: KernelSpec, nvrtc: None) -> None:
    found = re.search(r"<(\d+, \w+, \w+)(?:.*, (\d), \w+>)?", spec.function)
    assert found is not None
    layout = f"Fp8Layout<{found[1]}, {found[2] or 8}>"
    # The copy engine's swizzle of 128 bytes has a period of 1024 bytes.
    checks = {f"({layout}::kSlotBytes % 1024)": 0, "kTileBytes % 1024": 0, "kTileBytes": TILE}
    if "kPacked" in spec.function:
        checks |= {"kPackedBytes": PACKED, f"({layout}::kSlotBytes)": TOKENS * PACKED}
    else:
        checks |= {f"({layout}::kRopeOffset % 1024)": 0}
    compile_checks(spec, checks)


def strided(at: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> ArrayView:
    return ArrayView(at << 40, shape, strides, dtype, 0, False)


def checked_for(key: MLADecodeKey, grouped: bool, rope: str, factor: Any) -> DecodeArguments:
    size = key.page_size
    return DecodeArguments(
        strided(1, (3, 1, 80, 512), (8016, 8000, 1152, 2), "bfloat16"),
        strided(2, (3, 1, 80, 64), (8016, 8000, 1152, 2), "bfloat16"),
        strided(3, (70, size, 2, 512), (90000, 1200, 608, 1), "float8_e4m3fn"),
        strided(4, (70, size, 2, 64), (90016, 1216, 624, 2), rope),
        strided(5, (3, 11), (52, 4), "int32"),
        strided(6, (70, size, 2, 4), (90032, 1232, 640, 4), "float32") if grouped else None,
        factor,
        softmax_scale=0.5,
        causal=True,
    )


def packed_for(key: MLADecodeKey, row: int = PACKED) -> DecodeArguments:
    """Of packed rows that are so many bytes apart, and kv heads behind one another."""
    strides = (key.page_size * 2 * row + 64, 2 * row, row)
    shape = (70, key.page_size, 2)
    latent = strided(3, (*shape, 512), (*strides, 1), "float8_e4m3fn")
    rope = strided(3, (*shape, 64), (*strides, 2), "bfloat16")
    scales = strided(3, (*shape, 4), (*strides, 4), "float32")
    return checked_for(key, True, "bfloat16", 1.0)._replace(
        kv_cache=latent,
        kv_rope=rope._replace(ptr=latent.ptr + 528),
        kv_scales=scales._replace(ptr=latent.ptr + 512),
    )


class Prepared(NamedTuple):
    """A launch as the driver would get it, by the kernel's names of its parameters."""

    grid: tuple[int, int, int]
    values: dict[str, Any]
    encoded: dict[bytes, tuple[Any, ...]]  # tensor maps: what they were made of


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Prepared]:
    encoded: dict[bytes, tuple[Any, ...]] = {}

    def encode(
        ptr: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], rows: int
    ) -> bytes:
        descriptor = bytes([len(encoded) + 1]) * 128
        encoded[descriptor] = (ptr, dtype, *shape, *strides[:3], rows)
        return descriptor

    def prepare(key: Any, arguments: DecodeArguments) -> Prepared:
        out = strided(7, (3, 1, 80, 512), (5008, 5024, 5040, 4), "float32")
        lse = strided(8, (3, 80, 1), (6004, 6008, 6012), "float32")
        launch = decode_fp8_launch(key, 9 << 40, arguments, out, lse)
        assert launch.spec is fp8_spec(key, arguments.kv_scales is not None, how_it_lies(arguments))
        return Prepared(launch.grid, parameters(launch), encoded)

    monkeypatch.setattr(mla_decode_fp8, "paged_kv_map", encode)
    return prepare


@pytest.mark.parametrize("page_size", [64, 16])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("rope", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("factor", [0.25, strided(12, (1,), (4,), "float32")])
def test_what_the_kernel_is_told_of_the_cache(
    grouped: bool, rope: str, factor: Any, page_size: int, prepare: Callable[..., Prepared]
) -> None:
    key = decode_key(40, kv_heads=2, page_size=page_size)
    grid, got, _ = prepare(key, checked_for(key, grouped, rope, factor))
    assert grid == (2, key.parts, 2)
    wanted = {
        "decode.latent.base": 3 << 40,
        "decode.latent.stride_row": 1200,
        "decode.rope.base": 4 << 40,
        "decode.q_rope.base": 2 << 40,
        "decode.partial_out": (9 << 40) + key.layout.partial_out,
        "decode.num_pages": 70,
        "decode.page_size": page_size,
        "decode.by_heads_per_group.shift": 6,
        "decode.by_page_size.shift": 6 if page_size == 64 else 4,
        "decode.row_groups": 2,
        "decode.out_is_float": 1,
        "scales.base": 6 << 40 if grouped else 0,
        "scales.stride_page": 90032 if grouped else 0,
        "scales.stride_row": 1232 if grouped else 0,
        "scales.stride_head": 640 if grouped else 0,
        "kv_scale": 0 if factor == 0.25 else 12 << 40,
        "kv_scale_value": 0.25 if factor == 0.25 else 0.0,
        "rope_is_fp8": int(rope != "bfloat16"),
    }
    assert {name: got[name] for name in wanted} == wanted


MAPS = ("decode.latent_map", "decode.rope_map", "scales_map")


@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("rope", ["bfloat16", "float8_e4m3fn"])
def test_whole_pages_are_described_to_the_copy_engine(
    grouped: bool, rope: str, page_size: int, prepare: Callable[..., Prepared]
) -> None:
    """Latent columns, RoPE columns and scales, a map each; without scales the last stays zero."""
    key = decode_key(40, kv_heads=2, page_size=page_size)
    _, got, encoded = prepare(key, checked_for(key, grouped, rope, 1.0))
    extents = 70, page_size, 2
    latent, its_rope, scales = (got[name] for name in MAPS)
    assert encoded[latent] == (3 << 40, "float8_e4m3fn", *extents, 512, 90000, 1200, 608, 64)
    assert encoded[its_rope] == (4 << 40, rope, *extents, 64, 90016, 1216, 624, 64)
    if grouped:
        assert encoded[scales] == (6 << 40, "float32", *extents, 4, 90032, 1232, 640, 64)
    else:
        assert scales == bytes(128)
    assert len(encoded) == 2 + grouped


@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize("row", [656, 672])
def test_packed_rows_are_described_whole(
    row: int, page_size: int, prepare: Callable[..., Prepared]
) -> None:
    """As words, in one map; with more query rows than 16, column by column like other caches."""
    key = decode_key(16, kv_heads=2, page_size=page_size)
    page = page_size * 2 * row + 64
    _, got, encoded = prepare(key, packed_for(key, row))
    latent, *others = (got[name] for name in MAPS)
    assert encoded == {latent: (3 << 40, "uint32", 70, page_size, 2, 164, page, 2 * row, row, 64)}
    assert others == [bytes(128)] * 2
    wide = decode_key(17, kv_heads=2, page_size=page_size)
    _, got, encoded = prepare(wide, packed_for(wide, row))
    at = [encoded[got[name]][:2] for name in MAPS]
    begin = 3 << 40
    assert at == [
        (begin, "float8_e4m3fn"),
        (begin + 528, "bfloat16"),
        (begin + 512, "float32"),
    ]


def test_which_caches_are_packed() -> None:
    """Any views of such rows; nothing that lies otherwise."""
    key = decode_key(16, kv_heads=2)
    packed: Any = packed_for(key)
    assert how_it_lies(packed) == "packed"
    other: Any = checked_for(key, True, "bfloat16", 1.0)
    assert how_it_lies(other) == "plain"
    rope, scales = packed.kv_rope, packed.kv_scales
    further = {"strides": (rope.strides[0] + 16, *rope.strides[1:])}
    for change in (
        {"kv_scales": None},
        {"kv_scales": scales._replace(ptr=scales.ptr + 16)},
        {"kv_scales": scales._replace(**further)},
        {"kv_rope": rope._replace(ptr=rope.ptr + 16)},
        {"kv_rope": rope._replace(**further)},
        {"kv_rope": rope._replace(dtype="float8_e4m3fn")},
    ):
        assert how_it_lies(packed._replace(**change)) == "plain"


@pytest.mark.parametrize(
    ("key", "grouped"),
    [
        *((decode_key(40, 2, size), grouped) for size in (1, 48) for grouped in (False, True)),
        (attention_key(48), False),
        (attention_key(64), True),
    ],
)
def test_rows_that_are_copied_one_by_one_need_no_maps(
    key: Any, grouped: bool, prepare: Callable[..., Prepared]
) -> None:
    checked = checked_for(key, grouped, "bfloat16", 1.0)
    _, got, encoded = prepare(key, checked)
    assert [got[name] for name in MAPS] == [bytes(128)] * 3
    assert not encoded


SHAPE_OF = {"kv_cache": (70, 64, 2, 512), "kv_rope": (70, 64, 2, 64), "kv_scales": (70, 64, 2, 4)}


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("name", SHAPE_OF)
def test_parts_that_are_broadcast_need_no_maps(
    name: str, axis: int, prepare: Callable[..., Prepared]
) -> None:
    """Of whole pages: a stride of 0 is for threads, not for the copy engine."""
    key = decode_key(40, kv_heads=2, page_size=64)
    checked: Any = checked_for(key, True, "bfloat16", 1.0)
    assert how_it_lies(checked) == "plain"
    part = getattr(checked, name)
    assert part.shape == SHAPE_OF[name]
    strides = (*part.strides[:axis], 0, *part.strides[axis + 1 :])
    checked = checked._replace(**{name: part._replace(strides=strides)})
    assert how_it_lies(checked) == "broadcast"
    assert fp8_spec(key, True, "broadcast") == fp8_spec(decode_key(40, 2, 16), True)
    assert fp8_spec(key, False, "broadcast") == fp8_spec(decode_key(40, 2, 16), False)
    _, got, encoded = prepare(key, checked)
    assert [got[name] for name in MAPS] == [bytes(128)] * 3
    assert not encoded
    member = {"kv_cache": "decode.latent", "kv_rope": "decode.rope", "kv_scales": "scales"}[name]
    assert got[f"{member}.stride_{('page', 'row', 'head')[axis]}"] == 0


def test_an_axis_of_one_is_not_broadcast() -> None:
    """Whatever its stride: frameworks report anything there."""
    checked: Any = checked_for(decode_key(40), True, "bfloat16", 1.0)
    one_head = checked.kv_scales._replace(shape=(70, 64, 1, 4), strides=(1024, 16, 0, 4))
    assert how_it_lies(checked._replace(kv_scales=one_head)) == "plain"


def test_whole_pages_of_ragged_queries_without_scales_have_maps(
    prepare: Callable[..., Prepared],
) -> None:
    checked = checked_for(decode_key(40, 2), False, "bfloat16", 1.0)
    _, got, encoded = prepare(ATTENTION_KEY, checked)
    assert {got[name] for name in MAPS[:2]} == set(encoded)
    assert len(encoded) == 2
    assert got["scales_map"] == bytes(128)
