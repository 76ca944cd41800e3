// SPDX-License-Identifier: Apache-2.0
// Parameters and shared memory of mla_decode_fp8_64.
#pragma once
#include "mla/mla_decode_fp8/layout.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace ptx;
using namespace split;

constexpr int kHeads = 64;  // of a row tile, unless its form has fewer
constexpr int kHeadsOfThread = kHeads / 4;
constexpr int kGranuleRows = 16;  // cache rows per barrier of the ring, and per warp of scores
constexpr int kGranules = kBlockTokens / kGranuleRows;  // of a block

template <bool kE4m3Products, bool kGrouped, int kHeads = mla::kHeads>
struct Heads64Layout {
  static constexpr int kFitting = kHeads == 16 ? 19 : kHeads == 32 ? 17 : 13;
  // Without scales of each row whole blocks: a block then lies in one piece.
  static constexpr int kSlots = kE4m3Products ? 16 : kGrouped ? kFitting : kFitting / kGranules * kGranules;
  static constexpr int kSlotBytes = kGranuleRows * kPackedBytes;
  // A tile has 64 columns, in e4m3 128. RoPE columns are the last tile.
  static constexpr int kQueryTileBytes = kHeads * 128, kQueryTiles = kE4m3Products ? kRopeTile / 2 + 1 : kTiles;
  static constexpr int kProbabilityBytes = (kHeads < 32 ? 32 : kHeads) * kBlockTokens * (kE4m3Products ? 1 : 2);
  static constexpr int kTurns = kE4m3Products ? 4 : 2;  // blocks whose probabilities exist at once
  // Joining uses the ring, and where that is short also the last probabilities, which lie before it.
  static constexpr int kBeforeRing = 8 * kJoinSpace > kSlots * kSlotBytes ? kProbabilityBytes : 0;
  static_assert(8 * kJoinSpace <= kBeforeRing + kSlots * kSlotBytes, "there is room to join");
  static constexpr int kTableBytes = kGrouped ? kScaleGroups * kBlockTokens * 2 : 0;
  static constexpr int kFloats = (1 + kTurns + 1 + 8) * kHeads;
  static constexpr int kWordsBytes = 8 + 4 * kTurns + 4 * (kSlots + kSlots % 2);
  static constexpr int kBytes = kQueryTiles * kQueryTileBytes + kTurns * kProbabilityBytes + kSlots * kSlotBytes +
                                2 * kTableBytes + 4 * kFloats + kWordsBytes + 2 * (kSlots + kTurns) * 8;

  u32 query, first_probabilities, ring, tables, references, words, barriers;

  __device__ __forceinline__ explicit Heads64Layout(u32 base)
      : query(base),
        first_probabilities(query + kQueryTiles * kQueryTileBytes),
        ring(first_probabilities + kTurns * kProbabilityBytes),
        tables(ring + kSlots * kSlotBytes),
        references(tables + 2 * kTableBytes),
        words(references + 4 * kFloats),
        barriers(words + kWordsBytes) {}

  __device__ __forceinline__ u32 join_space() const { return ring - kBeforeRing; }
  __device__ __forceinline__ u32 slot(u32 s) const { return ring + s * kSlotBytes; }
  // Probabilities of a block, kTurns of which alternate; transposed: 64 tokens per head.
  __device__ __forceinline__ u32 probabilities(int turn) const {
    return first_probabilities + turn * kProbabilityBytes;
  }
  // Scales of the same block as float16, in the order of V's fragments, per group of columns.
  __device__ __forceinline__ u32 table(int turn) const { return tables + turn * kTableBytes; }
  // The reference of a head's probabilities.
  __device__ __forceinline__ u32 reference(int head) const { return references + head * 4; }
  // The factor by which a block has changed the sums of a head.
  __device__ __forceinline__ u32 factor(int turn, int head) const { return reference(kHeads + turn * kHeads + head); }
  // The factor that turns products with a head's query into base-2 scores.
  __device__ __forceinline__ u32 score_factor(int head) const { return factor(kTurns, head); }
  // Per warp of both consumers and head: the highest score of a block, or the sum of a segment.
  __device__ __forceinline__ u32 of_warp(int warp, int head) const {
    return score_factor(kHeads + warp * kHeads + head);
  }
  // A set of Unusual per block. The two words before it belong to JoinSpace.
  __device__ __forceinline__ u32 unusual(int turn) const { return words + 8 + turn * 4; }
  // A bit per row of a slot, set if the row exists.
  __device__ __forceinline__ u32 exist(u32 s) const { return words + 8 + 4 * kTurns + s * 4; }
  // Barriers (table: mla/mla_decode_fp8_64/kernel.cuh).
  __device__ __forceinline__ u32 full(u32 s) const { return barriers + s * 8; }
  __device__ __forceinline__ u32 free(u32 s) const { return full(kSlots + s); }
  __device__ __forceinline__ u32 probabilities_full(int turn) const { return free(kSlots + turn); }
  __device__ __forceinline__ u32 probabilities_free(int turn) const { return probabilities_full(kTurns + turn); }
};

// The format of a cache row. Shared memory has the layout of packed rows, except that 8-bit RoPE columns follow
// latent columns without scales directly. kE4m3Products: products of e4m3 columns are computed in e4m3. Without
// kHasRope there are no RoPE columns. kTileHeads: 16 or 32 heads of few lists, whose products are as narrow.
template <bool kHasScales, bool kHasFp8Rope, bool kInE4m3 = false, bool kHasRopeColumns = true,
          int kTileHeads = mla::kHeads>
struct RowForm {
  static_assert(!(kHasScales && kInE4m3), "scales of each token would need probabilities for each of them");
  static constexpr bool kE4m3Products = kInE4m3;
  static constexpr int kHeads = kTileHeads;
  using Layout = Heads64Layout<kE4m3Products, kHasScales, kHeads>;
  static constexpr bool kGrouped = kHasScales;  // a scale per 128 latent columns
  static constexpr bool kHasRope = kHasRopeColumns, kRopeIsFp8 = kHasFp8Rope && kHasRope;
  static constexpr int kRope = kGrouped || !kRopeIsFp8 ? kPackedRope : kValueDim;
  static constexpr int kScaleBytes = kGrouped ? 4 * kScaleGroups : 0;
  static constexpr int kRopeBytes = !kHasRope ? 0 : kRopeIsFp8 ? 64 : 128;
  static constexpr int kBytes = kValueDim + kScaleBytes + kRopeBytes;
};

enum Unusual : u32 {
  kRaised = 1,  // references have changed, so sums change by factors
  kWide = 2,    // scales of a row exceed the range of float16: V and probabilities are bfloat16
};

// The slot and phase of a granule, whose number counts over all blocks of a CTA.
template <typename Layout>
struct GranulePlace {
  u32 slot, phase;

  __device__ __forceinline__ explicit GranulePlace(u32 granule)
      : slot(granule % Layout::kSlots), phase(granule / Layout::kSlots & 1) {}
  // Moves to the same granule of the next block.
  __device__ __forceinline__ void advance() {
    slot += kGranules;
    if (slot >= Layout::kSlots) {
      slot -= Layout::kSlots;
      phase ^= 1;
    }
  }
};

}  // namespace cumla::mla
