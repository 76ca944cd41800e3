// SPDX-License-Identifier: Apache-2.0
// The consumer role of mla_decode: from scores to the stored output.
#pragma once
#include "mla/mla_decode/masked.cuh"
#include "mla/mla_decode/shared.cuh"
#include "attend/reduce.cuh"
#include "split/join.cuh"
#include "ptx/cluster.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"
#include "ptx/wgmma.cuh"

namespace cumla::mla {

using namespace attend;
using namespace ptx;
using namespace split;

struct TreeTile;  // mla/mla_decode/tree.cuh
template <typename AnyTile>
constexpr bool kHasTree = __is_base_of(TreeTile, AnyTile);

// max_logits: the largest base-2 scores of a lane's two rows. It is an empty base for tiles without max_logits,
// because an unused member changes the order of instructions that ptxas chooses.
template <bool kHasMaxLogits>
struct MaxLogits {};
template <>
struct MaxLogits<true> {
  float max_logit[2];
};

// A tile of the query in registers: products then read less from shared memory.
template <bool kHolds>
struct HeldQuery {};
template <>
struct HeldQuery<true> {
  u32 query[16];
};

// A tile over e4m3 rows, which kSharing CTAs of a cluster convert to float16 (mla/mla_decode_fp8_converted.cu).
template <typename Base, int kSharing, int kVariant = 0>
struct ConvertedTile : Base {
  static constexpr int kCtas = kSharing;
  static constexpr bool kFetchesAhead = kVariant & 1, kOtherFirst = kVariant & 2, kCopies = kVariant & 4,
                        kFences = kVariant & 8, kTwoLoaders = kVariant & 16, kWideProducts = !kTwoLoaders;
  using Base::Base;
};
template <typename AnyTile>
constexpr int kCtasOf = 0;
template <typename Base, int kSharing, int kVariant>
constexpr int kCtasOf<ConvertedTile<Base, kSharing, kVariant>> = kSharing;
// Factors of the scores of each query row of a converted tile, then that of the output.
template <typename Layout>
__device__ __forceinline__ u32 score_factor_in(const Layout& shared, int row) {
  return shared.max_logit(row);
}

// The dtype of 16-bit results.
template <typename T, bool kIsConverted>
struct ResultOf {
  using Type = T;
};
template <>
struct ResultOf<Fp16, true> {
  using Type = Bf16;
};

// One consumer warpgroup. A lane's accumulators are of rows 16 warp + lane / 4 and 8 more, columns 2 (lane % 4) and 1
// more of each eight. kCopied: threads copied the tiles, not TMA.
template <typename T, bool kSharedBlocks, bool kCopied, typename AnyTile>
struct Consumer : MaxLogits<AnyTile::kHasMaxLogits>,
                  HeldQuery<kSharedBlocks && AnyTile::kOtherFirst && kCtasOf<AnyTile> == 0> {
  // The tiles of a half of V share the barrier of the first one. With one row tile this would spill registers.
  static constexpr bool kByHalves = kCopied && kSharedBlocks;
  static constexpr bool kOtherFirst = kSharedBlocks && AnyTile::kOtherFirst;
  using Layout = SharedLayoutOf<AnyTile::kLatentTiles>;
  static constexpr bool kIsConverted = kCtasOf<AnyTile> > 0, kHolds = kOtherFirst && !kIsConverted;
  using Result = typename ResultOf<T, kIsConverted>::Type;
  static constexpr int kTiles = Layout::kTiles, kHalfTiles = Layout::kHalfTiles, kValueDim = Layout::kValueDim;
  static constexpr int kOutputs = kValueDim / 4;  // of a thread
  static constexpr int kHalfChunks = 8 * kHalfTiles;  // of 16 bytes, of a row's half of V
  static constexpr int kFirst = AnyTile::kHasRope ? 0 : 1;  // tile in order

  const MlaDecodeParams& p;
  const Layout& shared;
  const AnyTile& tile;
  const int consumer, warp, lane, row;
  float output[kOutputs];
  float scores[32];
  u32 probabilities[16];
  float maximum[2];          // base-2 running maximum of the two rows
  float sum[2];              // of exponentials of this consumer's blocks, for the log-sum-exp
  float weight[2];           // of the same as rounded 16-bit probabilities, which normalises the output
  int limit[2];              // visible tokens of the two rows

  __device__ __forceinline__ Consumer(const MlaDecodeParams& p, const Layout& shared, const AnyTile& tile,
                                      int consumer)
      : p(p), shared(shared), tile(tile), consumer(consumer),
        warp(threadIdx.x % kWarpgroup / 32),
        lane(threadIdx.x % 32),
        row(warp * 16 + lane / 4) {}

  __device__ __forceinline__ void arrive(u32 barrier) const {  // a lane per warp
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier);
  }

