// SPDX-License-Identifier: Apache-2.0
// Packs requests of different lengths into parts of similar cost with few splits: longest processing time first.
#pragma once
#include "split/schedule/layout.cuh"
#include "ptx/types.cuh"

namespace cumla::split {

constexpr int kLimits = 8;  // cost limits that are tried, one per warp
constexpr int kPackedRequests = 256, kPackedParts = 160;  // at most
constexpr int kPackedShare = 1 << 20;  // largest share: costs of requests fit 23 bits, those of parts 24
constexpr int kPartsOfLane = kPackedParts / 32;
constexpr int kNever = 0x7fffffff;  // cost if packing is impossible

__device__ __forceinline__ int divide(u64 numerator, u32 denominator) {
  if (numerator >> 32 == 0) return static_cast<u32>(numerator) / denominator;  // 32-bit division is much faster
  return static_cast<int>(numerator / denominator);
}

// The result of packing, for each limit, request and part.
struct Packing {
  u32 sorted[kScheduleThreads];  // the most expensive first
  unsigned char cuts[kScheduleThreads];  // splits of a request
  // The part of a request or of its rest, and the rank among the entries of its kind there.
  unsigned char part[kScheduleThreads], rank[kScheduleThreads];
  unsigned char whole[kLimits][kPackedParts];    // unsplit requests in a part
  short rests[kLimits][kPackedParts][2];         // requests whose rests are in a part, or -1
  int cost[kLimits];                             // of the most expensive part
  // For the chosen limit: the parts before this one, including those of its rests, << 16 | the places before it.
  u32 begins[kPackedParts];
  unsigned char order[kPackedRequests];
};

// A cost limit, and the splits that it makes.
struct Limit {
  int limit, size;  // size: blocks of a segment that fills a part

