// SPDX-License-Identifier: Apache-2.0
// A warp of attention_decode and one chunk: scores, softmax, and the product with the values.
#pragma once
#include "attend/narrow.cuh"
#include "mha/attention/bias.cuh"
#include "mha/attention/layout.cuh"
#include "mha/attention_decode/layout.cuh"
#include "split/tile.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

using namespace ptx;
using namespace split;

__device__ __forceinline__ const char* query_row(const AttentionParams& p, const HeadTile& tile, int row) {
  const Query of(p, tile, row);
  return p.q + of.at.batch * p.q_stride_batch + of.at.token * p.q_stride_token + of.head * p.q_stride_head;
}

// The scale of keys or values: a parameter, or the number that was copied to shared memory.
__device__ __forceinline__ float loaded_scale(const Scales& scale, u32 from) {
  return scale.data == nullptr ? scale.value : load_shared_float(from);
}

template <typename Params, int kEights>
struct ChunkBias {
  RowBias<Params> bias[kEights][2];
};
struct Nothing {};  // takes no place as a base: its members would change what ptxas makes of kernels without a bias

// A warp's state of a row tile. For each eight rows, lane 4 g + q has the query of row g, and the results of rows 2 q
// and 2 q + 1.
template <typename T, int kKeys, int kValues, int kRows, bool kE4m3, typename Params>
struct ChunkAttender : TypeIf<kHasBias<Params>, ChunkBias<Params, kRows / 8>, Nothing>::Type {
  using Layout = DecodeLayout<kKeys, kValues, kRows, kE4m3>;
  using Unit = typename TypeIf<kE4m3, Fp16, T>::Type;  // of the products
  static constexpr int kEights = kRows / 8;
  static constexpr int kReads = Layout::kKeyRow / 64;  // 16-byte loads of a key by a lane
  static constexpr int kSteps = kE4m3 ? 4 : 2;         // products of each
  static constexpr bool kNarrows = kE4m3 && kIsBf16<T>;  // narrows query rows

  using Common = CommonOf<Params>;

  const Common& p;
  const Layout& shared;
  const HeadTile& tile;
  const int warp, lane;
  u32 query[Layout::kHoldsQuery ? Layout::kQueryWords : 1];
  u32 query_slot;
  float output[kEights][kValues / 16][4];
  float scores[kEights][4];
  float maximum[kEights][2], sum[kEights][2], weight[kEights][2];
  float factor[kEights][2];  // of scores (base 2), or of the argument of the cap
  Seen common;  // keys that all rows see

  __device__ __forceinline__ ChunkAttender(const Common& p, const Layout& shared, const HeadTile& tile)
      : p(p), shared(shared), tile(tile), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {}

  // The group of eight columns of a lane's query words 4 i to 4 i + 3. It matches the lane's key words.
  __device__ __forceinline__ int query_piece(int i) const {
    constexpr int kColumns = 16 / Layout::kUnit;
    return ((4 * (i * 8 / kColumns) + lane % 4) * kColumns + i * 8 % kColumns) / 8;
  }

  __device__ __forceinline__ void copy_scale_async(const Scales& scale, const HeadTile& of, u32 to) const {
    if (scale.data == nullptr) return;
    const int request = min(max(request_of(p, of), 0), scale.requests - 1);
    copy_4_async(to, scale.data + request * scale.stride_request + of.index * scale.stride_head, true);
  }

