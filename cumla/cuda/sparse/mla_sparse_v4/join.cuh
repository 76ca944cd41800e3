// SPDX-License-Identifier: Apache-2.0
// Sums and the end of a segment in mla_sparse_v4 and mla_sparse_v41, which differ from mla_decode's. A CTA of
// few lists has one or two blocks, so that combining is half of its time (docs/history/mla_sparse.md). These members of
// templates are specialised for V4Tile, because the other kernels keep their machine code.
#pragma once
#include "mla/mla_decode/compute.cuh"
#include "mla/mla_decode/layout.cuh"
#include "sparse/mla_sparse_v4/layout.cuh"
#include "split/join.cuh"
#include "split/output.cuh"
#include "ptx/copy.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using V4Consumer = Consumer<Bf16, true, true, sparse::V4Tile>;

// Before a consumer's first block it does not multiply zeros.
template <>
__device__ __forceinline__ void V4Consumer::rescale(const float (&next)[2]) {
  if (!__any_sync(0xffffffffu, next[0] != maximum[0] || next[1] != maximum[1])) return;
  const float factor[2] = {exp2_approx(maximum[0] - next[0]), exp2_approx(maximum[1] - next[1])};
  if (!__any_sync(0xffffffffu, maximum[0] != kLowest || maximum[1] != kLowest)) {
    maximum[0] = next[0];
    maximum[1] = next[1];
    return;
  }
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) output[i] *= factor[i >> 1 & 1];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] *= factor[r];
    weight[r] *= factor[r];
    maximum[r] = next[r];
  }
}

}  // namespace cumla::mla

namespace cumla::split {

using V4Joiner = mla::LatentJoiner<Bf16, sparse::V4Tile>;

__device__ __forceinline__ float natural_sink_of(const mla::MlaDecodeParams& p, const sparse::V4Tile& tile, int row) {
  if (p.sinks == nullptr || row >= tile.rows) return -kInfinity;
  return p.sinks[(tile.first_row + row) * p.sinks_stride];
}

// The sinks of the lane's two rows, natural, are loaded with the work: the end waits for them.
template <>
struct V4Joiner::Work : Sinks<true> {
  static constexpr int kUnits = 16, kHalfUnits = kUnits / 2;

  int items, shift;
  int unit, group;
  int from, to;
  const float2* rows;
  const float4* columns;

