// SPDX-License-Identifier: Apache-2.0
// MLA attention over a 16-bit cache for at most 16 query rows of a kv head. The operands are swapped (why:
// docs/kernels/mla.md): query rows are the N side, KV rows and columns of V the M side.
//
//   S^T (64 tokens x rows)  = K (64 x 576) Q^T        O^T (512 x rows) += V^T (512 x 64 tokens) P^T
//
// grid = (1, parts, kv heads), 384 threads, one CTA per SM.
//
// Roles and time line:
//   warp 0      loads all blocks, tile by tile, as slots of a ring become free; kRows: warps 0, 1, half each
//   warp 2, 3   have L2 fetch plan and block table, then load the query rows of each request
//   consumer 0  | S0 = K0 Q | softmax 0 | O += V0 P0 | S2 ...         |  both: exchange and add up
//   consumer 1  |       S1 = K1 Q | softmax 1 | O += V1 P1 | S3 ...   |  halves of O; store or combine
//
// barrier                   who arrives (count)                 who waits             guards
// full(slot), 24            TMA (1); kRows: each copying        the block's consumer  the tile is loaded
//                           thread (64)
// free(slot), 24            a lane per warp of that consumer    the loaders           the tile may be overwritten
//                           (4)
// begun(consumer), 2;       thread 0, after it has issued a     the block's consumer  the parity of full(slot)
// other widths up to 6      block's loads (1)
// query_full                a lane per query warp (2)           both consumers        query rows are loaded
// query_free                a lane per consumer warp (8)        the query warps       query rows may be overwritten
// named, kConsumersBarrier  both consumers (256)                the same              exchange, sums
// named, one per consumer   its threads (128)                   the same              warp maxima, P, zeroed rows of V
//
// Shared memory:  ring of 24 tiles 196,608 + query 18,432 + P, exchange and combining 14,336 + maxima 512 + sums 1,152
//                 + words 16 + barriers 416 = 231,472 B of 232,448
// Registers:      168, of which output 64, scores 8
// Tensor work:    36 + 32 products m64n16k16 per block, bound by reading A from shared memory
#include "mla/mla_decode_swapped/kernel.cuh"
