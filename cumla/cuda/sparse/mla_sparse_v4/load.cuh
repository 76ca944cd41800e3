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
#include "ptx/mbarrier_test.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

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
  static constexpr int kAtOnce = 2;  // conversions that overlap

  const MlaSparseV4Params& p;
  RowCopier<SelectedTile<kRowTile>, 4> rows;
  const int row, chunk;

  __device__ __forceinline__ V4Loader(const MlaSparseV4Params& p, const SelectedTile<kRowTile>& tile, const Part& part,
                                      int last_place, int warp)
      : p(p), rows(p.decode, tile, part, last_place, warp), row(threadIdx.x % 32 / 4), chunk(threadIdx.x % 4) {}

  // Where, in a tile, chunk i of the two of this lane lies.
  __device__ __forceinline__ u32 place_of(int g, int i) const {
    return (rows.first_row + 8 * g + row) * 128 + ((2 * chunk + i ^ row) << 4);
  }
  // Of a block of which each lane knows the number of a row.
  __device__ __forceinline__ V4Row find(int number, int g) const {
    return find_row(p, __shfl_sync(0xffffffffu, number, 8 * g + row));
  }

  // Begins to copy a warp's share of half the tiles of a block, for which there is room.
  template <int kHalf>
  __device__ __forceinline__ void copy_half(u32 stage, const char* const (&columns)[2]) const {
    const u32 tiles = stage + kHalf * kHalfTiles * kTileBytes;
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const bool exists = columns[g] != nullptr;
      const char* const from = exists ? columns[g] : p.caches[0].base;
#pragma unroll
      for (int k = 0; k < kHalfTiles; ++k) {
        const int tile = kHalf * kHalfTiles + k, step = tile < kV4Tiles ? 16 : 32;
#pragma unroll
        for (int i = 0; i < step / 16; ++i)
          copy_16_async(tiles + k * kTileBytes + place_of(g, i), from + tile * 64 + chunk * step + i * 16, exists);
      }
    }
    copy_async_commit();
  }

  // Whether there is room for block t.
  __device__ __forceinline__ bool has_room(const SharedLayout& shared, int t) const {
    const u32 parity = t & 1, phase = t / 2 & 1 ^ 1;
    return __all_sync(0xffffffffu, mbarrier_test(shared.free(parity, 0), phase) &&
                                       mbarrier_test(shared.free(parity, 1), phase));
  }

  // Begins to copy block t, which is the cursor's, the half first that its owner wants first.
  __device__ __forceinline__ void copy(const SharedLayout& shared, int t) const {
    const int parity = t & 1;
    const u32 phase = t / 2 & 1 ^ 1, stage = shared.stage(parity);
    const char* columns[2];
#pragma unroll
    for (int g = 0; g < 2; ++g) columns[g] = find(rows.now.page, g).columns;
    mbarrier_wait(shared.free(parity, parity), phase, "a free KV stage");
    if (parity == 0)
      copy_half<0>(stage, columns);
    else
      copy_half<1>(stage, columns);
    mbarrier_wait(shared.free(parity, 1 - parity), phase, "a free KV stage");
    if (parity == 0)
      copy_half<1>(stage, columns);
    else
      copy_half<0>(stage, columns);
  }

  // What this lane has copied becomes bfloat16, times the scales.
  template <int kHalf>
  __device__ __forceinline__ void convert_half(const SharedLayout& shared, int parity, const uint2 (&scales)[2]) const {
    constexpr int kTilesHere = kHalf == 0 ? kHalfTiles : kV4Tiles - kHalfTiles;
    const u32 tiles = shared.stage(parity) + kHalf * kHalfTiles * kTileBytes;
#pragma unroll
    for (int g = 0; g < 2; ++g)
#pragma unroll
      for (int first = 0; first < kTilesHere; first += kAtOnce) {
      uint4 bytes[kAtOnce];
#pragma unroll
      for (int k = first; k < min(first + kAtOnce, kTilesHere); ++k)
        bytes[k - first] = load_shared_16(tiles + k * kTileBytes + place_of(g, 0));
#pragma unroll
      for (int k = first; k < min(first + kAtOnce, kTilesHere); ++k) {
        const u32 exponent = (kHalf == 0 ? scales[g].x : scales[g].y) >> 8 * k & 0xff;
        const float scale = __uint_as_float(exponent == 0xff ? 0x7fffffff : exponent << 23);
        uint4 pairs[2];
        const uint4& from = bytes[k - first];
        convert(from.x, scale, pairs[0].x, pairs[0].y);
        convert(from.y, scale, pairs[0].z, pairs[0].w);
        convert(from.z, scale, pairs[1].x, pairs[1].y);
        convert(from.w, scale, pairs[1].z, pairs[1].w);
#pragma unroll
        for (int i = 0; i < 2; ++i) store_shared_16(tiles + k * kTileBytes + place_of(g, i), pairs[i]);
      }
    }
    fence_proxy_async_shared();
    mbarrier_arrive(shared.full(parity, kHalf * kHalfTiles));
  }

  __device__ __forceinline__ static void convert(u32 bytes, float scale, u32& low, u32& high) {
    u32 first, second;
    expand_e4m3x4(bytes, first, second);
    const float2 a = unpack_pair<Fp16>(first), b = unpack_pair<Fp16>(second);
    low = pack_pair<Bf16>(a.x * scale, a.y * scale);
    high = pack_pair<Bf16>(b.x * scale, b.y * scale);
  }

  // Block t, whose rows have these numbers, once it has come. `ahead`: the block after it is on its way, too.
  __device__ __forceinline__ void convert_block(const SharedLayout& shared, int t, int numbers, bool ahead) const {
    const int parity = t & 1;
    uint2 scales[2];
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const V4Row found = find(numbers, g);
      scales[g] = {0, 0};
      if (found.columns != nullptr) scales[g] = *reinterpret_cast<const uint2*>(found.scales);
    }
    mbarrier_wait(shared.free(parity, 2), t / 2 & 1 ^ 1, "a free KV stage");
    mbarrier_arrive(shared.full(parity, kRopeTile));
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
      if (ahead) {
        if (turn == 0) copy_async_wait<3>(); else copy_async_wait<2>();
      } else {
        if (turn == 0) copy_async_wait<1>(); else copy_async_wait<0>();
      }
      if ((parity ^ turn) == 0)
        convert_half<0>(shared, parity, scales);
      else
        convert_half<1>(shared, parity, scales);
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

