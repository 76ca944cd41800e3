// SPDX-License-Identifier: Apache-2.0
// The end of an mbarrier, whose place another one may take.
#pragma once
#include "ptx/types.cuh"

namespace cumla::ptx {

// PTX ISA: Parallel Synchronization and Communication Instructions: mbarrier.inval
__device__ __forceinline__ void mbarrier_invalidate(u32 barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace cumla::ptx
