// SPDX-License-Identifier: Apache-2.0
// The loading roles of mla_decode_fp8.
#pragma once
#include "mla/mla_decode/pages.cuh"
#include "mla/mla_decode_fp8/layout.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace ptx;
using namespace split;

// Issues copies of 64 bytes of each of a warp's rows to a tile; `has_chunk`: this lane's 16 of them exist.
// model: fp8_data
template <typename Layout, typename AnyTile>
__device__ __forceinline__ void copy_half_tile(const RowCopier<AnyTile>& rows, const CacheColumns& from, u32 tile,
                                               bool has_chunk) {
  const i64 own = rows.offset_of(from, rows.now);
  const int chunk = rows.lane % 4;
#pragma unroll
  for (int i = 0; i < rows.kShare / 8; ++i) {
    const int row = token_at(8 * i + rows.lane / 4);
    const i64 offset = __shfl_sync(0xffffffffu, own, row);
    const bool exists = offset >= 0 && has_chunk;
    copy_16_async(tile + Layout::chunk_of(rows.first_row + row, chunk), from.base + (exists ? offset : 0) + chunk * 16,
                  exists);
  }
}

// Each of two warps copies half of the rows of every block. Rows that do not exist, or are past the end of a request,
// become zeros, with their scales, so none of them is NaN.
// model: fp8_segments, fp8_data
template <typename Layout, bool kGrouped, typename AnyTile>
__device__ __forceinline__ void load_kv_fp8(const MlaDecodeFp8Params& p, const Layout& shared, const AnyTile& tile,
                                            const Part& part, int last_place, int warp) {
  RowCopier<AnyTile> rows(p.decode, tile, part, last_place, warp);
#pragma unroll 1
  for (u32 t = 0; rows.take(); ++t) {
    const u32 s = t % Layout::kSlots, slot = shared.slot(s);
    mbarrier_wait(shared.free(s), t / Layout::kSlots % 2 ^ 1, "a free KV slot");
    if constexpr (AnyTile::kHasRope) {
      if (rope_is_fp8<AnyTile>(p))
        copy_half_tile<Layout>(rows, p.decode.rope, slot + Layout::kRopeOffset,
                               has_rope_column<AnyTile>(p, rows.lane % 4 * 16));
      else
        rows.template copy<1>(p.decode.rope, 0, {slot + Layout::kRopeOffset});
    }
    if constexpr (kGrouped) {
      const i64 offset = rows.offset_of(p.scales, rows.now);
      const bool exists = offset >= 0;
      copy_16_async(slot + Layout::kScalesOffset + (rows.first_row + rows.lane) * 16,
                    p.scales.base + (exists ? offset : 0),
                    exists);
    }
#pragma unroll 1
    for (int half = 0; half < Layout::kValueDim / (2 * kRawColumns); ++half) {
      const u32 tiles = slot + half * 2 * kTileBytes;
      rows.template copy<2>(p.decode.latent, half * 2 * kRawColumns, {tiles, tiles + kTileBytes});
    }
    mbarrier_arrive_after_copies(shared.full(s));
  }
  copy_async_wait_all();
}

