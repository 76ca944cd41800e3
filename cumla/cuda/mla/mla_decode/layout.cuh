// SPDX-License-Identifier: Apache-2.0
// What the decode kernels share: constants, parameters, and which blocks of which request a CTA has.
#pragma once
#include "split/division.cuh"
#include "split/plan.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla {

constexpr int kHeadDim = 576;
constexpr int kTileBytes = 64 * 128;  // 64 rows x 64 columns of 16 bits, 128-byte swizzle
constexpr int kTiles = kHeadDim / 64;
constexpr int kRopeTile = 8;
constexpr int kHalfTiles = 4;  // tiles of one half of V
constexpr int kWarpgroup = 128;
constexpr int kConsumerBarrier = 1;  // named barriers: both consumers; then one for each consumer
constexpr float kMaximumSlack = 8.0f;
constexpr float kLowest = -3e38f;  // stands for no score yet: below every score, and finite

// How a block comes from its pages (mla/mla_decode/pages.cuh), which follows from the page size.
enum PageForm { kPages, kBoxes, kRows };

// Latent or RoPE columns of the query or of the cache. Where both lie in one array, these are views of it.
struct QueryColumns {
  const char* base;
  i64 stride_batch, stride_token, stride_head;  // bytes
};
struct CacheColumns {
  const char* base;
  i64 stride_page, stride_row, stride_head;  // bytes
};

struct MlaDecodeParams {
  // dims (columns, page_size, num_kv_heads, num_pages), box (64, box_rows, 1, 1), 128-byte swizzle: of kPages one of all 576
  // columns (another map that the first loads need costs half a microsecond), of kBoxes one of 512 and one of 64
  TensorMap latent_map, rope_map;
  // Of kSharedBlocks, by which L2 fetches ahead: dims the same in words of 64 bits, box (all columns, wide_rows, 1, 1), no
  // swizzle; without the RoPE columns where rope_is_apart.
  TensorMap wide_map;
  CacheColumns latent, rope;  // of kRows
  QueryColumns q_latent, q_rope;
  char* out;
  i64 out_stride_batch, out_stride_token, out_stride_head;  // bytes
  float* lse;
  i64 lse_stride_batch, lse_stride_head, lse_stride_token;  // elements
  const int* block_table;
  i64 block_table_stride;  // elements
  const Place* places;   // [batch], of the schedule's order; TilePlace where query lengths differ
  const Part* parts_in;
  Ticket* tickets;       // [kv head][row tile][part]
  float4* partial_out;   // [kv head][row tile][part][slot][consumer][row group][32][lane]
  float* partial_lse;    // [kv head][row tile][part][slot][row]
  i64 max_tokens;        // of a request: what the block table can name
  i64 page_entries;      // of the block table, from its first to its last, or of a list of pages
  int batch;
  int parts;
  int max_pages;  // of a request: columns of the block table
  int num_pages;
  int page_size;
  int box_rows;
  int wide_rows;
  int rope_is_apart;  // not behind the latent columns of its row
  int q_len;  // where query lengths differ: of all requests together
  int heads_per_group;
  int row_groups;  // of 16 rows in a tile
  int may_wait;    // all CTAs fit on the GPU at once, so that one may wait for another
  int causal;
  int out_is_float;
  float scale_log2;  // softmax_scale * log2(e)
  Divisor by_heads_per_group, by_page_size, by_num_heads, by_q_len;
  int batch_invariant;  // requests are cut at fixed places, one of them into any number of pieces
};

// Which rows a CTA has: grid = (row tiles of a kv head, parts, kv heads).
struct Tile {
  using Held = const Tile&;  // by what walks over segments
  int index, first_row, rows;   // index over all kv heads; rows of this tile that exist
  int least_shift, most_shift;  // causal: its rows see between tokens - most_shift and tokens - least_shift tokens

  __device__ __forceinline__ explicit Tile(const MlaDecodeParams& p) {
    index = blockIdx.z * gridDim.x + blockIdx.x;
    first_row = blockIdx.x * kRowTile;
    rows = min(kRowTile, p.q_len * p.heads_per_group - first_row);
    most_shift = shift_of(p, 0);
    least_shift = shift_of(p, rows - 1);
  }
  // Without a way of its own for one query, ptxas spills registers of some kernels.
  __device__ __forceinline__ int token_of(const MlaDecodeParams& p, int row) const {
    return p.q_len == 1 ? 0 : quotient(first_row + row, p.by_heads_per_group);
  }
  __device__ __forceinline__ int shift_of(const MlaDecodeParams& p, int row) const {
    if (!p.causal) return 0;
    return p.q_len - 1 - min(token_of(p, row), p.q_len - 1);
  }
};

// Where query lengths differ: each place of the schedule is a row tile, grid = (1, parts, kv heads).
struct RaggedTile {
  using Held = RaggedTile;
  int index, first_row, rows;
  int least_shift, most_shift;
  int q_len, q_begin;
  i64 pages;

