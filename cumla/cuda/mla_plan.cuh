// SPDX-License-Identifier: Apache-2.0
// What a plan's buffer holds: written by mla_schedule, read by mla_decode and mla_merge.
//
// The KV cache of a request is cut into blocks of 64 tokens. All blocks of all requests, in order, are dealt out to
// `parts` as contiguous ranges; one CTA per part and row tile works through its range. A request that more than one
// part touches is split: each of its parts leaves a normalised float32 partial result and a base-2 log-sum-exp, and
// mla_merge joins them in the order of the parts. A part can hold at most two partials: of the request with which it
// begins (slot 0) and of the one with which it ends (slot 1).
#pragma once
#include "ptx/types.cuh"

namespace cumla {

constexpr int kBlockTokens = 64;
constexpr int kRowTile = 64;  // query rows of one CTA
constexpr int kValueDim = 512;
constexpr int kMaxTokens = 0x7fffffc0;  // of a request: the number of blocks still fits an int

// Where a part begins: the part runs up to the next part's bound.
struct PartBound {
  int request;
  int block;
};

// A request that is cut, and the parts that work on it.
struct SplitRequest {
  int request;
  int first_part;
  int last_part;
  int first_slot;  // of its partial result in first_part; 0 in the others
};

// A bound as the schedule makes them. A plan that was never updated holds anything, and nothing of it may lead out of
// the arrays.
__device__ __forceinline__ PartBound sane_bound(PartBound bound, int batch) {
  return {min(max(bound.request, 0), batch), max(bound.block, 0)};
}

__device__ __forceinline__ int blocks_of(int tokens) {
  return (tokens + kBlockTokens - 1) / kBlockTokens;
}

// Index of a partial result: rows of kValueDim floats (or one float each for the log-sum-exp) follow it.
__device__ __forceinline__ i64 partial_index(int tile, int part, int slot, int parts, int tile_rows) {
  return ((static_cast<i64>(tile) * parts + part) * 2 + slot) * tile_rows;
}

}  // namespace cumla
