// SPDX-License-Identifier: Apache-2.0
// The loading roles of mla_decode_fp8_converted.
#pragma once
#include "mla/mla_decode/compute.cuh"
#include "mla/mla_decode/load.cuh"
#include "mla/mla_decode/shared.cuh"
#include "mla/mla_decode_fp8/load.cuh"
#include "ptx/cluster.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace ptx;

// Stands in for an absent row.
__device__ uint4 absent_row[kHeadDim / 16];

// All threads of both consumers load the query rows of a segment, eight lanes per row. Rows become float16, divided by
// a power of two that brings their highest magnitude just below 2^15. `kv_scale`: of the scores, beside softmax_scale.
template <typename Layout, typename AnyTile>
__device__ __forceinline__ void load_query_converted(const MlaDecodeParams& p, const Layout& shared,
                                                     const AnyTile& tile, int request, float kv_scale) {
  constexpr u32 kExponent = 14;
  const int thread = copy_of(threadIdx.x) - kWarpgroup, chunk = thread % 8;
#pragma unroll 1
  for (int row = thread / 8; row < kRowTile; row += 2 * kWarpgroup / 8) {
    const bool valid = row < tile.rows;
    const Row from(p, tile, valid ? row : 0);
    const char* const latent = query_tile(p, 0, request, from.token, from.head) + chunk * 16;
    const char* const rope = query_tile(p, kRopeTile, request, from.token, from.head) + chunk * 16;
    uint4 kept[kTiles];
    u32 highest = 0;
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
      kept[k] = {0, 0, 0, 0};
      if (valid) kept[k] = *reinterpret_cast<const uint4*>(k == kRopeTile ? rope : latent + k * 128);
    }
#pragma unroll
    for (int k = 0; k < kTiles; ++k) highest = highest_magnitude(highest, kept[k]);
    const u32 exponent = row_exponent(highest);
    const float factor = __uint_as_float((127 + kExponent + 127 - exponent) << 23);
    const u32 to = shared.query + row * 128 + ((chunk ^ (row & 7)) << 4);
#pragma unroll
    for (int k = 0; k < kTiles; ++k)
      store_shared_16(to + k * kTileBytes, {scaled_to_half(kept[k].x, factor), scaled_to_half(kept[k].y, factor),
                                            scaled_to_half(kept[k].z, factor), scaled_to_half(kept[k].w, factor)});
    if (chunk == 0) {
      const float of_scores = __uint_as_float((exponent - kExponent) << 23) * p.scale_log2 * kv_scale;
      store_shared_float(score_factor_in(shared, row), fminf(of_scores, kMaxFactor));
    }
  }
  fence_proxy_async_shared();
}

// The rows of the blocks of a CTA that a loading warp converts: sets of eight, one if two CTAs share the rows. A load
// has 16 columns: of a half of the latent columns of two rows, or of the RoPE columns of eight rows.
template <int kWho, typename Layout, typename AnyTile>
struct RowConverter {
  static constexpr int kCtas = AnyTile::kCtas, kSets = 2 / kCtas, kSet = 8, kOwn = kSets * kSet;
  static constexpr int kHalfTiles = Layout::kHalfTiles, kHalfBytes = kHalfTiles * 64;

  const MlaDecodeParams& p;
  const Layout& shared;
  const AnyTile& tile;
  const int lane, first_row;
  const u32 to_other;  // distance to the other CTA's shared memory
  BlockCursor<1, AnyTile> ahead;
  PageRow next;
  bool more;           // there is a block at `next`
  u64 own;             // address of a lane's row of the block that is being loaded
  uint4 latent[2][4], rope;

