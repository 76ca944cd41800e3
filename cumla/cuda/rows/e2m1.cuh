// SPDX-License-Identifier: Apache-2.0
// e2m1 numbers: a sign and one of 0, 1/2, 1, 3/2, 2, 3, 4, 6. Of two in a byte the first is the low half.
#pragma once
#include "rows/quantize.cuh"
#include "ptx/convert.cuh"
#include "ptx/types.cuh"

namespace cumla::rows {

using namespace ptx;

// Converts the four numbers of the low half of `codes` to pairs of bfloat16. A magnitude selects both of its bytes.
__device__ __forceinline__ void expand_e2m1x4(u32 codes, u32& low, u32& high) {
  const u32 magnitudes = codes & 0x7777;
  const u32 exponents = __byte_perm(0x3f3f3f00, 0x40404040, magnitudes);
  const u32 mantissas = __byte_perm(0xc0800000, 0xc0804000, magnitudes);
  low = __byte_perm(mantissas, exponents, 0x5140) | (codes << 12 & 0x8000) | (codes << 24 & 0x80000000);
  high = __byte_perm(mantissas, exponents, 0x7362) | (codes << 4 & 0x8000) | (codes << 16 & 0x80000000);
}

constexpr float kMostE2m1 = 6.0f;

// The power of two that scales e4m3 numbers of V4 and V4.1.
__device__ __forceinline__ float power_scale_of(float largest) {
  constexpr float kLeast = 1e-4f;
  const u32 bits = __float_as_uint(fmaxf(fminf(largest, kMostFloat), kLeast) / kMostE4m3);
  return __uint_as_float((bits + 0x007fffffu) & 0xff800000u);  // a mantissa other than 0 carries into the exponent
}

// The power of two that scales e2m1 numbers. Its inverse is normal, too.
__device__ __forceinline__ float e2m1_power_scale_of(float largest) {
  constexpr float kLeast = __builtin_bit_cast(float, 0x00800000u);  // 2^-126
  const u32 bits = __float_as_uint(fmaxf(fminf(largest, kMostFloat), kMostE2m1 * kLeast) / kMostE2m1);
  return __uint_as_float((bits + 0x007fffffu) & 0xff800000u);
}

// The e4m3 scale of e2m1 numbers, as float32.
__device__ __forceinline__ float e4m3_scale_of(float largest) {
  constexpr float kLeast = 1.0f / 512;  // of e4m3
  u32 low, high;
  expand_e4m3x4(pack_e4m3x4(fmaxf(largest, kMostE2m1 * kLeast) / kMostE2m1, 0.0f, 0.0f, 0.0f), low, high);
  return unpack_pair<Fp16>(low).x;
}

// The nearest e2m1 number of x / scale, even ones at ties; above 6 it is 6. Exact if the products are. NaN is 6.
__device__ __forceinline__ u32 e2m1_of(float x, float scale) {
  const float magnitude = fabsf(x);
  u32 code = 0;
#pragma unroll
  for (int i = 0; i < 7; ++i) {
    constexpr float kTies[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
    const float tie = kTies[i] * scale;
    code += i % 2 ? !(magnitude < tie) : !(magnitude <= tie);
  }
  return code | (__float_as_uint(x) >> 28 & 8);
}

// Stores eight numbers times a power of two.
template <typename Elements>
__device__ __forceinline__ void store_e2m1_times(char* row, int octet, const Elements& elements, float inverse) {
  u32 codes = 0;
#pragma unroll
  for (int i = 0; i < kOctet / 2; ++i) {
    const float2 pair = elements.pair(i);
    // The sign is not that of a product, for one that is NaN has none.
    const u32 low = e2m1_of(fabsf(pair.x) * inverse, 1.0f) & 7 | (__float_as_uint(pair.x) >> 28 & 8);
    const u32 high = e2m1_of(fabsf(pair.y) * inverse, 1.0f) & 7 | (__float_as_uint(pair.y) >> 28 & 8);
    codes |= (low | high << 4) << 8 * i;
  }
  reinterpret_cast<u32*>(row)[octet] = codes;
}

template <typename Elements>
__device__ __forceinline__ void store_e2m1(char* row, int octet, const Elements& elements, float scale) {
  u32 codes = 0;
#pragma unroll
  for (int i = 0; i < kOctet / 2; ++i) {
    const float2 pair = elements.pair(i);
    codes |= (e2m1_of(pair.x, scale) | e2m1_of(pair.y, scale) << 4) << 8 * i;
  }
  reinterpret_cast<u32*>(row)[octet] = codes;
}

}  // namespace cumla::rows
