// SPDX-License-Identifier: Apache-2.0
// The warpgroup of mla_decode that scores: it holds most of the query in registers and turns blocks of keys into probabilities.
#pragma once
#include "mla_decode_join.cuh"
#include "mla_decode_shared.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/sync.cuh"
#include "ptx/wgmma.cuh"

namespace cumla {

// Thread layout of query, scores and probabilities: rows 16 warp + lane / 4 and that + 8; in every group of eight columns
// the two at 2 (lane % 4).
template <typename T, bool kSharedBlocks>
struct Scorer {
  const MlaDecodeParams& p;
  const SharedLayout& shared;
  const Tile& tile;
  const int warp, lane, row;
  RingPlace place;
  u32 query[kHeldTiles][16];
  float scores[32];
  float maximum[2];          // base-2 running maximum of both rows
  float sum[2];              // of the exponentials, for the log-sum-exp,
  float weight[4];           // and of the 16-bit probabilities made of them, twice, which normalise the output

  __device__ __forceinline__ Scorer(const MlaDecodeParams& p, const SharedLayout& shared, const Tile& tile)
      : p(p),
        shared(shared),
        tile(tile),
        warp(threadIdx.x % kWarpgroup / 32),
        lane(threadIdx.x % 32),
        row(warp * 16 + lane / 4) {}

  // Every lane that wrote a row's factor arrives itself: racecheck does not see an order that goes through another lane.
  __device__ __forceinline__ void arrive(u32 barrier) const {
    __syncwarp();
    if (lane % 4 == 0) mbarrier_arrive(barrier);
  }

  // From where it passes through the ring, in tiles of 64 columns with the 128-byte swizzle.
  __device__ __forceinline__ void take_query() {
    const int load_row = warp * 16 + lane % 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32 slot = place.half(half);
      const u32 address = shared.half(slot) + load_row * 128;
#pragma unroll
      for (int i = 0; i < kHalfTiles; ++i) {
        mbarrier_wait(shared.half_full(slot, i), place.half_round(half), "the query");
        const int column = half * kHalfTiles + i;
        if (column < kHeldTiles)
#pragma unroll
          for (int k = 0; k < 4; ++k)
            load_matrix_x4(address + i * kTileBytes + (((2 * k + lane / 16) ^ (load_row & 7)) << 4),
                           query[column][4 * k], query[column][4 * k + 1], query[column][4 * k + 2],
                           query[column][4 * k + 3]);
      }
      arrive(shared.half_free(slot));
    }
    place.pass_query();
  }

