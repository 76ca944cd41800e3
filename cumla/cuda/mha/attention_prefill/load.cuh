// SPDX-License-Identifier: Apache-2.0
// The loading warpgroup of attention_prefill: it takes row tiles from the schedule, and loads their keys and values.
#pragma once
#include "mha/attention/copy.cuh"
#include "mha/attention/layout.cuh"
#include "mha/attention_prefill/layout.cuh"
#include "mha/attention_prefill/split.cuh"
#include "split/plan.cuh"
#include "split/tile.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

using namespace ptx;
using namespace split;

// Keys and values of a section. The rest of L2 holds those that late CTAs still read.
constexpr u64 kBytesInL2 = 12 << 20;
constexpr u32 kSortedTiles = 1024;  // the schedule sorts no more

// Takes items: the first by the CTA's number, the others from the counter. One lane, which is_active.
template <typename Layout, typename Params>
struct Dealer {
  const AttentionParams& p;
  const TilePlace* const places;
  u32 tiles = 0, total = 0, heads_of_section = 1;
  u32 early = 0;  // places whose tiles come before the sections, for all heads

  __device__ __forceinline__ explicit Dealer(const Params& p, bool is_active = true)
      : p(p), places(reinterpret_cast<const TilePlace*>(p.places)) {
    if (!is_active) return;
    const TilePlace of_first = places[0];
    tiles = min(max(p.parts_in[0].end_place, 0), p.batch);  // 0 without queries; arbitrary in a plan without an update
    const TilePlace longest = places[max(tiles, 1u) - 1], median = places[tiles / 2];
    total = tiles * p.num_kv_heads;  // the launcher keeps it below 2^31
    // Other requests are assumed to be like the first. Sections are equal, and have a tile for almost each CTA.
    // Otherwise long tiles of a small last section would start when all others end.
    const u32 heads = p.num_kv_heads, least = max(gridDim.x / 8 * 7, 1u);
    u32 requests = 1;
    if (of_first.q_len < p.q_len) requests = p.q_len / max(of_first.q_len, 1);
    const u64 bytes = u64{requests} * max(of_first.tokens, 64) * (p.key_columns + p.value_columns) * 2 * heads;
    u32 sections = min(static_cast<u32>(min(bytes / kBytesInL2, u64{heads})) + 1, heads);
    if ((heads & heads - 1) == 0) {  // divisions would take longer than all else
      int shift = 32 - __clz(sections - 1);
#pragma unroll 1
      while (shift > 0 && (u64{least} << shift) > total) --shift;
      heads_of_section = heads >> shift;
    } else {
#pragma unroll 1
      while (heads % sections != 0) ++sections;
      sections = min(sections, max(total / least, 1u));
#pragma unroll 1
      while (heads % sections != 0) --sections;
      heads_of_section = heads / sections;
    }
    // The longest tiles go first, because one that starts late would end last.
    if (tiles > 0 && tiles <= kSortedTiles && blocks_of_place(longest) > 2 * blocks_of_place(median))
      early = min((gridDim.x + heads - 1) / heads, tiles);
  }

  __device__ __forceinline__ int blocks_of_place(const TilePlace& from) const {
    const Seen blocks = blocks_of_item<kBlockTokens>(p, item_of(from, 0));
    return blocks.end - blocks.first;
  }

  __device__ __forceinline__ Item item_of(const TilePlace& from, int head) const {
    Item item;
    item.head = head;
    item.q_begin = min(max(from.q_begin, 0), p.q_len - 1);
    item.q_len = min(max(from.q_len, 1), p.q_len - item.q_begin);
    item.first_row = min(max(from.first_row, 0), item.q_len * p.heads_per_group - 1);
    item.rows = min(64 * Layout::kConsumers, item.q_len * p.heads_per_group - item.first_row);
    item.pages = from.pages;
    item.tokens = min(static_cast<i64>(min(max(from.tokens, 0), kMaxTokens)), p.max_tokens);
    if (p.block_table == nullptr)
      item.tokens = min(static_cast<i64>(item.tokens), max(p.page_entries - item.pages, i64{0}));
    return item;
  }

  // number: of the item's request, with a mask.
  __device__ __forceinline__ Item next(u32 n, int& number) const {
    const auto item_at_place = [&](u32 place, int head) {
      if constexpr (kHasMask<Params>) number = number_at(p, place);
      Item item = item_of(places[place], head);
      if constexpr (kHasLists<Params>) item.pages = list_of(static_cast<const Params&>(p), place, head, item.tokens);
      return item;
    };
    const u32 at = n == 0 ? blockIdx.x : gridDim.x + atomic_add_acq_rel(&p.tickets[0].arrived, 1);
    if (at >= total) {
      // The last CTA that asks in vain resets the counter for the next launch.
      if (at == total + gridDim.x - 1) store_relaxed(&p.tickets[0].arrived, 0);
      return {};
    }
    const u32 heads = p.num_kv_heads, early_tiles = early * heads;
    if (early > 0 && at < early_tiles) return item_at_place(tiles - 1 - at / heads, at % heads);
    const u32 later = at - early_tiles, of_section = (tiles - early) * heads_of_section;
    const u32 section = later < of_section ? 0 : later / of_section, rest = later - section * of_section;
    const bool is_power = (heads_of_section & heads_of_section - 1) == 0;
    const u32 place = is_power ? rest >> (31 - __clz(heads_of_section)) : rest / heads_of_section;
    return item_at_place(tiles - 1 - early - place, (section - place) * heads_of_section + rest);
  }

