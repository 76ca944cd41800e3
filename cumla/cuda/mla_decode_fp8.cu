// SPDX-License-Identifier: Apache-2.0
#include "mla_decode_fp8_compute.cuh"
#include "mla_decode_fp8_finish.cuh"
#include "mla_decode_fp8_layout.cuh"
#include "mla_decode_fp8_load.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"

namespace cumla {

// loaders: threads that arrive for half of a block.
template <int kQueryRows, bool kGrouped>
__device__ __forceinline__ void initialise_barriers(const Fp8Layout<kQueryRows, kGrouped>& shared, int loaders) {
#pragma unroll
  for (int s = 0; s < shared.kSlots; ++s) {
    mbarrier_init(shared.full(s, 0), loaders);
    mbarrier_init(shared.full(s, 1), loaders);
    mbarrier_init(shared.free(s), 4);
  }
  mbarrier_init(shared.query_full(), 2);
  mbarrier_init(shared.query_free(), 8);
  fence_mbarrier_init();
}

template <int kQueryRows, bool kGrouped, typename AnyTile>
__device__ __forceinline__ void load(const MlaDecodeFp8Params& p, const Fp8Layout<kQueryRows, kGrouped>& shared) {
  const Part part = part_of_cta(p.decode, blockIdx.y);
  AnyTile tile(p.decode);
  const int last_place = last_place_of(p.decode, part), warp = threadIdx.x / 32;
  if (warp < 2)
    load_kv_fp8<Fp8Layout<kQueryRows, kGrouped>, kGrouped>(p, shared, tile, part, last_place, warp);
  else
    load_query_fp8<kQueryRows>(p, shared, tile, part, last_place, warp - 2);
}

template <typename AnyTile>
__device__ __forceinline__ Segment segment_here(const MlaDecodeParams& p, AnyTile& tile, int place) {
  return segment_of(p, tile, part_of_cta(p, blockIdx.y), place);
}

template <int kQueryRows, bool kGrouped, typename AnyTile>
__device__ __forceinline__ void compute(const MlaDecodeFp8Params& p, const Fp8Layout<kQueryRows, kGrouped>& shared,
                                        int consumer_index) {
  AnyTile tile(p.decode);
  Fp8Consumer<kQueryRows, kGrouped, AnyTile> consumer(p, shared, tile, consumer_index);
  const Part part = part_of_cta(p.decode, blockIdx.y);
  const int last_place = last_place_of(p.decode, part);
  int t = 0;
  u32 query_phase = 0;
#pragma unroll 1
  for (int place = part.place; place <= last_place; ++place, query_phase ^= 1) {
    // Read again for the end of the segment: kept over its blocks, part and segment would cost registers that they lack.
    t += consumer.compute(segment_here<AnyTile>(p.decode, tile, place), t, query_phase);
    const Segment segment = segment_here<AnyTile>(p.decode, tile, place);
    Fp8Finisher<kQueryRows, kGrouped, AnyTile>(consumer, segment).finish(place < last_place);
  }
}

template <int kQueryRows, bool kGrouped, typename AnyTile = QueryTile<kQueryRows>>
__device__ __forceinline__ void mla_decode_fp8(const MlaDecodeFp8Params& p) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const Fp8Layout<kQueryRows, kGrouped> shared(shared_address(shared_bytes));
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  begin_kernel<kRows, AnyTile>(p.decode, shared);
  if (warpgroup == 0) {
    registers_decrease<kQueryRows == 16 ? 88 : 56>();
    load<kQueryRows, kGrouped, AnyTile>(p, shared);
  } else {
    registers_increase<kQueryRows == 16 ? 208 : 224>();
    compute<kQueryRows, kGrouped, AnyTile>(p, shared, warpgroup - 1);
  }
}

}  // namespace cumla
