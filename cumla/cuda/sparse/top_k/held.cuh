// SPDX-License-Identifier: Apache-2.0
// Rows whose keys fit the registers of one block. One pass over fine bins, then the few keys of the bin with the k-th
// key are compared with one another. The code that every row runs is short, because it runs once, from cold caches.
#pragma once
#include "sparse/top_k/finish.cuh"
#include "sparse/top_k/narrow.cuh"

namespace cumla::sparse {

#ifndef TOPK_STAMP
#define TOPK_STAMP(i)
#endif
#ifndef TOPK_BINS
#define TOPK_BINS Octaves<64>
#endif
#ifndef TOPK_PREFETCH
#define TOPK_PREFETCH 1
#endif

// Sums of bins are not needed here: their place is for the number of listed keys, and the last chosen one.
__device__ __forceinline__ u32& listed_of(TopKShared& head) { return head.coarse[0][0]; }
__device__ __forceinline__ u64& last_of(TopKShared& head) { return *reinterpret_cast<u64*>(head.coarse[1]); }

#ifndef TOPK_MOST
#define TOPK_MOST 128
#endif
#ifndef TOPK_HELD
#define TOPK_HELD 4
#endif
// Bins of keys with the same upper bits.
struct Leading {
  static constexpr int kCount = 4096;
  __device__ __forceinline__ static u32 bin_of(u32 key) { return key >> 20; }
  __device__ __forceinline__ static Range range_of(u32 bin) { return {bin << 20, (1u << 20) - 1 - (bin == kCount - 1)}; }
};
constexpr int kMostCompared = TOPK_MOST;  // keys of a bin that are compared with one another

// Finds the bin with the need-th key. Called by all threads, after counting; four neighbouring bins for each thread.
template <int kThreads, int kBinsHere>
__device__ __forceinline__ Found find_fine(TopKShared& head, u32 need) {
  constexpr int kQuads = kBinsHere / 4 / kThreads;
  static_assert(kQuads * 4 * kThreads == kBinsHere, "whole groups of four bins");
  const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32;
  __syncthreads();
  TOPK_STAMP(4);
  const uint4* const quads = reinterpret_cast<const uint4*>(head.histogram) + threadIdx.x * kQuads;
  u32 bins[4 * kQuads], sum = 0;
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const uint4 quad = quads[q];
    bins[4 * q] = quad.x, bins[4 * q + 1] = quad.y, bins[4 * q + 2] = quad.z, bins[4 * q + 3] = quad.w;
  }
#pragma unroll
  for (int i = 0; i < 4 * kQuads; ++i) sum += bins[i];
  const u32 inclusive = split::warp_inclusive_sum(sum);
  if (lane == 31) head.sums[0][warp] = inclusive;
  __syncthreads();
  u32 before = __reduce_add_sync(kAllLanes, lane < warp ? head.sums[0][lane] : 0) + inclusive - sum;
  if (before < need && need <= before + sum) {
    u32 bin = threadIdx.x * (4 * kQuads), count = bins[0];
#pragma unroll
    for (int i = 1; i < 4 * kQuads; ++i)
      if (before + count < need) before += count, count = bins[i], ++bin;
    head.found = {bin, before, count, 0, 0};
  }
  __syncthreads();
  return head.found;
}

// The limit before which are `need` of `count` listed entries. Each warp ranks every kThreads / 32-th of them.
template <int kThreads>
__device__ __forceinline__ Limit limit_of_listed(TopKShared& head, const u64* listed, u32 count, u32 need) {
  const u32 lane = threadIdx.x % 32;
#pragma unroll 1
  for (u32 one = threadIdx.x / 32; one < count; one += kThreads / 32) {
    const u64 entry = listed[one];
    u32 rank = 0;
#pragma unroll 1
    for (u32 first = 0; first < count; first += 32)
      rank += __popc(__ballot_sync(kAllLanes, first + lane < count && listed[first + lane] < entry));
    if (rank == need - 1 && lane == 0) last_of(head) = entry;
  }
  __syncthreads();
  const u64 last = last_of(head);
  return {static_cast<u32>(last >> 32), static_cast<int>(last) + 1};
}

