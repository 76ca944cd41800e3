// SPDX-License-Identifier: Apache-2.0
// MLA attention over rows of 576 e4m3 columns under one factor, for a multiple of 64 heads per kv head. Loading warps
// convert rows to float16, which holds every e4m3 number; the products are those of mla_decode. Of a multiple of 128
// heads the two CTAs of a cluster (kCtas = 2) have other heads of the same query token, so they read the same rows:
// each converts half of the rows of a block, and stores them in the shared memory of both.
//
// grid = (row tiles of a kv head, parts, kv heads), clusters of kCtas row tiles, 384 threads, one CTA per SM.
//
// Roles and time line:
//   warps 0 to 3   load 8 rows of a block each, or twice 8 if rows are not shared, into registers while the block
//                  before is multiplied; when a third of a stage is free in all CTAs, convert and store its columns
//   consumer 0, 1  load the query of a segment, then compute as in mla/mla_decode.cu with several row tiles
//
// barrier                    who arrives (count)                   who waits             guards
// full(stage, third), 2 x 3  lane 0 of each loading warp for each  the block's consumer  the third is loaded
//                            8 rows (8 or 4), if rows are shared
//                            with the bytes of the other CTA
// free(stage, third), 2 x 3  a lane per warp of a consumer, of     the loaders           the third may be overwritten
//                            both CTAs if they share (4 or 8)
// probabilities_full(c), 2   every fourth lane of consumer c (32)  the other consumer    P, maxima, tiles of the block
// query_full                 a lane per consumer warp (8)          consumers             query rows are loaded
// query_free                 a lane per consumer warp (8)          nobody                nothing
// named, kConsumersBarrier   both consumers (256)                  the same              sums at the end of a segment
// named, one per consumer    its threads (128)                     the same              zeroed rows of V, votes
//
// Shared memory:  that of mla_decode, 232,160 + factors of scores 256 + of the output 4 = 232,420 B of 232,448
// Registers:      consumers 216, loaders 72 (36 of rows): together the 3 x 168 of the start
// Tensor work:    2,176 clocks per block; loads 36,864 B per block and cluster
#include "mla/mla_decode/compute.cuh"
#include "mla/mla_decode/load.cuh"
#include "mla/mla_decode/masked.cuh"
#include "mla/mla_decode/shared.cuh"
#include "mla/mla_decode_fp8/layout.cuh"
#include "mla/mla_decode_fp8_converted/load.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace ptx;
using namespace split;

template <int kCtas, typename Layout>
__device__ __forceinline__ void initialise_converted_barriers(const Layout& shared) {
#pragma unroll
  for (int s = 0; s < Layout::kStages; ++s) {
#pragma unroll
    for (int third = 0; third < 3; ++third) {
      mbarrier_init(shared.full(s, third * Layout::kHalfTiles), 8 / kCtas);
      mbarrier_init(shared.free(s, third), 4 * kCtas);
    }
  }
#pragma unroll
  for (int owner = 0; owner < 2; ++owner) mbarrier_init(shared.probabilities_full(owner), kWarpgroup / 4);
  mbarrier_init(shared.query_full(), 8);
  mbarrier_init(shared.query_free(), 8);
  fence_mbarrier_init();
}

template <typename AnyTile>
__device__ __forceinline__ void mla_decode_fp8_converted(const MlaDecodeFp8Params& params) {
  using AnyConsumer = Consumer<Fp16, true, true, AnyTile>;
  using Layout = SharedLayoutOf<AnyTile::kLatentTiles>;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const MlaDecodeParams& p = params.decode;
  const Layout shared(shared_address(shared_bytes));
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  if (threadIdx.x == 0) initialise_converted_barriers<AnyTile::kCtas>(shared);
  if (threadIdx.x / 64 == 1) {
    prefetch_plan<AnyTile>(p, threadIdx.x - 64, 64);
    prefetch_queries<AnyTile>(p, p.batch, threadIdx.x - 64, 64);
  }
  grid_dependency_launch();
  cluster_sync();
  grid_dependency_wait();
  if (warpgroup == 0) {
    registers_decrease<AnyTile::kTwoLoaders ? (AnyTile::kCtas == 2 ? 56 : 64)  : 72>();
    const Part part = part_of_cta(p, copy_of(blockIdx.y));
    AnyTile tile(p);
    load_converted<AnyTile::kTwoLoaders ? 1 : 0>(p, shared, tile, part, last_place_of(p, part), threadIdx.x / 32);
  } else if (AnyTile::kTwoLoaders && warpgroup == 3) {
    registers_decrease<AnyTile::kCtas == 2 ? 56 : 48>();
    const Part part = part_of_cta(p, copy_of(blockIdx.y));
    AnyTile tile(p);
    load_converted<2>(p, shared, tile, part, last_place_of(p, part), threadIdx.x / 32 - 12);
  } else {
    registers_increase<AnyTile::kTwoLoaders ? 200 : 216>();
    const float kv_scale = params.kv_scale == nullptr ? params.kv_scale_value : *params.kv_scale;
    if (threadIdx.x == kWarpgroup) store_shared_float(score_factor_in(shared, kRowTile), kv_scale);
    const Part part = part_of_cta(p, blockIdx.y);
    const int last_place = last_place_of(p, part);
    AnyTile tile(p);
    AnyConsumer consumer(p, shared, tile, warpgroup - 1);
    int t = 0;
#pragma unroll 1
    for (int place = part.place; place <= last_place; ++place) {
      const Segment segment = segment_of(p, tile, part, place);
      load_query_converted(p, shared, tile, segment.request, kv_scale);
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.query_full());
      consumer.compute(segment, t, (place - part.place) & 1);
      consumer.finish(segment, place < last_place);
      t += segment.blocks;
    }
  }
  cluster_sync();  // until here the other CTA may store to this one's shared memory
}

}  // namespace cumla::mla
