// SPDX-License-Identifier: Apache-2.0
// The loading roles of mla_decode_fp8_64.
#pragma once
#include "mla/mla_decode/load.cuh"
#include "mla/mla_decode_fp8/load.cuh"
#include "mla/mla_decode_fp8_64/layout.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace ptx;

// Stands in for an absent row.
__device__ uint4 zero_row[kPackedBytes / 16];

// A warp issues the loads of its granule of a block: a row per lane, by `copy`. `exist`: a bit per visible row.
template <typename Form, typename Copy>
__device__ __forceinline__ void load_granule(const typename Form::Layout& shared,
                                             const GranulePlace<typename Form::Layout>& at, u32 exist, Copy copy) {
  const int lane = threadIdx.x % 32;
  mbarrier_wait(shared.free(at.slot), at.phase ^ 1, "a free slot");
  if (lane == 0) {
    store_shared_u32(shared.exist(at.slot), exist);
    mbarrier_arrive_expect_tx(shared.full(at.slot), kGranuleRows * Form::kBytes);
  }
  __syncwarp();
  if (lane < kGranuleRows) copy(shared.slot(at.slot) + lane * kPackedBytes, shared.full(at.slot));
}

// The same for a granule whose rows are all visible, by one box of TMA, which `copy` issues. The box is as wide as the
// pitch of rows; TMA fills what lies beyond a row with zeros.
template <typename Layout, typename Copy>
__device__ __forceinline__ void load_whole_granule(const Layout& shared, const GranulePlace<Layout>& at, Copy copy) {
  mbarrier_wait(shared.free(at.slot), at.phase ^ 1, "a free slot");
  if (threadIdx.x % 32 == 0) {
    store_shared_u32(shared.exist(at.slot), (1u << kGranuleRows) - 1);
    mbarrier_arrive_expect_tx(shared.full(at.slot), Layout::kSlotBytes);
    copy(shared.slot(at.slot), shared.full(at.slot));
  }
  __syncwarp();
}

// Converts four pairs of bfloat16, times a power of two, to e4m3.
__device__ __forceinline__ void store_e4m3(u32 to, const u32 (&words)[4], float factor) {
  u32 packed[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 a = unpack_pair<Bf16>(words[2 * i]), b = unpack_pair<Bf16>(words[2 * i + 1]);
    packed[i] = pack_e4m3x4(a.x * factor, a.y * factor, b.x * factor, b.y * factor);
  }
  store_shared_float2(to, {__uint_as_float(packed[0]), __uint_as_float(packed[1])});
}

// All threads of both consumers load an e4m3 query, eight lanes per head. It becomes float16 in the order of K's
// fragments, or stays as it is for e4m3 products.
template <typename Form, typename AnyTile>
__device__ __forceinline__ void load_query_fp8_64(const MlaDecodeParams& p, const typename Form::Layout& shared,
                                                  const AnyTile& tile, int request, float factor_of_all) {
  using Layout = typename Form::Layout;
  static_assert(Form::kRopeIsFp8, "the query's RoPE columns are e4m3, too");
  constexpr int kAtOnce = 2 * kWarpgroup / 8, kRounds = Form::kHeads / kAtOnce;
  const int thread = copy_of(threadIdx.x) - kWarpgroup, chunk = thread % 8;
  uint2 kept[kRounds][kTiles];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int row = round * kAtOnce + thread / 8;
    const bool valid = row < tile.rows;
    const Row from(p, tile, valid ? row : 0);
    const char* const latent = query_tile(p, 0, request, from.token, from.head) + chunk * 8;
    const char* const rope = query_tile(p, kRopeTile, request, from.token, from.head) + chunk * 8;
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
      kept[round][k] = {0, 0};
      if (valid) kept[round][k] = *reinterpret_cast<const uint2*>(k == kRopeTile ? rope : latent + k * 64);
    }
  }
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int row = round * kAtOnce + thread / 8;
    const u32 row_bytes = shared.query + row * 128;
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
      if constexpr (Form::kE4m3Products) {
        const u32 tile_bytes = row_bytes + k / 2 * Layout::kQueryTileBytes;
        const int place = k % 2 * 4 + chunk / 2;
        store_shared_float2(tile_bytes + ((place ^ (row & 7)) << 4) + chunk % 2 * 8,
                            {__uint_as_float(kept[round][k].x), __uint_as_float(kept[round][k].y)});
      } else {
        store_halves(row_bytes + k * Layout::kQueryTileBytes, row, chunk, kept[round][k]);
      }
    }
    if (chunk == 0) store_shared_float(shared.score_factor(row), fminf(p.scale_log2 * factor_of_all, kMaxFactor));
  }
  fence_proxy_async_shared();
}

