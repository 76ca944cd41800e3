// SPDX-License-Identifier: Apache-2.0
// Parameters of schedule, and how long a request is.
#pragma once
#include "split/division.cuh"
#include "split/plan.cuh"
#include "split/schedule/parts.cuh"
#include "ptx/types.cuh"

namespace cumla::split {

struct ScheduleParams {
  const int* cache_seqlens;
  i64 cache_seqlens_stride;  // elements
  Place* places;             // [batch]: the order, and the lengths this schedule was made for, none negative
  Part* parts_out;           // [parts]
  Ticket* tickets;           // [num_tickets]
  int batch;
  int parts;
  int num_tickets;
  int fixed_cost;  // of a request or a piece of one, in blocks
  int cut_cost;    // of cutting, in blocks: a second prologue, and pieces to join; what uneven parts may cost instead
  int piece_cost;  // of a piece, in blocks: to be stored, counted and joined
  int min_blocks;  // no cut of packed parts or of shares is closer to an end of its request
  int min_share;   // cost of a share, or blocks of a piece, at least
  int min_saving;  // in blocks: a request that has parts of its own is cut where that makes it so much shorter
  int max_tokens;  // of a request: the summed cost fits an int; batch-invariant, what there are parts for
  int piece_blocks;  // batch-invariant: requests are cut at multiples of it
  Divisor by_parts;
};

__device__ __forceinline__ int clamp_length(const ScheduleParams& p, int tokens) {
  return min(max(tokens, 0), p.max_tokens);
}

__device__ __forceinline__ int length_of(const ScheduleParams& p, int request) {
  return clamp_length(p, p.cache_seqlens[request * p.cache_seqlens_stride]);
}

}  // namespace cumla::split
