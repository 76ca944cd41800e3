// SPDX-License-Identifier: Apache-2.0
// The end of a row tile of at most kFewRows rows: the first warp of each consumer has a row per quad of lanes. Partial
// results are stored and combined row by row, as in attention_decode.
#pragma once
#include "mha/attention/compute.cuh"
#include "mha/attention/finish.cuh"
#include "mha/attention/layout.cuh"
#include "mha/attention_decode/join.cuh"
#include "split/join.cuh"
#include "split/output.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

template <typename T, int kKeyTiles, int kValueTiles, bool kCopied, bool kScaled, typename Params>
__device__ __forceinline__ void Consumer<T, kKeyTiles, kValueTiles, kCopied, kScaled, Params>::finish_few(
    const Segment& segment, const float (&sink)[2], bool more) const {
  using Rows = RowJoiner<T, kValueTiles * 64, CommonOf<Params>, kWarpgroup>;
  static_assert(kJoinWarps * Rows::kRoom <= Layout::kExchangeBytes, "joining uses it");
  float lse[2], half[kHalf * 4];
  add_other(half, lse, sink);
  if (segment.split()) {
    write_row(segment, half, lse);
    Rows(p, shared.words(), shared.exchange(), tile, segment).join(more);
  } else {
    write_result(segment, consumer, half, lse);
  }
}

// Consumers exchange halves of their rows, and add them.
template <typename T, int kKeyTiles, int kValueTiles, bool kCopied, bool kScaled, typename Params>
__device__ __forceinline__ void Consumer<T, kKeyTiles, kValueTiles, kCopied, kScaled, Params>::add_other(
    float (&half)[kHalf * 4], float (&lse)[2], const float (&sink)[2]) const {
  lse[1] = -kInfinity;
#pragma unroll
  for (int i = 0; i < kHalf * 4; ++i) half[i] = 0.0f;
  if (warp == 0)
#pragma unroll
    for (int j = 0; j < kHalf; j += 2) {
      float4 v;
      v.x = consumer == 0 ? output[4 * (kHalf + j)] : output[4 * j];
      v.y = consumer == 0 ? output[4 * (kHalf + j) + 1] : output[4 * j + 1];
      v.z = consumer == 0 ? output[4 * (kHalf + j) + 4] : output[4 * j + 4];
      v.w = consumer == 0 ? output[4 * (kHalf + j) + 5] : output[4 * j + 5];
      store_shared_float4(exchanged(1 - consumer, j), v);
    }
  consumers_sync();
  if (warp == 0) {
    const float theirs = load_shared_float(shared.of_row(1 - consumer, 0, row));
    const float highest = fmaxf(maximum[0], theirs);
    const float own = exp2_approx(maximum[0] - highest), other = exp2_approx(theirs - highest);
    const float total = both(own, sum[0], other, load_shared_float(shared.of_row(1 - consumer, 1, row)));
    const float rounded = both(own, weight[0], other, load_shared_float(shared.of_row(1 - consumer, 2, row)));
    float inverse = inverse_of_sum(rounded);
    lse[0] = log_sum_exp(highest, total);
    take_sink(p, sink[0], inverse, lse[0]);
#pragma unroll
    for (int j = 0; j < kHalf; j += 2) {
      const float4 v = load_shared_float4(exchanged(consumer, j));
      const float theirs_of[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = 4 * (j + e / 2) + e % 2;
        const float mine = consumer == 0 ? output[i] : output[4 * kHalf + i];
        half[i] = both(own, mine, other, theirs_of[e]) * inverse;
      }
    }
  }
  consumers_sync();  // the next tile, and combining, overwrite the exchange
}

// Stores a partial result.
template <typename T, int kKeyTiles, int kValueTiles, bool kCopied, bool kScaled, typename Params>
__device__ __forceinline__ void Consumer<T, kKeyTiles, kValueTiles, kCopied, kScaled, Params>::write_row(
    const Segment& segment, const float (&half)[kHalf * 4], const float (&lse)[2]) const {
  if (warp > 0 || row >= tile.rows) return;
  const PieceRow<kValueTiles * 64> to(p, tile, blockIdx.y, segment.slot, row);
  if (consumer == 0 && lane % 4 == 0) *to.lse = lse[0];
#pragma unroll
  for (int j = 0; j < kHalf; ++j)
    store_global_float2(to.columns + (consumer * kHalf + j) * 8 + lane % 4 * 2, half[4 * j], half[4 * j + 1]);
}

}  // namespace cumla::mha
