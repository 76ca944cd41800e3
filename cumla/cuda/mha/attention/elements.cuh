// SPDX-License-Identifier: Apache-2.0
// Elements of a table of biases that a thread loads while the keys of their block are on their way; biases of few rows.
#pragma once
#include "mha/attention/bias.cuh"
#include "mha/attention/layout.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

using namespace ptx;

template <typename Params>
constexpr bool kHasBias<FewRows<Params>> = kHasBias<Params>;
template <typename Params>
struct RowBias<FewRows<Params>> : RowBias<Params> {};

// Bits of the elements of a thread's row for a block of 64 keys: eight pairs, eight apart.
struct Elements {
  u32 of[16];
};

template <typename Params>
constexpr bool kHasElements = false;
template <>
constexpr bool kHasElements<TableParams> = true;
template <>
constexpr bool kHasElements<FewRows<TableParams>> = true;

struct LoadedBias : RowBias<TableParams> {
  int first_block;  // in blocks before it the bias of all keys is `end`
  float end;

  // When a tile begins, after begin(): finds from which block on the warp's rows have elements. All lanes together.
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
};

}  // namespace cumla::mha
