// SPDX-License-Identifier: Apache-2.0
// The computing role of mqa_logits and paged_mqa_logits: one consumer warpgroup, from its products to the stored logits.
#pragma once
#include "mqa_logits_layout.cuh"
#include "ptx/copy.cuh"
#include "ptx/copy_rows.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/wgmma_fp8.cuh"

namespace cumla {

// A unit is one product, a block by a tile. Units go in turns to two sets of accumulators: while the tensor cores fill
// one, the other becomes logits. With two tiles of its own a consumer multiplies each block by both in turn, else a unit
// is a block.
//
// Thread layout of the accumulators: tokens 16 warp + lane / 4 and that + 8; of every eight columns the two at
// 2 (lane % 4), which belong to one query row.
template <typename Shape>
struct LogitsConsumer {
  static constexpr int kTiles = Shape::kTiles;
  static constexpr int kOwn = Shape::kTile / 4;               // columns of a thread: 8 (i / 2) + 2 (lane % 4) + i % 2
  static constexpr int kOwnOfRow = Shape::kHeads / 4;         // of these, of one query row
  static constexpr int kAtOnce = Shape::kRows == 1 ? 1 : 2;  // query rows that four lanes sum up together

  const LogitsLayout<Shape>& shared;
  const int consumer, warp, lane;
  const bool out_is_bf16, every_block;
  const u32 step;  // from one of this consumer's blocks to the next
  RingPlace<Shape> multiplied, finished;  // the next block to multiply, and to make logits of
  u32 buffer = 0;
  int token = 0;  // of this thread, in the next block to finish
  float weights[kTiles][kOwn];
  float even[2 * kOwn], odd[2 * kOwn];

  __device__ __forceinline__ LogitsConsumer(const LogitsParams& p, const LogitsLayout<Shape>& shared, int consumer)
      : shared(shared),
        consumer(consumer),
        warp(threadIdx.x % kWarpgroup / 32),
        lane(threadIdx.x % 32),
        out_is_bf16(p.out_is_bf16),
        every_block(p.tiles > 1),
        step(every_block ? 1 : 2) {
    if (!every_block) {
      multiplied.advance(consumer);
      finished.advance(consumer);
    }
#pragma unroll
    for (int i = 0; i < 2 * kOwn; ++i) even[i] = odd[i] = 0.0f;
  }

  // Of this thread's two tokens and four lanes' sums, the one that it stores.
  __device__ __forceinline__ int token_in_block() const { return 16 * warp + lane / 4 + lane % 2 * 8; }
  __device__ __forceinline__ int tile(int i) const { return every_block ? consumer * kTiles + i : 0; }

  __device__ __forceinline__ void load_weights() {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int i = 0; i < kOwn; i += 2) {
        const float2 pair = load_shared_float2(shared.weights_of(buffer) + tile(t) * Shape::kTile * 4 + i * 16 + lane % 4 * 8);
        weights[t][i] = pair.x;
        weights[t][i + 1] = pair.y;
      }
  }

