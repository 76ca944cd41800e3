// SPDX-License-Identifier: Apache-2.0
// What the first warp of block_attention does: it reads the list, and copies queries and the first chunks of all warps.
#pragma once
#include "blocks/block_attention/layout.cuh"
#include "blocks/lists.cuh"
#include "split/division.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

constexpr int kNoBlock = 0x7fffffff;

// The chunks of a list that a CTA has.
struct Chunks {
  int first, end;

  // All of them.
  __device__ __forceinline__ Chunks(int tokens, int tokens_of_chunk)
      : first(0), end((tokens + tokens_of_chunk - 1) / tokens_of_chunk) {}
  // Those of a CTA of a cluster.
  __device__ __forceinline__ Chunks(const BlockAttentionClusterParams& p, int tokens, int tokens_of_chunk, int rank)
      : Chunks(tokens, tokens_of_chunk) {
    const int each = quotient(end + p.cluster - 1, p.by_cluster);
    first = rank * each;
    end = min(first + each, end);
  }
};

// By one thread: the keys of a chunk, or its values.
template <typename Layout>
__device__ __forceinline__ void copy_half_async(const BlockAttentionParams& p, const Layout& shared, int warp,
                                                int stage, int chunk, bool are_values) {
  constexpr int kBoxes = Layout::kRow / 128, kColumns = 128 / Layout::kUnit;
  const int token = chunk * Layout::kChunk, block = quotient(token, p.by_block_size);
  const int page = load_shared_u32(shared.page(block)), row = token - block * p.block_size;
  const u32 to = shared.stage(warp, stage) + (are_values ? Layout::kKeyBytes : 0), full = shared.full(warp, stage);
  const TensorMap* const map = are_values ? &p.value_map : &p.key_map;
#pragma unroll
  for (int i = 0; i < kBoxes; ++i)
    tma_load_4d_async(to + i * Layout::kChunk * 128, map, full, i * kColumns, row, 0, page);
}

// By a warp: the factors of a chunk's tokens, 0 for those that are not there. It commits a group.
template <typename Layout>
__device__ __forceinline__ void copy_factors_async(const BlockAttentionFactorsParams& p, const Layout& shared, int head,
                                                   int warp, int stage, int chunk, int tokens) {
  const int first = chunk * Layout::kChunk, lane = threadIdx.x % 32;
  static_assert(Layout::kChunk == 32, "a lane copies the factors of a token");
  if (first < tokens) {
    const int block = quotient(first, p.by_block_size);
    const i64 begin = static_cast<i64>(load_shared_u32(shared.place_of_block(block))) * p.block_size;
    const i64 row = begin + (first - block * p.block_size + lane);
    const bool exists = first + lane < tokens;
    const auto from = [&](const RowFactors& of) {
      return exists ? of.data + head * of.stride_head + row * of.stride_row : of.data;
    };
    copy_4_async(shared.key_factors(warp, stage) + lane * 4, from(p.key_factors), exists);
    copy_4_async(shared.value_factors(warp, stage) + lane * 4, from(p.value_factors), exists);
  }
  copy_async_commit();
}

// By one thread.
template <typename Layout>
__device__ __forceinline__ void copy_chunk_async(const BlockAttentionParams& p, const Layout& shared, int warp,
                                                 int stage, int chunk) {
  mbarrier_arrive_expect_tx(shared.full(warp, stage), Layout::kStageBytes);
  copy_half_async(p, shared, warp, stage, chunk, false);
  copy_half_async(p, shared, warp, stage, chunk, true);
}

template <typename Layout>
__device__ __forceinline__ void copy_query_async(const BlockAttentionParams& p, const Layout& shared, int token,
                                                 int head) {
  constexpr int kOctets = kDecodeColumns / 8;
  const int request = quotient(token, p.by_tokens_apart), own = token - request * p.tokens_apart;
  const int lane = threadIdx.x % 32, octet = lane % kOctets;
  const char* from = p.q + request * p.q_stride_batch + own * p.q_stride_token +
                     (static_cast<i64>(head) * p.heads_per_group + lane / kOctets) * p.q_stride_head + octet * 16;
#pragma unroll
  for (int row = lane / kOctets; row < kDecodeRows; row += 32 / kOctets, from += 32 / kOctets * p.q_stride_head) {
    const bool exists = row < p.heads_per_group && octet * 8 < p.key_columns;
    copy_16_async(shared.query() + Layout::query_place(row, octet), exists ? from : p.q, exists);
  }
  copy_async_commit();
}

