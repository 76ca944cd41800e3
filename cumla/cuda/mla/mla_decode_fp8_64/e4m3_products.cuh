// SPDX-License-Identifier: Apache-2.0
// Products in e4m3, of caches whose e4m3 columns have one factor: rows go to the tensor cores as they are, and meet a
// query and probabilities in e4m3.
//
// V's fragments need four tokens of a column in a register. ldmatrix, transposed, brings two columns of two tokens: two
// such registers become one of each column (__byte_perm), and neighbours in it are tokens i and i + 8 of a granule. In
// this order probabilities lie, too.
#pragma once
#include "mla/mla_decode_fp8/products.cuh"
#include "mla/mla_decode_fp8_64/layout.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/types.cuh"
#include "ptx/wgmma.cuh"

namespace cumla::mla {

using namespace ptx;

// Probabilities are relative to references, as in mla/mla_decode_fp8/softmax.cuh. With a reference that has just been
// raised the highest one is above 2^5; the numbers of e4m3 go from 2^-9, where they have a bit, to 448.
constexpr float kBelowInE4m3 = 6.0f, kSlackInE4m3 = 8.75f, kMostE4m3 = 430.5f;

// Of a Heads64Consumer, whose thread layout of scores this has with rows lane / 4 of granule `warp` and that + 8.
template <typename Consumer>
struct E4m3Products {
  using Form = typename Consumer::Form;
  using Layout = typename Form::Layout;
  static constexpr int kAhead = 3;  // groups of products that run while the next one's fragments come

  Consumer& of;
  const Layout& shared = of.shared;
  const int warp = of.warp, lane = of.lane;

  // scores = a block's rows x query, but for a factor of each head.
  __device__ __forceinline__ void multiply_query(u32 t) const {
    const GranulePlace<Layout> place(kGranules * t + warp);
    mbarrier_wait(shared.full(place.slot), place.phase, "a granule");
    const u32 source = shared.slot(place.slot) + lane % 16 * kPackedBytes + lane / 16 * 16;
    u32 a[kAhead + 1][kStepRegisters];
#pragma unroll
    for (int k = 0; k < kValueTiles + Form::kRopeIsFp8; ++k) {
      warpgroup_wait<kAhead>();
      load_step(a[k % (kAhead + 1)], source + k * 64);
      multiply_step(a[k % (kAhead + 1)], [&](int i, const u32* fragment) {
        wgmma_e4m3_async(of.scores, fragment,
                         descriptor_of_rows<128>(shared.query, k / 2 * Layout::kQueryTileBytes + k % 2 * 64 + i * 32),
                         k + i > 0);
      });
    }
    warpgroup_wait<0>();
    keep_behind_wait(of.scores);
    if constexpr (!Form::kRopeIsFp8) {
#pragma unroll
      for (int i = 0; i < kHeads / 2; ++i) of.scores[i] *= of.kv_scale;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        load_step(a[half], source + Form::kRope + half * 64);
        multiply_step(a[half], [&](int i, const u32* fragment) {
          constexpr int kRopeQuery = (Layout::kQueryTiles - 1) * Layout::kQueryTileBytes;
          wgmma_m64n64k16_async<Bf16>(of.scores, fragment,
                                      descriptor_of_rows<128>(shared.query, kRopeQuery + half * 64 + i * 32), true);
        });
      }
      warpgroup_wait<0>();
      keep_behind_wait(of.scores);
    }
    const u32 exist = load_shared_u32(shared.exist(place.slot)) >> lane / 4;
#pragma unroll
    for (int e = 0; e < 2; ++e) of.row_shift[e] = exist >> 8 * e & 1 ? 0.0f : -kInfinity;
  }

  // 64 bytes of the granule's rows, as A of two products.
  __device__ __forceinline__ static void load_step(u32 (&a)[kStepRegisters], u32 source) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      u32 words[4];
      load_matrix_x4(words, source + i * 32);
#pragma unroll
      for (int j = 0; j < 4; ++j) a[4 * i + j] = words[j];
    }
  }
  template <typename Product>
  __device__ __forceinline__ static void multiply_step(u32 (&a)[kStepRegisters], Product product) {
    keep_before_products(a);
    warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < 2; ++i) product(i, a + 4 * i);
    warpgroup_commit();
  }

  // scores -> probabilities, relative to the references, for all warps, and their sums, as rounded: the output is an
  // average of rows then, however many count. Tells whether some are too high.
  template <bool kAgain>
  __device__ __forceinline__ bool store_probabilities(int parity, float (&block_sum)[kHeadsOfThread]) const {
    const u32 to = shared.probabilities(parity) + lane * kBlockTokens + (swizzled_chunk<kBlockTokens>(lane, warp) << 4);
    float highest = 0.0f;
    u32 packed[4];
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

  // output += V x probabilities of block t; then its granules are free.
  __device__ __forceinline__ void multiply_values(u32 t) const {
    static_assert(Layout::kSlots % kGranules == 0, "a block lies in one piece");
    constexpr int kSteps = kGranules / 2 * Consumer::kValueHalf;
    const u32 first_slot = GranulePlace<Layout>(kGranules * t).slot;
    const u32 source = shared.slot(first_slot + lane / 16) + lane % 16 * kPackedBytes + of.consumer * 256 + warp * 16;
    u32 words[2][4], a[kAhead + 1][4];
    auto fetch = [&](int s) {
      load_matrix_x4_transposed(
          words[s & 1],
          source + s / Consumer::kValueHalf * 2 * Layout::kSlotBytes + s % Consumer::kValueHalf * 64);
    };
    fetch(0);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int pair = s / Consumer::kValueHalf, d = s % Consumer::kValueHalf;
      if (s + 1 < kSteps) fetch(s + 1);
      if (s > kAhead) warpgroup_wait<kAhead>();
      u32(&x)[4] = a[s % (kAhead + 1)];
      const u32(&w)[4] = words[s & 1];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = __byte_perm(w[i & 2], w[i & 2 | 1], i & 1 ? 0x7351 : 0x6240);
      keep_before_products(x);
      warpgroup_arrive();
      wgmma_e4m3_async(of.output[d], x, descriptor_of_rows<kBlockTokens>(shared.probabilities(t & 1), pair * 32), true);
      warpgroup_commit();
      if (d + 1 == Consumer::kValueHalf) {
        __syncwarp();
        if (lane == 0) {
#pragma unroll
          for (int i = 0; i < 2; ++i) mbarrier_arrive(shared.free(first_slot + 2 * pair + i));  // plant: slot read
        }
      }
    }
    warpgroup_wait<0>();
#pragma unroll
    for (int d = 0; d < Consumer::kValueHalf; ++d) keep_behind_wait(of.output[d]);
  }
};

}  // namespace cumla::mla
