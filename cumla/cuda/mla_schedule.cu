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
static_assert(kScheduleWarps == 32, "a warp scans one value of each warp");
constexpr int kMaxParts = kScheduleThreads - 1;  // a thread each, and one for the end

struct MlaScheduleParams {
  const int* cache_seqlens;
  i64 cache_seqlens_stride;  // elements
  int* seqlens;              // [batch]: the lengths this schedule was made for, none negative
  Part* parts_out;           // [parts]
  Ticket* tickets;           // [num_tickets]
  int batch;
  int parts;
  int num_tickets;
  int fixed_cost;  // of a request or a piece of one, in blocks
  int cut_cost;    // of cutting, in blocks: second prologue and the merge
  int min_blocks;  // no piece is smaller
  int min_share;   // of cost: what a part is at least given
  int max_tokens;  // of a request: the summed cost fits an int
};

// Exclusive prefix sum of one value a thread; `total` is the sum over all threads.
__device__ __forceinline__ int block_exclusive_sum(int value, int* warp_sums, int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int inclusive = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, inclusive, offset);
    if (lane >= offset) inclusive += other;
  }
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  // Every warp scans the sums of all warps (there are 32) and takes what it needs.
  int warps = warp_sums[lane];
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, warps, offset);
    if (lane >= offset) warps += other;
  }
  total = __shfl_sync(0xffffffffu, warps, 31);
  const int before = warp == 0 ? 0 : __shfl_sync(0xffffffffu, warps, warp - 1);
  return before + inclusive - value;
}

__device__ __forceinline__ int block_max(int value, int* warp_values) {
  const int warp_value = __reduce_max_sync(0xffffffffu, value);
  if (threadIdx.x % 32 == 0) warp_values[threadIdx.x / 32] = warp_value;
  __syncthreads();
  return __reduce_max_sync(0xffffffffu, warp_values[threadIdx.x % 32]);
}

struct PartBound {
  int request, block, tokens;
};

__device__ __forceinline__ bool before(const PartBound& bound, int request, int block) {
  return bound.request < request || (bound.request == request && bound.block < block);
}

// The block at which a cut that falls `offset` cost units into a request really goes, in proportion and rounded: not
// closer than min_blocks to its ends, but before or behind it.
__device__ __forceinline__ int place_cut(const MlaScheduleParams& p, int blocks, int offset) {
  const u32 cost = blocks + p.fixed_cost;
  const u64 numerator = 2 * static_cast<u64>(offset) * blocks + cost;
  const bool small = numerator >> 32 == 0;  // a 64-bit division takes five times as long
  const int block = small ? static_cast<u32>(numerator) / (2 * cost) : static_cast<int>(numerator / (2 * cost));
  if (block < p.min_blocks) return 0;
  return blocks - block < p.min_blocks ? blocks : block;
}

// The first bound that is not before this place.
__device__ __forceinline__ int first_bound(const PartBound* bounds, int parts, int request, int block) {
  int low = 0, high = parts;  // the last bound is behind every request
  while (low < high) {
    const int middle = (low + high) / 2;
    if (before(bounds[middle], request, block))
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

__device__ void mla_schedule(const MlaScheduleParams& p) {
  __shared__ int warp_values[2][kScheduleWarps];
  __shared__ int group_starts[kMaxParts + 1];
  __shared__ int thread_starts[kScheduleThreads];
  __shared__ int thread_tokens[kScheduleThreads];  // of a thread's first request
  __shared__ PartBound bounds[kMaxParts + 1];

  const int thread = threadIdx.x;
  const int per_thread = (p.batch + kScheduleThreads - 1) / kScheduleThreads;
  const int begin = min(thread * per_thread, p.batch);
  const int end = min(begin + per_thread, p.batch);

  grid_dependency_launch();
  grid_dependency_wait();

  // A thread takes consecutive requests.
  int cost = 0, first_tokens = 0;
  for (int request = begin; request < end; ++request) {
    const int length = min(max(p.cache_seqlens[request * p.cache_seqlens_stride], 0), p.max_tokens);
    p.seqlens[request] = length;
    if (request == begin) first_tokens = length;
    cost += blocks_of(length) + p.fixed_cost;
  }
  for (int i = thread; i < p.num_tickets; i += kScheduleThreads) p.tickets[i] = {0, 0, 0, 0};
  int total;
  const int start = block_exclusive_sum(cost, warp_values[0], total);
  thread_starts[thread] = start;
  thread_tokens[thread] = first_tokens;

  // The price of dealing out whole requests: the dearest group of consecutive ones.
  const int group = (p.batch + p.parts - 1) / p.parts;
  const int groups = (p.batch + group - 1) / group;
  int position = start;
  for (int request = begin; request < end; ++request) {
    if (request % group == 0) group_starts[request / group] = position;
    position += blocks_of(request == begin ? first_tokens : p.seqlens[request]) + p.fixed_cost;
  }
  if (thread == 0) group_starts[groups] = total;
  __syncthreads();
  const int whole_price =
      block_max(thread < groups ? group_starts[thread + 1] - group_starts[thread] : 0, warp_values[1]);

  const int share = max((total + p.parts - 1) / p.parts, p.min_share);
  const bool whole = whole_price <= share + p.cut_cost;

  // Thread i places bound i, where part i begins. Cut i falls on cost i * share: first the thread whose requests it
  // hits, then the request.
  PartBound bound = {p.batch, 0, 0};
  const i64 target = static_cast<i64>(thread) * share;
  if (whole) {
    bound.request = min(thread * group, p.batch);
    if (thread < p.parts && bound.request < p.batch) bound.tokens = p.seqlens[bound.request];
  } else if (thread < p.parts && target < total) {
    int owner = 0;
#pragma unroll
    for (int step = kScheduleThreads / 2; step > 0; step /= 2)
      if (thread_starts[owner + step] <= target) owner += step;
    bound.request = owner * per_thread;
    int before = thread_starts[owner];
    bound.tokens = thread_tokens[owner];
    while (before + blocks_of(bound.tokens) + p.fixed_cost <= target) {
      before += blocks_of(bound.tokens) + p.fixed_cost;
      bound.tokens = p.seqlens[++bound.request];
    }
    const int blocks = blocks_of(bound.tokens);
    bound.block = place_cut(p, blocks, static_cast<int>(target) - before);
    if (bound.block == blocks && blocks > 0) {
      ++bound.request;
      bound.block = 0;
      bound.tokens = bound.request < p.batch ? p.seqlens[bound.request] : 0;
    }
  }
  if (thread <= p.parts) bounds[thread] = bound;
  __syncthreads();
  if (thread >= p.parts) return;

  const PartBound next = bounds[thread + 1];
  Part part = {bound.request, bound.block, bound.tokens, next.request, next.block, thread, thread, 0, thread, {}};
  if (!whole) {
    // Bounds that lie inside a request cut it: its first piece ends at the first of them, its last begins at the last.
    if (bound.block > 0) part.first_part = first_bound(bounds, p.parts, bound.request, 1) - 1;
    if (bound.block > 0 && bounds[part.first_part].request != bound.request) part.first_slot = 1;
    part.last_part = max(first_bound(bounds, p.parts, bound.request + 1, 0) - 1, thread);
    part.tail_last_part = max(first_bound(bounds, p.parts, next.request + 1, 0) - 1, thread);
  }
  p.parts_out[thread] = part;
}

}  // namespace cumla
