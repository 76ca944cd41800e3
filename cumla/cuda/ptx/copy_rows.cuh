// SPDX-License-Identifier: Apache-2.0
// Copies of the indexer and of pages that come row by row: boxes of two and three dimensions, contiguous bytes, single
// words, copies by threads that a barrier counts.
#pragma once
#include "ptx/types.cuh"

namespace cumla {

// PTX ISA: Data Movement and Conversion Instructions: cp.async.bulk.tensor
// Out-of-range coordinates bring zeros and still count their bytes on the barrier.
__device__ __forceinline__ void tma_load_2d_async(u32 destination, const TensorMap* map, u32 barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: createpolicy
// For what is read once: L2 gives up these lines before others.
__device__ __forceinline__ u64 evict_first_policy() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// PTX ISA: Data Movement and Conversion Instructions: cp.async.bulk.tensor
__device__ __forceinline__ void tma_load_3d_async(u32 destination, const TensorMap* map, u32 barrier, int x, int y,
                                                  int z, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(policy)
      : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: cp.async.bulk
// Addresses and bytes are multiples of 16.
__device__ __forceinline__ void copy_bulk_async(u32 destination, const void* source, u32 bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          destination),
      "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: cp.async
// Copies 4 bytes, or writes 4 zero bytes when `valid` is false (the source is then not read).
__device__ __forceinline__ void copy_4_async(u32 destination, const void* source, bool valid) {
  const int bytes = valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: cp.async
// Has L2 fetch all 128 bytes of a line, where prefetch_l2 asks for the sector of an address: copies its first 4 bytes to where
// nobody reads them. A load would keep a register until it has come.
__device__ __forceinline__ void fetch_line(u32 destination, const void* line) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 4;" ::"r"(destination), "l"(line) : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: cp.async.mbarrier.arrive
// This thread arrives, as one of those that the barrier expects, when what it copied so far has come.
__device__ __forceinline__ void mbarrier_arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: st
__device__ __forceinline__ void store_shared_16(u32 destination, const uint4& v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(destination), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: ld
__device__ __forceinline__ uint4 load_shared_16(u32 source) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(source)
               : "memory");
  return v;
}

// PTX ISA: Data Movement and Conversion Instructions: st
// Only where `valid`, without a branch.
__device__ __forceinline__ void store_global_float_if(bool valid, u64 destination, float value) {
  asm volatile("{\n.reg .pred valid;\nsetp.ne.b32 valid, %2, 0;\n@valid st.global.f32 [%0], %1;\n}" ::"l"(destination),
               "f"(value), "r"(static_cast<int>(valid))
               : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: st
// The lower half of a word, only where `valid`, without a branch.
__device__ __forceinline__ void store_global_low_half_if(bool valid, u64 destination, u32 word) {
  asm volatile("{\n.reg .pred valid;\nsetp.ne.b32 valid, %2, 0;\n@valid st.global.b16 [%0], %1;\n}" ::"l"(destination),
               "h"(static_cast<unsigned short>(word)), "r"(static_cast<int>(valid))
               : "memory");
}

}  // namespace cumla
