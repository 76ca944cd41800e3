// SPDX-License-Identifier: Apache-2.0
// Equal shares: each part costs the same, and a tile is split where a share ends.
#pragma once
#include "split/ragged_schedule/tiles.cuh"
#include "ptx/types.cuh"

namespace cumla::split {

// The run of this thread's bound, which splits the tile at `place`; -1: it splits none. __match_any_sync finds the
// runs within a warp. Runs that touch its edges continue in the neighbouring warps.
__device__ __forceinline__ Run find_run(int place, Run (&edges)[kScheduleWarps][2],
                                        int (&edge_places)[kScheduleWarps][2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, base = warp * 32;
  const u32 same = __match_any_sync(0xffffffffu, place);
  Run run = {base + __ffs(same) - 1, base + 31 - __clz(same)};
  if (lane % 31 == 0) {
    edges[warp][lane / 31] = run;
    edge_places[warp][lane / 31] = place;
  }
  __syncthreads();
  if (place < 0) return run;
  for (int w = warp; run.first == w * 32 && w > 0 && edge_places[w - 1][1] == place; --w)
    run.first = edges[w - 1][1].first;
  for (int w = warp; run.last == w * 32 + 31 && w < kScheduleWarps - 1 && edge_places[w + 1][0] == place; ++w)
    run.last = edges[w + 1][0].last;
  return run;
}

// The cost of all places before one.
__device__ __forceinline__ i64 cost_before(const RaggedScheduleParams& p, const RaggedShared& shared, int place,
                                           int tiles_of_thread) {
  const int owner = place / tiles_of_thread;
  i64 cost = shared.cost_starts[owner];
#pragma unroll 1
  for (int i = owner * tiles_of_thread; i < place; ++i) cost += blocks_at(p, shared, i) + p.fixed_cost;
  return cost;
}

// The bound of a share. A split less than min_blocks from an end of its tile moves to that end.
__device__ __forceinline__ PartBound bound_at(const RaggedScheduleParams& p, const RaggedShared& shared, i64 at,
                                              i64 total, int tiles, int tiles_of_thread) {
  if (at >= total) return {tiles, 0, 0, 0};
  const int owner = owner_of(shared.cost_starts, at);
  int place = owner * tiles_of_thread, blocks = blocks_at(p, shared, place);
  i64 block = at - shared.cost_starts[owner];
#pragma unroll 1
  while (block >= blocks + p.fixed_cost && place + 1 < tiles) {
    block -= blocks + p.fixed_cost;
    blocks = blocks_at(p, shared, ++place);
  }
  if (block < p.min_blocks) return {place, 0, 0, 0};
  if (blocks - block < p.min_blocks) return {place + 1, 0, 0, 0};
  return {place, static_cast<int>(block), 0, 0};
}

}  // namespace cumla::split