  __device__ __forceinline__ RowConverter(const MlaDecodeParams& p, const Layout& shared, const AnyTile& tile,
                                          const Part& part, int last_place, int warp)
      : p(p),
        shared(shared),
        tile(tile),
        lane(threadIdx.x % 32),
        first_row((kCtas == 2 ? (blockIdx.x & 1) * 4 + warp : warp) * kOwn),
        to_other(kCtas == 2 ? shared_address_in(shared.query, blockIdx.x & 1 ^ 1) - shared.query : 0),
        ahead(p, tile, part, last_place, 0) {
    find();
  }

  // Looks up a lane's row of the next block.
  __device__ __forceinline__ void find() {
    more = ahead.valid();
    if (!more) return;
    if (kWho != 1 && ahead.i == 0) fetch_query();
    const int row = first_row + lane % kOwn;
    const bool visible = (ahead.segment.begin + ahead.i) * kBlockTokens + row < ahead.segment.tokens - tile.least_shift;
    next = {-1, 0};
    if (visible) next = ahead.template row_of<kRows>(row);
    ahead.next();
  }

  // Has L2 fetch this warp's share of the query rows of the segment that begins.
  __device__ __forceinline__ void fetch_query() const {
    constexpr int kShare = kRowTile / 4;
#pragma unroll 1
    for (int i = lane; i < kShare * kTiles; i += 32) {
      const int row = threadIdx.x / 32 % 4 * kShare + i / kTiles;
      const Row from(p, tile, row < tile.rows ? row : 0);
      prefetch_l2(query_tile(p, i % kTiles, ahead.segment.request, from.token, from.head));
    }
  }

  // Makes the block at `next` the one to load. False: there is none.
  __device__ __forceinline__ bool take() {
    if (!more) return false;
    const bool exists = static_cast<u32>(next.page) < p.num_pages;
    own = reinterpret_cast<u64>(exists ? p.latent.base + next.page * p.latent.stride_page +
                                             next.row * p.latent.stride_row + blockIdx.z * p.latent.stride_head
                                       : reinterpret_cast<const char*>(absent_row));
    find();
    return true;
  }

  // Has L2 fetch the rows of the block at `next`, if they are adjacent.
  __device__ __forceinline__ void fetch() const {
    if (!more || p.page_size % kOwn) return;
    if (lane == 0 && static_cast<u32>(next.page) < p.num_pages)
      prefetch_bulk_l2(p.latent.base + next.page * p.latent.stride_page + next.row * p.latent.stride_row +
                           blockIdx.z * p.latent.stride_head,
                       static_cast<u32>((kOwn - 1) * p.latent.stride_row) + kHeadDim);
  }

  // Issues the loads of a third of a set: 0 and 1 are halves of the latent columns, 2 RoPE columns.
  template <int kThird>
  __device__ __forceinline__ void load(int set) {
    auto row_of = [&](int row) {
      return reinterpret_cast<const char*>(__shfl_sync(0xffffffffu, own, set * kSet + row));
    };
    if constexpr (kThird == 2) {
      rope = load_global_16(reinterpret_cast<const uint4*>(row_of(lane / 4) + 2 * kHalfBytes + lane % 4 * 16));
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        latent[kThird][i] = load_global_16(
            reinterpret_cast<const uint4*>(row_of(2 * i + lane / 16) + kThird * kHalfBytes + lane % 16 * 16));
    }
  }

