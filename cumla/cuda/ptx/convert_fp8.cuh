// SPDX-License-Identifier: Apache-2.0
// Conversions to 8-bit floating point.
#pragma once
#include "ptx/types.cuh"

namespace cumla {

// PTX ISA: Data Movement and Conversion Instructions: cvt
// To nearest even; beyond 448, infinities included, to +-448; NaN becomes 0x7f. The first is the lowest byte.
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

}  // namespace cumla
