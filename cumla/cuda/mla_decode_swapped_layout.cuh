// SPDX-License-Identifier: Apache-2.0
// Shared memory of mla_decode_swapped.
#pragma once
#include "mla_decode_layout.cuh"

namespace cumla {

// kRows: 16 or 32 query rows.
template <int kRows>
struct SwappedLayout {
  static constexpr int kSlots = kRows == 16 ? 24 : 22;  // of the ring, a tile each
  static constexpr int kQueryTileBytes = kRows * 128;   // 64 columns
  static constexpr int kWarps = 2 * kWarpgroup / 32;

  u32 query, ring, probabilities, maxima, sums, words, barriers;

  __device__ __forceinline__ explicit SwappedLayout(u32 base)
      : query(base),
        ring(query + kTiles * kQueryTileBytes),
        probabilities(ring + kSlots * kTileBytes),
        maxima(probabilities + kTileBytes),
        sums(maxima + 10 * kRows * 4),
        words(sums + 2 * kWarps * kRows * 4),
        barriers(words + 16) {}

  __device__ __forceinline__ u32 slot(u32 s) const { return ring + s * kTileBytes; }
  // Transposed: a row of 64 tokens for each query row.
  __device__ __forceinline__ u32 probabilities_of(int owner) const { return probabilities + owner * kRows * 128; }
  // Of a query row over the tokens of one warp; and over all that the owner has seen.
  __device__ __forceinline__ u32 warp_maximum(int consumer, int warp, int row) const {
    return maxima + ((consumer * 4 + warp) * kRows + row) * 4;
  }
  __device__ __forceinline__ u32 maximum(int owner, int row) const { return warp_maximum(2, owner, row); }
  // By warp of both consumers; its sum of exponentials, of rounded probabilities.
  __device__ __forceinline__ u32 sum(int warp, int row) const { return sums + (warp * kRows + row) * 4; }
  __device__ __forceinline__ u32 weight(int warp, int row) const { return sum(kWarps + warp, row); }
  // Barriers: a slot is loaded; is free again; P of a consumer is written.
  __device__ __forceinline__ u32 full(u32 s) const { return barriers + s * 8; }
  __device__ __forceinline__ u32 free(u32 s) const { return full(kSlots + s); }
  __device__ __forceinline__ u32 probabilities_full(int owner) const { return free(kSlots) + owner * 8; }
  __device__ __forceinline__ u32 query_full() const { return probabilities_full(2); }
  __device__ __forceinline__ u32 query_free() const { return query_full() + 8; }
};

// Where in the ring a run of tiles begins, and how often the ring has gone round.
template <int kRows>
struct RingPlace {
  u32 slot = 0, phase = 0;

  __device__ __forceinline__ void advance(u32 tiles) {
    slot += tiles;
    if (slot >= SwappedLayout<kRows>::kSlots) {
      slot -= SwappedLayout<kRows>::kSlots;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ RingPlace ahead(u32 tiles) const {
    RingPlace place = *this;
    place.advance(tiles);
    return place;
  }
};

}  // namespace cumla
