// SPDX-License-Identifier: Apache-2.0
// Ordered accesses to memory that several GPUs map, and time.
#pragma once
#include "ptx/types.cuh"

namespace cumla::ptx {

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

}  // namespace cumla::ptx
