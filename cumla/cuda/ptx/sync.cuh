// SPDX-License-Identifier: Apache-2.0
// Fences, named barriers, register hand-over between warpgroups, and programmatic dependent launch.
#pragma once
#include "ptx/types.cuh"

namespace cumla {

// PTX ISA: Parallel Synchronization and Communication Instructions: elect.sync
// True in one lane of a converged warp. What depends on it the compiler knows to be done by one lane: instructions that take
// uniform registers, such as those of the copy engine, need no loop over the lanes that may be there.
__device__ __forceinline__ bool elect_one() {
  u32 elected;
  asm volatile(
      "{\n"
      ".reg .pred is_one;\n"
      "elect.sync _|is_one, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, is_one;\n"
      "}"
      : "=r"(elected)::"memory");
  return elected != 0;
}

// PTX ISA: Parallel Synchronization and Communication Instructions: fence (proxy)
// What this thread wrote with ordinary stores, or has seen arrive of others' stores and copies, becomes visible to wgmma and
// TMA.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// PTX ISA: Parallel Synchronization and Communication Instructions: bar, barrier
template <int kBarrier, int kThreads>
__device__ __forceinline__ void named_barrier_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

// PTX ISA: Parallel Synchronization and Communication Instructions: griddepcontrol
__device__ __forceinline__ void grid_dependency_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// PTX ISA: Parallel Synchronization and Communication Instructions: griddepcontrol
__device__ __forceinline__ void grid_dependency_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// PTX ISA: Miscellaneous Instructions: setmaxnreg
template <int kRegisters>
__device__ __forceinline__ void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// PTX ISA: Miscellaneous Instructions: setmaxnreg
template <int kRegisters>
__device__ __forceinline__ void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace cumla
