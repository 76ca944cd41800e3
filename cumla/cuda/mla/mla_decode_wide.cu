// SPDX-License-Identifier: Apache-2.0
// MLA attention over a 16-bit cache of rows of 1024 latent columns and 64 of RoPE, for 32 query rows of a kv head.
// The operands are swapped, as in mla/mla_decode_swapped.cu: query rows are the N side, KV rows and columns of V the M
// side. Both consumers work on the same block, half of the columns each:
//
//   S^T (64 tokens x rows)  = K (64 x 1088) Q^T        O^T (1024 x rows) += V^T (1024 x 64 tokens) P^T
//
// grid = (1, parts, kv heads), 384 threads, one CTA per SM. Places of the ragged schedule have 32 query rows.
//
// Roles and time line:
//   warp 0, 1   load all blocks, tile by tile, as the tiles of the block before become free: those of a consumer each;
//               kRows: half of the rows each
//   warp 2, 3   have L2 fetch plan and block table, then load the query rows of each place
//   consumer 0  S = K Q over columns 0 to 511    | both: exchange S, softmax  | O += V P over columns 0 to 511
//   consumer 1  S = K Q over columns 512 to 1023 | of 16 query rows each      | O += V P over columns 512 to 1023
//
// barrier                   who arrives (count)                 who waits             guards
// full(tile), 17            TMA (1); kRows: each copying        the tile's consumer;  the tile is loaded
//                           thread (64)                         both of the RoPE one
// free(tile), 17            a lane per warp of that consumer    the loaders           the tile may be overwritten
//                           (4); of both of the RoPE one (8)
// query_full                a lane per query warp (2)           both consumers        query rows are loaded
// query_free                a lane per consumer warp (8)        the query warps       query rows and sums may be
//                                                                                     overwritten
// named, kConsumersBarrier  both consumers (256)                the same              exchange; P, factors, zeroed V;
//                                                                                     inverses
// named, one per consumer   its threads (128)                   the same              warp maxima, sums
//
// Shared memory:  block of 17 tiles 139,264 + query 69,632 + P 4,096 + exchange 8,192 + maxima and sums 1,024 + factors
//                 256 + words 16 + barriers 288 = 222,768 B of 232,448
// Registers:      224 of a consumer, of which output 128, scores 16; 56 of a loader
// Tensor work:    68 + 64 products m64n32k16 per block, bound by reading A from shared memory
#include "mla/mla_decode/load.cuh"
#include "mla/mla_decode/masked.cuh"
#include "mla/mla_decode/pages.cuh"
#include "mla/mla_decode_wide/compute.cuh"
#include "mla/mla_decode_wide/layout.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace ptx;
using namespace split;

// row_warps: warps that copy rows; 0 without kRows.
__device__ __forceinline__ void initialise_barriers(const WideLayout& shared, int row_warps) {
#pragma unroll
  for (int k = 0; k < shared.kTiles; ++k) {
    mbarrier_init(shared.full(k), row_warps ? row_warps * 32 : 1);
    mbarrier_init(shared.free(k), k == shared.kRopeTile ? 8 : 4);
  }
  mbarrier_init(shared.query_full(), 2);
  mbarrier_init(shared.query_free(), 8);
  fence_mbarrier_init();
}

// One of two warps loads the tiles of a consumer, the first one the RoPE tile as well.
template <typename AnyTile>
__device__ __forceinline__ void load_kv_boxes(const MlaDecodeParams& p, const WideLayout& shared, const AnyTile& tile,
                                              const Part& part, int last_place, int warp) {
  constexpr int kRopeTile = WideLayout::kRopeTile, kHalfTiles = WideLayout::kHalfTiles;
  BlockCursor<1, AnyTile> now(p, tile, part, last_place, 0);
  const int offset = first_of_box<kBoxes>(p);
  PageRow next = now.template row_of<kBoxes>(offset);
#pragma unroll 1
  for (u32 phase = 1; now.valid(); phase ^= 1) {
    const PageRow from = next;
    now.next();
    next = now.template row_of<kBoxes>(offset);
    auto load = [&](int k) {
      mbarrier_wait(shared.free(k), phase, "a free KV tile");
      load_tile<kBoxes>(p, shared.tile(k), k, k == kRopeTile, shared.full(k), from);
    };
    if (warp == 0) load(kRopeTile);
#pragma unroll 1
    for (int d = 0; d < kHalfTiles; ++d) {
      if (warp == 0) load(d);
      if (warp == 1) load(kHalfTiles + d);
    }
  }
}

// The same for kRows: each of two warps copies half of the rows, four tiles at a time.
template <typename AnyTile>
__device__ __forceinline__ void load_kv_rows(const MlaDecodeParams& p, const WideLayout& shared, const AnyTile& tile,
                                             const Part& part, int last_place, int warp) {
  constexpr int kRopeTile = WideLayout::kRopeTile, kHalfTiles = WideLayout::kHalfTiles, kRun = 4;
  RowCopier<AnyTile> rows(p, tile, part, last_place, warp);
#pragma unroll 1
  for (u32 phase = 1; rows.take(); phase ^= 1) {
    mbarrier_wait(shared.free(kRopeTile), phase, "a free KV tile");
    rows.template copy<1, true>(p.rope, 0, {shared.tile(kRopeTile)});
    mbarrier_arrive_after_copies(shared.full(kRopeTile));
#pragma unroll 1
    for (int run = 0; run < 2 * kHalfTiles / kRun; ++run) {
      const int first = run % 2 * kHalfTiles + run / 2 * kRun;
      u32 tiles[kRun];
#pragma unroll
      for (int k = 0; k < kRun; ++k) {
        tiles[k] = shared.tile(first + k);
        mbarrier_wait(shared.free(first + k), phase, "a free KV tile");
      }
      rows.template copy<kRun>(p.latent, first * 128, tiles);
#pragma unroll
      for (int k = 0; k < kRun; ++k) mbarrier_arrive_after_copies(shared.full(first + k));
    }
  }
  copy_async_wait_all();
}

template <typename T, PageForm kForm, typename AnyTile>
__device__ __forceinline__ void mla_decode_wide(const MlaDecodeParams& p) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const WideLayout shared(shared_address(shared_bytes));
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  const int warp = threadIdx.x / 32;
  begin_kernel<kForm, AnyTile>(p, shared, kForm == kRows ? 2 : 0);
  grid_dependency_wait();

  // Each role loads the part itself, as in mla/mla_decode.cu.
  if (warpgroup == 0) {
    registers_decrease<56>();
    const Part part = part_of_cta(p, copy_of(blockIdx.y));
    AnyTile tile(p);
    const int last_place = last_place_of(p, part);
    if (warp >= 2)
      load_query<kWideRows>(p, shared, tile, part, last_place, warp - 2);
    else if constexpr (kForm == kRows)
      load_kv_rows(p, shared, tile, part, last_place, warp);
    else
      load_kv_boxes(p, shared, tile, part, last_place, warp);
  } else {
    registers_increase<224>();
    const Part part = part_of_cta(p, blockIdx.y);
    AnyTile tile(p);
    compute<WideConsumer<T, kForm == kRows, AnyTile>>(p, shared, tile, part, last_place_of(p, part), warpgroup);
  }
}

}  // namespace cumla::mla
