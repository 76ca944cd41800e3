// SPDX-License-Identifier: Apache-2.0
// Turns lists of blocks into pages of virtual requests, and deals these out: the attention kernels of mha/attention
// then attend to them as to any request.
//
// A virtual request is a query token of one kv head. It has the heads of that kv head as query rows, one kv head, and
// as pages the blocks of its list: each once, in ascending order, without those that do not exist or that the query
// does not see. Only the last one can end within the block, so the length of the virtual request cuts it. A virtual
// page is a block of one kv head; its number counts steps of a common divisor of all strides.
//
// The CTA of a virtual request writes its pages, its place in the schedule (split/plan.cuh), and what it knows of the
// parts: the beginnings of parts that begin in it, and the ends of those before. All lists count as full there, so no
// CTA waits for another one. Bounds of parts are scaled to the blocks that a list really has. A batch-invariant
// request is split every piece_blocks blocks.
//
// grid = (virtual requests), 128 threads; 32 for lists of up to 32 entries.
//
// Roles and time line of a CTA; B is a barrier of the CTA (__syncthreads), and there are no mbarriers:
//   look up pages of 1,024 entries | for each window of 65,536 blocks: clear a bitmap | B | set a bit per entry | B |
//   count bits of warps | B | of words | B | write pages, where the bits before theirs say | B
//   place, parts
// of a warp, for short lists:
//   look up the page of an entry | compare its block with those of other lanes | write pages | place, parts
// Barriers guard the bitmap, and the numbers of bits of warps and of words.
// Budget: 72 registers per thread, 16.4 KB of shared memory; for short lists 46, and none.
#include "blocks/lists.cuh"
#include "split/division.cuh"
#include "split/plan.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

using namespace ptx;
using namespace split;

constexpr int kShortThreads = 32;  // and entries
constexpr int kMinPiece = 2;       // blocks of 64 tokens before a split, and between two
constexpr int kOwn = 8;            // entries of a thread that are loaded at once: of lists of up to 1,024

// pages_out is [virtual requests, topk].
struct BlockListsParams : ListsParams {
  TilePlace* places;  // [virtual requests]
  Part* parts_out;    // [parts]
  Ticket* tickets;    // [num_tickets]
  i64 cost;           // of a full list: its blocks of 64 tokens, and what a request costs beside them
  int virtual_requests;
  int parts;
  int num_tickets;
  int is_whole;      // no virtual request is split
  int piece_blocks;  // batch-invariant: blocks of a piece, else 0
  int pieces;        // batch-invariant: parts of each virtual request
};

// The virtual request of a CTA.
struct ListRow : List {
  int index;
  i64 first;  // the first entry of this thread, loaded while the row is

  __device__ __forceinline__ explicit ListRow(const BlockListsParams& p) : ListRow(p, blockIdx.x) {}
  __device__ __forceinline__ ListRow(const BlockListsParams& p, int index)
      : List(p, quotient(index, p.by_kv_heads), index - quotient(index, p.by_kv_heads) * p.kv_heads), index(index) {
    first = static_cast<int>(threadIdx.x) < count ? entry_at(p, threadIdx.x) : -1;
  }

  __device__ __forceinline__ Listed at(const BlockListsParams& p, int i) const {
    if (i >= count) return {-1, -1};
    return named(p, i == static_cast<int>(threadIdx.x) ? first : entry_at(p, i));
  }
};

// Entries of a thread, and what they name: the loads of all are on the way at once.
struct OwnEntries {
  Listed named[kOwn];

  __device__ __forceinline__ OwnEntries(const BlockListsParams& p, const ListRow& row) {
    int low[kOwn], high[kOwn];  // halves of entries; of narrow ones the sign is what counts
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const int i = threadIdx.x + j * kListThreads;
      const char* const at = row.entries + i * p.entries_stride_entry;
      low[j] = -1;
      high[j] = 0;
      if (i < row.count) low[j] = *reinterpret_cast<const int*>(at);
      if (i < row.count && p.entries_are_wide) high[j] = *reinterpret_cast<const int*>(at + 4);
    }
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const int block = quotient(static_cast<u32>(low[j]), p.by_entry);
      named[j] = {low[j] >= 0 && high[j] == 0 && block < row.blocks ? block : -1, -1};
    }
    const int* const table = p.block_table + row.request * p.block_table_stride;
