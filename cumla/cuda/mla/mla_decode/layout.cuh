// SPDX-License-Identifier: Apache-2.0
// What the decode kernels share: constants, parameters, and which blocks of which request a CTA has.
#pragma once
#include "attend/softmax.cuh"
#include "split/division.cuh"
#include "split/join.cuh"
#include "split/plan.cuh"
#include "split/tile.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace attend;
using namespace ptx;
using namespace split;

constexpr int kHeadDim = 576, kValueDim = 512;
constexpr int kTileBytes = 64 * 128;  // 64 rows x 64 columns of 16 bits, 128-byte swizzle
constexpr int kTiles = kHeadDim / 64;
constexpr int kRopeTile = 8;
constexpr int kHalfTiles = 4;  // tiles of one half of V
constexpr int kConsumerBarrier = kConsumersBarrier + 1;  // named barriers, one for each consumer

// How a block comes from its pages (mla/mla_decode/pages.cuh), which follows from the page size.
enum PageForm { kPages, kBoxes, kRows };

// Latent or RoPE columns of the query or of the cache. Where both lie in one array, these are views of it.
struct QueryColumns {
  const char* base;
  i64 stride_batch, stride_token, stride_head;  // bytes
};
struct CacheColumns {
  const char* base;
  i64 stride_page, stride_row, stride_head;  // bytes
};

struct MlaDecodeParams {
  // dims (columns, page_size, num_kv_heads, num_pages), box (64, box_rows, 1, 1), 128-byte swizzle: of kPages one of
  // all 576 columns (another map that the first loads need costs half a microsecond), of kBoxes one of 512 and one of
  // 64
  TensorMap latent_map, rope_map;
  // Of kSharedBlocks, by which L2 fetches ahead: dims the same in words of 64 bits, box (all columns, wide_rows, 1, 1),
  // no swizzle; without the RoPE columns where rope_is_apart.
  TensorMap wide_map;
  CacheColumns latent, rope;  // of kRows
  QueryColumns q_latent, q_rope;
  char* out;
  i64 out_stride_batch, out_stride_token, out_stride_head;  // bytes
  float* lse;
  i64 lse_stride_batch, lse_stride_head, lse_stride_token;  // elements
  const int* block_table;
  i64 block_table_stride;  // elements
  const Place* places;   // [batch], of the schedule's order; TilePlace where query lengths differ
  const Part* parts_in;
  Ticket* tickets;       // [kv head][row tile][part]
  float4* partial_out;   // [kv head][row tile][part][slot][consumer][row group][unit][3][lane]
  float2* partial_rows;  // [kv head][row tile][part][slot][row]
  i64 max_tokens;        // of a request: what the block table can name
  i64 page_entries;      // of the block table, from its first to its last, or of a list of pages
  int batch;
  int parts;
  int max_pages;  // of a request: columns of the block table
  int num_pages;
  int page_size;
  int box_rows;
  int wide_rows;
  int rope_is_apart;  // not after the latent columns of its row
  int q_len;  // where query lengths differ: of all requests together
  int heads_per_group;
  int row_groups;  // of 16 rows in a tile
  int may_wait;    // all CTAs fit on the GPU at once, so that one may wait for another
  int causal;
  int out_is_float;
  float scale_log2;  // softmax_scale * log2(e)
  Divisor by_heads_per_group, by_page_size, by_num_heads, by_q_len;
  int batch_invariant;  // requests are cut at fixed places, one of them into any number of pieces
  float empty_lse;      // log-sum-exp of a row that sees nothing: an infinity
  int sink_in_lse;
  const float* sinks;  // of lists: a score of each head that has no value; null for none
  i64 sinks_stride;    // elements
};

// An entry of a segment's pages.
__device__ __forceinline__ int page_of(const MlaDecodeParams& p, const Tile&, const Segment& segment, u32 entry) {
  return p.block_table[segment.request * p.block_table_stride + entry];
}
__device__ __forceinline__ int page_of(const MlaDecodeParams& p, const RaggedTile& tile, const Segment&, u32 entry) {
  const u64 at = static_cast<u64>(tile.pages) * p.block_table_stride + entry;
  return at < static_cast<u64>(p.page_entries) ? p.block_table[at] : -1;  // a list may be shorter than it should be
}

constexpr int kJoinSpace = 16384;  // of a warp that joins: a unit of 32 columns of eight pieces and more
static_assert(4 * kJoinSpace <= kRopeTile * kTileBytes, "four warps use a stage, without its last tile");

template <typename T, typename AnyTile>
using LatentJoiner = Joiner<T, kValueDim, kJoinSpace, true, MlaDecodeParams, AnyTile>;

// The threads of one consumer meet.
__device__ __forceinline__ void consumer_sync(int consumer) {
  if (consumer == 0)
    named_barrier_sync<kConsumerBarrier, kWarpgroup>();
  else
    named_barrier_sync<kConsumerBarrier + 1, kWarpgroup>();
}

// Order in which the tiles of a block are wanted and become free: RoPE, the owner's half of V, the other half.
__device__ __forceinline__ int tile_in_order(int owner, int i) {
  return i == 0 ? kRopeTile : (i - 1) ^ (owner * kHalfTiles);
}

// By a warpgroup that computes: its segments, one after the other.
template <typename Consumer, typename Layout, typename AnyTile>
__device__ __forceinline__ void compute(const MlaDecodeParams& p, const Layout& shared, AnyTile& tile,
                                        const Part& part, int last_place, int warpgroup) {
  Consumer consumer(p, shared, tile, warpgroup - 1);
  int t = 0;
  for (int place = part.place; place <= last_place; ++place) {
    const Segment segment = segment_of(p, tile, part, place);
    consumer.compute(segment, t, (place - part.place) & 1);
    consumer.finish(segment, place < last_place);
    t += segment.blocks;
  }
}

}  // namespace cumla::mla
