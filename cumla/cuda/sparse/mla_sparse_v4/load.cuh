// SPDX-License-Identifier: Apache-2.0
// The loading roles of mla_sparse_v4 and mla_sparse_v41: rows of 8 or fewer bits become bfloat16 tiles.
#pragma once
#include "mla/mla_decode/load.cuh"
#include "mla/mla_decode/pages.cuh"
#include "mla/mla_decode/shared.cuh"
#include "rows/e2m1.cuh"
#include "sparse/lists.cuh"
#include "sparse/selected.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::sparse {

using namespace ptx;
using rows::expand_e2m1x4;

struct V4Tile : ListTile<kRowTile> {
  using Held = V4Tile;
  static constexpr bool kHasRope = false, kHasAbsent = true;
  static constexpr bool kWideProducts = false;  // they need more registers than 512 threads start with
  int first_entries;                            // entries of the list that name rows of the first cache

  __device__ __forceinline__ explicit V4Tile(const MlaDecodeParams& p) : ListTile(p, p.row_groups * kRowGroup) {}
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

// One of four warps that find 16 rows of every block, up to three blocks ahead, and copy their bfloat16 columns.
// Lanes find row lane % 16: an entry, then its page, then the row, each a block ahead of the next.
template <typename Format>
struct V4Finder {
  const MlaSparseV4Params& p;
  const V4Layout& shared;
  const int first_row;
  BlockCursor<1, V4Tile> ahead;
  // Values in place of a request, which is never negative here: slots of the second cache; no block.
  static constexpr int kSecond = -1, kNoBlock = -2;
  static constexpr int kNone = 2, kEnd = 3;  // values in place of a cache: after the last block, and after that
  // State of this lane's rows: of the block that is found next, and of the one after it, whose page is not loaded
  // yet.
  Lookup found;
  int cache, later_entry, later_request;

  __device__ __forceinline__ V4Finder(const MlaSparseV4Params& p, const V4Layout& shared, const V4Tile& tile,
                                      const Part& part, int last_place, int warp)
      : p(p), shared(shared), first_row(warp * 16), ahead(p.decode, tile, part, last_place, 0), cache(0) {
    load_entry();
    go_on();
  }

