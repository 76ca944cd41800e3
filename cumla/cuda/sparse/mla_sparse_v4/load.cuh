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
  const char* columns;  // null: there is no such row
  const char* scales;
};

__device__ __forceinline__ V4Row find_row(const MlaSparseV4Params& p, int number) {
  const bool is_second = number >= p.caches[0].slots;
  const V4Cache& cache = is_second ? p.caches[1] : p.caches[0];
  const u32 slot = number - (is_second ? p.caches[0].slots : 0);
  if (slot >= static_cast<u32>(cache.slots)) return {nullptr, nullptr};
  const u32 page = quotient(slot, cache.by_page_size), row = slot - page * cache.page_size;
  const char* const begin = cache.base + page * cache.stride_page;
  return {begin + row * static_cast<i64>(kV4RowBytes),
          begin + cache.page_size * static_cast<i64>(kV4RowBytes) + row * static_cast<i64>(kV4ScaleBytes)};
}

// One of four warps: 16 rows of every block. A lane has, of rows lane / 4 and that + 8, 16 e4m3 columns of each tile,
// from column 16 (lane % 4) on, and 16 of the bfloat16 ones. It copies them to where the first half of what they become
// lies, and converts them there.
struct V4Loader {
  static constexpr int kAtOnce = 4;  // tiles that are handed over at once
  static constexpr int kSteps = 2 * kHalfTiles / kAtOnce;

  const MlaSparseV4Params& p;
  RowCopier<SelectedTile<kRowTile>, 4> rows;
  const int row, chunk;

  __device__ __forceinline__ V4Loader(const MlaSparseV4Params& p, const SelectedTile<kRowTile>& tile, const Part& part,
                                      int last_place, int warp)
      : p(p), rows(p.decode, tile, part, last_place, warp), row(threadIdx.x % 32 / 4), chunk(threadIdx.x % 4) {}

  // The first tile of a step, of a block whose owner wants half kFirst first.
  template <int kFirst>
  __device__ __forceinline__ static constexpr int tile_of(int step) {
    return step * kAtOnce ^ kFirst * kHalfTiles;
  }
  // Where, in a tile, chunk i of the two of this lane lies.
  __device__ __forceinline__ u32 place_of(int g, int i) const {
    return (rows.first_row + 8 * g + row) * 128 + ((2 * chunk + i ^ row) << 4);
  }

  __device__ __forceinline__ void copy_tile(u32 stage, int tile, const char* const (&columns)[2]) const {
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const bool exists = columns[g] != nullptr;
      const int step = tile < kV4Tiles ? 16 : 32;
      const char* const from = (exists ? columns[g] : p.caches[0].base) + tile * 64 + chunk * step;
#pragma unroll
      for (int i = 0; i < step / 16; ++i)
        copy_16_async(stage + tile * kTileBytes + place_of(g, i), from + i * 16, exists);
    }
  }

  // What this lane has copied becomes bfloat16, times the scales.
  __device__ __forceinline__ void convert_tile(u32 stage, int tile, const uint2 (&scales)[2]) const {
    uint4 bytes[2];
#pragma unroll
    for (int g = 0; g < 2; ++g) bytes[g] = load_shared_16(stage + tile * kTileBytes + place_of(g, 0));
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const u32 exponent = (tile < kHalfTiles ? scales[g].x : scales[g].y) >> 8 * (tile % kHalfTiles) & 0xff;
      const float scale = __uint_as_float(exponent == 0xff ? 0x7fffffff : exponent << 23);
      uint4 pairs[2];
      convert(bytes[g].x, scale, pairs[0].x, pairs[0].y);
      convert(bytes[g].y, scale, pairs[0].z, pairs[0].w);
      convert(bytes[g].z, scale, pairs[1].x, pairs[1].y);
      convert(bytes[g].w, scale, pairs[1].z, pairs[1].w);
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

  // A block, and on the way to the one after it. Copies are all on their way before the first is waited for.
  template <int kFirst>
  __device__ __forceinline__ bool load_block(const SharedLayout& shared, u32 phase) {
    const u32 stage = shared.stage(kFirst);
    const char* columns[2];
    uint2 scales[2];
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const V4Row found = find_row(p, __shfl_sync(0xffffffffu, rows.now.page, 8 * g + row));
      columns[g] = found.columns;
      scales[g] = {0, 0};
      if (found.columns != nullptr) scales[g] = *reinterpret_cast<const uint2*>(found.scales);
    }
    mbarrier_wait(shared.free(kFirst, 2), phase ^ 1, "a free KV stage");
    mbarrier_arrive(shared.full(kFirst, kRopeTile));
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int tile = tile_of<kFirst>(s);
      if (tile % kHalfTiles == 0) mbarrier_wait(shared.free(kFirst, tile / kHalfTiles), phase ^ 1, "a free KV stage");
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) copy_tile(stage, tile + k, columns);
      copy_async_commit();
    }
    const bool more = rows.take();
    prefetch();
    convert_steps<kFirst, 0>(shared, stage, scales);
    return more;
  }
  template <int kFirst, int kStep>
  __device__ __forceinline__ void convert_steps(const SharedLayout& shared, u32 stage, const uint2 (&scales)[2]) const {
    if constexpr (kStep < kSteps) {
      constexpr int kTile = tile_of<kFirst>(kStep);
      copy_async_wait<kSteps - 1 - kStep>();
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        if (kTile + k < kV4Tiles) convert_tile(stage, kTile + k, scales);
      fence_proxy_async_shared();
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        if (!kV4SharedBlocks || (kTile + k) % kHalfTiles == kHalfTiles - 1)
          mbarrier_arrive(shared.full(kFirst, kV4SharedBlocks ? kTile / kHalfTiles * kHalfTiles : kTile + k));
      convert_steps<kFirst, kStep + 1>(shared, stage, scales);
    }
  }

  // As RowCopier::prefetch: this CTA's share of the block after next.
  __device__ __forceinline__ void prefetch() const {
    const V4Row later = find_row(p, rows.later.page);
    const FetchShare share = fetch_share(p.decode, rows.ahead.tile);
    if (rows.lane >= 16 || (rows.lane & (share.step - 1)) != share.first || later.columns == nullptr) return;
    prefetch_bulk_l2(later.columns, kV4RowBytes);
    prefetch_l2(later.scales);
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
  bool more = loader.rows.take();
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
