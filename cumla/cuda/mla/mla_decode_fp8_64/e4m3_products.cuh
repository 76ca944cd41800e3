// SPDX-License-Identifier: Apache-2.0
// Products in e4m3, of caches whose e4m3 columns have one factor: rows go to the tensor cores as they are, and meet a
// query and probabilities in e4m3. A product takes half of the time then, and a softmax as long as ever: one warpgroup
// scores all blocks, its products of the next one beside the softmax of this one, and two sum up half of V's columns
// each, one block behind.
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

constexpr float kMostE4m3 = 430.5f;  // 2^8.75: higher ones would be near 448, the highest number of e4m3

// Of a Heads64Consumer it takes scores, sums and references, in its thread layout with rows lane / 4 of granule `warp`
// and that + 8.
template <typename Form>
struct E4m3Scorer {
  using Layout = typename Form::Layout;
  static constexpr int kBuffers = 3;  // of fragments
  static constexpr int kPairs = kValueTiles + Form::kRopeIsFp8;  // of e4m3

  Heads64Consumer<Form>& of;
  const Layout& shared = of.shared;
  const int warp = of.warp, lane = of.lane;

  __device__ __forceinline__ int score(int blocks, u32 t) const {
    of.begin();
    if (blocks > 0) {
      multiply_query(t);
      find_rows(t);
    }
#pragma unroll 1
    for (int i = 0; i < blocks; ++i) weigh(t + i, i + 1 < blocks);
    return blocks;
  }

  // Where a lane reads its part of the fragments of K; the granule is there then.
  __device__ __forceinline__ u32 rows_of(u32 t) const {
    const GranulePlace<Layout> place(kGranules * t + warp);
    mbarrier_wait(shared.full(place.slot), place.phase, "a granule");
    return shared.slot(place.slot) + lane % 16 * kPackedBytes + lane / 16 * 16;
  }

  struct Fragments {
    u32 a[kBuffers][kStepRegisters];
  };

  // Fragments of the k-th two products of a block's rows and the query, each of 32 columns, and the products before: what
  // is loaded behind products comes when they are done, too late for those that need it.
  __device__ __forceinline__ void multiply_step(Fragments& fragments, float (&scores)[kHeads / 2], u32 rows, int k) const {
    if (k < kPairs) {
      warpgroup_wait<kBuffers - 2>();
      load_pair(fragments.a[k % kBuffers], rows + k * 64);
    }
    if (k > 0) multiply_pair(fragments.a[(k - 1) % kBuffers], scores, k - 1);
  }
  __device__ __forceinline__ void multiply_pair(u32 (&a)[kStepRegisters], float (&scores)[kHeads / 2], int k) const {
    keep_before_products(a);
    warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < 2; ++i)
      wgmma_e4m3_async(scores, a + 4 * i,
                       descriptor_of_rows<128>(shared.query, k / 2 * Layout::kQueryTileBytes + k % 2 * 64 + i * 32),
                       k + i > 0);
    warpgroup_commit();
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

