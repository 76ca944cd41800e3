// SPDX-License-Identifier: Apache-2.0
// Shared by mqa_logits and paged_mqa_logits: shapes, parameters, shared memory, and the walk over segments.
//
// Items and blocks are defined in docs/kernels/indexer.md. A segment is what a CTA has of one item.
#pragma once
#include "ptx/types.cuh"

namespace cumla::indexer {

constexpr int kBlockTokens = 64;  // the M side of a product
constexpr int kLogitsThreads = 3 * kWarpgroup;
constexpr int kMaxTokens = 0x7fffffc0;  // the end of the last block fits an int

// One instantiation. A column is a query row with one of its heads; a tile is the columns of one product. Four lanes
// have two of every eight columns of the accumulators each. Up to four query rows are interleaved in these eight
// columns, so that fewer lanes have to add up their sums of a row.
// kMxfp4_: keys are e2m1 numbers with a power of two per 32 columns.
template <int kHeads_, int kDim_, int kTile_, int kTiles_, int kStages_, bool kMxfp4_ = false>
struct LogitsShape {
  static constexpr bool kMxfp4 = kMxfp4_;
  static constexpr int kHeads = kHeads_;    // columns of a query row; heads that do not exist have weight 0
  static constexpr int kDim = kDim_;        // bytes of a row of q and k
  static constexpr int kTile = kTile_;      // the N side of a product
  static constexpr int kTiles = kTiles_;    // of an item
  static constexpr int kStages = kStages_;  // of the ring, one block each
  static constexpr int kColumns = kTiles * kTile;              // of an item
  static constexpr int kTileRows = kTile / kHeads;             // query rows of a tile
  static constexpr int kRows = kTiles * kTileRows;             // of an item
  static constexpr int kSide = kTileRows < 4 ? kTileRows : 4;  // query rows side by side in eight columns
  static constexpr int kSets = kTileRows / kSide;              // groups of such rows in a tile
  static constexpr int kHeadsSide = 8 / kSide;                 // heads of a query row in eight columns
  static constexpr int kSetColumns = kSide * kHeads;
  // With one tile each consumer takes every second block; otherwise its own tiles, with all blocks.
  static constexpr bool kTakesTurns = kTiles == 1;
  // An odd ring would let a round of the other consumer pass for one of its own (docs/kernels/indexer.md).
  static_assert(kStages % 2 == 0, "consumers that take every second block always meet the same slots");

  __device__ __forceinline__ static int row_of(int column) {
    return column / kSetColumns * kSide + column % 8 / kHeadsSide;
  }
  __device__ __forceinline__ static int head_of(int column) {
    return column % kSetColumns / 8 * kHeadsSide + column % kHeadsSide;
  }
};

// All strides are in bytes.
struct LogitsParams {
  const char* weights;  // float
  i64 weights_stride_row, weights_stride_head;
  char* out;
  i64 out_stride;
  i64 rows, width;  // of out
  i64 q_stride_head;
  int num_heads;
  int out_is_bf16;  // else float32
  int clean;        // write -inf to invisible columns
  int unused;
};

// Visible tokens [begin, end) of a query row; `shift` is subtracted from a token to get its column.
struct Span {
  int begin, end, shift;
};

struct Place {
  int item, block;
};

struct Segment {
  int item, first, blocks;
};

// Number of blocks with tokens before `end`, which is 1 to 2^31 - 1.
__device__ __forceinline__ int blocks_before(int end) { return (end - 1) / kBlockTokens + 1; }

// Walks over a CTA's segments, which are between two places. Work knows the items. Hazard: lengths may change while a
// kernel runs. So only one warp walks, lane 0's values count, and all others learn the segments from that warp.
template <typename Work>
struct SegmentCursor {
  const Work& work;
  Place at, end;

