// SPDX-License-Identifier: Apache-2.0
// The visible tokens of a request's rows, for paged_mqa_schedule and paged_mqa_logits.
#pragma once
#include "indexer/mqa_logits/layout.cuh"
#include "ptx/types.cuh"

namespace cumla::indexer {

// Strides are in bytes.
struct KvLens {
  const char* data;  // int
  i64 stride_request, stride_row;
  int batch;
  int q_len;
  int per_row;      // a length per row; else per request, all of which its last row sees
  int most_tokens;  // that a request can have
};

// Visible tokens of a row with this length, or whose request has it.
__device__ __forceinline__ int visible_of(const KvLens& l, int length, int row) {
  length = min(max(length, 0), kMaxTokens);
  return min(max(l.per_row ? length : length - l.q_len + row + 1, 0), l.most_tokens);
}

__device__ __forceinline__ int length_of(const KvLens& l, int request, int row) {
  return *reinterpret_cast<const int*>(l.data + request * l.stride_request + (l.per_row ? row * l.stride_row : 0));
}

__device__ __forceinline__ int visible_tokens(const KvLens& l, int request, int row) {
  return visible_of(l, length_of(l, request, row), row);
}

// Tokens that some row of a request sees.
__device__ __forceinline__ int tokens_of(const KvLens& l, int request) {
  int tokens = visible_tokens(l, request, l.q_len - 1);
  if (l.per_row)
    for (int row = 0; row < l.q_len - 1; ++row) tokens = max(tokens, visible_tokens(l, request, row));
  return tokens;
}

}  // namespace cumla::indexer
