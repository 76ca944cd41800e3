// SPDX-License-Identifier: Apache-2.0
// Attention in float32 without tensor cores: one warp per query row. The keys of a row are added in their order.
//
// grid = (8 per place of the ragged schedule, 1, kv heads), 256 threads. CTA i of a place has 8 of its 64 rows. The
// schedule has one part, whose end is the number of places.
//
// Roles: each warp attends for one row. A lane has 4 columns in each group of 128, of query, keys and values.
//   time line of a warp: load 4 keys | scores by shuffles | new maximum | load 4 values | weigh and add | ... | store
// Barriers: none. Warps are independent; shuffles are the only exchange.
//
// Registers: query and output 32, four keys or values in flight 64. Shared memory: none.
#include "mha/attention/bias.cuh"
#include "mha/attention/layout.cuh"
#include "mha/attention/mask.cuh"
#include "split/output.cuh"
#include "split/plan.cuh"
#include "split/tile.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

using namespace ptx;
using namespace split;

constexpr int kWarps = 8;    // of a CTA
constexpr int kGroups = 4;   // of 128 columns
constexpr int kAtOnce = 4;   // keys loaded at once

// A lane's columns of a row; columns that do not exist are 0.
struct LaneColumns {
  float4 v[kGroups];

  __device__ __forceinline__ void load(const char* row, int columns) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int column = g * 128 + threadIdx.x % 32 * 4;
      v[g] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (row != nullptr && column < columns) v[g] = *reinterpret_cast<const float4*>(row + column * 4);
    }
  }
};

__device__ __forceinline__ float sum_of_warp(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

// Base-2 score of a key, in all lanes.
__device__ __forceinline__ float score_of(const AttentionParams& p, const LaneColumns& query, const LaneColumns& key) {
  float sum = 0.0f;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const float4 &a = query.v[g], &b = key.v[g];
    sum = __fmaf_rn(a.x, b.x, __fmaf_rn(a.y, b.y, __fmaf_rn(a.z, b.z, __fmaf_rn(a.w, b.w, sum))));
  }
  sum = sum_of_warp(sum);
  return (p.to_softcap == 0.0f ? sum : tanhf(sum * (p.to_softcap * (kLn2 / 2)))) * p.scale_log2;
}

__device__ __forceinline__ const char* row_in(const Columns& of, int page, int row) {
  if (page < 0) return nullptr;
  return of.base + page * of.stride_page + row * of.stride_row + blockIdx.z * of.stride_head;
}

// The keys that a query row sees: an interval, of which a mask may hide some.
template <typename Params>
struct RowKeys {
  Seen seen;

  __device__ __forceinline__ RowKeys(const Params& p, const RaggedTile& tile, const Segment& segment, int row)
      : seen(seen_by(p, tile, segment.tokens, row)) {}
  // The next keys; has() tells of each whether it is visible.
  __device__ __forceinline__ void move_to(int) {}
  __device__ __forceinline__ bool has(int key, int) const { return key < seen.end; }
};
template <>
struct RowKeys<MaskedParams> {
  const MaskedParams& p;
  const RequestMask of;
  const i64 query;
  const Seen interval;
  Seen seen;
  u64 visible;

  __device__ __forceinline__ RowKeys(const MaskedParams& p, const RaggedTile& tile, const Segment& segment, int row)
      : p(p), of(p, segment.request, tile.q_len, segment.tokens), query(tile.q_begin + own_token(p, tile, row)),
        interval(interval_of(p, tile, of, own_token(p, tile, row))), seen(keys_to_read(p, of, interval)) {}
  __device__ __forceinline__ void move_to(int first) { visible = visible_keys(p, of, interval, query, first); }
  __device__ __forceinline__ bool has(int key, int i) const { return key < seen.end && (visible >> i & 1); }
};

