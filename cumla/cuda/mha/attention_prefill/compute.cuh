// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup of attention_prefill: its products, in turns with the other consumers.
#pragma once
#include "mha/attention/copy.cuh"
#include "mha/attention/layout.cuh"
#include "mha/attention_prefill/finish.cuh"
#include "mha/attention_prefill/layout.cuh"
#include "mha/attention_prefill/softmax.cuh"
#include "split/tile.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"
#include "ptx/wgmma.cuh"

namespace cumla::mha {

using namespace ptx;
using namespace split;

// Bound of the sum of a thread's weights of a row and block, relative to an old maximum
constexpr float kMostAdded = 4096.0f;

// One consumer warpgroup. kCopied: threads copied the tiles, not TMA.
template <typename T, int kKeyTiles, int kValueTiles, int kBlock, int kConsumers, bool kCopied, typename Params,
          bool kSplit, bool kCaps>
struct PrefillConsumer : PrefillSoftmax<T, kKeyTiles, kValueTiles, kBlock, kConsumers, Params, kSplit, kCaps> {
  using Softmax = PrefillSoftmax<T, kKeyTiles, kValueTiles, kBlock, kConsumers, Params, kSplit, kCaps>;
  using typename Softmax::Layout, typename Softmax::Ending;
  using Softmax::p, Softmax::all_params, Softmax::shared, Softmax::consumer, Softmax::warp, Softmax::lane;
  using Softmax::output, Softmax::scores, Softmax::probabilities;
  using Softmax::sum, Softmax::factor, Softmax::added, Softmax::seen_by_all;
  using Softmax::look, Softmax::look_at_lists, Softmax::most_listed;
  using Softmax::begin, Softmax::fetch_elements, Softmax::mask, Softmax::raise_maximum, Softmax::exponentiate;
  using Softmax::exponentiate_apart, Softmax::pack, Softmax::take, Softmax::end_rows, Softmax::write;
  using Softmax::Softmax;
  static constexpr int kThreads = kConsumers * kWarpgroup;
  // Weights are packed beside the scores, which stay until the weights are known to be small enough. So keys are free
  // before the softmax. Three consumers have too few registers for that; with 256 columns keys are not needed again.
  // With a mask and whole tiles ptxas orders the loop worse then.
  static constexpr bool kKeepsScores = (kIsPlain<Params> || kSplit) && !kCopied && kConsumers == 2 && kBlock == 128;

  __device__ __forceinline__ void arrive(u32 barrier) const {  // a lane per warp
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier);  // plant: keys or values used
  }

  __device__ __forceinline__ static void multiply(float (&d)[kBlock / 2], u64 a, u64 b, bool accumulate) {
    if constexpr (kBlock == 64)
      wgmma_m64n64k16_async<T>(d, a, b, accumulate);
    else
      wgmma_m64n128k16_async<T>(d, a, b, accumulate);
  }

  __device__ __forceinline__ void issue_scores(int stage) {
    warpgroup_arrive();
#pragma unroll
    for (int column = 0; column < kKeyTiles; ++column)
#pragma unroll
      for (int k = 0; k < 4; ++k)
        multiply(scores, descriptor_of_rows<128>(shared.query(consumer), column * 8192 + k * 32),
                 descriptor_of_rows<128>(shared.keys(stage), column * Layout::kTileBytes + k * 32), column + k > 0);
    warpgroup_commit();
  }

