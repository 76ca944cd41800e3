// SPDX-License-Identifier: Apache-2.0
// The loading roles of mla_decode_swapped, and the kernel, which sparse MLA shares.
#pragma once
#include "mla/mla_decode/load.cuh"
#include "mla/mla_decode/masked.cuh"
#include "mla/mla_decode/pages.cuh"
#include "mla/mla_decode_swapped/compute.cuh"
#include "mla/mla_decode_swapped/layout.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace ptx;
using namespace split;

// row_warps: warps that copy rows; 0 without kRows. Of lists that the kernel reads, both tell which rows exist.
template <int kLatentTiles, bool kRope>
__device__ __forceinline__ void initialise_barriers(const SwappedLayoutOf<kLatentTiles, kRope>& shared, int row_warps,
                                                    int begun = 1) {
#pragma unroll
  for (int s = 0; s < shared.kSlots; ++s) {
    mbarrier_init(shared.full(s), row_warps ? row_warps * 32 : 1);
    mbarrier_init(shared.free(s), 4);
  }
#pragma unroll
  for (int i = 0; i < shared.kBegun; ++i) mbarrier_init(shared.begun(i), begun);
  mbarrier_init(shared.query_full(), 2);  // plant: query copied, arrivals
  mbarrier_init(shared.query_free(), 8);  // plant: query read, arrivals
  fence_mbarrier_init();
}

// One thread, or with kBoxes one warp, loads all blocks tile by tile into the ring.
// model: swapped_ring
template <PageForm kForm, typename Layout, typename AnyTile>
__device__ __forceinline__ void load_kv_ring(const MlaDecodeParams& p, const Layout& shared,
                                             const AnyTile& tile, const Part& part, int last_place) {
  constexpr int kLatentTiles = AnyTile::kLatentTiles, kRopeTile = kLatentTiles;
  BlockCursor<1, Tile> now(p, tile, part, last_place, 0);
  RingPlace<Layout::kSlots> place;
  const int offset = first_of_box<kForm>(p);
  PageRow next = now.template row_of<kForm>(offset);
#pragma unroll 1
  while (now.valid()) {
    const int t = now.t + now.i, begun = Layout::begun_of(t);
    const PageRow from = next;
    now.next();
    next = now.template row_of<kForm>(offset);
#pragma unroll
    for (int k = AnyTile::kHasRope ? 0 : 1; k <= kLatentTiles; ++k) {
      const int column = tile_in_order<kLatentTiles>(0, k);
      mbarrier_wait(shared.free(place.slot), place.phase ^ 1, "a free KV slot");
      load_tile<kForm>(p, shared.slot(place.slot), column, column == kRopeTile, shared.full(place.slot), from);
      place.advance(1);
    }
    if (threadIdx.x == 0) mbarrier_arrive(shared.begun(begun));
  }
}

// Copies kCount tiles of a block into the next slots of the ring.
// model: swapped_ring
template <int kCount, bool kRope, typename AnyTile, typename Layout, typename Place>
__device__ __forceinline__ void copy_to_ring(const RowCopier<AnyTile>& rows, const CacheColumns& from, int bytes,
                                             const Layout& shared, Place& place) {
  u32 tiles[kCount], barriers[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    tiles[k] = shared.slot(place.slot);
    barriers[k] = shared.full(place.slot);
    mbarrier_wait(shared.free(place.slot), place.phase ^ 1, "a free KV slot");
    place.advance(1);
  }
  rows.template copy<kCount, kRope>(from, bytes, tiles);
#pragma unroll
  for (int k = 0; k < kCount; ++k) mbarrier_arrive_after_copies(barriers[k]);
}

// The same for kRows: each of two warps copies half of the rows. One of them arrives at `begun`. If it has begun to
// load into a slot, everything in the slot before has arrived.
// model: swapped_ring
template <typename Layout, typename AnyTile>
__device__ __forceinline__ void load_kv_ring_rows(const MlaDecodeParams& p, const Layout& shared, const AnyTile& tile,
                                                  const Part& part, int last_place, int warp) {
  constexpr int kHalfTiles = Layout::kHalfTiles;
  RowCopier<AnyTile> rows(p, tile, part, last_place, warp);
  RingPlace<Layout::kSlots> place;
#pragma unroll 1
  for (int t = 0; rows.take(); ++t) {
    if constexpr (AnyTile::kHasRope) copy_to_ring<1, true>(rows, p.rope, 0, shared, place);
#pragma unroll 1
    for (int half = 0; half < 2; ++half)
      copy_to_ring<kHalfTiles, false>(rows, p.latent, half * kHalfTiles * 128, shared, place);
    if constexpr (kReadsLists<AnyTile>) {  // block t - kBegun, which had this place, freed its slots before
      rows.store_exist(shared.exist(t, warp));
      if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.begun(Layout::begun_of(t)));
    } else {
      if (threadIdx.x == 0) mbarrier_arrive(shared.begun(Layout::begun_of(t)));
    }
  }
  copy_async_wait_all();
}

template <typename T, PageForm kForm, typename AnyTile = Tile>
__device__ __forceinline__ void mla_decode_swapped(const MlaDecodeParams& p) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const SwappedLayoutOf<AnyTile::kLatentTiles, AnyTile::kHasRope> shared(shared_address(shared_bytes));
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  begin_kernel<kForm, AnyTile>(p, shared, kForm == kRows ? 2 : 0);
  grid_dependency_wait();

  const Part part = part_of_cta(p, blockIdx.y);
  AnyTile tile(p);
  const int last_place = last_place_of(p, part);

  if (warpgroup == 0) {
    if (warp < 2) {
      if constexpr (kForm == kRows)
        load_kv_ring_rows(p, shared, tile, part, last_place, warp);
      else if (warp == 0 && (kForm == kBoxes || lane == 0))
        load_kv_ring<kForm>(p, shared, tile, part, last_place);
    } else {
      load_query<kSwappedRows>(p, shared, tile, part, last_place, warp - 2);
    }
  } else {
    compute<SwappedConsumer<T, kForm == kRows, AnyTile>>(p, shared, tile, part, last_place, warpgroup);
  }
}

}  // namespace cumla::mla
