// SPDX-License-Identifier: Apache-2.0
// Matrices from shared memory as a warp's fragments.
#pragma once
#include "ptx/types.cuh"

namespace cumla {

// PTX ISA: Warp Level Matrix Instructions: ldmatrix
// Four matrices of eight rows of eight 16-bit units: lanes 8 i to 8 i + 7 give the addresses of the rows of the i-th; register
// i of a lane then holds the units 2 (lane % 4) and the one behind that of its row lane / 4.
__device__ __forceinline__ void load_matrix_x4(u32 (&d)[4], u32 source) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(source)
               : "memory");
}

// PTX ISA: Warp Level Matrix Instructions: ldmatrix
// The same transposed: register i of a lane then holds the units lane / 4 of the i-th one's rows 2 (lane % 4) and the one
// behind that.
__device__ __forceinline__ void load_matrix_x4_transposed(u32 (&d)[4], u32 source) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(source)
               : "memory");
}

}  // namespace cumla