// Four warps, a quarter of the rows each; warps 2 and 3 also copy the query rows of a list before its first block. Copies
// of the next block begin before one is converted if there is room for it: to wait for room would be to wait for
// consumers that wait for this block.
__device__ __forceinline__ void load_v4(const MlaSparseV4Params& params, const SharedLayout& shared,
                                        SelectedTile<kRowTile>& tile, const Part& part, int last_place, int warp) {
  const MlaDecodeParams& p = params.decode;
  constexpr int kVectors = kTileBytes / 16;
  for (int i = threadIdx.x; i < kStages * kVectors; i += kWarpgroup)
    store_shared_zero_16(shared.stage(i / kVectors) + kRopeTile * kTileBytes + i % kVectors * 16);
  fence_proxy_async_shared();
  V4Loader loader(params, tile, part, last_place, warp);
  int place = part.place, left = warp < 2 ? kMaxTokens : 0;  // blocks before the next query
  int copied = 0, numbers = -1, later = -1;                   // of the rows of blocks t and t + 1
  bool more = loader.rows.take();
#pragma unroll 1
  for (int t = 0;;) {
#pragma unroll 1
    for (; left == 0 && place <= last_place; ++place) {
      const Segment segment = segment_of(p, tile, part, place);
      mbarrier_wait(shared.query_free(), (place - part.place) & 1 ^ 1, "a free query buffer");
      copy_query<kRowTile>(p, shared, tile, segment.request, warp - 2);
      mbarrier_arrive_after_copies(shared.query_full());
      left = segment.blocks;
    }
    if (more && (copied == t || (copied == t + 1 && loader.has_room(shared, copied)))) {
      loader.copy(shared, copied);
      numbers = copied == t ? loader.rows.now.page : numbers;
      later = loader.rows.now.page;
      ++copied;
      more = loader.rows.take();
      loader.prefetch();
      continue;
    }
    if (copied == t) break;
    loader.convert_block(shared, t, numbers, copied > t + 1);
    numbers = later;
    ++t;
    --left;
  }
  copy_async_wait_all();
}

}  // namespace cumla::sparse
