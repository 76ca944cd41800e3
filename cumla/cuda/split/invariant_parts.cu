// SPDX-License-Identifier: Apache-2.0
// Splits row tiles at fixed positions, so that the bits of a request do not depend on the rest of the batch.
//
// It runs after ragged_schedule.cu with one part, which lists the row tiles and their number. The tiles of a request
// that has at most most_rows query rows of a kv head, as in decoding, are split every piece_blocks blocks from its
// first key. Other tiles stay whole. Each segment has its own part, in the order of tiles; the remaining parts are
// empty.
//
// Roles: one CTA of 1,024 threads, each of which has a tile at a time and writes its parts.
// Barriers: __syncthreads, all threads. The first guards the number of tiles, which part 0 holds and will lose; those
// of block_exclusive_sum guard warp_sums, of which two alternate. There are no mbarriers.
// Budget: 64 registers per thread, 256 B of shared memory.
#include "split/plan.cuh"
#include "split/scan.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::split {

using namespace ptx;

struct InvariantPartsParams {
  const TilePlace* places;
  Part* parts_out;  // [parts]; the first one holds the number of tiles on entry
  Ticket* tickets;  // [num_tickets]
  int max_places;
  int parts;
  int num_tickets;
  int heads_per_group;
  int most_rows;  // of a request that is split
  int piece_blocks;
  int max_pieces;  // of a request
};

__device__ __forceinline__ int pieces_of(const InvariantPartsParams& p, const TilePlace& tile) {
  if (static_cast<i64>(tile.q_len) * p.heads_per_group > p.most_rows) return 1;
  const int pieces = (blocks_of(tile.tokens) + p.piece_blocks - 1) / p.piece_blocks;
  return min(max(pieces, 1), p.max_pieces);
}

__device__ __forceinline__ void invariant_parts(const InvariantPartsParams& p) {
  __shared__ int warp_sums[2][kScheduleWarps];
  grid_dependency_launch();
  grid_dependency_wait();
  const int tiles = min(max(p.parts_out[0].end_place, 0), p.max_places);
  for (int i = threadIdx.x; i < p.num_tickets; i += kScheduleThreads) p.tickets[i] = {};
  __syncthreads();  // all threads have read the number of tiles
  int begin = 0;    // begin: parts of earlier tiles
  for (int first = 0, turn = 0; first < tiles; first += kScheduleThreads, turn ^= 1) {
    const int place = first + threadIdx.x;
    const bool exists = place < tiles;
    const int tokens = exists ? p.places[place].tokens : 0, pieces = exists ? pieces_of(p, p.places[place]) : 0;
    int all;
    const int start = begin + block_exclusive_sum(pieces, warp_sums[turn], all);
    const int last = min(start + pieces, p.parts) - 1;  // parts suffice unless lengths decrease
    for (int index = start; index <= last; ++index) {
      const int block = (index - start) * p.piece_blocks;
      const bool ends = index == last;
      p.parts_out[index] = {place, block, 0, tokens, ends ? place + 1 : place, ends ? 0 : block + p.piece_blocks,
                            start, last, 0, ends ? index : last, {}};
    }
    begin += all;
  }
  for (int index = begin + threadIdx.x; index < p.parts; index += kScheduleThreads)
    p.parts_out[index] = {p.max_places, 0, 0, 0, p.max_places, 0, index, index, 0, index, {}};
}

}  // namespace cumla::split
