// SPDX-License-Identifier: Apache-2.0
// Short rows: a block keeps the keys in registers. One pass over fine bins, then the few keys of the bin with the k-th
// key are compared with one another.
#pragma once
#include "sparse/top_k/finish.cuh"
#include "sparse/top_k/narrow.cuh"
#include "sparse/top_k/sampled.cuh"

namespace cumla::sparse {

// kGroups groups of four keys of a thread.
template <typename Element, int kThreads, int kGroups>
struct Held {
  static constexpr bool kTakesTurns = false, kIsSampled = false, kIsHeld = true;
  static constexpr int kFineBins = 4096, kMostCompared = 128;
  static constexpr int kWords = (kGroups + 3) / 4;
  u32 keys[kGroups][4];
  RowSlice<Element, kThreads> slice;

  // The row. While its length is loaded, L2 fetches scores up to the width, and the counters are cleared.
  __device__ __forceinline__ static ScoreRow row_of(const TopKParams& p, int index, TopKShared& head) {
    const int start = start_of(p, index), most = p.width - start;
    int length = most;
    if (threadIdx.x % 32 == 0 && p.row_lens != nullptr) length = p.row_lens[index * p.row_lens_stride];
    if (threadIdx.x == 0) prefetch_scores<Element>(scores_of<Element>(p, {index, start, most}), most);
    __syncwarp();  // otherwise the compiler puts the prefetch behind the wait for the length
    clear_counters<kThreads>(head);
    return {index, start, clamp(__shfl_sync(kAllLanes, length, 0), 0, most)};
  }

  // Scores that are loaded before anything else is done with the row.
  struct First {
    const RowSlice<Element, kThreads> slice;
    uint4 quads[kGroups];

