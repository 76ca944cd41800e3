// SPDX-License-Identifier: Apache-2.0
// The loading roles of mla_decode, and the kernel, which sparse MLA shares.
#pragma once
#include "mla/mla_decode/compute.cuh"
#include "mla/mla_decode/finish.cuh"
#include "mla/mla_decode/halves.cuh"
#include "mla/mla_decode/load.cuh"
#include "mla/mla_decode/masked.cuh"
#include "mla/mla_decode/pages.cuh"
#include "mla/mla_decode/probabilities.cuh"
#include "mla/mla_decode/products.cuh"
#include "mla/mla_decode/shared.cuh"
#include "mla/mla_decode/tree.cuh"
#include "mla/mla_decode/visible.cuh"
#include "split/join.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace ptx;
using namespace split;

// Warps that copy KV rows. In compute-bound kernels two cannot keep up.
template <bool kSharedBlocks, PageForm kForm, typename AnyTile>
constexpr int kRowWarps = kForm != kRows ? 0 : kSharedBlocks && !kHasHalf<AnyTile> ? 4 : 2;

// Called by one thread. row_warps: warps that copy rows, 0 without kRows. With four, warps 2 and 3 also copy query
// rows.
template <int kLatentTiles, bool kHalves>
__device__ __forceinline__ void initialise_barriers(const SharedLayoutOf<kLatentTiles, kHalves>& shared,
                                                    int row_warps) {
  const int arrivals = row_warps ? row_warps * 32 : 1;
  initialise_barriers(shared, arrivals, arrivals, row_warps == 4 ? 64 : 2);
}

// One warp loads a block, in kCount boxes per tile, into the thirds of a stage as they become free. kPages: one box.
template <PageForm kForm, int kCount, bool kHasRope, typename Layout>
__device__ __forceinline__ void load_block(const MlaDecodeParams& p, const Layout& shared, const PageRow& from,
                                           int parity, int stage, u32 phase) {
  constexpr int kHalfTiles = Layout::kHalfTiles, kRopeTile = Layout::kRopeTile;
  const Boxes<kCount> boxes(from);
#pragma unroll
  for (int k = kHasRope ? 0 : 1; k < 3; ++k) {
    const int half = k == 0 ? 2 : (k - 1) ^ parity, column = half * kHalfTiles;
    const u32 destination = shared.stage(stage) + column * kTileBytes, barrier = shared.full(stage, column);
    mbarrier_wait(shared.free(stage, half), phase ^ 1, "a free KV stage");
    if (elect_one()) {
      if (k == 0)
        boxes.template load<1, Layout::kRopeBytes>(kForm == kPages ? &p.latent_map : &p.rope_map, destination,
                                                   kForm == kPages ? kRopeTile * 64 : 32 * half_of<Layout>(), barrier);
      else
        boxes.template load<kHalfTiles>(&p.latent_map, destination, (column + kRopeTile * half_of<Layout>()) * 64,
                                        barrier);
    }
    __syncwarp();
  }
}

