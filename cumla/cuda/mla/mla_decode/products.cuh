// SPDX-License-Identifier: Apache-2.0
// Products of the consumers of mla_decode: scores from the query and keys, outputs from probabilities and values.
#pragma once
#include "mla/mla_decode/compute.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/types.cuh"
#include "ptx/wgmma.cuh"

namespace cumla::mla {

// scores = query x block t, asynchronously.
template <typename T, bool kSharedBlocks, bool kCopied, typename AnyTile>
__device__ __forceinline__ void Consumer<T, kSharedBlocks, kCopied, AnyTile>::multiply_query(int t) {
  if constexpr (AnyTile::kRing) return multiply_query_ring(t);
  const int at = Layout::stage_of(t, consumer);
  const u32 stage = operand(shared.stage(at));
  const u32 phase = Layout::phase_of(t);
#pragma unroll
  for (int i = kFirst; i < kTiles; ++i) {
    const int column = tile_in_order<AnyTile::kLatentTiles>(consumer, i);
    if (!kByHalves || i == 0 || i % kHalfTiles == 1) {
      mbarrier_wait(shared.full(at, column), phase, "KV tiles");  // plant: tiles
      if constexpr (kCopied) fence_proxy_async_shared();
    }
    warpgroup_arrive();
    if constexpr (kHalves) {
      if (i == 0) {
#pragma unroll
        for (int k = 0; k < 2; ++k)
          wgmma_m64n64k16_async<T>(scores, this->rope + 4 * k,
                                   descriptor_of_rows<64>(stage, column * kTileBytes + k * 32), k > 0);
        continue;
      }
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const u64 rows = descriptor_of_rows<128>(stage, column * kTileBytes + k * 32);
      if constexpr (kOtherFirst) {
        if (i == kFirst) {
          wgmma_m64n64k16_async<T>(scores, this->query + 4 * k, rows, k > 0);
          continue;
        }
      }
      wgmma_m64n64k16_async<T>(scores,
                               descriptor_of_rows<128>(operand(shared.query), column * kTileBytes + k * 32), rows,
                               i + k > kFirst);
    }
  }
  warpgroup_commit();
}

// The same with the ring of half blocks. Order of tiles: the owner's half of V first, but tile 7, whose query is in
// registers, last.
template <typename T, bool kSharedBlocks, bool kCopied, typename AnyTile>
__device__ __forceinline__ void Consumer<T, kSharedBlocks, kCopied, AnyTile>::multiply_query_ring(int t) {
  const int first = Layout::slot_of(2 * t), second = Layout::slot_of(2 * t + 1);
  const u32 halves[2] = {shared.slot(first), shared.slot(second)};
  const u32 by_half[2] = {consumer ? halves[1] : halves[0], consumer ? halves[0] : halves[1]};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i == 0 || i == 3) {
      mbarrier_wait(shared.full(i ? second : first, 0), Layout::phase_of_use(2 * t + (i != 0)), "KV tiles");
      if constexpr (kCopied) fence_proxy_async_shared();
    }
    warpgroup_arrive();
    const int later = i < 3 ? i + 4 : i < 7 ? i - 3 : 7;  // consumer 1
    const int column = consumer ? later : i;
    const u32 tile = (consumer ? by_half[later / 4] + later % 4 * kTileBytes : by_half[i / 4] + i % 4 * kTileBytes);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const u64 rows = descriptor_of_rows<128>(tile, k * 32);
      if (i == 7)
        wgmma_m64n64k16_async<T>(scores, this->query + 4 * k, rows, true);
      else
        wgmma_m64n64k16_async<T>(scores, descriptor_of_rows<128>(shared.query + column * kTileBytes, k * 32), rows,
                                 i + k > 0);
    }
  }
  warpgroup_commit();
}

