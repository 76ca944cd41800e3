// SPDX-License-Identifier: Apache-2.0
// Joins the partial results of requests that mla_schedule split, in the order of the parts: the same bits every time.
//
// A task is one query row and one quarter of its 512 columns. `warps_per_task` warps share the partials of a task when
// there are many (small batch), else a warp takes a task alone. A fixed number of CTAs walks over the tasks of all split
// requests, which are often none.
#include "mla_plan.cuh"
#include "ptx/copy.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla {

constexpr int kMergeWarps = 8;
constexpr int kQuarter = kValueDim / 4;
constexpr int kEarly = 4;  // partials a warp loads before it knows their weights

struct MlaMergeParams {
  const SplitRequest* splits;
  const int* num_splits;
  const float* partial_out;
  const float* partial_lse;
  char* out;
  i64 out_stride_batch, out_stride_token, out_stride_head;  // bytes
  float* lse;
  i64 lse_stride_batch, lse_stride_head, lse_stride_token;  // elements
  int batch;
  int parts;
  int tile_rows;   // rows stored of a tile's partial
  int row_tiles;   // tiles of one kv head
  int group_rows;  // query rows of one kv head: q_len * heads_per_group
  int heads_per_group;
  int rows;  // query rows of a request: group_rows * num_kv_heads
  int most_splits;  // records that exist
  int warps_per_task;
  int out_is_float;
};

// A record as the schedule makes them: a plan that was never updated holds anything.
__device__ __forceinline__ bool sane_split(const MlaMergeParams& p, const SplitRequest& split) {
  return split.request >= 0 && split.request < p.batch && split.first_part >= 0 &&
         split.first_part <= split.last_part && split.last_part < p.parts && (split.first_slot & ~1) == 0;
}

// One task of one split request, by `warps_per_task` warps; all warps of the CTA come here together.
template <typename T>
__device__ __forceinline__ void merge_task(const MlaMergeParams& p, const SplitRequest& split, int task, int helper,
                                           float4 (&shared_sums)[kMergeWarps][32]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = task / 4, column = (task % 4) * kQuarter + lane * 4;
  const bool active = row < p.rows;

  const int kv_head = row / p.group_rows, group_row = row % p.group_rows;
  const int tile = kv_head * p.row_tiles + group_row / kRowTile, tile_row = group_row % kRowTile;
  const int partials = split.last_part - split.first_part + 1;
  // Row number of partial i; that of the first part may be in its second slot.
  const int first_row = static_cast<int>(partial_index(tile, split.first_part, 0, p.parts, p.tile_rows)) + tile_row;
  auto index_of = [&](int i) {
    return first_row + p.tile_rows * (i == 0 ? split.first_slot : 2 * i);
  };

  // Each helper sums a contiguous range of the partials; all know the sum of all weights. The first partials are
  // loaded before the weights are known.
  const int share = (partials + p.warps_per_task - 1) / p.warps_per_task;
  const int begin = helper * share, end = min(begin + share, partials);
  auto load = [&](int i) {
    return *reinterpret_cast<const float4*>(p.partial_out + static_cast<i64>(index_of(i)) * kValueDim + column);
  };
  float maximum = -kInfinity, weight_sum = 0.0f;
  float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
  if (active) {
    float4 early[kEarly];
#pragma unroll
    for (int k = 0; k < kEarly; ++k)
      early[k] = begin + k < end ? load(begin + k) : float4{0.0f, 0.0f, 0.0f, 0.0f};

    const float first_lse = lane < partials ? p.partial_lse[index_of(lane)] : -kInfinity;
    maximum = first_lse;
    for (int i = lane + 32; i < partials; i += 32) maximum = fmaxf(maximum, p.partial_lse[index_of(i)]);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
      maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, offset));
    const float reference = maximum == -kInfinity ? 0.0f : maximum;

    auto accumulate = [&](float weight, const float4& v) {
      sum.x += weight * v.x;
      sum.y += weight * v.y;
      sum.z += weight * v.z;
      sum.w += weight * v.w;
    };
    for (int base = 0; base < partials; base += 32) {
      const int i = base + lane;
      const float lse = base == 0 ? first_lse : i < partials ? p.partial_lse[index_of(i)] : -kInfinity;
      const float weight = exp2_approx(lse - reference);
      float group_sum = weight;
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2)
        group_sum += __shfl_xor_sync(0xffffffffu, group_sum, offset);
      weight_sum += group_sum;
#pragma unroll
      for (int k = 0; k < kEarly; ++k) {
        const float w = __shfl_sync(0xffffffffu, weight, (begin + k) % 32);
        if (begin + k < end && (begin + k) / 32 * 32 == base) accumulate(w, early[k]);
      }
      const int from = max(begin + kEarly, base), to = min(end, base + 32);
#pragma unroll 4
      for (int k = from; k < to; ++k) accumulate(__shfl_sync(0xffffffffu, weight, k - base), load(k));
    }
  }
  if (p.warps_per_task > 1) {
    shared_sums[warp][lane] = sum;
    __syncthreads();
    for (int i = 1; helper == 0 && i < p.warps_per_task; ++i) {
      const float4 v = shared_sums[warp + i][lane];
      sum.x += v.x;
      sum.y += v.y;
      sum.z += v.z;
      sum.w += v.w;
    }
    __syncthreads();  // the next task writes there
  }
  if (!active || helper > 0) return;

  const float scale = weight_sum == 0.0f ? 0.0f : 1.0f / weight_sum;
  const int token = group_row / p.heads_per_group;
  const int head = kv_head * p.heads_per_group + group_row % p.heads_per_group;
  char* out = p.out + split.request * p.out_stride_batch + token * p.out_stride_token + head * p.out_stride_head;
  if (p.out_is_float) {
    float* destination = reinterpret_cast<float*>(out) + column;
    store_global_float2(destination, sum.x * scale, sum.y * scale);
    store_global_float2(destination + 2, sum.z * scale, sum.w * scale);
  } else {
    store_global_8(out + column * 2, pack_pair<T>(sum.x * scale, sum.y * scale),
                   pack_pair<T>(sum.z * scale, sum.w * scale));
  }
  if (column == 0)
    p.lse[split.request * p.lse_stride_batch + head * p.lse_stride_head + token * p.lse_stride_token] =
        weight_sum == 0.0f ? kInfinity : (maximum + log2_approx(weight_sum)) * kLn2;
}

template <typename T>
__device__ void mla_merge(const MlaMergeParams& p) {
  __shared__ float4 shared_sums[kMergeWarps][32];

  grid_dependency_launch();
  grid_dependency_wait();

  const int warp = threadIdx.x / 32;
  const int tasks_at_once = kMergeWarps / p.warps_per_task;
  const int steps = (4 * p.rows + tasks_at_once - 1) / tasks_at_once;  // of one request
  const int splits = min(*p.num_splits, p.most_splits);
  for (i64 step = blockIdx.x; step < static_cast<i64>(p.most_splits) * steps; step += gridDim.x) {
    const SplitRequest split = p.splits[step / steps];  // together with their number, and then perhaps of no use
    if (step >= static_cast<i64>(splits) * steps) return;
    if (!sane_split(p, split)) return;
    const int task = static_cast<int>(step % steps) * tasks_at_once + warp / p.warps_per_task;
    merge_task<T>(p, split, task, warp % p.warps_per_task, shared_sums);
  }
}

}  // namespace cumla
