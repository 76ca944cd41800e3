// SPDX-License-Identifier: Apache-2.0
// Split-KV MLA decode for sm_90a: attention of up to 64 query rows of one kv head over the blocks of one part of the
// schedule (mla_plan.cuh). grid = (row tiles of a kv head, parts, kv heads), 384 threads, one CTA an SM.
//
// Three warpgroups. Warpgroup 0 loads: warp 0 the even KV blocks of this CTA's sequence, warp 1 the odd ones (TMA, one
// thread each), warps 2 and 3 the query rows. Warpgroups 1 and 2 compute: consumer c holds the output columns
// [256 c, 256 c + 256) of all 64 rows and computes the scores of every second block; its probabilities go to the other
// consumer through shared memory, so that both add P V of every block, in the order of the blocks:
//
//   consumer 0:  S0 = Q K0   softmax0  O += P0 V0   S2 = Q K2 | O += P1 V1   softmax2  O += P2 V2 ...
//   consumer 1:              S1 = Q K1 | O += P0 V0  softmax1  O += P1 V1    S3 = Q K3 | O += P2 V2 ...
//
// That is the order where several row tiles read the same blocks: compute-bound, P V of the other's block runs beside
// the softmax. With one row tile, memory-bound, it comes before Q K, so that its stage is free for the next load earlier.
//
// The block counter runs on over the requests of a part: block t belongs to consumer t % 2 and stage t % 2 everywhere.
//
// The running maximum is handed on with the probabilities and only moves when a row grows by more than 2^8 over it, so
// that the 128 accumulators a thread are rarely rescaled.
//
// Shared memory:  query 73,728 + two KV stages of 73,728 + P 8,192 + maxima 512 + sums 1,024 + barriers 224
//                 + pacer 1,024 = 232,160 B of 232,448
// Registers:      consumers 224 (128 output, 32 scores, 16 probabilities), loaders 56; 168 at the start (65,536 / 384 in steps of 8)
// Tensor work:    2,176 clocks a block; loads 73,728 B a block and CTA
#include "mla_decode_compute.cuh"
#include "mla_decode_join.cuh"
#include "mla_decode_load.cuh"
#include "mla_decode_shared.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"

namespace cumla {

// By one thread: with an address of its own in each lane the hardware takes them one by one, and slower.
__device__ __forceinline__ void initialise_barriers(const SharedLayout& shared) {
#pragma unroll
  for (int s = 0; s < kStages; ++s) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) mbarrier_init(shared.full(s, tile), 1);
#pragma unroll
    for (int half = 0; half < 3; ++half) mbarrier_init(shared.free(s, half), 4);
  }
#pragma unroll
  for (int owner = 0; owner < 2; ++owner) mbarrier_init(shared.probabilities_full(owner), kWarpgroup / 4);
  mbarrier_init(shared.query_full(), 2);
  mbarrier_init(shared.query_free(), 8);
  fence_mbarrier_init();
}

// One thread: loads the blocks of one parity into their stage as it becomes free. With kSharedBlocks (compute-bound) it
// also has L2 fetch the block after next, so that a load waits for L2 and not for DRAM; the row tiles share that work.
// With one row tile (memory-bound) that only lengthens the queue of the copy engine.
template <bool kSharedBlocks>
__device__ __forceinline__ void load_kv(const MlaDecodeParams& p, const SharedLayout& shared, const Tile& tile,
                                        const Part& part, int last_place, int parity) {
  BlockCursor<2> now(p, tile, part, last_place, parity);
  BlockCursor<2> ahead = now;
  int next_page = now.valid() ? now.page() : 0;
  if constexpr (kSharedBlocks) ahead.next();
#pragma unroll 1
  while (now.valid()) {
    const int page = next_page;
    const u32 phase = ((now.t + now.i) / 2) & 1;
    const u32 stage = shared.stage(parity);
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
      const int column = tile_in_order(parity, k);
      const int half = column / kHalfTiles;
      if (k == 0 || k == 1 || k == 1 + kHalfTiles)
        mbarrier_wait(shared.free(parity, half), phase ^ 1, "a free KV stage");
      const u32 barrier = shared.full(parity, column);
      mbarrier_arrive_expect_tx(barrier, kTileBytes);
      tma_load_4d_async(stage + column * kTileBytes, &p.kv, barrier, column * 64, 0, blockIdx.z, page);
    }
    if constexpr (kSharedBlocks) {
      if (ahead.valid()) {
        const int page_ahead = ahead.page();
        for (int k = blockIdx.x; k < kTiles; k += gridDim.x)
          tma_prefetch_4d(&p.kv, k * 64, 0, blockIdx.z, page_ahead);
        ahead.next();
      }
    }
    now.next();
    if (now.valid()) next_page = now.page();
  }
}

// kSharedBlocks: several row tiles read the same blocks.
template <typename T, bool kSharedBlocks>
__device__ __forceinline__ void mla_decode(const MlaDecodeParams& p) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const SharedLayout shared(shared_address(shared_bytes));
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  begin_kernel(p, shared);

  const Part part = sane_part(p.parts_in[blockIdx.y], blockIdx.y, p.batch, p.parts);
  const Tile tile(p);
  const int last_place = part.end_block > 0 ? min(part.end_place, p.batch - 1) : part.end_place - 1;

  if (warpgroup == 0) {
    registers_decrease<56>();
    if (warp < 2) {
      if (lane == 0) load_kv<kSharedBlocks>(p, shared, tile, part, last_place, warp);
    } else {
      load_query<kRowTile>(p, shared, tile, part, last_place, warp - 2);
    }
  } else {
    registers_increase<224>();
    Consumer<T, kSharedBlocks> consumer(p, shared, tile, warpgroup - 1);
    int t = 0;
    for (int place = part.place; place <= last_place; ++place) {
      const Segment segment = segment_of(p, tile, part, place);
      consumer.compute(segment, t, (place - part.place) & 1);
      consumer.finish(segment, place < last_place);
      t += segment.blocks;
    }
  }
}

}  // namespace cumla
