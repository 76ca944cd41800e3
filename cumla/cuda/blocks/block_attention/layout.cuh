// SPDX-License-Identifier: Apache-2.0
// Parameters and shared memory of block_attention.
#pragma once
#include "blocks/lists.cuh"
#include "mha/attention/layout.cuh"
#include "split/division.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

using namespace ptx;
using namespace split;
using mha::Scales;

constexpr int kDecodeColumns = 128;  // of keys and of values; those that an array lacks are zeros
constexpr int kDecodeRows = 16;      // heads of a kv head, at most
constexpr int kDecodeEntries = 128;  // of a list, at most
constexpr int kDecodeStages = 3;     // chunks of a warp that are loaded ahead

struct BlockAttentionParams : ListsParams {
  static constexpr int sink_in_lse = 1;
  TensorMap key_map, value_map;  // dims (columns, block_size, 1, virtual pages), boxes of a chunk of rows
  const char* q;
  i64 q_stride_batch, q_stride_token, q_stride_head;
  char* out;
  i64 out_stride_batch, out_stride_token, out_stride_head;
  float* lse;
  i64 lse_stride_batch, lse_stride_head, lse_stride_token;
  const float* sinks;  // [num_heads], or null
  Scales key_scale, value_scale;  // of e4m3
  i64 table_entries;                   // of the block table, from first to last
  int key_columns, value_columns;
  int heads_per_group;
  int tokens_apart;  // tokens per request if q, out and lse have an axis of requests, else 0
  int out_is_float;
  int cluster_log2;  // CTAs that share a list of block_attention_few
  float scale_log2;  // softmax_scale * log2(e), or softcap * log2(e)
  float to_softcap;  // 2 * softmax_scale / softcap * log2(e), or 0
  Divisor by_tokens_apart;
};

struct BlockAttentionClusterParams : BlockAttentionParams {
  int cluster;  // CTAs that share a list
  Divisor by_cluster;
};

// Factors of e4m3 keys or values, of each kv head and row of the cache: rows are counted through all pages.
struct RowFactors {
  const float* data;
  i64 stride_head, stride_row;  // in elements
};

struct BlockAttentionFactorsParams : BlockAttentionClusterParams {
  RowFactors key_factors, value_factors;
};

template <typename Params>
constexpr bool kHasFactors = false;
template <>
constexpr bool kHasFactors<BlockAttentionFactorsParams> = true;

template <bool kE4m3, int kNumWarps, bool kOfRows = false>
struct DecodeLayout {
  static constexpr bool kLoadsAhead = false;
  static constexpr int kMostCtas = 8;  // of a cluster
  static constexpr bool kFactors = kOfRows;  // rows of the cache have factors of their own
  static constexpr int kWarps = kNumWarps, kStages = kDecodeStages, kColumns = kDecodeColumns;
  static constexpr int kUnit = kE4m3 ? 1 : 2, kRow = kDecodeColumns * kUnit;  // bytes of a number, of a row
  static constexpr int kChunk = kE4m3 ? 32 : 16;                              // tokens that a warp takes at once
  static constexpr int kKeyBytes = kChunk * kRow, kStageBytes = 2 * kKeyBytes;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kSumsRow = (kDecodeColumns + (kE4m3 ? 16 : 8)) * 4;  // of a warp's sums: shifts banks
  static_assert(kDecodeRows * kSumsRow <= kRingBytes, "a warp's sums take the place of its stages");
  static constexpr int kQueryBytes = kDecodeRows * kDecodeColumns * 2;
  static constexpr int kListBytes = kDecodeEntries * 4;
  static constexpr int kStatisticsBytes = (kWarps + 1) * kDecodeRows * 16;
  static constexpr int kFactorBytes = kFactors ? kChunk * 4 : 0;  // of the keys of a chunk, or of its values
  static constexpr int kBytes = kWarps * kRingBytes + kQueryBytes + 2 * kListBytes + kStatisticsBytes +
                                kWarps * kStages * (8 + 2 * kFactorBytes) + 16 + (kFactors ? kListBytes : 0);

  u32 base;

  __device__ __forceinline__ u32 stage(int warp, int s) const { return base + warp * kRingBytes + s * kStageBytes; }
  // A warp's sums of a head, unnormalised.
  __device__ __forceinline__ u32 sums(int warp, int row) const { return stage(warp, 0) + row * kSumsRow; }
  __device__ __forceinline__ u32 query() const { return stage(kWarps, 0); }
  // Offset of the i-th 16 bytes of a query row.
  __device__ __forceinline__ static u32 query_place(int row, int i) {
    return row * (kDecodeColumns * 2) + ((i ^ (row & 7)) << 4);
  }
  __device__ __forceinline__ u32 block(int i) const { return query() + kQueryBytes + i * 4; }
  __device__ __forceinline__ u32 page(int i) const { return block(kDecodeEntries) + i * 4; }
  // Of a head and a warp, or of all warps: maximum, sum of the weights, sum of the rounded weights.
  __device__ __forceinline__ u32 statistics(int warp, int row) const {
    return page(kDecodeEntries) + (warp * kDecodeRows + row) * 16;
  }
  __device__ __forceinline__ u32 full(int warp, int s) const {
    return statistics(kWarps + 1, 0) + (warp * kStages + s) * 8;
  }
  // What the first warp knows of the list: tokens, the scales of keys and values.
  __device__ __forceinline__ u32 known(int i) const { return full(kWarps, 0) + i * 4; }
  // Of the tokens of a chunk, float32.
  __device__ __forceinline__ u32 key_factors(int warp, int s) const {
    return known(4) + (warp * kStages + s) * (2 * kFactorBytes);
  }
  __device__ __forceinline__ u32 value_factors(int warp, int s) const { return key_factors(warp, s) + kFactorBytes; }
  // The block of the cache, counted through all pages.
  __device__ __forceinline__ u32 place_of_block(int i) const { return key_factors(kWarps, 0) + i * 4; }
  // The i-th 16 bytes of a token's row in a stage: boxes of 128 bytes a row, swizzled.
  __device__ __forceinline__ static u32 place(int token, int i) {
    return i / 8 * (kChunk * 128) + token * 128 + ((i % 8 ^ token & 7) << 4);
  }
};

}  // namespace cumla::blocks
