// SPDX-License-Identifier: Apache-2.0
// Lists of blocks: what an entry names, and the ascending order of the blocks of several lists.
#pragma once
#include "blocks/rows.cuh"
#include "split/division.cuh"
#include "split/plan.cuh"
#include "split/scan.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

using namespace split;

constexpr int kListThreads = 128;
constexpr int kListWarps = kListThreads / 32;
constexpr int kWindowWords = 2048;          // of the bitmap
constexpr int kWindow = kWindowWords * 32;  // blocks

// Strides are in bytes.
struct ListsParams {
  const BlockRow* rows;  // [tokens]
  const char* entries;   // of the lists
  i64 entries_stride_token, entries_stride_head, entries_stride_entry;
  const char* lengths;   // of the lists, int32; null: all entries count
  i64 lengths_stride_token, lengths_stride_head;
  const int* block_table;
  i64 block_table_stride;  // in elements
  int* pages_out;          // virtual pages
  int kv_heads;
  int topk;
  int batch;      // rows of the block table
  int max_pages;  // columns
  int num_pages;
  int page_size;
  int block_size;
  int blocks_per_page;
  int page_step, block_step, head_step;  // of virtual pages
  int entries_are_wide;                  // 64 bits
  Divisor by_kv_heads, by_block_size, by_blocks_per_page;
  Divisor by_entry;  // entries are tokens: the block size; else 1
};

// A block of a list, and its page; both are -1 if the query sees no such block, or the cache has no such page.
struct Listed {
  int block, page;
};

// The list of a query token and kv head.
struct List {
  int head, request;
  int seen, blocks;  // tokens that the query sees, and blocks that hold them
  const char* entries;
  int count;  // entries

  List() = default;
  __device__ __forceinline__ List(const ListsParams& p, int token, int head) : head(head) {
    entries = p.entries + token * p.entries_stride_token + head * p.entries_stride_head;
    const BlockRow row = p.rows[token];
    count = p.topk;
    if (p.lengths != nullptr) {
      const char* const at = p.lengths + token * p.lengths_stride_token + head * p.lengths_stride_head;
      count = min(max(*reinterpret_cast<const int*>(at), 0), p.topk);
    }
    find(p, row);
  }

  // Reads the request of a row and the tokens that it sees.
  __device__ __forceinline__ void find(const ListsParams& p, const BlockRow& row) {
    request = row.request;
    const i64 held = static_cast<i64>(p.max_pages) * p.page_size;
    seen = request < p.batch ? row.seen(static_cast<int>(min(held, static_cast<i64>(kMaxTokens)))) : 0;
    blocks = seen > 0 ? quotient(seen - 1, p.by_block_size) + 1 : 0;
  }

  __device__ __forceinline__ i64 entry_at(const ListsParams& p, int i) const {
    const char* const at = entries + i * p.entries_stride_entry;
    return p.entries_are_wide ? *reinterpret_cast<const i64*>(at) : *reinterpret_cast<const i32*>(at);
  }

  // The block that an entry names, if the query sees it, or -1.
  __device__ __forceinline__ int block_of(const ListsParams& p, i64 entry) const {
    if (entry < 0 || entry > 0x7fffffff) return -1;
    const int block = quotient(static_cast<u32>(entry), p.by_entry);
    return block < blocks ? block : -1;
  }

  __device__ __forceinline__ int page_of(const ListsParams& p, int block) const {
    return p.block_table[request * p.block_table_stride + quotient(block, p.by_blocks_per_page)];
  }

  // The block that an entry names, and its page.
  __device__ __forceinline__ Listed named(const ListsParams& p, i64 entry) const {
    const Listed none = {-1, -1};
    if (entry < 0 || entry > 0x7fffffff) return none;
    const int block = quotient(static_cast<u32>(entry), p.by_entry);
    if (block >= blocks) return none;
    const int page = page_of(p, block);
    return static_cast<u32>(page) < static_cast<u32>(p.num_pages) ? Listed{block, page} : none;
  }

  __device__ __forceinline__ int virtual_page(const ListsParams& p, const Listed& listed) const {
    const int in_page = listed.block - quotient(listed.block, p.by_blocks_per_page) * p.blocks_per_page;
    return listed.page * p.page_step + in_page * p.block_step + head * p.head_step;
  }
};

