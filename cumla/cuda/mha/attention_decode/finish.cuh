// SPDX-License-Identifier: Apache-2.0
// The end of a row tile in attention_decode.
#pragma once
#include "mha/attention/layout.cuh"
#include "mha/attention_decode/compute.cuh"
#include "mha/attention_decode/join.cuh"
#include "mha/attention_decode/layout.cuh"
#include "attend/reduce.cuh"
#include "split/output.cuh"
#include "split/plan.cuh"
#include "split/tile.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

using namespace attend;
using namespace ptx;
using namespace split;

// A quad of lanes stores eight columns of a row, two per lane.
template <typename T, typename Params, typename AnyTile>
__device__ __forceinline__ void store_pair(const Params& p, const AnyTile& tile, int request, int row, int quad_lane,
                                           int column, float a, float b) {
  char* const out = row_of_out(p, tile, request, row);
  if (row >= tile.rows || !has_column(p, column)) return;
  column += quad_lane * 2;
  if (p.out_is_float)
    store_global_float2(reinterpret_cast<float*>(out) + column, a, b);
  else
    *reinterpret_cast<u32*>(out + column * 2) = pack_pair<T>(a, b);
}

// Adds up the warps' outputs of a row tile, 64 columns of eight rows per step, and stores results or a partial
// result. Adder w has the columns of lanes 4 w to 4 w + 3. Its lane 4 g + q has columns 2 q and 2 q + 1 of these in
// row g.
template <typename T, int kKeys, int kValues, int kRows, bool kE4m3, typename Params>
struct Adder {
  using Layout = DecodeLayout<kKeys, kValues, kRows, kE4m3>;
  static constexpr int kRounds = kValues / 64;    // steps per eight rows
  static constexpr int kEach = kDecodeWarps / 4;  // warps whose outputs a lane adds

  const Params& p;
  const Layout& shared;
  const HeadTile& tile;
  const Segment& segment;
  const u32 number;  // of the tile
  const int adder, lane;

  // Reads threadIdx anew, so that values derived from it hold no registers during the chunks.
  __device__ __forceinline__ static int thread_here() { return copy_of(threadIdx.x); }
  __device__ __forceinline__ Adder(const Params& p, const Layout& shared, const HeadTile& tile,
                                   const Segment& segment, u32 number)
      : p(p), shared(shared), tile(tile), segment(segment), number(number), adder(thread_here() / 32),
        lane(thread_here() % 32) {}

  // Adds up steps first to last, once all warps have stored their outputs of these.
  __device__ __forceinline__ void add(int first, int last, u32 parity) const {
    mbarrier_wait(shared.sums_full(), parity, "the results of all warps");
    float own[kEach], inverse;
#pragma unroll 1
    for (int step = first; step <= last; ++step) {
      if (step == first || step % kRounds == 0) inverse = weigh_warps(step / kRounds, own, step % kRounds == 0);
      add_warps(step, own, inverse);
    }
  }

  // Lets the warps store their next outputs.
  __device__ __forceinline__ void release() const {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared.sums_free());  // plant: sums read
  }

  __device__ __forceinline__ void join(bool more) const {
    using Rows = RowJoiner<T, kValues, Params>;
    static_assert(kJoinWarps * Rows::kRoom <= Layout::kSumsBytes, "joining uses the sums");
    Rows(p, shared.words(), shared.sums(), tile, segment).join(more);
  }

 private:
  // First of the eight columns of outputs 4 round to 4 round + 3 in lanes of g.
  __device__ __forceinline__ static int column_of(int round, int g) {
    return kE4m3 && kValues > 64 ? round / 2 * 128 + g * 16 + round % 2 * 8 : round * 64 + g * 8;
  }

  // Each lane of a quad computes the weights of every fourth warp's output of row lane / 4, relative to the highest
  // maximum. Returns the factor that normalises their sum. `is_first`: also stores the row's log-sum-exp.
  __device__ __forceinline__ float weigh_warps(int n, float (&own)[kEach], bool is_first) const {
    const int row = n * 8 + lane / 4;
    float highest = kLowest, total = 0.0f, rounded = 0.0f;
    float4 of_warp[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) of_warp[k] = load_shared_float4(shared.statistics_of(lane % 4 + 4 * k, row));
#pragma unroll
    for (int k = 0; k < kEach; ++k) highest = fmaxf(highest, of_warp[k].x);
    highest = max_of_quad(highest);
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      own[k] = exp2_approx(of_warp[k].x - highest);
      total += own[k] * of_warp[k].y;
      rounded += own[k] * of_warp[k].z;
    }
    total = sum_of_quad(total);
    rounded = sum_of_quad(rounded);
    float lse = log_sum_exp(highest, total);
    float inverse = inverse_of_sum(rounded);
    take_sink(p, sink_of(p, tile, segment, row), inverse, lse);  // added last, as in attention
    if (is_first && adder == 0 && lane % 4 == 0 && row < tile.rows) {
      if (segment.split())
        *piece_row(row).lse = lse;
      else
        store_lse(p, tile, segment.request, Row(p, tile, row), lse);
    }
    return kE4m3 ? inverse * loaded_scale(p.value_scale, shared.scale(number, true)) : inverse;
  }

  // Each lane of a quad adds up eight columns of its warps. Then lanes exchange, so that each has the sums of two
  // columns.
  __device__ __forceinline__ void add_warps(int step, const float (&own)[kEach], float inverse) const {
    const int q = lane % 4, n = step / kRounds, round = step % kRounds;
    float sums[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] = 0.0f;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      if (n * 8 + lane / 4 >= tile.rows) continue;
      const u32 from = shared.sums_of(step, q + 4 * k, lane / 4) + adder * 32;
      const float4 low = load_shared_float4(from), high = load_shared_float4(from + 16);
      const float v[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[i] += own[k] * v[i];
    }
    float four[4], two[2];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      four[i] = (q & 2 ? sums[4 + i] : sums[i]) + __shfl_xor_sync(0xffffffffu, q & 2 ? sums[i] : sums[4 + i], 2);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      two[i] = (q & 1 ? four[2 + i] : four[i]) + __shfl_xor_sync(0xffffffffu, q & 1 ? four[i] : four[2 + i], 1);
    store(n, column_of(round, adder), two[0] * inverse, two[1] * inverse);
  }

  __device__ __forceinline__ PieceRow<kValues> piece_row(int row) const {
    return PieceRow<kValues>(p, tile, blockIdx.y, segment.slot, row);
  }

  // Each lane stores two columns of a row, of `column` and the seven after it.
  __device__ __forceinline__ void store(int n, int column, float a, float b) const {
    const int row = n * 8 + lane / 4;
    if (!segment.split())
      store_pair<T>(p, tile, segment.request, row, lane % 4, column, a, b);
    else if (row < tile.rows)
      store_global_float2(piece_row(row).columns + column + lane % 4 * 2, a, b);
  }
};

