// SPDX-License-Identifier: Apache-2.0
// A warp of block_attention_few and its chunk of tokens: scores, softmax, and the product with the values.
#pragma once
#include "attend/narrow.cuh"
#include "attend/reduce.cuh"
#include "attend/softmax.cuh"
#include "blocks/block_attention/scores.cuh"
#include "blocks/block_attention_few/layout.cuh"
#include "blocks/block_attention_few/load.cuh"
#include "split/division.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/mma.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

using namespace attend;

__device__ __forceinline__ u32 word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Lane 4 g + q has what belongs to heads g and g + 8. A product's columns are those that a lane has with 16 bytes.
template <typename T, bool kE4m3, bool kLoops, typename Layout>
struct FewAttender {
  using Unit = typename mha::TypeIf<kE4m3, Fp16, T>::Type;  // of the products
  static constexpr bool kIsE4m3 = kE4m3;
  static constexpr int kSteps = kDecodeColumns / 16, kEights = Layout::kChunk / 8, kPairs = kEights / 2;
  static constexpr int kKeyLoads = Layout::kRow / 64, kValueLoads = Layout::kRow / 128;

  const BlockAttentionFewParams& p;
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const char* keys_at;  // of the lane's first token, without the page
  const char* values_at;
  int first, block, seen;
  float factor[2];  // of scores (base 2), or of the argument of the cap
  uint4 query[2][kSteps / 2];
  uint4 keys[kEights][kKeyLoads];
  uint4 values[kPairs][4][kValueLoads];
  float output[2 * kSteps][4];
  float maximum[2], sum[2], weight[2];

  // For the tokens of the list from `first` on.
  __device__ __forceinline__ FewAttender(const BlockAttentionFewParams& p, int first) : p(p) { move_to(first); }
  __device__ __forceinline__ void move_to(int token) {
    first = token;
    block = quotient(first, p.by_block_size);
    const int row = first - block * p.block_size;
    keys_at = p.keys.data + (row + g) * p.keys.stride_token + q * 16;
    values_at = p.values.data + (row + 2 * q) * p.values.stride_token + g * 16;
  }

  __device__ __forceinline__ void load_query(int token, int head) {
    const int request = quotient(token, p.by_tokens_apart), own = token - request * p.tokens_apart;
    const char* from = p.q + request * p.q_stride_batch + own * p.q_stride_token +
                       (static_cast<i64>(head) * p.heads_per_group + g) * p.q_stride_head + q * (kE4m3 ? 32 : 16);
#pragma unroll
    for (int r = 0; r < 2; ++r, from += 8 * p.q_stride_head) {
#pragma unroll
      for (int i = 0; i < kSteps / 2; ++i) query[r][i] = {};
      if (g + 8 * r < p.heads_per_group)
#pragma unroll
        for (int i = 0; i < kSteps / 2; ++i) {
          const int at = kE4m3 ? i / 2 * 128 + i % 2 * 16 : i * 64;
          query[r][i] = load_global_16(reinterpret_cast<const uint4*>(from + at));
        }
    }
  }

