// SPDX-License-Identifier: Apache-2.0
// Warpgroup matrix products of 256 columns, A in registers, B contiguous in K (descriptors: ptx/wgmma.cuh).
#pragma once
#include "ptx/types.cuh"

#define CUMLA_D128 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define CUMLA_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define CUMLA_F16(i) CUMLA_F4(i), CUMLA_F4(i + 4), CUMLA_F4(i + 8), CUMLA_F4(i + 12)
#define CUMLA_F64(i) CUMLA_F16(i), CUMLA_F16(i + 16), CUMLA_F16(i + 32), CUMLA_F16(i + 48)

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
#define CUMLA_WGMMA_N256(types)                                                       \
  asm volatile(                                                                       \
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %133, 0;\n"                \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." types " {" CUMLA_D128 "}, "      \
      "{%128, %129, %130, %131}, %132, accumulate, 1, 1, 0;\n}"                       \
      : CUMLA_F64(0), CUMLA_F64(64)                                                   \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)) \
      : "memory")

namespace cumla::ptx {

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
// D (64 x 256) = A (64 x 16) B^T (256 x 16) + (accumulate ? D : 0). a[0..1] are columns 2t, 2t+1 of rows g and g + 8,
// a[2..3] the same 8 columns later.
template <typename T>
__device__ __forceinline__ void wgmma_m64n256k16_async(float (&d)[128], const u32* a, u64 b, bool accumulate) {
  if constexpr (kIsBf16<T>)
    CUMLA_WGMMA_N256("bf16.bf16");
  else
    CUMLA_WGMMA_N256("f16.f16");
}

}  // namespace cumla::ptx

#undef CUMLA_D128
#undef CUMLA_F4
#undef CUMLA_F16
#undef CUMLA_F64
#undef CUMLA_WGMMA_N256
