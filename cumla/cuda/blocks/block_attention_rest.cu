// SPDX-License-Identifier: Apache-2.0
// Attention to lists of e4m3 blocks whose row tiles block_tiles.cu has left: as block_attention.cu, whose parts it is
// made of, a list after the other.
//
// grid = thread blocks that the GPU holds at once, 128 threads. CTA i has every gridDim.x-th list from i on.
//
// Time line; B is a barrier of the CTA (__syncthreads):
//   for each list | the time line of block_attention.cu | B |
//
// barrier            who arrives (count)           who waits   guards
// full(warp, stage)  a lane of the warp, with      the warp    a chunk is loaded
//                    TMA's bytes (1)
//
// Shared memory: that of block_attention.cu
// Registers:     200, of 255; two CTAs per SM
#include "blocks/block_attention/attend.cuh"
#include "blocks/block_attention/finish.cuh"
#include "blocks/block_attention/layout.cuh"
#include "blocks/block_attention/load.cuh"
#include "blocks/slots.cuh"
#include "split/division.cuh"
#include "split/plan.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mbarrier_end.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

using namespace ptx;
using namespace split;

constexpr int kRestWarps = 4;

struct BlockAttentionRestParams : BlockAttentionParams {
  const TilePlace* places;  // [max_places]
  const TileCounts* counts;
  const int* left;          // [tiles x kv heads]
  int total_tokens;
  int tile_tokens;
  Divisor by_tile_tokens;
};

using RestLayout = DecodeLayout<true, kRestWarps>;

template <typename T>
__device__ __forceinline__ void attend_to_list(const BlockAttentionRestParams& p, const RestLayout& shared, int token,
                                               int head) {
  constexpr int kWarps = kRestWarps, kStages = RestLayout::kStages;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (warp == 0) load_list(p, shared, token, head);
  if (warp == 1) begin_barriers(shared);
  __syncthreads();
  const int tokens = load_shared_u32(shared.known(0));
  attend_to_chunks<T, true>(p, shared, warp, head, tokens, Chunks(tokens, RestLayout::kChunk));
  __syncthreads();
  add_warps<T>(p, shared, token, head, load_shared_float(shared.known(2)), false);
  fence_proxy_async_shared();  // the next chunks come where the sums are
  __syncthreads();
  if (warp == 1 && lane / kWarps < kStages) mbarrier_invalidate(shared.full(lane % kWarps, lane / kWarps));
}

template <typename T>
__device__ __forceinline__ void block_attention_rest(const BlockAttentionRestParams& p) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const RestLayout shared = {shared_address(shared_bytes)};
  grid_dependency_launch();
  grid_dependency_wait();
  const int lists = static_cast<int>(p.counts->left) * p.tile_tokens;
#pragma unroll 1
  for (int list = blockIdx.x; list < lists; list += gridDim.x) {
    const int at = quotient(list, p.by_tile_tokens), own = list - at * p.tile_tokens;
    const int row = p.left[at], place = quotient(row, p.by_kv_heads);
    // Clamped: a plan that was never updated holds arbitrary bits, which must not lead out of the arrays.
    const int begin = min(max(p.places[place].q_begin, 0), p.total_tokens - 1);
    if (own < min(max(p.places[place].q_len, 1), p.total_tokens - begin))
      attend_to_list<T>(p, shared, begin + own, row - place * p.kv_heads);
  }
}

}  // namespace cumla::blocks
