// SPDX-License-Identifier: Apache-2.0
// Attention of query tokens with a list of few blocks each, of up to 128 columns and 16 heads of a kv head. It reads
// the lists itself: no kernel comes before it, and nothing is stored but the result.
//
// A list is that of a query token and kv head: a set of blocks, without those that do not exist or that the query does
// not see. Only the last one can end within the block. A cluster of CTAs has a list, each CTA a range of its tokens.
//
// grid = (CTAs of a cluster x lists), 32 kWarps threads. Heads are the M side of mma.sync products.
//
// Roles and time line; B is a barrier of the CTA (__syncthreads), C one of the cluster:
//   all threads | read the list and the query | B | B: order the blocks | B |
//   warp w      | every kWarps-th chunk of the CTA: copy kStages chunks ahead | S = Q K' | softmax | O += P V |
//   all threads | leave sums | C | add up the sums of all warps of the cluster, and store | C
//
// barrier            who arrives (count)           who waits   guards
// full(warp, stage)  a lane of the warp, with the  the warp    a chunk is loaded
//                    bytes of TMA (1)
//
// Shared memory: kWarps x kStages chunks of 8,192 B, query 4,096, list 1,024, statistics 256 a warp, barriers
// Registers:     128 threads x 2 CTAs, or 256 x 1: up to 255
#include "blocks/block_decode/compute.cuh"
#include "blocks/block_decode/finish.cuh"
#include "blocks/block_decode/layout.cuh"
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

constexpr int kNoBlock = 0x7fffffff;

// Each thread copies 16 bytes of query rows at a time.
template <int kThreads, typename Layout>
__device__ __forceinline__ void copy_query_async(const BlockDecodeParams& p, const Layout& shared, int token,
                                                 int head) {
  constexpr int kOctets = kDecodeColumns / 8;
  const int request = quotient(token, p.by_tokens_apart), own = token - request * p.tokens_apart;
  const char* const from = p.q + request * p.q_stride_batch + own * p.q_stride_token +
                           static_cast<i64>(head) * p.heads_per_group * p.q_stride_head;
#pragma unroll
  for (int i = threadIdx.x; i < kDecodeRows * kOctets; i += kThreads) {
    const int row = i / kOctets, octet = i % kOctets;
    const bool exists = row < p.heads_per_group && octet * 8 < p.key_columns;
    copy_16_async(shared.query(row, octet), exists ? from + row * p.q_stride_head + octet * 16 : p.q, exists);
  }
  copy_async_commit();
}

// Puts the pages of a list in ascending order of its blocks, each once, and returns their tokens.
template <typename Layout>
__device__ __forceinline__ int order_pages(const BlockDecodeParams& p, const Layout& shared, const List& list) {
  const int i = threadIdx.x;
  const bool has_entry = i < min(list.count, kDecodeEntries);
  const Listed own = has_entry ? list.named(p, list.entry_at(p, i)) : Listed{-1, -1};
  if (i < kDecodeEntries) store_shared_u32(shared.block(i), own.block < 0 ? kNoBlock : own.block);
  __syncthreads();
  bool is_first = own.block >= 0;
  const auto for_each = [&](auto do_it) {
#pragma unroll 4
    for (int first = 0; first < p.topk; first += 4) {
      const uint4 v = load_shared_16(shared.block(first));
      do_it(first, v.x);
      do_it(first + 1, v.y);
      do_it(first + 2, v.z);
      do_it(first + 3, v.w);
    }
  };
  if (is_first) for_each([&](int at, u32 block) { is_first &= at >= i || static_cast<int>(block) != own.block; });
  __syncthreads();
  if (own.block >= 0 && !is_first) store_shared_u32(shared.block(i), kNoBlock);
  __syncthreads();
  int lower = 0, found = 0;
  bool has_last = false;
  for_each([&](int, u32 word) {
    const int block = word;
    lower += block < own.block;
    found += block != kNoBlock;
    has_last |= block == list.blocks - 1;
  });
  if (is_first) store_shared_u32(shared.page(lower), list.virtual_page(p, own));
  const int missing = has_last ? p.block_size - (list.seen - (list.blocks - 1) * p.block_size) : 0;
  return found * p.block_size - missing;
}

