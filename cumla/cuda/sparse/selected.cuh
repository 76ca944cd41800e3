// SPDX-License-Identifier: Apache-2.0
// MLA over a list of cache rows instead of pages. Each query token has a list. Each list has a place in the schedule,
// like a request of the dense kernels.
#pragma once
#include "mla/mla_decode/layout.cuh"
#include "mla/mla_decode/pages.cuh"
#include "split/tile.cuh"
#include "ptx/copy.cuh"
#include "ptx/types.cuh"

namespace cumla::sparse {

using namespace mla;
using namespace split;

// Some heads of a query token: grid = (row tiles, parts, 1). Its list is the caller's (sparse/lists.cuh). tile_rows:
// less than kTileRows if few lists are also split by heads (MLASparseKey.row_tile).
template <int kTileRows>
struct ListTile : RaggedTile {
  using Held = ListTile;
  static constexpr bool kIsList = true, kHasSinks = true;
  static constexpr int kMostRows = kTileRows;

  __device__ __forceinline__ explicit ListTile(const MlaDecodeParams& p, int tile_rows = kTileRows) : RaggedTile(p) {
    index = blockIdx.x;
    first_row = blockIdx.x * tile_rows;
    rows = min(tile_rows, p.heads_per_group - first_row);
    least_shift = most_shift = 0;
    q_len = 1;
  }
};

template <int kTileRows>
__device__ __forceinline__ Segment segment_of(const MlaDecodeParams& p, ListTile<kTileRows>& tile, const Part& part,
                                              int place) {
  Place at = {part.request, part.tokens};
  if (place != part.place) at = p.places[place];
  const int list = min(max(at.request, 0), p.batch - 1);
  Segment segment = segment_at(p, part, place, at.tokens, 0);
  segment.request = quotient(list, p.by_q_len);
  tile.q_begin = list - segment.request * p.q_len;
  return segment;
}

constexpr int kRowsInL2 = 36 << 10;  // rows of the cache, of queries or of results that L2 holds

// The same for lists that sparse/select_rows.cu made compact. block_table is [places][block_table_stride] row
// numbers, all of which exist; the lengths of all lists follow. Rows are numbered in steps of the cache's
// stride_page, like pages of one token. The schedule was made for lists of at least these lengths.
template <int kTileRows>
struct SelectedTile : ListTile<kTileRows> {
  using Held = SelectedTile;
  static constexpr bool kOtherFirst = true;
  using ListTile<kTileRows>::ListTile;

  // Many query rows must not evict the cache's rows from L2.
  template <typename Params>
  __device__ __forceinline__ static u64 policy(const Params& p) {
    return static_cast<i64>(p.batch) * p.heads_per_group > kRowsInL2 ? evict_first_policy() : evict_normal_policy();
  }
};

// The same for rows of 512 columns, which are all values. Swapped forms have a ring of their own.
template <typename AnyTile>
struct ValueTile : AnyTile {
  using Held = ValueTile;
  static constexpr bool kHasRope = false, kOtherFirst = false, kRing = AnyTile::kMostRows == kRowTile;
  using AnyTile::AnyTile;
};

template <int kTileRows>
__device__ __forceinline__ Segment segment_of(const MlaDecodeParams& p, SelectedTile<kTileRows>& tile,
                                              const Part& part, int turn) {
  // A list whose beginning another CTA has comes last. So CTAs begin their lists at about the same time, and rows that
  // ascend in all lists meet in L2.
  int place = turn;
  if (part.block > 0) place = turn < last_place_of(p, part) ? turn + 1 : part.place;
  Place at = {part.request, part.tokens};
  if (place != part.place) at = p.places[place];
  const int list = min(max(at.request, 0), p.batch - 1);
  const int scheduled = min(static_cast<i64>(max(at.tokens, 0)), p.max_tokens);
  const int length = min(max(p.block_table[p.batch * p.block_table_stride + list], 0), scheduled);
  Segment segment = segment_at(p, part, place, scheduled, scheduled - length);
  segment.tokens = length;
  segment.request = quotient(list, p.by_q_len);
  tile.q_begin = list - segment.request * p.q_len;
  tile.pages = list * p.block_table_stride;
  return segment;
}

// Rows of 512 columns: the row tiles of a list share the prefetches into L2. A single tile needs none. Rows of a small
// cache are soon in L2, where a prefetch only delays the copies (docs/kernels/mla_sparse.md).
template <int kTileRows>
__device__ __forceinline__ FetchShare fetch_share(const MlaDecodeParams& p, const SelectedTile<kTileRows>&) {
  return gridDim.x > 1 && p.num_pages > kRowsInL2 ? share_of_grid() : FetchShare{kBlockTokens, 1};
}

template <int kTileRows>
__device__ __forceinline__ int page_of(const MlaDecodeParams& p, const SelectedTile<kTileRows>& tile, const Segment&,
                                       u32 entry) {
  return p.block_table[tile.pages + entry];
}

}  // namespace cumla::sparse
