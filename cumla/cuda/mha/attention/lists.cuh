// SPDX-License-Identifier: Apache-2.0
// Keys of a row tile whose query tokens have lists of blocks: the keys of all of them, in units of 64, and which of
// these each query token sees. blocks/block_tiles.cu writes them.
#pragma once
#include "mha/attention/layout.cuh"
#include "mha/attention/mask.cuh"
#include "split/plan.cuh"
#include "split/tile.cuh"
#include "ptx/copy.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

using namespace ptx;
using namespace split;

constexpr int kTileTokens = 16;  // query tokens of a row tile, at most
constexpr int kUnit = 64;        // keys

struct ListArrays {
  const uint4* seen;  // [row tiles, kv heads, units]: a byte per query token, which sees the first so many keys
  const int* units;   // [row tiles, kv heads]
  i64 units_apart;    // of the units of two kv heads
};

struct ListedParams : AttentionParams {
  ListArrays lists;
};

template <typename Params>
constexpr bool kHasLists = false;
template <>
constexpr bool kHasLists<ListedParams> = true;

// The keys of a row tile and kv head, and their number in the arrays.
__device__ __forceinline__ i64 list_of(const ListedParams& p, u32 place, int head, int& tokens) {
  const i64 list = static_cast<i64>(place) * p.num_kv_heads + head;
  const i64 units = min(static_cast<i64>(max(p.lists.units[list], 0)), p.lists.units_apart);
  tokens = static_cast<int>(units) * kUnit;
  return list;
}

// The segment of attention at a place of a part, which has every gridDim.y-th row tile from its own number on.
template <typename Layout>
__device__ __forceinline__ Segment visible_segment(const ListedParams& p, const Layout&, RaggedTile& tile,
                                                   const Part& part, int place, Nothing&, bool = false) {
  const int own = min((place - part.place) * static_cast<int>(gridDim.y) + static_cast<int>(blockIdx.y), p.batch - 1);
  tile.move_to(p, reinterpret_cast<const TilePlace*>(p.places)[own]);
  Segment segment = {};  // whole
  tile.pages = list_of(p, own, tile.index, segment.tokens);
  segment.blocks = segment.tokens / kUnit;
  return segment;
}

// The visible keys of a unit, for each query token; none in units that do not exist.
__device__ __forceinline__ uint4 seen_of(const ListedParams& p, i64 list, int unit, int tokens) {
  if (unit >= tokens / kUnit) return {0, 0, 0, 0};
  return p.lists.seen[list * p.lists.units_apart + unit];
}

// The keys of a unit that a query token of the tile sees.
__device__ __forceinline__ u32 seen_by_token(const uint4& seen, int own) {
  const u32 word = own < 8 ? (own < 4 ? seen.x : seen.y) : (own < 12 ? seen.z : seen.w);
  return word >> own % 4 * 8 & 0xff;
}

// The query token of a row of the tile.
__device__ __forceinline__ int token_in_tile(const AttentionParams& p, const RaggedTile& tile, int row) {
  return min(tile.token_of(p, row), kTileTokens - 1);
}

// The most keys of a unit that a query token sees.
__device__ __forceinline__ u32 most_seen(const uint4& seen) {
  if ((seen.x | seen.y | seen.z | seen.w) & 0x40404040u) return kUnit;  // no byte is above 64
  u32 most = 0;
#pragma unroll
  for (int shift = 0; shift < 32; shift += 8)
    most = max(most, max(max(seen.x >> shift & 0xff, seen.y >> shift & 0xff),
                         max(seen.z >> shift & 0xff, seen.w >> shift & 0xff)));
  return most;
}

}  // namespace cumla::mha