// Copies a chunk of a warp.
template <typename Layout>
__device__ __forceinline__ void copy_chunk_async(const BlockDecodeParams& p, const Layout& shared, int warp, int stage,
                                                 int chunk) {
  constexpr int kBoxes = Layout::kRow / 128, kColumns = 128 / Layout::kUnit;
  const int token = chunk * Layout::kChunk, block = quotient(token, p.by_block_size);
  const int page = load_shared_u32(shared.page(block)), row = token - block * p.block_size;
  const u32 to = shared.stage(warp, stage), full = shared.full(warp, stage);
  if (elect_one()) {
    mbarrier_arrive_expect_tx(full, Layout::kStageBytes);
#pragma unroll
    for (int i = 0; i < kBoxes; ++i)
      tma_load_4d_async(to + i * Layout::kChunk * 128, &p.key_map, full, i * kColumns, row, 0, page);
#pragma unroll
    for (int i = 0; i < kBoxes; ++i)
      tma_load_4d_async(to + Layout::kKeyBytes + i * Layout::kChunk * 128, &p.value_map, full, i * kColumns, row, 0,
                        page);
  }
  __syncwarp();
}

template <typename T, bool kE4m3, int kWarps, int kStages>
__device__ __forceinline__ void block_decode(const BlockDecodeParams& p) {
  using Layout = DecodeLayout<kE4m3, kWarps, kStages>;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const Layout shared = {shared_address(shared_bytes)};
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int ctas = 1 << p.cluster_log2, index = blockIdx.x >> p.cluster_log2, rank = blockIdx.x & ctas - 1;
  if (lane < kStages) {
    mbarrier_init(shared.full(warp, lane), 1);
    fence_mbarrier_init();
    fence_proxy_async_shared();
  }
  if (threadIdx.x == 0) prefetch_tensor_map(&p.key_map);
  if (threadIdx.x == 32) prefetch_tensor_map(&p.value_map);
  const i64 line = (static_cast<i64>(blockIdx.x) * 32 + lane) * 32;  // entries
  if (warp == 2 && line < p.table_entries) prefetch_l2(p.block_table + line);
  grid_dependency_launch();
  grid_dependency_wait();

  const int token = quotient(index, p.by_kv_heads), head = index - token * p.kv_heads;
  copy_query_async<32 * kWarps>(p, shared, token, head);
  const List list(p, token, head);
  const int tokens = order_pages(p, shared, list);
  const float of_keys = p.key_scale.of(list.request, list.head);
  copy_async_wait<0>();
  __syncthreads();

  const int chunks = (tokens + Layout::kChunk - 1) / Layout::kChunk;
  const int each = (chunks + ctas - 1) >> p.cluster_log2;
  const int end = min((rank + 1) * each, chunks);
  int chunk = rank * each + warp;
#pragma unroll
  for (int s = 0; s < kStages; ++s)
    if (chunk + s * kWarps < end) copy_chunk_async(p, shared, warp, s, chunk + s * kWarps);
  DecodeAttender<T, kE4m3, Layout> attender(p, shared, of_keys);
  int stage = 0;
  u32 phase = 0;
#pragma unroll 1
  for (; chunk < end; chunk += kWarps) {
    mbarrier_wait(shared.full(warp, stage), phase, "a chunk");
    attender.attend(shared.stage(warp, stage), min(tokens - chunk * Layout::kChunk, Layout::kChunk));
    __syncwarp();
    const int later = chunk + kStages * kWarps;
    if (later < end) copy_chunk_async(p, shared, warp, stage, later);
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  attender.leave(shared, warp);
  cluster_sync();
  finish<T, kWarps>(p, shared, list, token, rank);
  cluster_sync();  // others have read what is here
}

}  // namespace cumla::blocks