  // The chunk's page, for all lanes.
  __device__ __forceinline__ int find_page(const ShortList& list) {
    seen = min(list.tokens - first, Layout::kChunk);
    const u32 has = __ballot_sync(0xffffffffu, list.place == block);
    return __shfl_sync(0xffffffffu, list.page, __ffs(has) - 1);
  }
  __device__ __forceinline__ void load_keys(int page) {
    if (seen <= 0) return;
    const char* from = keys_at + page * p.keys.stride_page;
#pragma unroll
    for (int n = 0; n < kEights; ++n, from += 8 * p.keys.stride_token)
#pragma unroll
      for (int i = 0; i < kKeyLoads; ++i) keys[n][i] = load_global_16(reinterpret_cast<const uint4*>(from + i * 64));
  }
  __device__ __forceinline__ void load_values(int page) {
    if (seen > 0) {
      const char* const from = values_at + page * p.values.stride_page;
#pragma unroll
      for (int t = 0; t < kPairs; ++t)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const char* const at = from + (16 * t + r / 2 * 8 + r % 2) * p.values.stride_token;
#pragma unroll
          for (int i = 0; i < kValueLoads; ++i)
            values[t][r][i] = load_global_16(reinterpret_cast<const uint4*>(at + i * 128));
        }
    }
    if (seen < Layout::kChunk) {  // weights of the others are 0, and 0 x NaN is NaN
#pragma unroll
      for (int t = 0; t < kPairs; ++t)
#pragma unroll
        for (int r = 0; r < 4; ++r)
          if (16 * t + r / 2 * 8 + r % 2 + 2 * q >= seen)
#pragma unroll
            for (int i = 0; i < kValueLoads; ++i) values[t][r][i] = {};
    }
  }

  // Attends to the chunk, and to each `apart` tokens after it.
  __device__ __forceinline__ void attend(const ShortList& list, int apart) {
    int page = find_page(list);
    load_keys(page);
    load_values(page);
    begin(list.of_keys);
    float scores[kEights][4];
    u32 probabilities[kPairs][4];
#pragma unroll 1
    while (true) {
      multiply_keys(scores);
      const int visible = seen;
      const bool more = kLoops && first + apart < list.tokens;
      if (more) {
        move_to(first + apart);
        page = find_page(list);
        load_keys(page);
      }
      scale_scores(scores, visible);
      raise_maximum(scores);
      if constexpr (!kLoops) clear();
      exponentiate(scores, probabilities);
      multiply_values(probabilities);
      if (!more) break;
      load_values(page);
    }
  }

  __device__ __forceinline__ void begin(float of_keys) {
    const float of_scores = (p.to_softcap == 0.0f ? p.scale_log2 : p.to_softcap) * of_keys;
    factor[0] = factor[1] = fminf(of_scores, kMaxFactor);
    if constexpr (kE4m3 && kIsBf16<T>) narrow(of_scores);
    maximum[0] = maximum[1] = kLowest;
    if constexpr (kLoops) clear();
  }
  __device__ __forceinline__ void clear() {
    sum[0] = sum[1] = weight[0] = weight[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) output[i][e] = 0.0f;
  }

  __device__ __forceinline__ void multiply_keys(float (&scores)[kEights][4]) {
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[n][e] = 0.0f;
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
      for (int n = 0; n < kEights; ++n) {
        u32 low, high;
        if constexpr (kE4m3) {
          expand_e4m3x4(word_of(keys[n][k / 4], k % 4), low, high);
        } else {
          low = word_of(keys[n][k / 2], k % 2 * 2);
          high = word_of(keys[n][k / 2], k % 2 * 2 + 1);
        }
        const int w = k % 2 * 2;
        mma_m16n8k16<Unit>(scores[n], word_of(query[0][k / 2], w), word_of(query[1][k / 2], w),
                           word_of(query[0][k / 2], w + 1), word_of(query[1][k / 2], w + 1), low, high);
      }
  }

  // The first `visible` tokens of the chunk are seen.
  __device__ __forceinline__ void scale_scores(float (&scores)[kEights][4], int visible) const {
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[n][e] *= factor[e / 2];
    cap_scores(p, scores);
    mask_scores(scores, q, visible);
  }

  __device__ __forceinline__ void raise_maximum(const float (&scores)[kEights][4]) {
    float highest[2] = {kLowest, kLowest};
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) highest[e / 2] = fmaxf(highest[e / 2], scores[n][e]);
    if constexpr (!kLoops) {
      maximum[0] = max_of_quad(highest[0]);
      maximum[1] = max_of_quad(highest[1]);
      return;
    }
    const bool grown = highest[0] > maximum[0] + kMaximumSlack || highest[1] > maximum[1] + kMaximumSlack;
    if (!__any_sync(0xffffffffu, grown)) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float next = max_of_quad(highest[r]);
      if (next <= maximum[r] + kMaximumSlack) next = maximum[r];
      const float kept = exp2_approx(maximum[r] - next);
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) {
        output[i][2 * r] *= kept;
        output[i][2 * r + 1] *= kept;
      }
      sum[r] *= kept;
      weight[r] *= kept;
      maximum[r] = next;
    }
  }

  // Computes the probabilities as operands of the second product, for each 16 tokens.
  __device__ __forceinline__ void exponentiate(const float (&scores)[kEights][4], u32 (&probabilities)[kPairs][4]) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int n = 0; n < kEights; ++n) {
        const float a = exp2_approx(scores[n][2 * r] - maximum[r]);
        const float b = exp2_approx(scores[n][2 * r + 1] - maximum[r]);
        const u32 packed = pack_pair<Unit>(a, b);
        const float2 rounded = unpack_pair<Unit>(packed);
        sum[r] += a + b;
        weight[r] += rounded.x + rounded.y;
        probabilities[n / 2][n % 2 * 2 + r] = packed;
      }
  }

  __device__ __forceinline__ void narrow(float of_scores) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      u32 highest = 0;
