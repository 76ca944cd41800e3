// SPDX-License-Identifier: Apache-2.0
// The parameters of the ragged schedule, the queries of a request, and the blocks that a row tile sees.
#pragma once
#include "split/division.cuh"
#include "split/plan.cuh"
#include "ptx/types.cuh"

namespace cumla::split {

// True in split/ragged_schedule_numbered.cu: places have the numbers of their requests.
#ifdef CUMLA_NUMBERS_REQUESTS
constexpr bool kNumbersRequests = true;
#else
constexpr bool kNumbersRequests = false;
#endif

// The arrays and sizes of one schedule.
struct ScheduleOf {
  TilePlace* places;  // [max_places]
  Part* parts_out;    // [parts]
  Ticket* tickets;    // [num_tickets]
  int max_places;
  int parts;
  int num_tickets;
  int row_tile;  // query rows
  Divisor by_parts, by_row_tile;
};

struct RaggedScheduleParams : ScheduleOf {
  const int* qo_indptr;  // [batch + 1]; nullptr: each request has q_len tokens
  i64 qo_indptr_stride;  // in elements, as all strides here
  const int* kv_lens;    // [batch]; nullptr: kv_indptr gives the lengths
  i64 kv_lens_stride;
  const int* kv_indptr;  // [batch + 1]: first page of each request; nullptr: request r has row r of a block table
  i64 kv_indptr_stride;
  int batch;
  int total_tokens;  // rows of q
  int heads_per_group;
  int page_size;
  int causal;
  int fixed_cost;  // of a tile or of a segment of one, in blocks
  int piece_cost;  // of a partial result, in blocks: it is stored, counted and combined
  int min_blocks;  // no split is closer to an end of its tile
  int min_share;   // least cost of a share
  int q_len;       // of each request, if there is no qo_indptr
  Divisor by_heads_per_group;
  int shares;        // a short tile is not whole if its blocks x `shares` exceed `blocks`
  int window_left;   // visible keys before a query's own position; -1: no window
  int is_small;      // schedule_small() may serve the batch: at most 32 requests and at most `parts`
  ScheduleOf whole;  // whole tiles of a mixed batch; places is nullptr for other batches
  i64 blocks;        // set by the kernel: blocks of all tiles of a mixed batch; -1: no request is long
};

// The query tokens of a request, clamped to q, so that no qo_indptr leads out of it.
struct Queries {
  int begin, count;

  __device__ __forceinline__ Queries(const RaggedScheduleParams& p, int request) {
    if (p.qo_indptr == nullptr) {
      begin = request * p.q_len;
      count = p.q_len;
    } else {
      begin = min(max(p.qo_indptr[request * p.qo_indptr_stride], 0), p.total_tokens);
      // Clamped before the subtraction, which could overflow.
      count = min(max(p.qo_indptr[(request + 1) * p.qo_indptr_stride], begin), p.total_tokens) - begin;
    }
  }
};

__device__ __forceinline__ int tiles_of(const ScheduleOf& p, u32 rows) {  // rows: below 2^31
  const u32 full = quotient(rows, p.by_row_tile);
  return full + (full * p.row_tile < rows);
}
__device__ __forceinline__ int tiles_of(const RaggedScheduleParams& p, const Queries& queries) {
  return tiles_of(p, queries.count * p.heads_per_group);
}

// The first tile of a request.
__device__ __forceinline__ TilePlace first_tile(const RaggedScheduleParams& p, int request, const Queries& queries) {
  i64 tokens = p.kv_lens == nullptr ? kMaxTokens : max(p.kv_lens[request * p.kv_lens_stride], 0), pages = request;
  if (p.kv_indptr != nullptr) {
    pages = p.kv_indptr[request * p.kv_indptr_stride];
    tokens = min(tokens, max(p.kv_indptr[(request + 1) * p.kv_indptr_stride] - pages, i64{0}) * p.page_size);
  }
  return {static_cast<int>(min(tokens, static_cast<i64>(kMaxTokens))), 0, queries.count, queries.begin, pages,
          kNumbersRequests ? request : 0};
}

// Leading blocks that are before the windows of all rows of a tile.
__device__ __forceinline__ int hidden_blocks(const RaggedScheduleParams& p, const TilePlace& tile) {
  if (p.window_left < 0) return 0;
  const int first = tile.tokens - tile.q_len + static_cast<int>(quotient(tile.first_row, p.by_heads_per_group));
  return max(first - min(p.window_left, tile.tokens), 0) / kBlockTokens;
}

// Blocks that at least one row of a tile sees. They follow the hidden blocks.
__device__ __forceinline__ int visible_blocks(const RaggedScheduleParams& p, const TilePlace& tile) {
  const int hidden = hidden_blocks(p, tile);
  if (!p.causal) return blocks_of(tile.tokens) - hidden;
  const int last_row = min(tile.first_row + p.row_tile, tile.q_len * p.heads_per_group) - 1;
  const int tokens = tile.tokens - (tile.q_len - 1 - static_cast<int>(quotient(last_row, p.by_heads_per_group)));
  return blocks_of(max(tokens, 0)) - hidden;
}

// A request of a mixed batch has whole tiles if it has many query rows, or few rows and few blocks.
__device__ __forceinline__ bool is_whole(const RaggedScheduleParams& p, int request, const Queries& queries) {
  return queries.count * p.heads_per_group > kRowTile ||
         i64{blocks_of(first_tile(p, request, queries).tokens)} * p.shares <= p.blocks;
}

// The queries of a request if this CTA's schedule has the request, else none.
__device__ __forceinline__ Queries own_queries(const RaggedScheduleParams& p, int request) {
  Queries queries(p, request);
  if (p.whole.places != nullptr && is_whole(p, request, queries) != (blockIdx.x > 0)) queries.count = 0;
  return queries;
}

}  // namespace cumla::split
