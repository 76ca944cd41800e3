// SPDX-License-Identifier: Apache-2.0
// MLA attention of each query token to its own list of cache rows, for packed FP8 rows (656 bytes) and more than 16
// heads: no copy of the rows in 16 bits, no cluster. As in mla/mla_decode_fp8.cu the cache's rows and the columns of V
// are the M side of the products, the heads the N side, and both products take A from registers, converted on the way:
//
//   S^T (64 rows x 64 heads) = K (64 x 576) Q^T        O^T (512 x 64 heads) += V^T (512 x 64 rows) P^T
//
// grid = (row tiles of 64 heads, parts, 1), 384 threads, one CTA an SM.
//
// Warpgroup 0 loads: each warp a granule of 16 rows of every block, a bulk copy a lane, so that four warps issue
// copies: one cannot keep up beside products. Warpgroups 1 and 2 compute: consumer c has the columns [256 c, 256 c +
// 256) of V and scores every second block; probabilities go to the other consumer through shared memory:
//
//   consumer 0:  S0  softmax0  O += V0 P0              S2  softmax2  O += V1 P1  O += V2 P2 ...
//   consumer 1:            S1  softmax1  O += V0 P0  O += V1 P1  S3  softmax3 ...
//
// Scales of K act on sums: before a group of columns is added, what there is of a score is divided by its scale and
// multiplied by the last group's. Scales of V are taken relative to a power of two of the row: what is left multiplies
// its fragments as float16, and the power of two its probabilities. Where the scales of a row differ by more than 2^12
// the block's V and probabilities are bfloat16 (kWide).
//
// Shared memory:  query 73,728 + P 16,384 + ring of 13 granules 136,448 + scales 1,024 + references, factors and sums
//                 3,072 + words 72 + barriers 240 = 230,968 B of 232,448
// Registers:      consumers 240 (output 128, scores 32, sums 16), loaders 24; 168 at the start
// Tensor work:    36 + 32 products m64n64k16 a block, 2,176 clocks
#include "sparse/mla_sparse_packed/compute.cuh"
#include "sparse/mla_sparse_packed/finish.cuh"
#include "sparse/mla_sparse_packed/layout.cuh"
#include "sparse/mla_sparse_packed/load.cuh"
#include "sparse/selected.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::sparse {

using namespace ptx;

__device__ __forceinline__ void initialise_barriers(const PackedLayout& shared) {
#pragma unroll
  for (int s = 0; s < PackedLayout::kSlots; ++s) {
    mbarrier_init(shared.full(s), 1);
    mbarrier_init(shared.free(s), 8);  // plant: slot read, arrivals
  }
#pragma unroll
  for (int parity = 0; parity < 2; ++parity) {
    mbarrier_init(shared.probabilities_full(parity), 1);  // plant: probabilities, arrivals
    mbarrier_init(shared.probabilities_free(parity), 8);  // plant: probabilities read, arrivals
  }
  fence_mbarrier_init();
}

__device__ __forceinline__ int last_place_here(const MlaDecodeParams& p) {
  return last_place_of(p, part_of_cta(p, copy_of(blockIdx.y)));
}

// How many blocks a segment has, its query in shared memory. By all threads of both consumers.
template <typename AnyTile>
__device__ __forceinline__ int begin_segment(const MlaDecodeParams& p, const PackedLayout& shared, int place) {
  AnyTile tile(p);
  const Segment segment = segment_of(p, tile, part_of_cta(p, copy_of(blockIdx.y)), place);
  const int thread = threadIdx.x - kWarpgroup;
  if (thread < kHeads) store_shared_float(shared.reference(thread), kLowest);
  load_query_packed(p, shared, tile, segment.request);
  consumers_sync();
  return segment.blocks;
}

// Part, segment and tile are found again: kept over the blocks they would cost registers that there are not.
template <typename AnyTile>
__device__ __forceinline__ void finish_segment(PackedConsumer& consumer, int place, bool more) {
  const MlaDecodeParams& p = consumer.p;
  AnyTile tile(p);
  const Segment segment = segment_of(p, tile, part_of_cta(p, copy_of(blockIdx.y)), place);
  PackedFinisher<AnyTile>(consumer, tile, segment).finish(more);
  consumers_sync();  // the next query lies where this one was, and sums where these are
}

__device__ __forceinline__ void mla_sparse_packed(const MlaSparsePackedParams& params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  using AnyTile = ListTile<kHeads>;
  const MlaDecodeParams& p = params.decode;
  const PackedLayout shared(shared_address(shared_bytes));
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  if (threadIdx.x == 0) initialise_barriers(shared);
  if (threadIdx.x == 32) prefetch_l2(p.parts_in + blockIdx.y);
  if (threadIdx.x >= 64) prefetch_l2(reinterpret_cast<const char*>(p.places) + (threadIdx.x - 64) % 16 * 128);
  grid_dependency_launch();
  __syncthreads();
  grid_dependency_wait();
  if (warpgroup == 0) {
    registers_decrease<24>();
    const Part part = part_of_cta(p, copy_of(blockIdx.y));
    AnyTile tile(p);
    load_granules(params, shared, tile, part, last_place_of(p, part), threadIdx.x / 32);
  } else {
    registers_increase<240>();
    PackedConsumer consumer(p, shared, warpgroup - 1);
    u32 t = 0;
    int place = part_of_cta(p, blockIdx.y).place;
    bool more = place <= last_place_here(p);
#pragma unroll 1
    while (more) {
      t += consumer.compute(begin_segment<AnyTile>(p, shared, place), t);
      more = place < last_place_here(p);
      finish_segment<AnyTile>(consumer, place++, more);
    }
  }
}

}  // namespace cumla::sparse
