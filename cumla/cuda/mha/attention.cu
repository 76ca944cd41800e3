// SPDX-License-Identifier: Apache-2.0
// Attention over paged keys and values with queries of different lengths, by the ragged schedule (split/plan.cuh).
// Each CTA has a part: 64 query rows of a kv head at a time, over the blocks of its part.
//
// grid: see HeadTile; 384 threads, with e4m3 of up to 192 key columns 512; one CTA per SM.
//
// Roles:
//   warp 0         loads keys and values by TMA, one box per lane
//   warp 2, 3      copy the query rows of each row tile, 32 each
//   warps 0 to 3   if pages are no multiple of eight tokens: a quarter of the rows of every block each
//   warpgroup 0, 3 e4m3: load and convert the blocks of one consumer each (mha/attention/e4m3.cuh)
//   consumer 0, 1  every second block each; with 512 columns all blocks, and half of the value columns each; of pairs
//                  (mha/attention/pairs.cuh) all blocks of one of two kv heads each. Of few rows (few.cuh) a warp of
//                  each consumer has all
// The block counter t continues over the tiles of a part: block t belongs to consumer t % 2, or both, and to stage
// t % kStages.
//
// Time line:
//   consumer 0 | S0=QK0 | softmax 0 | O+=P0V0 | S2=QK2 | softmax 2 | O+=P2V2 | ...
//   consumer 1 |   S1=QK1 | softmax 1 | O+=P1V1 | S3=QK3 | softmax 3 | O+=P3V3 | ...
//   end of a row tile: exchange halves of the outputs | add them | store, or combine
//
// barrier                      who arrives (count)          who waits                     guards
// keys_full(stage),            TMA (1); rows: each copying  the block's consumer, or      the tiles are loaded
// values_full(stage)           thread (128); e4m3: a lane   both
//                              per converting warp (4)
// keys_free(stage),            a lane per warp of that      the loaders                   the tiles may be overwritten
// values_free(stage)           consumer (4), or of both
//                              (8)
// query_full                   the threads of warps 2 and   both consumers                query rows are loaded
//                              3 (64)
// query_free                   a lane per consumer warp     warps 2 and 3                 query rows may be
//                              (8)                                                        overwritten
// mask_full(slot)              with a mask: a lane of warp   all who attend or load,   what a tile's queries see
//                              0 (1)                         once per tile             is written
// named, kConsumersBarrier     both consumers (256)         the same                      exchange, sums
// named, one per consumer      its threads (128)            the same                      zeroed rows of V; of pairs
//                                                                                        stored pieces
//
// Shared memory: query 8,192 per 64 columns + stages of as much for keys and for values + exchange of 64 x value
//                columns x 4 + sums 1,536 + barriers 256; 231,168 B of 232,448 with 256 columns and two stages
//                512 columns: one stage, exchange 9,216 for combining; 207,616 B
//                pairs: query and stages of both heads, three stages, no exchange; 231,168 B
//                with a mask: + 256 to 1,024 of announcements
//                e4m3: fewer stages, and after the barriers raw blocks of half a stage (mha/attention/e4m3.cuh)
// Registers:     consumers 224 (up to 128 output, 32 scores, 16 probabilities), loaders 56; with e4m3 176 and 80, or
//                200 and 104 with 256 columns
#include "mha/attention/compute.cuh"
#include "mha/attention/few.cuh"
#include "mha/attention/finish.cuh"
#include "mha/attention/copy.cuh"
#include "mha/attention/e4m3.cuh"
#include "mha/attention/layout.cuh"
#include "mha/attention/lists.cuh"
#include "mha/attention/mask.cuh"
#include "mha/attention/pairs.cuh"
#include "mha/attention/shared.cuh"
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

