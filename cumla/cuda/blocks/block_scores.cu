// SPDX-License-Identifier: Apache-2.0
// Scores of blocks: the largest product of a query row with the visible keys of each block.
//
// A CTA has up to 32 query rows (query tokens x heads), and a range of blocks; one key head serves all heads. A warp
// has a block at a time, and 16 of its keys at once: keys are the M side of mma.sync products, query rows the N side.
// Products add up all columns, so both sides may have these in any other order: a lane loads 16 neighbouring bytes of
// a key row from global memory to registers, and the same columns of query rows from shared memory.
//
// grid = (tiles of query tokens, ranges of blocks), 256 threads.
//
// Roles and time line:
//   all      copy query rows to shared memory, e4m3 as float16 | what each sees | B
//   a warp   for each request of the tile, for each of its blocks:
//            load the next 16 keys, maybe of the next block | products, maxima | ... | maxima over lanes | store
// Barriers: one __syncthreads, B, guards the query rows. There are no mbarriers.
// Budget: 128 registers per thread; shared memory for 32 query rows, 19 KB with 256 columns.
#include "blocks/block_scores/products.cuh"
#include "blocks/rows.cuh"
#include "split/division.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

using namespace ptx;
using namespace split;

// Strides are in bytes, those of the table and of out in elements.
struct BlockScoresParams {
  const BlockRow* rows;  // [total_tokens]
  const char* q;
  i64 q_stride_batch, q_stride_token, q_stride_head;
  const char* keys;  // [num_pages, page_size, columns]
  i64 keys_stride_page, keys_stride_row;
  const int* block_table;
  i64 block_table_stride;
  float* out;  // [total_tokens, heads, width]
  i64 out_stride_token, out_stride_head;
  int total_tokens;
  int tile_tokens;  // of a CTA
  int heads;
  int width;        // blocks
  int warp_blocks;  // of a warp
  int batch;        // rows of the block table
  int max_pages;    // columns
  int num_pages;
  int page_size;
  int block_size;
  int blocks_per_page;
  int q_len;        // tokens of a request, where q has an axis of requests, else 0
  Divisor by_heads, by_blocks_per_page, by_q_len;
};

template <int kColumns>
struct ScoreShared {
  alignas(16) unsigned char query[kScoreRows * kQueryPitch<kColumns>];
  int requests[kScoreRows], seen[kScoreRows];  // of query tokens
};

// 16 keys in registers: lane 4 g + c has 16 bytes of rows g and g + 8 for each 64 bytes.
template <int kBytes>
struct Keys {
  static constexpr int kLoads = kBytes / 64;
  uint4 words[2][kLoads];

  __device__ __forceinline__ void load(const char* base, i64 stride_row, int rows) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = min(lane / 4 + 8 * r, rows - 1);
      const char* const at = base + row * stride_row + lane % 4 * 16;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) words[r][i] = load_global_16(reinterpret_cast<const uint4*>(at + i * 64));
    }
  }
};

template <typename T, bool kE4m3, int kColumns>
struct Scorer {
  static constexpr int kUnit = kE4m3 ? 1 : 2, kBytes = kColumns * kUnit;
  static constexpr int kTiles = kScoreRows / 8;
  using Shared = ScoreShared<kColumns>;

  const BlockScoresParams& p;
  Shared& shared;
  const int first_token, rows, lane;

  __device__ __forceinline__ Scorer(const BlockScoresParams& p, Shared& shared)
      : p(p), shared(shared), first_token(blockIdx.x * p.tile_tokens),
        rows(min(p.tile_tokens, p.total_tokens - first_token) * p.heads), lane(threadIdx.x % 32) {}

  __device__ __forceinline__ int token_of(int row) const { return quotient(row, p.by_heads); }

  __device__ __forceinline__ void load_query() const {
    constexpr int kOctets = kColumns / 8;
    for (int i = threadIdx.x; i < kScoreRows * kOctets; i += kScoreThreads) {
      const int row = i / kOctets, octet = i % kOctets, token = token_of(row);
      uint4 words = {};
      if (row < rows) {
        const int request = quotient(first_token + token, p.by_q_len);  // 0 if q_len is 0
        const char* const at = p.q + request * p.q_stride_batch +
                               (first_token + token - request * p.q_len) * p.q_stride_token +
                               (row - token * p.heads) * p.q_stride_head + octet * 8 * kUnit;
        if constexpr (kE4m3) {
          const uint2 bytes = *reinterpret_cast<const uint2*>(at);
          expand_e4m3x4(bytes.x, words.x, words.y);
          expand_e4m3x4(bytes.y, words.z, words.w);
        } else {
          words = *reinterpret_cast<const uint4*>(at);
        }
      }
      *reinterpret_cast<uint4*>(shared.query + row * kQueryPitch<kColumns> + octet * 16) = words;
    }
    if (threadIdx.x < kScoreRows) {
      const int row = threadIdx.x;
      BlockRow of = {-1, 0, 0, 0};
      if (row < rows) of = p.rows[first_token + token_of(row)];
      const i64 held = static_cast<i64>(p.max_pages) * p.page_size;
      const bool exists = of.request >= 0 && of.request < p.batch;
      shared.requests[row] = exists ? of.request : -1;
      shared.seen[row] = exists ? of.seen(static_cast<int>(min(held, static_cast<i64>(kMaxTokens)))) : 0;
    }
  }

