// SPDX-License-Identifier: Apache-2.0
// MLA attention of 64 heads of a query token per CTA over rows with e4m3 latent columns; of few lists, 16 or 32 heads
// (Form::kHeads). There is no 16-bit copy of the rows and no cluster. Operands are swapped, so products are as narrow
// as there are heads. Both products take A from registers, where it is converted, as in
// mla/mla_decode_fp8.cu. One factor for the whole cache is applied to query and output.
//
// grid = (row tiles of a kv head, parts, kv heads), 384 threads, one CTA per SM.
//
// Roles and time line:
//   warps 0 to 3   load a granule of 16 rows of every block each: one box of TMA if all rows are visible, and adjacent
//                  in a page and in memory; else a row per lane by bulk copies
//   consumer 0, 1  own columns [256 c, 256 c + 256) of V, and score every second block; both load the query
//
// A scale for each token and 128 columns (compute.cuh):
//   consumer 0 | S0 | softmax 0 | O+=V0P0 |           S2 | softmax 2 | O+=V1P1 | O+=V2P2 | ...
//   consumer 1 |      S1 | softmax 1 | O+=V0P0 | O+=V1P1 | S3 | softmax 3 | ...
// One factor (one_factor.cuh), where products run beside each softmax but the first:
//   consumer 0 | S0 | softmax 0 | O+=V0P0 , S2 | softmax 2, O+=V1P1 | O+=V2P2 , S4 | softmax 4, O+=V3P3 | ...
//   consumer 1 |      S1 | softmax 1, O+=V0P0 | O+=V1P1 , S3 | softmax 3, O+=V2P2 | O+=V3P3 , S5 | ...
//
// barrier                      who arrives (count)          who waits                     guards
// full(slot), 12 or 13         lane 0 of the loading warp,  the owner's warp of the       the granule and its `exist`
//                              with the bytes of its        granule                       word
//                              copies (1)
// free(slot), 12 or 13         a lane per warp of both      the loading warp              the granule may be
//                              consumers (8)                                              overwritten
// probabilities_full(turn), 2  thread 0 of the owner,       both consumers                P, table, references,
//                              after a barrier of its                                     granules of the block
//                              consumer (1)
// probabilities_free(turn), 2  a lane per consumer warp     the owner                     P may be overwritten
//                              (8)
// named, kConsumersBarrier     both consumers (256)         the same                      query, sums, end of a
//                                                                                         segment
// named, one per consumer      its threads (128)            the same                      P, references, votes
//
// Shared memory:  query 73,728 + P 16,384 + ring of 13 granules 136,448 + scales 1,024 + references, factors and sums
//                 3,072 + words 72 + barriers 240 = 230,968 B of 232,448; with one factor a ring of 12 and no scales,
//                 219,424 B. 32 or 16 heads leave room for 17 or 19 granules, with one factor for 16
// Registers:      consumers 240 (output 128, scores 32, sums 16), loaders 24: together the 3 x 168 of the start
// Tensor work:    36 + 32 products m64n64k16 per block, 2,176 clocks
// docs/kernels/mla-fp8.md explains what scales act on, kWide, and the reasons.
#pragma once
#include "mla/mla_decode_fp8_64/compute.cuh"
#include "mla/mla_decode_fp8_64/finish.cuh"
#include "mla/mla_decode_fp8_64/layout.cuh"
#include "mla/mla_decode_fp8_64/load.cuh"
#include "mla/mla_decode_fp8_64/values.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace ptx;

template <typename Layout>
__device__ __forceinline__ void initialise_barriers(const Layout& shared) {
#pragma unroll
  for (int s = 0; s < Layout::kSlots; ++s) {
    mbarrier_init(shared.full(s), 1);
    mbarrier_init(shared.free(s), 8);  // plant: slot read, arrivals
  }
#pragma unroll
  for (int turn = 0; turn < Layout::kTurns; ++turn) {
    mbarrier_init(shared.probabilities_full(turn), 1);  // plant: probabilities, arrivals
    mbarrier_init(shared.probabilities_free(turn), 8);  // plant: probabilities read, arrivals
  }
  fence_mbarrier_init();
}