  __device__ __forceinline__ void multiply_tile(int column, u32 keys) {
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const u64 b = matrix_descriptor(keys + k * 32, 0, 1024);
      if (column < kHeldTiles)
        wgmma_m64n64k16_async<T>(scores, &query[column][4 * k], b, column + k > 0);
      else
        wgmma_m64n64k16_async<T>(scores, matrix_descriptor(shared.query_tile(column) + k * 32, 0, 1024), b, true);
    }
  }

  // scores = query x keys, asynchronously: two groups, the last one a tile.
  __device__ __forceinline__ void multiply_keys() {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < kHalfTiles; ++i) {
        mbarrier_wait(shared.half_full(place.half(half), i), place.half_round(half), "a KV tile");
        multiply_tile(half * kHalfTiles + i, shared.half(place.half(half)) + i * kTileBytes);
      }
    warpgroup_commit();
    mbarrier_wait(shared.rope_full(place.rope), place.rope_round, "a KV tile");
    multiply_tile(kRopeTile, shared.rope(place.rope));
    warpgroup_commit();
  }

  // Rows past the end of the sequence may hold NaN: their probabilities are 0, and 0 x NaN is NaN.
  __device__ __forceinline__ void clear_values_past(int valid) const {
    for (int i = valid * 64 + threadIdx.x % kWarpgroup; i < kBlockTokens * 64; i += kWarpgroup) {
      const int tile = i % 64 / 8;
      store_shared_zero_16(shared.half(place.half(tile / kHalfTiles)) + tile % kHalfTiles * kTileBytes + (i / 64) * 128 +
                           (i % 8) * 16);
    }
    fence_proxy_async_shared();
    named_barrier_sync<kConsumerBarrier + 1, kWarpgroup>();
  }

  __device__ __forceinline__ void mask_scores(const Segment& segment, int block) {
    const int column = block * kBlockTokens + (lane % 4) * 2;
    const int limit[2] = {segment.tokens - tile.shift_of(p, row), segment.tokens - tile.shift_of(p, row + 8)};
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (column + 8 * j + (e & 1) >= limit[e >> 1]) scores[4 * j + e] = -kInfinity;
  }

  // The running maximum only moves when a row grows by more than 2^8 over it. Stores what that multiplies the output with.
  __device__ __forceinline__ void raise_maximum(bool first) {
    float highest[2] = {highest_of<0, 16>(0), highest_of<0, 16>(1)};
    float factor[2] = {1.0f, 1.0f};
    const bool grown = highest[0] * p.scale_log2 > maximum[0] + kMaximumSlack ||
                       highest[1] * p.scale_log2 > maximum[1] + kMaximumSlack;
    if (__any_sync(0xffffffffu, grown)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        highest[r] = fmaxf(highest[r], __shfl_xor_sync(0xffffffffu, highest[r], 1));
        highest[r] = fmaxf(highest[r], __shfl_xor_sync(0xffffffffu, highest[r], 2));
        highest[r] *= p.scale_log2;
        const float next = highest[r] > maximum[r] + kMaximumSlack ? highest[r] : maximum[r];
        if (!first) factor[r] = exp2_approx(maximum[r] - next);
        maximum[r] = next;
        sum[r] *= factor[r];
        weight[2 * r] *= factor[r];
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (lane % 4 == 0) store_shared_float(shared.factor(place.rope, row + 8 * r), factor[r]);
  }

  // Of scores [kFrom, kTo) of a row, as a tree.
  template <int kFrom, int kTo>
  __device__ __forceinline__ float highest_of(int r) const {
    if constexpr (kTo - kFrom == 1)
      return scores[kFrom / 2 * 4 + 2 * r + kFrom % 2];
    else
      return fmaxf(highest_of<kFrom, (kFrom + kTo) / 2>(r), highest_of<(kFrom + kTo) / 2, kTo>(r));
  }

  // scores -> probabilities relative to the running maximum, and their sums before and after rounding. The output is
  // divided by the rounded sum: where one token has most of the weight its rounding cancels. The probabilities go in
  // place of the block's RoPE tile.
  __device__ __forceinline__ void exponentiate() {
    const u32 ones[2] = {pack_pair<T>(1.0f, 1.0f), pack_pair<T>(1.0f, 1.0f)};
    const int store_row = warp * 16 + lane % 16;
    const u32 address = shared.rope(place.rope) + store_row * 128;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      u32 probabilities[4];
      float pair[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = i & 1;
        const float low = exp2_approx(__fmaf_rn(scores[8 * k + 2 * i], p.scale_log2, -maximum[r]));
        const float high = exp2_approx(__fmaf_rn(scores[8 * k + 2 * i + 1], p.scale_log2, -maximum[r]));
        pair[i] = low + high;
        probabilities[i] = pack_pair<T>(low, high);
      }
      sum[0] += pair[0] + pair[2];
      sum[1] += pair[1] + pair[3];
      store_matrix_x4(address + (((2 * k + lane / 16) ^ (store_row & 7)) << 4), probabilities[0], probabilities[1],
                      probabilities[2], probabilities[3]);
      mma_m16n8k16<T>(weight, probabilities, ones);
    }
  }

  __device__ __forceinline__ static float sum_of_quad(float value) {
    value += __shfl_xor_sync(0xffffffffu, value, 1);
    return value + __shfl_xor_sync(0xffffffffu, value, 2);
  }

  // Sums of a segment: what its output is divided by, in the stage of its last block; its log-sum-exp.
  __device__ __forceinline__ void finish(const Segment& segment) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float total = sum_of_quad(sum[r]), rounded = weight[2 * r];
      if (lane % 4 != 0) continue;
      store_shared_float(shared.inverse(place.rope, row + 8 * r), rounded == 0.0f ? 0.0f : 1.0f / rounded);
      store_segment_lse(p, tile, segment, row + 8 * r, total == 0.0f ? -kInfinity : maximum[r] + log2_approx(total));
    }
  }

  // The output warpgroups get a block's probabilities as soon as they are written or, with kSharedBlocks, when the scores
  // of the next block are nearly done: so products are left to run beside each softmax.
  __device__ __forceinline__ void compute(const Segment& segment) {
    take_query();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      maximum[r] = kLowest;
      sum[r] = 0.0f;
      weight[2 * r] = weight[2 * r + 1] = 0.0f;
    }
    u32 previous = 0;
#pragma unroll 1
    for (int i = 0; i < segment.blocks; ++i) {
      multiply_keys();
      if constexpr (kSharedBlocks) {
        warpgroup_wait<1>();
        if (i > 0) arrive(shared.scored(previous));
        previous = place.rope;
      }
      warpgroup_wait<0>();
      if (i == segment.blocks - 1 && lane == 0) mbarrier_arrive(shared.query_free());
      const int block = segment.begin + i;
      const int last_token = (block + 1) * kBlockTokens;
      if (last_token > segment.tokens - tile.most_shift) mask_scores(segment, block);
      raise_maximum(i == 0);
      exponentiate();
      if (last_token > segment.tokens) clear_values_past(kBlockTokens + segment.tokens - last_token);
      const bool last = i == segment.blocks - 1;
      if (last) finish(segment);
      fence_proxy_async_shared();
      if (!kSharedBlocks || last) arrive(shared.scored(place.rope));
      place.pass_block();
    }
  }
};

}  // namespace cumla
