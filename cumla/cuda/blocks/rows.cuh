// SPDX-License-Identifier: Apache-2.0
// The keys that a query token of block-sparse attention sees.
#pragma once
#include "split/plan.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

struct alignas(16) BlockRow {
  int request;  // -1: none
  int tokens;   // cached tokens of the request, those of its queries included
  int behind;   // of these, the last ones that the query token does not see
  int unused;

  // The tokens that it sees, of at most `most` that the pages of a request hold. Any bits give a number up to that.
  __device__ __forceinline__ int seen(int most) const {
    return request < 0 ? 0 : max(min(max(tokens, 0), most) - max(behind, 0), 0);
  }
};

}  // namespace cumla::blocks
