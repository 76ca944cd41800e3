// SPDX-License-Identifier: Apache-2.0
// Shared by the MLA kernels: constants, parameters, and the loop over a CTA's segments.
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
// The same of rows of other widths. A stage has room for RoPE columns where there are none, too.
template <int kLatentTiles>
struct Widths {
  static constexpr int kValueDim = kLatentTiles * 64, kTiles = kLatentTiles + 1, kRopeTile = kLatentTiles;
  static constexpr int kHalfTiles = kLatentTiles / 2;
};
constexpr int kConsumerBarrier = kConsumersBarrier + 1;  // named barriers, one per consumer

// The ways to load a block from its pages (mla/mla_decode/pages.cuh). It follows from the page size.
enum PageForm { kPages, kBoxes, kRows };

// Latent or RoPE columns of the query or of the cache. If one array holds both, these are views of it.
struct QueryColumns {
  const char* base;
  i64 stride_batch, stride_token, stride_head;  // bytes
};
struct CacheColumns {
  const char* base;
  i64 stride_page, stride_row, stride_head;  // bytes
};

struct MlaDecodeParams {
  // dims (columns, page_size, num_kv_heads, num_pages), box (64, box_rows, 1, 1), 128-byte swizzle. kPages has one
  // map of all 576 columns, because the first load waits for its map. kBoxes has one of 512 columns and one of 64.
  TensorMap latent_map, rope_map;
  // kSharedBlocks, for prefetches into L2: the same dims in words of 64 bits, box (all columns, wide_rows, 1, 1), no
  // swizzle. If rope_is_apart, it is without the RoPE columns.
  TensorMap wide_map;
  CacheColumns latent, rope;  // kRows
  QueryColumns q_latent, q_rope;
  char* out;
  i64 out_stride_batch, out_stride_token, out_stride_head;  // bytes
  float* lse;
  i64 lse_stride_batch, lse_stride_head, lse_stride_token;  // elements
  const int* block_table;
  i64 block_table_stride;  // elements
  const Place* places;   // [batch], in schedule order; TilePlace if query lengths differ
  const Part* parts_in;
  Ticket* tickets;       // [kv head][row tile][part]
  float4* partial_out;   // [kv head][row tile][part][slot][consumer][row group][unit][3][lane]
  float2* partial_rows;  // [kv head][row tile][part][slot][row]
  i64 max_tokens;        // of a request: the most that the block table can name
  i64 page_entries;      // entries of the block table, from first to last, or of a page list
  int batch;
  int parts;
  int max_pages;  // of a request: columns of the block table
  int num_pages;
  int page_size;
  int box_rows;
  int wide_rows;
  int rope_is_apart;  // RoPE columns do not follow the latent columns of their row
  int q_len;  // if query lengths differ: of all requests together
  int heads_per_group;
  int row_groups;  // of 16 query rows, in a tile
  int may_wait;    // all CTAs are resident at once, so that one may wait for another
  int causal;
  int out_is_float;
  float scale_log2;  // softmax_scale * log2(e)
  Divisor by_heads_per_group, by_page_size, by_num_heads, by_q_len;
  int batch_invariant;  // requests are split at fixed positions, into any number of segments
  float empty_lse;      // log-sum-exp of a row that sees no key: an infinity
  int sink_in_lse;
  const float* sinks;  // lists: a score per head without a value; null: none
  i64 sinks_stride;    // elements
};

// Parameters of kernels over a WindowTile.
struct MlaWindowParams : MlaDecodeParams {
  int window_left, window_right;  // visible keys on either side of a query's own position; -1: unbounded
  int axis_q_len;                 // query tokens of a step along the axis of requests of q; by_q_len divides by it
};

// An entry of a segment's pages.
__device__ __forceinline__ int page_of(const MlaDecodeParams& p, const Tile&, const Segment& segment, u32 entry) {
  return p.block_table[segment.request * p.block_table_stride + entry];
}
__device__ __forceinline__ int page_of(const MlaDecodeParams& p, const RaggedTile& tile, const Segment&, u32 entry) {
  const u64 at = static_cast<u64>(tile.pages) * p.block_table_stride + entry;
  // A page list may be shorter than kv_indptr says
  return at < static_cast<u64>(p.page_entries) ? p.block_table[at] : -1;
}

constexpr int kJoinSpace = 16384;  // of a combining warp: room for a unit of eight partial results
static_assert(4 * kJoinSpace <= kRopeTile * kTileBytes, "four warps use a stage, without its last tile");

template <typename T, typename AnyTile, bool kPaired = false>
using LatentJoiner =
    Joiner<T, Widths<AnyTile::kLatentTiles>::kValueDim, kJoinSpace, true, MlaDecodeParams, AnyTile, kPaired>;

// Parameters of kernels over rows of other widths than 512 + 64.
struct MlaWidthParams : MlaWindowParams {
  int rope_chunks;  // of 16 bytes, of a row
};

// True if a chunk of 16 bytes of the RoPE columns exists; chunks that do not exist are zeros.
template <typename AnyTile>
__device__ __forceinline__ bool has_rope_chunk(const MlaDecodeParams& p, int chunk) {
  if constexpr (AnyTile::kRopeVaries)
    return chunk < static_cast<const MlaWidthParams&>(p).rope_chunks;
  else
    return true;
}

// Tiles of which each CTA of a cluster has half of the columns.
struct HalfTile;  // mla/mla_decode_halves.cu
template <typename AnyTile>
constexpr bool kHasHalf = __is_base_of(HalfTile, AnyTile);
// Tiles whose kernel reads the caller's lists itself, rows of which may be absent.
struct ReadsLists;  // sparse/listed.cuh
template <typename AnyTile>
constexpr bool kReadsLists = __is_base_of(ReadsLists, AnyTile);
// Byte offset of this CTA's columns in a row of out.
__device__ __forceinline__ u32 column_of_half(const MlaDecodeParams& p) {
  return blockIdx.x * (p.out_is_float ? 2048 : 1024);
}

// Barrier of the threads of one consumer.
__device__ __forceinline__ void consumer_sync(int consumer) {
  if (consumer == 0)
    named_barrier_sync<kConsumerBarrier, kWarpgroup>();
  else
    named_barrier_sync<kConsumerBarrier + 1, kWarpgroup>();
}

// Order in which the tiles of a block are used and freed: RoPE, the owner's half of V, the other half.
template <int kLatentTiles = kRopeTile>
__device__ __forceinline__ int tile_in_order(int owner, int i) {
  return i == 0 ? kLatentTiles : (i - 1) ^ (owner * (kLatentTiles / 2));
}

// A consumer warpgroup computes its segments in order.
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
