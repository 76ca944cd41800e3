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
constexpr int kMaxParts = kScheduleThreads - 1;  // a thread each, and one for the end

struct MlaScheduleParams {
  const int* cache_seqlens;
  i64 cache_seqlens_stride;  // elements
  int* seqlens;              // [batch]: the lengths this schedule was made for, none negative
  PartBound* bounds;         // [parts + 1]
  SplitRequest* splits;      // [parts], num_splits of them used
  int* num_splits;
  int batch;
  int parts;
  int fixed_cost;  // of a request or a piece of one, in blocks
  int cut_cost;    // of cutting, in blocks: second prologue and the merge
  int min_blocks;  // no piece is smaller
  int min_share;   // of cost: what a part is at least given
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

// Where a cut that falls `offset` cost units into a request really goes, in proportion and rounded: not closer than
// min_blocks to its ends, but before or behind it.
__device__ __forceinline__ PartBound place_cut(const MlaScheduleParams& p, int request, int blocks, i64 offset) {
  const i64 cost = blocks + p.fixed_cost;
  const i64 block = (2 * offset * blocks + cost) / (2 * cost);
  if (block < p.min_blocks) return {request, 0};
  if (blocks - block < p.min_blocks) return {request + 1, 0};
  return {request, static_cast<int>(block)};
}

__device__ void mla_schedule(const MlaScheduleParams& p) {
  __shared__ i64 warp_values[3][kScheduleWarps];
  __shared__ i64 group_starts[kMaxParts + 1];
  __shared__ i64 thread_starts[kScheduleThreads];
  __shared__ PartBound bounds[kMaxParts + 1];

  grid_dependency_launch();
  grid_dependency_wait();

  if (threadIdx.x < p.parts) p.splits[threadIdx.x] = {-1, 0, 0, 0};  // mla_merge looks at unused ones, too

  // A thread takes consecutive requests.
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
  i64 position = block_exclusive_sum(cost, warp_values[0], total);
  thread_starts[thread] = position;

  // The price of dealing out whole requests: the dearest group of consecutive ones.
  const int group = (p.batch + p.parts - 1) / p.parts;
  const int groups = (p.batch + group - 1) / group;
  for (int request = begin; request < end; ++request) {
    if (request % group == 0) group_starts[request / group] = position;
    position += blocks_of(p.seqlens[request]) + p.fixed_cost;
  }
  if (thread == 0) {
    group_starts[groups] = total;
    *p.num_splits = 0;
  }
  __syncthreads();
  const i64 whole_price =
      block_max(thread < groups ? group_starts[thread + 1] - group_starts[thread] : 0, warp_values[1]);

  i64 share = (total + p.parts - 1) / p.parts;
  share = max(share, static_cast<i64>(p.min_share));
  if (whole_price <= share + p.cut_cost) {
    if (thread <= p.parts) p.bounds[thread] = {min(thread * group, p.batch), 0};
    return;
  }

  // Thread i places cut i, which falls on cost i * share: first the thread whose requests it hits, then the request.
  PartBound bound = {p.batch, 0};
  const i64 target = thread * share;
  if (thread < p.parts && target < total) {
    int owner = 0;
#pragma unroll
    for (int step = kScheduleThreads / 2; step > 0; step /= 2)
      if (thread_starts[owner + step] <= target) owner += step;
    int request = owner * per_thread;
    i64 start = thread_starts[owner];
    int blocks = blocks_of(p.seqlens[request]);
    while (start + blocks + p.fixed_cost <= target) {
      start += blocks + p.fixed_cost;
      blocks = blocks_of(p.seqlens[++request]);
    }
    bound = thread == 0 ? PartBound{0, 0} : place_cut(p, request, blocks, target - start);
  }
  if (thread <= p.parts) {
    bounds[thread] = bound;
    p.bounds[thread] = bound;
  }
  __syncthreads();

  // A request with cuts inside it is split; its first cut gives it a number, its last cut its last part.
  const bool inside = thread < p.parts && bound.block > 0;
  const bool first = inside && !(bounds[thread - 1].block > 0 && bounds[thread - 1].request == bound.request);
  const bool last = inside && !(bounds[thread + 1].block > 0 && bounds[thread + 1].request == bound.request);
  i64 splits;
  const int before = static_cast<int>(block_exclusive_sum(first, warp_values[2], splits));
  SplitRequest* split = p.splits + before - (first ? 0 : 1);
  if (first) {
    split->request = bound.request;
    split->first_part = thread - 1;
    split->first_slot = bounds[thread - 1].request == bound.request ? 0 : 1;
  }
  if (last) split->last_part = thread;
  if (thread == 0) *p.num_splits = static_cast<int>(splits);
}

}  // namespace cumla
