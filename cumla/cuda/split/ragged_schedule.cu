// SPDX-License-Identifier: Apache-2.0
// Assigns row tiles and their KV blocks to parts, if query lengths differ (terms: split/plan.cuh). Kernels over a
// RaggedTile follow it.
//
// A request has q_len x heads_per_group query rows of a kv head, in tiles of row_tile. Each tile has a place in the
// schedule, and costs the blocks that its rows see plus fixed_cost. Blocks before the windows of all rows of a tile
// are not assigned. docs/kernels/schedule.md explains the ways:
//   round robin    each part gets every parts-th tile; the tiles of a part have consecutive places
//   equal shares   each part costs the same; a tile is split where a share ends
//   equal splits   each tile is split into equal segments, at most one per part
//
// Roles and time line, one CTA of 32 warps; B is a barrier of the CTA (__syncthreads), and there are no mbarriers:
//   small batch    every warp holds all requests, one per lane; a thread writes its part; B with a vote; done
//   others         count tiles | B | write tiles | B | sort whole tiles | B | sum up costs | B | price round robin |
//                  B | bounds of shares | B | sizes of splits, one per warp | B | find runs | B | write parts
// Barriers guard the arrays of RaggedShared: every thread arrives, once per B.
//
// A mixed batch takes a second CTA, which schedules the whole tiles of attention_prefill: is_whole().
//
// Budget: 1,024 threads, so 64 registers per thread; one RaggedShared of static shared memory, below 48 KiB.
//
// tests/launch/split/ragged_schedule_mirror.py is its oracle in NumPy.
#include "split/plan.cuh"
#include "split/ragged_schedule/pieces.cuh"
#include "split/ragged_schedule/requests.cuh"
#include "split/ragged_schedule/shares.cuh"
#include "split/ragged_schedule/small.cuh"
#include "split/ragged_schedule/tiles.cuh"
#include "split/schedule/parts.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::split {

using namespace ptx;

// Blocks of all tiles of a mixed batch if all were whole; -1 if no request has many query rows.
__device__ __forceinline__ i64 mixed_blocks(const RaggedScheduleParams& p, RaggedShared& shared,
                                            int requests_of_thread) {
  i64 blocks = 0, total;
  bool has_many = false;
  for (int i = 0; i < requests_of_thread; ++i) {
    const int request = threadIdx.x * requests_of_thread + i;
    if (request >= p.batch) break;
    const Queries queries(p, request);
    const u32 rows = queries.count * p.heads_per_group;
    has_many |= rows > kRowTile;
    blocks += i64{tiles_of(p.whole, rows)} * blocks_of(first_tile(p, request, queries).tokens);
  }
  block_exclusive_sum(blocks, shared.warp_sums[1], total);
  return __syncthreads_or(has_many) ? total : -1;
}

__device__ __forceinline__ void ragged_schedule(const RaggedScheduleParams& given) {
  __shared__ RaggedShared shared;
  RaggedScheduleParams p = given;
  const int thread = threadIdx.x;
  const int requests_of_thread = (p.batch + kScheduleThreads - 1) / kScheduleThreads;

  grid_dependency_launch();
  grid_dependency_wait();

  if (given.is_small != 0) {
    const bool done = thread / 32 * 32 < given.parts && schedule_small(given);
    if (__syncthreads_or(done)) return;
  }
  if (p.whole.places != nullptr) p.blocks = mixed_blocks(p, shared, requests_of_thread);
  if (blockIdx.x > 0) {
    static_cast<ScheduleOf&>(p) = p.whole;
    p.window_left = -1;  // whole tiles are sorted as if there were no window
  }

  // Counts the tiles.
  i64 count = 0, all_tiles;
  for (int i = 0; i < requests_of_thread; ++i) {
    const int request = thread * requests_of_thread + i;
    if (request < p.batch) count += tiles_of(p, own_queries(p, request));
  }
  for (int i = thread; i < p.num_tickets; i += kScheduleThreads) p.tickets[i] = {};
  // There are more tiles than places only if qo_indptr decreases.
  const i64 tiles_before = block_exclusive_sum(count, shared.warp_sums[0], all_tiles), places = p.max_places;
  shared.tile_starts[thread] = min(tiles_before, places);
  __syncthreads();

  // Writes them, round robin over the parts; whole tiles are sorted.
  const int tiles = min(all_tiles, places);
  const int tiles_of_thread = (tiles + kScheduleThreads - 1) / kScheduleThreads;
  const int first = min(thread * tiles_of_thread, tiles), last = min(first + tiles_of_thread, tiles);
  write_tiles(p, shared, first, last, tiles, requests_of_thread);
  __syncthreads();
  if (p.row_tile > kRowTile && tiles <= kScheduleThreads) {
    sort_tiles(p, shared, tiles);
    __syncthreads();
  }

  // Sums up the costs of all places.
  i64 total, cost = 0;
  for (int place = first; place < last; ++place) cost += blocks_at(p, shared, place) + p.fixed_cost;
  shared.cost_starts[thread] = block_exclusive_sum(cost, shared.warp_sums[1], total);
  __syncthreads();

  // Bounds of parts: round robin, unless a part costs much more than an equal share; then equal shares, or equal splits
  // if these cost no more.
  const i64 share = max((total + p.parts - 1) / p.parts, static_cast<i64>(p.min_share));
  const int dealt = thread < p.parts ? first_place(p, thread, tiles) : tiles;
  const int next = thread < p.parts ? first_place(p, thread + 1, tiles) : tiles;
  i64 price = 0;
  if (dealt < next) {
    price = (next < tiles ? cost_before(p, shared, next, tiles_of_thread) : total) -
            cost_before(p, shared, dealt, tiles_of_thread);
  }
  PartBound bound = {dealt, 0, 0, 0};
  if (__syncthreads_or(price > share + p.fixed_cost + 2 * p.piece_cost)) {
    const i64 at = thread < p.parts ? thread * share : total;
    bound = bound_at(p, shared, at, total, tiles, tiles_of_thread);
    if (tiles <= p.parts) {
      if (thread <= p.parts) shared.bounds[thread] = bound;
      __syncthreads();
      int cost = 0;
      if (thread < p.parts)
        cost = cost_between(p, shared.cost_starts, total, tiles, shared.bounds[thread], shared.bounds[thread + 1]);
      const int size = piece_size(p, shared, tiles, share, cost);
      if (size > 0) bound = bound_of_piece(p, shared, tiles, size);
    }
  }

  // Finds the parts that share a tile, and writes all parts.
  const bool cuts = thread < p.parts && bound.block > 0;
  if (cuts && p.window_left >= 0) bound.block += hidden_blocks(p, p.places[bound.place]);
  const Run run = find_run(cuts ? bound.place : -1, shared.edges, shared.edge_places);
  if (thread <= p.parts) {
    shared.bounds[thread] = bound;
    shared.runs[thread] = run;
  }
  __syncthreads();
  if (thread < p.parts) p.parts_out[thread] = part_of(shared.bounds, shared.runs, thread);
}

}  // namespace cumla::split