  __device__ __forceinline__ void issue_values(int stage) {
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < kBlock / 16; ++k)
      wgmma_values_async<T>(output, probabilities + 4 * k,
                            descriptor_of_rows<128, Layout::kTileBytes>(shared.values(stage), k * 2048));
    warpgroup_commit();
  }

  // Values that no query of an item sees may be NaN. Their probabilities are 0, but 0 x NaN is NaN. Here those before
  // all windows of an item, in its first block; t counts the blocks of all tiles. Each consumer clears all of them, and
  // waits for no other. Without kCopied the loader does it; warps that copy rows would take 2 to 5 % more.
  __device__ __forceinline__ void clear_values_before_windows(u32 n, u32 t, int block) const {
    constexpr int kChunks = kValueTiles * 8;
    if (__builtin_expect(p.window_left < 0, 1)) return;
    const Item item = read_item(shared, n);
    const int hidden = seen_by(p, tile_of(p, item, 0), item.tokens, 0).first - block * kBlock;
    if (hidden <= 0) return;
    wait_for_values(t);
    for (int i = threadIdx.x % kWarpgroup; i < min(hidden, kBlock) * kChunks; i += kWarpgroup)
      store_shared_zero_16(shared.values(t % Layout::kStages) + (i % kChunks / 8) * Layout::kTileBytes +
                           (i / kChunks) * 128 + (i % 8) * 16);
    fence_proxy_async_shared();
    meet();
  }

  // The same for rows that no query of the item sees, in any block.
  __device__ __forceinline__ void clear_unseen_values(u32 n, u32 t, int block) const {
    const bool is_clear = block * kBlock >= seen_by_all.first && block * kBlock <= seen_by_all.end - kBlock;
    if (__builtin_expect(is_clear, 1)) return;
    const Item item = read_item(shared, n);
    const ItemMask mask = read_mask(shared, n, item.tokens);
    const int begin = block * kBlock;
    if (mask.hull.some_see(mask.of, begin, kBlock)) return;
    RaggedTile tile = tile_of(p, item, 0);
    tile.rows = item.rows;
    wait_for_values(t);
    const int key = threadIdx.x % kWarpgroup;
    const bool is_sure = kSplit && mask.hull.some_see(mask.of, begin + key, 1);
    if (key < kBlock && !is_sure && !is_seen(all_params, tile, mask.of, mask.hull, begin + key))
#pragma unroll 4
      for (int i = 0; i < kValueTiles * 8; ++i)
        store_shared_zero_16(shared.values(t % Layout::kStages) + i / 8 * Layout::kTileBytes + key * 128 + i % 8 * 16);
    fence_proxy_async_shared();
    meet();
  }

  // The same for rows that no list of the item has, or none of its queries sees, in any block.
  __device__ __forceinline__ void clear_unlisted_values(u32 t) const {
    bool is_clear = true;
#pragma unroll
    for (int unit = 0; unit < Layout::kUnits; ++unit) is_clear &= most_listed[unit] >= kUnit;
    if (__builtin_expect(is_clear, 1)) return;
    wait_for_values(t);
    const int key = threadIdx.x % kWarpgroup;
    const u32 most = Layout::kUnits == 1 || key < kUnit ? most_listed[0] : most_listed[Layout::kUnits - 1];
    if (key < kBlock && key % kUnit >= static_cast<int>(most))
#pragma unroll 4
      for (int i = 0; i < kValueTiles * 8; ++i)
        store_shared_zero_16(shared.values(t % Layout::kStages) + i / 8 * Layout::kTileBytes + key * 128 + i % 8 * 16);
    fence_proxy_async_shared();
    meet();
  }

  __device__ __forceinline__ void meet() const {
    if (consumer == 0)
      named_barrier_sync<kOwnBarrier, kWarpgroup>();
    else if (kConsumers == 2 || consumer == 1)
      named_barrier_sync<kOwnBarrier + 1, kWarpgroup>();
    else
      named_barrier_sync<kOwnBarrier + 2, kWarpgroup>();
  }

  __device__ __forceinline__ bool any(bool vote) const {
    if (consumer == 0) return named_barrier_any<kOwnBarrier, kWarpgroup>(vote);
    if (kConsumers == 2 || consumer == 1) return named_barrier_any<kOwnBarrier + 1, kWarpgroup>(vote);
    return named_barrier_any<kOwnBarrier + 2, kWarpgroup>(vote);
  }

  // Issues the copies of an item's query rows. It must follow the last products with the query rows of the item
  // before.
  __device__ __forceinline__ void fetch_query(u32 n) const {
    mbarrier_wait(shared.item_full(n), n / kItems & 1, "an announcement");
    const Item item = read_item(shared, n);
    meet();
    const RaggedTile tile = tile_of(p, item, consumer);
    copy_query<kKeyTiles, 16>(p, tile, warp * 16, shared.query(consumer));
    if constexpr (kHasTable<Params>)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (Softmax::row + 8 * r < tile.rows) {
          PrefillBias<Params> next;
          next.begin(all_params, tile, item.tokens, Softmax::row + 8 * r);
          next.prefetch(lane % 4);
        }
  }

  __device__ __forceinline__ void wait_for_query() const {
    copy_async_wait_all();
    fence_proxy_async_shared();
    meet();
  }

  // Turns are circular. Each named barrier has one consumer that gives the turn and one that takes it.
  __device__ __forceinline__ void take_turn() const {
    if (consumer == 0)
      named_barrier_sync<kTurnBarrier, 2 * kWarpgroup>();
    else if (kConsumers == 2 || consumer == 1)
      named_barrier_sync<kTurnBarrier + 1, 2 * kWarpgroup>();
    else
      named_barrier_sync<kTurnBarrier + 2, 2 * kWarpgroup>();
  }
  __device__ __forceinline__ void give_turn() const {
    if (consumer == kConsumers - 1)
      named_barrier_arrive<kTurnBarrier, 2 * kWarpgroup>();
    else if (kConsumers == 2 || consumer == 0)
      named_barrier_arrive<kTurnBarrier + 1, 2 * kWarpgroup>();
    else
      named_barrier_arrive<kTurnBarrier + 2, 2 * kWarpgroup>();
  }

  __device__ __forceinline__ void wait_for_keys(u32 t) const {
    mbarrier_wait(shared.keys_full(t % Layout::kStages), t / Layout::kStages & 1, "keys");
    if constexpr (kCopied) fence_proxy_async_shared();
  }
  __device__ __forceinline__ void wait_for_values(u32 t) const {
    mbarrier_wait(shared.values_full(t % Layout::kStages), t / Layout::kStages & 1, "values");
    if constexpr (kCopied) fence_proxy_async_shared();
  }

  // Scores of block t, then the products with values of block t - 1. The caller waits for both.
  __device__ __forceinline__ void issue_both(u32 t, bool has_values) {
    take_turn();
    issue_scores(t % Layout::kStages);
    if (has_values) wait_for_values(t - 1);
    issue_values((t - 1) % Layout::kStages);
    give_turn();
  }

  // Block t of a tile in which this consumer has no rows.
  __device__ __forceinline__ void pass(u32 t, bool is_last, u32 n) const {
    wait_for_keys(t);
    take_turn();
    give_turn();
    arrive(shared.keys_free(t % Layout::kStages));
    if (is_last) fetch_query(n + 1);
    wait_for_values(t - 1);
    arrive(shared.values_free((t - 1) % Layout::kStages));
  }

  // t counts the blocks of all tiles. Hazard: wgmma must not be inside a branch, because ptxas then serialises it.
  // The products before the first and after the last block read stale memory; their results are discarded.
  __device__ __forceinline__ void work() {
    if (consumer == kConsumers - 1) give_turn();
#pragma unroll
    for (u32& x : probabilities) x = 0;
    fetch_query(0);
    u32 t = 0;
#pragma unroll 1
    for (u32 n = 0;; ++n) {
      const Item item = read_item(shared, n);
      const bool exists = item.rows > 0;
      const Seen blocks = blocks_of<kBlock>(all_params, shared, n, item);
      if (exists) {
        wait_for_query();
        wait_for_keys(t);
      }
      issue_both(t, t > 0);
      // In the first round no item has ended. The first item's own record stands in for it, and nothing is stored.
      const Ending ending = end_rows(n == 0 ? n : n - 1, t > 0);
      look(n, item);
      warpgroup_wait<0>();
      keep_behind_wait(scores);
      keep_behind_wait(output);
      if constexpr (kHasTable<Params>)
        if (exists) fetch_elements(blocks.end - 1);
      if (t > 0) {
        arrive(shared.values_free((t - 1) % Layout::kStages));
        write(ending, n - 1);
        mbarrier_arrive(shared.item_free(n - 1));
      }
      if (!exists) break;
      const bool swaps = !kCopied && kSwapsBlocks<Params, Layout> && swaps_blocks(n, blocks);
      const int last = blocks.first + swaps;
      int block = swaps ? blocks.first : blocks.end - 1;
      if constexpr (kHasLists<Params>) look_at_lists(t % Layout::kStages);
      arrive(shared.keys_free(t % Layout::kStages));
      if (block == last) fetch_query(n + 1);
      begin();
      mask(n, block);
      raise_maximum();
      exponentiate();
      sum[0] += added[0];
      sum[1] += added[1];
      pack();
      if constexpr (kHasMask<Params>) {
        clear_unseen_values(n, t, block);
      } else if constexpr (kHasLists<Params>) {
        clear_unlisted_values(t);
      }
      if (item.rows <= 64 * consumer) {
#pragma unroll 1
        for (++t, block = blocks.end - 2 + swaps; block >= last; ++t, --block) pass(t, block == last, n);
        continue;
      }
      if constexpr (kHasTable<Params>)
        if (block > blocks.first) fetch_elements(block - 1);
#pragma unroll 1
      for (++t, block = blocks.end - 2 + swaps; block >= last; ++t, --block) {
        wait_for_keys(t);
        issue_both(t, true);
        warpgroup_wait<1>();
        keep_behind_wait(scores);
        if constexpr (kKeepsScores) arrive(shared.keys_free(t % Layout::kStages));
        // The maximum rarely grows once each row has one. So scores are weighed with the old maximum, and weighed again
        // if weights are too large. Scores that are not kept are computed again. Those of the last block cannot be,
        // because its query is overwritten.
        bool raises = kBlock == 64 || (!kKeepsScores && block == last) ||
                      block * kBlock >= seen_by_all.end - kBlock, grown;
        if constexpr (kHasMask<Params>) raises |= block * kBlock < seen_by_all.first;
        if constexpr (kHasLists<Params>) {
          raises = kBlock == 64 || block == last;  // a row that has seen no key has infinite weights at first
          look_at_lists(t % Layout::kStages);
        }
        if (block == last) fetch_query(n + 1);
        if constexpr (kKeepsScores) mask(n, block);
        u32 weights[kBlock / 4];
#pragma unroll 1
        for (;; raises = true) {
          if constexpr (!kKeepsScores) mask(n, block);
          grown = raises && raise_maximum();
          if constexpr (kKeepsScores)
            exponentiate_apart(weights);
          else
            exponentiate();
          // ptxas moves the wait for the products with values up to the last branch, which is this vote. All warps
          // vote, because they must wait at the same instruction.
          grown = any(raises ? grown : !(fmaxf(added[0], added[1]) < kMostAdded));
          if (raises || !grown) break;
          if constexpr (!kKeepsScores) {
            issue_scores(t % Layout::kStages);
            warpgroup_wait<0>();
            keep_behind_wait(scores);
            keep_behind_wait(output);
          }
        }
        if constexpr (!kKeepsScores) arrive(shared.keys_free(t % Layout::kStages));
        sum[0] += added[0];
        sum[1] += added[1];
        if (raises && grown) {
          warpgroup_wait<0>();
          keep_behind_wait(output);
#pragma unroll
          for (int i = 0; i < kValueTiles * 32; ++i) output[i] *= factor[i >> 1 & 1];
        }
        warpgroup_wait<0>();
        keep_behind_wait(output);
        arrive(shared.values_free((t - 1) % Layout::kStages));
        if constexpr (kKeepsScores)
          take(weights);
        else
          pack();
        if constexpr (kHasMask<Params>) clear_unseen_values(n, t, block);
        if constexpr (kHasLists<Params>) clear_unlisted_values(t);
        if constexpr (kHasTable<Params>)
          if (block > blocks.first) fetch_elements(block - 1);
      }
      if constexpr (kCopied) clear_values_before_windows(n, t - 1, blocks.first);
    }
    if (consumer == 0) take_turn();  // takes the turn that the last consumer gave
    copy_async_wait_all();
  }
};

}  // namespace cumla::mha
