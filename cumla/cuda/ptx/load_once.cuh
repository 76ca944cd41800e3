// SPDX-License-Identifier: Apache-2.0
// Loads of what is read once: it does not push out of L2 what was written a moment ago, which then need not reach memory
// before the kernel ends.
#pragma once
#include "ptx/types.cuh"

namespace cumla {

// PTX ISA: Data Movement and Conversion Instructions: createpolicy
__device__ __forceinline__ u64 evict_first_policy() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// PTX ISA: Data Movement and Conversion Instructions: ld
__device__ __forceinline__ uint4 load_once(const uint4* address) {
  uint4 words;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(address), "l"(evict_first_policy())
               : "memory");
  return words;
}

// PTX ISA: Data Movement and Conversion Instructions: ld
__device__ __forceinline__ float4 load_once(const float4* address) {
  float4 v;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], %5;"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(address), "l"(evict_first_policy())
               : "memory");
  return v;
}

}  // namespace cumla
