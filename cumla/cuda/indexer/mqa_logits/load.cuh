// SPDX-License-Identifier: Apache-2.0
// Roles beside the products: they load the query rows of each segment, and write -inf where nothing is visible.
#pragma once
#include "indexer/mqa_logits/layout.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"
#include "ptx/wgmma.cuh"

namespace cumla::indexer {

using namespace ptx;

constexpr int kQueryWarps = 2;

constexpr int kInitWarps = 4;

// Called by all threads. One lane of each of the last warps initialises its share, because lanes of one warp would be
// serialised.
template <typename Shape>
__device__ __forceinline__ void initialise_barriers(const LogitsLayout<Shape>& shared, int arrivals) {
  constexpr int kConsumers = Shape::kTakesTurns ? 1 : 2;  // of a block
  const int part = static_cast<int>(threadIdx.x) / 32 - (kLogitsThreads / 32 - kInitWarps);
  if (part < 0 || threadIdx.x % 32 != 0) return;
#pragma unroll 1
  for (int s = part; s < Shape::kStages; s += kInitWarps) {
    mbarrier_init(shared.full(s), arrivals);
    mbarrier_init(shared.free(s), kConsumers * 4);  // plant: block read, arrivals
  }
  // query_full(2) is query_free(0). A predicated initialisation would be counted by synccheck even if it is off.
  mbarrier_init(shared.query_full(part), part < 2 ? kQueryWarps * 32 : 2 * kWarpgroup);
#pragma unroll 1
  for (int a = part; a < shared.kAnnouncements; a += kInitWarps) mbarrier_init(shared.announced(a), 1);
  fence_mbarrier_init();
}

// The warp that loads blocks advances to segment n of the CTA, and announces it to the query warps. The last
// announcement has no blocks.
template <typename Shape, typename Work>
__device__ __forceinline__ bool announce_next(const LogitsLayout<Shape>& shared, SegmentCursor<Work>& cursor, u32 n,
                                              Segment& segment) {
  segment = {0, 0, 0};
  const bool more = cursor.next(segment);
  if (threadIdx.x % 32 == 0) {
    const u32 place = n % shared.kAnnouncements;
    store_shared_16(shared.announcement(place), {static_cast<u32>(segment.item), static_cast<u32>(segment.first),
                                                 static_cast<u32>(segment.blocks), 0});
    mbarrier_arrive(shared.announced(place));
  }
  return more;
}

__device__ __forceinline__ Segment load_announced(u32 announcement) {
  const uint4 words = load_shared_16(announcement);
  return {static_cast<int>(words.x), static_cast<int>(words.y), static_cast<int>(words.z)};
}

// Two warps load what the consumers need for one segment. Columns that do not exist get zeros for q and weights, so
// they add 0. Rows that do not exist see nothing.
template <typename Shape, typename Work>
__device__ __forceinline__ void load_query(const LogitsParams& p, const Work& work, const LogitsLayout<Shape>& shared,
                                           const Segment& segment, u32 buffer) {
  constexpr int kChunks = Shape::kDim / 16;
  constexpr int kAtOnce = kQueryWarps * 32 / kChunks;  // columns
  static_assert(kAtOnce % 8 == 0, "a thread's columns all lie alike in the swizzle");
  const int thread = threadIdx.x % (kQueryWarps * 32);
  const int rows = work.rows_of(segment.item);
  const i64 first_row = work.first_row(segment.item);
  const int chunk = thread % kChunks, first_column = thread / kChunks;
  const char* const first_source = work.query(segment.item) + chunk * 16;
  const u32 first_destination =
      shared.query_of(buffer) + first_column * Shape::kDim + swizzled_chunk<Shape::kDim>(first_column, chunk) * 16;
#pragma unroll 4
  for (int begin = 0; begin < Shape::kColumns; begin += kAtOnce) {
    const int row = Shape::row_of(begin + first_column), head = Shape::head_of(begin + first_column);
    const bool valid = row < rows && head < p.num_heads;
    const char* const source =
        valid ? first_source + row * work.query_stride_row() + head * p.q_stride_head : first_source;
    copy_16_async(first_destination + begin * Shape::kDim, source, valid);
  }
#pragma unroll 1
  for (int column = thread; column < Shape::kColumns; column += kQueryWarps * 32) {
    const int row = Shape::row_of(column), head = Shape::head_of(column);
    const bool valid = row < rows && head < p.num_heads;
    const char* const source =
        p.weights + (valid ? (first_row + row) * p.weights_stride_row + head * p.weights_stride_head : 0);
    copy_4_async(shared.weights_of(buffer) + column * 4, source, valid);
  }
  const int log2_of_bytes = p.out_is_bf16 ? 1 : 2;
#pragma unroll 1
  for (int row = thread; row < Shape::kRows; row += kQueryWarps * 32) {
    Span span = {0, 0, 0};
    if (row < rows) span = work.span(segment.item, row);
    const u64 out = reinterpret_cast<u64>(p.out) + (first_row + row) * p.out_stride -
                    (static_cast<u64>(span.shift) << log2_of_bytes);
    store_shared_16(shared.targets_of(buffer) + row * 16,
                    {static_cast<u32>(out), static_cast<u32>(out >> 32), static_cast<u32>(span.begin),
                     static_cast<u32>(span.end)});
  }
}

// Two warps load all announced segments, at most two ahead of the consumers. An empty segment is the last.
template <typename Shape, typename Work>
__device__ __forceinline__ void load_queries(const LogitsParams& p, const Work& work,
                                             const LogitsLayout<Shape>& shared) {
  bool more = true;
#pragma unroll 1
  for (u32 n = 0; more; ++n) {
    const u32 buffer = n % 2;
    const u32 place = n % shared.kAnnouncements;
    mbarrier_wait(shared.announced(place), n / shared.kAnnouncements % 2, "the next segment");
    const Segment segment = load_announced(shared.announcement(place));
    more = segment.blocks > 0;
    mbarrier_wait(shared.query_free(buffer), n / 2 % 2 ^ 1, "a free query buffer");
    if (more) load_query(p, work, shared, segment, buffer);
    if (threadIdx.x % (kQueryWarps * 32) == 0) {
      store_shared_u32(shared.segment_of(buffer), segment.first);
      store_shared_u32(shared.segment_of(buffer) + 4, segment.blocks);
    }
    copy_async_wait_all();
    fence_proxy_async_shared();
    mbarrier_arrive(shared.query_full(buffer));  // each lane arrives for what it wrote itself
  }
}

// One warp writes -inf to columns [begin, end) of a row, 16 bytes per lane where aligned.
template <typename Word>
__device__ __forceinline__ void fill_columns(char* row, i64 begin, i64 end, Word value, u32 values) {
  const int lane = threadIdx.x % 32;
  char* const last = row + end * static_cast<i64>(sizeof(Word));
  char* at = row + begin * static_cast<i64>(sizeof(Word));
  char* const aligned = reinterpret_cast<char*>((reinterpret_cast<u64>(at) + 15) & ~15ull);
  for (at += lane * sizeof(Word); at < aligned && at < last; at += 32 * sizeof(Word))
    *reinterpret_cast<Word*>(at) = value;
  for (at = aligned + lane * 16; at + 16 <= last; at += 32 * 16)
    *reinterpret_cast<uint4*>(at) = {values, values, values, values};
  if (aligned >= last) return;
  at = reinterpret_cast<char*>(reinterpret_cast<u64>(last) & ~15ull) + lane * sizeof(Word);
  for (; at < last; at += 32 * sizeof(Word)) *reinterpret_cast<Word*>(at) = value;
}

// One warp of each CTA writes -inf to invisible columns. Stretches of columns go to the CTAs round robin.
template <typename Work>
__device__ __forceinline__ void fill_outside(const LogitsParams& p, const Work& work) {
  constexpr int kStretch = 4096;
  const u32 stretches = static_cast<u32>((p.width + kStretch - 1) / kStretch);
  const i64 row_step = gridDim.x / stretches;
  const u32 stretch_step = gridDim.x % stretches;
  i64 row = blockIdx.x / stretches;
  u32 stretch = blockIdx.x % stretches;
#pragma unroll 1
  while (row < p.rows) {
    const Span span = work.span_of_row(row);
    const i64 begin = static_cast<i64>(stretch) * kStretch, end = min(begin + kStretch, p.width);
    const i64 visible = span.begin - span.shift, hidden = span.end - span.shift;
    char* const out = p.out + row * p.out_stride;
#pragma unroll 1
    for (int side = 0; side < 2; ++side) {  // before the visible columns, and after them
      const i64 from = side == 0 ? begin : max(begin, hidden), to = side == 0 ? min(end, visible) : end;
      if (from >= to) continue;
      if (p.out_is_bf16)
        fill_columns<unsigned short>(out, from, to, 0xff80, 0xff80ff80u);
      else
        fill_columns<u32>(out, from, to, 0xff800000u, 0xff800000u);
    }
    row += row_step;
    stretch += stretch_step;
    if (stretch >= stretches) {
      stretch -= stretches;
      ++row;
    }
  }
}

}  // namespace cumla::indexer
