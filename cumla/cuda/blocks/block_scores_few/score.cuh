// SPDX-License-Identifier: Apache-2.0
// The products and maxima of a warp of block_scores_few.
#pragma once
#include "blocks/block_scores_few/layout.cuh"
#include "blocks/block_scores_few/share.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/mma.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

using namespace ptx;

// Keys are the M side of the products, query rows the N side: lane 4 g + c has keys g and g + 8 of each 16, query row
// g, and the products of keys g and g + 8 with rows 2 c and 2 c + 1.
template <typename T, typename Layout>
struct FewScorer {
  static constexpr bool kE4m3 = Layout::kE4m3;
  static constexpr int kLoads = Layout::kRow / 64, kTiles = Layout::kKeys / 16;
  static constexpr int kProducts = kE4m3 ? 4 : 2;  // of 16 bytes of a key

  const BlockScoresFewParams& p;
  const Layout& shared;
  const int lane;
  int keys, request, block, tokens;  // of the stage
  int from;                          // keys of the block that are scored
  u32 query[Layout::kColumns / 16][2];  // of the products of 16 columns
  float most[2];
  int hidden[2];  // of the last tokens, from this lane's rows
  i64 own[2];     // where its rows are in out; -1: there is no such row

  __device__ __forceinline__ FewScorer(const BlockScoresFewParams& p, const Layout& shared)
      : p(p), shared(shared), lane(threadIdx.x % 32), request(-1), from(0) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = lane % 4 * 2 + j;
      hidden[j] = p.causal ? p.q_len - 1 - static_cast<int>(quotient(row, p.by_heads)) : 0;
      own[j] = row < p.rows && lane < 4 ? offset_of_row(p, row) : -1;
      most[j] = -kInfinity;
    }
  }

  // Goes to a stage that is being copied. A request that begins has other query rows.
  __device__ __forceinline__ void begin(int stage) {
    const uint4 words = load_shared_16(shared.place_of(stage));
    const bool is_other = request != static_cast<int>(words.y);
    keys = static_cast<int>(words.x);
    request = static_cast<int>(words.y);
    block = static_cast<int>(words.z);
    tokens = static_cast<int>(words.w);
    if (is_other) load_query();
  }

  __device__ __forceinline__ static u32 word_of(const uint4& words, int i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
  }

  __device__ __forceinline__ void load_query() {
    const int row = lane / 4, token = quotient(row, p.by_heads);
    const char* const source = p.q + request * p.q_stride_request + token * p.q_stride_token +
                               (row - token * p.heads) * p.q_stride_head + lane % 4 * 16;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      uint4 words = {};
      if (row < p.rows) words = load_global_16(reinterpret_cast<const uint4*>(source + i * 64));
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if constexpr (kE4m3) {
          expand_e4m3x4(word_of(words, k), query[4 * i + k][0], query[4 * i + k][1]);
        } else {
          query[2 * i + k / 2][k % 2] = word_of(words, k);
        }
      }
    }
  }

  // The larger one; NaN is larger than any number.
  __device__ __forceinline__ static float larger(float one, float other) {
    return other > one || other != other ? other : one;
  }

  // Product k of the i-th 16 bytes of 16 keys.
  __device__ __forceinline__ void multiply(const uint4 (&words)[2][kLoads], int i, int k, float (&score)[4]) const {
    if constexpr (kE4m3) {
      u32 a[4];
      expand_e4m3x4(word_of(words[0][i], k), a[0], a[2]);
      expand_e4m3x4(word_of(words[1][i], k), a[1], a[3]);
      mma_m16n8k16<T>(score, a[0], a[1], a[2], a[3], query[4 * i + k][0], query[4 * i + k][1]);
    } else {
      mma_m16n8k16<T>(score, word_of(words[0][i], 2 * k), word_of(words[1][i], 2 * k), word_of(words[0][i], 2 * k + 1),
                      word_of(words[1][i], 2 * k + 1), query[2 * i + k][0], query[2 * i + k][1]);
    }
  }

  // The products of a stage, of even and odd ones: chains of half the length.
  __device__ __forceinline__ void multiply_stage(int stage, float (&score)[kTiles][2][4]) const {
    const u32 source = shared.stage(stage) + lane / 4 * Layout::kRow + lane % 4 * 16;
    uint4 words[kTiles][2][kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          words[t][r][i] = load_shared_16(source + (t * 16 + r * 8) * Layout::kRow + i * 64);
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
#pragma unroll
      for (int k = 0; k < kProducts; ++k)
#pragma unroll
        for (int t = 0; t < kTiles; ++t) multiply(words[t], i, k, score[t][k % 2]);
  }

  __device__ __forceinline__ void score(int stage) {
    int seen[2];
#pragma unroll
    for (int j = 0; j < 2; ++j)
      seen[j] = min(keys, tokens - hidden[j] - block * p.block_size - from) - lane / 4;
    float score[kTiles][2][4] = {};
    multiply_stage(stage, score);
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (t * 16 < seen[j]) most[j] = larger(most[j], score[t][0][j] + score[t][1][j]);
        if (t * 16 + 8 < seen[j]) most[j] = larger(most[j], score[t][0][2 + j] + score[t][1][2 + j]);
      }
  }

  // Stores the maxima of a block that ends with the stage.
  __device__ __forceinline__ void end() {
    from += Layout::kKeys;
    if (from < min(p.block_size, tokens - block * p.block_size)) return;
    from = 0;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int apart = 4; apart < 32; apart *= 2)
        most[j] = larger(most[j], __shfl_xor_sync(0xffffffffu, most[j], apart));
      if (own[j] >= 0) p.out[request * p.out_stride_request + own[j] + block] = most[j];
      most[j] = -kInfinity;
    }
  }
};

}  // namespace cumla::blocks
