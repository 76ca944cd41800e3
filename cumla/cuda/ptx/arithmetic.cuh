// SPDX-License-Identifier: Apache-2.0
// Additions that C++ has no word for: without flushing of subnormal numbers, and in shared memory.
#pragma once
#include "ptx/types.cuh"

namespace cumla::ptx {

// PTX ISA: Floating Point Instructions: add
// x + 0: makes +0 of -0 and the one NaN 0x7fffffff of all others; subnormal numbers stay what they are.
__device__ __forceinline__ float canonical(float x) {
  asm("add.rn.f32 %0, %0, 0f00000000;" : "+f"(x));
  return x;
}

// PTX ISA: Parallel Synchronization and Communication Instructions: red
// Adds 1 to a counter in shared memory; lanes of a warp that count in the same place are added up first.
__device__ __forceinline__ void count_shared(u32 counter) {
  asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(counter) : "memory");
}

}  // namespace cumla::ptx
