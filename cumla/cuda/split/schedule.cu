// SPDX-License-Identifier: Apache-2.0
// Assigns the KV blocks of all requests to parts, if all requests have the same query length (terms: split/plan.cuh).
//
// schedule             one CTA: requests go `apart`, `whole`, `packed` or in `shares`; the first way that fits is taken
// schedule_invariant   a CTA per 1,024 parts: the length of each request alone decides where it is split
//
// A request costs its blocks + fixed_cost; each partial result costs piece_cost more. docs/kernels/schedule.md
// explains the ways.
//
// Roles and time line of `schedule`, 32 warps; B is a barrier of the CTA (__syncthreads), and there are no mbarriers:
//   apart    all warps read all lengths, try a segment size each | B | warps with parts number segments, write parts
//   whole    all warps read lengths, sum up costs | B | warps with parts price a group each | B | write parts
//   packed   as whole, then all warps sort under up to 8 limits | B | a warp per limit packs | B | lay out, write parts
//   shares   as whole, then warps with parts find their bounds | B | write parts
// Barriers guard the arrays of ScheduleShared: every thread arrives, once per B.
//
// Budget: 1,024 threads, 64 registers each; one ScheduleShared, below 48 KiB of static shared memory.
//
// tests/launch/split/schedule_mirror.py is its oracle in NumPy.
#include "split/schedule/layout.cuh"
#include "split/schedule/pack.cuh"
#include "split/schedule/parts.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::split {

using namespace ptx;

// Parts of a request that has its own ones. Its segments have at most `size` blocks.
__device__ __forceinline__ int pieces_of(const ScheduleParams& p, int tokens, int size) {
  const int blocks = blocks_of(tokens);
  return blocks - size < p.min_saving ? 1 : static_cast<u32>(blocks + size - 1) / static_cast<u32>(size);
}

// The cost of each part if all cost the same.
__device__ __forceinline__ int share_of(const ScheduleParams& p, int total) {
  return max(static_cast<int>(quotient(total + p.parts - 1, p.by_parts)), p.min_share);
}

struct ScheduleShared {
  int warp_values[2][kScheduleWarps];
  int thread_starts[kScheduleThreads];      // cost of a warp's requests before a thread's first one
  int thread_tokens[kScheduleThreads];      // length of a thread's first request
  Packing packing;
  PartBound bounds[kMaxParts + 1];
  union {
    alignas(16) u32 keys[kScheduleThreads];  // while requests are packed
    Run runs[kMaxParts + 1];
  };
};

// Apart: each request has its own parts, if there are at least two parts per request. Returns false if that is too
// expensive. Each warp reads all lengths and tries one segment size. Twice the least size always fits, apart from its
// cost: it needs at most parts / 2 + batch parts. Then each warp numbers the segments for itself, 32 requests at a
// time, and writes the parts of its lanes. `length`: that of request `lane`, or 0.
__device__ __forceinline__ bool deal_apart(const ScheduleParams& p, int length, int* warp_sizes) {
  const int thread = threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int blocks = blocks_of(length);
#pragma unroll 1
  for (int request = lane + 32; request < p.batch; request += 32) blocks += blocks_of(length_of(p, request));
  blocks = __reduce_add_sync(0xffffffffu, blocks);
  const int least = max(static_cast<int>(quotient(blocks + p.parts - 1, p.by_parts)), p.min_share);
  const int try_size = least + warp * max(least / 16, 1);
  int needed = lane < p.batch ? pieces_of(p, length, try_size) : 0;
#pragma unroll 1
  for (int request = lane + 32; request < p.batch; request += 32)
    needed += pieces_of(p, length_of(p, request), try_size);
  needed = __reduce_add_sync(0xffffffffu, needed);
  const int most = share_of(p, blocks + p.batch * p.fixed_cost) + p.cut_cost - p.fixed_cost;
  if (lane == 0) warp_sizes[warp] = needed <= p.parts && try_size <= most ? try_size : kNever;
  __syncthreads();
  const int size = __reduce_min_sync(0xffffffffu, warp_sizes[lane]);
  if (size == kNever) return false;

  const int base = warp * 32;  // first part of this warp
  if (base >= p.parts) return true;
  Part part = {p.batch, 0, 0, 0, p.batch, 0, thread, thread, 0, thread, {}};
  int before = 0, tokens = length;  // before: segments of earlier requests
#pragma unroll 1
  for (int request = lane; request - lane < p.batch; request += 32) {
    const bool valid = request < p.batch;
    if (valid && request != lane) tokens = length_of(p, request);
    const int pieces = valid ? pieces_of(p, tokens, size) : 0;
    if (valid && request == thread) p.places[request] = {request, tokens};
    const int end = before + warp_inclusive_sum(pieces);
    const int from = end - pieces - base;
    // Requests begin in different parts. So the count of requests that began up to a part gives the request of that
    // part.
    const u32 begins = __reduce_or_sync(0xffffffffu, valid && from >= 0 && from < 32 ? 1u << from : 0);
    const int owner = __popc(__ballot_sync(0xffffffffu, valid && from < 0)) + __popc(begins & ((2u << lane) - 1)) - 1;
    const int first = __shfl_sync(0xffffffffu, end - pieces, owner), count = __shfl_sync(0xffffffffu, pieces, owner);
    const int held = __shfl_sync(0xffffffffu, tokens, owner);
    if (owner >= 0 && thread < first + count) {
      const int index = thread - first, whose = request - lane + owner, last = first + count - 1;
      const u32 all = blocks_of(held), each = all / count, rest = all - each * count;  // index * all would need 64 bits
      const int block = index * each + index * rest / count, next = (index + 1) * each + (index + 1) * rest / count;
      const bool ends = thread == last;
      part = {whose, block, whose, held, ends ? whose + 1 : whose, ends ? 0 : next, first, last, 0, last, {}};
    }
    before = __shfl_sync(0xffffffffu, end, 31);
  }
  if (thread < p.parts) p.parts_out[thread] = part;
  return true;
}

