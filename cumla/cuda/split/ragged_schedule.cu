// SPDX-License-Identifier: Apache-2.0
// Assigns row tiles and their KV blocks to parts, if query lengths differ (terms: split/plan.cuh). Kernels over a
// RaggedTile follow it.
//
// A request has q_len x heads_per_group query rows of a kv head, in tiles of row_tile. Each tile has a place in the
// schedule, and costs the blocks that its rows see plus fixed_cost. Blocks before the windows of all rows of a tile
// are not assigned. docs/kernels/schedule.md explains the ways:
//   round robin    each part gets every parts-th tile; the tiles of a part have consecutive places
//   equal shares   each part costs the same; a tile is split where a share ends
//   equal splits   each tile is split into equal segments, at most one per part
//
// Roles and time line, one CTA of 32 warps; B is a barrier of the CTA (__syncthreads), and there are no mbarriers:
//   small batch    every warp holds all requests, one per lane; a thread writes its part; B with a vote; done
//   others         count tiles | B | write tiles | B | sort whole tiles | B | sum up costs | B | price round robin |
//                  B | bounds of shares | B | sizes of splits, one per warp | B | find runs | B | write parts
// Barriers guard the arrays of RaggedShared: every thread arrives, once per B.
//
// A mixed batch takes a second CTA, which schedules the whole tiles of attention_prefill: is_whole().
//
// Budget: 1,024 threads, so 64 registers per thread; one RaggedShared of static shared memory, below 48 KiB.
//
// tests/launch/split/ragged_schedule_mirror.py is its oracle in NumPy.
#include "split/division.cuh"
#include "split/plan.cuh"
#include "split/schedule/parts.cuh"
#include "ptx/convert.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::split {

using namespace ptx;

// True in split/ragged_schedule_numbered.cu: places have the numbers of their requests.
#ifdef CUMLA_NUMBERS_REQUESTS
constexpr bool kNumbersRequests = true;
#else
constexpr bool kNumbersRequests = false;
#endif

