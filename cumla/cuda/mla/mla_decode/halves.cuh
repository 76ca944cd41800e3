// SPDX-License-Identifier: Apache-2.0
// A cluster of two CTAs whose consumers have half of the columns of a row each: partial scores cross the cluster.
#pragma once
#include "mla/mla_decode/compute.cuh"
#include "mla/mla_decode/load.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cluster_arrive.cuh"
#include "ptx/cluster_async.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

// The half of the columns that this CTA has; 0 without a cluster.
template <typename Layout>
__device__ __forceinline__ int half_of() {
  if constexpr (Layout::kExchangeBytes > 0)
    return blockIdx.x;
  else
    return 0;
}

// Has L2 fetch some places of the CTA's part and lines of the block table: threads of warps 2 and 3, as prefetch_plan.
__device__ __forceinline__ void prefetch_places(const MlaDecodeParams& p) {
  constexpr int kLine = 32, kPlaces = 4, kThreads = 64, kShare = 16;
  const int thread = threadIdx.x - 64;
  if (thread < 0 || thread >= kThreads) return;
  if (thread < kShare && (blockIdx.y * kShare + thread) * kPlaces < p.batch)
    prefetch_l2(reinterpret_cast<const TilePlace*>(p.places) + (blockIdx.y * kShare + thread) * kPlaces);
  const int ctas = gridDim.x * gridDim.y * gridDim.z;
  const int first = ((blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x) * kThreads + thread;
#pragma unroll 1
  for (i64 i = first, k = 0; i * kLine < p.page_entries && k < 2; i += ctas * kThreads, ++k)
    prefetch_l2(p.block_table + i * kLine);
}

// Loads the RoPE columns of the query that this CTA has: fragments of 2 x 16 columns.
template <typename T, bool kSharedBlocks, bool kCopied, typename AnyTile>
__device__ __forceinline__ void Consumer<T, kSharedBlocks, kCopied, AnyTile>::hold_rope(const Segment& segment) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool exists = row + 8 * r < tile.rows;
    const Row from(p, tile, exists ? row + 8 * r : 0);
    const char* const rope =
        query_tile<AnyTile::kLatentTiles>(p, AnyTile::kLatentTiles, segment.request, from.token, from.head) +
        blockIdx.x * 64 + lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      this->rope[2 * i + r] = exists ? *reinterpret_cast<const u32*>(rope + i * 16) : 0;
  }
}

// Stores the scores of block t over the columns of this CTA in the other one, once its scores before are read there.
// Only stores follow the wait, so it acquires nothing from the other CTA.
template <typename T, bool kSharedBlocks, bool kCopied, typename AnyTile>
__device__ __forceinline__ void Consumer<T, kSharedBlocks, kCopied, AnyTile>::send_scores(int t) const {
  const u32 other = 1 - blockIdx.x;
  const u32 full = shared_address_in(shared.exchange_full(), other), to = shared_address_in(shared.exchange(0), other);
  if (t > 0) mbarrier_wait(shared.exchange_free(1 - consumer), (t - 1) / 2 & 1, "a free exchange");
  if (warp >= p.row_groups) return;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    store_cluster_async(to + i * (kWarpgroup * 16),
                        {scores[4 * i], scores[4 * i + 1], scores[4 * i + 2], scores[4 * i + 3]}, full);
}

// Adds the scores of block t over the columns of the other CTA. Sums of two numbers have the same bits in both CTAs,
// and so has all that follows from them.
template <typename T, bool kSharedBlocks, bool kCopied, typename AnyTile>
__device__ __forceinline__ void Consumer<T, kSharedBlocks, kCopied, AnyTile>::add_other_half(int t) {
  if (threadIdx.x % kWarpgroup == 0)
    mbarrier_arrive_expect_tx(shared.exchange_full(), p.row_groups * (Layout::kExchangeBytes / 4));
  mbarrier_wait(shared.exchange_full(), t & 1, "the other half's scores");
  if (warp < p.row_groups) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 v = load_shared_float4(shared.exchange(i));
      scores[4 * i] += v.x;
      scores[4 * i + 1] += v.y;
      scores[4 * i + 2] += v.z;
      scores[4 * i + 3] += v.w;
    }
  }
  __syncwarp();
  if (lane == 0) mbarrier_arrive_cluster(shared_address_in(shared.exchange_free(consumer), 1 - blockIdx.x));
}

}  // namespace cumla::mla