// The tokens of so many blocks of a list, if the last one that the query sees is among them or not.
__device__ __forceinline__ int tokens_of(const BlockAttentionParams& p, const List& list, int found, bool has_last) {
  const int missing = has_last ? p.block_size - (list.seen - (list.blocks - 1) * p.block_size) : 0;
  return found * p.block_size - missing;
}

// Stores where a block lies that has so many before it.
template <typename Layout>
__device__ __forceinline__ void store_page(const BlockAttentionParams& p, const Layout& shared, const List& list,
                                           int before, const Listed& listed) {
  store_shared_u32(shared.page(before), list.virtual_page(p, listed));
  if constexpr (Layout::kFactors) {
    const int in_page = listed.block - quotient(listed.block, p.by_blocks_per_page) * p.blocks_per_page;
    store_shared_u32(shared.place_of_block(before), listed.page * p.blocks_per_page + in_page);
  }
}

// How many lanes, of so many as entries, have a lower block; `repeats`: a lane before has the same.
__device__ __forceinline__ int lower_blocks(const BlockAttentionParams& p, int block, bool& repeats) {
  const int lane = threadIdx.x % 32;
  int lower = 0;
#pragma unroll 1
  for (int at = 0; at < p.topk; at += 8)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int other = __shfl_sync(0xffffffffu, block, at + i);
      lower += other < block;
      repeats |= other == block && at + i < lane;
    }
  return lower;
}

// Puts the pages of a list of up to 32 entries in ascending order of its blocks, each once, and returns their tokens.
// `entry` is the lane's, or negative.
template <typename Layout>
__device__ __forceinline__ int put_few_pages(const BlockAttentionParams& p, const Layout& shared, const List& list,
                                             i64 entry) {
  // Blocks are put in order while their pages are loaded.
  Listed own = {list.block_of(p, entry), -1};
  if (own.block >= 0) own.page = list.page_of(p, own.block);
  int block = own.block < 0 ? kNoBlock : own.block;
  bool repeats = false;
  int lower = lower_blocks(p, block, repeats);
  const bool counts = block != kNoBlock && !repeats && static_cast<u32>(own.page) < static_cast<u32>(p.num_pages);
  if (__any_sync(0xffffffffu, counts != (block != kNoBlock))) {
    if (!counts) block = kNoBlock;
    lower = lower_blocks(p, block, repeats);
  }
  if (block != kNoBlock) store_page(p, shared, list, lower, own);
  const int found = __popc(__ballot_sync(0xffffffffu, block != kNoBlock));
  return tokens_of(p, list, found, __any_sync(0xffffffffu, block == list.blocks - 1));
}

// The same for lists of any length.
struct PagesInOrder {
  static constexpr int kEach = kDecodeEntries / 32;  // entries of a lane
  const int lane = threadIdx.x % 32;
  i64 entries[kEach];
  Listed own[kEach];

  __device__ __forceinline__ PagesInOrder(const BlockAttentionParams& p, const List& list) {
#pragma unroll
    for (int s = 0; s < kEach; ++s) {
      if (32 * s >= p.topk) break;
      entries[s] = 32 * s + lane < list.count ? list.entry_at(p, 32 * s + lane) : -1;
    }
  }

