// SPDX-License-Identifier: Apache-2.0
// Masks: a score becomes -infinity if its row does not see its key. The layout of the scores (attend/reduce.cuh)
// decides which rows and keys a lane has.
#pragma once
#include "ptx/types.cuh"

namespace cumla::attend {

using namespace ptx;

// Keys [first, end), which a row sees.
struct Seen {
  int first, end;
};

// --- rows x keys: scores 4 j + 2 r and 1 more are of row r, keys 8 j + 2 (lane % 4) and 1 more ----------
// column: key of the lane's first score.

template <int kCount>
__device__ __forceinline__ void hide_outside(float (&scores)[kCount], int column, const Seen (&seen)[2]) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int key = column + 8 * j + (e & 1);
      if (key < seen[e >> 1].first || key >= seen[e >> 1].end) scores[4 * j + e] = -kInfinity;
    }
}

template <int kCount>
__device__ __forceinline__ void hide_before(float (&scores)[kCount], int column, const int (&first)[2]) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (column + 8 * j + (e & 1) < first[e >> 1]) scores[4 * j + e] = -kInfinity;
}

template <int kCount>
__device__ __forceinline__ void hide_from(float (&scores)[kCount], int column, const int (&end)[2]) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (column + 8 * j + (e & 1) >= end[e >> 1]) scores[4 * j + e] = -kInfinity;
}

// Row r sees the keys of 64 whose bits are set.
__device__ __forceinline__ void hide_unset(float* scores, int r, u64 visible, int lane) {
  visible >>= lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < 16; ++i)
    if (!(visible >> (i / 2 * 8 + i % 2) & 1)) scores[i / 2 * 4 + 2 * r + i % 2] = -kInfinity;
}

// --- keys x rows: two scores of a row, of `key` and of the eighth key after it --------------------------

__device__ __forceinline__ void hide_from(float& score, float& later, int key, int end) {
  if (key >= end) score = -kInfinity;
  if (key + 8 >= end) later = -kInfinity;
}

}  // namespace cumla::attend
