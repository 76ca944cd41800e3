// SPDX-License-Identifier: Apache-2.0
// Prepares attention over lists of cache rows, in two kernels.
//
// bound_rows   clamps the lengths of all lists for the schedule; a thread per list
// select_rows  makes lists compact: the entries that exist, in order, and their number; a CTA per list
//
// Roles and time line of select_rows, 8 warps, kListEntries entries at a time (docs/kernels/mla_sparse.md):
//   each lane: load 8 entries | load their pages | count by ballots | B | offsets from the warps' counts | store
// Barrier: B is __syncthreads of all 256 threads. It guards warp_counts, of which two alternate, so one per turn
// suffices. There are no mbarriers.
// Budget: 256 threads, 64 B of shared memory.
#include "sparse/lists.cuh"
#include "split/division.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::sparse {

using namespace ptx;
using namespace split;

constexpr int kSelectWarps = 8, kSelectThreads = 32 * kSelectWarps;
constexpr int kLaneEntries = 8;  // entries that a lane loads at once
constexpr int kListEntries = kSelectThreads * kLaneEntries;

struct BoundRowsParams {
  const int* topk_lens;  // null: all lists are full
  i64 topk_lens_stride_batch, topk_lens_stride_token;  // elements
  int* bounds;              // [rows]
  const int* other_bounds;  // [rows], or null: bounds of other lists, which these continue
  int* sums;                // [rows], if there are others: bounds of both
  float4* zeros;            // [num_zeros], to be cleared
  int rows, entries, num_zeros;
  int q_len;
  Divisor by_q_len;
  int causal;  // topk_lens are those of requests; their last q_len tokens have the lists
  int unused;
};

struct SelectRowsParams {
  Lists lists;
  const int* bounds;  // [rows]: entries from there on are ignored
  int* selected;      // [rows][entries]
  int* counts;        // [rows]
  int entries;
  int q_len;
  Divisor by_q_len;
};

__device__ __forceinline__ void bound_rows(const BoundRowsParams& p) {
  grid_dependency_launch();
  grid_dependency_wait();
  const int row = blockIdx.x * kSelectThreads + threadIdx.x;
  if (row < p.num_zeros) p.zeros[row] = {};
  if (row >= p.rows) return;
  int length = p.entries;
  if (p.topk_lens != nullptr) {
    const int batch = quotient(row, p.by_q_len);
    const int token = row - batch * p.q_len;
    length = max(p.topk_lens[batch * p.topk_lens_stride_batch + token * p.topk_lens_stride_token], 0);
    if (p.causal) length -= p.q_len - 1 - token;
  }
  const int bound = min(max(length, 0), p.entries);
  p.bounds[row] = bound;
  if (p.other_bounds != nullptr) p.sums[row] = bound + p.other_bounds[row];
}

__device__ __forceinline__ void select_rows(const SelectRowsParams& p) {
  __shared__ int warp_counts[2][kSelectWarps];
  grid_dependency_launch();
  grid_dependency_wait();
  const int row = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int batch = quotient(row, p.by_q_len);
  int* const selected = p.selected + static_cast<i64>(row) * p.entries;
  const List list(p.lists, batch, row - batch * p.q_len);
  const u32 entries = p.entries;
  int begin = 0, turn = 0;
  u32 length = entries;  // until the length is loaded, together with the first entries
#pragma unroll 1
  for (u32 first = 0; first < length; first += kListEntries, turn ^= 1) {  // the last turn may end beyond 2^31
    int rows[kLaneEntries];
    const u32 own = first + warp * (32 * kLaneEntries) + lane;
#pragma unroll
    for (int k = 0; k < kLaneEntries; ++k) rows[k] = own + 32 * k < entries ? list.entries[own + 32 * k] : -1;
    if (first == 0) length = list.exists ? min(max(p.bounds[row], 0), p.entries) : 0;
    int count = 0;
#pragma unroll
    for (int k = 0; k < kLaneEntries; ++k)
      rows[k] = List::row_of(p.lists, list.look_up(p.lists, own + 32 * k < length ? rows[k] : -1));
#pragma unroll
    for (int k = 0; k < kLaneEntries; ++k) count += __popc(__ballot_sync(0xffffffffu, rows[k] >= 0));
    if (lane == 0) warp_counts[turn][warp] = count;
    __syncthreads();
    int place = begin;
#pragma unroll
    for (int w = 0; w < kSelectWarps; ++w) {
      if (w < warp) place += warp_counts[turn][w];
      begin += warp_counts[turn][w];
    }
#pragma unroll
    for (int k = 0; k < kLaneEntries; ++k) {
      const u32 exist = __ballot_sync(0xffffffffu, rows[k] >= 0);
      if (rows[k] >= 0) selected[place + __popc(exist & ((1u << lane) - 1))] = rows[k];
      place += __popc(exist);
    }
  }
  if (threadIdx.x == 0) p.counts[row] = begin;
}

}  // namespace cumla::sparse
