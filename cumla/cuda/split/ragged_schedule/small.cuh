// SPDX-License-Identifier: Apache-2.0
// A small batch of single tiles, scheduled without a barrier.
#pragma once
#include "split/ragged_schedule/pieces.cuh"
#include "ptx/types.cuh"

namespace cumla::split {

// Schedules a small batch without a barrier: a lane has a request, a thread has a part, and every warp computes the
// same. Returns false, and writes nothing, if a request has several tiles, or if equal splits might cost more than
// shares.
__device__ __forceinline__ bool schedule_small(const RaggedScheduleParams& p) {
  const int lane = threadIdx.x % 32, part = threadIdx.x;
  const Queries queries(p, min(lane, p.batch - 1));
  const TilePlace tile = first_tile(p, min(lane, p.batch - 1), queries);
  const bool exists = lane < p.batch && queries.count > 0;
  if (__any_sync(0xffffffffu, exists && tiles_of(p, queries) > 1)) return false;
  const u32 all = __ballot_sync(0xffffffffu, exists);
  const int tiles = __popc(all), place = __popc(all & ((1u << lane) - 1));
  const int hidden = hidden_blocks(p, tile), blocks = exists ? visible_blocks(p, tile) : 0;
  const int cost = exists ? blocks + p.fixed_cost : 0;
  const int total = __reduce_add_sync(0xffffffffu, cost), dearest = __reduce_max_sync(0xffffffffu, cost);
  const int share = max(static_cast<int>(quotient(total + p.parts - 1, p.by_parts)), p.min_share);
  int pieces = exists ? 1 : 0;
  if (dearest > share + p.fixed_cost + 2 * p.piece_cost) {
    const int least = max(share - p.fixed_cost, p.min_blocks);
    int count = 0, worst = 0;
#pragma unroll 1
    for (u32 rest = all; rest != 0; rest &= rest - 1) {
      const int there = __shfl_sync(0xffffffffu, blocks, __ffs(rest) - 1), own = pieces_of(p, there, least + lane);
      count += own;
      worst = max(worst, small_quotient(there + own - 1, own) + p.fixed_cost + (own > 1 ? p.piece_cost : 0));
    }
    if (count > p.parts) worst = kTooMany;
    const int cheapest = __reduce_min_sync(0xffffffffu, worst);
    if (cheapest > share + p.fixed_cost + p.piece_cost) return false;
    const int size = least + __ffs(__ballot_sync(0xffffffffu, worst == cheapest)) - 1;
    if (exists) pieces = pieces_of(p, blocks, size);
  }
  const int end = warp_inclusive_sum(pieces);
  int owner = -1;
#pragma unroll 1
  for (u32 rest = all; rest != 0; rest &= rest - 1) {
    const int i = __ffs(rest) - 1, end_there = __shfl_sync(0xffffffffu, end, i);
    if (owner < 0 && part < end_there) owner = i;
  }
  const int from = max(owner, 0), count = __shfl_sync(0xffffffffu, pieces, from);
  const int first = __shfl_sync(0xffffffffu, end, from) - count, index = part - first;
  const int there = __shfl_sync(0xffffffffu, blocks, from), before = __shfl_sync(0xffffffffu, hidden, from);
  const int at = __shfl_sync(0xffffffffu, place, from);
  if (part < 32 && exists) p.places[place] = tile;
  for (int i = threadIdx.x; i < p.num_tickets; i += (p.parts + 31) / 32 * 32) p.tickets[i] = {};
  if (part >= p.parts) return true;
  Part found = {tiles, 0, 0, 0, tiles, 0, part, part, 0, part, {}};
  if (owner >= 0) {
    const bool begins = index == 0, ends = index == count - 1;
    found.place = at;
    found.block = begins ? 0 : before + piece_begin(there, count, index);
    found.end_place = ends ? at + 1 : at;
    found.end_block = ends ? 0 : before + piece_begin(there, count, index + 1);
    found.first_part = first;
    found.last_part = first + count - 1;
    found.tail_last_part = ends ? part : first + count - 1;
  }
  p.parts_out[part] = found;
  return true;
}

}  // namespace cumla::split
