// SPDX-License-Identifier: Apache-2.0
// Loads of a warp of attention_decode: its chunks of keys and values, some ahead.
#pragma once
#include "mha/attention/layout.cuh"
#include "mha/attention_decode/layout.cuh"
#include "split/plan.cuh"
#include "split/tile.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

using namespace ptx;
using namespace split;

// The segment at a place, and the number of chunks that some row sees. The part is loaded anew: registers are scarce.
template <int kRows>
__device__ __forceinline__ Segment chunks_at(const AttentionParams& p, HeadTile& tile, int place, int& chunks) {
  const Segment segment = visible_segment(p, tile, part_of_cta(p, blockIdx.y), place);
  tile.rows = min(tile.rows, kRows);
  const int begin = segment.begin * kBlockTokens;
  const int end = min(segment.tokens, seen_by(p, tile, segment.tokens, tile.rows - 1).end);
  chunks = min(segment.blocks * (kBlockTokens / kChunk), (max(end - begin, 0) + kChunk - 1) / kChunk);
  return segment;
}

// One warp copies 16 rows of kRowBytes, of which the first `bytes` exist. Lane k has the offset of row k, -1 for
// zeros.
template <typename Layout, int kRowBytes>
__device__ __forceinline__ void copy_chunk(const char* base, i64 own, int bytes, u32 to) {
  constexpr int kLanes = Layout::template tile_bytes<kRowBytes>() / 16, kAtOnce = 32 / kLanes;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int first = 0; first < kChunk; first += kAtOnce) {
    const int row = first + lane / kLanes;
    const i64 offset = __shfl_sync(0xffffffffu, own, row);
#pragma unroll
    for (int i = lane % kLanes; i < kRowBytes / 16; i += kLanes) {
      const bool exists = offset >= 0 && i * 16 < bytes;
      copy_16_async(to + Layout::template place<kRowBytes>(row, i), base + (exists ? offset + i * 16 : 0), exists);
    }
  }
}

// Page number and row of a lane's token; row -1: no token.
struct ChunkRow {
  static constexpr int kNone = -2;  // no chunk, in all lanes
  int number, row;
};
// The same before the page number is loaded.
struct ChunkEntry {
  i64 entry;
  int row;
};

// A warp's chunks in order: every twelfth chunk of the part.
template <typename Layout, int kRows>
struct ChunksAhead {
  const AttentionParams& p;
  const Layout& shared;
  const int last_place, warp, lane;
  HeadTile tile;
  int tokens, seen;  // tokens of the request; first one that some row sees
  int place;
  u32 token, end;  // beginning of the next chunk; end of the segment's chunks

  // first_place: the place of `tile`.
  __device__ __forceinline__ ChunksAhead(const AttentionParams& p, const Layout& shared, const HeadTile& tile,
                                         const Segment& segment, int chunks, int first_place, int last_place)
      : p(p), shared(shared), last_place(last_place), warp(threadIdx.x / 32), lane(threadIdx.x % 32), tile(tile),
        place(first_place) {
    begin(segment, chunks, (warp - kDecodeWarps) * kChunk);
  }

  __device__ __forceinline__ void begin(const Segment& segment, int chunks, int ahead) {
    tokens = segment.tokens;
    seen = seen_by(p, tile, tokens, 0).first;
    token = segment.begin * kBlockTokens + ahead;
    end = segment.begin * kBlockTokens + chunks * kChunk;
  }

  __device__ __forceinline__ ChunkEntry advance() {
    token += kDecodeWarps * kChunk;
    while (static_cast<int>(token - end) >= 0 && place < last_place) {
      const int ahead = token - end;
      int chunks;
      const Segment segment = chunks_at<kRows>(p, tile, ++place, chunks);
      begin(segment, chunks, ahead);
    }
    ChunkEntry at = {-1, ChunkRow::kNone};
    if (static_cast<int>(token - end) >= 0) return at;
    const int own = token + lane % kChunk;
    at.entry = entry_of(p, tile, tokens, own, at.row);
    // Tokens before all windows are loaded as zeros, because they may hold NaN.
    if (at.entry < 0 || own < seen) at.row = -1;
    return at;
  }

  __device__ __forceinline__ ChunkRow look_up(const ChunkEntry& at) const {
    return {at.entry < 0 || p.block_table == nullptr ? 0 : p.block_table[at.entry], at.row};
  }

  // A chunk within one page is loaded by TMA, and true is returned. Other chunks are copied row by row.
  __device__ __forceinline__ bool copy_async(const ChunkRow& at, int stage, bool was_boxed) const {
    if (at.row == ChunkRow::kNone) return was_boxed;
    const u32 to = shared.chunk(warp, stage);
    const bool exists = at.row >= 0 && is_page(p, at.number);
    if (p.box_rows == kChunk && __all_sync(0xffffffffu, exists)) {
      if (!was_boxed) fence_proxy_async_shared();  // threads have written there
      __syncwarp();
      if (lane == 0) {
        const u32 full = shared.full(warp, stage);
        mbarrier_arrive_expect_tx(full, Layout::kChunkBytes);
        copy_boxes<Layout::kKeyRow>(&p.key_map, to, full, at);
        copy_boxes<Layout::kValueRow>(&p.value_map, to + Layout::kKeyBytes, full, at);
      }
      return true;
    }
    const auto offset = [&](const Columns& of) {
      return exists ? at.number * of.stride_page + at.row * of.stride_row + tile.index * of.stride_head : i64{-1};
    };
    copy_chunk<Layout, Layout::kKeyRow>(p.keys.base, offset(p.keys), p.key_columns * Layout::kUnit, to);
    copy_chunk<Layout, Layout::kValueRow>(p.values.base, offset(p.values), p.value_columns * Layout::kUnit,
                                          to + Layout::kKeyBytes);
    return false;
  }

  template <int kRow>
  __device__ __forceinline__ void copy_boxes(const TensorMap* map, u32 to, u32 full, const ChunkRow& at) const {
    constexpr int kTile = Layout::template tile_bytes<kRow>();
#pragma unroll
    for (int i = 0; i < kRow / kTile; ++i)
      tma_load_4d_async(to + i * kChunk * kTile, map, full, i * kTile / Layout::kUnit, at.row, tile.index, at.number);
  }
};

}  // namespace cumla::mha
