// SPDX-License-Identifier: Apache-2.0
// Warpgroup matrix products of e4m3 operands, which are contiguous in K: the tensor cores cannot transpose 8-bit values.
#pragma once
#include "ptx/wgmma.cuh"
#include "ptx/accumulators.cuh"

namespace cumla {

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: Matrix Descriptor Format
// Of rows of kRowBytes (128, 64 or 32) from column `k` on, with the swizzle of that width: eight rows are 8 kRowBytes apart.
// An address in shared memory has no bits that the format would have to lose.
template <int kRowBytes>
__device__ __forceinline__ u64 descriptor_of_rows(u32 address, int k) {
  static_assert(kRowBytes == 128 || kRowBytes == 64 || kRowBytes == 32, "a row is as wide as a swizzle");
  constexpr u64 kSwizzle = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;
  constexpr u64 kUpper = kSwizzle << 30 | kRowBytes * 8 >> 4;
  return kUpper << 32 | ((address >> 4) + k / 16);
}

// Where the 16-byte chunk of a row lies within it.
template <int kRowBytes>
__device__ __forceinline__ int swizzled_chunk(int row, int chunk) {
  return chunk ^ ((row * kRowBytes / 128) & (kRowBytes / 16 - 1));
}

// Behind a wait for the product: what reads the accumulators stays there.
template <int kCount>
__device__ __forceinline__ void keep_behind_wait(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
// D (64 x 64) = A (64 x 32) B^T (64 x 32) + (accumulate ? D : 0); both in shared memory, contiguous in K.
__device__ __forceinline__ void wgmma_e4m3_async(float (&d)[32], u64 a, u64 b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" CUMLA_D32 "}, %32, %33, accumulate, 1, 1;\n}"
      : CUMLA_D32_OPERANDS
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate))
      : "memory");
}

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
// The same with 128 columns.
__device__ __forceinline__ void wgmma_e4m3_async(float (&d)[64], u64 a, u64 b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" CUMLA_D64 "}, %64, %65, accumulate, 1, 1;\n}"
      : CUMLA_D64_OPERANDS
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate))
      : "memory");
}

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
// The same with 256 columns.
__device__ __forceinline__ void wgmma_e4m3_async(float (&d)[128], u64 a, u64 b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {" CUMLA_D128 "}, %128, %129, accumulate, 1, 1;\n}"
      : CUMLA_D128_OPERANDS
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate))
      : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: cvt
// The larger of each and 0, as bfloat16.
__device__ __forceinline__ u32 pack_positive(float low, float high) {
  u32 packed;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// PTX ISA: Warp Level Matrix Instructions: mma
// D (16 x 8) += A (16 x 16) B (16 x 8) of one warp.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace cumla
