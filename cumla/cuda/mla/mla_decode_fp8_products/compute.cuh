// SPDX-License-Identifier: Apache-2.0
// The consumer role of mla_decode_fp8_products: e4m3 rows go to the tensor cores as they are. Query and probabilities
// are e4m3, too.
//
// Products take half of the time, the softmax as long as before. One consumer's products run beside the other's
// softmax:
//
//   consumer 0:  softmax0  O += V0 P0, S2               softmax2  O += V1 P1, O += V2 P2, S4
//   consumer 1:            softmax1  O += V0 P0, O += V1 P1, S3             softmax3 ...
//
// V's fragments (docs/kernels/mla-fp8.md) have tokens i and i + 8 of a granule side by side. Probabilities have the
// same order.
#pragma once
#include "mla/mla_decode_fp8_64/compute.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/types.cuh"
#include "ptx/wgmma.cuh"

namespace cumla::mla {

using namespace ptx;

// Output, scores, sums and references are those of Heads64Consumer, in its thread layout, except that rows are
// lane / 4 and 8 more of granule `warp`.
template <typename Form, int kText = 0>
struct E4m3Consumer : Heads64Consumer<Form> {
  using Base = Heads64Consumer<Form>;
  using Base::consumer, Base::kv_scale, Base::lane, Base::output, Base::row_shift, Base::scores, Base::shared,
      Base::sum, Base::warp;
  using Layout = typename Form::Layout;
  static constexpr int kPairs = kValueTiles + Form::kRopeIsFp8;  // of products of K, of 32 columns each
  static constexpr int kTilesHere = Base::kValueHalf;
  static constexpr int kBuffers = 3;  // of fragments of K
  static_assert(Layout::kSlots % kGranules == 0, "a block lies in one piece");

  using Base::Base;

  __device__ __forceinline__ static int turn_of(u32 t) { return t % Layout::kTurns; }
  __device__ __forceinline__ static u32 phase_of(u32 t) { return t / Layout::kTurns & 1; }

  // `t`: blocks of earlier segments. Returns the number of blocks.
  __device__ __forceinline__ int compute(int blocks, u32 t) {
    this->begin();
    const int first = (consumer ^ t) & 1;
    if (kText < 2 && first < blocks) {
      multiply_query(t + first);
      finish_scores(t + first);
      weigh(t + first, first == 0);
    }
#pragma unroll 1
    for (int i = kText < 2 ? first : first - 2; i - 1 < blocks; i += 2) {
      if constexpr (kText == 0) {
        if (i > 0) multiply_values(t + i - 1);
        if (i < blocks) multiply_values(t + i);
      } else {
#pragma unroll 1
        for (int b = max(i - 1, 0); b <= i && b < blocks; ++b) multiply_values(t + b);
      }
      __syncwarp();
      if (lane == 0) free_probabilities(t + i, i > 0, i >= 0 && i < blocks);  // plant: e4m3 probabilities read
      if (i + 2 < blocks) {
        multiply_query(t + i + 2);
        finish_scores(t + i + 2);
        weigh(t + i + 2, kText == 2 && i + 2 == 0);
      }
    }
    const u32 last = t + blocks - 1;
    if (blocks > 0 && ((consumer ^ last) & 1) && (load_shared_u32(shared.unusual(turn_of(last))) & kRaised))
      this->change_sums(turn_of(last));
    return blocks;
  }

