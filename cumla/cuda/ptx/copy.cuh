// SPDX-License-Identifier: Apache-2.0
// Copies by threads: asynchronous copies into shared memory, ldmatrix and stmatrix, loads and stores.
#pragma once
#include "ptx/types.cuh"

namespace cumla::ptx {

// PTX ISA: Data Movement and Conversion Instructions: prefetch, prefetchu
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

struct AnyPolicy {};  // L2's default policy

// PTX ISA: Data Movement and Conversion Instructions: createpolicy
// For data that is used once: L2 evicts these lines first.
__device__ __forceinline__ u64 evict_first_policy() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// PTX ISA: Data Movement and Conversion Instructions: createpolicy
__device__ __forceinline__ u64 evict_normal_policy() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// PTX ISA: Data Movement and Conversion Instructions: cp.async
// Copies 4 bytes, or writes 4 zero bytes when `valid` is false (the source is then not read).
__device__ __forceinline__ void copy_4_async(u32 destination, const void* source, bool valid) {
  const int bytes = valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: cp.async
// Copies 16 bytes, or writes 16 zero bytes when `valid` is false (the source is then not read).
__device__ __forceinline__ void copy_16_async(u32 destination, const void* source, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(bytes)
               : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: cp.async
__device__ __forceinline__ void copy_16_async(u32 destination, const void* source, bool valid, u64 policy) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(destination), "l"(source),
               "r"(bytes), "l"(policy)
               : "memory");
}
__device__ __forceinline__ void copy_16_async(u32 destination, const void* source, bool valid, AnyPolicy) {
  copy_16_async(destination, source, valid);
}

// PTX ISA: Data Movement and Conversion Instructions: cp.async.commit_group
// The copies of this thread since its last commit become one group, which may be empty.
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: cp.async.wait_group
// Waits until at most the last kPending groups of this thread are pending.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Waits for all copies of this thread.
__device__ __forceinline__ void copy_async_wait_all() {
  copy_async_commit();
  copy_async_wait<0>();
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

// PTX ISA: Warp Level Matrix Instructions: ldmatrix
// Loads four 8 x 8 matrices of 16-bit elements. Lanes 8 i to 8 i + 7 hold the row addresses of matrix i. Then
// register i of a lane holds elements 2 (lane % 4) and 2 (lane % 4) + 1 of row lane / 4 of matrix i.
__device__ __forceinline__ void load_matrix_x4(u32 (&d)[4], u32 source) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(source)
               : "memory");
}

// PTX ISA: Warp Level Matrix Instructions: ldmatrix
// Loads the transposes: register i of a lane holds element lane / 4 of rows 2 (lane % 4) and 2 (lane % 4) + 1 of
// matrix i.
__device__ __forceinline__ void load_matrix_x4_transposed(u32 (&d)[4], u32 source) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(source)
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
// Stores the lower half of `word`.
__device__ __forceinline__ void store_shared_low_half(u32 destination, u32 word) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(destination), "h"(static_cast<unsigned short>(word)) : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: ld
__device__ __forceinline__ uint2 load_shared_8(u32 source) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(source) : "memory");
  return v;
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
__device__ __forceinline__ void store_global_8(void* destination, u32 low, u32 high) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(destination), "r"(low), "r"(high) : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: st
__device__ __forceinline__ void store_global_16(void* destination, u32 a, u32 b, u32 c, u32 d, AnyPolicy) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(destination), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: st
__device__ __forceinline__ void store_global_16(void* destination, u32 a, u32 b, u32 c, u32 d, u64 policy) {
  asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(destination), "r"(a), "r"(b), "r"(c),
               "r"(d), "l"(policy)
               : "memory");
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
// Loads only if `valid`; returns `otherwise` if not. Predicated.
__device__ __forceinline__ float load_global_float_if(bool valid, const float* source, float otherwise) {
  float value;
  asm volatile("{\n.reg .pred valid;\nsetp.ne.b32 valid, %2, 0;\nmov.f32 %0, %3;\n@valid ld.global.f32 %0, [%1];\n}"
               : "=&f"(value)
               : "l"(source), "r"(static_cast<int>(valid)), "f"(otherwise)
               : "memory");
  return value;
}

// PTX ISA: Data Movement and Conversion Instructions: st
// Stores only if `valid`; predicated.
__device__ __forceinline__ void store_global_float_if(bool valid, u64 destination, float value) {
  asm volatile("{\n.reg .pred valid;\nsetp.ne.b32 valid, %2, 0;\n@valid st.global.f32 [%0], %1;\n}" ::"l"(destination),
               "f"(value), "r"(static_cast<int>(valid))
               : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: st
// Stores the lower half of `word` only if `valid`; predicated.
__device__ __forceinline__ void store_global_low_half_if(bool valid, u64 destination, u32 word) {
  asm volatile("{\n.reg .pred valid;\nsetp.ne.b32 valid, %2, 0;\n@valid st.global.b16 [%0], %1;\n}" ::"l"(destination),
               "h"(static_cast<unsigned short>(word)), "r"(static_cast<int>(valid))
               : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: ld
// Bypasses L1, because the data is read once.
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
// volatile keeps several such loads together, before their first use.
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

}  // namespace cumla::ptx
