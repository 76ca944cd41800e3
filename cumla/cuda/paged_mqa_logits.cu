// SPDX-License-Identifier: Apache-2.0
// Indexer logits over a paged cache for sm_90a, for the last next_n tokens of each request:
//
//   logits[b next_n + i, j] = scale[j] sum_h weights[b next_n + i, h] max(q[b, i, h] . k[j], 0)        j < length of row i
//
// and -inf behind it. Products as in mqa_logits. grid = parts of the schedule (paged_mqa_schedule.cu), one CTA a
// multiprocessor, of 512 threads, or of 384 for more than 128 columns; an item is a request.
//
// Warpgroup 0: warp 0 decides what the CTA does next, announces it and loads blocks of 64 tokens with their scales into a
// ring, page by page (TMA and bulk copies), warp 1 writes -inf, warps 2 and 3 bring queries and weights of the next
// announced segment. The others compute: three for up to 128 columns, else two. Where all columns of a request fit one
// product they take turns at blocks; else each of the two has 256 columns of its own and takes all blocks.
//
// Memory-bound for one or two rows of 64 heads: a block of 8,448 B takes an SM some 430 clocks at its share of the read
// bandwidth. The tensor cores take 128 or 256 clocks for 64 or 128 columns, a scheduler issues 134 or 199 instructions for
// it (of these 64 or 128 maxima and FMAs; counted in the machine code), and a consumer has three blocks' time for its chain
// of waiting, multiplying, summing and storing. 256 columns: 512 tensor clocks, 335 issue slots. The loading warp has 430
// clocks, too: it issues some 30 instructions a block.
//
// Shared memory:  head_dim 128: up to 64 columns, ring of 24 blocks 202,752 + 2 queries 16,960; up to 128, 21 blocks 177,408
//                 + 33,888; up to 256, 18 blocks 152,064 + 67,744; up to 512, 10 blocks 84,480 + 135,456; and some 1 KB
// Registers:      152 of a consumer, of which accumulators 32 or 64, weights 16 or 32; for more than 128 columns 224, of
//                 which 128 and 64; 56 of the others
#include "mqa_logits_layout.cuh"
#include "mqa_logits_load.cuh"
#include "mqa_logits_roles.cuh"
#include "paged_mqa_plan.cuh"
#include "ptx/copy.cuh"
#include "ptx/copy_rows.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/ticket.cuh"

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
  const char* block_table;  // int
  i64 block_table_stride;
  Place* bounds;  // the plan
  int num_pages;
  int log2_of_page;  // tokens: 16 to 128
};

struct Requests {
  const PagedMqaParams& p;

  __device__ __forceinline__ i64 first_row(int item) const { return static_cast<i64>(item) * p.lengths.next_n; }
  __device__ __forceinline__ int rows_of(int) const { return p.lengths.next_n; }
  __device__ __forceinline__ const char* query(int item) const { return p.q + item * p.q_stride_request; }
  __device__ __forceinline__ i64 query_stride_row() const { return p.q_stride_row; }
  __device__ __forceinline__ Span span(int item, int row) const { return {0, visible_tokens(p.lengths, item, row), 0}; }
  __device__ __forceinline__ Span span_of_row(i64 row) const {
    const int item = static_cast<u32>(row) / static_cast<u32>(p.lengths.next_n);
    return span(item, static_cast<int>(row) - item * p.lengths.next_n);
  }
};

// What is between two places, as far as `budget` goes.
struct Stretch {
  Place at, end;
  u32 budget;

  // Leave out what costs so much.
  __device__ __forceinline__ void skip(const ContextLengths& lengths, u32 cost) {
#pragma unroll 1
    for (; at.item < end.item; at = {at.item + 1, 0}) {
      const u32 left = max(cost_of(lengths, at.item) - at.block, 0);
      if (cost < left) break;
      cost -= left;
    }
    at.block = min(static_cast<u32>(at.block) + cost, static_cast<u32>(kMostTokens));
  }

  // False at the end; empty segments are left out.
  __device__ __forceinline__ bool next(const ContextLengths& lengths, Segment& segment) {
#pragma unroll 1
    while (budget > 0 && (at.item < end.item || (at.item == end.item && at.block < end.block))) {
      int last = blocks_of(lengths, at.item);
      if (at.item == end.item) last = min(last, end.block);
      const u32 blocks = min(static_cast<u32>(max(last - at.block, 0)), budget);
      segment = {at.item, at.block, static_cast<int>(blocks)};
      budget -= blocks;
      if (budget > 0 && at.block <= last) --budget;  // behind the last block, a request's query
      at = {at.item + 1, 0};
      if (blocks > 0) return true;
    }
    return false;
  }
};

