// SPDX-License-Identifier: Apache-2.0
// A row's keys: counted in passes, and put into a list in the order of positions. `Resident` reads the scores once
// and keeps the keys in registers and shared memory. `Streamed` reads them for every pass.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/sync.cuh"
#include "sparse/top_k/find.cuh"
#include "sparse/top_k/keys.cuh"

namespace cumla::sparse {

// An entry of a list: key in the upper half, position in the lower.
__device__ __forceinline__ u64 entry_of(u32 key, int position) {
  return static_cast<u64>(key) << 32 | static_cast<u32>(position);
}

// The list of a block that has a row alone: all entries fit.
struct Own {
  u32 entries;  // shared-window address

  __device__ __forceinline__ explicit Own(const u64* list) : entries(copy_of(shared_address(list))) {}
  __device__ __forceinline__ void put(u32 place, u64 entry) const { store_shared_u64(entries + place * 8, entry); }
};

// Entries `begin` to `begin` + `capacity` of a list, in the cluster's first block. Others are dropped.
template <bool kClustered>
struct Window {
  u32 entries, begin, capacity;

  __device__ __forceinline__ Window(const u64* list, u32 begin, u32 capacity)
      : entries(copy_of(shared_address(list))), begin(begin), capacity(capacity) {
    if (kClustered) entries = shared_address_in(entries, 0);
  }
  __device__ __forceinline__ void put(u32 place, u64 entry) const {
    const u32 i = place - begin;
    if (i >= capacity) return;
    if constexpr (kClustered) store_cluster_u64(entries + i * 8, entry);
    else store_shared_u64(entries + i * 8, entry);
  }
};

// The chosen keys: all before `limit`, and the first `ties` of those that equal it.
struct Choice {
  u32 limit, ties;
};

// Counts of the keys before a thread's: chosen ones, and ones that equal the limit.
struct Before {
  u32 chosen, equal;
};

// Turns a warp's own counts into the counts before it: in its block, plus those before the block.
template <int kThreads, bool kTies>
__device__ __forceinline__ Before before_warp(TopKShared& head, Before own, Before block) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane == 0) {
    head.sums[0][warp] = own.chosen;
    if (kTies) head.sums[1][warp] = own.equal;
  }
  __syncthreads();
  const bool is_before = lane < warp;
  block.chosen += __reduce_add_sync(kAllLanes, is_before ? head.sums[0][lane] : 0);
  if (kTies) block.equal += __reduce_add_sync(kAllLanes, is_before ? head.sums[1][lane] : 0);
  return block;
}

// Puts the chosen keys of a block into a list, group by group. `each` calls a function with four keys and the
// position of the first, for all groups of a thread in the order of positions.
template <int kThreads, typename Each, typename Out>
__device__ __forceinline__ void place_by_group(TopKShared& head, const Choice& choice, Before block, const Out& list,
                                               Each each) {
  // Chosen keys in the lower half, keys that equal the limit in the upper
  const auto kinds = [&](const u32 (&keys)[4]) {
    u32 both = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) both += keys[i] < choice.limit ? 1u : keys[i] == choice.limit ? 1u << 16 : 0u;
    return both;
  };
  Before own = {0, 0};
  each([&](const u32 (&keys)[4], int) {
    const u32 both = kinds(keys);
    own.chosen += both & 0xffff;
    own.equal += both >> 16;
  });
  own = {__reduce_add_sync(kAllLanes, own.chosen), __reduce_add_sync(kAllLanes, own.equal)};
  Before before = before_warp<kThreads, true>(head, own, block);
  each([&](const u32 (&keys)[4], int at) {
    const u32 both = kinds(keys);
    if (!__any_sync(kAllLanes, both != 0)) return;
    const u32 inclusive = split::warp_inclusive_sum(both), all = __shfl_sync(kAllLanes, inclusive, 31);
    u32 place = before.chosen + (inclusive - both & 0xffff), ties = before.equal + (inclusive - both >> 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool is_before = keys[i] < choice.limit, is_tie = keys[i] == choice.limit;
      const bool is_chosen = is_before || (is_tie && ties < choice.ties);
      if (is_chosen) list.put(place + min(ties, choice.ties), entry_of(keys[i], at + i));
      place += is_before;
      ties += is_tie;
    }
    before.chosen += all & 0xffff;
    before.equal += all >> 16;
  });
}

