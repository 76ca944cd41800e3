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
  static constexpr u32 kMostCompared = 128;
  u32* const words;  // of the bitmap

  __device__ __forceinline__ Scanned(const char* scores, int length, int rank, int cluster, unsigned char* memory)
      : Base(scores, length, rank, cluster, memory), words(reinterpret_cast<u32*>(memory)) {}

  // Lists the keys before a limit, or of the value before it, in any order. Counts also those that do not fit.
  // `is_exact` tells that all are before the limit: then listed ones are counted by their distances.
  template <int kCapacity>
  __device__ __forceinline__ void scan(TopKShared& head, u32 limit, bool is_exact, u64* list) const {
    const u32 entries = copy_of(shared_address(list)), counters = counters_of(head, 0);
    const float least = Base::least_of(limit);
    const u32 most = is_exact ? limit - 1 : kNoKey;  // it holds even if scores change meanwhile
#pragma unroll 1
    for (int at = slice.first; at < slice.position(slice.groups); at += kAhead * 128) {
      u32 marks = Base::template marks_of<kAhead>(at, least);
      if (marks == 0) continue;
      u32 slot = atomicAdd(&listed_of(head), __popc(marks));
#pragma unroll 1
      for (; marks != 0; marks &= marks - 1, ++slot) {
        const int bit = __ffs(static_cast<int>(marks)) - 1, position = at + bit / 4 * 128 + bit % 4;
        if (slot >= kCapacity) continue;
        const u32 key = min(load_key<Element>(slice.at(position)), most);  // the score is in L1
        store_shared_u64(entries + slot * 8, entry_of(key, position));
        if (is_exact) count_shared(counters + 4 * Distances{limit}.bin_of(key));
      }
    }
  }

  // Marks what is chosen of a list: keys before a bin, and `need` of its own, which are at most kMostCompared. These
  // are listed again, and each warp ranks some.
  __device__ __forceinline__ void compare(TopKShared& head, const u64* list, u32 listed, const Range& bin, u32 count,
                                          u32 need) const {
    u64* const close = reinterpret_cast<u64*>(head.histogram[1]);
#pragma unroll 1
    for (u32 i = threadIdx.x; i < listed; i += kThreads) {
      const u64 entry = list[i];
      const u32 key = static_cast<u32>(entry >> 32);
      if (key < bin.first) mark_one(static_cast<u32>(entry));
      else if (bin.has(key)) close[atomicAdd(&close_of(head), 1)] = entry;
    }
    __syncthreads();
    const u32 lane = threadIdx.x % 32;
#pragma unroll 1
    for (u32 one = threadIdx.x / 32; one < count; one += kThreads / 32) {
      const u64 entry = close[one];
      u32 rank = 0;
#pragma unroll 1
      for (u32 other = lane; other - lane < count; other += 32)
        rank += __popc(__ballot_sync(kAllLanes, other < count && close[other] < entry));
      if (lane == 0 && rank < need) mark_one(static_cast<u32>(entry));
    }
  }

  // Writes the row. The counters are zero on entry.
  template <int kCapacity>
  __device__ __forceinline__ void select_alone(TopKShared& head, u64* list, const TopKParams& p) const {
    const u32 wanted = min(slice.length, p.topk);
    if (threadIdx.x == 0) listed_of(head) = close_of(head) = 0;
    const u32 limit = Base::template limit_of<kCapacity>(head, wanted, [&] {
#pragma unroll 1
      for (int i = threadIdx.x; i < kWords * kThreads; i += kThreads)
        reinterpret_cast<uint4*>(words)[i] = {0, 0, 0, 0};
    });
    clear_counters<kThreads>(head);
    __syncthreads();
    // Comparisons take subnormal numbers for 0, and list all scores if the limit is NaN: then, and where too few are
    // listed, the last chosen key may be behind the limit.
    const u32 least = bits_of_key(limit - 1) & 0x7fffffff;
    const bool is_exact = least >= 0x00800000 && least <= 0x7f800000;
    scan<kCapacity>(head, limit, is_exact, list);
    __syncthreads();
    const u32 listed = listed_of(head);
    const bool fits = listed <= kCapacity && wanted <= listed;
    const Distances bins{is_exact && wanted <= listed ? limit : kNoKey};
    Found found = {0, 0, kNoKey, 0, 0};
    if (fits && is_exact) found = find_alone<kThreads>(head, head.histogram[0], wanted);
    const bool is_compared = found.count <= kMostCompared;
    if (!is_compared) {
      clear_counters<kThreads>(head);
      __syncthreads();
    }
    const auto mark_first = [&](auto each) {
      const Limit chosen = narrow<kThreads>(head, wanted, slice.length - 1, bins, each);
      each([&](u32 key, int position) {
        if (chosen.takes(key, position)) mark_one(position);
      });
    };
    if (is_compared) {
      compare(head, list, listed, bins.of_bin(found.bin), found.count, wanted - found.before);
    } else if (fits) {
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
    int* const positions = reinterpret_cast<int*>(list);
    const int own = (slice.length + 32 * kThreads - 1) / (32 * kThreads), first = threadIdx.x * own;
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
        else positions[slot] = position;
      }
    }
    if (threadIdx.x == 0) p.counts[head.row.index * p.counts_stride] = wanted;
    if (p.is_sorted) sort_entries<kThreads>(list, wanted, power_of_two_from(wanted));
    else __syncthreads();
    if (!p.is_sorted && has_positions_alone(p)) {
      write_positions<kThreads>(p, head.row, positions, wanted);
      return;
    }
    const Output<Element> output(p, head.row);
#pragma unroll 1
    for (u32 slot = threadIdx.x; slot < wanted; slot += kThreads)
      output.write(slot, p.is_sorted ? static_cast<int>(list[slot]) : positions[slot]);
  }

 private:
  // Their places are for sums that are not needed here.
  __device__ __forceinline__ static u32& listed_of(TopKShared& head) { return head.sums[1][0]; }
  __device__ __forceinline__ static u32& close_of(TopKShared& head) { return head.coarse[0][0]; }
  __device__ __forceinline__ void mark_one(u32 position) const {
    atomicOr(words + position / 32, 1u << position % 32);
  }
};

}  // namespace cumla::sparse
