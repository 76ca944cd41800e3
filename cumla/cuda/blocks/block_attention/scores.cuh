// SPDX-License-Identifier: Apache-2.0
// Scores of a chunk, of which a lane has 4 n to 4 n + 3: of two tokens, and of heads g and g + 8.
#pragma once
#include "attend/score.cuh"
#include "blocks/block_attention/layout.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

using namespace attend;

// Scores that have their factors become arguments of exp2.
template <int kEights>
__device__ __forceinline__ void cap_scores(const BlockAttentionParams& p, float (&scores)[kEights][4]) {
  if (p.to_softcap != 0.0f)
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[n][e] = p.scale_log2 * tanh_of(scores[n][e]);
}

// The first `seen` tokens of the chunk are visible. q is the number of the lane in its quad.
template <int kEights>
__device__ __forceinline__ void mask_scores(float (&scores)[kEights][4], int q, int seen) {
  if (seen < 8 * kEights)
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (8 * n + q * 2 + e % 2 >= seen) scores[n][e] = -kInfinity;
}

}  // namespace cumla::blocks
