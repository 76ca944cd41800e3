// SPDX-License-Identifier: Apache-2.0
// The first step of the ragged schedule: the places of the row tiles.
#pragma once
#include "split/ragged_schedule/requests.cuh"
#include "split/schedule/parts.cuh"
#include "ptx/types.cuh"

namespace cumla::split {

struct RaggedShared {
  i64 warp_sums[2][kScheduleWarps];
  int tile_starts[kScheduleThreads];  // tiles of all requests before a thread's first one
  i64 cost_starts[kScheduleThreads];  // cost of all places before a thread's first one
  PartBound bounds[kMaxParts + 1];
  Run runs[kMaxParts + 1];
  Run edges[kScheduleWarps][2];
  int edge_places[kScheduleWarps][2];
  int blocks[kScheduleThreads];         // visible blocks of the tiles at the first places
  int piece_costs[kScheduleWarps];      // of the most expensive segment, for each size that is tried
  int dearest[kScheduleWarps];          // cost of a share, per warp
};

__device__ __forceinline__ int blocks_at(const RaggedScheduleParams& p, const RaggedShared& shared, int place) {
  return place < kScheduleThreads ? shared.blocks[place] : visible_blocks(p, p.places[place]);
}

// The last thread whose start is at most `place`.
template <typename Start>
__device__ __forceinline__ int owner_of(const Start* starts, i64 place) {
  int owner = 0;
#pragma unroll 1
  for (int step = kScheduleThreads / 2; step > 0; step /= 2)
    if (starts[owner + step] <= place) owner += step;
  return owner;
}

// Round robin: the first place of a part. Parts with one more tile than others come first.
__device__ __forceinline__ int first_place(const RaggedScheduleParams& p, int part, int tiles) {
  const int each = quotient(tiles, p.by_parts);
  return part * each + min(part, tiles - each * p.parts);
}

// Writes tiles [tile, end).
__device__ __forceinline__ void write_tiles(const RaggedScheduleParams& p, RaggedShared& shared, int tile, int end,
                                            int tiles, int requests_of_thread) {
  if (tile >= end) return;
  const int owner = owner_of(shared.tile_starts, tile);
  int request = owner * requests_of_thread, skip = tile - shared.tile_starts[owner];
  Queries queries = own_queries(p, request);
  for (int tiles_there; skip >= (tiles_there = tiles_of(p, queries)) && request + 1 < p.batch;) {
    skip -= tiles_there;
    queries = own_queries(p, ++request);
  }
  TilePlace place = first_tile(p, request, queries);
  place.first_row = skip * p.row_tile;
#pragma unroll 1
  while (true) {
    const int turn = quotient(tile, p.by_parts);
    const int at = first_place(p, tile - turn * p.parts, tiles) + turn;
    p.places[at] = place;
    if (at < kScheduleThreads) shared.blocks[at] = visible_blocks(p, place);
    if (++tile >= end) return;
    place.first_row += p.row_tile;
    if (place.first_row < place.q_len * p.heads_per_group) continue;
    do {
      if (++request >= p.batch) return;
      queries = own_queries(p, request);
    } while (queries.count == 0);
    place = first_tile(p, request, queries);
  }
}

// Sorts whole tiles by visible blocks, without windows. attention_prefill takes them from the last place, so the
// largest are last. There is one part, and at most as many tiles as threads. A short tile, which one consumer
// computes, counts half.
__device__ __forceinline__ void sort_tiles(const RaggedScheduleParams& p, RaggedShared& shared, int tiles) {
  const int thread = threadIdx.x;
  TilePlace place;
  int blocks = 0, own = 0, at = 0;
  if (thread < tiles) {
    place = p.places[thread];
    blocks = shared.blocks[thread];
    own = shared.tile_starts[thread] = blocks * (place.q_len * p.heads_per_group - place.first_row > kRowTile ? 2 : 1);
  }
  __syncthreads();
#pragma unroll 4
  for (int i = 0; i < tiles; ++i) at += shared.tile_starts[i] < own + (i < thread);
  if (thread < tiles) {
    p.places[at] = place;
    shared.blocks[at] = blocks;
  }
}

}  // namespace cumla::split
