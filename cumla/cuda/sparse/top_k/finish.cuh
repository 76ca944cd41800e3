// SPDX-License-Identifier: Apache-2.0
// From a list of entries in shared memory, in the order of positions, to the outputs: by one block.
#pragma once
#include "sparse/top_k/rows.cuh"

namespace cumla::sparse {

// The k-th key after a pass: its upper bits; how many keys with these bits are needed, and exist.
struct Threshold {
  u32 prefix, need, count;
  int pass;  // the last pass made

  __device__ __forceinline__ bool is_whole() const { return need == count; }
  __device__ __forceinline__ void narrow(int pass_made, const Found& found) {
    prefix = prefix << bits_of(pass_made) | found.bin;
    need -= found.before;
    count = found.count;
    pass = pass_made;
  }
  __device__ __forceinline__ Choice choice() const {
    if (is_whole()) return {(prefix + 1) << shift_of(pass), 0};
    return {prefix, need};
  }
};

__device__ __forceinline__ int count_of(const ScoreRow& row, int topk) { return min(row.length, topk); }

template <typename Element>
struct Output {
  const TopKParams& p;
  const ScoreRow row;
  const int* table;
  i64 offset;
  int pages;

  __device__ __forceinline__ Output(const TopKParams& p, const ScoreRow& row)
      : p(p), row(row), table(nullptr), offset(0), pages(0) {
    if (p.offsets != nullptr) offset = p.offsets[row.index * p.offsets_stride];
    if (p.block_table == nullptr) return;
    const int request = p.row_to_request == nullptr ? row.index : p.row_to_request[row.index * p.requests_stride];
    const bool exists = request >= 0 && request < p.requests;
    table = p.block_table + (exists ? request : 0) * p.table_stride;
    pages = exists ? p.max_pages : 0;
  }

  // The index of a position; -1 if there is none.
  __device__ __forceinline__ int index_of(int position) const {
    i64 index = position + offset;
    if (p.block_table != nullptr) {
      if (index < 0) return -1;
      const u32 place = static_cast<u32>(index), page = place / p.page_size;
      const i64 entry = page < static_cast<u32>(pages) ? table[page] : -1;
      index = entry < 0 ? -1 : entry * p.page_size + (place - page * p.page_size);
    }
    return index < 0 || index > 0x7fffffff ? -1 : static_cast<int>(index);
  }

  __device__ __forceinline__ void write(int slot, int position) const {
    p.out[row.index * p.out_stride + slot] = index_of(position);
    if (p.positions != nullptr) p.positions[row.index * p.positions_stride + slot] = position;
    if (p.values != nullptr) copy_value(slot, position);
  }

  // Fills the slots from the row's length on; `thread` has every `threads`-th.
  __device__ __forceinline__ void fill(int thread, int threads) const {
#pragma unroll 1
    for (int slot = row.length + thread; slot < p.topk; slot += threads) {
      p.out[row.index * p.out_stride + slot] = -1;
      if (p.positions != nullptr) p.positions[row.index * p.positions_stride + slot] = -1;
      if (p.values != nullptr) store_value(slot, kLeast);
    }
  }

  __device__ __forceinline__ void write_count() const {
    p.counts[row.index * p.counts_stride] = count_of(row, p.topk);
  }

 private:
  static constexpr bool kIsWide = kElementBytes<Element> == 4;
  static constexpr u32 kLeast = kIsWide ? 0xff800000u : kIsBf16<Element> ? 0xff80u : 0xfc00u;  // -inf

