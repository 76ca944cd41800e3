// SPDX-License-Identifier: Apache-2.0
// The share of a warp of block_scores_few: blocks of the sequence of all visible ones; and the loads of their keys.
#pragma once
#include "blocks/block_scores_few/layout.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

using namespace ptx;

// Cached tokens of a request, of those that its pages hold. Any bits give a number up to that.
template <typename Params>
__device__ __forceinline__ int tokens_in(const Params& p, int kv_len) {
  return min(max(kv_len, 0), p.most);
}

template <typename Params>
__device__ __forceinline__ int tokens_of(const Params& p, int request) {
  return tokens_in(p, p.kv_lens[request * p.kv_lens_stride]);
}

__device__ __forceinline__ int blocks_of(const BlockScoresFewParams& p, int tokens) {
  return tokens > 0 ? static_cast<int>(quotient(tokens - 1, p.by_block_size)) + 1 : 0;
}

__device__ __forceinline__ i64 offset_of_row(const BlockScoresFewParams& p, int row) {
  const int token = quotient(row, p.by_heads);
  return token * p.out_stride_token + (row - token * p.heads) * p.out_stride_head;
}

// A block of a request.
struct BlockPlace {
  int request, block;
  int tokens, blocks;  // of the request

  template <typename Params>
  __device__ __forceinline__ void find(const Params& p) {
    tokens = tokens_of(p, request);
    blocks = blocks_of(p, tokens);
  }
  // Goes to the next block, if there is one; returns whether it is of another request.
  template <typename Params>
  __device__ __forceinline__ bool advance(const Params& p) {
    if (++block < blocks) return false;
    block = blocks = 0;
#pragma unroll 1
    while (blocks == 0 && ++request < p.batch) find(p);
    return true;
  }
};

// Where a warp is in the order of shares: neighbours are in other CTAs.
__device__ __forceinline__ int place_of_warp() { return threadIdx.x / 32 * gridDim.x + blockIdx.x; }

// Blocks of a warp: all of them divided by the warps, and one more in the first warps. With very many blocks the second
// half of the warps has none: fewer streams are faster.
// Another stream may write lengths meanwhile: what a warp scores of a request follows from one read of its length.
struct Share {
  BlockPlace first = {};
  int blocks;

  template <typename Params>
  __device__ __forceinline__ Share(const Params& p, int warps) {
    const int lane = threadIdx.x % 32, warp = place_of_warp();
    int all = 0;
#pragma unroll 4
    for (int request = lane; request < p.batch; request += 32) all += blocks_of(p, tokens_of(p, request));
    all = __reduce_add_sync(0xffffffffu, all);
    int each = quotient(all, p.by_warps), more = all - each * warps;
    if (each >= p.many) {
      warps /= 2;
      each *= 2;
      if (more >= warps) {
        ++each;
        more -= warps;
      }
    }
    blocks = warp < warps ? each + (warp < more) : 0;
    if (blocks == 0) return;
    int begin = each * warp + min(warp, more);
#pragma unroll 1
    for (int from = 0;; from += 32) {
      const int tokens = from + lane < p.batch ? tokens_of(p, from + lane) : 0;
      const int own = blocks_of(p, tokens);
      int up_to = own;
#pragma unroll
      for (int apart = 1; apart < 32; apart *= 2) {
        const int before = __shfl_up_sync(0xffffffffu, up_to, apart);
        if (lane >= apart) up_to += before;
      }
      const u32 behind = __ballot_sync(0xffffffffu, begin < up_to);
      if (behind != 0) {
        const int at = __ffs(behind) - 1;
        first.request = from + at;
        first.block = begin - __shfl_sync(0xffffffffu, up_to - own, at);
        first.tokens = __shfl_sync(0xffffffffu, tokens, at);
        first.blocks = __shfl_sync(0xffffffffu, own, at);
        return;
      }
      if (from + 32 >= p.batch) break;
      begin -= __shfl_sync(0xffffffffu, up_to, 31);
    }
    blocks = 0;  // lengths became smaller meanwhile
  }
};

// Copies keys into the ring of a warp, kKeys at a time, and says whose they are.
template <typename Layout>
struct Loader {
  static constexpr int kKeys = Layout::kKeys, kRow = Layout::kRow;
  static_assert(kKeys <= 32, "a lane copies a row");

  const BlockScoresFewParams& p;
  const Layout& shared;
  const int lane;
  BlockPlace at;
  int left;    // blocks
  int copies;  // stages until now
  int from;    // keys of the block that are copied
  int window;  // lane i has the page of block window + i
  int pages;

  // Where all blocks, visible or not, are no more than the warps, each has one, and its page does not wait for lengths.
  __device__ __forceinline__ Loader(const BlockScoresFewParams& p, const Layout& shared)
      : p(p), shared(shared), lane(threadIdx.x % 32), at(), left(0), copies(0), from(0), window(0), pages(-1) {
    if (!p.is_single) return;
    const int place = place_of_warp();
    at.request = quotient(place, p.by_width);
    at.block = place - at.request * p.width;
    if (at.request >= p.batch) return;
    window = at.block;
    pages = p.block_table[at.request * p.block_table_stride + quotient(at.block, p.by_blocks_per_page)];
    at.tokens = p.kv_lens[at.request * p.kv_lens_stride];
  }

  __device__ __forceinline__ void begin(int warps) {
    if (p.is_single) {
      at.tokens = tokens_in(p, at.tokens);
      at.blocks = blocks_of(p, at.tokens);
      left = at.block < at.blocks;
      return;
    }
    const Share share(p, warps);
    at = share.first;
    left = share.blocks;
    read_pages();
  }

  __device__ __forceinline__ void read_pages() {
    window = at.block;
    const int block = window + lane;
    pages = block < at.blocks ? p.block_table[at.request * p.block_table_stride + quotient(block, p.by_blocks_per_page)]
                              : -1;
  }

  __device__ __forceinline__ void copy(int stage) {
    if (left <= 0) return;
    ++copies;
    const int page = __shfl_sync(0xffffffffu, pages, at.block - window);
    const int there = min(p.block_size, at.tokens - at.block * p.block_size);  // keys of the block
    const bool exists = static_cast<u32>(page) < static_cast<u32>(p.num_pages);
    const int keys = exists ? min(there - from, kKeys) : 0;
    const int in_page = at.block - quotient(at.block, p.by_blocks_per_page) * p.blocks_per_page;
    const char* const source =
        p.keys + page * p.keys_stride_page + (in_page * p.block_size + from) * p.keys_stride_row;
    const bool is_dense = p.keys_stride_row == kRow;
    if (lane == 0) {
      store_shared_16(shared.place_of(stage), {static_cast<u32>(keys), static_cast<u32>(at.request),
                                               static_cast<u32>(at.block), static_cast<u32>(at.tokens)});
      mbarrier_arrive_expect_tx(shared.full(stage), keys * kRow);
      if (is_dense && keys > 0) copy_bulk_async(shared.stage(stage), source, keys * kRow, shared.full(stage));
    }
    __syncwarp();
    if (__builtin_expect(!is_dense && lane < keys, 0))
      copy_bulk_async(shared.stage(stage) + lane * kRow, source + lane * p.keys_stride_row, kRow, shared.full(stage));
    from += kKeys;
    if (from < there) return;
    from = 0;
    if (--left <= 0) return;
    const bool is_other = at.advance(p);
    if (at.request >= p.batch)
      left = 0;  // as above
    else if (is_other || at.block - window == 32)
      read_pages();
  }
};

}  // namespace cumla::blocks
