// SPDX-License-Identifier: Apache-2.0
// Who works on which KV blocks, parallel over the batch. See mla_plan.cuh for the terms.
//
// mla_schedule, one CTA: a request costs its number of blocks + fixed_cost. Three ways to deal the requests out:
//   apart: each request alone, in equal pieces of one part each, where there are at least two parts a request and pieces
//          get no larger than an equal share and what cutting costs; a request that cutting would not make shorter by
//          min_saving stays whole; else
//   whole: ceil(batch / parts) consecutive requests to a part, no request cut, where no part costs more than that; else
//   split: equal shares of the summed cost, cut wherever a share ends.
// mla_schedule_invariant, a CTA for every 1024 parts: each request is cut where its own length says, into pieces of a
// part each.
// cumla/launch/mla_schedule.py holds the same arithmetic in NumPy, as its oracle.
#include "mla_plan.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla {

constexpr int kScheduleThreads = 1024;
constexpr int kScheduleWarps = kScheduleThreads / 32;
static_assert(kScheduleWarps == 32, "a warp scans one value of each warp");
constexpr int kMaxParts = kScheduleThreads - 1;  // a thread each, and one for the end

struct MlaScheduleParams {
  const int* cache_seqlens;
  i64 cache_seqlens_stride;  // elements
  int* seqlens;              // [batch]: the lengths this schedule was made for, none negative
  Part* parts_out;           // [parts]
  Ticket* tickets;           // [num_tickets]
  int batch;
  int parts;
  int num_tickets;
  int fixed_cost;  // of a request or a piece of one, in blocks
  int cut_cost;    // of cutting, in blocks: a second prologue, and pieces to join; what uneven parts may cost instead
  int min_blocks;  // no cut of a split is closer to an end of its request
  int min_share;   // cost of a share, or blocks of a piece, at least
  int min_saving;  // in blocks: a request that has parts of its own is cut where that makes it so much shorter
  int max_tokens;  // of a request: the summed cost fits an int; batch-invariant, what there are parts for
  int piece_blocks;  // batch-invariant: requests are cut at multiples of it
};

__device__ __forceinline__ int length_of(const MlaScheduleParams& p, int request) {
  return min(max(p.cache_seqlens[request * p.cache_seqlens_stride], 0), p.max_tokens);
}

// Exclusive prefix sum of one value a thread; `total` is the sum over all threads.
__device__ __forceinline__ int block_exclusive_sum(int value, int* warp_sums, int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int inclusive = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, inclusive, offset);
    if (lane >= offset) inclusive += other;
  }
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  // Every warp scans the sums of all warps (there are 32) and takes what it needs.
  int warps = warp_sums[lane];
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, warps, offset);
    if (lane >= offset) warps += other;
  }
  total = __shfl_sync(0xffffffffu, warps, 31);
  const int before = warp == 0 ? 0 : __shfl_sync(0xffffffffu, warps, warp - 1);
  return before + inclusive - value;
}

__device__ __forceinline__ int block_max(int value, int* warp_values) {
  const int warp_value = __reduce_max_sync(0xffffffffu, value);
  if (threadIdx.x % 32 == 0) warp_values[threadIdx.x / 32] = warp_value;
  __syncthreads();
  return __reduce_max_sync(0xffffffffu, warp_values[threadIdx.x % 32]);
}

struct PartBound {
  int request, block, tokens;
};

__device__ __forceinline__ int divide(u64 numerator, u32 denominator) {
  if (numerator >> 32 == 0) return static_cast<u32>(numerator) / denominator;  // five times as fast
  return static_cast<int>(numerator / denominator);
}

// The block at which a cut that falls `offset` cost units into a request really goes, in proportion and rounded: not
// closer than min_blocks to its ends, but before or behind it.
__device__ __forceinline__ int place_cut(const MlaScheduleParams& p, int blocks, int offset) {
  const u32 cost = blocks + p.fixed_cost;
  const int block = divide(2 * static_cast<u64>(offset) * blocks + cost, 2 * cost);
  if (block < p.min_blocks) return 0;
  return blocks - block < p.min_blocks ? blocks : block;
}

