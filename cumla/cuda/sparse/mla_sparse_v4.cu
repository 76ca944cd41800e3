// SPDX-License-Identifier: Apache-2.0
// MLA attention of each query token over its own list of rows in DeepSeek-V4's format: 448 e4m3 columns with a power
// of two per 64, and 64 bfloat16 RoPE columns. All 512 columns are keys and values. A list may continue in a second
// cache.
//
// grid = (row tiles, parts, 1), 512 threads, one CTA per SM.
//
// Roles and time line:
//   warps 12-15    finders, 16 rows of every block each: entry -> page -> address and scales of the row, in a ring of
//                  four blocks, each step a block ahead of the next; then copies of bfloat16 columns, and of query
//                  rows from the second list on
//   warps 0 to 3   converters, 16 rows of every block each: 448 e4m3 columns -> registers, half a block ahead -> times
//                  their scales, as bfloat16 -> tile
//   consumer 0, 1  those of mla/mla_decode.cu with shared blocks, without a RoPE tile; consumer 1 first copies the
//                  query rows of the first list. The end of a segment: sparse/mla_sparse_v4/join.cuh
// Why there are two loading roles: docs/kernels/mla_sparse.md.
//
// barrier                    who arrives (count)               who waits             guards
// found(slot), 4             a lane per finding warp (4)       the converters        addresses and scales of a block's
//                                                                                    rows
// used(slot), 4              a lane per converting warp (4)    the finders           these may be overwritten
// full(stage, tile), halves  a lane per converting warp (4);   the block's consumer  the half is loaded
//                            in the second half each finding
//                            lane, too (132)
// free(stage, third)         a lane per warp of the consumer   converters, finders   the half may be overwritten
//                            (4)
// query_full                 each lane that copies (128): of   both consumers        query rows are loaded
//                            consumer 1, then of the finders
// query_free                 a lane per consumer warp (8)      the finders           query rows may be overwritten
// probabilities_full, named  as in mla/mla_decode.cu
// kFoundBarrier, named       the finders (128)                 consumer 1            first rows come before its copies
//
// Shared memory:  that of mla/mla_decode.cu; the ring of rows is in the RoPE tile of stage 0
// Registers:      consumers 200, converters 64, finders 48: together the 4 x 128 of the start. With 512 threads no
//                 product may have 256 columns (kWideProducts).
#include "sparse/mla_sparse_v4/kernel.cuh"

namespace cumla::sparse {

__device__ __forceinline__ void mla_sparse_v4(const MlaSparseV4Params& params) { attend_v4<V4Format>(params); }

}  // namespace cumla::sparse