// The run of this thread's bound, which splits the tile at `place`; -1: it splits none. __match_any_sync finds the
// runs within a warp. Runs that touch its edges continue in the neighbouring warps.
__device__ __forceinline__ Run find_run(int place, Run (&edges)[kScheduleWarps][2],
                                        int (&edge_places)[kScheduleWarps][2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, base = warp * 32;
  const u32 same = __match_any_sync(0xffffffffu, place);
  Run run = {base + __ffs(same) - 1, base + 31 - __clz(same)};
  if (lane % 31 == 0) {
    edges[warp][lane / 31] = run;
    edge_places[warp][lane / 31] = place;
  }
  __syncthreads();
  if (place < 0) return run;
  for (int w = warp; run.first == w * 32 && w > 0 && edge_places[w - 1][1] == place; --w)
    run.first = edges[w - 1][1].first;
  for (int w = warp; run.last == w * 32 + 31 && w < kScheduleWarps - 1 && edge_places[w + 1][0] == place; ++w)
    run.last = edges[w + 1][0].last;
  return run;
}

// The arrays and sizes of one schedule.
struct ScheduleOf {
  TilePlace* places;  // [max_places]
  Part* parts_out;    // [parts]
  Ticket* tickets;    // [num_tickets]
  int max_places;
  int parts;
  int num_tickets;
  int row_tile;  // query rows
  Divisor by_parts, by_row_tile;
};

struct RaggedScheduleParams : ScheduleOf {
  const int* qo_indptr;  // [batch + 1]; nullptr: each request has q_len tokens
  i64 qo_indptr_stride;  // in elements, as all strides here
  const int* kv_lens;    // [batch]; nullptr: kv_indptr gives the lengths
  i64 kv_lens_stride;
  const int* kv_indptr;  // [batch + 1]: first page of each request; nullptr: request r has row r of a block table
  i64 kv_indptr_stride;
  int batch;
  int total_tokens;  // rows of q
  int heads_per_group;
  int page_size;
  int causal;
  int fixed_cost;  // of a tile or of a segment of one, in blocks
  int piece_cost;  // of a partial result, in blocks: it is stored, counted and combined
  int min_blocks;  // no split is closer to an end of its tile
  int min_share;   // least cost of a share
  int q_len;       // of each request, if there is no qo_indptr
  Divisor by_heads_per_group;
  int shares;        // a short tile is not whole if its blocks x `shares` exceed `blocks`
  int window_left;   // visible keys before a query's own position; -1: no window
  int is_small;      // schedule_small() may serve the batch: at most 32 requests and at most `parts`
  ScheduleOf whole;  // whole tiles of a mixed batch; places is nullptr for other batches
  i64 blocks;        // set by the kernel: blocks of all tiles of a mixed batch; -1: no request is long
};

// The query tokens of a request, clamped to q, so that no qo_indptr leads out of it.
struct Queries {
  int begin, count;

  __device__ __forceinline__ Queries(const RaggedScheduleParams& p, int request) {
    if (p.qo_indptr == nullptr) {
      begin = request * p.q_len;
      count = p.q_len;
    } else {
      begin = min(max(p.qo_indptr[request * p.qo_indptr_stride], 0), p.total_tokens);
      // Clamped before the subtraction, which could overflow.
      count = min(max(p.qo_indptr[(request + 1) * p.qo_indptr_stride], begin), p.total_tokens) - begin;
    }
  }
};

__device__ __forceinline__ int tiles_of(const ScheduleOf& p, u32 rows) {  // rows: below 2^31
  const u32 full = quotient(rows, p.by_row_tile);
  return full + (full * p.row_tile < rows);
}
__device__ __forceinline__ int tiles_of(const RaggedScheduleParams& p, const Queries& queries) {
  return tiles_of(p, queries.count * p.heads_per_group);
}

// The first tile of a request.
__device__ __forceinline__ TilePlace first_tile(const RaggedScheduleParams& p, int request, const Queries& queries) {
  i64 tokens = p.kv_lens == nullptr ? kMaxTokens : max(p.kv_lens[request * p.kv_lens_stride], 0), pages = request;
  if (p.kv_indptr != nullptr) {
    pages = p.kv_indptr[request * p.kv_indptr_stride];
    tokens = min(tokens, max(p.kv_indptr[(request + 1) * p.kv_indptr_stride] - pages, i64{0}) * p.page_size);
  }
  return {static_cast<int>(min(tokens, static_cast<i64>(kMaxTokens))), 0, queries.count, queries.begin, pages,
          kNumbersRequests ? request : 0};
}

// Leading blocks that are before the windows of all rows of a tile.
__device__ __forceinline__ int hidden_blocks(const RaggedScheduleParams& p, const TilePlace& tile) {
  if (p.window_left < 0) return 0;
  const int first = tile.tokens - tile.q_len + static_cast<int>(quotient(tile.first_row, p.by_heads_per_group));
  return max(first - min(p.window_left, tile.tokens), 0) / kBlockTokens;
}

// Blocks that at least one row of a tile sees. They follow the hidden blocks.
__device__ __forceinline__ int visible_blocks(const RaggedScheduleParams& p, const TilePlace& tile) {
  const int hidden = hidden_blocks(p, tile);
  if (!p.causal) return blocks_of(tile.tokens) - hidden;
  const int last_row = min(tile.first_row + p.row_tile, tile.q_len * p.heads_per_group) - 1;
  const int tokens = tile.tokens - (tile.q_len - 1 - static_cast<int>(quotient(last_row, p.by_heads_per_group)));
  return blocks_of(max(tokens, 0)) - hidden;
}

// A request of a mixed batch has whole tiles if it has many query rows, or few rows and few blocks.
__device__ __forceinline__ bool is_whole(const RaggedScheduleParams& p, int request, const Queries& queries) {
  return queries.count * p.heads_per_group > kRowTile ||
         i64{blocks_of(first_tile(p, request, queries).tokens)} * p.shares <= p.blocks;
}

// The queries of a request if this CTA's schedule has the request, else none.
__device__ __forceinline__ Queries own_queries(const RaggedScheduleParams& p, int request) {
  Queries queries(p, request);
  if (p.whole.places != nullptr && is_whole(p, request, queries) != (blockIdx.x > 0)) queries.count = 0;
  return queries;
}

struct RaggedShared {
  i64 warp_sums[2][kScheduleWarps];
  int tile_starts[kScheduleThreads];  // tiles of all requests before a thread's first one
  i64 cost_starts[kScheduleThreads];  // cost of all places before a thread's first one
  PartBound bounds[kMaxParts + 1];
  Run runs[kMaxParts + 1];
  Run edges[kScheduleWarps][2];
  int edge_places[kScheduleWarps][2];
  int blocks[kScheduleThreads];         // visible blocks of the tiles at the first places
  int piece_costs[kScheduleWarps];      // of the most expensive segment, for each size that is tried
  int dearest[kScheduleWarps];          // cost of a share, per warp
};

__device__ __forceinline__ int blocks_at(const RaggedScheduleParams& p, const RaggedShared& shared, int place) {
  return place < kScheduleThreads ? shared.blocks[place] : visible_blocks(p, p.places[place]);
}

// The last thread whose start is at most `place`.
template <typename Start>
__device__ __forceinline__ int owner_of(const Start* starts, i64 place) {
  int owner = 0;
#pragma unroll 1
  for (int step = kScheduleThreads / 2; step > 0; step /= 2)
    if (starts[owner + step] <= place) owner += step;
  return owner;
}

// Round robin: the first place of a part. Parts with one more tile than others come first.
__device__ __forceinline__ int first_place(const RaggedScheduleParams& p, int part, int tiles) {
  const int each = quotient(tiles, p.by_parts);
  return part * each + min(part, tiles - each * p.parts);
}

// Writes tiles [tile, end).
__device__ __forceinline__ void write_tiles(const RaggedScheduleParams& p, RaggedShared& shared, int tile, int end,
                                            int tiles, int requests_of_thread) {
  if (tile >= end) return;
  const int owner = owner_of(shared.tile_starts, tile);
  int request = owner * requests_of_thread, skip = tile - shared.tile_starts[owner];
  Queries queries = own_queries(p, request);
  for (int tiles_there; skip >= (tiles_there = tiles_of(p, queries)) && request + 1 < p.batch;) {
    skip -= tiles_there;
    queries = own_queries(p, ++request);
  }
  TilePlace place = first_tile(p, request, queries);
  place.first_row = skip * p.row_tile;
#pragma unroll 1
  while (true) {
    const int turn = quotient(tile, p.by_parts);
    const int at = first_place(p, tile - turn * p.parts, tiles) + turn;
    p.places[at] = place;
    if (at < kScheduleThreads) shared.blocks[at] = visible_blocks(p, place);
    if (++tile >= end) return;
    place.first_row += p.row_tile;
    if (place.first_row < place.q_len * p.heads_per_group) continue;
    do {
      if (++request >= p.batch) return;
      queries = own_queries(p, request);
    } while (queries.count == 0);
    place = first_tile(p, request, queries);
  }
}

// Sorts whole tiles by visible blocks, without windows. attention_prefill takes them from the last place, so the
// largest are last. There is one part, and at most as many tiles as threads. A short tile, which one consumer
// computes, counts half.
__device__ __forceinline__ void sort_tiles(const RaggedScheduleParams& p, RaggedShared& shared, int tiles) {
  const int thread = threadIdx.x;
  TilePlace place;
  int blocks = 0, own = 0, at = 0;
  if (thread < tiles) {
    place = p.places[thread];
    blocks = shared.blocks[thread];
    own = shared.tile_starts[thread] = blocks * (place.q_len * p.heads_per_group - place.first_row > kRowTile ? 2 : 1);
  }
  __syncthreads();
#pragma unroll 4
  for (int i = 0; i < tiles; ++i) at += shared.tile_starts[i] < own + (i < thread);
  if (thread < tiles) {
    p.places[at] = place;
    shared.blocks[at] = blocks;
  }
}

// The cost of all places before one.
__device__ __forceinline__ i64 cost_before(const RaggedScheduleParams& p, const RaggedShared& shared, int place,
                                           int tiles_of_thread) {
  const int owner = place / tiles_of_thread;
  i64 cost = shared.cost_starts[owner];
#pragma unroll 1
  for (int i = owner * tiles_of_thread; i < place; ++i) cost += blocks_at(p, shared, i) + p.fixed_cost;
  return cost;
}

// The bound of a share. A split less than min_blocks from an end of its tile moves to that end.
__device__ __forceinline__ PartBound bound_at(const RaggedScheduleParams& p, const RaggedShared& shared, i64 at,
                                              i64 total, int tiles, int tiles_of_thread) {
  if (at >= total) return {tiles, 0, 0, 0};
  const int owner = owner_of(shared.cost_starts, at);
  int place = owner * tiles_of_thread, blocks = blocks_at(p, shared, place);
  i64 block = at - shared.cost_starts[owner];
#pragma unroll 1
  while (block >= blocks + p.fixed_cost && place + 1 < tiles) {
    block -= blocks + p.fixed_cost;
    blocks = blocks_at(p, shared, ++place);
  }
  if (block < p.min_blocks) return {place, 0, 0, 0};
  if (blocks - block < p.min_blocks) return {place + 1, 0, 0, 0};
  return {place, static_cast<int>(block), 0, 0};
}

// Exact for quotients below 2^20; larger ones stay large.
__device__ __forceinline__ int small_quotient(int dividend, int divisor) {
  const int guess = static_cast<int>(static_cast<float>(dividend) * reciprocal_approx(static_cast<float>(divisor)));
  const int rest = dividend - guess * divisor;
  return guess + (rest >= divisor) - (rest < 0);
}

// Segments of a tile: of at most `size` blocks, if none has fewer than min_blocks.
__device__ __forceinline__ int pieces_of(const RaggedScheduleParams& p, int blocks, int size) {
  return max(min(small_quotient(blocks + size - 1, size), small_quotient(blocks, p.min_blocks)), 1);
}

// The cost of a part between two bounds, if there are no more tiles than parts: fixed_cost per segment, and
// piece_cost per segment of a split tile.
__device__ __forceinline__ int cost_between(const RaggedScheduleParams& p, const i64* cost_starts, i64 total,
                                            int tiles, const PartBound& bound, const PartBound& next) {
  const auto at = [&](const PartBound& b) { return b.block + (b.place < tiles ? cost_starts[b.place] : total); };
  const bool same = next.place == bound.place;
  const int tail = next.block > (same ? bound.block : 0), head = !same && bound.block > 0;
  return at(next) - at(bound) + tail * p.fixed_cost + (tail + head) * p.piece_cost;
}

constexpr int kTooMany = 0x7fffffff;  // cost of a size that needs more segments than parts

// The segment size that needs at most `parts` segments, and whose most expensive segment is cheapest; 0 if the most
// expensive share costs less. Each warp tries one of 32 sizes, from the least one on. of_share: the cost of this
// thread's share.
__device__ __forceinline__ int piece_size(const RaggedScheduleParams& p, RaggedShared& shared, int tiles, int share,
                                          int of_share) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int least = max(share - p.fixed_cost, p.min_blocks), size = least + warp;
  int count = 0, cost = 0;
  for (int i = lane; i < tiles; i += 32) {
    const int pieces = pieces_of(p, shared.blocks[i], size);
    count += pieces;
    const int largest = small_quotient(shared.blocks[i] + pieces - 1, pieces);
    cost = max(cost, largest + p.fixed_cost + (pieces > 1 ? p.piece_cost : 0));
  }
  count = __reduce_add_sync(0xffffffffu, count);
  cost = __reduce_max_sync(0xffffffffu, cost);
  of_share = __reduce_max_sync(0xffffffffu, of_share);
  if (lane == 0) {
    shared.piece_costs[warp] = count <= p.parts ? cost : kTooMany;
    shared.dearest[warp] = of_share;
  }
  __syncthreads();
  const int tried = shared.piece_costs[lane];
  const int cheapest = __reduce_min_sync(0xffffffffu, tried);
  const int dearest = __reduce_max_sync(0xffffffffu, shared.dearest[lane]);
  return cheapest > dearest ? 0 : least + __ffs(__ballot_sync(0xffffffffu, tried == cheapest)) - 1;
}