// Bounds first ... last that cut the same request.
struct Run {
  int first, last;
};

// The run of this thread's bound, which cuts `request`, or is -1 and in no run. Runs within a warp come from a match;
// those that touch its edges go on in the neighbouring warps.
__device__ __forceinline__ Run find_run(int request, Run (&edges)[kScheduleWarps][2], int (&edge_requests)[kScheduleWarps][2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, base = warp * 32;
  const u32 same = __match_any_sync(0xffffffffu, request);
  Run run = {base + __ffs(same) - 1, base + 31 - __clz(same)};
  if (lane % 31 == 0) {
    edges[warp][lane / 31] = run;
    edge_requests[warp][lane / 31] = request;
  }
  __syncthreads();
  if (request < 0) return run;
  for (int w = warp; run.first == w * 32 && w > 0 && edge_requests[w - 1][1] == request; --w)
    run.first = edges[w - 1][1].first;
  for (int w = warp; run.last == w * 32 + 31 && w < kScheduleWarps - 1 && edge_requests[w + 1][0] == request; ++w)
    run.last = edges[w + 1][0].last;
  return run;
}

// Parts of a request that has some of its own, in pieces of `size` blocks at most.
__device__ __forceinline__ int pieces_of(const MlaScheduleParams& p, int tokens, int size) {
  const int blocks = blocks_of(tokens);
  return blocks - size < p.min_saving ? 1 : static_cast<u32>(blocks + size - 1) / static_cast<u32>(size);
}

// The size of pieces, in blocks, with which each request can have parts of its own, of which there are two a request or
// more. Each warp tries one size, and one always will do: pieces of twice the least size number parts / 2 + batch.
__device__ __forceinline__ int find_piece(const MlaScheduleParams& p, const int* tokens, int total_blocks, int* feasible) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int least = max((total_blocks + p.parts - 1) / p.parts, p.min_share);
  const int step = max(least / 16, 1);
  const int size = least + warp * step;
  int pieces = 0;
  for (int request = lane; request < p.batch; request += 32)
    pieces += pieces_of(p, tokens[request], size);
  pieces = __reduce_add_sync(0xffffffffu, pieces);
  if (lane == 0) feasible[warp] = pieces <= p.parts;
  __syncthreads();
  const u32 good = __ballot_sync(0xffffffffu, feasible[lane] != 0);
  return least + (__ffs(good) - 1) * step;
}

struct Shared {
  int warp_values[2][kScheduleWarps];
  int group_starts[kMaxParts + 1];
  int thread_starts[kScheduleThreads];
  int thread_tokens[kScheduleThreads];  // of a thread's first request
  PartBound bounds[kMaxParts + 1];
  Run runs[kMaxParts + 1];
  Run edges[kScheduleWarps][2];
  int edge_requests[kScheduleWarps][2];
};

// Where this thread's part begins if each request has parts of its own, in pieces of `size` blocks at most.
__device__ __forceinline__ PartBound bound_apart(const MlaScheduleParams& p, Shared& shared, int size) {
  const int thread = threadIdx.x;
  const int pieces = thread < p.batch ? pieces_of(p, shared.thread_tokens[thread], size) : 0;
  int all;
  const int first = block_exclusive_sum(pieces, shared.warp_values[1], all);
  shared.thread_starts[thread] = first;
  __syncthreads();
  if (thread >= min(all, p.parts)) return {p.batch, 0, 0};
  int request = 0;
#pragma unroll
  for (int step = kScheduleThreads / 2; step > 0; step /= 2)
    if (request + step < p.batch && shared.thread_starts[request + step] <= thread) request += step;
  const int begin = shared.thread_starts[request];
  const int end = request + 1 < p.batch ? shared.thread_starts[request + 1] : all;
  const int tokens = shared.thread_tokens[request];
  return {request, divide(static_cast<u64>(thread - begin) * blocks_of(tokens), end - begin), tokens};
}