// One warp loads keys and values; each lane loads its own box of a block.
template <typename Layout, typename Params>
__device__ __forceinline__ void load_boxes(const Params& p, const Layout& shared, HeadTile& tile,
                                           const Part& part, int last_place) {
  constexpr int kKeyTiles = Layout::kKeyBytes / kTileBytes, kValueTiles = Layout::kValueBytes / kTileBytes;
  const int lane = threadIdx.x % 32, first = lane * p.box_rows;
  int t = 0;
  for (int place = part.place; place <= last_place; ++place) {
    MaskOf<Params> mask;
    const Segment segment = visible_segment(p, shared, tile, part, place, mask, true);
#pragma unroll 1
    for (int i = 0; i < segment.blocks; ++i, ++t) {
      const int stage = t % Layout::kStages, phase = t / Layout::kStages & 1;
      int row = 0, page = -1;
      if (first < kBlockTokens)
        page = page_of(p, tile, segment.tokens, (segment.begin + i) * kBlockTokens + first, row);
      mbarrier_wait(shared.keys_free(stage), phase ^ 1, "a free stage of keys");
      if (lane == 0) mbarrier_arrive_expect_tx(shared.keys_full(stage), Layout::kHeads * Layout::kKeyBytes);
      __syncwarp();
      if (first < kBlockTokens)
#pragma unroll
        for (int k = 0; k < kKeyTiles; ++k)
          tma_load_4d_async(shared.keys(stage) + k * Layout::kTileStep + first * 128, &p.key_map,
                            shared.keys_full(stage), k * 64, row, tile.index, page);
      mbarrier_wait(shared.values_free(stage), phase ^ 1, "a free stage of values");
      if (lane == 0) mbarrier_arrive_expect_tx(shared.values_full(stage), Layout::kHeads * Layout::kValueBytes);
      __syncwarp();
      if (first < kBlockTokens)
#pragma unroll
        for (int k = 0; k < kValueTiles; ++k)
          tma_load_4d_async(shared.values(stage) + k * Layout::kTileStep + first * 128, &p.value_map,
                            shared.values_full(stage), k * 64, row, tile.index, page);
    }
  }
}

// A warp copies 32 query rows of a tile.
template <typename Layout, bool kFew = false>
__device__ __forceinline__ void load_query(const AttentionParams& p, const Layout& shared, const HeadTile& tile,
                                           int loader, u32 phase) {
  mbarrier_wait(shared.query_free(), phase ^ 1, "a free query buffer");
  if constexpr (kFew) {
    if (loader == 0) copy_query<Layout::kKeyBytes / kTileBytes, kFewRows>(p, tile, 0, shared.query);
    mbarrier_arrive_after_copies(shared.query_full());
    return;
  }
  RaggedTile of = tile;
#pragma unroll 1
  for (int head = 0; head < Layout::kHeads; ++head, ++of.index)
    copy_query<Layout::kKeyBytes / kTileBytes, 32>(p, of, loader * 32, shared.query + head * Layout::kKeyBytes);
  mbarrier_arrive_after_copies(shared.query_full());
}

template <typename Layout, bool kFew>
__device__ __forceinline__ void load_queries(const AttentionParams& p, const Layout& shared, HeadTile& tile,
                                             const Part& part, int last_place, int loader) {
  for (int place = part.place; place <= last_place; ++place) {
    segment_of(p, tile, part, place);
    load_query<Layout, kFew>(p, shared, tile, loader, (place - part.place) & 1);
  }
  copy_async_wait_all();
}

// All four warps load keys and values row by row. The last two load the query rows first.
template <typename Layout, typename Params>
__device__ __forceinline__ void load_rows(const Params& p, const Layout& shared, HeadTile& tile,
                                          const Part& part, int last_place) {
  constexpr int kKeyTiles = Layout::kKeyBytes / kTileBytes, kValueTiles = Layout::kValueBytes / kTileBytes;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = warp * 16;
  int t = 0;
  for (int place = part.place; place <= last_place; ++place) {
    MaskOf<Params> mask;
    const Segment segment = visible_segment(p, shared, tile, part, place, mask, warp == 0);
    if (warp >= 2) load_query(p, shared, tile, warp - 2, (place - part.place) & 1);
#pragma unroll 1
    for (int i = 0; i < segment.blocks; ++i, ++t) {
      const int stage = t % Layout::kStages, phase = t / Layout::kStages & 1;
      int row = 0;
      const int page = page_of(p, tile, segment.tokens, (segment.begin + i) * kBlockTokens + first + lane % 16, row);
      const auto offset = [&](const Columns& from) {
        return page < 0 ? i64{-1} : page * from.stride_page + row * from.stride_row + tile.index * from.stride_head;
      };
      mbarrier_wait(shared.keys_free(stage), phase ^ 1, "a free stage of keys");
      copy_rows<kKeyTiles, kTileBytes, 16>(p.keys.base, offset(p.keys), first, p.key_columns, shared.keys(stage));
      mbarrier_arrive_after_copies(shared.keys_full(stage));
      mbarrier_wait(shared.values_free(stage), phase ^ 1, "a free stage of values");
      copy_rows<kValueTiles, kTileBytes, 16>(p.values.base, offset(p.values), first, p.value_columns,
                                             shared.values(stage));
      mbarrier_arrive_after_copies(shared.values_full(stage));
    }
  }
  copy_async_wait_all();
}