  // One warp copies the query rows and scales of a tile.
  __device__ __forceinline__ void copy_query_async(const HeadTile& of, u32 tiles) const {
    const u32 slot = tiles % Layout::kQuerySlots;
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
      const int row = n * 8 + lane / 4;
      const char* const from = row < of.rows ? query_row(p, of, row) : p.q;
#pragma unroll
      for (int i = lane % 4; i < kKeys / 8; i += 4) {
        const bool exists = row < of.rows && i * 8 < p.key_columns;
        copy_16_async(shared.query(slot, row, i), exists ? from + i * 16 : p.q, exists);
      }
    }
    if (kE4m3 && lane == 0) {
      copy_scale_async(p.key_scale, of, shared.scale(tiles, false));
      copy_scale_async(p.value_scale, of, shared.scale(tiles, true));
    }
    mbarrier_arrive_after_copies(kNarrows ? shared.query_copied() : shared.query_full(slot));
  }

  // The same warp later converts bfloat16 rows to float16.
  __device__ __forceinline__ void narrow_query(u32 tiles) const {
    const u32 slot = tiles % Layout::kQuerySlots;
    mbarrier_wait(shared.query_copied(), tiles & 1, "copied query rows");
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
      const int row = n * 8 + lane / 4;
      u32 highest = 0;
#pragma unroll
      for (int i = 0; i < Layout::kQueryWords / 4; ++i) {
        const uint4 v = load_shared_16(shared.query(slot, row, query_piece(i)));
        highest = max(highest, max(max(Narrowed::highest_of(v.x), Narrowed::highest_of(v.y)),
                                   max(Narrowed::highest_of(v.z), Narrowed::highest_of(v.w))));
      }
      const Narrowed narrowed(highest);
#pragma unroll
      for (int i = 0; i < Layout::kQueryWords / 4; ++i) {
        const u32 at = shared.query(slot, row, query_piece(i));
        const uint4 v = load_shared_16(at);
        store_shared_16(at, {narrowed(v.x), narrowed(v.y), narrowed(v.z), narrowed(v.w)});
      }
      if (lane % 4 == 0) store_shared_float(shared.undone(slot, row), narrowed.down);
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared.query_full(slot));  // plant: query
  }

  __device__ __forceinline__ uint4 load_query(int n, int i) const {
    return load_shared_16(shared.query(query_slot, n * 8 + lane / 4, query_piece(i)));
  }

  // tiles: the CTA's tiles so far.
  __device__ __forceinline__ void begin(const Segment& segment, u32 tiles) {
    common = {seen_by(p, tile, segment.tokens, tile.rows - 1).first, seen_by(p, tile, segment.tokens, 0).end};
    query_slot = tiles % Layout::kQuerySlots;
    mbarrier_wait(shared.query_full(query_slot), tiles / Layout::kQuerySlots & 1, "the query rows");
    const float of_keys = kE4m3 ? loaded_scale(p.key_scale, shared.scale(tiles, false)) : 1.0f;
    if constexpr (Layout::kHoldsQuery) {
#pragma unroll
      for (int i = 0; i < Layout::kQueryWords / 4; ++i) {
        const uint4 v = load_query(0, i);
        query[4 * i] = v.x;
        query[4 * i + 1] = v.y;
        query[4 * i + 2] = v.z;
        query[4 * i + 3] = v.w;
      }
    }
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
#pragma unroll
      for (int i = 0; i < kValues / 16; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) output[n][i][e] = 0.0f;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        maximum[n][r] = kLowest;
        sum[n][r] = weight[n][r] = 0.0f;
        float of_scores = p.to_softcap == 0.0f ? p.scale_log2 : p.to_softcap;
        if constexpr (kNarrows) of_scores *= load_shared_float(shared.undone(query_slot, n * 8 + lane % 4 * 2 + r));
        factor[n][r] = fminf(of_scores * of_keys, kMaxFactor);
        if constexpr (kHasBias<Params>)
          this->bias[n][r].begin(static_cast<const Params&>(p), tile, segment.tokens, n * 8 + lane % 4 * 2 + r);
      }
    }
  }

  __device__ __forceinline__ void multiply_keys(u32 keys) {
    constexpr int kChains = kEights > 1 ? 1 : 2;  // two chains, because each product waits for the one before
    float products[kChains][kEights][4];
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) products[0][n][e] = products[kChains - 1][n][e] = 0.0f;
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      const auto place = [&](int more) {
        return keys + Layout::template place<Layout::kKeyRow>(token_of_row(lane / 4) + more, 4 * i + lane % 4);
      };
      const uint4 low = load_shared_16(place(0)), high = load_shared_16(place(8));
      const u32 lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w};
      u32 b[kEights][kSteps * 2];
