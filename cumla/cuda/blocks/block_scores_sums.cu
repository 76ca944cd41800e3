// SPDX-License-Identifier: Apache-2.0
// Scores of blocks, as block_scores.cu, of groups of heads: the largest sum over heads of products with a key of the
// block, maybe weighted and without negative products. A block has one key (keys are pooled) or a multiple of 16, and
// the blocks are all of a request or those of a list.
//
// A CTA has up to 32 query rows (query tokens x groups x heads of a group, up to a power of two), and a range of items:
// a block of 16 and more keys, or 16 blocks of one key. A warp has an item at a time, and 16 of its keys at once, which
// are the M side of mma.sync products. A lane has keys g and g + 8 of the 16, and looks up where they lie by itself.
// Prompts over pooled keys have a form with 64 query rows, up to four heads of 16 groups: a lane has all heads of a
// group, so no sum takes a shuffle.
//
// grid = (tiles of query tokens, ranges of items, tiles of groups), 256 threads.
//
// Roles and time line:
//   all      copy query rows to shared memory, e4m3 as float16 | weights, what each sees, where it stores | B
//   a warp   for each request of the tile, for all keys of its items, 16 at a time:
//            entries of lists and page numbers two steps ahead | keys one ahead | products, sums over heads |
//            maxima over lanes and store, where an item ends
//   all      store -inf for blocks that no query row of a request sees
// Barriers: one __syncthreads, B, guards what is in shared memory. There are no mbarriers.
// Budget: 80 registers per thread up to 128 columns of e4m3, 128 up to 128 columns of 16 bits and 256 of e4m3, else
// 188; shared memory for 32 query rows, 19 KB with 256 columns.
#include "blocks/block_scores/products.cuh"
#include "blocks/block_scores_sums/params.cuh"
#include "blocks/rows.cuh"
#include "split/division.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

using namespace ptx;
using namespace split;

constexpr int kPromptRows = 64;  // query rows of a CTA, for prompts
constexpr int kPromptHeads = 4;  // of a group, at most
constexpr int kPromptUnits = kPromptRows / kPromptHeads;

template <int kColumns, int kRows>
struct SumsShared {
  alignas(16) unsigned char query[kRows * kQueryPitch<kColumns>];
  float weights[kRows];
  i64 places[kRows];                 // of a group's first row: in out; -1: there is no such group
  int requests[kRows], seen[kRows];  // of query rows: their request, and the keys that they see
};

constexpr int kNoKey = 0x7fffffff;

template <typename T, bool kE4m3, int kColumns, bool kPrompts>
struct SumScorer {
  static constexpr int kUnit = kE4m3 ? 1 : 2, kLoads = kColumns * kUnit / 64;
  static constexpr int kRows = kPrompts ? kPromptRows : kScoreRows, kTiles = kRows / 8;
  using Shared = SumsShared<kColumns, kRows>;

  const BlockScoresSumsParams& p;
  Shared& shared;
  const int first_token, first_group, rows, lane;

  __device__ __forceinline__ SumScorer(const BlockScoresSumsParams& p, Shared& shared)
      : p(p), shared(shared), first_token(blockIdx.x * p.tile_tokens), first_group(blockIdx.z * p.tile_groups),
        rows((min(p.tile_tokens, p.total_tokens - first_token) * p.tile_groups) << (kPrompts ? 0 : p.group_shift)),
        lane(threadIdx.x % 32) {}

  // What a query row of the CTA is: its token, the group and the head of the group. For prompts, rows with the same
  // head of all groups lie together, and `rows` counts those of a head.
  struct QueryRow {
    int token, group, head;
    bool exists;
  };
  __device__ __forceinline__ QueryRow query_row(int row) const {
    const int unit = kPrompts ? row % kPromptUnits : row >> p.group_shift, token = quotient(unit, p.by_tile_groups);
    const int group = first_group + unit - token * p.tile_groups;
    const int head = kPrompts ? row / kPromptUnits : row - (unit << p.group_shift);
    const bool is_known = (kPrompts ? unit : row) < rows;
    return {first_token + token, group, head, is_known && group < p.groups && head < p.group_heads};
  }

