// SPDX-License-Identifier: Apache-2.0
// The address of a token's rows, its request and position, and its slot.
#pragma once
#include "mha/append_kv_cache/params.cuh"
#include "rows/slots.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

using namespace rows;

// position: of the rotation. place: a position in the request's pages, or a slot. Negative: none.
struct Token {
  i64 request, position, place;
};

// An index before its conversion. Converting waits for the load, so it comes after the copies of rows are issued.
struct Loaded {
  u32 low, high;

  __device__ __forceinline__ void load(const Indices& indices, i64 i) {
    const u32* const at = reinterpret_cast<const u32*>(indices.data + i * indices.stride);
    if (indices.data == nullptr) return;
    if (indices.is_wide) {
      const uint2 words = *reinterpret_cast<const uint2*>(at);
      low = words.x, high = words.y;
    } else {
      low = *at;
    }
  }
  __device__ __forceinline__ i64 index(const Indices& indices) const {
    return indices.is_wide ? static_cast<i64>(static_cast<u64>(high) << 32 | low) : static_cast<i32>(low);
  }
};

// Ragged rows are one batch, which saves the division.
__device__ __forceinline__ i64 batch_of(const AppendKvCacheParams& p, i64 token) {
  return p.tokens == p.tokens_of_batch ? 0 : token / p.tokens_of_batch;
}

// The request whose tokens [bounds[i], bounds[i + 1]) contain the token, or -1.
__device__ __forceinline__ i64 find_request(const AppendKvCacheParams& p, i64 token) {
  i64 low = 0, high = p.batch;  // the last bound <= token is in [low, high)
  while (high - low > 1) {
    const i64 middle = (low + high) / 2;
    (p.bounds[middle] <= token ? low : high) = middle;
  }
  return low < high && p.bounds[low] <= token && token < p.bounds[low + 1] ? low : -1;
}

__device__ __forceinline__ Token find_token(const AppendKvCacheParams& p, i64 token, const Loaded& position,
                                            const Loaded& slot) {
  Token found = {-1, -1, -1};
  if (p.batch_indices.data != nullptr) {
    found.request = p.batch_indices[token];
  } else if (p.kv_lens.data != nullptr) {
    i64 begin, end;
    if (p.bounds.data != nullptr) {
      found.request = find_request(p, token);
      begin = found.request < 0 ? 0 : p.bounds[found.request];
      end = found.request < 0 ? 0 : p.bounds[found.request + 1];
    } else {
      found.request = batch_of(p, token);
      begin = found.request * p.tokens_of_batch;
      end = begin + p.tokens_of_batch;
    }
    if (found.request >= 0) found.position = found.place = p.kv_lens[found.request] - (end - token);
  }
  if (p.positions.data != nullptr) {
    found.position = position.index(p.positions);
    if (p.kv_lens.data == nullptr) found.place = found.position;
  }
  if (p.slots.data != nullptr) found.place = slot.index(p.slots);
  return found;
}

// The slot of a token in the cache.
__device__ __forceinline__ Slot find_slot_of(const AppendKvCacheParams& p, i64 token, const Token& found) {
  if (p.page_size == 0) return {token, 0};  // rows of tokens, not a cache
  if (found.place < 0) return {-1, 0};
  return slot_at(p, found.request, found.place);
}

__device__ __forceinline__ char* row_of(const AppendKvCacheParams& p, const BatchedRows& rows, i64 token, int head) {
  const i64 batch = batch_of(p, token);
  return rows.data + batch * rows.stride_batch + (token - batch * p.tokens_of_batch) * rows.stride_token +
         head * rows.stride_head;
}

}  // namespace cumla::mha
