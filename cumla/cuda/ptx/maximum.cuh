// SPDX-License-Identifier: Apache-2.0
// Maxima of float32.
#pragma once
#include "ptx/types.cuh"

namespace cumla::ptx {

// PTX ISA: Floating Point Instructions: max
// NaN, if one operand is NaN.
__device__ __forceinline__ float larger_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

}  // namespace cumla::ptx
