// SPDX-License-Identifier: Apache-2.0
// The loading role of mla_sparse_v4: rows of e4m3 and bfloat16 columns become tiles of bfloat16.
#pragma once
#include "mla/mla_decode/load.cuh"
#include "mla/mla_decode/pages.cuh"
#include "mla/mla_decode/shared.cuh"
#include "sparse/selected.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::sparse {

using namespace ptx;

constexpr int kV4Tiles = 7;                      // of 64 e4m3 columns; the eighth tile is bfloat16
constexpr int kV4RowBytes = kV4Tiles * 64 + 128;
constexpr int kV4ScaleBytes = 8;                 // an exponent a tile, and one byte more
constexpr bool kV4SharedBlocks = false;          // the order of products, as of mla/mla_decode.cu

// A page has all its rows, then the scales of all.
struct V4Cache {
  const char* base;
  i64 stride_page;  // bytes
  int slots;
  int page_size;
  Divisor by_page_size;
};

struct MlaSparseV4Params {
  MlaDecodeParams decode;  // block_table: what select_rows leaves; q_rope: zeros
  V4Cache caches[2];       // slots of the second one are numbered after those of the first
};

struct V4Row {
  const char* columns;
  const char* scales;
};

// A row that there is not is zeros.
__device__ __forceinline__ V4Row find_row(const MlaSparseV4Params& p, int number) {
  const bool is_second = number >= p.caches[0].slots;
  const V4Cache& cache = is_second ? p.caches[1] : p.caches[0];
  const u32 slot = number - (is_second ? p.caches[0].slots : 0);
  if (slot >= static_cast<u32>(cache.slots)) return {p.decode.latent.base, p.decode.latent.base};
  const u32 page = quotient(slot, cache.by_page_size), row = slot - page * cache.page_size;
  const char* const begin = cache.base + page * cache.stride_page;
  return {begin + row * static_cast<i64>(kV4RowBytes),
          begin + cache.page_size * static_cast<i64>(kV4RowBytes) + row * static_cast<i64>(kV4ScaleBytes)};
}

// One of four warps: 16 rows of every block. A lane has, of rows lane / 4 and that + 8, 16 e4m3 columns of each tile,
// from column 16 (lane % 4) on, and 16 of the bfloat16 ones. They wait in registers, half a block of them: when a tile
// has become bfloat16, in shared memory, that of the next half is on its way to the same registers.
struct V4Loader {
  static constexpr int kNone = -2;

  const MlaSparseV4Params& p;
  const int warp, row, chunk;
  BlockCursor<1, SelectedTile<kRowTile>> ahead;
  int next, later;         // rows of the next blocks, the one of lane % 16; kNone if there is no such block
  const char* columns[2];  // of the rows that are loaded: where this lane's first tile begins
  u32 scales, next_scales;  // four bytes of a block: lane % 4 has half % 2 of row lane % 4 / 2 of the two
  uint4 bytes[kHalfTiles][2];

  // Loads the first half of the first block.
  __device__ __forceinline__ V4Loader(const MlaSparseV4Params& p, const SelectedTile<kRowTile>& tile, const Part& part,
                                      int last_place, int warp)
      : p(p),
        warp(warp),
        row(threadIdx.x % 32 / 4),
        chunk(threadIdx.x % 4),
        ahead(p.decode, tile, part, last_place, 0) {
    next = find();
    later = find();
  }