// Shares: the bound and the run of this thread's part if all parts cost `share`. A split less than min_blocks from an
// end of its request moves to that end. `warp_start`: the cost of all requests before those of warp `lane`.
template <typename TokensOf>
__device__ __forceinline__ PartBound bound_at_share(const ScheduleParams& p, const ScheduleShared& shared,
                                                    int per_thread,
                                                    int share, int total, int warp_start, TokensOf tokens_of,
                                                    Run& run) {
  const i64 wanted = static_cast<i64>(threadIdx.x) * share;
  const int place = wanted < total ? static_cast<int>(wanted) : total - 1;
  int owner = 0;
#pragma unroll
  for (int step = kScheduleWarps / 2; step > 0; step /= 2)
    if (__shfl_sync(0xffffffffu, warp_start, owner + step) <= place) owner += step;
  int block = place - __shfl_sync(0xffffffffu, warp_start, owner);
  if (wanted >= total) return {p.batch, 0, 0, 0};
  owner *= 32;
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    if (shared.thread_starts[owner + step] <= block) owner += step;
  int request = owner * per_thread, tokens = shared.thread_tokens[owner];
  block -= shared.thread_starts[owner];
  while (block >= blocks_of(tokens) + p.fixed_cost) {
    block -= blocks_of(tokens) + p.fixed_cost;
    tokens = tokens_of(++request);
  }
  const u32 first_cut = place - block + p.min_blocks, last_cut = place - block + blocks_of(tokens) - p.min_blocks;
  run = {static_cast<int>((first_cut + share - 1) / share), static_cast<int>(last_cut / share)};
  if (blocks_of(tokens) - block < p.min_blocks && block >= p.min_blocks) {
    tokens = tokens_of(++request);
    block = 0;
  }
  if (request == p.batch) return {p.batch, 0, 0, 0};
  return {request, block < p.min_blocks ? 0 : block, request, tokens};
}

