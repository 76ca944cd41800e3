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

// A thread's entries of a list, and their pages: the loads of each kind are all on their way before one is waited for.
// Signs are extended, and pages compared, behind the loads, since ptxas would wait for each load.
struct GatheredEntries {
  static constexpr int kEach = kGatherEntries / kListThreads;
  u32 low[kEach], high[kEach];
  Listed own[kEach];

  __device__ __forceinline__ GatheredEntries(const ListsParams& p, int token, int head) {
    const char* const entries = p.entries + token * p.entries_stride_token + head * p.entries_stride_head;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const char* const at = entries + min(place(i), p.topk - 1) * p.entries_stride_entry;
      low[i] = *reinterpret_cast<const u32*>(at);
      high[i] = p.entries_are_wide ? *reinterpret_cast<const u32*>(at + 4) : 0;
    }
  }
  __device__ __forceinline__ static int place(int i) { return threadIdx.x + i * kListThreads; }

  __device__ __forceinline__ void name(const ListsParams& p, const List& list) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const i64 entry = p.entries_are_wide ? static_cast<i64>(static_cast<u64>(high[i]) << 32 | low[i])
                                           : static_cast<i32>(low[i]);
      own[i].block = place(i) < list.count ? list.block_of(p, entry) : -1;
      own[i].page = -1;
      if (own[i].block >= 0) own[i].page = list.page_of(p, own[i].block);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (static_cast<u32>(own[i].page) >= static_cast<u32>(p.num_pages)) own[i].block = -1;
  }
};

// Puts the pages of a list in ascending order of its blocks, each once, and returns their tokens. By all threads; the
// last of its barriers makes the memory of the chunks free.
template <typename Layout>
__device__ __forceinline__ int load_gathered_list(const BlockAttentionGatheredParams& p, const Layout& shared,
                                                  ListShared& scratch, int token, int head, int& request) {
  static_assert(32 * Layout::kWarps == kListThreads, "they put blocks in order");
  GatheredEntries entries(p, token, head);
  const List list(p, token, head);
  request = list.request;
  copy_query_rows_async(p, shared, token, head);
  entries.name(p, list);
  bool has_last = false;
#pragma unroll
  for (const Listed& own : entries.own) has_last |= own.block >= 0 && own.block == list.blocks - 1;
  scratch.words[threadIdx.x] = 0;
  const auto for_each = [&](auto f) {
#pragma unroll
    for (const Listed& own : entries.own) f(own);
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
  constexpr int kOctets = Layout::kRow / 16, kSegment = kOctets % 8 == 0 ? 8 : 4;  // of a row, at once
  const int lane = threadIdx.x % 32, first = chunk * Layout::kChunk, last = max(tokens - 1 - first, 0);
  // Lane i has the place of row i.
  const int token = first + min(lane, last), block = quotient(token, p.by_block_size);
  const i64 page = static_cast<int>(load_shared_u32(shared.page(block)));
  const i64 row = token - block * p.block_size;
  const i64 of_key = page * p.keys.stride_page + row * p.keys.stride_row;
  const i64 of_value = page * p.values.stride_page + row * p.values.stride_row;
#pragma unroll 1
  for (int own = lane / kSegment; own < Layout::kChunk; own += 32 / kSegment) {
    const char* const key = p.keys.data + __shfl_sync(0xffffffffu, of_key, own);
    const char* const value = p.values.data + __shfl_sync(0xffffffffu, of_value, own);
#pragma unroll
    for (int begin = 0; begin < kOctets; begin += kSegment) {
      const int octet = begin + lane % kSegment, number = octet * 16 / Layout::kUnit;
      const bool has_key = number < p.key_columns, has_value = number < p.value_columns;
      const u32 place = to + Layout::place(own, octet);
      copy_16_async(place, key + (has_key ? octet * 16 : 0), own <= last && has_key);
      copy_16_async(place + Layout::kKeyBytes, value + (has_value ? octet * 16 : 0), own <= last && has_value);
    }
  }
}

}  // namespace cumla::blocks
