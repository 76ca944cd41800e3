// SPDX-License-Identifier: Apache-2.0
// Stores rows of out with their log-sum-exp, and partial results in the plan's buffer.
//
// Members that Params, the parameter struct of the kernel, must have:
//   out, out_stride_batch, out_stride_token, out_stride_head, out_is_float     strides in bytes
//   lse, lse_stride_batch, lse_stride_head, lse_stride_token                   strides in elements
//   empty_lse                                                                  the log-sum-exp of rows that see no key
//   sinks, sinks_stride, sink_in_lse                                           if the tile type has sinks
//   parts, row_groups                                                          the plan's
#pragma once
#include "split/tile.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/types.cuh"

namespace cumla::split {

using namespace ptx;

// Index of the partial result of a part and slot.
template <typename Params, typename AnyTile>
__device__ __forceinline__ i64 piece_index(const Params& p, const AnyTile& tile, int part, int slot) {
  return (static_cast<i64>(tile.index) * p.parts + part) * 2 + slot;
}

constexpr int kUnitGroups = 4;  // of eight columns, in a unit; one warp combines a unit

// Lines of 512 bytes in a unit. A short partial result has 24 bits per number, so four numbers take the room of three
// (docs/kernels/schedule.md). A short unit has every (kValueDim / 64)-th group of eight columns of a half, because
// lanes hold these together in all accumulator layouts. A long unit has four adjacent groups.
constexpr int kLongLines = kUnitGroups, kShortLines = 3;

// Offset of a lane's accumulators of a unit in a partial result, in float4; the lane's next line is 32 further on.
// Each consumer has half of the kValueDim columns.
// model: fp8_data
template <int kValueDim, int kLines, typename Params>
__device__ __forceinline__ i64 piece_offset(const Params& p, i64 piece, int consumer, int group, int unit, int lane) {
  static_assert(kValueDim % (16 * kUnitGroups) == 0, "half of the columns are whole units");
  return (((piece * 2 + consumer) * p.row_groups + group) * (kValueDim / 64) + unit) * (kLines * 32) + lane;
}

// Replaces the lowest byte of `number` by byte i + 1 of `other`. An infinity may become NaN.
// model: fp8_data
__device__ __forceinline__ float with_byte(float number, float other, int i) {
  return __uint_as_float(__byte_perm(__float_as_uint(number), __float_as_uint(other), 0x3215 + i));
}
// Returns the number whose upper three bytes are the lowest bytes of a, b and c. Its own lowest byte, which was not
// stored, becomes a copy of the next one.
// model: fp8_data
__device__ __forceinline__ float number_of_bytes(float a, float b, float c) {
  const u32 two = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x0400);
  return __uint_as_float(__byte_perm(two, __float_as_uint(c), 0x4210));
}

// Stores a lane's unit of a short partial result. The numbers of the last group go into the lowest bytes of the
// others, which readers leave there.
// model: fp8_data
__device__ __forceinline__ void store_short_unit(float4* to, const float4 (&v)[kUnitGroups]) {
  const float4& last = v[kShortLines];
#pragma unroll
  for (int i = 0; i < kShortLines; ++i)
    store_global_float4(to + 32 * i, with_byte(v[i].x, last.x, i), with_byte(v[i].y, last.y, i),
                        with_byte(v[i].z, last.z, i), with_byte(v[i].w, last.w, i));
}
// Restores the numbers of the last group.
// model: fp8_data
__device__ __forceinline__ void complete_short_unit(float4 (&v)[kUnitGroups]) {
  v[3] = {number_of_bytes(v[0].x, v[1].x, v[2].x), number_of_bytes(v[0].y, v[1].y, v[2].y),
          number_of_bytes(v[0].z, v[1].z, v[2].z), number_of_bytes(v[0].w, v[1].w, v[2].w)};
}

// The indices of a query token in q, out and lse.
struct TokenPlace {
  int batch, token;
};

// Overloaded for parameters whose arrays have an axis of requests over a RaggedTile.
template <typename Params>
__device__ __forceinline__ TokenPlace place_of(const Params&, int request, int token) { return {request, token}; }

// Overloaded where outputs can have fewer columns than the kernel.
template <typename Params>
__device__ __forceinline__ bool has_column(const Params&, int) { return true; }

// Base-2 log-sum-exp of a row from its maximum and its sum of weights; -inf if the row sees no key.
__device__ __forceinline__ float log_sum_exp(float maximum, float sum) {
  return sum == 0.0f ? -kInfinity : maximum + log2_approx(sum);
}

// The factor that normalises a row; 0 if the row sees no key.
__device__ __forceinline__ float inverse_of_sum(float sum) { return sum == 0.0f ? 0.0f : reciprocal_approx(sum); }

