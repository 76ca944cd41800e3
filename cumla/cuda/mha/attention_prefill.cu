// SPDX-License-Identifier: Apache-2.0
// Attention of many query rows: each CTA computes whole row tiles, 64 query rows of a kv head per consumer, over all
// visible keys. No tile is split. With kSplit a CTA has a part of the schedule, as in attention, and the keys of a tile
// may be split among CTAs (mha/attention_prefill/split.cuh).
//
// grid = one CTA per SM, 384 or 512 threads; kSplit: see HeadTile. The schedule (split/ragged_schedule.cu, in one
// part) lists the row tiles. A CTA begins with the tile of its own number, and takes the next ones from a counter
// (order: docs/kernels/mha-prefill.md).
//
// Roles and time line:
//   warp 0         loads keys by TMA; with lists: and announces which of them query tokens see
//   warp 1         loads values by TMA
//   warp 2         takes tiles from the counter, or those of its part, and announces them; the first one is known
//                  before the barriers exist
//   warp 3         with a mask: adds to each tile what its rows see, and announces it
//   warps 0 to 3   if pages are no multiple of eight tokens: a quarter of the rows of every block; warp 0 announces
//   consumers      two, or three with 64 columns: 64 query rows each, which they copy themselves. They compute the
//                  blocks of all tiles without a break, from the last to the first of a tile
//
//   consumer 0 | products | softmax  | products | softmax  | ...     they alternate by named barriers
//   consumer 1 | softmax  | products | softmax  | products | ...
// The last products of a tile run with the first scores of the next one; its output is stored beside other products.
//
// barrier                         who arrives (count)             who waits            guards
// keys_full(stage),               TMA (1); rows: each copying     all consumers        the tiles are loaded
// values_full(stage)              thread (128); values of which
//                                 some are cleared: the value
//                                 loader (1)
// keys_free(stage),               a lane per consumer warp (4     the loader           the tiles may be overwritten
// values_free(stage)              per consumer)
// item_taken(n), 4                with a mask: the lane that has  warp 3               the tile is written
//                                 taken the tile (1)
// item_full(n), 4                 the announcing lane (1)         loaders, consumers   announcement n
// item_free(n), 4                 each thread that has read it    the announcing lane  announcement n may be
//                                 (32 per warp)                                        overwritten
// wanted                          lane 0 of the key loader, with  the announcing lane  when the next tile is taken
//                                 the last loads of a tile (1)
// begun                           lane 0 of the key loader,       the value loader     order of the first loads
//                                 after the first keys (1)
// landed                          TMA (1)                         the value loader     values of which it clears some,
//                                                                                      before they are full
// named, kConsumersBarrier        kSplit: consumers (256)         the same             combining
// named, kTurnBarrier + c         the consumer before and         consumer c           its turn to issue products
//                                 consumer c (256)
// named, kOwnBarrier + c          the threads of consumer c       the same             query rows, votes, zeroed rows
//                                 (128)
//
// Shared memory: query 8,192 per 64 columns and consumer + output 8,192 per consumer + 2 stages of keys and values
//                + announcements 256, kSplit: 384, + barriers 256
//                with a table: + 4,352 per consumer warp
// Registers:     consumers 232 or 224 (up to 128 output, 64 scores, 32 probabilities), loaders 40 or 56; of three
//                consumers 160, loaders 32
// Work of 128 rows by 128 keys, 128 columns: 2 x 1,024 tensor clocks; 16,384 exponentials at 16 per clock are 1,024
#include "mha/attention/layout.cuh"
#include "mha/attention_prefill/compute.cuh"
#include "mha/attention_prefill/layout.cuh"
#include "mha/attention_prefill/load.cuh"
#include "split/tile.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

using namespace ptx;
using namespace split;

template <typename T, int kKeyTiles, int kValueTiles, int kBlock, int kConsumers, bool kCopied, bool kSplit = false,
          bool kCaps = true, typename Params>
__device__ __forceinline__ void attention_prefill(const Params& p) {
  using Layout = PrefillLayout<kKeyTiles, kValueTiles, kBlock, kConsumers, kSplit>;
  constexpr int kLoaderRegisters = kConsumers == 3 ? 32 : kCopied ? 56 : 40;
  constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : kCopied ? 224 : 232;
  static_assert(kLoaderRegisters + kConsumers * kConsumerRegisters <= (kConsumers == 3 ? 4 * 128 : 3 * 168),
                "else warpgroups wait for registers for ever");
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const Layout shared = {shared_address(shared_bytes)};
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0), warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int s = 0; s < Layout::kStages; ++s) {
      mbarrier_init(shared.keys_full(s), kCopied ? kWarpgroup : 1);
      mbarrier_init(shared.values_full(s), kCopied ? kWarpgroup : 1);
      mbarrier_init(shared.keys_free(s), 4 * kConsumers);    // plant: keys used, arrivals
      mbarrier_init(shared.values_free(s), 4 * kConsumers);  // plant: values used, arrivals
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      mbarrier_init(shared.item_full(i), 1);
      if constexpr (kHasMask<Params>) mbarrier_init(shared.item_taken(i), 1);
      mbarrier_init(shared.item_free(i), 32 * (4 * kConsumers + (kCopied ? 4 : 2)));  // all threads that read it
    }
    mbarrier_init(shared.wanted(), 1);
    mbarrier_init(shared.begun(), 1);
    if constexpr (!kCopied && !kHasMask<Params> && !kHasLists<Params>) mbarrier_init(shared.landed(), 1);
    fence_mbarrier_init();
    if (!kSplit && !kCopied) mbarrier_arrive(kHasMask<Params> ? shared.item_taken(0) : shared.item_full(0));
  }
  if (warp == 1) prefetch_plan(p, threadIdx.x % 32);
  if constexpr (kHasMask<Params> && kSplit)
    if (warp == 3) prefetch_trees(p, threadIdx.x % 32);
  if (!kCopied && (threadIdx.x == 64 || threadIdx.x == 96))
    prefetch_tensor_map(threadIdx.x == 64 ? &p.key_map : &p.value_map);
  grid_dependency_launch();
  const bool deals = threadIdx.x == 64, deals_early = deals && !kCopied;
  if (deals_early) grid_dependency_wait();
  typename TypeIf<kSplit, PartDealer<Layout, Params>, ItemDealer<Layout, Params>>::Type dealer(p, shared, deals_early);
  __syncthreads();
  grid_dependency_wait();
  if (!kSplit && p.is_of_chunks && p.parts_in[0].end_place <= 0) return;
  if constexpr (kHasScales<Params>)
    if (*p.has_tiles == 0) return;

  if (warpgroup == 0) {
    registers_decrease<kLoaderRegisters>();
    if constexpr (kCopied)
      load_rows<Layout, kKeyTiles, kValueTiles, kBlock>(p, shared);
    else if (warp == 0)
      load_boxes<Layout, kKeyTiles, kBlock, true>(p, shared);
    else if (warp == 1)
      load_boxes<Layout, kValueTiles, kBlock, false>(p, shared);
    else if (deals)
      dealer.deal(shared);
    if constexpr (kHasMask<Params>)
      if (warp == 3) look_at_masks(p, shared);
  } else {
    registers_increase<kConsumerRegisters>();
    PrefillConsumer<T, kKeyTiles, kValueTiles, kBlock, kConsumers, kCopied, Params, kSplit, kCaps> consumer(
        p, shared, warpgroup - 1);
    consumer.work();
  }
}

}  // namespace cumla::mha
