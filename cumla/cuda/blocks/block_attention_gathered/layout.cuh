// SPDX-License-Identifier: Apache-2.0
// Parameters and shared memory of block_attention_gathered.
#pragma once
#include "blocks/block_attention/layout.cuh"
#include "blocks/lists.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

constexpr int kGatherEntries = 512;  // of a list, at most

// Rows of keys or of values; strides are in bytes.
struct GatheredRows {
  const char* data;
  i64 stride_page, stride_row;  // of virtual pages; of tokens
};

// key_map and value_map are not read.
struct BlockAttentionGatheredParams : BlockAttentionClusterParams {
  GatheredRows keys, values;
};

template <bool kE4m3, int kNumColumns, int kNumCtas>
struct GatherLayout {
  static constexpr bool kFactors = false, kLoadsAhead = !kE4m3;
  static constexpr int kMostCtas = 16;          // of a cluster
  static constexpr int kColumns = kNumColumns;  // of keys and of values; those that an array lacks are zeros
  // Chunks of a warp that are loaded ahead; 256 columns leave room for one if the multiprocessor has two CTAs.
  static constexpr int kWarps = 4, kStages = kColumns == 192 ? 2 : kColumns == 256 && kNumCtas == 2 ? 1 : 3;
  static constexpr int kUnit = kE4m3 ? 1 : 2, kRow = kColumns * kUnit;  // bytes of a number, of a row
  static constexpr int kChunk = kE4m3 ? 32 : 16;                        // tokens that a warp takes at once
  static constexpr int kKeyBytes = kChunk * kRow, kStageBytes = 2 * kKeyBytes;
  static constexpr int kSumsRow = (kColumns + (kE4m3 ? 16 : 8)) * 4;  // of a warp's sums: shifts banks
  static constexpr int kSumsBytes = kDecodeRows * kSumsRow;           // they take the place of the warp's stages
  static constexpr int kRingBytes = kStages * kStageBytes > kSumsBytes ? kStages * kStageBytes : kSumsBytes;
  static_assert(sizeof(ListShared) <= kWarps * kRingBytes, "the list is read before the first chunks come");
  static constexpr int kQueryRow = kColumns * 2, kQueryBytes = kDecodeRows * kQueryRow;
  static constexpr int kStatisticsBytes = (kWarps + 1) * kDecodeRows * 16;
  static constexpr int kBytes = kWarps * kRingBytes + kQueryBytes + kGatherEntries * 4 + kStatisticsBytes;

  u32 base;

  __device__ __forceinline__ u32 stage(int warp, int s) const { return base + warp * kRingBytes + s * kStageBytes; }
  // A warp's sums of a head, unnormalised.
  __device__ __forceinline__ u32 sums(int warp, int row) const { return stage(warp, 0) + row * kSumsRow; }
  __device__ __forceinline__ u32 query() const { return stage(kWarps, 0); }
  // Offset of the i-th 16 bytes of a query row.
  __device__ __forceinline__ static u32 query_place(int row, int i) { return row * kQueryRow + ((i ^ (row & 7)) << 4); }
  __device__ __forceinline__ u32 page(int i) const { return query() + kQueryBytes + i * 4; }
  // Maximum, sum of the weights and sum of the rounded weights of a head, of a warp or of all warps.
  __device__ __forceinline__ u32 statistics(int warp, int row) const {
    return page(kGatherEntries) + (warp * kDecodeRows + row) * 16;
  }
  // The i-th 16 bytes of a token's row in a stage, swizzled: those of eight rows are in all banks. Rows of 192 bytes
  // begin in two places of the banks.
  __device__ __forceinline__ static u32 place(int token, int i) {
    return token * kRow + ((i ^ (kRow % 128 == 0 ? token & 7 : token / 2 & 3)) << 4);
  }
};

}  // namespace cumla::blocks