  __device__ __forceinline__ Limit(const ScheduleParams& p, int limit)
      : limit(limit), size(limit - p.fixed_cost - p.piece_cost) {}
  __device__ __forceinline__ int cuts(const ScheduleParams& p, int blocks) const {
    return blocks + p.fixed_cost > limit ? (blocks - 1) / size : 0;
  }
  // Blocks that do not have parts of their own.
  __device__ __forceinline__ int rest(const ScheduleParams& p, int blocks, int cuts) const {
    return cuts > 0 ? max(blocks - cuts * size, p.min_blocks) : blocks;
  }
};

// Higher costs have greater keys; of equal costs, lower request numbers.
__device__ __forceinline__ u32 key_of(int cost, int request, bool is_rest) {
  return static_cast<u32>(cost) << 9 | (255 - request) << 1 | (is_rest ? 1 : 0);
}

// One warp. For each part of a lane: the rank of its cost among all `others` parts, the cheapest first and, of equal
// ones, the lowest number. Part k has the k-th sorted request, so parts are in reverse order except within runs of
// equal cost.
__device__ __forceinline__ void places_of_costs(const u32* sorted, int others, int (&places)[kPartsOfLane]) {
  const int lane = threadIdx.x % 32;
  const u32 behind = ~1u << lane;  // lanes after this one
  u32 begins[kPartsOfLane];  // mask of lanes whose parts begin a run
  int first = 0, next = others;
#pragma unroll
  for (int j = 0; j < kPartsOfLane; ++j) {
    const int part = lane + 32 * j;
    const bool begins_run = part > 0 && part < others && (sorted[part] ^ sorted[part - 1]) >> 9 != 0;
    begins[j] = __ballot_sync(0xffffffffu, begins_run);
    const u32 before = begins[j] & ~behind;
    places[j] = part - (before != 0 ? 32 * j + 31 - __clz(before) : first);
    if (begins[j] != 0) first = 32 * j + 31 - __clz(begins[j]);
  }
#pragma unroll
  for (int j = kPartsOfLane - 1; j >= 0; --j) {
    const u32 after = begins[j] & behind;
    places[j] += others - (after != 0 ? 32 * j + __ffs(after) - 1 : next);
    if (begins[j] != 0) next = 32 * j + __ffs(begins[j]) - 1;
  }
}

// One warp puts the sorted requests into `others` parts, each into the cheapest part that may take it; of equal ones,
// the lowest number. A lane keeps every 32nd part as cost << 8 | number.
// 1. The first requests find empty parts.
// 2. The next ones go to the parts in order of cost, all at once. This ends at a part that is not cheaper than some
// part with two requests. One request at a time would give the same result.
// 3. The others go one at a time. The chain from one request to the next is a few instructions and a reduction. Lane
// i keeps the part of the i-th of 32 requests, and their ranks are computed afterwards, all at once.
__device__ __forceinline__ int pack(const ScheduleParams& p, Packing& packing, int trial, int slots, int others) {
  const int lane = threadIdx.x % 32;
  const u32* const sorted = packing.sorted + trial * slots;
  // The slot of a key's request
  auto slot_of = [&](u32 key) { return trial * slots + 255 - static_cast<int>(key >> 1 & 0xff); };
  u32 cost[kPartsOfLane], rests = 0;  // rests: two bits per part
  int placed = min(others, p.batch);
#pragma unroll
  for (int j = 0; j < kPartsOfLane; ++j) {
    const int part = lane + 32 * j;
    const u32 key = part < placed ? sorted[part] : 0;
    cost[j] = part < others ? key >> 9 << 8 | part : ~0u;
    rests |= (key & 1) << 2 * j;
    packing.whole[trial][part] = 0;
    packing.rests[trial][part][0] = packing.rests[trial][part][1] = -1;
  }
  if (others < p.batch) {
    int places[kPartsOfLane];
    u32 keys[kPartsOfLane], cheapest = ~0u, seconds = 0;
    places_of_costs(sorted, others, places);
#pragma unroll
    for (int j = 0; j < kPartsOfLane; ++j) {
      keys[j] = lane + 32 * j < others && places[j] < p.batch - others ? sorted[others + places[j]] : 0;
      if (keys[j] != 0) cheapest = min(cheapest, (cost[j] >> 8) + (keys[j] >> 9));
    }
    cheapest = __reduce_min_sync(0xffffffffu, cheapest);  // of the parts with two requests
#pragma unroll
    for (int j = 0; j < kPartsOfLane; ++j) {
      if (keys[j] == 0 || cost[j] >> 8 >= cheapest) continue;
      cost[j] += keys[j] >> 9 << 8;
      rests += (keys[j] & 1) << 2 * j;
      packing.part[slot_of(keys[j])] = lane + 32 * j;
      ++seconds;
    }
    placed += __reduce_add_sync(0xffffffffu, seconds);
    __syncwarp();
  }
#pragma unroll 1
  for (int base = 0; base < p.batch; base += 32) {
    const u32 keys = sorted[min(base + lane, p.batch - 1)];
    const int at = slot_of(keys);
    u32 part = base + lane < others ? base + lane : packing.part[at];
#pragma unroll 1
    for (int i = max(placed - base, 0); i < min(p.batch - base, 32); ++i) {
      const u32 key = __shfl_sync(0xffffffffu, keys, i);
      const bool is_rest = key & 1;
      const u32 full = is_rest ? rests : 0;
      u32 cheapest = ~0u;
#pragma unroll
      for (int j = 0; j < kPartsOfLane; ++j) cheapest = min(cheapest, full >> (2 * j + 1) & 1 ? ~0u : cost[j]);
      const u32 taken = __reduce_min_sync(0xffffffffu, cheapest);
#pragma unroll
      for (int j = 0; j < kPartsOfLane; ++j) {
        if (cost[j] != taken) continue;
        cost[j] += key >> 9 << 8;
        rests += (key & 1) << 2 * j;
      }
      if (lane == i) part = taken & 0xff;
    }
    const bool valid = base + lane < p.batch, is_rest = keys & 1;
    const u32 alike = __match_any_sync(0xffffffffu, valid ? part << 1 | (is_rest ? 1 : 0) : 0x10000 + lane);
    int rank = __popc(alike & ((1u << lane) - 1));
    if (valid) rank += is_rest ? packing.rests[trial][part][0] >= 0 : packing.whole[trial][part];
    __syncwarp();
    if (valid) {
      packing.part[at] = part;
      packing.rank[at] = rank;
      if (is_rest)
        packing.rests[trial][part][rank] = at - trial * slots;
      else if (alike >> lane == 1)
        packing.whole[trial][part] = rank + 1;
    }
    __syncwarp();
  }
  u32 dearest = 0;
#pragma unroll
  for (int j = 0; j < kPartsOfLane; ++j)
    if (lane + 32 * j < others) dearest = max(dearest, cost[j] >> 8);
  return __reduce_max_sync(0xffffffffu, dearest);
}

struct Packed {
  int limit, trial, slots;
  int cost;  // of the most expensive part; kNever if no limit fits
};

// Tries limits from an equal share upwards. Each thread has one request under one limit: it computes a key, and
// counts the greater keys, which gives its rank. Then one warp per limit packs the requests.
__device__ __forceinline__ Packed find_packed(const ScheduleParams& p, Packing& packing, u32* keys,
                                              const int* tokens, int share) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int slots = (p.batch + 31) / 32 * 32, trials = min(kLimits, kScheduleThreads / slots);
  const int least = max(share, p.fixed_cost + p.piece_cost + 2 * p.min_blocks - 1);
  const int beyond = p.fixed_cost + 2 * p.piece_cost;
  const int step = max((beyond + trials - 2) / (trials - 1), share / 64);
  const int trial = static_cast<int>(threadIdx.x) / slots, request = static_cast<int>(threadIdx.x) - trial * slots;
  u32 key = 0;
  if (trial < trials) {
    int cuts = 0;
    if (request < p.batch) {
      const Limit limit(p, least + trial * step);
      const int blocks = blocks_of(tokens[request]);
      cuts = limit.cuts(p, blocks);
      const int cost = limit.rest(p, blocks, cuts) + p.fixed_cost + (cuts > 0 ? p.piece_cost : 0);
      key = key_of(cost, request, cuts > 0);
    }
    keys[threadIdx.x] = key >> 1;  // keys differ in these bits
    packing.cuts[threadIdx.x] = min(cuts, kPackedParts);
  }
  __syncthreads();
  if (trial < trials && request < p.batch) {
    const int own = key >> 1;
    const int4* const of_limit = reinterpret_cast<const int4*>(keys + trial * slots);
    u32 rank = 0;
    // The sign bit of a difference takes fewer instructions than a comparison.
#pragma unroll 4
    for (int i = 0; i < slots / 4; ++i) {
      const int4 others = of_limit[i];
      rank += static_cast<u32>(own - others.x) >> 31;
      rank += static_cast<u32>(own - others.y) >> 31;
      rank += static_cast<u32>(own - others.z) >> 31;
      rank += static_cast<u32>(own - others.w) >> 31;
    }
    packing.sorted[trial * slots + rank] = key;
  }
  __syncthreads();
  if (warp < trials) {
    int own = 0, rests = 0;
#pragma unroll 1
    for (int i = lane; i < p.batch; i += 32) {
      const int cuts = packing.cuts[warp * slots + i];
      own += cuts;
      rests += cuts > 0;
    }
    own = __reduce_add_sync(0xffffffffu, own);
    rests = __reduce_add_sync(0xffffffffu, rests);
    const int others = p.parts - own;
    int cost = kNever;
    if (others >= 1 && rests <= 2 * others) {
      cost = pack(p, packing, warp, slots, others);
      if (rests > 0) cost = max(cost, least + warp * step);
    }
    if (lane == 0) packing.cost[warp] = cost;
  }
  __syncthreads();
  const int cost = lane < trials ? packing.cost[lane] : kNever;
  const int best = __reduce_min_sync(0xffffffffu, cost);
  const int taken = __ffs(__ballot_sync(0xffffffffu, cost == best)) - 1;
  return {least + taken * step, taken, slots, best};
}

