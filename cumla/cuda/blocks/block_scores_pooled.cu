// SPDX-License-Identifier: Apache-2.0
// Scores of pooled keys, as block_scores_sums.cu, for requests of up to 8 query rows (query tokens x heads): decoding.
//
// As block_scores_few.cu, whose shares, rings and products these are: a block is 32 keys, which may lie on several
// pages. Each lane finds the page of its keys, as many as lie side by side, and copies these. A key has a score of its
// own for each group of heads: sums over query rows, which are neighbouring columns of a product.
//
// grid = as many CTAs as multiprocessors, of kWarps warps.
//
// Roles and time line of a warp:
//   add up blocks of all requests, find the share | page numbers | copy the first stages | query rows to registers |
//   store -inf for keys that nobody sees
//   for each stage: wait for it | products | copy the stage after the ring, find its next pages | sums, store
//
// barrier            who arrives (count)                     who waits   guards
// full(warp, stage)  lane 0 of the warp, with the bytes (1)  the warp    keys of a stage are loaded
//
// Shared memory: a ring of kStages stages of 32 rows for each warp, 128 KB; 24 bytes for each stage
// Registers:     128
#include "blocks/block_scores_few/layout.cuh"
#include "blocks/block_scores_few/score.cuh"
#include "blocks/block_scores_few/share.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

using namespace ptx;

constexpr int kPooledKeys = 32;  // of a stage: a block of the shares

// Widths and strides count pooled keys, `most` tokens; out has a row for each group of heads.
struct BlockScoresPooledParams : BlockScoresFewParams {
  const float* weights;  // [batch x q_len, heads]; null: ones
  i64 weights_stride_token, weights_stride_head;
  int page_rows;    // keys of a page
  int run_shift;    // 1 << run_shift keys lie side by side, and begin at multiples of that
  int group_shift;  // a group has 1 << group_shift heads
  int is_relu;      // negative products count as zero
  Divisor by_row_tokens, by_page_rows;
};

// Keys all of whose tokens are among the first `tokens`.
__device__ __forceinline__ int keys_of(const BlockScoresPooledParams& p, int tokens) {
  return tokens > 0 ? static_cast<int>(quotient(tokens, p.by_row_tokens)) : 0;
}

__device__ __forceinline__ int blocks_of(const BlockScoresPooledParams& p, int tokens) {
  return (keys_of(p, tokens) + kPooledKeys - 1) / kPooledKeys;
}

// Where the scores of a group are, by one of its query rows.
__device__ __forceinline__ i64 offset_of_group(const BlockScoresPooledParams& p, int row) {
  const int token = quotient(row, p.by_heads), head = row - token * p.heads;
  return token * p.out_stride_token + (head >> p.group_shift) * p.out_stride_head;
}

// Copies blocks of keys into the ring of a warp, and says whose they are: a bit for each run whose page exists.
template <typename Layout>
struct PooledLoader {
  const BlockScoresPooledParams& p;
  const Layout& shared;
  const int lane;
  const u64 policy;
  BlockPlace at;
  int left;    // blocks
  int copies;  // stages until now
  int page;    // of this lane's keys of the block

  // Where all blocks, visible or not, are no more than the warps, each has one, and its pages do not wait for lengths.
  __device__ __forceinline__ PooledLoader(const BlockScoresPooledParams& p, const Layout& shared)
      : p(p), shared(shared), lane(threadIdx.x % 32), policy(evict_first_policy()), at(), left(0), copies(0), page(-1) {
    if (!p.is_single) return;
    const int place = place_of_warp();
    at.request = quotient(place, p.by_width);
    at.block = place - at.request * p.steps;
    if (at.request >= p.batch) return;
    find_page();
    at.tokens = p.kv_lens[at.request * p.kv_lens_stride];
  }

  __device__ __forceinline__ int first_key() const { return at.block * kPooledKeys + (lane << p.run_shift); }

  __device__ __forceinline__ void find_page() {
    const int key = first_key();
    page = lane << p.run_shift < kPooledKeys && key < p.width
               ? p.block_table[at.request * p.block_table_stride + quotient(key, p.by_page_rows)]
               : -1;
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
    if (left > 0) find_page();
  }

  __device__ __forceinline__ void copy(int stage) {
    if (left <= 0) return;
    ++copies;
    const int key = first_key(), keys = min(keys_of(p, at.tokens) - key, 1 << p.run_shift);
    const bool exists = static_cast<u32>(page) < static_cast<u32>(p.num_pages) && keys > 0;
    const int bytes = exists ? keys * Layout::kRow : 0;
    const u32 runs = __ballot_sync(0xffffffffu, exists);
    const int all = __reduce_add_sync(0xffffffffu, bytes);
    if (lane == 0) {
      store_shared_16(shared.place_of(stage), {runs, static_cast<u32>(at.request), static_cast<u32>(at.block),
                                               static_cast<u32>(at.tokens)});
      mbarrier_arrive_expect_tx(shared.full(stage), all);
    }
    __syncwarp();
    if (exists) {
      const int in_page = key - static_cast<int>(quotient(key, p.by_page_rows)) * p.page_rows;
      const char* const source = p.keys + page * p.keys_stride_page + in_page * p.keys_stride_row;
      const u32 destination = shared.stage(stage) + (lane << p.run_shift) * Layout::kRow;
      copy_bulk_async(destination, source, bytes, shared.full(stage), policy);
    }
    if (--left <= 0) return;
    at.advance(p);
    if (at.request >= p.batch)
      left = 0;  // lengths became smaller meanwhile
    else
      find_page();
  }
};