  __device__ __forceinline__ void load_entry() {
    later_entry = -1;
    later_request = kNoBlock;
    if (!ahead.valid()) return;
    const int place = ahead.template row_of<kRows>(first_row + threadIdx.x % 16).page;
    const int first = min(max(ahead.tile.first_entries, 0), p.caches[0].entries);
    const bool is_second = place >= first;
    const V4Cache from = p.cache(is_second);
    const int batch = ahead.segment.request, token = ahead.tile.q_begin, entry = is_second ? place - first : place;
    const int request = from.lists.request_of(batch, token);
    later_request = is_second ? kSecond : max(request, 0);
    if (place >= 0 && entry < from.entries && from.lists.has(request))
      later_entry = from.lists.entries_of(batch, token)[entry];
    ahead.next();
  }
  __device__ __forceinline__ void go_on() {
    cache = later_request == kNoBlock ? (cache == kNone ? kEnd : kNone) : later_request == kSecond;
    const Lists lists = p.cache(cache == 1).lists;
    found = List::look_up(lists, lists.pages_of(later_request), later_entry);
    load_entry();
  }
  // Stores address and scales of the rows of block t; absent rows are zeros. After the last block one block of odd
  // addresses follows, at once, as an end mark.
  __device__ __forceinline__ void find(int t) {
    if (cache == kEnd) return;
    const int slot = t % V4Layout::kSlots;
    const V4Cache from = p.cache(cache == 1);
    const bool exists = static_cast<u32>(found.page) < from.lists.num_pages;
    const char* columns = p.decode.latent.base;
    uint2 scales = {};
    uint4 following = {};
    u32 marks = cache == kNone;
    int row_bytes = Format::kRowBytes;
    if constexpr (Format::kScalesFollow) {
      int behind = Format::kRowBytes - 16;
      if constexpr (Format::kMayBeFp4) {
        if (from.is_fp4) {  // lanes 16 to 31 load the second half of the scales
          marks |= 2;
          row_bytes = Format::kFp4Bytes;
          behind = Format::kFp4Bytes - 32 + threadIdx.x % 32 / 16 * 16;
        }
      }
      if (exists)
        columns = from.base + found.page * from.stride_page + found.row * static_cast<i64>(from.lists.row_step);
      following = *reinterpret_cast<const uint4*>(columns + behind);
    } else {
      const char* bytes = columns;
      if (exists) {
        const char* const page = from.base + found.page * from.stride_page;
        columns = page + found.row * static_cast<i64>(Format::kRowBytes);
        bytes = page + from.lists.page_size * static_cast<i64>(Format::kRowBytes) +
                found.row * static_cast<i64>(Format::kScaleBytes);
      }
      scales = *reinterpret_cast<const uint2*>(bytes);
    }
    const u64 address = reinterpret_cast<u64>(columns) + marks;
    const u32 exist = __ballot_sync(0xffffffffu, exists);
    go_on();
    mbarrier_wait(shared.used(slot), t / V4Layout::kSlots & 1 ^ 1, "a free slot for rows");
    __syncwarp();  // all lanes have copied the earlier rows of the slot
    if (threadIdx.x % 32 < 16) {
      if (gridDim.x > 1 && exists) prefetch_bulk_l2(columns, row_bytes);  // other row tiles read the row, too
      store_shared_16(shared.row(slot, first_row + threadIdx.x % 32),
                      {static_cast<u32>(address), static_cast<u32>(address >> 32), scales.x, scales.y});
    }
    if constexpr (Format::kScalesFollow)
      store_shared_16(shared.scales(slot, first_row + threadIdx.x % 16) + threadIdx.x % 32 / 16 * 16, following);
    if (threadIdx.x % 32 == 0) store_shared_u32(shared.exist(t, first_row / 16), exist & 0xffff);
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.found(slot));  // plant: V4 rows found
  }
  // True if block t, which has been found, is not the end mark. copy(): its bfloat16 columns.
  __device__ __forceinline__ bool exists(int t) const {
    return (load_shared_u32(shared.row(t % V4Layout::kSlots, first_row)) & 1) == 0;
  }
  __device__ __forceinline__ void copy(int t) const {
    const int row = first_row + threadIdx.x % 32 / 4, chunk = threadIdx.x % 4 * 2, parity = t & 1;
    const u32 rows = shared.row(t % V4Layout::kSlots, row);
    mbarrier_wait(shared.free(parity, 1), t / 2 & 1 ^ 1, "a free KV stage");
    const u32 tile = shared.stage(parity) + Format::kTiles * kTileBytes + row * 128;
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const char* const from = columns_at(rows + g * 128) + Format::kTiles * 64 + chunk * 16;
#pragma unroll
      for (int i = 0; i < 2; ++i)
        copy_16_async(tile + g * 1024 + ((chunk + i ^ row % 8) << 4), from + i * 16, true);
    }
    mbarrier_arrive_after_copies(shared.full(parity, kHalfTiles));
  }
  __device__ __forceinline__ static const char* columns_at(u32 row) {
    const uint2 words = load_shared_8(row);
    return reinterpret_cast<const char*>(static_cast<u64>(words.y) << 32 | words.x);
  }
};

// The four finding warps. They also copy the query rows of a list before its first block; for the first list after
// its first block, so that a short list does not wait. The first two blocks are copied as soon as they are found.
template <typename Format>
__device__ __forceinline__ void find_v4(const MlaSparseV4Params& params, const V4Layout& shared, V4Tile& tile,
                                        const Part& part, int last_place, int warp) {
  const MlaDecodeParams& p = params.decode;
  V4Finder<Format> finder(params, shared, tile, part, last_place, warp);
  constexpr int kAhead = V4Layout::kSlots - 2;
  int place = part.place, blocks = 0;  // blocks of earlier lists
#pragma unroll 1
  for (int found = 0;; ++found) {
    finder.find(found);
    const int t = found < 2 ? found : found - kAhead;  // the block whose columns are copied
    if (t < min(found, 2)) continue;  // blocks 2 to 4 are found without copies
    const bool exists = finder.exists(t);
#pragma unroll 1
    for (; place <= last_place && (t >= max(blocks, 1) || !exists); ++place) {
      const Segment segment = segment_of(p, tile, part, place);
      mbarrier_wait(shared.query_free(), (place - part.place) & 1 ^ 1, "a free query buffer");
      copy_query<kRowTile, 4>(p, shared, tile, segment.request, warp);
      mbarrier_arrive_after_copies(shared.query_full());
      blocks += segment.blocks;
    }
    if (!exists) break;
    if constexpr (Format::kTiles < kRopeTile) finder.copy(t);
  }
  copy_async_wait_all();
}

