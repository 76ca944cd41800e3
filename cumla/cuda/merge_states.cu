// SPDX-License-Identifier: Apache-2.0
// Merges partial attention results: the average of their outputs, weighted by exp(log-sum-exp).
//
// grid = (blocks of 64 threads). A row, one head of one token, belongs to a group of 1 to 32 lanes of one warp.
//
// Time line of a lane:
//   wait for the other ranks, if there are any |
//   load up to 8 x 16 bytes and their log-sum-exps | raise the maximum | add weighted | ... | normalise, store
//
// barrier             who arrives                         who waits               guards
// arrivals[rank]      block b of each other rank, once    one thread per rank,    results in memory of other GPUs
//                     per launch (red.release.sys)        then __syncthreads
// __syncwarp          the lanes of the row                the same                log-sum-exps, which may be replaced
//
// Budget: 32 registers of loads in flight, 16 or 32 of sums, 96 at most, so that 10 blocks fit on an SM: 80 KiB in
// flight. What a lane takes, and why: docs/kernels/append-and-merge.md.
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla {

using namespace ptx;

constexpr int kMergeThreads = 64;
constexpr int kColumnsOfFew = 4, kColumnsOfMany = 2;  // of 16 bytes, per lane
constexpr int kFew = 2;                               // up to this count of partial results a lane takes kColumnsOfFew
constexpr int kLoads = 8;                             // of 16 bytes, that a lane issues together
constexpr int kMostPartials = 60;  // of one launch; parameters of a kernel have at most 4096 bytes
constexpr int kMostRanks = 8;

// An output (batch, token, head, head_dim) and its log-sum-exp. Strides are in bytes: batch, token, head.
struct AttentionState {
  char* out;
  i64 out_strides[3];
  char* lse;
  i64 lse_strides[3];
};

enum OutType : int { kOutFloat32, kOutBfloat16, kOutFloat16 };

struct MergeStatesParams {
  AttentionState result;
  AttentionState carried;  // float32 result of earlier launches; out is null in the first one
  i64 rows;                // batch x tokens x heads
  int tokens;
  int heads;
  int columns;     // of 16 bytes, in a row of a partial result
  int lanes_log2;  // of the lanes of a group
  int count;       // of partial results
  OutType out_type;
  float to_log2;    // converts log-sum-exps to base 2
  float from_log2;  // converts back
  int ranks;  // that wait for one another; 0: none
  int rank;
  AttentionState partials[kMostPartials];
  u32* arrivals[kMostRanks];  // of each rank: per block and rank, how often it has arrived
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

// The indices of a row in the arrays of a state.
struct StateRow {
  u32 batch, token, head;  // unsigned: multiplying by strides takes half the instructions

  __device__ __forceinline__ StateRow(u32 batch, u32 token, u32 head) : batch(batch), token(token), head(head) {}
  __device__ __forceinline__ StateRow(const MergeStatesParams& p, i64 row) {
    const i64 token_row = divide(row, p.heads);
    batch = static_cast<u32>(divide(token_row, p.tokens));
    head = static_cast<u32>(row - token_row * p.heads);
    token = static_cast<u32>(token_row - static_cast<i64>(batch) * p.tokens);
  }
  // A copy whose addresses are computed at their use. Hoisted out of the loop they would cost registers, and
  // instructions even if there is no carried result.
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
    // 32-bit division is much faster
    if (numerator >> 32 == 0) return static_cast<u32>(numerator) / static_cast<u32>(denominator);
    return numerator / denominator;
  }
};

__device__ __forceinline__ bool is_empty(float lse) { return fabsf(lse) == kInfinity; }

// The weighted sum of one lane's columns, relative to the largest log-sum-exp so far. A NaN log-sum-exp makes the
// result NaN.
template <typename T, int kColumns>
struct Sum {
  float v[kColumns][kElements<T>] = {};
  float weight = 0.0f, maximum = -kInfinity;

  __device__ __forceinline__ void raise(float next, float to_log2) {
    const float factor = weight_of(maximum, next, to_log2);
    maximum = next;
    if (weight == 0.0f) return;  // nothing was added yet
    weight *= factor;
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
#pragma unroll
      for (int i = 0; i < kElements<T>; ++i) v[c][i] *= factor;
  }
  // Weight 0 for an empty result. The difference comes first: it is exact if the log-sum-exps are close.
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
      if (weight == 0.0f) continue;  // an output of weight 0 may be NaN
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

// Waits until this block has arrived on all ranks as often as here; then their earlier writes are visible. Counters
// wrap around. The whole block takes part.
__device__ __forceinline__ void wait_for_ranks(const MergeStatesParams& p) {
  const int from = threadIdx.x;
  const int place = blockIdx.x * p.ranks;
  u32* const own = p.arrivals[p.rank] + place;
  u32 turn = 0;
  if (from < p.ranks) {
    turn = own[p.rank] + 1;  // this load overlaps with the arrivals
    if (from != p.rank) {
      add_release_system(p.arrivals[from] + place + p.rank, 1);
      u64 begin = 0;
      for (u32 looks = 1; static_cast<int>(load_acquire_system(own + from) - turn) < 0; ++looks) {
        if (looks % 1024 != 0) continue;  // reading the clock is slow
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
  grid_dependency_launch();  // not earlier: a dependent kernel could take the room of a block that other ranks need
  if (row >= p.rows) return;
  const StateRow place(p, row);
  grid_dependency_wait();
  const float lse = p.count > kFew ? merge_row<T, kColumnsOfMany>(p, place, lane, lanes)
                                   : merge_row<T, kColumnsOfFew>(p, place, lane, lanes);
  __syncwarp();  // all lanes have read the log-sum-exps, one of which the result may replace
  if (lane == 0) *place.lse(p.result) = lse;
}

}  // namespace cumla
