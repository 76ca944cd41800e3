// SPDX-License-Identifier: Apache-2.0
// Probabilities and running maxima that the consumers of mla_decode pass to each other.
#pragma once
#include "mla/mla_decode/compute.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

// Stores probabilities and running maximum for the other consumer, which may read them once they are published.
template <typename T, bool kSharedBlocks, bool kCopied, typename AnyTile>
__device__ __forceinline__ void Consumer<T, kSharedBlocks, kCopied, AnyTile>::leave(const float (&next)[2]) {
  const int store_row = warp * 16 + lane % 16;
  const u32 address = shared.probabilities + store_row * 128;
#pragma unroll
  for (int k = 0; k < 4; ++k)
    store_matrix_x4(address + (((2 * k + lane / 16) ^ (store_row & 7)) << 4), probabilities[4 * k],
                    probabilities[4 * k + 1], probabilities[4 * k + 2], probabilities[4 * k + 3]);
  if (lane % 4 == 0) {
    store_shared_float(shared.maximum(consumer, row), next[0]);
    store_shared_float(shared.maximum(consumer, row + 8), next[1]);
  }
}
template <typename T, bool kSharedBlocks, bool kCopied, typename AnyTile>
__device__ __forceinline__ void Consumer<T, kSharedBlocks, kCopied, AnyTile>::publish() {
  // Each thread that stored a maximum arrives itself: racecheck does not follow an order through another lane.
  fence_proxy_async_shared();
  __syncwarp();
  if (lane % 4 == 0) mbarrier_arrive(shared.probabilities_full(consumer));
}

// Waits for the other consumer's probabilities of block t, and takes over its running maximum. The barrier also
// orders the block's tiles: the other consumer waited for all of them before.
template <typename T, bool kSharedBlocks, bool kCopied, typename AnyTile>
__device__ __forceinline__ void Consumer<T, kSharedBlocks, kCopied, AnyTile>::adopt(int t) {
  mbarrier_wait(shared.probabilities_full(1 - consumer), (t / 2) & 1, "the other's probabilities");  // plant: adopt
  // The lane that later arrives for this row loads, because racecheck needs that; then it shares with its quad.
  float next[2] = {0.0f, 0.0f};
  if (lane % 4 == 0) {
    next[0] = load_shared_float(shared.maximum(1 - consumer, row));
    next[1] = load_shared_float(shared.maximum(1 - consumer, row + 8));
  }
  next[0] = __shfl_sync(0xffffffffu, next[0], lane & ~3);
  next[1] = __shfl_sync(0xffffffffu, next[1], lane & ~3);
  rescale(next);
}

}  // namespace cumla::mla
