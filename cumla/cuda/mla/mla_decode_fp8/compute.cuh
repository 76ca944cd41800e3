// SPDX-License-Identifier: Apache-2.0
// The consumer role of mla_decode_fp8: the blocks of a segment, with both products. softmax.cuh has what is between
// the products, finish.cuh the end of a segment.
#pragma once
#include "mla/mla_decode_fp8/layout.cuh"
#include "mla/mla_decode_fp8/products.cuh"
#include "mla/mla_decode_fp8/softmax.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/types.cuh"
#include "ptx/wgmma.cuh"

namespace cumla::mla {

using namespace ptx;
using namespace split;

// One consumer warpgroup.
template <int kQueryRows, bool kGrouped, PageForm kForm, typename AnyTile>
struct Fp8Consumer : Fp8Softmax<kQueryRows, kGrouped, kForm, AnyTile> {
  using Softmax = Fp8Softmax<kQueryRows, kGrouped, kForm, AnyTile>;
  using typename Softmax::Layout;
  using Softmax::kOwn, Softmax::kSums, Softmax::kValueTiles;
  using Softmax::params, Softmax::p, Softmax::shared, Softmax::n, Softmax::tile;
  using Softmax::consumer, Softmax::warp, Softmax::lane;
  using Softmax::kv_scale, Softmax::output, Softmax::scores;
  using Softmax::read_kv_scale, Softmax::row_of, Softmax::own_token, Softmax::scale_of, Softmax::value_tile;
  using Softmax::begin, Softmax::mask_scores, Softmax::weigh;
  using Softmax::Softmax;
  // Registers suffice for a tile ahead, and for two groups of columns at once
  static constexpr bool kRoomy = kQueryRows == 16 || kValueTiles < 8;
  static constexpr int kRopeTile = kValueTiles;

  // d (+)= half a tile of K x query.
  __device__ __forceinline__ void multiply_step(float (&d)[kSums], const KeyTile& keys, int half,
                                                u32 (&a)[kStepRegisters],
                                                int query_tile, bool accumulate) const {
    keys.expand(half, a);
    keep_before_products(a);
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < 2; ++k)
      wgmma_narrow_async<Fp16>(
          d, a + 4 * k, descriptor_of_rows<128>(shared.query(n),
                                                query_tile * Layout::kQueryTileBytes + half * 64 + k * 32),
          accumulate || k > 0);
    warpgroup_commit();
  }

