// SPDX-License-Identifier: Apache-2.0
// Shared memory of attention_prefill, the numbers of its named barriers, and the announced row tiles.
#pragma once
#include "mha/attention/layout.cuh"
#include "mha/attention/lists.cuh"
#include "mha/attention/mask.cuh"
#include "mha/attention_prefill/widened.cuh"
#include "split/tile.cuh"
#include "ptx/copy.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

using namespace ptx;
using namespace split;

constexpr int kItems = 4;  // announcements: of the tile being stored, the next one, the one after that, and a spare
// Named barriers. 1 is kConsumersBarrier of split/meeting.cuh.
constexpr int kTurnBarrier = 2;  // of the turns of each consumer
constexpr int kOwnBarrier = 5;   // of the threads of each consumer

template <int kKeyTiles, int kValueTiles, int kBlock_, int kConsumers_, bool kSplit_ = false>
struct PrefillLayout {
  static constexpr bool kSplit = kSplit_;  // keys are split among CTAs (split.cuh)
  static constexpr int kBlock = kBlock_, kConsumers = kConsumers_, kStages = 2;
  static constexpr int kTileBytes = kBlock * 128;  // kBlock rows x 64 columns of 16 bits, 128-byte swizzle
  static constexpr int kQueryBytes = kKeyTiles * 64 * 128;  // of a consumer
  static constexpr int kKeyBytes = kKeyTiles * kTileBytes, kValueBytes = kValueTiles * kTileBytes;
  static constexpr int kOutBytes = 16 * 128;  // of a warp: 16 rows x 64 columns
  static constexpr int kItemBytes = kSplit ? 96 : 64;
  static constexpr int kBytes = kConsumers * (kQueryBytes + 4 * kOutBytes) + kStages * (kKeyBytes + kValueBytes) +
                                kItems * kItemBytes + 256;
  // With a table: elements for the keys of a block, of the 16 rows of each warp (table.cuh). Eight rows take all banks.
  static constexpr int kBandPitch = kBlock * 2 + 16, kBandBytes = 16 * kBandPitch;
  static constexpr int kTableBytes = kBytes + 4 * kConsumers * kBandBytes;

  u32 start;

  __device__ __forceinline__ u32 query(int consumer) const { return start + consumer * kQueryBytes; }
  __device__ __forceinline__ u32 keys(int s) const { return query(kConsumers) + s * kKeyBytes; }
  __device__ __forceinline__ u32 values(int s) const { return keys(kStages) + s * kValueBytes; }
  __device__ __forceinline__ u32 out(int warp) const { return values(kStages) + warp * kOutBytes; }
  __device__ __forceinline__ u32 join() const { return out(0); }  // while no warp stores results
  static_assert(!kSplit || 4 * kConsumers * kOutBytes >= 64 + 8192 + 1024, "joining uses it, too");
  __device__ __forceinline__ u32 band(int warp) const { return start + kBytes + warp * kBandBytes; }
  __device__ __forceinline__ u32 item(u32 n) const { return out(4 * kConsumers) + n % kItems * kItemBytes; }
  __device__ __forceinline__ u32 barrier(int i) const { return item(0) + kItems * kItemBytes + i * 8; }
  __device__ __forceinline__ u32 keys_full(int s) const { return barrier(s); }
  __device__ __forceinline__ u32 keys_free(int s) const { return barrier(kStages + s); }
  __device__ __forceinline__ u32 values_full(int s) const { return barrier(2 * kStages + s); }
  __device__ __forceinline__ u32 values_free(int s) const { return barrier(3 * kStages + s); }
  __device__ __forceinline__ u32 item_full(u32 n) const { return barrier(4 * kStages + n % kItems); }
  __device__ __forceinline__ u32 item_free(u32 n) const { return item_full(n) + kItems * 8; }
  __device__ __forceinline__ u32 wanted() const { return barrier(4 * kStages + 2 * kItems); }
  __device__ __forceinline__ u32 begun() const { return wanted() + 8; }
  __device__ __forceinline__ u32 item_taken(u32 n) const { return begun() + 8 + n % kItems * 8; }
  __device__ __forceinline__ u32 landed() const { return item_taken(0); }  // without a mask or lists
  // With lists: what query tokens see of the units of a block, then the most that one sees of each.
  static constexpr int kUnits = kBlock / kUnit;
  __device__ __forceinline__ u32 seen(int s) const { return barrier(4 * kStages + 2 * kItems + 2) + s * kUnits * 16; }
  __device__ __forceinline__ u32 most_seen(int s) const { return seen(kStages) + s * kUnits * 4; }
  static_assert(8 * (4 * kStages + 2 * kItems + 2) + kStages * kUnits * 20 <= 256, "behind the barriers");
};

