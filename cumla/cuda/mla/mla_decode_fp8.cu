// SPDX-License-Identifier: Apache-2.0
// MLA attention over caches with e4m3 latent columns: under one factor, or (kGrouped) under a scale per token and 128
// columns. RoPE columns are e4m3 or bfloat16. As in mla_decode_swapped the operands are swapped; 16 or 32 query rows.
//
// grid = (row tiles of a kv head, parts, kv heads), 384 threads, one CTA per SM. If query lengths differ it is
// (2, parts, kv heads): half of a row tile at each place of the schedule (RowHalfTile).
//
// Roles and time line:
//   warp 0         loads all blocks by TMA; single rows: warps 0 and 1, half of the rows each
//   warp 2, 3      have L2 fetch plan and block table, then load the query rows as float16
//   consumer 0, 1  compute every second block each, and add up their outputs at the end of a segment:
//     S = K Q      bytes of a row -> registers -> float16 -> product | beside it the next bytes are converted
//     P            exp2(S - reference) -> float16 | did any overflow? -> rarely: raise references, again
//     O += V P     ldmatrix.trans -> bytes apart -> float16 -> product | beside it the next bytes are converted
// Both products take the tokens of a block in the order of token_at (docs/kernels/mla-fp8.md).
//
// barrier                   who arrives (count)           who waits                      guards
// full(slot), 4             TMA (1); kRows: each copying  the block's consumer           the block is loaded
//                           thread (64)
// free(slot), 4             a lane per warp of that       the loaders                    the block may be overwritten
//                           consumer (4)
// query_full(n)             a lane per query warp (2)     both consumers                 query rows are loaded
// query_free(n)             a lane per consumer warp (8)  the query warps; with two      the query may be overwritten;
//                                                         query buffers the consumers,   exchange n is read
//                                                         too
// named, kConsumersBarrier  both consumers (256)          the same                       exchange, sums
// named, one per consumer   its threads (128)             the same                       P, references, votes
//
// Shared memory:  ring of 4 blocks 163,840, with scales 167,936; query and P, also exchange and combining, 32,768
//                 (kPacked 34,816, where RoPE columns hold no P) and the next query 18,432 (16 rows), or
//                 53,248; sums, maxima and references of a row 84 to 312 B; words 16; barriers 80 or 96: at most
//                 231,136 B. Of 256 latent columns a ring of 6 blocks 147,456
// Registers:      consumers 208 (16 rows: output 64) or 224 (output 128), loaders 88 or 56; 168 at the start. 200 and
//                 104 for single rows with scales, because loaders have addresses in three arrays
// Tensor work:    36 + 32 products m64n16k16 or m64n32k16 per block
#include "mla/mla_decode_fp8/kernel.cuh"
