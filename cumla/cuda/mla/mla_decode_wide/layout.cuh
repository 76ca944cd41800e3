// SPDX-License-Identifier: Apache-2.0
// Row tiles and shared memory of mla_decode_wide.
#pragma once
#include "mla/mla_decode/masked.cuh"
#include "mla/mla_decode/layout.cuh"
#include "split/tile.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace ptx;
using namespace split;

constexpr int kWideRows = 32;        // query rows of a CTA, and of a place of the schedule
constexpr int kWideLatentTiles = 16;  // of 64 columns

// Row tile of kWideRows rows.
struct WideTile : WindowTile {
  using Held = WideTile;
  using WindowTile::WindowTile;
};

__device__ __forceinline__ Segment segment_of(const MlaDecodeParams& p, WideTile& tile, const Part& part, int place) {
  return segment_of_rows(p, tile, part, place, kWideRows);
}

struct WideLayout : Widths<kWideLatentTiles> {
  using Own = Widths<kWideLatentTiles>;
  using Own::kHalfTiles, Own::kRopeTile, Own::kTiles;
  static constexpr int kQueryTileBytes = kWideRows * 128;  // 64 columns
  static constexpr int kExchanged = kRowGroup / 8;         // 16 bytes of a thread each
  static constexpr int kExchangeBytes = 2 * kExchanged * kWarpgroup * 16;
  static constexpr int kOfWarpsBytes = kWideRows * 4 * 4;  // a number for each query row and warp
  static_assert(2 * kWarpgroup / 32 * kJoinSpace <= kTiles * kTileBytes, "joining uses the block");
  static_assert(8192 <= kExchangeBytes && 512 <= 2 * kOfWarpsBytes, "JoinSpace::sums and weights");

  u32 block, query, probabilities, exchanges, of_warps, factors, words, barriers;

  __device__ __forceinline__ explicit WideLayout(u32 base)
      : block(base),
        query(block + kTiles * kTileBytes),
        probabilities(query + kTiles * kQueryTileBytes),
        exchanges(probabilities + kQueryTileBytes),
        of_warps(exchanges + kExchangeBytes),
        factors(of_warps + 2 * kOfWarpsBytes),
        words(factors + 2 * kWideRows * 4),
        barriers(words + 16) {}

  __device__ __forceinline__ u32 tile(int k) const { return block + k * kTileBytes; }
  // Partial scores that a consumer leaves for the other.
  __device__ __forceinline__ u32 exchange(int consumer, int i) const {
    return exchanges + ((consumer * kExchanged + i) * kWarpgroup + threadIdx.x % kWarpgroup) * 16;
  }
  // Numbers of the four warps that have a query row's scores: the highest score of a block; after the blocks of a
  // segment the sums of exponentials, and in the second array of rounded probabilities.
  __device__ __forceinline__ u32 of_warp(int array, int row, int warp) const {
    return of_warps + array * kOfWarpsBytes + (row * 4 + warp) * 4;
  }
  // Factors of a query row's output: for a maximum that rose, and the inverse of its sum at the end of a segment.
  __device__ __forceinline__ u32 factor(int row) const { return factors + row * 4; }
  __device__ __forceinline__ u32 inverse(int row) const { return factor(kWideRows + row); }
  // The first two words are the Joiner's. risen: if a consumer's maxima rose in a block.
  __device__ __forceinline__ u32 risen(int consumer) const { return words + 8 + consumer * 4; }
  // Barriers (table: mla/mla_decode_wide.cu).
  __device__ __forceinline__ u32 full(int k) const { return barriers + k * 8; }
  __device__ __forceinline__ u32 free(int k) const { return full(kTiles + k); }
  __device__ __forceinline__ u32 query_full() const { return free(kTiles); }
  __device__ __forceinline__ u32 query_free() const { return query_full() + 8; }
};

}  // namespace cumla::mla