  // Converts 16 columns and stores them to all CTAs, `to` being the place of chunk 2 (lane % 4) + odd. Adjacent sets of
  // four lanes store their even and odd chunks in turns, because these are in different banks.
  __device__ __forceinline__ void store(u32 to, const uint4& v, u32 barrier) const {
    const bool odd = lane & 4;
    const u32 words[4] = {odd ? v.z : v.x, odd ? v.w : v.y, odd ? v.x : v.z, odd ? v.y : v.w};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      uint4 halves;
      expand_e4m3x4(words[2 * j], halves.x, halves.y);
      expand_e4m3x4(words[2 * j + 1], halves.z, halves.w);
      const u32 place = to ^ j << 4;
      store_shared_16(place, halves);
      if constexpr (kCtas == 2 && !AnyTile::kCopies)
        store_cluster_16_async(place + to_other, halves.x, halves.y, halves.z, halves.w, barrier + to_other);
    }
  }

  // Converts the loaded third of a set, and loads the same third of the next one if there is one.
  template <int kThird>
  __device__ __forceinline__ void convert(int stage, u32 phase, int set, bool more_sets) {
    const u32 barrier = shared.full(stage, kThird * kHalfTiles);
    const u32 tiles = shared.stage(stage) + kThird * kHalfTiles * kTileBytes + (first_row + set * kSet) * 128;
    const u32 chunk = lane % 4 * 2 + (lane >> 2 & 1);
    mbarrier_wait(shared.free(stage, kThird), phase ^ 1, "a free KV stage");
    if constexpr (kThird == 2) {
      store(tiles + lane / 4 * 128 + ((chunk ^ lane / 4) << 4), rope, barrier);
    } else {
      const u32 to = tiles + lane % 16 / 4 * kTileBytes + lane / 16 * 128 + ((chunk ^ lane / 16) << 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) store((to ^ i << 5) + i * 256, latent[kThird][i], barrier);
    }
    if (more_sets) load<kThird>((set + 1) % kSets);
    if constexpr (AnyTile::kFences || (kCtas == 2 && AnyTile::kCopies)) fence_proxy_async_shared();
    __syncwarp();
    if constexpr (kCtas == 2 && AnyTile::kCopies) {
      constexpr int kCopies = kThird == 2 ? 1 : kHalfTiles;
#pragma unroll
      for (int i = 0; i < kCopies; ++i)
        if (elect_one())
          copy_bulk_cluster_async(tiles + i * kTileBytes + to_other, tiles + i * kTileBytes, kSet * 128,
                                  barrier + to_other);
    }
    if (lane == 0) {
      if constexpr (kCtas == 2)
        mbarrier_arrive_expect_tx(barrier, kSet * 128 * (kThird == 2 ? 1 : kHalfTiles));
      else
        mbarrier_arrive(barrier);
    }
  }
};

// kWho: 0 loads all, 1 the RoPE columns and the first half of the latent ones, 2 the second half.
template <int kWho, typename Layout, typename AnyTile>
__device__ __forceinline__ void load_converted(const MlaDecodeParams& p, const Layout& shared, const AnyTile& tile,
                                               const Part& part, int last_place, int warp) {
  using Converter = RowConverter<kWho, Layout, AnyTile>;
  Converter rows(p, shared, tile, part, last_place, warp);
  if (!rows.take()) return;
  if constexpr (kWho != 2) rows.template load<2>(0);
  if constexpr (kWho != 2) rows.template load<0>(0);
  if constexpr (kWho != 1) rows.template load<1>(0);
  bool more = true;
#pragma unroll 1
  for (int t = 0; more; ++t) {
    const int parity = t & 1, stage = Layout::stage_of(t, parity);
    const u32 phase = Layout::phase_of(t);
#pragma unroll 1
    for (int set = 0; set < Converter::kSets; ++set) {
      if (set + 1 == Converter::kSets) more = rows.take();
      if constexpr (kWho == 1) {
        rows.template convert<2>(stage, phase, set, more);
        rows.template convert<0>(stage, phase, set, more);
      } else if constexpr (kWho == 2) {
        rows.template convert<1>(stage, phase, set, more);
      } else {
        rows.template convert<2>(stage, phase, set, more);
        if (parity == 0) {
          rows.template convert<0>(stage, phase, set, more);
          rows.template convert<1>(stage, phase, set, more);
        } else {
          rows.template convert<1>(stage, phase, set, more);
          rows.template convert<0>(stage, phase, set, more);
        }
      }
    }
    if constexpr (AnyTile::kFetchesAhead && kWho != 1) rows.fetch();
  }
}

}  // namespace cumla::mla
