// SPDX-License-Identifier: Apache-2.0
// MLA attention of each query token to its own list of rows in DeepSeek-V4's format: 448 e4m3 columns with a scale for
// each 64, a power of two, and 64 bfloat16 RoPE columns; all 512 are key and value. A list may go on in a second cache.
//
// 512 threads. Warpgroups 1 and 2 are the consumers of mla/mla_decode.cu, in its order of products for shared blocks;
// the tile of RoPE columns, which V4's rows have among the others, does not exist for them. Two warpgroups load:
//
//   3  finds rows, and copies their bfloat16 columns and the query rows
//   0  converts e4m3 columns to bfloat16, which holds every product of an e4m3 number and such a scale
//
// How far each is ahead, and why there are two: docs/kernels/mla_sparse.md.
//
// Shared memory:  as mla/mla_decode.cu; the ring of rows lies in the RoPE tile of stage 0
// Registers:      consumers 200, converters 64, finders 48: together the 4 x 128 of the start. With 512 threads no
//                 single product may have 256 columns (kWideProducts).
// Converters:     some 1,000 instructions a warp and block, beside 2,048 clocks of tensor work
#include "mla/mla_decode.cu"
#include "sparse/mla_sparse_v4/load.cuh"
#include "sparse/selected.cuh"
#include "ptx/types.cuh"

namespace cumla::sparse {

using namespace ptx;

__device__ __forceinline__ void mla_sparse_v4(const MlaSparseV4Params& params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const MlaDecodeParams& p = params.decode;
  const V4Layout shared(shared_address(shared_bytes));
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  if (warpgroup == 3)
#pragma unroll
    for (const V4Cache& cache : params.caches)
      prefetch_lists(p, cache.lists, cache.entries, threadIdx.x - 3 * kWarpgroup, kWarpgroup);
  begin_kernel<kRows, V4Tile>(p, shared, 4);
  grid_dependency_wait();
  if (warpgroup == 0) {
    registers_decrease<64>();
    convert_v4(shared, threadIdx.x / 32);
  } else if (warpgroup == 3) {
    registers_decrease<48>();
    const Part part = part_of_cta(p, copy_of(blockIdx.y));
    V4Tile tile(p);
    find_v4(params, shared, tile, part, last_place_of(p, part), threadIdx.x / 32 - 12);
  } else {
    registers_increase<200>();
    const Part part = part_of_cta(p, blockIdx.y);
    V4Tile tile(p);
    compute<Consumer<Bf16, true, true, V4Tile>>(p, shared, tile, part, last_place_of(p, part), warpgroup);
  }
}

}  // namespace cumla::sparse