  __device__ __forceinline__ explicit RaggedTile(const MlaDecodeParams&) { index = blockIdx.z; }
  // Of the request's.
  __device__ __forceinline__ int token_of(const MlaDecodeParams& p, int row) const {
    return quotient(first_row + row, p.by_heads_per_group);
  }
  __device__ __forceinline__ int shift_of(const MlaDecodeParams& p, int row) const {
    if (!p.causal) return 0;
    return q_len - 1 - min(token_of(p, row), q_len - 1);
  }
  // Nothing of a place that was never written may lead out of the arrays.
  __device__ __forceinline__ void move_to(const MlaDecodeParams& p, const TilePlace& place) {
    q_begin = min(max(place.q_begin, 0), p.q_len - 1);
    q_len = min(max(place.q_len, 1), p.q_len - q_begin);
    first_row = min(max(place.first_row, 0), q_len * p.heads_per_group - 1);
    rows = min(kRowTile, q_len * p.heads_per_group - first_row);
    most_shift = shift_of(p, 0);
    least_shift = shift_of(p, rows - 1);
    pages = place.pages;
  }
};

// A row of a tile as the arrays have it.
struct Row {
  int token, head;

  __device__ __forceinline__ Row(const MlaDecodeParams& p, const Tile& tile, int row) {
    token = tile.token_of(p, row);
    head = blockIdx.z * p.heads_per_group + tile.first_row + row - token * p.heads_per_group;
  }
  __device__ __forceinline__ Row(const MlaDecodeParams& p, const RaggedTile& tile, int row) {
    const int own = tile.token_of(p, row);
    token = tile.q_begin + own;
    head = blockIdx.z * p.heads_per_group + tile.first_row + row - own * p.heads_per_group;
  }
};

// The stretch of one request that this CTA computes. It is a piece where other parts have the rest.
struct Segment {
  int request, begin, blocks, tokens;
  int slot, first_part, last_part, first_slot;  // of the pieces

  __device__ __forceinline__ bool split() const { return last_part > first_part; }
};

// What lies at a place of a part, of so many tokens and with a row that sees all but least_shift of them.
__device__ __forceinline__ Segment segment_at(const MlaDecodeParams& p, const Part& part, int place, int tokens_there,
                                              int least_shift) {
  const bool head = place == part.place, tail = place == part.end_place;
  const int scheduled = min(max(tokens_there, 0), kMaxTokens);
  const int tokens = min(static_cast<i64>(scheduled), p.max_tokens);
  Segment segment;
  segment.request = 0;
  segment.tokens = tokens;
  segment.begin = head ? part.block : 0;
  segment.slot = head ? 0 : 1;
  segment.first_part = head ? part.first_part : blockIdx.y;
  segment.last_part = head ? part.last_part : tail ? part.tail_last_part : blockIdx.y;
  segment.first_slot = head ? part.first_slot : 1;
  const int scheduled_end = tail ? part.end_block : blocks_of(scheduled);
  const int end = min(scheduled_end, blocks_of(max(tokens - least_shift, 0)));
  segment.blocks = max(end - segment.begin, 0);
  return segment;
}

__device__ __forceinline__ Segment segment_of(const MlaDecodeParams& p, const Tile& tile, const Part& part,
                                              int place) {
  Place at = {part.request, part.tokens};
  if (place != part.place) at = p.places[place];
  Segment segment = segment_at(p, part, place, at.tokens, tile.least_shift);
  segment.request = min(max(at.request, 0), p.batch - 1);
  return segment;
}
__device__ __forceinline__ Segment segment_of(const MlaDecodeParams& p, RaggedTile& tile, const Part& part, int place) {
  const TilePlace at = reinterpret_cast<const TilePlace*>(p.places)[place];
  tile.move_to(p, at);
  return segment_at(p, part, place, at.tokens, tile.least_shift);
}

// An entry of a segment's pages.
__device__ __forceinline__ int page_of(const MlaDecodeParams& p, const Tile&, const Segment& segment, u32 entry) {
  return p.block_table[segment.request * p.block_table_stride + entry];
}
__device__ __forceinline__ int page_of(const MlaDecodeParams& p, const RaggedTile& tile, const Segment&, u32 entry) {
  const u64 at = static_cast<u64>(tile.pages) * p.block_table_stride + entry;
  return at < static_cast<u64>(p.page_entries) ? p.block_table[at] : -1;  // a list may be shorter than it should be
}

// Number of the piece that a part leaves in a slot.
template <typename AnyTile>
__device__ __forceinline__ i64 piece_index(const MlaDecodeParams& p, const AnyTile& tile, int part, int slot) {
  return (static_cast<i64>(tile.index) * p.parts + part) * 2 + slot;
}

// Where a lane's four accumulators of eight columns of a row group lie in a piece.
__device__ __forceinline__ i64 piece_offset(const MlaDecodeParams& p, i64 piece, int consumer, int group, int columns,
                                            int lane) {
  return (((piece * 2 + consumer) * p.row_groups + group) * 32 + columns) * 32 + lane;
}

// The threads of both consumers meet; those of one.
__device__ __forceinline__ void consumers_sync() { named_barrier_sync<kConsumerBarrier, 2 * kWarpgroup>(); }
__device__ __forceinline__ void consumer_sync(int consumer) {
  if (consumer == 0)
    named_barrier_sync<kConsumerBarrier + 1, kWarpgroup>();
  else
    named_barrier_sync<kConsumerBarrier + 2, kWarpgroup>();
}

// Order in which the tiles of a block are wanted and become free: RoPE, the owner's half of V, the other half.
__device__ __forceinline__ int tile_in_order(int owner, int i) {
  return i == 0 ? kRopeTile : (i - 1) ^ (owner * kHalfTiles);
}

}  // namespace cumla