// The same for pages of whole blocks: one thread issues TMA, whose 128-byte swizzle is that of chunk_of. Absent
// pages, and columns after 8-bit RoPE columns (half a box), are filled with zeros. Tokens past the end of a request
// keep what the page holds. Packed rows are one box.
// model: fp8_segments, fp8_data
template <typename Layout, bool kGrouped, typename AnyTile>
__device__ __forceinline__ void load_kv_fp8_pages(const MlaDecodeFp8Params& p, const Layout& shared,
                                                  const AnyTile& tile,
                                                  const Part& part, int last_place) {
  constexpr int kBoxBytes = Layout::kWhole ? kBlockTokens * kPackedBytes
                                           : (1 + Layout::kValueDim / kRawColumns) * kTileBytes +
                                                 (kGrouped ? kBlockTokens * Layout::kNextScales : 0);
  static_assert(Layout::kSlotBytes == kBoxBytes, "a barrier expects what its boxes bring");
  BlockCursor<1, AnyTile> now(p.decode, tile, part, last_place, 0);
  PageRow next = now.template row_of<kPages>(0);
#pragma unroll 1
  for (u32 t = 0; now.valid(); ++t) {
    const PageRow from = next;
    now.next();
    next = now.template row_of<kPages>(0);
    const u32 s = t % Layout::kSlots, slot = shared.slot(s);
    mbarrier_wait(shared.free(s), t / Layout::kSlots % 2 ^ 1, "a free KV slot");
    fence_proxy_async_shared();  // orders generic reads and writes of the slot before TMA
    auto load = [&](const TensorMap& map, u32 offset, int column) {
      tma_load_4d_async(slot + offset, &map, shared.full(s), column, from.row, blockIdx.z, from.page);
    };
    mbarrier_arrive_expect_tx(shared.full(s),
                              Layout::kSlotBytes - (Layout::kWhole || AnyTile::kHasRope ? 0 : kTileBytes));
    if constexpr (Layout::kWhole) {
      load(p.decode.latent_map, 0, 0);
    } else {
      if constexpr (AnyTile::kHasRope) load(p.decode.rope_map, Layout::kRopeOffset, 0);
      if constexpr (kGrouped) load(p.scales_map, Layout::kScalesOffset, 0);
#pragma unroll
      for (int k = 0; k < Layout::kValueDim / kRawColumns; ++k)
        load(p.decode.latent_map, k * kTileBytes, k * kRawColumns);
    }
  }
}

// The highest of a magnitude and of a pair of bfloat16, as bits of float32.
__device__ __forceinline__ u32 highest_magnitude(u32 highest, u32 pair) {
  return max(max(highest, pair & 0x7fff0000u), (pair << 16) & 0x7fff0000u);
}

__device__ __forceinline__ u32 highest_magnitude(u32 highest, const uint4& v) {
  return highest_magnitude(highest_magnitude(highest_magnitude(highest_magnitude(highest, v.x), v.y), v.z), v.w);
}

// The exponent of a row's highest magnitude, from its eight lanes.
// model: fp8_data
__device__ __forceinline__ u32 row_exponent(u32 highest) {
#pragma unroll
  for (int step = 1; step < 8; step *= 2) highest = max(highest, __shfl_xor_sync(0xffffffffu, highest, step));
  return max(highest >> 23, 16u);  // the factor for lower ones would overflow
}

// Multiplies a pair of bfloat16 by a power of two, and converts it to float16.
__device__ __forceinline__ u32 scaled_to_half(u32 pair, float factor) {
  const float2 v = unpack_pair<Bf16>(pair);
  return pack_pair<Fp16>(v.x * factor, v.y * factor);
}

// Stores eight e4m3 columns of a row as float16, which holds each, in the same order as store_scaled.
__device__ __forceinline__ void store_halves(u32 to, int row, int chunk, const uint2& bytes) {
  u32 words[4];
  expand_e4m3x4(bytes.x, words[0], words[1]);
  expand_e4m3x4(bytes.y, words[2], words[3]);
#pragma unroll
  for (int j = 0; j < 4; ++j)
    store_shared_u32(to + ((chunk % 2 * 4 + j ^ row & 7) << 4) + chunk / 2 * 4, words[j]);
}

// Stores four words of a chunk of a row, each to the chunk where the fragments of K have theirs.
// model: fp8_data
__device__ __forceinline__ void store_scaled(u32 to, int row, int chunk, const u32 (&words)[4], float factor) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int u = chunk % 2 * 4 + j;  // the chunk it goes to
    store_shared_u32(to + ((u ^ (row & 7)) << 4) + chunk / 2 * 4, scaled_to_half(words[j], factor));
  }
}

