// SPDX-License-Identifier: Apache-2.0
// Synchronisation of threads, CTAs, kernels and GPUs: elections, fences, named barriers, ordered memory accesses,
// timers, register reallocation between warpgroups, and programmatic dependent launch.
#pragma once
#include "ptx/types.cuh"

namespace cumla::ptx {

// PTX ISA: Parallel Synchronization and Communication Instructions: elect.sync
// True in one lane of a converged warp. The compiler knows that one lane executes the branch. So instructions with
// uniform registers, such as TMA, need no loop over lanes.
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
// Generic-proxy writes of this thread, and those that it has observed, become visible to wgmma and TMA.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// PTX ISA: Parallel Synchronization and Communication Instructions: bar, barrier
template <int kBarrier, int kThreads>
__device__ __forceinline__ void named_barrier_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

// PTX ISA: Parallel Synchronization and Communication Instructions: bar, barrier (arrive)
// Counts this warp as arrived, and does not wait.
template <int kBarrier, int kThreads>
__device__ __forceinline__ void named_barrier_arrive() {
  asm volatile("bar.arrive %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

// PTX ISA: Parallel Synchronization and Communication Instructions: bar, barrier (red.or)
// Returns whether any thread votes true.
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

// PTX ISA: Parallel Synchronization and Communication Instructions: atom
__device__ __forceinline__ u32 atomic_add_acq_rel(u32* address, u32 value) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
}

// PTX ISA: Data Movement and Conversion Instructions: ld
__device__ __forceinline__ u32 load_acquire(const u32* address) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// PTX ISA: Data Movement and Conversion Instructions: st
__device__ __forceinline__ void store_relaxed(u32* address, u32 value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: ld
__device__ __forceinline__ u32 load_acquire_system(const u32* address) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// PTX ISA: Parallel Synchronization and Communication Instructions: red
__device__ __forceinline__ void add_release_system(u32* address, u32 value) {
  asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// PTX ISA: Special Registers: %globaltimer
__device__ __forceinline__ u64 nanoseconds() {
  u64 time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time)::"memory");
  return time;
}

// PTX ISA: Parallel Synchronization and Communication Instructions: red
// Adds 1 to a counter in shared memory. The hardware first adds up lanes of a warp with the same address.
__device__ __forceinline__ void count_shared(u32 counter) {
  asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(counter) : "memory");
}

// PTX ISA: Parallel Synchronization and Communication Instructions: membar, fence
// Orders this thread's earlier stores before its later loads. All threads that use the fence see one order.
__device__ __forceinline__ void fence_sc_gpu() {
  asm volatile("fence.sc.gpu;" ::: "memory");
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

}  // namespace cumla::ptx
