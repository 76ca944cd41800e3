// SPDX-License-Identifier: Apache-2.0
// Passes that narrow the range with the k-th key of one block, until all keys of the range are chosen.
#pragma once
#include "sparse/top_k/find.cuh"
#include "sparse/top_k/keys.cuh"

namespace cumla::sparse {

// Keys, or positions, from `first` to `first` + `width`.
struct Range {
  u32 first, width;

  // A bin of a pass over the range has 2^shift of them.
  __device__ __forceinline__ int shift() const { return max(21 - __clz(static_cast<int>(width)), 0); }
  __device__ __forceinline__ bool has(u32 value) const { return value - first <= width; }
  __device__ __forceinline__ u32 bin_of(u32 value) const { return (value - first) >> shift(); }
  __device__ __forceinline__ Range of_bin(u32 bin) const { return {first + (bin << shift()), (1u << shift()) - 1}; }
};

// The chosen keys: all before `key`, and those that equal it at positions before `end`.
struct Limit {
  u32 key;
  int end;

  __device__ __forceinline__ bool takes(u32 one, int position) const {
    return one < key || (one == key && position < end);
  }
};

// Bins of scores: 32 for each octave from 2^-16 to 2^16, of either sign. Those in the middle, and at both ends, have
// what is smaller, and larger.
struct Octaves {
  static constexpr u32 kKeys = 32u << 23, kWidth = 1u << 18;
  static constexpr u32 kLargest = 0x7fffffffu - (143u << 23) + 1, kSmallest = 0x80000000u + (111u << 23);  // keys

  __device__ __forceinline__ u32 bin_of(u32 key) const {
    const u32 positive = min(max(key, kLargest), kLargest + kKeys) - kLargest;
    const u32 negative = max(min(key, kSmallest + kKeys - 1), kSmallest) - kSmallest;
    return (positive + negative) / kWidth;
  }
  __device__ __forceinline__ Range of_bin(u32 bin) const {
    constexpr u32 kHalf = kBins / 2;
    const u32 first = bin < kHalf ? kLargest + bin * kWidth : kSmallest + (bin - kHalf) * kWidth;
    if (bin == 0) return {0, kLargest + kWidth - 1};
    if (bin == kHalf) return {kLargest + kKeys, kSmallest + kWidth - 1 - (kLargest + kKeys)};
    if (bin == kBins - 1) return {first, kNoKey - 1 - first};
    return {first, kWidth - 1};
  }
};
static_assert(2 * Octaves::kKeys / Octaves::kWidth == kBins, "a bin for each range");

// Bins of keys before `limit`, by their distance from it: 64 for each octave.
struct Distances {
  u32 limit;

  __device__ __forceinline__ u32 bin_of(u32 key) const {
    const u32 distance = limit - key;
    const int zeros = __clz(static_cast<int>(distance));
    return kBins - 1 - ((31 - zeros) << 6 | (distance << zeros >> 25 & 63));
  }
  __device__ __forceinline__ Range of_bin(u32 bin) const {
    const u32 from_end = kBins - 1 - bin, parts = 64 + (from_end & 63);
    const int octave = static_cast<int>(from_end >> 6) - 6;
    const u32 least = octave < 0 ? parts >> -octave : parts << octave;
    const u32 width = octave < 0 ? 0 : (1u << octave) - 1;
    return {limit - least - width, width};
  }
};

// Finds the bin with the need-th value. Called by all threads, after counting.
template <int kThreads>
__device__ __forceinline__ Found find_alone(TopKShared& head, const u32* histogram, u32 need) {
  constexpr int kOfThread = kBins / kThreads;
  const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32;
  __syncthreads();
  u32 bins[kOfThread], sum = 0;
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) sum += bins[i] = histogram[threadIdx.x * kOfThread + i];
  const u32 inclusive = split::warp_inclusive_sum(sum);
  if (lane == 31) head.sums[0][warp] = inclusive;
  __syncthreads();
  u32 before = __reduce_add_sync(kAllLanes, lane < warp ? head.sums[0][lane] : 0) + inclusive - sum;
  if (before < need && need <= before + sum) {
    u32 bin = threadIdx.x * kOfThread, count = bins[0];
#pragma unroll
    for (int i = 1; i < kOfThread; ++i)
      if (before + count < need) before += count, count = bins[i], ++bin;
    head.found = {bin, before, count, 0, 0};
  }
  __syncthreads();
  return head.found;
}

// The limit before which are `need` keys of a block, all of which are before that of the bins of the first pass. `each`
// calls a function with every key and its position, which is at most `last`; keys that are kNoKey do not count.
template <int kThreads, typename Each>
__device__ __forceinline__ Limit narrow(TopKShared& head, u32 need, u32 last, const Distances& bins, Each each) {
  Limit limit = {0, -4};  // no position: some before a row are above that
  Range range = {0, bins.limit - 1};
  bool of_positions = false;
#pragma unroll 1
  for (int pass = 0;; ++pass) {
    u32* const histogram = head.histogram[pass % kPasses];
    if (pass >= kPasses) {
#pragma unroll 1
      for (int i = threadIdx.x; i < kBins; i += kThreads) histogram[i] = 0;
      __syncthreads();
    }
    const u32 counters = copy_of(shared_address(histogram));
    each([&](u32 key, int position) {
      const u32 value = of_positions ? static_cast<u32>(position) : key;
      if (!range.has(value) || (of_positions && key != limit.key)) return;
      count_shared(counters + 4 * (pass == 0 ? bins.bin_of(key) : range.bin_of(value)));
    });
    const Found found = find_alone<kThreads>(head, histogram, need);
    need -= found.before;
    range = pass == 0 ? bins.of_bin(found.bin) : range.of_bin(found.bin);
    const u32 behind = range.first + range.width + 1;
    if (of_positions) limit.end = static_cast<int>(behind);
    else limit.key = behind;
    // Passes end at one position even if scores change meanwhile.
    if (found.count == need || (of_positions && range.width == 0)) return limit;
    if (range.width == 0) {  // equal keys: those at the lowest positions
      of_positions = true;
      limit.key = range.first;
      range = {0, last};
    }
  }
}

}  // namespace cumla::sparse
