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
// is a block. For 256 columns there is one set: while it becomes logits, the tensor cores work for the other consumer.
//
// Thread layout of the accumulators: tokens 16 warp + lane / 4 and that + 8; of every eight columns the two at
// 2 (lane % 4), which belong to one query row. Of a set of kSide rows lying side by side a lane has one.
template <typename Shape>
struct LogitsConsumer {
  static constexpr int kTiles = Shape::kTakesTurns ? 1 : Shape::kTiles / 2;  // of one consumer
  static constexpr int kSets = Shape::kSets;
  static constexpr int kOwn = Shape::kTile / 4;      // columns of a thread: 8 (i / 2) + 2 (lane % 4) + i % 2
  static constexpr int kOwnOfSet = kOwn / kSets;     // of these, of one query row
  static constexpr int kLanes = 4 / Shape::kSide;    // that share a query row
  static constexpr bool kKeepsTargets = kSets == 1;  // in registers; else they would not fit
  static constexpr int kUnits = Shape::kTile == 256 ? 1 : 2;  // that have accumulators; two of 256 columns would not fit
  static constexpr u32 kStep = Shape::kTakesTurns ? 2 : 1;    // from one of this consumer's blocks to the next
  static_assert(kUnits == 2 || kTiles == 1, "two tiles go in turns to two sets of accumulators");

  // Where token 0 of a query row would go, and which tokens it sees.
  struct Target {
    u64 out;
    int begin;
    u32 count;
  };

  const LogitsLayout<Shape>& shared;
  const int consumer, warp, lane;
  const bool out_is_bf16;
  RingPlace<Shape> multiplied, finished;  // the next block to multiply, and to make logits of
  u32 buffer = 0;
  int token = 0;  // of this thread, in the next block to finish
  Target targets[kTiles];
  u32 weights[kTiles][kOwn / 2];  // of the products that sum over heads
  u32 positive[kOwn];
  float scale, scale_8;
  float accumulators[kUnits][2 * kOwn];

  __device__ __forceinline__ LogitsConsumer(const LogitsParams& p, const LogitsLayout<Shape>& shared, int consumer)
      : shared(shared),
        consumer(consumer),
        warp(threadIdx.x % kWarpgroup / 32),
        lane(threadIdx.x % 32),
        out_is_bf16(p.out_is_bf16) {
    if (Shape::kTakesTurns) {
      multiplied.advance(consumer);
      finished.advance(consumer);
    }
#pragma unroll
    for (auto& unit : accumulators) {
#pragma unroll
      for (float& x : unit) x = 0.0f;
    }
  }

  // Of the two tokens that it has parts of, the one that a lane stores; with a query row of its own it stores that + 8 too.
  __device__ __forceinline__ int token_in_block() const {
    return 16 * warp + lane / 4 + (kLanes == 1 ? 0 : lane % 2 * 8);
  }
  __device__ __forceinline__ int tile(int i) const { return Shape::kTakesTurns ? 0 : consumer * kTiles + i; }

  __device__ __forceinline__ Target load_target(int tile, int set) const {
    const int row = (tile * kSets + set) * Shape::kSide + lane % 4 / kLanes;
    const uint4 words = load_shared_16(shared.targets_of(buffer) + row * 16);
    return {static_cast<u64>(words.y) << 32 | words.x, static_cast<int>(words.z), words.w - words.z};
  }

