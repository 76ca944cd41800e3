// SPDX-License-Identifier: Apache-2.0
// Warpgroup matrix products with few columns (16 or 32). A comes from registers: a[0], a[1] columns
// 2 (lane % 4) and the one behind that, of rows lane / 4 and that + 8; a[2], a[3] the same eight columns later. It may not change
// before the product is waited for.
#pragma once
#include "ptx/wgmma.cuh"
#include "ptx/accumulators.cuh"

#define CUMLA_D16 CUMLA_D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define CUMLA_D16_OPERANDS \
  CUMLA_D8_OPERANDS, \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])

namespace cumla {

// Before the fence of the products that read them: what makes these fragments stays there.
template <int kCount>
__device__ __forceinline__ void keep_before_products(u32 (&a)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
// D (64 x 16) = A (64 x 16) B^T (16 x 16) + (accumulate ? D : 0); A in registers, B in shared memory, contiguous in K.
__device__ __forceinline__ void wgmma_f16_async(float (&d)[8], const u32* a, u64 b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %13, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {" CUMLA_D8 "}, {%8, %9, %10, %11}, %12, "
      "accumulate, 1, 1, 0;\n}"
      : CUMLA_D8_OPERANDS
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate))
      : "memory");
}

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
// The same with 32 columns.
__device__ __forceinline__ void wgmma_f16_async(float (&d)[16], const u32* a, u64 b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {" CUMLA_D16 "}, {%16, %17, %18, %19}, %20, "
      "accumulate, 1, 1, 0;\n}"
      : CUMLA_D16_OPERANDS
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate))
      : "memory");
}

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
// D (64 x 16) as above, of bfloat16.
__device__ __forceinline__ void wgmma_bf16_async(float (&d)[8], const u32* a, u64 b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %13, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {" CUMLA_D8 "}, {%8, %9, %10, %11}, %12, "
      "accumulate, 1, 1, 0;\n}"
      : CUMLA_D8_OPERANDS
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate))
      : "memory");
}

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
// The same with 32 columns.
__device__ __forceinline__ void wgmma_bf16_async(float (&d)[16], const u32* a, u64 b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" CUMLA_D16 "}, {%16, %17, %18, %19}, %20, "
      "accumulate, 1, 1, 0;\n}"
      : CUMLA_D16_OPERANDS
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate))
      : "memory");
}

}  // namespace cumla
