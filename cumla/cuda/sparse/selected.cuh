// SPDX-License-Identifier: Apache-2.0
// A list of cache rows in place of pages: what the MLA kernels need to attend to it. Each query token has a list, and
// each list a place of the schedule, as a request of the dense kernels.
#pragma once
#include "mla/mla_decode/layout.cuh"
#include "mla/mla_decode/pages.cuh"
#include "split/tile.cuh"
#include "ptx/copy.cuh"
#include "ptx/types.cuh"

namespace cumla::sparse {

using namespace mla;
using namespace split;

// Some of the heads of a query token: grid = (row tiles, parts, 1). Its list is as the caller gave it
// (sparse/lists.cuh). tile_rows: fewer than kTileRows where few lists are cut by heads, too (MLASparseKey.row_tile).
template <int kTileRows>
struct ListTile : RaggedTile {
  using Held = ListTile;
  static constexpr bool kIsList = true, kHasSinks = true;

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

constexpr int kRowsInL2 = 36 << 10;  // of the cache, of queries or of results

// The same where the list is what sparse/select_rows.cu leaves: block_table is [places][block_table_stride] numbers of
// rows, all of which exist, and after the last list lie the lengths of all. Rows are numbered in steps of the cache's
// stride_page, as pages of one token are. The schedule was made for lists at least as long.
template <int kTileRows>
struct SelectedTile : ListTile<kTileRows> {
  using Held = SelectedTile;
  using ListTile<kTileRows>::ListTile;

  // Many query rows are not to take L2 from the cache.
  template <typename Params>
  __device__ __forceinline__ static u64 policy(const Params& p) {
    return static_cast<i64>(p.batch) * p.heads_per_group > kRowsInL2 ? evict_first_policy() : evict_normal_policy();
  }
  // Where nothing is fetched ahead, and rows come from beyond L2 (docs/kernels/mla_sparse.md).
  template <typename Params>
  __device__ __forceinline__ static bool frees_early(const Params& p) {
    return gridDim.x == 1 && p.num_pages > kRowsInL2;
  }
};

template <int kTileRows>
__device__ __forceinline__ Segment segment_of(const MlaDecodeParams& p, SelectedTile<kTileRows>& tile,
                                              const Part& part, int place) {
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

// The row tiles of a list share what L2 fetches ahead. A single one has nobody to fetch for, and rows of a small cache
// are in L2 soon: there fetching only delays the copies (docs/kernels/mla_sparse.md).
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
