// SPDX-License-Identifier: Apache-2.0
// The four scales of a packed row, of 128 columns each, and what they are divided by.
#pragma once
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace ptx;

// Bounds of the exponent of a row's highest scale, so that it can be divided out and multiplied in again.
constexpr u32 kLeastExponent = 127 - 60, kMostExponent = 127 + 60;
// After division the highest scale is below 2^7; times 448, the highest e4m3 number, it is finite in float16. A scale
// 2^18 lower still has all its bits, and so have its products with numbers from 1/4 on.
constexpr int kHeadroom = 6;
constexpr float kLeastScale = 1.0f / (1 << (18 - kHeadroom));

// Bits of the highest scale of a row, without sign; NaN if one of them is NaN.
__device__ __forceinline__ u32 highest_scale(const uint4& bits) {
  return max(max(bits.x & 0x7fffffffu, bits.y & 0x7fffffffu), max(bits.z & 0x7fffffffu, bits.w & 0x7fffffffu));
}
__device__ __forceinline__ u32 bounded_exponent(u32 highest) {
  return min(max(highest >> 23, kLeastExponent), kMostExponent);
}

// The factor of a row's scales.
__device__ __forceinline__ float inverse_of(u32 bounded) {
  return __uint_as_float((254 + kHeadroom - bounded) << 23);
}

// The least divisor for scores of a row. Scales below 2^-40 of the row's highest one are raised to that; their
// columns are negligible.
__device__ __forceinline__ u32 least_divisor(const uint4& bits) {
  const u32 highest = highest_scale(bits);
  return max(highest - min(highest, 40u << 23), kLeastExponent << 23);
}
__device__ __forceinline__ float divisor_of(u32 bits, u32 least) {
  return __uint_as_float((bits & 0x80000000u) | max(bits & 0x7fffffffu, least));
}

}  // namespace cumla::mla