__device__ void schedule(const ScheduleParams& p) {
  __shared__ ScheduleShared shared;
  const int thread = threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int per_thread = static_cast<u32>(p.batch + kScheduleThreads - 1) / kScheduleThreads;
  const int begin = min(thread * per_thread, p.batch);
  const int end = min(begin + per_thread, p.batch);

  grid_dependency_launch();
  grid_dependency_wait();

  const bool maybe_apart = 2 * p.batch <= p.parts;
  const int mine = maybe_apart ? lane : begin;  // the request that is read first
  int first_tokens = mine < p.batch ? p.cache_seqlens[mine * p.cache_seqlens_stride] : 0;
#pragma unroll 1
  for (int i = thread; i < p.num_tickets; i += kScheduleThreads)  // while the load is in flight
    reinterpret_cast<uint4*>(p.tickets)[i] = {};
  first_tokens = clamp_length(p, first_tokens);
  if (maybe_apart) {
    if (deal_apart(p, first_tokens, shared.warp_values[1])) return;
    first_tokens = begin < end ? length_of(p, begin) : 0;
  }

  if (begin < end) p.places[begin] = {begin, first_tokens};
  int cost = begin < end ? blocks_of(first_tokens) + p.fixed_cost : 0;
#pragma unroll 1
  for (int request = begin + 1; request < end; ++request) {
    const int length = length_of(p, request);
    p.places[request] = {request, length};
    cost += blocks_of(length) + p.fixed_cost;
  }
  const int inclusive = warp_inclusive_sum(cost);
  shared.thread_tokens[thread] = first_tokens;
  shared.thread_starts[thread] = inclusive - cost;
  if (lane == 31) shared.warp_values[0][warp] = inclusive;
  __syncthreads();
  const int of_warp = shared.warp_values[0][lane];
  const int total = __reduce_add_sync(0xffffffffu, of_warp);
  const int share = share_of(p, total);
  auto tokens_of = [&](int request) {
    return request >= p.batch ? 0 : per_thread == 1 ? shared.thread_tokens[request] : p.places[request].tokens;
  };

  const bool has_bound = warp * 32 <= p.parts;  // so has a thread of this warp
  int first = p.batch, next = p.batch, price = 0, warp_start = 0;
  if (has_bound) {
    warp_start = warp_inclusive_sum(of_warp) - of_warp;
    auto start_of = [&](int request) {
      const int in_batch = request < p.batch ? request : 0, owner = per_thread == 1 ? in_batch : in_batch / per_thread;
      int start = __shfl_sync(0xffffffffu, warp_start, owner / 32) + shared.thread_starts[owner];
      for (int before = owner * per_thread; before < in_batch; ++before)
        start += blocks_of(tokens_of(before)) + p.fixed_cost;
      return request < p.batch ? start : total;
    };
    const int group = quotient(p.batch + p.parts - 1, p.by_parts);
    if (thread < p.parts) first = min(thread * group, p.batch);
    next = min(first + group, p.batch);
    price = start_of(next) - start_of(first);
  }
  const bool packable = p.batch <= kPackedRequests && p.parts <= kPackedParts && share <= kPackedShare;
  const int of_shares = share + p.fixed_cost + 2 * p.piece_cost;  // bound of the cost of a part of shares
  // Nearly equal groups are taken at once: splitting would cost more than the imbalance.
  const int nearly = share + min(p.cut_cost, share / 32);
  bool dearer = __syncthreads_or(price > (packable ? nearly : max(nearly, of_shares)));
  Packed packed = {0, 0, 0, kNever};
  if (dearer && packable) {
    packed = find_packed(p, shared.packing, shared.keys, shared.thread_tokens, share);
    if (packed.cost > max(of_shares, share + share / 20)) packed.cost = kNever;
    dearer = __syncthreads_or(price > (packed.cost != kNever ? packed.cost : of_shares));
  }
  if (!dearer) {
    if (thread < p.parts)
      p.parts_out[thread] = {first,  0, first < p.batch ? first : 0, tokens_of(first), next, 0, thread, thread, 0,
                             thread, {}};
    return;
  }
  PartBound bound = {};
  Run run = {};
  if (packed.cost != kNever)
    bound = bound_packed(p, shared.packing, shared.thread_tokens, shared.warp_values[1], packed, run);
  else if (has_bound)
    bound = bound_at_share(p, shared, per_thread, share, total, warp_start, tokens_of, run);

  if (thread <= p.parts) {
    shared.bounds[thread] = bound;
    shared.runs[thread] = run;
  }
  __syncthreads();
  if (thread < p.parts) p.parts_out[thread] = part_of(shared.bounds, shared.runs, thread);
}

// Partial results of a request that is split at multiples of piece_blocks. A last split that would save less than
// min_saving is left out.
__device__ __forceinline__ int fixed_pieces_of(const ScheduleParams& p, int tokens) {
  return 1 + static_cast<u32>(max(blocks_of(tokens) - p.min_saving, 0)) / static_cast<u32>(p.piece_blocks);
}

