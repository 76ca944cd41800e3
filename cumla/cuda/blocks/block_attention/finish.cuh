// SPDX-License-Identifier: Apache-2.0
// Adds up what all warps of a cluster have of a list, and stores it.
#pragma once
#include "attend/softmax.cuh"
#include "blocks/block_attention/layout.cuh"
#include "split/output.cuh"
#include "ptx/cluster.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

using namespace attend;

// Partial results of a row, relative to the largest maximum.
struct RowSum {
  float4 v = {0.0f, 0.0f, 0.0f, 0.0f};  // four columns
  float maximum = kLowest, total = 0.0f, rounded = 0.0f;
  float weights[16];  // of up to sixteen partial results

  template <int kCount>
  __device__ __forceinline__ void weigh(const float4 (&statistics)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) maximum = fmaxf(maximum, statistics[i].x);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      weights[i] = exp2_approx(statistics[i].x - maximum);
      total += weights[i] * statistics[i].y;
      rounded += weights[i] * statistics[i].z;
    }
  }
  template <int kCount>
  __device__ __forceinline__ void add(const float4 (&sums)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      v.x += weights[i] * sums[i].x;
      v.y += weights[i] * sums[i].y;
      v.z += weights[i] * sums[i].z;
      v.w += weights[i] * sums[i].w;
    }
  }
};

// Where a row's result is stored, and its LSE.
template <typename T>
struct RowOut {
  const BlockAttentionParams& p;
  char* out;
  float* lse;
  float scale, natural;

  __device__ __forceinline__ RowOut(const BlockAttentionParams& p, const RowSum& sum, int token, int head, int row,
                                    float of_values)
      : p(p) {
    const int request = quotient(token, p.by_tokens_apart), own = token - request * p.tokens_apart;
    const int of_row = head * p.heads_per_group + row;
    float of_sum = log_sum_exp(sum.maximum, sum.total);
    scale = inverse_of_sum(sum.rounded);
    const bool has_sink = p.sinks != nullptr;
    if (has_sink) take_sink(p, bounded_sink(p.sinks[of_row]), scale, of_sum);
    scale *= of_values;
    natural = of_sum == -kInfinity ? of_sum : of_sum * kLn2;
    if (has_sink && fabsf(of_sum) >= kMostSink && of_sum != -kInfinity) natural = p.sinks[of_row];
    out = p.out + request * p.out_stride_batch + own * p.out_stride_token + of_row * p.out_stride_head;
    lse = p.lse + (request * p.lse_stride_batch + of_row * p.lse_stride_head + own * p.lse_stride_token);
  }
  // Stores four columns, and the LSE with the first ones.
  __device__ __forceinline__ void store(const float4& v, int column) const {
    const float a = v.x * scale, b = v.y * scale, c = v.z * scale, d = v.w * scale;
    if (column < p.value_columns) {
      if (p.out_is_float)
        store_global_float4(out + column * 4, a, b, c, d);
      else
        store_global_8(out + column * 2, pack_pair<T>(a, b), pack_pair<T>(c, d));
    }
    if (column == 0) *lse = natural;
  }
};

// Threads of a row add it up over the CTA's warps, all rows and columns at once. They store the result or, if this is a
// part of the list, the sums.
template <typename T, typename Layout>
__device__ __forceinline__ void add_warps(const BlockAttentionParams& p, const Layout& shared, int token, int head,
                                          float of_values, bool is_part) {
  constexpr int kWarps = Layout::kWarps, kLanes = 32 * kWarps / kDecodeRows, kAll = Layout::kColumns / 4 / kLanes;
  constexpr int kEach = kAll * kWarps <= 16 ? kAll : kAll % 4 == 0 ? 4 : 3;  // that are added up at once
  static_assert(kAll % kEach == 0, "no other");
  const int quad = threadIdx.x % kLanes, row = threadIdx.x / kLanes;
  float4 statistics[kWarps];
#pragma unroll
  for (int w = 0; w < kWarps; ++w) statistics[w] = load_shared_float4(shared.statistics(w, row));
#pragma unroll 1
  for (int first = 0; first < kAll; first += kEach) {
    const int from = quad + first * kLanes;
    float4 sums[kEach][kWarps], v[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i)
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sums[i][w] = load_shared_float4(shared.sums(w, row) + (from + i * kLanes) * 16);
    RowSum sum;
    sum.weigh(statistics);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      sum.v = {0.0f, 0.0f, 0.0f, 0.0f};
      sum.add(sums[i]);
      v[i] = sum.v;
    }
    if (is_part) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) store_shared_float4(shared.sums(0, row) + (from + i * kLanes) * 16, v[i]);
      if (from == 0)
        store_shared_float4(shared.statistics(kWarps, row), {sum.maximum, sum.total, sum.rounded, 0.0f});
    } else if (row < p.heads_per_group) {
      const RowOut<T> to(p, sum, token, head, row, of_values);
#pragma unroll
      for (int i = 0; i < kEach; ++i) to.store(v[i], (from + i * kLanes) * 4);
    }
  }
}

// The same over the CTAs of a cluster, of which each has some rows: a warp adds up 128 columns.
template <typename T, typename Layout>
__device__ __forceinline__ void add_ctas(const BlockAttentionClusterParams& p, const Layout& shared, int token,
                                         int head, int rank, float of_values) {
  constexpr int kWarps = Layout::kWarps, kMost = Layout::kMostCtas, kParts = (Layout::kColumns + 127) / 128;
  const int ctas = p.cluster;
#pragma unroll 1
  for (int row = rank + threadIdx.x / 32 / kParts * ctas; row < p.heads_per_group; row += kWarps / kParts * ctas)
#pragma unroll
    for (int column = threadIdx.x % (32 * kParts) * 4; column < Layout::kColumns; column += 128 * kParts) {
      float4 statistics[kMost], sums[kMost];
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        statistics[i] = {kLowest, 0.0f, 0.0f, 0.0f};
        sums[i] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (i >= ctas) continue;
        statistics[i] = load_cluster_float4(shared_address_in(shared.statistics(kWarps, row), i));
        sums[i] = load_cluster_float4(shared_address_in(shared.sums(0, row) + column * 4, i));
      }
      RowSum sum;
      sum.weigh(statistics);
      sum.add(sums);
      RowOut<T>(p, sum, token, head, row, of_values).store(sum.v, column);
    }
}

}  // namespace cumla::blocks