#pragma unroll
      for (int n = 0; n < kEights; ++n)
#pragma unroll
        for (int j = 0; j < kSteps / 2; ++j) {
          const int first = i * kSteps * 2 + 4 * j;
          uint4 v;
          if constexpr (Layout::kHoldsQuery)
            v = {query[first], query[first + 1], query[first + 2], query[first + 3]};
          else
            v = load_query(n, first / 4);
          b[n][4 * j] = v.x;
          b[n][4 * j + 1] = v.y;
          b[n][4 * j + 2] = v.z;
          b[n][4 * j + 3] = v.w;
        }
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        u32 a[4];
        if constexpr (kE4m3) {
          expand_e4m3x4(lows[k], a[0], a[2]);
          expand_e4m3x4(highs[k], a[1], a[3]);
        } else {
          a[0] = lows[2 * k];
          a[1] = highs[2 * k];
          a[2] = lows[2 * k + 1];
          a[3] = highs[2 * k + 1];
        }
#pragma unroll
        for (int n = 0; n < kEights; ++n)
          mma_m16n8k16<Unit>(products[k % kChains][n], a[0], a[1], a[2], a[3], b[n][2 * k], b[n][2 * k + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (kChains > 1) products[0][n][e] += products[kChains - 1][n][e];
        scores[n][e] = products[0][n][e] * factor[n][e & 1];
      }
  }

  // scale_log2 is softcap * log2(e).
  __device__ __forceinline__ void cap_scores() {
    if (p.to_softcap == 0.0f) return;
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[n][e] = p.scale_log2 * tanh_of(scores[n][e]);
  }

  __device__ __forceinline__ void add_bias(int first) {
    if constexpr (kHasBias<Params>) {
      const int token = first + token_of_row(lane / 4);
#pragma unroll
      for (int n = 0; n < kEights; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const auto from = this->bias[n][r].from(token);
          scores[n][r] += this->bias[n][r].plus(from, 0);
          scores[n][r + 2] += this->bias[n][r].plus(from, 8);
        }
    }
  }

  __device__ __forceinline__ void mask_scores(const Segment& segment, int first) {
    if (first >= common.first && first + kChunk <= common.end) return;
    const int token = first + token_of_row(lane / 4);
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Seen seen = seen_by(p, tile, segment.tokens, n * 8 + lane % 4 * 2 + r);
        if (token < seen.first || token >= seen.end) scores[n][r] = -kInfinity;
        if (token + 8 < seen.first || token + 8 >= seen.end) scores[n][r + 2] = -kInfinity;
      }
  }

  __device__ __forceinline__ void raise_maximum() {
    bool grown = false;
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        grown |= fmaxf(scores[n][r], scores[n][r + 2]) > maximum[n][r] + kMaximumSlack;
    if (!__any_sync(0xffffffffu, grown)) return;
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float next = fmaxf(scores[n][r], scores[n][r + 2]);
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) next = fmaxf(next, __shfl_xor_sync(0xffffffffu, next, lanes));
        if (next <= maximum[n][r] + kMaximumSlack) next = maximum[n][r];
        const float kept = exp2_approx(maximum[n][r] - next);
