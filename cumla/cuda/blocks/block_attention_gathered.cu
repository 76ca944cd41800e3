// SPDX-License-Identifier: Apache-2.0
// Attention of query tokens with a list of many small blocks each, of up to 256 columns and 16 heads of a kv head. As
// block_attention.cu, whose parts it is made of, but rows are gathered by copies of 16 bytes: a block has too few rows
// for TMA. The whole CTA puts the blocks of a list in order.
//
// grid = (CTAs of a cluster x lists), 128 threads. Heads are the M side of mma.sync products.
//
// Time line; B is a barrier of the CTA (__syncthreads), C one of the cluster:
//   all threads | read the list, and copy the query meanwhile; order the blocks | B |
//   warp w      | every fourth chunk of the CTA: S = Q K' | softmax | O += P V | copy a later chunk to its place |
//   all threads | leave sums | B | add up the warps, and store without a cluster | C | add up the CTAs, and store | C
//
// barrier            who arrives (count)           who waits   guards
// full               nobody                        nobody      nothing: block_attention's loads by TMA are not called
//
// A warp waits for its own copies alone (cp.async.wait_group).
//
// Shared memory: of each warp 2 or 3 chunks of 8,192 to 16,384 B; query 4,096 to 8,192, list 2,048, statistics 1,280.
//                Before the first chunks the bitmap of the list's blocks has their place.
// Registers:     156 to 246, over e4m3 180 to 240, of 255; four or eight warps per SM
#include "blocks/block_attention/compute.cuh"
#include "blocks/block_attention/finish.cuh"
#include "blocks/block_attention_gathered/layout.cuh"
#include "blocks/block_attention_gathered/load.cuh"
#include "blocks/lists.cuh"
#include "split/division.cuh"
#include "split/plan.cuh"
#include "ptx/cluster.cuh"
#include "ptx/copy.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

using namespace ptx;
using namespace split;

template <typename T, bool kE4m3, int kColumns, int kCtas>
__device__ __forceinline__ void block_attention_gathered(const BlockAttentionGatheredParams& p) {
  using Layout = GatherLayout<kE4m3, kColumns, kCtas>;
  constexpr int kWarps = Layout::kWarps, kStages = Layout::kStages;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const Layout shared = {shared_address(shared_bytes)};
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int index = quotient(blockIdx.x, p.by_cluster), rank = blockIdx.x - index * p.cluster;
  const int token = quotient(index, p.by_kv_heads), head = index - token * p.kv_heads;
  // The list and the block table are fetched while the kernel before ends.
  const i64 line = (static_cast<i64>(blockIdx.x) * (32 * kWarps) + threadIdx.x) * 32;  // entries
  if (line < p.table_entries) prefetch_l2(p.block_table + line);
  if (threadIdx.x * 16 < p.topk)
    prefetch_l2(p.entries + token * p.entries_stride_token + head * p.entries_stride_head +
                threadIdx.x * 16 * p.entries_stride_entry);
  grid_dependency_launch();
  grid_dependency_wait();
  auto& scratch = *reinterpret_cast<ListShared*>(shared_bytes);
  int request;
  const int tokens = load_gathered_list(p, shared, scratch, token, head, request);
  const Chunks chunks(p, tokens, Layout::kChunk, rank);
  const float of_values = p.value_scale.of(request, head);
  DecodeAttender<T, kE4m3, Layout> attender(p);
  attender.begin(shared.query(), p.key_scale.of(request, head));
  int stage = 0;
  // The first turns copy alone: one text for all copies, since instructions are cold.
#pragma unroll 1
  for (int chunk = chunks.first + warp - kStages * kWarps; chunk < chunks.end; chunk += kWarps) {
    if (chunk >= chunks.first) {
      copy_async_wait<kStages - 1>();  // the chunk's rows are there
      __syncwarp();
      attender.attend(shared.stage(warp, stage), min(tokens - chunk * Layout::kChunk, Layout::kChunk));
      __syncwarp();
    }
    const int later = chunk + kStages * kWarps;
    if (later < chunks.end) copy_rows_async(p, shared, shared.stage(warp, stage), later, tokens);
    copy_async_commit();
    if (++stage == kStages) stage = 0;
  }
  attender.leave(shared, warp);
  __syncthreads();
  add_warps<T>(p, shared, token, head, of_values, p.cluster > 1);
  if (p.cluster == 1) return;
  cluster_sync();
  add_ctas<T>(p, shared, token, head, rank, of_values);
  cluster_sync_relaxed();  // others have read what is here
}

}  // namespace cumla::blocks
