// SPDX-License-Identifier: Apache-2.0
// A warp of block_attention and one chunk of tokens: scores, softmax, and the product with the values.
#pragma once
#include "attend/narrow.cuh"
#include "attend/reduce.cuh"
#include "attend/softmax.cuh"
#include "blocks/block_attention/layout.cuh"
#include "blocks/block_attention/scores.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/mma.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

using namespace attend;

// Lane 4 g + q has what belongs to heads g and g + 8.
template <typename T, bool kE4m3, typename Layout>
struct DecodeAttender {
  using Unit = typename mha::TypeIf<kE4m3, Fp16, T>::Type;  // of the products
  static constexpr int kSteps = Layout::kColumns / 16, kEights = Layout::kChunk / 8, kPairs = kEights / 2;
  static constexpr bool kHoldsQuery = kSteps <= 8;  // else it is loaded for each chunk: registers do not suffice

  const BlockAttentionParams& p;
  const int lane = threadIdx.x % 32;
  u32 query[kHoldsQuery ? kSteps : 1][4];
  u32 queries;  // where the rows lie
  float output[2 * kSteps][4];
  float scores[kEights][4];
  float maximum[2], sum[2], weight[2];
  float factor[2];  // of scores (base 2), or of the argument of the cap
  u32 factors;      // of the chunk's tokens: where those of keys lie
  u32 unit;         // of factors of values: the bits of a power of 2, which grows

  __device__ __forceinline__ explicit DecodeAttender(const BlockAttentionParams& p) : p(p) {}