  __device__ __forceinline__ Work(const V4Joiner& of, int share, int first) {
    const int row_groups = copy_of(of.p.row_groups), all = kUnits * row_groups;
    const float inverse = reciprocal_approx(static_cast<float>(of.pieces));
    const int begin = small_quotient(all * share, of.pieces, inverse);
    items = small_quotient(all * (share + 1), of.pieces, inverse) - begin;
    const int most = min(31 - __clz(of.pieces), 3);
    shift = items > 4 ? 0 : items > 2 ? min(most, 1) : items == 2 ? min(most, 2) : most;
    const int item = begin + min(first + (of.warp >> shift), items - 1);
    unit = small_quotient(item, row_groups, reciprocal_approx(static_cast<float>(row_groups)));
    group = item - unit * row_groups;
    const int count = (of.pieces + (1 << shift) - 1) >> shift;
    const bool active = first + of.warp < items << shift;
    from = helper(of) * count;
    to = active ? min(from + count, of.pieces) : from;
    const i64 base = piece_index(of.p, of.tile, of.segment.first_part, 0);
    rows = of.p.partial_rows + base * of.rows_of_slot() + group * kRowGroup;
    const int half = unit / kHalfUnits, in_half = unit % kHalfUnits;
    columns = of.p.partial_out + piece_offset<mla::kValueDim, kLines>(of.p, base, half, group, in_half, of.lane);
#pragma unroll
    for (int r = 0; r < 2; ++r) sink[r] = natural_sink_of(of.p, of.tile, group * kRowGroup + of.lane / 4 + 8 * r);
  }
  __device__ __forceinline__ int helper(const V4Joiner& of) const { return of.warp & ((1 << shift) - 1); }
  __device__ __forceinline__ void pin() {
    rows = copy_of(rows);
    columns = copy_of(columns);
    from = copy_of(from);
    to = copy_of(to);
  }
};

// Both rows of a lane one after the other, normalised by an approximate reciprocal.
template <>
__device__ __forceinline__ void V4Joiner::store(int unit, int group, const Sum& sum) const {
#pragma unroll 1
  for (int r = 0; r < 2; ++r) {
    const int row = group * kRowGroup + lane / 4 + 8 * r;
    const float weight = r == 0 ? sum.weight[0] : sum.weight[1], highest = r == 0 ? sum.maximum[0] : sum.maximum[1];
    float scale = inverse_of_sum(weight);
    float with_sink = log_sum_exp(highest, weight);
    take_sink(p, bounded_sink(r == 0 ? sum.sink[0] : sum.sink[1]), scale, with_sink);
    const int half = unit / Work::kHalfUnits, in_half = unit % Work::kHalfUnits;
    const int first = half * (mla::kValueDim / 16) + in_half;
#pragma unroll
    for (int j = 0; j < kUnitGroups; j += 2) {
      const float4 &v = sum.v[j], &w = sum.v[j + 1];
      store_columns<Bf16, 1, 8 * kApart>(p, tile, segment.request, row, lane % 4, 8 * (first + j / 2 * kPairsApart),
                                         (r == 0 ? v.x : v.z) * scale, (r == 0 ? v.y : v.w) * scale,
                                         (r == 0 ? w.x : w.z) * scale, (r == 0 ? w.y : w.w) * scale);
    }
    if (row < tile.rows && unit == 0 && lane % 4 == 0)
      store_lse(p, tile, segment.request, Row(p, tile, row), with_sink);
  }
}

// Copies up to nine partial results at once: four lists of 18 blocks have so many. The rows of the last warp lie over
// the weights that gather() stores later.
template <>
__device__ __forceinline__ void V4Joiner::join_item(const Work& work, bool is_free) const {
  constexpr int kAtOnce = 9;
  static_assert(kAtOnce * kBytes <= mla::kJoinSpace);
  const u32 own = (warp < 4 ? space.pieces : space.more_pieces) + warp % 4 * mla::kJoinSpace + lane * 16;
  const u32 rows = space.sums + warp * (kAtOnce * kRowBytes);
  Sum sum;
#pragma unroll
  for (int j = 0; j < kUnitGroups; ++j) sum.v[j] = {0.0f, 0.0f, 0.0f, 0.0f};
  sum.weight[0] = sum.weight[1] = 0.0f;
  sum.maximum[0] = sum.maximum[1] = -kInfinity;
#pragma unroll
  for (int r = 0; r < 2; ++r) sum.sink[r] = work.sink[r];
#pragma unroll 1
  for (int first = work.from; first < work.to; first += kAtOnce) {
    const int count = min(kAtOnce, work.to - first);
    int row = row_of(first);
    const float2* from = work.rows + row + lane * 2;
    const float4* source = work.columns + static_cast<i64>(row) * kRowSize;
    u32 to = rows + lane * 16, to_columns = own;
#pragma unroll 1
    for (int k = first + 1;; ++k) {
      if (lane < kRowBytes / 16) copy_16_async(to, from, true);
      if (is_free)
#pragma unroll
        for (int j = 0; j < kLines; ++j) copy_16_async(to_columns + j * 512, source + 32 * j, true);
      if (k >= first + count) break;
      const int step = k * 2 * rows_of_slot() - row;  // the same from the second one on
      row += step;
      from += step;
      source += static_cast<i64>(step) * kRowSize;
      to += kRowBytes;
      to_columns += kBytes;
    }
    copy_async_wait_all();
    __syncwarp();
    weigh(sum, rows, count);
    float4 v[kUnitGroups];
    if (is_free) {
#pragma unroll 1
      for (int k = 0; k < count; ++k) {
#pragma unroll
        for (int j = 0; j < kLines; ++j) v[j] = load_shared_float4(own + k * kBytes + j * 512);
        add_piece(sum, rows + k * kRowBytes, v);
      }
    } else {
#pragma unroll 1
      for (int k = 0; k < count; ++k) {
        const float4* const piece = work.columns + static_cast<i64>(row_of(first + k)) * kRowSize;
#pragma unroll
        for (int j = 0; j < kLines; ++j) v[j] = load_l2_float4(piece + 32 * j);
        add_piece(sum, rows + k * kRowBytes, v);
      }
    }
    __syncwarp();  // the next copies overwrite `rows`
  }
  if (work.shift > 0) gather(sum, work.helper(*this), work.shift);
  if (work.to > work.from && work.helper(*this) == 0) store(work.unit, work.group, sum);
}

// The protocol of Joiner::join. The work is found while the partial result is stored, not while others arrive: the
// warp that waits for them would find its own later.
template <>
__device__ __forceinline__ void V4Joiner::join(bool more) const {
  Ticket* const tickets = p.tickets + static_cast<i64>(tile.index) * p.parts;
  u32* const left_here = &tickets[blockIdx.y].left[segment.slot];
  Work next(*this, blockIdx.y - segment.first_part, 0);
  next.pin();
  consumers_sync();
  if (threadIdx.x == kWarpgroup)
    store_shared_u32(space.words, arrive(&tickets[segment.first_part].arrived, left_here, more));
  const int mine = blockIdx.y - segment.first_part;
  int share = mine, first_item = 0, looked = 0;
  bool knows_role = false;
  u32 role = kGoOn, left = 0;
#pragma unroll 1
  while (share >= 0) {
    if (knows_role) next = Work(*this, share, first_item);
    const Work work = next;
    if (!knows_role) {
      consumers_sync();
      role = load_shared_u32(space.words);
      knows_role = true;
      if (role == kGoOn) break;
    }
    if (work.items > 0) join_item(work, !more);
    first_item += kJoinWarps;
    if (first_item < work.items) continue;
    for (; role == kLast && left == 0 && looked < pieces; looked += 32) left = who_left(tickets, looked, mine);
    share = left == 0 ? -1 : (looked - 32) + __ffs(left) - 1;
    left &= left - 1;
    first_item = 0;
  }
  if (role == kLast && threadIdx.x == kWarpgroup) store_relaxed(left_here, 0);
  consumers_sync();  // space.words is reused
}

}  // namespace cumla::split