  template <typename Layout>
  __device__ __forceinline__ int put(const BlockAttentionParams& p, const Layout& shared, const List& list) {
#pragma unroll
    for (int s = 0; s < kEach; ++s) {
      if (32 * s >= p.topk) break;
      own[s] = list.named(p, entries[s]);
    }
    bool has_last = false;
    int found = 0;
#pragma unroll
    for (int s = 0; s < kEach; ++s) {
      if (32 * s >= p.topk) break;
      store_shared_u32(shared.block(32 * s + lane), own[s].block < 0 ? kNoBlock : own[s].block);
      has_last |= own[s].block == list.blocks - 1 && own[s].block >= 0;
    }
    __syncwarp();
    bool repeats = false;
#pragma unroll
    for (int s = 0; s < kEach; ++s) {
      if (32 * s >= p.topk) break;
      int lower = 0;
      bool is_first = own[s].block >= 0;
#pragma unroll 1
      for (int at = 0; at < p.topk; at += 4) {
        const uint4 v = load_shared_16(shared.block(at));
        const int blocks[4] = {static_cast<int>(v.x), static_cast<int>(v.y), static_cast<int>(v.z),
                               static_cast<int>(v.w)};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          lower += blocks[i] < own[s].block;
          is_first &= blocks[i] != own[s].block || at + i >= 32 * s + lane;
        }
      }
      repeats |= own[s].block >= 0 && !is_first;
      if (!is_first) own[s].block = -1;
      found += __popc(__ballot_sync(0xffffffffu, is_first));
      if (is_first) store_page(p, shared, list, lower, own[s]);
    }
    if (__any_sync(0xffffffffu, repeats)) put_without_repeats(p, shared, list);
    has_last = __any_sync(0xffffffffu, has_last);
    return tokens_of(p, list, found, has_last);
  }

  // Repeated blocks do not count.
  template <typename Layout>
  __device__ __forceinline__ void put_without_repeats(const BlockAttentionParams& p, const Layout& shared,
                                                      const List& list) {
    __syncwarp();
#pragma unroll
    for (int s = 0; s < kEach; ++s) {
      if (32 * s >= p.topk) break;
      store_shared_u32(shared.block(32 * s + lane), own[s].block < 0 ? kNoBlock : own[s].block);
    }
    __syncwarp();
#pragma unroll
    for (int s = 0; s < kEach; ++s) {
      if (32 * s >= p.topk) break;
      int lower = 0;
#pragma unroll 1
      for (int at = 0; at < p.topk; ++at)
        lower += static_cast<int>(load_shared_u32(shared.block(at))) < own[s].block;
      if (own[s].block >= 0) store_page(p, shared, list, lower, own[s]);
    }
  }
};

// By a warp: the first chunks of its ring.
template <typename Layout>
__device__ __forceinline__ void copy_first_chunks_async(const BlockAttentionParams& p, const Layout& shared, int warp,
                                                        const Chunks& chunks) {
  const int lane = threadIdx.x % 32, stage = lane / 2, chunk = chunks.first + warp + stage * Layout::kWarps;
  const bool copies = stage < Layout::kStages && chunk < chunks.end, are_values = lane % 2 != 0;
  if (copies && !are_values) mbarrier_arrive_expect_tx(shared.full(warp, stage), Layout::kStageBytes);
  __syncwarp();
  if (copies) copy_half_async(p, shared, warp, stage, chunk, are_values);
}

template <typename Layout>
__device__ __forceinline__ void begin_barriers(const Layout& shared) {
  const int lane = threadIdx.x % 32;
  if (lane < Layout::kWarps * Layout::kStages) {
    mbarrier_init(shared.full(lane % Layout::kWarps, lane / Layout::kWarps), 1);
    fence_mbarrier_init();
    fence_proxy_async_shared();
  }
}

// By a warp.
template <typename Layout>
__device__ __forceinline__ void load_list(const BlockAttentionParams& p, const Layout& shared, int token, int head) {
  const int lane = threadIdx.x % 32;
  List list;
  const FirstEntry first(p, list, token, head);
  token = copy_of(token);  // else ptxas computes addresses of the query before these loads
  head = copy_of(head);
  list.count = count_of(p, token, head);
  copy_query_async(p, shared, token, head);
  list.find(p, first.row);
  list.count = min(max(list.count, 0), p.topk);
  const float of_keys = p.key_scale.of(list.request, head), of_values = p.value_scale.of(list.request, head);
  int tokens;
  if (p.topk <= 32) {
    const i64 entry = first.value(p);
    tokens = put_few_pages(p, shared, list, lane < list.count ? entry : -1);
  } else {
    tokens = PagesInOrder(p, list).put(p, shared, list);
  }
  if (lane == 0) {
    store_shared_u32(shared.known(0), tokens);
    store_shared_float(shared.known(1), of_keys);
    store_shared_float(shared.known(2), of_values);
  }
  copy_async_wait<0>();
}

}  // namespace cumla::blocks
