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

constexpr int kChunkBytes = 16, kChunk = 8;  // elements of 16 bits

// A row of a table for the query row of a thread.
struct TableRow : RowBias<TableParams> {
  // True if one of the n keys from from() on has an element.
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

  // True if rows are whole chunks of 16 bytes with elements of 16 bits. A warp then copies those of a block to shared
  // memory: a load for each score would touch a line of each row.
  __device__ __forceinline__ bool has_chunks() const {
    const u64 all = reinterpret_cast<u64>(table->data) | static_cast<u64>(table->stride_token | table->stride_head);
    return table->kind != 0 && all % kChunkBytes == 0 && table->length % kChunk == 0;
  }

  // Adds the elements of a block of kKeys to a thread's scores times `scale`, which is not in base 2. It branches for
  // a kind of elements, not for each of them. `from` is of the thread's first key, `least` of the block's last one,
  // and `band` has the chunks from that element on.
  template <int kKeys, typename Score>
  __device__ __forceinline__ void add_elements(const Score& score, float scale, int from, int least, u32 band) const {
    const auto add = [&](const auto& element) {
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) score(i) = __fmaf_rn(score(i), scale, element(i));
    };
    const auto known = [&](const auto& load) {
      add([&](int i) {
        const int wanted = from - i / 2 * 8 - i % 2, at = min(max(wanted, 0), last());
        const float value = load(at);
        return table->ends_extend || at == wanted ? value : 0.0f;
      });
    };
    const unsigned short* const bits = reinterpret_cast<const unsigned short*>(row);
    const bool all_exist = __all_sync(0xffffffffu, from >= kKeys - 1 && from <= last());
    if (has_chunks() && (all_exist || !table->ends_extend)) {
      // The element of the second of two keys comes first. Both are in one word, or in two.
      const u32 second = band + (least % kChunk + kChunk & kChunk - 1) * 2 + (kKeys - 2 - threadIdx.x % 4 * 2) * 2;
      const u32 words[2] = {second + 2 & ~3u, second & ~3u};
      const bool apart = second & 2;
      const auto word = [&](int i) { return load_shared_u32(words[i % 2] - i / 2 * 16); };
      if (table->kind == 1) {
        const u32 order[2] = {apart ? 0x1044u : 0x3244u, apart ? 0x3244u : 0x1044u};
        add([&](int i) { return __uint_as_float(__byte_perm(word(i), 0, order[i % 2])); });
      } else {
        const u32 order[2] = {apart ? 0x4410u : 0x4432u, apart ? 0x4432u : 0x4410u};
        add([&](int i) { return unpack_pair<Fp16>(__byte_perm(word(i), 0, order[i % 2])).x; });
      }
    } else if (table->kind == 0) {
      known([&](int at) { return reinterpret_cast<const float*>(row)[at]; });
    } else if (table->kind == 1) {
      known([&](int at) { return __uint_as_float(u32{bits[at]} << 16); });
    } else {
      known([&](int at) { return unpack_pair<Fp16>(bits[at]).x; });
    }
  }
};

// The bias of a query row of attention_prefill.
template <typename Params>
struct PrefillBias : RowBias<Params> {};
template <>
struct PrefillBias<TableParams> : TableRow {};

}  // namespace cumla::mha
