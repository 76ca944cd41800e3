// SPDX-License-Identifier: Apache-2.0
// Attention of query tokens with a list of few blocks each, of up to 128 columns and 16 heads of a kv head. It reads
// the lists itself: no kernel comes before it, and nothing is stored but the result.
//
// A list is that of a query token and kv head: a set of blocks, without those that do not exist or that the query does
// not see. Only the last one can end within the block. A cluster of CTAs has a list, each CTA a range of its tokens.
//
// grid = (CTAs of a cluster x lists), 32 x kWarps threads. Heads are the M side of mma.sync products.
//
// Roles and time line; B is a barrier of the CTA (__syncthreads), C one of the cluster:
//   warp 0      | read the list, order its blocks while their pages are loaded; copy the query | B |
//   warp 1      | barriers | B |
//   warp w      | copy the first three chunks | each kWarps-th chunk of the CTA: S = Q K' | softmax | O += P V |
//               | copy the third chunk after it |
//   all threads | leave sums | B | add up the warps, and store without a cluster | C | add up the CTAs, and store | C
//
// barrier            who arrives (count)           who waits   guards
// full(warp, stage)  a lane of the warp, with      the warp    a chunk is loaded
//                    TMA's bytes (1)
//
// Shared memory: of each warp 3 chunks of 8,192 B, 256 of statistics, 24 of barriers; query 4,096, list 1,024,
//                statistics of all 256, list's sizes 16
// Registers:     164, over e4m3 175, of 255; eight warps per SM
#include "blocks/block_attention/attend.cuh"
#include "blocks/block_attention/finish.cuh"
#include "blocks/block_attention/layout.cuh"
#include "blocks/block_attention/load.cuh"
#include "blocks/lists.cuh"
#include "split/division.cuh"
#include "split/plan.cuh"
#include "ptx/cluster.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

using namespace ptx;
using namespace split;

template <typename T, bool kE4m3, int kWarps, typename Params>
__device__ __forceinline__ void block_attention(const Params& p) {
  using Layout = DecodeLayout<kE4m3, kWarps, kHasFactors<Params>>;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const Layout shared = {shared_address(shared_bytes)};
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int index = quotient(blockIdx.x, p.by_cluster), rank = blockIdx.x - index * p.cluster;
  const int token = quotient(index, p.by_kv_heads), head = index - token * p.kv_heads;
  if (warp == 1) {
    if (lane == 0) prefetch_tensor_map(&p.key_map);
    if (lane == 1) prefetch_tensor_map(&p.value_map);
    const i64 line = (static_cast<i64>(blockIdx.x) * 32 + lane) * 32;  // entries
    if (line < p.table_entries) prefetch_l2(p.block_table + line);
    begin_barriers(shared);
  }
  grid_dependency_launch();
  grid_dependency_wait();
  if (warp == 0) load_list(p, shared, token, head);

  __syncthreads();
  const int tokens = load_shared_u32(shared.known(0));
  attend_to_chunks<T, kE4m3>(p, shared, warp, head, tokens, Chunks(p, tokens, Layout::kChunk, rank));
  __syncthreads();
  const float of_values = load_shared_float(shared.known(2));
  add_warps<T>(p, shared, token, head, of_values, p.cluster > 1);
  if (p.cluster == 1) return;
  cluster_sync();
  add_ctas<T>(p, shared, token, head, rank, of_values);
  cluster_sync_relaxed();  // others have read what is here
}

}  // namespace cumla::blocks
