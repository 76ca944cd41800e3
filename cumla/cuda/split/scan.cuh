// SPDX-License-Identifier: Apache-2.0
// Prefix sums over a warp and over a CTA of 1,024 threads, for all schedules.
#pragma once

namespace cumla::split {

constexpr int kScheduleThreads = 1024;
constexpr int kScheduleWarps = kScheduleThreads / 32;
static_assert(kScheduleWarps == 32, "a warp scans one value of each warp");

// Inclusive prefix sum of one value per lane.
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

// Exclusive prefix sum of one value per thread; `total` is the sum over all threads.
template <typename Value>
__device__ __forceinline__ Value block_exclusive_sum(Value value, Value* warp_sums, Value& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Value inclusive = warp_inclusive_sum(value);
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  // Each warp scans the sums of all 32 warps for itself.
  const Value warps = warp_inclusive_sum(warp_sums[lane]);
  total = __shfl_sync(0xffffffffu, warps, 31);
  const Value before = warp == 0 ? 0 : __shfl_sync(0xffffffffu, warps, warp - 1);
  return before + inclusive - value;
}

}  // namespace cumla::split
