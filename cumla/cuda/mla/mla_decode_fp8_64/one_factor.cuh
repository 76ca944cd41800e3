// SPDX-License-Identifier: Apache-2.0
// The consumer role of mla_decode_fp8_64 where one factor is that of all rows. Fragments need nothing but conversion,
// and scores are not kept for a second look, so registers are left to run products beside the softmax:
//
//   consumer 0:  S0, softmax 0                       O += V0 P0, S2  softmax 2 beside O += V1 P1  O += V2 P2, S4 ...
//   consumer 1:      S1, softmax 1 beside O += V0 P0  O += V1 P1, S3  softmax 3 beside O += V2 P2  O += V3 P3, S5 ...
#pragma once
#include "mla/mla_decode_fp8_64/compute.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"
#include "ptx/wgmma.cuh"

namespace cumla::mla {

using namespace ptx;

template <typename Form>
struct OneFactorConsumer : Heads64Consumer<Form> {
  using Base = Heads64Consumer<Form>;
  using Base::consumer, Base::kv_scale, Base::lane, Base::output, Base::row_shift, Base::scores, Base::shared,
      Base::sum, Base::warp, Base::kValueGroups, Base::kValueHalf;
  using Layout = typename Form::Layout;
  static constexpr int kHeads = Form::kHeads, kHeadsOfThread = kHeads / 4;
  static constexpr int kKeyBuffers = 3, kValueBuffers = 2;  // of fragments
  static constexpr int kAhead = 2;                          // steps by which bytes of V are loaded ahead
  static_assert(Layout::kSlots % kGranules == 0, "a block lies in one piece");

  using Base::Base;

  // `t`: blocks of earlier segments. Returns the number of blocks.
  __device__ __forceinline__ int compute(int blocks, u32 t) {
    this->begin();
    const int first = (consumer ^ t) & 1;
    if (first < blocks) multiply_query<false>(t + first);
#pragma unroll 1
    for (int i = first; i < blocks; i += 2) {
      const u32 own = t + i;
      const int parity = own & 1;
      ValueSteps steps(*this, own);
      u32 unusual = 0;
      if (i == 0)
        weigh_first(parity, own);
      else
        unusual = weigh(own, steps);
      if (unusual) this->change_output(parity);
      steps.begin(kStepsOfBlock);
#pragma unroll
      for (int s = kStepsOfBlock; s < 2 * kStepsOfBlock; ++s) steps.step(s, 2 * kStepsOfBlock);
      if (i + 2 < blocks)
        multiply_query<true>(own + 2);
      else
        complete_values(own);
    }
    const u32 last = t + blocks - 1;
    if (blocks > 0 && ((consumer ^ last) & 1)) {
      const u32 unusual = this->unusual_of(last);
      if (unusual & kRaised) {
        this->change_sums(last & 1);
        this->change_output(last & 1);
      }
      ValueSteps steps(*this, last + 1);
      steps.begin(0);
#pragma unroll
      for (int s = 0; s < kStepsOfBlock; ++s) steps.step(s, kStepsOfBlock);
      complete_values(last);
    }
    return blocks;
  }

  static constexpr int kStepsOfBlock = kGranules * kValueGroups;

  // The products of V of block `own` - 1, steps 0 to 7, and of block `own`, steps 8 to 15.
  struct ValueSteps {
    OneFactorConsumer& of;
    u32 slots[2], rows[2];
    u32 words[kAhead + 1][4], a[kValueBuffers][kStepRegisters];
    int first_turn;

