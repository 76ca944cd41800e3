// SPDX-License-Identifier: Apache-2.0
// Indexer logits of new tokens:
//
//   logits[i, j] = k_scale[j] sum_h weights[i, h] max(q[i, h] . k[j], 0)        ks[i] <= j < ke[i], else -inf
//
// grid = one CTA per SM, 384 threads. Tokens are the M side of the products. An item is 512 columns, (query, head)
// pairs. Each CTA finds its share of all items itself; docs/kernels/indexer.md explains shares, and spans that change
// meanwhile.
//
// Roles and time line:
//   warp 0         announces each segment, then loads its blocks into a ring: keys by TMA, scales by cp.async
//   warp 1         writes -inf where nothing is visible
//   warp 2, 3      load the queries and weights of the next segment, and where its logits go
//   consumer 0 | A0 = K0 Qa | B0 = K0 Qb       | A1 = K1 Qa       | B1 = K1 Qb       |     columns   0-255
//              |            | logits of A0     | logits of B0     | logits of A1     |
//   consumer 1 | the same with columns 256-511
//
// barrier                who arrives (count)                 who waits              guards
// full(slot), 10         TMA, and the lanes of warp 0 with   the block's consumers  keys and scales are loaded
//                        their copies (33); paged: a lane
//                        per box of the block (1 to 4)
// free(slot), 10         a lane per warp of each consumer    warp 0                 the slot may be overwritten
//                        of the block (4 or 8)
// query_full(buffer), 2  the threads of warps 2 and 3 (64)   both consumers         queries, weights, targets of a
//                                                                                   segment
// query_free(buffer), 2  all threads of both consumers       warps 2 and 3          these may be overwritten
//                        (256)
// announced(n), 11       lane 0 of warp 0 (1)                warps 2 and 3          announcement n; the last has no
//                                                                                   blocks
//
// Shared memory:  ring of 10 blocks 84,480 + 2 items 135,488 (64 heads, head_dim 128) + scratch 128 + announcements 176
//                 + barriers 280 = 220,520 B
// Registers:      consumers 224 (accumulators 128, weights 64), others 56
#include "indexer/mqa_logits/layout.cuh"
#include "indexer/mqa_logits/load.cuh"
#include "indexer/mqa_logits/roles.cuh"
#include "split/scan.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

namespace cumla::indexer {

using namespace ptx;
using namespace split;

// Strides are in bytes.
struct MqaLogitsParams {
  TensorMap keys;  // dims (head_dim, seq_len_kv), box (head_dim, 64), swizzle of the width of a row
  LogitsParams logits;
  const char* q;
  i64 q_stride_row;
  const char* k_scale;  // float
  i64 k_scale_stride;
  const char *ks, *ke;  // int
  i64 ks_stride, ke_stride;
  int seq_len;
  int seq_len_kv;
  int compressed;
  int unused;
};

template <typename Shape>
struct QueryTiles {
  static constexpr int kRows = Shape::kRows;  // query rows of an item

  const MqaLogitsParams& p;

  __device__ __forceinline__ int items() const { return (p.seq_len + kRows - 1) / kRows; }
  __device__ __forceinline__ i64 first_row(int item) const { return static_cast<i64>(item) * kRows; }
  __device__ __forceinline__ int rows_of(int item) const { return min(kRows, p.seq_len - item * kRows); }
  __device__ __forceinline__ const char* query(int item) const { return p.q + first_row(item) * p.q_stride_row; }
  __device__ __forceinline__ i64 query_stride_row() const { return p.q_stride_row; }
  __device__ __forceinline__ Span span(int item, int row) const { return span_of_row(first_row(item) + row); }

  __device__ __forceinline__ Span span_of_row(i64 row) const {
    Span span;
    span.begin = min(max(*reinterpret_cast<const int*>(p.ks + row * p.ks_stride), 0), p.seq_len_kv);
    span.end = min(max(*reinterpret_cast<const int*>(p.ke + row * p.ke_stride), span.begin), p.seq_len_kv);
    span.shift = 0;
    if (p.compressed) {
      span.shift = span.begin;
      span.end = min(static_cast<i64>(span.end), span.begin + p.logits.width);
    }
    return span;
  }