#pragma unroll
      for (int i = 0; i < kSteps / 2; ++i)
#pragma unroll
        for (int w = 0; w < 4; ++w) highest = max(highest, Narrowed::highest_of(word_of(query[r][i], w)));
      const Narrowed narrowed(highest);
#pragma unroll
      for (int i = 0; i < kSteps / 2; ++i) {
        const uint4 v = query[r][i];
        query[r][i] = {narrowed(v.x), narrowed(v.y), narrowed(v.z), narrowed(v.w)};
      }
      factor[r] = fminf(of_scores * narrowed.down, kMaxFactor);
    }
  }

  // Product i has the i-th of a lane's columns, of 16 bytes in each load.
  __device__ __forceinline__ void multiply_values(const u32 (&probabilities)[kPairs][4]) {
#pragma unroll
    for (int t = 0; t < kPairs; ++t)
#pragma unroll
      for (int i = 0; i < kValueLoads; ++i)
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const u32 a = word_of(values[t][0][i], w), b = word_of(values[t][1][i], w);
          const u32 c = word_of(values[t][2][i], w), d = word_of(values[t][3][i], w);
          if constexpr (kE4m3) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              u32 low[2], high[2];
              expand_e4m3x4(__byte_perm(a, b, half ? 0x7362 : 0x5140), low[0], low[1]);
              expand_e4m3x4(__byte_perm(c, d, half ? 0x7362 : 0x5140), high[0], high[1]);
              add_values(4 * w + 2 * half, probabilities[t], low[0], high[0]);
              add_values(4 * w + 2 * half + 1, probabilities[t], low[1], high[1]);
            }
          } else {
            add_values(8 * i + 2 * w, probabilities[t], __byte_perm(a, b, 0x5410), __byte_perm(c, d, 0x5410));
            add_values(8 * i + 2 * w + 1, probabilities[t], __byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x7632));
          }
        }
  }
  __device__ __forceinline__ void add_values(int i, const u32 (&a)[4], u32 low, u32 high) {
    mma_m16n8k16<Unit>(output[i], a[0], a[1], a[2], a[3], low, high);
  }

  // The first column of the four that stand at a place of a row of sums.
  __device__ __forceinline__ static int column_at(int place) {
    const int q = place % 4, v = place / 4;
    return kE4m3 ? q * 32 + v * 4 : v / 4 * 64 + q * 16 + v % 4 * 4;
  }

  // Leaves the warp's sums and statistics in shared memory.
  __device__ __forceinline__ void leave(const Layout& shared, int warp) const {
    constexpr int kAdjacent = kE4m3 ? 16 : 8;  // columns of a lane that are adjacent: products with the same element
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const u32 to = shared.sums(warp, g + 8 * r) + q * 16;
#pragma unroll
      for (int v = 0; v < 8; ++v) {
        const int e = v * 4 / kAdjacent % 2, first = v * 4 / (2 * kAdjacent) * kAdjacent + v * 4 % kAdjacent;
        store_shared_float4(to + v * 64, {output[first][2 * r + e], output[first + 1][2 * r + e],
                                          output[first + 2][2 * r + e], output[first + 3][2 * r + e]});
      }
      const float total = sum_of_quad(sum[r]), rounded = sum_of_quad(weight[r]);
      if (q == 0) store_shared_float4(shared.statistics(warp, g + 8 * r), {maximum[r], total, rounded, 0.0f});
    }
  }
};

}  // namespace cumla::blocks
