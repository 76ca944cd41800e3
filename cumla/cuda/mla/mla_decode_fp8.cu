// SPDX-License-Identifier: Apache-2.0
// MLA attention over caches with e4m3 latent columns: under one factor, or (kGrouped) under a scale per token and 128
// columns. RoPE columns are e4m3 or bfloat16. As in mla_decode_swapped the operands are swapped; 16 or 32 query rows.
//
// grid = (row tiles of a kv head, parts, kv heads), 384 threads, one CTA per SM. If query lengths differ it is
// (2, parts, kv heads): half of a row tile at each place of the schedule (HalfTile).
//
// Roles and time line:
//   warp 0         loads all blocks by TMA; single rows: warps 0 and 1, half of the rows each
//   warp 2, 3      have L2 fetch plan and block table, then load the query rows as float16
//   consumer 0, 1  compute every second block each, and add up their outputs at the end of a segment:
//     S = K Q      bytes of a row -> registers -> float16 -> product | beside it the next bytes are converted
//     P            exp2(S - reference) -> float16 | did any overflow? -> rarely: raise references, again
//     O += V P     ldmatrix.trans -> bytes apart -> float16 -> product | beside it the next bytes are converted
// Both products take the tokens of a block in the order of token_at (docs/kernels/mla-fp8.md).
//
// barrier                   who arrives (count)           who waits                      guards
// full(slot), 4             TMA (1); kRows: each copying  the block's consumer           the block is loaded
//                           thread (64)
// free(slot), 4             a lane per warp of that       the loaders                    the block may be overwritten
//                           consumer (4)
// query_full(n)             a lane per query warp (2)     both consumers                 query rows are loaded
// query_free(n)             a lane per consumer warp (8)  the query warps; with two      the query may be overwritten;
//                                                         query buffers the consumers,   exchange n is read
//                                                         too
// named, kConsumersBarrier  both consumers (256)          the same                       exchange, sums
// named, one per consumer   its threads (128)             the same                       P, references, votes
//
// Shared memory:  ring of 4 blocks 163,840, with scales 167,936; query and P, also exchange and combining, 32,768
//                 (kPacked 34,816, where RoPE columns hold no P) and the next query 18,432 (16 rows), or
//                 53,248; sums, maxima and references of a row 84 to 312 B; words 16; barriers 80 or 96: at most
//                 231,136 B. Of 256 latent columns a ring of 6 blocks 147,456
// Registers:      consumers 208 (16 rows: output 64) or 224 (output 128), loaders 88 or 56; 168 at the start. 200 and
//                 104 for single rows with scales, because loaders have addresses in three arrays
// Tensor work:    36 + 32 products m64n16k16 or m64n32k16 per block
#include "mla/mla_decode_fp8/compute.cuh"
#include "mla/mla_decode_fp8/finish.cuh"
#include "mla/mla_decode_fp8/layout.cuh"
#include "mla/mla_decode_fp8/load.cuh"
#include "mla/mla_decode/masked.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace ptx;
using namespace split;

// row_warps: warps that copy rows; 0 without single rows.
// model: fp8_segments
template <int kQueryRows, bool kGrouped, PageForm kForm, int kLatentTiles>
__device__ __forceinline__ void initialise_barriers(
    const Fp8Layout<kQueryRows, kGrouped, kForm, kLatentTiles>& shared, int row_warps) {
#pragma unroll
  for (int s = 0; s < shared.kSlots; ++s) {
    mbarrier_init(shared.full(s), max(row_warps * 32, 1));
    mbarrier_init(shared.free(s), 4);  // plant: slot read, arrivals
  }
#pragma unroll
  for (int n = 0; n < shared.kQueries; ++n) {
    mbarrier_init(shared.query_full(n), 2);  // plant: query copied, arrivals
    mbarrier_init(shared.query_free(n), 8);  // plant: query read, arrivals
  }
  fence_mbarrier_init();
}

template <int kQueryRows, bool kGrouped, PageForm kForm, typename AnyTile, typename Layout>
__device__ __forceinline__ void load(const MlaDecodeFp8Params& p, const Layout& shared) {
  const Part part = part_of_cta(p.decode, blockIdx.y);
  AnyTile tile(p.decode);
  const int last_place = last_place_of(p.decode, part), warp = threadIdx.x / 32;
  if (warp < 2) {
    if constexpr (kForm == kRows)
      load_kv_fp8<Layout, kGrouped>(p, shared, tile, part, last_place, warp);
    else if (warp == 0 && elect_one())
      load_kv_fp8_pages<Layout, kGrouped>(p, shared, tile, part, last_place);
  } else {
    load_query_fp8<kQueryRows>(p, shared, tile, part, last_place, warp - 2);
  }
}

template <typename AnyTile>
__device__ __forceinline__ Segment segment_here(const MlaDecodeParams& p, AnyTile& tile, int place) {
  return segment_of(p, tile, part_of_cta(p, blockIdx.y), place);
}

// model: fp8_segments
template <int kQueryRows, bool kGrouped, PageForm kForm, typename AnyTile, typename Layout>
__device__ __forceinline__ void compute(const MlaDecodeFp8Params& p, const Layout& shared, int consumer_index) {
  AnyTile tile(p.decode);
  Fp8Consumer<kQueryRows, kGrouped, kForm, AnyTile> consumer(p, shared, tile, consumer_index);
  const Part part = part_of_cta(p.decode, blockIdx.y);
  const int last_place = last_place_of(p.decode, part);
  int t = 0;
#pragma unroll 1
  for (int place = part.place; place <= last_place; ++place, ++consumer.n) {
    // Part and segment are computed again for the end of the segment. Kept over its blocks they would cost registers.
    t += consumer.compute(segment_here<AnyTile>(p.decode, tile, place), t);
    const Segment segment = segment_here<AnyTile>(p.decode, tile, place);
    Fp8Finisher<kQueryRows, kGrouped, kForm, AnyTile>{consumer, segment}.finish(place < last_place);
  }
}

// kForm: kPages, or kPacked for packed rows and at most 16 query rows. kRows is for pages that are no multiples of 64
// tokens, for ragged queries with kGrouped, and for broadcast arrays.
template <int kQueryRows, bool kGrouped, PageForm kForm, typename AnyTile = QueryTile<kQueryRows>>
__device__ __forceinline__ void mla_decode_fp8(const MlaDecodeFp8Params& p) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const Fp8Layout<kQueryRows, kGrouped, kForm, AnyTile::kLatentTiles> shared(shared_address(shared_bytes));
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  begin_kernel<kForm == kRows ? kRows : kPages, AnyTile>(p.decode, shared, kForm == kRows ? 2 : 0);
  grid_dependency_wait();
  constexpr bool kManyAddresses = kGrouped && kForm == kRows;
  if (warpgroup == 0) {
    registers_decrease<kQueryRows == 16 ? (kManyAddresses ? 104 : 88) : 56>();
    load<kQueryRows, kGrouped, kForm, AnyTile>(p, shared);
  } else {
    registers_increase<kQueryRows == 16 ? (kManyAddresses ? 200 : 208) : 224>();
    compute<kQueryRows, kGrouped, kForm, AnyTile>(p, shared, warpgroup - 1);
  }
}

}  // namespace cumla::mla
