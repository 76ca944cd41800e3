// SPDX-License-Identifier: Apache-2.0
// Parameters and shared memory of mla_decode_fp8_64.
#pragma once
#include "mla/mla_decode_fp8/layout.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace ptx;
using namespace split;

constexpr int kHeads = 64;  // of a row tile
constexpr int kHeadsOfThread = kHeads / 4;
constexpr int kGranuleRows = 16;  // cache rows that a barrier of the ring stands for: those of a warp of scores
constexpr int kGranules = kBlockTokens / kGranuleRows;  // of a block

template <bool kE4m3Products>
struct Heads64Layout {
  static constexpr int kSlots = kE4m3Products ? 16 : 13;
  static constexpr int kSlotBytes = kGranuleRows * kPackedBytes;
  static_assert(8 * kJoinSpace <= kSlots * kSlotBytes, "joining uses the ring");
  // 64 columns, in e4m3 128 of them; RoPE columns are the last tile.
  static constexpr int kQueryTileBytes = kHeads * 128, kQueryTiles = kE4m3Products ? kRopeTile / 2 + 1 : kTiles;
  static constexpr int kProbabilityBytes = kHeads * kBlockTokens * (kE4m3Products ? 1 : 2);
  static constexpr int kTurns = kE4m3Products ? 4 : 2;  // blocks whose probabilities there are at once
  static constexpr int kTableBytes = kE4m3Products ? 0 : kScaleGroups * kBlockTokens * 2;
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

  __device__ __forceinline__ u32 slot(u32 s) const { return ring + s * kSlotBytes; }
  // Of a block, kTurns of which take turns: transposed, a row of 64 tokens for each head.
  __device__ __forceinline__ u32 probabilities(int turn) const {
    return first_probabilities + turn * kProbabilityBytes;
  }
  // Of the same: scales as float16 in the order of V's fragments, for each group of columns.
  __device__ __forceinline__ u32 table(int turn) const { return tables + turn * kTableBytes; }
  // To what the probabilities of a head are relative.
  __device__ __forceinline__ u32 reference(int head) const { return references + head * 4; }
  // By what the reference of a head has changed with a block.
  __device__ __forceinline__ u32 factor(int turn, int head) const { return reference(kHeads + turn * kHeads + head); }
  // By what products with a head's query become scores in base 2.
  __device__ __forceinline__ u32 score_factor(int head) const { return factor(kTurns, head); }
  // Of a warp of both consumers and a head: the highest score of a block, the sum of a segment.
  __device__ __forceinline__ u32 of_warp(int warp, int head) const {
    return score_factor(kHeads + warp * kHeads + head);
  }
  // What is unusual about a block: a set of Unusual. Two words before it are those of joining.
  __device__ __forceinline__ u32 unusual(int turn) const { return words + 8 + turn * 4; }
  // Which rows of a slot are there, a bit each.
  __device__ __forceinline__ u32 exist(u32 s) const { return words + 8 + 4 * kTurns + s * 4; }
  // Barriers: a slot is loaded; it is free again; probabilities are written; they have been read.
  __device__ __forceinline__ u32 full(u32 s) const { return barriers + s * 8; }
  __device__ __forceinline__ u32 free(u32 s) const { return full(kSlots + s); }
  __device__ __forceinline__ u32 probabilities_full(int turn) const { return free(kSlots + turn); }
  __device__ __forceinline__ u32 probabilities_free(int turn) const { return probabilities_full(kTurns + turn); }
};

// What a row of the cache is made of, each as the packed rows have it but for RoPE columns of 8 bits behind latent
// columns without scales: as arrays in one piece have those. kE4m3Products: products of e4m3 columns are computed in
// e4m3.
template <bool kHasScales, bool kHasFp8Rope, bool kInE4m3 = false>
struct RowForm {
  static_assert(!(kHasScales && kInE4m3), "scales of each token would need probabilities for each of them");
  static constexpr bool kE4m3Products = kInE4m3;
  using Layout = Heads64Layout<kE4m3Products>;
  static constexpr bool kGrouped = kHasScales;  // a scale for each 128 latent columns
  static constexpr bool kRopeIsFp8 = kHasFp8Rope;
  static constexpr int kRope = kGrouped || !kRopeIsFp8 ? kPackedRope : kValueDim;
  static constexpr int kScaleBytes = kGrouped ? 4 * kScaleGroups : 0, kRopeBytes = kRopeIsFp8 ? 64 : 128;
  static constexpr int kBytes = kValueDim + kScaleBytes + kRopeBytes;
};

enum Unusual : u32 {
  kRaised = 1,  // references have changed: what was summed up changes by factors
  kWide = 2,    // scales of a row differ by more than float16 bears: V and probabilities as bfloat16
};

// The number of a block's granule, over all blocks of a CTA, in the ring.
template <typename Layout>
struct GranulePlace {
  u32 slot, phase;

  __device__ __forceinline__ explicit GranulePlace(u32 granule)
      : slot(granule % Layout::kSlots), phase(granule / Layout::kSlots & 1) {}
  // To the same granule of the next block.
  __device__ __forceinline__ void advance() {
    slot += kGranules;
    if (slot >= Layout::kSlots) {
      slot -= Layout::kSlots;
      phase ^= 1;
    }
  }
};

}  // namespace cumla::mla