// Loads nothing before the work on a row begins.
struct NothingFirst {
  __device__ __forceinline__ NothingFirst(const TopKParams&, const ScoreRow&) {}
};

// Groups of four keys per thread: kHeld in registers, kStored in shared memory.
template <typename Element, int kThreads, int kHeld, int kStored>
struct Resident {
  static constexpr int kGroups = kHeld + kStored, kWords = (kGroups + 3) / 4;
  static constexpr bool kTakesTurns = false, kIsSampled = false, kIsHeld = false;
  using First = NothingFirst;
  const RowSlice<Element, kThreads> slice;
  uint4* const stored;
  u32 held[kHeld][4];

  __device__ __forceinline__ Resident(const char* scores, int length, int rank, int cluster, unsigned char* memory)
      : slice(scores, length, rank, cluster), stored(reinterpret_cast<uint4*>(memory) + threadIdx.x) {}

  // Calls f(keys, group) for all groups of the row.
  template <typename F>
  __device__ __forceinline__ void each(F f) {
#pragma unroll
    for (int g = 0; g < kHeld; ++g)
      if (g < slice.groups) f(held[g], g);
#pragma unroll
    for (int g = kHeld; g < kGroups; ++g)
      if (g < slice.groups) with_stored(f, g);
  }

  // The same with less code, for rare calls and those that need no constant group number.
  template <typename F>
  __device__ __forceinline__ void each_rolled(F f) {
#pragma unroll
    for (int g = 0; g < kHeld; ++g)
      if (g < slice.groups) f(held[g], g);
#pragma unroll 1
    for (int g = kHeld; g < min(kGroups, slice.groups); ++g) with_stored(f, g);
  }

  // Loads the row, and counts its keys in the bins of the first pass. The counters are zero on entry.
  __device__ __forceinline__ void load_and_count(u32 counters) {
    if constexpr (kStored > 0) {
#pragma unroll
      for (int g = kHeld; g < kGroups; ++g) {
        const int at = slice.position(g);
        if (g < slice.groups && slice.is_whole(at)) copy_in(stored + (g - kHeld) * kThreads, slice.at(at));
      }
      copy_async_commit();
    }
#pragma unroll
    for (int g = 0; g < kHeld; ++g) {
      const int at = slice.position(g);
      if (g < slice.groups && slice.is_whole(at)) {
        const uint4 quad = load_quad<Element>(slice.at(at));
        held[g][0] = quad.x, held[g][1] = quad.y, held[g][2] = quad.z, held[g][3] = quad.w;
      }
    }
    __syncthreads();  // the counters are zero
#pragma unroll
    for (int g = 0; g < kHeld; ++g)
      if (g < slice.groups) {
        convert({held[g][0], held[g][1], held[g][2], held[g][3]}, g, held[g]);
        count(held[g], counters);
      }
    if constexpr (kStored > 0) {
      copy_async_wait<0>();
#pragma unroll
      for (int g = kHeld; g < kGroups; ++g)
        if (g < slice.groups) {
          uint4* const four = stored + (g - kHeld) * kThreads;
          u32 keys[4];
          convert(*four, g, keys);
          *four = {keys[0], keys[1], keys[2], keys[3]};
          count(keys, counters);
        }
    }
  }

