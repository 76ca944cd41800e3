// SPDX-License-Identifier: Apache-2.0
// Elements of a table of biases for the scores of attention_prefill.
#pragma once
#include "mha/attention/bias.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

using namespace ptx;

template <typename Params>
constexpr bool kHasSlopes = false;
template <>
constexpr bool kHasSlopes<LinearParams> = true;
template <typename Params>
constexpr bool kHasTable = kHasBias<Params> && !kHasSlopes<Params>;

// A row of a table for the query row of a thread.
struct TableRow : RowBias<TableParams> {
  // Whether a key of n from the one of from() on has an element.
  __device__ __forceinline__ bool touches(int from, int n) const {
    return table->ends_extend || (from >= 0 && from - last() < n);
  }

  // Has L2 fetch the row's first 2 KiB, those of the nearest keys: lane `part` of four its part.
  __device__ __forceinline__ void prefetch(int part) const {
    const int bytes = (table->kind == 0 ? 4 : 2) * min(table->length, 1024);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if ((4 * i + part) * 128 < bytes) prefetch_l2(row + (4 * i + part) * 128);
  }

  // Adds the elements of a block of kKeys to a thread's scores times `scale`, which is not in base 2. It branches for
  // a kind of elements, not for each of them.
  template <int kKeys, typename Score>
  __device__ __forceinline__ void add_elements(const Score& score, float scale, int from) const {
    const auto add = [&](const auto& element) {
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) score(i) = __fmaf_rn(score(i), scale, element(i / 2 * 8 + i % 2));
    };
    const auto known = [&](const auto& load) {
      add([&](int i) {
        const int at = min(max(from - i, 0), last());
        const float value = load(at);
        return table->ends_extend || at == from - i ? value : 0.0f;
      });
    };
    const unsigned short* const bits = reinterpret_cast<const unsigned short*>(row);
    const unsigned short* const nearest = bits + (from - kKeys + 1);
    const auto brain = [](u32 of) { return __uint_as_float(of << 16); };
    const auto half = [](u32 of) { return unpack_pair<Fp16>(of).x; };
    const bool all_exist = __all_sync(0xffffffffu, from >= kKeys - 1 && from <= last());
    if (table->kind == 0)
      known([&](int at) { return reinterpret_cast<const float*>(row)[at]; });
    else if (table->kind == 1 && all_exist)
      add([&](int i) { return brain(nearest[kKeys - 1 - i]); });
    else if (table->kind == 1)
      known([&](int at) { return brain(bits[at]); });
    else if (all_exist)
      add([&](int i) { return half(nearest[kKeys - 1 - i]); });
    else
      known([&](int at) { return half(bits[at]); });
  }
};

// The bias of a query row of attention_prefill.
template <typename Params>
struct PrefillBias : RowBias<Params> {};
template <>
struct PrefillBias<TableParams> : TableRow {};

}  // namespace cumla::mha
