// SPDX-License-Identifier: Apache-2.0
// A bias of scores by the distance p - j of a key j from the position p of its query (docs/kernels/mha-masks.md):
//   LinearParams  slope * (j - p)
//   TableParams   an element of a row; beyond its ends 0 or the nearest element
// Scores, and so biases, are in base 2. Any number may stand in the arrays.
#pragma once
#include "mha/attention/layout.cuh"
#include "split/tile.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

using namespace ptx;
using namespace split;

struct Slopes {
  const float* data;
  i64 stride_request, stride_head;  // in elements
  int requests;                     // with slopes of their own, or 1
};
struct LinearParams : AttentionParams {
  Slopes slopes;
};

// A row for each query token and head, or for each head.
struct BiasTable {
  const char* data;
  i64 stride_token, stride_head;  // in bytes; the former is 0 for rows of heads
  const int* first;               // distance of element 0; null: 0
  int length;
  int kind;         // of elements: 0 float32, 1 bfloat16, 2 float16
  int ends_extend;  // whether a row's ends hold beyond it
};
struct TableParams : AttentionParams {
  BiasTable table;
};

template <typename Params>
constexpr bool kHasBias = false;
template <>
constexpr bool kHasBias<LinearParams> = true;
template <>
constexpr bool kHasBias<TableParams> = true;

// The bias of a row's scores: that of key j + i, with i known to the compiler, is plus(from(j), i).
template <typename Params>
struct RowBias {};

template <>
struct RowBias<LinearParams> {
  float slope;
  int position;

  // Without a branch. `tokens` are those of the request.
  __device__ __forceinline__ void begin(const LinearParams& p, const RaggedTile& tile, int tokens, int row) {
    const Query query(p, tile, row);
    const int request = min(max(request_of(p, tile), 0), p.slopes.requests - 1);
    slope = kLog2E * load_global_float_if(true, p.slopes.data + request * p.slopes.stride_request +
                                          query.head * p.slopes.stride_head, 0.0f);
    position = position_of(p, tile, tokens, row);
  }
  __device__ __forceinline__ float from(int key) const { return slope * static_cast<float>(key - position); }
  __device__ __forceinline__ float plus(float from, int i) const {
    return __fmaf_rn(slope, static_cast<float>(i), from);
  }

  // Scales the scores of a thread's row in a block of 64 keys, and adds their biases: eight pairs of keys, eight
  // apart.
  template <bool kFew, typename Score>
  __device__ __forceinline__ void add(const Score& score, float factor, float from) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) score(i) = __fmaf_rn(score(i), factor, plus(from, i / 2 * 8 + i % 2));
  }
};

template <>
struct RowBias<TableParams> {
  const BiasTable* table;  // a parameter, so that nothing of it takes registers
  const char* row;
  int place;  // element for key 0; that for key j is j before it

  __device__ __forceinline__ void begin(const TableParams& p, const RaggedTile& tile, int tokens, int of_tile) {
    const Query query(p, tile, of_tile);
    const i64 token = tile.q_begin + max(min(tile.token_of(p, of_tile), tile.q_len - 1), 0);
    table = &p.table;
    row = table->data + token * table->stride_token + query.head * table->stride_head;
    const i64 first = table->first == nullptr ? 0 : *table->first;
    constexpr i64 kMost = 0x7fffffff;  // beyond it all elements are alike
    place = static_cast<int>(min(max(position_of(p, tile, tokens, of_tile) - first, -kMost), kMost));
  }
  // The element of a key, or one as far beyond the ends as any that is asked for from here.
  __device__ __forceinline__ int from(int key) const {
    constexpr int kFar = 256;
    return static_cast<int>(min(max(i64{place} - key, i64{-kFar}), i64{last()} + kFar));
  }
  __device__ __forceinline__ int last() const { return table->length - 1; }
  __device__ __forceinline__ float plus(int from, int i) const {
    const int at = min(max(from - i, 0), last());
    const bool exists = table->ends_extend || at == from - i;
    if (table->kind == 0) return exists ? kLog2E * reinterpret_cast<const float*>(row)[at] : 0.0f;
    const u32 bits = exists ? reinterpret_cast<const unsigned short*>(row)[at] : 0;
    return kLog2E * of_bits(bits);
  }
  __device__ __forceinline__ float of_bits(u32 bits) const {
    return table->kind == 1 ? __uint_as_float(bits << 16) : unpack_pair<Fp16>(bits).x;
  }

  // Scales the scores of a thread's row in a block of 64 keys, and adds their biases: eight pairs of keys, eight
  // apart. All lanes of a warp take the same way. kFew: registers do not suffice for a way of its own for elements
  // that all exist.
  template <bool kFew, typename Score>
  __device__ __forceinline__ void add(const Score& score, float factor, int from) const {
    const int least = from - 63;
    if (!kFew && __all_sync(0xffffffffu, least >= last())) {  // beyond the end, where most keys of a long request are
      const float end = plus(from, 0);
#pragma unroll
      for (int i = 0; i < 16; ++i) score(i) = __fmaf_rn(score(i), factor, end);
    } else if (!kFew && table->kind != 0 && __all_sync(0xffffffffu, least >= 0 && from <= last())) {
      const unsigned short* const elements = reinterpret_cast<const unsigned short*>(row) + least;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const u32 bits = elements[63 - (i / 2 * 8 + i % 2)];
        score(i) = __fmaf_rn(score(i), factor, kLog2E * of_bits(bits));
      }
    } else {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        score(i) = __fmaf_rn(score(i), factor, plus(from, i / 2 * 8 + i % 2));
      }
    }
  }
};

}  // namespace cumla::mha
