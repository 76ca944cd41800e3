// SPDX-License-Identifier: Apache-2.0
// Two neighbouring kv heads a CTA: one box brings both, and each consumer has one.
#pragma once
#include "mha/attention/layout.cuh"
#include "mha/attention/mask.cuh"
#include "split/output.cuh"
#include "split/tile.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

using namespace split;

struct PairedParams : AttentionParams {
  static constexpr int kHeads = 2;  // of a CTA
};
struct MaskedPairedParams : MaskedParams {
  static constexpr int kHeads = 2;
};

template <typename Params>
constexpr bool kIsPaired = false;
template <>
constexpr bool kIsPaired<PairedParams> = true;
template <>
constexpr bool kIsPaired<MaskedPairedParams> = true;
template <>
constexpr bool kHasMask<MaskedPairedParams> = true;

// A row tile of the kv head of this thread's consumer; of loaders, that of the first consumer. grid = (pairs of kv
// heads, parts, 1).
struct PairTile : HeadTile {
  using Held = PairTile;

  __device__ __forceinline__ explicit PairTile(const AttentionParams& p) : HeadTile(p) { index = kv_head(); }
  __device__ __forceinline__ static u32 kv_head() { return 2 * blockIdx.x + threadIdx.x / (2 * kWarpgroup); }
};

// As for a HeadTile, whose kv head is another one.
__device__ __forceinline__ float sink_of(const AttentionParams& p, const PairTile& tile, const Segment& segment,
                                         int row) {
  const bool counts = row < tile.rows && (!segment.split() || segment.first_part == blockIdx.y);
  return p.sinks != nullptr && counts ? bounded_sink(p.sinks[Row(p, tile, row).head]) : -kInfinity;
}

template <typename Params>
using TileOf = typename TypeIf<kIsPaired<Params>, PairTile, HeadTile>::Type;

}  // namespace cumla::mha
