// SPDX-License-Identifier: Apache-2.0
// Merges partial attention results: the average of their outputs, weighted by the exponentials of their log-sum-exps.
//
// A row (one head of one token) belongs to a group of 1 to 32 lanes of one warp, so that a warp barrier is enough when
// the result replaces an input. What a lane takes, weights, results of other GPUs: docs/kernels/append-and-merge.md.
//
// Registers: 32 of loads in flight, 16 or 32 of sums; at most 96 in all, so that ten blocks fit on a multiprocessor,
// and 640 threads x 8 loads x 16 B = 80 KiB are in flight there. Memory needs about 40.
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla {

using namespace ptx;

constexpr int kMergeThreads = 64;
constexpr int kColumnsOfFew = 4, kColumnsOfMany = 2;  // of 16 bytes, of a lane, at once
constexpr int kFew = 2;                               // partial results
constexpr int kLoads = 8;                             // of 16 bytes, that a lane begins together
constexpr int kMostPartials = 60;  // of one launch: the parameters of a kernel are at most 4096 bytes
constexpr int kMostRanks = 8;

// An output (batch, token, head, head_dim) and its log-sum-exp; strides in bytes, of batch, token and head.
struct AttentionState {
  char* out;
  i64 out_strides[3];
  char* lse;
  i64 lse_strides[3];
};

enum OutType : int { kOutFloat32, kOutBfloat16, kOutFloat16 };

struct MergeStatesParams {
  AttentionState result;
  AttentionState carried;  // float32, what earlier launches have merged; out is null in the first
  i64 rows;                // batch x tokens x heads
  int tokens;
  int heads;
  int columns;     // of 16 bytes in a row of a partial result
  int lanes_log2;  // of a group
  int count;       // of partial results
  OutType out_type;
  float to_log2;    // from the base of the log-sum-exps
  float from_log2;  // and back
  int ranks;  // that wait for one another, or 0
  int rank;
  AttentionState partials[kMostPartials];
  u32* arrivals[kMostRanks];  // of each rank: for each block and each rank the number of times that it has come
  i64 timeout;                // nanoseconds
};

template <typename T>
constexpr int kElements = 8;  // in 16 bytes
template <>
constexpr int kElements<Fp32> = 4;

template <typename T>
__device__ __forceinline__ void add_weighted(float (&sum)[kElements<T>], const uint4& packed, float weight) {
  const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack_pair<T>(words[i]);
    sum[2 * i] += weight * pair.x;
    sum[2 * i + 1] += weight * pair.y;
  }
}

template <>
__device__ __forceinline__ void add_weighted<Fp32>(float (&sum)[4], const uint4& packed, float weight) {
  const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] += weight * __uint_as_float(words[i]);
}

template <typename T, int kCount>
__device__ __forceinline__ void store_16_bit(char* destination, const float (&v)[kCount]) {
  u32 words[kCount / 2];
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) words[i] = pack_pair<T>(v[2 * i], v[2 * i + 1]);
  if constexpr (kCount == 8) {
    *reinterpret_cast<uint4*>(destination) = {words[0], words[1], words[2], words[3]};
  } else {
    *reinterpret_cast<uint2*>(destination) = {words[0], words[1]};
  }
}

template <int kCount>
__device__ __forceinline__ void store_column(char* row, int column, OutType type, const float (&v)[kCount]) {
  if (type == kOutFloat32) {
    float4* const destination = reinterpret_cast<float4*>(row) + column * (kCount / 4);
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) destination[i] = {v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]};
  } else if (type == kOutBfloat16) {
    store_16_bit<Bf16>(row + column * (2 * kCount), v);
  } else {
    store_16_bit<Fp16>(row + column * (2 * kCount), v);
  }
}

// Where a row lies in the arrays of a state.
struct StateRow {
  u32 batch, token, head;  // unsigned: half as many instructions to multiply by strides

  __device__ __forceinline__ StateRow(u32 batch, u32 token, u32 head) : batch(batch), token(token), head(head) {}
  __device__ __forceinline__ StateRow(const MergeStatesParams& p, i64 row) {
    const i64 token_row = divide(row, p.heads);
    batch = static_cast<u32>(divide(token_row, p.tokens));
    head = static_cast<u32>(row - token_row * p.heads);
    token = static_cast<u32>(token_row - static_cast<i64>(batch) * p.tokens);
  }
  // One whose addresses are computed where they are needed: hoisted out of a loop they cost registers and, where
  // nothing is carried, all their instructions.
  __device__ __forceinline__ StateRow late() const { return {copy_of(batch), copy_of(token), copy_of(head)}; }
  __device__ __forceinline__ char* out(const AttentionState& of) const { return of.out + offset(of.out_strides); }
  __device__ __forceinline__ float* lse(const AttentionState& of) const {
    return reinterpret_cast<float*>(of.lse + offset(of.lse_strides));
  }

 private:
  __device__ __forceinline__ i64 offset(const i64 (&strides)[3]) const {
    return batch * strides[0] + token * strides[1] + head * strides[2];
  }
  __device__ __forceinline__ static i64 divide(i64 numerator, int denominator) {
    if (numerator >> 32 == 0) return static_cast<u32>(numerator) / static_cast<u32>(denominator);  // five times as fast
    return numerator / denominator;
  }
};

__device__ __forceinline__ bool is_empty(float lse) { return fabsf(lse) == kInfinity; }

// What one lane has added up: its columns of a row, and the weights, relative to the largest log-sum-exp so far. A NaN
// among the log-sum-exps stays one.
template <typename T, int kColumns>
struct Sum {
  float v[kColumns][kElements<T>] = {};
  float weight = 0.0f, maximum = -kInfinity;