  // Issues scores = a block's rows x query, in e4m3. Fragments are loaded a step ahead: a load issued after a product
  // completes only after that.
  __device__ __forceinline__ void multiply_query(u32 t) {
    const u32 rows = rows_of(t);
    u32 a[kBuffers][kStepRegisters];
#pragma unroll
    for (int i = 0; i < kHeads / 2; ++i) scores[i] = 0.0f;  // the old values then need no registers
    load_pair(a[0], rows);
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      warpgroup_wait<kBuffers - 2>();
      if (k + 1 < kPairs) load_pair(a[(k + 1) % kBuffers], rows + (k + 1) * 64);
      multiply_pair(a[k % kBuffers], [&](int i, const u32* fragment) {
        wgmma_e4m3_async(scores, fragment,
                         descriptor_of_rows<128>(shared.query, k / 2 * Layout::kQueryTileBytes + k % 2 * 64 + i * 32),
                         k + i > 0);
      });
    }
  }
  // Completes the scores, up to a factor per head.
  __device__ __forceinline__ void finish_scores(u32 t) {
    warpgroup_wait<0>();
    keep_behind_wait(scores);
    if constexpr (!Form::kRopeIsFp8) {
      const u32 rows = rows_of(t) + Form::kRope;
      u32 a[2][kStepRegisters];
#pragma unroll
      for (int half = 0; half < 2; ++half) load_pair(a[half], rows + half * 64);
#pragma unroll
      for (int i = 0; i < kHeads / 2; ++i) scores[i] *= kv_scale;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        multiply_pair(a[half], [&](int i, const u32* fragment) {
          constexpr int kRopeQuery = (Layout::kQueryTiles - 1) * Layout::kQueryTileBytes;
          wgmma_m64n64k16_async<Bf16>(scores, fragment,
                                      descriptor_of_rows<128>(shared.query, kRopeQuery + half * 64 + i * 32), true);
        });
      warpgroup_wait<0>();
      keep_behind_wait(scores);
    }
    const u32 exist = load_shared_u32(shared.exist(GranulePlace<Layout>(kGranules * t + warp).slot)) >> lane / 4;
#pragma unroll
    for (int e = 0; e < 2; ++e) row_shift[e] = exist >> 8 * e & 1 ? 0.0f : -kInfinity;
  }

