// SPDX-License-Identifier: Apache-2.0
// Parameters of attention, the keys that a query row sees, and their pages.
#pragma once
#include "attend/score.cuh"
#include "attend/softmax.cuh"
#include "split/output.cuh"
#include "split/plan.cuh"
#include "split/tile.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

using namespace attend;
using namespace split;

template <bool kFirst, typename A, typename B>
struct TypeIf {
  using Type = B;
};
template <typename A, typename B>
struct TypeIf<true, A, B> {
  using Type = A;
};

struct Columns {
  const char* base;
  i64 stride_page, stride_row, stride_head;
};

// One scale, one per kv head, or one per request and kv head. Strides are in elements.
struct Scales {
  const float* data;  // null: `value` is the scale
  i64 stride_request, stride_head;
  float value;
  int requests;  // number of requests with their own scales

  __device__ __forceinline__ float of(int request, int kv_head) const {
    if (data == nullptr) return value;
    return data[min(max(request, 0), requests - 1) * stride_request + kv_head * stride_head];
  }
};

struct AttentionParams {
  static constexpr int sink_in_lse = 1;
  TensorMap key_map, value_map;  // dims (columns, page_size, num_kv_heads, num_pages), box (64 or 128, box_rows, 1, 1)
  Columns keys, values;          // for pages whose rows are copied one by one
  const char* q;
  i64 q_stride_batch, q_stride_token, q_stride_head;
  char* out;
  i64 out_stride_batch, out_stride_token, out_stride_head;
  float* lse;
  i64 lse_stride_batch, lse_stride_head, lse_stride_token;
  const int* block_table;  // null: keys and values are ragged rows without pages
  i64 block_table_stride;
  const float* sinks;  // [num_heads], or null
  const Place* places;
  const Part* parts_in;
  Ticket* tickets;
  float4* partial_out;
  float2* partial_rows;
  i64 max_tokens;    // of a request
  i64 page_entries;  // entries of the block table, from first to last, or of a page list
  int batch;
  int parts;
  int num_pages;
  int page_size;
  int box_rows;
  int key_columns, value_columns;
  int q_len;         // of all requests together
  int tokens_apart;  // tokens per request if q, out and lse have an axis of requests, else 0
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
  Scales key_scale, value_scale;  // of e4m3
  int num_kv_heads;
  int is_of_chunks;  // this launch has the chunks of a mixed batch, which may have none
};

// The same of calls without a softcap and float32 results, whose instructions cost time where they are jumped over,
// too.
struct LeanParams : AttentionParams {
  static constexpr float to_softcap = 0.0f;
  static constexpr int out_is_float = 0;
};

// Tiles of at most kFewRows rows, a row for a thread.
constexpr int kFewRows = 8;
template <typename Params>
struct FewRows : Params {};

template <typename Params>
constexpr bool kIsLean = false;
template <>
constexpr bool kIsLean<LeanParams> = true;
template <>
constexpr bool kIsLean<FewRows<LeanParams>> = true;
template <typename Params>
constexpr bool kIsFew = false;
template <typename Params>
constexpr bool kIsFew<FewRows<Params>> = true;
// What a kernel's parameters have in common with those of other kernels.
template <typename Params>
using CommonOf = typename TypeIf<kIsLean<Params>, LeanParams, AttentionParams>::Type;

__device__ __forceinline__ TokenPlace place_of(const AttentionParams& p, int, int token) {
  const int request = quotient(token, p.by_tokens_apart);  // 0 if tokens_apart is 0
  return {request, token - request * p.tokens_apart};
}
__device__ __forceinline__ bool has_column(const AttentionParams& p, int column) { return column < p.value_columns; }
__device__ __forceinline__ TokenPlace place_of(const LeanParams& p, int request, int token) {
  return place_of(static_cast<const AttentionParams&>(p), request, token);
}
__device__ __forceinline__ bool has_column(const LeanParams& p, int column) {
  return has_column(static_cast<const AttentionParams&>(p), column);
}

// As split::store_lse for tiles with sinks.
__device__ __forceinline__ float natural_lse(const AttentionParams& p, float sink, float lse) {
  return lse == -kInfinity ? p.empty_lse : fabsf(lse) >= kMostSink ? sink : lse * kLn2;
}
template <typename AnyTile>
__device__ __forceinline__ void store_lse(const AttentionParams& p, const AnyTile&, int request, const Row& to,
                                          float lse) {
  const TokenPlace at = place_of(p, request, to.token);
  const bool is_sink = p.sinks != nullptr && fabsf(lse) >= kMostSink;
  p.lse[at.batch * p.lse_stride_batch + to.head * p.lse_stride_head + at.token * p.lse_stride_token] =
      natural_lse(p, is_sink ? p.sinks[to.head] : lse, lse);
}
template <typename AnyTile>
__device__ __forceinline__ void store_lse(const LeanParams& p, const AnyTile& tile, int request, const Row& to,
                                          float lse) {
  store_lse(static_cast<const AttentionParams&>(p), tile, request, to, lse);
}

// A row tile. grid = (kv heads, parts, 1) makes CTAs that read the same pages neighbours; (1, parts, kv heads) makes
// those neighbours that combine (attention_launch).
struct HeadTile : RaggedTile {
  using Held = HeadTile;

  __device__ __forceinline__ explicit HeadTile(const AttentionParams& p) : RaggedTile(p) { index = kv_head(); }
  __device__ __forceinline__ static u32 kv_head() { return blockIdx.x + blockIdx.z; }
};

// The token and head of a tile's query row, as indices of the arrays.
struct Query {
  int head;
  TokenPlace at;