  // The page of a block of a request; -1 if no query row sees the block, or there is no such page.
  __device__ __forceinline__ int page_of(int request, int most_seen, int block, int blocks) const {
    if (block >= blocks || block * p.block_size >= most_seen) return -1;
    return p.block_table[request * p.block_table_stride + quotient(block, p.by_blocks_per_page)];
  }

  // Keys of a block that some query row sees, and where they lie.
  struct Block {
    const char* base;
    int keys;
  };
  __device__ __forceinline__ Block block_at(int most_seen, int block, int page) const {
    if (static_cast<u32>(page) >= static_cast<u32>(p.num_pages)) return {p.keys, 0};
    const int in_page = block - quotient(block, p.by_blocks_per_page) * p.blocks_per_page;
    return {p.keys + page * p.keys_stride_page + in_page * p.block_size * p.keys_stride_row,
            min(p.block_size, most_seen - block * p.block_size)};
  }

  // The largest products of eight query rows: lane 4 g + q has those of rows 2 q and 2 q + 1 with some keys.
  using Maxima = float[kTiles][2];

  __device__ __forceinline__ void raise(Maxima& most, const Keys<kBytes>& keys, int begin, int end, int key) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (t * 8 >= end || t * 8 + 8 <= begin) continue;
      float score[4];
      multiply_keys<T, kE4m3, kColumns>(keys.words, shared.query + t * 8 * kQueryPitch<kColumns>, lane, score);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int seen = shared.seen[t * 8 + lane % 4 * 2 + j];
        if (key < seen) most[t][j] = larger(most[t][j], score[j]);
        if (key + 8 < seen) most[t][j] = larger(most[t][j], score[2 + j]);
      }
    }
  }

  __device__ __forceinline__ void store(Maxima& most, int begin, int end, int block) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (t * 8 >= end || t * 8 + 8 <= begin) continue;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& value = most[t][j];
#pragma unroll
        for (int apart = 4; apart < 32; apart *= 2) value = larger(value, __shfl_xor_sync(0xffffffffu, value, apart));
        const int row = t * 8 + lane % 4 * 2 + j;
        if (lane / 4 != 0 || row < begin || row >= end) continue;
        const int token = token_of(row);
        p.out[(first_token + token) * p.out_stride_token + (row - token * p.heads) * p.out_stride_head + block] = value;
      }
    }
  }

  // Scores a warp's blocks for the query rows [begin, end), which are of one request. Keys come 16 ahead, those of the
  // next block as well, and the page of the block after it.
  __device__ __forceinline__ void score_blocks(int request, int begin, int end, int most_seen) const {
    const int first = blockIdx.y * p.warp_blocks * kScoreWarps;
    const int blocks = min(first + p.warp_blocks * kScoreWarps, p.width);
    int block = first + threadIdx.x / 32;
    int page = page_of(request, most_seen, block, blocks);
    int later = page_of(request, most_seen, block + kScoreWarps, blocks);
    Block at = block_at(most_seen, block, page);
    Keys<kBytes> keys, next;
    if (at.keys > 0) keys.load(at.base, p.keys_stride_row, at.keys);
#pragma unroll 1
    for (; block < blocks; block += kScoreWarps) {
      Maxima most;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) most[t][0] = most[t][1] = -kInfinity;
      const Block after = block_at(most_seen, block + kScoreWarps, later);
      later = page_of(request, most_seen, block + 2 * kScoreWarps, blocks);
#pragma unroll 1
      for (int from = 0; from < at.keys; from += kKeysAtOnce) {
        const int left = at.keys - from - kKeysAtOnce;
        const char* const source = left > 0 ? at.base + (from + kKeysAtOnce) * p.keys_stride_row : after.base;
        const int there = left > 0 ? left : after.keys;
        if (there > 0) next.load(source, p.keys_stride_row, there);
        raise(most, keys, begin, end, block * p.block_size + from + lane / 4);
        if (there > 0) keys = next;
      }
      if (at.keys <= 0 && after.keys > 0) keys.load(after.base, p.keys_stride_row, after.keys);
      store(most, begin, end, block);
      at = after;
    }
  }

  __device__ __forceinline__ void score() const {
    for (int begin = 0, end; begin < rows; begin = end) {
      const int request = shared.requests[begin];
      int most_seen = shared.seen[begin];
      for (end = begin + 1; end < rows && shared.requests[end] == request; ++end)
        most_seen = max(most_seen, shared.seen[end]);
      score_blocks(request, begin, end, most_seen);
    }
  }
};

template <typename T, bool kE4m3, int kColumns>
__device__ __forceinline__ void block_scores(const BlockScoresParams& p) {
  __shared__ ScoreShared<kColumns> shared;
  grid_dependency_launch();
  grid_dependency_wait();
  const Scorer<T, kE4m3, kColumns> scorer(p, shared);
  scorer.load_query();
  __syncthreads();
  scorer.score();
}

}  // namespace cumla::blocks
