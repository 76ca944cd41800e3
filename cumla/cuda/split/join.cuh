// SPDX-License-Identifier: Apache-2.0
// Combines the partial results of a split request. Each of its CTAs combines a share of the columns; the last CTA to
// arrive also takes the shares of CTAs that did not wait (split/meeting.cuh).
//
// Whoever combines a share computes the same bits: grouping and order follow from the shape of the share alone.
//
// Hazard: this code runs once per request, from a cold instruction cache. So loops are not unrolled, and the work of
// a warp is computed while the ticket's answer is on its way.
//
// A share consists of items: units of 32 columns of one row group. If there are few items, several warps divide the
// partial results of one.
#pragma once
#include "split/meeting.cuh"
#include "split/output.cuh"
#include "split/plan.cuh"
#include "split/tile.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::split {

using namespace ptx;

constexpr int kJoinWarps = 2 * kWarpgroup / 32;

// Weight of a partial result with base-2 log-sum-exp `lse`; 0 if it is empty.
__device__ __forceinline__ float weight_of(float lse, float maximum) {
  return lse == -kInfinity ? 0.0f : exp2_approx(lse - maximum);
}

// The sinks of a lane's two rows, loaded early. It is an empty base if tiles have none, because an unused member
// changes the order of instructions that ptxas chooses.
template <bool kHasSinks>
struct Sinks {};
template <>
struct Sinks<true> {
  float sink[2];
};

// Shared memory that is free between the segments of a CTA. `pieces` and `more_pieces` are free only after the last
// segment.
struct JoinSpace {
  u32 words;                // two words that all threads read
  u32 sums;                 // 8,192 bytes
  u32 weights;              // 512 bytes
  u32 pieces, more_pieces;  // of the warps of each consumer, kPieceSpace bytes per warp
};

// kShort: partial results are short ones (split/output.cuh). kPaired: a short unit has two pairs of adjacent groups of
// eight columns, because a lane holds fewer.
template <typename T, int kValueDim, int kPieceSpace, bool kShort, typename Params, typename AnyTile,
          bool kPaired = false>
struct Joiner : Meeting<Params> {
  using Base = Meeting<Params>;
  using Base::kLast, Base::kGoOn, Base::p, Base::segment, Base::pieces, Base::warp, Base::lane;
  using Base::arrive, Base::who_left;
  static constexpr int kMostAtOnce = 8;            // partial results that a warp loads at once
  static constexpr int kRowBytes = kRowGroup * 8;  // of a partial result
  static constexpr int kLines = kShort ? kShortLines : kUnitGroups, kBytes = kLines * 512;  // of a unit
  static constexpr int kRowSize = kValueDim * kLines / 16;    // of a partial result, in 16 bytes
  // Distance of a unit's groups of eight columns, and of its pairs, in such groups
  static constexpr int kApart = kShort && !kPaired ? kValueDim / 64 : 1;
  static constexpr int kPairsApart = kPaired ? kValueDim / 32 : 2 * kApart;

  const JoinSpace space;
  const AnyTile& tile;

  __device__ __forceinline__ Joiner(const Params& p, const JoinSpace& space, const AnyTile& tile,
                                    const Segment& segment)
      : Base{p, segment, space.words, segment.last_part - segment.first_part + 1,
             static_cast<int>(thread_here() / 32 - kWarpgroup / 32), static_cast<int>(thread_here() % 32)},
        space(space),
        tile(tile) {}

