// SPDX-License-Identifier: Apache-2.0
// Scores of blocks, as block_scores_few.cu, a few consecutive blocks of a request for each CTA: no warp looks for its
// share. Keys go from memory to registers.
//
// grid = requests x parts of their blocks, visible or not, of kWarps warps. A warp has 16 keys at once. Other CTAs of
// the multiprocessor load meanwhile.
//
// Roles and time line:
//   all      length, page, query rows | for each block: the next page; for each 16 keys of the warp: load, products,
//            maxima | maxima over lanes | B | a thread for each query row: maximum over warps, store
//   all      -infinity to blocks that are not visible
// Barriers: one __syncthreads a block, B, guards the maxima of warps, which have two places in turn. There are no
// mbarriers.
// Registers: 64, of e4m3 64
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

struct BlockScoresEachParams : BlockScoresFewParams {
  int parts, part_blocks;  // of a request; of a part
  Divisor by_parts;
};

// The page of a block, which may lie behind the request's last one.
__device__ __forceinline__ int page_of(const BlockScoresFewParams& p, const int* pages, int block) {
  return block < p.width ? pages[quotient(block, p.by_blocks_per_page)] : -1;
}

template <typename T, bool kE4m3, int kWarps>
__device__ __forceinline__ void block_scores_each(const BlockScoresEachParams& p) {
  using Layout = ScoresFewLayout<kE4m3, kWarps, 16, 1>;
  __shared__ float most[2][kWarps][kFewScoreRows];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = threadIdx.x;
  const Layout shared = {0, 0};  // there are no rings
  FewScorer<T, Layout> scorer(p, shared);
  scorer.request = quotient(blockIdx.x, p.by_parts);
  const int begin = (blockIdx.x - scorer.request * p.parts) * p.part_blocks;
  const int end = min(begin + p.part_blocks, p.width);
  grid_dependency_launch();
  grid_dependency_wait();
  const int* const pages = p.block_table + scorer.request * p.block_table_stride;
  int page = page_of(p, pages, begin);
  const int length = p.kv_lens[scorer.request * p.kv_lens_stride];
  __syncwarp();  // none of these loads waits for another
  scorer.load_query();
  scorer.tokens = tokens_in(p, length);
  const int visible = min(end, blocks_of(p, scorer.tokens));
  float* const out = p.out + scorer.request * p.out_stride_request;
#pragma unroll 1
  for (scorer.block = begin; scorer.block < visible; ++scorer.block) {
    const int block = scorer.block, next = page_of(p, pages, block + 1);
    const bool exists = static_cast<u32>(page) < static_cast<u32>(p.num_pages);
    scorer.keys = exists ? min(p.block_size, scorer.tokens - block * p.block_size) : 0;
    const int in_page = block - quotient(block, p.by_blocks_per_page) * p.blocks_per_page;
    const char* const base = p.keys + page * p.keys_stride_page + in_page * p.block_size * p.keys_stride_row;
    float(&maxima)[kWarps][kFewScoreRows] = most[block - begin & 1];
#pragma unroll 1
    for (scorer.from = warp * 16; scorer.from < scorer.keys; scorer.from += kWarps * 16)
      score_keys<T>(scorer, base, p.keys_stride_row);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int apart = 4; apart < 32; apart *= 2)
        scorer.most[j] = scorer.larger(scorer.most[j], __shfl_xor_sync(0xffffffffu, scorer.most[j], apart));
      if (lane < 4) maxima[warp][lane * 2 + j] = scorer.most[j];
      scorer.most[j] = -kInfinity;
    }
    __syncthreads();
    if (row < p.rows) {
      float value = maxima[0][row];
#pragma unroll
      for (int i = 1; i < kWarps; ++i) value = scorer.larger(value, maxima[i][row]);
      out[offset_of_row(p, row) + block] = value;
    }
    page = next;
  }
#pragma unroll 1
  for (int i = 0; i < p.rows; ++i)
#pragma unroll 1
    for (int block = max(begin, visible) + threadIdx.x; block < end; block += kWarps * 32)
      out[offset_of_row(p, i) + block] = -kInfinity;
}

}  // namespace cumla::blocks
