// SPDX-License-Identifier: Apache-2.0
// Keys: 32 bits whose unsigned order is that of the scores, the largest score first.
//
// A key is 0 for NaN; then inf, positive numbers, zero of either sign, negative numbers and -inf. kNoKey is none of
// them. 16-bit scores have the keys of the same float32 numbers.
#pragma once
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/tma.cuh"
#include "sparse/top_k/layout.cuh"

namespace cumla::sparse {

constexpr u32 kNoKey = 0xffffffffu;

template <typename Element>
constexpr int kElementBytes = 2;
template <>
constexpr int kElementBytes<Fp32> = 4;

__device__ __forceinline__ u32 key_of(u32 float_bits) {
  const u32 bits = __float_as_uint(canonical(__uint_as_float(float_bits)));
  return bits ^ (0x7fffffffu & ~static_cast<u32>(static_cast<int>(bits) >> 31));
}

// Four neighbouring scores as stored; 16-bit ones in the first two words.
template <typename Element>
__device__ __forceinline__ uint4 load_quad(const char* address) {
  if constexpr (kElementBytes<Element> == 4) {
    return load_global_16(reinterpret_cast<const uint4*>(address));
  } else {
    const uint2 words = *reinterpret_cast<const uint2*>(address);
    return {words.x, words.y, 0, 0};
  }
}

template <typename Element>
__device__ __forceinline__ void keys_of(const uint4& quad, u32 (&keys)[4]) {
  if constexpr (kElementBytes<Element> == 4) {
    keys[0] = key_of(quad.x), keys[1] = key_of(quad.y), keys[2] = key_of(quad.z), keys[3] = key_of(quad.w);
  } else {
    const float2 low = unpack_pair<Element>(quad.x), high = unpack_pair<Element>(quad.y);
    keys[0] = key_of(__float_as_uint(low.x)), keys[1] = key_of(__float_as_uint(low.y));
    keys[2] = key_of(__float_as_uint(high.x)), keys[3] = key_of(__float_as_uint(high.y));
  }
}

template <typename Element>
__device__ __forceinline__ u32 load_key(const char* address) {
  if constexpr (kElementBytes<Element> == 4) return key_of(*reinterpret_cast<const u32*>(address));
  else return key_of(__float_as_uint(unpack_pair<Element>(*reinterpret_cast<const unsigned short*>(address)).x));
}

__device__ __forceinline__ int clamp(int value, int least, int most) { return max(least, min(value, most)); }

__device__ __forceinline__ int start_of(const TopKParams& p, int index) {
  return p.row_starts == nullptr ? 0 : clamp(p.row_starts[index * p.row_starts_stride], 0, p.width);
}
__device__ __forceinline__ ScoreRow row_of(const TopKParams& p, int index) {
  const int start = start_of(p, index), most = p.width - start;
  return {index, start, p.row_lens == nullptr ? most : clamp(p.row_lens[index * p.row_lens_stride], 0, most)};
}

// The row's first score.
template <typename Element>
__device__ __forceinline__ const char* scores_of(const TopKParams& p, const ScoreRow& row) {
  return p.scores + row.index * p.scores_stride + static_cast<i64>(row.start) * kElementBytes<Element>;
}

// L2 fetches neighbouring scores, but for a few at either end. By one thread.
template <typename Element>
__device__ __forceinline__ void prefetch_scores(const char* scores, int count) {
  const u64 begin = reinterpret_cast<u64>(scores), end = begin + count * kElementBytes<Element>;
  const u64 first = begin + 15 & ~15ull, last = end & ~15ull;
  if (first < last) prefetch_bulk_l2(reinterpret_cast<const void*>(first), static_cast<u32>(last - first));
}

// The scores of a row that a thread reads. Warps, in the order of blocks, take neighbouring segments of groups of 128
// scores; a lane has four of a group. Groups begin at an aligned score, up to three before the row.
template <typename Element, int kThreads>
struct RowSlice {
  const char* origin;  // of position 0
  int first;           // position of this thread's first score
  int groups;          // of each warp: a multiple of what the constructor gets
  int length;

  __device__ __forceinline__ RowSlice(const char* scores, int length, int rank, int cluster, int multiple = 1)
      : origin(scores), length(length) {
    constexpr int kBytes = kElementBytes<Element>;
    const int early = static_cast<int>(reinterpret_cast<u64>(scores) / kBytes % 4);
    const int in_round = cluster * kThreads * 4 * multiple;
    groups = static_cast<int>((static_cast<u32>(length + early) + in_round - 1) / in_round) * multiple;
    const int warp = rank * (kThreads / 32) + static_cast<int>(threadIdx.x) / 32;
    first = warp * groups * 128 + static_cast<int>(threadIdx.x) % 32 * 4 - early;
  }
  __device__ __forceinline__ int position(int group) const { return first + group * 128; }
  __device__ __forceinline__ const char* at(int position) const {
    return origin + static_cast<i64>(position) * kElementBytes<Element>;
  }
  // True if the four scores from there on belong to the row.
  __device__ __forceinline__ bool is_whole(int position) const { return position >= 0 && position + 4 <= length; }
  // Loads keys of four scores that reach past an end of the row, without reading those past it.
  __device__ __forceinline__ void load_ends(int position, u32 (&keys)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int place = position + i;
      keys[i] = place >= 0 && place < length ? load_key<Element>(at(place)) : kNoKey;
    }
  }
};

}  // namespace cumla::sparse