  // What products of e4m3 have left of a block's scores; then they are there, but for a factor of each head.
  __device__ __forceinline__ void finish_products(Fragments& fragments, float (&scores)[kHeads / 2], u32 rows) const {
    warpgroup_wait<0>();
    keep_behind_wait(scores);
    if constexpr (!Form::kRopeIsFp8) {
#pragma unroll
      for (int i = 0; i < kHeads / 2; ++i) scores[i] *= of.kv_scale;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        constexpr int kRopeQuery = (Layout::kQueryTiles - 1) * Layout::kQueryTileBytes;
        u32(&a)[kStepRegisters] = fragments.a[half];
        load_pair(a, rows + Form::kRope + half * 64);
        keep_before_products(a);
        warpgroup_arrive();
#pragma unroll
        for (int i = 0; i < 2; ++i)
          wgmma_m64n64k16_async<Bf16>(scores, a + 4 * i,
                                      descriptor_of_rows<128>(shared.query, kRopeQuery + half * 64 + i * 32), true);
        warpgroup_commit();
      }
      warpgroup_wait<0>();
      keep_behind_wait(scores);
    }
  }

  // Of the first block of a segment.
  __device__ __forceinline__ void multiply_query(u32 t) const {
    const u32 rows = rows_of(t);
    Fragments fragments;
#pragma unroll
    for (int k = 0; k <= kPairs; ++k) multiply_step(fragments, of.scores, rows, k);
    finish_products(fragments, of.scores, rows);
  }

  // Which rows of a block there are.
  __device__ __forceinline__ void find_rows(u32 t) const {
    const u32 exist = load_shared_u32(shared.exist(GranulePlace<Layout>(kGranules * t + warp).slot)) >> lane / 4;
#pragma unroll
    for (int e = 0; e < 2; ++e) of.row_shift[e] = exist >> 8 * e & 1 ? 0.0f : -kInfinity;
  }

  // Block t becomes probabilities, and the next one, if there is one, scores.
  __device__ __forceinline__ void weigh(u32 t, bool has_next) const {
    const int parity = t & 1;
    mbarrier_wait(shared.probabilities_free(parity), (t / 2 & 1) ^ 1, "free probabilities");
    float block_sum[kHeadsOfThread], next[kHeads / 2];
    bool too_high;
    if (has_next) {
      const u32 rows = rows_of(t + 1);
      Fragments fragments;
      too_high = store_probabilities<false>(parity, block_sum, [&](int i) { multiply_step(fragments, next, rows, i); });
#pragma unroll
      for (int k = kHeads / 8; k <= kPairs; ++k) multiply_step(fragments, next, rows, k);
      finish_products(fragments, next, rows);
    } else {
      too_high = store_probabilities<false>(parity, block_sum, [](int) {});
    }
    const bool raised = of.sync_any(too_high);
    if (raised) {
      of.raise_references(parity);
      of.change_sums(parity);
      store_probabilities<true>(parity, block_sum, [](int) {});
      consumer_sync(of.consumer);
    }
    if (threadIdx.x % kWarpgroup == 0) {
      store_shared_u32(shared.unusual(parity), raised ? kRaised : 0);
      mbarrier_arrive(shared.probabilities_full(parity));  // plant: probabilities
    }
#pragma unroll
    for (int i = 0; i < kHeadsOfThread; ++i) of.sum[i] += block_sum[i];
    if (has_next) {
#pragma unroll
      for (int i = 0; i < kHeads / 2; ++i) of.scores[i] = next[i];
      find_rows(t + 1);
    }
  }

  // scores -> probabilities, relative to the references, for all warps, and their sums, as rounded: the output is an
  // average of rows then, however few count. Tells whether some are too high. `beside(i)`: what else is to be done, in
  // steps as there are groups of eight heads.
  template <bool kAgain, typename Beside>
  __device__ __forceinline__ bool store_probabilities(int parity, float (&block_sum)[kHeadsOfThread],
                                                      Beside beside) const {
    const u32 to = shared.probabilities(parity) + lane * kBlockTokens + (swizzled_chunk<kBlockTokens>(lane, warp) << 4);
    float highest = 0.0f;
    u32 packed[4];
#pragma unroll
    for (int i = 0; i < kHeads / 2; i += 4) {
      beside(i / 4);
      const float2 factors = load_shared_float2(shared.score_factor(of.head_of(i / 2)));
      const float2 references = load_shared_float2(shared.reference(of.head_of(i / 2)));
      float v[2][2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float* const s = of.scores + i + 2 * e;
        v[e][0] = exp2_approx(of.template relative<kAgain>(s[0], factors.x, of.row_shift[e], references.x));
        v[e][1] = exp2_approx(of.template relative<kAgain>(s[1], factors.y, of.row_shift[e], references.y));
        highest = fmaxf(highest, fmaxf(v[e][0], v[e][1]));
      }
      const u32 bytes = pack_e4m3x4(v[0][0], v[0][1], v[1][0], v[1][1]);
      packed[i / 4 % 4] = __byte_perm(bytes, 0, 0x3120);
      u32 rounded[2];
      expand_e4m3x4(bytes, rounded[0], rounded[1]);
      const float2 first = unpack_pair<Fp16>(rounded[0]), second = unpack_pair<Fp16>(rounded[1]);
      block_sum[i / 2] = first.x + second.x;
      block_sum[i / 2 + 1] = first.y + second.y;
      if (i % 16 == 12)
        store_matrix_x4_transposed(to + i / 16 * 32 * kBlockTokens, packed[0], packed[1], packed[2], packed[3]);
    }
    fence_proxy_async_shared();
    return highest > kMostE4m3;
  }
};

