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
struct V4Tile : SelectedTile<kRowTile> {
  using Held = V4Tile;
  using SelectedTile<kRowTile>::SelectedTile;
};
}  // namespace cumla::sparse

namespace cumla::mla {
template <>
constexpr bool kHasRope<sparse::V4Tile> = false;
}

namespace cumla::sparse {

using namespace ptx;

constexpr int kV4Tiles = 7;                      // of 64 e4m3 columns; the eighth tile is bfloat16
constexpr int kV4RowBytes = kV4Tiles * 64 + 128;
constexpr int kV4ScaleBytes = 8;                 // an exponent a tile, and one byte more

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

// One lane of each loader warp arrives for half of a block's tiles.
struct V4Layout : SharedLayout {
  using SharedLayout::SharedLayout;
};
__device__ __forceinline__ void initialise_barriers(const V4Layout& shared, int row_warps) {
  mla::initialise_barriers(shared, row_warps, row_warps);
}

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
// from column 16 (lane % 4) on, and 16 of the bfloat16 ones. e4m3 columns wait in registers, half a block of them: when
// a tile has become bfloat16, in shared memory, that of the next half is on its way to the same registers. Lanes look
// up row lane % 16.
//
// Loads share a scoreboard, so that waiting for one is waiting for all: where a row lies is computed when the columns
// of the block before are there, and the row after it is looked up just after.
struct V4Loader {
  static constexpr int kNone = -2;

  const MlaSparseV4Params& p;
  const int warp, row, chunk;
  BlockCursor<1, V4Tile> ahead;
  bool exists;             // there is a block at all
  int next;                // row of the block after the one that is loaded; kNone if there is no such block
  V4Row own;               // of the block that is loaded next
  const char* columns[2];  // of the rows that are loaded: where this lane's first tile begins
  uint2 scales, next_scales;
  uint4 bytes[kHalfTiles][2];

  // Loads the first half of the first block.
  __device__ __forceinline__ V4Loader(const MlaSparseV4Params& p, const V4Tile& tile, const Part& part, int last_place,
                                      int warp)
      : p(p),
        warp(warp),
        row(threadIdx.x % 32 / 4),
        chunk(threadIdx.x % 4),
        ahead(p.decode, tile, part, last_place, 0) {
    look_up();
    exists = next != kNone;
    own = find_row(p, next);
    look_up();
    begin_block();
#pragma unroll
    for (int k = 0; k < kHalfTiles; ++k) load_tile(k);
  }

  __device__ __forceinline__ void look_up() {
    next = kNone;
    if (!ahead.valid()) return;
    next = ahead.template row_of<kRows>(warp * 16 + threadIdx.x % 16).page;
    ahead.next();
  }
  __device__ __forceinline__ void begin_block() {
    next_scales = *reinterpret_cast<const uint2*>(own.scales);
    const u64 address = reinterpret_cast<u64>(own.columns);
#pragma unroll
    for (int g = 0; g < 2; ++g)
      columns[g] = reinterpret_cast<const char*>(__shfl_sync(0xffffffffu, address, 8 * g + row)) + chunk * 16;
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
  // The bfloat16 columns need no conversion.
  __device__ __forceinline__ void copy_last(u32 stage) const {
#pragma unroll
    for (int g = 0; g < 2; ++g)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        copy_16_async(stage + kV4Tiles * kTileBytes + place_of(g, i), columns[g] + kV4Tiles * 64 + (chunk + i) * 16,
                      true);
  }

  // Half kHalf of the block that has been loaded, the first or the second one; the half that comes next is loaded. With
  // the second one the next block begins.
  template <int kHalf, bool kSecond>
  __device__ __forceinline__ void hand_over(const SharedLayout& shared, int parity, u32 phase) {
    constexpr int kFrom = kHalf * kHalfTiles, kTo = kSecond ? kFrom : kHalfTiles - kFrom;
    const u32 stage = shared.stage(parity);
    u32 exponents[2];
#pragma unroll
    for (int g = 0; g < 2; ++g)
      exponents[g] = __shfl_sync(0xffffffffu, kHalf ? scales.y : scales.x, 8 * g + row);
    mbarrier_wait(shared.free(parity, kHalf), phase ^ 1, "a free KV stage");
    if (kHalf == 1) copy_last(stage);
    if (kSecond) {
      begin_block();
      look_up();
    }
#pragma unroll
    for (int k = 0; k < kHalfTiles; ++k) {
      if (kFrom + k < kV4Tiles) store_tile(stage, kFrom + k, exponents);
      if (kTo + k < kV4Tiles) load_tile(kTo + k);
    }
    if (kHalf == 1) copy_async_wait_all();
    fence_proxy_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.full(parity, kFrom));  // plant: V4 tiles
  }

  // A block, of which the half that its owner wants first is on its way: whether there is another one.
  template <int kParity>
  __device__ __forceinline__ bool load_block(const SharedLayout& shared, u32 phase) {
    scales = next_scales;
    const bool more = next != kNone;
    own = find_row(p, next);
    hand_over<kParity, false>(shared, kParity, phase);
    hand_over<1 - kParity, true>(shared, kParity, phase);
    return more;
  }
};

// Four warps, a quarter of the rows each; warps 2 and 3 also copy the query rows of a list before its first block.
__device__ __forceinline__ void load_v4(const MlaSparseV4Params& params, const SharedLayout& shared, V4Tile& tile,
                                        const Part& part, int last_place, int warp) {
  const MlaDecodeParams& p = params.decode;
  V4Loader loader(params, tile, part, last_place, warp);
  int place = part.place, left = warp < 2 ? kMaxTokens : 0;  // blocks before the next query
  bool more = loader.exists;
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
