// SPDX-License-Identifier: Apache-2.0
// Register moves, conversions between float32, 16-bit pairs and e4m3, and approximations by the special function
// unit.
#pragma once
#include "ptx/types.cuh"

namespace cumla::ptx {

// PTX ISA: Data Movement and Conversion Instructions: mov
// Copies to a new register whose value is opaque to the compiler.
__device__ __forceinline__ u32 copy_of(u32 value) {
  u32 copy;
  asm volatile("mov.b32 %0, %1;" : "=r"(copy) : "r"(value));
  return copy;
}

// PTX ISA: Data Movement and Conversion Instructions: mov
// Stops the compiler from computing the address again for each access.
template <typename Pointee>
__device__ __forceinline__ Pointee* copy_of(Pointee* pointer) {
  Pointee* copy;
  asm volatile("mov.b64 %0, %1;" : "=l"(copy) : "l"(pointer));
  return copy;
}

// PTX ISA: Data Movement and Conversion Instructions: selp
// Selects one of two kernel parameters. A conditional expression would select an address, and then load from constant
// memory.
template <typename T>
__device__ __forceinline__ T choose(bool first, T one, T other) {
  T chosen;
  if constexpr (sizeof(T) == 8)
    asm("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\nselp.b64 %0, %1, %2, p;\n}"
        : "=l"(chosen)
        : "l"(one), "l"(other), "r"(static_cast<int>(first)));
  else
    asm("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\nselp.b32 %0, %1, %2, p;\n}"
        : "=r"(chosen)
        : "r"(one), "r"(other), "r"(static_cast<int>(first)));
  return chosen;
}

// PTX ISA: Data Movement and Conversion Instructions: cvt
template <typename T>
__device__ __forceinline__ u32 pack_pair(float low, float high);

template <>
__device__ __forceinline__ u32 pack_pair<Bf16>(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <>
__device__ __forceinline__ u32 pack_pair<Fp16>(float low, float high) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// PTX ISA: Data Movement and Conversion Instructions: mov, cvt
template <typename T>
__device__ __forceinline__ float2 unpack_pair(u32 packed);

template <>
__device__ __forceinline__ float2 unpack_pair<Bf16>(u32 packed) {
  return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
}

template <>
__device__ __forceinline__ float2 unpack_pair<Fp16>(u32 packed) {
  float low, high;
  asm("{\n"
      ".reg .f16 a, b;\n"
      "mov.b32 {a, b}, %2;\n"
      "cvt.f32.f16 %0, a;\n"
      "cvt.f32.f16 %1, b;\n"
      "}"
      : "=f"(low), "=f"(high)
      : "r"(packed));
  return {low, high};
}

template <typename T>
__device__ __forceinline__ float sum_of_pair(u32 packed) {
  const float2 pair = unpack_pair<T>(packed);
  return pair.x + pair.y;
}

// PTX ISA: Data Movement and Conversion Instructions: cvt
// Rounds to nearest even; magnitudes above 448, also infinities, become 448; NaN becomes 0x7f. `a` is the lowest
// byte.
__device__ __forceinline__ u32 pack_e4m3x4(float a, float b, float c, float d) {
  u32 packed;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(packed)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}

// PTX ISA: Data Movement and Conversion Instructions: cvt
// Converts the two lower and the two upper bytes to pairs of float16, which holds every e4m3 number. NaN stays NaN.
__device__ __forceinline__ void expand_e4m3x4(u32 packed, u32& low, u32& high) {
  asm("{\n"
      ".reg .b16 first, second;\n"
      "mov.b32 {first, second}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, first;\n"
      "cvt.rn.f16x2.e4m3x2 %1, second;\n"
      "}"
      : "=r"(low), "=r"(high)
      : "r"(packed));
}

// PTX ISA: Half Precision Floating Point Instructions: max
// Maximum per element of float16 pairs. If one operand is NaN, the other one is returned.
__device__ __forceinline__ u32 highest_f16x2(u32 a, u32 b) {
  u32 highest;
  asm("max.f16x2 %0, %1, %2;" : "=r"(highest) : "r"(a), "r"(b));
  return highest;
}

// PTX ISA: Half Precision Floating Point Instructions: add
// Adds float16 pairs.
__device__ __forceinline__ u32 add_f16x2(u32 a, u32 b) {
  u32 sum;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}

// PTX ISA: Half Precision Floating Point Instructions: mul
// Multiplies 16-bit pairs.
template <typename T>
__device__ __forceinline__ u32 multiply_pairs(u32 a, u32 b) {
  u32 product;
  if constexpr (kIsBf16<T>)
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  else
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// PTX ISA: Floating Point Instructions: ex2
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// PTX ISA: Floating Point Instructions: rcp
// Accurate to 1 ulp, in one instruction. A division calls a subroutine.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// PTX ISA: Floating Point Instructions: lg2
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// PTX ISA: Floating Point Instructions: add
// Returns x + 0: -0 becomes +0, every NaN becomes 0x7fffffff, and subnormal numbers keep their bits.
__device__ __forceinline__ float canonical(float x) {
  asm("add.rn.f32 %0, %0, 0f00000000;" : "+f"(x));
  return x;
}

}  // namespace cumla::ptx
