// SPDX-License-Identifier: Apache-2.0
// Split-KV MLA decode for sm_90a: attention of up to 64 query rows of one kv head over the blocks of one part of the
// schedule (split/plan.cuh). grid = (row tiles of a kv head, parts, kv heads), 384 threads, one CTA an SM; over queries
// of different lengths (1, parts, kv heads), a row tile at each place of the schedule (RaggedTile).
//
// Three warpgroups. Warpgroup 0 loads: warp 0 the even KV blocks of this CTA's sequence, warp 1 the odd ones (TMA), of
// kRows each half of every block, or all four warps a quarter (mla/mla_decode/pages.cuh); warps 2 and 3 the query rows
// as well. Warpgroups 1 and 2 compute: consumer c holds the output columns [256 c, 256 c + 256) of all 64 rows, scores
// every second block, and hands its probabilities and running maximum to the other (time lines: docs/kernels/mla.md).
// With kSharedBlocks, compute-bound, P V of the other's block runs beside the softmax, or as comes first (frees_early).
//
// The block counter runs on over the requests of a part: block t belongs to consumer t % 2 and stage t % 2 everywhere.
//
// Shared memory:  query 73,728 + two KV stages of 73,728 + P 8,192 + maxima 512 + sums 1,024 + barriers 224
//                 + pacer 1,024 = 232,160 B of 232,448
// Registers:      consumers 224 (128 output, 32 scores, 16 probabilities), loaders 56; 168 at the start
//                 (65,536 / 384 in steps of 8)
// Tensor work:    2,176 clocks a block; loads 73,728 B a block and CTA
#include "mla/mla_decode/compute.cuh"
#include "mla/mla_decode/load.cuh"
#include "mla/mla_decode/pages.cuh"
#include "mla/mla_decode/shared.cuh"
#include "split/join.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace ptx;
using namespace split;

// Warps that copy KV rows. Two cannot keep up in compute-bound kernels.
template <bool kSharedBlocks, PageForm kForm>
constexpr int kRowWarps = kForm != kRows ? 0 : kSharedBlocks ? 4 : 2;

// By one thread. row_warps: warps that copy rows, 0 without kRows; if there are four, two of them copy the query rows
// as well.
__device__ __forceinline__ void initialise_barriers(const SharedLayout& shared, int row_warps) {
  const int arrivals = row_warps ? row_warps * 32 : 1;
  initialise_barriers(shared, arrivals, arrivals, row_warps == 4 ? 64 : 2);
}

// One warp loads a block, in kCount boxes a tile (1 with kPages), into the thirds of a stage as they become free.
template <PageForm kForm, int kCount>
__device__ __forceinline__ void load_block(const MlaDecodeParams& p, const SharedLayout& shared, const PageRow& from,
                                           int parity,
                                           u32 phase) {
  const Boxes<kCount> boxes(from);
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    const int half = k == 0 ? 2 : (k - 1) ^ parity, column = half * kHalfTiles;
    const u32 destination = shared.stage(parity) + column * kTileBytes, barrier = shared.full(parity, column);
    mbarrier_wait(shared.free(parity, half), phase ^ 1, "a free KV stage");
    if (elect_one()) {
      if (k == 0)
        boxes.template load<1>(kForm == kPages ? &p.latent_map : &p.rope_map, destination,
                               kForm == kPages ? kRopeTile * 64 : 0,
                               barrier);
      else
        boxes.template load<kHalfTiles>(&p.latent_map, destination, column * 64, barrier);
    }
    __syncwarp();
  }
}

