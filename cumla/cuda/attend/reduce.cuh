// SPDX-License-Identifier: Apache-2.0
// Sums and maxima over the lanes that share a query row, which differ with the layout of the scores' products:
// rows by keys: a quad of lanes has a row, 8 columns in every 32; keys by rows: the eight lanes of a column have one.
#pragma once
#include "ptx/types.cuh"

namespace cumla::attend {

// --- rows by keys --------------------------------------------------------------------------------

__device__ __forceinline__ float sum_of_quad(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

__device__ __forceinline__ float max_of_quad(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

// --- keys by rows: of several rows at once --------------------------------------------------------

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
