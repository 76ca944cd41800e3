// SPDX-License-Identifier: Apache-2.0
// Layout of a plan's buffer. split/schedule.cu or split/ragged_schedule.cu writes it; the attention kernels read it.
//
// The KV cache of a request has blocks of 64 tokens. The schedule orders the requests; the index in that order is a
// `place`. It assigns all blocks to `parts` contiguous ranges, one per CTA of each row tile.
//
// A request whose blocks are in several parts is split. Each of its parts stores a partial result ("piece" in names):
// 32 or 24 bits per number, and per row the base-2 log-sum-exp and the factor that normalises it. The CTAs of these
// parts combine them ("join" in names; split/meeting.cuh, split/join.cuh).
//
// A part has two slots for partial results: slot 0 for the request with which it begins, slot 1 for the one with
// which it ends. A batch-invariant part has at most one partial result, in slot 0.
#pragma once
#include "ptx/types.cuh"

namespace cumla::split {

constexpr int kBlockTokens = 64;
constexpr int kRowTile = 64;   // query rows of one CTA
constexpr int kRowGroup = 16;  // query rows of one warp; partial results are stored by whole groups
constexpr int kMaxTokens = 0x7fffffc0;  // of a request; the number of blocks fits an int

// The record of one part. It holds all that a CTA must know before its first load.
struct alignas(16) Part {
  int place, block;            // first block
  int request, tokens;         // request at `place`, and its length
  int end_place, end_block;    // end of the range, which is where the next part begins
  int first_part, last_part;   // parts with partial results of the request at `place`
  int first_slot;              // slot of the partial result in first_part; the other parts use slot 0
  int tail_last_part;          // last part of the request at the end, if that request begins in this part
  int unused[2];               // the first one: piece_blocks_of() in mla/mla_decode_invariant/pieces.cuh
};

// The request at a place of the schedule.
struct alignas(8) Place {
  int request, tokens;
};

// A place of ragged_schedule: one row tile of a request.
struct alignas(16) TilePlace {
  int tokens;          // cached tokens of the request, including its new ones
  int first_row;       // within the q_len x heads_per_group query rows of a kv head
  int q_len, q_begin;  // query tokens of the request, and its first row in q
  i64 pages;           // first page, as a row of the block table or an entry of the page list
  i64 unused;
};

// Counter at which the CTAs of a split request meet, for one row tile. It is that of the first part. The CTA of the
// first part adds 2^31 - (n - 1), each of the n - 1 others adds 1. When all have arrived, the lower 31 bits are 0
// again and bit 31 has changed, so nothing needs a reset. `left[slot]` is set if this part's CTA does not wait;
// another CTA then combines its share.
struct Ticket {
  u32 arrived, left[2], unused;
};

// Clamps a part. A plan that was never updated holds arbitrary bits, which must not lead out of the arrays.
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
