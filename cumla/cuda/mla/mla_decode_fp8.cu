// SPDX-License-Identifier: Apache-2.0
// Split-KV MLA decode for sm_90a over caches whose latent columns are e4m3: with a factor for all of them, or
// (kGrouped) with scales for each token and 128 columns; RoPE columns are e4m3 or bfloat16. Operands are swapped as in
// mla_decode_swapped; query rows are 16 or 32.
//
// grid = (row tiles of a kv head, parts, kv heads), 384 threads, one CTA an SM; over queries of different lengths (2,
// parts, kv heads), half of a row tile at each place of the schedule (HalfTile).
//
// Roles are those of mla_decode_swapped; warps 2 and 3 bring the query rows as float16.
//
// Bytes of the cache become float16 in registers (docs/kernels/mla-fp8.md). Tokens come in the order of token_at, in
// both products.
//
// Shared memory:  ring of 4 blocks 163,840, with scales 167,936; query and P, also exchange and joining, 32,768
//                 (kPacked 34,816, where no P lies in place of RoPE columns) and the next query 18,432 (16 rows), or
//                 53,248; sums, maxima and references of a row 84 to 312 B; words 16; barriers 80 or 96: at most
//                 231,136 B
// Registers:      consumers 208 (16 rows: output 64) or 224 (output 128), loaders 88 or 56; 168 at the start. 200 and
//                 104 for single rows with scales: a loader's lane has addresses of three arrays
// Tensor work:    36 + 32 products m64n16k16 or m64n32k16 a block
#include "mla/mla_decode_fp8/compute.cuh"
#include "mla/mla_decode_fp8/finish.cuh"
#include "mla/mla_decode_fp8/layout.cuh"
#include "mla/mla_decode_fp8/load.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace ptx;
using namespace split;

// row_warps: those that copy rows; 0 without kRows.
// model: fp8_segments
template <int kQueryRows, bool kGrouped, PageForm kForm>
__device__ __forceinline__ void initialise_barriers(const Fp8Layout<kQueryRows, kGrouped, kForm>& shared,
                                                    int row_warps) {
#pragma unroll
  for (int s = 0; s < shared.kSlots; ++s) {
    mbarrier_init(shared.full(s), kForm == kRows ? row_warps * 32 : max(row_warps, 1));
    mbarrier_init(shared.free(s), 4);  // plant: slot read, arrivals
  }
#pragma unroll
  for (int n = 0; n < shared.kQueries; ++n) {
    mbarrier_init(shared.query_full(n), 2);  // plant: query copied, arrivals
    mbarrier_init(shared.query_free(n), 8);  // plant: query read, arrivals
  }
  fence_mbarrier_init();
}

template <int kQueryRows, bool kGrouped, PageForm kForm, typename AnyTile>
__device__ __forceinline__ void load(const MlaDecodeFp8Params& p, const Fp8Layout<kQueryRows, kGrouped,
                                     kForm>& shared) {
  using Layout = Fp8Layout<kQueryRows, kGrouped, kForm>;
  const Part part = part_of_cta(p.decode, blockIdx.y);
  AnyTile tile(p.decode);
  const int last_place = last_place_of(p.decode, part), warp = threadIdx.x / 32;
  if (warp < 2) {
    if constexpr (kForm == kRows)
      load_kv_fp8<Layout, kGrouped>(p, shared, tile, part, last_place, warp);
    else if constexpr (kForm == kPackedRows)
      tile.template load_rows<Layout>(p, shared, part, last_place, warp);
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
template <int kQueryRows, bool kGrouped, PageForm kForm, typename AnyTile>
__device__ __forceinline__ void compute(const MlaDecodeFp8Params& p,
                                        const Fp8Layout<kQueryRows, kGrouped, kForm>& shared, int consumer_index) {
  AnyTile tile(p.decode);
  Fp8Consumer<kQueryRows, kGrouped, kForm, AnyTile> consumer(p, shared, tile, consumer_index);
  const Part part = part_of_cta(p.decode, blockIdx.y);
  const int last_place = last_place_of(p.decode, part);
  int t = 0;
#pragma unroll 1
  for (int place = part.place; place <= last_place; ++place, ++consumer.n) {
    // Read again for the end of the segment: kept over its blocks, part and segment would cost registers that they
    // lack.
    t += consumer.compute(segment_here<AnyTile>(p.decode, tile, place), t);
    const Segment segment = segment_here<AnyTile>(p.decode, tile, place);
    Fp8Finisher<kQueryRows, kGrouped, kForm, AnyTile>{consumer, segment}.finish(place < last_place);
  }
}

// kForm: kPages, or kPacked where rows are packed and query rows at most 16; kRows for pages that are no multiples of
// 64 tokens, for ragged queries with kGrouped, and for broadcast arrays.
template <int kQueryRows, bool kGrouped, PageForm kForm, typename AnyTile = QueryTile<kQueryRows>>
__device__ __forceinline__ void mla_decode_fp8(const MlaDecodeFp8Params& p) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const Fp8Layout<kQueryRows, kGrouped, kForm> shared(shared_address(shared_bytes));
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  constexpr bool kSingleRows = kForm == kRows || kForm == kPackedRows;
  begin_kernel<kSingleRows ? kRows : kPages, AnyTile>(p.decode, shared, kSingleRows ? 2 : 0);
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
