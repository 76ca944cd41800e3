// SPDX-License-Identifier: Apache-2.0
// The consumer role of mla_decode_fp8_64: from the scores of its blocks to the sums of its half of V's columns over
// all blocks. With one factor for all rows: mla/mla_decode_fp8_64/one_factor.cuh.
#pragma once
#include "mla/mla_decode_fp8/products.cuh"
#include "mla/mla_decode_fp8_64/layout.cuh"
#include "mla/mla_decode_fp8_64/scales.cuh"
#include "attend/share.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"
#include "ptx/wgmma.cuh"

namespace cumla::mla {

using namespace attend;
using namespace ptx;

// Probabilities are relative to a reference, as in mla/mla_decode_fp8/softmax.cuh, but both consumers share it. The
// owner of block t raises it, if necessary, after those of block t - 1 were published. With Form::kE4m3Products,
// probabilities are between 2^-9, the smallest e4m3 number, and 448; raising costs about a microsecond, so there is
// room for some 4 binades above the largest one of the first block.
constexpr float kBelow = 7.0f, kBelowInE4m3 = 5.0f, kSlack = 15.0f, kSlackInE4m3 = 8.75f;
// D (64 x heads) = A (64 x 16) B^T + (accumulate ? D : 0); A in registers.
template <typename T, int kCount>
__device__ __forceinline__ void multiply_heads(float (&d)[kCount], const u32* a, u64 b, bool accumulate) {
  if constexpr (kCount == 32)
    wgmma_m64n64k16_async<T>(d, a, b, accumulate);
  else
    wgmma_narrow_async<T>(d, a, b, accumulate);
}

// Scores of a lane: rows token_at(lane / 4) and 8 more of granule `warp`; heads 2 (lane % 4) and 1 more of each
// eight. Output of a lane: columns 16 warp + 2 (lane / 4) and 1 more of each 64.
template <typename RowsForm>
struct Heads64Consumer {
  using Form = RowsForm;
  using Layout = typename Form::Layout;
  static constexpr bool kGrouped = Form::kGrouped;
  static constexpr int kHeads = Form::kHeads, kHeadsOfThread = kHeads / 4;
  static constexpr int kValueHalf = kValueTiles / 2;  // tiles of 64 columns

  const MlaDecodeParams& p;
  const Layout& shared;
  const float kv_scale;  // of e4m3 columns without scales of their own
  const int consumer, warp, lane;
  float output[kValueHalf][kHeads / 2];
  float sum[kHeadsOfThread];  // of this consumer's blocks and this thread's rows
  float scores[kHeads / 2];
  float row_shift[2];         // of this thread's rows: -infinity if absent, else row_exponent
  float row_exponent[2];      // kGrouped: base-2 logarithm of the divisor of their scales
  float row_factor[2];        // kGrouped: divisor of their scores
  u32 row_scales[2];          // kGrouped: the relative scales of group lane % 4
  bool is_wide;               // one of the rows is wide, see kWide

  __device__ __forceinline__ Heads64Consumer(const MlaDecodeParams& p, const Layout& shared, float kv_scale,
                                             int consumer)
      : p(p),
        shared(shared),
        kv_scale(kv_scale),
        consumer(consumer),
        warp(threadIdx.x % kWarpgroup / 32),
        lane(threadIdx.x % 32) {}

