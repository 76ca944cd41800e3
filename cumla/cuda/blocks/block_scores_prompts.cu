// SPDX-License-Identifier: Apache-2.0
// Scores of pooled keys, as block_scores_sums.cu, for prompts: sums over four heads of a group, keys of 128 columns.
//
// A CTA is a warpgroup. It has up to kUnits units, which are query tokens x groups, and a range of keys: 64, or 16 for
// requests of few query tokens. The query rows of the units are in shared memory, once, as the second operand of wgmma.
// 64 keys at a time are the M side: they go from memory to registers, and e4m3 becomes float16 there. The columns of a
// product may have any order that both sides share, so a lane loads 16 bytes of a key at once, and the query rows are
// stored in the order that this gives. A lane's accumulators are all heads of a quarter of the units for two keys, so a
// sum takes no shuffle.
//
// grid = (tiles of units, ranges of keys, tiles of groups), 128 threads; two CTAs of 64 units on a multiprocessor, four
// of 16: while one adds up and stores, another one multiplies.
//
// Roles and time line:
//   all      query rows to shared memory, e4m3 as float16 | units: weights, what each sees, where it stores | B
//   all      for each request of the tile, for all its keys of the range, 64 at a time:
//            page numbers two steps ahead | keys one ahead, during the products | products | sums, store
//   all      store -inf for keys that no unit of a request sees
// Barriers: one __syncthreads, B, guards what is in shared memory. There are no mbarriers.
//
// Shared memory: query rows 1,024 + weights 16 + units 16 for each unit: 67,584 B, or 16,896
// Registers:     212 to 227; of 16 units 124 to 126
#include "blocks/block_scores_sums/params.cuh"
#include "blocks/rows.cuh"
#include "split/division.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/maximum.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_wide.cuh"

namespace cumla::blocks {

using namespace ptx;
using namespace split;

constexpr int kPromptsThreads = 128;
constexpr int kPromptsColumns = 128;
constexpr int kPromptsHeads = 4;  // of a group
constexpr int kPromptsUnits = 64, kPromptsFewUnits = 16;
constexpr int kPromptsKeys = 64;  // at once

struct PromptUnit {
  i64 place;  // in out; -1: there is no such unit
  int seen;   // keys
  int request;
};

template <int kUnits>
struct PromptsShared {
  static constexpr int kRows = kUnits * kPromptsHeads, kHalfBytes = kRows * 128;

  // Two halves of the columns; a row of each has 128 bytes, whose chunks are swizzled.
  unsigned char query[2 * kHalfBytes];
  float4 weights[kUnits];
  PromptUnit units[kUnits];
};
constexpr int kPromptsBytes = sizeof(PromptsShared<kPromptsUnits>);
constexpr int kPromptsFewBytes = sizeof(PromptsShared<kPromptsFewUnits>);

constexpr int kUnseen = 0x7fffffff;

template <typename T, bool kE4m3, int kUnits>
struct PromptScorer {
  using Shared = PromptsShared<kUnits>;
  static constexpr int kProducts = Shared::kRows / 2;  // of a lane
  static constexpr int kUnitBytes = kE4m3 ? 1 : 2, kLoads = kPromptsColumns * kUnitBytes / 64;
  static constexpr int kSteps = kPromptsColumns / 16;

  const BlockScoresSumsParams& p;
  Shared& shared;
  const int first_token, first_group, units, warp, lane;
  const float smallest;  // product that counts as itself

  __device__ __forceinline__ PromptScorer(const BlockScoresSumsParams& p, Shared& shared)
      : p(p), shared(shared), first_token(blockIdx.x * p.tile_tokens), first_group(blockIdx.z * p.tile_groups),
        units(min(p.tile_tokens, p.total_tokens - first_token) * p.tile_groups), warp(threadIdx.x / 32),
        lane(threadIdx.x % 32), smallest(p.is_relu ? 0.0f : -kInfinity) {}

  struct Unit {
    int token, group;
    bool exists;
  };
  __device__ __forceinline__ Unit unit_of(int unit) const {
    const int token = quotient(unit, p.by_tile_groups), group = first_group + unit - token * p.tile_groups;
    return {first_token + token, group, unit < units && group < p.groups};
  }

  // The row of the second operand: a lane's accumulators of an eight are of two heads of one unit.
  static __device__ __forceinline__ int row_of(int unit, int head) {
    return (unit / 4 * 2 + head / 2) * 8 + unit % 4 * 2 + head % 2;
  }

