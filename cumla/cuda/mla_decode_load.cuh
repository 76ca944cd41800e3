// SPDX-License-Identifier: Apache-2.0
// The loading roles of mla_decode: KV blocks by TMA, query rows by asynchronous copies.
#pragma once
#include "mla_decode_layout.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"

namespace cumla {

// Walks over every second block of this CTA's sequence.
struct BlockCursor {
  const MlaDecodeParams& p;
  const Tile& tile;
  const PartBound from, to;
  const int last_request, parity;
  int request, i, t;  // block i of the request's segment; t: blocks of the segments before it
  Segment segment;

  __device__ __forceinline__ BlockCursor(const MlaDecodeParams& p, const Tile& tile, PartBound from, PartBound to,
                                         int last_request, int parity)
      : p(p), tile(tile), from(from), to(to), last_request(last_request), parity(parity), request(from.request),
        i(parity), t(0) {
    if (valid()) segment = segment_of(p, tile, from, to, request);
    skip_to_block();
  }
  __device__ __forceinline__ bool valid() const { return request <= last_request; }
  __device__ __forceinline__ int page() const {
    return p.block_table[request * p.block_table_stride + segment.begin + i];
  }
  __device__ __forceinline__ void next() {
    i += 2;
    skip_to_block();
  }
  __device__ __forceinline__ void skip_to_block() {
    while (valid() && i >= segment.blocks) {
      t += segment.blocks;
      i = (parity ^ t) & 1;
      if (++request <= last_request) segment = segment_of(p, tile, from, to, request);
    }
  }
};

// Whether this CTA has L2 fetch the blocks that are loaded next, so that a load waits for L2 and not for DRAM. That pays
// where several row tiles read the same blocks (compute-bound); of two tiles one does it for both. With one row tile
// (memory-bound) it only lengthens the queue of the copy engine.
template <bool kSharedBlocks>
__device__ __forceinline__ bool fetches_ahead(const MlaDecodeParams& p) {
  return kSharedBlocks && (p.row_tiles > 2 || blockIdx.x % 2 == 0);
}

// One thread: loads the blocks of one parity into their stage as it becomes free.
template <bool kSharedBlocks>
__device__ __forceinline__ void load_kv(const MlaDecodeParams& p, const SharedLayout& shared, const Tile& tile,
                                        PartBound from, PartBound to, int last_request, int parity) {
  BlockCursor now(p, tile, from, to, last_request, parity);
  BlockCursor ahead = now;
  int next_page = now.valid() ? now.page() : 0;
  if (fetches_ahead<kSharedBlocks>(p))
    ahead.next();
  else
    ahead.request = last_request + 1;
#pragma unroll 1
  while (now.valid()) {
    const int page = next_page;
    const u32 phase = ((now.t + now.i) / 2) & 1;
    const u32 stage = shared.stage(parity);
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
      const int column = tile_in_order(parity, k);
      const int half = column / kHalfTiles;
      if (k == 0 || k == 1 || k == 1 + kHalfTiles)
        mbarrier_wait(shared.free(parity, half), phase ^ 1, "a free KV stage");
      const u32 barrier = shared.full(parity, column);
      mbarrier_arrive_expect_tx(barrier, kTileBytes);
      tma_load_4d_async(stage + column * kTileBytes, &p.kv, barrier, column * 64, 0, tile.kv_head, page);
    }
    if (ahead.valid()) {
      const int page_ahead = ahead.page();
#pragma unroll
      for (int k = 0; k < kTiles; ++k) tma_prefetch_4d(&p.kv, k * 64, 0, tile.kv_head, page_ahead);
      ahead.next();
    }
    now.next();
    if (now.valid()) next_page = now.page();
  }
}

// Two warps copy the query rows; eight lanes a row, 16 bytes each.
__device__ __forceinline__ void load_query(const MlaDecodeParams& p, const SharedLayout& shared, const Tile& tile,
                                           PartBound from, int last_request, int loader) {
  const int lane = threadIdx.x % 32, chunk = lane % 8;
  for (int request = from.request; request <= last_request; ++request) {
    const u32 phase = (request - from.request) & 1;
    mbarrier_wait(shared.query_free(), phase ^ 1, "a free query buffer");
    const char* q = p.q + request * p.q_stride_batch;
#pragma unroll 1  // unrolled, the row addresses do not fit the registers of a loader
    for (int i = 0; i < kRowTile / 8; ++i) {
      const int row = loader * (kRowTile / 2) + i * 4 + lane / 8;
      const bool valid = row < tile.rows;
      const int group_row = valid ? tile.first_row + row : tile.first_row;
      const int token = group_row / p.heads_per_group;
      const int head = tile.kv_head * p.heads_per_group + group_row % p.heads_per_group;
      const char* source = q + token * p.q_stride_token + head * p.q_stride_head + chunk * 16;
      const u32 destination = shared.query + row * 128 + ((chunk ^ (row & 7)) << 4);
#pragma unroll
      for (int k = 0; k < kTiles; ++k) copy_16_async(destination + k * kTileBytes, source + k * 128, valid);
    }
    copy_async_wait_all();
    fence_proxy_async_shared();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared.query_full());
  }
}

}  // namespace cumla
