// SPDX-License-Identifier: Apache-2.0
// MLA over lists of rows of 512 columns in 16 bits that the kernel reads itself: few lists take less time without
// select_rows before it. Absent rows are zeros, and a bit per row has consumers mask their scores.
#pragma once
#include "mla/mla_decode/layout.cuh"
#include "mla/mla_decode/load.cuh"
#include "mla/mla_decode/kernel.cuh"
#include "mla/mla_decode_swapped/kernel.cuh"
#include "sparse/lists.cuh"
#include "sparse/selected.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/types.cuh"

namespace cumla::sparse {

struct MlaSparseListsParams : MlaDecodeParams {
  Lists lists;
};

}  // namespace cumla::sparse
namespace cumla::mla {
struct ReadsLists {};
}  // namespace cumla::mla
namespace cumla::sparse {

// A list is a request whose "pages" are its entries. Rows are numbered in steps of the cache's stride_page.
template <int kTileRows>
struct ListedTile : ListTile<kTileRows>, ReadsLists {
  using Held = ListedTile;
  using Found = Lookup;
  static constexpr bool kHasRope = false, kHasAbsent = true, kRing = kTileRows == kRowTile;
  using ListTile<kTileRows>::ListTile;
  const int* entries;
  const int* pages_of_list;  // of the list's request; null: entries are slots
  bool exists;

  __device__ __forceinline__ static const Lists& lists_of(const MlaDecodeParams& p) {
    return static_cast<const MlaSparseListsParams&>(p).lists;
  }
  __device__ __forceinline__ static void prefetch(const MlaDecodeParams& p, int thread, int threads) {
    prefetch_lists(p, lists_of(p), p.max_tokens, thread, threads);
  }
  __device__ __forceinline__ static Lookup look_up(const MlaDecodeParams& p, const int* pages, int entry) {
    return List::look_up(lists_of(p), pages, entry);
  }
  __device__ __forceinline__ static int row_of(const MlaDecodeParams& p, const Lookup& found) {
    return List::row_of(lists_of(p), found);
  }
  template <typename Layout>
  __device__ __forceinline__ static void initialise(const Layout& shared, int row_warps) {
    if constexpr (kTileRows == kSwappedRows)
      initialise_barriers(shared, row_warps, row_warps);
    else
      initialise_barriers(shared, row_warps);
  }
  // Block t's bits, 16 a word. The lane that arrives after the block's products loads, as racecheck needs.
  __device__ __forceinline__ static uint4 exist(const RingLayout& shared, int t) {
    mbarrier_wait(shared.bits_full(t), shared.bits_phase(t), "the rows that exist");
    float4 bits = {};
    if (threadIdx.x % 32 == 0) bits = load_shared_float4(shared.bits(t));
    return {__shfl_sync(0xffffffffu, __float_as_uint(bits.x), 0), __shfl_sync(0xffffffffu, __float_as_uint(bits.y), 0),
            __shfl_sync(0xffffffffu, __float_as_uint(bits.z), 0), __shfl_sync(0xffffffffu, __float_as_uint(bits.w), 0)};
  }
};

template <int kTileRows>
__device__ __forceinline__ Segment segment_of(const MlaDecodeParams& p, ListedTile<kTileRows>& tile, const Part& part,
                                              int place) {
  const Segment segment = segment_of(p, static_cast<ListTile<kTileRows>&>(tile), part, place);
  const List list(tile.lists_of(p), segment.request, tile.q_begin);
  tile.entries = list.entries;
  tile.pages_of_list = list.pages;
  tile.exists = list.exists;
  return segment;
}

template <int kTileRows>
__device__ __forceinline__ int page_of(const MlaDecodeParams&, const ListedTile<kTileRows>& tile, const Segment&,
                                       u32 entry) {
  return tile.exists ? tile.entries[entry] : -1;
}

}  // namespace cumla::sparse
