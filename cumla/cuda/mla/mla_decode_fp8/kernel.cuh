// SPDX-License-Identifier: Apache-2.0
// The kernel mla_decode_fp8, which sparse MLA shares.
#pragma once
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
  using Lines = typename Prefetched<AnyTile>::Tile;
  begin_kernel<kForm == kRows ? kRows : kPages, Lines>(p.decode, shared, kForm == kRows ? 2 : 0);
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
