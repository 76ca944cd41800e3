// SPDX-License-Identifier: Apache-2.0
// Parameters of append_kv_cache.
#pragma once
#include "rows/slots.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

using namespace rows;

// Rows of tokens in batches of equal length. Ragged rows are one batch.
struct BatchedRows {
  char* data;
  i64 stride_batch, stride_token, stride_head;
};

// value = e4m3 * scale, with one scale, one per kv head, or one per request and kv head.
struct Scales {
  const char* data;  // null: `value` is the scale
  i64 stride_request, stride_head;
  float value;
  int unused;
};

// Cosines or sines; each row is a position.
struct Angles {
  const char* data;
  i64 stride_position, stride_column;
};

// The threads of a team divide the octets of a row. The first `rope_units` threads each have an octet of first halves
// of pairs, from octet `rope_first` on, and the octet of their second halves. The other threads share the `rest`
// octets, two each; the last ones may have one.
struct Division {
  int units, rope_units, rope_first, rest;
};

struct AppendKvCacheParams {
  BatchedRows q, q_out, k, v;
  Pages k_cache, v_cache;
  Indices slots, batch_indices, positions, kv_lens, bounds;  // bounds: first token of each request
  const char* page_numbers;
  i64 page_numbers_stride_request, page_numbers_stride;
  Indices page_list_bounds;
  Angles cos, sin;  // null: no rotation
  Scales k_scale, v_scale;
  i64 tokens, tokens_of_batch, batch, num_entries, num_pages, page_size, max_position;
  Division keys, values;  // queries are divided like keys
  int team, inverse_team;  // threads of a team, and 2^16 / team rounded up
  int heads, q_chunks, kv_chunks;  // heads: of a chunk
  int q_heads, kv_heads, interleaved, table_type;
};

enum TableType { kFloat, kBfloat16, kFloat16 };

}  // namespace cumla::mha
