// SPDX-License-Identifier: Apache-2.0
// Parameters and shared memory of block_scores_few.
#pragma once
#include "split/division.cuh"
#include "split/plan.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

using namespace split;

constexpr int kFewScoreRows = 8;       // query rows of a request, at most
constexpr int kFewScoreColumns = 128;  // of keys
constexpr int kFewScoreRequests = 1024;

// Strides are in bytes, those of lengths, of the table and of out in elements.
struct BlockScoresFewParams {
  const int* kv_lens;  // [batch]
  i64 kv_lens_stride;
  const char* q;
  i64 q_stride_request, q_stride_token, q_stride_head;
  const char* keys;  // [num_pages, page_size, columns]
  i64 keys_stride_page, keys_stride_row;
  const int* block_table;
  i64 block_table_stride;
  i64 table_entries;  // from first to last
  float* out;  // [batch, q_len, heads, width]
  i64 out_stride_request, out_stride_token, out_stride_head;
  int batch;
  int q_len;
  int heads;
  int rows;   // q_len x heads
  int width;  // blocks
  int steps;  // of 32 blocks
  int most;   // tokens that the pages of a request hold
  int num_pages;
  int block_size;
  int blocks_per_page;
  int causal;
  Divisor by_warps, by_steps, by_heads, by_block_size, by_blocks_per_page, by_width;
  int is_single;  // there are no more blocks, visible or not, than warps
  int many;       // blocks of a warp from which on half of the warps have all of them
};

// The shared memory of a warp.
template <bool kIsE4m3, int kWarps, int kStageKeys, int kRingStages, int kOfKeys = kFewScoreColumns>
struct ScoresFewLayout {
  static constexpr bool kE4m3 = kIsE4m3;
  static constexpr int kColumns = kOfKeys;
  static constexpr int kKeys = kStageKeys, kStages = kRingStages;
  static constexpr int kRow = kColumns * (kE4m3 ? 1 : 2);  // bytes
  static constexpr int kStageBytes = kKeys * kRow, kWarpBytes = kStages * kStageBytes;
  static constexpr int kBytes = kWarps * kStages * (kStageBytes + 24);

  u32 base;
  int warp;

  __device__ __forceinline__ u32 stage(int i) const { return base + warp * kWarpBytes + i * kStageBytes; }
  __device__ __forceinline__ u32 full(int i) const { return base + kWarps * kWarpBytes + (warp * kStages + i) * 8; }
  // Of a stage: its keys, 0 if the page does not exist; request, block and the request's tokens.
  __device__ __forceinline__ u32 place_of(int i) const {
    static_assert(kWarps * kStages % 2 == 0, "16 bytes are aligned");
    return base + kWarps * (kWarpBytes + kStages * 8) + (warp * kStages + i) * 16;
  }
};

}  // namespace cumla::blocks