// Multiprocessors do not get equal parts of the bandwidth: of equal parts of the work the last is done 10 % behind the mean.
// So CTA i has the most of part i, and the rest goes to whoever comes first, in rounds: in each a piece of every part, half
// of what is left, until that is little. Whose logits these become does not change them.
struct Handout {
  static constexpr u32 kLeastCost = 48;  // of a part; below, the ring holds most of it anyway

  const PagedMqaParams& p;
  u32 parts, cost, rest, rounds;

  __device__ __forceinline__ Handout(const PagedMqaParams& p, bool hands_out) : p(p), parts(gridDim.x) {
    cost = max(p.bounds[parts].block, 0);
    rest = cost / 6;
    rounds = hands_out && cost >= kLeastCost ? 30 - __clz(rest) : 0;  // the last pieces cost 4 to 7
  }

  __device__ __forceinline__ u32 begin_of(u32 round) const { return cost - (rest >> round); }

  // A plan that was never updated holds anything.
  __device__ __forceinline__ Stretch part(u32 i) const {
    Place at = {0, 0}, end = {p.lengths.batch, 0};
    if (i > 0) at = valid(p.bounds[i]);
    if (i + 1 < parts) end = valid(p.bounds[i + 1]);
    return {at, end, 0xffffffffu};
  }
  __device__ __forceinline__ Place valid(Place place) const {
    return {min(max(place.item, 0), p.lengths.batch), place.item < p.lengths.batch ? max(place.block, 0) : 0};
  }

  __device__ __forceinline__ Stretch own() const {
    Stretch stretch = part(blockIdx.x);
    if (rounds > 0) stretch.budget = begin_of(0);
    return stretch;
  }

  // One warp: the next piece; false if there are no more, which each CTA has to find out once: the last one to do so draws
  // the last ticket, behind which they begin again for the next run.
  __device__ __forceinline__ bool draw(Stretch& stretch) const {
    if (rounds == 0) return false;
    u32 ticket = 0;
    if (threadIdx.x % 32 == 0) ticket = draw_ticket(p.bounds, rounds * parts + parts - 1);
    ticket = __shfl_sync(0xffffffffu, ticket, 0);
    if (ticket >= rounds * parts) return false;
    const u32 round = ticket / parts;
    stretch = part(ticket - round * parts);
    stretch.skip(p.lengths, begin_of(round));
    if (round + 1 < rounds) stretch.budget = begin_of(round + 1) - begin_of(round);
    return true;
  }
};

// All threads, before the kernels before are done: where this CTA begins, how long requests are, where their pages lie, into
// L2. Of very many requests the first.
__device__ __forceinline__ void prefetch_plan(const PagedMqaParams& p) {
  const i64 at = static_cast<i64>(threadIdx.x) * 128, of_all = at + static_cast<i64>(blockIdx.x) * kWarpgroup * 128;
  if (at < (p.lengths.batch - 1) * p.lengths.stride_request + 4) prefetch_l2(p.lengths.data + at);
  const i64 row_bytes = ((p.lengths.most_tokens - 1 >> p.log2_of_page) + 1) * 4;
  if (threadIdx.x < kWarpgroup && of_all < (p.lengths.batch - 1) * p.block_table_stride + row_bytes)
    prefetch_l2(p.block_table + of_all);
  if (threadIdx.x == kWarpgroup) prefetch_l2(p.bounds + blockIdx.x);
  if (threadIdx.x == kWarpgroup + 1) prefetch_l2(p.bounds + gridDim.x);
}

// One warp: announces the segments of this CTA, and loads their blocks as slots of the ring become free. A block of small
// pages comes in several boxes; a lane has every 32nd box, and four lanes at a time load theirs. Nothing here may divide for
// each block: this one warp has to ask for it in far less time than it takes to come.
template <typename Shape>
struct PageLoader {
  static constexpr u32 kAhead = Shape::kStages / 2;  // blocks on their way when the next piece is asked for

  const PagedMqaParams& p;
  const LogitsLayout<Shape>& shared;
  const int lane, log2_of_box, log2_of_boxes;  // tokens of a box, boxes of a block
  u32 loaded = 0;                              // blocks
  u32 announced = 0;                           // place of the next announcement

  __device__ __forceinline__ PageLoader(const PagedMqaParams& p, const LogitsLayout<Shape>& shared)
      : p(p),
        shared(shared),
        lane(threadIdx.x % 32),
        log2_of_box(min(p.log2_of_page, 6)),
        log2_of_boxes(6 - log2_of_box) {}

  __device__ __forceinline__ void run(const Handout& handout) {
    Stretch stretch = handout.own();
    do {
      load(stretch);
      if (handout.rounds > 0) wait_until_few();
    } while (handout.draw(stretch));
    announce({0, 0, 0});
  }