#pragma unroll
        for (int i = 0; i < kValues / 16; ++i) {
          output[n][i][r] *= kept;
          output[n][i][r + 2] *= kept;
        }
        sum[n][r] *= kept;
        weight[n][r] *= kept;
        maximum[n][r] = next;
      }
  }

  // Computes the probabilities as operands of the second product.
  __device__ __forceinline__ void exponentiate(u32 (&probabilities)[kEights][2]) {
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float a = exp2_approx(scores[n][2 * half] - maximum[n][0]);
        const float b = exp2_approx(scores[n][2 * half + 1] - maximum[n][1]);
        const u32 packed = pack_pair<Unit>(a, b);
        const float2 rounded = unpack_pair<Unit>(packed);
        sum[n][0] += a;
        sum[n][1] += b;
        weight[n][0] += rounded.x;
        weight[n][1] += rounded.y;
        probabilities[n][half] = transpose_matrix(packed);
      }
  }

  __device__ __forceinline__ void multiply_values_of(int i, const u32 (&a)[4], const u32 (&probabilities)[kEights][2]) {
#pragma unroll
    for (int n = 0; n < kEights; ++n)
      mma_m16n8k16<Unit>(output[n][i], a[0], a[1], a[2], a[3], probabilities[n][0], probabilities[n][1]);
  }

  // `words`: the same columns of four tokens. Product i, with e4m3 also i + 1, has pairs of these columns.
  __device__ __forceinline__ void multiply_word(int i, const u32 (&words)[4], const u32 (&probabilities)[kEights][2]) {
    u32 a[4];
    if constexpr (kE4m3) {
      const u32 first = __byte_perm(words[0], words[1], 0x5140), last = __byte_perm(words[2], words[3], 0x5140);
      expand_e4m3x4(first, a[0], a[1]);
      expand_e4m3x4(last, a[2], a[3]);
      multiply_values_of(i, a, probabilities);
      const u32 next = __byte_perm(words[0], words[1], 0x7362), end = __byte_perm(words[2], words[3], 0x7362);
      expand_e4m3x4(next, a[0], a[1]);
      expand_e4m3x4(end, a[2], a[3]);
      multiply_values_of(i + 1, a, probabilities);
    } else {
      a[0] = __byte_perm(words[0], words[1], 0x5410);
      a[1] = __byte_perm(words[0], words[1], 0x7632);
      a[2] = __byte_perm(words[2], words[3], 0x5410);
      a[3] = __byte_perm(words[2], words[3], 0x7632);
      multiply_values_of(i, a, probabilities);
    }
  }

  __device__ __forceinline__ void multiply_values(u32 chunk, const u32 (&probabilities)[kEights][2]) {
    constexpr int kEach = kE4m3 ? 2 : 1;  // products per word
    const int g = lane / 4, q = lane % 4;
    const auto place = [&](int e, int i) {  // of token e of a lane's four
      return chunk + Layout::kKeyBytes +
             Layout::template place<Layout::kValueRow>(token_of_row(2 * q + e % 2) + e / 2 * 8, i);
    };
    if constexpr (Layout::kValueRow == 64) {  // eight bytes per lane
      float2 v[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) v[e] = load_shared_float2(place(e, g / 2) + g % 2 * 8);
      const u32 first[4] = {__float_as_uint(v[0].x), __float_as_uint(v[1].x), __float_as_uint(v[2].x),
                            __float_as_uint(v[3].x)};
      const u32 second[4] = {__float_as_uint(v[0].y), __float_as_uint(v[1].y), __float_as_uint(v[2].y),
                             __float_as_uint(v[3].y)};
      multiply_word(0, first, probabilities);
      multiply_word(kEach, second, probabilities);
    } else {
#pragma unroll
      for (int s = 0; s < Layout::kValueRow / 128; ++s) {
        uint4 v[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) v[e] = load_shared_16(place(e, g + 8 * s));
        const u32 words[4][4] = {{v[0].x, v[1].x, v[2].x, v[3].x},
                                 {v[0].y, v[1].y, v[2].y, v[3].y},
                                 {v[0].z, v[1].z, v[2].z, v[3].z},
                                 {v[0].w, v[1].w, v[2].w, v[3].w}};
#pragma unroll
        for (int w = 0; w < 4; ++w) multiply_word((4 * s + w) * kEach, words[w], probabilities);
      }
    }
  }

  __device__ __forceinline__ void attend(const Segment& segment, u32 chunk, int first) {
    u32 probabilities[kEights][2];
    multiply_keys(chunk);
    cap_scores();
    add_bias(first);
    mask_scores(segment, first);
    raise_maximum();
    exponentiate(probabilities);
    multiply_values(chunk, probabilities);
  }
};

}  // namespace cumla::mha
