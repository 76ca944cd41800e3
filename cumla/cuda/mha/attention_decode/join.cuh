// SPDX-License-Identifier: Apache-2.0
// Combines partial results of few rows: a share is whole rows (docs/kernels/mha-decode.md).
#pragma once
#include "mha/attention/layout.cuh"
#include "split/join.cuh"
#include "split/meeting.cuh"
#include "split/output.cuh"
#include "split/plan.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

using namespace ptx;
using namespace split;

// Addresses of a row of a partial result: its columns, and its base-2 log-sum-exp.
template <int kValues>
struct PieceRow {
  float* columns;
  float* lse;

  __device__ __forceinline__ PieceRow(const AttentionParams& p, const HeadTile& tile, int part, int slot, int row) {
    const i64 number = piece_index(p, tile, part, slot) * kRowGroup + row;
    columns = reinterpret_cast<float*>(p.partial_out) + number * kValues;
    lse = reinterpret_cast<float*>(p.partial_rows) + number;
  }
};

// `sums`: kJoinWarps * kRoom bytes of shared memory, not used otherwise meanwhile. kFirstThread: of those who combine.
template <typename T, int kValues, typename Params, int kFirstThread = 0>
struct RowJoiner : Meeting<Params> {
  using Base = Meeting<Params>;
  using Base::kLast, Base::kGoOn, Base::kAll, Base::p, Base::segment, Base::words, Base::pieces, Base::warp, Base::lane;
  using Base::arrive, Base::who_left;
  using typename Base::Role;
  static constexpr int kRuns = (kValues + 127) / 128;  // of four columns per lane
  static constexpr int kAtOnce = 8;                    // partial results
  static constexpr int kRoom = kValues * 4 + 16;

  const u32 sums;
  const HeadTile& tile;

  __device__ __forceinline__ RowJoiner(const Params& p, u32 words, u32 sums, const HeadTile& tile,
                                       const Segment& segment)
      : Base{p, segment, words, segment.last_part - segment.first_part + 1,
                static_cast<int>(copy_of(threadIdx.x - kFirstThread) / 32),
             static_cast<int>(copy_of(threadIdx.x) % 32)},
        sums(sums),
        tile(tile) {}

  // Called by all threads of the combining warps, after their partial result is stored. `more`: the CTA has another
  // request.
  // model: join
  __device__ __forceinline__ void join(bool more) const {
    Ticket* const tickets = p.tickets + static_cast<i64>(tile.index) * p.parts;
    u32* const left_here = &tickets[blockIdx.y].left[segment.slot];
    const int mine = blockIdx.y - segment.first_part;
    consumers_sync();
    if (threadIdx.x == kFirstThread) {
      u32* const arrived = &tickets[segment.first_part].arrived;
      store_shared_u32(words, mine < tile.rows ? arrive(arrived, left_here, more) : count_in(arrived));
    }
    consumers_sync();
    const u32 role = load_shared_u32(words);
    if (role == kGoOn) return;
    int share = mine, looked = 0;
    u32 left = 0;
#pragma unroll 1
    while (share >= 0) {
      if (share < tile.rows) join_rows(share);
      for (; role == kLast && left == 0 && looked < pieces; looked += 32) left = who_left(tickets, looked, mine);
      share = left == 0 ? -1 : (looked - 32) + __ffs(left) - 1;
      left &= left - 1;
    }
    if (role == kLast && threadIdx.x == kFirstThread) store_relaxed(left_here, 0);
  }

 private:
  // Called by one thread of a CTA with an empty share. It does not wait, and no other CTA has to combine its share.
  // model: join
  __device__ __forceinline__ Role count_in(u32* arrived) const {
    const u32 before = atomic_add_acq_rel(arrived, 1);
    if (((before + 1 ^ before) & kAll) == 0) return kGoOn;
    fence_sc_gpu();  // as in arrive()
    return kLast;
  }

  // A warp's sum of a row, relative to a base-2 maximum.
  struct Sum {
    float4 v[kRuns];
    float weight, maximum;

    __device__ __forceinline__ Sum() : v{}, weight(0.0f), maximum(-kInfinity) {}
    __device__ __forceinline__ void raise(float next) {
      const float factor = weight_of(maximum, next);
#pragma unroll
      for (int r = 0; r < kRuns; ++r)
        v[r] = {v[r].x * factor, v[r].y * factor, v[r].z * factor, v[r].w * factor};
      weight *= factor;
      maximum = next;
    }
    __device__ __forceinline__ void add(int r, const float4& other, float factor) {
      v[r].x += factor * other.x;
      v[r].y += factor * other.y;
      v[r].z += factor * other.z;
      v[r].w += factor * other.w;
    }
  };

