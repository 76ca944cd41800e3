// SPDX-License-Identifier: Apache-2.0
// MLA attention over a 16-bit cache: up to 64 query rows of one kv head over the KV blocks of one part of the
// schedule (split/plan.cuh).
//
// grid = (row tiles of a kv head, parts, kv heads), 384 threads, one CTA per SM. If query lengths differ it is
// (1, parts, kv heads), and each place of the schedule is a row tile (RaggedTile).
//
// Roles of the three warpgroups:
//   warp 0, 1      load the even and the odd KV blocks of the CTA's sequence (TMA). kRows: warps 0 and 1 copy half of
//                  every block each, or warps 0 to 3 a quarter (mla/mla_decode/pages.cuh)
//   warp 2, 3      have L2 fetch plan and block table, then load the query rows of each request
//   consumer 0, 1  (128 threads) hold output columns [256 c, 256 c + 256) of all 64 rows, score every second block, and
//                  pass its probabilities and running maximum to the other consumer
// The block counter t continues over the requests of a part: block t belongs to consumer t % 2 and stage t % 2.
//
// Time line with several row tiles (kSharedBlocks, compute-bound):
//   consumer 0 | S0=QK0 | softmax 0 | O+=P0V0 | S2=QK2, O+=P1V1 beside softmax 2 | O+=P2V2 | ...
//   consumer 1 |          S1=QK1, O+=P0V0 beside softmax 1 | O+=P1V1 | S3=QK3, ...
// The same with lists, whose loads take longer (kOtherFirst: consumer 0 frees its half of stage 1 earlier):
//   consumer 0 | S0=QK0 | softmax 0 | O+=P0V0 | O+=P1V1, S2=QK2 | softmax 2 | O+=P2V2 | ...
//   consumer 1 |          S1=QK1, O+=P0V0 beside softmax 1 | O+=P1V1 | S3=QK3, ...
// With one row tile (memory-bound; a stage is freed as early as possible):
//   consumer 0 | S0=QK0 | softmax 0 | O+=P0V0 | O+=P1V1 | S2=QK2 | softmax 2 | O+=P2V2 | ...
//   consumer 1 |          S1=QK1 | O+=P0V0 | softmax 1 | O+=P1V1 | O+=P2V2 | S3=QK3 | ...
//
// barrier                    who arrives (count)                   who waits             guards
// full(stage, tile), 2 x 9   TMA (1); kRows: each copying thread   the block's consumer  the tile is loaded
//                            (64 or 128), four copying warps with
//                            one barrier per half of V
// free(stage, third), 2 x 3  a lane per warp (4): of consumer 0,   the loaders           the third may be overwritten
//                            1 for half 0, 1 of V; of the owner
//                            for RoPE
// probabilities_full(c), 2   every fourth lane of consumer c (32)  the other consumer    P, maxima, tiles of the block
// query_full                 a lane per query warp (2); with four  consumers, warp 1     query rows are loaded
//                            copying warps the threads of two
//                            (64)
// query_free                 a lane per consumer warp (8)          the query warps       query rows may be overwritten
// named, kConsumersBarrier   both consumers (256)                  the same              sums at the end of a segment
// named, one per consumer    its threads (128)                     the same              zeroed rows of V, votes
//
// Shared memory:  query 73,728 + two KV stages of 73,728 + P 8,192 + maxima 512 + sums 1,024 + barriers 224
//                 + pacer 1,024 = 232,160 B of 232,448
// Registers:      consumers 224 (128 output, 32 scores, 16 probabilities; kOtherFirst: 16 of the query), loaders 56;
//                 168 at the start (65,536 / 384 in steps of 8)
// Tensor work:    2,176 clocks per block; loads 73,728 B per block and CTA
#include "mla/mla_decode/kernel.cuh"
