// SPDX-License-Identifier: Apache-2.0
// Builds the arrays of an attention mask: first and last visible key of each query token, and the bits of trees.
//
// grid = (token tiles), 128 threads. A warp has one token.
//
// Roles and time line of a warp:
//   find its request (32 offsets at a time) | position and length | interval, with the spans of its request, one span a
//   lane | store start and end | bits of its tree, one key a lane | store words, one word a lane
// A rule that is not used has a neutral value: no window, no spans, no chunks.
// Numbers are 64-bit until they are stored.
// Barriers: none. Warps share nothing.
// Budget: 64 registers per thread, no shared memory.
#include "rows/slots.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

using namespace ptx;
using namespace rows;

constexpr int kMaskThreads = 128;
constexpr int kMaskWarps = kMaskThreads / 32;
constexpr u32 kWarp = 0xffffffffu;
constexpr i64 kMostInt32 = 0x7fffffff;

// Sources of the bits of trees.
enum TreeForm : int {
  kDrafts,      // bytes (batch, drafts, drafts)
  kBits,        // rows of bits, one for each token
  kAllKeys,     // bytes: requests one after another, each (q_len, kv_len)
  kBitsOfKeys,  // bits: likewise, each request from a whole byte on
};

// All strides are in bytes.
struct MaskRowsParams {
  Indices bounds;  // offsets of requests; without them each has q_len tokens
  Indices kv_lens;
  Indices positions;  // null: counted back from the last key
  const char* spans;  // pairs (first, last): of requests, or of tokens
  i64 spans_stride, spans_stride_span;
  const char* flags;  // of requests: not 0 for causal
  i64 flags_stride;
  const char* tree;
  i64 tree_stride_request, tree_stride_row;
  i64 tree_bytes;  // of kAllKeys and kBitsOfKeys
  i32* start;      // each may be null
  i32* end;
  u32* words;
  i64 left, right;  // of a window; negative: unbounded. It hides drafts as well.
  i64 chunk, block;  // tokens; 0: none
  i64 lookback;      // chunks
  int total_tokens;
  int batch;
  int q_len;
  int num_spans;  // of a request; 0: spans are those of tokens
  int clamp;      // the window bounds spans as well
  int tree_form;
  int drafts;     // columns of a tree, and rows of kDrafts
  int trees;      // of kDrafts
  int num_words;  // of a row, at most 32
};

// A token and its request.
struct Query {
  int request;  // -1: none, and the rest is 0
  i64 begin, q_len, kv_len, position;
};

__device__ __forceinline__ i64 floor_of(i64 value, i64 step) {
  const i64 quotient = value / step;
  return (quotient - (quotient * step > value)) * step;
}

__device__ __forceinline__ i64 bound_at(const MaskRowsParams& p, i64 request) {
  if (p.bounds.data == nullptr) return request * p.q_len;
  return min(max(p.bounds[request], 0LL), static_cast<i64>(p.total_tokens));
}

// The last request that begins at or before the token, or 0. Each step looks at 32 requests.
__device__ __forceinline__ int find_request(const MaskRowsParams& p, int token, int lane) {
  if (p.bounds.data == nullptr) return token / max(p.q_len, 1);
  int first = 0, count = p.batch;
  while (count > 1) {
    const int step = (count + 31) / 32, at = lane * step;
    const bool begins = at < count && (at == 0 || bound_at(p, first + at) <= token);
    const int found = (31 - __clz(static_cast<int>(__ballot_sync(kWarp, begins)))) * step;
    first += found;
    count = min(step, count - found);
  }
  return first;
}

__device__ __forceinline__ i64 length_at(const MaskRowsParams& p, i64 request) {
  return p.kv_lens.data == nullptr ? kMostInt32 : max(p.kv_lens[request], 0LL);
}

__device__ __forceinline__ i64 position_at(const MaskRowsParams& p, const Query& query, i64 token) {
  if (p.positions.data != nullptr) return min(max(p.positions[token], -kMostInt32 - 1), kMostInt32);
  return query.kv_len - query.q_len + token - query.begin;
}

__device__ __forceinline__ Query find_query(const MaskRowsParams& p, int token, int lane) {
  Query query = {-1, 0, 0, 0, 0};
  const int request = find_request(p, token, lane);
  if (request >= p.batch) return query;
  const i64 begin = bound_at(p, request), end = bound_at(p, request + 1);
  if (token < begin || token >= end) return query;
  query.request = request;
  query.begin = begin;
  query.q_len = end - begin;
  query.kv_len = length_at(p, request);
  query.position = position_at(p, query, token);
  return query;
}

// Keys from `first` to `last`.
struct Interval {
  i64 first, last;
};

// Widens an interval by a span that holds the position.
__device__ __forceinline__ void widen(const MaskRowsParams& p, const Query& query, const char* at, Interval& interval) {
  const i32* const span = reinterpret_cast<const i32*>(at);
  const i64 first = span[0], last = span[1];
  if (first >= last || query.position < first || query.position > last) return;
  if (!p.clamp) interval.first = min(interval.first, first);
  interval.last = max(interval.last, last);
}