  // scores (+)= sums of e4m3 columns. `low` and `high` are the scales of this thread's two tokens; of RoPE columns
  // they are kv_scale.
  template <bool kFirst, bool kOfRope = kFirst>
  __device__ __forceinline__ void add_to_scores(const float (&sums)[kSums], float low, float high) {
#pragma unroll
    for (int i = 0; i < kOwn; i += 2) {
      const float2 factors = load_shared_float2(shared.factor_of(n, row_of(i)));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int at = 4 * (i / 2) + j;
        const float factor = j == 0 ? factors.x : factors.y;
        scores[at] = __fmaf_rn(sums[at], bounded<kOfRope>(factor * low), kFirst ? 0.0f : scores[at]);
        scores[at + 2] = __fmaf_rn(sums[at + 2], bounded<kOfRope>(factor * high), kFirst ? 0.0f : scores[at + 2]);
      }
    }
  }

  // Bounds factors that include kv_scale. Scales of tokens and groups stay as they are.
  template <bool kOfRope>
  __device__ __forceinline__ static float bounded(float factor) {
    return kGrouped && !kOfRope ? factor : fminf(factor, kMaxFactor);
  }

  // Starts the base-2 scores with the RoPE columns.
  __device__ __forceinline__ void multiply_rope(u32 rope) {
    if (!Layout::kWhole && rope_is_fp8<AnyTile>(params)) {
      KeyTile keys;
      load_keys(keys, rope + key_offset(), 0);
      float sums[kSums];
      u32 a[2][kStepRegisters];
#pragma unroll
      for (int half = 0; half < 2; ++half) multiply_step(sums, keys, half, a[half], kRopeTile, half > 0);
      warpgroup_wait<0>();
      keep_behind_wait(sums);
      const float scale = kGrouped ? read_kv_scale() : kv_scale;
      add_to_scores<true>(sums, scale, scale);
    } else {
      multiply_rope_16(rope);
      warpgroup_commit();
      warpgroup_wait<0>();
      keep_behind_wait(scores);
#pragma unroll
      for (int i = 0; i < kSums; ++i) scores[i] *= p.scale_log2;
    }
  }

  // RoPE columns of 16 bits. They also go through registers, because of the order of tokens.
  // model: fp8_data
  __device__ __forceinline__ void multiply_rope_16(u32 rope) {
    const int token = token_at(warp * 16 + lane % 16);
    u32 a[4][4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      load_matrix_x4(a[k], rope + Layout::chunk_of(token, 2 * k + lane / 16));
      keep_before_products(a[k]);
    }
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      wgmma_narrow_async<Bf16>(scores, a[k], descriptor_of_rows<128>(shared.query(n),
                                                                      kRopeTile * Layout::kQueryTileBytes + k * 32),
                               k > 0);
  }

  // Offset of the K bytes of this thread's two tokens. The swizzle has a period of eight rows.
  // model: fp8_data
  __device__ __forceinline__ u32 key_offset() const { return Layout::chunk_of(own_token(), lane % 4); }

  // Loads the bytes of 64 columns of K of these tokens.
  // model: fp8_data
  __device__ __forceinline__ static void load_keys(KeyTile& keys, u32 source, int tile) {
    keys.load<Layout::kRowBytes>(Layout::chunk_of_tile(source, tile));
  }

  // scores = block x query, in base 2.
  // model: fp8_segments
  __device__ __forceinline__ void multiply_query(u32 s, u32 phase) {
    const u32 slot = shared.slot(s), source = slot + key_offset();
    mbarrier_wait(shared.full(s), phase, "a KV block");
    if constexpr (AnyTile::kHasRope) multiply_rope(slot + Layout::kRopeOffset);
    constexpr int kTilesOfGroup = kGrouped ? kValueTiles / kScaleGroups : kValueTiles;
    // The sums of a group are added to the scores beside the next group.
    constexpr int kSets = kGrouped && kRoomy ? 2 : 1;
    float sums[kSets][kSums];
    u32 a[2][kStepRegisters];
    KeyTile keys;
    load_keys(keys, source, 0);
#pragma unroll
    for (int k = 0; k < kValueTiles; ++k) {
      const int group = k / kTilesOfGroup;
      KeyTile next;
      // The block is loaded already; without this wait ptxas spills registers for 32 query rows.
      if (!kRoomy && k + 1 == kValueTiles / 2) mbarrier_wait(shared.full(s), phase, "a KV block");
      if (kRoomy && k + 1 < kValueTiles) load_keys(next, source, k + 1);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (k + half > 0) warpgroup_wait<1>();
        multiply_step(sums[group % kSets], keys, half, a[half], k, k % kTilesOfGroup + half > 0);
        if (kSets == 2 && k % kTilesOfGroup == 0 && half == 1 && group > 0)
          add_group(sums[(group - 1) % kSets], slot, group - 1);
      }
      if (kGrouped && (kSets == 1 || k + 1 == kValueTiles) && k % kTilesOfGroup == kTilesOfGroup - 1) {
        warpgroup_wait<0>();
        add_group(sums[group % kSets], slot, group);
      }
      if (kRoomy)
        keys = next;
      else if (k + 1 < kValueTiles)
        load_keys(keys, source, k + 1);
    }
    if constexpr (!kGrouped) {
      warpgroup_wait<0>();
      keep_behind_wait(sums[0]);
      add_to_scores<!AnyTile::kHasRope, false>(sums[0], kv_scale, kv_scale);
    }
  }

  __device__ __forceinline__ void add_group(float (&sums)[kSums], u32 slot, int group) {
    keep_behind_wait(sums);
    const float low = scale_of(slot, group, 0), high = scale_of(slot, group, 1);
    if (!AnyTile::kHasRope && group == 0)
      add_to_scores<true, false>(sums, low, high);
    else
      add_to_scores<false>(sums, low, high);
  }

  // Loads 32 tokens of 64 columns of V; a lane's row address covers 16 columns.
  // model: fp8_data
  __device__ __forceinline__ void load_values(u32 (&words)[4], u32 source, int step) const {
    load_matrix_x4_transposed(
        words, Layout::chunk_of_tile(source, value_tile(step / 2)) + step % 2 * 32 * Layout::kRowBytes);
  }

  // output += V x probabilities; then the slot is free.
  // model: fp8_segments, fp8_data
  __device__ __forceinline__ void multiply_values(u32 s) {
    const u32 slot = shared.slot(s);
    const u32 source = slot + Layout::chunk_of(token_at(lane), warp);  // the swizzle repeats after 32 rows
    u32 a[2][kStepRegisters], words[4];
    load_values(words, source, 0);
#pragma unroll
    for (int step = 0; step < 2 * kValueTiles; ++step) {
      const int d = step / 2, half = step % 2;
      u32 next[4];
      if (step + 1 < 2 * kValueTiles) load_values(next, source, step + 1);
      if (step > 1) warpgroup_wait<1>();
      expand_values(words, a[half]);
      keep_before_products(a[half]);
      warpgroup_arrive();
      const int group = kGrouped ? value_tile(d) / (kValueTiles / kScaleGroups) : 0;
      const u32 probabilities = shared.probabilities_of(consumer, group, slot);
#pragma unroll
      for (int k = 0; k < 2; ++k)
        wgmma_narrow_async<Fp16>(output[d], a[half] + 4 * k,
                                 descriptor_of_rows<128>(probabilities, half * 64 + k * 32), true);
      warpgroup_commit();
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = next[i];
    }
    warpgroup_wait<0>();
#pragma unroll
    for (int d = 0; d < kValueTiles; ++d) keep_behind_wait(output[d]);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared.free(s));  // plant: slot read
  }

  // Clears the tokens past the end of a block with `valid` ones. They may hold NaN; their probabilities are 0, but
  // 0 x NaN is NaN. Each thread clears the K bytes that only it has read. One of the four threads that read a token's
  // scales clears these; other threads read them after a barrier (weigh).
  // model: fp8_data
  __device__ __forceinline__ void clear_past(u32 slot, int valid) const {
    __syncwarp();  // all four threads have read the scales
#pragma unroll 1
    for (int token = own_token(), eight = 0; eight < 2; token += 8, ++eight) {
      if (token < valid) continue;
#pragma unroll 1
      for (int k = 0; k < kValueTiles; ++k)
        store_shared_zero_16(Layout::chunk_of_tile(slot + key_offset(), k) + eight * 8 * Layout::kRowBytes);
      if (kGrouped && lane % 4 == 0)
        store_shared_zero_16(slot + Layout::kScalesOffset + token * Layout::kNextScales);
    }
  }

  // Returns the number of blocks. t: blocks of earlier segments.
  // Hazard: the exchange at the end of a segment overlaps this one's probabilities and sums. So no consumer starts
  // before all warps have added up. With kRows, tokens past the end are zeros already (load_kv_fp8), and only their
  // scores are masked.
  // model: fp8_segments
  __device__ __forceinline__ int compute(const Segment& segment, int t) {
    // With one query buffer, query_full implies it.
    if (Layout::kQueries > 1 && n > 0)  // plant: end of the segment before
      mbarrier_wait(shared.query_free(n - 1), Layout::phase_of(n - 1), "the end of the segment before");
    begin();
    mbarrier_wait(shared.query_full(n), Layout::phase_of(n), "the query");
    const int tokens = segment.tokens - segment.begin * kBlockTokens;
#pragma unroll 1
    for (int i = (consumer ^ t) & 1; i < segment.blocks; i += 2) {
      const u32 s = (t + i) % Layout::kSlots, phase = (t + i) / Layout::kSlots & 1;
      multiply_query(s, phase);
      if ((i + 1) * kBlockTokens > tokens - tile.most_shift) mask_scores(i, tokens);
      if ((kForm == kPages || kForm == kPacked) && (i + 1) * kBlockTokens > tokens)
        clear_past(shared.slot(s), tokens - i * kBlockTokens);
      weigh(shared.slot(s), i < 2);
      multiply_values(s);
    }
    return segment.blocks;
  }
};

}  // namespace cumla::mla
