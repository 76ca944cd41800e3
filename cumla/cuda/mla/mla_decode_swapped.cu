// SPDX-License-Identifier: Apache-2.0
// Split-KV MLA decode for sm_90a with the operands swapped (why, and roles: docs/kernels/mla.md): for at most 16 query
// rows of a kv head, which are the N side of the products, KV rows and columns of V the M side.
//
//   S^T (64 tokens x rows)  = K (64 x 576) Q^T        O^T (512 x rows) += V^T (512 x 64 tokens) P^T
//
// grid = (1, parts, kv heads), 384 threads, one CTA an SM. Of kRows warps 0 and 1 load the KV blocks.
//
// Shared memory:  ring of 24 tiles 196,608 + query 18,432 + P, exchange and joining 14,336 + maxima 512 + sums 1,152
//                 + words 16 + barriers 416 = 231,472 B of 232,448
// Registers:      168, of which output 64, scores 8
// Tensor work:    36 + 32 products m64n16k16 a block, bound by reading A from shared memory
#include "mla/mla_decode/load.cuh"
#include "mla/mla_decode/pages.cuh"
#include "mla/mla_decode_swapped/compute.cuh"
#include "mla/mla_decode_swapped/layout.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace ptx;
using namespace split;

// row_warps: those that copy rows; 0 without kRows.
__device__ __forceinline__ void initialise_barriers(const SwappedLayout& shared, int row_warps) {
#pragma unroll
  for (int s = 0; s < SwappedLayout::kSlots; ++s) {
    mbarrier_init(shared.full(s), row_warps ? row_warps * 32 : 1);
    mbarrier_init(shared.free(s), 4);
  }
  mbarrier_init(shared.begun(0), 1);
  mbarrier_init(shared.begun(1), 1);
  mbarrier_init(shared.query_full(), 2);  // plant: query copied, arrivals
  mbarrier_init(shared.query_free(), 8);  // plant: query read, arrivals
  fence_mbarrier_init();
}

// Loads all blocks, tile by tile, into a ring of tiles as its slots become free: one thread, of kBoxes a warp.
// model: swapped_ring
template <PageForm kForm>
__device__ __forceinline__ void load_kv_ring(const MlaDecodeParams& p, const SwappedLayout& shared,
                                             const Tile& tile, const Part& part, int last_place) {
  BlockCursor<1, Tile> now(p, tile, part, last_place, 0);
  SlotPlace place;
  const int offset = first_of_box<kForm>(p);
  PageRow next = now.template row_of<kForm>(offset);
#pragma unroll 1
  while (now.valid()) {
    const int owner = (now.t + now.i) & 1;
    const PageRow from = next;
    now.next();
    next = now.template row_of<kForm>(offset);
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
      const int column = tile_in_order(0, k);
      mbarrier_wait(shared.free(place.slot), place.phase ^ 1, "a free KV slot");
      load_tile<kForm>(p, shared.slot(place.slot), column, column == kRopeTile, shared.full(place.slot), from);
      place.advance(1);
    }
    if (threadIdx.x == 0) mbarrier_arrive(shared.begun(owner));
  }
}

// kCount tiles of a block into the next slots of the ring.
// model: swapped_ring
template <int kCount>
__device__ __forceinline__ void copy_to_ring(const RowCopier<Tile>& rows, const CacheColumns& from, int bytes,
                                             const SwappedLayout& shared, SlotPlace& place) {
  u32 tiles[kCount], barriers[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    tiles[k] = shared.slot(place.slot);
    barriers[k] = shared.full(place.slot);
    mbarrier_wait(shared.free(place.slot), place.phase ^ 1, "a free KV slot");
    place.advance(1);
  }
  rows.copy<kCount>(from, bytes, tiles);
#pragma unroll
  for (int k = 0; k < kCount; ++k) mbarrier_arrive_after_copies(barriers[k]);
}

// The same of kRows: one of two warps, half of the rows. That one of them has begun to load into a slot is enough to
// know that all of what was there before has come.
// model: swapped_ring
__device__ __forceinline__ void load_kv_ring_rows(const MlaDecodeParams& p, const SwappedLayout& shared,
                                                  const Tile& tile,
                                                  const Part& part, int last_place, int warp) {
  RowCopier<Tile> rows(p, tile, part, last_place, warp);
  SlotPlace place;
#pragma unroll 1
  for (int t = 0; rows.take(); ++t) {
    copy_to_ring<1>(rows, p.rope, 0, shared, place);
#pragma unroll 1
    for (int half = 0; half < 2; ++half) copy_to_ring<kHalfTiles>(rows, p.latent, half * kHalfTiles * 128, shared,
                                                                  place);
    if (threadIdx.x == 0) mbarrier_arrive(shared.begun(t & 1));
  }
  copy_async_wait_all();
}

template <typename T, PageForm kForm>
__device__ __forceinline__ void mla_decode_swapped(const MlaDecodeParams& p) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const SwappedLayout shared(shared_address(shared_bytes));
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  begin_kernel<kForm, Tile>(p, shared, kForm == kRows ? 2 : 0);
  grid_dependency_wait();

  const Part part = part_of_cta(p, blockIdx.y);
  const Tile tile(p);
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
    compute<SwappedConsumer<T, kForm == kRows>>(p, shared, tile, part, last_place, warpgroup);
  }
}

}  // namespace cumla::mla
