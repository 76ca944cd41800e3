// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "ptx/types.cuh"

namespace cumla::ptx {

// PTX ISA: Parallel Synchronization and Communication Instructions: mbarrier.test_wait
// Whether the phase with this parity has completed, without a wait.
__device__ __forceinline__ bool mbarrier_test(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n"
      ".reg .pred complete;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
      "selp.u32 %0, 1, 0, complete;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

}  // namespace cumla::ptx
