// SPDX-License-Identifier: Apache-2.0
// Loads of block_attention_gathered: the list, the query and chunks of rows that lie in many blocks.
#pragma once
#include "blocks/block_attention/load.cuh"
#include "blocks/block_attention_gathered/layout.cuh"
#include "blocks/lists.cuh"
#include "split/division.cuh"
#include "ptx/copy.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

// By all threads.
template <typename Layout>
__device__ __forceinline__ void copy_query_rows_async(const BlockAttentionParams& p, const Layout& shared, int token,
                                                      int head) {
  constexpr int kOctets = Layout::kColumns / 8;
  const int request = quotient(token, p.by_tokens_apart), own = token - request * p.tokens_apart;
  const char* const from = p.q + request * p.q_stride_batch + own * p.q_stride_token +
                           static_cast<i64>(head) * p.heads_per_group * p.q_stride_head;
#pragma unroll
  for (int i = threadIdx.x; i < kDecodeRows * kOctets; i += 32 * Layout::kWarps) {
    const int row = i / kOctets, octet = i % kOctets;
    const bool exists = row < p.heads_per_group && octet * 8 < p.key_columns;
    copy_16_async(shared.query() + Layout::query_place(row, octet),
                  exists ? from + row * p.q_stride_head + octet * 16 : p.q, exists);
  }
  copy_async_commit();
}

// Puts the pages of a list in ascending order of its blocks, each once, and returns their tokens. By all threads; the
// last of its barriers makes the memory of the chunks free.
template <typename Layout>
__device__ __forceinline__ int load_gathered_list(const BlockAttentionGatheredParams& p, const Layout& shared,
                                                  ListShared& scratch, int token, int head) {
  constexpr int kThreads = 32 * Layout::kWarps, kEach = kGatherEntries / kThreads;
  static_assert(kThreads == kListThreads, "they put blocks in order");
  const List list(p, token, head);
  i64 entries[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = threadIdx.x + i * kThreads;
    entries[i] = at < list.count ? list.entry_at(p, at) : -1;
  }
  Listed own[kEach];
  bool has_last = false;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    own[i] = list.named(p, entries[i]);
    has_last |= own[i].block >= 0 && own[i].block == list.blocks - 1;
  }
  scratch.words[threadIdx.x] = 0;
  const auto for_each = [&](auto f) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) f(own[i]);
  };
  const auto put = [&](const Listed& listed, int at) {
    store_shared_u32(shared.page(at), list.virtual_page(p, listed));
  };
  const int found = put_in_order(scratch, list.blocks, p.topk, for_each, [](int, int) {}, put, [](int) {});
  copy_async_wait<0>();  // the query
  return tokens_of(p, list, found, __syncthreads_or(has_last) != 0);
}

// By a warp, which waits for them by groups of its copies. Rows from `tokens` on are zeros.
template <typename Layout>
__device__ __forceinline__ void copy_rows_async(const BlockAttentionGatheredParams& p, const Layout& shared, u32 to,
                                                int chunk, int tokens) {
  constexpr int kOctets = Layout::kRow / 16, kAll = Layout::kChunk * kOctets;
  const int lane = threadIdx.x % 32, first = chunk * Layout::kChunk, last = max(tokens - 1 - first, 0);
  // Lane i has the place of row i.
  const int token = first + min(lane, last), block = quotient(token, p.by_block_size);
  const i64 page = static_cast<int>(load_shared_u32(shared.page(block)));
  const i64 row = token - block * p.block_size;
  const i64 of_key = page * p.keys.stride_page + row * p.keys.stride_row;
  const i64 of_value = page * p.values.stride_page + row * p.values.stride_row;
#pragma unroll
  for (int begin = 0; begin < kAll; begin += 32) {
    const int i = begin + lane, own = i / kOctets, octet = i % kOctets;
    const i64 from_key = __shfl_sync(0xffffffffu, of_key, own), from_value = __shfl_sync(0xffffffffu, of_value, own);
    const int number = octet * 16 / Layout::kUnit;
    const bool has_key = own <= last && number < p.key_columns, has_value = own <= last && number < p.value_columns;
    const u32 place = to + Layout::place(own, octet);
    copy_16_async(place, has_key ? p.keys.data + from_key + octet * 16 : p.keys.data, has_key);
    copy_16_async(place + Layout::kKeyBytes, has_value ? p.values.data + from_value + octet * 16 : p.values.data,
                  has_value);
  }
}

}  // namespace cumla::blocks