// Neither masks, lists nor biases.
template <typename Params>
constexpr bool kIsPlain = false;
template <>
constexpr bool kIsPlain<AttentionParams> = true;
template <typename Params, typename Layout>
constexpr bool kSwapsBlocks =
    kIsPlain<Params> && !Layout::kSplit && Layout::kConsumers == 2 && Layout::kBlock == 128;

// A row tile of a kv head. An item without rows ends the list.
struct Item {
  int tokens, first_row, q_len, q_begin;
  i64 pages;
  int head, rows;
};

// The tile of 64 rows of a consumer.
__device__ __forceinline__ RaggedTile tile_of(const AttentionParams& p, const Item& item, int consumer) {
  RaggedTile tile(p);
  tile.index = item.head;
  tile.q_len = item.q_len;
  tile.q_begin = item.q_begin;
  tile.first_row = item.first_row + 64 * consumer;
  tile.rows = min(max(item.rows - 64 * consumer, 0), 64);
  tile.pages = item.pages;
  return tile;
}

// Blocks [first, end) that rows of an item see. If they see nothing it is one block, all of whose scores are masked.
template <int kBlock>
__device__ __forceinline__ Seen blocks_of_item(const AttentionParams& p, const Item& item) {
  const RaggedTile tile = tile_of(p, item, 0);
  const int first = max(seen_by(p, tile, item.tokens, 0).first, 0);
  const int end = max(seen_by(p, tile, item.tokens, item.rows - 1).end, 0);
  return {first / kBlock, max(end / kBlock + (end % kBlock != 0), first / kBlock + 1)};
}

// Reads item n. Valid between its announcement and this thread's arrival at item_free.
template <typename Layout>
__device__ __forceinline__ Item read_item(const Layout& shared, u32 n) {
  const uint4 a = load_shared_16(shared.item(n)), b = load_shared_16(shared.item(n) + 16);
  return {static_cast<int>(a.x), static_cast<int>(a.y), static_cast<int>(a.z), static_cast<int>(a.w),
          static_cast<i64>(static_cast<u64>(b.y) << 32 | b.x), static_cast<int>(b.z), static_cast<int>(b.w)};
}

// The keys that an item's rows see by arrays: computed once, and announced with the item.
struct ItemMask {
  RequestMask of;
  Hull hull;
  Seen keys;  // to be read
};

// True if each key of the tree is visible to some query of a tile. All lanes of a warp compute it together.
__device__ __forceinline__ bool sees_whole_tree(const MaskedParams& p, const RaggedTile& tile, const RequestMask& of) {
  const int keys = of.tokens - of.tree, last_own = own_token(p, tile, max(tile.rows, 1) - 1);
  if (keys > 32 * p.mask.words) return false;
  bool whole = true;
#pragma unroll 1
  for (int word = 0; 32 * word < keys; ++word) {
    u32 seen = 0;
#pragma unroll 1
    for (int own = own_token(p, tile, 0) + static_cast<int>(threadIdx.x % 32); own <= last_own; own += 32)
      seen |= p.mask.tree[static_cast<i64>(tile.q_begin + own) * p.mask.words + word];
    const u32 wanted = static_cast<u32>(keys_before(keys - 32 * word));
    whole &= (__reduce_or_sync(0xffffffffu, seen) & wanted) == wanted;
  }
  return whole;
}

// Has L2 fetch the first 4 KB of the trees, a line per lane: all of them where drafts are few.
__device__ __forceinline__ void prefetch_trees(const MaskedParams& p, int lane) {
  if (i64{lane} * 32 < i64{p.q_len} * p.mask.words) prefetch_l2(p.mask.tree + lane * 32);
}

