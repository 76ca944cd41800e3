// SPDX-License-Identifier: Apache-2.0
// Indexer logits over a paged cache for sm_90a, for the last next_n tokens of each request:
//
//   logits[b next_n + i, j] = scale[j] sum_h weights[b next_n + i, h] max(q[b, i, h] . k[j], 0)        j < length of row i
//
// and -inf behind it. Products as in mqa_logits. grid = parts of the schedule (paged_mqa_schedule.cu), 384 threads, one CTA
// a multiprocessor; an item is a request.
//
// Warpgroup 0: warp 0 loads blocks of 64 tokens with their scales into a ring, page by page (TMA and bulk copies), warp 1
// writes -inf, warps 2 and 3 bring queries and weights of the next request. Warpgroups 1 and 2 compute. Where all columns
// of a request fit one product each takes every second block; else each has columns of its own and takes all blocks.
//
// Memory-bound for one or two rows of 64 heads: a block of 8,448 B takes an SM some 440 clocks at its share of the read
// bandwidth. The tensor cores take 128 clocks for 64 columns, and a consumer has two blocks' time to make logits of them.
//
// Shared memory:  head_dim 128: up to 64 columns, ring of 24 blocks 202,752 + 2 queries 16,992; up to 256, 18 blocks 152,064
//                 + 67,776; up to 512, 10 blocks 84,480 + 135,488; and some 500 B
// Registers:      224 of a consumer, of which accumulators 64 or 128, weights 16, 32 or 64; 56 of the others
#include "mqa_logits_compute.cuh"
#include "mqa_logits_layout.cuh"
#include "mqa_logits_load.cuh"
#include "paged_mqa_plan.cuh"
#include "ptx/copy.cuh"
#include "ptx/copy_rows.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"

namespace cumla {

// Strides are bytes.
struct PagedMqaParams {
  TensorMap keys;  // dims (head_dim, page_size, num_pages), box (head_dim, min(page_size, 64), 1), swizzle as wide as a row
  LogitsParams logits;
  ContextLengths lengths;
  const char* q;
  i64 q_stride_request, q_stride_row;
  const char* scales;  // float
  i64 scales_stride;   // of a page
  const int* block_table;
  i64 block_table_stride;
  const Place* bounds;
  int num_pages;
  int page_size;  // a power of two, 16 to 128
};

struct Requests {
  const PagedMqaParams& p;

  __device__ __forceinline__ i64 first_row(int item) const { return static_cast<i64>(item) * p.lengths.next_n; }
  __device__ __forceinline__ int rows_of(int) const { return p.lengths.next_n; }
  __device__ __forceinline__ const char* query(int item, int row) const {
    return p.q + item * p.q_stride_request + row * p.q_stride_row;
  }
  __device__ __forceinline__ Span span(int item, int row) const { return {0, visible_tokens(p.lengths, item, row), 0}; }
  __device__ __forceinline__ Span span_of_row(i64 row) const {
    const int item = static_cast<u32>(row) / static_cast<u32>(p.lengths.next_n);
    return span(item, static_cast<int>(row) - item * p.lengths.next_n);
  }
  __device__ __forceinline__ void blocks_of(int item, int& first, int& blocks) const {
    first = 0;
    blocks = (tokens_of(p.lengths, item) + kBlockTokens - 1) / kBlockTokens;
  }
};

// Where a part begins; the last one ends behind all requests. A plan that was never updated holds anything.
__device__ __forceinline__ Place bound_of(const PagedMqaParams& p, int part) {
  const Place place = p.bounds[part];
  return {min(max(place.item, 0), p.lengths.batch), place.item < p.lengths.batch ? max(place.block, 0) : 0};
}

// One warp: the blocks of all segments, as slots of the ring become free. A block of small pages comes in several boxes.
template <typename Shape>
__device__ __forceinline__ void load_pages(const PagedMqaParams& p, const LogitsLayout<Shape>& shared,
                                           SegmentCursor<Requests> cursor) {
  const int lane = threadIdx.x % 32;
  const int box_tokens = min(p.page_size, kBlockTokens);
  const int box_bytes = box_tokens * Shape::kDim, scale_bytes = box_tokens * 4;
  const int of_block = kBlockTokens / box_tokens;  // boxes
  RingPlace<Shape> place;
  Segment segment;
#pragma unroll 1
  while (cursor.next(segment)) {
    const int* const table =
        reinterpret_cast<const int*>(reinterpret_cast<const char*>(p.block_table) + segment.item * p.block_table_stride);
    const int tokens = tokens_of(p.lengths, segment.item);
    auto page_of = [&](i64 box) {
      const i64 token = box * box_tokens;
      return token < tokens ? min(max(table[token / static_cast<u32>(p.page_size)], 0), p.num_pages - 1) : 0;
    };
    const i64 first_box = static_cast<i64>(segment.first) * of_block;
    int pages = page_of(first_box + lane), ahead = page_of(first_box + 32 + lane);  // a box a lane
#pragma unroll 1
    for (int block = 0; block < segment.blocks; ++block) {
      const int box = block * of_block % 32;
      if (box == 0 && block > 0) {
        pages = ahead;
        ahead = page_of(first_box + block * of_block + 32 + lane);
      }
      const int page = __shfl_sync(0xffffffffu, pages, box + lane % of_block);
      const int token = (segment.first + block) * kBlockTokens;
      const int boxes = min(of_block, (tokens - token + box_tokens - 1) / box_tokens);
      const u32 full = shared.full(place.slot);
      mbarrier_wait(shared.free(place.slot), place.phase ^ 1, "a free slot for tokens");
      if (lane == 0) mbarrier_arrive_expect_tx(full, boxes * (box_bytes + scale_bytes));
      __syncwarp();
      if (lane < boxes) {
        const int in_page = (token + lane * box_tokens) % p.page_size;
        tma_load_3d_async(shared.block(place.slot) + lane * box_bytes, &p.keys, full, 0, in_page, page);
        copy_bulk_async(shared.scales_of(place.slot) + lane * scale_bytes,
                        p.scales + page * p.scales_stride + in_page * 4, scale_bytes, full);
      }
      place.advance(1);
    }
  }
}

template <int kHeads, int kDim, int kTile, int kTiles, int kStages, int kSharedBytes>
__device__ __forceinline__ void paged_mqa_logits(const PagedMqaParams& p) {
  using Shape = LogitsShape<kHeads, kDim, kTile, kTiles, kStages>;
  static_assert(LogitsLayout<Shape>::kBytes == kSharedBytes, "the launcher asks for another layout");
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const LogitsLayout<Shape> shared(shared_address(shared_bytes));
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 32) prefetch_tensor_map(&p.keys);
  if (threadIdx.x == 0) initialise_barriers(shared, 1, p.logits.tiles);
  grid_dependency_launch();
  __syncthreads();
  grid_dependency_wait();

  const Requests work{p};
  const SegmentCursor<Requests> cursor{work, bound_of(p, blockIdx.x), bound_of(p, blockIdx.x + 1)};
  if (warpgroup == 0) {
    registers_decrease<56>();
    if (warp == 0)
      load_pages<Shape>(p, shared, cursor);
    else if (warp >= 2)
      load_queries(p.logits, work, shared, cursor);
    else if (p.logits.clean)
      fill_outside(p.logits, work);
  } else {
    registers_increase<224>();
    LogitsConsumer<Shape>(p.logits, shared, warpgroup - 1).run();
  }
}

}  // namespace cumla
