// SPDX-License-Identifier: Apache-2.0
// What the kernel is given.
#pragma once
#include "rows/slots.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

using namespace rows;

// Rows of tokens in batches of equal length; ragged rows are one batch.
struct BatchedRows {
  char* data;
  i64 stride_batch, stride_token, stride_head;
};

// One factor, one per kv head, or one per request and kv head: value = e4m3 * factor.
struct Scales {
  const char* data;  // null: `value`
  i64 stride_request, stride_head;
  float value;
  int unused;
};

// Cosines or sines: rows are positions.
struct Angles {
  const char* data;
  i64 stride_position, stride_column;
};

// The octets of each thread of a team. The first `rope_units` threads have an octet of first halves of pairs, from
// octet `rope_first` on, and the octet of their second halves. The other threads have two of the `rest` octets each;
// the last of them may have one.
struct Division {
  int units, rope_units, rope_first, rest;
};

struct AppendKvCacheParams {
  BatchedRows q, q_out, k, v;
  Pages k_cache, v_cache;
  Indices slots, batch_indices, positions, kv_lens, bounds;  // bounds: of each request's tokens
  const char* page_numbers;
  i64 page_numbers_stride_request, page_numbers_stride;
  Indices page_list_bounds;
  Angles cos, sin;  // null: nothing is rotated
  Scales k_scale, v_scale;
  i64 tokens, tokens_of_batch, batch, num_entries, num_pages, page_size, max_position;
  Division keys, values;  // queries are divided as keys are
  int team, inverse_team;  // threads of a team, and 2^16 / team, rounded up
  int heads, q_chunks, kv_chunks;  // heads of a chunk
  int q_heads, kv_heads, interleaved, table_type;
};

enum TableType { kFloat, kBfloat16, kFloat16 };

}  // namespace cumla::mha
