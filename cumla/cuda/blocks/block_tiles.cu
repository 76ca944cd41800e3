// SPDX-License-Identifier: Apache-2.0
// Unites the lists of the query tokens of a row tile: mha/attention_prefill attends to all of these blocks, and a mask
// says which of them, and which of their keys, a query token sees.
//
// The CTA of a tile and kv head writes the pages of the blocks that some token of the tile lists and sees, each once,
// in ascending order. Of each 64 keys of such a block it writes a byte per query token: how many of them, counted from
// the first, the token sees. A virtual page is a block of all kv heads (launch/blocks/block_lists.py).
//
// kWidened: pages are slots of the widened caches (widen_blocks.cu). Lists that share few blocks, or whose request has
// no slots, are left.
//
// grid = (tiles x kv heads), 128 threads. The tiles are those of block_places.cu.
//
// Time line; B is a barrier of the CTA (__syncthreads), and there are no mbarriers:
//   look up the pages of entries | for each window of 65,536 blocks: clear a bitmap | B | set a bit per entry | B |
//   count bits of warps | B | of words; clear what tokens see | B | write pages, and what tokens see
//   kWidened: | B | count what tokens see | B | compare it with the blocks
// Barriers guard the bitmap, the numbers of bits of warps and of words, and the bytes of other threads' entries.
// Budget: 64 registers per thread, 16.4 KB of shared memory.
#include "blocks/lists.cuh"
#include "blocks/slots.cuh"
#include "mha/attention/lists.cuh"
#include "split/division.cuh"
#include "split/plan.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

using namespace ptx;
using namespace split;

// pages_out is [tiles, kv heads, most_blocks].
struct BlockTilesParams : ListsParams {
  const TilePlace* places;  // [max_places]
  const int* count;         // [1] tiles
  uint4* seen_out;          // [tiles, kv heads, most_blocks, units of a block]: of 64 keys, a byte per query token
  int* units_out;           // [tiles, kv heads]
  int total_tokens;
  int max_places;
  int most_blocks;  // of a tile
  int block_units;  // 64 keys
  Divisor by_topk;
};

struct WidenedTilesParams : BlockTilesParams {
  const int* bases;  // [requests]: the slot of the first block; -1: the request has no slots
  TileCounts* counts;  // widen_blocks has cleared them
  int* left_out;       // [tiles x kv heads] those that are left, in any order
  int slots;
  int list_blocks, tile_blocks;  // so many blocks of lists take as long by themselves as so many of a tile
};

template <typename Params>
constexpr bool kWidened = false;
template <>
constexpr bool kWidened<WidenedTilesParams> = true;

// An entry of a list, for the query token `own` of the tile, which sees `seen` tokens of its request.
struct ListedFor {
  int block, page, own, seen;
};

__device__ __forceinline__ void leave_tile(const WidenedTilesParams& p, i64 row) {
  p.units_out[row] = 0;
  p.left_out[atomicAdd(&p.counts->left, 1u)] = static_cast<int>(row);
}

// Counts the nonzero bytes of a word whose bytes are below 128.
__device__ __forceinline__ int bytes_above_0(u32 word) { return __popc(word + 0x7f7f7f7fu & 0x80808080u); }

template <typename Params>
__device__ __forceinline__ void block_tiles(const Params& p) {
  __shared__ ListShared shared;
  shared.words[threadIdx.x] = 0;
  grid_dependency_launch();
  grid_dependency_wait();
  const int place = quotient(blockIdx.x, p.by_kv_heads), head = blockIdx.x - place * p.kv_heads;
  if (place >= min(*p.count, p.max_places)) return;
  // Clamped: a plan that was never updated holds arbitrary bits, which must not lead out of the arrays.
  const int begin = min(max(p.places[place].q_begin, 0), p.total_tokens - 1);
  const int tokens = min(min(max(p.places[place].q_len, 1), mha::kTileTokens), p.total_tokens - begin);
  const int entries = min(tokens * p.topk, p.most_blocks);
  const auto named = [&](int i) {
    const int own = quotient(i, p.by_topk), entry = i - own * p.topk;
    const List list(p, begin + own, head);
    const Listed found = entry < list.count ? list.named(p, list.entry_at(p, entry)) : Listed{-1, -1};
    return ListedFor{found.block, found.page, own, list.seen};
  };
  ListedFor first = {-1, -1, 0, 0};  // of this thread
  if (static_cast<int>(threadIdx.x) < entries) first = named(threadIdx.x);
  const auto for_each = [&](auto do_it) {
    for (int i = threadIdx.x; i < entries; i += kListThreads) do_it(i < kListThreads ? first : named(i));
  };
  const i64 row = static_cast<i64>(place) * p.kv_heads + head;
  int* const pages_out = p.pages_out + row * p.most_blocks;
  uint4* const seen_out = p.seen_out + row * p.most_blocks * p.block_units;
  const List last(p, begin + tokens - 1, head);  // sees most
  int base = 0;
  if constexpr (kWidened<Params>) {
    if (last.blocks > 0) base = p.bases[last.request];
    // A plan that was never updated holds any base; others that are not -1 have slots for all blocks.
    if (base < 0 || last.blocks > p.slots - base) {
      if (threadIdx.x == 0) leave_tile(p, row);
      return;
    }
  }
  const int found = put_in_order(
      shared, last.blocks, p.most_blocks, for_each,
      [&](int at, int count) {
        for (int i = threadIdx.x; i < count * p.block_units; i += kListThreads)
          seen_out[static_cast<i64>(at) * p.block_units + i] = {0, 0, 0, 0};
      },
      [&](const ListedFor& listed, int at) {
        pages_out[at] = kWidened<Params> ? base + listed.block : last.virtual_page(p, {listed.block, listed.page});
        for (int unit = 0; unit < p.block_units; ++unit) {
          const int keys = min(max(listed.seen - listed.block * p.block_size - unit * 64, 0), 64);
          reinterpret_cast<unsigned char*>(seen_out + static_cast<i64>(at) * p.block_units + unit)[listed.own] = keys;
        }
      },
      [](int) {});
  if constexpr (kWidened<Params>) {
    __syncthreads();
    int own = 0, all;  // blocks of all lists: bytes of first units that are not 0
    for (int i = threadIdx.x; i < found; i += kListThreads) {
      const uint4 seen = seen_out[static_cast<i64>(i) * p.block_units];
      own += bytes_above_0(seen.x) + bytes_above_0(seen.y) + bytes_above_0(seen.z) + bytes_above_0(seen.w);
    }
    exclusive_sum(shared, own, all);
    if (static_cast<i64>(found) * p.list_blocks > static_cast<i64>(all) * p.tile_blocks) {
      if (threadIdx.x == 0) leave_tile(p, row);
      return;
    }
  }
  if (threadIdx.x == 0) p.units_out[row] = found * p.block_units;
  if constexpr (kWidened<Params>)
    if (threadIdx.x == 0) p.counts->has_tiles = 1;
}

}  // namespace cumla::blocks
