// SPDX-License-Identifier: Apache-2.0
// Equal splits: each tile is split into equal segments, at most one per part.
#pragma once
#include "split/ragged_schedule/tiles.cuh"
#include "ptx/convert.cuh"
#include "ptx/types.cuh"

namespace cumla::split {

using namespace ptx;

// Exact for quotients below 2^20; larger ones stay large.
__device__ __forceinline__ int small_quotient(int dividend, int divisor) {
  const int guess = static_cast<int>(static_cast<float>(dividend) * reciprocal_approx(static_cast<float>(divisor)));
  const int rest = dividend - guess * divisor;
  return guess + (rest >= divisor) - (rest < 0);
}

// Segments of a tile: of at most `size` blocks, if none has fewer than min_blocks.
__device__ __forceinline__ int pieces_of(const RaggedScheduleParams& p, int blocks, int size) {
  return max(min(small_quotient(blocks + size - 1, size), small_quotient(blocks, p.min_blocks)), 1);
}

// The cost of a part between two bounds, if there are no more tiles than parts: fixed_cost per segment, and
// piece_cost per segment of a split tile.
__device__ __forceinline__ int cost_between(const RaggedScheduleParams& p, const i64* cost_starts, i64 total,
                                            int tiles, const PartBound& bound, const PartBound& next) {
  const auto at = [&](const PartBound& b) { return b.block + (b.place < tiles ? cost_starts[b.place] : total); };
  const bool same = next.place == bound.place;
  const int tail = next.block > (same ? bound.block : 0), head = !same && bound.block > 0;
  return at(next) - at(bound) + tail * p.fixed_cost + (tail + head) * p.piece_cost;
}

constexpr int kTooMany = 0x7fffffff;  // cost of a size that needs more segments than parts

// The segment size that needs at most `parts` segments, and whose most expensive segment is cheapest; 0 if the most
// expensive share costs less. Each warp tries one of 32 sizes, from the least one on. of_share: the cost of this
// thread's share.
__device__ __forceinline__ int piece_size(const RaggedScheduleParams& p, RaggedShared& shared, int tiles, int share,
                                          int of_share) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int least = max(share - p.fixed_cost, p.min_blocks), size = least + warp;
  int count = 0, cost = 0;
  for (int i = lane; i < tiles; i += 32) {
    const int pieces = pieces_of(p, shared.blocks[i], size);
    count += pieces;
    const int largest = small_quotient(shared.blocks[i] + pieces - 1, pieces);
    cost = max(cost, largest + p.fixed_cost + (pieces > 1 ? p.piece_cost : 0));
  }
  count = __reduce_add_sync(0xffffffffu, count);
  cost = __reduce_max_sync(0xffffffffu, cost);
  of_share = __reduce_max_sync(0xffffffffu, of_share);
  if (lane == 0) {
    shared.piece_costs[warp] = count <= p.parts ? cost : kTooMany;
    shared.dearest[warp] = of_share;
  }
  __syncthreads();
  const int tried = shared.piece_costs[lane];
  const int cheapest = __reduce_min_sync(0xffffffffu, tried);
  const int dearest = __reduce_max_sync(0xffffffffu, shared.dearest[lane]);
  return cheapest > dearest ? 0 : least + __ffs(__ballot_sync(0xffffffffu, tried == cheapest)) - 1;
}

// The bound of this thread's part if tiles are split into segments of `size` blocks.
__device__ __forceinline__ PartBound bound_of_piece(const RaggedScheduleParams& p, RaggedShared& shared, int tiles,
                                                    int size) {
  const int thread = threadIdx.x, own = thread < tiles ? pieces_of(p, shared.blocks[thread], size) : 0;
  i64 count;
  shared.tile_starts[thread] = block_exclusive_sum(static_cast<i64>(own), shared.warp_sums[0], count);
  __syncthreads();
  if (thread >= count) return {tiles, 0, 0, 0};
  const int tile = owner_of(shared.tile_starts, thread), piece = thread - shared.tile_starts[tile];
  const int pieces = shared.tile_starts[tile + 1] - shared.tile_starts[tile], blocks = shared.blocks[tile];
  const int each = small_quotient(blocks, pieces);
  return {tile, piece * each + min(piece, blocks - each * pieces), 0, 0};
}

// First block of segment `index`, if `blocks` are split into `pieces` equal segments.
__device__ __forceinline__ int piece_begin(int blocks, int pieces, int index) {
  const int each = small_quotient(blocks, pieces);
  return index * each + min(index, blocks - each * pieces);
}

}  // namespace cumla::split
