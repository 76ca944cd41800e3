// SPDX-License-Identifier: Apache-2.0
// MLA attention of each query token over its own list of rows in DeepSeek-V4.1's formats. All 512 columns are keys and
// values. A row is 512 e4m3 columns, then 16 powers of two, one per 32 columns. With kHasFp4 either cache may have rows
// of 512 e2m1 columns, then 32 e4m3 scales, one per 16 columns.
//
// grid = (row tiles, parts, 1), 512 threads, one CTA per SM.
//
// Roles and time line: those of mla_sparse_v4.cu. The finders also load the scales of rows, into a ring beside that of
// their addresses, and have no columns to copy.
//
// barrier                    who arrives (count)             who waits             guards
// found(slot), 4             a lane per finding warp (4)     the converters        addresses and scales of a block's
//                                                                                  rows
// used(slot), 4              a lane per converting warp (4)  the finders           these may be overwritten
// full(stage, tile), halves  a lane per converting warp (4)  the block's consumer  the half is loaded
// free(stage, third)         a lane per warp of the consumer converters            the half may be overwritten
//                            (4)
// query_full                 each lane that copies (128): of both consumers        query rows are loaded
//                            consumer 1, then of the finders
// query_free                 a lane per consumer warp (8)    the finders           query rows may be overwritten
// probabilities_full, named  as in mla/mla_decode.cu
// kFoundBarrier, named       as in mla_sparse_v4.cu
//
// Shared memory:  that of mla/mla_decode.cu; the RoPE tile of stage 0 has the ring of rows, that of stage 1 the ring of
//                 their scales
// Registers:      consumers 200, converters 64, finders 48: together the 4 x 128 of the start; with kHasFp4 192, 80, 48
#include "sparse/mla_sparse_v4/kernel.cuh"

namespace cumla::sparse {

template <bool kHasFp4>
__device__ __forceinline__ void mla_sparse_v41(const MlaSparseV4Params& params) {
  attend_v4<V41Format<kHasFp4>, kHasFp4 ? 80 : 64, kHasFp4 ? 192 : 200>(params);
}

}  // namespace cumla::sparse
