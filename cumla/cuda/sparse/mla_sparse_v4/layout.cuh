// SPDX-License-Identifier: Apache-2.0
// Row formats, parameters and shared memory of mla_sparse_v4 and mla_sparse_v41.
#pragma once
#include "mla/mla_decode/load.cuh"
#include "mla/mla_decode/shared.cuh"
#include "sparse/lists.cuh"
#include "sparse/selected.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/types.cuh"

namespace cumla::sparse {

using namespace ptx;

// Named barrier of finders and consumer 1: the scales of the first rows are being loaded. Before that, copies of query
// rows would delay the finders' loads.
constexpr int kFoundBarrier = kConsumerBarrier + 2;

struct V4Tile : ListTile<kRowTile> {
  using Held = V4Tile;
  static constexpr bool kHasRope = false, kHasAbsent = true;
  static constexpr bool kWideProducts = false;  // they need more registers than 512 threads start with
  int first_entries;                            // entries of the list that name rows of the first cache

  __device__ __forceinline__ explicit V4Tile(const MlaDecodeParams& p) : ListTile(p, p.row_groups * kRowGroup) {}
  template <typename Params>
  __device__ __forceinline__ static int token_of(const Params&, int) {
    return 0;
  }
  // A bit per row of block t: for each 16 rows the lowest bits of a word.
  __device__ __forceinline__ static uint4 exist(const SharedLayout& shared, int t);
};

__device__ __forceinline__ Segment segment_of(const MlaDecodeParams& p, V4Tile& tile, const Part& part, int place) {
  const Segment segment = segment_of(p, static_cast<ListTile<kRowTile>&>(tile), part, place);
  tile.first_entries = p.block_table[segment.request * p.q_len + tile.q_begin];
  return segment;
}
// Returns the entry's index in its list; rows are found later.
__device__ __forceinline__ int page_of(const MlaDecodeParams&, const V4Tile&, const Segment&, u32 entry) {
  return entry;
}

// V4: 7 tiles of 64 e4m3 columns; the eighth tile is bfloat16. A page has all its rows, then the scales of all.
// kScaleBytes: an exponent per tile, and one more byte.
struct V4Format {
  static constexpr int kTiles = 7, kRowBytes = kTiles * 64 + 128, kScaleBytes = 8;
  static constexpr bool kScalesFollow = false, kMayBeFp4 = false;
};

// V4.1: 8 tiles of e4m3 columns. The scales follow the columns of their row: an exponent per 32 columns. With
// kHasFp4, rows of a cache may be e2m1 columns, followed by an e4m3 scale per 16.
template <bool kHasFp4>
struct V41Format {
  static constexpr int kTiles = 8, kRowBytes = 512 + 16, kFp4Bytes = 256 + 32;
  static constexpr bool kScalesFollow = true, kMayBeFp4 = kHasFp4;
};

struct V4Cache {
  const char* base;
  i64 stride_page;  // bytes
  Lists lists;      // of rows of this cache; row_step: V4.1, bytes
  int entries;      // of a list, at most
  int is_fp4;       // V4.1
};

struct MlaSparseV4Params {
  MlaDecodeParams decode;  // block_table: entries of each list in the first cache; latent: a row of zeros
  V4Cache caches[2];       // lists of the second cache, by slots, continue those of the first

  // Selects the members that finding rows needs, without branches.
  __device__ __forceinline__ V4Cache cache(bool second) const {
    const V4Cache &a = caches[0], &b = caches[1];
    V4Cache one = a;
    one.base = choose(second, b.base, a.base);
    one.stride_page = choose(second, b.stride_page, a.stride_page);
    one.entries = choose(second, b.entries, a.entries);
    one.is_fp4 = choose(second, b.is_fp4, a.is_fp4);
    one.lists.row_step = choose(second, b.lists.row_step, a.lists.row_step);
    one.lists.indices = choose(second, b.lists.indices, a.lists.indices);
    one.lists.indices_stride_batch = choose(second, b.lists.indices_stride_batch, a.lists.indices_stride_batch);
    one.lists.indices_stride_token = choose(second, b.lists.indices_stride_token, a.lists.indices_stride_token);
    one.lists.block_table = second ? nullptr : a.lists.block_table;
    one.lists.num_pages = choose(second, b.lists.num_pages, a.lists.num_pages);
    one.lists.page_size = choose(second, b.lists.page_size, a.lists.page_size);
    one.lists.by_page_size.magic = choose(second, b.lists.by_page_size.magic, a.lists.by_page_size.magic);
    one.lists.by_page_size.shift = choose(second, b.lists.by_page_size.shift, a.lists.by_page_size.shift);
    return one;
  }
};

// The consumers do not use the RoPE tiles. That of stage 0 holds the ring of rows, the barriers found() and used(),
// and the bits of rows that exist. Combining uses the tiles before it (kJoinSpace). The tile of stage 1 holds the
// scales of V4.1's rows.
struct V4Layout : SharedLayout {
  static constexpr int kSlots = 4;

  using SharedLayout::SharedLayout;
  // Address of a row, and V4's scales. Bits of an address: 0, if this is the end mark; 1, if the row is e2m1.
  __device__ __forceinline__ u32 row(int slot, int row) const {
    return stages + kRopeTile * kTileBytes + (slot * kBlockTokens + row) * 16;
  }
  // V4.1: 16 exponents, or 32 e4m3 scales.
  __device__ __forceinline__ u32 scales(int slot, int row) const {
    static_assert(kSlots * kBlockTokens * 32 <= kTileBytes);
    return stages + kStageBytes + kRopeTile * kTileBytes + (slot * kBlockTokens + row) * 32;
  }
  __device__ __forceinline__ u32 found(int slot) const { return row(kSlots, 0) + slot * 8; }
  __device__ __forceinline__ u32 used(int slot) const { return found(kSlots) + slot * 8; }
  // A bit per row of a finding warp. Eight words are enough: a block is found after block t - kSlots was converted,
  // and that was after block t - kSlots - kStages was multiplied.
  __device__ __forceinline__ u32 exist(int t, int warp) const {
    static_assert(kSlots + kStages <= 8);
    return used(kSlots) + t % 8 * 16 + warp * 4;
  }
};

// The lane that arrives after the block's products loads, because racecheck needs that.
__device__ __forceinline__ uint4 V4Tile::exist(const SharedLayout& shared, int t) {
  uint4 words = {};
  if (threadIdx.x % 32 == 0) words = load_shared_16(static_cast<const V4Layout&>(shared).exist(t, 0));
  return {__shfl_sync(0xffffffffu, words.x, 0), __shfl_sync(0xffffffffu, words.y, 0),
          __shfl_sync(0xffffffffu, words.z, 0), __shfl_sync(0xffffffffu, words.w, 0)};
}

// A lane of each converting warp arrives for each half of a block's tiles; for V4's second half each finding lane,
// too. Its bfloat16 columns are there.
template <typename Format>
struct V4LayoutOf : V4Layout {
  using V4Layout::V4Layout;
};

template <typename Format>
__device__ __forceinline__ void initialise_barriers(const V4LayoutOf<Format>& shared, int warps) {
#pragma unroll
  for (int slot = 0; slot < V4Layout::kSlots; ++slot) {
    mbarrier_init(shared.found(slot), warps);  // plant: V4 rows found, arrivals
    mbarrier_init(shared.used(slot), warps);   // plant: V4 rows used, arrivals
  }
  const int finding = Format::kTiles < kRopeTile ? warps * 32 : 0;
  initialise_barriers(shared, warps, warps + finding, warps * 32);  // plant: V4 tiles, arrivals
}

}  // namespace cumla::sparse
