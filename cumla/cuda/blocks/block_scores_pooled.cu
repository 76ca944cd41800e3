// SPDX-License-Identifier: Apache-2.0
// Scores of pooled keys, as block_scores_sums.cu, for requests of up to 8 query rows (query tokens x heads): decoding.
//
// A warp scores 32 keys at once, which may lie on several pages: each lane finds the page of its keys, as many as lie
// side by side, and copies these. A key has a score of its own for each group of heads: sums over query rows, which are
// neighbouring columns of a product. The products are those of block_scores_few.cu. There are no rings, but many warps:
// 20 on a multiprocessor have their keys on the way, and the GPU starts the next thread block where one ends.
//
// grid = requests x ranges, requests first; CTAs of two warps, which share nothing. A CTA takes each (ranges)th 64 keys
// of a request, so that keys that nobody sees are everybody's.
//
// Roles and time line of a warp:
//   length and page numbers | copy the first keys | query rows to registers
//   for all 32 keys that are seen: wait for them | products | page numbers, before, copies of the next | sums, store
//   store -inf for keys that nobody sees
//
// barrier     who arrives (count)                     who waits   guards
// full(warp)  lane 0 of the warp, with the bytes (1)  the warp    keys are loaded
//
// Shared memory: 32 rows and 8 bytes for each warp: 16,400 B for rows of 256 bytes
// Registers:     94 to 107
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

constexpr int kPooledKeys = 32;  // of a warp
constexpr int kPooledWarps = 2;

// Widths and strides count pooled keys, `most` tokens; out has a row for each group of heads.
struct BlockScoresPooledParams : BlockScoresFewParams {
  const float* weights;  // [batch x q_len, heads]; null: ones
  i64 weights_stride_token, weights_stride_head;
  int page_rows;    // keys of a page
  int run_shift;    // 1 << run_shift keys lie side by side, and begin at multiples of that
  int group_shift;  // a group has 1 << group_shift heads
  int is_relu;      // negative products count as zero
  Divisor by_row_tokens, by_page_rows, by_batch;
};

// Keys all of whose tokens are among the first `tokens`.
__device__ __forceinline__ int keys_of(const BlockScoresPooledParams& p, int tokens) {
  return tokens > 0 ? static_cast<int>(quotient(tokens, p.by_row_tokens)) : 0;
}

// Where the scores of a group are, by one of its query rows.
__device__ __forceinline__ i64 offset_of_group(const BlockScoresPooledParams& p, int row) {
  const int token = quotient(row, p.by_heads), head = row - token * p.heads;
  return token * p.out_stride_token + (head >> p.group_shift) * p.out_stride_head;
}

// The shared memory of a thread block. A warp scores its keys as a stage of block_scores_few.
template <int kRow>  // bytes
struct PooledLayout {
  static constexpr int kBytes = kPooledWarps * (kPooledKeys * kRow + 8);

  u32 base;
  int warp;

  __device__ __forceinline__ u32 keys() const { return base + warp * (kPooledKeys * kRow); }
  __device__ __forceinline__ u32 full() const { return base + kPooledWarps * (kPooledKeys * kRow) + warp * 8; }
};

// The scores of 32 keys of a request.
template <typename T, typename Layout>
struct PooledScorer : FewScorer<T, Layout> {
  using Base = FewScorer<T, Layout>;
  using Base::block, Base::keys, Base::kTiles, Base::lane, Base::request, Base::tokens;

  const BlockScoresPooledParams& p;
  float weights[2];  // of this lane's rows

  __device__ __forceinline__ PooledScorer(const BlockScoresPooledParams& p, const Layout& shared)
      : Base(p, shared), p(p), weights{1.0f, 1.0f} {}

  // The page of this lane's keys of a block.
  __device__ __forceinline__ int page_of(int of_block) const {
    const int key = of_block * kPooledKeys + (lane << p.run_shift);
    return lane << p.run_shift < kPooledKeys && key < p.width
               ? p.block_table[request * p.block_table_stride + quotient(key, p.by_page_rows)]
               : -1;
  }

