// SPDX-License-Identifier: Apache-2.0
// Split-KV MLA decode for sm_90a with the operands swapped: for at most 16 or 32 query rows of a kv head. A matrix product
// has 64 rows on its M side at least; here these are KV rows and columns of V, and the query rows are the N side:
//
//   S^T (64 tokens x rows)  = K (64 x 576) Q^T        O^T (512 x rows) += V^T (512 x 64 tokens) P^T
//
// so that few rows cost few registers, little shared memory and little tensor time, and the rest of shared memory is a
// deep ring of KV tiles. grid = (1, parts, kv heads), 384 threads, one CTA an SM.
//
// Warpgroup 0 loads: warp 0 the KV blocks, tile by tile as slots of the ring become free (TMA, one thread), warps 2 and 3
// the query rows. Warpgroups 1 and 2 compute, each every second block for itself, from its scores to O += V P; at the end
// of a segment they add up what they have, each half of the columns of V:
//
//   consumer 0:  S0 = K0 Q   softmax0   O += V0 P0   S2 = K2 Q ...          } O[0, 256) of both
//   consumer 1:              S1 = K1 Q   softmax1   O += V1 P1   S3 ...     } O[256, 512) of both
//
// Memory-bound: 73,728 B a block take 3,700 clocks at an SM's share of the read bandwidth. A consumer has twice as long
// for one of its blocks, so that none of them waits in the ring for long.
//
// Shared memory (16 rows / 32 rows):  query 18,432 / 36,864 + ring of 24 / 22 tiles of 8,192 + P and joining 8,192
//                                     + maxima 512 / 1,024 + sums 1,152 / 2,304 + words 16 + barriers 432 / 400
//                                     = 225,344 / 229,024 B of 232,448
// Registers:      consumers 224 (output 64 / 128, scores 8 / 16), loaders 56; 168 at the start
// Tensor work:    36 + 32 products m64n16k16 or m64n32k16 a block, bound by reading A from shared memory
#include "mla_decode_load.cuh"
#include "mla_decode_swapped_compute.cuh"
#include "mla_decode_swapped_layout.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"