#pragma unroll
    for (int j = 0; j < kOwn; ++j)
      if (named[j].block >= 0) named[j].page = table[quotient(named[j].block, p.by_blocks_per_page)];
#pragma unroll
    for (int j = 0; j < kOwn; ++j)
      if (static_cast<u32>(named[j].page) >= static_cast<u32>(p.num_pages)) named[j].block = -1;
  }
};

// Writes the pages of a list in ascending order of its blocks, each once, and returns their tokens. The first words
// of the bitmap, one per thread, are clear.
__device__ __forceinline__ int write_pages(const BlockListsParams& p, const ListRow& row, ListShared& shared) {
  int* const pages_out = p.pages_out + static_cast<i64>(row.index) * p.topk;
  const OwnEntries own(p, row);
  int missing = 0;  // tokens of the last block that the query does not see
  const auto for_each = [&](auto do_it) {
#pragma unroll
    for (int j = 0; j < kOwn; ++j) do_it(own.named[j]);
    for (int i = kOwn * kListThreads + threadIdx.x; i < row.count; i += kListThreads)
      do_it(row.named(p, row.entry_at(p, i)));
  };
  const int found = put_in_order(
      shared, row.count > 0 ? row.blocks : 0, p.topk, for_each, [](int, int) {},
      [&](const Listed& listed, int at) { pages_out[at] = row.virtual_page(p, listed); },
      [&](int begin) {
        const int last = row.blocks - 1 - begin;
        if (last < kWindow && (shared.words[last / 32] >> last % 32 & 1))
          missing = p.block_size - (row.seen - (row.blocks - 1) * p.block_size);
      });
  return found * p.block_size - missing;
}

// The same for lists of up to 32 entries, by one warp.
__device__ __forceinline__ int write_few_pages(const BlockListsParams& p, const ListRow& row) {
  int* const pages_out = p.pages_out + static_cast<i64>(row.index) * p.topk;
  const int lane = threadIdx.x;
  const Listed own = row.at(p, lane);
  u32 lower = 0, equal = 0;  // a bit per lane whose block is lower, or the same
#pragma unroll 8
  for (int i = 0; i < p.topk; ++i) {
    const int block = __shfl_sync(0xffffffffu, own.block, i);
    lower |= static_cast<u32>(block < own.block) << i;
    equal |= static_cast<u32>(block == own.block) << i;
  }
  const bool is_first = own.block >= 0 && (equal & ((1u << lane) - 1)) == 0;
  const u32 distinct = __ballot_sync(0xffffffffu, is_first);
  if (is_first) pages_out[__popc(lower & distinct)] = row.virtual_page(p, own);
  const bool has_last = __any_sync(0xffffffffu, own.block >= 0 && own.block == row.blocks - 1);
  const int missing = has_last ? p.block_size - (row.seen - (row.blocks - 1) * p.block_size) : 0;
  return __popc(distinct) * p.block_size - missing;
}

// The bounds of parts that lie in a virtual request: at multiples of 1 / parts of the work of all, if all lists were
// full. Bounds in one request have different blocks, unless these are 0.
struct Bounds {
  const BlockListsParams& p;
  int place, blocks, first, end;  // blocks of 64 tokens; bounds in this place

  __device__ __forceinline__ Bounds(const BlockListsParams& p, int place, int tokens) : p(p), place(place) {
    blocks = blocks_of(tokens);
    first = bound_of(place);
    end = bound_of(place + 1);
  }
  // The first bound at or after the beginning of a place.
  __device__ __forceinline__ int bound_of(int at) const {
    return static_cast<int>((static_cast<i64>(at) * p.parts + p.virtual_requests - 1) / p.virtual_requests);
  }
  __device__ __forceinline__ int block_at(int bound) const {
    // Bounds that would be less than a piece apart are all at the beginning.
    if (p.is_whole || static_cast<i64>(blocks) * p.virtual_requests < static_cast<i64>(kMinPiece) * p.parts) return 0;
    const i64 at = static_cast<i64>(bound) * p.virtual_requests * p.cost / p.parts - place * p.cost;
    const int block = static_cast<int>(at * blocks / p.cost);
    return block < kMinPiece ? 0 : block;
  }
};

