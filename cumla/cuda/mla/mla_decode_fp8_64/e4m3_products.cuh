// SPDX-License-Identifier: Apache-2.0
// The computing role with products in e4m3, of caches whose e4m3 columns have one factor: rows go to the tensor cores as
// they are, and meet a query and probabilities in e4m3.
//
// Products take half of the time then, and a softmax as long as ever. So that one consumer's products run beside the
// other's softmax, all products of a turn follow each other without a wait between them:
//
//   consumer 0:  softmax0  O += V0 P0, S2               softmax2  O += V1 P1, O += V2 P2, S4
//   consumer 1:            softmax1  O += V0 P0, O += V1 P1, S3             softmax3 ...
//
// V's fragments need four tokens of a column in a register. ldmatrix, transposed, brings two columns of two tokens: two
// such registers become one of each column (__byte_perm), and neighbours in it are tokens i and i + 8 of a granule. In
// this order probabilities lie, too.
#pragma once
#include "mla/mla_decode_fp8_64/compute.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/types.cuh"
#include "ptx/wgmma.cuh"

namespace cumla::mla {

using namespace ptx;

// Of a Heads64Consumer it takes output, scores, sums and references, in its thread layout with rows lane / 4 of granule
// `warp` and that + 8.
template <typename Form>
struct E4m3Consumer {
  using Layout = typename Form::Layout;
  static constexpr int kPairs = kValueTiles + Form::kRopeIsFp8;  // of products of K, of 32 columns each
  static constexpr int kTilesHere = Heads64Consumer<Form>::kValueHalf;
  static constexpr int kHalfRegisters = 4 * kTilesHere;
  static constexpr int kBuffers = 3;  // of fragments of K
  static_assert(Layout::kSlots % kGranules == 0, "a block lies in one piece");

  Heads64Consumer<Form>& of;
  const Layout& shared = of.shared;
  const int consumer = of.consumer, warp = of.warp, lane = of.lane;

  __device__ __forceinline__ static int turn_of(u32 t) { return t % Layout::kTurns; }
  __device__ __forceinline__ static u32 phase_of(u32 t) { return t / Layout::kTurns & 1; }

  // `t`: blocks of the segments before. Returns how many there were.
  __device__ __forceinline__ int compute(int blocks, u32 t) const {
    of.begin();
    const int first = (consumer ^ t) & 1;
    if (first < blocks) {
      multiply_query(t + first);
      finish_scores(t + first);
      weigh(t + first, first == 0);
    }
#pragma unroll 1
    for (int i = first; i < blocks + (i > 0); i += 2) {
      const bool has_next = i + 2 < blocks;
      if (i == 0)
        multiply_values<false, true>(t - 1);
      else if (i < blocks)
        multiply_values<true, true>(t + i - 1);
      else
        multiply_values<true, false>(t + i - 1);
      if (has_next) {
        multiply_query(t + i + 2);
        finish_scores(t + i + 2);
      }
      __syncwarp();
      if (lane == 0) {
        if (i > 0) mbarrier_arrive(shared.probabilities_free(turn_of(t + i - 1)));
        if (i < blocks) mbarrier_arrive(shared.probabilities_free(turn_of(t + i)));  // plant: probabilities read
      }
      if (has_next) weigh(t + i + 2, false);
    }
    const u32 last = t + blocks - 1;
    if (blocks > 0 && ((consumer ^ last) & 1) && (load_shared_u32(shared.unusual(turn_of(last))) & kRaised))
      of.change_sums(turn_of(last));
    return blocks;
  }

