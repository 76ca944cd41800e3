// SPDX-License-Identifier: Apache-2.0
// The consumer role of mla_decode_invariant.
#pragma once
#include "mla/mla_decode/compute.cuh"
#include "mla/mla_decode_invariant/pieces.cuh"
#include "attend/reduce.cuh"
#include "split/join.cuh"
#include "split/output.cuh"
#include "ptx/copy.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

constexpr int kMostPieces = 8;  // that Joiner adds up one after the other

// The lines of a unit as if it had been stored and loaded.
__device__ __forceinline__ void shorten_unit(float4 (&v)[kUnitGroups]) {
  const float4 last = v[kShortLines];
#pragma unroll
  for (int i = 0; i < kShortLines; ++i)
    v[i] = {with_byte(v[i].x, last.x, i), with_byte(v[i].y, last.y, i), with_byte(v[i].z, last.z, i),
            with_byte(v[i].w, last.w, i)};
}

template <typename T, bool kSharedBlocks, bool kCopied, typename Base>
struct Consumer<T, kSharedBlocks, kCopied, Invariant<Base>> : Consumer<T, kSharedBlocks, kCopied, Base> {
  using Of = Consumer<T, kSharedBlocks, kCopied, Base>;
  using typename Of::Layout;
  using Of::kValueDim;
  using Of::p, Of::shared, Of::tile, Of::consumer, Of::warp, Of::lane, Of::row, Of::output, Of::maximum, Of::sum,
      Of::weight;
  static constexpr int kUnits = kValueDim / 64;
  using Of::Of;

