// SPDX-License-Identifier: Apache-2.0
// Selects blocks: forced ones, and those with the largest scores.
//
// The first init_blocks and the last local_blocks of the visible blocks are forced. The others are candidates. A row of
// few candidates is selected at once, of more by sparse/top_k, with a launch before and one after it.
//
// grid = (rows / 4), 128 threads. A warp has a row.
//
// Roles and time line of a warp:
//   few candidates    load scores as keys, 32 neighbours at once | the k-th largest key, a bit at a time | store
//   before top_k      store begin and number of candidates
//   after top_k       store the forced first blocks, the selected ones, the forced last ones, and -1
// Keys are unsigned numbers in the order of scores. NaN is the largest, -0 equals 0, and 0 is no score.
// Barriers: none. Warps share nothing.
// Budget: 32 registers per thread; with few candidates 32 or 128 for keys, and as many as 64 others. No shared memory.
#include "split/division.cuh"
#include "ptx/convert.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

using namespace ptx;
using namespace split;

constexpr int kSelectThreads = 128;
constexpr int kSelectWarps = kSelectThreads / 32;

// Strides are in elements.
struct RowsOfBlocks {
  const int* visible;  // [tokens]: blocks that each query token sees
  i64 visible_stride;
  int* out;  // [tokens, groups, k]
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

struct SelectBlocksParams {
  RowsOfBlocks of;
  int* starts;          // [rows]: the first candidate of each row of scores
  int* lengths;         // [rows]: candidates
  const int* selected;  // [rows, most]: of top_k, ascending; null: there are none
  const int* counts;    // [rows]
  int is_before;        // top_k
};

struct ChooseBlocksParams {
  RowsOfBlocks of;
  const char* scores;  // [tokens, groups, width]; strides are in bytes
  i64 scores_stride_token, scores_stride_group;
};

// A row: visible blocks, and how many of them are forced.
struct RowOfBlocks {
  int token, group, visible, init, local;

  __device__ __forceinline__ RowOfBlocks(const RowsOfBlocks& p, int row) {
    const int major = quotient(row, p.by_minor), rest = row - major * p.minor;
    token = p.is_group_major ? rest : major;
    group = p.is_group_major ? major : rest;
    visible = min(max(p.visible[token * p.visible_stride], 0), p.width);
    init = min(p.init_blocks, visible);
    local = min(p.local_blocks, visible - init);
  }
  __device__ __forceinline__ int candidates() const { return visible - init - local; }
  __device__ __forceinline__ int* out(const RowsOfBlocks& p) const {
    return p.out + token * p.out_stride_token + group * p.out_stride_group;
  }
};

__device__ __forceinline__ void select_blocks(const SelectBlocksParams& params) {
  const RowsOfBlocks& p = params.of;
  grid_dependency_launch();
  grid_dependency_wait();
  const int index = blockIdx.x * kSelectWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (index >= p.rows) return;
  const RowOfBlocks row(p, index);
  if (params.is_before) {
    if (lane == 0) {
      params.starts[index] = row.init;
      params.lengths[index] = row.candidates();
    }
    return;
  }
  const int found = params.selected == nullptr ? 0 : min(max(params.counts[index], 0), p.most);
  int* const out = row.out(p);
  for (int i = lane; i < p.k; i += 32) {
    const int of_selected = i - row.init, of_local = of_selected - found;
    int block = -1;
    if (of_selected < 0)
      block = i;
    else if (of_local < 0)  // counted from the row's start
      block = row.init + params.selected[static_cast<i64>(index) * p.most + of_selected];
    else if (of_local < row.local)
      block = row.visible - row.local + of_local;
    out[i] = block;
  }
}

template <typename Element>
constexpr bool kIsFp32 = false;
template <>
constexpr bool kIsFp32<Fp32> = true;

template <typename Element>
__device__ __forceinline__ u32 key_at(const char* scores, int i) {
  u32 bits;
  if constexpr (kIsFp32<Element>)
    bits = reinterpret_cast<const u32*>(scores)[i];
  else
    bits = __float_as_uint(unpack_pair<Element>(reinterpret_cast<const unsigned short*>(scores)[i]).x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0xffffffffu;  // NaN
  if (bits == 0x80000000u) bits = 0;
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// Lane i of a warp has every 32nd candidate from i on.
template <int kKeys>
struct KeysOfRow {
  u32 keys[kKeys];

  __device__ __forceinline__ int at_least(u32 key) const {
    int count = 0;
#pragma unroll
    for (int j = 0; j < kKeys; ++j) count += keys[j] >= key;
    return __reduce_add_sync(0xffffffffu, count);
  }

  // The largest number that at least `most` of more keys reach.
  __device__ __forceinline__ u32 threshold(int most) const {
    u32 least = 0;
    for (u32 bit = 1u << 31; bit != 0; bit >>= 1) {
      const int count = at_least(least | bit);
      if (count >= most) least |= bit;
      if (count == most) break;  // which are then those to select
    }
    return least;
  }
};

template <typename Element, int kKeys>
__device__ __forceinline__ void select_blocks(const ChooseBlocksParams& params) {
  const RowsOfBlocks& p = params.of;
  grid_dependency_launch();
  grid_dependency_wait();
  const int index = blockIdx.x * kSelectWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (index >= p.rows) return;
  const RowOfBlocks row(p, index);
  const int candidates = row.candidates(), end = row.init + candidates;
  const char* const scores =
      params.scores + row.token * params.scores_stride_token + row.group * params.scores_stride_group;
  KeysOfRow<kKeys> of;
#pragma unroll
  for (int j = 0; j < kKeys; ++j) {
    const int block = row.init + j * 32 + lane;
    of.keys[j] = block < end ? key_at<Element>(scores, block) : 0;
  }
  const u32 least = candidates > p.most ? of.threshold(p.most) : 0;
  int equal = least == 0 ? 0 : p.most - (least == 0xffffffffu ? 0 : of.at_least(least + 1));  // to select, the lowest
  int* const out = row.out(p);
  for (int i = lane; i < row.init; i += 32) out[i] = i;
  int place = row.init;
  const u32 before = (1u << lane) - 1;
#pragma unroll
  for (int j = 0; j < kKeys; ++j) {
    if (j * 32 >= candidates) continue;
    const u32 key = of.keys[j], equals = __ballot_sync(0xffffffffu, key == least && least != 0);
    const bool is_selected = key > least || ((equals >> lane & 1) != 0 && __popc(equals & before) < equal);
    equal = max(equal - __popc(equals), 0);
    const u32 selected = __ballot_sync(0xffffffffu, is_selected);
    if (is_selected) out[place + __popc(selected & before)] = row.init + j * 32 + lane;
    place += __popc(selected);
  }
  for (int i = lane; i < row.local; i += 32) out[place + i] = row.visible - row.local + i;
  for (int i = place + row.local + lane; i < p.k; i += 32) out[i] = -1;
}

}  // namespace cumla::blocks