// The scores of a stage. Its `keys` are a bit for each run that was copied.
template <typename T, typename Layout>
struct PooledScorer : FewScorer<T, Layout> {
  using Base = FewScorer<T, Layout>;
  using Base::block, Base::keys, Base::kTiles, Base::lane, Base::request, Base::tokens;

  const BlockScoresPooledParams& p;
  float weights[2];  // of this lane's rows

  __device__ __forceinline__ PooledScorer(const BlockScoresPooledParams& p, const Layout& shared)
      : Base(p, shared), p(p), weights{1.0f, 1.0f} {}

  __device__ __forceinline__ void begin(int stage) {
    const int before = request;
    Base::begin(stage);
    if (p.weights == nullptr || request == before) return;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = lane % 4 * 2 + j, token = quotient(row, p.by_heads);
      if (row < p.rows)
        weights[j] = p.weights[(request * p.q_len + token) * p.weights_stride_token +
                               (row - token * p.heads) * p.weights_stride_head];
    }
  }

  __device__ __forceinline__ float counted(float product) const { return p.is_relu && product < 0.0f ? 0.0f : product; }

  // A lane gets the sum of one key of a group from the lane that has it: 32 scores are stored side by side.
  __device__ __forceinline__ void end(const float (&score)[kTiles][2][4]) const {
    float sums[2 * kTiles][2];  // of keys 8 k + lane / 4 and this lane's rows; the group's, if such a row is its first
#pragma unroll
    for (int k = 0; k < 2 * kTiles; ++k) {
      const auto& products = score[k / 2];
#pragma unroll
      for (int j = 0; j < 2; ++j)
        sums[k][j] = weights[j] * counted(products[0][k % 2 * 2 + j] + products[1][k % 2 * 2 + j]);
      if (p.group_shift > 0) sums[k][0] += sums[k][1];
      if (p.group_shift > 1) sums[k][0] += __shfl_xor_sync(0xffffffffu, sums[k][0], 1);
      if (p.group_shift > 2) sums[k][0] += __shfl_xor_sync(0xffffffffu, sums[k][0], 2);
    }
    const int in_block = lane % 4 * 8 + lane / 4, key = block * kPooledKeys + in_block;
    const bool there = (static_cast<u32>(keys) >> (in_block >> p.run_shift)) & 1;
    float* const out = p.out + request * p.out_stride_request + key;
#pragma unroll 1
    for (int row = 0; row < p.rows; row += 1 << p.group_shift) {
      float sum = 0.0f;
#pragma unroll
      for (int k = 0; k < 2 * kTiles; ++k) {
        const float of_key = __shfl_sync(0xffffffffu, row % 2 == 0 ? sums[k][0] : sums[k][1], lane / 4 * 4 + row / 2);
        if (lane % 4 == k) sum = of_key;
      }
      const int token = quotient(row, p.by_heads), behind = p.causal ? p.q_len - 1 - token : 0;
      if (key < p.width) out[offset_of_group(p, row)] = there && key < keys_of(p, tokens - behind) ? sum : -kInfinity;
    }
  }
};

// Stores -inf for blocks of keys that no query row sees.
template <int kWarps>
__device__ __forceinline__ void store_unseen_keys(const BlockScoresPooledParams& p, int warp) {
  const int steps = p.batch * p.steps, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int i = blockIdx.x * kWarps + warp; i < steps; i += gridDim.x * kWarps) {
    const int request = quotient(i, p.by_steps), block = i - request * p.steps, key = block * kPooledKeys + lane;
    if (block < blocks_of(p, tokens_of(p, request)) || key >= p.width) continue;
    float* const out = p.out + request * p.out_stride_request + key;
#pragma unroll 1
    for (int row = 0; row < p.rows; row += 1 << p.group_shift) out[offset_of_group(p, row)] = -kInfinity;
  }
}

template <typename T, bool kE4m3, int kColumns, int kWarps, int kStages>
__device__ __forceinline__ void block_scores_pooled(const BlockScoresPooledParams& p) {
  using Layout = ScoresFewLayout<kE4m3, kWarps, kPooledKeys, kStages, kColumns>;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const Layout shared = {shared_address(shared_bytes), warp};
  const i64 line = (static_cast<i64>(blockIdx.x) * (kWarps * 32) + threadIdx.x) * 32;  // entries
  if (line < p.table_entries) prefetch_l2(p.block_table + line);
  grid_dependency_launch();
  grid_dependency_wait();
  PooledLoader<Layout> loader(p, shared);
  if (lane == 0) {
    for (int stage = 0; stage < kStages; ++stage) mbarrier_init(shared.full(stage), 1);
    fence_mbarrier_init();
  }
  __syncwarp();
  loader.begin(gridDim.x * kWarps);
#pragma unroll 1
  for (int stage = 0; stage < kStages; ++stage) loader.copy(stage);
  PooledScorer<T, Layout> scorer(p, shared);
  if (loader.copies > 0) scorer.begin(0);
  store_unseen_keys<kWarps>(p, warp);
  int stage = 0;
  u32 phase = 0;
#pragma unroll 1
  for (int i = 0; i < loader.copies; ++i) {
    mbarrier_wait(shared.full(stage), phase, "keys");
    float score[PooledScorer<T, Layout>::kTiles][2][4] = {};
    scorer.multiply_stage(stage, score);
    if (loader.left > 0) fence_proxy_async_shared();  // orders the reads of the keys before the next copy
    __syncwarp();
    loader.copy(stage);
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
    scorer.end(score);
    if (i + 1 < loader.copies) scorer.begin(stage);
  }
}

}  // namespace cumla::blocks
