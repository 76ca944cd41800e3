// SPDX-License-Identifier: Apache-2.0
// Keys that the rows of a tile do not see: masked scores, and zeros in place of their values.
#pragma once
#include "mla/mla_decode/compute.cuh"
#include "attend/visible.cuh"
#include "ptx/copy.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

// Rows past the end of the request may hold NaN. Their probabilities are 0, but 0 x NaN is NaN.
template <typename T, bool kSharedBlocks, bool kCopied, typename AnyTile>
__device__ __forceinline__ void Consumer<T, kSharedBlocks, kCopied, AnyTile>::clear_values_past(int stage, int valid) {
  u32 half = shared.stage(stage) + consumer * kHalfTiles * kTileBytes;
  if constexpr (AnyTile::kRing) half = shared.slot(stage);
  for (int i = valid * kHalfChunks + threadIdx.x % kWarpgroup; i < kBlockTokens * kHalfChunks; i += kWarpgroup)
    store_shared_zero_16(half + (i % kHalfChunks / 8) * kTileBytes + (i / kHalfChunks) * 128 + (i % 8) * 16);
  fence_proxy_async_shared();
  consumer_sync(consumer);
}

// The same for the rows of a block before the windows of all rows of the tile.
template <typename T, bool kSharedBlocks, bool kCopied, typename AnyTile>
__device__ __forceinline__ void
Consumer<T, kSharedBlocks, kCopied, AnyTile>::clear_values_before(int stage, int block) {
  const int hidden = min(tile.first_seen - block * kBlockTokens, kBlockTokens);
  if (hidden <= 0) return;
  const u32 half = shared.stage(stage) + consumer * kHalfTiles * kTileBytes;
  for (int i = threadIdx.x % kWarpgroup; i < hidden * kHalfChunks; i += kWarpgroup)
    store_shared_zero_16(half + (i % kHalfChunks / 8) * kTileBytes + (i / kHalfChunks) * 128 + (i % 8) * 16);
  fence_proxy_async_shared();
  consumer_sync(consumer);
}

template <typename T, bool kSharedBlocks, bool kCopied, typename AnyTile>
__device__ __forceinline__ void Consumer<T, kSharedBlocks, kCopied, AnyTile>::mask_scores(int block) {
  hide_from(scores, block * kBlockTokens + (lane % 4) * 2, limit);
}

// Masks the scores before the windows of the two rows.
template <typename T, bool kSharedBlocks, bool kCopied, typename AnyTile>
__device__ __forceinline__ void Consumer<T, kSharedBlocks, kCopied, AnyTile>::mask_before_windows(int block) {
  if (block * kBlockTokens >= tile.seen_by_all) return;
  hide_before(scores, block * kBlockTokens + (lane % 4) * 2,
              {tile.first_of(p, row), tile.first_of(p, row + 8)});
}

// Masks the scores of keys that the two rows do not see by their bits.
template <typename T, bool kSharedBlocks, bool kCopied, typename AnyTile>
__device__ __forceinline__ void
Consumer<T, kSharedBlocks, kCopied, AnyTile>::mask_by_tree(const Segment& segment, int block) {
  const int begin = block * kBlockTokens;
  if (begin + kBlockTokens <= tile.position) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int own = tile.own_token(p, row + 8 * r);
    const u64 seen = tile.visible_keys(p, segment, own, begin) >> lane % 4 * 2;
    const u32 words[2] = {static_cast<u32>(seen), static_cast<u32>(seen >> 32)};
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (!(words[j / 4] >> (j % 4 * 8 + e) & 1)) scores[4 * j + 2 * r + e] = -kInfinity;
  }
}

// Zeros the rows of V that no row of the tile sees by its bits, and those past the end. Whether a block has such rows
// is not asked of the bits: threads whose answers differ would wait for each other for ever.
template <typename T, bool kSharedBlocks, bool kCopied, typename AnyTile>
__device__ __forceinline__ void
Consumer<T, kSharedBlocks, kCopied, AnyTile>::clear_unseen_values(const Segment& segment, int stage, int block) {
  const int begin = block * kBlockTokens;
  if (begin + kBlockTokens <= tile.position) return;
  u64 seen = 0;
  const int last_own = tile.own_token(p, tile.rows - 1);
#pragma unroll 1
  for (int own = tile.own_token(p, 0); own <= last_own; ++own)
    seen |= tile.visible_keys(p, segment, own, begin);
  const u32 half = shared.stage(stage) + consumer * kHalfTiles * kTileBytes;
#pragma unroll 1
  for (int i = threadIdx.x % kWarpgroup; i < kBlockTokens * kHalfChunks; i += kWarpgroup)
    if (!(seen >> (i / kHalfChunks) & 1))
      store_shared_zero_16(half + (i % kHalfChunks / 8) * kTileBytes + (i / kHalfChunks) * 128 + (i % 8) * 16);
  fence_proxy_async_shared();
  consumer_sync(consumer);
}

// Masks the scores of absent rows.
template <typename T, bool kSharedBlocks, bool kCopied, typename AnyTile>
__device__ __forceinline__ void Consumer<T, kSharedBlocks, kCopied, AnyTile>::mask_absent(int t) {
  const uint4 exist = tile.exist(shared, t);
  const u32 words[4] = {exist.x, exist.y, exist.z, exist.w};
  if ((words[0] & words[1] & words[2] & words[3]) == 0xffff) return;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const u32 own = words[j / 2] >> (j % 2 * 8 + lane % 4 * 2);
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (!(own >> (e & 1) & 1)) scores[4 * j + e] = -kInfinity;
  }
}

}  // namespace cumla::mla
