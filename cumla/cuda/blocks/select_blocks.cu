// SPDX-License-Identifier: Apache-2.0
// Before and after sparse/top_k: which blocks of a row are to be selected, and forced blocks with those selected.
//
// The first init_blocks and the last local_blocks of the visible blocks are forced. top_k selects among those between.
//
// grid = (rows / 4), 128 threads. A warp has a row.
//
// Roles and time line of a warp: which blocks are visible | store begin and number of candidates, or: store the forced
// first blocks, the selected ones, the forced last ones and -1
// Barriers: none. Warps share nothing.
// Budget: 32 registers per thread, no shared memory.
#include "split/division.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

using namespace ptx;
using namespace split;

constexpr int kSelectThreads = 128;
constexpr int kSelectWarps = kSelectThreads / 32;

// Strides are in elements.
struct SelectBlocksParams {
  const int* visible;  // [tokens]: blocks that each query token sees
  i64 visible_stride;
  int* starts;     // [rows]: the first candidate of each row of scores
  int* lengths;    // [rows]: candidates
  const int* selected;  // [rows, most]: of top_k, ascending; null: candidates are to be stored
  const int* counts;    // [rows]
  int* out;             // [tokens, groups, k]
  i64 out_stride_token, out_stride_group;
  int rows;
  int width;  // blocks of a row of scores
  int k;
  int most;  // selected ones of a row: k without forced ones
  int init_blocks, local_blocks;
  int minor;           // rows of a token, or of a group: row = major x minor + rest
  int is_group_major;  // major is the group
  Divisor by_minor;
};

__device__ __forceinline__ void select_blocks(const SelectBlocksParams& p) {
  grid_dependency_launch();
  grid_dependency_wait();
  const int row = blockIdx.x * kSelectWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= p.rows) return;
  const int major = quotient(row, p.by_minor), rest = row - major * p.minor;
  const int token = p.is_group_major ? rest : major, group = p.is_group_major ? major : rest;
  const int visible = min(max(p.visible[token * p.visible_stride], 0), p.width);
  const int init = min(p.init_blocks, visible), local = min(p.local_blocks, visible - init);
  if (p.selected == nullptr && p.out == nullptr) {
    if (lane == 0) {
      p.starts[row] = init;
      p.lengths[row] = visible - init - local;
    }
    return;
  }
  const int found = p.selected == nullptr ? 0 : min(max(p.counts[row], 0), p.most);
  int* const out = p.out + token * p.out_stride_token + group * p.out_stride_group;
  for (int i = lane; i < p.k; i += 32) {
    const int of_selected = i - init, of_local = of_selected - found;
    int block = -1;
    if (of_selected < 0)
      block = i;
    else if (of_local < 0)
      block = init + p.selected[static_cast<i64>(row) * p.most + of_selected];  // counted from its start
    else if (of_local < local)
      block = visible - local + of_local;
    out[i] = block;
  }
}

}  // namespace cumla::blocks
