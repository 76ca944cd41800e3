// SPDX-License-Identifier: Apache-2.0
// Scores of blocks, as block_scores.cu, for requests of up to 8 query rows (query tokens x heads): decoding.
//
// The visible blocks of all requests are one sequence. Each warp has a share of it, equal but for a block, and a ring
// of shared memory that bulk copies fill with keys; no warp waits for another. Lengths say where a share lies, so no
// kernel comes before this one. If all blocks, visible or not, are no more than the warps, each warp has one of them.
// A lane has 16 bytes of a row for each 64, as in block_scores.cu, of keys and queries.
//
// grid = as many CTAs as multiprocessors, of kWarps warps.
//
// Roles and time line of a warp:
//   add up blocks of all requests, find the share | page numbers | copy the first stages | query rows to registers |
//   store -inf for blocks that nobody sees
//   for each stage: wait for it | products, maxima | copy the stage after the ring | maxima over lanes, store
//
// barrier            who arrives (count)                     who waits   guards
// full(warp, stage)  lane 0 of the warp, with the bytes (1)  the warp    keys of a stage are loaded
//
// Shared memory: a ring of kStages stages of kKeys rows for each warp, 128 KB; 24 bytes for each stage
// Registers:     110, of e4m3 102
#include "blocks/block_scores_few/layout.cuh"
#include "blocks/block_scores_few/score.cuh"
#include "blocks/block_scores_few/share.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

using namespace ptx;

// Stores -inf for blocks that no query row sees, 32 at a time.
template <int kWarps>
__device__ __forceinline__ void store_unseen(const BlockScoresFewParams& p, int warp) {
  const int steps = p.batch * p.steps, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int i = blockIdx.x * kWarps + warp; i < steps; i += gridDim.x * kWarps) {
    const int request = quotient(i, p.by_steps), block = (i - request * p.steps) * 32 + lane;
    if (block >= p.width || block < blocks_of(p, tokens_of(p, request))) continue;
    float* const out = p.out + request * p.out_stride_request + block;
#pragma unroll 1
    for (int row = 0; row < p.rows; ++row) out[offset_of_row(p, row)] = -kInfinity;
  }
}

template <typename T, bool kE4m3, int kWarps, int kKeys, int kStages>
__device__ __forceinline__ void block_scores_few(const BlockScoresFewParams& p) {
  using Layout = ScoresFewLayout<kE4m3, kWarps, kKeys, kStages>;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const Layout shared = {shared_address(shared_bytes), warp};
  const i64 line = (static_cast<i64>(blockIdx.x) * (kWarps * 32) + threadIdx.x) * 32;  // entries
  if (line < p.table_entries) prefetch_l2(p.block_table + line);
  grid_dependency_launch();
  grid_dependency_wait();
  Loader<Layout> loader(p, shared);
  if (lane == 0) {
    for (int stage = 0; stage < kStages; ++stage) mbarrier_init(shared.full(stage), 1);
    fence_mbarrier_init();
  }
  __syncwarp();
  loader.begin(gridDim.x * kWarps);
#pragma unroll 1
  for (int stage = 0; stage < kStages; ++stage) loader.copy(stage);
  FewScorer<T, Layout> scorer(p, shared);
  if (loader.copies > 0) scorer.begin(0);
  store_unseen<kWarps>(p, warp);
  int stage = 0;
  u32 phase = 0;
#pragma unroll 1
  for (int i = 0; i < loader.copies; ++i) {
    mbarrier_wait(shared.full(stage), phase, "keys");
    scorer.score(stage);
    if (loader.left > 0) fence_proxy_async_shared();  // orders the reads of the keys before the next copy
    __syncwarp();
    loader.copy(stage);
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
    scorer.end();
    if (i + 1 < loader.copies) scorer.begin(stage);
  }
}

}  // namespace cumla::blocks