  // Tickets are drawn as late as the memory stays busy: who has blocks on their way cannot give them away.
  __device__ __forceinline__ void wait_until_few() const {
    if (loaded < kAhead) return;
    const u32 block = loaded - kAhead;
    mbarrier_wait(shared.free(block % Shape::kStages), block / Shape::kStages % 2, "few blocks on their way");
  }

  __device__ __forceinline__ void announce(const Segment& segment) {
    if (lane == 0) {
      store_shared_16(shared.announcement(announced), {static_cast<u32>(segment.item), static_cast<u32>(segment.first),
                                                       static_cast<u32>(segment.blocks), 0});
      mbarrier_arrive(shared.announced(announced));
    }
    __syncwarp();
    if (++announced == LogitsLayout<Shape>::kAnnouncements) announced = 0;
  }

  // Of the block table; there is one for any item and token.
  __device__ __forceinline__ int entry_of(int item, u32 token) const {
    const char* const row = p.block_table + min(item, p.lengths.batch - 1) * p.block_table_stride;
    return reinterpret_cast<const int*>(row)[min(token, static_cast<u32>(p.lengths.most_tokens - 1)) >> p.log2_of_page];
  }

  __device__ __forceinline__ void load(Stretch& stretch) {
    const u32 own = lane << log2_of_box;  // this lane's first token, from the segment's first one on
    Segment segment;
#pragma unroll 1
    while (true) {
      const Place expected = stretch.at;
      int entry = entry_of(expected.item, static_cast<u32>(expected.block) * kBlockTokens + own);  // while the length comes
      if (!stretch.next(p.lengths, segment)) return;
      announce(segment);
      if (segment.item != expected.item) entry = entry_of(segment.item, segment.first * kBlockTokens + own);
      load_segment(segment, entry);
    }
  }

  // `entry` is that of this lane's first box.
  __device__ __forceinline__ void load_segment(const Segment& segment, int entry) {
    const u32 box_bytes = Shape::kDim << log2_of_box, scale_bytes = 4u << log2_of_box;
    const u32 first_token = segment.first * kBlockTokens, tokens = tokens_of(p.lengths, segment.item);
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
        if (lane / 4 * 4 == four && box < boxes) {
          const u32 full = shared.full(slot);
          mbarrier_wait(shared.free(slot), free_phase, "a free slot for tokens");
          fence_proxy_async_shared();  // the scales that were there have been read by ordinary loads
          mbarrier_arrive_expect_tx(full, token < tokens ? box_bytes + scale_bytes : 0);
          if (token < tokens) {
            tma_load_3d_async(shared.block(slot) + in_block * box_bytes, &p.keys, full, 0, in_page, page);
            copy_bulk_async(shared.scales_of(slot) + in_block * scale_bytes, scales, scale_bytes, full);
          }
        }
        __syncwarp();
      }
    }
    loaded += segment.blocks;
  }
};

// The segments that one warp announces, for another one.
template <typename Shape>
struct AnnouncedSegments {
  const LogitsLayout<Shape>& shared;
  u32 place = 0, phase = 0;

  // False at the end.
  __device__ __forceinline__ bool next(Segment& segment) {
    mbarrier_wait(shared.announced(place), phase, "a segment");
    const uint4 words = load_shared_16(shared.announcement(place));
    segment = {static_cast<int>(words.x), static_cast<int>(words.y), static_cast<int>(words.z)};
    if (++place == LogitsLayout<Shape>::kAnnouncements) {
      place = 0;
      phase ^= 1;
    }
    return segment.blocks > 0;
  }
};

template <int kHeads, int kDim, int kTile, int kTiles, int kStages, int kSharedBytes>
__device__ __forceinline__ void paged_mqa_logits(const PagedMqaParams& p) {
  using Shape = LogitsShape<kHeads, kDim, kTile, kTiles, kStages>;
  static_assert(LogitsLayout<Shape>::kBytes == kSharedBytes, "the launcher asks for another layout");
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const LogitsLayout<Shape> shared(shared_address(shared_bytes));
  if (threadIdx.x == 32) prefetch_tensor_map(&p.keys);
  if (threadIdx.x == 0) initialise_barriers(shared, 1 << max(6 - p.log2_of_page, 0));
  prefetch_plan(p);
  grid_dependency_launch();
  __syncthreads();
  grid_dependency_wait();

  const Requests work{p};
  do_segments(p.logits, work, shared, AnnouncedSegments<Shape>{shared},
              [&] { PageLoader<Shape>(p, shared).run(Handout(p, kTile < 256)); });
}

}  // namespace cumla