// The price of dealing out whole requests: the dearest group of consecutive ones.
__device__ __forceinline__ int price_of_whole(const MlaScheduleParams& p, Shared& shared, int per_thread, int group,
                                              int total) {
  const int thread = threadIdx.x;
  const int groups = (p.batch + group - 1) / group;
  const int begin = min(thread * per_thread, p.batch), end = min(begin + per_thread, p.batch);
  int position = shared.thread_starts[thread];
  for (int request = begin; request < end; ++request) {
    if (request % group == 0) shared.group_starts[request / group] = position;
    position += blocks_of(request == begin ? shared.thread_tokens[thread] : p.seqlens[request]) + p.fixed_cost;
  }
  if (thread == 0) shared.group_starts[groups] = total;
  __syncthreads();
  const int price = thread < groups ? shared.group_starts[thread + 1] - shared.group_starts[thread] : 0;
  return block_max(price, shared.warp_values[1]);
}

// Where this thread's part begins if all get the same share of the cost: first the thread whose requests the cut hits,
// then the request.
template <typename TokensOf>
__device__ __forceinline__ PartBound bound_split(const MlaScheduleParams& p, const Shared& shared, int per_thread,
                                                 int share, int total, TokensOf tokens_of) {
  const i64 target = static_cast<i64>(threadIdx.x) * share;
  if (threadIdx.x >= p.parts || target >= total) return {p.batch, 0, 0};
  int owner = 0;
#pragma unroll
  for (int step = kScheduleThreads / 2; step > 0; step /= 2)
    if (shared.thread_starts[owner + step] <= target) owner += step;
  PartBound bound = {owner * per_thread, 0, shared.thread_tokens[owner]};
  int before = shared.thread_starts[owner];
  while (before + blocks_of(bound.tokens) + p.fixed_cost <= target) {
    before += blocks_of(bound.tokens) + p.fixed_cost;
    bound.tokens = tokens_of(++bound.request);
  }
  const int blocks = blocks_of(bound.tokens);
  bound.block = place_cut(p, blocks, static_cast<int>(target) - before);
  if (bound.block == blocks && blocks > 0) bound = {bound.request + 1, 0, tokens_of(bound.request + 1)};
  return bound;
}

// A part between two bounds. Bounds that lie inside a request cut it: its first piece ends at the first of them, its last
// begins at the last.
__device__ __forceinline__ Part part_of(const Shared& shared, int index) {
  const PartBound bound = shared.bounds[index], next = shared.bounds[index + 1];
  Part part = {bound.request, bound.block, bound.tokens, next.request, next.block, index, index, 0, index, {}};
  if (bound.block > 0) {
    const Run run = shared.runs[index];
    part.first_part = run.first - 1;
    part.last_part = run.last;
    part.first_slot = shared.bounds[run.first - 1].request == bound.request ? 0 : 1;
  }
  if (next.block > 0) {
    part.tail_last_part = shared.runs[index + 1].last;
    if (next.request == bound.request) part.last_part = part.tail_last_part;
  }
  return part;
}

