// SPDX-License-Identifier: Apache-2.0
// What a plan's buffer holds: written by split/schedule.cu or split/ragged_schedule.cu, read by the
// attention kernels, whatever the widths of their keys and values.
//
// The KV cache of a request is cut into blocks of 64 tokens. The schedule puts the requests into an order, in which
// each has its place, and deals all their blocks out to `parts` as contiguous ranges; one CTA per part and row tile
// works through its range. A request that more than one part touches is split: each of its parts leaves a piece, a
// partial result of 32 or 24 bits a number with, of each row, its base-2 log-sum-exp and the factor that normalises it,
// and the CTAs of these parts join the pieces (split/meeting.cuh, split/join.cuh). A part can hold at most two pieces:
// of the request with which it begins (slot 0) and of the one with which it ends (slot 1). Batch-invariant, a part
// holds one piece, in slot 0, or nothing.
#pragma once
#include "ptx/types.cuh"

namespace cumla::split {

constexpr int kBlockTokens = 64;
constexpr int kRowTile = 64;   // query rows of one CTA
constexpr int kRowGroup = 16;  // of them in one warp: partial results hold whole groups
constexpr int kMaxTokens = 0x7fffffc0;  // of a request: the number of blocks still fits an int

// What one part works on; all that a CTA must know before its first load lies together.
struct alignas(16) Part {
  int place, block;            // where it begins
  int request, tokens;         // that lies there, and its length
  int end_place, end_block;    // where it ends, which is where the next part begins
  int first_part, last_part;   // that hold pieces of the request with which it begins
  int first_slot;              // of the piece in first_part; 0 in the others
  int tail_last_part;          // last part with a piece of the request with which it ends, if it begins in this part
  int unused[2];
};

// What lies at a place.
struct alignas(8) Place {
  int request, tokens;
};

// The same where query lengths differ: a row tile of one request.
struct alignas(16) TilePlace {
  int tokens;          // of the request, cached, its new ones included
  int first_row;       // of the request's q_len x heads_per_group rows of a kv head
  int q_len, q_begin;  // the request's query tokens, and where they begin in q
  i64 pages;           // where its pages begin, in rows of the block table or entries of the list
  i64 unused;
};

// Where the CTAs of one row tile that share a request meet, at the ticket of their first part. The CTA of the first
// part adds 2^31 - (pieces - 1), every other one adds 1: when all are there the lower 31 bits are 0 again and the
// highest has changed. `left`: the CTA of this part does not wait for the joining of its piece in a slot, others do its
// share.
struct Ticket {
  u32 arrived, left[2], unused;
};

// A part as the schedule makes them. A plan that was never updated holds anything, and nothing of it may lead out of
// the arrays.
__device__ __forceinline__ Part sane_part(Part part, int index, int batch, int parts) {
  part.place = min(max(part.place, 0), batch);
  part.end_place = min(max(part.end_place, 0), batch);
  part.request = min(max(part.request, 0), batch - 1);
  part.block = max(part.block, 0);
  part.end_block = max(part.end_block, 0);
  part.first_part = min(max(part.first_part, 0), index);
  part.last_part = min(max(part.last_part, index), parts - 1);
  part.first_slot &= 1;
  part.tail_last_part = min(max(part.tail_last_part, index), parts - 1);
  return part;
}

__device__ __forceinline__ int blocks_of(int tokens) {
  return (tokens + kBlockTokens - 1) / kBlockTokens;
}

}  // namespace cumla::split