// One warp loads the blocks of one parity into their stage. With kSharedBlocks it also has L2 fetch its next block,
// so that loads do not wait for DRAM; the last two row tiles share that. With one row tile (memory-bound) a prefetch
// would only lengthen the queue of TMA.
template <bool kSharedBlocks, PageForm kForm, typename Layout, typename AnyTile>
__device__ __forceinline__ void load_kv(const MlaDecodeParams& p, const Layout& shared, const AnyTile& tile,
                                        const Part& part, int last_place, int parity) {
  constexpr bool kHasRope = AnyTile::kHasRope;
  BlockCursor<2, AnyTile> now(p, tile, part, last_place, parity);
  const int offset = first_of_box<kForm>(p);
  PageRow next = now.template row_of<kForm>(offset);
  // Nothing can start without the query, so the second block does not compete with it for bandwidth. A second block
  // of another request must not wait: its query phase may be over.
  if (parity == 1 && now.valid() && now.place == part.place)
    mbarrier_wait(shared.query_full(), 0, "the first query");
#pragma unroll 1
  while (now.valid()) {
    const int t = now.t + now.i, stage = Layout::stage_of(t, parity);
    const u32 phase = Layout::phase_of(t);
    if (kForm == kPages || p.box_rows == 64)
      load_block<kForm, 1, kHasRope>(p, shared, next, parity, stage, phase);
    else if (p.box_rows == 32)
      load_block<kForm, 2, kHasRope>(p, shared, next, parity, stage, phase);
    else if (p.box_rows == 16)
      load_block<kForm, 4, kHasRope>(p, shared, next, parity, stage, phase);
    else
      load_block<kForm, 8, kHasRope>(p, shared, next, parity, stage, phase);
    now.next();
    next = now.template row_of<kForm>(offset);
    // model: fetching_ahead
    if constexpr (kSharedBlocks && Layout::kStages == 2 && !kHasHalf<AnyTile>) {
      if (now.valid()) prefetch_block<kForm>(p, fetch_share(p, now.tile), next);
    }
  }
}

// The same for kRows, for all blocks: each of two warps copies half of the rows.
template <typename Layout, typename AnyTile>
__device__ __forceinline__ void load_kv_rows(const MlaDecodeParams& p, const Layout& shared, const AnyTile& tile,
                                             const Part& part, int last_place, int warp) {
  constexpr int kHalfTiles = Layout::kHalfTiles, kRopeTile = Layout::kRopeTile;
  RowCopier<AnyTile, 2> rows(p, tile, part, last_place, warp);
#pragma unroll 1
  for (int t = 0; rows.take(); ++t) {
    const int parity = t & 1, at = Layout::stage_of(t, parity);
    const u32 phase = Layout::phase_of(t), stage = shared.stage(at);
    if constexpr (AnyTile::kHasRope) {
      mbarrier_wait(shared.free(at, 2), phase ^ 1, "a free KV stage");
      if constexpr (kHasHalf<AnyTile>)
        rows.copy_half_rope(half_of<Layout>(), stage + kRopeTile * kTileBytes);
      else
        rows.template copy<1, true>(p.rope, 0, {stage + kRopeTile * kTileBytes});
      mbarrier_arrive_after_copies(shared.full(at, kRopeTile));
    }
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const int half = i ^ parity, column = half * kHalfTiles;
      u32 tiles[kHalfTiles];
#pragma unroll
      for (int k = 0; k < kHalfTiles; ++k) tiles[k] = stage + (column + k) * kTileBytes;
      mbarrier_wait(shared.free(at, half), phase ^ 1, "a free KV stage");
      rows.template copy<kHalfTiles>(p.latent, (column + kRopeTile * half_of<Layout>()) * 128, tiles);
#pragma unroll
      for (int k = 0; k < kHalfTiles; ++k) mbarrier_arrive_after_copies(shared.full(at, column + k));
    }
  }
  copy_async_wait_all();
}