namespace cumla {

__device__ __forceinline__ void initialise_barriers(const SwappedLayout& shared) {
#pragma unroll
  for (int s = 0; s < SwappedLayout::kSlots; ++s) {
    mbarrier_init(shared.full(s), 1);
    mbarrier_init(shared.free(s), 4);
  }
#pragma unroll
  for (int turn = 0; turn < 2; ++turn) {
    mbarrier_init(shared.part_full(turn), 1);
    mbarrier_init(shared.part_free(turn), 10);
  }
  mbarrier_init(shared.query_full(), 2);
  mbarrier_init(shared.query_free(), 8);
  fence_mbarrier_init();
}

// Which part a CTA takes next, or -1: those behind the first of each CTA go to whoever asks first. Multiprocessors are
// not equally fast (by 9 % either way where memory is the bound). By one thread; the last to ask resets the count.
__device__ __forceinline__ int claim_part(const MlaDecodeParams& p, const Tile& tile, int used) {
  const u32 spare = used - gridDim.y;
  u32* const claimed = &p.tickets[static_cast<i64>(tile.index) * p.parts].claimed;
  const u32 before = atomic_add_acq_rel(claimed, 1);
  if (before + 1 == spare + gridDim.y) store_relaxed(claimed, 0);
  return before < spare ? static_cast<int>(gridDim.y + before) : -1;
}

// One thread: loads all blocks, tile by tile, into a ring of tiles as its slots become free, and claims parts.
__device__ __forceinline__ void load_kv_ring(const MlaDecodeParams& p, const SwappedLayout& shared,
                                             const Tile& tile) {
  RingPlace place;
  int index = blockIdx.y;
#pragma unroll 1
  for (u32 turn = 0; index >= 0; ++turn) {
    const Part part = sane_part(p.parts_in[index], index, p.batch, p.parts);
    const int last_request = last_request_of(p, part);
#pragma unroll 1
    for (int request = part.request; request <= last_request; ++request) {
      const Segment segment = segment_of(p, tile, part, index, request);
      const int* const pages = p.block_table + request * p.block_table_stride + segment.begin;
      int next_page = segment.blocks > 0 ? pages[0] : 0;
#pragma unroll 1
      for (int i = 0; i < segment.blocks; ++i) {
        const int page = next_page;
        if (i + 1 < segment.blocks) next_page = pages[i + 1];
#pragma unroll
        for (int k = 0; k < kTiles; ++k) {
          const u32 full = shared.full(place.slot);
          mbarrier_wait(shared.free(place.slot), place.phase ^ 1, "a free KV slot");
          mbarrier_arrive_expect_tx(full, kTileBytes);
          tma_load_4d_async(shared.slot(place.slot), &p.kv, full, tile_in_order(0, k) * 64, 0, blockIdx.z, page);
          place.advance(1);
        }
      }
    }
    if (part.used <= gridDim.y) break;
    index = claim_part(p, tile, part.used);
    mbarrier_wait(shared.part_free(turn), turn / 2 & 1 ^ 1, "a place for the number of a part");
    store_shared_u32(shared.part(turn), index);
    mbarrier_arrive(shared.part_full(turn));
  }
}

// The part that this CTA takes after `turn` others, or -1. By a warp.
__device__ __forceinline__ int next_part(const SwappedLayout& shared, const Part& part, u32 turn) {
  if (part.used <= gridDim.y) return -1;
  mbarrier_wait(shared.part_full(turn), turn / 2 & 1, "the number of a part");
  int index = 0;
  if (threadIdx.x % 32 == 0) {
    index = load_shared_u32(shared.part(turn));
    mbarrier_arrive(shared.part_free(turn));
  }
  return __shfl_sync(0xffffffffu, index, 0);
}

__device__ __forceinline__ void load_queries(const MlaDecodeParams& p, const SwappedLayout& shared,
                                             const Tile& tile, int loader) {
  int index = blockIdx.y;
  u32 segments = 0;
#pragma unroll 1
  for (u32 turn = 0; index >= 0; ++turn) {
    const Part part = sane_part(p.parts_in[index], index, p.batch, p.parts);
    const int last_request = last_request_of(p, part);
#pragma unroll 1
    for (int request = part.request; request <= last_request; ++request, ++segments)
      load_query<kSwappedRows>(p, shared, tile, request, segments & 1, loader);
    index = next_part(shared, part, turn);
  }
}

template <typename T>
__device__ __forceinline__ void attend(const MlaDecodeParams& p, const SwappedLayout& shared, const Tile& tile,
                                       int number) {
  SwappedConsumer<T> consumer(p, shared, tile, number);
  int index = blockIdx.y, t = 0;
  u32 segments = 0;
#pragma unroll 1
  for (u32 turn = 0; index >= 0; ++turn) {
    const Part part = sane_part(p.parts_in[index], index, p.batch, p.parts);
    const int last_request = last_request_of(p, part);
    if (part.request > last_request) index = next_part(shared, part, turn);
#pragma unroll 1
    for (int request = part.request; request <= last_request; ++request, ++segments) {
      const Segment segment = segment_of(p, tile, part, index, request);
      consumer.compute(segment, t, segments & 1);
      t += segment.blocks;
      if (request == last_request) index = next_part(shared, part, turn);
      consumer.finish(segment, request < last_request || index >= 0);
    }
  }
}

template <typename T>
__device__ __forceinline__ void mla_decode_swapped(const MlaDecodeParams& p) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const SwappedLayout shared(shared_address(shared_bytes));
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Fetching into L2 reads nothing: an earlier kernel may still write these lines.
  if (warp == 2 || warp == 3) prefetch_plan(p, threadIdx.x - 64, 64);
  if (threadIdx.x == 32) prefetch_tensor_map(&p.kv);
  if (threadIdx.x == 0) initialise_barriers(shared);
  grid_dependency_launch();
  __syncthreads();
  grid_dependency_wait();

  const Tile tile(p);
  if (warpgroup == 0) {
    registers_decrease<56>();
    if (warp == 0) {
      if (lane == 0) load_kv_ring(p, shared, tile);
    } else if (warp >= 2) {
      load_queries(p, shared, tile, warp - 2);
    }
  } else {
    registers_increase<224>();
    attend<T>(p, shared, tile, warpgroup - 1);
  }
}

}  // namespace cumla
