// SPDX-License-Identifier: Apache-2.0
// The kernel of mla_sparse_v4.cu and mla_sparse_v41.cu, whose rows differ.
#pragma once
#include "mla/mla_decode/kernel.cuh"
#include "sparse/mla_sparse_v4/convert.cuh"
#include "sparse/mla_sparse_v4/find.cuh"
#include "sparse/selected.cuh"
#include "ptx/types.cuh"

namespace cumla::sparse {

using namespace ptx;

// kConverting, kComputing: registers of a converter's and of a consumer's thread.
template <typename Format, int kConverting = 64, int kComputing = 200>
__device__ __forceinline__ void attend_v4(const MlaSparseV4Params& params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const MlaDecodeParams& p = params.decode;
  const V4LayoutOf<Format> shared(shared_address(shared_bytes));
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  if (warpgroup == 3)
#pragma unroll
    for (const V4Cache& cache : params.caches)
      prefetch_lists(p, cache.lists, cache.entries, threadIdx.x - 3 * kWarpgroup, kWarpgroup);
  begin_kernel<kRows, V4Tile>(p, shared, 4);
  grid_dependency_wait();
  if (warpgroup == 0) {
    registers_decrease<kConverting>();
    convert_v4<Format>(shared, threadIdx.x / 32);
  } else if (warpgroup == 3) {
    registers_decrease<48>();
    const Part part = part_of_cta(p, copy_of(blockIdx.y));
    V4Tile tile(p);
    find_v4<Format>(params, shared, tile, part, last_place_of(p, part), threadIdx.x / 32 - 12);
  } else {
    registers_increase<kComputing>();
    const Part part = part_of_cta(p, blockIdx.y);
    V4Tile tile(p);
    compute<Consumer<Bf16, true, true, V4Tile>>(p, shared, tile, part, last_place_of(p, part), warpgroup);
  }
}

}  // namespace cumla::sparse
