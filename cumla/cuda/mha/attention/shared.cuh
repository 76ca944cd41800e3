// SPDX-License-Identifier: Apache-2.0
// Shared memory of attention, and the registers of its warpgroups.
#pragma once
#include "split/plan.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

using namespace ptx;
using namespace split;

constexpr int kTileBytes = 64 * 128;  // 64 rows x 64 columns of 16 bits, 128-byte swizzle

// kPaired: stages and query rows of two kv heads; each consumer has one.
template <int kKeyTiles, int kValueTiles, bool kE4m3, bool kPaired = false>
struct SharedLayout {
  static constexpr int kTileBytes = mha::kTileBytes, kTiles = kKeyTiles + kValueTiles;
  // True if consumers divide the value columns, not the blocks. Each then has the scores of all blocks.
  static constexpr bool kDivided = kValueTiles > 4;
  static constexpr bool kSeesAll = kDivided || kPaired;  // each consumer has all blocks
  static constexpr int kHeads = kPaired ? 2 : 1;
  // Even, so that each consumer and each of two loading warpgroups has its own stages; or any number, of both.
  static constexpr int kStages = kPaired ? 3 : kDivided ? 1 : kTiles > 4 || (kTiles > 2 && kE4m3) ? 2 : 4;
  static constexpr int kBuffers = kTiles > 5 && kE4m3 ? 1 : kStages;  // buffers that the stages share
  static constexpr int kLoaders = kE4m3 && kTiles <= 5 ? 2 : 1;  // loading warpgroups
  static constexpr int kLoaderRegisters = !kE4m3 ? 56 : kLoaders > 1 ? 80 : 104;
  static constexpr int kConsumerRegisters = !kE4m3 ? 224 : kLoaders > 1 ? 176 : 200;
  static constexpr int kRawBlocks = !kE4m3 ? 0 : kTiles > 5 ? 2 : kTiles > 4 ? 4 : kTiles > 2 ? 6 : 8;
  static constexpr int kKeyBytes = kKeyTiles * kTileBytes, kValueBytes = kValueTiles * kTileBytes;  // of a head
  static constexpr int kStageBytes = kHeads * (kKeyBytes + kValueBytes);
  static constexpr int kTileStep = kHeads * kTileBytes;  // from 64 columns of a head to the next ones
  static constexpr int kExchangeBytes = kPaired ? 0 : kDivided ? 8192 + 1024 : 2 * kRowTile * kValueTiles * 32 * 4;
  static constexpr int kSumsBytes = 2 * 3 * kRowTile * 4, kBarrierBytes = 256;
  static constexpr int kPagesBytes = kBlockTokens * 8;  // page numbers and rows of a block
  static constexpr int kBytes = kHeads * kKeyBytes + kBuffers * kStageBytes + kExchangeBytes + kSumsBytes +
                                kBarrierBytes + kRawBlocks * (kTiles * kTileBytes / 2 + kPagesBytes);
  static_assert(kPaired || kExchangeBytes >= 8192 + 1024, "joining uses it, too");
  // With a mask: tiles that the most advanced warp may be ahead of others (BlockAhead in e4m3.cuh), and one more.
  static constexpr int kTilesAhead = 2 * kRawBlocks + kStages + 2;
  static constexpr int kMaskSlots = kTilesAhead <= 8 ? 8 : kTilesAhead <= 16 ? 16 : 32;
  static constexpr int kMaskedBytes = kBytes + kMaskSlots * 32;
  static_assert(kMaskedBytes <= 232448 || kTiles > 15, "more than a block has");

  u32 query;

  __device__ __forceinline__ u32 keys(int s) const {
    return query + kHeads * kKeyBytes + (kBuffers == kStages ? s : s % kBuffers) * kStageBytes;
  }
  __device__ __forceinline__ u32 values(int s) const { return keys(s) + kHeads * kKeyBytes; }
  __device__ __forceinline__ u32 exchange() const { return keys(0) + kBuffers * kStageBytes; }
  __device__ __forceinline__ u32 of_row(int consumer, int what, int row) const {
    return exchange() + kExchangeBytes + ((consumer * 3 + what) * kRowTile + row) * 4;
  }
  __device__ __forceinline__ u32 barriers() const { return of_row(2, 0, 0); }
  __device__ __forceinline__ u32 keys_full(int s) const { return barriers() + s * 8; }
  __device__ __forceinline__ u32 values_full(int s) const { return barriers() + (kStages + s) * 8; }
  __device__ __forceinline__ u32 keys_free(int s) const { return barriers() + (2 * kStages + s) * 8; }
  __device__ __forceinline__ u32 values_free(int s) const { return barriers() + (3 * kStages + s) * 8; }
  __device__ __forceinline__ u32 query_full() const { return barriers() + 4 * kStages * 8; }
  __device__ __forceinline__ u32 query_free() const { return query_full() + 8; }
  __device__ __forceinline__ u32 words() const { return query_full() + 16; }
  __device__ __forceinline__ u32 mask_full(int slot) const { return query + kBytes + slot * 32; }
  __device__ __forceinline__ u32 raw_keys(int s) const {
    return barriers() + kBarrierBytes + s * kTiles * kTileBytes / 2;
  }
  __device__ __forceinline__ u32 raw_values(int s) const { return raw_keys(s) + kKeyBytes / 2; }
  __device__ __forceinline__ u32 raw_pages(int s) const { return raw_keys(kRawBlocks) + s * kPagesBytes; }
};

}  // namespace cumla::mha
