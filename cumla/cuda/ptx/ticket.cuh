// SPDX-License-Identifier: Apache-2.0
// Tickets in global memory, which begin again by themselves.
#pragma once
#include "ptx/types.cuh"

namespace cumla {

// PTX ISA: Parallel Synchronization and Communication Instructions: atom (inc)
// Draws 0, 1 ... last, and 0 again.
__device__ __forceinline__ u32 draw_ticket(void* counter, u32 last) {
  u32 ticket;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(ticket) : "l"(counter), "r"(last) : "memory");
  return ticket;
}

}  // namespace cumla