  __device__ __forceinline__ void count_again(u32 counters, const Digit& digit) {
    each_rolled([&](const u32 (&keys)[4], int) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (digit.counts(keys[i])) count_shared(counters + 4 * digit.of(keys[i]));
    });
  }

  // Puts the keys before a limit into a list. `before`: such keys in blocks of lower rank.
  template <typename Out>
  __device__ __forceinline__ void place(TopKShared& head, u32 limit, u32 before, const Out& list) {
    u32 counts[kWords] = {}, own = 0;  // per group, eight bits each; and their sum
    each([&](const u32 (&keys)[4], int g) {
      u32 n = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) n += keys[i] < limit;
      counts[g / 4] += n << g % 4 * 8;
      own += n;
    });
    own = __reduce_add_sync(kAllLanes, own);
    u32 first = before_warp<kThreads, false>(head, {own, 0}, {before, 0}).chosen;
    u32 sums = 0;
    each([&](const u32 (&keys)[4], int g) {
      u32& lower = counts[g / 4];  // in lower lanes: at most 124 of a group
      if (g % 4 == 0) {
        const u32 inclusive = split::warp_inclusive_sum(lower);
        sums = __shfl_sync(kAllLanes, inclusive, 31);
        lower = inclusive - lower;
      }
      u32 place = first + (lower >> g % 4 * 8 & 255);
      const int at = slice.position(g);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (keys[i] < limit) list.put(place++, entry_of(keys[i], at + i));
      first += sums >> g % 4 * 8 & 255;
    });
  }

  // The same with a choice among equal keys.
  template <typename Out>
  __device__ __forceinline__ void place_chosen(TopKShared& head, const Choice& choice, Before block, const Out& list) {
    place_by_group<kThreads>(head, choice, block, list, [&](auto f) {
      each_rolled([&](const u32 (&keys)[4], int g) { f(keys, slice.position(g)); });
    });
  }

 private:
  template <typename F>
  __device__ __forceinline__ void with_stored(F f, int g) const {
    const uint4 four = stored[(g - kHeld) * kThreads];
    const u32 keys[4] = {four.x, four.y, four.z, four.w};
    f(keys, g);
  }
  __device__ __forceinline__ static void copy_in(uint4* destination, const char* source) {
    if constexpr (kElementBytes<Element> == 4) copy_16_async(shared_address(destination), source, true);
    else *reinterpret_cast<uint2*>(destination) = *reinterpret_cast<const uint2*>(source);
  }
  __device__ __forceinline__ void convert(const uint4& quad, int g, u32 (&keys)[4]) const {
    const int at = slice.position(g);
    if (slice.is_whole(at)) keys_of<Element>(quad, keys);
    else slice.load_ends(at, keys);
  }
  __device__ __forceinline__ static void count(const u32 (&keys)[4], u32 counters) {
#pragma unroll
    for (int i = 0; i < 4; ++i) count_shared(counters + 4 * (keys[i] >> 21));
  }
};

// Rows of any length. A warp loads kAhead of its groups at once.
template <typename Element, int kThreads, int kAhead = 8>
struct Streamed {
  static constexpr bool kTakesTurns = true, kIsSampled = false, kIsHeld = false;
  using First = NothingFirst;
  const RowSlice<Element, kThreads> slice;

  __device__ __forceinline__ Streamed(const char* scores, int length, int rank, int cluster, unsigned char*,
                                      int multiple = 1)
      : slice(scores, length, rank, cluster, multiple) {}

  // Calls f(keys, position of the first).
  template <typename F>
  __device__ __forceinline__ void each(F f) const {
#pragma unroll 1
    for (int g = 0; g < slice.groups; g += kAhead) {
      uint4 quads[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int at = slice.position(g + i);
        if (g + i < slice.groups && slice.is_whole(at)) quads[i] = load_quad<Element>(slice.at(at));
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int at = slice.position(g + i);
        if (g + i < slice.groups) {
          u32 keys[4];
          if (slice.is_whole(at)) keys_of<Element>(quads[i], keys);
          else slice.load_ends(at, keys);
          f(keys, at);
        }
      }
    }
  }

  __device__ __forceinline__ void load_and_count(u32 counters) const {
    __syncthreads();  // the counters are zero
    count_again(counters, Digit(0, 0));
  }

  __device__ __forceinline__ void count_again(u32 counters, const Digit& digit) const {
    each([&](const u32 (&keys)[4], int) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (digit.counts(keys[i])) count_shared(counters + 4 * digit.of(keys[i]));
    });
  }

  template <typename Out>
  __device__ __forceinline__ void place(TopKShared& head, u32 limit, u32 before, const Out& list) const {
    place_chosen(head, {limit, 0}, {before, 0}, list);
  }

  template <typename Out>
  __device__ __forceinline__ void place_chosen(TopKShared& head, const Choice& choice, Before block,
                                               const Out& list) const {
    place_by_group<kThreads>(head, choice, block, list, [&](auto f) { each(f); });
  }
};

}  // namespace cumla::sparse
