// SPDX-License-Identifier: Apache-2.0
// The output of attention kernels: rows of out and their log-sum-exp, pieces of them in a plan's buffer.
//
// Params is the parameter struct of the kernel. These members of it are used here:
//   out, out_stride_batch, out_stride_token, out_stride_head, out_is_float     strides in bytes
//   lse, lse_stride_batch, lse_stride_head, lse_stride_token                   strides in elements
//   empty_lse                                                                  where nothing is visible
//   sinks, sinks_stride, sink_in_lse                                           where tiles have sinks
//   parts, row_groups                                                          of the plan
#pragma once
#include "split/tile.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/types.cuh"

namespace cumla::split {

using namespace ptx;

// Number of the piece that a part leaves in a slot.
template <typename Params, typename AnyTile>
__device__ __forceinline__ i64 piece_index(const Params& p, const AnyTile& tile, int part, int slot) {
  return (static_cast<i64>(tile.index) * p.parts + part) * 2 + slot;
}

constexpr int kUnitGroups = 4;  // of eight columns in a unit, which one warp joins

// Lines of 512 bytes in a unit. Numbers of a short piece have 24 bits: four take the place of three
// (docs/kernels/schedule.md). In a short unit every (kValueDim / 64)-th eight of a half comes together: lanes have them in
// all layouts of accumulators. Other units have four eights after each other.
constexpr int kLongLines = kUnitGroups, kShortLines = 3;

// Where a lane's accumulators of a unit of a row group lie in a piece, in units of four; its next line is 32 further
// on. Each of two consumers has half of the kValueDim columns.
// model: fp8_data
template <int kValueDim, int kLines, typename Params>
__device__ __forceinline__ i64 piece_offset(const Params& p, i64 piece, int consumer, int group, int unit, int lane) {
  static_assert(kValueDim % (16 * kUnitGroups) == 0, "half of the columns are whole units");
  return (((piece * 2 + consumer) * p.row_groups + group) * (kValueDim / 64) + unit) * (kLines * 32) + lane;
}

// A number with byte `i` + 1 of another one in the place of its lowest byte. An infinity may become NaN.
// model: fp8_data
__device__ __forceinline__ float with_byte(float number, float other, int i) {
  return __uint_as_float(__byte_perm(__float_as_uint(number), __float_as_uint(other), 0x3215 + i));
}
// The number whose bytes three others hold. The lowest one, which is lost, is the next one once more.
// model: fp8_data
__device__ __forceinline__ float number_of_bytes(float a, float b, float c) {
  const u32 two = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x0400);
  return __uint_as_float(__byte_perm(two, __float_as_uint(c), 0x4210));
}

// Stores what a lane has of a unit of a short piece: of each of its eights four numbers. Those of the last one lie in
// the lowest bytes of the others, which are loaded as they are.
// model: fp8_data
__device__ __forceinline__ void store_short_unit(float4* to, const float4 (&v)[kUnitGroups]) {
  const float4& last = v[kShortLines];
#pragma unroll
  for (int i = 0; i < kShortLines; ++i)
    store_global_float4(to + 32 * i, with_byte(v[i].x, last.x, i), with_byte(v[i].y, last.y, i),
                        with_byte(v[i].z, last.z, i), with_byte(v[i].w, last.w, i));
}
// The last one's numbers again.
// model: fp8_data
__device__ __forceinline__ void complete_short_unit(float4 (&v)[kUnitGroups]) {
  v[3] = {number_of_bytes(v[0].x, v[1].x, v[2].x), number_of_bytes(v[0].y, v[1].y, v[2].y),
          number_of_bytes(v[0].z, v[1].z, v[2].z), number_of_bytes(v[0].w, v[1].w, v[2].w)};
}

// Where a token lies in q, out and lse.
struct TokenPlace {
  int batch, token;
};

// A family whose arrays have an axis of requests over a RaggedTile has an overload of this for its parameters.
template <typename Params>
__device__ __forceinline__ TokenPlace place_of(const Params&, int request, int token) { return {request, token}; }

