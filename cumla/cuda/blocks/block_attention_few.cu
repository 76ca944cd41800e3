// SPDX-License-Identifier: Apache-2.0
// Attention of few query tokens with a list of few blocks each, of 128 columns: that of block_attention.cu where each
// warp has one chunk of a list's tokens or, if it loops, a few.
//
// Keys, values and the query go from memory to the registers of the lanes that multiply them, all at once. Each warp
// reads the list for itself, so nobody waits for another one before the sums.
//
// grid = (CTAs of a cluster x lists), 32 x kWarps threads. Heads are the M side of mma.sync products.
//
// Roles and time line; B is a barrier of the CTA (__syncthreads):
//   warp w      | list; query meanwhile | chunk w of the CTA: load | S = Q K' | softmax | O = P V | leave sums | B |
//               | kLoops: keys of the warp's next chunk are loaded before the softmax, its values after O = P V
//   warp w      | add up the warps, for each kWarps-th head, and send it to the CTA of the cluster that has this head
//   first warps | wait for the sums of all CTAs for the heads of this one | add them up, and store
// The cluster's barrier is between the beginning and the first sums that are sent: the others' memory is there.
//
// barrier   who arrives (count)                   who waits     guards
// full      a thread, with the bytes of all (1)   first warps   the sums that CTAs of the cluster send
//
// Shared memory: 9,472 B for each warp, 8,464 for what CTAs send
// Registers:     128, in a loop 225, over e4m3 121 or, with chunks of 32 tokens, 162
#include "blocks/block_attention/layout.cuh"
#include "blocks/block_attention_few/compute.cuh"
#include "blocks/block_attention_few/finish.cuh"
#include "blocks/block_attention_few/layout.cuh"
#include "blocks/block_attention_few/load.cuh"
#include "blocks/lists.cuh"
#include "split/division.cuh"
#include "ptx/cluster_async.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

using namespace ptx;
using namespace split;

template <typename T, bool kE4m3, int kWarps, int kChunk, bool kLoops>
__device__ __forceinline__ void block_attention_few(const BlockAttentionFewParams& p) {
  using Layout = FewLayout<kE4m3, kWarps, kChunk>;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const Layout shared = {shared_address(shared_bytes)};
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int index = blockIdx.x >> p.cluster_log2, rank = blockIdx.x & (1 << p.cluster_log2) - 1;
  const int token = quotient(index, p.by_kv_heads), head = index - token * p.kv_heads;
  const i64 line = (static_cast<i64>(blockIdx.x) * (32 * kWarps) + threadIdx.x) * 32;  // entries
  if (line < p.table_entries) prefetch_l2(p.block_table + line);
  if (threadIdx.x == 0) {  // the sums of all CTAs for the heads of this one
    mbarrier_init(shared.full(), 1);
    fence_mbarrier_init();
    const int heads = p.heads_per_group - rank + (1 << p.cluster_log2) - 1 >> p.cluster_log2;
    mbarrier_arrive_expect_tx(shared.full(), (heads * (kDecodeColumns * 4 + 16)) << p.cluster_log2);
  }
  __syncwarp();
  cluster_arrive_relaxed();
  grid_dependency_launch();
  grid_dependency_wait();

  FewAttender<T, kE4m3, kLoops, Layout> attender(p, (rank * kWarps + warp) * Layout::kChunk);
  const ShortList list(p, token, head, attender);
  attender.attend(list, (kWarps * Layout::kChunk) << p.cluster_log2);
  attender.leave(shared, warp);
  __syncthreads();
  cluster_wait();  // all CTAs run
  add_warps(p, shared, warp, rank);
  add_ctas<T, kE4m3>(p, shared, token, head, warp, rank, list.of_values);
}

}  // namespace cumla::blocks