  // False at the end. Empty segments are skipped.
  __device__ __forceinline__ bool next(Segment& segment) {
#pragma unroll 1
    for (; at.item < end.item || (at.item == end.item && end.block > 0); at = {at.item + 1, 0}) {
      int first, blocks;
      work.blocks_of(at.item, first, blocks);
      first = __shfl_sync(0xffffffffu, first, 0);
      blocks = __shfl_sync(0xffffffffu, blocks, 0);
      if (at.item == end.item) blocks = min(blocks, end.block);
      if (at.block < blocks) {
        segment = {at.item, first + at.block, blocks - at.block};
        at = {at.item + 1, 0};
        return true;
      }
    }
    return false;
  }
};

template <typename Shape>
struct LogitsLayout {
  static constexpr int kBlockBytes = kBlockTokens * (Shape::kMxfp4 ? Shape::kDim / 2 : Shape::kDim);
  static constexpr int kScaleBytes = kBlockTokens * 4;
  static constexpr int kTileBytes = Shape::kTile * Shape::kDim;
  static constexpr int kQueryBytes = Shape::kColumns * Shape::kDim;
  static constexpr int kWeightBytes = Shape::kColumns * 4;
  static constexpr int kTargetBytes = Shape::kRows * 16;
  static constexpr int kScratchBytes = 128;
  // Announcements of segments. When n is written, at most kStages blocks before it are not yet freed, and each
  // segment has a block. So segment n - kStages - 1 is done, and its announcement has been read.
  static constexpr int kAnnouncements = Shape::kStages + 1;
  // kMxfp4: two blocks of each consumer as e4m3, whose rows are swizzled, and their float32 scales.
  static constexpr int kWidenedBytes = Shape::kMxfp4 ? kBlockTokens * Shape::kDim : 0;
  static constexpr int kWidenedScaleBytes = Shape::kMxfp4 ? kScaleBytes : 0;
  static constexpr int kRingOffset = 4 * kWidenedBytes;
  static constexpr int kScratchOffset =
      kRingOffset + Shape::kStages * (kBlockBytes + kScaleBytes) +
      2 * (kQueryBytes + kWeightBytes + kTargetBytes + 16) + 4 * kWidenedScaleBytes;
  static constexpr int kBytes =
      kScratchOffset + kScratchBytes + kAnnouncements * (16 + 8) + (2 * Shape::kStages + 4) * 8;

  u32 ring, query, scales, weights, targets, segments, announcements, barriers;

  __device__ __forceinline__ explicit LogitsLayout(u32 base)
      : ring(base + kRingOffset),
        query(ring + Shape::kStages * kBlockBytes),
        scales(query + 2 * kQueryBytes),
        weights(scales + Shape::kStages * kScaleBytes),
        targets(weights + 2 * kWeightBytes),
        segments(targets + 2 * kTargetBytes),
        announcements(base + kScratchOffset + kScratchBytes),
        barriers(announcements + kAnnouncements * 16) {}

  __device__ __forceinline__ u32 block(u32 slot) const { return ring + slot * kBlockBytes; }
  // kMxfp4: one of two blocks that a consumer has widened, and its scales.
  __device__ __forceinline__ u32 widened(int consumer, int which) const {
    return ring - kRingOffset + (2 * consumer + which) * kWidenedBytes;
  }
  __device__ __forceinline__ u32 widened_scales(int consumer, int which) const {
    return segments + 2 * 16 + (2 * consumer + which) * kWidenedScaleBytes;
  }
  __device__ __forceinline__ u32 scales_of(u32 slot) const { return scales + slot * kScaleBytes; }
  // Buffers for two segments. A target is 16 bytes of a query row: the address of its token 0 in out (u64), and the
  // tokens that it sees (begin, end).
  __device__ __forceinline__ u32 query_of(u32 buffer) const { return query + buffer * kQueryBytes; }
  __device__ __forceinline__ u32 weights_of(u32 buffer) const { return weights + buffer * kWeightBytes; }
  __device__ __forceinline__ u32 targets_of(u32 buffer) const { return targets + buffer * kTargetBytes; }
  __device__ __forceinline__ u32 segment_of(u32 buffer) const { return segments + buffer * 16; }
  __device__ __forceinline__ u32 announcement(u32 place) const { return announcements + place * 16; }
  // Barriers (table: indexer/mqa_logits.cu).
  __device__ __forceinline__ u32 full(u32 slot) const { return barriers + slot * 8; }
  __device__ __forceinline__ u32 free(u32 slot) const { return full(Shape::kStages + slot); }
  __device__ __forceinline__ u32 query_full(u32 buffer) const { return free(Shape::kStages + buffer); }
  __device__ __forceinline__ u32 query_free(u32 buffer) const { return query_full(2 + buffer); }
  __device__ __forceinline__ u32 announced(u32 place) const { return query_free(2 + place); }
};

}  // namespace cumla::indexer
