// SPDX-License-Identifier: Apache-2.0
// Turns requests that share prefixes into requests of ragged schedules: the rest of each request, and the prefix of
// each group with the queries of all its members (docs/kernels/prefixes.md).
//
// In one schedule of both, queries are numbered twice: token t of the prefixes is t, and token t of the rests is
// rest_begin + t. The arrays have two entries for each new request, its begin and its end. To the schedule, what is
// between an end and the next begin is a request as well; new requests are in descending order of their queries, so
// that it has none.
//   entries 0 to 2 batch - 1            rests, the last request first
//   entry 2 batch                       rest_begin: the end of a schedule of rests alone
//   entries 2 batch + 1 to 4 batch      prefixes, the last request first; only the first of a group has one
//   entry 4 batch + 1                   0, the end
//
// grid = 1 CTA of 1,024 threads. Roles and time line; B is __syncthreads:
//   thread   a request: clamp its prefix; a token: note that nobody has it | B | a request: find its group, store
//            entries | B |
//   warp     a request: what its tokens attend to, and the last keys that they see
// Barriers guard arrays in global memory, which this CTA alone writes and reads: every thread arrives, once per B.
// Budget: 64 registers per thread, no shared memory.
#include "split/prefixes.cuh"
#include "split/scan.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::split {

using namespace ptx;

struct PrefixRequestsParams {
  const int* kv_lens;  // [batch]
  i64 kv_lens_stride;  // in elements, as all strides here
  const int* qo_indptr;  // [batch + 1]; null: each request has q_len query tokens
  i64 qo_indptr_stride;
  const int* group;  // [batch]: neighbours with equal numbers are a group; any numbers
  i64 group_stride;
  const int* prefix_len;  // [batch]: tokens
  i64 prefix_len_stride;
  int* tokens;   // [4 batch + 2]: as qo_indptr
  int* lengths;  // [4 batch + 2]: keys
  int* pages;    // [4 batch + 2]: entries of the block table, row after row
  int* ends;     // [2 total_tokens]: last visible key; null: all are visible
  int* states;   // [total_tokens]: PrefixState
  int* clamped;  // [batch]: prefixes that requests by themselves may have
  int* shared;   // [batch]: prefixes that they have
  int batch;
  int total_tokens;
  int rest_begin;  // total_tokens, or 0 if rests have a schedule of their own
  int q_len;
  int page_size;
  int max_pages;
};

// Queries of a request, clamped to q.
struct OwnQueries {
  int begin, end;
  bool is_in_order;

  __device__ __forceinline__ OwnQueries(const PrefixRequestsParams& p, int request) {
    i64 first = i64{request} * p.q_len, last = first + p.q_len;
    if (p.qo_indptr != nullptr) {
      first = p.qo_indptr[request * p.qo_indptr_stride];
      last = p.qo_indptr[(request + 1) * p.qo_indptr_stride];
    }
    is_in_order = first <= last;
    begin = static_cast<int>(min(max(first, i64{0}), i64{p.total_tokens}));
    end = static_cast<int>(min(max(last, i64{begin}), i64{p.total_tokens}));
  }
};

__device__ __forceinline__ int keys_of(const PrefixRequestsParams& p, int request) {
  return static_cast<int>(
      min(max(i64{p.kv_lens[request * p.kv_lens_stride]}, i64{0}), i64{p.max_pages} * p.page_size));
}

// The prefix that a request may have: whole pages that all its queries see.
__device__ __forceinline__ int clamped_prefix(const PrefixRequestsParams& p, int request) {
  const OwnQueries queries(p, request);
  if (!queries.is_in_order) return 0;
  const int most = max(keys_of(p, request) - (queries.end - queries.begin), 0);
  const int tokens = min(max(p.prefix_len[request * p.prefix_len_stride], 0), most);
  return tokens / p.page_size * p.page_size;
}

// Stores the entries of a request's rest and, if it is the first one of its group, of the prefix.
__device__ __forceinline__ void store_entries(const PrefixRequestsParams& p, int request) {
  const auto group_of = [&](int r) { return p.group[r * p.group_stride]; };
  const int group = group_of(request);
  int first = request, last = request, prefix = p.clamped[request];
  for (; first > 0 && prefix > 0 && group_of(first - 1) == group; --first) prefix = min(prefix, p.clamped[first - 1]);
  for (; last + 1 < p.batch && prefix > 0 && group_of(last + 1) == group; ++last)
    prefix = min(prefix, p.clamped[last + 1]);
  if (first == last) prefix = 0;
  p.shared[request] = prefix;

  const OwnQueries own(p, request);
  const bool has_prefix = prefix > 0 && first == request;
  const int end = has_prefix ? OwnQueries(p, last).end : own.begin;
  const int row = request * p.max_pages, split = row + prefix / p.page_size;
  const i64 rest = 2 * i64{p.batch - 1 - request}, of_group = rest + 2 * i64{p.batch} + 1;
  p.tokens[rest] = p.rest_begin + own.begin;
  p.tokens[rest + 1] = p.rest_begin + own.end;
  p.lengths[rest] = keys_of(p, request) - prefix;
  p.lengths[rest + 1] = 0;
  p.pages[rest] = split;
  p.pages[rest + 1] = row + p.max_pages;
  p.tokens[of_group] = own.begin;
  p.tokens[of_group + 1] = end;
  p.lengths[of_group] = has_prefix ? prefix : 0;
  p.lengths[of_group + 1] = 0;
  p.pages[of_group] = row;
  p.pages[of_group + 1] = split;
}

__device__ __forceinline__ void prefix_requests(const PrefixRequestsParams& p) {
  const int thread = threadIdx.x, lane = thread % 32;
  grid_dependency_launch();
  grid_dependency_wait();

  for (int request = thread; request < p.batch; request += kScheduleThreads)
    p.clamped[request] = clamped_prefix(p, request);
  for (int token = thread; token < p.total_tokens; token += kScheduleThreads) {
    p.states[token] = kNoRequest;
    if (p.ends != nullptr) p.ends[token] = p.ends[p.total_tokens + token] = 0x7fffffff;
  }
  if (thread < 2) {  // the ends of rests and of prefixes
    const i64 end = 2 * i64{p.batch} * (1 + thread) + thread;
    p.tokens[end] = thread == 0 ? p.rest_begin : 0;
    p.lengths[end] = p.pages[end] = 0;
  }
  __syncthreads();
  for (int request = thread; request < p.batch; request += kScheduleThreads) store_entries(p, request);
  __syncthreads();
  for (int request = thread / 32; request < p.batch; request += kScheduleWarps) {
    const OwnQueries own(p, request);
    const int prefix = p.shared[request];
    const i64 position = i64{keys_of(p, request)} - prefix - own.end;  // of token 0, were it this request's
    for (int token = own.begin + lane; token < own.end; token += 32) {
      p.states[token] = prefix > 0 ? kPrefixAndRest : kRest;
      if (p.ends != nullptr) p.ends[p.total_tokens + token] = static_cast<int>(position + token);
    }
  }
}

}  // namespace cumla::split