  // Combines rows share, share + pieces, ... The share alone decides how many warps divide the partial results of a
  // row.
  __device__ __forceinline__ void join_rows(int share) const {
    int shift = 3;
    while (share + (kJoinWarps >> shift) * pieces < tile.rows) --shift;
    const int helpers = 1 << shift, helper = warp & (helpers - 1), row = share + (warp >> shift) * pieces;
    const u32 own = sums + warp * kRoom;
    if (row < tile.rows) {
      const Sum sum = add_pieces(row, helper, helpers);
#pragma unroll
      for (int r = 0; r < kRuns; ++r)
        if (column_of(r) < kValues) store_shared_float4(own + column_of(r) * 4, sum.v[r]);
      if (lane == 0) store_shared_float2(own + kValues * 4, {sum.maximum, sum.weight});
    }
    consumers_sync();
    if (row < tile.rows && helper == 0) store(row, add_helpers(own, helpers));
    consumers_sync();  // the sums of the next share go there
  }

  __device__ __forceinline__ int column_of(int r) const { return r * 128 + lane * 4; }

  __device__ __forceinline__ Sum add_pieces(int row, int first, int step) const {
    const PieceRow<kValues> base(p, tile, segment.first_part, 0, row);
    const float4* const columns = reinterpret_cast<const float4*>(base.columns) + lane;
    Sum sum;
#pragma unroll 1
    for (; first < pieces; first += kAtOnce * step) {
      float4 v[kAtOnce][kRuns];
      float lse[kAtOnce], highest = sum.maximum;
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int i = first + k * step;
        const int slots = i == 0 ? segment.first_slot : 2 * i;  // slots after slot 0 of the first part
        lse[k] = i < pieces ? load_l2_float(base.lse + slots * kRowGroup) : -kInfinity;
#pragma unroll
        for (int r = 0; r < kRuns; ++r) {
          v[k][r] = {0.0f, 0.0f, 0.0f, 0.0f};
          if (i < pieces && has_column(p, column_of(r)))
            v[k][r] = load_l2_float4(columns + static_cast<i64>(slots) * (kRowGroup * kValues / 4) + 32 * r);
        }
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) highest = fmaxf(highest, lse[k]);
      sum.raise(highest);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const float weight = weight_of(lse[k], highest);
        sum.weight += weight;
#pragma unroll
        for (int r = 0; r < kRuns; ++r) sum.add(r, v[k][r], weight);
      }
    }
    return sum;
  }

  __device__ __forceinline__ Sum add_helpers(u32 from, int helpers) const {
    Sum sum;
    float2 others[kJoinWarps];  // maxima and weights
#pragma unroll
    for (int h = 0; h < kJoinWarps; ++h) {
      others[h] = {-kInfinity, 0.0f};
      if (h < helpers) others[h] = load_shared_float2(from + h * kRoom + kValues * 4);
      sum.maximum = fmaxf(sum.maximum, others[h].x);
    }
#pragma unroll
    for (int h = 0; h < kJoinWarps; ++h) {
      if (h >= helpers) break;
      const float factor = weight_of(others[h].x, sum.maximum);
      sum.weight += factor * others[h].y;
#pragma unroll
      for (int r = 0; r < kRuns; ++r)
        if (column_of(r) < kValues) sum.add(r, load_shared_float4(from + h * kRoom + column_of(r) * 4), factor);
    }
    return sum;
  }

  __device__ __forceinline__ void store(int row, const Sum& sum) const {
    const float scale = inverse_of_sum(sum.weight);
    char* const out = row_of_out(p, tile, segment.request, row);
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      const float4 v = {sum.v[r].x * scale, sum.v[r].y * scale, sum.v[r].z * scale, sum.v[r].w * scale};
      if (!has_column(p, column_of(r))) continue;
      if (p.out_is_float) {
        float* const to = reinterpret_cast<float*>(out) + column_of(r);
        store_global_float2(to, v.x, v.y);
        store_global_float2(to + 2, v.z, v.w);
      } else {
        store_global_8(out + column_of(r) * 2, pack_pair<T>(v.x, v.y), pack_pair<T>(v.z, v.w));
      }
    }
    if (lane == 0)
      store_lse(p, tile, segment.request, Row(p, tile, row),
                log_sum_exp(sum.maximum, sum.weight));
  }
};

}  // namespace cumla::mha