  // The range of blocks from the first to the last that some row of the item sees.
  __device__ __forceinline__ void blocks_of(int item, int& first, int& blocks) const {
    int begin = kMaxTokens, end = 0;
    const int rows = rows_of(item);
#pragma unroll 8
    for (int row = 0; row < rows; ++row) {
      const Span span = this->span(item, row);
      if (span.begin < span.end) {
        begin = min(begin, span.begin);
        end = max(end, span.end);
      }
    }
    first = begin / kBlockTokens;
    blocks = end == 0 ? 0 : blocks_before(end) - first;
  }
};

// Cost of a change of items, in blocks: two warps load its queries, and no product runs meanwhile.
constexpr int kItemCost = 5;

struct ShareScratch {
  i64 warp_costs[kLogitsThreads / 32];
  Place places[2];
};

// This CTA's share, if shares cost the same. Called by all threads; each counts the blocks of consecutive items.
template <typename Work>
__device__ __forceinline__ SegmentCursor<Work> take_share(const Work& work, ShareScratch& scratch) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int items = work.items();
  const int per_thread = (items + kLogitsThreads - 1) / kLogitsThreads;
  const int first_item = min(static_cast<i64>(thread) * per_thread, static_cast<i64>(items));
  const int last_item = min(first_item + per_thread, items);
  i64 cost = 0;
  int first, blocks;
#pragma unroll 1
  for (int item = first_item; item < last_item; ++item) {
    work.blocks_of(item, first, blocks);
    cost += blocks + kItemCost;
  }
  const i64 inclusive = warp_inclusive_sum(cost);
  if (lane == 31) scratch.warp_costs[warp] = inclusive;
  if (thread < 2) scratch.places[thread] = {items, 0};
  __syncthreads();
  i64 total = 0, before = inclusive - cost;
#pragma unroll
  for (int w = 0; w < kLogitsThreads / 32; ++w) {
    if (w < warp) before += scratch.warp_costs[w];
    total += scratch.warp_costs[w];
  }
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    i64 target = total * (blockIdx.x + i) / gridDim.x - before;
    if (target < 0 || target >= cost) continue;
    // Lengths are read again. If they have changed meanwhile, the search must end with this thread's items.
    int item = first_item;
    for (work.blocks_of(item, first, blocks); target >= blocks + kItemCost && item + 1 < last_item;
         work.blocks_of(++item, first, blocks))
      target -= blocks + kItemCost;
    scratch.places[i] = {item, static_cast<int>(min(target, static_cast<i64>(blocks)))};
  }
  __syncthreads();
  return {work, scratch.places[0], scratch.places[1]};
}

// All threads prefetch the spans of the rows into L2, before the wait for earlier kernels; of very many rows the
// first ones.
__device__ __forceinline__ void prefetch_spans(const MqaLogitsParams& p) {
  const i64 at = static_cast<i64>(threadIdx.x) * 128;
  if (at < (p.seq_len - 1) * p.ks_stride + 4) prefetch_l2(p.ks + at);
  if (at < (p.seq_len - 1) * p.ke_stride + 4) prefetch_l2(p.ke + at);
}

// One warp loads the blocks of all segments as slots of the ring become free.
template <typename Shape>
__device__ __forceinline__ void load_tokens(const MqaLogitsParams& p, const LogitsLayout<Shape>& shared,
                                            SegmentCursor<QueryTiles<Shape>> cursor) {
  const int lane = threadIdx.x % 32;
  RingPlace<Shape::kStages> place;
  Segment segment;
#pragma unroll 1
  for (u32 n = 0; announce_next(shared, cursor, n, segment); ++n) {
#pragma unroll 1
    for (int block = segment.first; block < segment.first + segment.blocks; ++block) {
      const u32 full = shared.full(place.slot);
      mbarrier_wait(shared.free(place.slot), place.phase ^ 1, "a free slot for tokens");
      if (lane == 0) {
        mbarrier_arrive_expect_tx(full, LogitsLayout<Shape>::kBlockBytes);
        tma_load_2d_async(shared.block(place.slot), &p.keys, full, 0, block * kBlockTokens);
      }
#pragma unroll
      for (int i = lane; i < kBlockTokens; i += 32) {
        const int token = block * kBlockTokens + i;
        const bool valid = token < p.seq_len_kv;
        copy_4_async(shared.scales_of(place.slot) + i * 4, p.k_scale + (valid ? token * p.k_scale_stride : 0), valid);
      }
      mbarrier_arrive_after_copies(full);
      place.advance(1);
    }
  }
}

template <int kHeads, int kDim, int kStages, int kSharedBytes>
__device__ __forceinline__ void mqa_logits(const MqaLogitsParams& p) {
  using Shape = LogitsShape<kHeads, kDim, 128, 4, kStages>;
  static_assert(LogitsLayout<Shape>::kBytes == kSharedBytes, "the launcher asks for another layout");
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const LogitsLayout<Shape> shared(shared_address(shared_bytes));
  if (threadIdx.x == 32) prefetch_tensor_map(&p.keys);
  initialise_barriers(shared, 1 + 32);
  prefetch_spans(p);
  grid_dependency_launch();
  grid_dependency_wait();

  const QueryTiles<Shape> work{p};
  ShareScratch& scratch = *reinterpret_cast<ShareScratch*>(shared_bytes + shared.kScratchOffset);
  const SegmentCursor<QueryTiles<Shape>> cursor = take_share(work, scratch);  // synchronises the CTA
  do_segments(p.logits, work, shared, [&] { load_tokens(p, shared, cursor); });
}

}  // namespace cumla::indexer
