// SPDX-License-Identifier: Apache-2.0
// The loading warps of mla_decode_wide_few: rows by bulk copies, one a lane.
#pragma once
#include "mla/mla_decode/load.cuh"
#include "mla/mla_decode_wide_few/layout.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

constexpr int kFewLoaders = 4;  // warps: each loads every fourth row, so that copies are issued at once

// Rows of a chunk that products of 16 keys take. Those behind the last key are copies of it, because what a product
// multiplies by 0 must be finite.
__device__ __forceinline__ int few_rows_of(int count) { return min(count + 15 & ~15, kFewChunk); }

// Looks up the row of a chunk that this lane loads, if there is one: its page and row. Page -1 loads zeros.
__device__ __forceinline__ PageRow few_row(const MlaDecodeParams& p, const FewTile& tile, const FewShare& share,
                                           int key, int row) {
  if (key >= share.end || row >= few_rows_of(share.end - key)) return {-1, 0};
  const u32 token = min(key + row, share.end - 1);
  const u32 entry = quotient(token, p.by_page_size);
  return {page_of(p, static_cast<const RaggedTile&>(tile), Segment{}, entry),
          static_cast<int>(token - entry * p.page_size)};
}

// Issues the loads of a chunk of `count` keys. Rows without a page are zeros.
__device__ __forceinline__ void load_few_rows(const MlaDecodeParams& p, u32 stage, u32 barrier, const PageRow& at,
                                              int row, int count) {
  const bool exists = static_cast<u32>(at.page) < static_cast<u32>(p.num_pages);
  const bool is_zero = !exists && row < few_rows_of(count);
  const u32 to = stage + row * WideFewLayout::kPitch;
  if (__any_sync(0xffffffffu, is_zero)) {
    if (is_zero)
#pragma unroll 1
      for (int byte = 0; byte < kFewLatent + kFewRope; byte += 16) store_shared_zero_16(to + byte);
    fence_proxy_async_shared();
  }
  const int rows = __popc(__ballot_sync(0xffffffffu, exists));
  if (threadIdx.x % 32 == 0) mbarrier_arrive_expect_tx(barrier, rows * (kFewLatent + kFewRope));
  __syncwarp();
  if (!exists) return;
  copy_bulk_async(to,
                  p.latent.base + at.page * p.latent.stride_page + at.row * p.latent.stride_row +
                      blockIdx.z * p.latent.stride_head,
                  p.rope_is_apart ? kFewLatent : kFewLatent + kFewRope, barrier);
  if (p.rope_is_apart)
    copy_bulk_async(to + kFewLatent,
                    p.rope.base + at.page * p.rope.stride_page + at.row * p.rope.stride_row +
                        blockIdx.z * p.rope.stride_head,
                    kFewRope, barrier);
}

// One of the warps loads its query rows, then its rows of all chunks.
__device__ __forceinline__ void load_few(const MlaDecodeParams& p, const WideFewLayout& shared, const FewTile& tile,
                                         const FewShare& share, int loader) {
  const int lane = threadIdx.x % 32, row = lane * kFewLoaders + loader;
  PageRow next = few_row(p, tile, share, share.begin, row);
  const int queries = (tile.rows - loader + kFewLoaders - 1) / kFewLoaders;
  if (lane == 0) mbarrier_arrive_expect_tx(shared.query_full(), queries * (kFewLatent + kFewRope));
  __syncwarp();
  if (lane < queries) {
    const Row from(p, tile, row);
    const u32 to = shared.query(row);
    copy_bulk_async(to, query_tile<16>(p, 0, share.request, from.token, from.head), kFewLatent, shared.query_full());
    copy_bulk_async(to + kFewLatent, query_tile<16>(p, 16, share.request, from.token, from.head), kFewRope,
                    shared.query_full());
  }
  __syncwarp();
#pragma unroll 1
  for (int t = 0, key = share.begin; key < share.end; ++t, key += kFewChunk) {
    const PageRow now = next;
    next = few_row(p, tile, share, key + kFewChunk, row);
    const int stage = t & 1, count = min(kFewChunk, share.end - key);
    if (t == 1 && count > kFewChunk - kFewRows) mbarrier_wait(shared.query_free(), 0, "the query in registers");
    mbarrier_wait(shared.free(stage), t / 2 & 1 ^ 1, "a free stage");
    load_few_rows(p, shared.stage(stage), shared.full(stage), now, row, count);
    __syncwarp();
  }
}

}  // namespace cumla::mla