// Each thread writes a part that begins here, and the end of the part before it.
template <int kThreads>
__device__ __forceinline__ void write_parts(const BlockListsParams& p, int place, int tokens) {
  const Bounds bounds(p, place, tokens);
  // The bounds that split the request are the last ones of those here.
  int first_split = bounds.end;
  if (bounds.first < bounds.end && bounds.block_at(bounds.end - 1) > 0) {
    first_split = bounds.first;
    while (bounds.block_at(first_split) == 0) ++first_split;
  }
  const bool splits = first_split < bounds.end;
  const int first_part = first_split - 1, last_part = bounds.end - 1;  // of a split request
  for (int i = bounds.first + threadIdx.x; i < bounds.end; i += kThreads) {
    const int block = bounds.block_at(i);
    const bool has_piece = splits && i >= first_part;
    Part& part = p.parts_out[i];
    part.place = place;
    part.block = block;
    part.request = 0;
    part.tokens = tokens;
    part.first_part = has_piece ? first_part : i;
    part.last_part = has_piece ? last_part : i;
    // The part before all splits may have begun in an earlier place.
    part.first_slot = block > 0 && first_part < bounds.first;
    part.unused[0] = part.unused[1] = 0;  // it is loaded whole
    if (i < p.num_tickets) p.tickets[i] = {};
    if (i == 0) continue;
    Part& before = p.parts_out[i - 1];
    before.end_place = place;
    before.end_block = block;
    before.tail_last_part = block > 0 ? last_part : i - 1;
  }
  if (place + 1 == p.virtual_requests && threadIdx.x == 0) {
    Part& last = p.parts_out[p.parts - 1];
    last.end_place = place + 1;
    last.end_block = 0;
    last.tail_last_part = p.parts - 1;
  }
}

// The same with splits at fixed positions. Parts that are not needed are empty.
template <int kThreads>
__device__ __forceinline__ void write_pieces(const BlockListsParams& p, int place, int tokens) {
  const int begin = place * p.pieces;
  const int count = min(max((blocks_of(tokens) + p.piece_blocks - 1) / p.piece_blocks, 1), p.pieces);
  for (int i = threadIdx.x; i < p.pieces; i += kThreads) {
    const int index = begin + i, block = i * p.piece_blocks, last = begin + count - 1;
    const bool ends = index == last;
    if (i < count)
      p.parts_out[index] = {place, block, 0, tokens, ends ? place + 1 : place, ends ? 0 : block + p.piece_blocks,
                            begin, last, 0, ends ? index : last, {}};
    else
      p.parts_out[index] = {p.virtual_requests, 0, 0, 0, p.virtual_requests, 0, index, index, 0, index, {}};
    if (index < p.num_tickets) p.tickets[index] = {};
  }
}

template <int kThreads>
__device__ __forceinline__ void write_schedule(const BlockListsParams& p, int place, int tokens) {
  if (threadIdx.x == 0) p.places[place] = {tokens, 0, 1, place, place, 0};
  if (p.piece_blocks > 0)
    write_pieces<kThreads>(p, place, tokens);
  else
    write_parts<kThreads>(p, place, tokens);
}

template <int kThreads>
__device__ __forceinline__ void block_lists(const BlockListsParams& p) {
  if constexpr (kThreads == kShortThreads) {
    grid_dependency_launch();
    grid_dependency_wait();
    const ListRow row(p);
    write_schedule<kThreads>(p, row.index, write_few_pages(p, row));
  } else {
    __shared__ ListShared shared;
    shared.words[threadIdx.x] = 0;
    grid_dependency_launch();
    grid_dependency_wait();
    const ListRow row(p);
    write_schedule<kThreads>(p, row.index, write_pages(p, row, shared));
  }
}

}  // namespace cumla::blocks
