// SPDX-License-Identifier: Apache-2.0
// The consumer role of mqa_logits and paged_mqa_logits: from the products to the stored logits.
#pragma once
#include "indexer/mqa_logits/layout.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"
#include "ptx/wgmma.cuh"

namespace cumla::indexer {

using namespace ptx;

// A unit is one product, of a block and a tile. Units alternate between two sets of accumulators; units of 256
// columns have one set (docs/kernels/indexer.md). A consumer with two tiles multiplies each block by both.
//
// A lane's accumulators are of tokens 16 warp + lane / 4 and 8 more, columns 2 (lane % 4) and 1 more of each eight.
// These two columns belong to one query row. Of a set of kSide query rows side by side, a lane has one.
template <typename Shape>
struct LogitsConsumer {
  static constexpr int kTiles = Shape::kTakesTurns ? 1 : Shape::kTiles / 2;  // of one consumer
  static constexpr int kSets = Shape::kSets;
  static constexpr int kColumnsPerThread = Shape::kTile / 4;  // 8 (i / 2) + 2 (lane % 4) + i % 2
  static constexpr int kColumnsOfSet = kColumnsPerThread / kSets;  // those of one query row
  static constexpr int kLanes = 4 / Shape::kSide;    // that share a query row
  static constexpr bool kKeepsTargets = kSets == 1;  // in registers; with more sets they would not fit
  // Units that have accumulators; two of 256 columns would not fit.
  static constexpr int kUnits = Shape::kTile == 256 ? 1 : 2;
  static constexpr u32 kStep = Shape::kTakesTurns ? 2 : 1;    // between this consumer's blocks
  static_assert(kUnits == 2 || kTiles == 1, "two tiles go in turns to two sets of accumulators");

  // The address of a query row's token 0 in the output, and the tokens that the row sees.
  struct Target {
    u64 out;
    int begin;
    u32 count;
  };

  const LogitsLayout<Shape>& shared;
  const int consumer, warp, lane;
  const bool out_is_bf16;
  RingPlace<Shape::kStages> multiplied, finished;  // the next block to multiply, and the next one to finish
  u32 buffer = 0;
  int token = 0;  // of this thread, in the next block to finish
  Target targets[kTiles];
  float weights[kTiles][kColumnsPerThread];
  float accumulators[kUnits][2 * kColumnsPerThread];

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

  // The token whose logit this lane stores (it holds partial sums of two). If it has a query row alone, it also
  // stores that of the token eight later.
  __device__ __forceinline__ int token_in_block() const {
    return 16 * warp + lane / 4 + (kLanes == 1 ? 0 : lane % 2 * 8);
  }
  __device__ __forceinline__ int tile(int i) const { return Shape::kTakesTurns ? 0 : consumer * kTiles + i; }

  __device__ __forceinline__ Target load_target(int tile, int set) const {
    const int row = (tile * kSets + set) * Shape::kSide + lane % 4 / kLanes;
    const uint4 words = load_shared_16(shared.targets_of(buffer) + row * 16);
    return {static_cast<u64>(words.y) << 32 | words.x, static_cast<int>(words.z), words.w - words.z};
  }

  // Loads what all units of a segment share.
  __device__ __forceinline__ void load_segment() {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (kKeepsTargets) targets[t] = load_target(tile(t), 0);
#pragma unroll
      for (int i = 0; i < kColumnsPerThread; i += 2) {
        const float2 pair =
            load_shared_float2(shared.weights_of(buffer) + tile(t) * Shape::kTile * 4 + i * 16 + lane % 4 * 8);
        weights[t][i] = pair.x;
        weights[t][i + 1] = pair.y;
      }
    }
  }

