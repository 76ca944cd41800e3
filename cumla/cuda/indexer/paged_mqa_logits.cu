// SPDX-License-Identifier: Apache-2.0
// Indexer logits over a paged cache, for the last q_len tokens of each request:
//
//   logits[b q_len + i, j] = scale[j] sum_h weights[b q_len + i, h] max(q[b, i, h] . k[j], 0)    j < length of row i
//
// and -inf after that. grid = parts of the schedule (indexer/paged_mqa_schedule.cu), 384 threads, one CTA per SM. An
// item is a request.
//
// Roles and time line are those of indexer/mqa_logits.cu, except that warp 0 loads boxes of pages, with scales by
// bulk copies. With one tile of columns each consumer takes every second block. The barrier table of mqa_logits.cu
// holds, with 12 slots or 10.
//
// Shared memory:  head_dim 128: up to 64 columns, ring of 12 blocks 101,376 + 2 queries 16,992; up to 128, 12 blocks
//                 + 33,920; up to 256, 12 blocks + 67,776; up to 512, 10 blocks 84,480 + 135,488; and some 400 B
// Registers:      consumers 224 (accumulators 64 or 128, weights 16, 32 or 64), others 56
#include "indexer/mqa_logits/layout.cuh"
#include "indexer/mqa_logits/load.cuh"
#include "indexer/mqa_logits/roles.cuh"
#include "indexer/paged_mqa_plan.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

namespace cumla::indexer {

using namespace ptx;

// Strides are in bytes.
struct PagedMqaParams {
  // Dims (head_dim, page_size, num_pages), box (head_dim, min(page_size, 64), 1), swizzle of the width of a row.
  TensorMap keys;
  LogitsParams logits;
  KvLens kv_lens;
  const char* q;
  i64 q_stride_request, q_stride_row;
  const char* scales;  // float
  i64 scales_stride;   // of a page
  const char* block_table;  // int
  i64 block_table_stride;
  const Place* bounds;
  int num_pages;
  int log2_of_page;  // tokens: 16 to 128
};

// Keys of 64 bytes in place of those that the tensor map has: e2m1 numbers, of two in a byte the first in the low half.
// The four bytes of a token's scale are the exponents of powers of two, one per 32 columns.
struct PagedMqaMxfp4Params : PagedMqaParams {
  const char* values;
  i64 values_stride;  // of a page
};

struct Requests {
  const PagedMqaParams& p;
  mutable int tokens = 0;  // of the last request given to blocks_of: the loading warp reads a length once

