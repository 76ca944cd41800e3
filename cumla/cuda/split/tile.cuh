// SPDX-License-Identifier: Apache-2.0
// The query rows of a CTA, and the blocks of each request that it reads. All attention kernels with a plan use it.
//
// Members that Params, the parameter struct of the kernel, must have:
//   places, parts_in, batch, parts, max_tokens           the plan, and the longest length it was made for
//   q_len, heads_per_group, by_heads_per_group, causal   the query rows of a kv head
#pragma once
#include "split/division.cuh"
#include "split/plan.cuh"
#include "ptx/copy.cuh"
#include "ptx/types.cuh"

namespace cumla::split {

// Compile-time traits of a tile type. A tile overrides those that differ.
struct TileTraits {
  static constexpr bool kIsRagged = false;
  static constexpr bool kIsList = false;        // each query token has its own place
  static constexpr bool kHasSinks = false;      // scores without a value (split/output.cuh)
  static constexpr bool kHasAbsent = false;     // MLA: any row of a block may be absent, and is then zeros
  static constexpr bool kHasMaxLogits = false;  // the largest score of each row is an output
  static constexpr bool kHasRope = true;        // MLA: rows have RoPE columns, which are not values
  static constexpr int kLatentTiles = 8;        // MLA: 64 columns of values each
  static constexpr bool kRopeVaries = false;    // MLA: the number of RoPE columns is a parameter
  static constexpr bool kWideProducts = true;   // MLA: products of 256 columns, not of 128
  // MLA with shared blocks: consumer 0 multiplies the other consumer's block before it scores its own.
  static constexpr bool kOtherFirst = false;
  // MLA of rows of 512 columns with shared blocks: half blocks in a ring (RingLayout).
  static constexpr bool kRing = false;
  __device__ __forceinline__ static u32 kv_head() { return blockIdx.z; }
  // MLA: L2 policy of query rows and results.
  template <typename Params>
  __device__ __forceinline__ static ptx::AnyPolicy policy(const Params&) { return {}; }
};

// Row tile if all requests have q_len queries: grid = (row tiles of a kv head, parts, kv heads).
struct Tile : TileTraits {
  using Held = const Tile&;  // how code that walks over segments holds the tile
  int index, first_row, rows;   // index over all kv heads; rows: those of this tile that exist
  int least_shift, most_shift;  // causal: rows see between tokens - most_shift and tokens - least_shift keys

  template <typename Params>
  __device__ __forceinline__ explicit Tile(const Params& p) {
    index = blockIdx.z * gridDim.x + blockIdx.x;
    first_row = blockIdx.x * kRowTile;
    rows = min(kRowTile, p.q_len * p.heads_per_group - first_row);
    most_shift = shift_of(p, 0);
    least_shift = shift_of(p, rows - 1);
  }
  // The branch for one query stays: without it, ptxas spills registers of some kernels.
  template <typename Params>
  __device__ __forceinline__ int token_of(const Params& p, int row) const {
    return p.q_len == 1 ? 0 : quotient(first_row + row, p.by_heads_per_group);
  }
  template <typename Params>
  __device__ __forceinline__ int shift_of(const Params& p, int row) const {
    if (!p.causal) return 0;
    return p.q_len - 1 - min(token_of(p, row), p.q_len - 1);
  }
};

// Row tile if query lengths differ: each place of the schedule is one, grid = (1, parts, kv heads). A tile type with
// another grid overrides kv_head().
struct RaggedTile : TileTraits {
  static constexpr bool kIsRagged = true;
  using Held = RaggedTile;
  int index, first_row, rows;
  int least_shift, most_shift;
  int q_len, q_begin;
  i64 pages;