// Costs of the requests of a thread, a warp or a batch.
struct InvariantCosts {
  int blocks, parts, longest;  // parts: if requests that may have one part do; longest: of those, in blocks

  __device__ __forceinline__ void reduce() {
    blocks = __reduce_add_sync(0xffffffffu, blocks);
    parts = __reduce_add_sync(0xffffffffu, parts);
    longest = __reduce_max_sync(0xffffffffu, longest);
  }
  // True if it takes less time to give one part to each request that may have one. `pieces`: all partial results. A CTA
  // that has all of a request stores and loads most of them, and waits for no other. The longest may begin last.
  __device__ __forceinline__ bool gain_by_whole(const InvariantScheduleParams& p, int pieces) const {
    const auto waves = [&](int parts) { return static_cast<float>((parts + p.at_once - 1) / p.at_once); };
    const float whole = blocks + 2 * p.fixed_cost * pieces, apart = blocks + (p.fixed_cost + p.piece_cost) * pieces;
    const float mean = whole / parts, late = whole / p.at_once + (longest - mean) / 2;
    const float ends = fmaxf(fmaxf(waves(parts) * mean, late), longest);
    return parts < pieces && ends < waves(pieces) * (apart / pieces);
  }
};

// Every CTA counts the partial results of all requests; then each thread finds its own part. All parts of a request
// that has one are its first and empty ones.
__device__ void schedule_invariant(const InvariantScheduleParams& p) {
  __shared__ int starts[kScheduleThreads];  // part in which a thread's first request begins
  __shared__ int warp_sums[kScheduleWarps];
  __shared__ InvariantCosts warp_costs[kScheduleWarps];
  const int thread = threadIdx.x, lane = threadIdx.x % 32, index = blockIdx.x * kScheduleThreads + thread;
  const int per_thread = (p.batch + kScheduleThreads - 1) / kScheduleThreads;
  const int begin = min(thread * per_thread, p.batch);
  const int end = min(begin + per_thread, p.batch);

  grid_dependency_launch();
  grid_dependency_wait();

  int count = 0;
  InvariantCosts costs = {};
  for (int request = begin; request < end; ++request) {
    const int length = length_of(p, request), pieces = fixed_pieces_of(p, length), blocks = blocks_of(length);
    if (blockIdx.x == 0) p.places[request] = {request, length};
    count += pieces;
    costs.blocks += blocks;
    costs.parts += pieces <= p.most_pieces ? 1 : pieces;
    if (pieces <= p.most_pieces) costs.longest = max(costs.longest, blocks);
  }
  costs.reduce();
  if (lane == 0) warp_costs[thread / 32] = costs;
  for (int i = index; i < p.num_tickets; i += gridDim.x * kScheduleThreads) p.tickets[i] = {};
  int all;
  starts[thread] = block_exclusive_sum(count, warp_sums, all);
  __syncthreads();
  costs = warp_costs[lane];
  costs.reduce();
  if (index >= p.parts) return;
  const Part empty = {p.batch, 0, 0, 0, p.batch, 0, index, index, 0, index, {}};
  if (index >= all) {
    p.parts_out[index] = empty;
    return;
  }

  int owner = 0;
#pragma unroll
  for (int step = kScheduleThreads / 2; step > 0; step /= 2)
    if (starts[owner + step] <= index) owner += step;
  int request = owner * per_thread, first = starts[owner];
  int tokens = length_of(p, request), pieces = fixed_pieces_of(p, tokens);
  // Lengths are read again. If they have changed meanwhile, the loop must still end at the last request.
  while (first + pieces <= index && request + 1 < p.batch) {
    first += pieces;
    tokens = length_of(p, ++request);
    pieces = fixed_pieces_of(p, tokens);
  }
  const int piece = index - first, last = first + pieces - 1;
  if (pieces > 1 && pieces <= p.most_pieces && costs.gain_by_whole(p, all)) {
    const Part whole = {request, 0, request, tokens, request + 1, 0, first, last, 0, index, {p.piece_blocks}};
    p.parts_out[index] = piece == 0 ? whole : empty;
    return;
  }
  const bool ends = index == last;
  p.parts_out[index] = {request, piece * p.piece_blocks, request, tokens, ends ? request + 1 : request,
                        ends ? 0 : (piece + 1) * p.piece_blocks, first, last, 0, ends ? index : last, {}};
}

}  // namespace cumla::split
