// SPDX-License-Identifier: Apache-2.0
// Split-KV MLA decode for sm_90a: attention of up to 64 query rows of one kv head over the blocks of one part of the
// schedule (mla_plan.cuh). grid = (row tiles of a kv head, parts, kv heads), 512 threads, one CTA an SM.
//
// Four warpgroups. Warpgroup 0 loads: warp 0 the KV blocks (TMA, one thread), warps 2 and 3 the query rows. Warpgroup 3
// scores: it holds the query in registers and makes probabilities of each block. Warpgroups 1 and 2 hold 256 columns of
// the output each:
//
//   scores:    S0 = Q K0 | softmax0 | S1 = Q K1 | softmax1 | S2 = Q K2 | softmax2 | S3 ...
//   output x2:                                    O += P0 V0 . . . . . . O += P1 V1 . . . .
//
// That is the order where several row tiles read the same blocks: compute-bound, the tensor cores always have a product.
// With one row tile, memory-bound, P V follows its softmax at once, so that its stage is free for the next load earlier.
// While the output of a request is stored, the next one is scored.
//
// The running maximum only moves when a row grows by more than 2^8 over it, so that the 128 accumulators a thread are
// rarely rescaled.
//
// Shared memory:  three stages of 73,728 (a query passes through one, probabilities take the place of the RoPE tile)
//                 + joining 9,216 + factors 768 + inverses 768 + part 48 + words 16 + barriers 304 = 232,304 B of 232,448
// Registers:      scores 200 (query 144, scores 32), output 144 (128), loaders 24; 128 at the start (65,536 / 512)
// Tensor work:    2,176 clocks a block; loads 73,728 B a block and CTA
#include "mla_decode_load.cuh"
#include "mla_decode_output.cuh"
#include "mla_decode_scores.cuh"
#include "mla_decode_shared.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"

namespace cumla {

// By one thread: with an address of its own in each lane the hardware takes them one by one, and slower.
__device__ __forceinline__ void initialise_barriers(const SharedLayout& shared) {
  constexpr int kRowLanes = kWarpgroup / 4;
#pragma unroll
  for (int i = 0; i < SharedLayout::kHalves; ++i) {
#pragma unroll
    for (int tile = 0; tile < kHalfTiles; ++tile) mbarrier_init(shared.half_full(i, tile), 1);
    mbarrier_init(shared.half_free(i), kRowLanes);
  }
#pragma unroll
  for (int i = 0; i < SharedLayout::kRopes; ++i) {
    mbarrier_init(shared.rope_full(i), 1);
    mbarrier_init(shared.rope_free(i), 2 * kRowLanes);
    mbarrier_init(shared.scored(i), kRowLanes);
  }
  mbarrier_init(shared.query_turn(), 1);
  mbarrier_init(shared.query_free(), kWarpgroup / 32);
  fence_mbarrier_init();
}

// One thread: loads all blocks into the ring as its stages become free, and says when a query may be copied into one. With
// kSharedBlocks (compute-bound) it also has L2 fetch the block after, so that a load waits for L2 and not for DRAM; the row
// tiles share that work.
template <bool kSharedBlocks>
__device__ __forceinline__ void load_kv(const MlaDecodeParams& p, const SharedLayout& shared, const Tile& tile,
                                        const Part& part, int last_request) {
  RingPlace place;
#pragma unroll 1
  for (int request = part.request; request <= last_request; ++request) {
    const Segment segment = segment_of(p, tile, part, request);
    if (segment.blocks == 0) continue;
    const int* const pages = p.block_table + request * p.block_table_stride + segment.begin;
    int next_page = pages[0];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      mbarrier_wait(shared.half_free(place.half(half)), place.half_round(half) ^ 1, "a free slot");
    mbarrier_arrive(shared.query_turn());
    place.pass_query();
#pragma unroll 1
    for (int i = 0; i < segment.blocks; ++i) {
      const int page = next_page;
      if (i + 1 < segment.blocks) next_page = pages[i + 1];
      auto load = [&](u32 destination, u32 barrier, int column) {
        mbarrier_arrive_expect_tx(barrier, kTileBytes);
        tma_load_4d_async(destination, &p.kv, barrier, column * 64, 0, blockIdx.z, page);
      };
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 slot = place.half(half);
        mbarrier_wait(shared.half_free(slot), place.half_round(half) ^ 1, "a free slot");
#pragma unroll
        for (int tile = 0; tile < kHalfTiles; ++tile)
          load(shared.half(slot) + tile * kTileBytes, shared.half_full(slot, tile), half * kHalfTiles + tile);
      }
      mbarrier_wait(shared.rope_free(place.rope), place.rope_round ^ 1, "a free slot");
      load(shared.rope(place.rope), shared.rope_full(place.rope), kRopeTile);
      if (kSharedBlocks && i + 1 < segment.blocks)
        for (int k = blockIdx.x; k < kTiles; k += gridDim.x) tma_prefetch_4d(&p.kv, k * 64, 0, blockIdx.z, next_page);
      place.pass_block();
    }
  }
}