// Writes a row. Threads have kHeld groups of four keys each.
template <typename Element, int kThreads, int kHeld>
__device__ __forceinline__ void select_held(const TopKParams& p, TopKShared& head, u64* list) {
  using Bins = TOPK_BINS;
  constexpr int kWords = (kHeld + 3) / 4, kBinsHere = Bins::kCount;
  static_assert(kBinsHere * 4 <= sizeof(head.histogram), "the bins fit the counters");
  TOPK_STAMP(0);
#pragma unroll
  for (int i = 0; i < kBinsHere / 4 / kThreads; ++i)
    reinterpret_cast<uint4*>(head.histogram)[threadIdx.x + i * kThreads] = {0, 0, 0, 0};
  if (threadIdx.x == 0) listed_of(head) = 0;
  if (TOPK_PREFETCH && p.row_lens != nullptr) {  // L2 fetches the scores while their number is on its way
    const i64 at = static_cast<i64>(threadIdx.x) * 128;
    if (at < static_cast<i64>(p.width) * kElementBytes<Element>)
      prefetch_l2(p.scores + blockIdx.x * p.scores_stride + at);
  }
  grid_dependency_wait();
  const ScoreRow row = row_of(p, static_cast<int>(blockIdx.x));
  if (row.length <= p.topk && write_all<Element>(p, row, threadIdx.x, kThreads)) return;
  TOPK_STAMP(1);

  const RowSlice<Element, kThreads> slice(scores_of<Element>(p, row), row.length, 0, 1);
  u32 keys[kHeld][4];
  bool all_whole = true;
#pragma unroll
  for (int g = 0; g < kHeld; ++g) {
    const bool is_whole = g < slice.groups && slice.is_whole(slice.position(g));
    all_whole &= is_whole;
    uint4 quad = {0, 0, 0, 0};
    if (is_whole) quad = load_quad<Element>(slice.at(slice.position(g)));
    keys[g][0] = quad.x, keys[g][1] = quad.y, keys[g][2] = quad.z, keys[g][3] = quad.w;
  }
  __syncthreads();  // the counters are zero
  TOPK_STAMP(2);
#pragma unroll
  for (int g = 0; g < kHeld; ++g) keys_of<Element>({keys[g][0], keys[g][1], keys[g][2], keys[g][3]}, keys[g]);
  if (__builtin_expect(!all_whole, 0)) {
#pragma unroll
    for (int g = 0; g < kHeld; ++g) {
      const int at = slice.position(g);
      if (g < slice.groups && slice.is_whole(at)) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool is_inside = g < slice.groups && at + i >= 0 && at + i < slice.length;
        keys[g][i] = is_inside ? load_key<Element>(slice.at(at + i)) : kNoKey;
      }
    }
  }
  // A bit for each key for which f(key, position) is true
  const auto marks_of = [&](auto f) {
    u32 marks = 0;
#pragma unroll
    for (int g = 0; g < kHeld; ++g)
#pragma unroll
      for (int i = 0; i < 4; ++i) marks |= f(keys[g][i], slice.position(g) + i) ? 1u << (4 * g + i) : 0u;
    return marks;
  };
  const auto each_marked = [](u32 marks, auto f) {
#pragma unroll
    for (int g = 0; g < kHeld; ++g)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (marks >> (4 * g + i) & 1) f(g, i);
  };
  const u32 counters = copy_of(shared_address(head.histogram));
#pragma unroll
  for (int g = 0; g < kHeld; ++g)
#pragma unroll
    for (int i = 0; i < 4; ++i) count_shared(counters + 4 * Bins::bin_of(keys[g][i]));
  TOPK_STAMP(3);

  const u32 wanted = count_of(row, p.topk);
  const Found found = find_fine<kThreads, kBinsHere>(head, wanted);
  TOPK_STAMP(5);
  const Range range = Bins::range_of(found.bin);
  const u32 need = wanted - found.before;
  Limit limit = {range.first + range.width + 1, 0};  // all keys of the bin are chosen
  if (found.count != need) {
    if (__builtin_expect(found.count <= kMostCompared, 1)) {
      const u32 marks = marks_of([&](u32 key, int) { return range.has(key); });
      if (marks != 0) {
        const u32 place = atomicAdd(&listed_of(head), __popc(marks));
        u32 entry = copy_of(shared_address(list)) + place * 8;
        each_marked(marks, [&](int g, int i) {
          store_shared_u64(entry, entry_of(keys[g][i], slice.position(g) + i));
          entry += 8;
        });
      }
      __syncthreads();
      TOPK_STAMP(6);
      limit = limit_of_listed<kThreads>(head, list, listed_of(head), need);
    } else {
      limit = narrow<kThreads>(head, need, row.length - 1, Distances{0}, [&](auto f) {
#pragma unroll
        for (int g = 0; g < kHeld; ++g)
#pragma unroll
          for (int i = 0; i < 4; ++i) f(keys[g][i], slice.position(g) + i);
      }, range, kPasses);
    }
  }
  TOPK_STAMP(7);

  const u32 chosen = marks_of([&](u32 key, int position) {
    return (key < limit.key) | ((key == limit.key) & (position < limit.end));  // no branches
  });
  u32 counts[kWords] = {};  // of groups, eight bits each
#pragma unroll
  for (int g = 0; g < kHeld; ++g) counts[g / 4] += __popc(chosen >> 4 * g & 15) << g % 4 * 8;
  u32 own = __popc(chosen);
  own = __reduce_add_sync(kAllLanes, own);
  u32 sums[kWords];
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const u32 inclusive = split::warp_inclusive_sum(counts[w]);
    sums[w] = __shfl_sync(kAllLanes, inclusive, 31);
    counts[w] = inclusive - counts[w];  // in lower lanes: at most 124 of a group
  }
  u32 first = before_warp<kThreads, false>(head, {own, 0}, {0, 0}).chosen;
  TOPK_STAMP(8);
  u32 places[kHeld];
#pragma unroll
  for (int g = 0; g < kHeld; ++g) {
    places[g] = first + (counts[g / 4] >> g % 4 * 8 & 255);
    first += sums[g / 4] >> g % 4 * 8 & 255;
  }
  if (threadIdx.x == 0) p.counts[row.index * p.counts_stride] = wanted;
  if (__builtin_expect(is_plain(p), 1)) {
    int* const out = copy_of(p.out + row.index * p.out_stride);
    each_marked(chosen, [&](int g, int i) { out[places[g]++] = slice.position(g) + i; });
    TOPK_STAMP(9);
    return;
  }
  const Output<Element> output(p, row);
  each_marked(chosen, [&](int g, int i) { list[places[g]++] = entry_of(keys[g][i], slice.position(g) + i); });
  if (p.is_sorted) sort_entries<kThreads>(list, wanted, power_of_two_from(wanted));
  else __syncthreads();
#pragma unroll 1
  for (u32 slot = threadIdx.x; slot < wanted; slot += kThreads) output.write(slot, static_cast<int>(list[slot]));
}

}  // namespace cumla::sparse