// One of four warps that convert 16 rows of every block. A lane has 16 e4m3 columns of each tile, from column 16
// (lane % 4) on, of rows lane / 4 and 8 more. Half a block waits in registers. When a tile is stored as bfloat16,
// that of the next half is loaded into the same registers.
template <typename Format>
struct V4Converter {
  static constexpr int kHalfBytes = kHalfTiles * 64;

  const V4Layout& shared;
  const int row, chunk;    // this lane's first row; its columns
  const char* columns[2];  // of this lane's rows: the half that is loaded next
  uint4 bytes[kHalfTiles][2];
  bool is_fp4[2], next_is_fp4[2];  // of these bytes, and of those that are loaded next

  __device__ __forceinline__ V4Converter(const V4Layout& shared, int warp)
      : shared(shared), row(warp * 16 + threadIdx.x % 32 / 4), chunk(threadIdx.x % 4) {}

  // Starts loading block t. Returns false if it is the end mark, which then loads zeros.
  __device__ __forceinline__ bool begin(int t) {
    const int slot = t % V4Layout::kSlots;
    mbarrier_wait(shared.found(slot), t / V4Layout::kSlots & 1, "rows");
#pragma unroll
    for (int g = 0; g < 2; ++g)
      columns[g] = V4Finder<Format>::columns_at(shared.row(slot, row + 8 * g)) + chunk * 16;
    if constexpr (Format::kMayBeFp4) {
#pragma unroll
      for (int g = 0; g < 2; ++g) {  // a lane's eight bytes are half of 16
        next_is_fp4[g] = reinterpret_cast<u64>(columns[g]) & 2;
        columns[g] -= next_is_fp4[g] ? 2 + (chunk - chunk / 2) * 16 : 0;
      }
    }
    const bool exists = (reinterpret_cast<u64>(columns[0]) & 1) == 0;
#pragma unroll
    for (int g = 0; g < 2; ++g) columns[g] -= !exists;
    return exists;
  }
  __device__ __forceinline__ void load_tile(int k) {
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const int offset = Format::kMayBeFp4 ? k * 64 >> next_is_fp4[g] : k * 64;
      bytes[k][g] = load_global_16(reinterpret_cast<const uint4*>(columns[g] + offset));
    }
  }
  // The scales of this lane's columns of a half, a byte per tile: exponents, or e4m3 scales of e2m1 columns.
  __device__ __forceinline__ u32 scales_of(int slot, int g, int half) const {
    if constexpr (Format::kScalesFollow) {
      const u32 scales = shared.scales(slot, row + 8 * g);
      if (Format::kMayBeFp4 && is_fp4[g]) {
        const uint4 of = load_shared_16(scales + half * 16);  // a word per tile, a byte per 16 columns
        const u32 own = chunk | (chunk + 4) << 4;
        return __byte_perm(__byte_perm(of.x, of.y, own), __byte_perm(of.z, of.w, own), 0x5410);
      }
      const uint2 of = load_shared_8(scales + half * 8);
      return __byte_perm(of.x, of.y, chunk < 2 ? 0x6420 : 0x7531);
    }
    return load_shared_u32(shared.row(slot, row + 8 * g) + 8 + half * 4);
  }
  // Stores tile k of a half as bfloat16, times its scales.
  __device__ __forceinline__ void store_tile(u32 tiles, int k, const u32 (&exponents)[2]) const {
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const u32 exponent = exponents[g] >> 8 * k & 0xff;
      const uint4& from = bytes[k][g];
      uint4 pairs[2];
      if (Format::kMayBeFp4 && is_fp4[g]) {
        const u32 scale = pair_of_e4m3(exponent);
        convert_e2m1(chunk % 2 ? from.z : from.x, scale, pairs[0]);
        convert_e2m1(chunk % 2 ? from.w : from.y, scale, pairs[1]);
      } else {
        const u32 half = exponent == 0xff ? 0x7fff : exponent << 7, scale = half << 16 | half;
        convert(from.x, scale, pairs[0].x, pairs[0].y);
        convert(from.y, scale, pairs[0].z, pairs[0].w);
        convert(from.z, scale, pairs[1].x, pairs[1].y);
        convert(from.w, scale, pairs[1].z, pairs[1].w);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
        store_shared_16(tiles + k * kTileBytes + (row + 8 * g) * 128 + ((2 * chunk + i ^ row % 8) << 4), pairs[i]);
    }
  }
  __device__ __forceinline__ static void convert(u32 bytes, u32 scale, u32& low, u32& high) {
    u32 first, second;
    expand_e4m3x4(bytes, first, second);
    const float2 a = unpack_pair<Fp16>(first), b = unpack_pair<Fp16>(second);
    low = multiply_pairs<Bf16>(pack_pair<Bf16>(a.x, a.y), scale);
    high = multiply_pairs<Bf16>(pack_pair<Bf16>(b.x, b.y), scale);
  }
  // A pair of bfloat16, both an e4m3 number.
  __device__ __forceinline__ static u32 pair_of_e4m3(u32 byte) {
    u32 first, second;
    expand_e4m3x4(byte, first, second);
    const float scale = unpack_pair<Fp16>(first).x;
    return pack_pair<Bf16>(scale, scale);
  }
  // Eight e2m1 numbers times their scale: exact, for the product has six significant bits.
  __device__ __forceinline__ static void convert_e2m1(u32 codes, u32 scale, uint4& pairs) {
    expand_e2m1x4(codes, pairs.x, pairs.y);
    expand_e2m1x4(codes >> 16, pairs.z, pairs.w);
    pairs = {multiply_pairs<Bf16>(pairs.x, scale), multiply_pairs<Bf16>(pairs.y, scale),
             multiply_pairs<Bf16>(pairs.z, scale), multiply_pairs<Bf16>(pairs.w, scale)};
  }

  // Stores half a block, which has been loaded: of block turn / 2 first the half that its owner uses first. Loads the
  // next half; after a second half that of the next block, if it exists. One code path serves all halves
  // (docs/kernels/mla_sparse.md).
  __device__ __forceinline__ bool hand_over(int turn) {
    const bool second = turn & 1;
    const int t = turn / 2, parity = t & 1, slot = t % V4Layout::kSlots;
    const int half = second ? 1 - parity : parity, next_half = second ? half : 1 - half;
    const u32 tiles = shared.stage(parity) + half * (kHalfTiles * kTileBytes);
    u32 exponents[2];
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      if constexpr (Format::kMayBeFp4) is_fp4[g] = next_is_fp4[g];
      exponents[g] = scales_of(slot, g, half);
    }
    bool more = true;
    int step = half ? -kHalfBytes : kHalfBytes;
    if (second) {
      more = begin(t + 1);
      step = half * kHalfBytes;
    }
