// SPDX-License-Identifier: Apache-2.0
// Paged MLA attention of chosen query rows in float64, straight from the definition: what the benchmark holds its
// timed kernels against. grid = rows, 256 threads; 256 tokens at a time, a warp a token for the scores, a thread a
// token for the weights, a thread two columns for the sums. Pages of 64.
#include "ptx/convert.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla {

using namespace ptx;

constexpr int kThreads = 256;  // also the tokens of a chunk, and half the value columns
constexpr int kHeadDim = 576;
constexpr int kValueDim = 512;
constexpr int kPageTokens = 64;
constexpr int kPerLane = kHeadDim / 32;

struct AttendRowsParams {
  const unsigned short* q;   // (batch, q_len, heads, 576), contiguous
  const unsigned short* kv;  // (pages, 64, kv_heads, 576), contiguous
  const int* block_table;
  i64 block_table_stride;  // elements
  const int* seqlens;
  const int* rows;  // (rows, 3): request, token, head
  double* out;      // (rows, 512)
  double* lse;      // (rows,)
  double scale;
  int q_len, heads, kv_heads, causal;
};

// One 16-bit number: the other half of the pair is 0.
template <typename T>
__device__ __forceinline__ double widen(u32 bits) {
  return static_cast<double>(sum_of_pair<T>(bits));
}

__device__ __forceinline__ double sum_of_warp(double value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

template <typename T>
__device__ __forceinline__ void attend_rows(const AttendRowsParams& p) {
  __shared__ double scores[kThreads];
  __shared__ double weights[kThreads];
  grid_dependency_wait();
  const int request = p.rows[3 * blockIdx.x], token = p.rows[3 * blockIdx.x + 1], head = p.rows[3 * blockIdx.x + 2];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int visible = p.seqlens[request] - (p.causal ? p.q_len - 1 - token : 0);
  const int kv_head = head / (p.heads / p.kv_heads);
  const int* pages = p.block_table + request * p.block_table_stride;
  const auto row_of = [&](int t) {
    const i64 slot = static_cast<i64>(pages[t / kPageTokens]) * kPageTokens + t % kPageTokens;
    return p.kv + (slot * p.kv_heads + kv_head) * kHeadDim;
  };

  double query[kPerLane];
  const unsigned short* q = p.q + ((static_cast<i64>(request) * p.q_len + token) * p.heads + head) * kHeadDim;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) query[i] = widen<T>(q[lane + 32 * i]);

  double highest = -1e300, total = 0.0, out[2] = {0.0, 0.0};
  for (int begin = 0; begin < visible; begin += kThreads) {
    const int count = min(kThreads, visible - begin);
    for (int t = warp; t < count; t += kThreads / 32) {
      const unsigned short* key = row_of(begin + t);
      double product = 0.0;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) product += query[i] * widen<T>(key[lane + 32 * i]);
      product = sum_of_warp(product);
      if (lane == 0) scores[t] = product * p.scale;
    }
    __syncthreads();
    double next = highest;
    for (int t = 0; t < count; ++t) next = fmax(next, scores[t]);
    const int own = threadIdx.x;
    weights[own] = own < count ? exp(scores[own] - next) : 0.0;
    const double factor = exp(highest - next);
    __syncthreads();
    highest = next;
    total *= factor;
    out[0] *= factor;
    out[1] *= factor;
    for (int t = 0; t < count; ++t) {
      const u32 pair = reinterpret_cast<const u32*>(row_of(begin + t))[threadIdx.x];
      total += weights[t];
      out[0] += weights[t] * widen<T>(pair & 0xffffu);
      out[1] += weights[t] * widen<T>(pair >> 16);
    }
    __syncthreads();
  }

  const bool empty = visible <= 0;
  double* destination = p.out + static_cast<i64>(blockIdx.x) * kValueDim + 2 * threadIdx.x;
  destination[0] = empty ? 0.0 : out[0] / total;
  destination[1] = empty ? 0.0 : out[1] / total;
  if (threadIdx.x == 0) p.lse[blockIdx.x] = empty ? -static_cast<double>(kInfinity) : highest + log(total);
}

}  // namespace cumla
