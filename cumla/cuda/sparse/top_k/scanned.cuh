// SPDX-License-Identifier: Apache-2.0
// A long row of one block, read once: keys within the limit of a sample are listed as they come. Passes over the list
// find what is chosen. A bitmap of the row, in shared memory, brings it into the order of positions.
#pragma once
#include "sparse/top_k/finish.cuh"
#include "sparse/top_k/sampled.cuh"

namespace cumla::sparse {

// The bitmap has `kWords` x 4 words for each thread.
template <typename Element, int kThreads, int kWords>
struct Scanned : Sampled<Element, kThreads, kWords> {
  using Base = Sampled<Element, kThreads, kWords>;
  using Base::slice;
  static constexpr int kAhead = 4;  // groups that a warp loads at once
  u32* const words;                 // of the bitmap

  __device__ __forceinline__ Scanned(const char* scores, int length, int rank, int cluster, unsigned char* memory)
      : Base(scores, length, rank, cluster, memory), words(reinterpret_cast<u32*>(memory)) {}

  // Lists the keys before a limit, or of the value before it, in any order. Counts also those that do not fit.
  template <int kCapacity>
  __device__ __forceinline__ void scan(u32 limit, u64* list, u32* counter) const {
    const u32 entries = copy_of(shared_address(list));
    const float least = Base::least_of(limit);
#pragma unroll 1
    for (int at = slice.first; at < slice.position(slice.groups); at += kAhead * 128) {
      u32 marks = Base::template marks_of<kAhead>(at, least);
      if (marks == 0) continue;
      u32 slot = atomicAdd(counter, __popc(marks));
#pragma unroll 1
      for (; marks != 0; marks &= marks - 1, ++slot) {
        const int bit = __ffs(static_cast<int>(marks)) - 1, position = at + bit / 4 * 128 + bit % 4;
        if (slot < kCapacity)  // this score is in L1
          store_shared_u64(entries + slot * 8, entry_of(load_key<Element>(slice.at(position)), position));
      }
    }
  }

  // Writes the row. The counters are zero on entry.
  template <int kCapacity>
  __device__ __forceinline__ void select_alone(TopKShared& head, u64* list, const TopKParams& p) const {
    u32* const counter = &head.sums[1][0];
    if (threadIdx.x == 0) *counter = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < kWords * kThreads; i += kThreads) reinterpret_cast<uint4*>(words)[i] = {0, 0, 0, 0};
    __syncthreads();
    const u32 limit = Base::template limit_of<kCapacity>(head, count_of(head.row, p.topk));
    scan<kCapacity>(limit, list, counter);
    __syncthreads();
    const u32 listed = *counter, wanted = count_of(head.row, p.topk), last = head.row.length - 1;
    clear_counters<kThreads>(head);
    __syncthreads();
    // Comparisons take subnormal numbers for 0, and list all scores if the limit is NaN: then, and where too few are
    // listed, the last chosen key may be behind the limit.
    const u32 least = bits_of_key(limit - 1) & 0x7fffffff;
    const bool is_exact = least >= 0x00800000 && least <= 0x7f800000;
    const bool fits = listed <= kCapacity && wanted <= listed;
    const Distances bins{is_exact && wanted <= listed ? limit : kNoKey};
    const auto mark_first = [&](auto each) {
      const Limit chosen = narrow<kThreads>(head, wanted, last, bins, each);
      each([&](u32 key, int position) {
        if (chosen.takes(key, position)) atomicOr(words + position / 32, 1u << position % 32);
      });
    };
    if (fits) {
      mark_first([&](auto f) {
#pragma unroll 1
        for (u32 i = threadIdx.x; i < listed; i += kThreads) {
          const u64 entry = list[i];
          f(static_cast<u32>(entry >> 32), static_cast<int>(entry));
        }
      });
    } else {  // the sample misled: all keys are read again for each pass
      const Base& all = *this;
      mark_first([&](auto f) {
        all.each([&](const u32 (&keys)[4], int at) {
#pragma unroll
          for (int i = 0; i < 4; ++i) f(keys[i], at + i);
        });
      });
    }
    __syncthreads();

    // A thread has neighbouring words.
    const Output<Element> output(p, head.row);
    const int own = (head.row.length + 32 * kThreads - 1) / (32 * kThreads), first = threadIdx.x * own;
    u32 count = 0;
#pragma unroll 1
    for (int i = first; i < first + own; ++i) count += __popc(words[i]);
    const u32 inclusive = split::warp_inclusive_sum(count), of_warp = __shfl_sync(kAllLanes, inclusive, 31);
    u32 slot = before_warp<kThreads, false>(head, {of_warp, 0}, {0, 0}).chosen + inclusive - count;
#pragma unroll 1
    for (int i = first; i < first + own; ++i) {
#pragma unroll 1
      for (u32 bits = words[i]; bits != 0 && slot < wanted; bits &= bits - 1, ++slot) {
        const int position = i * 32 + __ffs(static_cast<int>(bits)) - 1;
        if (p.is_sorted) list[slot] = entry_of(load_key<Element>(slice.at(position)), position);
        else output.write(slot, position);
      }
    }
    if (threadIdx.x == 0) output.write_count();
    if (!p.is_sorted) return;
    sort_entries<kThreads>(list, wanted, power_of_two_from(wanted));
#pragma unroll 1
    for (u32 i = threadIdx.x; i < wanted; i += kThreads) output.write(i, static_cast<int>(list[i]));
  }
};

}  // namespace cumla::sparse