// Two warps: the query rows of each request, the tiles that go to registers where their turn in the ring is.
__device__ __forceinline__ void load_queries(const MlaDecodeParams& p, const SharedLayout& shared, const Tile& tile,
                                             const Part& part, int last_request, int loader) {
  RingPlace place;
  u32 parity = 0;
#pragma unroll 1
  for (int request = part.request; request <= last_request; ++request) {
    const int blocks = segment_of(p, tile, part, request).blocks;
    if (blocks == 0) continue;
    mbarrier_wait(shared.query_free(), parity ^ 1, "a free query buffer");
    mbarrier_wait(shared.query_turn(), parity, "slots for the query");
    parity ^= 1;
    const u32 halves[2] = {shared.half(place.half(0)), shared.half(place.half(1))};
    copy_query<kRowTile>(p, tile, request, loader, [&](int column) {
      return column < kHeldTiles ? halves[column / kHalfTiles] + column % kHalfTiles * kTileBytes
                                 : shared.query_tile(column);
    });
    named_barrier_sync<kQueryBarrier, 64>();
    const int lane = threadIdx.x % 32;
    if (loader == 0 && lane < 2 * kHalfTiles)
      mbarrier_arrive(shared.half_full(place.half(lane / kHalfTiles), lane % kHalfTiles));
    for (int i = 0; i <= blocks; ++i) place.pass_query();
  }
}

// kSharedBlocks: several row tiles read the same blocks.
template <typename T, bool kSharedBlocks>
__device__ __forceinline__ void mla_decode(const MlaDecodeParams& p) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const SharedLayout shared(shared_address(shared_bytes));
  Part& part = *reinterpret_cast<Part*>(shared_bytes + (shared.part - shared.values));
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Fetching into L2 reads nothing: an earlier kernel may still write these lines.
  if (warp == 2 || warp == 3) prefetch_plan(p, threadIdx.x - 64, 64);
  if (threadIdx.x == 32) prefetch_tensor_map(&p.kv);
  if (threadIdx.x == 0) initialise_barriers(shared);
  grid_dependency_launch();
  __syncthreads();
  if (warp == 2 || warp == 3) prefetch_queries(p, threadIdx.x - 64, 64);
  grid_dependency_wait();
  // Kept in shared memory: no role has registers for it.
  if (threadIdx.x == 0) part = sane_part(p.parts_in[blockIdx.y], blockIdx.y, p.batch, p.parts);
  __syncthreads();
  const int last_request = part.end_block > 0 ? min(part.end_request, p.batch - 1) : part.end_request - 1;

  if (warpgroup == 0) {
    registers_decrease<32>();
    const Tile tile(p);
    if (warp == 0) {
      if (lane == 0) load_kv<kSharedBlocks>(p, shared, tile, part, last_request);
    } else if (warp >= 2) {
      load_queries(p, shared, tile, part, last_request, warp - 2);
    }
  } else if (warpgroup == 3) {
    registers_increase<160>();
    const Tile tile(p);
    Scorer<T, kSharedBlocks> scorer(p, shared, tile);
    for (int request = part.request; request <= last_request; ++request) {
      const Segment segment = segment_of(p, tile, part, request);
      if (segment.blocks > 0) scorer.compute(segment);
    }
  } else {
    registers_increase<160>();
    Consumer<T> consumer(p, shared, warpgroup - 1);
    for (int request = part.request; request <= last_request; ++request) {
      consumer.compute(segment_of(p, Tile(p), part, request).blocks);
      const Tile tile(p);
      consumer.finish(tile, segment_of(p, tile, part, request), request < last_request);
    }
  }
}

}  // namespace cumla
