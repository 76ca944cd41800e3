// SPDX-License-Identifier: Apache-2.0
// Loads cosines and sines of a thread's columns, and rotates by them.
#pragma once
#include "mha/append_kv_cache/params.cuh"
#include "rows/elements.cuh"
#include "ptx/convert.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

using namespace ptx;
using namespace rows;

__device__ __forceinline__ float table_entry(const AppendKvCacheParams& p, const Angles& angles, i64 position,
                                             int column) {
  const char* const at = angles.data + position * angles.stride_position + column * angles.stride_column;
  if (p.table_type == kFloat) return *reinterpret_cast<const float*>(at);
  const u32 bits = *reinterpret_cast<const unsigned short*>(at);
  return p.table_type == kBfloat16 ? unpack_pair<Bf16>(bits).x : unpack_pair<Fp16>(bits).x;
}

// Cosines and sines of the eight pairs of a thread. Half-split: pairs of the columns of the first octet. Interleaved:
// the four pairs of the first octet, then those of the second.
struct Turn {
  float cos[kOctet], sin[kOctet];
};

// True if four neighbouring entries are contiguous and aligned for one load.
__device__ __forceinline__ bool is_packed(const AppendKvCacheParams& p, const Angles& angles) {
  const int size = p.table_type == kFloat ? 4 : 2;
  const u64 bits = reinterpret_cast<u64>(angles.data) | static_cast<u64>(angles.stride_position);
  return angles.stride_column == size && bits % (4 * size) == 0;
}

// Loads four entries from each of two columns, which must be multiples of four.
template <typename Words>
__device__ __forceinline__ void load_fours(const Angles& angles, i64 position, int one, int two, Words& low,
                                           Words& high) {
  const Words* const row = reinterpret_cast<const Words*>(angles.data + position * angles.stride_position);
  low = row[one / 4], high = row[two / 4];
}

__device__ __forceinline__ void unpack_fours(const float4& low, const float4& high, float (&to)[kOctet]) {
  to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
  to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
}

template <typename T>
__device__ __forceinline__ void unpack_fours(const uint2& low, const uint2& high, float (&to)[kOctet]) {
  const float2 a = unpack_pair<T>(low.x), b = unpack_pair<T>(low.y);
  const float2 c = unpack_pair<T>(high.x), d = unpack_pair<T>(high.y);
  unpack_fours({a.x, a.y, b.x, b.y}, {c.x, c.y, d.x, d.y}, to);
}

__device__ __forceinline__ Turn load_turn(const AppendKvCacheParams& p, i64 position, int unit) {
  const int one = p.interleaved ? unit * (kOctet / 2) : unit * kOctet;
  const int two = one + (p.interleaved ? p.keys.rope_units : 1) * (kOctet / 2);
  Turn turn;
  if (!is_packed(p, p.cos) || !is_packed(p, p.sin)) {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const int pair = i < kOctet / 2 ? one + i : two + i - kOctet / 2;
      turn.cos[i] = table_entry(p, p.cos, position, pair);
      turn.sin[i] = table_entry(p, p.sin, position, pair);
    }
  } else if (p.table_type == kFloat) {
    float4 cos[2], sin[2];
    load_fours(p.cos, position, one, two, cos[0], cos[1]);
    load_fours(p.sin, position, one, two, sin[0], sin[1]);
    unpack_fours(cos[0], cos[1], turn.cos);
    unpack_fours(sin[0], sin[1], turn.sin);
  } else {
    uint2 cos[2], sin[2];
    load_fours(p.cos, position, one, two, cos[0], cos[1]);
    load_fours(p.sin, position, one, two, sin[0], sin[1]);
    if (p.table_type == kBfloat16) {
      unpack_fours<Bf16>(cos[0], cos[1], turn.cos);
      unpack_fours<Bf16>(sin[0], sin[1], turn.sin);
    } else {
      unpack_fours<Fp16>(cos[0], cos[1], turn.cos);
      unpack_fours<Fp16>(sin[0], sin[1], turn.sin);
    }
  }
  return turn;
}

__device__ __forceinline__ float2 turned(float x, float y, float cos, float sin) {
  return {cos * x - sin * y, sin * x + cos * y};
}

__device__ __forceinline__ Octet<Fp32> octet_of(const float (&x)[kOctet]) {
  return {{x[0], x[1], x[2], x[3]}, {x[4], x[5], x[6], x[7]}};
}

template <bool kInterleaved, typename T>
__device__ __forceinline__ void rotate(const Octet<T>& first, const Octet<T>& second, const Turn& turn,
                                       Octet<Fp32>& new_first, Octet<Fp32>& new_second) {
  float a[kOctet], b[kOctet];
#pragma unroll
  for (int i = 0; i < kOctet / 2; ++i) {
    const float2 x = first.pair(i), y = second.pair(i);
    const int even = 2 * i, odd = even + 1;
    const int at = kInterleaved ? i : even, then = kInterleaved ? i + kOctet / 2 : odd;
    const float2 one = turned(x.x, kInterleaved ? x.y : y.x, turn.cos[at], turn.sin[at]);
    const float2 two = turned(kInterleaved ? y.x : x.y, y.y, turn.cos[then], turn.sin[then]);
    a[even] = one.x;
    a[odd] = kInterleaved ? one.y : two.x;
    b[even] = kInterleaved ? two.x : one.y;
    b[odd] = two.y;
  }
  new_first = octet_of(a);
  new_second = octet_of(b);
}

}  // namespace cumla::mha
