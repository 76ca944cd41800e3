// SPDX-License-Identifier: Apache-2.0
// Parameters and shared memory of block_attention_few.
#pragma once
#include "blocks/block_attention/layout.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

constexpr int kFewEntries = 32;   // of a list, at most
constexpr int kFewPartials = 16;  // of a head, at most: of the warps of a CTA, and of the CTAs of a cluster

struct VirtualPages {
  const char* data;
  i64 stride_page, stride_token;  // in bytes
};

struct BlockAttentionFewParams : BlockAttentionParams {
  VirtualPages keys, values;
};

template <bool kIsE4m3, int kNumWarps, int kTokens>
struct FewLayout {
  static constexpr int kWarps = kNumWarps;
  static constexpr int kRow = kDecodeColumns * (kIsE4m3 ? 1 : 2);  // bytes of a token's keys, or of its values
  static constexpr int kChunk = kTokens;                           // of a warp, at once
  static constexpr int kSumsRow = kDecodeColumns * 4 + 64;         // of a warp's sums: shifts banks
  static constexpr int kSumsBytes = kDecodeRows * kSumsRow, kStatisticsBytes = kDecodeRows * 16;
  static constexpr int kBytes = kWarps * (kSumsBytes + kStatisticsBytes) + kDecodeRows * (kDecodeColumns * 4 + 16) + 16;

  u32 base;

  // A warp's sums of a head, unnormalised: 32 times four columns, in the order in which lanes have them.
  __device__ __forceinline__ u32 sums(int warp, int row) const { return base + warp * kSumsBytes + row * kSumsRow; }
  // Maximum, sum of the weights, sum of the rounded weights.
  __device__ __forceinline__ u32 statistics(int warp, int row) const {
    return sums(kWarps, 0) + warp * kStatisticsBytes + row * 16;
  }
  // What CTAs of the cluster have of this CTA's heads, the i-th of 16.
  __device__ __forceinline__ u32 box(int i) const { return statistics(kWarps, 0) + i * (kDecodeColumns * 4); }
  __device__ __forceinline__ u32 box_statistics(int i) const { return box(kDecodeRows) + i * 16; }
  __device__ __forceinline__ u32 full() const { return box_statistics(kDecodeRows); }
};

}  // namespace cumla::blocks
