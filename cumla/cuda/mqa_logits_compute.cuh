// SPDX-License-Identifier: Apache-2.0
// The computing role of mqa_logits and paged_mqa_logits: one consumer warpgroup, from its products to the stored logits.
#pragma once
#include "mqa_logits_layout.cuh"
#include "ptx/copy.cuh"
#include "ptx/copy_rows.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/wgmma_fp8.cuh"

namespace cumla {

// A consumer makes logits of a product, a block by a tile, before it begins the next: the tensor cores work for the other
// consumers meanwhile. Two consumers, which arithmetic bounds, begin their products strictly in turn: were these mixed, both
// would be done, and leave the tensor cores idle, at once.
//
// Thread layout of the accumulators: tokens 16 warp + lane / 4 and that + 8; of every eight columns the two at
// 2 (lane % 4), which belong to one query row. Of a set of kSide rows lying side by side a lane has one.
template <typename Shape>
struct LogitsConsumer {
  static constexpr int kOwn = Shape::kTile / 4;        // columns of a thread: 8 (i / 2) + 2 (lane % 4) + i % 2
  static constexpr int kSets = Shape::kSets;
  static constexpr int kOwnOfSet = kOwn / kSets;       // of these, of one query row
  static constexpr int kLanes = 4 / Shape::kSide;      // that share a query row
  static constexpr int kTokens = kLanes == 1 ? 2 : 1;  // of a block, that a lane stores
  static constexpr bool kKeepsTarget = kSets == 1;     // in registers; else they would not fit
  static constexpr bool kInTurn = Shape::kConsumers == 2;
  static constexpr u32 kStep = Shape::kTakesTurns ? Shape::kConsumers : 1;  // from one of a consumer's blocks to the next

  // Where token 0 of a query row would go, and which tokens it sees; none where other lanes store them.
  struct Target {
    u64 out;
    int begin;
    u32 count;
  };

  const LogitsLayout<Shape>& shared;
  const int consumer, warp, lane;
  const bool out_is_bf16;
  RingPlace<Shape> place;  // of the next block
  u32 buffer = 0;
  int token = 0;  // of this thread, in the next block
  Target kept;
  float weights[kOwn];
  float accumulators[2 * kOwn];

  __device__ __forceinline__ LogitsConsumer(const LogitsParams& p, const LogitsLayout<Shape>& shared, int consumer)
      : shared(shared),
        consumer(consumer),
        warp(threadIdx.x % kWarpgroup / 32),
        lane(threadIdx.x % 32),
        out_is_bf16(p.out_is_bf16) {
    if (Shape::kTakesTurns) place.advance(consumer);
    if (kInTurn && consumer == 1) pass_turn();
#pragma unroll
    for (float& x : accumulators) x = 0.0f;
  }

  // Of the two tokens that it has parts of, the one that a lane stores; with a query row of its own it stores that + 8 too.
  __device__ __forceinline__ int token_in_block() const {
    return 16 * warp + lane / 4 + (kLanes == 1 ? 0 : lane % 2 * 8);
  }
  __device__ __forceinline__ int tile() const { return Shape::kTakesTurns ? 0 : consumer; }

  __device__ __forceinline__ Target load_target(int set) const {
    const int row = (tile() * kSets + set) * Shape::kSide + lane % 4 / kLanes;
    const uint4 words = load_shared_16(shared.targets_of(buffer) + row * 16);
    const bool stores = kLanes < 4 || lane % 4 < 2;  // of four lanes with one sum the first two store it, a token each
    return {static_cast<u64>(words.y) << 32 | words.x, static_cast<int>(words.z), stores ? words.w - words.z : 0};
  }

  // What a segment's products have in common.
  __device__ __forceinline__ void load_segment() {
    if (kKeepsTarget) kept = load_target(0);
#pragma unroll
    for (int i = 0; i < kOwn; i += 2) {
      const float2 pair = load_shared_float2(shared.weights_of(buffer) + tile() * Shape::kTile * 4 + i * 16 + lane % 4 * 8);
      weights[i] = pair.x;
      weights[i + 1] = pair.y;
    }
  }

  // Turns are passed by barriers 1 and 2: consumer 0 begins, and nobody takes the last one.
  __device__ __forceinline__ void wait_for_turn() const { named_barrier_wait<2 * kWarpgroup>(1 + consumer); }
  __device__ __forceinline__ void pass_turn() const { named_barrier_arrive<2 * kWarpgroup>(2 - consumer); }

