// SPDX-License-Identifier: Apache-2.0
// The end of a row tile in a consumer of attention: sums and outputs of both consumers, sinks, (partial) result.
#pragma once
#include "mha/attention/compute.cuh"
#include "attend/reduce.cuh"
#include "split/join.cuh"
#include "split/output.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

// a * x + b * y, each product rounded: so the sum does not depend on which consumer has which blocks, as it follows
// from where a window begins.
__device__ __forceinline__ float both(float a, float x, float b, float y) {
  return __fadd_rn(__fmul_rn(a, x), __fmul_rn(b, y));
}

// Address of a group of eight columns in the half that goes to consumer `to`.
template <typename T, int kKeyTiles, int kValueTiles, bool kCopied, bool kScaled, typename Params>
__device__ __forceinline__ u32 Consumer<T, kKeyTiles, kValueTiles, kCopied, kScaled, Params>::exchanged(
    int to, int j) const {
  return shared.exchange() + ((to * kHalf + j) * kWarpgroup + threadIdx.x % kWarpgroup) * 16;
}

// Sinks are added last: relative to a large sink, 16-bit weights would lose bits.
template <typename T, int kKeyTiles, int kValueTiles, bool kCopied, bool kScaled, typename Params>
__device__ __forceinline__ void Consumer<T, kKeyTiles, kValueTiles, kCopied, kScaled, Params>::finish(
    const Segment& segment, bool more) {
  float sink[2];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if constexpr (kLoadsSinks)
      sink[r] = bounded_sink(natural_sink[r]);
    else
      sink[r] = sink_of(p, tile, segment, row + 8 * r);
    sum[r] = sum_of_quad(sum[r]);
    weight[r] = sum_of_quad(weight[r]);
    if (!Layout::kSeesAll && lane % 4 == 0) {
      store_shared_float(shared.of_row(consumer, 0, row + 8 * r), maximum[r]);
      store_shared_float(shared.of_row(consumer, 1, row + 8 * r), sum[r]);
      store_shared_float(shared.of_row(consumer, 2, row + 8 * r), weight[r]);
    }
  }
  if constexpr (kPaired) {
    finish_head(segment, sink);
    return;
  }
  if constexpr (kFew) {
    finish_few(segment, sink, more);
    return;
  }
  float lse[2], half[kHalf * 4];
  if constexpr (kDivided)
    normalise(half, lse, sink);
  else
    exchange(half, lse, sink);
  if (segment.split()) {
    write_piece(segment, consumer, half, lse);
    // Hazard: the other consumer may still read stages that converting threads wrote for it (kScaled). So each
    // consumer combines in a stage of its own.
    constexpr bool kOwnStages = kScaled && Layout::kBuffers > 1;
    constexpr int kStageBytes = Layout::kKeyBytes + Layout::kValueBytes;
    constexpr int kSpace = kOwnStages ? kStageBytes / 4 : Layout::kBuffers * kStageBytes / kJoinWarps;
    const u32 more_pieces = kOwnStages ? shared.keys(1) : shared.keys(0) + 4 * kSpace;
    Joiner<T, kValueTiles * 64, kSpace, false, CommonOf<Params>, Tile>(
        p, {shared.words(), shared.exchange(), shared.exchange() + 8192, shared.keys(0), more_pieces}, tile, segment)
        .join(more);
  } else {
    write_result(segment, consumer, half, lse);
  }
}

// kDivided: each consumer has the sums of all blocks.
template <typename T, int kKeyTiles, int kValueTiles, bool kCopied, bool kScaled, typename Params>
__device__ __forceinline__ void Consumer<T, kKeyTiles, kValueTiles, kCopied, kScaled, Params>::normalise(
    float (&half)[kHalf * 4], float (&lse)[2], const float (&sink)[2]) const {
  static_assert(!kScaled, "values have no factors here");
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float inverse = inverse_of_sum(weight[r]);
    lse[r] = log_sum_exp(maximum[r], sum[r]);
    take_sink(p, sink[r], inverse, lse[r]);
#pragma unroll
    for (int j = 0; j < kHalf; ++j)
#pragma unroll
      for (int e = 2 * r; e < 2 * r + 2; ++e) half[4 * j + e] = output[4 * j + e] * inverse;
  }
}