  __device__ __forceinline__ void begin(u32 queries, float of_keys) {
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) output[i][e] = 0.0f;
    maximum[0] = maximum[1] = kLowest;
    sum[0] = sum[1] = weight[0] = weight[1] = 0.0f;
    unit = kLeastUnit;
    const float of_scores = (p.to_softcap == 0.0f ? p.scale_log2 : p.to_softcap) * of_keys;
    factor[0] = factor[1] = fminf(of_scores, kMaxFactor);
    this->queries = queries;
    if constexpr (kHoldsQuery) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) load_query(query[k], k);
      if constexpr (kE4m3 && kIsBf16<T>) narrow(of_scores);
    } else if constexpr (kE4m3 && kIsBf16<T>) {
      narrow_in_place(of_scores);
    }
  }

  // Loads 16 columns of the query rows. For e4m3 they are in the order of bytes that a lane has of keys: columns 4 q to
  // 4 q + 3.
  __device__ __forceinline__ void load_query(u32 (&to)[4], int k) const {
    const int g = lane / 4, q = lane % 4;
    if constexpr (!kE4m3) {
      load_matrix_x4(to, queries + Layout::query_place(lane / 8 % 2 * 8 + lane % 8, 2 * k + lane / 16));
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint2 v = load_shared_8(queries + Layout::query_place(g + 8 * r, 2 * k + q / 2) + q % 2 * 8);
        to[r] = v.x;
        to[r + 2] = v.y;
      }
    }
  }

  // Narrows the rows in shared memory, where all warps read them and the first one stores them.
  __device__ __forceinline__ void narrow_in_place(float of_scores) {
    u32 highest[2] = {0, 0};
#pragma unroll 4
    for (int k = 0; k < kSteps; ++k) {
      u32 v[4];
      load_query(v, k);
#pragma unroll
      for (int i = 0; i < 4; ++i) highest[i % 2] = max(highest[i % 2], Narrowed::highest_of(v[i]));
    }
    const Narrowed narrowed[2] = {Narrowed(highest[0]), Narrowed(highest[1])};
#pragma unroll
    for (int r = 0; r < 2; ++r) factor[r] = fminf(of_scores * narrowed[r].down, kMaxFactor);
    __syncthreads();
    if (threadIdx.x < 32)
#pragma unroll 4
      for (int k = 0; k < kSteps; ++k) {
        const int g = lane / 4, q = lane % 4;
        u32 v[4];
        load_query(v, k);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const u32 to = queries + Layout::query_place(g + 8 * r, 2 * k + q / 2) + q % 2 * 8;
          store_shared_u32(to, narrowed[r](v[r]));
          store_shared_u32(to + 4, narrowed[r](v[r + 2]));
        }
      }
    __syncthreads();
  }

  __device__ __forceinline__ void narrow(float of_scores) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      u32 highest = 0;
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
        highest = max(highest, max(Narrowed::highest_of(query[k][r]), Narrowed::highest_of(query[k][r + 2])));
      const Narrowed narrowed(highest);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        query[k][r] = narrowed(query[k][r]);
        query[k][r + 2] = narrowed(query[k][r + 2]);
      }
      factor[r] = fminf(of_scores * narrowed.down, kMaxFactor);
    }
  }

  __device__ __forceinline__ void multiply_keys(u32 keys) {
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[n][e] = 0.0f;
    if constexpr (Layout::kLoadsAhead) {
      multiply_keys_ahead(keys);
      return;
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if constexpr (!kHoldsQuery) load_query(query[0], k);
      u32 b[4];
      if constexpr (kE4m3) {  // 16 columns of 32 keys
        load_matrix_x4(b, keys + Layout::place(lane, k));
#pragma unroll
        for (int n = 0; n < kEights; ++n) {
          u32 low, high;
          expand_e4m3x4(b[n], low, high);
          multiply_by_query(n, k, low, high);
        }
      } else {  // 16 columns of 16 keys
        load_matrix_x4(b, keys + Layout::place(lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
        multiply_by_query(0, k, b[0], b[1]);
        multiply_by_query(1, k, b[2], b[3]);
      }
    }
  }
  // 16-bit keys whose operands are loaded a step ahead. Two sums of each score halve the chain of dependent products.
  __device__ __forceinline__ void multiply_keys_ahead(u32 keys) {
    float odd[2][4] = {};
    u32 a[2][4], b[2][4];
    const auto load = [&](int k) {
      load_query(a[k % 2], k);
      load_matrix_x4(b[k % 2], keys + Layout::place(lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
    };
    load(0);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (k + 1 < kSteps) load(k + 1);
      const u32(&of)[4] = a[k % 2];
#pragma unroll
      for (int n = 0; n < 2; ++n)
        mma_m16n8k16<Unit>(k % 2 == 0 ? scores[n] : odd[n], of[0], of[1], of[2], of[3], b[k % 2][2 * n],
                           b[k % 2][2 * n + 1]);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[n][e] += odd[n][e];
  }
  __device__ __forceinline__ void multiply_by_query(int n, int k, u32 low, u32 high) {
    const u32(&a)[4] = query[kHoldsQuery ? k : 0];
    mma_m16n8k16<Unit>(scores[n], a[0], a[1], a[2], a[3], low, high);
  }

  // Where the factors of the two tokens lie whose scores n the lane has.
  __device__ __forceinline__ int factor_place(int n) const { return (8 * n + lane % 4 * 2) * 4; }

  // The first `seen` tokens of the chunk are visible.
  __device__ __forceinline__ void scale_scores(int seen) {
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[n][e] *= factor[e / 2];
    if constexpr (Layout::kFactors)
#pragma unroll
      for (int n = 0; n < kEights; ++n) {
        const float2 of_keys = load_shared_float2(factors + factor_place(n));
        scores[n][0] *= of_keys.x;
        scores[n][1] *= of_keys.y;
        scores[n][2] *= of_keys.x;
        scores[n][3] *= of_keys.y;
      }
    cap_scores(p, scores);
    mask_scores(scores, lane % 4, seen);
  }

  __device__ __forceinline__ void raise_maximum() {
    float highest[2] = {-kInfinity, -kInfinity};
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) highest[e / 2] = fmaxf(highest[e / 2], scores[n][e]);
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

  // Raises the unit to the chunk's largest factor of values, which makes the sums smaller.
  __device__ __forceinline__ void raise_unit() {
    const float own = load_shared_float(factors + Layout::kFactorBytes + lane * 4);
    const u32 highest = __reduce_max_sync(0xffffffffu, __float_as_uint(fabsf(own))) & 0x7f800000u;
    const u32 next = min(max(highest, unit), kMostUnit);
    if (next == unit) return;
    const float kept = __uint_as_float(unit) * inverse_of_unit(next);
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) output[i][e] *= kept;
    unit = next;
  }
  static constexpr u32 kLeastUnit = 0x00800000u, kMostUnit = 0x7e800000u;  // 2^-126, 2^126
  __device__ __forceinline__ static float inverse_of_unit(u32 unit) { return __uint_as_float(0x7f000000u - unit); }

  // Computes the probabilities as operands of the second product, for each 16 tokens. Factors of values are part of
  // the operands: in units, so that these fit 16 bits.
  __device__ __forceinline__ void exponentiate(u32 (&probabilities)[kPairs][4]) {
    if constexpr (Layout::kFactors) raise_unit();
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
      float2 of_values = {};
      if constexpr (Layout::kFactors) {
        of_values = load_shared_float2(factors + Layout::kFactorBytes + factor_place(n));
        of_values = {of_values.x * inverse_of_unit(unit), of_values.y * inverse_of_unit(unit)};
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float a = exp2_approx(scores[n][2 * r] - maximum[r]);
        const float b = exp2_approx(scores[n][2 * r + 1] - maximum[r]);
        u32 packed;
        if constexpr (Layout::kFactors) {
          packed = pack_pair<Unit>(a * of_values.x, b * of_values.y);
          weight[r] += a + b;
        } else {
          packed = pack_pair<Unit>(a, b);
          const float2 rounded = unpack_pair<Unit>(packed);
          weight[r] += rounded.x + rounded.y;
        }
        sum[r] += a + b;
        probabilities[n / 2][n % 2 * 2 + r] = packed;
      }
    }
  }

  // 16-bit values that are loaded a step ahead.
  __device__ __forceinline__ void multiply_values_ahead(u32 values, const u32 (&probabilities)[kPairs][4]) {
    u32 b[2][4];
    const auto load = [&](int i) {
      load_matrix_x4_transposed(b[i % 2], values + Layout::place(lane % 16, 2 * i + lane / 16));
    };
    load(0);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (i + 1 < kSteps) load(i + 1);
      add_values(2 * i, probabilities[0], b[i % 2][0], b[i % 2][1]);
      add_values(2 * i + 1, probabilities[0], b[i % 2][2], b[i % 2][3]);
    }
  }

  __device__ __forceinline__ void multiply_values(u32 values, const u32 (&probabilities)[kPairs][4]) {
    if constexpr (Layout::kLoadsAhead) {
      multiply_values_ahead(values, probabilities);
      return;
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {  // 16 columns
      u32 b[4];
      if constexpr (kE4m3) {  // of 32 tokens: product 2 i has the even columns, 2 i + 1 the odd ones
        load_matrix_x4_transposed(b, values + Layout::place(lane, i));
#pragma unroll
        for (int t = 0; t < kPairs; ++t) {
          u32 even[2], odd[2];
#pragma unroll
          for (int half = 0; half < 2; ++half)
            expand_e4m3x4(__byte_perm(b[2 * t + half], 0, 0x3120), even[half], odd[half]);
          add_values(2 * i, probabilities[t], even[0], even[1]);
          add_values(2 * i + 1, probabilities[t], odd[0], odd[1]);
        }
      } else {  // of 16 tokens
        load_matrix_x4_transposed(b, values + Layout::place(lane % 16, 2 * i + lane / 16));
        add_values(2 * i, probabilities[0], b[0], b[1]);
        add_values(2 * i + 1, probabilities[0], b[2], b[3]);
      }
    }
  }
  __device__ __forceinline__ void add_values(int i, const u32 (&a)[4], u32 low, u32 high) {
    mma_m16n8k16<Unit>(output[i], a[0], a[1], a[2], a[3], low, high);
  }

  // Weights of tokens that are not seen are 0, and 0 x NaN is NaN: their values are zeroed.
  __device__ __forceinline__ void clear_values(u32 values, int seen) const {
    constexpr int kOctets = Layout::kRow / 16;
    for (int i = lane; i < (Layout::kChunk - seen) * kOctets; i += 32)
      store_shared_zero_16(values + Layout::place(seen + i / kOctets, i % kOctets));
    __syncwarp();
  }

  // The first `seen` tokens of the chunk are visible, at least one.
  __device__ __forceinline__ void attend(u32 chunk, int seen) {
    u32 probabilities[kPairs][4];
    if (seen < Layout::kChunk) clear_values(chunk + Layout::kKeyBytes, seen);
    multiply_keys(chunk);
    scale_scores(seen);
    raise_maximum();
    exponentiate(probabilities);
    multiply_values(chunk + Layout::kKeyBytes, probabilities);
  }

  // Leaves the warp's sums and statistics in shared memory.
  __device__ __forceinline__ void leave(const Layout& shared, int warp) {
    const int g = lane / 4, q = lane % 4;
    __syncwarp();  // all lanes have read the last chunk
    if constexpr (Layout::kFactors)
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) output[i][e] *= __uint_as_float(unit);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const u32 to = shared.sums(warp, g + 8 * r);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const float* const first = output[2 * i] + 2 * r;
        const float* const second = output[2 * i + 1] + 2 * r;
        if constexpr (kE4m3) {
          store_shared_float4(to + (16 * i + 4 * q) * 4, {first[0], second[0], first[1], second[1]});
        } else {
          store_shared_float2(to + (16 * i + 2 * q) * 4, {first[0], first[1]});
          store_shared_float2(to + (16 * i + 8 + 2 * q) * 4, {second[0], second[1]});
        }
      }
      const float total = sum_of_quad(sum[r]), rounded = sum_of_quad(weight[r]);
      if (q == 0) store_shared_float4(shared.statistics(warp, g + 8 * r), {maximum[r], total, rounded, 0.0f});
    }
  }
};

}  // namespace cumla::blocks
