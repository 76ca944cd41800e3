// SPDX-License-Identifier: Apache-2.0
// Who works on which KV blocks: one CTA, parallel over the batch. See mla_plan.cuh for the terms.
//
// A request costs its number of blocks + fixed_cost. Two ways to deal the requests out are priced:
//   whole: ceil(batch / parts) consecutive requests to a part, no request cut;
//   split: equal shares of the summed cost, cut wherever a share ends.
// The cheaper one is taken; cumla/launch/mla_schedule.py holds the same arithmetic in NumPy, as its oracle.
#include "mla_plan.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla {

constexpr int kScheduleThreads = 1024;
constexpr int kScheduleWarps = kScheduleThreads / 32;
constexpr int kMaxParts = 1024;

struct MlaScheduleParams {
  const int* cache_seqlens;
  i64 cache_seqlens_stride;  // elements
  int* seqlens;              // [batch]: the lengths this schedule was made for, none negative
  PartBound* bounds;         // [parts + 1]
  SplitRequest* splits;      // [parts]
  int batch;
  int parts;
  int fixed_cost;  // of a request or a piece of one, in blocks
  int cut_cost;    // of cutting, in blocks: second prologue and the merge
  int min_blocks;  // no piece is smaller
};

// Exclusive prefix sum of one 64-bit value a thread; `total` is the sum over all threads.
__device__ __forceinline__ i64 block_exclusive_sum(i64 value, i64* warp_sums, i64& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  i64 inclusive = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const i64 other = __shfl_up_sync(0xffffffffu, inclusive, offset);
    if (lane >= offset) inclusive += other;
  }
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  i64 before = 0;
  total = 0;
#pragma unroll
  for (int i = 0; i < kScheduleWarps; ++i) {
    if (i < warp) before += warp_sums[i];
    total += warp_sums[i];
  }
  return before + inclusive - value;
}

__device__ __forceinline__ i64 block_max(i64 value, i64* warp_values) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const i64 other = __shfl_xor_sync(0xffffffffu, value, offset);
    if (other > value) value = other;
  }
  if (lane == 0) warp_values[warp] = value;
  __syncthreads();
  i64 result = warp_values[0];
#pragma unroll
  for (int i = 1; i < kScheduleWarps; ++i)
    if (warp_values[i] > result) result = warp_values[i];
  return result;
}

__device__ __forceinline__ int scheduled_length(const MlaScheduleParams& p, int request) {
  const int length = p.cache_seqlens[request * p.cache_seqlens_stride];
  return min(max(length, 0), kMaxTokens);
}

// Where a cut that falls `offset` cost units into a request of `blocks` blocks really goes, in proportion and rounded:
// block 0 means before the request, block == blocks behind it.
__device__ __forceinline__ int cut_block(const MlaScheduleParams& p, i64 offset, int blocks) {
  const i64 cost = blocks + p.fixed_cost;
  const i64 block = (2 * offset * blocks + cost) / (2 * cost);
  if (block < p.min_blocks) return 0;
  if (blocks - block < p.min_blocks) return blocks;
  return static_cast<int>(block);
}

__device__ void mla_schedule(const MlaScheduleParams& p) {
  __shared__ i64 warp_sums[kScheduleWarps];
  __shared__ i64 warp_maxima[kScheduleWarps];
  __shared__ i64 group_starts[kMaxParts + 1];

  grid_dependency_launch();
  grid_dependency_wait();

  const int thread = threadIdx.x;
  const int per_thread = (p.batch + kScheduleThreads - 1) / kScheduleThreads;
  const int begin = min(thread * per_thread, p.batch);
  const int end = min(begin + per_thread, p.batch);

  i64 cost = 0;
  for (int request = begin; request < end; ++request) {
    const int length = scheduled_length(p, request);
    p.seqlens[request] = length;
    cost += blocks_of(length) + p.fixed_cost;
  }
  i64 total;
  const i64 start = block_exclusive_sum(cost, warp_sums, total);

  // The price of dealing out whole requests: the dearest group of `group` consecutive requests.
  const int group = (p.batch + p.parts - 1) / p.parts;
  const int groups = (p.batch + group - 1) / group;
  i64 position = start;
  for (int request = begin; request < end; ++request) {
    if (request % group == 0) group_starts[request / group] = position;
    position += blocks_of(p.seqlens[request]) + p.fixed_cost;
  }
  if (thread == 0) group_starts[groups] = total;
  if (thread < p.parts) p.splits[thread] = {-1, 0, 0, 0};
  __syncthreads();
  const i64 whole_price =
      block_max(thread < groups ? group_starts[thread + 1] - group_starts[thread] : 0, warp_maxima);

  i64 share = (total + p.parts - 1) / p.parts;
  share = max(share, static_cast<i64>(p.min_blocks + p.fixed_cost));

  if (whole_price <= share + p.cut_cost) {
    if (thread <= p.parts) p.bounds[thread] = {min(thread * group, p.batch), 0};
    return;
  }

  // Cut number i falls on cost i * share; each thread places the cuts that fall into its requests.
  if (thread == 0) p.bounds[0] = {0, 0};
  position = start;
  for (int request = begin; request < end; ++request) {
    const int blocks = blocks_of(p.seqlens[request]);
    const i64 next = position + blocks + p.fixed_cost;
    int first_cut = 0, last_cut = 0;
    for (i64 cut = (position + share - 1) / share; cut < p.parts && cut * share < next; ++cut) {
      if (cut == 0) continue;
      const int block = cut_block(p, cut * share - position, blocks);
      const bool behind = block == blocks;
      p.bounds[cut] = {request + (behind ? 1 : 0), behind ? 0 : block};
      if (block > 0 && !behind) {
        if (first_cut == 0) first_cut = static_cast<int>(cut);
        last_cut = static_cast<int>(cut);
      }
    }
    if (first_cut > 0) p.splits[first_cut] = {request, first_cut - 1, last_cut, 0};
    position = next;
  }
  // Cuts behind the last request: those parts have nothing to do.
  for (i64 cut = (total + share - 1) / share + thread; cut <= p.parts; cut += kScheduleThreads)
    p.bounds[cut] = {p.batch, 0};
  if (thread == 0) p.bounds[p.parts] = {p.batch, 0};
}

}  // namespace cumla
