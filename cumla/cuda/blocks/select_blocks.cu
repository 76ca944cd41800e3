// SPDX-License-Identifier: Apache-2.0
// Selects blocks: forced ones, and those with the largest scores.
//
// The first init_blocks and the last local_blocks of the visible blocks are forced. The others are candidates. A row of
// few candidates is selected at once, of more by sparse/top_k, with a launch before and one after it.
//
// few candidates: grid = (rows), 32, 128 or 512 threads. A CTA has a row, and a thread eight of its candidates: a warp
// with more of them would have longer code, and code that runs for the first time is slow.
//   all      load scores, and how many blocks are visible | B | the largest key, B | the k-th largest key, a bit at a
//            time: count, B, add up
//            | count what is selected | B | store. A warp alone needs only the first B
// around top_k: grid = (rows / 4), 128 threads. A warp has a row.
//   before   store begin and number of candidates
//   after    store the forced first blocks, the selected ones, the forced last ones, and -1
//
// Roles and time line: as above; B is a barrier of the CTA (__syncthreads).
// Keys are unsigned numbers in the order of scores. NaN is the largest, -0 equals 0, and 0 is no score.
// Barriers guard numbers of warps; the counts of two bits lie apart. There are no mbarriers.
// Budget: 40 registers per thread; shared memory for three numbers per warp.
#include "split/division.cuh"
#include "split/scan.cuh"
#include "ptx/convert.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::blocks {

using namespace ptx;
using namespace split;