  __device__ __forceinline__ Query(const AttentionParams& p, const RaggedTile& tile, int row) {
    const int own = tile.token_of(p, row);
    head = tile.index * p.heads_per_group + tile.first_row + row - own * p.heads_per_group;
    at = place_of(p, 0, tile.q_begin + own);
  }
};

// The sink of a row, natural; -inf if there is none. Without a branch, so that others may be on their way meanwhile.
__device__ __forceinline__ float natural_sink_of(const AttentionParams& p, const HeadTile& tile, const Segment& segment,
                                                 int row) {
  const bool counts = row < tile.rows && (!segment.split() || segment.first_part == blockIdx.y);
  return load_global_float_if(p.sinks != nullptr && counts, p.sinks + Row(p, tile, row).head, -kInfinity);
}

// Base-2 sink of a row; -inf if there is none. It counts once: in the first partial result of a row tile.
__device__ __forceinline__ float sink_of(const AttentionParams& p, const HeadTile& tile, const Segment& segment,
                                         int row) {
  const bool counts = row < tile.rows && (!segment.split() || segment.first_part == blockIdx.y);
  return p.sinks != nullptr && counts ? bounded_sink(p.sinks[Row(p, tile, row).head]) : -kInfinity;
}

// Visible keys [first, end) of a row of a tile.
struct Seen {
  int first, end;
};

__device__ __forceinline__ int position_of(const AttentionParams& p, const RaggedTile& tile, int tokens, int row) {
  return tokens - tile.q_len + min(tile.token_of(p, row), tile.q_len - 1);
}
__device__ __forceinline__ Seen seen_from(const AttentionParams& p, int tokens, int position) {
  Seen seen = {0, tokens};
  if (p.window_right >= 0) seen.end = min(static_cast<i64>(tokens), static_cast<i64>(position) + p.window_right + 1);
  if (p.window_left >= 0) seen.first = max(position - min(p.window_left, tokens), 0);
  return seen;
}
__device__ __forceinline__ Seen seen_by(const AttentionParams& p, const RaggedTile& tile, int tokens, int row) {
  return seen_from(p, tokens, position_of(p, tile, tokens, row));
}

// The segment at a place, without the blocks before all windows.
__device__ __forceinline__ Segment visible_segment(const AttentionParams& p, RaggedTile& tile, const Part& part,
                                                   int place) {
  Segment segment = segment_of(p, tile, part, place);
  int end = segment.begin + segment.blocks;
  if (p.block_table == nullptr) {  // no more rows than exist
    segment.tokens = min(static_cast<i64>(segment.tokens), max(p.page_entries - tile.pages, i64{0}));
    end = max(min(end, blocks_of(max(segment.tokens - tile.least_shift, 0))), segment.begin);
  }
  segment.begin = max(segment.begin, min(seen_by(p, tile, segment.tokens, 0).first / kBlockTokens, end));
  segment.blocks = end - segment.begin;
  return segment;
}

// The block table entry of a token of the request; -1 if there is no such token. Rows without pages have one page and
// no table.
__device__ __forceinline__ i64 entry_of(const AttentionParams& p, const RaggedTile& tile, int tokens, int token,
                                        int& row) {
  if (p.block_table == nullptr) {
    const i64 at = tile.pages + token;
    row = static_cast<int>(at);
    return token < tokens && at >= 0 && at < p.page_entries ? 0 : -1;
  }
  const u32 entry = quotient(min(token, max(tokens - 1, 0)), p.by_page_size);
  row = token - static_cast<int>(entry) * p.page_size;
  const u64 at = static_cast<u64>(tile.pages) * p.block_table_stride + entry;
  return token >= tokens || at >= static_cast<u64>(p.page_entries) ? -1 : static_cast<i64>(at);
}

__device__ __forceinline__ bool is_page(const AttentionParams& p, int number) {
  return static_cast<u32>(number) < static_cast<u32>(p.num_pages);
}

// The page of a token of the request; -1 if there is none.
__device__ __forceinline__ int page_of(const AttentionParams& p, const RaggedTile& tile, int tokens, int token,
                                       int& row) {
  const i64 entry = entry_of(p, tile, tokens, token, row);
  if (entry < 0 || p.block_table == nullptr) return entry < 0 ? -1 : 0;
  const int page = p.block_table[entry];
  return is_page(p, page) ? page : -1;
}

// Has L2 fetch what the first loads depend on. Each CTA prefetches its part; all CTAs together the places and the
// block table, one line per thread; and the sinks, which the end of a tile needs. A prefetch returns no value, so an
// earlier kernel may still write there. thread: below 32.
__device__ __forceinline__ void prefetch_plan(const AttentionParams& p, int thread) {
  constexpr int kPlaces = 128 / sizeof(TilePlace), kEntries = 128 / sizeof(int);  // of a line
  const i64 line = (i64{blockIdx.y} * gridDim.x * gridDim.z + HeadTile::kv_head()) * 32 + thread;
  if (thread == 0) prefetch_l2(p.parts_in + blockIdx.y);
  if (thread == 1 && p.sinks != nullptr && HeadTile::kv_head() < p.num_kv_heads)
    prefetch_l2(p.sinks + HeadTile::kv_head() * p.heads_per_group);
  if (line * kPlaces < p.batch) prefetch_l2(reinterpret_cast<const TilePlace*>(p.places) + line * kPlaces);
  if (p.block_table != nullptr && line * kEntries < p.page_entries) prefetch_l2(p.block_table + line * kEntries);
}

// The request of a tile, for scales per request. Either q has an axis of requests, or the tile's block table row is
// it.
__device__ __forceinline__ int request_of(const AttentionParams& p, const RaggedTile& tile) {
  return p.tokens_apart == 0 ? static_cast<int>(tile.pages) : quotient(tile.q_begin, p.by_tokens_apart);
}

}  // namespace cumla::mha