#pragma unroll
    for (int g = 0; g < 2; ++g)
      columns[g] = copy_of(columns[g] + (Format::kMayBeFp4 && next_is_fp4[g] ? step / 2 : step));
    mbarrier_wait(shared.free(parity, half), t / 2 & 1 ^ 1, "a free KV stage");
#pragma unroll
    for (int k = 0; k < kHalfTiles; ++k) {
      if (k < Format::kTiles - kHalfTiles || half == 0) store_tile(tiles, k, exponents);
      if (k < Format::kTiles - kHalfTiles || next_half == 0) load_tile(k);
      if (k == 1) __syncwarp();  // limits how much is converted at once, and so the registers
    }
    fence_proxy_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.full(parity, half * kHalfTiles));  // plant: V4 tiles
    if (second) {
      if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.used(slot));  // plant: V4 rows used
    }
    return more;
  }
};

template <typename Format>
__device__ __forceinline__ void convert_v4(const V4Layout& shared, int warp) {
  V4Converter<Format> converter(shared, warp);
  bool more = converter.begin(0);
#pragma unroll
  for (int k = 0; k < kHalfTiles; ++k) converter.load_tile(k);
#pragma unroll 1
  for (int turn = 0; more || (turn & 1); ++turn) more = converter.hand_over(turn);
}

}  // namespace cumla::sparse