  // Begins scores = a block's rows x query, in e4m3. What is loaded behind a product comes when that is done, too late
  // for the next one: so fragments come a step before.
  __device__ __forceinline__ void multiply_query(u32 t) const {
    const u32 rows = rows_of(t);
    u32 a[kBuffers][kStepRegisters];
#pragma unroll
    for (int i = 0; i < kHeads / 2; ++i) of.scores[i] = 0.0f;  // what was there needs no registers any more
    load_pair(a[0], rows);
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      if (k > 0) warpgroup_wait<kBuffers - 2>();
      if (k + 1 < kPairs) load_pair(a[(k + 1) % kBuffers], rows + (k + 1) * 64);
      multiply_pair(a[k % kBuffers], [&](int i, const u32* fragment) {
        wgmma_e4m3_async(of.scores, fragment,
                         descriptor_of_rows<128>(shared.query, k / 2 * Layout::kQueryTileBytes + k % 2 * 64 + i * 32),
                         k + i > 0);
      });
    }
  }
  // Then the scores are there, but for a factor of each head.
  __device__ __forceinline__ void finish_scores(u32 t) const {
    warpgroup_wait<0>();
    keep_behind_wait(of.scores);
    if constexpr (!Form::kRopeIsFp8) {
      const u32 rows = rows_of(t) + Form::kRope;
      u32 a[2][kStepRegisters];
#pragma unroll
      for (int half = 0; half < 2; ++half) load_pair(a[half], rows + half * 64);
#pragma unroll
      for (int i = 0; i < kHeads / 2; ++i) of.scores[i] *= of.kv_scale;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        multiply_pair(a[half], [&](int i, const u32* fragment) {
          constexpr int kRopeQuery = (Layout::kQueryTiles - 1) * Layout::kQueryTileBytes;
          wgmma_m64n64k16_async<Bf16>(of.scores, fragment,
                                      descriptor_of_rows<128>(shared.query, kRopeQuery + half * 64 + i * 32), true);
        });
      warpgroup_wait<0>();
      keep_behind_wait(of.scores);
    }
    const u32 exist = load_shared_u32(shared.exist(GranulePlace<Layout>(kGranules * t + warp).slot)) >> lane / 4;
#pragma unroll
    for (int e = 0; e < 2; ++e) of.row_shift[e] = exist >> 8 * e & 1 ? 0.0f : -kInfinity;
  }

  // Where a lane reads its part of the fragments of K; the granule is there then.
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

  // This consumer's block t becomes probabilities. `is_first`: of the segment.
  __device__ __forceinline__ void weigh(u32 t, bool is_first) const {
    const int turn = turn_of(t), before = turn_of(t - 1);
    if (!is_first) {
      mbarrier_wait(shared.probabilities_full(before), phase_of(t - 1), "the other's probabilities");
      if (load_shared_u32(shared.unusual(before)) & kRaised) of.change_sums(before);
    }
    mbarrier_wait(shared.probabilities_free(turn), phase_of(t) ^ 1, "free probabilities");
    float block_sum[kHeadsOfThread];
    const bool raised = of.sync_any(store_probabilities<false>(turn, block_sum));
    if (raised) {
      of.raise_references(turn);
      of.change_sums(turn);
      store_probabilities<true>(turn, block_sum);
      consumer_sync(consumer);
    }
    if (threadIdx.x % kWarpgroup == 0) {
      store_shared_u32(shared.unusual(turn), raised ? kRaised : 0);
      mbarrier_arrive(shared.probabilities_full(turn));  // plant: probabilities
    }
#pragma unroll
    for (int i = 0; i < kHeadsOfThread; ++i) of.sum[i] += block_sum[i];
  }