    __device__ __forceinline__ ValueSteps(OneFactorConsumer& of, u32 own) : of(of) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        slots[b] = GranulePlace<Layout>(kGranules * (own - 1 + b)).slot;
        rows[b] = of.shared.slot(slots[b]) + of.values_offset();
      }
      // The compiler knows that all threads agree on a vote, so it keeps addresses of P in uniform registers.
      first_turn = __any_sync(0xffffffffu, of.consumer == 0);
    }
    __device__ __forceinline__ void fetch(int s) {
      load_matrix_x4_transposed(words[s % (kAhead + 1)], rows[s / kStepsOfBlock] +
                                                             s / kValueGroups % kGranules * Layout::kSlotBytes +
                                                             s % kValueGroups * 128);
    }
    __device__ __forceinline__ void begin(int first) {
#pragma unroll
      for (int s = 0; s < kAhead; ++s) fetch(first + s);
    }
    __device__ __forceinline__ void step(int s, int end) {
      const int k = s / kValueGroups % kGranules, d = s % kValueGroups;
      if (s + kAhead < end) fetch(s + kAhead);
      warpgroup_wait<kValueBuffers - 1>();
      u32(&x)[kStepRegisters] = a[s % kValueBuffers];
      expand_values(words[s % (kAhead + 1)], x);
      keep_before_products(x);
      warpgroup_arrive();
      const u64 b = descriptor_of_rows<128>(of.shared.probabilities((first_turn + s / kStepsOfBlock) & 1), k * 32);
#pragma unroll
      for (int i = 0; i < 2; ++i) multiply_heads<Fp16>(of.output[2 * d + i], x + 4 * i, b, true);
      warpgroup_commit();
      if (d + 1 == kValueGroups) of.free_granule(slots[s / kStepsOfBlock] + k);
    }
  };

  // scores = a block's rows x query, up to a factor per head. RoPE columns of 8 bits are first. Those of 16 bits are
  // last, and the sums before them are multiplied by the factor of latent columns. kBeside: products of the values of
  // block t - 2 are running.
  template <bool kBeside>
  __device__ __forceinline__ void multiply_query(u32 t) {
    constexpr bool kRopeIsFp8 = Form::kRopeIsFp8;
    const GranulePlace<Layout> place(kGranules * t + warp);
    mbarrier_wait(shared.full(place.slot), place.phase, "a granule");
    const u32 rows = shared.slot(place.slot), source = rows + token_at(lane / 4) * kPackedBytes + lane % 4 * 16;
    u32 a[kKeyBuffers][kStepRegisters];
    KeyTile keys;
    keys.load<kPackedBytes>(source + this->column_of(0));
#pragma unroll
    for (int k = 0; k < kValueTiles + kRopeIsFp8; ++k) {
      KeyTile next = keys;
      if (k + 1 < kValueTiles + kRopeIsFp8) next.load<kPackedBytes>(source + this->column_of(k + 1));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int s = 2 * k + half;
        warpgroup_wait<kKeyBuffers - 1>();
        if (kBeside && s == kKeyBuffers - 1) this->free_probabilities(t);  // of block t - 2, in the same place
        u32(&x)[kStepRegisters] = a[s % kKeyBuffers];
        keys.expand(half, x);
        keep_before_products(x);
        warpgroup_arrive();
#pragma unroll
        for (int i = 0; i < 2; ++i)
          multiply_heads<Fp16>(
              scores, x + 4 * i,
              descriptor_of_rows<128>(shared.query, (kRopeIsFp8 ? (k + kRopeTile) % kTiles : k) *
                                                            Layout::kQueryTileBytes + half * 64 + i * 32),
              s + i > 0);
        warpgroup_commit();
      }
      keys = next;
    }
    if constexpr (Form::kHasRope && !kRopeIsFp8) multiply_rope(rows + Form::kRope);
    warpgroup_wait<0>();
    keep_behind_wait(scores);
    if constexpr (kBeside) keep_output();
  }
  __device__ __forceinline__ void multiply_rope(u32 rope) {
    u32 a[2][kStepRegisters];
    warpgroup_wait<0>();
    keep_behind_wait(scores);
#pragma unroll
    for (int i = 0; i < kHeads / 2; ++i) scores[i] *= kv_scale;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        u32 words[4];
        load_matrix_x4(words, rope + token_at(lane % 16) * kPackedBytes + (4 * half + 2 * k + lane / 16) * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[half][4 * k + i] = words[i];
      }
      keep_before_products(a[half]);
      warpgroup_arrive();
#pragma unroll
      for (int k = 0; k < 2; ++k)
        multiply_heads<Bf16>(
            scores, a[half] + 4 * k,
            descriptor_of_rows<128>(shared.query, kRopeTile * Layout::kQueryTileBytes + half * 64 + k * 32), true);
      warpgroup_commit();
    }
  }

  // Turns the first block of a segment into probabilities.
  __device__ __forceinline__ void weigh_first(int parity, u32 t) {
    mbarrier_wait(shared.probabilities_free(parity), (t / 2 & 1) ^ 1, "free probabilities");
    float block_sum[kHeadsOfThread];
    find_rows(t);
    this->raise_references(parity);
    this->template store_probabilities<true>(parity, block_sum);
    consumer_sync(consumer);
#pragma unroll
    for (int i = 0; i < kHeadsOfThread; ++i) sum[i] += block_sum[i];
    this->publish(parity, 0);
  }
  // Turns this consumer's block t into probabilities, and beside that multiplies the values of the block before. If
  // references must be raised, scores are computed again: they are not kept.
  __device__ __forceinline__ u32 weigh(u32 t, ValueSteps& steps) {
    const int parity = t & 1;
    if (this->unusual_of(t - 1) & kRaised) {
      this->change_sums(parity ^ 1);
      this->change_output(parity ^ 1);
    }
    steps.begin(0);
    find_rows(t);
    mbarrier_wait(shared.probabilities_free(parity), (t / 2 & 1) ^ 1, "free probabilities");
    float block_sum[kHeadsOfThread];
    constexpr int kAtOnce = kStepsOfBlock / (kHeads / 8);  // steps for each eight heads
    auto multiply = [&](int eight) {
#pragma unroll
      for (int s = kAtOnce * eight; s < kAtOnce * (eight + 1); ++s) steps.step(s, kStepsOfBlock);
    };
    const bool too_high = this->template store_probabilities<false>(parity, block_sum, false, multiply);
    const bool again = this->sync_any(too_high);
    if (!again) this->publish(parity, 0);
    complete_values(t - 1);
    if (again) {
      multiply_query<false>(t);
      this->raise_references(parity);
      this->change_sums(parity);
      this->template store_probabilities<true>(parity, block_sum);
      consumer_sync(consumer);
      this->publish(parity, kRaised);
    }
#pragma unroll
    for (int i = 0; i < kHeadsOfThread; ++i) sum[i] += block_sum[i];
    return again ? kRaised : 0;
  }
  __device__ __forceinline__ void find_rows(u32 t) {
    const GranulePlace<Layout> place(kGranules * t + warp);
    const u32 exist = load_shared_u32(shared.exist(place.slot)) >> token_at(lane / 4);
#pragma unroll
    for (int e = 0; e < 2; ++e) row_shift[e] = exist >> 8 * e & 1 ? 0.0f : -kInfinity;
  }

  __device__ __forceinline__ void complete_values(u32 t) {
    warpgroup_wait<0>();
    keep_output();
    this->free_probabilities(t);
  }
  __device__ __forceinline__ void keep_output() {
#pragma unroll
    for (int d = 0; d < kValueHalf; ++d) keep_behind_wait(output[d]);
  }
};

template <typename Form, bool kGrouped = Form::kGrouped>
struct ConsumerOf {
  using Type = Heads64Consumer<Form>;
};
template <typename Form>
struct ConsumerOf<Form, false> {
  using Type = OneFactorConsumer<Form>;
};

}  // namespace cumla::mla