// A family whose outputs are narrower than the columns of its kernels has an overload of this.
template <typename Params>
__device__ __forceinline__ bool has_column(const Params&, int) { return true; }

// The log-sum-exp of a row, base 2, from its maximum and the sum of its weights; -inf of a row that sees no key.
__device__ __forceinline__ float log_sum_exp(float maximum, float sum) {
  return sum == 0.0f ? -kInfinity : maximum + log2_approx(sum);
}

// What the output of a row is multiplied by; 0 of a row that sees no key.
__device__ __forceinline__ float inverse_of_sum(float sum) { return sum == 0.0f ? 0.0f : reciprocal_approx(sum); }

constexpr float kMostSink = 3e38f;  // base 2, and without the sign

// A row's log-sum-exp, base 2, as the caller gets it. One that only a sink can have is that sink: base 2 has no numbers
// for the highest ones.
template <typename Params, typename AnyTile>
__device__ __forceinline__ void store_lse(const Params& p, const AnyTile&, int request, const Row& to, float lse) {
  const TokenPlace at = place_of(p, request, to.token);
  float natural = lse == -kInfinity ? p.empty_lse : lse * kLn2;
  if constexpr (AnyTile::kHasSinks)
    if (p.sinks != nullptr && p.sink_in_lse && fabsf(lse) >= kMostSink && lse != -kInfinity)
      natural = p.sinks[to.head * p.sinks_stride];
  p.lse[at.batch * p.lse_stride_batch + to.head * p.lse_stride_head + at.token * p.lse_stride_token] = natural;
}

// A sink in base 2, or the finite number next to it: differences of infinities would be NaN. -inf is no sink.
__device__ __forceinline__ float bounded_sink(float sink) {
  const float log2 = sink * kLog2E;
  if (sink == -kInfinity) return sink;
  return log2 > kMostSink ? kMostSink : log2 < -kMostSink ? -kMostSink : log2;  // NaN stays NaN
}

// The sink of a row, base 2; -inf if there is none. Rows of a tile that has sinks are heads of one token. Callers keep
// the text for other tiles as it is without sinks: ptxas spills registers of some kernels otherwise.
template <typename Params, typename AnyTile>
__device__ __forceinline__ float sink_of(const Params& p, const AnyTile& tile, int row) {
  if (p.sinks == nullptr || row >= tile.rows) return -kInfinity;
  return bounded_sink(p.sinks[(tile.first_row + row) * p.sinks_stride]);
}

// Takes the sink of a whole row into what its output is multiplied by, and its log-sum-exp, base 2. The highest sinks
// leave no weight to values.
template <typename Params>
__device__ __forceinline__ void take_sink(const Params& p, float sink, float& scale, float& lse) {
  if (sink == -kInfinity) return;
  const float of_sink = exp2_approx(sink - lse);  // as a multiple of the sum of the values' weights
  scale *= reciprocal_approx(1.0f + of_sink);
  if (p.sink_in_lse) lse = fmaxf(lse, sink) + log2_approx(1.0f + exp2_approx(-fabsf(sink - lse)));
}

template <typename Params, typename AnyTile>
__device__ __forceinline__ char* row_of_out(const Params& p, const AnyTile& tile, int request, int row) {
  const Row to(p, tile, row);
  const TokenPlace at = place_of(p, request, to.token);
  return p.out + at.batch * p.out_stride_batch + at.token * p.out_stride_token + to.head * p.out_stride_head;
}

// Two lanes, kApart, trade: the first one has both first words then, the second one both second words.
template <int kApart>
__device__ __forceinline__ uint2 trade(bool is_second, u32 first, u32 second) {
  const u32 received = __shfl_xor_sync(0xffffffffu, is_second ? first : second, kApart);
  return {is_second ? received : first, is_second ? second : received};
}

// A quad of lanes stores 16 columns of a row, each lane a, b at 2 quad_lane and c, d kLater columns later. In 16 bits
// lanes trade with their neighbour, kNeighbour apart: eight bytes a lane, full 32-byte sectors if the columns adjoin.
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