  __device__ __forceinline__ void raise(float next, float to_log2) {
    const float factor = weight_of(maximum, next, to_log2);
    maximum = next;
    if (weight == 0.0f) return;  // nothing has been added
    weight *= factor;
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
#pragma unroll
      for (int i = 0; i < kElements<T>; ++i) v[c][i] *= factor;
  }
  // Nothing for an empty result. The difference first: it is exact where it counts.
  __device__ __forceinline__ static float weight_of(float lse, float maximum, float to_log2) {
    return is_empty(lse) ? 0.0f : exp2_approx((lse - maximum) * to_log2);
  }
};

template <typename T, int kColumns>
__device__ __forceinline__ void start_from_carried(Sum<T, kColumns>& sum, const MergeStatesParams& p,
                                                   const StateRow& place,
                                                   const int (&column)[kColumns]) {
  const float lse = *place.lse(p.carried);
  if (is_empty(lse)) return;
  sum.maximum = lse;
  sum.weight = 1.0f;
  const float4* const row = reinterpret_cast<const float4*>(place.out(p.carried));
  constexpr int kQuads = kElements<T> / 4;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    if (column[c] >= p.columns) continue;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const float4 quad = row[column[c] * kQuads + i];
      sum.v[c][4 * i] = quad.x;
      sum.v[c][4 * i + 1] = quad.y;
      sum.v[c][4 * i + 2] = quad.z;
      sum.v[c][4 * i + 3] = quad.w;
    }
  }
}

template <typename T, int kColumns>
__device__ __forceinline__ void add_partials(Sum<T, kColumns>& sum, const MergeStatesParams& p, const StateRow& place,
                                             const int (&column)[kColumns]) {
  constexpr int kAtOnce = kLoads / kColumns;
#pragma unroll 1
  for (int first = 0; first < p.count; first += kAtOnce) {
    uint4 loaded[kAtOnce][kColumns] = {};
    float lse[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      lse[k] = -kInfinity;
      if (first + k >= p.count) continue;
      const AttentionState& partial = p.partials[first + k];
      lse[k] = *place.lse(partial);
      const uint4* const row = reinterpret_cast<const uint4*>(place.out(partial));
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        if (column[c] < p.columns) loaded[k][c] = load_global_16(row + column[c]);
    }
    float next = sum.maximum;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      if (!is_empty(lse[k])) next = fmaxf(next, lse[k]);
    sum.raise(next, p.to_log2);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const float weight = sum.weight_of(lse[k], next, p.to_log2);
      if (weight == 0.0f) continue;  // what counts for nothing may be NaN
      sum.weight += weight;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) add_weighted<T>(sum.v[c], loaded[k][c], weight);
    }
  }
}

template <typename T, int kColumns>
__device__ __forceinline__ float merge_row(const MergeStatesParams& p, const StateRow& place, int lane, int lanes) {
  float lse = -kInfinity;
#pragma unroll 1
  for (int first = lane; first - lane < p.columns; first += kColumns * lanes) {
    int column[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) column[c] = first + c * lanes;
    Sum<T, kColumns> sum;
    if (p.carried.out != nullptr) start_from_carried(sum, p, place.late(), column);
    add_partials(sum, p, place, column);
    const bool empty = sum.weight == 0.0f;
    const float factor = empty ? 0.0f : 1.0f / sum.weight;
    char* const out = place.late().out(p.result);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int i = 0; i < kElements<T>; ++i) sum.v[c][i] *= factor;
      if (column[c] < p.columns) store_column(out, column[c], p.out_type, sum.v[c]);
    }
    lse = empty ? -kInfinity : sum.maximum + log2_approx(sum.weight) * p.from_log2;
  }
  return lse;
}

// Waits until this block has come on all ranks, as many times as here: what they wrote before can be read then.
// Numbers wrap around. The whole block takes part.
__device__ __forceinline__ void wait_for_ranks(const MergeStatesParams& p) {
  const int from = threadIdx.x;
  const int place = blockIdx.x * p.ranks;
  u32* const own = p.arrivals[p.rank] + place;
  u32 turn = 0;
  if (from < p.ranks) {
    turn = own[p.rank] + 1;  // on its way while the others are told
    if (from != p.rank) {
      add_release_system(p.arrivals[from] + place + p.rank, 1);
      u64 begin = 0;
      for (u32 looks = 1; static_cast<int>(load_acquire_system(own + from) - turn) < 0; ++looks) {
        if (looks % 1024 != 0) continue;  // the clock is slow
        const u64 now = nanoseconds();
        if (begin == 0) begin = now;
        if (p.timeout > 0 && now - begin > static_cast<u64>(p.timeout)) __trap();
      }
    }
  }
  __syncthreads();
  if (from == p.rank) own[from] = turn;
}

template <typename T>
__device__ __forceinline__ void merge_states(const MergeStatesParams& p) {
  const int lanes = 1 << p.lanes_log2;
  const int lane = threadIdx.x & (lanes - 1);
  const i64 row = (static_cast<i64>(blockIdx.x) * kMergeThreads + threadIdx.x) >> p.lanes_log2;
  if (p.ranks != 0) {
    grid_dependency_wait();
    wait_for_ranks(p);
  }
  grid_dependency_launch();  // not before: what follows could take the room of a merge for which other ranks wait
  if (row >= p.rows) return;
  const StateRow place(p, row);
  grid_dependency_wait();
  const float lse = p.count > kFew ? merge_row<T, kColumnsOfMany>(p, place, lane, lanes)
                                   : merge_row<T, kColumnsOfFew>(p, place, lane, lanes);
  __syncwarp();  // all have read the log-sum-exps, one of which the result may replace
  if (lane == 0) *place.lse(p.result) = lse;
}

}  // namespace cumla
