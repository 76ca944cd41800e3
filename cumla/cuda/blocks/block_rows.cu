// SPDX-License-Identifier: Apache-2.0
// Finds the request of each query token, its cached tokens, and how many of them the query token does not see; and,
// if asked for, how many blocks it sees some of; or those that it sees whole, and the one after them.
//
// grid = (tokens / 128), 128 threads, each of which has a token.
//
// Roles and time line of a thread: search the offsets of requests | length | store
// Offsets and lengths may have any values. A token that no request has gets request -1.
// Barriers: none. Threads share nothing.
// Budget: 40 registers per thread, no shared memory.
#include "blocks/rows.cuh"
#include "rows/slots.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

using namespace ptx;
using namespace rows;

struct BlockRowsParams {
  Indices bounds;   // [batch + 1] offsets of requests; without them each has q_len tokens
  Indices kv_lens;  // [batch]
  BlockRow* rows;   // [total_tokens]
  int* visible;     // [total_tokens] blocks; null: not wanted
  int total_tokens;
  int batch;
  int q_len;
  int causal;
  int most;  // tokens that the pages of a request hold
  int block_size;
  int rounding;  // tokens of visible blocks beyond those seen: block_size - 1, or block_size, rounded down
};

constexpr int kBlockRowThreads = 128;

__device__ __forceinline__ int bound_at(const BlockRowsParams& p, int request) {
  if (p.bounds.data == nullptr) return request * p.q_len;
  return static_cast<int>(min(max(p.bounds[request], 0LL), static_cast<i64>(p.total_tokens)));
}

// The last request that begins at or before the token, or 0.
__device__ __forceinline__ int request_of(const BlockRowsParams& p, int token) {
  if (p.bounds.data == nullptr) return min(token / p.q_len, p.batch - 1);
  int first = 0, last = p.batch - 1;
  while (first < last) {
    const int middle = first + (last - first + 1) / 2;
    if (bound_at(p, middle) <= token)
      first = middle;
    else
      last = middle - 1;
  }
  return first;
}

__device__ __forceinline__ void block_rows(const BlockRowsParams& p) {
  grid_dependency_launch();
  grid_dependency_wait();
  const int token = blockIdx.x * kBlockRowThreads + threadIdx.x;
  if (token >= p.total_tokens) return;
  const int request = p.batch > 0 ? request_of(p, token) : -1;
  const int begin = request < 0 ? 0 : bound_at(p, request), end = request < 0 ? 0 : bound_at(p, request + 1);
  BlockRow row = {-1, 0, 0, 0};
  if (begin <= token && token < end) {
    row.request = request;
    row.tokens = static_cast<int>(min(max(p.kv_lens[request], 0LL), static_cast<i64>(split::kMaxTokens)));
    row.behind = p.causal ? end - 1 - token : 0;
  }
  p.rows[token] = row;
  if (p.visible != nullptr)
    p.visible[token] =
        static_cast<int>(min(static_cast<u32>(row.seen(p.most)) + p.rounding, static_cast<u32>(p.most)) / p.block_size);
}

}  // namespace cumla::blocks