  // A thread takes 64 bytes of a query row. Word k of the 16 bytes that lane c of four loads from a key meets word k of
  // the chunk that holds the words k of all four, in the order of lanes.
  __device__ __forceinline__ void load_query() const {
    constexpr int kParts = kPromptsColumns * kUnitBytes / 64, kWords = kE4m3 ? 8 : 4;
    constexpr int kAll = Shared::kRows * kParts, kAtOnce = kAll < 4 * kPromptsThreads ? 1 : 4;
#pragma unroll 1
    for (int first = threadIdx.x; first < kAll; first += kAtOnce * kPromptsThreads) {
      uint4 fours[kAtOnce][4];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = first + j * kPromptsThreads, row = i / kParts, unit = row / kPromptsHeads;
        // Nobody reads the products of a unit that does not exist: it has the query rows of the first one.
        Unit of = unit_of(unit);
        if (!of.exists) of = unit_of(0);
        const int request = quotient(of.token, p.by_q_len);  // 0 if q_len is 0
        const char* const at = p.q + request * p.q_stride_batch + (of.token - request * p.q_len) * p.q_stride_token +
                               (of.group * kPromptsHeads + row % kPromptsHeads) * p.q_stride_head + i % kParts * 64;
#pragma unroll
        for (int c = 0; c < 4; ++c) fours[j][c] = load_global_16(reinterpret_cast<const uint4*>(at) + c);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        u32 words[kWords][4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const uint4& four = fours[j][c];
          if constexpr (kE4m3) {
            expand_e4m3x4(four.x, words[0][c], words[1][c]);
            expand_e4m3x4(four.y, words[2][c], words[3][c]);
            expand_e4m3x4(four.z, words[4][c], words[5][c]);
            expand_e4m3x4(four.w, words[6][c], words[7][c]);
          } else {
            words[0][c] = four.x;
            words[1][c] = four.y;
            words[2][c] = four.z;
            words[3][c] = four.w;
          }
        }
        const int i = first + j * kPromptsThreads, row = i / kParts, part = i % kParts;
        const int to = row_of(row / kPromptsHeads, row % kPromptsHeads);
        const int half = kE4m3 ? part : part / 2, chunk = kE4m3 ? 0 : part % 2 * 4;
        unsigned char* const stored = shared.query + half * Shared::kHalfBytes + to * 128;
#pragma unroll
        for (int k = 0; k < kWords; ++k)
          *reinterpret_cast<uint4*>(stored + swizzled_chunk<128>(to, chunk + k) * 16) =
              uint4{words[k][0], words[k][1], words[k][2], words[k][3]};
      }
    }
  }

  __device__ __forceinline__ void load_units() const {
    if (threadIdx.x >= kUnits) return;
    const Unit of = unit_of(threadIdx.x);
    BlockRow known = {-1, 0, 0, 0};
    if (static_cast<int>(threadIdx.x) < units) known = p.rows[of.token];
    const i64 held = static_cast<i64>(p.max_pages) * p.page_size;
    const bool exists = known.request >= 0 && known.request < p.batch;
    const int tokens = exists ? known.seen(static_cast<int>(min(held, static_cast<i64>(kMaxTokens)))) : 0;
    const i64 place = of.exists ? of.token * p.out_stride_token + of.group * p.out_stride_group : -1;
    shared.units[threadIdx.x] =
        PromptUnit{place, static_cast<int>(quotient(tokens, p.by_row_tokens)), exists ? known.request : -1};
    float weights[kPromptsHeads] = {1.0f, 1.0f, 1.0f, 1.0f};
    if (of.exists && p.weights != nullptr) {
#pragma unroll
      for (int head = 0; head < kPromptsHeads; ++head)
        weights[head] =
            p.weights[of.token * p.weights_stride_token + (of.group * kPromptsHeads + head) * p.weights_stride_head];
    }
    shared.weights[threadIdx.x] = float4{weights[0], weights[1], weights[2], weights[3]};
  }

  // The first of a lane's two keys of a step; the other one is 8 further.
  __device__ __forceinline__ u32 key_of(u32 step) const { return step * kPromptsKeys + warp * 16 + lane / 4; }