// Loads the last tile of the query, which is not in shared memory.
template <typename T, bool kSharedBlocks, bool kCopied, typename AnyTile>
__device__ __forceinline__ void
Consumer<T, kSharedBlocks, kCopied, AnyTile>::hold_last_tile(const Segment& segment) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool exists = row + 8 * r < tile.rows;
    const Row from(p, tile, exists ? row + 8 * r : 0);
    const char* const columns =
        query_tile<AnyTile::kLatentTiles>(p, AnyTile::kLatentTiles - 1, segment.request, from.token, from.head) +
        lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      this->query[2 * i + r] = exists ? *reinterpret_cast<const u32*>(columns + i * 16) : 0;
  }
}

// Loads the tile of the query that is used first.
template <typename T, bool kSharedBlocks, bool kCopied, typename AnyTile>
__device__ __forceinline__ void Consumer<T, kSharedBlocks, kCopied, AnyTile>::hold_query() {
  const int query_row = warp * 16 + lane % 16;
  const u32 from = shared.query + tile_in_order<AnyTile::kLatentTiles>(consumer, kFirst) * kTileBytes +
                   query_row * 128;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    u32 words[4];
    load_matrix_x4(words, from + ((2 * k + lane / 16 ^ query_row & 7) << 4));
#pragma unroll
    for (int i = 0; i < 4; ++i) this->query[4 * k + i] = words[i];
  }
}

template <typename T, bool kSharedBlocks, bool kCopied, typename AnyTile>
__device__ __forceinline__ u64 Consumer<T, kSharedBlocks, kCopied, AnyTile>::value_descriptor(int stage, int k) const {
  if constexpr (AnyTile::kRing) return descriptor_of_rows<128, kTileBytes>(shared.slot(stage), k * 2048);
  return descriptor_of_rows<128, kTileBytes>(operand(shared.stage(stage)) + consumer * kHalfTiles * kTileBytes,
                                             k * 2048);
}

// output += own probabilities x this consumer's half of V, asynchronously.
template <typename T, bool kSharedBlocks, bool kCopied, typename AnyTile>
__device__ __forceinline__ void Consumer<T, kSharedBlocks, kCopied, AnyTile>::multiply_own(int stage) {
  begin_products();
#pragma unroll
  for (int k = 0; k < 4; ++k) multiply_values(probabilities + 4 * k, value_descriptor(stage, k));
  warpgroup_commit();
}

// output += the other consumer's probabilities x this consumer's half of V, asynchronously.
template <typename T, bool kSharedBlocks, bool kCopied, typename AnyTile>
__device__ __forceinline__ void Consumer<T, kSharedBlocks, kCopied, AnyTile>::multiply_other(int stage) {
  begin_products();
#pragma unroll
  for (int k = 0; k < 4; ++k)
    multiply_values(descriptor_of_rows<128>(operand(shared.probabilities), k * 32), value_descriptor(stage, k));
  warpgroup_commit();
}

template <typename T, bool kSharedBlocks, bool kCopied, typename AnyTile>
__device__ __forceinline__ void Consumer<T, kSharedBlocks, kCopied, AnyTile>::begin_products() {
  if constexpr (!AnyTile::kWideProducts) keep_before_products(output);
  warpgroup_arrive();
}

// a: probabilities in registers or in shared memory.
template <typename T, bool kSharedBlocks, bool kCopied, typename AnyTile>
template <typename Operand>
__device__ __forceinline__ void Consumer<T, kSharedBlocks, kCopied, AnyTile>::multiply_values(Operand a, u64 values) {
  if constexpr (kOutputs < 128) {
    wgmma_values_async<T>(output, a, values);
  } else if constexpr (AnyTile::kWideProducts) {
    wgmma_m64n256k16_async<T>(output, a, values);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      wgmma_values_async<T>(reinterpret_cast<float (&)[64]>(output[64 * half]), a,
                            values + half * (2 * kTileBytes >> 4));
  }
}

}  // namespace cumla::mla