  // Announces item n of this CTA; with a mask look_at_masks() does it. False after the last one.
  __device__ __forceinline__ bool announce(const Layout& shared, u32 n) const {
    int number = 0;
    const Item item = next(n, number);
    mbarrier_wait(shared.item_free(n), (n / kItems & 1) ^ 1, "a free announcement");
    write(shared, n, item, number);
    mbarrier_arrive(kHasMask<Params> ? shared.item_taken(n) : shared.item_full(n));
    return item.rows > 0;
  }
  __device__ __forceinline__ void write(const Layout& shared, u32 n, const Item& item, int number) const {
    store_shared_16(shared.item(n), {static_cast<u32>(item.tokens), static_cast<u32>(item.first_row),
                                     static_cast<u32>(item.q_len), static_cast<u32>(item.q_begin)});
    store_shared_16(shared.item(n) + 16,
                    {static_cast<u32>(item.pages), static_cast<u32>(static_cast<u64>(item.pages) >> 32),
                     static_cast<u32>(item.head), static_cast<u32>(item.rows)});
    if constexpr (kHasMask<Params>) store_shared_u32(shared.item(n) + 32, number);
  }
};

// Reads item n once, for a loading warp.
template <typename Layout>
__device__ __forceinline__ Item item_at(const Layout& shared, u32 n) {
  mbarrier_wait(shared.item_full(n), n / kItems & 1, "an announcement");
  const Item item = read_item(shared, n);
  mbarrier_arrive(shared.item_free(n));
  return item;
}

// A warp zeroes rows [first, end) of a block of values.
template <int kTiles, int kTileBytes>
__device__ __forceinline__ void clear_values(u32 tiles, int first, int end) {
#pragma unroll 1
  for (int i = first * 8 + threadIdx.x % 32; i < end * 8; i += 32)
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) store_shared_zero_16(tiles + tile * kTileBytes + i * 16);
}

// One warp loads the keys, or the values; each lane loads its own box of a block. It asks for the next item only with
// the last loads of this one, so that the first CTA to finish gets it. The first keys are loaded alone, because all
// CTAs wait for L2 then. Without a mask or lists it clears values before all windows and past the end of the request:
// they may be NaN. Their probabilities are 0, but 0 x NaN is NaN.
template <typename Layout, int kTiles, int kBlock, bool kOfKeys, typename Params>
__device__ __forceinline__ void load_boxes(const Params& p, const Layout& shared) {
  constexpr bool kClears = !kOfKeys && !kHasMask<Params> && !kHasLists<Params>;
  const int first = threadIdx.x % 32 * p.box_rows;
  u32 t = 0, cleared = 0;
#pragma unroll 1
  for (u32 n = 0;; ++n) {
    const Item item = item_at(shared, n);
    if (item.rows == 0) return;
    const RaggedTile tile = tile_of(p, item, 0);
    const Seen blocks = blocks_of<kBlock>(p, shared, n, item);
    const int first_seen = kClears ? seen_by(p, tile, item.tokens, 0).first : 0;
    const bool swaps = kSwapsBlocks<Params, Layout> && swaps_blocks(n, blocks);
#pragma unroll 1
    for (int left = blocks.end - 1; left >= blocks.first; --left, ++t) {
      const int block = !swaps ? left : left == blocks.end - 1 ? blocks.first : left + 1;
      if (!kOfKeys && t == 0) mbarrier_wait(shared.begun(), 0, "the first keys");
      const int stage = t % Layout::kStages;
      const u32 tiles = kOfKeys ? shared.keys(stage) : shared.values(stage);
      const int hidden = first_seen - block * kBlock, valid = item.tokens - block * kBlock;
      const bool clears = kClears && (hidden > 0 || valid < kBlock);
      const u32 full = kOfKeys ? shared.keys_full(stage) : clears ? shared.landed() : shared.values_full(stage);
      if (kOfKeys && left == blocks.first && threadIdx.x % 32 == 0) mbarrier_arrive(shared.wanted());
      int row = 0, page = -1;
      if (first < kBlock) page = page_of(p, tile, item.tokens, block * kBlock + first, row);
      uint4 seen[Layout::kUnits];
      if constexpr (kOfKeys && kHasLists<Params>)
#pragma unroll
        for (int unit = 0; unit < Layout::kUnits; ++unit)
          seen[unit] = seen_of(p, item.pages, block * Layout::kUnits + unit, item.tokens);
      mbarrier_wait(kOfKeys ? shared.keys_free(stage) : shared.values_free(stage), (t / Layout::kStages & 1) ^ 1,
                    kOfKeys ? "a free stage of keys" : "a free stage of values");
      if constexpr (kOfKeys && kHasLists<Params>)
        if (threadIdx.x % 32 == 0)  // the lane that arrives
#pragma unroll
          for (int unit = 0; unit < Layout::kUnits; ++unit) {
            store_shared_16(shared.seen(stage) + 16 * unit, seen[unit]);
            store_shared_u32(shared.most_seen(stage) + 4 * unit, most_seen(seen[unit]));
          }
      if (threadIdx.x % 32 == 0) mbarrier_arrive_expect_tx(full, kTiles * Layout::kTileBytes);
      __syncwarp();
      if (first < kBlock)
#pragma unroll
        for (int k = 0; k < kTiles; ++k)
          tma_load_4d_async(tiles + k * Layout::kTileBytes + first * 128, kOfKeys ? &p.key_map : &p.value_map, full,
                            k * 64, row, item.head, page);
      if (kOfKeys && t == 0) {
        mbarrier_wait(full, 0, "the first keys");
        if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.begun());
      }
      if (clears) {
        mbarrier_wait(full, cleared++ & 1, "values to be cleared");
        clear_values<kTiles, Layout::kTileBytes>(tiles, 0, min(hidden, kBlock));
        clear_values<kTiles, Layout::kTileBytes>(tiles, max(valid, 0), kBlock);
        fence_proxy_async_shared();
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.values_full(stage));
      }
    }
  }
}