// kPaired: each consumer has the sums of its head. Of a split tile the one that stores its piece last combines all.
template <typename T, int kKeyTiles, int kValueTiles, bool kCopied, bool kScaled, typename Params>
__device__ __forceinline__ void Consumer<T, kKeyTiles, kValueTiles, kCopied, kScaled, Params>::finish_head(
    const Segment& segment, const float (&sink)[2]) {
  float lse[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float inverse = inverse_of_sum(weight[r]);
    lse[r] = log_sum_exp(maximum[r], sum[r]);
    take_sink(p, sink[r], inverse, lse[r]);
#pragma unroll
    for (int i = 2 * r; i < kGroups * 4; i += 4) {
      output[i] *= inverse;
      output[i + 1] *= inverse;
    }
  }
  if (segment.split()) {
    for_halves([&](int own, const float (&half)[kHalf * 4]) { write_piece(segment, own, half, lse); });
    if (!is_last_piece(segment)) return;
    combine_pieces(segment, lse);
  }
  for_halves([&](int own, const float (&half)[kHalf * 4]) { write_result(segment, own, half, lse); });
}

// True if all other pieces of the tile are stored. The ticket is that of split/plan.cuh; nobody waits.
template <typename T, int kKeyTiles, int kValueTiles, bool kCopied, bool kScaled, typename Params>
__device__ __forceinline__ bool Consumer<T, kKeyTiles, kValueTiles, kCopied, kScaled, Params>::is_last_piece(
    const Segment& segment) const {
  constexpr u32 kAll = 1u << 31;
  const u32 word = shared.words() + consumer * 8;
  meet();
  if (threadIdx.x % kWarpgroup == 0) {
    const u32 step = segment.first_part == blockIdx.y ? kAll - (segment.last_part - segment.first_part) : 1;
    Ticket* const ticket = p.tickets + static_cast<i64>(tile.index) * p.parts + segment.first_part;
    const u32 before = atomic_add_acq_rel(&ticket->arrived, step);
    store_shared_u32(word, (before + step ^ before) & kAll);
  }
  meet();
  return load_shared_u32(word) != 0;
}

// Adds up all pieces in their order, so the result is the same whoever is last.
template <typename T, int kKeyTiles, int kValueTiles, bool kCopied, bool kScaled, typename Params>
__device__ __forceinline__ void Consumer<T, kKeyTiles, kValueTiles, kCopied, kScaled, Params>::combine_pieces(
    const Segment& segment, float (&lse)[2]) {
  if (warp >= p.row_groups) return;
  const int pieces = segment.last_part - segment.first_part + 1;
  const i64 base = piece_index(p, tile, segment.first_part, 0);
  const auto index_of = [&](int i) { return base + (i == 0 ? segment.first_slot : 2 * i); };
  // kAtOnce are asked for together: each takes as long as all. Those that do not exist have weight 0.
  constexpr int kAtOnce = 4;
  const auto load = [&](int first, float2 (&lse_of)[kAtOnce]) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const float2* const rows = p.partial_rows + index_of(min(first + k, pieces - 1)) * p.row_groups * kRowGroup + row;
      lse_of[k] = {load_l2_float(&rows[0].x), load_l2_float(&rows[8].x)};
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      if (first + k >= pieces) lse_of[k] = {-kInfinity, -kInfinity};
  };
  float2 lse_of[kAtOnce];
  float highest[2] = {-kInfinity, -kInfinity}, total[2] = {0.0f, 0.0f};
#pragma unroll 1
  for (int first = 0; first < pieces; first += kAtOnce) {
    load(first, lse_of);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      highest[0] = fmaxf(highest[0], lse_of[k].x);
      highest[1] = fmaxf(highest[1], lse_of[k].y);
    }
  }
#pragma unroll
  for (int k = 0; k < kGroups * 4; ++k) output[k] = 0.0f;