// Computes it, with all lanes of a warp. With kSplit also of trees: drafts of a request are few rows.
template <bool kSplit>
__device__ __forceinline__ ItemMask mask_of(const MaskedParams& p, const Item& item, int number) {
  RaggedTile tile = tile_of(p, item, 0);
  tile.rows = item.rows;  // of all consumers
  ItemMask mask;
  mask.of = RequestMask(p, number, item.q_len, item.tokens);
  mask.hull = Hull(p, tile, mask.of);
  mask.keys = keys_to_read(p, mask.of, mask.hull.any);
  // If all intervals end where the tree begins, there is no gap between them and its keys.
  const int tree = mask.of.tree;
  if (kSplit && p.mask.words > 0 && mask.hull.any.end == tree && mask.hull.all.end == tree &&
      sees_whole_tree(p, tile, mask.of)) {
    mask.hull.any.end = mask.of.tokens;
    mask.hull.is_complete = true;
  }
  return mask;
}

template <typename Layout>
__device__ __forceinline__ void announce_mask(const Layout& shared, u32 n, const ItemMask& mask) {
  const auto word = [](int value) { return static_cast<u32>(value); };
  const u32 complete = mask.hull.is_complete ? kCompleteBit : 0;
  store_shared_16(shared.item(n) + 32, {word(mask.keys.first) | complete, word(mask.keys.end),
                                        word(mask.of.prefix), word(mask.of.tree)});
  store_shared_16(shared.item(n) + 48, {word(mask.hull.any.first), word(mask.hull.any.end),
                                        word(mask.hull.all.first), word(mask.hull.all.end)});
}

// Reads what was announced with item n, as read_item().
template <typename Layout>
__device__ __forceinline__ ItemMask read_mask(const Layout& shared, u32 n, int tokens) {
  const uint4 a = load_shared_16(shared.item(n) + 32), b = load_shared_16(shared.item(n) + 48);
  const auto number = [](u32 word) { return static_cast<int>(word); };
  ItemMask mask;
  mask.keys = {number(a.x & ~kCompleteBit), number(a.y)};
  mask.of.tokens = tokens;
  mask.of.prefix = number(a.z);
  mask.of.tree = number(a.w);
  mask.hull.is_complete = (a.x & kCompleteBit) != 0;
  mask.hull.any = {number(b.x), number(b.y)};
  mask.hull.all = {number(b.z), number(b.w)};
  return mask;
}

// A CTA's first tile begins with its first block, which other tiles of the head have, too: when all CTAs begin, they
// wait for memory. All other blocks descend.
__device__ __forceinline__ bool swaps_blocks(u32 n, const Seen& blocks) {
  return n == 0 && blocks.end - blocks.first > 1;
}

// Those of the blocks that this CTA's part has; if it has none, the one behind the last key, which no row sees.
template <typename Layout>
__device__ __forceinline__ Seen of_part(const Layout& shared, u32 n, int tokens, Seen blocks) {
  if constexpr (Layout::kSplit) {
    blocks.first = max(blocks.first, static_cast<int>(load_shared_u32(shared.item(n) + 64)));
    blocks.end = min(blocks.end, static_cast<int>(load_shared_u32(shared.item(n) + 68)));
    const int behind = tokens / Layout::kBlock + (tokens % Layout::kBlock != 0);
    if (blocks.first >= blocks.end) blocks = {behind, behind + 1};
  }
  return blocks;
}

// As blocks_of_item() for item n, which has been announced.
template <int kBlock, typename Layout, typename Params>
__device__ __forceinline__ Seen blocks_of(const Params& p, const Layout& shared, u32 n, const Item& item) {
  if constexpr (kHasMask<Params>) {
    const Seen keys = {static_cast<int>(load_shared_u32(shared.item(n) + 32) & ~kCompleteBit),
                       static_cast<int>(load_shared_u32(shared.item(n) + 36))};
    return of_part(shared, n, item.tokens,
                   {keys.first / kBlock, max(keys.end / kBlock + (keys.end % kBlock != 0), keys.first / kBlock + 1)});
  } else {
    return of_part(shared, n, item.tokens, blocks_of_item<kBlock>(p, item));
  }
}

}  // namespace cumla::mha
