// SPDX-License-Identifier: Apache-2.0
// Who works on which KV blocks, parallel over the batch. See mla_plan.cuh for the terms.
//
// mla_schedule, one CTA: a request costs its number of blocks + fixed_cost. Three ways to deal the requests out:
//   apart: each request alone, in equal pieces of one part each, where there are at least two parts a request and pieces
//          get no larger than an equal share and what cutting costs; a request that cutting would not make shorter by
//          min_saving stays whole; else
//   whole: ceil(batch / parts) consecutive requests to a part, no request cut, where that costs little more than equal
//          shares, or no more than the dearest part of the third way; else
//   filled: parts take requests up to a common limit, one part after the other, and cut those that do not fit; a piece
//          of a request costs piece_cost more. The limit is the least of a few with which the parts suffice. More
//          requests than threads get equal shares of the summed cost instead, cut wherever a share ends.
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
constexpr int kMaxLimits = 16;       // that are tried for filled parts, by a warp each
constexpr int kFilledBounds = 4096;  // of all that are tried
constexpr int kNowhere = -0x7fffffff;  // no lane ends the part
static_assert(kFilledBounds / kMaxParts >= 2, "two limits have a step between them");

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
  int piece_cost;  // of a piece, in blocks: to be stored, counted and joined; half of it where shares are long
  int long_share;  // a share that costs more is long
  int min_blocks;  // no cut of filled parts or of shares is closer to an end of its request
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

struct PartBound {
  int request, block, tokens;
};