  // The pages of a lane's two keys of a step; -1 if no unit sees them.
  __device__ __forceinline__ void load_pages(int step, int request, int most_seen, int (&pages)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const u32 key = key_of(step) + 8 * r;
      pages[r] = -1;
      if (key < static_cast<u32>(most_seen))
        pages[r] = p.block_table[request * p.block_table_stride + quotient(key, p.by_page_rows)];
    }
  }

  // Loads this lane's 16 bytes of each 64 of its keys. Keys without a page get a number that no unit sees.
  __device__ __forceinline__ void load_keys(int step, const int (&pages)[2], int (&keys)[2],
                                            uint4 (&words)[2][kLoads]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      keys[r] = kUnseen;
      if (static_cast<u32>(pages[r]) >= static_cast<u32>(p.num_pages)) continue;
      keys[r] = key_of(step) + 8 * r;
      const int in_page = keys[r] - quotient(keys[r], p.by_page_rows) * p.page_rows;
      const char* const source = p.keys + pages[r] * p.keys_stride_page + in_page * p.keys_stride_row + lane % 4 * 16;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) words[r][i] = load_global_16(reinterpret_cast<const uint4*>(source + i * 64));
    }
  }

  // Word k of a key's 16 bytes becomes one operand register (of 16 bits), or two. `zero` is 0, which the compiler does
  // not know: it would load the next keys into the registers of a copy while products read them.
  static __device__ __forceinline__ void make_operand(const uint4 (&words)[2][kLoads], u32 zero, u32 (&a)[kSteps][4]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const uint4& four = words[r][i];
        if constexpr (kE4m3) {
          expand_e4m3x4(four.x, a[4 * i][r], a[4 * i][2 + r]);
          expand_e4m3x4(four.y, a[4 * i + 1][r], a[4 * i + 1][2 + r]);
          expand_e4m3x4(four.z, a[4 * i + 2][r], a[4 * i + 2][2 + r]);
          expand_e4m3x4(four.w, a[4 * i + 3][r], a[4 * i + 3][2 + r]);
        } else {
          a[2 * i][r] = four.x ^ zero;
          a[2 * i][2 + r] = four.y ^ zero;
          a[2 * i + 1][r] = four.z ^ zero;
          a[2 * i + 1][2 + r] = four.w ^ zero;
        }
      }
    }
  }

  static __device__ __forceinline__ void multiply(float (&products)[kProducts], const u32* a, u64 b, bool accumulate) {
    if constexpr (kUnits == kPromptsUnits)
      wgmma_m64n256k16_async<T>(products, a, b, accumulate);
    else
      wgmma_m64n64k16_async<T>(products, a, b, accumulate);
  }

  __device__ __forceinline__ float counted(float product) const { return larger_or_nan(product, smallest); }

  // The sum over the heads of a unit and key r of this lane: two neighbours, then pairs. Heads 2 and 3 lie four
  // further.
  template <bool kWeighted>
  __device__ __forceinline__ float sum_of(const float (&products)[kProducts], int four, int r) const {
    const float* const two = products + four * 8 + 2 * r;
    if constexpr (!kWeighted) return (counted(two[0]) + counted(two[1])) + (counted(two[4]) + counted(two[5]));
    const float4 weights = shared.weights[four * 4 + lane % 4];
    return fmaf(weights.y, counted(two[1]), weights.x * counted(two[0])) +
           fmaf(weights.w, counted(two[5]), weights.z * counted(two[4]));
  }

  // Stores the sums of a step whose keys all units see.
  template <bool kWeighted>
  __device__ __forceinline__ void store_all(const float (&products)[kProducts], int step) const {
    const u32 first_key = key_of(step);
#pragma unroll
    for (int four = 0; four < kUnits / 4; ++four) {
      float* const out = p.out + shared.units[four * 4 + lane % 4].place + first_key;
      out[0] = sum_of<kWeighted>(products, four, 0);
      out[8] = sum_of<kWeighted>(products, four, 1);
    }
  }

  // Stores the sums of the units [begin, end).
  __device__ __forceinline__ void store_some(const float (&products)[kProducts], int step, const int (&keys)[2],
                                             int begin, int end) const {
    const u32 first_key = key_of(step);
#pragma unroll
    for (int four = 0; four < kUnits / 4; ++four) {
      if (four * 4 >= end || four * 4 + 4 <= begin) continue;
      const int unit = four * 4 + lane % 4;
      const PromptUnit of = shared.units[unit];
      const bool is_there = unit >= begin && unit < end && of.place >= 0;
      float* const out = p.out + of.place + first_key;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float sum = sum_of<true>(products, four, r);
        if (is_there && first_key + 8 * r < static_cast<u32>(p.width))
          out[8 * r] = keys[r] < of.seen ? sum : -kInfinity;
      }
    }
  }

  // Scores the keys of the range for the units [begin, end), which are of one request. If they are all units, each sees
  // `least_seen` keys, at least.
  __device__ __forceinline__ void score_keys(int request, int begin, int end, int most_seen, int least_seen) const {
    const int first = blockIdx.y * p.warp_items, last = min(first + p.warp_items, p.items);
    const int seen = min(most_seen, p.width), last_seen = min(last, (seen + kPromptsKeys - 1) / kPromptsKeys);
    const u32 query = shared_address(shared.query);
    int pages[2], keys[2], next_keys[2];
    uint4 next[2][kLoads] = {};
    if (first < last_seen) {
      load_pages(first, request, most_seen, pages);
      load_keys(first, pages, next_keys, next);
      load_pages(first + 1, request, most_seen, pages);
    }
    float products[kProducts] = {};
#pragma unroll 1
    for (int step = first; step < last_seen; ++step) {
      u32 a[kSteps][4];
      make_operand(next, p.item_blocks ^ kPromptsKeys, a);
      keys[0] = next_keys[0];
      keys[1] = next_keys[1];
#pragma unroll
      for (auto& of_step : a) keep_before_products(of_step);
      warpgroup_arrive();
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
        multiply(products, a[k], descriptor_of_rows<128>(query + k / 4 * Shared::kHalfBytes, k % 4 * 32), k > 0);
      warpgroup_commit();
      load_keys(step + 1, pages, next_keys, next);
      load_pages(step + 2, request, most_seen, pages);
      warpgroup_wait<0>();
      keep_behind_wait(products);
      const bool exist = __all_sync(0xffffffffu, keys[0] != kUnseen && keys[1] != kUnseen);
      if (!exist || (step + 1) * kPromptsKeys > least_seen)
        store_some(products, step, keys, begin, end);
      else if (p.weights == nullptr)
        store_all<false>(products, step);
      else
        store_all<true>(products, step);
    }
    store_unseen(begin, end, max(last_seen, first), last);
  }

  // Stores -inf for the steps [from, last), which no unit in [begin, end) sees.
  __device__ __forceinline__ void store_unseen(int begin, int end, u32 from, u32 last) const {
    const u32 until = min(last * kPromptsKeys, static_cast<u32>(p.width));
#pragma unroll 1
    for (int unit = begin; unit < end; ++unit) {
      const i64 place = shared.units[unit].place;
      if (place < 0) continue;
      for (u32 key = from * kPromptsKeys + threadIdx.x; key < until; key += kPromptsThreads)
        p.out[place + key] = -kInfinity;
    }
  }

  __device__ __forceinline__ void score() const {
#pragma unroll 1
    for (int begin = 0, end; begin < units; begin = end) {
      const int request = shared.units[begin].request;
      int most_seen = 0, least_seen = kUnseen, same = 32;
      for (end = begin; end < units && same == 32; end += same) {
        const PromptUnit of = shared.units[min(end + lane, kUnits - 1)];
        const u32 others = __ballot_sync(0xffffffffu, end + lane >= units || of.request != request);
        same = others != 0 ? __ffs(others) - 1 : 32;
        most_seen = max(most_seen, __reduce_max_sync(0xffffffffu, lane < same ? of.seen : 0));
        const int seen = of.place >= 0 ? of.seen : 0;
        least_seen = min(least_seen, __reduce_min_sync(0xffffffffu, lane < same ? seen : kUnseen));
      }
      score_keys(request, begin, end, most_seen, end - begin == kUnits ? least_seen : 0);
    }
  }
};

template <typename T, bool kE4m3, int kUnits>
__device__ __forceinline__ void block_scores_prompts(const BlockScoresSumsParams& p) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<PromptsShared<kUnits>*>(shared_bytes);
  grid_dependency_launch();
  grid_dependency_wait();
  const PromptScorer<T, kE4m3, kUnits> scorer(p, shared);
  scorer.load_query();
  scorer.load_units();
  fence_proxy_async_shared();
  __syncthreads();
  scorer.score();
}

}  // namespace cumla::blocks