// One warp attends for a row of a tile, over its visible keys.
template <typename Params>
__device__ __forceinline__ void attend(const AttentionParams& p, const Params& all_params, const RaggedTile& tile,
                                       const Segment& segment, int row) {
  const Row from(p, tile, row);
  const TokenPlace at = place_of(p, 0, from.token);
  LaneColumns query, output;
  query.load(p.q + at.batch * p.q_stride_batch + at.token * p.q_stride_token + from.head * p.q_stride_head,
             p.key_columns);
  output.load(nullptr, 0);
  const float sink = p.sinks == nullptr ? -kInfinity : bounded_sink(p.sinks[from.head]);
  float maximum = -kInfinity, sum = 0.0f;
  RowKeys<Params> keys(all_params, tile, segment, row);
  RowBias<Params> bias;
  if constexpr (kHasBias<Params>) bias.begin(all_params, tile, segment.tokens, row);
#pragma unroll 1
  for (int first = keys.seen.first; first < keys.seen.end; first += kAtOnce) {
    keys.move_to(first);
    const char* values[kAtOnce];
    LaneColumns loaded[kAtOnce];
    float weight[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int of_page = 0;
      const int page = keys.has(first + i, i) ? page_of(p, tile, segment.tokens, first + i, of_page) : -1;
      loaded[i].load(row_in(p.keys, page, of_page), p.key_columns);
      values[i] = row_in(p.values, page, of_page);
    }
    float highest = maximum;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      weight[i] = keys.has(first + i, i) ? score_of(p, query, loaded[i]) : -kInfinity;
      if constexpr (kHasBias<Params>)
        if (keys.has(first + i, i)) weight[i] += bias.plus(bias.from(first + i), 0);
      highest = fmaxf(highest, weight[i]);
    }
    const float factor = maximum == -kInfinity ? 0.0f : exp2_approx(maximum - highest);
    maximum = highest;
    sum *= factor;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      float4& v = output.v[g];
      v = {v.x * factor, v.y * factor, v.z * factor, v.w * factor};
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) loaded[i].load(values[i], p.value_columns);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      // Only infinite keys give a score of -inf. Its weight is 0, also if the maximum is -inf.
      const float w = weight[i] == -kInfinity ? 0.0f : exp2_approx(weight[i] - maximum);
      sum += w;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const float4& value = loaded[i].v[g];
        float4& v = output.v[g];
        v = {__fmaf_rn(w, value.x, v.x), __fmaf_rn(w, value.y, v.y), __fmaf_rn(w, value.z, v.z),
             __fmaf_rn(w, value.w, v.w)};
      }
    }
  }
  float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  float lse = log_sum_exp(maximum, sum);
  take_sink(p, sink, inverse, lse);
  char* const out = row_of_out(p, tile, 0, row);
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int column = g * 128 + threadIdx.x % 32 * 4;
    const float4& v = output.v[g];
    if (!has_column(p, column)) continue;
    store_global_float4(out + column * 4, v.x * inverse, v.y * inverse, v.z * inverse, v.w * inverse);
  }
  if (threadIdx.x % 32 == 0) store_lse(p, tile, 0, from, lse);
}

template <typename Params>
__device__ __forceinline__ void attention_simt(const Params& all_params) {
  const AttentionParams& p = all_params;
  grid_dependency_launch();
  grid_dependency_wait();
  const int place = blockIdx.x / (kRowTile / kWarps);
  if (place >= min(max(p.parts_in[p.parts - 1].end_place, 0), p.batch)) return;
  const TilePlace at = reinterpret_cast<const TilePlace*>(p.places)[place];
  RaggedTile tile(p);
  tile.move_to(p, at);
  Segment segment = {};
  segment.tokens = min(static_cast<i64>(min(max(at.tokens, 0), kMaxTokens)), p.max_tokens);
  if (p.block_table == nullptr)  // no more rows than exist
    segment.tokens = min(static_cast<i64>(segment.tokens), max(p.page_entries - tile.pages, i64{0}));
  const int row = blockIdx.x % (kRowTile / kWarps) * kWarps + threadIdx.x / 32;
  if constexpr (kHasMask<Params>) segment.request = number_at(p, place);
  if (row < tile.rows) attend(p, all_params, tile, segment, row);
}

}  // namespace cumla::mha
