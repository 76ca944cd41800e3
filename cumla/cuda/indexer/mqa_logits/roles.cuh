// SPDX-License-Identifier: Apache-2.0
// The roles of mqa_logits and paged_mqa_logits, and their registers.
#pragma once
#include "indexer/mqa_logits/compute.cuh"
#include "indexer/mqa_logits/layout.cuh"
#include "indexer/mqa_logits/load.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::indexer {

using namespace ptx;

// Called by all threads, for all segments of the CTA. One warp runs `load_blocks`, which walks over the segments,
// announces them and fills the ring.
template <typename Shape, typename Work, typename LoadBlocks>
__device__ __forceinline__ void do_segments(const LogitsParams& p, const Work& work, const LogitsLayout<Shape>& shared,
                                            const LoadBlocks& load_blocks) {
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  const int warp = threadIdx.x / 32;
  if (warpgroup == 0) {
    registers_decrease<56>();
    if (warp == 0)
      load_blocks();
    else if (warp >= 2)
      load_queries(p, work, shared);
    else if (p.clean)
      fill_outside(p, work);
  } else {
    registers_increase<224>();
    LogitsConsumer<Shape>(p, shared, warpgroup - 1).run();
  }
}

}  // namespace cumla::indexer