  template <typename Params>
  __device__ __forceinline__ explicit RaggedTile(const Params&) { index = blockIdx.z; }
  // The query token of a row, counted within its request.
  template <typename Params>
  __device__ __forceinline__ int token_of(const Params& p, int row) const {
    return quotient(first_row + row, p.by_heads_per_group);
  }
  template <typename Params>
  __device__ __forceinline__ int shift_of(const Params& p, int row) const {
    if (!p.causal) return 0;
    return q_len - 1 - min(token_of(p, row), q_len - 1);
  }
  // Clamps the place: one that was never written must not lead out of the arrays.
  template <typename Params>
  __device__ __forceinline__ void move_to(const Params& p, const TilePlace& place) {
    q_begin = min(max(place.q_begin, 0), p.q_len - 1);
    q_len = min(max(place.q_len, 1), p.q_len - q_begin);
    first_row = min(max(place.first_row, 0), q_len * p.heads_per_group - 1);
    rows = min(kRowTile, q_len * p.heads_per_group - first_row);
    most_shift = shift_of(p, 0);
    least_shift = shift_of(p, rows - 1);
    pages = place.pages;
  }
};

// The token and head of a tile's row, as indices of q.
struct Row {
  int token, head;

  template <typename Params, typename AnyTile>
  __device__ __forceinline__ Row(const Params& p, const AnyTile& tile, int row) {
    const int own = tile.token_of(p, row);
    token = own;
    if constexpr (AnyTile::kIsRagged) token += tile.q_begin;
    head = AnyTile::kv_head() * p.heads_per_group + tile.first_row + row - own * p.heads_per_group;
  }
};

// The blocks of one request that this CTA computes. The request is split if other parts have more of its blocks.
struct Segment {
  int request, begin, blocks, tokens;
  int slot, first_part, last_part, first_slot;  // of the partial results

  __device__ __forceinline__ bool split() const { return last_part > first_part; }
};

// The segment at a place of a part. The request has `tokens_there` tokens, of which some row sees all but
// least_shift.
template <typename Params>
__device__ __forceinline__ Segment segment_at(const Params& p, const Part& part, int place, int tokens_there,
                                              int least_shift) {
  const bool head = place == part.place, tail = place == part.end_place;
  const int scheduled = min(max(tokens_there, 0), kMaxTokens);
  const int tokens = min(static_cast<i64>(scheduled), p.max_tokens);
  Segment segment;
  segment.request = 0;
  segment.tokens = tokens;
  segment.begin = head ? part.block : 0;
  segment.slot = head ? 0 : 1;
  segment.first_part = head ? part.first_part : blockIdx.y;
  segment.last_part = head ? part.last_part : tail ? part.tail_last_part : blockIdx.y;
  segment.first_slot = head ? part.first_slot : 1;
  const int scheduled_end = tail ? part.end_block : blocks_of(scheduled);
  const int end = min(scheduled_end, blocks_of(max(tokens - least_shift, 0)));
  segment.blocks = max(end - segment.begin, 0);
  return segment;
}

template <typename Params>
__device__ __forceinline__ Segment segment_of(const Params& p, const Tile& tile, const Part& part, int place) {
  Place at = {part.request, part.tokens};
  if (place != part.place) at = p.places[place];
  Segment segment = segment_at(p, part, place, at.tokens, tile.least_shift);
  segment.request = min(max(at.request, 0), p.batch - 1);
  return segment;
}
template <typename Params>
__device__ __forceinline__ Segment segment_of(const Params& p, RaggedTile& tile, const Part& part, int place) {
  const TilePlace at = reinterpret_cast<const TilePlace*>(p.places)[place];
  tile.move_to(p, at);
  return segment_at(p, part, place, at.tokens, tile.least_shift);
}

template <typename Params>
__device__ __forceinline__ Part part_of_cta(const Params& p, u32 index) {
  return sane_part(p.parts_in[index], index, p.batch, p.parts);
}
template <typename Params>
__device__ __forceinline__ int last_place_of(const Params& p, const Part& part) {
  return part.end_block > 0 ? min(part.end_place, p.batch - 1) : part.end_place - 1;
}

}  // namespace cumla::split
