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
//   thread   a token: note that nobody has it
//   thread   a request, 1,024 neighbours at a time: clamp its prefix | a scan over runs of equal groups finds the first
//            request of its group, and the least prefix from there on | the last of a group stores the group's
//   thread   a request: store entries
//   warp     a request: what its tokens attend to, and the last keys that they see
// Barriers, two __syncthreads per 1,024 requests, guard numbers of the scan, and what is found in global memory.
// Budget: 64 registers per thread, shared memory for a pair of numbers per warp.
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
  int* firsts;   // [batch]: the first request of each one's group
  int* shared;   // [batch]: prefixes that groups have, at their first requests
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

// Neighbouring members of one group: the first one, -1 if that is before them, and their least prefix.
struct Members {
  int first, least;
};

__device__ __forceinline__ Members joined(const Members& one, const Members& next) {
  return next.first >= 0 ? next : Members{one.first, min(one.least, next.least)};
}

// Each thread gets its own member joined with those of the threads before it.
__device__ __forceinline__ Members joined_with_earlier(Members run, Members* of_warps, const Members& before) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto scan = [&](Members value) {
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const Members other = {__shfl_up_sync(0xffffffffu, value.first, offset),
                             __shfl_up_sync(0xffffffffu, value.least, offset)};
      if (lane >= offset) value = joined(other, value);
    }
    return value;
  };
  run = scan(run);
  if (lane == 31) of_warps[warp] = run;
  __syncthreads();
  const Members warps = scan(lane == 0 ? joined(before, of_warps[0]) : of_warps[lane]);
  const Members earlier = {__shfl_sync(0xffffffffu, warps.first, max(warp - 1, 0)),
                           __shfl_sync(0xffffffffu, warps.least, max(warp - 1, 0))};
  return joined(warp == 0 ? before : earlier, run);
}

// The entries of a group whose first request is `request`, or of none.
__device__ __forceinline__ i64 entry_of_group(const PrefixRequestsParams& p, int request) {
  return 2 * (i64{p.batch - 1 - request} + p.batch) + 1;
}

// Finds the group of each request; stores the groups' prefixes, and the ends of their tokens.
__device__ __forceinline__ void find_groups(const PrefixRequestsParams& p) {
  __shared__ Members of_warps[kScheduleWarps];
  __shared__ Members last;
  const auto group_of = [&](int r) { return p.group[r * p.group_stride]; };
  Members before = {0, 0};
  for (int begin = 0; begin < p.batch; begin += kScheduleThreads) {
    const int request = begin + threadIdx.x;
    const bool exists = request < p.batch;
    Members run = {-1, 0x7fffffff};
    if (exists) {
      run.least = clamped_prefix(p, request);
      if (request == 0 || group_of(request - 1) != group_of(request)) run.first = request;
    }
    run = joined_with_earlier(run, of_warps, before);
    if (threadIdx.x == kScheduleThreads - 1) last = run;
    if (exists) {
      p.firsts[request] = run.first;
      if (request + 1 == p.batch || group_of(request + 1) != group_of(request)) {
        const int prefix = run.first == request ? 0 : run.least;
        p.shared[run.first] = prefix;
        p.tokens[entry_of_group(p, run.first) + 1] =
            prefix > 0 ? OwnQueries(p, request).end : OwnQueries(p, run.first).begin;
      }
    }
    __syncthreads();
    before = last;
  }
}

// Stores the entries of a request's rest and, but for the end of its tokens, those of its group's prefix if it is the
// first one there.
__device__ __forceinline__ void store_entries(const PrefixRequestsParams& p, int request) {
  const int first = p.firsts[request], prefix = p.shared[first];
  const OwnQueries own(p, request);
  const int row = request * p.max_pages, split = row + prefix / p.page_size;
  const i64 rest = 2 * i64{p.batch - 1 - request}, of_group = entry_of_group(p, request);
  p.tokens[rest] = p.rest_begin + own.begin;
  p.tokens[rest + 1] = p.rest_begin + own.end;
  p.lengths[rest] = keys_of(p, request) - prefix;
  p.lengths[rest + 1] = 0;
  p.pages[rest] = split;
  p.pages[rest + 1] = row + p.max_pages;
  p.tokens[of_group] = own.begin;
  if (first != request) p.tokens[of_group + 1] = own.begin;
  p.lengths[of_group] = first == request ? prefix : 0;
  p.lengths[of_group + 1] = 0;
  p.pages[of_group] = row;
  p.pages[of_group + 1] = split;
}

__device__ __forceinline__ void prefix_requests(const PrefixRequestsParams& p) {
  const int thread = threadIdx.x, lane = thread % 32;
  grid_dependency_launch();
  grid_dependency_wait();

  for (int token = thread; token < p.total_tokens; token += kScheduleThreads) {
    p.states[token] = kNoRequest;
    if (p.ends != nullptr) p.ends[token] = p.ends[p.total_tokens + token] = 0x7fffffff;
  }
  if (thread < 2) {  // the ends of rests and of prefixes
    const i64 end = 2 * i64{p.batch} * (1 + thread) + thread;
    p.tokens[end] = thread == 0 ? p.rest_begin : 0;
    p.lengths[end] = p.pages[end] = 0;
  }
  find_groups(p);
  for (int request = thread; request < p.batch; request += kScheduleThreads) store_entries(p, request);
  for (int request = thread / 32; request < p.batch; request += kScheduleWarps) {
    const OwnQueries own(p, request);
    const int prefix = p.shared[p.firsts[request]];
    const i64 position = i64{keys_of(p, request)} - prefix - own.end;  // of token 0, were it this request's
    for (int token = own.begin + lane; token < own.end; token += 32) {
      p.states[token] = prefix > 0 ? kPrefixAndRest : kRest;
      if (p.ends != nullptr) p.ends[p.total_tokens + token] = static_cast<int>(position + token);
    }
  }
}

}  // namespace cumla::split