  // Called by all threads of both consumers, after their partial result is stored. `more`: the CTA has another
  // request.
  // model: fp8_segments, join
  __device__ __forceinline__ void join(bool more) const {
    Ticket* const tickets = p.tickets + static_cast<i64>(tile.index) * p.parts;
    u32* const left_here = &tickets[blockIdx.y].left[segment.slot];
    consumers_sync();
    if (threadIdx.x == kWarpgroup)
      store_shared_u32(space.words, arrive(&tickets[segment.first_part].arrived, left_here, more));
    const int mine = blockIdx.y - segment.first_part;
    int share = mine, first_item = 0, looked = 0;
    bool knows_role = false;
    u32 role = kGoOn, left = 0;
#pragma unroll 1
    while (share >= 0) {
      Work work(*this, share, first_item);  // the first time it overlaps with the arrivals
      work.pin();
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

 private:
  // Reads threadIdx anew, so that values derived from it hold no registers during the blocks.
  __device__ __forceinline__ static u32 thread_here() { return copy_of(threadIdx.x); }

  // The sum of one warp: the accumulators of a unit of one row group. For the lane's two rows also the sum of
  // weights, and the base-2 maximum to which everything is relative.
  struct Sum : Sinks<AnyTile::kHasSinks> {
    float4 v[kUnitGroups];  // eight columns each
    float weight[2], maximum[2];

    __device__ __forceinline__ void raise(float next0, float next1) {
      const float factor[2] = {weight_of(maximum[0], next0), weight_of(maximum[1], next1)};
#pragma unroll
      for (int j = 0; j < kUnitGroups; ++j)
        v[j] = {v[j].x * factor[0], v[j].y * factor[0], v[j].z * factor[1], v[j].w * factor[1]};
      weight[0] *= factor[0];
      weight[1] *= factor[1];
      maximum[0] = next0;
      maximum[1] = next1;
    }
    __device__ __forceinline__ void add(int j, const float4& other, float weight0, float weight1) {
      v[j].x += weight0 * other.x;
      v[j].y += weight0 * other.y;
      v[j].z += weight1 * other.z;
      v[j].w += weight1 * other.w;
    }
  };

  // Division for small quotients: the first guess is off by at most one.
  __device__ __forceinline__ static int small_quotient(int dividend, int divisor, float inverse) {
    const int guess = static_cast<int>(static_cast<float>(dividend) * inverse), rest = dividend - guess * divisor;
    return guess + (rest >= divisor) - (rest < 0);
  }

  // The share of the work of one warp.
  struct Work {
    static constexpr int kUnits = kValueDim / (8 * kUnitGroups), kHalfUnits = kUnits / 2;

    int items, shift;       // of the share; log2 of the warps per item
    int unit, group;        // of the item
    int from, to;           // partial results of this warp
    const float2* rows;     // of partial result 0 in slot 0: the rows of the group
    const float4* columns;  // of the same: the columns of this lane

    __device__ __forceinline__ Work(const Joiner& of, int share, int first) {
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
      columns = of.p.partial_out + piece_offset<kValueDim, kLines>(of.p, base, half, group, in_half, of.lane);
    }
    __device__ __forceinline__ int helper(const Joiner& of) const { return of.warp & ((1 << shift) - 1); }
    // Computes the members here rather than at their use.
    __device__ __forceinline__ void pin() {
      rows = copy_of(rows);
      columns = copy_of(columns);
      from = copy_of(from);
      to = copy_of(to);
    }
  };

  __device__ __forceinline__ int rows_of_slot() const { return p.row_groups * kRowGroup; }
  // Offset of partial result i in rows, from slot 0 of the first part. Partial results are two slots apart; the first
  // may be in slot 1.
  __device__ __forceinline__ int row_of(int i) const {
    return (i == 0 ? segment.first_slot : 2 * i) * rows_of_slot();
  }

  // All warps call this together. After the CTA's last segment (`is_free`) the ring is free, so several partial
  // results are copied to shared memory at once.
  // model: fp8_segments
  __device__ __forceinline__ void join_item(const Work& work, bool is_free) const {
    constexpr int kFitting = kPieceSpace / kBytes;
    constexpr int kAtOnce = kFitting < kMostAtOnce ? kFitting : kMostAtOnce;
    static_assert(kAtOnce > 0, "room for a piece");
    const u32 own = (warp < 4 ? space.pieces : space.more_pieces) + warp % 4 * kPieceSpace + lane * 16;
    const u32 rows = space.sums + warp * (kMostAtOnce * kRowBytes);
    Sum sum;
#pragma unroll
    for (int j = 0; j < kUnitGroups; ++j) sum.v[j] = {0.0f, 0.0f, 0.0f, 0.0f};
    sum.weight[0] = sum.weight[1] = 0.0f;
    sum.maximum[0] = sum.maximum[1] = -kInfinity;
    if constexpr (AnyTile::kHasSinks)
#pragma unroll
      for (int r = 0; r < 2; ++r) sum.sink[r] = sink_of(p, tile, work.group * kRowGroup + lane / 4 + 8 * r);
#pragma unroll 1
    for (int first = work.from; first < work.to; first += kAtOnce) {
      const int count = min(kAtOnce, work.to - first);
#pragma unroll 1
      for (int k = 0; k < count; ++k) {
        const int row = row_of(first + k);
        const float4* const source = work.columns + static_cast<i64>(row) * kRowSize;
        if (lane < kRowBytes / 16) copy_16_async(rows + k * kRowBytes + lane * 16, work.rows + row + lane * 2, true);
        if (is_free)
#pragma unroll
          for (int j = 0; j < kLines; ++j) copy_16_async(own + k * kBytes + j * 512, source + 32 * j, true);
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
          const float4* const source = work.columns + static_cast<i64>(row_of(first + k)) * kRowSize;
#pragma unroll
          for (int j = 0; j < kLines; ++j) v[j] = load_l2_float4(source + 32 * j);
          add_piece(sum, rows + k * kRowBytes, v);
        }
      }
      __syncwarp();  // the next copies overwrite `rows`
    }
    if (work.shift > 0) gather(sum, work.helper(*this), work.shift);
    if (work.to > work.from && work.helper(*this) == 0) store(work.unit, work.group, sum);
  }

  // Adds one partial result. `rows` holds its weights.
  // model: fp8_segments
  __device__ __forceinline__ void add_piece(Sum& sum, u32 rows, float4 (&v)[kUnitGroups]) const {
    if constexpr (kShort) complete_short_unit(v);
    const float2 weights[2] = {load_shared_float2(rows + lane / 4 * 8), load_shared_float2(rows + lane / 4 * 8 + 64)};
#pragma unroll
    for (int r = 0; r < 2; ++r) sum.weight[r] += weights[r].x;
#pragma unroll
    for (int j = 0; j < kUnitGroups; ++j) sum.add(j, v[j], weights[0].y, weights[1].y);
  }

  // Turns log-sum-exps and factors of `count` partial results into weights relative to the highest one so far: one
  // for the row's sum, one for its columns. A lane handles row lane % 16 of every second partial result.
  __device__ __forceinline__ void weigh(Sum& sum, u32 rows, int count) const {
    const u32 row = rows + lane % 16 * 8;
    float highest = -kInfinity;
#pragma unroll 1
    for (int k = lane / 16; k < count; k += 2) highest = fmaxf(highest, load_shared_float(row + k * kRowBytes));
    highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 16));
    const float next[2] = {fmaxf(sum.maximum[0], __shfl_sync(0xffffffffu, highest, lane / 4)),
                           fmaxf(sum.maximum[1], __shfl_sync(0xffffffffu, highest, lane / 4 + 8))};
    sum.raise(next[0], next[1]);
    const float first = __shfl_sync(0xffffffffu, next[0], lane % 8 * 4);
    const float second = __shfl_sync(0xffffffffu, next[1], lane % 8 * 4);
    highest = lane & 8 ? second : first;
#pragma unroll 1
    for (int k = lane / 16; k < count; k += 2) {
      const float2 of_piece = load_shared_float2(row + k * kRowBytes);
      const float weight = weight_of(of_piece.x, highest);
      store_shared_float2(row + k * kRowBytes, {weight, weight * of_piece.y});
    }
    __syncwarp();
  }

  // Adds up the sums of an item's warps in a tree; the result is in the first warp. In each step the second half
  // stores its sums, and the first half adds them. From the second step on, it stores where it has just read.
  // model: fp8_segments
  __device__ __forceinline__ void gather(Sum& sum, int helper, int shift) const {
    const int half = (1 << shift) / 2;
    consumers_sync();  // all warps have read the weights of the partial results
#pragma unroll 1
    for (int step = half; step > 0; step /= 2) {
      const int place = (warp >> shift) * half + (helper & (step - 1)) + (step == half ? 0 : step);
      const u32 sums = space.sums + (place * kUnitGroups * 32 + lane) * 16;
      const u32 weights = space.weights + (place * 8 + lane / 4) * 16;
      if (helper / step == 1) {
        __syncwarp();  // all lanes have read the weights of the step before
        if (lane % 4 == 0)
          store_shared_float4(weights, {sum.weight[0], sum.weight[1], sum.maximum[0], sum.maximum[1]});
#pragma unroll
        for (int j = 0; j < kUnitGroups; ++j) store_shared_float4(sums + j * 512, sum.v[j]);
      }
      consumers_sync();  // plant: gather
      if (helper < step) {
        const float4 other = load_shared_float4(weights);  // sums of weights, maxima
        sum.raise(fmaxf(sum.maximum[0], other.z), fmaxf(sum.maximum[1], other.w));
        const float factor[2] = {weight_of(other.z, sum.maximum[0]), weight_of(other.w, sum.maximum[1])};
#pragma unroll
        for (int j = 0; j < kUnitGroups; ++j) sum.add(j, load_shared_float4(sums + j * 512), factor[0], factor[1]);
        sum.weight[0] += factor[0] * other.x;
        sum.weight[1] += factor[1] * other.y;
      }
    }
    consumers_sync();  // the rows of the next share go there
  }

  // The largest score of a row, over its partial results. The order does not matter.
  __device__ __forceinline__ void join_max_logit(int row) const {
    const i64 base = piece_index(p, tile, segment.first_part, 0);
    float highest = -kInfinity;
#pragma unroll 4
    for (int i = 0; i < pieces; ++i) {
      const i64 piece = base + (i == 0 ? segment.first_slot : 2 * i);
      highest = fmaxf(highest, load_l2_float(tile.partial_max_logit(p, piece, row)));
    }
    tile.store_max_logit(p, segment.request, Row(p, tile, row), highest);
  }

  // model: fp8_data
  __device__ __forceinline__ void store(int unit, int group, const Sum& sum) const {
#pragma unroll 1
    for (int r = 0; r < 2; ++r) {
      const int row = group * kRowGroup + lane / 4 + 8 * r;
      const float weight = r == 0 ? sum.weight[0] : sum.weight[1], highest = r == 0 ? sum.maximum[0] : sum.maximum[1];
      float scale = weight == 0.0f ? 0.0f : 1.0f / weight;
      float with_sink = 0.0f;
      if constexpr (AnyTile::kHasSinks) {
        with_sink = log_sum_exp(highest, weight);
        take_sink(p, r == 0 ? sum.sink[0] : sum.sink[1], scale, with_sink);
      }
      const int half = unit / Work::kHalfUnits, in_half = unit % Work::kHalfUnits;
      // Index of its first group of eight columns
      const int first = half * (kValueDim / 16) + (kShort ? (kPaired ? 2 : 1) * in_half : in_half * kUnitGroups);
#pragma unroll
      for (int j = 0; j < kUnitGroups; j += 2) {
        const float4 &v = sum.v[j], &w = sum.v[j + 1];
        store_columns<T, 1, 8 * kApart>(p, tile, segment.request, row, lane % 4, 8 * (first + j / 2 * kPairsApart),
                                        (r == 0 ? v.x : v.z) * scale, (r == 0 ? v.y : v.w) * scale,
                                        (r == 0 ? w.x : w.z) * scale, (r == 0 ? w.y : w.w) * scale);
      }
      if (row < tile.rows && unit == 0 && lane % 4 == 0)
        store_lse(p, tile, segment.request, Row(p, tile, row),
                  AnyTile::kHasSinks ? with_sink : log_sum_exp(highest, weight));
      if constexpr (AnyTile::kHasMaxLogits)
        if (row < tile.rows && unit == 0 && lane % 4 == 0) join_max_logit(row);
    }
  }
};

}  // namespace cumla::split