#pragma unroll 1
  for (int first = 0; first < pieces; first += kAtOnce) {
    if (pieces > kAtOnce) load(first, lse_of);
#pragma unroll 1
    for (int k = 0; k < min(kAtOnce, pieces - first); ++k) {
      const float weights[2] = {weight_of(lse_of[0].x, highest[0]), weight_of(lse_of[0].y, highest[1])};
#pragma unroll
      for (int i = 1; i < kAtOnce; ++i) lse_of[i - 1] = lse_of[i];
#pragma unroll
      for (int r = 0; r < 2; ++r) total[r] += weights[r];
      const float4* const from =
          p.partial_out + piece_offset<kValueTiles * 64, kLongLines>(p, index_of(first + k), 0, warp, 0, lane);
      const i64 apart = piece_offset<kValueTiles * 64, kLongLines>(p, 0, 1, 0, 0, 0);
      float4 v[2 * kHalf];
#pragma unroll
      for (int j = 0; j < 2 * kHalf; ++j) v[j] = load_l2_float4(from + (j / kHalf) * apart + 32 * (j % kHalf));
#pragma unroll
      for (int j = 0; j < 2 * kHalf; ++j) {
        float* const sums = output + j * 4;
        sums[0] += weights[0] * v[j].x;
        sums[1] += weights[0] * v[j].y;
        sums[2] += weights[1] * v[j].z;
        sums[3] += weights[1] * v[j].w;
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    lse[r] = log_sum_exp(highest[r], total[r]);
    const float inverse = inverse_of_sum(total[r]);
#pragma unroll
    for (int k = 2 * r; k < kGroups * 4; k += 4) {
      output[k] *= inverse;
      output[k + 1] *= inverse;
    }
  }
}

// Otherwise consumers exchange halves of their outputs, and add them.
template <typename T, int kKeyTiles, int kValueTiles, bool kCopied, bool kScaled, typename Params>
__device__ __forceinline__ void Consumer<T, kKeyTiles, kValueTiles, kCopied, kScaled, Params>::exchange(
    float (&half)[kHalf * 4], float (&lse)[2], const float (&sink)[2]) const {
#pragma unroll
  for (int j = 0; j < kHalf; ++j) {
    float4 v;
    v.x = consumer == 0 ? output[4 * (kHalf + j)] : output[4 * j];
    v.y = consumer == 0 ? output[4 * (kHalf + j) + 1] : output[4 * j + 1];
    v.z = consumer == 0 ? output[4 * (kHalf + j) + 2] : output[4 * j + 2];
    v.w = consumer == 0 ? output[4 * (kHalf + j) + 3] : output[4 * j + 3];
    store_shared_float4(exchanged(1 - consumer, j), v);
  }
  consumers_sync();
  float own[2], other[2], inverse[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float theirs = load_shared_float(shared.of_row(1 - consumer, 0, row + 8 * r));
    const float highest = fmaxf(maximum[r], theirs);
    own[r] = exp2_approx(maximum[r] - highest);
    other[r] = exp2_approx(theirs - highest);
    const float total =
        both(own[r], sum[r], other[r], load_shared_float(shared.of_row(1 - consumer, 1, row + 8 * r)));
    const float rounded =
        both(own[r], weight[r], other[r], load_shared_float(shared.of_row(1 - consumer, 2, row + 8 * r)));
    inverse[r] = inverse_of_sum(rounded);
    if constexpr (kScaled) inverse[r] *= value_factor;
    lse[r] = log_sum_exp(highest, total);
    take_sink(p, sink[r], inverse[r], lse[r]);
  }
#pragma unroll
  for (int j = 0; j < kHalf; ++j) {
    const float4 v = load_shared_float4(exchanged(consumer, j));
    const float theirs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float mine = consumer == 0 ? output[4 * j + e] : output[4 * (kHalf + j) + e];
      half[4 * j + e] = both(own[e >> 1], mine, other[e >> 1], theirs[e]) * inverse[e >> 1];
    }
  }
  consumers_sync();  // the next tile, and combining, overwrite the exchange
}

template <typename T, int kKeyTiles, int kValueTiles, bool kCopied, bool kScaled, typename Params>
__device__ __forceinline__ void Consumer<T, kKeyTiles, kValueTiles, kCopied, kScaled, Params>::write_piece(
    const Segment& segment, int own, const float (&half)[kHalf * 4], const float (&lse)[2]) const {
  if (warp >= p.row_groups) return;
  const i64 piece = piece_index(p, tile, blockIdx.y, segment.slot);
  if (own == 0 && lane % 4 == 0) {
    p.partial_rows[piece * p.row_groups * kRowGroup + row] = {lse[0], 1.0f};
    p.partial_rows[piece * p.row_groups * kRowGroup + row + 8] = {lse[1], 1.0f};
  }
  float4* const destination =
      p.partial_out + piece_offset<kValueTiles * 64, kLongLines>(p, piece, own, warp, 0, lane);
#pragma unroll
  for (int j = 0; j < kHalf; ++j)
    store_global_float4(destination + 32 * j, half[4 * j], half[4 * j + 1], half[4 * j + 2], half[4 * j + 3]);
}

template <typename T, int kKeyTiles, int kValueTiles, bool kCopied, bool kScaled, typename Params>
__device__ __forceinline__ void Consumer<T, kKeyTiles, kValueTiles, kCopied, kScaled, Params>::write_result(
    const Segment& segment, int own, const float (&half)[kHalf * 4], const float (&lse)[2]) const {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (!has_rows(r)) return;
    if (row + 8 * r < tile.rows && own == 0 && lane % 4 == 0)
      store_lse(p, tile, segment.request, Row(p, tile, row + 8 * r), lse[r]);
#pragma unroll
    for (int j = 0; j < kHalf; j += 2)
      store_columns<T, 1>(p, tile, segment.request, row + 8 * r, lane % 4,
                          ((kPaired ? own : consumer) * kHalf + j) * 8, half[4 * j + 2 * r], half[4 * j + 2 * r + 1],
                          half[4 * j + 4 + 2 * r], half[4 * j + 5 + 2 * r]);
  }
}

}  // namespace cumla::mha