    __device__ __forceinline__ First(const TopKParams& p, const ScoreRow& row)
        : slice(scores_of<Element>(p, row), row.length, 0, 1) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const int at = slice.position(g);
        quads[g] = {0, 0, 0, 0};
        if (g < slice.groups && slice.is_whole(at)) quads[g] = load_quad<Element>(slice.at(at));
      }
    }
  };

  __device__ __forceinline__ Held(const char* scores, int length, int rank, int cluster, unsigned char*)
      : slice(scores, length, rank, cluster) {}

  // Writes the row.
  template <int kCapacity>
  __device__ __forceinline__ void select_alone(TopKShared& head, u64* list, const TopKParams& p, const First& first) {
    slice.first = first.slice.first, slice.groups = first.slice.groups;
    static_assert(kMostCompared <= kCapacity, "the list holds what is compared");
    if (threadIdx.x == 0) listed_of(head) = 0;
    count(head, first.quads);
    const u32 wanted = count_of(head.row, p.topk);
    const Found found = find_fine(head, wanted);
    const u32 chosen = found.count <= kMostCompared ? compare(head, list, found, wanted - found.before)
                                                    : search(head, wanted);
    write(head, list, p, chosen, wanted);
  }

 private:
  // Bins of keys: 64 for each octave from 2^-16 to 2^16, of either sign. The two in the middle, and those at both ends,
  // have what is smaller, and larger.
  static constexpr u32 kLeast = 111u << 23, kBehind = 143u << 23, kWidth = 1u << 17;
  // `x` is canonical.
  __device__ __forceinline__ static u32 bin_of(float x) {
    // fminf of NaN and a number returns the number.
    const float clamped = fmaxf(fminf(fabsf(x), __uint_as_float(kBehind - 1)), __uint_as_float(kLeast));
    const u32 within = (__float_as_uint(clamped) - kLeast) / kWidth;
    return kFineBins / 2 - 1 - (within ^ static_cast<u32>(static_cast<int>(__float_as_uint(x)) >> 31));
  }
  __device__ __forceinline__ static void canonical_of(const uint4& quad, float (&x)[4]) {
    if constexpr (kElementBytes<Element> == 4) {
      x[0] = __uint_as_float(quad.x), x[1] = __uint_as_float(quad.y);
      x[2] = __uint_as_float(quad.z), x[3] = __uint_as_float(quad.w);
    } else {
      const float2 low = unpack_pair<Element>(quad.x), high = unpack_pair<Element>(quad.y);
      x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = canonical(x[i]);
  }
  __device__ __forceinline__ static Range range_of(u32 bin) {
    const u32 first = first_of(bin);
    return {first, first_of(bin + 1) - 1 - first};
  }
  // Without branches.
  __device__ __forceinline__ static u32 first_of(u32 bin) {
    constexpr u32 kHalf = kFineBins / 2, kZero = 0x80000000u;  // keys
    u32 first = bin * kWidth + (bin < kHalf ? kZero - kBehind : kZero + kLeast - kHalf * kWidth);
    first = bin == 0 ? 0 : first;
    first = bin == kHalf ? kZero : first;
    return bin == kFineBins ? kNoKey : first;
  }
  static_assert((kBehind - kLeast) / kWidth * 2 == kFineBins, "a bin for each range");

  // Sums of bins are not needed here. Their place is for the number of listed keys and the last chosen one.
  __device__ __forceinline__ static u32& listed_of(TopKShared& head) { return head.coarse[0][0]; }
  __device__ __forceinline__ static u64& last_of(TopKShared& head) { return *reinterpret_cast<u64*>(head.coarse[1]); }

  // Calls f(key, position) for all keys of a thread; those that are kNoKey are not of the row.
  template <typename F>
  __device__ __forceinline__ void each(F f) const {
#pragma unroll
    for (int i = 0; i < 4 * kGroups; ++i) f(keys[i / 4][i % 4], position(i));
  }
  // A bit for each key of which f(key, position) is true.
  template <typename F>
  __device__ __forceinline__ u32 marks_of(F f) const {
    u32 marks = 0;
#pragma unroll
    for (int i = 0; i < 4 * kGroups; ++i) marks |= f(keys[i / 4][i % 4], position(i)) ? 1u << i : 0u;
    return marks;
  }
  // Calls f(key, position, group) for marked keys.
  template <typename F>
  __device__ __forceinline__ void each_marked(u32 marks, F f) const {
#pragma unroll
    for (int i = 0; i < 4 * kGroups; ++i)
      if (marks >> i & 1) f(keys[i / 4][i % 4], position(i), i / 4);
  }
  __device__ __forceinline__ int position(int i) const { return slice.position(i / 4) + i % 4; }

  __device__ __forceinline__ void count(TopKShared& head, const uint4 (&quads)[kGroups]) {
    const u32 counters = counters_of(head, 0);
    bool all_whole = true;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const bool is_whole = g < slice.groups && slice.is_whole(slice.position(g));
      all_whole &= is_whole;
    }
    __syncthreads();  // the counters are zero
    if (all_whole) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        float x[4];
        canonical_of(quads[g], x);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          keys[g][i] = bits_of_key(__float_as_uint(x[i]));  // its own inverse
          count_shared(counters + 4 * bin_of(x[i]));
        }
      }
      return;
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int at = slice.position(g);
      if (g < slice.groups && slice.is_whole(at)) {
        keys_of<Element>(quads[g], keys[g]);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const bool is_inside = g < slice.groups && at + i >= 0 && at + i < slice.length;
          keys[g][i] = is_inside ? load_key<Element>(slice.at(at + i)) : kNoKey;
        }
      }
    }
    each([&](u32 key, int) {
      if (key != kNoKey) count_shared(counters + 4 * bin_of(__uint_as_float(bits_of_key(key))));
    });
  }

  // Finds the bin with the need-th key; its range takes the place of the counts of lower blocks. Called by all threads,
  // after counting.
  __device__ __forceinline__ static Found find_fine(TopKShared& head, u32 need) {
    constexpr int kOfThread = kFineBins / kThreads;
    static_assert(kOfThread % 4 == 0 && kFineBins * 4 <= sizeof(head.histogram), "whole groups of four bins");
    const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32;
    __syncthreads();
    u32 bins[kOfThread], sum = 0;
#pragma unroll
    for (int i = 0; i < kOfThread; i += 4) {
      const uint4 four = reinterpret_cast<const uint4*>(head.histogram)[(threadIdx.x * kOfThread + i) / 4];
      bins[i] = four.x, bins[i + 1] = four.y, bins[i + 2] = four.z, bins[i + 3] = four.w;
      sum += four.x + four.y + four.z + four.w;
    }
    const u32 inclusive = split::warp_inclusive_sum(sum);
    if (lane == 31) head.sums[1][warp] = inclusive;
    __syncthreads();
    u32 before = __reduce_add_sync(kAllLanes, lane < warp ? head.sums[1][lane] : 0) + inclusive - sum;
    if (before < need && need <= before + sum) {
      u32 bin = threadIdx.x * kOfThread, count = bins[0];
      u32 at = before;
#pragma unroll
      for (int i = 1; i < kOfThread; ++i) {
        at += bins[i - 1];
        if (at < need) before = at, count = bins[i], ++bin;
      }
      const Range range = range_of(bin);
      head.found = {bin, before, count, range.first, range.width};
    }
    __syncthreads();
    return head.found;
  }

  // Marks what is chosen: keys before a bin, and `need` of its own. These are listed in any order, and each warp ranks
  // some.
  __device__ __forceinline__ u32 compare(TopKShared& head, u64* list, const Found& found, u32 need) const {
    const Range range = {found.lower_before, found.lower_count};
    u32 own = marks_of([&](u32 key, int) { return range.has(key); }), at = 0;
    if (own != 0) {
      at = atomicAdd(&listed_of(head), __popc(own));
      u32 address = shared_address(list) + at * 8;
      each_marked(own, [&](u32 key, int position, int) {
        store_shared_u64(address, entry_of(key, position));
        address += 8;
      });
    }
    u32 chosen = marks_of([&](u32 key, int) { return key < range.first; });
    __syncthreads();
    const u32 lane = threadIdx.x % 32;
#pragma unroll 1
    for (u32 one = threadIdx.x / 32; one < found.count; one += kThreads / 32) {
      const u64 entry = list[one];
      u32 rank = 0;
#pragma unroll 1
      for (u32 other = lane; other - lane < found.count; other += 32)
        rank += __popc(__ballot_sync(kAllLanes, other < found.count && list[other] < entry));
      if (lane == 0 && rank == need - 1) last_of(head) = entry;
    }
    __syncthreads();
    const u64 last = last_of(head);
#pragma unroll 1
    for (; own != 0; own &= own - 1, ++at)
      if (list[at] <= last) chosen |= own & (0 - own);
    return chosen;
  }

  // Marks what is chosen where too many keys share a bin.
  __device__ __forceinline__ u32 search(TopKShared& head, u32 wanted) const {
    clear_counters<kThreads>(head);
    __syncthreads();
    return marked(narrow<kThreads>(head, wanted, slice.length - 1, Distances{kNoKey}, [&](auto f) { each(f); }));
  }
  __device__ __forceinline__ u32 marked(const Limit& limit) const {
    return marks_of([&](u32 key, int position) { return limit.takes(key, position); });
  }

  // Writes the marked keys in their order, or sorted.
  __device__ __forceinline__ void write(TopKShared& head, u64* list, const TopKParams& p, u32 chosen,
                                        u32 wanted) const {
    u32 counts[kWords] = {}, places[kGroups];  // of groups, eight bits each
#pragma unroll
    for (int g = 0; g < kGroups; ++g) counts[g / 4] += __popc(chosen >> 4 * g & 15) << g % 4 * 8;
    const u32 own = __reduce_add_sync(kAllLanes, __popc(chosen));
    u32 first = before_warp<kThreads, false>(head, {own, 0}, {0, 0}).chosen;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const u32 inclusive = split::warp_inclusive_sum(counts[w]), sums = __shfl_sync(kAllLanes, inclusive, 31);
      const u32 lower = inclusive - counts[w];  // in lower lanes: at most 124 of a group
#pragma unroll
      for (int g = 4 * w; g < min(4 * w + 4, kGroups); ++g) {
        places[g] = first + (lower >> g % 4 * 8 & 255);
        first += sums >> g % 4 * 8 & 255;
      }
    }
    const ScoreRow row = head.row;
    if (threadIdx.x == 0) p.counts[row.index * p.counts_stride] = wanted;
    int* const positions = reinterpret_cast<int*>(list);
    if (p.is_sorted) {
      each_marked(chosen, [&](u32 key, int position, int g) { list[places[g]++] = entry_of(key, position); });
      sort_entries<kThreads>(list, wanted, power_of_two_from(wanted));
    } else {
      each_marked(chosen, [&](u32, int position, int g) { positions[places[g]++] = position; });
      __syncthreads();
      if (has_positions_alone(p)) {
        write_positions<kThreads>(p, row, positions, wanted);
        return;
      }
    }
    const Output<Element> output(p, row);
#pragma unroll 1
    for (u32 slot = threadIdx.x; slot < wanted; slot += kThreads)
      output.write(slot, p.is_sorted ? static_cast<int>(list[slot]) : positions[slot]);
  }
};

}  // namespace cumla::sparse
