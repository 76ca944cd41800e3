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

template <typename Params>
constexpr bool kHasElements = false;
template <>
constexpr bool kHasElements<TableParams> = true;

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

// Bits of the elements of a thread's row for a block of 64 keys: eight pairs, eight apart.
struct Elements {
  u32 of[16];
};

template <>
struct RowBias<TableParams> {
  const BiasTable* table;  // a parameter, so that nothing of it takes registers
  const char* row;
  int place;  // element for key 0; that for key j is j before it
  int first_block;  // look_beyond(): in blocks before it the bias of all keys is `end`
  float end;

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

  // For load() and add() of blocks: finds from which block on the warp's rows have elements. All lanes together.
  __device__ __forceinline__ void look_beyond() {
    const i64 least = __reduce_min_sync(0xffffffffu, place);  // and a thread's first key of a block may be the seventh
    first_block = static_cast<int>(min(max(((least - last() - 69) >> 6) + 1, i64{0}), i64{0x7fffffff}));
    end = table->ends_extend ? kLog2E * number_of(bits_at(last())) : 0.0f;
  }

  // Loads the elements of a block of 64 keys; 0 where there is none.
  __device__ __forceinline__ void load(int block, int key, Elements& bits) const {
    if (block < first_block) return;
    const int distance = from(key), least = distance - 63;
    if (table->kind != 0 && __all_sync(0xffffffffu, least >= 0 && distance <= last())) {
      const unsigned short* const elements = reinterpret_cast<const unsigned short*>(row) + least;
#pragma unroll
      for (int i = 0; i < 16; ++i) bits.of[i] = elements[63 - (i / 2 * 8 + i % 2)];
    } else {
#pragma unroll
      for (int i = 0; i < 16; ++i) bits.of[i] = bits_at(distance - (i / 2 * 8 + i % 2));
    }
  }
  __device__ __forceinline__ u32 bits_at(int distance) const {
    const int at = min(max(distance, 0), last());
    if (!table->ends_extend && at != distance) return 0;
    return table->kind == 0 ? reinterpret_cast<const u32*>(row)[at] : reinterpret_cast<const unsigned short*>(row)[at];
  }
  __device__ __forceinline__ float number_of(u32 bits) const {
    return table->kind == 0 ? __uint_as_float(bits) : of_bits(bits);
  }

  // Scales the scores of a thread's row in a block, and adds what load() has found.
  template <typename Score>
  __device__ __forceinline__ void add(const Score& score, float factor, int block, const Elements& bits) const {
    if (block < first_block) {
#pragma unroll
      for (int i = 0; i < 16; ++i) score(i) = __fmaf_rn(score(i), factor, end);
    } else if (table->kind == 0) {
#pragma unroll
      for (int i = 0; i < 16; ++i) score(i) = __fmaf_rn(score(i), factor, kLog2E * __uint_as_float(bits.of[i]));
    } else {
#pragma unroll
      for (int i = 0; i < 16; ++i) score(i) = __fmaf_rn(score(i), factor, kLog2E * of_bits(bits.of[i]));
    }
  }
  // The same, and loads them: registers do not suffice to hold the elements of a block.
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
