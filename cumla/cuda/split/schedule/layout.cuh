// SPDX-License-Identifier: Apache-2.0
// Parameters of schedule, and the lengths of requests.
#pragma once
#include "split/division.cuh"
#include "split/plan.cuh"
#include "split/schedule/parts.cuh"
#include "ptx/types.cuh"

namespace cumla::split {

struct ScheduleParams {
  const int* cache_seqlens;
  i64 cache_seqlens_stride;  // elements
  Place* places;             // [batch]: the order, and the clamped lengths that the schedule is made for
  Part* parts_out;           // [parts]
  Ticket* tickets;           // [num_tickets]
  int batch;
  int parts;
  int num_tickets;
  int fixed_cost;  // of a request or a segment, in blocks
  int cut_cost;    // blocks that splitting costs: a second prologue, combining; also the imbalance accepted instead
  int piece_cost;  // of a partial result, in blocks: it is stored, counted and combined
  int min_blocks;  // packed, shares: no split is closer to an end of its request
  int min_share;   // least cost of a share, or least blocks of a segment
  int min_saving;  // a request is split only if its longest segment gets at least this much shorter, in blocks
  int max_tokens;  // longest request: its cost fits an int; batch-invariant: the parts suffice for it
  int piece_blocks;  // batch-invariant: requests are split at multiples of it
  Divisor by_parts;
};

struct InvariantScheduleParams : ScheduleParams {
  int most_pieces;  // of a request that may have one part; 0: each piece has its own part
  int at_once;      // parts whose CTAs run at the same time
};

__device__ __forceinline__ int clamp_length(const ScheduleParams& p, int tokens) {
  return min(max(tokens, 0), p.max_tokens);
}

__device__ __forceinline__ int length_of(const ScheduleParams& p, int request) {
  return clamp_length(p, p.cache_seqlens[request * p.cache_seqlens_stride]);
}

}  // namespace cumla::split
