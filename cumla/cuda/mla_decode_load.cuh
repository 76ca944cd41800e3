// SPDX-License-Identifier: Apache-2.0
// What the loading roles of the decode kernels share: the order of the blocks, early fetches, the query rows.
#pragma once
#include "mla_decode_layout.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"

namespace cumla {

// Walks over every kStep-th block (1 or 2) of this CTA's sequence.
template <int kStep>
struct BlockCursor {
  const MlaDecodeParams& p;
  const Tile& tile;
  const Part& part;
  const int last_place, parity;
  int place, i, t;  // block i of the segment at a place; t: blocks of the segments before it
  Segment segment;

  __device__ __forceinline__ BlockCursor(const MlaDecodeParams& p, const Tile& tile, const Part& part,
                                         int last_place, int parity)
      : p(p),
        tile(tile),
        part(part),
        last_place(last_place),
        parity(parity),
        place(part.place),
        i(parity),
        t(0) {
    if (valid()) segment = segment_of(p, tile, part, place);
    skip_to_block();
  }
  __device__ __forceinline__ bool valid() const { return place <= last_place; }
  __device__ __forceinline__ int page() const {
    return p.block_table[segment.request * p.block_table_stride + segment.begin + i];
  }
  __device__ __forceinline__ void next() {
    i += kStep;
    skip_to_block();
  }
  __device__ __forceinline__ void skip_to_block() {
    while (valid() && i >= segment.blocks) {
      t += segment.blocks;
      i = (parity ^ t) & (kStep - 1);
      if (++place <= last_place) segment = segment_of(p, tile, part, place);
    }
  }
};

// Has L2 fetch what the first loads will depend on, one after the other: the part, the lengths, and of the block table
// each CTA a few lines, as far as a few instructions go.
__device__ __forceinline__ void prefetch_plan(const MlaDecodeParams& p, int thread, int threads) {
  constexpr int kLine = 32, kPlaces = 16;  // entries of 128 bytes
  if (thread == 0) prefetch_l2(p.parts_in + blockIdx.y);
  const int ctas = gridDim.x * gridDim.y * gridDim.z;
  const int cta = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const int lines = (p.max_blocks + kLine - 1) / kLine;
#pragma unroll 1
  for (int i = cta * threads + thread, k = 0; i < static_cast<i64>(p.batch) * lines && k < 4; i += ctas * threads, ++k)
    prefetch_l2(p.block_table + (i / lines) * p.block_table_stride + (i % lines) * kLine);
  if (thread * kPlaces < p.batch) prefetch_l2(p.places + thread * kPlaces);
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

// What comes before the roles: early fetches, barriers, and the wait for the kernel before.
template <typename Layout>
__device__ __forceinline__ void begin_kernel(const MlaDecodeParams& p, const Layout& shared) {
  const int warp = threadIdx.x / 32;
  // Fetching into L2 reads nothing: an earlier kernel may still write these lines.
  if (warp == 2 || warp == 3) prefetch_plan(p, threadIdx.x - 64, 64);
  if (threadIdx.x == 32) prefetch_tensor_map(&p.kv);
  if (threadIdx.x == 0) initialise_barriers(shared);
  grid_dependency_launch();
  __syncthreads();
  if (warp == 2 || warp == 3) prefetch_queries(p, threadIdx.x - 64, 64);
  grid_dependency_wait();
}

// Two warps copy the query rows; eight lanes a row, 16 bytes each.
template <int kRows, typename Layout>
__device__ __forceinline__ void load_query(const MlaDecodeParams& p, const Layout& shared, const Tile& tile,
                                           const Part& part, int last_place, int loader) {
  const int lane = threadIdx.x % 32, chunk = lane % 8;
  for (int place = part.place; place <= last_place; ++place) {
    const int request = segment_of(p, tile, part, place).request;
    const u32 phase = (place - part.place) & 1;
    mbarrier_wait(shared.query_free(), phase ^ 1, "a free query buffer");
    const char* q = p.q + request * p.q_stride_batch;
#pragma unroll 1  // unrolled, the row addresses do not fit the registers of a loader
    for (int i = 0; i < kRows / 8; ++i) {
      const int row = loader * (kRows / 2) + i * 4 + lane / 8;
      const bool valid = row < tile.rows;
      const Row from(p, tile, valid ? row : 0);
      const char* source = q + from.token * p.q_stride_token + from.head * p.q_stride_head + chunk * 16;
      const u32 destination = shared.query + row * 128 + ((chunk ^ (row & 7)) << 4);
#pragma unroll
      for (int k = 0; k < kTiles; ++k) copy_16_async(destination + k * kRows * 128, source + k * 128, valid);
    }
    copy_async_wait_all();
    fence_proxy_async_shared();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared.query_full());
  }
}

}  // namespace cumla