  __device__ __forceinline__ i64 first_row(int item) const { return static_cast<i64>(item) * p.kv_lens.q_len; }
  __device__ __forceinline__ int rows_of(int) const { return p.kv_lens.q_len; }
  __device__ __forceinline__ const char* query(int item) const { return p.q + item * p.q_stride_request; }
  __device__ __forceinline__ i64 query_stride_row() const { return p.q_stride_row; }
  __device__ __forceinline__ Span span(int item, int row) const { return {0, visible_tokens(p.kv_lens, item, row), 0}; }
  __device__ __forceinline__ Span span_of_row(i64 row) const {
    const int item = static_cast<u32>(row) / static_cast<u32>(p.kv_lens.q_len);
    return span(item, static_cast<int>(row) - item * p.kv_lens.q_len);
  }
  __device__ __forceinline__ void blocks_of(int item, int& first, int& blocks) const {
    first = 0;
    tokens = tokens_of(p.kv_lens, item);
    blocks = (tokens + kBlockTokens - 1) / kBlockTokens;
  }
};

// The beginning of a part; the last one ends after all requests. A plan that was never updated holds arbitrary bits.
__device__ __forceinline__ Place bound_of(const PagedMqaParams& p, int part) {
  const Place place = p.bounds[part];
  return {min(max(place.item, 0), p.kv_lens.batch), place.item < p.kv_lens.batch ? max(place.block, 0) : 0};
}

// All threads prefetch this CTA's bounds and the lengths into L2, before the wait for earlier kernels.
__device__ __forceinline__ void prefetch_kv_lens(const PagedMqaParams& p) {
  const i64 at = static_cast<i64>(threadIdx.x) * 128;
  if (at < (p.kv_lens.batch - 1) * p.kv_lens.stride_request + 4) prefetch_l2(p.kv_lens.data + at);
  if (threadIdx.x == kLogitsThreads - 1) prefetch_l2(p.bounds + blockIdx.x);
}

// The query warps prefetch query and weights of the first request into L2, while the loading warp waits for its
// length. If the length is 0, the prefetch was for nothing.
__device__ __forceinline__ void prefetch_query(const PagedMqaParams& p, int item) {
  const int head = static_cast<int>(threadIdx.x) - 64;
  if (item >= p.kv_lens.batch || head < 0 || head >= p.logits.num_heads) return;
  const Requests work{p};
#pragma unroll 1
  for (int row = 0; row < p.kv_lens.q_len; ++row) {
    prefetch_l2(work.query(item) + row * p.q_stride_row + head * p.logits.q_stride_head);
    prefetch_l2(p.logits.weights + (work.first_row(item) + row) * p.logits.weights_stride_row +
                head * p.logits.weights_stride_head);
  }
}

// One warp loads the blocks of all segments as slots of the ring become free. A block of small pages has several
// boxes. A lane has every 32nd box, and four lanes at a time load theirs. Hazard: this loop must not divide, because
// one warp must issue blocks much faster than they arrive.
template <typename Shape>
__device__ __forceinline__ void load_pages(const PagedMqaParams& p, const LogitsLayout<Shape>& shared,
                                           SegmentCursor<Requests> cursor) {
  const int lane = threadIdx.x % 32;
  const int log2_of_box = p.log2_of_page < 6 ? p.log2_of_page : 6;  // tokens
  const int log2_of_boxes = 6 - log2_of_box;                        // of the boxes in a block
  constexpr int kRowBytes = Shape::kMxfp4 ? Shape::kDim / 2 : Shape::kDim;
  const u32 box_bytes = kRowBytes << log2_of_box, scale_bytes = 4u << log2_of_box;
  auto entry_of = [&](int item, u32 token) {  // of the block table; clamped, so that it exists
    const char* const row = p.block_table + min(item, p.kv_lens.batch - 1) * p.block_table_stride;
    return reinterpret_cast<const int*>(row)[min(token, static_cast<u32>(p.kv_lens.most_tokens - 1)) >> p.log2_of_page];
  };
  // Tokens are read once, except in pages that requests share. As ordinary lines they would evict logits from L2, and
  // DRAM would alternate between reading and writing.
  const u64 policy = evict_first_policy();
  u32 loaded = 0;  // blocks of earlier segments
  Segment segment;
#pragma unroll 1
  for (u32 n = 0;; ++n) {
    const Place expected = cursor.at;
    const u32 own = lane << log2_of_box;  // this lane's first token, counted from the segment's first one
    // Loaded together with the length.
    int entry = entry_of(expected.item, static_cast<u32>(expected.block) * kBlockTokens + own);
    if (!announce_next(shared, cursor, n, segment)) return;
    const u32 first_token = segment.first * kBlockTokens;
    if (segment.item != expected.item) entry = entry_of(segment.item, first_token + own);
    const u32 tokens = cursor.work.tokens;
    const int boxes = segment.blocks << log2_of_boxes;
#pragma unroll 1
    for (int begin = 0; begin < boxes; begin += 32) {
      const int page = min(max(entry, 0), p.num_pages - 1);
      const int box = begin + lane;
      const u32 token = first_token + (static_cast<u32>(box) << log2_of_box);
      if (begin + 32 < boxes) entry = entry_of(segment.item, token + (32u << log2_of_box));
      const u32 block = loaded + (box >> log2_of_boxes), slot = block % Shape::kStages;
      const u32 free_phase = block / Shape::kStages % 2 ^ 1;
      const u32 in_block = box & ((1 << log2_of_boxes) - 1), in_page = token & ((1 << p.log2_of_page) - 1);
      const char* const scales = p.scales + page * p.scales_stride + in_page * 4;
#pragma unroll 1
      for (int four = 0; four < 32 && begin + four < boxes; four += 4) {
        if (lane / 4 * 4 == four && box < boxes) {  // plant: loaders
          const u32 full = shared.full(slot);
          mbarrier_wait(shared.free(slot), free_phase, "a free slot for tokens");
          fence_proxy_async_shared();  // orders the generic reads of the earlier scales before the copies
          mbarrier_arrive_expect_tx(full, token < tokens ? box_bytes + scale_bytes : 0);
          if (token < tokens) {
            if constexpr (Shape::kMxfp4) {
              const auto& of = static_cast<const PagedMqaMxfp4Params&>(p);
              const char* const rows = of.values + page * of.values_stride + in_page * kRowBytes;
              copy_bulk_async(shared.block(slot) + in_block * box_bytes, rows, box_bytes, full, policy);
            } else {
              tma_load_3d_async(shared.block(slot) + in_block * box_bytes, &p.keys, full, 0, in_page, page, policy);
            }
            copy_bulk_async(shared.scales_of(slot) + in_block * scale_bytes, scales, scale_bytes, full, policy);
          }
        }
        __syncwarp();
      }
    }
    loaded += segment.blocks;
  }
}

// kMxfp4: p is PagedMqaMxfp4Params.
template <int kHeads, int kDim, int kTile, int kTiles, int kStages, int kSharedBytes, bool kMxfp4 = false>
__device__ __forceinline__ void paged_mqa_logits(const PagedMqaParams& p) {
  using Shape = LogitsShape<kHeads, kDim, kTile, kTiles, kStages, kMxfp4>;
  static_assert(LogitsLayout<Shape>::kBytes == kSharedBytes, "the launcher asks for another layout");
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const LogitsLayout<Shape> shared(shared_address(shared_bytes));
  if (!kMxfp4 && threadIdx.x == 32) prefetch_tensor_map(&p.keys);
  initialise_barriers(shared, 1 << max(6 - p.log2_of_page, 0));
  prefetch_kv_lens(p);
  grid_dependency_launch();
  grid_dependency_wait();

  const Requests work{p};
  const SegmentCursor<Requests> cursor{work, bound_of(p, blockIdx.x), bound_of(p, blockIdx.x + 1)};
  __syncthreads();  // barriers are initialised while the bounds are loaded
  prefetch_query(p, cursor.at.item);
  do_segments(p.logits, work, shared, [&] { load_pages(p, shared, cursor); });
}

}  // namespace cumla::indexer