template <typename Form>
struct E4m3Values {
  using Layout = typename Form::Layout;
  static constexpr int kAhead = 2;    // products that run while the next one's fragments come
  static constexpr int kFetched = 2;  // steps ahead
  static constexpr int kTilesHere = Heads64Consumer<Form>::kValueHalf;

  Heads64Consumer<Form>& of;
  const Layout& shared = of.shared;
  const int warp = of.warp, lane = of.lane;

  __device__ __forceinline__ int add(int blocks, u32 t) const {
    of.begin();
#pragma unroll 1
    for (int i = 0; i < blocks; ++i) multiply_values(t + i);
    return blocks;
  }

  // output += V x probabilities of block t; then its granules are free.
  __device__ __forceinline__ void multiply_values(u32 t) const {
    static_assert(Layout::kSlots % kGranules == 0, "a block lies in one piece");
    constexpr int kSteps = kGranules / 2 * kTilesHere;
    const int parity = t & 1;
    mbarrier_wait(shared.probabilities_full(parity), t / 2 & 1, "probabilities");
    if (load_shared_u32(shared.unusual(parity)) & kRaised) of.change_output(parity);
    const u32 first_slot = GranulePlace<Layout>(kGranules * t).slot;
    const u32 source = shared.slot(first_slot + lane / 16) + lane % 16 * kPackedBytes + of.consumer * 256 + warp * 16;
    u32 words[kFetched + 1][4], a[kAhead + 1][4];
    auto fetch = [&](int s) {
      load_matrix_x4_transposed(words[s % (kFetched + 1)],
                                source + s / kTilesHere * 2 * Layout::kSlotBytes + s % kTilesHere * 64);
    };
#pragma unroll
    for (int s = 0; s < kFetched; ++s) fetch(s);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int pair = s / kTilesHere, d = s % kTilesHere;
      if (s + kFetched < kSteps) fetch(s + kFetched);
      if (s > kAhead) warpgroup_wait<kAhead>();
      u32(&x)[4] = a[s % (kAhead + 1)];
      const u32(&w)[4] = words[s % (kFetched + 1)];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = __byte_perm(w[i & 2], w[i & 2 | 1], i & 1 ? 0x7351 : 0x6240);
      keep_before_products(x);
      warpgroup_arrive();
      wgmma_e4m3_async(of.output[d], x, descriptor_of_rows<kBlockTokens>(shared.probabilities(parity), pair * 32), true);
      warpgroup_commit();
      if (d + 1 == kTilesHere) {
        __syncwarp();
        if (lane == 0) {
#pragma unroll
          for (int i = 0; i < 2; ++i) mbarrier_arrive(shared.free(first_slot + 2 * pair + i));  // plant: slot read
        }
      }
    }
    warpgroup_wait<0>();
#pragma unroll
    for (int d = 0; d < kTilesHere; ++d) keep_behind_wait(of.output[d]);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared.probabilities_free(parity));  // plant: probabilities read
  }
};

}  // namespace cumla::mla
