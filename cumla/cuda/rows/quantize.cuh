// SPDX-License-Identifier: Apache-2.0
// Quantises rows of bfloat16, float16 or float32 to e4m3 with a float32 scale: value = e4m3 * scale.
//
// The bits are those of cumla/reference/indexer/cache.py, which uses the same float32 operations. Compilation flushes
// subnormal numbers to zero, so the reference does, too.
#pragma once
#include "rows/elements.cuh"
#include "ptx/convert.cuh"
#include "ptx/types.cuh"

namespace cumla::rows {

using namespace ptx;

constexpr float kMostE4m3 = 448.0f;
constexpr float kMostFloat = __builtin_bit_cast(float, 0x7f7fffffu);
constexpr float kLeastScale = __builtin_bit_cast(float, 0x00800000u);  // normal, and its inverse is normal, too
constexpr float kLeastPowerScale = 1e-4f;  // least scale that is then rounded up to a power of two

// Largest magnitude of eight elements; NaN is ignored.
template <typename Elements>
__device__ __forceinline__ float largest_of(const Elements& octet) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kOctet / 2; ++i) {
    const float2 pair = octet.pair(i);
    largest = fmaxf(largest, fmaxf(fabsf(pair.x), fabsf(pair.y)));
  }
  return largest;
}

// Maximum over `lanes` neighbouring lanes, a power of two. The whole warp must call it.
__device__ __forceinline__ float largest_of_lanes(float largest, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
  return largest;
}

// Returns a finite, normal scale for any row; infinities count as the largest finite number.
__device__ __forceinline__ float scale_of(float largest, bool power_of_two) {
  const float scale = fminf(largest, kMostFloat) / kMostE4m3;
  if (!power_of_two) return fmaxf(scale, kLeastScale);
  const u32 bits = __float_as_uint(fmaxf(scale, kLeastPowerScale));
  return __uint_as_float((bits + 0x007fffffu) & 0xff800000u);  // a mantissa other than 0 carries into the exponent
}

template <typename Elements>
__device__ __forceinline__ void store_quantized(char* row, int octet, const Elements& elements, float inverse) {
  u32 words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 low = elements.pair(2 * i), high = elements.pair(2 * i + 1);
    words[i] = pack_e4m3x4(low.x * inverse, low.y * inverse, high.x * inverse, high.y * inverse);
  }
  reinterpret_cast<uint2*>(row)[octet] = {words[0], words[1]};
}

}  // namespace cumla::rows
