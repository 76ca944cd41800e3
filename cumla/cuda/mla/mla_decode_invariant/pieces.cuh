// SPDX-License-Identifier: Apache-2.0
// The partial results of a batch-invariant request of which a CTA may have all.
#pragma once
#include "mla/mla_decode/layout.cuh"
#include "split/plan.cuh"
#include "split/tile.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace ptx;
using namespace split;

// A tile of batch-invariant requests.
template <typename Base>
struct Invariant : Base {
  using Base::Base;
};

// Blocks of a partial result of the request at a part's place, if the part has all of them; else 0.
__device__ __forceinline__ int piece_blocks_of(const Part& part) { return part.unused[0]; }

// The partial results that a CTA has of the request with which its part begins. A plan that was never updated holds
// arbitrary bits, so a part has all partial results only if it is the first of its request and has no other.
struct Pieces {
  int blocks = 0;  // of each partial result; 0: the CTA does not have all

  __device__ __forceinline__ Pieces(const Part& part, int last_place) {
    constexpr int kMaxBlocks = 1 << 10;
    if (part.first_part == static_cast<int>(blockIdx.y) && last_place == part.place)
      blocks = min(max(piece_blocks_of(part), 0), kMaxBlocks);
  }
  __device__ __forceinline__ bool all() const { return blocks > 0; }
  // Partial results of a request that this CTA computes.
  __device__ __forceinline__ int count(const Segment& request) const {
    return all() ? request.last_part - request.first_part + 1 : 1;
  }
  __device__ __forceinline__ Segment at(const Segment& request, int i) const {
    if (!all()) return request;
    const int end = request.begin + request.blocks;
    Segment piece = request;
    piece.begin = min(request.begin + i * blocks, end);
    piece.blocks = (i == count(request) - 1 ? end : min(piece.begin + blocks, end)) - piece.begin;
    piece.slot = 2 * i;  // the first of the part that it would have for itself
    return piece;
  }
  __device__ __forceinline__ static int index_of(const Segment& piece) { return piece.slot / 2; }
  __device__ __forceinline__ bool is_last(const Segment& piece) const {
    return index_of(piece) == count(piece) - 1;
  }
};

// A consumer warpgroup computes its segments in order, and partial results of one request as segments.
template <typename Consumer, typename Layout, typename Base>
__device__ __forceinline__ void compute(const MlaDecodeParams& p, const Layout& shared, Invariant<Base>& tile,
                                        const Part& part, int last_place, int warpgroup) {
  const Pieces pieces(part, last_place);
  Consumer consumer(p, shared, tile, warpgroup - 1);
  int t = 0, index = 0;
  for (int place = part.place; place <= last_place;) {
    const Part again = part_of_cta(p, copy_of(blockIdx.y));
    const Segment segment = pieces.at(segment_of(p, tile, again, place), index);
    consumer.compute(segment, t, (place - part.place) & 1);
    consumer.finish(segment, pieces, place < last_place);
    t += segment.blocks;
    const bool is_last = pieces.is_last(segment);
    // Each phase is waited for before the next one. It is over: finish() lets consumers wait for each other.
    if (!is_last) mbarrier_wait(shared.query_free(), index & 1, "the query of a partial result");
    index = is_last ? 0 : index + 1;
    place += is_last;
  }
}

}  // namespace cumla::mla