  __device__ __forceinline__ int find() {
    if (!ahead.valid()) return kNone;
    const int number = ahead.template row_of<kRows>(warp * 16 + threadIdx.x % 16).page;
    ahead.next();
    return number;
  }
  // Begins with the next block: whether there is one.
  __device__ __forceinline__ bool take() {
    const bool more = next != kNone;
    const char* scales_at = nullptr;
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const V4Row found = find_row(p, __shfl_sync(0xffffffffu, next, 8 * g + row));
      columns[g] = found.columns + chunk * 16;
      if (chunk / 2 == g) scales_at = found.scales + chunk % 2 * 4;
    }
    next_scales = *reinterpret_cast<const u32*>(scales_at);
    next = later;
    later = find();
    return more;
  }
  __device__ __forceinline__ void load_tile(int tile) {
#pragma unroll
    for (int g = 0; g < 2; ++g)
      bytes[tile % kHalfTiles][g] = load_global_16(reinterpret_cast<const uint4*>(columns[g] + tile * 64));
  }
  // Where, in a tile, chunk i of the two of this lane lies.
  __device__ __forceinline__ u32 place_of(int g, int i) const {
    return (warp * 16 + 8 * g + row) * 128 + ((2 * chunk + i ^ row) << 4);
  }
  // What has been loaded of a tile becomes bfloat16, times the scales.
  __device__ __forceinline__ void store_tile(u32 stage, int tile, const u32 (&exponents)[2]) const {
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const uint4& from = bytes[tile % kHalfTiles][g];
      const u32 exponent = exponents[g] >> 8 * (tile % kHalfTiles) & 0xff;
      const float scale = __uint_as_float(exponent == 0xff ? 0x7fffffff : exponent << 23);
      uint4 pairs[2];
      convert(from.x, scale, pairs[0].x, pairs[0].y);
      convert(from.y, scale, pairs[0].z, pairs[0].w);
      convert(from.z, scale, pairs[1].x, pairs[1].y);
      convert(from.w, scale, pairs[1].z, pairs[1].w);
#pragma unroll
      for (int i = 0; i < 2; ++i) store_shared_16(stage + tile * kTileBytes + place_of(g, i), pairs[i]);
    }
  }
  __device__ __forceinline__ static void convert(u32 bytes, float scale, u32& low, u32& high) {
    u32 first, second;
    expand_e4m3x4(bytes, first, second);
    const float2 a = unpack_pair<Fp16>(first), b = unpack_pair<Fp16>(second);
    low = pack_pair<Bf16>(a.x * scale, a.y * scale);
    high = pack_pair<Bf16>(b.x * scale, b.y * scale);
  }

  // Half kFrom of a block, and on the way half kTo of the block of `more`.
  template <int kFrom, int kTo>
  __device__ __forceinline__ void hand_over(const SharedLayout& shared, u32 stage, int parity, u32 phase) {
    constexpr int kCount = kFrom == 0 ? kHalfTiles : kV4Tiles - kHalfTiles;
    u32 exponents[2];
#pragma unroll
    for (int g = 0; g < 2; ++g) exponents[g] = __shfl_sync(0xffffffffu, scales, 4 * row + 2 * g + kFrom);
    mbarrier_wait(shared.free(parity, kFrom), phase ^ 1, "a free KV stage");
#pragma unroll
    for (int k = 0; k < kHalfTiles; ++k) {
      if (k < kCount) store_tile(stage, kFrom * kHalfTiles + k, exponents);
      if (kTo * kHalfTiles + k < kV4Tiles) load_tile(kTo * kHalfTiles + k);
    }
    fence_proxy_async_shared();
#pragma unroll
    for (int k = 0; k < kCount; ++k) mbarrier_arrive(shared.full(parity, kFrom * kHalfTiles + k));
  }
  // The bfloat16 columns.
  __device__ __forceinline__ void copy_last(const SharedLayout& shared, u32 stage, int parity) const {
#pragma unroll
    for (int g = 0; g < 2; ++g)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        copy_16_async(stage + kV4Tiles * kTileBytes + place_of(g, i), columns[g] + kV4Tiles * 64 + (chunk + i) * 16, true);
    mbarrier_arrive_after_copies(shared.full(parity, kV4Tiles));
  }

  // A block, whose owner wants half kFirst first, of which that half is on its way: whether there is another one, which
  // wants the other half first.
  template <int kFirst>
  __device__ __forceinline__ bool load_block(const SharedLayout& shared, u32 phase) {
    const u32 stage = shared.stage(kFirst);
    scales = next_scales;
    mbarrier_wait(shared.free(kFirst, 2), phase ^ 1, "a free KV stage");
    mbarrier_arrive(shared.full(kFirst, kRopeTile));
    hand_over<kFirst, 1 - kFirst>(shared, stage, kFirst, phase);
    if (kFirst == 0) mbarrier_wait(shared.free(kFirst, 1), phase ^ 1, "a free KV stage");
    copy_last(shared, stage, kFirst);
    const bool more = take();
    prefetch();
    hand_over<1 - kFirst, 1 - kFirst>(shared, stage, kFirst, phase);
    return more;
  }

  // This CTA's share of the block after the one that is loaded.
  __device__ __forceinline__ void prefetch() const {
    const V4Row found = find_row(p, next);
    const FetchShare share = fetch_share(p.decode, ahead.tile);
    const int lane = threadIdx.x % 32;
    if (lane >= 16 || (lane & (share.step - 1)) != share.first) return;
    prefetch_bulk_l2(found.columns, kV4RowBytes);
    prefetch_l2(found.scales);
  }
};

// Four warps, a quarter of the rows each; warps 2 and 3 also copy the query rows of a list before its first block.
__device__ __forceinline__ void load_v4(const MlaSparseV4Params& params, const SharedLayout& shared,
                                        SelectedTile<kRowTile>& tile, const Part& part, int last_place, int warp) {
  const MlaDecodeParams& p = params.decode;
  constexpr int kVectors = kTileBytes / 16;
  for (int i = threadIdx.x; i < kStages * kVectors; i += kWarpgroup)
    store_shared_zero_16(shared.stage(i / kVectors) + kRopeTile * kTileBytes + i % kVectors * 16);
  fence_proxy_async_shared();
  V4Loader loader(params, tile, part, last_place, warp);
  int place = part.place, left = warp < 2 ? kMaxTokens : 0;  // blocks before the next query
  bool more = loader.take();
#pragma unroll
  for (int k = 0; k < kHalfTiles; ++k) loader.load_tile(k);
#pragma unroll 1
  for (int t = 0;; ++t, --left) {
#pragma unroll 1
    for (; left == 0 && place <= last_place; ++place) {
      const Segment segment = segment_of(p, tile, part, place);
      mbarrier_wait(shared.query_free(), (place - part.place) & 1 ^ 1, "a free query buffer");
      copy_query<kRowTile>(p, shared, tile, segment.request, warp - 2);
      mbarrier_arrive_after_copies(shared.query_full());
      left = segment.blocks;
    }
    if (!more) break;
    const u32 phase = (t / 2) & 1;
    more = t & 1 ? loader.load_block<1>(shared, phase) : loader.load_block<0>(shared, phase);
  }
  copy_async_wait_all();
}

}  // namespace cumla::sparse
