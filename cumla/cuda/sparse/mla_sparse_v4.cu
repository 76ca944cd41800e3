// SPDX-License-Identifier: Apache-2.0
// MLA attention of each query token to its own list of rows in DeepSeek-V4's format: 448 e4m3 columns with a scale for
// each 64, a power of two, and 64 bfloat16 RoPE columns; all 512 are key and value. A list may go on in a second cache.
//
// Consumers, time line and shared memory are those of mla/mla_decode.cu with one row tile. The loaders are others: four
// warps copy 16 rows of every block each, and convert them in place to bfloat16, which holds every product of an e4m3
// number and such a scale. The tile of RoPE columns, which V4's rows have among the others, is zeros here, in the cache
// and in the query.
//
// Registers:  consumers 216, loaders 72: together the 3 x 168 of the start
// Loaders:    18 copies of 16 bytes a lane and block, and 14 conversions of 16 numbers, some 700 instructions a warp,
//             beside 2,176 clocks of tensor work
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
  begin_kernel<kRows, V4Tile>(p, shared, 4);
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
    compute<Bf16, true, kRows>(p, shared, tile, part, last_place_of(p, part), warpgroup);
  }
}

}  // namespace cumla::sparse
