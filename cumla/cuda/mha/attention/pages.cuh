// SPDX-License-Identifier: Apache-2.0
// What the attention kernels of many heads share: their parameters, which keys a query sees, and where keys and values
// lie.
#pragma once
#include "split/output.cuh"
#include "split/plan.cuh"
#include "split/tile.cuh"
#include "ptx/copy.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

using namespace ptx;
using namespace split;

constexpr float kMaximumSlack = 8.0f;
constexpr float kLowest = -3e38f;  // stands for no score yet: below every score, and finite
constexpr float kLog2E = 1.4426950408889634f;

struct Columns {
  const char* base;
  i64 stride_page, stride_row, stride_head;
};

struct AttentionParams {
  TensorMap key_map, value_map;  // dims (columns, page_size, num_kv_heads, num_pages), box (64, box_rows, 1, 1)
  Columns keys, values;          // of pages whose rows are copied one by one
  const char* q;
  i64 q_stride_batch, q_stride_token, q_stride_head;
  char* out;
  i64 out_stride_batch, out_stride_token, out_stride_head;
  float* lse;
  i64 lse_stride_batch, lse_stride_head, lse_stride_token;
  const int* block_table;  // null: keys and values are rows without pages
  i64 block_table_stride;
  const float* sinks;  // [num_heads], or null
  const Place* places;
  const Part* parts_in;
  Ticket* tickets;
  float4* partial_out;
  float* partial_lse;
  i64 max_tokens;    // of a request
  i64 page_entries;  // of the block table, from its first to its last, or of a list of pages
  int batch;
  int parts;
  int num_pages;
  int page_size;
  int box_rows;
  int key_columns, value_columns;
  int q_len;         // of all requests together
  int tokens_apart;  // of a request, where q, out and lse have an axis of requests; else 0
  int heads_per_group;
  int row_groups;
  int may_wait;
  int causal;
  int window_left, window_right;  // -1: unbounded
  int out_is_float;
  float scale_log2;  // softmax_scale * log2(e), or softcap * log2(e)
  float to_softcap;  // 2 * softmax_scale / softcap * log2(e), or 0
  Divisor by_heads_per_group, by_page_size, by_tokens_apart;
  int batch_invariant;
  float empty_lse;
  int num_kv_heads;
};

__device__ __forceinline__ TokenPlace place_of(const AttentionParams& p, int, int token) {
  if (p.tokens_apart == 0) return {0, token};
  const int request = quotient(token, p.by_tokens_apart);
  return {request, token - request * p.tokens_apart};
}
__device__ __forceinline__ bool has_column(const AttentionParams& p, int column) { return column < p.value_columns; }

// A query row of a tile as the arrays have it; of a tile of any kv head.
struct Query {
  int head;
  TokenPlace at;

  __device__ __forceinline__ Query(const AttentionParams& p, const RaggedTile& tile, int row) {
    const int own = tile.token_of(p, row);
    head = tile.index * p.heads_per_group + tile.first_row + row - own * p.heads_per_group;
    at = place_of(p, 0, tile.q_begin + own);
  }
};

// Tokens of the request that a row of a tile sees: [first, end).
struct Seen {
  int first, end;
};

__device__ __forceinline__ Seen seen_by(const AttentionParams& p, const RaggedTile& tile, int tokens, int row) {
  const int position = tokens - tile.q_len + min(tile.token_of(p, row), tile.q_len - 1);
  Seen seen = {0, tokens};
  if (p.window_right >= 0) seen.end = min(static_cast<i64>(tokens), static_cast<i64>(position) + p.window_right + 1);
  if (p.window_left >= 0) seen.first = max(position - min(p.window_left, tokens), 0);
  return seen;
}

// No more rows without pages than there are.
__device__ __forceinline__ int existing_tokens(const AttentionParams& p, const RaggedTile& tile, int tokens) {
  if (p.block_table != nullptr) return tokens;
  return min(static_cast<i64>(tokens), max(p.page_entries - tile.pages, i64{0}));
}

// The page of a token of the request; -1 if there is none.
__device__ __forceinline__ int page_of(const AttentionParams& p, const RaggedTile& tile, int tokens, int token,
                                       int& row) {
  if (p.block_table == nullptr) {
    const i64 at = tile.pages + token;
    row = static_cast<int>(at);
    return token < tokens && at >= 0 && at < p.page_entries ? 0 : -1;
  }
  const u32 entry = quotient(min(token, max(tokens - 1, 0)), p.by_page_size);
  row = token - static_cast<int>(entry) * p.page_size;
  const u64 at = static_cast<u64>(tile.pages) * p.block_table_stride + entry;
  if (token >= tokens || at >= static_cast<u64>(p.page_entries)) return -1;
  const int page = p.block_table[at];
  return static_cast<u32>(page) < static_cast<u32>(p.num_pages) ? page : -1;
}

// Rows of a block by one warp, four at a time, eight lanes each; lane k has the offset of the k-th. Tiles are kTileBytes
// apart.
template <int kTiles, int kTileBytes, int kRows>
__device__ __forceinline__ void copy_rows(const Columns& from, i64 own, int first_row, int columns, u32 tiles) {
  const int lane = threadIdx.x % 32, chunk = lane % 8;
#pragma unroll 1
  for (int i = 0; i < kRows / 4; ++i) {
    const int k = 4 * i + lane / 8, row = first_row + k;
    const i64 offset = __shfl_sync(0xffffffffu, own, k);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const bool exists = offset >= 0 && tile * 64 + chunk * 8 < columns;
      copy_16_async(tiles + tile * kTileBytes + row * 128 + ((chunk ^ (row & 7)) << 4),
                    from.base + (exists ? offset + tile * 128 + chunk * 16 : 0), exists);
    }
  }
}

// A warp copies kRows query rows of a tile of 64 to `tiles`, 8,192 bytes apart.
template <int kTiles, int kRows>
__device__ __forceinline__ void copy_query(const AttentionParams& p, const RaggedTile& tile, int first_row, u32 tiles) {
  const int lane = threadIdx.x % 32, chunk = lane % 8;
#pragma unroll 1
  for (int i = 0; i < kRows / 4; ++i) {
    const int row = first_row + i * 4 + lane / 8;
    const bool valid = row < tile.rows;
    const Query from(p, tile, valid ? row : 0);
    const char* const source =
        p.q + from.at.batch * p.q_stride_batch + from.at.token * p.q_stride_token + from.head * p.q_stride_head;
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
      const bool exists = valid && k * 64 + chunk * 8 < p.key_columns;
      copy_16_async(tiles + k * 8192 + row * 128 + ((chunk ^ (row & 7)) << 4),
                    source + (exists ? k * 128 + chunk * 16 : 0), exists);
    }
  }
}

}  // namespace cumla::mha
