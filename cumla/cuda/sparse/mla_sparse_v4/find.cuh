// SPDX-License-Identifier: Apache-2.0
// The finders of mla_sparse_v4 and mla_sparse_v41: addresses and scales of rows, bfloat16 columns and query rows.
#pragma once
#include "mla/mla_decode/load.cuh"
#include "mla/mla_decode/pages.cuh"
#include "sparse/mla_sparse_v4/layout.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::sparse {

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
    if (t == 0) named_barrier_arrive<kFoundBarrier, 2 * kWarpgroup>();
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

// The four finding warps. They also copy the query rows of a list before its first block, but for the first list, whose
// rows consumer 1 copies. The first two blocks are copied as soon as they are found.
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
      blocks += segment.blocks;
      if (place == part.place) continue;  // consumer 1 copies its query rows
      mbarrier_wait(shared.query_free(), (place - part.place) & 1 ^ 1, "a free query buffer");
      copy_query<kRowTile, 4>(p, shared, tile, segment.request, warp);
      mbarrier_arrive_after_copies(shared.query_full());
    }
    if (!exists) break;
    if constexpr (Format::kTiles < kRopeTile) finder.copy(t);
  }
  copy_async_wait_all();
}

}  // namespace cumla::sparse
