// SPDX-License-Identifier: Apache-2.0
// Finds the bin of a histogram that has the need-th key, in two steps: over the sums of the bins of each warp, then
// over the bins of one warp.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/convert.cuh"
#include "split/scan.cuh"
#include "sparse/top_k/layout.cuh"

namespace cumla::sparse {

constexpr u32 kAllLanes = 0xffffffffu;

// The shared-window address of a pass's counters.
__device__ __forceinline__ u32 counters_of(const TopKShared& head, int pass) {
  return copy_of(shared_address(head.histogram[pass]));
}

template <int kThreads>
__device__ __forceinline__ void clear_counters(TopKShared& head) {
  uint4* const counters = reinterpret_cast<uint4*>(head.histogram);
  constexpr int kQuads = sizeof(head.histogram) / sizeof(uint4);
#pragma unroll 1
  for (int i = threadIdx.x; i < kQuads; i += kThreads) counters[i] = {0, 0, 0, 0};
}

// The first lane whose inclusive sum reaches `need`.
__device__ __forceinline__ int lane_that_reaches(u32 inclusive, u32 need) {
  return max(__ffs(static_cast<int>(__ballot_sync(kAllLanes, inclusive >= need))) - 1, 0);
}

// Each warp adds up its bins. All threads must have counted.
template <int kThreads>
__device__ __forceinline__ void sum_bins(TopKShared& head, int pass) {
  constexpr int kOfWarp = kBins / (kThreads / 32), kOfLane = kOfWarp / 32;
  u32 sum = 0;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) sum += head.histogram[pass][threadIdx.x * kOfLane + i];
  sum = __reduce_add_sync(kAllLanes, sum);
  if (threadIdx.x % 32 == 0) head.coarse[pass][threadIdx.x / 32] = sum;
}

// Called by one warp, or by each for itself. `load` reads a counter of block `rank` of `cluster`.
template <int kThreads, typename Load>
__device__ __forceinline__ Found find_bin(const TopKShared& head, int pass, u32 need, int rank, int cluster,
                                          Load load) {
  constexpr int kWarps = kThreads / 32, kOfLane = kBins / kThreads;
  const int lane = threadIdx.x % 32;
  u32 sum = 0, lower = 0;
#pragma unroll 2
  for (int other = 0; other < cluster; ++other) {
    const u32 one = lane < kWarps ? load(head.coarse[pass][lane], other) : 0;
    sum += one;
    lower += other < rank ? one : 0;
  }
  u32 inclusive = split::warp_inclusive_sum(sum);
  const int warp = lane_that_reaches(inclusive, need);
  Found found;
  found.before = __shfl_sync(kAllLanes, inclusive - sum, warp);
  found.lower_before = __reduce_add_sync(kAllLanes, lane < warp ? lower : 0);

  const int first = warp * (kBins / kWarps) + lane * kOfLane;
  u32 bins[kOfLane] = {}, of_lower[kOfLane] = {};
#pragma unroll 2
  for (int other = 0; other < cluster; ++other) {
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const u32 one = load(head.histogram[pass][first + i], other);
      bins[i] += one;
      of_lower[i] += other < rank ? one : 0;
    }
  }
  sum = lower = 0;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) sum += bins[i], lower += of_lower[i];
  inclusive = split::warp_inclusive_sum(sum) + found.before;
  const int owner = lane_that_reaches(inclusive, need);
  u32 before = inclusive - sum, lower_before = 0, bin = 0, count = 0, lower_count = 0;
  bool is_found = false;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    if (!is_found) {
      bin = first + i, count = bins[i], lower_count = of_lower[i];
      is_found = before + bins[i] >= need;
      if (!is_found) before += bins[i], lower_before += of_lower[i];
    }
  }
  found.lower_before += __reduce_add_sync(kAllLanes, lane < owner ? lower : lane == owner ? lower_before : 0);
  found.bin = __shfl_sync(kAllLanes, bin, owner);
  found.before = __shfl_sync(kAllLanes, before, owner);
  found.count = __shfl_sync(kAllLanes, count, owner);
  found.lower_count = __shfl_sync(kAllLanes, lower_count, owner);
  return found;
}

// Finds the bin over this block's keys. Called by all threads, after counting.
template <int kThreads>
__device__ __forceinline__ Found find_in_block(TopKShared& head, int pass, u32 need) {
  __syncthreads();
  sum_bins<kThreads>(head, pass);
  __syncthreads();
  return find_bin<kThreads>(head, pass, need, 0, 1, [](const u32& counter, int) { return counter; });
}

// Finds the bin over the keys of all blocks of the cluster. One warp of each block reads the other blocks' counters.
template <int kThreads>
__device__ __forceinline__ Found find_in_cluster(TopKShared& head, int pass, u32 need, int rank, int cluster) {
  __syncthreads();
  sum_bins<kThreads>(head, pass);
  cluster_sync();
  if (threadIdx.x < 32) {
    const auto load = [](const u32& counter, int other) {
      return load_cluster_u32(shared_address_in(shared_address(&counter), other));
    };
    const Found found = find_bin<kThreads>(head, pass, need, rank, cluster, load);
    if (threadIdx.x == 0) head.found = found;
  }
  __syncthreads();
  return head.found;  // the next pass has barriers before it overwrites this
}

}  // namespace cumla::sparse