__device__ __forceinline__ Interval find_interval(const MaskRowsParams& p, const Query& query, int token, int lane) {
  const i64 position = query.position;
  const bool is_causal = p.flags != nullptr && p.flags[query.request * p.flags_stride] != 0;
  const i64 right = p.flags == nullptr ? p.right : is_causal ? 0 : p.left;
  Interval interval = {p.left < 0 ? 0 : position - p.left, right < 0 ? query.kv_len - 1 : position + right};
  if (p.chunk > 0) interval.first = max(interval.first, floor_of(position, p.chunk) - p.lookback * p.chunk);
  if (p.block > 0) interval.last = floor_of(position, p.block) + p.block - 1;
  if (p.spans != nullptr && p.num_spans == 0) widen(p, query, p.spans + token * p.spans_stride, interval);
  for (int i = lane; i < p.num_spans; i += 32)
    widen(p, query, p.spans + query.request * p.spans_stride + i * p.spans_stride_span, interval);
  for (int other = 16; p.num_spans > 0 && other > 0; other /= 2) {
    interval.first = min(interval.first, __shfl_xor_sync(kWarp, interval.first, other));
    interval.last = max(interval.last, __shfl_xor_sync(kWarp, interval.last, other));
  }
  return interval;
}

// Byte offset of the rows of a request in a mask of all keys: the sum over the requests before it.
__device__ __forceinline__ i64 find_rows(const MaskRowsParams& p, const Query& query, int lane) {
  i64 sum = 0;
  for (int request = lane; request < query.request; request += 32) {
    const i64 elements = max(bound_at(p, request + 1) - bound_at(p, request), 0LL) * length_at(p, request);
    sum += p.tree_form == kBitsOfKeys ? (elements + 7) / 8 : elements;
  }
  for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(kWarp, sum, other);
  return sum;
}

// True if the token sees a draft of its request. `rows`: the request's first row in a mask of all keys.
__device__ __forceinline__ bool sees_draft(const MaskRowsParams& p, const Query& query, int token, i64 draft,
                                           i64 rows) {
  if (draft >= query.q_len) return false;
  const i64 row = token - query.begin;
  if (p.tree_form == kDrafts) {
    if (query.request >= p.trees || row >= p.drafts || draft >= p.drafts) return false;
    return p.tree[query.request * p.tree_stride_request + row * p.tree_stride_row + draft] != 0;
  }
  if (p.tree_form == kBits) {
    return draft < p.drafts && (p.tree[token * p.tree_stride_row + draft / 8] >> (draft % 8) & 1) != 0;
  }
  const i64 key = query.kv_len - query.q_len + draft, element = row * query.kv_len + key;
  const bool is_bit = p.tree_form == kBitsOfKeys;
  const i64 at = rows + (is_bit ? element / 8 : element);
  if (key < 0 || at >= p.tree_bytes) return false;
  return is_bit ? (p.tree[at] >> (element % 8) & 1) != 0 : p.tree[at] != 0;
}

__device__ __forceinline__ void store_tree(const MaskRowsParams& p, const Query& query, int token, int lane) {
  const bool exists = query.request >= 0;
  const i64 rows = exists && p.tree_form >= kAllKeys ? find_rows(p, query, lane) : 0;
  u32 own = 0;
  for (int word = 0; word < p.num_words; ++word) {
    const i64 draft = word * 32 + lane;
    bool is_seen = exists && sees_draft(p, query, token, draft, rows);
    if (is_seen && p.left >= 0)
      is_seen = position_at(p, query, query.begin + draft) >= query.position - p.left;
    const u32 bits = __ballot_sync(kWarp, is_seen);
    if (lane == word) own = bits;
  }
  if (lane < p.num_words) p.words[static_cast<i64>(token) * p.num_words + lane] = own;
}

__device__ __forceinline__ void mask_rows(const MaskRowsParams& p) {
  grid_dependency_launch();
  grid_dependency_wait();
  const int lane = threadIdx.x % 32;
  const i64 place = static_cast<i64>(blockIdx.x) * kMaskWarps + threadIdx.x / 32;
  if (place >= p.total_tokens) return;
  const int token = static_cast<int>(place);
  const Query query = find_query(p, token, lane);
  if (p.start != nullptr || p.end != nullptr) {
    Interval interval = {0, -1};
    if (query.request >= 0) interval = find_interval(p, query, token, lane);
    if (lane == 0 && p.start != nullptr) p.start[token] = static_cast<i32>(min(max(interval.first, 0LL), kMostInt32));
    if (lane == 0 && p.end != nullptr)
      p.end[token] = static_cast<i32>(max(min(interval.last, query.kv_len - 1), -1LL));
  }
  if (p.words != nullptr) store_tree(p, query, token, lane);
}

}  // namespace cumla::mha
