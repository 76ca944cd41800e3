// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding of rows of kRopeDim columns. A lane has eight columns; kRopeDim / 8 neighbouring lanes
// have a row.
//
// Members that Params, the parameter struct of the kernel, must have:
//   cos_sin           [max_position][kRopeDim / 2 cosines | kRopeDim / 2 sines]
//   cos_sin_stride    bytes
//   cos_sin_is_float  the table is float32, else of type T
//   max_position      rows of the table
#pragma once
#include "rows/elements.cuh"
#include "ptx/convert.cuh"
#include "ptx/types.cuh"

namespace cumla::rows {

using namespace ptx;

template <typename Params>
__device__ __forceinline__ const char* table_row(const Params& p, i64 position) {
  return p.cos_sin + position * p.cos_sin_stride;
}

// Four neighbouring entries of a row of the table.
template <typename T, typename Params>
__device__ __forceinline__ float4 table_entries(const Params& p, const char* row, int column) {
  if (p.cos_sin_is_float) return *reinterpret_cast<const float4*>(row + 4 * column);
  const uint2 words = *reinterpret_cast<const uint2*>(row + 2 * column);
  const float2 low = unpack_pair<T>(words.x), high = unpack_pair<T>(words.y);
  return {low.x, low.y, high.x, high.y};
}

// Element e of an octet becomes cos[e] * element + sin[e] * partner. The sines include the signs.
struct Rotation {
  float cos[kOctet], sin[kOctet];
};

template <typename T, int kRopeDim, bool kInterleaved, typename Params>
__device__ __forceinline__ Rotation find_rotation(const Params& p, const char* table_row, int octet) {
  constexpr int kHalf = kRopeDim / 2, kHalfOctets = kHalf / kOctet;
  if (kInterleaved) {
    const float4 cos = table_entries<T>(p, table_row, 4 * octet), sin = table_entries<T>(p, table_row,
                                                                                         kHalf + 4 * octet);
    return {{cos.x, cos.x, cos.y, cos.y, cos.z, cos.z, cos.w, cos.w},
            {-sin.x, sin.x, -sin.y, sin.y, -sin.z, sin.z, -sin.w, sin.w}};
  }
  Rotation rotation;
  const float sign = octet < kHalfOctets ? -1.0f : 1.0f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int column = octet % kHalfOctets * kOctet + 4 * half;
    const float4 cos = table_entries<T>(p, table_row, column), sin = table_entries<T>(p, table_row, kHalf + column);
    const float cosines[4] = {cos.x, cos.y, cos.z, cos.w}, sines[4] = {sin.x, sin.y, sin.z, sin.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      rotation.cos[4 * half + i] = cosines[i];
      rotation.sin[4 * half + i] = sign * sines[i];
    }
  }
  return rotation;
}

// The whole warp must call it: half-split pairs are kRopeDim / 16 lanes apart.
template <int kRopeDim, bool kInterleaved, typename Element>
__device__ __forceinline__ Octet<Fp32> rotate(const Octet<Element>& octet, const Rotation& rotation) {
  float2 pairs[kOctet / 2];
#pragma unroll
  for (int i = 0; i < kOctet / 2; ++i) {
    const float2 own = octet.pair(i);
    float2 partner = {own.y, own.x};
    if (!kInterleaved) {
      partner.x = __shfl_xor_sync(0xffffffffu, own.x, kRopeDim / 2 / kOctet);
      partner.y = __shfl_xor_sync(0xffffffffu, own.y, kRopeDim / 2 / kOctet);
    }
    pairs[i] = {rotation.cos[2 * i] * own.x + rotation.sin[2 * i] * partner.x,
                rotation.cos[2 * i + 1] * own.y + rotation.sin[2 * i + 1] * partner.y};
  }
  return {{pairs[0].x, pairs[0].y, pairs[1].x, pairs[1].y}, {pairs[2].x, pairs[2].y, pairs[3].x, pairs[3].y}};
}

template <typename Params>
__device__ __forceinline__ bool has_rotation(const Params& p, i64 position) {
  return position >= 0 && position < p.max_position;
}

}  // namespace cumla::rows