  // scores -> probabilities, relative to the references, for all warps, and their sums, as rounded: the output is an
  // average of rows then, however few count. Tells whether some are too high, as high as numbers of e4m3 can be.
  template <bool kAgain>
  __device__ __forceinline__ bool store_probabilities(int turn, float (&block_sum)[kHeadsOfThread]) const {
    const u32 to = shared.probabilities(turn) + lane * kBlockTokens + (swizzled_chunk<kBlockTokens>(lane, warp) << 4);
    u32 packed[4], highest = 0;
#pragma unroll
    for (int i = 0; i < kHeads / 2; i += 4) {
      const float2 factors = load_shared_float2(shared.score_factor(of.head_of(i / 2)));
      const float2 references = load_shared_float2(shared.reference(of.head_of(i / 2)));
      float v[2][2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float* const s = of.scores + i + 2 * e;
        v[e][0] = exp2_approx(of.template relative<kAgain>(s[0], factors.x, of.row_shift[e], references.x));
        v[e][1] = exp2_approx(of.template relative<kAgain>(s[1], factors.y, of.row_shift[e], references.y));
      }
      const u32 bytes = pack_e4m3x4(v[0][0], v[0][1], v[1][0], v[1][1]);
      packed[i / 4 % 4] = __byte_perm(bytes, 0, 0x3120);
      u32 first, second;  // as rounded: of either token, of both heads
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

  // Begins output += V x probabilities of two blocks, or of one, the second of which this consumer has scored. All
  // fragments of half a block are loaded before its products.
  template <bool kFirst, bool kSecond>
  __device__ __forceinline__ void multiply_values(u32 t) const {
    u32 a[2][kHalfRegisters];
    if constexpr (kFirst) {
      find_probabilities(t);
      load_half(a[0], t, 0);
      load_half(a[1], t, 1);
      multiply_half(a[0], t, 0);
      multiply_half(a[1], t, 1);
    }
    if constexpr (kSecond) {
      if constexpr (kFirst) warpgroup_wait<1>();
      load_half(a[0], t + 1, 0);
      find_probabilities(t + 1);
      multiply_half(a[0], t + 1, 0);
      if constexpr (kFirst) warpgroup_wait<1>();
      load_half(a[1], t + 1, 1);
      multiply_half(a[1], t + 1, 1);
    }
    wait_for_output();
  }

  // Probabilities of block t are there, and what there is of the output is relative to the same references.
  __device__ __forceinline__ void find_probabilities(u32 t) const {
    const int turn = turn_of(t);
    mbarrier_wait(shared.probabilities_full(turn), phase_of(t), "probabilities");
    if (load_shared_u32(shared.unusual(turn)) & kRaised) {
      wait_for_output();
      of.change_output(turn);
    }
  }
  __device__ __forceinline__ void wait_for_output() const {
    warpgroup_wait<0>();
#pragma unroll
    for (int d = 0; d < kTilesHere; ++d) keep_behind_wait(of.output[d]);
  }

  // Two granules of a block, as A of a product for each tile of V.
  __device__ __forceinline__ void load_half(u32 (&a)[kHalfRegisters], u32 t, int half) const {
    const u32 slot = GranulePlace<Layout>(kGranules * t).slot + 2 * half;
    const u32 source = shared.slot(slot + lane / 16) + lane % 16 * kPackedBytes + consumer * 256 + warp * 16;
#pragma unroll
    for (int d = 0; d < kTilesHere; ++d) {
      u32 words[4];
      load_matrix_x4_transposed(words, source + d * 64);
#pragma unroll
      for (int i = 0; i < 4; ++i) a[4 * d + i] = words[i];
    }
  }
  // Then these granules are free.
  __device__ __forceinline__ void multiply_half(u32 (&a)[kHalfRegisters], u32 t, int half) const {
#pragma unroll
    for (int i = 0; i < kHalfRegisters; i += 2) {
      const u32 first = a[i], second = a[i + 1];
      a[i] = __byte_perm(first, second, 0x6240);
      a[i + 1] = __byte_perm(first, second, 0x7351);
    }
    keep_before_products(a);
    const u64 b = descriptor_of_rows<kBlockTokens>(shared.probabilities(turn_of(t)), half * 32);
    warpgroup_arrive();
#pragma unroll
    for (int d = 0; d < kTilesHere; ++d) wgmma_e4m3_async(of.output[d], a + 4 * d, b, true);
    warpgroup_commit();
    __syncwarp();
    if (lane == 0) {
      const u32 slot = GranulePlace<Layout>(kGranules * t).slot + 2 * half;
#pragma unroll
      for (int i = 0; i < 2; ++i) mbarrier_arrive(shared.free(slot + i));  // plant: slot read
    }
  }
};

}  // namespace cumla::mla