constexpr int kSelectThreads = 128;
constexpr int kSelectWarps = kSelectThreads / 32;
constexpr int kKeysOfThread = 8;

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
  }
  __device__ __forceinline__ int load_visible(const RowsOfBlocks& p) const {
    return p.visible[token * p.visible_stride];
  }
  __device__ __forceinline__ void see(const RowsOfBlocks& p, int number) {
    visible = min(max(number, 0), p.width);
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
  RowOfBlocks row(p, index);
  row.see(p, row.load_visible(p));
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
__device__ __forceinline__ u32 bits_at(const char* scores, int i) {
  if constexpr (kIsFp32<Element>)
    return reinterpret_cast<const u32*>(scores)[i];
  else
    return reinterpret_cast<const unsigned short*>(scores)[i];
}

// Without branches, so that all loads of a lane come before the first use.
template <typename Element>
__device__ __forceinline__ u32 key_of(u32 bits) {
  if constexpr (!kIsFp32<Element>) bits = __float_as_uint(unpack_pair<Element>(bits).x);
  bits = bits == 0x80000000u ? 0 : bits;
  const u32 key = bits ^ ((bits & 0x80000000u) != 0 ? 0xffffffffu : 0x80000000u);
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0xffffffffu : key;  // NaN is the largest
}

// Each thread has kKeysOfThread neighbouring candidates.
template <int kThreads>
struct KeysOfRow {
  static constexpr int kWarps = kThreads / 32;
  u32 keys[kKeysOfThread];

  // The sum of a number over all threads. `sums` has two rows, of which calls take turns.
  __device__ __forceinline__ static int sum(int value, int* sums) {
    const int lane = threadIdx.x % 32;
    value = __reduce_add_sync(0xffffffffu, value);
    if constexpr (kWarps == 1) return value;
    if (lane == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    return __reduce_add_sync(0xffffffffu, lane < kWarps ? sums[lane] : 0);
  }
  // The largest key of all threads.
  __device__ __forceinline__ u32 largest(int* of_warps) const {
    const int lane = threadIdx.x % 32;
    u32 value = 0;
#pragma unroll
    for (int j = 0; j < kKeysOfThread; ++j) value = max(value, keys[j]);
    value = __reduce_max_sync(0xffffffffu, value);
    if constexpr (kWarps == 1) return value;
    if (lane == 0) of_warps[threadIdx.x / 32] = value;
    __syncthreads();
    return __reduce_max_sync(0xffffffffu, lane < kWarps ? static_cast<u32>(of_warps[lane]) : 0);
  }
  __device__ __forceinline__ int at_least(u32 key) const {
    int count = 0;
#pragma unroll
    for (int j = 0; j < kKeysOfThread; ++j) count += keys[j] >= key;
    return count;
  }
  // The largest number that at least `most` of more keys reach. Numbers that no key reaches take no turn.
  __device__ __forceinline__ u32 threshold(int most, int (&sums)[2][kWarps]) const {
    const u32 last = largest(sums[0]);
    u32 least = 0;
    int turn = 0;
#pragma unroll 1
    for (int bit = 31; bit >= 0; --bit) {
      const u32 next = least | 1u << bit;
      if (next > last) continue;
      turn ^= 1;
      const int count = sum(at_least(next), sums[turn]);
      if (count >= most) least = next;
      if (count == most) break;  // which are then those to select
    }
    return least;
  }
};

template <typename Element, int kThreads>
__device__ __forceinline__ void select_blocks(const ChooseBlocksParams& params) {
  using Keys = KeysOfRow<kThreads>;
  __shared__ int sums[2][Keys::kWarps], of_warps[Keys::kWarps], visible;
  const RowsOfBlocks& p = params.of;
  grid_dependency_launch();
  grid_dependency_wait();
  RowOfBlocks row(p, blockIdx.x);
  const char* const scores =
      params.scores + row.token * params.scores_stride_token + row.group * params.scores_stride_group;
  const int first = threadIdx.x * kKeysOfThread;
  Keys of;
#pragma unroll
  for (int j = 0; j < kKeysOfThread; ++j) of.keys[j] = 0;
  if (p.width > 0) {  // before it is known which are candidates
#pragma unroll
    for (int j = 0; j < kKeysOfThread; ++j)
      of.keys[j] = bits_at<Element>(scores, min(p.init_blocks + first + j, p.width - 1));
  }
  if (threadIdx.x == 0) visible = row.load_visible(p);  // one for all, or they might take different ways
  __syncthreads();
  row.see(p, visible);
  const int candidates = row.candidates();
#pragma unroll
  for (int j = 0; j < kKeysOfThread; ++j) of.keys[j] = first + j < candidates ? key_of<Element>(of.keys[j]) : 0;
  const bool chooses = candidates > p.most;
  const u32 least = chooses ? of.threshold(p.most, sums) : 1;

  // Candidates above the threshold are selected, and the lowest of those equal to it. Both are counted in one number.
  const int more = least == 0xffffffffu ? 0 : of.at_least(least + 1), equal = of.at_least(least) - more;
  const int own = more | equal << 16, inclusive = warp_inclusive_sum(own);
  int before = inclusive - own, all = 0;
  if constexpr (Keys::kWarps == 1) {
    all = __shfl_sync(0xffffffffu, inclusive, 31);
  } else {
    if (threadIdx.x % 32 == 31) of_warps[threadIdx.x / 32] = inclusive;
    __syncthreads();
#pragma unroll 1
    for (int w = 0; w < Keys::kWarps; ++w) {
      before += w < static_cast<int>(threadIdx.x / 32) ? of_warps[w] : 0;
      all += of_warps[w];
    }
  }
  const int most = chooses ? p.most : candidates, quota = most - (all & 0xffff);  // of those equal to the threshold
  int equals = before >> 16, place = row.init + (before & 0xffff) + min(equals, quota);
  int* const out = row.out(p);
#pragma unroll
  for (int j = 0; j < kKeysOfThread; ++j) {
    const bool is_equal = of.keys[j] == least;
    const bool is_selected = of.keys[j] > least || (is_equal && equals < quota);
    if (is_selected) out[place] = row.init + first + j;
    equals += is_equal;
    place += is_selected;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < p.k; i += kThreads) {
    const int after = i - row.init - most;
    if (i < row.init)
      out[i] = i;
    else if (after >= 0)
      out[i] = after < row.local ? row.visible - row.local + after : -1;
  }
}

}  // namespace cumla::blocks