  // accumulators = block x tile, begun.
  template <int kParity>
  __device__ __forceinline__ void multiply(float (&accumulators)[2 * kOwn]) {
    if (kTiles == 1 || kParity == 0)
      mbarrier_wait(shared.full(multiplied.slot), multiplied.phase, "a block of tokens");
    const u32 tokens = shared.block(multiplied.slot);
    const u32 columns = shared.query_of(buffer) + tile(kTiles == 2 ? kParity : 0) * LogitsLayout<Shape>::kTileBytes;
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < Shape::kDim; k += 32)
      wgmma_e4m3_async(accumulators, descriptor_of_rows<Shape::kDim>(tokens, k), descriptor_of_rows<Shape::kDim>(columns, k),
                       k > 0);
    warpgroup_commit();
    if (kTiles == 1 || kParity == 1) multiplied.advance(step);
  }

  // Accumulators -> logits. The product is done; with it, or with that by the other tile, the block's slot is free.
  template <int kParity>
  __device__ __forceinline__ void finish(float (&accumulators)[2 * kOwn]) {
    constexpr int kTile = kTiles == 2 ? kParity : 0;
    constexpr bool kLast = kTiles == 1 || kParity == 1;
    keep_behind_wait(accumulators);
    const float scale = load_shared_float(shared.scales_of(finished.slot) + token_in_block() * 4);
    if (kLast) {
      __syncwarp();
      if (lane == 0) mbarrier_arrive(shared.free(finished.slot));
      finished.advance(step);
    }
#pragma unroll
    for (int row = 0; row < Shape::kRows; row += kAtOnce) {
      float sums[2 * kAtOnce];  // [query row][token]
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) sum_heads(accumulators, weights[kTile], row + r, sums[2 * r], sums[2 * r + 1]);
      store(tile(kTile) * Shape::kRows + row, sum_lanes(sums) * scale);
    }
    if (kLast) token += step * kBlockTokens;
  }

  // sum of weight * max(product, 0) over this thread's heads of a query row.
  __device__ __forceinline__ static void sum_heads(const float (&accumulators)[2 * kOwn], const float (&weights)[kOwn],
                                                   int row, float& low, float& high) {
    low = high = 0.0f;
#pragma unroll
    for (int i = row * kOwnOfRow; i < (row + 1) * kOwnOfRow; ++i) {
      low = __fmaf_rn(fmaxf(accumulators[4 * (i / 2) + i % 2], 0.0f), weights[i], low);
      high = __fmaf_rn(fmaxf(accumulators[4 * (i / 2) + 2 + i % 2], 0.0f), weights[i], high);
    }
  }

  // Four lanes hold parts of two sums (of one query row) or four (of two): lane % 2 says for which of the tokens, and
  // with two query rows lane / 2 % 2 for which of these, this lane gets the whole.
  __device__ __forceinline__ float sum_lanes(const float (&sums)[2]) const {
    const float value = take_half(sums[0], sums[1], lane % 2, 1);
    return value + __shfl_xor_sync(0xffffffffu, value, 2);
  }
  __device__ __forceinline__ float sum_lanes(const float (&sums)[4]) const {
    const float first = take_half(sums[0], sums[1], lane % 2, 1), second = take_half(sums[2], sums[3], lane % 2, 1);
    return take_half(first, second, lane / 2 % 2, 2);
  }
  __device__ __forceinline__ static float take_half(float a, float b, bool takes_b, int distance) {
    return (takes_b ? b : a) + __shfl_xor_sync(0xffffffffu, takes_b ? a : b, distance);
  }

  __device__ __forceinline__ void store(int row, float logit) const {
    const int of_lane = row + (kAtOnce == 2 ? lane / 2 % 2 : 0);
    const uint4 words = load_shared_16(shared.targets_of(buffer) + of_lane * 16);
    const int begin = static_cast<int>(words.z), end = static_cast<int>(words.w);
    if (token < begin || token >= end || (kAtOnce == 1 && lane % 4 >= 2)) return;
    const u64 out = static_cast<u64>(words.y) << 32 | words.x;
    if (out_is_bf16)
      store_global_low_half(out + static_cast<i64>(token) * 2, pack_pair<Bf16>(logit, 0.0f));
    else
      store_global_float(out + static_cast<i64>(token) * 4, logit);
  }

  // All units of a segment, of which there are some.
  __device__ __forceinline__ void score(int units) {
    multiply<0>(even);
    int left = units;
#pragma unroll 1
    for (; left > 2; left -= 2) {
      multiply<1>(odd);
      warpgroup_wait<1>();
      finish<0>(even);
      multiply<0>(even);
      warpgroup_wait<1>();
      finish<1>(odd);
    }
    if (left == 2) {  // always so with two tiles; ptxas serialises the products where it is not asked
      multiply<1>(odd);
      warpgroup_wait<1>();
      finish<0>(even);
      warpgroup_wait<0>();
      finish<1>(odd);
    } else {
      warpgroup_wait<0>();
      finish<0>(even);
    }
  }

  // All segments that the query warps announce.
  __device__ __forceinline__ void run() {
    u32 before = 0;  // blocks of the segments before, as far as it matters
#pragma unroll 1
    for (u32 n = 0;; ++n) {
      buffer = n % 2;
      mbarrier_wait(shared.query_full(buffer), n / 2 % 2, "the query");
      const int first = load_shared_u32(shared.segment_of(buffer));
      const int blocks = load_shared_u32(shared.segment_of(buffer) + 4);
      if (blocks == 0) return;
      load_weights();
      const int skipped = every_block ? 0 : (before ^ consumer) & 1;
      const int mine = every_block ? blocks : (blocks - skipped + 1) / 2;
      token = (first + skipped) * kBlockTokens + token_in_block();
      if (mine > 0) score(mine * kTiles);
      before += blocks;
      __syncwarp();
      if (lane == 0) mbarrier_arrive(shared.query_free(buffer));
    }
  }
};

}  // namespace cumla