  // Copies the keys that exist and are visible. `keys` becomes a bit for each run that is copied.
  __device__ __forceinline__ void copy_keys(int page, u32 full) {
    const int key = block * kPooledKeys + (lane << p.run_shift);
    const int run = min(keys_of(p, tokens) - key, 1 << p.run_shift);
    const bool exists = static_cast<u32>(page) < static_cast<u32>(p.num_pages) && run > 0;
    const int bytes = exists ? run * Layout::kRow : 0;
    keys = static_cast<int>(__ballot_sync(0xffffffffu, exists));
    const int all = __reduce_add_sync(0xffffffffu, bytes);
    if (lane == 0) mbarrier_arrive_expect_tx(full, all);
    __syncwarp();
    if (!exists) return;
    const int in_page = key - static_cast<int>(quotient(key, p.by_page_rows)) * p.page_rows;
    const char* const source = p.keys + page * p.keys_stride_page + in_page * p.keys_stride_row;
    copy_bulk_async(this->shared.stage(0) + (lane << p.run_shift) * Layout::kRow, source, bytes, full,
                    evict_first_policy());
  }

  // Stores -inf for a block that nobody sees.
  __device__ __forceinline__ void store_unseen() const {
    const int key = block * kPooledKeys + lane;
    if (key >= p.width) return;
    float* const out = p.out + request * p.out_stride_request + key;
#pragma unroll 1
    for (int row = 0; row < p.rows; row += 1 << p.group_shift) out[offset_of_group(p, row)] = -kInfinity;
  }

  __device__ __forceinline__ void load_weights() {
    if (p.weights == nullptr) return;
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
  __device__ __forceinline__ void end(const float (&score)[kTiles][2][4], int block, int keys) const {
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

template <typename T, bool kE4m3, int kColumns>
__device__ __forceinline__ void block_scores_pooled(const BlockScoresPooledParams& p) {
  using Layout = ScoresFewLayout<kE4m3, kPooledWarps, kPooledKeys, 1, kColumns>;
  using Scorer = PooledScorer<T, Layout>;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const PooledLayout<Layout::kRow> own = {shared_address(shared_bytes), warp};
  const int range = quotient(blockIdx.x, p.by_batch), ranges = quotient(gridDim.x, p.by_batch);
  grid_dependency_launch();
  grid_dependency_wait();
  const Layout shared = {own.keys(), 0};
  Scorer scorer(p, shared);
  scorer.request = blockIdx.x - range * p.batch;
  scorer.block = range * kPooledWarps + warp;
  int page = scorer.page_of(scorer.block);
  scorer.tokens = tokens_of(p, scorer.request);
  const int seen = (keys_of(p, scorer.tokens) + kPooledKeys - 1) / kPooledKeys;
  u32 phase = 0;
  if (scorer.block < seen) {
    if (lane == 0) {
      mbarrier_init(own.full(), 1);
      fence_mbarrier_init();
    }
    __syncwarp();
    scorer.copy_keys(page, own.full());
    scorer.load_query();
    scorer.load_weights();
  }
#pragma unroll 1
  while (scorer.block < p.steps) {
    const int next = scorer.block + ranges * kPooledWarps;
    if (scorer.block >= seen) {
      scorer.store_unseen();
      scorer.block = next;
      continue;
    }
    page = next < seen ? scorer.page_of(next) : -1;
    mbarrier_wait(own.full(), phase, "keys");
    phase ^= 1;
    float score[Scorer::kTiles][2][4] = {};
    if (scorer.keys != 0) scorer.multiply_stage(0, score);
    const int keys = scorer.keys, block = scorer.block;
    if (next < seen) {
      fence_proxy_async_shared();  // orders the reads of the keys before the next copy
      __syncwarp();
      scorer.block = next;
      scorer.copy_keys(page, own.full());
    }
    scorer.end(score, block, keys);
    scorer.block = next;
  }
}

}  // namespace cumla::blocks