  // What a segment's units have in common.
  __device__ __forceinline__ void load_segment() {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (kKeepsTargets) targets[t] = load_target(tile(t), 0);
#pragma unroll
      for (int i = 0; i < kOwn / 2; ++i) {
        const float2 pair = load_shared_float2(shared.weights_of(buffer) + tile(t) * Shape::kTile * 4 + i * 32 + lane % 4 * 8);
        weights[t][i] = weight_pair(pair);
      }
    }
  }

  // accumulators = block x tile, begun.
  template <int kParity>
  __device__ __forceinline__ void multiply() {
    if (kTiles == 1 || kParity == 0)
      mbarrier_wait(shared.full(multiplied.slot), multiplied.phase, "a block of tokens");
    const u32 tokens = shared.block(multiplied.slot);
    const u32 columns = shared.query_of(buffer) + tile(kTiles == 2 ? kParity : 0) * LogitsLayout<Shape>::kTileBytes;
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < Shape::kDim; k += 32)
      wgmma_e4m3_async(accumulators[kParity], descriptor_of_rows<Shape::kDim>(tokens, k),
                       descriptor_of_rows<Shape::kDim>(columns, k), k > 0);
    warpgroup_commit();
    if (kTiles == 1 || kParity == 1) multiplied.advance(kStep);
  }

  // The product is done: positive parts leave the accumulators, and the block's slot is free, with it or with the product by
  // the other tile.
  template <int kParity>
  __device__ __forceinline__ void take() {
    keep_behind_wait(accumulators[kParity]);
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      positive[i] = pack_positive(accumulators[kParity][2 * i], accumulators[kParity][2 * i + 1]);
    const u32 scales = shared.scales_of(finished.slot) + token_in_block() * 4;
    scale = load_shared_float(scales);
    scale_8 = kLanes == 1 ? load_shared_float(scales + 32) : 0.0f;
    if (kTiles == 1 || kParity == 1) {
      __syncwarp();
      if (lane == 0) mbarrier_arrive(shared.free(finished.slot));
      finished.advance(kStep);
    }
  }

  // Positive parts -> logits.
  template <int kParity>
  __device__ __forceinline__ void finish() {
    constexpr int kTile = kTiles == 2 ? kParity : 0;
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      const Target target = kKeepsTargets ? targets[kTile] : load_target(tile(kTile), set);
      float low, high;
      sum_heads(positive, weights[kTile], set, low, high);
      if (kLanes == 1) {
        store(target, token, low * scale);
        store(target, token + 8, high * scale_8);
      } else {
        store(target, token, (lane % 2 ? high : low) * scale);
      }
    }
    if (kTiles == 1 || kParity == 1) token += kStep * kBlockTokens;
  }

  // Two weights of neighbouring columns as an operand: for column lane / 4 of the product, which is the upper (even) or lower
  // half of the weights of a query row, 0 for those of other rows.
  __device__ __forceinline__ u32 weight_pair(const float2& pair) const {
    const int row = lane / 8 / kLanes;
    const bool lower = lane / 4 % 2;
    const float2 own = {(lane % 4 * 2) / Shape::kHeadsSide == row ? pair.x : 0.0f,
                        (lane % 4 * 2 + 1) / Shape::kHeadsSide == row ? pair.y : 0.0f};
    const u32 upper = pack_pair<Bf16>(own.x, own.y);
    const float2 rounded = unpack_pair<Bf16>(upper);
    const u32 rest = pack_pair<Bf16>(rounded.x == own.x ? 0.0f : own.x - rounded.x, rounded.y == own.y ? 0.0f : own.y - rounded.y);
    return lower ? rest : upper;
  }

  // sum of weight * max(product, 0) over the heads of a query row, for two tokens.
  __device__ __forceinline__ static void sum_heads(const u32 (&positive)[kOwn], const u32 (&weights)[kOwn / 2],
                                                   int set, float& low, float& high) {
    constexpr int kSteps = Shape::kSetColumns / 16, kChains = kSteps < 4 ? kSteps : 4;
    float sums[kChains][4];
#pragma unroll
    for (int c = 0; c < kChains; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[c][i] = 0.0f;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int step = set * kSteps + i;
      mma_m16n8k16(sums[i % kChains], positive + 4 * step, weights[2 * step], weights[2 * step + 1]);
    }
    low = high = 0.0f;
#pragma unroll
    for (int c = 0; c < kChains; ++c) {
      low += sums[c][0] + sums[c][1];
      high += sums[c][2] + sums[c][3];
    }
  }

  // Of four lanes with one sum the first two store it, a token each.
  __device__ __forceinline__ void store(const Target& target, int token, float logit) const {
    const bool valid = static_cast<u32>(token - target.begin) < target.count && (kLanes < 4 || lane % 4 < 2);
    const u64 out = target.out + static_cast<i64>(token) * (out_is_bf16 ? 2 : 4);
    store_global_float_if(valid && !out_is_bf16, out, logit);
    store_global_low_half_if(valid && out_is_bf16, out, pack_pair<Bf16>(logit, 0.0f));
  }

  // A unit, whose product is done; with kMore the next one into its accumulators begins before its logits are made.
  template <int kParity, bool kMore>
  __device__ __forceinline__ void step() {
    take<kParity>();
    if constexpr (kMore) multiply<kParity>();
    finish<kParity>();
  }

  // All units of a segment into one set of accumulators.
  __device__ __forceinline__ void score_singly(int units) {
    multiply<0>();
#pragma unroll 1
    for (; units > 1; --units) {
      warpgroup_wait<0>();
      step<0, true>();
    }
    warpgroup_wait<0>();
    step<0, false>();
  }

  // All units of a segment, of which there are some, in turns into two sets of accumulators.
  __device__ __forceinline__ void score_in_pairs(int units) {
    multiply<0>();
    if (units == 1) {
      warpgroup_wait<0>();
      step<0, false>();
      return;
    }
    multiply<1>();
    warpgroup_wait<1>();
    int left = units;
#pragma unroll 1
    for (; left > 3; left -= 2) {
      step<0, true>();
      warpgroup_wait<1>();
      step<1, true>();
      warpgroup_wait<1>();
    }
    if (left == 2) {
      step<0, false>();
      warpgroup_wait<0>();
      step<1, false>();
    } else {
      step<0, true>();
      warpgroup_wait<1>();
      step<1, false>();
      warpgroup_wait<0>();
      step<0, false>();
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
      load_segment();
      const int skipped = Shape::kTakesTurns ? (before ^ consumer) & 1 : 0;
      const int mine = Shape::kTakesTurns ? (blocks - skipped + 1) / 2 : blocks;
      token = (first + skipped) * kBlockTokens + token_in_block();
      if (mine > 0) {
        if constexpr (kUnits == 1)
          score_singly(mine);
        else
          score_in_pairs(mine * kTiles);
      }
      before += blocks;
      mbarrier_arrive(shared.query_free(buffer));  // every lane for what it read itself
    }
  }
};

}  // namespace cumla
