// SPDX-License-Identifier: Apache-2.0
// The consumer role of mla_decode: from scores to the stored output.
#pragma once
#include "mla/mla_decode/masked.cuh"
#include "mla/mla_decode/shared.cuh"
#include "attend/reduce.cuh"
#include "split/join.cuh"
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

// The same of the RoPE columns of this CTA, where a cluster has halves of rows.
template <bool kHolds>
struct HeldRope {};
template <>
struct HeldRope<true> {
  u32 rope[8];
};

// One consumer warpgroup. A lane's accumulators are of rows 16 warp + lane / 4 and 8 more, columns 2 (lane % 4) and 1
// more of each eight. kCopied: threads copied the tiles, not TMA.
template <typename T, bool kSharedBlocks, bool kCopied, typename AnyTile>
struct Consumer : MaxLogits<AnyTile::kHasMaxLogits>,
                  HeldQuery<kSharedBlocks && (AnyTile::kOtherFirst || AnyTile::kRing)>, HeldRope<kHasHalf<AnyTile>> {
  // The tiles of a half of V share the barrier of the first one. With one row tile this would spill registers.
  static constexpr bool kByHalves = kCopied && kSharedBlocks && !kHasHalf<AnyTile>;
  static constexpr bool kOtherFirst = kSharedBlocks && AnyTile::kOtherFirst;
  static constexpr bool kHalves = kHasHalf<AnyTile>;
  static_assert(!kHalves || kSharedBlocks, "only the first block of a segment has none before it");
  using Layout = LayoutOf<AnyTile>;
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

  // Of a cluster, without the rank, which must not reach a descriptor.
  __device__ __forceinline__ static u32 operand(u32 address) { return kHalves ? address & 0xffffff : address; }

  // Products with tiles of the query and of a block: mla/mla_decode/products.cuh.
  __device__ __forceinline__ void multiply_query(int t);
  __device__ __forceinline__ void multiply_query_ring(int t);
  __device__ __forceinline__ void hold_query();
  __device__ __forceinline__ void hold_last_tile(const Segment& segment);
  __device__ __forceinline__ u64 value_descriptor(int stage, int k) const;
  __device__ __forceinline__ void multiply_own(int stage);
  __device__ __forceinline__ void multiply_other(int stage);
  __device__ __forceinline__ void begin_products();
  template <typename Operand>
  __device__ __forceinline__ void multiply_values(Operand a, u64 values);

  // What a cluster of halves needs: mla/mla_decode/halves.cuh.
  __device__ __forceinline__ void hold_rope(const Segment& segment);
  __device__ __forceinline__ void send_scores(int t) const;
  __device__ __forceinline__ void add_other_half(int t);

  // Keys that rows do not see: mla/mla_decode/visible.cuh.
  __device__ __forceinline__ void clear_values_past(int stage, int valid);
  __device__ __forceinline__ void clear_values_before(int stage, int block);
  __device__ __forceinline__ void mask_scores(int block);
  __device__ __forceinline__ void mask_before_windows(int block);
  __device__ __forceinline__ void mask_by_tree(const Segment& segment, int block);
  __device__ __forceinline__ void clear_unseen_values(const Segment& segment, int stage, int block);
  __device__ __forceinline__ void mask_absent(int t);

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
      highest[r] = highest_of<0, 16>(r) * p.scale_log2;
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
#pragma unroll
    for (int i = kFrom; i < kTo; i += 2) {
      const int r = i >> 1 & 1;
      const float low = exp2_approx(__fmaf_rn(scores[i], p.scale_log2, -next[r]));
      const float high = exp2_approx(__fmaf_rn(scores[i + 1], p.scale_log2, -next[r]));
      block_sum[r] += low + high;
      probabilities[i / 2] = pack_pair<T>(low, high);
    }
  }

  // Probabilities that consumers pass to each other: mla/mla_decode/probabilities.cuh.
  __device__ __forceinline__ void leave(const float (&next)[2]);
  __device__ __forceinline__ void publish();
  __device__ __forceinline__ void adopt(int t);

  // Computes block i of the segment, counter t, which this consumer owns. kPrevious: block i - 1 of the other
  // consumer is multiplied here beside this block's softmax, or with kBefore before this block is scored. `scored`: the
  // scores exist already.
  template <bool kPrevious, bool kBefore = false>
  __device__ __forceinline__ void own_block(const Segment& segment, int i, int t, bool scored = false) {
    const int stage = Layout::stage_of(t, consumer), previous = Layout::other_stage_of(t - 1, 1 - consumer);
    if constexpr (kHalves && kCopied) hold_rope(segment);  // for each block: there are no registers to keep it
    if constexpr (kBefore) {
      adopt(t - 1);
      multiply_other(previous);
      multiply_query(t);
      warpgroup_wait<1>();
      arrive(shared.free(previous, consumer));
    } else if (!scored) {
      multiply_query(t);
    }
    if constexpr (kHalves) {
      warpgroup_wait<0>();
      send_scores(t);
    }
    if constexpr (kPrevious && !kBefore) {
      adopt(t - 1);
      if constexpr (kHasWindow<AnyTile>) clear_values_before(previous, segment.begin + i - 1);
      if constexpr (kHasTree<AnyTile>) clear_unseen_values(segment, previous, segment.begin + i - 1);
      multiply_other(previous);
      if constexpr (!kHalves) warpgroup_wait<1>();
    } else if constexpr (!kHalves) {
      warpgroup_wait<0>();
    }
    if constexpr (AnyTile::kHasRope) arrive(shared.free(stage, 2));
    if (i + 2 >= segment.blocks) arrive(shared.query_free());
    if constexpr (kHalves) add_other_half(t);

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
      arrive(shared.free(previous, consumer));
    }
    exponentiate<16, 32>(next, block_sum);
    leave(next);
    if constexpr (kHalves && !kPrevious) {  // of the first block of a segment: nothing is summed yet
      maximum[0] = next[0];
      maximum[1] = next[1];
    } else {
      rescale(next);
    }
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
    arrive(shared.free(stage, consumer));
  }

  // Multiplies a block of the other consumer by its probabilities.
  __device__ __forceinline__ void other_block(const Segment& segment, int i, int t) {
    adopt(t);
    const int stage = Layout::other_stage_of(t, 1 - consumer);
    const int last_token = (segment.begin + i + 1) * kBlockTokens;
    if constexpr (kHasTree<AnyTile>)
      clear_unseen_values(segment, stage, segment.begin + i);
    else if (!AnyTile::kHasAbsent && last_token > segment.tokens)
      clear_values_past(stage, kBlockTokens + segment.tokens - last_token);
    if constexpr (kHasWindow<AnyTile>) clear_values_before(stage, segment.begin + i);
    multiply_other(stage);
    warpgroup_wait<0>();
    arrive(shared.free(stage, consumer));
  }

  __device__ __forceinline__ void compute(const Segment& segment, int t, u32 query_phase) {
    begin(segment);
    const int first = (consumer ^ t) & 1;  // first own block
    // Also with no block to score. Otherwise one query warp could run a segment ahead of the other.
    if constexpr (AnyTile::kRing) hold_last_tile(segment);
    mbarrier_wait(shared.query_full(), query_phase, "the query");
    if constexpr (kOtherFirst) hold_query();
    if constexpr (kHalves && !kCopied) hold_rope(segment);
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

  // The end of a segment: mla/mla_decode/finish.cuh.
  __device__ __forceinline__ void finish(const Segment& segment, bool more);

 private:
  __device__ __forceinline__ void write_piece(const Segment& segment, const float (&inverse)[2],
                                              const float (&lse)[2]) const;
  __device__ __forceinline__ void write_result(const Segment& segment, const float (&inverse)[2],
                                               const float (&lse)[2]) const;
  __device__ __forceinline__ void write_floats(float* out, int r, bool exists, float inverse) const;
  __device__ __forceinline__ void write_halves(char* out, int r, bool exists, float inverse) const;
};

}  // namespace cumla::mla
