// SPDX-License-Identifier: Apache-2.0
// The kernel of mla_sparse_v4.cu and mla_sparse_v41.cu, whose rows differ.
#pragma once
#include "mla/mla_decode/kernel.cuh"
#include "sparse/mla_sparse_v4/convert.cuh"
#include "sparse/mla_sparse_v4/find.cuh"
#include "sparse/mla_sparse_v4/join.cuh"
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
  if (threadIdx.x / 32 == 3) {  // has L2 fetch lengths, and the sinks that the end of a segment waits for
    const int first = threadIdx.x % 32 * 32;
    if (first < p.batch) prefetch_l2(p.block_table + first);
    if (p.sinks != nullptr && first < p.heads_per_group) prefetch_l2(p.sinks + first * p.sinks_stride);
  }
  begin_kernel<kRows, V4Tile>(p, shared, 4);
  if (warpgroup == 1)  // finders would be late
#pragma unroll
    for (const V4Cache& cache : params.caches)
      prefetch_lists(p, cache.lists, cache.entries, threadIdx.x - kWarpgroup, kWarpgroup);
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
    const int last_place = last_place_of(p, part);
    if (warpgroup == 2) named_barrier_sync<kFoundBarrier, 2 * kWarpgroup>();
    if (warpgroup == 2 && part.place <= last_place) {  // the query of the first list, while its rows come
      const int request = segment_of(p, static_cast<ListTile<kRowTile>&>(tile), part, part.place).request;
      copy_query<kRowTile, 4>(p, shared, tile, request, threadIdx.x / 32 - 8);
      mbarrier_arrive_after_copies(shared.query_full());
    }
    compute<Consumer<Bf16, true, true, V4Tile>>(p, shared, tile, part, last_place, warpgroup);
  }
}

}  // namespace cumla::sparse
