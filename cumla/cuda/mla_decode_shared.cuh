// SPDX-License-Identifier: Apache-2.0
// Shared memory of mla_decode.
#pragma once
#include "mla_decode_layout.cuh"

namespace cumla {

constexpr int kHeldTiles = 5;  // tiles of the query that are held in registers; the others stay in shared memory
constexpr int kHalfBytes = kHalfTiles * kTileBytes;

struct SharedLayout {
  static constexpr u32 kHalves = 5;  // rings: of halves of V, of RoPE tiles
  static constexpr u32 kRopes = 3;

  u32 values, ropes, query, join_sums, join_weights, factors, inverses, part, words, barriers;

  __device__ __forceinline__ explicit SharedLayout(u32 base)
      : values(base),
        ropes(values + kHalves * kHalfBytes),
        query(ropes + kRopes * kTileBytes),
        join_sums(query + (kTiles - kHeldTiles) * kTileBytes),
        join_weights(join_sums + 8192),
        factors(join_weights + 1024),
        inverses(factors + kRopes * kRowTile * 4),
        part(inverses + kRopes * kRowTile * 4),
        words(part + sizeof(Part)),
        barriers(words + 16) {}

  __device__ __forceinline__ u32 half(u32 slot) const { return values + slot * kHalfBytes; }
  // The probabilities of a block take the place of its RoPE tile, which only the scores need.
  __device__ __forceinline__ u32 rope(u32 slot) const { return ropes + slot * kTileBytes; }
  __device__ __forceinline__ u32 query_tile(int column) const { return query + (column - kHeldTiles) * kTileBytes; }
  // Of a query row and a block: what the output so far is multiplied with. And in the last block of a segment, what the
  // output is multiplied with at the end.
  __device__ __forceinline__ u32 factor(u32 rope, int row) const { return factors + (rope * kRowTile + row) * 4; }
  __device__ __forceinline__ u32 inverse(u32 rope, int row) const { return inverses + (rope * kRowTile + row) * 4; }
  // Barriers: a tile is loaded; a slot is free again; a block's probabilities are written; a query may be copied to where
  // its turn is; the query in shared memory is no longer wanted.
  __device__ __forceinline__ u32 half_full(u32 slot, int tile) const { return barriers + (slot * kHalfTiles + tile) * 8; }
  __device__ __forceinline__ u32 half_free(u32 slot) const { return half_full(kHalves, 0) + slot * 8; }
  __device__ __forceinline__ u32 rope_full(u32 slot) const { return half_free(kHalves) + slot * 8; }
  __device__ __forceinline__ u32 rope_free(u32 slot) const { return rope_full(kRopes) + slot * 8; }
  __device__ __forceinline__ u32 scored(u32 slot) const { return rope_free(kRopes) + slot * 8; }
  __device__ __forceinline__ u32 query_turn() const { return scored(kRopes); }
  __device__ __forceinline__ u32 query_free() const { return query_turn() + 8; }
};

// A place in both rings. Each block takes two halves and a RoPE slot; the part of a query that goes to registers takes two
// halves on its way, in front of the blocks of its segment.
struct RingPlace {
  u32 first = 0, halves_round = 0, rope = 0, rope_round = 0;

  __device__ __forceinline__ u32 half(u32 i) const {
    return first + i < SharedLayout::kHalves ? first + i : first + i - SharedLayout::kHalves;
  }
  __device__ __forceinline__ u32 half_round(u32 i) const { return halves_round ^ (first + i >= SharedLayout::kHalves); }
  __device__ __forceinline__ void pass_query() {
    halves_round = half_round(2);
    first = half(2);
  }
  __device__ __forceinline__ void pass_block() {
    pass_query();
    if (++rope == SharedLayout::kRopes) {
      rope = 0;
      rope_round ^= 1;
    }
  }
};

}  // namespace cumla
