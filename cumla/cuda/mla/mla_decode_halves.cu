// SPDX-License-Identifier: Apache-2.0
// MLA attention over a 16-bit cache of rows of 1024 latent columns and 64 of RoPE. A cluster of two CTAs has up to 64
// query rows of a kv head, and half of the columns of each row per CTA: as keys, and as values. Each CTA is one of
// mla/mla_decode.cu with 512 + 32 columns. Partial scores cross the cluster, and both CTAs compute the softmax:
//
//   S (64 rows x 64 tokens) = Q (64 x 544) K^T + that of the other CTA        O (64 x 512) += P (64 x 64 tokens) V
//
// grid = (2, parts, kv heads), 384 threads, one CTA per SM, clusters of two. A place of the ragged schedule has
// p.row_groups times 16 query rows.
//
// Roles: those of mla/mla_decode.cu. Time line, with several row tiles, and X: scores are sent, + : those of the other
// CTA are added:
//   consumer 0 | S0=QK0 X |  + softmax 0 | O+=P0V0 | S2=QK2 X | O+=P1V1 beside + softmax 2 | O+=P2V2 | ...
//   consumer 1 |      S1=QK1 X | O+=P0V0 beside + softmax 1 | O+=P1V1 | S3=QK3 X, ...
//
// barrier              who arrives (count)                        who waits             guards
// those of mla/mla_decode.cu, and:
// exchange_full        a thread of the block's owner (1), with    the block's owner     the other CTA's scores are
//                      the bytes that the other CTA stores                              there
// exchange_free(c), 2  a lane per warp of consumer c of the       the other consumer    scores of the next block may be
//                      other CTA (4)                                                    stored there
// cluster              all threads of both CTAs                   the same              barriers exist; nothing comes
//                                                                                       from the other CTA any more
//
// Shared memory:  query 65,536 + two KV stages of 69,632 + P 8,192 + exchange 16,384 + maxima 512 + sums 1,024
//                 + barriers 248 + pacer 1,024 = 232,184 B of 232,448
// Registers:      as mla/mla_decode.cu, and 8 of a consumer for the RoPE columns of the query
// Tensor work:    2,112 clocks per block; loads 69,632 B per block and CTA, stores up to 16,384 B in the other
#include "mla/mla_decode/kernel.cuh"

namespace cumla::mla {

// Row tile of which a CTA of the cluster has half of the columns.
struct HalfTile : WindowTile {
  using Held = HalfTile;
  template <typename Params>
  __device__ __forceinline__ explicit HalfTile(const Params& p) : WindowTile(p) {
    index = blockIdx.z * 2 + blockIdx.x;
  }
};

__device__ __forceinline__ Segment segment_of(const MlaDecodeParams& p, HalfTile& tile, const Part& part, int place) {
  return segment_of_rows(p, tile, part, place, p.row_groups * kRowGroup);
}

// Called by one thread.
__device__ __forceinline__ void initialise_barriers(const SharedLayoutOf<8, true>& shared, int row_warps) {
  mbarrier_init(shared.exchange_full(), 1);
  mbarrier_init(shared.exchange_free(0), 4);
  mbarrier_init(shared.exchange_free(1), 4);
  const int arrivals = row_warps ? row_warps * 32 : 1;
  initialise_barriers(shared, arrivals, arrivals, 2);
}

using TileOfHalf = WithSinks<WidthTile<HalfTile, 8, true>>;

// The row of out, in this CTA's half.
__device__ __forceinline__ char* row_of_out(const MlaDecodeParams& p, const TileOfHalf& tile, int request, int row) {
  return split::row_of_out<MlaDecodeParams, TileOfHalf>(p, tile, request, row) + column_of_half(p);
}

// Both CTAs have the log-sum-exp.
__device__ __forceinline__ void store_lse(const MlaDecodeParams& p, const TileOfHalf& tile, int request, const Row& to,
                                          float lse) {
  if (blockIdx.x != 0) return;
  split::store_lse<MlaDecodeParams, TileOfHalf>(p, tile, request, to, lse);
}

template <typename T, PageForm kForm>
__device__ __forceinline__ void mla_decode_halves(const MlaDecodeParams& p) {
  mla_decode<T, true, kForm, TileOfHalf>(p);
}

}  // namespace cumla::mla
