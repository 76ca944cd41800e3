// SPDX-License-Identifier: Apache-2.0
// Combines what query tokens got of their prefix and of their rest, and adds the sinks.
//
// grid = (rows / 8), 256 threads. A warp has a row, one head of one token.
//
// Time line of a warp:
//   what the token attends to | load both log-sum-exps, the sink and four columns per lane | weights | store | ...
// Rows of tokens that no request has are not written.
// Barriers: none. Warps share nothing.
// Budget: 64 registers per thread, no shared memory.
#include "split/division.cuh"
#include "split/output.cuh"
#include "split/prefixes.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::split {

using namespace ptx;

constexpr int kCombineThreads = 256;
constexpr int kCombineRows = kCombineThreads / 32;

enum CombinedType : int { kCombinedFloat32, kCombinedBfloat16, kCombinedFloat16 };

struct CombinePrefixesParams {
  const float4* partial_out;  // [2, tokens, heads, columns / 4]: of prefixes, then of rests
  const float* partial_lse;   // [2, tokens, heads]
  const int* states;          // [tokens]: PrefixState
  char* out;
  i64 out_stride_batch, out_stride_token, out_stride_head;  // in bytes
  float* lse;
  i64 lse_stride_batch, lse_stride_head, lse_stride_token;  // in elements
  const float* sinks;                                       // [heads]; null: none
  i64 rows;                                                 // tokens x heads
  int tokens_apart;  // tokens per request if out and lse have an axis of requests, else 0
  int columns;       // a multiple of 4
  int out_type;
  Divisor by_heads, by_tokens_apart;
  int heads;
};

// The weight of a log-sum-exp relative to the largest; 0 if nothing is visible.
__device__ __forceinline__ float relative_weight(float lse, float maximum) {
  return lse == -kInfinity ? 0.0f : exp2_approx((lse - maximum) * kLog2E);
}

// A sink clipped to finite numbers, because differences of infinities are NaN; -inf means no sink, NaN stays NaN.
__device__ __forceinline__ float finite_sink(float sink) {
  if (sink == -kInfinity) return sink;
  return sink > kMostSink ? kMostSink : sink < -kMostSink ? -kMostSink : sink;
}

__device__ __forceinline__ void store_quad(const CombinePrefixesParams& p, char* row, int quad, const float4& v) {
  if (p.out_type == kCombinedFloat32) {
    store_global_float4(reinterpret_cast<float4*>(row) + quad, v.x, v.y, v.z, v.w);
  } else if (p.out_type == kCombinedBfloat16) {
    store_global_8(row + quad * 8, pack_pair<Bf16>(v.x, v.y), pack_pair<Bf16>(v.z, v.w));
  } else {
    store_global_8(row + quad * 8, pack_pair<Fp16>(v.x, v.y), pack_pair<Fp16>(v.z, v.w));
  }
}

__device__ __forceinline__ void combine_prefixes(const CombinePrefixesParams& p) {
  const int lane = threadIdx.x % 32, quads = p.columns / 4;
  const i64 row = i64{blockIdx.x} * kCombineRows + threadIdx.x / 32;
  grid_dependency_launch();
  if (row >= p.rows) return;
  const int token = quotient(static_cast<u32>(row), p.by_heads), head = static_cast<int>(row - i64{token} * p.heads);
  grid_dependency_wait();
  const int state = p.states[token];
  if (state == kNoRequest) return;
  const bool has_prefix = state == kPrefixAndRest;
  const float of_rest = p.partial_lse[p.rows + row];
  const float of_prefix = has_prefix ? p.partial_lse[row] : -kInfinity;
  const float sink = p.sinks == nullptr ? -kInfinity : p.sinks[head];
  const float bounded = finite_sink(sink);
  const float maximum = fmaxf(fmaxf(of_rest, of_prefix), bounded);
  const float rest = relative_weight(of_rest, maximum), prefix = relative_weight(of_prefix, maximum);
  const float sum = rest + prefix + relative_weight(bounded, maximum);
  const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;

  const int request = quotient(token, p.by_tokens_apart);  // 0 if tokens_apart is 0
  const i64 own = token - i64{request} * p.tokens_apart;
  char* const out = p.out + request * p.out_stride_batch + own * p.out_stride_token + head * p.out_stride_head;
#pragma unroll 1
  for (int quad = lane; quad < quads; quad += 32) {
    float4 v = {0.0f, 0.0f, 0.0f, 0.0f}, other = v;
    if (has_prefix) other = p.partial_out[row * quads + quad];
    if (rest != 0.0f) v = p.partial_out[(p.rows + row) * quads + quad];
    if (prefix == 0.0f) other = {0.0f, 0.0f, 0.0f, 0.0f};
    v = {(v.x * rest + other.x * prefix) * factor, (v.y * rest + other.y * prefix) * factor,
         (v.z * rest + other.z * prefix) * factor, (v.w * rest + other.w * prefix) * factor};
    store_quad(p, out, quad, v);
  }
  if (lane != 0) return;
  float lse = sum == 0.0f ? -kInfinity : maximum + log2_approx(sum) * kLn2;
  if (fabsf(lse) >= kMostSink && lse != -kInfinity) lse = sink;
  p.lse[request * p.lse_stride_batch + head * p.lse_stride_head + own * p.lse_stride_token] = lse;
}

}  // namespace cumla::split
