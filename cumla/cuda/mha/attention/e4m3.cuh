// SPDX-License-Identifier: Apache-2.0
// Loading e4m3 keys and values: two warpgroups, or one with 256 columns, convert them to 16 bits, for one consumer
// each (docs/kernels/mha.md, e4m3 keys and values). Values become float16. Both 16-bit types hold all e4m3 numbers,
// and NaN stays NaN.
//
// Consumers fence these generic writes before wgmma reads them.
#pragma once
#include "mha/attention/layout.cuh"
#include "mha/attention/lists.cuh"
#include "mha/attention/mask.cuh"
#include "split/tile.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

using namespace ptx;
using namespace split;

// Converts four e4m3 numbers to 16-bit pairs.
template <typename T>
__device__ __forceinline__ void widen(u32 packed, u32& low, u32& high) {
  expand_e4m3x4(packed, low, high);
  if constexpr (kIsBf16<T>) {
    const float2 first = unpack_pair<Fp16>(low), second = unpack_pair<Fp16>(high);
    low = pack_pair<Bf16>(first.x, first.y);
    high = pack_pair<Bf16>(second.x, second.y);
  }
}

// Byte offsets of a lane's rows; -1 for rows of zeros.
struct RowOffsets {
  i64 row[2];
};

// 16 rows of a block, copied and converted by one warp. A lane has 16 columns of each tile, of rows lane / 4 and
// lane / 4 + 8 (why: docs/kernels/mha.md).
template <int kTiles>
struct RawRows {
  static constexpr int kBytes = 2 * kTiles * kWarpgroup * 16;

  const u32 raw;  // a thread's numbers of a row and tile are 2 KiB apart

  __device__ __forceinline__ explicit RawRows(u32 block) : raw(block + threadIdx.x % kWarpgroup * 16) {}

  __device__ __forceinline__ void copy_async(const char* base, const RowOffsets& offsets, int columns) const {
    const int first = threadIdx.x % 4 * 16;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const bool exists = offsets.row[r] >= 0 && tile * 64 + first < columns;
        copy_16_async(raw + (r * kTiles + tile) * kWarpgroup * 16,
                      base + (exists ? offsets.row[r] + tile * 64 + first : 0), exists);
      }
  }

  // Converts to tiles of 64 rows of 128 bytes with the 128-byte swizzle. `first_row` is a multiple of 16.
  template <typename T>
  __device__ __forceinline__ void convert(u32 tiles, int tile_bytes, int first_row) const {
    const int row = threadIdx.x % 32 / 4, chunk = threadIdx.x % 4 * 2 ^ row;
    const u32 even = tiles + (first_row + row) * 128 + (chunk << 4), odd = even ^ 16;
    uint4 packed[2][kTiles];
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
        packed[r][tile] = load_shared_16(raw + (r * kTiles + tile) * kWarpgroup * 16);
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        uint4 wide;
        widen<T>(packed[r][tile].x, wide.x, wide.y);
        widen<T>(packed[r][tile].y, wide.z, wide.w);
        store_shared_16(even + tile * tile_bytes + r * 1024, wide);
        widen<T>(packed[r][tile].z, wide.x, wide.y);
        widen<T>(packed[r][tile].w, wide.z, wide.w);
        store_shared_16(odd + tile * tile_bytes + r * 1024, wide);
      }
  }
};

// The next block of this warpgroup whose page numbers are copied, one per lane of 16. Each row of a block has two
// words: the page number, and the row in its page or -1.
template <typename Layout, typename Params>
struct BlockAhead {
  const Params& p;
  const Layout& shared;
  const Part& part;
  const int last_place;
  HeadTile tile;
  Segment segment;
  int place, block;  // block: of the segment
  bool announces;    // masks: the first warp is never behind another one by more than what it converts next

  __device__ __forceinline__ BlockAhead(const Params& p, const Layout& shared, const Part& part, int last_place,
                                        int parity)
      : p(p), shared(shared), part(part), last_place(last_place), tile(p), place(part.place - 1), block(parity),
        announces(threadIdx.x < 32) {
    segment.blocks = 0;
  }

  // `words`: those of this warp's rows.
  __device__ __forceinline__ void copy_pages_async(u32 words) {
    while (block >= segment.blocks && place < last_place) {
      block -= segment.blocks;
      MaskOf<Params> mask;
      segment = visible_segment(p, shared, tile, part, ++place, mask, announces);
    }
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
    if (lane < 16) {
      int row = -1;
      i64 entry = -1;
      if (block < segment.blocks)  // past the last block there are no tokens
        entry = entry_of(p, tile, segment.tokens, (segment.begin + block) * kBlockTokens + warp * 16 + lane, row);
      const bool has_number = entry >= 0 && p.block_table != nullptr;
      // Else 0, the number of the only page
      copy_4_async(words + lane * 8, p.block_table + (has_number ? entry : 0), has_number);
      store_shared_u32(words + lane * 8 + 4, entry < 0 ? ~0u : row);
    }
    block += Layout::kLoaders;
  }
};

