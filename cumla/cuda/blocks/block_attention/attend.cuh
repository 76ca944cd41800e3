// SPDX-License-Identifier: Apache-2.0
// What all warps of a CTA of block_attention do with a list that the first one has read, up to their sums.
#pragma once
#include "blocks/block_attention/compute.cuh"
#include "blocks/block_attention/layout.cuh"
#include "blocks/block_attention/load.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

// A warp attends to each kWarps-th of the chunks, and leaves its sums in shared memory.
template <typename T, bool kE4m3, typename Layout, typename Params>
__device__ __forceinline__ void attend_to_chunks(const Params& p, const Layout& shared, int warp, int head, int tokens,
                                                 const Chunks& chunks) {
  constexpr int kWarps = Layout::kWarps, kStages = Layout::kStages;
  copy_first_chunks_async(p, shared, warp, chunks);
  if constexpr (Layout::kFactors)
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      const int chunk = chunks.first + warp + s * kWarps;
      copy_factors_async(p, shared, head, warp, s, chunk, chunk < chunks.end ? tokens : 0);
    }
  DecodeAttender<T, kE4m3, Layout> attender(p);
  attender.begin(shared.query(), load_shared_float(shared.known(1)));
  int stage = 0;
  u32 phase = 0;
#pragma unroll 1
  for (int chunk = chunks.first + warp; chunk < chunks.end; chunk += kWarps) {
    if constexpr (Layout::kFactors) copy_async_wait<kStages - 1>();  // those of the chunk are there
    mbarrier_wait(shared.full(warp, stage), phase, "a chunk");
    if constexpr (Layout::kFactors) {
      __syncwarp();
      attender.factors = shared.key_factors(warp, stage);
    }
    attender.attend(shared.stage(warp, stage), min(tokens - chunk * Layout::kChunk, Layout::kChunk));
    const int later = chunk + kStages * kWarps;
    if (later < chunks.end) fence_proxy_async_shared();  // orders the reads of the chunk before the next copy
    __syncwarp();
    if (later < chunks.end && elect_one()) copy_chunk_async(p, shared, warp, stage, later);
    if constexpr (Layout::kFactors)
      copy_factors_async(p, shared, head, warp, stage, later, later < chunks.end ? tokens : 0);
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  attender.leave(shared, warp);
}

}  // namespace cumla::blocks
