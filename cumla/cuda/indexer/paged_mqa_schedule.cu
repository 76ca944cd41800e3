// SPDX-License-Identifier: Apache-2.0
// Assigns the blocks of 64 tokens of all requests to parts, one per CTA of paged_mqa_logits, as contiguous ranges.
//
// A request costs its blocks, and one more for its query. All parts cost the same, within one: part i begins where
// the summed cost reaches i / parts of the total. tests/launch/indexer/paged_mqa_schedule_mirror.py is its oracle in
// NumPy.
//
// Roles: one CTA, with about a thread per request, at most 1,024. A thread has consecutive requests, then some of the
// parts.
//   time line: read lengths, sum up costs | B | prefix sums | B | find the bounds of the parts
// Barriers: B is __syncthreads of all threads; it guards the sums of the warps, then `starts`. There are no
// mbarriers.
// Budget: 8,448 B of shared memory with 1,024 threads.
#include "indexer/paged_mqa_plan.cuh"
#include "split/scan.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::indexer {

using namespace ptx;
using namespace split;

struct PagedMqaScheduleParams {
  KvLens kv_lens;
  Place* bounds;  // [parts + 1]
  int* kept;      // [batch] or [batch, q_len]: copies of the lengths for paged_mqa_logits; null: no copies
  int parts;
  int unused;
};

// The kept lengths, or those of the caller if none are kept.
__device__ __forceinline__ KvLens kept_kv_lens(const PagedMqaScheduleParams& p) {
  KvLens kv_lens = p.kv_lens;
  if (p.kept == nullptr) return kv_lens;
  kv_lens.data = reinterpret_cast<const char*>(p.kept);
  kv_lens.stride_request = (kv_lens.per_row ? kv_lens.q_len : 1) * sizeof(int);
  kv_lens.stride_row = sizeof(int);
  return kv_lens;
}

__device__ __forceinline__ int cost_of_tokens(int tokens) { return (tokens + kBlockTokens - 1) / kBlockTokens + 1; }

__device__ __forceinline__ int cost_of(const KvLens& l, int request) {
  return cost_of_tokens(tokens_of(l, request));
}

// Reads the lengths of a request once. This kernel and the logits then use the copies, even if the originals change.
__device__ __forceinline__ int cost_of_kept(const PagedMqaScheduleParams& p, int request) {
  const int rows = p.kv_lens.per_row ? p.kv_lens.q_len : 1;
  int tokens = 0;
  for (int row = 0; row < rows; ++row) {
    const int length = length_of(p.kv_lens, request, row);
    p.kept[static_cast<i64>(request) * rows + row] = length;
    tokens = max(tokens, visible_of(p.kv_lens, length, p.kv_lens.per_row ? row : p.kv_lens.q_len - 1));
  }
  return cost_of_tokens(tokens);
}

template <int kThreads>
__device__ __forceinline__ void paged_mqa_schedule(const PagedMqaScheduleParams& p) {
  constexpr int kWarps = kThreads / 32;
  __shared__ i64 warp_sums[kWarps];
  __shared__ i64 starts[kThreads];  // cost before a thread's first request
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int batch = p.kv_lens.batch;
  const int per_thread = (batch + kThreads - 1) / kThreads;
  const int begin = min(thread * per_thread, batch), end = min(begin + per_thread, batch);

  grid_dependency_launch();
  grid_dependency_wait();

  i64 cost = 0;
  for (int request = begin; request < end; ++request)
    cost += p.kept == nullptr ? cost_of(p.kv_lens, request) : cost_of_kept(p, request);
  const i64 inclusive = warp_inclusive_sum(cost);
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  const i64 warps = warp_inclusive_sum(lane < kWarps ? warp_sums[lane] : 0);
  const i64 total = __shfl_sync(0xffffffffu, warps, 31);
  const i64 before = __shfl_sync(0xffffffffu, warps, max(warp - 1, 0));
  starts[thread] = (warp == 0 ? 0 : before) + inclusive - cost;
  __syncthreads();

  const KvLens kv_lens = kept_kv_lens(p);
  for (int part = thread; part <= p.parts; part += kThreads) {
    if (part == p.parts) {
      p.bounds[part] = {batch, 0};
      continue;
    }
    const i64 target = total * part / p.parts;
    int owner = 0;  // the last thread with requests that begins at or before the target
#pragma unroll
    for (int step = kThreads / 2; step > 0; step /= 2)
      if ((owner + step) * per_thread < batch && starts[owner + step] <= target) owner += step;
    int request = owner * per_thread;
    i64 left = target - starts[owner];
    if (per_thread == 1) {  // the owner is the request
      p.bounds[part] = {request, static_cast<int>(left)};
      continue;
    }
    // Lengths are read again. If those of the caller have changed meanwhile, the loop must end at the last request.
    int of_request = cost_of(kv_lens, request);
    while (left >= of_request && request + 1 < batch) {
      left -= of_request;
      of_request = cost_of(kv_lens, ++request);
    }
    p.bounds[part] = {request, static_cast<int>(min(left, static_cast<i64>(of_request - 1)))};
  }
}

}  // namespace cumla::indexer