  // The address of a lane's fragments of K, once the granule is loaded.
  __device__ __forceinline__ u32 rows_of(u32 t) const {
    const GranulePlace<Layout> place(kGranules * t + warp);
    mbarrier_wait(shared.full(place.slot), place.phase, "a granule");
    return shared.slot(place.slot) + lane % 16 * kPackedBytes + lane / 16 * 16;
  }
  __device__ __forceinline__ static void load_pair(u32 (&a)[kStepRegisters], u32 rows) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      u32 words[4];
      load_matrix_x4(words, rows + i * 32);
#pragma unroll
      for (int j = 0; j < 4; ++j) a[4 * i + j] = words[j];
    }
  }
  template <typename Product>
  __device__ __forceinline__ static void multiply_pair(u32 (&a)[kStepRegisters], Product product) {
    keep_before_products(a);
    warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < 2; ++i) product(i, a + 4 * i);
    warpgroup_commit();
  }

  // Frees the granules of a block, and the probabilities of block t and the one before.
  __device__ __forceinline__ void free_granules(u32 slot) const {
#pragma unroll
    for (int i = 0; i < kGranules; ++i) mbarrier_arrive(shared.free(slot + i));
  }
  __device__ __forceinline__ void free_probabilities(u32 t, bool of_before, bool of_this) const {
    if (of_before) mbarrier_arrive(shared.probabilities_free(turn_of(t - 1)));
    if (of_this) mbarrier_arrive(shared.probabilities_free(turn_of(t)));
  }

  // Turns this consumer's block t into probabilities. `is_first`: the first block of the segment.
  __device__ __forceinline__ void weigh(u32 t, bool is_first) {
    const int turn = turn_of(t), before = turn_of(t - 1);
    if (!is_first) {
      mbarrier_wait(shared.probabilities_full(before), phase_of(t - 1), "the other's probabilities");
      if (load_shared_u32(shared.unusual(before)) & kRaised) this->change_sums(before);
    }
    mbarrier_wait(shared.probabilities_free(turn), phase_of(t) ^ 1, "free probabilities");
    float block_sum[kHeadsOfThread];
    const bool raised = !is_first && this->sync_any(store_probabilities<false>(turn, block_sum));
    if (is_first || raised) {
      this->raise_references(turn);
      if (raised) this->change_sums(turn);
      store_probabilities<true>(turn, block_sum);
      consumer_sync(consumer);
    }
    if (threadIdx.x % kWarpgroup == 0) store_shared_u32(shared.unusual(turn), raised ? kRaised : 0);
    if (threadIdx.x % kWarpgroup == 0) mbarrier_arrive(shared.probabilities_full(turn));  // plant: e4m3 probabilities
#pragma unroll
    for (int i = 0; i < kHeadsOfThread; ++i) sum[i] += block_sum[i];
  }

  // Turns scores into probabilities relative to the references, for all warps, and sums them as rounded: so the
  // output is an average of rows. Returns true if some reach the largest e4m3 number.
  template <bool kAgain>
  __device__ __forceinline__ bool store_probabilities(int turn, float (&block_sum)[kHeadsOfThread]) const {
    const u32 to = shared.probabilities(turn) + lane * kBlockTokens + (swizzled_chunk<kBlockTokens>(lane, warp) << 4);
    u32 packed[4], highest = 0;
#pragma unroll
    for (int i = 0; i < kHeads / 2; i += 4) {
      const float2 factors = load_shared_float2(shared.score_factor(this->head_of(i / 2)));
      const float2 references = load_shared_float2(shared.reference(this->head_of(i / 2)));
      float v[2][2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float* const s = scores + i + 2 * e;
        v[e][0] = exp2_approx(Base::template relative<kAgain>(s[0], factors.x, row_shift[e], references.x));
        v[e][1] = exp2_approx(Base::template relative<kAgain>(s[1], factors.y, row_shift[e], references.y));
      }
      const u32 bytes = pack_e4m3x4(v[0][0], v[0][1], v[1][0], v[1][1]);
      packed[i / 4 % 4] = __byte_perm(bytes, 0, 0x3120);
      u32 first, second;  // rounded, of the first and second token, each of both heads
      expand_e4m3x4(bytes, first, second);
      highest = highest_f16x2(highest_f16x2(highest, first), second);
      const float2 both = unpack_pair<Fp16>(add_f16x2(first, second));
      block_sum[i / 2] = both.x;
      block_sum[i / 2 + 1] = both.y;
      if (i % 16 == 12)
        store_matrix_x4_transposed(to + i / 16 * 32 * kBlockTokens, packed[0], packed[1], packed[2], packed[3]);
    }
    fence_proxy_async_shared();
    constexpr u32 kMost = 0x5f00;  // 448
    return (highest & 0xffff) >= kMost || highest >> 16 >= kMost;
  }

  // output += V x probabilities of block t; its granules are free once they are loaded. A product sums one block, and
  // float32 sums the blocks (why: docs/kernels/mla-fp8.md).
  __device__ __forceinline__ void multiply_values(u32 t) {
    const int turn = turn_of(t);
    mbarrier_wait(shared.probabilities_full(turn), phase_of(t), "probabilities");
    if (load_shared_u32(shared.unusual(turn)) & kRaised) this->change_output(turn);
    const u32 first_slot = GranulePlace<Layout>(kGranules * t).slot;  // plant: e4m3 granules
    const u32 source = shared.slot(first_slot + lane / 16) + lane % 16 * kPackedBytes + consumer * 256 + warp * 16;
    u32 a[2][kStepRegisters];
    load_values(a[0], source);
    gather_columns(a[0]);
#pragma unroll
    for (int d = 0; d < kTilesHere; ++d) {
      const bool is_last = d + 1 == kTilesHere;
      float sums[kHeads / 2];
      if (!is_last) load_values(a[(d + 1) & 1], source + (d + 1) * 64);
      multiply_pair(a[d & 1], [&](int i, const u32* fragment) {
        wgmma_e4m3_async(sums, fragment, descriptor_of_rows<kBlockTokens>(shared.probabilities(turn), i * 32), i > 0);
      });
      if (!is_last) gather_columns(a[(d + 1) & 1]);  // beside the products
      if (is_last) {
        __syncwarp();
        if (lane == 0) free_granules(first_slot);  // plant: e4m3 slot read
      }
      warpgroup_wait<0>();
      keep_behind_wait(sums);
#pragma unroll
      for (int i = 0; i < kHeads / 2; ++i) output[d][i] += sums[i];
    }
  }

  // Loads operand A, 64 columns of V, for both pairs of granules.
  __device__ __forceinline__ static void load_values(u32 (&a)[kStepRegisters], u32 source) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      u32 words[4];
      load_matrix_x4_transposed(words, source + i * 2 * Layout::kSlotBytes);
#pragma unroll
      for (int j = 0; j < 4; ++j) a[4 * i + j] = words[j];
    }
  }
  __device__ __forceinline__ static void gather_columns(u32 (&a)[kStepRegisters]) {
#pragma unroll
    for (int i = 0; i < kStepRegisters; i += 2) {
      const u32 first = a[i], second = a[i + 1];
      a[i] = __byte_perm(first, second, 0x6240);
      a[i + 1] = __byte_perm(first, second, 0x7351);
    }
  }
};

}  // namespace cumla::mla