// One of four loading warps, for compute-bound kernels: each copies a quarter of the rows. Warps 2 and 3 also copy
// the query rows of a request before its first block. Consumers issue the proxy fence (Consumer::multiply_query).
// Each half of V has one barrier (Consumer::kByHalves).
template <typename Layout, typename AnyTile>
__device__ __forceinline__ void load_rows(const MlaDecodeParams& p, const Layout& shared, AnyTile& tile,
                                          const Part& part, int last_place, int warp) {
  constexpr int kHalfTiles = Layout::kHalfTiles, kRopeTile = Layout::kRopeTile;
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
    const int parity = t & 1, at = Layout::stage_of(t, parity);
    const u32 phase = Layout::phase_of(t), stage = shared.stage(at);
    if constexpr (AnyTile::kHasRope) {
      rows.locate(p.rope_is_apart ? p.rope : p.latent);  // in one array: once for all columns
      mbarrier_wait(shared.free(at, 2), phase ^ 1, "a free KV stage");
      if (p.rope_is_apart) {
        rows.template copy_located<1, 0, true>(stage + kRopeTile * kTileBytes);
        rows.locate(p.latent);
      } else {
        rows.template copy_located<1, kRopeTile * 128, true>(stage + kRopeTile * kTileBytes);
      }
      mbarrier_arrive_after_copies(shared.full(at, kRopeTile));
    } else {
      rows.locate(p.latent);
    }
    if (parity == 1) rows.move(kHalfTiles * 128);
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      if constexpr (AnyTile::kRing) {
        const int use = 2 * t + i, slot = Layout::slot_of(use);
        mbarrier_wait(shared.free(slot, 0), Layout::phase_of_use(use) ^ 1, "a free KV slot");
        if constexpr (kReadsLists<AnyTile>) {
          if (i == 0) {  // block t - 4 had this place
            rows.store_exist(shared.bits(t) + warp * 4);
            mbarrier_arrive(shared.bits_full(t));
          }
        }
        rows.template copy_located<kHalfTiles>(shared.slot(slot));
        mbarrier_arrive_after_copies(shared.full(slot, 0));
        rows.move(parity == 0 ? kHalfTiles * 128 : -kHalfTiles * 128);
        continue;
      }
      const int half = i ^ parity, column = half * kHalfTiles;
      mbarrier_wait(shared.free(at, half), phase ^ 1, "a free KV stage");
      rows.template copy_located<kHalfTiles>(stage + column * kTileBytes);
      mbarrier_arrive_after_copies(shared.full(at, column));
      rows.move(parity == 0 ? kHalfTiles * 128 : -kHalfTiles * 128);
    }
    // model: fetching_ahead
    if constexpr (Layout::kStages == 2 && !(AnyTile::kIsList && AnyTile::kHasRope) && !kReadsLists<AnyTile>)
      rows.prefetch();
  }
  copy_async_wait_all();
}

template <bool kSharedBlocks, PageForm kForm, typename Layout, typename AnyTile>
__device__ __forceinline__ void load(const MlaDecodeParams& p, const Layout& shared, AnyTile& tile, const Part& part,
                                     int last_place) {
  const int warp = threadIdx.x / 32;
  constexpr int kRowers = kRowWarps<kSharedBlocks, kForm, AnyTile>;
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
  constexpr int kLoaderRegisters = AnyTile::kRing && kReadsLists<AnyTile> ? 72 : 56;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const LayoutOf<AnyTile> shared(shared_address(shared_bytes));
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  if constexpr (kHasHalf<AnyTile>) prefetch_places(p);
  begin_kernel<kForm, AnyTile>(p, shared, kRowWarps<kSharedBlocks, kForm, AnyTile>);
  if constexpr (kHasHalf<AnyTile>) cluster_arrive_relaxed();  // this CTA's barriers exist
  grid_dependency_wait();

  if constexpr (kForm != kPages || AnyTile::kIsRagged) {
    // Each role loads the part itself. Held in common, it would cost registers that neither role has.
    if (warpgroup == 0) {
      registers_decrease<kLoaderRegisters>();
      const Part part = part_of_cta(p, copy_of(blockIdx.y));
      if constexpr (kHasHalf<AnyTile>) cluster_wait();
      AnyTile tile(p);
      load<kSharedBlocks, kForm>(p, shared, tile, part, last_place_of(p, part));
    } else {
      registers_increase<kLoaderRegisters == 56 ? 224 : 216>();
      const Part part = part_of_cta(p, blockIdx.y);
      if constexpr (kHasHalf<AnyTile>) cluster_wait();
      AnyTile tile(p);
      compute<AnyConsumer>(p, shared, tile, part, last_place_of(p, part), warpgroup);
    }
  } else {
    // Until the query is loaded, warp 1 is idle.
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
  if constexpr (kHasHalf<AnyTile>) cluster_sync();  // all arrivals of this CTA are at the other one's barriers
}

}  // namespace cumla::mla