__device__ void mla_schedule(const MlaScheduleParams& p) {
  __shared__ Shared shared;
  const int thread = threadIdx.x;
  const int per_thread = (p.batch + kScheduleThreads - 1) / kScheduleThreads;
  const int begin = min(thread * per_thread, p.batch);
  const int end = min(begin + per_thread, p.batch);

  grid_dependency_launch();
  grid_dependency_wait();

  // A thread takes consecutive requests.
  int cost = 0, first_tokens = 0;
  for (int request = begin; request < end; ++request) {
    const int length = length_of(p, request);
    p.seqlens[request] = length;
    if (request == begin) first_tokens = length;
    cost += blocks_of(length) + p.fixed_cost;
  }
  for (int i = thread; i < p.num_tickets; i += kScheduleThreads) p.tickets[i] = {};
  int total;
  shared.thread_tokens[thread] = first_tokens;
  shared.thread_starts[thread] = block_exclusive_sum(cost, shared.warp_values[0], total);
  __syncthreads();
  auto tokens_of = [&](int request) {
    return request >= p.batch ? 0 : per_thread == 1 ? shared.thread_tokens[request] : p.seqlens[request];
  };

  const int share = max((total + p.parts - 1) / p.parts, p.min_share);
  const int dearest = share + p.cut_cost;
  int piece = 0;
  if (2 * p.batch <= p.parts) {
    piece = find_piece(p, shared.thread_tokens, total - p.batch * p.fixed_cost, shared.warp_values[0]);
    if (piece + p.fixed_cost > dearest) piece = 0;
  }
  const int group = (p.batch + p.parts - 1) / p.parts;
  if (piece == 0 && price_of_whole(p, shared, per_thread, group, total) <= dearest) {
    if (thread >= p.parts) return;
    const int request = min(thread * group, p.batch);
    const int next = thread + 1 < p.parts ? min(request + group, p.batch) : p.batch;
    p.parts_out[thread] = {request, 0, tokens_of(request), next, 0, thread, thread, 0, thread, {}};
    return;
  }

  const PartBound bound = piece > 0 ? bound_apart(p, shared, piece)
                                    : bound_split(p, shared, per_thread, share, total, tokens_of);
  const bool cuts = thread < p.parts && bound.block > 0;
  const Run run = find_run(cuts ? bound.request : -1, shared.edges, shared.edge_requests);
  if (thread <= p.parts) {
    shared.bounds[thread] = bound;
    shared.runs[thread] = run;
  }
  __syncthreads();
  if (thread < p.parts) p.parts_out[thread] = part_of(shared, thread);
}

// Pieces of a request that is cut at multiples of piece_blocks. The last one is longer than the others where a cut
// would save less than min_saving.
__device__ __forceinline__ int fixed_pieces_of(const MlaScheduleParams& p, int tokens) {
  return 1 + static_cast<u32>(max(blocks_of(tokens) - p.min_saving, 0)) / static_cast<u32>(p.piece_blocks);
}

// All CTAs count the pieces of all requests; then each thread finds its own part's.
__device__ void mla_schedule_invariant(const MlaScheduleParams& p) {
  __shared__ int starts[kScheduleThreads];  // the part in which a thread's first request begins
  __shared__ int warp_sums[kScheduleWarps];
  const int thread = threadIdx.x, index = blockIdx.x * kScheduleThreads + thread;
  const int per_thread = (p.batch + kScheduleThreads - 1) / kScheduleThreads;
  const int begin = min(thread * per_thread, p.batch);
  const int end = min(begin + per_thread, p.batch);

  grid_dependency_launch();
  grid_dependency_wait();

  int count = 0;
  for (int request = begin; request < end; ++request) {
    const int length = length_of(p, request);
    if (blockIdx.x == 0) p.seqlens[request] = length;
    count += fixed_pieces_of(p, length);
  }
  for (int i = index; i < p.num_tickets; i += gridDim.x * kScheduleThreads) p.tickets[i] = {};
  int all;
  starts[thread] = block_exclusive_sum(count, warp_sums, all);
  __syncthreads();
  if (index >= p.parts) return;
  if (index >= all) {
    p.parts_out[index] = {p.batch, 0, 0, p.batch, 0, index, index, 0, index, {}};
    return;
  }

  int owner = 0;
#pragma unroll
  for (int step = kScheduleThreads / 2; step > 0; step /= 2)
    if (starts[owner + step] <= index) owner += step;
  int request = owner * per_thread, first = starts[owner];
  int tokens = length_of(p, request), pieces = fixed_pieces_of(p, tokens);
  // Lengths are read again; should they have changed meanwhile, there are no requests behind the last one.
  while (first + pieces <= index && request + 1 < p.batch) {
    first += pieces;
    tokens = length_of(p, ++request);
    pieces = fixed_pieces_of(p, tokens);
  }
  const int piece = index - first, last = first + pieces - 1;
  const bool ends = index == last;
  p.parts_out[index] = {request, piece * p.piece_blocks, tokens, ends ? request + 1 : request,
                        ends ? 0 : (piece + 1) * p.piece_blocks, first, last, 0, ends ? index : last, {}};
}

}  // namespace cumla