// All threads of both consumers load the query of a segment, eight lanes per head. As in load_query_fp8, rows become
// float16, divided by a power of two, in the order of K's fragments; RoPE columns are divided and stay bfloat16. For
// e4m3 products, rows become e4m3 in their own order; an infinity makes a row NaN. `factor_of_all`: of the scores,
// beside softmax_scale.
template <typename Form, typename AnyTile>
__device__ __forceinline__ void load_query_64(const MlaDecodeParams& p, const typename Form::Layout& shared,
                                              const AnyTile& tile, int request, float factor_of_all) {
  using Layout = typename Form::Layout;
  constexpr int kAtOnce = 2 * kWarpgroup / 8, kRounds = (Form::kHeads + kAtOnce - 1) / kAtOnce;
  constexpr int kOwnTiles = Form::kHasRope ? kTiles : kRopeTile;
  constexpr u32 kExponent = Form::kE4m3Products ? 7 : 14;  // of a row's highest magnitude after division
  const int thread = copy_of(threadIdx.x) - kWarpgroup;  // loaded anew: ptxas would keep addresses over the blocks
  const int chunk = thread % 8;
  uint4 kept[kRounds][kOwnTiles];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int row = round * kAtOnce + thread / 8;
    const bool valid = row < tile.rows;
    const Row from(p, tile, valid ? row : 0);
    const char* const latent = query_tile(p, 0, request, from.token, from.head) + chunk * 16;
    const char* const rope = query_tile(p, kRopeTile, request, from.token, from.head) + chunk * 16;
#pragma unroll
    for (int k = 0; k < kOwnTiles; ++k) {
      kept[round][k] = {0, 0, 0, 0};
      if (valid) kept[round][k] = *reinterpret_cast<const uint4*>(k == kRopeTile ? rope : latent + k * 128);
    }
  }
#pragma unroll (Form::kGrouped || AnyTile::kIsList ? 1 : kRounds)
  for (int round = 0; round < kRounds; ++round) {
    const int row = round * kAtOnce + thread / 8;
    if (Form::kHeads < kAtOnce && row >= Form::kHeads) continue;
    u32 highest = 0;
#pragma unroll
    for (int k = 0; k < kOwnTiles; ++k) highest = highest_magnitude(highest, kept[0][k]);
    const u32 exponent = row_exponent(highest);
    const bool finite = !Form::kE4m3Products || exponent < 255;
    const float factor = __uint_as_float(finite ? (127 + kExponent + 127 - exponent) << 23 : 0x7fffffffu);
    const u32 row_bytes = shared.query + row * 128;
#pragma unroll
    for (int k = 0; k < kOwnTiles; ++k) {
      const uint4 v = kept[0][k];
      const u32 words[4] = {v.x, v.y, v.z, v.w};
      if (Form::kE4m3Products && (k < kRopeTile || Form::kRopeIsFp8)) {
        const int place = k % 2 * 4 + chunk / 2;
        store_e4m3(row_bytes + k / 2 * Layout::kQueryTileBytes + ((place ^ (row & 7)) << 4) + chunk % 2 * 8, words,
                   factor);
      } else if (k < kRopeTile || Form::kRopeIsFp8) {
        store_scaled(row_bytes + k * Layout::kQueryTileBytes, row, chunk, words, factor);
      } else {
        const u32 to = row_bytes + (Layout::kQueryTiles - 1) * Layout::kQueryTileBytes;
        u32 scaled[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 pair = unpack_pair<Bf16>(words[j]);
          scaled[j] = pack_pair<Bf16>(pair.x * factor, pair.y * factor);
        }
        store_shared_16(to + ((chunk ^ (row & 7)) << 4), {scaled[0], scaled[1], scaled[2], scaled[3]});
      }
    }
    if (chunk == 0) {
      const float of_scores = __uint_as_float((exponent - kExponent) << 23) * p.scale_log2 * factor_of_all;
      store_shared_float(shared.score_factor(row), fminf(of_scores, kMaxFactor));
    }
    static_assert(kRounds <= 2, "the second round's rows move to the place of the first one's");
#pragma unroll
    for (int k = 0; k < kOwnTiles; ++k) kept[0][k] = kept[kRounds - 1][k];
  }
  fence_proxy_async_shared();
}

}  // namespace cumla::mla
