// SPDX-License-Identifier: Apache-2.0
// Divides query tokens into row tiles, for attention to the blocks of several lists (block_tiles.cu).
//
// A tile has up to tile_tokens consecutive tokens of one request; tokens of no request have tiles as well. Each token
// is in one tile, whatever the offsets of requests are. The places of tiles have the order of their tokens.
//
// kWidened: it also gives each block of a request, up to the end of its cached tokens, a slot of the widened caches.
// A request whose blocks go past the last slot has none, and base -1: block_tiles.cu leaves its tiles.
//
// grid = 1 CTA of 1,024 threads. Once per step, after block_rows.
//
// Time line; B is a barrier of the CTA (__syncthreads), and there are no mbarriers:
//   kWidened: clear slots
//   for each 1,024 tokens: find where requests begin | B | count tiles that begin here | B | write their places
//   kWidened: | B | write slots, a warp those of a request
// Barriers guard the last beginnings of warps, their counts, and cleared slots.
// Budget: 64 registers per thread, 384 B of shared memory.
#include "blocks/rows.cuh"
#include "blocks/slots.cuh"
#include "split/division.cuh"
#include "split/plan.cuh"
#include "split/scan.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

using namespace ptx;
using namespace split;

struct BlockPlacesParams {
  const BlockRow* rows;  // [total_tokens]
  TilePlace* places;     // [max_places]
  Part* parts_out;       // [parts]; part i has every parts-th tile from i on, by numbers of its own from 0 on
  Ticket* tickets;       // [1]
  int* count_out;        // [1] tiles
  int total_tokens;
  int max_places;
  int tile_tokens;
  int parts;
};

struct WidenedPlacesParams : BlockPlacesParams {
  int* bases_out;   // [requests]: the slot of the first block; -1: the request has no slots
  Slot* slots_out;  // [slots]
  int requests;
  int slots;
  Divisor by_block_size;
};

constexpr u32 kAllLanes = 0xffffffffu;

template <typename Params>
constexpr bool kWidened = false;
template <>
constexpr bool kWidened<WidenedPlacesParams> = true;

template <typename Params>
__device__ __forceinline__ void block_places(const Params& p) {
  __shared__ int begins[kScheduleWarps], warp_sums[kScheduleWarps];
  grid_dependency_launch();
  grid_dependency_wait();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __shared__ int block_sums[kScheduleWarps];
  int count = 0, running = 0;  // tiles so far; the first token of the request that continues
  int slots = 0;               // so far
  if constexpr (kWidened<Params>)
    for (int i = threadIdx.x; i < p.slots; i += kScheduleThreads) p.slots_out[i] = {-1, -1};
#pragma unroll 1
  for (int base = 0; base < p.total_tokens; base += kScheduleThreads) {
    const int token = base + static_cast<int>(threadIdx.x);
    const bool exists = token < p.total_tokens;
    const int request = exists ? p.rows[token].request : -1;
    const bool begins_here = exists && (token == 0 || p.rows[token - 1].request != request);
    const u32 of_warp = __ballot_sync(kAllLanes, begins_here), before = of_warp & (kAllLanes >> (31 - lane));
    if (lane == 0) begins[warp] = of_warp == 0 ? -1 : token + 31 - __clz(of_warp);
    __syncthreads();
    const int earlier = __reduce_max_sync(kAllLanes, lane < warp ? begins[lane] : -1);
    const int begin = before == 0 ? max(earlier, running) : token - lane + 31 - __clz(before);
    running = max(running, __reduce_max_sync(kAllLanes, begins[lane]));
    const bool is_first = exists && (token - begin) % p.tile_tokens == 0;
    int all;
    const int index = count + block_exclusive_sum(static_cast<int>(is_first), warp_sums, all);
    if (is_first && index < p.max_places) {
      int end = token + 1;
      while (end < p.total_tokens && end < token + p.tile_tokens && p.rows[end].request == request) ++end;
      p.places[index] = {p.rows[end - 1].seen(kMaxTokens), 0, end - token, token, index, 0};
    }
    count += all;
    if constexpr (kWidened<Params>) {
      int tokens = 0, all_blocks;
      const bool is_request = begins_here && static_cast<u32>(request) < static_cast<u32>(p.requests);
      if (is_request) tokens = min(max(p.rows[token].tokens, 0), kMaxTokens);
      // Capped, so that the sum of 1,024 fits an int.
      const int blocks = tokens > 0 ? min(static_cast<int>(quotient(tokens - 1, p.by_block_size)), p.slots) + 1 : 0;
      const int first = slots + block_exclusive_sum(blocks, block_sums, all_blocks);
      const bool fits = blocks > 0 && blocks <= p.slots - first;
      if (is_request) p.bases_out[request] = fits ? first : -1;
      for (u32 left = __ballot_sync(kAllLanes, fits); left != 0; left &= left - 1) {
        const int from = __ffs(left) - 1, owner = __shfl_sync(kAllLanes, request, from);
        const int begin_slot = __shfl_sync(kAllLanes, first, from), number = __shfl_sync(kAllLanes, blocks, from);
        for (int i = lane; i < number; i += 32) p.slots_out[begin_slot + i] = {owner, i};
      }
      slots = min(slots + all_blocks, p.slots);
    }
  }
  count = min(count, p.max_places);
  for (int i = threadIdx.x; i < p.parts; i += kScheduleThreads) {
    Part part = {};  // it is loaded whole
    part.end_place = (count - i + p.parts - 1) / p.parts;
    p.parts_out[i] = part;
  }
  if (threadIdx.x == 0) {
    p.tickets[0] = {};
    *p.count_out = count;
  }
}

}  // namespace cumla::blocks