// The first loads of the list of a query token and kv head, all at once: the row of the token, and a lane's entry.
struct FirstEntry {
  BlockRow row;
  u32 low, high = 0;

  __device__ __forceinline__ FirstEntry(const ListsParams& p, List& list, int token, int head) {
    const int lane = threadIdx.x % 32;
    list.head = head;
    list.entries = p.entries + token * p.entries_stride_token + head * p.entries_stride_head;
    row = p.rows[token];
    const char* const at = list.entries + min(lane, p.topk - 1) * p.entries_stride_entry;
    low = *reinterpret_cast<const u32*>(at);
    if (p.entries_are_wide) high = *reinterpret_cast<const u32*>(at + 4);
    __syncwarp();  // these loads first; nothing waits for them before the others are on their way
  }
  __device__ __forceinline__ i64 value(const ListsParams& p) const {
    return p.entries_are_wide ? static_cast<i64>(static_cast<u64>(high) << 32 | low) : static_cast<i32>(low);
  }
};

// Entries of a list that count, as they are stored.
__device__ __forceinline__ int count_of(const ListsParams& p, int token, int head) {
  int count = p.topk;
  if (p.lengths != nullptr)
    count = *reinterpret_cast<const int*>(p.lengths + token * p.lengths_stride_token + head * p.lengths_stride_head);
  return count;
}

struct ListShared {
  u32 words[kWindowWords];
  int before[kWindowWords];  // bits of the words before each one
  int warp_sums[kListWarps];
};

// The sum of a value over the threads before this one; `total` is that of all.
__device__ __forceinline__ int exclusive_sum(ListShared& shared, int value, int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, inclusive = warp_inclusive_sum(value);
  if (lane == 31) shared.warp_sums[warp] = inclusive;
  __syncthreads();
  int before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < kListWarps; ++w) {
    before += w < warp ? shared.warp_sums[w] : 0;
    total += shared.warp_sums[w];
  }
  return before + inclusive - value;
}

// Puts the blocks that a CTA's threads name into ascending order, each once, and returns how many there are, up to
// `most`. A window of the first `blocks` is ordered at a time. Each thread calls
//   for_each(f)              which calls f(named) for each of its entries; named.block is -1 if it names none
//   prepare(first, count)    before the places first ... first + count - 1 are put
//   put(named, place)        entries of the same block have the same place
//   leave(begin)             while the bitmap has the window that begins with a block
// The first words of the bitmap, one per thread, are clear.
template <typename ForEach, typename Prepare, typename Put, typename Leave>
__device__ __forceinline__ int put_in_order(ListShared& shared, int blocks, int most, ForEach for_each,
                                            Prepare prepare, Put put, Leave leave) {
  int found = 0;
  for (int begin = 0; begin < blocks; begin += kWindow) {
    const int words = (min(blocks - begin, kWindow) + 31) / 32, later = begin > 0 ? 0 : kListThreads;
    for (int i = later + threadIdx.x; i < words; i += kListThreads) shared.words[i] = 0;
    __syncthreads();
    for_each([&](const auto& named) {
      const int bit = named.block - begin;
      if (bit >= 0 && bit < kWindow) atomicOr(&shared.words[bit / 32], 1u << bit % 32);
    });
    __syncthreads();
    const int each = (words + kListThreads - 1) / kListThreads;
    const int first = min(static_cast<int>(threadIdx.x) * each, words), end = min(first + each, words);
    int sum = 0, all;
    for (int i = first; i < end; ++i) sum += __popc(shared.words[i]);
    int before = found + exclusive_sum(shared, sum, all);
    for (int i = first; i < end; ++i) {
      shared.before[i] = before;
      before += __popc(shared.words[i]);
    }
    prepare(found, min(all, most - found));
    __syncthreads();
    // A list that changes meanwhile may name more blocks.
    for_each([&](const auto& named) {
      const int bit = named.block - begin;
      if (bit < 0 || bit >= kWindow) return;
      const int at = shared.before[bit / 32] + __popc(shared.words[bit / 32] & ((1u << bit % 32) - 1));
      if (at < most) put(named, at);
    });
    found = min(found + all, most);
    leave(begin);
    if (begin + kWindow < blocks) __syncthreads();  // the bitmap is free
  }
  return found;
}

}  // namespace cumla::blocks