// The bound of this thread's part if tiles are split into segments of `size` blocks.
__device__ __forceinline__ PartBound bound_of_piece(const RaggedScheduleParams& p, RaggedShared& shared, int tiles,
                                                    int size) {
  const int thread = threadIdx.x, own = thread < tiles ? pieces_of(p, shared.blocks[thread], size) : 0;
  i64 count;
  shared.tile_starts[thread] = block_exclusive_sum(static_cast<i64>(own), shared.warp_sums[0], count);
  __syncthreads();
  if (thread >= count) return {tiles, 0, 0, 0};
  const int tile = owner_of(shared.tile_starts, thread), piece = thread - shared.tile_starts[tile];
  const int pieces = shared.tile_starts[tile + 1] - shared.tile_starts[tile], blocks = shared.blocks[tile];
  const int each = small_quotient(blocks, pieces);
  return {tile, piece * each + min(piece, blocks - each * pieces), 0, 0};
}

// First block of segment `index`, if `blocks` are split into `pieces` equal segments.
__device__ __forceinline__ int piece_begin(int blocks, int pieces, int index) {
  const int each = small_quotient(blocks, pieces);
  return index * each + min(index, blocks - each * pieces);
}

// Schedules a small batch without a barrier: a lane has a request, a thread has a part, and every warp computes the
// same. Returns false, and writes nothing, if a request has several tiles, or if equal splits might cost more than
// shares.
__device__ __forceinline__ bool schedule_small(const RaggedScheduleParams& p) {
  const int lane = threadIdx.x % 32, part = threadIdx.x;
  const Queries queries(p, min(lane, p.batch - 1));
  const TilePlace tile = first_tile(p, min(lane, p.batch - 1), queries);
  const bool exists = lane < p.batch && queries.count > 0;
  if (__any_sync(0xffffffffu, exists && tiles_of(p, queries) > 1)) return false;
  const u32 all = __ballot_sync(0xffffffffu, exists);
  const int tiles = __popc(all), place = __popc(all & ((1u << lane) - 1));
  const int hidden = hidden_blocks(p, tile), blocks = exists ? visible_blocks(p, tile) : 0;
  const int cost = exists ? blocks + p.fixed_cost : 0;
  const int total = __reduce_add_sync(0xffffffffu, cost), dearest = __reduce_max_sync(0xffffffffu, cost);
  const int share = max(static_cast<int>(quotient(total + p.parts - 1, p.by_parts)), p.min_share);
  int pieces = exists ? 1 : 0;
  if (dearest > share + p.fixed_cost + 2 * p.piece_cost) {
    const int least = max(share - p.fixed_cost, p.min_blocks);
    int count = 0, worst = 0;
#pragma unroll 1
    for (u32 rest = all; rest != 0; rest &= rest - 1) {
      const int there = __shfl_sync(0xffffffffu, blocks, __ffs(rest) - 1), own = pieces_of(p, there, least + lane);
      count += own;
      worst = max(worst, small_quotient(there + own - 1, own) + p.fixed_cost + (own > 1 ? p.piece_cost : 0));
    }
    if (count > p.parts) worst = kTooMany;
    const int cheapest = __reduce_min_sync(0xffffffffu, worst);
    if (cheapest > share + p.fixed_cost + p.piece_cost) return false;
    const int size = least + __ffs(__ballot_sync(0xffffffffu, worst == cheapest)) - 1;
    if (exists) pieces = pieces_of(p, blocks, size);
  }
  const int end = warp_inclusive_sum(pieces);
  int owner = -1;
#pragma unroll 1
  for (u32 rest = all; rest != 0; rest &= rest - 1) {
    const int i = __ffs(rest) - 1, end_there = __shfl_sync(0xffffffffu, end, i);
    if (owner < 0 && part < end_there) owner = i;
  }
  const int from = max(owner, 0), count = __shfl_sync(0xffffffffu, pieces, from);
  const int first = __shfl_sync(0xffffffffu, end, from) - count, index = part - first;
  const int there = __shfl_sync(0xffffffffu, blocks, from), before = __shfl_sync(0xffffffffu, hidden, from);
  const int at = __shfl_sync(0xffffffffu, place, from);
  if (part < 32 && exists) p.places[place] = tile;
  for (int i = threadIdx.x; i < p.num_tickets; i += (p.parts + 31) / 32 * 32) p.tickets[i] = {};
  if (part >= p.parts) return true;
  Part found = {tiles, 0, 0, 0, tiles, 0, part, part, 0, part, {}};
  if (owner >= 0) {
    const bool begins = index == 0, ends = index == count - 1;
    found.place = at;
    found.block = begins ? 0 : before + piece_begin(there, count, index);
    found.end_place = ends ? at + 1 : at;
    found.end_block = ends ? 0 : before + piece_begin(there, count, index + 1);
    found.first_part = first;
    found.last_part = first + count - 1;
    found.tail_last_part = ends ? part : first + count - 1;
  }
  p.parts_out[part] = found;
  return true;
}

