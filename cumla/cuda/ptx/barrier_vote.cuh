// SPDX-License-Identifier: Apache-2.0
// A named barrier at which threads also agree.
#pragma once
#include "ptx/types.cuh"

namespace cumla {

// PTX ISA: Parallel Synchronization and Communication Instructions: bar, barrier (red.or)
// Whether any of the threads says so.
template <int kBarrier, int kThreads>
__device__ __forceinline__ bool named_barrier_any(bool vote) {
  u32 any;
  asm volatile(
      "{\n"
      ".reg .pred mine, any;\n"
      "setp.ne.u32 mine, %1, 0;\n"
      "bar.red.or.pred any, %2, %3, mine;\n"
      "selp.u32 %0, 1, 0, any;\n"
      "}"
      : "=r"(any)
      : "r"(static_cast<u32>(vote)), "n"(kBarrier), "n"(kThreads)
      : "memory");
  return any != 0;
}

}  // namespace cumla