  // accumulators = block x tile, begun. The block is there.
  __device__ __forceinline__ void multiply() {
    const u32 tokens = shared.block(place.slot);
    const u32 columns = shared.query_of(buffer) + tile() * LogitsLayout<Shape>::kTileBytes;
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < Shape::kDim; k += 32)
      wgmma_e4m3_async(accumulators, descriptor_of_rows<Shape::kDim>(tokens, k), descriptor_of_rows<Shape::kDim>(columns, k),
                       k > 0);
    warpgroup_commit();
  }

  // Accumulators -> logits.
  __device__ __forceinline__ void store_logits(const float (&scales)[kTokens]) const {
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      float sums[2];
      sum_heads(set, sums[0], sums[1]);
      if (kLanes > 1) sums[0] = take_half(sums[0], sums[1]);
      if (kLanes == 4) sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], 2);
      const Target target = kKeepsTarget ? kept : load_target(set);
#pragma unroll
      for (int i = 0; i < kTokens; ++i) store(target, token + 8 * i, sums[i] * scales[i]);
    }
  }

  // sum of weight * max(product, 0) over this thread's heads of a query row, of both its tokens.
  __device__ __forceinline__ void sum_heads(int set, float& low, float& high) const {
    low = high = 0.0f;
#pragma unroll
    for (int i = set * kOwnOfSet; i < (set + 1) * kOwnOfSet; ++i) {
      low = __fmaf_rn(fmaxf(accumulators[4 * (i / 2) + i % 2], 0.0f), weights[i], low);
      high = __fmaf_rn(fmaxf(accumulators[4 * (i / 2) + 2 + i % 2], 0.0f), weights[i], high);
    }
  }

  // Two neighbours each have a part of two sums: one gets the whole of the first, the other of the second.
  __device__ __forceinline__ float take_half(float low, float high) const {
    const bool second = lane % 2;
    return (second ? high : low) + __shfl_xor_sync(0xffffffffu, second ? low : high, 1);
  }

  __device__ __forceinline__ void store(const Target& target, int token, float logit) const {
    const bool valid = static_cast<u32>(token - target.begin) < target.count;
    const u64 out = target.out + static_cast<i64>(token) * (out_is_bf16 ? 2 : 4);
    store_global_float_if(valid && !out_is_bf16, out, logit);
    store_global_low_half_if(valid && out_is_bf16, out, pack_pair<Bf16>(logit, 0.0f));
  }

  // So many blocks of a segment.
  __device__ __forceinline__ void score(int blocks) {
#pragma unroll 1
    for (; blocks > 0; --blocks) {
      mbarrier_wait(shared.full(place.slot), place.phase, "a block of tokens");
      if (kInTurn) wait_for_turn();
      multiply();
      if (kInTurn) pass_turn();
      float scales[kTokens];
#pragma unroll
      for (int i = 0; i < kTokens; ++i)
        scales[i] = load_shared_float(shared.scales_of(place.slot) + (token_in_block() + 8 * i) * 4);
      warpgroup_wait<0>();
      keep_behind_wait(accumulators);
      __syncwarp();
      if (lane == 0) mbarrier_arrive(shared.free(place.slot));
      place.advance(kStep);
      store_logits(scales);
      token += kStep * kBlockTokens;
    }
  }

  // All segments that the query warps announce.
  __device__ __forceinline__ void run() {
    u32 turn = 0;  // the consumer that has the segment's first block, if they take turns
#pragma unroll 1
    for (u32 n = 0;; ++n) {
      buffer = n % 2;
      mbarrier_wait(shared.query_full(buffer), n / 2 % 2, "the query");
      const int first = load_shared_u32(shared.segment_of(buffer));
      const int blocks = load_shared_u32(shared.segment_of(buffer) + 4);
      if (blocks == 0) return;
      load_segment();
      const int skipped = (consumer + kStep - turn) % kStep;
      token = (first + skipped) * kBlockTokens + token_in_block();
      score((blocks - skipped + static_cast<int>(kStep) - 1) / static_cast<int>(kStep));
      turn = (turn + blocks) % kStep;
      mbarrier_arrive(shared.query_free(buffer));  // every lane for what it read itself
    }
  }
};

}  // namespace cumla