// One warp loads the blocks of one parity into their stage. With kSharedBlocks (compute-bound) it also prefetches its
// next block into L2, so that a load waits for L2 and not for DRAM; the last two row tiles share that. With one row
// tile (memory-bound) prefetching only lengthens the queue of the copy engine.
template <bool kSharedBlocks, PageForm kForm, typename AnyTile>
__device__ __forceinline__ void load_kv(const MlaDecodeParams& p, const SharedLayout& shared, const AnyTile& tile,
                                        const Part& part, int last_place, int parity) {
  BlockCursor<2, AnyTile> now(p, tile, part, last_place, parity);
  const int offset = first_of_box<kForm>(p);
  PageRow next = now.template row_of<kForm>(offset);
  // Nothing begins without the query, so it does not share the bandwidth with the second block. Where that belongs to
  // another request, the query's barrier may have gone on before.
  if (parity == 1 && now.valid() && now.place == part.place)
    mbarrier_wait(shared.query_full(), 0, "the first query");
#pragma unroll 1
  while (now.valid()) {
    const u32 phase = ((now.t + now.i) / 2) & 1;
    if (kForm == kPages || p.box_rows == 64)
      load_block<kForm, 1>(p, shared, next, parity, phase);
    else if (p.box_rows == 32)
      load_block<kForm, 2>(p, shared, next, parity, phase);
    else if (p.box_rows == 16)
      load_block<kForm, 4>(p, shared, next, parity, phase);
    else
      load_block<kForm, 8>(p, shared, next, parity, phase);
    now.next();
    next = now.template row_of<kForm>(offset);
    // model: fetching_ahead
    if constexpr (kSharedBlocks) {
      if (now.valid()) prefetch_block<kForm>(p, fetch_share(p, now.tile), next);
    }
  }
}

// The same with kRows, for all blocks in turn: one of two warps, half of the rows.
template <typename AnyTile>
__device__ __forceinline__ void load_kv_rows(const MlaDecodeParams& p, const SharedLayout& shared, const AnyTile& tile,
                                             const Part& part, int last_place, int warp) {
  RowCopier<AnyTile, 2> rows(p, tile, part, last_place, warp);
#pragma unroll 1
  for (int t = 0; rows.take(); ++t) {
    const int parity = t & 1;
    const u32 phase = (t / 2) & 1, stage = shared.stage(parity);
    mbarrier_wait(shared.free(parity, 2), phase ^ 1, "a free KV stage");
    if constexpr (AnyTile::kHasRope) {
      rows.template copy<1>(p.rope, 0, {stage + kRopeTile * kTileBytes});
      mbarrier_arrive_after_copies(shared.full(parity, kRopeTile));
    }
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const int half = i ^ parity, column = half * kHalfTiles;
      const u32 tiles = stage + column * kTileBytes;
      mbarrier_wait(shared.free(parity, half), phase ^ 1, "a free KV stage");
      rows.template copy<kHalfTiles>(p.latent, column * 128,
                            {tiles, tiles + kTileBytes, tiles + 2 * kTileBytes, tiles + 3 * kTileBytes});
#pragma unroll
      for (int k = 0; k < kHalfTiles; ++k) mbarrier_arrive_after_copies(shared.full(parity, column + k));
    }
  }
  copy_async_wait_all();
}