  __device__ __forceinline__ void load_query() const {
    constexpr int kOctets = kColumns / 8;
    for (int i = threadIdx.x; i < kRows * kOctets; i += kScoreThreads) {
      const int row = i / kOctets, octet = i % kOctets;
      const QueryRow of = query_row(row);
      uint4 words = {};
      if (of.exists) {
        const int request = quotient(of.token, p.by_q_len);  // 0 if q_len is 0
        const char* const at = p.q + request * p.q_stride_batch + (of.token - request * p.q_len) * p.q_stride_token +
                               (of.group * p.group_heads + of.head) * p.q_stride_head + octet * 8 * kUnit;
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
    if (threadIdx.x >= kRows) return;
    const int row = threadIdx.x;
    const QueryRow of = query_row(row);
    BlockRow known = {-1, 0, 0, 0};
    if ((kPrompts ? row % kPromptUnits : row) < rows) known = p.rows[of.token];
    const i64 held = static_cast<i64>(p.max_pages) * p.page_size;
    const bool exists = known.request >= 0 && known.request < p.batch;
    const int tokens = exists ? known.seen(static_cast<int>(min(held, static_cast<i64>(kMaxTokens)))) : 0;
    shared.requests[row] = exists ? known.request : -1;
    shared.seen[row] = quotient(tokens, p.by_row_tokens);
    shared.weights[row] = 1.0f;
    if (of.exists && p.weights != nullptr)
      shared.weights[row] =
          p.weights[of.token * p.weights_stride_token + (of.group * p.group_heads + of.head) * p.weights_stride_head];
    shared.places[row] = of.exists && of.head == 0 ? of.token * p.out_stride_token + of.group * p.out_stride_group : -1;
  }

  // An item, and which 16 of its keys.
  struct Step {
    int item, part;

    __device__ __forceinline__ void advance(int parts) {
      if (++part < parts) return;
      part = 0;
      item += kScoreWarps;
    }
  };

  // The block that an entry names; -1: none.
  __device__ __forceinline__ int block_of(int entry) const {
    if (p.entries == nullptr) return entry;
    const char* const at = p.entries + first_token * p.entries_stride_token + first_group * p.entries_stride_group +
                           entry * p.entries_stride_entry;
    if (!p.entries_are_wide) return *reinterpret_cast<const int*>(at);
    const int2 halves = *reinterpret_cast<const int2*>(at);
    return halves.y == 0 ? halves.x : -1;
  }

  // Keys g and g + 8 of a step, counted in a request, kNoKey if no query row sees them, and their pages.
  __device__ __forceinline__ void load_pages(const Step& at, int last_item, int request, int most_seen, int (&keys)[2],
                                             int (&pages)[2]) const {
    const u32 blocks_seen = most_seen > 0 ? quotient(most_seen - 1, p.by_block_rows) + 1 : 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int of_lane = lane / 4 + 8 * r;
      const int entry = p.item_blocks == 1 ? at.item : at.item * kKeysAtOnce + of_lane;
      keys[r] = kNoKey;
      pages[r] = -1;
      if (at.item >= last_item || entry >= p.width) continue;
      const int block = block_of(entry);
      if (static_cast<u32>(block) >= blocks_seen) continue;
      const int key = block * p.block_rows + (p.item_blocks == 1 ? at.part * kKeysAtOnce + of_lane : 0);
      if (key >= most_seen) continue;
      keys[r] = key;
      pages[r] = p.block_table[request * p.block_table_stride + quotient(key, p.by_page_rows)];
    }
  }

  // Keys whose page does not exist become kNoKey.
  __device__ __forceinline__ void load_keys(int (&keys)[2], const int (&pages)[2], uint4 (&words)[2][kLoads]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (static_cast<u32>(pages[r]) >= static_cast<u32>(p.num_pages)) {
        keys[r] = kNoKey;
        continue;
      }
      const int in_page = keys[r] - quotient(keys[r], p.by_page_rows) * p.page_rows;
      const char* const source =
          p.keys + pages[r] * p.keys_stride_page + in_page * p.keys_stride_row + lane % 4 * 16;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) words[r][i] = load_global_16(reinterpret_cast<const uint4*>(source + i * 64));
    }
  }

  __device__ __forceinline__ float counted(float product) const { return p.is_relu && product < 0.0f ? 0.0f : product; }

  // Of keys g and g + 8, the sums over those heads of a group that are in eight query rows: in the group's first lane.
  __device__ __forceinline__ void add_up(const uint4 (&words)[2][kLoads], int tile, float (&sums)[2]) const {
    float score[4];
    multiply_keys<T, kE4m3, kColumns>(words, shared.query + tile * 8 * kQueryPitch<kColumns>, lane, score);
    const int row = tile * 8 + lane % 4 * 2, head = row & ((1 << p.group_shift) - 1);
    const float2 weights = *reinterpret_cast<const float2*>(shared.weights + row);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = head < p.group_heads ? weights.x * counted(score[2 * r]) : 0.0f;
      if (head + 1 < p.group_heads) sum = fmaf(weights.y, counted(score[2 * r + 1]), sum);
      if (p.group_shift > 1) sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      if (p.group_shift > 2) sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      sums[r] += sum;
    }
  }

  // Scores the items of a warp for the query rows [begin, end), which are of one request.
  __device__ __forceinline__ void score_items(int request, int begin, int end, int most_seen) const {
    const int first = blockIdx.y * p.warp_items * kScoreWarps;
    const int last = min(first + p.warp_items * kScoreWarps, p.items);
    int last_item = last;
    if (p.entries == nullptr) {
      const int seen = most_seen > 0 ? static_cast<int>(quotient(most_seen - 1, p.by_block_rows)) + 1 : 0;
      last_item = min(last, (seen + p.item_blocks - 1) / p.item_blocks);
    }
    const int parts = p.item_blocks == 1 ? p.block_rows / kKeysAtOnce : 1;
    Step now = {first + static_cast<int>(threadIdx.x) / 32, 0}, later = now;
    int pages[2] = {-1, -1}, later_keys[2] = {kNoKey, kNoKey}, keys[2] = {kNoKey, kNoKey};
    uint4 words[2][kLoads] = {}, next[2][kLoads] = {};
    float most[kPrompts ? 1 : kTiles];
#pragma unroll
    for (float& value : most) value = -kInfinity;
    // The loop runs twice before there are keys.
#pragma unroll 1
    for (int before = 2; now.item < last_item; before -= before > 0) {
      int next_keys[2] = {later_keys[0], later_keys[1]};
      load_keys(next_keys, pages, next);
      load_pages(later, last_item, request, most_seen, later_keys, pages);
      later.advance(parts);
      if (before == 0) {
        if constexpr (kPrompts)
          score_prompts(words, keys, now.item, begin, end);
        else
          score_step(words, keys, now, parts, begin, end, most);
        now.advance(parts);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        keys[r] = next_keys[r];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) words[r][i] = next[r][i];
      }
    }
    if (p.entries == nullptr) store_unseen(begin, end, max(last_item, first), last);
  }

  __device__ __forceinline__ void score_step(const uint4 (&words)[2][kLoads], const int (&keys)[2], const Step& at,
                                             int parts, int begin, int end, float (&most)[kTiles]) const {
    const int last_tile = (1 << max(p.group_shift - 3, 0)) - 1;  // of a group
    float sums[2] = {};
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (t * 8 >= end || t * 8 + 8 <= begin) continue;
      add_up(words, t, sums);
      if ((t & last_tile) != last_tile) continue;
      const int row = (t - last_tile) * 8 + lane % 4 * 2;
      const int seen = shared.seen[row];
      const i64 place = row >= begin && row < end ? shared.places[row] : -1;
      if (p.item_blocks != 1) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int entry = at.item * kKeysAtOnce + lane / 4 + 8 * r;
          if (place >= 0 && entry < p.width) p.out[place + entry] = keys[r] < seen ? sums[r] : -kInfinity;
        }
      } else {
#pragma unroll
        for (int r = 0; r < 2; ++r)
          if (keys[r] < seen) most[t] = larger(most[t], sums[r]);
        if (at.part + 1 == parts) {
#pragma unroll
          for (int apart = 4; apart < 32; apart *= 2)
            most[t] = larger(most[t], __shfl_xor_sync(0xffffffffu, most[t], apart));
          if (place >= 0 && lane < 4) p.out[place + at.item] = most[t];
          most[t] = -kInfinity;
        }
      }
      sums[0] = sums[1] = 0.0f;
    }
  }

  // As score_step, for pooled keys: a lane has all heads of the units 2 c and 2 c + 1 of each eight. The order of the
  // sum is that of score_step: two neighbouring heads, then pairs.
  __device__ __forceinline__ void score_prompts(const uint4 (&words)[2][kLoads], const int (&keys)[2], int item,
                                                int begin, int end) const {
    constexpr int kEights = kPromptUnits / 8;
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
      if (eight * 8 >= end || eight * 8 + 8 <= begin) continue;
      float score[kPromptHeads][4] = {}, sums[2][2] = {};  // of keys, of units
      multiply_eights<T, kE4m3, kColumns>(words, shared.query + eight * 8 * kQueryPitch<kColumns>, kPromptUnits, lane,
                                          score);
#pragma unroll
      for (int first = 0; first < kPromptHeads; first += 2) {
        if (first >= p.group_heads) break;
        const float* const weights = shared.weights + first * kPromptUnits + eight * 8 + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            float pair = weights[j] * counted(score[first][2 * r + j]);
            if (first + 1 < p.group_heads)
              pair = fmaf(weights[kPromptUnits + j], counted(score[first + 1][2 * r + j]), pair);
            sums[r][j] += pair;
          }
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int unit = eight * 8 + lane % 4 * 2 + j;
        const int seen = shared.seen[unit];
        const i64 place = unit >= begin && unit < end ? shared.places[unit] : -1;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int entry = item * kKeysAtOnce + lane / 4 + 8 * r;
          if (place >= 0 && entry < p.width) p.out[place + entry] = keys[r] < seen ? sums[r][j] : -kInfinity;
        }
      }
    }
  }

  // Stores -inf for the items [from, last), which no query row in [begin, end) sees.
  __device__ __forceinline__ void store_unseen(int begin, int end, int from, int last) const {
    const int until = min(last * p.item_blocks, p.width);
#pragma unroll 1
    for (int row = begin; row < end; row += kPrompts ? 1 : 1 << p.group_shift) {
      const i64 place = shared.places[row];
      if (place < 0) continue;
      for (int entry = from * p.item_blocks + threadIdx.x; entry < until; entry += kScoreThreads)
        p.out[place + entry] = -kInfinity;
    }
  }

  __device__ __forceinline__ void score() const {
    for (int begin = 0, end; begin < rows; begin = end) {
      const int request = shared.requests[begin];
      int most_seen = shared.seen[begin];
      for (end = begin + 1; end < rows && shared.requests[end] == request; ++end)
        most_seen = max(most_seen, shared.seen[end]);
      score_items(request, begin, end, most_seen);
    }
  }
};

template <typename T, bool kE4m3, int kColumns, bool kPrompts>
__device__ __forceinline__ void block_scores_sums(const BlockScoresSumsParams& p) {
  using Scorer = SumScorer<T, kE4m3, kColumns, kPrompts>;
  __shared__ typename Scorer::Shared shared;
  grid_dependency_launch();
  grid_dependency_wait();
  const Scorer scorer(p, shared);
  scorer.load_query();
  __syncthreads();
  scorer.score();
}

}  // namespace cumla::blocks