  // Issues accumulators = block x tile.
  template <int kParity>
  __device__ __forceinline__ void multiply() {
    if (kTiles == 1 || kParity == 0)
      mbarrier_wait(shared.full(multiplied.slot), multiplied.phase, "a block of tokens");
    u32 tokens = shared.block(multiplied.slot);
    if constexpr (Shape::kMxfp4) {
      if (kTiles == 1 || kParity == 0) widen();
      tokens = shared.widened(consumer, which(multiplied));
    }
    const u32 columns = shared.query_of(buffer) + tile(kTiles == 2 ? kParity : 0) * LogitsLayout<Shape>::kTileBytes;
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < Shape::kDim; k += 32)
      wgmma_e4m3_async(accumulators[kParity], descriptor_of_rows<Shape::kDim>(tokens, k),
                       descriptor_of_rows<Shape::kDim>(columns, k), k > 0);
    warpgroup_commit();
    if (kTiles == 1 || kParity == 1) multiplied.advance(kStep);
  }

  // Widens the block that is multiplied next to e4m3. Its former block has been multiplied. A thread has half of a
  // token's columns. Numbers are multiplied by a power of two, so that those of the largest scale are at most 384; what
  // is 2^15 smaller than the largest may lose bits.
  __device__ __forceinline__ void widen() const {
    static_assert(!Shape::kMxfp4 || Shape::kDim == 128, "two threads have a token's four groups of 32 columns");
    const int thread = threadIdx.x % kWarpgroup, token = thread / 2, half = thread % 2;
    const u32 codes = shared.block(multiplied.slot) + token * 64 + half * 32;
    const u32 exponents = load_shared_u32(shared.scales_of(multiplied.slot) + token * 4);
    u32 highest = exponents & 0xff;
#pragma unroll
    for (int group = 1; group < 4; ++group) highest = max(highest, exponents >> 8 * group & 0xff);
    sync();  // all warps have waited for the products with the former block
    const u32 row = shared.widened(consumer, which(multiplied)) + token * 128;
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const int exponent = exponents >> 8 * (2 * half + g) & 0xff;
      const float factor = power_of(kTopExponent + exponent - static_cast<int>(highest));
      const u32 low = pack_e4m3x4(0.0f * factor, 0.5f * factor, factor, 1.5f * factor);
      const u32 high = pack_e4m3x4(2.0f * factor, 3.0f * factor, 4.0f * factor, 6.0f * factor);
      const uint4 words = load_shared_16(codes + g * 16);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u32 first = i == 0 ? words.x : words.z, second = i == 0 ? words.y : words.w;
        const int chunk = half * 4 + g * 2 + i;
        store_shared_16(row + ((chunk ^ (token & 7)) << 4),
                        {e4m3_of(first, low, high), e4m3_of(first >> 16, low, high), e4m3_of(second, low, high),
                         e4m3_of(second >> 16, low, high)});
      }
    }
    const float scale =
        highest == 0xff ? __uint_as_float(0x7fffffff) : power_of(static_cast<int>(highest) - 127 - kTopExponent);
    if (half == 0) store_shared_float(shared.widened_scales(consumer, which(multiplied)) + token * 4, scale);
    fence_proxy_async_shared();
    sync();
  }
  // The index, among a consumer's two widened blocks, of the block of a slot.
  __device__ __forceinline__ static int which(const RingPlace<Shape::kStages>& place) {
    static_assert(!Shape::kMxfp4 || Shape::kStages % (2 * kStep) == 0, "they alternate");
    return place.slot / kStep % 2;
  }
  static constexpr int kTopExponent = 6;  // 6 * 2^6 is an e4m3 number
  __device__ __forceinline__ static float power_of(int exponent) {
    return __uint_as_float(static_cast<u32>(max(exponent + 127, 0)) << 23);
  }
  // Four e2m1 numbers, the low half of `codes`, as e4m3: tables have all magnitudes.
  __device__ __forceinline__ static u32 e4m3_of(u32 codes, u32 low, u32 high) {
    const u32 twice = __byte_perm(codes, 0, 0x1100);  // a number has half of its byte
    return __byte_perm(low, high, codes & 0x7777) | (twice << 4 & 0x00800080) | (twice & 0x80008000);
  }
  __device__ __forceinline__ void sync() const {
    if (consumer == 0)
      named_barrier_sync<kWidenBarrier, kWarpgroup>();
    else
      named_barrier_sync<kWidenBarrier + 1, kWarpgroup>();
  }
  static constexpr int kWidenBarrier = 1;  // and the next one

  // Turns accumulators into logits. Called after the product. After the block's last tile its slot is freed.
  template <int kParity>
  __device__ __forceinline__ void finish() {
    constexpr int kTile = kTiles == 2 ? kParity : 0;
    constexpr bool kLast = kTiles == 1 || kParity == 1;
    keep_behind_wait(accumulators[kParity]);
    const u32 of_block =
        Shape::kMxfp4 ? shared.widened_scales(consumer, which(finished)) : shared.scales_of(finished.slot);
    const u32 scales = of_block + token_in_block() * 4;
    const float scale = load_shared_float(scales);
    const float scale_8 = kLanes == 1 ? load_shared_float(scales + 32) : 0.0f;
    if (kLast) {
      __syncwarp();
      if (lane == 0) mbarrier_arrive(shared.free(finished.slot));  // plant: block read
      finished.advance(kStep);
    }
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      const Target target = kKeepsTargets ? targets[kTile] : load_target(tile(kTile), set);
      float low, high;
      sum_heads(accumulators[kParity], weights[kTile], set, low, high);
      if (kLanes == 1) {
        store(target, token, low * scale);
        store(target, token + 8, high * scale_8);
      } else {
        float sum = take_half(low, high);
        if (kLanes == 4) sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        store(target, token, sum * scale);
      }
    }
    if (kLast) token += kStep * kBlockTokens;
  }

  // sum of weight * max(product, 0) over this thread's heads of a query row.
  __device__ __forceinline__ static void sum_heads(const float (&accumulators)[2 * kColumnsPerThread],
                                                   const float (&weights)[kColumnsPerThread], int set, float& low,
                                                   float& high) {
    low = high = 0.0f;
#pragma unroll
    for (int i = set * kColumnsOfSet; i < (set + 1) * kColumnsOfSet; ++i) {
      low = __fmaf_rn(fmaxf(accumulators[4 * (i / 2) + i % 2], 0.0f), weights[i], low);
      high = __fmaf_rn(fmaxf(accumulators[4 * (i / 2) + 2 + i % 2], 0.0f), weights[i], high);
    }
  }

  // Two neighbouring lanes have parts of two sums. One gets the first sum, the other the second.
  __device__ __forceinline__ float take_half(float low, float high) const {
    const bool second = lane % 2;
    return (second ? high : low) + __shfl_xor_sync(0xffffffffu, second ? low : high, 1);
  }

  // If four lanes have the same sum, the first two store it, one token each.
  __device__ __forceinline__ void store(const Target& target, int token, float logit) const {
    const bool valid = static_cast<u32>(token - target.begin) < target.count && (kLanes < 4 || lane % 4 < 2);
    const u64 out = target.out + static_cast<i64>(token) * (out_is_bf16 ? 2 : 4);
    store_global_float_if(valid && !out_is_bf16, out, logit);
    store_global_low_half_if(valid && out_is_bf16, out, pack_pair<Bf16>(logit, 0.0f));
  }

  // Computes all units of a segment with one set of accumulators.
  __device__ __forceinline__ void score_singly(int units) {
#pragma unroll 1
    for (; units > 0; --units) {
      multiply<0>();
      warpgroup_wait<0>();
      finish<0>();
    }
  }

  // Computes all units of a segment, at least one, with two alternating sets of accumulators.
  __device__ __forceinline__ void score_in_pairs(int units) {
    multiply<0>();
    int left = units;
#pragma unroll 1
    for (; left > 2; left -= 2) {
      multiply<1>();
      warpgroup_wait<1>();
      finish<0>();
      multiply<0>();
      warpgroup_wait<1>();
      finish<1>();
    }
    if (left == 2) {  // always so with two tiles; the test stays, because ptxas would serialise the products without it
      multiply<1>();
      warpgroup_wait<1>();
      finish<0>();
      warpgroup_wait<0>();
      finish<1>();
    } else {
      warpgroup_wait<0>();
      finish<0>();
    }
  }

  // Computes all segments that the query warps announce.
  __device__ __forceinline__ void run() {
    u32 before = 0;  // blocks of earlier segments, modulo 2^32
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
      if constexpr (kUnits == 1)
        score_singly(mine);
      else if (mine > 0)
        score_in_pairs(mine * kTiles);
      before += blocks;
      mbarrier_arrive(shared.query_free(buffer));  // each lane arrives for what it read itself
    }
  }
};

}  // namespace cumla::indexer