__device__ __forceinline__ int last_place_here(const MlaDecodeParams& p) {
  return last_place_of(p, part_of_cta(p, copy_of(blockIdx.y)));
}

// Loads the query of a segment to shared memory, and returns the number of blocks. Called by all threads of both
// consumers.
template <typename Form, typename AnyTile>
__device__ __forceinline__ int begin_segment(const Heads64Consumer<Form>& consumer, int place, float of_query) {
  const MlaDecodeParams& p = consumer.p;
  AnyTile tile(p);
  const Segment segment = segment_of(p, tile, part_of_cta(p, copy_of(blockIdx.y)), place);
  const int thread = threadIdx.x - kWarpgroup;
  if (thread < Form::kHeads) store_shared_float(consumer.shared.reference(thread), kLowest);
  const float factor = !Form::kGrouped && (Form::kRopeIsFp8 || !Form::kHasRope) ? consumer.kv_scale : 1.0f;
  if constexpr (kQueryIsFp8<AnyTile>)
    load_query_fp8_64<Form>(p, consumer.shared, tile, segment.request, factor * of_query);
  else
    load_query_64<Form>(p, consumer.shared, tile, segment.request, factor);
  consumers_sync();
  return segment.blocks;
}

// Part, segment and tile are computed again. Kept over the blocks they would cost registers.
template <typename Form, typename AnyTile>
__device__ __forceinline__ void finish_segment(Heads64Consumer<Form>& consumer, int place, bool more) {
  const MlaDecodeParams& p = consumer.p;
  AnyTile tile(p);
  const Segment segment = segment_of(p, tile, part_of_cta(p, copy_of(blockIdx.y)), place);
  Heads64Finisher<Form, AnyTile>{consumer, tile, segment}.finish(more);
  consumers_sync();  // the next query and its sums overwrite these
}

// Rows defines the format of rows (Form), the tiles (Tile), who computes (Consumer: Heads64Consumer, or derived from
// it), and loads the granules of a warp.
template <typename Rows>
__device__ __forceinline__ void attend_64_heads(const typename Rows::Params& params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  using Form = typename Rows::Form;
  using AnyTile = typename Rows::Tile;
  const MlaDecodeParams& p = params.decode;
  const typename Form::Layout shared(shared_address(shared_bytes));
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  if (threadIdx.x == 0) initialise_barriers(shared);
  if (threadIdx.x / 64 == 1) {  // only two warps: if all threads fetch a line, they queue before the first load
    prefetch_plan<AnyTile>(p, threadIdx.x - 64, 64);
    using Lines = typename Prefetched<AnyTile>::Tile;
    if (AnyTile::kIsList) prefetch_queries<Lines>(p, quotient(p.batch, p.by_q_len), threadIdx.x - 64, 64);
    if (!AnyTile::kIsRagged) prefetch_queries<Lines>(p, p.batch, threadIdx.x - 64, 64);
    Rows::prefetch(params, threadIdx.x - 64, 64);
  }
  grid_dependency_launch();
  __syncthreads();
  grid_dependency_wait();
  if (warpgroup == 0) {
    registers_decrease<24>();
    const Part part = part_of_cta(p, copy_of(blockIdx.y));
    AnyTile tile(p);
    Rows::load(params, shared, tile, part, last_place_of(p, part), threadIdx.x / 32);
  } else {
    registers_increase<240>();
    typename Rows::Consumer consumer(p, shared, Rows::kv_scale(params), warpgroup - 1);
    u32 t = 0;
    int place = part_of_cta(p, blockIdx.y).place;
    bool more = place <= last_place_here(p);
#pragma unroll 1
    while (more) {
      t += consumer.compute(begin_segment<Form, AnyTile>(consumer, place, query_factor<AnyTile>(params)), t);
      more = place < last_place_here(p);
      finish_segment<Form, AnyTile>(consumer, place++, more);
    }
  }
}

}  // namespace cumla::mla
