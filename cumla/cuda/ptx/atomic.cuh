// SPDX-License-Identifier: Apache-2.0
// Global memory that CTAs of one grid share: ordered loads and stores, fences, atomic addition.
#pragma once
#include "ptx/types.cuh"

namespace cumla {

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

// PTX ISA: Data Movement and Conversion Instructions: st
// Each word for itself: who reads them may see some of them and not yet others.
__device__ __forceinline__ void store_relaxed_float4(float4* address, float a, float b, float c, float d) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}
__device__ __forceinline__ void store_relaxed_u64(u64* address, u64 value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: ld
__device__ __forceinline__ float4 load_relaxed_float4(const float4* address) {
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ u64 load_relaxed_u64(const u64* address) {
  u64 value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

// PTX ISA: Parallel Synchronization and Communication Instructions: membar, fence
// Stores before it and loads behind it are in one order for all who use it.
__device__ __forceinline__ void fence_sc_gpu() {
  asm volatile("fence.sc.gpu;" ::: "memory");
}

}  // namespace cumla
