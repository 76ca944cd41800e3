// SPDX-License-Identifier: Apache-2.0
// Adds up what all warps of a cluster have of a list, and stores it.
#pragma once
#include "attend/softmax.cuh"
#include "blocks/block_decode/layout.cuh"
#include "split/output.cuh"
#include "ptx/cluster.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

using namespace attend;

__device__ __forceinline__ float of_warp(float value, bool is_maximum) {
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, value, lanes);
    value = is_maximum ? fmaxf(value, other) : value + other;
  }
  return value;
}

// A warp adds up 64 columns of a head at a time; a lane has two of them. `rank` is the CTA's, of 2^cluster_log2.
template <typename T, int kWarps, typename Layout>
__device__ __forceinline__ void finish(const BlockDecodeParams& p, const Layout& shared, const List& list, int token,
                                       int rank) {
  constexpr int kHalf = kDecodeColumns / 2, kMost = (kWarps << 3) > 32 ? 2 : 1;  // warps that a lane looks after
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int ctas = 1 << p.cluster_log2, warps = kWarps << p.cluster_log2;
  const int request = quotient(token, p.by_tokens_apart), own = token - request * p.tokens_apart;
  const float of_values = p.value_scale.of(list.request, list.head);
  for (int item = rank * kWarps + warp; item < 2 * p.heads_per_group; item += warps) {
    const int row = item / 2, column = item % 2 * kHalf + 2 * lane, head = list.head * p.heads_per_group + row;
    float4 statistics[kMost];
    float highest = kLowest;
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      const int i = lane + 32 * k;
      statistics[k] = {kLowest, 0.0f, 0.0f, 0.0f};
      if (i < warps) statistics[k] = load_cluster_float4(shared_address_in(shared.statistics(i % kWarps, row), i / kWarps));
      highest = fmaxf(highest, statistics[k].x);
    }
    highest = of_warp(highest, true);
    float weight[kMost], total = 0.0f, rounded = 0.0f;
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      weight[k] = exp2_approx(statistics[k].x - highest);
      total += weight[k] * statistics[k].y;
      rounded += weight[k] * statistics[k].z;
    }
    total = of_warp(total, false);
    rounded = of_warp(rounded, false);
    float2 sum = {0.0f, 0.0f};
#pragma unroll 1
    for (int cta = 0; cta < ctas; ++cta) {
      const u32 there = shared_address_in(shared.sums(0, row) + column * 4, cta);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const int i = cta * kWarps + w;
        const float2 v = load_cluster_float2(there + w * Layout::kRingBytes);
        const float of = __shfl_sync(0xffffffffu, kMost > 1 && i >= 32 ? weight[kMost - 1] : weight[0], i % 32);
        sum.x += of * v.x;
        sum.y += of * v.y;
      }
    }
    float lse = log_sum_exp(highest, total), scale = inverse_of_sum(rounded);
    const float sink = p.sinks == nullptr ? -kInfinity : bounded_sink(p.sinks[head]);
    take_sink(p, sink, scale, lse);
    scale *= of_values;
    char* const out = p.out + request * p.out_stride_batch + own * p.out_stride_token + head * p.out_stride_head;
    if (column < p.value_columns) {
      if (p.out_is_float)
        store_global_float2(out + column * 4, sum.x * scale, sum.y * scale);
      else
        *reinterpret_cast<u32*>(out + column * 2) = pack_pair<T>(sum.x * scale, sum.y * scale);
    }
    if (item % 2 == 0 && lane == 0)
      p.lse[request * p.lse_stride_batch + head * p.lse_stride_head + own * p.lse_stride_token] =
          lse == -kInfinity ? lse : fabsf(lse) >= kMostSink && p.sinks != nullptr ? p.sinks[head] : lse * kLn2;
  }
}

}  // namespace cumla::blocks
