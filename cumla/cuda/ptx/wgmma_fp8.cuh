// SPDX-License-Identifier: Apache-2.0
// Warpgroup matrix products of e4m3 operands, which are contiguous in K: the tensor cores cannot transpose 8-bit values.
#pragma once
#include "ptx/wgmma.cuh"

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

#define CUMLA_D32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"

#define CUMLA_D32_OPERANDS \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])

#define CUMLA_D64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

#define CUMLA_D64_OPERANDS \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
  "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
  "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
  "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])

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

#undef CUMLA_D32
#undef CUMLA_D32_OPERANDS
#undef CUMLA_D64
#undef CUMLA_D64_OPERANDS

}  // namespace cumla