// A warp and a row tile: its chunks, and the end.
template <typename T, int kKeys, int kValues, int kRows, bool kE4m3, typename Params>
struct Attender : ChunkAttender<T, kKeys, kValues, kRows, kE4m3, Params> {
  using Base = ChunkAttender<T, kKeys, kValues, kRows, kE4m3, Params>;
  using typename Base::Layout;
  using Base::kEights;
  using Base::p, Base::shared, Base::tile, Base::warp, Base::lane;
  using Base::output, Base::maximum, Base::sum, Base::weight;
  using Base::Base;
  using AdderOf = Adder<T, kKeys, kValues, kRows, kE4m3, CommonOf<Params>>;
  static constexpr int kRounds = kValues / 64;

  u32 tiles = 0;  // tiles whose outputs the warps have stored, in kSumTurns turns each

  // Stores the warp's output, and adds up all of them. Returns true if settle() must still do that.
  template <typename Copy>
  __device__ __forceinline__ bool finish(const Segment& segment, bool more, const Copy& copy_next) {
    const bool adds = warp < kJoinWarps, later = Layout::kAllAtOnce && more && !segment.split();
    const AdderOf adder(p, shared, tile, segment, tiles);
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) {
          sum[n][r] += __shfl_xor_sync(0xffffffffu, sum[n][r], lanes);
          weight[n][r] += __shfl_xor_sync(0xffffffffu, weight[n][r], lanes);
        }
#pragma unroll
    for (int turn = 0; turn < Layout::kSumTurns; ++turn) {
      const int first = turn * Layout::kAtOnce;
      const u32 parity = tiles * Layout::kSumTurns + turn & 1;
      mbarrier_wait(shared.sums_free(), parity ^ 1, "room for results");
      if (turn == 0) leave_statistics();
      if (turn == 1) copy_next();  // all warps have left the query rows
#pragma unroll
      for (int step = first; step < first + Layout::kAtOnce; ++step) leave_sums(step);
      __syncwarp();
      if (lane == 0) mbarrier_arrive(shared.sums_full());  // plant: sums
      if (adds && !later) {
        adder.add(first, first + Layout::kAtOnce - 1, parity);
        if (turn == Layout::kSumTurns - 1 && segment.split()) adder.join(more);
        adder.release();
      }
    }
    ++tiles;
    return adds && later;
  }

  // Adds up a tile that is not split.
  __device__ __forceinline__ void settle(const HeadTile& left) const {
    const Segment whole = {};
    const AdderOf adder(p, shared, left, whole, tiles - 1);
    adder.add(0, Layout::kSteps - 1, tiles - 1 & 1);
    adder.release();
  }

  // Waits until all warps have left the tile before.
  __device__ __forceinline__ void wait_for_all() const {
    mbarrier_wait(shared.sums_full(), tiles * Layout::kSumTurns - 1 & 1, "all warps");
  }

 private:
  __device__ __forceinline__ void leave_statistics() const {
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (lane < 4)
          store_shared_float4(shared.statistics_of(warp, n * 8 + 2 * lane + r),
                              {maximum[n][r], sum[n][r], weight[n][r], 0.0f});
  }

  __device__ __forceinline__ void leave_sums(int step) const {
    const int n = step / kRounds, round = step % kRounds, g = lane / 4, q = lane % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (n * 8 + 2 * q + r >= tile.rows) continue;
        const float(&even)[4] = output[n][4 * round + 2 * half], (&odd)[4] = output[n][4 * round + 2 * half + 1];
        store_shared_float4(shared.sums_of(step, warp, 2 * q + r) + g * 32 + half * 16,
                            {even[r], even[r + 2], odd[r], odd[r + 2]});
      }
  }
};

}  // namespace cumla::mha
