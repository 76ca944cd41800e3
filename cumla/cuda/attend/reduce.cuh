// SPDX-License-Identifier: Apache-2.0
// Sums and maxima over the lanes that share a query row. The layout of the scores decides which lanes these are.
// Rows x keys: a quad of lanes has a row. Keys x rows: the eight lanes with the same lane % 4 have a column.
#pragma once
#include "ptx/types.cuh"

namespace cumla::attend {

// --- rows x keys: over a quad of lanes ---------------------------------------------------------------

__device__ __forceinline__ float sum_of_quad(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

__device__ __forceinline__ float max_of_quad(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

// --- keys x rows: over the eight lanes of a column, kRows rows at once -------------------------------

template <int kRows>
__device__ __forceinline__ void sum_over_column(float (&values)[kRows]) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2)
#pragma unroll
    for (int i = 0; i < kRows; ++i) values[i] += __shfl_xor_sync(0xffffffffu, values[i], step);
}

template <int kRows>
__device__ __forceinline__ void max_over_column(float (&values)[kRows]) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2)
#pragma unroll
    for (int i = 0; i < kRows; ++i) values[i] = fmaxf(values[i], __shfl_xor_sync(0xffffffffu, values[i], step));
}

}  // namespace cumla::attend
