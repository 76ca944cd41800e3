// SPDX-License-Identifier: Apache-2.0
// What mqa_logits and paged_mqa_logits share: the words of their walk, parameters, shared memory.
//
// Items and blocks are those of docs/kernels/indexer.md; what a CTA has of one item is a segment.
#pragma once
#include "ptx/types.cuh"

namespace cumla::indexer {

constexpr int kBlockTokens = 64;  // the M side of a product
constexpr int kLogitsThreads = 3 * kWarpgroup;
constexpr int kMaxTokens = 0x7fffffc0;  // the end of the last block still fits an int

// One instantiation. A column is a query row with one of its heads; a tile is the columns of one product. In a
// product's accumulators four lanes have two each of every eight columns: these are dealt to as many query rows, up to
// four, as there are, so that fewer lanes, or none, have to add up what they have of a row.
template <int kHeads_, int kDim_, int kTile_, int kTiles_, int kStages_>
struct LogitsShape {
  static constexpr int kHeads = kHeads_;    // columns of a query row; heads that do not exist have weight 0
  static constexpr int kDim = kDim_;        // bytes of a row of q and k
  static constexpr int kTile = kTile_;      // the N side of a product
  static constexpr int kTiles = kTiles_;    // of an item
  static constexpr int kStages = kStages_;  // of the ring, a block each
  static constexpr int kColumns = kTiles * kTile;              // of an item
  static constexpr int kTileRows = kTile / kHeads;             // query rows
  static constexpr int kRows = kTiles * kTileRows;             // of an item
  static constexpr int kSide = kTileRows < 4 ? kTileRows : 4;  // query rows side by side in eight columns
  static constexpr int kSets = kTileRows / kSide;              // of such rows in a tile, one after the other
  static constexpr int kHeadsSide = 8 / kSide;                 // heads of a query row in eight columns
  static constexpr int kSetColumns = kSide * kHeads;
  // Each consumer every second block; else tiles of its own, all blocks.
  static constexpr bool kTakesTurns = kTiles == 1;
  // Else a round of the other consumer could pass for one of its own (docs/kernels/indexer.md).
  static_assert(kStages % 2 == 0, "consumers that take every second block always meet the same slots");

  __device__ __forceinline__ static int row_of(int column) {
    return column / kSetColumns * kSide + column % 8 / kHeadsSide;
  }
  __device__ __forceinline__ static int head_of(int column) {
    return column % kSetColumns / 8 * kHeadsSide + column % kHeadsSide;
  }
};

// Strides are bytes everywhere.
struct LogitsParams {
  const char* weights;  // float
  i64 weights_stride_row, weights_stride_head;
  char* out;
  i64 out_stride;
  i64 rows, width;  // of out
  i64 q_stride_head;
  int num_heads;
  int out_is_bf16;  // else float
  int clean;        // write -inf to what is not visible
  int unused;
};

// Tokens [begin, end) that a query row sees; `shift` of them have no column.
struct Span {
  int begin, end, shift;
};

struct Place {
  int item, block;
};

struct Segment {
  int item, first, blocks;
};

// Blocks that tokens before `end` are in; end is positive, 2^31 - 1 at most.
__device__ __forceinline__ int blocks_before(int end) { return (end - 1) / kBlockTokens + 1; }

// Walks over the segments of a CTA, which has what is between two places. Work knows the items. Lengths may change
// while a kernel runs: one warp walks, lane 0's reading counts, and all others learn from that warp what the segments
// are.
template <typename Work>
struct SegmentCursor {
  const Work& work;
  Place at, end;

  // False at the end; empty segments are left out.
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
  static constexpr int kBlockBytes = kBlockTokens * Shape::kDim;
  static constexpr int kScaleBytes = kBlockTokens * 4;
  static constexpr int kTileBytes = Shape::kTile * Shape::kDim;
  static constexpr int kQueryBytes = Shape::kColumns * Shape::kDim;
  static constexpr int kWeightBytes = Shape::kColumns * 4;
  static constexpr int kTargetBytes = Shape::kRows * 16;
  static constexpr int kScratchBytes = 128;
  static constexpr int kScratchOffset = Shape::kStages * (kBlockBytes + kScaleBytes) +
                                        2 * (kQueryBytes + kWeightBytes + kTargetBytes + 16);
  // Announcements of segments. When one is written the ring has room for all but kStages of the blocks before it, and
  // each segment has a block: the segment announced kStages + 1 earlier is done, and its announcement has been read.
  static constexpr int kAnnouncements = Shape::kStages + 1;
  static constexpr int kBytes =
      kScratchOffset + kScratchBytes + kAnnouncements * (16 + 8) + (2 * Shape::kStages + 4) * 8;

  u32 ring, query, scales, weights, targets, segments, announcements, barriers;

  __device__ __forceinline__ explicit LogitsLayout(u32 base)
      : ring(base),
        query(ring + Shape::kStages * kBlockBytes),
        scales(query + 2 * kQueryBytes),
        weights(scales + Shape::kStages * kScaleBytes),
        targets(weights + 2 * kWeightBytes),
        segments(targets + 2 * kTargetBytes),
        announcements(base + kScratchOffset + kScratchBytes),
        barriers(announcements + kAnnouncements * 16) {}

  __device__ __forceinline__ u32 block(u32 slot) const { return ring + slot * kBlockBytes; }
  __device__ __forceinline__ u32 scales_of(u32 slot) const { return scales + slot * kScaleBytes; }
  // Of the two segments that are in shared memory; a target is 16 bytes of a query row: where its token 0 would go
  // (u64), and which tokens it sees (begin, end).
  __device__ __forceinline__ u32 query_of(u32 buffer) const { return query + buffer * kQueryBytes; }
  __device__ __forceinline__ u32 weights_of(u32 buffer) const { return weights + buffer * kWeightBytes; }
  __device__ __forceinline__ u32 targets_of(u32 buffer) const { return targets + buffer * kTargetBytes; }
  __device__ __forceinline__ u32 segment_of(u32 buffer) const { return segments + buffer * 16; }
  __device__ __forceinline__ u32 announcement(u32 place) const { return announcements + place * 16; }
  // Barriers: a block is loaded; its slot is free again; a segment's query is there; is no longer needed; a segment is
  // announced.
  __device__ __forceinline__ u32 full(u32 slot) const { return barriers + slot * 8; }
  __device__ __forceinline__ u32 free(u32 slot) const { return full(Shape::kStages + slot); }
  __device__ __forceinline__ u32 query_full(u32 buffer) const { return free(Shape::kStages + buffer); }
  __device__ __forceinline__ u32 query_free(u32 buffer) const { return query_full(2 + buffer); }
  __device__ __forceinline__ u32 announced(u32 place) const { return query_free(2 + place); }
};

}  // namespace cumla::indexer
