// SPDX-License-Identifier: Apache-2.0
// Shared memory of attention_decode, and the order of a chunk's tokens in products.
#pragma once
#include "ptx/types.cuh"

namespace cumla::mha {

using namespace ptx;

constexpr int kDecodeWarps = 12, kChunk = 16;  // tokens
constexpr int kQueryWarp = 11;                 // loads query rows, because it has the fewest chunks of the first tile
constexpr int kSharedMost = 232448;

template <int kKeys, int kValues, int kRows, bool kE4m3>
struct DecodeLayout {
  // Bytes per number, and per row
  static constexpr int kUnit = kE4m3 ? 1 : 2, kKeyRow = kKeys * kUnit, kValueRow = kValues * kUnit;
  static constexpr int kKeyBytes = kChunk * kKeyRow, kChunkBytes = kKeyBytes + kChunk * kValueRow;
  static constexpr int kSumsRow = 68 * 4, kSumsWarp = 8 * kSumsRow + 32;  // bytes: 64 columns, and a shift of banks
  static constexpr int kSteps = kRows / 8 * kValues / 64, kStepBytes = kDecodeWarps * kSumsWarp;  // steps of adding up
  static constexpr int kStatisticsBytes = kDecodeWarps * (kRows * 16 + 4 * 8) + 96;  // also barriers, words and scales
  static constexpr bool kHoldsQuery = kRows == 8 && kKeys <= 192;  // in registers
  static constexpr int kQueryWords = kKeys / 8;                    // of a lane, of eight rows
  static constexpr int kSlotBytes = kRows * (kKeys * 2 + 4);
  // The rows of the next tile are loaded ahead if registers allow that.
  static constexpr int kQuerySlots = kHoldsQuery ? 3 : 1;
  static constexpr int kOthers = kStepBytes + kStatisticsBytes + kQuerySlots * kSlotBytes;
  static constexpr int kFitting = (kSharedMost - kOthers) / (kDecodeWarps * kChunkBytes);
  static constexpr int kMaxStages = kHoldsQuery ? 3 : 2;
  static constexpr int kStages = kFitting < kMaxStages ? kFitting : kMaxStages;
  static constexpr int kLeast = kDecodeWarps * kStages * kChunkBytes + kOthers;
  // True if shared memory holds the sums of all steps, and registers suffice to add them up during the next tile.
  static constexpr bool kAllAtOnce = kLeast + (kSteps - 1) * kStepBytes <= kSharedMost && (kRows == 8 || kKeys == 64);
  static constexpr int kAtOnce = kAllAtOnce ? kSteps : 1, kSumTurns = kSteps / kAtOnce;
  static constexpr int kSumsBytes = kAtOnce * kStepBytes;
  static_assert(kStages >= 2, "chunks come ahead");

  u32 base;

  __device__ __forceinline__ u32 chunk(int warp, int stage) const {
    return base + (warp * kStages + stage) * kChunkBytes;
  }
  __device__ __forceinline__ u32 sums() const { return base + kDecodeWarps * kStages * kChunkBytes; }
  __device__ __forceinline__ u32 sums_of(int step, int warp, int row) const {
    return sums() + step % kAtOnce * kStepBytes + warp * kSumsWarp + row * kSumsRow;
  }
  // Per warp and row: maximum, sum of the weights, sum of the rounded weights.
  __device__ __forceinline__ u32 statistics_of(int warp, int row) const {
    return sums() + kSumsBytes + (warp * kRows + row) * 16;
  }
  // Barrier: TMA has loaded a chunk.
  __device__ __forceinline__ u32 full(int warp, int stage) const {
    return statistics_of(kDecodeWarps, 0) + (warp * 4 + stage) * 8;
  }
  __device__ __forceinline__ u32 words() const { return full(kDecodeWarps, 0); }
  __device__ __forceinline__ u32 sums_full() const { return words() + 8; }
  __device__ __forceinline__ u32 sums_free() const { return words() + 16; }
  __device__ __forceinline__ u32 query_copied() const { return words() + 24; }
  __device__ __forceinline__ u32 query_full(u32 slot) const { return words() + 32 + slot * 8; }
  // The scale of the keys or the values of a tile, valid until the end of the next one.
  __device__ __forceinline__ u32 scale(u32 tiles, bool of_values) const {
    return words() + 64 + tiles % 4 * 8 + of_values * 4;
  }
  // Address of the i-th 16 bytes of a query row; lanes of two rows read from all banks. undone(): the inverse of its
  // factor.
  __device__ __forceinline__ u32 query(u32 slot, int row, int i) const {
    return words() + 96 + (slot * kRows + row) * (kKeys * 2) + ((i ^ (kE4m3 ? row & 7 : (row & 1) * 4)) << 4);
  }
  __device__ __forceinline__ u32 undone(u32 slot, int row) const {
    return words() + 96 + kQuerySlots * kRows * kKeys * 2 + (slot * kRows + row) * 4;
  }

  // Offset of the i-th 16 bytes of a token's row. Tiles have 16 rows of 128 bytes, or of 64, with a swizzle of that
  // width.
  template <int kRow>
  __device__ __forceinline__ static u32 place(int token, int i) {
    constexpr int kTile = tile_bytes<kRow>(), kPieces = kTile / 16;
    const int swizzle = kTile == 128 ? token & 7 : token >> 1 & 3;
    return i / kPieces * kChunk * kTile + token * kTile + ((i % kPieces ^ swizzle) << 4);
  }
  template <int kRow>
  __device__ __forceinline__ static constexpr int tile_bytes() { return kRow % 128 == 0 ? 128 : 64; }
};

// Token of row g < 8 of a product; row g + 8 is the token eight later. In this order lanes read keys or values from
// all banks.
__device__ __forceinline__ int token_of_row(int g) { return g ^ (g & 1) * 4; }

}  // namespace cumla::mha
