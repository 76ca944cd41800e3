// SPDX-License-Identifier: Apache-2.0
// Makes parts from their bounds, for both attention schedules.
#pragma once
#include "split/plan.cuh"
#include "split/scan.cuh"

namespace cumla::split {

constexpr int kMaxParts = kScheduleThreads - 1;  // a thread per part, and one for the end

struct PartBound {
  int place, block, request, tokens;
};

// Bounds first ... last, which split the same request.
struct Run {
  int first, last;
};

// Makes the part between two bounds. A split request begins in the part before its first bound, and ends in the part
// after its last one.
__device__ __forceinline__ Part part_of(const PartBound* bounds, const Run* runs, int index) {
  const PartBound bound = bounds[index], next = bounds[index + 1];
  Part part = {bound.place, bound.block, bound.request, bound.tokens, next.place, next.block, index, index, 0,
               index,       {}};
  if (bound.block > 0) {
    const Run run = runs[index];
    part.first_part = run.first - 1;
    part.last_part = run.last;
    part.first_slot = bounds[run.first - 1].place == bound.place ? 0 : 1;
  }
  if (next.block > 0) {
    part.tail_last_part = runs[index + 1].last;
    if (next.place == bound.place) part.last_part = part.tail_last_part;
  }
  return part;
}

}  // namespace cumla::split