// Two warps load the query rows, eight lanes per row. Columns that meet e4m3 become float16. Each row is divided by a
// power of two, so that its highest magnitude is below 2^15: nothing overflows, and numbers down to 2^-32 of it keep
// all bits. Columns are permuted like the fragments of K: of 64 columns pair 8 t + u, as a word, goes to word
// 4 u + t. RoPE columns of 16 bits stay as they are.
// model: fp8_segments, fp8_data
template <int kQueryRows, typename Layout, typename AnyTile>
__device__ __forceinline__ void load_query_fp8(const MlaDecodeFp8Params& params, const Layout& shared, AnyTile& tile,
                                               const Part& part, int last_place, int loader) {
  // A row is kept in registers. With 32 rows, or a ragged tile, there are too few of them.
  constexpr bool kKeeps = kQueryRows == 16 && !AnyTile::kIsRagged;
  constexpr int kRopeTile = AnyTile::kLatentTiles, kOwnTiles = kRopeTile + AnyTile::kHasRope;
  constexpr int kAtOnce = kKeeps || kRopeTile < 8 ? kOwnTiles : AnyTile::kHasRope ? 3 : 4;
  constexpr int kChunk = kQueryChunk<AnyTile>;
  const MlaDecodeParams& p = params.decode;
  const int lane = threadIdx.x % 32, chunk = lane % 8;
#pragma unroll 1
  for (u32 n = 0; part.place + static_cast<int>(n) <= last_place; ++n) {
    const int request = segment_of(p, tile, part, part.place + n).request;
    mbarrier_wait(shared.query_free(n), Layout::phase_of(n) ^ 1, "a free query buffer");
#pragma unroll 1
    for (int i = 0; i < kQueryRows / 8; ++i) {
      const int row = loader * (kQueryRows / 2) + i * 4 + lane / 8;
      const bool valid = row < tile.rows;
      const Row from(p, tile, valid ? row : 0);
      const char* const latent = query_tile<kRopeTile>(p, 0, request, from.token, from.head) + chunk * kChunk;
      const char* const rope = query_tile<kRopeTile>(p, kRopeTile, request, from.token, from.head) + chunk * kChunk;
      if constexpr (kQueryIsFp8<AnyTile>) {
        uint2 kept[kOwnTiles];
#pragma unroll
        for (int k = 0; k < kOwnTiles; ++k) {
          kept[k] = {0, 0};
          if (valid) kept[k] = *reinterpret_cast<const uint2*>(k == kRopeTile ? rope : latent + k * 8 * kChunk);
        }
        const u32 row_bytes = shared.query(copy_of(n)) + row * 128;
#pragma unroll
        for (int k = 0; k < kOwnTiles; ++k) store_halves(row_bytes + k * Layout::kQueryTileBytes, row, chunk, kept[k]);
        if (chunk == 0) store_shared_float(shared.factor_of(n, row), p.scale_log2 * query_factor<AnyTile>(params));
        continue;
      }
      const bool has_rope = valid && has_rope_column<AnyTile>(params, chunk * 8);
      auto words_of = [&](int k) {
        uint4 v = {0, 0, 0, 0};
        if (k == kRopeTile ? has_rope : valid)
          v = *reinterpret_cast<const uint4*>(k == kRopeTile ? rope : latent + k * 128);
        return v;
      };
      uint4 kept[kKeeps ? kOwnTiles : 1];
      if constexpr (kKeeps) {
#pragma unroll
        for (int k = 0; k < kOwnTiles; ++k) kept[k] = words_of(k);
      }
      u32 highest = 0;
#pragma unroll kAtOnce
      for (int k = 0; k < kOwnTiles; ++k) {
        const uint4 v = kKeeps ? kept[kKeeps ? k : 0] : words_of(k);
        if (k < kRopeTile || rope_is_fp8<AnyTile>(params)) highest = highest_magnitude(highest, v);
      }
      const u32 exponent = row_exponent(highest);
      const float factor = __uint_as_float((127 + 14 + 127 - exponent) << 23);
      const u32 row_bytes = shared.query(copy_of(n)) + row * 128;
#pragma unroll kAtOnce
      for (int k = 0; k < kOwnTiles; ++k) {
        const uint4 v = kKeeps ? kept[kKeeps ? k : 0] : words_of(k);  // else loaded again, from L2
        const u32 to = row_bytes + k * Layout::kQueryTileBytes;
        if (k < kRopeTile || rope_is_fp8<AnyTile>(params)) {
          store_scaled(to, row, chunk, {v.x, v.y, v.z, v.w}, factor);
        } else {
          store_shared_16(to + ((chunk ^ (row & 7)) << 4), v);
        }
      }
      if (chunk == 0)
        store_shared_float(shared.factor_of(n, row), __uint_as_float((exponent - 14) << 23) * p.scale_log2);
    }
    fence_proxy_async_shared();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared.query_full(n));  // plant: FP8 query copied
  }
}

}  // namespace cumla::mla