  __device__ __forceinline__ int head_of(int i) const { return 8 * (i / 2) + 2 * (lane % 4) + i % 2; }

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int d = 0; d < kValueHalf; ++d)
#pragma unroll
      for (int i = 0; i < kHeads / 2; ++i) output[d][i] = 0.0f;
#pragma unroll
    for (int i = 0; i < kHeadsOfThread; ++i) sum[i] = 0.0f;
  }

  // Computes the relative scales of a row for V's fragments, as pairs of float16, and the exponent of their divisor.
  __device__ __forceinline__ void find_relative_scales(const uint4& bits, u32 (&pairs)[kScaleGroups], float& exponent) {
    const u32 bounded = bounded_exponent(highest_scale(bits));
    const float inverse = inverse_of(bounded);
    exponent = static_cast<float>(static_cast<int>(bounded) - 127 - kHeadroom);
    const u32 words[kScaleGroups] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int g = 0; g < kScaleGroups; ++g) {
      const float scale = __uint_as_float(words[g]) * inverse;
      is_wide |= scale != 0.0f && fabsf(scale) < kLeastScale;
      pairs[g] = pack_pair<Fp16>(scale, scale);
    }
  }

  // scores = a block's rows x query, up to a factor per row and head. RoPE columns are first. The sums are relative
  // to the scale of the current group of columns: before each group they are divided by its scale.
  __device__ __forceinline__ void multiply_query(u32 t) {
    constexpr bool kRopeIsFp8 = Form::kRopeIsFp8, kRopeIsFirst = Form::kHasRope && !kRopeIsFp8;
    const GranulePlace<Layout> place(kGranules * t + warp);
    mbarrier_wait(shared.full(place.slot), place.phase, "a granule");
    const u32 rows = shared.slot(place.slot), own = rows + token_at(lane / 4) * kPackedBytes;
    u32 a[2][kStepRegisters];
    auto multiply_rope = [&] {  // of 16 bits
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          u32 words[4];
          load_matrix_x4(words, rows + token_at(lane % 16) * kPackedBytes + Form::kRope +
                                    (4 * half + 2 * k + lane / 16) * 16);
#pragma unroll
          for (int i = 0; i < 4; ++i) a[half][4 * k + i] = words[i];
        }
        keep_before_products(a[half]);
        warpgroup_arrive();
#pragma unroll
        for (int k = 0; k < 2; ++k)
          multiply_heads<Bf16>(
              scores, a[half] + 4 * k,
              descriptor_of_rows<128>(shared.query, kRopeTile * Layout::kQueryTileBytes + half * 64 + k * 32),
              half + k > 0);
        warpgroup_commit();
      }
    };
    if constexpr (kRopeIsFirst) multiply_rope();
    const u32 source = own + lane % 4 * 16;
    KeyTile keys;
    keys.load<kPackedBytes>(source + column_of(0));
    u32 least[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) least[e] = least_divisor(load_shared_16(own + e * 8 * kPackedBytes + kPackedScales));
    float divisor[2] = {first_divisor(), first_divisor()};  // of the group of columns whose products are being added
