// SPDX-License-Identifier: Apache-2.0
// Copies: tensor-map boxes (TMA), 16-byte asynchronous copies, matrix stores, vector stores, vector loads.
#pragma once
#include "ptx/types.cuh"

namespace cumla {

// PTX ISA: Data Movement and Conversion Instructions: prefetch, prefetchu (tensormap)
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: cp.async.bulk.tensor
// Out-of-range coordinates bring zeros and still count their bytes on the barrier.
__device__ __forceinline__ void tma_load_4d_async(u32 destination, const TensorMap* map, u32 barrier,
                                                  int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: cp.async.bulk.prefetch.tensor
// The same box into L2 only.
__device__ __forceinline__ void tma_prefetch_4d(const TensorMap* map, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(x),
               "r"(y), "r"(z), "r"(w)
               : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: cp.async.bulk.prefetch
// Has L2 fetch bytes in one piece; address and number are multiples of 16.
__device__ __forceinline__ void prefetch_bulk_l2(const void* address, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: prefetch, prefetchu
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: cp.async
// Copies 16 bytes, or writes 16 zero bytes when `valid` is false (the source is then not read).
__device__ __forceinline__ void copy_16_async(u32 destination, const void* source, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(bytes)
               : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: cp.async.commit_group
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: cp.async.wait_group
// Returns when at most kPending committed groups of this thread are still under way.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: cp.async.wait_all
__device__ __forceinline__ void copy_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// PTX ISA: Warp Level Matrix Instructions: stmatrix
__device__ __forceinline__ void store_matrix_x4(u32 destination, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(destination),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// PTX ISA: Warp Level Matrix Instructions: stmatrix
// Stores the transposes.
__device__ __forceinline__ void store_matrix_x4_transposed(u32 destination, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(destination),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: st
__device__ __forceinline__ void store_shared_zero_16(u32 destination) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(destination), "r"(0) : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: st
__device__ __forceinline__ void store_shared_float(u32 destination, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(destination), "f"(value) : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: ld
__device__ __forceinline__ float load_shared_float(u32 source) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(source) : "memory");
  return value;
}

// PTX ISA: Data Movement and Conversion Instructions: st
__device__ __forceinline__ void store_shared_u32(u32 destination, u32 value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(destination), "r"(value) : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: ld
__device__ __forceinline__ u32 load_shared_u32(u32 source) {
  u32 value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(source) : "memory");
  return value;
}

// PTX ISA: Data Movement and Conversion Instructions: st
__device__ __forceinline__ void store_shared_float2(u32 destination, const float2& v) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(destination), "f"(v.x), "f"(v.y) : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: ld
__device__ __forceinline__ float2 load_shared_float2(u32 source) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(source) : "memory");
  return v;
}

// PTX ISA: Data Movement and Conversion Instructions: st
__device__ __forceinline__ void store_shared_float4(u32 destination, const float4& v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(destination), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: ld
__device__ __forceinline__ float4 load_shared_float4(u32 source) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(source)
               : "memory");
  return v;
}

// PTX ISA: Data Movement and Conversion Instructions: st
__device__ __forceinline__ void store_global_8(void* destination, u32 low, u32 high) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(destination), "r"(low), "r"(high) : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: st
__device__ __forceinline__ void store_global_float2(void* destination, float low, float high) {
  asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(destination), "f"(low), "f"(high) : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: st
__device__ __forceinline__ void store_global_float4(void* destination, float a, float b, float c, float d) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(destination), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: ld
// Past L1, which has no use for what is read once.
__device__ __forceinline__ float4 load_l2_float4(const float4* source) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(source)
               : "memory");
  return v;
}

// PTX ISA: Data Movement and Conversion Instructions: ld
__device__ __forceinline__ float load_l2_float(const float* source) {
  float value;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(source) : "memory");
  return value;
}

// PTX ISA: Data Movement and Conversion Instructions: ld
// Where the code says so: several such loads stay together, ahead of what uses them. Other cache policies were slower: with
// evict-first, 1 GB takes 3 % longer.
__device__ __forceinline__ uint4 load_global_16(const uint4* address) {
  uint4 words;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(address)
               : "memory");
  return words;
}

// PTX ISA: Data Movement and Conversion Instructions: ld
__device__ __forceinline__ float4 load_global_16(const float4* address) {
  float4 v;
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

}  // namespace cumla