template <typename T, int kKeyTiles, int kValueTiles, bool kCopied, bool kE4m3 = false, bool kCaps = true,
          bool kFew = false, typename Given>
__device__ __forceinline__ void attention(const Given& given) {
  using All = typename TypeIf<kCaps, Given, LeanParams>::Type;
  using Params = typename TypeIf<kFew, FewRows<All>, All>::Type;
  const Params& p = static_cast<const Params&>(given);
  using Layout = SharedLayout<kKeyTiles, kValueTiles, kE4m3, kIsPaired<Params>>;
  // A mask takes more registers of those who copy rows.
  constexpr int kMore = kHasMask<Params> && kCopied && !kE4m3 ? 16 : 0;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const Layout shared = {shared_address(shared_bytes)};
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0), warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int s = 0; s < Layout::kStages; ++s) {
      mbarrier_init(shared.keys_full(s), kE4m3 ? 4 : kCopied ? kWarpgroup : 1);    // plant: e4m3 keys, arrivals
      mbarrier_init(shared.values_full(s), kE4m3 ? 4 : kCopied ? kWarpgroup : 1);  // plant: e4m3 values, arrivals
      mbarrier_init(shared.keys_free(s), Layout::kSeesAll ? 8 : 4);
      mbarrier_init(shared.values_free(s), Layout::kSeesAll ? 8 : 4);
    }
    if constexpr (kHasMask<Params>)
#pragma unroll
      for (int slot = 0; slot < Layout::kMaskSlots; ++slot) mbarrier_init(shared.mask_full(slot), 1);
    mbarrier_init(shared.query_full(), 64);
    mbarrier_init(shared.query_free(), 8);
    fence_mbarrier_init();
  }
  if (warp == 1) prefetch_plan(p, threadIdx.x % 32);
  if (!kCopied && !kE4m3 && (threadIdx.x == 64 || threadIdx.x == 96))
    prefetch_tensor_map(threadIdx.x == 64 ? &p.key_map : &p.value_map);
  grid_dependency_launch();
  __syncthreads();
  grid_dependency_wait();

  const Part part = part_of_cta(p, blockIdx.y);
  const int last_place = last_place_of(p, part);
  TileOf<Params> tile(p);
  if (warpgroup % 3 == 0) {
    registers_decrease<Layout::kLoaderRegisters + kMore>();
    if constexpr (kE4m3)
      load_e4m3<T>(p, shared, tile, part, last_place, warpgroup / 3);
    else if (kCopied)
      load_rows(p, shared, tile, part, last_place);
    else if (warp == 0)
      load_boxes(p, shared, tile, part, last_place);
    else if (warp >= 2)
      load_queries<Layout, kIsFew<Params>>(p, shared, tile, part, last_place, warp - 2);
  } else {
    registers_increase<Layout::kConsumerRegisters - kMore / 2>();
    Consumer<T, kKeyTiles, kValueTiles, kCopied, kE4m3, Params> consumer(p, shared, tile, warpgroup - 1);
    int t = 0;
    for (int place = part.place; place <= last_place; ++place) {
      const Segment segment = visible_segment(p, shared, tile, part, place, consumer.mask);
      if constexpr (kIsFew<Params>) tile.rows = min(tile.rows, kFewRows);
      consumer.compute(segment, t, (place - part.place) & 1);
      consumer.finish(segment, place < last_place);
      t += segment.blocks;
    }
  }
}

}  // namespace cumla::mha
