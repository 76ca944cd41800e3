// SPDX-License-Identifier: Apache-2.0
// How four warps load keys and values that are e4m3 numbers, and convert them to 16 bits on the way to shared memory.
//
// Global memory -> registers -> shared memory. Every thread holds kHeld blocks' rows in registers, so that 32 KiB are in
// flight per CTA, and the page numbers of one block more. bfloat16 and float16 have all e4m3 numbers, and NaN stays NaN.
//
// The consumers fence what threads wrote before wgmma reads it: a fence here would wait for all loads that are in
// flight.
#pragma once
#include "mha/attention/layout.cuh"
#include "split/tile.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

using namespace ptx;
using namespace split;

// Four e4m3 numbers as pairs of 16-bit numbers.
template <typename T>
__device__ __forceinline__ void widen(u32 packed, u32& low, u32& high) {
  expand_e4m3x4(packed, low, high);
  if constexpr (kIsBf16<T>) {
    const float2 first = unpack_pair<Fp16>(low), second = unpack_pair<Fp16>(high);
    low = pack_pair<Bf16>(first.x, first.y);
    high = pack_pair<Bf16>(second.x, second.y);
  }
}

// Where the rows of a lane lie, in bytes; -1 for rows of zeros.
struct RowOffsets {
  i64 row[2];
};

// 16 rows of a block, 64 columns a tile, as one warp holds them. A lane has 16 columns of each tile, of rows lane / 4
// and lane / 4 + 8: so eight lanes, which write at once, write to all banks.
template <int kTiles>
struct E4m3Rows {
  uint4 words[2][kTiles];

  __device__ __forceinline__ void load(const char* base, const RowOffsets& offsets, int columns) {
    const int first = threadIdx.x % 4 * 16;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        words[r][tile] = {0, 0, 0, 0};
        if (offsets.row[r] >= 0 && tile * 64 + first < columns)
          words[r][tile] = load_global_16(reinterpret_cast<const uint4*>(base + offsets.row[r] + tile * 64 + first));
      }
  }

  // Into tiles of 64 rows of 128 bytes, with a swizzle as wide; `first_row` is a multiple of 16.
  template <typename T>
  __device__ __forceinline__ void store(u32 tiles, int tile_bytes, int first_row) const {
    const int row = threadIdx.x % 32 / 4, chunk = threadIdx.x % 4 * 2 ^ row;
    const u32 even = tiles + (first_row + row) * 128 + (chunk << 4), odd = even ^ 16;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint4& packed = words[r][tile];
        uint4 wide;
        widen<T>(packed.x, wide.x, wide.y);
        widen<T>(packed.y, wide.z, wide.w);
        store_shared_16(even + tile * tile_bytes + r * 1024, wide);
        widen<T>(packed.z, wide.x, wide.y);
        widen<T>(packed.w, wide.z, wide.w);
        store_shared_16(odd + tile * tile_bytes + r * 1024, wide);
      }
  }
};

// A block of the part that is still to be loaded, and the page numbers of this lane's rows in it.
struct BlockAhead {
  const AttentionParams& p;
  const Part& part;
  const int last_place;
  RaggedTile tile;
  Segment segment;
  int place, block;  // block: of the segment
  int number[2], row[2];

  __device__ __forceinline__ BlockAhead(const AttentionParams& p, const Part& part, int last_place)
      : p(p), part(part), last_place(last_place), tile(p), place(part.place - 1), block(-1) {
    segment.blocks = 0;
    advance();
  }

  __device__ __forceinline__ void advance() {
    ++block;
    while (block >= segment.blocks && place < last_place) {
      segment = visible_segment(p, tile, part, ++place);
      block = 0;
    }
    // Past the last block there are no tokens.
    const int begin = (segment.begin + block) * kBlockTokens + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r)
      number[r] = block < segment.blocks ? page_number_of(p, tile, segment, begin + 8 * r, row[r]) : -1;
  }

  // Page numbers are first looked at here, a block after they were asked for.
  __device__ __forceinline__ RowOffsets offsets(const Columns& of) const {
    RowOffsets found;
#pragma unroll
    for (int r = 0; r < 2; ++r)
      found.row[r] = is_page(p, number[r])
                         ? number[r] * of.stride_page + row[r] * of.stride_row + blockIdx.z * of.stride_head
                         : -1;
    return found;
  }
};

// The last two of the four warps copy the query rows, too, each before the first block of a row tile.
template <typename T, typename Layout>
__device__ __forceinline__ void load_e4m3(const AttentionParams& p, const Layout& shared, RaggedTile& tile,
                                          const Part& part, int last_place) {
  constexpr int kTileBytes = Layout::kTileBytes, kHeld = Layout::kHeldBlocks;
  constexpr int kKeyTiles = Layout::kKeyBytes / kTileBytes, kValueTiles = Layout::kValueBytes / kTileBytes;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto arrive = [&](u32 barrier) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier);
  };
  E4m3Rows<kKeyTiles> keys[kHeld];
  E4m3Rows<kValueTiles> values[kHeld];
  BlockAhead ahead(p, part, last_place);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    keys[i].load(p.keys.base, ahead.offsets(p.keys), p.key_columns);
    values[i].load(p.values.base, ahead.offsets(p.values), p.value_columns);
    ahead.advance();
  }
  int t = 0;
  for (int place = part.place; place <= last_place; ++place) {
    const Segment segment = visible_segment(p, tile, part, place);
    if (warp >= 2) copy_query(p, shared, tile, warp - 2, (place - part.place) & 1);
#pragma unroll 1
    for (int i = 0; i < segment.blocks; ++i, ++t) {
      const int stage = t % Layout::kStages, phase = t / Layout::kStages & 1;
#pragma unroll
      for (int held = 0; held < kHeld; ++held) {
        if (t % kHeld != held) continue;  // which registers: known to the compiler in each branch
        mbarrier_wait(shared.keys_free(stage), phase ^ 1, "a free stage of keys");
        keys[held].template store<T>(shared.keys(stage), kTileBytes, warp * 16);
        arrive(shared.keys_full(stage));
        keys[held].load(p.keys.base, ahead.offsets(p.keys), p.key_columns);
        mbarrier_wait(shared.values_free(stage), phase ^ 1, "a free stage of values");
        values[held].template store<T>(shared.values(stage), kTileBytes, warp * 16);
        arrive(shared.values_full(stage));
        values[held].load(p.values.base, ahead.offsets(p.values), p.value_columns);
      }
      ahead.advance();
    }
  }
}

}  // namespace cumla::mha
