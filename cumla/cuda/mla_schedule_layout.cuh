// SPDX-License-Identifier: Apache-2.0
// What all ways to deal requests out share: parameters, where a part begins, sums over a thread block.
#pragma once
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
  Place* places;             // [batch]: the order, and the lengths this schedule was made for, none negative
  Part* parts_out;           // [parts]
  Ticket* tickets;           // [num_tickets]
  int batch;
  int parts;
  int num_tickets;
  int fixed_cost;  // of a request or a piece of one, in blocks
  int cut_cost;    // of cutting, in blocks: a second prologue, and pieces to join; what uneven parts may cost instead
  int piece_cost;  // of a piece, in blocks: to be stored, counted and joined
  int min_blocks;  // no cut of packed parts or of shares is closer to an end of its request
  int min_share;   // cost of a share, or blocks of a piece, at least
  int min_saving;  // in blocks: a request that has parts of its own is cut where that makes it so much shorter
  int max_tokens;  // of a request: the summed cost fits an int; batch-invariant, what there are parts for
  int piece_blocks;  // batch-invariant: requests are cut at multiples of it
};

__device__ __forceinline__ int length_of(const MlaScheduleParams& p, int request) {
  return min(max(p.cache_seqlens[request * p.cache_seqlens_stride], 0), p.max_tokens);
}

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

struct PartBound {
  int place, block, request, tokens;
};

__device__ __forceinline__ int divide(u64 numerator, u32 denominator) {
  if (numerator >> 32 == 0) return static_cast<u32>(numerator) / denominator;  // five times as fast
  return static_cast<int>(numerator / denominator);
}

}  // namespace cumla