__device__ __forceinline__ int divide(u64 numerator, u32 denominator) {
  if (numerator >> 32 == 0) return static_cast<u32>(numerator) / denominator;  // five times as fast
  return static_cast<int>(numerator / denominator);
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
  int thread_starts[kScheduleThreads + 1];  // cost of all requests before a thread's first one; the last: of all
  int thread_tokens[kScheduleThreads];      // of a thread's first request
  int filled_bounds[kFilledBounds];         // `parts` for each limit
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

// One warp fills parts up to a cost of `limit` each. On the axis of summed costs, where request r has starts[r] ...
// starts[r + 1], bounds[i] becomes the place at which part i begins; a cut of it at block b is at starts[r] + b. False if
// there are too few parts.
//
// A part takes whole requests while it has room. The next one is cut, where the room ends less `lost`, what the end of a
// piece costs, or the part ends before it; a part that begins in a request has piece_cost less room. A cut that is worth
// less than that is made only in requests that no part could hold.
//
// Each lane looks at one request, of 32 at a time, until these are all dealt out. A part is a chain of eight dependent
// instructions and a reduction over the warp: a budget of 80 clocks.
//
// The limit must be at least fixed_cost + piece_cost + 2 * min_blocks - 1: then what lies between two cuts of a request
// has min_blocks, and what does not fit behind a cut can be cut again.
__device__ __forceinline__ bool fill_parts(const MlaScheduleParams& p, const int* starts, int total, int limit,
                                           int piece_cost, int* bounds) {
  const int lane = threadIdx.x % 32;
  const int lost = p.fixed_cost + piece_cost;
  int part = 1;
  int cut_at = limit - lost;  // the end of this part's room, less what is lost if a request is cut there
  for (int base = 0; base < p.batch; base += 32) {
    const int start = starts[base + lane], end = starts[base + lane + 1];
    const int first_cut = start + (end - start > limit ? p.min_blocks : max(p.min_blocks, piece_cost + 1));
    const int last_cut = end - p.fixed_cost - p.min_blocks;
    int cut_again_at = 0;  // if this request was cut: between two cuts lies what costs the limit
    while (true) {
      const int cut = min(max(cut_at, cut_again_at), last_cut);
      const bool cuts = cut >= first_cut;
      const int bound = cuts ? cut : start;
      const bool ends = start - lost <= cut_at && cut_at < end - lost;
      const int next = bound + limit - lost - (cuts ? piece_cost : 0);
      const int next_cut_at = __reduce_max_sync(0xffffffffu, ends ? next : kNowhere);
      if (next_cut_at == kNowhere) break;  // the part takes all that is left of these requests
      if (part == p.parts) return false;
      if (ends) bounds[part] = bound;
      if (ends && cuts) cut_again_at = cut + limit - lost;
      cut_at = next_cut_at;
      ++part;
    }
  }
  if (lane == 0) bounds[0] = 0;
  for (int i = part + lane; i < p.parts; i += 32) bounds[i] = total;
  return true;
}

struct Filled {
  int limit;
  const int* bounds;
};

// The least limit, of a few from an equal share on, with which all requests fit into the parts. Each warp tries one, and
// the last always will do. Let d = max(piece_cost, min_blocks - 1). From one part to the next, reach grows by
//   limit - fixed_cost - 2 * piece_cost where it cuts a request (- piece_cost where that was cut before),
//   limit - fixed_cost - piece_cost - (min_blocks - 1) at least where the cut must leave min_blocks behind it,
//   limit - fixed_cost - piece_cost - d at least where a cut would be too close to the request's begin, and
//   limit - fixed_cost - (min_blocks - 1) - d at least where a request is too short to be cut.
// So with limit = share + fixed_cost + 2 * d it grows by a share at least, starts behind the first, and is behind `parts`
// shares, which are all requests, in the last part.
__device__ __forceinline__ Filled find_filled(const MlaScheduleParams& p, Shared& shared, int share, int total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int piece_cost = share > p.long_share ? p.piece_cost / 2 : p.piece_cost;
  const int least = max(share, p.fixed_cost + piece_cost + 2 * p.min_blocks - 1);
  const int beyond = p.fixed_cost + 2 * max(piece_cost, p.min_blocks - 1);
  const int limits = min(kMaxLimits, kFilledBounds / p.parts);
  const int step = (beyond + limits - 2) / (limits - 1);
  int* feasible = shared.warp_values[0];
  bool fits = false;
  if (warp < limits)
    fits = fill_parts(p, shared.thread_starts, total, least + warp * step, piece_cost,
                      shared.filled_bounds + warp * p.parts);
  if (lane == 0) feasible[warp] = fits;
  __syncthreads();
  const int found = __ffs(__ballot_sync(0xffffffffu, feasible[lane] != 0)) - 1;
  return {least + found * step, shared.filled_bounds + found * p.parts};
}

// The bound at a place on the axis of costs: a cut not closer than min_blocks to the ends of its request, but before or
// behind it. Those of filled parts stay where they are.
template <typename TokensOf>
__device__ __forceinline__ PartBound bound_at(const MlaScheduleParams& p, const Shared& shared, int per_thread,
                                              int place, int total, TokensOf tokens_of) {
  if (place >= total) return {p.batch, 0, 0};
  int owner = 0;
#pragma unroll
  for (int step = kScheduleThreads / 2; step > 0; step /= 2)
    if (shared.thread_starts[owner + step] <= place) owner += step;
  int request = owner * per_thread, tokens = shared.thread_tokens[owner];
  int block = place - shared.thread_starts[owner];
  while (block >= blocks_of(tokens) + p.fixed_cost) {
    block -= blocks_of(tokens) + p.fixed_cost;
    tokens = tokens_of(++request);
  }
  if (block < p.min_blocks) return {request, 0, tokens};
  if (blocks_of(tokens) - block < p.min_blocks) return {request + 1, 0, tokens_of(request + 1)};
  return {request, block, tokens};
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
  if (thread == 0) shared.thread_starts[kScheduleThreads] = total;
  __syncthreads();
  auto tokens_of = [&](int request) {
    return request >= p.batch ? 0 : per_thread == 1 ? shared.thread_tokens[request] : p.seqlens[request];
  };
  auto start_of = [&](int request) {
    if (per_thread == 1) return shared.thread_starts[request];
    const int owner = request / per_thread;
    int start = shared.thread_starts[owner];
    for (int before = owner * per_thread; before < request; ++before)
      start += blocks_of(tokens_of(before)) + p.fixed_cost;
    return start;
  };

  const int share = max((total + p.parts - 1) / p.parts, p.min_share);
  int piece = 0;
  if (2 * p.batch <= p.parts) {
    piece = find_piece(p, shared.thread_tokens, total - p.batch * p.fixed_cost, shared.warp_values[0]);
    if (piece + p.fixed_cost > share + p.cut_cost) piece = 0;
  }
  int place = total;  // where this thread's part begins on the axis of costs, if parts are filled or shares
  if (piece == 0) {
    const int group = (p.batch + p.parts - 1) / p.parts;
    const int first = thread < p.parts ? min(thread * group, p.batch) : p.batch;
    const int next = min(first + group, p.batch);
    const int price = start_of(next) - start_of(first);
    // Nearly equal groups are taken at once: 128 of 132 multiprocessors, 1/32 dearer than shares, were as fast as all.
    const int limit = share + (per_thread == 1 ? min(p.cut_cost, share / 32) : p.cut_cost);
    bool dearer = __syncthreads_or(price > limit);
    if (dearer && per_thread == 1) {
      const Filled filled = find_filled(p, shared, share, total);
      dearer = __syncthreads_or(price > filled.limit);
      if (thread < p.parts) place = filled.bounds[thread];
    } else if (thread < p.parts) {
      place = static_cast<int>(min(static_cast<i64>(thread) * share, static_cast<i64>(total)));
    }
    if (!dearer) {
      if (thread < p.parts)
        p.parts_out[thread] = {first, 0, tokens_of(first), next, 0, thread, thread, 0, thread, {}};
      return;
    }
  }

  const PartBound bound = piece > 0 ? bound_apart(p, shared, piece)
                                    : bound_at(p, shared, per_thread, place, total, tokens_of);
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
