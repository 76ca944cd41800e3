// SPDX-License-Identifier: Apache-2.0
// Adds up what all warps of a cluster have of a list, and stores it: each CTA some of the heads.
#pragma once
#include "attend/softmax.cuh"
#include "blocks/block_attention_few/compute.cuh"
#include "blocks/block_attention_few/layout.cuh"
#include "split/output.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cluster_async.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

using namespace attend;

// By a warp: the sum of partial results of a head, of which each lane has four columns.
struct HeadSum {
  float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
  float maximum, total, rounded;
  float weight;  // of the partial result with the lane's number, modulo 16

  // statistics: of up to 16 partial results, one after the other.
  __device__ __forceinline__ void weigh(u32 statistics, int apart, int count) {
    const int i = threadIdx.x % kFewPartials;
    float4 own = {kLowest, 0.0f, 0.0f, 0.0f};
    if (i < count) own = load_shared_float4(statistics + i * apart);
    maximum = own.x;
#pragma unroll
    for (int other = 1; other < kFewPartials; other *= 2)
      maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, other));
    weight = exp2_approx(own.x - maximum);
    total = weight * own.y;
    rounded = weight * own.z;
#pragma unroll
    for (int other = 1; other < kFewPartials; other *= 2) {
      total += __shfl_xor_sync(0xffffffffu, total, other);
      rounded += __shfl_xor_sync(0xffffffffu, rounded, other);
    }
  }
  __device__ __forceinline__ void add(int i, u32 sums) {
    const float4 of = load_shared_float4(sums);
    const float by = __shfl_sync(0xffffffffu, weight, i);
    v.x += by * of.x;
    v.y += by * of.y;
    v.z += by * of.z;
    v.w += by * of.w;
  }
};

template <typename Layout>
__device__ __forceinline__ void add_warps(const BlockAttentionFewParams& p, const Layout& shared, int warp, int rank) {
  const int lane = threadIdx.x % 32, each = kDecodeRows >> p.cluster_log2;  // heads of a CTA
#pragma unroll 1
  for (int row = warp; row < p.heads_per_group; row += Layout::kWarps) {
    HeadSum sum;
    sum.weigh(shared.statistics(0, row), Layout::kStatisticsBytes, Layout::kWarps);
#pragma unroll
    for (int w = 0; w < Layout::kWarps; ++w) sum.add(w, shared.sums(w, row) + lane * 16);
    const int owner = row & (1 << p.cluster_log2) - 1, at = rank * each + (row >> p.cluster_log2);
    const u32 full = shared_address_in(shared.full(), owner);
    store_cluster_async(shared_address_in(shared.box(at) + lane * 16, owner), sum.v, full);
    if (lane == 0)
      store_cluster_async(shared_address_in(shared.box_statistics(at), owner),
                          {sum.maximum, sum.total, sum.rounded, 0.0f}, full);
  }
}

template <typename T, bool kE4m3, typename Layout>
__device__ __forceinline__ void add_ctas(const BlockAttentionFewParams& p, const Layout& shared,
                                         int token, int head, int warp, int rank, float of_values) {
  const int lane = threadIdx.x % 32, ctas = 1 << p.cluster_log2, each = kDecodeRows >> p.cluster_log2;
  const int column = FewAttender<T, kE4m3, false, Layout>::column_at(lane);
  const int request = quotient(token, p.by_tokens_apart), own = token - request * p.tokens_apart;
#pragma unroll 1
  for (int i = warp; i < each; i += Layout::kWarps) {
    const int row = rank + (i << p.cluster_log2);
    if (row >= p.heads_per_group) break;
    mbarrier_wait(shared.full(), 0, "the sums of a cluster");
    HeadSum sum;
    sum.weigh(shared.box_statistics(i), each * 16, ctas);
#pragma unroll 4
    for (int c = 0; c < ctas; ++c) sum.add(c, shared.box(c * each + i) + lane * 16);
    const int of_row = head * p.heads_per_group + row;
    float lse = log_sum_exp(sum.maximum, sum.total), scale = inverse_of_sum(sum.rounded);
    const bool has_sink = p.sinks != nullptr;
    if (has_sink) take_sink(p, bounded_sink(p.sinks[of_row]), scale, lse);
    scale *= of_values;
    const float a = sum.v.x * scale, b = sum.v.y * scale, c = sum.v.z * scale, d = sum.v.w * scale;
    char* const out = p.out + request * p.out_stride_batch + own * p.out_stride_token + of_row * p.out_stride_head;
    if (p.out_is_float)
      store_global_float4(out + column * 4, a, b, c, d);
    else
      store_global_8(out + column * 2, pack_pair<T>(a, b), pack_pair<T>(c, d));
    if (lane == 0) {
      float natural = lse == -kInfinity ? lse : lse * kLn2;
      if (has_sink && fabsf(lse) >= kMostSink && lse != -kInfinity) natural = p.sinks[of_row];
      p.lse[request * p.lse_stride_batch + of_row * p.lse_stride_head + own * p.lse_stride_token] = natural;
    }
  }
}

}  // namespace cumla::blocks