  __device__ __forceinline__ void copy_value(int slot, int position) const {
    if constexpr (kIsWide) store_value(slot, reinterpret_cast<const u32*>(scores_of<Element>(p, row))[position]);
    else store_value(slot, reinterpret_cast<const unsigned short*>(scores_of<Element>(p, row))[position]);
  }
  __device__ __forceinline__ void store_value(int slot, u32 bits) const {
    const i64 place = static_cast<i64>(row.index) * p.topk + slot;
    if constexpr (kIsWide) reinterpret_cast<u32*>(p.values)[place] = bits;
    else reinterpret_cast<unsigned short*>(p.values)[place] = static_cast<unsigned short>(bits);
  }
};

// True if slots have positions and nothing else is written.
__device__ __forceinline__ bool has_positions_alone(const TopKParams& p) {
  return p.block_table == nullptr && p.offsets == nullptr && p.positions == nullptr && p.values == nullptr;
}

// Writes a row then. All threads must have seen the list of positions.
template <int kThreads>
__device__ __forceinline__ void write_positions(const TopKParams& p, const ScoreRow& row, const int* positions,
                                                u32 wanted) {
  int* const out = p.out + row.index * p.out_stride;
  const u32 in_fours = reinterpret_cast<u64>(out) % 16 == 0 ? wanted & ~3u : 0;
#pragma unroll 1
  for (u32 slot = 4 * threadIdx.x; slot < in_fours; slot += 4 * kThreads)
    *reinterpret_cast<int4*>(out + slot) = *reinterpret_cast<const int4*>(positions + slot);
#pragma unroll 1
  for (u32 slot = in_fours + threadIdx.x; slot < wanted; slot += kThreads) out[slot] = positions[slot];
}

__device__ constexpr int power_of_two_from(int count) {
  int power = 2;
  while (power < count) power *= 2;
  return power;
}

// Sorts entries, of which those from `count` on are arbitrary. `size` is a power of two.
template <int kThreads>
__device__ __forceinline__ void sort_entries(u64* list, int count, int size) {
#pragma unroll 1
  for (int i = count + threadIdx.x; i < size; i += kThreads) list[i] = ~0ull;
#pragma unroll 1
  for (int length = 2; length <= size; length *= 2) {
#pragma unroll 1
    for (int step = length / 2; step > 0; step /= 2) {
      __syncthreads();
#pragma unroll 1
      for (int i = threadIdx.x; i < size / 2; i += kThreads) {
        const int low = i / step * (2 * step) + i % step, high = low + step;
        const u64 a = list[low], b = list[high];
        if ((a > b) == ((low & length) == 0)) list[low] = b, list[high] = a;
      }
    }
  }
  __syncthreads();
}

// Finishes a row: makes the remaining passes over the `count` entries of a list, and writes the chosen ones to slots
// from `first_slot` on. All threads must have seen the list.
template <typename Element, int kThreads>
__device__ __forceinline__ void finish(TopKShared& head, u64* list, int count, int first_slot, Threshold threshold,
                                       const TopKParams& p) {
#pragma unroll 1
  while (!threshold.is_whole() && threshold.pass + 1 < kPasses) {
    const int pass = threshold.pass + 1;
    const Digit digit(pass, threshold.prefix);
    const u32 counters = counters_of(head, pass);
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const u32 key = list[i] >> 32;
      if (digit.counts(key)) count_shared(counters + 4 * digit.of(key));
    }
    threshold.narrow(pass, find_in_block<kThreads>(head, pass, threshold.need));
  }
  const Choice choice = threshold.choice();
  const ScoreRow row = head.row;
  const Output<Element> output(p, row);

  // Warps take neighbouring segments of the list, lanes neighbouring entries.
  const int lane = threadIdx.x % 32, rounds = (count + kThreads - 1) / kThreads;
  const int first = static_cast<int>(threadIdx.x) / 32 * rounds * 32 + lane;
  const auto key_at = [&](int i) { return i < count ? static_cast<u32>(list[i] >> 32) : kNoKey; };
  Before own = {0, 0};
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    const u32 key = key_at(first + round * 32);
    own.chosen += __popc(__ballot_sync(kAllLanes, key < choice.limit));
    own.equal += __popc(__ballot_sync(kAllLanes, key == choice.limit));
  }
  Before before = before_warp<kThreads, true>(head, own, {0, 0});
  const u32 lower_lanes = (1u << lane) - 1;
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    const int i = first + round * 32;
    const u32 key = key_at(i);
    const u32 chosen = __ballot_sync(kAllLanes, key < choice.limit);
    const u32 equal = __ballot_sync(kAllLanes, key == choice.limit);
    const u32 ties = before.equal + __popc(equal & lower_lanes);
    const u32 slot = before.chosen + __popc(chosen & lower_lanes) + min(ties, choice.ties);
    const bool is_chosen = key < choice.limit || (key == choice.limit && ties < choice.ties);
    if (!p.is_sorted) {
      if (is_chosen && slot + first_slot < p.topk)
        output.write(slot + first_slot, static_cast<int>(list[i]));
    } else if (!is_chosen && i < count) {
      list[i] = ~0ull;
    }
    before.chosen += __popc(chosen);
    before.equal += __popc(equal);
  }
  if (threadIdx.x == 0) output.write_count();
  if (!p.is_sorted) return;
  sort_entries<kThreads>(list, count, power_of_two_from(count));
#pragma unroll 1
  for (int slot = threadIdx.x; slot < count_of(row, p.topk); slot += kThreads)
    output.write(slot, static_cast<int>(list[slot]));
}

}  // namespace cumla::sparse