// Blocks of all tiles of a mixed batch if all were whole; -1 if no request has many query rows.
__device__ __forceinline__ i64 mixed_blocks(const RaggedScheduleParams& p, RaggedShared& shared,
                                            int requests_of_thread) {
  i64 blocks = 0, total;
  bool has_many = false;
  for (int i = 0; i < requests_of_thread; ++i) {
    const int request = threadIdx.x * requests_of_thread + i;
    if (request >= p.batch) break;
    const Queries queries(p, request);
    const u32 rows = queries.count * p.heads_per_group;
    has_many |= rows > kRowTile;
    blocks += i64{tiles_of(p.whole, rows)} * blocks_of(first_tile(p, request, queries).tokens);
  }
  block_exclusive_sum(blocks, shared.warp_sums[1], total);
  return __syncthreads_or(has_many) ? total : -1;
}

__device__ __forceinline__ void ragged_schedule(const RaggedScheduleParams& given) {
  __shared__ RaggedShared shared;
  RaggedScheduleParams p = given;
  const int thread = threadIdx.x;
  const int requests_of_thread = (p.batch + kScheduleThreads - 1) / kScheduleThreads;

  grid_dependency_launch();
  grid_dependency_wait();

  if (given.is_small != 0) {
    const bool done = thread / 32 * 32 < given.parts && schedule_small(given);
    if (__syncthreads_or(done)) return;
  }
  if (p.whole.places != nullptr) p.blocks = mixed_blocks(p, shared, requests_of_thread);
  if (blockIdx.x > 0) {
    static_cast<ScheduleOf&>(p) = p.whole;
    p.window_left = -1;  // whole tiles are sorted as if there were no window
  }
  i64 count = 0, all_tiles;
  for (int i = 0; i < requests_of_thread; ++i) {
    const int request = thread * requests_of_thread + i;
    if (request < p.batch) count += tiles_of(p, own_queries(p, request));
  }
  for (int i = thread; i < p.num_tickets; i += kScheduleThreads) p.tickets[i] = {};
  // There are more tiles than places only if qo_indptr decreases.
  const i64 tiles_before = block_exclusive_sum(count, shared.warp_sums[0], all_tiles), places = p.max_places;
  shared.tile_starts[thread] = min(tiles_before, places);
  __syncthreads();
  const int tiles = min(all_tiles, places);
  const int tiles_of_thread = (tiles + kScheduleThreads - 1) / kScheduleThreads;
  const int first = min(thread * tiles_of_thread, tiles), last = min(first + tiles_of_thread, tiles);
  write_tiles(p, shared, first, last, tiles, requests_of_thread);
  __syncthreads();
  if (p.row_tile > kRowTile && tiles <= kScheduleThreads) {
    sort_tiles(p, shared, tiles);
    __syncthreads();
  }
  i64 total, cost = 0;
  for (int place = first; place < last; ++place) cost += blocks_at(p, shared, place) + p.fixed_cost;
  shared.cost_starts[thread] = block_exclusive_sum(cost, shared.warp_sums[1], total);
  __syncthreads();

  const i64 share = max((total + p.parts - 1) / p.parts, static_cast<i64>(p.min_share));
  const int dealt = thread < p.parts ? first_place(p, thread, tiles) : tiles;
  const int next = thread < p.parts ? first_place(p, thread + 1, tiles) : tiles;
  i64 price = 0;
  if (dealt < next) {
    price = (next < tiles ? cost_before(p, shared, next, tiles_of_thread) : total) -
            cost_before(p, shared, dealt, tiles_of_thread);
  }
  PartBound bound = {dealt, 0, 0, 0};
  if (__syncthreads_or(price > share + p.fixed_cost + 2 * p.piece_cost)) {
    const i64 at = thread < p.parts ? thread * share : total;
    bound = bound_at(p, shared, at, total, tiles, tiles_of_thread);
    if (tiles <= p.parts) {
      if (thread <= p.parts) shared.bounds[thread] = bound;
      __syncthreads();
      int cost = 0;
      if (thread < p.parts)
        cost = cost_between(p, shared.cost_starts, total, tiles, shared.bounds[thread], shared.bounds[thread + 1]);
      const int size = piece_size(p, shared, tiles, share, cost);
      if (size > 0) bound = bound_of_piece(p, shared, tiles, size);
    }
  }
  const bool cuts = thread < p.parts && bound.block > 0;
  if (cuts && p.window_left >= 0) bound.block += hidden_blocks(p, p.places[bound.place]);
  const Run run = find_run(cuts ? bound.place : -1, shared.edges, shared.edge_places);
  if (thread <= p.parts) {
    shared.bounds[thread] = bound;
    shared.runs[thread] = run;
  }
  __syncthreads();
  if (thread < p.parts) p.parts_out[thread] = part_of(shared.bounds, shared.runs, thread);
}

}  // namespace cumla::split
