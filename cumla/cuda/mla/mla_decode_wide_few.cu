// SPDX-License-Identifier: Apache-2.0
// MLA attention over a 16-bit cache of rows of 1024 latent columns and 64 of RoPE, for tiles of 16 query rows: the CTAs
// of a cluster share the keys of a tile. Query rows are the M side of mma.sync products.
//
// grid = (CTAs of a cluster, tiles, kv heads), 384 threads, one CTA per SM. The keys that some row of a tile sees are
// dealt to the CTAs of its cluster key by key, so no block limits how many share a window. The schedule gives places
// only: row tiles of 16 rows. The cluster has 1, 2, 4, 8 or 16 CTAs.
//
// Roles and time line; B: a barrier of the computing warps, C: of the cluster
//   warp 8 to 11 query rows to the end of stage 1, then chunks of 48 keys to either stage: a lane copies a row, of
//                any page
//   warp 0 to 7  S = Q K over a quarter of the columns for half of the keys | B | softmax of two rows | B |
//                O += P V over 128 columns of all keys | ...
//   the same     C | send sums of columns to the CTA of the cluster that stores them | wait for all | B | store
//
// barrier                  who arrives (count)              who waits           guards
// full(stage), 2           a lane per loading warp (4),     computing warps     the chunk is loaded
//                          with bytes
// free(stage), 2           a lane per computing warp (8)    the loading warps   the stage may be overwritten
// query_full               a lane per loading warp (4),     computing warps     the query rows are loaded
//                          with bytes
// query_free               a lane per computing warp (8)    the loading warps   the last rows of stage 1 may be
//                                                                               overwritten
// sent                     a thread (1), with the bytes of  computing warps     the sums that CTAs of the cluster send
//                          all CTAs
// named, kConsumersBarrier computing warps (256)            the same            scores, probabilities, weights
// cluster                  all threads of all CTAs          the same            stages are read, and barriers exist
//
// Shared memory:  two stages of 105,216 + scores 14,336 + P 1,792 + factors 64 + barriers 56 = 226,680 B of 232,448
// Registers:      232 of a computing thread, of which 68 for the query, 64 for output, 24 for scores
// Tensor work:    51 + 48 products m16n8k16 per chunk and warp, bound by reading K and V from shared memory
#include "mla/mla_decode_wide_few/compute.cuh"
#include "mla/mla_decode_wide_few/layout.cuh"
#include "mla/mla_decode_wide_few/load.cuh"
#include "ptx/cluster_async.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace ptx;
using namespace split;

template <typename T>
__device__ __forceinline__ void mla_decode_wide_few(const MlaDecodeParams& p) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const WideFewLayout shared = {shared_address(shared_bytes)};
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int rank = blockIdx.x, cluster_log2 = 31 - __clz(gridDim.x);
  const i64 cta = (static_cast<i64>(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const i64 line = (cta * (32 * (kFewWarps + kFewLoaders)) + threadIdx.x) * 32;  // entries
  if (threadIdx.x == 0) prefetch_l2(reinterpret_cast<const TilePlace*>(p.places) + blockIdx.y);
  if (line < p.page_entries) prefetch_l2(p.block_table + line);
  if (threadIdx.x == 32 * kFewWarps) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      mbarrier_init(shared.full(s), kFewLoaders);
      mbarrier_init(shared.free(s), kFewWarps);
    }
    mbarrier_init(shared.query_full(), kFewLoaders);
    mbarrier_init(shared.query_free(), kFewWarps);
    mbarrier_init(shared.sent(), 1);
    fence_mbarrier_init();
    const int others = gridDim.x - 1, units = (kFewUnits >> cluster_log2) * p.row_groups;
    mbarrier_arrive_expect_tx(shared.sent(), others * (units * kFewUnitBytes + 16 * kFewRows));
  }
  grid_dependency_launch();
  grid_dependency_wait();
  __syncthreads();
  if (warp >= kFewWarps) {
    registers_decrease<40>();
    FewTile tile(p);
    const FewShare share(p, tile, rank, cluster_log2);
    load_few(p, shared, tile, share, warp - kFewWarps);
    if (cluster_log2 > 0) {
      cluster_arrive_relaxed();
      cluster_wait();
    }
  } else {
    registers_increase<232>();
    FewTile tile(p);
    const FewShare share(p, tile, rank, cluster_log2);
    FewConsumer<T> consumer(p, shared, tile, share, warp);
    consumer.attend();
    if (__builtin_expect(cluster_log2 > 0, 1)) {
      cluster_arrive_relaxed();  // this CTA's stages are read
      cluster_wait();
      if (p.row_groups == 1) {
        consumer.template send<1>(rank, cluster_log2);
        consumer.template finish<1>(rank, cluster_log2);
      } else {
        consumer.template send<2>(rank, cluster_log2);
        consumer.template finish<2>(rank, cluster_log2);
      }
    } else {
      consumer.finish_alone();
    }
  }
}

}  // namespace cumla::mla
