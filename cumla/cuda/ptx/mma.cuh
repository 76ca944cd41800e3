// SPDX-License-Identifier: Apache-2.0
// Warp-level matrix products with fragments in registers.
#pragma once
#include "ptx/types.cuh"

namespace cumla::ptx {

// PTX ISA: Warp Level Matrix Instructions: mma
// d += a b, a is 16 x 16, b is 16 x 8. For lane 4 g + q:
//   a0, a1   columns 2 q, 2 q + 1 of rows g and g + 8;    a2, a3   the same, 8 columns later
//   b0       rows 2 q, 2 q + 1 of column g;                b1       the same, 8 rows later
//   d        columns 2 q, 2 q + 1 of row g, then of row g + 8
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if constexpr (kIsBf16<T>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// PTX ISA: Warp Level Matrix Instructions: movmatrix
// Transposes an 8 x 8 matrix of 16-bit elements: lane 4 g + q holds elements 2 q and 2 q + 1 of row g.
__device__ __forceinline__ u32 transpose_matrix(u32 units) {
  u32 transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(units));
  return transposed;
}

}  // namespace cumla::ptx