  // Frees a third of a stage, in both CTAs if the rows are converted.
  __device__ __forceinline__ void arrive_free(u32 barrier) const {
    arrive(barrier);
    if constexpr (kCtasOf<AnyTile> == 2)
      if (lane == 1) mbarrier_arrive_cluster(shared_address_in(barrier, blockIdx.x & 1 ^ 1));
  }

  // An address as descriptors have it. In a cluster, bits 24 and up of an address are the rank of its CTA.
  __device__ __forceinline__ static u32 in_descriptor(u32 address) {
    if constexpr (kCtasOf<AnyTile> == 2)
      return address & 0x3ffff;
    else
      return address;
  }

  // The factor that turns a row's products into base-2 scores.
  __device__ __forceinline__ float score_factor(int r) const {
    if constexpr (kIsConverted)
      return load_shared_float(score_factor_in(shared, row + 8 * r));
    else
      return p.scale_log2;
  }

  __device__ __forceinline__ void begin(const Segment& segment) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) output[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      maximum[r] = kLowest;
      sum[r] = 0.0f;
      weight[r] = 0.0f;
      if constexpr (AnyTile::kHasMaxLogits) this->max_logit[r] = -kInfinity;
      limit[r] = segment.tokens - tile.shift_of(p, row + 8 * r);
    }
  }

  // scores = query x block t, asynchronously.
  __device__ __forceinline__ void multiply_query(int t) {
    const int at = Layout::stage_of(t, consumer);
    const u32 stage = shared.stage(at);
    const u32 phase = Layout::phase_of(t);
#pragma unroll
    for (int i = kFirst; i < kTiles; ++i) {
      const int column = tile_in_order<AnyTile::kLatentTiles>(consumer, i);
      if (!kByHalves || i == 0 || i % kHalfTiles == 1) {
        mbarrier_wait(shared.full(at, column), phase, "KV tiles");  // plant: tiles
        if constexpr (kCopied) fence_proxy_async_shared();
      }
      warpgroup_arrive();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const u64 rows = descriptor_of_rows<128>(in_descriptor(stage), column * kTileBytes + k * 32);
        if constexpr (kHolds) {
          if (i == kFirst) {
            wgmma_m64n64k16_async<T>(scores, this->query + 4 * k, rows, k > 0);
            continue;
          }
        }
        wgmma_m64n64k16_async<T>(
            scores, descriptor_of_rows<128>(in_descriptor(shared.query), column * kTileBytes + k * 32), rows,
            i + k > kFirst);
      }
    }
    warpgroup_commit();
  }

  // Loads the tile of the query that is used first.
  __device__ __forceinline__ void hold_query() {
    const int query_row = warp * 16 + lane % 16;
    const u32 from = shared.query + tile_in_order<AnyTile::kLatentTiles>(consumer, kFirst) * kTileBytes +
                     query_row * 128;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      u32 words[4];
      load_matrix_x4(words, from + ((2 * k + lane / 16 ^ query_row & 7) << 4));
#pragma unroll
      for (int i = 0; i < 4; ++i) this->query[4 * k + i] = words[i];
    }
  }

  __device__ __forceinline__ u64 value_descriptor(int stage, int k) const {
    return descriptor_of_rows<128, kTileBytes>(
        in_descriptor(shared.stage(stage) + consumer * kHalfTiles * kTileBytes), k * 2048);
  }

  // output += own probabilities x this consumer's half of V, asynchronously.
  __device__ __forceinline__ void multiply_own(int stage) {
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; ++k) multiply_values(probabilities + 4 * k, value_descriptor(stage, k));
    warpgroup_commit();
  }

  // output += the other consumer's probabilities x this consumer's half of V, asynchronously.
  __device__ __forceinline__ void multiply_other(int stage) {
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      multiply_values(descriptor_of_rows<128>(in_descriptor(shared.probabilities), k * 32), value_descriptor(stage, k));
    warpgroup_commit();
  }
  __device__ __forceinline__ void begin_products() {
    if constexpr (!AnyTile::kWideProducts) keep_before_products(output);
    warpgroup_arrive();
  }
  // a: probabilities in registers or in shared memory.
  template <typename Operand>
  __device__ __forceinline__ void multiply_values(Operand a, u64 values) {
    if constexpr (kOutputs < 128) {
      wgmma_values_async<T>(output, a, values);
    } else if constexpr (AnyTile::kWideProducts) {
      wgmma_m64n256k16_async<T>(output, a, values);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        wgmma_values_async<T>(reinterpret_cast<float (&)[64]>(output[64 * half]), a,
                              values + half * (2 * kTileBytes >> 4));
    }
  }

  // Rows past the end of the request may hold NaN. Their probabilities are 0, but 0 x NaN is NaN.
  __device__ __forceinline__ void clear_values_past(int stage, int valid) {
    const u32 half = shared.stage(stage) + consumer * kHalfTiles * kTileBytes;
    for (int i = valid * kHalfChunks + threadIdx.x % kWarpgroup; i < kBlockTokens * kHalfChunks; i += kWarpgroup)
      store_shared_zero_16(half + (i % kHalfChunks / 8) * kTileBytes + (i / kHalfChunks) * 128 + (i % 8) * 16);
    fence_proxy_async_shared();
    consumer_sync(consumer);
  }

  // The same for the rows of a block before the windows of all rows of the tile.
  __device__ __forceinline__ void clear_values_before(int stage, int block) {
    const int hidden = min(tile.first_seen - block * kBlockTokens, kBlockTokens);
    if (hidden <= 0) return;
    const u32 half = shared.stage(stage) + consumer * kHalfTiles * kTileBytes;
    for (int i = threadIdx.x % kWarpgroup; i < hidden * kHalfChunks; i += kWarpgroup)
      store_shared_zero_16(half + (i % kHalfChunks / 8) * kTileBytes + (i / kHalfChunks) * 128 + (i % 8) * 16);
    fence_proxy_async_shared();
    consumer_sync(consumer);
  }

  __device__ __forceinline__ void mask_scores(int block) {
    const int column = block * kBlockTokens + (lane % 4) * 2;
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (column + 8 * j + (e & 1) >= limit[e >> 1]) scores[4 * j + e] = -kInfinity;
  }

  // Masks the scores before the windows of the two rows.
  __device__ __forceinline__ void mask_before_windows(int block) {
    if (block * kBlockTokens >= tile.seen_by_all) return;
    const int column = block * kBlockTokens + (lane % 4) * 2;
    const int first[2] = {tile.first_of(p, row), tile.first_of(p, row + 8)};
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (column + 8 * j + (e & 1) < first[e >> 1]) scores[4 * j + e] = -kInfinity;
  }

  // Masks the scores of keys that the two rows do not see by their bits.
  __device__ __forceinline__ void mask_by_tree(const Segment& segment, int block) {
    const int begin = block * kBlockTokens;
    if (begin + kBlockTokens <= tile.position) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int own = tile.own_token(p, row + 8 * r);
      const u64 seen = tile.visible_keys(p, segment, own, begin) >> lane % 4 * 2;
      const u32 words[2] = {static_cast<u32>(seen), static_cast<u32>(seen >> 32)};
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (!(words[j / 4] >> (j % 4 * 8 + e) & 1)) scores[4 * j + 2 * r + e] = -kInfinity;
    }
  }

  // Zeros the rows of V that no row of the tile sees by its bits, and those past the end. Whether a block has such rows
  // is not asked of the bits: threads whose answers differ would wait for each other for ever.
  __device__ __forceinline__ void clear_unseen_values(const Segment& segment, int stage, int block) {
    const int begin = block * kBlockTokens;
    if (begin + kBlockTokens <= tile.position) return;
    u64 seen = 0;
    const int last_own = tile.own_token(p, tile.rows - 1);
#pragma unroll 1
    for (int own = tile.own_token(p, 0); own <= last_own; ++own)
      seen |= tile.visible_keys(p, segment, own, begin);
    const u32 half = shared.stage(stage) + consumer * kHalfTiles * kTileBytes;
#pragma unroll 1
    for (int i = threadIdx.x % kWarpgroup; i < kBlockTokens * kHalfChunks; i += kWarpgroup)
      if (!(seen >> (i / kHalfChunks) & 1))
        store_shared_zero_16(half + (i % kHalfChunks / 8) * kTileBytes + (i / kHalfChunks) * 128 + (i % 8) * 16);
    fence_proxy_async_shared();
    consumer_sync(consumer);
  }

  // Masks the scores of absent rows.
  __device__ __forceinline__ void mask_absent(int t) {
    const uint4 exist = tile.exist(shared, t);
    const u32 words[4] = {exist.x, exist.y, exist.z, exist.w};
    if ((words[0] & words[1] & words[2] & words[3]) == 0xffff) return;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const u32 own = words[j / 2] >> (j % 2 * 8 + lane % 4 * 2);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (!(own >> (e & 1) & 1)) scores[4 * j + e] = -kInfinity;
    }
  }

  // Makes `next` the running maximum, and rescales what was summed so far. It rarely has work.
  __device__ __forceinline__ void rescale(const float (&next)[2]) {
    if (!__any_sync(0xffffffffu, next[0] != maximum[0] || next[1] != maximum[1])) return;
    const float factor[2] = {exp2_approx(maximum[0] - next[0]), exp2_approx(maximum[1] - next[1])};
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) output[i] *= factor[i >> 1 & 1];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] *= factor[r];
      weight[r] *= factor[r];
      maximum[r] = next[r];
    }
  }

  // Largest of the scores [kFrom, kTo) of a row, as a tree.
  template <int kFrom, int kTo>
  __device__ __forceinline__ float highest_of(int r) const {
    if constexpr (kTo - kFrom == 1)
      return scores[kFrom / 2 * 4 + 2 * r + kFrom % 2];
    else
      return fmaxf(highest_of<kFrom, (kFrom + kTo) / 2>(r), highest_of<(kFrom + kTo) / 2, kTo>(r));
  }

  // Computes the new running maximum. Lanes exchange theirs only if one exceeds the slack.
  __device__ __forceinline__ void raise_maximum(float (&next)[2]) {
    float highest[2];
    bool grown = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      highest[r] = highest_of<0, 16>(r) * score_factor(r);
      if constexpr (AnyTile::kHasMaxLogits) this->max_logit[r] = fmaxf(this->max_logit[r], highest[r]);
      grown |= highest[r] > maximum[r] + kMaximumSlack;
      next[r] = maximum[r];
    }
    if (!__any_sync(0xffffffffu, grown)) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      highest[r] = max_of_quad(highest[r]);
      if (highest[r] > maximum[r] + kMaximumSlack) next[r] = highest[r];
    }
  }

  // Turns scores [kFrom, kTo) into probabilities relative to `next`, and adds their unrounded values to the sums.
  template <int kFrom, int kTo>
  __device__ __forceinline__ void exponentiate(const float (&next)[2], float (&block_sum)[2]) {
    const float factor[2] = {score_factor(0), score_factor(1)};
#pragma unroll
    for (int i = kFrom; i < kTo; i += 2) {
      const int r = i >> 1 & 1;
      const float low = exp2_approx(__fmaf_rn(scores[i], factor[r], -next[r]));
      const float high = exp2_approx(__fmaf_rn(scores[i + 1], factor[r], -next[r]));
      block_sum[r] += low + high;
      probabilities[i / 2] = pack_pair<T>(low, high);
    }
  }

  // Of large scores the exact product differs from the rounded maximum by more than float16 can hold: both are rounded.
  __device__ __forceinline__ void exponentiate_large(const float (&next)[2], float (&block_sum)[2]) {
    constexpr float kLarge = 1 << 20;
    if (!__any_sync(0xffffffffu, fmaxf(fabsf(next[0]), fabsf(next[1])) >= kLarge)) return;
    const float factor[2] = {score_factor(0), score_factor(1)};
    block_sum[0] = block_sum[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      const int r = i >> 1 & 1;
      const float low = exp2_approx(__fmul_rn(scores[i], factor[r]) - next[r]);
      const float high = exp2_approx(__fmul_rn(scores[i + 1], factor[r]) - next[r]);
      block_sum[r] += low + high;
      probabilities[i / 2] = pack_pair<T>(low, high);
    }
  }

  // Stores probabilities and running maximum for the other consumer, which may read them once they are published.
  __device__ __forceinline__ void leave(const float (&next)[2]) {
    const int store_row = warp * 16 + lane % 16;
    const u32 address = shared.probabilities + store_row * 128;
#pragma unroll
    for (int k = 0; k < 4; ++k)
      store_matrix_x4(address + (((2 * k + lane / 16) ^ (store_row & 7)) << 4), probabilities[4 * k],
                      probabilities[4 * k + 1], probabilities[4 * k + 2], probabilities[4 * k + 3]);
    if (lane % 4 == 0) {
      store_shared_float(shared.maximum(consumer, row), next[0]);
      store_shared_float(shared.maximum(consumer, row + 8), next[1]);
    }
  }
  __device__ __forceinline__ void publish() {
    // Each thread that stored a maximum arrives itself: racecheck does not follow an order through another lane.
    fence_proxy_async_shared();
    __syncwarp();
    if (lane % 4 == 0) mbarrier_arrive(shared.probabilities_full(consumer));
  }

  // Waits for the other consumer's probabilities of block t, and takes over its running maximum. The barrier also
  // orders the block's tiles: the other consumer waited for all of them before.
  __device__ __forceinline__ void adopt(int t) {
    mbarrier_wait(shared.probabilities_full(1 - consumer), (t / 2) & 1, "the other's probabilities");  // plant: adopt
    // The lane that later arrives for this row loads, because racecheck needs that; then it shares with its quad.
    float next[2] = {0.0f, 0.0f};
    if (lane % 4 == 0) {
      next[0] = load_shared_float(shared.maximum(1 - consumer, row));
      next[1] = load_shared_float(shared.maximum(1 - consumer, row + 8));
    }
    next[0] = __shfl_sync(0xffffffffu, next[0], lane & ~3);
    next[1] = __shfl_sync(0xffffffffu, next[1], lane & ~3);
    rescale(next);
  }

  // Computes block i of the segment, counter t, which this consumer owns. kPrevious: block i - 1 of the other
  // consumer is multiplied here beside this block's softmax, or with kBefore before this block is scored. `scored`: the
  // scores exist already.
  template <bool kPrevious, bool kBefore = false>
  __device__ __forceinline__ void own_block(const Segment& segment, int i, int t, bool scored = false) {
    const int stage = Layout::stage_of(t, consumer), previous = Layout::stage_of(t - 1, 1 - consumer);
    if constexpr (kBefore) {
      adopt(t - 1);
      multiply_other(previous);
      multiply_query(t);
      warpgroup_wait<1>();
      arrive_free(shared.free(previous, consumer));
    } else if (!scored) {
      multiply_query(t);
    }
    if constexpr (kPrevious && !kBefore) {
      adopt(t - 1);
      if constexpr (kHasWindow<AnyTile>) clear_values_before(previous, segment.begin + i - 1);
      if constexpr (kHasTree<AnyTile>) clear_unseen_values(segment, previous, segment.begin + i - 1);
      multiply_other(previous);
      warpgroup_wait<1>();
    } else {
      warpgroup_wait<0>();
    }
    if constexpr (AnyTile::kHasRope) arrive_free(shared.free(stage, 2));
    if (i + 2 >= segment.blocks) arrive(shared.query_free());

    const int block = segment.begin + i;
    const int last_token = (block + 1) * kBlockTokens;
    if constexpr (AnyTile::kHasAbsent)
      mask_absent(t);
    else if constexpr (kHasTree<AnyTile>)
      mask_by_tree(segment, block);
    else if (last_token > segment.tokens - tile.most_shift)
      mask_scores(block);
    if constexpr (kHasWindow<AnyTile>) mask_before_windows(block);
    float next[2], block_sum[2] = {0.0f, 0.0f};
    raise_maximum(next);
    exponentiate<0, 16>(next, block_sum);
    if constexpr (kPrevious && !kBefore) {
      // The other block's product ends about here, and its stage should be freed. A pacing store that nothing reads
      // keeps sixteen exponentials between the product and its wait (docs/kernels/mla.md).
      store_shared_float(shared.pacer(threadIdx.x - kWarpgroup), block_sum[0] + block_sum[1]);
      warpgroup_wait<0>();
      arrive_free(shared.free(previous, consumer));
    }
    exponentiate<16, 32>(next, block_sum);
    if constexpr (kIsConverted && AnyTile::kWideProducts) exponentiate_large(next, block_sum);
    leave(next);
    rescale(next);
    // The sums are computed beside the product, from copies: registers of a wgmma in flight must not be read.
    u32 copies[16];
#pragma unroll
    for (int k = 0; k < 16; ++k) copies[k] = copy_of(probabilities[k]);
    if constexpr (kHasTree<AnyTile>)
      clear_unseen_values(segment, stage, block);
    else if (!AnyTile::kHasAbsent && last_token > segment.tokens)
      clear_values_past(stage, kBlockTokens + segment.tokens - last_token);
    if constexpr (kHasWindow<AnyTile>) clear_values_before(stage, block);
    multiply_own(stage);
    publish();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float block_weight = 0.0f;
#pragma unroll
      for (int k = r; k < 16; k += 2) block_weight += sum_of_pair<T>(copies[k]);
      sum[r] += block_sum[r];
      weight[r] += block_weight;
    }
    // A pacing store keeps one row's sum before the wait. Other tiles lack the register for it.
    if constexpr (AnyTile::kIsRagged) store_shared_float(shared.pacer(threadIdx.x - kWarpgroup), weight[1]);
    warpgroup_wait<0>();
    arrive_free(shared.free(stage, consumer));
  }

  // Multiplies a block of the other consumer by its probabilities.
  __device__ __forceinline__ void other_block(const Segment& segment, int i, int t) {
    adopt(t);
    const int stage = Layout::stage_of(t, 1 - consumer);
    const int last_token = (segment.begin + i + 1) * kBlockTokens;
    if constexpr (kHasTree<AnyTile>)
      clear_unseen_values(segment, stage, segment.begin + i);
    else if (!AnyTile::kHasAbsent && last_token > segment.tokens)
      clear_values_past(stage, kBlockTokens + segment.tokens - last_token);
    if constexpr (kHasWindow<AnyTile>) clear_values_before(stage, segment.begin + i);
    multiply_other(stage);
    warpgroup_wait<0>();
    arrive_free(shared.free(stage, consumer));
  }

  // True if the other consumer's probabilities of block t - 1 arrive before block t. No bit of the result depends on
  // it.
  __device__ __forceinline__ bool other_comes_first(int t) const {
    bool here = false, other = false;
    while (!here && !other) {
      const int column = tile_in_order<AnyTile::kLatentTiles>(consumer, 1);
      here = mbarrier_test(shared.full(Layout::stage_of(t, consumer), column), Layout::phase_of(t));
      if (!here) other = mbarrier_test(shared.probabilities_full(1 - consumer), ((t - 1) / 2) & 1);
    }
    // Warps vote, because each has looked for itself.
    return consumer == 0 ? named_barrier_any<kConsumerBarrier, kWarpgroup>(other)
                         : named_barrier_any<kConsumerBarrier + 1, kWarpgroup>(other);
  }

  __device__ __forceinline__ void compute(const Segment& segment, int t, u32 query_phase) {
    begin(segment);
    const int first = (consumer ^ t) & 1;  // first own block
    // Also with no block to score. Otherwise one query warp could run a segment ahead of the other.
    mbarrier_wait(shared.query_full(), query_phase, "the query");
    if constexpr (kHolds) hold_query();
    if (first >= segment.blocks) arrive(shared.query_free());
    if constexpr (kSharedBlocks) {
      int i = first;
      if (i == 0 && segment.blocks > 0) {
        own_block<false>(segment, 0, t);
        i = 2;
      }
      for (; i < segment.blocks; i += 2) {
        if (kOtherFirst && consumer == 0) {
          own_block<true, kOtherFirst>(segment, i, t + i);
        } else if (tile.frees_early(p) && other_comes_first(t + i)) {
          other_block(segment, i - 1, t + i - 1);
          own_block<false>(segment, i, t + i);
        } else {
          own_block<true>(segment, i, t + i);
        }
      }
      if (i == segment.blocks && i > 0) other_block(segment, i - 1, t + i - 1);
    } else {
      // Both consumers score their first blocks at once, so that a short segment is not one chain.
      bool scored = first == 1 && segment.blocks > 1;
      if (scored) {
        multiply_query(t + 1);
        warpgroup_wait<0>();
      }
      for (int i = 0; i < segment.blocks; ++i) {
        if (i % 2 == first) {
          own_block<false>(segment, i, t + i, scored);
          scored = false;
        } else {
          other_block(segment, i, t + i);
        }
      }
    }
  }

  // Adds the sums of both consumers, then stores out and log-sum-exp, or a partial result.
  __device__ __forceinline__ void finish(const Segment& segment, bool more) {
    float total[2], inverse[2], lse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = sum_of_quad(sum[r]);
      weight[r] = sum_of_quad(weight[r]);
      if (lane % 4 == 0) {
        store_shared_float(shared.sum(consumer, row + 8 * r), sum[r]);
        store_shared_float(shared.weight(consumer, row + 8 * r), weight[r]);
      }
      if constexpr (AnyTile::kHasMaxLogits) {
        this->max_logit[r] = max_of_quad(this->max_logit[r]);
        if (consumer == 1 && lane % 4 == 0) store_shared_float(shared.max_logit(row + 8 * r), this->max_logit[r]);
      }
    }
    consumers_sync();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      total[r] = load_shared_float(shared.sum(0, row + 8 * r)) + load_shared_float(shared.sum(1, row + 8 * r));
      const float rounded =
          load_shared_float(shared.weight(0, row + 8 * r)) + load_shared_float(shared.weight(1, row + 8 * r));
      inverse[r] = inverse_of_sum(rounded);
      if constexpr (kIsConverted) inverse[r] *= load_shared_float(score_factor_in(shared, kRowTile));
      lse[r] = log_sum_exp(maximum[r], total[r]);
      if constexpr (AnyTile::kHasMaxLogits)
        if (consumer == 0)
          this->max_logit[r] = fmaxf(this->max_logit[r], load_shared_float(shared.max_logit(row + 8 * r)));
    }
    consumers_sync();  // the next segment overwrites the sums
    // The hint changes the order of the main loop that ptxas chooses, for the better.
    if (__builtin_expect(segment.split(), 0)) {
      write_piece(segment, inverse, lse);  // plant: piece
      LatentJoiner<Result, AnyTile>(
          p,
          {shared.pacer(0), shared.probabilities, shared.sum(0, 0), shared.stage(0), shared.stage(Layout::kStages / 2)},
          tile, segment)
          .join(more);
    } else {
      if constexpr (AnyTile::kHasSinks)
#pragma unroll
        for (int r = 0; r < 2; ++r) take_sink(p, sink_of(p, tile, row + 8 * r), inverse[r], lse[r]);
      write_result(segment, inverse, lse);
    }
  }

  __device__ __forceinline__ void write_piece(const Segment& segment, const float (&inverse)[2],
                                              const float (&lse)[2]) const {
    if (warp >= p.row_groups) return;
    const i64 piece = piece_index(p, tile, blockIdx.y, segment.slot);
    if (consumer == 0 && lane % 4 == 0) {
      p.partial_rows[piece * p.row_groups * kRowGroup + row] = {lse[0], inverse[0]};
      p.partial_rows[piece * p.row_groups * kRowGroup + row + 8] = {lse[1], inverse[1]};  // plant: partial
      if constexpr (AnyTile::kHasMaxLogits)
#pragma unroll
        for (int r = 0; r < 2; ++r) *tile.partial_max_logit(p, piece, row + 8 * r) = this->max_logit[r];
    }
    float4* const to = copy_of(p.partial_out + piece_offset<kValueDim, kShortLines>(p, piece, consumer, warp, 0, lane));
    constexpr int kUnits = kValueDim / 64;
    auto eight = [&](int i) { return float4{output[4 * i], output[4 * i + 1], output[4 * i + 2], output[4 * i + 3]}; };
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
      store_short_unit(to + u * (kShortLines * 32),
                       {eight(u), eight(u + kUnits), eight(u + 2 * kUnits), eight(u + 3 * kUnits)});
  }

  __device__ __forceinline__ void write_result(const Segment& segment, const float (&inverse)[2],
                                               const float (&lse)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool exists = row + 8 * r < tile.rows;
      const Row to(p, tile, row + 8 * r);
      char* out = p.out + segment.request * p.out_stride_batch + to.token * p.out_stride_token +
                  to.head * p.out_stride_head;
      if (exists && consumer == 0 && lane % 4 == 0) {
        store_lse(p, tile, segment.request, to, lse[r]);
        if constexpr (AnyTile::kHasMaxLogits) tile.store_max_logit(p, segment.request, to, this->max_logit[r]);
      }
      if (p.out_is_float)
        write_floats(reinterpret_cast<float*>(out), r, exists, inverse[r]);
      else
        write_halves(out, r, exists, inverse[r]);
    }
  }

  __device__ __forceinline__ void write_floats(float* out, int r, bool exists, float inverse) const {
    if (!exists) return;
    out += consumer * (kValueDim / 2) + (lane % 4) * 2;
#pragma unroll
    for (int j = 0; j < kValueDim / 16; ++j)
      store_global_float2(out + 8 * j, output[4 * j + 2 * r] * inverse, output[4 * j + 2 * r + 1] * inverse);
  }

  // Lists with shared blocks: loads and stores compete, so the lanes of a quad exchange words until each has eight
  // adjacent columns. Otherwise lane pairs exchange halves of two adjacent groups: eight bytes per lane, full sectors
  // of 32 bytes. More code would cost the main loop of some kernels instructions.
  __device__ __forceinline__ void write_halves(char* out, int r, bool exists, float inverse) const {
    if constexpr (AnyTile::kIsList && kSharedBlocks) {
      const int quad_lane = copy_of(threadIdx.x) % 4;  // loaded anew: ptxas would keep it over the blocks
      const bool odd = quad_lane & 1, high = quad_lane & 2;
      out = copy_of(out + (consumer * 256 + quad_lane * 8) * 2);
      const auto policy = tile.policy(p);
#pragma unroll
      for (int j = 0; j < 32; j += 4) {
        u32 own[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          own[i] = pack_pair<Result>(output[4 * (j + i) + 2 * r] * inverse, output[4 * (j + i) + 2 * r + 1] * inverse);
        const uint2 low = trade<1>(odd, own[0], own[1]), later = trade<1>(odd, own[2], own[3]);
        const uint2 even = trade<2>(high, low.x, later.x), uneven = trade<2>(high, low.y, later.y);
        if (exists) store_global_16(out + 16 * j, even.x, uneven.x, even.y, uneven.y, policy);
      }
    } else {
      const bool odd = lane % 2;
      out = copy_of(out + (consumer * (kValueDim / 2) + (odd ? 8 + (lane % 4 - 1) * 2 : (lane % 4) * 2)) * 2);
#pragma unroll
      for (int j = 0; j < kValueDim / 16; j += 2) {
        const u32 first = pack_pair<Result>(output[4 * j + 2 * r] * inverse, output[4 * j + 2 * r + 1] * inverse);
        const u32 second = pack_pair<Result>(output[4 * j + 4 + 2 * r] * inverse, output[4 * j + 5 + 2 * r] * inverse);
        // Not trade<1>, which compiles to other code
        const u32 received = __shfl_xor_sync(0xffffffffu, odd ? first : second, 1);
        if (exists) store_global_8(out + 16 * j, odd ? received : first, odd ? second : received);
      }
    }
  }
};

}  // namespace cumla::mla