// Lays out the packed parts, writes the order of requests, and returns the bound of this thread's part. Each part of
// `others` forms a group: [full segments of the first rest] part [full segments of the second rest]; the same holds
// for places. `run`: the bounds that split the same request.
__device__ __forceinline__ PartBound bound_packed(const ScheduleParams& p, Packing& packing, const int* tokens,
                                                  int* warp_sums, const Packed& packed, Run& run) {
  const int thread = threadIdx.x;
  const Limit limit(p, packed.limit);
  const unsigned char* const cuts = packing.cuts + packed.trial * packed.slots;
  const auto& rests = packing.rests[packed.trial];
  u32 size = 0;  // of a group: parts << 16 | places
  if (thread < kPackedParts) {
    const int first = rests[thread][0], last = rests[thread][1];
    size = packing.whole[packed.trial][thread] + (first >= 0 ? 1 + (cuts[first] << 16) : 0) +
           (last >= 0 ? 1 + (cuts[last] << 16) : 0) + (1 << 16);
  }
  int all;
  const u32 begins = block_exclusive_sum(static_cast<int>(size), warp_sums, all);
  if (thread < kPackedParts) packing.begins[thread] = begins;
  __syncthreads();
  if (thread < p.batch) {
    const int at = packed.trial * packed.slots + thread, part = packing.part[at], rank = packing.rank[at];
    int place = (packing.begins[part] & 0xffff) + rank;
    if (cuts[thread] == 0) place += rests[part][0] >= 0;
    else if (rank == 1) place += packing.whole[packed.trial][part];
    packing.order[place] = thread;
    p.places[place] = {thread, tokens[thread]};
  }
  __syncthreads();
  if (thread >= p.parts) return {p.batch, 0, 0, 0};
  int group = 0;
#pragma unroll
  for (int step = 128; step > 0; step /= 2)
    if (group + step < kPackedParts && packing.begins[group + step] >> 16 <= thread) group += step;
  const int first = rests[group][0], last = rests[group][1];
  const int own = first >= 0 ? cuts[first] : 0;  // parts of the first rest before the group's own
  const int begin = packing.begins[group] >> 16;
  int place = packing.begins[group] & 0xffff, index = thread - begin, block = 0;
  if (place >= p.batch) return {p.batch, 0, 0, 0};
  if (index <= own) {
    run = {begin + 1, begin + own};
    if (first >= 0) {
      const int blocks = blocks_of(tokens[first]);
      block = divide(static_cast<u64>(index) * (blocks - limit.rest(p, blocks, own)), own);
    }
  } else {
    run = {begin + own + 1, begin + own + cuts[last]};
    index -= own + 1;
    place += packing.whole[packed.trial][group] + (first >= 0);
    const int blocks = blocks_of(tokens[last]), rest = limit.rest(p, blocks, cuts[last]);
    block = rest + divide(static_cast<u64>(index) * (blocks - rest), cuts[last]);
  }
  const int request = packing.order[place];
  return {place, block, request, tokens[request]};
}

}  // namespace cumla::split
