// SPDX-License-Identifier: Apache-2.0
// Named barriers whose number is known at run time, in two halves.
#pragma once
#include "ptx/types.cuh"

namespace cumla {

// PTX ISA: Parallel Synchronization and Communication Instructions: bar, barrier
// Waits until kThreads have arrived, those that wait among them.
template <int kThreads>
__device__ __forceinline__ void named_barrier_wait(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// PTX ISA: Parallel Synchronization and Communication Instructions: bar, barrier
// Does not wait.
template <int kThreads>
__device__ __forceinline__ void named_barrier_arrive(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

}  // namespace cumla