constexpr float kMostSink = 3e38f;  // bound of the magnitude of a sink, base 2

// Stores the natural log-sum-exp of a row. The conversion to base 2 clips the largest sinks; a row whose log-sum-exp
// is such a bound gets the sink itself.
template <typename Params, typename AnyTile>
__device__ __forceinline__ void store_lse(const Params& p, const AnyTile&, int request, const Row& to, float lse) {
  const TokenPlace at = place_of(p, request, to.token);
  float natural = lse == -kInfinity ? p.empty_lse : lse * kLn2;
  if constexpr (AnyTile::kHasSinks)
    if (p.sinks != nullptr && p.sink_in_lse && fabsf(lse) >= kMostSink && lse != -kInfinity)
      natural = p.sinks[to.head * p.sinks_stride];
  p.lse[at.batch * p.lse_stride_batch + to.head * p.lse_stride_head + at.token * p.lse_stride_token] = natural;
}

// Converts a sink to base 2, clipped to finite numbers, because differences of infinities are NaN. -inf means no
// sink.
__device__ __forceinline__ float bounded_sink(float sink) {
  const float log2 = sink * kLog2E;
  if (sink == -kInfinity) return sink;
  return log2 > kMostSink ? kMostSink : log2 < -kMostSink ? -kMostSink : log2;  // NaN stays NaN
}

// Base-2 sink of a row; -inf if it has none. The rows of a tile with sinks are heads of one token. Callers use it
// only under `if constexpr`: otherwise ptxas spills registers of kernels without sinks.
template <typename Params, typename AnyTile>
__device__ __forceinline__ float sink_of(const Params& p, const AnyTile& tile, int row) {
  if (p.sinks == nullptr || row >= tile.rows) return -kInfinity;
  return bounded_sink(p.sinks[(tile.first_row + row) * p.sinks_stride]);
}

// Adds the sink to the factor that normalises a finished row, and to its base-2 log-sum-exp. The largest sinks leave
// weight 0 for the values.
template <typename Params>
__device__ __forceinline__ void take_sink(const Params& p, float sink, float& scale, float& lse) {
  if (sink == -kInfinity) return;
  const float of_sink = exp2_approx(sink - lse);  // weight of the sink / sum of the other weights
  scale *= reciprocal_approx(1.0f + of_sink);
  if (p.sink_in_lse) lse = fmaxf(lse, sink) + log2_approx(1.0f + exp2_approx(-fabsf(sink - lse)));
}

template <typename Params, typename AnyTile>
__device__ __forceinline__ char* row_of_out(const Params& p, const AnyTile& tile, int request, int row) {
  const Row to(p, tile, row);
  const TokenPlace at = place_of(p, request, to.token);
  return p.out + at.batch * p.out_stride_batch + at.token * p.out_stride_token + to.head * p.out_stride_head;
}

// Two lanes kApart exchange words: the first lane gets both `first` words, the second lane both `second` words.
template <int kApart>
__device__ __forceinline__ uint2 trade(bool is_second, u32 first, u32 second) {
  const u32 received = __shfl_xor_sync(0xffffffffu, is_second ? first : second, kApart);
  return {is_second ? received : first, is_second ? second : received};
}

// A quad of lanes stores 16 columns of a row. Each lane has a, b at column 2 quad_lane, and c, d kLater columns
// later. With 16 bits, lanes kNeighbour apart exchange words: eight bytes per lane, and full sectors of 32 bytes if
// the columns are adjacent.
template <typename T, int kNeighbour, int kLater = 8, typename Params, typename AnyTile>
__device__ __forceinline__ void store_columns(const Params& p, const AnyTile& tile, int request, int row,
                                              int quad_lane, int column, float a, float b, float c, float d) {
  const bool exists = row < tile.rows, odd = quad_lane % 2;
  char* const out = row_of_out(p, tile, request, row);
  if (p.out_is_float) {
    float* const destination = reinterpret_cast<float*>(out) + column + quad_lane * 2;
    if (exists && has_column(p, column)) store_global_float2(destination, a, b);
    if (exists && has_column(p, column + kLater)) store_global_float2(destination + kLater, c, d);
  } else {
    const uint2 words = trade<kNeighbour>(odd, pack_pair<T>(a, b), pack_pair<T>(c, d));
    char* const destination = out + (column + (odd ? kLater + (quad_lane - 1) * 2 : quad_lane * 2)) * 2;
    if (exists && has_column(p, column + (odd ? kLater : 0)))
      store_global_8(destination, words.x, words.y);
  }
}

}  // namespace cumla::split
