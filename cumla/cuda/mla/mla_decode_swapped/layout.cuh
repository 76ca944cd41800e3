// SPDX-License-Identifier: Apache-2.0
// Shared memory of mla_decode_swapped.
#pragma once
#include "mla/mla_decode/layout.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace split;

constexpr int kSwappedRows = 16;  // query rows

// kLatentTiles: of 64 columns of a row, which kRope more follow.
template <int kLatentTiles, bool kRope = true>
struct SwappedLayoutOf : Widths<kLatentTiles> {
  using Own = Widths<kLatentTiles>;
  using Own::kTiles;
  static constexpr int kSlots = kLatentTiles < 8 ? 25 : 24;  // of the ring, one tile each
  static constexpr int kQueryTileBytes = kSwappedRows * 128;  // 64 columns
  static constexpr int kBlockTiles = kLatentTiles + kRope;
  // As many as the loader may be blocks ahead, or one more, so that the same consumer's blocks have the same ones.
  static constexpr int kBegun = (kSlots / kBlockTiles + 1) / 2 * 2;
  static constexpr int kExchanged = kLatentTiles;  // 16 bytes of a thread each
  static constexpr int kExchangeBytes = 2 * kExchanged * kWarpgroup * 16;
  static constexpr int kCombining = kTiles * kQueryTileBytes + 8192;  // query, and JoinSpace::sums behind it
  static constexpr int kWarps = 2 * kWarpgroup / 32;
  static_assert(kWarps * kJoinSpace <= kSlots * kTileBytes, "joining uses the ring");

  u32 ring, query, probabilities, maxima, sums, words, barriers;

  __device__ __forceinline__ explicit SwappedLayoutOf(u32 base)
      : ring(base),
        query(ring + kSlots * kTileBytes),
        probabilities(query + kTiles * kQueryTileBytes),
        maxima(query + (kExchangeBytes > kCombining ? kExchangeBytes : kCombining)),
        sums(maxima + kWarps * kSwappedRows * 4),
        words(sums + (2 * kWarps + 2) * kSwappedRows * 4),
        barriers(words + 16) {}

  __device__ __forceinline__ u32 slot(u32 s) const { return ring + s * kTileBytes; }
  // Transposed: 64 tokens for each query row.
  __device__ __forceinline__ u32 probabilities_of(int consumer) const {
    return probabilities + consumer * kSwappedRows * 128;
  }
  // Room for what the consumers exchange. It overlaps query and probabilities, which a segment no longer needs then.
  __device__ __forceinline__ u32 exchange(int consumer, int i) const {
    return query + ((consumer * kExchanged + i) * kWarpgroup + threadIdx.x % kWarpgroup) * 16;
  }
  // Per query row and warp of both consumers: the highest score of a block; the sums of exponentials and of rounded
  // probabilities over a segment. Per consumer: its running maximum.
  __device__ __forceinline__ u32 warp_maximum(int warp,
                                              int row) const { return maxima + (warp * kSwappedRows + row) * 4; }
  __device__ __forceinline__ u32 sum(int row, int warp) const { return sums + (row * kWarps + warp) * 4; }
  __device__ __forceinline__ u32 weight(int row, int warp) const { return sum(kSwappedRows + row, warp); }
  __device__ __forceinline__ u32 maximum(int consumer, int row) const {
    return sum(2 * kSwappedRows, 0) + (consumer * kSwappedRows + row) * 4;
  }
  // Barriers (table: mla/mla_decode_swapped.cu).
  __device__ __forceinline__ u32 full(u32 s) const { return barriers + s * 8; }
  __device__ __forceinline__ u32 free(u32 s) const { return full(kSlots + s); }
  __device__ __forceinline__ u32 begun(int i) const { return free(kSlots) + i * 8; }
  // The one of block t
  __device__ __forceinline__ static int begun_of(int t) { return kBegun == 2 ? t & 1 : t % kBegun; }
  __device__ __forceinline__ u32 query_full() const { return begun(kBegun); }
  __device__ __forceinline__ u32 query_free() const { return query_full() + 8; }
  // Of lists that the kernel reads, a bit per row of half a block: set if the row exists. They follow all else.
  __device__ __forceinline__ u32 exist(int t, int half) const {
    return query_free() + 8 + (begun_of(t) * 2 + half) * 4;
  }
};

using SwappedLayout = SwappedLayoutOf<kRopeTile>;

}  // namespace cumla::mla
