// SPDX-License-Identifier: Apache-2.0
// Parts from where they begin, and sums over a thread block: what the schedules of dense attention share.
#pragma once
#include "split/plan.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla {

constexpr int kScheduleThreads = 1024;
constexpr int kScheduleWarps = kScheduleThreads / 32;
static_assert(kScheduleWarps == 32, "a warp scans one value of each warp");
constexpr int kMaxParts = kScheduleThreads - 1;  // a thread each, and one for the end

// Inclusive prefix sum of one value a lane.
template <typename Value>
__device__ __forceinline__ Value warp_inclusive_sum(Value value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const Value other = __shfl_up_sync(0xffffffffu, value, offset);
    if (lane >= offset) value += other;
  }
  return value;
}

// Exclusive prefix sum of one value a thread; `total` is the sum over all threads.
template <typename Value>
__device__ __forceinline__ Value block_exclusive_sum(Value value, Value* warp_sums, Value& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Value inclusive = warp_inclusive_sum(value);
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  // Every warp scans the sums of all warps (there are 32) and takes what it needs.
  const Value warps = warp_inclusive_sum(warp_sums[lane]);
  total = __shfl_sync(0xffffffffu, warps, 31);
  const Value before = warp == 0 ? 0 : __shfl_sync(0xffffffffu, warps, warp - 1);
  return before + inclusive - value;
}

struct PartBound {
  int place, block, request, tokens;
};

// Bounds first ... last that cut the same request.
struct Run {
  int first, last;
};

// A part between two bounds. Bounds that lie inside a request cut it: its first piece ends at the first of them, its last
// begins at the last.
__device__ __forceinline__ Part part_of(const PartBound* bounds, const Run* runs, int index) {
  const PartBound bound = bounds[index], next = bounds[index + 1];
  Part part = {bound.place, bound.block, bound.request, bound.tokens, next.place, next.block, index, index, 0,
               index,       {}};
  if (bound.block > 0) {
    const Run run = runs[index];
    part.first_part = run.first - 1;
    part.last_part = run.last;
    part.first_slot = bounds[run.first - 1].place == bound.place ? 0 : 1;
  }
  if (next.block > 0) {
    part.tail_last_part = runs[index + 1].last;
    if (next.place == bound.place) part.last_part = part.tail_last_part;
  }
  return part;
}

}  // namespace cumla
