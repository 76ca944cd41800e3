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
  static constexpr int kNone = -2, kEnd = -3;  // beyond the last block, and beyond that
  static constexpr int kHalfBytes = kHalfTiles * 64;

  const MlaSparseV4Params& p;
  const int row, chunk;  // the first of this lane's two, its columns
  BlockCursor<1, V4Tile> ahead;
  int next;                // row of the block after the one that is loaded; kNone if there is no such block, kEnd if there was none before, either
  const char* columns[2];  // of this lane's rows: where the half begins that is loaded
  uint2 scales;
  uint4 bytes[kHalfTiles][2];

  __device__ __forceinline__ V4Loader(const MlaSparseV4Params& p, const V4Tile& tile, const Part& part, int last_place)
      : p(p),
        row(threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4),
        chunk(threadIdx.x % 4),
        ahead(p.decode, tile, part, last_place, 0),
        next(0) {
    look_up();
  }

  __device__ __forceinline__ void look_up() {
    if (!ahead.valid()) {
      next = next == kNone ? kEnd : kNone;
      return;
    }
    next = ahead.template row_of<kRows>(threadIdx.x / 32 * 16 + threadIdx.x % 16).page;
    ahead.next();
  }
  // What is loaded from now on is of the next block.
  __device__ __forceinline__ void begin_block() {
    const V4Row own = find_row(p, next);
    scales = *reinterpret_cast<const uint2*>(own.scales);
    const u64 address = reinterpret_cast<u64>(own.columns);
#pragma unroll
    for (int g = 0; g < 2; ++g)
      columns[g] = reinterpret_cast<const char*>(__shfl_sync(0xffffffffu, address, 8 * g + row % 8)) + chunk * 16;
    look_up();
  }
  __device__ __forceinline__ void load_tile(int k) {
#pragma unroll
    for (int g = 0; g < 2; ++g) bytes[k][g] = load_global_16(reinterpret_cast<const uint4*>(columns[g] + k * 64));
  }
  // Where, in a tile, chunk i of the two of this lane lies.
  __device__ __forceinline__ u32 place_of(int g, int i) const {
    return (row + 8 * g) * 128 + ((2 * chunk + i ^ row % 8) << 4);
  }
  // What has been loaded of tile k of a half becomes bfloat16, times the scales.
  __device__ __forceinline__ void store_tile(u32 tiles, int k, const u32 (&exponents)[2]) const {
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const u32 exponent = exponents[g] >> 8 * k & 0xff;
      const u32 half = exponent == 0xff ? 0x7fff : exponent << 7, scale = half << 16 | half;
      const uint4& from = bytes[k][g];
      uint4 pairs[2];
      convert(from.x, scale, pairs[0].x, pairs[0].y);
      convert(from.y, scale, pairs[0].z, pairs[0].w);
      convert(from.z, scale, pairs[1].x, pairs[1].y);
      convert(from.w, scale, pairs[1].z, pairs[1].w);
#pragma unroll
      for (int i = 0; i < 2; ++i) store_shared_16(tiles + k * kTileBytes + place_of(g, i), pairs[i]);
    }
  }
  __device__ __forceinline__ static void convert(u32 bytes, u32 scale, u32& low, u32& high) {
    u32 first, second;
    expand_e4m3x4(bytes, first, second);
    const float2 a = unpack_pair<Fp16>(first), b = unpack_pair<Fp16>(second);
    low = multiply_pairs<Bf16>(pack_pair<Bf16>(a.x, a.y), scale);
    high = multiply_pairs<Bf16>(pack_pair<Bf16>(b.x, b.y), scale);
  }
  // The bfloat16 columns need no conversion.
  __device__ __forceinline__ void copy_last(u32 stage) const {
#pragma unroll
    for (int g = 0; g < 2; ++g)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        copy_16_async(stage + kV4Tiles * kTileBytes + place_of(g, i), columns[g] + (kV4Tiles * 64 - kHalfBytes) + (chunk + i) * 16,
                      true);
  }

  // Half a block, which has been loaded: of block turn / 2 first the one that its owner wants first. The half that comes
  // next is loaded; with the second half the next block begins. One text for all, for text that is not in L2 comes
  // slowly.
  __device__ __forceinline__ void hand_over(const SharedLayout& shared, int turn) {
    const bool second = turn & 1;
    const int parity = turn / 2 & 1, half = second ? 1 - parity : parity, next_half = second ? half : 1 - half;
    const u32 stage = shared.stage(parity), tiles = stage + half * (kHalfTiles * kTileBytes);
    u32 exponents[2];
#pragma unroll
    for (int g = 0; g < 2; ++g) exponents[g] = __shfl_sync(0xffffffffu, half ? scales.y : scales.x, 8 * g + row % 8);
    mbarrier_wait(shared.free(parity, half), turn / 4 & 1 ^ 1, "a free KV stage");
    if (half == 1) copy_last(stage);
#pragma unroll
    for (int k = 0; k < kHalfTiles; ++k) {
      if (k < kV4Tiles - kHalfTiles || half == 0) store_tile(tiles, k, exponents);
      if (k == 0) {
        if (second) begin_block();
        const int step = second ? half * kHalfBytes : half ? -kHalfBytes : kHalfBytes;
#pragma unroll
        for (int g = 0; g < 2; ++g) columns[g] = copy_of(columns[g] + step);
      }
      if (k < kV4Tiles - kHalfTiles || next_half == 0) load_tile(k);
    }
    if (half == 1) copy_async_wait_all();
    fence_proxy_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.full(parity, half * kHalfTiles));  // plant: V4 tiles
  }
};

// Four warps, a quarter of the rows each; warps 2 and 3 also copy the query rows of a list before its first block.
__device__ __forceinline__ void load_v4(const MlaSparseV4Params& params, const SharedLayout& shared, V4Tile& tile,
                                        const Part& part, int last_place, int warp) {
  const MlaDecodeParams& p = params.decode;
  V4Loader loader(params, tile, part, last_place);
  int place = part.place, query_turn = warp < 2 ? -1 : 0;  // -1: never
  loader.begin_block();
#pragma unroll
  for (int k = 0; k < kHalfTiles; ++k) loader.load_tile(k);
#pragma unroll 1
  for (int turn = 0;; ++turn) {
#pragma unroll 1
    for (; turn == query_turn && place <= last_place; ++place) {
      const Segment segment = segment_of(p, tile, part, place);
      mbarrier_wait(shared.query_free(), (place - part.place) & 1 ^ 1, "a free query buffer");
      copy_query<kRowTile>(p, shared, tile, segment.request, warp - 2);
      mbarrier_arrive_after_copies(shared.query_full());
      query_turn += 2 * segment.blocks;
    }
    if ((turn & 1) == 0 && loader.next == V4Loader::kEnd) break;
    loader.hand_over(shared, turn);
  }
  copy_async_wait_all();
}

}  // namespace cumla::sparse
