// SPDX-License-Identifier: Apache-2.0
// Matrix products of one warp.
#pragma once
#include "ptx/types.cuh"

namespace cumla {

// PTX ISA: Warp Level Matrix Instructions: mma
// D (16 x 8) += A (16 x 16) B (16 x 8). a[0..1]: columns 2t, 2t+1 of rows g and g + 8, a[2..3]: the same eight columns later
// (g = lane / 4, t = lane % 4); b[0]: rows 2t, 2t+1 of column g, b[1]: the same eight rows later; d: columns 2t, 2t+1 of
// row g, then of row g + 8.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  if constexpr (kIsBf16<T>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace cumla
