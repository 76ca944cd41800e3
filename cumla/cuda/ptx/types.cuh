// SPDX-License-Identifier: Apache-2.0
// Scalar names and the two 16-bit element types. No toolkit header: NVRTC compiles this text alone.
#pragma once

namespace cumla {

using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

struct Bf16 {};  // element-type tags: the storage is handled as raw 16-bit halves of 32-bit words
struct Fp16 {};
template <typename T>
constexpr bool kIsBf16 = false;
template <>
constexpr bool kIsBf16<Bf16> = true;

// 128 opaque bytes that cuTensorMapEncodeTiled filled on the host.
struct alignas(64) TensorMap {
  u64 words[16];
};

constexpr float kLn2 = 0.693147180559945309f;
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u);

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// PTX ISA: Data Movement and Conversion Instructions: mov
// In a register of its own, which the compiler does not see through.
__device__ __forceinline__ u32 copy_of(u32 value) {
  u32 copy;
  asm volatile("mov.b32 %0, %1;" : "=r"(copy) : "r"(value));
  return copy;
}

// PTX ISA: Data Movement and Conversion Instructions: mov
// An address that many accesses share, computed once for all of them.
template <typename Pointee>
__device__ __forceinline__ Pointee* copy_of(Pointee* pointer) {
  Pointee* copy;
  asm volatile("mov.b64 %0, %1;" : "=l"(copy) : "l"(pointer));
  return copy;
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

// PTX ISA: Floating Point Instructions: ex2
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// PTX ISA: Floating Point Instructions: rcp
// To one unit in the last place, in one instruction; a quotient takes a subroutine.
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

}  // namespace cumla
