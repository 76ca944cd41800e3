// SPDX-License-Identifier: Apache-2.0
// What the loading roles of both decode kernels share: early fetches into L2, and copies of query rows.
#pragma once
#include "mla_decode_layout.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"

namespace cumla {

// Has L2 fetch what the first loads will depend on, one after the other: the part, the lengths, and of the block table
// each CTA a few lines, as far as a few instructions go.
__device__ __forceinline__ void prefetch_plan(const MlaDecodeParams& p, int thread, int threads) {
  constexpr int kLine = 32;  // entries of 128 bytes
  if (thread == 0) prefetch_l2(p.parts_in + blockIdx.y);
  const int ctas = gridDim.x * gridDim.y * gridDim.z;
  const int cta = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const int lines = (p.max_blocks + kLine - 1) / kLine;
#pragma unroll 1
  for (int i = cta * threads + thread, k = 0; i < static_cast<i64>(p.batch) * lines && k < 4; i += ctas * threads, ++k)
    prefetch_l2(p.block_table + (i / lines) * p.block_table_stride + (i % lines) * kLine);
  if (thread * kLine < p.batch) prefetch_l2(p.seqlens + thread * kLine);
}

// Has L2 fetch all query rows where these are few: the CTAs share them. Their request is known only a load later.
__device__ __forceinline__ void prefetch_queries(const MlaDecodeParams& p, int thread, int threads) {
  constexpr int kLines = kHeadDim * 2 / 128;  // of a row
  const int heads = gridDim.z * p.heads_per_group;
  const i64 lines = static_cast<i64>(p.batch) * p.q_len * heads * kLines;
  const int ctas = gridDim.x * gridDim.y * gridDim.z;
  if (lines > 4 * ctas * threads) return;
  const int cta = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
#pragma unroll 1
  for (int i = cta * threads + thread; i < lines; i += ctas * threads) {
    const int row = i / kLines, tokens = row / heads, request = tokens / p.q_len;
    prefetch_l2(p.q + request * p.q_stride_batch + (tokens - request * p.q_len) * p.q_stride_token +
                (row - tokens * heads) * p.q_stride_head + (i - row * kLines) * 128);
  }
}

// Two warps copy the query rows of a request, eight lanes a row, 16 bytes each: tiles of 64 columns with the 128-byte
// swizzle, for wgmma and ldmatrix. place(tile): where a tile goes.
template <int kRows, typename Place>
__device__ __forceinline__ void copy_query(const MlaDecodeParams& p, const Tile& tile, int request, int loader,
                                           const Place& place) {
  const int lane = threadIdx.x % 32, chunk = lane % 8;
  const char* q = p.q + request * p.q_stride_batch;
#pragma unroll 1  // unrolled, the row addresses do not fit the registers of a loader
  for (int i = 0; i < kRows / 8; ++i) {
    const int row = loader * (kRows / 2) + i * 4 + lane / 8;
    const bool valid = row < tile.rows;
    const Row from(p, tile, valid ? row : 0);
    const char* source = q + from.token * p.q_stride_token + from.head * p.q_stride_head + chunk * 16;
    const u32 within = row * 128 + ((chunk ^ (row & 7)) << 4);
#pragma unroll
    for (int k = 0; k < kTiles; ++k) copy_16_async(place(k) + within, source + k * 128, valid);
  }
  copy_async_wait_all();
  fence_proxy_async_shared();
  __syncwarp();
}

}  // namespace cumla
