// SPDX-License-Identifier: Apache-2.0
// Attention of many query rows: each CTA attends for one whole row tile after another, 64 query rows of a kv head for
// each consumer, to all keys that they see. No tile is cut. grid = (as many CTAs as multiprocessors), 384 or 512
// threads, one CTA an SM.
//
// The schedule (split/ragged_schedule.cu, in one part) lists tiles of as many rows. Each CTA begins with the tile of
// its own number and takes the next ones from a counter (in which order: docs/kernels/mha-prefill.md).
//
// Warpgroup 0 loads: warp 0 keys, warp 1 values (TMA); warp 2 takes tiles from the counter and announces them. Where
// pages are no multiple of eight tokens, each warp loads a quarter of the rows of a block, and warp 0 announces. The
// other warpgroups, two, or three with 64 columns, have 64 query rows each and work through the blocks of all tiles
// without a break, in each tile from the last to the first. They take turns: while one issues its products the others
// make probabilities. Time lines, and why the end of a tile is short: docs/kernels/mha-prefill.md.
//
// Budget of 128 rows by 128 keys, 128 columns: 2 x 1,024 tensor clocks; 16,384 exponentials at 16 a clock are 1,024,
// and some four other instructions for each at 128 a clock 512.
// Shared memory: query 8,192 a 64 columns and consumer + output 8,192 a consumer + 2 stages of keys and values
//                + announcements 256 + barriers 256
// Registers:     consumers 232 or 224 (up to 128 output, 64 scores, 32 probabilities), loaders 40 or 56; of three
//                consumers 160, loaders 32
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

template <typename T, int kKeyTiles, int kValueTiles, int kBlock, int kConsumers, bool kCopied>
__device__ __forceinline__ void attention_prefill(const AttentionParams& p) {
  using Layout = PrefillLayout<kKeyTiles, kValueTiles, kBlock, kConsumers>;
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
      mbarrier_init(shared.keys_free(s), 4 * kConsumers);
      mbarrier_init(shared.values_free(s), 4 * kConsumers);
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      mbarrier_init(shared.item_full(i), 1);
      mbarrier_init(shared.item_free(i), 32 * (4 * kConsumers + (kCopied ? 4 : 2)));  // all threads that read it
    }
    mbarrier_init(shared.wanted(), 1);
    mbarrier_init(shared.begun(), 1);
    fence_mbarrier_init();
  }
  if (warp == 1) prefetch_plan(p, threadIdx.x % 32);
  if (!kCopied && (threadIdx.x == 64 || threadIdx.x == 96))
    prefetch_tensor_map(threadIdx.x == 64 ? &p.key_map : &p.value_map);
  grid_dependency_launch();
  __syncthreads();
  grid_dependency_wait();
  if (p.is_of_chunks && p.parts_in[0].end_place <= 0) return;

  if (warpgroup == 0) {
    registers_decrease<kLoaderRegisters>();
    if constexpr (kCopied)
      load_rows<Layout, kKeyTiles, kValueTiles, kBlock>(p, shared);
    else if (warp == 0)
      load_boxes<Layout, kKeyTiles, kBlock, true>(p, shared);
    else if (warp == 1)
      load_boxes<Layout, kValueTiles, kBlock, false>(p, shared);
    else if (threadIdx.x == 64)
      deal(p, shared);
  } else {
    registers_increase<kConsumerRegisters>();
    PrefillConsumer<T, kKeyTiles, kValueTiles, kBlock, kConsumers, kCopied> consumer(p, shared, warpgroup - 1);
    consumer.work();
  }
}

}  // namespace cumla::mha
