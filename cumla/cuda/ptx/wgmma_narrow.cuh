// SPDX-License-Identifier: Apache-2.0
// Warpgroup matrix products of 32 columns whose operands are both in shared memory (descriptors: ptx/wgmma.cuh).
#pragma once
#include "ptx/types.cuh"

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
#define CUMLA_WGMMA_N32(types)                                                                             \
  asm volatile(                                                                                            \
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %18, 0;\n"                                       \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." types                                                  \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "                          \
      "%16, %17, accumulate, 1, 1, %19, 0;\n}"                                                             \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),    \
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]) \
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kTransposedA))             \
      : "memory")

namespace cumla::ptx {

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
// D (64 x 32) = A (64 x 16) B^T (32 x 16) + (accumulate ? D : 0). B is contiguous in K, A in K or, with kTransposedA,
// in M.
template <typename T, bool kTransposedA>
__device__ __forceinline__ void wgmma_m64n32k16_async(float (&d)[16], u64 a, u64 b, bool accumulate) {
  if constexpr (kIsBf16<T>)
    CUMLA_WGMMA_N32("bf16.bf16");
  else
    CUMLA_WGMMA_N32("f16.f16");
}

}  // namespace cumla::ptx

#undef CUMLA_WGMMA_N32