  __device__ __forceinline__ void finish(const Segment& segment, const Pieces& pieces, bool more) {
    float inverse[2], lse[2];
    sum_up(inverse, lse);
    if (__builtin_expect(pieces.all() ? !pieces.is_last(segment) : segment.split(), 0)) {
      write_piece(segment, inverse, lse);
      if (pieces.all()) return;
      LatentJoiner<T, Base>(p,
                            {shared.pacer(0), shared.probabilities, shared.sum(0, 0), shared.stage(0),
                             shared.stage(Layout::kStages / 2)},
                            tile, segment)
          .join(more);
    } else if (pieces.all()) {
      add_up(segment, pieces, inverse, lse);
    } else {
      finish_rows(segment, inverse, lse);
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        float4 unit[kUnitGroups];
#pragma unroll
        for (int j = 0; j < kUnitGroups; ++j) unit[j] = eight_columns(u + j * kUnits);
        write_unit(segment, u, unit, inverse);
      }
    }
  }

 private:
  // Adds the sums of both consumers, as finish() of others does.
  __device__ __forceinline__ void sum_up(float (&inverse)[2], float (&lse)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = sum_of_quad(sum[r]);
      weight[r] = sum_of_quad(weight[r]);
      if (lane % 4 == 0) {
        store_shared_float(shared.sum(consumer, row + 8 * r), sum[r]);
        store_shared_float(shared.weight(consumer, row + 8 * r), weight[r]);
      }
    }
    consumers_sync();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float total = load_shared_float(shared.sum(0, row + 8 * r)) + load_shared_float(shared.sum(1, row + 8 * r));
      const float rounded =
          load_shared_float(shared.weight(0, row + 8 * r)) + load_shared_float(shared.weight(1, row + 8 * r));
      inverse[r] = inverse_of_sum(rounded);
      lse[r] = log_sum_exp(maximum[r], total);
    }
    consumers_sync();  // the next segment overwrites the sums
  }

  __device__ __forceinline__ float4 eight_columns(int i) const {
    return {output[4 * i], output[4 * i + 1], output[4 * i + 2], output[4 * i + 3]};
  }

  __device__ __forceinline__ void write_piece(const Segment& segment, const float (&inverse)[2],
                                              const float (&lse)[2]) const {
    if (warp >= p.row_groups) return;
    const i64 piece = piece_index(p, tile, blockIdx.y, segment.slot);
    if (consumer == 0 && lane % 4 == 0)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        p.partial_rows[piece * p.row_groups * kRowGroup + row + 8 * r] = {lse[r], inverse[r]};
    float4* const to = p.partial_out + piece_offset<kValueDim, kShortLines>(p, piece, consumer, warp, 0, lane);
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
      store_short_unit(to + u * (kShortLines * 32), {eight_columns(u), eight_columns(u + kUnits),
                                                     eight_columns(u + 2 * kUnits), eight_columns(u + 3 * kUnits)});
  }

  // Adds the sinks of both rows, and stores their log-sum-exps.
  __device__ __forceinline__ void finish_rows(const Segment& segment, float (&scale)[2], float (&lse)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (Base::kHasSinks) take_sink(p, sink_of(p, tile, row + 8 * r), scale[r], lse[r]);
      if (consumer == 0 && lane % 4 == 0 && row + 8 * r < tile.rows)
        store_lse(p, tile, segment.request, Row(p, tile, row + 8 * r), lse[r]);
    }
  }
  // Stores every kUnits-th group of eight columns, times the rows' factors.
  __device__ __forceinline__ void write_unit(const Segment& segment, int u, const float4 (&unit)[kUnitGroups],
                                             const float (&scale)[2]) const {
#pragma unroll
    for (int j = 0; j < kUnitGroups; j += 2) {
      const int column = consumer * (kValueDim / 2) + 8 * (u + j * kUnits);
      const float4 &v = unit[j], &w = unit[j + 1];
      store_columns<T, 1, 8 * kUnits>(p, tile, segment.request, row, lane % 4, column, v.x * scale[0], v.y * scale[0],
                                      w.x * scale[0], w.y * scale[0]);
      store_columns<T, 1, 8 * kUnits>(p, tile, segment.request, row + 8, lane % 4, column, v.z * scale[1],
                                      v.w * scale[1], w.z * scale[1], w.w * scale[1]);
    }
  }

  // Adds up all partial results, of which the last is in registers, and stores out and log-sum-exp: in the order of
  // Joiner, and with its roundings. Weights are in the place of P, which is free then.
  __device__ __forceinline__ void add_up(const Segment& segment, const Pieces& pieces, const float (&inverse)[2],
                                         const float (&lse)[2]) {
    constexpr int kRowBytes = kRowTile * 8;
    static_assert((kMostPieces - 1) * 2 * kRowBytes <= kTileBytes, "weights in the place of P");
    const int others = min(pieces.count(segment), kMostPieces) - 1;
    const i64 first = piece_index(p, tile, blockIdx.y, 0);
    const int rows = p.row_groups * kRowGroup, group = min(warp, p.row_groups - 1);
    // As many units as the free stages hold are copied at once. A thread reads what it has copied.
    constexpr int kLineBytes = 2 * kWarpgroup * 16;
    constexpr int kRoom = Layout::kStages * Layout::kStageBytes / (kShortLines * kLineBytes);
    static_assert(kRoom >= kMostPieces - 1, "room for a unit of all partial results");
    const float4* const columns =
        p.partial_out + piece_offset<kValueDim, kShortLines>(p, first, consumer, group, 0, lane);
    const i64 apart = 2 * static_cast<i64>(rows) * (kValueDim * kShortLines / 16);
    const u32 copied = shared.stage(0) + (threadIdx.x - kWarpgroup) * 16;
    const int at_once = kRoom / max(others, 1);
    const auto copy = [&](int from) {
  #pragma unroll 1
      for (int u = from, to = 0; u < min(from + at_once, kUnits); ++u)
  #pragma unroll 1
        for (int i = 0; i < others; ++i, to += kShortLines)
  #pragma unroll
          for (int j = 0; j < kShortLines; ++j)
            copy_16_async(copied + (to + j) * kLineBytes, columns + i * apart + (u * kShortLines + j) * 32, true);
    };
    copy(0);
    const u32 weights = shared.probabilities + consumer * (kMostPieces - 1) * kRowBytes + row * 8;
    float highest[2] = {lse[0], lse[1]}, total[2] = {0.0f, 0.0f};
    {
      const float2* const of_rows = p.partial_rows + first * rows + group * kRowGroup + lane / 4;
      float2 found[2][2];
  #pragma unroll
      for (int k = 0; k < 2; ++k)
  #pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int i = lane % 4 + 4 * k;
          const float2* const from = of_rows + 2 * static_cast<i64>(max(min(i, others - 1), 0)) * rows + 8 * r;
          found[k][r] = {load_l2_float(&from->x), load_l2_float(&from->y)};
          highest[r] = fmaxf(highest[r], found[k][r].x);
        }
  #pragma unroll
      for (int r = 0; r < 2; ++r) highest[r] = max_of_quad(highest[r]);
  #pragma unroll
      for (int k = 0; k < 2; ++k)
  #pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float weight = weight_of(found[k][r].x, highest[r]);
          if (lane % 4 + 4 * k < others)
            store_shared_float2(weights + (lane % 4 + 4 * k) * kRowBytes + 64 * r, {weight, weight * found[k][r].y});
        }
      __syncwarp();
    }
    const float own[2] = {weight_of(lse[0], highest[0]), weight_of(lse[1], highest[1])};
  #pragma unroll 1
    for (int i = 0; i < others; ++i)
  #pragma unroll
      for (int r = 0; r < 2; ++r) total[r] += load_shared_float2(weights + i * kRowBytes + 64 * r).x;

    float scale[2], of_row[2];
  #pragma unroll
    for (int r = 0; r < 2; ++r) {
      total[r] += own[r];
      scale[r] = total[r] == 0.0f ? 0.0f : 1.0f / total[r];
      of_row[r] = log_sum_exp(highest[r], total[r]);
    }
    finish_rows(segment, scale, of_row);
    int next = 0;
    u32 line = copied;
  #pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (u == next) {
        if (u > 0) copy(u);
        copy_async_wait_all();
        next += at_once;
        line = copied;
      }
      float4 sums[kUnitGroups], unit[kUnitGroups];
  #pragma unroll
      for (int j = 0; j < kUnitGroups; ++j) sums[j] = {0.0f, 0.0f, 0.0f, 0.0f};
      const auto add = [&](float weight0, float weight1) {
        complete_short_unit(unit);
  #pragma unroll
        for (int j = 0; j < kUnitGroups; ++j) {
          sums[j].x += weight0 * unit[j].x;
          sums[j].y += weight0 * unit[j].y;
          sums[j].z += weight1 * unit[j].z;
          sums[j].w += weight1 * unit[j].w;
        }
      };
  #pragma unroll 1
      for (int i = 0; i < others; ++i) {
  #pragma unroll
        for (int j = 0; j < kShortLines; ++j) unit[j] = load_shared_float4(line + j * kLineBytes);
        line += kShortLines * kLineBytes;
        add(load_shared_float2(weights + i * kRowBytes).y, load_shared_float2(weights + i * kRowBytes + 64).y);
      }
  #pragma unroll
      for (int j = 0; j < kUnitGroups; ++j) unit[j] = eight_columns(u + j * kUnits);
      shorten_unit(unit);
      add(own[0] * inverse[0], own[1] * inverse[1]);
      write_unit(segment, u, sums, scale);
    }
  }
};

}  // namespace cumla::mla