// All four warps load keys and values row by row. Lane 0 of warp 0 also announces items.
template <typename Layout, int kKeyTiles, int kValueTiles, int kBlock, typename Params>
__device__ __forceinline__ void load_rows(const Params& p, const Layout& shared) {
  constexpr int kRows = kBlock / 4;  // of a warp
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = warp * kRows;
  const Dealer<Layout, Params> dealer(p);
  static_assert(!kHasMask<Params>, "no warp is left to look at masks");
  bool more = warp == 0 && lane == 0 && dealer.announce(shared, 0);
  u32 t = 0;
#pragma unroll 1
  for (u32 n = 0;; ++n) {
    const Item item = item_at(shared, n);
    if (item.rows == 0) break;
    const RaggedTile tile = tile_of(p, item, 0);
    const Seen blocks = blocks_of<kBlock>(p, shared, n, item);
#pragma unroll 1
    for (int block = blocks.end - 1; block >= blocks.first; --block, ++t) {
      if (more && block == blocks.first) more = dealer.announce(shared, n + 1);
      const int stage = t % Layout::kStages, phase = t / Layout::kStages & 1;
      int row = 0;
      const int page = page_of(p, tile, item.tokens, block * kBlock + first + lane % kRows, row);
      const auto offset = [&](const Columns& from) {
        return page < 0 ? i64{-1} : page * from.stride_page + row * from.stride_row + item.head * from.stride_head;
      };
      mbarrier_wait(shared.keys_free(stage), phase ^ 1, "a free stage of keys");
      copy_rows<kKeyTiles, Layout::kTileBytes, kRows>(p.keys.base, offset(p.keys), first, p.key_columns,
                                                      shared.keys(stage));
      mbarrier_arrive_after_copies(shared.keys_full(stage));
      mbarrier_wait(shared.values_free(stage), phase ^ 1, "a free stage of values");
      copy_rows<kValueTiles, Layout::kTileBytes, kRows>(p.values.base, offset(p.values), first, p.value_columns,
                                                        shared.values(stage));
      mbarrier_arrive_after_copies(shared.values_full(stage));
    }
  }
  copy_async_wait_all();
}

// Announces all items of a CTA. One lane, which is_active, writes the first one while no barrier exists yet; the first
// phase of its barrier is complete from the start.
template <typename Layout, typename Params>
struct ItemDealer {
  const Dealer<Layout, Params> dealer;
  bool exists = false;

  __device__ __forceinline__ ItemDealer(const Params& p, const Layout& shared, bool is_active) : dealer(p, is_active) {
    if (!is_active) return;
    int number = 0;
    const Item item = dealer.next(0, number);
    dealer.write(shared, 0, item, number);
    exists = item.rows > 0;
  }
  __device__ __forceinline__ void deal(const Layout& shared) const {
    bool more = exists;
    for (u32 n = 0; more; more = dealer.announce(shared, ++n))
      mbarrier_wait(shared.wanted(), n & 1, "the last block of an item");
  }
};

// One warp adds to each item what its rows see, and announces it.
template <typename Layout>
__device__ __forceinline__ void look_at_masks(const MaskedParams& p, const Layout& shared) {
  Item item;
  u32 n = 0;
  do {
    mbarrier_wait(shared.item_taken(n), n / kItems & 1, "an item");
    item = read_item(shared, n);
    if (item.rows > 0) {
      const ItemMask mask = mask_of<Layout::kSplit>(p, item, static_cast<int>(load_shared_u32(shared.item(n) + 32)));
      __syncwarp();  // all lanes have read the number
      if (threadIdx.x % 32 == 0) announce_mask(shared, n, mask);
    }
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.item_full(n));
    ++n;
  } while (item.rows > 0);
}

}  // namespace cumla::mha
