// SPDX-License-Identifier: Apache-2.0
// Products of query rows in shared memory with 16 keys, for kernels of scores of any number of query rows. A function
// that loads query rows, shared like these, changes the machine code of block_scores.cu.
#pragma once
#include "ptx/convert.cuh"
#include "ptx/mma.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

using namespace ptx;

constexpr int kScoreThreads = 256;
constexpr int kScoreWarps = kScoreThreads / 32;
constexpr int kScoreRows = 32;  // query rows of a CTA
constexpr int kKeysAtOnce = 16;

// Bytes of a query row in shared memory, as 16 bits: lanes of two rows read from all banks.
template <int kColumns>
constexpr int kQueryPitch = kColumns * 2 + 64;

__device__ __forceinline__ u32 word_of(const uint4& words, int i) {
  return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// The larger one; NaN is larger than any number.
__device__ __forceinline__ float larger(float one, float other) {
  return other > one || other != other ? other : one;
}

// The products of 16 keys with eight query rows. Lane 4 g + c has 16 bytes of keys g and g + 8 for each 64 bytes; its
// products are those of key g with rows 2 c and 2 c + 1, then of key g + 8. `rows` is the first of the eight rows.
template <typename T, bool kE4m3, int kColumns, int kLoads>
__device__ __forceinline__ void multiply_keys(const uint4 (&keys)[2][kLoads], const unsigned char* rows,
                                              int lane, float (&score)[4]) {
  const unsigned char* const query = rows + lane / 4 * kQueryPitch<kColumns> + lane % 4 * (kE4m3 ? 32 : 16);
  score[0] = score[1] = score[2] = score[3] = 0.0f;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if constexpr (kE4m3) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 b = *reinterpret_cast<const uint4*>(query + i * 128 + half * 16);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          u32 a[4];
          expand_e4m3x4(word_of(keys[0][i], half * 2 + k), a[0], a[2]);
          expand_e4m3x4(word_of(keys[1][i], half * 2 + k), a[1], a[3]);
          mma_m16n8k16<T>(score, a[0], a[1], a[2], a[3], word_of(b, 2 * k), word_of(b, 2 * k + 1));
        }
      }
    } else {
      const uint4 b = *reinterpret_cast<const uint4*>(query + i * 64);
#pragma unroll
      for (int k = 0; k < 2; ++k)
        mma_m16n8k16<T>(score, word_of(keys[0][i], 2 * k), word_of(keys[1][i], 2 * k), word_of(keys[0][i], 2 * k + 1),
                        word_of(keys[1][i], 2 * k + 1), word_of(b, 2 * k), word_of(b, 2 * k + 1));
    }
  }
}

// As multiply_keys, of several eights of rows that are `apart`: their chains of products interleave.
template <typename T, bool kE4m3, int kColumns, int kLoads, int kCount>
__device__ __forceinline__ void multiply_eights(const uint4 (&keys)[2][kLoads], const unsigned char* rows, int apart,
                                                int lane, float (&score)[kCount][4]) {
  constexpr int kPitch = kQueryPitch<kColumns>;
  const unsigned char* const query = rows + lane / 4 * kPitch + lane % 4 * (kE4m3 ? 32 : 16);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
#pragma unroll
    for (int half = 0; half < (kE4m3 ? 2 : 1); ++half) {
      u32 a[2][4];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        if constexpr (kE4m3) {
          expand_e4m3x4(word_of(keys[0][i], half * 2 + k), a[k][0], a[k][2]);
          expand_e4m3x4(word_of(keys[1][i], half * 2 + k), a[k][1], a[k][3]);
        } else {
          a[k][0] = word_of(keys[0][i], 2 * k);
          a[k][1] = word_of(keys[1][i], 2 * k);
          a[k][2] = word_of(keys[0][i], 2 * k + 1);
          a[k][3] = word_of(keys[1][i], 2 * k + 1);
        }
      }
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        const int at = n * apart * kPitch + i * (kE4m3 ? 128 : 64) + half * 16;
        const uint4 b = *reinterpret_cast<const uint4*>(query + at);
#pragma unroll
        for (int k = 0; k < 2; ++k)
          mma_m16n8k16<T>(score[n], a[k][0], a[k][1], a[k][2], a[k][3], word_of(b, 2 * k), word_of(b, 2 * k + 1));
      }
    }
  }
}

}  // namespace cumla::blocks