// One of four loader warps, a quarter of the rows each: in compute-bound kernels two warps cannot keep up. Warps 2 and
// 3 also copy a request's query rows before its first block. The consumers issue the proxy fence, after their first
// tiles (Consumer::multiply_query). Each half of a block's tiles has one barrier (Consumer::kByHalves).
template <typename AnyTile>
__device__ __forceinline__ void load_rows(const MlaDecodeParams& p, const SharedLayout& shared, AnyTile& tile,
                                          const Part& part,
                                          int last_place, int warp) {
  RowCopier<AnyTile, 4> rows(p, tile, part, last_place, warp);
  int place = part.place, left = warp < 2 ? kMaxTokens : 0;  // blocks before the next query
#pragma unroll 1
  for (int t = 0;; ++t, --left) {
#pragma unroll 1
    for (; left == 0 && place <= last_place; ++place) {
      const Segment segment = segment_of(p, tile, part, place);
      mbarrier_wait(shared.query_free(), (place - part.place) & 1 ^ 1, "a free query buffer");
      copy_query<kRowTile>(p, shared, tile, segment.request, warp - 2);
      mbarrier_arrive_after_copies(shared.query_full());
      left = segment.blocks;
    }
    if (!rows.take()) break;
    const int parity = t & 1;
    const u32 phase = (t / 2) & 1, stage = shared.stage(parity);
    if constexpr (AnyTile::kHasRope) {
      rows.locate(p.rope_is_apart ? p.rope : p.latent);  // in one array once for all columns of a row
      mbarrier_wait(shared.free(parity, 2), phase ^ 1, "a free KV stage");
      if (p.rope_is_apart) {
        rows.template copy_located<1>(stage + kRopeTile * kTileBytes);
        rows.locate(p.latent);
      } else {
        rows.template copy_located<1, kRopeTile * 128>(stage + kRopeTile * kTileBytes);
      }
      mbarrier_arrive_after_copies(shared.full(parity, kRopeTile));
    } else {
      rows.locate(p.latent);
      mbarrier_wait(shared.free(parity, 2), phase ^ 1, "a free KV stage");
    }
    if (parity == 1) rows.move(kHalfTiles * 128);
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const int half = i ^ parity, column = half * kHalfTiles;
      mbarrier_wait(shared.free(parity, half), phase ^ 1, "a free KV stage");
      rows.template copy_located<kHalfTiles>(stage + column * kTileBytes);
      mbarrier_arrive_after_copies(shared.full(parity, column));
      rows.move(parity == 0 ? kHalfTiles * 128 : -kHalfTiles * 128);
    }
    // model: fetching_ahead
    rows.prefetch();
  }
  copy_async_wait_all();
}

template <bool kSharedBlocks, PageForm kForm, typename AnyTile>
__device__ __forceinline__ void load(const MlaDecodeParams& p, const SharedLayout& shared, AnyTile& tile,
                                     const Part& part, int last_place) {
  const int warp = threadIdx.x / 32;
  constexpr int kRowers = kRowWarps<kSharedBlocks, kForm>;
  if constexpr (kRowers == 4)
    load_rows(p, shared, tile, part, last_place, warp);
  else if (warp < kRowers)
    load_kv_rows(p, shared, tile, part, last_place, warp);
  else if (warp >= 2)
    load_query<kRowTile>(p, shared, tile, part, last_place, warp - 2);
  else
    load_kv<kSharedBlocks, kForm>(p, shared, tile, part, last_place, warp);
}

// kSharedBlocks: several row tiles, or many lists, read the same blocks.
template <typename T, bool kSharedBlocks, PageForm kForm, typename AnyTile = Tile>
__device__ __forceinline__ void mla_decode(const MlaDecodeParams& p) {
  using AnyConsumer = Consumer<T, kSharedBlocks, kForm == kRows, AnyTile>;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const SharedLayout shared(shared_address(shared_bytes));
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  begin_kernel<kForm, AnyTile>(p, shared, kRowWarps<kSharedBlocks, kForm>);
  grid_dependency_wait();

  if constexpr (kForm != kPages || AnyTile::kIsRagged) {
    // Each role reads the part for itself: what both hold from before would cost registers that they lack.
    if (warpgroup == 0) {
      registers_decrease<56>();
      const Part part = part_of_cta(p, copy_of(blockIdx.y));
      AnyTile tile(p);
      load<kSharedBlocks, kForm>(p, shared, tile, part, last_place_of(p, part));
    } else {
      registers_increase<224>();
      const Part part = part_of_cta(p, blockIdx.y);
      AnyTile tile(p);
      compute<AnyConsumer>(p, shared, tile, part, last_place_of(p, part), warpgroup);
    }
  } else {
    // Warp 1 has nothing to load before the query is there.
    // model: fetching_ahead
    if (kSharedBlocks && threadIdx.x / 32 == 1) prefetch_first_block(p);
    const Part part = part_of_cta(p, blockIdx.y);
    AnyTile tile(p);
    const int last_place = last_place_of(p, part);
    if (warpgroup == 0) {
      registers_decrease<56>();
      load<kSharedBlocks, kForm>(p, shared, tile, part, last_place);
    } else {
      registers_increase<224>();
      compute<AnyConsumer>(p, shared, tile, part, last_place, warpgroup);
    }
  }
}

}  // namespace cumla::mla
