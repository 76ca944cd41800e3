// SPDX-License-Identifier: Apache-2.0
// Copies rows of keys, values and queries to tiles in shared memory: 64 columns of 16 bits per tile, 128-byte
// swizzle.
#pragma once
#include "mha/attention/layout.cuh"
#include "split/tile.cuh"
#include "ptx/copy.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

using namespace ptx;
using namespace split;

// One warp copies kRows rows of a block: four at a time, eight lanes each. Lane k has the offset of row k. Tiles are
// kTileBytes apart.
template <int kTiles, int kTileBytes, int kRows>
__device__ __forceinline__ void copy_rows(const char* base, i64 own, int first_row, int columns, u32 tiles) {
  const int lane = threadIdx.x % 32, chunk = lane % 8;
#pragma unroll(kRows == 16 ? 4 : 1)
  for (int i = 0; i < kRows / 4; ++i) {
    const int k = 4 * i + lane / 8, row = first_row + k;
    const i64 offset = __shfl_sync(0xffffffffu, own, k);
#pragma unroll(kRows == 16 ? kTiles : 1)
    for (int tile = 0; tile < kTiles; ++tile) {
      const bool exists = offset >= 0 && tile * 64 + chunk * 8 < columns;
      copy_16_async(tiles + tile * kTileBytes + row * 128 + ((chunk ^ (row & 7)) << 4),
                    base + (exists ? offset + tile * 128 + chunk * 16 : 0), exists);
    }
  }
}

// A warp copies kRows query rows of a tile to `tiles`, which are 8,192 bytes apart.
template <int kTiles, int kRows>
__device__ __forceinline__ void copy_query(const AttentionParams& p, const RaggedTile& tile, int first_row, u32 tiles) {
  const int row = first_row + threadIdx.x % kRows;
  i64 own = -1;
  if (row < tile.rows) {
    const Query from(p, tile, row);
    own = from.at.batch * p.q_stride_batch + from.at.token * p.q_stride_token + from.head * p.q_stride_head;
  }
  copy_rows<kTiles, 8192, kRows>(p.q, own, first_row, p.key_columns, tiles);
}

}  // namespace cumla::mha
