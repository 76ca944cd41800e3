// SPDX-License-Identifier: Apache-2.0
// Scores of blocks, as block_scores_few.cu, for few blocks: a CTA for each, so no warp looks for its share. Keys go
// from memory to registers.
//
// grid = requests x blocks, visible or not, of kWarps warps. A warp has 16 keys at once.
//
// Roles and time line:
//   all      page, length, query rows | for each 16 keys of the warp: load, products, maxima | maxima over lanes | B
//   a thread for each query row: maximum over warps, store
// Barriers: one __syncthreads, B, guards the maxima of warps. There are no mbarriers.
// Registers: 72, of e4m3 60
#include "blocks/block_scores_few/layout.cuh"
#include "blocks/block_scores_few/score.cuh"
#include "blocks/block_scores_few/share.cuh"
#include "ptx/copy.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

using namespace ptx;

// 16 keys of a block. Rows beyond its end are loaded as its last one.
template <typename T, typename Layout>
__device__ __forceinline__ void score_keys(FewScorer<T, Layout>& scorer, const char* base, i64 stride_row) {
  constexpr int kLoads = Layout::kRow / 64, kProducts = Layout::kE4m3 ? 4 : 2;
  uint4 words[2][kLoads];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = min(scorer.from + scorer.lane / 4 + 8 * r, scorer.keys - 1);
    const char* const source = base + row * stride_row + scorer.lane % 4 * 16;
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      words[r][i] = load_global_16(reinterpret_cast<const uint4*>(source + i * 64));
  }
  float score[2][4] = {};
#pragma unroll
  for (int i = 0; i < kLoads; ++i)
#pragma unroll
    for (int k = 0; k < kProducts; ++k) scorer.multiply(words, i, k, score[k % 2]);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int tokens = scorer.tokens - scorer.hidden[j] - scorer.block * scorer.p.block_size;
    const int seen = min(scorer.keys, tokens) - scorer.from - scorer.lane / 4;
    if (seen > 0) scorer.most[j] = scorer.larger(scorer.most[j], score[0][j] + score[1][j]);
    if (seen > 8) scorer.most[j] = scorer.larger(scorer.most[j], score[0][2 + j] + score[1][2 + j]);
  }
}

template <typename T, bool kE4m3, int kWarps>
__device__ __forceinline__ void block_scores_each(const BlockScoresFewParams& p) {
  using Layout = ScoresFewLayout<kE4m3, kWarps, 16, 1>;
  __shared__ float most[kWarps][kFewScoreRows];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Layout shared = {0, 0};  // there are no rings
  FewScorer<T, Layout> scorer(p, shared);
  scorer.request = quotient(blockIdx.x, p.by_width);
  scorer.block = blockIdx.x - scorer.request * p.width;
  const int in_page = scorer.block - quotient(scorer.block, p.by_blocks_per_page) * p.blocks_per_page;
  grid_dependency_launch();
  grid_dependency_wait();
  const int page =
      p.block_table[scorer.request * p.block_table_stride + quotient(scorer.block, p.by_blocks_per_page)];
  const int length = p.kv_lens[scorer.request * p.kv_lens_stride];
  __syncwarp();  // none of these loads waits for another
  scorer.load_query();
  scorer.tokens = tokens_in(p, length);
  const bool exists = static_cast<u32>(page) < static_cast<u32>(p.num_pages);
  scorer.keys = exists ? min(p.block_size, scorer.tokens - scorer.block * p.block_size) : 0;
  const char* const base = p.keys + page * p.keys_stride_page + in_page * p.block_size * p.keys_stride_row;
#pragma unroll 1
  for (scorer.from = warp * 16; scorer.from < scorer.keys; scorer.from += kWarps * 16)
    score_keys<T>(scorer, base, p.keys_stride_row);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int apart = 4; apart < 32; apart *= 2)
      scorer.most[j] = scorer.larger(scorer.most[j], __shfl_xor_sync(0xffffffffu, scorer.most[j], apart));
    if (lane < 4) most[warp][lane * 2 + j] = scorer.most[j];
  }
  __syncthreads();
  const int row = threadIdx.x;
  if (row >= p.rows) return;
  float value = most[0][row];
#pragma unroll
  for (int i = 1; i < kWarps; ++i) value = scorer.larger(value, most[i][row]);
  p.out[scorer.request * p.out_stride_request + offset_of_row(p, row) + scorer.block] = value;
}

}  // namespace cumla::blocks