#pragma unroll
    for (int k = 0; k < kValueTiles + kRopeIsFp8; ++k) {
      constexpr int kFirst = kRopeIsFp8;  // of latent columns
      KeyTile next;
      if (k + 1 < kValueTiles + kFirst) next.load<kPackedBytes>(source + column_of(k + 1));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        warpgroup_wait<1>();
        keys.expand(half, a[half]);
        keep_before_products(a[half]);
        if (half == 0 && k >= kFirst && (k - kFirst) % 2 == 0) {
          warpgroup_wait<0>();
          keep_behind_wait(scores);
          float ratio[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const u32 of_group = load_shared_u32(own + e * 8 * kPackedBytes + kPackedScales + (k - kFirst) / 2 * 4);
            const float to = divisor_of(of_group, least[e]);
            ratio[e] = divisor[e] * reciprocal_approx(to);
            divisor[e] = to;
          }
          if (Form::kHasRope || k > 0) {
#pragma unroll
            for (int i = 0; i < kHeads / 2; ++i) scores[i] *= ratio[i >> 1 & 1];
          }
        }
        warpgroup_arrive();
#pragma unroll
        for (int i = 0; i < 2; ++i)
          multiply_heads<Fp16>(
              scores, a[half] + 4 * i,
              descriptor_of_rows<128>(shared.query,
                                      (kRopeIsFp8 ? (k + kRopeTile) % kTiles : k) * Layout::kQueryTileBytes +
                                          half * 64 + i * 32),
              kRopeIsFirst || k + half + i > 0);
        warpgroup_commit();
      }
      if (k + 1 < kValueTiles + kFirst) keys = next;
    }
    const u32 exist = load_shared_u32(shared.exist(place.slot)) >> token_at(lane / 4);
    is_wide = false;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      u32 scale[kScaleGroups];
      find_relative_scales(load_shared_16(own + e * 8 * kPackedBytes + kPackedScales), scale, row_exponent[e]);
      row_shift[e] = exist >> 8 * e & 1 ? row_exponent[e] : -kInfinity;
      row_scales[e] = lane & 2 ? (lane & 1 ? scale[3] : scale[2]) : (lane & 1 ? scale[1] : scale[0]);
      row_factor[e] = divisor[e];
    }
    warpgroup_wait<0>();
    keep_behind_wait(scores);
  }
  // Offset in a row of the k-th 64 columns that meet the query. RoPE columns of 8 bits are first.
  __device__ __forceinline__ static int column_of(int k) {
    return Form::kRopeIsFp8 ? (k == 0 ? Form::kRope : (k - 1) * 64) : k * 64;
  }
  __device__ __forceinline__ float first_divisor() const { return Form::kRopeIsFp8 ? kv_scale : 1.0f; }

  __device__ __forceinline__ bool sync_any(bool vote) const {
    return consumer == 0 ? named_barrier_any<kConsumerBarrier, kWarpgroup>(vote)
                         : named_barrier_any<kConsumerBarrier + 1, kWarpgroup>(vote);
  }

  __device__ __forceinline__ float scaled(float score, int e) const {
    if constexpr (kGrouped) return score * row_factor[e];
    return score;
  }

  // Turns scores into probabilities, relative to the references and times the powers of two of their rows, for all
  // warps. Also returns their sums without the powers of two. True: some overflow float16. `wide`: they become
  // bfloat16.
  template <bool kAgain>
  __device__ __forceinline__ bool store_probabilities(int parity, float (&block_sum)[kHeadsOfThread],
                                                      bool wide = false) const {
    return store_probabilities<kAgain>(parity, block_sum, wide, [](int) {});
  }
  // Calls `between` for each eight heads in turn, before their probabilities.
  template <bool kAgain, typename Between>
  __device__ __forceinline__ bool store_probabilities(int parity, float (&block_sum)[kHeadsOfThread], bool wide,
                                                      Between between) const {
    const int tokens = 2 * warp + lane / 8 % 2, row = lane / 16 * 8 + lane % 8;
    const u32 to = shared.probabilities(parity) + row * 128 + ((tokens ^ (row & 7)) << 4);
    float out_again[2] = {1.0f, 1.0f};
    if constexpr (kGrouped) {
#pragma unroll
      for (int e = 0; e < 2; ++e) out_again[e] = exp2_of_integer(-row_exponent[e]);
    }
    u32 highest = 0, packed[4];
    float2 factors = load_shared_float2(shared.score_factor(head_of(0)));
    float2 references = load_shared_float2(shared.reference(head_of(0)));
#pragma unroll
    for (int i = 0; i < kHeads / 2; i += 4) {
      between(i / 4);
      float2 next_factors, next_references;  // loaded a step ahead
      if (i + 4 < kHeads / 2) {
        next_factors = load_shared_float2(shared.score_factor(head_of(i / 2 + 2)));
        next_references = load_shared_float2(shared.reference(head_of(i / 2 + 2)));
      }
      float v[2][2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float* const s = scores + i + 2 * e;
        v[e][0] = exp2_approx(relative<kAgain>(scaled(s[0], e), factors.x, row_shift[e], references.x));
        v[e][1] = exp2_approx(relative<kAgain>(scaled(s[1], e), factors.y, row_shift[e], references.y));
        packed[i / 2 % 4 + e] = wide ? pack_pair<Bf16>(v[e][0], v[e][1]) : pack_pair<Fp16>(v[e][0], v[e][1]);
        highest = highest_f16x2(highest, packed[i / 2 % 4 + e]);
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) block_sum[i / 2 + c] = __fmaf_rn(v[0][c], out_again[0], v[1][c] * out_again[1]);
      if (i % 8 == 4)
        store_matrix_x4_transposed(to + i / 8 * 16 * 128, packed[0], packed[1], packed[2], packed[3]);
      factors = next_factors;
      references = next_references;
    }
    fence_proxy_async_shared();
    constexpr u32 kHalfInfinity = 0x7c00;
    return (highest & 0x7fff) >= kHalfInfinity || (highest >> 16) >= kHalfInfinity;
  }
  // A score relative to its reference. After an overflow (kAgain) large scores are rounded like the highest one in
  // raise_references. From 2^27 on, the exact product differs from the rounded one by more than float16 can hold.
  // Small scores stay exact, because adding the shift would cost them bits.
  template <bool kAgain>
  __device__ __forceinline__ static float relative(float s, float factor, float shift, float reference) {
    const float exact = __fmaf_rn(s, factor, shift - reference);
    if (!kAgain) return exact;
    constexpr float kLarge = 1 << 20;
    const float rounded = __fmaf_rn(s, factor, shift);
    return fabsf(rounded) < kLarge ? exact : rounded - reference;
  }
  __device__ __forceinline__ static float exp2_of_integer(float x) {
    return __int_as_float((static_cast<int>(x) + 127) << 23);
  }

  // Joins values of each head over the rows of this warp, and stores them.
  template <typename Join>
  __device__ __forceinline__ void leave_for_all_warps(const float (&values)[kHeadsOfThread], Join join) const {
    const auto own = share_over_column(values, join);
    const u32 to = shared.of_warp(consumer * 4 + warp, head_of(own.first));
    if constexpr (kHeadsOfThread == 16) {
      store_shared_float2(to, {own.values[0], own.values[1]});
    } else {
      if (kHeadsOfThread == 8 || lane / 4 % 2 == 0) store_shared_float(to, own.values[0]);
    }
  }

  // Raises the references if this block needs it, and stores the factors by which sums change.
  __device__ __forceinline__ void raise_references(int parity) const {
    float highest[kHeadsOfThread];
#pragma unroll
    for (int i = 0; i < kHeadsOfThread; i += 2) {
      const float2 factors = load_shared_float2(shared.score_factor(head_of(i)));
      const float* const s = scores + 2 * i;
      highest[i] = fmaxf(__fmaf_rn(scaled(s[0], 0), factors.x, row_shift[0]),
                         __fmaf_rn(scaled(s[2], 1), factors.x, row_shift[1]));
      highest[i + 1] = fmaxf(__fmaf_rn(scaled(s[1], 0), factors.y, row_shift[0]),
                             __fmaf_rn(scaled(s[3], 1), factors.y, row_shift[1]));
    }
    leave_for_all_warps(highest, [](float a, float b) { return fmaxf(a, b); });
    consumer_sync(consumer);
    const int head = threadIdx.x % kWarpgroup;
    if (head < kHeads) {
      float of_all = load_shared_float(shared.of_warp(consumer * 4, head));
#pragma unroll
      for (int w = 1; w < 4; ++w) of_all = fmaxf(of_all, load_shared_float(shared.of_warp(consumer * 4 + w, head)));
      const float before = load_shared_float(shared.reference(head));
      const float slack = Form::kE4m3Products ? kSlackInE4m3 : kSlack;
      const float below = Form::kE4m3Products ? kBelowInE4m3 : kBelow;
      const float after = of_all > before + slack ? ceilf(of_all) - below : before;
      store_shared_float(shared.factor(parity, head), exp2_approx(before - after));
      store_shared_float(shared.reference(head), after);
    }
    consumer_sync(consumer);
  }

  // Turns this consumer's block t into probabilities. `is_first`: the first block of the segment.
  __device__ __forceinline__ void weigh(u32 t, bool is_first) {
    const int parity = t & 1;
    if (!is_first) {
      mbarrier_wait(shared.probabilities_full(parity ^ 1), (t - 1) / 2 & 1, "the other's probabilities");
      if (load_shared_u32(shared.unusual(parity ^ 1)) & kRaised) change_sums(parity ^ 1);
    }
    mbarrier_wait(shared.probabilities_free(parity), (t / 2 & 1) ^ 1, "free probabilities");
    // V's products take pairs of tokens, so the table is [group][granule][pair][8 later][token of the pair].
    const u32 table = shared.table(parity) + ((lane % 4 * kGranules + warp) * 4 + lane / 8) * 8 + lane / 4 % 2 * 2;
#pragma unroll
    for (int e = 0; e < 2; ++e) store_shared_low_half(table + 4 * e, row_scales[e]);
    float block_sum[kHeadsOfThread];
    const bool too_high = is_first || store_probabilities<false>(parity, block_sum);
    u32 unusual = 0;
    if (is_first || sync_any(too_high || is_wide)) {
      if (is_first || sync_any(too_high)) {
        raise_references(parity);
        if (!is_first) {
          unusual |= kRaised;
          change_sums(parity);
        }
      }
      if (sync_any(is_wide)) unusual |= kWide;
      store_probabilities<true>(parity, block_sum, unusual & kWide);
      consumer_sync(consumer);
    }
#pragma unroll
    for (int i = 0; i < kHeadsOfThread; ++i) sum[i] += block_sum[i];
    publish(parity, unusual);
  }
  // Probabilities are complete.
  __device__ __forceinline__ void publish(int parity, u32 unusual) const {
    if (threadIdx.x % kWarpgroup == 0) store_shared_u32(shared.unusual(parity), unusual);
    if (threadIdx.x % kWarpgroup == 0) mbarrier_arrive(shared.probabilities_full(parity));  // plant: probabilities
  }
  // Waits for probabilities.
  __device__ __forceinline__ u32 unusual_of(u32 t) const {
    mbarrier_wait(shared.probabilities_full(t & 1), t / 2 & 1, "probabilities");
    return load_shared_u32(shared.unusual(t & 1));  // plant: granules
  }
  __device__ __forceinline__ void free_probabilities(u32 t) const {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared.probabilities_free(t & 1));  // plant: probabilities read
  }

  // In mla/mla_decode_fp8_64/values.cuh:
  __device__ __forceinline__ void change_sums(int parity);
  __device__ __forceinline__ void change_output(int parity);
  __device__ __forceinline__ void multiply_values(u32 t);
  __device__ __forceinline__ void multiply_wide(u32 t);
  __device__ __forceinline__ void multiply_steps(u32 t);
  __device__ __forceinline__ void scale_widely(u32 (&x)[kStepRegisters], u32 rows, int group) const;

  static constexpr int kValueGroups = kValueHalf / 2;  // groups of columns with a scale

  // Offset in a granule of this warp's columns of V, per loading lane.
  __device__ __forceinline__ u32 values_offset() const {
    return token_at(lane % 16) * kPackedBytes + lane / 16 * 64 + consumer * 256 + warp * 16;
  }
  // The k-th slot of a block in the ring.
  __device__ __forceinline__ static u32 slot_of(u32 first_slot, int k) {
    return first_slot + k < Layout::kSlots ? first_slot + k : first_slot + k - Layout::kSlots;
  }

  __device__ __forceinline__ void free_granule(u32 slot) const {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared.free(slot));  // plant: slot read
  }

  // `t`: blocks of earlier segments. Returns the number of blocks.
  __device__ __forceinline__ int compute(int blocks, u32 t) {
    begin();
    const int first = (consumer ^ t) & 1;
#pragma unroll 1
    for (int i = first; i - 1 < blocks; i += 2) {
      if (i < blocks) {
        multiply_query(t + i);
        weigh(t + i, i == 0);
      }
#pragma unroll 1
      for (int b = max(i - 1, 0); b <= i && b < blocks; ++b) multiply_values(t + b);
    }
    const u32 last = t + blocks - 1;
    if (blocks > 0 && ((consumer ^ last) & 1) && (load_shared_u32(shared.unusual(last & 1)) & kRaised))
      change_sums(last & 1);
    return blocks;
  }
};

}  // namespace cumla::mla