struct PagedRows {
  int page[2], row[2];

  __device__ __forceinline__ PagedRows(const AttentionParams& p, u32 words) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const u32 at = words + (threadIdx.x % 32 / 4 + 8 * r) * 8;
      row[r] = static_cast<int>(load_shared_u32(at + 4));
      const int number = static_cast<int>(load_shared_u32(at));
      page[r] = row[r] >= 0 && is_page(p, number) ? number : -1;
    }
  }

  __device__ __forceinline__ RowOffsets in(const Columns& of) const {
    RowOffsets found;
#pragma unroll
    for (int r = 0; r < 2; ++r)
      found.row[r] =
          page[r] < 0 ? -1 : page[r] * of.stride_page + row[r] * of.stride_row + HeadTile::kv_head() * of.stride_head;
    return found;
  }
};

// One of kLoaders warpgroups. The last two warps of the first one also copy the query rows, before the first block of
// a row tile.
template <typename T, typename Layout, typename Params>
__device__ __forceinline__ void load_e4m3(const Params& p, const Layout& shared, HeadTile& tile,
                                          const Part& part, int last_place, int parity) {
  constexpr int kTileBytes = Layout::kTileBytes, kLoaders = Layout::kLoaders, kAhead = Layout::kRawBlocks / kLoaders;
  using Keys = RawRows<Layout::kKeyBytes / kTileBytes>;
  using Values = RawRows<Layout::kValueBytes / kTileBytes>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32, first_slot = parity * kAhead;
  const auto words = [&](int slot) { return shared.raw_pages(first_slot + slot) + warp * 16 * 8; };
  const auto arrive = [&](u32 barrier) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier);  // plant: e4m3 tiles
  };
  BlockAhead<Layout, Params> ahead(p, shared, part, last_place, parity);
#pragma unroll 1
  for (int slot = 0; slot < kAhead; ++slot) ahead.copy_pages_async(words(slot));
  copy_async_wait_all();
  __syncwarp();
#pragma unroll 1
  for (int slot = 0; slot < kAhead; ++slot) {
    const PagedRows rows(p, words(slot));
    __syncwarp();
    ahead.copy_pages_async(words(slot));
    Keys(shared.raw_keys(first_slot + slot)).copy_async(p.keys.base, rows.in(p.keys), p.key_columns);
    copy_async_commit();
    Values(shared.raw_values(first_slot + slot)).copy_async(p.values.base, rows.in(p.values), p.value_columns);
    copy_async_commit();
  }
  int t = 0, slot = 0;
  for (int place = part.place; place <= last_place; ++place) {
    MaskOf<Params> mask;
    const Segment segment = visible_segment(p, shared, tile, part, place, mask);
    const int end = t + segment.blocks;
    if (parity == 0 && warp >= 2) load_query(p, shared, tile, warp - 2, (place - part.place) & 1);
#pragma unroll 1
    for (t += (t ^ parity) % kLoaders; t < end; t += kLoaders, slot = slot + 1 < kAhead ? slot + 1 : 0) {
      const int stage = t % Layout::kStages;
      const int before = t - Layout::kBuffers;  // the block whose buffer this one takes
      const int freed = before % Layout::kStages, phase = before / Layout::kStages & 1;
      const Keys keys(shared.raw_keys(first_slot + slot));
      const Values values(shared.raw_values(first_slot + slot));
      copy_async_wait<2 * kAhead - 1>();  // keys and page numbers
      __syncwarp();
      const PagedRows rows(p, words(slot));
      if (before >= 0) mbarrier_wait(shared.keys_free(freed), phase, "a free stage of keys");
      keys.template convert<T>(shared.keys(stage), kTileBytes, warp * 16);
      arrive(shared.keys_full(stage));
      keys.copy_async(p.keys.base, rows.in(p.keys), p.key_columns);
      ahead.copy_pages_async(words(slot));
      copy_async_commit();
      copy_async_wait<2 * kAhead - 1>();  // values
      if (before >= 0) mbarrier_wait(shared.values_free(freed), phase, "a free stage of values");
      values.template convert<Fp16>(shared.values(stage), kTileBytes, warp * 16);
      arrive(shared.values_full(stage));
      values.copy_async(p.values.base, rows.in(p.values), p.value_columns);
      copy_async_commit();
    }
    t = end;
  }
  copy_async_wait_all();
}

}  // namespace cumla::mha
