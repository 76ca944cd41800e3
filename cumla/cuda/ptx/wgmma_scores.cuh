// SPDX-License-Identifier: Apache-2.0
// Warpgroup matrix products of a query tile with wide tiles of keys, and what lets warpgroups take turns.
#pragma once
#include "ptx/types.cuh"

// As CUMLA_D64 of wgmma.cuh.
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

namespace cumla::ptx {

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
// D (64 x 128) = A (64 x 16) B^T (128 x 16) + (accumulate ? D : 0); A and B in shared memory, contiguous in K.
template <typename T>
__device__ __forceinline__ void wgmma_scores_async(float (&d)[64], u64 a, u64 b, bool accumulate) {
  if constexpr (kIsBf16<T>)
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" CUMLA_D64 "}, %64, %65, accumulate, 1, 1, 0, 0;\n}"
        : CUMLA_D64_OPERANDS
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate))
        : "memory");
  else
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" CUMLA_D64 "}, %64, %65, accumulate, 1, 1, 0, 0;\n}"
        : CUMLA_D64_OPERANDS
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate))
        : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: mov
// The same number, of which the compiler does not know that it is.
__device__ __forceinline__ float unknown(float number) {
  float same;
  asm volatile("mov.f32 %0, %1;" : "=f"(same) : "f"(number));
  return same;
}

// PTX ISA: Parallel Synchronization and Communication Instructions: bar, barrier (arrive)
// Counts this warpgroup as one that came, and goes on.
template <int kBarrier, int kThreads>
__device__ __forceinline__ void named_barrier_arrive() {
  asm volatile("bar.arrive %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

}  // namespace cumla::ptx

#undef CUMLA_D64
#undef CUMLA_D64_OPERANDS
