// SPDX-License-Identifier: Apache-2.0
// From e4m3 to float16, without loss; and float16 compared.
#pragma once
#include "ptx/types.cuh"

namespace cumla {

// PTX ISA: Data Movement and Conversion Instructions: cvt
// The two lower bytes and the two upper ones, each as a pair of float16, which has every e4m3 number. NaN stays NaN.
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
// Of pairs of float16; of a number and NaN the number.
__device__ __forceinline__ u32 highest_f16x2(u32 a, u32 b) {
  u32 highest;
  asm("max.f16x2 %0, %1, %2;" : "=r"(highest) : "r"(a), "r"(b));
  return highest;
}

}  // namespace cumla
